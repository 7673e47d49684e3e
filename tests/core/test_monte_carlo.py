"""Monte Carlo guidance: what it converges to, on problems whose answer is known, and what it shows to the network."""

from dataclasses import replace

import gambles
import pytest
import torch
from gambles import CHOICES, CHOSEN, CLIFF, GAMBLE, GAMBLE_EXACT, UTILITY, cliff_value, first_choices, risky
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Gaussian, ar1, randomised, seeded

from diffusion_forcing import (
    RNN,
    DiffusionForcing,
    MonteCarlo,
    NoiseSchedule,
    Prediction,
    Transformer,
    cosine,
    full_sequence,
    guide,
    pin,
    pyramid,
    sample,
)
from diffusion_forcing.monte_carlo import expected_reward

K = 1000
SCHEDULE = NoiseSchedule(cosine(K))
PROCESS = Gaussian(SCHEDULE, ar1(4, 0.9))
PATHWISE = MonteCarlo(12, "fresh", steps=8, chosen=torch.tensor([True, False]))
COVARIANCE = MonteCarlo(16, "fresh", estimator="covariance", chosen=torch.tensor([True, False]))
both_estimators = pytest.mark.parametrize("plan", [PATHWISE, COVARIANCE], ids=["pathwise", "covariance"])
KINDS = [MonteCarlo(3), MonteCarlo(3, "fresh"), MonteCarlo(3, "fresh", estimator="covariance")]
all_kinds = pytest.mark.parametrize("plan", KINDS, ids=["resample", "pathwise", "covariance"])
RNN_MODEL = DiffusionForcing(RNN(1, hidden=8, levels=K), SCHEDULE)
for parameter in RNN_MODEL.parameters():
    torch.nn.init.normal_(parameter, std=0.3, generator=seeded(0))
fresh_kinds = pytest.mark.parametrize("plan", KINDS[1:], ids=["pathwise", "covariance"])


def last(x):
    """The reward of the last token's value."""
    return x[:, -1].sum(-1)


def near_two(x):
    """The reward of ending close to 2."""
    return -((x[:, -1] - 2) ** 2).sum(-1)


def noise(n=1, t=4, seed=0):
    return torch.randn(n, t, 1, generator=seeded(seed), dtype=torch.float64)


def levels(*k, n=1):
    return torch.tensor(k).expand(n, -1)


def record(denoise):
    """The denoiser, and a list of what it is shown."""
    shown = []

    def recorded(x, k):
        shown.append((x.detach().clone(), k.clone(), torch.is_grad_enabled()))
        return denoise(x, k)

    return recorded, shown


def choose(problem, draws, slope=0, **options):
    """Samples of a problem guided at its scale, form eps."""
    return problem.play(
        lambda denoise: guide(denoise, gambles.SCHEDULE, problem.reward, problem.scale, draws=draws, form="eps", generator=seeded(1)),
        slope, **options,
    )  # fmt: skip


# What converges to what.


@pytest.mark.parametrize("causal", [True, False])
def test_one_future_is_optimistic_about_chance(causal):
    """Joint guidance takes the losing gamble, and imagines that it wins: causal or not."""
    x = choose(GAMBLE, 1, causal=causal)
    assert risky(x) > 0.7
    assert x[:, 1].mean() > 1
    assert risky(choose(UTILITY, 1, causal=causal)) > 0.7


@pytest.mark.parametrize("slope", [0, 1])
def test_resampled_futures_stay_biased_however_many(slope):
    few, many = (risky(choose(GAMBLE, draws, slope)) for draws in (4, 32))
    assert few > GAMBLE_EXACT["expectation"] + 0.1
    assert many > GAMBLE_EXACT["expectation"] + 0.1
    assert abs(few - many) < 0.06


@pytest.mark.parametrize("slope", [0, 1, 3, 20])
@both_estimators
def test_fresh_futures_choose_by_expectation(plan, slope):
    """Whatever later tokens hold: along every pyramid."""
    assert risky(choose(GAMBLE, plan, slope)) == pytest.approx(GAMBLE_EXACT["expectation"], abs=0.05)


