"""Which data a run was trained on: sizes, times and hashes of its files, kept in the run and compared when it goes on or is evaluated.

Data that are generated are described by the task's options, which the run keeps anyway.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import read_json, write_atomically

DATA = "data.json"
WHOLE, PART = 2**24, 2**22
"""Bytes up to which a file is hashed as a whole; of a larger one parts at the beginning, middle and end."""


def paths_of(options: Any, prefix: str = "") -> dict[str, Path]:
    """Paths among the options of a dataclass, and of those within it, by their dotted names."""
    found: dict[str, Path] = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if isinstance(value, Path):
            found[prefix + field.name] = value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            found |= paths_of(value, f"{prefix}{field.name}.")
    return found


def keep_data(folder: Path, files: Mapping[str, Path], *, resumed: bool) -> None:
    """Write down what a run is trained on, or check that it is the same in one that is resumed. files: by the task's option."""
    if resumed and (folder / DATA).is_file():
        check_data(folder, files, "Put the old data back, or train elsewhere (--name NAME, or another folder=...)")
        return
    described = {_key(path, folder): describe_data(path, folder) for path in files.values() if path.exists()}
    write_atomically(folder / DATA, lambda file: Path(file).write_text(json.dumps(described, indent=2) + "\n"))


def check_data(folder: Path, files: Mapping[str, Path], way: str = "") -> None:
    """Raise ValueError if data are not those that a run was trained on. Paths that it was not trained on are not compared.

    way: what to do about it; by default what helps before an evaluation.
    """
    known = read_json(folder / DATA) if (folder / DATA).is_file() else {}
    for option, path in files.items():
        was = known.get(_key(path, folder)) if isinstance(known, dict) else None
        if not isinstance(was, dict) or not path.exists() or was.get("listing") == _listing(path, folder):
            continue  # names, sizes and times are as they were: so are the contents
        now = describe_data(path, folder)
        if was.get("content") == now["content"]:
            continue
        way = way or ("Put the old data back, or train again; to measure on other data keep them under another path and name it, "
                      f"--task.{option} PATH")  # fmt: skip
        raise ValueError(f"{path} has changed since {folder} was trained on it: {_size(was)} then, {_size(now)} now"
                         f"{', with other contents' if _size(was) == _size(now) else ''}. {way}")  # fmt: skip


def describe_data(path: Path, folder: Path) -> dict[str, Any]:
    """Number of files, bytes, and hashes of names, sizes and times, and of the contents, of a file or of all in a folder."""
    content, files = hashlib.sha256(), _files(path, folder)
    for name, file in files:
        content.update(f"{name}\0{file.stat().st_size}\0".encode())
        with open(file, "rb") as opened:
            size = file.stat().st_size
            for begin in (0,) if size <= WHOLE else (0, (size - PART) // 2, size - PART):
                opened.seek(begin)
                content.update(opened.read(WHOLE if size <= WHOLE else PART))
    return {
        "files": len(files),
        "bytes": sum(file.stat().st_size for _, file in files),
        "listing": _listing(path, folder),
        "content": content.hexdigest(),
    }


def _listing(path: Path, folder: Path) -> str:
    """A hash of names, sizes and times."""
    lines = [f"{name}\0{file.stat().st_size}\0{file.stat().st_mtime_ns}" for name, file in _files(path, folder)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _files(path: Path, folder: Path) -> list[tuple[str, Path]]:
    """Names and files of some data: those of a folder but hidden ones, and runs that lie within it."""
    if path.is_file():
        return [("", path)]
    runs = folder.resolve().parent
    within = [(file.relative_to(path).as_posix(), file) for file in sorted(path.rglob("*")) if file.is_file()]
    outside = [(name, file) for name, file in within if runs == path.resolve() or not file.resolve().is_relative_to(runs)]
    return [(name, file) for name, file in outside if not any(part.startswith(".") for part in Path(name).parts)]


def _key(path: Path, folder: Path) -> str:
    """A path as it was typed; one in the run's folder by its name there, so that a run may be moved."""
    return f"RUN/{path.relative_to(folder).as_posix()}" if path.is_relative_to(folder) else path.as_posix()


def _size(described: dict[str, Any]) -> str:
    files, size = described.get("files"), described.get("bytes")
    if not isinstance(size, int) or not isinstance(files, int):
        return "unknown"
    return f"{size:,} bytes" + (f" in {files:,} files" if files != 1 else "")
