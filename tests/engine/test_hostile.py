"""Runs by strangers: opening one runs no code that its files name, whatever opens it."""

import contextlib
import json
import pickle
import shutil
import sys

import numpy as np
import pytest
from forecasts import load_table, made
from safetensors.torch import load_file, save_file
from small import WORDS, dforce, flat

from diffusion_forcing import DiffusionForcing
from diffusion_forcing.engine import pretrained
from diffusion_forcing.engine.config import load_experiment
from diffusion_forcing.engine.run import load_run
from diffusion_forcing.forecasting.forecaster import Forecaster
from diffusion_forcing.imitation.agent import ImitationAgent
from diffusion_forcing.planning import PlanningAgent
from diffusion_forcing.video.policy import POLICIES, ActionPolicy

TRAP = "trapped"


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """A small run and a small forecaster."""
    root = tmp_path_factory.mktemp("honest")
    assert dforce("train", "composition", *WORDS, "--train.steps", "1", "--runs", root) == 0
    made(load_table()).save(root / "forecaster")
    return root


@pytest.fixture
def sprung(tmp_path, monkeypatch):
    """A module that leaves a flag when it is imported: in the current folder, in the run's and beside it, all of them searched by Python.
    Returns whether it was.
    """
    flag, run = tmp_path / "flag", tmp_path / "runs" / "run"
    (run / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, run.parent, run, run / "model"):
        text = f"import pathlib\npathlib.Path({str(flag)!r}).touch()\n\n\nclass Task:\n    pass\n\n\ndef go():\n    pass\n"
        (folder / f"{TRAP}.py").write_text(text)
        monkeypatch.syspath_prepend(str(folder))
    yield lambda: flag.exists() or TRAP in sys.modules
    sys.modules.pop(TRAP, None)


def test_the_trap_works(sprung):
    __import__(TRAP)
    assert sprung()


def copied(honest, folder):
    """The honest run, to be tampered with, in a folder."""
    shutil.copytree(honest / "composition", folder, dirs_exist_ok=True)
    return folder


def tamper(file, change):
    """Change what a JSON file says."""
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


COMMANDS = {
    "eval": ("eval", "runs/run"),
    "sample": ("sample", "runs/run"),
    "help": ("sample", "runs/run", "--help"),
    "play": ("play", "runs/run", "--keys", "w"),
    "report": ("report", "runs/run"),
    "against": ("eval", "honest", "--against", "runs/run"),
    "resume": ("train", "composition", *WORDS, "--name", "run", "--train.steps", "2"),
    "init": ("train", "composition", *WORDS, "--name", "new", "--train.init", "runs/run"),
}


@pytest.mark.parametrize("part", ["task", "objective"])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_imports_what_a_run_names(name, part, honest, sprung, tmp_path, capsys):
    run = copied(honest, tmp_path / "runs" / "run")
    (tmp_path / "honest").symlink_to(honest / "composition")
    tamper(run / "config.json", lambda config: config[part].update(kind="Task"))
    tamper(run / "run.json", lambda about: about.update(recipe=f"{TRAP}:go", backbone=f"{TRAP}:go"))
    code = dforce(*COMMANDS[name])
    message = flat(capsys.readouterr().err)
    assert not sprung()
    assert code == (0 if name == "report" else 2)
    if name in ("eval", "sample", "help", "play", "against"):
        assert f"add --recipe {TRAP}:go" in message  # printed, and not followed
        assert "nothing that a file names" in message


PYTHON = {
    "load_run": load_run,
    "experiment": lambda run: load_experiment(run / "config.json"),
    "model": lambda run: DiffusionForcing.from_pretrained(run / "model"),
    "planning": PlanningAgent.from_pretrained,
    "imitation": ImitationAgent.from_pretrained,
}


