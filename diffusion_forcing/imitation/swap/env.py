"""Swap: an arm, three plates A, B and C, an apple and an orange that are to change places. What imitation with a memory is tried on.

The fruits begin in A and B, in random order and anywhere on their plates. The apple always goes first, by way of C: so that "apple in C,
orange in A" is the middle of one order and two thirds of the other, and the end of one looks like the beginning of the other. No single
picture says what to do next.

Each episode draws disturbances with its seed. When the hand leaves home, fruits that lie still may be nudged to elsewhere on their
plates; and a grasp may slip. Actions planned from the first frame alone miss both.

Importing this module registers `diffusion_forcing/Swap-v0` (MuJoCo) and `diffusion_forcing/SwapTwin-v0` (kinematic, for fast tests; never
for results), so that `gymnasium.make("diffusion_forcing.imitation.swap.env:diffusion_forcing/Swap-v0")` works without importing it first.
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

Array = NDArray[np.float64]
Image = NDArray[np.uint8]
Observation = dict[str, NDArray[Any]]

SLOTS = {"A": (0.44, 0.15), "B": (0.44, -0.15), "C": (0.60, 0.0)}
FRUITS = ("apple", "orange")
FRUIT_COLOURS = np.array([[204.0, 15.0, 31.0], [255.0, 153.0, 13.0]])
CAMERAS = ("front", "hand")
SLOT_HALF, PLATE, RIM, WALL = 0.07, 0.004, 0.006, 0.005
"""Of a plate: half its side within the rim, its thickness, the rim's height above it, and the rim's breadth."""
RADIUS = 0.03
REST = PLATE + RADIUS
"""Height of a fruit that lies on a plate."""
INSIDE = 0.055
"""A fruit is in a slot if its middle is as near to the slot's, along x and along y; where it touches the rim it is at 0.052."""
EVERY, FRAMES = 15, 40
"""Actions from one frame to the next, and how often there are so many in an episode."""
CONTROL_DT = 0.05
MAX_OPENING = 0.08
HOME = (0.42, 0.0, 0.30, 0.0, 0.0, 0.0, MAX_OPENING)
"""Where the hand is between moves, (7,)."""
LOW = (0.30, -0.32, 0.020, -0.6, -0.6, -0.6, 0.0)
HIGH = (0.68, 0.32, 0.40, 0.6, 0.6, 0.6, MAX_OPENING)
"""Actions are clipped to lie between."""
REACH, TURN = 0.05, 0.15
"""How far the hand's goal follows an action in a step at most, in metres and radians."""
FRONT = ((1.10, 0.0, 0.80), (0.455, 0.0, 0.10))
HAND = ((0.09, 0.0, 0.02), (0.06, 0.0, 0.12))
"""Where a camera is and what it looks at: in the world, and in the frame of the hand."""
FRONT_VIEW, HAND_VIEW = 31.0, 80.0
"""Degrees that the cameras see, from edge to edge."""
MOVES = 3
"""Apple to C, orange to where the apple began, apple to where the orange began."""
DEPARTURES, GRASPS, SLIPS = 3, 6, 2
"""How many times the hand can leave home, and grasp, before nothing is disturbed any more; and how many grasps slip at most."""
NUDGE_STEPS, NUDGE_MIN = 8, 0.03
"""How long a nudge takes, and how far it goes at least. It is over well before a hand that left home can grasp."""
STILL, STILL_STEPS = 0.02, 10
"""A fruit is at rest when it has been slower than this, in m/s, for so many steps, on the plate and untouched."""
_CHOICES = 12


class Body(Protocol):
    """What moves and what sees. Attributes are as of the last `reset` or `move`; poses are (7,), see `franka`."""

    fruits: list[list[float]]
    """Where apple and orange are, 2 x (x, y, z)."""
    speeds: list[float]
    hand: list[float]
    """Measured pose (7,)."""
    held: int | None
    """The fruit between both fingers."""
    touched: list[bool]

    def reset(self, places: Sequence[Sequence[float]]) -> None: ...
    def move(self, goal: Sequence[float]) -> None: ...
    def push(self, fruit: int, velocity: Sequence[float]) -> None: ...
    def slip(self, slippery: bool) -> None: ...
    def look(self, camera: str) -> Image: ...
    def close(self) -> None: ...


