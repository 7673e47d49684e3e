"""Maze2D (paper, section 4.2): offline data of a ball that wanders, and one model that plans and acts in its maze.

Judged as the benchmark does: whole episodes, one reward a step within 0.5 of the goal, the goal fixed or drawn anew (Multi2D).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..codecs import Chain, Normalize, Rotate, Stack
from ..engine.task import Evaluation, Progress, Table, TaskData
from ..preconditioning import Smoother
from . import data as store
from .agent import PlanningAgent, PlanOptions
from .envs.maze2d import Balls, Maze, by_name
from .episodes import Episodes, Policy, play

if TYPE_CHECKING:
    from ..model import DiffusionForcing

UNIT = 0.7
"""Metres in a unit of position: the denoising error is constant in units, and should be small against a corridor's 0.8."""
# Normalised scores as published: fixed goal, then Multi2D. IQL and CQL as the paper quotes them.
PUBLISHED: dict[str, dict[str, tuple[float | None, float | None]]] = {
    "umaze": {
        "MPPI": (33.2, 41.2), "CQL": (5.7, None), "IQL": (47.4, 24.8), "Diffuser, own actions": (6.3, 32.8),
        "Diffuser, PD controller": (113.9, 128.9), "Diffusion Forcing without Monte Carlo": (110.1, 107.7),
        "Diffusion Forcing": (116.7, 119.1),
    },
    "medium": {
        "MPPI": (10.2, 15.4), "CQL": (5.0, None), "IQL": (34.9, 12.1), "Diffuser, own actions": (13.5, 22.0),
        "Diffuser, PD controller": (121.5, 127.2), "Diffusion Forcing without Monte Carlo": (136.1, 145.6),
        "Diffusion Forcing": (149.4, 152.3),
    },
    "large": {
        "MPPI": (5.1, 8.0), "CQL": (12.5, None), "IQL": (58.6, 13.9), "Diffuser, own actions": (6.3, 6.9),
        "Diffuser, PD controller": (123.0, 132.1), "Diffusion Forcing without Monte Carlo": (142.8, 129.8),
        "Diffusion Forcing": (159.0, 167.1),
    },
}  # fmt: skip
POLICIES = ("agent", "diffuser", "diffuser_pd", "scripted", "random", "mppi")


