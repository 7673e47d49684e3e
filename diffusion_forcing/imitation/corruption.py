"""Corrupted camera images: distractors, a covered camera, dropped frames; and a flag that says when.

A corruption is drawn for an episode by its seed, as stretches of frames: in every second episode from the first frame on, and once in each
third of all of them. It does not depend on whether an agent reads the flag.
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
"""distractors: patches, and a moving ball of a fruit's colour, in all cameras. occluded: one camera covered. dropped: all cameras black."""
KINDS: tuple[Kind, ...] = get_args(Kind)
Images = dict[str, NDArray[np.uint8]]
IMAGE = "image"
"""Name of the camera of an environment whose observation is an image and nothing else."""
COLOURS = ((214, 40, 40), (240, 150, 30))
"""Of the ball: an apple's and an orange's."""


class Corruption:
    """What happens to the images of an episode. frames: observations in an episode; cameras: names of the images."""

    def __init__(self, kind: Kind, frames: int, cameras: tuple[str, ...], seed: int = 0) -> None:
        if kind not in KINDS:
            raise ValueError(f"there is no corruption {kind!r}; choose from {', '.join(KINDS)}")
        self.kind, self.cameras = kind, cameras
        rng = np.random.default_rng((11, seed))
        self.when = np.zeros(frames, dtype=bool)
        """Frames that are corrupted."""
        length = {"distractors": 4, "occluded": 4, "dropped": 2}[kind]
        starts = [0] if rng.random() < 0.5 else []
        starts += [int(third * frames / 3 + rng.uniform(1, max(2, frames / 3 - length))) for third in range(3)]
        for start in starts:
            self.when[start : start + length] = True
        self.occluded = str(rng.choice(np.array(cameras)))
        """The camera that is covered."""
        self._rng = rng
        self._patches = [(rng.random(2), rng.uniform(0.12, 0.3, 2), rng.integers(0, 256, 3)) for _ in range(3)]
        self._ball = rng.random(2), rng.uniform(-0.12, 0.12, 2), COLOURS[int(rng.integers(2))]

    def flags(self, frame: int) -> dict[str, bool]:
        """Whether the image of each camera is corrupted at a frame."""
        now = frame < len(self.when) and bool(self.when[frame])
        return {name: now and (self.kind != "occluded" or name == self.occluded) for name in self.cameras}

    def apply(self, images: Images, frame: int) -> Images:
        """Images (height, width, 3) by camera, corrupted where `flags` says so."""
        return {name: self._corrupt(image, frame) if self.flags(frame).get(name) else image for name, image in images.items()}

    def _corrupt(self, image: NDArray[np.uint8], frame: int) -> NDArray[np.uint8]:
        if self.kind == "dropped":
            return np.zeros_like(image)
        if self.kind == "occluded":
            return np.full_like(image, 90)
        sides = np.array(image.shape[:2])
        out = image.copy()
        for at, size, colour in self._patches:
            (top, left), (high, wide) = (at * sides).astype(int), (size * sides).astype(int)
            out[top : top + high, left : left + wide] = colour
        place, velocity, ball = self._ball
        y, x = np.abs((place + velocity * frame) % 2 - 1) * sides  # to and fro
        rows, columns = np.mgrid[: sides[0], : sides[1]]
        out[(rows - y) ** 2 + (columns - x) ** 2 < (0.07 * sides.min()) ** 2] = ball
        return out


class Corrupted(gymnasium.Wrapper):
    """An environment whose images are corrupted at times. info["corrupted"] says of each camera whether it is now.

    Observations are a dict with images in it, uint8 (height, width, 3), or one image alone, whose camera is called IMAGE.
    kind: see `Corruption`; every: steps from one observation to the next; frames: observations of an episode.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], kind: Kind, every: int = 15, frames: int = 41) -> None:
        super().__init__(env)
        space: Any = env.observation_space
        self._alone = not isinstance(space, gymnasium.spaces.Dict)
        spaces = {IMAGE: space} if self._alone else space.spaces
        self._cameras = tuple(name for name, one in spaces.items() if one.dtype == np.uint8 and _of_image(one.shape))
        if not self._cameras:
            raise ValueError(
                f"only images can be corrupted, uint8 (height, width, 3), alone or in a dict; this environment's observations are {space}"
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
        return self._corrupted(observation, info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return self._after(1, self.env.step(action))

    def step_many(self, actions: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Execute actions (n, a), of an environment that has `step_many`."""
        return self._after(len(actions), self.env.get_wrapper_attr("step_many")(actions))

    def _after(self, steps: int, result: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._time += steps
        observation, info = self._corrupted(result[0], result[4])
        return observation, result[1], result[2], result[3], info

    def _corrupted(self, observation: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        frame = self._time // self._every
        by_name = {IMAGE: observation} if self._alone else observation
        images = {name: by_name[name] for name in self._cameras if name in by_name}
        out = {**by_name, **self.corruption.apply(images, frame)}
        return out[IMAGE] if self._alone else out, {**info, "corrupted": self.corruption.flags(frame)}


def _of_image(shape: tuple[int, ...] | None) -> bool:
    return shape is not None and len(shape) == 3 and shape[-1] == 3
