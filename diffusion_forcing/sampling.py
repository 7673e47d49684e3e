"""Sampling: follow a schedule matrix from noise to data, once (`sample`) or window after window (`rollout`).

A sampler sees a denoiser, `(x, k) -> Prediction`, and nothing else of a model, so guidance wraps the denoiser and the loop stays
short. Wherever a schedule matrix is taken, a `Sampler` may stand instead, which also names the solver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from .checks import check_cond
from .matrix import check_matrix, full_sequence
from .model import Denoise, Denoiser, DiffusionForcing
from .orders import Trace, draw_noise, moves, observed, variance_of, warn_of_later_tokens, wavefront, windowed
from .sampler import Context, Hold, Sampler, as_sampler, check_all_noise
from .schedule import NoiseSchedule, expand
from .solver import LastStep, amplitudes, solver_step

OnStep = Callable[[int, Tensor, Tensor], None]  # (row, tokens, their levels)
Wrap = Callable[[Denoiser], Denoise]


@torch.no_grad()
def sample(
    denoise: Denoise, schedule: NoiseSchedule, x: Tensor, matrix: Tensor | Sampler, *, eta: float = 0.0, hold: Hold = "keep",
    generator: Generator | None = None, on_step: OnStep | None = None,
) -> Tensor:  # fmt: skip
    """Denoise x (b, t, *event) along a schedule matrix (m+1, t) of levels. Returns tokens at the levels of its last row.

    x holds tokens as they are at the first row: white noise at level K, known tokens at level 0 (`start` makes it).
    matrix: or a `Sampler`, which then says eta and hold too. on_step(row, x, levels) is called after each row, for watching.
    A bare `model.denoiser(...)` of a causal model is sampled by a faster order of the same operations (`orders`). It warns if later tokens
    are given, which such a model cannot use for earlier ones.
    """
    if isinstance(matrix, Sampler) and (eta != 0 or hold != "keep"):
        raise ValueError(f"the sampler says eta and hold itself; got eta={eta}, hold={hold!r} beside it: Sampler(eta={eta}, hold={hold!r})")
    sampler = matrix if isinstance(matrix, Sampler) else Sampler(eta=eta, hold=hold).along(matrix)
    own = type(sampler) is Sampler  # whose matrices begin at K
    if not own and isinstance(denoise, Denoiser) and denoise.model.causal and x.ndim > 1 and x.shape[1] > 1:
        warn_of_later_tokens(sampler.matrix_for(schedule, x.shape[1]), schedule.levels)
    return follow(denoise, schedule, x, sampler, generator, on_step=on_step).x


def follow(
    denoise: Denoise, schedule: NoiseSchedule, x: Tensor, sampler: Sampler, generator: Generator | None = None, *,
    on_step: OnStep | None = None, min_context_level: int = 0,
) -> Trace:  # fmt: skip
    """As `sample`, and keep each token as it was at the last row in which its level was at least `min_context_level`."""
    matrix = check_run(schedule, x, sampler.matrix_for(schedule, x.shape[1] if x.ndim > 1 else 1))
    if isinstance(denoise, Denoiser) and denoise.model.causal and on_step is None and matrix.ndim == 2:
        denoise.check(x, matrix[0])
        faster = wavefront if denoise.model.traits.wavefront else windowed
        return faster(denoise, x, matrix, sampler, generator, min_context_level)
    context, level, last = x, matrix[..., 0, :], LastStep.none(x, sampler)
    seen = observed(matrix, schedule.levels)
    mask = None if seen is None else expand(seen, x)
    for row, acts in enumerate(moves(matrix, sampler.hold, schedule.levels).any(-1).reshape(-1, matrix.shape[-2] - 1).any(0).tolist()):
        k, k_next = matrix[..., row, :], matrix[..., row + 1, :]
        if acts:
            pred = denoise(x, k.expand(x.shape[:2]))
            noise = draw_noise(x, sampler, seen, generator)
            levels = amplitudes(schedule, k, k_next, x)
            x = solver_step(x, pred, levels, sampler, noise, mask, variance_of(denoise), last)
            if last is not None:
                last.put(slice(None), pred, levels)
            high = k_next >= min_context_level
            context, level = torch.where(expand(high, x), x, context), torch.where(high, k_next, level)
        if on_step is not None:
            on_step(row + 1, x, k_next)
    return Trace(x, context, level)


def check_run(schedule: NoiseSchedule, x: Tensor, matrix: Tensor) -> Tensor:
    """The matrix on the device of x, if x goes with it."""
    check_matrix(matrix, schedule.levels)
    if matrix.ndim == 3 and len(matrix) != len(x):
        raise ValueError(f"the matrix is of {len(matrix)} sequences, one each, but x has {len(x)}; give (m+1, t) to share one")
    if x.ndim < 3 or matrix.shape[-1] != x.shape[1]:
        raise ValueError(
            f"matrix denoises {matrix.shape[-1]} tokens but x has shape {tuple(x.shape)} (batch, tokens, *event); "
            f"build it with horizon={x.shape[1] if x.ndim > 1 else 1}"
        )
    return matrix.to(x.device)


def start(
    schedule: NoiseSchedule, matrix: Tensor, shape: Sequence[int], known: Tensor | None = None, generator: Generator | None = None
) -> Tensor:
    """Tokens as they are at the first row of a matrix: what is known at its level, white noise at K.

    shape: (b, *event). known: (b, t, *event), clean tokens where the row is 0, and in between measurements with the error of that level
    (`NoiseSchedule.level_of`): measured values are noisy already, so none is added. At K it may hold anything. Returned in the schedule's
    precision, as the model's.
    """
    b, *event = shape
    tokens = matrix.shape[-1]
    if known is not None and known.shape != (b, tokens, *event):
        raise ValueError(f"known tokens must be {(b, tokens, *event)}, as shape and matrix say; got {tuple(known.shape)}")
    noise = torch.randn(b, tokens, *event, generator=generator, dtype=schedule.alpha_table.dtype, device=schedule.alpha_table.device)
    first = check_run(schedule, noise, matrix)[..., 0, :]
    absent = expand(first == schedule.levels, noise)
    if known is None:
        check_all_noise(matrix, schedule)
        return noise
    if not bool(torch.isfinite(known.masked_fill(absent, 0.0)).all()):
        raise ValueError("known tokens hold NaN or infinite values where the matrix is below level K; begin missing tokens at K")
    return torch.where(absent, noise, expand(schedule.alpha(first), noise) * known.to(noise))


def rollout(
    model: DiffusionForcing, matrix: Tensor | Sampler, length: int, context: Tensor | None = None, cond: Tensor | None = None, *,
    past: Context | None = None, wrap: Wrap | None = None, generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """Generate `length` tokens after a context, window after window. Returns the new tokens (b, length, *event).

    matrix: (m+1, h), how each window of h tokens is sampled; or a `Sampler`, for windows of h tokens `Sampler(...).over(schedule, h)`,
    else for one window of all tokens. context: (b, c, *event), c may be 0; None: none, and one sequence. cond: (b, c+length, width).
    past: how far the context reaches, and how generated tokens join it. wrap: guidance, as a function from denoiser to denoiser.
    """
    return torch.cat([*stream(model, matrix, length, context, cond, past=past, wrap=wrap, generator=generator)], dim=1)


def stream(
    model: DiffusionForcing, matrix: Tensor | Sampler, length: int, context: Tensor | None = None, cond: Tensor | None = None, *,
    past: Context | None = None, wrap: Wrap | None = None, generator: Generator | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """`rollout` as a stream: yields (b, <= commit, *event) tokens at a time, until `length`, in constant memory.

    cond is read as each window begins, so a policy that watches the windows come may write the condition of the next ones into it.
    """
    sampler = as_sampler(matrix)
    memory, shape, known = _init_rollout(model, length, context, cond, past)
    rows = check_matrix(sampler.matrix_for(model.schedule, length), model.schedule.levels)
    if rows.ndim == 3:
        raise ValueError(f"a roll-out follows one matrix (m+1, h) for all sequences, since all tokens begin as noise; got "
                         f"{tuple(rows.shape)}; give what is known of new tokens by `sample` or `smooth`")  # fmt: skip
    horizon = rows.shape[1]
    commit = horizon if past is None or past.commit is None else past.commit
    if commit > horizon:
        raise ValueError(f"commit is how many of a window's {horizon} tokens are kept, 1..{horizon}; got {commit}")
    done = 0
    while done < length:
        width = min(horizon, length - done)
        window = None if cond is None else cond[:, known + done : known + done + width]
        keep = min(commit, width)
        yield sample_window(memory, sampler.along(rows[:, :width]), shape, window, keep=keep, wrap=wrap, generator=generator)
        done += keep


def rolling(
    model: DiffusionForcing, sampler: Sampler, length: int, context: Tensor | None = None, cond: Tensor | None = None, *,
    past: Context | None = None, generator: Generator | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """Rolling diffusion, also known as FIFO diffusion: `stream` along one endless pyramid, for causal models.

    Every `sampler.slope` rows a token enters at K, all go down one rung a row, and each that is clean is yielded, (b, 1, *event). So
    steps / slope tokens are denoised in one call, near ones nearly certain, far ones uncertain: as many operations as token after token,
    in fewer and larger pieces. The samples differ, since a token starts before those ahead of it are done (docs: exactness).
    """
    steps, slope = sampler.steps, int(sampler.slope)
    if type(sampler) is not Sampler:
        raise ValueError("rolling tokens follow one endless pyramid, and no matrix of their own; give Sampler(steps=, slope=) as it is")
    if not model.causal:
        raise ValueError("tokens of a rolling window may not see those that enter later, so the model must be causal; use stream")
    if slope != sampler.slope or not 1 <= slope <= steps:
        raise ValueError(
            f"slope is how many of the {steps} rows a token is ahead of the next, a whole number 1..{steps}; got {sampler.slope}"
        )
    memory, shape, known = _init_rollout(model, length, context, cond, past)
    schedule, device = model.schedule, model.device
    check_run(schedule, torch.zeros(shape[0], 1, *shape[1:]), full_sequence(1, schedule.ladder(steps)))
    ladder, lowest, dtype = sampler.ladder(schedule).to(device), memory.min_context_level, schedule.alpha_table.dtype
    x = kept = torch.zeros(shape[0], 0, *shape[1:], dtype=dtype, device=device)
    rungs = level = torch.zeros(0, dtype=torch.long, device=device)
    last = LastStep.none(x, sampler)
    done = row = 0
    while done < length:
        if row % slope == 0 and done + x.shape[1] < length:
            new = sampler.temperature * torch.randn(shape[0], 1, *shape[1:], generator=generator, dtype=dtype, device=device)
            x, kept = torch.cat([x, new], dim=1), torch.cat([kept, new], dim=1)
            last = None if last is None else last.joined(new)
            rungs, level = F.pad(rungs, (0, 1), value=steps), F.pad(level, (0, 1), value=schedule.levels)
        window = None if cond is None else cond[:, known + done : known + done + x.shape[1]]
        k, k_next = ladder[rungs], ladder[rungs - 1]
        with torch.no_grad():
            pred = model.predict(x, k.expand(x.shape[:2]), window, memory.state)
            noise = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device) if sampler.eta > 0 else None
            levels = amplitudes(schedule, k, k_next, x)
            x = solver_step(x, pred, levels, sampler, noise, last=last)
            if last is not None:
                last.put(slice(None), pred, levels)
        high = k_next >= lowest
        kept, level = torch.where(expand(high, x), x, kept), torch.where(high, k_next, level)
        rungs, row = rungs - 1, row + 1
        if row == steps + done * slope:
            first = None if window is None else window[:, :1]
            memory.add(*memory.context_tokens(Trace(x[:, :1], kept[:, :1], level[:1]), generator), first)
            yield x[:, :1]
            x, kept, rungs, level = x[:, 1:], kept[:, 1:], rungs[1:], level[1:]
            last = None if last is None else last.of(slice(1, None))
            done += 1


@torch.no_grad()
def sample_window(
    memory: Memory, sampler: Sampler, shape: tuple[int, ...], cond: Tensor | None = None, *, keep: int | None = None,
    wrap: Wrap | None = None, generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """Sample one window after a memory, add its first `keep` tokens to the memory, and return these. shape: (b, *event)."""
    model = memory.model
    denoiser = model.denoiser(cond, memory.state)
    denoise: Denoise = denoiser if wrap is None else wrap(denoiser)
    matrix = sampler.matrix_for(model.schedule, keep or 1)
    x = sampler.temperature * start(model.schedule, matrix, shape, generator=generator)
    trace = follow(denoise, model.schedule, x, sampler.along(matrix), generator, min_context_level=memory.min_context_level)
    tokens, level = memory.context_tokens(trace, generator)
    memory.add(tokens[:, :keep], level[:keep], None if cond is None else cond[:, :keep])
    return trace.x[:, :keep]


class Memory:
    """The committed past of a roll-out: a state that carries on, or the last `context.memory` tokens read afresh."""

    def __init__(self, model: DiffusionForcing, context: Context | None = None) -> None:
        context = context or Context()
        if context.stabilization > model.schedule.levels:
            raise ValueError(f"stabilization is a level in 0..{model.schedule.levels}, a small one; got {context.stabilization}")
        self.model = model
        self.context = context if context.mode else replace(context, mode=model.traits.stabilization)
        self.state: Any = None
        self.recent: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def min_context_level(self) -> int:
        """Generated tokens join the past as they were at the last row in which their level was at least this."""
        return self.context.stabilization if self.context.mode == "path" else 0

    @torch.no_grad()
    def add(self, x: Tensor, level: int | Tensor = 0, cond: Tensor | None = None) -> None:
        """Commit tokens x (b, n, *event) at a level, one for all or (n,)."""
        memory = self.context.memory
        if memory is None:
            self.state = self.model.absorb(x, cond, self.state, level=level)
            return
        k = torch.as_tensor(level, device=x.device).expand(x.shape[:2])
        new = (x, k, self.model.read_cond(x, cond))
        joined = new if self.recent is None else tuple(torch.cat(pair, dim=1) for pair in zip(self.recent, new, strict=True))
        tokens, levels, conds = (part[:, max(0, part.shape[1] - memory) :] for part in joined)
        self.recent = tokens, levels, conds
        self.state = self.model.absorb(tokens, conds, level=levels) if memory else None

    def context_tokens(self, trace: Trace, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Sampled tokens as they join the past (b, t, *event), and the levels they are labelled with (t,)."""
        x, tokens, level = trace
        stabilization, mode = self.context.stabilization, self.context.mode
        if stabilization and mode != "path":
            level = torch.full_like(level, stabilization)
            if mode == "noise":
                noise = torch.randn(x.shape, generator=generator, device=x.device)
                tokens = self.model.schedule.add_noise(x, level, noise)
        return tokens, level


def _init_rollout(
    model: DiffusionForcing, length: int, context: Tensor | None, cond: Tensor | None, past: Context | None
) -> tuple[Memory, tuple[int, ...], int]:
    """The memory that a roll-out starts from, (b, *event), and how many tokens the context has; or an error that says what is wrong."""
    if length < 1:
        raise ValueError(f"a roll-out generates at least one token; got length={length}")
    memory = Memory(model, past)
    known = 0 if context is None else context.shape[1]
    if cond is not None and cond.shape[1] < known + length:
        raise ValueError(
            f"cond must cover the {known} tokens of the context and the {length} to generate ({known + length}); it has {cond.shape[1]}"
        )
    b = next((len(tensor) for tensor in (context, cond) if tensor is not None), 1)
    if cond is not None:
        check_cond(cond, (b, cond.shape[1]), model.cond_width, model.optional_cond)  # whole, before the first window
    event = model.traits.event if context is None else tuple(context.shape[2:])
    if event is None:
        raise ValueError("without a context the shape of a token is unknown: pass one, of no tokens if there are none (b, 0, *event)")
    if context is not None and known:
        memory.add(context, 0, None if cond is None else cond[:, :known])
    return memory, (b, *event), known
