"""The scripted demonstrator of the swap, with access to the simulator's state, and an open-loop control that must fail.

The apple goes to C, the orange to where the apple began, the apple to where the orange began; between these moves the hand is at home when
a frame is taken. Speeds and pauses are drawn for each segment, places for each move. A failed grasp is repeated.

The expert knows the state as of CHUNK actions ago, because its imitator observes that often: it never reacts to what the imitator could not
have observed yet. Were it to open the fingers the moment a fruit slips, an imitator would learn to open them now and then.

Like people, it aims roughly first and exactly on the way down. Were the hand always exactly above a fruit before it descends, an imitator
would learn to descend from wherever it is, and never to correct an error.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .env import SwapEnv
from .scene import CAMERAS, CHUNK, CONTROL_DT, HIGH, HOME, LOW, MAX_OPENING, MOVES, REST, centre

HOVER = 0.15
"""Height of the fingertips above a fruit, before and after a grasp."""
GRASP = REST - 0.002
"""Height of the fingertips at a grasp."""
ROUGH, ROUGHEST = 0.025, 0.05
"""Error of the first aim, in metres: its standard deviation along x and along y, and the most."""
AHEAD = (1.2, 1.7)
"""How much sooner the hand arrives sideways than it arrives below, drawn from this range: fingers descend beside a fruit, not onto it."""
SPEED, SLOW = 0.21, 0.14
"""Mean metres a second, from place to place and vertically."""
FASTER, SLOWER = 1.3, 0.7
"""Range of the factor drawn for each segment's speed."""
CLOSING = 8
"""Actions until the fingers are closed."""
NEAR = 0.002
"""How exactly the hand is home when a frame is taken, so that no image shows where it came from."""
MOVE_STEPS = 165
"""About what a move takes; an expert that is late is fast and makes no pauses."""
Steps = Generator[None, None, None]
Point = tuple[float, float]


class Episode(NamedTuple):
    """actions (600, 7); poses (f, 7) and images of each camera (f, px, px, 3) before actions 0, every, 2 every, .. and after the last."""

    actions: NDArray[np.float32]
    poses: NDArray[np.float32]
    images: dict[str, NDArray[np.uint8]]
    success: bool
    finished: int
    """Steps until the hand was home for good, or all of them."""
    start: str
    nudges: int
    slips: int
    regrasps: int


def demonstrate(
    env: SwapEnv, seed: int, open_loop: bool = False, render: bool = True, start: str | None = None, every: int = CHUNK
) -> Episode:  # fmt: skip
    """The expert's episode of a seed. render: with images; start: AB or BA, else the seed's; every: actions from frame to frame."""
    first, _ = env.reset(seed=seed, options={"render": render, **({} if start is None else {"start": start})})
    expert = Expert(env, seed, open_loop)
    actions, frames, info = [], [first], env.info()
    for time in range(1, env.steps + 1):
        actions.append(expert.act())
        is_frame = time % every == 0
        observation, _, _, _, info = env.step_many(actions[-1][None], render=render and is_frame)
        if is_frame:
            frames.append(observation)
    return Episode(
        np.stack(actions), np.stack([frame["pose"] for frame in frames]),
        {name: np.stack([frame[name] for frame in frames]) for name in CAMERAS} if render else {},
        info["success"], env.steps if expert.finished is None else expert.finished,
        info["start"], info["nudges"], info["slips"], expert.regrasps,
    )  # fmt: skip


