"""Observations and actions as tokens: one token per modality and timestep, so that each modality has its own noise level.

A timestep is [the chunk of actions that led to it, an image of each camera, the state]. In a sequence of tokens the first timestep has no
actions. Ignoring one camera, or sampling actions given an observation, is then a choice of noise levels only. A chunk of actions is
encoded as its difference to the last action before it, so that the mean token continues with what was done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..codecs import principal_directions
from .keypoints import KeypointAutoencoder, as_floats

ACTIONS, STATE = "actions", "state"
FITTED = 3000
"""Timesteps that principal directions are fitted to, at most."""


class ModalityTokens(nn.Module):
    """Timesteps, dict of (b, t, *shape), to tokens (b, t * modalities, width) and back. Images are uint8, everything else floats.

    shapes: of each modality in the order of its tokens, `actions` (chunk, a) first. components: principal directions kept of each; shorter
    tokens are padded with zeros to the widest. autoencoders: of cameras whose images are first encoded by one.

    Buffers of modality i with d numbers: mean{i}, std{i} (d,), basis{i} (d, components), scale{i} (components,). variance (width,): of each
    number of a token, for the model's input and output scaling. initial_action (a,): stands for the last action before the first chunk.
    action_stats (2, a): mean and standard deviation of actions, which normalise the condition.
    """

    variance: Tensor
    initial_action: Tensor
    action_stats: Tensor

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], components: Mapping[str, int],
        autoencoders: Mapping[str, KeypointAutoencoder] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_names(list(shapes))
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.components = {name: components[name] for name in shapes}
        self.width = max(self.components.values())
        given = autoencoders or {}
        self.autoencoders = nn.ModuleDict({str(i): given[name] for i, name in enumerate(self.shapes) if name in given})
        self.autoencoders.requires_grad_(False)  # frozen, also in a codec that is built to be loaded
        for i, (name, shape) in enumerate(self.shapes.items()):
            d = given[name].config["latent"] if name in given else math.prod(shape)
            self.register_buffer(f"mean{i}", torch.zeros(d))
            self.register_buffer(f"std{i}", torch.ones(d))
            self.register_buffer(f"basis{i}", torch.zeros(d, self.components[name]))
            self.register_buffer(f"scale{i}", torch.ones(self.components[name]))
        self.register_buffer("variance", torch.ones(self.width))
        self.register_buffer("initial_action", torch.zeros(self.shapes[ACTIONS][-1]))
        self.register_buffer("action_stats", torch.stack([torch.zeros_like(self.initial_action), torch.ones_like(self.initial_action)]))

    def description(self) -> dict[str, Any]:
        configs = {name: autoencoder.config for name in self.names if (autoencoder := self._autoencoder(name)) is not None}
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        return {"shapes": shapes, "components": self.components, "autoencoders": configs}

    @classmethod
    def from_description(cls, shapes: dict[str, Any], components: dict[str, int], autoencoders: dict[str, Any]) -> ModalityTokens:
        return cls(shapes, components, {name: KeypointAutoencoder(**config) for name, config in autoencoders.items()})

    @classmethod
    def fit(
        cls, episodes: Sequence[Mapping[str, Tensor]], components: Mapping[str, int], whiten: float = 0.5, cut: float = 1e-3,
        autoencoders: Mapping[str, KeypointAutoencoder] | None = None,
    ) -> ModalityTokens:  # fmt: skip
        """From episodes, dicts of (t, *shape). The first chunk of actions of each is a placeholder and is left out.

        components: principal directions of each modality at most; all of one that is not named. whiten: from 0, directions keep their
        variance, to 1, all have the same. Directions with less than `cut` times the largest standard deviation are dropped. Actions and
        states are divided by their standard deviation first, since metres, radians and openings have units of their own.
        """
        if not 0 <= whiten <= 1:
            raise ValueError(f"whiten is from 0 (directions keep their variance) to 1 (all have the same); got {whiten}")
        check_names(list(episodes[0]))
        initial_action = torch.stack([episode[ACTIONS][1, 0] for episode in episodes]).float().mean(0)
        raw = {name: torch.cat([episode[name][1:] for episode in episodes]) for name in episodes[0]}
        actions = raw[ACTIONS].float().flatten(0, 1)
        chunks = [episode[ACTIONS].float() for episode in episodes]
        raw[ACTIONS] = torch.cat([one[1:] - _last_actions(one, initial_action)[1:, None] for one in chunks])
        buffers: dict[str, dict[str, Tensor]] = {}
        variances: list[Tensor] = []
        for name, values in raw.items():
            some = values[torch.linspace(0, len(values) - 1, min(FITTED, len(values))).long()]
            x = autoencoders[name].encode(some) if autoencoders and name in autoencoders else as_floats(some).flatten(1)
            if not torch.isfinite(x).all():
                raise ValueError(f"{name} hold NaN or infinite values; fill or drop them first")
            unit = spread_of(values).flatten() if name in (ACTIONS, STATE) else torch.ones(x.shape[1])
            mean = x.mean(0)
            rows = ((x - mean) / unit).double()
            if not rows.any():
                raise ValueError(f"{name} never vary: there is nothing to learn from them")
            directions, variance = principal_directions(rows, min(components.get(name, x.shape[1]), len(x) - 1, x.shape[1]))
            std, basis = variance.sqrt().float(), directions.float()
            number = int((std > cut * std[0]).sum())
            std, basis = std[:number], basis[:, :number]
            scale = std**whiten * (std ** (2 - 2 * whiten)).mean().sqrt()  # the numbers of a token have variance 1 on average
            buffers[name] = {"mean": mean, "std": unit, "basis": basis, "scale": scale}
            variances.append((std / scale) ** 2)
        codec = cls(
            {name: tuple(values.shape[1:]) for name, values in raw.items()},
            {name: len(one["scale"]) for name, one in buffers.items()}, autoencoders,
        )  # fmt: skip
        for name, one in buffers.items():
            for which, value in one.items():
                codec._buffer(name, which).copy_(value)
        sums = torch.zeros(2, codec.width)
        for variance in variances:
            sums[:, : len(variance)] += torch.stack([variance, torch.ones_like(variance)])
        codec.variance.copy_(sums[0] / sums[1])
        codec.initial_action.copy_(initial_action)
        codec.action_stats.copy_(torch.stack([actions.mean(0), spread_of(actions)]))
        return codec

    @property
    def names(self) -> tuple[str, ...]:
        """Of the modalities, in the order of their tokens: actions first."""
        return tuple(self.shapes)

    @property
    def sensors(self) -> tuple[str, ...]:
        """Names of the observed modalities."""
        return self.names[1:]

    def encode(self, timesteps: Mapping[str, Tensor]) -> Tensor:
        """Timesteps of whole episodes to tokens. The first token is that of the placeholder actions."""
        missing = [name for name in self.names if name not in timesteps]
        if missing:
            raise ValueError(f"a timestep has {', '.join(self.names)}; {', '.join(missing)} are missing")
        tokens = [self.encode_actions(timesteps[ACTIONS], self.last_actions(timesteps[ACTIONS]))]
        tokens += [self.encode_modality(name, timesteps[name]) for name in self.sensors]
        return torch.stack(tokens, dim=2).flatten(1, 2)

    def decode(self, tokens: Tensor) -> dict[str, Tensor]:
        """Tokens (b, t * modalities, width) of whole episodes to timesteps, dict of (b, t, *shape), images from 0 to 1."""
        by_time = tokens.unflatten(1, (-1, len(self.shapes)))
        decoded = {name: self.decode_modality(name, by_time[:, :, i]) for i, name in enumerate(self.names)}
        ends = self.initial_action + decoded[ACTIONS][:, 1:-1, -1].cumsum(1)
        last = torch.cat([self.initial_action.expand(len(tokens), 2, -1), ends], dim=1)[:, : by_time.shape[1]]
        return {**decoded, ACTIONS: decoded[ACTIONS] + last[:, :, None]}

    def last_actions(self, actions: Tensor) -> Tensor:
        """The last action before each chunk, (b, t, a), of actions (b, t, chunk, a) of whole episodes."""
        return torch.stack([_last_actions(one.float(), self.initial_action) for one in actions])

    def encode_actions(self, actions: Tensor, last: Tensor) -> Tensor:
        """Chunks (b, t, chunk, a), each after a last action (b, t, a), to tokens (b, t, width)."""
        return self.encode_modality(ACTIONS, actions.float() - last[:, :, None])

    def decode_actions(self, tokens: Tensor, last: Tensor) -> Tensor:
        """Tokens (b, t, width) of chunks, each after a last action (b, t, a), to actions (b, t, chunk, a)."""
        return self.decode_modality(ACTIONS, tokens) + last[:, :, None]

    def encode_modality(self, name: str, raw: Tensor) -> Tensor:
        """(b, t, *shape) to tokens (b, t, width). Of actions: differences to the last action before the chunk."""
        shape = self.shapes[name]
        if tuple(raw.shape[2:]) != shape:
            raise ValueError(f"{name} of a timestep should have shape {shape}, as the model was trained; got {tuple(raw.shape[2:])}")
        autoencoder = self._autoencoder(name)
        x = as_floats(raw).flatten(2) if autoencoder is None else autoencoder.encode(raw.flatten(0, 1)).unflatten(0, raw.shape[:2])
        x = (x - self._buffer(name, "mean")) / self._buffer(name, "std")
        tokens = x @ self._buffer(name, "basis") / self._buffer(name, "scale")
        return F.pad(tokens, (0, self.width - self.components[name]))

    def decode_modality(self, name: str, tokens: Tensor) -> Tensor:
        """Tokens (b, t, width) to (b, t, *shape). Of actions: differences to the last action before the chunk."""
        x = (tokens[..., : self.components[name]] * self._buffer(name, "scale")) @ self._buffer(name, "basis").T
        x = x * self._buffer(name, "std") + self._buffer(name, "mean")
        autoencoder = self._autoencoder(name)
        if autoencoder is None:
            return x.unflatten(-1, self.shapes[name])
        return autoencoder.decode(x.flatten(0, 1)).unflatten(0, tokens.shape[:2])

    @property
    def cond_width(self) -> int:
        """Numbers of a condition: the token's modality, one-hot, and the last action."""
        return len(self.shapes) + self.shapes[ACTIONS][-1]

    def build_cond(self, last: Tensor, tokens: int, first: int = 0) -> Tensor:
        """(b, tokens, cond_width) of tokens of modalities first, first + 1, .. in turn, after a last action (b, a)."""
        modality = F.one_hot((first + torch.arange(tokens)) % len(self.shapes), len(self.shapes)).float()
        action = (last - self.action_stats[0]) / self.action_stats[1]
        return torch.cat([modality.expand(len(last), -1, -1), action[:, None].expand(-1, tokens, -1)], dim=-1)

    def _autoencoder(self, name: str) -> KeypointAutoencoder | None:
        return cast("KeypointAutoencoder | None", dict(self.autoencoders.named_children()).get(str(self.names.index(name))))

    def _buffer(self, name: str, which: str) -> Tensor:
        return self.get_buffer(f"{which}{self.names.index(name)}")


def check_names(names: Sequence[str]) -> None:
    """Raise unless these are actions and at least one observation."""
    if len(names) < 2 or names[0] != ACTIONS:
        raise ValueError(f"a timestep has actions first, then at least one observation; got {', '.join(names) or 'none'}")


def spread_of(values: Tensor) -> Tensor:
    """Standard deviation of each number over all leading axes, of (n, s) or (n, chunk, a); as (s,) or (chunk, a). 1 where constant."""
    std = values.float().flatten(0, -2).std(0)
    std = torch.where(std > 0, std, torch.ones_like(std))
    return std.expand(values.shape[1:])


def _last_actions(chunks: Tensor, initial: Tensor) -> Tensor:
    """The last action before each chunk, (t, a), of chunks (t, chunk, a). The first is a placeholder: `initial` is before the first two."""
    return torch.cat([initial.expand(2, -1), chunks[1:-1, -1]])[: len(chunks)]
