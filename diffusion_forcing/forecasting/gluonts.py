"""GluonTS: an estimator and a predictor for its evaluators, splits and back-tests.

estimator = DiffusionForcingEstimator(freq="h", prediction_length=24, target_dim=8, minutes=3)
predictor = estimator.train(training_data)
forecasts, truths = make_evaluation_predictions(test_data, predictor, num_samples=100)
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import Generator

try:
    from gluonts.dataset import Dataset
    from gluonts.model import Estimator, Predictor
    from gluonts.model.forecast import SampleForecast
except ImportError as error:
    raise ImportError("this module needs GluonTS: pip install 'diffusion_forcing[forecasting]'") from error

from ..files import write_atomically
from ..sampler import Sampler
from .forecaster import Forecaster
from .model import SeriesModel
from .panel import Panel, offset_of
from .windows import History


class DiffusionForcingEstimator(Estimator):
    """Trains on entries with a multivariate target (target_dim, t), as GluonTS' MultivariateGrouper makes them.

    With target_dim=1 there are many univariate entries, targets (t,), distinguished by their item_id.
    """

    def __init__(
        self, freq: str, prediction_length: int, target_dim: int = 1, *, context_length: int | None = None, num_samples: int = 100,
        quiet: bool = True, **options: Any,
    ) -> None:  # fmt: skip
        """freq: as pandas writes it. options: minutes, seed, backbone, threads and the others of `Forecaster`."""
        super().__init__(lead_time=0)
        if target_dim < 1:
            raise ValueError(f"target_dim counts the series of an entry from 1; got {target_dim}")
        self.freq, self.prediction_length, self.target_dim = offset_of(freq).freqstr, prediction_length, target_dim
        self.num_samples, self.quiet = num_samples, quiet
        self._options: dict[str, Any] = {"context": context_length, "cross_series": target_dim > 1, **options}

    def train(self, training_data: Dataset, validation_data: Dataset | None = None) -> DiffusionForcingPredictor:
        """Train on the entries. Validation windows are taken from the end of the training range, so validation_data are not needed."""
        panel = self._panel(training_data)
        forecaster = Forecaster(self.prediction_length, **self._options).fit(panel, quiet=self.quiet)
        assert forecaster.series is not None
        assert forecaster.sampler is not None
        return DiffusionForcingPredictor(
            forecaster.series, self.freq, self.target_dim, panel.names, forecaster.sampler, num_samples=self.num_samples
        )

    def _panel(self, entries: Dataset) -> Panel:
        """The entries as one panel. Of several windows of the same multivariate series the longest counts."""
        columns: dict[str, Any] = {}
        warned = False
        for number, entry in enumerate(entries):
            if not warned and (warned := "feat_dynamic_real" in entry):
                warnings.warn(f"feat_dynamic_real of entry {number} is not used; Forecaster takes such columns as `known`", stacklevel=3)
            target = np.asarray(entry["target"], dtype=float)
            ndim = 1 if self.target_dim == 1 and target.ndim == 1 else 2
            if target.ndim != ndim or (ndim == 2 and len(target) != self.target_dim):
                raise ValueError(
                    f"target_dim is {self.target_dim}, but the target of entry {number} has shape {target.shape}; group univariate series "
                    "with GluonTS' MultivariateGrouper, or set target_dim"
                )
            index = _index(entry["start"], target.shape[-1], self.freq)
            if ndim == 1:
                columns[_item(entry, number)] = pd.Series(target, index=index)
                continue
            own = {str(i): pd.Series(row, index=index) for i, row in enumerate(target)}
            short, columns = sorted((columns or own, own), key=lambda one: len(one["0"]))
            if not all(series.equals(columns[name].reindex(series.index)) for name, series in short.items()):
                raise ValueError(
                    f"with target_dim={self.target_dim} all entries are windows of the same series, but entry {number} is none of those "
                    "before it; train on one entry, or on univariate ones with target_dim=1"
                )
        if not columns:
            raise ValueError("the training data hold no entries")
        frame = pd.DataFrame(columns)
        frame = frame.reindex(pd.date_range(frame.index[0], frame.index[-1], freq=self.freq))
        return Panel(frame.to_numpy(), tuple(frame.columns), frame.index, self.freq, np.zeros((len(frame), 0)))


class DiffusionForcingPredictor(Predictor):
    """What `DiffusionForcingEstimator.train` returns."""

    def __init__(
        self, series: SeriesModel, freq: str, target_dim: int, names: tuple[str, ...], sampler: Sampler, *, num_samples: int = 100,
        seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(prediction_length=series.horizon, lead_time=0)
        self.series, self.freq, self.target_dim, self.names, self.sampler = series, freq, target_dim, names, sampler
        self.num_samples, self.seed = num_samples, seed

    def predict(self, dataset: Dataset, num_samples: int | None = None, **_: Any) -> Iterator[SampleForecast]:
        """A SampleForecast for each entry, (num_samples, prediction_length[, target_dim])."""
        generator = Generator().manual_seed(self.seed)
        for number, entry in enumerate(dataset):
            target = np.asarray(entry["target"], dtype=float)
            single = target.ndim == 1
            index = _index(entry["start"], target.shape[-1], self.freq)
            values = target[:, None] if single else target.T
            panel = Panel(values, tuple(map(str, range(values.shape[1]))), index, self.freq, np.zeros((len(values), 0)))
            series = self.series.single(self._which(entry, number)) if single else self.series
            futures = series.draw(History.of(panel), samples=num_samples or self.num_samples, sampler=self.sampler, generator=generator)
            samples = futures[..., 0] if single else futures
            yield SampleForecast(
                samples, start_date=entry["start"] + target.shape[-1], item_id=entry.get("item_id"), info=entry.get("info")
            )

    def _which(self, entry: Any, number: int) -> int:
        """Which of the univariate series an entry is."""
        if len(self.names) == 1:
            return 0
        name = _item(entry, number)
        if name not in self.names:
            raise ValueError(f"the predictor was trained on series {', '.join(self.names[:5])}...; got an entry with item_id {name!r}")
        return self.names.index(name)

    def serialize(self, path: Path) -> None:
        """Into an existing folder, as GluonTS asks. Weights go to safetensors, nothing is pickled."""
        super().serialize(path)
        self.series.save(path)
        config = {
            "freq": self.freq, "target_dim": self.target_dim, "names": list(self.names), "sampler": dataclasses.asdict(self.sampler),
            "num_samples": self.num_samples, "seed": self.seed,
        }  # fmt: skip
        write_atomically(path / "predictor.json", lambda file: Path(file).write_text(json.dumps(config, indent=2) + "\n"))

    @classmethod
    def deserialize(cls, path: Path, **_: Any) -> DiffusionForcingPredictor:
        """The inverse of serialize. GluonTS's own `Predictor.deserialize(path)` finds it too, but imports any class that a file names."""
        config = json.loads((path / "predictor.json").read_text())
        return cls(
            SeriesModel.load(path), config["freq"], config["target_dim"], tuple(config["names"]), Sampler(**config["sampler"]),
            num_samples=config["num_samples"], seed=config["seed"],
        )  # fmt: skip


def _index(start: Any, length: int, freq: str) -> pd.DatetimeIndex:
    begin = start.to_timestamp() if isinstance(start, pd.Period) else pd.Timestamp(start)
    return pd.date_range(begin, periods=length, freq=freq)


def _item(entry: Any, number: int) -> str:
    return str(entry.get("item_id", number))
