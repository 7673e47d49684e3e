"""The maze with chance: its wind and pit, what the collector makes of them, the ceiling, and the task."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from small import dforce

from diffusion_forcing.engine.run import load_run
from diffusion_forcing.planning import figures
from diffusion_forcing.planning.agent import PlanningAgent
from diffusion_forcing.planning.baselines.dynamic import DynamicProgramming, solve
from diffusion_forcing.planning.baselines.scripted import RandomPolicy, ScriptedPolicy
from diffusion_forcing.planning.data import collect
from diffusion_forcing.planning.envs.maze2d import GEAR, WINDY, Chance, by_name, step
from diffusion_forcing.planning.envs.windy import Gusts, WindyBalls, make_balls
from diffusion_forcing.planning.rewards import Trajectory, earn
from diffusion_forcing.planning.tokens import choices, fit_choice_codec, frames_of
from diffusion_forcing.planning.value import PlaceValue
from diffusion_forcing.planning.windy import GUIDANCE, play_paired, statistics, summary

CALM = dataclasses.replace(WINDY, chance=Chance(probability=0.0))
TINY = ("--task.transitions", "20000", "--train.steps", "4", "--train.minutes", "9", "--model.backbone.hidden", "16", "--train.batch", "8")
STRIP, PIT, START = np.array([2.8, 2.0]), np.array([3.8, 2.0]), np.array([3.0, 1.0])


@pytest.fixture(scope="module")
def walks():
    return collect(WINDY, 60_000, seed=0)


def test_a_gust_is_one_more_force_which_no_action_can_clip():
    still = np.zeros((1, 2))
    pushed = step(WINDY, STRIP[None], still, np.array([[0.5, 0.0]]))
    blown = step(WINDY, STRIP[None], still, still, np.array([[0.5 * GEAR, 0.0]]))
    np.testing.assert_allclose(blown.velocity, pushed.velocity)
    assert step(WINDY, STRIP[None], still, still, np.array([[2 * GEAR, 0.0]])).velocity[0, 0] == pytest.approx(4 * pushed.velocity[0, 0])


def test_gusts_blow_as_often_and_as_long_as_said_on_windy_cells_only():
    gusts = Gusts(WINDY, 2000, np.random.default_rng(0))
    forces = np.stack([gusts.force(np.tile(STRIP, (2000, 1))) for _ in range(150)])
    assert set(np.unique(forces[..., 0])) == {0.0, 200.0}
    assert (forces[..., 1] == 0).all()
    blows = forces[..., 0] > 0
    assert blows.mean() == pytest.approx(0.3, abs=0.02)
    assert (blows[1:] != blows[:-1]).mean() == pytest.approx(2 * 0.3 * 0.7 / 25, rel=0.1)
    assert (Gusts(WINDY, 2000, np.random.default_rng(0)).force(np.tile(START, (2000, 1))) == 0).all()
    with pytest.raises(ValueError, match="no wind"):
        Gusts(by_name("umaze"), 1, np.random.default_rng(0))


def test_the_same_seed_is_the_same_start_and_the_same_wind_whoever_acts():
    balls = [WindyBalls(WINDY, 20, seed=3) for _ in range(2)]
    np.testing.assert_array_equal(balls[0].observation, balls[1].observation)
    assert (WINDY.on("S", balls[0].position)).all()
    for _ in range(100):
        balls[0].step(np.ones((20, 2)))
        balls[1].step(-np.ones((20, 2)))
        np.testing.assert_array_equal(balls[0].gusts.blows, balls[1].gusts.blows)


def test_the_goal_holds_the_ball_and_the_pit_costs():
    balls = WindyBalls(WINDY, 3, seed=0)
    balls.position = np.stack([WINDY.goal - [0.49, 0.0], PIT, START])
    balls.velocity = np.zeros((3, 2))
    _, reward, _ = balls.step(np.zeros((3, 2)))
    assert reward.tolist() == [1.0, -8.0, 0.0]
    held = balls.position[0].copy()
    for _ in range(5):
        _, reward, _ = balls.step(np.ones((3, 2)))
    assert reward[0] == 1
    np.testing.assert_array_equal(balls.position[0], held)
    assert balls.pit_steps[1] >= 1
    assert type(make_balls(by_name("umaze"))) is not WindyBalls


def test_the_collector_walks_both_ways_and_falls(walks):
    position = walks.observations[..., :2].astype(float)
    assert 0.05 < WINDY.on("~", position).mean() < 0.3
    assert 0.02 < WINDY.on("P", position).mean() < 0.2
    assert WINDY.on("P", collect(CALM, 20_000).observations[..., :2].astype(float)).mean() < 0.002, "no one goes there of his own will"
    assert WINDY.inside(position).mean() > 0.999


def test_one_controller_ignores_chance_and_the_other_goes_round():
    short, careful = (statistics(play_paired(ScriptedPolicy(WINDY, careful=c), WINDY, 40, 1)) for c in (False, True))
    assert short["risky"].all()
    assert not careful["risky"].any()
    assert short["first"][short["pit_steps"] == 0].mean() < 0.6 * careful["first"].mean()
    assert 0.3 < (short["pit_steps"] > 0).mean() < 0.7


def test_the_ceiling_knows_the_odds():
    best, short, careful = (
        summary(play_paired(policy, WINDY, 60, 2))
        for policy in (DynamicProgramming(WINDY), ScriptedPolicy(WINDY), ScriptedPolicy(WINDY, careful=True))
    )
    assert best["risky"] == 0
    assert best["score"] > careful["score"] > short["score"] + 50
    model = solve(WINDY)
    start = model.number[3, 1]
    assert best["score"] == pytest.approx(model.value[WINDY.steps, start], abs=15), "it earns what it expects to"
    assert summary(play_paired(DynamicProgramming(CALM), CALM, 20, 2))["risky"] == 1, "without wind the short way is best"
    cheap = dataclasses.replace(WINDY, chance=Chance(cost=0.5))
    assert summary(play_paired(DynamicProgramming(cheap), cheap, 20, 2))["risky"] == 1, "and so it is where falling costs little"


def test_actions_and_what_they_lead_to_are_tokens_of_their_own(walks):
    frames = frames_of(walks)[0]
    codec = fit_choice_codec(frames, 25)
    some = frames[:8, 500:600].clone()
    tokens = codec.encode(some)
    assert tokens.shape == (8, 8, 10)
    assert choices(codec, 8).tolist() == [True, False] * 4
    other = some.clone()
    other[:, :25, :2] += 1
    moved = (codec.encode(other) - tokens).abs().amax((0, 2)) > 1e-6
    assert moved.tolist() == [True] + [False] * 7
    decoded = codec.decode(tokens)
    assert (decoded[..., 2:4] - some[..., 2:4]).abs().max() < 0.03, "metres"
    wide = torch.nn.functional.avg_pool1d(some[..., :2].mT, 25)
    assert torch.allclose(torch.nn.functional.avg_pool1d(decoded[..., :2].mT, 25), wide, atol=0.05), "what is left out is jitter"


def test_the_reward_of_a_plan_is_what_the_maze_pays_for_it():
    episodes = play_paired(RandomPolicy(WINDY), WINDY, 30, 0)
    episodes.observations[0, 200:, :2] = WINDY.goal
    observations = torch.from_numpy(episodes.observations[:, 1:]).float()
    plan = Trajectory(observations[..., :2], observations.requires_grad_())
    value = earn(WINDY, torch.from_numpy(WINDY.goal).float().expand(30, 2), softness=1e-3, every=1)(plan)
    episodes.rewards[0, 199:] = 1
    error = np.abs(value.detach().numpy() - episodes.rewards.sum(1))
    assert error.max() < 20, "of thousands"
    (gradient,) = torch.autograd.grad(earn(WINDY, torch.from_numpy(WINDY.goal).float().expand(30, 2), 0.3)(plan).sum(), plan.observation)
    assert torch.isfinite(gradient).all()
    assert gradient.abs().amax() > 0


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a few steps."""
    root = tmp_path_factory.mktemp("windy")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("DFORCE_CACHE", str(root / "cache"))
        assert dforce("train", "maze2d-windy", *TINY) == 0
        yield root / "runs" / "maze2d-windy"


