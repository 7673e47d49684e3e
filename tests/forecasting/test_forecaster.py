"""Forecasts of a table, from Python and from the command line: fit, predict, save, and what is complained of."""

import re

import numpy as np
import pytest
from oracles import randomised
from small import dforce, differing, flat, stop_after, weights

pd = pytest.importorskip("pandas", reason="pandas comes with the extra `forecasting`")

from diffusion_forcing.engine.train import Result
from diffusion_forcing.forecasting import figures as forecasting_pictures
from diffusion_forcing.forecasting.calendar import clock_of
from diffusion_forcing.forecasting.command import _backtests, backtest
from diffusion_forcing.forecasting.forecaster import Forecast, Forecaster, load_panel, same_panel, save_panel
from diffusion_forcing.forecasting.model import Sampling
from diffusion_forcing.forecasting.panel import Panel, from_frame
from diffusion_forcing.forecasting.task import forget

HORIZON = 6
QUICK = {"minutes": 0.01, "threads": 1, "hidden": 16, "sampling": Sampling(samples=20, steps=4)}


def hours(t=200, *, start="2024-01-01", seed=0, **columns):
    """A wide frame of hours: two series with a season of a day, drawn once for 400 hours, so that longer frames begin like shorter ones."""
    draw = np.random.default_rng(seed)
    wave = np.sin(2 * np.pi * np.arange(400) / 24)
    both = {"east": 20 + 5 * wave + draw.standard_normal(400), "west": 50 - 9 * wave + 2 * draw.standard_normal(400)}
    time = pd.date_range(start, periods=t, freq="h")
    return pd.DataFrame({"time": time, **{name: values[:t] for name, values in both.items()}, **columns})


def long(frame):
    return frame.melt(id_vars="time", var_name="place", value_name="load")


