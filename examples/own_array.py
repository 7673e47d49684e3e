"""Train and sample on an array of your own, from Python: `python examples/own_array.py`, half a minute on one core.

Then `dforce eval runs/own_array`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from diffusion_forcing import pyramid, rollout
from diffusion_forcing.backbones import RNNConfig
from diffusion_forcing.engine import fit
from diffusion_forcing.engine.objective import Denoising


def my_array(number: int, seed: int) -> Tensor:
    """(sequences, tokens, numbers a token): points on circles, each with its own radius, speed and start. Put yours here."""
    random = torch.rand(3, number, 1, generator=torch.Generator().manual_seed(seed))
    radius, speed, begin = 1 + random[0], 0.2 + 0.2 * random[1], 6.3 * random[2]
    angle = begin + speed * torch.arange(48)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1)


def main() -> None:
    levels = Denoising(draw="independent+staircase")
    options = {"steps": 500, "batch": 32, "lr": 3e-3, "optimizer": "muon"}
    run = fit(RNNConfig(hidden=64), my_array(1000, seed=0), folder="runs/own_array", objective=levels, **options)  # again: it is finished

    truth = my_array(100, seed=2)
    context = run.encode(truth[:, :24])
    matrix = pyramid(horizon=8, ladder=run.model.schedule.ladder(20), slope=10)
    draws = [run.decode(rollout(run.model, matrix, 24, context, generator=torch.Generator().manual_seed(n))) for n in range(10)]
    error = (torch.stack(draws).mean(0) - truth[:, 24:]).pow(2).mean().sqrt()
    standing = (truth[:, 23:24] - truth[:, 24:]).pow(2).mean().sqrt()
    print(f"root mean square error of 24 tokens: {error:.2f}; of standing still: {standing:.2f}")
    np.save(run.folder / "draws.npy", torch.stack(draws).numpy())


if __name__ == "__main__":
    main()
