"""A trained model as an agent: it plans by guided sampling, executes its own diffused actions, and plans again.

`PlanningAgent` serves n balls at once, NumPy in and out. What it wants is a goal for each ball, or any differentiable reward of a
trajectory (`reach`, `visit`, `avoid`, `arrive`, or your own). How it plans is `PlanOptions`: the same weights are a policy that looks
one token ahead, or a planner that looks to the end of the episode.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from ..checks import check_options
from ..engine.pretrained import run_folder
from ..engine.run import load_run
from ..guidance import guide
from ..matrix import by_name as matrix_by_name
from ..model import DiffusionForcing
from ..sampling import sample
from .data import present_frames
from .envs.maze2d import GOAL_RADIUS, Array, Maze, by_name, check_inside

DOUBT_LEVEL = 0.45  # share of K to which a plan is noised to ask whether the model believes it


class Trajectory(NamedTuple):
    """A plan in the world's units, frame by frame: action (b, t, 2), observation after it (b, t, 4)."""

    action: Tensor
    observation: Tensor

    @property
    def position(self) -> Tensor:
        return self.observation[..., :2]

    @property
    def velocity(self) -> Tensor:
        return self.observation[..., 2:]


Reward = Callable[[Trajectory], Tensor]  # (b, t, ...) -> (b,), differentiable


def reach(goal: Tensor) -> Reward:
    """Minus the distance to the goal (b, 2) summed over time: any step may be the one that arrives, and sooner is better."""

    def reward(plan: Trajectory) -> Tensor:
        return -distance(plan.position, _rows(goal, plan)[:, None]).sum(1)

    return reward


def arrive(goal: Tensor, sharpness: float = 4.0) -> Reward:
    """A sparse goal at any time: minus the distance at the nearest moment, softened over time so that there is a gradient.

    The value counts as many times as the plan has frames, so that scales compare with `reach`.
    """

    def reward(plan: Trajectory) -> Tensor:
        far = distance(plan.position, _rows(goal, plan)[:, None])
        return far.shape[1] * torch.logsumexp(-sharpness * far, dim=1) / sharpness

    return reward


class visit:
    """Points (b, 2) to pass in order: those still to come have equal shares of the plan's time, in which their distance is summed.

    An agent tells it where the balls are (`see`): a point within `radius` has been passed, and the next plan begins with the one after.
    """

    def __init__(self, points: Sequence[Tensor], radius: float = GOAL_RADIUS) -> None:
        if not points:
            raise ValueError("say at least one point to visit")
        self.points = torch.stack([torch.as_tensor(point, dtype=torch.float32) for point in points], dim=1)  # (b, p, 2)
        self.radius = radius
        self.passed = torch.zeros(len(self.points), dtype=torch.long)  # points behind each ball

    def see(self, position: Tensor) -> None:
        """Note where the balls are, (b, 2). The last point is never behind them."""
        if len(self.points) == 1:  # the same points for all
            self.points, self.passed = self.points.expand(len(position), -1, -1), self.passed.expand(len(position))
        near = (self.points[torch.arange(len(position)), self.passed] - position).norm(dim=-1) <= self.radius
        self.passed = (self.passed + near).clamp(max=self.points.shape[1] - 1)

    def __call__(self, plan: Trajectory) -> Tensor:
        frames = torch.arange(plan.position.shape[1])
        left = self.points.shape[1] - self.passed
        due = self.passed[:, None] + frames * left[:, None] // len(frames)  # (b, t): the point of each frame
        wanted = self.points.gather(1, due[..., None].expand(-1, -1, 2))
        return -distance(plan.position, _rows(wanted, plan)).sum(1)


