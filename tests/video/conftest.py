"""A cache of its own for each test of video, small random features in the place of AlexNet's, and a model of small walks."""

import pytest
from oracles import seeded
from worlds import TASK, model_for

from diffusion_forcing.video.lpips import LPIPS


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def small_lpips(monkeypatch):
    monkeypatch.setattr(LPIPS, "pretrained", lambda: LPIPS((3, 3, 3, 3, 3), seeded(0)))


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """For TASK. Tests that change it copy it first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFORCE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return model_for(TASK)


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """Three clips of 16 frames to continue, and their actions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFORCE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return TASK.test_clips(3, 16)
