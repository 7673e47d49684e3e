"""What measuring a model gives, and how a model is measured and shown where its task says nothing itself.

Denoising: the error of clean tokens predicted from noisy held-out ones, by level and by position, beside the best linear guess from each
number alone. Samples: held-out windows continued from their first tokens, beside what follows in the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from ..matrix import pin
from ..model import DiffusionForcing
from ..sampling import Sampler, sample, start
from ..windows import Batch, Source
from .plotting import COLOURS, figure

Progress = Callable[[str, int, int], None]
"""Called as work proceeds, with what it is, how much is done, and of how much: progress("episodes", 3, 100)."""

PARTS = 10  # levels at which denoising is measured
BATCH = 32
FEW = 32  # windows that are read token by token


@dataclass(frozen=True)
class Table:
    """Rows of words and numbers under column heads."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Evaluation:
    """metrics: numbers by name. tables: for people. figures: captions by the file's name. warnings: sentences about what the tables
    should not be read without.
    """

    metrics: dict[str, float]
    tables: tuple[Table, ...] = ()
    figures: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


class Denoised(NamedTuple):
    """Squared errors as shares of the variance of the tokens. levels: (n,). error: (n, t), at each position, with all tokens at that level.
    clean_past: (n, t), given a clean past; None for models that are not causal. linear: (n,), of the best linear guess of each number
    from its noisy value alone. loss: of tokens at levels of their own.
    """

    levels: Tensor
    error: Tensor
    clean_past: Tensor | None
    linear: Tensor
    loss: float


def default_sampler(causal: bool) -> Sampler:
    """How samples are drawn unless a task says otherwise: by a causal model near tokens first, else all tokens at once."""
    return Sampler(steps=20, matrix="pyramid", slope=10.0) if causal else Sampler(steps=20)


def evaluate_denoising(
    model: DiffusionForcing, source: Source, folder: Path, *, sampler: Sampler, context: int, samples: int, seed: int, progress: Progress
) -> Evaluation:
    """Measure a model on held-out windows, and draw figures into a folder. context: tokens of a window that samples are given."""
    held_out = read_held_out(source, samples)
    context = min(context, held_out.x.shape[1] - 1) if context == 1 else context
    denoised = measure_denoising(model, held_out, seed, progress)
    shown = Batch(*(part[torch.linspace(0, len(part) - 1, min(len(part), BATCH)).long()] for part in held_out))
    drawn = sample_held_out(model, shown, sampler, context, seed, progress)
    compared = _compare(shown, drawn, context)
    draw_samples(model, shown, drawn, context, folder / "samples.png")
    names = ("all tokens alike", "after a clean past", "linear guess")
    errors = [weighted(denoised.error, held_out.mask), _clean_past(denoised, held_out), denoised.linear]
    columns = [(name, values) for name, values in zip(names, errors, strict=True) if values is not None]
    draw_denoising(denoised, dict(columns), folder / "denoising.png")
    levels = denoised.levels.tolist()
    metrics = {"loss": denoised.loss, "error": float(columns[0][1].mean()), "linear_error": float(denoised.linear.mean())}
    for name, values in columns:
        metrics |= {f"{name.replace(' ', '_')}/{k}": float(value) for k, value in zip(levels, values, strict=True)}
    rows = [(f"{k:,}", *(f"{float(values[i]):.3f}" for _, values in columns)) for i, k in enumerate(levels)]
    title = (f"Error of clean tokens predicted at each noise level (share of variance: 0 perfect, 1 no better than the mean), "
             f"{len(held_out.x):,} held-out windows, loss {denoised.loss:.4f}")  # fmt: skip
    tables = [Table(title, ("level", *(name for name, _ in columns)), tuple(rows))]
    if compared:
        metrics |= {f"samples/{name}": value for name, (value, _, _) in compared.items()}
        rows = [(what, f"{value:.3f}", f"{ideal:g}") for value, ideal, what in compared.values()]
        tables.append(Table(f"{len(shown.x)} samples beside the data they continue", ("", "samples", "ideal"), tuple(rows)))
    figures = {
        "denoising.png": "Error of predicted clean tokens, by noise level and by position in the window; 1 is no better than the mean.",
        "samples.png": f"Held-out windows, and samples that begin with the same {_tokens(context)}.",
    }
    return Evaluation(metrics, tuple(tables), figures)


