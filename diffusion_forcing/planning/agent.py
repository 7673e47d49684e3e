"""A trained model as an agent: it plans by guided sampling, executes the sampled actions, and replans (paper, section 4.2).

`PlanningAgent` serves n balls at once, NumPy in and out, towards a goal for each or up any differentiable reward (`rewards.py`).
`PlanOptions` chooses between a reactive policy and a planner to the end of the episode, with the same weights.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from ..codecs import Chain
from ..engine.precision import resolve
from ..engine.pretrained import run_folder
from ..engine.run import load_run
from ..guidance import guide
from ..model import DiffusionForcing
from ..monte_carlo import MonteCarlo, expected_reward
from ..sampler import Sampler, check_all_noise
from ..sampling import sample
from .envs.maze2d import GOAL_RADIUS, Array, Bools, Maze, by_name, check_inside
from .episodes import Counts, Policy
from .guidance import disagreement, guidance_scale
from .horizon import HorizonControl
from .options import PLAN_SAMPLER, PlanOptions
from .rewards import Reward, TrackingReward, Trajectory, earn, reach, scaled
from .tokens import choices, present_frames, tokens_per_stack
from .value import PlaceValue

Frames = NDArray[np.float32]
OnStep = Callable[[int, Tensor, Tensor], None]  # (row, tokens, levels), see `sampling.sample`
LARGE = 256
"""Tokens of a batch of plans from which on the network computes in bfloat16 on CPUs that are quick in it. Smaller ones gain nothing."""
ATTEMPTS = 3
"""Times that a plan is sampled before a ball gives up."""


class Problem(NamedTuple):
    """What some balls plan for: their indices (m,), observations (m, 4), and goals (m, 2) or a reward."""

    balls: NDArray[np.int64]
    observation: Array
    goal: Array | None
    reward: Reward | None

    def select(self, which: Any) -> Problem:
        """The same for some of these balls, by a mask or by indices."""
        goal = None if self.goal is None else self.goal[which]
        return Problem(self.balls[which], self.observation[which], goal, self.reward)


class PlanningAgent(Policy):
    """n balls in a maze, planned for together: reset(n), then act(observation, goal) once a step."""

    counts: Counts

    def __init__(
        self, model: DiffusionForcing, maze: Maze | str, *, sampler: Sampler = PLAN_SAMPLER, options: PlanOptions | None = None,
        seed: int = 0, value: PlaceValue | None = None,
    ) -> None:  # fmt: skip
        """value: of being where a plan ends, for the reward "earn" of plans that end before they arrive."""
        if model.codec is None:
            raise ValueError("a planning agent needs a model with its codec: train one with `dforce train maze2d-medium`")
        self.model = copy.deepcopy(model).eval().requires_grad_(False)  # the caller may go on training theirs
        self.codec = cast(Chain, self.model.codec)
        self.maze = by_name(maze) if isinstance(maze, str) else maze
        self.sampler = sampler
        self.options = options or PlanOptions()
        self.frame_stack = self.codec.stack
        self.seed = seed
        self.value = value
        self.reset(1)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, sampler: Sampler | None = None, options: PlanOptions | None = None, seed: int = 0,
        task: type | None = None,
    ) -> PlanningAgent:  # fmt: skip
        """From a run of `dforce train maze2d-...`, or by the name of a pretrained model such as "maze2d-medium".

        sampler, options: None for those of the run. task: your own class of task, where the run was trained with one.
        """
        experiment, model = load_run(run_folder(path), classes=() if task is None else (task,))
        trained: Any = experiment.task
        plan = getattr(trained, "plan", None)
        if not isinstance(plan, PlanOptions):
            raise ValueError(f"{path} was trained for {type(trained).__name__}, not for planning; train `dforce train maze2d-medium`")
        return cls(model, trained.maze, sampler=sampler or trained.sampler, options=options or plan, seed=seed, value=trained.place_value())

    def reset(self, number: int, *, steps: int | None = None) -> None:
        """Begin episodes of `number` balls, `steps` long (None: the maze's own length)."""
        if number < 1:
            raise ValueError(f"an agent serves at least one ball; got {number}")
        self.number = number
        self.steps = steps or self.maze.steps
        if self.steps < self.frame_stack:
            raise ValueError(f"an episode must last at least one token of {self.frame_stack} steps; got {self.steps}")
        self.time = 0
        self.counts = Counts()
        self.generator = Generator().manual_seed(self.seed)
        self.horizon = HorizonControl(self.options, number, self.steps // self.frame_stack, self.frame_stack)
        self.age = np.full(number, 10**9)  # frames executed of each plan
        self.plan = np.zeros((number, 0, 6), dtype=np.float32)  # frames, filled with NaN where plans are shorter
        self.past = np.zeros((number, 0, 6), dtype=np.float32)  # frames executed
        self.first_observation = np.zeros((number, 4), dtype=np.float32)
        self.last_action = np.zeros((number, 2), dtype=np.float32)

    def act(self, observation: Any, goal: Any = None, *, reward: Reward | None = None) -> NDArray[np.float32]:
        """Actions (n, 2) for observations (n, 4): towards goals (n, 2), or up a differentiable reward."""
        problem = self._problem(observation, goal, reward)
        if isinstance(reward, TrackingReward):
            reward.observe(torch.from_numpy(problem.observation[:, :2].astype(np.float32)))
        self._record(problem.observation)
        error, adaptive = self._plan_error(problem.observation), self._adaptive(problem)
        due = self.horizon.due(self.age, np.isfinite(self.plan[..., 0]).sum(1), error, adaptive)
        if reward is not None and due.any():
            due[:] = True  # a reward may depend on all balls at once
        if self.maze.chance is not None and problem.goal is not None:  # the goal holds the ball
            due &= (np.linalg.norm(problem.observation[:, :2] - problem.goal, axis=1) > GOAL_RADIUS) | ~self.horizon.started
        if due.any():
            replaced = due & self.horizon.started
            if replaced.any():
                self.counts.errors.append(error[replaced])
            self.horizon.review(due, error, adaptive)
            self._replan(problem.select(np.flatnonzero(due)))
        age = np.minimum(self.age, self.plan.shape[1] - 1)  # a ball that the goal holds outlives its plan
        action = np.clip(np.nan_to_num(self.plan[np.arange(self.number), age, :2]), -1, 1)
        self.age += 1
        self.time += 1
        self.last_action = action.copy()
        return action

    def propose(
        self, observation: Any, goal: Any = None, *, reward: Reward | None = None, horizon: int | None = None, on_step: OnStep | None = None
    ) -> Trajectory:
        """Plans from observations (n, 4) without executing anything.

        horizon: tokens; None for the options' lookahead, or the whole episode. on_step(row, tokens, levels) watches the denoising.
        """
        problem = self._problem(observation, goal, reward)
        return _trajectory(self._plan(problem, horizon or self.options.lookahead or self.horizon.episode_tokens, on_step))

    def new_plan(self) -> Frames | None:
        """The first ball's plan (t, 6) if the last action began a new one, else None."""
        return self.plan[0].copy() if self.age[0] == 1 else None

    def _problem(self, observation: Any, goal: Any, reward: Reward | None) -> Problem:
        """All balls' problem, checked."""
        observation = np.asarray(observation, dtype=float)
        if observation.shape != (self.number, 4):
            raise ValueError(f"observations should be ({self.number}, 4), position and velocity of each ball; got {observation.shape}. "
                             f"reset(n) sets the number of balls")  # fmt: skip
        if not np.isfinite(observation).all():
            ball = int(np.argwhere(~np.isfinite(observation))[0][0])
            raise ValueError(f"the observation of ball {ball} holds NaN or infinite numbers")
        check_inside(self.maze, observation[:, :2], "the position of ball")
        if (goal is None) == (reward is None):
            raise ValueError("give either a goal or a reward: act(observation, goal), or act(observation, reward=function)")
        if goal is not None:
            goal = check_inside(self.maze, goal, "goal")
            if len(goal) != self.number:
                raise ValueError(f"there are {self.number} balls but {len(goal)} goals; give each its own, (n, 2)")
        return Problem(np.arange(self.number), observation, goal, reward)

    def _adaptive(self, problem: Problem) -> bool:
        """Whether the horizon adapts: towards goals, where no lookahead is set."""
        return self.options.lookahead is None and problem.goal is not None

    def _record(self, observation: Array) -> None:
        """Append the last action and what it led to, to the executed frames."""
        if self.time == 0:
            self.first_observation = observation.astype(np.float32)
        else:
            self.past = np.concatenate([self.past, self._last_frame(np.arange(self.number), observation)], axis=1)

    def _last_frame(self, balls: NDArray[np.int64], observation: Array) -> Frames:
        """(m, 1, 6): the last action of some balls, and their observations (m, 4) after it."""
        return np.concatenate([self.last_action[balls], observation], axis=1)[:, None].astype(np.float32)

    def _plan_error(self, observation: Array) -> Array:
        """Metres (n,) between where the plans have the balls now and where they are; 0 where there is no plan yet."""
        if self.plan.shape[1] == 0:
            return np.zeros(self.number)
        planned = self.plan[np.arange(self.number), np.clip(self.age - 1, 0, self.plan.shape[1] - 1), 2:4]
        return np.where(self.horizon.started, np.linalg.norm(planned - observation[:, :2], axis=1), 0.0)

    def _replan(self, problem: Problem) -> None:
        """New plans for some balls, those of one length together.

        Where the horizon adapts, plans that are rejected are made again at twice the length, up to the end of the episode. (Longer than
        necessary they should not be: a long plan has time for detours.)
        """
        remaining = min(-(-(self.steps - self.time) // self.frame_stack), self.horizon.episode_tokens)
        lengths = np.minimum(self.horizon.tokens[problem.balls], max(1, remaining))
        if problem.reward is not None:
            lengths[:] = lengths.max()  # all balls together, in their order
        adaptive = self._adaptive(problem)
        for length in np.unique(lengths):
            group = problem.select(lengths == length)
            plans = self._plan(group, int(length))
            if adaptive and length < remaining:
                rejected = self._rejected(group, plans)
                if rejected.any():
                    self.horizon.tokens[group.balls[rejected]] = 2 * length
                    self._replan(group.select(rejected))
                group, plans = group.select(~rejected), plans[~rejected]
            self._store(group.balls, plans)
            self.horizon.accept(group.balls, plans, group.goal if adaptive else None)

    def _rejected(self, problem: Problem, plans: Frames) -> Bools:
        """Plans (m, t, 6) that do not arrive or that the model disagrees with, (m,). Plans to stay in the goal are not verified."""
        assert problem.goal is not None
        rejected = ~self.horizon.arrival(plans, problem.goal)[0]
        shortest = plans.shape[1] <= self.options.min_tokens * self.frame_stack
        if not shortest or self.options.hold_scale is not None:
            difference = disagreement(self.model, self._context(problem), torch.from_numpy(plans), self.generator).numpy()
            rejected |= (difference > self.options.verify_tolerance) & ~(shortest & _in_goal(problem))
        return rejected

    def _store(self, balls: NDArray[np.int64], plans: Frames) -> None:
        """Put plans (m, t, 6) of some balls in place."""
        missing = plans.shape[1] - self.plan.shape[1]
        if missing > 0:
            self.plan = np.concatenate([self.plan, np.full((self.number, missing, 6), np.nan, dtype=np.float32)], axis=1)
        self.plan[balls] = np.nan
        self.plan[balls, : plans.shape[1]] = plans
        self.age[balls] = 0

    def _plan(self, problem: Problem, length: int, on_step: OnStep | None = None) -> Frames:
        """Valid plans (m, t, 6) of `length` tokens: invalid ones are sampled again, and replaced by standing still in the end."""
        began = time.perf_counter()
        plans = self._sample(problem, length, on_step)
        for attempt in range(1, ATTEMPTS + 1):
            bad = self._invalid(plans)
            if not bad.any():
                break
            self.counts.bad += int(bad.sum())
            if attempt < ATTEMPTS:
                again = np.flatnonzero(bad) if problem.reward is None else np.arange(len(bad))
                plans[again] = self._sample(problem.select(again), length, on_step)
            else:
                self.counts.given_up += int(bad.sum())
                still = np.concatenate([np.zeros((int(bad.sum()), 2)), problem.observation[bad]], axis=1)
                plans[bad] = still[:, None].astype(np.float32)
        self.counts.plans += len(plans)
        self.counts.seconds += time.perf_counter() - began
        return plans

    def _invalid(self, plans: Frames) -> Bools:
        """Plans (m, t, 6) that are not finite, or leave the maze's bounds by more than a cell, (m,)."""
        position = plans[..., 2:4]
        inside = (position > -1.5) & (position < np.array(self.maze.walls.shape) + 0.5)
        return ~np.logical_and(np.isfinite(plans).all((1, 2)), inside.all((1, 2)))

    def _sample(self, problem: Problem, length: int, on_step: OnStep | None = None) -> Frames:
        """One guided sample of plans (m, t, 6); of several candidates the one with the highest reward."""
        options, schedule = self.options, self.model.schedule
        context = self._context(problem).repeat_interleave(options.candidates, dim=0)
        known, tokens = context.shape[1], length * tokens_per_stack(self.codec)
        large = len(context) * tokens * options.draws >= LARGE
        self.model.autocast = torch.bfloat16 if large and resolve("auto", "cpu") == "bfloat16" else None
        noise = self.sampler.temperature * torch.randn(len(context), tokens, context.shape[-1], generator=self.generator)
        x = torch.cat([context, noise], dim=1)
        matrix = check_all_noise(self.sampler.matrix_for(schedule, 1 if options.only_next else tokens), schedule)
        absent = matrix.new_full((len(matrix), known + tokens - matrix.shape[1]), schedule.levels)
        absent[:, :known] = 0
        matrix = torch.cat([absent[:, :known], matrix, absent[:, known:]], dim=1)
        reward = self._reward(problem, length)
        token_reward = lambda sequence: reward(_trajectory(self.codec.decode(sequence[:, known:])))  # noqa: E731
        denoise: Any = self.model.denoiser(cache=True)
        scale = guidance_scale(options, length, self.horizon.episode_tokens)
        if scale:
            low, high = (round(share * schedule.levels) for share in options.guidance_levels)
            denoise = guide(
                denoise, schedule, token_reward, scale, draws=self._futures(known + tokens), form=options.form, levels=(low, high),
                generator=self.generator,
            )  # fmt: skip
        x = sample(denoise, schedule, x, self.sampler.along(matrix), generator=self.generator, on_step=on_step)
        if options.candidates > 1:
            worth = self._expected(token_reward, x, matrix[-1]) if options.only_next else token_reward(x)
            score = torch.nan_to_num(worth, nan=-torch.inf).unflatten(0, (-1, options.candidates))
            x = x.unflatten(0, (-1, options.candidates))[torch.arange(len(score)), score.argmax(1)]
        if options.only_next:
            x = self._outcome(x[:, : known + tokens_per_stack(self.codec)], known)
        return self.codec.decode(x[:, known:]).numpy()

    def _futures(self, tokens: int) -> MonteCarlo:
        """Over which futures the reward of sequences of so many tokens is averaged."""
        options = self.options
        slope = int(self.model.traits.causal)
        return MonteCarlo(
            options.draws, options.futures, steps=options.future_steps, slope=slope, causal=self.model.causal, estimator=options.estimator,
            spread=options.spread, chosen=choices(self.codec, tokens) if options.expectimax else None,
        )  # fmt: skip

    def _expected(self, token_reward: Callable[[Tensor], Tensor], x: Tensor, levels: Tensor) -> Tensor:
        """(n,), the expected reward of tokens x (n, t, d), decided where levels (t,) are 0."""
        denoise, futures = self.model.denoiser(cache=True), self._futures(x.shape[1])
        return expected_reward(denoise, self.model.schedule, token_reward, x, levels.expand(x.shape[:2]), futures, self.generator)

    def _outcome(self, x: Tensor, known: int) -> Tensor:
        """One unguided sample of what the next actions lead to: tokens x (n, t, d), decided up to these actions, token `known`."""
        if x.shape[1] == known + 1:
            return x
        matrix = self.sampler.matrix_for(self.model.schedule, x.shape[1])
        matrix[:, : known + 1] = 0
        return sample(self.model.denoiser(cache=True), self.model.schedule, x, self.sampler.along(matrix), generator=self.generator)

    def _reward(self, problem: Problem, length: int) -> Reward:
        """The reward of plans of `length` tokens: towards a goal half as strong for every plan that failed, stronger to stay in it."""
        if problem.reward is not None:
            return problem.reward
        assert problem.goal is not None
        goal = torch.from_numpy(problem.goal.astype(np.float32))
        if self.options.reward == "earn":
            return earn(self.maze, goal, self.options.softness, value=self.value)
        weight = 0.5 ** self.horizon.failures[problem.balls].astype(np.float32)
        if self.options.hold_scale is not None and length <= self.options.min_tokens:
            hold = np.float32(self.options.hold_scale / guidance_scale(self.options, length, self.horizon.episode_tokens))
            weight = np.where(_in_goal(problem), hold, weight)
        return scaled(reach(goal), torch.from_numpy(weight))

    def _context(self, problem: Problem) -> Tensor:
        """Clean tokens (m, c, d) that a plan continues: the present; with memory, past tokens after the present of the first of them."""
        tokens = min(self.options.memory, self.time // self.frame_stack)
        observation = torch.from_numpy(problem.observation.astype(np.float32))
        if tokens == 0:
            return self.codec.encode(present_frames(observation, self.frame_stack))
        past = self.past[problem.balls]
        if past.shape[1] < self.time:  # `propose` between two acts: the last step is not recorded yet
            past = np.concatenate([past, self._last_frame(problem.balls, problem.observation)], axis=1)
        begin = past.shape[1] - tokens * self.frame_stack
        before = past[:, begin - 1, 2:] if begin else self.first_observation[problem.balls]
        frames = torch.cat([present_frames(torch.from_numpy(before), self.frame_stack), torch.from_numpy(past[:, begin:])], dim=1)
        return self.codec.encode(frames)


def _in_goal(problem: Problem) -> Bools:
    """Which balls are in their goals, (m,)."""
    assert problem.goal is not None
    return np.asarray(np.linalg.norm(problem.observation[:, :2] - problem.goal, axis=1) <= GOAL_RADIUS)


def _trajectory(frames: Any) -> Trajectory:
    frames = torch.as_tensor(frames)
    return Trajectory(frames[..., :2], frames[..., 2:])
