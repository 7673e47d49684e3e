"""Push-T: the dynamics of gym_pusht bit for bit, starts that are what was asked for, and the benchmark's score."""

import math
import os
from pathlib import Path

import numpy as np
import pytest

from diffusion_forcing.imitation.demonstrations import Demonstrations, read_pusht

pytest.importorskip("gym_pusht", reason="Push-T needs gym-pusht")

from gym_pusht.envs.pusht import PushTEnv
from pushing import replay

from diffusion_forcing.imitation.pusht.env import AREA, STEPS, THRESHOLD, PushT, _coverage

GOAL = [256.0, 256.0, math.pi / 4]


def near(seed, number=1, spread=20.0):
    """States (number, 5) of blocks about the goal, the disc aside."""
    rng = np.random.default_rng(seed)
    block = np.array(GOAL) + rng.normal(0, 1, (number, 3)) * [spread, spread, spread / 50]
    return np.concatenate([rng.uniform(20, 60, (number, 2)), block], axis=1)


def around(pusht, rng):
    """Actions that aim about the block, so that it is pushed."""
    return pusht.states[:, 2:4] + rng.normal(0, 60, (pusht.number, 2))


# Dynamics.


@pytest.mark.parametrize("seed", range(3))
def test_steps_are_those_of_gym_pusht_to_the_bit(seed):
    ours, theirs = PushT(1), PushTEnv()
    state, _ = theirs.reset(seed=seed)
    np.testing.assert_array_equal(ours.reset([seed])[0], state)
    rng = np.random.default_rng(seed)
    moved = 0.0
    for _ in range(60):
        action = np.clip(around(ours, rng), 0, 512)
        before = state
        state, _, terminated, _, info = theirs.step(action[0])
        states, coverage, done = ours.step(action)
        np.testing.assert_array_equal(states[0], state)
        assert coverage[0] == pytest.approx(info["coverage"], abs=1e-9)
        assert done[0] == terminated
        moved += np.abs(state[2:4] - before[2:4]).sum()
    assert moved > 10, "the block was pushed"


def test_coverage_is_that_of_gym_pusht_near_and_far():
    env = PushTEnv()
    pusht = PushT(60)
    pusht.reset_to(np.concatenate([near(0, 20, 5), near(1, 20, 30), near(2, 20, 100)]))
    covered = [_coverage(env) for env in pusht.envs]
    np.testing.assert_allclose(covered, [env._get_coverage() for env in pusht.envs], atol=1e-9)
    assert min(covered) == 0.0
    assert max(covered) > 0.9
    pusht.reset_to([30, 30, *GOAL])
    assert pusht.coverage == pytest.approx(1.0)
    env.reset(seed=0)
    assert sum(shape.area for shape in env.block.shapes) == pytest.approx(AREA)


@pytest.mark.parametrize("wild", [-1e6, 1e6])
def test_actions_are_clipped_to_the_bounds(wild):
    ours, bound = PushT(1), PushT(1)
    for pusht, value in ((ours, wild), (bound, np.clip(wild, 0, 512))):
        pusht.reset_to(near(0))
        for _ in range(3):
            pusht.step([[value, 200.0]])
    np.testing.assert_array_equal(ours.states, bound.states)


# Starts.


def test_a_start_is_where_it_was_asked_to_be_beside_a_wall_too():
    """The block lies 64 px from a wall. Placed as gym_pusht does it would first lie on the wall, and be thrown off."""
    states = near(3, 30, 20)
    states[0] = [100, 100, 250, 440, math.pi]
    pusht = PushT(30)
    np.testing.assert_allclose(pusht.reset_to(states)[:, :4], states[:, :4], atol=1e-9)
    np.testing.assert_allclose(pusht.states[:, 4], states[:, 4] % (2 * math.pi), atol=1e-9)
    for _ in range(5):
        pusht.step(states[:, :2])
    np.testing.assert_allclose(pusht.states[:, :4], states[:, :4], atol=1e-6)


def test_a_seed_is_a_start_and_draws_go_on_from_the_first():
    one, two = PushT(3, seed=7), PushT(3, seed=7)
    first = one.reset()
    np.testing.assert_array_equal(first, two.reset())
    assert not np.array_equal(first, one.reset())
    assert not np.array_equal(first, PushT(3, seed=8).reset())
    np.testing.assert_array_equal(one.reset([5, 6, 7])[[2, 0]], PushT(2).reset([7, 5]))


def test_the_published_starts_are_those_of_the_old_generator():
    """The disc stands where it was drawn; the block was turned about its centre of mass, so that its corners tell."""
    pusht = PushT(2)
    states = pusht.reset([100000, 100001], published=True)
    for state, seed in zip(states, (100000, 100001), strict=True):
        old = np.random.RandomState(seed)
        disc, block = old.randint(50, 450, 2), [old.randint(100, 400), old.randint(100, 400)]
        np.testing.assert_array_equal(state[:2], disc)
        angle = old.randn() * 2 * math.pi - math.pi
        assert state[4] == pytest.approx(angle % (2 * math.pi))
        a, b = pusht.envs[0].block.center_of_gravity
        turned = [math.cos(angle) * a - math.sin(angle) * b, math.sin(angle) * a + math.cos(angle) * b]
        np.testing.assert_allclose(state[2:4] + turned, np.add(block, [a, b]))
    assert not np.array_equal(states, pusht.reset([100000, 100001]))


