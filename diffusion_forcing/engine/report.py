"""Pictures and pages: a look shared by all figures, schedule matrices as pictures, and a run as one HTML page."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ..files import write_atomically
from .config import read_json
from .log import LOG, read_log

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


def write_report(folder: Path) -> Path:
    """One self-contained page about a run: what it says, what it drew, how to repeat it. Returns its path."""
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} is not a run: it has no config.json. `dforce train RECIPE` makes one under runs/.")
    config = read_json(folder / "config.json")
    about = json.loads((folder / "run.json").read_text()) if (folder / "run.json").exists() else {}
    evaluation = json.loads((folder / "eval.json").read_text()) if (folder / "eval.json").exists() else {}
    log = read_log(folder / LOG)
    name = folder.resolve().name
    parts = [f"<h1>{html.escape(name)}</h1>"]
    if about.get("doc"):
        parts.append(f"<p>{html.escape(about['doc'])}</p>")
    parts += [_table(table) for table in evaluation.get("tables", [])]
    for file, caption in evaluation.get("figures", {}).items():
        parts.append(_image(folder / "figures" / file, caption))
    if not evaluation:
        parts.append(f"<p>Not evaluated yet: <code>dforce eval {html.escape(str(folder))}</code></p>")
    if any("loss" in line for line in log):
        curves = folder / "figures" / "curves.png"
        draw_curves(log, curves)
        parts.append(_image(curves, "Loss and learning rate over training."))
    if about:
        parts.append("<h2>How to repeat it</h2>")
        commands = [command for command in (about.get("command"), evaluation.get("command")) if command]
        parts.append(f"<pre>{html.escape(chr(10).join(commands))}</pre>")
        parts.append(_table({"title": "", "columns": [], "rows": [[k, str(v)] for k, v in about.items() if k not in ("command", "doc")]}))
    parts.append(f"<details><summary>Full configuration</summary><pre>{html.escape(json.dumps(config, indent=2))}</pre></details>")
    page = folder / "report.html"
    page.write_text(_PAGE.format(title=html.escape(name), style=_CSS, body="\n".join(parts)))
    return page


def _table(table: dict[str, Any]) -> str:
    head = "".join(f"<th>{html.escape(c)}</th>" for c in table["columns"])
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in table["rows"])
    title = f"<h2>{html.escape(table['title'])}</h2>" if table["title"] else ""
    return f"{title}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _image(file: Path, caption: str) -> str:
    if not file.exists():
        return f"<p>(missing: {html.escape(file.name)})</p>"
    data = base64.b64encode(file.read_bytes()).decode()
    if file.suffix == ".mp4":
        film = f'<video src="data:video/mp4;base64,{data}" controls loop autoplay muted></video>'
        return f"<figure>{film}<figcaption>{html.escape(caption)}</figcaption></figure>"
    kind = {"gif": "gif", "webp": "webp"}.get(file.suffix[1:], "png")
    text = html.escape(caption)
    return f'<figure><img src="data:image/{kind};base64,{data}" alt="{text}"><figcaption>{text}</figcaption></figure>'


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>{style}</style></head><body>
{body}
</body></html>
"""
_CSS = """
body { font: 16px/1.55 system-ui, sans-serif; max-width: 62rem; margin: 2.5rem auto; padding: 0 1.25rem; color: #1d2733; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: .6rem 0 1.4rem; }
td, th { padding: .35rem .9rem .35rem 0; border-bottom: 1px solid #dde3ea; text-align: left; }
th { font-weight: 600; } td:not(:first-child) { font-variant-numeric: tabular-nums; }
figure { margin: 1.4rem 0; } img, video { max-width: 100%; } figcaption { color: #5b6875; font-size: .9rem; }
pre { background: #f4f6f8; padding: .8rem 1rem; overflow-x: auto; border-radius: 6px; font-size: .85rem; }
summary { cursor: pointer; margin-top: 2rem; color: #5b6875; }
"""
