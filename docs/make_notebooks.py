"""Make a notebook of each tutorial: `python docs/make_notebooks.py` writes docs/tutorials/*.ipynb from the pages beside them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

TUTORIALS = Path(__file__).resolve().parent / "tutorials"
LINK = re.compile(r" \[This page as a notebook\]\([^)]*\)\.")
BLOCK = re.compile(r"^```python\n(.*?)^```\n?", re.MULTILINE | re.DOTALL)


def cell(kind: str, text: str, number: int) -> dict[str, Any]:
    code = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.strip("\n").splitlines(keepends=True), **code}


def notebook(page: str) -> str:
    """The notebook of a page of Markdown, as JSON: its Python blocks are the cells of code."""
    parts = BLOCK.split(LINK.sub("", page))  # text, code, text, code, ..., text
    cells = [cell("code" if i % 2 else "markdown", part, i) for i, part in enumerate(parts) if part.strip()]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for page in sorted(TUTORIALS.glob("*.md")):
        page.with_suffix(".ipynb").write_text(notebook(page.read_text()))
