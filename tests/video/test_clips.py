"""Clips from folders and worlds: what was written is read, what cannot be read is named, and nothing is decoded twice."""

import os
import struct
import sys
import threading
import warnings

import numpy as np
import pytest
from worlds import Flat

from diffusion_forcing.engine.media import Film, Unreadable
from diffusion_forcing.video import clips as module
from diffusion_forcing.video.clips import prepare_clips, prepare_world, read_actions, read_clip, read_clips

try:
    import av
except ImportError:
    av = None
needs_av = pytest.mark.skipif(av is None, reason="mp4 needs PyAV")


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "mine"
    made.mkdir()
    return made


def smooth(t, height=64, width=64, seed=0):
    """(t, height, width, 3): waves of at most 64 colours that wander."""
    time, y, x = np.meshgrid(np.arange(t) + 7 * seed, np.arange(height), np.arange(width), indexing="ij")
    waves = [np.sin(x / 9 + time / 5), np.sin(y / 7 - time / 8), np.sin((x + y) / 11 + time / 3)]
    return (127.5 + 127 * np.stack(waves, axis=-1)).astype(np.uint8) // 64 * 64


def write(path, frames, fps=15, scale=1):
    with Film(path, fps=fps, scale=scale) as film:
        film.add(frames)


# Formats.


@pytest.mark.parametrize("ending", [".gif", ".webp", pytest.param(".mp4", marks=needs_av)])
def test_a_film_comes_back(ending, folder):
    frames = smooth(9)
    (folder / "deep" / "er").mkdir(parents=True)
    write(folder / "deep" / "er" / f"a{ending}", frames, scale=2)
    (clip,) = read_clips(folder)
    assert clip.frames.shape == (9, 64, 64, 3)
    assert clip.frames.dtype == np.uint8
    assert np.abs(clip.frames.astype(int) - frames).mean() <= (3 if ending == ".mp4" else 0)
    assert (clip.actions.shape, clip.poses.shape) == ((9, 0), (9, 0))
    np.testing.assert_array_equal(read_clip(folder / "deep" / "er" / f"a{ending}").frames, clip.frames)


@pytest.mark.parametrize(
    ("key", "first", "kind"), [("video", False, np.uint8), ("frames", True, np.uint8), (None, False, np.float32), (None, True, np.float64)]
)
def test_arrays_come_back_exactly_in_each_layout(key, first, kind, folder):
    frames = smooth(70, 32, 32)
    array = frames if kind == np.uint8 else (frames / 255).astype(kind)
    array = np.moveaxis(array, -1, 1) if first else array
    if key is None:
        np.save(folder / "a.npy", array)
    else:
        np.savez(folder / "a.npz", **{key: array})
    np.testing.assert_array_equal(read_clips(folder, px=32)[0].frames, frames)


def test_the_published_navigation_sets_are_read_as_they_are(folder):
    """DMLab: npz with video and numbered actions. Two folders with the same kinds have the same columns, if asked."""
    (folder / "train" / "0").mkdir(parents=True)
    for i, actions in enumerate([[0, 1, 2, 1], [0, 0, 1, 1]]):
        np.savez(folder / "train" / "0" / f"{i}.npz", video=smooth(4), actions=np.array(actions, np.int32))
    one, two = read_clips(folder / "train")
    np.testing.assert_array_equal(one.actions, np.eye(3)[[0, 1, 2, 1]])
    assert two.actions.shape == (4, 3)
    assert prepare_clips(folder / "train", action_kinds=5).actions.shape == (8, 5)
    with pytest.raises(ValueError, match="an action 2, where action_kinds=2"):
        read_clips(folder / "train", action_kinds=2)


@needs_av
def test_the_published_minecraft_set_is_read_as_it_is(folder):
    write(folder / "000000.mp4", smooth(5, 128, 128), fps=20)
    np.savez(folder / "000000.npz", actions=np.array([0, 1, 3, 2, 1]), depth=np.zeros((5, 4, 4)), pos=np.zeros((5, 3)))
    (clip,) = read_clips(folder)
    np.testing.assert_array_equal(clip.actions.argmax(1), [0, 1, 3, 2, 1])
    assert clip.frames.shape == (5, 64, 64, 3)


