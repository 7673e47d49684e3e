"""Series from files: what is found out by itself, what is complained of, by column and row, and the public sets."""

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pd = pytest.importorskip("pandas", reason="pandas comes with the extra `forecasting`")

from diffusion_forcing.forecasting import panel as series
from diffusion_forcing.forecasting.panel import NAMED, Named, Panel, check_horizon, from_frame, load_named, read, write_frame

SHARED = Path(__file__).parents[2] / "shared" / "data"


def hours(t, **columns):
    """A wide frame of t hours, its columns 0 .. t-1 unless given."""
    return pd.DataFrame(
        {"time": pd.date_range("2020-01-01", periods=t, freq="h"), **(columns or {"a": np.arange(t), "b": np.arange(t) * 2.0})}
    )


def save(tmp_path, text, name="data.csv"):
    file = tmp_path / name
    file.write_text(text)
    return file


def same(one, other):
    np.testing.assert_array_equal(one.values, other.values)
    np.testing.assert_array_equal(one.known, other.known)
    assert (one.names, one.freq, one.known_names) == (other.names, other.freq, other.known_names)
    assert one.index.equals(other.index)


# The panel.


def panel(t=6, d=2, **changes):
    parts = {"values": np.arange(t * d, dtype=float).reshape(t, d), "names": ("a", "b")[:d], "known": np.empty((t, 0)), "freq": "h"}
    return Panel(**{**parts, "index": pd.date_range("2020-01-01", periods=t, freq="h"), **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"values": np.zeros(6)}, r"shape \(t, d\)"),
        ({"values": np.zeros((6, 3))}, "2 names; got"),
        ({"values": np.zeros((5, 2))}, "each of the 5 rows of values; got 6"),
        ({"names": ("a", "a")}, "'a' stands twice"),
        ({"known": np.zeros((6, 1)), "known_names": ("a",)}, "'a' stands twice"),
        ({"known": np.zeros((5, 1)), "known_names": ("x",)}, "6 rows at least"),
        ({"known": np.zeros((6, 1))}, "0 known_names"),
        ({"known": np.full((6, 1), np.nan), "known_names": ("x",)}, "'x' is nan at step 0"),
        ({"values": np.array([[0, 0]] * 4 + [[0, np.inf]] * 2)}, "'b' is inf at step 4"),
        ({"freq": None}, "DatetimeIndex with a freq"),
        ({"freq": "D"}, "steps of freq 'D'"),
        ({"index": pd.RangeIndex(6)}, "without dates has no freq"),
        ({"index": pd.RangeIndex(6, 0, -1), "freq": None}, "runs forward"),
        ({"index": pd.Index(list("abcdef"))}, "got Index"),
    ],
)
def test_a_panel_checks_itself(changes, words):
    with pytest.raises(ValueError, match=words):
        panel(**changes)


@pytest.mark.parametrize(
    ("index", "freq", "expected"),
    [
        (pd.date_range("2020-01-01", periods=6, freq="h"), "h", ["2020-01-01 06:00", "2020-01-01 07:00"]),
        (pd.date_range("2020-01-03", periods=6, freq="B"), "B", ["2020-01-13", "2020-01-14"]),
        (pd.date_range("2020-01-31", periods=6, freq="ME"), "ME", ["2020-07-31", "2020-08-31"]),
    ],
)
def test_the_future_goes_on_at_the_panels_frequency(index, freq, expected):
    assert list(panel(index=index, freq=freq).future(2)) == [pd.Timestamp(stamp) for stamp in expected]


def test_the_future_of_a_plain_clock_keeps_its_step():
    plain = panel(index=pd.RangeIndex(10, 40, 5), freq=None)
    assert list(plain.future(2)) == [40, 45]
    with pytest.raises(ValueError, match="steps counts from 1; got 0"):
        plain.future(0)


def test_until_forgets_what_came_later_but_keeps_what_was_known():
    whole = panel(known=np.arange(8.0)[:, None], known_names=("x",), notes=("of the whole",))
    early = whole.until(4)
    assert early.values.shape == (4, 2)
    assert list(early.index) == list(whole.index[:4])
    assert early.known.shape == (8, 1)
    assert early.notes == ()
    same(early, panel(t=4, known=np.arange(8.0)[:, None], known_names=("x",)))
    for t in (0, 7):
        with pytest.raises(ValueError, match=f"1 to 6 of them; got {t}"):
            whole.until(t)


def test_to_frame_is_wide():
    frame = panel().to_frame()
    assert list(frame.columns) == ["a", "b"]
    assert frame.index.name == "time"
    assert panel(index=pd.RangeIndex(6), freq=None).to_frame().index.name == "t"
    assert panel(names=("time", "b")).to_frame().index.name is None, "a series may have the name"


