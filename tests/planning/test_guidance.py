"""Guidance of plans: it raises the reward, and the model disagrees with plans it would not have sampled."""

import dataclasses

import numpy as np
import pytest
import torch
from mazes import GOAL, agent_of, at_rest, goals

from diffusion_forcing.planning.guidance import disagreement, guidance_scale
from diffusion_forcing.planning.options import PlanOptions
from diffusion_forcing.planning.rewards import arrive, avoid, reach, visit

both = pytest.mark.parametrize("kind", ["transformer", "rnn"])


def proposed(reward, kind="transformer", number=6, tokens=6, **options):
    """Plans from one place, the same noise for all options."""
    agent = agent_of(kind, number, **{"steps": 5, **options})
    plan = agent.propose(at_rest(*[(3, 2)] * number), reward=reward, horizon=tokens)
    assert agent.counts.bad == 0
    return plan


REWARDS = {
    "reach": reach(GOAL),
    "arrive": arrive(GOAL),
    "visit": visit([GOAL, torch.tensor([[1.0, 3.0]])]),
    "reach and avoid": lambda plan: reach(GOAL)(plan) + avoid(torch.tensor([[2.0, 3.0]]), 0.5)(plan),
    "custom": lambda plan: -0.1 * plan.velocity.square().sum((1, 2)) - plan.action.square().sum((1, 2)),
}


@both
@pytest.mark.parametrize("name", REWARDS)
def test_guidance_raises_the_reward(name, kind):
    reward = REWARDS[name]
    none, weak, strong = (reward(proposed(reward, kind, scale=scale)).mean().item() for scale in (0.0, 0.005, 0.02))
    assert none < weak < strong


@both
@pytest.mark.parametrize("futures", ["resample", "fresh"])
def test_monte_carlo_guidance_raises_the_reward_too(kind, futures):
    reward = REWARDS["reach"]
    options = {"matrix": "pyramid", "futures": futures, "steps": 3}
    none, one, three = (
        reward(proposed(reward, kind, scale=scale, draws=draws, **options)).mean().item() for scale, draws in ((0, 1), (0.02, 1), (0.02, 3))
    )
    assert none < one
    assert none < three
    assert one != three


def test_avoid_keeps_away():
    goal, disc = REWARDS["reach"], avoid(torch.tensor([[2.0, 2.0]]), 1.0, strength=10.0)
    without, aware = (proposed(reward, scale=0.02) for reward in (goal, lambda plan: goal(plan) + disc(plan)))
    assert disc(aware).mean() > disc(without).mean()


def test_guidance_acts_on_its_levels_only():
    reward = REWARDS["reach"]
    none, never, late, always = (
        proposed(reward, scale=scale, guidance_levels=levels).position
        for scale, levels in ((0, (0, 1)), (0.02, (0, 0)), (0.02, (0, 0.5)), (0.02, (0, 1)))
    )
    assert torch.equal(none, never)
    assert 0 < (none - late).norm() < (none - always).norm()


def test_the_scale_follows_a_power_law_from_the_shortest_plan_to_the_whole_episode():
    options = PlanOptions(scale=0.1, short_plan_scale=3.0)
    scales = [guidance_scale(options, tokens, 30) for tokens in range(1, 31)]
    assert scales[:4] == pytest.approx([3.0] * 4)
    assert scales[-1] == pytest.approx(0.1)
    assert (np.diff(scales[3:]) < 0).all()
    power = np.diff(np.log(scales[3:])) / np.diff(np.log(np.arange(4, 31)))
    np.testing.assert_allclose(power, power[0])
    assert guidance_scale(dataclasses.replace(options, scale=0.0), 2, 30) == 0, "no guidance at any length"
    assert guidance_scale(dataclasses.replace(options, lookahead=2), 2, 30) == 0.1


def test_the_model_disagrees_with_a_plan_it_would_not_have_sampled():
    agent = agent_of(number=2, episode=300)
    problem = agent._problem(at_rest((1, 1), (3, 1)), goals(agent), None)
    own = torch.from_numpy(agent._plan(problem, 8))
    bent = own.clone()
    bent[1, 40:, 2:4] += 2 * torch.sin(torch.arange(40.0))[:, None]  # a ball that jumps about
    before, after = (disagreement(agent.model, agent._context(problem), plans, agent.generator) for plans in (own, bent))
    assert after[1] > 4 * before[1]
    assert after[0] < 2 * before[0]