@both_estimators
def test_chance_is_left_to_chance(plan):
    """With a model that sees the whole sequence too, and one token after the other: what is imagined is what happens."""
    x = choose(GAMBLE, plan, 20, causal=False)
    share = risky(x)
    assert share == pytest.approx(GAMBLE_EXACT["expectation"], abs=0.05)
    assert x[:, 1].mean().item() == pytest.approx(0.3 * (1 - share) - 0.3 * share, abs=0.1)


@both_estimators
def test_fresh_futures_weigh_losses_as_the_reward_does(plan):
    """Exact: 0.119; few steps of the futures miss some of the losses. Guidance by the mean outcome takes the risk, at any slope."""
    assert risky(choose(UTILITY, replace(plan, steps=8, draws=24))) == pytest.approx(0.119, abs=0.08)
    assert risky(choose(UTILITY, 16, 20)) > 0.5


@both_estimators
def test_fresh_futures_keep_away_from_a_cliff_in_wind(plan):
    """Exact: -0.46 under p(offset) exp(2 value)."""
    assert cliff_value(choose(CLIFF, replace(plan, draws=24))[:, 0]) > -0.6
    assert cliff_value(choose(CLIFF, 16)[:, 0]) < -1


@both_estimators
def test_risk_goes_from_averse_through_the_expectation_to_the_joint_posterior(plan):
    shares = [risky(choose(GAMBLE, replace(plan, risk=risk))) for risk in (-1.0, 0.0, 1.0, GAMBLE.scale)]
    assert shares[0] < shares[1] - 0.03
    assert shares[1] + 0.2 < shares[2] < shares[3] - 0.1
    assert shares[3] == pytest.approx(GAMBLE_EXACT["joint"], abs=0.15), "its heaviest futures are rare among so few"


@pytest.mark.parametrize("estimator", ["pathwise", "covariance"])
def test_guided_later_choices_find_the_choice_that_needs_skill(estimator):
    """Expectimax: of (skill, sure, gamble) the first is best if one then chooses well. As in the data it is not, nor is it by luck."""
    plan = MonteCarlo(8, "fresh", estimator=estimator, slope=2, chosen=CHOSEN)
    skill, _, gamble = first_choices(choose(CHOICES, plan, 2, n=200))
    assert skill > 0.6
    assert gamble < 0.1
    skill, sure, _ = first_choices(choose(CHOICES, replace(plan, inner_draws=0), 2, n=150))
    assert skill < 0.5
    assert sure > 0.4
    assert first_choices(choose(CHOICES, 1, causal=False))[2] > 0.6


def test_expectimax_needs_no_gradient_of_the_reward():
    plan = MonteCarlo(8, "fresh", estimator="covariance", slope=2, chosen=CHOSEN, inner_draws=4)
    simulator = replace(CHOICES, reward=lambda x: torch.from_numpy(CHOICES.reward(x).numpy().round(1)))
    assert first_choices(choose(simulator, plan, 2, n=80))[0] > 0.5


def expected_gradient(process, x, k, token):
    """Of E[-(y - 2)^2 | x^k], y the last token, with respect to a token, given tokens up to that one only."""
    seen = torch.full_like(k, K)
    seen[:, : token + 1] = k[:, : token + 1]
    gain = process.gain(seen, causal=False)[:, -1, : token + 1]
    mean = (gain * x[:, : token + 1, 0]).sum(1)
    return -2 * (mean - 2) * gain[:, token]


@pytest.mark.parametrize(
    ("estimator", "draws", "steps", "k"),
    [
        *(("pathwise", 20_000, 30, k) for k in ((0, 300, 700), (500, K, K), (0, 800, 200))),
        *(("covariance", 40_000, 30, k) for k in ((0, 300, 700), (0, 500, K))),
    ],
    ids=str,
)
def test_on_a_gaussian_the_gradient_of_a_quadratic_reward_is_exact(estimator, draws, steps, k):
    """Both converge to the gradient of the expected reward given the present, whatever level the future is at."""
    process = Gaussian(SCHEDULE, ar1(len(k), 0.9))
    x, now = noise(t=len(k), seed=3), next(i for i, level in enumerate(k) if level > 0)
    plan = MonteCarlo(draws, "fresh", steps=steps, slope=steps, estimator=estimator)
    grad = guide(process.denoiser(True), SCHEDULE, near_two, 1.0, draws=plan, generator=seeded(0))(x, levels(*k)).grad[0, :, 0]
    assert grad[now].item() == pytest.approx(expected_gradient(process, x, levels(*k), now).item(), rel=0.02)
    assert (grad[torch.arange(len(k)) != now] == 0).all()


