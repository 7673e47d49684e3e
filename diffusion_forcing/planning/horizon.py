"""Horizon control: how far ahead each ball plans, and when it plans again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .envs.maze2d import GOAL_RADIUS, Array, Bools
from .options import PlanOptions


class HorizonControl:
    """Of each ball: the tokens of its next plan, the actions until that is due, and how many of its plans failed.

    With a fixed `lookahead`, or by a reward, every plan has the same length. Towards a goal the horizon adapts (arguments `adaptive`): the
    first plan has `min_tokens`; a plan that is not accepted is made again at twice the length; the next one is as long as the accepted
    plan took to arrive, and `extra_tokens`; one that fails in execution is replaced by one to the end of the episode.
    """

    def __init__(self, options: PlanOptions, number: int, episode_tokens: int, frame_stack: int) -> None:
        self.options, self.episode_tokens, self.frame_stack = options, episode_tokens, frame_stack
        self.tokens = np.full(number, min(episode_tokens, options.lookahead or episode_tokens))
        self.interval = np.zeros(number, dtype=np.int64)  # 0: there is no plan yet
        self.failures = np.zeros(number, dtype=np.int64)  # plans that failed, less those that held since
        self._lengths = plan_lengths(options.min_tokens, episode_tokens)

    @property
    def started(self) -> Bools:
        """Balls that have a plan, (n,)."""
        return self.interval > 0

    def due(self, age: NDArray[np.int64], planned: NDArray[np.int64], error: Array, adaptive: bool) -> Bools:
        """Balls that need a new plan, (n,), given the frames executed and planned, and the metres between plan and ball."""
        due: Bools = (age >= self.interval) | (age >= planned)
        if adaptive:
            due |= (error > self.options.replan_error) & (age >= self.options.short_plan_replan)
        return due

    def review(self, due: Bools, error: Array, adaptive: bool) -> None:
        """Count the plans that failed among those to be replaced, and set the length of the next ones."""
        failed = error > self.options.replan_error
        self.failures[due] = np.where(failed, self.failures + 1, np.maximum(self.failures - 1, 0))[due]
        if adaptive:
            self.tokens[~self.started] = self.options.min_tokens
            self.tokens[due & failed] = self.episode_tokens

    def accept(self, balls: NDArray[np.int64], plans: Array, goal: Array | None) -> None:
        """Schedule what follows the plans (m, t, 6) of some balls. goal: (m, 2) where the horizon adapts, else None."""
        length = plans.shape[1] // self.frame_stack
        short = goal is not None and length <= self.options.min_tokens
        self.interval[balls] = min(self.options.short_plan_replan if short else self.options.replan, plans.shape[1])
        if goal is not None:
            _, token = self.arrival(plans, goal)
            index = np.searchsorted(self._lengths, token + 1 + self.options.extra_tokens)
            self.tokens[balls] = self._lengths[np.minimum(index, len(self._lengths) - 1)]

    def arrival(self, plans: Array, goal: Array) -> tuple[Bools, NDArray[np.int64]]:
        """Whether plans (m, t, 6) come to their goals (m, 2), and in which token; the episode's last where they do not."""
        close = np.linalg.norm(plans[..., 2:4] - goal[:, None], axis=-1) < GOAL_RADIUS
        return close.any(1), np.where(close.any(1), close.argmax(1) // self.frame_stack, self.episode_tokens)


def plan_lengths(shortest: int, longest: int) -> NDArray[np.int64]:
    """Lengths of plans in use, each about a quarter longer than the one before: few, so that balls are planned for in batches."""
    lengths = [shortest]
    while lengths[-1] < longest:
        lengths.append(min(longest, max(lengths[-1] + 1, round(1.25 * lengths[-1]))))
    return np.array([min(shortest, longest)] if shortest >= longest else lengths)
