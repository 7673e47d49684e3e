"""Rules that many options share, and the words for breaking them."""

from __future__ import annotations

from typing import Any


def check_divides(parts: int, whole: int, what: str) -> None:
    """Raise unless `parts` divides `whole`."""
    if parts < 1 or whole % parts:
        raise ValueError(f"{what}: {parts} must divide {whole}")


def check_counts(**counts: int) -> None:
    """Raise unless each is 1 at least."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} counts from 1; got {count}")


def check_options(options: Any, *names: str) -> None:
    """Raise unless each of the named options is 1 at least."""
    check_counts(**{name: getattr(options, name) for name in names})
