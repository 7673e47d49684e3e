"""The first stage of a video model that moves pixels: before anything is denoised, it learns where pixels of the next frames were.

A network that denoises learns this too, but slowly, since its guess (`backbones.flow_warp.FlowWarp`) is only one of many things it
reads. Asked alone and without noise, what follows a token is learned in a few minutes. The rest of the network stays as it is meanwhile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn

from ..backbones.flow_warp import FlowWarp
from ..engine.distributed import World
from ..engine.task import Progress, Source
from ..model import DiffusionForcing


def moves(model: nn.Module | None) -> bool:
    """Whether a model's network guesses by moving pixels."""
    return isinstance(getattr(getattr(model, "backbone", None), "warp", None), FlowWarp)


def spent(step: int, steps: int, by_time: float) -> float:
    """Share of a budget of steps and time. Time counts only where steps come later than they should: a run that is in time is the same run
    on any machine.
    """
    return by_time if by_time > (step + 1) / steps else step / steps


def learn_to_move(
    model: DiffusionForcing, data: Source, steps: int, *, batch: int, generator: Generator, lr: float = 3e-3, seconds: float = math.inf,
    progress: Progress | None = None, stop: Callable[[], bool] = lambda: False, here: World | None = None,
) -> bool:  # fmt: skip
    """Train only the part of the network that moves pixels, in place, on windows drawn by the generator.

    It ends after so many steps, or seconds if that is sooner; the learning rate rises over twenty steps and falls to 0 at the end. Returns
    whether it came to that, and was not told to stop. here: among which processes the windows are shared.
    """
    here = here or World(device=model.device)
    backbone: Any = model.backbone
    moved: FlowWarp = backbone.warp
    optimizer = torch.optim.AdamW(moved.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    began = time.monotonic()
    for step in range(steps):
        done = spent(step, steps, here.first(time.monotonic() - began) / seconds)
        if stop():
            return False
        if done >= 1:
            break
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 20) * (1 - done)
        windows = data.read(data.draw(batch, generator)[here.slice(batch)])
        x, cond, mask = (part.to(model.device) for part in (windows.x, windows.cond, windows.mask))
        error = (guess_error(model, x, cond) * mask[:, 1:]).mean() / here.size
        error.backward()
        error = here.sum(error.detach())
        if not torch.isfinite(error):
            raise FloatingPointError(f"what moves pixels diverged at step {step}; lower its learning rate, or set --train.moving 0")
        for parameter in moved.parameters():
            if parameter.grad is not None:
                parameter.grad = here.sum(parameter.grad)
        nn.utils.clip_grad_norm_(moved.parameters(), 1.0)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        if progress is not None:
            progress("learning to move", step + 1, steps)
    return True


def guess_error(model: DiffusionForcing, x: Tensor, cond: Tensor | None = None) -> Tensor:
    """(b, t-1), how far the guess by moving is from each token x (b, t, ...) but the first, as the model's loss counts its numbers."""
    clean = model.preconditioning.normalized(x)
    known = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)[:, 1:]
    backbone: Any = model.backbone
    guess = backbone.warp_tokens(clean[:, :-1], known, None if cond is None else cond[:, 1:])
    error = (guess - clean[:, 1:]) ** 2
    return model.preconditioning.weigh(error).flatten(2).mean(-1)
