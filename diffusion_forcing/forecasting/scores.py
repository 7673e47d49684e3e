"""Scores of probabilistic forecasts: CRPS as GluonTS computes it, the energy score, the error of the median, and coverage.

Forecasts of w windows are samples (n, w, h, d): n draws of h steps in d dimensions. The truth is (w, h, d); where it is NaN nothing is
scored. Scores of the sum over dimensions leave missing ones out of both sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.floating[Any]]

LEVELS: Array = (np.arange(20) / 20)[1:]  # 0.05 .. 0.95
ROWS = 1024  # of the matrix of distances between draws, computed at once


def quantiles_of(samples: ArrayLike, levels: Sequence[float] | Array = LEVELS) -> Array:
    """(len(levels), ...) quantiles of samples (n, ...): the draw nearest to each level, never between two draws (as GluonTS does)."""
    draws = np.asarray(samples)
    if draws.ndim < 2 or len(draws) == 0:
        raise ValueError(
            f"samples should be (draws, ...) with one draw at least; got shape {draws.shape}; pass draws of one number as [:, None]"
        )
    if len(levels) == 0 or not all(0 <= level <= 1 for level in levels):
        raise ValueError(f"levels should lie between 0 and 1, one at least; got {list(levels)}")
    rank = [int(np.round((len(draws) - 1) * level)) for level in levels]
    quantiles = np.empty((len(rank), *draws.shape[1:]), draws.dtype)
    for i in range(draws.shape[1]):  # one window at a time: sorting makes a copy
        quantiles[:, i] = np.sort(draws[:, i], axis=0)[rank]
    return quantiles


def crps(samples: ArrayLike, truth: ArrayLike) -> float:
    """Mean CRPS over dimensions: summed quantile losses over the summed |truth|, as the mean over 19 levels.

    `mean_wQuantileLoss` of GluonTS' MultivariateEvaluator. 0 is perfect; nan where the truth is 0 throughout.
    """
    x, y = _checked(samples, truth)
    return _weighted_loss(quantiles_of(x), y)


def crps_sum(samples: ArrayLike, truth: ArrayLike) -> float:
    """CRPS of the sum over dimensions: `m_sum_mean_wQuantileLoss` of GluonTS' MultivariateEvaluator with {"sum": np.sum}."""
    x, y = _summed(*_checked(samples, truth))
    return _weighted_loss(quantiles_of(x), y)


crps_mean = crps  # the literature's name beside CRPS_sum


def energy_score(samples: ArrayLike, truth: ArrayLike) -> float:
    """Mean over windows and steps of E|x - truth| - E|x - x'| / 2, in the norm over dimensions, over all pairs of two different draws."""
    x, y = _checked(samples, truth)
    scores = []
    for window, step in np.ndindex(y.shape[:2]):
        scored = ~np.isnan(y[window, step])
        if scored.any():
            error = x[:, window, step, scored].astype(np.float64) - y[window, step, scored]
            scores.append(np.linalg.norm(error, axis=1).mean() - _spread(error) / 2)
    return float(np.mean(scores))


def mae(samples: ArrayLike, truth: ArrayLike) -> float:
    """Mean absolute error of the median, in the units of the truth."""
    x, y = _checked(samples, truth)
    return _mean_error(quantiles_of(x, [0.5])[0], y)


def coverage(samples: ArrayLike, truth: ArrayLike, level: float) -> float:
    """The share of the truth within the central interval of `level`, ends included.

    The ends are draws, so that of few draws the interval is a little narrow: a calibrated forecast of 100 draws covers .881 at level .9 and
    .485 at level .5; of 1,000 draws .899 and .500.
    """
    if not 0 < level < 1:
        raise ValueError(f"level should lie between 0 and 1; got {level}; the band of 90 % is 0.9")
    x, y = _checked(samples, truth)
    return _covered(quantiles_of(x, _ends(level)), y)