def write_samples(
    model: DiffusionForcing, source: Source, folder: Path, *, sampler: Sampler, context: int, samples: int, seed: int, progress: Progress
) -> list[Path]:
    """Samples as samples.npz, in raw units, beside the held-out windows they continue, and as a picture. Returns the files.

    Where there are fewer windows than samples, several samples continue one.
    """
    held_out = read_held_out(source, samples)
    held_out = Batch(*(part[torch.arange(samples) % len(part)] for part in held_out))
    context = min(context, held_out.x.shape[1] - 1) if context == 1 else context
    drawn = sample_held_out(model, held_out, sampler, context, seed, progress)
    arrays, picture = folder / "samples.npz", folder / "samples.png"
    ours, theirs = decode(model, drawn).numpy(), decode(model, held_out.x).numpy()
    np.savez(arrays, samples=ours, held_out=theirs, cond=held_out.cond.numpy(), mask=held_out.mask.numpy())
    draw_samples(model, held_out, drawn, context, picture)
    return [arrays, picture]


def read_held_out(source: Source, number: int) -> Batch:
    """At most so many windows for validation, spread evenly over all."""
    windows = source.all()
    windows = windows[torch.linspace(0, len(windows) - 1, min(number, len(windows))).long()]
    parts = [source.read(chunk) for chunk in windows.split(BATCH)]
    return Batch(*(torch.cat(part) for part in zip(*parts, strict=True)))


@torch.no_grad()
def measure_denoising(model: DiffusionForcing, held_out: Batch, seed: int, progress: Progress) -> Denoised:
    """Errors of clean tokens predicted from noisy ones, at ten levels from K/10 to K."""
    schedule, generator = model.schedule, Generator().manual_seed(seed)
    levels = torch.linspace(0, schedule.levels, PARTS + 1)[1:].round().long().unique()
    x, mask = held_out.x, held_out.mask
    tokens = x[mask].double()
    variance = tokens.var(0, unbiased=False)
    unit = float(variance.mean()) or 1.0
    alpha, sigma = schedule.alpha(levels).cpu().double(), schedule.sigma(levels).cpu().double()
    noisy = sigma[:, None] ** 2 * variance.flatten() / (alpha[:, None] ** 2 * variance.flatten() + sigma[:, None] ** 2)
    total, losses = torch.zeros(len(levels), x.shape[1], dtype=torch.float64), 0.0
    done = 0
    for batch in _chunks(held_out, model.device):
        for i, k in enumerate(levels.tolist()):
            at = torch.where(batch.mask, k, schedule.levels)  # padding is noise, as in training
            noise = torch.randn(batch.x.shape, generator=generator).to(batch.x.device)
            error = (model.predict(schedule.add_noise(batch.x, at, noise), at, batch.cond).x0 - batch.x) ** 2
            total[i] += (error.flatten(2).mean(-1) * batch.mask).sum(0).cpu().double()
        at = torch.randint(0, schedule.levels + 1, batch.mask.shape, generator=generator).to(batch.x.device)
        noise = torch.randn(batch.x.shape, generator=generator).to(batch.x.device)
        at = torch.where(batch.mask, at, schedule.levels)
        losses += float((model(batch.x, at, batch.cond, noise=noise) * batch.mask).sum())
        done += len(batch.x)
        progress("denoising", done, len(x))
    count = mask.sum(0).clamp(min=1)
    clean = None
    if model.causal and x.shape[1] > 1:
        few = Batch(*(part[:FEW].to(model.device) for part in held_out))
        clean = _after_clean_past(model, few, levels, generator, progress) / unit
    return Denoised(levels, total / count / unit, clean, noisy.mean(1) / unit, losses / float(mask.sum()))


def _after_clean_past(model: DiffusionForcing, batch: Batch, levels: Tensor, generator: Generator, progress: Progress) -> Tensor:
    """(n, t), squared errors of each token at each level, read after the clean tokens before it."""
    state, columns = None, []
    for token in range(batch.x.shape[1]):
        x, cond, mask = (part[:, token : token + 1] for part in batch)
        noise, row = torch.randn(x.shape, generator=generator).to(x.device), []
        for k in levels.tolist():
            at = torch.full(mask.shape, k, device=x.device)
            error = (model.predict(model.schedule.add_noise(x, at, noise), at, cond, state).x0 - x) ** 2
            row.append(float((error.flatten(2).mean(-1) * mask).sum() / mask.sum().clamp(min=1)))
        columns.append(row)
        state = model.absorb(x, cond, state)
        progress("after a clean past", token + 1, batch.x.shape[1])
    return torch.tensor(columns, dtype=torch.float64).T


