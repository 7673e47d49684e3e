"""How training draws noise levels. This one choice separates Diffusion Forcing from its two baselines.

independent         each token its own level (ours)
shared              one level a sequence: full-sequence diffusion
teacher_forced      each token its own level, but seen by later tokens as clean: next-token diffusion
staircase           levels that rise along the sequence, the rows a pyramid will visit
noisy_prefix        a past with little noise or none, then tokens each at its own level: what a roll-out meets
noisy_context       each token its own level, and another at which later ones see it, mostly none: what sampling token by token meets
shared_with_prefix  a clean past, then one level for all the rest: what a roll-out of full-sequence diffusion meets

A draw is a function `(shape, levels, generator) -> Levels`. Names join with a plus, `"independent+staircase"`: each sequence
of the batch follows one of them, equally often.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Generator, Tensor


class Levels(NamedTuple):
    """k: (b, t), the level of each token. past: (b, t), the level at which later tokens see it; None: at k itself."""

    k: Tensor
    past: Tensor | None = None


class Draw(Protocol):
    def __call__(self, shape: tuple[int, ...], levels: int, generator: Generator | None = None) -> Levels: ...


def independent(shape: tuple[int, ...], levels: int, generator: Generator | None = None) -> Levels:
    """Each token uniform in {0..K}, independent of the others."""
    return Levels(torch.randint(0, levels + 1, shape, generator=generator))


def shared(shape: tuple[int, ...], levels: int, generator: Generator | None = None) -> Levels:
    """One level a sequence, uniform in {0..K}."""
    b, t = shape
    return Levels(torch.randint(0, levels + 1, (b, 1), generator=generator).expand(b, t).contiguous())


def teacher_forced(shape: tuple[int, ...], levels: int, generator: Generator | None = None) -> Levels:
    """Each token uniform in {0..K}, given a past that is always clean."""
    k = independent(shape, levels, generator).k
    return Levels(k, torch.zeros_like(k))


def staircase(shape: tuple[int, ...], levels: int, generator: Generator | None = None) -> Levels:
    """A row of a pyramid: k rises by a fixed amount a token, cut off at 0 and K.

    The rise is drawn log-uniformly from K/1000 to K (from nearly full-sequence to nearly token by token), the row uniformly
    among those in which some token is moving.
    """
    b, t = shape
    rise = levels * 10 ** (-3 * torch.rand(b, 1, generator=generator))
    first = torch.rand(b, 1, generator=generator) * (levels + rise * (t - 1)) - rise * (t - 1)
    k = first + rise * torch.arange(t)
    return Levels(k.round().clamp(0, levels).long())


def noisy_prefix(shape: tuple[int, ...], levels: int, generator: Generator | None = None, most: float = 0.4) -> Levels:
    """A past at low levels, then tokens uniform in {0..K}. The past is clean in half of the sequences, else up to `most` K, each token
    its own; it ends anywhere.
    """
    b, t = shape
    k = independent(shape, levels, generator).k
    end = _prefix_lengths(b, t, generator)
    top = most * levels * torch.rand(b, 1, generator=generator) * torch.randint(0, 2, (b, 1), generator=generator)
    low = (torch.rand(shape, generator=generator) * top).round().long()
    return Levels(torch.where(torch.arange(t) < end, low, k))


def noisy_context(
    shape: tuple[int, ...], levels: int, generator: Generator | None = None, most: float = 0.4, period: int = 1
) -> Levels:  # fmt: skip
    """Each token uniform in {0..K}, given a past that is clean in a third of the sequences, has a little noise in a third (up to `most` K,
    each token its own), and in a third is clean but for some tokens, from none to all, each at any level.

    Every token of a sequence thus learns what sampling token by token asks: to be denoised after a known past with uncertain observations.
    period: tokens of a timestep, where a timestep has several modalities, the last of them the action. In half of the sequences of the
    last third it is then `sensor_dropout` that decides which tokens are uncertain.
    """
    b = shape[0]
    kind = torch.randint(0, 3, (b, 1), generator=generator)
    low = (torch.rand(shape, generator=generator) * most * levels * torch.rand(b, 1, generator=generator)).round().long()
    uncertain = torch.rand(shape, generator=generator) < torch.rand(b, 1, generator=generator)
    some = torch.where(uncertain, independent(shape, levels, generator).k, 0)
    past = torch.where(kind == 1, low, torch.where(kind == 2, some, 0))
    k = independent(shape, levels, generator).k
    if period > 1:
        dropped = (kind == 2) & (torch.rand(b, 1, generator=generator) < 0.5)
        past = torch.where(dropped, sensor_dropout(shape, levels, period, generator), past)
    return Levels(k, past)


def sensor_dropout(shape: tuple[int, ...], levels: int, period: int, generator: Generator | None = None, longest: int = 6) -> Tensor:
    """(b, t), levels of sequences with sensors that fail for a while: 0, but for stretches of up to `longest` timesteps.

    A timestep has `period` tokens, observations and last the action, which stays known. The stretches of a sequence have one length, start
    anywhere, and cover at least one observation of each of their timesteps, each as likely as not. In half of the sequences they are at K
    (nothing was observed), in the others at one level (an uncertain observation).
    """
    b, t = shape
    steps = -(-t // period)
    length = torch.randint(1, longest + 1, (b, 1), generator=generator)
    begins = torch.rand(b, steps, generator=generator) * length < torch.rand(b, 1, generator=generator)
    # A timestep is in a stretch if one began there or up to `length` - 1 timesteps before: counted by sums over all before.
    count = torch.cat([torch.zeros(b, longest), begins.cumsum(1)], dim=1)
    at = longest + torch.arange(steps)
    dropped = count.gather(1, at.expand(b, -1)) > count.gather(1, at - length)
    observations = period - 1
    which = torch.rand(b, observations, generator=generator) < 0.5
    which |= torch.arange(observations) == torch.randint(0, observations, (b, 1), generator=generator)
    which = torch.cat([which, torch.zeros(b, 1, dtype=torch.bool)], dim=1)
    level = torch.where(torch.rand(b, 1, generator=generator) < 0.5, levels, torch.randint(0, levels + 1, (b, 1), generator=generator))
    return torch.where((dropped[:, :, None] & which[:, None]).flatten(1)[:, :t], level, 0)


def shared_with_prefix(shape: tuple[int, ...], levels: int, generator: Generator | None = None) -> Levels:
    """A clean past that ends anywhere, then one level for all the rest, uniform in {0..K}."""
    b, t = shape
    k = shared(shape, levels, generator).k
    return Levels(torch.where(torch.arange(t) < _prefix_lengths(b, t, generator), 0, k))


def self_context_levels(k: Tensor, levels: int, share: float, generator: Generator | None = None) -> Tensor:
    """(b, t), levels from which tokens of levels k (b, t) are replaced by the model's own estimate, 0 where they are not.

    In a share of the sequences, nearly clean tokens (up to K / 10) get levels from K / 10 to 7 K / 10: later tokens then learn from the
    context that a roll-out has, the model's own output instead of the truth (as in Self Forcing).
    """
    chosen = torch.rand(len(k), 1, generator=generator) < share
    level = torch.randint(max(1, levels // 10), max(2, 7 * levels // 10 + 1), k.shape, generator=generator)
    return torch.where(chosen & (k <= levels // 10), level, 0)


def _prefix_lengths(b: int, t: int, generator: Generator | None) -> Tensor:
    """(b, 1), tokens of each sequence's prefix: one at least, and one is left. 0 for sequences of one token."""
    return torch.randint(1, t, (b, 1), generator=generator) if t > 1 else torch.zeros(b, 1, dtype=torch.long)


