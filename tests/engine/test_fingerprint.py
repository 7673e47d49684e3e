"""Data that changed between training, resuming and evaluation are noticed."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from small import WORDS, dforce, flat, pushes_file, small, waves_file

from diffusion_forcing.backbones import RNNConfig
from diffusion_forcing.engine import fingerprint
from diffusion_forcing.engine.fingerprint import DATA, check_data, describe_data, keep_data, paths_of
from diffusion_forcing.engine.fitting import fit
from diffusion_forcing.engine.task import Task, TaskData
from diffusion_forcing.engine.train import train
from diffusion_forcing.imitation.pusht.task import Pushing
from diffusion_forcing.windows import Windows

TINY = [*WORDS[6:], "--train.steps", "2", "--task.horizon", "6", "--task.test-windows", "2", "--task.samples", "2"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a file of series."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(waves_file(), tmp_path / "waves.npz")
    return tmp_path


def changed(file):
    """Other values of the same size, and the time set back."""
    status = file.stat()
    with np.load(file) as arrays:
        values = arrays["values"].copy()
    values[-1] += 1
    np.savez(file, values=values)
    assert file.stat().st_size == status.st_size
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


TRAIN = ("train", "exchange", "--task.source", "waves.npz", *TINY)


def test_a_change_is_an_error_with_ways_out_that_work(here, capsys):
    assert dforce(*TRAIN) == 0
    assert dforce("eval", "runs/exchange") == 0
    shutil.copy("waves.npz", "old.npz")
    changed(here / "waves.npz")
    capsys.readouterr()
    assert dforce("eval", "runs/exchange") == 2
    message = flat(capsys.readouterr().err)
    assert "waves.npz has changed since runs/exchange was trained on it" in message
    assert "with other contents" in message
    assert dforce(*TRAIN, "--train.steps", "3") == 2
    message = flat(capsys.readouterr().err)
    assert "waves.npz has changed since" in message
    assert "--name NAME" in message
    # What the messages say: other data by their own path, another run, or the old data again.
    shutil.copy("waves.npz", "new.npz")
    assert dforce("eval", "runs/exchange", "--task.source", "new.npz") == 0
    assert dforce(*TRAIN, "--name", "other") == 0
    shutil.copy("old.npz", "waves.npz")
    assert dforce("eval", "runs/exchange") == 0
    assert dforce(*TRAIN, "--train.steps", "3") == 0


def test_the_same_contents_with_another_time_are_the_same(here):
    assert dforce(*TRAIN) == 0
    os.utime("waves.npz", (0, 0))
    assert dforce(*TRAIN, "--train.steps", "3") == 0
    assert dforce("eval", "runs/exchange") == 0


def test_a_run_without_a_checkpoint_begins_with_the_data_there_are(here):
    assert dforce(*TRAIN) == 0
    before = (here / "runs" / "exchange" / DATA).read_text()
    (here / "runs" / "exchange" / "checkpoint.safetensors").unlink()
    changed(here / "waves.npz")
    assert dforce(*TRAIN) == 0
    assert (here / "runs" / "exchange" / DATA).read_text() != before


def test_what_a_run_keeps_itself_is_compared_and_may_be_moved(here, capsys):
    options = {"steps": 2, "batch": 4, "threads": 1, "quiet": True}
    fit(RNNConfig(hidden=8, blocks=1), torch.randn(20, 6, 2), folder="run", **options)
    assert list(json.loads((here / "run" / DATA).read_text())) == ["RUN/data.safetensors"]
    (here / "run").rename(here / "moved")
    assert dforce("eval", "moved", "--samples", "4") == 0
    fit(RNNConfig(hidden=8, blocks=1), torch.randn(20, 6, 2), folder="run", **options)
    assert dforce("eval", "moved", "--samples", "4", "--task.file", here / "run" / "data.safetensors") == 0
    shutil.copy(here / "run" / "data.safetensors", here / "moved" / "data.safetensors")
    capsys.readouterr()
    assert dforce("eval", "moved", "--samples", "4") == 2
    assert "data.safetensors has changed" in flat(capsys.readouterr().err)


@pytest.mark.parametrize("how", ["added", "removed", "renamed", "content", "size", "hidden", "run"])
def test_folders_are_compared_file_by_file(how, tmp_path):
    folder, data = tmp_path / "data" / "runs" / "run", tmp_path / "data"
    folder.mkdir(parents=True)
    (data / "sub").mkdir()
    for name in ("a", "sub/b"):
        (data / name).write_text(name * 10)
    keep_data(folder, {"path": data}, resumed=False)
    check_data(folder, {"path": data})
    if how == "added":
        (data / "c").write_text("")
    elif how == "removed":
        (data / "a").unlink()
    elif how == "renamed":
        (data / "a").rename(data / "c")
    elif how == "content":
        (data / "sub" / "b").write_text("SUB/B" * 10)
    elif how == "size":
        (data / "a").write_text("longer" * 10)
    else:
        (data / ".hidden" if how == "hidden" else folder / "log.jsonl").write_text("new")
        check_data(folder, {"path": data})
        return
    with pytest.raises(ValueError, match=r"has changed since .* --task\.path PATH"):
        check_data(folder, {"path": data})
    with pytest.raises(ValueError, match="has changed since"):
        keep_data(folder, {"path": data}, resumed=True)


@pytest.mark.parametrize("at", [0, 500, 999])
def test_parts_of_a_large_file_are_compared(at, tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "WHOLE", 300)
    monkeypatch.setattr(fingerprint, "PART", 100)
    file = tmp_path / "large"
    file.write_bytes(bytes(1000))
    before = describe_data(file, tmp_path / "run")
    content = bytearray(1000)
    content[at] = 1
    file.write_bytes(content)
    assert describe_data(file, tmp_path / "run")["content"] != before["content"]


def test_paths_are_found_among_the_options():
    experiment = small("pusht")
    assert paths_of(experiment.task) == {"world.path": pushes_file()}
    assert isinstance(experiment.task.world, Pushing)
    assert small("exchange").task.data_files == {"source": waves_file()}
    assert small("composition").task.data_files == {}


@dataclass(frozen=True)
class Mine(Task):
    """A task of one's own that reads a file."""

    file: Path

    def data(self):
        walks = torch.from_numpy(np.load(self.file))
        return TaskData(Windows(walks, 5), Windows(walks, 5))


def test_a_task_of_ones_own_with_a_path_is_compared_too(tmp_path):
    np.save(tmp_path / "walks.npy", np.random.default_rng(0).standard_normal((16, 5, 2)).astype(np.float32))
    experiment = small(task=Mine(tmp_path / "walks.npy"), train__steps=2)
    train(experiment, tmp_path / "run", quiet=True)
    train(experiment, tmp_path / "run", quiet=True)
    np.save(tmp_path / "walks.npy", np.zeros((16, 5, 2), np.float32))
    with pytest.raises(ValueError, match=r"walks\.npy has changed since"):
        train(experiment, tmp_path / "run", quiet=True)


@pytest.mark.parametrize("content", ["[]", "7", '{"waves.npz": 3}', "{}"])
def test_a_record_that_says_nothing_compares_nothing(content, here):
    (here / DATA).write_text(content)
    check_data(here, {"source": here / "waves.npz"})
