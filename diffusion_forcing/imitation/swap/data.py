"""Demonstrations of the swap: made once by the scripted expert in the simulator, and cached on disk.

Their seeds are DEMONSTRATION_SEEDS * (seed + 1) + 0, 1, .. . Evaluations use smaller ones.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...engine.task import Progress
from ...files import cache_folder, cached
from ..demonstrations import Demonstrations
from .scene import CAMERAS, CONTROL_DT

VERSION = 6
"""Of the environment and its expert; to be raised when demonstrations change."""
FRAME_EVERY = 5
"""Actions from one frame to the next. An agent observes every 15: a demonstration can be cut in three ways, each a frame later."""
DEMONSTRATION_SEEDS = 1_000_000
"""Seeds of episodes from one set of demonstrations to the next; the first set begins here."""
EVALUATION_SEEDS = 10_000
"""Seeds of episodes from one evaluation to the next, and so the most episodes that one has."""
SimulatorName = Literal["mujoco", "kinematic"]


def prepare_swap(
    number: int = 150, px: int = 64, seed: int = 0, progress: Progress | None = None, simulator: SimulatorName = "mujoco"
) -> Path:  # fmt: skip
    """The cache file of `number` successful demonstrations, made if it is not there: about 3 s each on one core."""
    if number < 1:
        raise ValueError(f"number counts demonstrations from 1; got {number}")
    if seed < 0:
        raise ValueError(f"a seed is 0 or more; got {seed}")

    def make(path: Path) -> None:
        with open(path, "wb") as out:  # given a name instead, NumPy would add its own ending
            np.savez_compressed(out, **_make(number, px, seed, progress, simulator))

    return cached(_file_name(number, px, seed, simulator), make)


def is_prepared(number: int, px: int, seed: int, simulator: str) -> bool:
    """Whether the file of `prepare_swap` is there."""
    return (cache_folder() / _file_name(number, px, seed, simulator)).exists()


def load_swap(path: Path) -> Demonstrations:
    """Demonstrations of a file of `prepare_swap`: 600 actions each, 121 frames of two cameras, and the hand's pose as the state."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there are no demonstrations in {path}; prepare_swap() makes them")
    try:
        with np.load(path) as arrays:
            actions, states = list(arrays["actions"]), list(arrays["poses"])
            images = {name: list(arrays[name]) for name in CAMERAS}
    except (ValueError, OSError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged or not a cache of ours ({error}); delete it and it is made again") from error
    return Demonstrations(actions=actions, states=states, images=images, every=FRAME_EVERY, fps=1 / CONTROL_DT)


def demonstrate_once(px: int, every: int, simulator: SimulatorName) -> Demonstrations:
    """One demonstration with a seed that no file uses, simulated now in a few seconds, with a frame every so many actions."""
    from .env import SwapEnv
    from .expert import demonstrate

    env = SwapEnv(px, simulator)
    try:
        made = demonstrate(env, 0, every=every)
    finally:
        env.close()
    return Demonstrations([made.actions], [made.poses], {name: [images] for name, images in made.images.items()}, every, fps=1 / CONTROL_DT)


def _make(number: int, px: int, seed: int, progress: Progress | None, simulator: SimulatorName) -> dict[str, Any]:
    """Arrays of the file: actions (n, 600, 7), poses (n, 121, 7), front and hand (n, 121, px, px, 3), and facts of each episode (n,)."""
    from .env import SwapEnv
    from .expert import demonstrate

    env = SwapEnv(px=px, simulator=simulator)
    try:
        episodes, seeds = [], []
        for tried in range(10 * number):
            episode = demonstrate(env, DEMONSTRATION_SEEDS * (seed + 1) + tried, every=FRAME_EVERY)
            if episode.success:
                episodes.append(episode)
                seeds.append(DEMONSTRATION_SEEDS * (seed + 1) + tried)
                if progress is not None:
                    progress("demonstrating the swap", len(episodes), number)
            if len(episodes) == number:
                break
    finally:
        env.close()
    assert len(episodes) == number, f"the expert nearly always succeeds; here {len(episodes)} of {10 * number} times"
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


def _file_name(number: int, px: int, seed: int, simulator: str) -> str:
    return f"swap-v{VERSION}-{simulator}-{number}-{px}px-{seed}.npz"
