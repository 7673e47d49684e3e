"""Linear guesses over a sequence, and a codec's first direction."""

import pytest
import torch
from oracles import seeded

from diffusion_forcing import DiffusionForcing, NoiseSchedule, Sampler, Transformer, guide, linear, pyramid, rollout, sample
from diffusion_forcing.backbones import RNN
from diffusion_forcing.codecs import Rotate
from diffusion_forcing.preconditioning import KalmanFilter, LinearConstraint, Preconditioning, WienerSmoother

T = 12
COVARIANCE = 9.0 * 0.8 ** torch.arange(T)  # of a process that forgets a fifth a step


def walks(number, seed=0):
    """Sequences (n, T, 3), the second number a smooth process of the covariance above, the others noise."""
    offset = (torch.arange(T)[:, None] - torch.arange(T)).abs()
    root = torch.linalg.cholesky(COVARIANCE[offset])
    x = torch.randn(number, T, 3, generator=seeded(seed))
    x[..., 1] = x[..., 1] @ root.T
    return x


def test_the_covariance_is_found():
    smoother = WienerSmoother.fit(walks(20_000), [1], octaves=0)
    shrunk = COVARIANCE * (T - torch.arange(T)) / T  # the biased estimate, which is always a covariance
    torch.testing.assert_close(smoother.covariance[0], shrunk, atol=0.15, rtol=0.05)


def test_guesses_are_the_conditional_mean_at_each_tokens_own_level():
    schedule, x = NoiseSchedule(linear(100)), walks(500)
    k = torch.randint(1, 101, (500, T), generator=seeded(1))
    noisy = schedule.add_noise(x, k, torch.randn(x.shape, generator=seeded(2)))
    alpha, sigma = schedule.alpha(k)[..., None], schedule.sigma(k)[..., None]
    guess = WienerSmoother(torch.tensor([1]), COVARIANCE[None], octaves=0)(noisy, alpha, sigma)[..., 0] * 3.0
    offset = (torch.arange(T)[:, None] - torch.arange(T)).abs()
    prior = COVARIANCE[offset].double()
    i = 7
    seen = torch.diag(alpha[i, :, 0].double()) @ prior @ torch.diag(alpha[i, :, 0].double()) + torch.diag(sigma[i, :, 0].double() ** 2)
    exact = prior @ torch.diag(alpha[i, :, 0].double()) @ torch.linalg.solve(seen, noisy[i, :, 1].double())
    torch.testing.assert_close(guess[i].double(), exact, atol=0.1, rtol=0)
    alone = alpha[..., 0] * 9 / (alpha[..., 0] ** 2 * 9 + sigma[..., 0] ** 2) * noisy[..., 1]
    error, error_alone = ((guess - x[..., 1]) ** 2).mean(), ((alone - x[..., 1]) ** 2).mean()
    assert error < 0.6 * error_alone, "neighbours tell more than a token alone"


def test_shorter_sequences_are_smoothed_and_longer_ones_refused():
    smoother = WienerSmoother(torch.tensor([1]), COVARIANCE[None])
    one = torch.ones(2, 5, 1)
    assert smoother(torch.zeros(2, 5, 3), one, one).shape == (2, 5, smoother.width)
    with pytest.raises(ValueError, match="sequences of 12 tokens; got 13"):
        smoother(torch.zeros(1, 13, 3), torch.ones(1, 13, 1), torch.ones(1, 13, 1))


def test_a_model_reads_them_and_is_saved_with_them(tmp_path):
    smoother = WienerSmoother.fit(walks(200), [1], octaves=2)
    backbone = Transformer(3, smoother.width, hidden=16, layers=1, heads=2, causal=False)
    model = DiffusionForcing(
        backbone, NoiseSchedule(linear(1000)), preconditioning=Preconditioning(torch.tensor([1.0, 9.0, 1.0]), smoother=smoother)
    )
    torch.nn.init.normal_(model.backbone.proj_out.weight)
    x, k = walks(3), torch.full((3, T), 400)
    before = model.predict(x, k).x0
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(DiffusionForcing.from_pretrained(tmp_path).predict(x, k).x0, before)
    with pytest.raises(ValueError, match="conditions of 0 numbers a token; got 2"):
        model.predict(x, k, torch.zeros(3, T, 2))


