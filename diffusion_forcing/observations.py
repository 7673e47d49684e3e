"""What is known of a sequence, and samples of the rest: smoothing, in-filling, interpolation and filtering.

An observation is a value with the standard deviation of its error: 0 is exact, infinite (or a value of NaN) is missing. All are in units
of encoded tokens.

A token that is known as a whole enters as a noisy token at the level of its error, which is exact for any distribution. Where only some
numbers of a token are known, annealed split Gibbs sampling takes their place, exact as rounds and particles grow.

A bidirectional model draws all tokens jointly. A causal one cannot condition on later tokens: it draws token after token, with many
particles, which are weighted by the likelihood of each observation when it comes (a particle filter), exact as particles grow.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from .backbones import State, select_state
from .checks import check_counts
from .likelihood import EXACT, forced_by, log_likelihood
from .matrix import full_sequence, start_at
from .model import Denoise, DiffusionForcing
from .orders import variance_of
from .sampler import Sampler
from .sampling import follow, start
from .schedule import NoiseSchedule, expand

SAMPLER = Sampler(steps=50, solver="adams_angle")
"""How unknown tokens are drawn if nothing else is said: accurate for wide and narrow tokens."""
WIDEST, NARROWEST, ROUNDS = 5.0, 0.03, 100
"""For single known numbers of tokens: the error with which they are taken, in standard deviations of tokens, in the first round and in the
last, and how many rounds lie between for tokens of one size."""
STEPS = 2
"""Denoising steps of each such round."""


@dataclass(frozen=True)
class Observation:
    """What is known of b sequences of t tokens. values, std: (b, t, *event), the error of each number; 0 exact, infinite missing."""

    values: Tensor
    std: Tensor

    def levels(self, schedule: NoiseSchedule) -> Tensor:
        """(b, t), the level at which each token begins: that of the largest error of its numbers; K where one of them is missing."""
        largest = self.std.flatten(2).amax(-1)
        measured = torch.isfinite(largest) & (largest > 0)
        level = torch.where(largest == 0, 0, schedule.levels)
        return torch.where(measured, schedule.level_of(torch.where(measured, largest, 1.0)), level)

    def like(self, tensor: Tensor) -> Observation:
        """The same in the precision and on the device of a tensor, such as one of a model's."""
        return Observation(self.values.to(tensor), self.std.to(tensor))

    @property
    def partly(self) -> Tensor:
        """(b, t), True where some numbers of a token are known, or known better than others."""
        std = self.std.flatten(2)
        return (std != std[..., :1]).any(-1)


def observe(values: Tensor, std: float | Tensor = 0.0) -> Observation:
    """Values (b, t, *event) with the error of each as a standard deviation; NaN where they are missing.

    std: one for all, or (t,), (b, t) or (b, t, *event); 0 exact, infinite missing. In units of encoded tokens.
    """
    values = torch.as_tensor(values)
    if values.ndim < 3 or not values.numel():
        raise ValueError(f"values have shape (batch, tokens, *event), at least 1 each; got {tuple(values.shape)}; add the missing axes")
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
                         f"ones; got {float(error[~(error >= 0)][0]):g}")  # fmt: skip
    missing = torch.isnan(values) | torch.isinf(error)
    return Observation(values.masked_fill(missing, 0.0), error.masked_fill(missing, torch.inf))


