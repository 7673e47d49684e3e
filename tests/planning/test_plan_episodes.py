"""The benchmark of paired episodes: its rows share starts and noise, each rule is really left out, finished rows are kept."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mazes import agent_of, at_rest, goals, quick, record_plans, trained_model

from diffusion_forcing.planning.agent import PlanningAgent

FILE = Path(__file__).parents[2] / "benchmarks" / "plan_episodes.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("plan_episodes", FILE)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(monkeypatch):
    """Every run is a small agent of the umaze with short episodes."""
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(
        PlanningAgent, "from_pretrained", lambda run: PlanningAgent(trained_model("transformer", 4), "umaze", **quick(lookahead=2))
    )


def table(capsys) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()[2:]]


def test_rows_are_paired_and_kept(benchmark, small, capsys, tmp_path, monkeypatch):
    options = benchmark.Options((Path("a"),), draws=(1, 1, 2), zeroed=True, episodes=3, parallel=2, keep=tmp_path / "rows.json")
    benchmark.main(options)
    rows = table(capsys)
    assert [row[0] for row in rows] == ["a, draws 1", "a, draws 1", "a, draws 2", "a, network zeroed"]
    assert rows[1][2] == "0.0 ± 0.0", "the same setting has the same episodes"
    monkeypatch.setattr(benchmark, "play", None)
    benchmark.main(options)
    assert table(capsys) == rows, "nothing is played again"


def test_starts_do_not_depend_on_the_setting_and_calls_are_counted(benchmark, small, monkeypatch):
    seen = []
    play = benchmark.play

    def spy(agent, balls, **others):
        seen.append(balls.observation.copy())
        return play(agent, balls, **others)

    monkeypatch.setattr(benchmark, "play", spy)
    rows = [benchmark.measure(agent, benchmark.Options((Path("a"),), steps=(2, 4), episodes=2), name)
            for name, agent in benchmark.rows(benchmark.Options((Path("a"),), steps=(2, 4)))]  # fmt: skip
    np.testing.assert_array_equal(seen[0], seen[1])
    assert rows[1]["calls"] == 2 * rows[0]["calls"] > 0


@pytest.mark.parametrize("rule", ["deepening", "halving", "verification"])
def test_each_rule_is_left_out(benchmark, rule):
    own = agent_of(number=2, episode=300)
    name = next(name for name in benchmark.RULES if rule in name)
    agent = benchmark.RULES[name](own)
    agent.reset(2, steps=300)
    if rule == "deepening":
        plans = [record_plans(each) for each in (own, agent)]
        for each in (own, agent):
            each.act(at_rest((3, 1), (3, 1)), goals(each))
        assert [recorded[0][2] for recorded in plans] == [4, 30]
    elif rule == "halving":
        for each in (own, agent):
            each.horizon.review(np.ones(2, bool), np.ones(2), True)
        assert own.horizon.failures.tolist() == [1, 1]
        assert agent.horizon.failures.tolist() == [0, 0]
    else:
        assert agent.options.verify_tolerance == float("inf")


def test_settings_are_applied(benchmark):
    own = PlanningAgent(trained_model("transformer", 4), "umaze", **quick())
    agent = benchmark.with_setting(own, {"slope": 3.0, "strength": 2.0, "short": 3.0, "draws": 4, "futures": "fresh", "steps": 7})
    assert (agent.sampler.matrix, agent.sampler.slope, agent.sampler.steps) == ("pyramid", 3.0, 7)
    assert agent.options.scale == 2 * own.options.scale
    assert agent.options.short_plan_scale == 3 * own.options.short_plan_scale
    assert (agent.options.draws, agent.options.futures) == (4, "fresh")
