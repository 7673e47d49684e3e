"""The pages of the documentation, and what stands in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("**/*.md"))]
FENCE = re.compile(r"^(`{3,})(.*)$")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def read_blocks(text: str) -> tuple[list[tuple[int, str, str]], list[tuple[int, str]]]:
    """Fenced blocks as (line of their first statement, language, code), and the lines outside of any block as (line, text)."""
    blocks, prose = [], []
    fence, info, first, lines = "", "", 0, []
    for number, line in enumerate(text.splitlines(), start=1):
        mark = FENCE.match(line.strip())
        if not fence and mark:
            fence, info, first, lines = mark[1], mark[2].strip(), number + 1, []
        elif fence and line.strip() == fence:
            blocks.append((first, info, "\n".join(lines) + "\n"))
            fence = ""
        elif fence:
            lines.append(line)
        else:
            prose.append((number, line))
    if fence:
        raise ValueError(f"the block that opens before line {first} is never closed")
    return blocks, prose
