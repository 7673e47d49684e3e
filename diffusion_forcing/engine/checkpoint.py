"""Checkpoints of a training: one safetensors file, written atomically and without pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from ..files import read_tensors, write_atomically
from .distributed import gathered, sharded_like

CHECKPOINT = "checkpoint.safetensors"


def collect(modules: dict[str, nn.Module], optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """All tensors of a training by name, "module.tensor". Every process must call this: shards are gathered."""
    tensors = {
        ".".join(filter(None, (name, key))): _whole(value) for name, module in modules.items() for key, value in module.state_dict().items()
    }
    for i, optimizer in enumerate(optimizers):
        for j, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer{i}.{j}.{key}": _whole(value) for key, value in state.items()}
    return tensors


def save(folder: Path, tensors: dict[str, Tensor], scalars: dict[str, Any]) -> None:
    """Write a checkpoint. A reader gets the old one or the new one, never a part of it."""
    metadata = {"training": json.dumps(scalars)}
    write_atomically(folder / CHECKPOINT, lambda path: save_file(tensors, path, metadata=metadata))


def exists(folder: Path) -> bool:
    """Whether there is a checkpoint to resume from."""
    return (folder / CHECKPOINT).exists()


def load(folder: Path, modules: dict[str, nn.Module], optimizers: list[Optimizer]) -> dict[str, Any] | None:
    """Fill modules and optimisers from a folder's checkpoint and return its numbers; None if there is none."""
    path = folder / CHECKPOINT
    if not exists(folder):
        return None
    try:
        tensors = read_tensors(path)
        with safe_open(path, framework="pt") as file:
            scalars = json.loads((file.metadata() or {})["training"])
    except (ValueError, KeyError) as error:
        raise ValueError(f"cannot resume from {path}: {error} Delete it to start this run again from step 0.") from error
    try:
        for name, module in modules.items():
            fill(module, tensors, f"{name}.")
        for i, optimizer in enumerate(optimizers):
            _load_optimizer(optimizer, tensors, f"optimizer{i}.")
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"{path} belongs to another model or optimiser ({error}); delete it, or train under another --name") from error
    return scalars


def fill(module: nn.Module, tensors: dict[str, Tensor], prefix: str = "") -> None:
    """Put whole tensors into a module, sharded as its own are."""
    module.load_state_dict({key: sharded_like(tensors[prefix + key], value) for key, value in module.state_dict().items()})


def _load_optimizer(optimizer: Optimizer, tensors: dict[str, Tensor], prefix: str) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith(prefix):
            number, name = key[len(prefix) :].split(".", 1)
            if int(number) >= len(params):
                raise KeyError(f"optimiser state {key}")
            like = params[int(number)]
            if value.ndim and value.shape != like.shape:
                raise KeyError(f"{key} is {tuple(value.shape)}, not {tuple(like.shape)}")
            state.setdefault(int(number), {})[name] = sharded_like(value, like) if value.shape == like.shape else value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _whole(value: Tensor) -> Tensor:
    return gathered(value).detach().cpu().clone().contiguous()
