"""The scripted controller that knows the maze: it follows waypoints along a shortest path, as the benchmark's data collector does."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..envs.maze2d import Array, Bools, Maze, by_name

MOVES = np.array([(0, 0), (0, -1), (0, 1), (-1, 0), (1, 0)])  # in the order in which ties are broken
NEAR = 0.1
"""A waypoint is reached within this distance, by a ball whose last step was shorter than this too."""
Uniform = Callable[[int], Array]  # n -> (n, 2) numbers in [0, 1)


@lru_cache
def next_cells(name: str) -> NDArray[np.int64]:
    """(rows, columns, rows, columns, 2): for each target and each cell the cell that follows on the benchmark's path.

    Greedy after 50 sweeps of value iteration, reward 1 at the target, discount 0.99.
    """
    maze = by_name(name)
    shape = maze.walls.shape
    here = np.moveaxis(np.indices(shape), 0, -1)
    moved = np.clip(here + MOVES[:, None, None], 0, np.array(shape) - 1)
    moved = np.where(maze.walls[moved[..., 0], moved[..., 1]][..., None], here, moved)
    table = np.zeros((*shape, *shape, 2), dtype=np.int64)
    for target in maze.cells:
        reward = np.zeros(shape)
        reward[tuple(target)] = 1
        q = np.zeros((len(MOVES), *shape))
        for _ in range(50):
            q = reward + 0.99 * q.max(0)[moved[..., 0], moved[..., 1]]
        table[tuple(target)] = np.take_along_axis(moved, q.argmax(0)[None, ..., None], 0)[0]
    return table


class Controller:
    """n balls towards n targets at once. A new target, or a new ball, makes a new path; waypoints are a little off the cells."""

    def __init__(self, maze: Maze, number: int, uniform: Uniform) -> None:
        self.table = next_cells(maze.name)
        self.uniform = uniform
        self.target = np.full((number, 2), -1000, dtype=np.int64)
        self.cell = np.zeros((number, 2), dtype=np.int64)
        self.waypoint = np.zeros((number, 2))
        self.previous = np.zeros((number, 2))

    def act(self, observation: Array, target: Array) -> tuple[Array, Bools]:
        """Actions (n, 2) for observations (n, 4), and who stands at its target (n,). target: (n, 2), rounded to its cell."""
        position, velocity = observation[:, :2], observation[:, 2:]
        wanted = np.round(target).astype(np.int64)
        changed = np.flatnonzero((wanted != self.target).any(1))
        if len(changed):
            self.target[changed] = wanted[changed]
            self.cell[changed] = np.round(position[changed]).astype(np.int64)
            self.previous[changed] = self.cell[changed]
            self._advance(changed)
        slow = np.linalg.norm(self.previous - position, axis=1) < NEAR
        there = slow & (np.linalg.norm(position - self.target, axis=1) < NEAR)
        aim = np.where(there[:, None], self.target, self.waypoint)
        action = np.clip(10 * (aim - position) - velocity, -1, 1)
        arrived = np.flatnonzero(~there & slow & (np.linalg.norm(position - aim, axis=1) < NEAR))
        if len(arrived):
            self._advance(arrived)
        self.previous = position.copy()
        return action, there

    def _advance(self, who: NDArray[np.int64]) -> None:
        target, cell = self.target[who], self.cell[who]
        cell = self.table[target[:, 0], target[:, 1], cell[:, 0], cell[:, 1]]
        self.cell[who] = cell
        last = (cell == target).all(1)
        self.waypoint[who] = cell - np.where(last[:, None], 0, 0.2 * self.uniform(len(who)))


class ScriptedPolicy:
    """The controller as a policy: a fresh one each episode."""

    def __init__(self, maze: Maze, seed: int = 0) -> None:
        self.maze, self.rng = maze, np.random.default_rng(seed)
        self.reset(1)

    def reset(self, number: int, *, steps: int | None = None) -> None:
        self.controller = Controller(self.maze, number, lambda n: self.rng.uniform(size=(n, 2)))

    def act(self, observation: Array, goal: Array) -> Array:
        return self.controller.act(observation, goal)[0]


class RandomPolicy:
    """Any force, anew at each step."""

    def __init__(self, maze: Maze, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)

    def reset(self, number: int, *, steps: int | None = None) -> None:
        self.number = number

    def act(self, observation: Array, goal: Array) -> Array:
        return self.rng.uniform(-1, 1, (self.number, 2))
