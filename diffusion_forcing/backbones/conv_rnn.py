"""The paper's backbone for video: a U-Net reads the noisy frame and the latent, a convolutional GRU updates the latent, a small
network decodes it.

    u_t = unet(x_t, z_{t-1}; k_t, cond_t);   z_t = GRU(u_t, z_{t-1});   out_t = observe(z_t)

The latent z is a picture of the same height and width as the token. Groups are normalised within one frame only, so nothing of a later
frame reaches an earlier output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..checks import check_counts
from .base import BackboneConfig
from .layers import LevelEmbedding, zeroed


@dataclass(frozen=True)
class ConvRNNConfig(BackboneConfig):
    """U-Net and convolutional GRU, the paper's network for video."""

    latent: int = 16
    """Channels of the latent z."""
    channels: int = 64
    """Channels of the U-Net at full size."""
    scales: tuple[int, ...] = (1, 2, 4, 8)
    """Multiples of the channels at full size and at each halving of it."""
    blocks: int = 2
    """Residual blocks a size, going down and coming up."""

    def build(
        self, event: tuple[int, ...], cond: int, levels: int, codec: nn.Module | None = None, variance: Tensor | None = None
    ) -> ConvRNN:
        return ConvRNN(event, cond, levels=levels, **asdict(self))


