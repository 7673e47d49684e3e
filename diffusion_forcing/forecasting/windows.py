"""Training windows of tokens: of single series, or of all series at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from ..windows import Batch, Source
from .calendar import clock_of
from .features import SeriesFeatures, build_cond, build_joint_cond
from .panel import Array, Panel
from .scaling import SeriesScaler

Clock = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class History:
    """What is known when a forecast starts.

    values: (t, d), NaN where missing. clock: (t,), their times in steps, see `calendar.clock_of`. known: (t + ahead, c), covariates; the
    rows beyond t are the future. level: (t, d), noise levels of the values from 0 (exact) to K (unknown); None: all are exact.
    """

    values: Array
    clock: Clock
    known: Array = None  # type: ignore[assignment]  # an array of no columns if not given
    level: Array | None = None

    def __post_init__(self) -> None:
        if self.known is None:
            object.__setattr__(self, "known", np.zeros((len(self.values), 0)))

    @classmethod
    def of(cls, panel: Panel) -> History:
        return cls(panel.values, clock_of(panel), panel.known)

    def until(self, t: int) -> History:
        """The first t steps; what is known in advance stays."""
        return replace(self, values=self.values[:t], clock=self.clock[:t], level=None if self.level is None else self.level[:t])

    def select(self, which: NDArray[np.int64]) -> History:
        """Some of the series."""
        return replace(self, values=self.values[:, which], level=None if self.level is None else self.level[:, which])


class SeriesWindows(Source):
    """Windows of single series: `context` steps and the horizon, one token a value. A missing value is a masked token (level K)."""

    def __init__(self, history: History, scaler: SeriesScaler, features: SeriesFeatures, context: int, first: int, last: int) -> None:
        """Windows that lie within steps first..last-1 of the history."""
        length = context + scaler.horizon
        first = max(first, scaler.warmup)
        if last - first < length:
            raise ValueError(
                f"a window of {length} steps does not fit into the {max(0, last - first)} that are left (the first {scaler.warmup} are "
                "needed as lags); give more history, or a shorter horizon or context"
            )
        self.length, self.context = length, context
        self.first, self.last, self.warmup = first, last, scaler.warmup
        values, clock = history.values, history.clock
        tokens = scaler.encode(values, clock)
        self.mask = torch.from_numpy(~np.isnan(tokens))
        self.tokens = torch.from_numpy(np.nan_to_num(tokens).astype(np.float32))
        self.lagged = features.lagged(scaler, scaler.fill_missing(scaler.standardize(values)), clock, scaler.warmup, len(values))
        self.cross_series = features.cross_series_mean(tokens)
        self.time, self.static = features.time_features(clock, history.known), torch.from_numpy(features.static_features.astype(np.float32))
        self.event = (1,)
        self.cond_width = self.time.shape[1] + self.static.shape[1] + self.lagged.shape[2] + self.cross_series.shape[1]

    def draw(self, size: int, generator: Generator | None = None) -> Tensor:
        """Random windows (size, 2): series and first step."""
        which = torch.randint(0, self.tokens.shape[1], (size,), generator=generator)
        start = torch.randint(self.first, self.last - self.length + 1, (size,), generator=generator)
        return torch.stack([which, start], dim=1)

    def all(self) -> Tensor:
        """Windows for validation: every series, at starts half a window apart."""
        starts = torch.arange(self.first, self.last - self.length + 1, max(1, self.length // 2))
        return torch.cartesian_prod(torch.arange(self.tokens.shape[1]), starts)

    def read(self, windows: Tensor) -> Batch:
        which, start = windows.unbind(1)
        steps = start[:, None] + torch.arange(self.length)
        series = which[:, None].expand_as(steps)
        cross_series = self.cross_series[steps] * (torch.arange(self.length) < self.context)[:, None]
        cond = build_cond(self.time[steps], self.static[which], self.lagged[steps - self.warmup, series], cross_series)
        return Batch(self.tokens[steps, series][..., None], cond, self.mask[steps, series])


class JointWindows(Source):
    """Windows of all series at once, as in the paper: a token holds the residuals of all of them at one step. A missing value in it is 0
    (as expected); a token of which half or more is missing is masked."""

    def __init__(self, history: History, scaler: SeriesScaler, features: SeriesFeatures, context: int, first: int, last: int) -> None:
        """Windows that lie within steps first..last-1 of the history."""
        single = SeriesWindows(history, scaler, features, context, first, last)
        self.length, self.context, self.first, self.last, self.warmup = single.length, context, single.first, single.last, single.warmup
        self.tokens, self.mask = single.tokens, single.mask.float().mean(1) > 0.5
        self.cond = build_joint_cond(single.time[scaler.warmup :], single.lagged)
        self.event, self.cond_width = (self.tokens.shape[1],), self.cond.shape[1]

    def draw(self, size: int, generator: Generator | None = None) -> Tensor:
        """Random windows (size, 1): first step."""
        return torch.randint(self.first, self.last - self.length + 1, (size, 1), generator=generator)

    def all(self) -> Tensor:
        """Windows for validation, at all starts."""
        return torch.arange(self.first, self.last - self.length + 1)[:, None]

    def read(self, windows: Tensor) -> Batch:
        steps = windows + torch.arange(self.length)
        return Batch(self.tokens[steps], self.cond[steps - self.warmup], self.mask[steps])
