"""The time column of a table: which one it is, what its cells say, and the frequency."""

import numpy as np
import pytest

pd = pytest.importorskip("pandas", reason="pandas comes with the extra `forecasting`")

from series import hours, long, save

from diffusion_forcing.forecasting.reading import from_frame, read

DAYS = ["2020-01-01", "2020-01-02", "2020-01-03"]


def dated(cells, **columns):
    """A frame of cells in a column `date`, and a series."""
    return pd.DataFrame({"date": cells, **(columns or {"a": 2.0 ** np.arange(len(cells))})})


# The time column.


@pytest.mark.parametrize(
    "columns",
    [
        {"a": [1, 2, 4], "When": pd.to_datetime(DAYS)},
        {"a": [1, 2, 4], "TimeStamp": DAYS},
        {"ds": DAYS, "a": [1, 2, 4]},
        {"a": [1, 2, 4], "whenever": pd.array(DAYS, dtype="string")},
        {"whenever": pd.Categorical(DAYS), "a": [1, 2, 4]},
        {"a": [1, 2, 4], "date": [20200101, 20200102, 20200103]},
        {"a": [1, 2, 4], "x": pd.PeriodIndex(DAYS, freq="D")},
        {"a": [1, 2, 4], "x": [pd.Timestamp(day).date() for day in DAYS]},
        {"date": ["30/12/2019", "31/12/2019", "01/01/2020"], "a": [1, 2, 4]},
        {"date": ["12/30/2019", "12/31/2019", "01/01/2020"], "a": [1, 2, 4]},
        {"date": ["30 Dec 2019", "31 Dec 2019", "1 Jan 2020"], "a": [1, 2, 4]},
    ],
)
def test_dates_are_found_in_any_column_and_format(columns):
    panel = from_frame(pd.DataFrame(columns))
    assert (panel.names, panel.freq) == (("a",), "D")
    assert panel.index[0] in (pd.Timestamp("2020-01-01"), pd.Timestamp("2019-12-30"))
    assert panel.values[:, 0].tolist() == [1, 2, 4]


@pytest.mark.parametrize(
    ("index", "freq"),
    [
        (pd.DatetimeIndex(DAYS, name="when"), "D"),
        (pd.date_range("2020-01-06", periods=3, freq="B"), "B"),
        (pd.period_range("2020-01", periods=3, freq="M"), "MS"),
        (pd.Index(DAYS), "D"),
        (pd.Index([4, 5, 6], name="step"), None),
    ],
)
def test_the_index_of_a_frame_may_be_the_time(index, freq):
    panel = from_frame(pd.DataFrame({"a": [1, 2, 4]}, index=index))
    assert (panel.names, panel.freq) == (("a",), freq)


def test_of_two_date_columns_the_named_one_is_the_time():
    frame = pd.DataFrame({"sent": pd.to_datetime(DAYS), "came": pd.to_datetime(["2021-01-01", "2021-02-01", "2021-03-01"]), "a": [1, 2, 4]})
    with pytest.raises(ValueError, match=r"sent, came; .*--time"):
        from_frame(frame)
    assert from_frame(frame.assign(came=[1, 2, 4]), time="sent").names == ("came", "a")
    shops = long({"x": [1, 2, 3], "y": [4, 5, 6]})
    assert from_frame(shops.assign(came=shops["date"] + pd.Timedelta(days=9))).index[0] == pd.Timestamp("2020-01-01"), "a column `date`"


@pytest.mark.parametrize("name", ["t", "Step", "index", "time"])
def test_increasing_whole_numbers_are_a_clock_without_dates(name):
    panel = from_frame(pd.DataFrame({name: [3, 4, 5, 7], "a": [1, 2, 4, 8]}))
    assert (panel.names, panel.freq) == (("a",), None)
    assert panel.index.equals(pd.RangeIndex(3, 8))
    assert np.isnan(panel.values[3, 0])
    assert panel.notes == ("1 missing step was inserted, at step 6",)
    repeated = from_frame(pd.DataFrame({name: [3, 4, 4, 7], "a": [1, 2, 4, 8]}))
    assert repeated.names == (name, "a"), "a series may have the name"
    assert any("--time" in note for note in repeated.notes)
    assert from_frame(pd.DataFrame({name: [0.0, 0.5, 1.0], "a": [1, 2, 4]})).names == (name, "a"), "fractions are not counted"


def test_years_are_dates_where_they_are_the_clock():
    assert from_frame(pd.DataFrame({"year": [1990, 1991, 1992], "a": [1, 2, 4]})).freq == "YS-JAN"
    assert from_frame(pd.DataFrame({"date": DAYS, "year": [2020] * 3, "a": [1, 2, 4]})).names == ("year", "a")
    assert from_frame(pd.DataFrame({"year": [2020] * 3, "a": [1, 2, 4]})).index.equals(pd.RangeIndex(3))


