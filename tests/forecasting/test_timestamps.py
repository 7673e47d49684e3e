"""The time column of a table: which one it is, what its cells say, and the frequency."""

import numpy as np
import pytest

pd = pytest.importorskip("pandas", reason="pandas comes with the extra `forecasting`")

from series import hours, long, save

from diffusion_forcing.forecasting.reading import from_frame, read

# The time column.

DAYS = ["2020-01-01", "2020-01-02", "2020-01-03"]


@pytest.mark.parametrize(
    "columns",
    [
        {"a": [1, 2, 4], "When": pd.to_datetime(DAYS)},
        {"a": [1, 2, 4], "TimeStamp": DAYS},
        {"ds": DAYS, "a": [1, 2, 4]},
        {"a": [1, 2, 4], "whenever": DAYS},
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
def test_days_are_found(columns):
    found = from_frame(pd.DataFrame(columns))
    assert found.names == ("a",)
    assert found.freq == "D"
    assert found.index[0] in (pd.Timestamp("2020-01-01"), pd.Timestamp("2019-12-30"))
    assert found.values[:, 0].tolist() == [1, 2, 4]


@pytest.mark.parametrize(
    ("index", "freq"),
    [
        (pd.DatetimeIndex(DAYS, name="when"), "D"),
        (pd.DatetimeIndex(DAYS), "D"),
        (pd.date_range("2020-01-06", periods=3, freq="B"), "B"),
        (pd.period_range("2020-01", periods=3, freq="M"), "MS"),
        (pd.Index(DAYS), "D"),
        (pd.Index([4, 5, 6], name="step"), None),
    ],
)
def test_the_index_of_a_frame_may_be_the_time(index, freq):
    found = from_frame(pd.DataFrame({"a": [1, 2, 4]}, index=index))
    assert found.names == ("a",)
    assert found.freq == freq


def test_the_named_time_goes_first():
    frame = pd.DataFrame({"sent": pd.to_datetime(DAYS), "came": pd.to_datetime(["2021-01-01", "2021-02-01", "2021-03-01"]), "a": [1, 2, 4]})
    with pytest.raises(ValueError, match=r"dates in the columns sent, came; .*--time"):
        from_frame(frame)
    with pytest.raises(ValueError, match=r"column 'came', row 0.*is not a number; "):
        from_frame(frame, time="sent")
    assert from_frame(frame.assign(came=[1, 2, 4]), time="sent").names == ("came", "a")
    shops = long({"x": [1, 2, 3], "y": [4, 5, 6]})
    assert from_frame(shops.assign(came=shops["date"] + pd.Timedelta(days=9))).index[0] == pd.Timestamp("2020-01-01"), "`date` says it"
    with pytest.raises(ValueError, match="column 'whenever', row 2: 'soon' is neither a date"):
        from_frame(pd.DataFrame({"whenever": [*DAYS[:2], "soon"], "a": [1, 2, 4]}))
    with pytest.raises(ValueError, match="no column 'x', which --time names"):
        from_frame(frame, time="x")


@pytest.mark.parametrize("name", ["t", "Step", "index", "time"])
def test_whole_numbers_that_rise_are_a_clock_without_dates(name):
    found = from_frame(pd.DataFrame({name: [3, 4, 5, 7], "a": [1, 2, 4, 8]}))
    assert found.names == ("a",)
    assert found.index.equals(pd.RangeIndex(3, 8))
    assert found.freq is None
    assert np.isnan(found.values[3, 0])
    assert found.notes == ("1 missing step was inserted, at step 6",)
    falls = from_frame(pd.DataFrame({name: [3, 4, 4, 7], "a": [1, 2, 4, 8]}))
    assert falls.names == (name, "a"), "a series may be called so"
    assert f"column '{name}' was taken for a series; if it is the clock, name it with --time" in falls.notes
    assert from_frame(pd.DataFrame({name: [0.0, 0.5, 1.0], "a": [1, 2, 4]})).names == (name, "a"), "seconds are not counted"


def test_years_are_dates_where_they_are_the_clock():
    assert from_frame(pd.DataFrame({"year": [1990, 1991, 1992], "a": [1, 2, 4]})).freq == "YS-JAN"
    assert from_frame(pd.DataFrame({"date": DAYS, "year": [2020] * 3, "a": [1, 2, 4]})).names == ("year", "a")
    assert from_frame(pd.DataFrame({"year": [2020] * 3, "a": [1, 2, 4]})).index.equals(pd.RangeIndex(3))


def test_a_frame_that_counts_from_elsewhere_goes_on_from_there():
    frame = pd.DataFrame({"a": np.arange(40.0)})
    assert from_frame(frame.iloc[10::2]).index.equals(pd.RangeIndex(10, 40, 2))
    assert from_frame(frame.assign(date=pd.date_range("2020-01-01", periods=40)).iloc[10:]).freq == "D", "dates go first"


def test_a_series_of_pandas_is_a_frame_of_one_column():
    days = pd.date_range("2020-01-01", periods=5)
    assert from_frame(pd.Series(np.arange(5.0), index=days)).names == ("value",)
    assert from_frame(pd.Series(np.arange(5.0), index=days, name="load")).names == ("load",)


def test_numbers_alone_are_counted_from_0():
    found = from_frame(pd.DataFrame({"row": [1, 2, 4], "b": [True, False, True]}))
    assert found.index.equals(pd.RangeIndex(3))
    assert found.names == ("row", "b")
    assert found.values.tolist() == [[1, 1], [2, 0], [4, 1]]
    with pytest.raises(ValueError, match="counts its steps without dates, so --freq h has no meaning"):
        from_frame(pd.DataFrame({"a": [1, 2, 4]}), freq="h")


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (["2020-01-01", "2020-01-32", "2020-01-03"], "column 'date', row 1: '2020-01-32' is neither a date"),
        (["2020-01-01", "", "2020-01-03"], "column 'date', row 1 has no timestamp though the row has values"),
        (["01/02/2020", "02/02/2020", "03/02/2020"], "column 'date': '01/02/2020' may be 2020-01-02 or 2020-02-01"),
        (["morning", "noon", "night"], "row 0: 'morning' is neither a date"),
        ([0.5, 1.0, 1.5], "row 0: '0.5' is neither a date nor"),
    ],
)
def test_stamps_that_are_none(cells, words):
    with pytest.raises(ValueError, match=words):
        from_frame(pd.DataFrame({"date": cells, "a": [1, 2, 4]}), time="date")


