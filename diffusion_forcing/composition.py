"""Compositional generation (paper, section 4.3): the cross, sampled with and without memory.

Trajectories run on a square from each corner to the opposite one and cross in the middle. A model with memory reproduces the cross. The
same model, planning half a trajectory at a time and remembering one point only, does not know in the middle where it came from: it
stitches halves into V shapes that no trajectory of the data has.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from .backbones import RNNConfig, TransformerConfig
from .codecs import Normalize
from .engine.config import Experiment, ModelConfig, TrainConfig
from .engine.objective import Denoising
from .engine.plotting import COLOURS, figure
from .engine.task import Evaluation, Progress, Table, Task, TaskData
from .model import DiffusionForcing
from .sampling import Context, Sampler, stream
from .windows import Windows

CORNERS = torch.tensor([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]])
SAMPLER = Sampler(steps=20, matrix="pyramid", slope=20.0)
ENDS = ("start", "adjacent", "opposite", "adjacent")  # by how many corners further round the square


@dataclass(frozen=True)
class Composition(Task):
    """Trajectories across a square, and how they are sampled."""

    half: int = 6
    """Steps from a corner to the middle; a plan is that long, a trajectory twice that."""
    spread: float = 0.05
    """Standard deviation of where trajectories start and end, and of how they bend."""
    trajectories: int = 4000
    """Trajectories to train on."""
    data_seed: int = 0
    """Seed of the trajectories."""
    sampler: Sampler = SAMPLER
    """How a plan is denoised."""
    context: Context = field(default_factory=Context)
    """How generated points join the context; `memory` is what the two samplings differ in."""

    main_options = ("half", "spread", "trajectories", "sampler.steps", "sampler.matrix", "sampler.slope")

    def __post_init__(self) -> None:
        if self.half < 2 or self.trajectories < 4 or self.spread < 0:
            raise ValueError(f"half >= 2, trajectories >= 4, spread >= 0; got {self.half}, {self.trajectories}, {self.spread}")

    def trajectories_of(self, number: int, seed: int) -> tuple[Tensor, Tensor]:
        """Trajectories (n, 2 half + 1, 2), and the corner each starts from (n,)."""
        generator = Generator().manual_seed(seed)
        corner = torch.randint(0, 4, (number,), generator=generator)
        jitter = self.spread * torch.randn(2, number, 1, 2, generator=generator)
        begin, end = CORNERS[corner][:, None] + jitter[0], CORNERS[(corner + 2) % 4][:, None] + jitter[1]
        u = torch.linspace(0, 1, 2 * self.half + 1)[:, None]
        # Every trajectory is half way at half time, but some are faster at the ends and some in the middle.
        variation = 0.6 * torch.rand(number, 1, 1, generator=generator) - 0.3
        pace = u + variation * torch.sin(2 * torch.pi * u) / (2 * torch.pi)
        bend = self.spread * torch.randn(number, 1, 1, generator=generator) * torch.sin(2 * torch.pi * u)
        along = end - begin
        across = torch.stack([-along[..., 1], along[..., 0]], dim=-1) / along.norm(dim=-1, keepdim=True)
        return begin + pace * along + bend * across, corner

    def data(self) -> TaskData:
        """Half of the windows start anywhere on their trajectory, so that the model also learns what follows a point without a past."""
        train, _ = self.trajectories_of(self.trajectories, self.data_seed)
        valid, _ = self.trajectories_of(512, self.data_seed + 1)
        codec = Normalize.fit(train)
        length = 2 * self.half + 1
        return TaskData(Windows(codec.encode(train), length, crop=0.5), Windows(codec.encode(valid), length), codec)

    def generate(
        self, model: DiffusionForcing, begin: Tensor, *, memory: bool, generator: Generator, progress: Progress | None = None
    ) -> Tensor:
        """Trajectories (n, 2 half + 1, 2) from start points (n, 2), in two plans of `half` points, with or without memory."""
        codec: Any = model.codec
        length = 2 * self.half
        windows = [codec.encode(begin[:, None])]
        sampler, past = self.sampler.over(model.schedule, self.half), replace(self.context, memory=None if memory else 1)
        for window in stream(model, sampler, length, windows[0], past=past, generator=generator):
            windows.append(window)
            if progress is not None:
                progress("with memory" if memory else "without memory", sum(part.shape[1] for part in windows) - 1, length)
        return codec.decode(torch.cat(windows, dim=1))

    def evaluate(self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress) -> Evaluation:
        data, corner = self.trajectories_of(samples, self.data_seed + 2 + seed)
        generator = Generator().manual_seed(seed)
        paths = {"data": data}
        for name, memory in (("with memory", True), ("without memory", False)):
            paths[name] = self.generate(model, data[:, 0], memory=memory, generator=generator, progress=progress)
        data_straying = straying(data)
        metrics: dict[str, float] = {}
        rows = []
        for name, path in paths.items():
            share = shares(path[:, -1], corner)
            ratio = straying(path) / data_straying
            key = name.replace(" ", "_")
            metrics |= {f"{key}/{end}": value for end, value in share.items()} | {f"{key}/stray_ratio": ratio}
            rows.append((name, *(f"{share[end]:.1%}" for end in ("opposite", "adjacent", "start", "elsewhere")), f"{ratio:.2f}"))
        heads = ("ends in corner", "opposite", "adjacent", "its own", "elsewhere", "straying")
        picture = folder / "composition.png"
        draw_paths(paths, corner, picture)
        return Evaluation(
            metrics,
            (Table(f"Where {samples:,} trajectories end (straying: from the diagonals, relative to the data's)", heads, tuple(rows)),),
            {str(picture.name): "Data, samples with memory, samples without: colours by the corner each starts from."},
        )

    def sample(self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress) -> list[Path]:
        begin, corner = self.trajectories_of(samples, self.data_seed + 2 + seed)
        generator = Generator().manual_seed(seed)
        paths = {
            name: self.generate(model, begin[:, 0], memory=memory, generator=generator, progress=progress)
            for name, memory in (("with memory", True), ("without memory", False))
        }
        arrays, picture = folder / "samples.npz", folder / "samples.png"
        np.savez(arrays, with_memory=paths["with memory"].numpy(), without_memory=paths["without memory"].numpy())
        draw_paths(paths, corner, picture)
        return [arrays, picture]


def shares(ends: Tensor, corner: Tensor, near: float = 0.35) -> dict[str, float]:
    """Share of end points (n, 2) within `near` of the corner opposite to where they started, adjacent to it, that corner, or none."""
    distance = (ends[:, None] - CORNERS).norm(dim=-1)
    nearest = distance.min(dim=1)
    corners_on = (nearest.indices - corner) % 4
    at_corner = nearest.values < near
    count = dict.fromkeys(ENDS, 0.0)
    for further, end in enumerate(ENDS):
        count[end] += float((at_corner & (corners_on == further)).float().mean())
    return count | {"elsewhere": float((~at_corner).float().mean())}


def straying(paths: Tensor) -> float:
    """Root mean square distance of points (n, t, 2) from the nearer diagonal of the square."""
    to_diagonals = torch.stack([paths[..., 0] - paths[..., 1], paths[..., 0] + paths[..., 1]]) / 2**0.5
    return float((to_diagonals.abs().min(0).values ** 2).mean().sqrt())


def draw_paths(paths: dict[str, Tensor], corner: Tensor, file: Path, limit: int = 160) -> None:
    """Trajectories side by side, one panel a name, coloured by the corner they start from."""
    with figure(file, width=4.2 * len(paths), height=4.6) as fig:
        axes = fig.subplots(1, len(paths), squeeze=False)[0]
        for ax, (name, path) in zip(axes, paths.items(), strict=True):
            for one, start in zip(path[:limit], corner[:limit].tolist(), strict=True):
                ax.plot(one[:, 0], one[:, 1], color=COLOURS[start], lw=0.8, alpha=0.25)
            # The first from each corner, drawn bold, to show whole trajectories.
            for start in range(4):
                one = path[corner == start][:1]
                ax.plot(one[..., 0].flatten(), one[..., 1].flatten(), color="white", lw=4.5, zorder=3)
                ax.plot(one[..., 0].flatten(), one[..., 1].flatten(), color=COLOURS[start], lw=2.6, zorder=3)
            ends = path[:limit, -1]
            ax.scatter(ends[:, 0], ends[:, 1], c=[COLOURS[c] for c in corner[:limit].tolist()], s=9, zorder=4)
            ax.set(title=name, xlim=(-1.35, 1.35), ylim=(-1.35, 1.35), aspect="equal", xticks=[], yticks=[])
        fig.text(
            0.5,
            0.02,
            "coloured by the corner they start from; dots: end points; bold: the first trajectory from each corner",
            ha="center",
            fontsize=9,
        )


def composition(backbone: str = "gru") -> Experiment:
    """Trajectories that cross, with a GRU or a causal transformer."""
    network = TransformerConfig(hidden=96, layers=3, heads=3) if backbone == "transformer" else RNNConfig(hidden=96, layers=1)
    train = TrainConfig(steps=2500, batch=48, optimizer="muon", lr=2e-3, muon_lr=0.01, ema=0.995)
    return Experiment(Composition(), ModelConfig(network), train, Denoising(draw="independent+staircase"))
