"""For the reference: lines of docstrings that explain one name each become lists, which Markdown would join into one paragraph."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROW = re.compile(r"^([\w.+*()]+(?:, [\w.+*()]+)*)(?:: | {2,})(?=\S)")  # "name: what it is", or a table "name    what it is"


def as_lists(text: str) -> str:
    """A docstring with such lines as list items. The summary stays as it is."""
    summary, *rest = text.split("\n")
    lines, listed = [summary], False
    for line in rest:
        row = ROW.match(line)
        if row:
            lines += [] if listed else [""]
            line = f"- **{row[1]}**: {line[row.end() :]}"
        elif listed and line.strip():
            line = f"  {line}"  # goes on with the item
        listed = bool(row) or (listed and bool(line.strip()))
        lines.append(line)
    return "\n".join(lines)


class Lists(griffe.Extension):
    """Applies `as_lists` to every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_lists(obj.docstring.value)
