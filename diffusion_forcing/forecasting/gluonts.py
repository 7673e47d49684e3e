"""For users of GluonTS: an estimator and a predictor that go with its evaluators, splits and back-tests.

estimator = DiffusionForcingEstimator(freq="h", prediction_length=24, target_dim=8, minutes=3)
predictor = estimator.train(training_data)
forecasts, truths = make_evaluation_predictions(test_data, predictor, num_samples=100)
"""

from __future__ import annotations

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

from .calendar import clock_of
from .forecaster import Forecaster
from .model import Sampling, SeriesModel, limited
from .panel import Panel, offset_of


class DiffusionForcingEstimator(Estimator):
    """Trains on entries with a multivariate target (target_dim, t), as GluonTS' MultivariateGrouper makes them.

    With target_dim=1 entries are univariate, targets (t,), and many: they are told apart by their item_id.
    """

    def __init__(
        self, freq: str, prediction_length: int, target_dim: int = 1, *, minutes: float = 2.0, seed: int = 0,
        context_length: int | None = None, num_samples: int = 100, quiet: bool = True, **options: Any,
    ) -> None:  # fmt: skip
        """freq: as pandas writes it. options: season, backbone, threads and the others of `Forecaster`."""
        super().__init__(lead_time=0)
        if target_dim < 1:
            raise ValueError(f"target_dim counts the series of an entry from 1; got {target_dim}")
        self.freq, self.prediction_length, self.target_dim = offset_of(freq).freqstr, prediction_length, target_dim
        self.num_samples, self.quiet = num_samples, quiet
        self._options: dict[str, Any] = {"minutes": minutes, "seed": seed, "context": context_length, "together": target_dim > 1, **options}

    def train(self, training_data: Dataset, validation_data: Dataset | None = None) -> DiffusionForcingPredictor:
        """Train on the entries. Validation windows are taken from the end of the training range, so validation_data are not needed."""
        panel = self._panel(training_data)
        forecaster = Forecaster(self.prediction_length, **self._options).fit(panel, quiet=self.quiet)
        assert forecaster.series is not None
        return DiffusionForcingPredictor(
            forecaster.series, self.freq, self.target_dim, panel.names, forecaster.task.sampling, num_samples=self.num_samples
        )

    def _panel(self, entries: Dataset) -> Panel:
        columns: dict[str, Any] = {}
        told = False
        for number, entry in enumerate(entries):
            if not told and (told := "feat_dynamic_real" in entry):
                warnings.warn(f"feat_dynamic_real of entry {number} is not used; Forecaster takes such columns as `known`", stacklevel=3)
            target = np.asarray(entry["target"], dtype=float)
            wanted = 1 if self.target_dim == 1 and target.ndim == 1 else 2
            if target.ndim != wanted or (wanted == 2 and len(target) != self.target_dim):
                raise ValueError(
                    f"target_dim is {self.target_dim}, but the target of entry {number} has shape {target.shape}; group univariate series "
                    "with GluonTS' MultivariateGrouper, or set target_dim"
                )
            index = _index(entry["start"], target.shape[-1], self.freq)
            if wanted == 1:
                columns[_item(entry, number)] = pd.Series(target, index=index)
                continue
            known = columns.get("0")
            own = {str(i): pd.Series(row, index=index) for i, row in enumerate(target)}
            if known is None:
                columns = own
                continue
            short, columns = sorted((columns, own), key=lambda one: len(one["0"]))  # the longest of several windows of the same series
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
        self, series: SeriesModel, freq: str, target_dim: int, names: tuple[str, ...], sampling: Sampling, *, num_samples: int = 100,
        seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(prediction_length=series.horizon, lead_time=0)
        self.series, self.freq, self.target_dim, self.names, self.sampling = series, freq, target_dim, names, sampling
        self.num_samples, self.seed = num_samples, seed

    def predict(self, dataset: Dataset, num_samples: int | None = None, **_: Any) -> Iterator[SampleForecast]:
        """A SampleForecast for each entry, (num_samples, prediction_length[, target_dim])."""
        generator = Generator().manual_seed(self.seed)
        sampling = Sampling(**{**self.sampling.__dict__, "samples": num_samples or self.num_samples})
        for number, entry in enumerate(dataset):
            target = np.asarray(entry["target"], dtype=float)
            single = target.ndim == 1
            index = _index(entry["start"], target.shape[-1], self.freq)
            values = target[:, None] if single else target.T
            panel = Panel(values, tuple(map(str, range(values.shape[1]))), index, self.freq, np.zeros((len(values), 0)))
            drawn = limited(self.series, self._which(entry, number) if single else 0, single).draw(
                values, clock_of(panel), sampling=sampling, generator=generator
            )
            samples = drawn[..., 0] if single else drawn
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
        about = {
            "freq": self.freq, "target_dim": self.target_dim, "names": list(self.names), "sampling": self.sampling.__dict__,
            "num_samples": self.num_samples, "seed": self.seed,
        }  # fmt: skip
        (path / "predictor.json").write_text(json.dumps(about, indent=2) + "\n")

    @classmethod
    def deserialize(cls, path: Path, **_: Any) -> DiffusionForcingPredictor:
        """The inverse of serialize; `Predictor.deserialize(path)` finds it too."""
        about = json.loads((path / "predictor.json").read_text())
        return cls(
            SeriesModel.load(path), about["freq"], about["target_dim"], tuple(about["names"]), Sampling(**about["sampling"]),
            num_samples=about["num_samples"], seed=about["seed"],
        )  # fmt: skip


def _index(start: Any, length: int, freq: str) -> pd.DatetimeIndex:
    begin = start.to_timestamp() if isinstance(start, pd.Period) else pd.Timestamp(start)
    return pd.date_range(begin, periods=length, freq=freq)


def _item(entry: Any, number: int) -> str:
    return str(entry.get("item_id", number))
