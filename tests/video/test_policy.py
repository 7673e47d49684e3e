"""The action policy: learns from clips which actions come next, and is trained once for each world."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles import seeded
from worlds import TASK, in_folder, quiet, write_clips

from diffusion_forcing.engine.pretrained import PRETRAINED
from diffusion_forcing.engine.run import load_run
from diffusion_forcing.video import policy as module
from diffusion_forcing.video.clips import ClipSet
from diffusion_forcing.video.policy import AHEAD, CODES, PX, ActionPolicy, PolicyExamples, fit_policy, k_medoids, load_policy, policy_frames


def signals(clips=24, length=24, px=8):
    """Clips in which frames determine actions: a bright frame is followed by a step to the right, a dark one to the left."""
    rng = np.random.default_rng(0)
    bright = rng.random((clips, length)) < 0.5
    frames = np.where(bright, 220, 30)[..., None, None, None] * np.ones((px, px, 3))
    actions = np.zeros((clips, length, 1), np.float32)
    actions[:, 1:, 0] = np.where(bright[:, :-1], 1.0, -1.0)
    starts = np.arange(clips) * length
    return ClipSet(
        frames.astype(np.uint8).reshape(-1, px, px, 3), starts, np.full(clips, length), actions.reshape(-1, 1),
        np.zeros((clips * length, 0), np.float32), tuple(map(str, range(clips))),
    )  # fmt: skip


def test_it_learns_the_actions_that_follow_frames():
    policy = fit_policy(signals(), 1, steps=120, batch=64)
    assert sorted(policy.codebook.flatten().tolist()) == [-1, 1]
    bright, dark = (np.full((200, 2, 8, 8, 3), value, np.uint8) for value in (220, 30))
    previous = np.zeros((200, 1, 1), np.float32)
    for frames, expected in ((bright, 1.0), (dark, -1.0)):
        chosen = policy.choose(frames, previous, 1, seeded(0))
        assert chosen.shape == (200, 1, 1)
        assert (chosen == expected).mean() > 0.95
    # Two tokens on, the frames say nothing: it chooses either action, not the mean of them.
    later = policy.choose(bright, previous, 4, seeded(0))[:, 3, 0]
    assert set(later.tolist()) == {-1.0, 1.0}
    assert abs(later.mean()) < 0.5


def test_training_is_reproducible_and_leaves_global_randomness_alone():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    one, other = (fit_policy(signals(), 2, steps=2).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("stack", "length"), [(1, 4), (2, 6), (4, 24), (4, 11)])
def test_examples_are_of_one_clip_and_in_order(stack, length):
    """Frames and actions number their place, so that places can be read off."""
    clips, px = 5, 8
    number = np.arange(clips * length)
    frames = np.repeat(number, px * px * 3).reshape(-1, px, px, 3).astype(np.uint8)
    starts = np.arange(clips) * length
    whole = ClipSet(frames, starts, np.full(clips, length), number[:, None].astype(np.float32), np.zeros((len(number), 0), np.float32), ())
    source = PolicyExamples(whole, stack, range(clips))
    pictures, before, after, offset, _ = source.read(source.draw(300, seeded(0)))
    first, last = ((pictures[:, at, 0, 0] + 1) * 127.5 for at in (0, 3))
    assert torch.allclose(last - first, torch.full_like(first, stack), atol=1e-3), "two frames, a token apart"
    assert torch.allclose(after[:, 0], last + 1 + stack * offset, atol=1e-3), "actions after the last frame, so many tokens on"
    assert torch.equal(before[:, 0] + stack, after[:, 0])
    assert torch.equal((first / length + 1e-4).floor(), (after[:, -1] / length).floor()), "never of two clips"
    assert offset.min() == 0
    assert offset.max() <= AHEAD - 1


def test_medoids_are_rows_from_all_clusters():
    rows = torch.cat([torch.randn(200, 2, generator=seeded(0)) * 0.1 + centre for centre in (-5.0, 0.0, 5.0)])
    medoids = k_medoids(rows, 3, seeded(1))
    assert all((rows == one).all(1).any() for one in medoids)
    assert {round(float(one[0]) / 5) for one in k_medoids(rows, 12, seeded(1))} == {-1, 0, 1}
    few = torch.tensor([[1.0], [2.0], [1.0]])
    assert k_medoids(few, 3, seeded(0)).tolist() == [[1.0], [2.0]], "no more than there are"


def test_it_is_trained_once_for_each_world():
    clips, calls = signals(), []

    def training_clips():
        calls.append(1)
        return clips, range(4)

    one, again = (load_policy(("world", 1), 2, training_clips) for _ in range(2))
    assert calls == [1]
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in one.state_dict().items())
    load_policy(("world", 2), 2, training_clips)
    assert len(calls) == 2


def test_clips_held_out_for_evaluation_are_not_trained_on(tmp_path, monkeypatch):
    task, which = in_folder(write_clips(tmp_path / "mine", frames=16)), []

    def fit(clips, stack, numbers, progress=None):
        which.extend(numbers)
        return fit_policy(clips, stack, numbers, steps=1)

    monkeypatch.setattr(module, "fit_policy", fit)
    task.policy(quiet)
    assert which == [0, 1, 3, 4, 5, 7]


def test_policy_frames_are_small_and_between_minus_one_and_one():
    frames = np.random.default_rng(0).integers(0, 256, (2, 2, 64, 64, 3)).astype(np.uint8)
    assert policy_frames(frames).shape == policy_frames(frames[:, :, :16, :16]).shape == (2, 6, PX, PX)
    assert policy_frames(frames).abs().max() <= 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: fit_policy(signals()._replace(actions=np.zeros((576, 0), np.float32)), 1), "no actions"),
        (lambda: fit_policy(signals(), 12), "26 frames or more"),
        (lambda: ActionPolicy(2, torch.zeros(3, 3)), "codebook"),
        (lambda: ActionPolicy(2, torch.zeros(3, 2)).choose(np.zeros((1, 1, 8, 8, 3), np.uint8), np.zeros((1, 2, 3))), "1 numbers"),
        (lambda: replace(TASK, action_conditioned=False, rollout=replace(TASK.rollout, actions="policy")), "--task.rollout.actions clip"),
    ],
)  # fmt: skip
def test_errors_say_what_is_wrong(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()


WORLDS = ["labyrinth", "voxels"]


@pytest.mark.parametrize("name", WORLDS)
def test_pretrained_worlds_have_their_policies(name, monkeypatch):
    task = load_run(PRETRAINED / name)[0].task
    assert task.rollout.actions == "policy"
    monkeypatch.setattr(module, "fit_policy", None)  # not trained here: that would need thousands of clips
    assert task.policy().codebook.shape == (CODES, 8)


def test_there_is_no_policy_without_its_world():
    assert len(list(module.POLICIES.glob("*.safetensors"))) == len(WORLDS)
