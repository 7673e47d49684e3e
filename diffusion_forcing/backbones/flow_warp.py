"""A prediction of the next token by backward warping: the last frame before it, each pixel fetched from where it probably was.

Much of a film was in the picture before, elsewhere. Attention between patches moves whole patches; warping moves pixels. From the token
before and its embedding (noise level, actions) a small network predicts a flow for each frame to come. The last frame, sampled along
it and encoded again, is a prediction that the backbone reads beside the noisy token, with a mask of what had been out of sight.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor, nn

from ..checks import check_counts
from .layers import zeroed

FLOW_PER_PLACE = 4
"""Flow vectors along each side of a place: the flow's grid lies between that of the tokens and that of the pixels."""


class FlowWarp(nn.Module):
    """Tokens (n, c, h, w), each of `stack` frames in patches of `patch` px, to a prediction of the tokens that follow, and a mask.

    embedding: width of the vector that carries the past's noise level and the condition. width: channels of the flow network.
    """

    mean: Tensor
    std: Tensor
    base: Tensor

    def __init__(self, event: tuple[int, int, int], embedding: int, stack: int, patch: int, width: int = 96) -> None:
        super().__init__()
        check_counts(stack=stack, patch=patch)
        c, height, width_ = event
        self.stack, self.patch = stack, patch
        # Tokens as the codec has them are std * x + mean, where x is what the backbone reads.
        self.register_buffer("mean", torch.zeros(event))
        self.register_buffer("std", torch.ones(event))
        self.to_pixels = nn.Linear(c, 3 * patch * patch, bias=False)
        self.to_tokens = nn.Linear(3 * stack * patch * patch, c, bias=False)
        self.gate = zeroed(nn.Linear(embedding, c))
        nn.init.constant_(self.gate.bias, 3.0)
        self.conv_in = nn.Conv2d(c, width, 3, padding=1)
        self.position = nn.Parameter(0.02 * torch.randn(width, height, width_))
        self.modulate = nn.Linear(embedding, 4 * width)
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.flow_out = zeroed(nn.Conv2d(width, 2 * stack * FLOW_PER_PLACE**2, 3, padding=1))
        rows, columns = ((torch.arange(side * patch) * 2 + 1) / (side * patch) - 1 for side in (height, width_))
        across, down = torch.meshgrid(columns, rows, indexing="xy")
        self.register_buffer("base", torch.stack([across, down], dim=-1), persistent=False)  # (h patch, w patch, 2)

    @torch.no_grad()
    def fit(self, codec: Any, variance: Tensor | None) -> None:
        """Decode and encode frames as a codec of patches does: until the flow is learned, the prediction is the last frame, standing still.

        variance: (c, h, w), by whose root tokens are divided before the backbone reads them; None: they are not.
        """
        last = rearrange(codec.basis * codec.scale, "(s p q a) c -> s (p q a) c", s=self.stack, p=self.patch, q=self.patch)[-1]
        self.to_pixels.weight.copy_(last)
        self.to_tokens.weight.copy_((codec.basis / codec.scale).T)
        self.mean.copy_(codec.mean)
        if variance is not None:
            self.std.copy_(variance.sqrt())

    def forward(self, past: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """past: (n, c, h, w), the token before; embedding: (n, width). Returns the prediction (n, c, h, w) and the mask (n, stack, h, w),
        the share of each place that was in sight.
        """
        p = self.patch
        gated = past * self.gate(embedding).sigmoid()[:, :, None, None]
        pixels = self.to_pixels(rearrange(gated * self.std + self.mean, "n c h w -> n h w c"))
        frame = rearrange(pixels, "n h w (p q a) -> n a (h p) (w q)", p=p, q=p)
        warped = self.warp(frame, past, embedding)
        colours, visible = warped.split([3, 1], dim=1)
        tokens = self.to_tokens(rearrange(colours, "n a (s h p) (w q) -> n h w (s p q a)", s=self.stack, p=p, q=p))
        mask = reduce(visible, "n 1 (s h p) (w q) -> n s h w", "mean", s=self.stack, p=p, q=p)
        return (rearrange(tokens, "n h w c -> n c h w") - self.mean) / self.std, mask

    def warp(self, frame: Tensor, past: Tensor, embedding: Tensor) -> Tensor:
        """frame: (n, 3, h patch, w patch), the last one before the tokens that follow past (n, c, h, w).

        Returns (n, 4, stack h patch, w patch), the frames to come one above the other: the colours fetched from `frame`, and how much of
        each pixel was in sight there.
        """
        source = torch.cat([frame, torch.ones_like(frame[:, :1])], dim=1)
        grid = rearrange(self.base + self.flow(past, embedding), "n s h w d -> n (s h) w d")
        return F.grid_sample(source, grid, padding_mode="zeros", align_corners=False)

    def flow(self, past: Tensor, embedding: Tensor) -> Tensor:
        """(n, stack, h patch, w patch, 2): displacement (across, down) to where each pixel of the frames to come was, in half pictures."""
        shift_in, scale, shift, scale_out = self.modulate(F.silu(embedding))[:, :, None, None].chunk(4, dim=1)
        first, second, last = self.convs
        hidden = self.conv_in(past) + self.position + shift_in
        hidden = hidden + second(F.silu(first(F.silu(hidden)) * (1 + scale) + shift))
        hidden = F.silu(last(F.silu(hidden)) * (1 + scale_out))
        flow = F.pixel_shuffle(self.flow_out(hidden), FLOW_PER_PLACE)
        flow = F.interpolate(flow, size=self.base.shape[:2], mode="bilinear", align_corners=False)
        return rearrange(flow, "n (s d) h w -> n s h w d", d=2)
