"""The mazes' offline data: the benchmark's waypoint collector rebuilt, cached on disk, and cut into windows of tokens.

A frame is [action, next observation], six numbers; with `reward` seven, [action, reward, next observation]. A token holds several
frames side by side. Every window begins with a *present* token: the observation from which its first action is taken, written as a
ball that has coasted there at constant speed, so that an observation is a token like any other and conditions by being at level 0.
"""

from __future__ import annotations

import itertools
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from ..codecs import Chain
from ..files import cache_folder
from ..preconditioning import Joints
from ..windows import Batch
from .baselines.scripted import Controller
from .envs.maze2d import DT, GEAR, JITTER, Array, Maze, rewards, step

TRANSITIONS = {"umaze": 1_000_000, "medium": 2_000_000, "large": 4_000_000}
STREAMS = 64
"""Balls that collect side by side: the benchmark has one stream, which would take NumPy fifty times as long."""
NOISE = 0.5
SLACK = 1e-5
"""Variance by which tokens may break the law of motion at their joints, in units of tokens."""
Told = Callable[[str, int, int], None]


class Transitions(NamedTuple):
    """Streams of transitions: observations (s, t, 4), actions (s, t, 2), rewards (s, t), as float32. Streams have no joints."""

    observations: NDArray[np.float32]
    actions: NDArray[np.float32]
    rewards: NDArray[np.float32]


