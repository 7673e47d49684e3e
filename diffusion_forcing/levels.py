"""How training draws noise levels. This one choice separates Diffusion Forcing from its two baselines.

independent     each token its own level (ours)
shared          one level a sequence: full-sequence diffusion
teacher_forced  each token its own level, but seen by later tokens as clean: next-token diffusion
staircase       levels that rise along the sequence, the rows a pyramid will visit
continued       a past with little noise or none, then tokens each at its own level: what a roll-out meets
remembered      each token its own level, and another at which later ones see it, mostly none: what sampling token by token meets
extended        a clean past, then one level for all the rest: what a roll-out of full-sequence diffusion meets

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
    def __call__(self, shape: tuple[int, int], levels: int, generator: Generator | None = None) -> Levels: ...


def independent(shape: tuple[int, int], levels: int, generator: Generator | None = None) -> Levels:
    """Each token uniform in {0..K}, whatever the others have."""
    return Levels(torch.randint(0, levels + 1, shape, generator=generator))


def shared(shape: tuple[int, int], levels: int, generator: Generator | None = None) -> Levels:
    """One level a sequence, uniform in {0..K}."""
    b, t = shape
    return Levels(torch.randint(0, levels + 1, (b, 1), generator=generator).expand(b, t).contiguous())


def teacher_forced(shape: tuple[int, int], levels: int, generator: Generator | None = None) -> Levels:
    """Each token uniform in {0..K}, given a past that is always clean."""
    k = independent(shape, levels, generator).k
    return Levels(k, torch.zeros_like(k))


def staircase(shape: tuple[int, int], levels: int, generator: Generator | None = None) -> Levels:
    """A row of a pyramid: k rises by a fixed amount a token, cut off at 0 and K.

    The rise is drawn log-uniformly from K/1000 to K (from nearly full-sequence to nearly token by token), the row uniformly
    among those in which some token is moving.
    """
    b, t = shape
    rise = levels * 10 ** (-3 * torch.rand(b, 1, generator=generator))
    first = torch.rand(b, 1, generator=generator) * (levels + rise * (t - 1)) - rise * (t - 1)
    k = first + rise * torch.arange(t)
    return Levels(k.round().clamp(0, levels).long())


def continued(shape: tuple[int, int], levels: int, generator: Generator | None = None, most: float = 0.4) -> Levels:
    """A past at low levels, then tokens uniform in {0..K}. The past is clean in half of the sequences, else up to `most` K, each token
    its own; it ends anywhere.
    """
    b, t = shape
    k = independent(shape, levels, generator).k
    end = _ends(b, t, generator)
    doubt = most * levels * torch.rand(b, 1, generator=generator) * torch.randint(0, 2, (b, 1), generator=generator)
    low = (torch.rand(shape, generator=generator) * doubt).round().long()
    return Levels(torch.where(torch.arange(t) < end, low, k))


def remembered(
    shape: tuple[int, int], levels: int, generator: Generator | None = None, most: float = 0.4, period: int = 1
) -> Levels:  # fmt: skip
    """Each token uniform in {0..K}, given a past that in a third of the sequences is clean, in a third has a little noise, up to `most` K,
    each token its own, and in a third is clean but for tokens that are doubted, from none to all, each at any level.

    Every token of a sequence then learns what sampling asks of it: to be denoised after a past that is known, but for what is doubted.
    period: tokens of a moment, where moments have parts: some that are seen, and the last that is done. In half of the doubted sequences it
    is then `lapses` that are doubted.
    """
    b = shape[0]
    kind = torch.randint(0, 3, (b, 1), generator=generator)
    low = (torch.rand(shape, generator=generator) * most * levels * torch.rand(b, 1, generator=generator)).round().long()
    doubted = torch.rand(shape, generator=generator) < torch.rand(b, 1, generator=generator)
    doubt = torch.where(doubted, independent(shape, levels, generator).k, 0)
    past = torch.where(kind == 1, low, torch.where(kind == 2, doubt, 0))
    k = independent(shape, levels, generator).k
    if period > 1:
        lapsing = (kind == 2) & (torch.rand(b, 1, generator=generator) < 0.5)
        past = torch.where(lapsing, lapses(shape, levels, period, generator), past)
    return Levels(k, past)


def imagined(k: Tensor, levels: int, share: float, generator: Generator | None = None) -> Tensor:
    """(b, t), levels at which tokens of levels k (b, t) are to be imagined, 0 where they are not.

    In a share of the sequences, those that are nearly clean (up to K / 10), from K / 10 to 7 K / 10: what later tokens then see is what a
    roll-out shows them, the model's own work instead of the truth.
    """
    chosen = torch.rand(len(k), 1, generator=generator) < share
    level = torch.randint(max(1, levels // 10), max(2, 7 * levels // 10 + 1), k.shape, generator=generator)
    return torch.where(chosen & (k <= levels // 10), level, 0)


def lapses(shape: tuple[int, int], levels: int, period: int, generator: Generator | None = None, longest: int = 6) -> Tensor:
    """(b, t), levels of sequences whose moments of `period` tokens are not always seen: 0, but for stretches of up to `longest` moments.

    A sequence has stretches of one length, which begin at any moment, seldom or often. They take in some of the parts that are seen, each
    as likely as not, and at least one; the last part of a moment is what was done, which is known. In half of the sequences they are at K,
    as if there had been nothing to see, in the others at one level: what a covered camera or a doubtful one asks for.
    """
    b, t = shape
    moments = -(-t // period)
    length = torch.randint(1, longest + 1, (b, 1), generator=generator)
    begins = torch.rand(b, moments, generator=generator) * length < torch.rand(b, 1, generator=generator)
    # A moment is within a stretch if one began there or up to `length` - 1 moments before: counted by sums over all before.
    count = torch.cat([torch.zeros(b, longest), begins.cumsum(1)], dim=1)
    at = longest + torch.arange(moments)
    lapsed = count.gather(1, at.expand(b, -1)) > count.gather(1, at - length)
    seen = period - 1
    parts = torch.rand(b, seen, generator=generator) < 0.5
    parts |= torch.arange(seen) == torch.randint(0, seen, (b, 1), generator=generator)
    parts = torch.cat([parts, torch.zeros(b, 1, dtype=torch.bool)], dim=1)
    level = torch.where(torch.rand(b, 1, generator=generator) < 0.5, levels, torch.randint(0, levels + 1, (b, 1), generator=generator))
    return torch.where((lapsed[:, :, None] & parts[:, None]).flatten(1)[:, :t], level, 0)


def extended(shape: tuple[int, int], levels: int, generator: Generator | None = None) -> Levels:
    """A clean past that ends anywhere, then one level for all the rest, uniform in {0..K}."""
    k = shared(shape, levels, generator).k
    return Levels(torch.where(torch.arange(shape[1]) < _ends(*shape, generator), 0, k))


def _ends(b: int, t: int, generator: Generator | None) -> Tensor:
    """(b, 1), after how many tokens the past of each sequence ends: one at least, and one is left. None, where there is one alone."""
    return torch.randint(1, t, (b, 1), generator=generator) if t > 1 else torch.zeros(b, 1, dtype=torch.long)


DRAWS: dict[str, Draw] = {
    "independent": independent,
    "shared": shared,
    "teacher_forced": teacher_forced,
    "staircase": staircase,
    "continued": continued,
    "remembered": remembered,
    "extended": extended,
}


def mixture(*draws: Draw) -> Draw:
    """Each sequence of a batch follows one of the draws, each equally often."""

    def mixed(shape: tuple[int, int], levels: int, generator: Generator | None = None) -> Levels:
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
    """The draw called `names`: one of DRAWS, or several joined by a plus. period: tokens of a moment, for draws that ask (`remembered`)."""
    parts = [part.strip() for part in names.split("+")]
    for part in parts:
        if part not in DRAWS:
            raise ValueError(f"unknown draw of levels {part!r}; choose from {', '.join(DRAWS)}, or join several with a plus")
    draws = {**DRAWS, "remembered": partial(remembered, period=period)}
    return draws[parts[0]] if len(parts) == 1 else mixture(*(draws[part] for part in parts))