# Sizes and rates.


def test_the_square_is_cut_from_the_middle_of_tall_and_wide_films(folder):
    wide = np.zeros((2, 20, 60, 3), np.uint8)
    wide[:, :, 20:40] = 255
    write(folder / "wide.webp", wide)
    write(folder / "tall.webp", wide.transpose(0, 2, 1, 3))
    for clip in read_clips(folder, px=16):
        assert (clip.frames == 255).all()


@pytest.mark.parametrize(("fps", "kept"), [(20, range(40)), (10, range(0, 40, 2)), (5, range(0, 40, 4)), (None, range(40))])
@pytest.mark.parametrize("ending", [".gif", pytest.param(".mp4", marks=needs_av)])
def test_fps_keeps_the_frames_that_are_shown_at_its_times(ending, fps, kept, folder):
    frames = np.broadcast_to(np.arange(0, 240, 6, dtype=np.uint8)[:, None, None, None], (40, 16, 16, 3))
    write(folder / f"a{ending}", frames, fps=20)
    (clip,) = read_clips(folder, px=16, fps=fps)
    np.testing.assert_array_equal(np.round(clip.frames[:, 8, 8, 0] / 6), list(kept))


def test_fps_agrees_with_clocks_that_are_rounded(folder):
    frames = np.broadcast_to(np.arange(60, dtype=np.uint8)[:, None, None, None], (60, 8, 8, 3))
    write(folder / "a.gif", frames, fps=15)  # 70, 60, 70 ... ms
    np.testing.assert_array_equal(read_clips(folder, px=8, fps=15)[0].frames[:, 0, 0, 0], np.arange(60))
    with pytest.raises(ValueError, match=r"a\.gif was left out.*15 frames a second.*30"):
        read_clips(folder, px=8, fps=30)
    np.save(folder / "a.npy", np.zeros((60, 1)))
    assert read_clips(folder, px=8, fps=15)[0].actions.shape == (60, 1)
    with pytest.raises(ValueError, match=r"a\.gif, of which fps=5 keeps 20; leave fps out"):
        read_clips(folder, px=8, fps=5)


@needs_av
def test_the_rotation_of_a_film_is_applied(folder):
    """The camera's matrix turns by a quarter to the right: what is on the left of the file is on top."""
    frames = np.zeros((3, 32, 32, 3), np.uint8)
    frames[:, :, :16] = 255
    write(folder / "a.mp4", frames)
    data = bytearray((folder / "a.mp4").read_bytes())
    plain = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    at = data.index(plain, data.index(b"tkhd"))
    data[at : at + 36] = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 32 << 16, 0, 1 << 30)
    (folder / "a.mp4").write_bytes(data)
    clip = read_clip(folder / "a.mp4", px=32)
    assert clip.frames[:, :12].min() > 200
    assert clip.frames[:, 20:].max() < 50


# Actions.


def test_actions_stand_beside_their_film_in_each_form(folder):
    rows = np.array([[0, 0.5], [1, -2], [3, 4]])
    for name in ("a", "b", "c", "d"):
        write(folder / f"{name}.webp", smooth(3))
    np.save(folder / "a.npy", rows)
    np.savez(folder / "b.npz", actions=rows)
    (folder / "c.csv").write_text("turn,go\n0,0.5\n1,-2\n3,4\n")
    (folder / "d.csv").write_text("0,0.5\n1,-2\n3,4\n")
    np.savez(folder / "e.npz", video=smooth(3), actions=rows)
    np.savez(folder / "f.npz", video=smooth(3))
    np.save(folder / "f.npy", rows)
    for clip in read_clips(folder):
        np.testing.assert_array_equal(clip.actions, rows.astype(np.float32))
        assert clip.actions.dtype == np.float32


