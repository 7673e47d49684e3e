"""What a task is: data to train on, and how a trained model is measured and shown. Optional parts are declared here with their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import nn

from ..model import DiffusionForcing
from ..preconditioning import LinearConstraint, WienerSmoother
from ..windows import Source
from .evaluation import Evaluation, Progress, Table, default_sampler, evaluate_denoising, write_samples
from .fingerprint import paths_of

__all__ = ["TASKS", "Evaluation", "Progress", "Table", "Task", "TaskData"]


@dataclass(frozen=True)
class TaskData:
    """Encoded tokens to train and to validate on, and the codec that encoded them."""

    train: Source
    valid: Source
    codec: nn.Module | None = None
    constraint: LinearConstraint | None = None
    """Linear constraints between consecutive tokens."""
    smoother: WienerSmoother | None = None
    """Linear estimates of clean tokens from noisy ones, for models that are not causal."""


class Task(Protocol):
    """A frozen dataclass with `data`; its fields are options of the command line. All else is optional, with the defaults below."""

    has_score: ClassVar[bool] = False
    """Whether `score` is there for --train.monitor score."""
    main_options: ClassVar[tuple[str, ...] | None] = None
    """Options that --help shows, such as "clips" or "world.size"; the others stand in --help-all. None: all of the task's own."""
    evaluation_options: ClassVar[tuple[str, ...]] = ()
    """Options that do not concern training: a run may be resumed with others."""
    short_options: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Short names of options, such as ("--data", "--task.world.path")."""

    def data(self) -> TaskData:
        """What to train on."""
        ...

    def evaluate(self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress) -> Evaluation:
        """Measure a model and draw figures into a folder. By default: how well it denoises held-out windows, and samples beside them."""
        valid = self.data().valid
        sampler = default_sampler(model.traits.causal)
        return evaluate_denoising(
            model, valid, folder, sampler=sampler, context=valid.context, samples=samples, seed=seed, progress=progress
        )

    def sample(self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress) -> list[Path]:
        """Draw samples from a model into a folder: arrays and a picture of them. Returns the files. By default: held-out windows,
        continued from their first tokens.
        """
        valid = self.data().valid
        sampler = default_sampler(model.traits.causal)
        return write_samples(model, valid, folder, sampler=sampler, context=valid.context, samples=samples, seed=seed, progress=progress)

    # Optional parts.

    def within(self, folder: Path) -> Task:
        """The task with the files that it keeps in a run's folder."""
        return self

    @property
    def data_files(self) -> Mapping[str, Path]:
        """Files and folders that `data` reads, by the option that names each: a run notices when they change. By default all options that
        are paths.
        """
        return paths_of(self)

    @property
    def default_samples(self) -> int:
        """Samples that `evaluate` draws if the command gives no number."""
        return 1000

    @property
    def default_shown(self) -> int:
        """Samples that `sample` draws if the command gives no number."""
        return 100

    def compare(
        self, model: DiffusionForcing, others: Mapping[str, tuple[Any, DiffusionForcing]], folder: Path, *, samples: int, seed: int,
        progress: Progress,
    ) -> Evaluation:  # fmt: skip
        """As evaluate, beside other models by name, each with the task (of the same class) that it was trained on."""
        raise ValueError(f"{type(self).__name__} is measured one run at a time; leave out --against")

    def score(self, model: DiffusionForcing) -> float:
        """A number by which training may choose the best model (--train.monitor score); less is better."""
        raise ValueError(f"{type(self).__name__} has no score of its own; use --train.monitor loss")

    def prepare(self, progress: Progress | None = None) -> Path | None:
        """Make the data now and keep them in the cache. Returns their file; None: they take seconds, whenever they are needed."""
        return None

    def data_as(self, codec: nn.Module, raw: bool = False) -> TaskData:
        """As data, in the tokens of a trained model's codec (--train.init). raw: what the codec encodes, to train a decoder."""
        raise ValueError(f"{type(self).__name__} cannot train from another model, since it fits a codec of its own; leave out --train.init")

    def supports_device(self, device: str) -> bool:
        """Whether its models can be evaluated and sampled on such a device."""
        return device == "cpu"


TASKS: dict[str, str] = {
    "Composition": "diffusion_forcing.composition:Composition",
    "Forecasting": "diffusion_forcing.forecasting.task:Forecasting",
    "Imitation": "diffusion_forcing.imitation.task:Imitation",
    "Maze2D": "diffusion_forcing.planning.task:Maze2D",
    "Sequences": "diffusion_forcing.engine.sequences:Sequences",
    "WindyMaze2D": "diffusion_forcing.planning.windy:WindyMaze2D",
    "Video": "diffusion_forcing.video.task:Video",
}
"""Our own tasks: the name of each class, as a run's file says it, and where the class is."""
