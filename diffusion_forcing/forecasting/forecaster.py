"""Forecasts of a table: `Forecaster(horizon).fit(frame).predict()`.

forecaster = Forecaster(horizon=24).fit(frame)     # a DataFrame: a column a series, or long with id, time and value
forecast = forecaster.predict()                    # 100 futures of each series, drawn together
forecast.frame()                                   # mean and quantiles, one row a series and step
forecaster.save("model"); Forecaster.load("model")
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from pandas.tseries.frequencies import to_offset
from torch import Generator

from ..engine.config import Experiment, ModelConfig, RNNConfig, TrainConfig, TransformerConfig, to_dict
from ..engine.train import Result, train
from ..files import write_atomically
from ..model import DiffusionForcing
from .calendar import clock_of
from .model import Reward, Sampling, SeriesModel
from .panel import Panel, check_horizon, from_frame
from .task import DRAWS, Forecasting, Setting, forget
from .windows import Array

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
PANEL, OPTIONS = "data.panel.npz", "options.json"


@dataclass(frozen=True, eq=False)
class Forecast:
    """Futures of a panel's series: samples (n, h, d), drawn jointly; names (d,); index (h,), their stamps."""

    samples: Array
    names: tuple[str, ...]
    index: pd.Index

    @property
    def mean(self) -> pd.DataFrame:
        return self._wide(self.samples.mean(0))

    @property
    def median(self) -> pd.DataFrame:
        return self.quantile(0.5)

    def quantile(self, level: float) -> pd.DataFrame:
        """A wide frame (h, d)."""
        if not 0 <= level <= 1:
            raise ValueError(f"a quantile's level lies in 0..1; got {level}")
        return self._wide(np.quantile(self.samples, level, axis=0))

    def frame(self, quantiles: Iterable[float] = QUANTILES) -> pd.DataFrame:
        """One row a series and step: series, time, mean and quantiles."""
        h, d = self.samples.shape[1:]
        columns: dict[str, Any] = {
            "series": np.repeat(np.array(self.names, dtype=object), h),
            "time": np.tile(self.index.to_numpy(), d),
            "mean": self.samples.mean(0).T.reshape(-1),
        }
        for level in quantiles:
            columns[f"q{100 * level:04.1f}".replace(".0", "")] = np.quantile(self.samples, level, axis=0).T.reshape(-1)
        return pd.DataFrame(columns)

    def samples_frame(self) -> pd.DataFrame:
        """One row a future, series and step: sample, series, time, value."""
        n, h, d = self.samples.shape
        return pd.DataFrame({
            "sample": np.repeat(np.arange(n), d * h),
            "series": np.tile(np.repeat(np.array(self.names, dtype=object), h), n),
            "time": np.tile(self.index.to_numpy(), n * d),
            "value": self.samples.transpose(0, 2, 1).reshape(-1),
        })  # fmt: skip

    def _wide(self, values: Array) -> pd.DataFrame:
        return pd.DataFrame(values, index=self.index, columns=list(self.names))


