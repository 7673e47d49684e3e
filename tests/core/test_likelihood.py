"""The evidence lower bound against exact Gaussian likelihoods. All numbers are nats, for each number of a token."""

import math

import pytest
import torch
from oracles import Gaussian, ar1, mixed, randomised, seeded

from diffusion_forcing import RNN, DiffusionForcing, NoiseSchedule, Transformer, cosine, elbo, linear
from diffusion_forcing.likelihood import forced_by, forced_by_denoiser

K = 200
WIDTH = 50  # independent numbers in a token, each a sequence of its own: as many sequences at once
MARGIN = 0.05  # how far below the truth the bound may lie for one token, with the best denoiser and the full chain
CURVES = {"cosine": cosine, "linear": linear}
SCHEDULE = NoiseSchedule(cosine(K))


def oracle(process):
    """The best causal denoiser, asked for each token given a past at other levels."""
    return forced_by_denoiser(process.denoiser(causal=True), process.schedule.levels)


def bound(process, x, k=None, seed=1, **options):
    """(n,) bound of each sequence, for one number of its tokens."""
    return elbo(oracle(process), process.schedule, x, k, generator=seeded(seed), **options).sum(1) / x.shape[2]


def gap(exact, bounds):
    """How far the bound lies below the exact likelihood on average, and the standard error of that."""
    difference = exact - bounds
    return difference.mean().item(), (difference.std() / len(difference) ** 0.5).item()


def assert_tight(exact, bounds, tokens):
    mean, spread = gap(exact, bounds)
    assert spread < 0.02, "too few draws to tell"
    assert mean > -4 * spread, "above the exact likelihood: no bound"
    assert mean < tokens * MARGIN + 4 * spread


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
@pytest.mark.parametrize("covariance", [ar1(3, 0.9), mixed(3)], ids=["ar1", "unstructured"])
def test_the_bound_of_clean_sequences_is_just_below_their_likelihood(curve, covariance):
    process = Gaussian(NoiseSchedule(curve(K)), covariance)
    x = process.draw(200, WIDTH, seeded(0))
    exact = process.log_likelihood(x, torch.zeros(3, dtype=torch.long)) / WIDTH
    assert_tight(exact, bound(process, x), 3)


@pytest.mark.parametrize("levels", [(0, K, 0), (K, 0, K), (K, 0, 0), (K, K, 0)], ids=str)
def test_tokens_at_0_among_tokens_at_k_give_the_likelihood_of_a_subsequence(levels):
    process = Gaussian(SCHEDULE, ar1(3, 0.9))
    x = process.draw(200, WIDTH, seeded(0))
    k = torch.tensor(levels)
    kept = [token for token in range(3) if levels[token] == 0]
    exact = process.log_likelihood(x, torch.zeros(3, dtype=torch.long), kept) / WIDTH
    assert_tight(exact, bound(process, x, k), len(kept))


@pytest.mark.parametrize("levels", [(50, 50, 50), (100, 10, 66), (20, 100, 0), (190, 60, 120)], ids=str)
def test_tokens_at_levels_between_give_the_likelihood_of_noisy_sequences(levels):
    """On average over data and noise: minus the entropy of the noised process."""
    process = Gaussian(SCHEDULE, ar1(3, 0.9))
    x = process.draw(400, WIDTH, seeded(0))
    k = torch.tensor(levels)
    exact = -0.5 * (3 * math.log(2 * math.pi * math.e) + torch.logdet(process.noisy_covariance(k)))
    assert_tight(exact, bound(process, x, k), 3)


def test_what_is_left_of_the_signal_at_k_is_paid_for():
    """A schedule that stops at 30 % of the signal: the bound is still one, and tight for a token of variance 1 without a past."""
    process = Gaussian(NoiseSchedule(torch.linspace(1, 0.3, K + 1, dtype=torch.float64)), ar1(1, 0.9))
    x = process.draw(400, WIDTH, seeded(0))
    exact = process.log_likelihood(x, torch.zeros(1, dtype=torch.long)) / WIDTH
    assert_tight(exact, bound(process, x), 1)


def test_each_token_has_its_share():
    """The bound of a token is the likelihood of the token given those before it: minus its conditional entropy."""
    process = Gaussian(SCHEDULE, ar1(3, 0.9))
    x = process.draw(400, WIDTH, seeded(0))
    shares = elbo(oracle(process), SCHEDULE, x, generator=seeded(1)).mean(0) / WIDTH
    variance = torch.tensor([1.0, 1 - 0.9**2, 1 - 0.9**2], dtype=torch.float64)
    exact = -0.5 * torch.log(2 * math.pi * math.e * variance)
    torch.testing.assert_close(shares, exact, rtol=0, atol=MARGIN + 0.04)


def test_the_bound_is_of_the_likelihood_the_denoiser_believes_in():
    """One who takes the tokens to be nearly unrelated gives the data the likelihood of that belief."""
    truth, belief = Gaussian(SCHEDULE, ar1(3, 0.9)), Gaussian(SCHEDULE, ar1(3, 0.3))
    x = truth.draw(200, WIDTH, seeded(0))
    clean = torch.zeros(3, dtype=torch.long)
    bounds = bound(belief, x)
    assert_tight(belief.log_likelihood(x, clean) / WIDTH, bounds, 3)
    assert gap(truth.log_likelihood(x, clean) / WIDTH, bounds)[0] > 0.5


