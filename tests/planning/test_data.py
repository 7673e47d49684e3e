"""The mazes' data: the collector, its files, frames and tokens; and the task from data to figures."""

import json
import os

import numpy as np
import pytest
import torch
from mazes import STACK, UMAZE, WIDTH, codec, departures, streams
from oracles import seeded
from small import small
from torch import nn

from diffusion_forcing import DiffusionForcing
from diffusion_forcing.codecs import Stack
from diffusion_forcing.engine.config import replace
from diffusion_forcing.engine.train import train
from diffusion_forcing.planning import data as store
from diffusion_forcing.planning.baselines import scripted
from diffusion_forcing.planning.data import (
    FrameWindows,
    Transitions,
    collect,
    flies_freely,
    frames_of,
    law_of_motion,
    mend,
    prepare,
    present_frames,
    read,
)
from diffusion_forcing.planning.envs import maze2d as world
from diffusion_forcing.planning.envs.maze2d import DT, GEAR, MASS, MAZES, step
from diffusion_forcing.planning.task import Maze2D

TINY = Maze2D("umaze", transitions=20_000)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own for each test."""
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def told(what, done, of):
    assert 0 < done <= of


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
    twice = (data.observations[:, 1:] == data.observations[:, :-1]).all(-1)
    return {
        "observation mean": observations.mean(0), "observation std": observations.std(0), "action mean": actions.mean(0),
        "action std": actions.std(0), "reward mean": data.rewards.mean()[None], "changes of target a million": 1e6 * twice.mean()[None],
    }  # fmt: skip


def astray(data: Transitions) -> list[str]:
    """Which figures are not as published."""
    return [
        name for name, found in figures(data).items() if (np.abs(found - np.array(PUBLISHED[name][0])) > np.array(PUBLISHED[name][1])).any()
    ]


def test_the_collectors_data_have_the_published_statistics():
    assert astray(streams(100_000)) == []


def without_jitter(monkeypatch):
    advance = scripted.Controller._advance

    def straight(self, who):
        drawn, self.uniform = self.uniform, lambda n: np.zeros((n, 2))
        advance(self, who)
        self.uniform = drawn

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
def test_a_wrong_collector_has_others(mistake, monkeypatch):
    """A measure that cannot fail measures nothing."""
    mistake(monkeypatch)
    assert astray(collect(UMAZE, 100_000, 0))


def test_streams_have_no_joints():
    observations = streams().observations
    moved = np.linalg.norm(np.diff(observations[..., :2], axis=1), axis=-1)
    assert observations.shape == (64, 313, 4)
    assert moved.max() < 2 * DT * np.sqrt(2) * 5.3
    assert len({tuple(stream[0]) for stream in observations}) == 64, "each begins elsewhere"


def test_shapes_types_and_rewards_of_what_is_collected():
    data = streams()
    assert [part.shape for part in data] == [(64, 313, 4), (64, 313, 2), (64, 313)]
    assert all(part.dtype == np.float32 for part in data)
    assert np.abs(data.actions).max() == 1
    near = np.linalg.norm(data.observations[..., :2] - UMAZE.goal, axis=-1) <= 0.5
    assert (data.rewards == near).all()
    assert collect(UMAZE, 5, 0).observations.shape == (5, 1, 4), "fewer transitions than streams"


def test_the_seed_of_the_collector_decides():
    one, same, other = (collect(UMAZE, 640, seed) for seed in (3, 3, 4))
    assert all((a == b).all() for a, b in zip(one, same, strict=True))
    assert (one.observations != other.observations).any()


def test_progress_is_told_up_to_the_end():
    seen = []
    collect(MAZES["medium"], 64 * 250, 0, lambda what, done, of: seen.append((what, done, of)))
    assert seen == [("walking through the medium maze", 64 * n, 64 * 250) for n in (200, 250)]


# Frames.


def walk(*positions):
    """Observations (1, t, 4) of a ball at positions along a row, moving at ten times its position."""
    return np.array([[(x, 0, 10 * x, 0) for x in positions]], dtype=np.float32)


def test_mend_puts_what_stands_twice_between_its_neighbours():
    np.testing.assert_allclose(mend(walk(1, 1, 2, 3, 3, 5)), walk(1, 1.5, 2, 3, 4, 5))
    untouched = walk(1, 2, 3, 3)
    np.testing.assert_array_equal(mend(untouched), untouched, "nothing follows the last")
    still = walk(1, 1, 2)
    mend(still)
    np.testing.assert_array_equal(still, walk(1, 1, 2), "what was given is left alone")


def test_mended_streams_are_where_the_ball_was():
    """To a few millimetres, where the collector's observation was up to five centimetres behind."""
    data = streams()
    twice = np.argwhere((data.observations[:, 1:-2] == data.observations[:, :-3]).all(-1))
    runs = {(s, t) for s, t in twice.tolist()}
    alone = np.array([(s, t + 1) for s, t in twice.tolist() if not {(s, t - 1), (s, t + 1)} & runs])
    mended = mend(data.observations)[alone[:, 0], alone[:, 1]]
    before, after = (data.observations[alone[:, 0], alone[:, 1] + shift] for shift in (-1, 1))
    velocity = before[:, 2:] + DT * (GEAR * data.actions[alone[:, 0], alone[:, 1] - 1] - before[:, 2:]) / (MASS + DT)
    error = np.abs(mended[:, :2] - (before[:, :2] + DT * velocity))
    assert len(alone) > 100
    assert np.median(error) < 0.003
    assert np.abs(after - before).max() > 0.05


