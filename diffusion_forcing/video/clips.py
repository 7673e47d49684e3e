"""Training clips: a user's folder of films and arrays, or walks through a simulated world, kept in the cache as one array of frames.

A folder and its sub-folders hold
- films: .mp4, .m4v, .mov (PyAV decodes them), .gif, .webp,
- arrays: .npy of frames, .npz with `video` or `frames`, and optionally `actions`. Frames are (t, h, w, 3) or (t, 3, h, w), uint8 or
  numbers from 0 to 1.
Actions of NAME.mp4 stand beside it in NAME.npy, NAME.csv, or as `actions` in NAME.npz, one row a frame: the action that led to the frame.
Rows (t, a) are taken as they are; whole numbers (t,) are discrete actions and become one-hot rows.

So the data sets of the Diffusion Forcing paper, as published with TECO (Yan et al., 2022), are read as unpacked: DMLab is train/*/*.npz
with `video` (300, 64, 64, 3) and `actions` (300,) of 3 kinds; Minecraft is train/*/*.mp4 of 128 px at 20 frames a second, beside each an
.npz whose `actions` (t,) are 0 for the first frame, then 1 forward, 2 left, 3 right. Read train and test apart, with action_kinds=3 or 4,
so that both have as many columns. TECO's sets of pre-encoded tokens (.hdf5) are not read.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import multiprocessing
import os
import warnings
import zipfile
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..checks import check_counts
from ..engine.media import Unreadable, fit_square, import_av
from ..engine.task import Progress
from ..files import cache_folder, cached, write_atomically
from .worlds.world import Clip, Frame, World

STREAMS = (".mp4", ".m4v", ".mov")
STILLS = {".gif": "GIF", ".webp": "WEBP"}
ARRAYS = (".npz", ".npy")
ENDINGS = (*STREAMS, *STILLS, *ARRAYS)
VERSION = 2
"""Of the cache's layout; part of the key."""
BOXES = (b"ftyp", b"moov", b"mdat", b"moof", b"free", b"skip", b"wide", b"styp", b"sidx", b"mfra", b"uuid", b"meta")
Raw = NDArray[Any]


class ClipSet(NamedTuple):
    """Clips end to end: clip i is frames[starts[i] : starts[i] + lengths[i]].

    frames: (N, px, px, 3), read from disk as needed. actions: (N, a), what led to each frame; poses: (N, p); a and p may be 0.
    names: of the files, or the seeds of a world. notes: sentences on what was left out and why.
    """

    frames: Frame
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    actions: NDArray[np.float32]
    poses: NDArray[np.float32]
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def clip(self, i: int) -> Clip:
        """Clip i, without a copy."""
        if not 0 <= i < len(self.starts):
            raise IndexError(f"there are {len(self.starts)} clips, counted from 0; got {i}")
        part = slice(int(self.starts[i]), int(self.starts[i] + self.lengths[i]))
        return Clip(self.frames[part], self.actions[part], self.poses[part])


# Reading folders.


def read_clip(file: str | Path, px: int = 64, fps: float | None = None, action_kinds: int | None = None) -> Clip:
    """One clip, cut to its square centre and resized to px by averaging areas, with the actions in or beside its file."""
    path = Path(file)
    _check(px, fps, 1, action_kinds)
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"clips end with {', '.join(ENDINGS)}; got {path.name}, convert it to one of these")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; check the path")
    beside = next((actions for clip, actions in _pair([other for other in path.parent.iterdir() if other.is_file()]) if clip == path), None)
    try:
        frames, raw = _read(path, beside, px, fps)
    except Unreadable as error:
        raise Unreadable(f"{path} {error}") from error
    return Clip(frames, _finish([(path.name, len(frames), raw)], action_kinds)[0], np.zeros((len(frames), 0), np.float32))


