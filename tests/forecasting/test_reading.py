"""Panels from files and frames: wide and long tables, arrays, covariates, and errors that name column and row."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

pd = pytest.importorskip("pandas", reason="pandas comes with the extra `forecasting`")

from series import hours, long, plain_panel, save

from diffusion_forcing.forecasting.reading import from_frame, read, write_frame

NAN = np.nan

# Files.


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "tsv", "parquet"])
@pytest.mark.parametrize("clock", [{}, {"index": pd.RangeIndex(5, 9), "freq": None}], ids=["dates", "steps"])
def test_a_written_table_is_read_again(tmp_path, ending, clock):
    written = plain_panel(t=4, values=np.array([[0.1, 1 / 3], [NAN, 2e-17], [3, 4], [1, 5]]), **clock)
    file = tmp_path / f"x.{ending}"
    write_frame(written.to_frame(), file)
    assert read(file).equals(written)
    assert list(tmp_path.iterdir()) == [file], "nothing else is left"
    assert (file.read_bytes()[:2] == gzip.compress(b"")[:2]) == (ending == "csv.gz")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    file = save(tmp_path, "old")

    def fails(self, path, **_):
        Path(path).write_text("ha")
        raise OSError("disk full")

    monkeypatch.setattr(pd.DataFrame, "to_csv", fails)
    with pytest.raises(OSError, match="disk full"):
        write_frame(plain_panel().to_frame(), file)
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["data.csv"]


def test_other_endings_are_refused(tmp_path):
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
def test_text_that_is_no_table_is_refused(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        read(save(tmp_path, text))


def test_damaged_files_are_refused(tmp_path):
    for name in ("x.csv", "x.csv.gz", "x.parquet", "x.npz", "x.npy"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00\x9f not this")
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            read(tmp_path / name)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    def fails(path):
        raise ImportError("Unable to find a usable engine")

    monkeypatch.setattr(pd, "read_parquet", fails)
    with pytest.raises(ImportError, match=r"pyarrow: pip install 'diffusion_forcing\[forecasting\]'"):
        read(save(tmp_path, "", "x.parquet"))


def test_rows_are_numbered_as_the_file_shows_them(tmp_path):
    text = "time,a,b\n2020-01-01,1,2\n\n2020-01-02,2,3\n2020-01-03,x7,4\n\n\n"
    with pytest.raises(ValueError, match=r"data\.csv, column 'a', row 5: 'x7' is not a number"):
        read(save(tmp_path, text))
    assert read(save(tmp_path, text.replace("x7", "7"))).values.tolist() == [[1, 2], [2, 3], [7, 4]], "blank lines have no timestamps"
    frame = pd.DataFrame({"a": [1, 2, "x7", 4]})
    with pytest.raises(ValueError, match="the frame, column 'a', row 2"):
        from_frame(frame)
    frame.astype(str).to_parquet(tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"x\.parquet, column 'a', row 3"):
        read(tmp_path / "x.parquet")


def test_a_table_may_have_a_byte_order_mark_spaces_and_row_numbers(tmp_path):
    (tmp_path / "x.csv").write_bytes(b"\xef\xbb\xbf,time, a,\n0,2020-01-01, 1,\n1,2020-01-02, 2,\n2,2020-01-03, 4,\n")
    panel = read(tmp_path / "x.csv")
    assert (panel.names, panel.freq) == (("a",), "D")
    assert panel.notes == ("column 'Unnamed: 0' counts rows and was left out",)


# Arrays.


def test_arrays_have_steps_for_a_clock(tmp_path):
    np.save(tmp_path / "x.npy", np.array([[1, 2], [3, 4], [5, 7]], dtype=np.uint16))
    panel = read(tmp_path / "x.npy")
    assert (panel.names, panel.freq) == (("0", "1"), None)
    assert panel.index.equals(pd.RangeIndex(3))
    np.save(tmp_path / "x.npy", np.array([1.0, 2.0, 4.0]))
    assert read(tmp_path / "x.npy").values.shape == (3, 1)


@pytest.mark.parametrize("names", [["t", "date"], ["start", "row"]])
def test_an_archive_may_have_dates_and_names(tmp_path, names):
    np.savez(tmp_path / "x.npz", values=np.arange(8.0).reshape(4, 2), start="2020-01-03", freq="B", names=names)
    panel = read(tmp_path / "x.npz")
    assert (panel.names, panel.freq) == (tuple(names), "B"), "a name of an array is never the time"
    assert list(panel.index) == list(pd.date_range("2020-01-03", periods=4, freq="B"))
    assert read(tmp_path / "x.npz", value=names[1]).names == (names[1],)


@pytest.mark.parametrize("own", [{"freq": "h"}, {"freq": "h (daylight only)", "start": "2020-01-01"}])
def test_a_freq_that_gives_no_dates_is_noted(tmp_path, own):
    np.savez(tmp_path / "x.npz", values=np.arange(8.0).reshape(4, 2), **own)
    panel = read(tmp_path / "x.npz")
    assert panel.freq is None
    assert "steps are counted" in panel.notes[0]


THREE = {"values": np.zeros((3, 2))}


@pytest.mark.parametrize(
    ("arrays", "options", "words"),
    [
        ({"x": np.zeros(3)}, {}, "no array `values`.*holds x"),
        ({"values": np.zeros((2, 2, 2))}, {}, r"got \(2, 2, 2\)"),
        ({"values": np.array(["a", "b"])}, {}, r"numbers \(t, d\)"),
        ({"values": np.array([{}, {}], dtype=object)}, {}, "more than plain numbers"),
        ({**THREE, "names": ["a"]}, {}, "1 names for 2 series"),
        (THREE, {"freq": "h"}, "no `start`"),
        ({**THREE, "start": "2020-01-01"}, {}, "no `freq`"),
        ({**THREE, "start": "soon", "freq": "h"}, {}, "'soon', which is not a date"),
        ({**THREE, "start": "2020-01-04", "freq": "B"}, {}, "2020-01-04, is not on the clock.*2020-01-06"),
        ({**THREE, "start": "2020-01-04", "freq": "B"}, {"freq": "xx"}, "'xx' is not an offset"),
        (THREE, {"time": "a"}, "--time and --id"),
        ({"values": np.array([[0, 1], [1, np.inf], [2, 3]])}, {}, r"x\.npz, column '1', row 1 is inf"),
    ],
)
def test_impossible_arrays_are_refused(tmp_path, arrays, options, words):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(ValueError, match=words):
        read(tmp_path / "x.npz", **options)


# Cells.


def test_words_for_missing(tmp_path):
    for missing in ("", "NA", "NaN", "null", " - ", "None"):
        of_file = read(save(tmp_path, f"t,a,b\n0,1,1\n1,{missing},2\n2,3.5,5\n"))
        of_frame = from_frame(pd.DataFrame({"a": ["1", missing, "3.5"], "b": [1, 2, 5]}))
        for panel in (of_file, of_frame):
            np.testing.assert_array_equal(panel.values, [[1, 1], [NAN, 2], [3.5, 5]], err_msg=missing)


def test_a_missing_word_does_not_change_the_numbers_beside_it(tmp_path):
    numbers = np.random.default_rng(0).standard_normal(99) * 1e-9
    rows = "\n".join(f"{number},{'NA' if i == 5 else number}" for i, number in enumerate(numbers.tolist()))
    values = read(save(tmp_path, f"a,b\n{rows}\n")).values
    np.testing.assert_array_equal(values[:, 0], numbers)
    np.testing.assert_array_equal(np.delete(values[:, 1], 5), np.delete(numbers, 5))


@pytest.mark.parametrize("cells", [pd.array([1, None, 3], dtype="Int64"), [1, None, 3], ["1", None, 3.0], [True, None, 3]])
def test_missing_cells_of_frames(cells):
    np.testing.assert_array_equal(from_frame(pd.DataFrame({"a": cells})).values[:, 0], [1, NAN, 3])


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("1.2.3", "column 'b', row 4: '1.2.3' is not a number; correct it, or leave it empty"),
        ("n.a.", "row 4: 'n.a.' is not a number"),
        ("-Infinity", "row 4 is -inf, but values should be finite"),
        ("1e999", "row 4: '1e999' is not a number"),
    ],
)
def test_cells_that_are_no_numbers_are_named(tmp_path, cell, words):
    with pytest.raises(ValueError, match=words):
        read(save(tmp_path, f"time,a,b\n2020-01-01,1,1\n2020-01-02,2,2\n2020-01-03,3,{cell}\n2020-01-04,4,5\n"))


@pytest.mark.parametrize(
    ("frame", "options", "words"),
    [
        (hours(3, a=[[1], [2], [4]]), {}, r"column 'a', row 0: '\[1\]' is not a number"),
        (hours(3, a=[1, 2, 4], mood=["good", "bad", "good"]), {}, r"column 'mood', row 0: 'good' is not a number.*--id"),
        (hours(3, a=[1, 2, 4], b=[None] * 3), {}, "column 'b' has no values at all"),
        (long({"x": [1, 2, 3], "y": [NAN] * 3}), {}, "no values at all for series 'y'"),
        (hours(3)[["time"]], {}, "no column of values beside time"),
        (pd.DataFrame([[1, 2], [2, 3], [4, 4]], columns=["a", "a"]), {}, "two columns called 'a'"),
        (hours(4), {"value_type": "whole"}, "value_type"),
        (hours(4), {"time": "when"}, "no column 'when', which --time names"),
    ],
)
def test_tables_without_series_are_refused(frame, options, words):
    with pytest.raises(ValueError, match=words):
        from_frame(frame, **options)


@pytest.mark.parametrize(
    ("value_type", "bad", "words"), [("positive", -0.5, "0 or more"), ("counts", 0.5, "whole"), ("counts", -1, "whole")]
)
def test_values_have_a_type(value_type, bad, words):
    assert from_frame(hours(4, a=[0, 2, NAN, 4]), value_type=value_type).value_type == value_type
    wrong = hours(4, a=[0, bad, 2, 4])
    for lax in ("auto", "real"):
        from_frame(wrong, value_type=lax)
    with pytest.raises(ValueError, match=f"column 'a', row 1 is {bad}, but values should be .*{words}"):
        from_frame(wrong, value_type=value_type)


def test_constants_and_empty_last_rows_are_noted():
    panel = from_frame(hours(4, a=[1, 2, 4, 5], b=[NAN, 7, NAN, 7]))
    assert panel.notes == ("'b' is 7 throughout, from 2020-01-01 01:00:00 on: its forecasts will be that constant",)
    panel = from_frame(hours(5, a=[1, 2, 4, NAN, NAN], b=[1, 3, NAN, NAN, None]))
    assert len(panel.values) == 3
    assert panel.notes == ("the timestamps after 2020-01-01 02:00:00 have no values and were left out",)


# Long tables.


def test_long_tables_become_wide(tmp_path):
    frame = long({"x": [1, 2, 3], "y": [4, 5, 6]})
    expected = from_frame(pd.DataFrame({"date": pd.date_range("2020-01-01", periods=3), "x": [1, 2, 3], "y": [4, 5, 6]}))
    indexed = frame.set_index(["shop", "date"])
    for one in (frame, frame.astype({"shop": "category"}), indexed, indexed.rename_axis([None, None])):
        assert from_frame(one).equals(expected)
    shuffled = from_frame(frame.iloc[[3, 0, 5, 2, 1, 4]])
    assert shuffled.names == ("y", "x"), "in the order in which they come"
    np.testing.assert_array_equal(shuffled.values[:, ::-1], expected.values)
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
    panel = from_frame(pd.DataFrame({"t": [0, 1, 2, 0, 1, 2], "who": list("xxxyyy"), "v": [1, 2, 3, 4, 5, 6]}))
    assert panel.index.equals(pd.RangeIndex(3))
    assert panel.names == ("x", "y")


def test_series_of_different_lengths_share_one_clock():
    frame = pd.concat([long({"x": [1, 2, 3]}), long({"y": [4, 5, 6, 7]}, start="2020-01-02")])
    panel = from_frame(pd.concat([frame, long({"z": [8]}, start="2020-01-05")]))
    expected = [[1, NAN, NAN], [2, 4, NAN], [3, 5, NAN], [NAN, 6, NAN], [NAN, 7, 8]]
    np.testing.assert_array_equal(panel.values, expected)
    assert from_frame(frame).notes == ()


def test_ambiguous_long_tables_ask_for_an_option():
    frame = long({"x": [1, 2, 3], "y": [4, 5, 6]})
    priced, towns = frame.assign(price=1.5), frame.assign(town="here")
    assert from_frame(priced, value="sales").values[0].tolist() == [1, 4]
    assert from_frame(towns, id="shop").names == ("x", "y")
    nameless, twice = frame.copy(), frame.copy()
    nameless.loc[4, "shop"] = None
    twice.loc[5, "date"] = frame.loc[4, "date"]
    for one, options, words in [
        (priced, {}, r"sales, price .*--value"),
        (towns, {}, r"shop, town .*--id"),
        (towns.drop(columns="sales"), {"id": "shop"}, r"no numbers in town.*--value"),
        (frame.drop(columns="date"), {"id": "shop"}, "--time"),
        (frame, {"id": "shop", "value": "shop"}, "column 'shop' cannot be two of"),
        (nameless, {}, "column 'shop', row 4 does not say which series"),
        (twice, {}, "column 'date', row 5: 2020-01-02 of series 'y' is in row 4 already"),
    ]:
        with pytest.raises(ValueError, match=words):
            from_frame(one, **options)


# Covariates.


def test_covariates_reach_into_the_future():
    frame = hours(6, a=[1, 2, NAN, 4, NAN, NAN], b=[1, 2, 3, NAN, NAN, NAN], open=[1, 0, 1, 0, 1, 1], heat=[5.5, 6, 7, 8, 9, 10])
    panel = from_frame(frame, known=["heat", "open"])
    assert (panel.names, panel.known_names) == (("a", "b"), ("heat", "open"))
    assert panel.values.shape == (4, 2), "the last value of any series ends the past"
    assert panel.known.tolist() == [[5.5, 1], [6, 0], [7, 1], [8, 0], [9, 1], [10, 1]]
    assert from_frame(frame.drop(columns="open"), known="heat").known_names == ("heat",)
    assert from_frame(frame[::-1], known=["heat", "open"]).equals(panel)
    counted = from_frame(pd.DataFrame({"a": [1, 2, 4, None], "x": [1, 2, 3, 4]}), known=["x"])
    assert (counted.values.shape, counted.known.shape) == ((3, 1), (4, 1))


def test_covariates_of_long_tables_agree():
    frame = long({"x": [1, 2, 3, NAN], "y": [4, 5, 6, NAN]}).assign(open=[1, 0, 1, 0] * 2)
    panel = from_frame(frame, known=["open"])
    assert panel.values.tolist() == [[1, 4], [2, 5], [3, 6]]
    assert panel.known[:, 0].tolist() == [1, 0, 1, 0]
    frame.loc[5, "open"] = 7
    with pytest.raises(ValueError, match="column 'open', row 5: 7 at 2020-01-02, where another series has 0"):
        from_frame(frame, known=["open"])


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([1, None, 1, 1], "column 'x', row 1 is missing"),
        ([1, 1, 1, None], "column 'x', row 3 is missing"),
        (["wet", "dry", "wet", "dry"], "column 'x', row 0: 'wet' is not a number.*encode it as numbers"),
        ([1, np.inf, 1, 1], "column 'x', row 1 is inf"),
        (["1", "2", "3", "oh"], "column 'x', row 3: 'oh' is not a number"),
    ],
)
def test_covariates_are_numbers_without_gaps(cells, words):
    with pytest.raises(ValueError, match=words):
        from_frame(hours(4, a=[1, 2, 4, NAN], x=cells), known=["x"])


def test_covariates_have_a_row_for_each_step():
    frame = hours(6, a=range(6), x=range(6)).drop(index=2)
    assert len(from_frame(frame[["time", "a"]]).values) == 6
    with pytest.raises(ValueError, match="no row at 2020-01-01 02:00:00"):
        from_frame(frame, known=["x"])
