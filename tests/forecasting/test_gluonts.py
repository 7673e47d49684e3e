"""GluonTS: our estimator and predictor among its data sets, splits, evaluators and folders."""

import dataclasses
import json

import numpy as np
import pytest

pytest.importorskip("gluonts", reason="gluonts comes with the extra `forecasting`")

import pandas as pd
from gluonts.dataset.common import ListDataset
from gluonts.dataset.multivariate_grouper import MultivariateGrouper
from gluonts.dataset.split import split
from gluonts.evaluation import MultivariateEvaluator, make_evaluation_predictions
from gluonts.model import Predictor

from diffusion_forcing import Sampler
from diffusion_forcing.forecasting.calendar import clock_of, seasons_of
from diffusion_forcing.forecasting.gluonts import DiffusionForcingEstimator, DiffusionForcingPredictor
from diffusion_forcing.forecasting.scores import crps, crps_sum

HORIZON, DIM, LENGTH = 6, 3, 240
START = pd.Period("2024-01-01", freq="h")
QUICK = {"minutes": 0.01, "threads": 1, "hidden": 16, "sampler": Sampler(steps=4, matrix="autoregressive", solver="euler_angle")}


def target(length=LENGTH, d=DIM):
    """(d, length): a season of a day and noise, the same at first for all lengths."""
    draw = np.random.default_rng(0)
    wave = np.sin(2 * np.pi * np.arange(400) / 24 + np.arange(d)[:, None])
    return (20 + 5 * wave + draw.standard_normal((d, 400)))[:, :length]


def entries(*lengths, d=DIM):
    """One multivariate entry for each length."""
    return ListDataset([{"start": START, "target": target(n, d)} for n in lengths], freq="h", one_dim_target=False)


def single(length=LENGTH, d=DIM):
    """Univariate entries, told apart by their item_id; the second starts a day later."""
    return ListDataset(
        [
            {"start": START + late, "target": row[late:], "item_id": f"item{i}"}
            for i, (row, late) in enumerate(zip(target(length, d), [0, 24, 0], strict=False))
        ],
        freq="h",
    )


def estimator(target_dim=DIM, **options):
    return DiffusionForcingEstimator("h", HORIZON, target_dim, **{**QUICK, "num_samples": 20, **options})


@pytest.fixture(scope="module")
def predictor():
    """Trained for a second on 240 hours, and left alone by the tests."""
    return estimator().train(entries(LENGTH))


@pytest.fixture(scope="module")
def univariate():
    return estimator(1).train(single())


def samples(forecasts):
    return np.stack([forecast.samples for forecast in forecasts], axis=1)


# Multivariate entries.


def test_a_forecast_follows_its_entry(predictor):
    [forecast] = predictor.predict(entries(LENGTH))
    assert forecast.samples.shape == (20, HORIZON, DIM)
    assert np.isfinite(forecast.samples).all()
    assert forecast.start_date == START + LENGTH
    assert predictor.prediction_length == HORIZON
    assert 10 < forecast.mean.mean() < 30
    assert next(predictor.predict(entries(LENGTH), num_samples=7)).samples.shape == (7, HORIZON, DIM)


def test_predictions_are_the_same_each_time(predictor):
    one, other = (samples(predictor.predict(entries(LENGTH, LENGTH - 6))) for _ in range(2))
    np.testing.assert_array_equal(one, other)
    assert (one[:, 0] != one[:, 1]).any()


def test_of_several_windows_of_the_same_series_the_longest_is_trained_on():
    grouped = MultivariateGrouper(max_target_dim=DIM)(ListDataset([{"start": START, "target": row} for row in target()], freq="h"))
    np.testing.assert_allclose(estimator()._panel(grouped).values.T, target(), rtol=1e-6)
    panel = estimator()._panel(entries(LENGTH - 12, LENGTH, LENGTH - 6))
    np.testing.assert_allclose(panel.values.T, target(), rtol=1e-6)
    assert (panel.freq, panel.names) == ("h", ("0", "1", "2"))
    assert panel.index[0] == START.to_timestamp()


