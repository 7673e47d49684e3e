"""Video: clips that become tokens with their actions, roll-outs frame by frame, and what is said and drawn of them."""

import copy
import shutil
import warnings
from contextlib import contextmanager
from dataclasses import replace as changed

import numpy as np
import pytest
import torch
from oracles import randomised, seeded
from small import differing, stop_after, weights
from torch import nn

from diffusion_forcing import DiffusionForcing
from diffusion_forcing.engine import plotting
from diffusion_forcing.engine.config import (
    ConvRNNConfig,
    Experiment,
    ModelConfig,
    SpaceTimeConfig,
    TrainConfig,
    load_experiment,
    replace,
    save_experiment,
)
from diffusion_forcing.engine.recipes import resolve
from diffusion_forcing.engine.train import train
from diffusion_forcing.video.clips import prepare_clips
from diffusion_forcing.video.codec import Patches, Pixels
from diffusion_forcing.video.figures import ASTRAY, beyond_training, draw_curves, film_of, judge
from diffusion_forcing.video.lpips import LPIPS
from diffusion_forcing.video.recipes import VIDEO
from diffusion_forcing.video.scores import SCORES, Curve, psnr
from diffusion_forcing.video.task import Folder, RollOut, Video
from diffusion_forcing.video.windows import ClipWindows
from diffusion_forcing.video.worlds.labyrinth import Labyrinth

WORLD = Labyrinth(size=2, px=16)
TASK = Video(
    WORLD, clips=6, frames=16, tokens=3, stack=2, patch=4, components=6, length=8, real=4, sampling=RollOut(steps=2, context=1)
)  # fmt: skip
BACKBONE = SpaceTimeConfig(hidden=8, layers=2, heads=2, window=3)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own for each test, and small random features in the place of AlexNet's."""
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(LPIPS, "pretrained", lambda: LPIPS((3, 3, 3, 3, 3), seeded(0)))
    return tmp_path / "cache"


def model_for(task, backbone=BACKBONE):
    """A model for the task's tokens whose parameters are all drawn, so that it says something."""
    data = task.data()
    model = ModelConfig(backbone, levels=100).build(data.train.event, data.train.cond_width, data.codec)
    randomised(model.backbone, seed=1)
    return model.eval()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFORCE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return model_for(TASK)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Three clips to go on from, and their actions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFORCE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return TASK.judged_by(3, 16)


def told(what, done, of):
    assert 0 <= done <= of
    assert what


def write_clips(folder, number=8, frames=12, actions="numbers", px=16, first=0):
    """npz files of walks, with kinds of action, actions as they are, or none."""
    folder.mkdir(exist_ok=True)
    for i in range(first, first + number):
        clip = WORLD.clip(i, frames)
        more = {"kinds": {"actions": (clip.actions[:, 0] > 0).astype(np.int64)}, "numbers": {"actions": clip.actions}, "none": {}}[actions]
        np.savez(folder / f"{i:03d}.npz", video=clip.frames, **more)
    return folder


def in_folder(folder, **options):
    """A task whose clips lie in a folder."""
    return changed(TASK, world=Folder(folder, px=16, test=2), **options)


# Data.


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


def test_tokens_are_those_of_the_clips_in_order():
    data, clips = TASK.data(), TASK.clips_of("train")
    assert isinstance(data.codec, Patches)
    assert data.codec.variance.shape == data.train.event
    for i in range(6):
        tokens = data.codec.encode(torch.tensor(clips.clip(i).frames.copy())[None] / 255)[0]
        torch.testing.assert_close(data.train.read(torch.tensor([[i, 4]])).x[0], tokens[2:5])


def test_windows_begin_at_any_frame_and_are_read_from_disk():
    data, clips = TASK.data(), TASK.clips_of("train")
    drawn = data.train.draw(400, seeded(0))
    assert set(drawn[:, 0].tolist()) == set(range(6))
    assert set(drawn[:, 1].tolist()) == set(range(16 - 6 + 1))
    frames = torch.tensor(clips.clip(2).frames[3:9].copy())[None] / 255
    one = data.train.read(torch.tensor([[2, 3]]))
    torch.testing.assert_close(one.x, data.codec.encode(frames))
    assert one.cond[0].tolist() == clips.clip(2).actions[3:9].reshape(3, 4).tolist()
    assert isinstance(clips.frames, np.memmap)


def test_without_patches_tokens_are_the_pixels_themselves():
    data = changed(TASK, patch=0).data()
    assert isinstance(data.codec, Pixels)
    assert data.train.event == (6, 16, 16)
    x = data.train.read(data.train.all()).x
    assert x.min() >= -1
    assert x.max() <= 1


def test_the_action_told_with_a_frame_is_the_one_that_led_to_it():
    """A visitor who does what the conditions say sees what the tokens show, frame after frame."""
    task = changed(TASK, patch=0)
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


def test_conditions_hold_the_actions_of_each_frame_of_a_token():
    actions = np.arange(10, dtype=np.float32).reshape(5, 2)
    assert TASK.conditions(actions).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]  # a frame that fills no token is left out
    assert changed(TASK, told=False).conditions(actions).shape == (2, 0)
    assert TASK.conditions(np.zeros((6, 0), np.float32)).shape == (3, 0)


def test_a_model_that_is_not_told_has_no_conditions():
    data = changed(TASK, told=False).data()
    assert data.train.cond_width == 0
    assert data.train.event == (6, 4, 4)