@pytest.mark.parametrize("variance", [1.0, 0.19, 0.05])
def test_few_steps_keep_the_strength_of_the_covariance(variance):
    """In 5 steps: those of DDPM would leave half of the present's spread, and so of the gradient, or less."""
    process = Gaussian(SCHEDULE, variance * ar1(2, 0.9))
    plan = MonteCarlo(20_000, "fresh", steps=5, slope=5, estimator="covariance")
    for level in (100, 400, 700):
        x, k = noise(t=2, seed=3), levels(level, K)
        grad = guide(process.denoiser(True), SCHEDULE, last, 1.0, draws=plan, generator=seeded(0))(x, k).grad[0, 0, 0]
        assert grad.item() == pytest.approx(process.gain(k, causal=False)[0, 1, 0].item(), rel=0.2)


@fresh_kinds
def test_both_forms_act_by_the_same_gradient(plan):
    x, k = noise(2), levels(0, 300, 600, K, n=2)
    step, eps = (
        guide(PROCESS.denoiser(), SCHEDULE, near_two, 2.0, draws=plan, form=form, generator=seeded(0))(x, k) for form in ("step", "eps")
    )
    plain = PROCESS.denoiser()(x, k)
    alpha, sigma = SCHEDULE.alpha(k)[..., None].double(), SCHEDULE.sigma(k)[..., None].double()
    assert torch.equal(step.x0, plain.x0)
    assert eps.grad is None
    torch.testing.assert_close(eps.x0, plain.x0 + sigma**2 / alpha * step.grad)
    torch.testing.assert_close(eps.eps, plain.eps - sigma * step.grad)


def test_a_vanishing_risk_is_the_expectation():
    x, k = noise(2), levels(0, 300, 600, K, n=2)
    for plan in KINDS:
        none, little = (
            guide(PROCESS.denoiser(True), SCHEDULE, near_two, 1.0, draws=replace(plan, risk=risk), generator=seeded(0))(x, k).grad
            for risk in (0.0, 1e-6)
        )
        torch.testing.assert_close(none, little, rtol=1e-3, atol=1e-5)


def limit(choices, values, scale, tilted, steps=150):
    """Shares of choices, equally likely in the data, under the exact gradient that endless futures would give: of scale E[value | x], or
    (tilted) of log E[exp(scale value) | x]."""
    process, values = gambles.Mixture([1 / len(choices)] * len(choices), [[at] for at in choices]), scale * torch.tensor(values).double()
    schedule, denoise = gambles.SCHEDULE, process.denoiser()

    def guided(x, k):
        alpha, sigma = schedule.alpha(k[0, 0]).double(), schedule.sigma(k[0, 0]).double()
        variance = (alpha * process.std) ** 2 + sigma**2
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            log_share = torch.log_softmax(-0.5 * (y[:, 0] - alpha * process.means[:, 0]) ** 2 / variance, -1)
            value = torch.logsumexp(log_share + values, -1) if tilted else (log_share.exp() * values).sum(-1)
            (grad,) = torch.autograd.grad(value.sum(), y)
        pred = denoise(x, k)
        return Prediction(pred.x0 + sigma**2 / alpha * grad, pred.eps - sigma * grad)

    matrix = full_sequence(1, schedule.ladder(steps))
    x = sample(guided, schedule, noise(4000, 1), matrix, eta=1.0, generator=seeded(1))[:, 0]
    return (x - process.means[:, 0]).abs().argmin(1).bincount(minlength=len(choices)) / len(x)


def test_the_limit_of_endless_futures():
    """p(choice) exp(scale value) for two choices. The gradient of the mean is not that of log E[exp]: three choices come out a little
    differently, and the order is kept."""
    assert limit([-1.0, 1.0], [0.3, -0.3], 3.0, tilted=False)[1].item() == pytest.approx(GAMBLE_EXACT["expectation"], abs=0.02)
    values = [0.5, 0.7, 0.2]
    exact = torch.softmax(4 * torch.tensor(values), 0)  # 0.28, 0.63, 0.09
    torch.testing.assert_close(limit([-1.5, 0.0, 1.5], values, 4.0, tilted=True), exact, atol=0.03, rtol=0)
    torch.testing.assert_close(limit([-1.5, 0.0, 1.5], values, 4.0, tilted=False), torch.tensor([0.345, 0.58, 0.075]), atol=0.03, rtol=0)


