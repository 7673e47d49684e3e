"""Streams, tokens and models of a maze, small enough to plan within a test."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from oracles import seeded
from torch import Tensor

from diffusion_forcing import DiffusionForcing
from diffusion_forcing.codecs import Chain
from diffusion_forcing.engine.config import ModelConfig, RNNConfig, TransformerConfig
from diffusion_forcing.levels import independent
from diffusion_forcing.planning.data import FrameWindows, Transitions, collect, frames_of
from diffusion_forcing.planning.envs.maze2d import DT, GEAR, MASS, MAZES
from diffusion_forcing.planning.task import Maze2D

UMAZE = MAZES["umaze"]
STACK, WIDTH = 10, 24
BACKBONES = {
    "transformer": TransformerConfig(hidden=16, layers=1, heads=2, causal=False),
    "causal": TransformerConfig(hidden=16, layers=1, heads=2),
    "rnn": RNNConfig(hidden=16, blocks=1),
}


@lru_cache
def streams(transitions: int = 20_000, seed: int = 0) -> Transitions:
    """Walks through the U-shaped maze, collected once a process."""
    return collect(UMAZE, transitions, seed)


@lru_cache
def codec() -> Chain:
    return Maze2D("umaze").codec(frames_of(streams())[0])


def model_of(kind: str = "transformer", levels: int = 100) -> DiffusionForcing:
    """An untrained model of frames in stacks of ten. Its network says 0: plans are then noise of the data's variance."""
    torch.manual_seed(0)
    return ModelConfig(BACKBONES[kind], schedule="linear", levels=levels).build(WIDTH, 0, codec())


@lru_cache
def learned(kind: str = "transformer", steps: int = 60) -> DiffusionForcing:
    """A model that has seen a little: enough to look at what it is given, and to stay near the maze."""
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


def at_rest(*positions: tuple[float, float]) -> np.ndarray:
    """Observations (n, 4) of balls that do not move."""
    return np.array([(*position, 0.0, 0.0) for position in positions])


def departures(frames: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """How far frames (n, t, 6) after observations (n, 4) depart from free flight: velocities and positions (n, t, 2)."""
    seen = torch.cat([before[:, None], frames[..., 2:]], dim=1)
    velocity = seen[:, :-1, 2:] + DT * (GEAR * frames[..., :2] - seen[:, :-1, 2:]) / (MASS + DT)
    return velocity - seen[:, 1:, 2:], seen[:, :-1, :2] + DT * velocity - seen[:, 1:, :2]
