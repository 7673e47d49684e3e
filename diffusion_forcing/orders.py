"""The same samples, sooner: orders of work that a causal model allows. Each gives the numbers of the plain loop.

Cell (m, t) of the grid, row m and token t, needs only the latent of (m, t-1) and the token of (m-1, t). So all cells of an
anti-diagonal are independent (`wavefront`), tokens still waiting at the right need not be read, and tokens settled at the left
need be read only once (`windowed`, and `wavefront` too).
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from .matrix import check_matrix
from .model import Denoise, Denoiser
from .sampler import Hold, Sampler
from .schedule import expand
from .solver import Amplitudes, LastStep, amplitudes, solver_step


class Trace(NamedTuple):
    """x: sampled tokens (b, t, *event); context, level: the tokens as later ones are to see them, and the level (t,) to label them with."""

    x: Tensor
    context: Tensor
    level: Tensor


def windowed(
    denoise: Denoiser, x: Tensor, matrix: Tensor, sampler: Sampler, generator: Generator | None = None, min_context_level: int = 0
) -> Trace:
    """For a causal backbone with a state: predict only from the first token not yet settled to the last one that moves.

    A single token always has the same past, which a backbone may prefill.
    """
    model = denoise.model
    cond, state = denoise.bound(len(x))
    cond = model.read_cond(x, cond)
    if x.shape[1] == 1 and model.traits.prefills:
        state = model.backbone.prefill(x, state, cond)  # type: ignore[attr-defined]
    moving, seen = moves(matrix, sampler.hold, model.schedule.levels), observed(matrix, model.schedule.levels)
    settled, last_step = _settled(moving), LastStep.none(x, sampler)
    x, context, level = x.clone(), x.clone(), matrix[0].clone()
    done = 0
    for row, k in enumerate(matrix[:-1]):
        last = moving[row].nonzero()
        if len(last) == 0:
            continue
        k_next, first, end = matrix[row + 1], int(settled[row]), int(last[-1]) + 1
        if first > done:
            known = slice(done, first)
            state = model.absorb(x[:, known], cond[:, known], state, level=k[known])
            done = first
        noise = draw_noise(x, sampler, seen, generator)
        now = slice(done, end)
        pred = model.predict(x[:, now], k[now].expand(len(x), -1), cond[:, now], state)
        levels = amplitudes(model.schedule, k[now], k_next[now], x[:, now])
        noise = None if noise is None else noise[:, now]
        before = None if last_step is None else last_step.of(now)
        x[:, now] = solver_step(x[:, now], pred, levels, sampler, noise, _mask(seen, now, x), variance_of(denoise), before)
        if last_step is not None:
            last_step.put(now, pred, levels)
        high = k_next[now] >= min_context_level
        context[:, now] = torch.where(expand(high, x), x[:, now], context[:, now])
        level[now] = torch.where(high, k_next[now], level[now])
    return Trace(x, context, level)


def wavefront(
    denoise: Denoiser, x: Tensor, matrix: Tensor, sampler: Sampler, generator: Generator | None = None, min_context_level: int = 0
) -> Trace:
    """For recurrent cells: all cells that depend on nothing unfinished at once. M+T-1 steps where the plain loop takes M*T."""
    model = denoise.model
    rnn: Any = model.backbone
    schedule, scale = model.schedule, model.preconditioning.scale
    cond, state = denoise.bound(len(x))
    b, t = x.shape[:2]
    moving, seen = moves(matrix, sampler.hold, schedule.levels), observed(matrix, schedule.levels)
    # z[:, i] is the latent before token i, as the latest row to reach it left it.
    z = rnn.initial_state(b * (t + 1)).unflatten(0, (b, t + 1)).clone()
    if state is not None:
        z[:, 0] = state
    cond = model.read_cond(x, cond)
    x, context, level = x.clone(), x.clone(), matrix[0].clone()
    noises: dict[int, Tensor | None] = {}
    last_step = LastStep.none(x, sampler)
    drawn = 0
    acting = moving.any(1).tolist()
    waves = _waves(moving)
    if not waves:
        return Trace(x, x, matrix[-1])
    # What depends on levels alone is looked up for all cells at once, wave after wave in one row.
    all_rows, all_tokens = torch.cat([rows for rows, _ in waves]), torch.cat([tokens for _, tokens in waves])
    sizes = [len(rows) for rows, _ in waves]
    k_all, k_next_all = matrix[all_rows, all_tokens], matrix[all_rows + 1, all_tokens]
    known, which = k_all.unique(return_inverse=True)
    embedded = rnn.level(known)[which].split(sizes)  # a few levels, many cells: embed each level once
    levels = [Amplitudes(*parts) for parts in zip(*(part.split(sizes) for part in amplitudes(schedule, k_all, k_next_all, x)), strict=True)]
    for wave, (rows, tokens) in enumerate(waves):
        while drawn <= int(rows.max()):  # rows draw their noise in order, as the plain loop does
            if acting[drawn]:
                noises[drawn] = draw_noise(x, sampler, seen, generator)
            drawn += 1
        now, at = x[:, tokens], levels[wave]
        feature = rnn.encode(scale(now, at.alpha, at.sigma), embedded[wave], cond[:, tokens])
        feature, after = rnn.step(feature.flatten(0, 1), z[:, tokens].flatten(0, 1))
        pred = model.prediction_from(rnn.predict(feature.unflatten(0, (b, -1))), now, at.alpha, at.sigma)
        noise = None
        if sampler.eta > 0 or sampler.hold == "resample" or seen is not None:
            noise = torch.stack([noises[r][:, i] for r, i in zip(rows.tolist(), tokens.tolist(), strict=True)], dim=1)  # type: ignore[index]
            noises = {r: kept for r, kept in noises.items() if r >= int(rows.min())}
        before = None if last_step is None else last_step.of(tokens)
        stepped = solver_step(now, pred, at, sampler, noise, _mask(seen, tokens, x), variance_of(denoise), before)
        if last_step is not None:
            last_step.put(tokens, pred, at)
        z[:, tokens + 1] = after.unflatten(0, (b, -1))
        x[:, tokens] = stepped
        if min_context_level:
            k_next = matrix[rows + 1, tokens]
            high = k_next >= min_context_level
            context[:, tokens] = torch.where(expand(high, stepped), stepped, context[:, tokens])
            level[tokens] = torch.where(high, k_next, level[tokens])
    return Trace(x, context, level) if min_context_level else Trace(x, x, matrix[-1])


def moves(matrix: Tensor, hold: Hold, levels: int) -> Tensor:
    """(m, t) or (b, m, t), True where a step gives the token a new value."""
    now, first = matrix[..., :-1, :], matrix[..., :1, :]
    falls = matrix[..., 1:, :] < now
    if hold == "keep":
        return falls
    return falls | ((now > 0) & (now < levels) & (first == levels))  # an observation is never resampled


def observed(matrix: Tensor, levels: int) -> Tensor | None:
    """(t,) or (b, t), True for tokens that begin at a level in between, as observations with error; None if there are none."""
    first = matrix[..., 0, :]
    mask = (first > 0) & (first < levels)
    return mask if bool(mask.any()) else None


def warn_of_later_tokens(matrix: Tensor, levels: int) -> None:
    """Warn where tokens are given, below level K in the first row, after one that is still to be denoised: no use to a causal model."""
    first = check_matrix(matrix, levels)[..., 0, :]
    open_before = (matrix[..., -1, :] < first).long().cumsum(-1)[..., :-1] > 0
    unused = (first[..., 1:] < levels) & open_before
    if bool(unused.any()):
        token = 1 + int(unused.nonzero()[0, -1])
        warnings.warn(
            f"token {token} is given, but this model is causal: it cannot use token {token} for the tokens before it that are still to be "
            "denoised. Use a bidirectional backbone (causal=False), or `infill`, which weighs many samples by how well later tokens follow",
            stacklevel=4,  # of whoever called `sample`, beyond its decorator
        )


def draw_noise(x: Tensor, sampler: Sampler, seen: Tensor | None, generator: Generator | None) -> Tensor | None:
    """Noise of one row, like x, where a step draws any."""
    if sampler.eta == 0 and sampler.hold == "keep" and seen is None:
        return None
    return torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)


def _settled(moving: Tensor) -> Tensor:
    """(m,), how many tokens from the left move neither in this row nor in any later one."""
    later = moving.flip(0).cummax(0).values.flip(0)
    return (~later).long().cumprod(1).sum(1)


def _waves(moving: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Cells (rows, tokens) to compute together, wave after wave.

    A row computes from its first token that moves, or whose latent is out of date, to its last one that moves. A cell waits for the
    latent at its left, for its own token's last step, and for the reader of the latent that it is about to replace.
    """
    m, t = moving.shape
    where = moving.cpu().nonzero()
    spans: dict[int, list[int]] = {}
    for row, token in where.tolist():
        spans.setdefault(row, []).append(token)
    written, read = [0] * (t + 1), [0] * (t + 1)  # by latent: z[i] is before token i
    stepped = [0] * t
    valid = 0  # latents before tokens 0..valid are those of the current tokens
    waves: list[tuple[list[int], list[int]]] = []
    for row in range(m):
        span = spans.get(row)
        if not span:
            continue
        for token in range(min(valid, span[0]), span[-1] + 1):
            wave = max(written[token] + 1, stepped[token] + 1, read[token + 1])
            written[token + 1] = stepped[token] = read[token] = wave
            while len(waves) < wave:
                waves.append(([], []))
            waves[wave - 1][0].append(row)
            waves[wave - 1][1].append(token)
        valid = span[0]
    device = moving.device
    return [(torch.tensor(rows, device=device), torch.tensor(tokens, device=device)) for rows, tokens in waves]


def _mask(seen: Tensor | None, tokens: slice | Tensor, x: Tensor) -> Tensor | None:
    return None if seen is None else expand(seen[tokens], x)


def variance_of(denoise: Denoise) -> Tensor | float:
    """Variance of clean tokens, as far as a denoiser's model knows it: 1 otherwise."""
    variance = denoise.model.variance if isinstance(denoise, Denoiser) else None
    return 1.0 if variance is None else variance
