"""MPPI in the mazes: exact forecasts, a plan carried on from step to step, and the limit of going straight."""

import numpy as np
import pytest

from diffusion_forcing.planning.baselines.mppi import MPPI
from diffusion_forcing.planning.envs.maze2d import MAZES, Balls, rewards, step

UMAZE = MAZES["umaze"]


def drive(start, steps, **options):
    """Rewards (steps, n) of balls that start at rest at start (n, 2), and the actions (steps, n, 2)."""
    position = np.array(start, dtype=float)
    velocity, goal = np.zeros_like(position), np.tile(UMAZE.goal, (len(position), 1))
    controller = MPPI(UMAZE, len(position), **options)
    earned, actions = [], []
    for _ in range(steps):
        action = controller.act(np.concatenate([position, velocity], axis=1), goal)
        position, velocity, _ = step(UMAZE, position, velocity, action)
        earned.append(rewards(position, goal))
        actions.append(action)
    return np.array(earned), np.array(actions)


def test_it_goes_where_straight_leads_and_waits_behind_a_wall():
    earned, actions = drive([(1, 3), (1, 2), (3, 1)], 120, samples=24, horizon=30)
    assert np.abs(actions).max() <= 1
    assert earned[-40:, :2].all(), "in sight of the goal it arrives and stays"
    assert not earned[:, 2].any(), "the way round leads away first"


def test_a_seed_repeats_and_another_does_not():
    first, again, other = (drive([(1, 3)], 5, seed=seed)[1] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_its_forecast_is_what_happens():
    """The cost of a variation is the summed distance that the environment then shows, walls included."""
    balls = Balls("umaze", 3, seed=4)
    controller = MPPI(UMAZE, 3, horizon=50, samples=4, noise=2.0)
    tried = controller._variations()
    np.testing.assert_array_equal(tried[:, 0], controller.plan)
    assert np.abs(tried).max() <= 1
    cost = controller._cost(balls.observation, balls.goal, tried)
    expected, touched = np.zeros(3), False
    for t in range(50):
        _, _, walls = balls.step(tried[:, 2, t])
        expected += np.linalg.norm(balls.position - balls.goal, axis=1)
        touched |= walls.any()
    assert touched
    np.testing.assert_allclose(cost[:, 2], expected, rtol=1e-12)


def test_the_rest_of_a_plan_is_where_the_next_one_begins():
    balls = Balls("umaze", 2, seed=5)
    controller = MPPI(UMAZE, 2, horizon=12)
    controller.act(balls.observation, balls.goal)
    rest = controller.plan.copy()
    np.testing.assert_array_equal(rest[:, -1], rest[:, -2])
    alone = MPPI(UMAZE, 2, horizon=12, samples=1)  # tries nothing but its plan
    alone.plan = rest.copy()
    np.testing.assert_array_equal(alone.act(balls.observation, balls.goal), rest[:, 0])
    np.testing.assert_array_equal(alone.plan[:, :-1], rest[:, 1:])


def test_balls_do_not_look_at_one_another():
    """The plan of a ball depends on its own state: another ball's state changes nothing of it."""
    balls = Balls("medium", 2, seed=6)
    one = MPPI(balls.maze, 2).act(balls.observation, balls.goal)
    balls.position[1] = Balls("medium", 1, seed=7).position[0]
    two = MPPI(balls.maze, 2).act(balls.observation, balls.goal)
    np.testing.assert_array_equal(one[0], two[0])
    assert (one[1] != two[1]).any()


def test_a_reset_begins_without_plans_for_any_number_of_balls():
    balls, policy = Balls("umaze", 3, seed=7), MPPI(UMAZE, seed=8)
    policy.reset(3)
    np.testing.assert_array_equal(policy.act(balls.observation, balls.goal), MPPI(UMAZE, 3, seed=8).act(balls.observation, balls.goal))
    assert policy.plan.any()
    policy.reset(2)
    assert policy.plan.shape[0] == 2
    assert not policy.plan.any()


def test_wrong_arguments_are_refused():
    for name in ("number", "horizon", "samples", "hold"):
        with pytest.raises(ValueError, match=f"{name} should be at least 1; got 0"):
            MPPI(UMAZE, **{name: 0})
    for name in ("noise", "temperature"):
        with pytest.raises(ValueError, match=f"{name} should be positive; got -1"):
            MPPI(UMAZE, **{name: -1})
    with pytest.raises(ValueError, match=r"steers 2 balls.*got \(1, 4\) and \(1, 2\)"):
        MPPI(UMAZE, 2).act(np.zeros((1, 4)), np.zeros((1, 2)))
