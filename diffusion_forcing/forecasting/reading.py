"""Panels from files and DataFrames, with errors that name the column and the row.

Tables are wide (one column a series) or long (one row a series and timestamp). The time column, the layout and the frequency are inferred
where only one reading is possible; where several are, an error names the option that decides. Nothing is repaired silently: a panel's
`notes` list what was inserted or left out.
"""

from __future__ import annotations

import re
import warnings
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..files import write_atomically
from .cells import CLOCKS, VALUE_TYPES, Table, are_times_of_day, date_share, is_datetime, is_increasing, is_text
from .panel import Array, Panel, first_duplicate, format_time, offset_of
from .timestamps import (
    TIMES,
    check_duplicates,
    check_one_frequency,
    check_spacing,
    find_time,
    join_times_of_day,
    read_stamps,
    regular_grid,
)

TABLES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")
ARRAYS = (".npz", ".npy")
ROW_NUMBERS = "unnamed: 0"
"""pandas' name, in lower case, of a column written without one: mostly its own row numbers."""


@dataclass(frozen=True)
class Columns:
    """Which columns of a table hold what; None: inferred."""

    time: str | None = None
    """Timestamps; dates as a frame's index serve as well."""
    id: str | None = None
    """Names of the series, of a long table."""
    value: str | None = None
    """Values, of a long table; of a wide one, the only series to read."""
    freq: str | None = None
    """pandas' offset alias."""
    known: Iterable[str] = ()
    """Covariates known in advance; their rows after the last value of any series are the future."""
    value_type: str = "auto"
    """auto and real allow all numbers, positive 0 and more, counts whole ones of these. Forecasts of series that were never negative are
    not either, unless it is real."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "known", (self.known,) if isinstance(self.known, str) else tuple(self.known))
        if self.value_type not in VALUE_TYPES:
            raise ValueError(f"value_type is one of {', '.join(VALUE_TYPES)}; got {self.value_type!r}")


def read(
    path: str | Path, *, time: str | None = None, id: str | None = None, value: str | None = None, freq: str | None = None,
    known: Iterable[str] = (), value_type: str = "auto",
) -> Panel:  # fmt: skip
    """A panel from CSV, TSV, Parquet, or an array: .npy (t, d), or .npz with `values` (t, d) and optionally `start`, `freq`, `names`.

    Options are those of `Columns`. Messages number rows as the file shows them: the first below a header is row 2, the first of an array 0.
    """
    columns = Columns(time, id, value, freq, known, value_type)
    file = Path(path)
    ending = next((e for e in (*TABLES, *ARRAYS) if file.name.lower().endswith(e)), None)
    if ending is None:
        raise ValueError(f"series are read from {', '.join((*TABLES, *ARRAYS))}; got {file.name}, convert it to one of these")
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}; check the path")
    if ending in ARRAYS:
        if time is not None or id is not None:
            raise ValueError(f"{file.name} is an array, which has no time or id column; leave --time and --id out")
        return _read_array(file, columns)
    frame = _read_parquet(file) if ending == ".parquet" else _read_text(file, "\t" if ".tsv" in ending else ",", id)
    return panel_of(frame, columns, first_row=1 if ending == ".parquet" else 2, source=file.name)


def from_frame(
    frame: pd.DataFrame, *, time: str | None = None, id: str | None = None, value: str | None = None, freq: str | None = None,
    known: Iterable[str] = (), value_type: str = "auto",
) -> Panel:  # fmt: skip
    """A panel from a DataFrame, wide or long. Options are those of `Columns`."""
    return panel_of(frame, Columns(time, id, value, freq, known, value_type))


def write_frame(frame: pd.DataFrame, path: str | Path) -> None:
    """Write CSV or Parquet, by the ending of the path, in one move: an interrupted write leaves the old file or none."""
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


# Files.


def _read_text(file: Path, separator: str, id: str | None) -> Any:
    """The cells of a CSV: numbers where a whole column is of numbers, else text as it is in the file."""
    options: dict[str, Any] = {"sep": separator, "header": None, "encoding": "utf-8-sig", "skip_blank_lines": False,
                               "skipinitialspace": True, "keep_default_na": False}  # fmt: skip
    try:
        header = [str(cell).strip() for cell in pd.read_csv(file, nrows=1, dtype=str, **options).iloc[0]]
        _check_header(header, file.name)
        names = [name or f"Unnamed: {i}" for i, name in enumerate(header)]
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # rows longer than the header, of which pandas would drop the end
            # Only empty cells are missing to pandas: a series may be called NA, and `cells` reads other words for missing.
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
    duplicate = first_duplicate([name for name in header if name])
    if duplicate is not None:
        raise ValueError(f"{source} has two columns called {duplicate!r}; rename one")
    if len(header) == 1 and re.search(r"[;\t|]", header[0]):
        raise ValueError(f"{source} has one column, {header[0]!r}; write it with commas between the cells, or with tabs as .tsv")
    numbers = pd.to_numeric(pd.Series(header, dtype=object), errors="coerce").to_numpy(dtype=np.float64)
    dates = np.array([bool(re.match(r"\d{4}-\d\d?-\d\d?", name)) for name in header])
    # Whole numbers are what pandas calls columns without names; fractions and dates are no names.
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


def _read_array(file: Path, columns: Columns) -> Panel:
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
    table = Table(pd.DataFrame(values, columns=names), np.arange(len(values)), file.name)
    index, freq, notes = _array_clock(arrays, len(values), columns.freq, file.name)
    return _assemble(table, index, replace(columns, freq=freq), notes)


def _array_clock(arrays: dict[str, Any], t: int, freq: str | None, source: str) -> tuple[Any, str | None, list[str]]:
    """Timestamps (t,) of an array that has `start` and a freq; else step numbers, and a note if the file's own freq could not be used."""
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
        return plain, None, [f"freq {own!r} is not an offset of pandas: steps are counted, not dated"]
    try:
        start = pd.Timestamp(str(arrays["start"]))
    except ValueError as error:
        raise ValueError(f"`start` of {source} is {str(arrays['start'])!r}, which is not a date; write 2020-01-31") from error
    index = pd.date_range(start, periods=t, freq=offset)
    if index[0] != start:
        raise ValueError(
            f"`start` of {source}, {format_time(start)}, is not on the clock of freq {offset.freqstr!r}, which has "
            f"{format_time(index[0])} next"
        )
    return index, offset.freqstr, []


