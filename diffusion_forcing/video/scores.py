"""How good generated video is: distances between sets of frames and of clips, motion, drift, and all of them over the time of a roll-out.

Clips are uint8 (n, t, h, w, 3), features of their frames (n, t, f) come from `perception`. The two Frechet distances are our own:

- frame-FD compares pooled features of frames. It sees what frames look like, and is blind to their order.
- video-FD compares descriptors of clips: of each feature the mean over time, the mean |difference| between neighbours, and the standard
  deviation over time. It sees a video that stands still, flickers or is out of order.

Both are in units of the real set's spread: 1 is a shift by as much as real ones lie from their mean. Values depend on the features, on
the number of clips and on their length: compare them with those of other sets of the same size, and with the floor between two real sets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .lpips import CHUNK, Perception

Array = NDArray[np.floating[Any]]
Frames = NDArray[np.uint8]
Told = Callable[[str, int, int], None]

COMPONENTS = 64
PARTS = 3  # of a clip's descriptor
FITTED = 1024  # samples that principal directions are taken from
LEVEL = 0.999
SPLITS = 5  # ways to split the real clips in two halves: one floor is as uncertain as one value
SCORES = ("video-FD", "frame-FD", "blow-up", "motion", "mean", "std", "lpips")


def psnr(a: ArrayLike, b: ArrayLike) -> Array:
    """(...): peak signal-to-noise ratio in dB of frames a and b, both uint8 (..., h, w, 3); inf where they are equal."""
    x, y = np.asarray(a), np.asarray(b)
    if x.dtype != np.uint8 or y.dtype != np.uint8 or x.shape != y.shape or x.ndim < 3:
        raise ValueError(f"frames should be uint8 (..., h, w, 3) of one shape; got {x.dtype} {x.shape} and {y.dtype} {y.shape}")
    found = np.empty(x.shape[:-3])
    for i in np.ndindex(found.shape):  # one frame at a time, since differences take eight times the room
        found[i] = np.mean((x[i].astype(np.float64) - y[i]) ** 2)
    with np.errstate(divide="ignore"):
        return 10 * np.log10(255**2 / found)


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
        raise ValueError("features should be finite; some are not: look at the frames")
    return _between(_gaussian(x), _gaussian(y))


class Space(NamedTuple):
    """Principal directions of a real set, in which Frechet distances are taken, since there are fewer clips than features.

    They are fitted to real samples alone, so that scores of several models stay comparable (shrinkage would depend on each of them).
    What generated samples have outside of these directions is not lost: its length is one number more.
    """

    mean: Array  # (f,)
    scale: Array  # (f,)
    directions: Array  # (f, k)

    def place(self, samples: ArrayLike) -> Array:
        """(..., k + 1): coordinates of samples (..., f), and how far each lies from all that they can reach. |place|: from the mean."""
        centred = (np.asarray(samples, dtype=np.float64) - self.mean) * self.scale
        inside = centred @ self.directions
        outside = np.sqrt(np.maximum((centred**2).sum(-1) - (inside**2).sum(-1), 0))
        return np.concatenate([inside, outside[..., None]], axis=-1)


def space(real: ArrayLike, components: int = COMPONENTS, parts: int = 1) -> Space:
    """Fit a space to real samples (n, f), with a quarter as many directions as samples at most. Each of the equal parts weighs the same."""
    x = np.asarray(real)
    if x.ndim != 2 or len(x) < 2 or x.shape[1] % parts:
        raise ValueError(f"real samples should be (samples, features), two at least, with features in {parts} equal parts; got {x.shape}")
    mean = x.mean(0, dtype=np.float64)
    few = x[np.linspace(0, len(x) - 1, min(len(x), FITTED)).astype(int)].astype(np.float64)
    total = few.var(0).reshape(parts, -1).sum(1)
    # A part in which real ones do not differ has no spread to measure by, and keeps its own units.
    scale = np.repeat(np.where(total > 0, 1 / np.sqrt(parts * np.where(total > 0, total, 1)), 1.0), x.shape[1] // parts)
    centred = (few - mean) * scale
    values, vectors = np.linalg.eigh(centred @ centred.T)
    number = max(1, min(components, len(x) // 4, x.shape[1]))
    values, vectors = values[::-1][:number], vectors[:, ::-1][:, :number]
    kept = values > 1e-9 * max(values[0], 1e-300)
    directions = np.linalg.qr(centred.T @ (vectors[:, kept] / np.sqrt(values[kept])))[0]
    return Space(mean, scale, directions)


def descriptors(features: ArrayLike) -> Array:
    """(..., 3 f): mean over time, mean |difference| of neighbours and standard deviation over time of features (..., t, f)."""
    x = np.asarray(features)
    if x.ndim < 2 or x.shape[-2] < 2:
        raise ValueError(f"features should be (..., frames, features) of two frames at least; got {x.shape}")
    return np.concatenate([x.mean(-2), np.abs(np.diff(x, axis=-2)).mean(-2), x.std(-2)], axis=-1)


def frame_fd(features: ArrayLike, real: ArrayLike, components: int = COMPONENTS) -> float:
    """frame-FD of features (..., f) of generated frames to those of real ones. The order of frames does not matter."""
    a, b = (np.asarray(samples) for samples in (features, real))
    return _distance(a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1]), components, 1)


def video_fd(features: ArrayLike, real: ArrayLike, components: int = COMPONENTS) -> float:
    """video-FD of features (n, t, f) of generated clips to those of real ones (m, t, f), of the same length."""
    a, b = _same_length(features, real)
    return _distance(descriptors(a), descriptors(b), components, PARTS)


def blow_up(features: ArrayLike, real: ArrayLike, level: float = LEVEL) -> float:
    """The share of generated clips whose descriptor lies outside of the ball about the mean that holds `level` of the real ones.

    Few real clips have no such quantile of their own. Distances to the power 2/3 are nearly normal (Wilson and Hilferty): the radius is
    the quantile of that normal, or that of the real ones if it is larger (below a thousand of them, the farthest).
    """
    a, b = _same_length(features, real)
    found = space(descriptors(b), 1, PARTS)
    reach = np.linalg.norm(found.place(descriptors(b)), axis=-1)
    return float(np.mean(np.linalg.norm(found.place(descriptors(a)), axis=-1) > _radius(reach, level)))


def motion(clips: ArrayLike, real: ArrayLike) -> float:
    """Mean |difference| of neighbouring frames, over that of real clips: 0 stands still, 1 moves as much as they do. nan if they do not."""
    return _ratio(*(float(np.mean([_pixels(clip)[0].mean() for clip in _checked(x)])) for x in (clips, real)))


def drift(clips: ArrayLike, real: ArrayLike) -> tuple[float, float]:
    """By how many grey levels (of 255) the mean and the standard deviation of frames' pixels lie above those of real frames."""
    a, b = (np.mean([np.stack(_pixels(clip)[1:]).mean(1) for clip in _checked(x)], axis=0) for x in (clips, real))
    return float(a[0] - b[0]), float(a[1] - b[1])


