"""Sampling: follow a schedule matrix from noise to data, once (`sample`) or window after window (`rollout`).

A sampler sees a denoiser, `(x, k) -> Prediction`, and nothing else of a model, so guidance wraps the denoiser and the loop stays
short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from . import orders as fast
from .backbones import RNN
from .matrix import check_matrix, full_sequence
from .model import Denoise, Denoiser, DiffusionForcing, event_of
from .schedule import NoiseSchedule, expand
from .solver import Hold, Path, Seen, ddim_step

How = Literal["path", "noise", "label"]


@torch.no_grad()
def sample(
    denoise: Denoise, schedule: NoiseSchedule, x: Tensor, matrix: Tensor, *, eta: float = 0.0, hold: Hold = "keep", path: Path = "ddim",
    generator: Generator | None = None, on_step: Callable[[int, Tensor, Tensor], None] | None = None,
) -> Tensor:  # fmt: skip
    """Denoise x (b, t, *event) along a schedule matrix (m+1, t) of levels. Returns tokens at the levels of its last row.

    x holds tokens as they are at the first row: white noise at level K, known tokens at level 0 (`start` makes it).
    on_step(row, x, levels) is called after each row, for watching. path: see `ddim_step`.
    A bare `model.denoiser(...)` of a causal model is sampled by a faster order of the same operations (`fast.py`).
    """
    return _run(denoise, schedule, x, matrix, eta, hold, generator, on_step, path=path)[0]


def _run(
    denoise: Denoise, schedule: NoiseSchedule, x: Tensor, matrix: Tensor, eta: float, hold: Hold, generator: Generator | None,
    on_step: Callable[[int, Tensor, Tensor], None] | None = None, lift: int = 0,
    path: Path = "ddim",
) -> Seen:  # fmt: skip
    """Sample, and remember each token as it was at the last row in which its level was at least `lift`."""
    matrix = check_run(schedule, x, matrix, eta, hold, path)
    if isinstance(denoise, Denoiser) and denoise.model.causal and on_step is None:
        denoise.check(x, matrix[0])
        faster = fast.wavefront if isinstance(denoise.model.backbone, RNN) else fast.windowed
        return faster(denoise, x, matrix, eta=eta, hold=hold, generator=generator, lift=lift, path=path)
    seen, level = x, matrix[0]
    acting = fast._moves(matrix, hold, schedule.levels).any(1).tolist()
    for row, acts in enumerate(acting):
        k, k_next = matrix[row], matrix[row + 1]
        if acts:
            pred = denoise(x, k.expand(x.shape[:2]))
            x = ddim_step(schedule, x, pred, k, k_next, eta=eta, hold=hold, path=path, generator=generator)
            high = k_next >= lift
            seen, level = torch.where(expand(high, x), x, seen), torch.where(high, k_next, level)
        if on_step is not None:
            on_step(row + 1, x, k_next)
    return Seen(x, seen, level)


def check_run(schedule: NoiseSchedule, x: Tensor, matrix: Tensor, eta: float, hold: str, path: str = "ddim") -> Tensor:
    """The matrix on the device of x, if x, eta and hold go with it."""
    check_matrix(matrix, schedule.levels)
    if x.ndim < 3 or matrix.shape[1] != x.shape[1]:
        raise ValueError(
            f"matrix denoises {matrix.shape[1]} tokens but x has shape {tuple(x.shape)} (batch, tokens, *event); "
            f"build it with horizon={x.shape[1] if x.ndim > 1 else 1}"
        )
    if not 0 <= eta <= 1:
        raise ValueError(f"eta goes from 0 (deterministic) to 1 (ancestral); got {eta}")
    if hold not in ("keep", "resample"):
        raise ValueError(f"hold must be 'keep' or 'resample'; got {hold!r}")
    if path not in ("ddim", "angle") or (path == "angle" and eta > 0):
        raise ValueError(f"path is 'ddim' or 'angle', the latter for steps without fresh noise (eta=0); got {path!r}, eta={eta}")
    return matrix.to(x.device)


def start(
    schedule: NoiseSchedule, matrix: Tensor, shape: Sequence[int], known: Tensor | None = None, generator: Generator | None = None
) -> Tensor:
    """Tokens as they are at the first row of a matrix: `known` (b, t, *event) noised to its levels, white noise at K.

    shape: (b, *event). Where nothing is known the row should be at K, and `known` may hold anything finite.
    """
    b, *event = shape
    if known is not None and known.shape != (b, matrix.shape[1], *event):
        raise ValueError(f"known tokens must be {(b, matrix.shape[1], *event)}, as shape and matrix say; got {tuple(known.shape)}")
    noise = torch.randn(b, matrix.shape[1], *event, generator=generator, device=schedule.alpha_table.device)
    if known is None:
        known = torch.zeros_like(noise)
    first = matrix[0].to(noise.device)
    # At K the schedule leaves a last trace of signal: an absent token must not carry even that.
    absent = expand(first == schedule.levels, noise)
    return torch.where(absent, noise, schedule.add_noise(known, first, noise))


def rollout(
    model: DiffusionForcing, matrix: Tensor, length: int, context: Tensor | None = None, cond: Tensor | None = None, *,
    on_chunk: Callable[[int], None] | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Generate `length` tokens after a context, window after window. Returns the new tokens (b, length, *event).

    matrix: (m+1, h), how each window of h tokens is sampled. context: (b, c, *event) or None. cond: (b, c+length, width).
    on_chunk(n) is told of each n new tokens, for a progress bar. options: stabilization, memory, commit, wrap, eta, hold,
    generator ..., as in `stream`, which does the work and yields windows as they come.
    """
    chunks = []
    for chunk in stream(model, matrix, length, context, cond, **options):
        chunks.append(chunk)
        if on_chunk is not None:
            on_chunk(chunk.shape[1])
    return torch.cat(chunks, dim=1)