class ConvRNN(nn.Module):
    """U-Net and convolutional GRU over tokens (c, h, w). Causal. State: the latent z (b, latent, h, w), never reset in a roll-out.

    event: shape of a token; cond: width of the per-token condition; levels: K; options: of `ConvRNNConfig`.
    """

    causal = True
    stabilization = "path"  # the latent to carry on is the one estimated on the way down, at a slightly higher level

    def __init__(self, event: Sequence[int], cond: int = 0, *, levels: int = 1000, **options: Any) -> None:
        super().__init__()
        config = ConvRNNConfig(**options)
        latent, channels, scales, blocks = config.latent, config.channels, tuple(config.scales), config.blocks
        check_counts(latent=latent, channels=channels, blocks=blocks)
        if len(event) != 3 or min(event) < 1:
            raise ValueError(f"ConvRNN reads tokens of (channels, height, width); got tokens of shape {tuple(event)}")
        halvings = 2 ** (len(scales) - 1)
        if not scales or event[1] % halvings or event[2] % halvings:
            raise ValueError(
                f"{len(scales)} scales halve a picture {len(scales) - 1} times, so its sides must be multiples of {halvings}; "
                f"got {event[1]} x {event[2]}: give fewer scales"
            )
        self.config: dict[str, Any] = {"event": list(event), "cond": cond, **asdict(config), "scales": list(scales), "levels": levels}
        self.latent, self.size = latent, tuple(event[1:])
        width = 4 * channels
        self.level = LevelEmbedding(width, levels)
        self.cond_proj = nn.Linear(cond, width) if cond else None
        self.unet = UNet(event[0] + latent, latent, channels, scales, blocks, width)
        self.gates = nn.Conv2d(2 * latent, 2 * latent, 3, padding=1)
        self.candidate = nn.Conv2d(2 * latent, latent, 3, padding=1)
        self.observe = Residual(latent, max(latent, channels // 2), width)
        self.proj_out = zeroed(nn.Conv2d(max(latent, channels // 2), event[0], 3, padding=1))

    def forward(self, x: Tensor, k: Tensor, cond: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x: (b, t, c, h, w); k: (b, t); cond: (b, t, a). Returns out like x and the latent after the last token."""
        embedding = self.embed(k, cond)
        z = self.initial_state(x) if state is None else state
        latents = []
        for t in range(x.shape[1]):
            z = self.step(x[:, t], embedding[:, t], z)
            latents.append(z)
        return self.predict(torch.stack(latents, dim=1), embedding), z

    def initial_state(self, x: Tensor) -> Tensor:
        """The latents before the first token: zeros (b, latent, h, w)."""
        return x.new_zeros(len(x), self.latent, *self.size)

    def embed(self, k: Tensor, cond: Tensor) -> Tensor:
        """Levels and conditions as vectors, (b, t, width)."""
        embedding = self.level(k)
        return embedding if self.cond_proj is None else embedding + self.cond_proj(cond)

    def step(self, x: Tensor, embedding: Tensor, z: Tensor) -> Tensor:
        """The latent after one token x (n, c, h, w) of n sequences, from the one before."""
        u = self.unet(torch.cat([x, z], dim=1), embedding)
        reset, update = self.gates(torch.cat([u, z], dim=1)).sigmoid().chunk(2, dim=1)
        new = self.candidate(torch.cat([u, reset * z], dim=1)).tanh()
        return update * z + (1 - update) * new  # not lerp, which mixed precision has no rule for

    def predict(self, z: Tensor, embedding: Tensor) -> Tensor:
        """Decode latents (b, t, latent, h, w) to the network's output."""
        features = self.observe(z.flatten(0, 1), embedding.flatten(0, 1))
        return self.proj_out(F.silu(features)).unflatten(0, z.shape[:2])

    def forced(self, x: Tensor, k: Tensor, cond: Tensor, past_x: Tensor, past_k: Tensor) -> Tensor:
        """Each token x_t at level k_t given a past at other levels: tokens past_x at levels past_k. All t at once."""
        past, z = self.embed(past_k, cond), self.initial_state(x)
        before = []
        for t in range(x.shape[1]):
            before.append(z)
            if t < x.shape[1] - 1:
                z = self.step(past_x[:, t], past[:, t], z)
        embedding = self.embed(k, cond)
        latents = self.step(x.flatten(0, 1), embedding.flatten(0, 1), torch.stack(before, dim=1).flatten(0, 1))
        return self.predict(latents.unflatten(0, x.shape[:2]), embedding)


class UNet(nn.Module):
    """A picture down to a small one and up again, with skip connections; attention where it is smallest."""

    def __init__(self, inside: int, outside: int, channels: int, scales: tuple[int, ...], blocks: int, width: int) -> None:
        super().__init__()
        self.proj_in = nn.Conv2d(inside, channels, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        have, kept = channels, [channels]
        for size, scale in enumerate(scales):
            for _ in range(blocks):
                self.down.append(Residual(have, channels * scale, width))
                have = channels * scale
                kept.append(have)
            if size < len(scales) - 1:
                self.down.append(nn.Conv2d(have, have, 3, stride=2, padding=1))
                kept.append(have)
        self.middle = nn.ModuleList([Residual(have, have, width), Attention(have), Residual(have, have, width)])
        for size, scale in reversed(list(enumerate(scales))):
            for _ in range(blocks + 1):
                self.up.append(Residual(have + kept.pop(), channels * scale, width))
                have = channels * scale
            if size:
                self.up.append(Upsample(have))
        self.norm = nn.GroupNorm(_groups(have), have)
        self.proj_out = nn.Conv2d(have, outside, 3, padding=1)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        x = self.proj_in(x)
        kept = [x]
        for part in self.down:
            x = part(x, embedding) if isinstance(part, Residual) else part(x)
            kept.append(x)
        for part in self.middle:
            x = part(x, embedding) if isinstance(part, Residual) else part(x)
        for part in self.up:
            x = part(torch.cat([x, kept.pop()], dim=1), embedding) if isinstance(part, Residual) else part(x)
        return self.proj_out(F.silu(self.norm(x)))


class Residual(nn.Module):
    """Two convolutions beside a shortcut, shifted and scaled by the token's embedding (n, width)."""

    def __init__(self, inside: int, outside: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(_groups(inside), inside), nn.GroupNorm(_groups(outside), outside)
        self.conv1, self.conv2 = nn.Conv2d(inside, outside, 3, padding=1), zeroed(nn.Conv2d(outside, outside, 3, padding=1))
        self.modulate = nn.Linear(width, 2 * outside)
        self.shortcut = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        shift, scale = self.modulate(F.silu(embedding))[..., None, None].chunk(2, dim=1)
        inner = self.conv1(F.silu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(inner) * (1 + scale) + shift))


class Attention(nn.Module):
    """Self-attention among the places of a frame."""

    def __init__(self, channels: int, head: int = 32) -> None:
        super().__init__()
        self.heads = next(heads for heads in range(max(1, channels // head), 0, -1) if channels % heads == 0)
        self.norm = nn.GroupNorm(_groups(channels), channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.project = zeroed(nn.Conv2d(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = rearrange(self.qkv(self.norm(x)), "n (s a e) h w -> s n a (h w) e", s=3, a=self.heads)
        attended = F.scaled_dot_product_attention(query, key, value)
        return x + self.project(rearrange(attended, "n a (h w) e -> n (a e) h w", h=x.shape[-2]))


class Upsample(nn.Module):
    """Nearest-neighbour upsampling by two, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))


def _groups(channels: int) -> int:
    """Groups to normalise by: eight, or as many as divide the channels."""
    return next(groups for groups in (8, 4, 2, 1) if channels % groups == 0)
