"""What a robot sees and does as pictures of many channels, the paper's way: one token a moment.

Each camera gives three channels and each action of a chunk one: its numbers fill bands of the plane, from top to bottom. What is seen and
the actions that led to it then share a token, and so a noise level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .keypoints import as_floats
from .tokens import ACTIONS, check_names, units


class Planes(nn.Module):
    """Moments, dict of (b, t, *shape), to tokens (b, t, 3 cameras + chunk, px, px) and back, all between -1 and 1 or about 1 in size.

    shapes: of each part, actions first, then cameras (px, px, 3), all of one size. mean, unit: (a,), of actions.
    """

    mean: Tensor
    unit: Tensor

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        check_names(list(shapes))
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        sizes = {name: shape for name, shape in self.shapes.items() if name != ACTIONS}
        if any(len(shape) != 3 or shape[2] != 3 or shape != next(iter(sizes.values())) for shape in sizes.values()):
            raise ValueError(f"planes hold cameras' pictures of one size (px, px, 3), and nothing else that is seen; got {sizes}")
        self.chunk, width = self.shapes[ACTIONS]
        self.px = next(iter(sizes.values()))[0]
        if width > self.px:
            raise ValueError(f"an action's numbers are bands of a plane, so there are {self.px} at most; got {width}")
        self.event = (3 * len(sizes) + self.chunk, self.px, self.px)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("unit", torch.ones(width))

    def description(self) -> dict[str, Any]:
        return {"shapes": {name: list(shape) for name, shape in self.shapes.items()}}

    @classmethod
    def from_description(cls, shapes: dict[str, Any]) -> Planes:
        return cls(shapes)

    @classmethod
    def fit(cls, episodes: Sequence[Mapping[str, Tensor]]) -> Planes:
        """From the moments of episodes, each a dict of (t, *shape) whose first chunk of actions means nothing."""
        check_names(list(episodes[0]))
        codec = cls({name: tuple(part.shape[1:]) for name, part in episodes[0].items()})
        actions = torch.cat([one[ACTIONS][1:] for one in episodes]).float().flatten(0, 1)
        if not torch.isfinite(actions).all():
            raise ValueError("actions hold NaN or infinite values; fill or drop them first")
        codec.mean.copy_(actions.mean(0))
        codec.unit.copy_(units(actions))
        return codec

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    def encode(self, moments: Mapping[str, Tensor]) -> Tensor:
        for name, shape in self.shapes.items():
            if name not in moments or tuple(moments[name].shape[2:]) != shape:
                got = "nothing" if name not in moments else tuple(moments[name].shape[2:])
                raise ValueError(f"{name} have shape {shape} a moment; got {got}. The model was trained on others")
        actions = (moments[ACTIONS].float() - self.mean) / self.unit
        rows = actions.repeat_interleave(self._band, dim=-1)
        planes = nn.functional.pad(rows, (0, self.px - rows.shape[-1]))[..., None].expand(*rows.shape[:-1], self.px, self.px)
        seen = [2 * as_floats(moments[name]).movedim(-1, 2) - 1 for name in self.names[1:]]
        return torch.cat([*seen, planes], dim=2)

    def decode(self, tokens: Tensor) -> dict[str, Tensor]:
        """Pictures from 0 to 1; of each number of an action the mean over its band."""
        width = len(self.mean)
        bands = tokens[:, :, -self.chunk :].mean(-1)[..., : width * self._band].unflatten(-1, (width, self._band)).mean(-1)
        seen = {name: (tokens[:, :, 3 * i : 3 * i + 3].movedim(2, -1) + 1) / 2 for i, name in enumerate(self.names[1:])}
        return {ACTIONS: bands * self.unit + self.mean, **seen}

    @property
    def _band(self) -> int:
        return self.px // len(self.mean)
