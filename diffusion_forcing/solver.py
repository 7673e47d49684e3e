"""One step of sampling: each token from its level to the next, by DDIM, ancestral sampling, or steps in the angle (Euler, Adams)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from .parameterization import Prediction
from .sampler import Hold, Sampler
from .schedule import NoiseSchedule, expand


def ddim_step(
    schedule: NoiseSchedule, x: Tensor, pred: Prediction, k: Tensor, k_next: Tensor, *,
    eta: float = 0.0, hold: Hold = "keep", generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """Take each token of x (b, t, *event) from level k to k_next (both (b, t) or (t,)), given the model's prediction.

    eta: 0 deterministic (DDIM) to 1 ancestral (DDPM). hold: what happens to a token that stays at its level: it keeps its value, or
    is resampled (denoised and noised again to the same level). Levels 0 and K keep their value either way: the one is known, the
    other white noise already.
    """
    noise = None
    if eta > 0 or hold == "resample":
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
    return solver_step(x, pred, amplitudes(schedule, k, k_next, x), Sampler(eta=eta, hold=hold), noise)


def angle_step(x: Tensor, pred: Prediction, alpha: Tensor, sigma: Tensor, alpha_next: Tensor, sigma_next: Tensor) -> Tensor:
    """An Euler step in the angle atan(sigma / alpha) between two levels, down or up: the velocity of x is taken as constant.

    DDIM takes the predicted token and noise as constant instead, which is exact for tokens that are fully determined and narrows others:
    by 7 % in 16 steps where tokens are white. This keeps the spread of tokens that are nearly white.
    """
    turned = torch.atan2(sigma_next, alpha_next) - torch.atan2(sigma, alpha)
    return x + turned * (alpha * pred.eps - sigma * pred.x0)


class LastStep:
    """Of the last step of each token: the velocity that it began with, and how far it turned; 0 before the first. Both (b, t, *event)."""

    def __init__(self, velocity: Tensor, turned: Tensor) -> None:
        self.velocity, self.turned = velocity, turned

    @staticmethod
    def none(x: Tensor, sampler: Sampler) -> LastStep | None:
        """Of tokens x that have not stepped yet; None where the solver does not look back."""
        return LastStep(torch.zeros_like(x), torch.zeros_like(x)) if sampler.solver == "adams_angle" else None

    def of(self, tokens: slice | Tensor) -> LastStep:
        """Those of some tokens."""
        return LastStep(self.velocity[:, tokens], self.turned[:, tokens])

    def put(self, tokens: slice | Tensor, pred: Prediction, levels: Amplitudes) -> None:
        """Note the step of some tokens, as far as they fall."""
        alpha, sigma, alpha_next, sigma_next, falls = levels[:5]
        turned = torch.atan2(sigma_next, alpha_next) - torch.atan2(sigma, alpha)
        self.velocity[:, tokens] = torch.where(falls, alpha * pred.eps - sigma * pred.x0, self.velocity[:, tokens])
        self.turned[:, tokens] = torch.where(falls, turned, self.turned[:, tokens])

    def joined(self, x: Tensor) -> LastStep:
        """These and those of new tokens x after them."""
        return LastStep(*(torch.cat([part, torch.zeros_like(x)], dim=1) for part in (self.velocity, self.turned)))


def adams_step(x: Tensor, pred: Prediction, levels: Amplitudes, last: LastStep) -> Tensor:
    """As `angle_step`, by the velocity in the middle of the step, continued from the last one (Adams-Bashforth): of second order.

    So few steps suffice for wide and narrow tokens alike, where DDIM narrows and Euler steps move the mean.
    """
    alpha, sigma, alpha_next, sigma_next = levels[:4]
    turned = torch.atan2(sigma_next, alpha_next) - torch.atan2(sigma, alpha)
    share = torch.where(last.turned != 0, turned / (2 * last.turned), 0.0).clamp(max=1)  # nothing is continued much further than it is old
    velocity = alpha * pred.eps - sigma * pred.x0
    return x + turned * (velocity + share * (velocity - last.velocity))


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


def solver_step(
    x: Tensor, pred: Prediction, levels: Amplitudes, sampler: Sampler, noise: Tensor | None = None, observed: Tensor | None = None,
    variance: Tensor | float = 1.0, last: LastStep | None = None,
) -> Tensor:  # fmt: skip
    """One step of a sampler's solver between the levels of `amplitudes`. noise: like x, where any is drawn.

    observed: broadcastable to x, True for tokens that began at a level in between, as observations with error: they step as
    `posterior_step` does, and held at their level they keep what was observed. variance: of clean tokens, for that. last: the step before,
    for a solver that looks back; the first one is Euler's.
    """
    alpha, sigma, alpha_next, sigma_next, falls, between = levels
    if sampler.eta > 0:
        stepped = _ancestral(pred, levels, sampler.eta, noise)
    elif last is not None:
        stepped = adams_step(x, pred, levels, last)
    elif sampler.solver != "ddim":
        stepped = angle_step(x, pred, alpha, sigma, alpha_next, sigma_next)
    else:
        stepped = alpha_next * pred.x0 + sigma_next * pred.eps
    if observed is not None:
        stepped = torch.where(observed, posterior_step(x, pred, levels, noise, variance), stepped)
    if pred.grad is not None:
        stepped = stepped + sigma * (sigma - sigma_next) * pred.grad
    held = x
    if sampler.hold == "resample":
        assert noise is not None
        again = between if observed is None else between & ~observed
        held = torch.where(again, alpha * pred.x0 + sigma * noise, x)
    return torch.where(falls, stepped, held)


def posterior_step(x: Tensor, pred: Prediction, levels: Amplitudes, noise: Tensor | None, variance: Tensor | float = 1.0) -> Tensor:
    """A stochastic step whose result has the spread of the posterior, also in few steps; for tokens with information of their own.

    The clean token given x has variance V beside its mean pred.x0, which an ancestral step leaves out: by the end of few steps most of the
    spread is lost. V is taken as that of a Gaussian token of the given variance, observed with the noise of its level alone.
    """
    assert noise is not None
    alpha, sigma, alpha_next, sigma_next = levels[:4]
    here, there = (sigma / alpha) ** 2, (sigma_next / alpha_next) ** 2  # noise over signal, as variances
    ratio = torch.where(here > 0, there / here, torch.zeros_like(here))
    open_ = here * variance / (here + variance)
    spread = (there * (1 - ratio) + (1 - ratio) ** 2 * open_).clamp(min=0).sqrt()
    return alpha_next * (pred.x0 + ratio * (x / alpha - pred.x0) + spread * noise)


def _ancestral(pred: Prediction, levels: Amplitudes, eta: float, noise: Tensor | None) -> Tensor:
    """A step that draws a share eta of the true backward step's variance."""
    assert noise is not None
    alpha, sigma, alpha_next, sigma_next = levels[:4]
    # At level 0 there is no backward step, and 0/0.
    backward = (sigma_next / sigma) ** 2 * (1 - (alpha / alpha_next) ** 2)
    fresh = eta * torch.where(sigma > 0, backward, torch.zeros_like(sigma)).clamp(min=0).sqrt()
    return alpha_next * pred.x0 + (sigma_next**2 - fresh**2).clamp(min=0).sqrt() * pred.eps + fresh * noise
