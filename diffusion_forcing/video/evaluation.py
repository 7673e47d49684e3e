"""Roll-outs scored: against the truth where it is still determined, against other real clips over time; and tables of the scores."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..engine.task import Progress, Table
from .lpips import LPIPS
from .scores import Curve, Span, curves, motion, psnr, span

Frames = NDArray[np.uint8]
Curves = dict[str, Curve]
WINDOW = 16
EQUAL = 60.0
"""PSNR in dB of frames that are equal, for which it is infinite: a quarter of a grey level off."""


def score_rollouts(
    generated: Frames, truth: Frames, real: Frames, context: int, stack: int, trained: int, progress: Progress,
    turns: NDArray[np.bool_] | None = None,
) -> tuple[dict[str, float], Curves]:  # fmt: skip
    """Scores by name, and curves over the roll-out (none where clips are too short or too few).

    generated: (n, context + length, h, w, 3). truth: (n, t, h, w, 3), from the same beginning. real: other clips (m, t', h, w, 3). stack:
    frames of a token. trained: frames of a training window. turns: (n,), in which clips the first generated token turns: there copying the
    last frame is the furthest from the truth.
    """
    lpips = LPIPS.pretrained()
    scores: dict[str, float] = {}
    first = slice(context, context + stack)
    if context and truth.shape[1] >= context + stack:
        copied = np.repeat(truth[:, context - 1 : context], stack, axis=1)
        scores["first token PSNR"] = mean_psnr(generated[:, first], truth[:, first])
        scores["last frame copied PSNR"] = mean_psnr(copied, truth[:, first])
        scores["first token LPIPS"] = mean_lpips(lpips, generated[:, first], truth[:, first])
        scores["last frame copied LPIPS"] = mean_lpips(lpips, copied, truth[:, first])
        if turns is not None and turns.any():
            scores["first token LPIPS, turning"] = mean_lpips(lpips, generated[turns][:, first], truth[turns][:, first])
            scores["last frame copied LPIPS, turning"] = mean_lpips(lpips, copied[turns], truth[turns][:, first])
    for name, part in (("mean", generated[:, context:]), ("late mean", generated[:, -2 * WINDOW :])):
        scores[f"pixel {name} over real"] = float(part.mean() / real.mean())
    for name, part in (("std", generated[:, context:]), ("late std", generated[:, -2 * WINDOW :])):
        scores[f"pixel {name} over real"] = _contrast(part) / _contrast(real)
    scores["late motion over real"] = motion(generated[:, -2 * WINDOW :], real)
    if generated.shape[1] - context < WINDOW or len(generated) < 2 or len(real) < 4:
        return scores, {}
    every = max(WINDOW, (generated.shape[1] - context) // 16)
    over_time = curves(generated[:, context:], real, lpips, window=WINDOW, every=every, progress=progress)
    ends = over_time["video-FD"].start + WINDOW
    windows = {"first window": 0}
    for name, frame in (("at the training length", trained - context), ("at 5 times the training length", 5 * trained - context)):
        if ends[0] <= frame <= ends[-1]:
            windows[name] = int(np.abs(ends - frame).argmin())
    windows["last window"] = len(ends) - 1
    for name in ("video-FD", "frame-FD", "blow-up"):
        scores.update({f"{name} {when}": float(over_time[name].value[i]) for when, i in windows.items()})
        if (late := span(over_time[name], trained - context)) is not None:
            scores[f"{name} beyond the training length"] = late.value
        scores[f"{name} real"] = over_time[name].floor
    return scores, over_time


def table_of_scores(title: str, columns: dict[str, dict[str, float]]) -> Table:
    """Scores of several runs by name, side by side, those of the first one."""
    first = next(iter(columns.values()))
    rows = tuple((score, *(f"{scores[score]:.4g}" if score in scores else "" for scores in columns.values())) for score in first)
    return Table(title, ("", *columns), rows)


def beyond_training(curves: dict[str, Curves], trained: int) -> Table | None:
    """Means over all windows that begin `trained` frames into the roll-outs or later, with intervals over clips; by name, the first one
    the run's own, which others are compared with clip by clip. None where there are no such windows."""
    rows = []
    own = next(iter(curves.values()), {})
    for score in ("video-FD", "frame-FD", "blow-up", "motion"):
        for name, one in curves.items():
            if score not in one or (late := span(one[score], trained)) is None:
                continue
            row = [score if one is own else "", name, _text(late)]
            if len(curves) > 1:
                row.append("" if one is own else _text(span(one[score], trained, than=own[score]), signed=True))
            rows.append(tuple(row))
    if not rows:
        return None
    heads = ["", "", "mean (95 %)", "less that of this run (95 %)"]
    return Table("beyond the training length: means over windows; intervals over clips", tuple(heads[: len(rows[0])]), tuple(rows))


def _text(value: Span | None, signed: bool = False) -> str:
    sign = "+" if signed else ""
    return "" if value is None else f"{value.value:{sign}.3f} ({value.low:{sign}.3f} to {value.high:{sign}.3f})"


def mean_psnr(a: Frames, b: Frames) -> float:
    """Of clips a and b, (n, t, h, w, 3) each: mean over all frames."""
    return float(np.minimum(psnr(_frames(a), _frames(b)), EQUAL).mean())


def mean_lpips(lpips: LPIPS, a: Frames, b: Frames) -> float:
    """Of clips a and b, (n, t, h, w, 3) each: mean over all frames."""
    return float(lpips.distance(_frames(a), _frames(b)).mean())


def _frames(clips: Frames) -> Frames:
    return clips.reshape(-1, *clips.shape[2:])


def _contrast(clips: Frames) -> float:
    """Standard deviation of the pixels within a frame, mean over frames: 0 of grey ones. Clip by clip, since numbers take eight times the
    room of bytes.
    """
    return float(np.mean([clip.reshape(len(clip), -1, 3).std(1).mean() for clip in clips]))
