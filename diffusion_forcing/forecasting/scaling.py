"""Values to tokens and back: a token is the residual of one value from its expected value, in units of its usual size.

So a network that has learned nothing is already a fair forecast (its tokens are white noise), and series of any range look alike to it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .panel import Array

Residual = Literal["seasonal", "difference"]
Transform = Literal["none", "sqrt", "log"]
MAX_RESIDUAL = 12.0  # tokens are clipped here: one typing error must not dominate a training
MIN_VALUES = 5  # a series with fewer values does not determine its own scale
SIZE_POWER = {"none": 1.0, "sqrt": 0.5, "log": 0.0}  # residuals after the transform grow with this power of a series' size


@dataclass(frozen=True, eq=False)
class SeriesScaler:
    """The expected values of d series, and the usual size of residuals, which are taken after a variance-stabilising transform.

    residual="seasonal": the expected value is a weighted mean of the values `lags` steps before, all of them before the start of a forecast
    (no lag is shorter than the horizon). residual="difference": it is the value before, within a forecast a sampled one: tokens are first
    differences, cumulated to values.
    """

    residual: Residual
    transform: Transform
    horizon: int
    season: int
    lags: tuple[int, ...]
    offset: Array  # (d,), added before the transform
    mean: Array  # (d,), of transformed values
    std: Array  # (d,), of transformed values
    weights: Array  # (lags,), of the lagged values in the expected value; sum to 1
    residual_std: Array  # (d,), of residuals of standardised values
    phase_scale: Array  # (season,), factor of residual_std at each phase of the season
    floor: Array  # (d,), lower bound of forecasts
    undetermined: NDArray[np.bool_]  # (d,), series whose scale the training range does not determine: constants, or too few values

    @property
    def warmup(self) -> int:
        """Steps of a series before its first token."""
        if self.residual == "difference":
            return 1
        return min(lag for lag, weight in zip(self.lags, self.weights, strict=True) if weight)

    def standardize(self, values: Array) -> Array:
        """Values (t, d) after the transform, with mean 0 and variance 1 in training. NaN stays."""
        shifted = values + self.offset
        if self.transform == "none":
            return (shifted - self.mean) / self.std
        with np.errstate(invalid="ignore", divide="ignore"):
            shifted = np.maximum(shifted, 1e-6 * np.maximum(1e-6, np.abs(self.offset) + np.abs(self.floor)))
            transformed = np.sqrt(shifted) if self.transform == "sqrt" else np.log(shifted)
        return (transformed - self.mean) / self.std

    def unstandardize(self, standard: Tensor) -> Tensor:
        """The inverse of `standardize`, for tensors (..., d), clamped to the floor. Differentiable."""
        offset, mean, std, floor = (torch.as_tensor(part, dtype=standard.dtype) for part in (self.offset, self.mean, self.std, self.floor))
        transformed = standard * std + mean
        if self.transform == "sqrt":
            transformed = transformed.clamp(min=0) ** 2
        elif self.transform == "log":
            transformed = transformed.clamp(max=80).exp()
        return torch.maximum(transformed - offset, floor)

    def fill_missing(self, standard: Array) -> Array:
        """Missing values replaced by those of a season before, else by the last one, else by the mean: as a source of lags only."""
        out = standard.copy()
        for t in np.flatnonzero(np.isnan(out).any(1)):
            missing = np.isnan(out[t])
            before = out[t - self.season] if t >= self.season else out[t - 1] if t else np.zeros(out.shape[1])
            out[t, missing] = before[missing]
        return np.nan_to_num(out)

    def lagged(self, filled: Array, first: int, last: int) -> Array:
        """Standardised values (last-first, d, lags) at each lag before steps first..last-1, counted from the start of `filled`.

        A lag that reaches back before the start is replaced by the mean of those that do not.
        """
        steps = np.arange(first, last)[:, None] - np.array(self.lags)
        past = filled[np.maximum(steps, 0)].swapaxes(1, 2)
        exists = steps >= 0
        if exists.all():
            return past
        weights = (exists * self.weights)[:, None]
        mean = (past * weights).sum(-1) / np.maximum(weights.sum(-1), 1e-12)
        return np.where(exists[:, None], past, mean[..., None])

    def residual_scale(self, clock: NDArray[np.int64]) -> Array:
        """Usual size of residuals (t, d) at the given times (t,)."""
        return self.phase_scale[clock % self.season][:, None] * self.residual_std

    def encode(self, values: Array, clock: NDArray[np.int64], past: Array | None = None) -> Array:
        """Tokens (t, d) of values (t, d): NaN where a value is missing, and for the first `warmup` steps.

        past: the values that expected values are computed from, where they differ from `values`.
        """
        standard = self.standardize(values)
        out = np.full_like(standard, np.nan)
        if len(values) <= self.warmup:
            return out
        if self.residual == "difference":
            out[1:] = np.diff(standard, axis=0)
        else:
            filled = self.fill_missing(standard if past is None else self.standardize(past))
            out[self.warmup :] = standard[self.warmup :] - self.lagged(filled, self.warmup, len(values)) @ self.weights
        return np.clip(out / self.residual_scale(clock), -MAX_RESIDUAL, MAX_RESIDUAL)

    def decode(self, tokens: Tensor, values: Array, clock: NDArray[np.int64]) -> Tensor:
        """Values (n, h, d) of tokens (n, h, d) that follow a history (t, d). clock: times (h,) of the tokens. Differentiable."""
        h = tokens.shape[1]
        standard = self.fill_missing(self.standardize(values))
        scale = torch.as_tensor(self.residual_scale(clock), dtype=tokens.dtype)
        if self.residual == "difference":
            return self.unstandardize(torch.as_tensor(standard[-1], dtype=tokens.dtype) + (tokens * scale).cumsum(1))
        padded = np.concatenate([standard, np.zeros((h, standard.shape[1]))])  # never read: no lag is shorter than the horizon
        expected = self.lagged(padded, len(values), len(values) + h) @ self.weights
        return self.unstandardize(torch.as_tensor(expected, dtype=tokens.dtype) + tokens * scale)

    def discount(self, values: Array, trust: Array) -> Array:
        """Values (t, d) drawn towards what was expected, by a trust (t, d) in 0..1: 1 keeps a value, 0 replaces it as if it were missing.

        What was expected is the value of a season before, or, where tokens are differences, the last one.
        """
        standard = self.standardize(values)
        out, filled = values.copy(), standard.copy()
        back = 1 if self.residual == "difference" else self.season
        for t in np.flatnonzero((np.isnan(standard) | (trust < 1)).any(1)):
            before = np.zeros(out.shape[1]) if t == 0 else filled[t - back] if t >= back else filled[t - 1]
            present, partial = ~np.isnan(standard[t]), trust[t] < 1
            filled[t] = np.where(present, np.where(partial, before + trust[t] * (standard[t] - before), standard[t]), before)
            restored = self.unstandardize(torch.from_numpy(filled[t])).numpy()
            out[t] = np.where(present & partial, restored, values[t])
        return out

    def select(self, which: NDArray[np.int64]) -> SeriesScaler:
        """The scaler of some of the series."""
        names = ("offset", "mean", "std", "residual_std", "floor", "undetermined")
        return replace(self, **{name: getattr(self, name)[which] for name in names})

    def adapt(self, values: Array, clock: NDArray[np.int64]) -> SeriesScaler:
        """The scaler for forecasts after values (t, d): `fit_undetermined`, and series that have fallen below their floor lose it."""
        return self.fit_undetermined(values, clock)._drop_floor(values)

    def fit_undetermined(self, values: Array, clock: NDArray[np.int64]) -> SeriesScaler:
        """Undetermined series with the scale of values (t, d), where there are enough of them."""
        enough = ((~np.isnan(values)).sum(0) >= MIN_VALUES) & (_minimum(-values) != -_minimum(values))
        which = np.flatnonzero(self.undetermined & enough)
        if not len(which):
            return self
        own = values[:, which]
        least, size, none = _minimum(own), mean_size(own), self.transform == "none"
        offset = np.zeros(len(which))
        if not none:
            whole = np.all(self.offset == 0.25)
            offset = np.full(len(which), 0.25) if whole else np.where(least > 0, 0.0, 0.01 * size + 1e-12)
            offset = offset - np.minimum(least, 0)
        bounded = np.isfinite(self.floor).any() and least >= 0  # as the others are
        floor = np.where(bounded, 0.0, -np.inf) if none else np.minimum(least, 0.0)
        ones = np.ones(len(which))
        start = replace(self.select(which), offset=offset, floor=floor, mean=np.zeros(len(which)), std=ones, residual_std=ones)
        mean, std, _ = _moments(start, own)
        start = replace(start, mean=mean, std=std)
        residuals = start.encode(own, clock)
        residual_std = np.sqrt(np.nan_to_num(np.nanmean(_zero_if_all_missing(residuals) ** 2, axis=0)))
        residual_std = np.where(np.isnan(residuals).all(0), self.residual_std[which], np.maximum(residual_std, 1e-3))
        fitted = {"offset": offset, "floor": floor, "mean": mean, "std": std, "residual_std": residual_std,
                  "undetermined": np.zeros(len(which), dtype=bool)}  # fmt: skip
        out = {name: getattr(self, name).copy() for name in fitted}
        for name, part in fitted.items():
            out[name][which] = part
        return replace(self, **out)

    def _drop_floor(self, values: Array) -> SeriesScaler:
        below = _minimum(values) < self.floor
        if not below.any():
            return self
        return replace(self, floor=np.where(below, -np.inf if self.transform == "none" else -self.offset, self.floor))

    def save(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Put the arrays among `tensors`, and return the rest as plain JSON."""
        rest = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                tensors[f"scaler.{field.name}"] = torch.from_numpy(value.copy())
            else:
                rest[field.name] = list(value) if isinstance(value, tuple) else value
        return rest

    @classmethod
    def load(cls, tensors: dict[str, Tensor], rest: dict[str, Any]) -> SeriesScaler:
        """The inverse of `save`."""
        arrays: dict[str, Any] = {n.removeprefix("scaler."): value.numpy() for n, value in tensors.items() if n.startswith("scaler.")}
        return cls(**arrays, **{**rest, "lags": tuple(rest["lags"])})