def test_clips_to_train_on_to_validate_on_and_to_judge_by_are_others():
    seen = [set(TASK.clips_of(part).names) for part in ("train", "valid", "test")]
    seen.append(set(changed(TASK, data_seed=1).clips_of("train").names))
    assert len(set.union(*seen)) == sum(map(len, seen))
    frames, actions = TASK.judged_by(4, 10)
    assert frames.shape == (4, 10, 16, 16, 3)
    assert frames.dtype == np.uint8
    assert actions.shape == (4, 10, 2)


def test_data_are_prepared_in_the_cache(cache):
    file = TASK.prepare(told)
    assert cache in file.parents
    assert np.load(file, mmap_mode="r").shape == (6 * 16, 16, 16, 3)
    before = file.stat().st_mtime_ns
    assert TASK.prepare() == file
    assert file.stat().st_mtime_ns == before


def test_the_codec_is_fitted_to_what_is_trained_on_and_always_the_same():
    one, two = TASK.data().codec, TASK.data().codec
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def test_data_are_made_once():
    assert TASK.data() is TASK.data()


# Clips of one's own.


@pytest.mark.parametrize(("actions", "width"), [("numbers", 4), ("kinds", 4), ("none", 0)])
def test_a_folder_of_clips_is_split_by_name(actions, width, tmp_path):
    task = in_folder(write_clips(tmp_path / "mine", actions=actions))
    data = task.data()
    assert data.train.event == (6, 4, 4)
    assert data.train.cond_width == width
    assert (len(data.train), len(data.valid)) == (5, 1)  # of eight, two to judge by
    frames, acted = task.judged_by(4, 12)
    assert acted.shape == (2, 12, width // 2)
    for i, name in enumerate((2, 6)):  # from everywhere
        np.testing.assert_array_equal(frames[i], WORLD.clip(name, 12).frames)
    clips = prepare_clips(tmp_path / "mine", 16, shortest=6)
    for source, names in ((data.train, [0, 1, 3, 5, 7]), (data.valid, [4])):
        for i, name in enumerate(names):
            tokens = data.codec.encode(torch.tensor(clips.clip(name).frames.copy())[None] / 255)[0]
            torch.testing.assert_close(source.read(torch.tensor([[i, 0]])).x[0], tokens[:3])


def test_clips_to_judge_by_do_not_shape_the_tokens(tmp_path):
    codecs = []
    for i, first in enumerate((8, 60)):
        folder = write_clips(tmp_path / str(i))
        for source, kept in zip(sorted(write_clips(tmp_path / f"other{i}", number=2, first=first).iterdir()), (2, 6), strict=True):
            source.rename(folder / f"{kept:03d}.npz")
        codecs.append(in_folder(folder).data().codec)
    assert torch.equal(codecs[0].basis, codecs[1].basis)


def test_numbered_actions_may_have_more_kinds_than_are_seen(tmp_path):
    folder = write_clips(tmp_path / "mine", actions="kinds")
    data = changed(TASK, world=Folder(folder, px=16, test=2, action_kinds=5)).data()
    assert data.train.cond_width == 2 * 5


@pytest.mark.parametrize("actions", ["none", "numbers"])
def test_half_of_the_windows_are_seen_in_a_mirror_where_no_actions_are_told(actions, tmp_path):
    folder = write_clips(tmp_path / "mine", actions=actions)
    task = in_folder(folder, mirror=True)
    data = changed(task, patch=0).data_as(Pixels(2))
    drawn = data.train.draw(200, seeded(0))
    if actions == "numbers":
        assert drawn.shape == (200, 2)
        return
    assert 70 < drawn[:, 2].sum() < 130
    as_is, mirrored = (torch.cat([drawn[:1, :2], torch.tensor([[flag]])], dim=1) for flag in (0, 1))
    assert torch.equal(data.train.read(mirrored).x, data.train.read(as_is).x.flip(-1))
    assert not torch.equal(data.train.read(mirrored).x, data.train.read(as_is).x)
    assert torch.equal(data.train.read(drawn[:1, :2]).x, data.train.read(as_is).x), "validation's windows are as they are"


def test_told_actions_have_no_mirror(tmp_path):
    source = in_folder(write_clips(tmp_path / "mine")).data().train
    with pytest.raises(ValueError, match="which way actions turn in a mirror is not known"):
        ClipWindows(source._clips, [0, 1], source._codec, 2, 3, TASK.conditions, mirror=True)


def test_clips_shorter_than_a_window_are_left_out(tmp_path):
    folder = write_clips(tmp_path / "mine", number=8)
    write_clips(folder, number=2, frames=5, first=3)
    assert len(in_folder(folder).data().train) == 3  # of eight two to judge by, two too short, one to validate on
    with pytest.raises(ValueError, match="leave too few to train on: 0 that have a window's 6 frames"):
        in_folder(write_clips(tmp_path / "short", frames=5)).data()


def test_which_clips_are_kept_to_judge_by_does_not_depend_on_the_window(tmp_path):
    folder = write_clips(tmp_path / "mine", frames=16)
    for kept in (2, 6):
        write_clips(folder, number=1, frames=4, first=kept)
    for tokens in (2, 4):
        frames, _ = in_folder(folder, tokens=tokens).judged_by(4, 4)
        np.testing.assert_array_equal(frames[0], WORLD.clip(2, 4).frames)
        np.testing.assert_array_equal(frames[1], WORLD.clip(6, 4).frames)


def test_clips_to_judge_by_are_cut_into_pieces(tmp_path):
    task = in_folder(write_clips(tmp_path / "mine", frames=16))
    frames, actions = task.judged_by(9, 6)
    assert frames.shape == (4, 6, 16, 16, 3)  # two of each
    clip = WORLD.clip(2, 16)
    np.testing.assert_array_equal(frames[1], clip.frames[6:12])
    np.testing.assert_array_equal(actions[1], clip.actions[6:12])
    few, _ = task.judged_by(2, 6)
    np.testing.assert_array_equal(few, frames[[0, 3]])  # from everywhere


def test_what_is_left_out_of_a_folder_is_said(tmp_path):
    folder = write_clips(tmp_path / "mine")
    (folder / "broken.npz").write_bytes(b"nothing")
    (folder / "film.mkv").write_bytes(b"nothing")
    with pytest.warns(UserWarning, match=r"1 with \.mkv.*broken\.npz was left out"):
        in_folder(folder).data()


def test_real_clips_to_compare_with_are_none_of_those_that_roll_outs_go_on_from():
    frames, others = TASK.judged_by(4, 10)[0], TASK.judged_by(4, 10, part="real")[0]
    assert not any((one == other).all() for one in frames for other in others)


def test_windows_may_be_as_long_as_ones_own_clips(tmp_path):
    assert len(in_folder(write_clips(tmp_path / "mine", frames=20), tokens=10).data().train) == 5


def test_too_few_clips_are_refused(tmp_path):
    with pytest.raises(ValueError, match="3 clips, of which 2 are kept to judge by, leave too few to train on"):
        in_folder(write_clips(tmp_path / "mine", number=3)).data()


def test_there_must_be_a_folder():
    with pytest.raises((ValueError, FileNotFoundError), match="nowhere"):
        in_folder("nowhere").data()


def test_clips_too_short_to_judge_by_say_how_long_they_are(tmp_path):
    with pytest.raises(ValueError, match="no clip to judge by has 40 frames; the longest has 12"):
        in_folder(write_clips(tmp_path / "mine")).judged_by(2, 40)


def test_no_clips_to_judge_by_say_so(tmp_path):
    with pytest.raises(ValueError, match="test counts from 1; got 0"):
        Folder(write_clips(tmp_path / "mine"), px=16, test=0)


@pytest.mark.parametrize("actions", ["numbers", "none"])
def test_a_roll_out_of_ones_own_clips_outlasts_them(actions, tmp_path):
    """Beyond the end of a clip its last action goes on."""
    task = in_folder(write_clips(tmp_path / "mine", actions=actions))
    model = model_for(task)
    task = changed(task, length=16)
    made, truth, context = task.generate(model, 2, 0, told)
    assert context == 2
    assert made.shape == (2, 2 + 16, 16, 16, 3)
    assert truth.shape == (2, 12, 16, 16, 3)  # as far as the clips go
    if actions == "numbers":
        acted = np.stack([WORLD.clip(6 + i, 12).actions for i in range(2)])
        assert task._told(acted, 9)[:, -1].tolist() == np.repeat(acted[:, -1:], 2, axis=1).reshape(2, 4).tolist()
    np.testing.assert_array_equal(made[:, :2], truth[:, :2])
    assert all((tmp_path / name).is_file() for name in task._show(tmp_path, made[:1], truth[:1], context))


def test_clips_of_a_window_each_can_be_judged_by(tmp_path):
    task = in_folder(write_clips(tmp_path / "mine"))
    task.evaluate(model_for(task), tmp_path, samples=2, seed=0, progress=told)


def test_roll_outs_shorter_than_the_clips_are_shown(tmp_path):
    task = in_folder(write_clips(tmp_path / "mine", frames=20), tokens=10, frames=20, length=4)
    assert task.sample(model_for(task), tmp_path, samples=2, seed=0, progress=told)


def test_a_context_longer_than_a_window_is_given_whole_or_refused(tmp_path):
    task = in_folder(write_clips(tmp_path / "mine", frames=12), sampling=RollOut(steps=2, context=5))
    made, _, context = task.generate(model_for(task), 2, 0, told)
    assert made.shape[1] == context + task.length


# Training.


def tiny(recipe="labyrinth", **changes):
    """A recipe's experiment on few small clips."""
    experiment = VIDEO[recipe]()
    backbone = BACKBONE if isinstance(experiment.model.backbone, SpaceTimeConfig) else ConvRNNConfig(4, 4, (1, 2), 1)
    small = {"steps": 4, "minutes": None, "batch": 4, "validate_every": 2, "log_every": 1, "threads": 1, "warmup": 2, "ema": 0.9}
    experiment = replace(experiment, task=TASK, model__backbone=backbone, **{f"train__{name}": value for name, value in small.items()})
    return replace(experiment, **changes)


@pytest.mark.parametrize("recipe", ["labyrinth", "labyrinth-gru"])
def test_a_training_stopped_and_resumed_comes_to_the_same_loss(recipe, tmp_path, monkeypatch):
    experiment = tiny(recipe)
    whole = train(experiment, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        half = train(experiment, tmp_path / "parts", quiet=True)
    assert (half.status, half.step) == ("interrupted", 2)
    loaded = DiffusionForcing.from_pretrained(tmp_path / "parts" / "model")
    assert isinstance(loaded.codec, Patches)
    rest = train(experiment, tmp_path / "parts", quiet=True)
    assert (rest.status, rest.step, rest.loss, rest.valid_loss) == ("done", 4, whole.loss, whole.valid_loss)
    assert not differing(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_training_learns(tmp_path):
    options = {"train__lr": 5e-3, "train__batch": 8, "train__validate_every": 60, "task__clips": 48}
    first, last = (train(tiny(train__steps=steps, **options), tmp_path / str(steps), quiet=True).valid_loss for steps in (1, 60))
    assert last < 0.95 * first
    made = list(TASK.roll_out(DiffusionForcing.from_pretrained(tmp_path / "60" / "model"), 4, None, np.zeros((1, 4, 2), np.float32)))
    assert sum(chunk.shape[1] for chunk in made) == 4


def test_a_baseline_that_sees_a_clean_past_trains_too(tmp_path):
    result = train(tiny(train__steps=1, train__draw="teacher_forced", train__imagined=0.0), tmp_path, quiet=True)
    assert np.isfinite(result.valid_loss)


def test_an_experiment_on_a_folder_is_written_down_and_read_again(tmp_path):
    experiment = tiny(task=in_folder(tmp_path / "mine"))
    save_experiment(experiment, tmp_path / "config.json")
    assert load_experiment(tmp_path / "config.json") == experiment


# Roll-outs.


def roll(model, length, context, actions, seed=0, task=TASK, **sampling):
    """Frames of a roll-out in one piece."""
    batch = len(actions) if actions is not None else 1
    how = changed(task.sampling, **sampling)
    chunks = task.roll_out(model, length, context, actions, batch=batch, generator=seeded(seed), sampling=how)
    return np.concatenate(list(chunks), axis=1)


@pytest.mark.parametrize("length", [1, 8])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"horizon": 3}, {"horizon": 2, "schedule": "pyramid", "slope": 1.0, "eta": 1.0}, {"horizon": 2, "schedule": "rolling"}],
    ids=str,
)
def test_a_roll_out_has_exactly_its_length(length, sampling, model, real):
    frames, actions = real
    made = roll(model, length, frames[:, :4], actions, **sampling)
    assert made.shape == (3, length, 16, 16, 3)
    assert made.dtype == np.uint8
    assert made.std() > 1
    np.testing.assert_array_equal(made, roll(model, length, frames[:, :4], actions, **sampling))
    assert (made != roll(model, length, frames[:, :4], actions, seed=1, **sampling)).any()