# Episodes and scores.


def test_a_block_that_stands_on_the_goal_ends_its_episode_and_holds_still():
    pusht = PushT(2)
    pusht.reset_to([[30, 30, *GOAL], [30, 30, 150, 300, 0.3]])
    assert pusht.coverage[0] == pytest.approx(1)
    assert not pusht.done.any(), "a start is no success, a step is"
    assert pusht.score.tolist() == [0, 0]
    states, coverage, done = pusht.step([[30, 30], [30, 30]])
    assert done.tolist() == [True, False] == pusht.success.tolist()
    assert coverage[0] == pytest.approx(1)
    for _ in range(3):
        after, _, _ = pusht.step([[np.nan, np.nan], [200, 200]])
    np.testing.assert_array_equal(after[0], states[0])
    assert not np.array_equal(after[1], states[1])
    assert pusht.score[0] == 1
    assert pusht.max_coverage[0] == pytest.approx(1), "raw coverage is kept beside the score"
    assert pusht.reset().shape == (2, 5)
    assert pusht.max_coverage.tolist() == [0, 0]


def test_the_score_is_the_best_coverage_of_the_episode_over_the_threshold():
    pusht, rng = PushT(4), np.random.default_rng(0)
    pusht.reset_to(near(5, 4, 40))
    covered = [pusht.step(around(pusht, rng))[1] for _ in range(25)]
    np.testing.assert_array_equal(pusht.max_coverage, np.max(covered, axis=0))
    np.testing.assert_allclose(pusht.score, np.clip(np.max(covered, axis=0) / THRESHOLD, 0, 1))
    assert (pusht.max_coverage > np.array(covered)[-1]).any()


def test_episodes_end_after_300_steps():
    pusht = PushT(1)
    pusht.reset_to([30, 30, 150, 300, 0.3])
    for i in range(STEPS):
        assert not pusht.done.any(), i
        pusht.step([[30, 30]])
    assert (pusht.done.tolist(), pusht.success.tolist(), pusht.time) == ([True], [False], 300)
    with pytest.raises(ValueError, match="all episodes are over"):
        pusht.step([[30, 30]])


def test_an_image_shows_the_disc():
    pusht = PushT(2)
    with pytest.raises(ValueError, match="nothing to render yet"):
        pusht.render(0)
    pusht.reset_to([[256, 100, 150, 300, 0.3], [100, 256, 150, 300, 0.3]])
    image = pusht.render(0)
    assert (image.shape, image.dtype) == ((96, 96, 3), np.uint8)
    large = pusht.render(1, px=512).astype(int)
    blue = large[..., 2] - large[..., 0]
    assert blue[256, 100] > 100 > blue[100, 256]
    with pytest.raises(IndexError, match="2 environments, counted from 0; got 2"):
        pusht.render(2)


def test_bad_calls_are_refused():
    pusht = PushT(2)
    for call, words in (
        (lambda: PushT(0), "number"),
        (lambda: pusht.step(np.zeros((2, 2))), "all episodes are over"),
        (lambda: pusht.reset([1]), "got 1 seeds"),
        (lambda: pusht.reset([1, -1]), "seeds .* got -1"),
        (lambda: pusht.reset_to(np.zeros((3, 5))), r"\(5,\) or \(2, 5\).* got shape \(3, 5\)"),
        (lambda: pusht.reset_to([0, 0, 0, 0, np.nan]), "states are finite"),
        (lambda: (pusht.reset(), pusht.step(np.zeros(2))), r"actions are \(2, 2\).* got shape \(2,\)"),
        (lambda: pusht.step([[1, 2], [3, np.inf]]), r"got \[3.0, inf\] for environment 1"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


# Replays.


def test_a_demonstration_replays_exactly():
    """Recorded here by gym_pusht's own steps, in float32, the last action kept."""
    env, rng = PushTEnv(), np.random.default_rng(1)
    state, _ = env.reset(seed=11)
    states, actions, coverage = [], [], []
    for _ in range(40):
        action = (np.array(env.block.position) + rng.normal(0, 60, 2)).clip(0, 512).astype(np.float32)
        states.append(state)
        actions.append(action)
        state, _, _, _, info = env.step(action)
        coverage.append(info["coverage"])
    assert np.abs(states[-1][2:4] - states[0][2:4]).sum() > 5
    again, covered = replay(Demonstrations([np.array(actions)], [np.array(states)], fps=10), 0)
    assert again.shape == (41, 5)
    np.testing.assert_allclose(again[:-1], states, atol=2e-2)  # float32 starts, through contacts
    np.testing.assert_allclose(covered, coverage, atol=1e-3)


@pytest.mark.skipif("DFORCE_PUSHT" not in os.environ, reason="DFORCE_PUSHT does not point to the Push-T set")
def test_the_published_demonstrations_replay():
    data = read_pusht(Path(os.environ["DFORCE_PUSHT"]))
    for i in range(0, 40, 4):
        states, coverage = replay(data, i)
        np.testing.assert_allclose(states[:-1, :4], data.states[i][:, :4], atol=1e-2)
        assert coverage.max() > 0.85
