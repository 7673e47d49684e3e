"""Playing a video model: keys, files and the terminal, and the frames they lead to."""

import io
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Generator
from worlds import TASK, model_for

from diffusion_forcing.backbones import ConvRNNConfig
from diffusion_forcing.composition import Composition
from diffusion_forcing.sampling import Context, Sampler
from diffusion_forcing.video.play import Player, PlayOptions, actions_of, keys_of, play, read_picture
from diffusion_forcing.video.task import Folder, Video
from diffusion_forcing.video.worlds.doom import Doom
from diffusion_forcing.video.worlds.labyrinth import Labyrinth
from diffusion_forcing.video.worlds.voxels import Voxels


def test_each_key_is_a_token_of_frames(model):
    player = Player(TASK, model)
    assert player.first.shape == (2, 16, 16, 3)
    for chunk in actions_of("wd", keys_of(TASK, 2), 2):
        frames = player.step(chunk)
        assert frames.shape == (2, 16, 16, 3)
        assert frames.dtype == np.uint8


def test_actions_and_seed_decide_the_frames(model):
    def seen(keys, seed=0):
        player = Player(TASK, model, seed)
        return np.concatenate([player.step(chunk) for chunk in actions_of(keys, keys_of(TASK, 2), 2)])

    np.testing.assert_array_equal(seen("wwa"), seen("wwa"))
    first, other = seen("wwa"), seen("wwd")
    np.testing.assert_array_equal(first[:4], other[:4])
    assert (first[4:] != other[4:]).any()
    assert (seen("wwa", 1) != first).any()


def test_turning_right_is_turning_right_in_both_worlds():
    labyrinth, voxels = (keys_of(Video(world), 2) for world in (Labyrinth(), Voxels()))
    assert labyrinth["d"] == (0.0, 1.0)  # positive to the right
    assert voxels["d"] == (0.0, -1.0)  # positive to the left
    assert keys_of(Video(Doom()), 2) == labyrinth
    assert labyrinth["e"][0] == voxels["e"][0] == 1.0
    assert keys_of(Video(Folder()), 3) == {"0": (1.0, 0.0, 0.0), "1": (0.0, 1.0, 0.0), "2": (0.0, 0.0, 1.0)}


def test_a_film_is_made_of_keys_a_file_or_lines(model, tmp_path, monkeypatch):
    film = play(PlayOptions(tmp_path, keys="ww", out=tmp_path / "keys.gif"), TASK, model, tmp_path)
    assert film.stat().st_size > 0
    np.save(tmp_path / "actions.npy", np.ones((5, 2)))
    with pytest.warns(UserWarning, match="the last 1 of 5 actions fill no token of 2"):
        assert play(PlayOptions(tmp_path, file=tmp_path / "actions.npy", out=tmp_path / "file.gif"), TASK, model, tmp_path).exists()
    monkeypatch.setattr(sys, "stdin", io.StringIO("w d\n\nwww\n"))
    assert play(PlayOptions(tmp_path, out=tmp_path / "lines.gif"), TASK, model, tmp_path).exists()
    from PIL import Image

    assert [getattr(Image.open(tmp_path / name), "n_frames", 1) for name in ("keys.gif", "file.gif", "lines.gif")] == [6, 6, 6]


@pytest.mark.parametrize(
    ("options", "task", "words"),
    [
        ({"keys": "wx"}, TASK, "there is no key 'x'; there are w a d q e s"),
        ({"keys": "w"}, Composition(), "only video models can be played"),
    ],
)
def test_what_cannot_be_played_says_so(model, tmp_path, options, task, words):
    with pytest.raises(ValueError, match=words):
        play(PlayOptions(tmp_path, out=tmp_path / "film.gif", **options), task, model, tmp_path)
    assert not (tmp_path / "film.gif").exists()


def test_an_unknown_key_loses_nothing(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("ww\nwxw\nd\n\n"))
    film = play(PlayOptions(tmp_path, out=tmp_path / "lines.gif"), TASK, model, tmp_path)
    from PIL import Image

    assert Image.open(film).n_frames == 2 + 2 * 3  # the context and three keys
    assert "there is no key 'x'" in capsys.readouterr().err


def test_a_picture_is_a_place_to_begin_at(model, tmp_path):
    from PIL import Image

    shown = np.zeros((20, 30, 3), np.uint8)
    shown[:, :10] = 255  # cut away: the square in the middle is what counts
    Image.fromarray(shown).save(tmp_path / "a.png")
    picture = read_picture(tmp_path / "a.png", 16)
    assert picture.shape == (16, 16, 3)
    player = Player(TASK, model, image=picture)
    np.testing.assert_array_equal(player.first, np.repeat(picture[None], 2, axis=0))
    assert play(PlayOptions(tmp_path, keys="w", image=tmp_path / "a.png", out=tmp_path / "a.gif"), TASK, model, tmp_path).exists()
    for name, words in (("none.png", "there is no picture"), ("text.png", "is no picture, or damaged")):
        (tmp_path / "text.png").write_text("nothing")
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            play(PlayOptions(tmp_path, keys="w", image=tmp_path / name, out=tmp_path / "b.gif"), TASK, model, tmp_path)


def test_a_model_is_played_as_it_rolls_out(model):
    """Stabilized in the way its backbone prefers: token by token or in a roll-out, the same frames."""
    for one in (model, model_for(TASK, ConvRNNConfig(4, 4, (1, 2), 1))):
        task = replace(TASK, sampler=Sampler(steps=3), context=Context(stabilization=20))
        player = Player(task, one, seed=0)
        actions = np.ones((6, 2), np.float32)
        played = np.concatenate([player.step(actions[i : i + 2]) for i in (0, 2, 4)])
        clips, before = task.test_clips(64, 2)
        whole = np.concatenate([before[:1], actions[None]], axis=1)
        rolled = list(task.roll_out(one, 6, clips[:1], whole, generator=Generator().manual_seed(0)))
        np.testing.assert_array_equal(played, np.concatenate(rolled, axis=1)[0])


def test_the_key_p_follows_the_policy(model):
    task = replace(TASK, rollout=replace(TASK.rollout, actions="policy"))
    player, known = Player(task, model, seed=1), keys_of(task, 2)
    assert "p" not in keys_of(TASK, 2)
    frames = [player.step(chunk) for chunk in actions_of("wpp", known, 2)]
    assert all(one.shape == (2, 16, 16, 3) for one in frames)
    assert (player.policy.codebook == torch.tensor(player.actions.reshape(1, -1))).all(1).any(), "an action chunk of the codebook"


def test_actions_of_the_wrong_shape_or_none_say_so(model, tmp_path):
    with pytest.raises(ValueError, match=r"a token takes 2 actions of 2 numbers; got \(2, 3\)"):
        Player(TASK, model).step(np.zeros((2, 3), np.float32))
    with pytest.raises(FileNotFoundError, match="there are no actions"):
        play(PlayOptions(tmp_path, file=tmp_path / "none.npy", out=tmp_path / "film.gif"), TASK, model, tmp_path)
