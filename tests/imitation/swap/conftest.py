"""The swap with each simulator."""

import pytest

pytest.importorskip("gymnasium", reason="the swap is a Gymnasium environment")

from robots import model_for
from swaps import TASK, K

from diffusion_forcing.backbones import RNNConfig
from diffusion_forcing.imitation.swap.env import SwapEnv


@pytest.fixture(scope="module")
def physics():
    """With MuJoCo; nothing is rendered."""
    pytest.importorskip("diffusion_forcing.imitation.swap.franka", reason="MuJoCo does not start here", exc_type=ImportError)
    env = SwapEnv(px=16)
    yield env
    env.close()


@pytest.fixture(scope="module")
def rendered():
    """With MuJoCo and cameras."""
    pytest.importorskip("diffusion_forcing.imitation.swap.franka", reason="MuJoCo does not start here", exc_type=ImportError)
    env = SwapEnv(px=64, render_mode="rgb_array")
    try:
        env.simulator.render("front")
    except RuntimeError as error:
        pytest.skip(f"no renderer starts here: {error}")
    yield env
    env.close()


@pytest.fixture(scope="module")
def model():
    return model_for(TASK, RNNConfig(hidden=8), K)


@pytest.fixture
def kinematic():
    return SwapEnv(px=16, simulator="kinematic")
