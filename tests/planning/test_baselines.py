"""What the agent is compared with: Diffuser, the scripted controller, random forces, and the agent with its network zeroed."""

import numpy as np
import pytest
import torch
from mazes import STACK, UMAZE, codec, model_of, trained_model

from diffusion_forcing.planning.agent import PlanningAgent
from diffusion_forcing.planning.baselines.diffuser import Diffuser
from diffusion_forcing.planning.baselines.scripted import RandomPolicy, ScriptedPolicy
from diffusion_forcing.planning.baselines.zeroed import zero_network
from diffusion_forcing.planning.envs.maze2d import MAZES, Balls
from diffusion_forcing.planning.episodes import play
from diffusion_forcing.planning.tokens import present_frames
from diffusion_forcing.sampler import Sampler


def diffuser(pd=False, number=3, **options) -> Diffuser:
    policy = Diffuser(trained_model(), UMAZE, **{"steps": 3, "pd": pd, **options})
    policy.reset(number)
    return policy


def token(observation):
    return codec().encode(present_frames(torch.from_numpy(observation).float(), STACK))


@pytest.mark.parametrize("pd", [False, True])
@pytest.mark.parametrize("number", [1, 3])
def test_diffuser_acts_to_the_end_of_the_episode_and_after_it(pd, number):
    policy, balls = diffuser(pd, number), Balls("umaze", number, multi=True, seed=0)
    for t in range(305):
        action = policy.act(balls.observation, balls.goal)
        assert action.shape == (number, 2)
        assert action.dtype == np.float32
        assert np.isfinite(action).all()
        assert np.abs(action).max() <= 1
        assert (policy.new_plan() is not None) == (t == 0 if pd else t % 130 == 0)
        balls.step(action)
    plans = 1 if pd else 3
    assert policy.counts.plans == plans * number, "the controller holds the last position, own actions want a new plan"
    assert [len(errors) for errors in policy.counts.errors] == [number] * plans


def test_diffuser_holds_start_and_goal_while_it_denoises(monkeypatch):
    policy, balls = diffuser(), Balls("umaze", 3, multi=True, seed=0)
    seen, predict = [], policy.model.predict

    def spy(x, k):
        seen.append((x, k))
        return predict(x, k)

    monkeypatch.setattr(policy.model, "predict", spy)
    policy.act(balls.observation, balls.goal)
    begin, end = token(balls.observation), token(np.concatenate([balls.goal, np.zeros((3, 2))], axis=1))
    assert len(seen) == 3
    for x, k in seen:
        assert x.shape == (3, 14, 24)
        assert torch.equal(x[:, :1], begin)
        assert torch.equal(x[:, -1:], end)
        assert len(k.unique()) == 1, "one level for all"
    assert [int(k[0, 0]) for _, k in seen] == policy.model.schedule.ladder(3).flip(0)[:-1].tolist()
    assert policy.plan.shape == (3, 130, 6)
    torch.testing.assert_close(torch.from_numpy(policy.plan[:, -STACK:]), codec().decode(end))


def test_the_pd_controller_follows_the_planned_positions():
    policy, own = diffuser(pd=True), diffuser()
    balls = Balls("umaze", 3, seed=0)
    for t in range(5):
        action, planned = policy.act(balls.observation, balls.goal), own.act(balls.observation, balls.goal)
        np.testing.assert_array_equal(policy.plan, own.plan)
        np.testing.assert_array_equal(planned, np.clip(own.plan[:, t, :2], -1, 1))
        now = policy.plan[:, t]
        wanted = 10 * (now[:, 2:4] - balls.observation[:, :2]) + now[:, 4:] - balls.observation[:, 2:]
        np.testing.assert_allclose(action, np.clip(wanted, -1, 1), rtol=1e-5)
        balls.step(action)


def test_the_seed_of_diffuser_decides():
    balls = Balls("umaze", 3, seed=0)
    one, same, other = (diffuser(seed=seed).act(balls.observation, balls.goal) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


def test_diffuser_plans_anew_after_a_reset():
    policy, balls = diffuser(), Balls("umaze", 2, seed=0)
    policy.reset(2)
    policy.act(balls.observation, balls.goal)
    first = policy.plan
    policy.reset(2)
    assert policy.counts.plans == 0
    policy.act(balls.observation, balls.goal)
    assert (policy.plan != first).any()


@pytest.mark.parametrize("kind", ["rnn", "causal"])
def test_diffuser_needs_a_model_that_is_not_causal(kind):
    with pytest.raises(ValueError, match="causal=False"):
        Diffuser(model_of(kind), UMAZE, pd=True)


@pytest.mark.parametrize("name", MAZES)
@pytest.mark.parametrize("multi", [False, True])
def test_the_scripted_policy_arrives_and_stays(name, multi):
    episodes = play(ScriptedPolicy(MAZES[name]), Balls(name, 6, multi=multi, seed=0))
    assert episodes.reached.all()
    assert episodes.stayed.mean() > 0.95
    assert episodes.summary()["score"] > 100


def test_the_scripted_policy_arrives_after_a_reset_too():
    policy = ScriptedPolicy(UMAZE, seed=0)
    for seed in (0, 1):
        assert play(policy, Balls("umaze", 4, seed=seed)).reached.all()


def test_random_forces_are_those_of_their_seed():
    one, same, other = (play(RandomPolicy(UMAZE, seed), Balls("umaze", 2, seed=5), steps=20).observations for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


# The control.


def test_a_zeroed_network_outputs_zeros_and_the_model_keeps_its_own():
    model, zeroed = trained_model(), zero_network(trained_model())
    x, k = torch.randn(2, 5, 24), torch.full((2, 5), 60)
    assert not zeroed.backbone(x, k, torch.zeros(2, 5, 0))[0].any()
    assert model.backbone(x, k, torch.zeros(2, 5, 0))[0].any()
    agent = PlanningAgent(zeroed, UMAZE, sampler=Sampler(steps=2))
    assert np.isfinite(play(agent, Balls("umaze", 2, seed=0), steps=12).observations).all()
