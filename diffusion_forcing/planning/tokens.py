"""Frames, tokens and training windows of the mazes' data.

A frame is [action, next observation], six numbers. A token holds several frames side by side. Every window begins with a *present* token:
the observation before its first action, written as a ball that has coasted there at constant speed, so that an observation is a token
like any other and conditions by being at level 0.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ..codecs import Chain, Normalize, Rotate, Split, Stack
from ..windows import Batch, Source
from .data import Transitions, interpolate_repeats
from .dynamics import fit_law_of_motion, in_free_flight
from .envs.maze2d import DT, GEAR

UNIT = 0.7
"""Metres in a unit of position: the denoising error is constant in units, and should be small against a corridor's 0.8."""


def frames_of(data: Transitions) -> tuple[Tensor, Tensor]:
    """Frames (s, t-1, 6) [action, next observation], and the observation before each (s, t-1, 4)."""
    observations = interpolate_repeats(data.observations)
    frames = np.concatenate([data.actions[:, :-1], observations[:, 1:]], axis=-1)
    return torch.from_numpy(frames), torch.from_numpy(observations[:, :-1])


def present_frames(observation: Tensor, frames: int) -> Tensor:
    """(..., frames, 6): a ball that arrives at observation (..., 4) having coasted at its velocity for `frames` steps."""
    position, velocity = observation[..., None, :2], observation[..., None, 2:]
    back = torch.arange(frames - 1, -1, -1, dtype=observation.dtype, device=observation.device)[:, None] * DT
    shape = (*observation.shape[:-1], frames, 2)
    return torch.cat([(velocity / GEAR).expand(shape), position - back * velocity, velocity.expand(shape)], dim=-1)