def seasonal_lags(horizon: int, seasons: tuple[int, ...], length: int) -> tuple[int, ...]:
    """Lags no shorter than the horizon: seven (of a single season ten) of the shortest season, eight of each longer one, within three
    quarters of the length."""
    first = -(-horizon // seasons[0])
    lags = {seasons[0] * (first + i) for i in range(10 if len(seasons) == 1 else 7)}
    lags |= {season * i for season in seasons[1:] for i in range(1, 9)}
    usable = sorted(lag for lag in lags if horizon <= lag <= max(3 * length // 4, horizon))
    return tuple(usable) or (horizon,)


def fit_scaler(
    values: Array, clock: NDArray[np.int64], horizon: int, seasons: tuple[int, ...], *, residual: Residual | None = None,
    transform: Transform | None = None, real: bool = False,
) -> SeriesScaler:  # fmt: skip
    """A scaler fitted to training values (t, d). seasons: periods in steps, the shortest first.

    transform, if None: the most likely one, with Gaussian residuals (as Box and Cox do). residual, if None: the one whose forecasts of the
    last quarter, from the last residual and its mean decay alone, have the smaller mean absolute error. real: values may be negative though
    none is: they are not transformed, and have no floor.
    """
    lags = seasonal_lags(horizon, seasons, len(values))
    residuals: tuple[Residual, ...] = ("seasonal", "difference") if residual is None else (residual,)
    if len(values) < 2 * min(lags) + horizon and residual is None:
        residuals = ("difference",)  # too short to learn from seasons
    transforms: tuple[Transform, ...] = ("none", "sqrt", "log") if transform is None else (transform,)
    if transform is None and (real or np.isnan(values).all() or np.nanmin(values) < 0):
        transforms = ("none",)
    candidates = []
    for kind in residuals:
        fits = [_fit(values, clock, horizon, seasons, kind, by) for by in transforms]
        candidates.append(max(fits, key=lambda scaler: _log_likelihood(scaler, values, clock)))
    best = candidates[0] if len(candidates) == 1 else min(candidates, key=lambda scaler: _forecast_error(scaler, values))
    return replace(best, floor=np.full(len(best.floor), -np.inf)) if real and best.transform == "none" else best


def _fit(
    values: Array, clock: NDArray[np.int64], horizon: int, seasons: tuple[int, ...], residual: Residual, transform: Transform
) -> SeriesScaler:
    d, season, lags = values.shape[1], seasons[0], seasonal_lags(horizon, seasons, len(values))
    least = _minimum(values)
    # A series without a value may turn out negative, but where all are transformed it has to have a floor.
    floor = np.where((least >= 0) & np.isfinite(least) | (transform != "none"), 0.0, -np.inf)
    if transform != "none" and (least < 0).any():
        raise ValueError(f"transform={transform} is for values of 0 or more; some are negative, the least is {least.min():g}: use none")
    offset = np.zeros(d)
    if transform != "none":
        whole = bool(np.all((values % 1 == 0) | np.isnan(values)))
        # Keeps the transform finite at 0 without moving zeros far from small values: a quarter of a count, a hundredth of the mean size.
        small = 0.01 * mean_size(values) + 1e-12
        offset = np.full(d, 0.25) if whole else np.where((least > 0) & np.isfinite(least), 0.0, small)
    start = SeriesScaler(
        residual, transform, horizon, season, lags, offset, mean=np.zeros(d), std=np.ones(d), weights=np.zeros(len(lags)),
        residual_std=np.ones(d), phase_scale=np.ones(season), floor=floor, undetermined=np.zeros(d, dtype=bool),
    )  # fmt: skip
    mean, std, varies = _moments(start, values)
    scaler = replace(start, mean=mean, std=std)
    if residual == "seasonal":
        # The mean of seasons that was nearest in the later half. Fitted weights would mix weekdays with days of rest.
        standard = scaler.standardize(values)
        filled, recent = scaler.fill_missing(standard), len(values) // 2
        candidates = [replace(scaler, weights=weights) for weights in _seasonal_means(lags, seasons)]
        scaler = min(
            candidates,
            key=lambda one: float(np.nanmean(np.abs(standard[recent:] - one.lagged(filled, recent, len(values)) @ one.weights))),
        )
    residuals = scaler.encode(values, clock)
    residual_std = np.sqrt(np.nan_to_num(np.nanmean(_zero_if_all_missing(residuals) ** 2, axis=0)))
    squares = (residuals / np.maximum(residual_std, 1e-3)) ** 2
    phase_scale: Array = np.ones(season)
    for phase in range(season):
        rows = squares[clock % season == phase]
        rows = rows[~np.isnan(rows)]
        phase_scale[phase] = np.sqrt((rows.sum() + 10) / (len(rows) + 10))  # a prior worth ten values that all phases are alike
    scaler = replace(scaler, phase_scale=np.asarray(np.maximum(phase_scale, 0.05), dtype=np.float64))
    residuals = scaler.encode(values, clock)
    residual_std = np.maximum(np.sqrt(np.nan_to_num(np.nanmean(_zero_if_all_missing(residuals) ** 2, axis=0))), 1e-3)
    sparse = (~np.isnan(values)).sum(0) < MIN_VALUES
    return _pool(replace(scaler, residual_std=residual_std, undetermined=sparse | ~varies), values, sparse)


def _seasonal_means(lags: tuple[int, ...], seasons: tuple[int, ...]) -> list[Array]:
    """Weights (lags,) to choose from: the mean of the last one, two, ... seasons of each length."""
    candidates = []
    for season in seasons:
        own = [i for i, lag in enumerate(lags) if lag % season == 0]
        run = [i for place, i in enumerate(own) if lags[i] == lags[own[0]] + place * season]  # consecutive seasons, without gaps
        for number in (1, 2, 3, 4, 6, 8, 10):
            if number <= len(run):
                weights = np.zeros(len(lags))
                weights[run[:number]] = 1 / number
                candidates.append(weights)
    return candidates or [np.eye(len(lags))[0]]


def _moments(scaler: SeriesScaler, values: Array) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Mean and standard deviation (d,) of values after the transform, and which of the series vary."""
    transformed = scaler.standardize(values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of means over nothing
        mean, std = np.nanmean(transformed, axis=0), np.nanstd(transformed, axis=0)
    mean, std = np.nan_to_num(mean), np.nan_to_num(std)  # a series without a value yet
    varies = std > 1e-9 * np.abs(mean)
    # A constant keeps its size: its residuals are tiny beside it.
    return mean, np.where(varies, std, np.where(mean != 0, 1e-6 * np.abs(mean), 1e-6)), varies


def _pool(scaler: SeriesScaler, values: Array, sparse: NDArray[np.bool_]) -> SeriesScaler:
    """Sparse series take their scale from the others, in proportion to their size."""
    if not sparse.any():
        return scaler
    size, good = mean_size(values), ~scaler.undetermined
    usual, std, residual_std, mean = (
        float(np.median(part[good])) if good.any() else 1.0 for part in (size, scaler.std, scaler.residual_std, scaler.mean)
    )
    size = np.where(size > 0, size, usual)
    scale = std * (size / (usual or 1.0)) ** SIZE_POWER[scaler.transform]
    offset = np.where((scaler.offset < 1e-9) & (scaler.transform != "none"), 0.01 * size, scaler.offset)
    return replace(
        scaler,
        offset=np.where(sparse, offset, scaler.offset),
        mean=np.where(sparse & np.isnan(values).all(0), mean if good.any() else 0.0, scaler.mean),
        std=np.where(sparse, scale, scaler.std),
        residual_std=np.where(sparse, residual_std, scaler.residual_std),
    )


def _log_likelihood(scaler: SeriesScaler, values: Array, clock: NDArray[np.int64]) -> float:
    """Mean log-likelihood of values with Gaussian residuals, up to a constant."""
    residuals, scale = scaler.encode(values, clock), scaler.residual_scale(clock) * scaler.std
    shifted = np.maximum(values + scaler.offset, 1e-9)
    log_slope = {"none": 0.0, "sqrt": -np.log(2 * np.sqrt(shifted)), "log": -np.log(shifted)}[scaler.transform]
    return float(np.nanmean(-np.log(scale) - 0.5 * residuals**2 + log_slope))


def _forecast_error(scaler: SeriesScaler, values: Array) -> float:
    """Mean absolute error, in standardised values of the last quarter, of forecasts in which the last residual decays at its mean rate."""
    h, t = scaler.horizon, len(values)
    origins = np.arange(max(3 * t // 4, scaler.warmup + 1), t - h + 1, max(1, h // 2))
    before = np.arange(scaler.warmup + 1, 3 * t // 4 - h, max(1, h // 2))
    if len(origins) == 0 or len(before) < 3:
        return np.inf if scaler.residual == "seasonal" else 0.0
    standard = scaler.standardize(values)
    if scaler.residual == "difference":
        filled = scaler.fill_missing(standard)
        return float(np.nanmean([np.abs(standard[o : o + h] - filled[o - 1]) for o in origins]))
    expected = np.concatenate([np.zeros((scaler.warmup, values.shape[1])),
                               scaler.lagged(scaler.fill_missing(standard), scaler.warmup, t) @ scaler.weights])  # fmt: skip
    residuals = np.nan_to_num(standard - expected)
    ahead, now = np.stack([residuals[o : o + h] for o in before]), residuals[before - 1]
    decay = (ahead * now[:, None]).sum((0, 2)) / np.maximum((now**2).sum(), 1e-12)  # (h,), how much of a residual is left
    forecasts = [expected[o : o + h] + decay[:, None] * residuals[o - 1] for o in origins]
    return float(np.nanmean([np.abs(standard[o : o + h] - f) for o, f in zip(origins, forecasts, strict=True)]))


def _minimum(values: Array) -> Array:
    """(d,), the least value present; inf where there is none."""
    return np.min(np.where(np.isnan(values), np.inf, values), axis=0)


def mean_size(values: Array) -> Array:
    """(d,), mean absolute value; 0 where there is none."""
    present = ~np.isnan(values)
    return np.abs(np.where(present, values, 0.0)).sum(0) / np.maximum(present.sum(0), 1)


def _zero_if_all_missing(residuals: Array) -> Array:
    """Residuals (t, d) with zeros for a series that has none, so that its mean is a number."""
    return np.where(np.isnan(residuals).all(0), 0.0, residuals)
