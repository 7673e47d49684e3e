"""Demonstrations from LeRobot data sets in a local folder: versions 2.0, 2.1 and 3.0 of the layout.

meta/info.json has the version, the frame rate, the features and the paths of files. A row of a table is a control step: the observation
(`observation.state`, images) and the action that followed. Images are in videos, or in the tables themselves.
- 2.0 and 2.1 have a table and, for each camera, a video for each episode:
  data/chunk-000/episode_000000.parquet, videos/chunk-000/observation.images.NAME/episode_000000.mp4, listed in meta/episodes.jsonl;
- 3.0 has many episodes in a file: data/chunk-000/file-000.parquet, videos/observation.images.NAME/chunk-000/file-000.mp4. Tables in
  meta/episodes say which file holds an episode and at which second of a video it begins.
Tasks, rewards and statistics are not read.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import string
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..checks import check_counts
from ..engine.media import Unreadable, decode_picture, fit_square, import_av
from ..engine.task import Progress
from ..files import read_limited
from .demonstrations import Array, Demonstrations, Images

LATE = 2.5
"""Frames that may be missing at either end of a video; the nearest is used for them. Recorders drop one or two."""
MOST_BYTES = 2**26
"""Of a picture."""
CHUNKS = 1000
"""Episodes per folder, where info.json does not say."""


class Outside(ValueError):
    """A data set names a file that is none of its own."""


class _Episode(NamedTuple):
    """An episode's number, its table, and for each camera its video and the second at which it begins there."""

    number: int
    table: Path
    videos: dict[str, tuple[Path, float]]


@dataclass(frozen=True)
class _Layout:
    """The contents of info.json, checked."""

    root: Path
    info: dict[str, Any]
    version: int
    fps: float
    cameras: dict[str, str]
    """Name and feature of each camera that is read."""
    states: tuple[str, ...]

    def path(self, what: str, **values: Any) -> Path:
        template = self.info.get(what)
        if not isinstance(template, str):
            raise ValueError(f"{self.root / 'meta/info.json'} has no {what!r}, which says where files are; got {template!r}")
        try:
            for _, field, spec, conversion in string.Formatter().parse(template):
                if field is not None and (not field.isidentifier() or conversion or not re.fullmatch(r"0?\d{0,2}d?", spec or "")):
                    raise ValueError(f"{field}:{spec}")
            return self.inside(template.format(**values, total_episodes=self.info.get("total_episodes", 0)))
        except Outside:
            raise
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(f"{what!r} of {self.root / 'meta/info.json'} cannot be filled in ({error}); got {template!r}") from error

    def inside(self, name: str | Path) -> Path:
        """A path within the data set. Links may lead to the store that the Hugging Face hub keeps beside its folders, and nowhere else."""
        root = self.root.resolve()
        path = self.root / name
        real = path.resolve()
        store = root.parent.parent / "blobs"
        if ".." in Path(name).parts or not (real.is_relative_to(root) or (root.parent.name == "snapshots" and real.is_relative_to(store))):
            raise Outside(f"{str(name)[:200]!r} leads out of {self.root}; a data set names its own files only: do not trust this one")
        return path

    def is_video(self, feature: str) -> bool:
        return bool(self.info["features"][feature].get("dtype") == "video")


def read_lerobot(
    folder: str | Path,
    *,
    cameras: Sequence[str] | None = None,
    states: Sequence[str] | None = None,
    px: int = 64,
    every: int = 1,
    progress: Progress | None = None,
) -> Demonstrations:
    """The episodes of a LeRobot data set, in memory. One warning names the files that cannot be read; their episodes are left out.

    cameras: names, such as `top` or `observation.images.top`; None for all, () for none. states: columns that are concatenated to the
    state; None for `observation.state`. px: side of the images, cropped to the central square, each pixel the mean of its area. every:
    steps from one frame to the next; the last row is a frame too.
    """
    check_counts(px=px, every=every)
    layout = _read_info(Path(folder), cameras, states)
    if any(layout.is_video(feature) for feature in layout.cameras.values()):
        import_av()  # now, rather than after the first table
    tables = _Tables(layout)
    episodes = _episodes(layout, tables)
    notes: list[str] = []
    actions: list[Array] = []
    observed: list[Array] = []
    images: dict[str, list[Images]] = {name: [] for name in layout.cameras}
    for done, episode in enumerate(episodes, start=1):
        try:
            its_actions, its_states, its_images = _read(layout, tables, episode, px, every)
            for what, new, others in (("actions", its_actions, actions), ("states", its_states, observed)):
                if others and new.shape[1] != others[0].shape[1]:
                    name = _name(layout, episode.table)
                    raise Unreadable(f"{name} has {what} of {new.shape[1]} numbers, those before have {others[0].shape[1]}")
        except Unreadable as error:
            notes.append(f"episode {episode.number} was left out: {error}")
        else:
            actions.append(its_actions)
            observed.append(its_states)
            for name, frames in its_images.items():
                images[name].append(frames)
        if progress is not None:
            progress(f"reading {layout.root.name}", done, len(episodes))
    if not actions:
        raise ValueError(f"none of the {len(episodes)} episodes in {layout.root} can be used: {_joined(notes, 3)}")
    if notes:
        warnings.warn(f"{len(notes)} of {len(episodes)} episodes of {layout.root} cannot be used: {_joined(notes, 20)}", stacklevel=2)
    return Demonstrations(actions, observed, images, every, fps=layout.fps, notes=tuple(notes))