def test_frames_come_as_they_are_made(model, real, monkeypatch):
    """A chunk a window; the first before the second is begun."""
    frames, actions = real
    calls = []
    predict = model.predict
    monkeypatch.setattr(model, "predict", lambda *arguments: calls.append(1) or predict(*arguments))
    chunks = TASK.roll_out(model, 8, frames[:, :2], actions, batch=3, generator=seeded(0))
    assert not calls
    assert next(chunks).shape == (3, 2, 16, 16, 3)
    first = len(calls)
    assert first == TASK.sampling.steps
    assert [chunk.shape[1] for chunk in chunks] == [2, 2, 2]
    assert len(calls) == 4 * first


def test_a_longer_roll_out_begins_like_a_shorter_one(model, real):
    frames, actions = real
    np.testing.assert_array_equal(roll(model, 10, frames[:, :2], actions)[:, :4], roll(model, 4, frames[:, :2], actions))


def test_a_roll_out_may_be_led_more_by_its_past(model, real):
    def frames(task, history, context=real[0][:, :4]):
        sampling = changed(TASK.sampling, history=history)
        return np.concatenate(list(task.roll_out(model, 4, context, real[1], generator=seeded(0), sampling=sampling)), axis=1)

    assert (frames(TASK, 1.0) == frames(TASK, 1.0)).all()
    assert (frames(TASK, 1.0) != frames(TASK, 3.0)).any()
    # the first token after nothing has no past to be led by
    assert (frames(TASK, 1.0, None)[:, :2] == frames(TASK, 3.0, None)[:, :2]).all()
    assert (frames(TASK, 1.0, None)[:, 2:] != frames(TASK, 3.0, None)[:, 2:]).any()


