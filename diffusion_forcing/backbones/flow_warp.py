"""A guess of the next token: the last frame before it, each pixel fetched from where it probably was.

Much of a film is what was there already, elsewhere. Attention between patches moves them whole; this moves pixels. From the token before,
and whatever is told of the way from there (actions), a small network says for each frame to come and each of its pixels where in the last
frame it was; what is found there, as a token again, is a guess that the backbone reads beside the noisy token. What it shows nothing of,
because it was out of sight, is said by a mask.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor, nn

from ..checks import check_counts
from .layers import zeroed

FINE = 4
"""Directions a side of a place: a grid of them lies between that of the tokens and that of the pixels."""


class Moved(nn.Module):
    """Tokens (n, c, h, w) of `stack` frames in patches of `patch` px to a guess of the tokens that follow, and a mask.

    known: width of the vector that tells of the past's level and of the actions. width: of the small network that points.
    """

    mean: Tensor
    spread: Tensor
    base: Tensor

    def __init__(self, event: tuple[int, int, int], known: int, stack: int, patch: int, width: int = 96) -> None:
        super().__init__()
        check_counts(stack=stack, patch=patch)
        c, height, width_ = event
        self.stack, self.patch = stack, patch
        # Of tokens, by which and without which the backbone reads them.
        self.register_buffer("mean", torch.zeros(event))
        self.register_buffer("spread", torch.ones(event))
        self.draw = nn.Linear(c, 3 * patch * patch, bias=False)
        self.read = nn.Linear(3 * stack * patch * patch, c, bias=False)
        self.trust = zeroed(nn.Linear(known, c))
        nn.init.constant_(self.trust.bias, 3.0)
        self.look = nn.Conv2d(c, width, 3, padding=1)
        self.place = nn.Parameter(0.02 * torch.randn(width, height, width_))
        self.hear = nn.Linear(known, 4 * width)
        self.think = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.point = zeroed(nn.Conv2d(width, 2 * stack * FINE * FINE, 3, padding=1))
        rows, columns = ((torch.arange(side * patch) * 2 + 1) / (side * patch) - 1 for side in (height, width_))
        across, down = torch.meshgrid(columns, rows, indexing="xy")
        self.register_buffer("base", torch.stack([across, down], dim=-1), persistent=False)  # (h patch, w patch, 2)

    @torch.no_grad()
    def fit(self, codec: Any, variance: Tensor | None) -> None:
        """Draw and read frames as `Patches` does: the guess is then the last frame, standing still, until it has learned to move.

        variance: (c, h, w), by whose root tokens are divided before the backbone reads them; None: they are not.
        """
        last = rearrange(codec.basis * codec.scale, "(s p q a) c -> s (p q a) c", s=self.stack, p=self.patch, q=self.patch)[-1]
        self.draw.weight.copy_(last)
        self.read.weight.copy_((codec.basis / codec.scale).T)
        self.mean.copy_(codec.mean)
        if variance is not None:
            self.spread.copy_(variance.sqrt())

    def forward(self, past: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """past: (n, c, h, w), the token before; known: (n, known). Returns the guess (n, c, h, w) and (n, stack, h, w), how much of it was
        in sight.
        """
        p = self.patch
        believed = past * self.trust(known).sigmoid()[:, :, None, None]
        pixels = self.draw(rearrange(believed * self.spread + self.mean, "n c h w -> n h w c"))
        frame = rearrange(pixels, "n h w (p q a) -> n a (h p) (w q)", p=p, q=p)
        found = self.carry(frame, past, known)
        colours, seen = found.split([3, 1], dim=1)
        tokens = self.read(rearrange(colours, "n a (s h p) (w q) -> n h w (s p q a)", s=self.stack, p=p, q=p))
        mask = reduce(seen, "n 1 (s h p) (w q) -> n s h w", "mean", s=self.stack, p=p, q=p)
        return (rearrange(tokens, "n h w c -> n c h w") - self.mean) / self.spread, mask

    def carry(self, frame: Tensor, past: Tensor, known: Tensor) -> Tensor:
        """frame: (n, 3, h patch, w patch), the last one before the tokens that follow past (n, c, h, w).

        Returns (n, 4, stack h patch, w patch): colours of the frames to come, one above the other, as far as they are found there, and how
        much of each pixel was in sight.
        """
        sight = torch.cat([frame, torch.ones_like(frame[:, :1])], dim=1)
        where = rearrange(self.base + self.flow(past, known), "n s h w d -> n (s h) w d")
        return F.grid_sample(sight, where, padding_mode="zeros", align_corners=False)

    def flow(self, past: Tensor, known: Tensor) -> Tensor:
        """(n, stack, h patch, w patch, 2), how far away each pixel of the frames to come was, in half pictures: across, down."""
        entering, scale, shift, leaving = self.hear(F.silu(known))[:, :, None, None].chunk(4, dim=1)
        first, second, last = self.think
        hidden = self.look(past) + self.place + entering
        hidden = hidden + second(F.silu(first(F.silu(hidden)) * (1 + scale) + shift))
        hidden = F.silu(last(F.silu(hidden)) * (1 + leaving))
        flow = F.pixel_shuffle(self.point(hidden), FINE)
        flow = F.interpolate(flow, size=self.base.shape[:2], mode="bilinear", align_corners=False)
        return rearrange(flow, "n (s d) h w -> n s h w d", d=2)
