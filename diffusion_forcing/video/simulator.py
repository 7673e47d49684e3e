"""Roll-outs of the simulator itself, in places never trained on: what a perfect model would show."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Generator

from ..engine.task import Progress
from .policy import ActionPolicy
from .worlds.world import World

Frames = NDArray[np.uint8]
STAGE = "frames of the simulator"


def follow_actions(world: World, seeds: list[int], actions: NDArray[np.float32], progress: Progress) -> Frames:
    """Frames (n, t, px, px, 3) of the worlds of n seeds under actions (n, t, a), the first of which leads to the first frame.

    Actions that were meant for other places lead into walls, as they do what a model imagines.
    """
    frames = np.empty((*actions.shape[:2], world.px, world.px, 3), np.uint8)
    for i, seed in enumerate(seeds):
        visitor = world.enter(seed)
        for t, action in enumerate(actions[i]):
            frames[i, t] = visitor.step(action)
        progress(STAGE, i + 1, len(seeds))
    return frames


def follow_policy(world: World, seeds: list[int], policy: ActionPolicy, length: int, progress: Progress) -> Frames:
    """Frames (n, length, px, px, 3) of the worlds of n seeds under the actions of a policy that looks at them."""
    visitors = [world.enter(seed) for seed in seeds]
    frames = np.empty((len(seeds), length, world.px, world.px, 3), np.uint8)
    generator, stack = Generator().manual_seed(0), policy.stack
    recent = np.stack([visitor.look() for visitor in visitors])[:, None]
    actions = np.zeros((len(visitors), stack, policy.width), np.float32)
    for at in range(0, length, stack):
        actions = policy.choose(recent, actions, 1, generator)
        for one, visitor, chunk in zip(frames, visitors, actions, strict=True):
            for t, action in enumerate(chunk[: length - at]):
                one[at + t] = visitor.step(action)
        recent = frames[:, max(0, at - 1) : at + stack]
        progress(STAGE, min(at + stack, length), length)
    return frames
