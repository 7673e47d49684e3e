"""What a robot sees and does as tokens: one token for each part of a moment, so that each part has a noise level of its own.

A moment is [the actions that led to it, each camera's picture, the state]. As a sequence: the first moment has no actions before it, then
moment follows moment. That a camera can be doubted alone, and actions sampled from what was seen, is then nothing but a choice of levels.
A chunk of actions is told by how it differs from the last action before it, so that going on as before is what no knowledge comes to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .keypoints import Eye, as_floats

ACTIONS, STATE = "actions", "state"
FITTED = 3000  # moments that directions are fitted to


class Parts(nn.Module):
    """Parts of moments, dict of (b, t, *shape), to tokens (b, t * parts, width) and back. Pictures are bytes, all else floats.

    shapes: of each part, in the order of its tokens, actions first. Each part has a mean and a unit for each of its d numbers, principal
    directions (d, kept) and scales (kept,); a token with fewer numbers than the widest ends with zeros. variance: (width,), of each number
    of a token, as the model wants to know. eyes: of cameras whose pictures are first told by an `Eye`; the rest then speaks of its numbers.
    start: (a,), what counts as the last action before the first chunk.
    """

    variance: Tensor
    start: Tensor
    place: Tensor

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], kept: Mapping[str, int], eyes: Mapping[str, Eye] | None = None) -> None:
        super().__init__()
        check_names(list(shapes))
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.kept = {name: kept[name] for name in shapes}
        self.width = max(self.kept.values())
        found = eyes or {}
        self.eyes = nn.ModuleDict({f"eye{i}": found[name] for i, name in enumerate(self.shapes) if name in found})
        self.eyes.requires_grad_(False)  # trained first, then left as they are, also when built anew to be loaded
        for i, (name, shape) in enumerate(self.shapes.items()):
            d = found[name].config["latent"] if name in found else math.prod(shape)
            self.register_buffer(f"mean{i}", torch.zeros(d))
            self.register_buffer(f"unit{i}", torch.ones(d))
            self.register_buffer(f"basis{i}", torch.zeros(d, self.kept[name]))
            self.register_buffer(f"scale{i}", torch.ones(self.kept[name]))
        self.register_buffer("variance", torch.ones(self.width))
        self.register_buffer("start", torch.zeros(self.shapes[ACTIONS][-1]))
        self.register_buffer("place", torch.stack([torch.zeros_like(self.start), torch.ones_like(self.start)]))  # of actions: mean, unit

    def description(self) -> dict[str, Any]:
        eyes = {name: eye.config for name in self.names if (eye := self._eye(name)) is not None}
        return {"shapes": {name: list(shape) for name, shape in self.shapes.items()}, "kept": self.kept, "eyes": eyes}

    @classmethod
    def from_description(cls, shapes: dict[str, Any], kept: dict[str, int], eyes: dict[str, Any]) -> Parts:
        return cls(shapes, kept, {name: Eye(**options) for name, options in eyes.items()})

    @classmethod
    def fit(
        cls, episodes: Sequence[Mapping[str, Tensor]], keep: Mapping[str, int], whiten: float = 0.5, cut: float = 1e-3,
        eyes: Mapping[str, Eye] | None = None,
    ) -> Parts:  # fmt: skip
        """From the moments of episodes, each a dict of (t, *shape) whose first chunk of actions means nothing.

        keep: directions of each part at most, all if not said. whiten: how far directions are made equally large, from 0 (not at all) to 1.
        Those below `cut` times the largest are dropped. Metres, radians and openings come in units of their own: numbers of vectors count
        by their spread.
        """
        if not 0 <= whiten <= 1:
            raise ValueError(f"whiten goes from 0 (as they are) to 1 (all alike); got {whiten}")
        check_names(list(episodes[0]))
        parts = {name: torch.cat([one[name][1:] for one in episodes]) for name in episodes[0]}
        actions = parts[ACTIONS].float().flatten(0, 1)
        start = torch.stack([one[ACTIONS][1, 0] for one in episodes]).float().mean(0)
        parts[ACTIONS] = torch.cat([one[ACTIONS].float()[1:] - _before(one[ACTIONS].float(), start)[1:, None] for one in episodes])
        found: dict[str, tuple[Tensor, ...]] = {}
        for name, raw in parts.items():
            some = raw[torch.linspace(0, len(raw) - 1, min(FITTED, len(raw))).long()]
            x = eyes[name].encode(some) if eyes and name in eyes else as_floats(some).flatten(1)
            if not torch.isfinite(x).all():
                raise ValueError(f"{name} hold NaN or infinite values; fill or drop them first")
            unit = units(raw).flatten() if name in (ACTIONS, STATE) else torch.ones(x.shape[1])
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
        codec.start.copy_(start)
        codec.place.copy_(torch.stack([actions.mean(0), units(actions)]))
        return codec

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    def encode(self, moments: Mapping[str, Tensor]) -> Tensor:
        """Moments, dict of (b, t, *shape), to tokens (b, t * parts, width). The first is that of the actions before all of them."""
        missing = [name for name in self.names if name not in moments]
        if missing:
            raise ValueError(f"a moment has {', '.join(self.names)}; {', '.join(missing)} are missing")
        tokens = [self.encode_actions(moments[ACTIONS], self.before(moments[ACTIONS]))]
        tokens += [self.encode_part(name, moments[name]) for name in self.names[1:]]
        return torch.stack(tokens, dim=2).flatten(1, 2)

    def before(self, actions: Tensor) -> Tensor:
        """The last action before each chunk, (b, t, a), of actions (b, t, chunk, a) from the beginning on."""
        return torch.stack([_before(one.float(), self.start) for one in actions])

    def encode_actions(self, actions: Tensor, before: Tensor) -> Tensor:
        """Chunks (b, t, chunk, a), each after a last action (b, t, a), to tokens (b, t, width)."""
        return self.encode_part(ACTIONS, actions.float() - before[:, :, None])

    def decode_actions(self, tokens: Tensor, before: Tensor) -> Tensor:
        """Tokens (b, t, width) of chunks, each after a last action (b, t, a), to actions (b, t, chunk, a)."""
        return self.decode_part(ACTIONS, tokens) + before[:, :, None]

    def encode_part(self, name: str, raw: Tensor) -> Tensor:
        """(b, t, *shape) to tokens (b, t, width). Actions: what is added to the last one before them."""
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
        parts = {name: self.decode_part(name, moments[:, :, i]) for i, name in enumerate(self.names)}
        ends = self.start + parts[ACTIONS][:, 1:-1, -1].cumsum(1)
        before = torch.cat([self.start.expand(len(tokens), 2, -1), ends], dim=1)[:, : moments.shape[1]]
        return {**parts, ACTIONS: parts[ACTIONS] + before[:, :, None]}

    def decode_part(self, name: str, tokens: Tensor) -> Tensor:
        """Tokens (b, t, width) to (b, t, *shape). Actions: what is added to the last one before them."""
        x = (tokens[..., : self.kept[name]] * self._of(name, "scale")) @ self._of(name, "basis").T
        told = x * self._of(name, "unit") + self._of(name, "mean")
        eye = self._eye(name)
        return told.unflatten(-1, self.shapes[name]) if eye is None else eye.decode(told.flatten(0, 1)).unflatten(0, tokens.shape[:2])

    @property
    def told(self) -> int:
        """Numbers of a condition: which part a token is, and the action that was carried out last."""
        return len(self.shapes) + self.shapes[ACTIONS][-1]

    def conditions(self, last: Tensor, tokens: int, first: int = 0) -> Tensor:
        """(b, tokens, told) of tokens that begin with part number `first`, after the last action (b, a)."""
        kinds = F.one_hot((first + torch.arange(tokens)) % len(self.shapes), len(self.shapes)).float()
        where = (last - self.place[0]) / self.place[1]
        return torch.cat([kinds.expand(len(last), -1, -1), where[:, None].expand(-1, tokens, -1)], dim=-1)

    def _eye(self, name: str) -> Eye | None:
        return dict(self.eyes.named_children()).get(f"eye{self.names.index(name)}")  # type: ignore[return-value]

    def _of(self, name: str, which: str) -> Tensor:
        return self.get_buffer(f"{which}{self.names.index(name)}")


def check_names(names: Sequence[str]) -> None:
    """Raise unless these are actions and something that is seen."""
    if len(names) < 2 or names[0] != ACTIONS:
        raise ValueError(f"the parts of a moment are actions, and then what is seen after them; got {', '.join(names) or 'none'}")


def _before(actions: Tensor, start: Tensor) -> Tensor:
    """The last action before each chunk, (t, a), of chunks (t, chunk, a); that before the first two is `start`: the first means nothing."""
    return torch.cat([start.expand(2, -1), actions[1:-1, -1]])[: len(actions)]


def units(part: Tensor) -> Tensor:
    """(*shape), the spread of each number of a vector over all moments, and over all steps of a chunk: (n, s), or (n, chunk, a)."""
    spread = part.float().flatten(0, -2).std(0)
    spread = torch.where(spread > 0, spread, torch.ones_like(spread))
    return spread.expand(part.shape[1:])


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
