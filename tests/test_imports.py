"""The mathematics needs torch, einops and the standard library only, and the package exports its contract."""

import ast
import inspect
import sys
from pathlib import Path

import pytest

import diffusion_forcing

PACKAGE = Path(diffusion_forcing.__file__).parent
CORE = ["schedule", "parameterization", "levels", "weighting", "matrix", "step", "sampling", "fast", "guidance", "likelihood", "joints",
        "smoothing", "checks", "model"]  # fmt: skip
FILES = [PACKAGE / f"{name}.py" for name in CORE] + sorted((PACKAGE / "backbones").glob("*.py"))
ALLOWED = {"torch", "einops", *sys.stdlib_module_names}


def imported(file):
    """Whole modules a file imports, wherever in it: those of other packages by name, ours by their path in the package."""
    others, ours = set(), set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            others |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            others.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = [*file.relative_to(PACKAGE).parts][: -node.level]
            ours |= {"/".join([*base, *name.split(".")]) for name in ([node.module] if node.module else [a.name for a in node.names])}
    return others, ours


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_the_mathematics_imports_torch_einops_and_the_standard_library(file):
    others, ours = imported(file)
    assert others <= ALLOWED, "a new dependency in the mathematics"
    known = {*CORE, "backbones", *(f"backbones/{path.stem}" for path in (PACKAGE / "backbones").glob("*.py"))}
    assert ours <= known | ({"pretrained"} if file.stem == "model" else set()), "the mathematics knows nothing of training"


def test_the_check_would_notice(tmp_path):
    others, _ = imported(PACKAGE / "pretrained.py")
    assert not others <= ALLOWED
    _, ours = imported(PACKAGE / "train.py")
    assert {"config", "data/sequences", "model", "checkpoint"} <= ours


CONTRACT = {
    "NoiseSchedule": ["alpha_bar"],
    "linear": ["levels"],
    "cosine": ["levels"],
    "sigmoid": ["levels"],
    "Prediction": ["x0", "eps", "grad"],
    "Backbone": [],
    "DiffusionForcing": ["backbone", "schedule", "parameterization", "weight"],
    "DiffusionForcing.forward": ["self", "x", "k", "cond", "noise"],
    "DiffusionForcing.predict": ["self", "x", "k", "cond", "state"],
    "DiffusionForcing.absorb": ["self", "x", "cond", "state", "level"],
    "DiffusionForcing.save_pretrained": ["self", "path"],
    "DiffusionForcing.from_pretrained": ["path"],
    "NoiseSchedule.alpha": ["self", "k"],
    "NoiseSchedule.sigma": ["self", "k"],
    "NoiseSchedule.snr": ["self", "k"],
    "NoiseSchedule.add_noise": ["self", "x", "k", "noise"],
    "NoiseSchedule.ladder": ["self", "steps"],
    "full_sequence": ["horizon", "ladder"],
    "autoregressive": ["horizon", "ladder"],
    "pyramid": ["horizon", "ladder", "slope"],
    "trapezoid": ["horizon", "ladder", "slope"],
    "pin": ["matrix", "tokens", "level"],
    "check_matrix": ["matrix", "levels"],
    "ddim_step": ["schedule", "x", "pred", "k", "k_next", "eta", "hold", "generator"],
    "sample": ["denoise", "schedule", "x", "matrix", "eta", "hold", "generator", "on_step"],
    "rollout": ["model", "matrix", "length", "context", "cond", "stabilization", "wrap", "generator"],
    "guide": ["denoise", "schedule", "reward", "scale", "draws", "form", "levels", "generator"],
}


@pytest.mark.parametrize("name", CONTRACT)
def test_the_contract_is_exported_at_the_top_of_the_package(name):
    """Each name is there and takes the arguments the contract gives it; those without a default first, in that order."""
    first, _, method = name.partition(".")
    assert first in diffusion_forcing.__all__
    value = getattr(diffusion_forcing, first)
    value = getattr(value, method) if method else value
    if name == "Backbone":
        return
    if name == "Prediction":
        assert list(value._fields) == CONTRACT[name]
        return
    parameters = dict(inspect.signature(value).parameters)
    if name == "rollout":  # hands its options on
        parameters = {**inspect.signature(diffusion_forcing.stream).parameters, **parameters}
    assert set(CONTRACT[name]) <= set(parameters)
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    assert positional == CONTRACT[name][: len(positional)]


def test_everything_exported_exists_and_is_sorted_out_once():
    assert len(set(diffusion_forcing.__all__)) == len(diffusion_forcing.__all__)
    for name in diffusion_forcing.__all__:
        assert hasattr(diffusion_forcing, name)
