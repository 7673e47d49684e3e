"""Forecasts of a table: `Forecaster(horizon).fit(frame).predict()`.

forecaster = Forecaster(horizon=24).fit(frame)     # a DataFrame: one column a series, or long with id, time and value
forecast = forecaster.predict()                    # 100 futures of all series, sampled jointly
forecast.frame()                                   # mean and quantiles, one row a series and step
forecaster.save("model"); Forecaster.load("model")
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from torch import Generator

from ..backbones import RNNConfig, TransformerConfig
from ..engine.config import Experiment, ModelConfig, TrainConfig, to_dict
from ..engine.interrupt import end_interrupted
from ..engine.lock import locked
from ..engine.objective import Denoising
from ..engine.train import Result, train
from ..files import write_atomically
from ..model import DiffusionForcing
from ..sampler import Sampler
from .model import AUTOREGRESSIVE, WHOLE, Reward, SeriesModel
from .panel import Array, Panel, check_horizon, check_known, offset_of
from .reading import Columns, panel_of
from .task import LEVEL_DRAWS, Forecasting, Split
from .windows import History

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
PANEL, OPTIONS = "data.panel.npz", "options.json"


@dataclass(frozen=True, eq=False)
class Forecast:
    """Futures of a panel's series: samples (n, h, d), drawn jointly; names (d,); index (h,), their timestamps."""

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


