"""The evidence lower bound and the probability flow against exact likelihoods. All numbers are nats, for each number of a token."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Gaussian, amplitudes, ar1, believing, mixed, randomised, seeded

from diffusion_forcing import (
    RNN,
    DiffusionForcing,
    NoiseSchedule,
    Sampler,
    Transformer,
    bits_per_number,
    cosine,
    elbo,
    infer_level,
    joint_log_likelihood,
    linear,
    log_likelihood,
    sample,
    start,
    start_at,
)
from diffusion_forcing.codecs import Normalize, codec_traits
from diffusion_forcing.likelihood import _choices, _profile, forced_by, forced_by_denoiser

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


# The probability flow.

FINE = {name: NoiseSchedule(curve(1000)) for name, curve in CURVES.items()}
PROCESSES = {"ar1": ar1(4, 0.9), "narrow": ar1(4, 0.99), "unstructured": mixed(4)}
MIXED_LEVELS = [[0, 0, 0, 0], [0, 1000, 0, 1000], [100, 10, 500, 0], [1000, 300, 300, 900]]


def noised(schedule, x, k, seed=1):
    return schedule.add_noise(x, k.expand(x.shape[:2]), torch.randn(x.shape, generator=seeded(seed), dtype=x.dtype))


@pytest.mark.parametrize("schedule", FINE.values(), ids=FINE)
@pytest.mark.parametrize("covariance", PROCESSES.values(), ids=PROCESSES)
@pytest.mark.parametrize("levels", MIXED_LEVELS, ids=str)
def test_the_flow_gives_the_likelihood_of_tokens_at_any_levels(schedule, covariance, levels):
    """Of all together and, of a causal denoiser, one by one; those at K are absent. Largest error measured: 0.018."""
    process, k = Gaussian(schedule, covariance), torch.tensor(levels)
    y = noised(schedule, process.draw(100, 2, seeded(0)), k)
    present = [token for token in range(4) if levels[token] < 1000]
    exact = process.log_likelihood(y, k, present)
    shares = log_likelihood(forced_by_denoiser(process.denoiser(causal=True), 1000), schedule, y, k)
    for estimate in (joint_log_likelihood(process.denoiser(), schedule, y, k), shares.sum(1)):
        error = (estimate - exact) / (2 * len(present))
        assert error.mean().abs() < 0.01
        assert error.abs().max() < 0.03
    assert torch.equal(shares[:, k == 1000], torch.zeros(100, 4 - len(present), dtype=torch.float64))


def test_the_flow_of_one_token_is_its_likelihood_given_the_past():
    process, k = Gaussian(FINE["cosine"], PROCESSES["ar1"]), torch.tensor([0, 200, 0, 600])
    y = noised(process.schedule, process.draw(100, 2, seeded(0)), k)
    exact = torch.stack([process.log_likelihood(y, k, list(range(n + 1))) for n in range(4)], dim=1)
    exact = exact.diff(dim=1, prepend=torch.zeros(100, 1))
    shares = log_likelihood(forced_by_denoiser(process.denoiser(causal=True), 1000), process.schedule, y, k)
    assert ((shares - exact) / 2).abs().max() < 0.03


def test_the_flow_of_two_modes_is_their_likelihood():
    """Normal distributions of width 0.2 about -0.98 and 0.98. Measured: 0.006 on average, 0.016 root mean square."""
    schedule, means, width = FINE["cosine"], torch.tensor([-0.98, 0.98], dtype=torch.float64), 0.2

    def denoise(x, k):
        alpha, sigma = amplitudes(schedule, k, x[..., None])
        off, variance = x.double()[..., None] - alpha * means, alpha**2 * width**2 + sigma**2
        mode = (-0.5 * off**2 / variance).softmax(-1)
        return believing(schedule, (mode * (means + alpha * width**2 / variance * off)).sum(-1), x, k)

    generator = seeded(0)
    sign = torch.randint(0, 2, (300, 1, 1), generator=generator) * 2 - 1
    x = 0.98 * sign + width * torch.randn(300, 1, 1, generator=generator, dtype=torch.float64)
    for level, margin in ((0, 0.01), (100, 0.006), (500, 0.001)):
        k = torch.tensor([level])
        y = noised(schedule, x, k)[:, 0]
        alpha, sigma = schedule.alpha(k).double(), schedule.sigma(k).double()
        modes = torch.distributions.Normal(alpha * means, (alpha**2 * width**2 + sigma**2).sqrt()).log_prob(y)
        error = joint_log_likelihood(denoise, schedule, y[:, None], k) - (modes.logsumexp(1) - math.log(2))
        assert error.mean().abs() < margin
        assert error.square().mean().sqrt() < 2 * margin


def test_more_steps_come_closer():
    process = Gaussian(FINE["cosine"], PROCESSES["narrow"])
    x, clean = process.draw(100, 2, seeded(0)), torch.zeros(4, dtype=torch.long)
    exact = process.log_likelihood(x, clean)
    errors = [(joint_log_likelihood(process.denoiser(), process.schedule, x, steps=n) - exact).square().mean().sqrt() for n in (16, 32, 64)]
    assert errors[0] > 3 * errors[1] > 9 * errors[2]  # of second order


@settings(deadline=None, derandomize=True, max_examples=6)
@given(st.integers(0, 10**6), st.sampled_from(sorted(CURVES)), st.integers(5, 100), st.integers(1, 3))
def test_the_bound_is_never_above_the_likelihood_and_the_flow_is_near_it(seed, curve, steps, t):
    """Whatever the process, the levels and the ladder, up to what the noise of the bound leaves open."""
    process, generator = Gaussian(NoiseSchedule(CURVES[curve](K)), mixed(t, seed)), seeded(seed + 1)
    k = torch.randint(0, 21, (t,), generator=generator) * (K // 20)
    x = process.draw(200, 20, generator)
    y = process.schedule.add_noise(x, k.expand(200, t), torch.randn(x.shape, generator=generator, dtype=x.dtype))
    exact = process.log_likelihood(y, k, [i for i in range(t) if k[i] < K]) / 20
    estimate = joint_log_likelihood(process.denoiser(), process.schedule, y, k) / 20
    assert (estimate - exact).abs().mean() < 0.02 * t
    bounds = elbo(oracle(process), process.schedule, x, k, ladder=process.schedule.ladder(steps), generator=generator).sum(1) / 20
    for likelihood in (exact, estimate):
        mean, spread = gap(likelihood, bounds)
        assert mean > -4 * spread - 0.01


def test_random_vectors_estimate_the_flow_and_tell_their_error():
    process, k = Gaussian(FINE["cosine"], PROCESSES["ar1"]), torch.tensor([0, 200, 0, 600])
    y = noised(process.schedule, process.draw(50, 2, seeded(0)), k)
    causal = forced_by_denoiser(process.denoiser(causal=True), 1000)
    for call, denoise, shape in ((joint_log_likelihood, process.denoiser(), (50,)), (log_likelihood, causal, (50, 4))):
        exact = call(denoise, process.schedule, y, k, steps=10)
        estimates = call(denoise, process.schedule, y, k, steps=10, probes=40)
        assert estimates.shape == (40, *shape)
        error, spread = estimates.mean(0) - exact, estimates.std(0) / 40**0.5
        assert (error.abs() <= 5 * spread + 1e-6).all()
    assert spread.max() < 1e-6, "numbers of a token that do not tell of each other: one vector suffices"


@pytest.mark.parametrize("call", [log_likelihood, joint_log_likelihood])
def test_what_stands_at_k_does_not_matter_to_the_flow(call):
    net, (x, _) = model("seeing"), tokens()
    other = x.clone()
    other[:, 1] = torch.nan
    k = torch.tensor([0, K, 40, 0])
    assert torch.equal(call(net, SCHEDULE, x, k, steps=4), call(net, SCHEDULE, other, k, steps=4))
    assert not call(net, SCHEDULE, other, k, steps=4).isnan().any()


@pytest.mark.parametrize("kind", ["rnn", "transformer", "windowed"])
def test_the_flow_of_a_causal_model_is_one_token_after_another(kind):
    net = model(kind, cond=1)
    x, k = tokens()
    cond = torch.randn(3, 4, 1, generator=seeded(2))
    shares = log_likelihood(net, SCHEDULE, x, k, cond, steps=6)
    assert shares.shape == (3, 4)
    assert not shares.requires_grad
    for joint in (
        joint_log_likelihood(net, SCHEDULE, x, k, cond, steps=6),
        joint_log_likelihood(net.denoiser(cond), SCHEDULE, x, k, steps=6),
    ):
        torch.testing.assert_close(joint, shares.sum(1), rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        state = net.absorb(x[:, :3], cond[:, :3], level=k[:, :3])
    last = joint_log_likelihood(net.denoiser(cond[:, 3:], state), SCHEDULE, x[:, 3:], k[:, 3:], steps=6)
    torch.testing.assert_close(last, shares[:, 3], rtol=1e-3, atol=1e-3)


def test_the_flow_calls_the_model_once_a_step():
    process, calls = Gaussian(SCHEDULE, ar1(2, 0.5)), []

    def counted(x, k):
        calls.append(k)
        return process.denoiser()(x, k)

    joint_log_likelihood(counted, SCHEDULE, process.draw(2, 1, seeded(0)), torch.tensor([0, 50]), steps=7)
    levels = torch.stack(calls)[:, 0]
    assert len(calls) == 8
    assert levels[0].tolist() == [0, 50]
    assert levels[-1].tolist() == [K, K]
    assert (levels.diff(dim=0) >= 0).all()


def test_bits_are_of_raw_data_if_the_codec_is_counted():
    """Numbers of standard deviation 8, encoded to 1: three bits more of raw data each."""
    codec = Normalize(torch.zeros(2), torch.full((2,), 8.0))
    nats = log_likelihood(lambda x, k, *past: believing(SCHEDULE, 0 * x + SCHEDULE.alpha(k)[..., None] * x, x, k), SCHEDULE, tokens()[0])
    encoded, raw = bits_per_number(nats, 2), bits_per_number(nats, 2, codec_traits(codec).log_det)
    torch.testing.assert_close(encoded, (tokens()[0] ** 2 / 2 + math.log(2 * math.pi) / 2).mean(-1) / math.log(2))
    torch.testing.assert_close(raw.double(), encoded.double() + 3)
    with pytest.raises(ValueError, match="numbers"):
        bits_per_number(nats, 0)


def test_flows_that_cannot_be_followed_are_refused():
    net, (x, _) = model("rnn"), tokens()
    for options, words in (({"steps": 0}, "steps=0"), ({"probes": 0}, "probes"), ({"k": torch.tensor([0, 0, 0, K + 1])}, f"0..{K}")):
        with pytest.raises(ValueError, match=words):
            log_likelihood(net, SCHEDULE, x, **options)
    with pytest.raises(ValueError, match="probes=8"):
        joint_log_likelihood(Gaussian(SCHEDULE, ar1(2, 0.5)).denoiser(), SCHEDULE, torch.zeros(1, 2, 5000))


def test_small_errors_of_eps_near_k_stay_small():
    """The clean token's are divided by alpha, which is nearly 0 there: coarse steps would make nats of them."""
    process = Gaussian(FINE["cosine"], PROCESSES["ar1"])
    best = process.denoiser()

    def denoise(x, k):
        alpha, sigma = amplitudes(process.schedule, k, x)
        eps = best(x, k).eps + 0.01
        return believing(process.schedule, ((x - sigma * eps) / alpha).clamp(-5, 5), x, k)

    x = process.draw(100, 2, seeded(0))
    difference = joint_log_likelihood(denoise, process.schedule, x) - joint_log_likelihood(best, process.schedule, x)
    assert difference.abs().mean() / 8 < 0.1


