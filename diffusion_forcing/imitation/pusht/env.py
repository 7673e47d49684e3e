"""Push-T: a disc pushes a T-shaped block onto its outline. Several environments at once, around the simulator of `gym_pusht`.

States are (5,): position of the disc, position of the block, in pixels of 512, and its angle in [0, 2 pi). Actions are (2,): the target
point of the disc for a tenth of a second, clipped to [0, 512], the bounds of `gym_pusht`. Coverage is the share of the outline that the
block covers. An episode ends after a step with a coverage above 0.95, or after 300 steps.

Diffusion Policy (Chi et al., 2023) reports the mean over episodes of the score max_t clip(coverage_t / 0.95, 0, 1), of at most 300 steps
from 50 starts, seeds 100000 to 100049. Its simulator and `gym_pusht` have the same dynamics and place a start alike (the block is moved,
then rotated about its centre of mass, so that it is not where the draw says); they differ in what a seed draws:
- `gym_pusht`: Gymnasium's generator, an angle uniform in [-pi, pi]. This is what `reset(seeds)` does;
- the published evaluation: NumPy's old generator, an angle normal around -pi with a deviation of 2 pi. `reset(seeds, published=True)`.
Positions are whole numbers in both, of the disc in [50, 450), of the block in [100, 400).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

try:
    from gym_pusht.envs.pusht import PushTEnv
except ImportError as error:
    raise ImportError("Push-T needs its simulator, gym-pusht: pip install 'diffusion_forcing[imitation]'") from error

from ...checks import check_counts

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
SIDE = 512.0
STEPS = 300
"""Of an episode, at most."""
THRESHOLD = 0.95
"""Coverage above which an episode has succeeded."""
BARS = ((-60.0, 60.0, 0.0, 30.0), (-15.0, 15.0, 30.0, 120.0))
"""The T's two bars in its own frame: left, right, low and high. They touch and do not overlap."""
AREA = sum((right - left) * (high - low) for left, right, low, high in BARS)


class PushT:
    """`number` environments that are stepped one after another; each stands still once its episode is over.

    seed: of the starts that `reset()` draws when no seeds are given.
    """

    def __init__(self, number: int, seed: int = 0) -> None:
        check_counts(number=number)
        self.number = number
        self.rng = np.random.default_rng(seed)
        self.envs: list[Any] = [PushTEnv(obs_type="state", render_mode="rgb_array") for _ in range(number)]
        self.time = 0
        """Steps since the start."""
        self.coverage = np.zeros(number)
        """(n,), now."""
        self.max_coverage = np.zeros(number)
        """(n,), the largest of this episode so far."""
        self.done = np.ones(number, dtype=bool)
        """(n,), whether each episode is over."""

    def reset(self, seeds: Sequence[int] | NDArray[np.integer] | None = None, *, published: bool = False) -> Array:
        """Begin episodes with seeds (n,), or drawn ones. Returns states (n, 5). published: draw starts as the published evaluation."""
        numbers = self.rng.integers(0, 2**31, self.number).tolist() if seeds is None else [int(seed) for seed in seeds]
        if len(numbers) != self.number:
            raise ValueError(f"each of the {self.number} environments has a seed; got {len(numbers)} seeds")
        if any(not 0 <= seed < 2**32 for seed in numbers):
            raise ValueError(f"seeds are whole numbers from 0 to 2**32 - 1; got {next(s for s in numbers if not 0 <= s < 2**32)}")
        for env, seed in zip(self.envs, numbers, strict=True):
            if published:
                env.reset(options={"reset_to_state": _published(seed)})
            else:
                env.reset(seed=seed)
        return self._started()

    def reset_to(self, states: ArrayLike) -> Array:
        """Begin episodes at rest in states (n, 5), or one (5,) for all. Returns them as the simulator has them, up to rounding."""
        given = np.asarray(states, dtype=float)
        if given.shape not in ((5,), (self.number, 5)):
            raise ValueError(f"states are (5,) or ({self.number}, 5): disc xy, block xy, angle; got shape {given.shape}")
        if not np.isfinite(given).all():
            raise ValueError(f"states are finite; got {given[~np.isfinite(given)][0]}")
        for env, state in zip(self.envs, np.broadcast_to(given, (self.number, 5)), strict=True):
            _place(env, *map(float, state))
        return self._started()

    def step(self, actions: ArrayLike) -> tuple[Array, Array, Bools]:
        """States (n, 5), coverage (n,) and done (n,) after actions (n, 2). Actions of episodes that are over are ignored."""
        points = np.asarray(actions, dtype=float)
        if points.shape != (self.number, 2):
            raise ValueError(f"actions are ({self.number}, 2), a point in pixels for each disc; got shape {points.shape}")
        if self.done.all():
            raise ValueError("all episodes are over; call reset or reset_to")
        if not np.isfinite(points[~self.done]).all():
            i = int(np.flatnonzero(~self.done & ~np.isfinite(points).all(1))[0])
            raise ValueError(f"actions are finite, in [0, {SIDE:g}]; got {points[i].tolist()} for environment {i}")
        self.time += 1
        for i in np.flatnonzero(~self.done).tolist():
            x, y = points[i].clip(0, SIDE).tolist()
            _push(self.envs[i], x, y)
            self.coverage[i] = _coverage(self.envs[i])
        going = ~self.done
        self.max_coverage[going] = np.maximum(self.max_coverage, self.coverage)[going]
        self.done = self.done | (self.coverage > THRESHOLD) | (self.time >= STEPS)
        return self.states, self.coverage.copy(), self.done.copy()

    @property
    def states(self) -> Array:
        """(n, 5), now."""
        return np.array([env.get_obs() for env in self.envs])

    @property
    def score(self) -> Array:
        """(n,), max_coverage / 0.95, at most 1. Its mean over episodes is the benchmark's number."""
        return np.clip(self.max_coverage / THRESHOLD, 0, 1)

    @property
    def success(self) -> Bools:
        """(n,), whether coverage was above 0.95 in this episode."""
        return self.max_coverage > THRESHOLD

    def render(self, i: int = 0, px: int = 96) -> NDArray[np.uint8]:
        """An image (px, px, 3) of environment i, as in the published image data at 96 px."""
        if not 0 <= i < self.number:
            raise IndexError(f"there are {self.number} environments, counted from 0; got {i}")
        check_counts(px=px)
        env = self.envs[i]
        if not hasattr(env, "space"):
            raise ValueError("there is nothing to render yet; call reset or reset_to")
        env.visualization_width = env.visualization_height = px
        image: NDArray[np.uint8] = env.render()
        return image

    def _started(self) -> Array:
        self.time = 0
        self.coverage = np.array([_coverage(env) for env in self.envs])
        self.max_coverage = np.zeros(self.number)
        self.done = np.zeros(self.number, dtype=bool)
        return self.states


