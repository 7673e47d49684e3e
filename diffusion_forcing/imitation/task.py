"""Imitation (paper, section 4.4): demonstrations as sequences of tokens, and how well an agent trained on them does in its world."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..checks import check_options
from ..engine.log import progress_bar
from ..engine.task import Evaluation, Progress, Table, Task, TaskData
from ..model import DiffusionForcing
from ..sampling import Sampler
from .agent import SAMPLER, AgentOptions, agent_for
from .demonstrations import Demonstrations
from .figures import CODEC_CAPTION, draw_codec, draw_imagined
from .image_tokens import ImageTokens
from .keypoints import as_floats, prepare_keypoints
from .pusht.task import Pushing
from .recorded import Recorded
from .swap.task import Swapping
from .tokens import ACTIONS, ModalityTokens
from .windows import Timesteps, TimestepWindows, as_batch, as_tensors, timesteps_of

CODECS = {"modalities": ModalityTokens, "image": ImageTokens}


@dataclass(frozen=True)
class Imitation(Task):
    """Demonstrations, how they become tokens, and how an agent acts."""

    world: Swapping | Pushing | Recorded = field(default_factory=Swapping)
    """Where demonstrations come from, and models are evaluated."""
    chunk: int = 15
    """Actions from one observation to the next."""
    tokens: Literal["modalities", "image"] = "modalities"
    """modalities: a token for each camera, the state and the actions of a timestep. image: one token per timestep, as in the paper, images
    and actions as channels of one image, for a convolutional network."""
    components: int = 96
    """Numbers that an image is encoded to."""
    keypoint_steps: int = 0
    """Training steps of a keypoint autoencoder for each camera, before everything else; 0: principal components instead."""
    whiten: float = 0.5
    """How far components are scaled to equal variance: 0 not at all, 1 fully."""
    state: bool = True
    """Observe the measured state, beside the cameras."""
    window: int = 40
    """Timesteps of a training window, observations with the actions after each; less where demonstrations are shorter."""
    offsets: int = 1
    """Ways to cut a demonstration into chunks, each beginning a frame later; at most as many as a chunk has frames."""
    mirror: bool = False
    """Also train on each demonstration as seen in a mirror, in worlds that are symmetric."""
    sampler: Sampler = SAMPLER
    """How the agent samples actions, and what it imagines."""
    agent: AgentOptions = field(default_factory=AgentOptions)
    """What the agent remembers, and how it treats noisy observations."""

    main_options = ("chunk", "components", "window", "state", "world.path", "world.number", "sampler.steps", "agent.memory")
    short_options = (("--data", "--task.world.path"),)
    evaluation_options = ("world.trials", "world.distractor_level", "world.extra_steps")

    def __post_init__(self) -> None:
        check_options(self, "chunk", "components", "window", "offsets")
        if self.keypoint_steps < 0:
            raise ValueError(f"keypoint_steps counts training steps, or is 0 for principal components; got {self.keypoint_steps}")
        if self.mirror and not self.world.mirrors:
            raise ValueError(f"how to mirror the actions of {type(self.world).__name__} demonstrations is not known; set mirror=False")
        self.world.check_chunk(self.chunk)

    def prepare(self, progress: Progress | None = None) -> Path:
        """The demonstrations, made if they are not in the cache. Returns their file or folder."""
        return self.world.prepare(progress)

    def data(self) -> TaskData:
        return _data(self)

    def data_as(self, codec: nn.Module, raw: bool = False) -> TaskData:
        """As `data`, in the tokens of a model that was trained before."""
        if raw:
            raise ValueError("an imitation model has no learned decoder to train by itself; use another objective")
        kind = CODECS[self.tokens]
        if not isinstance(codec, kind):
            raise ValueError(f"the model's tokens are {type(codec).__name__}, this task's {kind.__name__} (--task.tokens)")
        return _read(self, codec)

    @property
    def default_samples(self) -> int:
        return self.world.default_samples

    def evaluate(self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress) -> Evaluation:
        agent = agent_for(model, self.sampler, self.agent, seed)
        held_out = functools.cache(lambda: self._held_out(progress))
        evaluation = self.world.evaluate(agent, folder, held_out=held_out, samples=samples, seed=seed, progress=progress)
        if not agent.cameras:
            return evaluation
        draw_codec(agent, self.world.example(self.chunk) or held_out(), folder / "codec.png")
        return dataclasses.replace(evaluation, figures={**evaluation.figures, "codec.png": CODEC_CAPTION})

    def compare(
        self, model: DiffusionForcing, others: Mapping[str, tuple[Imitation, DiffusionForcing]], folder: Path, *, samples: int, seed: int,
        progress: Progress,
    ) -> Evaluation:  # fmt: skip
        """All in the same episodes of this task's world, each with its own agent options. Metrics of others are called `NAME: ...`."""
        for name, (task, other) in others.items():
            if type(task.world) is not type(self.world):
                raise ValueError(f"{name} was trained in another world ({type(task.world).__name__}); compare runs of one world")
            theirs, ours = (getattr(one.codec, "shapes", {}) for one in (other, model))
            if any(ours.get(key, shape) != shape for key, shape in theirs.items() if key != ACTIONS):
                raise ValueError(f"{name} observes images or states of other sizes: {theirs} instead of {ours}")
        evaluation = self.evaluate(model, folder, samples=samples, seed=seed, progress=progress)
        for name, (task, other) in others.items():
            beside = folder / name.replace("/", "_")
            beside.mkdir(parents=True, exist_ok=True)
            compared = dataclasses.replace(task, world=self.world.for_comparison())
            its = compared.evaluate(other, beside, samples=samples, seed=seed, progress=_renamed(progress, name))
            evaluation = _side_by_side(evaluation, its, name, beside.name)
        return evaluation

    def sample(self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress) -> list[Path]:
        """Episodes imagined from the first observation of held-out demonstrations: arrays, and a figure of each modality."""
        episodes = self.imagined(model, samples, seed, progress)
        file = folder / "imagined.npz"
        np.savez_compressed(file, **episodes)  # type: ignore[arg-type]
        return [file, *draw_imagined(episodes, folder)]

    def imagined(self, model: DiffusionForcing, samples: int, seed: int, progress: Progress) -> Timesteps:
        """Modalities (n, t, *shape) for as many timesteps as the longest demonstration has: the first observation is real."""
        held_out = self._held_out(progress)
        episodes = [timesteps_of(held_out, i, self.chunk, 0, self.state) for i in range(min(samples, len(held_out)))]
        agent = agent_for(model, self.sampler, self.agent, seed)
        agent.reset(len(episodes))
        length = max(len(episode[ACTIONS]) for episode in episodes)
        first = {name: np.stack([episode[name][0] for episode in episodes]) for name in agent.sensors}
        actions = [agent.act(first)]
        observations = {name: [as_floats(torch.as_tensor(values)).numpy()] for name, values in first.items()}
        for done in range(length - 1):
            chunk, observation = agent.imagine()
            actions.append(chunk)
            for name, values in observation.items():
                observations[name].append(values)
            progress("timesteps", done + 1, length - 1)
        return {ACTIONS: np.stack(actions, axis=1), **{name: np.stack(values, axis=1) for name, values in observations.items()}}

    def _held_out(self, progress: Progress) -> Demonstrations:
        demonstrations = self.world.demonstrations(self.chunk, progress)
        return demonstrations.subset(slice(max(0, len(demonstrations) - self.world.held_out), None))