class Forecaster:
    """fit(data), then predict(). data: a DataFrame (wide or long), or a `data.series.Panel`."""

    def __init__(
        self, horizon: int, *, minutes: float = 2.0, seed: int = 0, windows: int = 0, context: int | None = None,
        season: tuple[int, ...] = (), kind: Literal["auto", "lags", "steps"] = "auto",
        transform: Literal["auto", "none", "sqrt", "log"] = "auto", backbone: Literal["gru", "transformer"] = "gru", hidden: int = 64,
        layers: int | None = None, together: bool = True, draw: str | None = None, sampling: Sampling | None = None,
        threads: int | None = None,
    ) -> None:  # fmt: skip
        """horizon: steps to forecast. minutes: of training at most; it stops early once validation no longer improves.

        windows: rolling windows at the end of the data that are kept out of training, for `backtest`. season, kind, transform, context:
        see `tasks.Forecasting`. backbone: gru (causal, as in the paper), or a transformer that sees everything, which can also fill gaps.
        draw: how training draws levels, None as suits the backbone; "shared" and "teacher_forced" are the paper's baselines. together:
        whether each series is told how the others did lately.
        """
        if horizon < 1:
            raise ValueError(f"a horizon counts steps from 1; got {horizon}")
        if backbone not in ("gru", "transformer"):
            raise ValueError(f"backbone is gru or transformer; got {backbone!r}")
        self.task = Forecasting(
            source="", horizon=horizon, windows=windows, context=context, season=season, expect=kind, transform=transform,
            together=together, sampling=sampling or Sampling(schedule="autoregressive" if backbone == "gru" else "full_sequence"),
        )  # fmt: skip
        self.network = (
            RNNConfig(hidden=hidden, layers=layers or 1, blocks=1)
            if backbone == "gru"
            else TransformerConfig(hidden=hidden, layers=layers or 3, heads=4, causal=False)
        )
        self.asked = self.task.season  # those of the task are, after a fit, the ones that were found
        self.minutes, self.seed, self.threads, self.draw = minutes, seed, threads, draw or DRAWS[backbone]
        self.series: SeriesModel | None = None
        self.panel: Panel | None = None
        self.result: Result | None = None
        self.names: tuple[str, ...] = ()
        self.known_names: tuple[str, ...] = ()
        self.freq: str | None = None
        self.setting: Setting | None = None

    def experiment(self, source: Path) -> Experiment:
        """The training of a panel that was saved."""
        task = dataclasses.replace(self.task, source=str(source), season=self.asked)
        return Experiment(
            task, ModelConfig(self.network),
            TrainConfig(
                steps=None, minutes=self.minutes, batch=128, lr=2e-3, weight_decay=1e-3, ema=0.995, draw=self.draw, given=0.8,
                seed=self.seed, validate_every=50, patience=12, threads=self.threads,
            ),
            name="forecast",
        )  # fmt: skip

    def fit(self, data: pd.DataFrame | Panel, *, folder: str | Path | None = None, quiet: bool = True, **columns: Any) -> Forecaster:
        """Train on data. folder: keep the training there, to go on after an interruption; None: nothing is kept on disk.

        columns: time, id, value, freq, known, as in `data.series.from_frame`.
        """
        panel = data if isinstance(data, Panel) else from_frame(data, **columns)
        check_horizon(panel, self.task.horizon or 1)
        if folder is None:
            with tempfile.TemporaryDirectory() as temporary:
                return self._fit(panel, Path(temporary), quiet)
        return self._fit(panel, Path(folder), quiet)

    def _fit(self, panel: Panel, folder: Path, quiet: bool) -> Forecaster:
        folder.mkdir(parents=True, exist_ok=True)
        other = (folder / PANEL).exists() and not same_panel(load_panel(folder / PANEL), panel)
        save_panel(panel, folder / PANEL)
        forget()
        experiment = self.experiment(folder / PANEL)
        wanted = to_dict(dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, minutes=1.0, threads=None)))
        if other or ((folder / OPTIONS).exists() and json.loads((folder / OPTIONS).read_text()) != wanted):
            for name in ("checkpoint.safetensors", "log.jsonl"):  # of another table or with other options: not to be gone on with
                (folder / name).unlink(missing_ok=True)
            for name in ("best", "model", "tensorboard"):
                shutil.rmtree(folder / name, ignore_errors=True)
        write_atomically(folder / OPTIONS, lambda file: Path(file).write_text(json.dumps(wanted, indent=2) + "\n"))
        self.result = train(experiment, folder, quiet=quiet)
        task: Any = experiment.task
        if self.result.status == "interrupted":
            raise KeyboardInterrupt
        self.series = task.forecaster(DiffusionForcing.from_pretrained(folder / "model"))
        self.panel, self.names, self.known_names, self.freq = panel, panel.names, panel.known_names, panel.freq
        self.setting = task.setting()
        self.task = dataclasses.replace(task, season=self.setting.seasons)
        return self

    def predict(
        self, horizon: int | None = None, *, data: pd.DataFrame | Panel | None = None, samples: int | None = None, doubt: Any = None,
        reward: Reward | None = None, scale: float | None = None, sampling: Sampling | None = None, seed: int = 0,
        progress: Callable[[int, int], None] | None = None, **columns: Any,
    ) -> Forecast:  # fmt: skip
        """Futures after the data it was fitted to, or after other data of the same series.

        doubt: how little each value is to be believed, (t, d) or a wide frame like the data: 0 fully, 1 not at all (as if missing).
        reward: a differentiable score of futures (n, h, d), in the data's units, towards which they are guided. scale: how strongly; try
        ten times more or less until the futures do what the reward asks for and still look like futures.
        """
        series, panel = self._ready(data, columns)
        sampling = sampling or self.task.sampling
        if reward is not None and sampling.schedule == "autoregressive":
            sampling = dataclasses.replace(sampling, schedule="pyramid")  # step after step, the past is settled before the reward is seen
        if samples is not None:
            sampling = dataclasses.replace(sampling, samples=samples)
        if scale is not None:
            sampling = dataclasses.replace(sampling, scale=scale)
        level = None if doubt is None else self._levels(doubt, panel)
        horizon = series.horizon if horizon is None else horizon
        check_known(panel, horizon)
        drawn = series.draw(
            panel.values, clock_of(panel), panel.known[: len(panel.values) + horizon], horizon=horizon, sampling=sampling, level=level,
            reward=reward, generator=Generator().manual_seed(seed), progress=progress,
        )  # fmt: skip
        return Forecast(drawn, panel.names, panel.future(horizon))

    def fill(self, data: pd.DataFrame | Panel | None = None, *, samples: int = 100, seed: int = 0, **columns: Any) -> Forecast:
        """The data with each gap filled, drawn given both of its sides: samples (n, t, d). Needs backbone="transformer"."""
        series, panel = self._ready(data, columns)
        sampling = Sampling(samples=samples, schedule="full_sequence", steps=self.task.sampling.steps)
        drawn = series.fill(panel.values, clock_of(panel), panel.known, sampling=sampling, generator=Generator().manual_seed(seed))
        return Forecast(drawn, panel.names, panel.index)

    def surprise(self, data: pd.DataFrame | Panel | None = None, *, seed: int = 0, **columns: Any) -> pd.DataFrame:
        """How unlikely each value is given those before it, in nats, a wide frame: high where something unusual happened."""
        series, panel = self._ready(data, columns)
        scores = series.surprise(panel.values, clock_of(panel), panel.known, seed=seed)
        return pd.DataFrame(scores, index=panel.index, columns=list(panel.names))

    def save(self, folder: str | Path) -> None:
        """Network, statistics and options; no data. Nothing is pickled."""
        if self.series is None:
            raise ValueError("there is nothing to save yet; call fit first")
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.series.save(folder)
        about = {
            "names": list(self.names), "freq": self.freq, "known": list(self.known_names),
            "sampling": dataclasses.asdict(self.task.sampling), "season": list(self.task.season),
        }  # fmt: skip
        write_atomically(folder / "forecaster.json", lambda file: Path(file).write_text(json.dumps(about, indent=2) + "\n"))

    @classmethod
    def load(cls, folder: str | Path) -> Forecaster:
        """A saved forecaster. It forecasts data that are given to predict(data=...)."""
        folder = Path(folder)
        if not (folder / "forecaster.json").exists():
            raise FileNotFoundError(
                f"{folder} holds no forecaster (no forecaster.json); `dforce forecast FILE` or Forecaster.save makes one"
            )
        about = json.loads((folder / "forecaster.json").read_text())
        series = SeriesModel.load(folder)
        made = cls(series.horizon, sampling=Sampling(**about["sampling"]), season=tuple(about["season"]))
        made.series, made.freq = series, about["freq"]
        made.names, made.known_names = tuple(about["names"]), tuple(about["known"])
        return made

    def ordered(self, panel: Panel) -> Panel:
        """A panel with the series and covariates that were learned from, in their order."""
        for what, wanted, there in (("series", self.names, panel.names), ("covariates", self.known_names, panel.known_names)):
            missing = [name for name in wanted if name not in there]
            if missing:
                raise ValueError(f"the forecaster knows the {what} {', '.join(wanted[:5])}{'...' if len(wanted) > 5 else ''}; "
                                 f"the data lack {missing[0]!r}")  # fmt: skip
        if (panel.freq is None) != (self.freq is None) or (panel.freq and self.freq and to_offset(panel.freq) != to_offset(self.freq)):
            raise ValueError(
                f"the forecaster learned from data of freq {self.freq!r}; these are of {panel.freq!r}: resample them, or train anew"
            )
        values = panel.values[:, [panel.names.index(name) for name in self.names]]
        known = panel.known[:, [panel.known_names.index(name) for name in self.known_names]]
        return dataclasses.replace(panel, values=values, names=self.names, known=known, known_names=self.known_names)

    def _ready(self, data: pd.DataFrame | Panel | None, columns: dict[str, Any]) -> tuple[SeriesModel, Panel]:
        if self.series is None:
            raise ValueError("the forecaster has learned nothing yet; call fit first, or load a saved one")
        if data is None:
            if self.panel is None:
                raise ValueError("a loaded forecaster holds no data; pass them: predict(data=frame)")
            return self.series, self.panel
        panel = data if isinstance(data, Panel) else from_frame(data, **columns)
        return self.series, self.ordered(panel)

    def _levels(self, doubt: Any, panel: Panel) -> Array:
        """Doubts 0..1 as levels (t, d)."""
        if isinstance(doubt, pd.DataFrame):
            doubt = doubt.reindex(index=panel.index, columns=list(panel.names)).to_numpy()
        given = np.asarray(doubt, dtype=float)
        if given.shape != panel.values.shape:
            raise ValueError(f"doubt has a number for each of the {panel.values.shape} values; got {given.shape}")
        if np.isnan(given).any() or (given < 0).any() or (given > 1).any():
            raise ValueError("doubt lies in 0 (believe) .. 1 (ignore), for every value")
        assert self.series is not None
        return np.round(given * self.series.model.schedule.levels)


