"""Modality tokens: one per modality and timestep, conditioned on which it is and on the last action; they decode to what was encoded."""

import numpy as np
import pytest
import torch
from robots import TASK, demonstrations

from diffusion_forcing.codecs import build_codec, describe_codec
from diffusion_forcing.imitation.tokens import ModalityTokens


@pytest.fixture(scope="module")
def data():
    return TASK.data()


def test_tokens_are_modalities_in_turn_and_conditioned_on_which_they_are(data):
    assert data.codec.names == ("actions", "front", "hand", "state")
    assert data.codec.sensors == ("front", "hand", "state")
    assert data.train.event == (8,)
    batch = data.train.read(torch.tensor([[0, 0]]))
    assert batch.x.shape == (1, 7 * 4 - 1, 8)
    assert batch.cond.shape[-1] == data.codec.cond_width
    assert batch.cond[0, :, :4].argmax(1).tolist() == ([1, 2, 3, 0] * 7)[:-1]
    assert batch.mask.all()
    first = data.codec.encode_modality("front", torch.as_tensor(demonstrations().images["front"][0][:1])[None])
    torch.testing.assert_close(batch.x[0, 0], first[0, 0])
    assert not batch.x[0, 2, 2:].any()  # a state has two numbers, the rest of its token is padding
    assert (len(data.train), len(data.valid)) == (4, 1)


def test_tokens_are_conditioned_on_the_last_action(data):
    shown = demonstrations()
    last_actions = data.train.read(torch.tensor([[0, 0]])).cond[0, :, 4:]
    start = np.mean([one[0] for one in shown.actions[:4]], axis=0)  # stands for the last action of the first observation and chunk
    units = torch.as_tensor(np.concatenate(shown.actions[:4])).std(0)
    last = torch.as_tensor(np.concatenate([start[None], shown.actions[0][2::3]]))  # of each chunk
    for j in range(6):
        assert (last_actions[4 * j : 4 * j + 4] == last_actions[4 * j]).all()
        difference = (last_actions[4 * j] - last_actions[4]) * units
        torch.testing.assert_close(difference, last[j] - last[1], atol=1e-4, rtol=1e-3)


def test_actions_are_differences_to_the_last_one(data):
    """A mean token continues as before, wherever that is."""
    codec = data.codec
    actions = torch.as_tensor(demonstrations().actions[0][:18]).reshape(1, 6, 3, 2)
    shifted = codec.encode_actions(actions + 5, actions[:, :, 0] + 5)
    torch.testing.assert_close(codec.encode_actions(actions, actions[:, :, 0]), shifted, atol=1e-4, rtol=1e-4)
    last = torch.tensor([[[3.0, -4.0]]])
    mean = codec.decode_modality("actions", torch.zeros(1, 1, codec.width))
    torch.testing.assert_close(codec.decode_actions(torch.zeros(1, 1, codec.width), last), mean + last[:, :, None])


def test_timesteps_come_back():
    """With all directions kept, encoding loses nothing but what never varied."""
    draw = torch.Generator().manual_seed(0)
    episode = {
        "actions": torch.randn(50, 3, 2, generator=draw),
        "state": torch.randn(50, 4, generator=draw) * torch.tensor([1.0, 10, 1e3, 0]),
    }
    codec = ModalityTokens.fit([episode], {})
    assert codec.components == {"actions": 6, "state": 3}
    timesteps = {name: values[None] for name, values in episode.items()}
    tokens = codec.encode(timesteps)
    assert tokens.shape == (1, 100, 6)
    assert tokens[0, ::2].var(0).mean() == pytest.approx(1, rel=0.05)
    back = codec.decode(tokens)
    torch.testing.assert_close(back["actions"], timesteps["actions"], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(back["state"], timesteps["state"], atol=1e-2, rtol=1e-4)
    empty = build_codec(describe_codec(codec))
    empty.load_state_dict(codec.state_dict())
    torch.testing.assert_close(empty.encode(timesteps), tokens)


def test_few_directions_keep_what_varies_most():
    draw = torch.Generator().manual_seed(0)
    few = torch.randn(200, 3, generator=draw) @ torch.randn(3, 2000, generator=draw)
    episode = {"actions": torch.randn(200, 1, 2, generator=draw), "state": few}
    one, again = (ModalityTokens.fit([episode], {"state": 3}) for _ in range(2))
    torch.testing.assert_close(one.decode_modality("state", one.encode_modality("state", few[None])), few[None], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(one.encode_modality("state", few[None]), again.encode_modality("state", few[None]))


@pytest.mark.parametrize(
    ("episode", "options", "words"),
    [
        ({"state": torch.randn(9, 2)}, {}, "actions first"),
        ({"actions": torch.randn(9, 1, 2)}, {}, "at least one observation"),
        ({"actions": torch.randn(9, 1, 2), "state": torch.ones(9, 2)}, {}, "state never vary"),
        ({"actions": torch.full((9, 1, 2), torch.nan), "state": torch.randn(9, 2)}, {}, "actions hold NaN"),
        ({"actions": torch.randn(9, 1, 2), "state": torch.randn(9, 2)}, {"whiten": 2}, "whiten"),
    ],
)
def test_episodes_that_make_no_tokens_are_refused(episode, options, words):
    with pytest.raises(ValueError, match=words):
        ModalityTokens.fit([episode], {}, **options)
