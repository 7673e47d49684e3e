"""The swap: an arm, three plates A, B and C, and an apple and an orange that are to change places. It needs memory.

The fruits begin on A and B, in random order and anywhere on their plates. The apple always goes first, by way of C, so that "apple on C,
orange on A" is one third of the way in one order and two thirds in the other, and the end of one looks like the beginning of the other. No
single image says what to do next.

Each episode draws disturbances from its seed: as the hand leaves home, fruits at rest may roll elsewhere on their plates, and a grasp may
slip. Replaying actions planned from the first frame misses both.

Importing this module registers `diffusion_forcing/Swap-v0` (MuJoCo) and `diffusion_forcing/SwapKinematic-v0` (no physics, for fast tests
only). `gymnasium.make("diffusion_forcing.imitation.swap.env:diffusion_forcing/Swap-v0")` imports it first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

try:
    import gymnasium
except ImportError as error:
    raise ImportError("the swap robot is a Gymnasium environment: pip install 'diffusion_forcing[imitation]'") from error

from .kinematic import Kinematic
from .scene import (
    CAMERAS,
    CHUNK,
    CONTROL_DT,
    HIGH,
    HOME,
    INSIDE,
    LOW,
    MAX_OPENING,
    MOVES,
    REST,
    RIM,
    SLOTS,
    STEPS,
    Array,
    Image,
    centre,
)

Observation = dict[str, NDArray[Any]]

REACH, TURN = 0.05, 0.15
"""How far the controller's goal moves towards an action per step, at most, in metres and radians."""
DEPARTURES, GRASPS, SLIPS = 3, 6, 2
"""Departures from home and grasps that may be disturbed, and grasps that slip, at most."""
NUDGE_STEPS, NUDGE_MIN = 8, 0.03
"""Duration of a nudge and its least distance. It is over well before a hand that left home can grasp."""
STILL, STILL_STEPS = 0.02, 10
"""A fruit is at rest when it was slower than this, in m/s, for so many steps, on a plate and untouched."""
_CHOICES = 12


class Simulator(Protocol):
    """What moves and renders the scene. Attributes are as of the last `reset` or `move`; poses (7,) as in `SwapEnv`."""

    fruits: list[list[float]]
    """Positions of apple and orange, 2 x (x, y, z)."""
    speeds: list[float]
    """Of both."""
    hand: list[float]
    """Measured pose (7,)."""
    held: int | None
    """The fruit between both fingers."""
    touched: list[bool]
    """Whether a finger touches each fruit."""

    def reset(self, places: Sequence[Sequence[float]]) -> None: ...
    def move(self, goal: Sequence[float]) -> None: ...
    def push(self, fruit: int, velocity: Sequence[float]) -> None: ...
    def slip(self, slippery: bool) -> None: ...
    def render(self, camera: str) -> Image: ...
    def close(self) -> None: ...


