"""What each choice of the paper contributes on video: one figure an ablation, from trainings that differ in nothing else.

    python benchmarks/ablations.py                     all of them, about two hours on one core
    python benchmarks/ablations.py --only weight       loss weights alone
    python benchmarks/ablations.py --only stabilization --run runs/labyrinth     of a trained run, without a training

Finished trainings are reused, interrupted ones resumed. Models are measured as by `dforce eval`, at several steps.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import Generator

from diffusion_forcing import DiffusionForcing
from diffusion_forcing.engine.config import Experiment, save_experiment
from diffusion_forcing.engine.log import progress_bar
from diffusion_forcing.engine.plotting import COLOURS, figure
from diffusion_forcing.engine.run import load_run
from diffusion_forcing.engine.task import Progress
from diffusion_forcing.engine.train import train
from diffusion_forcing.video.recipes import labyrinth
from diffusion_forcing.video.task import Video

Change = Callable[[Experiment], Experiment]
Row = dict[str, float]
SCORES = ("first token PSNR", "error of x0", "video-FD last window")
LATE = ("video-FD first window", "video-FD last window", "late motion over real")
"""Scores that compare where tokens have different numbers of frames."""
STABLE = (0, 20, 100, 300)


@dataclass(frozen=True)
class Options:
    """Train models that differ in one choice, and draw a figure of each choice."""

    only: str = ""
    """Only ablations whose name contains this: weight, target, stack, levels, stabilization."""
    steps: int = 1500
    """Steps of each training."""
    points: int = 3
    """Number of evenly spaced steps at which models are measured."""
    px: int = 32
    """Height and width of frames."""
    clips: int = 6000
    """Clips to train on."""
    samples: int = 20
    """Roll-outs of each measurement."""
    length: int = 200
    """Frames of each."""
    seed: int = 0
    threads: int | None = 1
    run: Path | None = None
    """For stabilization: a trained run to roll out; None: the base training."""
    out: Path = Path("runs/ablations")
    """Folder of trainings, scores and figures."""


def model(**changes: object) -> Change:
    return lambda e: replace(e, model=replace(e.model, **changes))  # type: ignore[arg-type]


def draw(name: str) -> Change:
    return lambda e: replace(e, objective=replace(e.objective, draw=name))  # type: ignore[type-var, call-arg]


def single(e: Experiment) -> Experiment:
    """One frame a token, with as many tokens a step, and frames a window and in memory, as with four."""
    assert isinstance(e.task, Video)
    stack, task = e.task.stack, e.task
    rollout = replace(task.rollout, prefix=task.rollout.prefix * stack, clip_tokens=task.rollout.clip_tokens * stack)
    task = replace(task, stack=1, tokens=task.tokens * stack, rollout=rollout)
    backbone = replace(e.model.backbone, window=e.model.backbone.window * stack)  # type: ignore[union-attr, call-arg]
    return replace(e, task=task, model=replace(e.model, backbone=backbone), train=replace(e.train, batch=e.train.batch // stack))


ABLATIONS: dict[str, dict[str, Change]] = {
    "weight": {"none": model(), "min-SNR": model(weight="min_snr"), "fused SNR": model(weight="fused_snr")},
    "target": {"v": model(), "x0": model(parameterization="x0")},
    "stack": {"4 frames a token": model(), "1 frame a token": single},
    "levels": {"independent + noisy prefix": model(), "independent": draw("independent"), "noisy context": draw("noisy_context")},
}


def base(options: Options) -> Experiment:
    """The recipe, smaller."""
    e = labyrinth()
    assert isinstance(e.task, Video)
    task = replace(
        e.task, world=dataclasses.replace(e.task.world, px=options.px), clips=options.clips, length=options.length,
        sampler=replace(e.task.sampler, steps=10),
    )  # fmt: skip
    settings = replace(
        e.train, steps=options.steps, minutes=None, seed=options.seed, threads=options.threads, keep_checkpoints=True,
        validate_every=-(-options.steps // options.points),
    )  # fmt: skip
    return replace(e, task=task, train=settings, name="ablation")


def trained(change: Change, options: Options) -> tuple[Video, Path]:
    """The task and folder of a training, which is run if it is not finished. Equal experiments share one."""
    experiment = change(base(options))
    assert isinstance(experiment.task, Video)
    folder = options.out / _name(experiment)
    folder.mkdir(parents=True, exist_ok=True)
    save_experiment(experiment, folder / "config.json")
    if train(experiment, folder).status == "interrupted":
        raise KeyboardInterrupt
    return experiment.task, folder


def _name(e: Experiment) -> str:
    """A folder's name, of all that options and ablations change."""
    assert isinstance(e.task, Video)
    size = f"{e.task.world.px}px-{e.task.clips}clips-stack{e.task.stack}"
    trained = f"{e.train.steps}by{e.train.validate_every}-seed{e.train.seed}"
    return f"{size}-{e.model.parameterization}-{e.model.weight}-{e.objective.draw}-{trained}"


