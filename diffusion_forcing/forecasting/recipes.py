"""Forecasting many series (paper, section 4.5): the six public sets by name, with a GRU as in the paper or a transformer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ..engine.config import Experiment, ModelConfig, RNNConfig, TrainConfig, TransformerConfig
from ..sampler import Sampler
from .model import WHOLE
from .task import LEVEL_DRAWS, Forecasting

HORIZONS = {"exchange": 30, "solar": 24, "electricity": 24, "traffic": 24, "taxi": 24, "wikipedia": 30}
MINUTES = {"exchange": 3.0, "solar": 15.0, "electricity": 15.0, "traffic": 20.0, "taxi": 20.0, "wikipedia": 20.0}
"""Of training at most, on two cores; most stop before."""


def _train(name: str, backbone: str) -> TrainConfig:
    return TrainConfig(
        steps=None, minutes=MINUTES[name], batch=128, lr=2e-3, weight_decay=1e-3, ema=0.995, draw=LEVEL_DRAWS[backbone], given=0.8,
        validate_every=100, patience=12,
    )  # fmt: skip


def _gru(name: str) -> Callable[[], Experiment]:
    def recipe() -> Experiment:
        return Experiment(Forecasting(name), ModelConfig(RNNConfig(hidden=64, layers=1, blocks=1)), _train(name, "gru"))

    recipe.__doc__ = f"The {name} series, {HORIZONS[name]} steps ahead: one GRU for all series, sampled step after step."
    return recipe


def _transformer(name: str) -> Callable[[], Experiment]:
    def recipe() -> Experiment:
        task = Forecasting(name, sampler=WHOLE)
        return Experiment(task, ModelConfig(TransformerConfig(hidden=64, layers=3, heads=4, causal=False)), _train(name, "transformer"))

    recipe.__doc__ = f"The {name} series with a transformer that sees everything, sampled whole; it can also fill gaps."
    return recipe


def _paper(name: str) -> Callable[[], Experiment]:
    def recipe() -> Experiment:
        task = Forecasting(name, context=HORIZONS[name], joint=True, cross_series=False)
        train = TrainConfig(
            steps=None, minutes=MINUTES[name], batch=32, lr=1e-3, ema=0.99, draw="independent", validate_every=100, patience=6,
            judge="score",
        )  # fmt: skip
        return Experiment(task, ModelConfig(RNNConfig(hidden=128, layers=4, blocks=1)), train)

    recipe.__doc__ = f"The {name} series as in the paper: one token a step for all series, 1 MLP and 4 GRUs, early stop on CRPS_sum."
    return recipe


def _timegrad(name: str) -> Callable[[], Experiment]:
    def recipe() -> Experiment:
        paper = _paper(name)()
        task: Any = paper.task
        task = dataclasses.replace(task, sampler=Sampler(steps=100, matrix="autoregressive", eta=1.0))
        model = ModelConfig(RNNConfig(hidden=128, layers=2, blocks=1), schedule="linear", levels=100, parameterization="eps", clip=8.0)
        return Experiment(task, model, dataclasses.replace(paper.train, draw="teacher_forced"))

    recipe.__doc__ = f"The {name} series TimeGrad's way: next token, teacher forced, noise predicted, 100 ancestral steps."
    return recipe


FORECASTING: dict[str, Callable[[], Experiment]] = {
    **{name: _gru(name) for name in HORIZONS},
    **{f"{name}-transformer": _transformer(name) for name in HORIZONS},
    **{f"{name}-paper": _paper(name) for name in HORIZONS},
    **{f"{name}-timegrad": _timegrad(name) for name in HORIZONS},
}