# The level of an observation.


def corrupted(process, n, width, share, errors, seed=0):
    """Clean sequences, the same measured with some tokens bad, which those are and the errors of each token."""
    generator, t = seeded(seed), len(process.covariance)
    x = process.draw(n, width, generator)
    bad = torch.rand(n, t, generator=generator).argsort(1) < round(share * t)
    low, high = (math.log(error) for error in errors)
    error = torch.where(bad, torch.exp(low + (high - low) * torch.rand(n, t, generator=generator)), 0.0)
    return x, x + error[..., None] * torch.randn(x.shape, generator=generator, dtype=x.dtype), bad, error


def levels_of(schedule, error):
    return torch.where(error > 0, schedule.level_of(error.clamp(min=1e-3)), 0)


def test_one_call_at_each_candidate_gives_the_likelihood_of_all():
    """Of a token whose neighbours are at levels of their own, against the formula, over that of the first candidate."""
    process, schedule = Gaussian(FINE["cosine"], PROCESSES["ar1"]), FINE["cosine"]
    k = torch.tensor([0, 300, 0, 600])
    y, token, choices = 1.5 * process.draw(20, 3, seeded(0)), torch.full((20,), 2), _choices(schedule, None)
    choices = choices[(choices == 0) | (choices > 60)]  # a first step that matters
    alpha = schedule.alpha(k).double()[:, None]
    profile = _profile(process.denoiser(), schedule, alpha * y, k.expand(20, 4), y[:, 2], token, choices)
    exact = []
    for level in choices:
        k[2] = level
        a = schedule.alpha(k).double()[:, None]
        exact.append(process.log_likelihood(a * y, k) + 3 * a[2].log())
    exact = torch.stack(exact, dim=1)
    near = schedule.sigma(choices) < 10 * schedule.alpha(choices)
    assert (profile - (exact - exact[:, :1]))[:, near].abs().max() < 0.06


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3])
def test_bad_tokens_are_found_and_good_ones_are_not_suspected(width, share):
    """Errors of 2 to 4 standard deviations. Measured: 0.4 % false alarms at most, and 92 % of levels within 20 % of K."""
    process = Gaussian(FINE["cosine"], ar1(12, 0.9))
    _, y, bad, error = corrupted(process, 100, width, share, (2, 4), seed=7)
    levels = infer_level(process.denoiser(), process.schedule, y.float())
    assert (levels[~bad] > 0).double().mean() < 0.02
    if share:
        off = (levels - levels_of(process.schedule, error))[bad].abs() / 1000
        assert (off < 0.2).double().mean() > 0.9
        assert (levels[bad] == 0).double().mean() < 0.03


