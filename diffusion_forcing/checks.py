"""Rules that many options share, and the words for breaking them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def check_divides(parts: int, whole: int, what: str) -> None:
    """Raise unless `parts` divides `whole`."""
    if parts < 1 or whole % parts:
        raise ValueError(f"{what}: {parts} must divide {whole}")


def check_counts(**counts: int) -> None:
    """Raise unless each is 1 at least."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} counts from 1; got {count}")


def check_options(options: Any, *names: str) -> None:
    """Raise unless each of the named options is 1 at least."""
    check_counts(**{name: getattr(options, name) for name in names})


def first_not_finite(values: Tensor) -> tuple[int, ...] | None:
    """Index of the first number that is NaN or infinite; None if there is none."""
    if math.isfinite(float(values.detach().sum())):  # a tenth of the time of looking at each
        return None
    bad = (~values.isfinite()).nonzero()
    return tuple(bad[0].tolist()) if len(bad) else None


def check_cond(cond: Tensor, tokens: Sequence[int], width: int | None, optional: bool) -> None:
    """Raise unless cond is of that many tokens (b, t), each with `width` finite numbers (None: any); or, where conditions are optional,
    with an indicator beside them, as `mask_cond` makes it.
    """
    if cond.ndim != 3 or cond.shape[:2] != tokens:
        raise ValueError(f"cond covers each token, {tuple(tokens)} (batch, tokens), with some numbers; got {tuple(cond.shape)}")
    marked = optional and cond.shape[-1] == (width or 0) + 1
    wrong = not marked and width not in (None, cond.shape[-1])
    # On other devices a look at values would wait for the device.
    if cond.numel() and cond.device.type == "cpu" and not torch.compiler.is_compiling():
        if at := first_not_finite(cond):
            raise ValueError(f"cond holds NaN or infinite values, the first in sequence {at[0]}, token {at[1]}: fill them, or leave the "
                             "condition out there by mask_cond(cond, given), for a model with optional_cond=True")  # fmt: skip
        # Where a condition is given, 1 - indicator is 0; where none is, all of its numbers are.
        wrong = wrong or (marked and bool(((1 - cond[..., -1:]) * cond).any()))
    if wrong:
        also = ", or what mask_cond(cond, given) makes of them" if optional else ""
        raise ValueError(f"the model reads conditions of {width} numbers a token{also}; got {cond.shape[-1]}")
