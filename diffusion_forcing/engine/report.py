"""A run as one self-contained HTML page."""

from __future__ import annotations

import base64
import html
import json
import shlex
from pathlib import Path
from typing import Any

from ..files import inside, read_json, read_limited, write_atomically
from .log import LOG, read_log
from .plotting import draw_curves

IMAGES = {".png": "png", ".gif": "gif", ".webp": "webp", ".jpg": "jpeg", ".jpeg": "jpeg"}
MOST_OF_FIGURE, MOST_OF_PAGE = 2**26, 2**28
"""Bytes of one figure, and of all of them: larger ones are named and not embedded."""
MOST_ROWS = 1000
"""Of a table."""


def write_report(folder: Path) -> Path:
    """One self-contained page about a run: what it says, what it drew, how to repeat it. Returns its path.

    Nothing is read or written but in the run's own folder, whatever its files name.
    """
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} is not a run: it has no config.json. `dforce train RECIPE` makes one under runs/.")
    page, curves = inside(folder, "report.html"), inside(folder, "figures/curves.png")
    config, about, evaluation = (_object(folder, file) for file in ("config.json", "run.json", "eval.json"))
    log = read_log(inside(folder, LOG))
    name, room = folder.resolve().name, MOST_OF_PAGE
    parts = [f"<h1>{_text(name)}</h1>"]
    if about.get("doc"):
        parts.append(f"<p>{_text(about['doc'])}</p>")
    parts += [_table(table) for table in _list(evaluation, "tables")]
    parts += [f"<p><strong>{_text(sentence)}</strong></p>" for sentence in _list(evaluation, "warnings")]
    figures = evaluation.get("figures") or {}
    for file, caption in figures.items() if isinstance(figures, dict) else ():
        figure = _figure(folder, file, caption, room)
        room -= len(figure)
        parts.append(figure)
    if not evaluation:
        parts.append(f"<p>Not evaluated yet: <code>{_text(shlex.join(['dforce', 'eval', str(folder)]))}</code></p>")
    if any("loss" in line for line in log):
        draw_curves(log, curves)
        parts.append(_figure(folder, "curves.png", "Loss and learning rate over training.", MOST_OF_PAGE))
    if about:
        parts.append("<h2>How to repeat it</h2>")
        history = [entry.get("command") for entry in _list(about, "history") if isinstance(entry, dict)]
        said = [*(history or [about.get("command")]), evaluation.get("command")]
        commands = list(dict.fromkeys(str(command) for command in said if command))
        parts.append(f"<pre>{_text(chr(10).join(commands))}</pre>")
        parts.append(_table({"rows": [[k, v] for k, v in about.items() if k not in ("command", "doc", "history")]}))
    parts.append(f"<details><summary>Full configuration</summary><pre>{html.escape(json.dumps(config, indent=2))}</pre></details>")
    text = _PAGE.format(title=_text(name), style=_CSS, body="\n".join(parts))
    write_atomically(page, lambda file: Path(file).write_text(text))
    return page


def _object(folder: Path, name: str) -> dict[str, Any]:
    """What a JSON file of a run holds; nothing where it is missing."""
    file = inside(folder, name)
    value = read_json(file) if file.is_file() else {}
    if not isinstance(value, dict):
        raise ValueError(f"{file} should hold names and values; got a {type(value).__name__}: the run is damaged")
    return value


def _list(value: dict[str, Any], name: str) -> list[Any]:
    found = value.get(name) or []
    return found if isinstance(found, list) else []


def _text(value: Any) -> str:
    """Anything as text, not markup."""
    return html.escape(str(value)[:100_000])


def _table(table: Any) -> str:
    if not isinstance(table, dict):
        return f"<p>{_text(table)}</p>"
    head = "".join(f"<th>{_text(c)}</th>" for c in _list(table, "columns"))
    rows = [row if isinstance(row, list) else [row] for row in _list(table, "rows")[:MOST_ROWS]]
    body = "".join("<tr>" + "".join(f"<td>{_text(c)}</td>" for c in row) + "</tr>" for row in rows)
    title = f"<h2>{_text(table['title'])}</h2>" if table.get("title") else ""
    return f"{title}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _figure(folder: Path, name: str, caption: Any, room: int) -> str:
    """A picture or film from the run's figures, or why it is not shown."""
    text = _text(caption)
    try:
        file = inside(inside(folder, "figures"), name)
        if not file.is_file():
            return f"<p>(missing: {_text(name)})</p>"
        if file.suffix not in (*IMAGES, ".mp4"):
            raise ValueError(f"a figure is one of {', '.join(IMAGES)}, .mp4; got {name}")
        data = base64.b64encode(read_limited(file, min(MOST_OF_FIGURE, room * 3 // 4))).decode()
    except (ValueError, OSError) as error:
        return f"<p>(not shown: {_text(error)})</p>"
    if file.suffix == ".mp4":
        film = f'<video src="data:video/mp4;base64,{data}" controls loop autoplay muted></video>'
        return f"<figure>{film}<figcaption>{text}</figcaption></figure>"
    return f'<figure><img src="data:image/{IMAGES[file.suffix]};base64,{data}" alt="{text}"><figcaption>{text}</figcaption></figure>'


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
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
