"""The flow warp: the identity at first; pixels are fetched from where the flow says, those out of view are masked; it learns the flow."""

import pytest
import torch
import torch.nn.functional as F
from oracles import seeded
from small import replace, small

from diffusion_forcing import DiffusionForcing
from diffusion_forcing.backbones import SpaceTimeConfig
from diffusion_forcing.backbones.flow_warp import FlowWarp
from diffusion_forcing.engine.config import ModelConfig, TrainConfig
from diffusion_forcing.engine.train import run_objective, train
from diffusion_forcing.video.codec import Patches, Pixels
from diffusion_forcing.video.warp import has_warp, warp_error

STACK, PATCH, PX = 2, 4, 16


def pictures(n, seed=0, px=PX):
    """Smooth pictures (n, px, px, 3) from 0 to 1."""
    coarse = torch.rand(n, 3, px // 4, px // 4, generator=seeded(seed))
    return F.interpolate(coarse, size=(px, px), mode="bilinear").permute(0, 2, 3, 1)


def shifted(frames, by):
    """Frames (..., h, w, 3) whose content has moved to the left, around."""
    return frames.roll(-by, dims=-2)


def walk(n, seed=0):
    """Clips of four frames that move to the left by 0, 1 or 2 px a frame: (n, 4, px, px, 3) and by how many (n,)."""
    by = torch.randint(0, 3, (n,), generator=seeded(seed + 1))
    still = pictures(n, seed)
    clips = torch.stack([torch.stack([shifted(one, int(b) * t) for t in range(4)]) for one, b in zip(still, by, strict=True)])
    return clips, by


@pytest.fixture(scope="module")
def codec():
    return Patches.fit(walk(200)[0], STACK, PATCH, components=40)


def fresh_warp(codec, embedding=3):
    warp = FlowWarp(tuple(codec.mean.shape), embedding, STACK, PATCH, width=16)
    warp.fit(codec, codec.variance)
    torch.nn.init.constant_(warp.gate.bias, 30.0)
    return warp


def units(codec, frames):
    """Tokens as a backbone reads them when they are clean."""
    return codec.encode(frames)[:, 0] / codec.variance.sqrt()


@torch.no_grad()
def test_an_untrained_warp_repeats_the_last_frame(codec):
    clips, _ = walk(20, seed=5)
    estimate, mask = fresh_warp(codec)(units(codec, clips[:, :STACK]), torch.zeros(20, 3))
    decoded = codec.decode((estimate * codec.variance.sqrt())[:, None])
    last = clips[:, STACK - 1 : STACK].expand(-1, STACK, -1, -1, -1)
    assert (decoded - last).abs().mean() < 0.02
    assert torch.allclose(mask, torch.ones_like(mask))


@torch.no_grad()
def test_pixels_are_fetched_along_the_flow(codec):
    warp, clips = fresh_warp(codec), walk(20, seed=5)[0]
    by = 2 * PATCH / PX  # a patch, of half pictures
    warp.flow_out.bias.view(STACK, 2, -1)[:, 0] = by
    estimate, mask = warp(units(codec, clips[:, :STACK]), torch.zeros(20, 3))
    decoded = codec.decode((estimate * codec.variance.sqrt())[:, None])
    there = clips[:, STACK - 1 : STACK, :, PATCH:].expand(-1, STACK, -1, -1, -1)
    assert (decoded[..., :-PATCH, :] - there).abs().mean() < 0.02
    assert torch.allclose(mask[..., :-1], torch.ones_like(mask[..., :-1]))
    assert mask[..., -1].max() < 0.2  # of what comes into view


def test_it_learns_the_flow_of_a_condition(codec):
    torch.manual_seed(0)
    warp = fresh_warp(codec)
    clips, by = walk(400, seed=9)
    past, cond = units(codec, clips[:, :STACK]), F.one_hot(by, 3).float() * 2
    truth, test = units(codec, clips[:, STACK:]), slice(300, None)
    inside = (..., slice(0, -1))  # of the view

    @torch.no_grad()
    def error():
        return (warp(past[test], cond[test])[0] - truth[test])[inside].pow(2).mean()

    still = float(error())
    optimizer = torch.optim.AdamW(warp.parameters(), lr=3e-3)
    for step in range(150):
        rows = torch.randint(0, 300, (32,), generator=seeded(step))
        (warp(past[rows], cond[rows])[0] - truth[rows])[inside].pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(error()) < 0.4 * still


def test_a_closed_gate_ignores_a_noisy_past(codec):
    warp = fresh_warp(codec)
    torch.nn.init.constant_(warp.gate.bias, -30.0)
    noise = torch.randn(2, *codec.mean.shape, generator=seeded(3))
    one, other = warp(noise, torch.zeros(2, 3))[0]
    assert torch.allclose(one, other, atol=1e-5)


def test_the_backbone_is_built_for_the_codec(codec):
    model = ModelConfig(SpaceTimeConfig(hidden=8, layers=2, heads=2, warp=True)).build(tuple(codec.mean.shape), 0, codec)
    assert model.backbone.config["warp"] is True
    assert model.backbone.config["patches"] == [STACK, PATCH]
    assert torch.allclose(model.backbone.warp.std, codec.variance.sqrt())
    raw = ModelConfig(SpaceTimeConfig(hidden=8, layers=2, heads=2, warp=True), parameterization="eps").build(
        tuple(codec.mean.shape), 0, codec
    )
    assert torch.equal(raw.backbone.warp.std, torch.ones_like(codec.variance))  # this one reads tokens as they are
    with pytest.raises(ValueError, match="no-warp"):
        ModelConfig(SpaceTimeConfig(warp=True)).build((12, 16, 16), 0, Pixels(4))


def test_the_warp_stage_trains_the_warp_and_nothing_else():
    experiment = small("labyrinth", objective__warp_steps=60)
    data = experiment.task.data()
    torch.manual_seed(0)
    model = experiment.model.build(data.train.event, data.train.cond_width, data.codec)
    (stage,) = experiment.objective.stages(model, None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    held = data.valid.read(data.valid.all())
    still = warp_error(model, held.x, held.cond)
    assert run_objective(model, data.train, stage.objective, TrainConfig(steps=stage.steps, lr=stage.lr, batch=8, warmup=20, ema=0.0))
    assert warp_error(model, held.x, held.cond).mean() < 0.8 * still.mean()
    changed = {name.split(".")[1] for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"warp"}
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert not experiment.objective.stages(model, model), "a model that begins with one that has a warp"


def test_a_model_trained_without_a_warp_is_fine_tuned_with_one(tmp_path):
    plain, on = small("labyrinth", model__backbone__warp=False), small("labyrinth", train__steps=1, train__lr=1e-12)
    train(plain, tmp_path / "plain", quiet=True)
    before = DiffusionForcing.from_pretrained(tmp_path / "plain" / "model")
    train(replace(on, train__init=str(tmp_path / "plain"), train__muon_lr=1e-12), tmp_path / "on", quiet=True)
    after = DiffusionForcing.from_pretrained(tmp_path / "on" / "model")
    assert has_warp(after)
    assert not has_warp(before)
    x, k = torch.randn(2, 3, *before.backbone.config["event"], generator=seeded(0)), torch.tensor([[0, 300, 900], [10, 1000, 50]])
    cond = torch.randn(2, 3, before.backbone.config["cond"], generator=seeded(1))
    with torch.no_grad():
        torch.testing.assert_close(after.predict(x, k, cond).x0, before.predict(x, k, cond).x0, rtol=1e-3, atol=1e-4)
