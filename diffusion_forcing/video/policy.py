"""Action policy: from frames to the actions that come next, learned from the actions of a world's clips.

A world model follows actions. Those of a real clip were meant for that clip's place; soon a model imagines another one, and they lead
into walls. A policy looks at the generated frames and chooses: in front of a wall it turns, in a corridor it goes on. It knows nothing of
the model, so that any model, or the simulator itself, can be rolled out with the same policy.

Action chunks, the actions in the frames of one token, are quantised by k-means, and a small network predicts the class of the next chunk
(behaviour cloning over a codebook, as in Behavior Transformers). So a choice is drawn as a whole: left or right, not the mean of both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Generator, Tensor, nn

from ..checks import check_counts
from ..engine.config import TrainConfig
from ..engine.objective import Objective
from ..engine.pretrained import PRETRAINED
from ..engine.task import Progress
from ..engine.train import run_objective
from ..files import cached, read_tensors
from .clips import ClipSet

Frames = NDArray[np.uint8]
Actions = NDArray[np.float32]
PX = 32
"""Height and width of the frames that a policy reads: enough to tell how far a wall is."""
AHEAD = 8
"""Largest number of tokens that a policy chooses in a row from the same frames."""
CODES = 64
"""Size of the codebook of action chunks."""
STEPS = 1500
"""Of training: a minute or two."""
VERSION = 1
"""Of the training: a policy of another version is trained anew."""
POLICIES = PRETRAINED / "policies"
"""Policies that come with the package."""


class ActionPolicy(nn.Module):
    """Two frames and the action chunk before, to the distribution of the next action chunk.

    stack: frames a token. codebook: (n, stack * a), action chunks to choose from. width: of the hidden layers.
    """

    codebook: Tensor

    def __init__(self, stack: int, codebook: Tensor, width: int = 128) -> None:
        super().__init__()
        check_counts(stack=stack, width=width)
        if codebook.ndim != 2 or not len(codebook) or codebook.shape[1] % stack:
            raise ValueError(f"the codebook is (n, {stack} * numbers an action has), n at least 1; got {tuple(codebook.shape)}")
        self.stack = stack
        self.register_buffer("codebook", codebook.float().contiguous())
        sizes = (6, 32, 64, 64)
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairwise(sizes))
        self.frames_in = nn.Linear(sizes[-1] * (PX // 8) ** 2, width)
        self.actions_in = nn.Linear(codebook.shape[1], width)
        self.offset = nn.Embedding(AHEAD, width)
        self.hidden = nn.Linear(width, width)
        self.logits = nn.Linear(width, len(codebook))

    @property
    def width(self) -> int:
        """Numbers an action has."""
        return self.codebook.shape[1] // self.stack

    def forward(self, frames: Tensor, previous: Tensor, offset: Tensor) -> Tensor:
        """Logits (n, codes) of the next action chunk.

        frames: (n, 6, PX, PX), see `policy_frames`. previous: (n, stack * a), the action chunk before. offset: (n,), how many tokens lie
        between the frames and the chunk that is chosen.
        """
        for layer in self.convolutions:
            frames = F.silu(layer(frames))
        hidden = F.silu(self.frames_in(frames.flatten(1)) + self.actions_in(previous) + self.offset(offset))
        return self.logits(F.silu(self.hidden(hidden)))

    @torch.no_grad()
    def choose(self, frames: Frames, previous: Actions, tokens: int = 1, generator: Generator | None = None) -> Actions:
        """Actions (b, tokens * stack, a) that follow frames (b, t, px, px, 3) and the actions (b, stack, a) that led to these.

        Of the frames the last token's first and last are read, or the only one there is.
        """
        last = previous[:, -self.stack :].reshape(len(previous), -1)
        if last.shape[1] != self.codebook.shape[1]:
            raise ValueError(
                f"this policy takes actions of {self.width} numbers in each of {self.stack} frames; got shape {tuple(previous.shape)}"
            )
        pictures = policy_frames(frames[:, [-min(self.stack + 1, frames.shape[1]), -1]])
        chunk = torch.tensor(last)
        chunks = []
        for offset in range(tokens):
            logits = self(pictures, chunk, torch.full((len(chunk),), min(offset, AHEAD - 1)))
            chunk = self.codebook[torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]]
            chunks.append(chunk)
        return rearrange(torch.stack(chunks, dim=1), "b t (s a) -> b (t s) a", s=self.stack).numpy()

    def save(self, file: Path) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, file, metadata={"stack": str(self.stack)})

    @classmethod
    def load(cls, file: Path, stack: int) -> ActionPolicy:
        tensors = read_tensors(file)
        policy = cls(stack, tensors["codebook"], len(tensors["hidden.bias"]))
        policy.load_state_dict(tensors)
        return policy.eval()


def policy_frames(frames: Frames) -> Tensor:
    """Frames (b, 2, px, px, 3) as a policy reads them, (b, 6, PX, PX) from -1 to 1."""
    pictures = rearrange(torch.tensor(np.ascontiguousarray(frames)), "b t h w c -> b (t c) h w").float() / 127.5 - 1
    return F.interpolate(pictures, size=(PX, PX), mode="area")


def k_medoids(rows: Tensor, number: int, generator: Generator, rounds: int = 20) -> Tensor:
    """At most so many of the rows (n, d), to which the others are near: k-means, each mean replaced by the nearest row."""
    unique = rows.unique(dim=0)
    if len(unique) <= number:
        return unique
    centres = rows[torch.randperm(len(rows), generator=generator)[:number]]
    for _ in range(rounds):
        nearest = torch.cdist(rows, centres).argmin(1)
        counts = torch.bincount(nearest, minlength=number)
        sums = torch.zeros_like(centres).index_add_(0, nearest, rows)
        # An empty cluster begins anew at another row.
        fresh = rows[torch.randint(len(rows), (number,), generator=generator)]
        centres = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], fresh)
    return rows[torch.cdist(centres, rows).argmin(1)].unique(dim=0)


class Examples(NamedTuple):
    """frames: (n, 6, PX, PX). before, after: (n, stack * a), action chunks. offset: (n,), tokens from frames to `after`. mask: (n, 1)."""

    frames: Tensor
    before: Tensor
    after: Tensor
    offset: Tensor
    mask: Tensor


class PolicyExamples:
    """Examples of what follows what in the clips of these numbers, those that are long enough for two tokens and a frame more."""

    def __init__(self, clips: ClipSet, stack: int, which: Sequence[int]) -> None:
        if not clips.actions.shape[-1]:
            raise ValueError("these clips have no actions to learn a policy from; add --task.rollout.actions clip")
        self.clips, self.stack = clips, stack
        self.long = np.array([i for i in which if clips.lengths[i] > 2 * stack + 1], dtype=np.int64)
        if not len(self.long):
            raise ValueError(f"a policy learns what follows a token, from clips of {2 * stack + 2} frames or more; got none")

    def draw(self, size: int, generator: Generator) -> Tensor:
        """(size, 2): number of the last frame that is read, and offset of the chunk to be chosen from it, which half of the time is 0."""
        clips, stack = self.clips, self.stack
        which = self.long[torch.randint(len(self.long), (size,), generator=generator).numpy()]
        offset = torch.randint(-AHEAD, AHEAD, (size,), generator=generator).clamp(min=0).numpy()
        room = (clips.lengths[which] - 2 * stack - 1) // stack  # tokens that fit after the frames and the chunk that follows
        offset = np.minimum(offset, room)
        first = torch.rand(size, generator=generator).numpy() * (clips.lengths[which] - (2 + offset) * stack)
        return torch.from_numpy(np.stack([clips.starts[which] + stack + first.astype(np.int64), offset], axis=1))

    def read(self, drawn: Tensor) -> Examples:
        now, offset = drawn.numpy().T
        frames = policy_frames(np.stack([self.clips.frames[[at - self.stack, at]] for at in now]))
        begin = now + 1 + offset * self.stack  # of the chunk to be chosen
        return Examples(frames, self._chunks(begin - self.stack), self._chunks(begin), drawn[:, 1], torch.ones(len(drawn), 1))

    def chunks(self, generator: Generator, most: int = 20_000) -> Tensor:
        """Action chunks (n, stack * a) of the clips, at most so many."""
        clips, stack = self.clips, self.stack
        ends = clips.starts[self.long] + clips.lengths[self.long]
        begins = [np.arange(at + 1, end - stack + 1, stack) for at, end in zip(clips.starts[self.long], ends, strict=True)]
        starts = np.concatenate(begins)
        return self._chunks(starts[torch.randperm(len(starts), generator=generator)[:most].numpy()])

    def _chunks(self, places: NDArray[np.int64]) -> Tensor:
        return torch.tensor(np.stack([self.clips.actions[at : at + self.stack].reshape(-1) for at in places]))


class Augmentation(NamedTuple):
    """Random contrast and brightness (n, 1, 1, 1), and noise (n, 6, PX, PX), of frames: generated ones are off in these."""

    gain: Tensor
    shift: Tensor
    noise: Tensor


@dataclass(frozen=True)
class PolicyObjective(Objective):
    """Cross-entropy of the next action chunk, replaced by the nearest one of the codebook."""

    def draw_batch(self, model: ActionPolicy, source: PolicyExamples, windows: Tensor, generator: Generator) -> Augmentation:
        gain, shift, scale = torch.rand(3, len(windows), 1, 1, 1, generator=generator)
        noise = 0.05 * scale * torch.randn(len(windows), 6, PX, PX, generator=generator)
        return Augmentation(1 + 0.2 * (2 * gain - 1), 0.1 * (2 * shift - 1), noise)

    def __call__(self, model: ActionPolicy, batch: Examples, drawn: Augmentation) -> Tensor:
        codes = torch.cdist(batch.after, model.codebook).argmin(1)
        logits = model(batch.frames * drawn.gain + drawn.shift + drawn.noise, batch.before, batch.offset)
        return F.cross_entropy(logits, codes, reduction="none")[:, None]


def fit_policy(
    clips: ClipSet, stack: int, which: Sequence[int] | None = None, *, steps: int | None = None, batch: int = 128, lr: float = 2e-3,
    seed: int = 0, progress: Progress | None = None,
) -> ActionPolicy:  # fmt: skip
    """Train a policy on the actions of clips, of those numbered `which` or of all. steps: STEPS if not given."""
    examples = PolicyExamples(clips, stack, range(len(clips.starts)) if which is None else which)
    generator = Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = ActionPolicy(stack, k_medoids(examples.chunks(generator), CODES, generator))
    config = TrainConfig(
        steps=STEPS if steps is None else steps, batch=batch, lr=lr, weight_decay=0.01, warmup=20, clip_norm=1e3, ema=0.0, seed=seed
    )
    run_objective(policy, examples, PolicyObjective(), config, progress=progress, label="training the action policy")
    return policy.eval()


def load_policy(
    key: Sequence[Any], stack: int, training_clips: Callable[[], tuple[ClipSet, Sequence[int]]], progress: Progress | None = None
) -> ActionPolicy:
    """The policy of a world: pretrained, from the cache, or trained now on `training_clips()`, clips and the numbers of those to use.

    key: what the clips depend on.
    """
    digest = hashlib.sha256(repr((VERSION, stack, *key)).encode()).hexdigest()[:16]
    name = f"policy-{digest}.safetensors"
    if (POLICIES / name).is_file():
        return ActionPolicy.load(POLICIES / name, stack)

    def make(path: Path) -> None:
        clips, which = training_clips()
        fit_policy(clips, stack, which, progress=progress).save(path)

    return ActionPolicy.load(cached(name, make), stack)
