"""Whole episodes of maze models under several settings, paired: the same starts, goals and noise for each row.

python benchmarks/plan_episodes.py maze2d-medium --rules                             each rule of the agent left out in turn
python benchmarks/plan_episodes.py maze2d-umaze-gru --draws 1 4 8 16 --strength 1 3 10
python benchmarks/plan_episodes.py maze2d-large --slope 0 1 --multi --episodes 100

Rows are compared with the first one. Finished rows are kept (--keep FILE) and not played again.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from numpy.typing import NDArray

from diffusion_forcing.engine.log import progress_bar
from diffusion_forcing.files import write_atomically
from diffusion_forcing.planning import PlanningAgent
from diffusion_forcing.planning.baselines.zeroed import zero_network
from diffusion_forcing.planning.envs.maze2d import Balls
from diffusion_forcing.planning.episodes import Episodes, play
from diffusion_forcing.planning.horizon import HorizonControl

COLUMNS = (
    "",
    "score",
    "to the first row",
    "reached",
    "first reached after",
    "time in the goal",
    "failed plans",
    "calls",
    "CPU s an episode",
)


@dataclass(frozen=True)
class Options:
    """Episodes of maze models. Several values of an option are all tried; none: the run's own."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, or names of pretrained models."""
    rules: bool = False
    """Leave out each rule of the agent in turn."""
    zeroed: bool = False
    """A row with the network's output set to zero."""
    slope: tuple[float, ...] = ()
    """Slopes of a pyramid. 0: full sequence; the denoising steps or more: token by token."""
    strength: tuple[float, ...] = ()
    """Factors on the guidance scale of long plans."""
    short: tuple[float, ...] = ()
    """Factors on the guidance scale of the shortest plans."""
    draws: tuple[int, ...] = ()
    """Futures of Monte Carlo guidance."""
    futures: tuple[Literal["resample", "fresh"], ...] = ()
    """How they are sampled."""
    candidates: tuple[int, ...] = ()
    """Plans sampled at a time, of which the best is kept."""
    replan: tuple[int, ...] = ()
    """Actions executed of a plan."""
    steps: tuple[int, ...] = ()
    """Denoising steps of a plan."""
    verify_tolerance: tuple[float, ...] = ()
    """Metres by which the model may disagree with a plan."""
    extra_tokens: tuple[int, ...] = ()
    """Tokens planned beyond the arrival."""
    replan_error: tuple[float, ...] = ()
    """Metres between plan and ball above which a plan has failed."""
    multi: bool = False
    """A random goal for each episode."""
    episodes: int = 200
    """Of each row."""
    parallel: int = 100
    """Episodes side by side."""
    seed: int = 11
    """Of starts, goals and plans. Those of `dforce eval` begin at 0."""
    keep: Path | None = None
    """A JSON file with the rows already played."""
    threads: int = 1
    """Of torch."""


class WholeEpisode(HorizonControl):
    """The first plan, and one that is rejected, reaches to the end of the episode; later ones follow the arrival."""

    def review(self, due: Any, error: Any, adaptive: bool) -> None:
        fresh = ~self.started
        super().review(due, error, adaptive)
        self.tokens[fresh] = self.episode_tokens


class SameGuidance(HorizonControl):
    """Guidance as strong after a plan that failed as before."""

    def review(self, due: Any, error: Any, adaptive: bool) -> None:
        super().review(due, error, adaptive)
        self.failures[:] = 0


Change = Callable[[PlanningAgent], PlanningAgent]


def planning(agent: PlanningAgent, **changes: Any) -> PlanningAgent:
    """The same model with other options."""
    return PlanningAgent(agent.model, agent.maze, sampler=agent.sampler, options=replace(agent.options, **changes))


