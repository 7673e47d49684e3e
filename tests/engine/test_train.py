"""The training loop: how it stops, resumes, fails and saves."""

import contextlib
import json
import math
import signal
import subprocess
import threading
import time
from dataclasses import dataclass

import pytest
import torch
from small import VARIANTS, WORDS, Waves, checkpoint, command, dforce, differing, finite, flat, logged, small, stop_after, weights
from torch import nn

from diffusion_forcing import DiffusionForcing
from diffusion_forcing.backbones import RNNConfig, TransformerConfig
from diffusion_forcing.engine import train as training
from diffusion_forcing.engine.config import Experiment, ModelConfig, TrainConfig, replace
from diffusion_forcing.engine.distributed import Distributed
from diffusion_forcing.engine.log import read_log
from diffusion_forcing.engine.task import TaskData
from diffusion_forcing.engine.train import Clock, Diverged, Trainer, seeded, train, validate
from diffusion_forcing.levels import DRAWS
from diffusion_forcing.windows import Windows


def waves(task=None, **changes) -> Experiment:
    """A small experiment with conditions and padding."""
    options = {"steps": 6, "batch": 8, "warmup": 2, "lr": 5e-3, "ema": 0.9, "validate_every": 3, "log_every": 1, "threads": 1}
    return Experiment(task or Waves(), ModelConfig(RNNConfig(hidden=16, blocks=1)), TrainConfig(**{**options, **changes}))


