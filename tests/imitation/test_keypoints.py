"""Eyes: a picture to a few numbers and back, trained once."""

import os

import numpy as np
import pytest
import safetensors.torch
import torch

from diffusion_forcing.codecs import build_codec, describe_codec
from diffusion_forcing.imitation import keypoints
from diffusion_forcing.imitation.keypoints import KeypointAutoencoder, prepare_keypoints, train_keypoints
from diffusion_forcing.imitation.tokens import ModalityTokens

PX = 16


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def blobs(number=200, seed=0):
    """A red disc anywhere on grey."""
    draw = np.random.default_rng(seed)
    rows, columns = np.mgrid[:PX, :PX]
    pictures = np.full((number, PX, PX, 3), 120, np.uint8)
    places = draw.uniform(3, PX - 3, (number, 2))
    for picture, (y, x) in zip(pictures, places, strict=True):
        picture[(rows - y) ** 2 + (columns - x) ** 2 < 6] = (220, 30, 30)
    return pictures, places


def test_few_numbers_say_where_a_thing_is_better_than_as_many_directions():
    """Eight numbers: an eye draws the disc where it is, eight principal directions cannot."""
    pictures, _ = blobs(400)
    others, _ = blobs(100, seed=1)
    eye = train_keypoints(pictures, latent=8, steps=250)
    told = eye.decode(eye.encode(torch.as_tensor(others))).numpy()
    flat = pictures.reshape(400, -1) / 255
    mean = flat.mean(0)
    basis = np.linalg.svd(flat - mean, full_matrices=False)[2][:8]
    line = ((others.reshape(100, -1) / 255 - mean) @ basis.T @ basis + mean).reshape(others.shape)
    error, other = (float(((guess - others / 255) ** 2).mean()) for guess in (told, line))
    assert error < 0.8 * other


def test_a_point_says_where_a_thing_is():
    """Of a trained eye's numbers one goes with the disc's height, another with its place from left to right."""
    pictures, _ = blobs(400)
    others, there = blobs(100, seed=1)
    told = train_keypoints(pictures, latent=4, steps=200).encode(torch.as_tensor(others)).numpy()
    assert abs(np.corrcoef(told[:, 0], there[:, 1])[0, 1]) > 0.9  # x of the only point
    assert abs(np.corrcoef(told[:, 1], there[:, 0])[0, 1]) > 0.9


def test_an_eye_is_the_same_each_time_and_taken_from_the_cache(cache):
    pictures, _ = blobs(40)
    one = prepare_keypoints(pictures, latent=4, steps=3)
    assert len(list(cache.glob("keypoints-*.safetensors"))) == 1
    said = []
    again = prepare_keypoints(pictures, latent=4, steps=3, progress=lambda *what: said.append(what))
    assert not said
    other = prepare_keypoints(pictures, latent=4, steps=4, progress=lambda *what: said.append(what))
    assert said[-1] == ("training keypoints", 4, 4)
    looked = [eye.encode(torch.as_tensor(pictures[:2])) for eye in (one, again, train_keypoints(pictures, latent=4, steps=3), other)]
    torch.testing.assert_close(looked[0], looked[1])
    torch.testing.assert_close(looked[0], looked[2])
    assert not torch.allclose(looked[0], looked[3])


def test_two_processes_may_train_the_same_eye_at_once(cache, monkeypatch):
    """Another one writes its eye while this one is writing: both end with the file in place, and nothing else."""
    pictures, _ = blobs(20)
    save, others = safetensors.torch.save_file, []

    def saving(tensors, path):
        save(tensors, path)
        if not others:
            others.append(os.getpid() + 1)
            with monkeypatch.context() as patch:
                patch.setattr(os, "getpid", lambda: others[0])
                prepare_keypoints(pictures, latent=4, steps=2)

    monkeypatch.setattr(keypoints, "save_file", saving)
    eye = prepare_keypoints(pictures, latent=4, steps=2)
    (file,) = cache.iterdir()
    assert file.name.startswith("keypoints-")
    seen = torch.as_tensor(pictures[:2])
    torch.testing.assert_close(prepare_keypoints(pictures, latent=4, steps=2).encode(seen), eye.encode(seen))


def test_parts_see_through_eyes_and_are_saved_with_them():
    pictures, places = blobs(60)
    eye = train_keypoints(pictures, latent=5, steps=5)
    parts = {"actions": torch.randn(60, 2, 2), "front": torch.as_tensor(pictures), "state": torch.as_tensor(places).float()}
    codec = ModalityTokens.fit([parts], {"front": 4}, autoencoders={"front": eye})
    assert codec.components == {"actions": 4, "front": 4, "state": 2}
    tokens = codec.encode_modality("front", parts["front"][None])
    assert tokens.shape == (1, 60, 4)
    assert tokens.var(1).mean() == pytest.approx(1, rel=0.05)
    assert codec.decode_modality("front", tokens).shape == (1, 60, PX, PX, 3)
    empty = build_codec(describe_codec(codec))
    empty.load_state_dict(codec.state_dict())
    torch.testing.assert_close(empty.encode_modality("front", parts["front"][None]), tokens)
    torch.testing.assert_close(empty.decode_modality("front", tokens), codec.decode_modality("front", tokens))
    assert not empty.decode_modality("front", tokens).requires_grad


def test_all_numbers_of_an_eye_bring_its_picture_back():
    pictures, _ = blobs(60)
    eye = train_keypoints(pictures, latent=5, steps=5)
    episode = {"actions": torch.randn(60, 2, 2), "front": torch.as_tensor(pictures)}
    codec = ModalityTokens.fit([episode], {}, autoencoders={"front": eye}, cut=0)
    seen = torch.as_tensor(pictures)
    back = codec.decode_modality("front", codec.encode_modality("front", seen[None]))[0]
    torch.testing.assert_close(back, eye.decode(eye.encode(seen)), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("pictures", "options", "words"),
    [
        (np.zeros((5, 16, 16), np.uint8), {}, r"images \(n, px, px, 3\), uint8; got uint8 \(5, 16, 16\)"),
        (np.zeros((5, 16, 16, 3), np.float32), {}, "uint8; got float32"),
        (np.zeros((5, 12, 12, 3), np.uint8), {}, "multiple of 8: 8 must divide 12"),
        (np.zeros((5, 16, 16, 3), np.uint8), {"steps": 0}, "steps"),
        (np.zeros((5, 16, 16, 3), np.uint8), {"latent": 3}, "latent is at least 4.*got 3"),
    ],
)
def test_pictures_that_cannot_be_learned_are_refused(pictures, options, words):
    with pytest.raises(ValueError, match=words):
        train_keypoints(pictures, **{"steps": 2, **options})


def test_an_eye_says_how_it_was_made():
    assert KeypointAutoencoder(16, latent=4).config == {"px": 16, "latent": 4, "channels": 16}
