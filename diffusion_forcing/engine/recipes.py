"""Recipes and baselines by name: `dforce train NAME`. `module:function` names a recipe of your own.

A recipe is a function that returns an Experiment, a baseline one from an Experiment to another. The tables hold references, so that a
domain is imported only when one of its recipes is used.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..registry import load
from .config import Experiment, replace
from .objective import Denoising


@dataclass(frozen=True)
class Recipe:
    """One data set's experiment.

    reference: its function, "package.module:name". about: one sentence. arguments: what the function is called with. backbones, stages:
    values of its arguments `backbone`, of which the first is the default, and `stage`, if it has these.
    """

    reference: str
    about: str
    arguments: tuple[str, ...] = ()
    backbones: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()


def _maze(name: str, about: str) -> Recipe:
    return Recipe("diffusion_forcing.planning.recipes:maze2d", about, (name,), ("transformer", "gru", "causal_transformer", "paper"))


def _series(name: str, steps: int, minutes: int) -> Recipe:
    about = f"The {name} series, forecast {steps} steps ahead. {minutes} minutes on two cores at most."
    return Recipe("diffusion_forcing.forecasting.recipes:series", about, (name,), ("gru", "transformer", "paper"))


def _video(name: str, about: str, backbones: tuple[str, ...] = (), stages: tuple[str, ...] = ()) -> Recipe:
    return Recipe(f"diffusion_forcing.video.recipes:{name}", about, (), backbones, stages)


def _imitation(name: str, about: str, backbones: tuple[str, ...] = ()) -> Recipe:
    return Recipe(f"diffusion_forcing.imitation.recipes:{name}", about, (), backbones)


RECIPES: dict[str, Recipe] = {
    "composition": Recipe(
        "diffusion_forcing.composition:composition",
        "Trajectories that cross: with memory a cross, without memory V shapes. 1 minute on two cores.",
        backbones=("gru", "transformer"),
    ),
    "maze2d-umaze": _maze("umaze", "The U-shaped maze, planned 300 steps ahead. 4 minutes on two cores."),
    "maze2d-medium": _maze("medium", "The medium maze, planned 600 steps ahead. 20 minutes on two cores."),
    "maze2d-large": _maze("large", "The large maze, planned 800 steps ahead. 20 minutes on two cores."),
    "maze2d-windy": Recipe(
        "diffusion_forcing.planning.recipes:windy",
        "A maze with random gusts beside a pit, planned by expected reward. 8 minutes on one core.",
        backbones=("gru", "causal_transformer"),
    ),
    "exchange": _series("exchange", 30, 3),
    "solar": _series("solar", 24, 15),
    "electricity": _series("electricity", 24, 15),
    "traffic": _series("traffic", 24, 20),
    "taxi": _series("taxi", 24, 20),
    "wikipedia": _series("wikipedia", 30, 20),
    "labyrinth": _video("labyrinth", "Walks through a textured maze, 64 px. 75 minutes on two cores, its decoder 15.",
                        ("transformer", "gru"), ("decoder",)),
    "voxels": _video("voxels", "Walks through a landscape of blocks, 64 px. 75 minutes on two cores, its decoder 15.", (), ("decoder",)),
    "doom": _video("doom", "Walks through mazes of Doom, drawn by ViZDoom, 64 px. 75 minutes on two cores."),
    "clips": _video("clips", "Clips of your own, --data FOLDER of mp4, webp, gif or npz. 75 minutes on two cores, its decoder 15.",
                    (), ("decoder",)),
    "dmlab": _video("dmlab", "The paper's model for DMLab, 64 px, 25 M parameters: --data FOLDER of the published clips. For a GPU."),
    "minecraft": _video("minecraft", "The paper's model for Minecraft, 128 px, 35 M parameters: --data FOLDER of its clips. For a GPU."),
    "swap": _imitation("swap", "A robot arm swaps two fruits by way of a third plate, observed by two cameras. 60 minutes on two cores.",
                       ("gru", "paper")),
    "imitation": _imitation("imitation", "Your own demonstrations, a LeRobot data set: --data FOLDER. 60 minutes on two cores."),
    "pusht": _imitation("pusht", "Push-T from states, 206 demonstrations by people: --data FILE.npz. 30 minutes on two cores."),
}  # fmt: skip
"""Every recipe by its name."""

BASELINES: dict[str, str] = {
    "full_sequence": "diffusion_forcing.engine.recipes:full_sequence",
    "next_token": "diffusion_forcing.engine.recipes:next_token",
    "diffuser": "diffusion_forcing.planning.recipes:diffuser",
    "timegrad": "diffusion_forcing.forecasting.recipes:timegrad",
}
"""Baselines by name: functions from an experiment to that of the baseline. They raise ValueError for experiments that have none such."""


def full_sequence(experiment: Experiment) -> Experiment:
    """Full-sequence diffusion: one noise level a sequence."""
    return _drawn(experiment, "shared")


def next_token(experiment: Experiment) -> Experiment:
    """Next-token diffusion with teacher forcing: each token is denoised after a clean past."""
    return _drawn(experiment, "teacher_forced")


def _drawn(experiment: Experiment, draw: str) -> Experiment:
    if not isinstance(experiment.objective, Denoising):
        raise ValueError(f"this baseline changes how noise levels are drawn, and {type(experiment.objective).__name__} draws none; leave "
                         "out --baseline")  # fmt: skip
    return replace(experiment, objective__draw=draw, objective__self_context=0.0)


def build(name: str, *, backbone: str | None = None, stage: str | None = None, baseline: str | None = None) -> Experiment:
    """The experiment of a recipe, or of a variant of it."""
    recipe, options = find(name), {}
    for option, value, choices in (("backbone", backbone, recipe.backbones), ("stage", stage, recipe.stages)):
        if value is not None and value not in choices:
            known = f"choose from {', '.join(choices)}" if choices else f"leave out --{option}"
            raise ValueError(f"{name} has no {option} {value!r}; {known}")
        if value is not None:
            options[option] = value
    experiment = load(recipe.reference)(*recipe.arguments, **options)
    if not isinstance(experiment, Experiment):
        raise ValueError(f"the recipe {name!r} must return an Experiment; it returned {type(experiment).__name__}")
    if baseline is not None and baseline not in BASELINES:
        raise ValueError(f"there is no baseline {baseline!r}; choose from {', '.join(BASELINES)}")
    return experiment if baseline is None else load(BASELINES[baseline])(experiment)


def run_name(name: str, *, backbone: str | None = None, stage: str | None = None, baseline: str | None = None) -> str:
    """The name of a run unless another is given: the recipe's, and what makes it a variant."""
    variant = None if backbone in find(name).backbones[:1] else backbone
    return "-".join(part for part in (name.replace(":", "."), variant, stage, baseline) if part)


def find(name: str) -> Recipe:
    """A recipe by its name, or as `module:function` from the current folder or an installed package."""
    if name in RECIPES:
        return RECIPES[name]
    if ":" not in name:
        raise ValueError(f"there is no recipe {name!r}; `dforce list` shows {', '.join(RECIPES)}; your own goes as module:function")
    function = import_own(name, "the recipe")
    return Recipe(name, (function.__doc__ or "").strip())


def import_own(name: str, what: str) -> Any:
    """The function or class that `module:name` stands for, from the current folder or an installed package. For names that a user types.

    what: what it is for, as a message says it.
    """
    module_name, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"cannot import {module_name!r} for {what} {name!r}: {error}; run from the folder that holds it") from error
    if not callable(vars(module).get(attribute)):
        raise ValueError(f"{module_name} has no function {attribute!r}")
    return vars(module)[attribute]
