"""Imitation: moments become tokens, one a part; an agent that remembers, doubts and imagines."""

from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import randomised
from small import pushes_file

from diffusion_forcing import DiffusionForcing
from diffusion_forcing.codecs import build_codec, describe_codec
from diffusion_forcing.engine.config import (
    ConvRNNConfig,
    Experiment,
    ModelConfig,
    RNNConfig,
    TrainConfig,
    TransformerConfig,
    save_experiment,
)
from diffusion_forcing.engine.recipes import resolve
from diffusion_forcing.engine.train import train
from diffusion_forcing.imitation import agent as imitation
from diffusion_forcing.imitation.agent import ActOptions, ImageTokenAgent, ImitationAgent, agent_for
from diffusion_forcing.imitation.demonstrations import Demonstrations
from diffusion_forcing.imitation.image_tokens import ImageTokens
from diffusion_forcing.imitation.pusht.task import Pushing
from diffusion_forcing.imitation.recipes import IMITATION
from diffusion_forcing.imitation.recorded import Recorded
from diffusion_forcing.imitation.task import Imitation
from diffusion_forcing.imitation.tokens import ModalityTokens
from diffusion_forcing.imitation.windows import timesteps_of
from diffusion_forcing.imitation.world import World
from diffusion_forcing.parameterization import with_x0
from diffusion_forcing.schedule import expand

K = 100
PX = 6


def demonstrations(episodes=5, frames=7, every=3, seed=0, cameras=("front", "hand"), state=2, px=PX):
    draw = np.random.default_rng(seed)
    return Demonstrations(
        [draw.normal(size=(every * (frames - 1), 2)) for _ in range(episodes)],
        [draw.normal(size=(frames, state)) for _ in range(episodes)],
        {name: [draw.integers(0, 256, (frames, px, px, 3), dtype=np.uint8) for _ in range(episodes)] for name in cameras},
        every,
        fps=20,
    )


@dataclass(frozen=True)
class Given(World):
    """A world of demonstrations that a test gives."""

    of: object
    held_out: int = 1

    def demonstrations(self, chunk, progress=None):
        return self.of()


TASK = Imitation(Given(demonstrations), chunk=3, components=8, window=7)


SMALL = RNNConfig(hidden=16)


def model_for(task, backbone=SMALL):
    data = task.data()
    model = ModelConfig(backbone, levels=K).build(data.train.event, data.train.cond_width, data.codec)
    randomised(model.backbone, seed=1)
    return model.eval()


@pytest.fixture(scope="module")
def model():
    return model_for(TASK)


def look(n=2, seed=0, px=PX, **changes):
    """What n robots see."""
    draw = np.random.default_rng(seed)
    cameras = {name: draw.integers(0, 256, (n, px, px, 3), dtype=np.uint8) for name in ("front", "hand")}
    return {**cameras, "state": draw.normal(size=(n, 2)).astype(np.float32), **changes}


def agent_of(model, n=2, **options):
    agent = ImitationAgent(model, ActOptions(steps=3, **options))
    agent.reset(n)
    return agent


# Moments.


def test_a_moment_holds_the_actions_that_led_to_what_is_seen():
    shown = demonstrations(1, frames=4, every=3)
    moments = timesteps_of(shown, 0, 3)
    assert list(moments) == ["actions", "front", "hand", "state"]
    assert moments["actions"].shape == (4, 3, 2)
    assert not moments["actions"][0].any()
    for j in range(1, 4):
        np.testing.assert_array_equal(moments["actions"][j], shown.actions[0][3 * (j - 1) : 3 * j])
    np.testing.assert_array_equal(moments["front"], shown.images["front"][0])
    np.testing.assert_array_equal(moments["state"], shown.states[0])


def test_chunks_may_span_frames_and_begin_later():
    shown = demonstrations(1, frames=7, every=1, cameras=())
    moments = timesteps_of(shown, 0, 2, offset=1)
    np.testing.assert_array_equal(moments["state"], shown.states[0][[1, 3, 5, 6]])  # the last chunk is one action long, and padded
    np.testing.assert_array_equal(moments["actions"][1:3].reshape(4, 2), shown.actions[0][1:5])
    np.testing.assert_array_equal(moments["actions"][3], shown.actions[0][[5, 5]])


def test_an_episode_that_ends_with_an_act_rests_at_its_end():
    shown = Demonstrations([np.arange(8.0).reshape(4, 2)], [np.arange(4.0)[:, None]], fps=10)
    moments = timesteps_of(shown, 0, 2)
    np.testing.assert_array_equal(moments["state"][:, 0], [0, 2, 3])
    np.testing.assert_array_equal(moments["actions"][2], [[4, 5], [6, 7]])


@pytest.mark.parametrize(
    ("chunk", "offset", "words"),
    [
        (4, 0, "a frame every 3 actions, so a chunk must be a multiple of that; got 4"),
        (3, 6, "has 7 frames; none is left from number 6 on"),
    ],
)
def test_chunks_that_do_not_fit_are_refused(chunk, offset, words):
    with pytest.raises(ValueError, match=words):
        timesteps_of(demonstrations(1), 0, chunk, offset)


