"""Pasts that the model itself imagined: what is read, what is learned, and what is left alone."""

import pytest
import torch
from oracles import randomised, seeded

from diffusion_forcing import DiffusionForcing, NoiseSchedule, levels
from diffusion_forcing.backbones import Transformer
from diffusion_forcing.schedule import cosine

K = 40
B, T, WIDTH = 3, 5, 4


def model():
    net = randomised(Transformer(WIDTH, hidden=8, layers=2, heads=2, levels=K), seed=1)
    return DiffusionForcing(net, NoiseSchedule(cosine(K)))


def tokens(seed=0):
    generator = seeded(seed)
    x, noise = torch.randn(2, B, T, WIDTH, generator=generator)
    return x, torch.randint(1, K, (B, T), generator=generator), noise


def test_a_self_context_token_has_no_error_and_changes_what_follows():
    one, (x, k, noise) = model(), tokens()
    imagined = torch.zeros(B, T, dtype=torch.long)
    imagined[0, 2] = K // 2
    plain, led = one(x, k, noise=noise), one(x, k, noise=noise, self_context=imagined)
    assert led[0, 2] == 0
    assert torch.equal(led[1:], plain[1:])
    torch.testing.assert_close(led[0, :2], plain[0, :2])
    assert ((led[0, 3:] - plain[0, 3:]).abs() > 1e-6).all()


def test_it_is_what_the_model_makes_of_it_noised_to_its_level():
    """The same as handing the model's own prediction in as the token."""
    one, (x, k, noise) = model(), tokens()
    imagined = torch.zeros(B, T, dtype=torch.long)
    imagined[:, 1] = 17
    other = noise.flatten(1).roll(1, dims=1).view_as(noise)
    read = torch.where(imagined > 0, imagined, k)
    made = one.predict(one.schedule.add_noise(x, read, other), read).x0
    handed = x.clone()
    handed[:, 1] = made[:, 1]
    expected = one(handed, k, noise=noise)
    found = one(x, k, noise=noise, self_context=imagined)
    keep = [0, 2, 3, 4]
    torch.testing.assert_close(found[:, keep], expected[:, keep])


def test_nothing_is_learned_through_what_was_imagined():
    """Its gradient is that of a token handed in from outside."""
    one, (x, k, noise) = model(), tokens()
    imagined = torch.zeros(B, T, dtype=torch.long)
    imagined[:, 0] = 9
    grads = []
    for read in (
        x,
        torch.cat([one._estimate(x, torch.where(imagined > 0, imagined, k), one._check(x, k, None), noise)[:, :1], x[:, 1:]], dim=1),
    ):
        one.zero_grad()
        how = {"self_context": imagined} if read is x else {}
        one(read, k, noise=noise, **how)[:, 1:].sum().backward()
        grads.append([parameter.grad.clone() for parameter in one.parameters() if parameter.grad is not None])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_a_network_that_sees_everything_does_not_see_the_truth_by_it():
    net = randomised(Transformer(WIDTH, hidden=8, layers=2, heads=2, causal=False, levels=K), seed=1)
    one, (x, k, noise) = DiffusionForcing(net, NoiseSchedule(cosine(K))), tokens()
    k[:, 3:], imagined = K, torch.zeros(B, T, dtype=torch.long)
    imagined[:, 0] = K // 2
    made = [one._estimate(clean, torch.where(imagined > 0, imagined, k), one._check(x, k, None), noise)[:, 0] for clean in (x, other(x))]
    torch.testing.assert_close(*made, atol=2e-2, rtol=0)  # but for the last trace of signal at K


def other(x):
    """Other tokens from the third on."""
    return torch.cat([x[:, :3], x[:, 3:] + 1], dim=1)


def test_with_a_past_of_its_own_there_is_none():
    x, k, noise = tokens()
    with pytest.raises(ValueError, match="self_context needs tokens with one level each"):
        model()(x, k, noise=noise, past=k, self_context=k)


def test_nearly_clean_tokens_of_a_share_of_the_sequences_get_self_context():
    k = levels.noisy_prefix((4000, 6), 1000, seeded(0)).k
    found = levels.self_context_levels(k, 1000, 0.5, seeded(1))
    low = k <= 100
    assert not found[~low].any()
    chosen = (found > 0).any(1)
    assert (found > 0)[chosen].equal(low[chosen]), "all of them, or none"
    assert 0.47 < chosen[low.any(1)].float().mean() < 0.53
    drawn = found[found > 0]
    assert drawn.min() == 100
    assert drawn.max() == 700


@pytest.mark.parametrize("top", [1, 2, 5])
def test_few_levels_are_no_trouble(top):
    found = levels.self_context_levels(torch.zeros(50, 3, dtype=torch.long), top, 1.0, seeded(0))
    assert (found > 0).all()
    assert (found <= top).all()
