"""The task of the maze with chance: wind, a pit, and a way round. Offline data, one model, and the same guidance with and without luck."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from ..codecs import Chain
from ..sampler import Sampler
from .options import PlanOptions
from .task import Maze2D
from .tokens import fit_choice_codec

WINDY_SAMPLER = Sampler(steps=8, matrix="pyramid", eta=1.0)
EXPECTIMAX = PlanOptions(
    scale=0.05, lookahead=8, replan=25, draws=16, futures="fresh", estimator="covariance", future_steps=4, expectimax=True, only_next=True,
    reward="earn",
)  # fmt: skip


@dataclass(frozen=True)
class WindyMaze2D(Maze2D):
    """A ball in a maze with wind and a pit."""

    maze: Literal["umaze", "medium", "large", "windy"] = "windy"
    """Which maze."""
    sampler: Sampler = WINDY_SAMPLER
    """How a plan is denoised."""
    plan: PlanOptions = EXPECTIMAX
    """Guidance and replanning of the agent."""
    frame_stack: int = 25
    """Frames whose actions are one token and whose observations are the next."""
    window_frames: int | None = 200
    """Frames of a training window."""
    short_windows: float = 0.0
    """Fraction of the training batches cut into shorter windows, of one random length each."""
    wiener_smoother: bool = False
    """Wiener estimates as input, of tokens that hold positions all alike; not so here."""
    linear_dynamics: bool = False
    """The linear law of motion from token to token, which the wind breaks."""

    def fit_codec(self, frames: Tensor) -> Chain:
        return fit_choice_codec(frames, self.frame_stack)
