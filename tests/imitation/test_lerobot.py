"""LeRobot data sets, written here in each version of the layout: what was written is read, and bad files are named."""

import io
import json
import re
import sys
import warnings

import numpy as np
import pytest

from diffusion_forcing.engine.media import Film, fit_square
from diffusion_forcing.imitation.lerobot import read_lerobot
from diffusion_forcing.imitation.windows import timesteps_of

pa = pytest.importorskip("pyarrow", reason="LeRobot data need pyarrow")
pq = pytest.importorskip("pyarrow.parquet", reason="LeRobot data need pyarrow")
try:
    import av
except ImportError:
    av = None
needs_av = pytest.mark.skipif(av is None, reason="videos of LeRobot data need PyAV")

FPS = 10
CELL = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
TOP, WRIST = "observation.images.top", "observation.images.wrist"


def shades(number, first=0, height=24, width=32):
    """(number, height, width, 3): frame i is of one grey, 8 * (first + i); the sides that a square leaves out are white."""
    frames = np.broadcast_to(8 * (first + np.arange(number))[:, None, None, None], (number, height, width, 3)).astype(np.uint8)
    frames[:, :, : (width - height) // 2] = frames[:, :, (width + height) // 2 :] = 255
    return frames


def shown(images):
    """The number of each frame of `shades`."""
    return np.round(images.mean((1, 2, 3)) / 8).astype(int).tolist()


def episode(number, length, seed=0):
    rng = np.random.default_rng([number, seed])
    return {
        "observation.state": rng.standard_normal((length, 3)).astype(np.float32),
        "action": rng.standard_normal((length, 2)).astype(np.float32),
        "timestamp": (np.arange(length) / FPS).astype(np.float32),
        "frame_index": np.arange(length),
        "episode_index": np.full(length, number),
        "task_index": np.zeros(length, int),
    }


def png(frame):
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(frame).save(file, "PNG")
    return file.getvalue()


def table(columns, stored=()):
    """stored: features of which frames are kept as {bytes, path}."""
    made = {}
    for name, column in columns.items():
        if name in stored:
            cells = [{"bytes": png(frame), "path": f"frame_{i:06d}.png"} for i, frame in enumerate(column)]
            made[name] = pa.array(cells, CELL)
        elif column.ndim == 2:
            flat = pa.array(column.ravel(), pa.float32())
            made[name] = pa.FixedSizeListArray.from_arrays(flat, column.shape[1])
        else:
            made[name] = pa.array(column)
    return pa.table(made)


def save(path, what):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(what, path)


def film(path, frames):
    path.parent.mkdir(parents=True, exist_ok=True)
    with Film(path, fps=FPS) as opened:
        opened.add(frames)


def info(folder, films=(), stored=(), version="v2.1", total=0, **other):
    numbers = {"observation.state": {"dtype": "float32", "shape": [3]}, "action": {"dtype": "float32", "shape": [2]}}
    pictures = {name: {"dtype": "video", "shape": [24, 32, 3]} for name in films}
    pictures |= {name: {"dtype": "image", "shape": [24, 32, 3]} for name in stored}
    three = version.startswith("v3")
    made = {
        "codebase_version": version,
        "fps": FPS,
        "total_episodes": total,
        "chunks_size": 2,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
        if three
        else "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
        if three
        else "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        "features": {**numbers, **pictures},
        **other,
    }
    (folder / "meta").mkdir(parents=True, exist_ok=True)
    (folder / "meta" / "info.json").write_text(json.dumps(made))


def parts(number):
    """Where the files of an episode are, in chunks of 2."""
    return f"data/chunk-{number // 2:03d}/episode_{number:06d}.parquet", f"videos/chunk-{number // 2:03d}/%s/episode_{number:06d}.mp4"


def write_2(folder, lengths, films=(), stored=(), version="v2.1", **other):
    """A data set of version 2, the frames of episode i beginning with grey 5 * i, those of the second camera 7 later."""
    info(folder, films, stored, version, len(lengths), **other)
    written = []
    lines = []
    for i, length in enumerate(lengths):
        columns = episode(i, length)
        columns |= {name: shades(length, 5 * i + 7 * j) for j, name in enumerate(stored)}
        save(folder / parts(i)[0], table(columns, stored))
        for j, name in enumerate(films):
            film(folder / (parts(i)[1] % name), shades(length, 5 * i + 7 * j))
        lines.append(json.dumps({"episode_index": i, "tasks": ["push"], "length": length}))
        written.append(columns)
    (folder / "meta" / "episodes.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "meta" / "tasks.jsonl").write_text('{"task_index": 0, "task": "push"}\n')
    return written


def write_3(folder, lengths, films=(), stored=()):
    """A data set of version 3: all episodes in one table and one film a camera, but for the last, which has its own."""
    info(folder, films, stored, "v3.0", len(lengths))
    written, rows = [], []
    for i, length in enumerate(lengths):
        columns = episode(i, length)
        columns |= {name: shades(length, 5 * i + 7 * j) for j, name in enumerate(stored)}
        written.append(columns)
        last = i == len(lengths) - 1
        begin = 0.0 if last else sum(lengths[:i]) / FPS
        row = {"episode_index": i, "length": length, "data/chunk_index": 0, "data/file_index": int(last)}
        for name in films:
            row |= {f"videos/{name}/chunk_index": 0, f"videos/{name}/file_index": int(last), f"videos/{name}/from_timestamp": begin}
        rows.append(row)
    save(folder / "meta/episodes/chunk-000/file-000.parquet", pa.Table.from_pylist(rows))
    for file, numbers in ((0, range(len(lengths) - 1)), (1, [len(lengths) - 1])):
        save(folder / f"data/chunk-000/file-00{file}.parquet", pa.concat_tables([table(written[i], stored) for i in numbers]))
        for j, name in enumerate(films):
            frames = np.concatenate([shades(lengths[i], 5 * i + 7 * j) for i in numbers])
            film(folder / f"videos/{name}/chunk-000/file-00{file}.mp4", frames)
    return written


def rows(length, every):
    """Those that are frames: every so many, and the last."""
    return sorted({*range(0, length, every), length - 1})


def same(data, written, every=1):
    for i, columns in enumerate(written):
        np.testing.assert_array_equal(data.actions[i], columns["action"])
        np.testing.assert_array_equal(data.states[i], columns["observation.state"][rows(len(columns["action"]), every)])


# What was written.


@pytest.mark.parametrize("version", ["v2.0", "v2.1", "2.1", "v3.0"])
def test_each_version_comes_back(version, tmp_path):
    films = (TOP, WRIST) if av else ()
    lengths = [9, 5, 12]
    written = write_3(tmp_path, lengths, films) if version == "v3.0" else write_2(tmp_path, lengths, films, version=version)
    reports = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = read_lerobot(tmp_path, px=16, progress=lambda *report: reports.append(report))
    same(data, written)
    assert (data.fps, data.every, data.notes) == (10, 1, ())
    assert reports == [(f"reading {tmp_path.name}", i, 3) for i in (1, 2, 3)]
    assert data.cameras == (("top", "wrist") if films else ())
    if films:
        assert data.px == 16
        for i, length in enumerate(lengths):
            assert shown(data.images["top"][i]) == list(range(5 * i, 5 * i + length))
            assert shown(data.images["wrist"][i]) == list(range(5 * i + 7, 5 * i + 7 + length))


@pytest.mark.parametrize("write", [write_2, write_3])
@pytest.mark.parametrize("every", [2, 20])
def test_frames_are_those_before_every_nth_action_and_the_last(write, every, tmp_path):
    films = (TOP,) if av else ()
    written = write(tmp_path, [9, 10, 11], films, ("observation.image",))
    data = read_lerobot(tmp_path, px=8, every=every)
    same(data, written, every)
    assert data.every == every
    for i in range(3):
        expected = [5 * i + row for row in rows(9 + i, every)]
        assert shown(data.images["image"][i]) == expected
        if films:
            assert shown(data.images["top"][i]) == expected


def test_the_last_frame_is_the_last_row(tmp_path):
    (written,) = write_2(tmp_path, [9])
    moments = timesteps_of(read_lerobot(tmp_path, every=3), 0, 6)
    np.testing.assert_array_equal(moments["state"], written["observation.state"][[0, 6, 8]])
    np.testing.assert_array_equal(moments["actions"][2], written["action"][[6, 7, 8, 8, 8, 8]])


def test_images_in_tables_are_cropped_and_averaged(tmp_path):
    rng = np.random.default_rng(0)
    info(tmp_path, stored=(TOP,), total=1)
    frames = rng.integers(0, 256, (3, 24, 40, 3), np.uint8)
    save(tmp_path / parts(0)[0], table({**episode(0, 3), TOP: frames}, (TOP,)))
    for px in (24, 7):
        np.testing.assert_array_equal(read_lerobot(tmp_path, px=px).images["top"][0], fit_square(frames, px))


def test_an_image_may_be_a_file_beside_the_table(tmp_path):
    info(tmp_path, stored=(TOP,), total=1)
    frames = shades(3)
    for i, frame in enumerate(frames):
        path = tmp_path / "images" / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(png(frame))
    cells = pa.array([{"bytes": None, "path": f"images/{i}.png"} for i in range(3)], CELL)
    save(tmp_path / parts(0)[0], table(episode(0, 3)).append_column(TOP, cells))
    assert shown(read_lerobot(tmp_path).images["top"][0]) == [0, 1, 2]
    (tmp_path / "images" / "1.png").unlink()
    with pytest.raises(ValueError, match=r"damaged image of 'observation\.images\.top' at frame 1"):
        read_lerobot(tmp_path)


def test_cameras_and_states_are_chosen_by_name(tmp_path):
    write_2(tmp_path, [4, 4], stored=(TOP, WRIST))
    assert read_lerobot(tmp_path, cameras=["wrist"]).cameras == ("wrist",)
    assert read_lerobot(tmp_path, cameras=[WRIST, "top"]).cameras == ("wrist", "top")
    assert read_lerobot(tmp_path, cameras="top").cameras == ("top",)
    assert read_lerobot(tmp_path, cameras=()).images == {}
    assert read_lerobot(tmp_path, cameras=(), states=["action", "observation.state"]).state_width == 5
    assert read_lerobot(tmp_path, states=()).state_width == 0
    with pytest.raises(ValueError, match=r"no camera 'front' in .*; choose among top, wrist"):
        read_lerobot(tmp_path, cameras=["front"])
    with pytest.raises(ValueError, match=r"no state 'observation\.effort'"):
        read_lerobot(tmp_path, states=["observation.effort"])
    with pytest.raises(ValueError, match="nothing to observe"):
        read_lerobot(tmp_path, cameras=(), states=())


def test_rows_are_sorted_and_columns_may_be_scalar(tmp_path):
    info(tmp_path, total=1)
    columns = episode(0, 6)
    columns["action"] = np.arange(6.0)
    order = [3, 1, 0, 2, 5, 4]
    save(tmp_path / parts(0)[0], table({name: column[order] for name, column in columns.items()}))
    assert read_lerobot(tmp_path).actions[0].tolist() == [[0], [1], [2], [3], [4], [5]]


# Videos and tables of other lengths.


@needs_av
@pytest.mark.parametrize("missing", [0, 2, 3])
def test_a_video_may_lack_two_frames_at_its_end_and_no_more(missing, tmp_path):
    write_2(tmp_path, [9, 9], (TOP,))
    film(tmp_path / (parts(1)[1] % TOP), shades(9 - missing))
    if missing < 3:
        data = read_lerobot(tmp_path)
        assert shown(data.images["top"][1]) == [*range(9 - missing), *[8 - missing] * missing]
        return
    with pytest.warns(UserWarning, match=r"episode_000001\.mp4 has no frame at 0\.80 s, the nearest is at 0\.50 s"):
        assert len(read_lerobot(tmp_path)) == 1


@needs_av
def test_frames_follow_the_timestamps_of_the_table(tmp_path):
    """A table at half the frame rate of the video has each second frame; a longer video is read until the table ends."""
    write_2(tmp_path, [5], (TOP,))
    columns = episode(0, 5)
    columns["timestamp"] = (np.arange(5) / 5).astype(np.float32)
    save(tmp_path / parts(0)[0], table(columns))
    film(tmp_path / (parts(0)[1] % TOP), shades(20))
    assert shown(read_lerobot(tmp_path).images["top"][0]) == [0, 2, 4, 6, 8]


# What cannot be read.


@needs_av
def test_bad_files_are_named_counted_and_left_out(tmp_path):
    written = write_2(tmp_path, [6] * 12, (TOP,))
    tables, films = ([tmp_path / parts(i)[0] for i in range(12)], [tmp_path / (parts(i)[1] % TOP) for i in range(12)])
    tables[1].write_text("no table")
    tables[2].write_bytes(tables[2].read_bytes()[:-50])
    tables[3].unlink()
    films[4].write_bytes(films[4].read_bytes()[: films[4].stat().st_size // 2])
    films[5].unlink()
    films[6].write_text("ffconcat version 1.0\nfile episode_000000.mp4\n")
    bad = episode(7, 6)
    bad["action"][4, 1] = np.nan
    save(tables[7], table(bad))
    save(tables[8], table({name: column[[0, 1, 3, 4, 5]] for name, column in episode(8, 6).items()}))
    save(tables[9], table(episode(9, 1)))
    save(tables[10], table({name: column for name, column in episode(10, 6).items() if name != "action"}))
    with pytest.warns(UserWarning, match="10 of 12 episodes of .* cannot be used: episode 1 was left out"):
        data = read_lerobot(tmp_path)
    same(data, [written[0], written[11]])
    assert len(data) == 2
    notes = dict(re.fullmatch(r"episode (\d+) was left out: (.*)", note).groups() for note in data.notes)
    assert "episode_000001.parquet is no table, or damaged" in notes["1"]
    assert "episode_000002.parquet is no table, or damaged" in notes["2"]
    assert notes["3"] == "data/chunk-001/episode_000003.parquet is missing"
    assert "episode_000004.mp4" in notes["4"]
    assert notes["5"] == f"videos/chunk-002/{TOP}/episode_000005.mp4 is missing"
    assert "episode_000006.mp4 is no mp4, or damaged" in notes["6"]
    assert notes["7"] == "data/chunk-003/episode_000007.parquet is not finite in 'action' at row 4"
    assert "episode_000008.parquet has no row between the frames 1 and 3" in notes["8"]
    assert "episode_000009.parquet has 1 rows of it" in notes["9"]
    assert "episode_000010.parquet has no column 'action'" in notes["10"]
    assert data.describe().endswith("; 10 left out")


def test_if_no_episode_is_left_the_error_has_the_reasons(tmp_path):
    write_2(tmp_path, [4] * 5)
    for i in range(5):
        (tmp_path / parts(i)[0]).unlink()
    with pytest.raises(ValueError, match=r"none of the 5 episodes .*episode_000000\.parquet is missing; .* \(and 2 more\)"):
        read_lerobot(tmp_path)


def test_tables_of_another_width_or_clock_are_left_out(tmp_path):
    write_2(tmp_path, [4, 4, 4])
    wide, back = episode(1, 4), episode(2, 4)
    wide["action"] = np.zeros((4, 3), np.float32)
    back["timestamp"] = back["timestamp"][::-1]
    save(tmp_path / parts(1)[0], table(wide))
    save(tmp_path / parts(2)[0], table(back))
    with pytest.warns(UserWarning, match="2 of 3") as warned:
        assert len(read_lerobot(tmp_path)) == 1
    assert "episode_000001.parquet has actions of 3 numbers, those before have 2" in str(warned[0].message)
    assert "'timestamp' that does not increase after row 0" in str(warned[0].message)


def test_a_missing_file_of_version_3_leaves_out_its_episodes(tmp_path):
    written = write_3(tmp_path, [4, 5, 6])
    (tmp_path / "data/chunk-000/file-001.parquet").write_text("no table")
    with pytest.warns(UserWarning, match=r"1 of 3 episodes .* data/chunk-000/file-001\.parquet is no table"):
        same(read_lerobot(tmp_path), written[:2])
    (tmp_path / "meta/episodes/chunk-000/file-000.parquet").unlink()
    with pytest.raises(FileNotFoundError, match=r"no tables in .*episodes"):
        read_lerobot(tmp_path)


def test_a_bad_description_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        read_lerobot(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"info\.json; give the folder"):
        read_lerobot(tmp_path)
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/info.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        read_lerobot(tmp_path)
    for other, words in (
        ({"version": "v1.6"}, "versions 2.0, 2.1 and 3.0 .* has v1.6"),
        ({"version": "v4.0"}, "has v4.0"),
        ({"version": "new"}, "codebase_version .* got 'new'"),
        ({"fps": None}, "'fps' of .* got None"),
        ({"features": ["action"]}, "'features' of .* got list"),
        ({"features": {"observation.state": {"dtype": "float32"}}}, "no feature 'action'"),
        ({"chunks_size": 0, "total": 1}, "'chunks_size' of .* got 0"),
        ({"data_path": "data/{shard}.parquet", "total": 1}, "'data_path' of .* cannot be filled in"),
        ({"data_path": None, "total": 1}, "has no 'data_path'"),
        ({"total": 0}, "has no episodes"),
    ):
        info(tmp_path, **other)
        with pytest.raises(ValueError, match=words):
            read_lerobot(tmp_path)
    info(tmp_path, total=1)
    (tmp_path / "meta/episodes.jsonl").write_text('{"episode_index": 0}\n{"episode": 1}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*episodes\.jsonl should be JSON with an 'episode_index'"):
        read_lerobot(tmp_path)
    with pytest.raises(ValueError, match="px counts from 1"):
        read_lerobot(tmp_path, px=0)
    with pytest.raises(ValueError, match="every counts from 1"):
        read_lerobot(tmp_path, every=0)


def test_missing_packages_are_named(tmp_path, monkeypatch):
    write_2(tmp_path, [4])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow.parquet", None)
        with pytest.raises(ImportError, match=r"pip install 'diffusion_forcing\[imitation\]'"):
            read_lerobot(tmp_path)
    info(tmp_path, films=(TOP,), total=1)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImportError, match=r"pip install 'diffusion_forcing\[video\]'"):
        read_lerobot(tmp_path)
    assert len(read_lerobot(tmp_path, cameras=())) == 1


# Data sets by strangers.


def cells_of(folder, cells):
    """A data set of an episode with these cells as its images."""
    info(folder, stored=(TOP,), total=1)
    save(folder / parts(0)[0], table(episode(0, len(cells))).append_column(TOP, pa.array(cells, CELL)))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_pictures_of_four_kinds_are_read(kind, tmp_path):
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(shades(1, 9)[0]).save(file, kind)
    cells_of(tmp_path, [{"bytes": file.getvalue(), "path": None}] * 2)
    assert shown(read_lerobot(tmp_path).images["top"][0]) == [9, 9]


@pytest.mark.parametrize("kind", ["EPS", "TIFF", "BMP", "PPM", "ICO", "PDF"])
def test_no_other_format_is_tried(kind, tmp_path, monkeypatch):
    from PIL import Image

    file, opened = io.BytesIO(), []
    Image.fromarray(shades(1)[0]).save(file, kind)
    before = Image.open
    monkeypatch.setattr(Image, "open", lambda *words, **options: opened.append(options) or before(*words, **options))
    cells_of(tmp_path, [{"bytes": file.getvalue(), "path": None}] * 2)
    with pytest.raises(ValueError, match=r"is no picture, or damaged: it begins with .* PNG, JPEG, WEBP, GIF are read"):
        read_lerobot(tmp_path)
    disguised = b"\x89PNG\r\n\x1a\n" + file.getvalue()
    cells_of(tmp_path, [{"bytes": disguised, "path": None}] * 2)
    with pytest.raises(ValueError, match="is no PNG, or damaged"):
        read_lerobot(tmp_path)
    assert {tuple(options["formats"]) for options in opened} == {("PNG",)}


@pytest.mark.parametrize("how", ["../secret.png", "absolute", "link.png", "folder/secret.png", "images/../../secret.png"])
def test_pictures_outside_of_the_data_set_are_refused(how, tmp_path):
    folder, secret = tmp_path / "set", tmp_path / "secret.png"
    secret.write_bytes(png(shades(1)[0]))
    (folder / "images").mkdir(parents=True)
    (folder / "link.png").symlink_to(secret)
    (folder / "folder").symlink_to(tmp_path)
    cells_of(folder, [{"bytes": None, "path": str(secret) if how == "absolute" else how}] * 2)
    with pytest.raises(ValueError, match="leads out of"):
        read_lerobot(folder)


@pytest.mark.parametrize("template", ["../{episode_index}.parquet", "/{episode_index}.parquet", "data/chunk-{episode_chunk:03d}/link"])
def test_tables_outside_of_the_data_set_are_refused(template, tmp_path):
    folder = tmp_path / "set"
    write_2(folder, [4])
    (folder / "data/chunk-000/link").symlink_to(tmp_path / "0.parquet")
    (folder / parts(0)[0]).rename(tmp_path / "0.parquet")
    info(folder, total=1, data_path=template)
    with pytest.raises(ValueError, match="leads out of"):
        read_lerobot(folder)


@pytest.mark.parametrize("field", ["{episode_index:0999999999d}", "{episode_index.__class__}", "{episode_index!r}", "{episode_index:{x}}"])
def test_templates_of_paths_are_plain(field, tmp_path):
    write_2(tmp_path, [4])
    info(tmp_path, total=1, data_path=f"data/{field}.parquet")
    with pytest.raises(ValueError, match=r"'data_path' of .* cannot be filled in"):
        read_lerobot(tmp_path)


def test_a_set_that_the_hub_downloaded_may_link_to_its_store(tmp_path):
    folder, store = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    write_2(folder, [4])
    store.mkdir()
    (folder / parts(0)[0]).rename(store / "table")
    (folder / parts(0)[0]).symlink_to(store / "table")
    assert len(read_lerobot(folder).actions) == 1