@pytest.mark.parametrize("name", GUIDANCE)
def test_every_way_to_guide_acts(run, name):
    experiment, model = load_run(run)
    sampler, options = GUIDANCE[name]
    options = dataclasses.replace(options, draws=min(options.draws, 2), lookahead=2, future_steps=1)
    sampler = dataclasses.replace(sampler, steps=2)
    agent = PlanningAgent(model, WINDY, sampler=sampler, options=options, value=experiment.task.place_value())
    balls = make_balls(WINDY, 2, seed=0)
    agent.reset(2, steps=50)
    balls.position[1] = WINDY.goal
    plans = []
    for _ in range(30):
        action = agent.act(balls.observation, balls.goal)
        assert np.isfinite(action).all()
        plans += [agent.new_plan()]
        balls.step(action)
    made = [plan.shape for plan in plans if plan is not None]
    assert made == ([(25, 6)] * 2 if options.only_next else [(50, 6), (50, 6)])
    assert agent.counts.plans >= 3, "a ball that the goal holds is not planned for again"


def test_a_run_is_measured_beside_the_ceiling(run, tmp_path, monkeypatch):
    monkeypatch.chdir(run.parent.parent)
    monkeypatch.setenv("DFORCE_CACHE", str(run.parent.parent / "cache"))
    quick = ("--task.plan.lookahead", "1", "--task.plan.draws", "2", "--task.plan.future-steps", "1", "--task.sampler.steps", "2")
    assert dforce("eval", run, "--episodes", "3", "--json", tmp_path / "scores.json", *quick) == 0
    found = json.loads((tmp_path / "scores.json").read_text())
    assert {"score", "score_95", "risky", "fallen", "cost", "success", "share"} <= found.keys()
    assert (run / "eval" / "episodes.png").exists() or list(run.rglob("episodes.png"))
    for policy in ("zeroed", "careful", "dynamic_programming"):
        assert dforce("eval", run, "--episodes", "2", "--task.policy", policy, *quick) == 0