# The gradient of one draw, of many, and its generator.


def test_one_resampled_draw_is_the_gradient_at_the_predicted_mean_bit_for_bit():
    x, k = noise(3), levels(0, 300, 600, K, n=3)
    variable = x.clone().requires_grad_()
    pred = PROCESS.denoiser()(variable, k)
    (expected,) = torch.autograd.grad(near_two(pred.x0).sum(), variable)
    expected = 0.7 * expected * (k > 0)[..., None]
    for draws in (1, MonteCarlo(1), MonteCarlo(1, "resample")):
        guided = guide(PROCESS.denoiser(), SCHEDULE, near_two, 0.7, draws=draws)(x, k)
        assert torch.equal(guided.grad, expected)
        assert torch.equal(guided.x0, pred.x0)


@pytest.mark.parametrize(("plan", "k"), [(MonteCarlo(2), (0, 300, 600, 800)), *((replace(p, draws=2), (0, 300, K, K)) for p in KINDS[1:])],
                         ids=["resample", "pathwise", "covariance"])  # fmt: skip
def test_more_draws_make_a_steadier_gradient(plan, k):
    """Its variance falls as 1/draws: independent futures are averaged. 400 copies of a sequence have futures of their own."""
    spread, means = [], []
    x, level = noise().expand(400, -1, -1), levels(*k, n=400)
    for draws in (2, 32):
        guided = guide(PROCESS.denoiser(True), SCHEDULE, near_two, 1.0, draws=replace(plan, draws=draws), generator=seeded(0))
        grads = guided(x, level).grad[:, 1, 0]
        spread.append(grads.var())
        means.append(grads.mean())
    assert 8 < spread[0] / spread[1] < 64
    assert (means[0] - means[1]).abs() < 5 * (spread[0] / 400).sqrt()


@all_kinds
def test_a_draw_is_a_function_of_its_generator(plan):
    x, k = noise(2), levels(0, 300, 600, K, n=2)
    before = torch.get_rng_state()
    grads = [guide(PROCESS.denoiser(), SCHEDULE, near_two, 1.0, draws=plan, generator=seeded(seed))(x, k).grad for seed in (0, 0, 1)]
    assert torch.equal(grads[0], grads[1])
    assert not torch.equal(grads[0], grads[2])
    assert torch.equal(torch.get_rng_state(), before)


# What the network is shown.


@pytest.mark.parametrize("present", [1, 2])
def test_resampled_futures_keep_the_present(present):
    """Known tokens and the present stay as they are; the future is noised anew to its levels, each draw with its own noise."""
    x, k = noise(2, 5), levels(0, 300, 600, 800, K, n=2)
    process = Gaussian(SCHEDULE, ar1(5, 0.9))
    denoise, shown = record(process.denoiser())
    guide(denoise, SCHEDULE, near_two, 1.0, draws=MonteCarlo(3, present=present), generator=seeded(0))(x, k)
    (first, _, _), (futures, future_k, _) = shown
    assert torch.equal(first, x)
    assert torch.equal(future_k, k.repeat_interleave(3, 0))
    copies = x.repeat_interleave(3, 0)
    now = 1 + present
    assert torch.equal(futures[:, :now], copies[:, :now])
    assert (futures[:, now:] != copies[:, now:]).all()
    assert (futures[:3, now:].std(0) > 0).all()


def test_resampled_futures_have_the_noise_of_their_level():
    x, k = noise(), levels(0, 300, 600, K)
    denoise, shown = record(PROCESS.denoiser())
    guide(denoise, SCHEDULE, near_two, 1.0, draws=20_000, generator=seeded(0))(x, k)
    futures = shown[1][0][:, 2:, 0]
    alpha, sigma = SCHEDULE.alpha(k[0, 2]).item(), SCHEDULE.sigma(k[0, 2]).item()
    expected = alpha * PROCESS.denoiser()(x, k).x0[0, 2, 0].item()
    assert futures.mean(0).tolist() == pytest.approx([expected, 0.0], abs=0.03)
    assert futures.std(0).tolist() == pytest.approx([sigma, 1.0], abs=0.03)


