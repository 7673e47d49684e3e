"""Scores of generated video: distances between sets of frames and of clips, motion, drift, and all of them over the time of a roll-out.

Clips are uint8 (n, t, h, w, 3), features of their frames (n, t, f) come from `LPIPS.features`. The two Frechet distances are our own:

- frame-FD compares pooled features of frames. It sees what frames look like, and is blind to their order.
- video-FD compares descriptors of clips: of each feature the mean over time, the mean |difference| between neighbours, and the standard
  deviation over time. It sees a video that stands still, flickers or is out of order.

Both are in units of the real set's spread: 1 is a shift by as much as real samples lie from their mean. Values depend on the features, on
the number of clips and on their length: compare them with those of other sets of the same size, and with the floor between two real sets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ..codecs import principal_directions
from ..engine.task import Progress
from .lpips import CHUNK, LPIPS

Array = NDArray[np.floating[Any]]
Frames = NDArray[np.uint8]

COMPONENTS = 64
PARTS = 3  # of a clip's descriptor
FITTED = 1024  # samples that principal directions are fitted to
BALL = 0.999
"""Share of real descriptors inside of the ball that a clip which blew up has left."""
LEVEL = 0.95
"""Of intervals."""
SPLITS = 5  # ways to split the real clips in two halves: one floor is as uncertain as one value
SCORES = ("video-FD", "frame-FD", "blow-up", "motion", "mean", "std", "lpips")


def psnr(a: ArrayLike, b: ArrayLike) -> Array:
    """(...): peak signal-to-noise ratio in dB of frames a and b, both uint8 (..., h, w, 3); inf where they are equal."""
    x, y = np.asarray(a), np.asarray(b)
    if x.dtype != np.uint8 or y.dtype != np.uint8 or x.shape != y.shape or x.ndim < 3:
        raise ValueError(f"frames should be uint8 (..., h, w, 3) of one shape; got {x.dtype} {x.shape} and {y.dtype} {y.shape}")
    error = np.empty(x.shape[:-3])
    for i in np.ndindex(error.shape):  # one frame at a time, since differences take eight times the room
        error[i] = np.mean((x[i].astype(np.float64) - y[i]) ** 2)
    with np.errstate(divide="ignore"):
        return 10 * np.log10(255**2 / error)


def motion(clips: ArrayLike, real: ArrayLike) -> float:
    """Mean |difference| of neighbouring frames, over that of real clips: 0 stands still, 1 moves as much as they do. nan if they do not."""
    return _ratio(*(float(np.mean([_pixel_statistics(clip)[0].mean() for clip in _checked(x)])) for x in (clips, real)))


# Frechet distances


def frechet(a: ArrayLike, b: ArrayLike) -> float:
    """Squared Frechet distance of the Gaussians with the means and covariances of a (n, f) and b (m, f).

    |mean a - mean b|^2 + tr(A + B - 2 (A B)^(1/2)), where the last trace is the sum of singular values of R_a R_b' for any R'R that give
    the covariances: no root of a product that is not symmetric, and with fewer samples than features the centred samples are such an R.
    It is defined then, but large between any two sets; `Space` reduces features to fewer numbers first.
    """
    x, y = (np.asarray(samples, dtype=np.float64) for samples in (a, b))
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or min(len(x), len(y)) < 2:
        raise ValueError(f"both sets should be (samples, features) of the same features, two samples at least; got {x.shape} and {y.shape}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("features should be finite; some are not; check the frames")
    return Gaussian.fit(x).distance(Gaussian.fit(y))


class Gaussian(NamedTuple):
    """Mean (f,), a root of the covariance root.T @ root, and the covariance's trace."""

    mean: Array
    root: Array
    trace: float

    @classmethod
    def fit(cls, x: Array) -> Gaussian:
        """To samples (n, f)."""
        mean = x.mean(0, dtype=np.float64)
        centred = (x - mean) / np.sqrt(len(x) - 1)
        trace = float((centred**2).sum())
        if len(x) <= x.shape[1]:
            return cls(mean, centred, trace)
        values, vectors = np.linalg.eigh(centred.T @ centred)
        return cls(mean, np.sqrt(np.maximum(values, 0))[:, None] * vectors.T, trace)

    def distance(self, other: Gaussian) -> float:
        """Squared Frechet distance."""
        common = np.linalg.svd(self.root @ other.root.T, compute_uv=False).sum()
        return max(0.0, float(((self.mean - other.mean) ** 2).sum() + self.trace + other.trace - 2 * common))


