"""The swap as a world: scripted demonstrations, and trials with clean and corrupted cameras."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ...checks import check_options
from ...engine.media import write_film
from ...engine.task import Evaluation, Progress, Table
from ..agent import ImitationAgent
from ..demonstrations import Demonstrations
from ..tokens import ACTIONS
from ..world import World
from .data import (
    DEMONSTRATION_SEEDS,
    EVALUATION_SEEDS,
    FRAME_EVERY,
    SimulatorName,
    demonstrate_once,
    is_prepared,
    load_swap,
    prepare_swap,
)
from .scene import CHUNK, MIRROR, STEPS

Trial = Literal["clean", "distractors", "occluded", "dropped", "imagine", "open_loop", "expert"]
CORRUPTIONS = ("distractors", "occluded", "dropped")
ALL_CAMERAS = ("distractors", "dropped")
"""Corruptions of all cameras at once: who ignores such an observation has observed nothing."""


@dataclass(frozen=True)
class Swapping(World):
    """An arm swaps an apple and an orange by way of a third plate. No single image says what to do next."""

    px: int = 64
    """Height and width of the images."""
    number: int = 150
    """Demonstrations, made by a script on first use."""
    simulator: SimulatorName = "mujoco"
    """mujoco, or kinematic: no physics, for tests."""
    data_seed: int = 0
    """Of the demonstrations."""
    held_out: int = 10
    """Demonstrations, the last ones, that are only validated on."""
    trials: tuple[Trial, ...] = ("clean", "distractors", "occluded", "dropped", "imagine", "open_loop", "expert")
    """clean; three corruptions of the cameras, each with the agent informed and not; two controls that must fail: imagine, only the
    first observation is real, and open_loop, the script aims at the plates' centres; expert, how far the script itself comes if it goes by
    what it knew before while all cameras are corrupted."""
    distractor_level: float = 0.35
    """Noise level of an image with distractors, if the agent is informed, as a share of K. Occluded and dropped images have level K."""
    extra_steps: int = 150
    """Actions that an episode goes on for beyond the 600 of a demonstration, for agents that are late. Success is measured at both times,
    the second after whole chunks."""

    def __post_init__(self) -> None:
        check_options(self, "px", "number", "held_out")
        if not 0 <= self.distractor_level <= 1:
            raise ValueError(f"distractor_level is a share of K, from 0 to 1; got {self.distractor_level}")
        if self.extra_steps < 0 or self.extra_steps % CHUNK:
            raise ValueError(f"extra_steps counts actions, a multiple of {CHUNK} or 0; got {self.extra_steps}")

    def for_comparison(self) -> Swapping:
        return dataclasses.replace(self, trials=tuple(trial for trial in self.trials if trial not in ("open_loop", "expert")))

    def check_chunk(self, chunk: int) -> None:
        """Raise unless an episode is whole chunks, each of which ends with a frame of the demonstrations."""
        if STEPS % chunk or chunk % FRAME_EVERY:
            fit = [length for length in range(FRAME_EVERY, STEPS + 1, FRAME_EVERY) if STEPS % length == 0]
            raise ValueError(
                f"an episode of the swap has {STEPS} actions and a frame every {FRAME_EVERY}, so a chunk has one of "
                f"{', '.join(map(str, fit))} actions; got {chunk}"
            )

    def prepare(self, progress: Progress | None = None) -> Path:
        return prepare_swap(self.number, self.px, self.data_seed, progress, self.simulator)

    def demonstrations(self, chunk: int, progress: Progress | None = None) -> Demonstrations:
        return load_swap(self.prepare(progress))

    def example(self, chunk: int) -> Demonstrations | None:
        prepared = is_prepared(self.number, self.px, self.data_seed, self.simulator)
        return None if prepared else demonstrate_once(self.px, chunk, self.simulator)

    def mirrored(self, demonstrations: Demonstrations) -> Demonstrations:
        """With left and right exchanged: plates, cameras and arm are symmetric."""
        factors = np.array(MIRROR, np.float32)
        return dataclasses.replace(
            demonstrations,
            actions=[factors * actions for actions in demonstrations.actions],
            states=[factors * states for states in demonstrations.states],
            images={name: [images[:, :, ::-1] for images in episodes] for name, episodes in demonstrations.images.items()},
        )

    def evaluate(
        self, agent: ImitationAgent, folder: Path, *, held_out: Callable[[], Demonstrations], samples: int, seed: int, progress: Progress
    ) -> Evaluation:  # fmt: skip
        """Success rates, of the same episodes in each trial."""
        from .trials import FILMED, PARALLEL, Trials

        _check_episodes(samples, seed)
        chunk, levels = agent.codec.shapes[ACTIONS][0], agent.model.schedule.levels
        self.check_chunk(chunk)
        episodes = Trials(self.px, self.simulator, samples, seed, self.extra_steps)
        metrics: dict[str, float] = {}
        rows: list[tuple[str, ...]] = []
        figures: dict[str, str] = {}
        for name, trial, informed in self._named_trials():
            renamed = _renamed(progress, f"episodes ({name})")
            if trial == "open_loop":
                result = episodes.run_expert(renamed, open_loop=True)
            elif trial == "expert":
                result = episodes.run_expert(renamed, corruption=next(one for one in ALL_CAMERAS if name.startswith(one)), chunk=chunk)
            else:
                level = round(self.distractor_level * levels) if trial == "distractors" else levels
                result = episodes.run_agent(agent, trial, level * informed, renamed)
            low, high = wilson(int(result.success.sum()), samples)
            metrics[name] = float(result.success.mean())
            parts = [float((result.moves >= number).mean()) for number in (1, 2)]
            metrics.update({f"{name}: {which} move": share for which, share in zip(("first", "second"), parts, strict=True)})
            after_extra = ""
            if result.later is not None:
                metrics[f"{name}: later"] = float(result.later.mean())
                after_extra = f"{metrics[f'{name}: later']:.0%}"
            rows.append((name, f"{metrics[name]:.0%}", f"{low:.0%} to {high:.0%}", after_extra, *(f"{share:.0%}" for share in parts)))
            if result.seconds:
                metrics.setdefault("milliseconds a chunk", 1e3 * float(np.median(result.seconds)))
            if len(result.film):
                later = result.success if result.later is None else result.later
                pairs = zip(result.success[:FILMED], later[:FILMED], strict=True)
                ends = ", ".join("success" if success else "success later" if late else "failure" for success, late in pairs)
                file = write_film(folder, name.replace(", ", "_").replace(" ", "_"), result.film, fps=5, scale=2)
                figures[file] = f"{name}, front and hand camera of the first episodes: {ends}"
        if "milliseconds a chunk" in metrics:
            time = f"{metrics['milliseconds a chunk']:.0f} ms"
            rows.append((f"time for {min(samples, PARALLEL)} decisions at once", time, "", "", "", ""))
        late = self.extra_steps // chunk * chunk
        heads: tuple[str, ...] = ("", "success", "95 % interval", f"{late} actions later", "first move done", "second move done")
        if not late:
            heads, *rows = ((*row[:3], *row[4:]) for row in (heads, *rows))
        return Evaluation(metrics, (Table(f"The swap, {samples} episodes a row", heads, tuple(rows)),), figures)

    def _named_trials(self) -> list[tuple[str, Trial, bool]]:
        """Name, trial, and whether the agent is informed which cameras are corrupted."""
        named: list[tuple[str, Trial, bool]] = []
        for trial in self.trials:
            if trial in CORRUPTIONS:
                named += [(f"{trial}, informed", trial, True), (f"{trial}, not informed", trial, False)]
            elif trial == "expert":
                named += [(f"{corruption}, ignored by the expert", trial, True) for corruption in ALL_CAMERAS]
            else:
                named.append((trial.replace("_", " "), trial, True))
        return named


def wilson(successes: int, number: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's confidence interval of a success rate."""
    share, spread = successes / number, z * z / number
    middle = (share + spread / 2) / (1 + spread)
    half = z * np.sqrt(share * (1 - share) / number + spread / (4 * number)) / (1 + spread)
    return max(0.0, float(middle - half)), min(1.0, float(middle + half))


def _check_episodes(samples: int, seed: int) -> None:
    """Raise where episodes would be those of the next seed, or of the demonstrations."""
    if samples > EVALUATION_SEEDS:
        raise ValueError(f"an evaluation has at most {EVALUATION_SEEDS:,} episodes, then come those of the next seed; got {samples:,}")
    if not 0 <= seed < DEMONSTRATION_SEEDS // EVALUATION_SEEDS:
        last = DEMONSTRATION_SEEDS // EVALUATION_SEEDS - 1
        raise ValueError(f"an evaluation has a seed from 0 to {last}: later episodes are those of the demonstrations; got {seed}")


def _renamed(progress: Progress, name: str) -> Progress:
    return lambda _, done, of: progress(name, done, of)
