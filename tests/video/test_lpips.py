"""LPIPS and AlexNet's features: properties of any weights, and the numbers of the real ones."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from diffusion_forcing.video import lpips as module
from diffusion_forcing.video.lpips import LPIPS

SMALL = (4, 6, 8, 8, 8)


def small(seed=0):
    return LPIPS(SMALL, torch.Generator().manual_seed(seed))


def frames(n=3, height=64, width=64, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, height, width, 3), dtype=np.uint8)


def blurred(images, times):
    """The mean of each pixel and its four neighbours, some times over."""
    x = images.astype(np.float64)
    for _ in range(times):
        x = (x + sum(np.roll(x, step, axis) for axis in (1, 2) for step in (-1, 1))) / 5
    return x.round().astype(np.uint8)


def scenes(n=4, size=64):
    """Something like pictures: smooth colours with edges."""
    rng = np.random.default_rng(1)
    y, x = np.mgrid[:size, :size] / size
    pictures = np.empty((n, size, size, 3))
    for i in range(n):
        for c in range(3):
            a, b, d = rng.uniform(-6, 6, 3)
            pictures[i, ..., c] = 128 + 90 * np.sign(np.sin(a * x * 4 + b * y * 4 + d)) * (0.4 + 0.6 * y)
    return pictures.clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def real():
    return LPIPS.pretrained()


# Any weights


@pytest.mark.parametrize("size", [(32, 32), (128, 128), (17, 40)])
def test_shapes_for_frames_of_any_size(size):
    p, x = small(), frames(2, *size)
    assert p.features(x).shape == (2, sum(SMALL)) == (2, p.width)
    assert p.distance(x, x[::-1]).shape == (2,)
    assert np.isfinite(p.features(x)).all()


def test_small_frames_are_enlarged_to_64():
    p, x = small(), torch.rand(2, 3, 32, 48)
    larger = torch.nn.functional.interpolate(x, size=(64, 96), mode="bilinear", align_corners=False)
    for a, b in zip(p.activations(x), p.activations(larger), strict=True):
        assert a.shape[-2:] == b.shape[-2:]
        assert torch.equal(a, b)


def test_distance_is_zero_for_equal_frames_and_symmetric():
    p, a, b = small(), frames(seed=1), frames(seed=2)
    assert (p.distance(a, a) == 0).all()
    assert (p.distance(a, b) > 0).all()
    assert np.allclose(p.distance(a, b), p.distance(b, a), rtol=1e-6)


def test_what_is_learned_by_is_the_distance_and_has_a_slope():
    p, a, b = small(), frames(2), frames(2, seed=1)
    pixels = [torch.tensor(f).movedim(-1, 1) / 127.5 - 1 for f in (a, b)]
    assert np.allclose(p(*pixels).numpy(), p.distance(a, b), rtol=1e-4)
    drawn = pixels[0].clone().requires_grad_()
    p(drawn, pixels[1]).sum().backward()
    nearer = p(drawn.detach() - 1e-2 * drawn.grad / drawn.grad.norm(), pixels[1])
    assert nearer.sum() < p(*pixels).sum()


def test_distance_by_its_formula():
    p, a, b = small(), frames(1, seed=1), frames(1, seed=2)
    expected = 0.0
    shift, scale = np.array([-0.030, -0.088, -0.188]), np.array([0.458, 0.448, 0.450])
    pair = []
    for x in (a, b):
        y = torch.from_numpy(((x[0] / 127.5 - 1 - shift) / scale).transpose(2, 0, 1)).float()[None]
        found = []
        for i, layer in enumerate(p.convolutions):
            y = torch.nn.functional.max_pool2d(y, 3, 2) if i in (1, 2) else y
            y = layer(y).clamp(min=0)
            found.append(y[0].double().numpy())
        pair.append(found)
    for x, y, head in zip(*pair, p.heads, strict=True):
        total = 0.0
        for i, j in np.ndindex(x.shape[1:]):
            u, v = x[:, i, j], y[:, i, j]
            gap = u / (np.sqrt((u**2).sum()) + 1e-10) - v / (np.sqrt((v**2).sum()) + 1e-10)
            total += (head.double().numpy() * gap**2).sum()
        expected += total / (x.shape[1] * x.shape[2])
    assert p.distance(a, b)[0] == pytest.approx(expected, rel=1e-4)


def test_chunks_do_not_show(monkeypatch):
    p, x = small(), frames(11, 32, 32)
    whole, steps = p.along(x)
    monkeypatch.setattr(module, "CHUNK", 4)
    pieces, again = p.along(x)
    assert np.allclose(whole, pieces, atol=1e-5)
    assert np.allclose(steps, again, atol=1e-6)
    assert np.allclose(whole, p.features(x), atol=1e-5)
    assert np.allclose(steps, p.distance(x[:-1], x[1:]), atol=1e-6)


def test_no_frames():
    p, x = small(), frames(0)
    assert p.features(x).shape == (0, p.width)
    assert p.distance(x, x).shape == (0,)
    assert [y.shape for y in p.along(x)] == [(0, p.width), (0,)]


@pytest.mark.parametrize("bad", [np.zeros((2, 64, 64, 3)), np.zeros((64, 64, 3), np.uint8), np.zeros((2, 3, 64, 64), np.uint8)])
def test_frames_of_another_form_are_refused(bad):
    with pytest.raises(ValueError, match="uint8"):
        small().features(bad)


def test_two_shapes_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        small().distance(frames(2), frames(3))


def test_random_weights_by_the_generator_alone():
    state = torch.get_rng_state()
    assert torch.equal(small(1).convolutions[0].weight, small(1).convolutions[0].weight)
    assert not torch.equal(small(1).convolutions[0].weight, small(2).convolutions[0].weight)
    assert torch.equal(state, torch.get_rng_state())


# The real weights


def test_the_numbers_of_the_reference(real):
    """What lpips 0.1.4, the authors' own package, says of these frames with the same AlexNet (its heads are the same to the bit)."""
    rng = np.random.default_rng(0)
    a = rng.integers(0, 256, (3, 64, 64, 3), dtype=np.uint8)
    b = np.clip(a.astype(int) // 2 + rng.integers(0, 128, a.shape), 0, 255).astype(np.uint8)
    assert np.allclose(real.distance(a, b), [0.07466239, 0.07499962, 0.08274706], atol=1e-4)  # weights are in half precision


def test_lpips_grows_with_blur_and_noise(real):
    x, rng = scenes(), np.random.default_rng(0)
    noise = rng.standard_normal(x.shape)
    by_blur = [real.distance(x, blurred(x, times)).mean() for times in (0, 1, 4, 16)]
    by_noise = [real.distance(x, np.clip(x + s * noise, 0, 255).astype(np.uint8)).mean() for s in (0, 10, 30, 90)]
    for found in (by_blur, by_noise):
        assert found[0] == 0
        assert all(a < b for a, b in pairwise(found))
    assert np.allclose(real.distance(x, x[::-1]), real.distance(x[::-1], x), rtol=1e-5)
    assert real.features(x).shape == (4, 1152)


def test_lpips_of_a_shift_is_less_than_of_another_scene(real):
    x = scenes()
    assert (real.distance(x, np.roll(x, 1, axis=2)) < real.distance(x, np.roll(x, 1, axis=0))).all()


def test_without_its_weights_it_says_where_they_should_be(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WEIGHTS", tmp_path / "lpips.safetensors")
    with pytest.raises(FileNotFoundError, match=r"lpips\.safetensors.*install"):
        LPIPS.pretrained()
    module.WEIGHTS.write_bytes(b"garbage")
    with pytest.raises(ValueError, match="damaged"):
        LPIPS.pretrained()
