"""Forecasting (paper, section 4.5): sets by name or by path, the paper's protocol, and simple baselines on the same windows."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Generator

from ..engine.task import Evaluation, Progress, Table, TaskData
from .model import Sampling, SeriesModel

if TYPE_CHECKING:
    from ..model import DiffusionForcing
    from .panel import Panel
    from .windows import Covariates, Normal

PUBLISHED: dict[str, dict[str, float]] = {
    "exchange": {"VES / VAR": 0.005, "TimeGrad": 0.006, "ScoreGrad": 0.006, "Transformer-MAF": 0.005},
    "solar": {"TimeGrad": 0.287, "ScoreGrad": 0.256, "ProTran": 0.194, "the paper": 0.289},
    "electricity": {"TimeGrad": 0.021, "ScoreGrad": 0.019, "ProTran": 0.016, "the paper": 0.023},
    "traffic": {"TimeGrad": 0.044, "ScoreGrad": 0.041, "ProTran": 0.028, "the paper": 0.040},
    "taxi": {"TimeGrad": 0.114, "ScoreGrad": 0.101, "ProTran": 0.084},
    "wikipedia": {"TimeGrad": 0.049, "ScoreGrad": 0.043, "ProTran": 0.047, "the paper": 0.085},
}
"""CRPS_sum as published. The paper's own 0.003 on Exchange and 0.075 on Taxi are left out: see docs/forecasting.md."""

OURS = "Diffusion Forcing"
DRAWS = {"gru": "independent+noisy_prefix+noisy_prefix", "transformer": "independent+staircase"}
"""How training draws levels: a network that draws step after step meets a known past most of the time."""


