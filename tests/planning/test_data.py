"""The mazes' data: the collector, its cache, and public data sets."""

import os

import numpy as np
import pytest
from mazes import UMAZE, streams, write_public_layout

from diffusion_forcing.planning import data as store
from diffusion_forcing.planning.baselines import scripted
from diffusion_forcing.planning.data import Transitions, collect, interpolate_repeats, prepare, read
from diffusion_forcing.planning.envs import maze2d as world
from diffusion_forcing.planning.envs.maze2d import DT, GEAR, MASS, MAZES, rewards
from diffusion_forcing.planning.task import Maze2D


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own for each test."""
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# The collector. Figures of the published umaze data, with how far 100,000 transitions may be from them (four standard errors).


PUBLISHED = {
    "observation mean": ((1.93279, 2.37447, 0.00021, -0.00102), (0.06, 0.03, 0.04, 0.06)),
    "observation std": ((0.89972, 0.70932, 2.21286, 2.46817), (0.008, 0.016, 0.06, 0.05)),
    "action mean": ((0.00154, 0.00434), (0.004, 0.005)),
    "action std": ((0.70435, 0.75062), (0.006, 0.009)),
    "reward mean": ((0.08125,), (0.012,)),
    "changes of target a million": ((12460,), (1000,)),
}


def figures(data: Transitions) -> dict:
    observations, actions = (part.reshape(-1, part.shape[-1]).astype(float) for part in data[:2])
    repeated = (data.observations[:, 1:] == data.observations[:, :-1]).all(-1)
    return {
        "observation mean": observations.mean(0), "observation std": observations.std(0), "action mean": actions.mean(0),
        "action std": actions.std(0), "reward mean": rewards(data.observations[..., :2], UMAZE.goal).mean()[None],
        "changes of target a million": 1e6 * repeated.mean()[None],
    }  # fmt: skip


def deviations(data: Transitions) -> list[str]:
    """Names of the figures that are not as published."""
    names = []
    for name, value in figures(data).items():
        mean, tolerance = map(np.array, PUBLISHED[name])
        if (np.abs(value - mean) > tolerance).any():
            names.append(name)
    return names


def test_the_collectors_data_have_the_published_statistics():
    assert deviations(streams(100_000)) == []


def without_jitter(monkeypatch):
    advance = scripted.Controller._advance

    def straight(self, balls):
        uniform, self.uniform = self.uniform, lambda n: np.zeros((n, 2))
        advance(self, balls)
        self.uniform = uniform

    monkeypatch.setattr(scripted.Controller, "_advance", straight)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda patch: patch.setattr(store, "NOISE", 0.4),
        lambda patch: patch.setattr(scripted, "NEAR", 0.2),
        lambda patch: patch.setattr(world, "MAX_SPEED", 3.0),
        without_jitter,
    ],
    ids=["noise", "nearness", "speed", "waypoints"],
)
def test_the_statistics_of_a_wrong_collector_deviate(mistake, monkeypatch):
    """A measure that cannot fail measures nothing."""
    mistake(monkeypatch)
    assert deviations(collect(UMAZE, 100_000, 0))


def test_streams_are_uninterrupted():
    observations = streams().observations
    moved = np.linalg.norm(np.diff(observations[..., :2], axis=1), axis=-1)
    assert observations.shape == (64, 313, 4)
    assert moved.max() < 2 * DT * np.sqrt(2) * 5.3
    assert len({tuple(stream[0]) for stream in observations}) == 64, "each begins elsewhere"


def test_shapes_and_types_of_transitions():
    data = streams()
    assert [part.shape for part in data] == [(64, 313, 4), (64, 313, 2)]
    assert all(part.dtype == np.float32 for part in data)
    assert np.abs(data.actions).max() == 1
    assert collect(UMAZE, 5, 0).observations.shape == (5, 1, 4), "fewer transitions than streams"


def test_the_seed_of_the_collector_decides():
    one, same, other = (collect(UMAZE, 640, seed) for seed in (3, 3, 4))
    assert all((a == b).all() for a, b in zip(one, same, strict=True))
    assert (one.observations != other.observations).any()


def test_progress_is_reported_to_the_end():
    reports = []
    collect(MAZES["medium"], 64 * 250, 0, lambda what, done, of: reports.append((what, done, of)))
    assert reports == [("collecting data in the medium maze", 64 * n, 64 * 250) for n in (200, 250)]


# Repeated observations.


def path(*positions):
    """Observations (1, t, 4) of a ball at positions along a row, moving at ten times its position."""
    return np.array([[(x, 0, 10 * x, 0) for x in positions]], dtype=np.float32)


def test_repeats_are_interpolated_between_their_neighbours():
    np.testing.assert_allclose(interpolate_repeats(path(1, 1, 2, 3, 3, 5)), path(1, 1.5, 2, 3, 4, 5))
    untouched = path(1, 2, 3, 3)
    np.testing.assert_array_equal(interpolate_repeats(untouched), untouched, "nothing follows the last")
    still = path(1, 1, 2)
    interpolate_repeats(still)
    np.testing.assert_array_equal(still, path(1, 1, 2), "the argument is not changed")


def test_interpolated_observations_are_where_the_ball_was():
    """To a few millimetres, where the collector's observation was up to five centimetres behind."""
    data = streams()
    twice = np.argwhere((data.observations[:, 1:-2] == data.observations[:, :-3]).all(-1))
    runs = {(s, t) for s, t in twice.tolist()}
    alone = np.array([(s, t + 1) for s, t in twice.tolist() if not {(s, t - 1), (s, t + 1)} & runs])
    repaired = interpolate_repeats(data.observations)[alone[:, 0], alone[:, 1]]
    before, after = (data.observations[alone[:, 0], alone[:, 1] + shift] for shift in (-1, 1))
    velocity = before[:, 2:] + DT * (GEAR * data.actions[alone[:, 0], alone[:, 1] - 1] - before[:, 2:]) / (MASS + DT)
    error = np.abs(repaired[:, :2] - (before[:, :2] + DT * velocity))
    assert len(alone) > 100
    assert np.median(error) < 0.003
    assert np.abs(after - before).max() > 0.05


