"""Time series side by side, from files: one clock, one column a series, and complaints that name the column and the row.

Files are wide (one column a series) or long (one row a series and stamp). What a file does not say is found out, and what cannot be
found out is asked for. Nothing is repaired in silence: a panel's `notes` say what was inserted or left out.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..checks import check_counts

Array = NDArray[np.float64]
TABLES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")
ARRAYS = (".npz", ".npy")
TIMES = ("time", "date", "datetime", "timestamp", "ds", "day", "month", "year")
"""Names by which a column is taken for the time, in any case, the surest first."""
ROWS = "unnamed: 0"
"""What pandas calls the column that it wrote without a name: its own row numbers, mostly."""
CLOCKS = ("t", "step", "index", ROWS)
"""Names by which whole numbers that rise are taken for a clock without dates."""
MISSING = ("", "-", "na", "n/a", "#n/a", "nan", "null", "none", "<na>", "nat")
RULES: dict[str, tuple[str, Callable[[Array], NDArray[np.bool_]]]] = {
    "auto": ("numbers", lambda x: np.zeros(x.shape, dtype=bool)),
    "real": ("numbers", lambda x: np.zeros(x.shape, dtype=bool)),
    "positive": ("numbers of 0 or more", lambda x: x < 0),
    "counts": ("whole numbers of 0 or more", lambda x: (x < 0) | (np.isfinite(x) & (x != np.floor(x)))),
}
UNITS = {"h": "hour", "D": "day", "B": "business day", "W": "week", "min": "minute", "s": "second", "MS": "month", "ME": "month",
         "QS": "quarter", "QE": "quarter", "YS": "year", "YE": "year"}  # fmt: skip
DAY = pd.Timedelta(days=1)
NUMERIC = [("%Y%m%d", 16780101, 22611231), ("%Y%m", 190001, 219912), ("%Y%m%d%H", 1900010100, 2199123123),
           ("%Y%m%d%H%M", 190001010000, 219912312359)]  # fmt: skip
"""Dates written as numbers, and from which to which."""
TIME_OF_DAY = r"(\d{1,2}):(\d\d)(?::(\d\d(?:\.\d+)?))?\s*([AaPp][Mm])?"
CALENDAR = {"M": (28, 31), "Q": (89, 92), "Y": (365, 366)}
"""How many days are taken for a month, a quarter and a year."""


@dataclass(frozen=True, eq=False)
class Panel:
    """Series side by side on one clock.

    values: (t, d), NaN where missing. index: (t,) stamps, a RangeIndex where there are no dates. freq: pandas' offset alias ("h", "B",
    "30min", "MS" ...), None without dates. known: (t + ahead, c) covariates known in advance, the rows beyond t are the future.
    notes: what a reader of the file should be told, in sentences. kind: what values may be, as `from_frame` was told; "real": negative,
    even where none is yet.
    """

    values: Array
    names: tuple[str, ...]
    index: pd.DatetimeIndex | pd.RangeIndex
    freq: str | None
    known: Array
    known_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    kind: str = "auto"

    def __post_init__(self) -> None:
        for name in ("values", "known"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.float64))
        t, d = self.values.shape if self.values.ndim == 2 else (-1, -1)
        if t < 1 or d < 1 or d != len(self.names):
            raise ValueError(f"values have the shape (t, d), a column for each of the {len(self.names)} names; got {self.values.shape}")
        if len(self.index) != t:
            raise ValueError(f"the index has a stamp for each of the {t} rows of values; got {len(self.index)}")
        if self.known.ndim != 2 or len(self.known) < t or self.known.shape[1] != len(self.known_names):
            raise ValueError(f"known has the shape (t + ahead, c), {t} rows at least and a column for each of the {len(self.known_names)} "
                             f"known_names; got {self.known.shape}")  # fmt: skip
        twice = _twice([*self.names, *self.known_names])
        if twice is not None:
            raise ValueError(f"each series and each covariate has a name of its own; {twice!r} stands twice, rename one")
        for names, array, wrong in (
            (self.names, self.values, np.isinf(self.values)),
            (self.known_names, self.known, ~np.isfinite(self.known)),
        ):
            if wrong.any():
                row, column = np.argwhere(wrong)[0]
                raise ValueError(
                    f"{names[column]!r} is {array[row, column]} at step {row}; series are finite or missing, covariates finite"
                )
        self._check_clock()

    def _check_clock(self) -> None:
        if isinstance(self.index, pd.RangeIndex):
            if self.freq is not None:
                raise ValueError(f"a clock without dates has no freq; got {self.freq!r}, pass None or a DatetimeIndex")
            if self.index.step < 1:
                raise ValueError(f"a clock runs forward; its step is {self.index.step}, turn the rows round")
            return
        if not isinstance(self.index, pd.DatetimeIndex) or self.freq is None:
            raise ValueError(f"the index is a DatetimeIndex with a freq, or a RangeIndex without; got {type(self.index).__name__} and freq "
                             f"{self.freq!r}")  # fmt: skip
        if not self.index.equals(pd.date_range(self.index[0], periods=len(self.index), freq=offset_of(self.freq))):
            raise ValueError(f"the index does not run in steps of freq {self.freq!r} from {_say(self.index[0])}; `from_frame` fills gaps")

    def future(self, steps: int) -> pd.Index:
        """The stamps of the next `steps` steps."""
        check_counts(steps=steps)
        if self.freq is None:
            first, step = self.index[-1] + self.index.step, self.index.step
            return pd.RangeIndex(first, first + steps * step, step)
        return pd.date_range(self.index[-1], periods=steps + 1, freq=offset_of(self.freq))[1:]

    def until(self, t: int) -> Panel:
        """The first t steps as if nothing later existed. What is known in advance stays, and notes, which tell of the whole, go."""
        if not 1 <= t <= len(self.values):
            raise ValueError(f"a panel of {len(self.values)} steps can be cut after 1 to {len(self.values)} of them; got {t}")
        return replace(self, values=self.values[:t], index=self.index[:t], notes=())

    def to_frame(self) -> pd.DataFrame:
        """A wide frame: one column a series, stamps as its index."""
        name = "t" if self.freq is None else "time"
        return pd.DataFrame(self.values, index=self.index.rename(None if name in self.names else name), columns=list(self.names))


@dataclass(frozen=True)
class _Options:
    """What the user said, or we found out, of a table's columns. Without a time column no stamp can be off the clock."""

    time: str | None
    id: str | None
    value: str | None
    freq: str | None
    known: tuple[str, ...]
    kind: str


# Reading files.