@pytest.fixture(scope="module")
def fitted(saved):
    """A forecaster that was trained for a second, saved, and is left alone by the tests."""
    forecaster = Forecaster(HORIZON, **QUICK).fit(hours())
    forecaster.save(saved)
    return forecaster


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder that the fitted forecaster was saved to."""
    return tmp_path_factory.mktemp("saved")


def drawn_weights(experiment, folder, **_):
    """In place of a training: a network whose weights are drawn."""
    model = experiment.model.build(1, experiment.task.data().train.cond_width)
    randomised(model.backbone)
    model.save_pretrained(folder / "model")
    return Result("done", 1, 0.0, 0.0, 0.0)


def made(frame, *, folder=None, known=(), **options):
    """A forecaster that was fitted, but for the training."""
    options = {"hidden": 16, "layers": 1, "sampling": Sampling(samples=20, steps=4), **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffusion_forcing.forecasting.forecaster.train", drawn_weights)
        return Forecaster(HORIZON, **options).fit(frame, folder=folder, known=known)


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
    assert fitted.predict(sampling=Sampling(samples=3, steps=2)).samples.shape == (3, HORIZON, 2)


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


def test_long_frames_say_the_same(fitted):
    wide, other = fitted.predict(data=hours()), fitted.predict(data=long(hours()), id="place", value="load", time="time")
    np.testing.assert_array_equal(wide.samples, fitted.predict().samples)
    np.testing.assert_array_equal(other.samples, wide.samples)
    assert other.names == wide.names


def test_a_long_frame_can_be_fitted():
    forecaster = Forecaster(HORIZON, **QUICK).fit(long(hours()), id="place", value="load", time="time")
    assert forecaster.predict().names == ("east", "west")


def test_more_rows_are_forecast_from_their_own_end(fitted):
    forecast = fitted.predict(data=hours(230))
    assert forecast.index[0] == pd.Timestamp("2024-01-10 14:00")
    assert forecast.samples.shape == (20, HORIZON, 2)
    assert fitted.predict(data=from_frame(hours(230))).index.equals(forecast.index), "a panel will do"


def test_the_order_of_columns_does_not_matter_and_others_are_left_out(fitted):
    mixed = hours()[["time", "west", "east"]].assign(north=1.5)
    forecast = fitted.predict(data=mixed)
    assert forecast.names == ("east", "west")
    np.testing.assert_array_equal(forecast.samples, fitted.predict().samples)


def test_what_is_missing_in_other_data_is_sampled_around(fitted):
    frame = hours()
    frame.loc[[150, 198, 199], "east"] = np.nan
    assert np.isfinite(fitted.predict(data=frame).samples).all()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (hours()[["time", "east"]], "knows the series east, west; the data lack 'west'"),
        (hours().assign(time=pd.date_range("2024-01-01", periods=200, freq="D")), "data of freq 'h'; these are of 'D': resample them"),
        (hours(10), r"a forecast needs more than \d+ steps of history; got 10"),
        (hours().assign(east="calm"), "'calm' is not a number"),
    ],
)
def test_data_that_do_not_go_with_the_forecaster_say_why(data, words, fitted):
    with pytest.raises(ValueError, match=words):
        fitted.predict(data=data)


def test_horizons_beyond_the_model_say_so(fitted):
    with pytest.raises(ValueError, match="1 to 6 steps ahead; got 7"):
        fitted.predict(7)
    with pytest.raises(ValueError, match="got -1"):
        fitted.predict(-1)


def test_a_horizon_of_nothing_says_so(fitted):
    with pytest.raises(ValueError, match="got 0"):
        fitted.predict(0)


@pytest.mark.parametrize("call", ["predict", "fill", "surprise", "save"])
def test_a_forecaster_that_has_learned_nothing_says_so(call, tmp_path):
    arguments = [tmp_path / "model"] if call == "save" else []
    with pytest.raises(ValueError, match="call fit first"):
        getattr(Forecaster(HORIZON), call)(*arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"horizon": 0}, "a horizon counts steps from 1; got 0"),
        ({"horizon": 6, "backbone": "lstm"}, "backbone is gru or transformer; got 'lstm'"),
        ({"horizon": 6, "context": 0}, "context counts from 1"),
    ],
)
def test_options_are_checked_at_once(options, words):
    with pytest.raises(ValueError, match=words):
        Forecaster(**options)


def test_a_table_too_short_for_the_horizon_is_not_trained_on(tmp_path):
    with pytest.raises(ValueError, match="a quarter of the steps there are, here 4 of 17; got 6"):
        Forecaster(HORIZON, **QUICK).fit(hours(17), folder=tmp_path / "training")
    assert not (tmp_path / "training").exists()


# Doubt and rewards.


def test_doubt_is_an_array_or_a_frame(fitted):
    doubt = np.zeros((200, 2))
    np.testing.assert_array_equal(fitted.predict(doubt=doubt).samples, fitted.predict().samples)
    doubt[-3:, 0] = 0.5
    frame = pd.DataFrame(doubt, index=hours()["time"], columns=["east", "west"])
    one, other = fitted.predict(doubt=doubt), fitted.predict(doubt=frame[["west", "east"]])
    np.testing.assert_array_equal(one.samples, other.samples)
    assert (one.samples[..., 0] != fitted.predict().samples[..., 0]).any()


@pytest.mark.parametrize(
    ("doubt", "words"),
    [
        (np.zeros((200, 1)), r"a number for each of the \(200, 2\) values; got \(200, 1\)"),
        (np.full((200, 2), 1.1), r"doubt lies in 0 \(believe\) \.\. 1 \(ignore\)"),
        (np.full((200, 2), -0.1), "doubt lies in 0"),
        (np.full((200, 2), np.nan), "doubt lies in 0"),
        (pd.DataFrame({"east": np.zeros(200)}, index=hours()["time"]), "for every value"),
    ],
)
def test_doubt_that_cannot_be_says_why(doubt, words, fitted):
    with pytest.raises(ValueError, match=words):
        fitted.predict(doubt=doubt)


def test_futures_are_guided_towards_a_reward(fitted):
    def last(**options):
        return fitted.predict(samples=30, **options).mean["east"].iloc[-1]

    some, more = (last(reward=lambda futures: futures[:, -1, 0], scale=scale) for scale in (1, 3))
    assert last() + 0.05 < some < more


# Covariates known in advance.


def with_known(t=200, ahead=HORIZON):
    """Two covariates that go on after the last value."""
    draw = np.random.default_rng(4)
    rows = hours(t + ahead, price=draw.random(t + ahead), rain=100 * draw.random(t + ahead))
    rows.loc[t:, ["east", "west"]] = np.nan
    return rows


def test_what_is_known_in_advance_matters():
    frame = with_known()
    forecaster = made(frame, known=("price", "rain"))
    base = forecaster.predict().samples
    np.testing.assert_array_equal(forecaster.predict(data=frame, known=("price", "rain")).samples, base)
    other = frame.copy()
    other.loc[202, "rain"] += 50
    assert (forecaster.predict(data=other, known=("price", "rain")).samples != base).any()


def test_what_is_known_has_to_reach_as_far_as_the_forecast():
    forecaster = made(with_known(), known=("price", "rain"))
    short = with_known(ahead=2)
    with pytest.raises(ValueError, match=r"'price', known in advance, has to cover the 6 steps to forecast and has 2 rows"):
        forecaster.predict(data=short, known=("price", "rain"))
    assert forecaster.predict(2, data=short, known=("price", "rain")).samples.shape == (20, 2, 2)
    with pytest.raises(ValueError, match="knows the covariates price, rain; the data lack 'price'"):
        forecaster.predict(data=hours())


def test_the_order_of_covariates_does_not_matter():
    frame = with_known()
    forecaster = made(frame, known=("price", "rain"))
    np.testing.assert_array_equal(forecaster.predict(data=frame, known=("rain", "price")).samples, forecaster.predict().samples)


# Gaps and surprises.


def test_gaps_are_filled_where_the_network_sees_both_sides():
    frame = hours()
    forecaster = made(frame, backbone="transformer", kind="lags")
    frame.loc[100:103, "east"] = np.nan
    filled = forecaster.fill(frame, samples=5)
    assert filled.samples.shape == (5, 200, 2)
    assert len(filled.index) == 200
    assert np.isfinite(filled.samples).all()
    np.testing.assert_array_equal(filled.median["west"], frame["west"])
    assert (filled.samples[:, 100:104, 0].std(0) > 0).all()


def test_gaps_are_not_filled_by_a_gru(fitted):
    with pytest.raises(ValueError, match=r"\(backbone=transformer\)"):
        fitted.fill()


def test_what_is_unusual_stands_out(fitted):
    frame = hours(60)
    frame.loc[50, "west"] += 40
    frame.loc[40, "east"] = np.nan
    surprise = fitted.surprise(frame)
    assert list(surprise.columns) == ["east", "west"]
    assert surprise.index.equals(pd.DatetimeIndex(frame["time"]))
    assert surprise["west"].idxmax() == frame["time"][50]
    assert np.isnan(surprise["east"].iloc[40])


# Saving.


def test_a_saved_forecaster_forecasts_the_same(fitted, saved):
    loaded = Forecaster.load(saved)
    np.testing.assert_allclose(loaded.predict(data=hours()).samples, fitted.predict().samples, rtol=1e-6)
    assert loaded.predict(data=hours(230)).index[0] == pd.Timestamp("2024-01-10 14:00")
    assert {file.suffix for file in saved.rglob("*") if file.is_file()} == {".json", ".safetensors"}, "nothing is pickled"


def test_a_loaded_forecaster_needs_data_of_the_same_kind(fitted, saved):
    loaded = Forecaster.load(saved)
    with pytest.raises(ValueError, match=r"holds no data; pass them: predict\(data=frame\)"):
        loaded.predict()
    with pytest.raises(ValueError, match="the data lack 'west'"):
        loaded.predict(data=hours()[["time", "east"]])
    with pytest.raises(ValueError, match="of freq 'h'; these are of 'D'"):
        loaded.predict(data=hours().assign(time=pd.date_range("2024-01-01", periods=200, freq="D")))


def test_a_folder_without_a_forecaster_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no forecaster .* makes one"):
        Forecaster.load(tmp_path)


def test_a_forecaster_can_be_saved_long_after_its_training(tmp_path):
    forecaster = made(hours())
    forget()  # as other trainings do
    forecaster.save(tmp_path / "model")
    loaded = Forecaster.load(tmp_path / "model")
    np.testing.assert_allclose(loaded.predict(data=hours()).samples, forecaster.predict().samples, rtol=1e-6)


def test_a_loaded_forecaster_can_be_saved(fitted, saved, tmp_path):
    loaded = Forecaster.load(saved)
    loaded.save(tmp_path / "again")
    again = Forecaster.load(tmp_path / "again")
    np.testing.assert_array_equal(again.predict(data=hours()).samples, loaded.predict(data=hours()).samples)


@pytest.mark.parametrize("freq", ["h", "B", "ME", None])
def test_a_panel_is_saved_as_it_is(freq, tmp_path):
    values = np.random.default_rng(0).standard_normal((40, 2))
    values[3, 1] = np.nan
    index = pd.RangeIndex(7, 127, 3) if freq is None else pd.date_range("2020-01-31", periods=40, freq=freq)
    panel = Panel(values, ("a", "b"), index, freq, np.random.default_rng(1).random((50, 1)), ("x",))
    save_panel(panel, tmp_path / "p.panel.npz")
    loaded = load_panel(tmp_path / "p.panel.npz")
    assert (loaded.names, loaded.freq, loaded.known_names) == (panel.names, panel.freq, panel.known_names)
    assert loaded.index.equals(panel.index)
    np.testing.assert_array_equal(loaded.values, panel.values)
    np.testing.assert_array_equal(loaded.known, panel.known)


@pytest.mark.parametrize("freq", ["h", "D"])
def test_a_panel_keeps_its_time_zone(freq, tmp_path):
    index = pd.date_range("2024-01-01", periods=200, freq=freq, tz="Europe/Berlin")
    panel = Panel(np.zeros((200, 1)), ("a",), index, freq, np.zeros((200, 0)))
    save_panel(panel, tmp_path / "p.panel.npz")
    np.testing.assert_array_equal(clock_of(load_panel(tmp_path / "p.panel.npz")), clock_of(panel))


def test_a_panel_keeps_its_fixed_offset(tmp_path):
    for zone in ("+01:00", "-05:30", "UTC"):
        index = pd.date_range("2020-01-01", periods=200, freq="h", tz=zone)
        panel = Panel(np.zeros((200, 1)), ("a",), index, "h", np.zeros((200, 0)), kind="real")
        save_panel(panel, tmp_path / "a.panel.npz")
        assert same_panel(load_panel(tmp_path / "a.panel.npz"), panel)
    pytz = pytest.importorskip("pytz")
    index = pd.date_range("2020-01-01", periods=200, freq="h", tz=pytz.FixedOffset(60))
    save_panel(Panel(np.zeros((200, 1)), ("a",), index, "h", np.zeros((200, 0))), tmp_path / "b.panel.npz")
    loaded = load_panel(tmp_path / "b.panel.npz")
    assert (loaded.index == index).all()
    assert same_panel(loaded, load_panel(tmp_path / "b.panel.npz"))


def test_an_interrupted_training_goes_on_in_its_folder(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            Forecaster(HORIZON, **QUICK).fit(hours(), folder=tmp_path)
    forecaster = Forecaster(HORIZON, **QUICK).fit(hours(), folder=tmp_path)
    assert forecaster.result.status == "done"
    assert forecaster.result.step > 2
    assert forecaster.predict().samples.shape == (20, HORIZON, 2)


def test_another_table_in_the_same_folder_is_learned_anew(tmp_path):
    first = Forecaster(HORIZON, **QUICK).fit(hours(), folder=tmp_path)
    before = weights(tmp_path)
    other = hours(seed=1)
    other[["east", "west"]] *= 100
    second = Forecaster(HORIZON, **QUICK).fit(other, folder=tmp_path)
    assert (second.series.normal.mean > 50 * first.series.normal.mean).all(), "what is normal now"
    assert differing(before, weights(tmp_path)), "and a network of its own"


def test_another_horizon_in_the_same_folder_is_learned_anew(tmp_path):
    Forecaster(HORIZON, **QUICK).fit(hours(), folder=tmp_path)
    before = weights(tmp_path)
    forecaster = Forecaster(HORIZON + 2, **QUICK).fit(hours(), folder=tmp_path)
    assert forecaster.predict().samples.shape == (20, HORIZON + 2, 2)
    assert differing(before, weights(tmp_path))


# The command line.


def said(capsys):
    """Output and errors since last asked, without line breaks and frames."""
    return tuple(flat(re.sub(r"(?m)^[│|╭╰+] | [│|╮╯+]$", " ", text)) for text in capsys.readouterr())


def table(folder, frame, name="load.csv"):
    frame.to_csv(folder / name, index=False)
    return folder / name


def forecast(file, *words, **options):
    """`dforce forecast`, made short; its exit code."""
    options = {"horizon": HORIZON, "threads": 1, "minutes": 0.01, "samples": 20, **options}
    return dforce("forecast", file, *words, *(word for name, value in options.items() for word in (f"--{name}", value)))


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of a forecast of a table, trained, back-tested and drawn."""
    folder = tmp_path_factory.mktemp("ran")
    assert forecast(table(folder, hours()), "--backtest", 1, "--out", folder / "out") == 0
    return folder


