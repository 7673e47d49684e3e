"""Video (paper, section 4.1): small models for a laptop, and the paper's own for a GPU."""

from __future__ import annotations

import dataclasses

from ..engine.config import ConvRNNConfig, Experiment, ModelConfig, PainterConfig, SpaceTimeConfig, TrainConfig
from ..sampling import Sampler
from .rollout import RollOut
from .task import Folder, Video
from .worlds.doom import Doom
from .worlds.labyrinth import Labyrinth
from .worlds.voxels import Voxels

TRAIN = TrainConfig(
    steps=None, minutes=75.0, batch=4, optimizer="muon", lr=1e-3, muon_lr=0.02, ema=0.998, draw="independent+noisy_prefix", given=0.3,
    imagined=0.7, imagined_after=0.6, warmup=50, validate_every=1000, valid_windows=256,
)  # fmt: skip
EASY = Labyrinth(size=3, contrast=0.5, turn=7.5, speed=0.125)
"""A slow walk between gentle walls: what two cores can learn in an hour."""
SLOW = Voxels(turn=6.0, speed=0.15)
"""As slow a walk between blocks: half of the view would be new every third token otherwise."""
SMALL = ModelConfig(SpaceTimeConfig(layers=6, heads=2, warp=True, input_skip=True), variance_weighting=1.0)
QUICK = Sampler(steps=10)
"""Ten steps are as good as twenty."""
ANGLE = Sampler(steps=10, solver="euler_angle")
"""Keeps contrast and motion where walls are gentle; where contrast is full already it exaggerates it."""
POLICY = RollOut(actions="policy")
"""A window under the real clip's actions, then under an action policy that looks where it goes."""
CLIPS = 6000
"""Of a world: with 2,000 a model of this size begins to learn them by heart."""


def labyrinth() -> Experiment:
    """Walks through a textured maze, 64 px: a transformer over space and time, 75 minutes on two cores."""
    return Experiment(Video(EASY, clips=CLIPS, sampler=ANGLE, rollout=POLICY), SMALL, TRAIN)


def voxels() -> Experiment:
    """Walks through a landscape of blocks, 64 px: as labyrinth, but for the data."""
    return Experiment(Video(SLOW, clips=CLIPS, sampler=QUICK, rollout=POLICY), SMALL, TRAIN)


def doom() -> Experiment:
    """Walks through mazes of Doom, drawn by ViZDoom, 64 px: as labyrinth, but for the data."""
    return Experiment(Video(Doom(), clips=CLIPS, sampler=QUICK, rollout=POLICY), SMALL, TRAIN)


def clips() -> Experiment:
    """Clips of your own: --task.world.path FOLDER of mp4, webp, gif or npz; as labyrinth, but for the data."""
    return Experiment(Video(Folder(), mirror=True, sampler=QUICK), SMALL, TRAIN)


def painter(experiment: Experiment) -> Experiment:
    """The second stage of a small model: a decoder that draws what it says, the model itself left as it is."""
    train = TrainConfig(steps=None, minutes=15.0, batch=4, lr=1e-3, ema=0.998, warmup=50, validate_every=1000, valid_windows=64)
    return Experiment(experiment.task, PainterConfig(), train)


def labyrinth_painter() -> Experiment:
    """Sharper frames of a trained labyrinth (--train.init RUN): a decoder by a small network, 15 minutes on two cores."""
    return painter(labyrinth())


def voxels_painter() -> Experiment:
    """Sharper frames of a trained voxels (--train.init RUN): as labyrinth-painter."""
    return painter(voxels())


def clips_painter() -> Experiment:
    """Sharper frames of trained clips (--train.init RUN, --task.world.path FOLDER): as labyrinth-painter."""
    return painter(clips())


def labyrinth_gru() -> Experiment:
    """Walks through a textured maze, 64 px: the paper's U-Net and convolutional GRU, small enough for two cores."""
    backbone = ConvRNNConfig(latent=64, channels=64, scales=(1, 2), blocks=1)
    train = dataclasses.replace(TRAIN, imagined=0.0)
    return Experiment(Video(EASY, clips=CLIPS, rollout=POLICY), ModelConfig(backbone, variance_weighting=1.0), train)


def dmlab() -> Experiment:
    """The paper's model for DMLab, 64 px, 25 M parameters, for a GPU: --task.world.path FOLDER holds the published clips.

    The paper says 24 M. On CUDA add --train.precision bfloat16.
    """
    task = Video(Folder(action_kinds=3), tokens=9, stack=4, patch=0, sampler=Sampler(steps=100))
    backbone = ConvRNNConfig(latent=16, channels=64, scales=(1, 2, 4, 4))
    model = ModelConfig(backbone, schedule="sigmoid", weight="fused_snr")
    return Experiment(task, model, TrainConfig(steps=100_000, batch=16, lr=1e-4, weight_decay=1e-3, ema=0.999))


def minecraft() -> Experiment:
    """The paper's model for Minecraft, 128 px, 35 M parameters, for a GPU: --task.world.path FOLDER holds the published clips.

    The paper says 36 M. On CUDA add --train.precision bfloat16.
    """
    task = Video(Folder(px=128, action_kinds=4), tokens=9, frames=72, stack=8, patch=0, sampler=Sampler(steps=100))
    backbone = ConvRNNConfig(latent=32, channels=64, scales=(1, 2, 4, 4, 4))
    model = ModelConfig(backbone, schedule="sigmoid", weight="fused_snr")
    return Experiment(task, model, TrainConfig(steps=100_000, batch=16, lr=1e-4, weight_decay=1e-3, ema=0.999))


VIDEO = {
    "labyrinth": labyrinth,
    "labyrinth-painter": labyrinth_painter,
    "labyrinth-gru": labyrinth_gru,
    "voxels": voxels,
    "voxels-painter": voxels_painter,
    "doom": doom,
    "clips": clips,
    "clips-painter": clips_painter,
    "dmlab": dmlab,
    "minecraft": minecraft,
}