DRAWS: dict[str, Draw] = {
    "independent": independent,
    "shared": shared,
    "teacher_forced": teacher_forced,
    "staircase": staircase,
    "noisy_prefix": noisy_prefix,
    "noisy_context": noisy_context,
    "shared_with_prefix": shared_with_prefix,
}


def mixture(*draws: Draw) -> Draw:
    """Each sequence of a batch follows one of the draws, each equally often."""

    def mixed(shape: tuple[int, ...], levels: int, generator: Generator | None = None) -> Levels:
        which = torch.randint(0, len(draws), (shape[0], 1), generator=generator)
        drawn = [draw(shape, levels, generator) for draw in draws]
        k = torch.stack([d.k for d in drawn])
        past = torch.stack([d.k if d.past is None else d.past for d in drawn])
        pick = which.expand(shape)[None]
        k = k.gather(0, pick)[0]
        if all(d.past is None for d in drawn):
            return Levels(k)
        return Levels(k, past.gather(0, pick)[0])

    return mixed


def by_name(names: str, period: int = 1) -> Draw:
    """The draw called `names`: one of DRAWS, or several joined by a plus. period: tokens of a timestep, for `noisy_context`."""
    parts = [part.strip() for part in names.split("+")]
    for part in parts:
        if part not in DRAWS:
            raise ValueError(f"unknown draw of levels {part!r}; choose from {', '.join(DRAWS)}, or join several with a plus")
    draws = {**DRAWS, "noisy_context": partial(noisy_context, period=period)}
    return draws[parts[0]] if len(parts) == 1 else mixture(*(draws[part] for part in parts))
