"""What is known of a sequence, and samples of the rest: smoothing, in-filling, interpolation and filtering.

An observation is a value with an error: 0 is exact, infinite (or a value of NaN) is missing. A token that is known as a whole enters as a
noisy token at the level of its error, which is exact for any distribution. Numbers known inside a token, with others that are not, enter
by the moments of the model's own prediction (`with_numbers`).

Everything is in units of encoded tokens, and for models of any backbone. A bidirectional one draws all tokens together. A causal one
cannot know what comes later: it draws token after token, many times (`particles`), and what is then observed decides which draws stay.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor

from .backbones import State, select_state
from .checks import check_counts
from .likelihood import forced_by

log_likelihood: Any = None
from .matrix import start_at
from .model import Denoise, DiffusionForcing
from .parameterization import Prediction, with_x0
from .sampler import Sampler
from .sampling import follow, start
from .schedule import NoiseSchedule, expand

SAMPLER = Sampler(steps=100, solver="euler_angle")
"""How unknown tokens are drawn if nothing else is said: accurate rather than fast."""
MIN_ALPHA = 0.05  # above, a token says next to nothing of what it was, and what derivatives a network has there is noise
ITERATIONS, TOLERANCE = 30, 1e-4  # of conjugate gradients


@dataclass(frozen=True)
class Observation:
    """What is known of b sequences of t tokens. values, std: (b, t, *event), the error of each number; 0 exact, infinite missing."""

    values: Tensor
    std: Tensor

    def levels(self, schedule: NoiseSchedule) -> Tensor:
        """(b, t), the level at which each token begins: that of its error; K where it is missing, or its numbers have different errors."""
        std = self.std.flatten(2)
        whole = (std == std[..., :1]).all(-1) & torch.isfinite(std[..., 0])
        measured = whole & (std[..., 0] > 0)
        level = torch.where(whole, 0, schedule.levels)
        return torch.where(measured, schedule.level_of(torch.where(measured, std[..., 0], 1.0)), level)

    @property
    def partly(self) -> Tensor:
        """(b, t), True where some numbers of a token are known, or known better than others."""
        std = self.std.flatten(2)
        return (std != std[..., :1]).any(-1)


def observe(values: Tensor, std: float | Tensor = 0.0) -> Observation:
    """Values (b, t, *event) with the error of each as a standard deviation; NaN where they are missing.

    std: one for all, or (t,), (b, t) or (b, t, *event); 0 exact, infinite missing. In units of encoded tokens.
    """
    if values.ndim < 3:
        raise ValueError(f"values have shape (batch, tokens, *event); got {tuple(values.shape)}; add the missing axes")
    if not values.is_floating_point():
        raise ValueError(f"values are floating-point numbers, NaN where they are missing; got {values.dtype}; convert with .float()")
    if torch.isinf(values).any():
        raise ValueError("values hold infinite numbers; a missing value is NaN")
    error = torch.as_tensor(std, dtype=values.dtype, device=values.device)
    if error.ndim not in (0, 1, 2, values.ndim):
        raise ValueError(f"std is one number, (t,), (b, t) or the shape of values, {tuple(values.shape)}; got {tuple(error.shape)}")
    try:
        error = (expand(error, values) if error.ndim in (1, 2) else error).expand_as(values)
    except RuntimeError as problem:
        raise ValueError(f"std is one number, (t,), (b, t) or the shape of values, {tuple(values.shape)}; got {tuple(error.shape)}") from problem
    if not (error >= 0).all():
        raise ValueError("std is the standard deviation of an error: 0 for exact values, positive for measured ones, infinite for missing "
                         "ones; got a negative number or NaN")  # fmt: skip
    missing = torch.isnan(values) | torch.isinf(error)
    return Observation(values.masked_fill(missing, 0.0), error.masked_fill(missing, torch.inf))


@torch.no_grad()
def smooth(
    model: DiffusionForcing, values: Tensor, std: float | Tensor = 0.0, *, samples: int = 100, sampler: Sampler = SAMPLER,
    particles: int | None = None, cond: Tensor | None = None, generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """Sequences as they may have been, given all observations: (samples, b, t, *event) draws from the joint posterior.

    values, std: see `observe`. sampler: how unknown tokens are denoised; its matrix is used by bidirectional models only. particles: of a
    causal model, if something is observed after an unknown token: how many continuations are tried at once, 512 or as many as samples. Their
    weights are exact likelihoods, so the samples are exact as particles grow; a warning says when too few of them agree with what is known.
    """
    check_counts(samples=samples)
    known = observe(values, std)
    if not model.causal:
        return _together(model, known, samples, sampler, cond, generator)
    if known.partly.any():
        raise ValueError("a causal model cannot take single numbers of a token as known, only whole tokens: known numbers inform others "
                         "through the token's later reading; use a bidirectional backbone, such as Transformer(..., causal=False)")  # fmt: skip
    count = max(samples, particles or 512)
    check_counts(particles=count)
    return _one_by_one(model, known, samples, count, sampler, cond, generator)


def infill(
    model: DiffusionForcing, values: Tensor, *, samples: int = 100, sampler: Sampler = SAMPLER, particles: int | None = None,
    cond: Tensor | None = None, generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """Fill gaps: (samples, b, t, *event) draws of whole sequences, in which known values are as given. NaN marks what is missing.

    The other arguments are those of `smooth`, which takes values with errors.
    """
    return smooth(model, values, 0.0, samples=samples, sampler=sampler, particles=particles, cond=cond, generator=generator)


def interpolate(
    model: DiffusionForcing, first: Tensor, last: Tensor, length: int, *, samples: int = 100, sampler: Sampler = SAMPLER,
    particles: int | None = None, generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """`length` tokens between known ones: (samples, b, length, *event). first, last: (b, tokens, *event), what comes before and after."""
    check_counts(length=length)
    if first.ndim < 3 or first.shape[::2] != last.shape[::2] or first.shape[2:] != last.shape[2:] or not last.shape[1]:
        raise ValueError(f"first and last are tokens (batch, tokens, *event) of the same batch and event; got {tuple(first.shape)} and "
                         f"{tuple(last.shape)}")  # fmt: skip
    gap = first.new_full((len(first), length, *first.shape[2:]), torch.nan)
    filled = infill(
        model, torch.cat([first, gap, last], dim=1), samples=samples, sampler=sampler, particles=particles, generator=generator
    )
    return filled[:, :, first.shape[1] : first.shape[1] + length]


@torch.no_grad()
def filter(
    model: DiffusionForcing, values: Tensor, std: float | Tensor = 0.0, *, samples: int = 100, sampler: Sampler = SAMPLER,
    cond: Tensor | None = None, generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """Each token given what was observed up to it: (samples, b, t, *event) draws, each token's on its own.

    values, std: see `observe`. The past enters at the levels of its errors, as it is, so nothing is rolled out: all tokens are drawn at once
    where the backbone can read a past at other levels (`Traits.separate_past`), else one after another. Missing ones are forecasts.
    """
    check_counts(samples=samples)
    known = observe(values, std)
    if known.partly.any():
        raise ValueError("filter takes tokens that are known as a whole, with one error each; for single known numbers use smooth, with a "
                         "bidirectional model")  # fmt: skip
    x, levels, matrix = _begin(model.schedule, known, samples, replace(sampler, matrix="full_sequence"), generator)
    forced = forced_by(model, None if cond is None else cond.repeat_interleave(samples, dim=0), generator)
    past = x
    out = follow(lambda x, k: forced(x, k, past, levels), model.schedule, x, sampler.along(matrix), generator).x
    return out.unflatten(0, (-1, samples)).transpose(0, 1)


def moment_projection(denoise: Denoise, schedule: NoiseSchedule, known: Observation) -> Denoise:
    """A denoiser that also knows single numbers of tokens, by the moments of its own prediction (Boys et al. 2023).

    E[x | x_k] and Cov[x | x_k] are taken as those of a Gaussian, and conditioned on the known numbers. The covariance is that of Tweedie's
    second formula, the derivative of the prediction times sigma^2 / alpha; products with it are backward passes, and the linear system is
    solved by conjugate gradients. Exact for Gaussians, an approximation otherwise. For bidirectional denoisers.
    """
    given = torch.isfinite(known.std)
    noise = known.std.masked_fill(~given, 0.0).double() ** 2

    def conditioned(x: Tensor, k: Tensor) -> Prediction:
        with torch.enable_grad():
            variable = x if x.requires_grad else x.detach().requires_grad_()
            pred = denoise(variable, k)
            scale = expand(schedule.sigma(k) ** 2 / schedule.alpha(k).clamp(min=MIN_ALPHA), x).double()

            def covariance(v: Tensor) -> Tensor:
                """Products with the covariance, (b, t, *event)."""
                (product,) = torch.autograd.grad(pred.x0, variable, v.to(pred.x0.dtype), retain_graph=True)
                return scale * product.double()

            open_ = (given & expand(k > 0, x)).double()
            residual = open_ * (known.values - pred.x0.detach()).double()
            diagonal = noise + expand(schedule.sigma(k) ** 2, x) + 1e-6
            shift = covariance(_conjugate_gradients(lambda v: open_ * covariance(v) + noise * v, residual, diagonal))
        x0 = pred.x0 if x.requires_grad else pred.x0.detach()
        x0 = torch.where(given & (noise == 0), known.values, x0 + shift.to(x0.dtype))
        return with_x0(x0, x, expand(schedule.alpha(k), x), expand(schedule.sigma(k), x))

    return conditioned


def _conjugate_gradients(apply: Callable[[Tensor], Tensor], right: Tensor, diagonal: Tensor) -> Tensor:
    """v with apply(v) = right, for each sequence (b, ...) a symmetric system. diagonal: about that of the system, which speeds it up."""
    axes = tuple(range(1, right.ndim))
    v, left = torch.zeros_like(right), right
    direction = towards = left / diagonal
    size = (left * towards).sum(axes, keepdim=True)
    enough = TOLERANCE**2 * size
    for _ in range(ITERATIONS):
        ahead = apply(direction)
        curvature = (direction * ahead).sum(axes, keepdim=True)
        going = (size > enough) & (curvature > 0)  # a network's covariance is not quite one: stop where it bends the wrong way
        if not going.any():
            break
        step = torch.where(going, size / curvature, 0.0)
        v, left = v + step * direction, left - step * ahead
        towards = left / diagonal
        size, before = (left * towards).sum(axes, keepdim=True), size
        direction = towards + torch.where(before > 0, size / before, 0.0) * direction
    return v


def _together(
    model: DiffusionForcing, known: Observation, samples: int, sampler: Sampler, cond: Tensor | None, generator: Generator | None
) -> Tensor:
    """Draws of all tokens together, by a bidirectional model."""
    x, levels, matrix = _begin(model.schedule, known, samples, sampler, generator)
    denoise: Denoise = model.denoiser(cond)
    if known.partly.any():
        repeated = Observation(*(part.repeat_interleave(samples, dim=0) for part in (known.values, known.std)))
        denoise = moment_projection(denoise, model.schedule, repeated)
    out = follow(denoise, model.schedule, x, sampler.along(matrix), generator).x
    return out.unflatten(0, (-1, samples)).transpose(0, 1)


def _begin(
    schedule: NoiseSchedule, known: Observation, copies: int, sampler: Sampler, generator: Generator | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (b*copies, t, *event) as sampling begins, their levels (b*copies, t), and the schedule matrix."""
    values, levels = known.values, known.levels(schedule)
    alike = bool((levels == levels[:1]).all())
    each = levels.repeat_interleave(copies, dim=0)
    matrix = start_at(sampler.matrix_for(schedule, values.shape[1]).to(levels.device), levels[0] if alike else each)
    x = start(schedule, matrix, (len(each), *values.shape[2:]), values.repeat_interleave(copies, dim=0), generator)
    return torch.where(expand(each == schedule.levels, x), sampler.temperature * x, x), each, matrix


