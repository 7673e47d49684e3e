"""Puts a trained run among the shipped models, its network's weights in half precision.

python pretrained/ship.py runs/swap                 pretrained/swap; its README is yours to write
python pretrained/ship.py runs/other --name swap
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import tyro
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
MOST = 8 * 2**20
"""Bytes of a model at most."""


@dataclass(frozen=True)
class Options:
    """Ship a run: config.json, run.json and model, as `dforce eval NAME --pretrained` wants them."""

    run: tyro.conf.Positional[Path]
    """The run's folder."""
    name: str = ""
    """Of the shipped model; the run's if not given."""


def main(options: Options) -> None:
    folder = HERE / (options.name or options.run.resolve().name)
    tensors = load_file(options.run / "model" / "model.safetensors")
    half = {name: tensor.half() if name.startswith(("backbone.", "codec.painter.")) else tensor for name, tensor in tensors.items()}
    off = max(float((tensor.float() - tensors[name].float()).abs().max()) for name, tensor in half.items() if tensor.numel())
    (folder / "model").mkdir(parents=True, exist_ok=True)
    file = folder / "model" / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in half.items()}, file)
    for part in ("config.json", "run.json", "model/config.json"):
        shutil.copyfile(options.run / part, folder / part)
    print(f"{folder.name}: {file.stat().st_size:,} bytes, weights off by {off:.2g} at most")
    if file.stat().st_size > MOST:
        raise SystemExit(f"a shipped model has {MOST:,} bytes at most")


if __name__ == "__main__":
    main(tyro.cli(Options))
