"""Windows of clips: tokens and conditions of the frames they stand for, read from disk."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles import seeded
from worlds import TASK, WORLD, in_folder, write_clips

from diffusion_forcing.video.codec import Patches, Pixels
from diffusion_forcing.video.windows import ClipWindows


def test_data_are_tokens_of_clips_with_conditions():
    data = TASK.data()
    assert data.train.event == data.valid.event == (6, 4, 4)
    assert data.train.cond_width == data.valid.cond_width == 2 * 2
    assert (len(data.train), len(data.valid)) == (6, 16)
    batch = data.train.read(data.train.draw(5, seeded(0)))
    assert batch.x.shape == (5, 3, 6, 4, 4)
    assert batch.cond.shape == (5, 3, 4)
    assert batch.mask.all()
    whole = data.train.read(data.train.all())
    assert whole.mask.sum() == 6 * 2 * 3  # of sixteen frames two windows of six, and four that are left out
    assert whole.x[whole.mask].std().item() == pytest.approx(1, abs=0.2)


def test_windows_begin_at_any_frame_and_are_read_from_disk():
    data, clips = TASK.data(), TASK.clips_of("train")
    assert isinstance(data.codec, Patches)
    assert data.codec.variance.shape == data.train.event
    drawn = data.train.draw(400, seeded(0))
    assert set(drawn[:, 0].tolist()) == set(range(6))
    assert set(drawn[:, 1].tolist()) == set(range(16 - 6 + 1))
    for i, first in ((2, 3), (5, 4)):
        frames = torch.tensor(clips.clip(i).frames[first : first + 6].copy())[None] / 255
        one = data.train.read(torch.tensor([[i, first]]))
        torch.testing.assert_close(one.x, data.codec.encode(frames))
        assert one.cond[0].tolist() == clips.clip(i).actions[first : first + 6].reshape(3, 4).tolist()
    assert isinstance(clips.frames, np.memmap)


def test_without_patches_tokens_are_the_pixels_themselves():
    data = replace(TASK, patch=0).data()
    assert isinstance(data.codec, Pixels)
    assert data.train.event == (6, 16, 16)
    x = data.train.read(data.train.all()).x
    assert x.min() >= -1
    assert x.max() <= 1


def test_the_condition_of_a_frame_is_the_action_that_led_to_it():
    """An agent that follows the conditions sees what the tokens show, frame after frame."""
    task = replace(TASK, patch=0)
    data, clips = task.data(), task.clips_of("train")
    for i in range(3):
        batch = data.train.read(torch.tensor([[i, 0], [i, 6]]))
        frames = (data.codec.decode(batch.x).flatten(0, 1) * 255).round().numpy()
        actions = batch.cond.reshape(12, 2).numpy()
        visitor = WORLD.enter(int(clips.names[i]))
        np.testing.assert_array_equal(visitor.look(), frames[0])
        assert not actions[0].any()
        assert actions[1:].any()
        for frame, action in zip(frames[1:], actions[1:], strict=True):
            np.testing.assert_array_equal(visitor.step(action), frame)


def test_without_action_conditioning_there_are_no_conditions():
    data = replace(TASK, action_conditioned=False).data()
    assert data.train.cond_width == 0
    assert data.train.event == (6, 4, 4)


def test_half_of_the_windows_are_mirrored_where_there_are_no_conditions(tmp_path):
    task = in_folder(write_clips(tmp_path / "mine", actions="none"), mirror=True)
    data = replace(task, patch=0).data_as(Pixels(2))
    drawn = data.train.draw(200, seeded(0))
    assert 70 < drawn[:, 2].sum() < 130
    as_is, mirrored = (torch.cat([drawn[:1, :2], torch.tensor([[flag]])], dim=1) for flag in (0, 1))
    assert torch.equal(data.train.read(mirrored).x, data.train.read(as_is).x.flip(-1))
    assert not torch.equal(data.train.read(mirrored).x, data.train.read(as_is).x)
    assert torch.equal(data.train.read(drawn[:1, :2]).x, data.train.read(as_is).x), "windows for validation are as they are"


def test_conditions_are_never_mirrored(tmp_path):
    task = in_folder(write_clips(tmp_path / "mine"), mirror=True)
    source = task.data().train
    assert source.draw(20, seeded(0)).shape == (20, 2)
    with pytest.raises(ValueError, match="mirror"):
        ClipWindows(source._clips, [0, 1], source._codec, 2, 3, TASK.build_cond, mirror=True)
