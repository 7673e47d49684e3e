"""Windows of clips that lie on disk: frames are read and made into tokens when they are asked for, so that any number of clips fits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from ..engine.media import to_floats
from ..windows import Batch
from .clips import ClipSet

AT_ONCE = 16  # windows encoded at a time: their frames as floats take four times the room


class ClipWindows:
    """Windows of `length` tokens, of `stack` frames each, that begin at any frame of the clips numbered `which`.

    codec: frames to tokens. told: actions (t, a), one a frame, to conditions (tokens, c). Clips shorter than a window are left out.
    free: share of the windows drawn whose actions are NaN from some token on: of them nothing is to be told. mirror: half of the windows
    drawn are seen in a mirror, for clips of which no actions are told.
    """

    def __init__(
        self, clips: ClipSet, which: Sequence[int], codec: nn.Module, stack: int, length: int,
        told: Callable[[NDArray[np.float32]], Tensor], free: float = 0.0, mirror: bool = False,
    ) -> None:  # fmt: skip
        self.length, self.frames, self.stack, self.free, self.mirror = length, length * stack, stack, free, mirror
        kept = [i for i in which if clips.lengths[i] >= self.frames]
        if not kept:
            raise ValueError(
                f"a window has {self.frames} frames, and of {len(which)} clips none is as long; give longer ones, or fewer tokens"
            )
        self._clips, self._told = clips, told
        self._codec = copy.deepcopy(codec).cpu()  # of its own: a model may take its codec to another device
        self._first, self._room = clips.starts[kept], clips.lengths[kept] - self.frames
        one = self.read(torch.tensor([[0, 0]]))
        self.event, self.cond_width = tuple(one.x.shape[2:]), one.cond.shape[-1]
        if mirror and self.cond_width:
            raise ValueError("which way actions turn in a mirror is not known; leave out mirror where they are told")

    def __len__(self) -> int:
        return len(self._first)

    def draw(self, size: int, generator: Generator | None = None) -> Tensor:
        """Random windows as (size, 2): which clip, and its first frame; (size, 3) with `free`: and how many of its tokens are told, or with
        `mirror`: and whether it is seen in one.
        """
        which = torch.randint(0, len(self), (size,), generator=generator)
        room = torch.from_numpy(self._room)[which] + 1
        drawn = [which, (torch.rand(size, generator=generator) * room).long()]
        if self.free:
            told = torch.randint(-self.length, self.length, (size,), generator=generator).clamp(min=0)  # half of them from the beginning
            drawn.append(told.where(torch.rand(size, generator=generator) < self.free, torch.tensor(self.length)))
        if self.mirror:
            drawn.append(torch.randint(0, 2, (size,), generator=generator))
        return torch.stack(drawn, dim=1)

    def length_of(self, windows: Tensor) -> int:
        return self.length

    def all(self) -> Tensor:
        """Windows (n, 2) one after another through each clip, for validation; what fills no window at its end is left out."""
        found = [(i, first) for i, room in enumerate(self._room.tolist()) for first in range(0, room + 1, self.frames)]
        return torch.tensor(found)

    @torch.no_grad()
    def read(self, windows: Tensor) -> Batch:
        x, cond = [], []
        for part in windows.split(AT_ONCE):
            places = [int(self._first[i]) + first for i, first, *_ in part.tolist()]
            seen = [self._clips.frames[at : at + self.frames] for at in places]
            if self.mirror:
                seen = [one[:, :, ::-1] if any(mirrored) else one for one, (_, _, *mirrored) in zip(seen, part.tolist(), strict=True)]
            x.append(self._codec.encode(to_floats(np.stack(seen))))  # type: ignore[operator]
            told = [() if self.mirror else row[2:] for row in part.tolist()]
            cond += [self._told(self._actions(at, *until)) for at, until in zip(places, told, strict=True)]
        tokens = torch.cat(x)
        return Batch(tokens, torch.stack(cond), torch.ones(tokens.shape[:2], dtype=torch.bool))

    def _actions(self, at: int, told: int | None = None) -> NDArray[np.float32]:
        """Of the window at a place, NaN from token number `told` on."""
        actions = self._clips.actions[at : at + self.frames]
        if told is None or told == self.length:
            return actions
        actions = np.array(actions)
        actions[told * self.stack :] = np.nan
        return actions
