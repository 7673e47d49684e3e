"""A run as one self-contained HTML page."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path
from typing import Any

from .config import read_json
from .log import LOG, read_log
from .plotting import draw_curves


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
    parts += [f"<p><strong>{html.escape(sentence)}</strong></p>" for sentence in evaluation.get("warnings", [])]
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
