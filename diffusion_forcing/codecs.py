"""Raw data to tokens and back: normalise, stack frames, whiten. Statistics are buffers, saved with the weights.

A model never sees raw units and a metric never sees tokens: `encode` once on the way in, `decode` once on the way out. `encode_std` is
for errors of measurements: a standard deviation in raw units, one number, one for each number of a frame (*event), or (b, t, *event).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from .registry import load


class Normalize(nn.Module):
    """(x - mean) / std, one mean and std for each number of a frame: (*event). A number that never varies keeps its scale."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean.float().contiguous())
        self.register_buffer("std", std.float().contiguous())

    def description(self) -> dict[str, Any]:
        return {"shape": list(self.mean.shape)}

    @classmethod
    def from_description(cls, shape: list[int]) -> Normalize:
        return cls(torch.zeros(shape), torch.ones(shape))

    @classmethod
    def fit(cls, x: Tensor) -> Normalize:
        """From frames x (..., t, *event): statistics over all but the last axis."""
        flat = _finite(x).reshape(-1, x.shape[-1]).double()
        if len(flat) == 0:
            raise ValueError("cannot normalise by empty data; give it at least one frame")
        std = flat.std(0, unbiased=False)
        return cls(flat.mean(0), torch.where(std > 0, std, torch.ones_like(std)))

    @property
    def log_det(self) -> Tensor:
        """Of one frame."""
        return -self.std.double().log().sum()

    def encode(self, x: Tensor) -> Tensor:
        frame = x.shape[max(0, x.ndim - self.mean.ndim) :]
        if len(frame) < self.mean.ndim or any(own not in (1, given) for own, given in zip(self.mean.shape, frame, strict=True)):
            raise ValueError(f"the data that this codec was fitted to have frames of {tuple(self.mean.shape)}; got {tuple(x.shape)}")
        return (x - self.mean) / self.std

    def decode(self, tokens: Tensor) -> Tensor:
        return tokens * self.std + self.mean

    def encode_std(self, std: Tensor) -> Tensor:
        return std / self.std


class Stack(nn.Module):
    """`frames` frames side by side in one token: (b, t*frames, d) to (b, t, frames*d)."""

    def __init__(self, frames: int) -> None:
        super().__init__()
        self.frames = frames

    def description(self) -> dict[str, Any]:
        return {"frames": self.frames}

    @classmethod
    def from_description(cls, frames: int) -> Stack:
        return cls(frames)

    @property
    def stack(self) -> int:
        """Frames in a token."""
        return self.frames

    @property
    def log_det(self) -> Tensor:
        """Nothing is scaled."""
        return torch.zeros((), dtype=torch.float64)

    def encode(self, x: Tensor) -> Tensor:
        if x.shape[1] % self.frames:
            raise ValueError(f"{x.shape[1]} frames do not fill tokens of {self.frames}; use a multiple of {self.frames}")
        return rearrange(x, "b (t s) d -> b t (s d)", s=self.frames)

    def decode(self, tokens: Tensor) -> Tensor:
        return rearrange(tokens, "b t (s d) -> b (t s) d", s=self.frames)

    def encode_std(self, std: Tensor) -> Tensor:
        if std.ndim < 2:
            return std if std.ndim == 0 else std.repeat(self.frames)
        return self.encode(std.expand(-1, self.frames, -1) if std.shape[1] == 1 else std)


