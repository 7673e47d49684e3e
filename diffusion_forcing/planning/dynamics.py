"""The law of motion, fitted to data: linear in state and force as long as no wall is touched."""

from __future__ import annotations

import torch
from torch import Tensor

from ..codecs import Chain
from ..preconditioning import LinearConstraint

SLACK = 1e-5
"""Variance by which consecutive tokens may violate the law of motion, in units of tokens."""


def fit_law_of_motion(frames: Tensor) -> Tensor:
    """(7, 4): the next state as [state, action, 1] @ law, fitted to the free flight among frames (s, t, 6)."""
    inputs, state = _transitions(frames)
    finite = torch.isfinite(inputs).all(-1) & torch.isfinite(state).all(-1)
    inputs, state = inputs[finite], state[finite]
    every = max(1, len(inputs) // 200_000)
    inputs, state = inputs[::every], state[::every]
    law = torch.linalg.lstsq(inputs, state).solution
    for _ in range(8):  # contacts with walls do not follow the law: leave out what it does not explain, and fit again
        error = (inputs @ law - state).abs()
        free = (error <= 4 * error.median(0).values + 1e-6).all(1)
        law = torch.linalg.lstsq(inputs[free], state[free]).solution
    return (law / 1e-7).round() * 1e-7  # beyond that, solvers differ from run to run; two trainings should begin alike


def in_free_flight(frames: Tensor, law: Tensor, tolerance: float = 1e-3) -> Tensor:
    """(s, t-1): whether each frame but the first obeys the law of motion; a ball that touches a wall does not."""
    inputs, state = _transitions(frames)
    return ((inputs @ law - state).abs() < tolerance).all(-1)


def _transitions(frames: Tensor) -> tuple[Tensor, Tensor]:
    """[state, action, 1] (s, t-1, 7) and the next state (s, t-1, 4)."""
    frames = frames.double()
    one = torch.ones(*frames.shape[:1], frames.shape[1] - 1, 1, dtype=torch.float64)
    return torch.cat([frames[:, :-1, 2:], frames[:, 1:, :2], one], dim=-1), frames[:, 1:, 2:]


def motion_constraint(frames: Tensor, codec: Chain) -> LinearConstraint:
    """The law of motion from the last frame of a token to the first of the next, as a linear constraint on tokens."""
    law = fit_law_of_motion(frames)
    assert codec.variance is not None
    units = torch.eye(len(codec.variance))[:, None]
    zero = codec.decode(torch.zeros_like(units[:1]))[0].double()  # decoding is linear but for this offset
    decoded = codec.decode(units).double() - zero  # (d, frames, 6)
    last, first = decoded[:, -1, 2:], decoded[:, 0]
    left = last @ law[:4]
    right = first[:, :2] @ law[4:6] - first[:, 2:]
    offset = zero[-1, 2:] @ law[:4] + zero[0, :2] @ law[4:6] + law[6] - zero[0, 2:]
    size = (left**2 + right**2).sum(0).sqrt()
    return LinearConstraint((left / size).T, (right / size).T, offset / size, torch.full((4,), SLACK))
