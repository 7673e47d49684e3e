"""Imitation (paper, section 4.4): demonstrations as moments, an agent with memory that acts, and how well it does in its world."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from ..checks import check_options
from ..engine.media import to_bytes
from ..engine.task import Evaluation, Progress, Table, TaskData
from ..windows import Windows
from .agent import ActOptions, ImitationAgent, agent_for
from .image_tokens import Planes
from .keypoints import as_floats, prepare_eye
from .pusht.task import Pushing
from .swap.task import Swapping
from .tokens import ACTIONS, STATE, Parts

if TYPE_CHECKING:
    from ..model import DiffusionForcing
    from .demonstrations import Demonstrations

Moments = dict[str, NDArray]
SEEN = 5
"""Actions from one look to the next at most, of demonstrations of one's own: looks between chunks are where offsets begin."""


@dataclass(frozen=True)
class Recorded:
    """Demonstrations of one's own: a LeRobot data set (v2.1) in a folder. There is no world to try a model in, only actions to compare."""

    path: Path = Path("demonstrations")
    """The folder."""
    cameras: tuple[str, ...] | None = None
    """Names of the cameras to look through; None: all."""
    px: int = 64
    """Height and width to which pictures are cut and resized."""
    held: int = 4
    """How many demonstrations, the last ones, are kept to judge by."""

    def __post_init__(self) -> None:
        check_options(self, "px", "held")

    def beside(self) -> Recorded:
        return self

    def demonstrations(self, chunk: int, progress: Progress | None = None) -> Demonstrations:
        from .lerobot import read_lerobot

        every = max(steps for steps in range(1, SEEN + 1) if chunk % steps == 0)
        return read_lerobot(self.path, cameras=self.cameras, px=self.px, every=every, progress=progress)