@dataclass(frozen=True)
class Maze2D:
    """A ball in a maze: what a model is trained on, and how it is judged."""

    maze: Literal["umaze", "medium", "large"] = "medium"
    """Which maze."""
    multi: bool = False
    """Judge on goals drawn anew for each episode (Multi2D), instead of the fixed one."""
    policy: Literal["agent", "diffuser", "diffuser_pd", "scripted", "random", "mppi"] = "agent"
    """Who acts: the planning agent, or a baseline: Diffuser with its own actions or a PD controller, the scripted controller that
    knows the maze, a random policy, MPPI with the true dynamics."""
    plan: PlanOptions = field(default_factory=PlanOptions)
    """How the agent plans."""
    batch: int = 100
    """Episodes played side by side."""
    frame_stack: int = 10
    """Frames a token."""
    horizon: int | None = None
    """Frames a window of training looks ahead; None: a whole episode, 300 / 600 / 800."""
    short: float = 0.5
    """Share of the training batches that are cut into shorter windows, of one random length each: so that short plans are learned."""
    smooth: bool = True
    """Whether a model that sees everything also reads linear guesses of where the ball is, smoothed over the whole plan."""
    joints: bool = True
    """Whether the plans of a model that sees everything are made to obey the law of motion from token to token."""
    reward: bool = False
    """Whether tokens hold rewards too."""
    transitions: int | None = None
    """Transitions to train on; None: as many as the benchmark has, 1 / 2 / 4 million."""
    data_seed: int = 0
    """Of the data collector."""
    data_file: Path | None = None
    """Data of your own: .hdf5 as D4RL or Minari lay it out. None: collected on first use and cached."""

    def __post_init__(self) -> None:
        by_name(self.maze)
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}; got {self.policy!r}")
        if self.frame_stack < 1:
            raise ValueError(f"a token holds at least one frame; got frame_stack={self.frame_stack}")
        if self.horizon is not None and self.horizon < self.frame_stack:
            raise ValueError(f"a horizon is a token of {self.frame_stack} frames at least; got {self.horizon}")
        if self.batch < 1:
            raise ValueError(f"batch counts episodes from 1; got {self.batch}")

    @property
    def default_samples(self) -> int:
        return 100

    @property
    def world(self) -> Maze:
        return by_name(self.maze)

    @property
    def tokens(self) -> int:
        """Tokens of a plan, the present not counted."""
        return (self.horizon or self.world.steps) // self.frame_stack

    def data(self) -> TaskData:
        """Windows that begin anywhere; one stream in 32 is kept for validation."""
        file = self.data_file or self.prepare()
        frames, before = store.frames_of(store.read(file), self.reward)
        codec = self.codec(frames)
        long = torch.isfinite(frames).all(-1).sum(1) >= self.tokens * self.frame_stack
        if long.any():  # otherwise the windows will say what is wrong
            frames, before = frames[long], before[long]
        held = max(1, len(frames) // 32) if len(frames) > 1 else 0
        assert codec.variance is not None
        event = (len(codec.variance),)
        train, valid = (
            store.FrameWindows(frames[part], before[part], self.tokens + 1, self.frame_stack, codec, event, self.short)
            for part in (slice(held, None), slice(0, held or None))
        )
        joints = store.joints(frames, codec) if self.joints else None
        smoother = None
        if self.smooth:
            tokens = train.read(train.every(2000)).x[:, 1:]  # the present is no token of the stream
            smoother = Smoother.fit(torch.cat([tokens, tokens[:, -1:]], dim=1), [0, self.frame_stack + 2])  # where the ball is
        return TaskData(train, valid, codec, joints, smoother)

    def prepare(self, progress: Progress | None = None) -> Path:
        """The file of the collected data, made on first use."""
        if progress is None:
            from ..engine.log import progress_bar

            with progress_bar() as bar:
                return store.prepare(self.world, self.transitions, self.data_seed, bar)
        return store.prepare(self.world, self.transitions, self.data_seed, progress)

    def codec(self, frames: Tensor) -> Chain:
        """Units, stacked frames, and of their directions those that the dynamics leave free.

        A stack of n frames has 2n actions and one state to begin with; the rest follows, but for contacts with walls. So of its 6n
        numbers a token keeps 2n + 4, and whatever is decoded from them obeys the dynamics of free flight: actions and states agree.
        """
        flat = frames.reshape(-1, frames.shape[-1])
        flat = flat[torch.isfinite(flat).all(-1)]
        plain = Normalize.fit(flat)
        parts = [plain.std[:2] / 3, torch.full((2,), UNIT), plain.std[-2:] / 2]
        if self.reward:
            parts.insert(1, plain.std[2:3])
        normalize, stack = Normalize(plain.mean, torch.cat(parts)), Stack(self.frame_stack)
        whole = frames[:, : frames.shape[1] // self.frame_stack * self.frame_stack]  # no token over the joint of two streams
        stacked = stack.encode(normalize.encode(whole)).flatten(0, 1)
        free = F.pad(store.flies_freely(whole, store.law_of_motion(whole)), (1, 0), value=True).unflatten(1, (-1, self.frame_stack))
        free[..., 0] = True  # from token to token is another matter
        flying = free.all(-1).flatten() & torch.isfinite(stacked).all(-1)
        stacked = stacked[flying if flying.sum() > stacked.shape[1] else torch.isfinite(stacked).all(-1)]
        # Rows and columns apart: walls stand along them, and a direction that mixed the two would have to learn them at a slant.
        width = flat.shape[1]
        axes = [[0, width - 4, width - 2], [1, width - 3, width - 1]]
        groups = [[frame * width + number for frame in range(self.frame_stack) for number in axis] for axis in axes]
        tokens = stacked[:: max(1, len(stacked) // 100_000)]
        # Where the ball is comes first, on its own: walls are a matter of that, and it varies no more than its velocity does.
        where = torch.zeros(self.frame_stack, width)
        where[:, width - 4 : width - 2] = 1
        rotate = Rotate.fit(tokens, keep=self.frame_stack + 2, groups=groups, first=where.flatten())
        if self.reward:
            rewards = [frame * width + 2 for frame in range(self.frame_stack)]
            both = [rotate, Rotate.fit(tokens, groups=[rewards])]
            rotate = Rotate(
                both[0].mean + both[1].mean, torch.cat([part.basis for part in both], 1), torch.cat([part.variance for part in both])
            )
        return Chain(normalize, stack, rotate)

    def agent(self, model: DiffusionForcing, seed: int = 0) -> Any:
        """Who acts, by the option `policy`."""
        if self.policy in ("scripted", "random", "mppi"):
            from .baselines.mppi import MPPI
            from .baselines.scripted import RandomPolicy, ScriptedPolicy

            if self.policy == "mppi":
                return MPPI(self.world, seed=seed)
            return (ScriptedPolicy if self.policy == "scripted" else RandomPolicy)(self.world, seed)
        if self.reward:
            raise ValueError("planning with rewards among the tokens is not supported; train without: --task.reward False")
        if self.policy in ("diffuser", "diffuser_pd"):
            from .baselines.diffuser import Diffuser

            return Diffuser(model, self.world, steps=self.plan.steps, pd=self.policy == "diffuser_pd", stack=self.frame_stack, seed=seed)
        return PlanningAgent(model, self.world, self.plan, frame_stack=self.frame_stack, seed=seed)

    def episodes(
        self, model: DiffusionForcing, number: int, seed: int, progress: Progress | None = None
    ) -> tuple[Episodes, dict[str, float]]:
        """`number` episodes, `batch` at a time, and what the agent says of its plans."""
        parts: list[Episodes] = []
        plans, seconds, bad, given_up, errors = 0, 0.0, 0, 0, []
        for i, first in enumerate(range(0, number, self.batch)):
            policy: Policy = self.agent(model, seed=1000 * seed + i)
            balls = Balls(self.world, min(self.batch, number - first), multi=self.multi, seed=1000 * seed + i)

            def told(what: str, done: int, of: int, first: int = first) -> None:
                if progress is not None:
                    progress("steps of episodes", first * self.world.steps + done, number * self.world.steps)

            parts.append(play(policy, balls, progress=told))
            counts = getattr(policy, "counts", None)
            if counts is not None:
                plans, seconds = plans + counts.plans, seconds + counts.seconds
                bad, given_up = bad + counts.bad, given_up + counts.given_up
                errors += counts.errors
        names = ("observations", "rewards", "touched", "goals")
        joined = Episodes(
            self.world, **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names}, plans=parts[0].plans
        )
        extra = {}
        if plans:
            extra = {"seconds_a_plan": seconds / plans, "plans": float(plans), "bad_plans": float(bad), "given_up": float(given_up)}
        if errors:
            extra["plan_error_median"] = float(np.median(np.concatenate(errors)))
            extra["plan_error_mean"] = float(np.mean(np.concatenate(errors)))
        return joined, extra

    def evaluate(self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress) -> Evaluation:
        from . import figures as pictures

        episodes, extra = self.episodes(model, samples, seed, progress)
        metrics = {**episodes.summary(), **extra}
        figures = {}
        failed = np.flatnonzero(~episodes.reached)
        worst = np.concatenate([failed, np.setdiff1d(np.argsort(episodes.scores), failed, assume_unique=True)])
        pictures.draw_episodes(episodes, np.arange(min(8, samples)), folder / "episodes.png")
        figures["episodes.png"] = "The first episodes: executed path in blue from its start (dot), goal in green."
        pictures.draw_episodes(episodes, worst[: min(12, samples)], folder / "failures.png")
        figures["failures.png"] = f"The worst of {samples} episodes, failures first ({len(failed)} never reached the goal)."
        if self.policy == "agent":
            self.draw_plans(model, folder / "plans.png", seed)
            figures["plans.png"] = (
                "One start, 24 plans, while they are denoised with a pyramid: the near future settles first, the far one stays vague. "
                "Dots are tokens, dark ones near, light ones far."
            )
        if episodes.plans:
            pictures.animate(episodes, folder / "episode.gif")
            figures["episode.gif"] = "The first episode: executed path in blue, the plan of the moment in red."
        return Evaluation(metrics, self._tables(metrics), figures)

    def sample(self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress) -> list[Path]:
        """Plans from random starts to random goals, not executed."""
        from . import figures as pictures

        balls = Balls(self.world, samples, multi=True, seed=seed)
        agent = PlanningAgent(model, self.world, self.plan, frame_stack=self.frame_stack, seed=seed)
        agent.reset(samples)
        plan = agent.propose(balls.observation, balls.goal)
        arrays, picture = folder / "plans.npz", folder / "plans.png"
        np.savez(arrays, actions=plan.action.numpy(), observations=plan.observation.numpy(), goals=balls.goal)
        seen = np.concatenate([balls.observation[:, None], plan.observation.numpy()], axis=1)
        inside = np.linalg.norm(seen[:, 1:, :2] - balls.goal[:, None], axis=-1) <= 0.5
        episodes = Episodes(self.world, seen, inside.astype(float), np.zeros_like(inside), balls.goal)
        pictures.draw_episodes(episodes, np.arange(min(samples, 12)), picture, "Plans, as imagined")
        return [arrays, picture]

    def draw_plans(self, model: DiffusionForcing, file: Path, seed: int) -> None:
        """The uncertainty of a pyramid: many plans from one start at several moments of their denoising."""
        import dataclasses

        from . import figures as pictures

        options = dataclasses.replace(self.plan, schedule="pyramid", slope=1.0, candidates=1, draws=1)
        agent = PlanningAgent(model, self.world, options, frame_stack=self.frame_stack, seed=seed)
        agent.reset(24)
        begin = self._far_start()
        observation = np.tile(np.concatenate([begin, np.zeros(2)]), (24, 1))
        rows: list[Tensor] = []
        agent.on_step = lambda row, x, levels: rows.append(agent.codec.decode(x[:, 1:]).numpy()[..., 2:4])
        agent.propose(observation, np.tile(self.world.goal, (24, 1)))
        picked = [round(share * (len(rows) - 1)) for share in (0.25, 0.5, 0.75, 1.0)]
        stages = [(f"row {i + 1} of {len(rows)}", rows[i]) for i in picked]
        title = "24 plans from one start, denoised along a pyramid"
        pictures.draw_denoising(self.world, stages, begin, self.world.goal, file, self.frame_stack, title)  # type: ignore[arg-type]

    def _far_start(self) -> Any:
        cells = self.world.cells
        return cells[np.abs(cells - self.world.goal).sum(1).argmax()].astype(float)

    def _tables(self, metrics: dict[str, float]) -> tuple[Table, ...]:
        kind = "Multi2D" if self.multi else "fixed goal"
        stderr = f" ± {metrics['score_stderr']:.1f}" if metrics["episodes"] > 1 else ""
        names = {"agent": "Diffusion Forcing, own actions", "diffuser": "Diffuser, own actions", "diffuser_pd": "Diffuser, PD controller",
                 "scripted": "scripted controller that knows the maze", "random": "random policy",
                 "mppi": "MPPI, true dynamics"}  # fmt: skip
        rows = [(f"here: {names[self.policy]}", f"{metrics['score']:.1f}{stderr}")]
        for name, scores in PUBLISHED[self.maze].items():
            value = scores[int(self.multi)]
            rows.append((f"published: {name}", "-" if value is None else f"{value:.1f}"))
        about = [
            ("episodes", f"{metrics['episodes']:,.0f}"),
            ("reached the goal", f"{metrics['success']:.1%}"),
            ("first reached after", f"{metrics['first_reach']:.0f} steps" if metrics["success"] else "-"),
            ("in the goal from then on", f"{metrics['stay']:.1%} of the time" if metrics["success"] else "-"),
            ("touching a wall", f"{metrics['wall_contact']:.1%} of the time"),
        ]
        if "plan_error_median" in metrics:
            about.append(
                ("plan and execution apart", f"{metrics['plan_error_median']:.3f} (median), {metrics['plan_error_mean']:.3f} (mean)")
            )
        if "seconds_a_plan" in metrics:
            about.append(("seconds a plan, batched", f"{metrics['seconds_a_plan']:.3f}"))
            about.append(("bad plans, made again", f"{metrics['bad_plans']:.0f} of {metrics['plans']:,.0f}"))
        return (
            Table(f"Maze2D {self.maze}, {kind}: normalised score", ("who", "score"), tuple(rows)),
            Table("Of these episodes", ("", ""), tuple(about)),
        )
