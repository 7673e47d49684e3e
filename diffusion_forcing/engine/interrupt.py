"""Ctrl-C, SIGTERM and SIGHUP as a request to stop, between two steps."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

HANGUP = getattr(signal, "SIGHUP", None)
"""The terminal was closed; there is none such on Windows."""


class Interrupt:
    """Whether a stop was requested, and by which signal."""

    requested = False
    signal = 0


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Turn the first Ctrl-C, SIGTERM or SIGHUP into a request to stop; a second Ctrl-C or SIGTERM acts as usual.

    A terminal that closes sends SIGHUP more than once, so that one is a request each time; ignored (nohup) it stays ignored.
    """
    interrupt = Interrupt()
    previous: dict[int, Any] = {}

    def request(number: int, _frame: Any) -> None:
        interrupt.requested, interrupt.signal = True, number
        if number != HANGUP:
            signal.signal(number, previous[number])

    try:
        for number in (signal.SIGINT, signal.SIGTERM, HANGUP):
            if number is not None and not (number == HANGUP and signal.getsignal(number) is signal.SIG_IGN):
                previous[number] = signal.signal(number, request)
    except ValueError:  # not in the main thread: whoever runs us handles signals
        previous = {}
    try:
        yield interrupt
    finally:
        for caught, handler in previous.items():
            signal.signal(caught, handler)


def exit_code(number: int) -> int:
    """What a program that a signal ended exits with, as shells count: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP. 0: as Ctrl-C."""
    return 128 + (number or signal.SIGINT)


def end_interrupted(number: int, message: str = "") -> NoReturn:
    """End a program whose training a signal interrupted, once all is saved: as Ctrl-C usually does, or with the signal's exit code."""
    if number in (0, signal.SIGINT):
        raise KeyboardInterrupt(message)
    if message:
        print(message, flush=True)
    raise SystemExit(exit_code(number))
