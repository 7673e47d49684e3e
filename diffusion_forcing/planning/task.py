"""The task Maze2D (paper, section 4.2): offline data of a wandering ball, and one model that plans and acts in its maze.

Evaluated as in the benchmark: whole episodes, one reward per step within 0.5 of the goal, the goal fixed or random (Multi2D).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ..codecs import Chain
from ..engine.log import progress_bar
from ..engine.task import Evaluation, Progress, Task, TaskData
from ..preconditioning import WienerSmoother
from ..sampler import Sampler
from . import data as store
from . import figures as pictures
from .agent import PlanningAgent
from .baselines.diffuser import Diffuser
from .baselines.mppi import MPPI
from .baselines.scripted import RandomPolicy, ScriptedPolicy
from .baselines.zeroed import zero_network
from .dynamics import motion_constraint
from .envs.maze2d import GOAL_RADIUS, Array, Balls, Maze, by_name
from .envs.windy import make_balls
from .episodes import Counts, Episodes, Policy, play
from .options import PLAN_SAMPLER, PlanOptions
from .scores import POLICIES, PolicyName, failure_warnings, tables
from .tokens import FrameWindows, fit_codec, frames_of, position_numbers
from .value import PlaceValue

if TYPE_CHECKING:
    from ..model import DiffusionForcing


@dataclass(frozen=True)
class Maze2D(Task):
    """A ball in a maze: what a model is trained on, and how it is evaluated."""

    maze: Literal["umaze", "medium", "large", "windy"] = "medium"
    """Which maze."""
    multi: bool = False
    """Evaluate with a random goal for each episode (Multi2D) instead of the fixed one."""
    policy: PolicyName = "agent"
    """Who acts. agent: the planning agent. zeroed: its control, the same with the network's output set to zero. Baselines: Diffuser with
    its own actions or with a PD controller, a scripted controller that knows the maze, random forces, MPPI with the true dynamics."""
    sampler: Sampler = PLAN_SAMPLER
    """How a plan is denoised."""
    plan: PlanOptions = field(default_factory=PlanOptions)
    """Guidance, horizon and replanning of the agent."""
    parallel_episodes: int = 100
    """Episodes run side by side."""
    frame_stack: int = 10
    """Frames per token."""
    window_frames: int | None = None
    """Frames of a training window; None: a whole episode, 300 / 600 / 800."""
    short_windows: float = 0.5
    """Fraction of the training batches cut into shorter windows, of one random length each, so that short plans are learned."""
    wiener_smoother: bool = True
    """Give the network linear estimates of where the ball is as input: by a Wiener smoother of the whole plan, or of a causal network by a
    Kalman filter of the plan so far."""
    linear_dynamics: bool = True
    """Make predictions obey the linear law of motion from token to token."""
    transitions: int | None = None
    """Transitions to train on; None: as many as the benchmark has, 1 / 2 / 4 million."""
    data_seed: int = 0
    """Seed of the data collector."""
    data_file: Path | None = None
    """Your own data: .hdf5 in the layout of D4RL or Minari. None: collected on first use and cached."""

    main_options: ClassVar[tuple[str, ...] | None] = (
        "multi",
        "policy",
        "data_file",
        "sampler.steps",
        "sampler.matrix",
        "plan.scale",
        "plan.lookahead",
        "plan.draws",
    )
    short_options: ClassVar[tuple[tuple[str, str], ...]] = (("--multi", "--task.multi"),)

    def __post_init__(self) -> None:
        by_name(self.maze)
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}; got {self.policy!r}")
        if self.frame_stack < 1:
            raise ValueError(f"frame_stack counts frames of a token from 1; got {self.frame_stack}")
        if self.window_frames is not None and self.window_frames < self.frame_stack:
            raise ValueError(f"window_frames must be at least one token of {self.frame_stack} frames; got {self.window_frames}")
        if self.parallel_episodes < 1:
            raise ValueError(f"parallel_episodes counts from 1; got {self.parallel_episodes}")

    @property
    def default_samples(self) -> int:
        return 100

    @property
    def world(self) -> Maze:
        return by_name(self.maze)

    @property
    def tokens(self) -> int:
        """Tokens of a training window, without the present."""
        return (self.window_frames or self.world.steps) // self.frame_stack

    def data(self) -> TaskData:
        """Windows that start anywhere; one stream in 32 is kept for validation."""
        frames, before = frames_of(store.read(self.data_file or self.prepare()))
        codec = self.fit_codec(frames)
        long = torch.isfinite(frames).all(-1).sum(1) >= self.tokens * self.frame_stack
        if long.any():  # otherwise FrameWindows raises
            frames, before = frames[long], before[long]
        held = max(1, len(frames) // 32) if len(frames) > 1 else 0
        assert codec.variance is not None
        event = (len(codec.variance),)
        train, valid = (
            FrameWindows(frames[part], before[part], self.tokens + 1, self.frame_stack, codec, event, self.short_windows)
            for part in (slice(held, None), slice(0, held or None))
        )
        constraint = motion_constraint(frames, codec) if self.linear_dynamics else None
        smoother = None
        if self.wiener_smoother:
            tokens = train.read(train.every(2000)).x[:, 1:]  # the present is not a token of the stream
            smoother = WienerSmoother.fit(torch.cat([tokens, tokens[:, -1:]], dim=1), position_numbers(self.frame_stack))
        return TaskData(train, valid, codec, constraint, smoother)

    def fit_codec(self, frames: Tensor) -> Chain:
        """The codec of frames (s, t, 6)."""
        return fit_codec(frames, self.frame_stack)

    def prepare(self, progress: Progress | None = None) -> Path:
        """The file of the collected data, made on first use."""
        if progress is not None:
            return store.prepare(self.world, self.transitions, self.data_seed, progress)
        with progress_bar() as bar:
            return store.prepare(self.world, self.transitions, self.data_seed, bar)

    def place_value(self) -> PlaceValue | None:
        """What places are worth where plans end, for rewards that need it."""
        return None

    def agent(self, model: DiffusionForcing, seed: int = 0) -> Policy:
        """Who acts, by the option `policy`."""
        if self.policy == "mppi":
            return MPPI(self.world, seed=seed)
        if self.policy == "scripted":
            return ScriptedPolicy(self.world, seed)
        if self.policy == "random":
            return RandomPolicy(self.world, seed)
        if self.policy in ("diffuser", "diffuser_pd"):
            return Diffuser(model, self.world, steps=self.sampler.steps, pd=self.policy == "diffuser_pd", seed=seed)
        if self.policy == "zeroed":
            model = zero_network(model)
        return PlanningAgent(model, self.world, sampler=self.sampler, options=self.plan, seed=seed)

    def episodes(
        self, model: DiffusionForcing, number: int, seed: int, progress: Progress | None = None
    ) -> tuple[Episodes, dict[str, float]]:
        """`number` episodes, `parallel_episodes` at a time, and statistics of the plans made."""
        parts: list[Episodes] = []
        counts: list[Counts] = []
        for i, first in enumerate(range(0, number, self.parallel_episodes)):
            policy = self.agent(model, seed=1000 * seed + i)
            balls = make_balls(self.world, min(self.parallel_episodes, number - first), multi=self.multi, seed=1000 * seed + i)

            def report(what: str, done: int, total: int, first: int = first) -> None:
                if progress is not None:
                    progress("steps of episodes", first * self.world.steps + done, number * self.world.steps)

            parts.append(play(policy, balls, progress=report))
            if policy.counts is not None:
                counts.append(policy.counts)
        return Episodes.concatenate(parts), _plan_metrics(counts, self.plan.replan_error)

    def evaluate(self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress) -> Evaluation:
        """Scores over `samples` episodes, with figures of the first and of the worst."""
        episodes, plan_metrics = self.episodes(model, samples, seed, progress)
        metrics = {**episodes.summary(), **plan_metrics}
        figures = {}
        failed = np.flatnonzero(~episodes.reached)
        worst = np.concatenate([failed, np.setdiff1d(np.argsort(episodes.scores), failed, assume_unique=True)])
        pictures.draw_episodes(episodes, np.arange(min(8, samples)), folder / "episodes.png")
        figures["episodes.png"] = "The first episodes: executed path in blue from its start (dot), goal in green."
        pictures.draw_episodes(episodes, worst[: min(12, samples)], folder / "failures.png")
        figures["failures.png"] = f"The worst of {samples} episodes, failures first ({len(failed)} never reached the goal)."
        if self.policy == "agent":
            self.draw_pyramid(model, folder / "plans.png", seed)
            figures["plans.png"] = (
                "One start, 24 plans, while they are denoised along a pyramid: the near future settles first, the far one stays uncertain. "
                "Dots are tokens, near ones dark, far ones light."
            )
        if episodes.plans:
            pictures.animate(episodes, folder / "episode.gif")
            figures["episode.gif"] = "The first episode: executed path in blue, current plan in red."
        warnings = failure_warnings(metrics, self.plan.replan_error) if self.policy == "agent" else ()
        return Evaluation(metrics, tables(self.maze, self.multi, self.policy, metrics), figures, warnings)

    def sample(self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress) -> list[Path]:
        """Plans from random starts to random goals, not executed: plans.npz and plans.png."""
        balls = Balls(self.world, samples, multi=True, seed=seed)
        agent = PlanningAgent(model, self.world, sampler=self.sampler, options=self.plan, seed=seed)
        agent.reset(samples)
        plan = agent.propose(balls.observation, balls.goal)
        arrays, picture = folder / "plans.npz", folder / "plans.png"
        np.savez(arrays, actions=plan.action.numpy(), observations=plan.observation.numpy(), goals=balls.goal)
        observations = np.concatenate([balls.observation[:, None], plan.observation.numpy()], axis=1)
        inside = np.linalg.norm(observations[:, 1:, :2] - balls.goal[:, None], axis=-1) <= GOAL_RADIUS
        episodes = Episodes(self.world, observations, inside.astype(float), np.zeros_like(inside), balls.goal)
        pictures.draw_episodes(episodes, np.arange(min(samples, 12)), picture, "Plans, not executed")
        return [arrays, picture]

    def draw_pyramid(self, model: DiffusionForcing, file: Path, seed: int) -> None:
        """The uncertainty of a pyramid: 24 plans from one start at four stages of their denoising."""
        sampler = dataclasses.replace(self.sampler, matrix="pyramid", slope=1.0)
        agent = PlanningAgent(model, self.world, sampler=sampler, options=dataclasses.replace(self.plan, candidates=1, draws=1), seed=seed)
        start = self.world.farthest_cell
        stages = denoising_stages(agent, start, 24)
        title = "24 plans from one start, denoised along a pyramid"
        pictures.draw_denoising(self.world, [("", stages)], start, self.world.goal, file, self.frame_stack, title)


def denoising_stages(agent: PlanningAgent, start: Array, number: int, tokens: int | None = None) -> list[tuple[str, Array]]:
    """`number` plans from a start (2,) to the maze's goal at four stages of their denoising: captions, positions (n, t, 2)."""
    rows: list[Array] = []

    def watch(row: int, x: Tensor, levels: Tensor) -> None:
        rows.append(agent.codec.decode(x[:, 1:]).numpy()[..., 2:4])

    agent.reset(number)
    observation = np.tile(np.concatenate([start, np.zeros(2)]), (number, 1))
    agent.propose(observation, np.tile(agent.maze.goal, (number, 1)), horizon=tokens, on_step=watch)
    picked = [round(share * (len(rows) - 1)) for share in (0.25, 0.5, 0.75, 1.0)]
    return [(f"row {i + 1} of {len(rows)}", rows[i]) for i in picked]


def _plan_metrics(counts: list[Counts], replan_error: float) -> dict[str, float]:
    """Totals over batches of episodes, the error of plans in metres, and the share of plans off by more than replan_error."""
    metrics: dict[str, float] = {}
    plans = sum(count.plans for count in counts)
    if plans:
        metrics["seconds_a_plan"] = sum(count.seconds for count in counts) / plans
        metrics["plans"] = float(plans)
        metrics["bad_plans"] = float(sum(count.bad for count in counts))
        metrics["given_up"] = float(sum(count.given_up for count in counts))
    errors = [error for count in counts for error in count.errors]
    if errors:
        error = np.concatenate(errors)
        metrics["plan_error_median"] = float(np.median(error))
        metrics["plan_error_mean"] = float(np.mean(error))
        metrics["failed_plans"] = float(np.mean(error > replan_error))
    return metrics
