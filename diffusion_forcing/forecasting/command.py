"""dforce forecast FILE: train on a table, back-test, write forecasts and draw them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from ..engine.cli import console, show
from ..engine.log import progress_bar
from ..engine.task import Progress, Table
from .figures import draw_fans
from .forecaster import QUANTILES, Forecast, Forecaster
from .panel import Panel, check_horizon
from .reading import read, write_frame
from .scores import summary
from .task import rolling

SERIES_A_PAGE, PAGES = 12, 10


@dataclass(frozen=True)
class ForecastOptions:
    """Forecast the series of a table: CSV or Parquet, one column a series, or long with id, time and value columns.

    The time column and the frequency are inferred. Missing values are allowed: each is a token at the level of pure noise. Writes forecasts
    with quantiles, a fan chart of each series, and a back-test against simple forecasts; keeps the trained model.
    """

    file: tyro.conf.Positional[Path]
    """The table: .csv, .tsv, .parquet (or an .npz with `values`)."""
    horizon: Annotated[int, tyro.conf.arg(aliases=["-n"])]
    """Steps to forecast."""
    time: str | None = None
    """Name of the time column."""
    id: str | None = None
    """Name of the column that tells series apart, in a long table."""
    value: str | None = None
    """Name of the column of values, in a long table."""
    freq: str | None = None
    """Frequency, as pandas writes it: h, 30min, D, B, MS ..."""
    known: tuple[str, ...] = ()
    """Covariates known in advance (holidays, prices); they must go on for the horizon beyond the last value."""
    value_type: Literal["auto", "real", "positive", "counts"] = "auto"
    """What values may be; others are errors. real: forecasts may be negative though no value was."""
    model: Path | None = None
    """Use this trained model instead of training one."""
    out: Path = Path("forecast")
    """Folder for forecasts, pictures and the trained model."""
    format: Literal["csv", "parquet"] = "csv"
    """Of the forecasts."""
    quantiles: tuple[float, ...] = QUANTILES
    """To write."""
    samples: int = 100
    """Futures to sample."""
    keep_samples: bool = False
    """Also write every sampled future."""
    minutes: float = 2.0
    """Of training at most."""
    backtest: int = 3
    """Windows at the end that are kept out of training and forecast for comparison; 0 for none."""
    backbone: Literal["gru", "transformer"] = "gru"
    """Network: a GRU as in the paper, or a transformer that sees everything."""
    season: tuple[int, ...] = ()
    """Seasonal periods in steps, the shortest first; empty: by the calendar."""
    seed: int = 0
    """Of training and sampling."""
    threads: int | None = None
    """Threads of torch; None: its own choice."""


def forecast(words: list[str]) -> int:
    """dforce forecast FILE --horizon STEPS"""
    options: Any = tyro.cli(ForecastOptions, args=words, prog="dforce forecast", description=ForecastOptions.__doc__)
    began = time.monotonic()
    if not options.quantiles or any(not 0 < q < 1 for q in options.quantiles):
        raise ValueError(f"quantiles lie between 0 and 1; got {options.quantiles}")
    if options.samples < 1:
        raise ValueError(f"--samples counts futures from 1; got {options.samples}")
    loaded = None if options.model is None else Forecaster.load(options.model)
    known = options.known or (loaded.known_names if loaded else ())
    panel = read(
        options.file, time=options.time, id=options.id, value=options.value, freq=options.freq, known=known, value_type=options.value_type
    )
    check_horizon(panel, options.horizon)
    t, d = panel.values.shape
    frequency = f" of {panel.freq}" if panel.freq else ""
    console.print(f"{options.file.name}: {d} series, {t} steps{frequency}, {panel.index[0]} to {panel.index[-1]}", markup=False)
    for note in panel.notes:
        console.print(f"note: {note}", markup=False)
    options.out.mkdir(parents=True, exist_ok=True)
    if loaded is None:
        forecaster = _train(panel, options)
    else:
        forecaster, panel = loaded, _check_trained(loaded, panel, options)
    with progress_bar() as progress:
        futures = forecaster.predict(
            options.horizon, data=panel, samples=options.samples, seed=options.seed,
            progress=lambda done, of: progress("futures", done, of),
        )  # fmt: skip
    for file in _write(futures, panel, options):
        console.print(f"wrote {file}", markup=False)
    console.print(f"{time.monotonic() - began:.0f} s in all")
    return 0


def _check_trained(forecaster: Forecaster, panel: Panel, options: ForecastOptions) -> Panel:
    """The panel as a trained model expects it."""
    ignored = [name for name in ("backtest", "minutes", "backbone", "season") if getattr(options, name) != getattr(ForecastOptions, name)]
    if ignored:
        console.print(f"note: {', '.join(f'--{name}' for name in ignored)} are for training and have no effect on a trained --model")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    panel = forecaster.aligned(panel)
    if options.horizon > forecaster.horizon:
        raise ValueError(f"the model in {options.model} forecasts at most {forecaster.horizon} steps; got {options.horizon}")
    return panel


def _train(panel: Panel, options: ForecastOptions) -> Forecaster:
    """A forecaster trained on a panel, saved and back-tested."""
    t = len(panel.values)
    windows = _room_for_backtest(t, options.horizon, options.backtest)
    if windows < options.backtest:
        console.print(f"note: {t} steps leave room for {windows} back-test windows of {options.horizon}")
    forecaster = Forecaster(
        options.horizon, minutes=options.minutes, seed=options.seed, test_windows=windows, season=options.season,
        backbone=options.backbone, threads=options.threads,
    )  # fmt: skip
    forecaster.fit(panel, folder=options.out / "training", quiet=False)
    forecaster.save(options.out / "model")
    assert forecaster.result is not None
    assert forecaster.series is not None
    scaler = forecaster.series.scaler
    lags = [str(lag) for lag, weight in zip(scaler.lags, scaler.weights, strict=True) if weight]
    expected = "the value before" if scaler.residual == "difference" else f"the mean of those {', '.join(lags)} steps before"
    console.print(
        f"trained {forecaster.result.minutes:.1f} minutes ({forecaster.result.status}); expected value: {expected}; transform "
        f"{scaler.transform}; model in {options.out / 'model'}",
        markup=False,
    )
    if windows:
        with progress_bar() as progress:
            show(backtest(forecaster, options.samples, options.seed, progress))
    return forecaster


def backtest(forecaster: Forecaster, samples: int, seed: int, progress: Progress) -> Table:
    """Scores of forecasts of the windows that training did not see, beside those of simple forecasts."""
    split, series, sampler = forecaster.split, forecaster.series, forecaster.sampler
    if split is None or series is None or sampler is None:
        raise ValueError("a back-test needs a forecaster that was fitted, not loaded; call fit first")
    truth, futures = rolling(split, series, sampler, samples, seed, progress)
    rows = []
    for name, one in futures.items():
        score = summary(one, truth)
        rows.append((name, *(f"{score[key]:.4f}" for key in ("crps_sum", "crps")), f"{score['mae']:.4g}", f"{score['cover90']:.0%}"))
    heads = ("", "CRPS_sum", "CRPS", "MAE", "in the 90 % band")
    title = f"Back-test: {split.test_windows} windows of {split.horizon} steps that training did not see (lower is better)"
    return Table(title, heads, tuple(rows))


def _room_for_backtest(t: int, horizon: int, windows: int) -> int:
    """As many windows as leave at least five sixths of the data, and eight horizons, to learn from."""
    return max(0, min(windows, t // (6 * horizon), (t - 8 * horizon) // horizon))


def _write(futures: Forecast, panel: Panel, options: ForecastOptions) -> list[Path]:
    """Write tables and pictures; returns their files."""
    files = [options.out / f"forecast.{options.format}"]
    write_frame(futures.frame(options.quantiles), files[0])
    if options.keep_samples:
        files.append(options.out / f"samples.{options.format}")
        write_frame(futures.samples_frame(), files[-1])
    d = len(panel.names)
    for page, first in enumerate(range(0, min(d, SERIES_A_PAGE * PAGES), SERIES_A_PAGE), start=1):
        files.append(options.out / ("forecast.png" if d <= SERIES_A_PAGE else f"forecast-{page:02d}.png"))
        draw_fans(panel, futures.samples, files[-1], which=list(range(first, min(d, first + SERIES_A_PAGE))))
    if d > SERIES_A_PAGE * PAGES:
        console.print(f"note: pictures of the first {SERIES_A_PAGE * PAGES} of {d} series are drawn")
    return files