# From a table to a panel.


def panel_of(frame: Any, columns: Columns, *, first_row: int = 0, source: str = "the frame") -> Panel:
    """A panel from a DataFrame. first_row, source: what messages call the first row and the table."""
    if isinstance(frame, pd.Series):
        frame = frame.to_frame("value" if frame.name is None else frame.name)
    cells, time, freq = _flatten_index(frame, columns.time, columns.freq, source)
    id, known = columns.id, tuple(columns.known)
    if not len(cells):
        raise ValueError(f"{source} has no rows{', only a header' if len(cells.columns) else ''}; it should hold one for each step")
    table = Table(cells, first_row + np.arange(len(cells)), source)
    chosen = [(o, c) for o, c in (("time", time), ("id", id), ("value", columns.value), *(("known", c) for c in known)) if c is not None]
    for option, column in chosen:
        if column not in cells:
            raise ValueError(f"{source} has no column {column!r}, which --{option} names; it has {', '.join(cells)}")
    duplicate = first_duplicate([column for _, column in chosen])
    if duplicate is not None:
        raise ValueError(f"column {duplicate!r} cannot be two of time, id, value and known; name it once")
    taken = {column for _, column in chosen}
    table, time, notes = join_times_of_day(table, time, id, taken)
    time = time or find_time(table, id, taken)
    if time is None and id is not None:
        raise ValueError(f"{source} is long, with series distinguished by {id!r}, and no column looks like the time; name it with --time")
    if time is None:
        counted = isinstance(frame.index, pd.RangeIndex) and frame.index.step > 0
        stamps = frame.index if counted else pd.RangeIndex(len(cells))
        return _assemble(table, stamps, replace(columns, time=None, freq=freq), [])
    table, stamps = read_stamps(table, time)
    if isinstance(stamps, pd.DatetimeIndex) and stamps.tz is None and table.cells[time].astype(str).str.contains(r":\d\d\s*[+-]\d\d").any():
        notes.append(f"the offsets in {time!r} change, and its timestamps are midnights: they were read as days, without a zone")
    if not len(stamps):
        raise ValueError(f"{source}, column {time!r} has no timestamps; name another with --time")
    id = id or _find_id(table, time, stamps, known)
    return _assemble(table, stamps, replace(columns, time=time, id=id, freq=freq), notes)


