"""Forecasting many series (paper, section 4.5): the six public sets by name, with a GRU as in the paper or a transformer."""

from __future__ import annotations

from collections.abc import Callable

from ..config import Experiment, ModelConfig, RNNConfig, TrainConfig, TransformerConfig
from ..forecasting import Sampling
from ..tasks import Forecasting

HORIZONS = {"exchange": 30, "solar": 24, "electricity": 24, "traffic": 24, "taxi": 24, "wikipedia": 30}
MINUTES = {"exchange": 3.0, "solar": 15.0, "electricity": 15.0, "traffic": 20.0, "taxi": 20.0, "wikipedia": 20.0}
"""Of training at most, on two cores; most stop before."""


def _train(name: str) -> TrainConfig:
    return TrainConfig(
        steps=None, minutes=MINUTES[name], batch=128, lr=2e-3, weight_decay=1e-3, ema=0.995, draw="independent+staircase", given=0.8,
        validate_every=100, patience=12,
    )  # fmt: skip


def _gru(name: str) -> Callable[[], Experiment]:
    def recipe() -> Experiment:
        return Experiment(Forecasting(name), ModelConfig(RNNConfig(hidden=64, layers=1, blocks=1)), _train(name))

    recipe.__doc__ = f"The {name} series, {HORIZONS[name]} steps ahead: one GRU for all series, sampled step after step."
    return recipe


def _transformer(name: str) -> Callable[[], Experiment]:
    def recipe() -> Experiment:
        task = Forecasting(name, sampling=Sampling(schedule="full_sequence"))
        return Experiment(task, ModelConfig(TransformerConfig(hidden=64, layers=3, heads=4, causal=False)), _train(name))

    recipe.__doc__ = f"The {name} series with a transformer that sees everything, sampled whole; it can also fill gaps."
    return recipe


FORECASTING: dict[str, Callable[[], Experiment]] = {
    **{name: _gru(name) for name in HORIZONS},
    **{f"{name}-transformer": _transformer(name) for name in HORIZONS},
}
