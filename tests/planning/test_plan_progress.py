"""The benchmark of executed plans: distances along the maze, what is measured of a plan, and its table."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mazes import UMAZE, model_of, quick, trained_model

from diffusion_forcing.planning.agent import PlanningAgent
from diffusion_forcing.planning.baselines.scripted import ScriptedPolicy
from diffusion_forcing.planning.envs.maze2d import Balls

FILE = Path(__file__).parents[2] / "benchmarks" / "plan_progress.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("plan_progress", FILE)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_way_to_the_goal_is_measured_around_walls(benchmark):
    positions = np.array([(1, 1), (1.0, 1.4), (1, 3), (2, 3), (2.5, 3), (3, 1), (3, 1.5)])
    np.testing.assert_allclose(benchmark.path_length(UMAZE, positions), [0, 0.4, 2, 3, 3.5, 6, 5.5], atol=1e-9)


def scripted_plans(steps):
    """What the scripted controller does from some starts, as plans."""
    balls, policy = Balls("umaze", 6, seed=2), ScriptedPolicy(UMAZE)
    policy.reset(6)
    observation, actions, positions = balls.observation, [], []
    for _ in range(steps):
        actions.append(policy.act(balls.observation, balls.goal))
        balls.step(actions[-1])
        positions.append(balls.position)
    return observation, np.stack(actions, 1), np.stack(positions, 1)


def test_plans_of_a_controller_make_progress_and_come_true(benchmark):
    observation, actions, positions = scripted_plans(300)
    progress = benchmark.measure(UMAZE, observation, actions, positions, 300)
    assert (progress.metres > benchmark.path_length(UMAZE, observation[:, :2]) - 0.5).all()
    assert (progress.free == 1).all()
    assert (progress.miss < 1e-9).all()
    assert progress.arrives.all()


def test_plans_that_do_not_come_true_are_told_by_what_happens(benchmark):
    observation, actions, positions = scripted_plans(100)
    away = benchmark.measure(UMAZE, observation, 0 * actions, positions + 9.0, 30)
    assert (np.abs(away.metres) < 0.2).all()
    assert not away.free.any()
    assert (away.miss > 8).all()
    assert not away.arrives.any()


def test_it_prints_a_row_for_each_run_and_setting(benchmark, monkeypatch, capsys):
    agents = {Path("a"): "transformer", Path("b"): "rnn"}
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(PlanningAgent, "from_pretrained", lambda run: PlanningAgent(trained_model(agents[run], 4), "umaze", **quick()))
    benchmark.main(benchmark.Options((Path("a"), Path("b")), slope=(0.0, 1.0), scale=(0.02,), draws=(1, 2), tokens=4, starts=6, plans=2))
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == [
        f"{run}, slope {slope}, scale 0.02, draws {draws}" for run in "ab" for slope in (0.0, 1.0) for draws in (1, 2)
    ]
    assert len({row[1] for row in rows}) > 2, "settings make a difference"
    with pytest.raises(ValueError, match="give more --tokens"):
        benchmark.main(benchmark.Options((Path("a"),), tokens=2))


def test_settings_are_applied(benchmark):
    agent = benchmark.with_setting(PlanningAgent(model_of(), "umaze"), {"slope": 3.0, "scale": 0.2, "draws": 4, "futures": "fresh"}, seed=5)
    assert (agent.sampler.matrix, agent.sampler.slope, agent.seed) == ("pyramid", 3.0, 5)
    assert (agent.options.scale, agent.options.short_plan_scale, agent.options.draws, agent.options.futures) == (0.2, 0.2, 4, "fresh")
    own = PlanningAgent(model_of(), "umaze", **quick())
    assert benchmark.with_setting(own, {}, 0).options == own.options