def _flatten_index(frame: Any, time: str | None, freq: str | None, source: str) -> tuple[Any, str | None, str | None]:
    """The frame with its index as columns (unless it only counts rows) and text for column names; the time column and the freq, if the
    index gave them."""
    index = frame.index
    cells = frame.reset_index(drop=True)
    cells.columns = [str(column) for column in frame.columns]
    if isinstance(index, (pd.DatetimeIndex, pd.PeriodIndex)):
        stamps = index.to_timestamp() if isinstance(index, pd.PeriodIndex) else index
        name = str(index.name) if index.name is not None else next(n for n in ("time", "index", "index's timestamps") if n not in cells)
        if time in (None, name) and name not in cells:
            return cells.assign(**{name: stamps}), name, freq or stamps.freqstr
    elif index.nlevels > 1 or index.name is not None or pd.api.types.is_object_dtype(index.dtype):
        levels = index.to_frame(index=False)
        levels.columns = [f"index {i}" if name is None else str(name) for i, name in enumerate(index.names)]
        cells = pd.concat([levels, cells], axis=1)
    duplicate = first_duplicate(list(cells.columns))
    if duplicate is not None:
        raise ValueError(f"{source} has two columns called {duplicate!r}; rename one")
    return cells, time, freq


def _find_id(table: Table, time: str, stamps: Any, known: tuple[str, ...]) -> str | None:
    """The column of series names of a long table; None of a wide one."""
    if not stamps.has_duplicates:
        return None
    words = [
        column
        for column, cells in table.cells.items()
        if column not in (time, *known) and is_text(cells) and date_share(cells) < 0.5 and not are_times_of_day(cells)
    ]
    if len(words) > 1:
        raise ValueError(f"{table.source} repeats its timestamps, and {', '.join(words)} may tell series apart; name one with --id")
    return words[0] if words else None


def _assemble(table: Table, stamps: Any, columns: Columns, notes: list[str]) -> Panel:
    """A panel of cells whose timestamps (rows,) and layout are known."""
    time, known = columns.time or "", tuple(columns.known)
    covariates = [_covariate(table, column) for column in known]
    names, codes, numbers = _wide(table, columns, notes) if columns.id is None else _long(table, columns)
    check_duplicates(table, time, stamps, codes, names)
    if codes is not None and columns.freq is None:
        check_spacing(table, stamps, codes, names)
    index, freq, positions, gaps = regular_grid(table, time, stamps, columns.freq)
    values = np.full((len(index), len(names)), np.nan)
    values[positions if codes is None else (positions, codes)] = numbers
    if codes is None and columns.freq is None:
        check_one_frequency(table, names, values, index, positions)
    t = int(np.flatnonzero(~np.isnan(values).all(axis=1))[-1]) + 1
    notes = notes + gaps
    placed = np.empty((t, 0))
    if known:
        placed = np.column_stack([_place(table, *pair, positions, index) for pair in zip(known, covariates, strict=True)])
    elif t < len(index):
        notes.append(f"the timestamps after {format_time(index[t - 1])} have no values and were left out")
    for name, series in zip(names, values[:t].T, strict=True):
        present = np.flatnonzero(~np.isnan(series))
        if (series[present] == series[present[0]]).all():
            since = format_time(index[present[0]])
            notes.append(f"{name!r} is {series[present[0]]:g} throughout, from {since} on: its forecasts will be that constant")
    return Panel(values[:t], tuple(names), index[:t], freq, placed, known, tuple(notes), columns.value_type)


