"""Dynamic programming on the true model of a maze with chance: what a planner can earn that knows the odds.

States are cells and steps left, options are straight walks to any cell in sight. How long each takes, where it ends and what it costs is
estimated by playing it in the simulator, wind and all; backward induction over the steps left then gives the best option.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..envs.maze2d import GOAL_RADIUS, JITTER, OFFSET, Array, Maze, step
from ..envs.windy import Gusts
from ..episodes import Policy

CLOSE = 0.3
"""Metres within which a walk has come to its end."""
PATIENCE = 100
"""Steps after which it ends anyway."""


class Option(NamedTuple):
    """A walk between two cells, by number, and n outcomes of it: steps taken, steps in the pit, cell at its end; -1 for the goal."""

    start: int
    end: int
    taken: NDArray[np.int64]
    pit: NDArray[np.int64]
    after: NDArray[np.int64]


class Model(NamedTuple):
    """Free cells (c, 2), and the number of each by row and column; options; best option by steps left and cell (steps+1, c)."""

    cells: NDArray[np.int64]
    number: NDArray[np.int64]
    options: list[Option]
    best: NDArray[np.int64]
    value: Array


def walk(observation: Array, target: Array) -> Array:
    """Actions (n, 2) of balls that walk straight to their targets (n, 2)."""
    action: Array = np.clip(10 * (target - observation[:, :2]) - observation[:, 2:], -1, 1)
    return action


@lru_cache
def solve(maze: Maze, samples: int = 400, seed: int = 0) -> Model:
    """The maze's best options, from `samples` plays of each."""
    rng = np.random.default_rng(seed)
    cells = np.argwhere(~maze.walls)
    number = np.full(maze.walls.shape, -1)
    number[tuple(cells.T)] = np.arange(len(cells))
    options = [_play(maze, cells, number, i, j, samples, rng) for i, j in _in_sight(maze, cells)]
    value, best = np.zeros((maze.steps + 1, len(cells))), np.zeros((maze.steps + 1, len(cells)), dtype=np.int64)
    cost = 0.0 if maze.chance is None else maze.chance.cost
    for left in range(1, maze.steps + 1):
        value[left] = -np.inf
        for index, option in enumerate(options):
            rest = np.maximum(left - option.taken, 0)
            earned = np.where(option.after < 0, rest, value[rest, option.after]) - cost * np.minimum(option.pit, left)
            if (mean := earned.mean()) > value[left, option.start]:
                value[left, option.start], best[left, option.start] = mean, index
    return Model(cells, number, options, best, value)


def _in_sight(maze: Maze, cells: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Pairs of cells, by number, with nothing but free cells between them along a row or a column."""
    pairs = []
    for i, a in enumerate(cells):
        for j, b in enumerate(cells):
            (top, left), (bottom, right) = np.minimum(a, b), np.maximum(a, b) + 1
            if i != j and (a == b).any() and not maze.walls[top:bottom, left:right].any():
                pairs.append((i, j))
    return pairs


def _play(maze: Maze, cells: NDArray[np.int64], number: NDArray[np.int64], i: int, j: int, n: int, rng: np.random.Generator) -> Option:
    """n plays of the walk from cell i to cell j."""
    position = cells[i] - OFFSET + rng.uniform(-2 * JITTER, 2 * JITTER, (n, 2))
    velocity = rng.standard_normal((n, 2))
    gusts = Gusts(maze, n, rng)
    target = np.tile(_aim(maze, cells[j]), (n, 1))
    taken, pit, after, open_ = np.full(n, PATIENCE), np.zeros(n, np.int64), np.full(n, i), np.ones(n, dtype=bool)
    for t in range(1, PATIENCE + 1):
        action = walk(np.concatenate([position, velocity], axis=1), target)
        position, velocity, _ = step(maze, position, velocity, action, gusts.force(position))
        pit += open_ & maze.on("P", position)
        won = np.linalg.norm(position - maze.goal, axis=1) <= GOAL_RADIUS
        done = open_ & (won | (np.linalg.norm(position - target, axis=1) < CLOSE) | (t == PATIENCE))
        taken[done] = t
        where = np.floor(position + 0.5 + OFFSET).astype(np.int64)
        after[done] = np.where(won, -1, number[where[:, 0], where[:, 1]])[done]
        open_ &= ~done
    return Option(i, j, taken, pit, after)


def _aim(maze: Maze, cell: NDArray[np.int64]) -> Array:
    """Where a walk to a cell goes: its centre, or the goal's own point."""
    aim: Array = np.where((cell == maze.goal).all(), maze.goal, cell - OFFSET)
    return aim


class DynamicProgramming(Policy):
    """Acts by the best options: each is walked to its end, or until it has taken too long, and then the next is looked up."""

    def __init__(self, maze: Maze) -> None:
        self.maze, self.model = maze, solve(maze)
        self.reset(1)

    def reset(self, number: int, *, steps: int | None = None) -> None:
        self.left = steps or self.maze.steps
        self.target = np.full((number, 2), np.nan)
        self.age = np.zeros(number, dtype=np.int64)

    def act(self, observation: Array, goal: Array) -> Array:
        position = observation[:, :2]
        distance = np.linalg.norm(position - self.target, axis=1)
        due = ~(distance >= CLOSE) | (self.age >= PATIENCE)
        cell = np.floor(position + 0.5 + OFFSET).astype(np.int64)[due]
        which = self.model.best[self.left, self.model.number[cell[:, 0], cell[:, 1]]]
        ends = [self.model.options[index].end for index in which]
        self.target[due] = np.array([_aim(self.maze, self.model.cells[end]) for end in ends]).reshape(-1, 2)
        self.age = np.where(due, 0, self.age + 1)
        self.left = max(1, self.left - 1)
        return walk(observation, self.target)