# Files.


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "tsv", "parquet"])
@pytest.mark.parametrize("plain", [False, True])
def test_what_is_written_is_read(tmp_path, ending, plain):
    values = np.array([[0.1, 1 / 3], [np.nan, 2e-17], [3, 4], [1, 5]])
    clock = {"index": pd.RangeIndex(5, 9), "freq": None} if plain else {}
    written = panel(t=4, values=values, **clock)
    write_frame(written.to_frame(), tmp_path / f"x.{ending}")
    same(read(tmp_path / f"x.{ending}"), written)
    assert [file.name for file in tmp_path.iterdir()] == [f"x.{ending}"], "nothing else is left"


def test_a_gz_is_compressed(tmp_path):
    write_frame(panel().to_frame(), tmp_path / "x.csv.gz")
    assert gzip.decompress((tmp_path / "x.csv.gz").read_bytes()).startswith(b"time,a,b\n")


def test_a_failed_writing_leaves_the_old_file(tmp_path, monkeypatch):
    file = save(tmp_path, "old")

    def fails(self, path, **_):
        Path(path).write_text("ha")
        raise OSError("disk full")

    monkeypatch.setattr(pd.DataFrame, "to_csv", fails)
    with pytest.raises(OSError, match="disk full"):
        write_frame(panel().to_frame(), file)
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["data.csv"]


