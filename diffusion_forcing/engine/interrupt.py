"""Ctrl-C and SIGTERM as a request to stop, between two steps."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupt:
    """Whether a stop was requested."""

    requested = False


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Turn the first Ctrl-C or SIGTERM into a request to stop; the second acts as usual."""
    interrupt = Interrupt()
    previous: dict[int, Any] = {}

    def request(number: int, _frame: Any) -> None:
        interrupt.requested = True
        signal.signal(number, previous[number])

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, request)
    except ValueError:  # not in the main thread: whoever runs us handles signals
        previous = {}
    try:
        yield interrupt
    finally:
        for caught, handler in previous.items():
            signal.signal(caught, handler)