def summary(samples: ArrayLike, truth: ArrayLike) -> dict[str, float]:
    """All scores: crps_sum, crps, energy, mae, cover50, cover90, cover90_sum."""
    x, y = _checked(samples, truth)
    x_sum, y_sum = _summed(x, y)
    levels = [*LEVELS, 0.5, *_ends(0.5), *_ends(0.9)]
    quantiles, quantiles_sum = quantiles_of(x, levels), quantiles_of(x_sum, levels)
    n = len(LEVELS)
    return {
        "crps_sum": _weighted_loss(quantiles_sum[:n], y_sum),
        "crps": _weighted_loss(quantiles[:n], y),
        "energy": energy_score(x, y),
        "mae": _mean_error(quantiles[n], y),
        "cover50": _covered(quantiles[n + 1 : n + 3], y),
        "cover90": _covered(quantiles[n + 3 :], y),
        "cover90_sum": _covered(quantiles_sum[n + 3 :], y_sum),
    }


def _checked(samples: ArrayLike, truth: ArrayLike) -> tuple[Array, Array]:
    """Both as floating arrays of matching shapes, the samples finite."""
    x, y = np.asarray(samples), np.asarray(truth, dtype=np.float64)
    if x.dtype.kind != "f":
        x = x.astype(np.float64)
    if x.ndim != 4 or y.ndim != 3 or x.shape[1:] != y.shape:
        raise ValueError(
            "samples should be (draws, windows, steps, dimensions) and truth (windows, steps, dimensions) of the same sizes; "
            f"got {x.shape} and {y.shape}; pass a single window as samples[:, None] and truth[None]"
        )
    if x.size == 0:
        raise ValueError(f"samples should hold one draw, window, step and dimension at least; got {x.shape}")
    if not np.isfinite(x).all():
        raise ValueError(f"samples should be finite; {np.count_nonzero(~np.isfinite(x))} of {x.size} values are not: look at the forecast")
    if np.isinf(y).any():
        raise ValueError(f"truth should be finite, or NaN where not to be scored; {np.count_nonzero(np.isinf(y))} values are infinite")
    if np.isnan(y).all():
        raise ValueError("truth should hold one value at least that is not NaN; it holds none, so there is nothing to score")
    return x, y


def _summed(x: Array, y: Array) -> tuple[Array, Array]:
    """(n, w, h, 1) and (w, h, 1): sums over the dimensions that the truth has; NaN where it has none."""
    scored = ~np.isnan(y)
    total = np.where(scored.any(-1), np.nansum(y, axis=-1), np.nan)
    return np.sum(x, axis=-1, keepdims=True, dtype=np.float64, where=scored), total[..., None]


def _weighted_loss(quantiles: Array, y: Array) -> float:
    """Quantile losses of quantiles (19, w, h, d) at LEVELS, summed over w, h and d, over the summed |truth|; their mean."""
    losses = []
    for level, quantile in zip(LEVELS, quantiles, strict=True):
        losses.append(2 * np.nansum(np.abs((quantile - y) * ((y <= quantile) - level))))
    weight = np.nansum(np.abs(y))
    return float(np.mean(losses) / weight) if weight > 0 else float("nan")


def _mean_error(median: Array, y: Array) -> float:
    return float(np.nanmean(np.abs(median - y)))


def _ends(level: float) -> list[float]:
    """The two levels that bound the central interval; rounded, since (1 - 0.9) / 2 is slightly less than 0.05 in floating point."""
    return [round((1 - level) / 2, 12), round((1 + level) / 2, 12)]


def _covered(ends: Array, y: Array) -> float:
    return float(np.mean(((ends[0] <= y) & (y <= ends[1]))[~np.isnan(y)]))


def _spread(draws: Array) -> float:
    """E|x - x'| over all pairs of different draws (n, d); 0 for a single draw."""
    n = len(draws)
    if n == 1:
        return 0.0
    centred = draws - draws.mean(0)  # a common offset would cost digits in the squares below
    square = (centred**2).sum(1)
    total = 0.0
    for i in range(0, n, ROWS):
        gap = square[i : i + ROWS, None] + square - 2 * centred[i : i + ROWS] @ centred.T
        rows = np.arange(len(gap))
        gap[rows, i + rows] = 0
        total += float(np.sqrt(np.maximum(gap, 0)).sum())
    return total / (n * (n - 1))
