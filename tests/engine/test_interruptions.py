"""What may happen to a training from outside: signals, output that nobody reads, a disk that is full."""

import errno
import os
import resource
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch
from small import WORDS, checkpoint, command, dforce, differing, finite, flat, logged, small, stop_after, weights

from diffusion_forcing.backbones import RNNConfig
from diffusion_forcing.engine import checkpoint as checkpoints
from diffusion_forcing.engine import train as training
from diffusion_forcing.engine.fitting import fit
from diffusion_forcing.engine.interrupt import HANGUP, interruptible
from diffusion_forcing.engine.log import Log, read_log
from diffusion_forcing.engine.output import outlived_output

TRAIN = ("train", "composition", *WORDS)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "WAITS", (0.0, 0.0))
    return tmp_path


def piped(words, to, folder):
    """The exit code of a command whose output goes to another."""
    how = command("diffusion_forcing", *words)
    line = f"{shlex.join(how['args'])} {to}; exit ${{PIPESTATUS[0]}}"
    return subprocess.run(["bash", "-c", line], env=how["env"], cwd=folder, capture_output=True, text=True, timeout=300)


# Output.


def test_a_training_outlives_its_output(here):
    done = piped([*TRAIN, "--train.steps", "400", "--train.validate-every", "100"], "2>&1 | head -1", here)
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1
    assert max(logged(here / "runs" / "composition")) == 400
    assert finite(weights(here / "runs" / "composition"))


@pytest.mark.parametrize("words", [["list"], ["train", "composition", "--help"], ["--help"]])
def test_a_list_that_is_read_in_part_is_no_error(words, here):
    done = piped(words, "| head -1", here)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_output_that_a_full_disk_lost_is_an_error(here):
    done = piped(["list"], "> /dev/full", here)
    assert done.returncode == 2
    assert "the output could not be written" in done.stderr


def test_the_streams_are_put_back(capsys):
    before = sys.stdout, sys.stderr

    def fails():
        with outlived_output():
            print("seen")
            raise ValueError("within")

    with pytest.raises(ValueError, match="within"):
        fails()
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr().out == "seen\n"


# Signals.


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_saves_and_gives_the_code_that_shells_give(number, code, here):
    words = [*TRAIN, "--train.steps", "100000"]
    process = subprocess.Popen(
        **command("diffusion_forcing", *words), cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed_signals
    )
    folder = here / "runs" / "composition"
    wait_for_steps(process, folder, 5)
    process.send_signal(number)
    if number == signal.SIGHUP:  # a terminal that closes sends one itself, and its shell another
        process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert f"interrupted at step {checkpoint(folder)[1]['step']:,}; all is saved" in flat(output)
    assert finite(weights(folder))


def heed_signals():
    """In a child process: signals act as usual, though tests may run in the background or under nohup, which ignore some."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def wait_for_steps(process, folder, steps):
    """Until a training's log shows that many steps."""
    deadline = time.monotonic() + 120
    while max(logged(folder), default=0) < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the training did not get going"
        time.sleep(0.02)


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible() as interrupt:
            signal.raise_signal(HANGUP)
            assert not interrupt.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_program_that_fits_ends_as_its_signal_says(here, monkeypatch, capsys):
    stop_after(monkeypatch, 2)  # by SIGTERM
    with pytest.raises(SystemExit) as end:
        fit(RNNConfig(hidden=8, blocks=1), torch.randn(20, 6, 2), folder="run", steps=9, batch=4, threads=1, quiet=True)
    assert end.value.code == 143
    assert "interrupted at step 2; all is saved" in capsys.readouterr().out


# A disk that is full.


@pytest.fixture
def limited():
    """Limit the size of files that this process writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_that_does_not_fit_leaves_the_old_one(optimizer, here, limited, capsys):
    words = [*TRAIN, "--train.optimizer", optimizer, "--train.checkpoint-every", "0"]
    folder = here / "runs" / "composition"
    assert dforce(*words, "--train.steps", "3") == 0
    old, model = checkpoint(folder), weights(folder)
    limited(folder.joinpath("checkpoint.safetensors").stat().st_size - 1)
    assert dforce(*words, "--train.steps", "6") == 2
    limited(resource.RLIM_INFINITY)
    errors = flat(capsys.readouterr().err)
    assert "step 5 could not be saved" in errors
    assert "File too large" in errors
    assert "the same command goes on from its last checkpoint" in errors
    assert "Traceback" not in errors
    assert checkpoint(folder)[1] == old[1]
    assert not differing(checkpoint(folder)[0], old[0])
    assert not differing(weights(folder), model)
    assert not list(folder.rglob(".*.tmp"))
    assert dforce(*words, "--train.steps", "6") == 0
    assert checkpoint(folder)[1]["step"] == 6


def test_a_disk_that_is_full_for_a_while_costs_nothing(here, monkeypatch, capsys):
    whole = small(train__steps=6, train__checkpoint_every=0.0)
    training.train(whole, here / "whole", quiet=True)
    save, failures = checkpoints.save, iter([False, True, True, False, True, True])

    def full(*arguments):
        if next(failures, False):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(*arguments)

    monkeypatch.setattr(checkpoints, "save", full)
    result = training.train(whole, here / "run", quiet=True)
    assert (result.status, result.step) == ("done", 6)
    assert capsys.readouterr().err.count("No space left on device") == 4
    assert not differing(weights(here / "run"), weights(here / "whole"))
    assert next(failures, None) is None


def test_a_log_on_a_full_disk_keeps_whole_lines(here, limited, monkeypatch, capsys):
    log_step, lines = Log.step, here / "run" / "log.jsonl"

    def step(self, *arguments):
        size = lines.stat().st_size
        limited(size + 10 if self.clock.step in (3, 4) else resource.RLIM_INFINITY)
        log_step(self, *arguments)
        limited(resource.RLIM_INFINITY)

    monkeypatch.setattr(Log, "step", step)
    assert training.train(small(train__steps=6), here / "run", quiet=True).status == "done"
    assert [line["step"] for line in read_log(lines) if "loss" in line] == [1, 2, 5, 6]
    assert capsys.readouterr().err.count("lacks lines from step 3 on") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_a_training_goes_on_where_its_output_does_not_fit(here):
    done = piped([*TRAIN, "--train.steps", "3"], "> /dev/full", here)
    assert done.returncode == 2
    assert "the output could not be written" in done.stderr
    assert max(logged(here / "runs" / "composition")) == 3
