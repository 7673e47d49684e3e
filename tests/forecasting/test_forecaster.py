"""Forecasts of a table: fit, predict, fill, score, save, and refusals."""

import numpy as np
import pytest
from small import differing, stop_after, weights

pd = pytest.importorskip("pandas", reason="pandas comes with the extra `forecasting`")

from forecasts import HORIZON, QUICK, covariates_table, draw_weights, load_table, long_table, made

from diffusion_forcing.forecasting import Forecast, Forecaster, Panel, from_frame


@pytest.fixture(scope="module")
def fitted(saved):
    """A forecaster that was trained for a second, saved, and is left alone by the tests."""
    forecaster = Forecaster(HORIZON, **QUICK).fit(load_table())
    forecaster.save(saved)
    return forecaster


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder that the fitted forecaster was saved to."""
    return tmp_path_factory.mktemp("saved")


# Forecasts.


def test_futures_are_of_all_series_and_follow_the_data(fitted):
    forecast = fitted.predict()
    assert forecast.samples.shape == (20, HORIZON, 2)
    assert np.isfinite(forecast.samples).all()
    assert forecast.names == ("east", "west")
    assert list(forecast.index) == list(pd.date_range("2024-01-09 08:00", periods=HORIZON, freq="h"))
    assert 5 < forecast.samples[..., 0].mean() < 35 < forecast.samples[..., 1].mean() < 70


def test_the_seed_and_the_number_of_futures(fitted):
    one, same, other = (fitted.predict(samples=7, seed=seed).samples for seed in (0, 0, 1))
    assert one.shape == (7, HORIZON, 2)
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()
    assert fitted.predict(2).samples.shape == (20, 2, 2)


def test_training_is_over_after_its_minutes(fitted):
    assert fitted.result.status == "done"
    assert fitted.result.step > 0
    assert 0.01 <= fitted.result.minutes < 0.1


def test_mean_median_and_quantiles_are_wide(fitted):
    forecast = fitted.predict()
    for wide in (forecast.mean, forecast.median, forecast.quantile(0.9)):
        assert wide.shape == (HORIZON, 2)
        assert list(wide.columns) == ["east", "west"]
        assert wide.index.equals(forecast.index)
    np.testing.assert_allclose(forecast.mean["west"], forecast.samples[..., 1].mean(0))
    assert (forecast.quantile(0.1) <= forecast.median).all(axis=None)
    assert (forecast.median <= forecast.quantile(0.9)).all(axis=None)
    np.testing.assert_array_equal(forecast.quantile(1), forecast.samples.max(0))
    with pytest.raises(ValueError, match=r"lies in 0\.\.1; got 50"):
        forecast.quantile(50)


def test_the_frame_has_a_row_for_each_series_and_step(fitted):
    forecast = fitted.predict()
    frame = forecast.frame()
    assert list(frame.columns) == ["series", "time", "mean", "q05", "q25", "q50", "q75", "q95"]
    assert list(frame["series"]) == ["east"] * HORIZON + ["west"] * HORIZON
    assert list(frame["time"]) == list(forecast.index) * 2
    np.testing.assert_allclose(frame["q75"][HORIZON:], forecast.quantile(0.75)["west"])
    assert (frame.iloc[:, 3:].diff(axis=1).iloc[:, 1:] >= 0).all(axis=None)
    assert list(forecast.frame([0.025, 0.1]).columns) == ["series", "time", "mean", "q02.5", "q10"]


def test_the_frame_of_samples_has_a_row_for_each_number(fitted):
    forecast = fitted.predict(samples=3)
    frame = forecast.samples_frame()
    assert list(frame.columns) == ["sample", "series", "time", "value"]
    assert len(frame) == 3 * 2 * HORIZON
    for _, row in frame.sample(20, random_state=0).iterrows():
        step, series = list(forecast.index).index(row["time"]), forecast.names.index(row["series"])
        assert row["value"] == forecast.samples[row["sample"], step, series]


def test_a_forecast_of_a_plain_clock_counts_on():
    forecast = Forecast(np.zeros((2, 3, 1)), ("a",), pd.RangeIndex(10, 25, 5))
    assert forecast.frame([0.5])["time"].tolist() == [10, 15, 20]


# Other data.


def test_long_frames_give_the_same_forecast(fitted):
    wide = fitted.predict(data=load_table())
    other = fitted.predict(data=from_frame(long_table(load_table()), id="place", value="load"))
    np.testing.assert_array_equal(wide.samples, fitted.predict().samples)
    np.testing.assert_array_equal(other.samples, wide.samples)
    assert other.names == wide.names


def test_other_data_are_read_as_those_it_was_fitted_to(tmp_path):
    frame = long_table(load_table())
    forecaster = made(frame, id="place", value="load", time="time")
    assert forecaster.predict().names == ("east", "west")
    forecaster.save(tmp_path)
    for one in (forecaster, Forecaster.load(tmp_path)):
        np.testing.assert_allclose(one.predict(data=frame).samples, forecaster.predict().samples, rtol=1e-6)


def test_more_rows_are_forecast_from_their_own_end(fitted):
    forecast = fitted.predict(data=load_table(230))
    assert forecast.index[0] == pd.Timestamp("2024-01-10 14:00")
    assert forecast.samples.shape == (20, HORIZON, 2)
    assert fitted.predict(data=from_frame(load_table(230))).index.equals(forecast.index), "a panel will do"


def test_the_order_of_columns_does_not_matter_and_others_are_left_out(fitted):
    mixed = load_table()[["time", "west", "east"]].assign(north=1.5)
    forecast = fitted.predict(data=mixed)
    assert forecast.names == ("east", "west")
    np.testing.assert_array_equal(forecast.samples, fitted.predict().samples)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (load_table()[["time", "east"]], "the data lack 'west'"),
        (load_table().assign(time=pd.date_range("2024-01-01", periods=200, freq="D")), "these are of 'D'"),
        (load_table(10), "steps of history; got 10"),
        (load_table().assign(east="calm"), "'calm' is not a number"),
    ],
)
def test_data_that_do_not_fit_the_forecaster_are_refused(data, words, fitted):
    with pytest.raises(ValueError, match=words):
        fitted.predict(data=data)


@pytest.mark.parametrize("horizon", [7, 0, -1])
def test_impossible_horizons_are_refused(horizon, fitted):
    with pytest.raises(ValueError, match=f"1 to 6 steps ahead; got {horizon}"):
        fitted.predict(horizon)


@pytest.mark.parametrize("call", ["predict", "fill", "anomaly_score", "save"])
def test_an_untrained_forecaster_refuses(call, tmp_path):
    arguments = [tmp_path / "model"] if call == "save" else []
    with pytest.raises(ValueError, match="call fit first"):
        getattr(Forecaster(HORIZON), call)(*arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"horizon": 0}, "horizon"),
        ({"horizon": 6, "backbone": "lstm"}, "backbone"),
        ({"horizon": 6, "context": 0}, "context"),
        ({"horizon": 6, "samples": 0}, "samples"),
    ],
)
def test_options_are_checked_at_once(options, words):
    with pytest.raises(ValueError, match=words):
        Forecaster(**options)


def test_a_table_too_short_for_the_horizon_is_not_trained_on(tmp_path):
    with pytest.raises(ValueError, match="a quarter of the steps there are, here 4 of 17; got 6"):
        Forecaster(HORIZON, **QUICK).fit(load_table(17), folder=tmp_path / "training")
    assert not (tmp_path / "training").exists()


# Noise levels and rewards.


def test_noise_levels_are_an_array_or_a_frame(fitted):
    level = np.zeros((200, 2))
    np.testing.assert_array_equal(fitted.predict(noise_level=level).samples, fitted.predict().samples)
    level[-3:, 0] = 0.5
    frame = pd.DataFrame(level, index=load_table()["time"], columns=["east", "west"])
    one, other = fitted.predict(noise_level=level), fitted.predict(noise_level=frame[["west", "east"]])
    np.testing.assert_array_equal(one.samples, other.samples)
    assert (one.samples[..., 0] != fitted.predict().samples[..., 0]).any()


@pytest.mark.parametrize(
    "level",
    [
        np.zeros((200, 1)),
        np.full((200, 2), 1.1),
        np.full((200, 2), -0.1),
        np.full((200, 2), np.nan),
        pd.DataFrame({"east": np.zeros(200)}, index=load_table()["time"]),
    ],
)
def test_impossible_noise_levels_are_refused(level, fitted):
    with pytest.raises(ValueError, match="noise_level"):
        fitted.predict(noise_level=level)


def test_futures_are_guided_towards_a_reward(fitted):
    def last(**options):
        return fitted.predict(samples=30, **options).mean["east"].iloc[-1]

    some, more = (last(reward=lambda futures: futures[:, -1, 0], scale=scale) for scale in (1, 3))
    assert last() + 0.05 < some < more


# Covariates known in advance.


def test_covariates_matter_and_their_order_does_not():
    frame = covariates_table()
    forecaster = made(frame, known=("price", "rain"))
    base = forecaster.predict().samples
    for data in (frame, from_frame(frame, known=("rain", "price"))):
        np.testing.assert_array_equal(forecaster.predict(data=data).samples, base)
    other = frame.copy()
    other.loc[202, "rain"] += 50
    assert (forecaster.predict(data=other).samples != base).any()


def test_covariates_have_to_reach_as_far_as_the_forecast():
    forecaster = made(covariates_table(), known=("price", "rain"))
    short = covariates_table(ahead=2)
    with pytest.raises(ValueError, match=r"'price', known in advance, .* 6 steps .* 2 rows"):
        forecaster.predict(data=short)
    assert forecaster.predict(2, data=short).samples.shape == (20, 2, 2)
    with pytest.raises(ValueError, match="no column 'price'"):
        forecaster.predict(data=load_table())
    with pytest.raises(ValueError, match="the data lack 'price'"):
        forecaster.predict(data=from_frame(load_table()))


# Gaps and anomalies.


def test_gaps_are_filled_where_the_network_sees_both_sides():
    frame = load_table()
    forecaster = made(frame, backbone="transformer", residual="seasonal")
    frame.loc[100:103, "east"] = np.nan
    filled = forecaster.fill(frame, samples=5)
    assert filled.samples.shape == (5, 200, 2)
    assert len(filled.index) == 200
    assert np.isfinite(filled.samples).all()
    np.testing.assert_array_equal(filled.median["west"], frame["west"])
    assert (filled.samples[:, 100:104, 0].std(0) > 0).all()


def test_an_anomaly_has_the_highest_score(fitted):
    frame = load_table(60)
    frame.loc[50, "west"] += 40
    frame.loc[40, "east"] = np.nan
    score = fitted.anomaly_score(frame)
    assert list(score.columns) == ["east", "west"]
    assert score.index.equals(pd.DatetimeIndex(frame["time"]))
    assert score["west"].idxmax() == frame["time"][50]
    assert np.isnan(score["east"].iloc[40])


# Saving.


def test_a_saved_forecaster_forecasts_the_same(fitted, saved):
    loaded = Forecaster.load(saved)
    np.testing.assert_allclose(loaded.predict(data=load_table()).samples, fitted.predict().samples, rtol=1e-6)
    assert loaded.predict(data=load_table(230)).index[0] == pd.Timestamp("2024-01-10 14:00")
    assert {file.suffix for file in saved.rglob("*") if file.is_file()} == {".json", ".safetensors"}, "nothing is pickled"


def test_a_loaded_forecaster_needs_data_and_can_be_saved(saved, tmp_path):
    loaded = Forecaster.load(saved)
    with pytest.raises(ValueError, match=r"predict\(data=frame\)"):
        loaded.predict()
    with pytest.raises(FileNotFoundError, match=r"forecaster\.json"):
        Forecaster.load(tmp_path)
    loaded.save(tmp_path)
    np.testing.assert_array_equal(Forecaster.load(tmp_path).predict(data=load_table()).samples, loaded.predict(data=load_table()).samples)


def test_an_interrupted_training_goes_on_in_its_folder(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(SystemExit):
            Forecaster(HORIZON, **QUICK).fit(load_table(), folder=tmp_path)
    forecaster = Forecaster(HORIZON, **QUICK).fit(load_table(), folder=tmp_path)
    assert forecaster.result.status == "done"
    assert forecaster.result.step > 2
    assert forecaster.predict().samples.shape == (20, HORIZON, 2)


def test_a_training_folder_of_another_table_or_horizon_is_trained_anew(tmp_path):
    first = Forecaster(HORIZON, **QUICK).fit(load_table(), folder=tmp_path)
    before = weights(tmp_path)
    other = load_table(seed=1)
    other[["east", "west"]] *= 100
    second = Forecaster(HORIZON, **QUICK).fit(other, folder=tmp_path)
    assert (second.series.scaler.mean > 50 * first.series.scaler.mean).all(), "statistics"
    assert differing(before, weights(tmp_path)), "and a network of its own"
    before = weights(tmp_path)
    third = Forecaster(HORIZON + 2, **QUICK).fit(other, folder=tmp_path)
    assert third.predict().samples.shape == (20, HORIZON + 2, 2)
    assert differing(before, weights(tmp_path))


def test_a_second_fit_finds_its_own_seasons():
    forecaster = made(load_table())
    assert forecaster.split.seasons == (24,)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffusion_forcing.forecasting.forecaster.train", draw_weights)
        forecaster.fit(load_table().assign(time=pd.date_range("2020-01-01", periods=200, freq="D")))
    assert forecaster.split.seasons == (7,)


def test_the_same_frequency_may_have_two_names(fitted):
    panel = from_frame(load_table())
    other = fitted.predict(data=Panel(panel.values, panel.names, panel.index, "60min", panel.known), samples=2)
    np.testing.assert_array_equal(other.samples, fitted.predict(data=panel, samples=2).samples)


@pytest.mark.slow
def test_bands_cover_what_they_should_where_quantiles_are_known():
    """Daily waves with autoregressive noise: forecasts from 20 origins, against the true quantiles of the process."""
    t, d, decay, origins = 2400, 6, 0.8, 20
    draw = np.random.default_rng(3)
    noise = np.zeros((t, d))
    for step in range(1, t):
        noise[step] = decay * noise[step - 1] + draw.standard_normal(d)
    wave = 30 + 10 * np.sin(2 * np.pi * np.arange(t)[:, None] / 24 + np.arange(d))
    values = wave + noise
    frame = pd.DataFrame(values, index=pd.date_range("2024-01-01", periods=t, freq="h"), columns=[f"s{i}" for i in range(d)])
    known = t - origins * 24
    forecaster = Forecaster(24, minutes=1.0, threads=1).fit(frame.iloc[:known])
    ahead = np.arange(1, 25)
    spread = np.sqrt((1 - decay ** (2 * ahead)) / (1 - decay**2))
    covered, width = [], []
    for origin in range(known, t, 24):
        futures = forecaster.predict(data=frame.iloc[:origin]).samples
        low, high = np.quantile(futures, [0.05, 0.95], axis=0)
        truth = values[origin : origin + 24]
        covered.append((truth >= low) & (truth <= high))
        width.append((high - low).mean(1) / (2 * 1.645 * spread))
    print(f"cover90 {np.mean(covered):.3f}, width over the true one {np.mean(width):.3f}")
    assert 0.85 <= np.mean(covered) <= 0.95
    assert 0.9 <= np.mean(width) <= 1.35
