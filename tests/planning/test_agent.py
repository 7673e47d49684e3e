"""The planning agent: its actions, its memory, what it refuses, plans that are invalid, and runs it comes from."""

import numpy as np
import pytest
import torch
from mazes import (
    GOAL,
    QUICK,
    UMAZE,
    agent_of,
    at_rest,
    codec,
    constrained,
    drive,
    executed,
    goals,
    model_of,
    motion_errors,
    quick,
    record_plans,
    trained_model,
)
from oracles import seeded
from small import small

from diffusion_forcing import RNN, DiffusionForcing, NoiseSchedule, cosine, pin
from diffusion_forcing.engine import precision
from diffusion_forcing.engine.config import replace
from diffusion_forcing.engine.run import open_run
from diffusion_forcing.engine.train import train
from diffusion_forcing.planning import agent as planning
from diffusion_forcing.planning.agent import PlanningAgent
from diffusion_forcing.planning.envs.maze2d import Balls
from diffusion_forcing.planning.rewards import Trajectory, reach

both = pytest.mark.parametrize("kind", ["transformer", "rnn"])
HERE = at_rest((3, 1), (1, 3), (3, 3))


# Actions.


@both
@pytest.mark.parametrize("number", [1, 4])
def test_actions_are_forces_for_each_ball(kind, number):
    actions = drive(agent_of(kind, number), 12)
    assert actions.shape == (12, number, 2)
    assert actions.dtype == np.float32
    assert np.isfinite(actions).all()
    assert np.abs(actions).max() <= 1
    assert (actions != 0).any()


@pytest.mark.parametrize("options", [{}, {"eta": 1.0}, {"draws": 2}])
def test_the_seed_decides(options):
    one, same, other = (drive(agent_of(seed=seed, **options), 3) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


def test_at_temperature_0_and_without_fresh_noise_plans_are_deterministic():
    one, other = (agent_of(seed=seed, temperature=0.0).propose(HERE, goals(agent_of())).position for seed in (0, 1))
    assert torch.equal(one, other)


def test_a_reset_begins_new_episodes():
    agent = agent_of()
    first = drive(agent, 11)
    agent.reset(3, steps=60)
    assert (agent.time, agent.counts.plans, agent.past.shape[1]) == (0, 0, 0)
    np.testing.assert_array_equal(drive(agent, 11), first)
    agent.reset(2, steps=60)
    assert drive(agent, 1).shape == (1, 2, 2)


def test_what_is_executed_is_what_was_planned():
    agent = agent_of(lookahead=2, replan=8)
    actions = drive(agent, 8)
    np.testing.assert_array_equal(actions.swapaxes(0, 1), np.clip(agent.plan[:, :8, :2], -1, 1))


@both
@pytest.mark.parametrize("matrix", ["full_sequence", "pyramid", "autoregressive"])
def test_it_plans_along_each_matrix(kind, matrix):
    agent = agent_of(kind, episode=40, matrix=matrix, form="step")
    plan = agent.propose(HERE, goals(agent))
    assert plan.action.shape == (3, 40, 2)
    assert plan.observation.shape == (3, 40, 4)
    assert all(torch.isfinite(part).all() for part in plan)


def test_a_flat_pyramid_is_a_full_sequence_and_a_steep_one_goes_token_by_token():
    def plan(**options):
        agent = agent_of(episode=40, **options)
        return agent.propose(HERE, goals(agent)).observation

    torch.testing.assert_close(plan(matrix="pyramid", slope=0.0), plan(matrix="full_sequence"))
    torch.testing.assert_close(plan(matrix="pyramid", slope=2.0), plan(matrix="autoregressive"))
    assert not torch.equal(plan(matrix="pyramid"), plan(matrix="full_sequence"))


def test_watching_the_denoising_does_not_change_the_plan():
    rows, plans = [], []
    for on_step in (None, lambda row, x, levels: rows.append((row, x.shape[1], int(levels.max())))):
        agent = agent_of("rnn", episode=40, scale=0, matrix="pyramid")
        plans.append(agent.propose(HERE, goals(agent), on_step=on_step).observation)
    torch.testing.assert_close(*plans, atol=1e-4, rtol=1e-4)
    assert rows[-1] == (5, 1 + 4, 0), "4 tokens a row apart, each in two steps, after the present"


def test_the_error_of_a_plan_is_the_distance_to_where_the_ball_then_is():
    agent = agent_of(number=1, lookahead=1, replan=4)
    agent.act(at_rest((3, 1)), UMAZE.goal[None])
    planned = agent.plan[0, 3, 2:4].copy()
    for _ in range(4):
        agent.act(at_rest((3, 1)), UMAZE.goal[None])
    assert agent.counts.errors[0] == pytest.approx(np.linalg.norm(planned - (3, 1)), rel=1e-5)


def test_an_agent_leaves_the_callers_model_alone():
    model = model_of("transformer").train()
    PlanningAgent(model, "umaze")
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("kind", "matrix"), [("transformer", "full_sequence"), ("rnn", "pyramid"), ("causal", "pyramid")])
@pytest.mark.parametrize("scale", [0.0, 0.02])
def test_with_linear_dynamics_a_plan_is_one_motion_from_where_the_ball_is(kind, matrix, scale):
    observation, misses = at_rest((1.0, 1.0), (3.0, 1.2)), {}
    for name, model in (("with", constrained(kind)), ("without", trained_model(kind))):
        agent = PlanningAgent(model, "umaze", **quick(matrix=matrix, scale=scale))
        agent.reset(2, steps=60)
        plan, before = agent.propose(observation, goals(agent)), torch.from_numpy(observation).float()
        errors = motion_errors(torch.cat([plan.action, plan.observation], dim=-1), before)
        misses[name] = max(part.abs().max().item() for part in errors)
        misses[f"{name}, executed"] = (executed(plan.action, before) - plan.position).norm(dim=-1)[:, 29].max().item()
    assert misses["with"] < 0.02 < 0.2 < misses["without"]
    assert misses["with, executed"] < 0.03 < 0.1 < misses["without, executed"], "30 actions on"