def neighbour(clips: ArrayLike, perception: Perception) -> Array:
    """(n, t-1): LPIPS between neighbouring frames."""
    return np.stack([perception.along(clip)[1] for clip in _checked(clips)])


def interval(
    statistic: Callable[[NDArray[np.intp]], Any],
    number: int,
    draws: int = 100,
    level: float = 0.95,
    generator: np.random.Generator | None = None,
) -> tuple[Array, Array]:
    """Bootstrap interval (low, high) of statistic(index), a number or an array, where the index draws `number` clips with repeats.

    The spread of the draws is put around the value of the clips themselves: clips that stand twice lengthen Frechet distances, and the
    interval should not show that.
    """
    value, shifts = _drawn(statistic, number, draws, np.random.default_rng(0) if generator is None else generator)
    low, high = value + _ends(shifts, level)
    return low, high


def _drawn(statistic: Callable[[NDArray[np.intp]], Any], number: int, draws: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """The statistic of all clips (...), and how far each of several draws of them lies from their mean (draws, ...)."""
    if number < 1 or draws < 2:
        raise ValueError(f"an interval needs one clip and two draws at least; got {number} and {draws}")
    value = np.asarray(statistic(np.arange(number)), dtype=np.float64)
    drawn = np.stack([np.asarray(statistic(rng.integers(number, size=number)), dtype=np.float64) for _ in range(draws)])
    return value, drawn - drawn.mean(0)


def _ends(shifts: Array, level: float) -> Array:
    """(2, ...): between which two `level` of the draws (draws, ...) lie."""
    if not 0 < level < 1:
        raise ValueError(f"an interval needs a level between 0 and 1; got {level}")
    return np.quantile(shifts, ((1 - level) / 2, (1 + level) / 2), axis=0)


class Curve(NamedTuple):
    """A score over the time of roll-outs: of the windows that begin at each start, its interval over clips, and what real clips score."""

    start: NDArray[np.intp]  # (p,)
    value: Array  # (p,)
    low: Array
    high: Array
    floor: float  # mean over several splits of the real clips
    floor_low: float
    floor_high: float
    shifts: Array  # (draws, p): of the bootstrap, the same clips at all times, and for all models judged on as many clips


class Span(NamedTuple):
    """A mean over windows of a curve, and its bootstrap interval over clips."""

    value: float
    low: float
    high: float


def span(curve: Curve, start: int, than: Curve | None = None, level: float = 0.95) -> Span | None:
    """The mean of a curve over windows that begin at `start` or later; `than`: less that of another one, clip by clip of the same draws.

    Windows of one roll-out are not independent, and clips are what is drawn: so the interval is one over clips. None without windows.
    """
    if than is not None and (len(than.start) != len(curve.start) or than.shifts.shape != curve.shifts.shape):
        raise ValueError("two curves can be compared that have the same windows and draws; judge both with the same options")
    late = curve.start >= start
    if not late.any():
        return None
    value, shifts = curve.value - (than.value if than else 0), curve.shifts - (than.shifts if than else 0)
    mean = float(value[late].mean())
    low, high = mean + _ends(shifts[:, late].mean(1), level)
    return Span(mean, float(low), float(high))


def curves(
    generated: ArrayLike,
    real: ArrayLike,
    perception: Perception,
    window: int = 16,
    every: int | None = None,
    components: int = COMPONENTS,
    draws: int = 100,
    level: float = 0.95,
    generator: np.random.Generator | None = None,
    progress: Told | None = None,
) -> dict[str, Curve]:
    """Scores of generated clips (n, t, h, w, 3) in windows that begin `every` frames (each `window` frames if not given) and in the
    last one, by name.

    video-FD, frame-FD, blow-up (a share), motion (a ratio), mean and std (drift, in grey levels), lpips (between neighbours). Real clips
    (m, t', h, w, 3) may be shorter; all their windows count alike, whatever their time. Half of the clips (every second one) is what
    generated windows are measured by. The floor is what as many windows of the other half score, with its range over several ways to
    halve: real video would lie at it. Wants some 100 generated clips and twice as many real ones, independent of one another.

    Each frame goes through the network once, and clip by clip: `generated` may be an array on disk. Features of real clips are held.
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
    told = progress or (lambda *_: None)
    seen = []
    for i, clip in enumerate(b):
        seen.append(_windows(_see(clip, perception), range(0, b.shape[1] - window + 1, window), window))
        told("looking at real clips", i + 1, len(b))
    seeds = np.random.default_rng(0) if generator is None else generator
    ruler, floors = _floors(seen, len(a), components, seeds)
    del seen

    last = a.shape[1] - window
    start = np.unique(np.append(np.arange(0, last + 1, stride), last))
    marks: list[list[Marks]] = []
    for i, clip in enumerate(a):
        marks.append([ruler.mark(seen) for seen in _windows(_see(clip, perception), start, window)])
        told("looking at generated clips", i + 1, len(a))
    seed = int(seeds.integers(2**32))
    rows = []
    for i in range(len(start)):
        here = _stacked([clip[i] for clip in marks])
        again = np.random.default_rng(seed)  # the same clips at all times, so that curves do not jitter
        rows.append(_drawn(partial(ruler.measure, here), len(a), draws, again))
        told("measuring", i + 1, len(start))
    value, shifts = np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows], axis=1)  # (p, 7), (draws, p, 7)
    low, high = value + _ends(shifts, level)
    return {
        name: Curve(
            start, value[:, i], low[:, i], high[:, i], float(floors[:, i].mean()), float(floors[:, i].min()), float(floors[:, i].max()),
            shifts[:, :, i],
        )
        for i, name in enumerate(SCORES)
    }  # fmt: skip


class Seen(NamedTuple):
    """What is kept of a clip's frames: features (t, f), LPIPS and mean |difference| of neighbours (t-1,), pixels' mean and std (t,)."""

    features: Array
    lpips: Array
    change: Array
    mean: Array
    std: Array


class Marks(NamedTuple):
    """A window in a ruler's coordinates: its descriptor (k+1,), its frames (t, k'+1), and means of the rest (4,). Several: (n, ...)."""

    video: Array
    frames: Array
    rest: Array


class Ruler(NamedTuple):
    """What windows are measured by: two spaces fitted to real windows, their Gaussians, the ball's radius, and means (4,) of the rest."""

    video: Space
    frames: Space
    video_gaussian: Gaussian
    frames_gaussian: Gaussian
    radius: float
    rest: Array

    @classmethod
    def fit(cls, windows: list[Seen], components: int = COMPONENTS) -> Ruler:
        clips = np.stack([descriptors(seen.features) for seen in windows])
        # Neighbouring frames are nearly the same: a space takes enough of them from some of the windows.
        frames = np.concatenate([windows[i].features for i in np.linspace(0, len(windows) - 1, min(len(windows), 256)).astype(int)])
        of_clips, of_frames = space(clips, components, PARTS), space(frames, min(components, max(1, len(clips) // 4)))
        places = of_clips.place(clips)
        rest = np.mean([_rest(seen) for seen in windows], axis=0)
        spread = _gaussian(np.concatenate([of_frames.place(seen.features) for seen in windows]))
        return cls(of_clips, of_frames, _gaussian(places), spread, _radius(np.linalg.norm(places, axis=-1), LEVEL), rest)

    def mark(self, seen: Seen) -> Marks:
        return Marks(self.video.place(descriptors(seen.features)), self.frames.place(seen.features).astype(np.float32), _rest(seen))

    def measure(self, marks: Marks, index: NDArray[np.intp] | None = None) -> Array:
        """(7,): SCORES of the windows of several clips (of those in the index)."""
        video, frames, rest = marks if index is None else (array[index] for array in marks)
        change, mean, std, lpips = rest.mean(0)
        return np.array([
            _between(_gaussian(video), self.video_gaussian),
            _between(_gaussian(frames.reshape(-1, frames.shape[-1])), self.frames_gaussian),
            np.mean(np.linalg.norm(video, axis=-1) > self.radius),
            _ratio(change, self.rest[0]),
            mean - self.rest[1],
            std - self.rest[2],
            lpips,
        ])  # fmt: skip


class Gaussian(NamedTuple):
    mean: Array
    root: Array  # root.T @ root is the covariance
    trace: float


def _gaussian(x: Array) -> Gaussian:
    mean = x.mean(0, dtype=np.float64)
    centred = (x - mean) / np.sqrt(len(x) - 1)
    trace = float((centred**2).sum())
    if len(x) <= x.shape[1]:
        return Gaussian(mean, centred, trace)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    return Gaussian(mean, np.sqrt(np.maximum(values, 0))[:, None] * vectors.T, trace)


def _between(a: Gaussian, b: Gaussian) -> float:
    common = np.linalg.svd(a.root @ b.root.T, compute_uv=False).sum()
    return max(0.0, float(((a.mean - b.mean) ** 2).sum() + a.trace + b.trace - 2 * common))


def _distance(a: Array, b: Array, components: int, parts: int) -> float:
    found = space(b, components, parts)
    return frechet(found.place(a), found.place(b))


def _radius(distances: Array, level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"level should lie between 0 and 1; got {level}")
    root = distances ** (2 / 3)
    fitted = max(root.mean() + NormalDist().inv_cdf(level) * root.std(), 0) ** 1.5
    return float(max(fitted, np.quantile(distances, level, method="higher")))


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else float("nan")


def _floors(seen: list[list[Seen]], number: int, components: int, generator: np.random.Generator) -> tuple[Ruler, Array]:
    """A ruler of every second real clip, and what `number` windows of other real clips score by it, and by rulers of random halves."""
    orders = [np.r_[0 : len(seen) : 2, 1 : len(seen) : 2], *(generator.permutation(len(seen)) for _ in range(SPLITS - 1))]
    half = (len(seen) + 1) // 2
    first, found = None, []
    for order in orders:
        ruler = Ruler.fit([window for i in order[:half] for window in seen[i]], components)
        others = [window for i in order[half:] for window in seen[i]]
        some = np.linspace(0, len(others) - 1, min(len(others), number)).astype(int)
        found.append(ruler.measure(_stacked([ruler.mark(others[i]) for i in some])))
        first = first or ruler
    assert first is not None
    return first, np.stack(found)


def _see(clip: Frames, perception: Perception) -> Seen:
    features, lpips = perception.along(clip)
    return Seen(features, lpips, *_pixels(clip))


def _pixels(clip: Frames) -> tuple[Array, Array, Array]:
    """Mean |difference| of neighbouring frames (t-1,), mean (t,) and standard deviation (t,) of each one's pixels."""
    change, mean, std = [], [], []
    for i in range(0, len(clip), CHUNK):
        part = clip[i : i + CHUNK + 1].astype(np.float32)  # one more, to see the change from chunk to chunk
        change.append(np.abs(np.diff(part, axis=0)).mean((1, 2, 3)))
        mean.append(part[:CHUNK].mean((1, 2, 3)))
        std.append(part[:CHUNK].std((1, 2, 3)))
    return np.concatenate(change), np.concatenate(mean), np.concatenate(std)


def _windows(seen: Seen, starts: Any, length: int) -> list[Seen]:
    return [
        Seen(seen.features[i:j], seen.lpips[i : j - 1], seen.change[i : j - 1], seen.mean[i:j], seen.std[i:j])
        for i, j in ((int(start), int(start) + length) for start in starts)
    ]


def _rest(seen: Seen) -> Array:
    return np.array([seen.change.mean(), seen.mean.mean(), seen.std.mean(), seen.lpips.mean()], dtype=np.float64)


def _stacked(marks: list[Marks]) -> Marks:
    return Marks(*(np.stack(arrays) for arrays in zip(*marks, strict=True)))


def _checked(clips: ArrayLike) -> Frames:
    array = clips if isinstance(clips, np.ndarray) else np.asarray(clips)
    if array.dtype != np.uint8 or array.ndim != 5 or array.shape[-1] != 3 or len(array) == 0 or array.shape[1] < 2:
        raise ValueError(f"clips should be uint8 (n, t, h, w, 3), of two frames at least; got {array.dtype} {array.shape}")
    return array


def _same_length(features: ArrayLike, real: ArrayLike) -> tuple[Array, Array]:
    a, b = np.asarray(features), np.asarray(real)
    if a.ndim != 3 or b.ndim != 3 or a.shape[1:] != b.shape[1:]:
        raise ValueError(f"features should be (clips, frames, features), and clips of one length; got {a.shape} and {b.shape}")
    return a, b