class SwapEnv(gymnasium.Env[Observation, NDArray[np.float32]]):
    """The swap. body: mujoco, or twin (kinematic). nudge, slip: probabilities, of a fruit at each departure and of a grasp.

    spread: how far from a slot's middle a fruit begins at most, along x and along y, in metres.

    Observations: front, hand (px, px, 3) uint8, and pose (7,) float32: measured position, rotation vector from pointing straight down and
    opening of the fingers. Actions (7,) are such a pose to go to, clipped to LOW .. HIGH, at 20 Hz. An episode is truncated after `steps`;
    its last reward is 1 if the fruits are then swapped, all others are 0. `info["success"]` says at any time whether each fruit
    lies at rest, untouched, in the slot where the other began; `info["moves"]` how many of
    the three moves have been done, in their order, also if undone later.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": round(1 / CONTROL_DT)}  # noqa: RUF012

    def __init__(
        self,
        px: int = 64,
        body: Literal["mujoco", "twin"] = "mujoco",
        nudge: float = 0.4,
        slip: float = 0.2,
        spread: float = 0.045,
        steps: int = EVERY * FRAMES,
        render_mode: str | None = None,
    ) -> None:
        if px < 8:
            raise ValueError(f"px should be 8 or more; got {px}")
        for name, chance in (("nudge", nudge), ("slip", slip)):
            if not 0 <= chance <= 1:
                raise ValueError(f"{name} is a probability, from 0 to 1; got {chance}")
        if not 0.03 <= spread <= 0.05:
            raise ValueError(
                f"spread should be from 0.03 to 0.05 m: with less the slots' centres are aim enough, more touches a rim; got {spread}"
            )
        if steps < EVERY or steps % EVERY:
            raise ValueError(f"steps should be a multiple of {EVERY}, so that an episode ends with a frame; got {steps}")
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"there is no render mode {render_mode!r}; choose 'rgb_array', or None for no pictures")
        self.px, self.nudge, self.slip, self.spread, self.render_mode = px, nudge, slip, spread, render_mode
        self.steps = steps
        self.body = _body(body, px)
        image = gymnasium.spaces.Box(0, 255, (px, px, 3), np.uint8)
        bound = np.array([2.0, 2.0, 2.0, 3.2, 3.2, 3.2, 0.1], np.float32)
        pose = gymnasium.spaces.Box(-bound, bound)
        self.observation_space: Any = gymnasium.spaces.Dict({"front": image, "hand": image, "pose": pose})
        self.action_space = gymnasium.spaces.Box(np.array(LOW, np.float32), np.array(HIGH, np.float32))
        self.time = self.steps  # over, until it is reset

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        """Observation and info. options: "start", "AB" for the apple in A and the orange in B, or "BA"; else it is drawn.

        "look": False returns no pictures, and the observation is {"pose"}.
        """
        options = options or {}
        unknown = [name for name in options if name not in ("start", "look")]
        if unknown:
            raise ValueError(f"reset knows the options 'start' and 'look'; got {unknown[0]!r}")
        if options.get("start", "AB") not in ("AB", "BA"):
            raise ValueError(f"options['start'] is 'AB', apple in A and orange in B, or 'BA'; got {options['start']!r}")
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
        self.body.reset([(centre(slot)[0] + dx, centre(slot)[1] + dy) for slot, (dx, dy) in zip(self.starts, places.tolist(), strict=True)])
        self.time, self.departures, self.grasps, self.nudges, self.failed_grasps, self.moves = 0, 0, 0, 0, 0, 0
        self._goal = list(HOME)
        self._at_home, self._was_open = True, True
        self._slipping: int | None = None
        self._pushes: dict[int, tuple[float, float, int]] = {}
        self._rest = [STILL_STEPS, STILL_STEPS]
        return self.observe() if options.get("look", True) else {"pose": self.pose}, self.info()

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Observation, reward, False, whether the episode is over, and info."""
        return self.step_many(checked_actions(action, (7,))[None])

    def step_many(self, actions: Any, look: bool = True) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Actions (n, 7) one after another; only what comes after the last is observed. look: take pictures, or return {"pose"} alone."""
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
        observation = self.observe() if look else {"pose": self.pose}
        return observation, float(over and info["success"]), False, over, info

    def observe(self) -> Observation:
        """Both cameras' pictures, and the pose."""
        return {**{name: self.body.look(name) for name in CAMERAS}, "pose": self.pose}

    @property
    def pose(self) -> NDArray[np.float32]:
        """Measured, (7,)."""
        return np.array(self.body.hand, np.float32)

    def info(self) -> dict[str, Any]:
        return {
            "success": self.success, "start": self.start, "time": self.time, "slots": tuple(self.slot(i) for i in range(2)),
            "nudges": self.nudges, "slips": self.failed_grasps, "moves": self.moves,
        }  # fmt: skip

    @property
    def success(self) -> bool:
        """Each fruit lies at rest, untouched, in the slot where the other began."""
        return all(self._rest[i] >= STILL_STEPS and self.slot(i) == self.starts[1 - i] for i in range(2))

    def slot(self, fruit: int) -> int | None:
        """Which slot's plate a fruit (0 the apple, 1 the orange) lies on: 0, 1, 2 for A, B, C."""
        x, y, z = self.body.fruits[fruit]
        if abs(z - REST) > RIM / 2:
            return None
        return next((i for i, (cx, cy) in enumerate(SLOTS.values()) if abs(x - cx) <= INSIDE and abs(y - cy) <= INSIDE), None)

    def render(self) -> Image | None:
        """Both cameras side by side (px, 2 px, 3); None without a render mode."""
        if self.render_mode is None:
            return None
        return np.concatenate([self.body.look(name) for name in CAMERAS], axis=1)

    def close(self) -> None:
        self.body.close()

    def _advance(self, action: list[float]) -> None:
        """One control step."""
        goal, body = self._goal, self.body
        _follow(goal, action, 0, REACH)
        _follow(goal, action, 3, TURN)
        goal[6] = action[6]
        if self._pushes:
            self._push()
        body.move(goal)
        self.time += 1
        self._disturb()
        for i in (0, 1):
            still = body.speeds[i] < STILL and not body.touched[i] and abs(body.fruits[i][2] - REST) < RIM / 2
            self._rest[i] = self._rest[i] + 1 if still else 0
        if self.moves < MOVES and min(self._rest) == STILL_STEPS:
            apple, orange = self.starts
            after = ((2, orange), (2, apple), (orange, apple))[self.moves]
            self.moves += (self.slot(0), self.slot(1)) == after

    def _disturb(self) -> None:
        body = self.body
        hand = body.hand
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
        if body.held is not None and self._was_open:
            self._was_open = False
            if self.grasps < GRASPS and self._slips[self.grasps]:
                self._slipping = body.held
                body.slip(True)
            self.grasps += 1
        if self._slipping is not None and not body.touched[self._slipping] and hand[2] > body.fruits[self._slipping][2] + 0.03:
            self._end_slip()

    def _end_slip(self) -> None:
        """Fingers hold again; the fruit that slipped out rolls on."""
        assert self._slipping is not None
        self.body.slip(False)
        self.failed_grasps += 1
        self._nudge(self._slipping, DEPARTURES + self.grasps - 1)
        self._slipping = None

    def _nudge(self, fruit: int, event: int) -> bool:
        """Begin to roll a fruit to another place on its plate: the first of those drawn for the event that is far enough."""
        slot = self.slot(fruit)
        if slot is None:
            return False
        (x, y, _), (cx, cy) = self.body.fruits[fruit], centre(slot)
        places = [(cx + dx, cy + dy) for dx, dy in self._choices[event][fruit]]
        far = [place for place in places if math.dist(place, (x, y)) >= NUDGE_MIN]
        to = far[0] if far else max(places, key=lambda place: math.dist(place, (x, y)))
        self._pushes[fruit] = (*to, self.time + NUDGE_STEPS)
        return True

    def _push(self) -> None:
        for fruit, (x, y, until) in list(self._pushes.items()):
            left = (until - self.time) * CONTROL_DT
            here = self.body.fruits[fruit]
            if left <= 0 or self.body.touched[fruit]:
                del self._pushes[fruit]
                self.body.push(fruit, (0.0, 0.0))
            else:
                self.body.push(fruit, ((x - here[0]) / left, (y - here[1]) / left))


