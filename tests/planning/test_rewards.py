"""Rewards of a plan, by hand and as an agent uses them."""

import numpy as np
import pytest
import torch
from mazes import GOAL, agent_of, line

from diffusion_forcing.planning.rewards import Trajectory, arrive, avoid, reach, scaled, visit


def test_rewards_by_hand():
    path, origin = line((0, 3), (0, 1), (4, 0)), torch.zeros(1, 2)
    assert reach(origin)(path).item() == pytest.approx(-8, abs=1e-3)
    assert scaled(reach(origin), torch.tensor([0.5]))(path).item() == pytest.approx(-4, abs=1e-3)
    assert arrive(origin, sharpness=100.0)(path).item() == pytest.approx(-3, abs=1e-2), "the smallest distance, for each of three frames"
    assert arrive(origin)(path).item() > arrive(origin)(line((0, 3), (0, 2), (4, 0))).item()
    assert visit([torch.tensor([[0.0, 3.0]]), origin])(path).item() == pytest.approx(-(0 + 2 + 4), abs=0.03), "two frames, then one"
    assert visit([origin])(path).item() == pytest.approx(reach(origin)(path).item())
    assert avoid(origin, 2.0)(path).item() == pytest.approx(-3, abs=1e-3), "one frame, a metre deep"
    assert avoid(origin, 0.5)(path).item() == 0
    assert path.velocity.shape == path.position.shape == (1, 3, 2)


def test_waypoints_passed_are_not_visited_again():
    first, second = torch.tensor([[0.0, 3.0]]), torch.zeros(1, 2)
    path, reward = line((0, 3), (0, 1), (4, 0)), visit([first, second])
    reward.observe(torch.tensor([[0.0, 2.0]]))
    assert reward.passed.tolist() == [0]
    reward.observe(torch.tensor([[0.3, 2.8]]))
    assert reward.passed.tolist() == [1]
    assert reward(path).item() == pytest.approx(reach(second)(path).item())
    reward.observe(torch.tensor([[0.0, 0.1]]))
    assert reward.passed.tolist() == [1], "the last point stays"
    with pytest.raises(ValueError, match="at least one point"):
        visit([])


def test_each_ball_passes_waypoints_for_itself():
    first, second = torch.tensor([[0.0, 3.0]]), torch.zeros(1, 2)
    path, reward = line((0, 3), (0, 1), (4, 0)), visit([first, second])
    reward.observe(torch.tensor([[0.0, 3.0], [1.0, 1.0]]))
    assert reward.passed.tolist() == [1, 0]
    twice = Trajectory(*(part.repeat(2, 1, 1) for part in path))
    assert reward(twice).tolist() == pytest.approx([reach(second)(path).item(), visit([first, second])(path).item()])


def test_an_agent_reports_positions_to_a_tracking_reward():
    agent = agent_of(number=2)
    reward = visit([torch.tensor([[1.0, 1.0]]), torch.tensor([[3.0, 1.0]])])
    agent.act(np.array([[1.0, 1.1, 0, 0], [3.0, 1.0, 0, 0]]), reward=reward)
    assert reward.passed.tolist() == [1, 0]


def test_rewards_take_several_plans_of_each_ball_side_by_side():
    goal = torch.tensor([[0.0, 0.0], [4.0, 0.0]])
    plans = Trajectory(torch.zeros(6, 1, 2), torch.zeros(6, 1, 4))
    np.testing.assert_allclose(reach(goal)(plans), [-0.01] * 3 + [-4.0] * 3, atol=1e-3)


def test_rewards_are_smooth_at_the_goal():
    position = torch.zeros(1, 3, 4, requires_grad=True)
    total = sum(reward(Trajectory(position[..., :2], position)) for reward in (reach(GOAL * 0), arrive(GOAL * 0), avoid(GOAL * 0, 1.0)))
    total.sum().backward()
    assert torch.isfinite(position.grad).all()
