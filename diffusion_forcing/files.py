"""Files: written in one move, read with a clear error, and cached in one folder."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file

MOST_JSON = 2**24  # bytes of a JSON file of a run
STALE = 3600.0  # seconds after which a file half written was left by a process that was killed


def cache_folder() -> Path:
    """Where made data are kept: $DFORCE_CACHE, or dforce in the user's cache folder."""
    base = os.environ.get("DFORCE_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "dforce"


def cached(name: str, make: Callable[[Path], Any]) -> Path:
    """A file of the cache folder, made by `make(path)` if it is not there. Killed while it is made, it is not there."""
    file = cache_folder() / name
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, make)
    return file


def inside(folder: Path, name: str | Path) -> Path:
    """The path of a name that a file in this folder gives. Raises ValueError where it leads out of the folder or over a link."""
    relative = Path(name)
    if relative.anchor or ".." in relative.parts or "\0" in str(name):
        raise ValueError(f"{str(name)[:200]!r} leads out of {folder}; names are relative to it and without '..'")
    path = folder
    for part in relative.parts:
        path = path / part
        if path.is_symlink():
            raise ValueError(f"{path} is a link, and nothing is read or written over links here; put the file itself in its place")
    return path


def read_limited(path: Path, most: int) -> bytes:
    """The bytes of a file of a size that is expected. Raises ValueError for larger ones."""
    if path.stat().st_size > most:
        raise ValueError(f"{path} is of {path.stat().st_size / 1e6:,.0f} MB, more than the {most / 1e6:,.0f} MB that are read of it")
    return path.read_bytes()


def read_json(path: Path) -> Any:
    """A file of a run, or an error that says which one is damaged."""
    try:
        return json.loads(read_limited(path, MOST_JSON))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); the run is damaged") from error


def write_atomically(path: Path, write: Any) -> None:
    """Call write(temporary path), then put the file in place in one move: readers see the old one or the new one, never half.

    What fails to be written (a full disk, a limit on the size of files) is an OSError, and the old file stays.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):  # by a write that was killed
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE:
                left.unlink()
    # A name of this writer's own: two may write the same file at once.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # were it a link, it would be written over
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # safetensors writes for the owner alone; a model is for whoever may read the folder
        os.replace(temporary, path)
    except safetensors.SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    finally:
        with contextlib.suppress(OSError):  # the error that was raised says more
            temporary.unlink(missing_ok=True)


def read_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file, or an error that says the file is damaged."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        size = os.path.getsize(path)
        raise ValueError(
            f"{path} ({size:,} bytes) is truncated, damaged or not a safetensors file: {error}. Copy or train it again."
        ) from error
