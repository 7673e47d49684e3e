"""The complete scripts of examples/ and docs/ work."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
from pages import DOCS, ROOT

from diffusion_forcing.engine.cli import main


def test_own_recipe_trains_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    small = ["--train.steps", "2", "--train.batch", "4", "--task.sequences", "8", "--runs", "runs"]
    for words in (
        ["train", "own_recipe:build", *small],
        ["eval", "runs/own_recipe.build", "--recipe", "own_recipe:build", "--samples", "8"],
    ):
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
    subprocess.run([sys.executable, str(DOCS / "make_pictures.py"), str(tmp_path)], check=True)
    assert len(list(tmp_path.glob("*.png"))) == 8
