"""Windows of clips on disk: frames are read and encoded when they are asked for, so that any number of clips fits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from ..engine.media import to_floats
from ..windows import Batch, Source
from .clips import ClipSet

AT_ONCE = 16  # windows encoded at a time: their frames as floats take four times the room


class ClipWindows(Source):
    """Windows of `length` tokens, of `stack` frames each, that begin at any frame of the clips numbered `which`.

    codec: frames to tokens. build_cond: actions (t, a), one a frame, to conditions (tokens, c). Clips shorter than a window are left out.
    mirror: half of the windows drawn are mirrored, for clips without conditions.
    """

    def __init__(
        self, clips: ClipSet, which: Sequence[int], codec: nn.Module, stack: int, length: int,
        build_cond: Callable[[NDArray[np.float32]], Tensor], mirror: bool = False,
    ) -> None:  # fmt: skip
        self.length, self.frames, self.mirror = length, length * stack, mirror
        kept = [i for i in which if clips.lengths[i] >= self.frames]
        if not kept:
            raise ValueError(
                f"a window has {self.frames} frames, and of {len(which)} clips none is as long; give longer ones, or fewer tokens"
            )
        self._clips, self._build_cond = clips, build_cond
        self._codec = copy.deepcopy(codec).cpu()  # of its own: a model may take its codec to another device
        self._first, self._room = clips.starts[kept], clips.lengths[kept] - self.frames
        one = self.read(torch.tensor([[0, 0]]))
        self.event, self.cond_width = tuple(one.x.shape[2:]), one.cond.shape[-1]
        if mirror and self.cond_width:
            raise ValueError("how actions change in a mirror is not known; leave out mirror for conditional models")

    def __len__(self) -> int:
        return len(self._first)

    def draw(self, size: int, generator: Generator | None = None) -> Tensor:
        """Random windows as (size, 2): number of the clip, and the first frame; (size, 3) with `mirror`: and whether it is mirrored."""
        which = torch.randint(0, len(self), (size,), generator=generator)
        room = torch.from_numpy(self._room)[which] + 1
        drawn = [which, (torch.rand(size, generator=generator) * room).long()]
        if self.mirror:
            drawn.append(torch.randint(0, 2, (size,), generator=generator))
        return torch.stack(drawn, dim=1)

    def all(self) -> Tensor:
        """Windows (n, 2) one after another through each clip, for validation; what fills no window at its end is left out."""
        return torch.tensor([(i, first) for i, room in enumerate(self._room.tolist()) for first in range(0, room + 1, self.frames)])

    @torch.no_grad()
    def read(self, windows: Tensor) -> Batch:
        x, cond = [], []
        for part in windows.split(AT_ONCE):
            frames = []
            for i, first, *mirrored in part.tolist():
                window = slice(int(self._first[i]) + first, int(self._first[i]) + first + self.frames)
                frames.append(self._clips.frames[window, :, ::-1] if any(mirrored) else self._clips.frames[window])
                cond.append(self._build_cond(self._clips.actions[window]))
            x.append(self._codec.encode(to_floats(np.stack(frames))))  # type: ignore[operator]
        tokens = torch.cat(x)
        return Batch(tokens, torch.stack(cond), torch.ones(tokens.shape[:2], dtype=torch.bool))
