"""A recipe and a task of your own. From this folder:

dforce train own_recipe:build
dforce eval runs/own_recipe.build --recipe own_recipe:build
dforce sample runs/own_recipe.build --recipe own_recipe:build --task.slope 0
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor

from diffusion_forcing import DiffusionForcing, pyramid, rollout
from diffusion_forcing.backbones import RNNConfig
from diffusion_forcing.codecs import Chain, Normalize, Stack
from diffusion_forcing.engine.config import Experiment, ModelConfig, TrainConfig
from diffusion_forcing.engine.objective import Denoising
from diffusion_forcing.engine.plotting import COLOURS, figure
from diffusion_forcing.engine.task import Evaluation, Progress, Table, Task, TaskData
from diffusion_forcing.windows import Windows


@dataclass(frozen=True)
class Springs(Task):
    """Damped springs, each with its own pace: forecast the second half from the first."""

    sequences: int = 1000
    """Springs to train on."""
    frames: int = 64
    """Frames of a spring, a multiple of twice the stack."""
    stack: int = 4
    """Frames in a token."""
    slope: float = 10.0
    """Of the pyramid by which forecasts are sampled."""

    def springs(self, number: int, seed: int) -> Tensor:
        """(n, frames, 1), in raw units."""
        random = torch.rand(3, number, 1, generator=Generator().manual_seed(seed))
        time = torch.arange(self.frames)
        swing = torch.cos((0.2 + 0.2 * random[0]) * time + 6.3 * random[1]) * torch.exp(-0.02 * random[2] * time)
        return (20 + 5 * swing)[..., None]

    def data(self) -> TaskData:
        train, valid = self.springs(self.sequences, 0), self.springs(100, 1)
        codec = Chain(Normalize.fit(train), Stack(self.stack))
        length = self.frames // self.stack
        return TaskData(Windows(codec.encode(train), length), Windows(codec.encode(valid), length), codec)

    def forecast(self, model: DiffusionForcing, past: Tensor, seed: int) -> Tensor:
        """The frames that follow past (n, frames/2, 1), in raw units."""
        tokens = self.frames // self.stack // 2
        matrix = pyramid(tokens, model.schedule.ladder(20), self.slope)
        new = rollout(model, matrix, tokens, model.codec.encode(past), generator=Generator().manual_seed(seed))
        return model.codec.decode(new)

    def evaluate(self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress) -> Evaluation:
        truth = self.springs(samples, 2 + seed)
        past, future = truth.chunk(2, dim=1)
        forecast = self.forecast(model, past, seed)
        progress("forecasts", samples, samples)
        error = {"model": float((forecast - future).abs().mean()), "last value": float((past[:, -1:] - future).abs().mean())}
        self.draw(truth, forecast, folder / "springs.png")
        rows = tuple((name, f"{value:.3f}") for name, value in error.items())
        return Evaluation(
            {f"mae/{name.replace(' ', '_')}": value for name, value in error.items()},
            (Table(f"Error of {samples:,} forecasts", ("forecast by", "mean absolute error"), rows),),
            {"springs.png": "Three springs: truth (lines) and forecast (dots)."},
        )

    def sample(self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress) -> list[Path]:
        truth = self.springs(samples, 2 + seed)
        forecast = self.forecast(model, truth.chunk(2, dim=1)[0], seed)
        progress("forecasts", samples, samples)
        np.savez(folder / "samples.npz", truth=truth.numpy(), forecast=forecast.numpy())
        self.draw(truth, forecast, folder / "samples.png")
        return [folder / "samples.npz", folder / "samples.png"]

    def draw(self, truth: Tensor, forecast: Tensor, file: Path) -> None:
        with figure(file, 7.0, 3.0) as fig:
            ax = fig.subplots()
            for colour, true, predicted in zip(COLOURS, truth[:3, :, 0], forecast[:3, :, 0], strict=False):
                ax.plot(true, color=colour, lw=1)
                ax.plot(range(self.frames // 2, self.frames), predicted, ".", color=colour, ms=4)
            ax.axvline(self.frames / 2 - 0.5, color="0.7", lw=1)
            ax.set(xlabel="frame", ylabel="position")


def build() -> Experiment:
    """Damped springs: forecasts of half a sequence. Under a minute on one core."""
    return Experiment(
        Springs(),
        ModelConfig(RNNConfig(hidden=64), parameterization="v"),
        TrainConfig(steps=800, batch=32, lr=3e-3, optimizer="muon"),
        Denoising(draw="independent+staircase"),
    )
