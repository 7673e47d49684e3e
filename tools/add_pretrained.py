"""Add a trained run to the pretrained models of the package, its weights in half precision.

python tools/add_pretrained.py runs/swap                 diffusion_forcing/pretrained/swap; write its README.md by hand
python tools/add_pretrained.py runs/other --name swap
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import tyro
from safetensors.torch import load_file, save_file

from diffusion_forcing.engine.pretrained import PRETRAINED

MAX_BYTES = 8 * 2**20
"""Limit of a model's weights: the wheel holds all of them."""
HALF = ("backbone.", "codec.decoder.")
"""Weights under these names are stored in half precision; schedules, scales and constraints stay in full."""


@dataclass(frozen=True)
class Options:
    """Copy a run's config.json, run.json and model to where `dforce eval NAME --pretrained` finds them."""

    run: tyro.conf.Positional[Path]
    """The run's folder."""
    name: str = ""
    """Name of the pretrained model; the run's if empty."""


def main(options: Options) -> None:
    folder = PRETRAINED / (options.name or options.run.resolve().name)
    tensors = load_file(options.run / "model" / "model.safetensors")
    half = {name: (tensor.half() if name.startswith(HALF) else tensor).contiguous() for name, tensor in tensors.items()}
    error = max(float((tensor.float() - tensors[name].float()).abs().max()) for name, tensor in half.items() if tensor.numel())
    (folder / "model").mkdir(parents=True, exist_ok=True)
    file = folder / "model" / "model.safetensors"
    save_file(half, file)
    for part in ("config.json", "run.json", "model/config.json"):
        shutil.copyfile(options.run / part, folder / part)
    size = file.stat().st_size
    print(f"{folder.name}: {size:,} bytes, weights rounded by at most {error:.2g}")
    if size > MAX_BYTES:
        raise SystemExit(f"a pretrained model may have {MAX_BYTES:,} bytes of weights; {file} has {size:,}")


if __name__ == "__main__":
    main(tyro.cli(Options))
