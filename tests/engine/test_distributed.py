"""Several processes give what one gives."""

import socket
import subprocess

import pytest
import torch
from small import WORDS, checkpoint, command, dforce, flat, logged, small, stop_after, weights

from diffusion_forcing.engine.distributed import Distributed
from diffusion_forcing.engine.train import check

TRAIN = ["train", "composition", *WORDS, "--train.steps", "6", "--train.validate-every", "2", "--train.optimizer", "adamw"]
VIDEO = ["train", "labyrinth", "--task.world.px", "16", "--task.world.size", "2", "--task.clips", "16", "--task.frames", "16",
         "--task.tokens", "3", "--task.stack", "2", "--task.patch", "4", "--task.components", "8", "--model.backbone.hidden", "16",
         "--train.batch", "4", "--train.minutes", "None", "--train.steps", "6", "--train.validate-every", "2", "--train.threads", "1",
         "--train.log-every", "1", "--train.optimizer", "adamw", "--objective.warp-steps", "7",
         "--objective.self-context", "0.7", "--objective.cond-drop", "0.3"]  # fmt: skip
TRANSFORMER = [
    "train",
    "composition",
    "--backbone",
    "transformer",
    *TRAIN[2:],
    "--model.backbone.heads",
    "2",
    "--model.backbone.layers",
    "2",
]


def torchrun(folder, *words, program=("-m", "diffusion_forcing")):
    """Run a command of ours in two processes on this machine, in a folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = ["torch.distributed.run", "--nproc_per_node", "2", "--master_addr", "127.0.0.1", "--master_port", str(port)]
    process = subprocess.Popen(
        **command(*start, *program, *words), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its processes, which are not in our group
        out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def check_same(one, two):
    """Losses, gradients, final weights and checkpoints of two runs agree but for rounding."""
    for what in ("loss", "valid_loss", "grad_norm"):
        assert logged(one, what) == pytest.approx(logged(two, what), rel=1e-5, abs=1e-5)
    for read in (weights, lambda folder: checkpoint(folder)[0]):
        ours, theirs = read(one), read(two)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            torch.testing.assert_close(theirs[name], tensor, rtol=1e-3, atol=2e-4, msg=name)
    assert (two / "model" / "config.json").read_text() == (one / "model" / "config.json").read_text()


@pytest.mark.parametrize(
    "words",
    [
        [*TRAIN, "--train.optimizer", "muon", "--train.accumulate", "2", "--train.parallel", "ddp"],
        [*TRANSFORMER, "--train.parallel", "fsdp", "--objective.draw", "noisy_prefix", "--objective.self-context", "0.5"],
        VIDEO,  # whose flow warp is trained first
    ],
    ids=["ddp", "fsdp", "warp"],
)
def test_two_processes_equal_one(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert dforce(*words, "--name", "one") == 0
    ended = torchrun(tmp_path, *words, "--name", "two")
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("done: 6 steps") == 1, "only one process speaks"
    check_same(tmp_path / "runs" / "one", tmp_path / "runs" / "two")


def test_two_processes_go_on_from_where_one_stopped(tmp_path, monkeypatch):
    """A checkpoint is whole, however many processes read or write it."""
    monkeypatch.chdir(tmp_path)
    words = [*TRAIN, "--train.parallel", "fsdp", "--name"]
    assert dforce(*words, "one") == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert dforce(*words, "two") == 143
    ended = torchrun(tmp_path, *words, "two")
    assert ended.returncode == 0, ended.stderr[-3000:]
    check_same(tmp_path / "runs" / "one", tmp_path / "runs" / "two")


LATE = """
import faulthandler, os, time

faulthandler.dump_traceback_later(40, exit=True)  # should they wait for each other forever
from diffusion_forcing.engine.cli import main
from diffusion_forcing.engine.log import Log

begin = Log.__enter__
Log.__enter__ = lambda self: (time.sleep(1.0 * (os.environ["RANK"] == "1")), begin(self))[1]
main()
"""


def test_minutes_end_all_processes_at_the_same_step_even_if_one_started_late(tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    ended = torchrun(tmp_path, *TRAIN, "--train.steps", "None", "--train.minutes", "0.04", program=["late.py"])
    assert ended.returncode == 0, ended.stderr[-3000:]
    folder = tmp_path / "runs" / "composition"
    assert max(logged(folder)) > 1
    assert (folder / "model" / "model.safetensors").exists()


def test_a_batch_that_cannot_be_shared_is_refused(tmp_path):
    ended = torchrun(tmp_path, *TRAIN, "--train.batch", "9")
    assert ended.returncode != 0
    assert "error: 2 processes cannot share a batch of 9 equally; use a multiple of 2" in flat(ended.stderr)


def test_muon_and_fsdp_do_not_go_together():
    check(small(train__optimizer="adamw", train__parallel="fsdp"))
    with pytest.raises(ValueError, match=r"Muon needs whole matrices.*--train.optimizer adamw"):
        check(small(train__optimizer="muon", train__parallel="fsdp"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recipe": "composition", "objective__draw": "independent+noisy_context"}, "draws of levels"),
        ({"recipe": "exchange", "train__monitor": "score"}, "--train.monitor loss"),
        ({"recipe": "labyrinth", "stage": "decoder"}, "--train.parallel ddp"),
    ],
)
def test_what_fsdp_cannot_gather_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        check(small(train__optimizer="adamw", train__parallel="fsdp", **changes))


@pytest.mark.parametrize("device", ["gpu", "nowhere:0"])
def test_a_device_that_is_not_there_is_refused_before_anything_is_written(device):
    with pytest.raises(ValueError, match=f"there is no device '{device}' here .*; use auto"):
        check(small(train__device=device))


def test_slices_cover_the_batch_once():
    parts = [list(range(12))[Distributed(rank, 3).slice(12)] for rank in range(3)]
    assert [row for part in parts for row in part] == list(range(12))
    with pytest.raises(ValueError, match="3 processes cannot share a batch of 10 equally; use a multiple of 3"):
        Distributed(0, 3).slice(10)


def test_alone_there_is_nothing_to_agree_on():
    alone = Distributed()
    assert alone.main
    assert alone.any(True)
    assert not alone.any(False)
    assert torch.equal(alone.sum(torch.tensor([2.0])), torch.tensor([2.0]))
    alone.barrier()
