"""Pretrained models: trained runs that come with the package, by name."""

from __future__ import annotations

from pathlib import Path

from ..files import write_atomically
from ..model import DiffusionForcing
from .config import Experiment
from .run import ABOUT, CONFIG, load_run

PRETRAINED = Path(__file__).resolve().parents[1] / "pretrained"
"""Folder of the pretrained models, one folder each: a run's config.json, run.json and model."""


def pretrained_names() -> list[str]:
    """Names of the pretrained models."""
    return sorted(path.parent.name for path in PRETRAINED.glob(f"*/{CONFIG}"))


def run_folder(name: str | Path) -> Path:
    """A run's folder, or that of a pretrained model by its name. A folder that exists goes before a name."""
    folder = Path(name)
    return PRETRAINED / str(name) if str(name) in pretrained_names() and not folder.exists() else folder


def model_folder(name: str | Path) -> Path:
    """The folder of a model's config.json and model.safetensors, by its run, by a pretrained model's name, or itself."""
    folder = run_folder(name)
    return folder / "model" if (folder / "model").is_dir() else folder


def load_pretrained(name: str, runs: Path = Path("runs")) -> tuple[Experiment, DiffusionForcing, Path]:
    """A pretrained model's experiment and weights, and the folder RUNS/NAME-pretrained for what is measured of it."""
    if name not in pretrained_names():
        raise FileNotFoundError(
            f"there is no pretrained model {name!r}; there are {', '.join(pretrained_names())}. "
            f"`dforce train {name}` trains one, if it is a recipe; `dforce list` shows them"
        )
    experiment, model = load_run(PRETRAINED / name)
    folder = runs / f"{name}-pretrained"
    folder.mkdir(parents=True, exist_ok=True)
    for file in (CONFIG, ABOUT):
        text = (PRETRAINED / name / file).read_text()
        write_atomically(folder / file, lambda path, text=text: Path(path).write_text(text))
    return experiment, model, folder
