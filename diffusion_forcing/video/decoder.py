"""The second stage of a video model: a learned decoder draws frames from tokens as sampling produces them.

Frames decoded from principal components are blurred patches. The decoder (`codec.Decoder`) is trained on pairs of true frames and their
tokens as the trained model denoises them, after the true frames before them. So it learns to decode tokens such as sampling ends with, not
perfect ones. The model itself is frozen: the result is the same model with another decoder.

Where the model has a flow warp, the decoder also reads the last frame it decoded, warped (`StreamingDecoder`): detail that tokens are too
coarse to hold stays in place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Generator, Tensor, nn

from ..checks import check_options
from ..engine.objective import Objective
from ..engine.task import Task, TaskData
from ..levels import independent
from ..model import DiffusionForcing
from ..sampler import Sampler
from ..solver import amplitudes, solver_step
from ..windows import Batch, Source
from .codec import Decoder, Patches, PatchesWithDecoder
from .lpips import LPIPS
from .warp import has_warp


class StreamingDecoder:
    """Decodes tokens of a model as they come, each after the last decoded frame.

    token: (b, c, gh, gw), the one before the first to be decoded. frame: (b, h, w, 3), its last frame, from 0 to 1. None: there is none.
    """

    def __init__(self, model: DiffusionForcing, token: Tensor | None = None, frame: Tensor | None = None) -> None:
        self.model, self.token, self.frame = model, token, frame

    @torch.no_grad()
    def __call__(self, tokens: Tensor, cond: Tensor | None = None) -> Tensor:
        """Frames (b, t * stack, h, w, 3) of tokens (b, t, c, gh, gw) under conditions (b, t, a)."""
        codec: Any = self.model.codec
        if not (isinstance(codec, PatchesWithDecoder) and codec.decoder.warp_previous):
            return codec.decode(tokens)
        chunks = []
        for i in range(tokens.shape[1]):
            warped = None
            if self.token is not None and self.frame is not None:
                warped = warp_frames(self.model, self.frame[:, None], self.token[:, None], None if cond is None else cond[:, i : i + 1])
            frames = codec.decode(tokens[:, i : i + 1], warped)
            self.token, self.frame = tokens[:, i], frames[:, -1].clamp(0, 1)
            chunks.append(frames)
        return torch.cat(chunks, dim=1)


@torch.no_grad()
def warp_frames(model: DiffusionForcing, frames: Tensor, tokens: Tensor, cond: Tensor | None) -> Tensor:
    """Frames (b, t, h, w, 3), the last ones of tokens (b, t, c, gh, gw), warped to the frames of the token after each, under its condition
    (b, t, a). Returns (b, t, stack, h, w, 4): colours, and how much of each pixel comes from within the frame.
    """
    backbone: Any = model.backbone
    return backbone.warp_frames(frames, model.preconditioning.normalized(tokens), model.read_cond(tokens, cond))


class DecoderNoise(NamedTuple):
    """noise: (b, t, *event), of pixels, of which tokens use as many numbers as they have. k: (b, t), levels."""

    noise: Tensor
    k: Tensor


@dataclass(frozen=True)
class DecoderObjective(Objective):
    """Error of the learned decoder of a trained video model (--train.init), all else of which stays as it is.

    Batches are frames (b, t, stack * 3, h, w) from -1 to 1 (`Pixels`).
    """

    widths: tuple[int, ...] = (128, 64, 48)
    """Channels of the decoder at each size, from a grid of patches to half the frame."""
    max_level: float = 0.4
    """Largest noise level, as a share of all, from which the model denoises the tokens that are decoded."""
    steps: int = 2
    """Denoising steps in which it does so: 1 gives the mean, more come nearer to samples, and take longer."""
    perceptual: float = 0.5
    """Weight of LPIPS beside the absolute error of pixels; 0: none, and frames a little blurred."""
    warp_previous: bool = True
    """The decoder also reads the last frame it decoded, moved by the flow warp, where the model has one: detail stays in place."""

    def __post_init__(self) -> None:
        check_options(self, "steps")
        if not 0 <= self.max_level <= 1 or not self.perceptual >= 0:
            raise ValueError(
                f"max_level is a share of the levels, 0 to 1, and perceptual 0 or more; got {self.max_level} and {self.perceptual}"
            )

    @functools.cached_property
    def lpips(self) -> LPIPS:
        return LPIPS.pretrained()

    def data(self, task: Task, codec: nn.Module) -> TaskData:
        """Frames instead of tokens."""
        return task.data_as(codec, raw=True)

    def prepare(self, model: DiffusionForcing) -> DiffusionForcing:
        """Give a model a decoder, unless it has one: a fresh one adds nothing to what principal directions show."""
        codec, warps = model.codec, self.warp_previous and has_warp(model)
        if isinstance(codec, Patches):
            codec = PatchesWithDecoder(codec, Decoder(codec.basis.shape[1], codec.stack, codec.patch, self.widths, warps))
        elif isinstance(codec, PatchesWithDecoder) and codec.decoder.config["widths"] != list(self.widths):
            raise ValueError(f"that model has a decoder of widths {codec.decoder.config['widths']} already; got {list(self.widths)}: give "
                             "the same --objective.widths, or begin with the model from before it had one")  # fmt: skip
        elif isinstance(codec, PatchesWithDecoder) and warps and not codec.decoder.warp_previous:
            grown = Decoder(**{**codec.decoder.config, "warp_previous": True})
            grown.load_state_dict(codec.decoder.state_dict(), strict=False)
            codec = PatchesWithDecoder(codec.patches, grown)
        if not isinstance(codec, PatchesWithDecoder):
            raise ValueError(f"a learned decoder is for tokens of patches; this model's are {type(codec).__name__}, which need none")
        model.codec = codec
        return model

    def parameters(self, model: nn.Module) -> Iterable[nn.Parameter]:
        codec: Any = model.codec
        return codec.decoder.parameters()

    def draw_batch(self, model: DiffusionForcing, source: Source, windows: Tensor, generator: Generator) -> DecoderNoise:
        shape = len(windows), source.length_of(windows)
        k = independent(shape, model.schedule.levels, generator).k
        return DecoderNoise(torch.randn(*shape, *source.event, generator=generator), k)

    def __call__(self, model: DiffusionForcing, batch: Batch, drawn: DecoderNoise) -> Tensor:
        codec = model.codec
        assert isinstance(codec, PatchesWithDecoder)
        k, cond = drawn.k, batch.cond
        frames = rearrange(batch.x, "b t (s c) h w -> b (t s) h w c", s=codec.stack) / 2 + 0.5
        tokens = self.denoised(model, codec.encode(frames), k, cond, drawn.noise)
        decoded = codec.decode(tokens, self.warped(model, frames, tokens, k, cond) if codec.decoder.warp_previous else None)
        error = rearrange((decoded - frames).abs(), "b (t s) h w c -> b t (s h w c)", s=codec.stack).mean(-1)
        if not self.perceptual:
            return error
        # One frame a token, chosen by its level, which is as good as at random: AlexNet costs as much as all the rest.
        which = (k % codec.stack).flatten()
        one = [
            rearrange(f, "b (t s) h w c -> (b t) s c h w", s=codec.stack)[torch.arange(len(which), device=k.device), which]
            for f in (decoded, frames)
        ]
        return error + self.perceptual * self.lpips.to(k.device)(2 * one[0] - 1, 2 * one[1] - 1).view_as(error)

    @torch.no_grad()
    def denoised(self, model: DiffusionForcing, tokens: Tensor, k: Tensor, cond: Tensor | None, noise: Tensor) -> Tensor:
        """Tokens (b, t, c, gh, gw) as the model denoises each from `max_level` of its level k (b, t), after clean ones.

        In one step that is a mean, in several a sample, with the errors of sampling.
        """
        noise = noise.flatten(2)[:, :, : tokens[0, 0].numel()].view_as(tokens)
        top, clean = (self.max_level * k).long(), torch.zeros_like(k)
        x, level = model.schedule.add_noise(tokens, top, noise), top
        for left in range(self.steps - 1, -1, -1):
            prediction = model.predict_forced(x, level, tokens, clean, cond)
            below = top * left // self.steps
            x, level = solver_step(x, prediction, amplitudes(model.schedule, level, below, x), Sampler(solver="euler_angle")), below
        return prediction.x0 if self.steps == 1 else x

    @torch.no_grad()
    def warped(self, model: DiffusionForcing, frames: Tensor, tokens: Tensor, k: Tensor, cond: Tensor | None) -> Tensor:
        """The frame before each token, moved by the flow warp (b, t, stack, h, w, 4): as decoded, as in a roll-out, or, in a quarter of the
        sequences, chosen by their levels, the true one. Zeros for the first token.
        """
        codec = model.codec
        assert isinstance(codec, PatchesWithDecoder)
        stack = codec.stack
        decoded = StreamingDecoder(model)(tokens[:, :-1], None if cond is None else cond[:, :-1]).clamp(0, 1)
        true = (k.sum(1) % 4 == 0)[:, None, None, None, None]
        last = torch.where(true, frames[:, stack - 1 : -1 : stack], decoded[:, stack - 1 :: stack])
        warped = warp_frames(model, last, tokens[:, :-1], None if cond is None else cond[:, 1:])
        return torch.cat([torch.zeros_like(warped[:, :1]), warped], dim=1)