def test_no_repeats_are_left():
    np.testing.assert_allclose(interpolate_repeats(path(1, 1, 1, 4)), path(1, 2, 3, 4))
    repaired = interpolate_repeats(streams(100_000).observations)[:, :-5]  # repeats at a stream's end have no observation after them
    assert not (repaired[:, 1:] == repaired[:, :-1]).all(-1).any()


# Files.


def test_data_are_collected_once_and_cached(cache, monkeypatch):
    file = prepare(UMAZE, 640, 7)
    assert file == cache / "maze2d-umaze-640-7.npz"
    assert all((a == b).all() for a, b in zip(read(file), collect(UMAZE, 640, 7), strict=True))
    monkeypatch.setattr(store, "collect", None)
    assert prepare(UMAZE, 640, 7) == file
    assert [path.name for path in cache.iterdir()] == [file.name]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_no_file(error, cache, monkeypatch):
    def killed(file, **arrays):
        file.write(b"PK\x03\x04 half of it")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", killed)
        with pytest.raises(error):
            prepare(UMAZE, 640)
    assert list(cache.iterdir()) == []
    assert read(prepare(UMAZE, 640)).observations.shape == (64, 10, 4)


def test_two_processes_may_write_the_same_data_at_once(monkeypatch):
    """As the processes of torchrun do, or two trainings started together: another finishes while the first writes."""
    save, calls = np.savez, []

    def slow(file, **arrays):
        calls.append(file)
        if len(calls) == 1:
            with monkeypatch.context() as patch:
                patch.setattr(os, "getpid", lambda: 12345)
                prepare(UMAZE, 640)
        save(file, **arrays)

    monkeypatch.setattr(np, "savez", slow)
    assert read(prepare(UMAZE, 640)).observations.shape == (64, 10, 4)


