"""Sequences in arrays: the task of a run that `fit` made. What it trained on, or the held-out part of it, stands in a file of the run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Generator, Tensor, nn

from ..codecs import Normalize
from ..files import read_tensors, write_atomically
from ..model import DiffusionForcing
from ..sampling import Sampler
from ..windows import Source, Windows
from .evaluation import Evaluation, Progress, default_sampler, evaluate_denoising, read_held_out, write_samples
from .task import Task, TaskData

LONGEST = 64
MOST_BYTES = 2**29
"""Larger arrays are not copied into a run, of which then only held-out windows are kept."""
KEPT = 1024


class Ragged(NamedTuple):
    """Sequences of any lengths, one after another. x: (sum of sizes, *event); cond: (sum of sizes, c); sizes: (n,)."""

    x: Tensor
    cond: Tensor
    sizes: Tensor

    def split(self) -> tuple[list[Tensor], list[Tensor]]:
        """Each sequence (t, *event), and the conditions (t, c) of each."""
        sizes = self.sizes.tolist()
        return list(self.x.split(sizes)), list(self.cond.split(sizes))

    def take(self, rows: Sequence[int]) -> Ragged:
        """Some of the sequences."""
        x, cond = self.split()
        return Ragged(torch.cat([x[i] for i in rows]), torch.cat([cond[i] for i in rows]), self.sizes[list(rows)])

    @property
    def bytes(self) -> int:
        return 4 * (self.x.numel() + self.cond.numel())


@dataclass(frozen=True)
class Sequences(Task):
    """Arrays that `fit` was given, and how samples of its models are shown."""

    length: int = LONGEST
    """Tokens of a window."""
    context: int = 1
    """Tokens of a held-out window that samples are given; 0: none."""
    sampler: Sampler = field(default_factory=lambda: default_sampler(True))
    """How samples are drawn."""
    file: Path = Path("data.safetensors")
    """The arrays; a relative path is within the run's folder."""
    encoded: bool = False
    """The file holds tokens as the model reads them, rather than raw data."""
    digest: str = ""
    """Of the data: a run goes on with the same."""

    main_options = ("context", "sampler.steps", "sampler.matrix", "sampler.slope")
    evaluation_options = ("context",)

    def within(self, folder: Path) -> Sequences:
        return replace(self, file=folder / self.file)

    def data(self) -> TaskData:
        train = read(self.file, "train")
        if train is None:
            raise ValueError(f"{self.file} keeps held-out windows only; to go on training, call `fit` with the data again")
        return self.encode(train, read_valid(self.file), None if self.encoded else normalizer(train.x))

    def data_as(self, codec: nn.Module, raw: bool = False) -> TaskData:
        train = read(self.file, "train")
        return self.data() if train is None or self.encoded else self.encode(train, read_valid(self.file), codec)

    def encode(self, train: Ragged, valid: Ragged, codec: Any) -> TaskData:
        """Raw sequences as windows of tokens."""
        return TaskData(_windows(train, codec, self.length), _windows(valid, codec, self.length), codec)

    def held_out(self, model: DiffusionForcing) -> Source:
        """Held-out windows in the tokens of a model."""
        return _windows(read_valid(self.file), None if self.encoded else model.codec, self.length, model.device)

    def evaluate(self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress) -> Evaluation:
        return evaluate_denoising(
            model, self.held_out(model), folder, sampler=self.sampler, context=self.context, samples=samples, seed=seed, progress=progress
        )

    def sample(self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress) -> list[Path]:
        return write_samples(
            model, self.held_out(model), folder, sampler=self.sampler, context=self.context, samples=samples, seed=seed, progress=progress
        )

    @property
    def default_samples(self) -> int:
        return 256

    def supports_device(self, device: str) -> bool:
        return True


def gather(sequences: Any, cond: Any, name: str) -> Ragged:
    """Arrays as one, checked. sequences: (n, t, *event), or a list of (t_i, *event); cond: (n, t, c), a list of (t_i, c), or None."""
    x = _arrays(sequences, name, 2)
    conditions = None if cond is None else _arrays(cond, "cond", 2)
    if conditions is not None and len(conditions) != len(x):
        raise ValueError(f"cond has {len(conditions)} sequences and {name} has {len(x)}; give one for each, (tokens, c)")
    if not x:
        raise ValueError(f"{name} is empty; give at least two sequences")
    try:
        Windows(x, 1, conditions=conditions)  # which refuses what no window can be cut from
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    conditions = [part.new_zeros(len(part), 0) for part in x] if conditions is None else conditions
    return Ragged(torch.cat(x), torch.cat(conditions), torch.tensor([len(part) for part in x]))


