"""Keypoint autoencoder: an image to a few numbers and back, trained once and kept."""

import numpy as np
import pytest
import torch

from diffusion_forcing.codecs import build_codec, describe_codec
from diffusion_forcing.imitation.keypoints import prepare_keypoints, train_keypoints
from diffusion_forcing.imitation.tokens import ModalityTokens

PX = 16


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def discs(number=200, seed=0):
    """Images of a red disc anywhere on grey, and its places (y, x)."""
    draw = np.random.default_rng(seed)
    rows, columns = np.mgrid[:PX, :PX]
    images = np.full((number, PX, PX, 3), 120, np.uint8)
    places = draw.uniform(3, PX - 3, (number, 2))
    for image, (y, x) in zip(images, places, strict=True):
        image[(rows - y) ** 2 + (columns - x) ** 2 < 6] = (220, 30, 30)
    return images, places


def test_keypoints_locate_an_object_better_than_as_many_principal_components():
    images, _ = discs(400)
    others, _ = discs(100, seed=1)
    autoencoder = train_keypoints(images, latent=8, steps=250)
    decoded = autoencoder.decode(autoencoder.encode(torch.as_tensor(others))).numpy()
    flat = images.reshape(400, -1) / 255
    mean = flat.mean(0)
    basis = np.linalg.svd(flat - mean, full_matrices=False)[2][:8]
    linear = ((others.reshape(100, -1) / 255 - mean) @ basis.T @ basis + mean).reshape(others.shape)
    error, linear_error = (float(((estimate - others / 255) ** 2).mean()) for estimate in (decoded, linear))
    assert error < 0.8 * linear_error


def test_a_keypoint_is_where_the_object_is():
    images, _ = discs(400)
    others, places = discs(100, seed=1)
    latent = train_keypoints(images, latent=4, steps=200).encode(torch.as_tensor(others)).numpy()
    assert abs(np.corrcoef(latent[:, 0], places[:, 1])[0, 1]) > 0.9  # x of the only keypoint
    assert abs(np.corrcoef(latent[:, 1], places[:, 0])[0, 1]) > 0.9


def test_an_autoencoder_is_the_same_each_time_and_taken_from_the_cache(cache):
    images, _ = discs(40)
    one = prepare_keypoints(images, latent=4, steps=3)
    assert len(list(cache.glob("keypoints-*.safetensors"))) == 1
    reports = []
    again = prepare_keypoints(images, latent=4, steps=3, progress=lambda *report: reports.append(report))
    assert not reports
    other = prepare_keypoints(images, latent=4, steps=4, progress=lambda *report: reports.append(report))
    assert reports[-1] == ("training keypoints", 4, 4)
    latents = [each.encode(torch.as_tensor(images[:2])) for each in (one, again, train_keypoints(images, latent=4, steps=3), other)]
    torch.testing.assert_close(latents[0], latents[1])
    torch.testing.assert_close(latents[0], latents[2])
    assert not torch.allclose(latents[0], latents[3])


def test_modality_tokens_encode_by_autoencoders_and_are_saved_with_them():
    images, places = discs(60)
    autoencoder = train_keypoints(images, latent=5, steps=5)
    episode = {"actions": torch.randn(60, 2, 2), "front": torch.as_tensor(images), "state": torch.as_tensor(places).float()}
    codec = ModalityTokens.fit([episode], {"front": 4}, autoencoders={"front": autoencoder})
    assert codec.components == {"actions": 4, "front": 4, "state": 2}
    tokens = codec.encode_modality("front", episode["front"][None])
    assert tokens.shape == (1, 60, 4)
    assert tokens.var(1).mean() == pytest.approx(1, rel=0.05)
    assert codec.decode_modality("front", tokens).shape == (1, 60, PX, PX, 3)
    empty = build_codec(describe_codec(codec))
    empty.load_state_dict(codec.state_dict())
    torch.testing.assert_close(empty.encode_modality("front", episode["front"][None]), tokens)
    torch.testing.assert_close(empty.decode_modality("front", tokens), codec.decode_modality("front", tokens))
    assert not empty.decode_modality("front", tokens).requires_grad


def test_with_all_components_tokens_decode_as_the_latent_does():
    images, _ = discs(60)
    autoencoder = train_keypoints(images, latent=5, steps=5)
    raw = torch.as_tensor(images)
    codec = ModalityTokens.fit([{"actions": torch.randn(60, 2, 2), "front": raw}], {}, autoencoders={"front": autoencoder}, cut=0)
    back = codec.decode_modality("front", codec.encode_modality("front", raw[None]))[0]
    torch.testing.assert_close(back, autoencoder.decode(autoencoder.encode(raw)), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("images", "options", "words"),
    [
        (np.zeros((5, 16, 16), np.uint8), {}, r"got uint8 \(5, 16, 16\)"),
        (np.zeros((5, 16, 16, 3), np.float32), {}, "got float32"),
        (np.zeros((5, 12, 12, 3), np.uint8), {}, "8 must divide 12"),
        (np.zeros((5, 16, 16, 3), np.uint8), {"steps": 0}, "steps"),
        (np.zeros((5, 16, 16, 3), np.uint8), {"latent": 3}, "latent"),
    ],
)
def test_bad_images_and_options_are_refused(images, options, words):
    with pytest.raises(ValueError, match=words):
        train_keypoints(images, **{"steps": 2, **options})
