"""A run: a folder with everything needed to repeat it."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from ..files import read_json, write_atomically
from ..model import DiffusionForcing
from ..serialization import WEIGHTS_FILE, read_config
from .checkpoint import CHECKPOINT
from .config import Experiment, load_experiment, replace, save_experiment, to_dict
from .lock import LOCK, locked
from .objective import OBJECTIVES, Objective
from .recipes import find, import_own
from .task import TASKS, Evaluation, Task

CONFIG, ABOUT, EVALUATION = "config.json", "run.json", "eval.json"
# A run may be resumed with another budget, on another machine or to be evaluated otherwise; anything else would be another experiment.
BUDGET = (
    "steps",
    "minutes",
    "keep_checkpoints",
    "patience",
    "validate_every",
    "checkpoint_every",
    "log_every",
    "device",
    "threads",
    "wandb",
    "quiet",
)
HISTORY = ("command", "started", "versions", "commit", "machine")
"""What run.json keeps of each time that a run was started or resumed."""
HASHED = (f"model/{CONFIG}", f"model/{WEIGHTS_FILE}", CHECKPOINT)
"""Files whose hashes it keeps when a training ends."""
FIT = "fit"
"""What stands for the recipe of a run that `fit` made."""


def open_run(folder: Path, recipe: str, experiment: Experiment, command: str, *, facts: dict[str, str] | None = None) -> None:
    """Make a run's folder, or check that an existing one is of the same experiment, to be resumed. facts: what run.json says besides."""
    config, differences = folder / CONFIG, list[str]()
    if config.exists():
        differences = _differences(_written(config, experiment), to_dict(experiment))
        free = {*(f"train.{name}" for name in BUDGET), *(f"task.{name}" for name in experiment.task.evaluation_options)}
        changed = [difference for difference in differences if difference.split(" ")[0] not in free]
        if changed and (folder / "checkpoint.safetensors").exists():
            way = "Train under another name (--name NAME), or set the old run aside with --fresh."
            if recipe == FIT:
                way = "Give another folder=..., or rename or delete this one."
            changed = ["other data" if difference.startswith("task.digest ") else difference for difference in changed]
            raise ValueError(f"{folder} holds a run with other options ({'; '.join(changed[:3])}). {way}")
    folder.mkdir(parents=True, exist_ok=True)
    now: dict[str, Any] = {**about(recipe, experiment, command), **(facts or {})}
    entry = {name: now[name] for name in HISTORY} | ({"changed": differences} if differences else {})
    _write_about(folder, {**now, "history": [*_history(folder), entry]})
    write_atomically(config, lambda path: save_experiment(experiment, Path(path)))


def set_aside(folder: Path) -> None:
    """Rename an existing run, in which no training is at work, to NAME.old1, or the next number that is free."""
    if (folder / CONFIG).exists():
        with locked(folder):
            aside = next(path for n in range(1, 10_000) if not (path := folder.with_name(f"{folder.name}.old{n}")).exists())
            folder.rename(aside)
            (aside / LOCK).unlink(missing_ok=True)


def end_run(folder: Path, **facts: Any) -> None:
    """Add to a run's history how its last training ended, and the hashes of what it left. Nothing where there is no history."""
    history = _history(folder)
    if not history:
        return
    hashes = {name: file_hash(folder / name) for name in HASHED if (folder / name).is_file()}
    _write_about(folder, {**read_json(folder / ABOUT), "history": [*history[:-1], {**history[-1], **facts, "sha256": hashes}]})


