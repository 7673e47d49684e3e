"""The public data sets of the forecasting literature, by name: downloaded by GluonTS, or read from its JSON lines."""

from __future__ import annotations

import gzip
import json
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import pandas as pd

from .panel import Array, Panel, format_time, offset_of


@dataclass(frozen=True)
class Dataset:
    """A public data set: its name in GluonTS, and the rolling test windows of `horizon` steps it ends with."""

    gluonts: str
    horizon: int
    test_windows: int
    freq: str


DATASETS = {
    "exchange": Dataset("exchange_rate_nips", 30, 5, "B"),
    "solar": Dataset("solar_nips", 24, 7, "h"),
    "electricity": Dataset("electricity_nips", 24, 7, "h"),
    "traffic": Dataset("traffic_nips", 24, 7, "h"),
    "taxi": Dataset("taxi_30min", 24, 56, "30min"),
    "wikipedia": Dataset("wiki-rolling_nips", 30, 5, "D"),
}


def load_dataset(name: str, path: str | Path | None = None) -> tuple[Panel, Dataset]:
    """A public data set as one panel, the last test_windows * horizon steps of which are its test windows.

    path: a folder or .tar.gz of GluonTS' JSON lines; None: GluonTS downloads the set, or takes it from its cache.
    """
    if name not in DATASETS:
        raise ValueError(f"the data sets known by name are {', '.join(DATASETS)}; got {name!r}; read files of your own with `read`")
    dataset = DATASETS[name]
    if path is None:
        source = dataset.gluonts
        freq, train, test = _download(dataset)
    else:
        source = str(path)
        if not Path(path).exists():
            raise FileNotFoundError(f"there is no folder or archive {path}; check the path, or leave it out to download {dataset.gluonts}")
        freq, train, test = _metadata(Path(path)), _entries(Path(path), "train"), _entries(Path(path), "test")
    if freq is not None and offset_of(freq) != offset_of(dataset.freq):
        raise ValueError(
            f"{source} is of freq {freq!r} and {name} of {dataset.freq!r}; this is another set, pass the path of {dataset.gluonts}"
        )
    return _join(train, test, dataset, source), dataset


def _download(dataset: Dataset) -> tuple[str | None, Iterable[Any], Iterable[Any]]:
    """freq, training entries and test entries, by GluonTS."""
    try:
        from gluonts.dataset.repository import get_dataset
    except ImportError as error:
        raise ImportError(
            "downloading needs gluonts: pip install 'diffusion_forcing[forecasting]', or pass the path of a set you have"
        ) from error
    try:
        downloaded = get_dataset(dataset.gluonts)
    except (OSError, HTTPException, EOFError, tarfile.TarError) as error:
        raise ConnectionError(f"{dataset.gluonts} could not be downloaded ({error}); fetch {dataset.gluonts}.tar.gz where there is a "
                              "network, and pass its path") from error  # fmt: skip
    return downloaded.metadata.freq, downloaded.train, downloaded.test


def _lines(path: Path, selects: Callable[[PurePosixPath], bool]) -> Iterator[tuple[str, bytes]]:
    """Where each line of the selected files of a folder or archive is, and the line.

    Of an archive only regular files are read, and nothing is written to disk.
    """
    try:
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                if file.is_file() and selects(PurePosixPath(file.relative_to(path).as_posix())):
                    with open(file, "rb") as stream:
                        yield from _numbered(str(file), stream)
            return
        with tarfile.open(path) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() and selects(PurePosixPath(member.name)) else None
                if content is not None:
                    yield from _numbered(f"{path}:{member.name}", content)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is damaged, or neither a folder nor a .tar.gz ({error}); fetch it again") from error


def _numbered(name: str, stream: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    content = gzip.GzipFile(fileobj=stream) if name.endswith(".gz") else stream
    for number, line in enumerate(content, start=1):
        if line.strip():
            yield f"{name}, line {number}", line


def _metadata(path: Path) -> str | None:
    """The freq in a set's metadata."""
    text = b"".join(line for _, line in _lines(path, lambda file: file.name == "metadata.json"))
    try:
        metadata = json.loads(text or b"{}")
        return metadata.get("freq") or metadata.get("time_granularity")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"metadata.json of {path} is not that of a set ({error}); fetch it again") from error


