"""Corrupted camera images, and the flag that says when."""

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="wrappers need gymnasium")

import gymnasium

from diffusion_forcing.imitation.corruption import KINDS, Corrupted, Corruption

PX, EVERY = 16, 3
CAMERAS = ("front", "hand")


class Still(gymnasium.Env):
    """Two cameras of constant colours, and a pose that counts the steps."""

    def __init__(self):
        image = gymnasium.spaces.Box(0, 255, (PX, PX, 3), np.uint8)
        pose = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.observation_space = gymnasium.spaces.Dict({"front": image, "hand": image, "pose": pose})
        self.action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def observe(self):
        images = {name: np.full((PX, PX, 3), 100 + i, np.uint8) for i, name in enumerate(CAMERAS)}
        return {**images, "pose": np.array([self.time], np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {"fine": True}

    def step(self, action):
        return self.step_many(np.asarray(action)[None])

    def step_many(self, actions):
        self.time += len(actions)
        return self.observe(), 0.0, False, False, {"fine": True}


def episode(kind, seed, frames=40):
    """Observations and infos of one episode."""
    env = Corrupted(Still(), kind, EVERY, frames)
    steps = [env.reset(seed=seed)]
    for _ in range(frames - 1):
        observation, _, _, _, info = env.step_many(np.zeros((EVERY, 1)))
        steps.append((observation, info))
    return steps


@pytest.mark.parametrize("kind", KINDS)
def test_images_change_exactly_when_the_flag_says_so(kind):
    clean = Still()
    clean.reset()
    for seed in range(6):
        for observation, info in episode(kind, seed):
            assert info["fine"]
            for name in CAMERAS:
                assert (observation[name] != clean.observe()[name]).any() == info["corrupted"][name]


@pytest.mark.parametrize("kind", KINDS)
def test_some_begin_corrupted_and_all_are_corrupted_in_each_third(kind):
    began = []
    for seed in range(40):
        when = Corruption(kind, 40, CAMERAS, seed).when
        began.append(bool(when[0]))
        assert all(third.any() for third in np.array_split(when, 3))
        assert 0.1 < when.mean() < 0.5
    assert 10 < sum(began) < 30


def test_a_corruption_is_drawn_by_its_seed():
    one, same, other = (
        [observation["front"] for observation, _ in episode("distractors", seed)] for seed in (3, 3, 4)
    )  # fmt: skip
    np.testing.assert_array_equal(one, same)
    assert (np.array(one) != np.array(other)).any()


def test_one_camera_is_occluded_and_the_other_is_not():
    occluded = {Corruption("occluded", 40, CAMERAS, seed).occluded for seed in range(20)}
    assert occluded == set(CAMERAS)
    for observation, info in episode("occluded", 1):
        if any(info["corrupted"].values()):
            (name,) = (name for name, corrupted in info["corrupted"].items() if corrupted)
            assert np.ptp(observation[name]) == 0


def test_a_ball_of_a_fruits_colour_moves():
    corruption = Corruption("distractors", 40, CAMERAS, 0)
    frames = np.flatnonzero(corruption.when)
    grey = {"front": np.full((64, 64, 3), 100, np.uint8)}
    colour = np.array(corruption._ball[2])
    places = []
    for frame in frames:
        found = np.argwhere((corruption.apply(grey, int(frame))["front"] == colour).all(-1))
        if len(found):
            places.append(found.mean(0))
    assert len(places) > 3
    assert np.ptp(np.array(places), axis=0).max() > 5


def test_frames_are_counted_in_steps_too():
    env = Corrupted(Still(), "dropped", EVERY, 40)
    env.reset(seed=0)
    flags = [info["corrupted"]["front"] for *_, info in (env.step(np.zeros(1)) for _ in range(119))]
    assert flags == [bool(env.corruption.when[step // EVERY]) for step in range(1, 120)]


class Alone(Still):
    """An environment whose observation is one image that is not square."""

    def __init__(self):
        super().__init__()
        self.observation_space = gymnasium.spaces.Box(0, 255, (12, 20, 3), np.uint8)

    def observe(self):
        return np.full((12, 20, 3), 100, np.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_the_observation_may_be_one_image_of_any_shape(kind):
    env = Corrupted(Alone(), kind, EVERY, 40)
    steps = [env.reset(seed=1)]
    steps += [(result[0], result[4]) for result in (env.step_many(np.zeros((EVERY, 1))) for _ in range(39))]
    assert any(info["corrupted"]["image"] for _, info in steps)
    for observation, info in steps:
        assert observation.shape == (12, 20, 3)
        assert (observation != 100).any() == info["corrupted"]["image"]


def test_a_ball_crosses_the_whole_of_a_wide_image():
    wide = {"front": np.full((16, 128, 3), 100, np.uint8)}
    found = []
    for seed in range(20):
        corruption = Corruption("distractors", 40, ("front",), seed)
        shown = [corruption.apply(wide, int(frame))["front"] for frame in np.flatnonzero(corruption.when)]
        found += [np.argwhere((image == np.array(corruption._ball[2])).all(-1)) for image in shown]
    columns = np.concatenate(found)[:, 1]
    assert columns.min() < 16
    assert columns.max() > 112


def test_a_reset_without_a_seed_goes_on_from_the_last_one():
    def corruptions(seed):
        env = Corrupted(Still(), "dropped", EVERY, 40)
        env.reset(seed=seed)
        drawn = []
        for _ in range(4):
            env.reset()
            drawn.append(env.corruption.when.tolist())
        return drawn

    assert corruptions(3) == corruptions(3) != corruptions(4)
    assert len(set(map(str, corruptions(3)))) > 1


def test_what_cannot_be_corrupted_is_refused():
    with pytest.raises(ValueError, match="no corruption 'fog'"):
        Corruption("fog", 40, CAMERAS)
    blind = Still()
    blind.observation_space = gymnasium.spaces.Dict({"pose": blind.observation_space["pose"]})
    with pytest.raises(ValueError, match="only images can be corrupted"):
        Corrupted(blind, "dropped")
    for space in (gymnasium.spaces.Box(0, 1, (8, 8, 3), np.float32), gymnasium.spaces.Box(0, 255, (8, 8), np.uint8)):
        blind.observation_space = space
        with pytest.raises(ValueError, match="observations are Box"):
            Corrupted(blind, "dropped")
