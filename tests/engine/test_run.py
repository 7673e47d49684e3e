"""Runs on disk: opening one calls nothing that a file names, files are whole whoever writes them, and the run meant is the one taken."""

import json
import threading
from pathlib import Path

import pytest
from small import WORDS, dforce, small

from diffusion_forcing.backbones import RNNConfig
from diffusion_forcing.codecs import Chain, Normalize, Stack
from diffusion_forcing.engine.config import Experiment, FusedSNR, ModelConfig, replace
from diffusion_forcing.engine.run import load_run
from diffusion_forcing.engine.train import train
from diffusion_forcing.files import write_atomically


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of a step each."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("a", "b"):
            assert dforce("train", "composition", *WORDS, "--name", name, *STEP) == 0
    return folder / "runs"


STEP = ("--train.steps", "1")


def test_opening_a_run_calls_nothing_that_its_files_name(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "payload.py").write_text("import pathlib\n\ndef go():\n    pathlib.Path('called').touch()\n")
    (tmp_path / "a").symlink_to(runs / "a")
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in ("config.json", "model"):
        (copy / file).symlink_to(runs / "a" / file)
    (copy / "run.json").write_text(json.dumps({"recipe": "payload:go"}))
    experiment, _ = load_run(copy)
    assert isinstance(experiment, Experiment)
    assert not (tmp_path / "called").exists()
    config = json.loads((runs / "a" / "config.json").read_text())
    config["task"]["kind"] = "Other"
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"is of a class 'Other'.* add --recipe payload:go "):
        load_run(copy)
    assert not (tmp_path / "called").exists()


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    file, failed = tmp_path / "file", []

    def write(letter):
        try:
            for _ in range(100):
                write_atomically(file, lambda path: Path(path).write_text(letter * 1000))
        except OSError as error:
            failed.append(error)

    both = [threading.Thread(target=write, args=(letter,)) for letter in "ab"]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert not failed
    assert file.read_text() in ("a" * 1000, "b" * 1000)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_the_run_is_no_value_of_an_option(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert dforce("sample", "--out", runs / "b", runs / "a", "--samples", "2") == 0
    assert (runs / "b" / "samples.npz").exists()
    assert not (runs / "b" / "samples").exists()
    assert dforce("sample", runs / "a", "--samples", "2", "--out", runs / "a") == 0
    assert (runs / "a" / "samples.npz").exists()


def test_the_stack_of_a_chain_is_that_of_its_parts():
    import torch

    codec = Chain(Normalize(torch.zeros(2), torch.ones(2)), Stack(3))
    model = ModelConfig(RNNConfig(hidden=8, blocks=1), weight="fused_snr").build(6, 0, codec)
    assert model.weight == FusedSNR(5.0, 0.9, 3)


def test_a_training_says_the_same_after_the_last_step_again(tmp_path):
    """A finished run that is started again keeps its log."""
    experiment = replace(small(), train__steps=2, train__log_every=1)
    first = train(experiment, tmp_path / "run", quiet=True)
    log = (tmp_path / "run" / "log.jsonl").read_text()
    again = train(experiment, tmp_path / "run", quiet=True)
    assert (again.step, again.loss) == (first.step, first.loss)
    assert (tmp_path / "run" / "log.jsonl").read_text() == log


def test_what_the_system_refuses_is_told_without_a_traceback(monkeypatch, capsys):
    def offline(words):
        raise ConnectionError("the set cannot be fetched")

    monkeypatch.setattr("diffusion_forcing.engine.cli.list_recipes", offline)
    assert dforce("list") == 2
    assert "error: the set cannot be fetched" in capsys.readouterr().err
