"""The control of every score: the same agent, guidance and replanning with a network that says nothing."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ...model import DiffusionForcing


def zero_network(model: DiffusionForcing) -> DiffusionForcing:
    """A copy of the model whose backbone outputs zeros: what is left are the codec, the linear dynamics and the guidance."""
    model = copy.deepcopy(model)
    backbone: Any = model.backbone
    backbone.register_forward_hook(_zeros)
    return model


def _zeros(module: Any, arguments: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    out, state = output
    return torch.zeros_like(out), state