class Split(nn.Module):
    """Each token as `parts` tokens of equal width, one after another: (b, t, parts*d) to (b, t*parts, d). The inverse of stacking.

    Numbers of one moment thus get levels of their own, such as actions and the observations that they lead to. variance: of each number of
    the narrower tokens, for the model's input scaling.
    """

    variance: Tensor

    def __init__(self, parts: int, variance: Tensor) -> None:
        super().__init__()
        self.parts = parts
        self.register_buffer("variance", variance.float())

    def description(self) -> dict[str, Any]:
        return {"parts": self.parts, "width": len(self.variance)}

    @classmethod
    def from_description(cls, parts: int, width: int) -> Split:
        return cls(parts, torch.ones(width))

    @property
    def log_det(self) -> Tensor:
        """Nothing is scaled."""
        return torch.zeros((), dtype=torch.float64)

    def encode(self, x: Tensor) -> Tensor:
        return rearrange(x, "b t (s d) -> b (t s) d", s=self.parts)

    def decode(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] % self.parts:
            raise ValueError(f"{tokens.shape[1]} tokens are no whole number of groups of {self.parts}")
        return rearrange(tokens, "b (t s) d -> b t (s d)", s=self.parts)

    def encode_std(self, std: Tensor) -> Tensor:
        if std.ndim:
            raise ValueError(f"errors of tokens that are split must be alike: give one number; got {tuple(std.shape)}")
        return std


def principal_directions(rows: Tensor, keep: int | None = None) -> tuple[Tensor, Tensor]:
    """Principal directions (d, k), orthonormal, of centred rows (n, d), and the variance (k,) along each, largest first.

    k is d, or `keep`. For few directions of few long rows, keep < n < d, they come from the Gram matrix of the rows, which is smaller than
    their covariance; directions along which rows do not vary are then left out.
    """
    n, d = rows.shape
    if keep is None or not keep < n < d:
        values, vectors = torch.linalg.eigh(rows.T @ rows / n)
        return vectors.flip(1)[:, :keep], values.flip(0)[:keep].clamp(min=0)
    values, vectors = torch.linalg.eigh(rows @ rows.T / n)
    values, vectors = values.flip(0)[:keep], vectors.flip(1)[:, :keep]
    varies = values > 1e-12 * values[0]
    values, vectors = values[varies], vectors[:, varies]
    return torch.linalg.qr(rows.T @ (vectors / (n * values).sqrt()))[0], values


class _Directions(nn.Module):
    """Tokens turned to orthogonal directions: mean (d,), basis (d, kept)."""

    mean: Tensor
    basis: Tensor

    def __init__(self, mean: Tensor, basis: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean.float())
        self.register_buffer("basis", basis.float().contiguous())

    @property
    def log_det(self) -> Tensor | None:
        """0 for a rotation; None where directions are dropped, for then data off the others have no density."""
        return torch.zeros((), dtype=torch.float64) if self.basis.shape[0] == self.basis.shape[1] else None

    def encode(self, tokens: Tensor) -> Tensor:
        return (tokens - self.mean) @ self.basis

    def decode(self, tokens: Tensor) -> Tensor:
        return tokens @ self.basis.T + self.mean

    def encode_std(self, std: Tensor) -> Tensor:
        if std.ndim:
            raise ValueError(f"{type(self).__name__} mixes the numbers of a token, and so their errors, which must be alike: give "
                             f"one number; got {tuple(std.shape)}")  # fmt: skip
        return std


class Whiten(_Directions):
    """Rotate tokens to their principal directions and scale each to variance 1, dropping directions that do not vary.

    Directions below `cut` times the largest standard deviation are null: what is dropped there is put back as the mean.
    """

    scale: Tensor

    def __init__(self, mean: Tensor, basis: Tensor, scale: Tensor) -> None:
        super().__init__(mean, basis)
        self.register_buffer("scale", scale.float())

    def description(self) -> dict[str, Any]:
        return {"shape": list(self.basis.shape)}

    @classmethod
    def from_description(cls, shape: tuple[int, int]) -> Whiten:
        width, kept = shape
        return cls(torch.zeros(width), torch.zeros(width, kept), torch.ones(kept))

    @classmethod
    def fit(cls, tokens: Tensor, cut: float = 1e-3, keep: int | None = None) -> Whiten:
        """From tokens (..., d). keep: at most that many directions."""
        flat = _finite(tokens).reshape(-1, tokens.shape[-1]).double()
        if len(flat) < 2:
            raise ValueError(f"cannot whiten by {len(flat)} token(s); give it at least two")
        mean = flat.mean(0)
        basis, variance = principal_directions(flat - mean)
        std = variance.sqrt()
        varies = int((std > cut * std[:1]).sum())
        if varies == 0:
            raise ValueError("cannot whiten data that never vary")
        number = varies if keep is None else min(keep, varies)
        return cls(mean, basis[:, :number], std[:number])

    @property
    def log_det(self) -> Tensor | None:
        rotation = super().log_det
        return None if rotation is None else rotation - self.scale.double().log().sum()

    def encode(self, tokens: Tensor) -> Tensor:
        return super().encode(tokens) / self.scale

    def decode(self, tokens: Tensor) -> Tensor:
        return super().decode(tokens * self.scale)

    def encode_std(self, std: Tensor) -> Tensor:
        return super().encode_std(std) / self.scale