@pytest.mark.parametrize("content", [b"", b"something else"])
def test_a_file_that_is_none_of_ours_is_named(content, tmp_path):
    (tmp_path / "data.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"data\.npz is damaged or not a cache of ours .* delete it and it is made again"):
        read(tmp_path / "data.npz")


def test_a_file_that_lacks_an_array_is_named(tmp_path):
    np.savez(tmp_path / "data.npz", observations=np.zeros((1, 2, 4)))
    with pytest.raises(ValueError, match="damaged or not a cache of ours"):
        read(tmp_path / "data.npz")


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_cache_is_named(damage):
    file = prepare(UMAZE, 640)
    whole = file.read_bytes()
    file.write_bytes(whole[:5000] if damage == "cut" else whole[:5000] + bytes(100) + whole[5100:])
    with pytest.raises(ValueError, match="is damaged or not a cache of ours"):
        read(file)


def test_a_missing_file_is_named_with_the_way_to_make_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.npz; `dforce data maze2d-umaze` makes one"):
        read(tmp_path / "nothing.npz")
    with pytest.raises(FileNotFoundError, match=r"nothing\.hdf5"):
        Maze2D("umaze", data_file=tmp_path / "nothing.hdf5").data()


@pytest.mark.parametrize("ending", ["hdf5", "h5"])
def test_public_data_are_one_stream_cut_at_timeouts_and_not_at_terminals(ending, tmp_path):
    file = tmp_path / f"data.{ending}"
    arrays = write_public_layout(file, timeouts=(39, 69))
    data = read(file)
    assert data.observations.shape == (3, 40, 4)
    np.testing.assert_array_equal(data.observations[0], arrays["observations"][:40])
    np.testing.assert_array_equal(data.actions[1, :30], arrays["actions"][40:70])
    assert all(np.isnan(part[1:, 30:]).all() for part in data)
    assert all(part.dtype == np.float32 for part in data)


def test_public_data_may_lack_timeouts(tmp_path):
    write_public_layout(tmp_path / "data.hdf5", without=("timeouts", "terminals"))
    assert read(tmp_path / "data.hdf5").observations.shape == (1, 100, 4)


@pytest.mark.parametrize("nested", [False, True])
def test_episodes_in_minaris_layout(nested, tmp_path):
    """An episode has one observation more than actions, and a goal beside it; they are read in the order of their numbers."""
    h5py = pytest.importorskip("h5py")
    data = collect(UMAZE, 64 * 31, 0)
    lengths = [20, 30, *[5] * 9]
    with h5py.File(tmp_path / "data.hdf5", "w") as file:
        for i, length in enumerate(lengths):
            group = file.create_group(f"episode_{i}")
            group["observations/observation" if nested else "observations"] = data.observations[i, : length + 1].astype(float)
            if nested:
                group["observations/desired_goal"] = np.zeros((length + 1, 2))
            group["actions"] = data.actions[i, :length]
    data_read = read(tmp_path / "data.hdf5")
    assert data_read.observations.shape == (11, 30, 4)
    assert np.isfinite(data_read.observations).all(-1).sum(1).tolist() == lengths
    np.testing.assert_array_equal(data_read.observations[10, :5], data.observations[10, :5])


def test_files_of_another_layout_are_named_with_what_they_hold(tmp_path):
    write_public_layout(tmp_path / "data.hdf5", without=("actions",))
    with pytest.raises(ValueError, match=r"data\.hdf5 has no 'actions'; it holds .*observations"):
        read(tmp_path / "data.hdf5")
    write_public_layout(tmp_path / "data.hdf5", observations=np.zeros((100, 8)))
    with pytest.raises(ValueError, match=r"observations of 4 numbers and actions of 2; got \[\(8, 2\)\]"):
        read(tmp_path / "data.hdf5")


def test_without_h5py_the_error_says_what_to_install(monkeypatch, tmp_path):
    write_public_layout(tmp_path / "data.hdf5")
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(ImportError, match=r"pip install 'diffusion_forcing\[planning\]'"):
        read(tmp_path / "data.hdf5")


def test_a_damaged_public_file_is_named(tmp_path):
    (tmp_path / "data.hdf5").write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"data\.hdf5"):
        read(tmp_path / "data.hdf5")
