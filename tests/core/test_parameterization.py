"""x0, eps and v say the same thing in other units."""

import pytest
import torch
from oracles import seeded

from diffusion_forcing import NoiseSchedule, cosine, linear, sigmoid
from diffusion_forcing.parameterization import check_parameterization, target, to_prediction, with_x0

NAMES = ["x0", "eps", "v"]


def noised(alpha_bar, event=(3,)):
    """One token at each level 0..K, in float64: clean, noise, noisy, alpha, sigma."""
    x, noise = torch.randn(2, 2, len(alpha_bar), *event, generator=seeded(0), dtype=torch.float64)
    shape = (-1,) + (1,) * len(event)
    alpha, sigma = alpha_bar.sqrt().reshape(shape), (1 - alpha_bar).sqrt().reshape(shape)
    return x, noise, alpha * x + sigma * noise, alpha, sigma


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("curve", [linear, cosine, sigmoid])
@pytest.mark.parametrize("event", [(3,), (2, 4, 4)])
def test_the_target_leads_back_to_data_and_noise_at_every_level(name, curve, event):
    x, noise, noisy, alpha, sigma = noised(curve(100), event)
    x0, eps, grad = to_prediction(name, target(name, x, noise, alpha, sigma), noisy, alpha, sigma)
    torch.testing.assert_close(x0, x, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(eps[:, 1:], noise[:, 1:], rtol=1e-8, atol=1e-8)
    assert grad is None


@pytest.mark.parametrize("name", NAMES)
def test_any_output_is_consistent_with_the_noisy_token(name):
    """Whatever the network says, alpha x0 + sigma eps is the token it was shown."""
    _, _, noisy, alpha, sigma = noised(cosine(50))
    out = torch.randn(noisy.shape, generator=seeded(1), dtype=torch.float64)
    x0, eps, _ = to_prediction(name, out, noisy, alpha, sigma)
    torch.testing.assert_close(alpha * x0 + sigma * eps, noisy, rtol=1e-8, atol=1e-8)


def test_one_belief_three_ways():
    """The same belief put as x0, eps or v gives the same pair."""
    x, _, noisy, alpha, sigma = noised(cosine(50))
    belief = x + 0.1
    as_x0 = to_prediction("x0", belief, noisy, alpha, sigma)
    as_eps = to_prediction("eps", as_x0.eps, noisy, alpha, sigma)
    as_v = to_prediction("v", alpha * as_x0.eps - sigma * belief, noisy, alpha, sigma)
    for other in (as_eps, as_v):
        torch.testing.assert_close(other.x0[:, 1:], as_x0.x0[:, 1:], rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(other.eps, as_x0.eps, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_a_clean_token_is_known(name):
    """At level 0 the output does not matter: x0 is the token, eps is 0, and both are exact."""
    x = torch.randn(2, 3, 4, generator=seeded(0))
    out = torch.full_like(x, 1e6)
    x0, eps, _ = to_prediction(name, out, x, torch.ones(2, 3, 1), torch.zeros(2, 3, 1))
    assert torch.equal(x0, x)
    assert torch.equal(eps, torch.zeros_like(x))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_at_level_0_are_finite(name):
    """A guide differentiates through predictions of sequences that hold clean tokens."""
    schedule = NoiseSchedule(cosine(10))
    k = torch.tensor([[0, 5, 10]])
    x = torch.randn(1, 3, 2, generator=seeded(0)).requires_grad_()
    alpha, sigma = schedule.alpha(k)[..., None], schedule.sigma(k)[..., None]
    x0, eps, _ = to_prediction(name, torch.tanh(x), x, alpha, sigma)
    (grad,) = torch.autograd.grad((x0 + eps).sum(), x)
    assert grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_float32_is_enough_below_the_last_levels(name):
    schedule = NoiseSchedule(cosine(1000))
    k = torch.arange(900)[None]
    x, noise = torch.randn(2, 1, 900, 3, generator=seeded(0))
    noisy = schedule.add_noise(x, k, noise)
    alpha, sigma = schedule.alpha(k)[..., None], schedule.sigma(k)[..., None]
    x0, _, _ = to_prediction(name, target(name, x, noise, alpha, sigma), noisy, alpha, sigma)
    torch.testing.assert_close(x0, x, rtol=0, atol=1e-5)


def test_with_x0_holds_the_given_clean_token_to_be_true():
    x, noise, noisy, alpha, sigma = noised(cosine(50))
    prediction = with_x0(x, noisy, alpha, sigma)
    torch.testing.assert_close(prediction.x0, x)
    torch.testing.assert_close(prediction.eps[:, 1:], noise[:, 1:], rtol=1e-8, atol=1e-8)


def test_v_is_what_the_papers_call_v():
    x, noise, alpha, sigma = (torch.tensor([[[value]]]) for value in (2.0, 3.0, 0.8, 0.6))
    assert target("v", x, noise, alpha, sigma).item() == pytest.approx(0.8 * 3 - 0.6 * 2)


@pytest.mark.parametrize("name", NAMES)
def test_known_names_pass(name):
    assert check_parameterization(name) == name


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="x0, eps, v; got 'epsilon'"):
        check_parameterization("epsilon")
