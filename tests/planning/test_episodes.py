"""Episodes of a policy, and their scores by hand."""

import numpy as np
import pytest
from mazes import UMAZE, trained_model

from diffusion_forcing.planning.agent import PlanningAgent
from diffusion_forcing.planning.baselines.diffuser import Diffuser
from diffusion_forcing.planning.envs.maze2d import Balls
from diffusion_forcing.planning.episodes import Episodes, Policy, play
from diffusion_forcing.planning.options import PlanOptions
from diffusion_forcing.sampler import Sampler


class Still(Policy):
    """Never pushes."""

    def reset(self, number, *, steps=None):
        self.number = number

    def act(self, observation, goal):
        assert observation.shape == (self.number, 4)
        assert goal.shape == (self.number, 2)
        return np.zeros((self.number, 2))


def test_play_records_what_happened_in_order():
    balls = Balls("umaze", 3, multi=True, seed=2)
    begin, goals, report = balls.observation, balls.goal.copy(), []
    episodes = play(Still(), balls, steps=12, progress=lambda *words: report.append(words), what="standing")
    assert [part.shape for part in (episodes.observations, episodes.rewards, episodes.touched, episodes.goals)] == [
        (3, 13, 4), (3, 12), (3, 12), (3, 2),
    ]  # fmt: skip
    np.testing.assert_array_equal(episodes.observations[:, 0], begin)
    np.testing.assert_array_equal(episodes.observations[:, -1], balls.observation)
    np.testing.assert_array_equal(episodes.goals, goals)
    near = np.linalg.norm(episodes.observations[:, 1:, :2] - goals[:, None], axis=-1) <= 0.5
    np.testing.assert_array_equal(episodes.rewards, near, "the reward is of where a step leads")
    assert report == [("standing", 3 * t, 36) for t in range(1, 13)]
    assert episodes.plans == []
    balls.reset()
    np.testing.assert_array_equal(episodes.goals, goals)


def test_an_episode_lasts_as_long_as_the_mazes_own():
    assert play(Still(), Balls("umaze", 1)).rewards.shape == (1, 300)


def test_play_records_the_plans_of_the_first_ball_and_their_steps():
    agent = PlanningAgent(trained_model(), UMAZE, sampler=Sampler(steps=1), options=PlanOptions(scale=0, lookahead=2, replan=8))
    episodes = play(agent, Balls("umaze", 2, seed=0), steps=20)
    assert [t for t, _ in episodes.plans] == [0, 8, 16]
    assert all(plan.shape == (20, 6) for _, plan in episodes.plans)
    assert (episodes.plans[0][1] != episodes.plans[1][1]).any(), "each its own, though the agent writes over them"
    episodes = play(Diffuser(trained_model(), UMAZE, steps=3, pd=False), Balls("umaze", 2, seed=0), steps=33)
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


def test_scores_of_never_and_of_always_being_in_the_goal():
    never, always = hand_made(np.zeros((1, 300))), hand_made(np.ones((1, 300)))
    assert never.summary()["score"] == pytest.approx(-17.28, abs=0.01)
    assert always.summary()["score"] == pytest.approx(200.1, abs=0.1)
    assert (always.first[0], always.stayed[0]) == (0, 1)
    assert (never.first[0], len(never.stayed)) == (300, 0)


def test_means_over_nothing_are_nan():
    alone, never = hand_made([[0, 1]]).summary(), hand_made([[0, 0], [0, 0]]).summary()
    assert np.isnan(alone["score_stderr"])
    assert np.isnan([never["first_reach"], never["stay"]]).all()
    assert never["success"] == 0
    assert never["score_stderr"] == 0


def test_reached_at_the_last_step_is_reached():
    episodes = hand_made([[0, 0, 1]])
    assert (episodes.first[0], episodes.stayed[0]) == (2, 1)