def measured(task: Video, folder: Path, net: DiffusionForcing, samples: int, progress: Progress) -> Row:
    """Scores by name, cached beside the model."""
    settings = {"samples": samples, "length": task.length, "stabilization": task.context.stabilization}
    file = folder / f"scores-{'-'.join(map(str, settings.values()))}.json"
    if file.exists():
        return json.loads(file.read_text())  # type: ignore[no-any-return]
    folder.mkdir(parents=True, exist_ok=True)
    scores = task.evaluate(net, folder, samples=samples, seed=0, progress=progress).metrics
    scores["error of x0"] = error(task, net)
    file.write_text(json.dumps(scores, indent=2) + "\n")
    return scores


@torch.no_grad()
def error(task: Video, net: DiffusionForcing, number: int = 64) -> float:
    """Squared error of the predicted pixels of a noisy token whose past is clean, mean over ten levels: one measure for all losses."""
    frames, actions = task.test_clips(number, 36, part="real")
    codec, top = net.codec, net.schedule.levels
    tokens = codec.encode(torch.as_tensor(frames).float() / 255)  # type: ignore[union-attr, operator]
    cond = task.rollout_cond(actions, tokens.shape[1])
    generator = Generator().manual_seed(0)
    before = 16 // task.stack
    errors = []
    for level in torch.linspace(0.1 * top, top, 10).round().long():
        clean = tokens[:, : before + 1]
        k = torch.zeros(clean.shape[:2], dtype=torch.long)
        k[:, -1] = level
        noise = torch.randn(clean.shape, generator=generator)
        noisy = torch.cat([clean[:, :-1], net.schedule.add_noise(clean, k, noise)[:, -1:]], dim=1)
        guess = net.predict(noisy, k, None if cond is None else cond[:, : before + 1]).x0[:, -1:]
        frames_of_guess = codec.decode(guess)  # type: ignore[union-attr, operator]
        errors.append(float(((frames_of_guess - torch.as_tensor(frames[:, 16 : 16 + task.stack]).float() / 255) ** 2).mean()))
    return float(np.mean(errors))


def over_steps(name: str, variants: dict[str, Change], options: Options, progress: Progress) -> dict[str, dict[int, Row]]:
    """Train and measure each variant, and draw the figure."""
    rows_of: dict[str, dict[int, Row]] = {}
    for title, change in variants.items():
        task, folder = trained(change, options)
        rows_of[title] = {
            int(step.name): measured(task, step, DiffusionForcing.from_pretrained(step).eval(), options.samples, progress)
            for step in sorted((folder / "kept").iterdir())
        }
    with figure(options.out / f"ablation_{name}.png", 11, 3.4) as fig:
        shown = LATE if name == "stack" else SCORES
        for ax, score in zip(fig.subplots(1, len(shown)), shown, strict=True):
            for colour, (title, rows) in zip(COLOURS, rows_of.items(), strict=False):
                ax.plot(list(rows), [row.get(score, math.nan) for row in rows.values()], color=colour, marker="o", label=title)
            ax.set(title=score, xlabel="step")
        fig.axes[0].legend(frameon=False)
    return rows_of


def stabilized(options: Options, progress: Progress) -> dict[str, dict[int, Row]]:
    """One trained model, rolled out at several stabilization levels."""
    if options.run is None:
        task, folder = trained(model(), options)
        net = DiffusionForcing.from_pretrained(folder / "model")
    else:
        experiment, net = load_run(options.run)
        assert isinstance(experiment.task, Video)
        folder, task = options.run / "ablations", replace(experiment.task, length=options.length)
    rows = {}
    for level in STABLE:
        one = replace(task, context=replace(task.context, stabilization=level), sampler=replace(task.sampler, steps=10))
        rows[level] = measured(one, folder / f"stabilization{level}", net.eval(), options.samples, progress)
    with figure(options.out / "ablation_stabilization.png", 11, 3.4) as fig:
        shown = LATE
        for ax, score in zip(fig.subplots(1, len(shown)), shown, strict=True):
            ax.plot([str(level) for level in rows], [row.get(score, math.nan) for row in rows.values()], color=COLOURS[0], marker="o")
            ax.set(title=score, xlabel="stabilization level, of 1,000", ylim=(0, None))
    return {"stabilization": rows}


def main(options: Options) -> None:
    """Run the ablations that were chosen, and print a table of each."""
    known = (*ABLATIONS, "stabilization")
    if not any(options.only in name for name in known):
        sys.exit(f"there are ablations of {', '.join(known)}; --only {options.only} is in none of these names")
    with progress_bar() as progress:
        tables = {name: over_steps(name, variants, options, progress) for name, variants in ABLATIONS.items() if options.only in name}
        if options.only in "stabilization":
            tables["stabilization"] = stabilized(options, progress)
    for name, rows_of in tables.items():
        print(f"\n{name}")
        for title, rows in rows_of.items():
            for at, row in rows.items():
                print(f"  {title:24} {at:6}  " + "  ".join(f"{score} {row.get(score, math.nan):.4g}" for score in (*SCORES, *LATE[::2])))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
