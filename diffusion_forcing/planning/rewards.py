"""Rewards of a plan: differentiable functions of a trajectory, to guide sampling by.

reach    a goal as soon as possible, and stay
arrive   a goal at any time
visit    waypoints in order
avoid    a disc to stay out of; add it to another reward
earn     what the maze itself pays: steps from the arrival on, less the cost of its pit
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from .envs.maze2d import GOAL_RADIUS, OFFSET, Maze
from .value import DISCOUNT, PlaceValue


class Trajectory(NamedTuple):
    """A plan in metres and seconds, frame by frame: actions (b, t, 2) and the observations after them (b, t, 4)."""

    action: Tensor
    observation: Tensor

    @property
    def position(self) -> Tensor:
        """(b, t, 2)."""
        return self.observation[..., :2]

    @property
    def velocity(self) -> Tensor:
        """(b, t, 2)."""
        return self.observation[..., 2:]


Reward = Callable[[Trajectory], Tensor]
"""One score for each plan, (b,), differentiable."""


@runtime_checkable
class TrackingReward(Protocol):
    """A reward that depends on what has been achieved: the agent calls `observe` with the positions (n, 2) before every action."""

    def observe(self, position: Tensor) -> None: ...

    def __call__(self, plan: Trajectory) -> Tensor: ...


def reach(goal: Tensor) -> Reward:
    """Minus the distance to the goal (b, 2), summed over time: arriving early and staying both count."""

    def reward(plan: Trajectory) -> Tensor:
        return -distance(plan.position, _per_plan(goal, plan)[:, None]).sum(1)

    return reward


def arrive(goal: Tensor, sharpness: float = 4.0) -> Reward:
    """Minus the smallest distance to the goal (b, 2) over time, as a soft minimum so that every frame has a gradient.

    sharpness: of the soft minimum, per metre. The value is multiplied by the number of frames, so that scales compare with `reach`.
    """

    def reward(plan: Trajectory) -> Tensor:
        to_goal = distance(plan.position, _per_plan(goal, plan)[:, None])
        return to_goal.shape[1] * torch.logsumexp(-sharpness * to_goal, dim=1) / sharpness

    return reward


class visit:
    """Waypoints (b, 2) to pass in order. Those still to come share the plan's time equally; distances to them are summed.

    The agent reports positions (`observe`): a waypoint within `radius` counts as passed and the next plan starts with the one after.
    """

    def __init__(self, points: Sequence[Tensor], radius: float = GOAL_RADIUS) -> None:
        if not points:
            raise ValueError("visit needs at least one point")
        self.points = torch.stack([torch.as_tensor(point, dtype=torch.float32) for point in points], dim=1)  # (b, p, 2)
        self.radius = radius
        self.passed = torch.zeros(len(self.points), dtype=torch.long)  # waypoints passed by each ball

    def observe(self, position: Tensor) -> None:
        """Update the waypoints passed from positions (b, 2). The last one is never marked as passed."""
        if len(self.points) == 1:  # the same waypoints for all
            self.points, self.passed = self.points.expand(len(position), -1, -1), self.passed.expand(len(position))
        near = (self.points[torch.arange(len(position)), self.passed] - position).norm(dim=-1) <= self.radius
        self.passed = (self.passed + near).clamp(max=self.points.shape[1] - 1)

    def __call__(self, plan: Trajectory) -> Tensor:
        frames = torch.arange(plan.position.shape[1])
        remaining = self.points.shape[1] - self.passed
        index = self.passed[:, None] + frames * remaining[:, None] // len(frames)  # (b, t): the waypoint of each frame
        target = self.points.gather(1, index[..., None].expand(-1, -1, 2))
        return -distance(plan.position, _per_plan(target, plan)).sum(1)


def avoid(centre: Tensor, radius: float, strength: float = 3.0) -> Reward:
    """Minus the depth in metres to which each frame lies inside the disc around centre (b, 2), summed, times `strength`."""

    def reward(plan: Trajectory) -> Tensor:
        return -strength * (radius - distance(plan.position, _per_plan(centre, plan)[:, None])).clamp(min=0).sum(1)

    return reward


def earn(maze: Maze, goal: Tensor, softness: float = 0.1, every: int = 5, value: PlaceValue | None = None) -> Reward:
    """The return of a maze with chance: 1 for each frame from the arrival at the goal (b, 2) on, less the cost of frames in the pit.

    softness: metres over which edges are smoothed, so that there is a gradient; a tenth of it at the edge of the pit. every: only each of
    so many frames is looked at. value: of the place where a plan ends; the return is then discounted (`value.DISCOUNT`).
    """
    cost = maze.chance.cost if maze.chance else 0.0
    centre, half = _rows_of_tiles(maze, "P")

    def reward(plan: Trajectory) -> Tensor:
        position = plan.position[:, every - 1 :: every]
        away = distance(position, _per_plan(goal, plan)[:, None])
        before = (1 - torch.sigmoid((GOAL_RADIUS - away) / softness)).cumprod(1)
        paid = 1 - before
        if cost and len(centre):
            depth = (half - (position[:, :, None] - centre).abs()).amin(-1)  # (b, t, n), inside of each part of the pit
            paid = paid - cost * before * torch.sigmoid(depth.amax(-1) / (0.1 * softness + 0.01))
        if value is None:
            return every * paid.sum(1)
        discount = DISCOUNT ** (every * torch.arange(1.0, paid.shape[1] + 1))
        last = (1 - before[:, -1]) / (1 - DISCOUNT) + before[:, -1] * value(position[:, -1])
        return every * (discount * paid).sum(1) + discount[-1] * last

    return reward


def _rows_of_tiles(maze: Maze, kind: str) -> tuple[Tensor, Tensor]:
    """Centres and half extents (n, 2) of tiles of a kind, those beside each other in a row as one: there is no edge between them."""
    centres, halves = [], []
    for row, tiles in enumerate(maze.tiles(kind)):
        edges = np.flatnonzero(np.diff(np.concatenate([[False], tiles, [False]]).astype(int)))
        for first, end in edges.reshape(-1, 2):
            centres.append((row - OFFSET, (first + end - 1) / 2 - OFFSET))
            halves.append((0.5, (end - first) / 2))
    return torch.tensor(centres).view(-1, 2), torch.tensor(halves).view(-1, 2)


def scaled(reward: Reward, weight: Tensor) -> Reward:
    """A reward times one weight per ball, (b,)."""
    return lambda plan: _per_plan(weight, plan) * reward(plan)


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Euclidean distance over the last axis, smooth at 0."""
    return ((a - b) ** 2).sum(-1).add(1e-4).sqrt()


def _per_plan(value: Tensor, plan: Trajectory) -> Tensor:
    """One row per ball repeated for its plans: Monte Carlo guidance and candidates put n plans of a ball side by side."""
    return value.repeat_interleave(len(plan.action) // len(value), dim=0)