@dataclass(frozen=True)
class Forecasting:
    """Forecasts of many series, and how they are drawn."""

    source: str = "exchange"
    """A public set by its name (exchange, solar, electricity, traffic, taxi, wikipedia), or a file: CSV, Parquet, npz."""
    path: Path | None = None
    """Of a set by its name: a folder or .tar.gz of GluonTS' json lines, where there is no internet."""
    horizon: int | None = None
    """Steps to forecast; the set's own, if it has a name."""
    windows: int | None = None
    """Rolling windows at the end that are tested on; the set's own, if it has a name, else 3."""
    held: int | None = None
    """Windows before these that are validated on; None: a tenth of the rest, 2 to 7."""
    context: int | None = None
    """Steps of the past that the network reads; None: the horizon or two seasons, whichever is longer."""
    season: tuple[int, ...] = ()
    """Periods in steps, the shortest first; empty: by the calendar."""
    expect: Literal["auto", "lags", "steps"] = "auto"
    """What values are expected to be: by their lags, or as the value before. auto: whichever forecasts better."""
    transform: Literal["auto", "none", "sqrt", "log"] = "auto"
    """Of values, so that departures are alike at all sizes. auto: the likeliest."""
    together: bool = True
    """Whether each series is told how the others did lately, on average."""
    joint: bool = False
    """Whether a token holds all series at once, as in the paper, instead of one value of one series."""
    sampling: Sampling = field(default_factory=Sampling)
    """How forecasts are drawn."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "season", tuple(self.season))  # lists are welcome
        if any(period < 1 for period in self.season):
            raise ValueError(f"season counts steps from 1; got {self.season}")
        for name in ("horizon", "windows", "held", "context"):
            value = getattr(self, name)
            if value is not None and value < (0 if name == "windows" else 1):
                raise ValueError(f"{name} counts from 1; got {value}")

    def panel(self) -> tuple[Panel, int, int]:
        """All series, the horizon, and how many test windows they end with."""
        return _load(self.source, self.path, self.horizon, self.windows)

    def setting(self) -> Setting:
        """What is learned from, what is normal there, and what is held back."""
        return _setting(self)

    def data(self) -> TaskData:
        from .windows import JointWindows, SeriesWindows

        s = self.setting()
        kind: Any = JointWindows if self.joint else SeriesWindows
        known, values, clock = s.panel.known, s.panel.values[: s.end], s.clock[: s.end]
        train = kind(values, clock, known, s.normal, s.covariates, s.context, 0, s.end - s.held)
        valid = kind(values, clock, known, s.normal, s.covariates, s.context, s.end - s.held - s.context, s.end)
        return TaskData(train, valid)

    def forecaster(self, model: DiffusionForcing) -> SeriesModel:
        """A trained network with its noise as it was in the windows it learned from."""
        s = self.setting()
        return SeriesModel.bare(model, s.normal, s.covariates, s.context, self.joint).listen(
            s.panel.values[: s.end], s.clock[: s.end], s.panel.known, held=s.held
        )

    def score(self, model: DiffusionForcing, seed: int = 0, samples: int = 50) -> float:
        """CRPS_sum over the windows that are held back for validation, by which training may stop early. The same noise every time."""
        from .scores import crps_sum

        s = self.setting()
        forecaster = SeriesModel.bare(model, s.normal, s.covariates, s.context, self.joint)
        generator, sampling = Generator().manual_seed(seed), replace(self.sampling, samples=samples)
        origins = range(s.end - s.held, s.end - s.horizon + 1, s.horizon)
        drawn = [forecaster.draw(s.panel.values[:o], s.clock[:o], s.panel.known[: o + s.horizon], sampling=sampling, generator=generator)
                 for o in origins]  # fmt: skip
        return crps_sum(np.stack(drawn, axis=1), np.stack([s.panel.values[o : o + s.horizon] for o in origins]))

    @property
    def default_samples(self) -> int:
        return self.sampling.samples

    def evaluate(self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress) -> Evaluation:
        from .figures import draw_fans
        from .scores import summary

        s = self.setting()
        if s.windows < 1:
            raise ValueError("there are no test windows to measure on; set --task.windows")
        progress("noise of past windows", 0, 1)
        forecaster = self.forecaster(model)
        progress("noise of past windows", 1, 1)
        truth, futures = rolling(s, forecaster, replace(self.sampling, samples=samples), seed, progress)
        scores = {name: summary(f, truth) for name, f in futures.items()}
        metrics = {**scores[OURS], **{f"{name}/{key}": v for name, one in scores.items() for key, v in one.items()}}
        heads = ("", "CRPS_sum", "CRPS", "energy score", "MAE", "in the 50 % band", "in the 90 % band")
        rows = [(name, f"{one['crps_sum']:.4f}", f"{one['crps']:.4f}", f"{one['energy']:.4g}", f"{one['mae']:.4g}",
                 f"{one['cover50']:.0%}", f"{one['cover90']:.0%}") for name, one in scores.items()]  # fmt: skip
        rows += [(f"published: {name}", f"{value:.3f}", "", "", "", "", "") for name, value in PUBLISHED.get(self.source, {}).items()]
        title = f"{s.windows} windows of {s.horizon} steps, {s.panel.values.shape[1]} series, {samples} futures each"
        picture = folder / "forecasts.png"
        draw_fans(s.panel.until(s.origins[-1] + s.horizon), futures[OURS][:, -1], picture, at=s.origins[-1])
        return Evaluation(
            metrics, (Table(title, heads, tuple(rows)),),
            {picture.name: "The last window: history and truth black, median and the 50 % and 90 % bands blue."},
        )  # fmt: skip

    def sample(self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress) -> list[Path]:
        from .figures import draw_fans

        s = self.setting()
        origin = s.origins[-1] if s.windows else len(s.panel.values)
        drawn = self.forecaster(model).draw(
            s.panel.values[:origin], s.clock[:origin], s.panel.known, sampling=replace(self.sampling, samples=samples),
            generator=Generator().manual_seed(seed), progress=lambda done, of: progress("futures", done, of),
        )  # fmt: skip
        arrays, picture = folder / "samples.npz", folder / "samples.png"
        np.savez(arrays, futures=drawn, names=np.array(s.panel.names))
        draw_fans(s.panel.until(min(len(s.panel.values), origin + s.horizon)), drawn, picture, at=origin)
        return [arrays, picture]


@dataclass(frozen=True, eq=False)
class Setting:
    """A panel with its split: learned from are the first end - held steps, validated on the held ones, tested on the windows after."""

    panel: Panel
    clock: NDArray[np.int64]
    seasons: tuple[int, ...]
    horizon: int
    context: int
    windows: int
    held: int
    end: int
    normal: Normal
    covariates: Covariates

    @property
    def origins(self) -> list[int]:
        """First steps of the test windows."""
        return [self.end + number * self.horizon for number in range(self.windows)]


def rolling(
    s: Setting, forecaster: SeriesModel, sampling: Sampling, seed: int, progress: Progress
) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    """What happened in the test windows (w, h, d), and futures (n, w, h, d) drawn before them: ours, and those of the baselines."""
    generator = Generator().manual_seed(seed)
    drawn = []
    for number, origin in enumerate(s.origins):
        progress("forecasts", number, len(s.origins))
        past, known = s.panel.values[:origin], s.panel.known[: origin + s.horizon]
        drawn.append(forecaster.draw(past, s.clock[:origin], known, sampling=sampling, generator=generator))
    progress("forecasts", len(s.origins), len(s.origins))
    futures = {OURS: np.stack(drawn, axis=1)}
    for name, baseline in baselines(s).items():
        rng = np.random.default_rng(seed)
        futures[name] = np.stack([_of_seen(baseline, s.panel.values[:o], s.horizon, sampling.samples, rng) for o in s.origins], axis=1)
    # Nobody can tell a series that has not begun: where there is no value before a window, nothing is scored.
    truth = [np.where(_seen(s.panel.values[:o]), s.panel.values[o : o + s.horizon], np.nan) for o in s.origins]
    return np.stack(truth), futures


def _seen(past: NDArray[np.float64]) -> NDArray[np.bool_]:
    """(d,), which series have a value by now."""
    return np.asarray(~np.isnan(past).all(0))


def _of_seen(
    baseline: Callable[..., Any], past: NDArray[np.float64], horizon: int, samples: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Draws (samples, horizon, d) of a baseline, which asks for a value of each series; 0 for those that have none."""
    seen = _seen(past)
    if seen.all():
        return np.asarray(baseline(past, horizon, samples, rng))
    out = np.zeros((samples, horizon, past.shape[1]))
    if seen.any():
        out[..., seen] = baseline(past[:, seen], horizon, samples, rng)
    return out


