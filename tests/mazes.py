"""Streams, tokens, models and agents of a maze, small enough to plan within a test."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import seeded
from torch import Tensor

from diffusion_forcing import DiffusionForcing
from diffusion_forcing.backbones import RNNConfig, TransformerConfig
from diffusion_forcing.codecs import Chain
from diffusion_forcing.engine.config import ModelConfig
from diffusion_forcing.levels import independent
from diffusion_forcing.planning.agent import PlanningAgent
from diffusion_forcing.planning.data import Transitions, collect
from diffusion_forcing.planning.dynamics import motion_constraint
from diffusion_forcing.planning.envs.maze2d import DT, GEAR, MASS, MAZES, Balls
from diffusion_forcing.planning.options import PlanOptions
from diffusion_forcing.planning.rewards import Trajectory
from diffusion_forcing.planning.tokens import FrameWindows, fit_codec, frames_of
from diffusion_forcing.preconditioning import Preconditioning
from diffusion_forcing.sampler import Sampler

UMAZE = MAZES["umaze"]
GOAL = torch.tensor(UMAZE.goal, dtype=torch.float32)[None]
STACK, WIDTH = 10, 24
BACKBONES = {
    "transformer": TransformerConfig(hidden=16, layers=1, heads=2, causal=False),
    "causal": TransformerConfig(hidden=16, layers=1, heads=2),
    "rnn": RNNConfig(hidden=16, blocks=1),
}
QUICK = {"sampler": Sampler(steps=2), "options": PlanOptions(scale=0.02, short_plan_scale=0.02, replan=10)}


@lru_cache
def streams(transitions: int = 20_000, seed: int = 0) -> Transitions:
    """Walks through the U-shaped maze, collected once per process."""
    return collect(UMAZE, transitions, seed)


@lru_cache
def codec() -> Chain:
    return fit_codec(frames_of(streams())[0], STACK)


def model_of(kind: str = "transformer", levels: int = 100) -> DiffusionForcing:
    """An untrained model of tokens of ten frames. Its network outputs 0: plans are then noise of the data's variance."""
    torch.manual_seed(0)
    return ModelConfig(BACKBONES[kind], schedule="linear", levels=levels).build(WIDTH, 0, codec())


