"""The paper's compositional generation, small enough for a minute on two cores."""

from __future__ import annotations

from ..config import Experiment, ModelConfig, RNNConfig, TrainConfig, TransformerConfig
from ..tasks import Composition


def composition() -> Experiment:
    """Cross-shaped trajectories; with memory a cross, without memory V shapes. About a minute on two cores."""
    return Experiment(
        task=Composition(),
        model=ModelConfig(RNNConfig(hidden=96, layers=1), parameterization="v"),
        train=TrainConfig(steps=2500, batch=48, optimizer="muon", lr=2e-3, muon_lr=0.01, ema=0.995, draw="independent+staircase"),
    )


def composition_transformer() -> Experiment:
    """The same with a causal transformer."""
    return Experiment(
        task=Composition(),
        model=ModelConfig(TransformerConfig(hidden=96, layers=3, heads=3), parameterization="v"),
        train=TrainConfig(steps=2500, batch=48, optimizer="muon", lr=2e-3, muon_lr=0.01, ema=0.995, draw="independent+staircase"),
    )