def test_tokens_are_parts_in_turn_and_say_which_they_are():
    data = TASK.data()
    assert data.codec.names == ("actions", "front", "hand", "state")
    assert data.train.event == (8,)
    batch = data.train.read(torch.tensor([[0, 0]]))
    assert batch.x.shape == (1, 7 * 4 - 1, 8)
    assert batch.cond[0, :, :4].argmax(1).tolist() == ([1, 2, 3, 0] * 7)[:-1]
    assert batch.mask.all()
    first = data.codec.encode_modality("front", torch.as_tensor(demonstrations().images["front"][0][:1])[None])
    torch.testing.assert_close(batch.x[0, 0], first[0, 0])
    assert not batch.x[0, 2, 2:].any()  # a state has two numbers, the rest of its token is empty
    assert len(data.train) == 4
    assert len(data.valid) == 1


def test_tokens_are_told_what_was_done_last():
    data, shown = TASK.data(), demonstrations()
    told = data.train.read(torch.tensor([[0, 0]])).cond[0, :, 4:]
    start = np.mean([one[0] for one in shown.actions[:4]], axis=0)  # what counts as done before the first look, and the actions after it
    units = torch.as_tensor(np.concatenate(shown.actions[:4])).std(0)
    last = torch.as_tensor(np.concatenate([start[None], shown.actions[0][2::3]]))  # of each chunk
    for j in range(6):
        assert (told[4 * j : 4 * j + 4] == told[4 * j]).all()
        difference = (told[4 * j] - told[4]) * units
        torch.testing.assert_close(difference, last[j] - last[1], atol=1e-4, rtol=1e-3)


def test_an_agent_knows_what_it_did_last(model):
    agent = agent_of(model)
    start = agent.codec.initial_action.expand(2, -1)
    assert torch.equal(agent._last, start)
    done = np.random.default_rng(0).normal(size=(2, 3, 2)).astype(np.float32)
    agent.act(look(), executed=done)
    assert torch.equal(agent._last, torch.as_tensor(done[:, -1]))
    decided = agent.act(look())
    assert torch.equal(agent._last, torch.as_tensor(decided[:, -1]))
    agent.reset(2)
    assert torch.equal(agent._last, start)


def test_knowing_nothing_is_going_on_as_before(model):
    """A chunk of actions is told by how it differs from the last one done."""
    codec = model.codec
    actions = torch.as_tensor(demonstrations().actions[0][:18]).reshape(1, 6, 3, 2)
    moved = codec.encode_actions(actions + 5, actions[:, :, 0] + 5)
    torch.testing.assert_close(codec.encode_actions(actions, actions[:, :, 0]), moved, atol=1e-4, rtol=1e-4)
    last = torch.tensor([[[3.0, -4.0]]])
    mean = codec.decode_modality("actions", torch.zeros(1, 1, codec.width))
    torch.testing.assert_close(codec.decode_actions(torch.zeros(1, 1, codec.width), last), mean + last[:, :, None])


def test_each_offset_is_a_sequence_of_its_own():
    task = Imitation(Given(lambda: demonstrations(3, every=1, cameras=())), chunk=2, offsets=2, window=4)
    assert len(task.data().train) == 4
    assert len(task.data().valid) == 1


def test_there_are_no_more_offsets_than_looks_in_a_chunk():
    """One more would be the first again, without its first chunk."""
    for every, chunk, number in ((3, 3, 1), (3, 6, 2), (1, 2, 2)):
        shown = demonstrations(3, every=every, cameras=())
        data = Imitation(Given(lambda shown=shown: shown), chunk=chunk, offsets=9, window=4).data()
        assert len(data.train) == 2 * number


@pytest.mark.parametrize(("chunk", "every"), [(15, 5), (8, 4), (6, 3), (7, 1), (1, 1)])
def test_demonstrations_of_ones_own_are_seen_within_a_chunk(chunk, every, monkeypatch):
    asked = []
    monkeypatch.setattr("diffusion_forcing.imitation.recorded.read_lerobot", lambda *_, **options: asked.append(options["every"]))
    Recorded().demonstrations(chunk)
    assert asked == [every]


def test_windows_begin_with_a_look_and_end_with_the_actions_after_the_last():
    windows = changed(TASK, window=2).data().train  # of 7 looks each, with 6 chunks between them
    drawn = windows.draw(1000, torch.Generator().manual_seed(0))
    assert drawn[:, 1].unique().tolist() == [0, 4, 8, 12, 16]
    assert drawn[:, 1].bincount()[::4].min() > 150
    batch = windows.read(drawn)
    assert (batch.cond[..., :4].argmax(-1) == torch.tensor([1, 2, 3, 0, 1, 2, 3, 0])).all()
    assert batch.mask.all()
    assert (windows.all()[:, 1] % 4 == 0).all()


def test_windows_as_long_as_demonstrations_begin_where_these_do():
    for moments in (7, 8, 100):
        windows = changed(TASK, window=moments).data().train
        assert windows.length == 7 * 4 - 1  # nothing is done after the last look
        assert not windows.draw(50)[:, 1].any()
        assert windows.all().tolist() == [[i, 0] for i in range(4)]


@pytest.mark.parametrize("moments", [1, 2, 3])
def test_an_agent_that_forgets_decides_after_what_it_was_trained_on(moments, model, monkeypatch):
    windows = changed(TASK, window=moments).data().train
    kinds = windows.read(windows.draw(1)).cond[0, :, :4].argmax(1).tolist()
    heard, sample = [], ImitationAgent._sample

    def listening(self, modality):
        heard.append([*self._past.recent[2][0, :, :4].argmax(1).tolist(), modality])
        return sample(self, modality)

    monkeypatch.setattr(ImitationAgent, "_sample", listening)
    agent = agent_of(model, memory=moments)
    for seed in range(5):
        agent.act(look(seed=seed))
    assert heard[-1] == kinds