def test_a_denoiser_that_is_wrong_has_a_lower_bound():
    process = Gaussian(SCHEDULE, ar1(3, 0.9))
    x = process.draw(100, WIDTH, seeded(0))
    best = oracle(process)

    def wrong(x, k, past_x, past_k):
        pred = best(x, k, past_x, past_k)
        return pred._replace(x0=pred.x0 + 0.1)

    worse = elbo(wrong, SCHEDULE, x, generator=seeded(1)).sum(1) / WIDTH
    assert worse.mean() < bound(process, x).mean() - 0.5


def test_a_coarser_chain_is_looser_and_still_a_bound():
    process = Gaussian(SCHEDULE, ar1(3, 0.9))
    x = process.draw(200, WIDTH, seeded(0))
    exact = process.log_likelihood(x, torch.zeros(3, dtype=torch.long)) / WIDTH
    full, some, few = (gap(exact, bound(process, x, ladder=SCHEDULE.ladder(steps)))[0] for steps in (K, 10, 5))
    assert full > -0.06
    assert some > full + 0.1
    assert few > some + 0.1


def test_no_ladder_is_the_full_one():
    process = Gaussian(SCHEDULE, ar1(3, 0.9))
    x = process.draw(3, 2, seeded(0))
    assert torch.equal(bound(process, x), bound(process, x, ladder=SCHEDULE.ladder(K)))


def test_a_token_between_two_rungs_starts_from_its_own_level():
    """Rungs below it do not exist: only the part of the chain above a token's level matters."""
    process = Gaussian(SCHEDULE, ar1(2, 0.9))
    x = process.draw(400, WIDTH, seeded(0))
    k = torch.tensor([47, 47])
    exact = -0.5 * (2 * math.log(2 * math.pi * math.e) + torch.logdet(process.noisy_covariance(k)))
    fine = torch.cat([torch.tensor([0, 40]), torch.arange(50, K + 1)])
    coarse = torch.cat([torch.tensor([0, 40]), torch.arange(80, K + 1, 40)])
    means = [gap(exact, bound(process, x, k, ladder=ladder)) for ladder in (fine, coarse)]
    for mean, spread in means:
        assert mean > -4 * spread
    assert means[1][0] > means[0][0]


def test_tokens_at_k_give_nothing():
    process = Gaussian(SCHEDULE, ar1(3, 0.9))
    x = process.draw(5, 4, seeded(0))
    shares = elbo(oracle(process), SCHEDULE, x, torch.tensor([0, K, K]), generator=seeded(1))
    assert torch.equal(shares[:, 1:], torch.zeros(5, 2, dtype=torch.float64))
    assert (shares[:, 0] != 0).all()
    assert torch.equal(elbo(oracle(process), SCHEDULE, x, torch.full((3,), K)), torch.zeros(5, 3, dtype=torch.float64))


def test_a_token_at_k_is_not_seen():
    """Whatever stood there, the others have the same bound."""
    process = Gaussian(SCHEDULE, ar1(3, 0.9))
    x = process.draw(50, WIDTH, seeded(0))
    other = x.clone()
    other[:, 1] += 1
    k = torch.tensor([0, K, 0])
    first, second = bound(process, x, k), bound(process, other, k)
    torch.testing.assert_close(first, second, rtol=0, atol=0.05)


def test_levels_come_for_all_sequences_or_for_each():
    process = Gaussian(SCHEDULE, ar1(3, 0.9))
    x = process.draw(2, 4, seeded(0))
    one = bound(process, x, torch.tensor([0, 50, K]))
    assert torch.equal(one, bound(process, x, torch.tensor([[0, 50, K], [0, 50, K]])))
    each = bound(process, x, torch.tensor([[0, 50, K], [0, 0, 0]]))
    torch.testing.assert_close(each[0], one[0])
    assert not torch.allclose(each[1], one[1])
    assert torch.equal(bound(process, x), bound(process, x, torch.zeros(3, dtype=torch.long)))


def test_draws_are_averaged():
    process = Gaussian(SCHEDULE, ar1(2, 0.9))
    x = process.draw(1, 1, seeded(0)).expand(200, 2, 1)
    ladder = SCHEDULE.ladder(20)
    one, many = (bound(process, x, ladder=ladder, draws=draws) for draws in (1, 10))
    assert 5 < one.var() / many.var() < 20
    assert (one.mean() - many.mean()).abs() < 5 * (one.var() / 200).sqrt()


def test_the_bound_adds_up_the_numbers_of_a_token_whatever_their_shape():
    process = Gaussian(SCHEDULE, ar1(2, 0.9))
    x = process.draw(3, 8, seeded(0))
    flat = oracle(process)

    def shaped(x, k, past_x, past_k):
        pred = flat(x.flatten(2), k, past_x.flatten(2), past_k)
        return pred._replace(x0=pred.x0.view_as(x), eps=pred.eps.view_as(x))

    images = elbo(shaped, SCHEDULE, x.view(3, 2, 2, 2, 2), ladder=SCHEDULE.ladder(10), generator=seeded(1))
    assert images.shape == (3, 2)
    torch.testing.assert_close(images, elbo(flat, SCHEDULE, x, ladder=SCHEDULE.ladder(10), generator=seeded(1)))