class SwapEnv(gymnasium.Env[Observation, NDArray[np.float32]]):
    """The swap as a Gymnasium environment.

    simulator: mujoco, or kinematic (no physics). nudge: probability that a fruit rolls away at a departure; slip: that a grasp fails.
    spread: how far from its slot's centre a fruit begins at most, along x and along y, in metres. steps: of an episode.

    Observations: front, hand (px, px, 3) uint8, and pose (7,) float32: measured position of the fingertips, rotation vector from pointing
    straight down, and opening of the fingers. Actions (7,) are poses to go to, clipped to LOW .. HIGH, at 20 Hz. An episode is truncated
    after `steps`; its last reward is 1 if the fruits are then swapped, all others are 0. `info["success"]` says at any time whether each
    fruit is at rest, untouched, in the slot where the other began; `info["moves"]` how many of the three moves were done in order, also
    if undone later.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": round(1 / CONTROL_DT)}  # noqa: RUF012

    def __init__(
        self,
        px: int = 64,
        simulator: Literal["mujoco", "kinematic"] = "mujoco",
        nudge: float = 0.4,
        slip: float = 0.2,
        spread: float = 0.045,
        steps: int = STEPS,
        render_mode: str | None = None,
    ) -> None:
        if px < 8:
            raise ValueError(f"px should be 8 or more; got {px}")
        for name, chance in (("nudge", nudge), ("slip", slip)):
            if not 0 <= chance <= 1:
                raise ValueError(f"{name} is a probability, from 0 to 1; got {chance}")
        if not 0.03 <= spread <= 0.05:
            raise ValueError(
                f"spread should be from 0.03 to 0.05 m: with less, aiming at the slots' centres is enough, with more a fruit touches the "
                f"rim; got {spread}"
            )
        if steps < CHUNK or steps % CHUNK:
            raise ValueError(f"steps should be a multiple of {CHUNK}, so that an episode ends with a frame; got {steps}")
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"there is no render mode {render_mode!r}; choose 'rgb_array', or None for no images")
        self.px, self.nudge, self.slip, self.spread, self.render_mode = px, nudge, slip, spread, render_mode
        self.steps = steps
        self.simulator = _simulator(simulator, px)
        image = gymnasium.spaces.Box(0, 255, (px, px, 3), np.uint8)
        bound = np.array([2.0, 2.0, 2.0, 3.2, 3.2, 3.2, 0.1], np.float32)
        pose = gymnasium.spaces.Box(-bound, bound)
        self.observation_space: Any = gymnasium.spaces.Dict({"front": image, "hand": image, "pose": pose})
        self.action_space = gymnasium.spaces.Box(np.array(LOW, np.float32), np.array(HIGH, np.float32))
        self.time = self.steps  # over, until it is reset

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        """Observation and info. options: "start", "AB" for the apple on A and the orange on B, or "BA"; else it is drawn.

        "render": False leaves the images out of the observation.
        """
        options = options or {}
        unknown = [name for name in options if name not in ("start", "render")]
        if unknown:
            raise ValueError(f"reset knows the options 'start' and 'render'; got {unknown[0]!r}")
        if options.get("start", "AB") not in ("AB", "BA"):
            raise ValueError(f"options['start'] is 'AB', apple on A and orange on B, or 'BA'; got {options['start']!r}")
        super().reset(seed=seed)
        rng = self.np_random  # the same draws whatever the options, so that a seed means the same with and without
        start = ("AB", "BA")[int(rng.integers(2))]
        places = rng.uniform(-self.spread, self.spread, (2, 2))
        self._nudged = (rng.random((DEPARTURES, 2)) < self.nudge).tolist()
        slips = rng.random(GRASPS) < self.slip
        self._slips = (slips & (slips.cumsum() <= SLIPS)).tolist()
        self._choices = rng.uniform(-self.spread, self.spread, (DEPARTURES + GRASPS, 2, _CHOICES, 2)).tolist()
        self.start = str(options.get("start", start))
        self.starts = ("ABC".index(self.start[0]), "ABC".index(self.start[1]))
        centres = [centre(slot) for slot in self.starts]
        self.simulator.reset([(x + dx, y + dy) for (x, y), (dx, dy) in zip(centres, places.tolist(), strict=True)])
        self.time, self.departures, self.grasps, self.nudges, self.failed_grasps, self.moves = 0, 0, 0, 0, 0, 0
        self._goal = list(HOME)
        self._at_home, self._was_open = True, True
        self._slipping: int | None = None
        self._pushes: dict[int, tuple[float, float, int]] = {}
        self._rest = [STILL_STEPS, STILL_STEPS]
        return self.observe() if options.get("render", True) else {"pose": self.pose}, self.info()

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Observation, reward, False, whether the episode is over, and info."""
        return self.step_many(checked_actions(action, (7,))[None])

    def step_many(self, actions: Any, render: bool = True) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Execute actions (n, 7) and observe after the last. render: with images, else {"pose"} alone."""
        actions = np.asarray(actions, float)
        actions = checked_actions(actions, (len(actions) if actions.ndim else 0, 7))
        if self.time + len(actions) > self.steps:
            raise RuntimeError(
                f"an episode has {self.steps} steps, {self.steps - self.time} are left; got {len(actions)} actions. reset() begins anew"
            )
        for action in np.clip(actions, LOW, HIGH).tolist():
            self._advance(action)
        over = self.time >= self.steps
        info = self.info()
        observation = self.observe() if render else {"pose": self.pose}
        return observation, float(over and info["success"]), False, over, info

    def observe(self) -> Observation:
        """The images of both cameras, and the pose."""
        return {**{name: self.simulator.render(name) for name in CAMERAS}, "pose": self.pose}

    @property
    def pose(self) -> NDArray[np.float32]:
        """Measured, (7,)."""
        return np.array(self.simulator.hand, np.float32)

    def info(self) -> dict[str, Any]:
        return {
            "success": self.success, "start": self.start, "time": self.time, "slots": tuple(self.slot(i) for i in range(2)),
            "nudges": self.nudges, "slips": self.failed_grasps, "moves": self.moves,
        }  # fmt: skip

    @property
    def success(self) -> bool:
        """Whether each fruit is at rest, untouched, in the slot where the other began."""
        return all(self._rest[i] >= STILL_STEPS and self.slot(i) == self.starts[1 - i] for i in range(2))

    def slot(self, fruit: int) -> int | None:
        """The slot whose plate a fruit (0 the apple, 1 the orange) lies on: 0, 1, 2 for A, B, C."""
        x, y, z = self.simulator.fruits[fruit]
        if abs(z - REST) > RIM / 2:
            return None
        return next((i for i, (cx, cy) in enumerate(SLOTS.values()) if abs(x - cx) <= INSIDE and abs(y - cy) <= INSIDE), None)

    def render(self) -> Image | None:
        """Both cameras side by side (px, 2 px, 3); None without a render mode."""
        if self.render_mode is None:
            return None
        return np.concatenate([self.simulator.render(name) for name in CAMERAS], axis=1)

    def close(self) -> None:
        self.simulator.close()

    def _advance(self, action: list[float]) -> None:
        """One control step."""
        goal, simulator = self._goal, self.simulator
        _follow(goal, action, 0, REACH)
        _follow(goal, action, 3, TURN)
        goal[6] = action[6]
        if self._pushes:
            self._push()
        simulator.move(goal)
        self.time += 1
        self._disturb()
        for i in (0, 1):
            still = simulator.speeds[i] < STILL and not simulator.touched[i] and abs(simulator.fruits[i][2] - REST) < RIM / 2
            self._rest[i] = self._rest[i] + 1 if still else 0
        if self.moves < MOVES and min(self._rest) == STILL_STEPS:
            apple, orange = self.starts
            after = ((2, orange), (2, apple), (orange, apple))[self.moves]
            self.moves += (self.slot(0), self.slot(1)) == after

    def _disturb(self) -> None:
        """Nudge fruits as the hand leaves home, and let grasps slip, as drawn for this episode."""
        simulator = self.simulator
        hand = simulator.hand
        away = math.dist(hand[:3], HOME[:3])
        if away < 0.02:
            self._at_home = True
        elif away > 0.04 and self._at_home:
            self._at_home = False
            if self.departures < DEPARTURES:
                for fruit in (0, 1):
                    if self._nudged[self.departures][fruit] and self._rest[fruit] >= STILL_STEPS:
                        self.nudges += self._nudge(fruit, self.departures)
            self.departures += 1
        if hand[6] > 0.9 * MAX_OPENING:
            self._was_open = True
            if self._slipping is not None:
                self._end_slip()
        if simulator.held is not None and self._was_open:
            self._was_open = False
            if self.grasps < GRASPS and self._slips[self.grasps]:
                self._slipping = simulator.held
                simulator.slip(True)
            self.grasps += 1
        if self._slipping is not None and not simulator.touched[self._slipping] and hand[2] > simulator.fruits[self._slipping][2] + 0.03:
            self._end_slip()

    def _end_slip(self) -> None:
        """The fingers hold again, and the fruit that slipped out rolls on."""
        assert self._slipping is not None
        self.simulator.slip(False)
        self.failed_grasps += 1
        self._nudge(self._slipping, DEPARTURES + self.grasps - 1)
        self._slipping = None

    def _nudge(self, fruit: int, event: int) -> bool:
        """Begin to roll a fruit to another place on its plate: the first of those drawn for the event that is far enough."""
        slot = self.slot(fruit)
        if slot is None:
            return False
        (x, y, _), (cx, cy) = self.simulator.fruits[fruit], centre(slot)
        places = [(cx + dx, cy + dy) for dx, dy in self._choices[event][fruit]]
        far = [place for place in places if math.dist(place, (x, y)) >= NUDGE_MIN]
        to = far[0] if far else max(places, key=lambda place: math.dist(place, (x, y)))
        self._pushes[fruit] = (*to, self.time + NUDGE_STEPS)
        return True

    def _push(self) -> None:
        """Set the velocities of fruits that roll, so that they arrive on time."""
        for fruit, (x, y, until) in list(self._pushes.items()):
            left = (until - self.time) * CONTROL_DT
            now = self.simulator.fruits[fruit]
            if left <= 0 or self.simulator.touched[fruit]:
                del self._pushes[fruit]
                self.simulator.push(fruit, (0.0, 0.0))
            else:
                self.simulator.push(fruit, ((x - now[0]) / left, (y - now[1]) / left))


def checked_actions(actions: Any, shape: tuple[int, ...]) -> Array:
    """As finite floats of that shape, or an error."""
    actions = np.asarray(actions, dtype=float)
    if actions.shape != shape or not actions.size:
        raise ValueError(f"an action is (7,): position, rotation vector and opening, and several are (n, 7); got shape {actions.shape}")
    if not np.isfinite(actions).all():
        first = np.atleast_2d(actions)[~np.isfinite(np.atleast_2d(actions)).all(-1)][0]
        raise ValueError(f"actions should be finite; got {first.tolist()}")
    return cast(Array, actions)


def _follow(goal: list[float], action: list[float], at: int, most: float) -> None:
    """Move goal[at : at + 3] towards the action, no further than `most`."""
    dx, dy, dz = action[at] - goal[at], action[at + 1] - goal[at + 1], action[at + 2] - goal[at + 2]
    far = math.sqrt(dx * dx + dy * dy + dz * dz)
    share = 1.0 if far <= most else most / far
    goal[at] += share * dx
    goal[at + 1] += share * dy
    goal[at + 2] += share * dz


def _simulator(name: str, px: int) -> Simulator:
    if name == "mujoco":
        from .franka import Franka

        return Franka(px)
    if name == "kinematic":
        return Kinematic(px)
    raise ValueError(f"simulator should be mujoco or kinematic; got {name!r}")


for _name, _kind in (("Swap", "mujoco"), ("SwapKinematic", "kinematic")):
    _id = f"diffusion_forcing/{_name}-v0"
    if _id not in gymnasium.registry:  # the module may be loaded anew
        gymnasium.register(_id, entry_point=f"{__name__}:SwapEnv", kwargs={"simulator": _kind})
