"""Mixed precision: in which number format the network computes, and whether this machine's CPU is quick in bfloat16.

Weights, their moving average, losses and optimisers stay in float32 whatever is chosen.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch

from ..files import cached

Precision = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WORTH = 1.5
"""Times by which products of matrices must be quicker than in float32."""
# Some CPUs claim instructions that they do not have and die of the first, hence a process of its own.
PROBE = """
import time, torch
torch.set_num_threads(1)
a, b = torch.randn(512, 256), torch.randn(256, 768)
def seconds(x, y):
    times = []
    for _ in range(12):
        began = time.perf_counter()
        x @ y
        times.append(time.perf_counter() - began)
    return sorted(times)[4]
error = ((a.bfloat16() @ b.bfloat16()).float() - a @ b).norm() / (a @ b).norm()
layer = torch.nn.Linear(256, 768)
with torch.autocast("cpu", torch.bfloat16):
    layer(a).square().mean().backward()
right = bool(error < 0.02) and bool(torch.isfinite(layer.weight.grad).all())
print(seconds(a, b) / seconds(a.bfloat16(), b.bfloat16()) if right else 0.0)
"""


def resolve(precision: str, kind: str) -> str:
    """The format to compute in on a kind of device: "auto" becomes bfloat16 where it is quick, otherwise float32."""
    if precision == "float32" or (kind == "cuda" and precision != "auto"):
        return precision
    quick = torch.cuda.is_bf16_supported() if kind == "cuda" else kind == "cpu" and bfloat16_speed() >= WORTH
    if precision == "auto":
        return "bfloat16" if quick else "float32"
    if precision == "bfloat16" and quick:
        return precision
    why = "is for CUDA" if precision == "float16" or kind != "cpu" else "would not be quicker than float32 on this CPU, if it works at all"
    raise ValueError(f"precision={precision} {why}; on this {kind} train with --train.precision auto, or float32")


@lru_cache
def bfloat16_speed() -> float:
    """How many times quicker this CPU multiplies matrices in bfloat16 than in float32; 0 where it cannot. Measured once for each CPU and
    version of torch, in a process of its own, and kept in the cache.
    """
    machine = f"{_cpu()} {torch.__version__} {PROBE}"
    name = f"bfloat16-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"
    try:
        return float(json.loads(cached(name, lambda file: file.write_text(json.dumps(_probe()))).read_text()))
    except (OSError, ValueError, TypeError):  # no cache, or a damaged one
        return _probe()


def _probe() -> float:
    try:
        child = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, check=True)
        return float(child.stdout)
    except (subprocess.SubprocessError, OSError, ValueError):  # killed by an instruction that the CPU does not have
        return 0.0


def _cpu() -> str:
    """Model and features of the CPU, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        return " ".join(line for line in lines if line.startswith(("model", "cpu family", "stepping", "flags", "Features")))
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
