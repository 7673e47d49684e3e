"""Demonstrations: actions and observed frames, episode by episode, and a reader of the Push-T set.

Frame j, a state and an image of each camera, was observed before action j * every: there are `every` control steps from one frame to the
next. An episode of F frames has every * (F - 1) actions if it ends with a frame, every * F if it ends with actions, or any number between.
Where it ends between two frames, the last frame may come sooner and is the final observation: there are fewer actions then, but more than
every * (F - 2). Push-T has a frame before each action: every is 1, and there are as many frames as actions.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checks import check_counts

Array = NDArray[np.float32]
Images = NDArray[np.uint8]
PUSHT_FPS = 10.0


@dataclass(frozen=True)
class Demonstrations:
    """Episodes of actions (T_i, a) and of frames: states (F_i, s) and, for each camera, images (F_i, px, px, 3) uint8.

    every * (F_i - 2) < T_i <= every * F_i, and T_i is 2 at least. Without a state s is 0, and there is a camera. Numbers are kept as
    float32.
    """

    actions: list[Array]
    states: list[Array]
    images: dict[str, list[Images]] = field(default_factory=dict)
    every: int = 1
    """Actions from one frame to the next."""
    fps: float = field(kw_only=True)
    """Actions a second."""
    notes: tuple[str, ...] = ()
    """What was left out and why, in sentences."""

    def __post_init__(self) -> None:
        check_counts(every=self.every)
        if not 0 < self.fps < math.inf:
            raise ValueError(f"fps is a number of actions a second above 0; got {self.fps}")
        if not len(self.actions):
            raise ValueError("there are no demonstrations; give one episode at least")
        if len(self.states) != len(self.actions):
            raise ValueError(f"each episode has actions and states; got {len(self.actions)} of actions and {len(self.states)} of states")
        object.__setattr__(self, "actions", _rows(self.actions, "actions"))
        object.__setattr__(self, "states", _rows(self.states, "states"))
        if not self.action_width:
            raise ValueError("an action is one number at least; got actions of width 0")
        if not self.state_width and not self.images:
            raise ValueError("a frame is a state, images or both; got states of width 0 and no cameras")
        for i, (actions, states) in enumerate(zip(self.actions, self.states, strict=True)):
            self._check_lengths(i, len(actions), len(states))
        object.__setattr__(self, "images", {name: list(episodes) for name, episodes in self.images.items()})
        self._check_images()

    def _check_lengths(self, i: int, actions: int, frames: int) -> None:
        if actions < 2:
            raise ValueError(f"a demonstration has 2 actions at least; episode {i} has {actions}, leave it out")
        fewest, most = max(2, self.every * (frames - 2) + 1), self.every * frames
        if not fewest <= actions <= most:
            raise ValueError(f"there is a frame every {self.every} actions, so {frames} frames go with {fewest} to {most} actions; episode "
                             f"{i} has {actions}: check `every`, and that frame j was observed before action j * every")  # fmt: skip

    def _check_images(self) -> None:
        first: tuple[str, int] | None = None
        for name, episodes in self.images.items():
            if len(episodes) != len(self):
                raise ValueError(f"each camera has images of each episode: there are {len(self)}, and camera {name!r} has {len(episodes)}")
            for i, images in enumerate(episodes):
                where = f"camera {name!r} of episode {i}"
                kind, shape = getattr(images, "dtype", type(images).__name__), np.shape(images)
                if kind != np.uint8:
                    raise ValueError(f"images are uint8; {where} has {kind}, turn 0 to 1 into 0 to 255 first")
                if len(shape) != 4 or shape[-1] != 3 or shape[1] != shape[2] or not shape[1]:
                    raise ValueError(f"images are (frames, px, px, 3); {where} has the shape {shape}")
                if shape[0] != len(self.states[i]):
                    raise ValueError(f"a camera has as many frames as there are states; {where} has {shape[0]} for {len(self.states[i])}")
                first = first or (where, shape[1])
                if shape[1] != first[1]:
                    raise ValueError(f"images have one size; {first[0]} has {first[1]} px and {where} has {shape[1]}, resize them first")

    def __len__(self) -> int:
        """Episodes."""
        return len(self.actions)

    @property
    def action_width(self) -> int:
        return self.actions[0].shape[1]

    @property
    def state_width(self) -> int:
        return self.states[0].shape[1]

    @property
    def cameras(self) -> tuple[str, ...]:
        return tuple(self.images)

    @property
    def px(self) -> int:
        """Side of the images, 0 without any."""
        return next((episodes[0].shape[1] for episodes in self.images.values()), 0)

    @property
    def steps(self) -> int:
        """Actions of all episodes."""
        return sum(map(len, self.actions))

    def subset(self, which: Iterable[int] | slice) -> Demonstrations:
        """The episodes of these numbers, in their order, or those of a slice. Nothing is copied."""
        numbers = list(range(len(self)))[which] if isinstance(which, slice) else [_number(i) for i in which]
        unknown = [i for i in numbers if not 0 <= i < len(self)]
        if unknown:
            raise IndexError(f"there are {len(self)} episodes, counted from 0; got {unknown[0]}")
        if not numbers:
            raise ValueError(f"a subset holds one episode at least; got none of {len(self)}")
        images = {name: [episodes[i] for i in numbers] for name, episodes in self.images.items()}
        return replace(self, actions=[self.actions[i] for i in numbers], states=[self.states[i] for i in numbers], images=images)

    def joined(self, others: Demonstrations) -> Demonstrations:
        """These episodes and then the others', of the same frame rate, widths and cameras."""
        kinds = [(one.every, one.fps, one.action_width, one.state_width, one.cameras) for one in (self, others)]
        if kinds[0] != kinds[1]:
            raise ValueError("demonstrations that are joined agree in frames, rate, widths and cameras; got "
                             f"{self.describe()}, and {others.describe()}")  # fmt: skip
        images = {name: [*episodes, *others.images[name]] for name, episodes in self.images.items()}
        return replace(self, actions=[*self.actions, *others.actions], states=[*self.states, *others.states], images=images)

    def describe(self) -> str:
        """A line: episodes, steps, widths and cameras."""
        lengths = sorted(map(len, self.actions))
        text = (
            f"{_plural(len(self), 'episode')}, {self.steps} steps ({lengths[0]} to {lengths[-1]} each, at {self.fps:g} a second), "
            f"actions of {self.action_width}, states of {self.state_width}"
        )
        if self.every > 1:
            text += f", a frame every {self.every} steps"
        if self.images:
            text += f", {_plural(len(self.images), 'camera')} of {self.px} px ({', '.join(self.images)})"
        return text + (f"; {len(self.notes)} left out" if self.notes else "")