def test_without_a_time_column_rows_are_counted():
    panel = from_frame(pd.DataFrame({"row": [1, 2, 4], "b": [True, False, True]}))
    assert panel.index.equals(pd.RangeIndex(3))
    assert panel.values.tolist() == [[1, 1], [2, 0], [4, 1]]
    frame = pd.DataFrame({"a": np.arange(40.0)})
    assert from_frame(frame.iloc[10::2]).index.equals(pd.RangeIndex(10, 40, 2)), "by the frame's own index"
    assert from_frame(frame.assign(date=pd.date_range("2020-01-01", periods=40)).iloc[10:]).freq == "D", "but dates go first"
    with pytest.raises(ValueError, match="--freq h"):
        from_frame(pd.DataFrame({"a": [1, 2, 4]}), freq="h")


def test_a_series_of_pandas_is_a_frame_of_one_column():
    days = pd.date_range("2020-01-01", periods=5)
    for name, expected in ((None, "value"), ("load", "load")):
        assert from_frame(pd.Series(np.arange(5.0), index=days, name=name)).names == (expected,)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (dated(["2020-01-01", "2020-01-32", "2020-01-03"]), "column 'date', row 1: '2020-01-32' is neither a date"),
        (dated(["2020-01-01", "", "2020-01-03"]), "column 'date', row 1 has no timestamp"),
        (dated(["01/02/2020", "02/02/2020", "03/02/2020"]), "'01/02/2020' may be 2020-01-02 or 2020-02-01"),
        (dated(["morning", "noon", "night"]), "row 0: 'morning' is neither a date"),
        (dated([0.5, 1.0, 1.5]), "row 0: '0.5' is neither a date nor"),
        (dated([None] * 3, a=[None] * 3), "column 'date' has no timestamps"),
        (dated(np.array([*DAYS[:2], "9999-12-31"], dtype="datetime64[s]")), "outside the years 1678 to 2261"),
    ],
)
def test_cells_that_are_no_timestamps_are_named(frame, words):
    with pytest.raises(ValueError, match=words):
        from_frame(frame, time="date")


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"whenever": [*DAYS[:2], "soon"], "a": [1, 2, 4]}, "column 'whenever', row 2: 'soon' is neither a date"),
        ({"x": ["now", "today", "now"], "a": [1, 2, 4]}, "column 'x', row 0: 'now' is not a number"),
        ({"time": DAYS * 2, "entered": [f"2021-01-0{i}" for i in range(1, 7)], "a": range(6)}, "column 'entered', row 0"),
    ],
)
def test_words_and_other_dates_are_no_time(columns, words):
    with pytest.raises(ValueError, match=words):
        from_frame(pd.DataFrame(columns))


@pytest.mark.parametrize(
    ("cells", "start"),
    [
        (["2020-03-29 01:00+01:00", "2020-03-29 03:00+02:00", "2020-03-29 04:00+02:00"], "2020-03-29"),
        ([f"2020-01-01 0{i}:00:00+01" for i in range(4)], "2019-12-31 23:00"),
    ],
)
def test_timestamps_with_offsets_are_read_in_utc(cells, start):
    panel = from_frame(dated(cells))
    assert panel.freq == "h"
    assert panel.index[0] == pd.Timestamp(start, tz="UTC")


def test_days_of_a_time_zone_keep_midnight_when_clocks_change():
    stamps = pd.date_range("2020-03-27", periods=6, freq="D", tz="Europe/Berlin")
    panel = from_frame(dated(stamps.delete(1)))
    assert (panel.freq, len(panel.index), set(panel.index.hour)) == ("D", 6, {0})
    panel = from_frame(dated([stamp.isoformat() for stamp in stamps]))
    assert panel.freq == "D"
    assert panel.index.equals(stamps.tz_localize(None))
    assert panel.notes == ("the offsets in 'date' change, and its timestamps are midnights: they were read as days, without a zone",)


@pytest.mark.parametrize(("form", "freq"), [("%Y%m", "MS"), ("%Y%m%d%H", "h"), ("%Y%m%d%H%M", "15min")])
def test_dates_may_be_written_as_numbers(form, freq):
    stamps = pd.date_range("2020-01-01", periods=30, freq=freq)
    panel = from_frame(dated(stamps.strftime(form).astype(np.int64)))
    assert (panel.freq, panel.notes) == (freq, ())
    assert panel.index.equals(stamps)
    assert from_frame(dated(np.arange(202001, 202031))).freq is None, "numbers that are not all dates are counted"


