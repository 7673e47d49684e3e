"""What a simulated world is: one that gives the same clip for the same seed, and can be walked by anybody's actions."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Frame = NDArray[np.uint8]


class Clip(NamedTuple):
    """frames: (t, px, px, 3), 0 to 255. actions: (t, a), the action that led to each frame, zeros for the first. poses: (t, p)."""

    frames: Frame
    actions: NDArray[np.float32]
    poses: NDArray[np.float32]


class Visitor:
    """An agent in a world of which the pose is the whole state: it acts, and looks.

    world: with `move(place, pose, action) -> pose` and `render(place, poses) -> frames`. place: where it is. pose: where it starts.
    """

    def __init__(self, world: Any, place: Any, pose: NDArray[np.float32]) -> None:
        self.world, self.place, self.pose = world, place, pose

    def look(self) -> Frame:
        """What is seen now, (px, px, 3)."""
        frame: Frame = self.world.render(self.place, self.pose[None])[0]
        return frame

    def step(self, action: NDArray[np.float32]) -> Frame:
        """Act, (forward, turn), and look. What lies outside of 0 to 1 and -1 to 1 is clipped."""
        action = np.asarray(action, np.float32)
        if action.shape != (2,) or not np.isfinite(action).all():
            raise ValueError(f"an action is two finite numbers, forward (0 to 1) and turn (-1 to 1); got {action.tolist()}")
        self.pose = self.world.move(self.place, self.pose, action)
        return self.look()


class World(Protocol):
    """A frozen dataclass of options; its clips depend on these and the seed only, bit for bit."""

    @property
    def px(self) -> int:
        """Height and width of a frame."""
        ...

    @property
    def actions(self) -> tuple[str, ...]:
        """Name of each number of an action."""
        ...

    def clip(self, seed: int, frames: int) -> Clip:
        """A film of a walk through the world of a seed."""
        ...

    def enter(self, seed: int) -> Visitor:
        """The world of a seed, to act in from where its clip begins."""
        ...
