"""What a place is worth under the data's own behaviour: the mean discounted return of the walks that pass it. For plans that end early."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .data import Transitions
from .envs.maze2d import GOAL_RADIUS, OFFSET, Array, Maze

DISCOUNT = 0.995
"""Of each step: the goal, which pays 1 a step for ever, is worth 200."""
BINS = 3
"""Of a table along the side of a cell."""


class PlaceValue:
    """Value of positions (..., 2) in a maze, interpolated from a table (rows, columns) of bins."""

    def __init__(self, table: Array) -> None:
        self.table = torch.from_numpy(table).float()

    @classmethod
    def fit(cls, maze: Maze, data: Transitions, goal: Array) -> PlaceValue:
        """From streams of transitions: a walk earns until it comes to the goal (2,), which holds it; before, steps in the pit cost."""
        position = data.observations[..., :2].astype(float)
        home = np.linalg.norm(position - goal, axis=-1) <= GOAL_RADIUS
        cost = (maze.chance.cost if maze.chance else 0.0) * maze.on("P", position)
        value, later = np.empty(home.shape), np.zeros(len(home))
        for t in range(home.shape[1] - 1, -1, -1):
            later = np.where(home[:, t], 1 / (1 - DISCOUNT), -cost[:, t] + DISCOUNT * later)
            value[:, t] = later
        length = home.shape[1]
        known = slice(0, max(length - 1000, length // 2))  # the returns of later frames are cut off
        shape = np.array(maze.walls.shape) * BINS
        place = np.clip(np.floor((position[:, known] + 0.5 + OFFSET) * BINS).astype(np.int64), 0, shape - 1).reshape(-1, 2)
        flat = place[:, 0] * shape[1] + place[:, 1]
        total, count = (np.bincount(flat, weight, int(shape.prod())) for weight in (value[:, known].ravel(), None))
        table = np.where(count > 0, total / np.maximum(count, 1), np.nan).reshape(shape)
        return cls(_filled(table))

    def __call__(self, position: Tensor) -> Tensor:
        """(...), differentiable, for positions (..., 2)."""
        shape = torch.tensor(self.table.shape) / BINS
        where = (2 * (position + 0.5 + OFFSET) / shape - 1).flip(-1).reshape(1, 1, -1, 2)
        found = F.grid_sample(self.table[None, None], where, padding_mode="border", align_corners=False)
        return found.view(position.shape[:-1])


def _filled(table: Array) -> Array:
    """Bins that no walk has passed take the mean of their known neighbours, so that walls do not bend the values beside them."""
    while np.isnan(table).any():
        padded = np.pad(table, 1, constant_values=np.nan)
        rows, columns = table.shape
        around = np.stack([padded[i : i + rows, j : j + columns] for i in range(3) for j in range(3)])
        known = ~np.isnan(around)
        mean = np.where(known, around, 0).sum(0) / np.maximum(known.sum(0), 1)
        table = np.where(np.isnan(table) & known.any(0), mean, table)
    return table
