"""Planning in mazes: one model that is policy and planner (paper, section 4.2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..engine.config import Experiment, ModelConfig, RNNConfig, TrainConfig, TransformerConfig
from .options import PLAN_SAMPLER, PlanOptions
from .task import Maze2D

PLAN = {
    "umaze": PlanOptions(scale=0.1, short_plan_scale=4.0),
    "medium": PlanOptions(scale=0.01, short_plan_scale=4.0),
    "large": PlanOptions(scale=0.003, short_plan_scale=4.0),
}
MINUTES = {"umaze": 4.0, "medium": 20.0, "large": 20.0}
"""Of training, on two cores."""


def _train(maze: str) -> TrainConfig:
    # Half of the sequences share one level, as plans sampled whole do: only there, far from anything known, are walls learned. The
    # others teach pyramids, and doubt about single tokens.
    return TrainConfig(
        steps=None, minutes=MINUTES[maze], batch=32, optimizer="muon", lr=3e-3, muon_lr=0.02, warmup=200, ema=0.998,
        draw="independent+staircase+shared+shared", given=0.9, validate_every=500, log_every=100,
    )  # fmt: skip


def _transformer(maze: Any) -> Experiment:
    return Experiment(
        task=Maze2D(maze, plan=PLAN[maze], short_windows=0.4),
        model=ModelConfig(TransformerConfig(hidden=128, layers=4, heads=4, causal=False), schedule="linear"),
        train=_train(maze),
    )


def maze2d_umaze() -> Experiment:
    """The U-shaped maze: a transformer that plans 300 steps ahead. 4 minutes on two cores."""
    return _transformer("umaze")


def maze2d_medium() -> Experiment:
    """The medium maze: a transformer that plans 600 steps ahead. 20 minutes on two cores."""
    return _transformer("medium")


def maze2d_large() -> Experiment:
    """The large maze: a transformer that plans 800 steps ahead. 20 minutes on two cores."""
    return _transformer("large")


def _gru(maze: Any) -> Experiment:
    sampler = replace(PLAN_SAMPLER, matrix="pyramid")
    return Experiment(
        task=Maze2D(maze, sampler=sampler, plan=PLAN[maze], short_windows=0.4),
        model=ModelConfig(RNNConfig(hidden=256, layers=1, blocks=2), schedule="linear"),
        train=_train(maze),
    )


def maze2d_umaze_gru() -> Experiment:
    """The U-shaped maze with a GRU, causal as in the paper, sampled along a pyramid. 4 minutes on two cores."""
    return _gru("umaze")


def maze2d_medium_gru() -> Experiment:
    """The medium maze with a GRU. 20 minutes on two cores."""
    return _gru("medium")


def maze2d_large_gru() -> Experiment:
    """The large maze with a GRU. 20 minutes on two cores."""
    return _gru("large")


def maze2d_paper() -> Experiment:
    """The paper's own size (4.33 million parameters) and settings: GRU, x0-prediction, fused SNR, batch 2048. Wants a GPU."""
    return Experiment(
        task=Maze2D(
            "medium", sampler=replace(PLAN_SAMPLER, steps=50, matrix="pyramid"), plan=PlanOptions(scale=PLAN["medium"].scale, draws=4)
        ),
        model=ModelConfig(
            RNNConfig(hidden=430, layers=1, blocks=2), schedule="linear", parameterization="x0", weight="fused_snr", frame_stack=10
        ),
        train=TrainConfig(steps=50_000, batch=2048, accumulate=16, lr=5e-4, warmup=1000, ema=0.999, given=0.5),
    )


PLANNING = {
    "maze2d-umaze": maze2d_umaze,
    "maze2d-medium": maze2d_medium,
    "maze2d-large": maze2d_large,
    "maze2d-umaze-gru": maze2d_umaze_gru,
    "maze2d-medium-gru": maze2d_medium_gru,
    "maze2d-large-gru": maze2d_large_gru,
    "maze2d-paper": maze2d_paper,
}