def _wide(table: Table, columns: Columns, notes: list[str]) -> tuple[list[str], None, Array]:
    """Names (d,), and values (rows, d)."""
    names = [column for column in table.cells if column not in (columns.time, *columns.known)]
    if columns.value is not None:
        names = [columns.value]
    for column in [column for column in names if column != columns.value]:
        if column.lower() == ROW_NUMBERS and is_increasing(table, column, None):
            names.remove(column)
            notes.append(f"column {column!r} counts rows and was left out")
        elif column.lower() in (*TIMES, *CLOCKS):
            notes.append(f"column {column!r} was taken for a series; if it is the clock, name it with --time")
    if not names:
        beside = ", ".join(column for column in (columns.time, *columns.known) if column)
        raise ValueError(f"{table.source} has no column of values beside {beside}; add one for each series")
    numbers = [table.numbers(column, columns.value_type) for column in names]
    for name, column in zip(names, numbers, strict=True):
        if np.isnan(column).all():
            raise ValueError(f"{table.source}, column {name!r} has no values at all; drop it")
    return names, None, np.column_stack(numbers)


def _long(table: Table, columns: Columns) -> tuple[list[str], NDArray[np.int64], Array]:
    """Names (d,), and for each row the number of its series and its value."""
    cells, id, value = table.cells, columns.id, columns.value
    taken = (columns.time, id, *columns.known, ROW_NUMBERS.capitalize())
    others = [column for column in cells if column not in taken and not is_datetime(cells[column])]
    candidates = [column for column in others if not is_text(cells[column])]
    if value is None and len(candidates) != 1:
        found = f"of {', '.join(candidates)} any may be it" if candidates else f"there are no numbers in {', '.join(others) or 'the rest'}"
        raise ValueError(
            f"{table.source} is long, by {columns.time!r} and {id!r}, and needs one column of values; {found}: name it with --value"
        )
    labels = cells[id].astype(object).where(cells[id].notna(), "").astype(str).str.strip()
    nameless = (labels == "").to_numpy()
    if nameless.any():
        raise ValueError(
            f"{table.at(str(id), int(nameless.argmax()))} does not say which series it belongs to; fill it in, or drop the row"
        )
    value = value or candidates[0]
    numbers = table.numbers(value, columns.value_type)
    codes, names = pd.factorize(labels)
    counts = np.bincount(codes, weights=~np.isnan(numbers), minlength=len(names))
    if not counts.all():
        raise ValueError(f"{table.source}, column {value!r} has no values at all for series {names[int(counts.argmin())]!r}; drop its rows")
    return [str(name) for name in names], codes.astype(np.int64), numbers


def _covariate(table: Table, column: str) -> Array:
    """A covariate (rows,): numbers, none missing."""
    cells = table.cells[column]
    if is_text(cells) or is_datetime(cells):
        raise ValueError(f"{table.at(column, 0)}: {str(cells.iloc[0])!r} is not a number, and covariates known in advance must be; "
                         "encode it as numbers, one column of 0 and 1 for each category")  # fmt: skip
    values = table.numbers(column)
    if np.isnan(values).any():
        raise ValueError(
            f"{table.at(column, int(np.isnan(values).argmax()))} is missing, and covariates known in advance may not have gaps; fill it in"
        )
    return values


def _place(table: Table, column: str, covariate: Array, positions: NDArray[np.int64], index: Any) -> Array:
    """A covariate (t,) on the clock, on which rows of the same timestamp must agree."""
    placed = np.full(len(index), np.nan)
    placed[positions[::-1]] = covariate[::-1]  # of rows with one timestamp the first stays
    differ = placed[positions] != covariate
    if differ.any():
        i = int(differ.argmax())
        raise ValueError(f"{table.at(column, i)}: {covariate[i]:g} at {format_time(index[positions[i]])}, where another series has "
                         f"{placed[positions[i]]:g}; covariates known in advance have one value a timestamp, for all series")  # fmt: skip
    if np.isnan(placed).any():
        stamp = index[int(np.isnan(placed).argmax())]
        raise ValueError(f"{table.source} has no row at {format_time(stamp)}, so that {column!r}, known in advance, has a gap there; add "
                         "the row")  # fmt: skip
    return placed
