"""Success and time of a chunk of the swap against the number of denoising steps, one figure.

python benchmarks/steps.py runs/swap                        a trained run in its world, 50 episodes for each number of steps
python benchmarks/steps.py swap --episodes 20               the pretrained model
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro

from diffusion_forcing.engine.log import progress_bar
from diffusion_forcing.engine.plotting import COLOURS, figure
from diffusion_forcing.engine.pretrained import run_folder
from diffusion_forcing.engine.run import load_run
from diffusion_forcing.imitation.swap.task import Swapping, wilson
from diffusion_forcing.imitation.task import Imitation


@dataclass(frozen=True)
class Options:
    """Evaluate a swap model with several numbers of denoising steps, in the same episodes."""

    run: tyro.conf.Positional[Path]
    """A run's folder, or the name of a pretrained model."""
    steps: tuple[int, ...] = (1, 2, 5, 10, 20, 50)
    """Denoising steps of a chunk of actions."""
    episodes: int = 50
    """Episodes for each number of steps."""
    seed: int = 0
    """Seed of the episodes."""
    out: Path = Path("runs/steps.png")
    """The figure."""


def main(options: Options) -> None:
    name = str(options.run)
    experiment, model = load_run(run_folder(options.run))
    task = experiment.task
    if not isinstance(task, Imitation) or not isinstance(task.world, Swapping):
        raise ValueError(f"{name} is not a run of the swap")
    world = replace(task.world, trials=("clean",))
    rows = []
    with progress_bar() as progress:
        for steps in options.steps:
            varied = replace(task, world=world, sampler=replace(task.sampler, steps=steps))
            folder = _films(options.out)
            metrics = varied.evaluate(model, folder, samples=options.episodes, seed=options.seed, progress=progress).metrics
            rows.append((steps, metrics["clean"], metrics["milliseconds a chunk"]))
            print(f"{steps:3d} steps: {metrics['clean']:.0%} of {options.episodes}, {rows[-1][2]:.0f} ms a chunk", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with figure(options.out, 6, 3) as fig:
        ax = fig.subplots()
        at, success, spent = zip(*rows, strict=True)
        low, high = zip(*(wilson(round(share * options.episodes), options.episodes) for share in success), strict=True)
        below, above = np.maximum(0, np.subtract(success, low)), np.maximum(0, np.subtract(high, success))
        ax.errorbar(at, success, [below, above], color=COLOURS[0], marker="o", capsize=3)
        ax.set(xlabel="denoising steps a chunk", ylabel="success", xscale="log", ylim=(0, 1))
        ax.set_xticks(at, [str(one) for one in at], minor=False)
        ax.minorticks_off()
        for x, y, ms in zip(at, success, spent, strict=True):
            ax.annotate(f"{ms:.0f} ms", (x, y), xytext=(4, -12), textcoords="offset points", fontsize=8)
        ax.set_title(f"{options.episodes} episodes each, 95 % intervals; milliseconds to decide for up to ten robots at once", fontsize=9)


def _films(out: Path) -> Path:
    """A folder for films, beside the runs: the figure may be one of the docs."""
    folder = Path("runs") / out.stem
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    main(tyro.cli(Options))