def collect(maze: Maze, transitions: int, seed: int = 0, progress: Told | None = None) -> Transitions:
    """The benchmark's noisy collector: walk to a random cell, then to the next, for ever, with noise on each action.

    As there, the observation is not refreshed when the target changes, so that one stands twice (`mend` undoes it).
    """
    rng = np.random.default_rng(seed)
    number = min(STREAMS, transitions)
    length = -(-transitions // number)

    def anywhere(n: int) -> Array:
        return maze.cells[rng.integers(len(maze.cells), size=n)] + rng.uniform(-JITTER, JITTER, (n, 2))

    position, velocity, target = anywhere(number), 0.1 * rng.standard_normal((number, 2)), anywhere(number)
    seen = np.concatenate([position, velocity], axis=1)
    controller = Controller(maze, number, lambda n: rng.uniform(size=(n, 2)))
    observations = np.empty((number, length, 4), dtype=np.float32)
    actions = np.empty((number, length, 2), dtype=np.float32)
    for t in range(length):
        action, there = controller.act(seen, target)
        action = np.clip(action + NOISE * rng.standard_normal((number, 2)), -1, 1)
        observations[:, t], actions[:, t] = seen, action
        position, velocity, _ = step(maze, position, velocity, action)
        seen = np.where(there[:, None], seen, np.concatenate([position, velocity], axis=1))
        if there.any():
            target[there] = anywhere(int(there.sum()))
        if progress is not None and (t % 200 == 199 or t == length - 1):
            progress(f"walking through the {maze.name} maze", (t + 1) * number, length * number)
    return Transitions(observations, actions, rewards(observations[..., :2], maze.goal).astype(np.float32))


def prepare(maze: Maze, transitions: int | None = None, seed: int = 0, progress: Told | None = None) -> Path:
    """The cache file of a maze's data, made if it is not there. A killed making leaves no file of that name."""
    from ..files import write_atomically

    size = transitions or TRANSITIONS[maze.name]
    file = cache_folder() / f"maze2d-{maze.name}-{size}-{seed}.npz"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        made = collect(maze, size, seed, progress)

        def write(path: Path) -> None:
            with open(path, "wb") as out:  # given a name instead, NumPy would add its own ending
                np.savez(out, **made._asdict())

        # A name of this process's own until the file is whole: two trainings may make the same data at once.
        own = file.with_name(f"{file.stem}.{os.getpid()}{file.suffix}")
        write_atomically(own, write)
        own.replace(file)
    return file


def read(file: Path) -> Transitions:
    """Transitions from our cache (.npz), or from the layout of the public data sets (.hdf5): one stream, cut at each timeout."""
    if not file.exists():
        raise FileNotFoundError(f"there are no data in {file}; `dforce data maze2d-umaze` makes them, or give an .hdf5 file of the layout")
    if file.suffix in (".hdf5", ".h5"):
        return _read_hdf5(file)
    try:
        with np.load(file) as arrays:
            return Transitions(*(arrays[name] for name in Transitions._fields))
    except (ValueError, OSError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} is damaged or not a cache of ours ({error}); delete it and it is made again") from error


def _read_hdf5(file: Path) -> Transitions:
    """D4RL's layout (observations, actions, rewards, terminals, timeouts) or Minari's (episode_N/observations, ...)."""
    try:
        import h5py
    except ImportError as error:
        raise ImportError("reading HDF5 needs h5py: pip install 'diffusion_forcing[planning]'") from error
    try:
        opened = h5py.File(file)
    except OSError as error:
        raise ValueError(f"{file} is damaged or not HDF5: {error}") from error
    with opened as data:
        names = [name for name in data if str(name).startswith("episode_")]
        if names:  # Minari: one more observation than actions in each
            episodes = [data[name] for name in sorted(names, key=lambda name: int(str(name).split("_")[1]))]
            parts = [(_plain_observation(e["observations"])[: len(e["actions"])], e["actions"][:], e["rewards"][:]) for e in episodes]
        else:
            missing = [name for name in ("observations", "actions", "rewards") if name not in data]
            if missing:
                raise ValueError(f"{file} has no {missing[0]!r}; it holds {', '.join(map(str, data))}, where the layout is observations, "
                                 "actions, rewards, terminals, timeouts")  # fmt: skip
            whole = [data[name][:] for name in ("observations", "actions", "rewards")]
            # A terminal of these data says that a target was reached; the ball walks on. Only a timeout cuts the stream.
            ends = data["timeouts"][:].astype(bool) if "timeouts" in data else np.zeros(len(whole[0]), dtype=bool)
            cuts = [0, *(np.flatnonzero(ends) + 1).tolist(), len(ends)]
            parts = [tuple(array[a:b] for array in whole) for a, b in itertools.pairwise(cuts) if b > a]
    widths = {(part[0].shape[1], part[1].shape[1]) for part in parts}
    if widths != {(4, 2)}:
        raise ValueError(f"{file} should hold observations of 4 numbers and actions of 2; got {sorted(widths)}")
    longest = max(len(part[0]) for part in parts)
    padded = [np.stack([_pad(part[i], longest) for part in parts]) for i in range(3)]
    return Transitions(*(array.astype(np.float32) for array in padded))


def _plain_observation(group: Any) -> NDArray[np.float64]:
    """Minari's point mazes keep observation, achieved and desired goal side by side; ours is the observation."""
    inner = group["observation"] if hasattr(group, "keys") else group
    return inner[:]


def _pad(array: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """NaN after the end: windows that would reach it are not drawn."""
    return np.concatenate([array, np.full((length - len(array), *array.shape[1:]), np.nan)])


def mend(observations: NDArray[np.float32]) -> NDArray[np.float32]:
    """Observations (s, t, 4) in which one that stands twice, or more often, has been put between its neighbours.

    The collector does not look again when its target changes; the ball has moved on all the same. The middle is right to about a
    millimetre, where a ball that stands still for a step would teach dynamics that do not exist.
    """
    mended = observations.copy()
    stands = np.zeros(observations.shape[:2], dtype=bool)
    stands[:, 1:-1] = (observations[:, 1:-1] == observations[:, :-2]).all(-1)
    s, t = np.nonzero(stands)
    first, last = t - 1, t + 1  # of each run: the observation that is repeated, and the next that differs
    while (back := stands[s, first]).any():
        first = first - back
    while (on := stands[s, last]).any():  # the last observation of a stream never counts as standing, so this ends
        last = last + on
    share = ((t - first) / (last - first)).astype(np.float32)[:, None]
    mended[s, t] = (1 - share) * observations[s, first] + share * observations[s, last]
    return mended


def frames_of(data: Transitions, reward: bool = False) -> tuple[Tensor, Tensor]:
    """Frames (s, t-1, 6 or 7) [action, (reward,) next observation], and the observation before each (s, t-1, 4)."""
    observations = mend(data.observations)
    parts = [data.actions[:, :-1], observations[:, 1:]]
    if reward:
        parts.insert(1, data.rewards[:, 1:, None])
    return torch.from_numpy(np.concatenate(parts, axis=-1)), torch.from_numpy(observations[:, :-1])


def present_frames(observation: Tensor, frames: int, reward: bool = False, earned: Tensor | None = None) -> Tensor:
    """(..., frames, 6 or 7): a ball that arrives at observation (..., 4) having coasted at its velocity for `frames` steps."""
    position, velocity = observation[..., None, :2], observation[..., None, 2:]
    back = torch.arange(frames - 1, -1, -1, dtype=observation.dtype, device=observation.device)[:, None] * DT
    shape = (*observation.shape[:-1], frames, 2)
    parts = [(velocity / GEAR).expand(shape), position - back * velocity, velocity.expand(shape)]
    if reward:
        value = torch.zeros(observation.shape[:-1], dtype=observation.dtype, device=observation.device) if earned is None else earned
        parts.insert(1, value[..., None, None].expand(*observation.shape[:-1], frames, 1))
    return torch.cat(parts, dim=-1)


def law_of_motion(frames: Tensor) -> Tensor:
    """(7, 4): the next state as [state, action, 1] @ law, fitted to frames (s, t, 6 or 7) as they fly freely."""
    said, state = _pairs(frames)
    known = torch.isfinite(said).all(-1) & torch.isfinite(state).all(-1)
    said, state = said[known], state[known]
    every = max(1, len(said) // 200_000)
    said, state = said[::every], state[::every]
    free = torch.ones(len(said), dtype=torch.bool)
    law = torch.linalg.lstsq(said, state).solution
    for _ in range(8):  # contacts with walls are no part of the law: leave out what it does not explain, and fit again
        miss = (said @ law - state).abs()
        free = (miss <= 4 * miss.median(0).values + 1e-6).all(1)
        law = torch.linalg.lstsq(said[free], state[free]).solution
    return (law / 1e-7).round() * 1e-7  # beyond that, solvers differ from run to run; two trainings should begin alike


def flies_freely(frames: Tensor, law: Tensor, tolerance: float = 1e-3) -> Tensor:
    """(s, t-1), whether each frame but the first obeys the law of motion; a ball that touches a wall does not."""
    said, state = _pairs(frames)
    return ((said @ law - state).abs() < tolerance).all(-1)


def _pairs(frames: Tensor) -> tuple[Tensor, Tensor]:
    """[state, action, 1] (s, t-1, 7) and the state that came of it (s, t-1, 4)."""
    wide = frames.double()
    one = torch.ones(*frames.shape[:1], frames.shape[1] - 1, 1, dtype=torch.float64)
    return torch.cat([wide[:, :-1, -4:], wide[:, 1:, :2], one], dim=-1), wide[:, 1:, -4:]


def joints(frames: Tensor, codec: Chain) -> Joints:
    """The law of motion from the last frame of a token to the first of the next, said of the codec's tokens."""
    law = law_of_motion(frames)
    assert codec.variance is not None
    numbers = torch.eye(len(codec.variance))[:, None]
    none = codec.decode(torch.zeros_like(numbers[:1]))[0].double()  # what the codec decodes is linear in tokens, but for this
    each = codec.decode(numbers).double() - none  # (d, stack, width)
    last, first = each[:, -1, -4:], each[:, 0]
    left = last @ law[:4]
    right = first[:, :2] @ law[4:6] - first[:, -4:]
    offset = none[-1, -4:] @ law[:4] + none[0, :2] @ law[4:6] + law[6] - none[0, -4:]
    size = (left**2 + right**2).sum(0).sqrt()
    return Joints((left / size).T, (right / size).T, offset / size, torch.full((4,), SLACK))


class FrameWindows:
    """Windows of `length` tokens that start at any frame of any stream: a present token, then length-1 tokens of `stack` frames.

    Tokens are made by the codec when read, since every frame can be the first of a window. short: share of the batches whose windows
    are cut into pieces of one random length each, every piece with a present of its own: so that short plans are learned too.
    """

    cond_width = 0

    def __init__(
        self, frames: Tensor, before: Tensor, length: int, stack: int, codec: nn.Module, event: tuple[int, ...], short: float = 0.0
    ) -> None:
        if length < 2:
            raise ValueError(f"a window holds the present and at least one token to come; got {length} tokens")
        real = torch.isfinite(frames).all(-1).sum(1)  # streams are filled up with NaN at their ends
        room = real - (length - 1) * stack + 1
        if not (room > 0).any():
            raise ValueError(
                f"no stream is as long as a window: {(length - 1) * stack} frames are asked for, the longest has {int(real.max())}"
            )
        self.length, self.stack, self.codec, self.event, self.short = length, stack, codec, event, short
        self.reward = frames.shape[-1] == 7
        self._frames, self._before = frames, before
        self._room = room.clamp(min=0)
        self._ends = self._room.cumsum(0)

    def __len__(self) -> int:
        """First frames that a window can have."""
        return int(self._ends[-1])

    def draw(self, size: int, generator: Generator | None = None) -> Tensor:
        """(n, 3): stream, first frame and tokens to come; each first frame of a whole window equally often."""
        windows = self._place(torch.randint(0, len(self), (size,), generator=generator))
        if not self.short:
            return windows
        chance, share = torch.rand(2, generator=generator).tolist()
        tokens = int((self.length - 1) ** share) if chance < self.short else self.length - 1  # log-uniform: 1 .. length-1
        pieces = (self.length - 1) // tokens
        stream, first, _ = windows.repeat_interleave(pieces, dim=0).unbind(1)
        first = first + torch.arange(pieces).repeat(size) * tokens * self.stack
        return torch.stack([stream, first, torch.full_like(first, tokens)], dim=1)

    def all(self) -> Tensor:
        """(n, 3): whole windows that follow one another, for validation."""
        return self._place(torch.arange(0, len(self), (self.length - 1) * self.stack))

    def every(self, number: int) -> Tensor:
        """(number, 3): whole windows spread evenly over all that there are."""
        return self._place(torch.linspace(0, len(self) - 1, number).long())

    def length_of(self, windows: Tensor) -> int:
        """Tokens of these windows, the present included."""
        return int(windows[0, 2]) + 1

    def raw(self, windows: Tensor) -> Tensor:
        """Frames (n, tokens * stack, 6 or 7) in the data's own units, the present first."""
        stream, first, tokens = windows.unbind(1)
        index = first[:, None] + torch.arange(int(tokens[0]) * self.stack)
        frames = self._frames[stream[:, None], index]
        return torch.cat([present_frames(self._before[stream, first], self.stack, self.reward), frames], dim=1)

    def read(self, windows: Tensor) -> Batch:
        x = self.codec.encode(self.raw(windows))  # type: ignore[operator]
        return Batch(x, x.new_zeros(*x.shape[:2], 0), torch.ones(x.shape[:2], dtype=torch.bool))

    def _place(self, which: Tensor) -> Tensor:
        stream = torch.searchsorted(self._ends, which, right=True)
        first = which - (self._ends[stream] - self._room[stream])
        return torch.stack([stream, first, torch.full_like(first, self.length - 1)], dim=1)
