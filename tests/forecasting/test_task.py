"""The task: what is learned from and what is not, evaluation, refusals, recipes."""

import dataclasses
import itertools
import json
import os

import numpy as np
import pytest
import torch
from oracles import seeded

pytest.importorskip("pandas", reason="pandas comes with the extra `forecasting`")

from series import HORIZON, assert_same, daily, few, garbled, known_panel, panel_of, quiet, task_of, untrained

from diffusion_forcing.engine.config import Experiment, from_dict, to_dict
from diffusion_forcing.engine.recipes import RECIPES, build
from diffusion_forcing.forecasting.datasets import DATASETS
from diffusion_forcing.forecasting.model import SeriesModel
from diffusion_forcing.forecasting.recipes import HORIZONS, MINUTES
from diffusion_forcing.forecasting.task import OURS, Forecasting, baselines, rolling

residuals = pytest.mark.parametrize("residual", ["seasonal", "difference"])


def batches(source):
    return source.read(torch.cat([source.draw(64, seeded(0)), source.all()]))


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# The split.


@residuals
def test_validation_is_left_out_of_training(residual, tmp_path):
    task = task_of(tmp_path, known_panel(residual), residual=residual)
    s, data = task.split(), task.data()
    start = s.end - s.held_out
    assert s.end == 288 - 2 * HORIZON
    assert s.origins == [276, 282]
    assert data.train.last == start
    for windows in (data.train.draw(300, seeded(0)), data.train.all()):
        assert windows[:, 1].max() + data.train.length <= start
    targets = data.valid.all()[:, 1] + s.context
    assert targets.min() >= start, "no target of the validation was one of the training"
    assert targets.max() + HORIZON <= s.end
    assert data.valid.first >= start - s.context, "and its past is no longer than a context"


@residuals
def test_statistics_are_of_the_training_range(residual, tmp_path):
    """Garbage in the part for validation and tests: statistics, features and training batches stay bit for bit."""
    panel = known_panel(residual)
    true = task_of(tmp_path, panel, residual=residual)
    s = true.split()
    other = task_of(tmp_path, garbled(panel, s.end - s.held_out), "garbage", residual=residual)
    assert_same(other.split().scaler, s.scaler)
    assert_same(other.split().features, s.features)
    assert (other.split().seasons, other.split().context, other.split().held_out) == (s.seasons, s.context, s.held_out)
    assert equal(batches(true.data().train), batches(other.data().train))
    assert not equal(batches(true.data().valid), batches(other.data().valid)), "the garbage is there"


@pytest.mark.parametrize("freq", ["h", None])
def test_residual_transform_and_season_are_chosen_by_the_training_range(freq, tmp_path):
    panel = known_panel("seasonal", np.exp(daily(288, 3) / 5), freq)
    s = task_of(tmp_path, panel).split()
    assert (s.scaler.residual, s.scaler.transform, s.seasons[0]) == ("seasonal", "log", 24)
    other = task_of(tmp_path, garbled(panel, s.end - s.held_out), "garbage").split()
    assert_same(other.scaler, s.scaler)
    assert other.seasons == s.seasons


def test_a_panel_of_real_values_has_no_floor(tmp_path):
    panel = known_panel("seasonal", np.exp(daily(288, 3) / 5))
    assert task_of(tmp_path, panel).split().scaler.floor.tolist() == [0, 0, 0]
    scaler = task_of(tmp_path, dataclasses.replace(panel, value_type="real"), "real").split().scaler
    assert (scaler.transform, scaler.floor.tolist()) == ("none", [-np.inf] * 3)


