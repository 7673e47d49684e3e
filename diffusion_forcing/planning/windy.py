"""The task of the maze with chance: wind, a pit, and a way round. One model, guided with and without a belief in luck.

GUIDANCE holds the ways to guide that are compared. They differ in what is averaged over futures and what is guided, not in the model, the
reward or the starts.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..engine.task import Evaluation, Progress, Table
from ..sampler import Sampler
from . import data as store
from . import figures as pictures
from .agent import PlanningAgent
from .baselines.dynamic import DynamicProgramming
from .baselines.scripted import RandomPolicy, ScriptedPolicy
from .baselines.zeroed import zero_network
from .envs.maze2d import GOAL_RADIUS, Array, Bools, Maze
from .envs.windy import make_balls
from .episodes import Episodes, Policy, play
from .options import PlanOptions
from .task import Maze2D
from .tokens import fit_choice_codec
from .value import PlaceValue

if TYPE_CHECKING:
    from torch import Tensor

    from ..codecs import Chain
    from ..model import DiffusionForcing

SAMPLER = Sampler(steps=8, matrix="pyramid", eta=1.0)
JOINT = PlanOptions(scale=0.05, lookahead=3, replan=25, guidance_levels=(0.0, 1.0), reward="earn", softness=0.3)
FRESH = dataclasses.replace(
    JOINT, scale=0.2, softness=0.1, draws=16, futures="fresh", estimator="covariance", spread=40.0,
    future_steps=3, only_next=True,
)  # fmt: skip
GUIDANCE: dict[str, tuple[Sampler, PlanOptions]] = {
    "none": (SAMPLER, dataclasses.replace(JOINT, scale=0.0)),
    "joint": (dataclasses.replace(SAMPLER, matrix="full_sequence"), JOINT),
    "causal": (SAMPLER, JOINT),
    "resample": (SAMPLER, dataclasses.replace(JOINT, draws=8)),
    "fresh": (SAMPLER, FRESH),
    "expectimax": (SAMPLER, dataclasses.replace(FRESH, expectimax=True)),
}
"""none: plans as the data walk. joint: whole plans at one level, guided by one future. causal: along a pyramid, by one future. resample:
by eight resampled ones. fresh: by the expected reward of fresh futures, which go on as the data do. expectimax: of futures whose later
actions are guided too, and whose outcomes never are."""

ChancePolicy = Literal["agent", "zeroed", "scripted", "careful", "random", "dynamic_programming"]
NAMES: dict[ChancePolicy, str] = {
    "agent": "Diffusion Forcing, own actions",
    "zeroed": "control: the same agent, network zeroed",
    "dynamic_programming": "ceiling: dynamic programming, knows maze and odds",
    "careful": "scripted, always the way round",
    "scripted": "scripted, ignores chance (shortest way)",
    "random": "random policy",
}


def statistics(episodes: Episodes) -> dict[str, Array]:
    """Of each episode (n,): its return, whether it arrived, at which step, whether it took the windy way, and its steps in the pit."""
    maze, position = episodes.maze, episodes.observations[:, 1:, :2]
    inside: Bools = np.linalg.norm(position - episodes.goals[:, None], axis=-1) <= GOAL_RADIUS
    arrived = inside.any(1)
    return {
        "return": episodes.rewards.sum(1),
        "arrived": arrived,
        "first": np.where(arrived, inside.argmax(1), position.shape[1]),
        "risky": maze.on("~", position).any(1),
        "pit_steps": maze.on("P", position).sum(1),
    }


def summary(episodes: Episodes) -> dict[str, float]:
    """Means over the episodes; half of the 95 % interval of the mean return."""
    found = statistics(episodes)
    number, arrived = len(found["return"]), found["arrived"]
    return {
        "score": float(found["return"].mean()),
        "score_95": float(1.96 * found["return"].std(ddof=1) / number**0.5) if number > 1 else float("nan"),
        "risky": float(found["risky"].mean()),
        "fallen": float((found["pit_steps"] > 0).mean()),
        "cost": float(found["pit_steps"].mean() * (episodes.maze.chance.cost if episodes.maze.chance else 0.0)),
        "success": float(arrived.mean()),
        "first_reach": float(found["first"][arrived].mean()) if arrived.any() else float("nan"),
        "episodes": number,
    }


def row(metrics: dict[str, float]) -> tuple[str, ...]:
    """The cells of a table: return, of the ceiling, risky, fallen, cost, arrived, after."""
    after = f"{metrics['first_reach']:.0f}" if metrics["success"] else "-"
    return (
        f"{metrics['score']:.1f} ± {metrics['score_95']:.1f}", f"{metrics['share']:.0%}", f"{metrics['risky']:.0%}",
        f"{metrics['fallen']:.0%}", f"{metrics['cost']:.0f}", f"{metrics['success']:.0%}", after,
    )  # fmt: skip


COLUMNS = ("", "return (95 %)", "of the ceiling", "windy way", "fallen", "cost", "arrived", "after steps")


@dataclass(frozen=True)
class WindyMaze2D(Maze2D):
    """A ball in a maze with wind and a pit. The return of an episode: its steps from the arrival on, less the cost of steps in the pit."""

    maze: Literal["umaze", "medium", "large", "windy"] = "windy"
    """Which maze; one with chance."""
    policy: ChancePolicy = "agent"  # type: ignore[assignment]
    """Who acts. agent: the planning agent. zeroed: its control, the network's output set to zero. dynamic_programming: the ceiling, which
    knows maze and odds. careful, scripted: a controller that knows the maze, round the wind or the shortest way. random: random forces."""
    sampler: Sampler = SAMPLER
    """How a plan is denoised."""
    plan: PlanOptions = FRESH
    """Guidance and replanning of the agent."""
    frame_stack: int = 25
    """Frames whose actions are one token and whose observations are the next."""
    window_frames: int | None = 200
    """Frames of a training window."""
    short_windows: float = 0.0
    """Fraction of the training batches cut into shorter windows, of one random length each."""
    wiener_smoother: bool = False
    """Wiener estimates as input, for tokens that all hold positions. Here they do not."""
    linear_dynamics: bool = False
    """The linear law of motion from token to token, which the wind breaks."""

    main_options = ("policy", "plan.scale", "plan.lookahead", "plan.draws", "plan.futures", "plan.expectimax")
    short_options = ()

    def __post_init__(self) -> None:
        if self.policy not in NAMES:
            raise ValueError(f"policy must be one of {', '.join(NAMES)}; got {self.policy!r}")
        if self.world.chance is None:
            raise ValueError(f"there is no chance in the maze {self.maze!r}; use maze2d-{self.maze}")
        names = [field.name for field in dataclasses.fields(Maze2D) if field.name != "policy"]
        Maze2D(**{name: getattr(self, name) for name in names})  # checks the rest

    def fit_codec(self, frames: Tensor) -> Chain:
        return fit_choice_codec(frames, self.frame_stack)

    def place_value(self) -> PlaceValue:
        """The value of places in the collected data."""
        return PlaceValue.fit(self.world, store.read(self.data_file or self.prepare()), self.world.goal)

    def agent(self, model: DiffusionForcing, seed: int = 0) -> Policy:
        if self.policy not in ("agent", "zeroed"):
            return baseline(self.policy, self.world, seed)
        model = zero_network(model) if self.policy == "zeroed" else model
        return PlanningAgent(model, self.world, sampler=self.sampler, options=self.plan, seed=seed, value=self.place_value())

    def evaluate(self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress) -> Evaluation:
        """Returns over `samples` episodes, beside those of the baselines in the same winds from the same starts."""
        episodes, plan_metrics = self.episodes(model, samples, seed, progress)
        metrics = {**summary(episodes), **plan_metrics}
        found = {NAMES[self.policy]: metrics}
        for name in NAMES:
            if name not in ("agent", "zeroed", self.policy):
                found[NAMES[name]] = summary(dataclasses.replace(self, policy=name).episodes(model, samples, seed)[0])
        ceiling = found[NAMES["dynamic_programming"]]["score"]
        for each in found.values():
            each["share"] = each["score"] / ceiling
        table = Table(f"Maze2D {self.maze}: return of an episode", COLUMNS, tuple((name, *row(each)) for name, each in found.items()))
        pictures.draw_winds([(NAMES[self.policy], episodes)], folder / "episodes.png")
        figures = {"episodes.png": "Executed paths: those that fell into the pit in red, the others in blue."}
        return Evaluation(metrics, (table,), figures)


def baseline(policy: str, maze: Maze, seed: int = 0) -> Policy:
    """A policy that needs no model, by its name."""
    if policy == "dynamic_programming":
        return DynamicProgramming(maze)
    if policy == "random":
        return RandomPolicy(maze, seed)
    return ScriptedPolicy(maze, seed, careful=policy == "careful")


def play_paired(policy: Policy, maze: Maze, number: int, seed: int, parallel: int = 100) -> Episodes:
    """`number` episodes, `parallel` at a time. The same seed is the same starts and the same wind, whoever acts."""
    parts = []
    for i, first in enumerate(range(0, number, parallel)):
        parts.append(play(policy, make_balls(maze, min(parallel, number - first), seed=1000 * seed + i)))
    return Episodes.concatenate(parts)
