"""Recipes: functions that return an Experiment. `dforce train NAME` runs one; `module:function` names one of your own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from ..config import Experiment, replace
from .composition import composition, composition_transformer
from .forecasting import FORECASTING
from .imitation import IMITATION
from .maze2d import (
    maze2d_large,
    maze2d_large_gru,
    maze2d_medium,
    maze2d_medium_gru,
    maze2d_paper,
    maze2d_umaze,
    maze2d_umaze_gru,
)  # fmt: skip
from .video import VIDEO

RECIPES: dict[str, Callable[[], Experiment]] = {
    "composition": composition,
    "composition-transformer": composition_transformer,
    "maze2d-umaze": maze2d_umaze,
    "maze2d-medium": maze2d_medium,
    "maze2d-large": maze2d_large,
    "maze2d-umaze-gru": maze2d_umaze_gru,
    "maze2d-medium-gru": maze2d_medium_gru,
    "maze2d-large-gru": maze2d_large_gru,
    "maze2d-paper": maze2d_paper,
    **FORECASTING,
    **VIDEO,
    **IMITATION,
}


def full_sequence_baseline(experiment: Experiment) -> Experiment:
    """The same experiment trained as full-sequence diffusion: one level a sequence, pasts that are true."""
    return replace(experiment, train__draw="shared", train__imagined=0.0)


def next_token_baseline(experiment: Experiment) -> Experiment:
    """The same experiment trained as next-token diffusion with teacher forcing: a past that is always clean."""
    return replace(experiment, train__draw="teacher_forced", train__imagined=0.0)


def resolve(name: str) -> Callable[[], Experiment]:
    """A recipe by its name, or as `module:function` from the current folder or an installed package."""
    if name in RECIPES:
        return RECIPES[name]
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
