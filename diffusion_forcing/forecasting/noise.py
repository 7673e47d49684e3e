"""The initial noise of forecasts: how it correlates between series and over time, and how large it is."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from .windows import Clock

MIN_WINDOWS = 8  # with fewer past windows noise is white


@dataclass(frozen=True, eq=False)
class NoiseModel:
    """Noise with the covariance of the noise of past windows.

    The network sees one series at a time. Sampling is deterministic given the noise, so that series correlate through their noise: past
    windows, encoded backwards to the noise they would have been sampled from, show how.
    """

    past_noise: Tensor  # (w, h, d), of w past windows; w = 0: white noise
    phases: Tensor  # (w,), the phase of the season at which each of them begins
    noise_scale: Tensor  # (h,), standard deviation of the noise of each step ahead; 1 for a calibrated network
    season: int
    stepwise: bool  # correlate series at each step, but not steps: where tokens are differences, chance correlations in time would add up

    @classmethod
    def white(cls, horizon: int, d: int, season: int, stepwise: bool) -> NoiseModel:
        return cls(torch.zeros(0, horizon, d), torch.zeros(0, dtype=torch.long), torch.ones(horizon), season, stepwise)

    @classmethod
    def fit(cls, noise: NDArray[np.float64], clock: Clock, held_out: NDArray[np.bool_], season: int, stepwise: bool) -> NoiseModel:
        """From the noise (w, h, d) of windows that begin at times (w,), NaN where missing.

        held_out: (w,), windows that training did not see, which decide the scale; all of them if there is none.
        """
        horizon = noise.shape[1]
        unseen = noise[held_out]
        scale = np.nan_to_num(np.sqrt(np.nanmean(unseen**2, axis=(0, 2))) if len(unseen) else np.ones(horizon), nan=1.0)
        ahead = np.arange(horizon)
        smooth = np.polynomial.Polynomial.fit(ahead, scale, 1)(ahead) if horizon > 1 else scale
        return cls(
            torch.from_numpy(np.nan_to_num(noise)).float().contiguous(),  # in the memory layout of a file: sums round alike after loading
            torch.from_numpy(clock % season), torch.from_numpy(np.clip(smooth, 0.7, 1.4)).float(), season, stepwise,
        )  # fmt: skip

    def draw(self, number: int, clock: Clock, generator: Generator | None = None) -> Tensor:
        """Noise (n, h, d) of unit scale for steps at times (h,), with the covariance of past windows that began at the same phase.

        A sum of past noises with random weights has their covariance. Some independent noise is mixed in, as much as the uncertainty of the
        correlations asks for (Schäfer and Strimmer's shrinkage).
        """
        d = self.past_noise.shape[2]
        noise = torch.randn(number, len(clock), d, generator=generator)
        past = self.past_noise[self.phases == int(clock[0]) % self.season]
        past = past if len(past) >= MIN_WINDOWS else self.past_noise
        if len(past) < MIN_WINDOWS or d == 1:
            return noise
        size = (past**2).mean((0, 1)).sqrt()
        unit = (past / size.clamp(min=1e-6)).double()  # sums in double round alike wherever they lie in memory
        block = 1 if self.stepwise else past.shape[1]
        unit = unit.flatten(0, 1)[:, None] if self.stepwise else unit
        for first in range(0, len(clock), block):  # a series with missing last values is sampled for longer than a window
            white = noise[:, first : first + block]
            weights = torch.randn(number, len(unit), generator=generator).double() / math.sqrt(len(unit))
            shared = torch.einsum("nw,whd->nhd", weights, unit[:, : white.shape[1]]).float()
            mixed = math.sqrt(1 - self.independent_share) * shared + math.sqrt(self.independent_share) * white
            noise[:, first : first + block] = torch.where(size > 1e-6, mixed, white)  # a series without past noise stays white
        return noise

    def scaled(self, noise: Tensor) -> Tensor:
        """Noise (n, h, d) at the scale of each step ahead."""
        return noise * self.noise_scale[torch.arange(noise.shape[1]).clamp(max=len(self.noise_scale) - 1)][:, None]

    def select(self, which: NDArray[np.int64]) -> NoiseModel:
        """Of some of the series."""
        return replace(self, past_noise=self.past_noise[..., torch.from_numpy(which)])

    @functools.cached_property
    def independent_share(self) -> float:
        """Share of the variance that is independent between series, 0 to 1: the shrinkage of the correlations of all past steps."""
        past = self.past_noise.flatten(0, 1)
        unit = past / past.norm(dim=0).clamp(min=1e-9)
        r = unit.T @ unit
        r.fill_diagonal_(0.0)
        strength = float((r**2).sum())
        uncertain = float(((1 - r**2) ** 2).sum() - len(r)) / max(1, len(past) - 1)
        return min(1.0, max(0.02, uncertain / strength)) if strength > 0 else 1.0

    def save(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Put the arrays among `tensors`, and return the rest as plain JSON."""
        for name in ("past_noise", "phases", "noise_scale"):
            tensors[name] = getattr(self, name).contiguous()
        return {"season": self.season, "stepwise": self.stepwise}

    @classmethod
    def load(cls, tensors: dict[str, Tensor], rest: dict[str, Any]) -> NoiseModel:
        """The inverse of `save`."""
        return cls(tensors["past_noise"], tensors["phases"], tensors["noise_scale"], rest["season"], rest["stepwise"])
