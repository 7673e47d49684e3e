"""Video (paper, section 4.1): small models for a laptop, and the paper's own for a GPU."""

from __future__ import annotations

import dataclasses

from ..backbones import ConvRNNConfig, SpaceTimeConfig
from ..engine.config import Experiment, ModelConfig, TrainConfig
from ..engine.objective import Denoising
from ..sampling import Sampler
from .decoder import DecoderObjective
from .rollout import RollOut
from .task import Folder, Video
from .warp import VideoDenoising
from .worlds.doom import Doom
from .worlds.labyrinth import Labyrinth
from .worlds.voxels import Voxels

TRAIN = TrainConfig(
    steps=None, minutes=75.0, batch=4, optimizer="muon", lr=1e-3, muon_lr=0.02, ema=0.998, warmup=50, validate_every=1000, valid_windows=256
)
OBJECTIVE = VideoDenoising(draw="independent+noisy_prefix", clean_context_prob=0.3, self_context=0.7, self_context_after=0.6)
EASY = Labyrinth(size=3, contrast=0.5, turn=7.5, speed=0.125)
"""A slow walk between walls of low contrast: what two cores can learn in an hour."""
SLOW = Voxels(turn=6.0, speed=0.15)
"""As slow a walk between blocks: else half of the view would be new every third token."""
SMALL = ModelConfig(SpaceTimeConfig(layers=6, heads=2, warp=True, input_skip=True), variance_weighting=1.0)
QUICK = Sampler(steps=10)
"""Ten steps are as good as twenty."""
ANGLE = Sampler(steps=10, solver="euler_angle")
"""Keeps contrast and motion where walls have little contrast; where contrast is high it exaggerates."""
POLICY = RollOut(actions="policy")
"""A window under the real clip's actions, then under an action policy that looks where it goes."""
CLIPS = 6000
"""Clips of a world: with 2,000 a model of this size overfits."""


def labyrinth(backbone: str = "transformer", stage: str | None = None) -> Experiment:
    """Walks through a textured maze: a transformer over space and time, or the paper's U-Net and convolutional GRU, small."""
    if backbone == "gru":
        model = ModelConfig(ConvRNNConfig(latent=64, channels=64, scales=(1, 2), blocks=1), variance_weighting=1.0)
        task = Video(EASY, clips=CLIPS, rollout=POLICY)
        return Experiment(task, model, TRAIN, dataclasses.replace(OBJECTIVE, self_context=0.0))
    return _small(Video(EASY, clips=CLIPS, sampler=ANGLE, rollout=POLICY), stage)


def voxels(stage: str | None = None) -> Experiment:
    """Walks through a landscape of blocks: as labyrinth, but for the data."""
    return _small(Video(SLOW, clips=CLIPS, sampler=QUICK, rollout=POLICY), stage)


def doom() -> Experiment:
    """Walks through mazes of Doom, drawn by ViZDoom: as labyrinth, but for the data."""
    return _small(Video(Doom(), clips=CLIPS, sampler=QUICK, rollout=POLICY))


def clips(stage: str | None = None) -> Experiment:
    """Clips of your own, --task.world.path FOLDER of mp4, webp, gif or npz: as labyrinth, but for the data."""
    return _small(Video(Folder(), mirror=True, sampler=QUICK), stage)


def _small(task: Video, stage: str | None = None) -> Experiment:
    """A small model, or the learned decoder of one that is trained (--train.init), which is left as it is."""
    if stage != "decoder":
        return Experiment(task, SMALL, TRAIN, OBJECTIVE)
    train = TrainConfig(steps=None, minutes=15.0, batch=4, lr=1e-3, ema=0.998, warmup=50, validate_every=1000, valid_windows=64)
    return Experiment(task, None, train, DecoderObjective())


def dmlab() -> Experiment:
    """The paper's model for DMLab, 64 px, 25 M parameters: --task.world.path FOLDER holds the published clips.

    The paper says 24 M. On CUDA add --train.precision bfloat16.
    """
    task = Video(Folder(action_kinds=3), tokens=9, stack=4, patch=0, sampler=Sampler(steps=100))
    return _paper(task, ConvRNNConfig(latent=16, channels=64, scales=(1, 2, 4, 4)))


def minecraft() -> Experiment:
    """The paper's model for Minecraft, 128 px, 35 M parameters: --task.world.path FOLDER holds the published clips.

    The paper says 36 M. On CUDA add --train.precision bfloat16.
    """
    task = Video(Folder(px=128, action_kinds=4), tokens=9, frames=72, stack=8, patch=0, sampler=Sampler(steps=100))
    return _paper(task, ConvRNNConfig(latent=32, channels=64, scales=(1, 2, 4, 4, 4)))


def _paper(task: Video, backbone: ConvRNNConfig) -> Experiment:
    model = ModelConfig(backbone, schedule="sigmoid", weight="fused_snr")
    return Experiment(task, model, TrainConfig(steps=100_000, batch=16, lr=1e-4, weight_decay=1e-3, ema=0.999), Denoising())
