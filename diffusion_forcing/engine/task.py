"""What a task is: data to train on, and how a trained model is measured and shown. Optional parts are declared here with their defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import nn

from ..model import DiffusionForcing
from ..preconditioning import LinearConstraint, WienerSmoother
from ..windows import Source

Progress = Callable[[str, int, int], None]
"""Called as work proceeds, with what it is, how much is done, and of how much: progress("episodes", 3, 100)."""


@dataclass(frozen=True)
class TaskData:
    """Encoded tokens to train and to validate on, and the codec that encoded them."""

    train: Source
    valid: Source
    codec: nn.Module | None = None
    constraint: LinearConstraint | None = None
    """Linear constraints between consecutive tokens, for models that are not causal."""
    smoother: WienerSmoother | None = None
    """Linear estimates of clean tokens from noisy ones, for models that are not causal."""


@dataclass(frozen=True)
class Table:
    """Rows of words and numbers under column heads."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Evaluation:
    """metrics: numbers by name. tables: for people. figures: captions by the file's name."""

    metrics: dict[str, float]
    tables: tuple[Table, ...] = ()
    figures: dict[str, str] = field(default_factory=dict)


class Task(Protocol):
    """A frozen dataclass with `data`, and with `evaluate` and `sample` for the commands of these names. Its fields are options of the
    command line. All else is optional, with the defaults below.
    """

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
        """Measure a model and draw figures into a folder."""
        raise ValueError(f"{type(self).__name__} has no method `evaluate`; add one to measure its models")

    def sample(self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress) -> list[Path]:
        """Draw samples from a model into a folder: arrays and a picture of them. Returns the files."""
        raise ValueError(f"{type(self).__name__} has no method `sample`; add one to show samples of its models")

    # Optional parts.

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
    "Video": "diffusion_forcing.video.task:Video",
}
"""Our own tasks: the name of each class, as a run's file says it, and where the class is."""
