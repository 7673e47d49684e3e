"""Roll-outs judged and drawn: figures against the truth where it is still determined, and curves over time."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..engine.task import Progress, Table
from .lpips import LPIPS
from .scores import Curve, Span, curves, motion, psnr, span

Frames = NDArray[np.uint8]
WINDOW = 16
ASTRAY = "real, led so"
"""What figures and curves call the world itself, led by actions that were meant for another place: what a perfect model would show."""
EQUAL = 60.0
"""PSNR in dB of frames that are equal, for which it is infinite: a quarter of a grey level off."""


def judge(
    made: Frames, truth: Frames, real: Frames, context: int, stack: int, trained: int, progress: Progress,
    turns: NDArray[np.bool_] | None = None,
) -> tuple[dict[str, float], dict[str, Curve]]:  # fmt: skip
    """Scores by name, and curves over the roll-out (none where clips are too short or too few).

    made: (n, context + length, ...), truth: (n, t, ...) from the same beginning, real: other clips (m, t', ...). trained: frames of a
    window of training. turns: (n,), in which clips the first token generated turns: where copying shows least.
    """
    lpips = LPIPS.pretrained()
    scores: dict[str, float] = {}
    first = slice(context, context + stack)
    if context and truth.shape[1] >= context + stack:
        copied = np.repeat(truth[:, context - 1 : context], stack, axis=1)
        scores["first token PSNR"] = _psnr(made[:, first], truth[:, first])
        scores["last frame copied PSNR"] = _psnr(copied, truth[:, first])
        scores["first token LPIPS"] = mean_lpips(lpips, made[:, first], truth[:, first])
        scores["last frame copied LPIPS"] = mean_lpips(lpips, copied, truth[:, first])
        if turns is not None and turns.any():
            scores["first token LPIPS, turning"] = mean_lpips(lpips, made[turns][:, first], truth[turns][:, first])
            scores["last frame copied LPIPS, turning"] = mean_lpips(lpips, copied[turns], truth[turns][:, first])
    for name, part in (("mean", made[:, context:]), ("late mean", made[:, -2 * WINDOW :])):
        scores[f"pixel {name} over real"] = float(part.mean() / real.mean())
    for name, part in (("std", made[:, context:]), ("late std", made[:, -2 * WINDOW :])):
        scores[f"pixel {name} over real"] = _std(part) / _std(real)
    scores["late motion over real"] = motion(made[:, -2 * WINDOW :], real)
    if made.shape[1] - context < WINDOW or len(made) < 2 or len(real) < 4:
        return scores, {}
    every = max(WINDOW, (made.shape[1] - context) // 16)
    found = curves(made[:, context:], real, lpips, window=WINDOW, every=every, progress=progress)
    ends = found["video-FD"].start + WINDOW
    moments = {"first window": 0}
    for name, frame in (("at the training length", trained - context), ("at 5 times the training length", 5 * trained - context)):
        if ends[0] <= frame <= ends[-1]:
            moments[name] = int(np.abs(ends - frame).argmin())
    moments["last window"] = len(ends) - 1
    for name in ("video-FD", "frame-FD", "blow-up"):
        scores.update({f"{name} {when}": float(found[name].value[i]) for when, i in moments.items()})
        if (late := span(found[name], trained - context)) is not None:
            scores[f"{name} beyond the training length"] = late.value
        scores[f"{name} real"] = found[name].floor
    return scores, found


def beyond_training(curves: dict[str, dict[str, Curve]], trained: int) -> Table | None:
    """Means over all windows that begin `trained` frames into the roll-outs or later, with intervals over clips; by name, the first one
    the run's own, which others are compared with clip by clip. None where there are no such windows."""
    rows = []
    own = next(iter(curves.values()), {})
    for score in ("video-FD", "frame-FD", "blow-up", "motion"):
        for name, found in curves.items():
            if score not in found or (late := span(found[score], trained)) is None:
                continue
            row = [score if found is own else "", name, _told(late)]
            if len(curves) > 1:
                row.append("" if found is own else _told(span(found[score], trained, than=own[score]), signed=True))
            rows.append(tuple(row))
    if not rows:
        return None
    heads = ["", "", "mean (95 %)", "less that of this run (95 %)"]
    return Table("beyond the training length: means over windows; intervals over clips", tuple(heads[: len(rows[0])]), tuple(rows))


def _told(found: Span | None, signed: bool = False) -> str:
    sign = "+" if signed else ""
    return "" if found is None else f"{found.value:{sign}.3f} ({found.low:{sign}.3f} to {found.high:{sign}.3f})"


def draw_curves(found: dict[str, Curve], file: Path, trained: int, names: dict[str, dict[str, Curve]] | None = None) -> None:
    """A panel a score: value and interval over the frames of a roll-out, the real clips' floor in grey; `trained` frames are dotted."""
    from ..engine.plotting import COLOURS, figure

    lines = names or {"": found}
    with figure(file, width=12, height=6) as fig:
        axes = list(fig.subplots(2, 4).flat)
        for ax, name in zip(axes[: len(found)], found, strict=True):
            for (who, one), own in zip(lines.items(), cycle(COLOURS), strict=False):
                curve = one[name]
                colour, style = ("0.2", "--") if who == ASTRAY else (own, "-")
                ax.plot(curve.start, curve.value, color=colour, ls=style, marker=".", label=who)
                ax.fill_between(curve.start, curve.low, curve.high, color=colour, alpha=0.2, lw=0)
            curve = found[name]
            ax.axhspan(curve.floor_low, curve.floor_high, color="0.85", zorder=0)
            ax.axhline(curve.floor, color="0.5", lw=0.8)
            if trained > 0:
                ax.axvline(trained, color="0.3", ls=":", lw=0.8)
            ax.set_title(name)
            ax.set_xlabel("frame")
        for ax in axes[len(found) :]:
            ax.set_visible(False)
        if len(lines) > 1:  # beside the panels, of which one is left over, so that it hides no curve
            handles, labels = axes[0].get_legend_handles_labels()
            axes[-1].legend(handles, labels, loc="center", frameon=False)
            axes[-1].set_axis_off()
            axes[-1].set_visible(True)


def film_of(clips: dict[str, Frames], folder: Path, number: int = 3, longest: int = 400) -> str:
    """Films the first clips (n, t, h, w, 3) of each name side by side. Returns the file's name: an mp4, a gif where PyAV is missing."""
    from ..engine.media import side_by_side, write_film

    number = min(number, *map(len, clips.values()))
    columns = [(name, np.concatenate([clip[:longest] for clip in one[:number]], axis=1)) for name, one in clips.items()]
    return write_film(folder, "rollouts", side_by_side(columns, scale=2))


def _psnr(a: Frames, b: Frames) -> float:
    """Mean over frames."""
    return float(np.minimum(psnr(a.reshape(-1, *a.shape[2:]), b.reshape(-1, *b.shape[2:])), EQUAL).mean())


def mean_lpips(lpips: LPIPS, a: Frames, b: Frames) -> float:
    """Of clips a and b, (n, t, h, w, 3) each, over all frames."""
    return float(lpips.distance(a.reshape(-1, *a.shape[2:]), b.reshape(-1, *b.shape[2:])).mean())


def _std(clips: Frames) -> float:
    """Of the pixels within a frame, on average: a grey frame has none. Clip by clip, since numbers take eight times the room of bytes."""
    return float(np.mean([clip.reshape(len(clip), -1, 3).std(1).mean() for clip in clips]))