class Expert:
    """Acts in `env` from its reset on. `finished`: when it was home for good, or None.

    open_loop: aim at slots' centres and never check, whatever happens. observes: whether the state may be read, given the number of actions
    done; where not, the expert goes by what it knew before, and stays at home until it first may.
    """

    def __init__(
        self, env: SwapEnv, seed: int = 0, open_loop: bool = False, observes: Callable[[int], bool] = lambda _: True
    ) -> None:  # fmt: skip
        self.env, self.open_loop, self.observes = env, open_loop, observes
        self.finished: int | None = None
        self.regrasps = 0
        self._rng = np.random.default_rng((3, seed))
        self._known: deque[tuple[list[list[float]], int | None]] = deque(maxlen=CHUNK + 1)
        """Positions of the fruits and which is held, oldest first."""
        self._closed = 0
        self._target = list(HOME)
        self._moves_left = MOVES
        self._script = self._swap()

    def act(self) -> NDArray[np.float32]:
        """The next action (7,). After the last move it rests at home."""
        if self.observes(self.env.time):
            simulator = self.env.simulator
            self._known.append(([list(place) for place in simulator.fruits], simulator.held))
        elif self._known:
            self._known.append(self._known[-1])
        if self._known:
            next(self._script, None)
        return np.clip(self._target, LOW, HIGH).astype(np.float32)

    def _swap(self) -> Steps:
        apple, orange = self.env.starts
        for fruit, source, goal in ((0, apple, 2), (1, orange, apple), (0, 2, orange)):
            yield from self._wait_for_frame()
            yield from self._move(fruit, source, goal)
            yield from self._go(lambda: HOME, SPEED)
            self._moves_left -= 1
        yield from self._wait_for_frame()
        self.finished = self.env.time

    def _move(self, fruit: int, source: int, goal: int) -> Steps:
        """A fruit from slot to slot, from and to the height HOVER."""

        def above() -> Point:
            x, y, _ = self._known[0][0][fruit]
            return centre(source) if self.open_loop else (x, y)

        def lost() -> bool:
            return not self.open_loop and self.env.time - self._closed >= CHUNK and self._known[0][1] != fruit

        # As wide as fruits begin, else a fruit near the edge would show that it was not moved yet.
        margin = 0.0 if self.open_loop else self.env.spread
        x, y = (float(middle + self._rng.uniform(-margin, margin)) for middle in centre(goal))
        while True:
            yield from self._go(self._beside(above), SPEED)
            yield from self._pause()
            yield from self._go(lambda: _pose(above(), GRASP), SLOW, ahead=self._rng.uniform(*AHEAD))
            yield from self._stay(3)
            taken = self._target[0], self._target[1]
            self._target[6] = 0.0
            yield from self._stay(CLOSING)
            self._closed = self.env.time
            yield from self._go(lambda: _pose(taken, HOVER, 0.0), SLOW)  # noqa: B023
            yield from self._go(self._beside(lambda: (x, y), 0.0), SPEED, lost)
            if not lost():
                break
            self.regrasps += 1
            self._target[6] = MAX_OPENING
        yield from self._pause()
        yield from self._go(lambda: _pose((x, y), GRASP + 0.003, 0.0), SLOW, ahead=self._rng.uniform(*AHEAD))
        yield from self._stay(3)
        self._target[6] = MAX_OPENING
        yield from self._stay(6)
        yield from self._go(lambda: _pose((x, y), HOVER), SLOW)

    def _beside(self, point: Callable[[], Point], opening: float = MAX_OPENING) -> Callable[[], tuple[float, ...]]:
        """The hand roughly over a point that may move, at the height HOVER."""
        dx, dy = (float(d) for d in np.clip(self._rng.normal(0, ROUGH, 2), -ROUGHEST, ROUGHEST))
        return lambda: _pose((point()[0] + dx, point()[1] + dy), HOVER, opening)

    def _go(
        self, goal: Callable[[], Sequence[float]], speed: float, until: Callable[[], bool] = lambda: False, ahead: float = 1.0
    ) -> Steps:
        """To a goal that may move, smoothly and at a random speed. until: give up. ahead: how much sooner than in height it is there."""
        begin = list(self._target)
        far = math.dist(begin[:3], goal()[:3])
        steps = max(5, math.ceil(far / (speed * self._pace() * CONTROL_DT)))
        for i in range(1, steps + 1):
            down, over = _smooth(i / steps), _smooth(min(1.0, ahead * i / steps))
            shares = (over, over, down, over, over, over)
            self._target[:6] = [a + share * (b - a) for share, a, b in zip(shares, begin, goal()[:6], strict=False)]
            yield
            if until():
                return

    def _stay(self, steps: int) -> Steps:
        for _ in range(steps):
            yield

    def _pause(self) -> Steps:
        steps = int(self._rng.integers(0, 9))
        yield from self._stay(0 if self._late() else steps)

    def _wait_for_frame(self) -> Steps:
        """At home, until the hand has come to rest there and a frame is taken; sometimes until the one after."""
        self._target = list(HOME)
        frames = int(self._rng.random() < 0.25 and not self._late())
        still = 0
        while True:
            far = math.dist(self.env.simulator.hand[:3], HOME[:3])
            still = still + 1 if far < NEAR else 0
            if self.env.time % CHUNK == 0 and (still > 2 or self.env.time == 0):
                if not frames:
                    return
                frames -= 1
            yield

    def _late(self) -> bool:
        return self.env.steps - self.env.time < MOVE_STEPS * self._moves_left + CHUNK

    def _pace(self) -> float:
        pace = float(self._rng.uniform(SLOWER, FASTER))
        return FASTER if self._late() else pace


def _smooth(t: float) -> float:
    """From 0 to 1, at rest at both ends."""
    return t * t * (3 - 2 * t)


def _pose(point: Point, height: float, opening: float = MAX_OPENING) -> tuple[float, ...]:
    """The hand over a point, rotated as the arm reaches there and leaning outwards a little."""
    x, y = point
    return (x, y, height, -0.3 * y, 0.4 * (x - HOME[0]), math.atan2(y, x), opening)