causal = pytest.mark.parametrize("kind", ["rnn", "causal"])


def constrained_agent(kind: str, *, episode: int = 60, **options) -> PlanningAgent:
    """Of a causal model with the law of motion, along a pyramid."""
    agent = PlanningAgent(constrained(kind), "umaze", **quick(matrix="pyramid", **options))
    agent.reset(3, steps=episode)
    return agent


@causal
@pytest.mark.parametrize("memory", [0, 2])
@pytest.mark.parametrize("lookahead", [1, 3])
def test_causal_models_are_policies_and_planners_with_and_without_memory(kind, memory, lookahead):
    agent = constrained_agent(kind, memory=memory, lookahead=lookahead, replan=10)
    plans, balls = record_plans(agent), Balls("umaze", 3, seed=1)
    for _ in range(31):
        before = torch.from_numpy(balls.observation).float()
        action = agent.act(balls.observation, balls.goal)
        balls.step(action)
        if agent.time % 10 == 1:
            plan = torch.from_numpy(agent.plan[:, : 10 * lookahead])
            miss = (executed(plan[..., :2], before) - plan[..., 2:4]).norm(dim=-1)
            assert miss.max() < 0.05, "each plan begins where the ball is, and obeys"
    assert plans == [(time, [0, 1, 2], lookahead) for time in (0, 10, 20, 30)]