def test_a_forecast_writes_a_table_a_picture_and_a_model(ran):
    written = pd.read_csv(ran / "out" / "forecast.csv")
    assert list(written.columns) == ["series", "time", "mean", "q05", "q25", "q50", "q75", "q95"]
    assert written["series"].tolist() == ["east"] * HORIZON + ["west"] * HORIZON
    assert written["time"][0] == "2024-01-09 08:00:00"
    assert np.isfinite(written.iloc[:, 2:].to_numpy()).all()
    assert (ran / "out" / "forecast.png").read_bytes().startswith(b"\x89PNG")
    assert (ran / "out" / "model" / "forecaster.json").exists()


def test_a_trained_model_is_used_again_without_training(ran, tmp_path, capsys):
    file = table(tmp_path, hours(230))
    assert forecast(file, "--model", ran / "out" / "model", "--out", tmp_path / "out", "--keep-samples", "--quantiles", 0.1, 0.9) == 0
    out, _ = said(capsys)
    assert "load.csv: 2 series, 230 steps of h, 2024-01-01 00:00:00 to 2024-01-10 13:00:00" in out
    assert "wrote" in out
    assert "expected:" not in out
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["forecast.csv", "forecast.png", "samples.csv"]
    written = pd.read_csv(tmp_path / "out" / "forecast.csv")
    assert list(written.columns) == ["series", "time", "mean", "q10", "q90"]
    assert written["time"][0] == "2024-01-10 14:00:00"
    assert len(pd.read_csv(tmp_path / "out" / "samples.csv")) == 20 * 2 * HORIZON