def test_sequences_are_repaired_nearly_as_well_as_by_one_who_knows_the_levels():
    process = Gaussian(FINE["cosine"], ar1(12, 0.9))
    schedule, sampler = process.schedule, Sampler(50)
    x, y, _, error = corrupted(process, 60, 8, 0.3, (1, 4))

    def repaired(levels):
        matrix = start_at(sampler.matrix_for(schedule, 12), levels)
        begun = start(schedule, matrix, y.shape[::2], y.float(), seeded(0))
        return float(((sample(process.denoiser(), schedule, begun, sampler.along(matrix), generator=seeded(1)) - x) ** 2).mean())

    inferred, true = repaired(infer_level(process.denoiser(), schedule, y.float())), repaired(levels_of(schedule, error))
    assert inferred < 1.3 * true
    assert inferred < 0.1 * ((y - x) ** 2).mean()


def test_a_bad_token_does_not_bring_its_neighbours_into_doubt():
    process = Gaussian(FINE["cosine"], ar1(6, 0.95))
    y = process.draw(20, 4, seeded(0))
    y[:, 3] += 5 * torch.randn(20, 4, generator=seeded(1))
    levels = infer_level(process.denoiser(), process.schedule, y.float())
    assert (levels[:, 3] > 400).all()
    assert (levels > 0).sum() < 23


