"""LPIPS, the learned distance between two frames, and AlexNet's features of frames (Zhang et al., 2018).

Frames are uint8 (n, h, w, 3). The weights, AlexNet's convolutions and the linear layers of LPIPS v0.1 in half precision, come with the
package (`pretrained/lpips`); distances differ by less than 1e-4 from those in single precision.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from einops import rearrange
from numpy.typing import ArrayLike, NDArray
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init

from ..engine.pretrained import PRETRAINED
from ..files import read_tensors

Array = NDArray[np.float32]

WIDTHS = (64, 192, 384, 256, 256)
KERNELS = ((11, 4, 2), (5, 1, 2), (3, 1, 1), (3, 1, 1), (3, 1, 1))  # size, stride, padding
POOLED = (1, 2)  # convolutions that read their input after a max-pool
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # of LPIPS, for pixels in [-1, 1]
EPS = 1e-10
SPREAD = (3.5, 11.0, 24.0, 19.0, 15.0)
"""Standard deviation of each layer's pooled activations in first-person video of 64 px: in these units all layers count alike."""
SMALLEST = 64
"""Shorter sides are enlarged to this: LPIPS was fitted to patches of 64, and of 32 px AlexNet's last layers would see one position."""
CHUNK = 64  # frames that go through the network together
WEIGHTS = PRETRAINED / "lpips" / "lpips_alex.safetensors"


class LPIPS(nn.Module):
    """Five convolutions of AlexNet, each with a linear layer of LPIPS. Weights are random; `LPIPS.pretrained()` has the real ones."""

    def __init__(self, widths: tuple[int, ...] = WIDTHS, generator: Generator | None = None) -> None:
        super().__init__()
        if len(widths) != len(KERNELS):
            raise ValueError(f"AlexNet has {len(KERNELS)} convolutions, each with a width; got {widths}")
        self.widths = tuple(widths)
        self.convolutions = nn.ModuleList()
        for before, width, (size, stride, padding) in zip((3, *widths[:-1]), widths, KERNELS, strict=True):
            layer = skip_init(nn.Conv2d, before, width, size, stride=stride, padding=padding)
            nn.init.normal_(layer.weight, std=(2 / (before * size**2)) ** 0.5, generator=generator)
            nn.init.zeros_(layer.bias)
            self.convolutions.append(layer)
        self.heads = nn.ParameterList([torch.full((width,), 1 / width) for width in widths])
        self.requires_grad_(False).eval()

    @classmethod
    def pretrained(cls) -> LPIPS:
        """With the weights of LPIPS v0.1 (AlexNet)."""
        if not WEIGHTS.is_file():
            raise FileNotFoundError(f"LPIPS needs its weights in {WEIGHTS}, which come with the package; install it again")
        lpips = cls()
        lpips.load_state_dict(read_tensors(WEIGHTS))
        return lpips

    @property
    def width(self) -> int:
        """Length of `features` of a frame: 1152 with AlexNet's own widths."""
        return sum(self.widths)

    def features(self, frames: ArrayLike) -> Array:
        """(n, f): the five layers' activations, averaged over the frame and in units of SPREAD, side by side."""
        pooled = [_pooled(layers) for layers in self._chunks(_checked(frames))]
        return np.concatenate(pooled) if pooled else np.zeros((0, self.width), np.float32)

    def distance(self, a: ArrayLike, b: ArrayLike) -> Array:
        """(n,): LPIPS between frame i of a and frame i of b. 0 for equal frames, about 0.5 for different scenes."""
        first, second = _checked(a), _checked(b)
        if first.shape != second.shape:
            raise ValueError(f"both sets of frames should have one shape; got {first.shape} and {second.shape}")
        pairs = zip(self._chunks(first), self._chunks(second), strict=True)
        return _joined([self._numpy_distance(_unit(x), _unit(y)) for x, y in pairs])

    def along(self, frames: ArrayLike) -> tuple[Array, Array]:
        """Features (t, f) of the frames of one clip, and LPIPS (t-1,) between neighbouring frames, in one pass."""
        pooled, steps = [], []
        last: list[Tensor] = []
        for layers in self._chunks(_checked(frames)):
            pooled.append(_pooled(layers))
            unit = _unit(layers)
            joined = [torch.cat([x, y]) for x, y in zip(last, unit, strict=True)] if last else unit
            steps.append(self._numpy_distance([x[:-1] for x in joined], [x[1:] for x in joined]))
            last = [x[-1:] for x in unit]
        return (np.concatenate(pooled) if pooled else np.zeros((0, self.width), np.float32)), _joined(steps)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """(n,): LPIPS between pixels a and b, (n, 3, h, w) in [-1, 1] each. Differentiable, as a loss."""
        return self._distance(_unit(self._activations(a)), _unit(self._activations(b)))

    @torch.inference_mode()
    def activations(self, pixels: Tensor) -> list[Tensor]:
        """Activations (n, c, h', w') after each convolution's ReLU, of pixels (n, 3, h, w) in [-1, 1]."""
        return self._activations(pixels)

    def _activations(self, pixels: Tensor) -> list[Tensor]:
        short = min(pixels.shape[-2:])
        if short < SMALLEST:
            size = [round(side * SMALLEST / short) for side in pixels.shape[-2:]]
            pixels = F.interpolate(pixels, size=size, mode="bilinear", align_corners=False)
        shift, scale = (pixels.new_tensor(numbers)[:, None, None] for numbers in (SHIFT, SCALE))
        x = (pixels - shift) / scale
        layers = []
        for i, convolution in enumerate(self.convolutions):
            x = F.relu(convolution(F.max_pool2d(x, 3, 2) if i in POOLED else x))
            layers.append(x)
        return layers

    def _chunks(self, frames: NDArray[np.uint8]) -> Iterator[list[Tensor]]:
        where = next(self.parameters())
        for i in range(0, len(frames), CHUNK):
            chunk = torch.tensor(np.ascontiguousarray(frames[i : i + CHUNK]), device=where.device).to(where.dtype)
            yield self.activations(rearrange(chunk, "n h w c -> n c h w") / 127.5 - 1)

    def _distance(self, a: list[Tensor], b: list[Tensor]) -> Tensor:
        layers = zip(a, b, self.heads, strict=True)
        total = sum(torch.einsum("n c h w, c -> n h w", (x - y) ** 2, head).mean((1, 2)) for x, y, head in layers)
        assert isinstance(total, Tensor)
        return total

    def _numpy_distance(self, a: list[Tensor], b: list[Tensor]) -> Array:
        return self._distance(a, b).float().cpu().numpy()


def _checked(frames: ArrayLike) -> NDArray[np.uint8]:
    array = np.asarray(frames)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] != 3:
        raise ValueError(f"frames should be uint8 (n, h, w, 3); got {array.dtype} {array.shape}")
    if min(array.shape[1:3]) < 1:
        raise ValueError(f"frames should have one pixel at least; got {array.shape}")
    return array


def _pooled(layers: list[Tensor]) -> Array:
    return torch.cat([layer.mean((2, 3)) / spread for layer, spread in zip(layers, SPREAD, strict=True)], dim=1).float().cpu().numpy()


def _unit(layers: list[Tensor]) -> list[Tensor]:
    """Each position's channels scaled to length 1."""
    return [x / ((x**2).sum(1, keepdim=True).sqrt() + EPS) for x in layers]


def _joined(parts: list[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)