@dataclass(frozen=True)
class Imitation:
    """Demonstrations, how they become moments, and how an agent that imitates them acts."""

    world: Swapping | Pushing | Recorded = field(default_factory=Swapping)
    """Where demonstrations come from."""
    chunk: int = 15
    """Actions from one look to the next."""
    components: int = 96
    """Numbers a picture is told by."""
    eye_steps: int = 0
    """Steps for which an autoencoder is trained for each camera, before all else; 0: principal directions instead, in closed form."""
    whiten: float = 0.5
    """How far these are made equally large: 0 not at all, 1 all alike."""
    state: bool = True
    """Whether the measured state is seen, beside the pictures."""
    joint: bool = False
    """One token a moment, as in the paper: pictures and actions are planes of one picture, for a convolutional network."""
    moments: int = 40
    """Looks of a window of training, with the actions after each; less where demonstrations are shorter."""
    offsets: int = 1
    """How many ways to cut a demonstration into chunks are trained on, each beginning a look later; no more than a chunk has looks."""
    mirror: bool = False
    """Whether each demonstration is also trained on as seen in a mirror, in worlds that look the same there."""
    acting: ActOptions = field(default_factory=ActOptions)
    """How the agent acts."""

    def __post_init__(self) -> None:
        check_options(self, "chunk", "components", "moments", "offsets")
        if self.eye_steps < 0:
            raise ValueError(f"eye_steps counts steps, or is 0 for principal directions; got {self.eye_steps}")
        if self.mirror and isinstance(self.world, Recorded):
            raise ValueError("which numbers of recorded actions a mirror would turn round is not known; set mirror=False")
        if isinstance(self.world, Swapping):
            self.world.check_chunk(self.chunk)

    def prepare(self, progress: Progress | None = None) -> Path:
        """The demonstrations, made if they are not in the cache. Returns their file or folder."""
        return self.world.prepare(progress) if isinstance(self.world, Swapping) else self.world.path

    def data(self) -> TaskData:
        return _data(self)

    def data_as(self, codec: nn.Module) -> TaskData:
        """As data, in the tokens of a model that was trained before."""
        kind = Planes if self.joint else Parts
        if not isinstance(codec, kind):
            raise ValueError(f"that model's tokens are {type(codec).__name__}; this task's are {kind.__name__}")
        return _prepared(self, codec)

    @property
    def default_samples(self) -> int:
        return self.world.held if isinstance(self.world, Recorded) else 50

    def evaluate(
        self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress,
        others: dict[str, tuple[Imitation, DiffusionForcing]] | None = None,
    ) -> Evaluation:  # fmt: skip
        """others: tasks and models by name to measure beside this one, each acting its own way, in the same episodes of this one's world.
        Their metrics are called `NAME: ...`."""
        for name, (task, other) in (others or {}).items():
            if type(task.world) is not type(self.world):
                raise ValueError(f"{name} was trained in another world ({type(task.world).__name__}); compare like with like")
            seen, here = (one.codec.shapes if isinstance(one.codec, Parts | Planes) else {} for one in (other, model))
            if {key: shape for key, shape in seen.items() if key != ACTIONS and here.get(key, shape) != shape}:
                raise ValueError(f"{name} looks at pictures or states of other sizes: {seen} instead of {here}")
        evaluation = self._evaluate(model, folder, samples, seed, progress)
        for name, (task, other) in (others or {}).items():
            beside = folder / name.replace("/", "_")
            beside.mkdir(parents=True, exist_ok=True)
            judged = dataclasses.replace(task, world=self.world.beside())
            found = judged._evaluate(other, beside, samples, seed, _said_of(progress, name))
            evaluation = _side_by_side(evaluation, found, name, beside.name)
        return evaluation

    def _evaluate(self, model: DiffusionForcing, folder: Path, samples: int, seed: int, progress: Progress) -> Evaluation:
        agent = agent_for(model, self.acting, seed)
        shown: Demonstrations | None = None
        if isinstance(self.world, Recorded):
            shown = self._kept_back(progress)
            evaluation = self._compare(agent, shown, samples, progress)
        else:
            evaluation = self.world.try_out(agent, folder, samples=samples, seed=seed, progress=progress)
        figures = self._show_codec(agent, folder, shown, progress)
        return dataclasses.replace(evaluation, figures={**evaluation.figures, **figures})

    def _show_codec(self, agent: ImitationAgent, folder: Path, shown: Demonstrations | None, progress: Progress) -> dict[str, str]:
        """Draws real pictures above what encoding leaves of them; returns captions by name, none without cameras.

        shown: demonstrations to take the pictures from, if they are at hand.
        """
        from ..engine.media import contact_sheet

        cameras = [name for name in agent.seen if name != STATE]
        if not cameras:
            return {}
        chunk = agent.codec.shapes[ACTIONS][0]
        if shown is None and isinstance(self.world, Swapping) and not self.world.prepared:
            shown = self.world.example(chunk)  # to make all of them for one picture would take minutes
        cut = moments_of(shown or self._kept_back(progress), 0, chunk, 0, self.state)
        rows, names = [], []
        back = {name: part[0] for name, part in agent.codec.decode(agent.codec.encode(as_batch(cut))).items()}
        for name in cameras:
            rows += [cut[name], to_bytes(back[name])]
            names += [name, "encoded"]
        contact_sheet(np.stack(rows), folder / "codec.png", names=names, every=max(1, len(rows[0]) // 12))
        return {"codec.png": "What the cameras saw in a demonstration, and below each what is left of it in a token."}

    def sample(self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress) -> list[Path]:
        """What the model imagines from the first look of demonstrations that were kept back, to their end."""
        found = self.imagined(model, samples, seed, progress)
        file = folder / "imagined.npz"
        np.savez_compressed(file, **found)  # type: ignore[arg-type]
        return [file, *_sheets(found, folder)]

    def imagined(self, model: DiffusionForcing, samples: int, seed: int, progress: Progress) -> Moments:
        """Parts (n, t, *shape): the first look is real, all that follows is imagined, t moments as in the demonstrations."""
        held = self._kept_back(progress)
        cuts = [moments_of(held, i, self.chunk, 0, self.state) for i in range(min(samples, len(held)))]
        agent = agent_for(model, self.acting, seed)
        agent.reset(len(cuts))
        t = max(len(cut[ACTIONS]) for cut in cuts)
        first = {name: np.stack([cut[name][0] for cut in cuts]) for name in agent.seen}
        actions = [agent.act(first)]
        seen = {name: [as_floats(torch.as_tensor(part)).numpy()] for name, part in first.items()}
        for done in range(t - 1):
            acts, parts = agent.imagine()
            actions.append(acts)
            for name, part in parts.items():
                seen[name].append(part)
            progress("moments", done + 1, t - 1)
        return {ACTIONS: np.stack(actions, axis=1), **{name: np.stack(parts, axis=1) for name, parts in seen.items()}}

    def _compare(self, agent: ImitationAgent, shown: Demonstrations, samples: int, progress: Progress) -> Evaluation:
        """Actions decided at each look of demonstrations that were kept back, against those that people took."""
        number = min(samples, len(shown))
        if number < samples:
            warnings.warn(f"{samples} demonstrations were asked for, but {number} are kept back to judge by: those are used", stacklevel=3)
        errors, last, spread = [], [], []
        for i in range(number):
            cut = moments_of(shown, i, self.chunk, 0, self.state)
            agent.reset(1)
            for j in range(len(cut[ACTIONS]) - 1):
                decided = agent.act({name: cut[name][j][None] for name in agent.seen}, doing=cut[ACTIONS][j + 1][None])
                wanted = shown.actions[i][j * self.chunk : (j + 1) * self.chunk]  # the last chunk may be a short one
                before = cut[ACTIONS][j][-1] if j else wanted[0]
                errors.append(np.abs(decided[0, : len(wanted)] - wanted))
                last.append(np.abs(before - wanted))
                spread.append(wanted)
            progress("demonstrations", i + 1, number)
        own, held = np.concatenate(errors).mean(0), np.concatenate(last).mean(0)
        std = np.concatenate(spread).std(0)
        rows = tuple((f"action {i}", f"{a:.4g}", f"{b:.4g}", f"{s:.4g}") for i, (a, b, s) in enumerate(zip(own, held, std, strict=True)))
        metrics = {
            "error over spread": float((own / np.maximum(std, 1e-9)).mean()),
            "held over spread": float((held / np.maximum(std, 1e-9)).mean()),
        }
        title = f"Actions on {number} demonstrations kept back: mean distance to what was done"
        return Evaluation(metrics, (Table(title, ("", "decided", "last action held", "spread"), rows),), {})

    def _kept_back(self, progress: Progress) -> Demonstrations:
        demonstrations = self.world.demonstrations(self.chunk, progress)
        return demonstrations.subset(slice(max(0, len(demonstrations) - self.world.held), None))


def _side_by_side(one: Evaluation, other: Evaluation, name: str, folder: str) -> Evaluation:
    """With another run's metrics, its figures from a folder of its own, and a column with the first figure of each row of its table."""
    (table,), (its,) = one.tables, other.tables
    values = {row[0]: row[1] for row in its.rows}
    rows = tuple((*row, values.get(row[0], "")) for row in table.rows)
    return Evaluation(
        {**one.metrics, **{f"{name}: {key}": value for key, value in other.metrics.items()}},
        (Table(table.title, (*table.columns, name), rows),),
        {**one.figures, **{f"{folder}/{file}": f"{name}: {caption}" for file, caption in other.figures.items()}},
    )


def moments_of(demonstrations: Demonstrations, i: int, chunk: int, offset: int = 0, state: bool = True) -> Moments:
    """Parts (t, *shape) of episode i cut into chunks of actions, from frame number `offset` on.

    Moment j is what was seen after chunk j; the chunk before the first moment is zeros, to be left out. An episode that ends within a chunk
    goes on resting: its last action is repeated, and its last frame is seen again.
    """
    every = demonstrations.every
    if chunk % every:
        raise ValueError(f"demonstrations are seen every {every} actions, so a chunk must be a multiple of that; got {chunk}")
    actions = demonstrations.actions[i][offset * every :]
    frames = len(demonstrations.states[i]) - offset
    if frames < 1 or len(actions) < 1:
        raise ValueError(f"episode {i} has {len(demonstrations.states[i])} frames; none is left from number {offset} on")
    chunks = -(-len(actions) // chunk)
    padded = np.concatenate([actions, np.repeat(actions[-1:], chunks * chunk - len(actions), axis=0)])
    before = np.concatenate([np.zeros_like(padded[:chunk])[None], padded.reshape(chunks, chunk, -1)])
    seen = offset + np.minimum(np.arange(chunks + 1) * (chunk // every), frames - 1)
    found: Moments = {ACTIONS: before}
    found.update({name: episodes[i][seen] for name, episodes in demonstrations.images.items()})
    if (state and demonstrations.state_width) or not demonstrations.images:
        found[STATE] = demonstrations.states[i][seen]
    return found


class MomentWindows(Windows):
    """Windows that begin with a look, where each moment is `parts` tokens: what is seen, and the actions after it.

    A sequence ends with a look that no actions follow. Windows are no longer than the longest sequence.
    """

    def __init__(self, sequences: Sequence[Tensor], length: int, *, parts: int = 1, conditions: Sequence[Tensor] | None = None) -> None:
        super().__init__(sequences, min(length, max(map(len, sequences))), conditions=conditions)
        self.parts = parts

    def draw(self, size: int, generator: Generator | None = None) -> Tensor:
        which, first = super().draw(size, generator).unbind(1)
        # Where there is room it is whole moments, so that each is drawn equally often.
        return torch.stack([which, first - first % self.parts], dim=1)


@functools.lru_cache(maxsize=2)
def _data(task: Imitation) -> TaskData:
    return _prepared(task)


def _prepared(task: Imitation, codec: nn.Module | None = None) -> TaskData:
    from ..engine.log import progress_bar

    with progress_bar() as progress:
        demonstrations = task.world.demonstrations(task.chunk, progress)
        last = len(demonstrations) - task.world.held
        if last < 1:
            raise ValueError(
                f"{len(demonstrations)} demonstrations, of which {task.world.held} are kept to judge by, leave none to train on"
            )
        return _read(task, demonstrations, last, progress, codec)


def _read(task: Imitation, demonstrations: Demonstrations, last: int, progress: Progress, known: Any = None) -> TaskData:
    """known: the codec of a model that was trained before; None: one is fitted."""

    def cut(demonstrations: Demonstrations, offsets: int) -> list[Moments]:
        return [
            moments_of(demonstrations, i, task.chunk, offset, task.state)
            for i in range(len(demonstrations))
            for offset in range(max(1, min(offsets, task.chunk // demonstrations.every, len(demonstrations.states[i]) - 1)))
        ]

    learned, kept_back = demonstrations.subset(slice(last)), demonstrations.subset(slice(last, None))
    if task.mirror:
        assert not isinstance(task.world, Recorded)
        learned = learned.joined(task.world.mirrored(learned))
    train, valid = cut(learned, task.offsets), cut(kept_back, 1)
    if task.joint:
        planes = known or Planes.fit([as_tensors(one) for one in train])
        whole, held = ([planes.encode(as_batch(one))[0] for one in cuts] for cuts in (train, valid))
        # A token is what is seen and the actions that led to it: those after the last look are in one more.
        return TaskData(MomentWindows(whole, task.moments + 1), MomentWindows(held, task.moments + 1), planes)
    codec = known or _fitted(task, learned, train, progress)
    parts = len(codec.names)

    def windows(cuts: list[Moments]) -> Windows:
        tokens, kinds = [], []
        for done, one in enumerate(cuts):
            moments = as_batch(one)
            encoded = codec.encode(moments)[0, 1:]
            # What is seen at a moment, and the actions after it, are told what was done last.
            last = torch.cat([codec.start[None], moments[ACTIONS][0, 1:, -1]])
            told = codec.conditions(last, parts, 1).flatten(0, 1)[: len(encoded)]
            tokens.append(encoded)
            kinds.append(told)
            progress("moments to tokens", done + 1, len(cuts))
        return MomentWindows(tokens, task.moments * parts, parts=parts, conditions=kinds)

    return TaskData(windows(train), windows(valid), codec)


def _fitted(task: Imitation, learned: Demonstrations, train: list[Moments], progress: Progress) -> Parts:
    """How moments become tokens, with eyes that are trained first where the task asks for them."""
    keep = dict.fromkeys(learned.images, task.components)
    eyes = {
        name: prepare_eye(np.concatenate(learned.images[name]), task.components, task.eye_steps, progress=_said_of(progress, name))
        for name in learned.images
        if task.eye_steps
    }
    return Parts.fit([as_tensors(one) for one in train], keep, task.whiten, eyes=eyes)


def _said_of(progress: Progress, name: str) -> Progress:
    return lambda what, done, of: progress(f"{what} for {name}", done, of)


def as_tensors(moments: Moments) -> dict[str, Tensor]:
    return {name: torch.as_tensor(part) for name, part in moments.items()}


def as_batch(moments: Moments) -> dict[str, Tensor]:
    """Moments (t, *shape) as a batch of one, (1, t, *shape)."""
    return {name: part[None] for name, part in as_tensors(moments).items()}


def _sheets(found: Moments, folder: Path) -> list[Path]:
    """A sheet of what each camera was imagined to see, one row a demonstration; of states and actions, lines over time."""
    from ..engine.media import contact_sheet
    from ..engine.plotting import COLOURS, figure

    files = []
    for name, part in found.items():
        file = folder / f"{name}.png"
        if part.ndim == 5 and part.shape[-1] == 3 and name not in (ACTIONS, STATE):
            contact_sheet(to_bytes(torch.as_tensor(part[:8])), file, every=max(1, part.shape[1] // 14), mark=1)
        else:
            lines = part.reshape(len(part), -1, part.shape[-1])
            with figure(file, 9, 3) as fig:
                ax = fig.subplots()
                for i in range(min(4, lines.shape[-1])):
                    ax.plot(lines[0, :, i], color=COLOURS[i], label=f"{name} {i}")
                ax.set(xlabel="step")
                ax.legend(frameon=False)
        files.append(file)
    return files