# Dates and times of day in two columns.


def days_and_times(day="%Y-%m-%d", hour="%H:%M", t=72):
    stamps = pd.date_range("2026-01-01", periods=t, freq="h")
    return pd.DataFrame({"date": stamps.strftime(day), "time": stamps.strftime(hour), "load": np.arange(float(t))})


@pytest.mark.parametrize(("day", "hour"), [("%Y-%m-%d", "%H:%M"), ("%d/%m/%Y", "%H:%M:%S"), ("%Y%m%d", "%I:%M %p")])
def test_dates_and_times_of_day_are_one_clock(tmp_path, day, hour):
    panel = read(save(tmp_path, days_and_times(day, hour, t=24 * 20).to_csv(index=False)))
    assert panel.names == ("load",)
    assert panel.index.equals(pd.date_range("2026-01-01", periods=480, freq="h"))
    np.testing.assert_array_equal(panel.values[:, 0], np.arange(480))
    assert panel.notes == ("the dates in 'date' and the times of day in 'time' were read together",)


def test_either_of_date_and_time_may_be_named():
    for time in ("date", "time"):
        assert from_frame(days_and_times(), time=time).freq == "h"


def test_dates_and_times_of_a_long_table_are_one_clock():
    panel = from_frame(pd.concat([days_and_times().assign(shop=shop) for shop in ("x", "y")]))
    assert (panel.names, panel.freq, len(panel.values)) == (("x", "y"), "h", 72)
    noon = days_and_times(t=96).query("time == '12:00'")
    daily = from_frame(pd.concat([noon.assign(shop=shop) for shop in ("x", "y")]))
    assert (daily.names, daily.freq, daily.notes) == (("x", "y"), "D", ()), "days alone are a clock"


def test_a_day_may_end_at_24():
    frame = days_and_times().assign(time=lambda f: f["time"].replace("00:00", "24:00"))
    assert from_frame(frame.iloc[1:24]).index[0] == pd.Timestamp("2026-01-01 01:00")
    assert from_frame(frame.iloc[[0, *range(24, 72)]]).index[0] == pd.Timestamp("2026-01-02")


def test_times_of_day_that_are_none_or_alone_are_named():
    for cell in ("25:00", "", "noon"):
        frame = days_and_times()
        frame.loc[5, "time"] = cell
        with pytest.raises(ValueError, match=f"column 'time', row 5: '{cell}' is no time of day"):
            from_frame(frame)
    with pytest.raises(ValueError, match="'00:00' is neither a date nor"):
        from_frame(days_and_times(t=24).drop(columns="date"))


# Frequencies.


@pytest.mark.parametrize("freq", ["h", "30min", "s", "D", "2D", "B", "W-WED", "MS", "ME", "QS-OCT", "YE-DEC"])
def test_the_frequency_is_inferred(freq):
    stamps = pd.date_range("2020-01-31", periods=16, freq=freq)
    whole = from_frame(dated(stamps))
    assert (whole.freq, whole.notes) == (freq, ())
    gappy = from_frame(dated(stamps.delete([4, 5, 9])[::-1]))
    assert gappy.index.equals(stamps), "sorted, and whole again"
    assert gappy.values[-1, 0] == 1
    assert pd.date_range(stamps[0], periods=20, freq=gappy.freq).equals(pd.date_range(stamps[0], periods=20, freq=freq))
    assert np.isnan(gappy.values[:, 0]).nonzero()[0].tolist() == [4, 5, 9]


@pytest.mark.parametrize(
    ("freq", "lost", "note"),
    [
        ("h", [1], "1 missing hour was inserted, at 2020-01-31 01:00:00"),
        ("B", [1, 2], "2 missing business days were inserted, the first at 2020-02-03"),
        ("ME", [1, 2], "2 missing months were inserted, the first at 2020-02-29"),
        ("30min", [1, 2], "2 missing steps of 30min were inserted, the first at 2020-01-31 00:30:00"),
    ],
)
def test_inserted_steps_are_noted(freq, lost, note):
    assert from_frame(dated(pd.date_range("2020-01-31", periods=9, freq=freq).delete(lost))).notes == (note,)


def test_a_given_frequency_is_used():
    days = dated(pd.date_range("2020-01-06", periods=5, freq="D"))
    assert (from_frame(days).freq, from_frame(days, freq="B").freq) == ("D", "B")
    halves = from_frame(hours(4), freq="30min")
    assert (halves.freq, halves.values.shape) == ("30min", (7, 2))
    assert from_frame(hours(4), freq="H").freq == "h", "a deprecated alias"
    with pytest.raises(ValueError, match="'fortnight' is not an offset of pandas"):
        from_frame(hours(4), freq="fortnight")


