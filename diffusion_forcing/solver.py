"""One step of sampling: each token from its level to the next, DDIM or ancestral."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from .parameterization import Prediction
from .schedule import NoiseSchedule, expand

Hold = Literal["keep", "resample"]
Path = Literal["ddim", "angle"]


def ddim_step(
    schedule: NoiseSchedule, x: Tensor, pred: Prediction, k: Tensor, k_next: Tensor, *,
    eta: float = 0.0, hold: Hold = "keep", path: Path = "ddim", generator: Generator | None = None, noise: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Take each token of x (b, t, *event) from level k to k_next (both (b, t) or (t,)), given what the model predicts.

    eta: 0 deterministic (DDIM) to 1 ancestral (DDPM). hold: what happens to a token that stays at its level: it keeps its value, or
    is resampled (denoised and noised again to the same level). Levels 0 and K keep their value either way: the one is known, the
    other white noise already. noise: draws to use instead of the generator's.
    path: what is taken as constant during a deterministic step (eta=0): predicted token and noise ("ddim"), or the velocity between them,
    with the angle atan(sigma / alpha) as the time ("angle"). The first is exact for tokens that are fully determined, and narrows others:
    by 7 % in 16 steps where tokens are white. The second keeps the spread of tokens that are nearly white themselves.
    """
    if (eta > 0 or hold == "resample") and noise is None:
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
    return step_between(x, pred, amplitudes(schedule, k, k_next, x), eta=eta, hold=hold, noise=noise, path=path)


class Amplitudes(NamedTuple):
    """All that a step needs to know of its levels, broadcastable to the tokens."""

    alpha: Tensor
    sigma: Tensor
    alpha_next: Tensor
    sigma_next: Tensor
    falls: Tensor
    between: Tensor


def amplitudes(schedule: NoiseSchedule, k: Tensor, k_next: Tensor, like: Tensor) -> Amplitudes:
    """Amplitudes of levels k and k_next, which tokens fall, and which are neither clean nor pure noise."""
    tables = (schedule.alpha(k), schedule.sigma(k), schedule.alpha(k_next), schedule.sigma(k_next))
    return Amplitudes(*(expand(part, like) for part in (*tables, k_next < k, (k > 0) & (k < schedule.levels))))


def step_between(
    x: Tensor, pred: Prediction, levels: Amplitudes, *, eta: float, hold: Hold, noise: Tensor | None, path: Path = "ddim"
) -> Tensor:
    """`ddim_step` where levels have been looked up already."""
    alpha, sigma, alpha_next, sigma_next, falls, between = levels
    if eta > 0:
        assert noise is not None
        # Variance of the true backward step, of which eta takes its share. At level 0 there is none, and 0/0.
        backward = (sigma_next / sigma) ** 2 * (1 - (alpha / alpha_next) ** 2)
        fresh = eta * torch.where(sigma > 0, backward, torch.zeros_like(sigma)).clamp(min=0).sqrt()
        stepped = alpha_next * pred.x0 + (sigma_next**2 - fresh**2).clamp(min=0).sqrt() * pred.eps + fresh * noise
    elif path == "angle":
        stepped = turn(x, pred, alpha, sigma, alpha_next, sigma_next)
    else:
        stepped = alpha_next * pred.x0 + sigma_next * pred.eps
    if pred.grad is not None:
        stepped = stepped + sigma * (sigma - sigma_next) * pred.grad
    held = x
    if hold == "resample":
        assert noise is not None
        held = torch.where(between, alpha * pred.x0 + sigma * noise, x)
    return torch.where(falls, stepped, held)


def turn(x: Tensor, pred: Prediction, alpha: Tensor, sigma: Tensor, alpha_next: Tensor, sigma_next: Tensor) -> Tensor:
    """The path by angle between two levels, down or up: the velocity of x is taken as constant."""
    turned = torch.atan2(sigma_next, alpha_next) - torch.atan2(sigma, alpha)
    return x + turned * (alpha * pred.eps - sigma * pred.x0)


class Seen(NamedTuple):
    """x: sampled tokens; seen, level: the tokens as later ones are to see them, and the level to label them with."""

    x: Tensor
    seen: Tensor
    level: Tensor