def test_other_endings_are_listed(tmp_path):
    for attempt in (lambda file: read(file), lambda file: write_frame(panel().to_frame(), file)):
        with pytest.raises(ValueError, match=r"\.csv, \.csv\.gz, \.tsv.*\.parquet.*got x\.xlsx"):
            attempt(tmp_path / "x.xlsx")
    with pytest.raises(FileNotFoundError, match="no file"):
        read(tmp_path / "x.csv")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "data.csv is empty"),
        ("time,a\n", "no rows, only a header"),
        ("\ntime,a\n2020-01-01,1\n", "first line of data.csv is empty"),
        (",,\n2020-01-01,1,2\n", "first line of data.csv has empty cells only"),
        ("time,a,a\n2020-01-01,1,2\n", "two columns called 'a'"),
        ("time;a\n2020-01-01;1\n", "commas"),
        ("0.5,0.7\n0.6,0.8\n", "holds values"),
        ("2020-01-01,7\n2020-01-02,8\n", "holds values"),
        ("time,a\n2020-01-01,1\n2020-01-02,1,9\n", "line 3, saw 3"),
        ("time,a\n2020-01-01,1,9\n2020-01-02,1,9\n", "each needs 2 cells"),
    ],
)
def test_files_that_are_no_tables(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        read(save(tmp_path, text))


@pytest.mark.parametrize("name", ["x.csv", "x.csv.gz", "x.parquet", "x.npz", "x.npy"])
def test_damaged_files(tmp_path, name):
    (tmp_path / name).write_bytes(b"\xff\xfe\x00\x9f not this")
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        read(tmp_path / name)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    def fails(path):
        raise ImportError("Unable to find a usable engine")

    monkeypatch.setattr(pd, "read_parquet", fails)
    with pytest.raises(ImportError, match=r"needs pyarrow: pip install 'diffusion_forcing\[forecasting\]'"):
        read(save(tmp_path, "", "x.parquet"))


def test_rows_are_counted_as_the_file_shows_them(tmp_path):
    text = "time,a,b\n2020-01-01,1,2\n\n2020-01-02,2,3\n2020-01-03,x7,4\n\n\n"
    with pytest.raises(ValueError, match=r"data\.csv, column 'a', row 5: 'x7' is not a number"):
        read(save(tmp_path, text))
    assert read(save(tmp_path, text.replace("x7", "7"))).values.tolist() == [[1, 2], [2, 3], [7, 4]], "blank lines have no stamps"
    frame = pd.DataFrame({"a": [1, 2, "x7", 4]})
    with pytest.raises(ValueError, match="the frame, column 'a', row 2"):
        from_frame(frame)
    frame.astype(str).to_parquet(tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"x\.parquet, column 'a', row 3"):
        read(tmp_path / "x.parquet")


def test_a_table_may_have_a_byte_order_mark_spaces_and_row_numbers(tmp_path):
    file = tmp_path / "x.csv"
    file.write_bytes(b"\xef\xbb\xbf,time, a,\n0,2020-01-01, 1,\n1,2020-01-02, 2,\n2,2020-01-03, 4,\n")
    found = read(file)
    assert found.names == ("a",)
    assert found.freq == "D"
    assert found.notes == ("column 'Unnamed: 0' counts rows and was left out",)


# Arrays.


def test_arrays_have_a_plain_clock(tmp_path):
    np.save(tmp_path / "x.npy", np.array([[1, 2], [3, 4], [5, 7]], dtype=np.uint16))
    found = read(tmp_path / "x.npy")
    assert found.names == ("0", "1")
    assert found.index.equals(pd.RangeIndex(3))
    assert found.freq is None
    np.save(tmp_path / "x.npy", np.array([1.0, 2.0, 4.0]))
    assert read(tmp_path / "x.npy").values.shape == (3, 1)


@pytest.mark.parametrize("names", [["t", "date"], ["start", "row"]])
def test_an_archive_may_have_dates_and_names(tmp_path, names):
    np.savez(tmp_path / "x.npz", values=np.arange(8.0).reshape(4, 2), start="2020-01-03", freq="B", names=names)
    found = read(tmp_path / "x.npz")
    assert found.names == tuple(names), "a name of an array is never the time"
    assert list(found.index) == list(pd.date_range("2020-01-03", periods=4, freq="B"))
    assert found.freq == "B"
    assert read(tmp_path / "x.npz", value=names[1]).names == (names[1],)


@pytest.mark.parametrize("freq", ["h", "h (daylight only)"])
def test_a_freq_that_gives_no_dates_is_told(tmp_path, freq):
    start = {} if freq == "h" else {"start": "2020-01-01"}
    np.savez(tmp_path / "x.npz", values=np.arange(8.0).reshape(4, 2), freq=freq, **start)
    found = read(tmp_path / "x.npz")
    assert found.freq is None
    assert "steps are counted" in found.notes[0]


@pytest.mark.parametrize(
    ("arrays", "options", "words"),
    [
        ({"x": np.zeros(3)}, {}, "no array `values`.*holds x"),
        ({"values": np.zeros((2, 2, 2))}, {}, r"numbers \(t, d\); got \(2, 2, 2\)"),
        ({"values": np.array(["a", "b"])}, {}, r"numbers \(t, d\)"),
        ({"values": np.zeros((3, 2)), "names": ["a"]}, {}, "1 names for 2 series"),
        ({"values": np.zeros((3, 2))}, {"freq": "h"}, "no `start`"),
        ({"values": np.zeros((3, 2)), "start": "2020-01-01"}, {}, "no `freq`"),
        ({"values": np.zeros((3, 2)), "start": "soon", "freq": "h"}, {}, "'soon', which is not a date"),
        ({"values": np.zeros((3, 2)), "start": "2020-01-04", "freq": "B"}, {}, "2020-01-04, is not on the clock.*2020-01-06"),
        ({"values": np.zeros((3, 2)), "start": "2020-01-04", "freq": "B"}, {"freq": "xx"}, "'xx' is no offset"),
        ({"values": np.zeros((3, 2))}, {"time": "a"}, "no time or id column"),
        ({"values": np.zeros((2, 2))}, {}, "2 different stamps"),
        ({"values": np.array([[0, 1], [1, np.inf], [2, 3]])}, {}, r"x\.npz, column '1', row 1: inf"),
    ],
)
def test_arrays_that_cannot_be_read(tmp_path, arrays, options, words):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(ValueError, match=words):
        read(tmp_path / "x.npz", **options)


def test_arrays_are_never_unpickled(tmp_path):
    np.save(tmp_path / "x.npy", np.array([{}, {}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="more than plain numbers"):
        read(tmp_path / "x.npy")


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
    with pytest.raises(ValueError, match="dates in the columns sent, came; say which is the time with --time"):
        from_frame(frame)
    with pytest.raises(ValueError, match=r"column 'came', row 0.*is not a number; "):
        from_frame(frame, time="sent")
    assert from_frame(frame.assign(came=[1, 2, 4]), time="sent").names == ("came", "a")
    shops = long({"x": [1, 2, 3], "y": [4, 5, 6]})
    assert from_frame(shops.assign(came=shops["date"] + pd.Timedelta(days=9))).index[0] == pd.Timestamp("2020-01-01"), "`date` says it"
    with pytest.raises(ValueError, match="column 'whenever', row 2: 'soon' is neither a date"):
        from_frame(pd.DataFrame({"whenever": [*DAYS[:2], "soon"], "a": [1, 2, 4]}))
    with pytest.raises(ValueError, match="no column 'x', which --time names; it has sent, came, a"):
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
        (["2020-01-01", "", "2020-01-03"], "column 'date', row 1 has no stamp though the row has values"),
        (["01/02/2020", "02/02/2020", "03/02/2020"], "column 'date': '01/02/2020' may be 2020-01-02 or 2020-02-01"),
        (["morning", "noon", "night"], "row 0: 'morning' is neither a date"),
        ([0.5, 1.0, 1.5], "row 0: '0.5' is neither a date nor"),
    ],
)
def test_stamps_that_are_none(cells, words):
    with pytest.raises(ValueError, match=words):
        from_frame(pd.DataFrame({"date": cells, "a": [1, 2, 4]}), time="date")


def test_a_time_column_needs_stamps():
    with pytest.raises(ValueError, match="column 'date' has no stamps; name another with --time"):
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


@pytest.mark.parametrize("day", ["%Y-%m-%d", "%d/%m/%Y", "%Y%m%d"])
@pytest.mark.parametrize("hour", ["%H:%M", "%H:%M:%S", "%I:%M %p"])
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
    assert found.notes == ("the offsets in 'time' change, and its stamps are midnights: they were read as days, without a zone",)


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


FREQS = ["h", "30min", "15min", "s", "D", "2D", "B", "W-WED", "MS", "ME", "QS-OCT", "QE-DEC", "YS-JAN", "YE-DEC"]


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
    with pytest.raises(ValueError, match="'fortnight' is no offset of pandas; write h, 30min"):
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
    with pytest.raises(ValueError, match=r"10 stamps from 1970-01-01 to 2020-01-01 08:00:00, which would be \d+ steps"):
        from_frame(pd.DataFrame({"time": stamps, "a": range(10)}))


def test_three_stamps_are_the_least():
    assert len(from_frame(hours(3)).values) == 3
    for t in (1, 2):
        with pytest.raises(ValueError, match=f"{t} different stamps; a clock needs 3"):
            from_frame(hours(t))


def test_duplicate_stamps_of_a_wide_table(tmp_path):
    text = "time,a\n2020-01-01,1\n2020-01-02,2\n2020-01-03,5\n2020-01-02,3\n"
    with pytest.raises(ValueError, match=r"column 'time', row 5: 2020-01-02 stands in row 3 already; keep one of the rows.*--id"):
        read(save(tmp_path, text))


# Cells.


@pytest.mark.parametrize("missing", ["", "NA", "NaN", "nan", "null", "-", " - ", "None"])
@pytest.mark.parametrize("where", ["file", "frame"])
def test_words_for_missing(tmp_path, missing, where):
    if where == "file":
        found = read(save(tmp_path, f"t,a,b\n0,1,1\n1,{missing},2\n2,3.5,5\n"))
    else:
        found = from_frame(pd.DataFrame({"a": ["1", missing, "3.5"], "b": [1, 2, 5]}))
    np.testing.assert_array_equal(found.values, [[1, 1], [np.nan, 2], [3.5, 5]])


def test_a_missing_word_does_not_change_the_numbers_beside_it(tmp_path):
    numbers = np.random.default_rng(0).standard_normal(99) * 1e-9
    rows = "\n".join(f"{number},{'NA' if i == 5 else number}" for i, number in enumerate(numbers.tolist()))
    found = read(save(tmp_path, f"a,b\n{rows}\n")).values
    np.testing.assert_array_equal(found[:, 0], numbers)
    np.testing.assert_array_equal(np.delete(found[:, 1], 5), np.delete(numbers, 5))


@pytest.mark.parametrize("cells", [pd.array([1, None, 3], dtype="Int64"), [1, None, 3], ["1", None, 3.0], [True, None, 3]])
def test_missing_cells_of_frames(cells):
    np.testing.assert_array_equal(from_frame(pd.DataFrame({"a": cells})).values[:, 0], [1, np.nan, 3])


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("1.2.3", "column 'b', row 4: '1.2.3' is not a number; correct it, or leave it empty"),
        ("n.a.", "row 4: 'n.a.' is not a number"),
        ("inf", "column 'b', row 4: inf stands where values should be finite"),
        ("-Infinity", "row 4: -inf stands"),
        ("1e999", "row 4: '1e999' is not a number"),
    ],
)
def test_cells_that_are_no_numbers(tmp_path, cell, words):
    with pytest.raises(ValueError, match=words):
        read(save(tmp_path, f"time,a,b\n2020-01-01,1,1\n2020-01-02,2,2\n2020-01-03,3,{cell}\n2020-01-04,4,5\n"))


