"""Keypoint autoencoder of one camera: images to a few numbers and back, trained first and then frozen.

Manipulation is about where small objects are, which principal components represent badly. Three quarters of the latent are therefore
keypoints: the soft-argmax of a heat map and how strongly it responds; the decoder renders a Gaussian blob at each. Errors of colour weigh
more than errors of brightness, since objects are small and coloured, walls large and grey.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import reduce
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Generator, Tensor, nn

from ..checks import check_counts, check_divides
from ..engine.config import TrainConfig
from ..engine.objective import Objective
from ..engine.task import Progress
from ..engine.train import run_objective
from ..files import cached, read_tensors
from ..windows import Batch, Source

COLOUR_WEIGHT = 4.0
"""Weight of the colour error, relative to the squared error."""
PRESENCE_BIAS = 6.0
"""Log-sum-exp of a heat map at which its keypoint is half present."""
VERSION = 4
"""Of what is trained and how; part of the cache file's name."""


def as_floats(raw: Tensor) -> Tensor:
    """uint8 to floats from 0 to 1; floats stay as they are."""
    return raw.float() / 255 if raw.dtype == torch.uint8 else raw.float()


class KeypointAutoencoder(nn.Module):
    """Images (n, px, px, 3), uint8 or floats from 0 to 1, to latents (n, latent) and back to floats. px is a multiple of 8.

    latent // 4 keypoints: the latent is their x from -1 to 1, their y, their presence from 0 to 1, and an unstructured rest (appearance).
    """

    grid: Tensor

    def __init__(self, px: int, latent: int = 64, channels: int = 16) -> None:
        super().__init__()
        check_counts(px=px, channels=channels)
        if latent < 4:
            raise ValueError(f"latent is at least 4, a keypoint's x, y and presence and one free number; got {latent}")
        check_divides(8, px, "a keypoint autoencoder halves images three times, so their side must be a multiple of 8")
        self.config = {"px": px, "latent": latent, "channels": channels}
        self.keypoints = latent // 4
        free, c, side = latent - 3 * self.keypoints, channels, px // 4
        self.features = nn.Sequential(
            nn.Conv2d(3, c, 4, 2, 1), nn.GELU(), nn.Conv2d(c, 2 * c, 4, 2, 1), nn.GELU(), nn.Conv2d(2 * c, 2 * c, 3, 1, 1), nn.GELU(),
        )  # fmt: skip
        self.heatmaps = nn.Conv2d(2 * c, self.keypoints, 1)
        self.appearance = nn.Sequential(nn.Conv2d(2 * c, c, 4, 2, 1), nn.GELU(), nn.Flatten(), nn.Linear(c * (side // 2) ** 2, free))
        self.blob_size = nn.Parameter(torch.full((self.keypoints,), -2.0))  # before softplus
        self.background = nn.Sequential(
            nn.Linear(free, c * (side // 2) ** 2), nn.Unflatten(1, (c, side // 2, side // 2)), nn.Conv2d(c, 4 * c, 3, 1, 1),
            nn.PixelShuffle(2), nn.GELU(),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Conv2d(self.keypoints + c, 4 * c, 3, 1, 1), nn.PixelShuffle(2), nn.GELU(), nn.Conv2d(c, 12, 3, 1, 1), nn.PixelShuffle(2)
        )
        self.register_buffer("grid", torch.linspace(-1, 1, side), persistent=False)

    def encode(self, images: Tensor) -> Tensor:
        features = self.features(4 * (as_floats(images).movedim(-1, 1) - 0.5))
        maps = self.heatmaps(features)
        attention = maps.flatten(2).softmax(-1).view_as(maps)
        x, y = attention.sum(2) @ self.grid, attention.sum(3) @ self.grid
        presence = torch.sigmoid(maps.flatten(2).logsumexp(-1) - PRESENCE_BIAS)
        return torch.cat([x, y, presence, self.appearance(features)], dim=1)

    def decode(self, latent: Tensor) -> Tensor:
        x, y, presence, appearance = latent.split([self.keypoints] * 3 + [latent.shape[1] - 3 * self.keypoints], dim=1)
        size = F.softplus(self.blob_size)[:, None] + 0.03
        columns, rows = (torch.exp(-(((self.grid - at[..., None]) / size) ** 2) / 2) for at in (x, y))
        blobs = presence[..., None, None] * rows[..., :, None] * columns[..., None, :]
        return self.decoder(torch.cat([blobs, self.background(appearance)], dim=1)).movedim(1, -1) / 4 + 0.5


class Images(Source):
    """Images (n, px, px, 3) to draw batches from: windows of one token, an image."""

    length, cond_width = 1, 0

    def __init__(self, images: NDArray[np.uint8]) -> None:
        self._images = torch.from_numpy(images)
        self.event = tuple(images.shape[1:])

    def draw(self, size: int, generator: Generator | None = None) -> Tensor:
        return torch.randint(0, len(self._images), (size,), generator=generator)

    def read(self, windows: Tensor) -> Batch:
        n = len(windows)
        return Batch(self._images[windows][:, None], torch.zeros(n, 1, 0), torch.ones(n, 1, dtype=torch.bool))

    def all(self) -> Tensor:
        return torch.arange(len(self._images))


@dataclass(frozen=True)
class Reconstruction(Objective):
    """Squared error of an image, plus COLOUR_WEIGHT times that of its colour differences."""

    def __call__(self, model: KeypointAutoencoder, batch: Batch, drawn: Any) -> Tensor:
        target = as_floats(batch.x[:, 0])
        error = model.decode(model.encode(target)) - target
        red, green, blue = error.unbind(-1)
        colour = (red - green) ** 2 + ((red + green) / 2 - blue) ** 2
        return reduce(error**2, "b h w c -> b 1", "mean") + COLOUR_WEIGHT * reduce(colour, "b h w -> b 1", "mean")


def train_keypoints(
    images: NDArray[np.uint8], latent: int = 64, steps: int = 1500, seed: int = 0, batch: int = 48, progress: Progress | None = None
) -> KeypointAutoencoder:
    """A frozen autoencoder trained on images (n, px, px, 3). Equal images and options give equal weights on one machine."""
    if images.ndim != 4 or images.shape[-1] != 3 or images.shape[1] != images.shape[2] or images.dtype != np.uint8:
        raise ValueError(f"a keypoint autoencoder is trained on images (n, px, px, 3), uint8; got {images.dtype} {images.shape}")
    check_counts(steps=steps, batch=batch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        autoencoder = KeypointAutoencoder(images.shape[1], latent)
    warmup = min(steps // 10, 10 + steps // 20)
    config = TrainConfig(steps=steps, batch=min(batch, len(images)), lr=2e-3, weight_decay=0.01, warmup=warmup, ema=0.0, seed=seed)
    run_objective(autoencoder, Images(images), Reconstruction(), config, progress=progress, label="training keypoints")
    return autoencoder.eval().requires_grad_(False)


def prepare_keypoints(
    images: NDArray[np.uint8], latent: int = 64, steps: int = 1500, seed: int = 0, progress: Progress | None = None
) -> KeypointAutoencoder:
    """As `train_keypoints`, kept in the cache folder."""
    about: dict[str, Any] = {"version": VERSION, "latent": latent, "steps": steps, "seed": seed, "shape": images.shape}
    name = hashlib.sha256(json.dumps(about).encode() + np.ascontiguousarray(images).tobytes()).hexdigest()[:20]

    def make(path: Path) -> None:
        trained = train_keypoints(images, latent, steps, seed, progress=progress)
        save_file({name: tensor.contiguous() for name, tensor in trained.state_dict().items()}, path)

    file = cached(f"keypoints-{name}.safetensors", make)
    autoencoder = KeypointAutoencoder(images.shape[1], latent)
    autoencoder.load_state_dict(read_tensors(file))
    return autoencoder.eval().requires_grad_(False)