def test_an_agent_that_sees_one_look_is_trained(tmp_path):
    task = changed(TASK, window=1, acting=ActOptions(steps=2, memory=1))
    training = TrainConfig(steps=3, batch=4, draw="noisy_context", validate_every=2, log_every=2)
    train(Experiment(task, ModelConfig(SMALL, levels=K), training), tmp_path, quiet=True)
    agent = agent_for(DiffusionForcing.from_pretrained(tmp_path / "model"), task.acting)
    agent.reset(2)
    assert np.isfinite([agent.act(look(seed=seed)) for seed in range(3)]).all()


def test_training_goes_on_from_another_agents_model_in_its_tokens(tmp_path):
    training = TrainConfig(steps=2, batch=4, draw="noisy_context", validate_every=2, log_every=2)
    train(Experiment(TASK, ModelConfig(SMALL, levels=K), training), tmp_path / "first", quiet=True)
    on = changed(training, steps=1, lr=1e-12, init=str(tmp_path / "first"))
    train(Experiment(changed(TASK, whiten=1.0), ModelConfig(SMALL, levels=K), on), tmp_path / "second", quiet=True)
    first, second = (DiffusionForcing.from_pretrained(tmp_path / run / "model").state_dict() for run in ("first", "second"))
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, atol=1e-6, rtol=0)


def test_no_mirror_for_demonstrations_of_ones_own():
    with pytest.raises(ValueError, match="mirror=False"):
        Imitation(Recorded(), mirror=True)


def test_a_demonstration_shorter_than_a_chunk_is_one_chunk():
    draw = np.random.default_rng(0)
    short = [Demonstrations([draw.normal(size=(2, 1)) for _ in range(4)], [draw.normal(size=(1, 2)) for _ in range(4)], every=2, fps=10)]
    data = Imitation(Given(lambda: short[0]), chunk=4, window=3).data()
    assert len(data.train) == 3
    assert data.train.read(data.train.all()[:1]).mask.sum() == 3  # a look, a chunk, and a look


