"""Columns of a table as numbers, dates and times of day, with error messages that name the column and the row."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .panel import Array, format_time

MISSING = ("", "-", "na", "n/a", "#n/a", "nan", "null", "none", "<na>", "nat")
"""Cells that stand for a missing value, in any case."""
CLOCKS = ("t", "step", "index", "unnamed: 0")
"""Names by which increasing whole numbers are taken for a clock without dates. The last is pandas' name of its own row numbers."""
VALUE_TYPES: dict[str, tuple[str, Callable[[Array], NDArray[np.bool_]]]] = {
    "auto": ("numbers", lambda x: np.zeros(x.shape, dtype=bool)),
    "real": ("numbers", lambda x: np.zeros(x.shape, dtype=bool)),
    "positive": ("numbers of 0 or more", lambda x: x < 0),
    "counts": ("whole numbers of 0 or more", lambda x: (x < 0) | (np.isfinite(x) & (x != np.floor(x)))),
}
"""What values may be, in words, and which of them are not."""
NUMERIC_DATES = [("%Y%m%d", 16780101, 22611231), ("%Y%m", 190001, 219912), ("%Y%m%d%H", 1900010100, 2199123123),
                 ("%Y%m%d%H%M", 190001010000, 219912312359)]  # fmt: skip
"""Dates written as numbers: format, smallest and largest."""
TIME_OF_DAY = r"(\d{1,2}):(\d\d)(?::(\d\d(?:\.\d+)?))?\s*([AaPp][Mm])?"
DAY = pd.Timedelta(days=1)


@dataclass(frozen=True)
class Table:
    """Cells (a DataFrame), and for each row the number by which its file knows it."""

    cells: Any
    rows: NDArray[np.int64]
    source: str

    def at(self, column: str, i: int) -> str:
        """Where the i-th cell of a column is, for messages."""
        return f"{self.source}, column {column!r}, row {self.rows[i]}"

    def keep(self, mask: NDArray[np.bool_]) -> Table:
        return Table(self.cells[mask].reset_index(drop=True), self.rows[mask], self.source)

    def numbers(self, column: str, value_type: str = "auto") -> Array:
        """A column as numbers of a type, NaN where missing."""
        cells = self.cells[column]
        values, wrong = to_numbers(cells)
        if wrong.any():
            i = int(wrong.argmax())
            advice = "correct it, or leave it empty if it is missing"
            if is_text(cells):
                advice = "drop the column, write it as numbers such as 1.5, or, if it tells series apart, name it with --id"
            raise ValueError(f"{self.at(column, i)}: {str(cells.iloc[i])!r} is not a number; {advice}")
        rule, violates = VALUE_TYPES[value_type]
        for bad, should, advice in (
            (np.isinf(values), "finite", "correct it, or leave it empty"),
            (violates(values), rule, "correct it, or use --value-type real"),
        ):
            if bad.any():
                i = int(bad.argmax())
                raise ValueError(f"{self.at(column, i)} is {values[i]:g}, but values should be {should}; {advice}")
        return values


# Numbers.


def _distinct(cells: Any) -> tuple[NDArray[np.int64], Any]:
    """The number of each cell's content, and the distinct contents: names and dates repeat, and are slow to parse."""
    try:
        codes, contents = pd.factorize(cells.astype(object), use_na_sentinel=False)
    except TypeError:  # lists and the like
        codes, contents = np.arange(len(cells)), cells.to_numpy()
    return codes, pd.Series(contents, dtype=object)


def to_text(cells: Any) -> tuple[Any, NDArray[np.bool_]]:
    """Cells as stripped text, and which of them are missing."""
    text = cells.astype(object).where(cells.notna(), "").astype(str).str.strip()
    return text, text.str.lower().isin(MISSING).to_numpy()


def to_numbers(cells: Any) -> tuple[Array, NDArray[np.bool_]]:
    """Cells as numbers, NaN where missing or wrong, and which of them are wrong."""
    if pd.api.types.is_numeric_dtype(cells.dtype) and not pd.api.types.is_complex_dtype(cells.dtype):
        return cells.to_numpy(dtype=np.float64, na_value=np.nan), np.zeros(len(cells), dtype=bool)
    codes, contents = _distinct(cells)
    text, missing = to_text(contents.map(lambda cell: int(cell) if isinstance(cell, (bool, np.bool_)) else cell).astype(object))
    values = pd.to_numeric(text.where(~missing, None).astype(object), errors="coerce").to_numpy(dtype=np.float64, copy=True)
    right = ~np.isnan(values)
    values[right] = [float(cell) for cell in text[right]]  # pandas is off in the last digits, so that one NA would change its column
    return values[codes], (~right & ~missing)[codes]


def is_text(cells: Any) -> bool:
    """Whether most cells of a column are words; a column of numbers with a few misspelt ones is not text."""
    if isinstance(cells.dtype, pd.CategoricalDtype):
        return True
    if not (pd.api.types.is_object_dtype(cells.dtype) or pd.api.types.is_string_dtype(cells.dtype)):
        return False
    contents = _distinct(cells)[1]
    wrong = to_numbers(contents)[1].sum()
    return bool(wrong) and 2 * wrong >= (~to_text(contents)[1]).sum()


