"""Simple forecasts of multivariate series as baselines: seasonal naive, drift, random walk and a ridge VAR.

Each takes values (t, d), oldest first, and returns draws (samples, horizon, d). Missing values (NaN) take the last one before, else the
first one after. Errors are drawn from the past for all dimensions at once, so that these stay correlated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..checks import check_counts

Array = NDArray[np.floating[Any]]


def seasonal_naive(values: ArrayLike, horizon: int, samples: int, rng: np.random.Generator, *, season: int, seasons: int = 1) -> Array:
    """The mean of the last `seasons` seasons, plus past errors of this forecast.

    season: steps until the series repeats, such as 24 or 168 of hourly values. The errors are of whole windows that end with the history,
    one horizon before, two and so on, as many as it holds; where it holds none, all draws are equal.
    """
    check_counts(horizon=horizon, samples=samples, season=season, seasons=seasons)
    history, needed = filled(values), season * seasons
    if len(history) < needed:
        raise ValueError(
            f"season={season} and seasons={seasons} need a history of {needed} steps; got {len(history)}; "
            "give a longer history, a shorter season or fewer seasons"
        )
    back = np.arange(horizon) % season - season * np.arange(1, seasons + 1)[:, None]

    def forecast(origin: int) -> Array:
        return history[origin + back].mean(0)

    return _with_past_errors(forecast, history, needed, horizon, samples, rng)


def drift(values: ArrayLike, horizon: int, samples: int, rng: np.random.Generator) -> Array:
    """The last value plus the mean step so far, plus past errors of this forecast (see seasonal_naive)."""
    check_counts(horizon=horizon, samples=samples)
    history = filled(values, least=2)
    ahead = np.arange(1, horizon + 1)[:, None]

    def forecast(origin: int) -> Array:
        return history[origin - 1] + ahead * (history[origin - 1] - history[0]) / (origin - 1)

    # The mean of fewer steps than the horizon has a large variance, and so have its errors: only short histories use them.
    first = max(2, min(horizon + 1, len(history) - horizon))
    return _with_past_errors(forecast, history, first, horizon, samples, rng)


def random_walk(values: ArrayLike, horizon: int, samples: int, rng: np.random.Generator, *, recent: int = 250,
                log: bool | None = None) -> Array:  # fmt: skip
    """The last value, plus steps drawn from the last `recent` ones less their mean: a walk without drift.

    log: walk in the logarithm; None: where all values are positive.
    """
    check_counts(horizon=horizon, samples=samples, recent=recent)
    history = filled(values, least=2)
    lowest = history.min()
    if log and lowest <= 0:
        raise ValueError(f"log=True needs positive values; the lowest is {lowest}; pass log=False, or None to let the values decide")
    log = bool(lowest > 0) if log is None else log
    level = history[-recent - 1 :]
    level = np.log(level) if log else level
    steps = np.diff(level, axis=0)
    steps -= steps.mean(0)
    path = level[-1] + steps[rng.integers(len(steps), size=(samples, horizon))].cumsum(1)
    return np.exp(path) if log else path


def ridge_var(values: ArrayLike, horizon: int, samples: int, rng: np.random.Generator, *, components: int = 8,
              lags: Sequence[int] = (1, 2, 24, 168), ridge: float = 0.01) -> Array:  # fmt: skip
    """A vector autoregression of the leading principal components of the standardised values, simulated with its own past errors.

    components: how many; values of no more dimensions are used as they are. lags: of the regressors, in steps. ridge: weight of the squared
    coefficients beside the mean squared error. The part outside the components is drawn from the past in blocks of the horizon.
    """
    check_counts(horizon=horizon, samples=samples, components=components)
    if len(lags) == 0 or min(lags) < 1:
        raise ValueError(f"lags must be at least one number of steps, each 1 or more; got {tuple(lags)}; the simplest is (1,)")
    if not 0 <= ridge < np.inf:
        raise ValueError(f"ridge should be 0 or more; got {ridge}")
    history, longest = filled(values), max(lags)
    if len(history) < longest + 2:
        raise ValueError(
            f"a lag of {longest} needs a history of {longest + 2} steps; got {len(history)}; give a longer history or pass shorter lags"
        )
    mean, scale = history.mean(0), _not_zero(history.std(0), 1e-12 * np.abs(history).max(0))
    standard = (history - mean) / scale
    axes = _principal_axes(standard, components)
    scores = standard @ axes
    width = scores.std(0)
    width = _not_zero(width, 1e-7 * width.max())
    scores, back = scores / width, (axes * width).T

    past = np.concatenate([scores[longest - lag : len(scores) - lag] for lag in lags], axis=1)
    gram = past.T @ past + ridge * len(past) * np.eye(past.shape[1])
    weight = np.linalg.lstsq(gram, past.T @ scores[longest:], rcond=None)[0]
    errors = scores[longest:] - past @ weight

    path = np.empty((samples, longest + horizon, scores.shape[1]))
    path[:, :longest] = scores[-longest:]
    path[:, longest:] = errors[rng.integers(len(errors), size=(samples, horizon))]
    for t in range(longest, longest + horizon):
        path[:, t] += np.concatenate([path[:, t - lag] for lag in lags], axis=1) @ weight
    remainder = (standard - scores @ back)[_blocks(len(history), horizon, samples, rng)]
    return mean + scale * (path[:, longest:] @ back + remainder)


def filled(values: ArrayLike, least: int = 1) -> Array:
    """A history (t, d) of at least `least` steps as float64, missing values filled."""
    history = np.asarray(values, dtype=np.float64)
    if history.ndim != 2:
        raise ValueError(f"values should be (steps, dimensions); got shape {history.shape}; pass a single series as values[:, None]")
    if len(history) < least or history.shape[1] == 0:
        raise ValueError(f"values should hold {least} steps and 1 dimension at least; got {history.shape}; give a longer history")
    if np.isinf(history).any():
        raise ValueError(f"values should be finite, or NaN where missing; {np.count_nonzero(np.isinf(history))} are infinite")
    present = ~np.isnan(history)
    if present.all():
        return history
    empty = np.flatnonzero(~present.any(0))
    if len(empty):
        raise ValueError(f"each dimension should hold a value; NaN throughout are {empty.tolist()}; leave them out")
    row = np.where(present, np.arange(len(history))[:, None], present.argmax(0))
    return np.take_along_axis(history, np.maximum.accumulate(row, axis=0), axis=0)


def _with_past_errors(forecast: Callable[[int], Array], history: Array, first: int, horizon: int, samples: int,
                      rng: np.random.Generator) -> Array:  # fmt: skip
    """The forecast (horizon, d) at the end of the history, plus errors of the same forecast at origins from `first` on."""
    now = forecast(len(history))
    # A horizon apart, so that with horizons of whole days errors are of the same hours.
    origins = range(len(history) - horizon, first - 1, -horizon)
    if not origins:
        return np.repeat(now[None], samples, axis=0)
    errors = np.stack([history[origin : origin + horizon] - forecast(origin) for origin in origins])
    return now + errors[rng.integers(len(errors), size=samples)]


def _blocks(length: int, horizon: int, samples: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """(samples, horizon) rows of a history: blocks of the horizon, a horizon apart as above, or single rows where it holds no block."""
    if length < horizon:
        return rng.integers(length, size=(samples, horizon))
    starts = np.arange(length - horizon, -1, -horizon)
    return starts[rng.integers(len(starts), size=samples)][:, None] + np.arange(horizon)


def _principal_axes(standard: Array, components: int) -> Array:
    """(d, c) orthonormal directions of most variance, or all d as they are where there are no more than c."""
    t, d = standard.shape
    if d <= components:
        return np.eye(d)
    if t >= d:
        return np.linalg.eigh(standard.T @ standard)[1][:, : -components - 1 : -1]
    moments = np.linalg.eigh(standard @ standard.T)[1][:, : -components - 1 : -1]  # the smaller of the two products
    return np.linalg.qr(standard.T @ moments)[0]


def _not_zero(scale: Array, rounding: Array | float) -> Array:
    """Scales to divide by: 1 in place of those that are no larger than rounding errors."""
    return np.where(scale > rounding, scale, 1)
