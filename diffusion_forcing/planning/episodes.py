"""Episodes of a policy in a maze, and their scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..engine.task import Progress
from .envs.maze2d import Array, Balls, Bools, Maze


@dataclass
class Counts:
    """What a planner has done since its reset."""

    plans: int = 0
    """Plans made."""
    bad: int = 0
    """Invalid plans (not finite, or far outside of the maze) that were sampled again."""
    given_up: int = 0
    """Balls whose plan was invalid three times in a row; they apply no force until the next plan."""
    seconds: float = 0.0
    """Time spent planning."""
    errors: list[Array] = field(default_factory=list)
    """Metres between planned and actual positions when a plan was replaced."""


class Policy(Protocol):
    """Who acts for n balls: reset(n), then act(observation, goal) once a step."""

    counts: Counts | None = None
    """Of a policy that plans."""

    def reset(self, number: int, *, steps: int | None = None) -> None:
        """Begin episodes of `number` balls, `steps` long (None: the maze's own length)."""
        ...

    def act(self, observation: Array, goal: Array) -> NDArray[Any]:
        """Actions (n, 2) for observations (n, 4) and goals (n, 2)."""
        ...

    def new_plan(self) -> Array | None:
        """The first ball's plan (t, 6) if the last action began a new one, else None."""
        return None


@dataclass
class Episodes:
    """n episodes: observations (n, t+1, 4), rewards and wall contacts (n, t), goals (n, 2)."""

    maze: Maze
    observations: Array
    rewards: Array
    touched: Bools
    goals: Array
    plans: list[tuple[int, Array]] = field(default_factory=list)
    """The first ball's plans, each with the step at which it was made."""

    @property
    def scores(self) -> Array:
        """Normalised score of each episode (n,)."""
        return self.maze.normalised(self.rewards.sum(1))

    @property
    def reached(self) -> Bools:
        """Whether each episode reached its goal (n,)."""
        return np.any(self.rewards, axis=1)

    @property
    def first(self) -> NDArray[np.int64]:
        """Step of the first reward (n,); the episode's length where there is none."""
        return np.where(self.reached, self.rewards.argmax(1), self.rewards.shape[1])

    @property
    def stayed(self) -> Array:
        """Fraction of the time after the first reward spent in the goal, of episodes that reached it."""
        left = self.rewards.shape[1] - self.first
        return (self.rewards.sum(1) / np.maximum(left, 1))[self.reached]

    def summary(self) -> dict[str, float]:
        """Means over the episodes; NaN where there is nothing to average."""
        scores, number = self.scores, len(self.scores)
        return {
            "score": float(scores.mean()),
            "score_stderr": float(scores.std(ddof=1) / number**0.5) if number > 1 else float("nan"),
            "success": float(self.reached.mean()),
            "first_reach": float(self.first[self.reached].mean()) if self.reached.any() else float("nan"),
            "stay": float(self.stayed.mean()) if self.reached.any() else float("nan"),
            "wall_contact": float(self.touched.mean()),
            "episodes": number,
        }

    @classmethod
    def concatenate(cls, parts: list[Episodes]) -> Episodes:
        """Episodes of several batches as one; the plans are those of the first."""
        names = ("observations", "rewards", "touched", "goals")
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return cls(parts[0].maze, **joined, plans=parts[0].plans)


def play(policy: Policy, balls: Balls, *, steps: int | None = None, progress: Progress | None = None, what: str = "episodes") -> Episodes:
    """Run one episode of each ball from its current state. steps: None for the maze's own length."""
    steps = steps or balls.maze.steps
    observation = balls.observation
    policy.reset(balls.number, steps=steps)
    observations, earned, touched = [observation], [], []
    plans: list[tuple[int, Array]] = []
    for t in range(steps):
        action = policy.act(observation, balls.goal)
        plan = policy.new_plan()
        if plan is not None:
            plans.append((t, plan))
        observation, reward, touch = balls.step(action)
        observations.append(observation)
        earned.append(reward)
        touched.append(touch)
        if progress is not None:
            progress(what, (t + 1) * balls.number, steps * balls.number)
    return Episodes(balls.maze, np.stack(observations, 1), np.stack(earned, 1), np.stack(touched, 1), balls.goal.copy(), plans)