def clock_cells(*times):
    return dated([f"2020-01-01 {time}" for time in times])


@pytest.mark.parametrize(
    ("frame", "freq", "words"),
    [
        (clock_cells("00:00", "01:00", "02:10", "03:00", "04:00"), None,
         "row 2: 2020-01-01 02:10:00 is off.* 02:00:00 before and .* 03:00:00 after.*--freq"),
        (clock_cells("00:07", "01:00", "02:00", "03:00", "04:00"), None, "row 0: .* 00:07:00 is off.*2020-01-01 before and .* 01:00:00"),
        (clock_cells("00:00", "01:00", "02:00", "03:00", "03:40"), None, "row 4: .* 03:00:00 before and .* 04:00:00 after"),
        (clock_cells("00:07", "01:30", "03:00", "04:00", "05:00"), None, "row 0: .*00:07:00 is off.*2020-01-01 before and .* 01:00:00"),
        (clock_cells("00:00", "01:00", "02:00"), "D", "row 1: .*01:00:00 is off.*2020-01-01 before and 2020-01-02 after"),
        (clock_cells("00:00", "01:00", "02:00"), "YS-FEB", "row 0: 2020-01-01 is off.*2019-02-01 before and 2020-02-01 after"),
        (dated([pd.Timestamp(2020, month, 2 if month == 6 else 1) for month in range(1, 13)]), None, "row 5: 2020-06-02 .* steps of MS"),
        (pd.DataFrame({"t": [0, 10, 20, 35, 40], "a": range(5)}), None, "row 3: step 35 is off .* step 30 before and step 40 after"),
        (dated(["1970-01-01 00:00", *pd.date_range("2020-01-01", periods=9, freq="h").astype(str)]), None,
         r"10 timestamps from 1970-01-01 to 2020-01-01 08:00:00, which would be \d+ steps"),
        (hours(2), None, "2 different timestamps; a clock needs at least 3"),
        (dated(["2020-01-01", "2020-01-02", "2020-01-03", "2020-01-02"]), None, r"row 3: 2020-01-02 is in row 1 already.*--id"),
    ],
)  # fmt: skip
def test_timestamps_off_the_clock_are_named(frame, freq, words):
    with pytest.raises(ValueError, match=words):
        from_frame(frame, freq=freq)


@pytest.mark.parametrize(("freq", "every"), [("D", "W-WED"), ("D", "MS"), ("MS", "QS"), ("h", "6h")])
def test_a_column_of_a_lower_frequency_is_named(freq, every):
    stamps = pd.date_range("2020-01-01", periods=300, freq=freq)
    slow = pd.Series(1.0, index=pd.date_range("2020-01-01", stamps[-1], freq=every)).reindex(stamps).to_numpy()
    frame = dated(stamps, fast=np.arange(300.0), slow=slow)
    row = np.flatnonzero(~np.isnan(slow))[1]
    with pytest.raises(ValueError, match=f"column 'slow', row {row}: the frame mixes frequencies"):
        from_frame(frame)
    assert from_frame(frame, freq=freq).names == ("fast", "slow")
    assert from_frame(frame.drop(columns="fast")).names == ("slow",), "alone it may have gaps"
    frame.loc[row, "slow"] = np.nan
    assert from_frame(frame).names == ("fast", "slow"), "irregular values are gaps"


@pytest.mark.parametrize(("one", "other"), [("h", "D"), ("D", "W-MON"), ("MS", "QS-OCT")])
def test_series_of_a_long_table_with_different_frequencies_are_named(one, other):
    frame = pd.concat([long({"x": range(9)}, "2020-01-01", one), long({"y": range(9)}, "2020-01-01", other)])
    with pytest.raises(ValueError, match=f"mixes frequencies: series 'x' is spaced by {one}, series 'y' by {other}; .*--freq"):
        from_frame(frame)
    assert np.isfinite(from_frame(frame, freq=one).values).sum(axis=0).tolist() == [9, 9], "with --freq they are gaps"


def test_months_of_different_length_are_one_frequency():
    frame = pd.concat([long({"x": range(3)}, "2020-01-01", "MS"), long({"y": range(4)}, "2020-04-01", "MS")])
    assert from_frame(frame, id="shop").freq == "MS"
    with pytest.raises(ValueError, match="series 'x' is spaced by 1, series 'y' by 2"):
        from_frame(pd.DataFrame({"t": [0, 1, 2, 0, 2, 4], "id": list("xxxyyy"), "v": range(6)}))