def test_a_time_column_needs_stamps():
    with pytest.raises(ValueError, match="column 'date' has no timestamps; name another with --time"):
        from_frame(pd.DataFrame({"date": [None] * 3, "a": [None] * 3}), time="date")


def test_dates_beyond_pandas_own():
    stamps = np.array(["2020-01-01", "2020-01-02", "9999-12-31"], dtype="datetime64[s]")
    with pytest.raises(ValueError, match="column 'date' has dates outside the years 1678 to 2261"):
        from_frame(pd.DataFrame({"date": stamps, "a": [1, 2, 4]}))


def test_words_that_pandas_takes_for_dates_are_none():
    with pytest.raises(ValueError, match="column 'x', row 0: 'now' is not a number"):
        from_frame(pd.DataFrame({"x": ["now", "today", "now"], "a": [1, 2, 4]}))


def test_stamps_with_offsets_are_read_in_utc():
    found = from_frame(
        pd.DataFrame({"time": ["2020-03-29 01:00+01:00", "2020-03-29 03:00+02:00", "2020-03-29 04:00+02:00"], "a": [1, 2, 4]})
    )
    assert found.freq == "h"
    assert found.index[0] == pd.Timestamp("2020-03-29", tz="UTC")


def test_days_of_a_time_zone_keep_midnight_over_the_change_of_clocks():
    stamps = pd.date_range("2020-03-27", periods=6, freq="D", tz="Europe/Berlin").delete(1)
    found = from_frame(pd.DataFrame({"time": stamps, "a": np.arange(5)}))
    assert found.freq == "D"
    assert len(found.index) == 6
    assert set(found.index.hour) == {0}


