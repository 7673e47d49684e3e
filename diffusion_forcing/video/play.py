"""Play a world model: choose actions, and see what it generates. `dforce play RUN`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Generator, Tensor

from ..engine.cli import RunOptions, console, parse_run
from ..engine.media import Film, Unreadable, decode_picture, fit_square, to_bytes, to_floats
from ..model import DiffusionForcing
from ..sampling import Memory, sample_window
from .clips import read_actions
from .decoder import StreamingDecoder
from .policy import ActionPolicy
from .rollout import compile_decode_step, encode_frames
from .task import Folder, Video
from .worlds.doom import Doom
from .worlds.labyrinth import Labyrinth

Frames = NDArray[np.uint8]
Actions = NDArray[np.float32]
BEGINNINGS = 64
"""Places to begin at, of which a seed chooses one."""
POLICY = "p"
"""The key that lets the action policy choose."""


@dataclass(frozen=True)
class PlayOptions(RunOptions):
    """Act in a video model: each key is one token of frames. w moves, a and d turn, q and e do both, s stands; p does what the action
    policy chooses, where the model is rolled out with one (--task.rollout.actions policy).

    With --keys or --file the film is made at once. With neither, a window opens where there is a display; without one, keys are read from
    the terminal, a line at a time, until an empty line.
    """

    keys: str = ""
    """Actions, one letter a token, such as wwwwddwww."""
    file: Path | None = None
    """Actions, one row a frame, as .npy, .npz or .csv, instead of keys."""
    image: Path | None = None
    """A picture to begin at, instead of a real clip."""
    out: Path | None = None
    """The film: .mp4, .gif or .webp; play.mp4 in the run's folder if not given."""


class Player:
    """A model that is rolled out token by token, after a real clip or a single frame image (px, px, 3)."""

    def __init__(self, task: Video, model: DiffusionForcing, seed: int = 0, image: Frames | None = None) -> None:
        self.task, self.model = task, model
        self.generator, self._policy_generator = Generator(model.device).manual_seed(seed), Generator().manual_seed(seed)
        clips, actions = task.test_clips(BEGINNINGS, max(1, task.rollout.prefix) * task.stack)
        self.width = actions.shape[-1]
        frames, before = clips[seed % len(clips)], actions[seed % len(clips)]
        if image is not None:  # which then stands still for a token, without an action
            frames, before = np.repeat(image[None], task.stack, axis=0), np.zeros_like(before[: task.stack])
        self.first: Frames = frames
        self.frames, self.actions = self.first[None], before[None, -task.stack :]
        self._policy: ActionPolicy | None = None
        tokens = encode_frames(model, self.first[None])
        self.memory = Memory(model, task.context)
        self.memory.add(tokens, 0, self._cond(before))
        self.sampler = task.sampler.over(model.schedule, 1)
        self.event = tuple(tokens.shape[2:])
        self.decoder = StreamingDecoder(model, tokens[:, -1], to_floats(self.first[None, -1]).to(model.device))
        if task.rollout.compile:
            compile_decode_step(model)

    def _cond(self, actions: Actions) -> Tensor:
        return self.task.build_cond(actions)[None].to(self.model.device)

    def step(self, actions: Actions | None) -> Frames:
        """Frames (stack, px, px, 3) that follow actions (stack, a); None: as the policy chooses."""
        if actions is None:
            actions = self.policy.choose(self.frames, self.actions, 1, self._policy_generator)[0]
        if actions.shape != (self.task.stack, self.width):
            raise ValueError(
                f"a token takes {self.task.stack} actions of {self.width} numbers; got {tuple(actions.shape)}: one row a frame"
            )
        cond = self._cond(actions.astype(np.float32))
        wrap = self.task.rollout.wrap()
        x = sample_window(self.memory, self.sampler, (1, *self.event), cond, keep=1, wrap=wrap, generator=self.generator)
        frames = to_bytes(self.decoder(x, cond)[0])
        self.frames, self.actions = np.concatenate([self.frames[:, -1:], frames[None]], axis=1), actions[None]
        return frames

    @property
    def policy(self) -> ActionPolicy:
        if self._policy is None:
            self._policy = self.task.policy()
        return self._policy


def keys_of(task: Video, width: int) -> dict[str, tuple[float, ...] | None]:
    """The action (a,) of each key, None where the policy chooses. A folder's clips have a digit for each discrete action."""
    policy: dict[str, tuple[float, ...] | None] = {POLICY: None} if task.rollout.actions == "policy" else {}
    if isinstance(task.world, Folder):
        return {str(kind): tuple(float(kind == other) for other in range(width)) for kind in range(min(width, 10))} | policy
    right = 1.0 if isinstance(task.world, Labyrinth | Doom) else -1.0
    return {"w": (1.0, 0.0), "a": (0.0, -right), "d": (0.0, right), "q": (1.0, -right), "e": (1.0, right), "s": (0.0, 0.0)} | policy