def _published(seed: int) -> list[float]:
    """The start that the published evaluation draws from a seed: the order of the draws and the old generator are part of it."""
    old = np.random.RandomState(seed)
    points = [float(old.randint(low, high)) for low, high in ((50, 450), (50, 450), (100, 400), (100, 400))]
    return [*points, float(old.randn() * 2 * math.pi - math.pi)]


def _place(env: Any, x: float, y: float, block_x: float, block_y: float, angle: float) -> None:
    """Start in exactly this state. The simulator rotates a block about its centre of mass after moving it, which is compensated here.

    Moving it once more after a start would not do: where it was first it may have touched a wall or the disc.
    """
    if not hasattr(env, "block"):
        env.reset(seed=0)
    a, b = env.block.center_of_gravity
    cos, sin = math.cos(angle), math.sin(angle)
    moved = [block_x - a + cos * a - sin * b, block_y - b + sin * a + cos * b]
    env.reset(options={"reset_to_state": [x, y, *moved, angle]})


def _push(env: Any, x: float, y: float) -> None:
    """A step of `gym_pusht`, bit for bit, in plain numbers and without its coverage."""
    agent, space, dt = env.agent, env.space, env.dt
    for _ in range(int(1 / (dt * env.control_hz))):
        (at_x, at_y), (v_x, v_y) = agent.position, agent.velocity
        agent.velocity = (
            v_x + (env.k_p * (x - at_x) + env.k_v * (0 - v_x)) * dt,
            v_y + (env.k_p * (y - at_y) + env.k_v * (0 - v_y)) * dt,
        )
        space.step(dt)


def _coverage(env: Any) -> float:
    """The share of the goal's area under the block: its bars in the goal's frame, clipped to the goal's bars, which are aligned there."""
    goal_x, goal_y, goal_angle = env.goal_pose.tolist()
    block_x, block_y = env.block.position
    dx, dy = block_x - goal_x, block_y - goal_y
    cos, sin = math.cos(goal_angle), math.sin(goal_angle)
    at_x, at_y = cos * dx + sin * dy, cos * dy - sin * dx
    cos, sin = math.cos(env.block.angle - goal_angle), math.sin(env.block.angle - goal_angle)
    area = 0.0
    for left, right, low, high in BARS:
        corners = ((left, low), (right, low), (right, high), (left, high))
        bar = [(at_x + cos * u - sin * v, at_y + sin * u + cos * v) for u, v in corners]
        area += sum(_area_within(bar, goal) for goal in BARS)
    return area / AREA


def _area_within(polygon: list[tuple[float, float]], box: tuple[float, float, float, float]) -> float:
    """Area of a convex polygon within left, right, low and high, clipped by one side after another."""
    for axis, bound, sign in ((0, box[0], 1.0), (0, box[1], -1.0), (1, box[2], 1.0), (1, box[3], -1.0)):
        inside = [sign * (point[axis] - bound) for point in polygon]
        kept: list[tuple[float, float]] = []
        for i, (here, depth) in enumerate(zip(polygon, inside, strict=True)):
            before, above = polygon[i - 1], inside[i - 1]
            if (depth >= 0) != (above >= 0):
                share = above / (above - depth)
                kept.append((before[0] + share * (here[0] - before[0]), before[1] + share * (here[1] - before[1])))
            if depth >= 0:
                kept.append(here)
        if len(kept) < 3:
            return 0.0
        polygon = kept
    return abs(sum(polygon[i - 1][0] * polygon[i][1] - polygon[i][0] * polygon[i - 1][1] for i in range(len(polygon)))) / 2
