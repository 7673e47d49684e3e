"""List every public module on the pages of docs/reference: `python docs/make_reference.py`. Needed after a module was added or renamed.

The site's build reads names, signatures and docstrings from the source (mkdocstrings), so these pages hold nothing but module names.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "diffusion_forcing"
CORE = ("schedule", "parameterization", "weighting", "levels", "preconditioning", "model", "matrix", "sampler", "solver", "sampling",
        "orders", "observations", "guidance", "monte_carlo", "likelihood", "codecs", "windows")  # fmt: skip
FIRST = ("fitting", "agent", "forecaster", "objective", "rollout", "task", "config", "train")
"""Modules that lead the page of their package, where it has them."""
PAGES = {
    "core": ("Core", "The mathematics, in reading order. `from diffusion_forcing import ...` has the names in everyday use."),
    "backbones": ("Backbones", "Networks that read noisy tokens: vectors (`rnn`, `transformer`) or grids (`conv_rnn`, `space_time`)."),
    "engine": ("Engine", "Experiments, training, runs and the command line. It knows no domain."),
    "planning": ("Planning", "How it works: [planning](../domains/planning.md)."),
    "forecasting": ("Forecasting", "How it works: [forecasting](../domains/forecasting.md)."),
    "video": ("Video", "How it works: [video](../domains/video.md)."),
    "imitation": ("Imitation", "How it works: [imitation](../domains/imitation.md)."),
}


def modules(page: str) -> list[str]:
    """Dotted names of the modules of a page, in order."""
    files = PACKAGE.glob("*.py") if page == "core" else (PACKAGE / page).rglob("*.py")
    parts = [file.relative_to(PACKAGE).with_suffix("").parts for file in files if not file.stem.startswith("_")]
    lead = CORE if page == "core" else FIRST
    parts.sort(key=lambda p: (len(p), lead.index(p[-1]) if p[-1] in lead else len(lead), p))
    return [".".join((PACKAGE.name, *p)) for p in parts]


def text(page: str) -> str:
    """The page as it is written."""
    title, line = PAGES[page]
    return f"# {title}\n\n{line}\n\n" + "\n".join(f"::: {module}" for module in modules(page)) + "\n"


if __name__ == "__main__":
    for page in PAGES:
        (ROOT / "docs" / "reference" / f"{page}.md").write_text(text(page))