def _arrays(value: Any, name: str, least: int) -> list[Tensor]:
    """Sequences of tokens (t, *event), float32, of an array of them or a list."""
    whole = not isinstance(value, (list, tuple))
    if whole and not isinstance(value, (Tensor, np.ndarray)):
        raise ValueError(
            f"{name} is an array (sequences, tokens, *event), or a list of arrays (tokens, *event); got a {type(value).__name__}"
        )
    arrays = [torch.as_tensor(np.ascontiguousarray(one) if isinstance(one, np.ndarray) else one).detach().cpu()
              for one in ([value] if whole else value)]  # fmt: skip
    for one in arrays:
        if not one.is_floating_point():
            raise ValueError(f"{name} holds {one.dtype}, and tokens are real numbers: measurements and pixels as x.float(), categories as "
                             "torch.nn.functional.one_hot(x).float()")  # fmt: skip
        if one.ndim < least + whole:
            axes = "(sequences, tokens, *event)" if whole else "(tokens, *event) each"
            raise ValueError(f"{name} is {axes}; got {tuple(one.shape)}: for scalar series add a last axis, x[..., None]; for one sequence "
                             "a first, x[None]")  # fmt: skip
    return [one.float() for array in arrays for one in (array if whole else [array])]


def hold_out(data: Ragged, share: float) -> tuple[Ragged, Ragged]:
    """Sequences to train on, and a share of them to validate on, drawn once and for all."""
    number = len(data.sizes)
    if not 0 < share < 1:
        raise ValueError(f"valid is the share of sequences that are held out, between 0 and 1, or held-out data themselves; got {share}")
    if number < 2:
        raise ValueError(
            "one sequence leaves none to hold out: give valid=(held-out sequences), or cut it into several, list(x.split(100))"
        )
    order = torch.randperm(number, generator=Generator().manual_seed(0)).tolist()
    held = max(1, min(number - 1, round(share * number)))
    return data.take(sorted(order[held:])), data.take(sorted(order[:held]))


def normalizer(x: Tensor) -> Normalize:
    """Mean and scale of each number of a token that is a vector; of each channel, its first axis, for other tokens. x: (n, *event)."""
    if x.ndim == 2:
        return Normalize.fit(x)
    axes = [0, *range(2, x.ndim)]
    std = x.double().std(axes, unbiased=False, keepdim=True)[0]
    return Normalize(x.double().mean(axes, keepdim=True)[0], torch.where(std > 0, std, torch.ones_like(std)))


def kept_of(source: Source) -> Ragged:
    """Held-out windows of a source as sequences, as many as a run keeps."""
    one = read_held_out(source, 1)
    batch = read_held_out(source, max(1, min(KEPT, MOST_BYTES // (4 * one.x.numel()))))
    sizes = [int(mask.nonzero()[-1]) + 1 for mask in batch.mask]
    parts = [torch.cat([row[:size] for row, size in zip(part, sizes, strict=True)]) for part in (batch.x, batch.cond)]
    return Ragged(parts[0], parts[1], torch.tensor(sizes))


def write(file: Path, **parts: Ragged) -> None:
    """Write named parts to a file."""
    tensors = {f"{name}.{key}": value.contiguous() for name, part in parts.items() for key, value in part._asdict().items()}
    write_atomically(file, lambda path: save_file(tensors, path))


def read(file: Path, name: str) -> Ragged | None:
    """A part of a file; None if it is not there."""
    tensors = read_tensors(file)
    found = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
    return Ragged(**found) if found else None


def read_valid(file: Path) -> Ragged:
    """Held-out sequences of a file."""
    valid = read(file, "valid")
    if valid is None:
        raise ValueError(f"{file} holds no held-out sequences (valid.x, valid.cond, valid.sizes); give the run's own file")
    return valid


def digest(*parts: Ragged) -> str:
    """The same for the same data."""
    found = hashlib.sha256()
    for part in parts:
        for tensor in part:
            found.update(repr(tuple(tensor.shape)).encode())
            found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def _windows(part: Ragged, codec: Any, length: int, device: torch.device | str = "cpu") -> Windows:
    """Windows of tokens of raw sequences. device: where the codec is."""
    sequences, cond = part.split()
    if codec is not None:
        alike = len(set(part.sizes.tolist())) == 1
        batches = [torch.stack(sequences)] if alike else [one[None] for one in sequences]
        with torch.no_grad():
            sequences = [one for batch in batches for one in codec.encode(batch.to(device)).cpu()]
    return Windows(sequences, length, conditions=cond if part.cond.shape[1] else None)  # a codec may stack tokens, but no conditions