def read_clips(
    folder: str | Path,
    px: int = 64,
    fps: float | None = None,
    progress: Progress | None = None,
    *,
    min_frames: int = 1,
    action_kinds: int | None = None,
) -> list[Clip]:
    """The clips of a folder in the order of their names, in memory. One warning names the files that were left out.

    fps: frames a second to keep, those that are shown at these times; arrays have no clock and stay as they are, as films do without it.
    min_frames: clips of fewer frames are left out. action_kinds: number of discrete actions; None: one more than the largest number.
    """
    _check(px, fps, min_frames, action_kinds)
    root = Path(folder)
    notes: list[str] = []
    read = list(_each(root, _listed(root), px, fps, min_frames, progress, notes))
    if notes:
        warnings.warn(join_notes(notes, 20), stacklevel=2)
    actions = _finish([(name, len(frames), raw) for name, frames, raw in read], action_kinds)
    return [Clip(frames, acted, np.zeros((len(frames), 0), np.float32)) for (_, frames, _), acted in zip(read, actions, strict=True)]


def prepare_clips(
    folder: str | Path,
    px: int = 64,
    fps: float | None = None,
    progress: Progress | None = None,
    *,
    min_frames: int = 1,
    action_kinds: int | None = None,
) -> ClipSet:
    """The clips of a folder from the cache, decoded into it if a file's name, size or time is new. Options are those of `read_clips`."""
    _check(px, fps, min_frames, action_kinds)
    root = Path(folder)
    listed = _listed(root)
    state = _state(root, listed)

    def make(store: _Store) -> None:
        notes: list[str] = []
        raws: list[tuple[str, int, Raw | None]] = []
        for name, frames, raw in _each(root, listed, px, fps, min_frames, progress, notes):
            store.add(name, frames)
            raws.append((name, len(frames), raw))
        store.actions, store.notes = _finish(raws, action_kinds), notes
        if _state(root, _listed(root)) != state:
            raise RuntimeError(f"the files of {root} changed while they were read; read them again when they are whole")

    return _cached("clips", [px, fps, min_frames, action_kinds, state], px, make)


def _check(px: int, fps: float | None, min_frames: int, action_kinds: int | None) -> None:
    check_counts(px=px, min_frames=min_frames, action_kinds=1 if action_kinds is None else action_kinds)
    if fps is not None and not 0 < fps < float("inf"):
        raise ValueError(f"fps is a number of frames a second above 0, or None for all that there are; got {fps}")


def _listed(root: Path) -> list[tuple[Path, Path | None]]:
    """Files of clips, each with that of its actions if there is one."""
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}; give one that holds {', '.join(ENDINGS)}")
    files = _files(root)
    pairs = _pair(files)
    if not pairs:
        counts = Counter(file.suffix.lower() or "no ending" for file in files)
        held = ", ".join(f"{number} with {ending}" for ending, number in counts.most_common(5)) or "nothing"
        raise ValueError(f"there are no clips in {root}, which holds {held}; clips end with {', '.join(ENDINGS)}")
    return sorted(pairs, key=lambda pair: pair[0].relative_to(root).as_posix())


def _files(root: Path) -> list[Path]:
    return [file for file in root.rglob("*") if file.is_file() and not file.name.startswith(".")]


def _pair(files: list[Path]) -> list[tuple[Path, Path | None]]:
    """Of files that share a name but for the ending, films are clips, else the .npz, else the .npy; the rest holds actions."""
    groups: dict[Path, list[Path]] = {}
    for file in files:
        if file.suffix.lower() in (*ENDINGS, ".csv"):
            groups.setdefault(file.with_suffix(""), []).append(file)
    pairs: list[tuple[Path, Path | None]] = []
    for group in groups.values():
        clips = [file for file in group if file.suffix.lower() in (*STREAMS, *STILLS)]
        for ending in ARRAYS:
            clips = clips or [file for file in group if file.suffix.lower() == ending]
        beside = sorted(file for file in group if file not in clips)
        if clips and len(beside) > 1:
            raise ValueError(f"{clips[0]} has actions in both {beside[0].name} and {beside[1].name}; keep one of them")
        pairs += [(clip, beside[0] if beside else None) for clip in clips]
    return pairs


