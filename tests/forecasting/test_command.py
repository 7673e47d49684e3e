"""dforce forecast: what it writes and prints, trained models, and mistakes."""

import re

import numpy as np
import pytest
from small import dforce, flat

pd = pytest.importorskip("pandas", reason="pandas comes with the extra `forecasting`")

from forecasts import HORIZON, covariates_table, load_table, made

from diffusion_forcing.forecasting import Forecaster, command, from_frame
from diffusion_forcing.forecasting.command import _room_for_backtest, backtest
from diffusion_forcing.forecasting.figures import draw_fans


def printed(capsys):
    """Output and errors since last asked, without line breaks and frames."""
    return tuple(flat(re.sub(r"(?m)^[│|╭╰+] | [│|╮╯+]$", " ", text)) for text in capsys.readouterr())


def table(folder, frame, name="load.csv"):
    frame.to_csv(folder / name, index=False)
    return folder / name


def forecast(file, *words, **options):
    """`dforce forecast`, made short; its exit code."""
    options = {"horizon": HORIZON, "threads": 1, "minutes": 0.01, "samples": 20, **options}
    return dforce("forecast", file, *(word for name, value in options.items() for word in (f"--{name}", value)), *words)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of a forecast of a table, trained, back-tested and drawn."""
    folder = tmp_path_factory.mktemp("ran")
    assert forecast(table(folder, load_table()), "--backtest", 1, "--out", folder / "out") == 0
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
    file = table(tmp_path, load_table(230))
    assert forecast(file, "--model", ran / "out" / "model", "--out", tmp_path / "out", "--keep-samples", "--quantiles", 0.1, 0.9) == 0
    out, _ = printed(capsys)
    assert "load.csv: 2 series, 230 steps of h, 2024-01-01 00:00:00 to 2024-01-10 13:00:00" in out
    assert "wrote" in out
    assert "expected value" not in out
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["forecast.csv", "forecast.png", "samples.csv"]
    written = pd.read_csv(tmp_path / "out" / "forecast.csv")
    assert list(written.columns) == ["series", "time", "mean", "q10", "q90"]
    assert written["time"][0] == "2024-01-10 14:00:00"
    assert len(pd.read_csv(tmp_path / "out" / "samples.csv")) == 20 * 2 * HORIZON


def test_forecasts_of_a_model_are_those_of_the_forecaster(ran, tmp_path):
    file = table(tmp_path, load_table(230))
    words = ["--model", ran / "out" / "model", "--out", tmp_path, "--format", "parquet", "--seed", 3]
    assert forecast(file, *words, horizon=4) == 0
    loaded = Forecaster.load(ran / "out" / "model")
    pd.testing.assert_frame_equal(
        pd.read_parquet(tmp_path / "forecast.parquet"),
        loaded.predict(4, data=load_table(230), samples=20, seed=3).frame(),
        check_dtype=False,
    )


def test_a_forecast_says_what_it_does(ran, tmp_path, capsys):
    frame = load_table().assign(flat=3.0)
    assert forecast(table(tmp_path, frame), "--backtest", 9, "--out", tmp_path / "out") == 0
    out, _ = printed(capsys)
    assert "3 series, 200 steps of h" in out
    assert "note: 'flat' is 3 throughout" in out
    assert "note: 200 steps leave room for 5 back-test windows of 6" in out
    assert "expected value: the" in out
    assert "Back-test: 5 windows of 6 steps that training did not see" in out
    for name in ("Diffusion Forcing", "seasonal naive (24)", "drift", "random walk", "ridge VAR", "in the 90 % band"):
        assert name in out
    for file in ("forecast.csv", "forecast.png"):
        assert f"wrote {tmp_path / 'out' / file}" in out


@pytest.mark.parametrize("kept", [False, True])
def test_the_back_test_is_of_windows_that_training_did_not_see(kept, tmp_path):
    forecaster = made(load_table(), folder=tmp_path if kept else None, test_windows=3)
    shown = backtest(forecaster, 10, 0, lambda *_: None)
    assert "3 windows of 6 steps" in shown.title
    assert shown.rows[0][0] == "Diffusion Forcing"
    assert all(float(row[1]) > 0 for row in shown.rows)
    assert forecaster.split.end == 200 - 3 * HORIZON


def test_a_forecaster_can_be_back_tested_after_another_was_fitted():
    forecaster = made(load_table(), test_windows=3)
    made(load_table(seed=1))
    assert "3 windows of 6 steps" in backtest(forecaster, 10, 0, lambda *_: None).title


@pytest.mark.parametrize(
    ("t", "horizon", "windows", "expected"), [(200, 6, 3, 3), (200, 6, 0, 0), (200, 24, 3, 0), (40, 6, 3, 0), (100, 6, 9, 2)]
)
def test_back_tests_leave_enough_to_learn_from(t, horizon, windows, expected):
    assert _room_for_backtest(t, horizon, windows) == expected


MISTAKES = {
    "a column": (["--time", "when"], "load.csv has no column 'when', which --time names; it has time, east, west"),
    "a value": (["--value-type", "counts"], "column 'east', row 2 is"),
    "the horizon": (["--horizon", 60], "the horizon"),
    "quantiles": (["--quantiles", 5, 95], "quantiles"),
    "no samples": (["--samples", 0], "--samples"),
    "no minutes": (["--minutes", 0], "minutes"),
    "a model": (["--model", "nowhere"], "nowhere holds no forecaster"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_end_with_a_message_and_without_a_forecast(mistake, tmp_path, capsys):
    words, message = MISTAKES[mistake]
    assert forecast(table(tmp_path, load_table()), "--out", tmp_path / "out", *words) == 2
    assert message in printed(capsys)[1]
    assert not list(tmp_path.rglob("forecast.*"))


def test_a_file_that_is_not_there_says_so(tmp_path, capsys):
    assert forecast(tmp_path / "none.csv", "--out", tmp_path / "out") == 2
    assert "there is no file" in printed(capsys)[1]
    assert not (tmp_path / "out").exists()


def test_a_file_with_more_series_than_the_model_is_drawn(ran, tmp_path):
    file = table(tmp_path, load_table().assign(north=np.arange(200.0)))
    assert forecast(file, "--model", ran / "out" / "model", "--out", tmp_path / "out") == 0
    assert (tmp_path / "out" / "forecast.png").exists()


def test_options_of_training_have_no_effect_on_a_model_and_say_so(ran, tmp_path, capsys):
    file = table(tmp_path, load_table())
    assert forecast(file, "--model", ran / "out" / "model", "--out", tmp_path / "out", backtest=5, season=12) == 0
    assert "--backtest, --minutes, --season are for training and have no effect" in " ".join(capsys.readouterr().out.split())


def test_a_model_knows_which_columns_are_known_in_advance(tmp_path):
    made(covariates_table(), known=["price", "rain"]).save(tmp_path / "model")
    file = table(tmp_path, covariates_table())
    assert forecast(file, "--model", tmp_path / "model", "--out", tmp_path / "out") == 0


def test_out_may_not_be_a_file(tmp_path, capsys):
    file = table(tmp_path, load_table())
    assert forecast(file, "--out", file) == 2
    assert "error:" in capsys.readouterr().err


def test_pictures_show_each_series_with_its_own_forecast(ran, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(command, "draw_fans", lambda panel, futures, file, **_: drawn.append((panel, futures)))
    file = table(tmp_path, load_table()[["time", "west", "east"]])
    assert forecast(file, "--model", ran / "out" / "model", "--out", tmp_path / "out") == 0
    [(panel, futures)] = drawn
    np.testing.assert_allclose(futures.mean((0, 1)), panel.values[-24:].mean(0), atol=12)


@pytest.mark.parametrize(("horizon", "columns", "message"), [(7, {}, "at most 6 steps; got 7"), (6, {"west": "north"}, "lack 'west'")])
def test_a_model_refuses_longer_horizons_and_other_series(horizon, columns, message, ran, tmp_path, capsys):
    file = table(tmp_path, load_table().rename(columns=columns))
    assert forecast(file, "--model", ran / "out" / "model", "--out", tmp_path / "out", horizon=horizon) == 2
    assert message in printed(capsys)[1]
    assert not list(tmp_path.rglob("forecast.*"))


def test_names_with_dollars_are_drawn(tmp_path):
    panel = from_frame(load_table(60).rename(columns={"east": "$east_{$", "west": "a $ and b_{ $"}))
    draw_fans(panel, np.zeros((5, 6, len(panel.names))), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
