"""Sequences in memory, cut into windows of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Generator, Tensor

from .checks import first_not_finite


class Batch(NamedTuple):
    """x: tokens (b, t, *event); cond: (b, t, c), c = 0 where there is none; mask: (b, t), True where the token is real."""

    x: Tensor
    cond: Tensor
    mask: Tensor


class Source(Protocol):
    """Windows of tokens from which training draws batches: `Windows`, or a subclass of this with the attributes and methods below."""

    length: int
    """Tokens of a window."""
    event: tuple[int, ...]
    """Shape of a token."""
    cond_width: int
    """Numbers of a token's condition."""
    context: int = 1
    """Tokens at the start of a window that are known when a model is used."""
    modalities: int = 1
    """Tokens of a time step, where each has one for each modality that is observed and a last one for the action."""

    def draw(self, size: int, generator: Generator | None = None) -> Tensor:
        """Random windows for a batch, one a row: where each is, cheaply. A batch of shorter windows may have more than `size`."""
        ...

    def read(self, windows: Tensor) -> Batch:
        """The windows as a batch."""
        ...

    def all(self) -> Tensor:
        """Windows for validation."""
        ...

    def length_of(self, windows: Tensor) -> int:
        """Tokens of these windows, one number for all."""
        return self.length


class Windows(Source):
    """Windows of `length` tokens from sequences of any lengths.

    sequences: arrays (t_i, *event), or one array (n, t, *event). conditions: (t_i, c) each, if any.
    crop: share of the windows that start anywhere in their sequence; the others start at its first token, or, in a sequence longer
    than the window, wherever a whole window fits. What a window has beyond the end of its sequence is padding, masked out.
    """

    def __init__(
        self, sequences: Sequence[Tensor] | Tensor | np.ndarray, length: int, *,
        conditions: Sequence[Tensor] | Tensor | None = None, crop: float = 0.0,
    ) -> None:  # fmt: skip
        tokens = [torch.as_tensor(s).float() for s in sequences]
        if not tokens:
            raise ValueError("there are no sequences to cut windows from: the data set is empty")
        if length < 1:
            raise ValueError(f"a window holds at least one token; got length={length}")
        if not 0 <= crop <= 1:
            raise ValueError(f"crop is the share of windows that start anywhere, 0..1; got {crop}")
        shapes = {tuple(s.shape[1:]) for s in tokens}
        if len(shapes) > 1:
            raise ValueError(f"all tokens must have one shape; got {sorted(shapes)}")
        if not next(iter(shapes)):
            raise ValueError("each sequence must be (tokens, numbers of a token); for scalar series add a last axis: x[..., None]")
        for i, s in enumerate(tokens):
            if len(s) == 0:
                raise ValueError(f"sequence {i} is empty; drop it")
            if at := first_not_finite(s):
                raise ValueError(f"sequence {i} holds NaN or infinite values, the first at {at}; fill it or cut it there")
        conds = [s.new_zeros(len(s), 0) for s in tokens] if conditions is None else [torch.as_tensor(c).float() for c in conditions]
        if [len(c) for c in conds] != [len(s) for s in tokens]:
            raise ValueError("conditions must cover each token of each sequence: one row a token")
        if any(c.ndim != 2 for c in conds) or len({c.shape[1] for c in conds}) > 1:
            raise ValueError(f"each condition must be (tokens, c), with one c for all; got {sorted({tuple(c.shape) for c in conds})}")
        for i, c in enumerate(conds):
            if at := first_not_finite(c):
                raise ValueError(f"the condition of sequence {i} holds NaN or infinite values, the first of token {at[0]}; fill them")
        self.length = length
        self.crop = crop
        self._sizes = torch.tensor([len(s) for s in tokens])
        self._starts = torch.cat([torch.zeros(1, dtype=torch.long), self._sizes.cumsum(0)[:-1]])
        self._tokens = torch.cat(tokens)
        self._conds = torch.cat(conds)
        self.event, self.cond_width = tuple(self._tokens.shape[1:]), self._conds.shape[-1]

    def __len__(self) -> int:
        return len(self._sizes)

    def draw(self, size: int, generator: Generator | None = None) -> Tensor:
        """Random windows as (size, 2): which sequence, and its first token. Cheap: nothing is read."""
        which = torch.randint(0, len(self), (size,), generator=generator)
        sizes = self._sizes[which]
        chance = torch.rand(size, generator=generator)
        anywhere = torch.rand(size, generator=generator) < self.crop
        room = torch.where(anywhere, sizes, (sizes - self.length + 1).clamp(min=1))
        return torch.stack([which, (chance * room).long()], dim=1)

    def read(self, windows: Tensor) -> Batch:
        """The windows (n, 2) as a batch, padded with zeros and masked where a sequence ends early."""
        which, first = windows.unbind(1)
        offset = torch.arange(self.length)
        position = first[:, None] + offset
        mask = position < self._sizes[which][:, None]
        index = self._starts[which][:, None] + torch.minimum(position, self._sizes[which][:, None] - 1)
        x, cond = self._tokens[index], self._conds[index]
        return Batch(x * mask.view(*mask.shape, *(1,) * (x.ndim - 2)), cond * mask[..., None], mask)

    def all(self) -> Tensor:
        """Windows (n, 2) that cover every sequence once, in order: for validation."""
        firsts = [torch.arange(0, size, self.length) for size in self._sizes.tolist()]
        which = torch.repeat_interleave(torch.arange(len(self)), torch.tensor([len(first) for first in firsts]))
        return torch.stack([which, torch.cat(firsts)], dim=1)