def test_actions_that_do_not_fit_are_named_with_both_counts(folder):
    write(folder / "a.webp", smooth(3))
    np.save(folder / "a.npy", np.zeros((4, 2)))
    with pytest.raises(ValueError, match=r"a\.webp was left out: it has 3 frames and 4 actions in a\.npy"):
        read_clips(folder)
    np.save(folder / "a.npy", np.array([[0.0], [np.nan], [1]]))
    with pytest.raises(ValueError, match=r"a\.npy is not finite at frame 1"):
        read_clips(folder)
    np.save(folder / "a.npy", np.array([0, -1, 2]))
    with pytest.raises(ValueError, match=r"from 0; got -1.*\(t, 1\)"):
        read_clips(folder)
    (folder / "a.csv").write_text("1\n2\n3\n")
    with pytest.raises(ValueError, match=r"both a\.csv and a\.npy; keep one"):
        read_clips(folder)
    (folder / "a.npy").unlink()
    (folder / "a.csv").write_text("1,2\n2\n3,4\n")
    with pytest.raises(ValueError, match=r"a\.csv that cannot be read \(row 2 has 1 cells"):
        read_clips(folder)
    (folder / "a.csv").write_text("1\n2\n3\n")
    write(folder / "b.webp", smooth(3))
    with pytest.raises(ValueError, match=r"b\.webp has no actions"):
        prepare_clips(folder)


def test_bad_actions_leave_out_their_clip_alone(folder):
    for name in "abc":
        write(folder / f"{name}.webp", smooth(3))
        np.save(folder / f"{name}.npy", np.zeros((3, 2)))
    np.save(folder / "b.npy", np.zeros((4, 2)))
    np.savez(folder / "d.npz", video=smooth(3), actions=np.full((3, 2), np.nan))
    made = prepare_clips(folder)
    assert made.names == ("a.webp", "c.webp")
    assert [note.split()[0] for note in made.notes] == ["b.webp", "d.npz"]


def test_actions_are_read_from_a_file_of_their_own(folder):
    np.save(folder / "kinds.npy", np.array([0, 2, 1]))
    (folder / "kinds.csv").write_text("action\n0\n2\n1\n")
    for name in ("kinds.npy", "kinds.csv"):
        np.testing.assert_array_equal(read_actions(folder / name, 3), np.eye(3)[[0, 2, 1]])
    np.savez(folder / "rows.npz", actions=np.ones((2, 3)))
    np.testing.assert_array_equal(read_actions(folder / "rows.npz", 3), np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"an action is 2 numbers here; .* has 3 in a row"):
        read_actions(folder / "rows.npz", 2)
    with pytest.raises(ValueError, match=r"in a \.npy, \.npz or \.csv; got a\.txt"):
        read_actions(folder / "a.txt", 2)


# What cannot be read.


