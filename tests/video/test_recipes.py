"""Recipes of video: each builds the model it promises, for the tokens of its task."""

import pytest
import torch
from torch import nn

from diffusion_forcing.engine.config import Experiment
from diffusion_forcing.engine.recipes import resolve
from diffusion_forcing.video.codec import Patches, Pixels
from diffusion_forcing.video.recipes import VIDEO

# Shape of a token and numbers of a condition: of the published clips, actions come in three or four kinds.
TOKENS = {
    "labyrinth": ((64, 8, 8), 4 * 2),
    "labyrinth-gru": ((64, 8, 8), 4 * 2),
    "voxels": ((64, 8, 8), 4 * 2),
    "doom": ((64, 8, 8), 4 * 2),
    "clips": ((64, 8, 8), 0),
    "dmlab": ((12, 64, 64), 4 * 3),
    "minecraft": ((24, 128, 128), 8 * 4),
}
MILLIONS = {"dmlab": 24, "minecraft": 36}


def test_every_recipe_is_known():
    assert set(TOKENS) == {name for name in VIDEO if not name.endswith("-painter")}
    assert all(resolve(name) is recipe for name, recipe in VIDEO.items())
    assert all(recipe.__doc__ for recipe in VIDEO.values())


@pytest.mark.parametrize("name", [name for name in VIDEO if name.endswith("-painter")])
def test_painters_are_for_the_tokens_of_their_models(name):
    painter, first = VIDEO[name](), VIDEO[name.removesuffix("-painter")]()
    assert painter.task == first.task
    assert painter.task.patch == 2 ** len(painter.model.widths)


@pytest.mark.parametrize("name", TOKENS)
def test_every_recipe_builds(name):
    experiment = VIDEO[name]()
    assert isinstance(experiment, Experiment)
    task = experiment.task
    event, cond = TOKENS[name]
    side = task.world.px // task.patch if task.patch else task.world.px
    assert event == (task.components if task.patch else 3 * task.stack, side, side)
    if hasattr(task.world, "actions"):
        assert cond == task.stack * len(task.world.actions)
    codec: nn.Module = Pixels(task.stack)
    if task.patch:
        codec = Patches.fit(torch.rand(8, 2 * task.stack, task.world.px, task.world.px, 3), task.stack, task.patch, task.components)
    model = experiment.model.build(event, cond, codec)
    size = sum(parameter.numel() for parameter in model.parameters())
    if name in MILLIONS:
        assert size == pytest.approx(MILLIONS[name] * 1e6, rel=0.1)
        assert cond == task.stack * task.world.action_kinds
        assert model.weight.frame_stack == task.stack
    else:
        assert size < 5e6
    if name == "dmlab":
        x, k = torch.zeros(1, 2, *event), torch.tensor([[0, 1000]])
        with torch.no_grad():
            assert model(x, k, torch.zeros(1, 2, cond)).shape == (1, 2)
