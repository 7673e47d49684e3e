"""Whole episodes of a policy in a maze, and what they say of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .envs.maze2d import Array, Balls, Maze

if TYPE_CHECKING:
    from ..engine.task import Progress


class Policy(Protocol):
    """reset(n) begins n episodes of so many steps; act(observation (n, 4), goal (n, 2)) gives actions (n, 2)."""

    def reset(self, number: int, *, steps: int | None = None) -> None: ...

    def act(self, observation: Array, goal: Array) -> NDArray[Any]: ...


@dataclass
class Episodes:
    """n episodes: observations (n, t+1, 4), rewards and wall contacts (n, t), goals (n, 2)."""

    maze: Maze
    observations: Array
    rewards: Array
    touched: NDArray[np.bool_]
    goals: Array
    plans: list[tuple[int, Array]] = field(default_factory=list)
    """The first ball's plans, each with the step at which it was made."""

    @property
    def scores(self) -> Array:
        """Normalised score of each episode (n,)."""
        return self.maze.normalised(self.rewards.sum(1))

    @property
    def reached(self) -> NDArray[Any]:
        return np.any(self.rewards, axis=1)

    @property
    def first(self) -> NDArray[np.int64]:
        """Step of the first reward (n,); the episode's length where there is none."""
        return np.where(self.reached, self.rewards.argmax(1), self.rewards.shape[1])

    @property
    def stayed(self) -> Array:
        """Share of the time from the first reward on that was spent in the goal, of episodes that reached it."""
        left = self.rewards.shape[1] - self.first
        return (self.rewards.sum(1) / np.maximum(left, 1))[self.reached]

    def summary(self) -> dict[str, float]:
        """Plain numbers."""
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


def play(policy: Policy, balls: Balls, *, steps: int | None = None, progress: Progress | None = None, what: str = "episodes") -> Episodes:
    """Run one episode of each ball, from where a reset puts it."""
    steps = steps or balls.maze.steps
    seen = balls.observation
    policy.reset(balls.number, steps=steps)
    observations, earned, touched = [seen], [], []
    plans: list[tuple[int, Array]] = []
    for t in range(steps):
        action = policy.act(seen, balls.goal)
        if getattr(policy, "age", None) is not None and policy.age[0] == 1:  # type: ignore[attr-defined]
            plans.append((t, policy.plan[0].copy()))  # type: ignore[attr-defined]
        seen, reward, hit = balls.step(action)
        observations.append(seen)
        earned.append(reward)
        touched.append(hit)
        if progress is not None:
            progress(what, (t + 1) * balls.number, steps * balls.number)
    return Episodes(balls.maze, np.stack(observations, 1), np.stack(earned, 1), np.stack(touched, 1), balls.goal.copy(), plans)
