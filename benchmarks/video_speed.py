"""Frames a second of a video model, decoding included: one roll-out, the same compiled, and eight at once.

python benchmarks/video_speed.py labyrinth                  the pretrained model
python benchmarks/video_speed.py runs/labyrinth --steps 20 --threads 1
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import Generator

from diffusion_forcing.engine.pretrained import run_folder
from diffusion_forcing.engine.run import load_run
from diffusion_forcing.video.task import Video

WAYS = {"one roll-out": (1, False), "one roll-out, compiled": (1, True), "eight at once": (8, False)}


@dataclass(frozen=True)
class Options:
    """Roll a video model out along the actions of real clips and take the time of each token, on a machine with nothing else to do."""

    run: tyro.conf.Positional[Path]
    """A run's folder, or the name of a pretrained model."""
    steps: tuple[int, ...] = (20, 10)
    """Denoising steps a token."""
    tokens: int = 30
    """Tokens that are timed, after four that are not."""
    threads: int | None = None
    """Of torch; its own choice if not given."""


def main(options: Options) -> None:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    name = str(options.run)
    folder = run_folder(options.run)
    task = load_run(folder)[0].task
    if not isinstance(task, Video):
        raise ValueError(f"{name} is not a run of a video task")
    context, length = task.context_frames, (options.tokens + 4) * task.stack
    frames, actions = task.test_clips(8, context + length)
    for steps in options.steps:
        first = 0.0
        for way, (number, compiled) in WAYS.items():
            model = load_run(folder)[1]  # loaded again: a compiled model stays compiled
            rollout = replace(task.rollout, actions="clip", compile=compiled)
            varied = replace(task, sampler=replace(task.sampler, steps=steps), rollout=rollout)
            generator = Generator().manual_seed(0)
            stream = varied.roll_out(model, length, frames[:number, :context], actions[:number], generator=generator)
            ends = [time.perf_counter() for _ in stream]
            rate = number * task.stack / float(np.median(np.diff(ends)[3:]))
            first = first or rate
            print(f"{steps:3d} steps, {way + ':':24} {rate:6.1f} frames/s, {rate / first:.2f} of one roll-out", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options))
