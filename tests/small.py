"""Experiments small enough to train inside a test, and ways to stop them and to look at what they left."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from oracles import seeded
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from diffusion_forcing.backbones import ConvRNNConfig, SpaceTimeConfig
from diffusion_forcing.codecs import Normalize
from diffusion_forcing.engine.cli import main
from diffusion_forcing.engine.config import Experiment, ModelConfig, replace
from diffusion_forcing.engine.log import Log, read_log
from diffusion_forcing.engine.recipes import RECIPES, build
from diffusion_forcing.engine.task import Evaluation, Table, Task, TaskData
from diffusion_forcing.imitation.pusht.task import Pushing
from diffusion_forcing.imitation.swap.task import Swapping
from diffusion_forcing.imitation.task import Imitation
from diffusion_forcing.video.decoder import DecoderObjective
from diffusion_forcing.video.task import Video
from diffusion_forcing.video.worlds.labyrinth import Labyrinth
from diffusion_forcing.windows import Windows

# What makes an experiment small, as fields and as words of the command line. Fields an experiment does not have are left out.
SMALL = {
    "task": {"half": 3, "trajectories": 64, "transitions": 60_000},
    "task__sampler": {"steps": 3},
    "model__backbone": {"hidden": 16, "layers": 1, "heads": 2, "blocks": 1},
    "train": {
        "steps": 8,
        "accumulate": 1,
        "batch": 8,
        "warmup": 2,
        "lr": 5e-3,
        "ema": 0.9,
        "validate_every": 4,
        "log_every": 1,
        "threads": 1,
    },
    "objective": {"warp_steps": 2},
}
WORDS = [
    "--task.half", "3", "--task.trajectories", "64", "--task.sampler.steps", "3", "--model.backbone.hidden", "16",
    "--train.batch", "8", "--train.warmup", "2", "--train.lr", "5e-3", "--train.ema", "0.9", "--train.log-every", "1",
    "--train.threads", "1",
]  # fmt: skip


VARIANTS = [
    {"recipe": name, **variant}
    for name, recipe in RECIPES.items()
    for variant in [{}, *({"backbone": backbone} for backbone in recipe.backbones[1:]), *({"stage": stage} for stage in recipe.stages)]
]
"""Every recipe with each of its networks and stages, as arguments of `small`."""


def small(
    recipe: str = "composition", *, backbone: str | None = None, stage: str | None = None, baseline: str | None = None, **changes
) -> Experiment:
    """A recipe's experiment, made small, with `changes` as `replace` takes them."""
    experiment = build(recipe, backbone=backbone, stage=stage, baseline=baseline)
    for section, values in SMALL.items():
        part = experiment
        for name in section.split("__"):
            part = getattr(part, name, None)
        for name, value in values.items():
            if hasattr(part, name):
                experiment = replace(experiment, **{f"{section}__{name}": value})
    if hasattr(experiment.task, "source"):  # the public sets are not at hand: a few hours of waves stand for each
        experiment = replace(experiment, task__source=str(waves_file()), task__horizon=6, task__test_windows=2)
    if isinstance(experiment.task, Video):  # a small maze stands for every world, a small network for each of its kind
        task = Video(Labyrinth(px=16, size=2), clips=16, frames=16, tokens=3, stack=2, patch=4, components=8, length=4, real=4)
        experiment = replace(experiment, task=task)
        if experiment.model is None:
            objective = DecoderObjective(widths=(4, 4), perceptual=0.0)
            experiment = replace(experiment, objective=objective, train__init=str(walks_model(task)))
        elif isinstance(experiment.model.backbone, ConvRNNConfig):
            experiment = replace(experiment, model__backbone=ConvRNNConfig(4, 4, (1, 2), 1))
    if isinstance(experiment.task, Imitation) and experiment.task.tokens == "image":
        task = Imitation(Swapping(px=8, number=3, simulator="kinematic", held_out=1), state=False, tokens="image", window=3)
        experiment = replace(experiment, task=task, model__backbone=ConvRNNConfig(4, 4, (1, 2), 1))
    elif isinstance(experiment.task, Imitation):  # random pushes stand for every other world
        experiment = replace(experiment, task=Imitation(Pushing(pushes_file(), held_out=2), chunk=4, offsets=2, window=5))
    return replace(experiment, **changes)


