"""The mazes as Gymnasium environments."""

import importlib
import sys
from dataclasses import replace

import numpy as np
import pytest

from diffusion_forcing.planning.envs.maze2d import GOAL_RADIUS, JITTER, MAZES, OFFSET, RADIUS


@pytest.fixture(params=list(MAZES))
def maze(request):
    return MAZES[request.param]


@pytest.fixture
def gym():
    pytest.importorskip("gymnasium")
    from diffusion_forcing.planning.envs import gym

    return gym


IDS = [f"diffusion_forcing/Maze2D-{multi}{title}-v0" for multi in ("", "Multi-") for title in ("UMaze", "Medium", "Large", "Windy")]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", IDS)
def test_environments_by_id_pass_gymnasiums_own_check(gym, name):
    from gymnasium.utils.env_checker import check_env

    env = gym.gymnasium.make(name)
    assert env.spec.max_episode_steps is None
    assert env.unwrapped.balls.multi == ("Multi" in name)
    assert env.observation_space.shape == (4,)
    assert env.observation_space.dtype == np.float64
    assert env.action_space == gym.gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    check_env(env.unwrapped)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", IDS)
def test_vector_environments_by_id(gym, name):
    envs = gym.gymnasium.make_vec(name, num_envs=3, render_mode="rgb_array")
    assert isinstance(envs, gym.Maze2DVectorEnv)
    observation, info = envs.reset(seed=1)
    assert observation in envs.observation_space
    assert info["goal"].shape == (3, 2)
    assert not info["touched"].any()
    envs.action_space.seed(1)
    observation, reward, terminated, truncated, info = envs.step(envs.action_space.sample())
    assert observation in envs.observation_space
    assert reward.shape == terminated.shape == truncated.shape == info["touched"].shape == (3,)
    assert len(envs.render()) == 3
    if gym._MODES is not None:
        assert envs.metadata["autoreset_mode"] is gym._MODES.NEXT_STEP


def test_an_episode_is_truncated_at_its_length_and_never_terminated(gym, maze):
    env = gym.Maze2DEnv(maze.name)
    env.reset(seed=2)
    ends = [env.step(np.zeros(2))[2:4] for _ in range(maze.steps)]
    assert ends == [(False, False)] * (maze.steps - 1) + [(False, True)]


def test_rewards_and_info_of_an_episode(gym):
    env = gym.Maze2DEnv("umaze")
    observation, info = env.reset(seed=3, options={"start": (1, 1.49)})
    np.testing.assert_array_equal(observation[:2], [1, 1.49])
    np.testing.assert_array_equal(info["goal"], [1, 1])
    assert info["touched"] is False
    assert env.step(np.zeros(2))[1] == 1.0
    env.reset(options={"start": (1, 2.1)})
    assert env.step(np.zeros(2))[1] == 0.0
    seen = [env.step(np.array([-1.0, 0.0]))[4]["touched"] for _ in range(60)]
    assert seen[0] is False
    assert seen[-1] is True


def test_a_chosen_goal_holds_for_one_episode_and_leaves_the_draws_alone(gym):
    env = gym.Maze2DEnv("medium", multi=True)
    drawn, info = env.reset(seed=4)
    chosen, other = env.reset(seed=4, options={"goal": (1, 1)})
    np.testing.assert_array_equal(chosen, drawn)
    np.testing.assert_array_equal(other["goal"], [1, 1])
    np.testing.assert_array_equal(env.reset(seed=4)[1]["goal"], info["goal"])
    env = gym.Maze2DEnv("medium")
    assert env.reset(options={"goal": (1, 1)})[1]["goal"].tolist() == [1, 1]
    assert env.reset()[1]["goal"].tolist() == [6, 6]


def test_one_ball_of_a_vector_is_the_single_environment(gym):
    """Bit for bit, with drawn goals and through the resets of Gymnasium's own vector environment."""
    short = replace(MAZES["medium"], steps=20)
    ours = gym.Maze2DVectorEnv(short, 1, multi=True)
    theirs = gym.gymnasium.vector.SyncVectorEnv([lambda: gym.Maze2DEnv(short, multi=True)])
    ours.action_space.seed(5)
    both = [envs.reset(seed=6) for envs in (ours, theirs)]
    ends = 0
    for _ in range(70):
        np.testing.assert_equal(*both)
        action = ours.action_space.sample()
        both = [envs.step(action) for envs in (ours, theirs)]
        ends += both[0][3].sum()
    assert ends == 3


