"""The task of video: which clips are for what, tokens that fit a trained model's, training from a recipe, and refusals."""

import shutil
from dataclasses import replace as changed

import numpy as np
import pytest
import torch
from small import differing, stop_after, weights
from worlds import BACKBONE, TASK, WORLD, in_folder, quiet, write_clips

from diffusion_forcing import DiffusionForcing
from diffusion_forcing.backbones import ConvRNNConfig
from diffusion_forcing.engine.config import Experiment, ModelConfig, TrainConfig, load_experiment, replace, save_experiment
from diffusion_forcing.engine.recipes import build
from diffusion_forcing.engine.train import train
from diffusion_forcing.video.clips import prepare_clips
from diffusion_forcing.video.codec import Patches
from diffusion_forcing.video.task import Folder

# Data.


def test_clips_for_training_validation_and_evaluation_are_disjoint():
    seen = [set(TASK.clips_of(part).names) for part in ("train", "valid", "test")]
    seen.append(set(changed(TASK, data_seed=1).clips_of("train").names))
    assert len(set.union(*seen)) == sum(map(len, seen))
    frames, actions = TASK.test_clips(4, 10)
    assert frames.shape == (4, 10, 16, 16, 3)
    assert frames.dtype == np.uint8
    assert actions.shape == (4, 10, 2)


def test_data_are_prepared_in_the_cache(cache):
    file = TASK.prepare(quiet)
    assert cache in file.parents
    assert np.load(file, mmap_mode="r").shape == (6 * 16, 16, 16, 3)
    before = file.stat().st_mtime_ns
    assert TASK.prepare() == file
    assert file.stat().st_mtime_ns == before


def test_the_codec_is_reproducible():
    one, two = TASK.data().codec, TASK.data().codec
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