# Descriptions: meta/.


def _read_info(root: Path, cameras: Sequence[str] | None, states: Sequence[str] | None) -> _Layout:
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}; give one of a LeRobot data set, which holds meta, data and videos")
    file = root / "meta" / "info.json"
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}; give the folder of a LeRobot data set, which holds meta, data and videos")
    try:
        info = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is no JSON, or damaged ({error}); download it again") from error
    codebase = info.get("codebase_version") if isinstance(info, dict) else None
    match = re.fullmatch(r"v?(\d+)\.(\d+).*", str(codebase))
    if match is None:
        raise ValueError(f"{file} should have a codebase_version such as 'v2.1'; got {codebase!r}")
    version = int(match[1])
    if version not in (2, 3):
        raise ValueError(f"versions 2.0, 2.1 and 3.0 of the layout are read, and {root} has {codebase}; convert it with LeRobot's scripts")
    fps, features = info.get("fps"), info.get("features")
    if not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise ValueError(f"'fps' of {file} should be a number of steps per second above 0; got {fps!r}")
    if not isinstance(features, dict) or not all(isinstance(feature, dict) for feature in features.values()):
        raise ValueError(f"'features' of {file} should map names to columns and cameras; got {type(features).__name__}")
    if "action" not in features:
        raise ValueError(f"{root} has no feature 'action' to imitate; it has {', '.join(features) or 'none'}")
    columns = tuple(states) if states is not None else tuple(name for name in ("observation.state",) if name in features)
    unknown = [name for name in columns if features.get(name, {}).get("dtype") in (None, "video", "image", "string")]
    if unknown:
        raise ValueError(f"there is no state {unknown[0]!r} in {root}; it has {', '.join(features)}")
    chosen = _choose(root, features, [cameras] if isinstance(cameras, str) else cameras)
    if not columns and not chosen:
        raise ValueError(f"there is nothing to observe in {root}: no 'observation.state', and no camera is read; give cameras or states")
    return _Layout(root, info, version, float(fps), chosen, columns)


def _choose(root: Path, features: dict[str, Any], asked: Sequence[str] | None) -> dict[str, str]:
    """Name and feature of the cameras asked for. A name is what follows observation.images., if that is unique."""
    cameras = [name for name, feature in features.items() if feature.get("dtype") in ("video", "image")]
    short = [re.sub(r"^observation\.(images\.)?", "", name) for name in cameras]
    names = dict(zip(short if len(set(short)) == len(short) else cameras, cameras, strict=True))
    if asked is None:
        return names
    chosen: dict[str, str] = {}
    for name in asked:
        match = next((one for one, feature in names.items() if name in (one, feature)), None)
        if match is None:
            raise ValueError(f"there is no camera {name!r} in {root}; choose among {', '.join(names) or 'none, it has no images'}")
        chosen[match] = names[match]
    return chosen


def _episodes(layout: _Layout, tables: _Tables) -> list[_Episode]:
    """In the order of their numbers."""
    videos = [feature for feature in layout.cameras.values() if layout.is_video(feature)]
    episodes = list(_listed_3(layout, tables, videos) if layout.version == 3 else _listed_2(layout, videos))
    if not episodes:
        raise ValueError(f"{layout.root} has no episodes; check that its folder meta is complete")
    return sorted(episodes, key=lambda episode: episode.number)


