"""Dataclasses as options of a command: the commonly used ones behind --help, all of them behind --help-all."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection
from typing import Annotated, Any

import tyro

HELP_ALL = "--help-all"


def parse(kind: Any, words: list[str], prog: str, description: str | None, shown: dict[str, Collection[str] | None]) -> Any:
    """An instance of a dataclass from the words of a command.

    shown: of nested dataclasses by the field's name, the options that --help shows ("size", or "world.size" further down); None: all.
    """
    markers = [tyro.conf.AvoidSubcommands]
    if HELP_ALL in words or "--help" in words or "-h" in words:
        markers.append(tyro.conf.FlagCreatePairsOff)
        if HELP_ALL not in words:
            kind = _narrowed(kind, shown)
            description = f"{description or ''}\n{HELP_ALL} lists the options that are rarely needed, too.".strip()
        words = ["--help"]
    return tyro.cli(tyro.conf.configure(*markers)(kind), args=words, prog=prog, description=description)


def _narrowed(kind: Any, shown: dict[str, Collection[str] | None]) -> Any:
    """The dataclass for the help text, in which all but the shown options of its nested dataclasses are suppressed."""
    fields: list[Any] = []
    for field in dataclasses.fields(kind):
        if shown.get(field.name) is not None:
            value = _suppressed(field.default, shown[field.name] or ())
            fields.append((field.name, type(value), dataclasses.field(default=value)))
    return dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), frozen=True, kw_only=True)


def _suppressed(value: Any, shown: Collection[str], prefix: str = "") -> Any:
    """A copy of a dataclass's instance, of a subclass in which all options but those named are suppressed."""
    hints = typing.get_type_hints(type(value), include_extras=True)
    fields: list[Any] = []
    for field in dataclasses.fields(value):
        own, kind = getattr(value, field.name), hints[field.name]
        if dataclasses.is_dataclass(own):
            own = _suppressed(own, shown, f"{prefix}{field.name}.")
            kind = type(own)
        elif prefix + field.name not in shown:
            kind = Annotated[kind, tyro.conf.Suppress]
        fields.append((field.name, kind, dataclasses.field(default=own)))
    space = {"__doc__": type(value).__doc__, "__post_init__": lambda self: None}
    return dataclasses.make_dataclass(type(value).__name__, fields, bases=(type(value),), frozen=True, namespace=space)()
