"""Guidance: functions from denoiser to denoiser. They compose, and samplers do not know of them.

guide             a reward of the whole sequence; with draws > 1, Monte Carlo guidance (monte_carlo)
classifier_free   away from "no condition", towards the condition
history_guidance  away from "no past" (or a noisy one), towards the past: tokens of the window, or a state, as roll-outs have it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Generator, Tensor

from .backbones import State, join_states
from .model import Denoise, Denoiser, DiffusionForcing
from .monte_carlo import MonteCarlo, Reward, reward_gradient
from .parameterization import Prediction
from .schedule import NoiseSchedule, expand


def guide(
    denoise: Denoise, schedule: NoiseSchedule, reward: Reward, scale: float, *, draws: int | MonteCarlo = 1,
    form: Literal["step", "eps"] = "step", levels: tuple[int, int] | None = None, generator: Generator | None = None,
) -> Denoise:  # fmt: skip
    """Steer sampling towards high reward: the gradient of the reward of the predicted clean sequence, with respect to the noisy one.

    reward: (b, t, *event) -> (b,), differentiable (but for the covariance of `MonteCarlo`). Later tokens are predicted from earlier ones,
    so their reward steers the past.
    form: where the gradient acts. "step" shifts the stepped sample by scale sigma (sigma - sigma_next) grad, which stays on the data
    under any schedule; "eps" is the textbook's x0 += scale sigma^2/alpha grad, strong at high levels: use it with `levels`.
    levels: (lo, hi), the levels of tokens on which guidance acts; others are left alone. None: all.
    draws: futures over which the reward is averaged: a number, of resampled ones, or a `MonteCarlo`, which says what it costs. Only fresh
    futures converge to the expected reward. Scales compare at the same number of draws only.
    """
    plan = draws if isinstance(draws, MonteCarlo) else MonteCarlo(draws)
    if form not in ("step", "eps"):
        raise ValueError(f"form is 'step' or 'eps'; got {form!r}")
    low, high = (0, schedule.levels) if levels is None else levels
    if not 0 <= low <= high <= schedule.levels:
        raise ValueError(f"guidance acts on levels (lo, hi) with 0 <= lo <= hi <= {schedule.levels}; got {levels}")

    def steer(inner: MonteCarlo) -> Denoise:
        return guide(denoise, schedule, reward, scale, draws=inner, form=form, levels=levels, generator=generator)

    def guided(x: Tensor, k: Tensor) -> Prediction:
        acts = (k >= low) & (k <= high) & (k > 0)
        if scale == 0 or not acts.any():
            return denoise(x, k)
        mask = plan.guides(x, k) & expand(acts, x)
        if not mask.any():
            return denoise(x, k)
        pred, grad = reward_gradient(denoise, schedule, reward, x, k, plan, steer=steer, generator=generator)
        grad = scale * grad * mask
        inner = None if pred.grad is None else pred.grad.detach()
        if form == "step":
            return Prediction(pred.x0, pred.eps, grad if inner is None else inner + grad)
        alpha, sigma = expand(schedule.alpha(k), x), expand(schedule.sigma(k), x)
        return Prediction(pred.x0 + sigma**2 / alpha * grad, pred.eps - sigma * grad, inner)

    return guided


def blend(denoisers: Sequence[Denoise], weights: Sequence[float]) -> Denoise:
    """Predictions added with weights that sum to 1; weights above 1 and below 0 extrapolate."""
    if len(denoisers) != len(weights) or not denoisers:
        raise ValueError(f"one weight for each denoiser; got {len(denoisers)} denoisers and {len(weights)} weights")
    if abs(sum(weights) - 1) > 1e-6:
        raise ValueError(f"the weights of blended predictions sum to 1; got {list(weights)}, which sum to {sum(weights)}")

    def blended(x: Tensor, k: Tensor) -> Prediction:
        preds = [denoise(x, k) for denoise in denoisers]
        x0 = sum(w * p.x0 for w, p in zip(weights, preds, strict=True))
        eps = sum(w * p.eps for w, p in zip(weights, preds, strict=True))
        assert isinstance(x0, Tensor)
        assert isinstance(eps, Tensor)
        grads = [w * p.grad for w, p in zip(weights, preds, strict=True) if p.grad is not None]
        return Prediction(x0, eps, torch.stack(grads).sum(0) if grads else None)

    return blended


def classifier_free(
    model: DiffusionForcing, cond: Tensor | None, scale: float, *, state: State = None, null_state: State = None
) -> Denoise:
    """Towards the condition, away from none: scale 0 ignores it, 1 is the plain model, more exaggerates.

    model: one with optional conditions, trained without them too. cond: (b, t, c). null_state: the past read without its condition, where
    the past had one; the same state otherwise.
    """
    if not model.optional_cond:
        raise ValueError("classifier-free guidance needs a model that was also trained without its condition: `dforce train ... "
                         "--objective.cond-drop 0.1`, or in Python DiffusionForcing(..., optional_cond=True)")  # fmt: skip
    if cond is None:
        raise ValueError("classifier-free guidance goes from no condition to a condition; got cond=None, so leave it out")
    with_it, without = model.denoiser(cond, state), model.denoiser(None, state if null_state is None else null_state)
    return with_it if scale == 1 else blend([with_it, without], [scale, 1 - scale])


def history_guidance(
    denoise: Denoise, scale: float, *, schedule: NoiseSchedule | None = None, tokens: int | slice | Sequence[int] | None = None,
    level: int | None = None, generator: Generator | None = None,
) -> Denoise:  # fmt: skip
    """Towards the history, away from the model without it: scale 0 ignores the history, 1 is the plain model, more exaggerates.

    Without `tokens` the history is the past in the denoiser's state, as roll-outs have it: `wrap=partial(history_guidance, scale=2.0)`. It
    asks the model itself, so it is the innermost wrapper; two passes a step instead of one, where there is a past.
    tokens: which tokens of the window are history instead. They are then noised to `level` for the second prediction: K (None) is no
    history at all, less leaves its outline. A model trained with independent levels has seen histories at every level, so this needs no
    training of its own. Needs the schedule.
    """
    if tokens is None:
        return _state_guidance(denoise, scale)
    if schedule is None:
        raise ValueError(
            "history within the window is noised to a level, for which the schedule is needed: history_guidance(..., schedule=)"
        )
    vague = schedule.levels if level is None else level
    if not 0 <= vague <= schedule.levels:
        raise ValueError(f"history is noised to a level in 0..{schedule.levels}; got {level}")
    which = [tokens] if isinstance(tokens, int) else tokens

    def without(x: Tensor, k: Tensor) -> Prediction:
        noise = torch.randn(x[:, which].shape, generator=generator, dtype=x.dtype, device=x.device)
        k_vague, x_vague = k.clone(), x.clone()
        k_vague[:, which] = torch.maximum(k[:, which], torch.full_like(k[:, which], vague))
        x_vague[:, which] = _noise_further(schedule, x[:, which], k[:, which], k_vague[:, which], noise)
        return denoise(x_vague, k_vague)

    return blend([denoise, without], [scale, 1 - scale])


def _state_guidance(denoise: Denoise, scale: float) -> Denoise:
    """History guidance where the history is in the denoiser's state."""
    if not isinstance(denoise, Denoiser):
        raise ValueError(
            "history_guidance asks the model itself, with and without its past: let it be the innermost wrapper, "
            "guide(history_guidance(denoiser, ...), ...), or name the tokens of the window that are history"
        )
    if scale == 1 or denoise.state is None:
        return denoise
    model, cond, state = denoise.model, denoise.cond, denoise.state
    if not model.prefills:
        return blend([denoise, model.denoiser(cond)], [scale, 1 - scale])
    both: dict[int, Denoiser] = {}  # by number of sequences: those with their past, then the same without, in one pass

    def guided(x: Tensor, k: Tensor) -> Prediction:
        if len(x) not in both:
            own, past = Denoiser(model, cond, state).bound(len(x))
            none = model.backbone.initial_state(x)  # type: ignore[attr-defined]
            both[len(x)] = model.denoiser(None if own is None else torch.cat([own, own]), join_states(past, none))
        x0, eps, _ = both[len(x)](torch.cat([x, x]), torch.cat([k, k]))
        (x0_with, x0_without), (eps_with, eps_without) = x0.chunk(2), eps.chunk(2)
        return Prediction(torch.lerp(x0_without, x0_with, scale), torch.lerp(eps_without, eps_with, scale))

    return guided


def _noise_further(schedule: NoiseSchedule, x: Tensor, k: Tensor, k_more: Tensor, noise: Tensor) -> Tensor:
    """Tokens at level k noised on to a level k_more >= k."""
    ratio = schedule.alpha(k_more) / schedule.alpha(k)
    added = (schedule.sigma(k_more) ** 2 - (ratio * schedule.sigma(k)) ** 2).clamp(min=0).sqrt()
    return expand(ratio, x) * x + expand(added, x) * noise