def test_a_folder_without_clips_says_what_it_holds(folder, tmp_path):
    with pytest.raises(ValueError, match="which holds nothing"):
        read_clips(folder)
    (folder / "a.avi").write_bytes(b"x")
    (folder / ".hidden.mp4").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"which holds 1 with \.avi; clips end with \.mp4"):
        prepare_clips(folder)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        read_clips(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_clip(folder / "a.mp4")
    with pytest.raises(ValueError, match="px counts from 1"):
        read_clips(folder, px=0)
    with pytest.raises(ValueError, match="fps is a number"):
        read_clips(folder, fps=0)


@needs_av
def test_bad_files_are_named_and_the_rest_is_read(folder):
    for ending in (".gif", ".webp", ".mp4"):
        write(folder / f"good{ending}", smooth(12))
        data = (folder / f"good{ending}").read_bytes()
        (folder / f"cut{ending}").write_bytes(data[: len(data) * 2 // 3])
        (folder / f"text{ending}").write_text("ffconcat version 1.0\nfile good.mp4\n")
        (folder / f"empty{ending}").touch()
    np.savez(folder / "other.npz", weights=np.zeros(3))
    np.savez(folder / "half.npz", video=smooth(3))
    (folder / "half.npz").write_bytes((folder / "half.npz").read_bytes()[:-100])
    np.savez(folder / "range.npz", video=np.full((3, 8, 8, 3), 200.0))
    np.savez(folder / "nan.npz", video=np.full((3, 8, 8, 3), np.nan))
    np.save(folder / "shape.npy", np.zeros((3, 8, 8)))
    np.save(folder / "dtype.npy", np.zeros((3, 8, 8, 3), np.int64))
    np.save(folder / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    write(folder / "short.webp", smooth(2))
    stages = []
    made = prepare_clips(folder, min_frames=3, progress=lambda *stage: stages.append(stage))
    assert made.names == ("good.gif", "good.mp4", "good.webp")
    assert made.lengths.tolist() == [12, 12, 12]
    notes = {note.split(" was left out: it ")[0]: note.split(" was left out: it ")[1] for note in made.notes}
    assert len(notes) == len(made.notes) == 17
    assert {name for name in notes if "cut short" in notes[name]} == {"cut.gif", "cut.webp", "cut.mp4"}
    assert {name for name in notes if notes[name] == "is empty"} == {"empty.gif", "empty.webp", "empty.mp4"}
    assert "is no mp4" in notes["text.mp4"]
    assert "is no gif" in notes["text.gif"]
    assert "neither `video` nor `frames`, but weights" in notes["other.npz"]
    assert "from 200 to 200" in notes["range.npz"]
    assert "from nan to nan" in notes["nan.npz"]
    assert "(3, 8, 8)" in notes["shape.npy"]
    assert "int64" in notes["dtype.npy"]
    assert "damaged" in notes["half.npz"]
    assert "no array" in notes["objects.npy"]
    assert notes["short.webp"] == "has 2 frames, fewer than 3"
    assert stages[-1] == ("reading mine", 20, 20)
    assert prepare_clips(folder, min_frames=3).notes == made.notes, "the cache remembers them"
    with pytest.warns(UserWarning, match=r"text\.mp4 was left out"):
        assert len(read_clips(folder, min_frames=3)) == 3
    with pytest.raises(ValueError, match=r"none of the 20 clips.*17 more"):
        prepare_clips(folder, min_frames=30)
    with pytest.raises(Unreadable, match=r"text\.mp4 is no mp4"):
        read_clip(folder / "text.mp4")


@needs_av
def test_a_film_without_pictures_and_one_of_a_strange_name(folder):
    write(folder / "http:a b%20.mp4", smooth(3))
    assert read_clips(folder)[0].frames.shape == (3, 64, 64, 3)
    with av.open(str(folder / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=44100, layout="mono")
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        sound.sample_rate = 44100
        container.mux(stream.encode(sound))
        container.mux(stream.encode())
    with pytest.warns(UserWarning, match=r"sound\.mp4 was left out: it holds no pictures"):
        assert len(read_clips(folder)) == 1


def test_without_pyav_an_mp4_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    (folder / "a.mp4").write_bytes(b"x")
    with pytest.raises(ImportError, match=r"pip install 'diffusion_forcing\[video\]'"):
        read_clips(folder)


# The cache.


def test_the_cache_is_used_until_a_file_changes(folder, cache, monkeypatch):
    read = []
    true = module._read
    monkeypatch.setattr(module, "_read", lambda file, *rest: read.append(file.name) or true(file, *rest))
    write(folder / "a.webp", smooth(3))
    write(folder / "b.webp", smooth(5, seed=1))
    made = prepare_clips(folder, px=32)
    assert read == ["a.webp", "b.webp"]
    assert isinstance(made.frames, np.memmap)
    assert (made.starts.tolist(), made.lengths.tolist()) == ([0, 3], [3, 5])
    assert made.actions.shape == (8, 0)
    again = prepare_clips(folder, px=32)
    assert len(read) == 2
    np.testing.assert_array_equal(again.frames, made.frames)
    np.testing.assert_array_equal(again.clip(1).frames, read_clip(folder / "b.webp", px=32).frames)
    with pytest.raises(IndexError, match="2 clips"):
        made.clip(2)

    read.clear()
    write(folder / "b.webp", smooth(6))
    assert prepare_clips(folder, px=32).lengths.tolist() == [3, 6]
    assert read == ["a.webp", "b.webp"]
    os.utime(folder / "a.webp", (1, 1))
    prepare_clips(folder, px=32)
    assert len(read) == 4
    (folder / "b.csv").write_text("1\n" * 6)
    (folder / "a.csv").write_text("2\n" * 3)
    assert prepare_clips(folder, px=32).actions[:, 0].tolist() == [2.0] * 3 + [1.0] * 6
    prepare_clips(folder, px=16)
    assert len(read) == 8
    assert all(not name.startswith(".") for name in os.listdir(cache))


def test_an_interrupted_preparation_leaves_nothing_in_the_cache(folder, cache, monkeypatch):
    write(folder / "a.webp", smooth(3))
    write(folder / "b.webp", smooth(3))

    def stop(what, done, of):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_clips(folder, progress=stop)
    assert os.listdir(cache) == []
    with pytest.raises(RuntimeError, match="changed while they were read"):
        prepare_clips(folder, progress=lambda *_: os.utime(folder / "a.webp", (1, 1)))
    assert os.listdir(cache) == []


def test_two_processes_may_make_the_same_set_and_killed_ones_are_cleaned_up(folder, cache):
    write(folder / "a.webp", smooth(3))
    inner = []

    def meanwhile(*_):
        other = threading.Thread(target=lambda: inner.append(prepare_clips(folder)))
        other.start()
        other.join()

    outer = prepare_clips(folder, progress=meanwhile)
    np.testing.assert_array_equal(outer.frames, inner[0].frames)
    frames, index = sorted(os.listdir(cache))
    for name, age in ((f".{frames}.1-1.tmp", 1), (f".{frames}.2-2.tmp", None)):
        (cache / name).touch()
        if age is not None:
            os.utime(cache / name, (age, age))
    (cache / frames).unlink()
    prepare_clips(folder)
    assert sorted(os.listdir(cache)) == [f".{frames}.2-2.tmp", frames, index]


def test_a_damaged_cache_says_so(folder, cache):
    write(folder / "a.webp", smooth(3))
    prepare_clips(folder)
    (frames,) = cache.glob("*.npy")
    frames.write_bytes(frames.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"is damaged .*; delete it and it is made again"):
        prepare_clips(folder)


# Worlds.


def test_a_world_is_simulated_once_and_larger_sets_begin_like_smaller(cache, monkeypatch):
    stages = []
    made = prepare_world(Flat(), 6, 5, progress=lambda *stage: stages.append(stage))
    assert stages == [("simulating Flat", i, 6) for i in range(1, 7)]
    assert made.frames.shape == (30, 8, 8, 3)
    assert (made.actions.shape, made.poses.shape) == ((30, 2), (30, 1))
    for i in range(6):
        expected = Flat().clip(int(made.names[i]), 5)
        for part, true in zip(made.clip(i), expected, strict=True):
            np.testing.assert_array_equal(part, true)
    prepare_world(Flat(), 6, 5, progress=lambda *stage: stages.append(stage))
    assert len(stages) == 6
    assert prepare_world(Flat(), 9, 5).names[:6] == made.names
    assert not set(prepare_world(Flat(), 6, 5, seed=1).names) & set(made.names)
    assert not np.array_equal(prepare_world(Flat(shade=3), 6, 5).frames, made.frames)
    count = len(os.listdir(cache))
    true = Flat.clip
    monkeypatch.setattr(Flat, "clip", lambda self, seed, frames: true(Flat(shade=9), seed, frames))
    assert not np.array_equal(prepare_world(Flat(), 6, 5).frames, made.frames), "another law under the same options"
    assert len(os.listdir(cache)) == count + 2


def test_processes_make_what_one_makes(cache):
    alone = prepare_world(Flat(), 12, 4)
    for file in cache.iterdir():
        file.rename(file.with_suffix(f".alone{file.suffix}"))
    together = prepare_world(Flat(), 12, 4, workers=2)
    assert together.names == alone.names
    for one, two in zip(alone[:5], together[:5], strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_world_of_the_wrong_shapes_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="a world is a dataclass"):
        prepare_world(object(), 1, 1)
    with pytest.raises(ValueError, match="clips counts from 1"):
        prepare_world(Flat(), 0, 1)
    true = Flat.clip
    monkeypatch.setattr(Flat, "clip", lambda self, seed, frames: true(self, seed, frames + 1))
    with pytest.raises(ValueError, match=r"frames \(4, 8, 8, 3\) of uint8"):
        prepare_world(Flat(), 2, 4)


def test_reading_good_clips_warns_of_nothing(folder):
    write(folder / "a.gif", smooth(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_clips(folder)
