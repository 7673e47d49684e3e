"""Demonstrations of the swap robot: made once by the scripted expert in the simulator, and cached on disk.

Episodes have seeds from 1,000,000 * (seed + 1) on, so that evaluation below a million meets none of them.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...files import cache_folder

if TYPE_CHECKING:
    from ..demonstrations import Demonstrations

Told = Callable[[str, int, int], None]
VERSION = 6
"""Of the world and of its expert; to be raised when demonstrations change."""
SEEN = 5
"""Actions from one frame to the next. An agent looks every 15: a demonstration is three, each beginning a little later."""
APART = 1_000_000


def prepare_swap(
    number: int = 150, px: int = 64, seed: int = 0, progress: Told | None = None, body: Literal["mujoco", "twin"] = "mujoco"
) -> Path:
    """The cache file of `number` successful demonstrations, made if it is not there. About 3 s each on one core.

    A killed making leaves no file of that name. body: twin is for tests.
    """
    if number < 1:
        raise ValueError(f"number counts demonstrations, 1 or more; got {number}")
    if seed < 0:
        raise ValueError(f"a seed is 0 or more; got {seed}")
    file = swap_file(number, px, seed, body)
    if not file.exists():
        from ...files import write_atomically

        file.parent.mkdir(parents=True, exist_ok=True)
        made = _make(number, px, seed, progress, body)

        def write(path: Path) -> None:
            with open(path, "wb") as out:  # given a name instead, NumPy would add its own ending
                np.savez_compressed(out, **made)

        write_atomically(file, write)
    return file


def swap_file(number: int, px: int, seed: int, body: str) -> Path:
    """Where `prepare_swap` keeps demonstrations, made or not."""
    return cache_folder() / f"swap-v{VERSION}-{body}-{number}-{px}px-{seed}.npz"


def load_swap(path: Path) -> Demonstrations:
    """Demonstrations of a file that `prepare_swap` made: 600 actions each, 121 frames of two cameras and the hand's pose as the state."""
    from ..demonstrations import Demonstrations
    from .env import CAMERAS, CONTROL_DT

    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there are no demonstrations in {path}; prepare_swap() makes them")
    try:
        with np.load(path) as arrays:
            actions, states = list(arrays["actions"]), list(arrays["poses"])
            images = {name: list(arrays[name]) for name in CAMERAS}
    except (ValueError, OSError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged or not a cache of ours ({error}); delete it and it is made again") from error
    return Demonstrations(actions=actions, states=states, images=images, every=SEEN, fps=1 / CONTROL_DT)


def _make(number: int, px: int, seed: int, progress: Told | None, body: Literal["mujoco", "twin"]) -> dict[str, Any]:
    """Arrays of the file: actions (n, 600, 7), poses (n, 121, 7), front and hand (n, 121, px, px, 3), and how each went, (n,)."""
    from .env import CAMERAS, SwapEnv
    from .expert import demonstrate

    env = SwapEnv(px=px, body=body)
    try:
        episodes, seeds = [], []
        for tried in range(10 * number):
            episode = demonstrate(env, APART * (seed + 1) + tried, every=SEEN)
            if episode.success:
                episodes.append(episode)
                seeds.append(APART * (seed + 1) + tried)
                if progress is not None:
                    progress("swapping apples and oranges", len(episodes), number)
            if len(episodes) == number:
                break
    finally:
        env.close()
    assert len(episodes) == number, f"the expert swaps nearly always; here {len(episodes)} of {10 * number} times"
    return {
        "actions": np.stack([episode.actions for episode in episodes]),
        "poses": np.stack([episode.poses for episode in episodes]),
        **{name: np.stack([episode.images[name] for episode in episodes]) for name in CAMERAS},
        "seeds": np.array(seeds),
        **{
            name: np.array([getattr(episode, name) for episode in episodes])
            for name in ("start", "finished", "nudges", "slips", "regrasps")
        },
    }
