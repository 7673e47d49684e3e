"""The first stage of a video model with a flow warp: before anything is denoised, the warp learns where pixels of the next frames were.

Denoising teaches this too, but slowly, since the warp's estimate (`backbones.flow_warp.FlowWarp`) is only one of many inputs of the
network. Trained alone and on clean tokens it takes a few minutes. The rest of the network is frozen meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.objective import Denoising, Objective, Stage
from ..model import DiffusionForcing
from ..windows import Batch

LR = 3e-3
"""Peak learning rate of the warp stage."""


@dataclass(frozen=True)
class WarpObjective(Objective):
    """Error of the warp's estimate of each token from the clean token before it. Trains the warp only."""

    def parameters(self, model: nn.Module) -> Iterable[nn.Parameter]:
        backbone: Any = model.backbone
        return backbone.warp.parameters()

    def __call__(self, model: DiffusionForcing, batch: Batch, drawn: Any) -> Tensor:
        error = warp_error(model, batch.x, batch.cond)
        return torch.cat([torch.zeros_like(error[:, :1]), error], dim=1)  # nothing precedes the first token


@dataclass(frozen=True)
class VideoDenoising(Denoising):
    """Denoise tokens at drawn noise levels; a flow warp, if the network has one, is trained alone first."""

    warp_steps: int = 800
    """Steps in which the flow warp (--model.backbone.warp) is trained alone, before the rest. 0: it is trained with the rest only."""

    main_options = ("draw", "self_context")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warp_steps < 0:
            raise ValueError(f"warp_steps counts from 0; got {self.warp_steps}")

    def stages(self, model: DiffusionForcing, init: DiffusionForcing | None) -> Sequence[Stage]:
        new = has_warp(model) and not (init is not None and has_warp(init))
        return [Stage("flow warp", WarpObjective(), self.warp_steps, LR)] if new and self.warp_steps else []


def has_warp(model: DiffusionForcing) -> bool:
    """Whether a model's network has a flow warp."""
    return bool(model.traits.config.get("warp"))


def warp_error(model: DiffusionForcing, x: Tensor, cond: Tensor | None = None) -> Tensor:
    """(b, t-1): error of the warp's estimate of each token x (b, t, ...) but the first, its numbers weighed as in the model's loss."""
    preconditioning = model.preconditioning
    clean = preconditioning.normalized(x)
    level = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)[:, 1:]
    backbone: Any = model.backbone
    estimate = backbone.warp_tokens(clean[:, :-1], level, model.read_cond(x, cond)[:, 1:])
    return preconditioning.weigh((estimate - clean[:, 1:]) ** 2).flatten(2).mean(-1)
