"""Every Python block of the pages runs, every relative link leads somewhere, and generated pages are up to date.

Blocks of a page run in order in one namespace, in an empty folder. Those of a tutorial are run as its notebook.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
import traceback
import types
from pathlib import Path

import matplotlib
import pytest
import torch
from pages import DOCS, PAGES, ROOT, name_of, read_blocks

from diffusion_forcing import levels

LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)|<(?:img|a)\s[^>]*?(?:src|href)=\"([^\"]+)\"")
TUTORIALS = sorted(DOCS.glob("tutorials/*.md"))


def run_blocks(page: Path, blocks: list[tuple[int, str]]) -> None:
    """Run a page's blocks as one module, so that dataclasses defined in it can be looked up; report page and line of what fails."""
    module = types.ModuleType(f"page_{page.stem.replace('-', '_').lower()}")
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


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a page runs: an empty folder, with tables that a page may add to put back afterwards."""
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(levels, "DRAWS", dict(levels.DRAWS))
    torch.manual_seed(0)
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if page not in TUTORIALS], ids=name_of)
@pytest.mark.usefixtures("empty_folder")
def test_blocks_run(page: Path) -> None:
    blocks = [(first, code) for first, language, code in read_blocks(page.read_text())[0] if language == "python"]
    if not blocks:
        pytest.skip("no Python on this page")
    run_blocks(page, blocks)


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=name_of)
@pytest.mark.usefixtures("empty_folder")
def test_notebook_runs(page: Path) -> None:
    notebook = page.with_suffix(".ipynb")
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    run_blocks(notebook, [(1, "".join(cell["source"])) for cell in cells])


@pytest.mark.parametrize("page", TUTORIALS, ids=name_of)
def test_notebook_is_that_of_its_page(page: Path) -> None:
    made = runpy.run_path(str(DOCS / "make_notebooks.py"))["notebook"](page.read_text())
    assert page.with_suffix(".ipynb").read_text() == made, "run `python docs/make_notebooks.py`"


def test_reference_lists_every_module() -> None:
    make = runpy.run_path(str(DOCS / "make_reference.py"))
    stale = [page for page in make["PAGES"] if (DOCS / "reference" / f"{page}.md").read_text() != make["text"](page)]
    assert not stale, f"run `python docs/make_reference.py`: {', '.join(stale)}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for number, line in read_blocks(page.read_text())[1]:
        for match in LINK.finditer(re.sub(r"`[^`]*`", "", line)):
            target = match[1] or match[2]
            path = target.split("#")[0]
            if path and not re.match(r"[a-z][a-z0-9+.-]*:", target) and not (page.parent / path).exists():
                dead.append(f"{name_of(page)}:{number}: {target} does not exist")
    assert not dead, "\n".join(dead)


def test_a_failing_block_is_reported_with_its_line() -> None:
    page = ROOT / "docs" / "imaginary.md"
    text = "text\n\n```python\nx = 1\n```\n\n```sh\nnonsense(\n```\n\n```python\nassert x == 1\nassert x == 2\n```\n"
    blocks, prose = read_blocks(text)
    assert blocks == [(4, "python", "x = 1\n"), (8, "sh", "nonsense(\n"), (12, "python", "assert x == 1\nassert x == 2\n")]
    assert prose[0] == (1, "text")
    with pytest.raises(pytest.fail.Exception, match=r"docs/imaginary\.md:13: AssertionError"):
        run_blocks(page, [(first, code) for first, language, code in blocks if language == "python"])
