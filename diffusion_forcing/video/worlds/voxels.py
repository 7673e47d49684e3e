"""Voxels: a walk through a landscape of blocks, in the first person. Minecraft-like; rendered by numba (the extra `video`).

x and y lie in the plane and z points up, in blocks; a heading is an angle from x to y, so that a positive turn is to the left. The pose
is the whole state of an agent: the next one follows from it and the action alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .world import Clip, Frame, Visitor

if TYPE_CHECKING:
    from .landscape import Land

Array = NDArray[Any]
Pose = NDArray[np.float32]  # (4,): x, y, z, heading


@dataclass(frozen=True)
class Voxels:
    """A random landscape of blocks, and an agent that walks in it."""

    px: int = 64
    """Height and width of a frame."""
    size: int = 64
    """Blocks a side of the landscape, which repeats."""
    turn: float = 12.0
    """Degrees a frame at most."""
    speed: float = 0.3
    """Blocks a frame at most."""

    def __post_init__(self) -> None:
        if self.px < 8:
            raise ValueError(f"a frame needs at least 8 pixels a side, px is {self.px}; 64 shows the blocks well")
        if not 24 <= self.size <= 1024:
            raise ValueError(f"a landscape has 24 to 1024 blocks a side, size is {self.size}; 64 hold hills and lakes")
        if not 0 < self.turn <= 90:
            raise ValueError(f"turn should lie above 0 and up to 90 degrees a frame, it is {self.turn}; 8 to 15 look smooth")
        if not 0 < self.speed <= 1:
            raise ValueError(f"speed should lie above 0 and up to 1 block a frame, it is {self.speed}; 0.3 is a walk")

    @property
    def actions(self) -> tuple[str, ...]:
        """forward: 0 to 1, in units of `speed`. turn: -1 (right) to 1 (left), in units of `turn`, before going forward."""
        return ("forward", "turn")

    def clip(self, seed: int, frames: int) -> Clip:
        """A walk from place to place, with turns on the spot. A longer clip begins like a shorter one."""
        if frames < 1:
            raise ValueError(f"a clip has at least 1 frame, asked for {frames}")
        from . import landscape

        rng = landscape.generator(seed)
        land = landscape.landscape(self.size, rng)
        pose = landscape.start(land, rng)
        poses, actions = np.empty((frames, 4), np.float32), np.zeros((frames, 2), np.float32)
        poses[0] = pose
        stroll = landscape.stroll(self, land, pose, rng)
        action = next(stroll)
        for t in range(1, frames):
            actions[t] = action
            poses[t] = pose = self.move(land, pose, actions[t])
            action = stroll.send(pose)
        return Clip(self.render(land, poses), actions, poses)

    def enter(self, seed: int) -> Visitor:
        from . import landscape

        rng = landscape.generator(seed)
        land = landscape.landscape(self.size, rng)
        return Visitor(self, land, landscape.start(land, rng))

    def render(self, land: Land, poses: Array) -> Frame:
        """Frames (t, px, px, 3) seen from poses (t, 4)."""
        from . import landscape

        return landscape.film(land, poses, self.px)

    def move(self, land: Land, pose: Pose, action: Array) -> Pose:
        """The pose (4,) after an action (2,), which is clipped to its range: turn, then go forward, sliding along obstacles or staying."""
        from . import landscape

        forward, turn = min(max(float(action[0]), 0.0), 1.0), min(max(float(action[1]), -1.0), 1.0)
        after: Pose = landscape.move(land.ground, land.free, pose, forward * self.speed, turn * math.radians(self.turn))
        return after
