"""Timesteps: chunks of actions and what was observed after them; windows begin with an observation."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from robots import PX, TASK, Given, demonstrations

from diffusion_forcing.imitation.demonstrations import Demonstrations
from diffusion_forcing.imitation.task import Imitation
from diffusion_forcing.imitation.windows import timesteps_of


def test_a_timestep_holds_the_actions_that_led_to_its_observation():
    shown = demonstrations(1, frames=4, every=3)
    timesteps = timesteps_of(shown, 0, 3)
    assert list(timesteps) == ["actions", "front", "hand", "state"]
    assert timesteps["actions"].shape == (4, 3, 2)
    assert not timesteps["actions"][0].any()
    for j in range(1, 4):
        np.testing.assert_array_equal(timesteps["actions"][j], shown.actions[0][3 * (j - 1) : 3 * j])
    np.testing.assert_array_equal(timesteps["front"], shown.images["front"][0])
    np.testing.assert_array_equal(timesteps["state"], shown.states[0])
    assert list(timesteps_of(shown, 0, 3, state=False)) == ["actions", "front", "hand"]


def test_chunks_may_span_frames_and_begin_later():
    shown = demonstrations(1, frames=7, every=1, cameras=())
    timesteps = timesteps_of(shown, 0, 2, offset=1)
    np.testing.assert_array_equal(timesteps["state"], shown.states[0][[1, 3, 5, 6]])  # the last chunk is one action long, and padded
    np.testing.assert_array_equal(timesteps["actions"][1:3].reshape(4, 2), shown.actions[0][1:5])
    np.testing.assert_array_equal(timesteps["actions"][3], shown.actions[0][[5, 5]])


def test_an_episode_that_ends_with_actions_stays_in_its_last_frame():
    shown = Demonstrations([np.arange(8.0).reshape(4, 2)], [np.arange(4.0)[:, None]], fps=10)
    timesteps = timesteps_of(shown, 0, 2)
    np.testing.assert_array_equal(timesteps["state"][:, 0], [0, 2, 3])
    np.testing.assert_array_equal(timesteps["actions"][2], [[4, 5], [6, 7]])


@pytest.mark.parametrize(("chunk", "offset", "words"), [(4, 0, "multiple of that; got 4"), (3, 6, "none is left from number 6 on")])
def test_chunks_that_do_not_fit_are_refused(chunk, offset, words):
    with pytest.raises(ValueError, match=words):
        timesteps_of(demonstrations(1), 0, chunk, offset)


def test_a_demonstration_shorter_than_a_chunk_is_one_chunk():
    draw = np.random.default_rng(0)
    short = [Demonstrations([draw.normal(size=(2, 1)) for _ in range(4)], [draw.normal(size=(1, 2)) for _ in range(4)], every=2, fps=10)]
    data = Imitation(Given(lambda: short[0]), chunk=4, window=3).data()
    assert len(data.train) == 3
    assert data.train.read(data.train.all()[:1]).mask.sum() == 3  # an observation, a chunk, and an observation


def test_windows_begin_with_an_observation_and_end_with_the_actions_after_the_last():
    windows = replace(TASK, window=2).data().train  # of 7 observations each, with 6 chunks between them
    drawn = windows.draw(1000, torch.Generator().manual_seed(0))
    assert drawn[:, 1].unique().tolist() == [0, 4, 8, 12, 16]
    assert drawn[:, 1].bincount()[::4].min() > 150
    batch = windows.read(drawn)
    assert (batch.cond[..., :4].argmax(-1) == torch.tensor([1, 2, 3, 0, 1, 2, 3, 0])).all()
    assert batch.mask.all()
    assert (windows.all()[:, 1] % 4 == 0).all()


def test_windows_as_long_as_demonstrations_begin_where_these_do():
    for window in (7, 8, 100):
        windows = replace(TASK, window=window).data().train
        assert windows.length == 7 * 4 - 1  # nothing is done after the last observation
        assert not windows.draw(50)[:, 1].any()
        assert windows.all().tolist() == [[i, 0] for i in range(4)]


def test_windows_of_image_tokens_hold_the_actions_after_the_last_observation():
    for window, tokens in ((1, 2), (3, 4), (6, 7), (9, 7)):
        windows = replace(TASK, tokens="image", state=False, window=window).data().train
        assert windows.event == (2 * 3 + 3, PX, PX)
        assert windows.length == tokens
        assert set(windows.draw(300)[:, 1].tolist()) == set(range(8 - tokens))


def test_each_offset_is_a_sequence_of_its_own():
    task = Imitation(Given(lambda: demonstrations(3, every=1, cameras=())), chunk=2, offsets=2, window=4)
    assert len(task.data().train) == 4
    assert len(task.data().valid) == 1


def test_there_are_no_more_offsets_than_frames_in_a_chunk():
    """One more would be the first again, without its first chunk."""
    for every, chunk, number in ((3, 3, 1), (3, 6, 2), (1, 2, 2)):
        shown = demonstrations(3, every=every, cameras=())
        data = Imitation(Given(lambda shown=shown: shown), chunk=chunk, offsets=9, window=4).data()
        assert len(data.train) == 2 * number