def is_increasing(table: Table, column: str, label: str | None) -> bool:
    """Whether a column holds whole numbers that increase from row to row, or within each of the series that `label` tells apart."""
    values, wrong = to_numbers(table.cells[column])
    present = ~np.isnan(values)
    if wrong.any() or not present.any() or (values[present] != np.floor(values[present])).any():
        return False
    numbers = pd.Series(values[present])
    steps = numbers.diff() if label is None else numbers.groupby(table.cells[label].astype(str).to_numpy()[present]).diff()
    return bool((steps.dropna() > 0).all())


# Dates.


def is_datetime(cells: Any) -> bool:
    return pd.api.types.is_datetime64_any_dtype(cells.dtype) or isinstance(cells.dtype, pd.PeriodDtype)


def parse_dates(cells: Any) -> tuple[Any, NDArray[np.bool_], str | None]:
    """Text as dates, NaT where it is none; which cells are neither dates nor missing; and, if day and month are ambiguous, how the
    two readings of a cell differ."""
    codes, contents = _distinct(cells)
    text, missing = to_text(contents)
    # pandas reads "now" and "13:00" as dates of today; ours have a year of four digits, or digits with a separator between.
    text = text.where(text.str.contains(r"\d{4}|\d[-/.:]\d") & ~text.str.fullmatch(TIME_OF_DAY) & ~missing, None)
    zones = text.str.extract(r":\d\d(?:\.\d+)?\s*(Z|[+-]\d\d(?::?\d\d)?)$", expand=False)
    zoned = bool(zones.notna().any())
    if zones.nunique() > 1 and zones.notna().sum() == text.notna().sum():
        wall = text.str.replace(r"\s*(?:Z|[+-]\d\d(?::?\d\d)?)$", "", regex=True)
        if wall.dropna().str.contains(r"[T ]00:00(?::00(?:\.0+)?)?$").all():  # days of a zone that changes its clocks
            text, zoned = wall, False

    def parse(**options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of formats that pandas has to guess: so do we, and compare
            return pd.DatetimeIndex(pd.to_datetime(text, errors="coerce", utc=zoned, **options)).as_unit("ns")

    dates, ambiguity = parse(format="ISO8601"), None
    if 2 * dates.notna().sum() < (~missing).sum():
        us, eu = parse(dayfirst=False), parse(dayfirst=True)
        if us.notna().sum() == eu.notna().sum() and not us.equals(eu):
            i = int((np.asarray(us != eu) & np.asarray(us.notna() & eu.notna())).argmax())
            ambiguity = f"{text.iloc[i]!r} may be {format_time(us[i])} or {format_time(eu[i])}"
        dates = us if us.notna().sum() >= eu.notna().sum() else eu
    return dates[codes], (np.asarray(dates.isna()) & ~missing)[codes], ambiguity


def date_share(cells: Any) -> float:
    """The share of a column's distinct contents, missing ones aside, that are dates."""
    dates, wrong, _ = parse_dates(_distinct(cells)[1])
    return float(dates.notna().sum() / max(dates.notna().sum() + wrong.sum(), 1))


def dates_of_numbers(values: Array, name: str) -> Any:
    """Numbers as dates where they are (20200131, 202001, 2020013113, 202001311330, or 2020 in a column called year); else None."""
    present = values[~np.isnan(values)]
    if name.lower() in CLOCKS or not len(present) or (present != np.floor(present)).any():
        return None
    forms = [("%Y", 1678, 2261)] if name.lower() == "year" else NUMERIC_DATES
    form = next((form for form, low, high in forms if ((present >= low) & (present <= high)).all()), None)
    if form is None:
        return None
    dates = pd.to_datetime(pd.Series([None if np.isnan(v) else str(int(v)) for v in values], dtype=object), format=form, errors="coerce")
    return pd.DatetimeIndex(dates).as_unit("ns") if dates.notna().sum() == len(present) else None


def are_numeric_dates(table: Table, column: str) -> bool:
    """Whether numbers are dates such as 20200131. Years do not count: a column of them may be a feature of the calendar."""
    values, wrong = to_numbers(table.cells[column])
    return column.lower() != "year" and not wrong.any() and not np.isnan(values).all() and dates_of_numbers(values, column) is not None


def parse_times_of_day(cells: Any) -> tuple[Any, NDArray[np.bool_]]:
    """Times of day (13:00, 13:00:30, 1:00 pm) as the time since midnight, and which cells are neither that nor missing."""
    codes, contents = _distinct(cells)
    text, missing = to_text(contents)
    parts = text.str.extract(f"^{TIME_OF_DAY}$")
    hours, minutes, seconds = (pd.to_numeric(parts[i]).to_numpy(dtype=np.float64) for i in range(3))
    half = parts[3].str.lower()
    hours = np.where(half.notna(), hours % 12 + 12 * (half == "pm"), hours)
    total = hours * 3600 + minutes * 60 + np.nan_to_num(seconds)
    total = np.where((total <= DAY.total_seconds()) & (minutes < 60), total, np.nan)  # 24:00 ends a day
    return pd.to_timedelta(total, unit="s").round("us")[codes], (np.isnan(total) & ~missing)[codes]


def are_times_of_day(cells: Any) -> bool:
    """Whether at least half of a column are times of day without dates."""
    if pd.api.types.is_numeric_dtype(cells.dtype) or is_datetime(cells):
        return False
    times, wrong = parse_times_of_day(_distinct(cells)[1])
    return bool(times.notna().any() and times.notna().sum() >= wrong.sum())