def test_entries_of_other_series_are_not_passed_over():
    other = [{"start": START, "target": target()}, {"start": START, "target": target(100) + 1}]
    with pytest.raises(ValueError, match="entry 1 is none of those before it"):
        estimator()._panel(ListDataset(other, freq="h", one_dim_target=False))


def test_unused_features_are_warned_of():
    data = [{"start": START, "target": target(), "feat_dynamic_real": np.zeros((1, LENGTH))}]
    with pytest.warns(UserWarning, match="feat_dynamic_real of entry 0 is not used"):
        estimator()._panel(data)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("freq", "plain", "season"), [("1B", "B", 5), ("1M", "M", 12), ("1MS", "MS", 12), ("1QS", "QS", 4), ("1h", "h", 24)]
)
def test_a_one_before_the_frequency_changes_nothing(freq, plain, season):
    data = [{"start": pd.Timestamp("2024-01-01"), "target": target()}]
    one, other = (DiffusionForcingEstimator(name, HORIZON, DIM)._panel(data) for name in (freq, plain))
    assert one.freq == other.freq
    assert seasons_of(one)[0] == season
    np.testing.assert_array_equal(clock_of(dataclasses.replace(one, freq=freq)), clock_of(other))
    assert seasons_of(dataclasses.replace(one, freq=freq)) == seasons_of(other)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_our_scores_are_those_of_the_evaluator(predictor):
    """GluonTS' own back-test, over rolling windows: CRPS and CRPS of the sum agree."""
    test = entries(*range(LENGTH, LENGTH + 3 * HORIZON, HORIZON))
    forecasts, truths = (list(part) for part in make_evaluation_predictions(test, predictor, num_samples=30))
    levels = (np.arange(20) / 20)[1:]
    evaluator = MultivariateEvaluator(quantiles=levels, target_agg_funcs={"sum": np.sum}, num_workers=0)
    aggregate, _ = evaluator(iter(truths), iter(forecasts), num_series=len(forecasts))
    drawn = samples(forecasts)
    truth = np.stack([np.asarray(whole)[-HORIZON:] for whole in truths])
    assert drawn.shape == (30, 3, HORIZON, DIM)
    assert crps_sum(drawn, truth) == pytest.approx(aggregate["m_sum_mean_wQuantileLoss"], rel=1e-6)
    assert crps(drawn, truth) == pytest.approx(aggregate["mean_wQuantileLoss"], rel=1e-6)


def test_rolling_splits_are_forecast_window_by_window(predictor):
    _, template = split(entries(LENGTH + 18), offset=-18)
    instances = template.generate_instances(prediction_length=HORIZON, windows=3)
    forecasts = list(predictor.predict(instances.input))
    assert [forecast.start_date for forecast in forecasts] == [START + LENGTH + HORIZON * i for i in range(3)]
    labels = np.stack([label["target"].T for label in instances.label])
    assert labels.shape == (3, HORIZON, DIM)
    assert crps_sum(samples(forecasts), labels) < 0.5


def test_no_forecast_depends_on_what_follows_in_the_data_set(predictor):
    """make_evaluation_predictions cuts the truth off before the predictor sees the entry."""
    garbage = target().copy()
    garbage[:, -HORIZON:] = 1e6
    drawn = []
    for values in (target(), garbage):
        data = ListDataset([{"start": START, "target": values}], freq="h", one_dim_target=False)
        forecasts, truths = make_evaluation_predictions(data, predictor, num_samples=5)
        drawn.append(samples(forecasts))
        np.testing.assert_allclose(np.asarray(next(iter(truths)))[-HORIZON:], values[:, -HORIZON:].T, rtol=1e-6)
    np.testing.assert_array_equal(*drawn)


def test_an_entry_of_all_series_may_have_a_name(predictor):
    named = ListDataset([{"start": START, "target": target(), "item_id": "grid"}], freq="h", one_dim_target=False)
    assert next(predictor.predict(named)).item_id == "grid"


# Univariate entries.


