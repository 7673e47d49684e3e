"""Demonstrations of the swap: made once, and replayed exactly by the simulator."""

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the swap is a Gymnasium environment")

from diffusion_forcing.imitation.demonstrations import Demonstrations
from diffusion_forcing.imitation.swap import data
from diffusion_forcing.imitation.swap.scene import CAMERAS, HOME


def test_demonstrations_are_made_once_and_the_same(tmp_path, monkeypatch):
    reports = []
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path / "one"))
    file = data.prepare_swap(3, px=16, seed=1, progress=lambda *report: reports.append(report), simulator="kinematic")
    assert [report[1:] for report in reports] == [(1, 3), (2, 3), (3, 3)]
    assert data.prepare_swap(3, px=16, seed=1, progress=lambda *report: reports.append(report), simulator="kinematic") == file
    assert len(reports) == 3, "not made again"
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path / "two"))
    assert data.prepare_swap(3, px=16, seed=1, simulator="kinematic").read_bytes() == file.read_bytes()
    assert data.prepare_swap(3, px=16, seed=2, simulator="kinematic").read_bytes() != file.read_bytes()
    made = data.load_swap(file)
    assert isinstance(made, Demonstrations)
    assert (made.every, made.fps) == (5, 20)
    for i in range(3):
        assert made.actions[i].shape == (600, 7)
        assert made.states[i].shape == (121, 7)
        assert made.actions[i].dtype == made.states[i].dtype == np.float32
        for camera in CAMERAS:
            assert made.images[camera][i].shape == (121, 16, 16, 3)
            assert made.images[camera][i].dtype == np.uint8
    np.testing.assert_allclose(made.states[0][0], HOME, atol=0.002)


def test_a_simulated_demonstration_replays(tmp_path, monkeypatch, rendered):
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path))
    made = data.load_swap(data.prepare_swap(1, px=64))
    observation, _ = rendered.reset(seed=data.DEMONSTRATION_SEEDS)
    for j in range(8):
        for camera in CAMERAS:
            np.testing.assert_array_equal(made.images[camera][0][j], observation[camera])
        np.testing.assert_array_equal(made.states[0][j], observation["pose"])
        observation = rendered.step_many(made.actions[0][j * data.FRAME_EVERY : (j + 1) * data.FRAME_EVERY])[0]


def test_bad_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="prepare_swap"):
        data.load_swap(tmp_path / "none.npz")
    (tmp_path / "bad.npz").write_bytes(b"no")
    with pytest.raises(ValueError, match="damaged or not a cache of ours"):
        data.load_swap(tmp_path / "bad.npz")
    with pytest.raises(ValueError, match="counts demonstrations from 1; got 0"):
        data.prepare_swap(0)
    with pytest.raises(ValueError, match="0 or more; got -1"):
        data.prepare_swap(1, seed=-1)
