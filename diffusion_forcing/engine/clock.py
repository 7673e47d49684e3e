"""How far a training is, by steps and by time, and the learning rate that follows from it."""

from __future__ import annotations

import math
import time

from .config import TrainConfig


class Clock:
    """Steps and seconds of training so far, against a budget of steps, minutes or both."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.step = 0
        self.elapsed = 0.0
        """Seconds of training so far, validation included."""
        self._since: float | None = None

    def tick(self) -> None:
        """Start to count, if this is the first step."""
        if self._since is None:
            self._since = time.monotonic()

    def tock(self) -> None:
        """Count the time since the last call."""
        now = time.monotonic()
        self.elapsed += now - (now if self._since is None else self._since)
        self._since = now

    @property
    def progress(self) -> float:
        """0 at the start, 1 at the end of the budget."""
        return self.progress_at(self.step)

    def progress_at(self, step: int) -> float:
        """Share of the budget that is spent after so many steps. With a budget of both, time counts only where steps come later than they
        should: a run that is in time is the same run on any machine.
        """
        by_time = self.elapsed / (60 * self.config.minutes) if self.config.minutes else 0.0
        if not self.config.steps:
            return by_time
        return by_time if by_time > (step + 1) / self.config.steps else step / self.config.steps

    @property
    def finished(self) -> bool:
        return self.progress >= 1

    def lr_factor(self, step: int) -> float:
        """Share of the peak learning rate: a linear warm-up, then a cosine down to the final share."""
        config = self.config
        progress = min(1.0, self.progress_at(step))
        fall = config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))
        return min(1.0, (step + 1) / config.warmup if config.warmup else 1.0) * fall
