"""What a training minimises. Denoising at drawn noise levels is one objective; a domain may have others, for stages and small networks.

The loop (`engine.train`) asks an objective for everything random of a whole batch, then for the losses of some of its rows. So a batch
may be split over passes and processes, and gives the same gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Generator, Tensor, nn

from .. import levels
from ..model import DiffusionForcing, mask_cond
from ..windows import Batch, Source
from .task import Task, TaskData


class Nothing(NamedTuple):
    """What an objective draws that has nothing random."""


class Objective(Protocol):
    """A frozen dataclass with `__call__`; its fields are options of the command line (`--objective.*`). The rest has defaults."""

    main_options: ClassVar[tuple[str, ...] | None] = None
    """Options that --help shows; the others stand in --help-all. None: all."""

    @property
    def drops_cond(self) -> bool:
        """Whether it also trains without conditions, for which a new model is built with optional ones."""
        return False

    @property
    def supports_fsdp(self) -> bool:
        """Whether it calls the model by its forward pass only, which is what FSDP gathers weights for."""
        return False

    def __call__(self, model: Any, batch: Any, drawn: Any) -> Tensor:
        """Loss of each token of a batch, (b, t). What the batch's mask leaves out does not count."""
        ...

    def draw_batch(self, model: Any, source: Any, windows: Tensor, generator: Generator) -> Any:
        """Everything random for a batch of windows of a source: a NamedTuple of tensors whose first axis is the batch, or of None."""
        return Nothing()

    def at(self, progress: float | None) -> Objective:
        """The objective after a share of the training budget, 0 to 1; None: for validation."""
        return self

    def data(self, task: Task, codec: nn.Module) -> TaskData:
        """A task's data in the tokens of the trained model that --train.init names."""
        return task.data_as(codec)

    def prepare(self, model: DiffusionForcing) -> DiffusionForcing:
        """The model that --train.init names, ready to be trained by an objective of a part of it (`Experiment.model` is None then)."""
        return model

    def parameters(self, model: nn.Module) -> Iterable[nn.Parameter]:
        """What is trained; all else is frozen meanwhile."""
        return (parameter for parameter in model.parameters() if parameter.requires_grad)

    def stages(self, model: DiffusionForcing, init: DiffusionForcing | None) -> Sequence[Stage]:
        """What is trained before, in order. init: the model whose weights this one begins with, if any."""
        return ()


@dataclass(frozen=True)
class Stage:
    """A short training with an objective of its own, before the main one: `steps`, or a quarter of the minutes if that is sooner."""

    label: str
    """What it is called while it runs."""
    objective: Objective
    steps: int
    lr: float


class Noise(NamedTuple):
    """What denoising draws. noise: (b, t, *event). k: (b, t), levels. past: (b, t), levels at which later tokens see each, where these are
    not k. keep_cond: (b,), False where the condition is dropped. self_context: (b, t), levels from which the model estimates context
    itself, 0 where it is true.
    """

    noise: Tensor
    k: Tensor
    past: Tensor | None = None
    keep_cond: Tensor | None = None
    self_context: Tensor | None = None


@dataclass(frozen=True)
class Denoising(Objective):
    """Denoise tokens at drawn noise levels."""

    draw: str = "independent"
    """How noise levels are drawn: independent, shared (full-sequence diffusion), teacher_forced (next-token diffusion), staircase,
    noisy_prefix, noisy_context, shared_with_prefix, or several joined by a plus."""
    clean_context_prob: float = 0.0
    """Share of sequences whose context, the first token or as many as the data call their context, is clean whatever level was drawn."""
    self_context: float = 0.0
    """Share of sequences in which nearly clean tokens are replaced by the model's own one-step estimates, as in Self Forcing: training
    then has such a past as a roll-out has. For draws of one level a token."""
    self_context_after: float = 0.0
    """Share of the budget (steps or minutes) after which self_context begins: the estimates of an untrained model teach nothing."""
    cond_drop: float = 0.0
    """Share of sequences trained without their condition, for classifier-free guidance."""

    main_options: ClassVar[tuple[str, ...] | None] = ("draw",)

    def __post_init__(self) -> None:
        shares = {"cond_drop": "sequences", "clean_context_prob": "sequences", "self_context": "sequences", "self_context_after": "budget"}
        for name, of in shares.items():
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share of the {of} and lies in [0, 1]; got {getattr(self, name)}")
        separate_past = self._separate_past  # which also refuses a draw that does not exist
        if self.self_context and separate_past:
            raise ValueError(f"self_context is for draws that give each token one level, and {self.draw} gives the past levels of its own; "
                             f"got {self.self_context}, set --objective.self-context 0 or another --objective.draw")  # fmt: skip

    @property
    def _separate_past(self) -> bool:
        """Whether later tokens see the past at other levels than its own."""
        return levels.by_name(self.draw)((1, 2), 10, Generator()).past is not None

    @property
    def drops_cond(self) -> bool:
        return self.cond_drop > 0

    @property
    def supports_fsdp(self) -> bool:
        return not self._separate_past

    def at(self, progress: float | None) -> Denoising:
        on = progress is not None and progress >= self.self_context_after
        return self if on or not self.self_context else replace(self, self_context=0.0)

    def draw_batch(self, model: DiffusionForcing, source: Source, windows: Tensor, generator: Generator) -> Noise:
        size, length, top = len(windows), source.length_of(windows), model.schedule.levels
        k, past = levels.by_name(self.draw, source.modalities)((size, length), top, generator)
        noise = torch.randn(size, length, *source.event, generator=generator)
        if self.cond_drop and not model.optional_cond:
            raise ValueError("cond_drop leaves conditions out, which needs a model that can do without: DiffusionForcing(..., "
                             f"optional_cond=True), its backbone built with cond=c + 1; got cond_drop={self.cond_drop}")  # fmt: skip
        keep_cond = torch.rand(size, generator=generator) >= self.cond_drop if self.cond_drop else None
        clean = None
        if self.clean_context_prob:
            clean = torch.rand(size, generator=generator) < self.clean_context_prob
            for level in (k, past):
                if level is not None:
                    level[clean, : source.context] = 0
        own = levels.self_context_levels(k, top, self.self_context, generator) if self.self_context else None
        if own is not None and clean is not None:
            own[clean, : source.context] = 0
        return Noise(noise, k, past, keep_cond, own)

    def __call__(self, model: DiffusionForcing, batch: Batch, drawn: Noise) -> Tensor:
        # Padding is a token at level K: no backbone learns anything from it.
        k, past = (None if level is None else torch.where(batch.mask, level, model.schedule.levels) for level in (drawn.k, drawn.past))
        own = None if drawn.self_context is None else drawn.self_context * batch.mask
        cond = batch.cond if drawn.keep_cond is None else mask_cond(batch.cond, drawn.keep_cond)
        return model(batch.x, k, cond, noise=drawn.noise, past=past, self_context=own)


OBJECTIVES: dict[str, str] = {
    "Denoising": "diffusion_forcing.engine.objective:Denoising",
    "VideoDenoising": "diffusion_forcing.video.warp:VideoDenoising",
    "DecoderObjective": "diffusion_forcing.video.decoder:DecoderObjective",
}
"""Our own objectives: the name of each class, as a run's file says it, and where the class is."""
