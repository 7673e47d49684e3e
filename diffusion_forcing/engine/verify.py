"""Whether a run's files are whole, fit together, and are those that its training left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..files import read_json, read_tensors
from ..model import DiffusionForcing
from ..serialization import check_numbers
from .checkpoint import CHECKPOINT
from .checkpoint import exists as has_checkpoint
from .config import Experiment
from .fingerprint import check_data
from .log import LOG, read_log
from .run import ABOUT, EVALUATION, HASHED, file_hash, load_run


def verify(folder: Path, backbone: nn.Module | str | None = None, classes: Sequence[type] | str = ()) -> Iterator[tuple[str, str | None]]:
    """Checks of a run, one after another: what was checked, and what does not fit, or None. backbone, classes: see `load_run`."""
    opened: list[tuple[Experiment, DiffusionForcing]] = []
    yield _check("config and weights", lambda: opened.append(load_run(folder, backbone, classes)))
    if opened:
        experiment, model = opened[0]
        if has_checkpoint(folder):
            yield _check("checkpoint", lambda: _check_checkpoint(folder, model.state_dict()))
        yield _check("data", lambda: check_data(folder, experiment.task.data_files))
    yield _check("log", lambda: _check_log(folder))
    if (folder / ABOUT).exists() and "history" in _object(folder / ABOUT):  # older runs keep none
        yield _check("hashes", lambda: _check_record(folder))
    if (folder / EVALUATION).exists():
        yield _check("evaluation", lambda: _object(folder / EVALUATION))


def _check(what: str, check: Callable[[], Any]) -> tuple[str, str | None]:
    try:
        check()
    except (ValueError, OSError, KeyError, TypeError) as error:
        return what, f"{error}" or type(error).__name__
    return what, None


def _check_checkpoint(folder: Path, expected: dict[str, Tensor]) -> None:
    """The average of a checkpoint is a model of the same shapes, and all of it is finite."""
    file = folder / CHECKPOINT
    tensors = read_tensors(file)
    check_numbers(tensors, tensors, file)
    average = {name.removeprefix("average.module."): tensor for name, tensor in tensors.items() if name.startswith("average.module.")}
    other = [name for name in average.keys() | expected.keys()
             if name not in average or name not in expected or average[name].shape != expected[name].shape]  # fmt: skip
    if other:
        raise ValueError(f"{file} is of another model than {folder / 'model'}: {len(other)} tensors differ in shape, such as {min(other)}")


def _check_log(folder: Path) -> None:
    """Every line of the log is read, and steps increase."""
    file = folder / LOG
    if not file.exists():
        return
    lines, written = read_log(file), len(file.read_text(errors="replace").splitlines())
    if len(lines) != written:
        raise ValueError(f"{file} is damaged from line {len(lines) + 1} of {written} on")
    steps = [line["step"] for line in lines]
    if steps != sorted(steps):
        raise ValueError(f"steps in {file} go back")


def _check_record(folder: Path) -> None:
    """Files are those whose hashes the run's history has of its last training."""
    history = _object(folder / ABOUT).get("history")
    last = history[-1] if isinstance(history, list) and history and isinstance(history[-1], dict) else {}
    hashes = last.get("sha256")
    if not isinstance(hashes, dict):
        raise ValueError(f"{folder / ABOUT} has no hashes: the training is at work or was killed; the same command goes on with it")
    for name in HASHED:
        if (folder / name).is_file() and file_hash(folder / name) != hashes.get(name):
            raise ValueError(f"{folder / name} is not the file that the training left at step {last.get('step')}")
        if name in hashes and not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing")


def _object(file: Path) -> dict[str, Any]:
    value = read_json(file)
    if not isinstance(value, dict):
        raise ValueError(f"{file} should hold names and values; got a {type(value).__name__}")
    return value