def controlled(agent: PlanningAgent, control: type[HorizonControl]) -> PlanningAgent:
    """The same agent with another control of the horizon."""

    class Controlled(PlanningAgent):
        def reset(self, number: int, *, steps: int | None = None) -> None:
            super().reset(number, steps=steps)
            self.horizon = control(self.options, number, self.steps // self.frame_stack, self.frame_stack)

    return Controlled(agent.model, agent.maze, sampler=agent.sampler, options=agent.options)


RULES: dict[str, Change] = {
    "no deepening: first plan to the end of the episode": lambda agent: controlled(agent, WholeEpisode),
    "no verification by re-noising": lambda agent: planning(agent, verify_tolerance=float("inf")),
    "no replanning when plan and world part": lambda agent: planning(agent, replan_error=float("inf")),
    "no halving of guidance": lambda agent: controlled(agent, SameGuidance),
    "short plans replaced as seldom as long ones": lambda agent: planning(agent, short_plan_replan=agent.options.replan),
    "plans end at the arrival": lambda agent: planning(agent, extra_tokens=0),
    "every plan to the end of the episode": lambda agent: planning(agent, lookahead=agent.maze.steps // agent.frame_stack),
}
SETTINGS = (
    "slope",
    "strength",
    "short",
    "draws",
    "futures",
    "candidates",
    "replan",
    "steps",
    "verify_tolerance",
    "extra_tokens",
    "replan_error",
)


def with_setting(agent: PlanningAgent, setting: dict[str, Any]) -> PlanningAgent:
    """The same model, planning by a setting."""
    sampler, plan = agent.sampler, agent.options
    for name, value in setting.items():
        if name == "slope":
            sampler = replace(sampler, matrix="pyramid", slope=value)
        elif name == "steps":
            sampler = replace(sampler, steps=value)
        elif name == "strength":
            plan = replace(plan, scale=plan.scale * value)
        elif name == "short":
            plan = replace(plan, short_plan_scale=plan.short_plan_scale * value)
        else:
            plan = replace(plan, **{name: value})
    return PlanningAgent(agent.model, agent.maze, sampler=sampler, options=plan)


def rows(options: Options) -> Iterator[tuple[str, PlanningAgent]]:
    """What is compared, and its name."""
    given = {name: getattr(options, name) for name in SETTINGS if getattr(options, name)}
    for run in options.runs:
        agent = PlanningAgent.from_pretrained(run)
        for values in itertools.product(*given.values()):
            setting = dict(zip(given, values, strict=True))
            yield ", ".join([str(run), *(f"{name} {value}" for name, value in setting.items())]), with_setting(agent, setting)
        for name, change in RULES.items() if options.rules else ():
            yield f"{run}, {name}", change(agent)
        if options.zeroed:
            zeroed = PlanningAgent(zero_network(agent.model), agent.maze, sampler=agent.sampler, options=agent.options)
            yield f"{run}, network zeroed", zeroed


def measure(agent: PlanningAgent, options: Options, name: str) -> dict[str, Any]:
    """Scores of every episode, and what the plans were like."""
    parts, errors, calls, began = [], [], 0, time.process_time()
    network: Any = agent.model.backbone

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    handle = network.register_forward_hook(count)
    with progress_bar() as bar:
        for i, first in enumerate(range(0, options.episodes, options.parallel)):
            number = min(options.parallel, options.episodes - first)
            agent.seed = 1000 * options.seed + i
            balls = Balls(agent.maze, number, multi=options.multi, seed=agent.seed)
            parts.append(play(agent, balls, progress=bar, what=name[-60:]))
            errors += agent.counts.errors
    handle.remove()
    episodes, error = Episodes.concatenate(parts), np.concatenate(errors)
    return {
        "scores": episodes.scores.tolist(),
        **episodes.summary(),
        "failed": float((error > min(agent.options.replan_error, 0.1)).mean()),
        "calls": calls,
        "seconds": (time.process_time() - began) / options.episodes,
    }


def mean(values: NDArray[Any], digits: int = 1) -> str:
    """Mean and standard error."""
    return f"{values.mean():.{digits}f} ± {values.std(ddof=1) / len(values) ** 0.5:.{digits}f}"


def main(options: Options) -> None:
    """Print a table of all rows."""
    torch.set_num_threads(options.threads)
    kept: dict[str, Any] = json.loads(options.keep.read_text()) if options.keep is not None and options.keep.exists() else {}
    key = f"{options.episodes} episodes, {'Multi2D' if options.multi else 'fixed goal'}, seed {options.seed}: "
    print(f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", sep="\n", flush=True)
    base: NDArray[Any] | None = None
    for name, agent in rows(options):
        if key + name not in kept:
            kept[key + name] = measure(agent, options, name)
            if options.keep is not None:
                write_atomically(options.keep, lambda file: file.write_text(json.dumps(kept)))
        row = kept[key + name]
        scores = np.array(row["scores"])
        line = [
            name, mean(scores), "" if base is None else mean(scores - base), f"{row['success']:.1%}", f"{row['first_reach']:.0f}",
            f"{row['stay']:.1%}", f"{row['failed']:.1%}", f"{row['calls']:,}", f"{row['seconds']:.2f}",
        ]  # fmt: skip
        base = scores if base is None else base
        print(f"| {' | '.join(line)} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options))
