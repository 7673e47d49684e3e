"""Fan charts: history, median and bands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..engine.plotting import COLOURS, figure
from .panel import Array, Panel


def draw_fans(
    panel: Panel, futures: Array, file: Path, *, origin: int | None = None, most: int = 12, which: list[int] | None = None
) -> None:
    """Fan charts of futures (n, h, d) that start at step `origin` of a panel (None: its end), with what happened after it.

    which: the series to draw; None: the `most` largest.
    """
    origin = len(panel.values) if origin is None else origin
    h = futures.shape[1]
    size = np.nan_to_num(np.nanmean(np.abs(panel.values), axis=0))
    chosen = sorted(np.argsort(-size)[:most].tolist()) if which is None else which
    columns = min(3, len(chosen))
    rows = -(-len(chosen) // columns)
    first = max(0, origin - 3 * h)
    past = panel.index[first : min(len(panel.values), origin + h)]
    ahead: Any = panel.until(origin).future(h)
    with figure(file, width=4.6 * columns, height=2.5 * rows + 0.4) as fig:
        axes = fig.subplots(rows, columns, squeeze=False)
        for ax in axes.flat[len(chosen) :]:
            ax.set_visible(False)
        for ax, series in zip(axes.flat, chosen, strict=False):
            draw_fan(ax, past, panel.values[first : first + len(past), series], ahead, futures[..., series])
            ax.set_title(panel.names[series].replace("$", r"\$"), fontsize=10)  # text between dollar signs would be mathematics
        fig.text(0.5, 0.005, "black: history and truth; blue: median, 50 % and 90 % bands", ha="center", fontsize=9)


def draw_fan(ax: Any, past: Any, values: Array, ahead: Any, futures: Array) -> None:
    """One series: values (t,) at times `past`, futures (n, h) at times `ahead`."""
    low, lower, middle, upper, high = np.quantile(futures, [0.05, 0.25, 0.5, 0.75, 0.95], axis=0)
    ax.fill_between(ahead, low, high, color=COLOURS[0], alpha=0.2, lw=0)
    ax.fill_between(ahead, lower, upper, color=COLOURS[0], alpha=0.35, lw=0)
    ax.plot(ahead, middle, color=COLOURS[0], lw=1.6)
    ax.plot(past, values, color="black", lw=0.9)
    ax.axvline(ahead[0], color="#999999", lw=0.7, ls=":")
    ax.tick_params(labelsize=7)
    for label in ax.get_xticklabels():
        label.set_rotation(25)
        label.set_ha("right")