def test_a_roll_out_sets_out_from_nothing(model, real):
    frames, actions = real
    made = roll(model, 6, None, actions)
    assert made.shape == (3, 6, 16, 16, 3)
    np.testing.assert_array_equal(made, roll(model, 6, frames[:, :0], actions))
    assert (made != roll(model, 6, frames[:, :2], actions)).any()


def test_a_roll_out_goes_on_from_its_context(model, real):
    frames, actions = real
    one, two = (roll(model, 4, given, actions) for given in (frames[:, :4], frames[[1, 0, 2], :4]))
    assert (one[:2] != two[:2]).any()
    np.testing.assert_array_equal(one[2], two[2])


def test_a_roll_out_follows_its_actions_when_they_come(model, real):
    """Actions are counted from the first frame of the context; those of the last token change the last token alone."""
    frames, actions = real
    other = actions.copy()
    other[:, 6:] += 3
    one, two = (roll(model, 6, frames[:, :2], acted[:, :8]) for acted in (actions, other))
    np.testing.assert_array_equal(one[:, :4], two[:, :4])
    assert (one[:, 4:] != two[:, 4:]).any()


def test_where_actions_end_none_are_told(model, real):
    frames, actions = real
    still = np.concatenate([actions[:, :5], np.zeros((3, 3, 2), np.float32)], axis=1)
    np.testing.assert_array_equal(roll(model, 6, frames[:, :2], actions[:, :5]), roll(model, 6, frames[:, :2], still))


def test_a_single_frame_stands_still_for_a_token(model, real):
    frames, actions = real
    still = np.repeat(frames[:, :1], 2, axis=1)
    np.testing.assert_array_equal(roll(model, 4, frames[:, :1], actions), roll(model, 4, still, actions))


def test_a_context_that_fills_no_token_is_refused(model, real):
    frames, actions = real
    with pytest.raises(ValueError, match="2 must divide 3"):
        roll(model, 4, frames[:, :3], actions)


