"""Play a world model: act, and see what it imagines. `dforce play RUN`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import Generator

from .data.pictures import floats, to_bytes
from .envs.labyrinth import Labyrinth
from .matrix import by_name
from .sampling import sample, start
from .tasks.video import Folder, Video

if TYPE_CHECKING:
    from .model import DiffusionForcing

Frames = NDArray[np.uint8]


@dataclass(frozen=True)
class PlayOptions:
    """Lead a video model by hand: each key is one token of frames. w goes, a and d turn, q and e do both, s stands.

    With --keys or --file the film is made at once. With neither, a window opens where there is a display; without one, keys are read from
    the terminal, a line at a time, until an empty line.
    """

    run: tyro.conf.Positional[Path]
    """The run's folder, or the name of a shipped model with --pretrained."""
    pretrained: bool = False
    """Take the shipped model of that name."""
    keys: str = ""
    """What to do, one letter a token, such as wwwwddwww."""
    file: Path | None = None
    """Actions, one row a frame, as .npy or .csv, instead of keys."""
    out: Path | None = None
    """The film: .mp4, .gif or .webp; play.mp4 in the run's folder if not given."""
    seed: int = 0
    """Of the place to begin at, and of the sampling."""


class Player:
    """A model that is led token by token. It begins where a real clip left off, and keeps its state."""

    def __init__(self, task: Video, model: DiffusionForcing, seed: int = 0) -> None:
        self.task, self.model = task, model
        self.generator = Generator().manual_seed(seed)
        context = max(1, task.sampling.context) * task.stack
        frames, actions = task.judged_by(seed + 1, context)
        self.width = actions.shape[-1]
        self.first: Frames = frames[min(seed, len(frames) - 1)]
        tokens = model.codec.encode(floats(self.first[None]))  # type: ignore[union-attr, operator]
        self.state = model.absorb(tokens, self._cond(actions[min(seed, len(frames) - 1)]))
        self.event = tuple(tokens.shape[2:])

    def _cond(self, actions: NDArray[np.float32]) -> torch.Tensor:
        return self.task.conditions(actions)[None]

    @torch.no_grad()
    def step(self, actions: NDArray[np.float32]) -> Frames:
        """Frames (stack, px, px, 3) that follow actions (stack, a)."""
        if actions.shape != (self.task.stack, self.width):
            raise ValueError(
                f"a token takes {self.task.stack} actions of {self.width} numbers; got {tuple(actions.shape)}: one row a frame"
            )
        model, sampling = self.model, self.task.sampling
        cond = self._cond(actions.astype(np.float32))
        matrix = by_name("full_sequence", 1, model.schedule.ladder(min(sampling.steps, model.schedule.levels)), 1.0)
        x = start(model.schedule, matrix, (1, *self.event), generator=self.generator)
        x = sample(model.denoiser(cond, self.state), model.schedule, x, matrix, eta=sampling.eta, generator=self.generator)
        noise = torch.randn(x.shape, generator=self.generator)
        self.state = model.absorb(x, cond, self.state, level=sampling.stabilization, noise=noise)
        return to_bytes(model.codec.decode(x)[0])  # type: ignore[union-attr, operator]


def keys_of(task: Video, width: int) -> dict[str, tuple[float, ...]]:
    """What each key does: an action (a,). Clips of one's own have a digit for each kind of action."""
    if isinstance(task.world, Folder):
        return {str(kind): tuple(float(kind == other) for other in range(width)) for kind in range(min(width, 10))}
    right = 1.0 if isinstance(task.world, Labyrinth) else -1.0
    return {"w": (1.0, 0.0), "a": (0.0, -right), "d": (0.0, right), "q": (1.0, -right), "e": (1.0, right), "s": (0.0, 0.0)}


def actions_of(keys: str, known: dict[str, tuple[float, ...]], stack: int) -> Iterator[NDArray[np.float32]]:
    """Actions (stack, a) of each key; blanks are skipped."""
    for key in keys.replace(" ", ""):
        if key not in known:
            raise ValueError(f"there is no key {key!r}; there are {' '.join(known)}")
        yield np.tile(np.array(known[key], dtype=np.float32), (stack, 1))


def play(options: PlayOptions, task: Any, model: DiffusionForcing, folder: Path) -> Path:
    """Lead a model by keys, a file, a window or the terminal; returns the film."""
    from .film import Film

    if not isinstance(task, Video):
        raise ValueError(f"only video models can be played; this one is of {type(task).__name__}")
    player = Player(task, model, options.seed)
    known = keys_of(task, player.width)
    film = options.out or folder / "play.mp4"
    with Film(film, fps=15, scale=4) as out:
        out.add(player.first)
        if options.file is not None:
            for chunk in _from_file(options.file, task.stack):
                out.add(player.step(chunk))
        elif options.keys:
            for chunk in actions_of(options.keys, known, task.stack):
                out.add(player.step(chunk))
        elif not _window(player, known, out):
            _terminal(player, known, out)
    return film


def _from_file(file: Path, stack: int) -> Iterator[NDArray[np.float32]]:
    if not file.exists():
        raise FileNotFoundError(f"there are no actions in {file}")
    rows = np.load(file) if file.suffix == ".npy" else np.loadtxt(file, delimiter=",", ndmin=2)
    for first in range(0, len(rows) // stack * stack, stack):
        yield rows[first : first + stack].astype(np.float32)


def _terminal(player: Player, known: dict[str, tuple[float, ...]], out: Any) -> None:
    """Keys a line at a time, until an empty one or the end of the input."""
    print(f"keys {' '.join(known)}, a line at a time; an empty line ends", file=sys.stderr)
    for line in sys.stdin:
        if not line.strip():
            return
        for chunk in actions_of(line.strip(), known, player.task.stack):
            out.add(player.step(chunk))


def _window(player: Player, known: dict[str, tuple[float, ...]], out: Any) -> bool:
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

    figure.canvas.mpl_connect("key_press_event", pressed)
    plt.show()
    return True