def read(
    path: str | Path,
    *,
    time: str | None = None,
    id: str | None = None,
    value: str | None = None,
    freq: str | None = None,
    known: Iterable[str] = (),
    kind: str = "auto",
) -> Panel:
    """A panel from CSV, TSV, Parquet, or an array: .npy (t, d), or .npz with `values` (t, d) and, if it likes, `start`, `freq`, `names`.

    Options are those of `from_frame`. Rows are named as the file shows them: the first below a header is row 2, the first of an array 0.
    """
    file = Path(path)
    ending = next((e for e in (*TABLES, *ARRAYS) if file.name.lower().endswith(e)), None)
    if ending is None:
        raise ValueError(f"series are read from {', '.join((*TABLES, *ARRAYS))}; got {file.name}, convert it to one of these")
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}; check the path")
    if ending in ARRAYS:
        if time is not None or id is not None:
            raise ValueError(f"{file.name} is an array, which has no time or id column; leave --time and --id out")
        return _read_array(file, value, freq, _names(known), kind)
    frame = _read_parquet(file) if ending == ".parquet" else _read_text(file, "\t" if ".tsv" in ending else ",", id)
    first = 1 if ending == ".parquet" else 2
    options: dict[str, Any] = {"time": time, "id": id, "value": value, "freq": freq, "known": known, "kind": kind}
    return from_frame(frame, **options, first_row=first, source=file.name)


def _read_text(file: Path, separator: str, id: str | None) -> Any:
    """The cells of a CSV: numbers where a whole column is of numbers, else text as it stands in the file."""
    options: dict[str, Any] = {"sep": separator, "header": None, "encoding": "utf-8-sig", "skip_blank_lines": False,
                               "skipinitialspace": True, "keep_default_na": False}  # fmt: skip
    try:
        header = [str(cell).strip() for cell in pd.read_csv(file, nrows=1, dtype=str, **options).iloc[0]]
        _check_header(header, file.name)
        names = [name or f"Unnamed: {i}" for i, name in enumerate(header)]
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # rows longer than the header, of which pandas would drop the end
            # Only empty cells are missing to pandas: a series may be called NA, and other words for it are ours to read.
            frame = pd.read_csv(file, skiprows=1, names=names, index_col=False, na_values=[""], low_memory=False,
                                float_precision="round_trip", dtype={id: str} if id in names else None, **options)  # fmt: skip
    except pd.errors.EmptyDataError as error:
        what = f"the first line of {file.name}" if file.stat().st_size else file.name
        raise ValueError(f"{what} is empty; a table has a line that names the columns, then a row for each step") from error
    except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise ValueError(f"the rows of {file.name} do not fit its header ({str(error).strip()}); each needs {len(header)} cells") from error
    except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file.name} is damaged or not text in UTF-8 ({error}); write it again") from error
    hollow = [name for name, head in zip(names, header, strict=True) if not head and frame[name].isna().all()]
    return frame.drop(columns=hollow)  # of lines that end with a separator


def _check_header(header: list[str], source: str) -> None:
    """Raise where the first line names no columns, or one twice."""
    if not any(header):
        raise ValueError(f"the first line of {source} has empty cells only; it should name the columns")
    twice = _twice([name for name in header if name])
    if twice is not None:
        raise ValueError(f"{source} has two columns called {twice!r}; rename one")
    if len(header) == 1 and re.search(r"[;\t|]", header[0]):
        raise ValueError(f"{source} has one column, {header[0]!r}; write it with commas between the cells, or with tabs as .tsv")
    numbers = pd.to_numeric(pd.Series(header, dtype=object), errors="coerce").to_numpy(dtype=np.float64)
    dates = np.array([bool(re.match(r"\d{4}-\d\d?-\d\d?", name)) for name in header])
    # Whole numbers are what pandas calls columns that nobody named; fractions and dates are no names.
    if (np.isfinite(numbers) | dates).all() and (dates | (numbers != np.floor(numbers))).any():
        raise ValueError(
            f"the first line of {source} holds values ({', '.join(header[:3])} ...); put a line above it that names the columns"
        )


def _read_parquet(file: Path) -> Any:
    try:
        return pd.read_parquet(file)
    except ImportError as error:
        raise ImportError("reading Parquet needs pyarrow: pip install 'diffusion_forcing[forecasting]'") from error
    except (ValueError, OSError) as error:
        raise ValueError(f"{file.name} is damaged or not Parquet ({error}); write it again") from error


