"""Horizon control: how long plans are, when they are replaced, and what becomes of those that fail."""

import dataclasses

import numpy as np
import pytest
import torch
from mazes import GOAL, STACK, UMAZE, agent_of, at_rest, drive, goals, line, record_plans

from diffusion_forcing.planning import agent as planning
from diffusion_forcing.planning.horizon import HorizonControl, plan_lengths
from diffusion_forcing.planning.options import PlanOptions
from diffusion_forcing.planning.rewards import Trajectory, reach


@pytest.mark.parametrize(("shortest", "longest"), [(4, 30), (4, 80), (1, 7), (4, 4), (9, 3), (1, 1)])
def test_lengths_of_plans_rise_from_the_shortest_to_the_whole_episode(shortest, longest):
    lengths = plan_lengths(shortest, longest)
    assert lengths[0] == min(shortest, longest)
    assert lengths[-1] == longest
    assert (np.diff(lengths) > 0).all()
    assert (lengths[1:] <= np.maximum(lengths[:-1] + 1, np.round(1.25 * lengths[:-1]))).all()


def test_arrival_is_the_first_token_within_the_goal():
    plans = np.zeros((3, 40, 6), dtype=np.float32)
    plans[..., 2:4] = 9
    plans[0, 25:, 2:4] = plans[1, 0, 2:4] = 1
    arrives, token = HorizonControl(PlanOptions(), 3, 30, STACK).arrival(plans, np.ones((3, 2)))
    assert arrives.tolist() == [True, True, False]
    assert token.tolist() == [2, 0, 30]


def test_a_fixed_lookahead_replans_after_so_many_actions():
    agent = agent_of(lookahead=2, replan=7)
    plans = record_plans(agent)
    drive(agent, 22)
    assert plans == [(t, [0, 1, 2], 2) for t in (0, 7, 14, 21)]
    assert agent.counts.plans == 12
    assert [len(errors) for errors in agent.counts.errors] == [3, 3, 3]


def test_a_plan_is_replaced_at_its_end_at_the_latest():
    agent = agent_of(lookahead=1, replan=25)
    plans = record_plans(agent)
    drive(agent, 21)
    assert [plan[0] for plan in plans] == [0, 10, 20]


@pytest.mark.parametrize("episode", [40, 47])
@pytest.mark.parametrize("by_reward", [False, True])
def test_plans_end_with_the_episode(episode, by_reward):
    agent = agent_of(episode=episode, replan=6, short_plan_replan=3)
    plans = record_plans(agent)
    drive(agent, episode + 5, **({"reward": reach(GOAL.repeat(3, 1))} if by_reward else {}))
    assert {plan[2] for plan in plans} == {1, 2, 3, 4}, "each a token shorter at times"
    assert all(t + STACK * tokens < max(episode, t + 1) + STACK for t, _, tokens in plans)
    assert plans[-1][0] > episode, "after the end plans of one token follow"


def test_a_plan_that_arrives_makes_the_next_ones_short_and_frequent(monkeypatch):
    """The next plan has the tokens until arrival and extra_tokens, rounded up to one of few lengths."""
    agent = agent_of(number=2, episode=300, replan_error=10.0, verify_tolerance=10.0)
    lengths, frames_to_goal = [], 25

    def straight(problem, tokens, on_step):
        lengths.append((agent.time, problem.balls.tolist(), tokens))
        frames = np.zeros((len(problem.balls), tokens * STACK, 6), dtype=np.float32)
        frames[..., 2:4] = (3, 1)
        frames[problem.balls == 0, frames_to_goal:, 2:4] = UMAZE.goal
        return frames

    monkeypatch.setattr(agent, "_sample", straight)
    for t in range(32):
        frames_to_goal = 25 if t < 10 else 0
        agent.act(at_rest((3, 1), (3, 1)), goals(agent))
    own, other = ([(t, tokens) for t, balls, tokens in lengths if ball in balls] for ball in (0, 1))
    assert own == [(0, 4), (5, 6), (15, 6), (25, 4), (30, 4)], "the shortest plan is replaced after five actions"
    assert other[:5] == [(0, 4), (0, 8), (0, 16), (0, 30), (10, 29)], "a plan that does not arrive is made again at twice the length"


