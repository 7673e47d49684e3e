"""Probabilistic forecasts of many series: a trained model with all it needs to read values and to speak in values.

Each series is a sequence of its own to one shared network. That they move together is in the noise: a sampled future is a deterministic
function of its noise, so noise that goes together as that of past windows did (see `SeriesModel.listen`) gives futures that do.
What each value is told by is its level: 0 known, K missing, in between doubtful.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor

from ..files import write_atomically
from ..guidance import guide
from ..likelihood import elbo
from ..matrix import full_sequence, pin
from ..model import DiffusionForcing
from ..sampling import Sampler, sample
from ..solver import angle_step
from .windows import Array, Covariates, Normal, timely, told, told_jointly

Reward = Callable[[Tensor], Tensor]  # values (n, h, d) -> score (n,), differentiable
Clock = NDArray[np.int64]
ROWS = 20_000  # sequences sampled at a time, to bound memory
FORMAT = 1
FEW = 8  # past windows below which their noise says nothing of how series go together


@dataclass(frozen=True)
class Sampling:
    """How forecasts are drawn."""

    samples: int = 100
    """Futures drawn."""
    steps: int = 16
    """Denoising steps a token."""
    schedule: Literal["autoregressive", "pyramid", "full_sequence"] = "autoregressive"
    """Schedule matrix. Step after step is exact for a causal network."""
    slope: float = 4.0
    """Of the pyramid: rows from one token's start to the next one's."""
    eta: float = 0.0
    """Fresh noise at each denoising step: 0 none, 1 ancestral."""
    scale: float = 10.0
    """Strength of guidance by a reward, where there is one. In units of the reward: try ten times more or less."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.steps < 1:
            raise ValueError(f"samples and steps count from 1; got {self.samples}, {self.steps}")
        if self.schedule not in ("autoregressive", "pyramid", "full_sequence"):
            raise ValueError(f"schedule is autoregressive, pyramid or full_sequence; got {self.schedule!r}")

    def matrix(self, model: DiffusionForcing, horizon: int) -> Tensor:
        return Sampler(self.steps, self.schedule, self.slope).matrix_for(model.schedule, horizon)


