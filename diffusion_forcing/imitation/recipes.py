"""Imitation (paper, section 4.4): demonstrations of a robot, of a game, or of one's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..backbones import ConvRNNConfig, RNNConfig
from ..engine.config import Experiment, ModelConfig, TrainConfig
from ..engine.objective import Denoising
from ..sampling import Sampler
from .agent import AgentOptions
from .pusht.task import Pushing
from .recorded import Recorded
from .swap.task import Swapping
from .task import Imitation

TRAIN = TrainConfig(steps=None, minutes=60.0, batch=16, optimizer="muon", lr=1e-3, muon_lr=0.02, ema=0.998, warmup=100, validate_every=500)
OBJECTIVE = Denoising(draw="noisy_context")


def swap(backbone: str = "gru") -> Experiment:
    """An arm swaps two fruits by way of a third plate, observed by two cameras: a GRU with memory, or the paper's model for a GPU."""
    if backbone == "paper":
        return _paper()
    task = Imitation(
        Swapping(), chunk=15, components=64, keypoint_steps=1500, state=False, window=41, offsets=3, mirror=True,
        sampler=Sampler(steps=10, temperature=0.3),
    )  # fmt: skip
    # Most sequences have a clean past, some a noisy one: with fewer clean ones the hand is less precise.
    objective = Denoising(draw="noisy_context+teacher_forced+teacher_forced")
    return Experiment(task, ModelConfig(RNNConfig(hidden=256, layers=2), variance_weighting=1.0), TRAIN, objective)


def _paper() -> Experiment:
    """Two cameras of 32 px and 15 actions as 21 channels, U-Net and convolutional GRU.

    The authors cut chunks from any action on; demonstrations here have a frame every fifth action, so there are three offsets.
    """
    task = Imitation(Swapping(px=32), chunk=15, state=False, tokens="image", window=40, offsets=3, sampler=Sampler(steps=25))
    model = ModelConfig(ConvRNNConfig(latent=32, channels=64, scales=(1, 2, 4)), parameterization="x0")
    train = TrainConfig(steps=50_000, batch=16, lr=1e-4, weight_decay=1e-3, ema=0.999)
    return Experiment(task, model, train, Denoising(clean_context_prob=0.5))


def imitation() -> Experiment:
    """Your own demonstrations, a LeRobot data set (v2.0, 2.1 or 3.0): a GRU with memory."""
    model = ModelConfig(RNNConfig(hidden=256, layers=2), variance_weighting=1.0)
    return Experiment(Imitation(Recorded(), offsets=3), model, TRAIN, OBJECTIVE)


def pusht() -> Experiment:
    """Push-T from states, the low-dimensional set as an npz.

    A single state is all there is to know, so the agent has no memory; with memory the score is lower (docs/results/imitation.md).
    """
    task = Imitation(
        Pushing(Path("pusht.npz")), chunk=8, offsets=8, window=1, mirror=True,
        sampler=Sampler(steps=10, temperature=0.5), agent=AgentOptions(memory=1),
    )  # fmt: skip
    model = ModelConfig(RNNConfig(hidden=256, layers=2), variance_weighting=1.0)
    return Experiment(task, model, replace(TRAIN, batch=640, minutes=30.0), OBJECTIVE)
