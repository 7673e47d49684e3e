"""Series, panels and untrained forecasting models for tests."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import torch
from oracles import randomised, seeded

from diffusion_forcing import RNN, DiffusionForcing, NoiseSchedule, Transformer, cosine
from diffusion_forcing.forecasting.features import SeriesFeatures
from diffusion_forcing.forecasting.model import AUTOREGRESSIVE, SeriesModel
from diffusion_forcing.forecasting.panel import Panel
from diffusion_forcing.forecasting.scaling import fit_scaler
from diffusion_forcing.forecasting.task import Forecasting
from diffusion_forcing.forecasting.windows import History

LEVELS = 50
HORIZON = 6
CONTEXT = 12


def rng(seed=0):
    return np.random.default_rng(seed)


def quiet(*_):
    """Progress that nobody watches."""


def waves(t, d=2, period=24):
    """(t, d) sines, each series a little later than the one before."""
    return np.sin(2 * np.pi * np.arange(t)[:, None] / period + np.arange(d))


def daily(t=288, d=2, *, noise=0.3, share=0.0, seed=0):
    """A season of 24 steps and Gaussian noise, of which series have a share in common."""
    draw = rng(seed)
    common, own = draw.standard_normal((t, 1)), draw.standard_normal((t, d))
    return 10 + 3 * waves(t, d) + noise * (np.sqrt(share) * common + np.sqrt(1 - share) * own)


def walk(t=288, d=2, *, share=0.0, seed=0):
    """Random walks whose steps have a share in common."""
    draw = rng(seed)
    common, own = draw.standard_normal((t, 1)), draw.standard_normal((t, d))
    return 100 + (np.sqrt(share) * common + np.sqrt(1 - share) * own).cumsum(0)


def values_of(residual, t=288, d=2, share=0.0):
    """Series that a kind of residual suits."""
    return (daily if residual == "seasonal" else walk)(t, d, share=share)


def holed(values, *holes):
    """A copy without the values at the given places."""
    values = values.copy()
    for hole in holes:
        values[hole] = np.nan
    return values


def history(values, known=None, level=None):
    """Values (t, d) as a model reads them, on a clock that starts at 0."""
    return History(values, np.arange(len(values)), known, level)


def untrained(network, width, awake, d=1):
    """A small network: fresh, so that its output is zero, or with all its weights drawn."""
    torch.manual_seed(0)
    if network == "rnn":
        net = RNN(d, width, hidden=16, layers=1, blocks=1, levels=LEVELS)
    else:
        net = Transformer(d, width, hidden=16, layers=1, heads=2, causal=False, levels=LEVELS)
    return DiffusionForcing(randomised(net) if awake else net.eval(), NoiseSchedule(cosine(LEVELS)))


def model_of(values, residual="seasonal", network="rnn", *, awake=True, horizon=HORIZON, known=None, transform=None, cross_series=True):
    """A model fitted to values (t, d), its network untrained."""
    t = len(values)
    known = np.zeros((t, 0)) if known is None else known[:t]
    seasons = (24,) if residual == "seasonal" else (1,)
    scaler = fit_scaler(values, np.arange(t), horizon, seasons, residual=residual, transform=transform)
    features = SeriesFeatures.fit(values, known, scaler, tuple(float(p) for p in seasons if p > 1), cross_series=cross_series)
    return SeriesModel.uncalibrated(untrained(network, features.width(scaler), awake), scaler, features, CONTEXT)


def few(network="rnn", *, samples=5, **options):
    """Options of a short sampling, along the matrix that suits a network."""
    options = {"steps": 4, "matrix": "autoregressive" if network == "rnn" else "full_sequence", **options}
    return {"samples": samples, "sampler": dataclasses.replace(AUTOREGRESSIVE, **options)}


def draw(model, values, *, known=None, level=None, seed=0, network="rnn", samples=5, **options):
    """Futures (n, h, d) after values (t, d), in few steps. options: of `draw`, or of the sampler."""
    of_draw = {name: options.pop(name) for name in ("horizon", "reward", "scale", "progress") if name in options}
    return model.draw(history(values, known, level), **few(network, samples=samples, **options), generator=seeded(seed), **of_draw)


def in_tokens(model, values, futures):
    """Tokens (n, h, d) of futures (n, h, d)."""
    scaler, (t, h) = model.scaler, (len(values), futures.shape[1])
    return np.stack([scaler.encode(np.concatenate([values, future]), np.arange(t + h))[t:] for future in futures])


def assert_same(one, other):
    """Two dataclasses of arrays and plain values are the same, bit for bit."""
    for field in dataclasses.fields(one):
        np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name), err_msg=field.name)


def panel_of(freq="h", t=240, *, start="2020-01-01", values=None, tz=None, **more):
    """A panel of one series, or of the values, at a frequency; None: a clock without dates that starts at 3 and has steps of 5."""
    values = rng().standard_normal((t, 1)) if values is None else values
    t, d = values.shape
    index = pd.RangeIndex(3, 3 + 5 * t, 5) if freq is None else pd.date_range(start, periods=t, freq=freq, tz=tz)
    return Panel(values, tuple(f"s{i}" for i in range(d)), index, freq and index.freqstr, **{"known": np.zeros((t, 0)), **more})


def known_panel(residual, values=None, freq="h"):
    """Three series of 12 days and two covariates, known a week beyond the last value."""
    values = values_of(residual, 288, 3, share=0.6) if values is None else values
    return panel_of(freq, values=values, known=rng(5).standard_normal((len(values) + 168, 2)), known_names=("price", "holiday"))


def task_of(folder, panel, name="true", **options):
    file = folder / f"{name}.panel.npz"
    panel.save(file)
    return Forecasting(str(file), **{"horizon": HORIZON, "test_windows": 2, **options})


def garbled(panel, first):
    """The panel with large random numbers from step `first` on, covariates as they were."""
    values = panel.values.copy()
    values[first:] = 1e4 * rng(9).standard_normal(values[first:].shape)
    return dataclasses.replace(panel, values=values)


# Tables.


def plain_panel(t=6, d=2, **changes):
    """Two series of counted values, hourly."""
    parts = {"values": np.arange(t * d, dtype=float).reshape(t, d), "names": ("a", "b")[:d], "known": np.empty((t, 0)), "freq": "h"}
    return Panel(**{**parts, "index": pd.date_range("2020-01-01", periods=t, freq="h"), **changes})


def hours(t, **columns):
    """A wide frame of t hours, its columns 0 .. t-1 unless given."""
    columns = columns or {"a": np.arange(t), "b": np.arange(t) * 2.0}
    return pd.DataFrame({"time": pd.date_range("2020-01-01", periods=t, freq="h"), **columns})


def long(columns, start="2020-01-01", freq="D"):
    """A long frame of shops and their sales."""
    parts = [
        pd.DataFrame({"shop": name, "date": pd.date_range(start, periods=len(values), freq=freq), "sales": values})
        for name, values in columns.items()
    ]
    return pd.concat(parts, ignore_index=True)


def save(folder, text, name="data.csv"):
    file = folder / name
    file.write_text(text)
    return file
