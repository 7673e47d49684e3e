"""Planning in mazes: one model that is policy and planner (paper, section 4.2)."""

from __future__ import annotations

from ..config import Experiment, ModelConfig, RNNConfig, TrainConfig, TransformerConfig
from ..planning import PlanOptions
from ..tasks import Maze2D

PLAN = {
    "umaze": PlanOptions(scale=0.2, near_scale=10.0),
    "medium": PlanOptions(scale=0.07, near_scale=3.5),
    "large": PlanOptions(scale=0.02, near_scale=1.0),
}


def _transformer(maze: str, minutes: float, hidden: int = 128, layers: int = 4) -> Experiment:
    return Experiment(
        task=Maze2D(maze, plan=PLAN[maze]),  # type: ignore[arg-type]
        model=ModelConfig(TransformerConfig(hidden=hidden, layers=layers, heads=4, causal=False), schedule="linear"),
        train=TrainConfig(
            steps=None, minutes=minutes, batch=32, optimizer="muon", lr=2e-3, muon_lr=0.01, warmup=200, ema=0.998,
            draw="independent+staircase", given=0.9, validate_every=500, log_every=50,
        ),
    )  # fmt: skip


def maze2d_umaze() -> Experiment:
    """The U-shaped maze: a transformer that plans 300 steps. 10 minutes on two cores."""
    return _transformer("umaze", 10)


def maze2d_medium() -> Experiment:
    """The medium maze: a transformer that plans 600 steps. 20 minutes on two cores."""
    return _transformer("medium", 20)


def maze2d_large() -> Experiment:
    """The large maze: a transformer that plans 800 steps. 45 minutes on two cores."""
    return _transformer("large", 45)


def _gru(maze: str, minutes: float | None, steps: int | None, hidden: int, layers: int, blocks: int) -> Experiment:
    return Experiment(
        task=Maze2D(maze, plan=PlanOptions(schedule="pyramid", scale=PLAN[maze].scale, near_scale=PLAN[maze].near_scale)),  # type: ignore[arg-type]
        model=ModelConfig(RNNConfig(hidden=hidden, layers=layers, blocks=blocks), schedule="linear"),
        train=TrainConfig(
            steps=steps, minutes=minutes, batch=32, optimizer="muon", lr=2e-3, muon_lr=0.01, warmup=200, ema=0.998,
            draw="independent+staircase", given=0.9, validate_every=500, log_every=50,
        ),
    )  # fmt: skip


def maze2d_umaze_gru() -> Experiment:
    """The U-shaped maze with a GRU, causal as in the paper, and a pyramid. 10 minutes on two cores."""
    return _gru("umaze", 10, None, 256, 1, 2)


def maze2d_medium_gru() -> Experiment:
    """The medium maze with a GRU. 20 minutes on two cores."""
    return _gru("medium", 20, None, 256, 1, 2)


def maze2d_large_gru() -> Experiment:
    """The large maze with a GRU. 45 minutes on two cores."""
    return _gru("large", 45, None, 256, 1, 2)


def maze2d_paper() -> Experiment:
    """The paper's own size (4.33 million parameters) and settings: GRU, x0-prediction, fused SNR, batch 2048. Wants a GPU."""
    return Experiment(
        task=Maze2D("medium", plan=PlanOptions(steps=50, schedule="pyramid", scale=PLAN["medium"].scale, draws=4)),
        model=ModelConfig(
            RNNConfig(hidden=430, layers=1, blocks=2), schedule="linear", parameterization="x0", weight="fused_snr", frame_stack=10
        ),
        train=TrainConfig(steps=50_000, batch=2048, accumulate=16, lr=5e-4, warmup=1000, ema=0.999, given=0.5),
    )
