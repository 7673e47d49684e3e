"""Schedule matrices: which level each token has at each step of sampling. Rows are steps, columns tokens.

All four are one idea: token i waits `delay[i]` rungs at the top of the ladder, then goes down one rung a row.
Conditioning is a column too: a known token is a column of zeros, an absent one a column left at K, an uncertain observation a column
held at the level of its noise (`pin`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor


def full_sequence(horizon: int, ladder: Tensor) -> Tensor:
    """All tokens go down together. Returns (steps+1, horizon)."""
    return staggered(torch.zeros(_check_horizon(horizon)), ladder)


def autoregressive(horizon: int, ladder: Tensor) -> Tensor:
    """Each token starts when the one before it is clean. Returns (horizon*steps+1, horizon)."""
    return staggered(torch.arange(_check_horizon(horizon)) * (len(ladder) - 1), ladder)


def pyramid(horizon: int, ladder: Tensor, slope: float = 1.0) -> Tensor:
    """Near future certain, far future uncertain: token i starts i*slope rows late.

    slope 0 is full_sequence, slope `steps` is autoregressive.
    """
    return staggered(torch.arange(_check_horizon(horizon)) * _check_slope(slope), ladder)


def trapezoid(horizon: int, ladder: Tensor, slope: float = 1.0) -> Tensor:
    """Certain at both ends, uncertain in the middle: for in-filling between a known start and a known end."""
    i = torch.arange(_check_horizon(horizon))
    return staggered(torch.minimum(i, horizon - 1 - i) * _check_slope(slope), ladder)


def staggered(delay: Tensor, ladder: Tensor) -> Tensor:
    """Token i waits delay[i] rows at the top of the ladder, then goes down one rung a row.

    delay: (t,), rounded to whole rows. ladder: (steps+1,) ascending from 0. Returns (steps + max(delay) + 1, t).
    """
    _check_ladder(ladder)
    delay = delay.double().round().long()
    steps = len(ladder) - 1
    row = torch.arange(steps + int(delay.max()) + 1)
    rung = steps - (row[:, None] - delay[None, :])
    return ladder[rung.clamp(0, steps)]


def pin(matrix: Tensor, tokens: int | slice | Sequence[int] | Tensor, level: int = 0) -> Tensor:
    """Hold `tokens` at one level from first row to last: 0 known, K absent, in between uncertain. Returns a new matrix.

    matrix: (m+1, t), or (b, m+1, t), all of whose sequences are pinned alike.
    """
    if level < 0:
        raise ValueError(f"a token is pinned at a level >= 0; got {level}")
    pinned = matrix.clone()
    try:
        pinned[..., tokens] = level
    except IndexError as error:
        raise ValueError(f"cannot pin tokens {tokens!r}: the matrix has {matrix.shape[-1]} tokens, 0..{matrix.shape[-1] - 1}") from error
    return pinned


def start_at(matrix: Tensor, levels: Tensor) -> Tensor:
    """Let each token begin at the level of what is known of it: 0 known, K absent, in between an observation with error (`observe`).

    matrix: (m+1, t) from K down. levels: (t,), or (b, t) for other observations in each sequence. Each column is scaled to end where it did
    and to begin at its level, in as many steps. Returns (m+1, t) or (b, m+1, t).
    """
    if levels.ndim not in (1, 2) or levels.shape[-1] != matrix.shape[-1] or not levels.numel():
        raise ValueError(f"levels are one for each of the {matrix.shape[-1]} tokens, (t,) or (b, t); got {tuple(levels.shape)}")
    top = int(matrix.max())
    if levels.is_floating_point() or int(levels.min()) < 0 or int(levels.max()) > top:
        raise ValueError(f"levels are integers in 0..{top}; got {levels.dtype}, {levels.min().item()}..{levels.max().item()}")
    scaled = (matrix.double() * levels.to(matrix.device)[..., None, :].double() / max(top, 1)).round().long()
    other = (scaled[..., 0, :] != levels.to(matrix.device)).nonzero()
    if len(other):
        token = int(other[0, -1])
        raise ValueError(f"start_at takes a matrix whose tokens all begin at its top, {top}, but token {token} begins at "
                         f"{int(matrix[..., 0, token].min())}: do not pin it before, give its level in levels")  # fmt: skip
    return scaled


def check_matrix(matrix: Tensor, levels: int) -> Tensor:
    """Return the matrix (m+1, t) or (b, m+1, t) if a sampler can follow it: levels in {0..K}, no column ever rising, two rows at least."""
    if not isinstance(matrix, Tensor) or matrix.ndim not in (2, 3):
        shape = tuple(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
        raise ValueError(f"a schedule matrix is a 2-d tensor (rows: steps, columns: tokens), or 3-d with one a sequence; got {shape}")
    if matrix.is_floating_point() or matrix.dtype == torch.bool:
        raise ValueError(f"a schedule matrix holds integer levels; got {matrix.dtype}; convert with .round().long()")
    if matrix.shape[-2] < 2 or matrix.shape[-1] < 1:
        raise ValueError(f"a schedule matrix needs two rows (start and end) and one token at least; got {tuple(matrix.shape)}")
    low, high = int(matrix.min()), int(matrix.max())
    if low < 0 or high > levels:
        raise ValueError(f"levels of a schedule matrix must lie in 0..{levels}; got {low}..{high}")
    rises = (matrix.diff(dim=-2) > 0).nonzero()
    if len(rises):
        row, token = rises[0, -2:].tolist()
        column = (matrix[int(rises[0, 0])] if matrix.ndim == 3 else matrix)[:, token]
        raise ValueError(
            f"a token is never noised again while sampling, but token {token} rises from level {column[row]} to {column[row + 1]} "
            f"between rows {row} and {row + 1}; sort each column in descending order"
        )
    return matrix


MatrixName = Literal["full_sequence", "autoregressive", "pyramid", "trapezoid"]
MATRICES: dict[str, Callable[..., Tensor]] = {
    "full_sequence": full_sequence, "autoregressive": autoregressive, "pyramid": pyramid, "trapezoid": trapezoid,
}  # fmt: skip


def _check_horizon(horizon: int) -> int:
    if horizon < 1:
        raise ValueError(f"a schedule matrix needs at least one token; got horizon={horizon}")
    return horizon


def _check_slope(slope: float) -> float:
    if not 0 <= slope < float("inf"):
        raise ValueError(f"slope is the delay from one token to the next, in rows, and cannot be negative; got {slope}")
    return slope


def _check_ladder(ladder: Tensor) -> None:
    if ladder.ndim != 1 or len(ladder) < 2 or ladder[0] != 0 or not (ladder.diff() > 0).all():
        raise ValueError(f"a ladder is ascending levels from 0 to K, as NoiseSchedule.ladder(steps) gives; got {ladder.tolist()[:8]}")
