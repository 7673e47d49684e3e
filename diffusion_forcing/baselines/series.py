"""Simple forecasts of multivariate series, to be beaten: seasonal naive, drift, random walk and a ridge VAR.

Each takes a history values (t, d), oldest first, and returns samples (samples, horizon, d). Missing values are NaN, filled with the last
one seen, or with the first one where there is none before. All dimensions are drawn together, so that the samples keep how they move
together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..checks import check_counts

Array = NDArray[np.floating[Any]]


def seasonal_naive(values: ArrayLike, horizon: int, samples: int, rng: np.random.Generator, *, season: int, seasons: int = 1) -> Array:
    """The mean of the last `seasons` seasons, and the errors that this forecast made at earlier origins.

    season: steps until the series repeats, such as 24 or 168 of hourly values.
    """
    check_counts(horizon=horizon, samples=samples, season=season, seasons=seasons)
    history, needed = filled(values), season * seasons
    if len(history) < needed:
        raise ValueError(
            f"{seasons} seasons of {season} steps want a history of {needed}; got {len(history)}; give a longer history or take fewer "
            "seasons or a shorter one"
        )
    ahead = np.arange(horizon) % season
    rows = ahead - season * np.arange(1, seasons + 1)[:, None]  # (seasons, horizon), from the origin

    def forecast(origin: int) -> Array:
        return history[origin + rows].mean(0)

    return _with_past_errors(forecast, history, needed, horizon, samples, rng)


def drift(values: ArrayLike, horizon: int, samples: int, rng: np.random.Generator) -> Array:
    """The last value and the mean step of the whole history, and the errors that this forecast made at earlier origins."""
    check_counts(horizon=horizon, samples=samples)
    history = filled(values, least=2)
    ahead = np.arange(1, horizon + 1)[:, None]

    def forecast(origin: int) -> Array:
        return history[origin - 1] + ahead * (history[origin - 1] - history[0]) / (origin - 1)

    # Steps of a history shorter than the horizon say little of the drift; where there is no longer one, little is better than nothing.
    first = max(2, min(horizon + 1, len(history) - horizon))
    return _with_past_errors(forecast, history, first, horizon, samples, rng)


def random_walk(values: ArrayLike, horizon: int, samples: int, rng: np.random.Generator, *, recent: int = 250,
                log: bool | None = None) -> Array:  # fmt: skip
    """The last value and steps drawn from the `recent` last ones, each step of all dimensions at once.

    log: steps of the logarithm; None takes it where all values are positive.
    """
    check_counts(horizon=horizon, samples=samples, recent=recent)
    history = filled(values, least=2)
    lowest = history.min()
    if log and lowest <= 0:
        raise ValueError(f"steps of the logarithm want positive values; the lowest is {lowest}; pass log=False or None")
    if log is None:
        log = bool(lowest > 0)
    level = np.log(history[-recent - 1 :]) if log else history[-recent - 1 :]
    steps = np.diff(level, axis=0)
    path = level[-1] + steps[rng.integers(len(steps), size=(samples, horizon))].cumsum(1)
    return np.exp(path) if log else path


def ridge_var(values: ArrayLike, horizon: int, samples: int, rng: np.random.Generator, *, components: int = 8,
              lags: Sequence[int] = (1, 2, 24), ridge: float = 0.01) -> Array:  # fmt: skip
    """A vector autoregression of the principal components of the standardised values, driven by its own past errors.

    components: of them; all dimensions as they are where there are no more. lags: steps back that it looks. ridge: strength of the
    penalty on the coefficients, as a share of the number of steps. What the components leave out is drawn from the past, too.
    """
    check_counts(horizon=horizon, samples=samples, components=components, **{f"lag {lag}": lag for lag in lags})
    if not lags:
        raise ValueError("lags should name one step back at least; got none; (1,) is the simplest")
    if not ridge >= 0:
        raise ValueError(f"ridge should not be negative; got {ridge}")
    longest = max(lags)
    history = filled(values, least=longest + 2)
    mean, scale = history.mean(0), history.std(0)
    scale = np.where(scale > 0, scale, 1)
    standard = (history - mean) / scale
    axes = _principal_axes(standard, components)
    scores = standard @ axes
    width = scores.std(0)
    width = np.where(width > 0, width, 1)
    scores = scores / width
    axes = axes * width
    left_out = standard - scores @ axes.T

    past = np.concatenate([scores[longest - lag : len(scores) - lag] for lag in lags], axis=1)
    target = scores[longest:]
    gram = past.T @ past + ridge * len(past) * np.eye(past.shape[1])
    weight = np.linalg.lstsq(gram, past.T @ target, rcond=None)[0]
    error = target - past @ weight

    path = np.empty((samples, longest + horizon, scores.shape[1]))
    path[:, :longest] = scores[-longest:]
    drawn = error[rng.integers(len(error), size=(samples, horizon))]
    for t in range(longest, longest + horizon):
        path[:, t] = np.concatenate([path[:, t - lag] for lag in lags], axis=1) @ weight + drawn[:, t - longest]
    return path, axes, left_out, mean, scale, error


def filled(values: ArrayLike, least: int = 1) -> Array:
    """The history (t, d) as float64 without gaps: the last value seen, or the first one to come."""
    history = np.asarray(values, dtype=np.float64)
    if history.ndim != 2:
        raise ValueError(f"values should be (steps, dimensions); got shape {history.shape}; a single series wants values[:, None]")
    if len(history) < least or history.shape[1] == 0:
        raise ValueError(f"values should hold {least} steps and 1 dimension at least; got {history.shape}; give a longer history")
    if np.isinf(history).any():
        raise ValueError(f"values should be finite, or NaN where missing; {np.count_nonzero(np.isinf(history))} are infinite")
    seen = ~np.isnan(history)
    if seen.all():
        return history
    empty = np.flatnonzero(~seen.any(0))
    if len(empty):
        raise ValueError(f"each dimension should hold a value; {empty.tolist()} are NaN throughout; leave them out")
    row = np.where(seen, np.arange(len(history))[:, None], seen.argmax(0))
    return np.take_along_axis(history, np.maximum.accumulate(row, axis=0), axis=0)


def _with_past_errors(forecast: Callable[[int], Array], history: Array, first: int, horizon: int, samples: int,
                      rng: np.random.Generator) -> Array:  # fmt: skip
    origins = range(len(history) - horizon, first - 1, -horizon)
    point = forecast(len(history))
    if not origins:
        return np.broadcast_to(point, (samples, *point.shape)).copy()
    errors = np.stack([history[origin : origin + horizon] - forecast(origin) for origin in origins])
    return point + errors[rng.integers(len(errors), size=samples)]


def _principal_axes(standard: Array, components: int) -> Array:
    t, d = standard.shape
    if d <= components:
        return np.eye(d)
    if t < d:
        left = np.linalg.eigh(standard @ standard.T)[1][:, ::-1][:, :components]
        return np.linalg.qr(standard.T @ left)[0]
    return np.linalg.eigh(standard.T @ standard)[1][:, ::-1][:, :components]
