"""Standard output and errors that work outlives: a training goes on when `| head` has read enough or its terminal was closed."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

GONE = (errno.EPIPE, errno.EIO)  # nobody reads on: the pipe's other end, or the terminal, was closed


class Outlet:
    """A stream whose failures to write are kept in `error` and not raised."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return int(self._stream.write(text))
        except OSError as error:
            self._failed(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def close(self) -> None:
        """Write what is left. What cannot be written is dropped, or Python would try again when it ends, and fail."""
        self.flush()
        if self.error is not None:
            self._drop()

    @property
    def lost(self) -> OSError | None:
        """Why output was lost that somebody may have wanted: not because nobody was there to read it."""
        return None if self.error is None or self.error.errno in GONE else self.error

    def _failed(self, error: OSError) -> None:
        self.error = error
        if error.errno in GONE:
            self._drop()

    def _drop(self) -> None:
        """From now on everything goes nowhere."""
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream without a file
            number = self._stream.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)
            self._stream.flush()


@contextmanager
def outlived_output() -> Iterator[tuple[Outlet, Outlet]]:
    """Standard output and errors as outlets, for a while."""
    before = sys.stdout, sys.stderr
    outlets = Outlet(sys.stdout), Outlet(sys.stderr)
    sys.stdout, sys.stderr = outlets
    try:
        yield outlets
    finally:
        for outlet in outlets:
            outlet.close()
        sys.stdout, sys.stderr = before
