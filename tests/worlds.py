"""Small video: a world that worker processes can import, a task of small walks, models for it, and clips in folders."""

from dataclasses import dataclass, replace

import numpy as np
from oracles import randomised

from diffusion_forcing.backbones import SpaceTimeConfig
from diffusion_forcing.engine.config import ModelConfig
from diffusion_forcing.sampling import Sampler
from diffusion_forcing.video.rollout import RollOut
from diffusion_forcing.video.task import Folder, Video
from diffusion_forcing.video.worlds.labyrinth import Labyrinth
from diffusion_forcing.video.worlds.world import Clip

WORLD = Labyrinth(size=2, px=16)
TASK = Video(
    WORLD, clips=6, frames=16, tokens=3, stack=2, patch=4, components=6, length=8, real=4, sampler=Sampler(steps=2),
    rollout=RollOut(prefix=1),
)  # fmt: skip
BACKBONE = SpaceTimeConfig(hidden=8, layers=2, heads=2, window=3)


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


def model_for(task, backbone=BACKBONE):
    """A model for the task's tokens, all of whose parameters are random, so that everything has an effect."""
    data = task.data()
    model = ModelConfig(backbone, levels=100).build(data.train.event, data.train.cond_width, data.codec)
    randomised(model.backbone, seed=1)
    return model.eval()


def write_clips(folder, number=8, frames=12, actions="numbers", px=16, first=0):
    """npz files of walks, with discrete actions ("kinds"), actions as they are ("numbers"), or "none"."""
    folder.mkdir(exist_ok=True)
    for i in range(first, first + number):
        clip = replace(WORLD, px=px).clip(i, frames)
        more = {"kinds": {"actions": (clip.actions[:, 0] > 0).astype(np.int64)}, "numbers": {"actions": clip.actions}, "none": {}}[actions]
        np.savez(folder / f"{i:03d}.npz", video=clip.frames, **more)
    return folder


def in_folder(folder, **options):
    """TASK on clips of a folder, two of them held out."""
    return replace(TASK, world=Folder(folder, px=16, test=2), **options)


def quiet(what, done, of):
    """Progress that is checked, not shown."""
    assert what
    assert 0 <= done <= of