def fit_codec(frames: Tensor, frame_stack: int) -> Chain:
    """Normalised, stacked frames (s, t, 6), rotated to the directions that the dynamics leave free.

    A token of n frames has 2n actions and one initial state; the rest follows from them, except for contacts with walls. So of its 6n
    numbers it keeps 2n + 4, and whatever is decoded from them obeys the dynamics of free flight: actions and states agree.
    """
    flat = frames.reshape(-1, 6)
    plain = Normalize.fit(flat[torch.isfinite(flat).all(-1)])
    normalize = Normalize(plain.mean, torch.cat([plain.std[:2] / 3, torch.full((2,), UNIT), plain.std[-2:] / 2]))
    stack = Stack(frame_stack)
    whole = frames[:, : frames.shape[1] // frame_stack * frame_stack]  # no token may cross from one stream to the next
    tokens = stack.encode(normalize.encode(whole)).flatten(0, 1)
    free = F.pad(in_free_flight(whole, fit_law_of_motion(whole)), (1, 0), value=True).unflatten(1, (-1, frame_stack))
    free[..., 0] = True  # the step into a token is the constraint's business
    finite = torch.isfinite(tokens).all(-1)
    flying = free.all(-1).flatten() & finite
    tokens = tokens[flying if flying.sum() > tokens.shape[1] else finite]
    tokens = tokens[:: max(1, len(tokens) // 100_000)]
    # Rows and columns are rotated separately: walls lie along them, and a direction that mixed both would meet them at a slant.
    groups = [[6 * frame + number for frame in range(frame_stack) for number in (axis, 2 + axis, 4 + axis)] for axis in (0, 1)]
    # The position comes first, on its own: walls depend on it, and its variance is no larger than the velocity's.
    position = torch.zeros(frame_stack, 6)
    position[:, 2:4] = 1
    return Chain(normalize, stack, Rotate.fit(tokens, keep=frame_stack + 2, groups=groups, first=position.flatten()))


def fit_choice_codec(frames: Tensor, frame_stack: int, keep: int = 5) -> Chain:
    """Frames (s, t, 6) as two tokens for every `frame_stack` of them: the actions, then the observations that they led to.

    Where chance has a say, a choice and its outcome must not share a noise level, or guidance finds the outcome while it is chosen. Of the
    actions, and of the observations, `keep` principal directions of rows and of columns each: slow changes stay, jitter is left out.
    """
    flat = frames.reshape(-1, 6)
    plain = Normalize.fit(flat[torch.isfinite(flat).all(-1)])
    stack = Stack(frame_stack)
    whole = frames[:, : frames.shape[1] // frame_stack * frame_stack]
    groups = [[6 * frame + number for frame in range(frame_stack) for number in numbers] for numbers in ((0,), (1,), (2, 4), (3, 5))]
    scale = torch.ones(2)
    for _ in range(2):  # the second time, the leading directions of actions vary as much as those of observations
        units = torch.cat([plain.std[:2] / scale, torch.full((2,), UNIT), plain.std[-2:] / 2])
        normalize = Normalize(plain.mean, units * frame_stack**0.5)  # leading directions add up all frames
        tokens = stack.encode(normalize.encode(whole)).flatten(0, 1)
        tokens = tokens[torch.isfinite(tokens).all(-1)]
        rotate = Rotate.fit(tokens[:: max(1, len(tokens) // 100_000)], keep=keep, groups=groups)
        variance = rotate.variance.view(4, keep)
        scale = scale * (variance[2:, 0] / variance[:2, 0]).sqrt()
    return Chain(normalize, stack, rotate, Split(2, rotate.variance.view(2, 2 * keep).mean(0)))


def choices(codec: Chain, tokens: int) -> Tensor | None:
    """(tokens,), True for tokens of actions, of a plan in tokens of `fit_choice_codec`; None where a token holds both."""
    parts = tokens_per_stack(codec)
    return None if parts == 1 else torch.arange(tokens) % parts == 0


def tokens_per_stack(codec: nn.Module) -> int:
    """Tokens that stand for one stack of frames."""
    last = codec.parts[-1] if isinstance(codec, Chain) else codec
    return last.parts if isinstance(last, Split) else 1


def position_numbers(frame_stack: int) -> list[int]:
    """Which numbers of a token of `fit_codec` hold the row and the column of the ball."""
    return [0, frame_stack + 2]


class FrameWindows(Source):
    """Windows that start at any frame of any stream: a present token, then length-1 tokens of `stack` frames, encoded when read.

    frames, before: as from `frames_of`. event: the shape of a token; a codec may make several of one stack. short: fraction
    of the batches whose windows are cut into pieces of one random length, each with a present of its own, so that short plans are learned
    too.
    """

    cond_width = 0

    def __init__(
        self, frames: Tensor, before: Tensor, length: int, stack: int, codec: Chain, event: tuple[int, ...], short: float = 0.0
    ) -> None:
        if length < 2:
            raise ValueError(f"a window holds the present and at least one more token; got {length} tokens")
        finite = torch.isfinite(frames).all(-1).sum(1)  # streams are filled with NaN after their ends
        starts = finite - (length - 1) * stack + 1
        if not (starts > 0).any():
            raise ValueError(f"a window needs {(length - 1) * stack} frames, but the longest stream has {int(finite.max())}; "
                             "shorten it by window_frames, or collect more transitions")  # fmt: skip
        self.length, self.stack, self.codec, self.event, self.short = length, stack, codec, event, short
        self.context = tokens_per_stack(codec)
        self._frames, self._before = frames, before
        self._starts = starts.clamp(min=0)
        self._ends = self._starts.cumsum(0)

    def __len__(self) -> int:
        """Number of frames at which a window can start."""
        return int(self._ends[-1])

    def draw(self, size: int, generator: Generator | None = None) -> Tensor:
        """(n, 3): stream, first frame and tokens after the present; every start of a whole window is equally likely."""
        windows = self._place(torch.randint(0, len(self), (size,), generator=generator))
        if not self.short:
            return windows
        chance, share = torch.rand(2, generator=generator).tolist()
        tokens = int((self.length - 1) ** share) if chance < self.short else self.length - 1  # log-uniform: 1 .. length-1
        pieces = (self.length - 1) // tokens
        stream, first, _ = windows.repeat_interleave(pieces, dim=0).unbind(1)
        first = first + torch.arange(pieces).repeat(size) * tokens * self.stack
        return torch.stack([stream, first, torch.full_like(first, tokens)], dim=1)

    def all(self) -> Tensor:
        """(n, 3): consecutive whole windows, for validation."""
        return self._place(torch.arange(0, len(self), (self.length - 1) * self.stack))

    def every(self, number: int) -> Tensor:
        """(number, 3): whole windows spread evenly over all of them."""
        return self._place(torch.linspace(0, len(self) - 1, number).long())

    def length_of(self, windows: Tensor) -> int:
        """Tokens of these windows, the present included."""
        return (int(windows[0, 2]) + 1) * self.context

    def raw(self, windows: Tensor) -> Tensor:
        """Frames (n, tokens * stack, 6) in the data's own units, the present first."""
        stream, first, tokens = windows.unbind(1)
        index = first[:, None] + torch.arange(int(tokens[0]) * self.stack)
        frames = self._frames[stream[:, None], index]
        return torch.cat([present_frames(self._before[stream, first], self.stack), frames], dim=1)

    def read(self, windows: Tensor) -> Batch:
        x = self.codec.encode(self.raw(windows))
        return Batch(x, x.new_zeros(*x.shape[:2], 0), torch.ones(x.shape[:2], dtype=torch.bool))

    def _place(self, which: Tensor) -> Tensor:
        """(n, 3) of windows by their number, 0 to len(self)-1."""
        stream = torch.searchsorted(self._ends, which, right=True)
        first = which - (self._ends[stream] - self._starts[stream])
        return torch.stack([stream, first, torch.full_like(first, self.length - 1)], dim=1)
