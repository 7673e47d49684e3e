"""Where episodes in a maze lose time against the scripted controller that knows it: wrong turns, or standing still.

python benchmarks/plan_losses.py maze2d-large --episodes 50
python benchmarks/plan_losses.py maze2d-large --episodes 50 --multi

Until the arrival, time without getting nearer to the goal along the shortest path counts as lost, if it lasts 15 steps or more. A dead end
is a way of 0.8 m or more away from the goal and back to within 1 m of where it began; a detour one that ends elsewhere; the rest is
standing still. What remains is the pace on the shortest path, compared with the controller's.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import tyro
from numpy.typing import NDArray

from diffusion_forcing.planning import PlanningAgent
from diffusion_forcing.planning.baselines.scripted import ScriptedPolicy
from diffusion_forcing.planning.envs.maze2d import OFFSET, Balls, Maze
from diffusion_forcing.planning.episodes import Episodes, play

AWAY, BACK, PAUSE = 0.8, 1.0, 15
KINDS = ("dead end", "detour", "standing still")
Cell = tuple[int, int]


@dataclass(frozen=True)
class Options:
    """Where episodes lose time."""

    model: tyro.conf.Positional[str]
    """Run or pretrained model."""
    episodes: int = 50
    """All side by side."""
    multi: bool = False
    """A random goal for each episode."""
    seed: int = 11
    """Of starts and goals."""


def neighbours(cell: Cell) -> list[Cell]:
    """The four cells beside a cell."""
    return [(cell[0] + i, cell[1] + j) for i, j in ((0, 1), (1, 0), (0, -1), (-1, 0))]


def cells_to(maze: Maze, goal: NDArray[Any]) -> dict[Cell, int]:
    """Cells between each free cell and that of the goal (2,)."""
    free = {tuple(cell) for cell in maze.cells.tolist()}
    first = tuple(np.floor(goal + 0.5 + OFFSET).astype(int).tolist())
    distance, queue = {first: 0}, [first]
    for cell in queue:
        for other in neighbours(cell):
            if other in free and other not in distance:
                distance[other] = distance[cell] + 1
                queue.append(other)
    return distance


def metres_to(distance: dict[Cell, int], path: NDArray[Any]) -> NDArray[Any]:
    """Metres (t,) from positions (t, 2) to the goal along the shortest path, roughly: cells, and how far the next one is entered."""
    metres = []
    for point in path:
        cell = min(distance, key=lambda cell: abs(point[0] - cell[0] + OFFSET) + abs(point[1] - cell[1] + OFFSET))
        offset = point - (np.array(cell) - OFFSET)
        towards = [float(offset @ np.subtract(other, cell)) for other in neighbours(cell) if distance.get(other, 99) < distance[cell]]
        away = [float(offset @ np.subtract(other, cell)) for other in neighbours(cell) if distance.get(other, 0) > distance[cell]]
        metres.append(distance[cell] + (-max(towards) if towards else max(away, default=0.0)))
    return np.array(metres)


def losses(maze: Maze, goal: NDArray[Any], path: NDArray[Any]) -> dict[str, int]:
    """Steps that a path (t, 2) up to the arrival lost, by kind."""
    metres = metres_to(cells_to(maze, goal), path)
    nearest = np.minimum.accumulate(metres)
    records = np.flatnonzero(np.r_[True, nearest[1:] < nearest[:-1] - 1e-9, True])
    lost = dict.fromkeys(KINDS, 0)
    for begin, end in itertools.pairwise(records):
        if end - begin >= PAUSE:
            away = (metres[begin:end] - metres[begin]).max() >= AWAY
            back = np.linalg.norm(path[end - 1] - path[begin]) < BACK
            lost["standing still" if not away else "dead end" if back else "detour"] += int(end - begin)
    return lost


def table(maze: Maze, episodes: Episodes, scripted: Episodes) -> str:
    """Mean steps lost by kind, how many episodes each concerns, and the difference in pace."""
    lost = [
        losses(maze, goal, path[: first + 1, :2])
        for goal, path, first in zip(episodes.goals, episodes.observations, episodes.first, strict=True)
    ]
    late = (episodes.first - scripted.first).mean()
    lines = ["| | steps an episode | episodes |", "|---|---|---|"]
    for kind in KINDS:
        steps = np.array([one[kind] for one in lost])
        lines.append(f"| {kind} | {steps.mean():.1f} | {(steps > 0).sum()} |")
    pace = late - np.mean([sum(one.values()) for one in lost])
    lines += [f"| pace otherwise | {pace:+.1f} | |", f"| later than the controller | {late:+.1f} | {len(lost)} |"]
    return "\n".join(lines)


def main(options: Options) -> None:
    """Play, and print a table."""
    torch.set_num_threads(1)
    agent = PlanningAgent.from_pretrained(options.model, seed=1000 * options.seed)
    one, other = (Balls(agent.maze, options.episodes, multi=options.multi, seed=1000 * options.seed) for _ in range(2))
    print(table(agent.maze, play(agent, one), play(ScriptedPolicy(agent.maze, 0), other)))


if __name__ == "__main__":
    main(tyro.cli(Options))
