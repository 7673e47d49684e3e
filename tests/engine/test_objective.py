"""Objectives: what denoising draws and in what it is trained, and the loop without a folder."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from oracles import seeded
from small import Waves, differing, logged, small, weights
from torch import Tensor, nn

from diffusion_forcing import DiffusionForcing, NoiseSchedule, classifier_free, cosine
from diffusion_forcing.backbones import RNN, RNNConfig
from diffusion_forcing.engine.config import Experiment, ModelConfig, TrainConfig, replace
from diffusion_forcing.engine.objective import Denoising, Objective
from diffusion_forcing.engine.task import TaskData
from diffusion_forcing.engine.train import Diverged, run_objective, train
from diffusion_forcing.windows import Windows

K = 40
WINDOWS = Windows(torch.randn(50, 6, 2, generator=seeded(0)), 6)
MODEL = DiffusionForcing(RNN(2, hidden=8, levels=K), NoiseSchedule(cosine(K)))


def drawn(source=WINDOWS, size=400, **options):
    return Denoising(**options).draw_batch(MODEL, source, source.draw(size, seeded(1)), seeded(2))


# Context that is clean.


@pytest.mark.parametrize("name", ["independent", "shared", "independent+staircase", "teacher_forced"])
def test_clean_context_is_the_first_token_and_leaves_the_others_as_they_were(name):
    noise, k, past, keep, _ = drawn(draw=name, clean_context_prob=1.0)
    before = drawn(draw=name).k
    assert not k[:, 0].any()
    assert before[:, 0].any()
    assert torch.equal(k[:, 1:], before[:, 1:])
    assert noise.shape == (400, 6, 2)
    assert keep is None
    assert past is None or not past.any()


def test_clean_context_is_a_share_of_the_sequences():
    k = drawn(clean_context_prob=0.3).k
    assert (k[:, 0] == 0).float().mean().item() == pytest.approx(0.3 + 0.7 / (K + 1), abs=0.06)


def test_clean_context_is_clean_for_later_tokens_too():
    _, k, past, *_ = drawn(draw="independent+teacher_forced", clean_context_prob=1.0)
    assert not k[:, 0].any()
    assert not past[:, 0].any()


def test_context_is_as_long_as_the_source_says():
    source = Windows(torch.randn(50, 6, 2, generator=seeded(0)), 6)
    source.context = 4
    k = drawn(source, clean_context_prob=1.0).k
    assert not k[:, :4].any()
    assert k[:, 4].any()


def test_training_and_validation_see_clean_context(tmp_path, monkeypatch):
    seen, forward = [], DiffusionForcing.forward

    def spy(self, x, k, *arguments, **options):
        seen.append(k.clone())
        return forward(self, x, k, *arguments, **options)

    monkeypatch.setattr(DiffusionForcing, "forward", spy)
    config = TrainConfig(steps=3, batch=8, warmup=0, validate_every=2, threads=1)
    objective = Denoising(clean_context_prob=1.0)
    train(Experiment(Waves(), ModelConfig(RNNConfig(hidden=8, blocks=1)), config, objective), tmp_path, quiet=True)
    assert len(seen) > 3, "validation, too"
    assert not any(k[:, 0].any() for k in seen)
    assert all(k[:, 1:].any() for k in seen)


# Context that the model generates itself.


def test_clean_context_is_not_estimated():
    own = drawn(draw="noisy_prefix", clean_context_prob=1.0, self_context=1.0).self_context
    assert not own[:, 0].any()
    assert own.any()


def test_self_context_changes_training_and_not_validation(tmp_path):
    plain = replace(small(), objective__draw="noisy_prefix", train__lr=1e-12)
    train(replace(plain, objective__self_context=1.0), tmp_path / "one", quiet=True)
    train(plain, tmp_path / "two", quiet=True)
    assert logged(tmp_path / "one", "valid_loss") == pytest.approx(logged(tmp_path / "two", "valid_loss"), rel=1e-6)
    assert logged(tmp_path / "one", "loss") != logged(tmp_path / "two", "loss")


def test_self_context_begins_after_a_share_of_the_budget(tmp_path):
    options = {"objective__draw": "noisy_prefix", "train__steps": 8, "train__log_every": 1}
    runs = {
        "never": options,
        "half": options | {"objective__self_context": 1.0, "objective__self_context_after": 0.5},
        "always": options | {"objective__self_context": 1.0},
    }
    for name, changes in runs.items():
        train(replace(small(), **changes), tmp_path / name, quiet=True)
    losses = {name: list(logged(tmp_path / name, "loss").values()) for name in runs}
    assert losses["half"][:4] == losses["never"][:4]
    assert losses["half"][4] != losses["never"][4]
    assert losses["always"][0] != losses["never"][0]


# Conditions that are left out.


class AlsoFrom(Waves):
    """Waves that train from another model too."""

    def data_as(self, codec, raw=False):
        return self.data()


def dropping(share, task=None, **changes):
    config = TrainConfig(steps=3, batch=8, warmup=0, validate_every=2, threads=1, **changes)
    return Experiment(task or Waves(), ModelConfig(RNNConfig(hidden=8, blocks=1)), config, Denoising(cond_drop=share))


def test_a_model_trained_without_its_condition_too_can_be_guided(tmp_path):
    """One option builds the model, trains it and saves that it can do without; who fine-tunes it keeps that."""
    train(dropping(0.5, AlsoFrom()), tmp_path / "first", quiet=True)
    train(dropping(0.0, AlsoFrom(), init=str(tmp_path / "first")), tmp_path / "second", quiet=True)
    for name in ("first", "second"):
        model = DiffusionForcing.from_pretrained(tmp_path / name / "model")
        assert (model.optional_cond, model.cond_width, model.traits.cond) == (True, 1, 2)
        assert classifier_free(model, torch.zeros(2, 3, 1), 2.0)(torch.zeros(2, 3, 1), torch.full((2, 3), 9)).x0.shape == (2, 3, 1)
    train(dropping(0.0, AlsoFrom()), tmp_path / "plain", quiet=True)
    assert not DiffusionForcing.from_pretrained(tmp_path / "plain" / "model").optional_cond
    with pytest.raises(ValueError, match=r"weights of .*plain do not fit this model"):
        train(dropping(0.5, AlsoFrom(), init=str(tmp_path / "plain")), tmp_path / "third", quiet=True)


def test_a_share_of_the_sequences_has_no_condition():
    model = DiffusionForcing(RNN(1, 2, hidden=8, levels=K), NoiseSchedule(cosine(K)), optional_cond=True)
    source = Waves().data().train
    objective, windows = Denoising(cond_drop=0.3), source.draw(500, seeded(0))
    batch, noise = source.read(windows), objective.draw_batch(model, source, windows, seeded(1))
    assert (~noise.keep_cond).float().mean().item() == pytest.approx(0.3, abs=0.06)
    read = []
    model.backbone.register_forward_pre_hook(lambda _, arguments: read.append(arguments[2]))
    objective(model, batch, noise)
    assert torch.equal(read[0][..., -1], noise.keep_cond[:, None].expand(500, 6).float())
    assert torch.equal(read[0][..., :1], torch.where(noise.keep_cond[:, None, None], batch.cond, 0.0))


def test_conditions_are_dropped_where_there_are_any(tmp_path):
    with pytest.raises(ValueError, match=r"the data of this task have none; set --objective\.cond-drop 0"):
        train(small(objective__cond_drop=0.1), tmp_path, quiet=True)
    model = DiffusionForcing(RNN(1, 1, hidden=8, levels=K), NoiseSchedule(cosine(K)))
    source = Waves().data().train
    with pytest.raises(ValueError, match=r"optional_cond=True\), its backbone built with cond=c \+ 1; got cond_drop=0.1"):
        run_objective(model, source, Denoising(cond_drop=0.1), TrainConfig(steps=1, batch=4))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"self_context": 1.5}, "self_context"),
        ({"self_context_after": 1.5}, "self_context_after"),
        ({"clean_context_prob": -1.0}, "clean_context_prob"),
        ({"cond_drop": 2.0}, "cond_drop"),
        ({"self_context": 0.5, "draw": "teacher_forced"}, "--objective.self-context 0"),
        ({"draw": "random"}, "unknown draw of levels 'random'; choose from independent, shared, teacher_forced, staircase"),
        ({"draw": "independent+"}, "unknown draw of levels ''"),
    ],
)
def test_options_out_of_range_are_refused(options, name):
    with pytest.raises(ValueError, match=name):
        Denoising(**options)


# Windows of several lengths.


class Pieces(Windows):
    """Windows that are cut in two or left whole, by turns; as many tokens either way."""

    halved = False

    def draw(self, size, generator=None):
        windows = super().draw(size, generator)
        self.halved = not self.halved
        return windows.repeat_interleave(2, dim=0) if self.halved else windows

    def length_of(self, windows):
        return 3 if self.halved else 6

    def read(self, windows):
        batch = super().read(windows)
        return type(batch)(*(part[:, : self.length_of(windows)] for part in batch))


def test_noise_and_levels_are_drawn_for_the_windows_that_came():
    pieces = Pieces(torch.randn(50, 6, 2, generator=seeded(0)), 6)
    for length, rows in ((3, 16), (6, 8)):
        noise, k, *_ = drawn(pieces, size=8)
        assert noise.shape == (rows, length, 2)
        assert k.shape == (rows, length)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_windows_of_several_lengths_train(accumulate, tmp_path, monkeypatch):
    pieces = Pieces(torch.randn(50, 6, 2, generator=seeded(0)), 6)
    monkeypatch.setattr(Waves, "data", lambda self: TaskData(pieces, Windows(torch.randn(9, 6, 2, generator=seeded(1)), 6)))
    config = TrainConfig(steps=4, batch=8, accumulate=accumulate, warmup=0, validate_every=2, threads=1)
    result = train(Experiment(Waves(), ModelConfig(RNNConfig(hidden=8, blocks=1)), config), tmp_path, quiet=True)
    assert result.status == "done"


# The loop without a folder.


class Line(NamedTuple):
    """Points of a line, (b, 1) each."""

    x: Tensor
    y: Tensor
    mask: Tensor


class Points:
    """y = 3 x - 1 at random places."""

    def draw(self, size, generator=None):
        return torch.rand(size, 1, generator=generator)

    def read(self, rows):
        return Line(rows, 3 * rows - 1, torch.ones_like(rows, dtype=torch.bool))


@dataclass(frozen=True)
class SquaredError(Objective):
    """Of a linear map, its bias alone if asked."""

    bias_only: bool = False

    def parameters(self, model):
        return [model.bias] if self.bias_only else model.parameters()

    def __call__(self, model, batch, drawn):
        return (model(batch.x) - batch.y) ** 2


def line():
    torch.manual_seed(0)
    return nn.Linear(1, 1)


FIT = TrainConfig(steps=300, batch=32, lr=0.05, warmup=0, ema=0.0)


def test_run_objective_trains_any_network_and_reports_its_progress():
    model, calls = line(), []
    assert run_objective(model, Points(), SquaredError(), FIT, progress=lambda *call: calls.append(call), label="a line")
    assert model.weight.item() == pytest.approx(3, abs=0.02)
    assert model.bias.item() == pytest.approx(-1, abs=0.02)
    assert calls[0] == ("a line", 1, 300)
    assert calls[-1] == ("a line", 300, 300)


def test_run_objective_gives_the_same_weights_for_the_same_seed_in_parts_too():
    models = [line() for _ in range(4)]
    for model, changes in zip(models, ({}, {}, {"seed": 1}, {"accumulate": 4}), strict=True):
        run_objective(model, Points(), SquaredError(), TrainConfig(**{"steps": 5, "batch": 8, "ema": 0.5, **changes}))
    one, same, other, parts = (model.state_dict() for model in models)
    assert not differing(one, same)
    assert differing(one, other)
    torch.testing.assert_close(one, parts)


def test_what_an_objective_does_not_train_is_frozen_meanwhile():
    model = line()
    model.weight.requires_grad_(True)
    before = model.weight.clone()
    run_objective(model, Points(), SquaredError(bias_only=True), FIT)
    assert torch.equal(model.weight, before)
    assert model.weight.requires_grad
    assert model.bias.item() != -1


def test_run_objective_stops_when_asked_to():
    model = line()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert not run_objective(model, Points(), SquaredError(), FIT, stop=lambda: True)
    assert not differing(before, model.state_dict())


def test_run_objective_says_where_it_diverged():
    model = line()
    nn.init.constant_(model.weight, float("inf"))
    with pytest.raises(Diverged, match="diverged at step 1"):
        run_objective(model, Points(), SquaredError(), FIT)


def test_a_stage_before_the_training_is_not_repeated_by_a_resumed_run(tmp_path, monkeypatch):
    stages = []
    from diffusion_forcing.engine import train as training

    run_stage = training._run_stage
    monkeypatch.setattr(training, "_run_stage", lambda stage, *a, **o: stages.append(stage.label) or run_stage(stage, *a, **o))
    train(small("labyrinth", train__steps=2), tmp_path, quiet=True)
    assert stages == ["flow warp"]
    before = weights(tmp_path)
    assert train(small("labyrinth", train__steps=3), tmp_path, quiet=True).step == 3
    assert stages == ["flow warp"]
    assert differing(before, weights(tmp_path))


def test_a_stage_that_is_interrupted_leaves_nothing_to_resume(tmp_path, monkeypatch):
    monkeypatch.setattr("diffusion_forcing.engine.train.run_objective", lambda *_, **__: False)
    result = train(small("labyrinth"), tmp_path, quiet=True)
    assert (result.status, result.step) == ("interrupted", 0)
    assert not (tmp_path / "checkpoint.safetensors").exists()
