"""The evidence lower bound of the paper's appendix A, for any fixed sequence of levels.

    ln p(x_1^{k_1}, ..., x_T^{k_T})  >=  sum over t of  E[ ELBO of x_t^{k_t} given the past at its levels k_1..k_{t-1} ]

A token at level 0 counts in full, one at level K not at all: choosing 0 or K for each token gives the likelihood of any
sub-sequence.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Generator, Tensor

from .model import Denoise, DiffusionForcing
from .parameterization import Prediction
from .schedule import NoiseSchedule, expand


class Forced(Protocol):
    """(x, k, past_x, past_k) -> Prediction of each token at (x, k), given the others before it as (past_x, past_k)."""

    def __call__(self, x: Tensor, k: Tensor, past_x: Tensor, past_k: Tensor) -> Prediction: ...


@torch.no_grad()
def elbo(
    model: DiffusionForcing | Forced, schedule: NoiseSchedule, x: Tensor, k: Tensor | None = None, cond: Tensor | None = None, *,
    ladder: Tensor | None = None, draws: int = 1, generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """Lower bound on the log-likelihood of each token, (b, t), in nats; sum over t for the sequence. Tokens at level K give 0.

    x: clean tokens (b, t, *event), noised here. k: the fixed levels (b, t) or (t,); None: all clean. ladder: the levels of the bound's
    chain (all K+1 if None: tightest; fewer are faster and looser, never wrong). draws: of the noise, averaged.
    """
    b, t = x.shape[:2]
    levels = torch.zeros(b, t, dtype=torch.long, device=x.device) if k is None else schedule.check_k(k).expand(b, t)
    rungs = torch.arange(schedule.levels + 1) if ladder is None else ladder
    if rungs[0] != 0 or rungs[-1] != schedule.levels or not (rungs.diff() > 0).all():
        raise ValueError(f"the bound's chain climbs from level 0 to K={schedule.levels}, as NoiseSchedule.ladder(steps) does")
    forced = forced_by(model, cond, generator) if isinstance(model, DiffusionForcing) else model
    total = torch.zeros(b, t, dtype=torch.float64, device=x.device)
    for _ in range(draws):
        noise = _randn(x, generator)
        past = schedule.add_noise(x, levels, noise)
        for low, high in zip(rungs[:-1].tolist(), rungs[1:].tolist(), strict=True):
            # The chain of each token starts at its own level: rungs below it do not exist, the one above it is cut short.
            bottom = levels.clamp(min=low)
            active = bottom < high
            if not active.any():
                continue
            total += _term(schedule, forced, past, levels, bottom, torch.full_like(levels, high), active, generator)
        total += _prior(schedule, past, levels)
    return (total / draws).to(x.dtype)


def forced_by(model: DiffusionForcing, cond: Tensor | None = None, generator: Generator | None = None) -> Forced:
    """How a model predicts each token given a past at other levels: in one pass if its backbone can, else token by token."""
    if model.traits.separate_past and model.causal:
        return lambda x, k, past_x, past_k: model.predict_forced(x, k, past_x, past_k, cond)
    return forced_by_denoiser(lambda x, k: model.predict(x, k, cond), model.schedule.levels, generator)


def forced_by_denoiser(denoise: Denoise, levels: int, generator: Generator | None = None) -> Forced:
    """The same for any denoiser (x, k) -> Prediction: the past as given, the token itself, and a future of pure noise."""

    def forced(x: Tensor, k: Tensor, past_x: Tensor, past_k: Tensor) -> Prediction:
        x0, eps = [], []
        for token in range(x.shape[1]):
            noise = _randn(x[:, token + 1 :], generator)
            absent = torch.full_like(k[:, token + 1 :], levels)
            tokens = torch.cat([past_x[:, :token], x[:, token : token + 1], noise], dim=1)
            pred = denoise(tokens, torch.cat([past_k[:, :token], k[:, token : token + 1], absent], dim=1))
            x0.append(pred.x0[:, token])
            eps.append(pred.eps[:, token])
        return Prediction(torch.stack(x0, dim=1), torch.stack(eps, dim=1))

    return forced


def _term(
    schedule: NoiseSchedule, forced: Forced, past: Tensor, levels: Tensor, low: Tensor, high: Tensor, active: Tensor,
    generator: Generator | None,
) -> Tensor:  # fmt: skip
    """One rung of the chain of each token's own datum y = past_t, at level k: from `high` down to `low`, (b, t).

    Above the lowest rung, -KL(q(x^low | x^high, y) || p(x^low | x^high)); at the lowest, ln p(y | x^high).
    """
    y, k = past, levels
    high = torch.where(active, high, k)
    # Given y at level k, everything above is y scaled by alpha/alpha_k plus noise of variance s2.
    a_high, s_high = _from(schedule, k, high)
    a_low, s_low = _from(schedule, k, low)
    x_high = (expand(a_high, y) * y + expand(s_high.sqrt(), y) * _randn(y, generator)).to(y.dtype)
    pred = forced(x_high, high, past, levels)
    # What the model says of y: its mean given x_high and the predicted clean token.
    to_high = a_high * schedule.sigma(k) ** 2 / (a_high**2 * schedule.sigma(k) ** 2 + s_high)
    mean = expand(schedule.alpha(k), y) * pred.x0
    predicted = mean + expand(to_high, y) * (x_high - expand(a_high, y) * mean)
    error = ((y - predicted) ** 2).flatten(2).sum(-1)
    numbers = y[0, 0].numel()
    first = low == k
    # How far y may be from what the model says, were tokens of variance 1 and without a past: what noise alone leaves open at low
    # levels, where it matters. A model step as narrow as q's own would cost some 0.4 nats a number there, however fine the ladder.
    open_ = s_high / (s_high + a_high**2)
    # Lowest rung: a Gaussian around what the model says.
    log_p = -0.5 * (numbers * torch.log(2 * math.pi * open_) + error / open_)
    # Other rungs: two Gaussians, p's wider than q's by `ratio`, whose means differ by c (y - predicted) with c^2 / width_q = gain.
    gain = a_low**2 / s_low - a_high**2 / s_high
    ratio = 1 + gain * open_
    kl = 0.5 * (numbers * (torch.log(ratio) + 1 / ratio - 1) + gain * error / ratio)
    terms = torch.where(first, log_p, -kl)
    return torch.where(active, terms, torch.zeros_like(terms))


def _prior(schedule: NoiseSchedule, y: Tensor, k: Tensor) -> Tensor:
    """-KL(q(x^K | y) || N(0, 1)) of each token, 0 where the token is at K itself."""
    a, s = _from(schedule, k, torch.full_like(k, schedule.levels))
    numbers = y[0, 0].numel()
    kl = 0.5 * ((a**2) * (y**2).flatten(2).sum(-1) + numbers * (s - 1 - torch.log(s)))
    return torch.where(k < schedule.levels, -kl, torch.zeros_like(kl))


def _from(schedule: NoiseSchedule, k: Tensor, higher: Tensor) -> tuple[Tensor, Tensor]:
    """x^higher = a x^k + sqrt(s) noise, for higher >= k: returns a and s."""
    # Neighbouring levels differ in the fifth digit: their difference needs float64.
    a = schedule.alpha(higher).double() / schedule.alpha(k).double()
    return a, (schedule.sigma(higher).double() ** 2 - (a * schedule.sigma(k).double()) ** 2).clamp(min=1e-12)


def _randn(x: Tensor, generator: Generator | None) -> Tensor:
    return torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
