"""Probabilistic forecasts of many series: a trained network with everything that turns values into tokens and tokens into values.

Each series is a sequence of its own to one shared network. Futures of different series correlate through their noise (`NoiseModel`). The
noise level of a value says what is known of it: 0 exact, K missing, in between uncertain.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor

from ..checks import check_counts
from ..files import write_atomically
from ..guidance import guide
from ..likelihood import log_likelihood
from ..matrix import full_sequence, pin
from ..model import Denoise, DiffusionForcing
from ..sampler import Sampler, check_all_noise
from ..sampling import sample
from ..solver import angle_step
from .features import SeriesFeatures, build_cond, build_joint_cond
from .noise import NoiseModel
from .panel import Array
from .scaling import SeriesScaler
from .windows import Clock, History

Reward = Callable[[Tensor], Tensor]  # values (n, h, d) -> score (n,), differentiable
SEQUENCES = 20_000  # sampled at a time, to bound memory
FORMAT = 1
AUTOREGRESSIVE = Sampler(steps=16, matrix="autoregressive", slope=4.0, solver="euler_angle")
"""Token after token: exact for a causal network."""
WHOLE = replace(AUTOREGRESSIVE, matrix="full_sequence")
"""All tokens at once: for a network that sees everything."""


@dataclass(eq=False)
class SeriesModel:
    """A network and what it takes to forecast values (t, d) with it."""

    model: DiffusionForcing
    scaler: SeriesScaler
    features: SeriesFeatures
    context: int
    """Steps of the past that the network reads."""
    noise: NoiseModel
    joint: bool = False
    """Whether a token holds all series at once, as in the paper, instead of one value of one series."""

    @classmethod
    def uncalibrated(
        cls, model: DiffusionForcing, scaler: SeriesScaler, features: SeriesFeatures, context: int, joint: bool = False
    ) -> SeriesModel:
        """With white noise; see `calibrate`."""
        noise = NoiseModel.white(scaler.horizon, len(scaler.mean), scaler.season, scaler.residual == "difference")
        return cls(model, scaler, features, context, noise, joint)

    @property
    def horizon(self) -> int:
        return self.scaler.horizon

    # Forecasts.

    @torch.no_grad()
    def draw(
        self, history: History, *, horizon: int | None = None, samples: int = 100, sampler: Sampler = AUTOREGRESSIVE,
        reward: Reward | None = None, scale: float = 10.0, generator: Generator | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Array:  # fmt: skip
        """Futures (n, h, d) after a history.

        reward: of futures (n, h, d), towards which they are guided with strength `scale`. progress: called with sequences done and in all.
        """
        horizon = self.horizon if horizon is None else horizon
        check_counts(samples=samples)
        self._check(history, horizon)
        if history.level is not None:  # a value at level K is missing: neither a lag, nor part of the mean of all series
            history = replace(history, values=np.where(history.level >= self.model.schedule.levels, np.nan, history.values))
        guidance = None if reward is None else _Guidance(reward, scale)
        return self._adapted(history)._draw(history, horizon, samples, sampler, guidance, generator, progress)

    def _adapted(self, history: History) -> SeriesModel:
        """With what training could not know: the scale of series that began later, and no floor where values have gone below it."""
        scaler = self.scaler.adapt(history.values, history.clock)
        return self if scaler is self.scaler else replace(self, scaler=scaler)

    def _draw(
        self, history: History, horizon: int, samples: int, sampler: Sampler, guidance: _Guidance | None, generator: Generator | None,
        progress: Callable[[int, int], None] | None,
    ) -> Array:  # fmt: skip
        t, d = history.values.shape
        gaps = self._trailing_gaps(history.values)
        if guidance is not None and len(set(gaps.tolist())) > 1:
            raise ValueError("a reward needs all series at once, but they end at different times; fill or cut the last values first")
        longest = int(gaps.max(initial=0))
        clock = _extend(history.clock[: t - longest], horizon + longest)[t - longest :]
        noise = sampler.temperature * self.noise.draw(samples, clock, generator)
        trusted = self._discounted(history)
        cross_series = self.features.cross_series_mean(self.scaler.encode(trusted, history.clock))
        out = np.empty((samples, horizon, d))
        size, done = max(1, SEQUENCES // d), 0
        for gap in np.unique(gaps):  # series that end at the same step are sampled together
            which = np.flatnonzero(gaps == gap)
            group = self if len(which) == d else self.select(which)
            start = group._start(history.select(which).until(t - gap), trusted[: t - gap, which], cross_series, horizon + gap)
            for rows in range(0, samples, size):
                part = noise[rows : rows + size, longest - gap :][..., which]
                futures = group._sample(start, part, sampler, guidance, gap, generator)
                out[rows : rows + size, :, which] = futures[:, gap:]
                done += len(futures) * len(which)
                if progress is not None:
                    progress(done, samples * d)
        return out

    def _trailing_gaps(self, values: Array) -> NDArray[np.int64]:
        """Missing steps (d,) at the end of each series, from which on it is sampled. Only where tokens are differences; else 0."""
        gaps = np.zeros(values.shape[1], dtype=np.int64)
        if self.scaler.residual == "seasonal":
            return gaps
        trailing = _trailing(values)
        return gaps + np.minimum(trailing.max(initial=0) if self.joint else trailing, self.horizon * 4)

    def _discounted(self, history: History) -> Array:
        """Values (t, d) as a source of lags: uncertain ones drawn towards what was expected, by the signal's share of their variance."""
        if history.level is None or not (history.level > 0).any():
            return history.values
        trust = self.model.schedule.alpha(torch.from_numpy(np.asarray(history.level)).long()).double().numpy() ** 2
        return self.scaler.discount(history.values, trust)

    def _start(self, past: History, trusted: Array, cross_series: Tensor, steps: int) -> _Start:
        """The network's state after a past, and the conditions of the `steps` tokens that follow it."""
        t = len(past.values)
        first = max(self.scaler.warmup, t - self.context)
        tokens, levels = self._tokens(past, first, t, trusted)
        cond = self._cond(replace(past, values=trusted), first, t + steps, t, cross_series)
        state = None
        if tokens.shape[1]:
            # Uncertain tokens are noised to their level: at K they are noise alone.
            white = torch.randn(tokens.shape, generator=Generator().manual_seed(0))
            missing = (levels == self.model.schedule.levels)[..., None]
            noisy = torch.where(missing, white, self.model.schedule.add_noise(tokens, levels, white))
            state = self.model.absorb(noisy, cond[:, : t - first], level=levels)
        return _Start(trusted, _extend(past.clock, steps)[t:], cond[:, t - first :], state)

    def _sample(
        self, start: _Start, noise: Tensor, sampler: Sampler, guidance: _Guidance | None, gap: int, generator: Generator | None
    ) -> Array:
        """Futures (n, h, d) that a noise (n, h, d) becomes. The first `gap` steps precede the forecast: the reward does not see them."""
        n, steps, d = noise.shape
        schedule, noise = self.model.schedule, self.noise.scaled(noise)

        def decode(x: Tensor) -> Tensor:
            tokens = x if self.joint else x.view(d, n, steps).permute(1, 2, 0)
            return self.scaler.decode(tokens.double(), start.values, start.clock)

        denoise: Denoise = self.model.denoiser(start.cond, start.state)
        if guidance is not None:
            reward, scale = guidance

            def score(x: Tensor) -> Tensor:
                futures = decode(x)[:, gap:]
                score = reward(futures)
                if score.shape != (n,):
                    raise ValueError(f"a reward maps futures {tuple(futures.shape)} to one score each, ({n},); got {tuple(score.shape)}")
                return score.float() if self.joint else (score.float() / d).repeat(d)

            denoise = guide(denoise, schedule, score, scale)
        x = noise if self.joint else noise.permute(2, 0, 1).reshape(d * n, steps, 1)
        check_all_noise(sampler.matrix_for(schedule, steps), schedule)
        return decode(sample(denoise, schedule, x, sampler, generator=generator)).numpy()

    def _tokens(self, history: History, first: int, last: int, trusted: Array | None = None) -> tuple[Tensor, Tensor]:
        """Tokens (d, last-first, 1) of the steps first..last-1, and their levels (d, last-first): K where missing.

        Joint: (1, last-first, d) and (1, last-first). trusted: values that lags are taken from, if not those of the history.
        """
        top, level = self.model.schedule.levels, history.level
        tokens = self.scaler.encode(history.values, history.clock, trusted)[first:last].T
        levels = np.zeros(tokens.shape) if level is None else level[first:last].T
        if level is not None and self.scaler.residual == "difference":  # a difference is as uncertain as either of its ends
            levels = np.maximum(levels, level[first - 1 : last - 1].T)
        levels = np.where(np.isnan(tokens), top, levels)
        if self.joint:  # one token a step, at the mean level of its values; missing where most of them are
            missing = (levels == top).mean(0) > 0.5
            levels = np.where(missing, top, np.where(levels == top, 0, levels).mean(0))[None]
            return torch.from_numpy(np.nan_to_num(tokens.T).astype(np.float32))[None], torch.from_numpy(levels).round().long()
        return torch.from_numpy(np.nan_to_num(tokens).astype(np.float32))[..., None], torch.from_numpy(levels).long()

    def _cond(self, history: History, first: int, last: int, origin: int, cross_series: Tensor | None = None) -> Tensor:
        """Conditions (d, last-first, c) of steps first..last-1, of which those beyond the history lie in the future.

        origin: the step from which on the mean of all series is unknown. cross_series: that mean until then, where the history does not
        hold all series.
        """
        standard = self.scaler.fill_missing(self.scaler.standardize(history.values))
        ahead = max(0, last - len(standard))
        padded = np.concatenate([standard, np.zeros((ahead, standard.shape[1]))])  # never read: no lag is shorter than the horizon
        if cross_series is None:
            cross_series = self.features.cross_series_mean(self.scaler.encode(history.values, history.clock))
        mean = torch.zeros(last - first, cross_series.shape[1])
        mean[: origin - first] = cross_series[first:origin]
        clock = _extend(history.clock, ahead)
        lagged = self.features.lagged(self.scaler, padded, clock, first, last)
        time = self.features.time_features(clock, history.known)[first:last]
        if self.joint:
            return build_joint_cond(time, lagged)[None]
        static = torch.from_numpy(self.features.static_features.astype(np.float32))
        d = len(static)
        return build_cond(time[None].expand(d, -1, -1), static, lagged.transpose(0, 1), mean[None].expand(d, -1, -1))

    # Gaps and anomalies.

    @torch.no_grad()
    def fill(self, history: History, *, samples: int = 100, steps: int = 16, generator: Generator | None = None) -> Array:
        """Values (n, t, d) in which gaps are sampled given both of their sides, for a network that is not causal."""
        if self.model.causal:
            raise ValueError("filling a gap needs a network that sees both of its sides; train with backbone=transformer")
        self._check_single("filling a gap")
        if self.scaler.residual == "difference":
            raise ValueError("filling a gap needs tokens that are values, not differences; fit with residual='seasonal'")
        values, warmup = history.values, self.scaler.warmup
        out = np.repeat(values[None], samples, axis=0)
        gaps = sorted((first, last, series) for series in range(values.shape[1]) for first, last in _gaps(values[:, series]))
        for first, last, series in gaps:
            if first < warmup:
                raise ValueError(f"the gap at step {first} lies within the first {warmup} steps, which are needed as lags")
            if last - first > self.horizon:
                raise ValueError(f"the gap of {last - first} steps from step {first} is longer than the horizon of {self.horizon}")
            begin, end = max(warmup, first - self.context), min(len(values), last + self.context)
            now = replace(history, values=out.mean(0), level=None)
            tokens, levels = (part[series : series + 1] for part in self._tokens(now, begin, end))
            cond = self._cond(now, begin, end, first)[series : series + 1]
            absent = levels[0] > 0
            schedule = self.model.schedule
            matrix = pin(full_sequence(end - begin, schedule.ladder(steps)), (~absent).nonzero()[:, 0].tolist())
            x = tokens.repeat(samples, 1, 1)
            x = torch.where(absent[None, :, None], torch.randn(x.shape, generator=generator), x)
            x = sample(self.model.denoiser(cond.repeat(samples, 1, 1)), schedule, x, Sampler(solver="euler_angle").along(matrix))
            rows = np.arange(first, last)
            own = self.scaler.select(np.array([series]))
            expected = own.lagged(own.fill_missing(own.standardize(now.values[:, [series]])), first, last) @ own.weights
            residuals = x[:, rows - begin].double() * torch.from_numpy(own.residual_scale(history.clock)[rows])
            standard = torch.from_numpy(expected) + residuals
            out[:, rows, series] = own.unstandardize(standard)[..., 0].numpy()
        return out

    def anomaly_score(self, history: History, *, steps: int = 16) -> Array:
        """How unlikely each value is given those before it, (t, d) in nats: minus the log-likelihood of its token (`log_likelihood`).

        NaN where a value is missing. Likelihoods are of tokens, so that values of different series compare.
        """
        self._check_single("an anomaly score")
        t = len(history.values)
        out = np.full(history.values.shape, np.nan)
        schedule, exact = self.model.schedule, replace(history, level=None)
        for end in range(t, self.scaler.warmup, -self.horizon):
            begin = max(self.scaler.warmup, end - self.context - self.horizon)
            tokens, levels = self._tokens(exact, begin, end)
            origin = max(begin, end - self.horizon)
            likely = log_likelihood(self.model, schedule, tokens, levels, self._cond(exact, begin, end, origin), steps=steps)
            score = torch.where(levels < schedule.levels, -likely, torch.nan)
            out[origin:end] = score[:, origin - begin :].T.double().numpy()
        return out

    # Calibration of the noise.

    @torch.no_grad()
    def calibrate(self, history: History, *, held_out: int = 0, windows: int = 40, steps: int = 8) -> SeriesModel:
        """The same model with the noise of past windows, encoded backwards along the sampler's path.

        held_out: how many of the last steps training did not see; the scale of the noise is fitted there.
        """
        if self.joint:
            return self  # correlations between series are in the network
        t = len(history.values)
        first, last = self.scaler.warmup + self.context, t - self.horizon
        if last <= first:
            return self
        origins = np.unique(np.linspace(max(first, last - windows * self.horizon), last, windows).astype(int))
        noises = np.stack([self._encode_noise(history, int(o), steps) for o in origins])
        unseen = origins >= t - held_out if held_out else np.ones(len(origins), dtype=bool)
        return replace(self, noise=NoiseModel.fit(noises, history.clock[origins], unseen, self.scaler.season, self.noise.stepwise))

    def _encode_noise(self, history: History, origin: int, steps: int) -> Array:
        """The noise (h, d) from which the sampler would have drawn what happened after a past origin; NaN where values are missing."""
        schedule = self.model.schedule
        first = max(self.scaler.warmup, origin - self.context)
        last = origin + self.horizon
        window = replace(history.until(last), level=None)
        tokens, levels = self._tokens(window, first, last)
        cond = self._cond(window, first, last, origin)
        ladder = schedule.ladder(steps)
        ahead = torch.zeros(last - first, dtype=torch.bool)
        ahead[origin - first :] = True
        missing = levels == schedule.levels
        # The lowest rung is noised at random: at level 0 there is no noise to be read.
        white = torch.randn(tokens.shape, generator=Generator().manual_seed(origin))
        x = schedule.add_noise(tokens, torch.full_like(levels, int(ladder[1])), white)
        past = torch.where(missing[..., None], white, tokens)
        for low, high in zip(ladder[1:-1].tolist(), ladder[2:].tolist(), strict=True):
            k = torch.full_like(levels, low)
            if self.model.causal:
                pred = self.model.predict_forced(x, k, past, levels, cond)
            else:
                pred = self.model.predict(torch.where(ahead[None, :, None], x, past), torch.where(ahead, k, levels), cond)
            x = angle_step(x, pred, *(f(torch.tensor(k)) for k in (low, high) for f in (schedule.alpha, schedule.sigma)))
        noise = x[:, origin - first :, 0].T.double().numpy()
        return np.where(missing[:, origin - first :].T.numpy(), np.nan, noise)

    # Parts and files.

    def select(self, which: NDArray[np.int64]) -> SeriesModel:
        """The model of some of its series."""
        features = replace(self.features, static_features=self.features.static_features[which])
        return replace(self, scaler=self.scaler.select(which), features=features, noise=self.noise.select(which))

    def single(self, which: int) -> SeriesModel:
        """The model of one of its series."""
        self._check_single("a forecast of one series")
        return self.select(np.array([which])) if len(self.scaler.mean) > 1 else self

    def _check_single(self, what: str) -> None:
        if self.joint:
            raise ValueError(f"{what} needs tokens of single series, but this model's tokens hold all of them; train with joint=False")

    def _check(self, history: History, horizon: int) -> None:
        values, known, d = history.values, history.known, len(self.scaler.mean)
        if values.ndim != 2 or values.shape[1] != d:
            raise ValueError(f"the model was trained on {d} series; got values of shape {values.shape}")
        if not 1 <= horizon <= self.horizon:
            raise ValueError(f"the model forecasts 1 to {self.horizon} steps ahead; got {horizon}. Train one with a longer horizon")
        if len(values) <= self.scaler.warmup:
            raise ValueError(f"a forecast needs more than {self.scaler.warmup} steps of history; got {len(values)}")
        covariates = len(self.features.known_mean)
        if known.shape[1] != covariates or (covariates and len(known) < len(values) + horizon):
            raise ValueError(
                f"known must cover {len(values) + horizon} steps and have {covariates} covariates, as in training; got {known.shape}"
            )

    def save(self, folder: Path) -> None:
        """Into a folder: the network as usual, the rest as series.json and series.safetensors."""
        self.model.save_pretrained(folder / "model")
        tensors: dict[str, Tensor] = {}
        config = {
            "version": FORMAT, "context": self.context, "joint": self.joint, "scaler": self.scaler.save(tensors),
            "features": self.features.save(tensors), "noise": self.noise.save(tensors),
        }  # fmt: skip
        write_atomically(folder / "series.safetensors", lambda file: save_file(tensors, file))
        write_atomically(folder / "series.json", lambda file: Path(file).write_text(json.dumps(config, indent=2) + "\n"))

    @classmethod
    def load(cls, folder: Path) -> SeriesModel:
        """From a folder that `save` wrote."""
        if not (folder / "series.json").exists():
            raise FileNotFoundError(f"{folder} holds no forecasting model (no series.json); `dforce forecast FILE` trains one")
        config, tensors = json.loads((folder / "series.json").read_text()), load_file(folder / "series.safetensors")
        return cls(
            DiffusionForcing.from_pretrained(folder / "model"), SeriesScaler.load(tensors, config["scaler"]),
            SeriesFeatures.load(tensors, config["features"]), config["context"], NoiseModel.load(tensors, config["noise"]), config["joint"],
        )  # fmt: skip


class _Guidance(NamedTuple):
    reward: Reward
    scale: float


@dataclass(frozen=True, eq=False)
class _Start:
    """Where sampling starts: past values (t, d), times (h,) and conditions (d or 1, h, c) of the tokens to sample, the network's state."""

    values: Array
    clock: Clock
    cond: Tensor
    state: Any


def _extend(clock: Clock, steps: int) -> Clock:
    """The clock (t,) and its next steps."""
    return np.concatenate([clock, clock[-1] + 1 + np.arange(steps)])


def _trailing(values: Array) -> NDArray[np.int64]:
    """(d,), how many of the last values are missing."""
    present = ~np.isnan(values)
    return np.where(present.any(0), present[::-1].argmax(0), len(values))


def _gaps(values: Array) -> list[tuple[int, int]]:
    """Ranges (first, last+1) of steps in which values (t,) are missing."""
    missing = np.concatenate([[False], np.isnan(values), [False]])
    edges = np.flatnonzero(missing[1:] != missing[:-1])
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