def test_a_round_of_all_tokens_comes_before_the_first_change_and_after_the_last():
    process, tried = Gaussian(FINE["cosine"], ar1(6, 0.9)), []

    def counted(x, k):
        tried.append(len(x))
        return process.denoiser()(x, k)

    def tokens_tried(y):
        tried.clear()
        infer_level(counted, process.schedule, y.float())
        return sum(tried) / len(_choices(process.schedule, None))

    y = process.draw(5, 4, seeded(0))
    assert tokens_tried(y) == 5 * 6
    y[0, 3] += 5
    assert 5 * 6 + 6 <= tokens_tried(y) <= 5 * 6 + 6 + 4  # of one sequence all again, and what its bad token brought into doubt


def test_absent_tokens_stay_absent_and_do_not_matter():
    process = Gaussian(FINE["cosine"], ar1(6, 0.9))
    _, y, _, _ = corrupted(process, 10, 4, 0.3, (2, 4))
    absent = torch.zeros(10, 6, dtype=torch.bool)
    absent[:, 2] = True
    y[:, 2] = torch.nan
    levels = infer_level(process.denoiser(), process.schedule, y.float(), absent)
    assert (levels[:, 2] == 1000).all()
    rest = [0, 1, 3, 4, 5]
    without = Gaussian(process.schedule, process.covariance[rest][:, rest])
    assert torch.equal(levels[:, rest], infer_level(without.denoiser(), process.schedule, y[:, rest].float()))


