"""What a task is: data to train on, and a way to judge and show a trained model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Generator, Tensor, nn

from ..preconditioning import LinearConstraint, WienerSmoother
from ..windows import Batch

if TYPE_CHECKING:
    from ..model import DiffusionForcing


class Source(Protocol):
    """Windows of tokens to draw batches from: `data.sequences.Windows`, or anything like it.

    One whose windows begin with a known past says so by an attribute `context`, the number of its tokens (see TrainConfig.given).
    """

    length: int
    """Tokens of a window."""

    @property
    def event(self) -> tuple[int, ...]: ...

    @property
    def cond_width(self) -> int: ...

    def draw(self, size: int, generator: Generator | None = None) -> Tensor:
        """Random windows for a batch of `size`, one a row: where each is, cheaply. A batch of shorter windows may have more of them."""
        ...

    def length_of(self, windows: Tensor) -> int:
        """Tokens of these windows, one number for all."""
        ...

    def all(self) -> Tensor:
        """Windows for validation."""
        ...

    def read(self, windows: Tensor) -> Batch:
        """The windows as a batch."""
        ...


@dataclass(frozen=True)
class TaskData:
    """Encoded tokens to train and to validate on, and the codec that made them."""

    train: Source
    valid: Source
    codec: nn.Module | None = None
    constraint: LinearConstraint | None = None
    """Laws that tie each token to the next, for models that see everything."""
    smoother: WienerSmoother | None = None
    """Linear guesses, for models that see everything."""


@dataclass(frozen=True)
class Table:
    """Rows of words and numbers under column heads."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Evaluation:
    """metrics: plain numbers by name. tables: for people. figures: caption by path."""

    metrics: dict[str, float]
    tables: tuple[Table, ...] = ()
    figures: dict[str, str] = field(default_factory=dict)


class Task(Protocol):
    """A frozen dataclass with these methods; its fields are options of the command line."""

    def data(self) -> TaskData:
        """What to train on."""
        ...

    def evaluate(self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress) -> Evaluation:
        """Judge a model, drawing figures into a folder."""
        ...

    def sample(self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress) -> list[Path]:
        """Draw from a model; returns the files written: arrays and a picture of them."""
        ...


Progress = Callable[[str, int, int], None]  # (what, done, of): told as work goes on

TASKS: dict[str, str] = {
    "Composition": "diffusion_forcing.composition:Composition",
    "Forecasting": "diffusion_forcing.forecasting.task:Forecasting",
    "Imitation": "diffusion_forcing.imitation.task:Imitation",
    "Maze2D": "diffusion_forcing.planning.task:Maze2D",
    "Video": "diffusion_forcing.video.task:Video",
}
"""Our own tasks: the name of each class, as a run's file says it, and where the class is."""
