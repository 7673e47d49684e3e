"""The site: its navigation is complete, and `make docs` builds it without warnings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import DOCS, ROOT


def test_navigation_names_every_page() -> None:
    named = re.findall(r"^ +- .*?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.glob("**/*.md"))


def test_site_builds(tmp_path: Path) -> None:
    zensical = shutil.which("zensical", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    if zensical is None:
        pytest.skip("needs zensical: pip install -e '.[docs]'")
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "diffusion_forcing").symlink_to(ROOT / "diffusion_forcing")
    done = subprocess.run([zensical, "build", "--strict"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site" / "reference" / "core" / "index.html").read_text()
    assert 'id="diffusion_forcing.schedule.NoiseSchedule.add_noise"' in page
    assert (tmp_path / "site" / "search.json").stat().st_size > 10_000