def days_and_times(day="%Y-%m-%d", hour="%H:%M", t=72, **columns):
    stamps = pd.date_range("2026-01-01", periods=t, freq="h")
    return pd.DataFrame({"date": stamps.strftime(day), "time": stamps.strftime(hour), **(columns or {"load": np.arange(float(t))})})


@pytest.mark.parametrize(("day", "hour"), [("%Y-%m-%d", "%H:%M"), ("%d/%m/%Y", "%H:%M:%S"), ("%Y%m%d", "%I:%M %p")])
def test_dates_and_times_of_day_in_two_columns_are_one_clock(tmp_path, day, hour):
    frame = days_and_times(day, hour, t=24 * 20)
    found = read(save(tmp_path, frame.to_csv(index=False)))
    assert found.names == ("load",)
    assert found.index.equals(pd.date_range("2026-01-01", periods=480, freq="h"))
    np.testing.assert_array_equal(found.values[:, 0], np.arange(480))
    assert found.notes == ("the dates in 'date' and the times of day in 'time' were read together",)


@pytest.mark.parametrize("time", ["date", "time"])
def test_either_of_date_and_time_may_be_named(time):
    assert from_frame(days_and_times(), time=time).freq == "h"


def test_dates_and_times_of_a_long_table_are_one_clock():
    frame = pd.concat([days_and_times().assign(shop=shop) for shop in ("x", "y")])
    found = from_frame(frame)
    assert (found.names, found.freq, len(found.values)) == (("x", "y"), "h", 72)
    noon = days_and_times(t=96).query("time == '12:00'")
    daily = from_frame(pd.concat([noon.assign(shop=shop) for shop in ("x", "y")]))
    assert (daily.names, daily.freq, daily.notes) == (("x", "y"), "D", ()), "days alone are a clock"


def test_a_day_may_end_at_24():
    frame = days_and_times().assign(time=lambda f: f["time"].replace("00:00", "24:00"))
    assert from_frame(frame.iloc[1:24]).index[0] == pd.Timestamp("2026-01-01 01:00")
    assert from_frame(frame.iloc[[0, *range(24, 72)]]).index[0] == pd.Timestamp("2026-01-02")


@pytest.mark.parametrize("cell", ["25:00", "", "noon"])
def test_a_time_of_day_that_is_none_is_named(cell):
    frame = days_and_times()
    frame.loc[5, "time"] = cell
    with pytest.raises(ValueError, match=f"column 'time', row 5: '{cell}' is no time of day to go with the date in 'date'"):
        from_frame(frame)


def test_times_of_day_alone_are_no_dates():
    with pytest.raises(ValueError, match="'00:00' is neither a date nor"):
        from_frame(days_and_times(t=24).drop(columns="date"))


def test_no_column_of_dates_tells_series_apart():
    frame = pd.DataFrame({"time": DAYS * 2, "entered": [f"2021-01-0{i}" for i in range(1, 7)], "a": np.arange(6)})
    with pytest.raises(ValueError, match="column 'entered', row 0: '2021-01-01' is not a number"):
        from_frame(frame)


def test_days_with_offsets_keep_midnight_over_the_change_of_clocks():
    stamps = pd.date_range("2020-03-27", periods=6, freq="D", tz="Europe/Berlin")
    found = from_frame(pd.DataFrame({"time": [stamp.isoformat() for stamp in stamps], "a": np.arange(6)}))
    assert found.freq == "D"
    assert found.index.equals(stamps.tz_localize(None))
    assert found.notes == ("the offsets in 'time' change, and its timestamps are midnights: they were read as days, without a zone",)