def check_known(panel: Panel, horizon: int) -> None:
    """Raise unless what is known in advance is known for the next `horizon` steps."""
    if panel.known_names and len(panel.known) < len(panel.values) + horizon:
        check_horizon(panel, horizon)


def save_panel(panel: Panel, file: Path) -> None:
    """A panel as arrays, so that a training can be repeated without the file it came from."""
    stamps = panel.index.asi8 if panel.freq is not None else np.asarray(panel.index)
    arrays = {
        "values": panel.values, "known": panel.known, "stamps": stamps, "names": np.array(panel.names, dtype=np.str_),
        "known_names": np.array(panel.known_names, dtype=np.str_), "freq": np.array(panel.freq or ""),
        "unit": np.array(panel.index.unit if panel.freq is not None else ""), "kind": np.array(panel.kind),
        "zone": np.array(_zone(panel)),
    }  # fmt: skip

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as handle:
            np.savez_compressed(handle, **arrays)  # type: ignore[arg-type]

    write_atomically(file, write)


def _zone(panel: Panel) -> str:
    """The name of a panel's time zone by which pandas knows it again: fixed offsets as UTC+01:00. Empty where it has none."""
    tz: Any = None if panel.freq is None else panel.index.tz
    if tz is None:
        return ""
    fixed = tz.utcoffset(None)
    if fixed is None or not fixed:
        return str(tz)
    minutes = round(fixed.total_seconds() / 60)
    return f"UTC{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02d}:{abs(minutes) % 60:02d}"


def same_panel(one: Panel, other: Panel) -> bool:
    """Whether two panels hold the same."""
    return (
        (one.names, one.known_names, one.freq, one.kind) == (other.names, other.known_names, other.freq, other.kind)
        and _zone(one) == _zone(other) and np.array_equal(one.index.values, other.index.values)
        and np.array_equal(one.values, other.values, equal_nan=True) and np.array_equal(one.known, other.known)
    )  # fmt: skip


def load_panel(file: Path) -> Panel:
    """The inverse of save_panel."""
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
        kind = str(arrays["kind"]) if "kind" in arrays else "auto"
        return Panel(arrays["values"], names, index, freq, arrays["known"], known_names, kind=kind)