@causal
def test_horizons_of_causal_models_grow_and_shrink(kind):
    agent = constrained_agent(kind, episode=80, min_tokens=2, memory=1, replan_error=10.0)
    plans = record_plans(agent)
    drive(agent, 80)
    assert {length for time, _, length in plans if time == 0} == {2, 4, 8}, "until it arrives or the episode ends"
    assert all(length <= -(-(80 - time) // 10) for time, _, length in plans)
    assert plans[-1][2] < 8


@causal
def test_causal_models_with_the_law_of_motion_are_saved(kind, tmp_path):
    model = constrained(kind)
    model.save_pretrained(tmp_path)
    other = DiffusionForcing.from_pretrained(tmp_path)
    assert other.traits.causal
    assert not other.causal
    x, k = torch.randn(2, 5, 24, generator=seeded(0)), torch.tensor([0, 10, 30, 60, 99]).repeat(2, 1)
    torch.testing.assert_close(model.predict(x, k), other.predict(x, k))
    states = [one.absorb(x[:, :2]) for one in (model, other)]
    torch.testing.assert_close(*(one.predict(x[:, 2:], k[:, 2:], state=state) for one, state in zip((model, other), states, strict=True)))


# Goals, rewards and candidates.


def test_a_goal_is_the_reward_reach():
    agent, other = agent_of(lookahead=4), agent_of(lookahead=4)
    np.testing.assert_allclose(agent.act(HERE, goals(agent)), other.act(HERE, reward=reach(GOAL.repeat(3, 1))), atol=1e-6)


def test_of_several_candidates_the_best_is_kept(monkeypatch):
    sampled = []
    sample = planning.sample
    monkeypatch.setattr(planning, "sample", lambda *arguments, **options: sampled.append(sample(*arguments, **options)) or sampled[-1])
    agent = agent_of(candidates=5, lookahead=3)
    goal = torch.tensor([[1.0, 1.0], [1.0, 3.0], [3.0, 3.0]])
    plan = agent.propose(at_rest((3, 1), (3, 2), (3, 3)), goal.numpy())
    frames = codec().decode(sampled[0][:, 1:])
    assert frames.shape == (15, 30, 6)
    scores = reach(goal)(Trajectory(frames[..., :2], frames[..., 2:])).view(3, 5)
    best = frames.view(3, 5, 30, 6)[torch.arange(3), scores.argmax(1)]
    assert torch.equal(plan.position, best[..., 2:4])
    assert torch.equal(plan.action, best[..., :2])


def test_a_candidate_that_is_not_finite_is_not_the_best(monkeypatch):
    sample = planning.sample

    def spoilt(*arguments, **options):
        x = sample(*arguments, **options)
        x[::2] = torch.nan
        return x

    monkeypatch.setattr(planning, "sample", spoilt)
    agent = agent_of(candidates=2)
    assert torch.isfinite(agent.propose(at_rest((3, 1), (3, 2), (3, 3)), goals(agent)).position).all()
    assert agent.counts.bad == 0


def test_by_a_reward_all_balls_plan_together():
    """It may depend on all of them, such as to keep them apart."""
    rows = []

    def gather(plan):
        rows.append(len(plan.action))
        return -(plan.position - plan.position.mean(0)).square().sum((1, 2))

    agent = agent_of(draws=2)
    agent.act(HERE, reward=gather)
    agent.age[1] = 10**9  # one is due
    agent.act(HERE, reward=gather)
    assert set(rows) == {6}
    assert agent.counts.plans == 6


def test_a_reward_after_goals_plans_for_all_balls_at_one_length():
    agent = agent_of(episode=300)
    agent.act(HERE, goals(agent))
    agent.horizon.tokens[:] = (4, 30, 30)  # as after a plan of which the first ball's arrived
    agent.age[:] = 10**9
    agent.act(HERE, reward=reach(GOAL.repeat(3, 1)))


# Memory.


def after_two_pasts(memory, kind="transformer"):
    """Plans of two balls at the same place, one of which came there on another way."""
    plans = []
    for way in (0.0, 0.3):
        agent = agent_of(kind, number=1, lookahead=2, memory=memory)
        for t in range(11):
            agent.act(at_rest((3, 2 + way * (1 - t / 10))), UMAZE.goal[None])
        plans.append(agent.plan.copy())
    return plans


@both
def test_with_memory_the_past_matters(kind):
    one, other = after_two_pasts(1, kind)
    assert np.abs(one - other).max() > 1e-3
    np.testing.assert_array_equal(*after_two_pasts(0, kind), "without memory it does not")


def test_memory_holds_the_last_tokens_after_the_present_before_them():
    agent = agent_of(memory=2, lookahead=2)
    balls, observations = Balls("umaze", 3, seed=1), []
    contexts, context_of = [], agent._context

    def spy(problem):
        contexts.append(context_of(problem))
        return contexts[-1]

    agent._context = spy
    for _ in range(31):
        observations.append(balls.observation)
        balls.step(agent.act(balls.observation, balls.goal))
    assert [context.shape[1] for context in contexts] == [1, 2, 3, 3], "the present alone, then up to two tokens after a first present"
    observations = torch.from_numpy(np.stack(observations, axis=1)).float()
    frames = codec().decode(contexts[-1])[..., 2:]
    for frame, step in ((9, 10), (19, 20), (29, 30)):  # the last frame of each token
        torch.testing.assert_close(frames[:, frame, :2], observations[:, step, :2], atol=0.2, rtol=0)
    present = codec().decode(contexts[0])[..., 2:]
    torch.testing.assert_close(present[:, -1, :2], observations[:, 0, :2], atol=0.1, rtol=0)


@pytest.mark.parametrize("acts", [10, 15])
def test_a_proposal_with_memory_starts_from_the_observation_it_is_given(acts):
    plans = []
    for place in ((3, 1), (1, 3)):
        agent = agent_of(memory=1, lookahead=2, scale=0)
        drive(agent, acts)
        plans.append(agent.propose(at_rest(place, place, place), goals(agent)).position)
    assert not torch.equal(*plans)


# Refusals.


def wrong(index, value):
    observation = HERE.copy()
    observation[index] = value
    return observation


@pytest.mark.parametrize(
    ("observation", "goal", "message"),
    [
        (HERE[:, :3], GOAL.repeat(3, 1), r"observations should be \(3, 4\)"),
        (HERE[:2], GOAL.repeat(2, 1), r"reset\(n\) sets the number of balls"),
        (wrong((1, 2), np.nan), GOAL.repeat(3, 1), "the observation of ball 1 holds NaN or infinite numbers"),
        (wrong((1, slice(2)), (2, 1)), GOAL.repeat(3, 1), r"the position of ball 1 at \(2, 1\) lies in a wall"),
        (HERE, [(1, 1), (2, 2), (1, 1)], r"goal 1 at \(2, 2\) lies in a wall"),
        (HERE, GOAL, "there are 3 balls but 1 goals"),
        (HERE, None, "give either a goal or a reward"),
    ],
)
@pytest.mark.parametrize("call", ["act", "propose"])
def test_impossible_problems_are_refused(call, observation, goal, message):
    agent = agent_of()
    with pytest.raises(ValueError, match=message):
        getattr(agent, call)(observation, goal)
    assert agent.time == 0


def test_a_refused_observation_leaves_the_episode_alone():
    agent, other = agent_of(memory=1), agent_of(memory=1)
    balls = Balls("umaze", 3, seed=1)
    for t in range(12):
        if t == 5:
            with pytest.raises(ValueError, match="NaN"):
                agent.act(wrong((1, 2), np.nan), balls.goal)
        action = agent.act(balls.observation, balls.goal)
        np.testing.assert_array_equal(action, other.act(balls.observation, balls.goal))
        balls.step(action)


def test_a_goal_and_a_reward_at_once_are_refused():
    with pytest.raises(ValueError, match=r"act\(observation, goal\), or act\(observation, reward=function\)"):
        agent_of().act(HERE, GOAL.repeat(3, 1), reward=reach(GOAL))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda plan: plan.position.sum(1), "one score a sequence"),
        (lambda plan: 1.0, "one score a sequence"),
        (lambda plan: plan.position.detach().sum((1, 2)), "no gradient"),
    ],
)
def test_a_reward_that_cannot_guide_is_refused(reward, message):
    with pytest.raises(ValueError, match=message):
        agent_of().act(HERE, reward=reward)


