"""Push-T as a world: demonstrations by people, and the published evaluation."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...checks import check_options
from ...engine.media import write_film
from ...engine.plotting import COLOURS, figure
from ...engine.task import Evaluation, Progress, Table
from ..agent import ImitationAgent
from ..demonstrations import Demonstrations, read_pusht
from ..tokens import STATE
from ..world import World

FIRST_SEED = 100_000
"""Of the published evaluation."""
FILMED = 8
"""Episodes of the film, at most."""
SIDE = 512
"""Of the table, in pixels. The outlined T stands in the middle, rotated by 45 degrees: its axis is a diagonal."""


@dataclass(frozen=True)
class Pushing(World):
    """Push-T from states: a disc pushes a T onto its outline. Demonstrations by people, published with Diffusion Policy."""

    path: Path = Path("pusht.npz")
    """The low-dimensional set: an npz with action, state and episode_ends."""
    held_out: int = 6
    """Demonstrations, the last ones, that are only validated on."""

    def __post_init__(self) -> None:
        check_options(self, "held_out")

    def prepare(self, progress: Progress | None = None) -> Path:
        return self.path

    def demonstrations(self, chunk: int, progress: Progress | None = None) -> Demonstrations:
        published = read_pusht(self.path)
        return dataclasses.replace(published, states=[self.features(states) for states in published.states])

    def features(self, states: NDArray[Any]) -> NDArray[np.float32]:
        """(n, 8) from states (n, 5): disc, block, cosine and sine of its angle, and the disc's position in the frame of the block.

        The last two follow from the others, but not linearly: which side of the T the disc is at, and how near, decides what it pushes.
        """
        disc, block, angle = states[:, :2], states[:, 2:4], states[:, 4]
        return _with_contact(np.concatenate([disc, block, np.cos(angle)[:, None], np.sin(angle)[:, None]], axis=1))

    def mirrored(self, demonstrations: Demonstrations) -> Demonstrations:
        """Reflected at the axis of the outlined T, under which the task is the same."""
        actions = [SIDE - actions[:, ::-1] for actions in demonstrations.actions]
        states = [
            _with_contact(np.concatenate([SIDE - states[:, [1, 0, 3, 2]], states[:, [5, 4]]], axis=1)) for states in demonstrations.states
        ]
        return dataclasses.replace(demonstrations, actions=actions, states=states)

    def evaluate(
        self, agent: ImitationAgent, folder: Path, *, held_out: Callable[[], Demonstrations], samples: int, seed: int, progress: Progress
    ) -> Evaluation:  # fmt: skip
        """The published evaluation: episodes from its starts, scored by the best coverage over 0.95, at most 1."""
        from .env import STEPS, PushT

        world = PushT(samples)
        states = world.reset(FIRST_SEED + seed * samples + np.arange(samples), published=True)
        width = agent.codec.shapes[STATE][0]  # 6, without the disc in the block's frame, or 8
        agent.reset(samples)
        film: list[NDArray[np.uint8]] = []
        seconds: list[float] = []
        while not world.done.all():
            begun = time.perf_counter()
            actions = agent.act({STATE: self.features(states)[:, :width]})
            seconds.append(time.perf_counter() - begun)
            for step in range(actions.shape[1]):
                if world.done.all():
                    break
                states, _, _ = world.step(actions[:, step].clip(0, 512))
                if step % 2 == 0:
                    film.append(np.concatenate([world.render(i) for i in range(min(samples, FILMED))], axis=1))
            progress("steps of all episodes", min(world.time, STEPS), STEPS)
        metrics = {
            "score": float(world.score.mean()), "score error": float(world.score.std() / np.sqrt(samples)),
            "success": float(world.success.mean()), "milliseconds a chunk": 1e3 * float(np.median(seconds)),
        }  # fmt: skip
        rows = (
            ("score (best coverage over 0.95)", f"{metrics['score']:.3f} ± {metrics['score error']:.3f}"),
            ("success (coverage above 95 %)", f"{metrics['success']:.0%}"),
            (f"time for {samples} decisions at once", f"{metrics['milliseconds a chunk']:.0f} ms"),
        )
        table = Table(f"Push-T, {samples} episodes from the published starts", ("", "value"), rows)
        name = write_film(folder, "episodes", np.stack(film))
        _draw_coverage(world.max_coverage, folder / "scores.png")
        figures = {name: f"The first {min(samples, FILMED)} episodes; an episode that is over stands still."}
        return Evaluation(metrics, (table,), {**figures, "scores.png": "Best coverage of each episode."})


def _with_contact(poses: NDArray[Any]) -> NDArray[np.float32]:
    """(n, 8) from (n, 6), disc, block, its cosine and sine: with the disc's position in the frame of the block."""
    (dx, dy), cos, sin = (poses[:, :2] - poses[:, 2:4]).T, poses[:, 4], poses[:, 5]
    own = np.stack([cos * dx + sin * dy, cos * dy - sin * dx], axis=1)
    return np.concatenate([poses, own], axis=1, dtype=np.float32)


def _draw_coverage(coverage: NDArray[np.float64], file: Path) -> None:
    with figure(file, 6, 3) as fig:
        ax = fig.subplots()
        ax.hist(coverage, bins=np.linspace(0, 1, 21).tolist(), color=COLOURS[0])
        ax.axvline(0.95, color="0.3", ls=":", lw=0.8)
        ax.set(xlabel="best coverage", ylabel="episodes")