@pytest.mark.parametrize("futures", ["resample", "fresh"])
def test_an_absent_future_is_fresh_noise_and_no_more(futures):
    """At K the last trace of signal is too small to see but its derivative is not: no gradient reaches what stood there."""
    net = randomised(DiffusionForcing(RNN(1, hidden=16, levels=K), SCHEDULE, parameterization="eps"))
    x, k = torch.randn(2, 4, 1, generator=seeded(0)), levels(0, 300, 600, K, n=2)
    pred = guide(net.denoiser(), SCHEDULE, last, 1.0, draws=MonteCarlo(2, futures), generator=seeded(1))(x, k)
    assert torch.equal(pred.grad[:, 3], torch.zeros(2, 1))
    assert (pred.grad[:, 1] != 0).all()


@pytest.mark.parametrize(
    ("plan", "rows"),
    [
        (MonteCarlo(2, "fresh", steps=2, slope=0), [[0, 300, K, K], [0, 300, 500, 500]]),
        (MonteCarlo(2, "fresh", steps=2, slope=2), [[0, 300, K, K], [0, 300, 500, K], [0, 300, 0, K], [0, 300, 0, 500]]),
        (MonteCarlo(2, "fresh", steps=2, slope=1, present=2), [[0, 300, 600, K], [0, 300, 600, 500]]),
        (MonteCarlo(2, "fresh", steps=2, slope=0, estimator="covariance"), [[0, 300, K, K], [0, 75, 500, 500]]),
        (
            MonteCarlo(2, "fresh", steps=2, slope=1, estimator="covariance"),
            [[0, 300, K, K], [0, 75, K, K], [0, 0, 500, K], [0, 0, 0, 500]],
        ),
        (MonteCarlo(2, "fresh", steps=2, slope=1, chosen=torch.tensor([True, False, True, False])), [[0, 300, 600, K], [0, 300, 600, 500]]),
    ],
    ids=["at once", "one by one", "two present", "covariance", "covariance, lagging", "chosen"],
)
def test_the_levels_of_fresh_futures(plan, rows):
    """The present is kept (sampled, for the covariance), the rest begins at K; each token lags by `slope` rows. One call before that."""
    x, k = noise(), levels(0, 300, 600, 800)
    denoise, shown = record(PROCESS.denoiser())
    guide(denoise, SCHEDULE, near_two, 1.0, draws=plan, generator=seeded(0))(x, k)
    assert sorted(len(tokens) for tokens, _, _ in shown) == [1, *[2] * len(rows)]
    seen = [(tokens, level[0].tolist()) for tokens, level, _ in shown if len(tokens) == 2]
    assert [level for _, level in seen] == rows
    now = [level == k[0, i] for i, level in enumerate(rows[0])]
    assert torch.equal(seen[0][0][:, now], x[:, now].expand(2, -1, -1))
    assert (seen[0][0][0, [not same for same in now]] != seen[0][0][1, [not same for same in now]]).all()
    if plan.estimator == "pathwise":
        assert all(torch.equal(tokens[:, now], x[:, now].expand(2, -1, -1)) for tokens, _ in seen)


def test_the_covariance_takes_no_gradient_anywhere():
    denoise, shown = record(PROCESS.denoiser())

    def count(x):
        """A reward in whole numbers."""
        assert not x.requires_grad
        return (10 * x).long().sum((1, 2))

    pred = guide(denoise, SCHEDULE, count, 1.0, draws=KINDS[2], generator=seeded(0))(noise(2), levels(0, 300, 600, K, n=2))
    assert not any(grad for _, _, grad in shown)
    assert (pred.grad[:, 1] != 0).any()


@pytest.mark.parametrize("estimator", ["pathwise", "covariance"])
def test_a_causal_network_is_asked_for_the_tokens_reached_only(estimator):
    model, shown = RNN_MODEL, []

    def spy(x, k):
        shown.append(x.shape[1])
        return model.predict(x, k)

    def prediction(causal, slope):
        plan = MonteCarlo(4, "fresh", steps=3, slope=slope, estimator=estimator, causal=causal)
        return guide(spy, model.schedule, last, 1.0, draws=plan, form="eps", generator=seeded(0))(
            noise(2, 6).float(), levels(0, *[K] * 5, n=2)
        )

    for slope in (0, 1, 3):
        shown.clear()
        whole = prediction(False, slope)
        assert set(shown) == {6}
        assert torch.allclose(prediction(True, slope).x0, whole.x0, atol=1e-4)
        assert (min(shown) < 6) == (slope > 0)


