"""A second's proxy for planning: one plan from each of 48 starts, of which the first 30 actions are executed in the simulator.

python benchmarks/plan_progress.py maze2d-umaze                             the pretrained model, with its own settings
python benchmarks/plan_progress.py maze2d-umaze runs/maze2d-umaze-gru --slope 0 1 3 --plans 4
python benchmarks/plan_progress.py runs/maze2d-umaze-gru --scale 0.1 0.3 1 --draws 1 4 --futures resample fresh

Every setting gets the same starts. It ranks settings before an episode is played; it does not replace episodes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import tyro
from numpy.typing import NDArray

from diffusion_forcing.planning import PlanningAgent
from diffusion_forcing.planning.envs.maze2d import GOAL_RADIUS, MAZES, Balls, Maze, step

COLUMNS = ("", "progress m", "to the first row", "wrong way", "free cells", "executed - planned", "arrives in plan", "seconds")


@dataclass(frozen=True)
class Options:
    """Plans of maze models, executed for a moment. Several values of an option are all tried; none: the run's own."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, or names of pretrained models."""
    slope: tuple[float, ...] = ()
    """Slopes of a pyramid. 0: full sequence; the denoising steps or more: token by token."""
    scale: tuple[float, ...] = ()
    """Guidance scales of these plans. None given: by the run's own law for plans of this length."""
    draws: tuple[int, ...] = ()
    """Futures of Monte Carlo guidance."""
    futures: tuple[Literal["resample", "fresh"], ...] = ()
    """How they are sampled."""
    tokens: int = 16
    """Tokens of a plan."""
    actions: int = 30
    """Actions executed."""
    starts: int = 48
    """Starts, with the maze's fixed goal; those in the goal do not count."""
    plans: int = 1
    """Plans from each start."""
    seed: int = 11
    """Of starts and plans."""
    threads: int = 1
    """Of torch."""


class Progress(NamedTuple):
    """Of plans (n,): metres nearer to the goal along the shortest path, share of frames in free cells, metres between executed and
    planned position, and whether the plan comes to the goal."""

    metres: NDArray[Any]
    free: NDArray[Any]
    miss: NDArray[Any]
    arrives: NDArray[Any]


def path_length(maze: Maze, position: NDArray[Any]) -> NDArray[Any]:
    """Metres (n,) from positions (n, 2) to the maze's goal from cell to cell."""
    cells, length = maze.cells, np.full(len(maze.cells), np.inf)
    length[(cells == maze.goal).all(1)] = 0
    neighbours = np.abs(cells[:, None] - cells).sum(-1) == 1
    for _ in cells:
        length = np.minimum(length, np.where(neighbours, length + 1, np.inf).min(1))
    own = np.linalg.norm(position[:, None] - cells, axis=-1).argmin(1)
    reachable = neighbours[own] | (np.arange(len(cells)) == own[:, None])
    return np.where(reachable, np.linalg.norm(position[:, None] - cells, axis=-1) + length, np.inf).min(1)


def measure(maze: Maze, observation: NDArray[Any], action: NDArray[Any], planned: NDArray[Any], actions: int) -> Progress:
    """What plans from observations (n, 4) are worth: actions (n, t, 2) and planned positions (n, t, 2)."""
    position, velocity = observation[:, :2], observation[:, 2:]
    for force in action[:, :actions].swapaxes(0, 1):
        position, velocity, _ = step(maze, position, velocity, force)
    return Progress(
        path_length(maze, observation[:, :2]) - path_length(maze, position),
        maze.inside(planned).mean(1),
        np.linalg.norm(planned[:, actions - 1] - position, axis=-1),
        (np.linalg.norm(planned - maze.goal, axis=-1) < GOAL_RADIUS).any(1),
    )


def settings(options: Options) -> Iterator[dict[str, Any]]:
    """Each combination of the values given."""
    given = {name: getattr(options, name) for name in ("slope", "scale", "draws", "futures") if getattr(options, name)}
    for values in itertools.product(*given.values()):
        yield dict(zip(given, values, strict=True))


def with_setting(agent: PlanningAgent, setting: dict[str, Any], seed: int) -> PlanningAgent:
    """The same model, planning by a setting."""
    sampler, plan = agent.sampler, agent.options
    if "slope" in setting:
        sampler = replace(sampler, matrix="pyramid", slope=setting["slope"])
    if "scale" in setting:
        plan = replace(plan, scale=setting["scale"], short_plan_scale=setting["scale"])
    plan = replace(plan, **{name: setting[name] for name in ("draws", "futures") if name in setting})
    return PlanningAgent(agent.model, agent.maze, sampler=sampler, options=plan, seed=seed)


def fixed_starts(maze: Maze, options: Options) -> NDArray[Any]:
    """Observations (n, 4) of those starts that do not lie in the goal."""
    balls = Balls(maze, options.starts, seed=options.seed)
    return np.asarray(balls.observation[np.linalg.norm(balls.position - balls.goal, axis=-1) > GOAL_RADIUS])


def evaluate(agent: PlanningAgent, observation: NDArray[Any], options: Options) -> Progress:
    """Progress of the plans from each start, of all starts' first plans first."""
    agent.reset(len(observation) * options.plans)
    many = np.tile(observation, (options.plans, 1))
    plan = agent.propose(many, np.tile(agent.maze.goal, (len(many), 1)), horizon=options.tokens)
    return measure(agent.maze, many, plan.action.numpy(), plan.position.numpy(), options.actions)


def mean(values: NDArray[Any], plans: int) -> str:
    """Mean and standard error over the starts of values (plans * starts,)."""
    each = values.reshape(plans, -1).mean(0)
    return f"{each.mean():.3f} ± {each.std(ddof=1) / len(each) ** 0.5:.3f}"


def main(options: Options) -> None:
    """Print a table of all runs and settings."""
    if options.actions > 10 * options.tokens:
        raise ValueError(f"{options.tokens} tokens are {10 * options.tokens} actions; got --actions {options.actions}, give more --tokens")
    torch.set_num_threads(options.threads)
    agents = {run: PlanningAgent.from_pretrained(run) for run in options.runs}
    mazes = {agent.maze.name for agent in agents.values()}
    if len(mazes) > 1:
        raise ValueError(f"runs of several mazes have no starts in common; got {', '.join(sorted(mazes))}: measure each maze on its own")
    observation = fixed_starts(MAZES[mazes.pop()], options)
    print(f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", sep="\n")
    first: Progress | None = None
    for (run, agent), setting in itertools.product(agents.items(), list(settings(options))):
        began = time.perf_counter()
        progress = evaluate(with_setting(agent, setting, options.seed), observation, options)
        seconds = time.perf_counter() - began
        row = [
            ", ".join([str(run), *(f"{name} {value}" for name, value in setting.items())]),
            mean(progress.metres, options.plans),
            "" if first is None else mean(progress.metres - first.metres, options.plans),
            f"{(progress.metres < 0).mean():.0%}",
            f"{progress.free.mean():.0%}",
            f"{100 * np.median(progress.miss):.1f} cm",
            f"{progress.arrives.mean():.0%}",
            f"{seconds:.1f}",
        ]
        first = first or progress
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options))