def _listed_2(layout: _Layout, videos: list[str]) -> Iterator[_Episode]:
    file = layout.root / "meta" / "episodes.jsonl"
    size, total = layout.info.get("chunks_size", CHUNKS), layout.info.get("total_episodes")
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"'chunks_size' of {layout.root / 'meta/info.json'} counts from 1; got {size!r}")
    numbers: list[int] = []
    if file.is_file():
        for i, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                numbers += [int(json.loads(line)["episode_index"])] if line.strip() else []
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"line {i} of {file} should be JSON with an 'episode_index'; got {line[:80]!r}") from error
    elif isinstance(total, int):
        numbers = list(range(total))
    for number in numbers:
        where = {"episode_chunk": number // size, "episode_index": number}
        places = {feature: (layout.path("video_path", video_key=feature, **where), 0.0) for feature in videos}
        yield _Episode(number, layout.path("data_path", **where), places)


def _listed_3(layout: _Layout, tables: _Tables, videos: list[str]) -> Iterator[_Episode]:
    folder = layout.root / "meta" / "episodes"
    files = [layout.inside(file.relative_to(layout.root)) for file in sorted(folder.rglob("*.parquet"))]
    if not files:
        raise FileNotFoundError(f"there are no tables in {folder}, which list the episodes of version 3.0; download the folder again")
    names = ["episode_index", "data/chunk_index", "data/file_index"]
    names += [f"videos/{feature}/{what}" for feature in videos for what in ("chunk_index", "file_index", "from_timestamp")]
    for file in files:
        try:
            table = tables.read(file, names)
        except Unreadable as error:
            raise ValueError(f"{error}; download it again") from error
        for row in table.to_pylist():
            try:
                places = {feature: _place(layout, row, feature) for feature in videos}
                data = layout.path("data_path", chunk_index=int(row["data/chunk_index"]), file_index=int(row["data/file_index"]))
                yield _Episode(int(row["episode_index"]), data, places)
            except TypeError as error:
                raise ValueError(f"{file} should have the files of each episode; got {row}") from error


def _place(layout: _Layout, row: dict[str, Any], feature: str) -> tuple[Path, float]:
    chunk, file, begin = (row[f"videos/{feature}/{what}"] for what in ("chunk_index", "file_index", "from_timestamp"))
    return layout.path("video_path", video_key=feature, chunk_index=int(chunk), file_index=int(file)), float(begin)


# Tables.


class _Tables:
    """Tables by PyArrow. The last one is kept, since in version 3.0 one holds many episodes."""

    def __init__(self, layout: _Layout) -> None:
        self._layout = layout
        try:
            self._parquet = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise ImportError("reading LeRobot data needs pyarrow: pip install 'diffusion_forcing[imitation]'") from error
        self._error: type[Exception] = importlib.import_module("pyarrow").ArrowException
        self._last: tuple[Path, Any] | None = None

    def read(self, file: Path, names: Sequence[str], optional: Sequence[str] = ()) -> Any:
        """The named columns of a file."""
        if self._last is not None and self._last[0] == file:
            return self._last[1]
        what = _name(self._layout, file)
        if not file.is_file():
            raise Unreadable(f"{what} is missing")
        try:
            with self._parquet.ParquetFile(file) as opened:
                columns = set(opened.schema_arrow.names)
                missing = [name for name in names if name not in columns]
                if missing:
                    raise Unreadable(f"{what} has no column {missing[0]!r}")
                table = opened.read(columns=[*names, *(name for name in optional if name in columns and name not in names)])
        except Unreadable:
            raise
        except (self._error, OSError, ValueError) as error:
            raise Unreadable(f"{what} is no table, or damaged ({str(error).splitlines()[0]})") from error
        self._last = (file, table)
        return table

    def episode(self, episode: _Episode) -> Any:
        """The rows of an episode, in order."""
        layout = self._layout
        stored = [feature for feature in layout.cameras.values() if not layout.is_video(feature)]
        table = self.read(episode.table, ["action", *layout.states, *stored], ["timestamp", "frame_index", "episode_index"])
        what = _name(layout, episode.table)
        if "episode_index" in table.column_names:
            rows = np.flatnonzero(_numbers(table, "episode_index", what)[:, 0] == episode.number)
            if not len(rows):
                raise Unreadable(f"{what} has no rows of it")
            table = table if len(rows) == len(table) else table.take(rows)
        elif layout.version == 3:
            raise Unreadable(f"{what} has no column 'episode_index'")
        if "frame_index" in table.column_names and len(table):
            index = _numbers(table, "frame_index", what)[:, 0]
            order = np.argsort(index, kind="stable")
            if (np.diff(index[order]) != 1).any():
                at = int(np.flatnonzero(np.diff(index[order]) != 1)[0])
                raise Unreadable(f"{what} has no row between the frames {index[order][at]:g} and {index[order][at + 1]:g}")
            table = table if (order == np.arange(len(order))).all() else table.take(order)
        return table


def _numbers(table: Any, name: str, what: str) -> NDArray[np.float64]:
    """A column as (n, width)."""
    try:
        column = np.asarray(table.column(name).to_pylist(), dtype=np.float64)
    except (ValueError, TypeError) as error:
        raise Unreadable(f"{what} has a column {name!r} that is not numbers of one width") from error
    if not np.isfinite(column).all():
        row = np.flatnonzero(~np.isfinite(column.reshape(len(column), -1)).all(1))[0]
        raise Unreadable(f"{what} is not finite in {name!r} at row {row}")
    return column.reshape(len(column), math.prod(column.shape[1:]))


def _read(layout: _Layout, tables: _Tables, episode: _Episode, px: int, every: int) -> tuple[Array, Array, dict[str, Images]]:
    """Actions (T, a), states (F, s) and images (F, px, px, 3) of each camera."""
    table = tables.episode(episode)
    what = _name(layout, episode.table)
    if len(table) < 2:
        raise Unreadable(f"{what} has {len(table)} rows of it, and a demonstration has 2 at least")
    actions = _numbers(table, "action", what).astype(np.float32)
    rows = np.unique([*range(0, len(table), every), len(table) - 1])
    columns = [_numbers(table, name, what)[rows].astype(np.float32) for name in layout.states]
    states = np.concatenate([*columns, np.zeros((len(rows), 0), np.float32)], axis=1)
    times = np.arange(len(table)) / layout.fps
    if "timestamp" in table.column_names:
        times = _numbers(table, "timestamp", what)[:, 0]
        if (np.diff(times) <= 0).any():
            raise Unreadable(f"{what} has a 'timestamp' that does not increase after row {np.flatnonzero(np.diff(times) <= 0)[0]}")
    images: dict[str, Images] = {}
    for name, feature in layout.cameras.items():
        if layout.is_video(feature):
            file, begin = episode.videos[feature]
            images[name] = _frames(file, _name(layout, file), begin + times[rows], layout.fps, px)
        else:
            images[name] = _stored(table.column(feature).take(rows).to_pylist(), layout, feature, what, px)
    return actions, states, images


# Images.


def _stored(cells: list[Any], layout: _Layout, feature: str, what: str, px: int) -> Images:
    """Images (F, px, px, 3) from cells of a table: {bytes, path}, or bytes."""
    images: list[Images] = []
    for cell in cells:
        data, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
        try:
            if not isinstance(data, bytes):
                if not isinstance(path, str):
                    raise Unreadable("there is none")
                data = read_limited(layout.inside(path), MOST_BYTES)
            images.append(fit_square(decode_picture(data), px))
        except Outside:
            raise
        except (OSError, ValueError) as error:
            raise Unreadable(f"{what} has a damaged image of {feature!r} at frame {len(images)} ({error})") from error
    return np.stack(images)


def _frames(file: Path, what: str, times: NDArray[np.float64], fps: float, px: int) -> Images:
    """The frames of a video nearest to these seconds, which increase, (F, px, px, 3)."""
    if not file.is_file():
        raise Unreadable(f"{what} is missing")
    images: list[Images] = []
    last: tuple[float, Any] | None = None
    for at, frame in _decoded(file, what, times[0] - 1 / fps):
        while len(images) < len(times) and times[len(images)] < (at - 0.5 / fps if last is None else (last[0] + at) / 2):
            near = (at, frame) if last is None else last
            _check_near(near[0], times[len(images)], fps, what)
            images.append(fit_square(near[1].to_ndarray(format="rgb24"), px))
        if len(images) == len(times):
            return np.stack(images)
        last = (at, frame)
    if last is None:
        raise Unreadable(f"{what} holds no frames at {times[0]:.2f} s")
    _check_near(last[0], times[-1], fps, what)
    images += [fit_square(last[1].to_ndarray(format="rgb24"), px)] * (len(times) - len(images))
    return np.stack(images)


def _check_near(at: float, time: float, fps: float, what: str) -> None:
    if abs(at - time) > LATE / fps:
        raise Unreadable(f"{what} has no frame at {time:.2f} s, the nearest is at {at:.2f} s")


def _decoded(file: Path, what: str, begin: float) -> Iterator[tuple[float, Any]]:
    """Time in seconds and frame, from a key frame at or before `begin` on."""
    av = import_av()
    try:
        # Opened here and as mp4 only, since FFmpeg by itself reads text as a list of other files.
        with open(file, "rb") as opened, av.open(opened, format="mov") as container:
            if not container.streams.video:
                raise Unreadable(f"{what} holds no video")
            stream = container.streams.video[0]
            tick, zero = float(stream.time_base), stream.start_time or 0
            if begin > 0:
                container.seek(zero + int(begin / tick), stream=stream)
            for frame in container.decode(stream):
                if frame.pts is None:
                    raise Unreadable(f"{what} has frames without a timestamp")
                yield (frame.pts - zero) * tick, frame
    except (av.FFmpegError, OSError, EOFError) as error:
        raise Unreadable(f"{what} is no mp4, or damaged ({getattr(error, 'strerror', None) or error})") from error


def _name(layout: _Layout, file: Path) -> str:
    return file.relative_to(layout.root).as_posix() if file.is_relative_to(layout.root) else str(file)


def _joined(notes: list[str], most: int) -> str:
    return "; ".join(notes[:most]) + (f" (and {len(notes) - most} more)" if len(notes) > most else "")