def centre(slot: int) -> tuple[float, float]:
    """The middle of slot 0, 1 or 2."""
    return SLOTS["ABC"[slot]]


def rotation_matrix(vector: Sequence[float]) -> Array:
    """(3, 3) of a rotation vector (3,)."""
    x, y, z = (float(value) for value in vector)
    angle = math.sqrt(x * x + y * y + z * z)
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    if angle < 1e-9:
        return np.eye(3) + cross
    return cast(Array, np.eye(3) + math.sin(angle) / angle * cross + (1 - math.cos(angle)) / angle**2 * (cross @ cross))


def camera_axes(place: Sequence[float], at: Sequence[float], up: Sequence[float]) -> Array:
    """(3, 3), rows: right and up of the picture, and backwards."""
    back = np.subtract(place, at)
    right = np.cross(up, back)
    axes = np.stack([right, np.cross(back, right), back])
    return cast(Array, axes / np.linalg.norm(axes, axis=1, keepdims=True))


def checked_actions(actions: Any, shape: tuple[int, ...]) -> Array:
    """As floats, or an error that says what they should be."""
    actions = np.asarray(actions, dtype=float)
    if actions.shape != shape or not actions.size:
        raise ValueError(
            f"an action is (7,): position, rotation vector and opening to go to, and many are (n, 7); got shape {actions.shape}"
        )
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


def _body(name: str, px: int) -> Body:
    if name == "mujoco":
        from .franka import Franka

        return Franka(px)
    if name == "twin":
        from .twin import Twin

        return Twin(px)
    raise ValueError(f"body should be mujoco or twin; got {name!r}")


for _name, _kind in (("Swap", "mujoco"), ("SwapTwin", "twin")):
    _id = f"diffusion_forcing/{_name}-v0"
    if _id not in gymnasium.registry:  # the module may be loaded anew
        gymnasium.register(_id, entry_point=f"{__name__}:SwapEnv", kwargs={"body": _kind})
