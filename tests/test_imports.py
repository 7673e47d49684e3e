"""What importing the package brings with it."""

import subprocess
import sys

import pytest

HEAVY = ("huggingface_hub", "matplotlib", "tyro", "rich", "tensorboard", "pandas", "pyarrow", "h5py", "gymnasium", "mujoco", "av", "numba")


def modules_after(code):
    """Top-level modules a new interpreter has loaded after running `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sorted(sys.modules))"], capture_output=True, text=True, check=True
    )
    return {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()}


def test_the_package_imports_neither_the_command_line_nor_optional_packages():
    assert not modules_after("import diffusion_forcing") & set(HEAVY)


@pytest.mark.parametrize("module", ["planning.agent", "imitation.agent"])
def test_an_agent_needs_no_command_line(module):
    assert not modules_after(f"import diffusion_forcing.{module}") & {"huggingface_hub", "matplotlib", "tyro"}
