"""Model-predictive path integral control (MPPI) in the mazes: sample variations of a plan and average them, weighted by their cost."""

from __future__ import annotations

import numpy as np

from ..envs.maze2d import Array, Maze, step
from ..episodes import Policy


class MPPI(Policy):
    """n balls towards n goals, each with its own plan; every step samples variations of it and executes the first action of their mean.

    It knows the true dynamics, walls and contacts included, so its predictions are exact. It does not know the way: the cost is the
    straight-line distance to the goal, summed over the horizon, so it waits behind a wall when the way round leads away from the goal for
    longer than the horizon.

    horizon: steps of a plan. samples: variations per step, the plan itself among them. noise: their standard deviation, of forces that
    are held for `hold` steps each, since noise of single steps averages out. temperature: of the weights, in units of cost (metres,
    summed over the horizon): small follows the best variation, large the mean of all.
    """

    def __init__(self, maze: Maze, number: int = 1, *, horizon: int = 40, samples: int = 32, noise: float = 0.7, hold: int = 5,
                 temperature: float = 0.5, seed: int | None = 0) -> None:  # fmt: skip
        for name, value in (("horizon", horizon), ("samples", samples), ("hold", hold)):
            if value < 1:
                raise ValueError(f"{name} should be at least 1; got {value}")
        for name, scale in (("noise", noise), ("temperature", temperature)):
            if not scale > 0:
                raise ValueError(f"{name} should be positive; got {scale}")
        self.maze, self.horizon, self.samples = maze, horizon, samples
        self.noise, self.hold, self.temperature = noise, hold, temperature
        self.rng = np.random.default_rng(seed)
        self.reset(number)

    def reset(self, number: int, *, steps: int | None = None) -> None:
        """Begin episodes of `number` balls, of any length, with plans of no force."""
        if number < 1:
            raise ValueError(f"number should be at least 1; got {number}")
        self.number = number
        self.plan = np.zeros((number, self.horizon, 2))

    def act(self, observation: Array, goal: Array) -> Array:
        """Actions (n, 2) for observations (n, 4) and goals (n, 2)."""
        if observation.shape != (self.number, 4) or goal.shape != (self.number, 2):
            raise ValueError(
                f"this MPPI steers {self.number} balls, from observations ({self.number}, 4) to goals ({self.number}, 2); "
                f"got {observation.shape} and {goal.shape}"
            )
        variations = self._variations()
        cost = self._cost(observation, goal, variations)
        weight = np.exp((cost.min(1, keepdims=True) - cost) / self.temperature)
        weight /= weight.sum(1, keepdims=True)
        plan = np.einsum("ns,nstc->ntc", weight, variations)
        self.plan = np.concatenate([plan[:, 1:], plan[:, -1:]], axis=1)
        return plan[:, 0].copy()

    def _variations(self) -> Array:
        """(n, samples, horizon, 2) actions around the plan, the first the plan itself."""
        pieces = -(-self.horizon // self.hold)
        noise = self.noise * self.rng.standard_normal((self.number, self.samples, pieces, 2)).repeat(self.hold, axis=2)
        noise[:, 0] = 0
        return np.clip(self.plan[:, None] + noise[:, :, : self.horizon], -1, 1)

    def _cost(self, observation: Array, goal: Array, actions: Array) -> Array:
        """(n, samples): distances to the goal in metres, summed over the horizon."""
        position, velocity = np.split(observation.repeat(self.samples, axis=0), 2, axis=1)
        target = goal.repeat(self.samples, axis=0)
        cost = np.zeros(len(target))
        for t in range(self.horizon):
            position, velocity, _ = step(self.maze, position, velocity, actions[:, :, t].reshape(-1, 2))
            cost += np.linalg.norm(position - target, axis=1)
        return cost.reshape(self.number, self.samples)
