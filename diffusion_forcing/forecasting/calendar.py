"""Where a panel's steps lie in time: a clock of whole steps, and the periods in which things tend to repeat."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .panel import Panel, offset_of

MONDAY = "1970-01-05"
SECONDS = 86_400
MONTHS = {"Q": 3, "Y": 12}


def clock_of(panel: Panel) -> NDArray[np.int64]:
    """Whole steps (t,) since a Monday in 1970, so that phases stay the same when a panel is read again with more rows."""
    if panel.freq is None:
        return np.asarray(panel.index, dtype=np.int64) // panel.index.step
    # A panel's stamps lie one step apart, so where the first lies says it all. Hours of zones count as in UTC, where none is skipped;
    # days, weeks and months by the clock on the wall, at whose midnight they begin.
    offset = offset_of(panel.freq)
    hours = isinstance(offset, pd.offsets.Tick) and not isinstance(offset, pd.offsets.Day)
    first = panel.index[0] if panel.index.tz is None else panel.index[0].tz_convert(None) if hours else panel.index[0].tz_localize(None)
    seconds = _seconds(offset)
    if seconds:
        at = int((first - pd.Timestamp(MONDAY)).total_seconds() // seconds)
    elif offset.freqstr == "B":
        at = int(np.busday_count(np.datetime64(MONDAY), first.to_datetime64().astype("datetime64[D]")))
    else:
        at = (12 * first.year + first.month) // MONTHS.get(offset.freqstr.lstrip("B")[:1], 1)
    return at + np.arange(len(panel.index))


def seasons_of(panel: Panel) -> tuple[int, ...]:
    """Periods, in steps, by which values are likely to repeat, the shortest first: those that fit into the panel four times.

    By the calendar where there are dates (days and weeks, months of a year), else as the values themselves repeat. (1,): none.
    """
    t = len(panel.values)
    if panel.freq is None:
        found: tuple[int, ...] = (_repeats(panel.values),)
    else:
        offset = offset_of(panel.freq)
        seconds = _seconds(offset)
        if seconds:
            day, week = SECONDS / seconds, 7 * SECONDS / seconds
            found = tuple(int(p) for p in (day, week) if p > 1 and p == int(p)) or ((52,) if week == 1 else (1,))
        elif offset.freqstr == "B":
            found = (5,)
        else:
            found = ({"M": 12, "Q": 4}.get(offset.freqstr.lstrip("B")[:1], 1),)
    return tuple(p for p in found if 1 < p <= t // 4) or (1,)


def waves_of(panel: Panel, seasons: tuple[int, ...]) -> tuple[float, ...]:
    """Periods, in steps, for calendar features: seasons and the year, where the panel has seen them often.

    A network knows single days by a period that came only a few times, and learns them by heart.
    """
    t = len(panel.values)
    periods = [float(p) for p in seasons if 1 < p <= t / 8]
    if panel.freq is None:
        return tuple(periods)
    offset = offset_of(panel.freq)
    seconds = _seconds(offset)
    year = (
        365.25 * SECONDS / seconds
        if seconds
        else 260.9
        if offset.freqstr == "B"
        else {"M": 12.0, "Q": 4.0}.get(offset.freqstr.lstrip("B")[:1], 1.0)
    )
    if t >= 4 * year and not any(abs(p - year) < 1 for p in periods) and year > 2:
        periods.append(year)
    return tuple(periods)


def _seconds(offset: Any) -> float:
    """Length of a step, 0 where it is not always the same."""
    days = {"Day": 1, "Week": 7}.get(type(offset).__name__)  # not of a fixed length to every pandas
    if days:
        return float(days * SECONDS * offset.n)
    try:
        return pd.Timedelta(offset.nanos, unit="ns").total_seconds()
    except (AttributeError, ValueError):
        return 0.0


def _repeats(values: NDArray[np.float64]) -> int:
    """The lag, from 2 to a quarter of the length, at which values repeat; 1 if they do not.

    Looked for in the steps, which have no trend; where noise drowns what is slow there, in the values less their trend, more strictly.
    """
    t = len(values)
    if t < 16:
        return 1
    mean = np.nan_to_num(np.nanmean(values, axis=0))
    full = np.where(np.isnan(values), mean, values)
    time = np.arange(t) - (t - 1) / 2
    level = full - mean - np.outer(time, time @ (full - mean) / (time @ time))
    return _peak(np.diff(full, axis=0), 0.3) or _peak(level, 0.5) or 1


def _peak(x: NDArray[np.float64], least: float) -> int:
    """The lag of the highest peak of the mean autocorrelation of x (t, d) above `least`; 0 if there is none."""
    t = len(x)
    x = x - x.mean(0)
    x = x[:, x.std(0) > 1e-9 * (np.abs(x).max(0) + 1e-300)]
    if x.shape[1] == 0:
        return 0
    power = np.abs(np.fft.rfft(x / x.std(0), n=2 * t, axis=0)) ** 2
    together = np.fft.irfft(power.mean(1))[: t // 4 + 1]
    together = together / together[0] * (t / (t - np.arange(len(together))))
    inner = together[2:-1]
    peaks = np.flatnonzero((inner > together[1:-2]) & (inner >= together[3:]) & (inner > least)) + 2
    if len(peaks) == 0:
        return 0
    best = peaks[together[peaks].argmax()]
    # Twice the period repeats as well: the shortest of nearly the same height is the period.
    return int(peaks[together[peaks] > 0.9 * together[best]][0])
