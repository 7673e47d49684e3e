"""Series as tokens: what is normal for each, and windows of how far they depart from it.

A token is one value of one series, as its departure from what was to be expected, in units of what is usual. So a network that has learned
nothing is already a fair forecast (its tokens are white noise), and series of any range look alike to it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from ..windows import Batch

Array = NDArray[np.float64]
Kind = Literal["lags", "steps"]
Transform = Literal["none", "sqrt", "log"]
FURTHEST = 12.0  # usual departures beyond which a token is cut off: one typing error must not be all that a training sees
ENOUGH = 5  # values of a series below which they do not say what is usual for it
POWERS = {"none": 1.0, "sqrt": 0.5, "log": 0.0}  # of a series' size, in which its departures grow after the transform


@dataclass(frozen=True, eq=False)
class Normal:
    """What values (t, d) are expected to be, and by how much they are usually off.

    kind="lags": expected is the mean of some of the values `lags` steps before, all of which lie before a forecast's start (no lag is
    shorter than the horizon). kind="steps": expected is the value before, which within a forecast is a sampled one: tokens are then
    steps, summed up to values. Departures are measured after a transform that makes them alike at all sizes.
    """

    kind: Kind
    transform: Transform
    horizon: int
    season: int
    lags: tuple[int, ...]
    offset: Array  # (d,), added before the transform
    mean: Array  # (d,), of transformed values
    std: Array  # (d,)
    weights: Array  # (lags,), sum to 1: which of the lagged values are expected, on average
    spread: Array  # (d,), usual departure of each series
    phase: Array  # (season,), by how much more or less at each phase of the season
    low: Array  # (d,), no forecast is below
    vague: Any = None  # (d,), bool: series of which the training range said too little, a constant or a few values

    def __post_init__(self) -> None:
        if self.vague is None:
            object.__setattr__(self, "vague", np.zeros(len(self.mean), dtype=bool))

    @property
    def warm(self) -> int:
        """Steps of a series before its first token."""
        return min(lag for lag, weight in zip(self.lags, self.weights, strict=True) if weight) if self.kind == "lags" else 1

    def standard(self, values: Array) -> Array:
        """Values (t, d), transformed, mean 0 and variance 1 in training. NaN stays."""
        shifted = values + self.offset
        if self.transform == "none":
            return (shifted - self.mean) / self.std
        with np.errstate(invalid="ignore", divide="ignore"):
            shifted = np.maximum(shifted, 1e-6 * np.maximum(1e-6, np.abs(self.offset) + np.abs(self.low)))
            moved = np.sqrt(shifted) if self.transform == "sqrt" else np.log(shifted)
        return (moved - self.mean) / self.std

    def filled(self, standard: Array) -> Array:
        """Missing values by those of a season before, else by the last one, else by the mean: only to take lags from."""
        out = standard.copy()
        for t in np.flatnonzero(np.isnan(out).any(1)):
            gone = np.isnan(out[t])
            before = out[t - self.season] if t >= self.season else out[t - 1] if t else np.zeros(out.shape[1])
            out[t, gone] = before[gone]
        return np.nan_to_num(out)

    def lagged(self, filled: Array, first: int, last: int) -> Array:
        """Standardised values (last-first, d, lags) at each lag before steps first..last-1, counted from the start of `filled`.

        A lag that reaches back before the start stands for the mean of those that do not.
        """
        steps = np.arange(first, last)[:, None] - np.array(self.lags)
        past = filled[np.maximum(steps, 0)].swapaxes(1, 2)
        there = steps >= 0
        if there.all():
            return past
        counted = (there * self.weights)[:, None]
        mean = (past * counted).sum(-1) / np.maximum(counted.sum(-1), 1e-12)
        return np.where(there[:, None], past, mean[..., None])

    def size(self, clock: NDArray[np.int64]) -> Array:
        """Usual departures (t, d) at the given times."""
        return self.phase[clock % self.season][:, None] * self.spread

    def tokens(self, values: Array, clock: NDArray[np.int64], past: Array | None = None) -> Array:
        """Departures (t, d) of values (t, d): NaN where a value is missing, and for the first `warm` steps.

        past: the values by which these are expected, where they are not the same.
        """
        standard = self.standard(values)
        out = np.full_like(standard, np.nan)
        if len(values) <= self.warm:
            return out
        if self.kind == "steps":
            out[1:] = np.diff(standard, axis=0)
        else:
            filled = self.filled(standard if past is None else self.standard(past))
            out[self.warm :] = standard[self.warm :] - self.lagged(filled, self.warm, len(values)) @ self.weights
        return np.clip(out / self.size(clock), -FURTHEST, FURTHEST)

    def believed(self, values: Array, share: Array) -> Array:
        """Values (t, d) of which only a share (t, d) of 0..1 is believed, the rest as if they were missing: what is expected instead.

        That is the value of a season before, or, where tokens are steps, the last one.
        """
        standard = self.standard(values)
        out, filled = values.copy(), standard.copy()
        back = 1 if self.kind == "steps" else self.season
        for t in np.flatnonzero((np.isnan(standard) | (share < 1)).any(1)):
            before = np.zeros(out.shape[1]) if t == 0 else filled[t - back] if t >= back else filled[t - 1]
            there, doubted = ~np.isnan(standard[t]), share[t] < 1
            filled[t] = np.where(there, np.where(doubted, before + share[t] * (standard[t] - before), standard[t]), before)
            restored = self.restore(torch.from_numpy(filled[t])).numpy()
            out[t] = np.where(there & doubted, restored, values[t])
        return out

    def decode(self, tokens: Tensor, values: Array, clock: NDArray[np.int64]) -> Tensor:
        """Values (n, h, d) of tokens (n, h, d) that follow a history (t, d). clock: times (h,) of the tokens. Differentiable."""
        h = tokens.shape[1]
        standard = self.filled(self.standard(values))
        size = torch.as_tensor(self.size(clock), dtype=tokens.dtype)
        if self.kind == "steps":
            moved = torch.as_tensor(standard[-1], dtype=tokens.dtype) + (tokens * size).cumsum(1)
        else:
            padded = np.concatenate([standard, np.zeros((h, standard.shape[1]))])  # never read: no lag is shorter than the horizon
            expected = self.lagged(padded, len(values), len(values) + h) @ self.weights
            moved = torch.as_tensor(expected, dtype=tokens.dtype) + tokens * size
        return self.restore(moved)

    def restore(self, standard: Tensor) -> Tensor:
        """The inverse of standard, for tensors (..., d), and no lower than values ever are. Differentiable."""
        offset, mean, std, low = (torch.as_tensor(part, dtype=standard.dtype) for part in (self.offset, self.mean, self.std, self.low))
        moved = standard * std + mean
        if self.transform == "sqrt":
            moved = moved.clamp(min=0) ** 2
        elif self.transform == "log":
            moved = moved.clamp(max=80).exp()
        return torch.maximum(moved - offset, low)

    def of(self, which: NDArray[np.int64]) -> Normal:
        """The same for some of the series."""
        names = ("offset", "mean", "std", "spread", "low", "vague")
        return replace(self, **{name: getattr(self, name)[which] for name in names})

    def learned(self, values: Array, clock: NDArray[np.int64]) -> Normal:
        """The same, with vague series measured by values (t, d), all from before the forecast, where these say enough of them by now."""
        which = np.flatnonzero(self.vague & ((~np.isnan(values)).sum(0) >= ENOUGH) & (_least(-values) != -_least(values)))
        if not len(which):
            return self
        own = values[:, which]
        least, size, none = _least(own), _mean_size(own), self.transform == "none"
        offset = np.zeros(len(which))
        if not none:
            whole = np.all(self.offset == 0.25)
            offset = np.full(len(which), 0.25) if whole else np.where(least > 0, 0.0, 0.01 * size + 1e-12)
            offset = offset - np.minimum(least, 0)
        bound = np.isfinite(self.low).any() and least >= 0  # as the others are
        low = np.where(bound, 0.0, -np.inf) if none else np.minimum(least, 0.0)
        start = replace(
            self.of(which), offset=offset, low=low, mean=np.zeros(len(which)), std=np.ones(len(which)), spread=np.ones(len(which))
        )
        mean, std, _ = _moments(start, own)
        start = replace(start, mean=mean, std=std)
        departures = start.tokens(own, clock)
        spread = np.sqrt(np.nan_to_num(np.nanmean(_or_zero(departures) ** 2, axis=0)))
        spread = np.where(np.isnan(departures).all(0), self.spread[which], np.maximum(spread, 1e-3))
        made = {"offset": offset, "low": low, "mean": mean, "std": std, "spread": spread, "vague": np.zeros(len(which), dtype=bool)}
        out = {name: getattr(self, name).copy() for name in made}
        for name, part in made.items():
            out[name][which] = part
        return replace(self, **out)

    def unbound(self, values: Array) -> Normal:
        """The same, with no floor for series that have gone below it."""
        below = _least(values) < self.low
        if not below.any():
            return self
        return replace(self, low=np.where(below, -np.inf if self.transform == "none" else -self.offset, self.low))

    def save(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Put the arrays among tensors, and return the rest as plain JSON."""
        rest = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                tensors[f"normal.{field.name}"] = torch.from_numpy(value.copy())
            else:
                rest[field.name] = list(value) if isinstance(value, tuple) else value
        return rest

    @classmethod
    def load(cls, tensors: dict[str, Tensor], rest: dict[str, Any]) -> Normal:
        """The inverse of save."""
        arrays: dict[str, Any] = {n.removeprefix("normal."): value.numpy() for n, value in tensors.items() if n.startswith("normal.")}
        return cls(**arrays, **{**rest, "lags": tuple(rest["lags"])})