def test_parts_come_back():
    """With all directions kept, encoding loses nothing but what never varied."""
    draw = torch.Generator().manual_seed(0)
    parts = {
        "actions": torch.randn(50, 3, 2, generator=draw),
        "state": torch.randn(50, 4, generator=draw) * torch.tensor([1.0, 10, 1e3, 0]),
    }
    codec = ModalityTokens.fit([parts], {})
    assert codec.components == {"actions": 6, "state": 3}
    moments = {name: part[None] for name, part in parts.items()}
    tokens = codec.encode(moments)
    assert tokens.shape == (1, 100, 6)
    assert tokens[0, ::2].var(0).mean() == pytest.approx(1, rel=0.05)
    back = codec.decode(tokens)
    torch.testing.assert_close(back["actions"], moments["actions"], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(back["state"], moments["state"], atol=1e-2, rtol=1e-4)
    empty = build_codec(describe_codec(codec))
    empty.load_state_dict(codec.state_dict())
    torch.testing.assert_close(empty.encode(moments), tokens)


def test_few_directions_keep_what_varies_most():
    draw = torch.Generator().manual_seed(0)
    few = torch.randn(200, 3, generator=draw) @ torch.randn(3, 2000, generator=draw)
    parts = {"actions": torch.randn(200, 1, 2, generator=draw), "state": few}
    one, again = (ModalityTokens.fit([parts], {"state": 3}) for _ in range(2))
    torch.testing.assert_close(one.decode_modality("state", one.encode_modality("state", few[None])), few[None], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(one.encode_modality("state", few[None]), again.encode_modality("state", few[None]))


@pytest.mark.parametrize(
    ("parts", "options", "words"),
    [
        ({"state": torch.randn(9, 2)}, {}, "actions first, then at least one observation; got state"),
        ({"actions": torch.randn(9, 1, 2)}, {}, "actions first, then at least one observation; got actions"),
        ({"actions": torch.randn(9, 1, 2), "state": torch.ones(9, 2)}, {}, "state never vary"),
        ({"actions": torch.full((9, 1, 2), torch.nan), "state": torch.randn(9, 2)}, {}, "actions hold NaN"),
        ({"actions": torch.randn(9, 1, 2), "state": torch.randn(9, 2)}, {"whiten": 2}, "whiten is from 0"),
    ],
)
def test_parts_that_make_no_tokens_are_refused(parts, options, words):
    with pytest.raises(ValueError, match=words):
        ModalityTokens.fit([parts], {}, **options)


def test_all_demonstrations_held_back_leave_none():
    with pytest.raises(ValueError, match="5 demonstrations, of which 5 are held out, leave none to train on"):
        changed(TASK, world=Given(demonstrations, held_out=5)).data()


def test_an_angle_is_seen_as_cosine_and_sine_and_the_disc_from_the_block():
    seen = Pushing().features(np.array([[1.0, 2, 3, 5, np.pi / 2]]))
    np.testing.assert_allclose(seen, [[1, 2, 3, 5, 0, 1, -3, 2]], atol=1e-6)
    # Block and disc moved and turned together: the block sees the disc where it was.
    turn = np.array([[np.cos(0.7), -np.sin(0.7)], [np.sin(0.7), np.cos(0.7)]])
    disc, block = (turn @ place + [40, 60] for place in (np.array([1.0, 2]), np.array([3.0, 5])))
    moved = Pushing().features(np.array([[*disc, *block, np.pi / 2 + 0.7]]))
    np.testing.assert_allclose(moved[0, 6:], seen[0, 6:], atol=1e-5)


# The agent.


def test_actions_are_chunks_and_the_same_after_a_reset(model):
    agent = agent_of(model)
    one = [agent.act(look(seed=seed)) for seed in range(3)]
    assert one[0].shape == (2, 3, 2)
    assert np.isfinite(one).all()
    agent.reset(2)
    np.testing.assert_array_equal([agent.act(look(seed=seed)) for seed in range(3)], one)


def test_one_robot_needs_no_first_axis(model):
    alone = {name: part[0] for name, part in look(1).items()}
    np.testing.assert_array_equal(agent_of(model, 1).act(alone), agent_of(model, 1).act(look(1)))


def test_what_is_seen_matters_unless_it_is_not_believed(model):
    def first(level, **changes):
        return agent_of(model).act(look(**changes), level)

    other = look(seed=1)
    for name in ("front", "hand", "state"):
        assert (first(0) != first(0, **{name: other[name]})).any(), name
        np.testing.assert_array_equal(first(K), first(K, **{name: other[name]}))
        np.testing.assert_array_equal(first({name: K}), first({name: K}, **{name: other[name]}))
        changes = {rest: other[rest] for rest in ("front", "hand", "state") if rest != name}
        assert (first({name: K}) != first({name: K}, **changes)).any(), name


def test_each_robot_has_its_own_doubt(model):
    level = np.array([0, K])
    one, other = (agent_of(model).act(look(seed=seed), level) for seed in (0, 1))
    assert (one[0] != other[0]).any()
    np.testing.assert_array_equal(one[1], other[1])


def test_who_has_seen_nothing_yet_stays_as_it_is(model):
    """Until a look is believed at all; from then on it acts, also when it is blind again. Each robot by itself."""
    agent = agent_of(model)
    rest = np.broadcast_to(model.codec.initial_action.numpy(), (3, len(model.codec.initial_action)))
    first = agent.act(look(seed=0), np.array([K, 0]))
    np.testing.assert_allclose(first[0], rest, atol=1e-6)
    assert (np.abs(first[1] - rest) > 1e-3).any()
    then = agent.act(look(seed=1), {"front": np.array([K - 1, K]), "hand": K, "state": K})
    assert (np.abs(then - rest) > 1e-3).any(axis=(1, 2)).all()
    assert (np.abs(agent.act(look(seed=2), K) - then[:, -1:]) > 1e-3).any(axis=(1, 2)).all()
    hasty = agent_of(model, wait=False).act(look(seed=0), K)
    assert (np.abs(hasty - rest) > 1e-3).any(axis=(1, 2)).all()


def remembered_by(agent, monkeypatch):
    """What is added to the agent's past from now on: tokens, and their levels, of one part after another."""
    added, add = [], agent._past.add

    def noted(x, cond, level):
        levels = torch.as_tensor(level).expand(x.shape[:2])
        added.extend((x[:, i], levels[:, i]) for i in range(x.shape[1]))
        add(x, cond, level)

    monkeypatch.setattr(agent._past, "add", noted)
    return added


def test_a_doubted_look_is_mended_by_what_came_before(model, monkeypatch):
    """It is remembered as clean, says nothing of what it was if ignored and something if not, and depends on the past."""

    def second(seed, level, before=0):
        agent = agent_of(model)
        agent.act(look(seed=before))
        added = remembered_by(agent, monkeypatch)
        agent.act(look(seed=seed), {"front": level})
        assert len(added) == 4  # front, hand, state, actions
        assert all(not levels.any() for _, levels in added)
        return [token for token, _ in added]

    front, hand, *_ = second(1, K)
    assert torch.equal(front, second(2, K)[0])
    assert not torch.equal(front, second(1, K, before=5)[0])
    assert not torch.equal(second(1, K // 2)[0], second(2, K // 2)[0])
    clean = model.codec.encode_modality("hand", torch.as_tensor(look(seed=1)["hand"])[:, None])[:, 0]
    torch.testing.assert_close(hand, clean)  # what is not doubted is as it is seen


def test_only_what_was_seen_before_is_mended_and_only_if_asked_for(model, monkeypatch):
    agent = agent_of(model)
    added = remembered_by(agent, monkeypatch)
    agent.act(look(seed=0), {"front": np.array([K, 0])})
    assert added[0][1].tolist() == [K, 0]
    del added[:]
    agent.act(look(seed=1), {"front": K})
    assert added[0][1].tolist() == [K, 0]  # the first robot has never seen by this camera
    agent = agent_of(model, denoise_observations=False)
    agent.act(look(seed=0))
    added = remembered_by(agent, monkeypatch)
    agent.act(look(seed=1), {"front": K, "hand": 7})
    assert [levels.tolist() for _, levels in added[:3]] == [[K, K], [7, 7], [0, 0]]


def test_nothing_is_mended_from_what_is_forgotten(model, monkeypatch):
    for memory, levels in ((1, [K, K, K]), (2, [0, K, K]), (3, [0, 0, K]), (None, [0, 0, 0])):
        agent = agent_of(model, memory=memory)
        agent.act(look(seed=0))
        added = remembered_by(agent, monkeypatch)
        for seed in (1, 2, 3):
            agent.act(look(seed=seed), {"front": K})
        assert [int(level[0]) for _, level in added[::4]] == levels


def test_what_is_ignored_is_mended_from_as_little_noise_as_actions_are(model, monkeypatch):
    begun = []
    monkeypatch.setattr(imitation, "sample", lambda denoise, schedule, x, *rest, **options: begun.append(x.clone()) or x)
    for noise in (1.0, 0.25):
        agent = agent_of(model, temperature=noise)
        agent.act(look(seed=0))
        agent.act(look(seed=1), {"front": np.array([K, 50])})
    full, little = begun[1:3], begun[5:7]  # the levels in turn, after the first actions
    torch.testing.assert_close(little[1][0], 0.25 * full[1][0])
    torch.testing.assert_close(little[0][1], full[0][1])


def test_mending_finds_what_one_would_have_seen(model, monkeypatch):
    """With a denoiser that knows the truth the truth is what is remembered, however much of it was hidden, each robot by itself."""
    agent = agent_of(model)
    agent.act(look(seed=0))
    truth = model.codec.encode_modality("front", torch.as_tensor(look(seed=3)["front"])[:, None])

    def denoiser(cond, state):
        def denoise(x, k):
            alpha, sigma = (expand(part, x) for part in (model.schedule.alpha(k), model.schedule.sigma(k)))
            return with_x0(truth, x, alpha, sigma)

        return denoise

    added = remembered_by(agent, monkeypatch)
    monkeypatch.setattr(model, "denoiser", denoiser)
    for levels in ((K, 4), (50, 50), (1, 0)):
        del added[:]
        seen = look(seed=9)
        seen["front"][1] = look(seed=3)["front"][1]
        agent.act(seen, {"front": np.array(levels)})
        torch.testing.assert_close(added[0][0], truth[:, 0], atol=1e-4, rtol=1e-4)


def test_more_doubt_listens_less(model):
    """The farther a look is doubted, the less another one in its place changes what is done."""

    def difference(level):
        acts = [np.stack([changed_seed(model, seed, level, draw) for seed in (0, 1)]) for draw in range(8)]
        return float(np.mean([np.abs(a[0] - a[1]).mean() for a in acts]))

    def changed_seed(model, seed, level, draw):
        agent = ImitationAgent(model, ActOptions(steps=3), seed=draw)
        agent.reset(2)
        return agent.act(look(seed=seed), level)

    little, much = difference(K // 10), difference(9 * K // 10)
    assert 0 < much < little


def test_without_noise_the_same_looks_lead_to_the_same_actions(model):
    def spread(noise):
        acts = [ImitationAgent(model, ActOptions(steps=3, temperature=noise), seed=draw) for draw in range(6)]
        return float(np.ptp([agent.act({name: part[:1] for name, part in look().items()}) for agent in acts], axis=0).mean())

    assert spread(0.0) == 0
    assert 0 < spread(0.3) < spread(1.0)


def test_the_past_matters_to_an_agent_with_memory_only(model):
    def second(seed, **options):
        agent = agent_of(model, **options)
        agent.act(look(seed=seed), executed=np.ones((2, 3, 2)))  # what was done last is always known
        return agent.act(look(seed=9))

    assert (second(0) != second(1)).any()
    np.testing.assert_array_equal(second(0, memory=1), second(1, memory=1))
    assert (second(0, memory=2) != second(1, memory=2)).any()


@pytest.mark.parametrize("backbone", [RNNConfig(hidden=16), TransformerConfig(hidden=16, layers=2, heads=2)], ids=["gru", "transformer"])
def test_memory_longer_than_the_episode_is_all_of_it(backbone):
    model = model_for(TASK, backbone)
    agents = agent_of(model), agent_of(model, memory=9)
    for seed in range(3):
        one, other = (agent.act(look(seed=seed)) for agent in agents)
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_what_is_imagined_goes_on_from_what_was_seen(model):
    def then(seed):
        agent = agent_of(model)
        agent.act(look(seed=seed))
        return agent.imagine()

    (actions, seen), (_, other) = then(0), then(1)
    assert actions.shape == (2, 3, 2)
    assert {name: part.shape for name, part in seen.items()} == {"front": (2, PX, PX, 3), "hand": (2, PX, PX, 3), "state": (2, 2)}
    assert (seen["front"] != other["front"]).any()


def test_what_is_missing_may_be_ignored(model):
    broken = look(state=np.full((2, 2), np.nan, dtype=np.float32))
    absent = {name: part for name, part in look().items() if name != "state"}
    level = {"state": K}
    np.testing.assert_array_equal(agent_of(model).act(broken, level), agent_of(model).act(absent, level))


NANS = np.array([[0, 0], [np.nan, 0]], dtype=np.float32)


@pytest.mark.parametrize(
    ("seen", "level", "words"),
    [
        (look(state=NANS), 0, "state of robot 1 holds NaN or infinite values; ignore it by its level, 100"),
        (look(state=NANS), np.array([K, 0]), "state of robot 1 holds NaN"),
        ({"front": look()["front"]}, 0, "hand is missing; ignore it by its level"),
        (look(front=np.zeros((2, 9, 9, 3), dtype=np.uint8)), 0, r"front should be \(2, 6, 6, 3\) for 2 robots; got \(2, 9, 9, 3\)"),
        (look(3), 0, r"for 2 robots; got \(3, 6, 6, 3\)"),
        (look(), K + 1, "from 0 .trust. to 100 .ignore.; got 101"),
        (look(), -1, "got -1"),
        (look(), {"back": 3}, "sensors are front, hand, state; a level was given for 'back'"),
        (look(), np.zeros(3), r"one each, \(2,\); got shape \(3,\)"),
        (look(front=look()["front"].astype(int)), 0, r"front is an image, uint8 or .* 0 to 1; got int64 from 0 to 255"),
        (look(hand=look()["hand"].astype(np.float32)), 0, "hand is an image.*got float32 from [0-9]+ to 25"),
        (look(hand=look()["hand"] / 255 - 0.5), np.array([0, K]), "hand is an image.*got float64 from -0.4"),
    ],
)
def test_looks_that_make_no_sense_are_refused(seen, level, words, model):
    with pytest.raises(ValueError, match=words):
        agent_of(model).act(seen, level)


def test_agents_that_make_no_sense_are_refused(model):
    with pytest.raises(ValueError, match="memory counts timesteps from 1"):
        ActOptions(memory=0)
    with pytest.raises(ValueError, match=r"temperature is from 0 .* got 2"):
        ActOptions(temperature=2.0)
    with pytest.raises(ValueError, match="got n=0"):
        ImitationAgent(model).reset(0)
    bare = ModelConfig(RNNConfig(hidden=8), levels=K).build(4)
    with pytest.raises(ValueError, match="needs a model whose codec is ModalityTokens"):
        ImitationAgent(bare)


def test_pictures_are_bytes_or_from_0_to_1(model):
    seen = look()
    floats = {**seen, "front": seen["front"] / 255, "hand": (seen["hand"] / 255).astype(np.float32)}
    np.testing.assert_allclose(agent_of(model).act(floats), agent_of(model).act(seen), rtol=1e-4, atol=1e-5)
    ignored = look(front=seen["front"].astype(int))
    np.testing.assert_array_equal(agent_of(model).act(ignored, {"front": K}), agent_of(model).act(seen, {"front": K}))


def test_an_agent_is_read_from_its_folder(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    for folder in (tmp_path, tmp_path / "model"):
        agent = ImitationAgent.from_pretrained(folder, ActOptions(steps=3))
        agent.reset(2)
        np.testing.assert_allclose(agent.act(look()), agent_of(model).act(look()), rtol=1e-5, atol=1e-6)


def test_an_agent_of_a_run_acts_as_the_run_says(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    acting = ActOptions(steps=4, memory=3)
    save_experiment(Experiment(Imitation(acting=acting)), tmp_path / "config.json")
    assert ImitationAgent.from_pretrained(tmp_path).options == acting
    assert ImitationAgent.from_pretrained(tmp_path, ActOptions(steps=2)).options == ActOptions(steps=2)
    assert ImitationAgent.from_pretrained(tmp_path / "model").options == ActOptions()
    save_experiment(resolve("composition")(), tmp_path / "config.json")
    assert ImitationAgent.from_pretrained(tmp_path).options == ActOptions()


def test_a_loaded_model_with_eyes_acts_imagines_and_shows_what_it_sees(tmp_path, monkeypatch):
    shown = demonstrations(px=8)
    monkeypatch.setattr(Recorded, "demonstrations", lambda self, chunk, progress=None: shown)
    task = changed(TASK, world=Recorded(held_out=1), components=4, keypoint_steps=2, acting=ActOptions(steps=2))
    model_for(task).save_pretrained(tmp_path / "model")
    agent = ImitationAgent.from_pretrained(tmp_path, task.acting)
    agent.reset(2)
    assert np.isfinite(agent.act(look(px=8))).all()
    _, seen = agent.imagine()
    assert seen["front"].shape == (2, 8, 8, 3)
    assert not any(parameter.requires_grad for parameter in agent.codec.parameters())
    loaded = agent.model
    assert task.imagined(loaded, 1, 0, told)["hand"].shape == (1, 7, 8, 8, 3)
    evaluation = task.evaluate(loaded, tmp_path, samples=1, seed=0, progress=told)
    assert list(evaluation.figures) == ["codec.png"]
    assert is_png(tmp_path / "codec.png")


# It learns, and memory is what decides.


def cued(episodes=64, frames=4):
    """A cue of -1 or 1 at the first moment only; the last action must be that of the cue, all others are 0. States jitter."""
    draw = np.random.default_rng(0)
    actions, states = [], []
    for i in range(episodes):
        cue = 2 * (i % 2) - 1
        state = 0.1 * draw.normal(size=(frames, 2))
        state[0, 0] += cue
        state[:, 1] += np.arange(frames) / frames
        action = 0.02 * draw.normal(size=(frames - 1, 1))
        action[-1] += cue
        states.append(state)
        actions.append(action)
    return Demonstrations(actions, states, fps=10)


def test_an_agent_with_memory_acts_on_what_it_saw_long_ago(tmp_path):
    task = Imitation(Given(cued, held_out=8), chunk=1, window=4)
    training = TrainConfig(steps=600, batch=32, lr=5e-3, draw="independent+continued", validate_every=500, log_every=500)
    train(Experiment(task, ModelConfig(RNNConfig(hidden=48), levels=K), training), tmp_path, quiet=True)
    model = DiffusionForcing.from_pretrained(Path(tmp_path) / "model")
    shown = cued(32)

    def last(memory, level=0):
        agent = ImitationAgent(model, ActOptions(steps=5, memory=memory))
        agent.reset(32)
        for j in range(3):
            actions = agent.act({"state": np.stack([states[j] for states in shown.states])}, level if j == 0 else 0)
        return np.sign(actions[:, 0, 0])

    wanted = np.sign([actions[-1, 0] for actions in shown.actions])
    assert np.mean(last(None) == wanted) > 0.9
    assert 0.15 < np.mean(last(2) == wanted) < 0.85
    assert 0.15 < np.mean(last(None, level=K) == wanted) < 0.85  # a cue that is not believed is none


# What is said and drawn.


def told(what, done, of):
    assert 0 <= done <= of
    assert what


def is_png(file):
    return file.read_bytes().startswith(b"\x89PNG")


def test_the_rest_of_a_demonstration_is_imagined_from_its_first_look(model, tmp_path):
    files = TASK.sample(model, tmp_path, samples=4, seed=0, progress=told)
    assert [file.name for file in files] == ["imagined.npz", "actions.png", "front.png", "hand.png", "state.png"]
    assert all(is_png(file) for file in files[1:])
    found = np.load(files[0])
    assert found["actions"].shape == (1, 7, 3, 2)
    assert found["front"].shape == (1, 7, PX, PX, 3)
    np.testing.assert_allclose(found["front"][0, 0], demonstrations().images["front"][-1][0] / 255, atol=1e-6)


def test_without_a_world_actions_are_compared_with_those_of_people(model, tmp_path, monkeypatch):
    monkeypatch.setattr(Recorded, "demonstrations", lambda self, chunk, progress=None: demonstrations())
    task = changed(TASK, world=Recorded(held_out=2))
    assert task.default_samples == 2
    evaluation = task.evaluate(model, tmp_path, samples=2, seed=0, progress=told)
    (table,) = evaluation.tables
    assert table.title == "Actions in 2 held-out demonstrations: mean absolute error"
    assert len(table.rows) == 2
    shown = demonstrations()
    held = np.mean([
        np.abs(shown.actions[i][3 * j : 3 * j + 3, 0] - shown.actions[i][max(0, 3 * j - 1), 0]).mean() for i in (3, 4) for j in range(6)
    ])  # fmt: skip
    assert float(table.rows[0][2]) == pytest.approx(held, rel=1e-3)
    assert evaluation.metrics["error over std"] > 0
    with pytest.warns(UserWarning, match="20 demonstrations were asked for, but 2 are held out"):
        fewer = task.evaluate(model, tmp_path, samples=20, seed=0, progress=told)
    assert fewer.tables[0].title == table.title


def test_actions_after_the_end_are_not_compared(tmp_path, monkeypatch):
    """Episodes of four actions in chunks of three: the second chunk is one action, and two that only fill it."""
    shown = demonstrations(4, frames=5, every=1, cameras=())
    monkeypatch.setattr(Recorded, "demonstrations", lambda self, chunk, progress=None: shown)
    task = Imitation(Recorded(held_out=1), chunk=3, window=4, acting=ActOptions(steps=2))
    (table,) = task.evaluate(model_for(task), tmp_path, samples=1, seed=0, progress=told).tables
    done = shown.actions[-1][:, 0]
    held = np.abs([0, done[1] - done[0], done[2] - done[0], done[3] - done[2]]).mean()
    assert float(table.rows[0][2]) == pytest.approx(held, rel=1e-3)
    assert float(table.rows[0][3]) == pytest.approx(done.std(), rel=1e-3)


def test_what_people_did_is_what_is_remembered(model):
    def second(doing):
        agent = agent_of(model)
        agent.act(look(), executed=doing)
        return agent.act(look(seed=1))

    done = agent_of(model).act(look())
    np.testing.assert_allclose(second(done), second(None), rtol=1e-3, atol=1e-4)
    assert np.abs(second(done + 1) - second(None)).max() > 1e-3


def test_pushing_is_tried_in_its_world(tmp_path, monkeypatch):
    pytest.importorskip("gym_pusht", reason="Push-T needs gym-pusht")
    monkeypatch.setattr("diffusion_forcing.imitation.pusht.env.STEPS", 8)
    task = Imitation(Pushing(pushes_file(), held_out=2), chunk=4, offsets=2, window=5, acting=ActOptions(steps=2))
    evaluation = task.evaluate(model_for(task), tmp_path, samples=2, seed=0, progress=told)
    assert 0 <= evaluation.metrics["score"] <= 1
    assert evaluation.metrics["success"] in (0, 0.5, 1)
    assert list(evaluation.figures) == ["episodes.mp4", "scores.png"]
    assert is_png(tmp_path / "scores.png")


@pytest.mark.parametrize("name", IMITATION)
def test_every_recipe_builds(name):
    experiment = resolve(name)()
    model = experiment.model.build((21, 32, 32) if experiment.task.tokens == "image" else (24,), 3)
    assert sum(parameter.numel() for parameter in model.parameters()) > 1e6


# One token a moment.

JOINT = changed(TASK, tokens="image", state=False)


@pytest.fixture(scope="module")
def joint():
    return model_for(JOINT, ConvRNNConfig(4, 4, (1, 2), 1))


def pictures_of(seen):
    return {name: part for name, part in seen.items() if name != "state"}


def test_planes_come_back():
    data = JOINT.data()
    assert data.train.event == (2 * 3 + 3, PX, PX)
    moments = {name: torch.as_tensor(part)[None] for name, part in timesteps_of(demonstrations(), 0, 3, state=False).items()}
    tokens = data.codec.encode(moments)
    torch.testing.assert_close(data.train.read(torch.tensor([[0, 0]])).x, tokens)
    back = data.codec.decode(tokens)
    torch.testing.assert_close(back["actions"], moments["actions"].float(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(back["hand"], moments["hand"] / 255, atol=1e-5, rtol=1e-5)
    empty = build_codec(describe_codec(data.codec))
    empty.load_state_dict(data.codec.state_dict())
    assert torch.equal(empty.encode(moments), tokens)


def test_an_agent_of_whole_moments_remembers_doubts_and_imagines(joint):
    agent = agent_for(joint, ActOptions(steps=3))
    assert isinstance(agent, ImageTokenAgent)
    agent.reset(2)
    seen = pictures_of(look())
    one = agent.act(seen)
    assert one.shape == (2, 3, 2)
    two, imagined = agent.imagine()
    assert imagined["front"].shape == (2, PX, PX, 3)
    agent.reset(2)
    np.testing.assert_array_equal(agent.act(seen), one)
    agent.reset(2)
    other = agent.act(pictures_of(look(seed=5)))
    assert not np.allclose(one, other)  # what is seen matters
    agent.reset(2)
    ignored = agent.act(pictures_of(look(seed=5)), level=K)
    agent.reset(2)
    np.testing.assert_array_equal(agent.act({}, level=K), ignored)
    assert np.isfinite(two).all()


def test_an_agent_of_whole_moments_mends_what_it_sees_not_what_it_did(joint, monkeypatch):
    agent = agent_for(joint, ActOptions(steps=3))
    agent.reset(2)
    added = remembered_by(agent, monkeypatch)
    agent.act({}, level=K)
    assert added[0][1].tolist() == [K, K]  # nothing was seen yet that might be put back
    agent.act(pictures_of(look()))
    done = np.full((2, 3, 2), 0.5)
    agent.act(pictures_of(look()), executed=done)
    agent.act(pictures_of(look(seed=1)), level=np.array([K, 0]))
    token, levels = added[-1]
    assert levels.tolist() == [0, 0]
    clean = joint.codec.encode({"actions": torch.as_tensor(done)[:, None].float(), **as_seen(look(seed=1))})[:, 0]
    torch.testing.assert_close(token[1], clean[1])
    torch.testing.assert_close(token[0, 6:], clean[0, 6:])
    assert not torch.allclose(token[0, :6], clean[0, :6])


def as_seen(seen):
    return {name: torch.as_tensor(part)[:, None] for name, part in pictures_of(seen).items()}


def test_less_noise_in_whole_moments_is_of_actions_alone(joint, monkeypatch):
    begun = []
    monkeypatch.setattr(imitation, "sample", lambda denoise, schedule, x, *rest, **options: begun.append(x) or x)
    for noise in (1.0, 0.0):
        agent = agent_for(joint, ActOptions(steps=3, temperature=noise))
        agent.reset(2)
        agent.act(pictures_of(look()))
    full, none = begun
    assert not none[:, :, 6:].any()
    assert full[:, :, 6:].any()
    assert torch.equal(full[:, :, :6], none[:, :, :6])


def test_an_agent_of_whole_moments_remembers_what_was_done(joint):
    agent = agent_for(joint, ActOptions(steps=3))
    seen, after = pictures_of(look()), []
    for done in (0.0, 2.0):
        agent.reset(2)
        agent.act(seen, executed=np.full((2, 3, 2), done))
        after.append(agent.act(seen))
    assert not np.allclose(*after)


def test_windows_of_whole_moments_hold_the_actions_after_the_last_look():
    for moments, tokens in ((1, 2), (3, 4), (6, 7), (9, 7)):
        windows = changed(JOINT, window=moments).data().train
        assert windows.length == tokens
        assert set(windows.draw(300)[:, 1].tolist()) == set(range(8 - tokens))


def test_each_agent_names_what_fits_a_model_that_does_not(model, joint):
    with pytest.raises(ValueError, match=r"ImitationAgent needs .* ModalityTokens; this one's is ImageTokens"):
        ImitationAgent(joint)
    with pytest.raises(ValueError, match=r"ImageTokenAgent needs .* ImageTokens; this one's is ModalityTokens"):
        ImageTokenAgent(model)


def test_whole_moments_are_doubted_whole(joint):
    agent = agent_for(joint)
    with pytest.raises(ValueError, match="one token per timestep"):
        agent.act({name: part[0] for name, part in pictures_of(look()).items()}, level={"front": 10})
    with pytest.raises(ValueError, match="continues from an observation"):
        agent.imagine()


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"actions": (3, 2), "state": (4,)}, "images of cameras of one size"),
        ({"actions": (3, 2), "front": (8, 8, 3), "hand": (4, 4, 3)}, "images of cameras of one size"),
        ({"actions": (3, 9), "front": (8, 8, 3)}, "there are 8 at most; got 9"),
        ({"front": (8, 8, 3)}, "actions first"),
    ],
)
def test_planes_that_do_not_fit_are_refused(shapes, words):
    with pytest.raises(ValueError, match=words):
        ImageTokens(shapes)


def test_the_papers_model_has_21_channels():
    experiment = resolve("swap-paper")()
    planes = ImageTokens({"actions": (experiment.task.chunk, 7), "front": (32, 32, 3), "hand": (32, 32, 3)})
    assert planes.event == (21, 32, 32)
    model = experiment.model.build(planes.event, 0, planes)
    x = torch.randn(1, 1, *planes.event)
    assert torch.isfinite(model(x, torch.tensor([[500]]))).all()
