"""The scripted controller that knows the maze: it follows waypoints along a shortest path, like the benchmark's data collector."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..envs.maze2d import Array, Bools, Maze, by_name
from ..episodes import Policy

MOVES = np.array([(0, 0), (0, -1), (0, 1), (-1, 0), (1, 0)])  # in the order in which ties are broken
NEAR = 0.1
"""Metres within which a waypoint is reached, by a ball whose last step was shorter than this too."""
Uniform = Callable[[int], Array]  # n -> (n, 2) numbers in [0, 1)


DETOUR = 12
"""Cells that a careful path goes round to avoid one that is windy or a pit."""


@lru_cache
def next_cells(name: str, careful: bool = False) -> NDArray[np.int64]:
    """(rows, columns, rows, columns, 2): for each target and each cell the next cell on the benchmark's path.

    Greedy after 50 sweeps of value iteration, reward 1 at the target, discount 0.99. careful: a step onto a windy cell or into a pit counts
    as `DETOUR` steps.
    """
    maze = by_name(name)
    discount = np.where(maze.tiles("~P") & careful, 0.99**DETOUR, 0.99)
    shape = maze.walls.shape
    cell = np.moveaxis(np.indices(shape), 0, -1)
    neighbour = np.clip(cell + MOVES[:, None, None], 0, np.array(shape) - 1)
    neighbour = np.where(maze.walls[neighbour[..., 0], neighbour[..., 1]][..., None], cell, neighbour)
    table = np.zeros((*shape, *shape, 2), dtype=np.int64)
    for target in maze.cells:
        reward = np.zeros(shape)
        reward[tuple(target)] = 1
        q = np.zeros((len(MOVES), *shape))
        for _ in range(50):
            q = reward + (discount * q.max(0))[neighbour[..., 0], neighbour[..., 1]]
        table[tuple(target)] = np.take_along_axis(neighbour, q.argmax(0)[None, ..., None], 0)[0]
    return table


class Controller:
    """Steers n balls towards n targets. A new target starts a new path; waypoints are jittered around the centres of cells.

    uniform: n -> (n, 2) random numbers in [0, 1), for the jitter. careful: (n,), which balls shun windy cells and pits; may be changed.
    """

    def __init__(self, maze: Maze, number: int, uniform: Uniform, careful: Bools | bool = False) -> None:
        self.tables = np.stack([next_cells(maze.name), next_cells(maze.name, True)])
        self.careful = np.full(number, careful)
        self.uniform = uniform
        self.target = np.full((number, 2), -1000, dtype=np.int64)
        self.cell = np.zeros((number, 2), dtype=np.int64)
        self.waypoint = np.zeros((number, 2))
        self.previous = np.zeros((number, 2))

    def act(self, observation: Array, target: Array) -> tuple[Array, Bools]:
        """Actions (n, 2) for observations (n, 4), and which balls rest at their targets (n,). target: (n, 2), rounded to its cell."""
        position, velocity = observation[:, :2], observation[:, 2:]
        cell = np.round(target).astype(np.int64)
        changed = np.flatnonzero((cell != self.target).any(1))
        if len(changed):
            self.target[changed] = cell[changed]
            self.cell[changed] = np.round(position[changed]).astype(np.int64)
            self.previous[changed] = self.cell[changed]
            self._advance(changed)
        slow = np.linalg.norm(self.previous - position, axis=1) < NEAR
        arrived = slow & (np.linalg.norm(position - self.target, axis=1) < NEAR)
        aim = np.where(arrived[:, None], self.target, self.waypoint)
        action = np.clip(10 * (aim - position) - velocity, -1, 1)
        passed = np.flatnonzero(~arrived & slow & (np.linalg.norm(position - aim, axis=1) < NEAR))
        if len(passed):
            self._advance(passed)
        self.previous = position.copy()
        return action, arrived

    def _advance(self, balls: NDArray[np.int64]) -> None:
        """Give some balls (m,) the next waypoint of their paths."""
        target, cell = self.target[balls], self.cell[balls]
        cell = self.tables[self.careful[balls].astype(int), target[:, 0], target[:, 1], cell[:, 0], cell[:, 1]]
        self.cell[balls] = cell
        last = (cell == target).all(1)
        self.waypoint[balls] = cell - np.where(last[:, None], 0, 0.2 * self.uniform(len(balls)))


class ScriptedPolicy(Policy):
    """The controller as a policy, a new one for each episode. careful: it shuns windy cells and pits, whatever that costs."""

    def __init__(self, maze: Maze, seed: int = 0, careful: bool = False) -> None:
        self.maze, self.rng, self.careful = maze, np.random.default_rng(seed), careful
        self.reset(1)

    def reset(self, number: int, *, steps: int | None = None) -> None:
        self.controller = Controller(self.maze, number, lambda n: self.rng.uniform(size=(n, 2)), self.careful)

    def act(self, observation: Array, goal: Array) -> Array:
        return self.controller.act(observation, goal)[0]


class RandomPolicy(Policy):
    """Uniformly random forces, independent from step to step."""

    def __init__(self, maze: Maze, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)

    def reset(self, number: int, *, steps: int | None = None) -> None:
        self.number = number

    def act(self, observation: Array, goal: Array) -> Array:
        return self.rng.uniform(-1, 1, (self.number, 2))