def _each(
    root: Path,
    listed: list[tuple[Path, Path | None]],
    px: int,
    fps: float | None,
    min_frames: int,
    progress: Progress | None,
    notes: list[str],
) -> Iterator[tuple[str, Frame, Raw | None]]:
    """Name, frames and actions of each clip that can be read; notes on the others. Raises where there is none."""
    count, bare = 0, True
    other = Counter(file.suffix.lower() or "no ending" for file in _files(root) if file.suffix.lower() not in (*ENDINGS, ".csv"))
    if other:
        held = ", ".join(f"{number} with {ending}" for ending, number in other.most_common(5))
        notes.append(f"files that are no clips were left out: {held}; clips end with {', '.join(ENDINGS)}")
    for done, (file, beside) in enumerate(listed, start=1):
        name = file.relative_to(root).as_posix()
        try:
            frames, actions = _read(file, beside, px, fps)
            if len(frames) < min_frames:
                raise Unreadable(f"has {len(frames)} frames, fewer than {min_frames}")
            if count and (actions is None) != bare:
                own, others = ("actions", "none") if bare else ("no actions", "some")
                raise ValueError(f"{name} has {own}, those before it have {others}; give every clip its actions, or none")
        except Unreadable as error:
            notes.append(f"{name} was left out: it {error}")
        else:
            count += 1
            bare = actions is None
            yield name, frames, actions
        if progress is not None:
            progress(f"reading {root.name}", done, len(listed))
    if not count:
        raise ValueError(f"none of the {len(listed)} clips in {root} can be used: {join_notes(notes, 3)}")


def join_notes(notes: Sequence[str], most: int) -> str:
    """At most so many sentences as one line."""
    return "; ".join(notes[:most]) + (f" (and {len(notes) - most} more)" if len(notes) > most else "")


def _read(file: Path, beside: Path | None, px: int, fps: float | None) -> tuple[Frame, Raw | None]:
    """Frames (t, px, px, 3), and the actions as their file has them, (t, a) or (t,)."""
    ending = file.suffix.lower()
    try:
        with open(file, "rb") as opened:
            if not opened.read(1):
                raise Unreadable("is empty")
    except OSError as error:
        raise Unreadable(f"cannot be opened ({error.strerror})") from error
    own: Raw | None = None
    changed: tuple[int, int] | None = None
    if ending in ARRAYS:
        frames, own = _array(file, px)
    else:
        frames, changed = _film(_stream(file) if ending in STREAMS else _stills(file, STILLS[ending]), px, fps)
    if own is not None and beside is not None:
        raise ValueError(f"{file} holds actions, and so does {beside.name} beside it; keep one of them")
    source, actions = (file, own) if beside is None else (beside, _actions(beside))
    if actions is None:
        return frames, None
    if changed is not None:  # for every clip of the folder, so an error rather than a note
        raise ValueError(f"{source} has an action for each of the {changed[0]} frames of {file.name}, of which fps={fps:g} keeps "
                         f"{changed[1]}; leave fps out, or change the rate of both yourself")  # fmt: skip
    if len(actions) != len(frames):
        raise Unreadable(f"has {len(frames)} frames and {len(actions)} actions in {source.name}; give one row a frame, the first for the "
                         "frame that no action led to")  # fmt: skip
    return frames, actions


# Decoding.


def _film(shown: Iterator[tuple[float, float, Frame]], px: int, fps: float | None) -> tuple[Frame, tuple[int, int] | None]:
    """Frames (t, px, px, 3) of (begin, duration, frame), and how many there were and are, if fps changed that."""
    kept: list[Frame] = []
    if fps is None:
        kept = [fit_square(frame, px) for _, _, frame in shown]
        if not kept:
            raise Unreadable("holds no frames")
        return np.stack(kept), None
    taken: list[int] = []
    number, start, late, end, small = 0, 0.0, 0.0, 0.0, None
    for number, (begin, duration, frame) in enumerate(shown, start=1):
        if number == 1:
            start, late = begin, 0.5 * min(duration, 1 / fps)  # half a frame late: clocks of files are rounded
        while small is not None and len(kept) / fps + late < begin - start:
            kept.append(small)
            taken.append(number - 2)
        small, end = fit_square(frame, px), begin - start + duration
    while small is not None and len(kept) / fps + late < end:
        kept.append(small)
        taken.append(number - 1)
    if not kept:
        raise Unreadable("holds no frames")
    if len(set(taken)) < 0.98 * len(taken):
        raise Unreadable(f"has {number / end:.3g} frames a second, fewer than the {fps:g} asked for, so that some would be repeated")
    return np.stack(kept), None if taken == list(range(number)) else (number, len(kept))