def sample_held_out(
    model: DiffusionForcing, held_out: Batch, sampler: Sampler, context: int, seed: int, progress: Progress
) -> Tensor:  # fmt: skip
    """Samples of whole windows (n, t, *event) whose first `context` tokens, and conditions, are those of held-out ones."""
    tokens = held_out.x.shape[1]
    if not 0 <= context < tokens:
        raise ValueError(f"samples continue the first tokens of a window, 0 to {tokens - 1} of its {tokens}; got context={context}")
    generator = Generator(device=model.device).manual_seed(seed)
    matrix = pin(sampler.matrix_for(model.schedule, tokens), list(range(context)))
    drawn = []
    for batch in _chunks(held_out, model.device):
        x = start(model.schedule, matrix, (len(batch.x), *batch.x.shape[2:]), batch.x, generator)
        x[:, context:] *= sampler.temperature
        drawn.append(sample(model.denoiser(batch.cond), model.schedule, x, sampler.along(matrix), generator=generator).cpu())
        progress("samples", sum(map(len, drawn)), len(held_out.x))
    return torch.cat(drawn)


def decode(model: DiffusionForcing, tokens: Tensor) -> Tensor:
    """Tokens in raw units, where the model has a codec."""
    return tokens if model.codec is None else model.codec.decode(tokens.to(model.device)).cpu()  # type: ignore[operator]


def weighted(error: Tensor, mask: Tensor) -> Tensor:
    """Errors (n, t) by position as (n,), positions counted by how many tokens are real."""
    count = mask.sum(0).double()[: error.shape[1]]
    return (error * count).sum(1) / count.sum()


def _clean_past(denoised: Denoised, held_out: Batch) -> Tensor | None:
    return None if denoised.clean_past is None else weighted(denoised.clean_past, held_out.mask[:FEW])


def _chunks(held_out: Batch, device: torch.device) -> Iterator[Batch]:
    for parts in zip(*(part.split(BATCH) for part in held_out), strict=True):
        yield Batch(*(part.to(device) for part in parts))


def _compare(held_out: Batch, drawn: Tensor, context: int) -> dict[str, tuple[float, float, str]]:
    """Statistics of samples relative to those of the data, each with its ideal value and what it is."""
    data, real = held_out.x.double().flatten(2), held_out.mask.clone()
    real[:, :context] = False
    if not bool(real.any()):
        return {}
    ours, theirs = drawn.double().flatten(2)[real], data[real]
    spread = theirs.var(0, unbiased=False).mean().sqrt().clamp(min=1e-12)
    shift, size = float((ours.mean(0) - theirs.mean(0)).square().mean().sqrt() / spread), ours.var(0, unbiased=False).mean().sqrt()
    statistics = {
        "shift": (shift, 0.0, "shift of the mean, in standard deviations"),
        "spread": (float(size / spread), 1.0, "standard deviation, relative to the data's"),
    }
    steps = real[:, 1:] & held_out.mask[:, :-1]
    if bool(steps.any()):
        change = [(tokens[:, 1:] - tokens[:, :-1])[steps].square().mean().sqrt() for tokens in (drawn.double().flatten(2), data)]
        statistics["change"] = float(change[0] / change[1].clamp(min=1e-12)), 1.0, "change from token to token, relative to the data's"
    return statistics


def draw_denoising(denoised: Denoised, by_level: dict[str, Tensor], file: Path) -> None:
    """Errors by level (n,), by name, and by position in the window."""
    tokens, levels = denoised.error.shape[1], denoised.levels
    middle, top = int((levels - levels[-1] / 2).abs().argmin()), len(levels) - 1
    colours = {"linear guess": "0.6", "all tokens alike": COLOURS[0], "after a clean past": COLOURS[1]}
    with figure(file, 9.5 if tokens > 1 else 5.0, 3.6) as fig:
        axes = fig.subplots(1, 2 if tokens > 1 else 1, squeeze=False)[0]
        for name, error in by_level.items():
            axes[0].plot(levels, error, color=colours[name], ls="--" if name == "linear guess" else "-", marker="o", ms=3, label=name)
        axes[0].set(xlabel="noise level", ylabel="error (share of variance)", title="by noise level", ylim=(0, None))
        axes[0].legend(frameon=False)
        if tokens > 1:
            lines = [(denoised.error[middle], COLOURS[0], f"all tokens at {int(levels[middle]):,}")]
            if denoised.clean_past is not None:
                lines.append((denoised.clean_past[top], COLOURS[1], f"at {int(levels[top]):,} after a clean past"))
            for line, colour, label in lines:
                axes[1].plot(range(tokens), line, color=colour, marker="o" if tokens < 40 else "", ms=3, label=label)
            axes[1].set(xlabel="token", title="by position", ylim=(0, None))
            axes[1].legend(frameon=False)


