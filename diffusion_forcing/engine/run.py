"""A run: a folder with everything needed to repeat it."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..files import write_atomically
from ..model import DiffusionForcing
from .config import Experiment, load_experiment, read_json, save_experiment, to_dict
from .recipes import resolve
from .task import TASKS, Evaluation

CONFIG, ABOUT, EVALUATION = "config.json", "run.json", "eval.json"
# A run may go on with another budget, on another machine or to be judged otherwise; anything else would be another experiment.
BUDGET = ("steps", "minutes", "keep", "patience", "validate_every", "checkpoint_every", "log_every", "device", "threads", "wandb")
MAY_CHANGE = {*(f"train.{name}" for name in BUDGET), "task.world.trials", "task.world.distractor_level", "task.world.extra_steps"}


def open_run(folder: Path, recipe: str, experiment: Experiment, command: str, *, fresh: bool = False) -> None:
    """Make a run's folder, or check that an existing one is of the same experiment, to go on with.

    fresh: set an existing run aside (renamed, not deleted) and start anew.
    """
    config = folder / CONFIG
    if config.exists() and fresh:
        aside = next(path for n in range(1, 10_000) if not (path := folder.with_name(f"{folder.name}.old{n}")).exists())
        folder.rename(aside)
    if config.exists():
        old, new = _written(config, experiment), to_dict(experiment)
        changed = [difference for difference in _differences(old, new) if difference.split(" ")[0] not in MAY_CHANGE]
        if changed and (folder / "checkpoint.safetensors").exists():
            raise ValueError(
                f"{folder} holds a run with other options ({'; '.join(changed[:3])}). Train under another name (--name NAME), or set "
                "the old run aside with --fresh."
            )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / ABOUT, lambda path: Path(path).write_text(json.dumps(about(recipe, experiment, command), indent=2) + "\n"))
    write_atomically(config, lambda path: save_experiment(experiment, Path(path)))


def _written(config: Path, experiment: Experiment) -> Any:
    """What a run's options are, where those that came up after it was begun have their defaults."""
    try:
        return to_dict(load_experiment(config, (type(experiment.task),)))
    except (ValueError, TypeError):
        return read_json(config)


def about(recipe: str, experiment: Experiment, command: str) -> dict[str, Any]:
    """What was run, with which versions, where."""
    packages = ("diffusion_forcing", "torch", "numpy", "einops")
    doc = (resolve(recipe).__doc__ or "").strip().split("\n")[0]
    return {
        "recipe": recipe,
        "doc": doc,
        "command": command,
        "seed": experiment.train.seed,
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": ", ".join(f"{name} {_version(name)}" for name in packages) + f", python {platform.python_version()}",
        "commit": _commit(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def load_run(folder: Path) -> tuple[Experiment, DiffusionForcing]:
    """A run's experiment and trained model."""
    if not (folder / CONFIG).exists():
        known = sorted(path.parent.name for path in Path("runs").glob(f"*/{CONFIG}"))
        hint = f"there are {', '.join(known)} under runs/" if known else "`dforce train RECIPE` makes one under runs/"
        raise FileNotFoundError(f"{folder} is not a run (it has no {CONFIG}); {hint}")
    experiment = load_experiment(folder / CONFIG, _tasks_of(folder))
    if not (folder / "model").exists():
        raise FileNotFoundError(f"{folder} has no trained model yet; run its training to the end, or stop it with Ctrl-C to save one")
    return experiment, DiffusionForcing.from_pretrained(folder / "model")


def _tasks_of(folder: Path) -> tuple[type, ...]:
    """The class of a run's task, if it is none of ours: found by its name in the module of the recipe, of which nothing is called."""
    config = read_json(folder / CONFIG)
    kind = config.get("task", {}).get("kind") if isinstance(config, dict) and isinstance(config.get("task"), dict) else None
    if kind in TASKS or not (folder / ABOUT).exists():
        return ()
    recipe = str(read_json(folder / ABOUT).get("recipe", ""))
    if ":" not in recipe:
        return ()
    resolve(recipe)
    module = sys.modules[recipe.partition(":")[0]]
    found = getattr(module, str(kind), None)
    if not isinstance(found, type):
        raise ValueError(f"the run {folder} is of a task {kind}, which {module.__name__} does not name; import it there")
    return (found,)


def save_evaluation(folder: Path, evaluation: Evaluation, **facts: Any) -> dict[str, Any]:
    """Write eval.json and return what it says."""
    data = {**asdict(evaluation), **facts}
    # JSON has no NaN and no infinity: what could not be measured is null.
    data["metrics"] = {name: value if math.isfinite(value) else None for name, value in evaluation.metrics.items()}
    write_atomically(folder / EVALUATION, lambda path: Path(path).write_text(json.dumps(data, indent=2) + "\n"))
    return data


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        return [d for key in keys for d in _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)]
    return [] if old == new else [f"{path} was {old!r}, now {new!r}"]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _commit() -> str | None:
    """The commit of the source tree this package runs from, if it is one."""
    here = Path(__file__).resolve().parent
    try:
        words = ["git", "-C", str(here), "rev-parse", "--short", "HEAD"]
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