def _one_by_one(
    model: DiffusionForcing, known: Observation, samples: int, count: int, sampler: Sampler, cond: Tensor | None, generator: Generator | None
) -> Tensor:
    """Draws token after token, by a causal model: a particle filter, each particle drawn given what is known of the token itself."""
    schedule, (b, t) = model.schedule, known.values.shape[:2]
    levels = known.levels(schedule)
    open_ = (levels > 0).cumsum(1) - (levels > 0).long() > 0  # whether particles differ before the token
    x = known.values.new_zeros(b * count, 0, *known.values.shape[2:])
    state: State = None
    weights = torch.zeros(b, count, dtype=torch.float64, device=x.device)  # logarithms
    fewest = float(count)
    for i in range(t):
        token = Observation(known.values[:, i : i + 1], known.std[:, i : i + 1])
        now = None if cond is None else cond[:, i : i + 1].repeat_interleave(count, dim=0)
        weighs = open_[:, i] & (levels[:, i] < schedule.levels)
        if weighs.any():
            fits = _density(model.denoiser(now, state), schedule, token, levels[:, i : i + 1], count).unflatten(0, (b, count))
            weights = weights + torch.where(weighs[:, None], fits, 0.0)
            effective = 1 / weights.softmax(1).square().sum(1)
            fewest = min(fewest, float(effective.min()))
            index = _resample(weights, count, generator)
            stay = effective > count / 2
            index = torch.where(stay[:, None], torch.arange(count, device=x.device), index)
            weights = torch.where(stay[:, None], weights, 0.0)
            flat = (index + count * torch.arange(b, device=x.device)[:, None]).flatten()
            x, state = x[flat], select_state(state, flat)
        new, _, matrix = _begin(schedule, token, count, sampler, generator)
        new = follow(model.denoiser(now, state), schedule, new, sampler.along(matrix), generator).x
        state = model.absorb(new, now, state)
        x = torch.cat([x, new], dim=1)
    if fewest < min(30, count / 4):
        warnings.warn(f"only about {fewest:.0f} of {count} particles agree with what is known, so the samples are nearly copies of each other; "
                      f"give more, such as particles={8 * count}, or use a bidirectional model", stacklevel=3)  # fmt: skip
    index = _resample(weights, samples, generator)
    return x.unflatten(0, (b, count))[torch.arange(b, device=x.device), index.T]


def _density(denoise: Denoise, schedule: NoiseSchedule, token: Observation, levels: Tensor, count: int) -> Tensor:
    """(b*count,) log-likelihood of an observed token given the past of each particle."""
    k = levels.repeat_interleave(count, dim=0)
    noisy = expand(schedule.alpha(k), token.values) * token.values.repeat_interleave(count, dim=0)
    return log_likelihood(lambda x, k, past_x, past_k: denoise(x, k), schedule, noisy, k)[:, 0].double()


def _resample(weights: Tensor, number: int, generator: Generator | None) -> Tensor:
    """(b, number) indices of particles, each as often as its weight says; weights: (b, n), logarithms. Systematic resampling."""
    offset = torch.rand(len(weights), 1, generator=generator, dtype=weights.dtype, device=weights.device)
    at = (torch.arange(number, dtype=weights.dtype, device=weights.device) + offset) / number
    return torch.searchsorted(weights.softmax(1).cumsum(1), at).clamp(max=weights.shape[1] - 1)