def test_absent_tokens_may_be_nan_and_others_may_not():
    """Told nothing, an inferred level would be one of 25 by chance."""
    process = Gaussian(SCHEDULE, ar1(4, 0.9))
    x = torch.randn(3, 4, 1, generator=seeded(0))
    missing = torch.zeros(3, 4, dtype=torch.bool)
    missing[:, 1] = True
    holes = x.masked_fill(missing[..., None], torch.nan)
    with pytest.raises(ValueError, match=r"first in sequence 0, token 1: .* absent=~x.isfinite\(\)"):
        infer_level(process.denoiser(), SCHEDULE, holes)
    levels = [infer_level(process.denoiser(), SCHEDULE, values, missing) for values in (x, holes)]
    assert torch.equal(*levels)
    bounds = [elbo(oracle(process), SCHEDULE, values, K * missing[0], generator=seeded(0)) for values in (x, holes)]
    assert torch.isfinite(bounds[1]).all()
    torch.testing.assert_close(*bounds, rtol=0, atol=1e-3)  # of what is left of the signal at K


def test_candidates_and_threshold_are_kept():
    process = Gaussian(FINE["cosine"], ar1(6, 0.9))
    _, y, _, _ = corrupted(process, 10, 4, 0.3, (2, 4))
    call = lambda **options: infer_level(process.denoiser(), process.schedule, y.float(), **options)  # noqa: E731
    candidates = torch.tensor([50, 100, 200, 400, 600, 800])
    levels = call(candidates=candidates)
    assert torch.isin(levels, candidates).all()
    assert (levels > 50).any()
    assert (call(threshold=1e6) == 0).all()
    assert (call(threshold=1.0) > 0).sum() >= (call(threshold=10.0) > 0).sum()
    for wrong in (torch.tensor([0]), torch.tensor([0, 5, 5]), torch.tensor([0, 1001])):
        with pytest.raises(ValueError, match=r"candidates|levels"):
            call(candidates=wrong)