def test_a_model_that_was_told_actions_needs_them(model, real):
    with pytest.raises(ValueError, match="reads conditions of 4 numbers a token; got 0"):
        list(TASK.roll_out(model, 4, real[0][:1, :2], None))


def test_as_many_clips_go_on_as_there_are_contexts(model, real):
    frames, actions = real
    assert next(TASK.roll_out(model, 4, frames[:, :2], actions)).shape[0] == 3


def test_without_actions_none_are_told(real):
    task = changed(TASK, told=False)
    model = model_for(task)
    made = [np.concatenate(list(task.roll_out(model, 4, real[0][:1, :2], acted, generator=seeded(0)))) for acted in (None, real[1][:1])]
    np.testing.assert_array_equal(*made)


def test_frames_between_are_those_of_some_way_on(model, real):
    frames, actions = real
    made, again, other = (
        TASK.between(model, frames[:, :4], frames[:, 8:10], 2, actions=actions[:, :10], generator=seeded(seed), draws=3)
        for seed in (0, 0, 1)
    )
    assert made.shape == (3, 4, 16, 16, 3)
    assert made.dtype == np.uint8
    np.testing.assert_array_equal(made, again)
    assert (made != other).any()


# What is said and drawn.


def is_png(file):
    return file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("context", [0, 1])
def test_sample_writes_a_film_and_sheets(context, model, tmp_path):
    task = changed(TASK, sampling=RollOut(steps=2, context=context))
    files = task.sample(model, tmp_path, samples=8, seed=0, progress=told)
    assert [file.name for file in files] == ["samples.mp4", "beginning.png", "rollout.png"]
    assert all(file.parent == tmp_path for file in files)
    assert all(is_png(file) for file in files[1:])
    av = pytest.importorskip("av", reason="mp4 needs PyAV")
    with av.open(str(files[0])) as film:
        shown = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
    assert len(shown) == 2 * context + 8
    assert shown[0].shape == (2 * 3 * 16, 3 * 6 * 16, 3)  # six clips side by side, the others below, three times as large


def test_sample_fills_in_what_lies_between(model, tmp_path):
    task = changed(TASK, sampling=RollOut(steps=2, context=2, between=3))
    film, sheet = task.sample(model, tmp_path, samples=2, seed=0, progress=told)
    assert film.stat().st_size > 0
    assert is_png(sheet)
    av = pytest.importorskip("av", reason="mp4 needs PyAV")
    with av.open(str(film)) as opened:
        assert sum(1 for _ in opened.decode(video=0)) == 4 + 6 + 4


@pytest.mark.parametrize("context", [0, 1])
def test_evaluate_says_and_draws_what_it_measured(context, model, tmp_path):
    task = changed(TASK, sampling=RollOut(steps=2, context=context))
    evaluation = task.evaluate(model, tmp_path, samples=2, seed=0, progress=told)
    assert ("first token PSNR" in evaluation.metrics) == bool(context)
    assert all(np.isfinite(value) for value in evaluation.metrics.values())
    (table,) = evaluation.tables
    assert table.title == f"2 roll-outs of 8 frames after {2 * context}, 2 steps a token"
    own = [name for name in evaluation.metrics if not name.startswith(ASTRAY)]
    assert [*(row[0] for row in table.rows), "codec PSNR", "codec LPIPS"] == own
    assert table.columns == ("", "this run", ASTRAY)
    assert list(evaluation.figures) == ["beginning.png", "rollout.png", "codec.png", "rollouts.mp4"]
    assert all(is_png(tmp_path / name) for name in evaluation.figures if name.endswith("png"))


def test_the_seed_decides_what_is_measured(model, tmp_path):
    one, again, other = (TASK.evaluate(model, tmp_path, samples=1, seed=seed, progress=told).metrics for seed in (0, 0, 1))
    assert one == again
    assert one != other


@pytest.mark.filterwarnings("ignore:The figure layout")
def test_evaluate_draws_curves_over_time(model, tmp_path, monkeypatch):
    evaluation = changed(TASK, length=80, tokens=8).evaluate(model, tmp_path, samples=2, seed=0, progress=told)
    assert list(evaluation.figures) == ["beginning.png", "rollout.png", "codec.png", "rollouts.mp4", "over_time.png"]
    assert is_png(tmp_path / "over_time.png")
    assert evaluation.metrics["first token LPIPS"] > 0
    for name in ("video-FD", "frame-FD", "blow-up"):
        moments = ("first window", "at 5 times the training length", "last window", "beyond the training length", "real")
        assert {f"{name} {moment}" for moment in moments} == {key for key in evaluation.metrics if key.startswith(name)}
    assert all(np.isfinite(value) for value in evaluation.metrics.values())
    assert [row[:2] for row in evaluation.tables[1].rows][:2] == [("video-FD", "this run"), ("", ASTRAY)]


@pytest.mark.parametrize("options", [{"length": 8}, {"length": 32, "real": 3}], ids=str)
def test_short_or_few_clips_have_no_curves(options, model, tmp_path, monkeypatch):
    evaluation = changed(TASK, **options).evaluate(model, tmp_path, samples=2, seed=0, progress=told)
    assert "over_time.png" not in evaluation.figures
    assert "first token LPIPS" in evaluation.metrics


