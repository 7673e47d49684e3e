"""`mypy --strict` passes on the Python of the pages, as on a user's own code: the package is typed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import diffusion_forcing

pytest.importorskip("mypy", reason="types are checked by mypy")

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
CONFIG = """\
[mypy]
strict = True
follow_imports = silent
untyped_calls_exclude = torch
[mypy-pandas.*,gluonts.*]
ignore_missing_imports = True
"""


def test_the_python_of_the_pages_is_typed(tmp_path: Path) -> None:
    """Blocks of a page are one module, in which each statement is on its line of the page."""
    pages = {}
    for page in PAGES:
        text, source = page.read_text(), ""
        for block in BLOCK.finditer(text):
            source += "\n" * (text[: block.start(1)].count("\n") - source.count("\n")) + block[1]
        if source:
            file = f"page_{len(pages)}.py"
            (tmp_path / file).write_text(source)
            pages[file] = str(page.relative_to(ROOT))
    (tmp_path / "mypy.ini").write_text(CONFIG)
    place = Path(diffusion_forcing.__file__).parents[1]
    env = {**os.environ, "MYPYPATH": "" if place.name == "site-packages" else str(place)}
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", str(ROOT / ".mypy_cache" / "pages"), *pages]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    report = re.sub(r"^page_\d+\.py", lambda found: pages[found[0]], done.stdout, flags=re.M)
    assert done.returncode == 0, f"{report}\n{done.stderr}"
