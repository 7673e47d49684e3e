"""The second stage of a video model: a painter learns to draw what the model says of its tokens.

Principal directions draw blurred patches. A painter (`data.pictures.Painter`) is trained on pairs: frames as they were, and the tokens a
trained model says they had, having seen them in noise and the frames before them clean. So it learns to draw from tokens such as sampling
ends with, not from perfect ones. The model itself stays as it is: what comes out is the same model with another decoder.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from .data.pictures import Painted, Painter, Patches
from .model import DiffusionForcing
from .perception import Perception, perception
from .schedule import NoiseSchedule


class Painting(nn.Module):
    """A model whose decoder is in training, in place: it is given a painter, and all else of it is frozen.

    Called as `DiffusionForcing` is, on frames (b, t, stack * 3, h, w) from -1 to 1 (`Pixels`).
    most: noise the model sees tokens in goes up to this share of its levels. perceptual: how much LPIPS counts beside the absolute error
    of pixels; 0 leaves it out, and the drawings a little blurred.
    """

    def __init__(
        self, model: DiffusionForcing, widths: tuple[int, ...] = (128, 64, 48), most: float = 0.4, perceptual: float = 0.5
    ) -> None:
        super().__init__()
        codec = model.codec
        if isinstance(codec, Patches):
            codec = Painted(codec, Painter(codec.basis.shape[1], codec.stack, codec.patch, widths))
        elif isinstance(codec, Painted) and codec.painter.config["widths"] != list(widths):
            raise ValueError(f"that model has a painter of widths {codec.painter.config['widths']} already; got {list(widths)}: "
                             "give the same --model.widths, or begin with the model from before it was painted")  # fmt: skip
        if not isinstance(codec, Painted):
            raise ValueError(f"a painter draws tokens of patches; this model's are {type(codec).__name__}, which need none")
        model.codec = codec
        self.model = model.requires_grad_(False)
        codec.painter.requires_grad_(True)
        self.most, self.perceptual = most, perceptual
        self._eyes: list[Perception] = [perception()] if perceptual else []  # in a list: no part of what is trained and saved

    @property
    def schedule(self) -> NoiseSchedule:
        return self.model.schedule

    def forward(
        self, x: Tensor, k: Tensor, cond: Tensor | None = None, *, noise: Tensor | None = None, past: Tensor | None = None
    ) -> Tensor:
        """How wrong each token is drawn, (b, t), having been seen at `most` of level k (b, t). noise: of pixels, as wide as tokens or more.

        past: not used, the model sees earlier tokens clean.
        """
        codec = self.model.codec
        assert isinstance(codec, Painted)
        frames = rearrange(x, "b t (s c) h w -> b (t s) h w c", s=codec.stack) / 2 + 0.5
        drawn = codec.decode(self.said(codec.encode(frames), k, cond, noise))
        wrong = rearrange((drawn - frames).abs(), "b (t s) h w c -> b t (s h w c)", s=codec.stack).mean(-1)
        if not self._eyes:
            return wrong
        # One frame a token, by its level as good as drawn: AlexNet costs as much as all the rest.
        which = (k % codec.stack).flatten()
        one = [
            rearrange(f, "b (t s) h w c -> (b t) s c h w", s=codec.stack)[torch.arange(len(which), device=k.device), which]
            for f in (drawn, frames)
        ]
        eyes = self._eyes[0].to(x.device)
        return wrong + self.perceptual * eyes.compared(2 * one[0] - 1, 2 * one[1] - 1).view_as(wrong)

    @torch.no_grad()
    def said(self, tokens: Tensor, k: Tensor, cond: Tensor | None, noise: Tensor | None = None) -> Tensor:
        """What the model says tokens (b, t, c, gh, gw) are, each seen at `most` of level k after clean ones."""
        noise = torch.randn_like(tokens) if noise is None else noise.flatten(2)[:, :, : tokens[0, 0].numel()].view_as(tokens)
        level = (self.most * k).long()
        noisy = self.schedule.add_noise(tokens, level, noise)
        return self.model.predict_forced(noisy, level, tokens, torch.zeros_like(level), cond).x0