def test_runs_are_judged_side_by_side_on_the_same_clips(model, tmp_path, monkeypatch):
    """Another run stacks other frames, samples its own way, and is measured from the same frames on."""
    task = changed(TASK, length=8, sampling=RollOut(steps=2, context=2))
    single = changed(TASK, stack=1, tokens=8, sampling=RollOut(steps=5, context=7, stabilization=3))
    asked = []
    generate = Video.generate

    def spy(self, *arguments, **options):
        asked.append(self)
        return generate(self, *arguments, **options)

    monkeypatch.setattr(Video, "generate", spy)
    evaluation = task.evaluate(model, tmp_path, samples=2, seed=0, progress=told, others={"one": (single, model_for(single))})
    alone = task.evaluate(model, tmp_path, samples=2, seed=0, progress=told)
    assert {name: value for name, value in evaluation.metrics.items() if not name.startswith("one: ")} == alone.metrics
    plain = {name for name in alone.metrics if ": " not in name and not name.startswith("codec")}
    assert {name for name in evaluation.metrics if name.startswith("one: ")} == {f"one: {name}" for name in plain}
    (table,) = evaluation.tables
    assert table.columns == ("", "this run", "one", ASTRAY)
    assert table.rows[0][1] != table.rows[0][2]
    assert asked[1].sampling == RollOut(steps=2, context=4, stabilization=3)
    assert (asked[1].stack, asked[1].length) == (1, 8)


def test_the_world_itself_is_led_by_actions_meant_for_elsewhere():
    """Other places than those of the clips, each under a clip's actions: what a model that knew the world perfectly would show."""
    strayed = TASK._led_astray(3, 2, told)
    truth, actions = TASK.judged_by(3, 10)
    assert strayed.shape == truth.shape
    assert (strayed != truth).any(axis=(1, 2, 3, 4)).all()
    someone = WORLD.enter(int(np.random.SeedSequence([2_000_002]).generate_state(3, np.uint32)[1]))
    np.testing.assert_array_equal(strayed[1], np.stack([someone.step(action) for action in actions[1]]))
    assert changed(TASK, told=False)._led_astray(3, 2, told) is None
    assert changed(TASK, world=Folder(px=16))._led_astray(3, 2, told) is None


def test_a_compiled_pass_gives_the_same_frames(model, real, monkeypatch):
    """Compiled without a compiler, so that the test is quick: what is compiled, once, and what is then called."""
    compiled = []

    def compile_(function, **options):
        compiled.append(function)
        return lambda *arguments: function(*arguments)

    monkeypatch.setattr(torch, "compile", compile_)
    fresh = model_for(TASK)
    frames, actions = real
    options = {"generator": None, "context": frames[:, :2], "actions": actions}
    plain, quick = (
        np.concatenate(
            list(TASK.roll_out(fresh, 6, **{**options, "generator": seeded(0)}, sampling=RollOut(steps=2, compile=compile))), axis=1
        )
        for compile in (False, True)
    )
    list(TASK.roll_out(fresh, 2, frames[:, :2], actions, sampling=RollOut(steps=2, compile=True)))
    assert compiled == [fresh.backbone._next]
    np.testing.assert_array_equal(plain, quick)
    twin = copy.deepcopy(fresh)  # has weights of its own, which what was compiled does not know of
    torch.nn.init.zeros_(twin.backbone.proj_out.weight)
    other = list(TASK.roll_out(twin, 2, frames[:, :2], actions, generator=seeded(0), sampling=RollOut(steps=2)))
    assert (other[0] != plain[:, :2]).any()


def test_a_backbone_that_has_nothing_to_compile_says_so(real):
    gru = model_for(TASK, ConvRNNConfig(latent=4, channels=8, scales=(1,), blocks=1))
    with pytest.raises(ValueError, match="only SpaceTime has a pass over single tokens to compile"):
        list(TASK.roll_out(gru, 2, real[0][:, :2], real[1], sampling=RollOut(steps=2, compile=True)))


def test_training_goes_on_from_another_model_in_its_tokens(tmp_path):
    """On other clips, whose own principal directions would be others."""
    config = ModelConfig(BACKBONE, levels=100)
    training = TrainConfig(steps=2, batch=2, validate_every=2, log_every=2)
    train(Experiment(TASK, config, training), tmp_path / "first", quiet=True)
    other = changed(TASK, data_seed=5, clips=4)
    still = TrainConfig(steps=1, batch=2, validate_every=2, log_every=2, lr=1e-12, init=str(tmp_path / "first"))
    train(Experiment(other, config, still), tmp_path / "second", quiet=True)
    first, second = (weights(tmp_path / run) for run in ("first", "second"))
    assert not torch.equal(other.data().codec.basis, first["codec.basis"])
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (ModelConfig(changed(BACKBONE, hidden=16), levels=100), "do not fit this model: backbone is .* without --train.init"),
        (ModelConfig(BACKBONE, levels=100, parameterization="x0"), "do not fit this model: parameterization is v there and x0 here"),
        (ModelConfig(BACKBONE, levels=100, schedule="sigmoid"), "trained on another noise schedule; use the same --model.schedule"),
    ],
    ids=["width", "target", "schedule"],
)
def test_weights_of_another_make_are_refused(model, words, tmp_path):
    training = TrainConfig(steps=1, batch=2, validate_every=2, log_every=2)
    train(Experiment(TASK, ModelConfig(BACKBONE, levels=100), training), tmp_path / "first", quiet=True)
    with pytest.raises(ValueError, match=words):
        train(Experiment(TASK, model, changed(training, init=str(tmp_path / "first"))), tmp_path / "second", quiet=True)


def test_tokens_of_another_kind_cannot_be_gone_on_from():
    with pytest.raises(ValueError, match="that model's tokens are Patches of 2 frames; this task's are Pixels of 2"):
        changed(TASK, patch=0).data_as(TASK.data().codec)
    with pytest.raises(ValueError, match="that model's tokens are Patches of 2 frames; this task's are Patches of 4"):
        changed(TASK, stack=4).data_as(TASK.data().codec)


