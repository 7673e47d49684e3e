"""Several processes, applied from outside the model: start with `torchrun --nproc_per_node N -m diffusion_forcing ...`.

A model knows nothing of this. The batch is drawn whole and identically everywhere, and each process works on its slice, so N processes
give the losses of one.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..backbones import traits_of


@dataclass(frozen=True)
class Distributed:
    """This process among those that train together."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def main(self) -> bool:
        return self.rank == 0

    def slice(self, total: int) -> slice:
        """This process's share of a batch of `total`."""
        if total % self.size:
            raise ValueError(f"{self.size} processes cannot share a batch of {total} equally; use a multiple of {self.size}")
        share = total // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over processes."""
        if self.size == 1:
            return values
        total = values.to(self.device)
        dist.all_reduce(total)
        return total

    def any(self, flag: bool) -> bool:
        """True everywhere if it is True anywhere: all processes stop at the same step."""
        if self.size == 1:
            return flag
        return bool(self.sum(torch.tensor([float(flag)], device=self.device)).item())

    def first(self, value: float) -> float:
        """The first process's value, everywhere."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(tensor, 0)
        return float(tensor.item())

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def device_kind(device: str) -> str:
    """The kind of device to use: for "auto" CUDA where there is one, else the CPU."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def check_device(device: str) -> torch.device:
    """The device of that name; raises ValueError, before anything is started, if this machine has none."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"there is no device {device!r} here ({str(error).splitlines()[0]}); use auto, cpu, cuda on a GPU, or mps on a Mac"
        ) from error
    return torch.device(device)


@contextmanager
def join_processes(device: str = "auto") -> Iterator[Distributed]:
    """Join the process group that torchrun describes in the environment; alone without one."""
    kind = device_kind(device)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield Distributed(device=torch.device(kind))
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    where = torch.device("cuda", local) if kind == "cuda" else torch.device(kind)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
    # DDP and FSDP refer to themselves and keep the group's threads, which abort the process if they let go of a tensor while the
    # interpreter ends. So what is left of them goes before that.
    atexit.register(gc.collect)
    try:
        yield Distributed(dist.get_rank(), dist.get_world_size(), where)
        dist.barrier()  # none takes the connections down while another still writes
    finally:
        dist.destroy_process_group()


def spread(module: nn.Module, model: nn.Module, processes: Distributed, parallel: str) -> nn.Module:
    """A module around a model as the training loop calls it: replicated (DDP), the model sharded (FSDP2), or as it is."""
    if processes.size == 1:
        return module
    if parallel == "fsdp":
        shard(model, processes)
        return module
    return DistributedDataParallel(module, device_ids=[processes.device.index] if processes.device.type == "cuda" else None)


def gathered(value: Tensor) -> Tensor:
    """All of a tensor that FSDP keeps in shards; any other as it is. Every process must call this."""
    full: Tensor = value.full_tensor() if _is_sharded(value) else value  # type: ignore[attr-defined]
    return full


def sharded_like(value: Tensor, own: Tensor) -> Tensor:
    """A whole tensor in shards, if `own` is."""
    if not _is_sharded(own):
        return value
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = own
    return distribute_tensor(value.to(own.device), sharded.device_mesh, sharded.placements)


def _is_sharded(value: Tensor) -> bool:
    """Whether a tensor is a DTensor. The module of these, half a second to import, is there if there are any."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def shard(model: nn.Module, processes: Distributed) -> None:
    """FSDP2 in place: each block of the backbone its own shard, then the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(processes.device.type, (processes.size,))
    for block in traits_of(model.backbone).blocks:
        fully_shard(block, mesh=mesh)
    # The root too: torch leaves it gathered after a forward without backward, as in validation, and the average could not be updated.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