@pytest.mark.parametrize("kind", ["rnn", "transformer", "seeing"])
def test_a_model_infers_levels_of_each_sequence_by_itself(kind):
    """With its condition, by the model or its denoiser; if causal, from the past."""
    net = model(kind, cond=1)
    x, cond = 3 * tokens()[0], torch.randn(3, 4, 1, generator=seeded(2))
    call = lambda x, cond: infer_level(net, SCHEDULE, x, cond=cond, threshold=0.5, generator=seeded(0))  # noqa: E731
    levels = call(x, cond)
    assert (levels > 0).any()
    assert torch.equal(levels, torch.cat([call(x[i : i + 1], cond[i : i + 1]) for i in range(3)]))
    assert torch.equal(levels, infer_level(net.denoiser(cond), SCHEDULE, x, threshold=0.5))
    other = torch.cat([x[:, :2], 5 - x[:, 2:]], dim=1)
    assert torch.equal(call(other, cond)[:, :2], levels[:, :2]) or not net.causal
    with torch.no_grad():
        past = net.absorb(x, cond)
    with pytest.raises(ValueError, match="past"):
        infer_level(net.denoiser(cond, past), SCHEDULE, x)


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


LIKELIHOODS = {"elbo": elbo, "log_likelihood": log_likelihood, "joint": joint_log_likelihood}


@pytest.mark.parametrize("call", LIKELIHOODS.values(), ids=LIKELIHOODS)
def test_tokens_that_count_are_finite_and_have_a_level_each(call):
    """Or the answer would be NaN without a word, or speak of tensors that cannot be expanded."""
    net, x = model("rnn"), tokens()[0]
    for bad in (torch.nan, torch.inf):
        holes, k = x.clone(), torch.zeros(x.shape[1], dtype=torch.long)
        holes[1, 2] = bad
        with pytest.raises(ValueError, match=rf"not absent, the first in sequence 1, token 2: give it level K={K}"):
            call(net, SCHEDULE, holes)
        k[2] = K
        assert torch.isfinite(call(net, SCHEDULE, holes, k)).all()
    with pytest.raises(ValueError, match=r"k is the level of each token, .* got \(3, 2\)"):
        call(net, SCHEDULE, x, torch.zeros(3, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="add the missing axes"):
        call(net, SCHEDULE, x[0])


def test_an_average_is_of_one_draw_at_least():
    with pytest.raises(ValueError, match="draws counts from 1; got 0"):
        elbo(model("rnn"), SCHEDULE, tokens()[0], draws=0)


@pytest.mark.parametrize("absent", [torch.zeros(1, 3).bool(), torch.zeros(3, 4)], ids=["shape", "type"])
def test_absent_says_yes_or_no_of_each_token(absent):
    with pytest.raises(ValueError, match=r"absent says of each token whether it is, as bool of shape \(4,\) or \(3, 4\)"):
        infer_level(Gaussian(SCHEDULE, ar1(4, 0.9)).denoiser(), SCHEDULE, torch.randn(3, 4, 1), absent)


@pytest.mark.parametrize("threshold", [-1.0, torch.nan])
def test_a_threshold_is_not_negative(threshold):
    with pytest.raises(ValueError, match=rf"0 nats or more; got {threshold}"):
        infer_level(Gaussian(SCHEDULE, ar1(4, 0.9)).denoiser(), SCHEDULE, torch.randn(3, 4, 1), threshold=threshold)


def test_no_level_is_inferred_of_infinite_values():
    with pytest.raises(ValueError, match="NaN or infinite values in tokens that are not absent"):
        infer_level(Gaussian(SCHEDULE, ar1(4, 0.9)).denoiser(), SCHEDULE, torch.full((3, 4, 1), torch.inf))


@pytest.mark.parametrize("ladder", [[0, 50, 100], [20, 100, K], [0, 100, 50, K]], ids=str)
def test_a_chain_that_is_not_from_0_to_k_is_refused(ladder):
    """It would leave part of the way out and give more than the likelihood."""
    with pytest.raises(ValueError, match="ladder"):
        elbo(model("rnn"), SCHEDULE, tokens()[0], ladder=torch.tensor(ladder))
