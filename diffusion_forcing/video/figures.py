"""Figures of video: curves over the time of roll-outs, sheets of frames, and films side by side."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..engine.media import contact_sheet, side_by_side, write_film
from ..engine.plotting import COLOURS, figure
from .scores import Curve

Frames = NDArray[np.uint8]


def draw_curves(runs: dict[str, dict[str, Curve]], file: Path, trained: int, simulator: str = "") -> None:
    """A panel a score: value and interval over the frames of a roll-out for each run, the floor of real clips in grey.

    runs: curves by name, the run's own first. trained: a dotted line at this frame. simulator: name of the run that is drawn dashed.
    """
    own = next(iter(runs.values()))
    with figure(file, width=12, height=6) as fig:
        axes = list(fig.subplots(2, 4).flat)
        for ax, score in zip(axes[: len(own)], own, strict=True):
            for (name, curves), colour in zip(runs.items(), cycle(COLOURS), strict=False):
                curve = curves[score]
                colour, style = ("0.2", "--") if name == simulator else (colour, "-")
                ax.plot(curve.start, curve.value, color=colour, ls=style, marker=".", label=name)
                ax.fill_between(curve.start, curve.low, curve.high, color=colour, alpha=0.2, lw=0)
            ax.axhspan(own[score].floor_low, own[score].floor_high, color="0.85", zorder=0)
            ax.axhline(own[score].floor, color="0.5", lw=0.8)
            if trained > 0:
                ax.axvline(trained, color="0.3", ls=":", lw=0.8)
            ax.set_title(score)
            ax.set_xlabel("frame")
        for ax in axes[len(own) :]:
            ax.set_visible(False)
        if len(runs) > 1:  # beside the panels, of which one is left over, so that it hides no curve
            handles, labels = axes[0].get_legend_handles_labels()
            axes[-1].legend(handles, labels, loc="center", frameon=False)
            axes[-1].set_axis_off()
            axes[-1].set_visible(True)


def draw_rollouts(folder: Path, generated: Frames, truth: Frames, context: int, stack: int) -> dict[str, str]:
    """Sheets of roll-outs (n, context + length, ...) and of the real clips (n, t, ...) they continue; returns captions by file name."""
    begin = min(context + 8 * stack, generated.shape[1])
    rows, names = [], []
    for one, real in zip(generated[:4], truth[:4], strict=True):
        if len(real) >= begin:
            rows.append(real[:begin])
            names.append("real")
        rows.append(one[:begin])
        names.append("generated")
    contact_sheet(np.stack(rows), folder / "beginning.png", names=names, every=stack, mark=context)
    contact_sheet(generated[:8], folder / "rollout.png", every=max(1, generated.shape[1] // 12), mark=context)
    return {"beginning.png": "Beginnings of roll-outs: context framed blue, one frame a token; above each the real continuation.",
            "rollout.png": "Whole roll-outs, twelve frames of each."}  # fmt: skip


def draw_pairs(file: Path, real: Frames, other: Frames, name: str, stack: int, context: int | None = None) -> None:
    """A sheet of real clips (n, t, ...), below each what became of it, called `name`; one frame a token."""
    rows = np.stack([real, other], axis=1).reshape(-1, *real.shape[1:])
    contact_sheet(rows, file, names=["real", name] * len(real), every=stack, mark=context)


def film_side_by_side(clips: dict[str, Frames], folder: Path, number: int = 3, longest: int = 400) -> str:
    """Films the first clips (n, t, h, w, 3) of each name side by side. Returns the file's name: an mp4, a gif where PyAV is missing."""
    number = min(number, *map(len, clips.values()))
    columns = [(name, np.concatenate([clip[:longest] for clip in one[:number]], axis=1)) for name, one in clips.items()]
    return write_film(folder, "rollouts", side_by_side(columns, scale=2))