class Rotate(_Directions):
    """Rotate tokens to their `keep` principal directions. Units stay, so noise that is white before is white after.

    What a token of several frames leaves out is what its other numbers say already: the dynamics that tie actions to states hold in
    every token that is decoded. `variance` is that of each direction, for the model's input scaling.
    """

    variance: Tensor

    def __init__(self, mean: Tensor, basis: Tensor, variance: Tensor) -> None:
        super().__init__(mean, basis)
        self.register_buffer("variance", variance.float())

    def description(self) -> dict[str, Any]:
        return {"shape": list(self.basis.shape)}

    @classmethod
    def from_description(cls, shape: tuple[int, int]) -> Rotate:
        width, kept = shape
        return cls(torch.zeros(width), torch.zeros(width, kept), torch.ones(kept))

    @classmethod
    def fit(
        cls, tokens: Tensor, keep: int | None = None, cut: float = 1e-3, groups: Sequence[Sequence[int]] | None = None,
        first: Tensor | None = None,
    ) -> Rotate:  # fmt: skip
        """From tokens (..., d). keep: at most that many directions, of those that vary (see Whiten).

        groups: numbers of a token that are rotated among themselves only, so that a direction does not mix, say, rows and columns;
        `keep` is then of each group. first: a direction (d,) that each group begins with, as far as it lies in what is kept; principal
        directions would mix it with others that vary as much.
        """
        groups = [range(tokens.shape[-1])] if groups is None else groups
        flat = tokens.reshape(-1, tokens.shape[-1]).double()
        mean = flat.mean(0)
        columns = []
        for group in groups:
            part = list(group)
            kept = Whiten.fit(tokens[..., part], cut, keep).basis.double()
            if first is not None:
                head = kept @ (kept.T @ first[part].double())
                head = head / head.norm()
                rest = kept - head[:, None] * (head @ kept)  # what is kept, without the first direction
                inside = torch.linalg.svd(rest, full_matrices=False).U[:, : kept.shape[1] - 1]
                turn, _ = principal_directions((flat[:, part] - mean[part]) @ inside)
                kept = torch.cat([head[:, None], inside @ turn], dim=1)
            whole = torch.zeros(tokens.shape[-1], kept.shape[1], dtype=torch.float64)
            whole[part] = kept
            columns.append(whole)
        basis = torch.cat(columns, dim=1)
        return cls(mean, basis, ((flat - mean) @ basis).var(0, unbiased=False))