def test_cells_that_hold_lists_are_no_numbers():
    with pytest.raises(ValueError, match=r"column 'a', row 0: '\[1\]' is not a number"):
        from_frame(hours(3, a=[[1], [2], [4]]))


def test_a_column_of_words_is_no_series():
    with pytest.raises(ValueError, match=r"column 'mood', row 0: 'good' is not a number; drop the column.*--id"):
        from_frame(hours(3, a=[1, 2, 4], mood=["good", "bad", "good"]))


@pytest.mark.parametrize(
    ("kind", "bad", "words"),
    [
        ("positive", -0.5, "column 'a', row 1: -0.5 stands where values should be numbers of 0 or more"),
        ("counts", 0.5, "column 'a', row 1: 0.5 stands where values should be whole numbers of 0 or more"),
        ("counts", -1, "row 1: -1 stands where values should be whole"),
    ],
)
def test_kinds(kind, bad, words):
    fine = hours(4, a=[0, 2, np.nan, 4])
    from_frame(fine, kind=kind)
    for lax in ("auto", "real"):
        from_frame(hours(4, a=[0, bad, 2, 4]), kind=lax)
    with pytest.raises(ValueError, match=words):
        from_frame(hours(4, a=[0, bad, 2, 4]), kind=kind)
    with pytest.raises(ValueError, match="kind is one of auto, real, positive, counts; got 'whole'"):
        from_frame(fine, kind="whole")


