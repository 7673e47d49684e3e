"""Quality and speed of a video model against the number of denoising steps, one figure.

python benchmarks/video_steps.py labyrinth                  the pretrained model, 16 roll-outs of 96 frames for each number of steps
python benchmarks/video_steps.py runs/labyrinth --samples 32 --length 200
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from diffusion_forcing.engine.log import progress_bar
from diffusion_forcing.engine.plotting import COLOURS, figure
from diffusion_forcing.engine.pretrained import run_folder
from diffusion_forcing.engine.run import load_run
from diffusion_forcing.video.evaluation import score_rollouts
from diffusion_forcing.video.task import Video


@dataclass(frozen=True)
class Options:
    """Roll a video model out with several numbers of denoising steps, from the same frames on."""

    run: tyro.conf.Positional[Path]
    """A run's folder, or the name of a pretrained model."""
    steps: tuple[int, ...] = (2, 5, 10, 20, 50)
    """Denoising steps a token."""
    samples: int = 16
    """Roll-outs for each of these."""
    length: int = 96
    """Frames of each."""
    seed: int = 0
    out: Path = Path("runs/video_steps.png")
    """The figure."""


def main(options: Options) -> None:
    name = str(options.run)
    experiment, model = load_run(run_folder(options.run))
    if not isinstance(experiment.task, Video):
        raise ValueError(f"{name} is not a run of a video task")
    rows = []
    with progress_bar() as progress:
        task = replace(experiment.task, length=options.length)
        real = task.reference_clips(progress)
        replace(task, length=task.stack).generate(model, options.samples, options.seed, progress)  # clips are drawn before time is taken
        for steps in options.steps:
            varied = replace(task, sampler=replace(task.sampler, steps=steps))
            began = time.monotonic()
            generated, truth, context = varied.generate(model, options.samples, options.seed, progress)
            rate = len(generated) * options.length / (time.monotonic() - began)
            scores, _ = score_rollouts(generated, truth, real, context, task.stack, task.window_frames, progress)
            if not {"first token PSNR", "first token LPIPS", "video-FD last window"} <= scores.keys():
                raise ValueError("roll-outs have no context, are too short or too few for these scores")
            rows.append((steps, scores["first token PSNR"], scores["first token LPIPS"], scores["video-FD last window"], rate))
            print("{:3d} steps: first token {:.2f} dB, LPIPS {:.3f}; video-FD of the last window {:.2f}; {:.0f} frames/s".format(*rows[-1]),
                  flush=True)  # fmt: skip
    at = [row[0] for row in rows]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with figure(options.out, 10, 2.8) as fig:
        titles = ("PSNR of the first token, dB", "LPIPS of the first token", "video-FD of the last window", "frames a second, all together")
        for i, (ax, title) in enumerate(zip(fig.subplots(1, 4), titles, strict=True)):
            ax.plot(at, [row[i + 1] for row in rows], color=COLOURS[0], marker="o")
            ax.set(xlabel="denoising steps a token", xscale="log")
            ax.set_title(title, fontsize=9)
            ax.set_xticks(at, [str(one) for one in at], minor=False)
            ax.minorticks_off()


if __name__ == "__main__":
    main(tyro.cli(Options))