def test_a_plan_that_fails_is_replaced_by_one_to_the_end_with_half_the_guidance(monkeypatch):
    agent, observation, lengths = agent_of(number=2, episode=300, short_plan_replan=10), at_rest((1, 1), (3, 1)), {}
    plan_of = agent._plan

    def recorded(problem, length, *others):
        for ball in problem.balls.tolist():
            lengths.setdefault(ball, length)
        return plan_of(problem, length, *others)

    monkeypatch.setattr(agent, "_plan", recorded)
    path = Trajectory(*(part.repeat(2, 1, 1) for part in line((1, 1), (1, 2), (3, 3))))
    problem = agent._problem(observation, goals(agent), None)
    before = agent._reward(problem, 30)(path)
    agent.act(observation, goals(agent))
    for failures in (1, 2):
        lengths.clear()
        agent.horizon.tokens[:] = 4  # as if the plans had arrived
        agent.plan[:, :, 2:4] = observation[:, None, :2] + np.array([[[0.0, 0.5]], [[0.0, 0.01]]])  # the first ball is not where planned
        while agent.age[0] < agent.horizon.interval[0]:
            agent.act(observation, goals(agent))
        agent.act(observation, goals(agent))
        assert lengths[0] == 30 - (agent.time - 1) // 10, "to the end of the episode"
        assert lengths[1] == 4
        assert agent.horizon.failures.tolist() == [failures, 0]
        torch.testing.assert_close(agent._reward(problem, 30)(path), before * torch.tensor([0.5**failures, 1.0]))
    agent.plan[:, :, 2:4] = observation[:, None, :2]  # now the plans hold
    agent.age[:] = agent.horizon.interval
    agent.act(observation, goals(agent))
    assert agent.horizon.failures.tolist() == [1, 0], "a plan that holds takes one failure back"


def test_a_plan_the_model_disagrees_with_is_made_again_at_twice_the_length(monkeypatch):
    agent = agent_of(number=2, episode=300, replan_error=10.0)
    monkeypatch.setattr(agent.horizon, "arrival", lambda plans, goal: (np.ones(len(plans), bool), np.full(len(plans), 5)))
    monkeypatch.setattr(planning, "disagreement", lambda model, context, plans, generator: torch.tensor([1.0, 0.1])[: len(plans)])
    plans = record_plans(agent)
    agent.act(at_rest((1, 1), (3, 1)), goals(agent))
    agent.horizon.tokens[:], agent.age[:] = 8, agent.horizon.interval
    plans.clear()
    agent.act(at_rest((1, 1), (3, 1)), goals(agent))
    assert plans == [(1, [0, 1], 8), (1, [0], 16), (1, [0], 30)], "only the first ball's, up to the end of the episode"


def test_holding_has_a_scale_of_its_own_and_other_short_plans_are_verified(monkeypatch):
    """The first ball is in its goal, the second is not; the model disagrees with every plan."""
    agent = agent_of(number=2, episode=300, hold_scale=6.0, short_plan_scale=2.0, scale=0.1)
    problem = agent._problem(at_rest((1, 1), (3, 1)), goals(agent), None)
    path = Trajectory(*(part.repeat(2, 1, 1) for part in line((1, 1), (1, 2), (3, 3))))
    for length, hold in ((4, 3.0), (5, 1.0)):
        weight = agent._reward(problem, length)(path) / reach(GOAL.repeat(2, 1))(path)
        torch.testing.assert_close(weight, torch.tensor([hold, 1.0]))
    monkeypatch.setattr(agent.horizon, "arrival", lambda plans, goal: (np.ones(len(plans), bool), np.full(len(plans), 1)))
    monkeypatch.setattr(planning, "disagreement", lambda model, context, plans, generator: torch.ones(len(plans)))
    plans = np.zeros((2, 4 * STACK, 6), dtype=np.float32)
    assert agent._rejected(problem, plans).tolist() == [False, True]
    agent.options = dataclasses.replace(agent.options, hold_scale=None)
    assert agent._rejected(problem, plans).tolist() == [False, False], "one scale for both: no short plan is verified"


def test_one_token_ahead_is_a_policy_with_the_same_weights():
    planner, policy = agent_of(episode=300, lookahead=30), agent_of(episode=300, lookahead=1)
    plans = record_plans(planner), record_plans(policy)
    drive(planner, 1)
    drive(policy, 1)
    assert [recorded[0][2] for recorded in plans] == [30, 1]
    assert (planner.plan.shape[1], policy.plan.shape[1]) == (300, 10)
    for one, other in zip(planner.model.parameters(), policy.model.parameters(), strict=True):
        assert torch.equal(one, other)