def stream(
    model: DiffusionForcing, matrix: Tensor, length: int, context: Tensor | None = None, cond: Tensor | None = None, *,
    stabilization: int = 0, how: How | None = None, memory: int | None = None, commit: int | None = None,
    wrap: Callable[[Denoise], Denoise] | None = None, eta: float = 0.0, hold: Hold = "keep", path: Path = "ddim", noise: float = 1.0,
    batch: int | None = None, generator: Generator | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """`rollout` as a stream: yields (b, <= commit, *event) tokens at a time, until `length`, in constant memory.

    stabilization: a small level k; generated tokens join the past as if they still had that much noise, so that small errors do not
    add up. how: "path" takes each token as it was on its way down, at the last rung not below k (the paper's way for RNNs);
    "noise" noises the finished token to k; "label" only says k. None: what the backbone prefers.
    memory: forget all but the last so many tokens before each window (None: the state carries on; 0: no past at all).
    commit: keep only that many tokens of each window and sample the rest anew, as in model-predictive control (None: all).
    wrap: guidance, as a function from denoiser to denoiser. batch: sequences, where neither context nor cond tells.
    noise: how large the noise is that tokens begin as: 1 samples, less keeps nearer to the middle of what may come. path: see `ddim_step`.
    cond is read as each window begins: who sees the windows come may write into it what the next ones are told.
    """
    check_matrix(matrix, model.schedule.levels)
    horizon = matrix.shape[1]
    commit = horizon if commit is None else commit
    if not 1 <= commit <= horizon:
        raise ValueError(f"commit is how many of a window's {horizon} tokens are kept, 1..{horizon}; got {commit}")
    how = how or preferred(model)
    past, given, shape = _set_out(model, length, context, cond, stabilization, how, memory, batch)
    done = 0
    while done < length:
        width = min(horizon, length - done)
        window = matrix[:, :width]
        here = None if cond is None else cond[:, given + done : given + done + width]
        keep = min(commit, width)
        yield grow(past, window, here, shape, keep, stabilization, how, wrap, eta, hold, generator, noise, path)
        done += keep


def conveyor(
    model: DiffusionForcing, ladder: Tensor, length: int, context: Tensor | None = None, cond: Tensor | None = None, *,
    slope: int, stabilization: int = 0, how: How | None = None, eta: float = 0.0, path: Path = "ddim", noise: float = 1.0,
    batch: int | None = None, generator: Generator | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """`stream` along one endless pyramid: each `slope` rows a token enters at K, all go down a rung a row, and one that is clean is
    yielded, (b, 1, *event). For causal models.

    So steps / slope tokens are denoised in one call, near ones nearly certain, far ones vague: as many operations as token after token, but
    in fewer and larger pieces. It is not the same, though: a token begins before those before it are done (docs/exactness.md).
    ladder: (steps+1,), as `NoiseSchedule.ladder` gives. The rest is as in `stream`.
    """
    if not model.causal:
        raise ValueError("tokens on a conveyor may not see those that enter after them, so the model must be causal; use stream")
    column = full_sequence(1, ladder)
    steps = len(ladder) - 1
    if slope not in range(1, steps + 1):
        raise ValueError(f"slope is how many of the {steps} rows a token is ahead of the next, 1..{steps}; got {slope}")
    if ladder[-1] != model.schedule.levels:
        raise ValueError(f"tokens enter as noise, so the ladder must end at K={model.schedule.levels}; it ends at {int(ladder[-1])}")
    how = how or preferred(model)
    past, given, shape = _set_out(model, length, context, cond, stabilization, how, None, batch)
    schedule, device = model.schedule, model.schedule.alpha_table.device
    check_run(schedule, torch.zeros(shape[0], 1, *shape[1:]), column, eta, "keep", path)
    ladder, lift = ladder.to(device), stabilization if how == "path" else 0
    x = seen = torch.zeros(shape[0], 0, *shape[1:], device=device)
    rungs = level = torch.zeros(0, dtype=torch.long, device=device)
    done = row = 0
    while done < length:
        if row % slope == 0 and done + x.shape[1] < length:
            new = noise * torch.randn(shape[0], 1, *shape[1:], generator=generator, device=device)
            x, seen = torch.cat([x, new], dim=1), torch.cat([seen, new], dim=1)
            rungs, level = F.pad(rungs, (0, 1), value=steps), F.pad(level, (0, 1), value=schedule.levels)
        here = None if cond is None else cond[:, given + done : given + done + x.shape[1]]
        k, k_next = ladder[rungs], ladder[rungs - 1]
        with torch.no_grad():
            pred = model.predict(x, k.expand(x.shape[:2]), here, past.state)
            x = ddim_step(schedule, x, pred, k, k_next, eta=eta, path=path, generator=generator)
        high = k_next >= lift
        seen, level = torch.where(expand(high, x), x, seen), torch.where(high, k_next, level)
        rungs, row = rungs - 1, row + 1
        if row == steps + done * slope:
            joins, at = _joining(schedule, Seen(x[:, :1], seen[:, :1], level[:1]), stabilization, how, generator)
            past.add(joins, None if here is None else here[:, :1], at)
            yield x[:, :1]
            x, seen, rungs, level = x[:, 1:], seen[:, 1:], rungs[1:], level[1:]
            done += 1


def preferred(model: DiffusionForcing) -> How:
    """How a model's generated tokens are best stabilized: what its backbone says, else by noise."""
    how: How = getattr(model.backbone, "stabilization", "noise")
    return how


@torch.no_grad()
def grow(
    past: Past, matrix: Tensor, cond: Tensor | None, shape: tuple[int, ...], keep: int, stabilization: int = 0, how: How = "noise",
    wrap: Callable[[Denoise], Denoise] | None = None, eta: float = 0.0, hold: Hold = "keep", generator: Generator | None = None,
    noise: float = 1.0, path: Path = "ddim",
) -> Tensor:  # fmt: skip
    """Sample a window after a past, add its first `keep` tokens to the past, and return these. shape: (b, *event); rest as in `stream`."""
    model = past.model
    denoise: Denoise = model.denoiser(cond, past.state)
    if wrap is not None:
        denoise = wrap(denoise)
    x = noise * start(model.schedule, matrix, shape, generator=generator)
    found = _run(denoise, model.schedule, x, matrix, eta, hold, generator, lift=stabilization if how == "path" else 0, path=path)
    seen, level = _joining(model.schedule, found, stabilization, how, generator)
    past.add(seen[:, :keep], None if cond is None else cond[:, :keep], level[:keep])
    return found.x[:, :keep]


def _joining(schedule: NoiseSchedule, found: Seen, stabilization: int, how: How, generator: Generator | None) -> tuple[Tensor, Tensor]:
    """Sampled tokens as they join the past, and the levels they are labelled with."""
    x, seen, level = found
    if stabilization and how != "path":
        level = torch.full_like(level, stabilization)
        if how == "noise":
            seen = schedule.add_noise(x, level, torch.randn(x.shape, generator=generator, device=x.device))
    return seen, level


class Past:
    """The committed past of a roll-out: a state that carries on, or the last `memory` tokens read afresh."""

    def __init__(self, model: DiffusionForcing, memory: int | None) -> None:
        self.model = model
        self.memory = memory
        self.state: Any = None
        self.recent: list[Tensor | None] = [None, None, None]

    @torch.no_grad()
    def add(self, x: Tensor, cond: Tensor | None, level: int | Tensor) -> None:
        if self.memory is None:
            self.state = self.model.absorb(x, cond, self.state, level=level)
            return
        k = torch.as_tensor(level, device=x.device).expand(x.shape[:2])
        new = (x, k, x.new_zeros(*x.shape[:2], 0) if cond is None else cond)
        joined = [n if old is None else torch.cat([old, n], dim=1) for old, n in zip(self.recent, new, strict=True)]
        self.recent = [part[:, max(0, part.shape[1] - self.memory) :] for part in joined]
        tokens, levels, conds = self.recent
        assert tokens is not None
        assert levels is not None
        self.state = self.model.absorb(tokens, conds, level=levels) if self.memory else None


def _set_out(
    model: DiffusionForcing, length: int, context: Tensor | None, cond: Tensor | None, stabilization: int, how: How, memory: int | None,
    batch: int | None,
) -> tuple[Past, int, tuple[int, ...]]:  # fmt: skip
    """The past that a roll-out begins with, of how many tokens it is, and (b, *event); or an error that says what is wrong."""
    if length < 1:
        raise ValueError(f"a roll-out generates at least one token; got length={length}")
    if not 0 <= stabilization <= model.schedule.levels:
        raise ValueError(f"stabilization is a level in 0..{model.schedule.levels}, a small one; got {stabilization}")
    if how not in get_args(How):
        raise ValueError(f"how is one of {', '.join(map(repr, get_args(How)))}; got {how!r}")
    if memory is not None and memory < 0:
        raise ValueError(f"memory counts tokens, or is None for all of them; got {memory}")
    given = 0 if context is None else context.shape[1]
    if cond is not None and cond.shape[1] < given + length:
        raise ValueError(
            f"cond must cover the {given} tokens of the context and the {length} to generate ({given + length}); it has {cond.shape[1]}"
        )
    b = next((len(told) for told in (context, cond) if told is not None), batch or 1)
    event = event_of(model.backbone) if context is None else tuple(context.shape[2:])
    if event is None:
        raise ValueError("without a context the shape of a token is unknown: pass one, or give the backbone config['width'] or ['event']")
    past = Past(model, memory)
    if context is not None:
        past.add(context, None if cond is None else cond[:, :given], 0)
    return past, given, (b, *event)