def test_what_began_with_another_model_goes_on_without_it(tmp_path, monkeypatch):
    """Stopped, the other model gone, and resumed: as if never stopped."""
    config = ModelConfig(BACKBONE, levels=100)
    train(Experiment(TASK, config, TrainConfig(steps=1, batch=2, validate_every=2, log_every=2)), tmp_path / "first", quiet=True)
    other = Experiment(changed(TASK, data_seed=5), config, TrainConfig(steps=4, batch=2, validate_every=2, init=str(tmp_path / "first")))
    train(other, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        train(other, tmp_path / "parts", quiet=True)
    shutil.rmtree(tmp_path / "first")
    train(other, tmp_path / "parts", quiet=True)
    assert not differing(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_runs_that_cannot_be_judged_from_the_same_frames_say_so(model, tmp_path):
    odd = changed(TASK, stack=3, frames=12, tokens=2, length=9)
    with pytest.raises(ValueError, match="set out from 2 frames, but another run stacks: 3 must divide 2"):
        changed(TASK, sampling=RollOut(context=1)).evaluate(model, tmp_path, samples=1, seed=0, progress=told, others={"odd": (odd, model)})


def test_turns_are_told_apart(model, tmp_path, monkeypatch):
    """Where the walk turns, copying the last frame is farther from the truth."""
    task = changed(TASK, sampling=RollOut(steps=2, context=2))
    turns = task._turning(12, 4)
    _, actions = task.judged_by(12, 4 + task.length)
    assert turns.tolist() == [bool(abs(action[4, 1]) >= 0.5 or abs(action[5, 1]) >= 0.5) for action in actions]
    assert 0 < turns.sum() < 12
    metrics = task.evaluate(model, tmp_path, samples=12, seed=0, progress=told).metrics
    assert {"first token LPIPS, turning", "last frame copied LPIPS, turning"} <= metrics.keys()


def test_a_film_holds_a_clip_that_ends_and_does_without_pyav(real, tmp_path, monkeypatch):
    frames, _ = real
    clips = {"long": frames[:2], "short": frames[:2, :3]}
    assert film_of(clips, tmp_path, longest=5) == "rollouts.mp4"
    av = pytest.importorskip("av", reason="mp4 needs PyAV")
    with av.open(str(tmp_path / "rollouts.mp4")) as film:
        assert sum(1 for _ in film.decode(video=0)) == 5

    def none():
        raise ImportError("mp4 needs PyAV")

    monkeypatch.setattr("diffusion_forcing.engine.media.import_av", none)
    assert film_of(clips, tmp_path) == "rollouts.gif"
    assert (tmp_path / "rollouts.gif").read_bytes().startswith(b"GIF89a")


def test_the_truth_scores_perfectly_and_a_still_picture_badly(real):
    """A measure that cannot fail measures nothing."""
    frames, _ = real
    perfect, _ = judge(frames, frames, frames[:, 2:], 2, 2, 6, told)
    assert perfect["first token PSNR"] == 60  # for infinitely many
    assert perfect["pixel mean over real"] == pytest.approx(1)
    assert perfect["pixel std over real"] == pytest.approx(1)
    still = np.repeat(frames[:, 1:2], frames.shape[1], axis=1)
    stuck, _ = judge(still, frames, frames[:, 2:], 2, 2, 6, told)
    assert stuck["first token PSNR"] == stuck["last frame copied PSNR"] == perfect["last frame copied PSNR"] < 40
    assert stuck["last frame copied PSNR"] == pytest.approx(np.mean(psnr(still[:, 2:4], frames[:, 2:4])))
    assert stuck["late motion over real"] == 0
    grey, _ = judge(np.full_like(frames, 128), frames, frames[:, 2:], 2, 2, 6, told)
    assert grey["pixel std over real"] == 0


def curve(n=3):
    return Curve(np.arange(n) * 16, np.arange(n) + 1.0, np.arange(n) + 0.5, np.arange(n) + 1.5, 0.5, 0.4, 0.6, np.zeros((2, n)))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The figure that curves of two models are drawn in, and what was warned of meanwhile."""
    figures, figure, file = [], plotting.figure, tmp_path_factory.mktemp("drawn") / "curves.png"

    @contextmanager
    def spy(*arguments, **options):
        with figure(*arguments, **options) as fig:
            figures.append(fig)
            yield fig

    ours = {name: curve() for name in SCORES}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr(plotting, "figure", spy)
        draw_curves(ours, file, 10, names={"ours": ours, "theirs": ours})
    assert is_png(file)
    return figures[0], [str(one.message) for one in warned]


def test_a_panel_shows_each_score_of_each_model(drawn):
    fig, _ = drawn
    assert [ax.get_title() for ax in fig.axes][: len(SCORES)] == list(SCORES)
    assert [text.get_text() for text in fig.axes[-1].get_legend().get_texts()] == ["ours", "theirs"]


def test_panels_without_a_score_are_hidden(drawn):
    assert sum(ax.axison for ax in drawn[0].axes if ax.get_visible()) == len(SCORES)


def test_curves_are_drawn_without_a_warning(drawn):
    assert not drawn[1]


def test_a_table_tells_means_beyond_the_training_length():
    ours, theirs = {name: curve() for name in SCORES}, {name: curve()._replace(value=np.arange(3) + 2.0) for name in SCORES}
    table = beyond_training({"this run": ours, "next": theirs}, 10)
    rows = [row for row in table.rows if row[0] == "video-FD" or row[1] == "next"]
    assert rows[0] == ("video-FD", "this run", "2.500 (2.500 to 2.500)", "")
    assert rows[1] == ("", "next", "3.500 (3.500 to 3.500)", "+1.000 (+1.000 to +1.000)")
    alone = beyond_training({"this run": ours}, 10)
    assert {len(row) for row in alone.rows} == {len(alone.columns)} == {3}
    assert beyond_training({"this run": ours}, 1000) is None
    assert beyond_training({}, 10) is None


# Options.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"frames": 15}, "clips are cut into tokens of so many frames: 2 must divide 15"),
        ({"length": 7}, "roll-outs are cut into tokens of so many frames: 2 must divide 7"),
        ({"patch": 5}, "frames are cut into patches of so many pixels: 5 must divide 16"),
        ({"patch": -4}, "-4 must divide 16"),
        ({"frames": 4}, "a window of 3 tokens has 6 frames, but clips have 4; give them more"),
        ({"tokens": 9}, "a window of 9 tokens has 18 frames, but clips have 16"),
        ({"clips": 0}, "clips counts from 1; got 0"),
        ({"tokens": 0}, "tokens counts from 1; got 0"),
        ({"stack": 0}, "stack counts from 1; got 0"),
        ({"length": 0}, "length counts from 1; got 0"),
        ({"real": 0}, "real counts from 1; got 0"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        changed(TASK, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"components": 0}, "keep 1 to 96 of them, got 0"),
        ({"components": 97}, "a patch of 2 x 4 x 4 px has 96 numbers; keep 1 to 96 of them, got 97"),
        ({"whiten": 2.0}, "whiten goes from 0"),
    ],
    ids=str,
)
def test_options_of_the_codec_are_refused_when_it_is_fitted(options, words):
    with pytest.raises(ValueError, match=words):
        changed(TASK, **options).data()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 0}, "steps counts from 1; got 0"),
        ({"horizon": 0}, "horizon counts from 1; got 0"),
        ({"context": -1}, "context counts tokens, from 0; got -1"),
        ({"history": -1.0}, r"history is 0 \(as if there were none\), 1 \(as it is\) or more; got -1.0"),
        (
            {"history": 2.0, "schedule": "rolling", "horizon": 2},
            "no past of their own .* got history 2.0, add --task.sampling.history 1",
        ),
    ],
    ids=str,
)
def test_samplings_that_make_no_sense_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        RollOut(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stabilization": -1}, "stabilization is a level"),
        ({"stabilization": 101}, "stabilization is a level in 0..100, a small one; got 101"),
        ({"eta": 2.0}, "eta goes from 0"),
        ({"noise": 1.5}, "noise goes from 0"),
        ({"path": "angle", "eta": 1.0}, "the path by angle is one without fresh noise; got eta 1.0, add --task.sampling.eta 0"),
    ],
    ids=str,
)
def test_samplings_that_do_not_go_with_a_model_are_refused_before_the_first_frame(options, words, model, real):
    with pytest.raises(ValueError, match=words):
        next(TASK.roll_out(model, 4, real[0][:1, :2], real[1][:1], sampling=changed(TASK.sampling, **options)))


# Recipes.

# Shape of a token and numbers of a condition: of the published clips, actions come in three or four kinds.
TOKENS = {
    "labyrinth": ((64, 8, 8), 4 * 2),
    "labyrinth-gru": ((64, 8, 8), 4 * 2),
    "voxels": ((64, 8, 8), 4 * 2),
    "doom": ((64, 8, 8), 4 * 2),
    "clips": ((64, 8, 8), 0),
    "dmlab": ((12, 64, 64), 4 * 3),
    "minecraft": ((24, 128, 128), 8 * 4),
}
MILLIONS = {"dmlab": 24, "minecraft": 36}


def test_every_recipe_is_known():
    assert set(TOKENS) == {name for name in VIDEO if not name.endswith("-painter")}
    assert all(resolve(name) is recipe for name, recipe in VIDEO.items())
    assert all(recipe.__doc__ for recipe in VIDEO.values())


@pytest.mark.parametrize("name", [name for name in VIDEO if name.endswith("-painter")])
def test_painters_are_for_the_tokens_of_their_models(name):
    painter, first = VIDEO[name](), VIDEO[name.removesuffix("-painter")]()
    assert painter.task == first.task
    assert painter.task.patch == 2 ** len(painter.model.widths)


@pytest.mark.parametrize("name", TOKENS)
def test_every_recipe_builds(name):
    experiment = VIDEO[name]()
    assert isinstance(experiment, Experiment)
    task = experiment.task
    event, cond = TOKENS[name]
    side = task.world.px // task.patch if task.patch else task.world.px
    assert event == (task.components if task.patch else 3 * task.stack, side, side)
    if hasattr(task.world, "actions"):
        assert cond == task.stack * len(task.world.actions)
    codec: nn.Module = Pixels(task.stack)
    if task.patch:
        codec = Patches.fit(torch.rand(8, 2 * task.stack, task.world.px, task.world.px, 3), task.stack, task.patch, task.components)
    model = experiment.model.build(event, cond, codec)
    size = sum(parameter.numel() for parameter in model.parameters())
    if name in MILLIONS:
        assert size == pytest.approx(MILLIONS[name] * 1e6, rel=0.1)
        assert cond == task.stack * task.world.action_kinds
        assert model.weight.frame_stack == task.stack
    else:
        assert size < 5e6
    if name == "dmlab":
        x, k = torch.zeros(1, 2, *event), torch.tensor([[0, 1000]])
        with torch.no_grad():
            assert model(x, k, torch.zeros(1, 2, cond)).shape == (1, 2)