def test_an_agent_without_balls_and_an_episode_without_a_token_are_refused():
    with pytest.raises(ValueError, match="at least one ball; got 0"):
        agent_of().reset(0)
    with pytest.raises(ValueError, match="at least one token of 10 steps; got 9"):
        agent_of().reset(3, steps=9)
    assert drive(agent_of(episode=10), 10).shape == (10, 3, 2)


def test_more_denoising_steps_than_levels_are_as_many_as_there_are():
    assert drive(agent_of(steps=500, lookahead=1, scale=0), 1).shape == (1, 3, 2)


def test_a_model_needs_its_codec_and_the_maze_a_known_name():
    bare = DiffusionForcing(RNN(24, hidden=8, levels=10), NoiseSchedule(cosine(10)))
    with pytest.raises(ValueError, match="codec"):
        PlanningAgent(bare, "umaze")
    with pytest.raises(ValueError, match="there is no maze 'tiny'"):
        PlanningAgent(model_of(), "tiny")


def test_plans_begin_as_noise():
    agent = agent_of(lookahead=1)
    agent.sampler = agent.sampler.along(pin(agent.sampler.matrix_for(agent.model.schedule, 4), 2))
    with pytest.raises(ValueError, match="begins with token 2 below level K"):
        drive(agent, 1)


# Invalid plans.


def spoil(agent, times, balls=None, value=np.nan):
    """The next plans (of each ball, or of some) hold impossible numbers. Returns the balls of each sample, as they come."""
    calls, sample = [], agent._sample

    def spoilt(problem, *others):
        frames = sample(problem, *others)
        if len(calls) < times:
            frames[np.isin(problem.balls, problem.balls if balls is None else balls), 3, 2] = value
        calls.append(problem.balls.tolist())
        return frames

    agent._sample = spoilt
    return calls


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6, -30.0])
@pytest.mark.parametrize("times", [1, 2])
def test_an_invalid_plan_is_sampled_again(times, value):
    agent = agent_of(lookahead=2, scale=0)
    calls = spoil(agent, times, [1], value)
    actions = drive(agent, 3)
    assert calls == [[0, 1, 2], *[[1]] * times], "only the ball whose plan was invalid"
    assert (agent.counts.bad, agent.counts.given_up, agent.counts.plans) == (times, 0, 3)
    assert np.isfinite(actions).all()
    assert (actions[:, 1] != 0).any()


