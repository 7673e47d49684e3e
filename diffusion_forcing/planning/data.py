"""The mazes' offline data: the benchmark's waypoint collector rebuilt, cached on disk; and data sets in the public layouts."""

from __future__ import annotations

import itertools
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..engine.task import Progress
from ..files import cached
from .baselines.scripted import Controller
from .envs.maze2d import JITTER, Array, Maze, step
from .envs.windy import Gusts

TRANSITIONS = {"umaze": 1_000_000, "medium": 2_000_000, "large": 4_000_000, "windy": 1_000_000}
STREAMS = 64
"""Balls that collect side by side. (The benchmark has one stream, which would take NumPy fifty times as long.)"""
NOISE = 0.5
"""Standard deviation of the collector's action noise."""

CAREFUL = 0.25
"""Of the collector's walks in a maze with chance, how many shun the wind and the pit."""


class Transitions(NamedTuple):
    """Streams of transitions: observations (s, t, 4) and actions (s, t, 2), float32. Each stream is one uninterrupted walk."""

    observations: NDArray[np.float32]
    actions: NDArray[np.float32]


def collect(maze: Maze, transitions: int, seed: int = 0, progress: Progress | None = None) -> Transitions:
    """The benchmark's noisy collector: walk to a random cell, then to the next one, without end, with noise on every action.

    As there, the observation is not updated in the step in which the target changes, so that one is recorded twice
    (`interpolate_repeats` repairs it). In a maze with chance some walks take the short way, wind or not, the
    others shun it.
    """
    rng = np.random.default_rng(seed)
    number = min(STREAMS, transitions)
    length = -(-transitions // number)

    def random_points(n: int) -> Array:
        return maze.cells[rng.integers(len(maze.cells), size=n)] + rng.uniform(-JITTER, JITTER, (n, 2))

    position, velocity, target = random_points(number), 0.1 * rng.standard_normal((number, 2)), random_points(number)
    observation = np.concatenate([position, velocity], axis=1)
    controller = Controller(maze, number, lambda n: rng.uniform(size=(n, 2)))
    gusts = None if maze.chance is None else Gusts(maze, number, rng)
    observations = np.empty((number, length, 4), dtype=np.float32)
    actions = np.empty((number, length, 2), dtype=np.float32)
    for t in range(length):
        action, arrived = controller.act(observation, target)
        action = np.clip(action + NOISE * rng.standard_normal((number, 2)), -1, 1)
        observations[:, t], actions[:, t] = observation, action
        position, velocity, _ = step(maze, position, velocity, action, None if gusts is None else gusts.force(position))
        observation = np.where(arrived[:, None], observation, np.concatenate([position, velocity], axis=1))
        if arrived.any():
            target[arrived] = random_points(int(arrived.sum()))
            if gusts is not None:
                controller.careful[arrived] = rng.random(int(arrived.sum())) < CAREFUL
        if progress is not None and (t % 200 == 199 or t == length - 1):
            progress(f"collecting data in the {maze.name} maze", (t + 1) * number, length * number)
    return Transitions(observations, actions)


def prepare(maze: Maze, transitions: int | None = None, seed: int = 0, progress: Progress | None = None) -> Path:
    """The cache file of a maze's data, collected if it is not there. transitions: None for as many as the benchmark has."""
    size = transitions or TRANSITIONS[maze.name]

    def make(path: Path) -> None:
        data = collect(maze, size, seed, progress)
        with open(path, "wb") as out:  # given a name instead, NumPy would add its own ending
            np.savez(out, **data._asdict())

    return cached(f"maze2d-{maze.name}-{size}-{seed}.npz", make)


def read(file: Path) -> Transitions:
    """Transitions from our cache (.npz), or from the layout of the public data sets (.hdf5): one stream, cut at each timeout."""
    if not file.exists():
        raise FileNotFoundError(f"there is no data file {file}; `dforce data maze2d-umaze` makes one, or give an .hdf5 file of that layout")
    if file.suffix in (".hdf5", ".h5"):
        return _read_hdf5(file)
    try:
        with np.load(file) as arrays:
            return Transitions(*(arrays[name] for name in Transitions._fields))
    except (ValueError, OSError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} is damaged or not a cache of ours ({error}); delete it and it is made again") from error


def _read_hdf5(file: Path) -> Transitions:
    """D4RL's layout (observations, actions, timeouts) or Minari's (episode_N/observations, ...)."""
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
            parts = [(_plain_observation(e["observations"])[: len(e["actions"])], e["actions"][:]) for e in episodes]
        else:
            missing = [name for name in ("observations", "actions") if name not in data]
            if missing:
                raise ValueError(f"{file} has no {missing[0]!r}; it holds {', '.join(map(str, data))}, where the layout is observations, "
                                 "actions, and timeouts if there are any")  # fmt: skip
            observations, actions = data["observations"][:], data["actions"][:]
            # A terminal of these data marks a reached target, after which the ball walks on. Only a timeout cuts the stream.
            ends = data["timeouts"][:].astype(bool) if "timeouts" in data else np.zeros(len(observations), dtype=bool)
            cuts = [0, *(np.flatnonzero(ends) + 1).tolist(), len(ends)]
            parts = [(observations[a:b], actions[a:b]) for a, b in itertools.pairwise(cuts) if b > a]
    widths = {(observations.shape[1], actions.shape[1]) for observations, actions in parts}
    if widths != {(4, 2)}:
        raise ValueError(f"{file} should hold observations of 4 numbers and actions of 2; got {sorted(widths)}")
    longest = max(len(observations) for observations, _ in parts)
    padded = [np.stack([_pad(part[i], longest) for part in parts]) for i in range(2)]
    return Transitions(*(array.astype(np.float32) for array in padded))


def _plain_observation(group: Any) -> NDArray[np.float64]:
    """Minari's point mazes keep observation, achieved and desired goal side by side; ours is the observation."""
    inner = group["observation"] if hasattr(group, "keys") else group
    return inner[:]


def _pad(array: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """NaN after the end: windows that would reach it are not drawn."""
    return np.concatenate([array, np.full((length - len(array), *array.shape[1:]), np.nan)])


def interpolate_repeats(observations: NDArray[np.float32]) -> NDArray[np.float32]:
    """Observations (s, t, 4) in which every repeated one is replaced by interpolation between its neighbours.

    The collector does not update the observation when its target changes, though the ball moves on. The interpolation is right to about a
    millimetre; a ball that stands still for a step would teach dynamics that do not exist.
    """
    repaired = observations.copy()
    repeated = np.zeros(observations.shape[:2], dtype=bool)
    repeated[:, 1:-1] = (observations[:, 1:-1] == observations[:, :-2]).all(-1)
    s, t = np.nonzero(repeated)
    first, last = t - 1, t + 1  # of each run: the observation that is repeated, and the next that differs
    while (back := repeated[s, first]).any():
        first = first - back
    while (on := repeated[s, last]).any():  # the last observation of a stream never counts as repeated, so this ends
        last = last + on
    share = ((t - first) / (last - first)).astype(np.float32)[:, None]
    repaired[s, t] = (1 - share) * observations[s, first] + share * observations[s, last]
    return repaired
