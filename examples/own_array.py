"""Train and sample on an array of your own, from Python: `python examples/own_array.py`, half a minute on one core."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from diffusion_forcing import DiffusionForcing, pyramid, rollout
from diffusion_forcing.backbones import RNNConfig
from diffusion_forcing.codecs import Normalize
from diffusion_forcing.engine.config import Experiment, ModelConfig, TrainConfig
from diffusion_forcing.engine.objective import Denoising
from diffusion_forcing.engine.task import Task, TaskData
from diffusion_forcing.engine.train import train
from diffusion_forcing.windows import Windows


def my_array(number: int, seed: int) -> Tensor:
    """(sequences, tokens, numbers a token): points on circles, each with its own radius, speed and start. Put yours here."""
    random = torch.rand(3, number, 1, generator=torch.Generator().manual_seed(seed))
    radius, speed, begin = 1 + random[0], 0.2 + 0.2 * random[1], 6.3 * random[2]
    angle = begin + speed * torch.arange(48)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1)


@dataclass(frozen=True)
class Circles(Task):
    """What `train` needs: encoded windows, and the codec that encoded them."""

    def data(self) -> TaskData:
        codec = Normalize.fit(my_array(1000, seed=0))
        return TaskData(Windows(codec.encode(my_array(1000, seed=0)), 48), Windows(codec.encode(my_array(100, seed=1)), 48), codec)


def main() -> None:
    experiment = Experiment(
        Circles(),
        ModelConfig(RNNConfig(hidden=64)),
        TrainConfig(steps=500, batch=32, lr=3e-3, optimizer="muon"),
        Denoising(draw="independent+staircase"),
    )
    train(experiment, Path("runs/own_array"))  # again: nothing to do, the run is finished
    model = DiffusionForcing.from_pretrained("runs/own_array/model")

    truth = my_array(100, seed=2)
    context = model.codec.encode(truth[:, :24])
    matrix = pyramid(horizon=8, ladder=model.schedule.ladder(20), slope=10)
    draws = [model.codec.decode(rollout(model, matrix, 24, context, generator=torch.Generator().manual_seed(n))) for n in range(10)]
    error = (torch.stack(draws).mean(0) - truth[:, 24:]).pow(2).mean().sqrt()
    standing = (truth[:, 23:24] - truth[:, 24:]).pow(2).mean().sqrt()
    print(f"root mean square error of 24 tokens: {error:.2f}; of standing still: {standing:.2f}")
    np.save("runs/own_array/draws.npy", torch.stack(draws).numpy())


if __name__ == "__main__":
    main()
