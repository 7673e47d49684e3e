"""Monte Carlo guidance: the gradient of a reward over many futures instead of one. `guidance.guide(draws=MonteCarlo(...))` applies it.

Futures are sampled from pure noise given the present ("fresh"), or around the one that is being denoised ("resample"). Fresh ones follow
the model, so that more of them converge to the expectation. Resampled ones lower the gradient's variance only: they scatter around a
future that guidance has already changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Generator, Tensor

from .model import Denoise
from .parameterization import Prediction
from .sampler import Sampler
from .schedule import NoiseSchedule, expand
from .solver import amplitudes, solver_step

Futures = Literal["resample", "fresh"]
Estimator = Literal["pathwise", "covariance"]
Reward = Callable[[Tensor], Tensor]  # clean tokens (b, t, *event) -> score (b,)
Steer = Callable[["MonteCarlo"], Denoise]  # the denoiser, guided with other draws

TINY = 1e-6


@dataclass(frozen=True, eq=False)
class MonteCarlo:
    """Monte Carlo guidance: over which futures the reward is averaged, and how its gradient is estimated.

    A guided call takes one network call more for "resample" (none for one draw), and `steps` + `slope` * (later tokens) more for "fresh",
    each on `draws` times the batch; one backward pass through them, none for the covariance. Guided later choices add a backward pass to
    each, or (`inner_draws` > 1) max(2, steps // 2) calls on `inner_draws` times its batch.
    """

    draws: int = 4
    futures: Futures = "resample"
    """resample: the future is denoised in one step and noised again to its levels, each draw with its own noise. fresh: whatever later
    tokens hold, they begin as white noise and are denoised in a few steps given the present, which alone is guided."""
    present: int = 1
    """The first so many tokens (of the chosen ones) that are not yet clean are the present, what follows is the future."""
    steps: int = 5
    """Of fresh futures: denoising steps of each token."""
    slope: int = 1
    """Of fresh futures: steps by which each token lags behind the one before. 0, all at once, is exact for a model that sees the whole
    sequence; a causal one decides each token given those before, so `steps`, one after the other, is exact and 1 or 2 close."""
    causal: bool = False
    """Of fresh futures: the denoiser is causal, so that tokens which a roll-out has not reached need not be asked for. The same numbers
    sooner, unless later choices are guided."""
    estimator: Estimator = "pathwise"
    """Of fresh futures. pathwise: the gradient of the reward through the sampled futures. covariance: no gradient; the present is sampled
    too, and its covariance with the reward is the gradient of the expected reward. For any reward, such as a simulator's or a count."""
    spread: float | None = None
    """Of the covariance: rewards that vary more than that from draw to draw (their standard deviation) are scaled down to it. Guidance of
    scale s then moves the present by at most s * spread standard deviations of what is left open, however much is at stake; without it
    tokens leave the data where stakes are high. None: never."""
    risk: float = 0.0
    """0: the expected reward E[r]. Otherwise log E[exp(risk r)] / risk: below 0 averse to risk, above 0 seeking it. With fresh futures
    risk = scale samples the joint posterior p(x) exp(scale r)."""
    chosen: Tensor | None = None
    """True for tokens (t,), or numbers of tokens (*event) or (t, *event), that the agent chooses; others are chance. Only what is chosen is
    guided, later choices within fresh futures included. None: all."""
    inner_draws: int = 1
    """How later choices within fresh futures are guided. 1: by the reward's gradient at the predicted mean; more: by the covariance over
    so many futures, for rewards without gradient; 0: not at all, they are made as in the data."""

    def __post_init__(self) -> None:
        if self.draws < 1 or self.present < 1 or self.steps < 1:
            raise ValueError(f"draws, present and steps count from 1; got draws={self.draws}, present={self.present}, steps={self.steps}")
        if self.futures not in get_args(Futures):
            raise ValueError(f"futures is 'resample' or 'fresh'; got {self.futures!r}")
        if self.estimator not in get_args(Estimator):
            raise ValueError(f"estimator is 'pathwise' or 'covariance'; got {self.estimator!r}")
        if self.estimator == "covariance" and (self.futures != "fresh" or self.draws < 2):
            raise ValueError(f"the covariance is one of fresh futures, of two draws at least; got futures={self.futures!r}, "
                             f"draws={self.draws}: MonteCarlo(16, 'fresh', estimator='covariance')")  # fmt: skip
        if self.slope < 0 or self.inner_draws < 0:
            raise ValueError(f"slope and inner_draws count from 0; got slope={self.slope}, inner_draws={self.inner_draws}")
        if self.spread is not None and not self.spread > 0:
            raise ValueError(f"spread is a standard deviation of rewards, above 0, or None; got {self.spread}")
        if not math.isfinite(self.risk):
            raise ValueError(f"risk is a finite number, 0 for the expectation; got {self.risk}")
        if self.chosen is not None and self.chosen.dtype != torch.bool:
            raise ValueError(f"chosen is a mask of True and False; got {self.chosen.dtype}; convert with .bool()")

    def within(self, chosen: Tensor) -> MonteCarlo:
        """How later choices within a future are guided. chosen: like the future's tokens."""
        if self.inner_draws == 1:
            return MonteCarlo(1, chosen=chosen)
        few = max(2, self.steps // 2)
        return replace(self, draws=self.inner_draws, steps=few, slope=0, estimator="covariance", chosen=chosen, inner_draws=0)

    def choices(self, x: Tensor) -> Tensor:
        """True for what guidance may move, for all numbers of tokens x (b, t, *event)."""
        if self.chosen is None:
            return torch.ones_like(x, dtype=torch.bool)
        mask = self.chosen.to(x.device)
        mask = expand(mask, x) if mask.shape == x.shape[1:2] else mask
        try:
            return mask.expand(x.shape)
        except RuntimeError:
            raise ValueError(f"chosen says which tokens, {tuple(x.shape[1:2])}, or numbers of tokens, {tuple(x.shape[2:])} or "
                             f"{tuple(x.shape[1:])}, are chosen; got a mask of shape {tuple(self.chosen.shape)}") from None  # fmt: skip

    def split(self, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """(b, t) each: the present, and the future: all tokens after it that are not yet clean."""
        counted = (k > 0) & self.choices(x).flatten(2).any(-1)
        rank = counted.long().cumsum(1)
        now = counted & (rank <= self.present)
        return now, (k > 0) & ~now & (rank >= now.sum(1, keepdim=True))

    def guides(self, x: Tensor, k: Tensor) -> Tensor:
        """True for what is guided, like x: what is chosen; of fresh futures' sequences, in the present."""
        return self.choices(x) if self.futures == "resample" else self.choices(x) & expand(self.split(x, k)[0], x)


def reward_gradient(
    denoise: Denoise, schedule: NoiseSchedule, reward: Reward, x: Tensor, k: Tensor, plan: MonteCarlo, *,
    steer: Steer, generator: Generator | None = None,
) -> tuple[Prediction, Tensor]:  # fmt: skip
    """The prediction for tokens x (b, t, *event) at levels k (b, t), and the gradient of the expected reward with respect to x.

    steer: guides later choices within futures. Inside another guide, x carries that one's gradient, which the prediction keeps.
    """
    fresh = plan.futures == "fresh"
    if plan.estimator == "covariance":
        with torch.no_grad():
            grad = _covariance(schedule, reward, k, _fresh_futures(denoise, schedule, x.detach(), k, plan, steer, generator), plan)
    with torch.set_grad_enabled(x.requires_grad or not fresh):
        # Our gradient must not cut off that of another guide.
        variable = x if x.requires_grad else x.detach().requires_grad_()
        pred = denoise(x if fresh else variable, k)
    if plan.estimator == "pathwise":
        with torch.enable_grad():
            if fresh:
                clean = _fresh_futures(denoise, schedule, variable, k, plan, steer, generator)
            else:
                clean = pred.x0 if plan.draws == 1 else _resampled_futures(denoise, schedule, variable, k, pred, plan, generator)
            score = _score(reward, clean, differentiable=True).unflatten(0, (len(x), plan.draws))
            value = torch.logsumexp(plan.risk * score, 1) / plan.risk if plan.risk else score.mean(1)
            (grad,) = torch.autograd.grad(value.sum(), variable, retain_graph=x.requires_grad)
    return (pred if x.requires_grad else Prediction(pred.x0.detach(), pred.eps.detach(), pred.grad)), grad


def expected_reward(
    denoise: Denoise, schedule: NoiseSchedule, reward: Reward, x: Tensor, k: Tensor, plan: MonteCarlo,
    generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """(b,), the reward averaged over fresh futures of tokens x (b, t, *event), of which those at level 0 are decided.

    It ranks plans by what may come of them, where a reward of their own future would rank them by their luck. Later choices are made as in
    the data.
    """
    plan = replace(plan, futures="fresh", estimator="covariance", draws=max(2, plan.draws), chosen=None)
    with torch.no_grad():
        score = _score(reward, _fresh_futures(denoise, schedule, x, k, plan, _unsteered, generator)).unflatten(0, (len(x), plan.draws))
    return torch.logsumexp(plan.risk * score, 1) / plan.risk - math.log(plan.draws) / plan.risk if plan.risk else score.mean(1)


def _unsteered(plan: MonteCarlo) -> Denoise:
    raise ValueError("later choices are made as in the data where nothing is guided")


def _covariance(schedule: NoiseSchedule, reward: Reward, k: Tensor, clean: Tensor, plan: MonteCarlo) -> Tensor:
    """grad_x E[r | x] = alpha / sigma^2 Cov(r, clean tokens | x): Tweedie's formula, for samples of all tokens given x."""
    score = _score(reward, clean).to(clean).unflatten(0, (len(k), plan.draws))
    if not torch.isfinite(score).all():
        raise ValueError("the reward of a sampled future is NaN or infinite, and so would be the covariance; give bad futures a finite "
                         "penalty, as by torch.nan_to_num(score, nan=-100.0, neginf=-100.0)")  # fmt: skip
    if plan.spread is not None:
        score = score * (plan.spread / score.std(1, keepdim=True).clamp(min=TINY)).clamp(max=1)
    if plan.risk:
        weight = (torch.softmax(plan.risk * score, 1) - 1 / plan.draws) / plan.risk
    else:
        weight = (score - score.mean(1, keepdim=True)) / plan.draws
    weight = weight * plan.draws / (plan.draws - 1)  # unbiased
    clean = clean.unflatten(0, (len(k), plan.draws))
    covariance = (weight.reshape(*weight.shape, *[1] * (clean.ndim - 2)) * clean).sum(1)
    sigma = schedule.sigma(k)
    return covariance * expand(torch.where(sigma > 0, schedule.alpha(k) / sigma**2, 0.0), covariance)


def _fresh_futures(
    denoise: Denoise, schedule: NoiseSchedule, x: Tensor, k: Tensor, plan: MonteCarlo, steer: Steer, generator: Generator | None
) -> Tensor:
    """Clean sequences (b*draws, t, *event) whose future is sampled from white noise given the present; later choices in it are guided.

    Pathwise, the present keeps its level, and its predicted mean is returned; for the covariance it is sampled too, ahead of the future.
    """
    _, future = plan.split(x, k)
    mine = plan.choices(x) & expand(future, x)
    steered = plan.chosen is not None and plan.inner_draws > 0
    x, k, future, mine = (part.repeat_interleave(plan.draws, dim=0) for part in (x, k, future, mine))
    x = torch.where(expand(future, x), torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device), x)
    if steered:
        denoise = steer(plan.within(mine))
    sampled = plan.estimator == "covariance"
    moves = k > 0 if sampled else future
    order = future.long().cumsum(1)
    delay = plan.slope * (order if sampled else (order - 1).clamp(min=0))
    first = torch.where(future, schedule.levels, k)
    present = expand(moves & ~future, x) if sampled else None
    rows = plan.steps + int(delay.masked_fill(~moves, 0).max()) if moves.any() else 1
    k, noise, variance = first, None, torch.ones(())
    for row in range(1, rows + 1):
        left = (plan.steps + delay - row).clamp(0, plan.steps)
        # Even levels for the future; squares for the present: its last step is small, since what that leaves open the covariance misses.
        k_next = torch.where(future, first * left // plan.steps, first * left**2 // plan.steps**2)
        k_next = torch.where(moves, k_next, first)
        asked = _reached(k, k_next) if plan.causal and not steered else x.shape[1]
        part, rest = x[:, :asked], x[:, asked:]
        pred, levels = denoise(part, k[:, :asked]), amplitudes(schedule, k[:, :asked], k_next[:, :asked], part)
        if sampled:
            noise = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)[:, :asked]
            variance = _variance(part / levels.alpha, pred.x0, (levels.sigma / levels.alpha) ** 2, plan.draws)
            variance = variance.masked_fill(levels.sigma_next == 0, TINY)
        part = solver_step(part, pred, levels, Sampler(), noise, None if present is None else present[:, :asked], variance)
        x, k = torch.cat([part, rest], dim=1), k_next
    return torch.where(expand(moves, x), x, _filled(pred.x0, x))


def _reached(k: Tensor, k_next: Tensor) -> int:
    """Tokens up to the last one that moves between levels k and k_next (b, t); all where none does."""
    moving = (k_next != k).any(0).nonzero()
    return int(moving[-1]) + 1 if len(moving) else k.shape[1]


def _filled(x0: Tensor, x: Tensor) -> Tensor:
    """Predictions x0 (b, n, *event) of the first tokens of x (b, t, *event), followed by the others as they are."""
    return x0 if x0.shape == x.shape else torch.cat([x0, x[:, x0.shape[1] :]], dim=1)


def _variance(y: Tensor, x0: Tensor, noise: Tensor, draws: int) -> Tensor:
    """Variance, like x0 (b*draws, t, *event), of clean tokens that explains how x0 follows tokens y = x + noise from draw to draw.

    A Gaussian token of variance v is predicted as v / (v + noise) of y. In the first step, in which all draws are the same, v is 1.
    """
    y, x0, noise = (part.expand_as(x0).unflatten(0, (-1, draws)) for part in (y, x0, noise))
    y = y - y.mean(1, keepdim=True)
    spread = (y**2).mean(1, keepdim=True)
    known = spread > TINY * noise
    share = (x0 * y).mean(1, keepdim=True) / spread.clamp(min=TINY)
    share = share.clamp(TINY, 1 - TINY)
    return torch.where(known, noise * share / (1 - share), 1.0).flatten(0, 1)


def _resampled_futures(
    denoise: Denoise, schedule: NoiseSchedule, x: Tensor, k: Tensor, pred: Prediction, plan: MonteCarlo, generator: Generator | None
) -> Tensor:
    """Clean sequences (b*draws, t, *event): the present as it stands, the future noised again and predicted. Differentiable in x."""
    future = plan.split(x, k)[1]
    x, k, future, x0 = (part.repeat_interleave(plan.draws, dim=0) for part in (x, k, future, pred.x0))
    noise = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
    # At K what is left of x0 is next to nothing, but its derivative is not: an absent token is fresh noise, and no more.
    again = torch.where(expand(k == schedule.levels, x), noise, schedule.add_noise(x0, k, noise))
    return denoise(torch.where(expand(future, x), again, x), k).x0


def _score(reward: Reward, clean: Tensor, *, differentiable: bool = False) -> Tensor:
    score = reward(clean)
    if not isinstance(score, Tensor) or score.shape != clean.shape[:1]:
        shape = tuple(score.shape) if isinstance(score, Tensor) else type(score).__name__
        raise ValueError(f"a reward maps tokens {tuple(clean.shape)} to one score a sequence, shape ({len(clean)},); got {shape}")
    if differentiable and not score.requires_grad:
        raise ValueError("the reward has no gradient with respect to the tokens; compute it with differentiable torch operations, or guide "
                         "by draws=MonteCarlo(16, 'fresh', estimator='covariance'), with inner_draws=4 if numbers are chosen")  # fmt: skip
    return score