def _read_array(file: Path, value: str | None, freq: str | None, known: tuple[str, ...], kind: str) -> Panel:
    try:
        loaded = np.load(file, allow_pickle=False)
        arrays = {"values": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{file.name} is damaged or holds more than plain numbers ({error}); write it again with NumPy") from error
    if "values" not in arrays:
        raise ValueError(f"{file.name} has no array `values` (t, d); it holds {', '.join(arrays) or 'nothing'}")
    values = arrays["values"]
    values = values[:, None] if values.ndim == 1 else values
    if values.ndim != 2 or values.dtype.kind not in "biuf" or not values.size:
        raise ValueError(f"`values` of {file.name} should be numbers (t, d); got {arrays['values'].shape} of {values.dtype}")
    names = [str(name) for name in np.atleast_1d(arrays["names"])] if "names" in arrays else [str(i) for i in range(values.shape[1])]
    if len(names) != values.shape[1]:
        raise ValueError(f"{file.name} has {len(names)} names for {values.shape[1]} series; give one each")
    table = _Table(pd.DataFrame(values, columns=names), np.arange(len(values)), file.name)
    index, freq, notes = _array_clock(arrays, len(values), freq, file.name)
    return _panel(table, index, _Options(None, None, value, freq, known, kind), notes)


def _array_clock(arrays: dict[str, Any], t: int, freq: str | None, source: str) -> tuple[Any, str | None, list[str]]:
    """Stamps (t,) of an array that has `start` and a freq; else a plain clock, and a note if the file's own words came to nothing."""
    own = str(arrays["freq"]) if "freq" in arrays else None
    plain = pd.RangeIndex(t)
    if "start" not in arrays:
        if freq is not None:
            raise ValueError(
                f"{source} has no `start`, so its steps have no dates and --freq {freq} no meaning; add `start` or leave it out"
            )
        return plain, None, [] if own is None else [f"freq {own!r} comes without a `start`: steps are counted, not dated"]
    if freq is None and own is None:
        raise ValueError(f"{source} has a `start` but no `freq`; add it, or give --freq")
    try:
        offset = offset_of(freq or own or "")
    except ValueError:
        if freq is not None:
            raise
        return plain, None, [f"freq {own!r} is no offset of pandas: steps are counted, not dated"]
    try:
        start = pd.Timestamp(str(arrays["start"]))
    except ValueError as error:
        raise ValueError(f"`start` of {source} is {str(arrays['start'])!r}, which is not a date; write 2020-01-31") from error
    index = pd.date_range(start, periods=t, freq=offset)
    if index[0] != start:
        raise ValueError(
            f"`start` of {source}, {_say(start)}, is not on the clock of freq {offset.freqstr!r}, which has {_say(index[0])} next"
        )
    return index, offset.freqstr, []


# Cells.


@dataclass(frozen=True)
class _Table:
    """Cells, and for each row the number by which its file knows it."""

    cells: Any
    rows: NDArray[np.int64]
    source: str

    def at(self, column: str, i: int) -> str:
        return f"{self.source}, column {column!r}, row {self.rows[i]}"

    def keep(self, mask: NDArray[np.bool_]) -> _Table:
        return _Table(self.cells[mask].reset_index(drop=True), self.rows[mask], self.source)

    def numbers(self, column: str, kind: str = "auto") -> Array:
        """A column as numbers that keep the rule of their kind, NaN where missing."""
        cells = self.cells[column]
        values, wrong = _numbers(cells)
        if wrong.any():
            i = int(wrong.argmax())
            out = "correct it, or leave it empty if it is missing"
            if _is_text(cells):
                out = "drop the column, write it as numbers such as 1.5, or, if it tells series apart, name it with --id"
            raise ValueError(f"{self.at(column, i)}: {str(cells.iloc[i])!r} is not a number; {out}")
        rule, broken = RULES[kind]
        for bad, should, out in (
            (np.isinf(values), "finite", "correct it, or leave it empty"),
            (broken(values), rule, "correct it, or use --values real"),
        ):
            if bad.any():
                i = int(bad.argmax())
                raise ValueError(f"{self.at(column, i)}: {values[i]:g} stands where values should be {should}; {out}")
        return values


def _distinct(cells: Any) -> tuple[NDArray[np.int64], Any]:
    """For each cell the number of its content, and the contents: names and stamps come again and again, and are slow to read."""
    try:
        codes, contents = pd.factorize(cells.astype(object), use_na_sentinel=False)
    except TypeError:  # lists and the like
        codes, contents = np.arange(len(cells)), cells.to_numpy()
    return codes, pd.Series(contents, dtype=object)


def _text(cells: Any) -> tuple[Any, NDArray[np.bool_]]:
    """Cells as stripped text, and which of them are missing."""
    text = cells.astype(object).where(cells.notna(), "").astype(str).str.strip()
    return text, text.str.lower().isin(MISSING).to_numpy()


def _numbers(cells: Any) -> tuple[Array, NDArray[np.bool_]]:
    """Cells as numbers, NaN where missing or wrong, and which of them are wrong."""
    if pd.api.types.is_numeric_dtype(cells.dtype) and not pd.api.types.is_complex_dtype(cells.dtype):
        return cells.to_numpy(dtype=np.float64, na_value=np.nan), np.zeros(len(cells), dtype=bool)
    codes, contents = _distinct(cells)
    text, missing = _text(contents.map(lambda cell: int(cell) if isinstance(cell, (bool, np.bool_)) else cell).astype(object))
    values = pd.to_numeric(text.where(~missing, None).astype(object), errors="coerce").to_numpy(dtype=np.float64, copy=True)
    right = ~np.isnan(values)
    values[right] = [float(cell) for cell in text[right]]  # pandas is off in the last digits, so that one NA would change its column
    return values[codes], (~right & ~missing)[codes]


def _is_text(cells: Any) -> bool:
    """Whether cells are words, and not numbers some of which are misspelt."""
    if isinstance(cells.dtype, pd.CategoricalDtype):
        return True
    if not (pd.api.types.is_object_dtype(cells.dtype) or pd.api.types.is_string_dtype(cells.dtype)):
        return False
    contents = _distinct(cells)[1]
    wrong = _numbers(contents)[1].sum()
    return bool(wrong) and 2 * wrong >= (~_text(contents)[1]).sum()


def _is_dated(cells: Any) -> bool:
    return pd.api.types.is_datetime64_any_dtype(cells.dtype) or isinstance(cells.dtype, pd.PeriodDtype)


# The clock.


def _dates(cells: Any) -> tuple[Any, NDArray[np.bool_], str | None]:
    """Text as dates, NaT where it is none; which cells are neither dates nor missing; and the two readings of a cell where two remain."""
    codes, contents = _distinct(cells)
    text, missing = _text(contents)
    # pandas reads "now" and "13:00" as dates of today; ours have a year of four digits, or figures with a mark between.
    text = text.where(text.str.contains(r"\d{4}|\d[-/.:]\d") & ~text.str.fullmatch(TIME_OF_DAY) & ~missing, None)
    zones = text.str.extract(r":\d\d(?:\.\d+)?\s*(Z|[+-]\d\d(?::?\d\d)?)$", expand=False)
    zoned = bool(zones.notna().any())
    if zones.nunique() > 1 and zones.notna().sum() == text.notna().sum():
        wall = text.str.replace(r"\s*(?:Z|[+-]\d\d(?::?\d\d)?)$", "", regex=True)
        if wall.dropna().str.contains(r"[T ]00:00(?::00(?:\.0+)?)?$").all():  # days of a zone that changes its clocks
            text, zoned = wall, False

    def parse(**how: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of formats that it has to guess: so do we, and compare
            return pd.DatetimeIndex(pd.to_datetime(text, errors="coerce", utc=zoned, **how)).as_unit("ns")

    dates, doubt = parse(format="ISO8601"), None
    if 2 * dates.notna().sum() < (~missing).sum():
        us, eu = parse(dayfirst=False), parse(dayfirst=True)
        if us.notna().sum() == eu.notna().sum() and not us.equals(eu):
            i = int((np.asarray(us != eu) & np.asarray(us.notna() & eu.notna())).argmax())
            doubt = f"{text.iloc[i]!r} may be {_say(us[i])} or {_say(eu[i])}"
        dates = us if us.notna().sum() >= eu.notna().sum() else eu
    return dates[codes], (np.asarray(dates.isna()) & ~missing)[codes], doubt


def _date_share(cells: Any) -> float:
    """The share of a column's contents, missing ones aside, that are dates."""
    dates, wrong, _ = _dates(_distinct(cells)[1])
    return float(dates.notna().sum() / max(dates.notna().sum() + wrong.sum(), 1))


def _times(cells: Any) -> tuple[Any, NDArray[np.bool_]]:
    """Times of day, such as 13:00, 13:00:30 or 1:00 pm, as what they add to midnight; and which cells are neither that nor missing."""
    codes, contents = _distinct(cells)
    text, missing = _text(contents)
    parts = text.str.extract(f"^{TIME_OF_DAY}$")
    hours, minutes, seconds = (pd.to_numeric(parts[i]).to_numpy(dtype=np.float64) for i in range(3))
    half = parts[3].str.lower()
    hours = np.where(half.notna(), hours % 12 + 12 * (half == "pm"), hours)
    total = hours * 3600 + minutes * 60 + np.nan_to_num(seconds)
    total = np.where((total <= DAY.total_seconds()) & (minutes < 60), total, np.nan)  # 24:00 ends a day
    return pd.to_timedelta(total, unit="s").round("us")[codes], (np.isnan(total) & ~missing)[codes]


def _are_times(cells: Any) -> bool:
    """Whether a column holds times of day without their dates, most of it at least."""
    if pd.api.types.is_numeric_dtype(cells.dtype) or _is_dated(cells):
        return False
    times, wrong = _times(_distinct(cells)[1])
    return bool(times.notna().any() and times.notna().sum() >= wrong.sum())


def _calendar(values: Array, name: str) -> Any:
    """Dates written as numbers, 20200131, 202001, 2020013113, 202001311330 or the year 2020 in a column of that name; None if not."""
    present = values[~np.isnan(values)]
    if name.lower() in CLOCKS or not len(present) or (present != np.floor(present)).any():
        return None
    forms = [("%Y", 1678, 2261)] if name.lower() == "year" else NUMERIC
    form = next((form for form, low, high in forms if ((present >= low) & (present <= high)).all()), None)
    if form is None:
        return None
    dates = pd.to_datetime(pd.Series([None if np.isnan(v) else str(int(v)) for v in values], dtype=object), format=form, errors="coerce")
    return pd.DatetimeIndex(dates).as_unit("ns") if dates.notna().sum() == len(present) else None


def _rises(table: _Table, column: str, label: str | None) -> bool:
    """Whether a column holds whole numbers that rise from row to row, or for each of the series that `label` tells apart."""
    values, wrong = _numbers(table.cells[column])
    present = ~np.isnan(values)
    if wrong.any() or not present.any() or (values[present] != np.floor(values[present])).any():
        return False
    numbers = pd.Series(values[present])
    steps = numbers.diff() if label is None else numbers.groupby(table.cells[label].astype(str).to_numpy()[present]).diff()
    return bool((steps.dropna() > 0).all())


def _find_time(table: _Table, id: str | None, taken: set[str]) -> str | None:
    """The column that holds the time, or None."""
    cells = table.cells
    free = [column for column in cells if column not in taken]
    dated = [column for column in free if _is_dated(cells[column])]
    named = sorted((column for column in free if column.lower() in TIMES), key=lambda column: TIMES.index(column.lower()))
    if len(dated) > 1 and len(set(dated) & set(named)) != 1:
        raise ValueError(f"{table.source} has dates in the columns {', '.join(dated)}; say which is the time with --time")
    if dated:
        return next((column for column in dated if column in named), dated[0])
    words = [column for column in free if _is_text(cells[column])]
    shares = {column: _date_share(cells[column]) for column in words}
    labels = [column for column in words if shares[column] < 0.5 and not _are_times(cells[column])]
    label = id or (labels[0] if len(labels) == 1 else None)
    for column in named:
        if column in words and shares[column] >= 0.5:
            return column
        if column not in words and (_is_calendar(table, column) or _rises(table, column, label)):
            return column
    clocks = [column for column in free if column.lower() in CLOCKS and column not in words]
    return next(
        itertools.chain(
            (column for column in words if shares[column] == 1),
            (column for column in words if column in named or shares[column] >= 0.5),  # its first cell that is no date will be named
            (column for column in clocks if _rises(table, column, label)),
        ),
        None,
    )


def _is_calendar(table: _Table, column: str) -> bool:
    """Whether numbers are dates such as 20200131. A year alone may be a feature of the calendar: it has to rise."""
    values, wrong = _numbers(table.cells[column])
    return column.lower() != "year" and not wrong.any() and not np.isnan(values).all() and _calendar(values, column) is not None


def _with_times(table: _Table, time: str | None, id: str | None, taken: set[str]) -> tuple[_Table, str | None, list[str]]:
    """The table, its time column and a note: dates and the times of day beside them are joined, where dates alone make no clock."""
    cells = table.cells
    free = [column for column in cells if column not in taken - {time}]
    hours = [column for column in free if _are_times(cells[column])]
    days = [column for column in free if column not in hours and (_is_dated(cells[column]) or _is_day(table, column))]
    if time is not None and time not in hours:
        days = [column for column in days if column == time]
    if len(hours) != 1 or len(days) != 1:
        return table, time, []
    (day,), (hour,) = days, hours
    labels = [column for column in free if column not in (day, hour) and _is_text(cells[column])]
    label = id or (labels[0] if len(labels) == 1 else None)
    dates = _read_stamps(table, day)
    there = np.asarray(dates.notna())
    again = pd.DataFrame({"day": dates, "label": "" if label is None else cells[label].astype(str)})[there].duplicated()
    if (dates[there] != dates[there].normalize()).any() or not again.any():
        return table, time, []
    times, wrong = _times(cells[hour])
    wrong |= there & np.asarray(times.isna())
    if wrong.any():
        i = int(wrong.argmax())
        raise ValueError(f"{table.at(hour, i)}: {str(cells[hour].iloc[i])!r} is no time of day to go with the date in {day!r}; write 13:00")
    joined = cells.assign(**{day: dates + times}).drop(columns=hour)
    return replace(table, cells=joined), day, [f"the dates in {day!r} and the times of day in {hour!r} were read together"]


def _is_day(table: _Table, column: str) -> bool:
    """Whether text or numbers are dates, most of them at least."""
    cells = table.cells[column]
    return _date_share(cells) >= 0.5 if _is_text(cells) else column.lower() in TIMES and _is_calendar(table, column)


def _stamps(table: _Table, time: str) -> tuple[_Table, Any]:
    """The rows that have a stamp, and the stamps: a DatetimeIndex, or whole numbers. Empty rows are left out."""
    stamps = _read_stamps(table, time)
    there = np.asarray(stamps.notna())
    if not there.all():
        others = table.cells.drop(columns=time)[~there]
        full = ~np.column_stack([_text(others[column])[1] for column in others] or [np.ones(len(others), dtype=bool)]).all(axis=1)
        if full.any():
            i = int(np.flatnonzero(~there)[full.argmax()])
            raise ValueError(f"{table.at(time, i)} has no stamp though the row has values; give it one, or drop the row")
        table, stamps = table.keep(there), stamps[there]
    return table, stamps if isinstance(stamps, pd.DatetimeIndex) else pd.Index(stamps.to_numpy().astype(np.int64))


def _read_stamps(table: _Table, time: str) -> Any:
    """A column as a DatetimeIndex, or as whole numbers; missing where it is empty."""
    cells = table.cells[time]
    wrong = np.zeros(len(cells), dtype=bool)
    if _is_dated(cells):
        try:
            stamps = (pd.PeriodIndex(cells).to_timestamp() if isinstance(cells.dtype, pd.PeriodDtype) else pd.DatetimeIndex(cells)).as_unit(
                "ns"
            )
        except pd.errors.OutOfBoundsDatetime as error:
            raise ValueError(f"{table.source}, column {time!r} has dates outside the years 1678 to 2261 ({error}); correct them") from error
    elif _is_text(cells):
        stamps, wrong, doubt = _dates(cells)
        if doubt is not None:
            raise ValueError(f"{table.source}, column {time!r}: {doubt}, and no other cell decides; write dates as 2020-01-31")
    else:
        values, wrong = _numbers(cells)
        wrong |= np.isfinite(values) & (values != np.floor(values)) | np.isinf(values)
        calendar = _calendar(values, time)
        stamps = pd.Index(values) if calendar is None else calendar
    if wrong.any():
        i = int(wrong.argmax())
        raise ValueError(f"{table.at(time, i)}: {str(cells.iloc[i])!r} is neither a date nor, as on a clock without dates, a whole number; "
                         "write 2020-01-31 or 2020-01-31 13:00, or name another column with --time")  # fmt: skip
    return stamps


def offset_of(freq: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the names that pandas had before: H, T, M ...
            return pd.tseries.frequencies.to_offset(freq)
    except ValueError as error:
        raise ValueError(f"freq {freq!r} is no offset of pandas; write h, 30min, D, B, W-MON, MS, ME, QS, YS or the like") from error


def _common(values: Any) -> Any:
    """The value that is there most often, the smallest of several."""
    found, counts = np.unique(np.asarray(values), return_counts=True)
    return found[counts.argmax()]


def _infer(stamps: Any) -> Any:
    """The offset at which sorted stamps stand, gaps aside."""
    found = pd.infer_freq(stamps)
    if found is not None and pd.date_range(stamps[0], periods=len(stamps), freq=found).equals(stamps):
        return offset_of(found)
    step = pd.Timedelta(int(_common(np.diff(stamps.asi8))), "ns")
    for alias, (shortest, longest) in CALENDAR.items():
        anchor = "" if alias == "M" else f"-{stamps[0]:%b}".upper()
        if shortest * DAY <= step <= longest * DAY:  # a few may be off: they are complained of, and the rest say what was meant
            if stamps.is_month_start.mean() > 0.7:
                return offset_of(f"{alias}S{anchor}")
            if stamps.is_month_end.mean() > 0.7:
                return offset_of(f"{alias}E{anchor}")
    if step == DAY and stamps.dayofweek.max() < 5 and pd.date_range(stamps[0], stamps[-1]).dayofweek.max() >= 5:
        return offset_of("B")
    return offset_of(f"W-{stamps[0]:%a}".upper()) if step == 7 * DAY else offset_of(step)


def _fixed(offset: Any) -> int | None:
    """The nanoseconds of an offset that is always as long, None of months and the like."""
    if isinstance(offset, pd.offsets.Day):
        return int((offset.n * DAY).value)
    return int(pd.Timedelta(offset).value) if isinstance(offset, pd.offsets.Tick) else None


def _grid(table: _Table, time: str, stamps: Any, freq: str | None) -> tuple[Any, str | None, NDArray[np.int64], list[str]]:
    """One clock under all stamps, its freq, where on it each row stands, and a note of what the rows left out."""
    unique = stamps.unique().sort_values()
    if len(unique) < 3:
        raise ValueError(f"{table.source} has {len(unique)} different stamps; a clock needs 3 at least")
    if isinstance(stamps, pd.DatetimeIndex):
        offset = _infer(unique) if freq is None else offset_of(freq)
        step = _fixed(offset)
        wall = (unique.tz_localize(None) if isinstance(offset, pd.offsets.Day) else unique).asi8
    elif freq is not None:
        raise ValueError(
            f"{table.source} counts its steps without dates, so --freq {freq} has no meaning; leave it out, or name dates by --time"
        )
    else:
        wall = unique.to_numpy()
        offset = step = int(_common(np.diff(wall)))
    if step is not None and (wall[-1] - wall[0]) // step > 20 * len(unique) + 10_000:
        raise ValueError(f"{table.source} has {len(unique)} stamps from {_say(unique[0])} to {_say(unique[-1])}, which would be "
                         f"{(wall[-1] - wall[0]) // step + 1} steps; correct the first or last, or give a longer --freq")  # fmt: skip
    # Most stamps say where the clock stands; one that starts off it should not put all others in the wrong.
    first = 0 if step is None else int((wall % step == _common(wall % step)).argmax())
    anchor = unique[first] - offset * int((wall[first] - wall[0]) // step) if first and step else unique[0]
    dated = isinstance(stamps, pd.DatetimeIndex)
    grid = pd.date_range(anchor, unique[-1], freq=offset) if dated else pd.RangeIndex(int(anchor), int(unique[-1]) + 1, step)
    positions = grid.get_indexer(stamps)
    if (positions < 0).any():
        i = int(np.flatnonzero(positions < 0)[stamps[positions < 0].argmin()])
        steps, out = (f" in steps of {offset.freqstr}", "give --freq, or resample") if dated else ("", "or count all steps")
        raise ValueError(f"{table.at(time, i)}: {_say(stamps[i])} is off the clock, which has {_neighbours(grid, stamps[i], offset)}"
                         f"{steps}; correct it, {out}")  # fmt: skip
    name = offset.freqstr if dated else None
    return grid, name, positions, _told_gaps(grid, unique, name)


def _neighbours(grid: Any, stamp: Any, offset: Any) -> str:
    if not len(grid):
        return f"{_say(offset.rollback(stamp))} before and {_say(offset.rollforward(stamp))} after it"
    i = int(grid.searchsorted(stamp))
    before = grid[i - 1] if i else grid[0] - offset
    return f"{_say(before)} before and {_say(grid[i] if i < len(grid) else grid[-1] + offset)} after it"


def _told_gaps(grid: Any, stamps: Any, freq: str | None) -> list[str]:
    gaps = grid.difference(stamps)
    if not len(gaps):
        return []
    unit = UNITS.get(freq.split("-")[0], f"step of {freq}") if freq else "step"
    if len(gaps) == 1:
        return [f"1 missing {unit} was inserted, at {_say(gaps[0])}"]
    many = unit.replace("step of", "steps of") if "step of" in unit else f"{unit}s"
    return [f"{len(gaps)} missing {many} were inserted, the first at {_say(gaps[0])}"]


def _say(stamp: Any) -> str:
    return f"step {stamp}" if isinstance(stamp, (int, np.integer)) else str(stamp).removesuffix(" 00:00:00")


# From cells to a panel.


def from_frame(
    frame: pd.DataFrame,
    *,
    time: str | None = None,
    id: str | None = None,
    value: str | None = None,
    freq: str | None = None,
    known: Iterable[str] = (),
    kind: str = "auto",
    first_row: int = 0,
    source: str = "the frame",
) -> Panel:
    """A panel from a DataFrame, wide or long.

    time, id, value: the columns of stamps, of the series' names and of values, found by themselves where only one can be meant; dates as
    the frame's index serve as well. freq: pandas' alias, found too. known: columns known in advance; their rows after the last value of
    any series are the future. kind: "auto" and "real" take all numbers, "positive" 0 and more, "counts" whole ones of these; forecasts of
    series that were never negative are not either, unless it is "real".
    first_row, source: what messages call the first row and the whole.
    """
    if isinstance(frame, pd.Series):
        frame = frame.to_frame("value" if frame.name is None else frame.name)
    cells, time, freq = _plain(frame, time, freq, source)
    known = _names(known)
    if not len(cells):
        raise ValueError(f"{source} has no rows{', only a header' if len(cells.columns) else ''}; it should hold one for each step")
    table = _Table(cells, first_row + np.arange(len(cells)), source)
    chosen = [(o, c) for o, c in (("time", time), ("id", id), ("value", value), *(("known", c) for c in known)) if c is not None]
    for option, column in chosen:
        if column not in cells:
            raise ValueError(f"{source} has no column {column!r}, which --{option} names; it has {', '.join(cells)}")
    twice = _twice([column for _, column in chosen])
    if twice is not None:
        raise ValueError(f"column {twice!r} cannot be two of time, id, value and known; name it once")
    taken = {column for _, column in chosen}
    table, time, notes = _with_times(table, time, id, taken)
    time = time or _find_time(table, id, taken)
    if time is None and id is not None:
        raise ValueError(f"{source} is long, with its series told apart by {id!r}, and no column looks like the time; name it with --time")
    if time is None:
        counted = isinstance(frame.index, pd.RangeIndex) and frame.index.step > 0
        return _panel(table, frame.index if counted else pd.RangeIndex(len(cells)), _Options(None, None, value, freq, known, kind), [])
    table, stamps = _stamps(table, time)
    if isinstance(stamps, pd.DatetimeIndex) and stamps.tz is None and table.cells[time].astype(str).str.contains(r":\d\d\s*[+-]\d\d").any():
        notes.append(f"the offsets in {time!r} change, and its stamps are midnights: they were read as days, without a zone")
    if not len(stamps):
        raise ValueError(f"{source}, column {time!r} has no stamps; name another with --time")
    id = id or _find_id(table, time, stamps, known)
    return _panel(table, stamps, _Options(time, id, value, freq, known, kind), notes)


def _plain(frame: Any, time: str | None, freq: str | None, source: str) -> tuple[Any, str | None, str | None]:
    """A frame whose index says nothing and whose columns have text for names; the time column, and the freq, if the index had them."""
    index = frame.index
    cells = frame.reset_index(drop=True)
    cells.columns = [str(column) for column in frame.columns]
    if isinstance(index, (pd.DatetimeIndex, pd.PeriodIndex)):
        stamps = index.to_timestamp() if isinstance(index, pd.PeriodIndex) else index
        name = str(index.name) if index.name is not None else next(n for n in ("time", "index", "stamps of the index") if n not in cells)
        if time in (None, name) and name not in cells:
            return cells.assign(**{name: stamps}), name, freq or stamps.freqstr
    elif index.nlevels > 1 or index.name is not None or pd.api.types.is_object_dtype(index.dtype):
        levels = index.to_frame(index=False)
        levels.columns = [f"index {i}" if name is None else str(name) for i, name in enumerate(index.names)]
        cells = pd.concat([levels, cells], axis=1)
    twice = _twice(list(cells.columns))
    if twice is not None:
        raise ValueError(f"{source} has two columns called {twice!r}; rename one")
    return cells, time, freq


def _find_id(table: _Table, time: str, stamps: Any, known: tuple[str, ...]) -> str | None:
    """The column that tells series apart in a long table; None of a wide one."""
    if not stamps.has_duplicates:
        return None
    words = [
        column
        for column, cells in table.cells.items()
        if column not in (time, *known) and _is_text(cells) and _date_share(cells) < 0.5 and not _are_times(cells)
    ]
    if len(words) > 1:
        raise ValueError(f"{table.source} repeats its stamps, and {', '.join(words)} may tell series apart; say which does with --id")
    return words[0] if words else None


def _panel(table: _Table, stamps: Any, options: _Options, notes: list[str]) -> Panel:
    """A panel of cells whose stamps (rows,) and layout are known."""
    if options.kind not in RULES:
        raise ValueError(f"kind is one of {', '.join(RULES)}; got {options.kind!r}")
    time, known, long = options.time or "", options.known, options.id is not None
    covariates = [_covariate(table, column) for column in known]
    names, codes, numbers = _long(table, options) if long else _wide(table, options, notes)
    _check_duplicates(table, time, stamps, codes, names)
    if codes is not None and options.freq is None:
        _check_spacing(table, stamps, codes, names)
    index, freq, positions, gaps = _grid(table, time, stamps, options.freq)
    values = np.full((len(index), len(names)), np.nan)
    values[positions if codes is None else (positions, codes)] = numbers
    if codes is None and options.freq is None:
        _check_pace(table, names, values, index, positions)
    t = int(np.flatnonzero(~np.isnan(values).all(axis=1))[-1]) + 1
    notes = notes + gaps
    placed = np.empty((t, 0))
    if known:
        placed = np.column_stack([_place(table, *pair, positions, index) for pair in zip(known, covariates, strict=True)])
    elif t < len(index):
        notes.append(f"the stamps after {_say(index[t - 1])} have no values and were left out")
    for name, series in zip(names, values[:t].T, strict=True):
        there = np.flatnonzero(~np.isnan(series))
        if (series[there] == series[there[0]]).all():
            since = _say(index[there[0]])
            notes.append(f"{name!r} is {series[there[0]]:g} throughout, from {since} on: its forecasts will be that constant")
    return Panel(values[:t], tuple(names), index[:t], freq, placed, known, tuple(notes), options.kind)


def _wide(table: _Table, options: _Options, notes: list[str]) -> tuple[list[str], None, Array]:
    """Names (d), and values (rows, d)."""
    names = [column for column in table.cells if column not in (options.time, *options.known)]
    if options.value is not None:
        names = [options.value]
    for column in [column for column in names if column != options.value]:
        if column.lower() == ROWS and _rises(table, column, None):
            names.remove(column)
            notes.append(f"column {column!r} counts rows and was left out")
        elif column.lower() in (*TIMES, *CLOCKS):
            notes.append(f"column {column!r} was taken for a series; if it is the clock, name it with --time")
    if not names:
        beside = ", ".join(column for column in (options.time, *options.known) if column)
        raise ValueError(f"{table.source} has no column of values beside {beside}; add one for each series")
    columns = [table.numbers(column, options.kind) for column in names]
    for name, numbers in zip(names, columns, strict=True):
        if np.isnan(numbers).all():
            raise ValueError(f"{table.source}, column {name!r} has no values at all; drop it")
    return names, None, np.column_stack(columns)


def _long(table: _Table, options: _Options) -> tuple[list[str], NDArray[np.int64], Array]:
    """Names (d), and for each row the number of its series and its value."""
    cells, id, value = table.cells, options.id, options.value
    taken = (options.time, id, *options.known, ROWS.capitalize())
    others = [column for column in cells if column not in taken and not _is_dated(cells[column])]
    candidates = [column for column in others if not _is_text(cells[column])]
    if value is None and len(candidates) != 1:
        found = f"of {', '.join(candidates)} any may be it" if candidates else f"there are no numbers in {', '.join(others) or 'the rest'}"
        raise ValueError(
            f"{table.source} is long, by {options.time!r} and {id!r}, and needs one column of values; {found}: name it with --value"
        )
    labels = cells[id].astype(object).where(cells[id].notna(), "").astype(str).str.strip()
    nameless = (labels == "").to_numpy()
    if nameless.any():
        raise ValueError(
            f"{table.at(str(id), int(nameless.argmax()))} does not say which series it belongs to; fill it in, or drop the row"
        )
    value = value or candidates[0]
    numbers = table.numbers(value, options.kind)
    codes, names = pd.factorize(labels)
    counts = np.bincount(codes, weights=~np.isnan(numbers), minlength=len(names))
    if not counts.all():
        raise ValueError(f"{table.source}, column {value!r} has no values at all for series {names[int(counts.argmin())]!r}; drop its rows")
    return [str(name) for name in names], codes.astype(np.int64), numbers


def _check_duplicates(table: _Table, time: str, stamps: Any, codes: NDArray[np.int64] | None, names: list[str]) -> None:
    """Raise where a stamp stands twice, in a series if `codes` tell them apart."""
    keys = pd.DataFrame({"code": 0 if codes is None else codes, "stamp": stamps})
    again = keys.duplicated().to_numpy()
    if not again.any():
        return
    i = int(again.argmax())
    first = int((keys == keys.iloc[i]).all(axis=1).to_numpy().argmax())
    whose, out = "", "keep one of the rows, or name the column that tells series apart with --id"
    if codes is not None:
        whose, out = f" of series {names[codes[i]]!r}", "keep one of the rows, or add them up"
    if isinstance(stamps, pd.DatetimeIndex):
        out += " (where clocks were put back for winter, write stamps in UTC)"
    raise ValueError(f"{table.at(time, i)}: {_say(stamps[i])}{whose} stands in row {table.rows[first]} already; {out}")


def _check_spacing(table: _Table, stamps: Any, codes: NDArray[np.int64], names: list[str]) -> None:
    """Raise where series of a long table tick at different paces. Two stamps alone have no pace."""
    dated = isinstance(stamps, pd.DatetimeIndex)
    ticks = stamps.asi8 if dated else stamps.to_numpy()
    paces: dict[int, tuple[str, Any]] = {}
    for code, rows in pd.Series(ticks).groupby(codes).indices.items():
        own = np.unique(ticks[rows])
        if len(own) < 3:
            continue
        step = int(_common(np.diff(own)))
        days = step / DAY.value if dated else 0.0
        pace = next((-shortest for shortest, longest in CALENDAR.values() if shortest <= days <= longest), step)
        spaced = _infer(stamps[rows].unique().sort_values()).freqstr if dated and pace not in paces else str(step)
        paces.setdefault(pace, (names[code], spaced))
    if len(paces) > 1:
        (one, its), (other, others) = list(paces.values())[:2]
        raise ValueError(f"{table.source} mixes frequencies: series {one!r} is spaced by {its}, series {other!r} by {others}; resample "
                         "one, read them from two files, or, if one has many gaps, give the clock of both with --freq")  # fmt: skip


def _check_pace(table: _Table, names: list[str], values: Array, index: Any, positions: NDArray[np.int64]) -> None:
    """Raise where a column of a wide table ticks steadily, and more slowly than another. Fewer than 6 values have no pace."""
    places = [np.flatnonzero(~np.isnan(series)) for series in values.T]
    shortest = [int(np.diff(at).min()) if len(at) > 5 else 0 for at in places]
    finest = min((step for step in shortest if step), default=0)
    for name, at, step in zip(names, places, shortest, strict=True):
        steady = step > finest and ((np.diff(at) == step).all() or (isinstance(index, pd.DatetimeIndex) and pd.infer_freq(index[at])))
        if steady:
            row = int((positions == at[1]).argmax())
            stamps = f"{_say(index[at[0]])}, {_say(index[at[1]])}, {_say(index[at[2]])}"
            raise ValueError(f"{table.at(name, row)}: {table.source} mixes frequencies: column {name!r} has values at {stamps} ... only, "
                             "other columns between them; resample one, read them from two files, or, if it has many gaps, give the clock "
                             "of both with --freq")  # fmt: skip


def _covariate(table: _Table, column: str) -> Array:
    """A column known in advance, which is of numbers and has no holes."""
    cells = table.cells[column]
    if _is_text(cells) or _is_dated(cells):
        raise ValueError(f"{table.at(column, 0)}: {str(cells.iloc[0])!r} is not a number, and what is known in advance has to be; "
                         "encode it as numbers, one column of 0 and 1 for each category")  # fmt: skip
    values = table.numbers(column)
    if np.isnan(values).any():
        raise ValueError(
            f"{table.at(column, int(np.isnan(values).argmax()))} is missing, and what is known in advance has no holes; fill it in"
        )
    return values


def _place(table: _Table, column: str, covariate: Array, positions: NDArray[np.int64], index: Any) -> Array:
    """A covariate on the clock, on which the rows of one stamp have to agree."""
    placed = np.full(len(index), np.nan)
    placed[positions[::-1]] = covariate[::-1]  # of rows with one stamp the first stays
    differ = placed[positions] != covariate
    if differ.any():
        i = int(differ.argmax())
        raise ValueError(f"{table.at(column, i)}: {covariate[i]:g} at {_say(index[positions[i]])}, where another series has "
                         f"{placed[positions[i]]:g}; what is known in advance is one number a stamp, for all series")  # fmt: skip
    if np.isnan(placed).any():
        stamp = index[int(np.isnan(placed).argmax())]
        raise ValueError(f"{table.source} has no row at {_say(stamp)}, so that {column!r}, known in advance, has a hole there; add the row")
    return placed


def _names(names: Iterable[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _twice(names: list[str]) -> str | None:
    return next((name for i, name in enumerate(names) if name in names[:i]), None) if len(set(names)) < len(names) else None


# Checks and results.


def check_horizon(panel: Panel, horizon: int) -> None:
    """Raise unless a panel is long enough to forecast `horizon` steps, and what is known in advance is known that far."""
    t = len(panel.values)
    if horizon < 1 or 4 * horizon > t:
        raise ValueError(f"a horizon is from 1 to a quarter of the steps there are, here {t // 4} of {t}; got {horizon}, forecast fewer "
                         "steps or read a longer file")  # fmt: skip
    ahead = len(panel.known) - t
    if panel.known_names and ahead < horizon:
        raise ValueError(f"{panel.known_names[0]!r}, known in advance, has to cover the {horizon} steps to forecast and has {ahead} rows "
                         f"after the last value; the first that is missing is {_say(panel.future(ahead + 1)[-1])}; add rows")  # fmt: skip


def write_frame(frame: pd.DataFrame, path: str | Path) -> None:
    """Write CSV or Parquet, as the path ends. A killed writing leaves the old file, or none, never half of one."""
    from ..files import write_atomically

    file = Path(path)
    ending = next((e for e in TABLES if file.name.lower().endswith(e)), None)
    if ending is None:
        raise ValueError(f"tables are written as {', '.join(TABLES)}; got {file.name}, choose one of these")
    index = not (isinstance(frame.index, pd.RangeIndex) and frame.index.name is None)

    def write(temporary: Path) -> None:
        if ending == ".parquet":
            return frame.to_parquet(temporary, index=index)
        separator, compression = "\t" if ".tsv" in ending else ",", "gzip" if ending.endswith(".gz") else None
        return frame.to_csv(temporary, index=index, sep=separator, compression=compression)

    write_atomically(file, write)


# The public data sets.


@dataclass(frozen=True)
class Named:
    """A public set: GluonTS' name for it, and its rolling test windows of `horizon` steps."""

    gluonts: str
    horizon: int
    windows: int
    freq: str


NAMED = {
    "exchange": Named("exchange_rate_nips", 30, 5, "B"),
    "solar": Named("solar_nips", 24, 7, "h"),
    "electricity": Named("electricity_nips", 24, 7, "h"),
    "traffic": Named("traffic_nips", 24, 7, "h"),
    "taxi": Named("taxi_30min", 24, 56, "30min"),
    "wikipedia": Named("wiki-rolling_nips", 30, 5, "D"),
}


def load_named(name: str, path: str | Path | None = None) -> tuple[Panel, Named]:
    """A public set as one panel, the last windows * horizon steps of which are its test windows.

    path: a folder or .tar.gz of GluonTS' json lines; without one GluonTS downloads the set, or finds it in its own cache.
    """
    if name not in NAMED:
        raise ValueError(f"the sets known by name are {', '.join(NAMED)}; got {name!r}, and files of your own go to `read`")
    named = NAMED[name]
    if path is None:
        source = named.gluonts
        freq, train, test = _download(named)
    else:
        source = str(path)
        if not Path(path).exists():
            raise FileNotFoundError(f"there is no folder or archive {path}; check the path, or leave it out to download {named.gluonts}")
        freq, train, test = _metadata(Path(path)), _entries(Path(path), "train"), _entries(Path(path), "test")
    if freq is not None and offset_of(freq) != offset_of(named.freq):
        raise ValueError(
            f"{source} is of freq {freq!r} and {name} of {named.freq!r}; this is another set, pass the path of {named.gluonts}"
        )
    return _join(train, test, named, source), named


def _download(named: Named) -> tuple[str | None, Iterable[Any], Iterable[Any]]:
    try:
        from gluonts.dataset.repository import get_dataset
    except ImportError as error:
        raise ImportError(
            "downloading needs gluonts: pip install 'diffusion_forcing[forecasting]', or pass the path of a set you have"
        ) from error
    try:
        found = get_dataset(named.gluonts)
    except (OSError, HTTPException, EOFError, tarfile.TarError) as error:
        raise ConnectionError(f"{named.gluonts} could not be downloaded ({error}); fetch {named.gluonts}.tar.gz where there is a "
                              "network, and pass its path") from error  # fmt: skip
    return found.metadata.freq, found.train, found.test


def _lines(path: Path, wanted: Callable[[PurePosixPath], bool]) -> Iterator[tuple[str, bytes]]:
    """The lines of the wanted files of a folder or archive, and where they stand.

    Of an archive only plain files are read, and nothing is written to disk.
    """
    try:
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                if file.is_file() and wanted(PurePosixPath(file.relative_to(path).as_posix())):
                    with open(file, "rb") as stream:
                        yield from _numbered(str(file), stream)
            return
        with tarfile.open(path) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() and wanted(PurePosixPath(member.name)) else None
                if content is not None:
                    yield from _numbered(f"{path}:{member.name}", content)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is damaged, or neither a folder nor a .tar.gz ({error}); fetch it again") from error


def _numbered(name: str, stream: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    content = gzip.GzipFile(fileobj=stream) if name.endswith(".gz") else stream
    for number, line in enumerate(content, start=1):
        if line.strip():
            yield f"{name}, line {number}", line


def _metadata(path: Path) -> str | None:
    """The freq that a set says of itself."""
    text = b"".join(line for _, line in _lines(path, lambda file: file.name == "metadata.json"))
    try:
        found = json.loads(text or b"{}")
        return found.get("freq") or found.get("time_granularity")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"metadata.json of {path} is not that of a set ({error}); fetch it again") from error


def _entries(path: Path, part: str) -> Iterator[dict[str, Any]]:
    """The entries of train or test, one a line."""

    def wanted(file: PurePosixPath) -> bool:
        return file.parent.name == part and file.name.endswith((".json", ".json.gz", ".jsonl")) and not file.name.startswith(".")

    for where, line in _lines(path, wanted):
        try:
            entry = json.loads(line)
            yield {"start": pd.Timestamp(entry["start"]), "target": np.asarray(entry["target"], dtype=np.float64)}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{where} is not an entry with `start` and `target` ({error!r}); fetch the set again") from error


def _join(train: Iterable[Any], test: Iterable[Any], named: Named, source: str) -> Panel:
    """One panel from the training series and, d for each window, those that end with the test windows."""
    offset = offset_of(named.freq)
    positions: dict[Any, int] = {}

    def place(start: Any, first: Any) -> int:
        if start not in positions:
            stamp = _start(start, offset)
            clock = pd.date_range(first, stamp, freq=offset)
            if not len(clock) or clock[-1] != stamp:
                raise ValueError(
                    f"{source} has an entry that starts at {_say(stamp)}, off the clock that starts at {_say(first)}; fetch it again"
                )
            positions[start] = len(clock) - 1
        return positions[start]

    entries = list(train)
    if not entries:
        raise ValueError(f"{source} has no entries in train/; it should hold metadata, train and test of {named.gluonts}")
    first = min(_start(entry["start"], offset) for entry in entries)
    whole = [_lay(np.empty(0), place(entry["start"], first), entry["target"], source) for entry in entries]
    ends: list[int] = []
    for i, entry in enumerate(test):
        series, at = i % len(whole), place(entry["start"], first)
        whole[series] = _lay(whole[series], at, entry["target"], source)
        ends.append(at + len(entry["target"]))
    t = max(map(len, whole))
    due = [t - named.horizon * back for back in range(named.windows - 1, -1, -1) for _ in whole]
    if ends != due:
        raise ValueError(f"{source} should test {len(whole)} series in {named.windows} windows, each {named.horizon} steps later; it has "
                         f"{len(ends)} entries that end at the steps {sorted(set(ends))[:8]}; pass {named.gluonts}")  # fmt: skip
    values = np.stack([np.pad(series, (0, t - len(series)), constant_values=np.nan) for series in whole], axis=1)
    index = pd.date_range(first, periods=t, freq=offset)
    empty = np.isnan(values).all(axis=1)
    notes = (
        (f"{int(empty.sum())} steps between training and test have no values, from {_say(index[int(empty.argmax())])} on",)
        if empty.any()
        else ()
    )
    return Panel(values, tuple(str(i) for i in range(len(whole))), index, offset.freqstr, np.empty((t, 0)), notes=notes)


def _start(start: Any, offset: Any) -> Any:
    """A stamp on the clock, from text or from GluonTS' period."""
    stamp = start.to_timestamp() if isinstance(start, pd.Period) else pd.Timestamp(start)
    return stamp if _fixed(offset) else offset.rollforward(stamp)


def _lay(held: Array, at: int, target: Any, source: str) -> Array:
    """A series on the clock, with `target` laid down from step `at` on; where both have values they agree."""
    target = np.asarray(target, dtype=np.float64)
    if target.ndim != 1:
        raise ValueError(f"{source} has an entry of shape {target.shape}; each should be one series, so pass the set of single series")
    longer = np.full(max(len(held), at + len(target)), np.nan)
    longer[: len(held)] = held
    there = longer[at : at + len(target)]
    differ = (there != target) & ~np.isnan(there) & ~np.isnan(target)
    if differ.any():
        step = int(differ.argmax())
        raise ValueError(f"{source} has both {there[step]:g} and {target[step]:g} for one series at step {at + step}; train and test do "
                         "not belong together, fetch the set again")  # fmt: skip
    longer[at : at + len(target)] = np.where(np.isnan(target), there, target)
    return longer