@functools.cache
def walks_model(task: Video) -> Path:
    """An untrained model of small walks, in a folder that lasts as long as the tests do."""
    data, folder = task.data(), Path(tempfile.mkdtemp(prefix="dforce-walks-"))
    ModelConfig(SpaceTimeConfig(hidden=8, layers=1, heads=2)).build(data.train.event, data.train.cond_width, data.codec).save_pretrained(
        folder
    )
    return folder


@functools.cache
def pushes_file() -> Path:
    """Six demonstrations of twenty steps, in the layout of Push-T, in a file that lasts as long as the tests do."""
    draw = np.random.default_rng(0)
    file = Path(tempfile.mkdtemp(prefix="dforce-pushes-")) / "pushes.npz"
    np.savez(file, action=draw.uniform(0, 512, (120, 2)), state=draw.uniform(0, 6, (120, 5)), episode_ends=np.arange(20, 121, 20))
    return file


@functools.cache
def waves_file() -> Path:
    """Three series of 300 steps in a file that lasts as long as the tests do."""
    steps = np.arange(300)[:, None]
    values = 10 + np.sin(2 * np.pi * (steps + np.arange(3)) / 12) + 0.1 * np.random.default_rng(0).standard_normal((300, 3))
    file = Path(tempfile.mkdtemp(prefix="dforce-waves-")) / "waves.npz"
    np.savez(file, values=values)
    return file


@dataclass(frozen=True)
class Waves(Task):
    """Sines of several lengths whose condition is their phase: a task with conditions and padding."""

    sequences: int = 32
    """Sequences to train on."""
    scale: float = 1.0
    """Amplitude, not normalised away."""
    informative: bool = True
    """Whether the condition holds the phase; otherwise it is zero."""

    def data(self) -> TaskData:
        phase = 6 * torch.rand(self.sequences, generator=seeded(0))
        lengths = torch.randint(1, 8, (self.sequences,), generator=seeded(1)).tolist()
        waves = [self.scale * torch.sin(p + torch.arange(n))[:, None] for p, n in zip(phase, lengths, strict=True)]
        conditions = [self.informative * p.expand(n, 1) for p, n in zip(phase, lengths, strict=True)]
        windows = Windows(waves, 6, conditions=conditions, crop=0.5)
        return TaskData(windows, windows, Normalize(torch.zeros(1), torch.ones(1)))

    def evaluate(self, model, folder, *, samples, seed, progress):
        progress("counting", samples, samples)
        return Evaluation({"samples": float(samples)}, (Table("Waves", ("what", "number"), (("samples", str(samples)),)),))

    def sample(self, model, folder, *, samples, seed, progress):
        np.save(folder / "waves.npy", torch.randn(samples, 6, 1, generator=seeded(seed)).numpy())
        return [folder / "waves.npy"]


def stop_after(monkeypatch, steps: int) -> None:
    """From now on a training gets SIGTERM once it has taken that many steps."""
    log_step = Log.step

    def step(self, *arguments):
        log_step(self, *arguments)
        if self.clock.step == steps:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Log, "step", step)


def weights(folder: Path) -> dict[str, Tensor]:
    """Tensors of the model a training left in a folder."""
    return load_file(folder / "model" / "model.safetensors")


def checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict]:
    """Tensors and scalars of a folder's checkpoint."""
    path = folder / "checkpoint.safetensors"
    with safe_open(path, framework="pt") as file:
        return load_file(path), json.loads(file.metadata()["training"])


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that are not the same bit for bit, or are in one of the two only."""
    return sorted(
        name for name in one.keys() | other.keys() if name not in one or name not in other or not torch.equal(one[name], other[name])
    )


def logged(folder: Path, what: str = "loss") -> dict[int, float]:
    """A logged number of each step."""
    return {line["step"]: line[what] for line in read_log(folder / "log.jsonl") if what in line}


def dforce(*words: str) -> int:
    """Run a command in this process; its exit code."""
    try:
        main([str(word) for word in words])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def command(*words: str) -> dict:
    """Arguments of subprocess for a command in a process of its own, on one thread."""
    return {
        "args": [sys.executable, "-m", *(str(word) for word in words)],
        "env": {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"},
        "text": True,
    }


def flat(text: str) -> str:
    """Words of a text on one line, wherever it was wrapped."""
    return " ".join(text.split())


def finite(tensors):
    """Whether no tensor holds NaN or infinity."""
    return all(bool(torch.isfinite(value).all()) for value in tensors.values() if value.is_floating_point())
