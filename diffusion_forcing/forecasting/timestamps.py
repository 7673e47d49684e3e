"""The time column of a table: which one it is, its timestamps, their frequency, and the regular grid under all of them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .cells import (
    CLOCKS,
    DAY,
    Table,
    are_numeric_dates,
    are_times_of_day,
    date_share,
    dates_of_numbers,
    is_datetime,
    is_increasing,
    is_text,
    parse_dates,
    parse_times_of_day,
    to_numbers,
    to_text,
)
from .panel import Array, format_time, offset_of

TIMES = ("time", "date", "datetime", "timestamp", "ds", "day", "month", "year")
"""Names by which a column is taken for the time, in any case, the most certain first."""
UNITS = {"h": "hour", "D": "day", "B": "business day", "W": "week", "min": "minute", "s": "second", "MS": "month", "ME": "month",
         "QS": "quarter", "QE": "quarter", "YS": "year", "YE": "year"}  # fmt: skip
CALENDAR = {"M": (28, 31), "Q": (89, 92), "Y": (365, 366)}
"""How many days a month, a quarter and a year may have."""


# The time column.


def find_time(table: Table, id: str | None, taken: set[str]) -> str | None:
    """The column that holds the time, or None. taken: columns whose role is known already."""
    cells = table.cells
    free = [column for column in cells if column not in taken]
    dated = [column for column in free if is_datetime(cells[column])]
    named = sorted((column for column in free if column.lower() in TIMES), key=lambda column: TIMES.index(column.lower()))
    if len(dated) > 1 and len(set(dated) & set(named)) != 1:
        raise ValueError(f"{table.source} has dates in the columns {', '.join(dated)}; name the time column with --time")
    if dated:
        return next((column for column in dated if column in named), dated[0])
    words = [column for column in free if is_text(cells[column])]
    shares = {column: date_share(cells[column]) for column in words}
    labels = [column for column in words if shares[column] < 0.5 and not are_times_of_day(cells[column])]
    label = id or (labels[0] if len(labels) == 1 else None)
    for column in named:
        if column in words and shares[column] >= 0.5:
            return column
        if column not in words and (are_numeric_dates(table, column) or is_increasing(table, column, label)):
            return column
    clocks = [column for column in free if column.lower() in CLOCKS and column not in words]
    return next(
        itertools.chain(
            (column for column in words if shares[column] == 1),
            (column for column in words if column in named or shares[column] >= 0.5),  # an error will name its first cell that is no date
            (column for column in clocks if is_increasing(table, column, label)),
        ),
        None,
    )


def join_times_of_day(table: Table, time: str | None, id: str | None, taken: set[str]) -> tuple[Table, str | None, list[str]]:
    """The table, its time column and a note. A column of dates and one of times of day are joined, where dates alone repeat."""
    cells = table.cells
    free = [column for column in cells if column not in taken - {time}]
    hours = [column for column in free if are_times_of_day(cells[column])]
    days = [column for column in free if column not in hours and (is_datetime(cells[column]) or _are_dates(table, column))]
    if time is not None and time not in hours:
        days = [column for column in days if column == time]
    if len(hours) != 1 or len(days) != 1:
        return table, time, []
    (day,), (hour,) = days, hours
    labels = [column for column in free if column not in (day, hour) and is_text(cells[column])]
    label = id or (labels[0] if len(labels) == 1 else None)
    dates = _read_stamps(table, day)
    present = np.asarray(dates.notna())
    repeats = pd.DataFrame({"day": dates, "label": "" if label is None else cells[label].astype(str)})[present].duplicated()
    if (dates[present] != dates[present].normalize()).any() or not repeats.any():
        return table, time, []
    times, wrong = parse_times_of_day(cells[hour])
    wrong |= present & np.asarray(times.isna())
    if wrong.any():
        i = int(wrong.argmax())
        raise ValueError(f"{table.at(hour, i)}: {str(cells[hour].iloc[i])!r} is no time of day to go with the date in {day!r}; write 13:00")
    joined = cells.assign(**{day: dates + times}).drop(columns=hour)
    return replace(table, cells=joined), day, [f"the dates in {day!r} and the times of day in {hour!r} were read together"]


def _are_dates(table: Table, column: str) -> bool:
    """Whether at least half of a column of text or numbers are dates."""
    cells = table.cells[column]
    return date_share(cells) >= 0.5 if is_text(cells) else column.lower() in TIMES and are_numeric_dates(table, column)


def read_stamps(table: Table, time: str) -> tuple[Table, Any]:
    """The rows that have a timestamp, and the timestamps: a DatetimeIndex, or whole numbers. Empty rows are left out."""
    stamps = _read_stamps(table, time)
    present = np.asarray(stamps.notna())
    if not present.all():
        others = table.cells.drop(columns=time)[~present]
        full = ~np.column_stack([to_text(others[column])[1] for column in others] or [np.ones(len(others), dtype=bool)]).all(axis=1)
        if full.any():
            i = int(np.flatnonzero(~present)[full.argmax()])
            raise ValueError(f"{table.at(time, i)} has no timestamp though the row has values; add one, or drop the row")
        table, stamps = table.keep(present), stamps[present]
    return table, stamps if isinstance(stamps, pd.DatetimeIndex) else pd.Index(stamps.to_numpy().astype(np.int64))


def _read_stamps(table: Table, time: str) -> Any:
    """A column as a DatetimeIndex, or as whole numbers; missing where it is empty."""
    cells = table.cells[time]
    wrong = np.zeros(len(cells), dtype=bool)
    if is_datetime(cells):
        try:
            stamps = (pd.PeriodIndex(cells).to_timestamp() if isinstance(cells.dtype, pd.PeriodDtype) else pd.DatetimeIndex(cells)).as_unit(
                "ns"
            )
        except pd.errors.OutOfBoundsDatetime as error:
            raise ValueError(f"{table.source}, column {time!r} has dates outside the years 1678 to 2261 ({error}); correct them") from error
    elif is_text(cells):
        stamps, wrong, ambiguity = parse_dates(cells)
        if ambiguity is not None:
            raise ValueError(f"{table.source}, column {time!r}: {ambiguity}, and no other cell decides; write dates as 2020-01-31")
    else:
        values, wrong = to_numbers(cells)
        wrong |= np.isfinite(values) & (values != np.floor(values)) | np.isinf(values)
        dates = dates_of_numbers(values, time)
        stamps = pd.Index(values) if dates is None else dates
    if wrong.any():
        i = int(wrong.argmax())
        raise ValueError(f"{table.at(time, i)}: {str(cells.iloc[i])!r} is neither a date nor, as on a clock without dates, a whole number; "
                         "write 2020-01-31 or 2020-01-31 13:00, or name another column with --time")  # fmt: skip
    return stamps


# The grid.


def regular_grid(table: Table, time: str, stamps: Any, freq: str | None) -> tuple[Any, str | None, NDArray[np.int64], list[str]]:
    """A regular clock (t,) under all timestamps, its freq, the position of each row on it, and a note of what was inserted."""
    unique = stamps.unique().sort_values()
    if len(unique) < 3:
        raise ValueError(f"{table.source} has {len(unique)} different timestamps; a clock needs at least 3")
    if isinstance(stamps, pd.DatetimeIndex):
        offset = _infer(unique) if freq is None else offset_of(freq)
        step = _nanoseconds(offset)
        wall = (unique.tz_localize(None) if isinstance(offset, pd.offsets.Day) else unique).asi8
    elif freq is not None:
        raise ValueError(
            f"{table.source} counts its steps without dates, so --freq {freq} has no meaning; leave it out, or name dates by --time"
        )
    else:
        wall = unique.to_numpy()
        offset = step = int(_most_common(np.diff(wall)))
    if step is not None and (wall[-1] - wall[0]) // step > 20 * len(unique) + 10_000:
        steps = (wall[-1] - wall[0]) // step + 1
        raise ValueError(f"{table.source} has {len(unique)} timestamps from {format_time(unique[0])} to {format_time(unique[-1])}, which "
                         f"would be {steps} steps; correct the first or last, or give a longer --freq")  # fmt: skip
    # The phase of most timestamps counts: a first one off the clock must not make all others wrong.
    first = 0 if step is None else int((wall % step == _most_common(wall % step)).argmax())
    anchor = unique[first] - offset * int((wall[first] - wall[0]) // step) if first and step else unique[0]
    dated = isinstance(stamps, pd.DatetimeIndex)
    grid = pd.date_range(anchor, unique[-1], freq=offset) if dated else pd.RangeIndex(int(anchor), int(unique[-1]) + 1, step)
    positions = grid.get_indexer(stamps)
    if (positions < 0).any():
        i = int(np.flatnonzero(positions < 0)[stamps[positions < 0].argmin()])
        steps, advice = (f" in steps of {offset.freqstr}", "give --freq, or resample") if dated else ("", "or count all steps")
        raise ValueError(f"{table.at(time, i)}: {format_time(stamps[i])} is off the clock, which has {_neighbours(grid, stamps[i], offset)}"
                         f"{steps}; correct it, {advice}")  # fmt: skip
    name = offset.freqstr if dated else None
    return grid, name, positions, _gap_notes(grid, unique, name)


def _neighbours(grid: Any, stamp: Any, offset: Any) -> str:
    if not len(grid):
        return f"{format_time(offset.rollback(stamp))} before and {format_time(offset.rollforward(stamp))} after it"
    i = int(grid.searchsorted(stamp))
    before = grid[i - 1] if i else grid[0] - offset
    return f"{format_time(before)} before and {format_time(grid[i] if i < len(grid) else grid[-1] + offset)} after it"


def _gap_notes(grid: Any, stamps: Any, freq: str | None) -> list[str]:
    gaps = grid.difference(stamps)
    if not len(gaps):
        return []
    unit = UNITS.get(freq.split("-")[0], f"step of {freq}") if freq else "step"
    if len(gaps) == 1:
        return [f"1 missing {unit} was inserted, at {format_time(gaps[0])}"]
    many = unit.replace("step of", "steps of") if "step of" in unit else f"{unit}s"
    return [f"{len(gaps)} missing {many} were inserted, the first at {format_time(gaps[0])}"]


def _infer(stamps: Any) -> Any:
    """The offset at which sorted timestamps lie, gaps aside."""
    inferred = pd.infer_freq(stamps)
    if inferred is not None and pd.date_range(stamps[0], periods=len(stamps), freq=inferred).equals(stamps):
        return offset_of(inferred)
    step = pd.Timedelta(int(_most_common(np.diff(stamps.asi8))), "ns")
    for alias, (shortest, longest) in CALENDAR.items():
        anchor = "" if alias == "M" else f"-{stamps[0]:%b}".upper()
        if shortest * DAY <= step <= longest * DAY:  # a few may be off the clock, which is an error; the others decide
            if stamps.is_month_start.mean() > 0.7:
                return offset_of(f"{alias}S{anchor}")
            if stamps.is_month_end.mean() > 0.7:
                return offset_of(f"{alias}E{anchor}")
    if step == DAY and stamps.dayofweek.max() < 5 and pd.date_range(stamps[0], stamps[-1]).dayofweek.max() >= 5:
        return offset_of("B")
    return offset_of(f"W-{stamps[0]:%a}".upper()) if step == 7 * DAY else offset_of(step)


def _nanoseconds(offset: Any) -> int | None:
    """The length of an offset; None where it varies (months and the like)."""
    if isinstance(offset, pd.offsets.Day):
        return int((offset.n * DAY).value)
    return int(pd.Timedelta(offset).value) if isinstance(offset, pd.offsets.Tick) else None


def _most_common(values: Any) -> Any:
    """The most frequent value, the smallest of several."""
    distinct, counts = np.unique(np.asarray(values), return_counts=True)
    return distinct[counts.argmax()]


# Checks.


def check_duplicates(table: Table, time: str, stamps: Any, codes: NDArray[np.int64] | None, names: list[str]) -> None:
    """Raise where a timestamp occurs twice; twice within a series, if `codes` (the number of each row's series) are given."""
    keys = pd.DataFrame({"code": 0 if codes is None else codes, "stamp": stamps})
    repeated = keys.duplicated().to_numpy()
    if not repeated.any():
        return
    i = int(repeated.argmax())
    first = int((keys == keys.iloc[i]).all(axis=1).to_numpy().argmax())
    series, advice = "", "keep one of the rows, or name the column that tells series apart with --id"
    if codes is not None:
        series, advice = f" of series {names[codes[i]]!r}", "keep one of the rows, or add them up"
    if isinstance(stamps, pd.DatetimeIndex):
        advice += " (where clocks were put back for winter, write timestamps in UTC)"
    raise ValueError(f"{table.at(time, i)}: {format_time(stamps[i])}{series} is in row {table.rows[first]} already; {advice}")


def check_spacing(table: Table, stamps: Any, codes: NDArray[np.int64], names: list[str]) -> None:
    """Raise where series of a long table have different frequencies. It takes 3 timestamps to have one."""
    dated = isinstance(stamps, pd.DatetimeIndex)
    ticks = stamps.asi8 if dated else stamps.to_numpy()
    spacings: dict[int, tuple[str, Any]] = {}
    for code, rows in pd.Series(ticks).groupby(codes).indices.items():
        own = np.unique(ticks[rows])
        if len(own) < 3:
            continue
        step = int(_most_common(np.diff(own)))
        days = step / DAY.value if dated else 0.0
        key = next((-shortest for shortest, longest in CALENDAR.values() if shortest <= days <= longest), step)
        spacing = _infer(stamps[rows].unique().sort_values()).freqstr if dated and key not in spacings else str(step)
        spacings.setdefault(key, (names[code], spacing))
    if len(spacings) > 1:
        (one, its), (other, others) = list(spacings.values())[:2]
        raise ValueError(f"{table.source} mixes frequencies: series {one!r} is spaced by {its}, series {other!r} by {others}; resample "
                         "one, read them from two files, or, if one has many gaps, give the clock of both with --freq")  # fmt: skip


def check_one_frequency(table: Table, names: list[str], values: Array, index: Any, positions: NDArray[np.int64]) -> None:
    """Raise where a column of a wide table has values at regular, longer steps than another. It takes 6 values to tell."""
    places = [np.flatnonzero(~np.isnan(series)) for series in values.T]
    shortest = [int(np.diff(at).min()) if len(at) > 5 else 0 for at in places]
    finest = min((step for step in shortest if step), default=0)
    for name, at, step in zip(names, places, shortest, strict=True):
        regular = step > finest and ((np.diff(at) == step).all() or (isinstance(index, pd.DatetimeIndex) and pd.infer_freq(index[at])))
        if regular:
            row = int((positions == at[1]).argmax())
            stamps = f"{format_time(index[at[0]])}, {format_time(index[at[1]])}, {format_time(index[at[2]])}"
            raise ValueError(f"{table.at(name, row)}: {table.source} mixes frequencies: column {name!r} has values at {stamps} ... only, "
                             "other columns between them; resample one, read them from two files, or, if it has many gaps, give the clock "
                             "of both with --freq")  # fmt: skip
