"""Observations and actions as multi-channel images, the paper's representation: one token per timestep.

Each camera gives three channels and each action of a chunk one, in which the numbers of the action fill horizontal bands. The observation
and the actions that led to it share a token, and therefore a noise level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .keypoints import as_floats
from .tokens import ACTIONS, check_names, spread_of


class ImageTokens(nn.Module):
    """Timesteps, dict of (b, t, *shape), to tokens (b, t, 3 cameras + chunk, px, px) and back: images from -1 to 1, actions normalised.

    shapes: of each modality, `actions` (chunk, a) first, then cameras (px, px, 3) of one size. mean, std: (a,), of actions.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        check_names(list(shapes))
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        sizes = {name: shape for name, shape in self.shapes.items() if name != ACTIONS}
        if any(len(shape) != 3 or shape[2] != 3 or shape != next(iter(sizes.values())) for shape in sizes.values()):
            raise ValueError(f"image tokens hold images of cameras of one size (px, px, 3) and no other observation; got {sizes}")
        self.chunk, width = self.shapes[ACTIONS]
        self.px = next(iter(sizes.values()))[0]
        if width > self.px:
            raise ValueError(f"each number of an action fills a row of {self.px} px at least, so there are {self.px} at most; got {width}")
        self.event = (3 * len(sizes) + self.chunk, self.px, self.px)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.ones(width))

    def description(self) -> dict[str, Any]:
        return {"shapes": {name: list(shape) for name, shape in self.shapes.items()}}

    @classmethod
    def from_description(cls, shapes: dict[str, Any]) -> ImageTokens:
        return cls(shapes)

    @classmethod
    def fit(cls, episodes: Sequence[Mapping[str, Tensor]]) -> ImageTokens:
        """From episodes, dicts of (t, *shape). The first chunk of actions of each is a placeholder and is left out."""
        check_names(list(episodes[0]))
        codec = cls({name: tuple(raw.shape[1:]) for name, raw in episodes[0].items()})
        actions = torch.cat([episode[ACTIONS][1:] for episode in episodes]).float().flatten(0, 1)
        if not torch.isfinite(actions).all():
            raise ValueError("actions hold NaN or infinite values; fill or drop them first")
        codec.mean.copy_(actions.mean(0))
        codec.std.copy_(spread_of(actions))
        return codec

    @property
    def names(self) -> tuple[str, ...]:
        """Of the modalities, actions first."""
        return tuple(self.shapes)

    @property
    def sensors(self) -> tuple[str, ...]:
        """Names of the observed modalities."""
        return self.names[1:]

    def encode(self, timesteps: Mapping[str, Tensor]) -> Tensor:
        for name, shape in self.shapes.items():
            if name not in timesteps or tuple(timesteps[name].shape[2:]) != shape:
                got = "nothing" if name not in timesteps else tuple(timesteps[name].shape[2:])
                raise ValueError(f"{name} of a timestep should have shape {shape}, as the model was trained; got {got}")
        actions = (timesteps[ACTIONS].float() - self.mean) / self.std
        rows = actions.repeat_interleave(self._rows, dim=-1)
        channels = nn.functional.pad(rows, (0, self.px - rows.shape[-1]))[..., None].expand(*rows.shape[:-1], self.px, self.px)
        images = [2 * as_floats(timesteps[name]).movedim(-1, 2) - 1 for name in self.sensors]
        return torch.cat([*images, channels], dim=2)

    def decode(self, tokens: Tensor) -> dict[str, Tensor]:
        """Images from 0 to 1; each number of an action is the mean of its band."""
        width = len(self.mean)
        bands = tokens[:, :, -self.chunk :].mean(-1)[..., : width * self._rows].unflatten(-1, (width, self._rows)).mean(-1)
        images = {name: (tokens[:, :, 3 * i : 3 * i + 3].movedim(2, -1) + 1) / 2 for i, name in enumerate(self.sensors)}
        return {ACTIONS: bands * self.std + self.mean, **images}

    @property
    def _rows(self) -> int:
        """Rows of pixels of a band."""
        return self.px // len(self.mean)