def test_no_observation_stands_twice_after_mending():
    np.testing.assert_allclose(mend(walk(1, 1, 1, 4)), walk(1, 2, 3, 4))
    mended = mend(streams(100_000).observations)[:, :-5]  # what stands still at a stream's end has nothing after it to lie between
    assert not (mended[:, 1:] == mended[:, :-1]).all(-1).any()


@pytest.mark.parametrize("reward", [False, True])
def test_a_frame_is_an_action_and_what_is_seen_after_it(reward):
    observations = np.arange(40, dtype=np.float32).reshape(2, 5, 4)
    data = Transitions(observations, 100 + observations[..., :2], 200 + observations[..., 0])
    frames, before = frames_of(data, reward)
    assert frames.shape == (2, 4, 7 if reward else 6)
    assert torch.equal(before, torch.from_numpy(observations[:, :-1]))
    assert torch.equal(frames[..., -4:], torch.from_numpy(observations[:, 1:]))
    assert torch.equal(frames[..., :2], 100 + before[..., :2])
    if reward:
        assert torch.equal(frames[..., 2], 200 + frames[..., 3])


def test_a_present_coasts_to_the_observation_as_a_ball_would():
    seen = torch.tensor([[2.8, 1.8, 0.7, -0.4], [2.8, 2.8, 0.0, 0.0], [1.8, 2.8, -0.5, 0.0]], dtype=torch.float64)
    frames = present_frames(seen, STACK).numpy()
    assert frames.shape == (3, STACK, 6)
    np.testing.assert_array_equal(frames[:, -1, 2:], seen)
    position, velocity = frames[:, 0, 2:4], frames[:, 0, 4:]
    for t in range(1, STACK):
        position, velocity, touched = step(UMAZE, position, velocity, frames[:, t, :2])
        assert not touched.any()
        np.testing.assert_allclose(np.concatenate([position, velocity], axis=1), frames[:, t, 2:], atol=1e-13)


def test_a_present_with_a_reward_says_what_was_earned():
    seen = torch.tensor([[2.8, 1.8, 0.7, -0.4]])
    assert torch.equal(present_frames(seen, 3, reward=True)[..., [0, 1, 3, 4, 5, 6]], present_frames(seen, 3))
    assert (present_frames(seen, 3, reward=True)[..., 2] == 0).all()
    assert (present_frames(seen, 3, reward=True, earned=torch.ones(1))[..., 2] == 1).all()