# Every recipe.


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(variant.values()))
def test_every_recipe_trains_saves_loads_and_resumes_to_the_same_loss(variant, tmp_path, monkeypatch):
    experiment = small(**variant, train__steps=4, train__validate_every=2)
    whole = train(experiment, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        half = train(experiment, tmp_path / "parts", quiet=True)
    assert (half.status, half.step) == ("interrupted", 2)
    DiffusionForcing.from_pretrained(tmp_path / "parts" / "model")
    rest = train(experiment, tmp_path / "parts", quiet=True)
    assert (rest.status, rest.step, rest.loss, rest.valid_loss) == ("done", 4, whole.loss, whole.valid_loss)
    assert not differing(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_a_task_that_fits_its_codec_anew_cannot_train_from_another_model(tmp_path):
    train(waves(), tmp_path / "first", quiet=True)
    with pytest.raises(ValueError, match="Waves cannot train from another model"):
        train(waves(init=str(tmp_path / "first")), tmp_path / "second", quiet=True)


# Resuming.


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_stopped_and_resumed_equals_never_stopped_bit_for_bit(optimizer, stop, tmp_path, monkeypatch):
    experiment = small(train__optimizer=optimizer, train__weight_decay=0.1, train__final_lr=0.1)
    train(experiment, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        stop_after(patch, stop)
        assert train(experiment, tmp_path / "parts", quiet=True).step == stop
    assert differing(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    train(experiment, tmp_path / "parts", quiet=True)
    assert not differing(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    for what in ("loss", "valid_loss", "grad_norm", "lr"):
        assert logged(tmp_path / "whole", what) == logged(tmp_path / "parts", what)
    ours, theirs = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "parts")
    assert not differing(ours[0], theirs[0])
    assert {**ours[1], "elapsed": 0} == {**theirs[1], "elapsed": 0}


def test_a_resumed_log_has_each_step_once(tmp_path, monkeypatch):
    """Also when the log ran ahead of the checkpoint, and its last line was cut off."""
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        train(small(), tmp_path, quiet=True)
    with (tmp_path / "log.jsonl").open("a") as log:
        for step in (5, 6):
            log.write(json.dumps({"step": step, "loss": 9.0, "lr": 0.0, "seconds": 1.0}) + "\n")
        log.write('{"step": 7, "lo')
    train(small(), tmp_path, quiet=True)
    lines = read_log(tmp_path / "log.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 9))
    assert [line["step"] for line in lines if "valid_loss" in line] == [4, 8]
    assert 9.0 not in logged(tmp_path).values()


def test_a_finished_training_stays_as_it_is(tmp_path):
    first = train(small(), tmp_path, quiet=True)
    before, log = weights(tmp_path), (tmp_path / "log.jsonl").read_text()
    again = train(small(), tmp_path, quiet=True)
    assert (again.status, again.step, again.loss, again.valid_loss) == (first.status, first.step, first.loss, first.valid_loss)
    assert not differing(before, weights(tmp_path))
    assert (tmp_path / "log.jsonl").read_text() == log


def test_a_damaged_checkpoint_is_named_with_the_way_out(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        train(small(), tmp_path, quiet=True)
    file = tmp_path / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"cannot resume from .*checkpoint.safetensors.*[Dd]elete it"):
        train(small(), tmp_path, quiet=True)
    file.unlink()
    assert train(small(), tmp_path, quiet=True).status == "done"


@pytest.mark.parametrize("change", [{"model__backbone__hidden": 8}, {"model__backbone__layers": 2}, {"train__optimizer": "adamw"}])
def test_the_checkpoint_of_another_model_or_optimiser_is_refused(change, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        train(small(train__optimizer="muon"), tmp_path, quiet=True)
    with pytest.raises(ValueError, match=r"(?s)checkpoint.safetensors belongs to another model or optimiser .*--name"):
        train(small(**change), tmp_path, quiet=True)


def test_killed_in_mid_training_and_started_again_equals_never_killed(tmp_path, monkeypatch):
    """SIGKILL leaves no time to save: what is lost is taken again, to the same numbers."""
    monkeypatch.chdir(tmp_path)
    words = ["train", "composition", *WORDS, "--train.steps", "250", "--train.checkpoint-every", "0.1"]
    folder = tmp_path / "runs" / "composition"
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(**command("diffusion_forcing", *words), cwd=tmp_path, stdout=output, stderr=output)
        wait_for_steps(process, folder, 40)
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
    kept = checkpoint(folder)[1]["step"]
    assert 0 < kept < 250
    assert not (folder / "model").exists()
    assert dforce(*words) == 0
    assert dforce(*words, "--name", "whole") == 0
    assert not differing(weights(folder), weights(tmp_path / "runs" / "whole"))
    assert logged(folder) == logged(tmp_path / "runs" / "whole")
    assert [line["step"] for line in read_log(folder / "log.jsonl") if "loss" in line] == list(range(1, 251))


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    words = ["train", "composition", *WORDS, "--train.steps", "100000"]
    folder = tmp_path / "runs" / "composition"
    process = subprocess.Popen(
        **command("diffusion_forcing", *words), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )  # fmt: skip
    wait_for_steps(process, folder, 10)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    step = checkpoint(folder)[1]["step"]
    assert step >= 10
    assert f"interrupted at step {step:,}; all is saved. Resume it with: dforce train composition" in flat(output)
    assert finite(weights(folder))
    DiffusionForcing.from_pretrained(folder / "model")


def wait_for_steps(process, folder, steps):
    """Until a training's log shows that many steps."""
    deadline = time.monotonic() + 120
    while max(logged(folder), default=0) < steps:
        assert process.poll() is None, "the training ended before it could be stopped"
        assert time.monotonic() < deadline, "the training did not get going"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_to_stop_and_the_second_acts_as_usual(number):
    caught = []
    before = signal.signal(number, lambda *_: caught.append("usual"))
    try:
        with training.interruptible() as interrupt:
            signal.raise_signal(number)
            assert interrupt.requested
            assert not caught
            signal.raise_signal(number)
            assert caught == ["usual"]
        signal.raise_signal(number)
        assert caught == ["usual", "usual"]
    finally:
        signal.signal(number, before)


def test_training_works_outside_the_main_thread(tmp_path):
    results = []
    thread = threading.Thread(target=lambda: results.append(train(small(train__steps=2), tmp_path, quiet=True)))
    thread.start()
    thread.join()
    assert results[0].status == "done"


# Randomness.


def test_the_seed_decides(tmp_path):
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        torch.manual_seed(len(name))  # the state the caller's generator is in does not matter
        train(small(train__seed=seed, train__steps=3), tmp_path / name, quiet=True)
    assert logged(tmp_path / "one") == logged(tmp_path / "same")
    assert not differing(weights(tmp_path / "one"), weights(tmp_path / "same"))
    assert logged(tmp_path / "one") != logged(tmp_path / "other")


def test_generators_of_other_numbers_are_unrelated():
    draws = [torch.rand(3, generator=seeded(*numbers)) for numbers in [(0, 0), (0, 1), (1, 0), (0, -1), (-1, 0), (0,), (1, 1)]]
    for i, one in enumerate(draws):
        for other in draws[:i]:
            assert not torch.isclose(one, other).any()
    assert torch.equal(draws[1], torch.rand(3, generator=seeded(0, 1)))


# One step.


@pytest.mark.parametrize("experiment", [small(train__batch=16), waves(batch=16)], ids=["composition", "padded"])
def test_a_batch_in_four_parts_gives_the_losses_of_one(experiment, tmp_path):
    for parts in (1, 4):
        train(replace(experiment, train__accumulate=parts), tmp_path / str(parts), quiet=True)
    for what in ("loss", "grad_norm"):
        assert logged(tmp_path / "1", what) == pytest.approx(logged(tmp_path / "4", what), abs=1e-6, rel=1e-6)


def test_what_lies_in_the_padding_does_not_matter(tmp_path, monkeypatch):
    """Not even to a model that sees everything: padding stands at level K, where a token is noise but for a trace of itself."""
    experiment = replace(waves(), model__backbone=TransformerConfig(hidden=16, layers=1, heads=2, causal=False))
    train(experiment, tmp_path / "zeros", quiet=True)
    read = Windows.read

    def filled(self, windows):
        batch = read(self, windows)
        return batch._replace(x=torch.where(batch.mask[..., None], batch.x, 7.0))

    monkeypatch.setattr(Windows, "read", filled)
    train(experiment, tmp_path / "sevens", quiet=True)
    assert logged(tmp_path / "zeros") == pytest.approx(logged(tmp_path / "sevens"), rel=1e-4)


@pytest.mark.parametrize("backbone", [RNNConfig(hidden=16), TransformerConfig(hidden=16, layers=1, heads=2)], ids=["rnn", "transformer"])
def test_each_draw_of_levels_trains_and_differs(backbone, tmp_path):
    draws = [*DRAWS, "+".join(DRAWS)]
    results = [train(small(model__backbone=backbone, objective__draw=draw, train__steps=3), tmp_path / draw, quiet=True) for draw in draws]
    assert all(result.status == "done" and 0 < result.valid_loss < 3 for result in results)
    assert len({result.loss for result in results}) == len(draws)


def test_a_forced_past_needs_a_model_that_can_have_one(tmp_path):
    backbone = TransformerConfig(hidden=16, layers=1, heads=2, causal=False)
    with pytest.raises(ValueError, match="causal=True"):
        train(small(model__backbone=backbone, objective__draw="teacher_forced"), tmp_path, quiet=True)


def test_what_a_condition_says_does_not_matter_where_it_is_dropped(tmp_path):
    def losses(name, informative, drop):
        train(replace(waves(Waves(informative=informative)), objective__cond_drop=drop), tmp_path / name, quiet=True)
        return logged(tmp_path / name)

    assert losses("dropped", True, 1.0) == losses("dropped too", False, 1.0)
    assert losses("some", True, 0.5) != losses("none of half", False, 0.5)
    assert losses("kept", True, 0.0) != losses("none", False, 0.0)


def test_the_learning_rate_rises_then_falls_to_its_final_share(tmp_path):
    clock = Clock(TrainConfig(steps=100, warmup=10, final_lr=0.1))
    factors = [clock.lr_factor(step) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[:10] == sorted(factors[:10])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert max(factors) > 0.95
    assert factors[100] == pytest.approx(0.1)
    train(small(train__steps=4, train__lr=1e-3, train__warmup=0, train__optimizer="adamw"), tmp_path, quiet=True)
    expected = {step: 1e-3 * 0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(1, 5)}
    assert logged(tmp_path, "lr") == pytest.approx(expected)


def test_training_learns(tmp_path):
    """The loss falls well below that of knowing nothing, which is 1 in v."""
    experiment = small(train__steps=300, train__batch=32, train__validate_every=50, train__warmup=10)
    result = train(experiment, tmp_path, quiet=True)
    assert result.valid_loss < 0.75
    assert list(logged(tmp_path, "valid_loss").values()) == sorted(logged(tmp_path, "valid_loss").values(), reverse=True)


# What is saved.


def test_the_moving_average_is_what_is_saved(tmp_path):
    train(small(train__ema=0.9), tmp_path, quiet=True)
    tensors, _ = checkpoint(tmp_path)
    average = {name.removeprefix("average.module."): t for name, t in tensors.items() if name.startswith("average.module.")}
    current = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    assert not differing(weights(tmp_path), average)
    assert differing(weights(tmp_path), current)


def test_without_averaging_the_last_weights_are_saved(tmp_path):
    train(small(train__ema=0.0), tmp_path, quiet=True)
    tensors, _ = checkpoint(tmp_path)
    assert not differing(weights(tmp_path), {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")})


def test_the_average_follows_its_formula(tmp_path, monkeypatch):
    """After each step, decay * average + (1 - decay) * weights; the decay is small while the training is young."""
    seen = []
    update = training.AveragedModel.update_parameters

    def spy(self, model):
        update(self, model)
        seen.append((model.backbone.proj_out.weight.detach().clone(), self.module.backbone.proj_out.weight.detach().clone()))

    monkeypatch.setattr(training.AveragedModel, "update_parameters", spy)
    train(small(train__ema=0.25), tmp_path, quiet=True)
    average = seen[0][0]
    for count, (now, kept) in enumerate(seen):
        if count:
            decay = min(0.25, (1 + count) / (10 + count))
            average = decay * average + (1 - decay) * now
        torch.testing.assert_close(kept, average)


def test_what_is_validated_is_what_is_saved(tmp_path):
    experiment = small()
    result = train(experiment, tmp_path, quiet=True)
    model = DiffusionForcing.from_pretrained(tmp_path / "model")
    assert validate(model, experiment.task.data().valid, experiment.objective, experiment.train, Distributed()) == pytest.approx(
        result.valid_loss, rel=1e-6
    )


def test_validation_gives_the_same_number_every_time():
    experiment = waves()
    data = experiment.task.data()
    model = experiment.model.build(1, 1)
    nn.init.normal_(model.backbone.proj_out.weight, generator=seeded(5))

    def loss(**changes):
        return validate(model, data.valid, experiment.objective, replace(experiment, **changes).train, Distributed())

    first = loss()
    assert loss() == first
    assert loss(train__batch=5) == pytest.approx(first, rel=1e-6)
    assert loss(train__seed=1) != first
    assert all(p.grad is None for p in model.parameters())


# How it ends.


def test_minutes_end_a_training(tmp_path):
    started = time.monotonic()
    config = TrainConfig(steps=None, minutes=0.01, batch=8, log_every=1, warmup=0, threads=1, validate_every=10**6)
    result = train(replace(small(), train=config), tmp_path, quiet=True)
    assert result.status == "done"
    assert result.step > 1
    assert 0.01 <= result.minutes < 0.1
    assert time.monotonic() - started < 30
    assert max(logged(tmp_path)) == result.step
    assert logged(tmp_path, "lr")[result.step] < 0.01 * config.lr
    assert list(logged(tmp_path, "valid_loss")) == [result.step]


def test_whichever_of_steps_and_minutes_comes_first(tmp_path):
    assert train(small(train__steps=3, train__minutes=10.0), tmp_path / "steps", quiet=True).step == 3
    result = train(small(train__steps=10**9, train__minutes=0.005), tmp_path / "minutes", quiet=True)
    assert result.status == "done"
    assert result.step < 10**6


def scripted(monkeypatch, losses):
    """Validations that give these losses, in order; returns the weights that were validated."""
    validated = []

    def scripted_loss(model, *_):
        validated.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return losses[len(validated) - 1]

    monkeypatch.setattr(training, "validate", scripted_loss)
    return validated


def test_early_stopping_waits_for_its_patience_and_keeps_the_best_weights(tmp_path, monkeypatch):
    validated = scripted(monkeypatch, [1.0, 0.5, 0.7, 0.4, 0.6, 0.4, 0.9, 0.1])
    result = train(small(train__steps=20, train__validate_every=1, train__patience=3), tmp_path, quiet=True)
    assert (result.status, result.step, len(validated)) == ("stopped early", 7, 7)
    assert not differing(weights(tmp_path), validated[3])
    assert differing(weights(tmp_path), validated[6])


def test_with_patience_the_best_weights_are_kept_even_if_it_was_not_exhausted(tmp_path, monkeypatch):
    validated = scripted(monkeypatch, [0.5, 0.2, 0.6])
    result = train(small(train__steps=3, train__validate_every=1, train__patience=5), tmp_path, quiet=True)
    assert result.status == "done"
    assert not differing(weights(tmp_path), validated[1])


def test_the_model_of_each_validation_is_kept_if_asked_for(tmp_path):
    train(small(train__steps=4, train__validate_every=2, train__keep_checkpoints=True), tmp_path, quiet=True)
    kept = [DiffusionForcing.from_pretrained(tmp_path / "kept" / step).state_dict() for step in ("000002", "000004")]
    last = DiffusionForcing.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(value, last[name]) for name, value in kept[1].items())
    assert any(not torch.equal(value, last[name]) for name, value in kept[0].items())


def test_without_patience_nothing_stops_early(tmp_path, monkeypatch):
    validated = scripted(monkeypatch, [0.1, *[1.0] * 9])
    result = train(small(train__steps=10, train__validate_every=1), tmp_path, quiet=True)
    assert (result.status, result.step) == ("done", 10)
    assert not differing(weights(tmp_path), validated[-1])


def test_patience_is_remembered_over_an_interruption(tmp_path, monkeypatch):
    experiment = small(train__steps=20, train__validate_every=1, train__patience=3)
    with monkeypatch.context() as patch:
        validated = scripted(patch, [0.5, 0.6, 0.7])
        stop_after(patch, 3)
        assert train(experiment, tmp_path, quiet=True).status == "interrupted"
    scripted(monkeypatch, [0.8])
    assert train(experiment, tmp_path, quiet=True).status == "stopped early"
    assert not differing(weights(tmp_path), validated[0])


def test_a_training_that_stopped_early_does_not_go_on_when_asked_again(tmp_path, monkeypatch):
    experiment = small(train__steps=20, train__validate_every=1, train__patience=2)
    with monkeypatch.context() as patch:
        scripted(patch, [0.5, 0.6, 0.7])
        first = train(experiment, tmp_path, quiet=True)
    before = weights(tmp_path)
    scripted(monkeypatch, [0.1] * 20)
    again = train(experiment, tmp_path, quiet=True)
    assert (again.status, again.step) == (first.status, first.step) == ("stopped early", 3)
    assert not differing(before, weights(tmp_path))


# How it fails.


def test_data_that_blow_up_are_reported_and_the_weights_stay_finite(tmp_path):
    with pytest.raises(Diverged) as caught:
        train(waves(Waves(scale=1e25), lr=3e-3, warmup=50), tmp_path, quiet=True)
    message = str(caught.value)
    for part in (
        "diverged at step 1: loss nan, gradient norm nan",
        "learning rate 6e-05",
        "--train.lr 0.001",
        "--train.warmup 100",
        "outliers",
        str(tmp_path),
    ):
        assert part in message
    assert finite(weights(tmp_path))
    assert finite({name: t for name, t in checkpoint(tmp_path)[0].items() if name.startswith(("model", "average"))})


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_is_no_number_leaves_the_weights_from_before_its_step(accumulate, tmp_path, monkeypatch):
    experiment = small(train__validate_every=100, train__accumulate=accumulate)
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        train(experiment, tmp_path / "three", quiet=True)
    forward, calls = DiffusionForcing.forward, []

    def broken(self, *arguments, **options):
        calls.append(1)
        return forward(self, *arguments, **options) * (math.nan if len(calls) > 3 * accumulate else 1)

    monkeypatch.setattr(DiffusionForcing, "forward", broken)
    with pytest.raises(Diverged, match=r"diverged at step 4: loss nan, gradient norm nan, learning rate .* Try a lower learning rate"):
        train(experiment, tmp_path / "four", quiet=True)
    assert not differing(weights(tmp_path / "three"), weights(tmp_path / "four"))
    assert checkpoint(tmp_path / "four")[1]["step"] == 3


@pytest.mark.parametrize("lr", [1e6, 1e20, 1e30])
def test_an_absurd_learning_rate_is_either_survived_or_reported(lr, tmp_path):
    with contextlib.suppress(Diverged):
        train(small(train__lr=lr, train__optimizer="adamw", train__warmup=0, train__steps=20), tmp_path, quiet=True)
    assert finite(weights(tmp_path))


@dataclass(frozen=True)
class Odd(Waves):
    """A task whose codec cannot be saved."""

    def data(self) -> TaskData:
        data = super().data()
        return TaskData(data.train, data.valid, nn.Identity())


def test_a_codec_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(ValueError, match="Identity cannot be saved with a model"):
        train(waves(Odd()), tmp_path, quiet=True)
    assert not logged(tmp_path)


def test_a_step_needs_whole_parts():
    """Three processes of two sequences each cannot take three parts each."""
    experiment = small(train__batch=6, train__accumulate=3)
    trainer = Trainer(experiment.model.build(2), experiment.task.data().train, experiment.objective, experiment.train, Distributed())
    trainer.dist = Distributed(0, 3)
    with pytest.raises(ValueError, match=r"accumulate=3 must divide each process's 2 sequences"):
        trainer.step()
