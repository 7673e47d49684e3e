"""What a world to walk through and film is: one that gives the same clip for the same seed."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Frame = NDArray[np.uint8]


class Clip(NamedTuple):
    """frames: (t, px, px, 3), 0 to 255. actions: (t, a), the action that led to each frame, zeros for the first. poses: (t, p)."""

    frames: Frame
    actions: NDArray[np.float32]
    poses: NDArray[np.float32]


class Visitor(Protocol):
    """Someone in a world, whom a user leads."""

    def look(self) -> Frame:
        """What is seen now, (px, px, 3)."""
        ...

    def step(self, action: NDArray[np.float32]) -> Frame:
        """Act, (a,), and look."""
        ...


class World(Protocol):
    """A frozen dataclass of options; its clips depend on these and the seed only, bit for bit."""

    @property
    def px(self) -> int:
        """Height and width of a frame."""
        ...

    @property
    def actions(self) -> tuple[str, ...]:
        """What each number of an action means."""
        ...

    def clip(self, seed: int, frames: int) -> Clip:
        """A walk through a world drawn by the seed."""
        ...

    def enter(self, seed: int) -> Visitor:
        """The same world, to be walked by hand, from where its clip begins."""
        ...