@dataclass(eq=False)
class SeriesModel:
    """A network and what it takes to forecast values (t, d) with it."""

    model: DiffusionForcing
    normal: Normal
    covariates: Covariates
    context: int
    """Steps of the past that the network reads."""
    echoes: Tensor
    """(w, h, d), the noise of all series in w past windows: as it went together then, new noise goes together. w = 0: on its own."""
    phases: Tensor
    """(w,), the phase of the season at which each of these begins."""
    warmth: Tensor
    """(h,), standard deviation of the noise of each step ahead: 1 for a network that is as sure as it should be."""
    joint: bool = False
    """Whether a token holds all series at once, as in the paper, instead of one value of one."""

    @classmethod
    def bare(cls, model: DiffusionForcing, normal: Normal, covariates: Covariates, context: int, joint: bool = False) -> SeriesModel:
        """Before it has listened: series on their own."""
        d = len(normal.mean)
        nothing = torch.zeros(0, normal.horizon, d), torch.zeros(0, dtype=torch.long), torch.ones(normal.horizon)
        return cls(model, normal, covariates, context, *nothing, joint)

    @property
    def horizon(self) -> int:
        return self.normal.horizon

    def _seen(
        self, values: Array, clock: Clock, level: Array | None, first: int, last: int, past: Array | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tokens (d, last-first, 1) of the steps first..last-1 and their levels (d, last-first): K where missing.

        past: the values as far as they are believed, where some are doubted.
        """
        top = self.model.schedule.levels
        tokens = self.normal.tokens(values, clock, past)[first:last].T
        levels = np.zeros(tokens.shape) if level is None else level[first:last].T
        if level is not None and self.normal.kind == "steps":  # a step is as doubtful as either of its ends
            levels = np.maximum(levels, level[first - 1 : last - 1].T)
        levels = np.where(np.isnan(tokens), top, levels)
        if self.joint:  # one token a step, as doubtful as its values are on average; gone where most of them are
            gone = (levels == top).mean(0) > 0.5
            together = np.where(gone, top, np.where(levels == top, 0, levels).mean(0))[None]
            return torch.from_numpy(np.nan_to_num(tokens.T).astype(np.float32))[None], torch.from_numpy(together).round().long()
        return torch.from_numpy(np.nan_to_num(tokens).astype(np.float32))[..., None], torch.from_numpy(levels).long()

    def _told(self, values: Array, clock: Clock, known: Array, first: int, last: int, origin: int, company: Any = None) -> Tensor:
        """Conditions (d, last-first, c) of steps first..last-1, of which those beyond the values lie in the future.

        origin: the step from which on nothing is known of the other series. company: how they did until then, where `values` are not all.
        """
        standard = self.normal.filled(self.normal.standard(values))
        ahead = max(0, last - len(values))
        padded = np.concatenate([standard, np.zeros((ahead, standard.shape[1]))])  # never read: no lag is shorter than the horizon
        company = self.covariates.company(self.normal.tokens(values, clock)) if company is None else company
        others = np.zeros((last - first, company.shape[1]), dtype=np.float32)
        others[: origin - first] = company[first:origin]
        clock = _extend(clock, ahead)
        lagged = torch.from_numpy(self.covariates.lagged(self.normal, padded, clock, first, last)).transpose(0, 1)
        time = timely(self.covariates, clock, known)[first:last]
        if self.joint:
            return told_jointly(time, lagged.transpose(0, 1))[None]
        about = torch.from_numpy(self.covariates.about.astype(np.float32))
        d = len(about)
        return told(time[None].expand(d, -1, -1), about, lagged, torch.from_numpy(others)[None].expand(d, -1, -1))

    @torch.no_grad()
    def draw(
        self, values: Array, clock: Clock, known: Array | None = None, *, horizon: int | None = None, sampling: Sampling | None = None,
        level: Array | None = None, reward: Reward | None = None, generator: Generator | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Array:  # fmt: skip
        """Futures (n, h, d) after values (t, d), NaN where missing.

        level: (t, d), the level of doubt about each value; None: all that are there are believed. reward: of futures (n, h, d), towards
        which they are guided.
        """
        sampling = sampling or Sampling()
        horizon = self.horizon if horizon is None else horizon
        known = _rows(known, len(values) + horizon)
        self._check(values, horizon, known)
        if level is not None:  # what is not believed at all is not there: neither as a lag, nor to the other series
            values = np.where(level >= self.model.schedule.levels, np.nan, values)
        return self._at(values, clock)._draw(values, clock, known, horizon, sampling, level, reward, generator, progress)

    def _at(self, values: Array, clock: Clock) -> SeriesModel:
        """The same, told by a history (t, d) what training could not know: the scale of series that came later, values below the floor."""
        normal = self.normal.learned(values, clock).unbound(values)
        return self if normal is self.normal else dataclasses.replace(self, normal=normal)

    def _draw(
        self, values: Array, clock: Clock, known: Array, horizon: int, sampling: Sampling, level: Array | None, reward: Reward | None,
        generator: Generator | None, progress: Callable[[int, int], None] | None,
    ) -> Array:  # fmt: skip
        # A series whose last values are missing is sampled from where it was last seen.
        gap = _trailing(values) if self.normal.kind == "steps" else np.zeros(values.shape[1], dtype=np.int64)
        if reward is not None and len(set(gap.tolist())) > 1:
            raise ValueError("guidance speaks of all series at once, but they end at different times; fill or cut the last values first")
        gap = np.minimum(gap.max(initial=0) if self.joint else gap, self.horizon * 4) + np.zeros(values.shape[1], dtype=np.int64)
        longest = int(gap.max(initial=0))
        steps = _extend(clock[: len(clock) - longest], horizon + longest)[len(clock) - longest :]
        noise = self._noise(sampling.samples, steps, generator)
        believed = values if level is None or not (level > 0).any() else self.normal.believed(values, self._shares(level))
        company = self.covariates.company(self.normal.tokens(believed, clock))
        out = np.empty((sampling.samples, horizon, values.shape[1]))
        size = max(1, ROWS // values.shape[1])
        done = 0
        for length in np.unique(gap):
            which = np.flatnonzero(gap == length)
            sub = self if len(which) == values.shape[1] else self._only(which)
            past = values[: len(values) - length, which]
            doubt = None if level is None else level[: len(past), which]
            trusted = believed[: len(past), which]
            for rows in range(0, sampling.samples, size):
                futures = sub._futures(
                    past,
                    trusted,
                    clock[: len(past)],
                    known,
                    noise[rows : rows + size, longest - length :][..., which],
                    sampling,
                    doubt,
                    reward,
                    company,
                    int(length),
                    generator,
                )
                out[rows : rows + size, :, which] = futures[:, length:]
                done += len(futures) * len(which)
                if progress is not None:
                    progress(done, out.shape[0] * out.shape[2])
        return out

    def _shares(self, level: Array) -> Array:
        """How much of values (t, d) is believed at a level of doubt, 1 at 0: the signal's share of the variance."""
        return self.model.schedule.alpha(torch.from_numpy(np.asarray(level)).long()).double().numpy() ** 2

    def _futures(
        self, values: Array, believed: Array, clock: Clock, known: Array, noise: Tensor, sampling: Sampling, level: Array | None,
        reward: Reward | None, company: Any, gap: int, generator: Generator | None = None,
    ) -> Array:  # fmt: skip
        """Futures (n, h, d) that the noise (n, h, d) becomes. The first `gap` steps are before the forecast: no reward speaks of them.

        believed: values as far as they are, from which lags are taken and on which futures rest.
        """
        n, horizon, d = noise.shape
        noise = noise * self.warmth[torch.arange(horizon).clamp(max=len(self.warmth) - 1)][:, None]
        t = len(values)
        first = max(self.normal.warm, t - self.context)
        tokens, levels = self._seen(values, clock, level, first, t, believed)
        cond = self._told(believed, clock, known, first, t + horizon, t, company)
        state = None
        if tokens.shape[1]:
            # What is not believed is noised to its level: at K it is noise alone.
            drawn = torch.randn(tokens.shape, generator=Generator().manual_seed(0))
            gone = (levels == self.model.schedule.levels)[..., None]
            noised = torch.where(gone, drawn, self.model.schedule.add_noise(tokens, levels, drawn))
            state = self.model.absorb(noised, cond[:, : t - first], level=levels)
        denoise: Any = self.model.denoiser(cond[:, t - first :], state)
        later = _extend(clock, horizon)[t:]
        if reward is not None:
            judge = reward

            def of_tokens(x: Tensor) -> Tensor:
                futures = self.normal.decode(self._stepwise(x, d).double(), believed, later)[:, gap:]
                score = judge(futures)
                if score.shape != (n,):
                    raise ValueError(f"a reward maps futures {tuple(futures.shape)} to one score each, ({n},); got {tuple(score.shape)}")
                return score.float() if self.joint else (score.float() / d).repeat(d)

            denoise = guide(denoise, self.model.schedule, of_tokens, sampling.scale)
        x = noise if self.joint else noise.permute(2, 0, 1).reshape(d * n, horizon, 1)
        sampler = Sampler(solver="ddim" if sampling.eta else "euler_angle", eta=sampling.eta).along(sampling.matrix(self.model, horizon))
        x = sample(denoise, self.model.schedule, x, sampler, generator=generator)
        return self.normal.decode(self._stepwise(x, d).double(), believed, later).numpy()

    def _stepwise(self, x: Tensor, d: int) -> Tensor:
        """Sampled tokens as (n, h, d), whether they were of one series each, (d * n, h, 1), or of all."""
        return x if self.joint else x.view(d, -1, x.shape[1]).permute(1, 2, 0)

    @torch.no_grad()
    def fill(
        self,
        values: Array,
        clock: Clock,
        known: Array | None = None,
        *,
        sampling: Sampling | None = None,
        generator: Generator | None = None,
    ) -> Array:
        """Values (n, t, d) with what is missing drawn given both sides of each gap. For networks that see everything."""
        if self.model.causal:
            raise ValueError("filling a gap looks at both of its sides; train with a network that sees everything (backbone=transformer)")
        self._check_apart("filling a gap")
        if self.normal.kind == "steps":
            raise ValueError("filling a gap needs values as tokens, not steps between them; fit with kind='lags'")
        sampling = sampling or Sampling(schedule="full_sequence")
        known = _rows(known, len(values))
        out = np.repeat(values[None], sampling.samples, axis=0)
        gaps = sorted((first, last, series) for series in range(values.shape[1]) for first, last in _gaps(values[:, series]))
        for first, last, series in gaps:
            if first < self.normal.warm:
                raise ValueError(f"the gap at step {first} lies within the first {self.normal.warm} steps, which are needed as lags")
            if last - first > self.horizon:
                raise ValueError(f"the gap of {last - first} steps from step {first} is longer than the horizon of {self.horizon}")
            begin, end = max(self.normal.warm, first - self.context), min(len(values), last + self.context)
            now = out.mean(0)
            tokens, levels = (part[series : series + 1] for part in self._seen(now, clock, None, begin, end))
            cond = self._told(now, clock, known, begin, end, first)[series : series + 1]
            absent = levels[0] > 0
            matrix = full_sequence(end - begin, self.model.schedule.ladder(sampling.steps))
            matrix = pin(matrix, (~absent).nonzero()[:, 0].tolist())
            x = tokens.repeat(sampling.samples, 1, 1)
            x = torch.where(absent[None, :, None], torch.randn(x.shape, generator=generator), x)
            sampler = Sampler(solver="euler_angle").along(matrix)
            x = sample(self.model.denoiser(cond.repeat(sampling.samples, 1, 1)), self.model.schedule, x, sampler)
            steps = np.arange(first, last)
            own = self._only(np.array([series])).normal
            expected = own.lagged(own.filled(own.standard(now[:, [series]])), first, last) @ own.weights
            moved = torch.from_numpy(expected) + x[:, steps - begin].double() * torch.from_numpy(own.size(clock)[steps])
            out[:, steps, series] = own.restore(moved)[..., 0].numpy()
        return out

    @torch.no_grad()
    def surprise(self, values: Array, clock: Clock, known: Array | None = None, *, steps: int = 16, draws: int = 4, seed: int = 0) -> Array:
        """How unlikely each value is given those before it, (t, d) in nats: minus the bound on its log-likelihood. NaN: not judged.

        Likelihoods of tokens, so values of all series compare.
        """
        self._check_apart("how surprising single values are")
        known = _rows(known, len(values))
        out = np.full(values.shape, np.nan)
        schedule = self.model.schedule
        length = self.context + self.horizon
        for end in range(len(values), self.normal.warm, -self.horizon):
            begin = max(self.normal.warm, end - length)
            tokens, levels = self._seen(values, clock, None, begin, end)
            fresh = max(begin, end - self.horizon)
            bound = elbo(
                self.model, schedule, tokens, levels, self._told(values, clock, known, begin, end, fresh),
                ladder=schedule.ladder(steps), draws=draws, generator=Generator().manual_seed(seed),
            )  # fmt: skip
            judged = torch.where(levels < schedule.levels, -bound, torch.nan)
            out[fresh:end] = judged[:, fresh - begin :].T.double().numpy()
        return out

    @torch.no_grad()
    def listen(
        self, values: Array, clock: Clock, known: Array | None = None, *, held: int = 0, windows: int = 40, steps: int = 8
    ) -> SeriesModel:
        """The same, with its noise as that of past windows was: encoded backwards along the sampler's path.

        held: how many of the last steps were kept from training: only there does a network show how sure it may be.
        """
        if self.joint:
            return self  # how series go together is in the network
        known = _rows(known, len(values))
        first = self.normal.warm + self.context
        last = len(values) - self.horizon
        if last <= first:
            return self
        origins = np.unique(np.linspace(max(first, last - windows * self.horizon), last, windows).astype(int))
        noises = np.stack([self._noise_of(values, clock, known, int(o), steps) for o in origins])  # (n, h, d), NaN where missing
        fresh = noises[origins >= len(values) - held] if held else noises
        warmth = np.sqrt(np.nanmean(fresh**2, axis=(0, 2))) if len(fresh) else np.ones(self.horizon)
        warmth, ahead = np.nan_to_num(warmth, nan=1.0), np.arange(self.horizon)
        smooth = np.polynomial.Polynomial.fit(ahead, warmth, 1)(ahead) if self.horizon > 1 else warmth
        echoes = torch.from_numpy(np.nan_to_num(noises)).float().contiguous()  # laid out as a file lays them out: sums round alike
        return dataclasses.replace(
            self, echoes=echoes, phases=torch.from_numpy(clock[origins] % self.normal.season),
            warmth=torch.from_numpy(np.clip(smooth, 0.7, 1.4)).float(),
        )  # fmt: skip

    def _noise_of(self, values: Array, clock: Clock, known: Array, origin: int, steps: int) -> Array:
        """The noise (h, d) from which the sampler would have drawn what happened after a past origin."""
        schedule = self.model.schedule
        first = max(self.normal.warm, origin - self.context)
        last = origin + self.horizon
        seen, levels = self._seen(values[:last], clock[:last], None, first, last)
        cond = self._told(values[:last], clock[:last], known, first, last, origin)
        ladder = schedule.ladder(steps)
        generator = Generator().manual_seed(origin)
        ahead = torch.zeros(last - first, dtype=torch.bool)
        ahead[origin - first :] = True
        gone = levels == schedule.levels
        # The lowest rung is noised at random: at level 0 there is no noise to be read.
        white = torch.randn(seen.shape, generator=generator)
        x = schedule.add_noise(seen, torch.full_like(levels, int(ladder[1])), white)
        for low, high in zip(ladder[1:-1].tolist(), ladder[2:].tolist(), strict=True):
            k = torch.full_like(levels, low)
            if self.model.causal:
                past = torch.where(gone[..., None], white, seen)
                pred = self.model.predict_forced(x, k, past, levels, cond)
            else:
                mixed = torch.where(ahead[None, :, None], x, torch.where(gone[..., None], white, seen))
                pred = self.model.predict(mixed, torch.where(ahead, k, levels), cond)
            x = angle_step(x, pred, *(f(torch.tensor(k)) for k in (low, high) for f in (schedule.alpha, schedule.sigma)))
        out = x[:, origin - first :, 0].T.double().numpy()
        return np.where(gone[:, origin - first :].T.numpy(), np.nan, out)

    def _noise(self, number: int, clock: Clock, generator: Generator | None) -> Tensor:
        """Noise (n, h, d) that goes together, between series and in time, as in past windows that began at the same phase.

        A sum of past noises with random weights has their covariance; some noise of each series' own is added, as much as the uncertainty
        of their correlations asks (Schäfer and Strimmer).
        """
        d = self.echoes.shape[2]
        noise = torch.randn(number, len(clock), d, generator=generator)
        past = self.echoes[self.phases == int(clock[0]) % self.normal.season]
        past = past if len(past) >= FEW else self.echoes
        if len(past) < FEW or d == 1:
            return noise
        size = (past**2).mean((0, 1)).sqrt()
        unit = (past / size.clamp(min=1e-6)).double()  # so that sums come out alike wherever they lie in memory
        own = self._share
        # Steps add up to values, so that chance correlations in time would, too: each step is drawn by itself.
        together_for = 1 if self.normal.kind == "steps" else past.shape[1]
        unit = unit.flatten(0, 1)[:, None] if self.normal.kind == "steps" else unit
        for first in range(0, len(clock), together_for):  # a series that was last seen earlier is drawn for longer than a window
            here = noise[:, first : first + together_for]
            weights = torch.randn(number, len(unit), generator=generator).double() / math.sqrt(len(unit))
            shared = torch.einsum("nw,whd->nhd", weights, unit[:, : here.shape[1]]).float()
            together = math.sqrt(1 - own) * shared + math.sqrt(own) * here
            noise[:, first : first + together_for] = torch.where(size > 1e-6, together, here)  # a series not heard of has noise of its own
        return noise

    @functools.cached_property
    def _share(self) -> float:
        """Share of the noise's variance that is each series' own, 0 to 1: what all steps of all windows leave open of the correlations."""
        past = self.echoes.flatten(0, 1)
        unit = past / past.norm(dim=0).clamp(min=1e-9)
        r = unit.T @ unit
        r.fill_diagonal_(0.0)
        strength = float((r**2).sum())
        uncertain = float(((1 - r**2) ** 2).sum() - len(r)) / max(1, len(past) - 1)
        return min(1.0, max(0.02, uncertain / strength)) if strength > 0 else 1.0

    def _check_apart(self, what: str) -> None:
        if self.joint:
            raise ValueError(f"{what} is a matter of single series, but this model's tokens hold all of them; train with joint=False")

    def _only(self, which: NDArray[np.int64]) -> SeriesModel:
        """The same for some of the series."""
        about = dataclasses.replace(self.covariates, about=self.covariates.about[which])
        return dataclasses.replace(self, normal=self.normal.of(which), covariates=about, echoes=self.echoes[..., torch.from_numpy(which)])

    def _check(self, values: Array, horizon: int, known: Array) -> None:
        if values.ndim != 2 or values.shape[1] != self.echoes.shape[2]:
            raise ValueError(f"the model was trained on {self.echoes.shape[2]} series; got values of shape {values.shape}")
        if not 1 <= horizon <= self.horizon:
            raise ValueError(f"the model forecasts 1 to {self.horizon} steps ahead; got {horizon}. Train one with a longer horizon")
        if len(values) <= self.normal.warm:
            raise ValueError(f"a forecast needs more than {self.normal.warm} steps of history; got {len(values)}")
        if known.shape[1] != len(self.covariates.known_mean) or len(known) < len(values) + horizon:
            raise ValueError(
                f"covariates known in advance must cover {len(values) + horizon} steps and be {len(self.covariates.known_mean)} as in "
                f"training; got {known.shape}"
            )

    def save(self, folder: Path) -> None:
        """Into a folder: the model as usual, the rest as series.json and series.safetensors."""
        self.model.save_pretrained(folder / "model")
        tensors = {name: getattr(self, name).contiguous() for name in ("echoes", "phases", "warmth")}
        about = {
            "version": FORMAT, "context": self.context, "joint": self.joint,
            "normal": self.normal.save(tensors), "covariates": self.covariates.save(tensors),
        }  # fmt: skip
        write_atomically(folder / "series.safetensors", lambda file: save_file(tensors, file))
        write_atomically(folder / "series.json", lambda file: Path(file).write_text(json.dumps(about, indent=2) + "\n"))

    @classmethod
    def load(cls, folder: Path) -> SeriesModel:
        """From a folder that `save` wrote."""
        if not (folder / "series.json").exists():
            raise FileNotFoundError(f"{folder} holds no forecasting model (no series.json); `dforce forecast FILE` trains one")
        about, tensors = json.loads((folder / "series.json").read_text()), load_file(folder / "series.safetensors")
        return cls(
            DiffusionForcing.from_pretrained(folder / "model"), Normal.load(tensors, about["normal"]),
            Covariates.load(tensors, about["covariates"]), about["context"],
            tensors["echoes"], tensors["phases"], tensors["warmth"], about.get("joint", False),
        )  # fmt: skip


def limited(series: SeriesModel, which: int, single: bool) -> SeriesModel:
    """The model of one of its series, or all of it."""
    if single:
        series._check_apart("a forecast of one series")
    return series._only(np.array([which])) if single and series.echoes.shape[2] > 1 else series


def _extend(clock: Clock, steps: int) -> Clock:
    """The clock (t,) and its next steps."""
    return np.concatenate([clock, clock[-1] + 1 + np.arange(steps)])


def _rows(known: Array | None, rows: int) -> Array:
    """Covariates known in advance; as many rows as are asked for where there are none."""
    return np.zeros((rows, 0)) if known is None or known.shape[1] == 0 else known


def _trailing(values: Array) -> NDArray[np.int64]:
    """(d,), how many of the last values are missing."""
    there = ~np.isnan(values)
    return np.where(there.any(0), there[::-1].argmax(0), len(values))


def _gaps(values: Array) -> list[tuple[int, int]]:
    """Stretches (first, last+1) of steps in which values (t,) are missing."""
    gone = np.concatenate([[False], np.isnan(values), [False]])
    edges = np.flatnonzero(gone[1:] != gone[:-1])
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
