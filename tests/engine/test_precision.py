"""Mixed precision: the format that a machine is quick in, found without harm, and trainings in it."""

import sys

import pytest
import torch
from oracles import seeded
from safetensors.torch import load_file
from small import small

from diffusion_forcing.engine import precision
from diffusion_forcing.engine.optim import orthogonalize
from diffusion_forcing.engine.precision import resolve
from diffusion_forcing.engine.train import train


@pytest.fixture
def speed(monkeypatch):
    """Sets how much quicker the CPU is said to be in bfloat16."""

    def set_speed(value):
        monkeypatch.setattr(precision, "bfloat16_speed", lambda: value)

    return set_speed


@pytest.fixture
def probing(monkeypatch, tmp_path):
    """The probe as if for the first time, with another program in the child process."""
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path))

    def run(program):
        monkeypatch.setattr(precision, "PROBE", program)
        precision.bfloat16_speed.cache_clear()
        return precision.bfloat16_speed()

    yield run
    precision.bfloat16_speed.cache_clear()


def test_auto_is_bfloat16_where_that_is_quick(speed):
    speed(4.0)
    assert [resolve(name, "cpu") for name in ("auto", "float32", "bfloat16")] == ["bfloat16", "float32", "bfloat16"]
    speed(1.1)
    assert [resolve(name, "cpu") for name in ("auto", "float32")] == ["float32", "float32"]
    assert resolve("auto", "mps") == "float32"
    assert resolve("float16", "cuda") == "float16"


@pytest.mark.parametrize(("name", "kind"), [("bfloat16", "cpu"), ("float16", "cpu"), ("bfloat16", "mps")])
def test_what_a_device_cannot_do_is_refused_before_a_run_begins(name, kind, speed, tmp_path):
    speed(0.0)
    with pytest.raises(ValueError, match=f"precision={name} .* on this {kind} train with --train.precision auto, or float32"):
        resolve(name, kind)
    if kind == "cpu":
        with pytest.raises(ValueError, match=f"precision={name}"):
            train(small(train__precision=name, train__device="cpu"), tmp_path / "run", quiet=True)
        assert not (tmp_path / "run").exists()


def test_a_cpu_that_dies_of_the_probe_trains_in_float32(probing):
    assert probing("import os, signal; os.kill(os.getpid(), signal.SIGILL)") == 0.0
    assert resolve("auto", "cpu") == "float32"


def test_the_probe_is_run_once(probing, tmp_path, monkeypatch):
    assert probing("print(3.5)") == 3.5
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    precision.bfloat16_speed.cache_clear()
    assert precision.bfloat16_speed() == 3.5, "of the same machine it is in the cache"
    (cache,) = tmp_path.iterdir()
    cache.write_text("{half")
    precision.bfloat16_speed.cache_clear()
    assert precision.bfloat16_speed() == 0.0


def test_the_probe_itself_runs(probing):
    assert probing(precision.PROBE) >= 0.0


def test_a_training_in_bfloat16_keeps_its_weights_in_float32(tmp_path):
    if resolve("auto", "cpu") != "bfloat16":
        pytest.skip("this CPU is not quick in bfloat16")
    losses = {}
    for name in ("float32", "bfloat16"):
        experiment = small(train__precision=name, train__optimizer="muon", train__steps=30)
        losses[name] = train(experiment, tmp_path / name, quiet=True).valid_loss
        weights = load_file(tmp_path / name / "model" / "model.safetensors")
        assert {value.dtype for value in weights.values() if value.is_floating_point()} <= {torch.float32, torch.float64}
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)
    assert losses["bfloat16"] != losses["float32"]


def test_muon_may_iterate_in_bfloat16():
    x = torch.randn(4, 48, 24, generator=seeded(0))
    values = torch.linalg.svdvals(orthogonalize(x.bfloat16()).float())
    assert 0.6 < values.min() < values.max() < 1.3
