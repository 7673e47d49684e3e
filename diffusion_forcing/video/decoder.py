"""The second stage of a video model: a painter learns to draw what the model says of its tokens.

Principal directions draw blurred patches. A painter (`data.pictures.Painter`) is trained on pairs: frames as they were, and the tokens a
trained model says they had, having seen them in noise and the frames before them clean. So it learns to draw from tokens such as sampling
ends with, not from perfect ones. The model itself stays as it is: what comes out is the same model with another decoder.

Where the model moves pixels, a painter also sees what it drew last, moved on (`Drawing`): detail that tokens are too coarse to tell can
stay where it was.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ..model import DiffusionForcing
from ..sampler import Sampler
from ..schedule import NoiseSchedule
from ..solver import amplitudes, solver_step
from .codec import Painted, Painter, Patches
from .lpips import LPIPS
from .warp import moves


class Drawing:
    """Draws tokens of a model as they come, each after the frame drawn last.

    token: (b, c, gh, gw), the one before the first to be drawn, and frame: (b, h, w, 3), its last frame, from 0 to 1; None: there is none.
    """

    def __init__(self, model: DiffusionForcing, token: Tensor | None = None, frame: Tensor | None = None) -> None:
        self.model, self.token, self.frame = model, token, frame

    @torch.no_grad()
    def __call__(self, tokens: Tensor, cond: Tensor | None = None) -> Tensor:
        """Frames (b, t * stack, h, w, 3) of tokens (b, t, c, gh, gw), which were told cond (b, t, a)."""
        codec: Any = self.model.codec
        if not (isinstance(codec, Painted) and codec.painter.carries):
            return codec.decode(tokens)
        drawn = []
        for i in range(tokens.shape[1]):
            carried = None
            if self.token is not None and self.frame is not None:
                told = None if cond is None else cond[:, i : i + 1]
                carried = carry(self.model, self.frame[:, None], self.token[:, None], told)
            frames = codec.decode(tokens[:, i : i + 1], carried)
            self.token, self.frame = tokens[:, i], frames[:, -1].clamp(0, 1)
            drawn.append(frames)
        return torch.cat(drawn, dim=1)


@torch.no_grad()
def carry(model: DiffusionForcing, frames: Tensor, tokens: Tensor, cond: Tensor | None) -> Tensor:
    """What of frames (b, t, h, w, 3), the last of tokens (b, t, c, gh, gw), will be seen in the token after each, told cond (b, t, a).

    Returns (b, t, stack, h, w, 4): colours, and how much of each pixel was in sight.
    """
    backbone: Any = model.backbone
    return backbone.warp_frames(frames, tokens if model.variance is None else tokens / model.variance.sqrt(), cond)


class Painting(nn.Module):
    """A model whose decoder is in training, in place: it is given a painter, and all else of it is frozen.

    Called as `DiffusionForcing` is, on frames (b, t, stack * 3, h, w) from -1 to 1 (`Pixels`).
    most: noise the model sees tokens in goes up to this share of its levels. perceptual: how much LPIPS counts beside the absolute error
    of pixels; 0 leaves it out, and the drawings a little blurred. carries: the painter sees what it drew last, where the model moves
    pixels; one that had learned without goes on so. steps: in which the model says what is to be drawn.
    """

    def __init__(
        self, model: DiffusionForcing, widths: tuple[int, ...] = (128, 64, 48), most: float = 0.4, perceptual: float = 0.5, *,
        carries: bool = False, steps: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        codec, carries = model.codec, carries and moves(model)
        if isinstance(codec, Patches):
            codec = Painted(codec, Painter(codec.basis.shape[1], codec.stack, codec.patch, widths, carries))
        elif isinstance(codec, Painted) and codec.painter.config["widths"] != list(widths):
            raise ValueError(f"that model has a painter of widths {codec.painter.config['widths']} already; got {list(widths)}: "
                             "give the same --model.widths, or begin with the model from before it was painted")  # fmt: skip
        elif isinstance(codec, Painted) and carries and not codec.painter.carries:
            grown = Painter(**{**codec.painter.config, "carries": True})
            grown.load_state_dict(codec.painter.state_dict(), strict=False)
            codec = Painted(codec.patches, grown)
        if not isinstance(codec, Painted):
            raise ValueError(f"a painter draws tokens of patches; this model's are {type(codec).__name__}, which need none")
        model.codec = codec
        self.model = model.requires_grad_(False)
        codec.painter.requires_grad_(True)
        self.most, self.perceptual, self.steps = most, perceptual, steps
        self._lpips = [LPIPS.pretrained()] if perceptual else []  # in a list: no part of what is trained and saved

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
        said = self.said(codec.encode(frames), k, cond, noise)
        drawn = codec.decode(said, self._carried(frames, said, k, cond) if codec.painter.carries else None)
        wrong = rearrange((drawn - frames).abs(), "b (t s) h w c -> b t (s h w c)", s=codec.stack).mean(-1)
        if not self._lpips:
            return wrong
        # One frame a token, by its level as good as drawn: AlexNet costs as much as all the rest.
        which = (k % codec.stack).flatten()
        one = [
            rearrange(f, "b (t s) h w c -> (b t) s c h w", s=codec.stack)[torch.arange(len(which), device=k.device), which]
            for f in (drawn, frames)
        ]
        lpips = self._lpips[0].to(x.device)
        return wrong + self.perceptual * lpips(2 * one[0] - 1, 2 * one[1] - 1).view_as(wrong)

    @torch.no_grad()
    def _carried(self, frames: Tensor, said: Tensor, k: Tensor, cond: Tensor | None) -> Tensor:
        """What is carried on to each token (b, t, stack, h, w, 4): of what the painter itself drew up to there, as in a roll-out, and in a
        quarter of the sequences, chosen by their levels, of the true frames. To the first token nothing.
        """
        assert isinstance(self.model.codec, Painted)
        stack = self.model.codec.stack
        made = Drawing(self.model)(said[:, :-1], None if cond is None else cond[:, :-1]).clamp(0, 1)
        true = (k.sum(1) % 4 == 0)[:, None, None, None, None]
        last = torch.where(true, frames[:, stack - 1 : -1 : stack], made[:, stack - 1 :: stack])
        carried = carry(self.model, last, said[:, :-1], None if cond is None else cond[:, 1:])
        return torch.cat([torch.zeros_like(carried[:, :1]), carried], dim=1)

    @torch.no_grad()
    def said(self, tokens: Tensor, k: Tensor, cond: Tensor | None, noise: Tensor | None = None) -> Tensor:
        """What the model says tokens (b, t, c, gh, gw) are, each seen at `most` of level k after clean ones.

        In one step that is the mean of what may be, in several one such thing, with all that sampling adds to it.
        """
        noise = torch.randn_like(tokens) if noise is None else noise.flatten(2)[:, :, : tokens[0, 0].numel()].view_as(tokens)
        top, clean = (self.most * k).long(), torch.zeros_like(k)
        x, level = self.schedule.add_noise(tokens, top, noise), top
        for left in range(self.steps - 1, -1, -1):
            said = self.model.predict_forced(x, level, tokens, clean, cond)
            below = top * left // self.steps
            x, level = solver_step(x, said, amplitudes(self.schedule, level, below, x), Sampler(solver="euler_angle")), below
        return said.x0 if self.steps == 1 else x
