"""Someone who walks: says from what is seen what one would do next, as the walkers of a world's clips do.

A world model is led by actions. Those of a real clip were meant for that clip's place; soon a model imagines another one, and they lead
into walls. A walker looks at what is imagined and chooses: in front of a wall it turns, in a corridor it goes on. It knows nothing of the
model, and leads any model, or the world itself, alike.

What walkers of the clips do in the frames of one token is put into a list of typical ways (k-means), and a small network learns which of
these comes next. So a choice is drawn as a whole: left or right, not the mean of both.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Generator, Tensor, nn

from ..checks import check_counts
from ..engine.pretrained import PRETRAINED
from ..files import cache_folder, read_tensors, write_atomically

if TYPE_CHECKING:
    from ..engine.task import Progress
    from .clips import ClipSet

Frames = NDArray[np.uint8]
Actions = NDArray[np.float32]
SEEN = 32
"""Height and width of the frames that a walker looks at: enough to tell how far a wall is."""
AHEAD = 8
"""So many tokens a walker may choose for without looking again."""
WAYS = 64
"""Typical ways to act in the frames of a token."""
STEPS = 1500
"""Of learning to walk: a minute or two."""
VERSION = 1
"""Of how walkers learn: another one learns anew."""
WALKERS = PRETRAINED / "walkers"
"""Walkers that come with the package."""


class Walker(nn.Module):
    """Two looks and what was done last, to what is done in the next tokens.

    stack: frames a token. ways: (n, stack * a), the typical ways to act in a token.
    """

    ways: Tensor

    def __init__(self, stack: int, ways: Tensor, width: int = 128) -> None:
        super().__init__()
        check_counts(stack=stack, width=width)
        if ways.ndim != 2 or not len(ways) or ways.shape[1] % stack:
            raise ValueError(f"ways are (n, {stack} * numbers an action has), one at least; got {tuple(ways.shape)}")
        self.stack = stack
        self.register_buffer("ways", ways.float().contiguous())
        sizes = (6, 32, 64, 64)
        self.look = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairwise(sizes))
        self.seen = nn.Linear(sizes[-1] * (SEEN // 8) ** 2, width)
        self.done = nn.Linear(ways.shape[1], width)
        self.ahead = nn.Embedding(AHEAD, width)
        self.think = nn.Linear(width, width)
        self.choose_way = nn.Linear(width, len(ways))

    @property
    def width(self) -> int:
        """Numbers an action has."""
        return self.ways.shape[1] // self.stack

    def forward(self, looks: Tensor, done: Tensor, ahead: Tensor) -> Tensor:
        """Scores (n, ways) of what comes next, from looks (n, 6, SEEN, SEEN), what was done in the token before, (n, stack * a), and how
        many tokens (n,) were chosen since the last look.
        """
        for layer in self.look:
            looks = F.silu(layer(looks))
        hidden = F.silu(self.seen(looks.flatten(1)) + self.done(done) + self.ahead(ahead))
        return self.choose_way(F.silu(self.think(hidden)))

    @torch.no_grad()
    def choose(self, frames: Frames, done: Actions, tokens: int = 1, generator: Generator | None = None) -> Actions:
        """Actions (b, tokens * stack, a) to follow frames (b, t, px, px, 3), of which the last token's are looked at, all of them or the
        only one there is, and actions (b, stack, a) that led to these.
        """
        last = done[:, -self.stack :].reshape(len(done), -1)
        if last.shape[1] != self.ways.shape[1]:
            raise ValueError(
                f"this walker does {self.width} numbers in each of {self.stack} frames; got actions of shape {tuple(done.shape)}"
            )
        looks = looks_of(frames[:, [-min(self.stack + 1, frames.shape[1]), -1]])
        act = torch.tensor(last)
        chosen = []
        for ahead in range(tokens):
            scores = self(looks, act, torch.full((len(act),), min(ahead, AHEAD - 1)))
            act = self.ways[torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]]
            chosen.append(act)
        return rearrange(torch.stack(chosen, dim=1), "b t (s a) -> b (t s) a", s=self.stack).numpy()

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        write_atomically(file, lambda path: save_file(tensors, path, metadata={"stack": str(self.stack)}))

    @classmethod
    def load(cls, file: Path, stack: int) -> Walker:
        tensors = read_tensors(file)
        walker = cls(stack, tensors["ways"], len(tensors["think.bias"]))
        walker.load_state_dict(tensors)
        return walker.eval()


def looks_of(frames: Frames) -> Tensor:
    """Frames (b, 2, px, px, 3) as a walker sees them, (b, 6, SEEN, SEEN)."""
    pictures = rearrange(torch.tensor(np.ascontiguousarray(frames)), "b t h w c -> b (t c) h w").float() / 127.5 - 1
    return F.interpolate(pictures, size=(SEEN, SEEN), mode="area")


def typical(rows: Tensor, number: int, generator: Generator, rounds: int = 20) -> Tensor:
    """So many of the rows (n, d), or fewer, that the others lie near: k-means, each mean replaced by the row next to it."""
    kinds = rows.unique(dim=0)
    if len(kinds) <= number:
        return kinds
    centres = rows[torch.randperm(len(rows), generator=generator)[:number]]
    for _ in range(rounds):
        nearest = torch.cdist(rows, centres).argmin(1)
        counts = torch.bincount(nearest, minlength=number)
        sums = torch.zeros_like(centres).index_add_(0, nearest, rows)
        # One that nothing is near to begins anew where another row is.
        lost = rows[torch.randint(len(rows), (number,), generator=generator)]
        centres = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], lost)
    return rows[torch.cdist(centres, rows).argmin(1)].unique(dim=0)


def learn_to_walk(
    clips: ClipSet, stack: int, which: Sequence[int] | None = None, *, steps: int | None = None, batch: int = 128, lr: float = 2e-3,
    seed: int = 0, progress: Progress | None = None,
) -> Walker:  # fmt: skip
    """A walker who does what those of the clips do, of the clips numbered `which` or of all.

    Frames are seen a little brighter, darker, dimmer or noisier than they are: imagined ones are. steps: STEPS if not given.
    """
    if not clips.actions.shape[-1]:
        raise ValueError("these clips have no actions, so that nobody can learn to walk by them")
    steps = STEPS if steps is None else steps
    which = range(len(clips.starts)) if which is None else which
    long = np.array([i for i in which if clips.lengths[i] > 2 * stack + 1], dtype=np.int64)
    if not len(long):
        raise ValueError(f"to learn what follows a token, clips of {2 * stack + 2} frames or more are needed; got none")
    generator = Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        walker = Walker(stack, typical(_chunks(clips, long, stack, generator), WAYS, generator))
    optimizer = torch.optim.AdamW(walker.parameters(), lr=lr, weight_decay=0.01)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
        looks, before, after, ahead = _examples(clips, long, stack, batch, generator)
        gain = 1 + 0.2 * (2 * torch.rand(batch, 1, 1, 1, generator=generator) - 1)
        shift = 0.1 * (2 * torch.rand(batch, 1, 1, 1, generator=generator) - 1)
        noise = 0.05 * torch.rand(batch, 1, 1, 1, generator=generator) * torch.randn(looks.shape, generator=generator)
        wanted = torch.cdist(after, walker.ways).argmin(1)
        loss = F.cross_entropy(walker(looks * gain + shift + noise, before, ahead), wanted)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if progress is not None:
            progress("learning to walk", step + 1, steps)
    return walker.eval()


def walker_of(
    about: Sequence[Any], stack: int, taught_by: Callable[[], tuple[ClipSet, Sequence[int]]], progress: Progress | None = None
) -> Walker:
    """The walker of a world: pretrained, from the cache, or taught now by `taught_by()`, clips and the numbers of those to learn from.

    about: what the clips depend on, by which walkers are told apart.
    """
    digest = hashlib.sha256(repr((VERSION, stack, *about)).encode()).hexdigest()[:16]
    name = f"walker-{digest}.safetensors"
    for folder in (WALKERS, cache_folder()):
        if (folder / name).is_file():
            return Walker.load(folder / name, stack)
    clips, which = taught_by()
    walker = learn_to_walk(clips, stack, which, progress=progress)
    walker.save(cache_folder() / name)
    return walker


def _chunks(clips: ClipSet, long: NDArray[np.int64], stack: int, generator: Generator, most: int = 20_000) -> Tensor:
    """What is done in some of the clips' tokens, (n, stack * a)."""
    ends = clips.starts[long] + clips.lengths[long]
    starts = np.concatenate([np.arange(at + 1, end - stack + 1, stack) for at, end in zip(clips.starts[long], ends, strict=True)])
    some = starts[torch.randperm(len(starts), generator=generator)[:most].numpy()]
    return torch.tensor(np.stack([clips.actions[at : at + stack].reshape(-1) for at in some]))


def _examples(
    clips: ClipSet, long: NDArray[np.int64], stack: int, batch: int, generator: Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Looks, what was done before and after, and how many tokens before "before" the last look was: half of the time none."""
    which = long[torch.randint(len(long), (batch,), generator=generator).numpy()]
    ahead = torch.randint(-AHEAD, AHEAD, (batch,), generator=generator).clamp(min=0).numpy()
    room = (clips.lengths[which] - 2 * stack - 1) // stack  # tokens that fit after the first look and the one after it
    ahead = np.minimum(ahead, room)
    first = torch.rand(batch, generator=generator).numpy() * (clips.lengths[which] - (2 + ahead) * stack)
    now = clips.starts[which] + stack + first.astype(np.int64)  # the last frame that is seen
    looks = looks_of(np.stack([clips.frames[[at - stack, at]] for at in now]))
    begin = now + 1 + ahead * stack  # of what is to be chosen
    before, after = (
        torch.tensor(np.stack([clips.actions[at : at + stack].reshape(-1) for at in places])) for places in (begin - stack, begin)
    )
    return looks, before, after, torch.from_numpy(ahead)