@functools.lru_cache(maxsize=2)
def _data(task: Imitation) -> TaskData:
    return _read(task)


def _read(task: Imitation, codec: Any = None) -> TaskData:
    """Windows to train and validate on. codec: of a model that was trained before; None: one is fitted."""
    with progress_bar() as progress:
        demonstrations = task.world.demonstrations(task.chunk, progress)
        last = len(demonstrations) - task.world.held_out
        if last < 1:
            raise ValueError(f"{len(demonstrations)} demonstrations, of which {task.world.held_out} are held out, leave none to train on")
        learned, held_out = demonstrations.subset(slice(last)), demonstrations.subset(slice(last, None))
        if task.mirror:
            learned = learned.joined(task.world.mirrored(learned))
        train, valid = _episodes(task, learned, task.offsets), _episodes(task, held_out, 1)
        if codec is None:
            codec = _fit_codec(task, learned, train, progress)
        return TaskData(_windows(task, codec, train, progress), _windows(task, codec, valid, progress), codec)


def _episodes(task: Imitation, demonstrations: Demonstrations, offsets: int) -> list[Timesteps]:
    return [
        timesteps_of(demonstrations, i, task.chunk, offset, task.state)
        for i in range(len(demonstrations))
        for offset in range(max(1, min(offsets, task.chunk // demonstrations.every, len(demonstrations.states[i]) - 1)))
    ]


def _fit_codec(task: Imitation, demonstrations: Demonstrations, episodes: list[Timesteps], progress: Progress) -> nn.Module:
    tensors = [as_tensors(episode) for episode in episodes]
    if task.tokens == "image":
        return ImageTokens.fit(tensors)
    autoencoders = {
        name: prepare_keypoints(np.concatenate(images), task.components, task.keypoint_steps, progress=_renamed(progress, name))
        for name, images in demonstrations.images.items()
        if task.keypoint_steps
    }
    return ModalityTokens.fit(tensors, dict.fromkeys(demonstrations.images, task.components), task.whiten, autoencoders=autoencoders)


def _windows(task: Imitation, codec: Any, episodes: list[Timesteps], progress: Progress) -> TimestepWindows:
    if task.tokens == "image":
        # A token holds an observation and the actions that led to it: the actions after the last observation are in one more.
        return TimestepWindows([codec.encode(as_batch(episode))[0] for episode in episodes], task.window + 1)
    tokens: list[Tensor] = []
    conditions: list[Tensor] = []
    modalities = len(codec.names)
    for done, episode in enumerate(episodes):
        batch = as_batch(episode)
        encoded = codec.encode(batch)[0, 1:]
        # The observation of a timestep, and the actions after it, are conditioned on the last action before it.
        last = torch.cat([codec.initial_action[None], batch[ACTIONS][0, 1:, -1]])
        tokens.append(encoded)
        conditions.append(codec.build_cond(last, modalities, 1).flatten(0, 1)[: len(encoded)])
        progress("timesteps to tokens", done + 1, len(episodes))
    return TimestepWindows(tokens, task.window * modalities, modalities=modalities, conditions=conditions)


def _side_by_side(one: Evaluation, other: Evaluation, name: str, folder: str) -> Evaluation:
    """With another run's metrics, its figures in a folder of its own, and a column with the first value of each row of its table."""
    (table,), (theirs,) = one.tables, other.tables
    values = {row[0]: row[1] for row in theirs.rows}
    rows = tuple((*row, values.get(row[0], "")) for row in table.rows)
    return Evaluation(
        {**one.metrics, **{f"{name}: {key}": value for key, value in other.metrics.items()}},
        (Table(table.title, (*table.columns, name), rows),),
        {**one.figures, **{f"{folder}/{file}": f"{name}: {caption}" for file, caption in other.figures.items()}},
    )


def _renamed(progress: Progress, name: str) -> Progress:
    return lambda what, done, of: progress(f"{what} for {name}", done, of)