# Models.


def model(kind, cond=0):
    net = {
        "rnn": lambda: RNN(2, cond, hidden=16, layers=2, levels=K),
        "transformer": lambda: Transformer(2, cond, hidden=16, heads=2, layers=2, levels=K),
        "windowed": lambda: Transformer(2, cond, hidden=16, heads=2, layers=2, window=2, levels=K),
        "seeing": lambda: Transformer(2, cond, hidden=16, heads=2, layers=2, causal=False, levels=K),
    }[kind]()
    return randomised(DiffusionForcing(net, SCHEDULE))


def tokens(seed=0):
    generator = seeded(seed)
    return torch.randn(3, 4, 2, generator=generator), torch.randint(0, K + 1, (3, 4), generator=generator)


@pytest.mark.parametrize("kind", ["rnn", "transformer", "windowed"])
def test_all_tokens_at_once_are_token_by_token(kind):
    net = model(kind, cond=1)
    (x, k), (past_x, past_k) = tokens(), tokens(1)
    cond = torch.randn(3, 4, 1, generator=seeded(2))
    with torch.no_grad():
        at_once = forced_by(net, cond)(x, k, past_x, past_k)
        slow = forced_by_denoiser(lambda x, k: net.predict(x, k, cond), K)(x, k, past_x, past_k)
    torch.testing.assert_close(at_once.x0, slow.x0, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(at_once.eps, slow.eps, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["rnn", "transformer", "windowed"])
def test_the_bound_of_a_model_is_the_same_either_way(kind):
    net = model(kind, cond=1)
    x, k = tokens()
    cond = torch.randn(3, 4, 1, generator=seeded(2))
    ladder = SCHEDULE.ladder(10)
    fast = elbo(net, SCHEDULE, x, k, cond, ladder=ladder, generator=seeded(3))
    slow = forced_by_denoiser(lambda x, k: net.predict(x, k, cond), K)
    torch.testing.assert_close(fast, elbo(slow, SCHEDULE, x, k, ladder=ladder, generator=seeded(3)), rtol=1e-3, atol=1e-3)
    assert fast.dtype == torch.float32
    assert not fast.requires_grad


def test_the_past_is_seen_at_its_own_levels():
    """forced_by_denoiser shows the past as given, the token itself, and a future of pure noise."""
    (x, k), (past_x, past_k) = tokens(), tokens(1)
    shown = []

    def denoise(y, levels):
        shown.append((y, levels))
        return Gaussian(SCHEDULE, ar1(4, 0.5)).denoiser()(y, levels)

    forced_by_denoiser(denoise, K)(x, k, past_x, past_k)
    assert len(shown) == 4
    for t, (y, levels) in enumerate(shown):
        assert torch.equal(y[:, :t], past_x[:, :t])
        assert torch.equal(levels[:, :t], past_k[:, :t])
        assert torch.equal(y[:, t], x[:, t])
        assert torch.equal(levels[:, t], k[:, t])
        assert (levels[:, t + 1 :] == K).all()


@pytest.mark.parametrize("kind", ["rnn", "transformer", "seeing"])
def test_a_bound_is_a_function_of_its_generator(kind):
    """Also for a model that sees everything, whose future is noise that has to come from somewhere."""
    net = model(kind)
    x, _ = tokens()
    first, again, other = (elbo(net, SCHEDULE, x, ladder=SCHEDULE.ladder(5), generator=seeded(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("kind", ["rnn", "transformer"])
def test_no_token_depends_on_later_ones(kind):
    net = model(kind)
    x, _ = tokens()
    other = x.clone()
    other[:, 2:] += 1
    first, second = (elbo(net, SCHEDULE, part, ladder=SCHEDULE.ladder(5), generator=seeded(0)) for part in (x, other))
    assert torch.equal(first[:, :2], second[:, :2])
    assert not torch.allclose(first[:, 2:], second[:, 2:])


@pytest.mark.parametrize(
    ("k", "words"), [(torch.tensor([0, 0, 0, K + 1]), f"0..{K}; got 0..{K + 1}"), (torch.zeros(4), "integers.*float32")], ids=str
)
def test_levels_that_are_no_levels_are_refused(k, words):
    with pytest.raises(ValueError, match=words):
        elbo(model("rnn"), SCHEDULE, tokens()[0], k)


@pytest.mark.parametrize("ladder", [[0, 50, 100], [20, 100, K], [0, 100, 50, K]], ids=str)
def test_a_chain_that_is_not_from_0_to_k_is_refused(ladder):
    """It would leave part of the way out and give more than the likelihood."""
    with pytest.raises(ValueError, match="ladder"):
        elbo(model("rnn"), SCHEDULE, tokens()[0], ladder=torch.tensor(ladder))
