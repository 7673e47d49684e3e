"""dforce forecast FILE: train on a table, write forecasts, draw them, and say how good such forecasts were lately."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from ..engine.task import Table


@dataclass(frozen=True)
class ForecastOptions:
    """Forecast the series of a table: CSV or Parquet, one column a series, or long with id, time and value columns.

    The time column and the frequency are found by themselves. Missing values are allowed: each is a token at the level of pure noise.
    Writes forecasts with quantiles, a fan chart of each series, and a back-test against simple forecasts; keeps the trained model.
    """

    file: tyro.conf.Positional[Path]
    """The table: .csv, .tsv, .parquet (or an .npz with `values`)."""
    horizon: Annotated[int, tyro.conf.arg(aliases=["-n"])]
    """Steps to forecast."""
    time: str | None = None
    """Name of the time column."""
    id: str | None = None
    """Name of the column that says which series a row is of, in a long table."""
    value: str | None = None
    """Name of the column of values, in a long table."""
    freq: str | None = None
    """Frequency, as pandas writes it: h, 30min, D, B, MS ..."""
    known: tuple[str, ...] = ()
    """Columns known in advance (holidays, prices); they must go on for the horizon beyond the last value."""
    values: Literal["auto", "real", "positive", "counts"] = "auto"
    """What values may be; others are complained about. real: forecasts may be negative though no value was."""
    model: Path | None = None
    """Use this trained model instead of training one."""
    out: Path = Path("forecast")
    """Folder for forecasts, pictures and the trained model."""
    format: Literal["csv", "parquet"] = "csv"
    """Of the forecasts."""
    quantiles: tuple[float, ...] = (0.05, 0.25, 0.5, 0.75, 0.95)
    """To write."""
    samples: int = 100
    """Futures to draw."""
    keep_samples: bool = False
    """Also write every sampled future."""
    minutes: float = 2.0
    """Of training at most."""
    backtest: int = 3
    """Windows at the end that are kept out of training and forecast from before; 0 for none."""
    backbone: Literal["gru", "transformer"] = "gru"
    """Network: a GRU as in the paper, or a transformer that sees everything."""
    season: tuple[int, ...] = ()
    """Periods in steps, the shortest first, where the calendar does not say them."""
    seed: int = 0
    threads: int | None = None
    """Threads of torch; None leaves torch's choice."""


def forecast(words: list[str]) -> int:
    """dforce forecast FILE --horizon STEPS"""
    options: Any = tyro.cli(ForecastOptions, args=words, prog="dforce forecast", description=ForecastOptions.__doc__)
    import torch

    from ..engine.cli import console, progress_bar, show
    from .figures import draw_fans
    from .forecaster import Forecaster
    from .panel import check_horizon, read, write_frame

    began = time.monotonic()
    if not options.quantiles or any(not 0 < q < 1 for q in options.quantiles):
        raise ValueError(f"quantiles lie between 0 and 1; got {options.quantiles}")
    if options.samples < 1:
        raise ValueError(f"--samples counts futures from 1; got {options.samples}")
    loaded = None if options.model is None else Forecaster.load(options.model)
    known = options.known or (loaded.known_names if loaded else ())
    panel = read(options.file, time=options.time, id=options.id, value=options.value, freq=options.freq, known=known, kind=options.values)
    check_horizon(panel, options.horizon)
    t, d = panel.values.shape
    stamps = f"{panel.index[0]} to {panel.index[-1]}"
    console.print(f"{options.file.name}: {d} series, {t} steps" + (f" of {panel.freq}" if panel.freq else "") + f", {stamps}", markup=False)
    for note in panel.notes:
        console.print(f"note: {note}", markup=False)
    options.out.mkdir(parents=True, exist_ok=True)
    if loaded is not None:
        forecaster = loaded
        idle = [name for name in ("backtest", "minutes", "backbone", "season") if getattr(options, name) != getattr(ForecastOptions, name)]
        if idle:
            console.print(f"note: {', '.join(f'--{name}' for name in idle)} are for training and have no effect on a trained --model")
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        panel = forecaster.ordered(panel)
        d = len(panel.names)
        if options.horizon > forecaster.task.horizon:
            raise ValueError(f"the model in {options.model} forecasts at most {forecaster.task.horizon} steps; got {options.horizon}")
    else:
        windows = _backtests(t, options.horizon, options.backtest)
        if windows < options.backtest:
            console.print(f"note: {t} steps leave room for {windows} back-test windows of {options.horizon}")
        forecaster = Forecaster(
            options.horizon, minutes=options.minutes, seed=options.seed, windows=windows, season=options.season,
            backbone=options.backbone, threads=options.threads,
        )  # fmt: skip
        forecaster.fit(panel, folder=options.out / "training", quiet=False)
        forecaster.save(options.out / "model")
        assert forecaster.result is not None
        assert forecaster.series is not None
        normal = forecaster.series.normal
        lags = [str(lag) for lag, weight in zip(normal.lags, normal.weights, strict=True) if weight]
        expected = "the value before" if normal.kind == "steps" else f"the mean of those {', '.join(lags)} steps before"
        console.print(
            f"trained {forecaster.result.minutes:.1f} minutes ({forecaster.result.status}); expected: {expected}; transform "
            f"{normal.transform}; model in {options.out / 'model'}",
            markup=False,
        )
        if windows:
            with progress_bar() as progress:
                show(backtest(forecaster, options.samples, options.seed, progress))
    with progress_bar() as progress:
        drawn = forecaster.predict(
            options.horizon, data=panel, seed=options.seed,
            sampling=dataclasses.replace(forecaster.task.sampling, samples=options.samples),
            progress=lambda done, of: progress("futures", done, of),
        )  # fmt: skip
    files = [options.out / f"forecast.{options.format}"]
    write_frame(drawn.frame(options.quantiles), files[0])
    if options.keep_samples:
        files.append(options.out / f"samples.{options.format}")
        write_frame(drawn.samples_frame(), files[-1])
    for page, first in enumerate(range(0, d, 12), start=1):
        which = list(range(first, min(d, first + 12)))
        files.append(options.out / ("forecast.png" if d <= 12 else f"forecast-{page:02d}.png"))
        draw_fans(panel, drawn.samples, files[-1], which=which)
        if page == 10:
            console.print(f"note: pictures of the first 120 of {d} series are drawn")
            break
    for file in files:
        console.print(f"wrote {file}", markup=False)
    console.print(f"{time.monotonic() - began:.0f} s in all")
    return 0


def backtest(forecaster: Any, samples: int, seed: int, progress: Any) -> Table:
    """Forecasts of the windows that training did not see, beside simple ones."""
    from .scores import summary
    from .task import rolling

    s = forecaster.setting
    sampling = dataclasses.replace(forecaster.task.sampling, samples=samples)
    truth, futures = rolling(s, forecaster.series, sampling, seed, progress)
    rows = []
    for name, one in futures.items():
        score = summary(one, truth)
        rows.append((name, *(f"{score[key]:.4f}" for key in ("crps_sum", "crps")), f"{score['mae']:.4g}", f"{score['cover90']:.0%}"))
    heads = ("", "CRPS_sum", "CRPS", "MAE", "in the 90 % band")
    return Table(f"Back-test: {s.windows} windows of {s.horizon} steps that training did not see (lower is better)", heads, tuple(rows))


def _backtests(t: int, horizon: int, wanted: int) -> int:
    """As many windows as leave at least five sixths of the data, and eight horizons, to learn from."""
    return max(0, min(wanted, t // (6 * horizon), (t - 8 * horizon) // horizon))
