"""Every `dforce` command of the pages is parsed, options and their values included, up to where it would begin to work."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pages import PAGES, name_of, read_blocks

from diffusion_forcing.engine import cli
from diffusion_forcing.engine.config import Experiment
from diffusion_forcing.engine.recipes import RECIPES, build
from diffusion_forcing.engine.sequences import Sequences


class Parsed(BaseException):
    """Raised in place of the work."""


def commands(page: Path) -> list[tuple[int, list[str]]]:
    """Words after `dforce` of each command of a page, with the line it is on."""
    found = []
    for first, language, code in read_blocks(page.read_text())[0]:
        if language != "sh":
            continue
        for number, line in enumerate(code.splitlines(), start=first):
            words = shlex.split(line, comments=True)
            if "-m" in words and words[words.index("-m") + 1] == "diffusion_forcing":
                words = ["dforce", *words[words.index("-m") + 2 :]]
            while words[:1] == ["dforce"]:
                end = words.index("&&") if "&&" in words else len(words)
                found.append((number, words[1:end]))
                words = words[end + 1 :]
    return found


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Experiments of runs by folder: commands that train write theirs down and stop, others read it."""
    pytest.importorskip("pandas")
    from diffusion_forcing.forecasting import command
    from diffusion_forcing.video import play

    known: dict[str, Any] = {}

    def stop(*_: Any, **__: Any) -> Any:
        raise Parsed

    def train(experiment: Any, folder: Path) -> None:
        known[str(folder)] = experiment
        raise Parsed

    def load_run(folder: Path, backbone: str | None = None, classes: Any = ()) -> Any:
        recipes = [name for name in RECIPES if Path(folder).name.startswith(name)]
        if str(folder) not in known and not recipes:
            raise ValueError(f"no command before says what {folder} is")
        model = SimpleNamespace(to=lambda device: model)
        return known.get(str(folder)) or build(max(recipes, key=len)), model

    def parse_run(*words: Any, parse: Any = cli.parse_run) -> Any:
        parse(*words)
        raise Parsed

    monkeypatch.chdir(tmp_path)
    for module, name, function in (
        (cli, "check", lambda experiment: None), (cli, "open_run", lambda *_, **__: None), (cli, "train", train),
        (cli, "load_run", load_run), (cli, "parse_run", parse_run), (play, "parse_run", parse_run), (cli, "progress_bar", stop),
        (cli, "write_report", stop), (cli, "list_recipes", stop), (cli, "verify", stop), (command, "read", stop),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, function)
    return known


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name_of)
def test_commands_parse(page: Path, runs: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    runs |= {folder: Experiment(Sequences()) for folder in re.findall(r"folder=\"([^\"]+)\"", page.read_text())}  # runs that `fit` makes
    for line, words in commands(page):
        if ":" in (words[1:] or [""])[0]:  # a recipe of one's own
            continue
        try:
            cli.main(words)
        except Parsed:
            continue
        except SystemExit:
            written = capsys.readouterr()
            wrong.append(f"{name_of(page)}:{line}: dforce {shlex.join(words)}\n{(written.out + written.err)[-600:]}")
    assert not wrong, "\n".join(wrong)


def options_of(value: Any, path: str) -> set[str]:
    """Names on the command line of a dataclass's fields, those of nested dataclasses included."""
    names = set()
    for field in dataclasses.fields(value):
        inner, name = getattr(value, field.name), field.name.replace("_", "-")
        names |= {f"--{path}{name}", f"--{path}no-{name}"}
        if dataclasses.is_dataclass(inner):
            names |= options_of(inner, f"{path}{name}.")
    return names


def test_options_in_the_text_exist() -> None:
    """`--task.*` and the like, named in a sentence."""
    pytest.importorskip("pandas")
    variants = [(name, {"backbone": backbone}) for name, recipe in RECIPES.items() for backbone in recipe.backbones or (None,)]
    variants += [(name, {"stage": stage}) for name, recipe in RECIPES.items() for stage in recipe.stages]
    known = set().union(*(options_of(dataclasses.replace(build(name, **kind), name=""), "") for name, kind in variants))
    wrong = []
    for page in PAGES:
        for number, line in read_blocks(page.read_text())[1]:
            for code in re.findall(r"`([^`]+)`", line):
                names = re.findall(r"--(?:task|model|train|objective)\.[\w.-]+\w", code)
                wrong += [f"{name_of(page)}:{number}: {name}" for name in names if name not in known]
    assert not wrong, "\n".join(wrong)