def _stream(file: Path) -> Iterator[tuple[float, float, Frame]]:
    """Begin, duration and frame (h, w, 3) of each in an mp4, rotated as its metadata say."""
    av = import_av()
    _check_boxes(file)
    try:
        # Opened by us and as mp4 only: by itself FFmpeg takes names for URLs, and text for lists of other files to open.
        with open(file, "rb") as opened, av.open(opened, format="mov") as container:
            if not container.streams.video:
                raise Unreadable("holds no pictures")
            stream = container.streams.video[0]
            each = 1 / float(stream.average_rate or 25)
            for i, frame in enumerate(container.decode(stream)):
                duration = float(frame.duration * frame.time_base) if frame.duration and frame.time_base else each
                pixels = np.rot90(frame.to_ndarray(format="rgb24"), round((frame.rotation or 0) / 90))
                yield i * each if frame.time is None else frame.time, duration, pixels
    except (av.FFmpegError, OSError, EOFError) as error:
        raise Unreadable(f"is no mp4, or damaged ({getattr(error, 'strerror', None) or error})") from error


def _check_boxes(file: Path) -> None:
    """Raise where an mp4 is shorter than the boxes it is made of, of which a decoder would silently read the first frames."""
    size, at = file.stat().st_size, 0
    with open(file, "rb") as opened:
        while at < size:
            opened.seek(at)
            head = opened.read(16)
            if head[4:8] not in BOXES:
                return
            length = int.from_bytes(head[:4], "big")
            if length == 1:
                length = int.from_bytes(head[8:16], "big")
            if length < 8:  # 0: to the end of the file
                return
            at += length
    if at > size:
        raise Unreadable(f"is cut short: {size} bytes of {at}")


def _stills(file: Path, kind: str) -> Iterator[tuple[float, float, Frame]]:
    """Begin, duration and frame (h, w, 3) of each in a .gif or .webp."""
    from PIL import Image

    _check_end(file, kind)
    try:
        with Image.open(file, formats=[kind]) as image:
            begin = 0.0
            for i in range(getattr(image, "n_frames", 1)):
                image.seek(i)
                pixels = np.asarray(image.convert("RGB"))
                stands = image.info.get("duration", 0) / 1000
                stands = stands if stands > 0.01 else 0.1  # as browsers have it
                yield begin, stands, pixels
                begin += stands
    except (OSError, EOFError, ValueError, SyntaxError, IndexError, Image.DecompressionBombError) as error:
        why = str(error).split(" '")[0]  # without the path, which the note begins with
        raise Unreadable(f"is no {kind.lower()}, or damaged ({why})") from error