def _entries(path: Path, part: str) -> Iterator[dict[str, Any]]:
    """The entries of train or test, one a line."""

    def selects(file: PurePosixPath) -> bool:
        return file.parent.name == part and file.name.endswith((".json", ".json.gz", ".jsonl")) and not file.name.startswith(".")

    for where, line in _lines(path, selects):
        try:
            entry = json.loads(line)
            yield {"start": pd.Timestamp(entry["start"]), "target": np.asarray(entry["target"], dtype=np.float64)}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{where} is not an entry with `start` and `target` ({error!r}); fetch the set again") from error


def _join(train: Iterable[Any], test: Iterable[Any], dataset: Dataset, source: str) -> Panel:
    """One panel from d training series and, for each test window, the d series that end with it."""
    offset = offset_of(dataset.freq)
    positions: dict[Any, int] = {}

    def position(start: Any, first: Any) -> int:
        if start not in positions:
            stamp = _start(start, offset)
            clock = pd.date_range(first, stamp, freq=offset)
            if not len(clock) or clock[-1] != stamp:
                raise ValueError(
                    f"{source} has an entry that starts at {format_time(stamp)}, off the clock that starts at {format_time(first)}; "
                    "fetch it again"
                )
            positions[start] = len(clock) - 1
        return positions[start]

    entries = list(train)
    if not entries:
        raise ValueError(f"{source} has no entries in train/; it should hold metadata, train and test of {dataset.gluonts}")
    first = min(_start(entry["start"], offset) for entry in entries)
    whole = [_merge(np.empty(0), position(entry["start"], first), entry["target"], source) for entry in entries]
    ends: list[int] = []
    for i, entry in enumerate(test):
        series, at = i % len(whole), position(entry["start"], first)
        whole[series] = _merge(whole[series], at, entry["target"], source)
        ends.append(at + len(entry["target"]))
    t = max(map(len, whole))
    expected = [t - dataset.horizon * back for back in range(dataset.test_windows - 1, -1, -1) for _ in whole]
    if ends != expected:
        raise ValueError(f"{source} should test {len(whole)} series in {dataset.test_windows} windows, each {dataset.horizon} steps later; "
                         f"it has {len(ends)} entries that end at the steps {sorted(set(ends))[:8]}; pass {dataset.gluonts}")  # fmt: skip
    values = np.stack([np.pad(series, (0, t - len(series)), constant_values=np.nan) for series in whole], axis=1)
    index = pd.date_range(first, periods=t, freq=offset)
    empty = np.isnan(values).all(axis=1)
    notes = (
        (f"{int(empty.sum())} steps between training and test have no values, from {format_time(index[int(empty.argmax())])} on",)
        if empty.any()
        else ()
    )
    return Panel(values, tuple(str(i) for i in range(len(whole))), index, offset.freqstr, np.empty((t, 0)), notes=notes)


def _start(start: Any, offset: Any) -> Any:
    """A timestamp on the clock, from text or from GluonTS' period."""
    stamp = start.to_timestamp() if isinstance(start, pd.Period) else pd.Timestamp(start)
    return stamp if isinstance(offset, (pd.offsets.Tick, pd.offsets.Day)) else offset.rollforward(stamp)


def _merge(series: Array, at: int, target: Any, source: str) -> Array:
    """A series (t,) with `target` written from step `at` on; where both have values they must agree."""
    target = np.asarray(target, dtype=np.float64)
    if target.ndim != 1:
        raise ValueError(f"{source} has an entry of shape {target.shape}; each should be one series, so pass the set of single series")
    merged = np.full(max(len(series), at + len(target)), np.nan)
    merged[: len(series)] = series
    present = merged[at : at + len(target)]
    differ = (present != target) & ~np.isnan(present) & ~np.isnan(target)
    if differ.any():
        step = int(differ.argmax())
        raise ValueError(f"{source} has both {present[step]:g} and {target[step]:g} for one series at step {at + step}; train and test do "
                         "not belong together, fetch the set again")  # fmt: skip
    merged[at : at + len(target)] = np.where(np.isnan(target), present, target)
    return merged