def test_a_spread_bounds_what_high_stakes_do():
    x, k = noise(3, 2), levels(500, K, n=3)

    def shift(stakes, spread):
        plan = MonteCarlo(16, "fresh", estimator="covariance", spread=spread)
        denoise = GAMBLE.process.denoiser(True)
        guided = guide(denoise, gambles.SCHEDULE, lambda x: stakes * last(x), 1.0, draws=plan, form="eps", generator=seeded(0))(x, k)
        return (guided.x0 - denoise(x, k).x0)[:, 0]

    assert torch.equal(shift(0.1, 5.0), shift(0.1, None)), "low stakes are as they were"
    assert torch.allclose(shift(100.0, 1.0), shift(1e4, 1.0))
    assert shift(100.0, 1.0).abs().max() < 1.5
    assert shift(100.0, None).abs().max() > 10


@pytest.mark.parametrize(("choice", "worth"), [(-1.0, 0.3), (1.0, -0.3)])
def test_plans_are_ranked_by_what_may_come_of_them(choice, worth):
    x = torch.tensor([[choice], [1.5]], dtype=torch.float64).expand(2, 2, 1)  # the plan's own future is a win
    plan = MonteCarlo(1000, "fresh", steps=10)
    value = expected_reward(GAMBLE.process.denoiser(True), gambles.SCHEDULE, last, x, levels(0, K, n=2), plan, seeded(0))
    assert torch.allclose(value, torch.full((2,), worth, dtype=value.dtype), atol=0.12)
    averse = expected_reward(
        GAMBLE.process.denoiser(True), gambles.SCHEDULE, last, x, levels(0, K, n=2), replace(plan, risk=-2.0), seeded(0)
    )
    assert (averse < value).all()


