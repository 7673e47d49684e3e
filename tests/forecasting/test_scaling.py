"""Values to tokens and back: residuals, transforms, gaps, series that the training range says little about."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import seeded

pytest.importorskip("pandas", reason="pandas comes with the extra `forecasting`")

from series import HORIZON, assert_same, daily, draw, holed, model_of, rng, values_of, walk, waves

from diffusion_forcing.forecasting.features import SeriesFeatures
from diffusion_forcing.forecasting.scaling import MAX_RESIDUAL, SeriesScaler, fit_scaler, seasonal_lags

residuals = pytest.mark.parametrize("residual", ["seasonal", "difference"])
transforms = pytest.mark.parametrize("transform", ["none", "sqrt", "log"])


def scaler_of(values, **options):
    return fit_scaler(values, np.arange(len(values)), HORIZON, (24,), **options)


@residuals
@transforms
def test_tokens_decode_to_the_values_they_encode(residual, transform):
    values = holed(np.exp(daily() / 5), (slice(100, 104), 0), (211, 1))
    clock, at = np.arange(len(values)), len(values) - HORIZON
    scaler = scaler_of(values, residual=residual, transform=transform)
    tokens = scaler.encode(values, clock)
    assert np.nanmax(np.abs(tokens)) < MAX_RESIDUAL, "nothing is clipped"
    decoded = scaler.decode(torch.from_numpy(tokens[at:])[None], values[:at], clock[at:])
    assert (scaler.residual, scaler.transform) == (residual, transform)
    np.testing.assert_allclose(decoded[0], values[at:], rtol=1e-6)


@residuals
def test_tokens_are_white_and_of_variance_one(residual):
    values = values_of(residual, 1200, 3)
    scaler = scaler_of(values, residual=residual)
    tokens = scaler.encode(values, np.arange(1200))
    np.testing.assert_allclose(np.nanstd(tokens, axis=0), 1, atol=0.02)
    after = tokens[scaler.warmup :]
    assert abs(np.mean(after[1:] * after[:-1])) < 0.1


@residuals
def test_tokens_are_missing_during_warmup_and_where_values_are(residual):
    values = holed(values_of(residual), (150, 0), (slice(200, 203), 1))
    scaler = scaler_of(values, residual=residual)
    expected = np.isnan(values)
    if residual == "difference":
        expected[1:] |= expected[:-1].copy()  # a difference needs both of its ends
    expected[: scaler.warmup] = True
    np.testing.assert_array_equal(np.isnan(scaler.encode(values, np.arange(288))), expected)
    assert np.isnan(scaler.encode(values[: scaler.warmup], np.arange(scaler.warmup))).all()


def test_missing_lags_are_those_of_the_season_before_then_the_last_then_the_mean():
    scaler = scaler_of(daily(), residual="seasonal")
    standard = rng().standard_normal((60, 2))
    holes = holed(standard, (0, 0), (5, 0), (slice(40, 42), 1))
    filled = scaler.fill_missing(holes)
    np.testing.assert_array_equal(filled[[40, 41], 1], standard[[16, 17], 1])
    assert filled[5, 0] == standard[4, 0]
    assert filled[0, 0] == 0
    present = ~np.isnan(holes)
    np.testing.assert_array_equal(filled[present], standard[present])


def test_an_outlier_is_clipped():
    values = daily()
    scaler = scaler_of(values, residual="seasonal")
    values[200, 0] = 1e9
    tokens = scaler.encode(values, np.arange(288))
    assert tokens[200, 0] == MAX_RESIDUAL == np.nanmax(np.abs(tokens))


@pytest.mark.parametrize("seed", range(3))
def test_random_walks_get_differences_and_seasons_seasonal_residuals(seed):
    assert scaler_of(walk(600, seed=seed)).residual == "difference"
    assert scaler_of(daily(600, seed=seed)).residual == "seasonal"


def test_a_history_too_short_for_seasons_gets_differences():
    assert fit_scaler(daily(40), np.arange(40), 12, (24,)).residual == "difference"


@pytest.mark.parametrize("expected", ["log", "sqrt", "none", "negative"])
def test_the_transform_is_the_one_that_stabilises_the_variance(expected):
    wave, noise = waves(600), rng(1).standard_normal((600, 2))
    values = {
        "log": np.exp(1 + wave + 0.3 * noise),
        "sqrt": rng(1).poisson(20 * np.exp(0.8 * wave)).astype(float),
        "none": 50 + 20 * wave + 3 * noise,
        "negative": np.exp(1 + wave + 0.3 * noise) - 1,
    }[expected]
    assert expected != "negative" or values.min() < 0
    assert scaler_of(values).transform == {"negative": "none"}.get(expected, expected)


@pytest.mark.parametrize("transform", ["sqrt", "log"])
def test_negative_values_refuse_a_transform(transform):
    with pytest.raises(ValueError, match=f"transform={transform}"):
        scaler_of(daily() - 10, transform=transform)


@settings(max_examples=60, deadline=None)
@given(horizon=st.integers(1, 60), season=st.integers(1, 48), longer=st.lists(st.integers(2, 7), max_size=1), length=st.integers(3, 2000))
def test_no_lag_is_shorter_than_the_horizon(horizon, season, longer, length):
    lags = seasonal_lags(horizon, (season, *(season * factor for factor in longer)), length)
    assert lags == tuple(sorted(set(lags)))
    assert lags[0] >= horizon
    assert lags == (horizon,) or lags[-1] <= length


@transforms
@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_tokens_do_not_depend_on_the_unit(transform, unit):
    values, clock = np.exp(daily() / 5), np.arange(288)
    one, other = (scaler_of(u * values, transform=transform).encode(u * values, clock) for u in (1, unit))
    np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)


@residuals
@transforms
def test_values_have_gradients_with_respect_to_tokens(residual, transform):
    values, clock = np.exp(daily() / 5), np.arange(288)
    scaler = scaler_of(values, residual=residual, transform=transform)
    tokens = torch.zeros(3, HORIZON, 2, dtype=torch.float64, requires_grad=True)
    scaler.decode(tokens, values, clock[:HORIZON])[:, -1].sum().backward()
    assert (tokens.grad[:, -1] > 0).all(), "a higher token is a higher value"
    assert (tokens.grad[:, 0] > 0).all() == (residual == "difference"), "and differences add up"


@residuals
def test_statistics_are_saved_as_tensors_and_json(residual):
    values, known = holed(daily(d=3), (100, 1)), rng().standard_normal((288, 2))
    scaler = scaler_of(values, residual=residual)
    features = SeriesFeatures.fit(values, known, scaler, (24.0, 168.0))
    tensors = {}
    config = json.loads(json.dumps([scaler.save(tensors), features.save(tensors)]))
    assert_same(SeriesScaler.load(tensors, config[0]), scaler)
    assert_same(SeriesFeatures.load(tensors, config[1]), features)


# Constants, and series that are short, late or out of range.


@residuals
@pytest.mark.parametrize("number", [0.0, -7.5, 1e6])
def test_forecasts_of_a_constant_are_that_constant(residual, number):
    values = np.column_stack([np.full(288, number), daily()[:, 0]])
    futures = draw(model_of(values, residual, awake=False), values)
    np.testing.assert_allclose(futures[..., 0], number, atol=0.01 * max(1, abs(number)))
    assert futures[..., 1].std() > 0.01


def test_a_constant_far_below_one_keeps_its_size():
    values = np.column_stack([np.full(288, 1e-6), waves(288)[:, 0]])
    np.testing.assert_allclose(draw(model_of(values, awake=False), values)[..., 0], 1e-6, rtol=0.01)


@pytest.mark.filterwarnings("error")
def test_a_series_without_a_value_leaves_the_others_finite_and_has_no_floor():
    values = holed(daily(), (slice(None), 1))
    scaler = scaler_of(values)
    features = SeriesFeatures.fit(values, np.zeros((288, 0)), scaler, (24.0,))
    for part in (scaler.mean, scaler.std, scaler.residual_std, scaler.phase_scale, features.static_features):
        assert np.isfinite(part).all()
    assert scaler.floor.tolist() == [0, -np.inf], "it may turn out negative"


@residuals
@transforms
@pytest.mark.parametrize("before", [np.nan, 0.0])
def test_a_series_that_begins_after_the_training_range_is_forecast_at_its_own_size(residual, transform, before):
    values = np.exp(daily(seed=3) / 5) if residual == "seasonal" else walk(seed=3)
    begun = values.copy()
    begun[:200, 1] = before
    begun[200:, 1] *= 1000
    model = model_of(begun[:200], residual, awake=False, transform=transform)
    assert model.scaler.undetermined.tolist() == [False, True]
    futures = draw(model, begun, samples=50)
    now = begun[-48:, 1]
    assert 0.1 * now.min() < np.median(futures[..., 1]) < 5 * now.max()
    assert futures[..., 1].std() > 0.001 * now.mean(), "with some uncertainty"
    np.testing.assert_array_equal(futures[..., 0], draw(model, values, samples=50)[..., 0])


@transforms
def test_a_series_of_two_values_is_as_uncertain_as_the_others(transform):
    values = np.exp(daily() / 5)
    values[:-2, 1] = np.nan
    scaler = scaler_of(values, transform=transform)
    assert np.isfinite(scaler.floor[1]) or transform == "none"
    assert scaler.residual_std[1] == scaler.residual_std[0]
    futures = scaler.decode(torch.randn(200, HORIZON, 2, generator=seeded(0)).double(), values, np.arange(HORIZON)).numpy()
    assert np.isfinite(futures).all()
    assert 0.2 < futures[..., 1].std() / futures[..., 0].std() < 5


def test_forecasts_are_negative_only_if_values_were_or_are_declared_real():
    values, clock = rng().poisson(1.0, (288, 2)).astype(float), np.arange(288)
    wild = 8 * torch.randn(50, HORIZON, 2, generator=seeded(0), dtype=torch.float64)
    for transform in ("none", "sqrt", "log"):
        assert scaler_of(values, transform=transform).decode(wild, values, clock[:HORIZON]).min() >= 0
    real = scaler_of(values, real=True)
    assert real.transform == "none"
    assert real.decode(wild, values, clock[:HORIZON]).min() < 0


@residuals
def test_a_series_that_has_fallen_below_its_floor_loses_it(residual):
    values = np.abs(values_of(residual) - 10)
    model = model_of(values, residual, awake=False, transform="none")
    fallen = values.copy()
    fallen[-100:, 0] -= 100
    futures = draw(model, fallen)
    assert np.median(futures[..., 0]) < -10
    assert futures[..., 1].min() >= 0