def test_a_ball_without_a_valid_plan_applies_no_force_until_the_next_plan():
    agent = agent_of(lookahead=2, replan=4)
    spoil(agent, 3, [1])
    actions = drive(agent, 5)
    assert np.isfinite(actions).all()
    assert (actions[:4, 1] == 0).all()
    assert (actions[:4, [0, 2]] != 0).any((0, 2)).all()
    assert (actions[4, 1] != 0).any(), "the next plan is valid"
    assert (agent.counts.bad, agent.counts.given_up) == (3, 1)
    assert all(np.isfinite(errors).all() for errors in agent.counts.errors)


@pytest.mark.parametrize("options", [{}, {"memory": 2}, {"candidates": 2}])
def test_a_model_that_outputs_only_nan_moves_nothing(options):
    model = model_of()
    with torch.no_grad():
        for parameter in model.backbone.parameters():
            parameter.fill_(torch.nan)
    agent = PlanningAgent(model, "umaze", **quick(lookahead=2, **options))
    agent.reset(3, steps=60)
    assert not drive(agent, 25).any()
    assert (agent.counts.bad, agent.counts.given_up, agent.counts.plans) == (27, 9, 9)


def test_by_a_reward_all_plans_are_sampled_again():
    agent = agent_of(lookahead=2)
    calls = spoil(agent, 1, [1])
    agent.act(HERE, reward=reach(GOAL.repeat(3, 1)))
    assert calls == [[0, 1, 2]] * 2
    assert (agent.counts.bad, agent.counts.given_up) == (1, 0)


# Runs.


def run_of(folder, monkeypatch, **changes):
    """The folder and the experiment of a run in the maze, after one step."""
    monkeypatch.setenv("DFORCE_CACHE", str(folder))
    experiment = replace(small("maze2d-umaze"), task__transitions=20_000, train__steps=1, **changes)
    open_run(folder / "run", "maze2d-umaze", experiment, "dforce train maze2d-umaze")
    train(experiment, folder / "run", quiet=True)
    return experiment


def test_an_agent_comes_from_a_run_with_its_options(tmp_path, monkeypatch):
    experiment = run_of(tmp_path, monkeypatch, task__sampler__steps=3, task__plan__lookahead=2)
    agent = PlanningAgent.from_pretrained(tmp_path / "run")
    assert agent.maze is UMAZE
    assert (agent.sampler, agent.options) == (experiment.task.sampler, experiment.task.plan)
    other = PlanningAgent.from_pretrained(str(tmp_path / "run"), **QUICK, seed=3)
    assert (other.sampler, other.options, other.seed) == (*QUICK.values(), 3)
    third = PlanningAgent(DiffusionForcing.from_pretrained(tmp_path / "run" / "model"), UMAZE, **QUICK, seed=3)
    np.testing.assert_array_equal(drive(other, 3), drive(third, 3))


def test_a_run_of_another_task_is_refused(tmp_path):
    experiment = small()
    open_run(tmp_path / "run", "composition", experiment, "dforce train composition")
    train(replace(experiment, train__steps=1), tmp_path / "run", quiet=True)
    with pytest.raises(ValueError, match="was trained for Composition, not for planning"):
        PlanningAgent.from_pretrained(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="is not a run"):
        PlanningAgent.from_pretrained(tmp_path / "nowhere")


def test_large_batches_are_planned_in_bfloat16_where_that_is_quick(monkeypatch):
    """Quicker, and the same plans to within the format's rounding."""
    asked = []
    monkeypatch.setattr("diffusion_forcing.planning.agent.resolve", lambda *_: asked.append(1) or "float32")
    balls = Balls("umaze", 16, multi=True, seed=0)
    agent = PlanningAgent.from_pretrained("maze2d-umaze")

    def plans():
        agent.reset(16)
        return agent.propose(balls.observation, balls.goal, horizon=8).position

    monkeypatch.setattr("diffusion_forcing.planning.agent.LARGE", 16 * 8 + 1)
    exact = plans()
    assert asked == []
    monkeypatch.setattr("diffusion_forcing.planning.agent.LARGE", 16 * 8)
    assert torch.equal(plans(), exact)
    assert asked
    if precision.resolve("auto", "cpu") == "bfloat16":
        monkeypatch.setattr("diffusion_forcing.planning.agent.resolve", precision.resolve)
        rounded = plans()
        assert not torch.equal(rounded, exact)
        assert (rounded - exact).norm(dim=-1).median() < 0.05
