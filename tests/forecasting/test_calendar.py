"""The clock, and the periods with which series repeat."""

import numpy as np
import pytest

pd = pytest.importorskip("pandas", reason="pandas comes with the extra `forecasting`")

from series import holed, panel_of, rng, walk, waves

from diffusion_forcing.forecasting import calendar
from diffusion_forcing.forecasting.calendar import clock_of, feature_periods, seasons_of
from diffusion_forcing.forecasting.panel import Panel

FREQS = ["h", "30min", "2h", "D", "B", "W", "W-WED", "MS", "ME", "QS", "QE", "YS", None, "BMS", "BME", "BQS"]
IRREGULAR = ["2MS", "2B", "SMS", "bh"]


@pytest.mark.parametrize("freq", [*FREQS, *IRREGULAR])
def test_the_clock_counts_steps_one_by_one(freq):
    clock = clock_of(panel_of(freq))
    assert clock.dtype == np.int64
    np.testing.assert_array_equal(np.diff(clock), 1)


@pytest.mark.parametrize(
    "freq",
    [
        *FREQS,
        *(pytest.param(f, marks=pytest.mark.xfail(strict=True, reason="counted from the first timestamp's month")) for f in IRREGULAR),
    ],
)
def test_a_timestamp_has_the_same_clock_in_a_longer_panel(freq):
    """With more rows after, and with more rows before."""
    whole = panel_of(freq, 90)
    clock = clock_of(whole)
    for cut in (slice(0, 60), slice(20, 80)):
        part = Panel(whole.values[cut], whole.names, whole.index[cut], whole.freq, whole.known[cut])
        np.testing.assert_array_equal(clock_of(part), clock[cut])


def test_the_clock_runs_on_when_clocks_are_put_forward():
    np.testing.assert_array_equal(np.diff(clock_of(panel_of("h", 400, start="2020-03-20", tz="Europe/Berlin"))), 1)


@pytest.mark.parametrize("freq", ["D", "B", "MS", "W-MON"])
@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York"])
def test_days_and_months_count_by_local_time(freq, zone):
    np.testing.assert_array_equal(clock_of(panel_of(freq, tz=zone)), clock_of(panel_of(freq)))


def test_weeks_start_on_mondays_and_days_at_midnight():
    for freq, week in (("h", 7 * 24), ("D", 7), ("B", 5)):
        assert clock_of(panel_of(freq, start="2024-01-01"))[0] % week == 0


@pytest.mark.parametrize(
    ("freq", "expected"),
    [("h", (24, 168)), ("30min", (48, 336)), ("2h", (12, 84)), ("D", (7,)), ("B", (5,)), ("W", (52,)), ("MS", (12,)), ("ME", (12,)),
     ("QS", (4,)), ("BME", (12,)), ("BQS", (4,)), ("2D", (1,)), ("5h", (1,)), ("2W", (1,)), ("2MS", (1,)), ("YS", (1,))],
)  # fmt: skip
def test_seasons_by_the_calendar(freq, expected):
    assert seasons_of(panel_of(freq, 220 if freq[-1] == "S" else 1344)) == expected


@pytest.mark.parametrize(("t", "expected"), [(95, (1,)), (96, (24,)), (671, (24,)), (672, (24, 168))])
def test_a_season_has_to_fit_in_four_times(t, expected):
    assert seasons_of(panel_of("h", t)) == expected


@pytest.mark.parametrize("period", [7, 24])
def test_without_dates_the_season_is_the_period_of_the_values(period):
    noisy = waves(400, 2, period) + 0.3 * rng().standard_normal((400, 2))
    assert seasons_of(panel_of(None, values=noisy)) == (period,)
    gappy = holed(np.column_stack([noisy, np.ones(400)]), (slice(50, 60), 0))
    assert calendar._autocorrelation_period(gappy) == period


@pytest.mark.parametrize("values", [rng().standard_normal((400, 1)), walk(400, 1), np.ones((400, 2)), waves(15, 1, 4)])
def test_what_does_not_repeat_has_no_season(values):
    assert calendar._autocorrelation_period(values) == 1


def test_features_have_periods_that_came_often():
    assert feature_periods(panel_of("h", 24 * 8), (24, 168)) == (24.0,)
    assert feature_periods(panel_of("D", 1600), (7,)) == (7.0, 365.25)
    assert feature_periods(panel_of(None, 200), (1,)) == ()


def test_days_last_a_day_in_versions_of_pandas_that_call_them_not_fixed():
    class Day(pd.offsets.Day):
        @property
        def nanos(self):
            raise ValueError("Day is a non-fixed frequency")

    assert calendar._seconds(Day(2)) == 2 * 86_400
