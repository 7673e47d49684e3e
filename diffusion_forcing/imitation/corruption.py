"""Looks that deceive: things that do not belong into the picture, a covered camera, frames that never come. And a flag that says when.

A corruption is drawn for an episode by its seed, as stretches of frames: with the very first one in every second episode, and once in each
third of all of them. It is the same whether an agent is told of it or not.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

try:
    import gymnasium
except ImportError as error:
    raise ImportError("wrappers of environments need Gymnasium: pip install 'diffusion_forcing[imitation]'") from error

Kind = Literal["distractors", "occluded", "dropped"]
"""distractors: patches and a ball of a fruit's colour that moves, in all cameras. occluded: one camera covered. dropped: all black."""
KINDS: tuple[Kind, ...] = get_args(Kind)
Pictures = dict[str, NDArray[np.uint8]]
PICTURE = "picture"
"""Name of the camera of an environment whose observation is nothing but a picture."""
COLOURS = ((214, 40, 40), (240, 150, 30))
"""Of the ball: an apple's and an orange's."""


class Corruption:
    """What happens to the pictures of an episode. frames: looks in an episode; cameras: names of the pictures."""

    def __init__(self, kind: Kind, frames: int, cameras: tuple[str, ...], seed: int = 0) -> None:
        if kind not in KINDS:
            raise ValueError(f"there is no corruption {kind!r}; choose from {', '.join(KINDS)}")
        self.kind, self.cameras = kind, cameras
        rng = np.random.default_rng((11, seed))
        self.when = np.zeros(frames, dtype=bool)
        length = {"distractors": 4, "occluded": 4, "dropped": 2}[kind]
        # From the very start in every second episode; then in each third of the episode once.
        starts = [0] if rng.random() < 0.5 else []
        starts += [int(third * frames / 3 + rng.uniform(1, max(2, frames / 3 - length))) for third in range(3)]
        for start in starts:
            self.when[start : start + length] = True
        self.covered = str(rng.choice(np.array(cameras)))
        self._rng = rng
        self._patches = [(rng.random(2), rng.uniform(0.12, 0.3, 2), rng.integers(0, 256, 3)) for _ in range(3)]
        self._ball = rng.random(2), rng.uniform(-0.12, 0.12, 2), COLOURS[int(rng.integers(2))]

    def doubtful(self, frame: int) -> dict[str, bool]:
        """Of each camera, whether its picture at that frame deceives."""
        now = frame < len(self.when) and bool(self.when[frame])
        return {name: now and (self.kind != "occluded" or name == self.covered) for name in self.cameras}

    def apply(self, pictures: Pictures, frame: int) -> Pictures:
        """Pictures (height, width, 3) by camera, those that deceive in place of what was seen."""
        return {
            name: self._deceive(picture, frame) if self.doubtful(frame).get(name) else picture for name, picture in pictures.items()
        }  # fmt: skip

    def _deceive(self, picture: NDArray[np.uint8], frame: int) -> NDArray[np.uint8]:
        if self.kind == "dropped":
            return np.zeros_like(picture)
        if self.kind == "occluded":
            return np.full_like(picture, 90)
        sides = np.array(picture.shape[:2])
        out = picture.copy()
        for at, size, colour in self._patches:
            (top, left), (high, wide) = (at * sides).astype(int), (size * sides).astype(int)
            out[top : top + high, left : left + wide] = colour
        place, speed, ball = self._ball
        y, x = np.abs((place + speed * frame) % 2 - 1) * sides  # to and fro
        rows, columns = np.mgrid[: sides[0], : sides[1]]
        out[(rows - y) ** 2 + (columns - x) ** 2 < (0.07 * sides.min()) ** 2] = ball
        return out


class Corrupted(gymnasium.Wrapper):
    """An environment whose pictures deceive at times. info["doubtful"] says of each camera whether it does now: a detector is not needed.

    Observations are a dict with pictures in it, uint8 (height, width, 3), or one such picture, which is then the camera PICTURE.
    kind: see `Corruption`; every: steps from one look to the next, through all of which a corruption lasts.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], kind: Kind, every: int = 15, frames: int = 41) -> None:
        super().__init__(env)
        space: Any = env.observation_space
        self._alone = not isinstance(space, gymnasium.spaces.Dict)
        spaces = {PICTURE: space} if self._alone else space.spaces
        self._cameras = tuple(name for name, part in spaces.items() if part.dtype == np.uint8 and _of_picture(part.shape))
        if not self._cameras:
            raise ValueError(
                f"only pictures can be corrupted, uint8 (height, width, 3), alone or in a dict; this environment's observations are {space}"
            )
        self._kind, self._every, self._frames, self._time = kind, every, frames, 0
        self._rng = np.random.default_rng()
        self.corruption = Corruption(kind, frames, self._cameras)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._time = 0
        if seed is not None:
            self._rng = np.random.default_rng((12, seed))  # for resets without a seed, from here on
        number = int(self._rng.integers(2**31)) if seed is None else seed
        self.corruption = Corruption(self._kind, self._frames, self._cameras, number)
        return self._seen(observation, info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return self._after(1, self.env.step(action))

    def step_many(self, actions: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Several actions (n, a), of an environment that takes them."""
        return self._after(len(actions), self.env.get_wrapper_attr("step_many")(actions))

    def _after(self, steps: int, found: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._time += steps
        observation, info = self._seen(found[0], found[4])
        return observation, found[1], found[2], found[3], info

    def _seen(self, observation: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        frame = self._time // self._every
        parts = {PICTURE: observation} if self._alone else observation
        pictures = {name: parts[name] for name in self._cameras if name in parts}
        seen = {**parts, **self.corruption.apply(pictures, frame)}
        return seen[PICTURE] if self._alone else seen, {**info, "doubtful": self.corruption.doubtful(frame)}


def _of_picture(shape: tuple[int, ...] | None) -> bool:
    return shape is not None and len(shape) == 3 and shape[-1] == 3