def test_a_series_without_values_is_to_be_dropped():
    with pytest.raises(ValueError, match="column 'b' has no values at all; drop it"):
        from_frame(hours(3, a=[1, 2, 4], b=[None] * 3))
    with pytest.raises(ValueError, match="no values at all for series 'y'; drop its rows"):
        from_frame(long({"x": [1, 2, 3], "y": [np.nan] * 3}))


def test_a_constant_series_is_told():
    found = from_frame(hours(4, a=[1, 2, 4, 5], b=[np.nan, 7, np.nan, 7]))
    assert found.notes == ("'b' is 7 throughout, from 2020-01-01 01:00:00 on: its forecasts will be that constant",)


def test_stamps_without_values_at_the_end_are_left_out_and_told():
    found = from_frame(hours(5, a=[1, 2, 4, np.nan, np.nan], b=[1, np.nan, np.nan, np.nan, None]))
    assert len(found.values) == 3
    assert "the stamps after 2020-01-01 02:00:00 have no values and were left out" in found.notes


def test_a_table_needs_values():
    with pytest.raises(ValueError, match="no column of values beside time"):
        from_frame(hours(3)[["time"]])
    with pytest.raises(ValueError, match="two columns called 'a'"):
        from_frame(pd.DataFrame([[1, 2], [2, 3], [4, 4]], columns=["a", "a"]))
    assert from_frame(hours(4), value="b").names == ("b",)


# Long tables.


def long(columns, start="2020-01-01", freq="D"):
    parts = [
        pd.DataFrame({"shop": name, "date": pd.date_range(start, periods=len(values), freq=freq), "sales": values})
        for name, values in columns.items()
    ]
    return pd.concat(parts, ignore_index=True)


def test_long_tables_become_wide(tmp_path):
    frame = long({"x": [1, 2, 3], "y": [4, 5, 6]})
    expected = from_frame(pd.DataFrame({"date": pd.date_range("2020-01-01", periods=3), "x": [1, 2, 3], "y": [4, 5, 6]}))
    shuffled = frame.iloc[[3, 0, 5, 2, 1, 4]]
    same(from_frame(frame), expected)
    same(from_frame(frame.astype({"shop": "category"})), expected)
    same(from_frame(frame.set_index(["shop", "date"])), expected)
    same(from_frame(frame.set_index(["shop", "date"]).rename_axis([None, None])), expected)
    mixed = from_frame(shuffled)
    assert mixed.names == ("y", "x"), "in the order in which they come"
    np.testing.assert_array_equal(mixed.values[:, ::-1], expected.values)
    write_frame(frame, tmp_path / "x.csv")
    same(read(tmp_path / "x.csv"), expected)


def test_ids_may_be_numbers_or_look_like_missing(tmp_path):
    text = "id,date,value\n" + "".join(f"{id},2020-01-0{day},{day + len(id)}\n" for id in ("007", "NA") for day in (1, 2, 3))
    assert read(save(tmp_path, text), id="id").names == ("007", "NA")
    numbered = long({7: [1, 2, 3], 8: [4, 5, 6]})
    assert from_frame(numbered, id="shop").names == ("7", "8")
    with pytest.raises(ValueError, match=r"row 3: 2020-01-01 stands in row 0 already.*--id"):
        from_frame(numbered)


def test_a_long_table_of_one_series_needs_its_id_named():
    one = long({"x": [1, 2, 3]})
    with pytest.raises(ValueError, match=r"column 'shop', row 0: 'x' is not a number.*--id"):
        from_frame(one)
    assert from_frame(one, id="shop").names == ("x",)


def test_long_tables_may_count_their_steps():
    frame = pd.DataFrame({"t": [0, 1, 2, 0, 1, 2], "who": list("xxxyyy"), "v": [1, 2, 3, 4, 5, 6]})
    found = from_frame(frame)
    assert found.index.equals(pd.RangeIndex(3))
    assert found.names == ("x", "y")


def test_series_that_start_and_end_at_other_times_share_one_clock():
    frame = pd.concat([long({"x": [1, 2, 3]}), long({"y": [4, 5, 6, 7]}, start="2020-01-02")])
    nan = np.nan
    found = from_frame(frame)
    np.testing.assert_array_equal(found.values, [[1, nan], [2, 4], [3, 5], [nan, 6], [nan, 7]])
    assert found.notes == ()
    short = pd.concat([frame, long({"z": [8]}, start="2020-01-05")])
    np.testing.assert_array_equal(from_frame(short).values[:, 2], [nan, nan, nan, nan, 8])


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ("h", "D", "series 'x' is spaced by h, series 'y' by D"),
        ("D", "W-MON", "series 'x' is spaced by D, series 'y' by W-MON"),
        ("MS", "QS-OCT", "series 'x' is spaced by MS, series 'y' by QS-OCT"),
    ],
)
def test_mixed_frequencies(one, other, words):
    frame = pd.concat([long({"x": range(9)}, "2020-01-01", one), long({"y": range(9)}, "2020-01-01", other)])
    with pytest.raises(ValueError, match=f"mixes frequencies: {words}; .*--freq"):
        from_frame(frame)
    found = from_frame(frame, freq=one)
    assert np.isfinite(found.values).sum(axis=0).tolist() == [9, 9], "asked to, it takes them for gaps"


