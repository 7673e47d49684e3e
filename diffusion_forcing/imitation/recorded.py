"""Recorded demonstrations, a LeRobot data set: there is no simulator, so decided actions are compared with those of the demonstrators."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..checks import check_options
from ..engine.task import Evaluation, Progress, Table
from .agent import ImitationAgent
from .demonstrations import Demonstrations
from .lerobot import read_lerobot
from .tokens import ACTIONS, STATE
from .windows import timesteps_of
from .world import World

MOST_BETWEEN = 5
"""Actions between frames, at most: several frames in a chunk allow several offsets to cut chunks at."""


@dataclass(frozen=True)
class Recorded(World):
    """Your own demonstrations: a LeRobot data set (v2.0, 2.1 or 3.0) in a folder."""

    mirrors: ClassVar[bool] = False
    path: Path = Path("demonstrations")
    """The folder."""
    cameras: tuple[str, ...] | None = None
    """Names of the cameras; None: all."""
    px: int = 64
    """Height and width to which images are cropped and resized."""
    held_out: int = 4
    """Demonstrations, the last ones, that are not trained on but evaluated."""

    def __post_init__(self) -> None:
        check_options(self, "px", "held_out")

    @property
    def default_samples(self) -> int:
        return self.held_out

    def prepare(self, progress: Progress | None = None) -> Path:
        return self.path

    def demonstrations(self, chunk: int, progress: Progress | None = None) -> Demonstrations:
        every = max(steps for steps in range(1, MOST_BETWEEN + 1) if chunk % steps == 0)
        return read_lerobot(self.path, cameras=self.cameras, px=self.px, every=every, progress=progress)

    def evaluate(
        self, agent: ImitationAgent, folder: Path, *, held_out: Callable[[], Demonstrations], samples: int, seed: int, progress: Progress
    ) -> Evaluation:  # fmt: skip
        """Mean absolute error of the actions decided at each timestep of held-out demonstrations, whose own actions are then executed."""
        shown = held_out()
        number = min(samples, len(shown))
        if number < samples:
            warnings.warn(f"{samples} demonstrations were asked for, but {number} are held out: those are used", stacklevel=3)
        chunk = agent.codec.shapes[ACTIONS][0]
        errors, of_last, targets = [], [], []
        for i in range(number):
            episode = timesteps_of(shown, i, chunk, 0, STATE in agent.sensors)
            agent.reset(1)
            for j in range(len(episode[ACTIONS]) - 1):
                decided = agent.act({name: episode[name][j][None] for name in agent.sensors}, executed=episode[ACTIONS][j + 1][None])
                target = shown.actions[i][j * chunk : (j + 1) * chunk]  # the last chunk may be a short one
                last = episode[ACTIONS][j][-1] if j else target[0]
                errors.append(np.abs(decided[0, : len(target)] - target))
                of_last.append(np.abs(last - target))
                targets.append(target)
            progress("demonstrations", i + 1, number)
        error, repeated = np.concatenate(errors).mean(0), np.concatenate(of_last).mean(0)
        std = np.concatenate(targets).std(0)
        columns = zip(error, repeated, std, strict=True)
        rows = tuple((f"action {i}", *(f"{value:.4g}" for value in row)) for i, row in enumerate(columns))
        metrics = {
            "error over std": float((error / np.maximum(std, 1e-9)).mean()),
            "error over std, last action repeated": float((repeated / np.maximum(std, 1e-9)).mean()),
        }
        title = f"Actions in {number} held-out demonstrations: mean absolute error"
        return Evaluation(metrics, (Table(title, ("", "model", "last action repeated", "std of actions"), rows),), {})
