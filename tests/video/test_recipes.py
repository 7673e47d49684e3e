"""Recipes of video: each builds the model it promises, for the tokens of its task."""

import pytest
import torch
from torch import nn

from diffusion_forcing.engine.config import Experiment
from diffusion_forcing.engine.recipes import RECIPES, build
from diffusion_forcing.video.codec import Patches, Pixels

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


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if "decoder" in recipe.stages])
def test_decoders_are_for_the_tokens_of_their_models(name):
    decoder, first = build(name, stage="decoder"), build(name)
    assert decoder.task == first.task
    assert decoder.task.patch == 2 ** len(decoder.objective.widths)


@pytest.mark.parametrize("name", TOKENS)
def test_every_recipe_builds(name):
    recipe, _, backbone = name.partition("-")
    experiment = build(recipe, backbone=backbone or None)
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
