"""Push-T for imitation: demonstrations by people, and a model that pushes the block itself."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...checks import check_options
from ...engine.task import Evaluation, Progress, Table
from ..tokens import STATE

if TYPE_CHECKING:
    from ..agent import ImitationAgent
    from ..demonstrations import Demonstrations

SEEDS = 100_000
"""The first of the published evaluation's seeds."""
FILMED = 8
SIDE = 512
"""Of the table, in pixels. The outlined T stands in its middle, turned by an eighth: its axis is a diagonal."""


@dataclass(frozen=True)
class Pushing:
    """Push-T from states: a disc pushes a T onto its outline. Demonstrations by people, published with Diffusion Policy."""

    path: Path = Path("pusht.npz")
    """The low-dimensional set: an npz with action, state and episode_ends."""
    held: int = 6
    """How many demonstrations, the last ones, are kept to validate on."""

    def __post_init__(self) -> None:
        check_options(self, "held")

    def beside(self) -> Pushing:
        return self

    def demonstrations(self, chunk: int, progress: Progress | None = None) -> Demonstrations:
        from ..demonstrations import read_pusht

        read = read_pusht(self.path)
        return dataclasses.replace(read, states=[self.seen(states) for states in read.states])

    def seen(self, states: NDArray[Any]) -> NDArray[np.float32]:
        """(n, 8), from states (n, 5): disc and block, the block's angle as cosine and sine, and where the disc is as the block sees it.

        The last two follow from the others, but not by sums: which side of the T a disc is at, and how near, is what pushing is about.
        """
        disc, block, angle = states[:, :2], states[:, 2:4], states[:, 4]
        return _with_contact(np.concatenate([disc, block, np.cos(angle)[:, None], np.sin(angle)[:, None]], axis=1))

    def mirrored(self, demonstrations: Demonstrations) -> Demonstrations:
        """Demonstrations as this world has them, in a mirror along the axis of the outlined T: the task is the same there."""
        turned = [SIDE - actions[:, ::-1] for actions in demonstrations.actions]
        seen = [
            _with_contact(np.concatenate([SIDE - states[:, [1, 0, 3, 2]], states[:, [5, 4]]], axis=1)) for states in demonstrations.states
        ]
        return dataclasses.replace(demonstrations, actions=turned, states=seen)

    def try_out(self, agent: ImitationAgent, folder: Path, *, samples: int, seed: int, progress: Progress) -> Evaluation:
        """The published evaluation: episodes from its starts, and the best coverage of each over 0.95, 1 at most."""
        from ...engine.media import write_film
        from .env import STEPS, PushT

        world = PushT(samples)
        states = world.reset(SEEDS + seed * samples + np.arange(samples), published=True)
        agent.reset(samples)
        film: list[NDArray[np.uint8]] = []
        thinking: list[float] = []
        while not world.done.all():
            begun = time.perf_counter()
            actions = agent.act({STATE: self.seen(states)[:, : agent.codec.shapes[STATE][0]]})  # older models see the first six numbers
            thinking.append(time.perf_counter() - begun)
            for step in range(actions.shape[1]):
                if world.done.all():
                    break
                states, _, _ = world.step(actions[:, step].clip(0, 512))
                if step % 2 == 0:
                    film.append(np.concatenate([world.render(i) for i in range(min(samples, FILMED))], axis=1))
            progress("steps of all episodes", min(world.time, STEPS), STEPS)
        metrics = {
            "score": float(world.score.mean()), "score error": float(world.score.std() / np.sqrt(samples)),
            "success": float(world.success.mean()), "milliseconds a chunk": 1e3 * float(np.median(thinking)),
        }  # fmt: skip
        rows = (
            ("score (best coverage over 0.95)", f"{metrics['score']:.3f} ± {metrics['score error']:.3f}"),
            ("success (coverage above 95 %)", f"{metrics['success']:.0%}"),
            (f"to decide for {samples} at once", f"{metrics['milliseconds a chunk']:.0f} ms a chunk"),
        )
        table = Table(f"Push-T, {samples} episodes from the published starts", ("", "figure"), rows)
        figures = {
            write_film(folder, "episodes", np.stack(film)): f"The first {min(samples, FILMED)} episodes; one that is over stands still."
        }
        figures["scores.png"] = "Best coverage of each episode."
        _draw_scores(world.max_coverage, folder / "scores.png")
        return Evaluation(metrics, (table,), figures)


def _with_contact(placed: NDArray[Any]) -> NDArray[np.float32]:
    """(n, 8) from (n, 6), disc, block and the block's cosine and sine: with the disc's place in the frame of the block."""
    (dx, dy), cos, sin = (placed[:, :2] - placed[:, 2:4]).T, placed[:, 4], placed[:, 5]
    own = np.stack([cos * dx + sin * dy, cos * dy - sin * dx], axis=1)
    return np.concatenate([placed, own], axis=1, dtype=np.float32)


def _draw_scores(coverage: NDArray[np.float64], file: Path) -> None:
    from ...engine.plotting import COLOURS, figure

    with figure(file, 6, 3) as fig:
        ax = fig.subplots()
        ax.hist(coverage, bins=np.linspace(0, 1, 21).tolist(), color=COLOURS[0])
        ax.axvline(0.95, color="0.3", ls=":", lw=0.8)
        ax.set(xlabel="best coverage", ylabel="episodes")
