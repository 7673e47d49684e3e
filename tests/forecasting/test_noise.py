"""The noise of forecasts: encoded from past windows, correlated as it was, at a scale that calibrates the network."""

import dataclasses

import numpy as np
import pytest
import torch

pytest.importorskip("pandas", reason="pandas comes with the extra `forecasting`")

from series import (
    HORIZON,
    assert_same,
    daily,
    draw,
    garbled,
    history,
    holed,
    in_tokens,
    known_panel,
    model_of,
    rng,
    task_of,
    untrained,
    values_of,
    walk,
)

from diffusion_forcing.forecasting.noise import NoiseModel
from diffusion_forcing.forecasting.scores import coverage

residuals = pytest.mark.parametrize("residual", ["seasonal", "difference"])
networks = pytest.mark.parametrize("network", ["rnn", "transformer"])
WHOLE = {"matrix": "full_sequence"}


@residuals
@networks
def test_noise_is_encoded_from_values_before_the_first_test_window(residual, network, tmp_path):
    panel, noises = known_panel(residual), []
    for name, values in (("true", panel), ("garbage", garbled(panel, 276))):
        task = task_of(tmp_path, values, name, residual=residual)
        noises.append(task.series_model(untrained(network, task.data().train.cond_width, awake=True)).noise)
    assert_same(*noises)
    assert noises[0].past_noise.numel() > 100
    assert noises[0].past_noise.std() > 0.5


def correlations(values, network="rnn", **options):
    """(d, d), of past residuals, of futures after calibration, and of futures without."""
    model = model_of(values, network=network, awake=False)
    found = [np.corrcoef(model.scaler.encode(values, np.arange(len(values)))[model.scaler.warmup :].T)]
    for one in (model.calibrate(history(values), **options), model):
        futures = draw(one, values, network=network, samples=300, steps=8, **WHOLE)
        found.append(np.corrcoef(in_tokens(model, values, futures).reshape(-1, values.shape[1]).T))
    return found


@networks
def test_series_that_moved_together_are_sampled_together(network):
    """The copula: the network sees one series at a time, yet futures correlate as the residuals of the past did."""
    past, calibrated, white = correlations(daily(960, share=0.9), network, windows=120)
    assert past[0, 1] == pytest.approx(0.9, abs=0.02)
    assert calibrated[0, 1] == pytest.approx(past[0, 1], abs=0.08)
    assert abs(white[0, 1]) < 0.1


def test_an_independent_series_does_not_loosen_the_others():
    values = daily(960, 3, share=0.9)
    values[:, 2] = daily(960, 3, seed=1)[:, 2]
    past, calibrated, _ = correlations(values, windows=120)
    assert calibrated[0, 1] == pytest.approx(past[0, 1], abs=0.1)
    assert abs(calibrated[0, 2]) < 0.15


def test_walks_that_end_at_different_times_still_move_together():
    values = holed(walk(share=0.95), (slice(-3, None), 0))
    model = model_of(values, "difference", awake=False, transform="none").calibrate(history(values))
    steps = np.diff(draw(model, values, samples=400, **WHOLE), axis=1)
    assert np.corrcoef(steps.reshape(-1, 2).T)[0, 1] > 0.8


def test_a_calibrated_network_keeps_unit_noise():
    """A season and Gaussian noise: the network has nothing to add, and the noise of past windows has variance 1."""
    values = daily(720, 20)
    model = model_of(values, awake=False)
    np.testing.assert_allclose(model.calibrate(history(values)).noise.noise_scale, 1, atol=0.06)
    np.testing.assert_allclose(model.calibrate(history(values), held_out=10 * HORIZON).noise.noise_scale, 1, atol=0.12)


def test_an_overconfident_network_gets_more_noise_by_the_held_out_steps():
    values = daily(720, 20)
    values[-60:] += 0.3 * rng(1).standard_normal((60, 20))  # twice the variance, in the part that is held out
    model = model_of(values[:-60], awake=False)
    assert model.calibrate(history(values), held_out=60).noise.noise_scale.mean() > 1.2
    assert model.calibrate(history(values[:-60]), held_out=60).noise.noise_scale.mean() < 1.15


@pytest.mark.parametrize("calibrated", [False, True])
def test_the_band_of_nine_tenths_covers_nine_tenths(calibrated):
    values, first = daily(720, 20), 672
    model = model_of(values[:first], awake=False)
    if calibrated:
        model = model.calibrate(history(values[:first]))
    origins = range(first, 720, HORIZON)
    futures = [draw(model, values[:o], seed=o, samples=150, steps=8, **WHOLE) for o in origins]
    truth = np.stack([values[o : o + HORIZON] for o in origins])
    assert 0.85 < coverage(np.stack(futures, axis=1), truth, 0.9) < 0.95


def test_a_history_too_short_to_calibrate_leaves_noise_white():
    model = model_of(walk(18), "difference")
    assert model.calibrate(history(walk(18))) is model


@pytest.mark.filterwarnings("error")
def test_a_horizon_of_one_step_is_calibrated():
    values = daily()
    model = model_of(values, horizon=1).calibrate(history(values))
    assert model.noise.noise_scale.shape == (1,)
    assert draw(model, values).shape == (5, 1, 2)


@residuals
@networks
def test_missing_values_have_no_noise(residual, network):
    values = holed(values_of(residual), (slice(180, 190), 0), (slice(230, 233), 1))
    model = model_of(values, residual, network).calibrate(history(values), windows=12)
    assert torch.isfinite(model.noise.past_noise).all()
    assert torch.isfinite(model.noise.noise_scale).all()
    assert np.isfinite(draw(model, values, network=network)).all()


def test_a_series_without_past_noise_stays_white():
    values = holed(daily(600, 3, share=0.9), (slice(300, 596), 0))
    model = model_of(values, awake=False).calibrate(history(values))
    tokens = in_tokens(model, values, draw(model, values, samples=200, **WHOLE))
    np.testing.assert_allclose(tokens.std((0, 1)), 1, atol=0.25)


def test_the_gap_of_one_walk_does_not_scale_the_noise_of_another():
    values = walk()
    model = model_of(values, "difference", awake=False, transform="none")
    noise = dataclasses.replace(NoiseModel.white(HORIZON, 2, 1, True), noise_scale=torch.tensor([1.4, 1.0, 1.0, 1.0, 1.0, 1.0]))
    model = dataclasses.replace(model, noise=noise)
    whole, gappy = (draw(model, v, samples=600, **WHOLE) for v in (values, holed(values, (slice(-3, None), 0))))
    assert gappy[:, 0, 1].std() == pytest.approx(whole[:, 0, 1].std(), rel=0.1)