def test_places_near_the_goal_are_worth_more_and_the_pit_less(walks):
    value = PlaceValue.fit(WINDY, walks, WINDY.goal)
    places = torch.tensor([[3.0, 4.0], [1.0, 3.8], [1.0, 1.0], [3.8, 2.3]], requires_grad=True)
    found = value(places)
    assert found[0] > 150
    assert found[0] > found[1] > found[2] > found[3]
    (gradient,) = torch.autograd.grad(found.sum(), places)
    assert gradient[1:].abs().amax(1).min() > 0
    goal = torch.from_numpy(WINDY.goal).float()[None]
    still = Trajectory(torch.zeros(1, 50, 2), torch.cat([places[1].detach().expand(1, 50, 2), torch.zeros(1, 50, 2)], -1))
    assert float(earn(WINDY, goal, softness=0.01, value=value)(still).detach()) == pytest.approx(
        0.995**50 * float(found[1].detach()), rel=0.01
    )


def test_paths_are_drawn(tmp_path):
    rows = [(name, play_paired(policy, WINDY, 5, 0)) for name, policy in (("a", ScriptedPolicy(WINDY)), ("b", DynamicProgramming(WINDY)))]
    figures.draw_winds(rows, tmp_path / "wind.png", "Wind")
    assert (tmp_path / "wind.png").stat().st_size > 10_000
