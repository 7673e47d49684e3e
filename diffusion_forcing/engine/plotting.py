"""Figures: colours and style shared by all, a figure written to a file, schedule matrices and training curves as pictures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ..files import write_atomically

COLOURS = ("#2f6fb0", "#d1495b", "#2a9d6f", "#e09f3e")
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 12,
    "figure.facecolor": "white",
    "savefig.dpi": 130,
}


@contextmanager
def figure(file: Path, width: float = 6.0, height: float = 4.0) -> Iterator[Any]:
    """A matplotlib figure, drawn without a display and written to a file at the end."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(width, height), layout="constrained")
        engine: Any = fig.get_layout_engine()
        engine.set(rect=(0, 0.05, 1, 0.93), h_pad=0.06, w_pad=0.06)
        FigureCanvasAgg(fig)
        yield fig
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, lambda temporary: fig.savefig(temporary, format=file.suffix[1:] or None))


def draw_matrix(matrix: Tensor, file: Path, title: str = "", ax: Any = None) -> None:
    """A schedule matrix as a picture: rows are denoising steps from the top, columns tokens, dark is noise, light is clean."""
    if ax is None:
        with figure(Path(file), 1.2 + 0.22 * min(40, matrix.shape[1]), 3.6) as fig:
            draw_matrix(matrix, file, title, fig.subplots())
        return
    image = ax.imshow(matrix.cpu().numpy(), aspect="auto", cmap="magma_r", vmin=0, interpolation="nearest")
    ax.set(xlabel="token", ylabel="denoising step", title=title)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.yaxis.get_major_locator().set_params(integer=True)
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.06, pad=0.03)
    bar.set_label("noise level")
    bar.outline.set_visible(False)
    ax.spines[:].set_visible(False)


def draw_curves(log: list[dict[str, Any]], file: Path) -> None:
    """Loss and learning rate over the steps of a training."""
    with figure(file, 9.0, 3.4) as fig:
        left, right = fig.subplots(1, 2, width_ratios=(2, 1))
        trained = [line for line in log if "loss" in line]
        valid = [line for line in log if "valid_loss" in line]
        left.plot(
            [line["step"] for line in trained], [line["loss"] for line in trained], color=COLOURS[0], lw=0.8, alpha=0.5, label="training"
        )
        if valid:
            left.plot(
                [line["step"] for line in valid],
                [line["valid_loss"] for line in valid],
                color=COLOURS[1],
                marker="o",
                ms=3,
                label="validation",
            )
        left.set(xlabel="step", ylabel="loss", yscale="log")
        left.legend(frameon=False)
        right.plot([line["step"] for line in trained], [line["lr"] for line in trained], color=COLOURS[2])
        right.set(xlabel="step", ylabel="learning rate")
