"""Roll-outs: frames of their length, from their context, under their actions or a policy's, whatever the sampler."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles import seeded
from worlds import TASK, model_for, quiet

from diffusion_forcing.backbones import ConvRNNConfig
from diffusion_forcing.sampling import Context, Sampler
from diffusion_forcing.video.policy import ActionPolicy
from diffusion_forcing.video.rollout import RollOut


def task_with(sampler=None, rollout=None, context=None):
    return replace(
        TASK, sampler=replace(TASK.sampler, **(sampler or {})), rollout=replace(TASK.rollout, **(rollout or {})),
        context=replace(TASK.context, **(context or {})),
    )  # fmt: skip


def roll(model, length, context, actions, seed=0, task=TASK, **options):
    """Frames of a roll-out in one piece."""
    chunks = task.roll_out(model, length, context, actions, generator=seeded(seed), **options)
    return np.concatenate(list(chunks), axis=1)


SAMPLINGS = [
    task_with(), task_with(rollout={"horizon": 3}), task_with({"matrix": "pyramid", "eta": 1.0}, {"horizon": 2}),
    task_with(rollout={"horizon": 2, "rolling": True}),
]  # fmt: skip


@pytest.mark.parametrize("length", [1, 8])
@pytest.mark.parametrize("task", SAMPLINGS, ids=["token after token", "windows", "pyramid", "rolling"])
def test_a_roll_out_has_exactly_its_length(length, task, model, real):
    frames, actions = real
    one = roll(model, length, frames[:, :4], actions, task=task)
    assert one.shape == (3, length, 16, 16, 3)
    assert one.dtype == np.uint8
    assert one.std() > 1
    np.testing.assert_array_equal(one, roll(model, length, frames[:, :4], actions, task=task))
    assert (one != roll(model, length, frames[:, :4], actions, seed=1, task=task)).any()


def test_frames_come_as_they_are_sampled(model, real, monkeypatch):
    """A chunk a window; the first before the second is begun."""
    frames, actions = real
    calls = []
    predict = model.predict
    monkeypatch.setattr(model, "predict", lambda *arguments: calls.append(1) or predict(*arguments))
    chunks = TASK.roll_out(model, 8, frames[:, :2], actions, generator=seeded(0))
    assert not calls
    assert next(chunks).shape == (3, 2, 16, 16, 3)
    first = len(calls)
    assert first == TASK.sampler.steps
    assert [chunk.shape[1] for chunk in chunks] == [2, 2, 2]
    assert len(calls) == 4 * first


def test_a_longer_roll_out_begins_like_a_shorter_one(model, real):
    frames, actions = real
    np.testing.assert_array_equal(roll(model, 10, frames[:, :2], actions)[:, :4], roll(model, 4, frames[:, :2], actions))


def test_history_guidance_acts_where_there_is_a_history(model, real):
    def frames(scale, context=real[0][:, :4]):
        return roll(model, 4, context, real[1], task=task_with(rollout={"history_guidance": scale}))

    assert (frames(1.0) != frames(3.0)).any()
    assert (frames(1.0, None)[:, :2] == frames(3.0, None)[:, :2]).all(), "the first token has no history"
    assert (frames(1.0, None)[:, 2:] != frames(3.0, None)[:, 2:]).any()


def test_an_unconditional_roll_out_has_no_context(model, real):
    frames, actions = real
    one = roll(model, 6, None, actions)
    assert one.shape == (3, 6, 16, 16, 3)
    np.testing.assert_array_equal(one, roll(model, 6, frames[:, :0], actions))
    assert (one != roll(model, 6, frames[:, :2], actions)).any()


def test_each_clip_continues_its_own_context(model, real):
    frames, actions = real
    one, two = (roll(model, 4, context, actions) for context in (frames[:, :4], frames[[1, 0, 2], :4]))
    assert (one[:2] != two[:2]).any()
    np.testing.assert_array_equal(one[2], two[2])


def test_actions_act_when_they_come(model, real):
    """Actions are counted from the first frame of the context; those of the last token change the last token alone."""
    frames, actions = real
    other = actions.copy()
    other[:, 6:] += 3
    one, two = (roll(model, 6, frames[:, :2], some[:, :8]) for some in (actions, other))
    np.testing.assert_array_equal(one[:, :4], two[:, :4])
    assert (one[:, 4:] != two[:, 4:]).any()


def test_beyond_the_last_action_an_agent_rests(model, real):
    frames, actions = real
    still = np.concatenate([actions[:, :5], np.zeros((3, 3, 2), np.float32)], axis=1)
    np.testing.assert_array_equal(roll(model, 6, frames[:, :2], actions[:, :5]), roll(model, 6, frames[:, :2], still))


def test_a_single_frame_stands_still_for_a_token(model, real):
    frames, actions = real
    still = np.repeat(frames[:, :1], 2, axis=1)
    np.testing.assert_array_equal(roll(model, 4, frames[:, :1], actions), roll(model, 4, still, actions))


def test_a_context_must_fill_tokens_and_a_conditional_model_needs_actions(model, real):
    frames, actions = real
    with pytest.raises(ValueError, match="2 must divide 3"):
        roll(model, 4, frames[:, :3], actions)
    with pytest.raises(ValueError, match="conditions"):
        roll(model, 4, frames[:, :2], None)


def test_an_unconditional_model_ignores_actions(real):
    task = replace(TASK, action_conditioned=False)
    model = model_for(task)
    np.testing.assert_array_equal(*(roll(model, 4, real[0][:1, :2], some, task=task) for some in (None, real[1][:1])))


def test_infilled_frames_depend_on_both_ends(model, real):
    frames, actions = real
    sampler = TASK.frame_sampler(model)
    one, again, other = (
        sampler.infill(frames[:, :4], frames[:, 8:10], 2, actions=actions[:, :10], generator=seeded(seed), draws=3) for seed in (0, 0, 1)
    )
    assert one.shape == (3, 4, 16, 16, 3)
    assert one.dtype == np.uint8
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()


def test_compiled_frames_are_the_same(real, monkeypatch):
    """Compiled without a compiler, so that the test is quick: what is compiled, once, and what is then called."""
    compiled = []

    def compile_(function, **options):
        compiled.append(function)
        return lambda *arguments: function(*arguments)

    monkeypatch.setattr(torch, "compile", compile_)
    model, (frames, actions) = model_for(TASK), real
    plain, quick, _ = (roll(model, 6, frames[:, :2], actions, task=task_with(rollout={"compile": flag})) for flag in (False, True, True))
    assert compiled == [model.backbone.decode_step]
    np.testing.assert_array_equal(plain, quick)
    twin = copy.deepcopy(model)  # has weights of its own, which what was compiled does not know of
    torch.nn.init.zeros_(twin.backbone.proj_out.weight)
    assert (roll(twin, 2, frames[:, :2], actions) != plain[:, :2]).any()


def test_only_space_time_is_compiled(real):
    gru = model_for(TASK, ConvRNNConfig(latent=4, channels=8, scales=(1,), blocks=1))
    with pytest.raises(ValueError, match="only SpaceTime"):
        roll(gru, 2, real[0][:, :2], real[1], task=task_with(rollout={"compile": True}))


# Under a policy.


POLICY = task_with(rollout={"actions": "policy", "clip_tokens": 2})


def test_a_policy_takes_over_after_the_clips_tokens(model, real, monkeypatch):
    calls = []
    plain = ActionPolicy.choose

    def choose(self, frames, previous, tokens=1, generator=None):
        calls.append((frames.shape[1], previous.copy(), tokens))
        return plain(self, frames, previous, tokens, generator)

    monkeypatch.setattr(ActionPolicy, "choose", choose)
    policy, (frames, actions) = POLICY.policy(quiet), real

    def rolled(actions=actions, **options):
        return roll(model, 12, frames[:, :2], actions, task=POLICY, **options)

    acted, by_clip = rolled(policy=policy), rolled()
    assert np.array_equal(acted[:, :4], by_clip[:, :4]), "two tokens follow the clip"
    assert not np.array_equal(acted[:, 4:], by_clip[:, 4:])
    assert [tokens for _, _, tokens in calls] == [1] * 4
    assert np.array_equal(calls[0][1], actions[:, 4:6]), "it is given the last actions"
    assert np.array_equal(acted, rolled(policy=policy)), "the same by the same seed"
    other = actions.copy()
    other[:, 6:] += 1
    assert np.array_equal(acted, rolled(other, policy=policy)), "later actions of the clip do not count"


def test_actions_of_a_window_are_chosen_together(model, real, monkeypatch):
    task = replace(POLICY, rollout=replace(POLICY.rollout, horizon=3))
    policy, (frames, actions) = task.policy(quiet), real
    calls = []
    plain = ActionPolicy.choose
    monkeypatch.setattr(ActionPolicy, "choose", lambda self, f, p, n=1, g=None: calls.append(n) or plain(self, f, p, n, g))
    chunks = list(task.roll_out(model, 10, frames[:, :2], actions, generator=seeded(0), policy=policy))
    assert [chunk.shape[1] for chunk in chunks] == [6, 4], "a window that begins before the policy does is the clip's"
    assert calls == [2]
    # Without context it sees grey first, and a length that fills no token is cut.
    task = replace(task, rollout=replace(task.rollout, clip_tokens=0))
    assert roll(model, 5, None, None, task=task, batch=2, policy=policy).shape == (2, 5, 16, 16, 3)


# Options.


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"horizon": 0}, "horizon"),
        ({"prefix": -1}, "prefix"),
        ({"clip_tokens": -1}, "clip_tokens"),
        ({"history_guidance": -1.0}, "history_guidance"),
        ({"history_guidance": 2.0, "rolling": True}, "--task.rollout.history-guidance 1"),
        ({"actions": "policy", "rolling": True}, "--task.rollout.actions clip"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options, name):
    with pytest.raises(ValueError, match=name):
        RollOut(**options)


def test_a_stabilization_beyond_the_schedule_is_refused_before_the_first_frame(model, real):
    task = replace(TASK, context=Context(stabilization=101), sampler=Sampler(steps=2))
    with pytest.raises(ValueError, match="stabilization"):
        next(task.roll_out(model, 4, real[0][:1, :2], real[1][:1]))