def test_months_of_different_length_are_one_frequency():
    frame = pd.concat([long({"x": range(3)}, "2020-01-01", "MS"), long({"y": range(4)}, "2020-04-01", "MS")])
    assert from_frame(frame, id="shop").freq == "MS"
    counted = pd.DataFrame({"t": [0, 1, 2, 0, 2, 4], "id": list("xxxyyy"), "v": range(6)})
    with pytest.raises(ValueError, match="series 'x' is spaced by 1, series 'y' by 2"):
        from_frame(counted)


def test_duplicate_stamps_in_a_series():
    frame = long({"x": [1, 2, 3], "y": [4, 5, 6]})
    frame.loc[5, "date"] = frame.loc[4, "date"]
    with pytest.raises(ValueError, match="column 'date', row 5: 2020-01-02 of series 'y' stands in row 4 already; keep one"):
        from_frame(frame)


def test_what_is_ambiguous_is_asked_for():
    frame = long({"x": [1, 2, 3], "y": [4, 5, 6]})
    with pytest.raises(ValueError, match="of sales, price any may be it: name it with --value"):
        from_frame(frame.assign(price=1.5))
    assert from_frame(frame.assign(price=1.5), value="sales").values[0].tolist() == [1, 4]
    with pytest.raises(ValueError, match="shop, town may tell series apart; say which does with --id"):
        from_frame(frame.assign(town="here"))
    assert from_frame(frame.assign(town="here"), id="shop").names == ("x", "y")
    with pytest.raises(ValueError, match="no numbers in town: name it with --value"):
        from_frame(frame.assign(town="here").drop(columns="sales"), id="shop")
    with pytest.raises(ValueError, match="no column looks like the time; name it with --time"):
        from_frame(frame.drop(columns="date"), id="shop")
    with pytest.raises(ValueError, match="column 'shop' cannot be two of"):
        from_frame(frame, id="shop", value="shop")
    frame.loc[4, "shop"] = None
    with pytest.raises(ValueError, match="column 'shop', row 4 does not say which series"):
        from_frame(frame)


# Covariates.


def test_covariates_reach_into_the_future():
    nan = np.nan
    frame = hours(6, a=[1, 2, nan, 4, nan, nan], b=[1, 2, 3, nan, nan, nan], open=[1, 0, 1, 0, 1, 1], heat=[5.5, 6, 7, 8, 9, 10])
    found = from_frame(frame, known=["heat", "open"])
    assert found.names == ("a", "b")
    assert found.known_names == ("heat", "open")
    assert found.values.shape == (4, 2), "the last value of any series ends the past"
    assert len(found.index) == 4
    assert found.known.tolist() == [[5.5, 1], [6, 0], [7, 1], [8, 0], [9, 1], [10, 1]]
    assert from_frame(frame.drop(columns="open"), known="heat").known_names == ("heat",)
    backwards = from_frame(frame[::-1], known=["heat", "open"])
    same(backwards, found)
    assert from_frame(hours(6)).known.shape == (6, 0)


def test_covariates_of_a_plain_clock_reach_into_the_future():
    found = from_frame(pd.DataFrame({"a": [1, 2, 4, None], "x": [1, 2, 3, 4]}), known=["x"])
    assert found.values.shape == (3, 1)
    assert found.known.shape == (4, 1)


def test_covariates_of_long_tables_agree():
    frame = long({"x": [1, 2, 3, np.nan], "y": [4, 5, 6, np.nan]}).assign(open=[1, 0, 1, 0] * 2)
    found = from_frame(frame, known=["open"])
    assert found.values.tolist() == [[1, 4], [2, 5], [3, 6]]
    assert found.known[:, 0].tolist() == [1, 0, 1, 0]
    frame.loc[5, "open"] = 7
    with pytest.raises(ValueError, match="column 'open', row 5: 7 at 2020-01-02, where another series has 0"):
        from_frame(frame, known=["open"])


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([1, None, 1, 1], "column 'x', row 1 is missing, and what is known in advance has no holes"),
        ([1, 1, 1, None], "column 'x', row 3 is missing"),
        (["wet", "dry", "wet", "dry"], "column 'x', row 0: 'wet' is not a number.*encode it as numbers"),
        ([1, np.inf, 1, 1], "column 'x', row 1: inf stands where values should be finite"),
        (["1", "2", "3", "oh"], "column 'x', row 3: 'oh' is not a number"),
    ],
)
def test_covariates_have_no_holes_and_no_words(cells, words):
    with pytest.raises(ValueError, match=words):
        from_frame(hours(4, a=[1, 2, 4, np.nan], x=cells), known=["x"])