def test_many_balls_of_a_vector_are_single_environments(gym):
    rng = np.random.default_rng(7)
    envs, singles = gym.Maze2DVectorEnv("large", 4), [gym.Maze2DEnv("large") for _ in range(4)]
    observation, _ = envs.reset(seed=8)
    for single, state in zip(singles, observation, strict=True):
        single.reset(options={"start": state[:2]})
        single.balls.velocity = state[None, 2:].copy()
    for _ in range(100):
        action = rng.uniform(-1, 1, (4, 2)).astype(np.float32)
        observation, reward, _, truncated, info = envs.step(action)
        for i, single in enumerate(singles):
            mine = single.step(action[i])
            np.testing.assert_array_equal(mine[0], observation[i])
            assert (mine[1], mine[3], mine[4]["touched"]) == (reward[i], truncated[i], info["touched"][i])


def test_the_step_after_the_end_ignores_its_actions_and_resets_all(gym):
    envs = gym.Maze2DVectorEnv(replace(MAZES["umaze"], steps=3), 5, multi=True)
    _, info = envs.reset(seed=9, options={"start": (1, 1), "goal": (1, 1)})
    np.testing.assert_array_equal(info["goal"], np.ones((5, 2)))
    results = [envs.step(np.ones((5, 2))) for _ in range(4)]
    assert [result[3].tolist() for result in results] == [[False] * 5, [False] * 5, [True] * 5, [False] * 5]
    assert results[2][1].all()
    assert not results[3][1].any(), "no reward is earned by a reset"
    assert (results[3][4]["goal"] != 1).any(), "goals are drawn anew"
    assert np.abs(results[3][0][:, :2] - np.round(results[3][0][:, :2])).max() <= JITTER
    assert not envs.step(np.ones((5, 2)))[3].any()


def test_vector_environments_work_with_gymnasiums_wrappers(gym):
    wrappers = gym.gymnasium.wrappers.vector
    envs = wrappers.RecordEpisodeStatistics(gym.Maze2DVectorEnv(replace(MAZES["umaze"], steps=4), 2))
    envs.reset(options={"start": (1, 1)})
    for _ in range(4):
        *_, info = envs.step(np.zeros((2, 2)))
    assert info["episode"]["r"].tolist() == [4, 4]
    assert info["episode"]["l"].tolist() == [4, 4]
    infos = wrappers.DictInfoToList(gym.Maze2DVectorEnv("umaze", 2)).reset()[1]
    assert [sorted(info) for info in infos] == [["goal", "touched"]] * 2


def test_wrong_actions_options_and_arguments_are_refused(gym):
    env, envs = gym.Maze2DEnv("umaze"), gym.Maze2DVectorEnv("umaze", 3)
    with pytest.raises(ValueError, match=r"actions should be \(2,\).*got shape \(3,\)"):
        env.step(np.zeros(3))
    with pytest.raises(ValueError, match=r"actions should be \(3, 2\).*got shape \(2,\)"):
        envs.step(np.zeros(2))
    with pytest.raises(ValueError, match=r"finite.*got \[nan, 0\.0\]"):
        env.step(np.array([np.nan, 0.0]))
    with pytest.raises(ValueError, match=r"finite.*got \[1\.0, inf\]"):
        envs.step(np.array([[0.0, 0.0], [1.0, np.inf], [0.0, 0.0]]))
    with pytest.raises(ValueError, match=r"start 0 at \(2, 1\) lies in a wall"):
        env.reset(options={"start": (2, 1)})
    with pytest.raises(ValueError, match=r"goal 2 at \(0, 0\) lies in a wall"):
        envs.reset(options={"goal": [(1, 1), (1, 2), (0, 0)]})
    with pytest.raises(ValueError, match=r"options\['start'\] should be \(2,\) or \(3, 2\).*got shape \(2, 2\)"):
        envs.reset(options={"start": [(1, 1), (1, 2)]})
    with pytest.raises(ValueError, match=r"options\['goal'\] should be \(2,\): row and column; got shape \(3,\)"):
        env.reset(options={"goal": (1, 1, 1)})
    with pytest.raises(ValueError, match="'start' and 'goal'; got 'gaol'"):
        env.reset(options={"gaol": (1, 1)})
    with pytest.raises(ValueError, match="render mode 'human'; choose 'rgb_array'"):
        gym.Maze2DEnv("umaze", render_mode="human")
    with pytest.raises(ValueError, match="at least one ball; got num_envs=0"):
        gym.Maze2DVectorEnv("umaze", 0)
    with pytest.raises(ValueError, match="no maze 'huge'"):
        gym.Maze2DEnv("huge")