def file_hash(file: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(file, "rb") as opened:
        while part := opened.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def _history(folder: Path) -> list[dict[str, Any]]:
    """One entry for each time that a run was started or resumed, the first first."""
    about = read_json(folder / ABOUT) if (folder / ABOUT).is_file() else {}
    if not isinstance(about, dict):
        return []
    history = about.get("history")
    if isinstance(history, list):
        return [entry for entry in history if isinstance(entry, dict)]
    return [{name: about[name] for name in HISTORY if name in about}] if about else []


def _write_about(folder: Path, about: dict[str, Any]) -> None:
    write_atomically(folder / ABOUT, lambda path: Path(path).write_text(json.dumps(about, indent=2) + "\n"))


def _written(config: Path, experiment: Experiment) -> Any:
    """A run's options; those that did not exist when it began have their defaults."""
    try:
        return to_dict(load_experiment(config, (type(experiment.task), type(experiment.objective))))
    except (ValueError, TypeError):
        return read_json(config)


def about(recipe: str, experiment: Experiment, command: str) -> dict[str, Any]:
    """What was run, with which versions, where."""
    packages = ("diffusion_forcing", "torch", "numpy", "einops")
    return {
        "recipe": recipe,
        "doc": "Trained from Python." if recipe == FIT else find(recipe).about.split("\n")[0],
        "command": command,
        "seed": experiment.train.seed,
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": ", ".join(f"{name} {_version(name)}" for name in packages) + f", python {platform.python_version()}",
        "commit": _commit(Path(__file__).resolve().parents[1]),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def load_run(
    folder: str | Path, backbone: nn.Module | str | None = None, classes: Sequence[type] | str = ()
) -> tuple[Experiment, DiffusionForcing]:
    """A run's experiment and trained model. What a file names is looked up among our own and the arguments, never imported.

    backbone: where the run used a network of your own class, one such, which gets the saved weights, or where to import it from,
    "module:name" (see `own_backbone`). classes: where its task or objective is of a class of your own, these classes, or where to import
    the recipe from that names them, "module:function". Only text that a user typed may be passed for either.
    """
    folder = Path(folder)
    if (folder / WEIGHTS_FILE).exists() and (folder.parent / CONFIG).exists():
        raise FileNotFoundError(f"{folder} is the model of a run; give the run, {folder.parent}")
    if not (folder / CONFIG).exists():
        known = sorted(path.parent.name for path in Path("runs").glob(f"*/{CONFIG}"))
        hint = f"there are {', '.join(known)} under runs/" if known else "`dforce train RECIPE` makes one under runs/"
        raise FileNotFoundError(f"{folder} is not a run (it has no {CONFIG}); {hint}")
    known_classes = own_classes(classes) if isinstance(classes, str) else tuple(classes)
    _check_classes(folder, known_classes)
    experiment = load_experiment(folder / CONFIG, known_classes)
    if not (folder / "model").exists():
        raise FileNotFoundError(f"{folder} has no trained model yet; run its training to the end, or stop it with Ctrl-C to save one")
    if backbone is None and _network_of(folder).get("kind") == "custom":
        raise ValueError(f"{folder} uses a network of your own, and opening a run imports nothing that a file names: add --backbone "
                         f"{_said(folder, 'backbone', 'module:Class')} (that class, or a function without arguments that returns the "
                         "network), or call load_run(folder, backbone=...)")  # fmt: skip
    network = own_backbone(backbone, folder) if isinstance(backbone, str) else backbone
    return replace(experiment, task=experiment.task.within(folder)), DiffusionForcing.from_pretrained(folder / "model", backbone=network)


def own_classes(reference: str) -> tuple[type, ...]:
    """Tasks and objectives that the module of a recipe names, of the recipe that a user names as `module:function`. Calls nothing."""
    import_own(reference, "--recipe")
    named = vars(sys.modules[reference.partition(":")[0]]).values()
    return tuple(one for one in named if isinstance(one, type) and dataclasses.is_dataclass(one) and {Task, Objective} & {*one.__mro__})


def _check_classes(folder: Path, classes: tuple[type, ...]) -> None:
    """Refuse a run whose task or objective is neither ours nor among the classes."""
    config, names = read_json(folder / CONFIG), {cls.__name__ for cls in classes}
    for part, table in (("task", TASKS), ("objective", OBJECTIVES)):
        described = config.get(part) if isinstance(config, dict) else None
        kind = described.get("kind") if isinstance(described, dict) else None
        if isinstance(kind, str) and kind not in table and kind not in names:
            raise ValueError(
                f"the {part} of {folder} is of a class {kind[:80]!r}, which is none of {', '.join(sorted({*table, *names}))}, and opening "
                "a run imports nothing that a file names. If it is yours, add --recipe "
                f"{_said(folder, 'recipe', 'module:function')} (its module must name {kind[:80]}), or call load_run(folder, classes=[...])"
            )


def _said(folder: Path, what: str, otherwise: str) -> str:
    """What run.json says is to be typed, if it looks like "module:name" and like nothing else; never imported here."""
    about = read_json(folder / ABOUT) if (folder / ABOUT).is_file() else {}
    reference = about.get(what) if isinstance(about, dict) else None
    return reference if isinstance(reference, str) and re.fullmatch(r"\w[\w.]{0,200}:\w{1,100}", reference) else otherwise


def own_backbone(reference: str, folder: Path) -> nn.Module:
    """The network that a user names as `module:name`: a function without arguments, or a class, called with what the run's model says of
    its `config`.
    """
    made = import_own(reference, "--backbone")
    options = {name: value for name, value in _network_of(folder).items() if name != "kind"} if isinstance(made, type) else {}
    try:
        network = made(**options)
    except TypeError as error:
        raise ValueError(f"--backbone {reference}: {error}; name a function without arguments that returns the network, or a class whose "
                         "`config` holds its arguments")  from error  # fmt: skip
    if not isinstance(network, nn.Module):
        raise ValueError(f"--backbone {reference} gives a {type(network).__name__}; it must give a network, an nn.Module")
    return network


def _network_of(folder: Path) -> dict[str, Any]:
    """What a run's model says of its network; nothing where its file is missing or says no such thing."""
    file = folder / "model" / CONFIG
    network = read_config(file).get("backbone") if file.is_file() else None
    return network if isinstance(network, dict) else {}


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


def _commit(source: Path) -> str | None:
    """The commit of the source tree that a package (its folder) runs from, "+" where files of it changed since; None if no commit holds
    them, also where it is installed within somebody else's repository.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def git(*words: str) -> str:
        options: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "timeout": 5, "env": environment}
        return subprocess.run(["git", "-C", str(source), *words], **options).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None