@dataclass(eq=False)
class Forecaster:
    """Probabilistic forecasts of a table's series: `fit` trains on it, `predict` samples futures."""

    horizon: int
    """Steps to forecast."""
    minutes: float = 2.0
    """Of training at most; it stops once validation no longer improves."""
    seed: int = 0
    """Of the training."""
    test_windows: int = 0
    """Rolling windows at the end of the data that are kept out of training, for back-tests."""
    context: int | None = None
    """Steps of the past that the network reads; None: the horizon or two seasons, whichever is longer."""
    season: tuple[int, ...] = ()
    """Seasonal periods in steps, the shortest first; empty: by the calendar."""
    residual: Literal["auto", "seasonal", "difference"] = "auto"
    """Tokens are residuals from the same phase of earlier seasons, or differences; auto: whichever forecasts better."""
    transform: Literal["auto", "none", "sqrt", "log"] = "auto"
    """Variance-stabilising transform of the values; auto: the most likely."""
    backbone: Literal["gru", "transformer"] = "gru"
    """gru: causal, as in the paper. transformer: sees everything, and can fill gaps."""
    hidden: int = 64
    """Width of the network."""
    layers: int | None = None
    """Of the network; None: 1 GRU, or 3 attention blocks."""
    cross_series: bool = True
    """Condition each series on the recent mean residual of all series."""
    level_draw: str | None = None
    """How training draws noise levels, as --objective.draw; None: as suits the backbone."""
    sampler: Sampler | None = None
    """How futures are sampled; None: as suits the backbone."""
    samples: int = 100
    """Futures to sample."""
    threads: int | None = None
    """Threads of torch; None: its own choice."""

    series: SeriesModel | None = field(default=None, init=False, repr=False)
    """The fitted model."""
    panel: Panel | None = field(default=None, init=False, repr=False)
    """The data it was fitted to."""
    split: Split | None = field(default=None, init=False, repr=False)
    """How these were split into training, validation and test."""
    result: Result | None = field(default=None, init=False, repr=False)
    """How the training ended."""
    names: tuple[str, ...] = field(default=(), init=False)
    known_names: tuple[str, ...] = field(default=(), init=False)
    freq: str | None = field(default=None, init=False)
    columns: Columns = field(default=Columns(), init=False, repr=False)

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise ValueError(f"a horizon counts steps from 1; got {self.horizon}")
        if self.samples < 1:
            raise ValueError(f"samples counts futures from 1; got {self.samples}")
        if self.backbone not in ("gru", "transformer"):
            raise ValueError(f"backbone is gru or transformer; got {self.backbone!r}")
        self.sampler = self.sampler or (AUTOREGRESSIVE if self.backbone == "gru" else WHOLE)
        self.task("")  # checks its options

    def task(self, source: str | Path) -> Forecasting:
        """The task of forecasting a file."""
        return Forecasting(
            source=str(source), horizon=self.horizon, test_windows=self.test_windows, context=self.context, season=self.season,
            residual=self.residual, transform=self.transform, cross_series=self.cross_series, sampler=self.sampler or AUTOREGRESSIVE,
            samples=self.samples,
        )  # fmt: skip

    def experiment(self, source: str | Path) -> Experiment:
        """The training on a file."""
        network = (
            RNNConfig(hidden=self.hidden, layers=self.layers or 1, blocks=1)
            if self.backbone == "gru"
            else TransformerConfig(hidden=self.hidden, layers=self.layers or 3, heads=4, causal=False)
        )
        return Experiment(
            self.task(source), ModelConfig(network),
            TrainConfig(
                steps=None, minutes=self.minutes, batch=128, lr=2e-3, weight_decay=1e-3, ema=0.995, seed=self.seed, validate_every=50,
                patience=12, threads=self.threads,
            ),
            Denoising(draw=self.level_draw or LEVEL_DRAWS[self.backbone], clean_context_prob=0.8), name="forecast",
        )  # fmt: skip

    def fit(self, data: pd.DataFrame | Panel, *, folder: str | Path | None = None, quiet: bool = True, **columns: Any) -> Forecaster:
        """Train on data. folder: keep the training there, to resume it after an interruption; None: nothing is kept on disk.

        columns: of a DataFrame: time, id, value, freq, known, value_type, as in `reading.Columns`; `predict` reads other data likewise.
        """
        self.columns = Columns(**columns)
        panel = data if isinstance(data, Panel) else panel_of(data, self.columns)
        check_horizon(panel, self.horizon)
        if folder is None:
            with tempfile.TemporaryDirectory() as temporary:
                return self._fit(panel, Path(temporary), quiet)
        return self._fit(panel, Path(folder), quiet)

    def _fit(self, panel: Panel, folder: Path, quiet: bool) -> Forecaster:
        with locked(folder):
            return self._fit_alone(panel, folder, quiet)

    def _fit_alone(self, panel: Panel, folder: Path, quiet: bool) -> Forecaster:
        changed = (folder / PANEL).exists() and not Panel.load(folder / PANEL).equals(panel)
        panel.save(folder / PANEL)
        experiment = self.experiment(folder / PANEL)
        # What a training is resumed with may differ in its budget only.
        options = to_dict(dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, minutes=1.0, threads=None)))
        if changed or ((folder / OPTIONS).exists() and json.loads((folder / OPTIONS).read_text()) != options):
            for name in ("checkpoint.safetensors", "log.jsonl"):
                (folder / name).unlink(missing_ok=True)
            for name in ("best", "model", "tensorboard"):
                shutil.rmtree(folder / name, ignore_errors=True)
        write_atomically(folder / OPTIONS, lambda file: Path(file).write_text(json.dumps(options, indent=2) + "\n"))
        self.result = train(experiment, folder, quiet=quiet)
        if self.result.status == "interrupted":
            end_interrupted(self.result.signal)
        task: Any = experiment.task
        self.split = task.split()
        self.series = task.series_model(DiffusionForcing.from_pretrained(folder / "model"))
        self.panel, self.names, self.known_names, self.freq = panel, panel.names, panel.known_names, panel.freq
        return self

    def predict(
        self, horizon: int | None = None, *, data: pd.DataFrame | Panel | None = None, samples: int | None = None,
        noise_level: Any = None, reward: Reward | None = None, scale: float = 10.0, seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Forecast:  # fmt: skip
        """Futures after the data it was fitted to, or after other data of the same series.

        noise_level: how uncertain each value is, (t, d) or a wide frame like the data: 0 exact, 1 ignored as if it were missing.
        reward: a differentiable score (n,) of futures (n, h, d) in the data's units, towards which they are guided. scale: how strongly, in
        units of the reward: try ten times more or less until futures do what the reward asks for and still look like futures.
        """
        series, panel = self._series_and_panel(data)
        sampler = self.sampler or AUTOREGRESSIVE
        if reward is not None and sampler.matrix == "autoregressive":
            sampler = dataclasses.replace(sampler, matrix="pyramid")  # token after token, early steps would be fixed before the reward acts
        horizon = series.horizon if horizon is None else horizon
        check_known(panel, horizon)
        level = None if noise_level is None else self._levels(noise_level, panel, series.model.schedule.levels)
        futures = series.draw(
            dataclasses.replace(History.of(panel), level=level), horizon=horizon, samples=self.samples if samples is None else samples,
            sampler=sampler, reward=reward, scale=scale, generator=Generator().manual_seed(seed), progress=progress,
        )  # fmt: skip
        return Forecast(futures, panel.names, panel.future(horizon))

    def fill(self, data: pd.DataFrame | Panel | None = None, *, samples: int = 100, seed: int = 0) -> Forecast:
        """The data with each gap filled, sampled given both of its sides: samples (n, t, d). Needs backbone="transformer"."""
        series, panel = self._series_and_panel(data)
        steps = (self.sampler or WHOLE).steps
        values = series.fill(History.of(panel), samples=samples, steps=steps, generator=Generator().manual_seed(seed))
        return Forecast(values, panel.names, panel.index)

    def anomaly_score(self, data: pd.DataFrame | Panel | None = None) -> pd.DataFrame:
        """How unlikely each value is given those before it, in nats, as a wide frame: high where something unusual happened."""
        series, panel = self._series_and_panel(data)
        return pd.DataFrame(series.anomaly_score(History.of(panel)), index=panel.index, columns=list(panel.names))

    def save(self, folder: str | Path) -> None:
        """Network, statistics and options as safetensors and JSON; no data."""
        if self.series is None:
            raise ValueError("there is nothing to save yet; call fit first")
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.series.save(folder)
        config = {
            "names": list(self.names), "freq": self.freq, "known": list(self.known_names), "columns": dataclasses.asdict(self.columns),
            "sampler": dataclasses.asdict(self.sampler or AUTOREGRESSIVE), "samples": self.samples,
        }  # fmt: skip
        write_atomically(folder / "forecaster.json", lambda file: Path(file).write_text(json.dumps(config, indent=2) + "\n"))

    @classmethod
    def load(cls, folder: str | Path) -> Forecaster:
        """A saved forecaster. It forecasts data that are given to predict(data=...)."""
        folder = Path(folder)
        if not (folder / "forecaster.json").exists():
            raise FileNotFoundError(
                f"{folder} holds no forecaster (no forecaster.json); `dforce forecast FILE` or Forecaster.save makes one"
            )
        config = json.loads((folder / "forecaster.json").read_text())
        series = SeriesModel.load(folder)
        loaded = cls(series.horizon, sampler=Sampler(**config["sampler"]), samples=config["samples"])
        loaded.series, loaded.freq, loaded.columns = series, config["freq"], Columns(**config["columns"])
        loaded.names, loaded.known_names = tuple(config["names"]), tuple(config["known"])
        return loaded

    def aligned(self, panel: Panel) -> Panel:
        """A panel with the series and covariates the forecaster was fitted to, in their order."""
        for what, needed, present in (("series", self.names, panel.names), ("covariates", self.known_names, panel.known_names)):
            missing = [name for name in needed if name not in present]
            if missing:
                raise ValueError(f"the forecaster knows the {what} {', '.join(needed[:5])}{'...' if len(needed) > 5 else ''}; "
                                 f"the data lack {missing[0]!r}")  # fmt: skip
        if (panel.freq is None) != (self.freq is None) or (panel.freq and self.freq and offset_of(panel.freq) != offset_of(self.freq)):
            raise ValueError(
                f"the forecaster learned from data of freq {self.freq!r}; these are of {panel.freq!r}: resample them, or train anew"
            )
        values = panel.values[:, [panel.names.index(name) for name in self.names]]
        known = panel.known[:, [panel.known_names.index(name) for name in self.known_names]]
        return dataclasses.replace(panel, values=values, names=self.names, known=known, known_names=self.known_names)

    def _series_and_panel(self, data: pd.DataFrame | Panel | None) -> tuple[SeriesModel, Panel]:
        if self.series is None:
            raise ValueError("the forecaster is not trained yet; call fit first, or load a saved one")
        if data is None:
            if self.panel is None:
                raise ValueError("a loaded forecaster holds no data; pass them: predict(data=frame)")
            return self.series, self.panel
        columns = dataclasses.replace(self.columns, known=self.known_names)
        return self.series, self.aligned(data if isinstance(data, Panel) else panel_of(data, columns))

    def _levels(self, noise_level: Any, panel: Panel, top: int) -> Array:
        """Shares 0..1 as levels 0..K (t, d)."""
        if isinstance(noise_level, pd.DataFrame):
            noise_level = noise_level.reindex(index=panel.index, columns=list(panel.names)).to_numpy()
        share = np.asarray(noise_level, dtype=float)
        if share.shape != panel.values.shape:
            raise ValueError(f"noise_level has a number for each of the {panel.values.shape} values; got {share.shape}")
        if np.isnan(share).any() or (share < 0).any() or (share > 1).any():
            raise ValueError("noise_level goes from 0 (exact) to 1 (ignored), for every value")
        return np.round(share * top)
