"""Muon, and which parameters it gets."""

import pytest
import torch
from oracles import seeded
from torch import nn
from torch.optim import AdamW

from diffusion_forcing import RNN, DiffusionForcing, NoiseSchedule, Transformer, cosine
from diffusion_forcing.engine.optim import Muon, build, orthogonalize


@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (128, 24), (7, 30), (1, 5), (5, 1)])
def test_orthogonal_steps_have_singular_values_near_one(shape):
    result = orthogonalize(torch.randn(6, *shape, generator=seeded(0)))
    assert result.shape == (6, *shape)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_scale_is_forgotten_and_directions_are_kept():
    x = torch.randn(1, 20, 8, generator=seeded(0))
    result = orthogonalize(x)
    torch.testing.assert_close(orthogonalize(1000 * x), result, atol=1e-3, rtol=1e-3)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    off = u.mT @ result @ v.mT
    assert (off - torch.diag_embed(off.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-3
    assert (off.diagonal(dim1=-2, dim2=-1) > 0.6).all()


def test_no_gradient_no_nan():
    assert torch.equal(orthogonalize(torch.zeros(2, 4, 3)), torch.zeros(2, 4, 3))


def test_a_step_moves_every_direction_equally_far():
    weight = nn.Parameter(torch.zeros(24, 6))
    weight.grad = torch.randn(24, 6, generator=seeded(0)) * torch.logspace(-1, 1, 6)
    Muon([weight], lr=0.1).step()
    values = torch.linalg.svdvals(weight.detach()) / (0.1 * 2)  # sqrt(24 / 6) = 2
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert (weight * weight.grad).sum() < 0


def test_matrices_of_one_shape_step_as_if_alone():
    grads = torch.randn(3, 8, 4, generator=seeded(0))
    together = [nn.Parameter(torch.ones(8, 4)) for _ in grads]
    alone = [nn.Parameter(torch.ones(8, 4)) for _ in grads]
    optimizers = [Muon(together), *(Muon([p]) for p in alone)]
    for _ in range(2):
        for params in (together, alone):
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.allclose(together[0], together[1])


def regression(optimizer_of, steps=60):
    """Fit a random linear map by a product of two matrices; the loss before and after."""
    x = torch.randn(256, 10, generator=seeded(1))
    y = x @ torch.randn(10, 6, generator=seeded(2))
    a = nn.Parameter(0.3 * torch.randn(10, 16, generator=seeded(3)))
    b = nn.Parameter(0.3 * torch.randn(16, 6, generator=seeded(4)))
    optimizer = optimizer_of([a, b])

    def loss():
        optimizer.zero_grad()
        value = ((x @ a @ b - y) ** 2).mean()
        value.backward()
        return value

    first = loss().item()
    for _ in range(steps):
        last = optimizer.step(loss).item()
    assert a.dtype == torch.float32
    return first, last


def test_muon_solves_a_small_regression():
    first, last = regression(lambda params: Muon(params, lr=0.05))
    assert last < 0.02 * first


def test_without_a_learning_rate_nothing_is_learned():
    first, last = regression(lambda params: Muon(params, lr=0.0))
    assert last == first


def test_weight_decay_shrinks():
    weight = nn.Parameter(torch.ones(4, 3))
    weight.grad = torch.zeros(4, 3)
    Muon([weight], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(weight.detach(), torch.full((4, 3), 0.95))


def test_a_parameter_without_gradient_stays():
    still, moving = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3))
    moving.grad = torch.randn(4, 3, generator=seeded(0))
    Muon([still, moving]).step()
    assert torch.equal(still, torch.ones(4, 3))
    assert not torch.equal(moving, torch.ones(4, 3))


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
def test_muon_takes_matrices_only(shape):
    with pytest.raises(ValueError, match="matrices only; give other parameters to AdamW"):
        Muon([nn.Parameter(torch.zeros(shape))])


BACKBONES = [RNN(3, 1, hidden=8, layers=2, blocks=1, levels=10), Transformer(3, 1, hidden=8, layers=2, heads=2, levels=10)]


def names_of(model, optimizer):
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {name for name, p in model.named_parameters() if id(p) in held}


@pytest.mark.parametrize("backbone", BACKBONES)
def test_adamw_takes_everything_by_default(backbone):
    model = DiffusionForcing(backbone, NoiseSchedule(cosine(10)))
    (optimizer,) = build(model, "adamw", 1e-3, 0.02, 0.1)
    assert isinstance(optimizer, AdamW)
    assert names_of(model, optimizer) == {name for name, _ in model.named_parameters()}
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize("backbone", BACKBONES)
def test_muon_takes_the_matrices_between_hidden_layers(backbone):
    model = DiffusionForcing(backbone, NoiseSchedule(cosine(10)))
    adamw, muon = build(model, "muon", 1e-3, 0.02, 0.0)
    rest, inner = names_of(model, adamw), names_of(model, muon)
    assert rest | inner == {name for name, _ in model.named_parameters()}
    assert not rest & inner
    for end in ("proj_in.weight", "proj_out.weight", "level.net.0.weight", "level.net.2.weight"):
        assert f"backbone.{end}" in rest
    assert all(p.ndim == 2 for name, p in model.named_parameters() if name in inner)
    assert all(name in rest for name, p in model.named_parameters() if p.ndim < 2)
    expected = {"grus.0.weight_ih_l0", "grus.1.weight_hh_l0", "encoder.0.up.weight", "decoder.0.down.weight"}
    expected = expected if isinstance(backbone, RNN) else {"blocks.0.qkv.weight", "blocks.1.project.weight", "blocks.0.up.weight"}
    assert {f"backbone.{name}" for name in expected} <= inner
    assert (adamw.param_groups[0]["lr"], muon.param_groups[0]["lr"]) == (1e-3, 0.02)


def test_frozen_parameters_are_left_out():
    model = DiffusionForcing(RNN(3, hidden=8, levels=10), NoiseSchedule(cosine(10)))
    model.backbone.proj_out.requires_grad_(False)
    held = set().union(*(names_of(model, optimizer) for optimizer in build(model, "muon", 1e-3, 0.02, 0.0)))
    assert held == {name for name, _ in model.named_parameters() if ".proj_out." not in name}