# Tokens.


def free_flight(number, length):
    """Frames (n, t, 6) and first observations (n, 4) of balls pushed at random where there are no walls."""
    forces = torch.rand(number, length, 2, generator=seeded(0), dtype=torch.float64) * 2 - 1
    seen = [torch.randn(number, 4, generator=seeded(1), dtype=torch.float64)]
    for force in forces.unbind(1):
        velocity = seen[-1][:, 2:] + DT * (GEAR * force - seen[-1][:, 2:]) / (MASS + DT)
        seen.append(torch.cat([seen[-1][:, :2] + DT * velocity, velocity], dim=1))
    return torch.cat([forces, torch.stack(seen[1:], dim=1)], dim=-1).float(), seen[0].float()


def imagined(codec, number=300):
    """Frames that a token says, whatever it holds: (n, stack, 6) decoded from noise of the data's variance."""
    return codec.decode(torch.randn(number, 1, len(codec.variance), generator=seeded(2)) * codec.variance.sqrt())


def worst(frames):
    """The largest departure from free flight within tokens: of velocities in metres a second, of positions in metres."""
    return tuple(part.abs().max().item() for part in departures(frames[:, 1:], frames[:, 0, 2:]))


def test_a_token_of_ten_frames_holds_24_numbers():
    assert codec().variance.shape == (WIDTH,) == (24,)
    assert codec().encode(torch.zeros(2, 30, 6)).shape == (2, 3, 24)
    assert Maze2D("umaze", frame_stack=4).codec(frames_of(streams())[0]).variance.shape == (12,)
    one = Maze2D("umaze", frame_stack=1).codec(frames_of(streams())[0])
    x = torch.randn(2, 5, 6)
    torch.testing.assert_close(one.decode(one.encode(x)), x, atol=1e-4, rtol=0)


