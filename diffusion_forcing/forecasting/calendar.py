"""A panel's steps in time: whole steps since a fixed origin, and the periods with which series tend to repeat."""

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
    """Steps (t,) since a Monday in 1970, so that seasonal phases stay the same when a panel is read again with more rows."""
    if panel.freq is None:
        return np.asarray(panel.index, dtype=np.int64) // panel.index.step
    # A panel's timestamps lie one step apart, so the first decides. Hours of zones count as in UTC, where none is skipped; days, weeks and
    # months by local time, at whose midnight they begin.
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
    """Seasonal periods in steps, the shortest first: those that fit into the panel four times. (1,): none.

    By the calendar where there are dates (days and weeks, months of a year), else by the autocorrelation of the values.
    """
    t = len(panel.values)
    if panel.freq is None:
        periods: tuple[int, ...] = (_autocorrelation_period(panel.values),)
    else:
        offset = offset_of(panel.freq)
        seconds = _seconds(offset)
        if seconds:
            day, week = SECONDS / seconds, 7 * SECONDS / seconds
            periods = tuple(int(p) for p in (day, week) if p > 1 and p == int(p)) or ((52,) if week == 1 else (1,))
        elif offset.freqstr == "B":
            periods = (5,)
        else:
            periods = ({"M": 12, "Q": 4}.get(offset.freqstr.lstrip("B")[:1], 1),)
    return tuple(p for p in periods if 1 < p <= t // 4) or (1,)


def feature_periods(panel: Panel, seasons: tuple[int, ...]) -> tuple[float, ...]:
    """Periods in steps for calendar features: the seasons and the year, where the panel covers them often enough.

    From the phase of a period that came only a few times, a network can tell single days, and learns them by heart.
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
    """Length of a step in seconds; 0 where it varies."""
    days = {"Day": 1, "Week": 7}.get(type(offset).__name__)  # some versions of pandas call them not fixed
    if days:
        return float(days * SECONDS * offset.n)
    try:
        return pd.Timedelta(offset.nanos, unit="ns").total_seconds()
    except (AttributeError, ValueError):
        return 0.0


def _autocorrelation_period(values: NDArray[np.float64]) -> int:
    """The lag, from 2 to a quarter of the length, at which values (t, d) repeat; 1 if they do not.

    By the autocorrelation of the differences, which have no trend; where noise dominates those, by that of the detrended values, with a
    stricter threshold.
    """
    t = len(values)
    if t < 16:
        return 1
    mean = np.nan_to_num(np.nanmean(values, axis=0))
    full = np.where(np.isnan(values), mean, values)
    time = np.arange(t) - (t - 1) / 2
    detrended = full - mean - np.outer(time, time @ (full - mean) / (time @ time))
    return _peak(np.diff(full, axis=0), 0.3) or _peak(detrended, 0.5) or 1


def _peak(x: NDArray[np.float64], threshold: float) -> int:
    """The lag of the highest peak above a threshold of the mean autocorrelation of x (t, d); 0 if there is none."""
    t = len(x)
    x = x - x.mean(0)
    x = x[:, x.std(0) > 1e-9 * (np.abs(x).max(0) + 1e-300)]
    if x.shape[1] == 0:
        return 0
    power = np.abs(np.fft.rfft(x / x.std(0), n=2 * t, axis=0)) ** 2
    mean = np.fft.irfft(power.mean(1))[: t // 4 + 1]
    mean = mean / mean[0] * (t / (t - np.arange(len(mean))))
    inner = mean[2:-1]
    peaks = np.flatnonzero((inner > mean[1:-2]) & (inner >= mean[3:]) & (inner > threshold)) + 2
    if len(peaks) == 0:
        return 0
    best = peaks[mean[peaks].argmax()]
    # Multiples of a period repeat as well: the shortest lag of nearly the same height is the period.
    return int(peaks[mean[peaks] > 0.9 * mean[best]][0])