@lru_cache
def trained_model(kind: str = "transformer", steps: int = 60) -> DiffusionForcing:
    """A model after a few training steps: it attends to what is known, and its plans stay near the maze."""
    model = model_of(kind)
    frames, before = frames_of(streams())
    windows = FrameWindows(frames, before, 13, STACK, codec(), (WIDTH,))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    generator = seeded(0)
    for _ in range(steps):
        batch = windows.read(windows.draw(16, generator))
        k = independent(batch.mask.shape, model.schedule.levels, generator).k
        k[:, 0] = 0
        loss = model(batch.x, k, noise=torch.randn(batch.x.shape, generator=generator)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


def constrained(kind: str = "transformer") -> DiffusionForcing:
    """The same, whose tokens must follow each other by the law of motion."""
    model, constraint = trained_model(kind), motion_constraint(frames_of(streams())[0], codec())
    return DiffusionForcing(
        model.backbone, model.schedule, codec=model.codec, preconditioning=Preconditioning(model.variance, constraint=constraint)
    )


def quick(**changes) -> dict:
    """QUICK with other fields of the sampler or of PlanOptions."""
    names = {field.name for field in dataclasses.fields(Sampler)}
    sampler, options = ({name: value for name, value in changes.items() if (name in names) == of} for of in (True, False))
    return {"sampler": dataclasses.replace(QUICK["sampler"], **sampler), "options": dataclasses.replace(QUICK["options"], **options)}


def agent_of(kind: str = "transformer", number: int = 3, *, episode: int = 60, seed: int = 0, **options) -> PlanningAgent:
    """An agent of few denoising steps at the start of short episodes. options: fields of its sampler and of PlanOptions."""
    agent = PlanningAgent(trained_model(kind), "umaze", **quick(**options), seed=seed)
    agent.reset(number, steps=episode)
    return agent


def goals(agent: PlanningAgent) -> np.ndarray:
    """The maze's goal for each ball, (n, 2)."""
    return np.tile(UMAZE.goal, (agent.number, 1))


def drive(agent: PlanningAgent, steps: int, **problem) -> np.ndarray:
    """Actions (steps, n, 2) of an agent in closed loop. problem: goal or reward; the maze's goal if neither."""
    balls = Balls("umaze", agent.number, seed=1)
    actions = []
    for _ in range(steps):
        actions.append(agent.act(balls.observation, **(problem or {"goal": balls.goal})))
        balls.step(actions[-1])
    return np.stack(actions)


def record_plans(agent: PlanningAgent) -> list:
    """(step, balls, tokens) of each plan sampled from now on, in a list that fills up."""
    plans, sample = [], agent._sample

    def spy(problem, length, *others):
        plans.append((agent.time, problem.balls.tolist(), length))
        return sample(problem, length, *others)

    agent._sample = spy
    return plans


def at_rest(*positions: tuple[float, float]) -> np.ndarray:
    """Observations (n, 4) of balls that do not move."""
    return np.array([(*position, 0.0, 0.0) for position in positions])


def line(*points: tuple[float, float]) -> Trajectory:
    """One plan through positions, at rest."""
    position = torch.tensor(points, dtype=torch.float32)[None]
    return Trajectory(torch.zeros_like(position), torch.cat([position, torch.zeros_like(position)], dim=-1))


def free_flight(number: int, length: int) -> tuple[Tensor, Tensor]:
    """Frames (n, t, 6) and first observations (n, 4) of balls under random forces where there are no walls."""
    forces = torch.rand(number, length, 2, generator=seeded(0), dtype=torch.float64) * 2 - 1
    states = [torch.randn(number, 4, generator=seeded(1), dtype=torch.float64)]
    for force in forces.unbind(1):
        velocity = states[-1][:, 2:] + DT * (GEAR * force - states[-1][:, 2:]) / (MASS + DT)
        states.append(torch.cat([states[-1][:, :2] + DT * velocity, velocity], dim=1))
    return torch.cat([forces, torch.stack(states[1:], dim=1)], dim=-1).float(), states[0].float()


def executed(actions: Tensor, before: Tensor) -> Tensor:
    """Positions (n, t, 2) after each of the actions (n, t, 2), of any size, where there are no walls. before: observations (n, 4)."""
    position, velocity, path = before[:, :2], before[:, 2:], []
    for force in actions.unbind(1):
        velocity = velocity + DT * (GEAR * force - velocity) / (MASS + DT)
        position = position + DT * velocity
        path.append(position)
    return torch.stack(path, dim=1)


def motion_errors(frames: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """By how much frames (n, t, 6) after observations (n, 4) violate free flight: velocities and positions (n, t, 2)."""
    state = torch.cat([before[:, None], frames[..., 2:]], dim=1)
    velocity = state[:, :-1, 2:] + DT * (GEAR * frames[..., :2] - state[:, :-1, 2:]) / (MASS + DT)
    return velocity - state[:, 1:, 2:], state[:, :-1, :2] + DT * velocity - state[:, 1:, :2]


def write_public_layout(path: Path, timeouts=(), without=(), length: int = 100, **others) -> dict:
    """A file of `length` transitions of one stream as D4RL lays it out; returns its arrays."""
    h5py = pytest.importorskip("h5py")
    data = collect(UMAZE, 64 * length, 0)
    arrays = {
        "observations": data.observations[0], "actions": data.actions[0], "rewards": np.zeros(length),
        "terminals": np.arange(length) % 7 == 3, "timeouts": np.isin(np.arange(length), timeouts),
    }  # fmt: skip
    arrays |= others
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            if name not in without:
                file[name] = array
        file.create_group("metadata")
    return arrays
