"""Mazes with chance: gusts that last a while, a pit beside the windy cells, and balls that live with both.

The same physics as everywhere (`maze2d.step`); a gust is one more force. The wind cannot be observed. The goal holds the ball that reaches
it: from then on it earns 1 in each step. Each step in the pit costs `Chance.cost`.
"""

from __future__ import annotations

import numpy as np

from .maze2d import GOAL_RADIUS, Array, Balls, Bools, Maze, step


class Gusts:
    """The wind that blows on each of n balls. It does not depend on what they do: the same seed is the same wind."""

    def __init__(self, maze: Maze, number: int, rng: np.random.Generator) -> None:
        if maze.chance is None:
            raise ValueError(f"there is no wind in the maze {maze.name!r}; the maze 'windy' has some")
        self.maze, self.chance, self.rng = maze, maze.chance, rng
        self.blows = rng.random(number) < self.chance.probability
        self.left = rng.integers(1, self.chance.hold + 1, number)  # steps until it may change

    def force(self, position: Array) -> Array:
        """Newtons (n, 2) on balls at positions (n, 2) in this step: those on windy cells feel the gust, if one blows."""
        force = np.where((self.blows & self.maze.on("~", position))[:, None], self.chance.force, 0.0)
        self.left -= 1
        over, fresh = self.left == 0, self.rng.random(len(self.blows)) < self.chance.probability
        self.blows = np.where(over, fresh, self.blows)
        self.left[over] = self.chance.hold
        return force


class WindyBalls(Balls):
    """n balls in a maze with chance. With `multi` they start anywhere and have random goals, otherwise on the tiles S."""

    def reset(self) -> Array:
        """Put all balls at their starts, in a wind of their own; returns observations (n, 4)."""
        super().reset()
        starts = np.argwhere(self.maze.tiles("S"))
        if not self.multi and len(starts):
            self.position += starts[self.rng.integers(len(starts), size=self.number)] - np.round(self.position)
        self.gusts = Gusts(self.maze, self.number, np.random.default_rng(self.rng.integers(2**63)))
        self.arrived = np.zeros(self.number, dtype=bool)
        self.pit_steps = np.zeros(self.number, dtype=np.int64)
        return self.observation

    def step(self, action: Array) -> tuple[Array, Array, Bools]:
        """Observations (n, 4), rewards (n,) and which balls touched a wall (n,), after actions (n, 2)."""
        chance = self.gusts.chance
        position, velocity, touched = step(self.maze, self.position, self.velocity, action, self.gusts.force(self.position))
        held = self.arrived[:, None]
        self.position, self.velocity = np.where(held, self.position, position), np.where(held, 0.0, velocity)
        self.arrived = self.arrived | (np.linalg.norm(self.position - self.goal, axis=1) <= GOAL_RADIUS)
        fallen = self.maze.on("P", self.position)
        self.pit_steps += fallen
        self.time += 1
        return self.observation, self.arrived - chance.cost * fallen, touched & ~held[:, 0]


def make_balls(maze: Maze, number: int = 1, *, multi: bool = False, seed: int | None = 0) -> Balls:
    """Balls as the maze has them, with or without chance."""
    return (Balls if maze.chance is None else WindyBalls)(maze, number, multi=multi, seed=seed)