def test_forecasts_of_a_model_are_those_of_the_forecaster(ran, tmp_path):
    file = table(tmp_path, hours(230))
    words = ["--model", ran / "out" / "model", "--out", tmp_path, "--format", "parquet", "--seed", 3]
    assert forecast(file, *words, horizon=4) == 0
    loaded = Forecaster.load(ran / "out" / "model")
    pd.testing.assert_frame_equal(
        pd.read_parquet(tmp_path / "forecast.parquet"), loaded.predict(4, data=hours(230), samples=20, seed=3).frame(), check_dtype=False
    )


def test_a_forecast_says_what_it_does(ran, tmp_path, capsys):
    frame = hours().assign(flat=3.0)
    assert forecast(table(tmp_path, frame), "--backtest", 9, "--out", tmp_path / "out") == 0
    out, _ = said(capsys)
    assert "3 series, 200 steps of h" in out
    assert "note: 'flat' is 3 throughout" in out
    assert "note: 200 steps leave room for 5 back-test windows of 6" in out
    assert "expected: the" in out
    assert "Back-test: 5 windows of 6 steps that training did not see" in out
    for name in ("Diffusion Forcing", "seasonal naive (24)", "drift", "random walk", "ridge VAR", "in the 90 % band"):
        assert name in out
    for file in ("forecast.csv", "forecast.png"):
        assert f"wrote {tmp_path / 'out' / file}" in out