def seasonal_lags(horizon: int, periods: tuple[int, ...], length: int) -> tuple[int, ...]:
    """Lags no shorter than the horizon: seven seasons, and eight of each longer period, within three quarters of the length."""
    first = -(-horizon // periods[0])
    lags = {periods[0] * (first + i) for i in range(10 if len(periods) == 1 else 7)}
    lags |= {period * i for period in periods[1:] for i in range(1, 9)}
    usable = sorted(lag for lag in lags if horizon <= lag <= max(3 * length // 4, horizon))
    return tuple(usable) or (horizon,)


def _means(lags: tuple[int, ...], periods: tuple[int, ...]) -> list[Array]:
    """Weights (lags,) to choose from: the mean of the last one, two, ... seasons of each length."""
    made = []
    for period in periods:
        own = [i for i, lag in enumerate(lags) if lag % period == 0]
        run = [i for place, i in enumerate(own) if lags[i] == lags[own[0]] + place * period]  # without gaps: seasons one after another
        for number in (1, 2, 3, 4, 6, 8, 10):
            if number <= len(run):
                weights = np.zeros(len(lags))
                weights[run[:number]] = 1 / number
                made.append(weights)
    return made or [np.eye(len(lags))[0]]


def fit_normal(
    values: Array, clock: NDArray[np.int64], horizon: int, periods: tuple[int, ...], *, kind: Kind | None = None,
    transform: Transform | None = None, real: bool = False,
) -> Normal:  # fmt: skip
    """What is normal by values (t, d) to train on. kind and transform are chosen by how well they explain these, where not given.

    The transform is the likeliest, each departure taken as Gaussian (as Box and Cox do); the kind is the one whose forecasts of the last
    quarter, with departures that fade at the rate they usually do, are nearer on average. real: values may be negative though none is:
    they are not transformed, and have no floor.
    """
    lags = seasonal_lags(horizon, periods, len(values))
    kinds: tuple[Kind, ...] = ("lags", "steps") if kind is None else (kind,)
    if len(values) < 2 * min(lags) + horizon and kind is None:
        kinds = ("steps",)  # too short to learn from seasons
    transforms: tuple[Transform, ...] = ("none", "sqrt", "log") if transform is None else (transform,)
    if transform is None and (real or np.isnan(values).all() or np.nanmin(values) < 0):
        transforms = ("none",)
    made = []
    for one in kinds:
        fits = [_fit(values, clock, horizon, periods, lags, one, by) for by in transforms]
        made.append(max(fits, key=lambda normal: _likelihood(normal, values, clock)))
    best = made[0] if len(made) == 1 else min(made, key=lambda normal: _misses(normal, values, clock))
    return replace(best, low=np.full(len(best.low), -np.inf)) if real and best.transform == "none" else best


def _fit(
    values: Array, clock: NDArray[np.int64], horizon: int, periods: tuple[int, ...], lags: tuple[int, ...], kind: Kind, transform: Transform
) -> Normal:
    d = values.shape[1]
    least = _least(values)
    # A series without a value may turn out negative, but where all are transformed it has to have a floor.
    low = np.where((least >= 0) & np.isfinite(least) | (transform != "none"), 0.0, -np.inf)
    if transform != "none" and (least < 0).any():
        raise ValueError(f"the transform {transform} is for values of 0 or more; some are negative, the least {least.min():g}: use none")
    typical = _mean_size(values)
    offset = np.zeros(d)
    if transform != "none":
        whole = bool(np.all((values % 1 == 0) | np.isnan(values)))
        # Zeros must stay apart from small values by no more than is usual: a quarter of a count, a hundredth of what is typical.
        offset = np.full(d, 0.25) if whole else np.where((least > 0) & np.isfinite(least), 0.0, 0.01 * typical + 1e-12)
    start = Normal(
        kind, transform, horizon, periods[0], lags, offset, np.zeros(d), np.ones(d), np.zeros(len(lags)), np.ones(d),
        np.ones(periods[0]), low,
    )  # fmt: skip
    mean, std, varies = _moments(start, values)
    normal = replace(start, mean=mean, std=std)
    if kind == "lags":
        # The mean that was nearest lately. Fitted weights would mix weekdays with days of rest.
        standard = normal.standard(values)
        filled, recent = normal.filled(standard), len(values) // 2
        made = [replace(normal, weights=weights) for weights in _means(lags, periods)]
        normal = min(
            made, key=lambda one: float(np.nanmean(np.abs(standard[recent:] - one.lagged(filled, recent, len(values)) @ one.weights)))
        )
    departures = normal.tokens(values, clock)
    spread = np.sqrt(np.nan_to_num(np.nanmean(_or_zero(departures) ** 2, axis=0)))
    spread = np.maximum(spread, 1e-3)
    phase: Array = np.ones(periods[0])
    relative = (departures / spread) ** 2
    for at in range(periods[0]):
        rows = relative[clock % periods[0] == at]
        rows = rows[~np.isnan(rows)]
        phase[at] = np.sqrt((rows.sum() + 10) / (len(rows) + 10))  # ten values' worth of belief that all phases are alike
    phase = np.asarray(np.maximum(phase, 0.05), dtype=np.float64)
    normal = replace(normal, phase=phase)
    again = normal.tokens(values, clock)
    spread = np.maximum(np.sqrt(np.nan_to_num(np.nanmean(_or_zero(again) ** 2, axis=0))), 1e-3)
    thin = (~np.isnan(values)).sum(0) < ENOUGH
    return _pooled(replace(normal, spread=spread, vague=thin | ~varies), values, thin)


def _moments(normal: Normal, values: Array) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Mean and standard deviation (d,) of values after the transform, and which of the series vary."""
    moved = normal.standard(values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of means over nothing
        mean, std = np.nanmean(moved, axis=0), np.nanstd(moved, axis=0)
    mean, std = np.nan_to_num(mean), np.nan_to_num(std)  # a series without a value yet
    varies = std > 1e-9 * np.abs(mean)
    # A constant keeps its size: its usual departure is next to nothing beside it.
    return mean, np.where(varies, std, np.where(mean != 0, 1e-6 * np.abs(mean), 1e-6)), varies


def _pooled(normal: Normal, values: Array, thin: NDArray[np.bool_]) -> Normal:
    """The same, with what is usual for thin series, of hardly a value, taken from the others: as much of their size."""
    if not thin.any():
        return normal
    size, good = _mean_size(values), ~normal.vague
    usual, std, spread, mean = (
        float(np.median(part[good])) if good.any() else 1.0 for part in (size, normal.std, normal.spread, normal.mean)
    )
    size = np.where(size > 0, size, usual)
    scale = std * (size / (usual or 1.0)) ** POWERS[normal.transform]
    offset = np.where((normal.offset < 1e-9) & (normal.transform != "none"), 0.01 * size, normal.offset)
    return replace(
        normal,
        offset=np.where(thin, offset, normal.offset),
        mean=np.where(thin & np.isnan(values).all(0), mean if good.any() else 0.0, normal.mean),
        std=np.where(thin, scale, normal.std),
        spread=np.where(thin, spread, normal.spread),
    )


def _least(values: Array) -> Array:
    """(d,), the least of the values that are there; inf where there are none."""
    return np.min(np.where(np.isnan(values), np.inf, values), axis=0)


def _mean_size(values: Array) -> Array:
    """(d,), mean of the absolute values that are there; 0 where there are none."""
    there = ~np.isnan(values)
    return np.abs(np.where(there, values, 0.0)).sum(0) / np.maximum(there.sum(0), 1)


def _or_zero(departures: Array) -> Array:
    """Zeros where a whole series has no departure at all, so that its mean is a number."""
    return np.where(np.isnan(departures).all(0), 0.0, departures)


def _likelihood(normal: Normal, values: Array, clock: NDArray[np.int64]) -> float:
    """Mean log-likelihood of values whose departures are Gaussian, but for a constant."""
    departures, size = normal.tokens(values, clock), normal.size(clock) * normal.std
    shifted = np.maximum(values + normal.offset, 1e-9)
    slope = {"none": 0.0, "sqrt": -np.log(2 * np.sqrt(shifted)), "log": -np.log(shifted)}[normal.transform]
    return float(np.nanmean(-np.log(size) - 0.5 * departures**2 + slope))


def _misses(normal: Normal, values: Array, clock: NDArray[np.int64]) -> float:
    """Mean distance between standardised values of the last quarter and forecasts made from the present departure alone."""
    h, t = normal.horizon, len(values)
    origins = np.arange(max(3 * t // 4, normal.warm + 1), t - h + 1, max(1, h // 2))
    before = np.arange(normal.warm + 1, 3 * t // 4 - h, max(1, h // 2))
    if len(origins) == 0 or len(before) < 3:
        return np.inf if normal.kind == "lags" else 0.0
    standard = normal.standard(values)
    if normal.kind == "steps":
        now = normal.filled(standard)
        return float(np.nanmean([np.abs(standard[o : o + h] - now[o - 1]) for o in origins]))
    expected = np.concatenate([np.zeros((normal.warm, values.shape[1])),
                               normal.lagged(normal.filled(standard), normal.warm, t) @ normal.weights])  # fmt: skip
    off = np.nan_to_num(standard - expected)
    ahead, now = np.stack([off[o : o + h] for o in before]), off[before - 1]
    fade = (ahead * now[:, None]).sum((0, 2)) / np.maximum((now**2).sum(), 1e-12)  # (h,), how much of a departure is left
    said = [expected[o : o + h] + fade[:, None] * off[o - 1] for o in origins]
    return float(np.nanmean([np.abs(standard[o : o + h] - s) for o, s in zip(origins, said, strict=True)]))


@dataclass(frozen=True, eq=False)
class Covariates:
    """What a network is told beside the tokens: the calendar, which series it is, its lagged values, what is known in advance, and how
    the others are doing."""

    periods: tuple[float, ...]
    together: bool  # whether series are told of the others' mean departure, up to the start of the forecast
    about: Array  # (d, s), each series described by numbers: its share in the leading components, its size and spread
    known_mean: Array  # (c,)
    known_std: Array  # (c,)

    def calendar(self, clock: NDArray[np.int64]) -> Array:
        """Waves (t, w) of each period and its first overtones."""
        waves = [
            wave(2 * np.pi * harmonic * clock / period)
            for period in self.periods
            for harmonic in (1, 2, 3)
            if period / harmonic > 2
            for wave in (np.sin, np.cos)
        ]
        return np.stack(waves, axis=-1) if waves else np.zeros((len(clock), 0))

    def width(self, normal: Normal) -> int:
        return (
            self.calendar(np.zeros(1, dtype=np.int64)).shape[1]
            + self.about.shape[1]
            + self.lag_width(normal)
            + len(self.known_mean)
            + 2 * self.together
        )

    def lag_width(self, normal: Normal) -> int:
        return len(normal.lags) + 1 if normal.kind == "lags" else 0

    def lagged(self, normal: Normal, standard: Array, clock: NDArray[np.int64], first: int, last: int) -> NDArray[np.float32]:
        """Numbers (last-first, d, lags + 1) of steps first..last-1: what is expected, and what the token would be if each lagged value
        came again. Nothing where tokens are steps.
        """
        if normal.kind == "steps":
            return np.zeros((last - first, standard.shape[1], 0), dtype=np.float32)
        past = normal.lagged(standard, first, last)
        expected = past @ normal.weights
        again = np.clip((past - expected[..., None]) / normal.size(clock[first:last])[..., None], -FURTHEST, FURTHEST)
        return np.concatenate([again, expected[..., None]], axis=-1).astype(np.float32)

    def company(self, tokens: Array) -> NDArray[np.float32]:
        """The mean departure of all series and a mark that it is known, (t, 2), by tokens (t, d); (t, 0) if series are not told."""
        if not self.together:
            return np.zeros((len(tokens), 0), dtype=np.float32)
        there = ~np.isnan(tokens)
        mean = np.where(there, tokens, 0.0).sum(1) / np.maximum(there.sum(1), 1)
        return np.stack([mean, there.any(1)], axis=1).astype(np.float32)

    @classmethod
    def fit(
        cls, values: Array, known: Array, normal: Normal, periods: tuple[float, ...], *, together: bool = True, components: int = 4
    ) -> Covariates:
        standard = normal.filled(normal.standard(values))
        d = values.shape[1]
        about = np.zeros((d, 0))
        if d > 1:
            shares = np.linalg.svd(standard - standard.mean(0), full_matrices=False)[2][: min(components, d - 1)].T * np.sqrt(d)
            size = np.stack([np.log1p(_mean_size(values)), np.log(normal.spread)], axis=-1)
            size = (size - size.mean(0)) / np.maximum(size.std(0), 1e-6)
            about = np.clip(np.concatenate([shares * np.sign(shares.sum(0) + 1e-12), size], axis=-1), -4, 4)
        std = known.std(0) if known.size else np.zeros(known.shape[1])
        return cls(periods, together and d > 1, about, known.mean(0) if known.size else std, np.where(std > 0, std, 1.0))

    def save(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        for name in ("about", "known_mean", "known_std"):
            tensors[f"covariates.{name}"] = torch.from_numpy(getattr(self, name).copy())
        return {"periods": list(self.periods), "together": self.together}

    @classmethod
    def load(cls, tensors: dict[str, Tensor], rest: dict[str, Any]) -> Covariates:
        arrays = {name.removeprefix("covariates."): value.numpy() for name, value in tensors.items() if name.startswith("covariates.")}
        return cls(tuple(rest["periods"]), rest["together"], **arrays)


class SeriesWindows:
    """Windows of single series: context and horizon, one token a value. A missing value is a masked token (at level K, that is)."""

    def __init__(
        self, values: Array, clock: NDArray[np.int64], known: Array, normal: Normal, covariates: Covariates, context: int,
        first: int, last: int,
    ) -> None:  # fmt: skip
        """Windows of `context` steps and the horizon that lie within steps first..last-1 of the values (t, d)."""
        length = context + normal.horizon
        first = max(first, normal.warm)
        if last - first < length:
            raise ValueError(
                f"a window of {length} steps does not fit into the {max(0, last - first)} that are left (the first {normal.warm} are "
                "needed as lags); give more history, or a shorter horizon or context"
            )
        self.length, self.context = length, context
        self.first, self.last = first, last
        tokens = normal.tokens(values, clock)
        self._mask = torch.from_numpy(~np.isnan(tokens))
        self._tokens = torch.from_numpy(np.nan_to_num(tokens).astype(np.float32))
        standard = normal.filled(normal.standard(values))
        self._lagged = torch.from_numpy(covariates.lagged(normal, standard, clock, normal.warm, len(values)))
        self._company = torch.from_numpy(covariates.company(tokens))
        self._warm = normal.warm
        self._time, self._about = timely(covariates, clock, known), torch.from_numpy(covariates.about.astype(np.float32))

    @property
    def event(self) -> tuple[int, ...]:
        return (1,)

    @property
    def cond_width(self) -> int:
        return self._time.shape[1] + self._about.shape[1] + self._lagged.shape[2] + self._company.shape[1]

    def draw(self, size: int, generator: Generator | None = None) -> Tensor:
        which = torch.randint(0, self._tokens.shape[1], (size,), generator=generator)
        start = torch.randint(self.first, self.last - self.length + 1, (size,), generator=generator)
        return torch.stack([which, start], dim=1)

    def length_of(self, windows: Tensor) -> int:
        return self.length

    def all(self) -> Tensor:
        """Windows for validation: every series, at starts half a window apart."""
        starts = torch.arange(self.first, self.last - self.length + 1, max(1, self.length // 2))
        return torch.cartesian_prod(torch.arange(self._tokens.shape[1]), starts)

    def read(self, windows: Tensor) -> Batch:
        which, start = windows.unbind(1)
        steps = start[:, None] + torch.arange(self.length)
        series = which[:, None].expand_as(steps)
        company = self._company[steps] * (torch.arange(self.length) < self.context)[:, None]
        cond = told(self._time[steps], self._about[which], self._lagged[steps - self._warm, series], company)
        return Batch(self._tokens[steps, series][..., None], cond, self._mask[steps, series])


class JointWindows:
    """Windows of all series at once, as in the paper: a token holds the departures of all of them at one step. What is missing in it is as
    expected; a token of which most is missing is masked.
    """

    def __init__(
        self, values: Array, clock: NDArray[np.int64], known: Array, normal: Normal, covariates: Covariates, context: int,
        first: int, last: int,
    ) -> None:  # fmt: skip
        """Windows of `context` steps and the horizon that lie within steps first..last-1 of the values (t, d)."""
        each = SeriesWindows(values, clock, known, normal, covariates, context, first, last)
        self.length, self.context, self.first, self.last = each.length, context, each.first, each.last
        self._tokens, self._mask = each._tokens, each._mask.float().mean(1) > 0.5
        self._told = told_jointly(each._time[normal.warm :], each._lagged)
        self._warm = normal.warm

    @property
    def event(self) -> tuple[int, ...]:
        return (self._tokens.shape[1],)

    @property
    def cond_width(self) -> int:
        return self._told.shape[1]

    def draw(self, size: int, generator: Generator | None = None) -> Tensor:
        return torch.randint(self.first, self.last - self.length + 1, (size, 1), generator=generator)

    def length_of(self, windows: Tensor) -> int:
        return self.length

    def all(self) -> Tensor:
        """Windows for validation, at all starts."""
        return torch.arange(self.first, self.last - self.length + 1)[:, None]

    def read(self, windows: Tensor) -> Batch:
        steps = windows + torch.arange(self.length)
        return Batch(self._tokens[steps], self._told[steps - self._warm], self._mask[steps])


def told_jointly(time: Tensor, lagged: Tensor) -> Tensor:
    """Conditions (t, c) of all series at once: calendar (t, w), and their lags (t, d, l) side by side."""
    return torch.cat([time[: len(lagged)], lagged.flatten(1)], dim=-1)


def timely(covariates: Covariates, clock: NDArray[np.int64], known: Array) -> Tensor:
    """What all series are told alike, (t, w + c): calendar and covariates known in advance."""
    scaled = (known[: len(clock)] - covariates.known_mean) / covariates.known_std if known.shape[1] else np.zeros((len(clock), 0))
    return torch.from_numpy(np.concatenate([covariates.calendar(clock), scaled], axis=1).astype(np.float32))


def told(time: Tensor, about: Tensor, lagged: Tensor, company: Tensor) -> Tensor:
    """Conditions (b, t, c) of b windows: time (b, t, w), about (b, s), lagged (b, t, l), company (b, t, 0 or 2)."""
    return torch.cat([time, about[:, None].expand(-1, time.shape[1], -1), lagged, company], dim=-1)
