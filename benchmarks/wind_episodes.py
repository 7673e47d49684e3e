"""Ways to guide in the maze with wind, in the same episodes: same model, same starts, same wind.

python benchmarks/wind_episodes.py runs/maze2d-windy --keep wind/
python benchmarks/wind_episodes.py runs/maze2d-windy --only joint fresh --zeroed --figure docs/images/wind.png --keep wind/

Finished rows are kept in a folder (--keep) and not played again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from diffusion_forcing.engine.pretrained import run_folder
from diffusion_forcing.engine.run import load_run
from diffusion_forcing.planning.agent import PlanningAgent
from diffusion_forcing.planning.baselines.zeroed import zero_network
from diffusion_forcing.planning.envs.maze2d import WINDY
from diffusion_forcing.planning.episodes import Episodes, Policy
from diffusion_forcing.planning.figures import draw_winds
from diffusion_forcing.planning.windy import COLUMNS, GUIDANCE, baseline, play_paired, row, statistics, summary

BASELINES = ("dynamic_programming", "careful", "scripted", "random")


@dataclass(frozen=True)
class Options:
    """Episodes in the windy maze."""

    run: tyro.conf.Positional[Path]
    """Folder of a run, or name of a pretrained model."""
    only: tuple[str, ...] = (*GUIDANCE, *BASELINES)
    """Rows: ways to guide, and policies without a model."""
    zeroed: bool = False
    """Also the fresh futures of a network whose output is set to zero."""
    scale: tuple[float, ...] = ()
    """Guidance scales to try for each way to guide; none: its own."""
    seeds: tuple[int, ...] = (11, 12, 13, 14)
    """Of starts, wind and plans; each gives so many episodes."""
    episodes: int = 50
    """Side by side, of each row and seed."""
    keep: Path | None = None
    """Folder of rows already played."""
    figure: Path | None = None
    """Draw the paths of joint guidance and of fresh futures into this file."""
    threads: int = 1
    """Of torch."""


def policies(options: Options) -> dict[str, Policy]:
    """Who acts, by the name of the row."""
    experiment, model = load_run(run_folder(options.run))
    task: Any = experiment.task
    value = task.place_value()
    rows: dict[str, Policy] = {}
    for name in options.only:
        if name not in GUIDANCE:
            rows[name] = baseline(name, WINDY, options.seeds[0])
            continue
        sampler, plan = GUIDANCE[name]
        for scale in options.scale or (plan.scale,):
            label = f"{name}, scale {scale:g}" if options.scale else name
            rows[label] = PlanningAgent(model, WINDY, sampler=sampler, options=replace(plan, scale=scale), value=value)
    if options.zeroed:
        sampler, plan = GUIDANCE["fresh"]
        rows["fresh, network zeroed"] = PlanningAgent(zero_network(model), WINDY, sampler=sampler, options=plan, value=value)
    return rows


def measure(name: str, policy: Policy, options: Options) -> tuple[Episodes, float]:
    """The episodes of a row, and the CPU-seconds they took; kept ones if there are some."""
    parts, seconds = [], 0.0
    for seed in options.seeds:
        file = None if options.keep is None else options.keep / f"{name.replace(', ', '-').replace(' ', '_')}-{options.episodes}-{seed}.npz"
        if file is not None and file.exists():
            with np.load(file) as kept:
                parts.append(Episodes(WINDY, *(kept[key] for key in ("observations", "rewards", "touched", "goals"))))
                seconds += float(kept["seconds"])
            continue
        began = time.process_time()
        if isinstance(policy, PlanningAgent):
            policy.seed = seed
        episodes = play_paired(policy, WINDY, options.episodes, seed)
        spent = time.process_time() - began
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            arrays: dict[str, Any] = {name: getattr(episodes, name) for name in ("observations", "rewards", "touched", "goals")}
            np.savez_compressed(file, **{**arrays, "observations": episodes.observations.astype(np.float32)}, seconds=spent)
        parts.append(episodes)
        seconds += spent
    return Episodes.concatenate(parts), seconds


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    ceiling, _ = measure("dynamic_programming", baseline("dynamic_programming", WINDY), options)
    best = float(statistics(ceiling)["return"].mean())
    print(" | ".join((*COLUMNS, "to joint", "CPU s an episode")))
    played: dict[str, Episodes] = {}
    for name, policy in policies(options).items():
        played[name], seconds = measure(name, policy, options)
        earned = statistics(played[name])["return"]
        paired = "-"
        if "joint" in played and name != "joint":
            difference = earned - statistics(played["joint"])["return"]
            paired = f"{difference.mean():+.1f} ± {1.96 * difference.std(ddof=1) / len(difference) ** 0.5:.1f}"
        cells = row({**summary(played[name]), "share": earned.mean() / best})
        print(" | ".join((name, *cells, paired, f"{seconds / len(earned):.2f}")), flush=True)
    if options.figure is not None:
        pairs = (("joint", "Joint guidance counts on luck"), ("fresh", "Fresh futures go by expected reward"))
        rows = [(f"{label}\nmean return {statistics(played[name])['return'].mean():.0f}", played[name]) for name, label in pairs]
        draw_winds(rows, options.figure)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