def _check_end(file: Path, kind: str) -> None:
    """Raise where a .gif or .webp is cut short, of which Pillow would silently read the first frames."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        head = opened.read(12)
        opened.seek(max(0, size - 64))
        tail = opened.read().rstrip(b"\0")
    if kind == "GIF" and head[:3] == b"GIF" and tail[-1:] != b";":
        raise Unreadable("is cut short: a gif ends with a semicolon")
    if kind == "WEBP" and head[:4] == b"RIFF" and int.from_bytes(head[4:8], "little") + 8 > size:
        raise Unreadable(f"is cut short: {size} bytes of {int.from_bytes(head[4:8], 'little') + 8}")


def _array(file: Path, px: int) -> tuple[Frame, Raw | None]:
    """Frames and actions of an .npz, frames of an .npy."""
    try:
        loaded = np.load(file, mmap_mode="r" if file.suffix.lower() == ".npy" else None, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return _from_array(loaded, px), None
        with loaded:
            key = next((key for key in ("video", "frames") if key in loaded.files), None)
            if key is None:
                raise Unreadable(f"has neither `video` nor `frames`, but {', '.join(loaded.files) or 'nothing'}")
            actions = loaded["actions"] if "actions" in loaded.files else None
            frames = _from_array(loaded[key], px)
    except Unreadable:
        raise
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise Unreadable(f"is no array of NumPy, or damaged ({error})") from error
    try:
        return frames, None if actions is None else _checked(actions, "`actions`")
    except ValueError as error:
        raise Unreadable(f"cannot be used ({error})") from error


def _from_array(array: NDArray[Any], px: int) -> Frame:
    channels_last = array.ndim == 4 and array.shape[-1] == 3
    if not channels_last and not (array.ndim == 4 and array.shape[1] == 3):
        raise Unreadable(f"has the shape {array.shape}; frames are (t, h, w, 3) or (t, 3, h, w)")
    if 0 in array.shape:
        raise Unreadable(f"holds no frames, its shape is {array.shape}")
    if array.dtype != np.uint8 and array.dtype.kind != "f":
        raise Unreadable(f"holds {array.dtype}; frames are uint8, or numbers from 0 to 1")
    frames = array if channels_last else np.moveaxis(array, 1, -1)
    parts = []
    for first in range(0, len(frames), 64):
        part = np.asarray(frames[first : first + 64])
        if part.dtype != np.uint8 and not (part.min() >= 0 and part.max() <= 1):
            raise Unreadable(f"holds numbers from {part.min():g} to {part.max():g}; frames are uint8, or numbers from 0 to 1")
        parts.append(fit_square(part, px))
    return np.concatenate(parts)


# Actions.


def _actions(file: Path) -> Raw:
    """Actions (t, a) or (t,) from a file of their own."""
    try:
        if file.suffix.lower() == ".csv":
            return _checked(_table(file), str(file))
        loaded = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return _checked(loaded, str(file))
        with loaded:
            if "actions" not in loaded.files:
                raise ValueError(f"it has no `actions`, but {', '.join(loaded.files) or 'nothing'}")
            return _checked(loaded["actions"], f"`actions` of {file}")
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise Unreadable(f"has actions in {file.name} that cannot be read ({error}); write them again, or take the file away") from error


def read_actions(file: str | Path, width: int) -> NDArray[np.float32]:
    """Actions (t, width) of a file as they stand beside clips; numbered kinds become a one in as many columns."""
    path = Path(file)
    if path.suffix.lower() not in (*ARRAYS, ".csv"):
        raise ValueError(f"actions are in a .npy, .npz or .csv; got {path.name}")
    raw = _actions(path)
    if raw.ndim == 2 and raw.shape[1] == 1 and width > 1 and (raw == raw.round()).all():
        raw = raw[:, 0].astype(np.int64)  # a column of kinds
    rows = _finish([(path.name, len(raw), raw)], width if _numbered(raw) else None)[0]
    if rows.shape[1] != width:
        raise ValueError(f"an action is {width} numbers here; {path} has {rows.shape[1]} in a row")
    return rows


def _table(file: Path) -> NDArray[np.float64]:
    """(t, a) from a CSV, with or without a line that names the columns."""
    with open(file, encoding="utf-8-sig", newline="") as opened:
        rows = [row for row in csv.reader(opened) if any(cell.strip() for cell in row)]
    try:
        [float(cell) for cell in rows[0]]
    except (ValueError, IndexError):
        rows = rows[1:]
    width = len(rows[0]) if rows else 0
    for number, row in enumerate(rows, start=1):
        if len(row) != width:
            raise ValueError(f"row {number} has {len(row)} cells, those before have {width}")
    return np.array([[float(cell) for cell in row] for row in rows], dtype=np.float64).reshape(len(rows), width)


def _checked(actions: Raw, source: str) -> Raw:
    if actions.ndim not in (1, 2) or actions.dtype.kind not in "biuf":
        raise ValueError(f"{source} should be numbers (t, a), or whole ones (t,); got {actions.shape} of {actions.dtype}")
    if not np.isfinite(actions).all():
        raise ValueError(f"{source} is not finite at frame {int(np.argwhere(~np.isfinite(actions))[0][0])}; fill it in")
    if _numbered(actions) and len(actions) and actions.min() < 0:
        raise ValueError(f"{source} numbers discrete actions from 0; got {actions.min()}; give continuous ones as (t, 1)")
    return actions


def _numbered(actions: Raw | None) -> bool:
    """Whether these are discrete actions, numbered."""
    return actions is not None and actions.ndim == 1 and actions.dtype.kind in "iu"


def _finish(raws: list[tuple[str, int, Raw | None]], action_kinds: int | None) -> list[NDArray[np.float32]]:
    """Actions (t, a) of each (name, t, actions as their file has them), a the same for all."""
    largest = max((int(raw.max()) for _, _, raw in raws if raw is not None and _numbered(raw) and len(raw)), default=-1)
    kinds = largest + 1 if action_kinds is None else action_kinds
    if largest >= kinds:
        name = next(name for name, _, raw in raws if raw is not None and _numbered(raw) and raw.max() == largest)
        raise ValueError(f"{name} has an action {largest}, where action_kinds={kinds} counts them from 0 to {kinds - 1}; raise it")
    if largest >= 1024:
        raise ValueError(f"actions number their kinds up to {largest}, which would be {largest + 1} columns; give them as numbers (t, a)")
    finished: list[NDArray[np.float32]] = []
    for _, length, raw in raws:
        if raw is None:
            finished.append(np.zeros((length, 0), np.float32))
        elif _numbered(raw):
            finished.append(np.eye(kinds, dtype=np.float32)[raw])
        else:
            finished.append(raw.reshape(length, -1).astype(np.float32))
    widths = [acted.shape[1] for acted in finished]
    other = next((i for i, width in enumerate(widths) if width != widths[0]), None)
    if other is not None:
        raise ValueError(f"actions of all clips have as many numbers; {raws[0][0]} has {widths[0]} and {raws[other][0]} has "
                         f"{widths[other]}; give every clip its actions, or none")  # fmt: skip
    return finished


# Worlds.


def prepare_world(world: World, clips: int, frames: int, seed: int = 0, progress: Progress | None = None, workers: int = 1) -> ClipSet:
    """Walks through a simulated world from the cache, simulated if they are not there: `clips` of them, `frames` long.

    The first clips of a larger set are those of a smaller one, and two seeds share none. A changed world is noticed, since its first
    clip is simulated each time. workers: processes that do so; a script that asks for more than one needs `if __name__ == "__main__":`.
    """
    check_counts(clips=clips, frames=frames, workers=workers)
    if not dataclasses.is_dataclass(world):
        raise ValueError(f"a world is a dataclass, whose options are the key of its clips in the cache; got {type(world).__name__}")
    seeds = [int(np.random.SeedSequence([seed, i]).generate_state(1, np.uint32)[0]) for i in range(clips)]
    first = _walk(world, seeds[0], frames)
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in first)).hexdigest()
    kind = type(world)
    what = f"simulating {kind.__name__}"

    def make(store: _Store) -> None:
        actions, poses = [], []
        for done, (number, clip) in enumerate(zip(seeds, _walks(world, seeds, frames, first, workers), strict=True), start=1):
            store.add(str(number), clip.frames)
            actions.append(clip.actions)
            poses.append(clip.poses)
            if progress is not None:
                progress(what, done, clips)
        store.actions, store.poses = actions, poses

    return _cached("world", [f"{kind.__module__}.{kind.__qualname__}", repr(world), clips, frames, seed, digest], world.px, make)


def _walk(world: World, seed: int, frames: int) -> Clip:
    clip = world.clip(seed, frames)
    px, a = world.px, len(world.actions)
    shapes = clip.frames.shape, clip.actions.shape, clip.poses.shape[:1]
    if shapes != ((frames, px, px, 3), (frames, a), (frames,)) or clip.frames.dtype != np.uint8:
        raise ValueError(f"{type(world).__name__}.clip should give frames {(frames, px, px, 3)} of uint8, actions {(frames, a)} and "
                         f"poses ({frames}, p); got {clip.frames.shape} of {clip.frames.dtype}, {clip.actions.shape} and "
                         f"{clip.poses.shape}")  # fmt: skip
    return Clip(clip.frames, clip.actions.astype(np.float32), clip.poses.astype(np.float32))


def _walks(world: World, seeds: list[int], frames: int, first: Clip, workers: int) -> Iterator[Clip]:
    """Clips in the order of their seeds; the first one is given."""
    yield first
    if workers == 1 or len(seeds) == 1:
        for seed in seeds[1:]:
            yield _walk(world, seed, frames)
        return
    # Spawned, not forked: a process that has used torch's threads cannot be forked safely.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        ahead: deque[Future[Clip]] = deque()
        for seed in seeds[1:]:
            ahead.append(pool.submit(_walk, world, seed, frames))
            if len(ahead) > 4 * workers:  # bounds the clips in memory
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


# The cache: frames of a set as .npy, the rest of it as .npz.


class _Store:
    """A set that is being written: frames as they come, the rest at the end."""

    def __init__(self, frames: Path, px: int) -> None:
        self.actions: list[NDArray[np.float32]] = []
        self.poses: list[NDArray[np.float32]] = []
        self.notes: list[str] = []
        self._px = px
        self._names: list[str] = []
        self._lengths: list[int] = []
        self._file = open(frames, "wb")  # noqa: SIM115
        self._file.write(self._head())

    def _head(self) -> bytes:
        """The head of an .npy file, of one length whatever the number of frames, so that it can be overwritten."""
        shape = sum(self._lengths), self._px, self._px, 3
        text = str({"descr": "|u1", "fortran_order": False, "shape": shape}).ljust(117) + "\n"
        assert len(text) == 118
        return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()

    def add(self, name: str, frames: Frame) -> None:
        assert frames.shape[1:] == (self._px, self._px, 3)
        self._file.write(np.ascontiguousarray(frames).data)
        self._names.append(name)
        self._lengths.append(len(frames))

    def finish(self, index: Path) -> None:
        """Write the number of frames, and all but the frames into a file of their own."""
        self._file.seek(0)
        self._file.write(self._head())
        words = json.dumps({"names": self._names, "notes": self.notes}).encode()
        poses = self.poses or [np.zeros((length, 0), np.float32) for length in self._lengths]

        def write(path: Path) -> None:
            with open(path, "wb") as out:
                np.savez(out, lengths=np.array(self._lengths, np.int64), actions=np.concatenate(self.actions), poses=np.concatenate(poses),
                         words=np.frombuffer(words, np.uint8))  # fmt: skip

        write_atomically(index, write)

    def close(self) -> None:
        self._file.close()


def _state(root: Path, listed: list[tuple[Path, Path | None]]) -> list[tuple[str, int, int, bool]]:
    """State of a folder's files, part of the key: names, sizes, times, and whether they may be read."""
    files = [file for pair in listed for file in pair if file is not None]
    stats = [(file.relative_to(root).as_posix(), file.stat(), os.access(file, os.R_OK)) for file in files]
    return [(name, stat.st_size, stat.st_mtime_ns, open_to_us) for name, stat, open_to_us in stats]


def _cached(kind: str, key_of: list[Any], px: int, make: Callable[[_Store], None]) -> ClipSet:
    """A set from the cache, made if it is not there."""
    name = f"{kind}-{hashlib.sha256(json.dumps([VERSION, key_of]).encode()).hexdigest()[:20]}"
    index = cache_folder() / f"{name}.npz"

    def write(path: Path) -> None:
        store = _Store(path, px)
        try:
            make(store)
            store.finish(index)
        finally:
            store.close()

    file = cached(f"{name}.npy", write)  # after its index: where the frames are, so is the rest
    try:
        with np.load(index) as arrays:
            lengths, actions, poses = arrays["lengths"], arrays["actions"], arrays["poses"]
            words = json.loads(arrays["words"].tobytes())
        frames = np.load(file, mmap_mode="r")
        if len(frames) != lengths.sum() or len(actions) != len(frames):
            raise ValueError(f"{len(frames)} frames, {len(actions)} actions, {lengths.sum()} in the index")
    except (ValueError, OSError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} is damaged ({error}); delete it and it is made again") from error
    return ClipSet(frames, np.cumsum(lengths) - lengths, lengths, actions, poses, tuple(words["names"]), tuple(words["notes"]))
