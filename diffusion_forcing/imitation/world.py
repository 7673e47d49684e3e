"""What the task needs of a world: an environment or a data set that demonstrations come from and models are measured in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from ..engine.task import Evaluation, Progress

if TYPE_CHECKING:
    from .agent import ImitationAgent
    from .demonstrations import Demonstrations


W = TypeVar("W", bound="World")


class World(Protocol):
    """A frozen dataclass with these methods; its fields are options of the command line."""

    held_out: int
    """Demonstrations, the last ones, that are not trained on."""
    mirrors: ClassVar[bool] = True
    """Whether `mirrored` is there."""

    @property
    def default_samples(self) -> int:
        """Episodes that are evaluated if the command gives no number."""
        return 50

    def demonstrations(self, chunk: int, progress: Progress | None = None) -> Demonstrations:
        """All of them, with frames at least every `chunk` actions."""
        ...

    def mirrored(self, demonstrations: Demonstrations) -> Demonstrations:
        """Demonstrations as seen in a mirror under which the task is the same."""
        raise ValueError(f"how to mirror demonstrations of {type(self).__name__} is not known; set mirror=False")

    def evaluate(
        self, agent: ImitationAgent, folder: Path, *, held_out: Callable[[], Demonstrations], samples: int, seed: int, progress: Progress
    ) -> Evaluation:  # fmt: skip
        """Metrics, a table and figures of an agent in `samples` episodes. held_out: reads the demonstrations that were not trained on."""
        ...

    def prepare(self, progress: Progress | None = None) -> Path:
        """The demonstrations' file or folder, made if need be."""
        ...

    def check_chunk(self, chunk: int) -> None:
        """Raise where chunks of this many actions do not fit this world."""
        return None

    def example(self, chunk: int) -> Demonstrations | None:
        """A demonstration made on the spot where reading them would first make all of them; None: read them."""
        return None

    def for_comparison(self: W) -> W:
        """The same world for a second model: without what does not depend on the model."""
        return self
