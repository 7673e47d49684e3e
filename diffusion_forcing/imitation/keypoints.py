"""A small autoencoder for one camera: a picture to a few numbers and back. Trained first, then left as it is.

Where things are is what these numbers must say, and principal directions say that badly of what is small and moves. So three quarters of
them are points: where on the picture something is, and how much it is there; the decoder draws a blob at each. Errors of colour count more
than those of brightness: fruits are small, walls are large.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from ..checks import check_counts, check_divides
from ..files import cache_folder

Told = Callable[[str, int, int], None]
COLOUR = 4.0
"""How much more errors of colour count than those of brightness."""
THERE = 6.0
"""How much a map must say, as the logarithm of a sum, for its point to be half there."""
VERSION = 2


def as_floats(raw: Tensor) -> Tensor:
    """Bytes to numbers from 0 to 1; all else as it is."""
    return raw.float() / 255 if raw.dtype == torch.uint8 else raw.float()


class Eye(nn.Module):
    """Pictures (n, px, px, 3), bytes or 0 to 1, to (n, latent) and back to 0 to 1. px must be a multiple of 8.

    A quarter of `latent` is how many points there are: the numbers are their x from -1 to 1, their y, how much each is there; the rest
    is free.
    """

    grid: Tensor

    def __init__(self, px: int, latent: int = 64, channels: int = 16) -> None:
        super().__init__()
        check_counts(px=px, channels=channels)
        if latent < 4:
            raise ValueError(
                f"an eye tells a picture by 4 numbers at least: a point's x, y and how much it is there, and a free one; got {latent}"
            )
        check_divides(8, px, "an eye halves a picture three times, so that its height and width should be a multiple of 8")
        self.config = {"px": px, "latent": latent, "channels": channels}
        self.points = latent // 4
        free, c, side = latent - 3 * self.points, channels, px // 4
        self.inward = nn.Sequential(
            nn.Conv2d(3, c, 4, 2, 1), nn.GELU(), nn.Conv2d(c, 2 * c, 4, 2, 1), nn.GELU(), nn.Conv2d(2 * c, 2 * c, 3, 1, 1), nn.GELU(),
        )  # fmt: skip
        self.maps = nn.Conv2d(2 * c, self.points, 1)
        self.rest = nn.Sequential(nn.Conv2d(2 * c, c, 4, 2, 1), nn.GELU(), nn.Flatten(), nn.Linear(c * (side // 2) ** 2, free))
        self.size = nn.Parameter(torch.full((self.points,), -2.0))  # of blobs, before softplus
        self.ground = nn.Sequential(
            nn.Linear(free, c * (side // 2) ** 2), nn.Unflatten(1, (c, side // 2, side // 2)), nn.Conv2d(c, 4 * c, 3, 1, 1),
            nn.PixelShuffle(2), nn.GELU(),
        )  # fmt: skip
        self.outward = nn.Sequential(
            nn.Conv2d(self.points + c, 4 * c, 3, 1, 1), nn.PixelShuffle(2), nn.GELU(), nn.Conv2d(c, 12, 3, 1, 1), nn.PixelShuffle(2)
        )
        self.register_buffer("grid", torch.linspace(-1, 1, side), persistent=False)

    def encode(self, pictures: Tensor) -> Tensor:
        seen = self.inward(4 * (as_floats(pictures).movedim(-1, 1) - 0.5))
        maps = self.maps(seen)
        share = maps.flatten(2).softmax(-1).view_as(maps)
        x, y = share.sum(2) @ self.grid, share.sum(3) @ self.grid
        return torch.cat([x, y, torch.sigmoid(maps.flatten(2).logsumexp(-1) - THERE), self.rest(seen)], dim=1)

    def decode(self, latent: Tensor) -> Tensor:
        x, y, there, rest = latent.split([self.points, self.points, self.points, latent.shape[1] - 3 * self.points], dim=1)
        size = F.softplus(self.size)[:, None] + 0.03
        across, along = (torch.exp(-(((self.grid - at[..., None]) / size) ** 2) / 2) for at in (x, y))
        blobs = there[..., None, None] * along[..., :, None] * across[..., None, :]
        return self.outward(torch.cat([blobs, self.ground(rest)], dim=1)).movedim(1, -1) / 4 + 0.5

    def loss(self, pictures: Tensor) -> Tensor:
        """Mean squared error, of colour more than of brightness."""
        wanted = pictures.float() / 255
        wrong = self.decode(self.encode(wanted)) - wanted
        red, green, blue = wrong.unbind(-1)
        colour = (red - green) ** 2 + ((red + green) / 2 - blue) ** 2
        return (wrong**2).mean() + COLOUR * colour.mean()


def train_eye(
    pictures: NDArray[np.uint8], latent: int = 64, steps: int = 1500, seed: int = 0, batch: int = 48, progress: Told | None = None
) -> Eye:
    """An eye for pictures (n, px, px, 3), trained for so many steps; the same for the same pictures and options on one machine."""
    if pictures.ndim != 4 or pictures.shape[-1] != 3 or pictures.shape[1] != pictures.shape[2] or pictures.dtype != np.uint8:
        raise ValueError(f"an eye is trained on pictures (n, px, px, 3) of bytes; got {pictures.dtype} {pictures.shape}")
    check_counts(steps=steps, batch=batch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        eye = Eye(pictures.shape[1], latent)
    generator = Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(eye.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps, pct_start=min(0.1, 10 / steps + 0.05))
    whole = torch.from_numpy(pictures)
    for step in range(steps):
        which = torch.randint(0, len(whole), (min(batch, len(whole)),), generator=generator)
        loss = eye.loss(whole[which])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if progress is not None:
            progress("training an eye", step + 1, steps)
    return eye.eval().requires_grad_(False)


def prepare_eye(pictures: NDArray[np.uint8], latent: int = 64, steps: int = 1500, seed: int = 0, progress: Told | None = None) -> Eye:
    """As train_eye, but taken from the cache if it was trained before."""
    from safetensors.torch import save_file

    from ..files import read_tensors, write_atomically

    about: dict[str, Any] = {"version": VERSION, "latent": latent, "steps": steps, "seed": seed, "shape": pictures.shape}
    name = hashlib.sha256(json.dumps(about).encode() + np.ascontiguousarray(pictures).tobytes()).hexdigest()[:20]
    file = cache_folder() / f"eye-{name}.safetensors"
    if file.exists():
        eye = Eye(pictures.shape[1], latent)
        eye.load_state_dict(read_tensors(file))
        return eye.eval().requires_grad_(False)
    eye = train_eye(pictures, latent, steps, seed, progress=progress)
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in eye.state_dict().items()}

    def write(path: Path) -> None:
        save_file(tensors, path)

    write_atomically(file, write)
    return eye
