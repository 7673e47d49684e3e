"""What conditions the network beside the tokens, and how it is laid out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .panel import Array
from .scaling import MAX_RESIDUAL, SeriesScaler, mean_size


@dataclass(frozen=True, eq=False)
class SeriesFeatures:
    """Conditions of each token: calendar, covariates known in advance, static features of its series, lagged values, and the mean residual
    of all series."""

    periods: tuple[float, ...]  # of the calendar features, in steps
    cross_series: bool  # condition on the mean residual of all series, up to the start of the forecast
    static_features: Array  # (d, s): loadings on the leading principal components, size and residual scale
    known_mean: Array  # (c,)
    known_std: Array  # (c,)

    @classmethod
    def fit(
        cls, values: Array, known: Array, scaler: SeriesScaler, periods: tuple[float, ...], *, cross_series: bool = True,
        components: int = 4,
    ) -> SeriesFeatures:  # fmt: skip
        """Fitted to training values (t, d) and covariates (t, c)."""
        standard = scaler.fill_missing(scaler.standardize(values))
        d = values.shape[1]
        static = np.zeros((d, 0))
        if d > 1:
            loadings = np.linalg.svd(standard - standard.mean(0), full_matrices=False)[2][: min(components, d - 1)].T * np.sqrt(d)
            size = np.stack([np.log1p(mean_size(values)), np.log(scaler.residual_std)], axis=-1)
            size = (size - size.mean(0)) / np.maximum(size.std(0), 1e-6)
            static = np.clip(np.concatenate([loadings * np.sign(loadings.sum(0) + 1e-12), size], axis=-1), -4, 4)
        std = known.std(0) if known.size else np.zeros(known.shape[1])
        return cls(periods, cross_series and d > 1, static, known.mean(0) if known.size else std, np.where(std > 0, std, 1.0))

    def calendar(self, clock: NDArray[np.int64]) -> Array:
        """Sine and cosine (t, w) of each period and its first two overtones."""
        waves = [
            wave(2 * np.pi * harmonic * clock / period)
            for period in self.periods
            for harmonic in (1, 2, 3)
            if period / harmonic > 2
            for wave in (np.sin, np.cos)
        ]
        return np.stack(waves, axis=-1) if waves else np.zeros((len(clock), 0))

    def time_features(self, clock: NDArray[np.int64], known: Array) -> Tensor:
        """Features (t, w + c) that all series share: calendar and covariates known in advance."""
        scaled = (known[: len(clock)] - self.known_mean) / self.known_std if known.shape[1] else np.zeros((len(clock), 0))
        return torch.from_numpy(np.concatenate([self.calendar(clock), scaled], axis=1).astype(np.float32))

    def lagged(self, scaler: SeriesScaler, standard: Array, clock: NDArray[np.int64], first: int, last: int) -> Tensor:
        """Features (last-first, d, lags + 1) of steps first..last-1: the token if each lagged value came again, and the expected value.

        standard: standardised values (t, d) without gaps. Empty where tokens are differences.
        """
        if scaler.residual == "difference":
            return torch.zeros(last - first, standard.shape[1], 0)
        past = scaler.lagged(standard, first, last)
        expected = past @ scaler.weights
        repeated = np.clip((past - expected[..., None]) / scaler.residual_scale(clock[first:last])[..., None], -MAX_RESIDUAL, MAX_RESIDUAL)
        return torch.from_numpy(np.concatenate([repeated, expected[..., None]], axis=-1).astype(np.float32))

    def cross_series_mean(self, tokens: Array) -> Tensor:
        """Mean token of all series, and 1 where there is one, (t, 2), of tokens (t, d) with NaN where missing; (t, 0) if not used."""
        if not self.cross_series:
            return torch.zeros(len(tokens), 0)
        present = ~np.isnan(tokens)
        mean = np.where(present, tokens, 0.0).sum(1) / np.maximum(present.sum(1), 1)
        return torch.from_numpy(np.stack([mean, present.any(1)], axis=1).astype(np.float32))

    def width(self, scaler: SeriesScaler) -> int:
        """Numbers of a condition, for tokens of single series."""
        lags = len(scaler.lags) + 1 if scaler.residual == "seasonal" else 0
        calendar = self.calendar(np.zeros(1, dtype=np.int64)).shape[1]
        return calendar + len(self.known_mean) + self.static_features.shape[1] + lags + 2 * self.cross_series

    def save(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Put the arrays among `tensors`, and return the rest as plain JSON."""
        for name in ("static_features", "known_mean", "known_std"):
            tensors[f"features.{name}"] = torch.from_numpy(getattr(self, name).copy())
        return {"periods": list(self.periods), "cross_series": self.cross_series}

    @classmethod
    def load(cls, tensors: dict[str, Tensor], rest: dict[str, Any]) -> SeriesFeatures:
        """The inverse of `save`."""
        arrays = {name.removeprefix("features."): value.numpy() for name, value in tensors.items() if name.startswith("features.")}
        return cls(tuple(rest["periods"]), rest["cross_series"], **arrays)


def build_cond(time: Tensor, static: Tensor, lagged: Tensor, cross_series: Tensor) -> Tensor:
    """Conditions (b, t, c) of b windows of single series: time (b, t, w), static (b, s), lagged (b, t, l), cross_series (b, t, 0 or 2)."""
    return torch.cat([time, static[:, None].expand(-1, time.shape[1], -1), lagged, cross_series], dim=-1)


def build_joint_cond(time: Tensor, lagged: Tensor) -> Tensor:
    """Conditions (t, c) of tokens that hold all series: time (t, w), and the lagged features (t, d, l) of all series side by side."""
    return torch.cat([time[: len(lagged)], lagged.flatten(1)], dim=-1)