def test_a_missing_row_is_a_hole_in_what_was_known():
    frame = hours(6, a=range(6), x=range(6)).drop(index=2)
    assert len(from_frame(frame[["time", "a"]]).values) == 6
    with pytest.raises(ValueError, match="no row at 2020-01-01 02:00:00, so that 'x', known in advance, has a hole"):
        from_frame(frame, known=["x"])
    with pytest.raises(ValueError, match="no column 'y', which --known names"):
        from_frame(frame, known=["y"])


@pytest.mark.parametrize(("horizon", "fits"), [(0, False), (-1, False), (1, True), (3, True), (4, False)])
def test_a_horizon_is_a_quarter_at_most(horizon, fits):
    found = from_frame(hours(12))
    if fits:
        return check_horizon(found, horizon)
    with pytest.raises(ValueError, match=f"1 to a quarter of the steps there are, here 3 of 12; got {horizon}"):
        check_horizon(found, horizon)


def test_a_horizon_needs_the_covariates():
    found = from_frame(hours(14, a=[*range(12), None, None], x=range(14)), known=["x"])
    check_horizon(found, 2)
    with pytest.raises(
        ValueError, match=r"'x', known in advance, has to cover the 3 steps.*has 2 rows.*first that is missing is 2020-01-01 14:00:00"
    ):
        check_horizon(found, 3)
    check_horizon(found.until(11), 2)


# The public sets.


def tiny(start=None, **changes):
    """The texts of a set of 2 series: 6 steps to train, then 3 windows of 2 steps; entries by part."""
    whole = np.arange(24.0).reshape(2, 12) + 0.1
    start = start or "2020-01-03 00:00:00"
    parts = {
        "train": [{"start": start, "target": series[:6].tolist()} for series in whole],
        "test": [{"start": start, "target": series[:end].tolist()} for end in (8, 10, 12) for series in whole],
    }
    parts.update(changes)
    texts = {f"{part}/{part}.json": "".join(json.dumps(entry) + "\n" for entry in entries) for part, entries in parts.items()}
    return {"metadata/metadata.json": json.dumps({"time_granularity": "B"}), **texts}, whole, parts


@pytest.fixture
def named(monkeypatch):
    monkeypatch.setitem(NAMED, "tiny", Named("tiny_nips", 2, 3, "B"))
    return NAMED["tiny"]


