"""One training at a time in a run's folder: a lock file, which the system releases when its holder ends, however it ends."""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = "train.lock"
_held: dict[Path, int] = {}  # folders that this process holds, and the thread that does


class Busy(ValueError):
    """Another training is at work in the folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run's folder, made if it is not there. Raises Busy where a living training holds it; within one thread it may be held again.

    The file says who holds it: process, host, and since when. Where it was left by a training that was killed, it is taken over.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key, me, file = folder.resolve(), threading.get_ident(), folder / LOCK
    if _held.get(key) == me:
        yield
        return
    number = _take(folder, file)
    _held[key] = me
    try:
        yield
    finally:
        del _held[key]
        with contextlib.suppress(OSError):
            if _same(number, file):  # or the folder was renamed, or removed
                file.unlink()
        os.close(number)


def _take(folder: Path, file: Path) -> int:
    """The lock file, open and held."""
    while True:
        number = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            holder = _holder(number)
            if not _hold(number, holder):
                raise Busy(_busy(folder, holder))
            if not _same(number, file):  # its holder ended just now, and removed it
                os.close(number)
                continue
            now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            os.ftruncate(number, 0)
            os.lseek(number, 0, os.SEEK_SET)
            os.write(number, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": now}).encode() + b"\n")
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(number)
            raise
        return number


def _hold(number: int, holder: dict[str, Any]) -> bool:
    """Lock an open file. The system tells a living holder from a dead one; where it cannot lock files, the holder's process does."""
    if fcntl is not None:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
        else:
            return True
    return not _alive(holder)


def _alive(holder: dict[str, Any]) -> bool:
    """Whether the process of a lock file lives, as far as can be known: on another host it is taken to."""
    pid, host = holder.get("pid"), holder.get("host")
    if not isinstance(pid, int) or pid < 1 or pid == os.getpid():
        return False
    if host != socket.gethostname():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _holder(number: int) -> dict[str, Any]:
    """What a lock file says; nothing if it is empty or damaged."""
    try:
        os.lseek(number, 0, os.SEEK_SET)
        holder = json.loads(os.read(number, 4096))
    except (ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _same(number: int, file: Path) -> bool:
    """Whether a path still is the file that was opened."""
    try:
        return os.path.samestat(os.fstat(number), os.lstat(file))
    except FileNotFoundError:
        return False


def _busy(folder: Path, holder: dict[str, Any]) -> str:
    pid, host, started = (str(holder.get(name, "unknown"))[:80] for name in ("pid", "host", "started"))
    return (
        f"a training is at work in {folder}: process {pid} on {host}, since {started}. Wait for it, stop it (kill {pid}, which saves), or "
        f"train elsewhere (--name NAME). If it is gone for certain, delete {folder / LOCK}"
    )
