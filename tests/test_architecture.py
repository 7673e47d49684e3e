"""The layout: who may import whom, what the mathematics needs, and what the package exports."""

import ast
import inspect
import itertools
import sys
from pathlib import Path

import pytest

import diffusion_forcing

PACKAGE = Path(diffusion_forcing.__file__).parent
DOMAINS = ("planning", "forecasting", "video", "imitation", "composition")
MATHEMATICS = {"torch", "einops", *sys.stdlib_module_names}
ON_DISK = {*MATHEMATICS, "safetensors", "huggingface_hub"}
SAVES = {"serialization", "files"}  # of the root: what reads and writes
OPTIONAL = {"h5py", "gymnasium", "pandas", "pyarrow", "gluonts", "av", "numba", "mujoco", "gym_pusht", "vizdoom", "wandb", "matplotlib",
            "mpl_toolkits", "tensorboard", "huggingface_hub", "labmaze", "PIL", "scipy", "rich", "torch", "tyro"}  # fmt: skip
EXTRAS = {"h5py", "gymnasium", "pandas", "pyarrow", "gluonts", "av", "numba", "mujoco", "gym_pusht", "vizdoom"}


def layer_of(module):
    """root, backbones, engine or a domain, of a module's name below the package."""
    first = module.split(".")[0]
    return first if first in ("backbones", "engine", *DOMAINS) else "root"


def name_of(file):
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}
MODULES = set(FILES)


def imports(module, file):
    """(where, what) of every import: the innermost function it stands in or None, and the whole name of a module of ours or of others."""
    found = []
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]

    def visit(node, function, typing):
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
            checking = typing or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
            if isinstance(child, ast.Import):
                found.extend((function, alias.name, checking) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                found.extend((function, what, checking) for what in targets(child))
            visit(child, inside, checking)

    def targets(node):
        if node.level == 0 and not (node.module or "").startswith("diffusion_forcing"):
            return [node.module]
        words = package.split(".") if package else []
        base = words[: len(words) - node.level + 1] if node.level else []
        base += (node.module or "").removeprefix("diffusion_forcing").strip(".").split(".") if node.module else []
        base = [word for word in base if word]
        whole = [[*base, alias.name] for alias in node.names]
        return ["ours:" + ".".join(words if ".".join(words) in MODULES else base) for words in whole]

    visit(ast.parse(file.read_text()), None, False)
    return found


def may(importer, imported):
    """Four rules: the root imports the root and the backbones, the backbones the root, the engine both, a domain all but other domains."""
    allowed = {
        "root": {"root", "backbones"},
        "backbones": {"root", "backbones"},
        "engine": {"root", "backbones", "engine"},
        **{domain: {"root", "backbones", "engine", domain} for domain in DOMAINS},
    }
    return imported in allowed[importer]


@pytest.mark.parametrize("module", [name for name in FILES if name not in ("__main__",)])
def test_the_layers_are_kept(module):
    ours = {what.removeprefix("ours:") for _, what, _ in imports(module, FILES[module]) if what.startswith("ours:")}
    wrong = {what for what in ours if not may(layer_of(module), layer_of(what))}
    assert not wrong, f"{module} ({layer_of(module)}) imports {wrong}"


def needs_an_extra(module):
    """Whether a module cannot be imported without an optional dependency: it, or one of ours that it imports, has one at its top."""
    top = [what for function, what, typing in imports(module, FILES[module]) if function is None and not typing]
    ours = {what.removeprefix("ours:") for what in top if what.startswith("ours:")} - {module}
    return any(what.split(".")[0] in EXTRAS for what in top) or any(needs_an_extra(name) for name in ours if layer_of(name) in DOMAINS)


@pytest.mark.parametrize("module", FILES)
def test_no_import_hides_in_a_function(module):
    """But of optional dependencies, and of modules of the same domain that need one: any other would dodge a cycle."""
    hidden = [(function, what) for function, what, _ in imports(module, FILES[module]) if function is not None]
    own = {what for _, what in hidden if what.startswith("ours:") and layer_of(what[5:]) == layer_of(module) in DOMAINS}
    allowed = {what for what in own if needs_an_extra(what[5:])}
    assert not [(f, what) for f, what in hidden if what not in allowed and what.split(".")[0] not in OPTIONAL]


def test_no_module_is_part_of_an_import_cycle():
    graph = {
        name: {w.removeprefix("ours:") for _, w, _ in imports(name, file) if w.startswith("ours:")} - {name} for name, file in FILES.items()
    }
    remaining = dict(graph)
    while free := [name for name, needs in remaining.items() if not needs & remaining.keys()]:
        for name in free:
            del remaining[name]
    assert not remaining, f"modules that import each other, or a module that does: {sorted(remaining)}"


@pytest.mark.parametrize("module", [name for name in FILES if layer_of(name) in ("root", "backbones") and name not in ("", "__main__")])
def test_the_mathematics_imports_torch_einops_and_the_standard_library(module):
    others = {what.split(".")[0] for _, what, _ in imports(module, FILES[module]) if not what.startswith("ours:")}
    assert others <= (ON_DISK if module in SAVES else MATHEMATICS) | ({"numpy"} if module == "windows" else set())


def test_the_check_would_notice():
    """An import of each forbidden kind is seen as what it is."""
    source = PACKAGE / "engine" / "train.py"
    assert not may("root", "engine")
    assert not may("engine", "planning")
    assert not may("video", "planning")
    assert not {what.split(".")[0] for _, what, _ in imports("serialization", PACKAGE / "serialization.py")} <= MATHEMATICS
    assert {"ours:engine.config", "ours:files", "ours:serialization"} <= {what for _, what, _ in imports("engine.train", source)}


def test_the_strings_in_tables_lead_somewhere():
    """What the root and the engine name by string exists."""
    from diffusion_forcing.codecs import CODECS
    from diffusion_forcing.engine.cli import COMMANDS
    from diffusion_forcing.engine.objective import OBJECTIVES
    from diffusion_forcing.engine.recipes import BASELINES, RECIPES
    from diffusion_forcing.engine.task import TASKS

    tables = CODECS, TASKS, OBJECTIVES, COMMANDS, BASELINES, {name: recipe.reference for name, recipe in RECIPES.items()}
    for reference in itertools.chain.from_iterable(table.values() for table in tables):
        module, _, name = reference.removeprefix("diffusion_forcing.").partition(":")
        tree = ast.parse(FILES[module].read_text())
        assert name in {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}, reference


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
    "rollout": ["model", "matrix", "length", "context", "cond", "past", "wrap", "generator"],
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
