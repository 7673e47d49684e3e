"""What a run says of itself, and whether it is true."""

import json
import shutil
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import WORDS, command, dforce, flat, stop_after

from diffusion_forcing import DiffusionForcing
from diffusion_forcing.engine.run import _commit
from diffusion_forcing.engine.verify import verify

TRAIN = ("train", "composition", *WORDS, "--train.steps", "2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    assert dforce(*TRAIN, "--runs", root) == 0
    return root / "composition"


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run, to be damaged."""
    return shutil.copytree(trained, tmp_path / "run")


def problems(run):
    return {what: problem for what, problem in verify(run) if problem is not None}


def test_a_whole_run_fits(run, capsys):
    assert [what for what, _ in verify(run)] == ["config and weights", "checkpoint", "data", "log", "hashes"]
    assert not problems(run)
    assert dforce("verify", run) == 0
    assert "no problems found" in flat(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["maze2d-umaze", "pusht"])
def test_pretrained_models_fit(name):
    assert dforce("verify", name) == 0


def altered(file, change):
    """Change the tensors of a file."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def first_float(tensors):
    return min(name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.ndim == 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("file", "what"), [("model/model.safetensors", "config and weights"), ("checkpoint.safetensors", "checkpoint")])
def test_weights_that_are_no_numbers_are_named(file, what, value, run):
    altered(run / file, lambda tensors: tensors[first_float(tensors)].view(-1)[:3].fill_(value))
    found = problems(run)
    assert "3 numbers in " in found[what]
    assert "not the file that the training left" in found["hashes"]
    if what == "config and weights":
        with pytest.raises(ValueError, match="NaN or infinite; copy or train it again"):
            DiffusionForcing.from_pretrained(run / "model")
        assert dforce("eval", run, "--samples", "2") == 2


@pytest.mark.parametrize("kind", [torch.int32, torch.complex64])
def test_weights_of_another_kind_of_number_are_named(kind, run):
    def change(tensors):
        name = first_float(tensors)
        tensors[name] = tensors[name].to(kind)

    altered(run / "model/model.safetensors", change)
    assert str(kind) in problems(run)["config and weights"]


def test_weights_that_are_merely_others_are_noticed(run):
    altered(run / "model/model.safetensors", lambda tensors: tensors[first_float(tensors)].add_(1))
    assert list(problems(run)) == ["hashes"]


def test_a_config_that_does_not_fit_the_weights_is_noticed(run):
    config = json.loads((run / "model/config.json").read_text())
    config["backbone"]["hidden"] = 24
    (run / "model/config.json").write_text(json.dumps(config))
    assert "another architecture" in problems(run)["config and weights"]


def test_a_checkpoint_of_another_model_is_noticed(run):
    altered(
        run / "checkpoint.safetensors", lambda tensors: tensors.pop(min(name for name in tensors if name.startswith("average.module.")))
    )
    assert "of another model" in problems(run)["checkpoint"]


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "model/model.safetensors", "model/config.json", "log.jsonl"])
def test_a_file_that_is_cut_short_is_named(name, run, capsys):
    content = (run / name).read_bytes()
    (run / name).write_bytes(content[: len(content) // 2])
    assert name.split("/")[-1] in " ".join(problems(run).values())
    assert dforce("verify", run) == 2
    assert "problem" in flat(capsys.readouterr().out)


def test_a_file_that_is_missing_is_named(run):
    (run / "checkpoint.safetensors").unlink()
    assert "checkpoint.safetensors is missing" in problems(run)["hashes"]


def test_every_start_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        assert dforce(*TRAIN) == 143
    assert dforce(*TRAIN) == 0
    assert dforce(*TRAIN, "--train.steps", "4") == 0
    history = json.loads((tmp_path / "runs/composition/run.json").read_text())["history"]
    assert [(entry["status"], entry["step"]) for entry in history] == [("interrupted", 1), ("done", 2), ("done", 4)]
    assert [entry.get("changed") for entry in history] == [None, None, ["train.steps was 2, now 4"]]
    assert history[0]["command"] == " ".join(["dforce", *TRAIN])
    assert history[2]["command"].endswith("--train.steps 4")
    assert history[1]["sha256"] != history[2]["sha256"]
    assert not problems(tmp_path / "runs/composition")
    assert dforce("report", "runs/composition") == 0
    assert "--train.steps 2\n" in (tmp_path / "runs/composition/report.html").read_text()


def test_a_training_at_work_has_no_hashes_yet(run):
    about = json.loads((run / "run.json").read_text())
    about["history"][-1].pop("sha256")
    (run / "run.json").write_text(json.dumps(about))
    assert "at work or was killed" in problems(run)["hashes"]


def git(folder, *words):
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], cwd=folder, check=True, capture_output=True)


def test_the_commit_is_that_of_the_package(tmp_path, monkeypatch):
    """Not that of a repository in which the user stands, or in which the package is installed."""
    package = tmp_path / "lib" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    assert _commit(package) is None
    (tmp_path / ".gitignore").write_text("lib\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".gitignore")
    git(tmp_path, "commit", "-qm", "theirs")
    monkeypatch.chdir(tmp_path)
    assert _commit(package) is None
    git(package, "init", "-q")
    git(package, "add", ".")
    git(package, "commit", "-qm", "ours")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    commit = _commit(package)
    assert len(commit) >= 7
    assert "+" not in commit
    (package / "__init__.py").write_text("changed")
    assert _commit(package) == f"{commit}+"


def test_help_says_what_is_checked(capsys):
    done = subprocess.run(**command("diffusion_forcing", "verify", "--help"), capture_output=True, check=True)
    assert "have not changed" in flat(done.stdout)
