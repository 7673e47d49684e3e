"""What the agent is compared with, and the episodes in which it is: Diffuser, the scripted controller, random forces."""

import numpy as np
import pytest
import torch
from mazes import STACK, UMAZE, codec, learned, model_of

from diffusion_forcing.planning.agent import PlanningAgent, PlanOptions
from diffusion_forcing.planning.baselines.diffuser import Diffuser
from diffusion_forcing.planning.baselines.scripted import RandomPolicy, ScriptedPolicy
from diffusion_forcing.planning.data import present_frames
from diffusion_forcing.planning.envs.maze2d import MAZES, Balls
from diffusion_forcing.planning.episodes import Episodes, play


def diffuser(pd=False, number=3, **options) -> Diffuser:
    policy = Diffuser(learned(), UMAZE, **{"steps": 3, "pd": pd, **options})
    policy.reset(number)
    return policy


def token(observation):
    return codec().encode(present_frames(torch.from_numpy(observation).float(), STACK))


# Diffuser.


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
        assert policy.age.tolist() == [t + 1 if pd else t % 130 + 1] * number
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


def test_the_pd_controller_steers_to_where_the_plan_will_be():
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
def test_diffuser_needs_a_model_that_sees_everything(kind):
    with pytest.raises(ValueError, match="Diffuser sees the whole sequence; use a model with causal=False"):
        Diffuser(model_of(kind), UMAZE, pd=True)


# Episodes.


@pytest.mark.parametrize("name", MAZES)
@pytest.mark.parametrize("multi", [False, True])
def test_the_scripted_policy_arrives_and_stays(name, multi):
    episodes = play(ScriptedPolicy(MAZES[name]), Balls(name, 6, multi=multi, seed=0))
    assert episodes.reached.all()
    assert episodes.stayed.mean() > 0.95
    assert episodes.summary()["score"] > 100


def test_a_new_episode_of_the_scripted_policy_knows_nothing_of_the_last():
    policy = ScriptedPolicy(UMAZE, seed=0)
    for seed in (0, 1):
        assert play(policy, Balls("umaze", 4, seed=seed)).reached.all()


def test_random_forces_are_those_of_their_seed():
    one, same, other = (play(RandomPolicy(UMAZE, seed), Balls("umaze", 2, seed=5), steps=20).observations for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


class Still:
    """Never pushes."""

    def reset(self, number, *, steps=None):
        self.number = number

    def act(self, observation, goal):
        assert observation.shape == (self.number, 4)
        assert goal.shape == (self.number, 2)
        return np.zeros((self.number, 2))


def test_play_keeps_what_happened_in_order():
    balls = Balls("umaze", 3, multi=True, seed=2)
    begin, goals, told = balls.observation, balls.goal.copy(), []
    episodes = play(Still(), balls, steps=12, progress=lambda *words: told.append(words), what="standing")
    assert [part.shape for part in (episodes.observations, episodes.rewards, episodes.touched, episodes.goals)] == [
        (3, 13, 4), (3, 12), (3, 12), (3, 2),
    ]  # fmt: skip
    np.testing.assert_array_equal(episodes.observations[:, 0], begin)
    np.testing.assert_array_equal(episodes.observations[:, -1], balls.observation)
    np.testing.assert_array_equal(episodes.goals, goals)
    near = np.linalg.norm(episodes.observations[:, 1:, :2] - goals[:, None], axis=-1) <= 0.5
    np.testing.assert_array_equal(episodes.rewards, near, "the reward is of where a step leads")
    assert told == [("standing", 3 * t, 36) for t in range(1, 13)]
    assert episodes.plans == []
    balls.reset()
    np.testing.assert_array_equal(episodes.goals, goals)


def test_an_episode_lasts_as_long_as_the_mazes_own():
    assert play(Still(), Balls("umaze", 1)).rewards.shape == (1, 300)


def test_play_keeps_the_plans_of_the_first_ball_and_when_they_were_made():
    agent = PlanningAgent(learned(), UMAZE, PlanOptions(steps=1, scale=0, lookahead=2, replan=8))
    episodes = play(agent, Balls("umaze", 2, seed=0), steps=20)
    assert [t for t, _ in episodes.plans] == [0, 8, 16]
    assert all(plan.shape == (20, 6) for _, plan in episodes.plans)
    assert (episodes.plans[0][1] != episodes.plans[1][1]).any(), "each its own, though the agent writes over them"
    episodes = play(diffuser(number=2), Balls("umaze", 2, seed=0), steps=33)
    assert [(t, plan.shape) for t, plan in episodes.plans] == [(0, (40, 6))], "whole tokens, for as long as the episode lasts"


def hand_made(rewards, touched=None) -> Episodes:
    rewards = np.array(rewards, dtype=float)
    number, steps = rewards.shape
    touched = np.zeros_like(rewards, dtype=bool) if touched is None else np.array(touched, dtype=bool)
    return Episodes(UMAZE, np.zeros((number, steps + 1, 4)), rewards, touched, np.zeros((number, 2)))


def test_measures_by_hand():
    episodes = hand_made([[0, 0, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], [[1, 1, 0, 0, 0], [0] * 5, [0] * 5])
    assert episodes.reached.tolist() == [True, False, True]
    assert episodes.first.tolist() == [2, 5, 0]
    assert episodes.stayed.tolist() == pytest.approx([2 / 3, 1])
    expected = [100 * (total - 23.85) / (161.86 - 23.85) for total in (2, 0, 5)]
    assert episodes.scores.tolist() == pytest.approx(expected)
    summary = episodes.summary()
    assert summary == pytest.approx(
        {
            "score": np.mean(expected), "score_stderr": np.std(expected, ddof=1) / 3**0.5, "success": 2 / 3, "first_reach": 1.0,
            "stay": 5 / 6, "wall_contact": 2 / 15, "episodes": 3,
        }
    )  # fmt: skip


def test_scores_of_doing_nothing_and_of_being_there_all_along():
    never, always = hand_made(np.zeros((1, 300))), hand_made(np.ones((1, 300)))
    assert never.summary()["score"] == pytest.approx(-17.28, abs=0.01)
    assert always.summary()["score"] == pytest.approx(200.1, abs=0.1)
    assert (always.first[0], always.stayed[0]) == (0, 1)
    assert (never.first[0], len(never.stayed)) == (300, 0)


def test_what_cannot_be_said_of_episodes_is_no_number():
    alone, never = hand_made([[0, 1]]).summary(), hand_made([[0, 0], [0, 0]]).summary()
    assert np.isnan(alone["score_stderr"])
    assert np.isnan([never["first_reach"], never["stay"]]).all()
    assert never["success"] == 0
    assert never["score_stderr"] == 0


def test_reached_at_the_last_step_is_reached():
    episodes = hand_made([[0, 0, 1]])
    assert (episodes.first[0], episodes.stayed[0]) == (2, 1)