@torch.no_grad()
def smooth(
    model: DiffusionForcing, values: Tensor, std: float | Tensor = 0.0, *, samples: int = 100, sampler: Sampler = SAMPLER,
    particles: int | None = None, cond: Tensor | None = None, generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """Samples (samples, b, t, *event) from the joint posterior of whole sequences, given all observations.

    values, std: see `observe`. sampler: how tokens are denoised; its schedule matrix matters to bidirectional models only.
    particles: candidates per sequence, 512 by default and never fewer than samples. They are needed by causal models, for what is observed
    after a token that is not exactly known, and for single known numbers of tokens. Samples are exact as particles grow; a warning says if
    too few agree with the observations.
    """
    particles = 512 if particles is None else particles
    check_counts(samples=samples, particles=particles)
    known, count = observe(values, std).like(model.schedule.alpha_table), max(samples, particles)
    cond = model.read_cond(known.values, cond)
    if not model.traits.causal:
        return _jointly(model, known, samples, count, sampler=sampler, cond=cond, generator=generator)
    if known.partly.any():
        raise ValueError("single known numbers of a token (some NaN, or with errors of their own) need a bidirectional model, such as one "
                         "with Transformer(..., causal=False); a causal one takes tokens that are known as a whole")  # fmt: skip
    return _particle_filter(model, known, samples, count, sampler=sampler, cond=cond, generator=generator)


def infill(
    model: DiffusionForcing, values: Tensor, *, samples: int = 100, sampler: Sampler = SAMPLER, particles: int | None = None,
    cond: Tensor | None = None, generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """Fill gaps, marked by NaN: (samples, b, t, *event) samples of whole sequences, known values as given.

    The other arguments are those of `smooth`, which takes values with errors.
    """
    return smooth(model, values, 0.0, samples=samples, sampler=sampler, particles=particles, cond=cond, generator=generator)


def interpolate(
    model: DiffusionForcing, first: Tensor, last: Tensor, length: int, *, samples: int = 100, sampler: Sampler = SAMPLER,
    particles: int | None = None, generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """`length` tokens between known ones: (samples, b, length, *event). first, last: (b, tokens, *event), what comes before and after.

    For a model with conditions use `infill`, with NaN between the two.
    """
    check_counts(length=length)
    first, last = torch.as_tensor(first), torch.as_tensor(last)
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
    """Samples (samples, b, t, *event) of each token given the observations up to it: marginals, not joint samples of sequences.

    values, std: see `observe`. The past enters as observed, at the levels of its errors; missing tokens are forecast. All tokens are
    drawn in one pass where the backbone reads a past at other levels (`Traits.separate_past`), else one after another.
    """
    check_counts(samples=samples)
    known = observe(values, std).like(model.schedule.alpha_table)
    if known.partly.any():
        raise ValueError("filter takes tokens that are known as a whole, with one error each; for single known numbers use smooth, with a "
                         "bidirectional model")  # fmt: skip
    x, levels, matrix = _begin(model.schedule, known, samples, replace(sampler, matrix="full_sequence"), generator)
    forced = forced_by(model, model.read_cond(known.values, cond).repeat_interleave(samples, dim=0), generator)
    past = x
    out = follow(lambda x, k: forced(x, k, past, levels), model.schedule, x, sampler.along(matrix), generator).x
    return out.unflatten(0, (-1, samples)).transpose(0, 1)


def _jointly(
    model: DiffusionForcing, known: Observation, samples: int, count: int, *, sampler: Sampler, cond: Tensor,
    generator: Generator | None,
) -> Tensor:  # fmt: skip
    """Samples of all tokens jointly, by a bidirectional model."""
    schedule, copies = model.schedule, count if known.partly.any() else samples
    x, _, matrix = _begin(schedule, known, copies, sampler, generator)
    denoise = model.denoiser(cond)
    x = follow(denoise, schedule, x, sampler.along(matrix), generator).x
    if known.partly.any():
        return _anneal(denoise, schedule, x, known, samples, generator)
    return x.unflatten(0, (-1, samples)).transpose(0, 1)


def _anneal(denoise: Denoise, schedule: NoiseSchedule, x: Tensor, known: Observation, samples: int, generator: Generator | None) -> Tensor:
    """Samples given single numbers of tokens, by annealed split Gibbs sampling.

    x: (b*particles, t, *event), drawn given each token at the level of its largest error.

    The numbers are taken as measured with an error r, which falls from round to round down to the true one. Particles are weighed by how
    they fit the smaller error, then moved: a noisy copy z = x + r noise is drawn given x and what is known, and x given z, which is a
    measurement of all numbers with error r. That is what the model does exactly, so nothing is assumed of the distribution. Tokens known as
    a whole stay at the level of their own error as long as r is larger.
    """
    particles = _Particles(len(known.values), len(x) // len(known.values), generator, x.device)
    values, std, partly, own = (
        part.repeat_interleave(particles.count, dim=0) for part in (known.values, known.std, known.partly, known.levels(schedule))
    )
    single = torch.isfinite(std) & expand(partly, x)
    begin = expand(schedule.sigma(own) / schedule.alpha(own), x)
    fit = torch.where(single & expand(own < schedule.levels, x), _log_normal(values - x, torch.maximum(std, begin)), 0.0)
    for level in _rounds(schedule, variance_of(denoise), own[partly].max()):
        k = own.clamp(max=level)
        r = expand(schedule.sigma(k) / schedule.alpha(k), x)
        error = torch.maximum(std, r)
        closer = torch.where(single, _log_normal(values - x, error), 0.0)
        index = particles.weigh((closer - fit).flatten(1).sum(1))
        x = x[index]
        # z given x and the value: a Kalman update, whose gain is 1 where the value is at least as accurate as r.
        gain = torch.where(r > 0, (r / error) ** 2, 0.0)
        z = x + gain * (values - x) + r * (1 - gain).sqrt() * torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
        alike = bool((k == k[:1]).all())
        matrix = start_at(full_sequence(x.shape[1], schedule.ladder(min(STEPS, schedule.levels))), k[0] if alike else k)
        x = follow(denoise, schedule, expand(schedule.alpha(k), x) * z, Sampler().along(matrix), generator).x
        fit = torch.where(single, _log_normal(values - x, error), 0.0)
    return particles.choose(torch.where(std == 0, values, x), samples)


def _rounds(schedule: NoiseSchedule, variance: Tensor | float, highest: Tensor) -> list[int]:
    """Levels of falling error, in equal ratios: from above the size of a token's widest number, or from the highest level at which tokens
    begin, to well below the size of its narrowest number.
    """
    size, ratio = torch.as_tensor(variance).sqrt(), schedule.sigma_table / schedule.alpha_table
    first = min(WIDEST * float(size.max()), float(ratio[highest]))
    last = min(max(NARROWEST * float(size.min()), float(ratio[1])), first)
    rounds = 1 + round((ROUNDS - 1) * math.log(first / last) / math.log(WIDEST / NARROWEST))
    return schedule.level_of(torch.logspace(math.log10(first), math.log10(last), max(rounds, 2), dtype=torch.float64)).tolist()


def _log_normal(error: Tensor, std: Tensor) -> Tensor:
    return -0.5 * (error / std) ** 2 - std.log()


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


def _particle_filter(
    model: DiffusionForcing, known: Observation, samples: int, count: int, *, sampler: Sampler, cond: Tensor,
    generator: Generator | None,
) -> Tensor:  # fmt: skip
    """Samples token after token, by a causal model: a particle filter that proposes each token given its own observation."""
    schedule, (b, t) = model.schedule, known.values.shape[:2]
    levels = known.levels(schedule)
    open_ = (levels > 0).cumsum(1) - (levels > 0).long() > 0  # whether particles differ before the token
    weighs = open_ & (levels < schedule.levels)
    if weighs.any() and known.values[0, 0].numel() > EXACT:
        raise ValueError(f"something is observed after a token that is not exactly known, so particles are weighed by exact likelihoods of "
                         f"tokens of at most {EXACT} numbers; got {known.values[0, 0].numel()}: use a bidirectional model")  # fmt: skip
    if type(sampler) is not Sampler:
        raise ValueError("a causal model draws token after token, along no matrix of the sampler's; give Sampler(steps=...) as it is")
    count = count if weighs.any() else samples
    particles = _Particles(b, count, generator, known.values.device)
    x = known.values.new_zeros(b * count, 0, *known.values.shape[2:])
    state: State = None
    for i in range(t):
        token = Observation(known.values[:, i : i + 1], known.std[:, i : i + 1])
        now = cond[:, i : i + 1].repeat_interleave(count, dim=0)
        if weighs[:, i].any():
            fit = _density(model.denoiser(now, state), schedule, token, levels[:, i : i + 1], count)
            index = particles.weigh(fit * weighs[:, i].repeat_interleave(count))
            x, state = x[index], select_state(state, index)
        new, _, matrix = _begin(schedule, token, count, sampler, generator)
        new = follow(model.denoiser(now, state), schedule, new, sampler.along(matrix), generator).x
        state = model.absorb(new, now, state)
        x = torch.cat([x, new], dim=1)
    return particles.choose(x, samples)


class _Particles:
    """Weights of `count` candidates for each of b sequences, which are resampled when too few of them carry the weight."""

    def __init__(self, b: int, count: int, generator: Generator | None, device: torch.device) -> None:
        self.count, self.generator = count, generator
        self.log_weights = torch.zeros(b, count, dtype=torch.float64, device=device)
        self.first = count * torch.arange(b, device=device)[:, None]  # index of each sequence's first particle
        self.fewest = float(count)  # particles that carried the weight, at the worst moment

    def weigh(self, fit: Tensor) -> Tensor:
        """Weigh particles by log-likelihoods (b*count,). Returns the indices (b*count,) of those that go on."""
        self.log_weights = self.log_weights + fit.double().unflatten(0, self.log_weights.shape)
        effective = 1 / self.log_weights.softmax(1).square().sum(1)
        few = (effective < self.count / 2)[:, None]
        index = torch.where(few, self._draw(self.count), torch.arange(self.count, device=fit.device))
        self.log_weights = torch.where(few, 0.0, self.log_weights)
        self.fewest = min(self.fewest, float(effective.min()))
        return (index + self.first).flatten()

    def choose(self, x: Tensor, samples: int) -> Tensor:
        """Samples from particles x (b*count, ...) by their weights: (samples, b, ...)."""
        index = self._draw(samples)
        if self.fewest < min(10, self.count / 4):
            warnings.warn(f"only about {self.fewest:.0f} of {self.count} particles agree with what is known, so samples are nearly copies "
                          f"of each other where it matters; give more, such as particles={8 * self.count}", stacklevel=5)  # fmt: skip
        return x[(index + self.first).T]

    def _draw(self, number: int) -> Tensor:
        """(b, number) particles, each as often as its weight says: systematic resampling."""
        weights = self.log_weights.softmax(1)
        offset = torch.rand(len(weights), 1, generator=self.generator, dtype=weights.dtype, device=weights.device)
        at = (torch.arange(number, dtype=weights.dtype, device=weights.device) + offset) / number
        return torch.searchsorted(weights.cumsum(1), at).clamp(max=self.count - 1)


def _density(denoise: Denoise, schedule: NoiseSchedule, token: Observation, levels: Tensor, count: int) -> Tensor:
    """(b*count,) log-likelihood of an observed token given the past of each particle."""
    k = levels.repeat_interleave(count, dim=0)
    noisy = expand(schedule.alpha(k), token.values) * token.values.repeat_interleave(count, dim=0)
    return log_likelihood(lambda x, k, past_x, past_k: denoise(x, k), schedule, noisy, k, steps=16)[:, 0].double()
