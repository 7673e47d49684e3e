"""Frames as tokens: several frames stacked as channels (`Pixels`), or a grid of patches by their principal components (`Patches`), which a
learned decoder may turn back into frames (`PatchesWithDecoder`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..checks import check_counts, check_divides
from ..codecs import principal_directions


class Pixels(nn.Module):
    """`stack` frames as channels: (b, t * stack, h, w, 3) from 0 to 1, to tokens (b, t, 3 * stack, h, w) from -1 to 1."""

    def __init__(self, stack: int) -> None:
        super().__init__()
        self.stack = stack

    def description(self) -> dict[str, Any]:
        return {"stack": self.stack}

    @classmethod
    def from_description(cls, stack: int) -> Pixels:
        return cls(stack)

    def encode(self, frames: Tensor) -> Tensor:
        check_divides(self.stack, frames.shape[1], "a token stacks frames, so their number must be a multiple of")
        return rearrange(2 * frames - 1, "b (t s) h w c -> b t (s c) h w", s=self.stack)

    def decode(self, tokens: Tensor) -> Tensor:
        return rearrange((tokens + 1) / 2, "b t (s c) h w -> b (t s) h w c", s=self.stack)


class Patches(nn.Module):
    """Principal components of patches in space and time: (b, t * stack, h, w, 3) from 0 to 1, to tokens (b, t, c, h / patch, w / patch).

    middle: (stack * patch * patch * 3,), the mean patch. basis: (stack * patch * patch * 3, c), principal directions. mean: (c, gh, gw),
    what is left of the mean in each place of the grid (sky is not floor). scale: (c,), by which components are divided. variance:
    (c, gh, gw), of the tokens.
    """

    middle: Tensor
    basis: Tensor
    mean: Tensor
    scale: Tensor
    variance: Tensor

    def __init__(
        self, stack: int, patch: int, middle: Tensor, basis: Tensor, mean: Tensor, scale: Tensor, variance: Tensor
    ) -> None:  # fmt: skip
        super().__init__()
        self.stack, self.patch = stack, patch
        for name, value in {"middle": middle, "basis": basis, "mean": mean, "scale": scale, "variance": variance}.items():
            self.register_buffer(name, value.float().contiguous())

    @property
    def patches(self) -> Patches:
        """Itself; `PatchesWithDecoder` has it too."""
        return self

    def description(self) -> dict[str, Any]:
        return {"stack": self.stack, "patch": self.patch, "basis": list(self.basis.shape), "grid": list(self.mean.shape)}

    @classmethod
    def from_description(cls, stack: int, patch: int, basis: tuple[int, int], grid: list[int]) -> Patches:
        empty, mean = torch.zeros(basis), torch.zeros(grid)
        return cls(stack, patch, empty[:, 0], empty, mean, torch.ones(basis[1]), mean + 1)

    @classmethod
    def fit(cls, frames: Tensor, stack: int = 4, patch: int = 8, components: int = 64, whiten: float = 0.5, cut: float = 1e-3) -> Patches:
        """Fit to clips (b, t * stack, h, w, 3) from 0 to 1.

        whiten: how far components are scaled to equal variance. 0: not at all, so that noise hides fine detail long before coarse shapes;
        1: completely; a half lies between. cut: variances are not scaled up below this share of the largest standard deviation.
        """
        if not 0 <= whiten <= 1:
            raise ValueError(f"whiten goes from 0 (components as they are) to 1 (equal variance); got {whiten}")
        side = stack * patch * patch * 3
        if not 1 <= components <= side:
            raise ValueError(f"a patch of {stack} x {patch} x {patch} px has {side} numbers; keep 1 to {side} of them, got {components}")
        flat = _cut(frames, stack, patch)
        middle = flat.reshape(-1, side).double().mean(0).float()
        flat = flat - middle
        rows = flat.reshape(-1, side).double()
        directions, along = principal_directions(rows, components)
        basis, std = directions.float(), along.sqrt()
        if not std.any():
            raise ValueError("these clips never vary: there is nothing to learn")
        scale = std.clamp(min=float(cut * std[0])) ** whiten
        tokens = flat @ basis / scale.float()  # (b, t, gh, gw, c)
        scale = scale * tokens.var(dim=(0, 1)).mean().sqrt().double()  # numbers of a token vary by 1 on average
        tokens = rearrange(flat @ basis / scale.float(), "b t h w c -> (b t) c h w")
        mean = tokens.mean(0)
        variance = (tokens - mean).pow(2).mean(0)
        overall = variance.mean(dim=(1, 2), keepdim=True)
        return cls(stack, patch, middle, basis, mean, scale, torch.maximum(variance, 0.05 * overall + 1e-6))

    def encode(self, frames: Tensor) -> Tensor:
        height, width = (self.patch * places for places in self.mean.shape[-2:])
        if frames.shape[2:4] != (height, width):
            raise ValueError(f"this codec is for frames of {height} x {width} px; got {frames.shape[2]} x {frames.shape[3]}, "
                             "resize them, or train with frames of that size")  # fmt: skip
        tokens = (_cut(frames, self.stack, self.patch) - self.middle) @ self.basis / self.scale
        return rearrange(tokens, "b t h w c -> b t c h w") - self.mean

    def decode(self, tokens: Tensor) -> Tensor:
        flat = rearrange(tokens + self.mean, "b t c h w -> b t h w c") * self.scale @ self.basis.T + self.middle
        s, p = self.stack, self.patch
        return rearrange(flat, "b t h w (s p q c) -> b (t s) (h p) (w q) c", s=s, p=p, q=p)


class Decoder(nn.Module):
    """A learned decoder: tokens (n, c, gh, gw) of variance about 1, to what it adds to frames decoded from principal components,
    (n, stack * 3, h, w).

    From the grid to pixels the resolution doubles with each of `widths`, its channels, with two residual blocks at each resolution and one
    at half the frame. warp_previous: it also reads the last decoded frame, warped by the model (`backbones.flow_warp`), and a gate keeps
    of that the detail that tokens are too coarse to hold.
    """

    def __init__(
        self, components: int, stack: int, patch: int, widths: Sequence[int] = (128, 64, 48), warp_previous: bool = False
    ) -> None:  # fmt: skip
        super().__init__()
        if patch != 2 ** len(widths) or not widths:
            raise ValueError(f"each width doubles the resolution, {len(widths)} of them {2 ** len(widths)} times as large; got patches "
                             f"of {patch} px, give as many widths as halve them to one")  # fmt: skip
        check_counts(components=components, stack=stack, widths=min(widths))
        self.config: dict[str, Any] = {
            "components": components, "stack": stack, "patch": patch, "widths": list(widths), "warp_previous": warp_previous,
        }  # fmt: skip
        self.warp_previous = warp_previous
        parts: list[nn.Module] = [nn.Conv2d(components, widths[0], 3, padding=1)]
        for width, larger in pairwise(widths):
            parts += [ResidualBlock(width), ResidualBlock(width), nn.Conv2d(width, 4 * larger, 1), nn.PixelShuffle(2)]
        last = nn.Conv2d(widths[-1], 4 * 3 * stack, 3, padding=1)
        nn.init.zeros_(last.weight)  # adds nothing until it is trained
        nn.init.zeros_(last.bias)  # type: ignore[arg-type]
        self.net = nn.Sequential(*parts, ResidualBlock(widths[-1]), last, nn.PixelShuffle(2))
        if warp_previous:
            self.merge = ResidualBlock(widths[-1], 4 * 4 * stack)
            self.gate = nn.Conv2d(widths[-1], 4 * stack, 3, padding=1)
            nn.init.zeros_(self.gate.weight)
            nn.init.constant_(self.gate.bias, -3.0)  # type: ignore[arg-type]

    def forward(self, tokens: Tensor, detail: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        """detail: (n, stack * 3, h, w), the warped last frame less what is decoded from principal components. visible: (n, stack, h, w),
        how much of each pixel comes from within that frame, 0 to 1. None: there is no last frame.
        """
        if not self.warp_previous:
            return self.net(tokens)
        *first, block, last, double = self.net
        hidden = nn.Sequential(*first)(tokens)
        if detail is None or visible is None:
            n, (h, w), stack = len(tokens), (2 * side for side in hidden.shape[-2:]), self.gate.out_channels // 4
            detail, visible = tokens.new_zeros(n, 3 * stack, h, w), tokens.new_zeros(n, stack, h, w)
        previous = F.pixel_unshuffle(torch.cat([detail * _colours(visible), visible], dim=1), 2)
        hidden = block(self.merge(hidden, previous))
        kept = double(self.gate(hidden)).sigmoid() * visible
        return double(last(hidden)) + _colours(kept) * detail


class ResidualBlock(nn.Module):
    """x + two convolutions of it, and of another input of `more` channels."""

    def __init__(self, channels: int, more: int = 0) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels + more, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.zeros_(self.second.weight)
        nn.init.zeros_(self.second.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        inputs = F.silu(x) if other is None else torch.cat([F.silu(x), other], dim=1)
        return x + self.second(F.silu(self.first(inputs)))


def _colours(of_frames: Tensor) -> Tensor:
    """(n, stack, h, w) repeated for the three colours of each frame, (n, stack * 3, h, w)."""
    return of_frames.repeat_interleave(3, dim=1)


class PatchesWithDecoder(nn.Module):
    """Tokens of `patches`, with a learned decoder on top of theirs. Trained by `decoder.DecoderObjective`."""

    def __init__(self, patches: Patches, decoder: Decoder) -> None:
        super().__init__()
        self.patches = patches
        self.decoder = decoder.requires_grad_(False)  # frozen in trainings on tokens
        self.stack, self.patch = patches.stack, patches.patch

    def description(self) -> dict[str, Any]:
        return {"patches": self.patches.description(), "decoder": self.decoder.config}

    @classmethod
    def from_description(cls, patches: dict[str, Any], decoder: dict[str, Any]) -> PatchesWithDecoder:
        return cls(Patches.from_description(**patches), Decoder(**decoder))

    @property
    def variance(self) -> Tensor:
        return self.patches.variance

    def encode(self, frames: Tensor) -> Tensor:
        return self.patches.encode(frames)

    def decode(self, tokens: Tensor, warped: Tensor | None = None) -> Tensor:
        """warped: (b, t, stack, h, w, 4), the last frame before each token, warped to each of its frames: colours, and how much of each
        pixel comes from within that frame; for decoders that read it. None: there is none.
        """
        plain = self.patches.decode(tokens)
        previous: list[Tensor] = []
        if warped is not None:
            detail = warped[..., :3] - rearrange(plain, "b (t s) h w c -> b t s h w c", s=self.stack)
            previous = [rearrange(part, "b t s h w c -> (b t) (s c) h w") for part in (detail, warped[..., 3:])]
        added = self.decoder((tokens / self.variance.sqrt()).flatten(0, 1), *previous)
        return plain + rearrange(added, "(b t) (s c) h w -> b (t s) h w c", b=len(tokens), s=self.stack)


def _cut(frames: Tensor, stack: int, patch: int) -> Tensor:
    """Clips (b, t * stack, h, w, 3) as patches (b, t, gh, gw, stack * patch * patch * 3)."""
    check_divides(stack, frames.shape[1], "a token stacks frames, so their number must be a multiple of")
    check_divides(patch, frames.shape[2], "frames are cut into patches, so their height must be a multiple of")
    check_divides(patch, frames.shape[3], "frames are cut into patches, so their width must be a multiple of")
    return rearrange(frames, "b (t s) (h p) (w q) c -> b t h w (s p q c)", s=stack, p=patch, q=patch)
