"""What importing the package, and asking the command line for its recipes, brings with it."""

import subprocess
import sys

import pytest

HEAVY = ("huggingface_hub", "matplotlib", "tyro", "rich", "tensorboard", "pandas", "pyarrow", "h5py", "gymnasium", "mujoco", "av", "numba")


def modules_after(code):
    """Modules, and the packages they are of, that a new interpreter has loaded after running `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sorted(sys.modules))"], capture_output=True, text=True, check=True
    )
    names = done.stdout.splitlines()[-1].split()
    return {*names, *(name.split(".")[0] for name in names)}


def test_the_package_imports_neither_the_command_line_nor_optional_packages():
    assert not modules_after("import diffusion_forcing") & set(HEAVY)


@pytest.mark.parametrize("module", ["planning.agent", "imitation.agent"])
def test_an_agent_needs_no_command_line(module):
    assert not modules_after(f"import diffusion_forcing.{module}") & {"huggingface_hub", "matplotlib", "tyro"}


def test_the_list_of_recipes_imports_no_domain():
    """Their extras need not be there; and the import of sharded tensors takes half a second."""
    loaded = modules_after("from diffusion_forcing.engine.cli import main\ntry: main(['list'])\nexcept SystemExit: pass")
    domains = {f"diffusion_forcing.{name}" for name in ("planning", "forecasting", "video", "imitation", "composition")}
    assert not loaded & {*domains, "pandas", "huggingface_hub", "torch.distributed.tensor"}
