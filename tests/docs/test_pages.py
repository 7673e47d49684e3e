"""Every Python block of the pages runs, every relative link leads somewhere, and the examples work.

Blocks of a page run in order in one namespace, in an empty folder. A block fenced as ```python no-run is skipped.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import traceback
import types
from pathlib import Path

import matplotlib
import pytest
import torch

from diffusion_forcing import levels

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")) if page.exists()
)
FENCE = re.compile(r"^(`{3,})(.*)$")
LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)|<(?:img|a)\s[^>]*?(?:src|href)=\"([^\"]+)\"")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def read_blocks(text: str) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Python blocks to run as (line of their first statement, code), and the lines outside of any block as (line, text)."""
    blocks, prose = [], []
    fence, info, first, lines = "", "", 0, []
    for number, line in enumerate(text.splitlines(), start=1):
        found = FENCE.match(line.strip())
        if not fence and found:
            fence, info, first, lines = found[1], found[2].strip(), number + 1, []
        elif fence and line.strip() == fence:
            if info == "python":
                blocks.append((first, "\n".join(lines) + "\n"))
            fence = ""
        elif fence:
            lines.append(line)
        else:
            prose.append((number, line))
    if fence:
        raise ValueError(f"the block that opens before line {first} is never closed")
    return blocks, prose


def run_page(page: Path, blocks: list[tuple[int, str]]) -> None:
    """Run a page's blocks as one module, so that dataclasses defined in it can be looked up; say page and line of what fails."""
    module = types.ModuleType(f"page_{page.stem.lower()}")
    sys.modules[module.__name__] = module
    try:
        for first, code in blocks:
            # Blank lines in front put each statement on its line of the page.
            exec(compile("\n" * (first - 1) + code, str(page), "exec"), module.__dict__)
    except SyntaxError as error:
        pytest.fail(f"{name_of(page)}:{error.lineno}: {error.msg}", pytrace=False)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(page)]
        trace = "".join(traceback.format_exception(error))
        pytest.fail(f"{name_of(page)}:{lines[0] if lines else '?'}: {type(error).__name__}: {error}\n\n{trace}", pytrace=False)
    finally:
        del sys.modules[module.__name__]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, _ = read_blocks(page.read_text())
    if not blocks:
        pytest.skip("no Python on this page")
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(levels, "DRAWS", dict(levels.DRAWS))  # a page may add one of its own
    torch.manual_seed(0)
    run_page(page, blocks)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    _, prose = read_blocks(page.read_text())
    dead = []
    for number, line in prose:
        for match in LINK.finditer(re.sub(r"`[^`]*`", "", line)):
            target = match[1] or match[2]
            path = target.split("#")[0]
            if path and not re.match(r"[a-z][a-z0-9+.-]*:", target) and not (page.parent / path).exists():
                dead.append(f"{name_of(page)}:{number}: {target} does not exist")
    assert not dead, "\n".join(dead)


def test_a_failing_block_is_reported_with_its_line(tmp_path: Path) -> None:
    page = ROOT / "docs" / "imaginary.md"
    blocks, prose = read_blocks(
        "text\n\n```python\nx = 1\n```\n\n```python no-run\nnonsense(\n```\n\n```python\nassert x == 1\nassert x == 2\n```\n"
    )
    assert blocks == [(4, "x = 1\n"), (12, "assert x == 1\nassert x == 2\n")]
    assert prose[0] == (1, "text")
    with pytest.raises(pytest.fail.Exception, match=r"docs/imaginary\.md:13: AssertionError"):
        run_page(page, blocks)


def test_navigation_names_every_page() -> None:
    """mkdocs.yml lists each page of docs/ once, and no page that does not exist."""
    named = re.findall(r"^ +- .*?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    written = [str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")]
    assert sorted(named) == sorted(written)


def test_site_builds(tmp_path: Path) -> None:
    """`make docs` without warnings: every reference resolves, and the reference renders each module's names."""
    zensical = shutil.which("zensical", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    if zensical is None:
        pytest.skip("needs zensical: pip install -e '.[docs]'")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "diffusion_forcing").symlink_to(ROOT / "diffusion_forcing")
    done = subprocess.run([zensical, "build", "--strict"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site" / "reference" / "core" / "index.html").read_text()
    assert 'id="diffusion_forcing.schedule.NoiseSchedule.add_noise"' in page
    assert (tmp_path / "site" / "search.json").stat().st_size > 10_000


def test_own_recipe_trains_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusion_forcing.engine.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    small = ["--train.steps", "2", "--train.batch", "4", "--task.sequences", "8", "--runs", "runs"]
    for words in (["train", "own_recipe:build", *small], ["eval", "runs/own_recipe.build", "--samples", "8"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0, words
    assert (tmp_path / "runs" / "own_recipe.build" / "eval.json").exists()


@pytest.mark.slow
def test_own_array_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    runpy.run_path(str(ROOT / "examples" / "own_array.py"), run_name="__main__")


@pytest.mark.slow
def test_pictures_are_drawn(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "docs" / "make_pictures.py"), str(tmp_path)], check=True)
    assert len(list(tmp_path.glob("*.png"))) == 8