def test_an_offset_may_be_of_hours_alone():
    found = from_frame(pd.DataFrame({"time": [f"2020-01-01 0{i}:00:00+01" for i in range(4)], "a": np.arange(4)}))
    assert found.freq == "h"
    assert found.index[0] == pd.Timestamp("2019-12-31 23:00", tz="UTC")


@pytest.mark.parametrize(("form", "freq"), [("%Y%m", "MS"), ("%Y%m%d%H", "h"), ("%Y%m%d%H%M", "15min")])
def test_dates_may_be_written_as_numbers(form, freq):
    stamps = pd.date_range("2020-01-01", periods=30, freq=freq)
    found = from_frame(pd.DataFrame({"date": stamps.strftime(form).astype(np.int64), "a": np.arange(30)}))
    assert found.freq == freq
    assert found.index.equals(stamps)
    assert found.notes == ()


def test_numbers_that_are_no_dates_are_still_counted():
    assert from_frame(pd.DataFrame({"time": np.arange(202001, 202031), "a": np.arange(30)})).freq is None


# Frequencies.


@pytest.mark.parametrize(("freq", "every"), [("D", "W-WED"), ("D", "MS"), ("MS", "QS"), ("h", "6h")])
def test_a_column_that_ticks_more_slowly_than_the_table_is_named(freq, every):
    stamps = pd.date_range("2020-01-01", periods=300, freq=freq)
    slow = pd.Series(1.0, index=pd.date_range("2020-01-01", stamps[-1], freq=every)).reindex(stamps).to_numpy()
    frame = pd.DataFrame({"date": stamps, "fast": np.arange(300.0), "slow": slow})
    row = np.flatnonzero(~np.isnan(slow))[1]
    with pytest.raises(ValueError, match=f"column 'slow', row {row}: the frame mixes frequencies: column 'slow'"):
        from_frame(frame)
    assert from_frame(frame, freq=freq).names == ("fast", "slow")
    assert from_frame(frame.drop(columns="fast")).names == ("slow",), "alone it may have gaps"
    frame.loc[row, "slow"] = np.nan
    assert from_frame(frame).names == ("fast", "slow"), "what is not steady has gaps"


FREQS = ["h", "30min", "s", "D", "2D", "B", "W-WED", "MS", "ME", "QS-OCT", "YE-DEC"]


@pytest.mark.parametrize("freq", FREQS)
@pytest.mark.parametrize("gap", [False, True])
def test_the_frequency_is_found(freq, gap):
    stamps = pd.date_range("2020-01-31", periods=16, freq=freq)
    left = stamps.delete([4, 5, 9]) if gap else stamps
    found = from_frame(pd.DataFrame({"time": left[::-1], "a": np.arange(len(left), dtype=float)}))
    assert found.index.equals(stamps), "sorted, and whole again"
    assert found.values[-1, 0] == 0
    assert pd.date_range(stamps[0], periods=20, freq=found.freq).equals(pd.date_range(stamps[0], periods=20, freq=freq))
    assert np.isnan(found.values[:, 0]).nonzero()[0].tolist() == ([4, 5, 9] if gap else [])
    if not gap:
        assert found.freq == freq
        assert found.notes == ()


@pytest.mark.parametrize(
    ("freq", "lost", "note"),
    [
        ("h", [1], "1 missing hour was inserted, at 2020-01-31 01:00:00"),
        ("B", [1, 2], "2 missing business days were inserted, the first at 2020-02-03"),
        ("ME", [1, 2], "2 missing months were inserted, the first at 2020-02-29"),
        ("30min", [1, 2], "2 missing steps of 30min were inserted, the first at 2020-01-31 00:30:00"),
    ],
)
def test_gaps_are_told(freq, lost, note):
    stamps = pd.date_range("2020-01-31", periods=9, freq=freq).delete(lost)
    assert from_frame(pd.DataFrame({"time": stamps, "a": range(len(stamps))})).notes == (note,)