def avoid(centre: Tensor, radius: float, strength: float = 3.0) -> Reward:
    """Minus how deep each frame lies within `radius` of a centre (b, 2), times `strength`: add it to another reward."""

    def reward(plan: Trajectory) -> Tensor:
        return -strength * (radius - distance(plan.position, _rows(centre, plan)[:, None])).clamp(min=0).sum(1)

    return reward


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Euclidean over the last axis, smooth where it is 0."""
    return ((a - b) ** 2).sum(-1).add(1e-4).sqrt()


def _rows(point: Tensor, plan: Trajectory) -> Tensor:
    """One point a sequence: guidance by several draws asks for n copies of each beside one another."""
    return point.repeat_interleave(len(plan.action) // len(point), dim=0)


@dataclass(frozen=True)
class PlanOptions:
    """How an agent plans."""

    steps: int = 10
    """Denoising steps of a plan."""
    schedule: Literal["full_sequence", "pyramid", "autoregressive"] = "full_sequence"
    """Schedule matrix of a plan."""
    slope: float = 1.0
    """Of the pyramid: rows from one token's start to the next one's."""
    scale: float = 0.07
    """Strength of guidance per metre and frame, for a plan of a whole episode."""
    near_scale: float = 4.0
    """The same for the shortest plan. In between it follows a power of the plan's length."""
    guided: tuple[float, float] = (0.3, 1.0)
    """Levels at which guidance acts, as shares of K."""
    form: Literal["eps", "step"] = "eps"
    """Where guidance acts: see `guidance.guide`."""
    draws: int = 1
    """Futures over which the reward is averaged: Monte Carlo guidance if more than one."""
    futures: Literal["resample", "rollout"] = "resample"
    """How Monte Carlo guidance draws futures."""
    candidates: int = 1
    """Plans drawn at a time, of which the one of highest predicted reward is kept."""
    replan: int = 20
    """Actions executed of a plan before the next is made."""
    near_replan: int = 5
    """The same for a plan of the shortest length."""
    lookahead: int | None = None
    """Tokens to plan ahead: 1 is a policy. None: as far as it takes to arrive by the last plan, at most to the episode's end."""
    shortest: int = 4
    """Tokens of the shortest plan, where lookahead is None."""
    margin: int = 3
    """Tokens planned beyond the arrival, where lookahead is None."""
    surprise: float = 0.1
    """Metres between plan and execution from which on a plan towards a goal is not believed, where lookahead is None: it is made
    again (after near_replan actions at the earliest), to the episode's end and guided half as much; a plan that comes true takes one
    halving back. A ball held up by a wall that its plan overlooked finds another way."""
    doubt: float = 0.35
    """Metres by which the model may disagree with a plan that guidance drew, where lookahead is None: noised half-way and denoised
    without guidance, a plan through a wall comes back somewhere else. One in doubt counts as one that does not arrive, and a longer one
    is made. The shortest plans and those to the episode's end are not asked about."""
    memory: int = 0
    """Tokens of the past that a plan is conditioned on, besides the present."""
    eta: float = 1.0
    """Fresh noise while denoising: 0 none (DDIM), 1 as in training (DDPM)."""

    def __post_init__(self) -> None:
        check_options(self, "steps", "draws", "candidates", "replan", "near_replan", "shortest")
        if self.lookahead is not None and self.lookahead < 1:
            raise ValueError(f"a plan looks at least one token ahead; got lookahead={self.lookahead}")
        if not (self.surprise >= 0 and self.doubt >= 0):
            raise ValueError(f"surprise and doubt are distances in metres; got {self.surprise}, {self.doubt}")
        if self.memory < 0 or self.margin < 0:
            raise ValueError(f"memory and margin count tokens from 0; got {self.memory}, {self.margin}")
        if self.schedule not in ("full_sequence", "pyramid", "autoregressive"):
            raise ValueError(f"schedule is full_sequence, pyramid or autoregressive; got {self.schedule!r}")
        if not self.scale >= 0 or not (self.near_scale > 0 or (self.near_scale == 0 and self.scale == 0)):
            raise ValueError(f"scale and near_scale are positive, or scale is 0 for no guidance; got {self.scale}, {self.near_scale}")
        if not 0 <= self.guided[0] <= self.guided[1] <= 1:
            raise ValueError(f"guided is a range of shares of K, 0 <= low <= high <= 1; got {self.guided}")


@dataclass
class Counts:
    """What an agent has done since its reset."""

    plans: int = 0
    bad: int = 0
    """Plans that held numbers not finite or far outside of the maze, and were made again."""
    given_up: int = 0
    """Balls whose plan was bad three times running: they pushed with no force until the next plan."""
    seconds: float = 0.0
    errors: list[Array] = field(default_factory=list)
    """Distances between planned and executed position after a plan's actions were executed."""


