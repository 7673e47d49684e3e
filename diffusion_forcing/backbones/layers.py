"""Parts shared by the backbones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


class LevelEmbedding(nn.Module):
    """Noise level of each token to a vector: sines of the level, looked up in a table, then a small network.

    Levels are rescaled to 0..1000 first, so that the same frequencies serve any K.
    """

    table: Tensor

    def __init__(self, width: int, levels: int, sines: int = 64) -> None:
        super().__init__()
        frequencies = torch.exp(-math.log(10_000) * torch.arange(sines) / sines)
        angle = torch.linspace(0, 1000, levels + 1)[:, None] * frequencies
        self.register_buffer("table", torch.cat([angle.sin(), angle.cos()], dim=-1), persistent=False)
        self.net = nn.Sequential(nn.Linear(2 * sines, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, k: Tensor) -> Tensor:
        """k: (b, t) int. Returns (b, t, width)."""
        return self.net(self.table[k])


class RMSNorm(nn.RMSNorm):
    """torch's, whose fused version in mixed precision wants the weight in the format of x."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class ResidualMLP(nn.Module):
    """x + MLP(norm(x)): the residual network's block without the convolutions."""

    def __init__(self, width: int, expansion: int = 2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, expansion * width)
        self.down = nn.Linear(expansion * width, width)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Rotary(nn.Module):
    """Rotary positions: queries and keys are rotated by an angle proportional to their position, so scores see distances only."""

    frequencies: Tensor

    def __init__(self, head_width: int, base: float = 10_000.0) -> None:
        super().__init__()
        frequencies = base ** (-torch.arange(0, head_width, 2) / head_width)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """x: (b, heads, t, head_width), its first token standing at position `start`."""
        position = torch.arange(start, start + x.shape[-2], device=x.device)
        angle = position[:, None] * self.frequencies
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Modulated(nn.Module):
    """What blocks of attention and MLP share: a plain normalisation, and shift, scale and gate of both by the level of each token."""

    base: Tensor

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden, elementwise_affine=False)
        self.modulation = nn.Parameter(torch.zeros(6 * hidden))
        self.register_buffer("base", torch.tensor([0.0, 1, 1, 0, 1, 1])[:, None], persistent=False)

    def modulations(self, level: Sequence[Tensor]) -> list[Tensor]:
        """Modulations of the tokens' levels plus this block's own; scales and gates count from 1."""
        own = self.modulation.unflatten(0, (6, -1)) + self.base
        return [shared + bias for shared, bias in zip(level, own, strict=True)]


def width_of(event: Sequence[int], network: str) -> int:
    """Numbers of a token, for networks that read vectors."""
    if len(event) != 1:
        raise ValueError(f"{network} reads tokens that are vectors; these have shape {tuple(event)}: use SpaceTime or ConvRNN")
    return event[0]


def zeroed(layer: Layer) -> Layer:
    """A layer that outputs zeros at first."""
    nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
