"""Frames as tokens: several frames stacked as channels (`Pixels`), or a grid of patches by their principal components (`Patches`), which a
learned decoder may turn back into frames (`Painted`).
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
        """Itself: tokens that are learned to be decoded otherwise name it, too."""
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


class Painter(nn.Module):
    """Tokens (n, c, gh, gw) of numbers as large as 1 to what their frames show beyond principal directions, (n, stack * 3, h, w).

    From a place of the grid to its pixels the picture is doubled again and again, two residual blocks at each size but the last, which has
    the pixels. widths: channels at each of these sizes, as many as a patch halves to one pixel.
    carries: it also sees what was drawn before, as far as it is still in sight, moved to where it is now (`backbones.moved`), and may keep
    of it what tokens are too coarse to tell.
    """

    def __init__(self, components: int, stack: int, patch: int, widths: Sequence[int] = (128, 64, 48), carries: bool = False) -> None:
        super().__init__()
        if patch != 2 ** len(widths) or not widths:
            raise ValueError(f"each width doubles the picture once, {len(widths)} of them {2 ** len(widths)} times as large; got patches "
                             f"of {patch} px, give as many widths as halve them to one")  # fmt: skip
        check_counts(components=components, stack=stack, widths=min(widths))
        self.config: dict[str, Any] = {
            "components": components, "stack": stack, "patch": patch, "widths": list(widths), "carries": carries,
        }  # fmt: skip
        self.carries = carries
        parts: list[nn.Module] = [nn.Conv2d(components, widths[0], 3, padding=1)]
        for width, larger in pairwise(widths):
            parts += [Bump(width), Bump(width), nn.Conv2d(width, 4 * larger, 1), nn.PixelShuffle(2)]
        last = nn.Conv2d(widths[-1], 4 * 3 * stack, 3, padding=1)
        nn.init.zeros_(last.weight)  # nothing beyond principal directions, until it has learned otherwise
        nn.init.zeros_(last.bias)  # type: ignore[arg-type]
        self.net = nn.Sequential(*parts, Bump(widths[-1]), last, nn.PixelShuffle(2))
        if carries:
            self.meet = Bump(widths[-1], 4 * 4 * stack)
            self.keep = nn.Conv2d(widths[-1], 4 * stack, 3, padding=1)
            nn.init.zeros_(self.keep.weight)
            nn.init.constant_(self.keep.bias, -3.0)  # type: ignore[arg-type]

    def forward(self, tokens: Tensor, beyond: Tensor | None = None, sight: Tensor | None = None) -> Tensor:
        """beyond: (n, stack * 3, h, w), what was drawn before and carried on, less what principal directions show now; sight: (n, stack, h,
        w), where there is any, 0 to 1. None: nothing is in sight.
        """
        if not self.carries:
            return self.net(tokens)
        *first, bump, last, double = self.net
        hidden = nn.Sequential(*first)(tokens)
        if sight is None or beyond is None:
            n, (h, w), stack = len(tokens), (2 * side for side in hidden.shape[-2:]), self.keep.out_channels // 4
            beyond, sight = tokens.new_zeros(n, 3 * stack, h, w), tokens.new_zeros(n, stack, h, w)
        seen = F.pixel_unshuffle(torch.cat([beyond * _each(sight), sight], dim=1), 2)
        hidden = bump(self.meet(hidden, seen))
        kept = double(self.keep(hidden)).sigmoid() * sight
        return double(last(hidden)) + _each(kept) * beyond


class Bump(nn.Module):
    """x + two convolutions of it, and of what is seen beside it, `more` channels."""

    def __init__(self, channels: int, more: int = 0) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels + more, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.zeros_(self.second.weight)
        nn.init.zeros_(self.second.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        beside = F.silu(x) if seen is None else torch.cat([F.silu(x), seen], dim=1)
        return x + self.second(F.silu(self.first(beside)))


def _each(of_frames: Tensor) -> Tensor:
    """(n, stack, h, w) for the three colours of each frame, (n, stack * 3, h, w)."""
    return of_frames.repeat_interleave(3, dim=1)


class Painted(nn.Module):
    """Tokens as `patches` makes them, drawn by a painter who adds to what principal directions show. Trained by `painting.Painting`."""

    def __init__(self, patches: Patches, painter: Painter) -> None:
        super().__init__()
        self.patches = patches
        self.painter = painter.requires_grad_(False)  # whoever trains on tokens leaves it as it is
        self.stack, self.patch = patches.stack, patches.patch

    def description(self) -> dict[str, Any]:
        return {"patches": self.patches.description(), "painter": self.painter.config}

    @classmethod
    def from_description(cls, patches: dict[str, Any], painter: dict[str, Any]) -> Painted:
        return cls(Patches.from_description(**patches), Painter(**painter))

    @property
    def variance(self) -> Tensor:
        return self.patches.variance

    def encode(self, frames: Tensor) -> Tensor:
        return self.patches.encode(frames)

    def decode(self, tokens: Tensor, carried: Tensor | None = None) -> Tensor:
        """carried: (b, t, stack, h, w, 4), what was drawn before each token, moved to where it is now, and how much of it is in sight; for
        painters that look at it. None: nothing is.
        """
        plain = self.patches.decode(tokens)
        before: list[Tensor] = []
        if carried is not None:
            beyond = carried[..., :3] - rearrange(plain, "b (t s) h w c -> b t s h w c", s=self.stack)
            before = [rearrange(part, "b t s h w c -> (b t) (s c) h w") for part in (beyond, carried[..., 3:])]
        drawn = self.painter((tokens / self.variance.sqrt()).flatten(0, 1), *before)
        return plain + rearrange(drawn, "(b t) (s c) h w -> b (t s) h w c", b=len(tokens), s=self.stack)


def _cut(frames: Tensor, stack: int, patch: int) -> Tensor:
    """Clips (b, t * stack, h, w, 3) as patches (b, t, gh, gw, stack * patch * patch * 3)."""
    check_divides(stack, frames.shape[1], "a token stacks frames, so their number must be a multiple of")
    check_divides(patch, frames.shape[2], "frames are cut into patches, so their height must be a multiple of")
    check_divides(patch, frames.shape[3], "frames are cut into patches, so their width must be a multiple of")
    return rearrange(frames, "b (t s) (h p) (w q) c -> b t h w (s p q c)", s=stack, p=patch, q=patch)
