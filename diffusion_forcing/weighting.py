"""Loss weights. Each is one weight per token on the error of x0, restated for what the network predicts.

An error in x0 counts `snr` times as much in eps and `snr + 1` times as much in v, so dividing by these makes one
objective of all three parameterizations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .parameterization import Parameterization
from .schedule import NoiseSchedule

EPS_CAP = 100.0


class Weight(Protocol):
    """(schedule, k, parameterization) -> weight of each token's squared error, the shape of k: (b, t)."""

    def __call__(self, schedule: NoiseSchedule, k: Tensor, parameterization: Parameterization) -> Tensor: ...


@dataclass(frozen=True)
class Uniform:
    """Weight 1 on the network's own output (the plain DDPM loss)."""

    def __call__(self, schedule: NoiseSchedule, k: Tensor, parameterization: Parameterization) -> Tensor:
        weight = torch.ones_like(schedule.alpha(k))
        if parameterization == "x0":
            return weight
        # Level 0 carries no noise to predict: counting it would teach the network to output noise it cannot see.
        return weight * (k > 0)


@dataclass(frozen=True)
class MinSNR:
    """min(snr, clip) / clip on the error of x0 (Hang et al. 2023), normalised to [0, 1]."""

    clip: float = 5.0

    def signal(self, schedule: NoiseSchedule, k: Tensor) -> Tensor:
        """S_t: the share of the signal that the noisy token itself carries, in [0, 1]."""
        return schedule.snr(k).clamp(max=self.clip) / self.clip

    def __call__(self, schedule: NoiseSchedule, k: Tensor, parameterization: Parameterization) -> Tensor:
        return from_x0_weight(self.signal(schedule, k), schedule.snr(k), parameterization)


@dataclass(frozen=True)
class FusedSNR:
    """The paper's fused SNR: the signal of the noisy past counts as well.

    S_t = min(snr_t, clip) / clip; running mean Sbar_t = g Sbar_{t-1} + (1-g) S_t, starting from Sbar = 0 before the first
    token (no past, no signal); weight S'_t = 1 - (1 - S_t)(1 - Sbar_{t-1}), with no further factor. Where later tokens see a token at
    another level than its own, the running mean is over that level.
    decay is per frame: a token of `frame_stack` frames lets g = decay ** frame_stack of the signal through.
    """

    clip: float = 5.0
    decay: float = 0.9
    frame_stack: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise ValueError(f"decay must lie strictly between 0 and 1; got {self.decay}")

    def __call__(self, schedule: NoiseSchedule, k: Tensor, parameterization: Parameterization, past: Tensor | None = None) -> Tensor:
        """past: (b, t), the level at which later tokens see each; None: at k."""
        signal = MinSNR(self.clip).signal(schedule, k)
        seen = signal if past is None else MinSNR(self.clip).signal(schedule, past)
        decay = self.decay**self.frame_stack
        mean = torch.zeros_like(signal[:, 0])
        fused = []
        for own, later in zip(signal.unbind(1), seen.unbind(1), strict=True):
            fused.append(1 - (1 - own) * (1 - mean))
            mean = decay * mean + (1 - decay) * later
        return from_x0_weight(torch.stack(fused, dim=1), schedule.snr(k), parameterization)


WEIGHTS = {"uniform": Uniform, "min_snr": MinSNR, "fused_snr": FusedSNR}


def from_x0_weight(weight: Tensor, snr: Tensor, parameterization: Parameterization) -> Tensor:
    """Restate a weight on the error of x0 for the network's own output; level 0 (snr infinite) gets 0 in eps and v.

    In eps the fused weight grows as 1/snr towards level K, where the past alone carries the signal; it is capped at
    EPS_CAP there, since a weight of 1e8 on single tokens trains nothing else. v and x0 need no cap.
    """
    if parameterization == "x0":
        return weight
    if parameterization == "eps":
        return (weight / snr).clamp(max=EPS_CAP)
    return weight / (snr + 1)