def baselines(s: Setting) -> dict[str, Callable[..., Any]]:
    """Simple forecasts that fit a setting."""
    from .baselines import drift, random_walk, ridge_var, seasonal_naive

    made: dict[str, Callable[..., Any]] = {}
    room = s.end - s.horizon
    for season in s.seasons:
        if 1 < season <= room:
            made[f"seasonal naive ({season})"] = functools.partial(seasonal_naive, season=season)
    longest = s.seasons[-1]
    averaged = min(4, room // max(1, longest) - 1)
    if longest > 1 and averaged > 1:
        made[f"seasonal naive ({longest}, mean of {averaged})"] = functools.partial(seasonal_naive, season=longest, seasons=averaged)
    made["drift"] = drift
    made["random walk"] = random_walk
    lags = tuple(lag for lag in (1, 2, *s.seasons) if 1 <= lag < room // 3)
    made["ridge VAR"] = functools.partial(ridge_var, components=8, lags=tuple(sorted(set(lags))))
    return made


@functools.lru_cache(maxsize=4)
def _load(source: str, path: Path | None, horizon: int | None, windows: int | None) -> tuple[Panel, int, int]:
    from .forecaster import load_panel
    from .panel import NAMED, check_horizon, load_named, read

    if source in NAMED:
        panel, named = load_named(source, path)
        ahead, number = horizon or named.horizon, named.windows if windows is None else windows
    else:
        panel = load_panel(Path(source)) if source.endswith(".panel.npz") else read(source)
        if horizon is None:
            raise ValueError("say how far to forecast: --task.horizon STEPS (only the sets known by name have one of their own)")
        ahead, number = horizon, 3 if windows is None else windows
    check_horizon(panel, ahead)
    return panel, ahead, number


@functools.lru_cache(maxsize=4)
def _setting(task: Forecasting) -> Setting:
    from .calendar import clock_of, seasons_of, waves_of
    from .windows import Covariates, fit_normal

    panel, horizon, windows = task.panel()
    t = len(panel.values)
    end = t - windows * horizon
    if end < 4 * horizon:
        raise ValueError(
            f"{windows} test windows of {horizon} steps leave {max(0, end)} of {t} steps to learn from; at least {4 * horizon} are needed: "
            "forecast fewer steps, or test on fewer windows"
        )
    clock = clock_of(panel)
    held = horizon * (task.held or int(np.clip(end / horizon / 10, 2, 7)))
    held = min(held, end // 3)
    seen = panel.until(end - held)  # what is validated and tested on must not say what is normal
    seasons = task.season or seasons_of(seen)
    kind: Any = None if task.expect == "auto" else task.expect
    transform: Any = None if task.transform == "auto" else task.transform
    fitted = slice(0, end - held)
    real = panel.kind == "real"
    normal = fit_normal(panel.values[fitted], clock[fitted], horizon, seasons, kind=kind, transform=transform, real=real)
    vague = normal.vague
    normal = normal.learned(panel.values[:end], clock[:end])
    _warn_of_vague(panel, vague, normal.vague, end - held)
    covariates = Covariates.fit(panel.values[fitted], panel.known[fitted], normal, waves_of(seen, seasons), together=task.together)
    context = task.context or max(horizon, 2 * seasons[0])
    context = max(1, min(context, end - held - normal.warm - horizon - 1, held))
    return Setting(panel, clock, seasons, horizon, context, windows, held, end, normal, covariates)


def _warn_of_vague(panel: Panel, vague: NDArray[np.bool_], still: NDArray[np.bool_], fitted: int) -> None:
    """Name the series whose scale could not be learned where the others' was. Constants throughout are told of when they are read."""
    from .windows import ENOUGH

    for series in np.flatnonzero(vague):
        there = panel.values[~np.isnan(panel.values[:, series]), series]
        few = int((~np.isnan(panel.values[:fitted, series])).sum())
        if len(there) and (there != there[0]).any():
            why = f"has {few} values" if few < ENOUGH else "is constant"
            then = "all of its values before the forecast" if not still[series] else "the other series, until there are values of its own"
            where = f"in the first {fitted} steps, which are learned from"
            warnings.warn(f"{panel.names[series]!r} {why} {where}: its scale is taken from {then}", stacklevel=2)


def forget() -> None:
    """Read files again, which may have changed."""
    _load.cache_clear()
    _setting.cache_clear()
