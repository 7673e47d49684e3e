"""Where episodes lose time: dead ends, detours and pauses of paths that are known."""

import importlib.util
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from diffusion_forcing.planning.envs.maze2d import MAZES, OFFSET

FILE = Path(__file__).parents[2] / "benchmarks" / "plan_losses.py"
spec = importlib.util.spec_from_file_location("plan_losses", FILE)
assert spec is not None
assert spec.loader is not None
plan_losses = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plan_losses)

LARGE = MAZES["large"]
GOAL = np.array([3.0, 2.0])
RING = [(1, 2), (1, 1), (2, 1), (3, 1), (3, 2)]


def walk(*cells, steps=10):
    """Positions (t, 2) from the centre of a cell to the next."""
    centres = np.array(cells) - OFFSET
    return np.concatenate([np.linspace(a, b, steps, endpoint=False) for a, b in itertools.pairwise(centres)])


@pytest.mark.parametrize(
    ("path", "kind", "low", "high"),
    [
        (walk(*RING), None, 0, 0),
        (walk((1, 2), (1, 3), (1, 4), (2, 4), (3, 4), (3, 3), (3, 2)), "detour", 15, 25),
        (walk((2, 1), (1, 1), (1, 2), (1, 1), (2, 1), (3, 1), (3, 2)), "dead end", 35, 45),
        (np.concatenate([np.tile(walk(*RING[:2])[:1], (30, 1)), walk(*RING)]), "standing still", 28, 33),
    ],
)
def test_time_lost_on_a_path(path, kind, low, high):
    lost = plan_losses.losses(LARGE, GOAL, path)
    assert {name for name, steps in lost.items() if steps} == ({kind} if kind else set())
    assert low <= sum(lost.values()) <= high


def test_the_table_adds_up():
    path = walk((2, 1), (1, 1), (1, 2), (1, 1), (2, 1), (3, 1), (3, 2))
    episodes = SimpleNamespace(goals=GOAL[None], observations=path[None], first=np.array([len(path) - 1]))
    rows = plan_losses.table(LARGE, episodes, SimpleNamespace(first=np.array([20]))).splitlines()[2:]
    steps = {row.split("|")[1].strip(): float(row.split("|")[2]) for row in rows}
    assert steps["later than the controller"] == pytest.approx(len(path) - 21)
    assert sum(steps.values()) == pytest.approx(2 * steps["later than the controller"])
    assert steps["dead end"] > 30
