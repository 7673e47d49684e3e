"""Demonstrations cut into timesteps, and windows of tokens that begin with an observation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from ..windows import Windows
from .demonstrations import Demonstrations
from .tokens import ACTIONS, STATE

Timesteps = dict[str, NDArray]
"""An episode: each modality (t, *shape) by name, actions (t, chunk, a) first."""


def timesteps_of(demonstrations: Demonstrations, episode: int, chunk: int, offset: int = 0, state: bool = True) -> Timesteps:
    """An episode as timesteps: each chunk of actions and what was observed after it, from frame number `offset` on.

    No actions led to the first timestep: its chunk is zeros, a placeholder. Where an episode ends within a chunk, its last action is
    repeated and its last frame observed. state: include the state, which is also there if there are no cameras.
    """
    every = demonstrations.every
    if chunk % every:
        raise ValueError(f"demonstrations have a frame every {every} actions, so a chunk must be a multiple of that; got {chunk}")
    actions = demonstrations.actions[episode][offset * every :]
    frames = len(demonstrations.states[episode]) - offset
    if frames < 1 or len(actions) < 1:
        raise ValueError(f"episode {episode} has {len(demonstrations.states[episode])} frames; none is left from number {offset} on")
    chunks = -(-len(actions) // chunk)
    padded = np.concatenate([actions, np.repeat(actions[-1:], chunks * chunk - len(actions), axis=0)])
    led_to = np.concatenate([np.zeros_like(padded[:chunk])[None], padded.reshape(chunks, chunk, -1)])
    observed = offset + np.minimum(np.arange(chunks + 1) * (chunk // every), frames - 1)
    timesteps: Timesteps = {ACTIONS: led_to}
    timesteps.update({name: episodes[episode][observed] for name, episodes in demonstrations.images.items()})
    if (state and demonstrations.state_width) or not demonstrations.images:
        timesteps[STATE] = demonstrations.states[episode][observed]
    return timesteps


class TimestepWindows(Windows):
    """Windows that begin with an observation, in sequences of `modalities` tokens per timestep: the observation, then the actions after it.

    A sequence ends with an observation that no actions follow. Windows are no longer than the longest sequence.
    """

    def __init__(
        self, sequences: Sequence[Tensor], length: int, *, modalities: int = 1, conditions: Sequence[Tensor] | None = None
    ) -> None:  # fmt: skip
        super().__init__(sequences, min(length, max(map(len, sequences))), conditions=conditions)
        self.modalities = modalities

    def draw(self, size: int, generator: Generator | None = None) -> Tensor:
        which, first = super().draw(size, generator).unbind(1)
        # Rounded down to a whole timestep. The room is a multiple of them, so that each is drawn equally often.
        return torch.stack([which, first - first % self.modalities], dim=1)


def as_tensors(timesteps: Timesteps) -> dict[str, Tensor]:
    return {name: torch.as_tensor(values) for name, values in timesteps.items()}


def as_batch(timesteps: Timesteps) -> dict[str, Tensor]:
    """An episode (t, *shape) as a batch of one, (1, t, *shape)."""
    return {name: values[None] for name, values in as_tensors(timesteps).items()}
