"""One training at a time in a run's folder."""

import json
import os
import signal
import socket
import subprocess
import threading
import time

import pytest
import torch
from forecasts import HORIZON, QUICK, load_table
from small import WORDS, command, dforce, flat, logged, small

from diffusion_forcing.backbones import RNNConfig
from diffusion_forcing.engine import lock
from diffusion_forcing.engine.fitting import fit
from diffusion_forcing.engine.lock import LOCK, Busy, locked
from diffusion_forcing.engine.train import train
from diffusion_forcing.forecasting import Forecaster

TRAIN = ("train", "composition", *WORDS)


@pytest.fixture
def running(tmp_path, monkeypatch):
    """A training in a process of its own."""
    monkeypatch.chdir(tmp_path)
    process = start(tmp_path)
    folder, deadline = tmp_path / "runs" / "composition", time.monotonic() + 120
    while not logged(folder):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield process
    process.kill()
    process.communicate()


def start(folder):
    words = command("diffusion_forcing", *TRAIN, "--train.steps", "1000000")
    return subprocess.Popen(**words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_run_in_which_a_training_is_at_work_is_left_alone(running, tmp_path, capsys):
    folder = tmp_path / "runs" / "composition"
    about = (folder / "run.json").read_text()
    held = json.loads((folder / LOCK).read_text())
    assert (held["pid"], held["host"]) == (running.pid, socket.gethostname())
    for more in ([], ["--fresh"], ["--train.steps", "3"]):
        assert dforce(*TRAIN, *more) == 2
        message = flat(capsys.readouterr().err)
        assert f"process {running.pid} on {socket.gethostname()}, since {held['started']}" in message
        assert f"kill {running.pid}" in message
    with pytest.raises(Busy):
        fit(RNNConfig(hidden=8, blocks=1), torch.randn(20, 6, 2), folder=folder, steps=1, batch=4, quiet=True)
    with pytest.raises(Busy):
        train(small(), folder, quiet=True)
    with pytest.raises(Busy):
        Forecaster(HORIZON, **QUICK).fit(load_table(), folder=folder)
    assert running.poll() is None
    assert (folder / "run.json").read_text() == about
    assert sorted(path.name for path in folder.parent.iterdir()) == ["composition"]
    assert dforce("report", folder) == 0  # looking at it is no harm


def test_the_lock_of_a_training_that_was_killed_is_taken_over(running, tmp_path):
    folder = tmp_path / "runs" / "composition"
    running.kill()
    running.wait()
    assert (folder / LOCK).exists()
    assert dforce(*TRAIN, "--train.steps", "2") == 0
    assert not (folder / LOCK).exists()


def test_a_training_that_was_killed_may_be_set_aside(running, tmp_path):
    running.kill()
    running.wait()
    assert dforce(*TRAIN, "--train.steps", "2", "--fresh") == 0
    for name in ("composition", "composition.old1"):
        assert (tmp_path / "runs" / name / "config.json").exists()
        assert not (tmp_path / "runs" / name / LOCK).exists()


def test_of_two_that_start_at_once_one_trains(tmp_path):
    both = [start(tmp_path) for _ in range(2)]
    try:
        deadline = time.monotonic() + 120
        while all(process.poll() is None for process in both):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (ended,) = [process for process in both if process.poll() is not None]
        (other,) = [process for process in both if process is not ended]
        assert ended.returncode == 2
        assert f"process {other.pid} on" in flat(ended.communicate()[1])
        while not logged(tmp_path / "runs" / "composition"):
            assert other.poll() is None
            time.sleep(0.05)
        other.send_signal(signal.SIGTERM)
        assert other.wait(60) == 143
    finally:
        for process in both:
            process.kill()
            process.communicate()


def test_a_thread_may_hold_a_folder_again_and_another_may_not(tmp_path):
    refused = []

    def other():
        try:
            with locked(tmp_path / "run"):
                pass
        except Busy as error:
            refused.append(str(error))

    with locked(tmp_path / "run"):
        with locked(tmp_path / "run"):
            pass
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert (tmp_path / "run" / LOCK).exists()
    assert len(refused) == 1
    assert not (tmp_path / "run" / LOCK).exists()
    other()
    assert len(refused) == 1


def test_a_failure_gives_the_folder_back(tmp_path):
    def fails():
        with locked(tmp_path):
            raise ValueError("within")

    for _ in range(2):
        with pytest.raises(ValueError, match="within"):
            fails()


@pytest.mark.parametrize(
    ("pid", "host", "busy"),
    [("dead", "here", False), ("living", "here", True), ("living", "there", True), ("dead", "there", True), (None, "here", False)],
)
def test_where_the_system_locks_no_files_the_process_decides(pid, host, busy, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "fcntl", None)
    dead = subprocess.Popen(["true"])
    dead.wait()
    holder = {"pid": {"dead": dead.pid, "living": os.getppid()}.get(pid), "host": socket.gethostname() if host == "here" else "elsewhere"}
    (tmp_path / LOCK).write_text(json.dumps(holder))
    if busy:
        with pytest.raises(Busy, match=f"delete .*{LOCK}"), locked(tmp_path):
            pass
        return
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "7", '{"pid": "x"}', "[" * 10_000])
def test_a_damaged_lock_is_taken_over(content, tmp_path):
    (tmp_path / LOCK).write_text(content)
    with locked(tmp_path):
        pass


def test_a_lock_is_no_link(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"), locked(tmp_path / "run"):
        pass
    assert (tmp_path / "precious").read_text() == "mine"