def test_a_given_frequency_is_taken():
    stamps = pd.date_range("2020-01-06", periods=5, freq="D")
    assert from_frame(pd.DataFrame({"time": stamps, "a": range(5)})).freq == "D"
    assert from_frame(pd.DataFrame({"time": stamps, "a": range(5)}), freq="B").freq == "B"
    halves = from_frame(hours(4), freq="30min")
    assert halves.values.shape == (7, 2)
    assert halves.freq == "30min"
    assert from_frame(hours(4), freq="H").freq == "h", "as pandas called it before"
    with pytest.raises(ValueError, match="'fortnight' is not an offset of pandas; write h, 30min"):
        from_frame(hours(4), freq="fortnight")


@pytest.mark.parametrize(
    ("stamps", "freq", "words"),
    [
        (
            ["00:00", "01:00", "02:10", "03:00", "04:00"],
            None,
            "row 2: 2020-01-01 02:10:00 is off.* 02:00:00 before and .* 03:00:00 after.*--freq",
        ),
        (["00:07", "01:00", "02:00", "03:00", "04:00"], None, "row 0: 2020-01-01 00:07:00 is off.*2020-01-01 before and .* 01:00:00 after"),
        (["00:00", "01:00", "02:00", "03:00", "03:40"], None, "row 4: .* 03:00:00 before and .* 04:00:00 after"),
        (["00:07", "01:30", "03:00", "04:00", "05:00"], None, "row 0: .*00:07:00 is off.*2020-01-01 before and .* 01:00:00 after"),
        (["00:00", "01:00", "02:00"], "D", "row 1: .*01:00:00 is off.*2020-01-01 before and 2020-01-02 after"),
        (["00:00", "01:00", "02:00"], "YS-FEB", "row 0: 2020-01-01 is off.*2019-02-01 before and 2020-02-01 after"),
    ],
)
def test_stamps_off_the_clock(stamps, freq, words):
    frame = pd.DataFrame({"time": [f"2020-01-01 {stamp}" for stamp in stamps], "a": range(len(stamps))})
    with pytest.raises(ValueError, match=words):
        from_frame(frame, freq=freq)


def test_one_day_that_slipped_does_not_hide_that_data_are_monthly():
    stamps = pd.Series(pd.date_range("2020-01-01", periods=12, freq="MS"))
    stamps[5] = pd.Timestamp("2020-06-02")
    with pytest.raises(
        ValueError, match="row 5: 2020-06-02 is off the clock, which has 2020-06-01 before and 2020-07-01 after it in steps of MS"
    ):
        from_frame(pd.DataFrame({"date": stamps, "a": range(12)}))


def test_counted_steps_off_the_clock():
    with pytest.raises(ValueError, match="column 't', row 3: step 35 is off the clock, which has step 30 before and step 40 after"):
        from_frame(pd.DataFrame({"t": [0, 10, 20, 35, 40], "a": range(5)}))


def test_a_stamp_of_another_age_is_not_filled_up_to():
    stamps = ["1970-01-01 00:00", *pd.date_range("2020-01-01", periods=9, freq="h").astype(str)]
    with pytest.raises(ValueError, match=r"10 timestamps from 1970-01-01 to 2020-01-01 08:00:00, which would be \d+ steps"):
        from_frame(pd.DataFrame({"time": stamps, "a": range(10)}))


def test_a_clock_needs_three_timestamps():
    assert len(from_frame(hours(3)).values) == 3
    for t in (1, 2):
        with pytest.raises(ValueError, match=f"{t} different timestamps; a clock needs at least 3"):
            from_frame(hours(t))


def test_duplicate_stamps_of_a_wide_table(tmp_path):
    text = "time,a\n2020-01-01,1\n2020-01-02,2\n2020-01-03,5\n2020-01-02,3\n"
    with pytest.raises(ValueError, match=r"column 'time', row 5: 2020-01-02 is in row 3 already; keep one of the rows.*--id"):
        read(save(tmp_path, text))
