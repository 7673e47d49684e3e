"""Optimisers: AdamW, and Muon on the matrices inside the network with AdamW on the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

EDGES = {"proj_in", "proj_out", "skip_warp", "skip_input", "level", "position", "age", "warp"}
"""Parts of a network at its input and output, which Muon leaves to AdamW."""


class Muon(Optimizer):
    """Momentum whose step is made orthogonal: every direction of a weight matrix moves equally far.

    The Newton-Schulz iteration works on all matrices of one shape at once, in `dtype`: bfloat16 does as well where the device is quick in
    it. Momentum and weights stay as they are.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.0, iterations: int = 5,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.dtype = dtype
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "iterations": iterations}
        super().__init__(params, defaults)
        for group in self.param_groups:
            if any(p.ndim != 2 for p in group["params"]):
                raise ValueError("Muon works on matrices only; give other parameters to AdamW")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(tuple(p.shape), []).append(p)
            for shape, params in by_shape.items():
                steps = []
                for p in params:
                    assert p.grad is not None
                    state = self.state[p]
                    if not state:
                        state["momentum"] = torch.zeros_like(p)
                    state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                    steps.append(torch.lerp(p.grad, state["momentum"], group["momentum"]))  # Nesterov
                # Scaled so that a step changes outputs by about lr whatever the shape.
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for p, step in zip(params, orthogonalize(torch.stack(steps).to(self.dtype), group["iterations"]), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(step, alpha=-group["lr"] * scale)
        return loss


def orthogonalize(matrices: Tensor, iterations: int = 5) -> Tensor:
    """The nearest (semi-)orthogonal matrix to each of (n, rows, columns), roughly: singular values end up between 0.7 and 1.2.

    Newton-Schulz with the quintic 3.4445 x - 4.7750 x^3 + 2.0315 x^5 (Jordan et al. 2024), which is fast and approximate.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def build(
    model: nn.Module, kind: str, lr: float, muon_lr: float, weight_decay: float, dtype: torch.dtype = torch.float32
) -> list[Optimizer]:
    """The optimisers of a model. Muon takes the matrices between hidden layers; entries, exits, tables and vectors get AdamW.

    dtype: in which Muon iterates.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    inner = {name for name, p in named if kind == "muon" and p.ndim == 2 and not EDGES & set(name.split("."))}
    rest = [p for name, p in named if name not in inner]
    optimizers: list[Optimizer] = [AdamW(rest, lr=lr, betas=(0.9, 0.99), weight_decay=weight_decay)]
    if inner:
        optimizers.append(Muon([p for name, p in named if name in inner], lr=muon_lr, weight_decay=weight_decay, dtype=dtype))
    return optimizers
