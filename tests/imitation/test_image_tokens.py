"""Image tokens: cameras and actions as channels of one image per timestep, as in the paper."""

from dataclasses import replace

import pytest
import torch
from robots import PX, TASK, as_tensors, demonstrations

from diffusion_forcing.codecs import build_codec, describe_codec
from diffusion_forcing.engine.recipes import build
from diffusion_forcing.imitation.image_tokens import ImageTokens
from diffusion_forcing.imitation.windows import timesteps_of


def test_timesteps_come_back():
    data = replace(TASK, tokens="image", state=False).data()
    assert data.train.event == (2 * 3 + 3, PX, PX)
    timesteps = {name: values[None] for name, values in as_tensors(timesteps_of(demonstrations(), 0, 3, state=False)).items()}
    tokens = data.codec.encode(timesteps)
    torch.testing.assert_close(data.train.read(torch.tensor([[0, 0]])).x, tokens)
    back = data.codec.decode(tokens)
    torch.testing.assert_close(back["actions"], timesteps["actions"].float(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(back["hand"], timesteps["hand"] / 255, atol=1e-5, rtol=1e-5)
    empty = build_codec(describe_codec(data.codec))
    empty.load_state_dict(data.codec.state_dict())
    assert torch.equal(empty.encode(timesteps), tokens)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"actions": (3, 2), "state": (4,)}, "one size"),
        ({"actions": (3, 2), "front": (8, 8, 3), "hand": (4, 4, 3)}, "one size"),
        ({"actions": (3, 9), "front": (8, 8, 3)}, "8 at most; got 9"),
        ({"front": (8, 8, 3)}, "actions first"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, words):
    with pytest.raises(ValueError, match=words):
        ImageTokens(shapes)


def test_the_papers_model_has_21_channels():
    experiment = build("swap", backbone="paper")
    codec = ImageTokens({"actions": (experiment.task.chunk, 7), "front": (32, 32, 3), "hand": (32, 32, 3)})
    assert codec.event == (21, 32, 32)
    model = experiment.model.build(codec.event, 0, codec)
    x = torch.randn(1, 1, *codec.event)
    assert torch.isfinite(model(x, torch.tensor([[500]]))).all()