@pytest.mark.parametrize(("actions", "width"), [("numbers", 4), ("kinds", 4), ("none", 0)])
def test_a_folder_of_clips_is_split_by_name(actions, width, tmp_path):
    task = in_folder(write_clips(tmp_path / "mine", actions=actions))
    data = task.data()
    assert data.train.event == (6, 4, 4)
    assert data.train.cond_width == width
    assert (len(data.train), len(data.valid)) == (5, 1)  # of eight, two held out
    frames, acted = task.test_clips(4, 12)
    assert acted.shape == (2, 12, width // 2)
    for i, name in enumerate((2, 6)):  # from everywhere
        np.testing.assert_array_equal(frames[i], WORLD.clip(name, 12).frames)
    clips = prepare_clips(tmp_path / "mine", 16, min_frames=6)
    for source, names in ((data.train, [0, 1, 3, 5, 7]), (data.valid, [4])):
        for i, name in enumerate(names):
            tokens = data.codec.encode(torch.tensor(clips.clip(name).frames.copy())[None] / 255)[0]
            torch.testing.assert_close(source.read(torch.tensor([[i, 0]])).x[0], tokens[:3])


def test_held_out_clips_do_not_shape_the_tokens(tmp_path):
    codecs = []
    for i, first in enumerate((8, 60)):
        folder = write_clips(tmp_path / str(i))
        for source, kept in zip(sorted(write_clips(tmp_path / f"other{i}", number=2, first=first).iterdir()), (2, 6), strict=True):
            source.rename(folder / f"{kept:03d}.npz")
        codecs.append(in_folder(folder).data().codec)
    assert torch.equal(codecs[0].basis, codecs[1].basis)


def test_discrete_actions_may_be_more_than_the_clips_show(tmp_path):
    folder = write_clips(tmp_path / "mine", actions="kinds")
    data = changed(TASK, world=Folder(folder, px=16, test=2, action_kinds=5)).data()
    assert data.train.cond_width == 2 * 5


def test_clips_shorter_than_a_window_are_left_out(tmp_path):
    folder = write_clips(tmp_path / "mine", number=8)
    write_clips(folder, number=2, frames=5, first=3)
    assert len(in_folder(folder).data().train) == 3  # of eight two held out, two too short, one for validation
    with pytest.raises(ValueError, match="leave too few to train on: 0 that have a window's 6 frames"):
        in_folder(write_clips(tmp_path / "short", frames=5)).data()


def test_held_out_clips_do_not_depend_on_the_window(tmp_path):
    folder = write_clips(tmp_path / "mine", frames=16)
    for kept in (2, 6):
        write_clips(folder, number=1, frames=4, first=kept)
    for tokens in (2, 4):
        frames, _ = in_folder(folder, tokens=tokens).test_clips(4, 4)
        np.testing.assert_array_equal(frames[0], WORLD.clip(2, 4).frames)
        np.testing.assert_array_equal(frames[1], WORLD.clip(6, 4).frames)


def test_held_out_clips_are_cut_into_pieces(tmp_path):
    task = in_folder(write_clips(tmp_path / "mine", frames=16))
    frames, actions = task.test_clips(9, 6)
    assert frames.shape == (4, 6, 16, 16, 3)  # two of each
    clip = WORLD.clip(2, 16)
    np.testing.assert_array_equal(frames[1], clip.frames[6:12])
    np.testing.assert_array_equal(actions[1], clip.actions[6:12])
    few, _ = task.test_clips(2, 6)
    np.testing.assert_array_equal(few, frames[[0, 3]])  # from everywhere


def test_a_warning_says_what_is_left_out_of_a_folder(tmp_path):
    folder = write_clips(tmp_path / "mine")
    (folder / "broken.npz").write_bytes(b"nothing")
    (folder / "film.mkv").write_bytes(b"nothing")
    with pytest.warns(UserWarning, match=r"1 with \.mkv.*broken\.npz was left out"):
        in_folder(folder).data()


def test_real_clips_for_comparison_are_others_than_those_that_roll_outs_continue():
    frames, others = TASK.test_clips(4, 10)[0], TASK.test_clips(4, 10, part="real")[0]
    assert not any((one == other).all() for one in frames for other in others)


# Training.


def tiny(backbone="transformer", **changes):
    """The experiment of the recipe labyrinth on few small clips."""
    experiment = build("labyrinth", backbone=backbone)
    network = BACKBONE if backbone == "transformer" else ConvRNNConfig(4, 4, (1, 2), 1)
    small = {"steps": 4, "minutes": None, "batch": 4, "validate_every": 2, "log_every": 1, "threads": 1, "warmup": 2, "ema": 0.9}
    experiment = replace(experiment, task=TASK, model__backbone=network, **{f"train__{name}": value for name, value in small.items()})
    return replace(experiment, **changes)


@pytest.mark.parametrize("backbone", ["transformer", "gru"])
def test_a_training_stopped_and_resumed_comes_to_the_same_loss(backbone, tmp_path, monkeypatch):
    experiment = tiny(backbone)
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


def test_a_baseline_with_a_clean_past_trains_too(tmp_path):
    result = train(tiny(train__steps=1, objective__draw="teacher_forced", objective__self_context=0.0), tmp_path, quiet=True)
    assert np.isfinite(result.valid_loss)


def test_an_experiment_on_a_folder_is_written_down_and_read_again(tmp_path):
    experiment = tiny(task=in_folder(tmp_path / "mine"))
    save_experiment(experiment, tmp_path / "config.json")
    assert load_experiment(tmp_path / "config.json") == experiment


def test_fine_tuning_keeps_the_tokens_of_the_first_model(tmp_path):
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


def test_tokens_of_another_kind_are_refused():
    with pytest.raises(ValueError, match="that model's tokens are Patches of 2 frames; this task's are Pixels of 2"):
        changed(TASK, patch=0).data_as(TASK.data().codec)
    with pytest.raises(ValueError, match="that model's tokens are Patches of 2 frames; this task's are Patches of 4"):
        changed(TASK, stack=4).data_as(TASK.data().codec)


def test_a_resumed_fine_tuning_no_longer_needs_the_first_model(tmp_path, monkeypatch):
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


# Refusals.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"frames": 15}, "2 must divide 15"),
        ({"length": 7}, "2 must divide 7"),
        ({"patch": 5}, "5 must divide 16"),
        ({"tokens": 9}, "a window of 9 tokens has 18 frames, but clips have 16; give them more"),
        *(({name: 0}, f"{name} counts from 1; got 0") for name in ("clips", "tokens", "stack", "length", "real")),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        changed(TASK, **options)


@pytest.mark.parametrize(
    ("options", "name"), [({"components": 0}, "got 0"), ({"components": 97}, "got 97"), ({"whiten": 2.0}, "whiten")], ids=str
)
def test_options_of_the_codec_are_refused_when_it_is_fitted(options, name):
    with pytest.raises(ValueError, match=name):
        changed(TASK, **options).data()


def test_folders_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match="nowhere"):
        in_folder("nowhere").data()
    with pytest.raises(ValueError, match=r"--task\.world\.test"):
        in_folder(write_clips(tmp_path / "few", number=3)).data()
    with pytest.raises(ValueError, match="40 frames; the longest has 12"):
        in_folder(write_clips(tmp_path / "mine")).test_clips(2, 40)
    with pytest.raises(ValueError, match="test"):
        Folder(tmp_path, px=16, test=0)
