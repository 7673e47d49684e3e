"""A world that worker processes can import."""

from dataclasses import dataclass

import numpy as np

from diffusion_forcing.video.worlds.world import Clip


@dataclass(frozen=True)
class Flat:
    """A wall whose colour is drawn, and darkens by one a step."""

    px: int = 8
    shade: int = 0

    @property
    def actions(self):
        return ("go", "turn")

    def clip(self, seed, frames):
        rng = np.random.default_rng(seed)
        colours = rng.integers(100, 256, 3) - np.arange(frames)[:, None] - self.shade
        actions = rng.standard_normal((frames, 2)).astype(np.float32)
        pixels = np.broadcast_to(colours[:, None, None], (frames, self.px, self.px, 3)).astype(np.uint8)
        return Clip(pixels, actions, np.full((frames, 1), seed % 1000, np.float32))