def read_pusht(path: str | Path) -> Demonstrations:
    """The low-dimensional Push-T set from an .npz: action (n, 2), state (n, 5: agent xy, block xy, angle), episode_ends (e,).

    An action is a target point for the disc, in pixels of 512, at 10 Hz. These are the arrays `action`, `state` and `episode_ends` of the
    set published with Diffusion Policy (Chi et al., 2023), end to end; it has 206 episodes.
    """
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{file} is a folder, not an .npz; write one from the published zarr, with zarr installed: "
                         "root = zarr.open(folder); np.savez(file, action=root['data/action'][:], state=root['data/state'][:], "
                         "episode_ends=root['meta/episode_ends'][:])")  # fmt: skip
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}; check the path")
    try:
        loaded = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise ValueError("one array")
        with loaded:
            missing = [name for name in ("action", "state", "episode_ends") if name not in loaded.files]
            arrays = {} if missing else {name: loaded[name] for name in ("action", "state", "episode_ends")}
            present = ", ".join(loaded.files) or "nothing"
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{file} is no .npz, or damaged ({error}); it should hold action, state and episode_ends") from error
    if missing:
        raise ValueError(f"{file} has no {missing[0]!r}; it holds {present}, where the layout is action, state, episode_ends")
    action, state, ends = (arrays[name] for name in ("action", "state", "episode_ends"))
    for name, array, width in (("action", action, 2), ("state", state, 5)):
        if array.ndim != 2 or array.shape[1] != width or array.dtype.kind not in "fiu":
            raise ValueError(f"{name!r} of {file} should be numbers (n, {width}); got {array.dtype} of shape {array.shape}")
    if len(action) != len(state):
        raise ValueError(f"{file} should have a state for each action; got {len(action)} actions and {len(state)} states")
    if ends.ndim != 1 or not len(ends) or ends.dtype.kind not in "iu":
        raise ValueError(f"'episode_ends' of {file} should be whole numbers (e,); got {ends.dtype} of shape {ends.shape}")
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    ends = ends.astype(np.int64)
    if (ends <= starts).any():
        i = int(np.flatnonzero(ends <= starts)[0])
        raise ValueError(f"'episode_ends' of {file} should grow; episode {i} would run from {starts[i]} to {ends[i]}")
    if ends[-1] != len(action):
        raise ValueError(f"'episode_ends' of {file} should end at {len(action)}, the number of actions; got {ends[-1]}")
    cuts = list(zip(starts.tolist(), ends.tolist(), strict=True))
    return Demonstrations([action[a:b] for a, b in cuts], [state[a:b] for a, b in cuts], fps=PUSHT_FPS)


def _rows(episodes: Sequence[Any], what: str) -> list[Array]:
    """Each as (n, width) float32, finite and of one width."""
    rows: list[Array] = []
    for i, episode in enumerate(episodes):
        with np.errstate(over="ignore"):  # beyond float32; the check below reports it
            array = np.asarray(episode, dtype=np.float32)
        if array.ndim != 2:
            raise ValueError(f"{what} are (steps, width) in each episode; episode {i} has the shape {array.shape}")
        if rows and array.shape[1] != rows[0].shape[1]:
            raise ValueError(f"{what} have one width; episode 0 has {rows[0].shape[1]} and episode {i} has {array.shape[1]}")
        bad = np.flatnonzero(~np.isfinite(array).all(1))
        if len(bad):
            raise ValueError(f"{what} are finite; episode {i} has {array[bad[0]].tolist()} at {bad[0]}, leave the episode out or repair it")
        rows.append(array)
    return rows


def _number(i: Any) -> int:
    if isinstance(i, bool | np.bool_) or int(i) != i:
        raise ValueError(f"a subset is a slice or numbers of episodes; got {i!r}, for a mask give np.flatnonzero of it")
    return int(i)


def _plural(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