def draw_samples(model: DiffusionForcing, held_out: Batch, drawn: Tensor, context: int, file: Path) -> None:
    """Held-out windows and samples: pictures as films, vectors as lines, all else as the size of each token."""
    rows = slice(0, 8)
    data, samples = decode(model, held_out.x[rows]).float(), decode(model, drawn[rows]).float()
    per_token = data.shape[1] // held_out.mask.shape[1] or 1  # frames of a token
    real = held_out.mask[rows].repeat_interleave(per_token, 1)
    films = [_pictures(part) for part in (data, samples)]
    if films[0] is not None:
        _draw_films(films, real, file)
    elif data.ndim == 3:
        _draw_lines([data, samples], real, context * per_token, file, [f"number {i}" for i in range(data.shape[2])])
    else:
        sizes = [part.flatten(2).square().mean(-1, keepdim=True).sqrt() for part in (data, samples)]
        _draw_lines(sizes, real, context * per_token, file, ["root mean square"])


def _pictures(x: Tensor) -> Tensor | None:
    """Frames (n, t, h, w, 3) of decoded tokens that are pictures; None for others."""
    if x.ndim == 4 and min(x.shape[2:]) > 3:
        return x[..., None].expand(*x.shape, 3)
    if x.ndim == 5 and x.shape[2] in (1, 3):
        x = x.movedim(2, -1)
    return x.expand(*x.shape[:4], 3) if x.ndim == 5 and x.shape[-1] in (1, 3) else None


def _draw_films(films: list[Any], real: Tensor, file: Path, count: int = 4, frames: int = 10) -> None:
    """Rows of frames, by turns of the data and of a sample."""
    count, low, high = min(count, len(films[0])), films[0].min(), films[0].max()
    at = torch.linspace(0, films[0].shape[1] - 1, min(frames, films[0].shape[1])).long().tolist()
    height, width = films[0].shape[2:4]
    with figure(file, max(4.0, len(at)), max(2.5, 1.05 * 2 * count * height / width)) as fig:
        axes = fig.subplots(2 * count, len(at), squeeze=False)
        for row, line in enumerate(axes):
            for ax, t in zip(line, at, strict=True):
                ax.set(xticks=[], yticks=[])
                ax.spines[:].set_visible(False)
                if bool(real[row // 2, t]):
                    picture = (films[row % 2][row // 2, t] - low) / (high - low).clamp(min=1e-12)
                    ax.imshow(picture.clamp(0, 1).numpy(), interpolation="nearest")
            line[0].set_ylabel(("data", "sample")[row % 2], color=("0.3", COLOURS[0])[row % 2])


def _draw_lines(parts: list[Tensor], real: Tensor, known: int, file: Path, names: list[str], most: int = 4) -> None:
    """Numbers of tokens (n, t, d) over time, data at the left and samples at the right, what these are given on grey."""
    shown = range(min(most, parts[0].shape[2]))
    titles = "held-out data", "samples, given what is on grey" if known else "samples"
    with figure(file, 9.5, 1.0 + 1.9 * len(shown)) as fig:
        axes = fig.subplots(len(shown), 2, sharex=True, sharey="row", squeeze=False)
        for row, number in enumerate(shown):
            for column, (ax, part, title) in enumerate(zip(axes[row], parts, titles, strict=True)):
                for i, line in enumerate(part[:, :, number]):
                    end = int(real[i].sum())
                    ax.plot(range(end), line[:end], color=COLOURS[i % len(COLOURS)], lw=1, alpha=0.8, marker="o" if end < 3 else "", ms=3)
                if column and known:
                    ax.axvspan(-0.5, known - 0.5, color="0.92", zorder=0)
                ax.set(**({"title": title} if row == 0 else {}), **({"xlabel": "token"} if row == len(shown) - 1 else {}))
            axes[row, 0].set_ylabel(names[number])


def _tokens(context: int) -> str:
    return "token" if context == 1 else f"{context} tokens"
