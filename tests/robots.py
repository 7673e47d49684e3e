"""Small demonstrations, a world that gives them, and models of them."""

from dataclasses import dataclass

import numpy as np
import torch
from oracles import randomised

from diffusion_forcing.backbones import RNNConfig
from diffusion_forcing.engine.config import ModelConfig
from diffusion_forcing.imitation.demonstrations import Demonstrations
from diffusion_forcing.imitation.task import Imitation
from diffusion_forcing.imitation.world import World

K = 100
PX = 6
SMALL = RNNConfig(hidden=16)


def demonstrations(episodes=5, frames=7, every=3, seed=0, cameras=("front", "hand"), state=2, px=PX):
    draw = np.random.default_rng(seed)
    return Demonstrations(
        [draw.normal(size=(every * (frames - 1), 2)) for _ in range(episodes)],
        [draw.normal(size=(frames, state)) for _ in range(episodes)],
        {name: [draw.integers(0, 256, (frames, px, px, 3), dtype=np.uint8) for _ in range(episodes)] for name in cameras},
        every,
        fps=20,
    )


@dataclass(frozen=True)
class Given(World):
    """A world of demonstrations that a test gives."""

    of: object
    held_out: int = 1

    def demonstrations(self, chunk, progress=None):
        return self.of()


TASK = Imitation(Given(demonstrations), chunk=3, components=8, window=7)


def model_for(task, backbone=SMALL, levels=K):
    data = task.data()
    model = ModelConfig(backbone, levels=levels).build(data.train.event, data.train.cond_width, data.codec)
    randomised(model.backbone, seed=1)
    return model.eval()


def observation(n=2, seed=0, px=PX, **changes):
    """Of n robots: two cameras and a state."""
    draw = np.random.default_rng(seed)
    cameras = {name: draw.integers(0, 256, (n, px, px, 3), dtype=np.uint8) for name in ("front", "hand")}
    return {**cameras, "state": draw.normal(size=(n, 2)).astype(np.float32), **changes}


def as_tensors(raw):
    return {name: torch.as_tensor(values) for name, values in raw.items()}


def progress(what, done, of):
    assert 0 <= done <= of
    assert what


def is_png(file):
    return file.read_bytes().startswith(b"\x89PNG")