def test_univariate_entries_are_distinguished_by_their_item(univariate):
    forecasts = list(univariate.predict(single()))
    assert [forecast.item_id for forecast in forecasts] == ["item0", "item1", "item2"]
    assert [forecast.start_date for forecast in forecasts] == [START + LENGTH] * 3
    assert all(forecast.samples.shape == (20, HORIZON) for forecast in forecasts)
    assert univariate.names == ("item0", "item1", "item2")


def test_the_order_of_entries_does_not_matter(univariate):
    """Each is forecast as the item it is, not as the one at its place."""
    there, back = list(single()), list(single())[::-1]
    forward = {f.item_id: f.mean for f in univariate.predict(there, num_samples=200)}
    backward = {f.item_id: f.mean for f in univariate.predict(back, num_samples=200)}
    for item, mean in forward.items():
        np.testing.assert_allclose(mean, backward[item], atol=0.8)


def test_series_that_start_later_are_missing_at_first():
    panel = estimator(1)._panel(single())
    assert panel.values.shape == (LENGTH, 3)
    np.testing.assert_array_equal(np.isnan(panel.values).sum(0), [0, 24, 0])


def test_an_item_that_was_not_trained_on_is_refused(univariate):
    other = ListDataset([{"start": START, "target": target()[0], "item_id": "stranger"}], freq="h")
    with pytest.raises(ValueError, match=r"trained on series item0, item1, item2.*item_id 'stranger'"):
        list(univariate.predict(other))


# Mistakes.


@pytest.mark.parametrize(
    ("target_dim", "data", "words"),
    [
        (2, entries(LENGTH), r"target_dim is 2, .* entry 0 has shape \(3, 240\)"),
        (3, single(), r"target_dim is 3, .* \(240,\).*MultivariateGrouper"),
        (1, entries(LENGTH), r"target_dim is 1"),
        (3, [], "the training data hold no entries"),
        (0, entries(LENGTH), "target_dim"),
    ],
)
def test_entries_of_another_size_are_refused(target_dim, data, words):
    with pytest.raises(ValueError, match=words):
        estimator(target_dim).train(data)


def test_an_entry_with_other_series_cannot_be_forecast(predictor):
    with pytest.raises(ValueError, match=r"trained on 3 series; got values of shape \(240, 2\)"):
        list(predictor.predict(entries(LENGTH, d=2)))


# Folders.


def test_a_serialized_predictor_forecasts_the_same(predictor, tmp_path):
    predictor.serialize(tmp_path)
    for loaded in (Predictor.deserialize(tmp_path), DiffusionForcingPredictor.deserialize(tmp_path)):
        assert isinstance(loaded, DiffusionForcingPredictor)
        assert loaded.prediction_length == HORIZON
        # Arrays of a file lie elsewhere in memory, by which a sum may round differently.
        np.testing.assert_allclose(samples(loaded.predict(entries(LENGTH))), samples(predictor.predict(entries(LENGTH))), rtol=1e-6)


def test_nothing_is_pickled(univariate, tmp_path):
    univariate.serialize(tmp_path)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} <= {".json", ".safetensors", ".txt"}
    assert not any(file.read_bytes()[:1] == b"\x80" for file in files), "pickles start so"
    about = json.loads((tmp_path / "predictor.json").read_text())
    assert about["names"] == ["item0", "item1", "item2"]
    loaded = Predictor.deserialize(tmp_path)
    np.testing.assert_array_equal(samples(loaded.predict(single())), samples(univariate.predict(single())))


# Other frequencies.


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("freq", "period"), [("D", "D"), ("B", "B"), ("W", "W"), ("M", "M"), ("30min", "30min")])
def test_entries_of_any_frequency_become_a_panel(freq, period):
    data = [{"start": pd.Period("2024-01-01", freq=period), "target": target()}]
    panel = DiffusionForcingEstimator(freq, HORIZON, DIM)._panel(data)
    np.testing.assert_array_equal(panel.values.T, target())
    assert panel.index.to_period(period)[0] == data[0]["start"]