def leaves(value, path=()):
    """Where the texts of some JSON stand."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] if isinstance(value, str) else [leaf for key, inner in items for leaf in leaves(inner, (*path, key))]


@pytest.mark.parametrize("name", PYTHON)
@pytest.mark.parametrize("file", ["config.json", "model/config.json", "run.json"])
def test_no_text_of_a_file_is_imported(file, name, honest, sprung, tmp_path):
    run = copied(honest, tmp_path / "runs" / "run")
    whole = json.loads((run / file).read_text())
    places = leaves(whole)
    assert places
    for *path, last in places:
        changed = json.loads(json.dumps(whole))
        inner = changed
        for key in path:
            inner = inner[key]
        for text in (TRAP, f"{TRAP}:go", f"{TRAP}.go"):
            inner[last] = text
            (run / file).write_text(json.dumps(changed))
            with contextlib.suppress(ValueError):  # in words
                PYTHON[name](run)
            assert not sprung(), (path, last)


def test_no_pretrained_model_is_followed(honest, sprung, tmp_path, monkeypatch, capsys):
    run = copied(honest, tmp_path / "runs" / "run")
    monkeypatch.setattr(pretrained, "PRETRAINED", tmp_path / "runs")
    tamper(run / "config.json", lambda config: config["task"].update(kind="Task"))
    tamper(run / "run.json", lambda about: about.update(recipe=f"{TRAP}:go"))
    assert dforce("eval", "run", "--pretrained") == 2
    assert "nothing that a file names" in flat(capsys.readouterr().err)
    assert not sprung()


def test_no_forecaster_is_followed(honest, sprung, tmp_path):
    for file in ("forecaster.json", "series.json", "model/config.json"):
        places = leaves(json.loads((honest / "forecaster" / file).read_text()))
        assert places
        for *path, last in places:
            folder = tmp_path / "forecaster"
            shutil.copytree(honest / "forecaster", folder, dirs_exist_ok=True)

            def change(data, path=path, last=last):
                for key in path:
                    data = data[key]
                data[last] = f"{TRAP}:go"

            tamper(folder / file, change)
            with contextlib.suppress(ValueError, KeyError, TypeError):
                Forecaster.load(folder)
            assert not sprung(), (file, path, last)


class Bomb:
    """What imports the trap when it is unpickled."""

    def __reduce__(self):
        return __import__, (TRAP,)


def test_nothing_is_unpickled(honest, sprung, tmp_path):
    run = copied(honest, tmp_path / "runs" / "run")
    policy = next(POLICIES.glob("*.safetensors"))
    shutil.copy(policy, tmp_path / "policy.safetensors")
    pickled = pickle.dumps(Bomb())
    for file in (run / "model" / "model.safetensors", run / "checkpoint.safetensors", tmp_path / "policy.safetensors"):
        file.write_bytes(pickled)
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_run(run)
    with pytest.raises(ValueError, match="not a safetensors file"):
        ActionPolicy.load(tmp_path / "policy.safetensors", 2)
    assert dforce(*COMMANDS["resume"]) == 2
    array = np.empty(1, dtype=object)
    array[0] = Bomb()
    np.savez(tmp_path / "values.npz", values=array, action=array, state=array, episode_ends=array)
    assert dforce("train", "exchange", "--task.source", "values.npz", "--train.steps", "1") == 2
    assert dforce("train", "pusht", "--data", "values.npz", "--train.steps", "1") == 2
    assert not sprung()


def test_metadata_of_a_checkpoint_are_numbers(honest, sprung, tmp_path):
    run = copied(honest, tmp_path / "runs" / "run")
    tensors = load_file(run / "checkpoint.safetensors")
    save_file(tensors, run / "checkpoint.safetensors", metadata={"training": f"{TRAP}:go"})
    assert dforce(*COMMANDS["resume"]) == 2
    assert not sprung()


@pytest.mark.parametrize("recipe", ["x:y; touch flag", "--help", "\x1b[31mx:y", "x:" + "y" * 1000, 7, None, ["x:y"]])
def test_only_a_name_is_repeated_from_a_file(recipe, honest, sprung, tmp_path, capsys):
    run = copied(honest, tmp_path / "runs" / "run")
    tamper(run / "config.json", lambda config: config["task"].update(kind="Task"))
    tamper(run / "run.json", lambda about: about.update(recipe=recipe))
    assert dforce("eval", "runs/run") == 2
    assert "add --recipe module:function " in flat(capsys.readouterr().err)


def test_a_recipe_that_the_user_types_is_followed(honest, sprung, tmp_path, capsys):
    run = copied(honest, tmp_path / "runs" / "run")
    tamper(run / "config.json", lambda config: config["task"].update(kind="Mine"))
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom diffusion_forcing.composition import Composition\n\n\n"
        "@dataclass(frozen=True)\nclass Mine(Composition):\n    pass\n\n\ndef go():\n    raise SystemExit('called')\n"
    )
    try:
        assert dforce("sample", "runs/run", "--recipe", f"{TRAP}:go") == 2  # which has no such class
        assert "is of a class 'Mine'" in flat(capsys.readouterr().err)
        assert dforce("sample", "runs/run", "--recipe", "mine:go", "--samples", "2") == 0
        assert (run / "samples" / "samples.npz").exists()
        experiment, _ = load_run(run, classes=[sys.modules["mine"].Mine])
        assert type(experiment.task).__name__ == "Mine"
    finally:
        sys.modules.pop("mine", None)
