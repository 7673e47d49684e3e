"""Forecasting many series (paper, section 4.5): the six public sets by name, with a GRU as in the paper or a transformer."""

from __future__ import annotations

from ..backbones import RNNConfig, TransformerConfig
from ..engine.config import Experiment, ModelConfig, TrainConfig, replace
from ..engine.objective import Denoising
from ..sampler import Sampler
from .model import WHOLE
from .task import LEVEL_DRAWS, Forecasting

HORIZONS = {"exchange": 30, "solar": 24, "electricity": 24, "traffic": 24, "taxi": 24, "wikipedia": 30}
MINUTES = {"exchange": 3.0, "solar": 15.0, "electricity": 15.0, "traffic": 20.0, "taxi": 20.0, "wikipedia": 20.0}
"""Budget of training on two cores; most runs stop early."""


def series(name: str, backbone: str = "gru") -> Experiment:
    """A public set: one GRU for all series, sampled step after step; a transformer that is not causal, sampled whole, which can also fill
    gaps; or the paper's model, one token a step for all series, 1 MLP and 4 GRUs, with early stopping on CRPS_sum.
    """
    if backbone == "paper":
        return _paper(name)
    train = TrainConfig(
        steps=None, minutes=MINUTES[name], batch=128, lr=2e-3, weight_decay=1e-3, ema=0.995, validate_every=100, patience=12
    )
    objective = Denoising(draw=LEVEL_DRAWS[backbone], clean_context_prob=0.8)
    if backbone == "transformer":
        task = Forecasting(name, sampler=WHOLE)
        return Experiment(task, ModelConfig(TransformerConfig(hidden=64, layers=3, heads=4, causal=False)), train, objective)
    return Experiment(Forecasting(name), ModelConfig(RNNConfig(hidden=64, layers=1, blocks=1)), train, objective)


def _paper(name: str) -> Experiment:
    task = Forecasting(name, context=HORIZONS[name], joint=True, cross_series=False)
    train = TrainConfig(steps=None, minutes=MINUTES[name], batch=32, lr=1e-3, ema=0.99, validate_every=100, patience=6, monitor="score")
    return Experiment(task, ModelConfig(RNNConfig(hidden=128, layers=4, blocks=1)), train)


def timegrad(experiment: Experiment) -> Experiment:
    """TimeGrad on the same set: next-token diffusion with teacher forcing that predicts the noise, 100 ancestral steps."""
    if not isinstance(experiment.task, Forecasting) or experiment.task.source not in HORIZONS:
        raise ValueError(f"the baseline timegrad is for the recipes {', '.join(HORIZONS)}; choose another, or leave out --baseline")
    paper = _paper(experiment.task.source)
    model = ModelConfig(RNNConfig(hidden=128, layers=2, blocks=1), schedule="linear", levels=100, parameterization="eps", clip=8.0)
    return replace(paper, task__sampler=Sampler(steps=100, matrix="autoregressive", eta=1.0), model=model, objective__draw="teacher_forced")
