"""Networks that read a sequence of noisy tokens with their levels.

A backbone is `(x, k, cond, state=None) -> (out, state)`: out has the shape of x, and reading a sequence whole equals reading
a prefix, then the rest with the returned state. The state is a tensor, a tuple of tensors or None, batch first.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from .conv_rnn import ConvRNN
from .rnn import RNN
from .space_time import SpaceTime
from .transformer import Transformer

State = Any


class Backbone(Protocol):
    """x: (b, t, *event) noisy tokens; k: (b, t) their levels; cond: (b, t, c). Returns (out like x, state)."""

    causal: bool

    def __call__(self, x: Tensor, k: Tensor, cond: Tensor, state: State = None) -> tuple[Tensor, State]: ...


BACKBONES = {"rnn": RNN, "transformer": Transformer, "conv_rnn": ConvRNN, "space_time": SpaceTime}

__all__ = ["BACKBONES", "RNN", "Backbone", "ConvRNN", "SpaceTime", "State", "Transformer"]
