"""Planning in mazes: one model that is policy and planner (paper, section 4.2)."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..backbones import RNNConfig, TransformerConfig
from ..engine.config import Experiment, ModelConfig, TrainConfig, replace
from ..engine.objective import Denoising
from .options import PLAN_SAMPLER, PlanOptions
from .task import Maze2D
from .windy import WindyMaze2D

PLAN = {
    "umaze": PlanOptions(scale=0.1, short_plan_scale=4.0),
    "medium": PlanOptions(scale=0.01, short_plan_scale=4.0),
    "large": PlanOptions(scale=0.003, short_plan_scale=4.0),
}
# Causal networks follow the law of motion closely: all but the plans that stay in the goal need weak guidance.
CAUSAL_PLAN = {
    "umaze": PlanOptions(scale=0.1, short_plan_scale=3.0, hold_scale=10.0),
    "medium": PlanOptions(scale=0.05, short_plan_scale=0.6, hold_scale=15.0),
    "large": PlanOptions(scale=0.02, short_plan_scale=0.6, hold_scale=15.0),
}
MINUTES = {"umaze": 4.0, "medium": 20.0, "large": 20.0}
"""Budget of training on two cores."""
NETWORKS: dict[str, RNNConfig | TransformerConfig] = {
    "transformer": TransformerConfig(hidden=128, layers=4, heads=4, causal=False),
    "gru": RNNConfig(hidden=256, layers=1, blocks=2),
    "causal_transformer": TransformerConfig(hidden=128, layers=4, heads=4),
}
# Three quarters of the sequences have the levels that plans go through: half of them one level, as plans sampled whole do, since walls are
# learned only there, far from anything known; causal networks more staircases instead, the rows of a pyramid. The others teach single
# tokens that are uncertain.
OBJECTIVE = Denoising(draw="independent+staircase+shared+shared", clean_context_prob=0.9)
CAUSAL_OBJECTIVE = Denoising(draw="independent+staircase+staircase+staircase", clean_context_prob=0.9)


def maze2d(maze: Any, backbone: str = "transformer") -> Experiment:
    """A maze. transformer: bidirectional, its plans are denoised whole. gru (as in the paper) and causal_transformer: causal, theirs are
    denoised along a pyramid. paper: the paper's size (4.33 million parameters) and settings, for a GPU: GRU, x0-prediction, fused SNR,
    batch 2048.
    """
    if backbone == "paper":
        return _paper(maze)
    train = TrainConfig(
        steps=None, minutes=MINUTES[maze], batch=32, optimizer="muon", lr=3e-3, muon_lr=0.02, warmup=200, ema=0.998, validate_every=500,
        log_every=100, precision="auto",
    )  # fmt: skip
    network = NETWORKS[backbone]
    if network.causal:  # at the others' rates its validation loss rises for a thousand steps
        train = dataclasses.replace(train, lr=1e-3, muon_lr=0.007)
    sampler = dataclasses.replace(PLAN_SAMPLER, matrix="pyramid") if network.causal else PLAN_SAMPLER
    task = Maze2D(maze, sampler=sampler, plan=(CAUSAL_PLAN if network.causal else PLAN)[maze], short_windows=0.4)
    return Experiment(task, ModelConfig(network, schedule="linear"), train, CAUSAL_OBJECTIVE if network.causal else OBJECTIVE)


def _paper(maze: Any) -> Experiment:
    sampler = dataclasses.replace(PLAN_SAMPLER, steps=50, matrix="pyramid")
    return Experiment(
        Maze2D(maze, sampler=sampler, plan=PlanOptions(scale=PLAN[maze].scale, draws=4)),
        ModelConfig(
            RNNConfig(hidden=430, layers=1, blocks=2), schedule="linear", parameterization="x0", weight="fused_snr", frame_stack=10
        ),
        TrainConfig(steps=50_000, batch=2048, accumulate=16, lr=5e-4, warmup=1000, ema=0.999),
        Denoising(clean_context_prob=0.5),
    )


def windy(backbone: str = "gru") -> Experiment:
    """The maze with wind and a pit, whose tokens hold actions or what they led to. Causal networks."""
    train = TrainConfig(
        steps=None, minutes=8.0, batch=64, optimizer="muon", lr=3e-3, muon_lr=0.02, warmup=200, ema=0.998, validate_every=1000,
        log_every=100, threads=1,
    )  # fmt: skip
    network: RNNConfig | TransformerConfig = (
        RNNConfig(hidden=96, layers=1, blocks=2) if backbone == "gru" else TransformerConfig(hidden=64, layers=3, heads=4)
    )
    return Experiment(
        WindyMaze2D(), ModelConfig(network, schedule="linear"), train,
        Denoising(draw="independent+staircase+staircase+staircase", clean_context_prob=1.0),
    )  # fmt: skip


def diffuser(experiment: Experiment) -> Experiment:
    """Diffuser on the same maze: full-sequence diffusion whose plans a PD controller follows (--task.policy diffuser: its own actions)."""
    if not isinstance(experiment.task, Maze2D) or not isinstance(experiment.model, ModelConfig) or experiment.model.backbone.causal:
        raise ValueError("the baseline diffuser is for maze2d recipes with --backbone transformer; choose another, or leave out --baseline")
    return replace(experiment, task__policy="diffuser_pd", objective__draw="shared", objective__clean_context_prob=0.0)
