"""Demonstrations: lengths that belong together, errors that name the episode, and the Push-T set as it is published."""

import os
from pathlib import Path

import numpy as np
import pytest

from diffusion_forcing.imitation.demonstrations import Demonstrations, read_pusht


def demonstrations(lengths=(6, 4), every=1, frames=None, a=2, s=5, px=None, seed=0, **options):
    """Episodes of these numbers of actions; frames: of each, else as many as fit."""
    rng = np.random.default_rng(seed)
    frames = frames or [-(-t // every) for t in lengths]
    images = {} if px is None else {name: [rng.integers(0, 256, (f, px, px, 3), np.uint8) for f in frames] for name in ("top", "wrist")}
    actions = [rng.standard_normal((t, a)).astype(np.float32) for t in lengths]
    return Demonstrations(actions, [rng.standard_normal((f, s)).astype(np.float32) for f in frames], images, every, fps=10, **options)


# Lengths.


@pytest.mark.parametrize("every", [1, 3, 8])
def test_lengths_that_fit_the_frames_are_taken_and_no_others(every):
    frames = 3
    for length in range(2, every * (frames + 1) + 1):
        if every * (frames - 2) < length <= every * frames:  # the last frame may come sooner than the others
            assert len(demonstrations([length], every, [frames])) == 1
        else:
            with pytest.raises(ValueError, match=f"to {every * 3} actions; episode 0 has {length}"):
                demonstrations([length], every, [frames])


def test_bad_episodes_are_refused_by_their_number():
    with pytest.raises(ValueError, match="2 actions at least; episode 1 has 1"):
        demonstrations([4, 1])
    with pytest.raises(ValueError, match="there are no demonstrations"):
        Demonstrations([], [], fps=10)
    with pytest.raises(ValueError, match="2 of actions and 1 of states"):
        Demonstrations([np.zeros((3, 2))] * 2, [np.zeros((3, 5))], fps=10)
    with pytest.raises(ValueError, match=r"episode 0 has the shape \(3,\)"):
        Demonstrations([np.zeros(3)], [np.zeros((3, 5))], fps=10)
    with pytest.raises(ValueError, match="states have one width; episode 0 has 5 and episode 1 has 4"):
        Demonstrations([np.zeros((3, 2))] * 2, [np.zeros((3, 5)), np.zeros((3, 4))], fps=10)
    with pytest.raises(ValueError, match="width 0"):
        Demonstrations([np.zeros((3, 0))], [np.zeros((3, 5))], fps=10)
    with pytest.raises(ValueError, match="no cameras"):
        Demonstrations([np.zeros((3, 2))], [np.zeros((3, 0))], fps=10)
    with pytest.raises(ValueError, match="every counts from 1"):
        demonstrations(every=0, frames=[6, 4])
    for fps in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="fps is a number of actions a second"):
            Demonstrations([np.zeros((3, 2))], [np.zeros((3, 5))], fps=fps)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_values_that_are_not_finite_are_refused_with_episode_and_step(value):
    actions = [np.zeros((4, 2)) for _ in range(3)]
    actions[2][1, 0] = value
    with pytest.raises(ValueError, match=r"actions are finite; episode 2 has \[(nan|inf), 0.0\] at 1"):
        Demonstrations(actions, [np.zeros((4, 5))] * 3, fps=10)
    with pytest.raises(ValueError, match="states are finite; episode 2 "):
        Demonstrations([np.zeros((4, 2))] * 3, actions, fps=10)


def test_images_that_do_not_fit_are_refused():
    good = [np.zeros((3, 8, 8, 3), np.uint8), np.zeros((3, 8, 8, 3), np.uint8)]
    rows = ([np.zeros((3, 2))] * 2, [np.zeros((3, 5))] * 2)
    for bad, words in (
        (good[:1], "there are 2, and camera 'top' has 1"),
        ([good[0], good[1] / 255], "images are uint8; camera 'top' of episode 1 has float64"),
        ([good[0], good[1][:2]], "camera 'top' of episode 1 has 2 for 3"),
        ([good[0], good[1][:, :6]], r"\(frames, px, px, 3\); camera 'top' of episode 1 has the shape \(3, 6, 8, 3\)"),
        ([good[0], good[1][:, :6, :6]], "camera 'top' of episode 0 has 8 px and camera 'top' of episode 1 has 6"),
    ):
        with pytest.raises(ValueError, match=words):
            Demonstrations(*rows, {"top": bad}, fps=10)
    with pytest.raises(ValueError, match="camera 'wrist' of episode 0 has 4, resize"):
        Demonstrations(*rows, {"top": good, "wrist": [g[:, :4, :4] for g in good]}, fps=10)
    assert Demonstrations([np.zeros((3, 2))] * 2, [np.zeros((3, 0))] * 2, {"top": good}, fps=10).state_width == 0


# Views.


def test_numbers_are_float32_and_the_description_counts():
    data = demonstrations([6, 4, 5], every=2, frames=[3, 3, 3], px=8, notes=("one was left out",))
    assert {array.dtype for array in data.actions + data.states} == {np.dtype(np.float32)}
    assert (len(data), data.steps, data.action_width, data.state_width) == (3, 15, 2, 5)
    assert (data.cameras, data.px) == (("top", "wrist"), 8)
    assert data.describe().startswith("3 episodes, 15 steps (4 to 6 each")
    assert data.describe().endswith("2 cameras of 8 px (top, wrist); 1 left out")
    assert demonstrations([2]).describe().startswith("1 episode, 2 steps")
    whole = Demonstrations([[[1], [2]]], [[[1], [2]]], fps=1)
    assert whole.actions[0].dtype == np.float32
    assert whole.px == 0


def test_a_subset_has_the_same_arrays_in_the_order_asked_for():
    data = demonstrations([6, 4, 5, 3], px=4)
    part = data.subset([2, 0])
    assert part.actions[0] is data.actions[2]
    assert part.images["wrist"][1] is data.images["wrist"][0]
    assert [len(actions) for actions in data.subset(slice(1, None, 2)).actions] == [4, 3]
    assert [len(actions) for actions in data.subset(np.random.default_rng(0).permutation(4)).actions] != []
    assert (part.every, part.fps) == (data.every, data.fps)
    with pytest.raises(IndexError, match="4 episodes, counted from 0; got 4"):
        data.subset([0, 4])
    with pytest.raises(IndexError, match="got -1"):
        data.subset([-1])
    with pytest.raises(ValueError, match="one episode at least"):
        data.subset([])
    with pytest.raises(ValueError, match="flatnonzero"):
        data.subset([True, False, True, False])


def test_joined_demonstrations_follow_each_other_and_have_one_format():
    data, more = demonstrations([6, 4], px=4), demonstrations([5], px=4, seed=1)
    both = data.joined(more)
    assert [len(actions) for actions in both.actions] == [6, 4, 5]
    assert both.images["top"][2] is more.images["top"][0]
    for other in (demonstrations([5], px=4, a=3), demonstrations([5]), demonstrations([6], every=2, px=4)):
        with pytest.raises(ValueError, match="agree in"):
            data.joined(other)


# Push-T.


def write(file, lengths=(5, 3), **other):
    rng = np.random.default_rng(0)
    total = sum(lengths)
    arrays = {
        "action": rng.uniform(0, 512, (total, 2)).astype(np.float32),
        "state": rng.uniform(0, 6, (total, 5)).astype(np.float32),
        "keypoint": np.zeros((total, 9, 2), np.float32),
        "episode_ends": np.cumsum(lengths),
        **other,
    }
    np.savez(file, **{name: array for name, array in arrays.items() if array is not None})
    return arrays


def test_the_push_t_set_is_cut_at_its_ends(tmp_path):
    arrays = write(tmp_path / "a.npz", (5, 3, 7))
    data = read_pusht(tmp_path / "a.npz")
    assert [len(actions) for actions in data.actions] == [len(states) for states in data.states] == [5, 3, 7]
    np.testing.assert_array_equal(np.concatenate(data.actions), arrays["action"])
    np.testing.assert_array_equal(data.states[1], arrays["state"][5:8])
    assert (data.every, data.fps, data.images) == (1, 10.0, {})


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"state": None}, "has no 'state'"),
        ({"episode_ends": np.array([5, 3, 8])}, "episode 1 would run from 5 to 3"),
        ({"episode_ends": np.array([0, 8])}, "episode 0 would run from 0 to 0"),
        ({"episode_ends": np.array([5, 7])}, "should end at 8.* got 7"),
        ({"episode_ends": np.array([5, 9])}, "should end at 8.* got 9"),
        ({"episode_ends": np.array([5.0, 8.0])}, r"whole numbers \(e,\); got float64"),
        ({"episode_ends": np.array([], int)}, r"of shape \(0,\)"),
        ({"action": np.zeros((7, 2))}, "7 actions and 8 states"),
        ({"action": np.zeros((8, 3))}, r"'action' of .* should be numbers \(n, 2\); got float64 of shape \(8, 3\)"),
        ({"state": np.array([["a"] * 5] * 8)}, r"'state' of .* should be numbers \(n, 5\)"),
        ({"state": np.full((8, 5), np.nan)}, "states are finite; episode 0"),
        ({"episode_ends": np.array([7, 8])}, "2 actions at least; episode 1 has 1"),
    ],
)
def test_a_bad_push_t_file_is_refused_with_the_place(other, words, tmp_path):
    write(tmp_path / "a.npz", **other)
    with pytest.raises(ValueError, match=words):
        read_pusht(tmp_path / "a.npz")


def test_files_that_are_no_push_t_set_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_pusht(tmp_path / "nowhere.npz")
    (tmp_path / "text.npz").write_text("action")
    np.save(tmp_path / "one.npy", np.zeros((3, 2)))
    write(tmp_path / "whole.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:-100])
    for name in ("text.npz", "one.npy", "cut.npz"):
        with pytest.raises(ValueError, match=r"is no \.npz, or damaged"):
            read_pusht(tmp_path / name)
    with pytest.raises(ValueError, match=r"is a folder, not an \.npz"):
        read_pusht(tmp_path)


@pytest.mark.skipif("DFORCE_PUSHT" not in os.environ, reason="DFORCE_PUSHT does not point to the Push-T set")
def test_the_published_set_has_206_episodes():
    data = read_pusht(Path(os.environ["DFORCE_PUSHT"]))
    assert (len(data), data.steps) == (206, 25650)
    assert all(actions.min() >= 0 and actions.max() <= 512 for actions in data.actions)