def test_tokens_lose_little_of_the_data():
    """What is lost are wall contacts: their forces are not among a token's numbers."""
    frames, _ = frames_of(streams(100_000))
    frames = frames[:, : frames.shape[1] // STACK * STACK]
    error = (codec().decode(codec().encode(frames)) - frames).abs()
    assert error[..., :2].mean() < 0.005
    assert error[..., 2:4].mean() < 0.02
    assert error[..., 4:].mean() < 0.04


def test_whatever_a_token_says_obeys_the_dynamics_if_its_data_do():
    fitted = TINY.codec(free_flight(400, STACK)[0])
    assert fitted.variance.shape == (24,)
    assert max(worst(imagined(fitted))) < 1e-4


def test_the_present_is_a_token_like_any_other():
    fitted = TINY.codec(free_flight(400, STACK)[0])
    seen = torch.tensor([[2.8, 1.8, 0.7, -0.4], [1.0, 3.1, -4.0, 2.0]])
    frames = present_frames(seen, STACK)
    torch.testing.assert_close(fitted.decode(fitted.encode(frames)), frames, atol=1e-3, rtol=0)


def test_joints_of_streams_are_no_tokens():
    flown, _ = free_flight(40, 10 * STACK + 3)
    assert max(worst(imagined(TINY.codec(flown)))) < 1e-4


def test_whatever_a_token_says_obeys_the_dynamics_though_data_touch_walls():
    assert max(worst(imagined(TINY.codec(frames_of(streams(100_000))[0])))) < 1e-3


def test_the_law_of_motion_is_found_among_contacts():
    frames, _ = frames_of(streams(100_000))
    law = law_of_motion(frames)
    share = DT / (MASS + DT)
    expected = torch.zeros(7, 4, dtype=torch.float64)
    for axis in range(2):
        expected[axis, axis] = 1
        expected[2 + axis, 2 + axis], expected[4 + axis, 2 + axis] = 1 - share, GEAR * share
        expected[2 + axis, axis], expected[4 + axis, axis] = DT * (1 - share), DT * GEAR * share
    torch.testing.assert_close(law, expected, atol=1e-5, rtol=0)
    share_free = flies_freely(frames, law).float().mean()
    assert 0.85 < share_free < 0.99
    assert flies_freely(free_flight(4, 50)[0], law).all()


def test_joints_hold_between_tokens_of_the_data_and_from_the_present_on():
    data = replace(TINY, transitions=100_000).data()
    x = data.train.read(data.train.every(200)).x
    broken = data.joints.broken(x).abs()
    assert broken[:, 0].median() < 1e-4
    assert broken[:, 1:].median() < 1e-4
    shuffled = data.joints.broken(x[:, torch.randperm(x.shape[1], generator=seeded(0))]).abs()
    assert shuffled.median() > 0.1


def test_with_rewards_a_token_holds_them_too():
    task = Maze2D("umaze", reward=True)
    frames, _ = frames_of(streams(100_000), reward=True)
    rewarding = task.codec(frames)
    assert 24 < len(rewarding.variance) <= 34
    frames = frames[:, : frames.shape[1] // STACK * STACK]
    assert (rewarding.decode(rewarding.encode(frames)) - frames)[..., 2].abs().max() < 0.05


# Windows.


class Bare(nn.Module):
    """Frames stacked and left as they are."""

    encode = Stack(STACK).encode


def numbered(lengths, frame=6):
    """Streams whose frames say where they are: 1000 * stream + time; the observation before is half a step earlier."""
    longest = max(lengths)
    place = 1000.0 * torch.arange(len(lengths))[:, None] + torch.arange(longest)
    place[torch.arange(longest) >= torch.tensor(lengths)[:, None]] = torch.nan
    before = torch.stack([place - 0.5, place - 0.5, torch.zeros_like(place), torch.zeros_like(place)], dim=-1)
    return place[..., None].expand(-1, -1, frame).clone(), before


def windows_of(lengths, tokens=4, short=0.0):
    return FrameWindows(*numbered(lengths), tokens, STACK, Bare(), (60,), short)


def check_windows(windows, drawn):
    """Frames follow one another within one stream, after a present that is the observation before them."""
    raw = windows.raw(drawn)
    tokens = windows.length_of(drawn)
    assert raw.shape == (len(drawn), tokens * STACK, 6)
    assert torch.isfinite(raw).all()
    first = 1000 * drawn[:, 0] + drawn[:, 1]
    assert torch.equal(raw[:, STACK:, 0], first[:, None] + torch.arange((tokens - 1) * STACK).float())
    assert torch.equal(raw[:, :STACK, 2], (first - 0.5)[:, None].expand(-1, STACK))
    batch = windows.read(drawn)
    assert torch.equal(batch.x, raw.reshape(len(drawn), tokens, 60))
    assert batch.cond.shape == (len(drawn), tokens, 0)
    assert batch.mask.all()


def test_windows_stay_within_a_stream_and_start_at_every_frame():
    windows = windows_of([40, 40])
    assert len(windows) == 2 * 11
    drawn = windows.draw(500, seeded(0))
    check_windows(windows, drawn)
    assert {tuple(row[:2]) for row in drawn.tolist()} == {(s, t) for s in (0, 1) for t in range(11)}
    assert set(drawn[:, 2].tolist()) == {3}


def test_streams_filled_up_with_nan_end_where_they_end():
    windows = windows_of([50, 12, 30, 35])
    assert len(windows) == 21 + 0 + 1 + 6
    drawn = windows.draw(800, seeded(0))
    check_windows(windows, drawn)
    assert {tuple(row[:2]) for row in drawn.tolist()} == {(0, t) for t in range(21)} | {(2, 0)} | {(3, t) for t in range(6)}
    counts = torch.bincount(drawn[:, 0], minlength=4) / 800
    torch.testing.assert_close(counts, torch.tensor([21, 0, 1, 6]) / 28, atol=0.05, rtol=0)


def test_windows_for_validation_follow_one_another():
    windows = windows_of([100, 95])
    every = windows.all()
    check_windows(windows, every)
    assert every[:, 1].tolist()[:3] == [0, 30, 60]
    assert every[:, 0].unique().tolist() == [0, 1]


def test_short_windows_are_pieces_each_with_a_present_of_its_own():
    windows = windows_of([400, 400], tokens=31, short=1.0)
    generator, lengths = seeded(0), []
    for _ in range(60):
        drawn = windows.draw(3, generator)
        check_windows(windows, drawn)
        tokens = windows.length_of(drawn) - 1
        pieces = 30 // tokens
        lengths.append(tokens)
        assert len(drawn) == 3 * pieces
        assert (drawn[:, 2] == tokens).all()
        apart = drawn[:, 1].view(3, pieces).diff(dim=1)
        assert (apart == tokens * STACK).all(), "one after another"
        assert (drawn[:, 0].view(3, pieces) == drawn[::pieces, :1]).all(), "of one stream"
    assert min(lengths) == 1
    assert max(lengths) > 15
    assert 3 <= np.median(lengths) <= 8, "log-uniform: the middle is the root of 30"


def test_a_share_of_the_batches_is_short():
    windows = windows_of([400], tokens=31, short=0.3)
    generator = seeded(0)
    whole = [windows.length_of(windows.draw(2, generator)) == 31 for _ in range(400)]
    assert np.mean(whole) == pytest.approx(0.7, abs=0.07)
    assert windows.length_of(windows.all()) == 31


def test_the_generator_of_windows_decides():
    windows = windows_of([400], tokens=31, short=0.5)
    one, same, other = ([windows.draw(4, generator) for _ in range(5)] for generator in map(seeded, (0, 0, 1)))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_windows_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="the present and at least one token to come; got 1 tokens"):
        windows_of([40], tokens=1)
    with pytest.raises(ValueError, match="30 frames are asked for, the longest has 29"):
        windows_of([29, 12])


# Files.


def test_data_are_made_once_and_kept(cache, monkeypatch):
    file = prepare(UMAZE, 640, 7)
    assert file == cache / "maze2d-umaze-640-7.npz"
    assert all((a == b).all() for a, b in zip(read(file), collect(UMAZE, 640, 7), strict=True))
    monkeypatch.setattr(store, "collect", None)
    assert prepare(UMAZE, 640, 7) == file
    assert [path.name for path in cache.iterdir()] == [file.name]


def test_the_cache_is_where_the_user_says(monkeypatch, tmp_path):
    assert store.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("DFORCE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.cache_folder() == tmp_path / "xdg" / "dforce"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.cache_folder().parts[-2:] == (".cache", "dforce")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_killed_making_leaves_nothing_and_is_made_again(error, cache, monkeypatch):
    def killed(file, **arrays):
        file.write(b"PK\x03\x04 half of it")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", killed)
        with pytest.raises(error):
            prepare(UMAZE, 640)
    assert list(cache.iterdir()) == []
    assert read(prepare(UMAZE, 640)).observations.shape == (64, 10, 4)


def test_two_may_make_the_same_data_at_once(monkeypatch):
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


def test_a_file_that_lacks_something_is_named(tmp_path):
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
    with pytest.raises(FileNotFoundError, match=r"no data in .*nothing\.npz; `dforce data maze2d-umaze` makes them"):
        read(tmp_path / "nothing.npz")
    with pytest.raises(FileNotFoundError, match=r"nothing\.hdf5"):
        Maze2D("umaze", data_file=tmp_path / "nothing.hdf5").data()


def in_the_public_layout(path, timeouts=(), without=(), length=100, **others):
    """A file of `length` transitions of one stream; returns what it holds."""
    h5py = pytest.importorskip("h5py")
    data = collect(UMAZE, 64 * length, 0)
    arrays = {
        "observations": data.observations[0], "actions": data.actions[0], "rewards": data.rewards[0],
        "terminals": np.arange(length) % 7 == 3, "timeouts": np.isin(np.arange(length), timeouts),
    }  # fmt: skip
    arrays |= others
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            if name not in without:
                file[name] = array
        file.create_group("metadata")
    return arrays


@pytest.mark.parametrize("ending", ["hdf5", "h5"])
def test_public_data_are_one_stream_cut_at_timeouts_and_not_at_terminals(ending, tmp_path):
    file = tmp_path / f"data.{ending}"
    arrays = in_the_public_layout(file, timeouts=(39, 69))
    data = read(file)
    assert data.observations.shape == (3, 40, 4)
    np.testing.assert_array_equal(data.observations[0], arrays["observations"][:40])
    np.testing.assert_array_equal(data.actions[1, :30], arrays["actions"][40:70])
    np.testing.assert_array_equal(data.rewards[2, :30], arrays["rewards"][70:])
    assert all(np.isnan(part[1:, 30:]).all() for part in data)
    assert all(part.dtype == np.float32 for part in data)


def test_public_data_may_lack_timeouts(tmp_path):
    in_the_public_layout(tmp_path / "data.hdf5", without=("timeouts", "terminals"))
    assert read(tmp_path / "data.hdf5").observations.shape == (1, 100, 4)


@pytest.mark.parametrize("nested", [False, True])
def test_episodes_in_the_other_public_layout(nested, tmp_path):
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
            group["actions"], group["rewards"] = data.actions[i, :length], data.rewards[i, :length]
    found = read(tmp_path / "data.hdf5")
    assert found.observations.shape == (11, 30, 4)
    assert np.isfinite(found.observations).all(-1).sum(1).tolist() == lengths
    np.testing.assert_array_equal(found.observations[10, :5], data.observations[10, :5])


def test_files_of_another_layout_are_named_with_what_they_hold(tmp_path):
    in_the_public_layout(tmp_path / "data.hdf5", without=("actions",))
    with pytest.raises(ValueError, match=r"data\.hdf5 has no 'actions'; it holds .*observations.*, where the layout is observations"):
        read(tmp_path / "data.hdf5")
    in_the_public_layout(tmp_path / "data.hdf5", observations=np.zeros((100, 8)))
    with pytest.raises(ValueError, match=r"observations of 4 numbers and actions of 2; got \[\(8, 2\)\]"):
        read(tmp_path / "data.hdf5")


def test_without_h5py_the_error_says_what_to_install(monkeypatch, tmp_path):
    in_the_public_layout(tmp_path / "data.hdf5")
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(ImportError, match=r"pip install 'diffusion_forcing\[planning\]'"):
        read(tmp_path / "data.hdf5")


def test_a_damaged_public_file_is_named(tmp_path):
    (tmp_path / "data.hdf5").write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"data\.hdf5"):
        read(tmp_path / "data.hdf5")


# The task.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"maze": "tiny"}, "there is no maze 'tiny'; choose from umaze, medium, large"),
        ({"policy": "genius"}, "policy must be one of agent, diffuser, diffuser_pd, scripted, random, mppi; got 'genius'"),
        ({"frame_stack": 0}, "a token holds at least one frame; got frame_stack=0"),
        ({"horizon": 5}, "a horizon is a token of 10 frames at least; got 5"),
        ({"batch": 0}, "batch counts episodes from 1; got 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Maze2D(**options)


def test_the_tokens_of_a_plan_cover_an_episode_or_the_horizon():
    assert [Maze2D(name).tokens for name in MAZES] == [30, 60, 80]
    assert Maze2D("umaze", horizon=55).tokens == 5
    assert Maze2D("umaze", frame_stack=7).tokens == 42


@pytest.mark.parametrize("reward", [False, True])
def test_windows_of_the_task_and_their_validation_are_other_streams(reward):
    data = replace(TINY, reward=reward, short=0.0).data()
    batch = data.train.read(data.train.draw(5, seeded(0)))
    width = len(data.codec.variance)
    assert batch.x.shape == (5, 31, width)
    assert data.train.event == data.valid.event == (width,)
    assert torch.isfinite(batch.x).all()
    assert (len(data.train._frames), len(data.valid._frames)) == (62, 2)
    every = data.train.read(data.train.draw(300, seeded(0))).x[:, 1:].reshape(-1, width)
    assert ((every**2).mean(0) / data.codec.variance)[:24].log().abs().max() < 0.5, "variances are what the codec says"


def test_too_few_transitions_for_a_window_are_named():
    with pytest.raises(ValueError, match="300 frames are asked for, the longest has 156"):
        Maze2D("umaze", transitions=10_000).data()


def test_data_of_ones_own_in_one_stream_serve_for_both(tmp_path):
    in_the_public_layout(tmp_path / "data.hdf5", length=2000)
    data = Maze2D("umaze", data_file=tmp_path / "data.hdf5", horizon=50).data()
    assert len(data.train) == len(data.valid) == 1999 - 50 + 1
    assert data.train.read(data.train.draw(2, seeded(0))).x.shape[2] == 24


def test_streams_kept_for_validation_are_long_enough(tmp_path):
    in_the_public_layout(tmp_path / "data.hdf5", length=2000, timeouts=(20,))
    assert len(Maze2D("umaze", data_file=tmp_path / "data.hdf5", horizon=50).data().valid)


def quick(recipe, **changes):
    """A recipe of the maze for a few steps, with plans that cost little."""
    plan = {"task__plan__steps": 2, "task__plan__scale": 0.02, "task__plan__near_scale": 0.02, "task__plan__lookahead": 3}
    return replace(small(recipe), task__transitions=20_000, train__steps=2, train__validate_every=1, **{**plan, **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders of two runs, and their experiments."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFORCE_CACHE", str(folder / "cache"))
        for recipe in ("maze2d-umaze", "maze2d-umaze-gru"):
            runs[recipe] = quick(recipe), train(quick(recipe), folder / recipe, quiet=True), folder / recipe
    return runs


@pytest.mark.parametrize("recipe", ["maze2d-umaze", "maze2d-umaze-gru"])
def test_recipes_train_save_and_load(recipe, trained):
    _, result, folder = trained[recipe]
    assert (result.status, result.step) == ("done", 2)
    assert np.isfinite([result.loss, result.valid_loss]).all()
    model = DiffusionForcing.from_pretrained(folder / "model")
    assert model.causal == recipe.endswith("gru")
    assert model.variance.shape == (24,)
    torch.testing.assert_close(model.variance, model.codec.variance)
    frames = torch.randn(1, 20, 6, generator=seeded(0))
    assert torch.isfinite(model.codec.decode(model.codec.encode(frames))).all()


@pytest.mark.parametrize("multi", [False, True])
def test_episodes_are_played_in_batches(multi, trained, tmp_path):
    experiment, _, folder = trained["maze2d-umaze"]
    model = DiffusionForcing.from_pretrained(folder / "model")
    task = replace(experiment.task, multi=multi, batch=2, policy="random")
    steps = []
    episodes, extra = task.episodes(model, 5, 3, lambda what, done, of: steps.append((done, of)))
    assert episodes.observations.shape == (5, 301, 4)
    assert episodes.rewards.shape == episodes.touched.shape == (5, 300)
    assert steps[-1] == (1500, 1500)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert extra == {}
    assert (len(np.unique(episodes.goals, axis=0)) == 5) == multi
    again, _ = task.episodes(model, 5, 3)
    np.testing.assert_array_equal(episodes.observations, again.observations)
    assert (task.episodes(model, 5, 4)[0].observations != again.observations).any()


def test_evaluation_measures_says_so_and_draws(trained, tmp_path):
    experiment, _, folder = trained["maze2d-umaze"]
    model = DiffusionForcing.from_pretrained(folder / "model")
    evaluation = experiment.task.evaluate(model, tmp_path, samples=2, seed=0, progress=told)
    names = {
        "score", "score_stderr", "success", "first_reach", "stay", "wall_contact", "episodes", "seconds_a_plan", "plans", "bad_plans",
        "given_up", "plan_error_median", "plan_error_mean",
    }  # fmt: skip
    assert set(evaluation.metrics) == names
    assert evaluation.metrics["episodes"] == 2
    assert evaluation.metrics["plans"] == 2 * 15
    scores, about = evaluation.tables
    assert scores.title == "Maze2D umaze, fixed goal: normalised score"
    assert scores.rows[0][0] == "here: Diffusion Forcing, own actions"
    assert ("published: Diffusion Forcing", "116.7") in scores.rows
    assert all(len(row) == 2 for table in evaluation.tables for row in table.rows)
    assert about.rows[0] == ("episodes", "2")
    assert set(evaluation.figures) == {"episodes.png", "failures.png", "plans.png", "episode.gif"}
    for name in evaluation.figures:
        assert (tmp_path / name).read_bytes().startswith(b"GIF8" if name.endswith("gif") else b"\x89PNG")
    json.dumps(evaluation.metrics)


def test_evaluation_of_a_baseline_of_many_goals(trained, tmp_path):
    experiment, _, folder = trained["maze2d-umaze"]
    model = DiffusionForcing.from_pretrained(folder / "model")
    task = replace(experiment.task, policy="scripted", multi=True)
    evaluation = task.evaluate(model, tmp_path, samples=3, seed=1, progress=told)
    assert evaluation.metrics["success"] == 1
    assert evaluation.metrics["score"] > 100
    assert "Multi2D" in evaluation.tables[0].title
    assert ("published: CQL", "-") in evaluation.tables[0].rows
    assert set(evaluation.figures) == {"episodes.png", "failures.png"}


@pytest.mark.parametrize("recipe", ["maze2d-umaze", "maze2d-umaze-gru"])
def test_sample_writes_plans_and_a_picture(recipe, trained, tmp_path):
    experiment, _, folder = trained[recipe]
    task = replace(experiment.task, plan__lookahead=None)
    files = task.sample(DiffusionForcing.from_pretrained(folder / "model"), tmp_path, samples=2, seed=0, progress=told)
    assert [file.name for file in files] == ["plans.npz", "plans.png"]
    arrays = np.load(files[0])
    assert {name: arrays[name].shape for name in arrays} == {"actions": (2, 300, 2), "observations": (2, 300, 4), "goals": (2, 2)}
    assert files[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("call", ["evaluate", "sample"])
def test_a_model_with_rewards_does_not_plan(call, tmp_path):
    experiment = quick("maze2d-umaze", task__reward=True)
    rewarding = experiment.task.codec(frames_of(streams(), reward=True)[0])
    model = experiment.model.build(len(rewarding.variance), 0, rewarding)
    with pytest.raises(ValueError, match="rewards among the tokens"):
        getattr(experiment.task, call)(model, tmp_path, samples=1, seed=0, progress=told)


def test_who_acts_is_an_option(trained):
    experiment, _, folder = trained["maze2d-umaze"]
    model = DiffusionForcing.from_pretrained(folder / "model")
    names = [type(replace(experiment.task, policy=policy).agent(model)).__name__ for policy in
             ("agent", "diffuser", "diffuser_pd", "scripted", "random", "mppi")]  # fmt: skip
    assert names == ["PlanningAgent", "Diffuser", "Diffuser", "ScriptedPolicy", "RandomPolicy", "MPPI"]
    causal = DiffusionForcing.from_pretrained(trained["maze2d-umaze-gru"][2] / "model")
    with pytest.raises(ValueError, match="Diffuser sees the whole sequence"):
        replace(experiment.task, policy="diffuser").agent(causal)
