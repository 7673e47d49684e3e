"""A panel: many series on one regular clock, with covariates that are known in advance."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..checks import check_counts
from ..files import write_atomically

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Panel:
    """Series side by side on one regular clock.

    values: (t, d), NaN where missing. names: of the d series. index: (t,) timestamps, or a RangeIndex where there are no dates.
    freq: pandas' offset alias ("h", "B", "30min", "MS" ...), None without dates. known: (t + ahead, c) covariates known in advance; the
    rows beyond t are the future. notes: sentences about what reading the data inserted or left out. value_type: what values may be, as in
    `reading.Columns`; "real" allows negative forecasts even where no value was negative.
    """

    values: Array
    names: tuple[str, ...]
    index: pd.DatetimeIndex | pd.RangeIndex
    freq: str | None
    known: Array
    known_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    value_type: str = "auto"

    def __post_init__(self) -> None:
        for name in ("values", "known"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.float64))
        t, d = self.values.shape if self.values.ndim == 2 else (-1, -1)
        if t < 1 or d < 1 or d != len(self.names):
            raise ValueError(
                f"values must have the shape (t, d), one column for each of the {len(self.names)} names; got {self.values.shape}"
            )
        if len(self.index) != t:
            raise ValueError(f"the index must have one timestamp for each of the {t} rows of values; got {len(self.index)}")
        if self.known.ndim != 2 or len(self.known) < t or self.known.shape[1] != len(self.known_names):
            raise ValueError(f"known must have the shape (t + ahead, c): at least {t} rows, and one column for each of the "
                             f"{len(self.known_names)} known_names; got {self.known.shape}")  # fmt: skip
        duplicate = first_duplicate([*self.names, *self.known_names])
        if duplicate is not None:
            raise ValueError(f"names of series and covariates must be unique; {duplicate!r} occurs twice, rename one")
        for names, array, wrong in (
            (self.names, self.values, np.isinf(self.values)),
            (self.known_names, self.known, ~np.isfinite(self.known)),
        ):
            if wrong.any():
                row, column = np.argwhere(wrong)[0]
                raise ValueError(
                    f"{names[column]!r} is {array[row, column]} at step {row}; series must be finite or missing, covariates finite"
                )
        self._check_clock()

    def _check_clock(self) -> None:
        if isinstance(self.index, pd.RangeIndex):
            if self.freq is not None:
                raise ValueError(f"a clock without dates has no freq; got {self.freq!r}, pass None or a DatetimeIndex")
            if self.index.step < 1:
                raise ValueError(f"a clock must run forward; its step is {self.index.step}, reverse the rows")
            return
        if not isinstance(self.index, pd.DatetimeIndex) or self.freq is None:
            raise ValueError(f"the index must be a DatetimeIndex with a freq, or a RangeIndex without; got {type(self.index).__name__} and "
                             f"freq {self.freq!r}")  # fmt: skip
        if not self.index.equals(pd.date_range(self.index[0], periods=len(self.index), freq=offset_of(self.freq))):
            raise ValueError(
                f"the index does not run in steps of freq {self.freq!r} from {format_time(self.index[0])}; `from_frame` fills gaps"
            )

    def future(self, steps: int) -> pd.Index:
        """The timestamps of the next `steps` steps."""
        check_counts(steps=steps)
        if self.freq is None:
            first, step = self.index[-1] + self.index.step, self.index.step
            return pd.RangeIndex(first, first + steps * step, step)
        return pd.date_range(self.index[-1], periods=steps + 1, freq=offset_of(self.freq))[1:]

    def until(self, t: int) -> Panel:
        """The first t steps, as if nothing later had been observed. Covariates stay; notes go, since they are about the whole panel."""
        if not 1 <= t <= len(self.values):
            raise ValueError(f"a panel of {len(self.values)} steps can be cut after 1 to {len(self.values)} of them; got {t}")
        return replace(self, values=self.values[:t], index=self.index[:t], notes=())

    def to_frame(self) -> pd.DataFrame:
        """A wide frame: one column a series, timestamps as its index."""
        name = "t" if self.freq is None else "time"
        return pd.DataFrame(self.values, index=self.index.rename(None if name in self.names else name), columns=list(self.names))

    def equals(self, other: Panel) -> bool:
        """Whether both hold the same data; notes do not count."""
        return (
            (self.names, self.known_names, self.freq, self.value_type) == (other.names, other.known_names, other.freq, other.value_type)
            and _zone(self) == _zone(other) and np.array_equal(self.index.values, other.index.values)
            and np.array_equal(self.values, other.values, equal_nan=True) and np.array_equal(self.known, other.known)
        )  # fmt: skip

    def save(self, file: Path) -> None:
        """Write as .npz, so that a training can be repeated without the file the panel was read from."""
        stamps = self.index.asi8 if self.freq is not None else np.asarray(self.index)
        arrays = {
            "values": self.values, "known": self.known, "stamps": stamps, "names": np.array(self.names, dtype=np.str_),
            "known_names": np.array(self.known_names, dtype=np.str_), "freq": np.array(self.freq or ""),
            "unit": np.array(self.index.unit if self.freq is not None else ""), "value_type": np.array(self.value_type),
            "zone": np.array(_zone(self)),
        }  # fmt: skip

        def write(temporary: Path) -> None:
            with open(temporary, "wb") as handle:
                np.savez_compressed(handle, **arrays)  # type: ignore[arg-type]

        write_atomically(file, write)

    @classmethod
    def load(cls, file: Path) -> Panel:
        """Read what `save` wrote."""
        with np.load(file, allow_pickle=False) as arrays:
            freq = str(arrays["freq"]) or None
            stamps = arrays["stamps"]
            if freq is None:
                step = int(stamps[1] - stamps[0]) if len(stamps) > 1 else 1
                index: Any = pd.RangeIndex(int(stamps[0]), int(stamps[-1]) + step, step)
            else:
                index = pd.DatetimeIndex(stamps.astype(f"datetime64[{arrays['unit']}]"))
                index = index.tz_localize("UTC").tz_convert(str(arrays["zone"])) if str(arrays["zone"]) else index
            names, known_names = (tuple(arrays[name].tolist()) for name in ("names", "known_names"))
            return cls(arrays["values"], names, index, freq, arrays["known"], known_names, value_type=str(arrays["value_type"]))


def check_horizon(panel: Panel, horizon: int) -> None:
    """Raise unless a panel is at least four horizons long and its covariates reach `horizon` steps into the future."""
    t = len(panel.values)
    if horizon < 1 or 4 * horizon > t:
        raise ValueError(f"the horizon must be 1 to a quarter of the steps there are, here {t // 4} of {t}; got {horizon}, forecast fewer "
                         "steps or read a longer file")  # fmt: skip
    check_known(panel, horizon)


def check_known(panel: Panel, horizon: int) -> None:
    """Raise unless covariates are known for the next `horizon` steps."""
    ahead = len(panel.known) - len(panel.values)
    if panel.known_names and ahead < horizon:
        missing = format_time(panel.future(ahead + 1)[-1])
        raise ValueError(f"{panel.known_names[0]!r}, known in advance, has to cover the {horizon} steps to forecast and has {ahead} rows "
                         f"after the last value; the first missing one is {missing}; add rows")  # fmt: skip


def offset_of(freq: str) -> Any:
    """pandas' offset of a frequency alias."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated aliases (H, T, M ...) are accepted
            return pd.tseries.frequencies.to_offset(freq)
    except ValueError as error:
        raise ValueError(f"freq {freq!r} is not an offset of pandas; write h, 30min, D, B, W-MON, MS, ME, QS, YS or the like") from error


def format_time(stamp: Any) -> str:
    """A timestamp, or the number of a step, as messages write it."""
    return f"step {stamp}" if isinstance(stamp, (int, np.integer)) else str(stamp).removesuffix(" 00:00:00")


def first_duplicate(names: list[str]) -> str | None:
    """The first name that occurs twice."""
    return next((name for i, name in enumerate(names) if name in names[:i]), None) if len(set(names)) < len(names) else None


def _zone(panel: Panel) -> str:
    """The time zone's name as pandas reads it back (fixed offsets as UTC+01:00); empty where there is none."""
    tz: Any = None if panel.freq is None else panel.index.tz
    if tz is None:
        return ""
    fixed = tz.utcoffset(None)
    if fixed is None or not fixed:
        return str(tz)
    minutes = round(fixed.total_seconds() / 60)
    return f"UTC{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02d}:{abs(minutes) % 60:02d}"
