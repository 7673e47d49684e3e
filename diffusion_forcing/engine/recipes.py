"""Recipes and tasks by name. `dforce train NAME` runs a recipe; `module:function` names one of your own.

A recipe is a function that returns an Experiment. Both tables hold references, so that a domain is imported only when it is asked for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from ..registry import load
from .config import Experiment, replace

_MAZES = ("umaze", "medium", "large")
_SETS = ("exchange", "solar", "electricity", "traffic", "taxi", "wikipedia")
_VIDEOS = (
    "labyrinth", "labyrinth-painter", "labyrinth-gru", "voxels", "voxels-painter", "doom", "clips", "clips-painter", "dmlab", "minecraft",
)  # fmt: skip

RECIPES: dict[str, str] = {
    "composition": "diffusion_forcing.composition:COMPOSITION",
    "composition-transformer": "diffusion_forcing.composition:COMPOSITION",
    **dict.fromkeys((f"maze2d-{maze}{way}" for way in ("", "-gru") for maze in _MAZES), "diffusion_forcing.planning.recipes:PLANNING"),
    "maze2d-paper": "diffusion_forcing.planning.recipes:PLANNING",
    **dict.fromkeys(
        (name + way for way in ("", "-transformer", "-paper", "-timegrad") for name in _SETS),
        "diffusion_forcing.forecasting.recipes:FORECASTING",
    ),
    **dict.fromkeys(_VIDEOS, "diffusion_forcing.video.recipes:VIDEO"),
    **dict.fromkeys(("swap", "swap-paper", "imitation", "pusht"), "diffusion_forcing.imitation.recipes:IMITATION"),
}
"""Every recipe: its name, and the table of its domain that holds its function."""


def full_sequence_baseline(experiment: Experiment) -> Experiment:
    """The same experiment trained as full-sequence diffusion: one level a sequence, pasts that are true."""
    return replace(experiment, train__draw="shared", train__imagined=0.0)


def next_token_baseline(experiment: Experiment) -> Experiment:
    """The same experiment trained as next-token diffusion with teacher forcing: a past that is always clean."""
    return replace(experiment, train__draw="teacher_forced", train__imagined=0.0)


def resolve(name: str) -> Callable[[], Experiment]:
    """A recipe by its name, or as `module:function` from the current folder or an installed package."""
    if name in RECIPES:
        return load(RECIPES[name])[name]
    if ":" not in name:
        raise ValueError(f"there is no recipe {name!r}; `dforce list` shows {', '.join(RECIPES)}; your own goes as module:function")
    module_name, _, function_name = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"cannot import {module_name!r} for the recipe {name!r}: {error}; run from the folder that holds it") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{module_name} has no function {function_name!r}")
    return function
