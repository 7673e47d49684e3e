"""Tables to forecast, and forecasters that are fitted without a training."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from oracles import randomised

from diffusion_forcing import Sampler
from diffusion_forcing.engine.train import Result
from diffusion_forcing.forecasting import Forecaster

HORIZON = 6
SHORT = {"samples": 20, "sampler": Sampler(steps=4, matrix="autoregressive", solver="euler_angle"), "hidden": 16}
QUICK = {"minutes": 0.01, "threads": 1, **SHORT}


def load_table(t=200, *, start="2024-01-01", seed=0, **columns):
    """A wide frame of t hours: two series with a season of a day. Longer frames begin like shorter ones."""
    draw = np.random.default_rng(seed)
    wave = np.sin(2 * np.pi * np.arange(400) / 24)
    both = {"east": 20 + 5 * wave + draw.standard_normal(400), "west": 50 - 9 * wave + 2 * draw.standard_normal(400)}
    time = pd.date_range(start, periods=t, freq="h")
    return pd.DataFrame({"time": time, **{name: values[:t] for name, values in both.items()}, **columns})


def long_table(frame):
    return frame.melt(id_vars="time", var_name="place", value_name="load")


def covariates_table(t=200, ahead=HORIZON):
    """With two covariates that go on after the last value."""
    draw = np.random.default_rng(4)
    rows = load_table(t + ahead, price=draw.random(t + ahead), rain=100 * draw.random(t + ahead))
    rows.loc[t:, ["east", "west"]] = np.nan
    return rows


def draw_weights(experiment, folder, **_):
    """In place of a training: a network whose weights are drawn."""
    model = experiment.model.build(1, experiment.task.data().train.cond_width)
    randomised(model.backbone)
    model.save_pretrained(folder / "model")
    return Result("done", 1, 0.0, 0.0, 0.0)


def made(frame, *, folder=None, known=(), id=None, value=None, time=None, **options):
    """A forecaster that was fitted, but for the training."""
    if options.get("backbone") == "transformer":
        options = {"sampler": Sampler(steps=4, solver="euler_angle"), "layers": 1, **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffusion_forcing.forecasting.forecaster.train", draw_weights)
        return Forecaster(HORIZON, **{**SHORT, **options}).fit(frame, folder=folder, known=known, id=id, value=value, time=time)
