"""What a robot sees and does as tokens: one token for each part of a moment, so that each part has a noise level of its own.

A moment is [the actions that led to it, each camera's picture, the state]. As a sequence: the first moment has no actions before it, then
moment follows moment. That a camera can be doubted alone, and actions sampled from what was seen, is then nothing but a choice of levels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .eyes import Eye, as_floats

ACTIONS, STATE = "actions", "state"
FITTED = 3000  # moments that directions are fitted to


class Parts(nn.Module):
    """Parts of moments, dict of (b, t, *shape), to tokens (b, t * parts, width) and back. Pictures are bytes, all else floats.

    shapes: of each part, in the order of its tokens, actions first. Each part has a mean and a unit for each of its d numbers, principal
    directions (d, kept) and scales (kept,); a token with fewer numbers than the widest ends with zeros. variance: (width,), of each number
    of a token, as the model wants to know. eyes: of cameras whose pictures are first told by an `Eye`; the rest then speaks of its numbers.
    """

    variance: Tensor

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], kept: Mapping[str, int], eyes: Mapping[str, Eye] | None = None) -> None:
        super().__init__()
        if len(shapes) < 2 or next(iter(shapes)) != ACTIONS:
            raise ValueError(f"the parts of a moment are actions, and then what is seen after them; got {', '.join(shapes) or 'none'}")
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.kept = {name: kept[name] for name in shapes}
        self.width = max(self.kept.values())
        found = eyes or {}
        self.eyes = nn.ModuleDict({f"eye{i}": found[name] for i, name in enumerate(self.shapes) if name in found})
        for i, (name, shape) in enumerate(self.shapes.items()):
            d = found[name].config["latent"] if name in found else math.prod(shape)
            self.register_buffer(f"mean{i}", torch.zeros(d))
            self.register_buffer(f"unit{i}", torch.ones(d))
            self.register_buffer(f"basis{i}", torch.zeros(d, self.kept[name]))
            self.register_buffer(f"scale{i}", torch.ones(self.kept[name]))
        self.register_buffer("variance", torch.ones(self.width))

    @classmethod
    def fit(
        cls, parts: Mapping[str, Tensor], keep: Mapping[str, int], units: Mapping[str, Tensor] | None = None, whiten: float = 0.5,
        cut: float = 1e-3, eyes: Mapping[str, Eye] | None = None,
    ) -> Parts:  # fmt: skip
        """From parts (n, *shape).

        keep: directions of each at most, all if not said. units: (*shape), what counts as one for each number of a part, where they differ
        (metres, radians). whiten: how far directions are made equally large, from 0 (not at all) to 1. Those below `cut` times the largest
        are dropped.
        """
        if not 0 <= whiten <= 1:
            raise ValueError(f"whiten goes from 0 (as they are) to 1 (all alike); got {whiten}")
        found: dict[str, tuple[Tensor, ...]] = {}
        for name, raw in parts.items():
            some = raw[torch.linspace(0, len(raw) - 1, min(FITTED, len(raw))).long()]
            x = eyes[name].encode(some) if eyes and name in eyes else as_floats(some).flatten(1)
            if not torch.isfinite(x).all():
                raise ValueError(f"{name} hold NaN or infinite values; fill or drop them first")
            unit = units[name].flatten().float() if units and name in units else torch.ones(x.shape[1])
            mean = x.mean(0)
            std, basis = _principal((x - mean) / unit, keep.get(name, x.shape[1]))
            if not std[0] > 0:
                raise ValueError(f"{name} never vary: there is nothing to learn from them")
            number = int((std > cut * std[0]).sum())
            std, basis = std[:number], basis[:, :number]
            scale = std**whiten * (std ** (2 - 2 * whiten)).mean().sqrt()  # numbers of a token vary by 1 on average
            found[name] = mean, unit, basis, scale, (std / scale) ** 2
        codec = cls({name: tuple(raw.shape[1:]) for name, raw in parts.items()}, {name: len(one[3]) for name, one in found.items()}, eyes)
        sums = torch.zeros(2, codec.width)
        for name, (mean, unit, basis, scale, spread) in found.items():
            for which, value in (("mean", mean), ("unit", unit), ("basis", basis), ("scale", scale)):
                codec._of(name, which).copy_(value)
            sums[:, : len(spread)] += torch.stack([spread, torch.ones_like(spread)])
        codec.variance.copy_(sums[0] / sums[1])
        return codec

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    def encode(self, moments: Mapping[str, Tensor]) -> Tensor:
        """Moments, dict of (b, t, *shape), to tokens (b, t * parts, width). The first is that of the actions before all of them."""
        missing = [name for name in self.names if name not in moments]
        if missing:
            raise ValueError(f"a moment has {', '.join(self.names)}; {', '.join(missing)} are missing")
        return torch.stack([self.encode_part(name, moments[name]) for name in self.names], dim=2).flatten(1, 2)

    def encode_part(self, name: str, raw: Tensor) -> Tensor:
        """(b, t, *shape) to tokens (b, t, width)."""
        shape = self.shapes[name]
        if tuple(raw.shape[2:]) != shape:
            raise ValueError(f"{name} have shape {shape} a moment; got {tuple(raw.shape[2:])}. The model was trained on others")
        eye = self._eye(name)
        told = as_floats(raw).flatten(2) if eye is None else eye.encode(raw.flatten(0, 1)).unflatten(0, raw.shape[:2])
        x = (told - self._of(name, "mean")) / self._of(name, "unit")
        tokens = x @ self._of(name, "basis") / self._of(name, "scale")
        return F.pad(tokens, (0, self.width - self.kept[name]))

    def decode(self, tokens: Tensor) -> dict[str, Tensor]:
        """Tokens (b, t * parts, width) to moments, dict of (b, t, *shape), pictures from 0 to 1."""
        moments = tokens.unflatten(1, (-1, len(self.shapes)))
        return {name: self.decode_part(name, moments[:, :, i]) for i, name in enumerate(self.names)}

    def decode_part(self, name: str, tokens: Tensor) -> Tensor:
        """Tokens (b, t, width) to (b, t, *shape)."""
        x = (tokens[..., : self.kept[name]] * self._of(name, "scale")) @ self._of(name, "basis").T
        told = x * self._of(name, "unit") + self._of(name, "mean")
        eye = self._eye(name)
        return told.unflatten(-1, self.shapes[name]) if eye is None else eye.decode(told.flatten(0, 1)).unflatten(0, tokens.shape[:2])

    @property
    def told(self) -> int:
        """Numbers of a condition: which part a token is, and the action that was carried out last."""
        return len(self.shapes) + self.shapes[ACTIONS][-1]

    def conditions(self, last: Tensor, tokens: int, first: int = 0) -> Tensor:
        """(b, tokens, told) of tokens that begin with part number `first`, after actions `last` (b, a), in units of `last_of`."""
        kinds = F.one_hot((first + torch.arange(tokens)) % len(self.shapes), len(self.shapes)).float()
        return torch.cat([kinds.expand(len(last), -1, -1), last[:, None].expand(-1, tokens, -1)], dim=-1)

    def last_of(self, actions: Tensor) -> Tensor:
        """(b, a): the last of each chunk (b, chunk, a), of size 1 or so. Before the first chunk it is zeros."""
        x = (actions.float().flatten(1) - self._of(ACTIONS, "mean")) / self._of(ACTIONS, "unit")
        return x.unflatten(1, self.shapes[ACTIONS])[:, -1]

    def _eye(self, name: str) -> Eye | None:
        return dict(self.eyes.named_children()).get(f"eye{self.names.index(name)}")  # type: ignore[return-value]

    def _of(self, name: str, which: str) -> Tensor:
        return self.get_buffer(f"{which}{self.names.index(name)}")


def _principal(x: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Standard deviations (k,) and directions (d, k) of centred rows x (n, d), the largest first."""
    keep = min(keep, *x.shape)
    if x.shape[1] <= 1024:
        values, vectors = torch.linalg.eigh(x.double().T @ x.double() / len(x))
        return values.flip(0)[:keep].clamp(min=0).sqrt().float(), vectors.flip(1)[:, :keep].float()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the directions that are found depend on x alone
        _, singular, vectors = torch.svd_lowrank(x, q=min(keep + 16, *x.shape), niter=4)
    return singular[:keep] / math.sqrt(len(x)), vectors[:, :keep]