class Space(NamedTuple):
    """Principal directions of a real set, in which Frechet distances are taken, since there are fewer clips than features.

    They are fitted to real samples alone, so that scores of several models stay comparable (shrinkage would depend on each of them).
    What generated samples have outside of these directions is not lost: its length is one number more.
    """

    mean: Array  # (f,)
    scale: Array  # (f,)
    directions: Array  # (f, k)

    @classmethod
    def fit(cls, real: ArrayLike, components: int = COMPONENTS, parts: int = 1) -> Space:
        """To real samples (n, f), with at most `components` and n / 4 directions. Each of the equal parts of f weighs the same."""
        x = np.asarray(real)
        if x.ndim != 2 or len(x) < 2 or x.shape[1] % parts:
            raise ValueError(f"real samples are (samples, features), two at least, with features in {parts} equal parts; got {x.shape}")
        mean = x.mean(0, dtype=np.float64)
        few = x[np.linspace(0, len(x) - 1, min(len(x), FITTED)).astype(int)].astype(np.float64)
        total = few.var(0).reshape(parts, -1).sum(1)
        # A part in which real samples do not differ has no spread to measure by, and keeps its own units.
        scale = np.repeat(np.where(total > 0, 1 / np.sqrt(parts * np.where(total > 0, total, 1)), 1.0), x.shape[1] // parts)
        number = max(1, min(components, len(x) // 4, x.shape[1]))
        directions, variance = principal_directions(torch.from_numpy((few - mean) * scale), number)
        return cls(mean, scale, directions[:, variance > 1e-9 * variance[:1]].numpy())

    def project(self, samples: ArrayLike) -> Array:
        """(..., k + 1): coordinates of samples (..., f), and the distance of each from the span of the directions. Lengths are those
        of (sample - mean) * scale.
        """
        centred = (np.asarray(samples, dtype=np.float64) - self.mean) * self.scale
        inside = centred @ self.directions
        outside = np.sqrt(np.maximum((centred**2).sum(-1) - (inside**2).sum(-1), 0))
        return np.concatenate([inside, outside[..., None]], axis=-1)


def descriptors(features: ArrayLike) -> Array:
    """(..., 3 f): mean over time, mean |difference| of neighbours and standard deviation over time of features (..., t, f)."""
    x = np.asarray(features)
    if x.ndim < 2 or x.shape[-2] < 2:
        raise ValueError(f"features should be (..., frames, features) of two frames at least; got {x.shape}")
    return np.concatenate([x.mean(-2), np.abs(np.diff(x, axis=-2)).mean(-2), x.std(-2)], axis=-1)


def ball_radius(distances: Array, level: float = BALL) -> float:
    """Radius of the ball about the mean that holds `level` of the real samples, from their distances (n,) to the mean.

    Few samples have no such quantile of their own. Distances to the power 2/3 are nearly normal (Wilson and Hilferty): the radius is
    the quantile of that normal, or that of the samples if it is larger (below a thousand of them, the farthest).
    """
    root = distances ** (2 / 3)
    fitted = max(root.mean() + NormalDist().inv_cdf(level) * root.std(), 0) ** 1.5
    return float(max(fitted, np.quantile(distances, level, method="higher")))


# Windows of clips, measured against real ones


class Window(NamedTuple):
    """Statistics of a clip's frames, or of a window of them: features (t, f), LPIPS and mean |difference| between neighbours (t-1,), mean
    and standard deviation of pixels (t,).
    """

    features: Array
    lpips: Array
    change: Array
    mean: Array
    std: Array

    @classmethod
    def of(cls, clip: Frames, lpips: LPIPS) -> Window:
        """The whole clip (t, h, w, 3)."""
        return cls(*lpips.along(clip), *_pixel_statistics(clip))

    def cut(self, starts: Any, length: int) -> list[Window]:
        """Windows of so many frames."""
        return [
            Window(self.features[i:j], self.lpips[i : j - 1], self.change[i : j - 1], self.mean[i:j], self.std[i:j])
            for i, j in ((int(start), int(start) + length) for start in starts)
        ]

    def means(self) -> Array:
        """(4,): of change, mean, std and LPIPS."""
        return np.array([self.change.mean(), self.mean.mean(), self.std.mean(), self.lpips.mean()], dtype=np.float64)


class Coordinates(NamedTuple):
    """A window in a reference's coordinates: its descriptor (k+1,), its frames (t, k'+1), and its means (4,). Several: (n, ...)."""

    video: Array
    frames: Array
    means: Array


class Reference(NamedTuple):
    """Real windows, against which others are measured: spaces fitted to them, their Gaussians, the ball's radius, and their means (4,)."""

    video: Space
    frames: Space
    video_gaussian: Gaussian
    frames_gaussian: Gaussian
    radius: float
    means: Array

    @classmethod
    def fit(cls, windows: list[Window]) -> Reference:
        clips = np.stack([descriptors(window.features) for window in windows])
        # Neighbouring frames are nearly the same: a space takes enough of them from some of the windows.
        frames = np.concatenate([windows[i].features for i in np.linspace(0, len(windows) - 1, min(len(windows), 256)).astype(int)])
        of_clips, of_frames = Space.fit(clips, COMPONENTS, PARTS), Space.fit(frames, min(COMPONENTS, max(1, len(clips) // 4)))
        projected = of_clips.project(clips)
        of_all = Gaussian.fit(np.concatenate([of_frames.project(window.features) for window in windows]))
        means = np.mean([window.means() for window in windows], axis=0)
        return cls(of_clips, of_frames, Gaussian.fit(projected), of_all, ball_radius(np.linalg.norm(projected, axis=-1)), means)

    def coordinates(self, window: Window) -> Coordinates:
        frames = self.frames.project(window.features).astype(np.float32)
        return Coordinates(self.video.project(descriptors(window.features)), frames, window.means())

    def measure(self, windows: Coordinates, index: NDArray[np.intp] | None = None) -> Array:
        """(7,): SCORES of the windows of several clips (of those in the index)."""
        video, frames, means = windows if index is None else (array[index] for array in windows)
        change, mean, std, lpips = means.mean(0)
        return np.array([
            Gaussian.fit(video).distance(self.video_gaussian),
            Gaussian.fit(frames.reshape(-1, frames.shape[-1])).distance(self.frames_gaussian),
            np.mean(np.linalg.norm(video, axis=-1) > self.radius),
            _ratio(change, self.means[0]),
            mean - self.means[1],
            std - self.means[2],
            lpips,
        ])  # fmt: skip


# Curves over time


class Curve(NamedTuple):
    """A score over the time of roll-outs: of the windows that begin at each start, its interval over clips, and what real clips score."""

    start: NDArray[np.intp]  # (p,)
    value: Array  # (p,)
    low: Array
    high: Array
    floor: float  # mean over several splits of the real clips
    floor_low: float
    floor_high: float
    shifts: Array  # (draws, p): of the bootstrap, the same clips at all times, and for all models evaluated on as many clips


class Span(NamedTuple):
    """A mean over windows of a curve, and its bootstrap interval over clips."""

    value: float
    low: float
    high: float


def span(curve: Curve, start: int, than: Curve | None = None) -> Span | None:
    """The mean of a curve over windows that begin at `start` or later; `than`: less that of another one, clip by clip of the same draws.

    Windows of one roll-out are not independent, and clips are what is drawn: so the interval is one over clips. None without windows.
    """
    if than is not None and (len(than.start) != len(curve.start) or than.shifts.shape != curve.shifts.shape):
        raise ValueError("two curves can be compared that have the same windows and draws; evaluate both with the same options")
    late = curve.start >= start
    if not late.any():
        return None
    value, shifts = curve.value - (than.value if than else 0), curve.shifts - (than.shifts if than else 0)
    mean = float(value[late].mean())
    low, high = mean + _interval(shifts[:, late].mean(1))
    return Span(mean, float(low), float(high))


def curves(
    generated: ArrayLike, real: ArrayLike, lpips: LPIPS, window: int = 16, every: int | None = None, *, draws: int = 100,
    generator: np.random.Generator | None = None, progress: Progress | None = None,
) -> dict[str, Curve]:  # fmt: skip
    """Scores of generated clips (n, t, h, w, 3) in windows that begin `every` frames (each `window` frames if not given) and in the
    last one, by name.

    video-FD, frame-FD, blow-up (a share), motion (a ratio), mean and std (drift, in grey levels), lpips (between neighbours). Real clips
    (m, t', h, w, 3) may be shorter; all their windows count alike, whatever their time. Half of the clips (every second one) is what
    generated windows are measured by. The floor is what as many windows of the other half score, with its range over several ways to
    halve: real video would lie at it. Wants some 100 generated clips and twice as many real ones, independent of one another.

    Each frame goes through the network once, and clip by clip: `generated` may be an array on disk. Features of real clips are kept.
    draws: of the bootstrap over clips.
    """
    a, b = _checked(generated), _checked(real)
    stride = window if every is None else every
    if window < 2 or stride < 1 or min(a.shape[1], b.shape[1]) < window:
        raise ValueError(
            f"windows should have two frames at least and fit into the clips, {window} frames every {stride} do not; "
            f"generated clips have {a.shape[1]} and real ones {b.shape[1]}"
        )
    if len(a) < 2 or len(b) < 4:
        raise ValueError(f"curves want two generated clips and four real ones at least; got {len(a)} and {len(b)}")
    report = progress or (lambda *_: None)
    windows = []
    for i, clip in enumerate(b):
        windows.append(Window.of(clip, lpips).cut(range(0, b.shape[1] - window + 1, window), window))
        report("features of real clips", i + 1, len(b))
    seeds = np.random.default_rng(0) if generator is None else generator
    reference, floors = _floors(windows, len(a), seeds)
    del windows

    last = a.shape[1] - window
    start = np.unique(np.append(np.arange(0, last + 1, stride), last))
    projected: list[list[Coordinates]] = []
    for i, clip in enumerate(a):
        projected.append([reference.coordinates(one) for one in Window.of(clip, lpips).cut(start, window)])
        report("features of generated clips", i + 1, len(a))
    seed = int(seeds.integers(2**32))
    rows = []
    for i in range(len(start)):
        here = _stacked([clip[i] for clip in projected])
        again = np.random.default_rng(seed)  # the same clips at all times, so that curves do not jitter
        rows.append(_bootstrap(partial(reference.measure, here), len(a), draws, again))
        report("scores", i + 1, len(start))
    value, shifts = np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows], axis=1)  # (p, 7), (draws, p, 7)
    low, high = value + _interval(shifts)
    return {
        name: Curve(
            start, value[:, i], low[:, i], high[:, i], float(floors[:, i].mean()), float(floors[:, i].min()), float(floors[:, i].max()),
            shifts[:, :, i],
        )
        for i, name in enumerate(SCORES)
    }  # fmt: skip


def _bootstrap(statistic: Callable[[NDArray[np.intp]], Any], number: int, draws: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """The statistic (...) of all `number` clips, and how far that of each of several draws with repeats lies from their mean (draws, ...).

    Draws are put around the value of the clips themselves: clips drawn twice lengthen Frechet distances, and intervals should not show it.
    """
    value = np.asarray(statistic(np.arange(number)), dtype=np.float64)
    drawn = np.stack([np.asarray(statistic(rng.integers(number, size=number)), dtype=np.float64) for _ in range(draws)])
    return value, drawn - drawn.mean(0)


def _interval(shifts: Array) -> Array:
    """(2, ...): between which two LEVEL of the draws (draws, ...) lie."""
    return np.quantile(shifts, ((1 - LEVEL) / 2, (1 + LEVEL) / 2), axis=0)


def _floors(windows: list[list[Window]], number: int, generator: np.random.Generator) -> tuple[Reference, Array]:
    """A reference of every second real clip, and what `number` windows of other real clips score by it, and by those of random halves."""
    orders = [np.r_[0 : len(windows) : 2, 1 : len(windows) : 2], *(generator.permutation(len(windows)) for _ in range(SPLITS - 1))]
    half = (len(windows) + 1) // 2
    references, floors = [], []
    for order in orders:
        reference = Reference.fit([window for i in order[:half] for window in windows[i]])
        others = [window for i in order[half:] for window in windows[i]]
        some = np.linspace(0, len(others) - 1, min(len(others), number)).astype(int)
        floors.append(reference.measure(_stacked([reference.coordinates(others[i]) for i in some])))
        references.append(reference)
    return references[0], np.stack(floors)


def _pixel_statistics(clip: Frames) -> tuple[Array, Array, Array]:
    """Mean |difference| of neighbouring frames (t-1,), mean (t,) and standard deviation (t,) of each one's pixels."""
    change, mean, std = [], [], []
    for i in range(0, len(clip), CHUNK):
        part = clip[i : i + CHUNK + 1].astype(np.float32)  # one more, for the change from chunk to chunk
        change.append(np.abs(np.diff(part, axis=0)).mean((1, 2, 3)))
        mean.append(part[:CHUNK].mean((1, 2, 3)))
        std.append(part[:CHUNK].std((1, 2, 3)))
    return np.concatenate(change), np.concatenate(mean), np.concatenate(std)


def _stacked(windows: list[Coordinates]) -> Coordinates:
    return Coordinates(*(np.stack(arrays) for arrays in zip(*windows, strict=True)))


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else float("nan")


def _checked(clips: ArrayLike) -> Frames:
    array = clips if isinstance(clips, np.ndarray) else np.asarray(clips)
    if array.dtype != np.uint8 or array.ndim != 5 or array.shape[-1] != 3 or len(array) == 0 or array.shape[1] < 2:
        raise ValueError(f"clips should be uint8 (n, t, h, w, 3), of two frames at least; got {array.dtype} {array.shape}")
    return array
