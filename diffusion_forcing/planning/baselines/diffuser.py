"""Diffuser (Janner et al. 2022) with our data and network: full-sequence diffusion with start and goal in-painted.

All tokens share one level. After each of 64 ancestral steps the first token is overwritten with the observation and the last with the goal
(the replacement technique). A plan is as long as in Diffuser's own experiments, shorter than an episode. Either a PD controller follows its
positions and then holds the last one, as Diffuser's authors do, or its own actions are executed and a new plan is made when they are used
up.
"""

from __future__ import annotations

import copy
import itertools
import time
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from ...codecs import Chain
from ...model import DiffusionForcing
from ...solver import ddim_step
from ..envs.maze2d import Array, Maze
from ..episodes import Counts, Policy
from ..tokens import present_frames

HORIZON = {"umaze": 128, "medium": 256, "large": 384}
"""Published steps of a plan."""


class Diffuser(Policy):
    """reset(n), then act(observation, goal) once a step. pd: follow the planned positions with a PD controller."""

    counts: Counts

    def __init__(self, model: DiffusionForcing, maze: Maze, *, steps: int = 64, pd: bool, seed: int = 0) -> None:
        if model.traits.causal:
            raise ValueError("Diffuser attends to the whole sequence; use a model with causal=False")
        self.model, self.maze, self.steps, self.pd = copy.deepcopy(model).eval(), maze, steps, pd
        self.codec = cast(Chain, self.model.codec)
        self.generator = Generator().manual_seed(seed)
        self.reset(1)

    def reset(self, number: int, *, steps: int | None = None) -> None:
        self.number, self.time, self.planned_at = number, 0, 0
        self.length = -(-min(steps or self.maze.steps, HORIZON[self.maze.name]) // self.codec.stack)
        self.counts = Counts()
        self.plan = np.zeros((number, 0, 6), dtype=np.float32)

    def act(self, observation: Array, goal: Array) -> NDArray[np.float32]:
        """Actions (n, 2) for observations (n, 4) and goals (n, 2)."""
        used_up = not self.pd and self.time - self.planned_at >= self.plan.shape[1]
        if self.time == 0 or used_up:
            began, self.planned_at = time.perf_counter(), self.time
            self.plan = self._sample(observation, goal).numpy()
            self.counts.plans += self.number
            self.counts.seconds += time.perf_counter() - began
        elif self.time == self.planned_at + 10:
            self.counts.errors.append(np.linalg.norm(self.plan[:, 9, 2:4] - observation[:, :2], axis=1))
        now = self.plan[:, min(self.time - self.planned_at, self.plan.shape[1] - 1)]
        self.time += 1
        if not self.pd:
            return np.clip(now[:, :2], -1, 1)
        # The published controller: towards the planned position, at the planned velocity.
        return np.clip(10 * (now[:, 2:4] - observation[:, :2]) + (now[:, 4:] - observation[:, 2:]), -1, 1).astype(np.float32)

    def new_plan(self) -> Array | None:
        return self.plan[0].copy() if self.time - self.planned_at == 1 else None

    def _sample(self, observation: Array, goal: Array) -> Tensor:
        """Plans (n, t, 6) in frames, from white noise."""
        schedule = self.model.schedule
        begin = self._token(observation)
        end = self._token(np.concatenate([goal, np.zeros_like(goal)], axis=1))
        x = torch.randn(self.number, 1 + self.length, begin.shape[-1], generator=self.generator)
        ladder = schedule.ladder(min(self.steps, schedule.levels)).flip(0)
        with torch.no_grad():
            for level, below in itertools.pairwise(ladder):
                x = torch.cat([begin, x[:, 1:-1], end], dim=1)
                k = level.expand(x.shape[:2])
                x = ddim_step(schedule, x, self.model.predict(x, k), k, below.expand(x.shape[:2]), eta=1.0, generator=self.generator)
            x = torch.cat([begin, x[:, 1:-1], end], dim=1)
        return self.codec.decode(x[:, 1:])

    def _token(self, observation: Array) -> Tensor:
        """One token (n, 1, d) of a ball that coasts to each observation (n, 4)."""
        return self.codec.encode(present_frames(torch.from_numpy(observation.astype(np.float32)), self.codec.stack))