@pytest.mark.parametrize("kept", [False, True])
def test_the_back_test_is_of_windows_that_training_did_not_see(kept, tmp_path):
    forecaster = made(hours(), folder=tmp_path if kept else None, windows=3)
    shown = backtest(forecaster, 10, 0, lambda *_: None)
    assert "3 windows of 6 steps" in shown.title
    assert shown.rows[0][0] == "Diffusion Forcing"
    assert all(float(row[1]) > 0 for row in shown.rows)
    assert forecaster.task.setting().end == 200 - 3 * HORIZON


def test_a_forecaster_can_be_back_tested_after_another_was_fitted():
    forecaster = made(hours(), windows=3)
    made(hours(seed=1))
    assert "3 windows of 6 steps" in backtest(forecaster, 10, 0, lambda *_: None).title


@pytest.mark.parametrize(
    ("t", "horizon", "wanted", "expected"), [(200, 6, 3, 3), (200, 6, 0, 0), (200, 24, 3, 0), (40, 6, 3, 0), (100, 6, 9, 2)]
)
def test_back_tests_leave_enough_to_learn_from(t, horizon, wanted, expected):
    assert _backtests(t, horizon, wanted) == expected


def twice(frame):
    frame.loc[9, "time"] = frame.loc[8, "time"]
    return frame