@fresh_kinds
def test_known_tokens_after_the_present_stay_in_every_future(plan):
    """A goal that is pinned at level 0."""
    x, k = noise(2), levels(0, 300, K, 0, n=2)
    denoise, shown = record(PROCESS.denoiser())
    guide(denoise, SCHEDULE, lambda clean: -(clean[:, 2, 0] ** 2), 1.0, draws=plan, generator=seeded(0))(x, k)
    assert all(
        (level[:, 3] == 0).all() and torch.equal(tokens[:, 3], x[:, 3].repeat_interleave(len(tokens) // 2, 0)) for tokens, level, _ in shown
    )


@fresh_kinds
def test_each_sequence_has_a_present_of_its_own(plan):
    """Levels (b, t) differ: one sequence is at its second token, one at its third, one is done."""
    x, k = noise(3), torch.tensor([[0, 300, K, K], [0, 0, 600, 700], [0, 0, 0, 0]])
    grad = guide(PROCESS.denoiser(True), SCHEDULE, near_two, 1.0, draws=plan, generator=seeded(0))(x, k).grad
    assert (grad[..., 0] != 0).tolist() == [[False, True, False, False], [False, False, True, False], [False] * 4]


@fresh_kinds
def test_fresh_guidance_acts_on_its_levels_only(plan):
    x, k = noise(2), torch.tensor([[0, 300, K, K], [0, 700, K, K]])
    grad = guide(PROCESS.denoiser(True), SCHEDULE, near_two, 1.0, draws=plan, levels=(500, K), generator=seeded(0))(x, k).grad
    assert (grad[:, :, 0] != 0).tolist() == [[False] * 4, [False, True, False, False]]
    denoise, shown = record(PROCESS.denoiser())
    guide(denoise, SCHEDULE, near_two, 1.0, draws=plan, levels=(0, 200))(x, k)
    assert len(shown) == 1, "no present at these levels: nothing is sampled"


@pytest.mark.parametrize("rnn", [True, False], ids=["rnn", "transformer"])
@all_kinds
def test_draws_go_with_a_condition_and_a_past(rnn, plan):
    net = RNN(1, 1, hidden=16, levels=K) if rnn else Transformer(1, 1, hidden=16, heads=2, layers=2, causal=True, levels=K)
    net = randomised(DiffusionForcing(net, SCHEDULE))
    past = net.absorb(torch.randn(2, 3, 1, generator=seeded(0)), torch.ones(2, 3, 1))
    denoise = net.denoiser(torch.ones(2, 4, 1), past)
    x, k = torch.randn(2, 4, 1, generator=seeded(1)), levels(0, 300, 600, 900, n=2)
    pred = guide(denoise, SCHEDULE, near_two, 1.0, draws=plan, generator=seeded(2))(x, k)
    assert pred.grad.shape == x.shape
    assert (pred.grad[:, 1] != 0).all()
    assert not pred.x0.requires_grad
    # Each sequence is guided by its own futures.
    changed = x.clone()
    changed[1] += 1
    other = guide(denoise, SCHEDULE, near_two, 1.0, draws=plan, generator=seeded(2))(changed, k)
    torch.testing.assert_close(other.grad[0], pred.grad[0])


@all_kinds
def test_monte_carlo_guidance_composes(plan):
    """Inside another guide, which needs the gradient of its prediction, it adds its own."""
    k, x = levels(0, 300, 600, 900), noise()
    inner = guide(PROCESS.denoiser(True), SCHEDULE, near_two, 3.0, draws=plan, generator=seeded(0))
    both = guide(inner, SCHEDULE, last, 2.0)(x, k)
    alone = guide(PROCESS.denoiser(True), SCHEDULE, near_two, 3.0, draws=plan, generator=seeded(0))(x, k)
    torch.testing.assert_close(both.grad, alone.grad + guide(PROCESS.denoiser(True), SCHEDULE, last, 2.0)(x, k).grad)


@all_kinds
def test_samples_are_clean_and_pinned_tokens_stay(plan):
    matrix = pin(pyramid(4, SCHEDULE.ladder(5), 2), 0)
    guided = guide(PROCESS.denoiser(True), SCHEDULE, near_two, 0.3, draws=plan, form="eps", levels=(0, 900), generator=seeded(0))
    out = sample(guided, SCHEDULE, noise(3), matrix)
    assert torch.equal(out[:, 0], noise(3)[:, 0])
    plain = sample(PROCESS.denoiser(True), SCHEDULE, noise(3), matrix)
    assert near_two(out).mean() > near_two(plain).mean()


# What is chosen.


@pytest.mark.parametrize(
    ("mask", "moved"),
    [
        (torch.tensor([True, False, True]), [[1, 1], [0, 0], [1, 1]]),
        (torch.tensor([[True, False]] * 3), [[1, 0], [1, 0], [1, 0]]),
        (torch.tensor([True, False]), [[1, 0], [1, 0], [1, 0]]),
        (torch.tensor([[True, False], [False, False], [True, True]]), [[1, 0], [0, 0], [1, 1]]),
    ],
    ids=["tokens", "numbers", "numbers of all tokens", "some of some"],
)
def test_guidance_moves_what_is_chosen_only(mask, moved):
    process = Gaussian(SCHEDULE, ar1(3, 0.9))
    x, k = torch.randn(2, 3, 2, generator=seeded(0), dtype=torch.float64), levels(300, 600, 800, n=2)
    reward = lambda clean: -((clean[:, -1] - 2) ** 2).sum(-1)  # noqa: E731
    grad = guide(process.denoiser(), SCHEDULE, reward, 1.0, draws=MonteCarlo(1, chosen=mask))(x, k).grad
    assert (grad != 0).long().tolist() == [moved, moved]
    for plan in KINDS[1:]:
        grad = guide(process.denoiser(), SCHEDULE, reward, 1.0, draws=replace(plan, chosen=mask), generator=seeded(0))(x, k).grad
        assert (grad != 0).long().tolist() == [[moved[0], [0, 0], [0, 0]]] * 2


def test_the_present_is_the_first_choice_that_is_not_made():
    """Chance before it stays as far as it is known, all after it is drawn anew; without a choice left nothing is guided."""
    plan = MonteCarlo(2, "fresh", chosen=torch.tensor([True, False, True, False]))
    denoise, shown = record(PROCESS.denoiser())
    grad = guide(denoise, SCHEDULE, near_two, 1.0, draws=plan, generator=seeded(0))(noise(), levels(0, 300, 600, 800)).grad
    assert (grad[0, :, 0] != 0).tolist() == [False, False, True, False]
    shown.clear()
    assert guide(denoise, SCHEDULE, near_two, 1.0, draws=plan)(noise(), levels(0, 0, 0, 800)).grad is None
    assert len(shown) == 1


# What is refused.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"present": 0}, "count from 1.*present=0"),
        ({"steps": 0}, "count from 1.*steps=0"),
        ({"futures": "mean"}, "'resample' or 'fresh'.*'mean'"),
        ({"futures": "rollout"}, "'resample' or 'fresh'.*'rollout'"),
        ({"estimator": "score"}, "'pathwise' or 'covariance'.*'score'"),
        ({"estimator": "covariance"}, "futures='resample'"),
        ({"futures": "fresh", "estimator": "covariance", "draws": 1}, "draws=1"),
        ({"slope": -1}, "slope=-1"),
        ({"inner_draws": -1}, "inner_draws=-1"),
        ({"risk": float("nan")}, "risk is a finite number.*nan"),
        ({"chosen": torch.ones(3)}, "chosen is a mask.*float32"),
    ],
    ids=str,
)
def test_futures_that_make_no_sense_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        MonteCarlo(**options)