def test_a_file_that_has_changed_is_read_again(tmp_path):
    task = task_of(tmp_path, known_panel("seasonal"))
    end = task.split().end
    assert task.split() is task.split()
    task_of(tmp_path, known_panel("seasonal", daily(300, 3)))
    os.utime(task.source, ns=(1, 1))
    assert task.split().end == end + 12


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"horizon": None}, r"--task\.horizon STEPS"),
        ({"horizon": 40, "test_windows": 4}, r"4 test windows of 40 steps leave 128 of 288 steps .* at least 160 are needed"),
        ({"horizon": 100}, "horizon"),
    ],
)
def test_impossible_splits_are_refused(options, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        task_of(tmp_path, known_panel("seasonal"), **options).split()


def test_a_horizon_of_a_quarter_can_be_trained(tmp_path):
    data = task_of(tmp_path, panel_of(t=4 * HORIZON), test_windows=0).data()
    assert data.train.all().numel()
    assert data.valid.all().numel()


@pytest.mark.parametrize("option", ["horizon", "validation_windows", "context", "test_windows", "samples"])
def test_options_count(option):
    with pytest.raises(ValueError, match=f"{option} counts from"):
        Forecasting("exchange", **{option: -1})


def test_seasons_count_from_one_and_may_be_a_list():
    with pytest.raises(ValueError, match="season counts steps from 1"):
        Forecasting("exchange", season=(0,))
    assert hash(Forecasting("exchange", season=[24])) == hash(Forecasting("exchange", season=(24,)))


# Evaluation.


def test_a_task_evaluates_and_samples(tmp_path):
    task = task_of(tmp_path, known_panel("seasonal"), **few())
    model = untrained("rnn", task.data().train.cond_width, awake=False)
    calls = []
    evaluation = task.evaluate(model, tmp_path, samples=7, seed=0, progress=lambda *call: calls.append(call))
    assert 0 < evaluation.metrics["crps_sum"] == evaluation.metrics[f"{OURS}/crps_sum"]
    assert all(f"{name}/crps" in evaluation.metrics for name in baselines(task.split()))
    assert "2 windows of 6 steps, 3 series, 7 futures each" in evaluation.tables[0].title
    assert (tmp_path / "forecasts.png").stat().st_size > 1000
    assert calls[-1] == ("forecasts", 2, 2)
    files = task.sample(model, tmp_path, samples=4, seed=0, progress=quiet)
    assert [file.name for file in files] == ["samples.npz", "samples.png"]
    with np.load(files[0]) as arrays:
        assert arrays["futures"].shape == (4, HORIZON, 3)
        assert arrays["names"].tolist() == ["s0", "s1", "s2"]


def test_without_test_windows_there_is_nothing_to_evaluate(tmp_path):
    task = task_of(tmp_path, known_panel("seasonal"), test_windows=0)
    with pytest.raises(ValueError, match=r"--task\.test-windows"):
        task.evaluate(None, tmp_path, samples=2, seed=0, progress=quiet)


@pytest.mark.parametrize(("first", "words"), [(268, "has 0 values .* all of its values before"), (279, "has 0 values .* from the other")])
def test_a_series_that_begins_late_is_named_and_does_not_break_the_back_test(first, words, tmp_path):
    values = daily(288, 3)
    values[:first, 1] = np.nan
    task = task_of(tmp_path, known_panel("seasonal", values))
    with pytest.warns(UserWarning, match=f"'s1' {words}"):
        s = task.split()
    model = SeriesModel.uncalibrated(untrained("rnn", s.features.width(s.scaler), awake=False), s.scaler, s.features, s.context)
    truth, futures = rolling(s, model, few()["sampler"], 5, 0, quiet)
    assert all(np.isfinite(one).all() for one in futures.values())
    assert np.isnan(truth[0, :, 1]).all() == (first > 276), "what had not begun is not scored"
    assert not np.isnan(truth[1]).any()


@pytest.mark.parametrize("joint", [False, True])
def test_the_score_for_early_stopping_is_of_validation_windows(joint, tmp_path):
    panel = known_panel("seasonal")
    task = task_of(tmp_path, panel, joint=joint, **few())
    data = task.data().train
    model = untrained("rnn", data.cond_width, awake=True, d=data.event[0])
    score = task.score(model, samples=4)
    assert score == task.score(model, samples=4) > 0
    assert task_of(tmp_path, garbled(panel, task.split().end), "garbage", joint=joint, **few()).score(model, samples=4) == score


# Recipes.


def test_each_public_data_set_has_recipes():
    assert {name: dataset.horizon for name, dataset in DATASETS.items()} == HORIZONS
    assert MINUTES.keys() == HORIZONS.keys()
    variants = [{}, {"backbone": "transformer"}, {"backbone": "paper"}, {"baseline": "timegrad"}]
    for name, variant in itertools.product(HORIZONS, variants):
        assert f"{name} series, forecast {HORIZONS[name]} steps" in RECIPES[name].about
        experiment = build(name, **variant)
        assert experiment.task.source == name
        assert (experiment.task.sampler.matrix == "full_sequence") == (not experiment.model.backbone.causal)
        assert from_dict(Experiment, json.loads(json.dumps(to_dict(experiment)))) == experiment