def words_among(frame):
    frame["east"] = frame["east"].astype(object)
    frame.loc[9, "east"] = "n.b."
    return frame


MISTAKES = {
    "a stamp twice": (twice, [], "load.csv, column 'time', row 11: 2024-01-01 08:00:00 stands in row 10 already"),
    "words": (words_among, [], "load.csv, column 'east', row 11: 'n.b.' is not a number"),
    "negative": (lambda frame: frame.assign(east=-1), ["--values", "positive"], "column 'east', row 2: -1 stands where values should be"),
    "too far": (lambda frame: frame.head(17), [], "a horizon is from 1 to a quarter of the steps there are, here 4 of 17; got 6"),
    "not known": (
        lambda frame: frame.assign(holiday=0.0),
        ["--known", "holiday"],
        "'holiday', known in advance, has to cover the 6 steps to forecast and has 0 rows",
    ),
    "no such column": (lambda frame: frame, ["--time", "when"], "load.csv has no column 'when', which --time names"),
    "quantiles": (lambda frame: frame, ["--quantiles", 5, 95], "quantiles lie between 0 and 1; got (5.0, 95.0)"),
    "no such model": (lambda frame: frame, ["--model", "nowhere"], "nowhere holds no forecaster"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_end_with_a_message_and_without_a_forecast(mistake, tmp_path, capsys):
    change, words, message = MISTAKES[mistake]
    assert forecast(table(tmp_path, change(hours())), "--out", tmp_path / "out", *words) == 2
    assert message in said(capsys)[1]
    assert not list(tmp_path.rglob("forecast.*"))


def test_a_file_that_is_not_there_says_so(tmp_path, capsys):
    assert forecast(tmp_path / "none.csv", "--out", tmp_path / "out") == 2
    assert "there is no file" in said(capsys)[1]
    assert not (tmp_path / "out").exists()


def test_a_training_without_time_says_so(tmp_path, capsys):
    assert forecast(table(tmp_path, hours()), "--out", tmp_path / "out", minutes=0) == 2
    assert "minutes must be positive; got 0.0" in said(capsys)[1]


def test_a_model_for_a_shorter_horizon_says_so(ran, tmp_path, capsys):
    assert forecast(table(tmp_path, hours()), "--model", ran / "out" / "model", "--out", tmp_path / "out", horizon=7) == 2
    assert "forecasts at most 6 steps; got 7" in said(capsys)[1]


def test_a_model_of_other_series_says_so(ran, tmp_path, capsys):
    file = table(tmp_path, hours().rename(columns={"west": "north"}))
    assert forecast(file, "--model", ran / "out" / "model", "--out", tmp_path / "out") == 2
    assert "knows the series east, west; the data lack 'west'" in said(capsys)[1]
    assert not list(tmp_path.rglob("forecast.*"))


def test_no_futures_are_refused_at_once(ran, tmp_path, capsys):
    file = table(tmp_path, hours())
    assert forecast(file, "--model", ran / "out" / "model", "--out", tmp_path / "out", samples=0) == 2
    assert "got 0" in said(capsys)[1]


def test_a_file_with_more_series_than_the_model_is_drawn(ran, tmp_path):
    file = table(tmp_path, hours().assign(north=np.arange(200.0)))
    assert forecast(file, "--model", ran / "out" / "model", "--out", tmp_path / "out") == 0
    assert (tmp_path / "out" / "forecast.png").exists()


def test_a_second_fit_finds_its_own_seasons():
    forecaster = made(hours())
    assert forecaster.task.season == (24,)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffusion_forcing.forecasting.forecaster.train", drawn_weights)
        forecaster.fit(hours().assign(time=pd.date_range("2020-01-01", periods=200, freq="D")))
    assert forecaster.task.season == (7,)


def test_the_same_frequency_may_have_two_names(fitted):
    panel = from_frame(hours())
    other = fitted.predict(data=Panel(panel.values, panel.names, panel.index, "60min", panel.known), samples=2)
    np.testing.assert_array_equal(other.samples, fitted.predict(data=panel, samples=2).samples)


def test_options_of_training_have_no_effect_on_a_model_and_say_so(ran, tmp_path, capsys):
    file = table(tmp_path, hours())
    assert forecast(file, "--model", ran / "out" / "model", "--out", tmp_path / "out", backtest=5, season=12) == 0
    assert "--backtest, --minutes, --season are for training and have no effect" in " ".join(capsys.readouterr().out.split())


def test_a_model_knows_which_columns_are_known_in_advance(tmp_path):
    made(with_known(), known=["price", "rain"]).save(tmp_path / "model")
    file = table(tmp_path, with_known())
    assert forecast(file, "--model", tmp_path / "model", "--out", tmp_path / "out") == 0


def test_out_may_not_be_a_file(tmp_path, capsys):
    file = table(tmp_path, hours())
    assert forecast(file, "--out", file) == 2
    assert "error:" in capsys.readouterr().err


def test_names_with_dollars_are_drawn(tmp_path):
    panel = from_frame(hours(60).rename(columns={"east": "$east_{$", "west": "a $ and b_{ $"}))
    forecasting_pictures.draw_fans(panel, np.zeros((5, 6, len(panel.names))), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_pictures_show_each_series_with_its_own_forecast(ran, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(forecasting_pictures, "draw_fans", lambda panel, futures, file, **_: drawn.append((panel, futures)))
    file = table(tmp_path, hours()[["time", "west", "east"]])
    assert forecast(file, "--model", ran / "out" / "model", "--out", tmp_path / "out") == 0
    [(panel, futures)] = drawn
    np.testing.assert_allclose(futures.mean((0, 1)), panel.values[-24:].mean(0), atol=12)


@pytest.mark.slow
def test_bands_cover_what_they_should_where_quantiles_are_known():
    """Daily waves with autoregressive noise: forecasts from 20 origins, against the true quantiles of the process."""
    t, d, fades, held = 2400, 6, 0.8, 20
    draw = np.random.default_rng(3)
    noise = np.zeros((t, d))
    for step in range(1, t):
        noise[step] = fades * noise[step - 1] + draw.standard_normal(d)
    wave = 30 + 10 * np.sin(2 * np.pi * np.arange(t)[:, None] / 24 + np.arange(d))
    values = wave + noise
    frame = pd.DataFrame(values, index=pd.date_range("2024-01-01", periods=t, freq="h"), columns=[f"s{i}" for i in range(d)])
    known = t - held * 24
    forecaster = Forecaster(24, minutes=1.0, threads=1).fit(frame.iloc[:known])
    ahead = np.arange(1, 25)
    spread = np.sqrt((1 - fades ** (2 * ahead)) / (1 - fades**2))
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
