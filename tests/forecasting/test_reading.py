"""Panels from files and frames: wide and long tables, arrays, covariates, and errors that name column and row."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

pd = pytest.importorskip("pandas", reason="pandas comes with the extra `forecasting`")

from series import hours, long, plain_panel, save

from diffusion_forcing.forecasting.reading import from_frame, read, write_frame

SHARED = Path(__file__).parents[2] / "shared" / "data"

# Files.


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "tsv", "parquet"])
@pytest.mark.parametrize("plain", [False, True])
def test_what_is_written_is_read(tmp_path, ending, plain):
    values = np.array([[0.1, 1 / 3], [np.nan, 2e-17], [3, 4], [1, 5]])
    clock = {"index": pd.RangeIndex(5, 9), "freq": None} if plain else {}
    written = plain_panel(t=4, values=values, **clock)
    write_frame(written.to_frame(), tmp_path / f"x.{ending}")
    assert read(tmp_path / f"x.{ending}").equals(written)
    assert [file.name for file in tmp_path.iterdir()] == [f"x.{ending}"], "nothing else is left"


def test_a_gz_is_compressed(tmp_path):
    write_frame(plain_panel().to_frame(), tmp_path / "x.csv.gz")
    assert gzip.decompress((tmp_path / "x.csv.gz").read_bytes()).startswith(b"time,a,b\n")


def test_a_failed_writing_leaves_the_old_file(tmp_path, monkeypatch):
    file = save(tmp_path, "old")

    def fails(self, path, **_):
        Path(path).write_text("ha")
        raise OSError("disk full")

    monkeypatch.setattr(pd.DataFrame, "to_csv", fails)
    with pytest.raises(OSError, match="disk full"):
        write_frame(plain_panel().to_frame(), file)
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["data.csv"]


def test_other_endings_are_listed(tmp_path):
    for attempt in (lambda file: read(file), lambda file: write_frame(plain_panel().to_frame(), file)):
        with pytest.raises(ValueError, match=r"\.csv.*\.parquet.*got x\.xlsx"):
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
        ("time;a\n2020-01-01;1\n", "commas"),
        ("0.5,0.7\n0.6,0.8\n", "holds values"),
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
    with pytest.raises(ImportError, match=r"pyarrow: pip install 'diffusion_forcing\[forecasting\]'"):
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
        ({"values": np.zeros((3, 2)), "start": "2020-01-04", "freq": "B"}, {"freq": "xx"}, "'xx' is not an offset"),
        ({"values": np.zeros((3, 2))}, {"time": "a"}, "no time or id column"),
        ({"values": np.zeros((2, 2))}, {}, "2 different timestamps"),
        ({"values": np.array([[0, 1], [1, np.inf], [2, 3]])}, {}, r"x\.npz, column '1', row 1 is inf"),
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


# Cells.


def test_words_for_missing(tmp_path):
    for missing in ("", "NA", "NaN", "null", " - ", "None"):
        of_file = read(save(tmp_path, f"t,a,b\n0,1,1\n1,{missing},2\n2,3.5,5\n"))
        of_frame = from_frame(pd.DataFrame({"a": ["1", missing, "3.5"], "b": [1, 2, 5]}))
        for panel in (of_file, of_frame):
            np.testing.assert_array_equal(panel.values, [[1, 1], [np.nan, 2], [3.5, 5]], err_msg=missing)


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
        ("inf", "column 'b', row 4 is inf, but values should be finite"),
        ("-Infinity", "row 4 is -inf"),
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
    ("value_type", "bad", "words"),
    [
        ("positive", -0.5, "column 'a', row 1 is -0.5, but values should be numbers of 0 or more"),
        ("counts", 0.5, "column 'a', row 1 is 0.5, but values should be whole numbers of 0 or more"),
        ("counts", -1, "row 1 is -1, but values should be whole"),
    ],
)
def test_values_have_a_type(value_type, bad, words):
    fine = hours(4, a=[0, 2, np.nan, 4])
    from_frame(fine, value_type=value_type)
    for lax in ("auto", "real"):
        from_frame(hours(4, a=[0, bad, 2, 4]), value_type=lax)
    with pytest.raises(ValueError, match=words):
        from_frame(hours(4, a=[0, bad, 2, 4]), value_type=value_type)
    with pytest.raises(ValueError, match="value_type is one of auto, real, positive, counts; got 'whole'"):
        from_frame(fine, value_type="whole")


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
    assert "the timestamps after 2020-01-01 02:00:00 have no values and were left out" in found.notes


def test_a_table_needs_values():
    with pytest.raises(ValueError, match="no column of values beside time"):
        from_frame(hours(3)[["time"]])
    with pytest.raises(ValueError, match="two columns called 'a'"):
        from_frame(pd.DataFrame([[1, 2], [2, 3], [4, 4]], columns=["a", "a"]))
    assert from_frame(hours(4), value="b").names == ("b",)


# Long tables.


def test_long_tables_become_wide(tmp_path):
    frame = long({"x": [1, 2, 3], "y": [4, 5, 6]})
    expected = from_frame(pd.DataFrame({"date": pd.date_range("2020-01-01", periods=3), "x": [1, 2, 3], "y": [4, 5, 6]}))
    shuffled = frame.iloc[[3, 0, 5, 2, 1, 4]]
    assert from_frame(frame).equals(expected)
    assert from_frame(frame.astype({"shop": "category"})).equals(expected)
    assert from_frame(frame.set_index(["shop", "date"])).equals(expected)
    assert from_frame(frame.set_index(["shop", "date"]).rename_axis([None, None])).equals(expected)
    mixed = from_frame(shuffled)
    assert mixed.names == ("y", "x"), "in the order in which they come"
    np.testing.assert_array_equal(mixed.values[:, ::-1], expected.values)
    write_frame(frame, tmp_path / "x.csv")
    assert read(tmp_path / "x.csv").equals(expected)


def test_ids_may_be_numbers_or_look_like_missing(tmp_path):
    text = "id,date,value\n" + "".join(f"{id},2020-01-0{day},{day + len(id)}\n" for id in ("007", "NA") for day in (1, 2, 3))
    assert read(save(tmp_path, text), id="id").names == ("007", "NA")
    numbered = long({7: [1, 2, 3], 8: [4, 5, 6]})
    assert from_frame(numbered, id="shop").names == ("7", "8")
    with pytest.raises(ValueError, match=r"row 3: 2020-01-01 is in row 0 already.*--id"):
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
    with pytest.raises(ValueError, match="column 'date', row 5: 2020-01-02 of series 'y' is in row 4 already; keep one"):
        from_frame(frame)


def test_what_is_ambiguous_is_asked_for():
    frame = long({"x": [1, 2, 3], "y": [4, 5, 6]})
    with pytest.raises(ValueError, match=r"sales, price .*--value"):
        from_frame(frame.assign(price=1.5))
    assert from_frame(frame.assign(price=1.5), value="sales").values[0].tolist() == [1, 4]
    with pytest.raises(ValueError, match=r"shop, town .*--id"):
        from_frame(frame.assign(town="here"))
    assert from_frame(frame.assign(town="here"), id="shop").names == ("x", "y")
    with pytest.raises(ValueError, match=r"no numbers in town.*--value"):
        from_frame(frame.assign(town="here").drop(columns="sales"), id="shop")
    with pytest.raises(ValueError, match="--time"):
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
    assert backwards.equals(found)
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
        ([1, None, 1, 1], "column 'x', row 1 is missing"),
        ([1, 1, 1, None], "column 'x', row 3 is missing"),
        (["wet", "dry", "wet", "dry"], "column 'x', row 0: 'wet' is not a number.*encode it as numbers"),
        ([1, np.inf, 1, 1], "column 'x', row 1 is inf, but values should be finite"),
        (["1", "2", "3", "oh"], "column 'x', row 3: 'oh' is not a number"),
    ],
)
def test_covariates_have_no_holes_and_no_words(cells, words):
    with pytest.raises(ValueError, match=words):
        from_frame(hours(4, a=[1, 2, 4, np.nan], x=cells), known=["x"])


def test_a_missing_row_is_a_hole_in_what_was_known():
    frame = hours(6, a=range(6), x=range(6)).drop(index=2)
    assert len(from_frame(frame[["time", "a"]]).values) == 6
    with pytest.raises(ValueError, match="no row at 2020-01-01 02:00:00, so that 'x', known in advance, has a gap"):
        from_frame(frame, known=["x"])
    with pytest.raises(ValueError, match="no column 'y', which --known names"):
        from_frame(frame, known=["y"])