@given(
    draws=st.integers(-2, 3), present=st.integers(-2, 3), steps=st.integers(-2, 3), slope=st.integers(-2, 3),
    inner=st.integers(-2, 3), risk=st.floats(allow_nan=True),
)  # fmt: skip
@settings(deadline=None, derandomize=True, max_examples=50)
def test_numbers_are_taken_or_refused_by_name(draws, present, steps, slope, inner, risk):
    make = lambda: MonteCarlo(draws, "fresh", present, steps, slope, risk=risk, inner_draws=inner)  # noqa: E731
    if min(draws, present, steps) >= 1 and min(slope, inner) >= 0 and abs(risk) < float("inf"):
        make()
    else:
        with pytest.raises(ValueError, match=r"draws|risk"):
            make()


@pytest.mark.parametrize("shape", [(3,), (4, 2), (2, 4, 1, 1)], ids=str)
def test_a_mask_that_does_not_fit_is_refused(shape):
    guided = guide(PROCESS.denoiser(), SCHEDULE, last, 1.0, draws=MonteCarlo(2, chosen=torch.ones(shape, dtype=torch.bool)))
    with pytest.raises(ValueError, match=r"chosen says which tokens, \(4,\), or numbers of tokens, \(1,\)"):
        guided(noise(), levels(0, 300, 600, 900))


@pytest.mark.parametrize(
    "plan", [MonteCarlo(2, "fresh"), MonteCarlo(2, "fresh", estimator="covariance", chosen=torch.ones(4, dtype=torch.bool))]
)
def test_a_reward_without_gradient_is_told_the_way_out(plan):
    def reward(x):
        return (x[:, -1, 0] > 0).double()

    with pytest.raises(ValueError, match=r"no gradient.*estimator='covariance'.*inner_draws=4"):
        guide(PROCESS.denoiser(), SCHEDULE, reward, 1.0, draws=plan)(noise(), levels(0, 300, 600, 900))


@fresh_kinds
def test_a_reward_of_the_wrong_shape_is_refused(plan):
    with pytest.raises(ValueError, match=r"one score a sequence, shape \(6,\); got \(6, 4\)"):
        guide(PROCESS.denoiser(), SCHEDULE, lambda x: x.sum(-1), 1.0, draws=plan)(noise(2), levels(0, 300, 600, 900, n=2))


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_the_covariance_of_an_infinite_reward_is_refused(bad):
    """A simulator that breaks, or a hard constraint: without the check it would end in tokens that are NaN."""

    def reward(x):
        return torch.where(x[:, -1, 0] > 0, bad, 0.0)

    with pytest.raises(ValueError, match=r"NaN or infinite.*nan_to_num"):
        guide(PROCESS.denoiser(), SCHEDULE, reward, 1.0, draws=KINDS[2])(noise(8), levels(0, 300, 600, K, n=8))
    finite = lambda x: torch.nan_to_num(reward(x), nan=-100.0, neginf=-100.0)  # noqa: E731
    grad = guide(PROCESS.denoiser(), SCHEDULE, finite, 1.0, draws=KINDS[2], generator=seeded(0))(noise(8), levels(0, 300, 600, K, n=8)).grad
    assert torch.isfinite(grad).all()
