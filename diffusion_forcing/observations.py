"""What is known of a sequence, and samples of the rest: smoothing, in-filling, interpolation and filtering.

An observation is a value with an error: 0 is exact, infinite (or a value of NaN) is missing. A token that is known as a whole enters as a
noisy token at the level of its error, which is exact for any distribution. Numbers known inside a token, with others that are not, enter
by Gibbs sampling, exact as rounds grow.

Everything is in units of encoded tokens, and for models of any backbone. A bidirectional one draws all tokens together. A causal one
cannot know what comes later: it draws token after token, many times (`particles`), and what is then observed decides which draws stay.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from .backbones import State, select_state
from .checks import check_counts
from .likelihood import forced_by, log_likelihood
from .matrix import full_sequence, start_at
from .model import Denoise, DiffusionForcing
from .sampler import Sampler
from .sampling import follow, start
from .schedule import NoiseSchedule, expand

SAMPLER = Sampler(steps=100, solver="euler_angle")
"""How unknown tokens are drawn if nothing else is said: accurate rather than fast."""
ERRORS = tuple(0.03 ** (i / 399) for i in range(400))
"""Of the Gibbs sampler for single numbers of tokens: the error of each round, from a token's size to well below it."""
STEPS = 2
"""Denoising steps of each of its rounds."""


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
    shapes = f"std is one number, (t,), (b, t) or the shape of values, {tuple(values.shape)}; got {tuple(error.shape)}"
    if error.ndim not in (0, 1, 2, values.ndim):
        raise ValueError(shapes)
    try:
        error = (expand(error, values) if error.ndim in (1, 2) else error).expand_as(values)
    except RuntimeError as problem:
        raise ValueError(shapes) from problem
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

    values, std: see `observe`. sampler: how unknown tokens are denoised; its schedule matrix matters to bidirectional models only.
    particles: continuations that a causal model carries along, 512 or as many as samples if that is more. Each is weighed by the
    likelihood of what is observed next (`log_likelihood`), so samples are exact as particles grow; a warning says if too few agree.
    """
    check_counts(samples=samples)
    known = observe(values, std)
    if not model.causal:
        return _together(model, known, samples, sampler, cond, generator)
    if known.partly.any():
        raise ValueError("single known numbers of a token (some NaN, or with errors of their own) need a bidirectional model, such as one "
                         "with Transformer(..., causal=False); a causal one takes tokens that are known as a whole")  # fmt: skip
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
    filled = infill(model, torch.cat([first, gap, last], dim=1), samples=samples, sampler=sampler, particles=particles, generator=generator)
    return filled[:, :, first.shape[1] : first.shape[1] + length]


@torch.no_grad()
def filter(
    model: DiffusionForcing, values: Tensor, std: float | Tensor = 0.0, *, samples: int = 100, sampler: Sampler = SAMPLER,
    cond: Tensor | None = None, generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """Each token given what was observed up to it: (samples, b, t, *event) draws, each token's on its own.

    values, std: see `observe`. The past enters as it was observed, at the levels of its errors, so nothing is rolled out: all tokens are
    drawn at once where the backbone reads a past at other levels (`Traits.separate_past`), else one by one. Missing ones are forecast.
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


def _together(
    model: DiffusionForcing, known: Observation, samples: int, sampler: Sampler, cond: Tensor | None, generator: Generator | None
) -> Tensor:
    """Draws of all tokens together, by a bidirectional model."""
    x, _, matrix = _begin(model.schedule, known, samples, sampler, generator)
    denoise = model.denoiser(cond)
    x = follow(denoise, model.schedule, x, sampler.along(matrix), generator).x
    if known.partly.any():
        repeated = Observation(*(part.repeat_interleave(samples, dim=0) for part in (known.values, known.std)))
        x = _gibbs(denoise, model.schedule, x, repeated, generator)
    return x.unflatten(0, (-1, samples)).transpose(0, 1)


def _gibbs(denoise: Denoise, schedule: NoiseSchedule, x: Tensor, known: Observation, generator: Generator | None) -> Tensor:
    """Draws x (b, t, *event) from the posterior of numbers known inside tokens, by split Gibbs sampling along falling errors.

    In turn a noisy copy z = x + r noise is drawn given x and what is known of each number, and x given z, which is a measurement of all
    numbers with error r: what the model does exactly. Exact for any distribution as rounds grow, since r falls slowly.
    """
    values, std = known.values, known.std
    exact = expand((std == 0).flatten(2).all(-1), x)
    for error in ERRORS:
        level = schedule.level_of(error)
        r = float(schedule.sigma(level) / schedule.alpha(level))
        # Given x, a number measured with a larger error than r says where its copy lies, too; one measured better stands for its copy.
        left = (std**2 - r**2).clamp(min=1e-12)
        trust = torch.where(torch.isfinite(std), r**2 / (r**2 + left), 0.0)
        z = x + trust * (values - x) + r * (1 - trust).sqrt() * torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
        z = torch.where(std <= r, values, z)
        levels = torch.where(exact.flatten(2)[..., 0], 0, level)
        alike = bool((levels == levels[:1]).all())
        matrix = start_at(full_sequence(x.shape[1], schedule.ladder(min(STEPS, schedule.levels))), levels[0] if alike else levels)
        x = follow(denoise, schedule, torch.where(exact, values, schedule.alpha(level) * z), Sampler().along(matrix), generator).x
    return torch.where(std == 0, values, x)


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
    model: DiffusionForcing,
    known: Observation,
    samples: int,
    count: int,
    sampler: Sampler,
    cond: Tensor | None,
    generator: Generator | None,
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
        warnings.warn(f"only about {fewest:.0f} of {count} particles agree with what is known, so the samples are nearly copies of each "
                      f"other; give more, such as particles={8 * count}, or use a bidirectional model", stacklevel=3)  # fmt: skip
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
