"""Films come back as they were written, whole or not at all; sheets show each frame in its place; pictures are fitted to a size."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diffusion_forcing.engine import media as module
from diffusion_forcing.engine.media import BAND, GAP, Film, contact_sheet, fit_square, side_by_side
from diffusion_forcing.engine.plotting import COLOURS

try:
    import av
except ImportError:
    av = None
needs_av = pytest.mark.skipif(av is None, reason="mp4 needs PyAV")
EVERY = [".gif", ".webp", pytest.param(".mp4", marks=needs_av)]


def smooth(t, height=64, width=64):
    """(t, height, width, 3): waves that wander."""
    time, y, x = np.meshgrid(np.arange(t), np.arange(height), np.arange(width), indexing="ij")
    waves = [np.sin(x / 9 + time / 5), np.sin(y / 7 - time / 8), np.sin((x + y) / 11 + time / 3)]
    return (127.5 + 120 * np.stack(waves, axis=-1)).astype(np.uint8)


def few_colours(t, height, width, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (200, 3), dtype=np.uint8)[rng.integers(0, 200, (t, height, width))]


def decoded(path):
    """Frames and the time each stands, in seconds."""
    if path.suffix == ".mp4":
        with av.open(str(path)) as container:
            found = [(frame.to_ndarray(format="rgb24"), float(frame.duration * frame.time_base)) for frame in container.decode(video=0)]
    else:
        found = []
        with Image.open(path) as image:
            for i in range(getattr(image, "n_frames", 1)):
                image.seek(i)
                found.append((np.asarray(image.convert("RGB")), image.info["duration"] / 1000))
    return np.stack([frame for frame, _ in found]), np.array([stands for _, stands in found])


@pytest.mark.parametrize("ending", EVERY)
@pytest.mark.parametrize("fps", [15, 7.5])
def test_a_film_comes_back_with_its_rate(ending, fps, tmp_path):
    frames, path = smooth(31), tmp_path / "new" / f"a{ending}"
    with Film(path, fps=fps, scale=2) as film:
        film.add(frames[0])
        film.add(frames[1:])
    assert film.frames == 31
    back, stands = decoded(path)
    assert back.shape == (31, 128, 128, 3)
    np.testing.assert_allclose(stands.sum(), 31 / fps, rtol=0.005)
    miss = np.abs(back[:, ::2, ::2].astype(int) - frames)
    assert miss.mean() <= {".webp": 0, ".gif": 10, ".mp4": 3}[ending]
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("ending", [".gif", ".webp"])
@pytest.mark.parametrize("scale", [1, 3])
def test_up_to_256_colours_a_frame_are_exact_at_any_size(ending, scale, tmp_path):
    frames = np.concatenate([few_colours(2, 33, 17), few_colours(2, 33, 17, seed=1)])
    with Film(tmp_path / f"a{ending}", scale=scale) as film:
        film.add(frames)
    back, _ = decoded(tmp_path / f"a{ending}")
    np.testing.assert_array_equal(back, frames.repeat(scale, axis=1).repeat(scale, axis=2))


@pytest.mark.parametrize("ending", [".gif", ".webp"])
def test_a_single_pixel_of_a_single_frame(ending, tmp_path):
    with Film(tmp_path / f"a{ending}") as film:
        film.add(np.full((1, 1, 3), 7, np.uint8))
    assert (decoded(tmp_path / f"a{ending}")[0] == 7).all()


@needs_av
def test_an_mp4_of_odd_sides_has_its_last_row_and_column_twice(tmp_path):
    frames = smooth(5, 33, 47)
    with Film(tmp_path / "a.mp4") as film:
        film.add(frames)
    back, _ = decoded(tmp_path / "a.mp4")
    assert back.shape == (5, 34, 48, 3)
    assert np.abs(back[:, :33, :47].astype(int) - frames).mean() < 5


@needs_av
def test_another_decoder_agrees_on_the_gif(tmp_path):
    frames = few_colours(4, 20, 20)
    with Film(tmp_path / "a.gif") as film:
        film.add(frames)
    with av.open(str(tmp_path / "a.gif")) as container:
        back = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    np.testing.assert_array_equal(back, frames)


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@needs_av
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_memory_does_not_grow_with_the_frames_of_an_mp4(tmp_path):
    frames = smooth(100) // 64 * 64
    with Film(tmp_path / "a.mp4") as film:
        for _ in range(3):
            film.add(frames)
        before = resident()
        for _ in range(17):  # 1,700 frames of 12 KB: 20 MB, if they were kept
            film.add(frames)
        grown = resident() - before
    assert film.frames == 2000
    assert grown < 8


@pytest.mark.parametrize("ending", EVERY)
def test_an_error_leaves_what_was_there(ending, tmp_path):
    path = tmp_path / f"a{ending}"
    path.write_bytes(b"before")
    with pytest.raises(ValueError, match="uint8"), Film(path) as film:
        film.add([*smooth(3), np.zeros((64, 64, 3))])
    film = Film(path)
    film.add(smooth(3))
    assert path.read_bytes() == b"before"
    film.__exit__(KeyError, KeyError(), None)
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == [path.name]


def test_a_killed_writer_leaves_no_file_of_that_name(tmp_path):
    script = (
        "import sys, numpy as np\n"
        "from diffusion_forcing.engine.media import Film\n"
        "with Film(sys.argv[1]) as film:\n"
        "    while True:\n"
        "        film.add(np.zeros((10, 64, 64, 3), np.uint8))\n"
        "        print(film.frames, flush=True)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "a.webp")], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert not (tmp_path / "a.webp").exists()


def test_two_writers_of_one_name_do_not_mix(tmp_path):
    path = tmp_path / "a.webp"
    one, two = Film(path), Film(path)
    for i in range(3):
        one.add(np.full((8, 8, 3), i, np.uint8))
        two.add(np.full((16, 16, 3), 9 + i, np.uint8))
    one.close()
    np.testing.assert_array_equal(decoded(path)[0][:, 0, 0, 0], [0, 1, 2])
    two.close()
    assert decoded(path)[0].shape == (3, 16, 16, 3)


def test_errors_say_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"\.mp4, \.gif, \.webp; got a\.avi"):
        Film(tmp_path / "a.avi")
    with pytest.raises(ValueError, match=r"from 0\.01 to 50 frames a second; got 60"):
        Film(tmp_path / "a.gif", fps=60)
    with pytest.raises(ValueError, match="frames a second; got nan"):
        Film(tmp_path / "a.gif", fps=float("nan"))
    with pytest.raises(ValueError, match="scale"):
        Film(tmp_path / "a.gif", scale=0)
    with pytest.raises(ValueError, match=r"whole number of times; got 1\.5"):
        Film(tmp_path / "a.gif", scale=1.5)
    with pytest.raises(ValueError, match="at most 16383 pixels a side"), Film(tmp_path / "a.webp", scale=2000) as film:
        film.add(smooth(1))
    with Film(tmp_path / "b.gif") as film:
        film.add(smooth(1))
        with pytest.raises(ValueError, match="one size"):
            film.add(smooth(1, 32, 64))
    with pytest.raises(ValueError, match="got float64"), Film(tmp_path / "a.gif") as film:
        film.add(np.zeros((2, 8, 8, 3)))
    with pytest.raises(ValueError, match=r"got \(2, 3, 8, 8\)"), Film(tmp_path / "a.gif") as film:
        film.add(np.zeros((2, 3, 8, 8), np.uint8))
    with pytest.raises(ValueError, match="no frames"), Film(tmp_path / "a.gif") as film:
        film.add(np.zeros((0, 8, 8, 3), np.uint8))
    assert os.listdir(tmp_path) == ["b.gif"]
    film = Film(tmp_path / "a.gif")
    film.add(smooth(1))
    film.close()
    with pytest.raises(ValueError, match="closed"):
        film.add(smooth(1))


def test_without_pyav_an_mp4_is_refused_at_once_and_the_rest_is_not(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImportError, match=r"pip install 'diffusion_forcing\[video\]'"):
        Film(tmp_path / "a.mp4")
    with Film(tmp_path / "a.gif") as film:
        film.add(smooth(2))


@needs_av
def test_an_encoder_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fail(self, frame):
        raise OSError("no space left")

    monkeypatch.setattr(module._Mp4, "add", fail)
    film = Film(tmp_path / "a.mp4")
    with pytest.raises(OSError, match="no space"):
        film.add(smooth(1))
    assert os.listdir(tmp_path) == []


def test_side_by_side_holds_the_shorter_film_and_names_both():
    left, right = few_colours(4, 8, 20), few_colours(2, 6, 30)
    page = side_by_side([("one", left), ("two", right)], scale=2)
    assert page.shape == (4, BAND + 16, 40 + GAP + 60, 3)
    np.testing.assert_array_equal(page[:, BAND:, :40:2][:, ::2], left)
    np.testing.assert_array_equal(page[:2, BAND : BAND + 12 : 2, 40 + GAP :: 2], right)
    np.testing.assert_array_equal(page[2, BAND : BAND + 12 : 2, 40 + GAP :: 2], right[-1])
    assert (page[0, :BAND, :40] < 128).any()
    assert (page[0, :BAND, 40 + GAP :] < 128).any()
    with pytest.raises(ValueError, match="got none"):
        side_by_side([])
    with pytest.raises(ValueError, match="'empty' has no frames"):
        side_by_side([("one", left), ("empty", left[:0])])


def test_a_sheet_shows_each_frame_and_frames_the_context(tmp_path):
    clips = np.stack([few_colours(7, 48, 48, seed) for seed in range(3)])
    contact_sheet(clips, tmp_path / "new" / "sheet.png", names=["a", "$b", "a long name"], every=2, mark=3)
    page = np.asarray(Image.open(tmp_path / "new" / "sheet.png").convert("RGB"))
    side = 96 + 6
    height, width = 3 * side + 24, 4 * side + 10 + 7 * 11
    assert page.shape == (height, width, 3)
    shown = page[24:, width - 4 * side :].reshape(3, side, 4, side, 3)[:, 3:-3:2, :, 3:-3:2]
    np.testing.assert_array_equal(shown.transpose(0, 2, 1, 3, 4), clips[:, ::2])
    borders = ["#" + bytes(page[24 + 1, width - 4 * side + column * side + 50]).hex() for column in range(4)]
    assert borders == [COLOURS[0], COLOURS[0], COLOURS[1], COLOURS[1]]
    assert (page[:24, -4 * side :] < 200).any(), "numbers of frames"
    assert (page[24:, : width - 4 * side] < 100).any(), "names"
    contact_sheet(clips[:1, :1], tmp_path / "plain.png")
    assert sorted(os.listdir(tmp_path)) == ["new", "plain.png"]


def test_a_sheet_that_cannot_be_drawn_says_why(tmp_path):
    clips = np.zeros((2, 5, 8, 8, 3), np.uint8)
    with pytest.raises(ValueError, match=r"\.png; got a\.jpg"):
        contact_sheet(clips, tmp_path / "a.jpg")
    with pytest.raises(ValueError, match="2 clips has as many names; got 1"):
        contact_sheet(clips, tmp_path / "a.png", names=["a"])
    with pytest.raises(ValueError, match="from 0 to 5; got 6"):
        contact_sheet(clips, tmp_path / "a.png", mark=6)
    with pytest.raises(ValueError, match=r"\(n, t, h, w, 3\)"):
        contact_sheet(clips[0], tmp_path / "a.png")
    with pytest.raises(ValueError, match="uint8"):
        contact_sheet(clips.astype(float), tmp_path / "a.png")
    with pytest.raises(ValueError, match="at most 30000 pixels a side"):
        contact_sheet(np.zeros((1, 400, 8, 8, 3), np.uint8), tmp_path / "a.png")


def test_averages_of_areas_are_those_of_blocks_and_keep_the_mean():
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (2, 96, 128, 3), dtype=np.uint8)
    centre = frames[:, :, 16:112]
    blocks = centre.reshape(2, 32, 3, 32, 3, 3).mean(axis=(2, 4))
    np.testing.assert_allclose(fit_square(frames, 32), blocks, atol=0.51)
    assert abs(fit_square(frames, 40).mean() - centre.mean()) < 0.1
    np.testing.assert_array_equal(fit_square(frames[:, :8, :8], 16), frames[:, :8, :8].repeat(2, axis=1).repeat(2, axis=2))
    np.testing.assert_array_equal(fit_square(np.full((50, 33, 3), 200, np.uint8), 7), np.full((7, 7, 3), 200))
    np.testing.assert_array_equal(fit_square(frames[0], 96), centre[0])