class Chain(nn.Module):
    """Codecs one after another."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def description(self) -> dict[str, Any]:
        return {"parts": [describe_codec(part) for part in self.parts]}

    @classmethod
    def from_description(cls, parts: list[Any]) -> Chain:
        return cls(*(build_codec(part) for part in parts if part is not None))

    @property
    def variance(self) -> Tensor | None:
        """Of each number of a token, where the last part knows it."""
        return codec_traits(self.parts[-1]).variance

    @property
    def stack(self) -> int:
        """Frames in a token."""
        return math.prod(codec_traits(part).stack for part in self.parts)

    @property
    def log_det(self) -> Tensor | None:
        """The sum over the parts, each as often as a token holds what it encodes; None where a part does not know its own."""
        total = torch.zeros((), dtype=torch.float64)
        for part in self.parts:
            traits = codec_traits(part)
            if traits.log_det is None:
                return None
            total = total * traits.stack + traits.log_det
        return total

    def encode(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part.encode(x)  # type: ignore[operator]
        return x

    def decode(self, tokens: Tensor) -> Tensor:
        for part in reversed(self.parts):
            tokens = part.decode(tokens)  # type: ignore[operator]
        return tokens

    def encode_std(self, std: Tensor) -> Tensor:
        for part in self.parts:
            std = part.encode_std(std)  # type: ignore[operator]
        return std


CODECS: dict[str, str] = {
    "chain": "diffusion_forcing.codecs:Chain",
    "stack": "diffusion_forcing.codecs:Stack",
    "normalize": "diffusion_forcing.codecs:Normalize",
    "split": "diffusion_forcing.codecs:Split",
    "whiten": "diffusion_forcing.codecs:Whiten",
    "rotate": "diffusion_forcing.codecs:Rotate",
    "pixels": "diffusion_forcing.video.codec:Pixels",
    "patches": "diffusion_forcing.video.codec:Patches",
    "patches_with_decoder": "diffusion_forcing.video.codec:PatchesWithDecoder",
    "modalities": "diffusion_forcing.imitation.tokens:ModalityTokens",
    "image": "diffusion_forcing.imitation.image_tokens:ImageTokens",
}
"""Codecs that can be saved with a model. Each has `description()`, plain JSON, and `from_description`, which makes an empty one from it."""


@dataclass(frozen=True)
class CodecTraits:
    """What a codec declares of its tokens, each with a default. `codec_traits` is the one place where a codec is asked."""

    variance: Tensor | None = None
    """Of each number of a token, (*event)."""
    stack: int = 1
    """Frames of a token."""
    patches: Any = None
    """The codec of patches that its tokens come from (`video.codec.Patches`), for networks that warp pixels."""
    log_det: Tensor | None = None
    """ln |d token / d raw data| of one token: its log-likelihood plus this is that of its raw data. None: unknown, or no such number."""


def codec_traits(codec: Any) -> CodecTraits:
    """What a codec declares of its tokens; what it does not declare has its default."""
    return CodecTraits(getattr(codec, "variance", None), int(getattr(codec, "stack", 1)), getattr(codec, "patches", None),
                       getattr(codec, "log_det", None))  # fmt: skip


def describe_codec(codec: Any) -> Any:
    """Plain JSON from which `build_codec` makes an empty codec of the same shapes."""
    if codec is None:
        return None
    kind = next((kind for kind, reference in CODECS.items() if reference == f"{type(codec).__module__}:{type(codec).__name__}"), None)
    if kind is None:
        known = ", ".join(reference.partition(":")[2] for reference in CODECS.values())
        raise ValueError(f"a {type(codec).__name__} cannot be saved with a model; use one of {known}")
    return {"kind": kind, **codec.description()}


def build_codec(config: Any) -> Any:
    """The codec that `describe_codec` described, its statistics still to be filled in."""
    if config is None:
        return None
    kind = config.get("kind") if isinstance(config, dict) else None
    if kind not in CODECS:
        raise ValueError(f"the model's codec is {kind or config!r}, which this package does not have ({', '.join(CODECS)})")
    try:
        return load(CODECS[kind]).from_description(**{name: value for name, value in config.items() if name != "kind"})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the model's codec {kind!r} is not described properly: {error}") from error


def _finite(x: Tensor) -> Tensor:
    bad = ~torch.isfinite(x)
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"data hold {int(bad.sum())} NaN or infinite values, the first at index {where}; fill or drop them first")
    return x