class PlanningAgent:
    """n balls in a maze, planned for together. reset(n), then act(observation, goal) once a step."""

    def __init__(
        self, model: DiffusionForcing, maze: Maze | str, options: PlanOptions | None = None, *, frame_stack: int = 10, seed: int = 0
    ) -> None:
        if model.codec is None:
            raise ValueError("a planning agent needs a model with its codec: train one with `dforce train maze2d-medium`")
        self.model = copy.deepcopy(model).eval().requires_grad_(False)  # the caller may go on training theirs
        self.codec: Any = model.codec
        self.maze = by_name(maze) if isinstance(maze, str) else maze
        self.options = options or PlanOptions()
        self.stack = frame_stack
        self.seed = seed
        self.on_step: Callable[[int, Tensor, Tensor], None] | None = None
        _check_stack(self.codec, frame_stack)
        if any(getattr(part, "mean", torch.zeros(6)).shape == (7,) for part in getattr(self.codec, "parts", ())):
            raise ValueError("a planning agent cannot use a model with rewards among the tokens; train without: --task.no-reward")
        self.reset(1)

    @classmethod
    def from_pretrained(cls, path: str | Path, options: PlanOptions | None = None, *, seed: int = 0) -> PlanningAgent:
        """From a run of `dforce train maze2d-...`, or by the name of a pretrained model such as "maze2d-medium".

        options: how to plan; what the run says if not given.
        """
        experiment, model = load_run(run_folder(path))
        task: Any = experiment.task
        if not hasattr(task, "plan"):
            raise ValueError(f"{path} was trained for {type(task).__name__}, not for planning; train `dforce train maze2d-medium`")
        return cls(model, task.maze, options or task.plan, frame_stack=task.frame_stack, seed=seed)

    def reset(self, number: int, *, steps: int | None = None) -> None:
        """Begin episodes of `number` balls, `steps` long (the maze's own length if not said)."""
        if number < 1:
            raise ValueError(f"an agent serves at least one ball; got {number}")
        self.number = number
        self.steps = steps or self.maze.steps
        if self.steps < self.stack:
            raise ValueError(f"an episode must last a token of {self.stack} steps at least; got {self.steps}")
        self.time = 0
        self.counts = Counts()
        self.generator = Generator().manual_seed(self.seed)
        top = self.steps // self.stack
        self.horizon = np.full(number, min(top, self.options.lookahead or top))  # tokens of the next plan
        self.age = np.full(number, 10**9)  # frames executed of the plan
        self.interval = np.zeros(number, dtype=np.int64)
        self.surprises = np.zeros(number, dtype=np.int64)  # plans that were not what happened, less those that were
        self.plan = np.zeros((number, 0, 6), dtype=np.float32)  # frames, filled up with NaN where plans are shorter
        self.past = np.zeros((number, 0, 6), dtype=np.float32)  # frames executed
        self.first = np.zeros((number, 4), dtype=np.float32)
        self.acted = np.zeros((number, 2), dtype=np.float32)

    def act(self, observation: Any, goal: Any = None, *, reward: Reward | None = None) -> NDArray[np.float32]:
        """Actions (n, 2) for observations (n, 4): towards goals (n, 2), or up a differentiable reward."""
        seen, wanted = self._check(observation, goal, reward)
        see = getattr(reward, "see", None)
        if see is not None:
            see(torch.from_numpy(seen[:, :2].astype(np.float32)))
        if self.time == 0:
            self.first = seen.astype(np.float32)
        else:
            self.past = np.concatenate([self.past, np.concatenate([self.acted, seen], axis=1)[:, None].astype(np.float32)], axis=1)
        due = (self.age >= self.interval) | (self.age >= self._planned())
        begun = self.interval > 0
        apart = np.where(begun, np.linalg.norm(self._foreseen() - seen[:, :2], axis=1), 0.0)
        surprised = apart > self.options.surprise
        if goal is not None and self.options.lookahead is None:
            due |= surprised & (self.age >= self.options.near_replan)
        if reward is not None and due.any():
            due[:] = True  # a reward of the user's own may speak of all balls at once
        if due.any():
            if (due & begun).any():
                self.counts.errors.append(apart[due & begun])
            self.surprises[due] = np.where(surprised, self.surprises + 1, np.maximum(self.surprises - 1, 0))[due]
            if self.options.lookahead is None and goal is not None:
                self.horizon[~begun] = self.options.shortest  # see `_replan`
                self.horizon[due & surprised] = self.steps // self.stack
            self._replan(np.flatnonzero(due), seen, wanted, reward)
        action = np.clip(np.nan_to_num(self.plan[np.arange(self.number), self.age, :2]), -1, 1)
        self.age += 1
        self.time += 1
        self.acted = action.copy()
        return action

    def propose(self, observation: Any, goal: Any = None, *, reward: Reward | None = None, horizon: int | None = None) -> Trajectory:
        """Plans from observations (n, 4), nothing executed: for looking at. horizon: tokens, a whole episode if not said."""
        seen, wanted = self._check(observation, goal, reward)
        length = horizon or self.options.lookahead or self.steps // self.stack
        frames = self._make(np.arange(self.number), seen, wanted, reward, length)
        return self._trajectory(frames)

    def _foreseen(self) -> NDArray[np.float32]:
        """Where the plans have the balls now, (n, 2)."""
        if self.plan.shape[1] == 0:
            return np.full((self.number, 2), np.nan, dtype=np.float32)
        return self.plan[np.arange(self.number), np.clip(self.age - 1, 0, self.plan.shape[1] - 1), 2:4]

    def _planned(self) -> NDArray[np.int64]:
        """Frames of each ball's plan."""
        return np.isfinite(self.plan[..., 0]).sum(1)

    def _check(self, observation: Any, goal: Any, reward: Reward | None) -> tuple[Array, Array | None]:
        seen = np.asarray(observation, dtype=float)
        if seen.shape != (self.number, 4):
            raise ValueError(f"observations should be ({self.number}, 4), position and velocity of each ball; got {seen.shape}. "
                             f"reset(n) says how many balls there are")  # fmt: skip
        if not np.isfinite(seen).all():
            raise ValueError(f"the observation of ball {int(np.argwhere(~np.isfinite(seen))[0][0])} holds NaN or infinite numbers")
        check_inside(self.maze, seen[:, :2], "the position of ball")
        if (goal is None) == (reward is None):
            raise ValueError("say what the agent is to do: act(observation, goal), or act(observation, reward=function)")
        if goal is None:
            return seen, None
        wanted = check_inside(self.maze, goal, "goal")
        if len(wanted) != self.number:
            raise ValueError(f"there are {self.number} balls but {len(wanted)} goals; give each its own, (n, 2)")
        return seen, wanted

    def _replan(self, who: NDArray[np.int64], seen: Array, goal: Array | None, reward: Reward | None) -> None:
        """New plans for some balls, those of one length together.

        Where the look-ahead is open, a plan that does not arrive, or that the model itself doubts, is made again, looking twice as far,
        up to the episode's end: plans that look too far have time for detours.
        """
        left = min(-(-(self.steps - self.time) // self.stack), self.steps // self.stack)
        deepen = self.options.lookahead is None and goal is not None
        wanted = np.minimum(self.horizon[who], max(1, left))
        if reward is not None:
            wanted[:] = wanted.max()  # all balls together, in their order
        for length in np.unique(wanted):
            group = who[wanted == length]
            frames = self._make(group, seen, goal, reward, int(length))
            if deepen and goal is not None and length < left:
                short = ~self._arrives(frames, goal[group])[0]
                if length > self.options.shortest:
                    short |= self._doubts(group, seen, frames) > self.options.doubt
                if short.any():
                    self.horizon[group[short]] = 2 * length
                    self._replan(group[short], seen, goal, reward)
                group, frames = group[~short], frames[~short]
            if frames.shape[1] > self.plan.shape[1]:
                more = np.full((self.number, frames.shape[1] - self.plan.shape[1], 6), np.nan, dtype=np.float32)
                self.plan = np.concatenate([self.plan, more], axis=1)
            self.plan[group] = np.nan
            self.plan[group, : frames.shape[1]] = frames
            self.age[group] = 0
            near = deepen and length <= self.options.shortest
            self.interval[group] = min(self.options.near_replan if near else self.options.replan, frames.shape[1])
            if deepen and goal is not None:
                self.horizon[group] = self._next_horizon(frames, goal[group])

    def _arrives(self, frames: NDArray[np.float32], goal: Array) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Whether plans (n, t, 6) come to their goals, and in which token; the episode's last where they do not."""
        close = np.linalg.norm(frames[..., 2:4] - goal[:, None], axis=-1) < GOAL_RADIUS
        return close.any(1), np.where(close.any(1), close.argmax(1) // self.stack, self.steps // self.stack)

    def _doubts(self, who: NDArray[np.int64], seen: Array, frames: NDArray[np.float32], draws: int = 2) -> NDArray[np.float32]:
        """Metres (n,) between plans (n, t, 6) and what the model makes of them unguided, at the frame where they differ most."""
        schedule = self.model.schedule
        context, tokens = self._context(who, seen), self.codec.encode(torch.from_numpy(frames))
        k = torch.full(tokens.shape[:2], round(DOUBT_LEVEL * schedule.levels))
        levels = torch.cat([k.new_zeros(context.shape[:2]), k], dim=1)
        apart = torch.zeros(frames.shape[:2])
        for _ in range(draws):
            noisy = schedule.add_noise(tokens, k, torch.randn(tokens.shape, generator=self.generator))
            with torch.no_grad():
                again = self.model.predict(torch.cat([context, noisy], dim=1), levels).x0[:, context.shape[1] :]
            apart += (self._decode(again).position - torch.from_numpy(frames[..., 2:4])).norm(dim=-1) / draws
        return apart.amax(1).numpy()

    def _next_horizon(self, frames: NDArray[np.float32], goal: Array) -> NDArray[np.int64]:
        """Tokens of the next plan: as far as this one takes to arrive, and a margin. Lengths are rounded up, to batch them."""
        wanted = self._arrives(frames, goal)[1] + 1 + self.options.margin
        lengths = _lengths(self.options.shortest, self.steps // self.stack)
        return lengths[np.minimum(np.searchsorted(lengths, wanted), len(lengths) - 1)]

    def _make(self, who: NDArray[np.int64], seen: Array, goal: Array | None, reward: Reward | None, length: int) -> NDArray[np.float32]:
        """Plans (len(who), length*stack, 6) that are sound, whatever it takes."""
        began = time.perf_counter()
        frames = self._sample(who, seen, goal, reward, length)
        for _ in range(2):
            bad = self._unsound(frames)
            if not bad.any():
                break
            self.counts.bad += int(bad.sum())
            again = np.flatnonzero(bad) if reward is None else np.arange(len(who))
            frames[again] = self._sample(who[again], seen, goal, reward, length)
        bad = self._unsound(frames)
        if bad.any():
            self.counts.bad += int(bad.sum())
            self.counts.given_up += int(bad.sum())
            still = np.concatenate([np.zeros((int(bad.sum()), 2)), seen[who[bad]]], axis=1)
            frames[bad] = still[:, None].astype(np.float32)
        self.counts.plans += len(who)
        self.counts.seconds += time.perf_counter() - began
        return frames

    def _unsound(self, frames: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Plans that hold numbers not finite, or leave the maze's bounds by more than a cell."""
        inside = (frames[..., 2:4] > -1.5) & (frames[..., 2:4] < np.array(self.maze.walls.shape) + 0.5)
        sound: Any = np.isfinite(frames).all((1, 2)) & inside.all((1, 2))
        return ~sound

    def _sample(self, who: NDArray[np.int64], seen: Array, goal: Array | None, reward: Reward | None, length: int) -> NDArray[np.float32]:
        """One guided sample of plans for some balls."""
        options, schedule = self.options, self.model.schedule
        context = self._context(who, seen)
        copies = options.candidates
        context = context.repeat_interleave(copies, dim=0)
        matrix = self._matrix(length)
        given = context.shape[1]
        noise = torch.randn(len(context), length, context.shape[-1], generator=self.generator)
        x = torch.cat([context, noise], dim=1)
        matrix = torch.cat([matrix.new_zeros(len(matrix), given), matrix], dim=1)
        wanted = self._reward(who, goal, reward)
        judge = lambda tokens: wanted(self._decode(tokens[:, given:]))  # noqa: E731
        denoise: Any = self.model.denoiser()
        scale = self._scale(length)
        if scale:
            low, high = (round(share * schedule.levels) for share in options.guided)
            denoise = guide(
                denoise, schedule, judge, scale, draws=options.draws, form=options.form, levels=(low, high), futures=options.futures,
                generator=self.generator,
            )  # fmt: skip
        x = sample(denoise, schedule, x, matrix, eta=options.eta, generator=self.generator, on_step=self.on_step)
        if copies > 1:
            score = torch.nan_to_num(judge(x), nan=-torch.inf).unflatten(0, (len(who), copies))
            x = x.unflatten(0, (len(who), copies))[torch.arange(len(who)), score.argmax(1)]
        return self.codec.decode(x[:, given:]).numpy()

    def _context(self, who: NDArray[np.int64], seen: Array) -> Tensor:
        """What a plan is conditioned on (n, 1 + remembered, width): the present, before it the past in whole tokens."""
        tokens = min(self.options.memory, self.time // self.stack)
        now = torch.from_numpy(seen[who].astype(np.float32))
        if tokens == 0:
            return self.codec.encode(present_frames(now, self.stack))
        past = self.past[who]
        if past.shape[1] < self.time:  # a proposal between two acts: the last step is not noted down yet
            past = np.concatenate([past, np.concatenate([self.acted[who], now.numpy()], axis=1)[:, None]], axis=1)
        begin = past.shape[1] - tokens * self.stack
        frames = past[:, begin:]
        before = past[:, begin - 1, 2:] if begin else self.first[who]
        return self.codec.encode(torch.cat([present_frames(torch.from_numpy(before), self.stack), torch.from_numpy(frames)], dim=1))

    def _matrix(self, length: int) -> Tensor:
        """Levels of the plan's tokens (m+1, length)."""
        schedule = self.model.schedule
        ladder = schedule.ladder(min(self.options.steps, schedule.levels))
        return matrix_by_name(self.options.schedule, length, ladder, self.options.slope)

    def _scale(self, length: int) -> float:
        """Guidance strength of a plan of so many tokens: a power law between the shortest plan's and the whole episode's."""
        whole, shortest = self.steps // self.stack, self.options.shortest
        if self.options.lookahead is not None or whole <= shortest or self.options.scale <= 0:
            return self.options.scale
        share = np.clip(np.log(length / shortest) / np.log(whole / shortest), 0, 1)
        return float(self.options.near_scale ** (1 - share) * self.options.scale**share)

    def _reward(self, who: NDArray[np.int64], goal: Array | None, reward: Reward | None) -> Reward:
        if reward is not None:
            return reward
        assert goal is not None
        towards = reach(torch.from_numpy(goal[who].astype(np.float32)))
        believed = torch.from_numpy(0.5 ** self.surprises[who].astype(np.float32))
        return lambda plan: _rows(believed, plan) * towards(plan)

    def _decode(self, tokens: Tensor) -> Trajectory:
        return self._trajectory(self.codec.decode(tokens))

    def _trajectory(self, frames: Any) -> Trajectory:
        frames = torch.as_tensor(frames)
        return Trajectory(frames[..., :2], frames[..., -4:])


def _lengths(shortest: int, longest: int) -> NDArray[np.int64]:
    """Lengths of plans: each about a quarter longer than the one before, so that few are in use at a time."""
    lengths = [shortest]
    while lengths[-1] < longest:
        lengths.append(min(longest, max(lengths[-1] + 1, round(1.25 * lengths[-1]))))
    return np.array([min(shortest, longest)] if shortest >= longest else lengths)


def _check_stack(codec: Any, stack: int) -> None:
    frames = next((part.frames for part in getattr(codec, "parts", ()) if hasattr(part, "frames")), None)
    if frames is not None and frames != stack:
        raise ValueError(f"the model's tokens hold {frames} frames; the agent was told {stack}")
