"""One who knows how to swap: the demonstrator, with access to where things are, and a blind control that must fail.

The apple goes to C, the orange to where the apple began, the apple to where the orange began; between these moves the hand is back at
home when a frame is taken. Speeds and pauses are drawn for each segment, places anew for each move. A grasp that failed is tried again.

It knows what was so EVERY actions ago. One who imitates it looks that often, so that it never does what could not have been seen yet: if
it let go of the air the moment a fruit slips, an imitator would learn to let go now and then.

As people do, it aims roughly first and exactly on the way down. Were the hand always right above a fruit before it goes down, one who
imitates it would learn to go straight down from wherever it is, and never to put right what it missed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .env import CAMERAS, CONTROL_DT, EVERY, HIGH, HOME, LOW, MAX_OPENING, MOVES, REST, SwapEnv, centre

HOVER = 0.15
"""Height of the fingertips above a fruit, before and after they grasp it."""
GRASP = REST - 0.002
ROUGH, ROUGHEST = 0.025, 0.05
"""How far beside the goal the hand comes before it goes down, in metres: the spread along x and along y, and the most."""
AHEAD = (1.2, 1.7)
"""On the way down the hand is over its goal so much sooner than it is down: fingers come down beside a fruit, not on it."""
SPEED, SLOW = 0.21, 0.14
"""Mean metres a second, from place to place and down to the table."""
FASTER, SLOWER = 1.3, 0.7
CLOSING = 8
"""Actions until fingers are closed."""
NEAR = 0.002
"""How exactly the hand is home when a frame is taken: where it came from should not show."""
MOVE_STEPS = 165
"""About what a move should take; one who is late hurries and makes no pauses."""
Steps = Generator[None, None, None]
Point = tuple[float, float]


class Episode(NamedTuple):
    """actions (600, 7); poses (f, 7) and images of each camera (f, px, px, 3) before actions 0, every, .. and after the last."""

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


def demonstrate(env: SwapEnv, seed: int, blind: bool = False, look: bool = True, start: str | None = None, every: int = EVERY) -> Episode:
    """The expert's episode of a seed. look: take pictures; start: AB or BA, else the seed's; every: actions from frame to frame."""
    first, _ = env.reset(seed=seed, options={"look": look, **({} if start is None else {"start": start})})
    expert = Expert(env, seed, blind)
    actions, seen, info = [], [first], env.info()
    for time in range(1, env.steps + 1):
        actions.append(expert.act())
        frame = time % every == 0
        observation, _, _, _, info = env.step_many(actions[-1][None], look=look and frame)
        if frame:
            seen.append(observation)
    return Episode(
        np.stack(actions), np.stack([frame["pose"] for frame in seen]),
        {name: np.stack([frame[name] for frame in seen]) for name in CAMERAS} if look else {},
        info["success"], env.steps if expert.finished is None else expert.finished,
        info["start"], info["nudges"], info["slips"], expert.regrasps,
    )  # fmt: skip


class Expert:
    """Acts in `env` from its reset on. `finished`: when it was home for good, or None.

    blind: aims at slots' centres, whatever happens. believed: whether eyes may be believed, by how many actions were done; while they may
    not, the expert goes by what it knew before, and until they first may it stays at home.
    """

    def __init__(self, env: SwapEnv, seed: int = 0, blind: bool = False, believed: Callable[[int], bool] = lambda _: True) -> None:
        self.env, self.blind, self.believed = env, blind, believed
        self.finished: int | None = None
        self.regrasps = 0
        self._rng = np.random.default_rng((3, seed))
        self._known: deque[tuple[list[list[float]], int | None]] = deque(
            maxlen=EVERY + 1
        )  # where fruits are and which is held, oldest first
        self._closed = 0
        self._target = list(HOME)
        self._moves_left = MOVES
        self._script = self._swap()

    def act(self) -> NDArray[np.float32]:
        """The next action (7,). After the last move it rests at home."""
        if self.believed(self.env.time):
            self._known.append(([list(place) for place in self.env.body.fruits], self.env.body.held))
        elif self._known:
            self._known.append(self._known[-1])
        if self._known:
            next(self._script, None)
        return np.clip(self._target, LOW, HIGH).astype(np.float32)

    def _swap(self) -> Steps:
        apple, orange = self.env.starts
        for fruit, come, go in ((0, apple, 2), (1, orange, apple), (0, 2, orange)):
            yield from self._wait_for_frame()
            yield from self._move(fruit, come, go)
            yield from self._go(lambda: HOME, SPEED)
            self._moves_left -= 1
        yield from self._wait_for_frame()
        self.finished = self.env.time

    def _move(self, fruit: int, come: int, go: int) -> Steps:
        """A fruit from slot to slot, from and to the height HOVER."""

        def above() -> Point:
            x, y, _ = self._known[0][0][fruit]
            return centre(come) if self.blind else (x, y)

        def lost() -> bool:
            return not self.blind and self.env.time - self._closed >= EVERY and self._known[0][1] != fruit

        # As wide as fruits begin, or one near the edge would be known not to have been moved.
        margin = 0.0 if self.blind else self.env.spread
        x, y = (float(middle + self._rng.uniform(-margin, margin)) for middle in centre(go))
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
        """To a goal, which may move meanwhile, smoothly and at a random speed. until: give up. ahead: of height, for all else."""
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
        long = int(self._rng.integers(0, 9))
        yield from self._stay(0 if self._late() else long)

    def _wait_for_frame(self) -> Steps:
        """At home, until the hand has come to rest there and a frame is taken; sometimes until the one after."""
        self._target = list(HOME)
        frames = int(self._rng.random() < 0.25 and not self._late())
        still = 0
        while True:
            far = math.dist(self.env.body.hand[:3], HOME[:3])
            still = still + 1 if far < NEAR else 0
            if self.env.time % EVERY == 0 and (still > 2 or self.env.time == 0):
                if not frames:
                    return
                frames -= 1
            yield

    def _late(self) -> bool:
        return self.env.steps - self.env.time < MOVE_STEPS * self._moves_left + EVERY

    def _pace(self) -> float:
        pace = float(self._rng.uniform(SLOWER, FASTER))
        return FASTER if self._late() else pace


def _smooth(t: float) -> float:
    """From 0 to 1, at rest at both ends."""
    return t * t * (3 - 2 * t)


def _pose(point: Point, height: float, opening: float = MAX_OPENING) -> tuple[float, ...]:
    """The hand over a point, turned as the arm reaches there and leaning outwards a little."""
    x, y = point
    return (x, y, height, -0.3 * y, 0.4 * (x - HOME[0]), math.atan2(y, x), opening)