def test_mixed_precision_leaves_guesses_alone():
    smoother = WienerSmoother.fit(walks(200), [1], octaves=2)
    x, alpha, sigma = walks(3), torch.full((3, T, 1), 0.8), torch.full((3, T, 1), 0.6)
    with torch.autocast("cpu", torch.bfloat16):
        told = smoother(x, alpha, sigma)
    assert torch.equal(told, smoother(x, alpha, sigma))


def laws():
    """Two equations between neighbouring tokens of three numbers."""
    left, right = torch.randn(2, 2, 3, generator=seeded(3))
    return LinearConstraint(left, right, torch.tensor([0.2, -0.1]), torch.full((2,), 1e-3))


def estimates(b, t, alike=False):
    """Values of tokens (b, t, 3) on their own, and their variances."""
    variance = 0.1 + torch.rand(1 if alike else b, t, 3, generator=seeded(5))
    variance[:, 2] = 0  # a token that is known
    return torch.randn(b, t, 3, generator=seeded(4)), variance


@pytest.mark.parametrize("alike", [False, True])
def test_a_kalman_filter_conditions_each_token_on_the_laws_up_to_it(alike):
    """Against the Gaussian of all tokens so far, conditioned on the equations among them."""
    law, (x0, variance) = laws(), estimates(4, 6, alike)
    mean, left_over, kept = law.filter(x0, variance)
    for row in range(len(variance)):
        for t in range(6):
            prior = torch.diag(variance[row, : t + 1].flatten()).double()
            equations = torch.zeros(2 * t, 3 * (t + 1), dtype=torch.float64)
            for i in range(t):
                equations[2 * i : 2 * i + 2, 3 * i : 3 * i + 6] = torch.cat([law.left, law.right], dim=1)
            noisy = equations @ prior @ equations.T + 1e-3 * torch.eye(2 * t)
            gain = prior @ equations.T @ noisy.inverse()
            residual = equations @ x0[row, : t + 1].flatten().double() + law.offset.repeat(t)
            exact_mean = x0[row, : t + 1].flatten().double() - gain @ residual
            exact = (prior - gain @ equations @ prior)[-3:, -3:]
            torch.testing.assert_close(mean[row, t].double(), exact_mean[-3:], atol=1e-4, rtol=1e-3)
            torch.testing.assert_close(left_over[row, t].double(), exact.diagonal(), atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(kept.covariance[row].double(), law.left.double() @ exact @ law.left.double().T, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("cut", [1, 3, 5])
@pytest.mark.parametrize("alike", [False, True])
def test_a_kalman_filter_goes_on_where_it_ended(cut, alike):
    law, (x0, variance) = laws(), estimates(4, 6, alike)
    whole = law.filter(x0, variance)
    first = law.filter(x0[:, :cut], variance[:, :cut])
    rest = law.filter(x0[:, cut:], variance[:, cut:], first[2])
    for i in range(2):
        parts = torch.cat([part.expand(4, -1, -1) for part in (first[i], rest[i])], dim=1)
        torch.testing.assert_close(parts, whole[i].expand(4, -1, -1), atol=1e-4, rtol=1e-3)
    for a, b in zip(rest[2], whole[2], strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_a_causal_network_takes_a_filter_and_no_smoother(tmp_path):
    smoother, schedule = WienerSmoother(torch.tensor([1]), COVARIANCE[None]), NoiseSchedule(linear(1000))
    with pytest.raises(ValueError, match="reads later tokens"):
        DiffusionForcing(RNN(3, smoother.width, hidden=16), schedule, preconditioning=Preconditioning(smoother=smoother))
    numbers = KalmanFilter(torch.tensor([1]), 3)
    prepared = Preconditioning(torch.ones(3), smoother=numbers)
    with pytest.raises(ValueError, match="follows a linear constraint"):
        DiffusionForcing(RNN(3, numbers.width, hidden=16), schedule, preconditioning=prepared)
    model = filtering("rnn")
    x, k = walks(3), torch.full((3, T), 400)
    amplitudes = model.schedule.alpha(k)[..., None], model.schedule.sigma(k)[..., None]
    changed = x.clone()
    changed[:, 7:] += 1.0
    before, after = (model.preconditioning.build_cond(tokens, *amplitudes, x[..., :0])[0] for tokens in (x, changed))
    assert torch.equal(after[:, :7], before[:, :7])
    assert (after[:, 7:] - before[:, 7:]).abs().amax() > 0.1
    prediction = model.predict(x, k).x0
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(DiffusionForcing.from_pretrained(tmp_path).predict(x, k).x0, prediction)
    assert not model.causal, "the orders of a causal model know nothing of the filter"
    with pytest.raises(ValueError, match="reads each token at one level"):
        model(x, k, past=k)


def filtering(backbone):
    """A causal model with a Kalman filter."""
    generator = seeded(3)
    numbers = KalmanFilter(torch.tensor([1]), 3, octaves=2)
    network = RNN(3, numbers.width, hidden=16) if backbone == "rnn" else Transformer(3, numbers.width, hidden=16, layers=2, heads=2)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    prepared = Preconditioning(torch.tensor([1.0, 9.0, 1.0]), constraint=laws(), smoother=numbers)
    return DiffusionForcing(network, NoiseSchedule(linear(1000)), preconditioning=prepared).requires_grad_(False)


@pytest.mark.parametrize("backbone", ["rnn", "transformer"])
def test_a_model_with_a_filter_goes_on_where_its_past_ended(backbone):
    model, x = filtering(backbone), walks(3)
    k = torch.randint(1, 1001, (3, T), generator=seeded(1))
    k[:, :5] = 0
    whole, state = model.predict(x, k), None
    for tokens in (slice(0, 2), slice(2, 5)):  # in two pieces
        state = model.absorb(x[:, tokens], None, state)
    rest = model.predict(x[:, 5:], k[:, 5:], None, state)
    for a, b in zip(rest[:2], whole[:2], strict=True):
        torch.testing.assert_close(a, b[:, 5:], atol=2e-3, rtol=1e-3)


def test_a_filter_keeps_as_much_of_any_past():
    model, x = filtering("rnn"), walks(2)
    state = model.absorb(x, None, model.absorb(x))
    assert [tuple(part.shape) for part in state.filtered] == [(2, 2), (2, 2, 2)]
    assert torch.isfinite(model.predict(x, torch.full((2, T), 500), None, state).x0).all()
    sampler = Sampler(steps=4, matrix="pyramid").over(model.schedule, 4)
    assert torch.isfinite(rollout(model, sampler, 30, x, generator=seeded(0))).all()


@pytest.mark.parametrize("backbone", ["rnn", "transformer"])
def test_a_cache_of_clean_tokens_changes_no_prediction(backbone):
    model, x = filtering(backbone), walks(4)
    denoise, plain = model.denoiser(cache=True), model.denoiser()
    k = torch.full((4, T), 600)
    k[:, 8:] = 1000
    calls = []
    read = model.absorb
    model.absorb = lambda tokens, *rest: calls.append(tokens.shape[:2]) or read(tokens, *rest)  # type: ignore[method-assign]
    for clean in (0, 2, 3, 3, T):  # as along a pyramid
        k[:, :clean] = 0
        for a, b in zip(denoise(x, k)[0:1], plain(x, k)[0:1], strict=True):
            torch.testing.assert_close(a, b, atol=2e-3, rtol=1e-3)
    assert calls == [(4, 2), (4, 1), (4, T - 1 - 3)], "each clean token is read once"
    changed = x.clone()
    changed[:, 0] += 1
    k[:, 3:] = 500
    torch.testing.assert_close(denoise(changed, k).x0, plain(changed, k).x0, atol=2e-3, rtol=1e-3)
    k[0, 1] = 100  # one sequence's second token is not clean, so the others' is not taken for clean either
    torch.testing.assert_close(denoise(x, k).x0, plain(x, k).x0, atol=2e-3, rtol=1e-3)
    twice = x.repeat_interleave(2, dim=0), k.repeat_interleave(2, dim=0)
    torch.testing.assert_close(denoise(*twice).x0, plain(*twice).x0, atol=2e-3, rtol=1e-3)


def test_a_cache_of_clean_tokens_leaves_guidance_alone():
    model, x = filtering("rnn"), walks(4)
    matrix = pyramid(T, model.schedule.ladder(5))
    matrix[:, 0] = 0
    reward = lambda tokens: -(tokens[:, -1] ** 2).sum(-1)  # noqa: E731
    plans = [sample(guide(model.denoiser(cache=cache), model.schedule, reward, 0.1), model.schedule, x, matrix) for cache in (False, True)]
    torch.testing.assert_close(*plans, atol=1e-2, rtol=1e-2)


def test_how_unsure_a_guess_is_agrees_with_its_errors():
    schedule, x = NoiseSchedule(linear(100)), walks(4000)
    for level in (20, 60, 100):
        k = torch.full((1, T), level)
        k[:, 0] = 0
        alpha, sigma = schedule.alpha(k)[..., None], schedule.sigma(k)[..., None]
        noisy = alpha * x + sigma * torch.randn(x.shape, generator=seeded(2))
        mean, variance = WienerSmoother(torch.tensor([1]), COVARIANCE[None]).posterior(noisy, alpha, sigma)
        error = ((mean[..., 0] - x[..., 1] / 3) ** 2).mean(0)
        torch.testing.assert_close(error, variance[0, :, 0], atol=0.02, rtol=0.1)


def test_waves_double_their_frequency_and_fade_with_doubt():
    smoother = WienerSmoother(torch.tensor([0]), torch.tensor([[4.0, 0.0]]), octaves=2)
    x = torch.tensor([[[0.5], [-1.0]]])
    sure = smoother(x, torch.ones(1, 2, 1), torch.zeros(1, 2, 1))[0, 0]
    angle = torch.pi / 2 * sure[0] * torch.tensor([1.0, 2.0])
    torch.testing.assert_close(sure[0], torch.tensor(0.25), atol=1e-3, rtol=0)
    torch.testing.assert_close(sure[1:3], angle.sin(), atol=0.03, rtol=0)
    torch.testing.assert_close(sure[3:], angle.cos(), atol=0.03, rtol=0)
    unsure = smoother(x, torch.zeros(1, 2, 1), torch.ones(1, 2, 1))[0, 0]
    faded = torch.exp(-((torch.pi / 2 * torch.tensor([1.0, 2.0])) ** 2) / 2)  # nothing is known: the mean of each wave
    torch.testing.assert_close(unsure, torch.cat([torch.zeros(3), faded]), atol=1e-3, rtol=0)


def test_numbers_make_a_map_of_products():
    smoother = WienerSmoother(torch.tensor([0, 2]), torch.tensor([[1.0, 0.0], [1.0, 0.0]]), octaves=1)
    x = torch.tensor([[[0.4, 9.0, -0.7], [0.0, 9.0, 0.0]]])
    features = smoother(x, torch.ones(1, 2, 1), torch.zeros(1, 2, 1))[0, 0]
    assert features.shape == (smoother.width,) == (10,)
    one, two = (torch.stack([torch.tensor(1.0), torch.sin(a), torch.cos(a)]) for a in torch.pi / 2 * torch.tensor([0.4, -0.7]))
    torch.testing.assert_close(features[2:], torch.outer(one, two).flatten()[1:], atol=0.01, rtol=0)


def test_sequences_that_are_alike_are_worked_out_once_with_the_same_result():
    smoother, x, k = WienerSmoother(torch.tensor([1]), COVARIANCE[None]), walks(4), torch.full((4, T), 40)
    schedule = NoiseSchedule(linear(100))
    alpha, sigma = schedule.alpha(k)[..., None], schedule.sigma(k)[..., None]
    torch.testing.assert_close(smoother(x, alpha[:1], sigma[:1]), smoother(x, alpha, sigma), atol=1e-4, rtol=0)


def test_a_first_direction_stands_on_its_own():
    tokens = torch.randn(5000, 6, generator=seeded(3)) * torch.tensor([2.0, 2.0, 2.0, 1.0, 1.0, 0.5])
    first = torch.tensor([1.0, 0, 1.0, 0, 0, 0])
    rotate = Rotate.fit(tokens, first=first)
    torch.testing.assert_close(rotate.basis[:, 0], first / 2**0.5, atol=1e-5, rtol=0)
    torch.testing.assert_close(rotate.basis.T @ rotate.basis, torch.eye(6), atol=1e-5, rtol=0)
    torch.testing.assert_close(rotate.encode(tokens).var(0), rotate.variance, rtol=0.01, atol=0)
    torch.testing.assert_close(rotate.decode(rotate.encode(tokens)), tokens, atol=1e-4, rtol=0)