def test_a_refused_reset_leaves_the_episode_alone(gym):
    env = gym.Maze2DEnv("umaze")
    env.reset(seed=10)
    env.step(np.zeros(2))
    before = env.balls.observation
    with pytest.raises(ValueError, match="lies in a wall"):
        env.reset(options={"start": (1, 1), "goal": (0, 0)})
    np.testing.assert_array_equal(env.balls.observation, before)
    assert env.balls.time == 1


def pixels(gym, shown, colour):
    """Centres (n, 2) of the pixels of one colour, as positions."""
    return (np.argwhere((shown == colour).all(-1)) + 0.5) / gym.PIXELS - 0.5 - OFFSET


def test_pictures_show_walls_where_balls_cannot_be(gym, maze):
    env = gym.Maze2DEnv(maze.name, render_mode="rgb_array")
    env.reset(seed=11)
    rng = np.random.default_rng(12)
    for t in range(200):
        if t % 20 == 0:
            action = rng.choice([-1.0, 1.0], 2)
        observation, *_ = env.step(action)
        if t % 10:
            continue
        shown = env.render()
        assert shown.shape == (*(gym.PIXELS * size for size in maze.walls.shape), 3)
        assert shown.dtype == np.uint8
        walls, floor, ring, ball = (pixels(gym, shown, colour) for colour in (gym.WALL, gym.FLOOR, gym.GOAL, gym.BALL))
        assert not maze.inside(walls).any()
        assert maze.inside(floor).all()
        assert len(walls) + len(floor) > 0.95 * shown.shape[0] * shown.shape[1]
        assert np.abs(ball.mean(0) - observation[:2]).max() < 0.5 / gym.PIXELS
        assert len(ball) == pytest.approx(np.pi * (RADIUS * gym.PIXELS - 0.5) ** 2, rel=0.25)  # less the pixels on its edge
        assert len(ring) > 20
        assert np.abs(np.linalg.norm(ring - maze.goal, axis=1) - GOAL_RADIUS).max() < 1 / gym.PIXELS


def test_a_picture_of_a_pressed_ball_shows_it_at_the_wall(gym):
    envs = gym.Maze2DVectorEnv("umaze", 2, render_mode="rgb_array")
    envs.reset(seed=13, options={"start": (0.8, 1.8), "goal": (3, 1)})
    force = np.array([[-1.0, 0.0], [1.0, 0.0]])
    for _ in range(200):
        envs.step(force)
    up, down = (pixels(gym, shown, gym.BALL) for shown in envs.render())
    assert up[:, 0].min() == pytest.approx(0.3, abs=1.6 / gym.PIXELS)
    assert down[:, 0].max() == pytest.approx(1.3, abs=1.6 / gym.PIXELS)


def test_without_a_render_mode_there_is_no_picture(gym):
    env, envs = gym.Maze2DEnv("umaze"), gym.Maze2DVectorEnv("umaze", 2)
    assert env.render() is None
    assert envs.render() is None


def test_without_gymnasium_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.delitem(sys.modules, "diffusion_forcing.planning.envs.gym", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'diffusion_forcing\[planning\]'"):
        importlib.import_module("diffusion_forcing.planning.envs.gym")