def actions_of(keys: str, known: dict[str, tuple[float, ...] | None], stack: int) -> Iterator[Actions | None]:
    """Actions (stack, a) of each key, None where the policy chooses; blanks are skipped."""
    for key in keys.replace(" ", ""):
        if key not in known:
            raise ValueError(f"there is no key {key!r}; there are {' '.join(known)}")
        action = known[key]
        yield None if action is None else np.tile(np.array(action, dtype=np.float32), (stack, 1))


def play(options: PlayOptions, task: Any, model: DiffusionForcing, folder: Path) -> Path:
    """Roll a model out under keys, a file, a window or the terminal; returns the film."""
    if not isinstance(task, Video):
        raise ValueError(f"only video models can be played; this one is of {type(task).__name__}")
    image = None if options.image is None else read_picture(options.image, task.world.px)
    player = Player(task, model, options.seed, image)
    known = keys_of(task, player.width)
    film = options.out or folder / "play.mp4"
    # All actions are read and checked before the first frame is generated.
    chunks = list(_from_file(options.file, task.stack, player.width) if options.file is not None
                  else actions_of(options.keys, known, task.stack))  # fmt: skip
    with Film(film, fps=15, scale=4) as out:
        out.add(player.first)
        for chunk in chunks:
            out.add(player.step(chunk))
        if not chunks and not _window(player, known, out):
            _terminal(player, known, out)
    return film


def read_picture(file: Path, px: int) -> Frames:
    """A picture (px, px, 3), cut to its square centre."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no picture {file}; check the path")
    try:
        return fit_square(decode_picture(file.read_bytes()), px)
    except (OSError, Unreadable) as error:
        raise ValueError(f"{file} {error}") from error


def _from_file(file: Path, stack: int, width: int) -> Iterator[Actions]:
    """Actions (stack, a) of each token of a file; a warning says which rows at its end fill no token."""
    if not file.exists():
        raise FileNotFoundError(f"there are no actions in {file}")
    rows = read_actions(file, width)
    if len(rows) < stack:
        raise ValueError(f"a token takes {stack} actions, one row a frame; {file} has {len(rows)}")
    if len(rows) % stack:
        warnings.warn(f"the last {len(rows) % stack} of {len(rows)} actions fill no token of {stack}, and are left out", stacklevel=2)
    for first in range(0, len(rows) // stack * stack, stack):
        yield rows[first : first + stack]


def _terminal(player: Player, known: dict[str, tuple[float, ...] | None], out: Any) -> None:
    """Keys a line at a time, until an empty one or the end of the input. A line with an unknown key does nothing."""
    print(f"keys {' '.join(known)}, a line at a time; an empty line ends", file=sys.stderr)
    for line in sys.stdin:
        if not line.strip():
            return
        try:
            chunks = list(actions_of(line.strip(), known, player.task.stack))
        except ValueError as error:
            print(error, file=sys.stderr)
            continue
        for chunk in chunks:
            out.add(player.step(chunk))


def _window(player: Player, known: dict[str, tuple[float, ...] | None], out: Any) -> bool:
    """A window that is played by keys until it is closed; False where there is no display."""
    import matplotlib

    if not sys.stdin.isatty() or matplotlib.get_backend().lower() in ("agg", "pdf", "svg", "ps", "cairo"):
        return False
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots()
    shown = ax.imshow(player.first[-1], interpolation="nearest")
    ax.set(title=f"keys {' '.join(known)}; close the window to end", xticks=[], yticks=[])

    def pressed(event: Any) -> None:
        if event.key in known:
            for chunk in actions_of(event.key, known, player.task.stack):
                frames = player.step(chunk)
                out.add(frames)
                for frame in frames:
                    shown.set_data(frame)
                    figure.canvas.draw()
                    figure.canvas.flush_events()

    manager = figure.canvas.manager
    if manager is not None and manager.key_press_handler_id is not None:  # matplotlib's own keys: q would close the window, s save it
        figure.canvas.mpl_disconnect(manager.key_press_handler_id)
    figure.canvas.mpl_connect("key_press_event", pressed)
    plt.show()
    return True


def play_run(words: list[str]) -> int:
    """dforce play RUN"""
    options, task, model, folder = parse_run(PlayOptions, words, "dforce play")
    folder.mkdir(parents=True, exist_ok=True)
    console.print(f"film  {play(options, task, model, folder)}", markup=False)
    return 0