def pack(file, texts, extra=()):
    with tarfile.open(file, "w:gz") as archive:
        for name, text in texts.items():
            member = tarfile.TarInfo(f"tiny_nips/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
        for member in extra:
            archive.addfile(member)
    return file


def unpack(folder, texts, compress=False):
    for name, text in texts.items():
        file = folder / (f"{name}.gz" if compress and "metadata" not in name else name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return folder


def test_a_named_set_is_whole(tmp_path, named):
    texts, whole, _ = tiny()
    link = tarfile.TarInfo("tiny_nips/train/other.json")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    paths = [pack(tmp_path / "x.tar.gz", texts, [link]), unpack(tmp_path / "plain", texts), unpack(tmp_path / "gz", texts, compress=True)]
    for path in paths:
        found, of = load_named("tiny", path)
        assert of is named
        np.testing.assert_array_equal(found.values, whole.T)
        assert found.names == ("0", "1")
        assert found.index.equals(pd.date_range("2020-01-03", periods=12, freq="B"))
        assert found.freq == "B"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["gz", "plain", "x.tar.gz"], "an archive is read where it is"


def test_a_set_that_is_tested_another_year_has_a_gap(tmp_path, named):
    """As the taxis': trained on one January, tested on the next."""
    _, whole, parts = tiny()
    later = [{**entry, "start": "2020-01-21"} for entry in parts["test"]]
    found, _ = load_named("tiny", unpack(tmp_path, tiny(test=later)[0]))
    np.testing.assert_array_equal(found.values[:6], whole.T[:6])
    assert np.isnan(found.values[6:12]).all()
    np.testing.assert_array_equal(found.values[12:], whole.T)
    assert found.notes == ("6 steps between training and test have no values, from 2020-01-13 on",)


def test_sets_that_do_not_fit(tmp_path, named):
    _, _, parts = tiny()
    other = [{**parts["train"][0], "target": [9.0] * 6}, parts["train"][1]]
    cases = [
        ({"test": parts["test"][:-2]}, "should test 2 series in 3 windows, each 2 steps later; it has 4 entries"),
        ({"test": parts["test"][::-1]}, "both 0.1 and 12.1 for one series at step 0"),
        ({"train": other}, "both 9 and 0.1 for one series at step 0"),
        ({"train": []}, "no entries in train/"),
        ({"train": [{"target": [1]}]}, "train.json, line 1 is not an entry with `start` and `target`"),
        ({"train": [{"start": "2020-01-03", "target": [[1.0]]}]}, r"an entry of shape \(1, 1\)"),
        ({"test": [{**entry, "start": "2020-01-02"} for entry in parts["test"]]}, "starts at 2020-01-02, off the clock"),
    ]
    for i, (changes, words) in enumerate(cases):
        with pytest.raises(ValueError, match=words):
            load_named("tiny", unpack(tmp_path / str(i), tiny(**changes)[0]))
    texts = tiny()[0]
    with pytest.raises(ValueError, match="of freq 'H' and tiny of 'B'"):
        load_named("tiny", unpack(tmp_path / "freq", {**texts, "metadata/metadata.json": '{"freq": "H"}'}))
    with pytest.raises(ValueError, match=r"metadata\.json of .* is not that of a set"):
        load_named("tiny", unpack(tmp_path / "json", {**texts, "metadata/metadata.json": "{"}))
    whole = pack(tmp_path / "x.tar.gz", texts).read_bytes()
    (tmp_path / "x.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"x\.tar\.gz is damaged"):
        load_named("tiny", tmp_path / "x.tar.gz")
    with pytest.raises(FileNotFoundError, match="no folder or archive"):
        load_named("tiny", tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"exchange, solar, electricity, traffic, taxi, wikipedia.*got 'moon'"):
        load_named("moon")


def test_a_named_set_is_downloaded(monkeypatch, named):
    repository = pytest.importorskip("gluonts.dataset.repository", reason="gluonts comes with the extra `forecasting`")
    _, whole, parts = tiny()
    asked = []

    def get_dataset(name):
        asked.append(name)
        entries = {
            part: [{"start": pd.Period(e["start"], "D"), "target": np.array(e["target"], dtype=np.float32)} for e in parts[part]]
            for part in parts
        }
        return SimpleNamespace(metadata=SimpleNamespace(freq="B"), **entries)

    monkeypatch.setattr(repository, "get_dataset", get_dataset)
    found, _ = load_named("tiny")
    assert asked == ["tiny_nips"]
    np.testing.assert_array_equal(found.values, whole.T.astype(np.float32))

    def fails(name):
        raise OSError("no route to host")

    monkeypatch.setattr(repository, "get_dataset", fails)
    with pytest.raises(ConnectionError, match=r"no route to host.*tiny_nips\.tar\.gz.*pass its path"):
        load_named("tiny")
    monkeypatch.setitem(sys.modules, "gluonts.dataset.repository", None)
    with pytest.raises(ImportError, match=r"pip install 'diffusion_forcing\[forecasting\]', or pass the path"):
        load_named("tiny")


def test_the_six_sets():
    assert {name: (of.gluonts, of.horizon, of.windows, of.freq) for name, of in NAMED.items()} == {
        "exchange": ("exchange_rate_nips", 30, 5, "B"),
        "solar": ("solar_nips", 24, 7, "h"),
        "electricity": ("electricity_nips", 24, 7, "h"),
        "traffic": ("traffic_nips", 24, 7, "h"),
        "taxi": ("taxi_30min", 24, 56, "30min"),
        "wikipedia": ("wiki-rolling_nips", 30, 5, "D"),
    }


def test_exchange_is_the_published_set():
    file = SHARED / "exchange_rate" / "exchange_rate_nips.tar.gz"
    if not file.exists():
        pytest.skip(f"the exchange rates are not in {file.parent}")
    found, of = load_named("exchange", file)
    assert found.values.shape == (6071 + of.windows * of.horizon, 8)
    assert found.index[0] == pd.Timestamp("1990-01-01")
    assert found.freq == "B"
    assert not np.isnan(found.values).any()
    with tarfile.open(file) as archive:
        train = [json.loads(line)["target"] for line in archive.extractfile("exchange_rate_nips/train/train.json")]
        last = [json.loads(line)["target"] for line in archive.extractfile("exchange_rate_nips/test/test.json")][-8:]
    np.testing.assert_array_equal(found.values[:6071], np.array(train).T)
    np.testing.assert_array_equal(found.values, np.array(last).T)


@pytest.mark.parametrize(
    ("name", "shape", "freq"),
    [
        ("electricity_uci321_840h.npz", (840, 321), None),
        ("nyc_taxi_od_hourly_2018.npz", (1464, 900), "h"),
        ("solar_nrel_florida_daylight_hourly.npz", (3650, 216), None),
    ],
)
def test_arrays_that_are_about(name, shape, freq):
    file = SHARED / "series" / name
    if not file.exists():
        pytest.skip(f"{name} is not in {file.parent}")
    found = read(file, kind="positive")
    assert found.values.shape == shape
    assert found.freq == freq


# What the module needs.


def test_without_pandas_the_extra_is_named():
    code = "import sys; sys.modules['pandas'] = None; import diffusion_forcing.forecasting.panel"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "pip install 'diffusion_forcing[forecasting]'" in done.stderr.splitlines()[-1]


def test_the_module_does_not_import_torch():
    assert "torch" not in vars(series)
    assert "import torch" not in Path(series.__file__).read_text()
