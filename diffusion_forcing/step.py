"""One step of sampling: each token from its level to the next, DDIM or ancestral."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from .parameterization import Prediction
from .schedule import NoiseSchedule, expand

Hold = Literal["keep", "resample"]


def ddim_step(
    schedule: NoiseSchedule, x: Tensor, pred: Prediction, k: Tensor, k_next: Tensor, *,
    eta: float = 0.0, hold: Hold = "keep", generator: Generator | None = None, noise: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Take each token of x (b, t, *event) from level k to k_next (both (b, t) or (t,)), given what the model predicts.

    eta: 0 deterministic (DDIM) to 1 ancestral (DDPM). hold: what happens to a token that stays at its level: it keeps its value, or
    is resampled (denoised and noised again to the same level). Levels 0 and K keep their value either way: the one is known, the
    other white noise already. noise: draws to use instead of the generator's.
    """
    alpha_next, sigma_next = expand(schedule.alpha(k_next), x), expand(schedule.sigma(k_next), x)
    alpha, sigma = expand(schedule.alpha(k), x), expand(schedule.sigma(k), x)
    if (eta > 0 or hold == "resample") and noise is None:
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
    if eta > 0:
        assert noise is not None
        # Variance of the true backward step, of which eta takes its share. At level 0 there is none, and 0/0.
        backward = (sigma_next / sigma) ** 2 * (1 - (alpha / alpha_next) ** 2)
        fresh = eta * torch.where(sigma > 0, backward, torch.zeros_like(sigma)).clamp(min=0).sqrt()
        stepped = alpha_next * pred.x0 + (sigma_next**2 - fresh**2).clamp(min=0).sqrt() * pred.eps + fresh * noise
    else:
        stepped = alpha_next * pred.x0 + sigma_next * pred.eps
    if pred.grad is not None:
        stepped = stepped + sigma * (sigma - sigma_next) * pred.grad
    held = x
    if hold == "resample":
        assert noise is not None
        between = expand((k > 0) & (k < schedule.levels), x)
        held = torch.where(between, alpha * pred.x0 + sigma * noise, x)
    return torch.where(expand(k_next < k, x), stepped, held)


class Seen(NamedTuple):
    """x: sampled tokens; seen, level: the tokens as later ones are to see them, and the level to label them with."""

    x: Tensor
    seen: Tensor
    level: Tensor
