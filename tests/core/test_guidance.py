"""Guidance: functions from denoiser to denoiser."""

import pytest
import torch
from oracles import Gaussian, ar1, randomised, seeded

from diffusion_forcing import (
    RNN,
    DiffusionForcing,
    MonteCarlo,
    NoiseSchedule,
    Prediction,
    Transformer,
    autoregressive,
    blend,
    classifier_free,
    cosine,
    ddim_step,
    full_sequence,
    guide,
    history_guidance,
    linear,
    pin,
    pyramid,
    sample,
)

K = 1000
SCHEDULE = NoiseSchedule(cosine(K))
PROCESS = Gaussian(SCHEDULE, ar1(4, 0.9))
FORMS = ["step", "eps"]


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
        shown.append((x.detach().clone(), k.clone()))
        return denoise(x, k)

    return recorded, shown


def model(causal=True, cond=0, rnn=True, **options):
    net = RNN(1, cond, hidden=16, levels=K) if rnn else Transformer(1, cond, hidden=16, heads=2, layers=2, causal=causal, levels=K)
    return randomised(DiffusionForcing(net, SCHEDULE, **options))


# Guidance by a reward.


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("futures", ["resample", "fresh"])
def test_zero_scale_is_the_identity(form, draws, futures):
    denoise = PROCESS.denoiser()
    guided = guide(denoise, SCHEDULE, near_two, 0.0, form=form, draws=MonteCarlo(draws, futures))
    matrix = pyramid(4, SCHEDULE.ladder(10))
    assert torch.equal(sample(guided, SCHEDULE, noise(8), matrix), sample(denoise, SCHEDULE, noise(8), matrix))
    pred = guided(noise(8), levels(0, 10, 500, K, n=8))
    assert pred.grad is None


@pytest.mark.parametrize("scale", [0.5, 2.0])
@pytest.mark.parametrize(
    ("causal", "slope"), [(False, 0), (False, 15), (False, 50), (True, 50)], ids=["full", "pyramid", "autoregressive", "causal"]
)
def test_in_eps_a_linear_reward_tilts_a_gaussian_exactly(scale, causal, slope):
    """p(x) exp(scale w.x) has mean scale C w and the same covariance. Exact here, as the reward of the mean is the mean reward."""
    matrix = pyramid(4, SCHEDULE.ladder(50), slope)
    guided = guide(PROCESS.denoiser(causal), SCHEDULE, last, scale, form="eps")
    out = sample(guided, SCHEDULE, torch.zeros(1, 4, 1, dtype=torch.float64), matrix)[0, :, 0]
    torch.testing.assert_close(out, scale * PROCESS.covariance[:, -1], rtol=0.02, atol=0.01)


def test_in_eps_guidance_leaves_the_covariance():
    matrix = full_sequence(4, SCHEDULE.ladder(20))
    units = torch.cat([torch.zeros(1, 4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)])[..., None]
    plain = sample(PROCESS.denoiser(), SCHEDULE, units, matrix)
    guided = sample(guide(PROCESS.denoiser(), SCHEDULE, last, 1.0, form="eps"), SCHEDULE, units, matrix)
    torch.testing.assert_close(guided[1:] - guided[0], plain[1:] - plain[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("slope", [0, 1, 20])
@pytest.mark.parametrize("reward", [last, near_two])
def test_guidance_raises_the_reward(form, causal, slope, reward):
    matrix = pyramid(4, SCHEDULE.ladder(20), slope)
    x, means = noise(200), []
    for scale in (0.0, 0.3, 1.0):
        guided = guide(PROCESS.denoiser(causal), SCHEDULE, reward, scale, form=form)
        means.append(reward(sample(guided, SCHEDULE, x, matrix)).mean().item())
    assert means[1] > means[0] + 0.03
    assert means[2] > means[1] + 0.05


@pytest.mark.parametrize("futures", ["resample", "fresh"])
def test_monte_carlo_guidance_raises_the_reward(futures):
    matrix = pyramid(4, SCHEDULE.ladder(20), 5)
    x, means = noise(200), []
    for scale in (0.0, 1.0):
        guided = guide(PROCESS.denoiser(True), SCHEDULE, near_two, scale, draws=MonteCarlo(4, futures), generator=seeded(1))
        means.append(near_two(sample(guided, SCHEDULE, x, matrix)).mean().item())
    assert means[1] > means[0] + 0.3


def test_the_step_form_shifts_the_step_and_reports_the_gradient():
    """The reward of x0 = G x has gradient G^T w: the guide reports it and leaves the prediction alone."""
    k = levels(0, 300, 600, 900)
    x = noise()
    plain, pred = PROCESS.denoiser()(x, k), guide(PROCESS.denoiser(), SCHEDULE, last, 3.0)(x, k)
    expected = 3.0 * PROCESS.gain(k, causal=False)[0, -1]
    expected[0] = 0  # a clean token is not guided
    torch.testing.assert_close(pred.grad[0, :, 0], expected)
    torch.testing.assert_close(pred.x0, plain.x0)
    torch.testing.assert_close(pred.eps, plain.eps)


def test_a_step_adds_the_gradient_where_a_token_moves():
    k, k_next = torch.tensor([600, 600, 300]), torch.tensor([500, 600, 0])
    grad = torch.ones(1, 3, 1, dtype=torch.float64)
    x = noise(t=3)
    pred = Gaussian(SCHEDULE, ar1(3, 0.9)).denoiser()(x, k.expand(x.shape[:2]))
    shift = ddim_step(SCHEDULE, x, pred._replace(grad=grad), k, k_next) - ddim_step(SCHEDULE, x, pred, k, k_next)
    sigma = SCHEDULE.sigma_table.double()
    expected = [sigma[600] * (sigma[600] - sigma[500]), 0.0, sigma[300] * sigma[300]]
    assert shift[0, :, 0].tolist() == pytest.approx([float(value) for value in expected], abs=1e-6)


def test_the_eps_form_moves_x0_and_eps_together():
    k = levels(0, 300, 600, 900)
    x = noise()
    plain, pred = PROCESS.denoiser()(x, k), guide(PROCESS.denoiser(), SCHEDULE, last, 3.0, form="eps")(x, k)
    grad = guide(PROCESS.denoiser(), SCHEDULE, last, 3.0)(x, k).grad
    alpha, sigma = SCHEDULE.alpha(k)[..., None].double(), SCHEDULE.sigma(k)[..., None].double()
    assert pred.grad is None
    torch.testing.assert_close(pred.x0, plain.x0 + sigma**2 / alpha * grad)
    torch.testing.assert_close(pred.eps, plain.eps - sigma * grad)
    torch.testing.assert_close((alpha * pred.x0 + sigma * pred.eps)[:, 1:], x[:, 1:])


@pytest.mark.parametrize("rnn", [True, False], ids=["rnn", "transformer"])
@pytest.mark.parametrize("form", FORMS)
def test_a_reward_of_the_last_token_steers_the_first(rnn, form):
    """Through a causal model: the last token is predicted from the first, so its gradient reaches back."""
    net = model(rnn=rnn)
    x, k = torch.randn(2, 5, 1, generator=seeded(0)), levels(500, 600, 700, 800, 900, n=2)
    plain, pred = net.predict(x, k), guide(net.denoiser(), SCHEDULE, last, 1.0, form=form)(x, k)
    change = pred.grad if form == "step" else pred.x0 - plain.x0
    assert (change[:, 0].abs() > 1e-6).all()
    # and a reward of the first steers no later one: those say nothing about it
    pred = guide(net.denoiser(), SCHEDULE, lambda clean: clean[:, 0].sum(-1), 1.0)(x, k)
    assert torch.equal(pred.grad[:, 1:], torch.zeros(2, 4, 1))


def test_guidance_through_a_causal_model_changes_the_first_token_of_a_sample():
    matrix = autoregressive(4, SCHEDULE.ladder(10))
    plain, guided = (
        sample(guide(PROCESS.denoiser(True), SCHEDULE, last, scale), SCHEDULE, noise(), matrix)[0, 0, 0] for scale in (0.0, 2.0)
    )
    assert guided > plain + 0.1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("low", "high"), [(0, 299), (300, 600), (601, K), (400, 400)])
def test_guidance_acts_on_its_levels_only(form, low, high):
    k = levels(0, 299, 300, 400, 600, 601, K)
    process = Gaussian(SCHEDULE, ar1(7, 0.9))
    x = noise(t=7)
    plain = process.denoiser()(x, k)
    pred = guide(process.denoiser(), SCHEDULE, lambda clean: clean.sum((1, 2)), 1.0, form=form, levels=(low, high))(x, k)
    change = (pred.grad if form == "step" else pred.x0 - plain.x0)[0, :, 0]
    expected = (k >= low) & (k <= high) & (k > 0)
    assert ((change != 0) == expected[0]).all()


@pytest.mark.parametrize("form", FORMS)
def test_where_no_token_is_at_its_levels_guidance_is_the_plain_denoiser(form):
    def never(clean):
        raise AssertionError("the reward was asked for nothing")

    x, k = noise(), levels(0, 100, 200, K)
    plain, pred = PROCESS.denoiser()(x, k), guide(PROCESS.denoiser(), SCHEDULE, never, 1.0, form=form, levels=(300, 900))(x, k)
    assert torch.equal(pred.x0, plain.x0)
    assert pred.grad is None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{}, {"draws": 3}, {"draws": MonteCarlo(2, "fresh")}], ids=str)
def test_pinned_tokens_do_not_move(form, options):
    matrix = pin(pin(pyramid(4, SCHEDULE.ladder(10)), 0), 2, 400)
    guided = guide(PROCESS.denoiser(), SCHEDULE, near_two, 5.0, form=form, generator=seeded(0), **options)
    out = sample(guided, SCHEDULE, noise(3), matrix)
    assert torch.equal(out[:, [0, 2]], noise(3)[:, [0, 2]])
    plain = sample(PROCESS.denoiser(), SCHEDULE, noise(3), matrix)
    assert not torch.allclose(out[:, [1, 3]], plain[:, [1, 3]], atol=1e-3)


def test_guides_compose():
    """Two rewards one after the other are their sum."""
    first, second = (lambda clean: 0.5 * clean[:, 0].sum(-1)), near_two
    k, x = levels(0, 300, 600, 900), noise()
    nested = guide(guide(PROCESS.denoiser(), SCHEDULE, first, 2.0), SCHEDULE, second, 3.0)(x, k)
    summed = guide(PROCESS.denoiser(), SCHEDULE, lambda clean: 2 * first(clean) + 3 * second(clean), 1.0)(x, k)
    torch.testing.assert_close(nested.grad, summed.grad)
    torch.testing.assert_close(nested.x0, summed.x0)


def test_a_guide_wraps_classifier_free_guidance():
    net = model(cond=2, optional_cond=True)
    x, k = torch.randn(2, 4, 1, generator=seeded(0)), levels(0, 300, 600, 900, n=2)
    inner = classifier_free(net, torch.ones(2, 4, 1), 2.0)
    pred = guide(inner, SCHEDULE, last, 1.0)(x, k)
    torch.testing.assert_close(pred.x0, inner(x, k).x0)
    assert pred.grad.abs().sum() > 0


def test_blending_keeps_the_gradients_of_guides():
    x, k = noise(), levels(0, 300, 600, 900)
    guided = guide(PROCESS.denoiser(), SCHEDULE, last, 1.0)
    pred = blend([guided, PROCESS.denoiser()], [0.25, 0.75])(x, k)
    torch.testing.assert_close(pred.grad, 0.25 * guided(x, k).grad)


def test_guidance_builds_no_graph_and_no_gradients_of_the_model():
    net = model()
    out = sample(guide(net.denoiser(), SCHEDULE, last, 1.0), SCHEDULE, torch.randn(2, 3, 1), full_sequence(3, SCHEDULE.ladder(3)))
    assert not out.requires_grad
    assert all(p.grad is None for p in net.parameters())


# What is refused.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draws": 0}, "count from 1; got draws=0"),
        ({"form": "x0"}, "form is 'step' or 'eps'.*got 'x0'"),
        ({"levels": (600, 300)}, r"0 <= lo <= hi <= 1000; got \(600, 300\)"),
        ({"levels": (-1, 300)}, r"got \(-1, 300\)"),
        ({"levels": (0, 1001)}, r"got \(0, 1001\)"),
    ],
    ids=str,
)
def test_a_guide_that_makes_no_sense_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        guide(PROCESS.denoiser(), SCHEDULE, last, 1.0, **options)


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda x: x.sum(), r"shape \(2,\); got \(\)"),
        (lambda x: x.sum(-1), r"shape \(2,\); got \(2, 4\)"),
        (lambda x: x[:, -1], r"shape \(2,\); got \(2, 1\)"),
        (lambda x: 1.0, "got float"),
        (lambda x: (x[:, -1, 0] > 0).double(), "no gradient"),
        (lambda x: x[:, -1, 0].detach(), "no gradient"),
    ],
)
def test_a_reward_that_cannot_guide_is_refused(reward, words):
    with pytest.raises(ValueError, match=words):
        guide(PROCESS.denoiser(), SCHEDULE, reward, 1.0)(noise(2), levels(0, 300, 600, 900, n=2))


# Blends, classifier-free and history guidance.


def constant(value):
    return lambda x, k: Prediction(torch.full_like(x, value), torch.full_like(x, -value))


def test_a_blend_is_a_weighted_sum():
    x, k = noise(), levels(0, 300, 600, 900)
    pred = blend([constant(1.0), constant(2.0), constant(5.0)], [0.5, 1.5, -1.0])(x, k)
    assert (pred.x0 == 0.5 + 3.0 - 5.0).all()
    assert (pred.eps == -(0.5 + 3.0 - 5.0)).all()
    assert pred.grad is None


@pytest.mark.parametrize("weights", [[0.5, 0.6], [1.0, 1.0], [0.0, 0.0]])
def test_the_weights_of_a_blend_sum_to_1(weights):
    with pytest.raises(ValueError, match="sum to 1"):
        blend([constant(0.0), constant(1.0)], weights)


@pytest.mark.parametrize(("n", "weights"), [(2, [1.0]), (1, [0.5, 0.5]), (0, [])])
def test_a_blend_needs_a_weight_for_each(n, weights):
    with pytest.raises(ValueError, match=f"one weight for each denoiser; got {n} denoisers and {len(weights)} weights"):
        blend([constant(0.0)] * n, weights)


@pytest.mark.parametrize("rnn", [True, False], ids=["rnn", "transformer"])
def test_classifier_free_guidance_goes_from_no_condition_to_the_condition_and_beyond(rnn):
    net = model(cond=2, rnn=rnn, optional_cond=True)
    x, k = torch.randn(3, 4, 1, generator=seeded(0)), levels(0, 300, 600, 900, n=3)
    cond = torch.randn(3, 4, 1, generator=seeded(1))
    state, other = net.absorb(x, cond), net.absorb(x)
    plain, null = net.predict(x, k, cond, state), net.predict(x, k, None, state)
    assert torch.equal(classifier_free(net, cond, 1.0, state=state)(x, k).x0, plain.x0)
    assert torch.equal(classifier_free(net, cond, 0.0, state=state)(x, k).x0, null.x0)
    far = classifier_free(net, cond, 3.0, state=state)(x, k)
    torch.testing.assert_close(far.x0, null.x0 + 3 * (plain.x0 - null.x0))
    torch.testing.assert_close(far.eps, null.eps + 3 * (plain.eps - null.eps))
    # A past that was read with its condition is compared with one read without.
    assert torch.equal(classifier_free(net, cond, 0.0, state=state, null_state=other)(x, k).x0, net.predict(x, k, None, other).x0)


@pytest.mark.parametrize("tokens", [slice(0, 2), [0, 1]], ids=str)
def test_history_guidance_goes_from_no_history_to_the_history_and_beyond(tokens):
    net = model(rnn=False, causal=False)
    x, k = torch.randn(3, 4, 1, generator=seeded(0)), levels(0, 0, 600, 900, n=3)
    plain = net.predict(x, k)
    # No history: its tokens are noise at level K, and of them only the last trace of signal is left.
    absent, level = x.clone(), k.clone()
    level[:, :2] = K
    absent[:, :2] = SCHEDULE.add_noise(x[:, :2], level[:, :2], torch.randn(3, 2, 1, generator=seeded(7)))
    without = net.predict(absent, level)
    assert not torch.allclose(plain.x0[:, 2:], without.x0[:, 2:], atol=1e-3)

    def at(scale):
        return history_guidance(net.denoiser(), scale, schedule=SCHEDULE, tokens=tokens, generator=seeded(7))(x, k)

    assert torch.equal(at(1.0).x0, plain.x0)
    torch.testing.assert_close(at(0.0).x0, without.x0)
    torch.testing.assert_close(at(2.5).x0[:, 2:], (without.x0 + 2.5 * (plain.x0 - without.x0))[:, 2:], rtol=1e-4, atol=1e-4)


def test_one_token_of_history():
    x, k = noise(2), levels(0, 300, 600, 900, n=2)
    denoise, shown = record(PROCESS.denoiser())
    history_guidance(denoise, 2.0, schedule=SCHEDULE, tokens=0, generator=seeded(0))(x, k)
    assert [row[0].tolist() for _, row in shown] == [[0, 300, 600, 900], [K, 300, 600, 900]]


def test_a_vague_history_is_noised_on_to_its_level_and_never_back():
    """What is at a lower level is noised further, as if it had been noised at once; what is above stays as it is."""
    clean = torch.full((30_000, 3, 1), 2.0, dtype=torch.float64)
    k = levels(0, 200, 800, n=30_000)
    x = SCHEDULE.add_noise(clean, k, torch.randn(clean.shape, generator=seeded(0), dtype=torch.float64))
    denoise, shown = record(Gaussian(SCHEDULE, ar1(3, 0.9)).denoiser())
    history_guidance(denoise, 0.5, schedule=SCHEDULE, tokens=[0, 1, 2], level=500, generator=seeded(1))(x, k)
    vague, level = shown[1]
    assert level[0].tolist() == [500, 500, 800]
    assert torch.equal(shown[0][0], x)
    torch.testing.assert_close(vague[:, 2], x[:, 2])
    at = torch.tensor(500)
    for token in (0, 1):
        assert vague[:, token].mean().item() == pytest.approx(2 * SCHEDULE.alpha(at).item(), abs=0.02)
        assert vague[:, token].std().item() == pytest.approx(SCHEDULE.sigma(at).item(), abs=0.02)


@pytest.mark.parametrize("rnn", [True, False])
def test_history_guidance_for_a_past_inside_a_state(rnn):
    net = model(rnn=rnn)
    x, k = torch.randn(3, 6, 1, generator=seeded(0)), levels(0, 0, 0, 600, 900, 900, n=3)
    denoise = net.denoiser(None, net.absorb(x[:, :3]))
    with_it, without = denoise(x[:, 3:], k[:, 3:]), net.predict(x[:, 3:], k[:, 3:])
    said = history_guidance(denoise, 2.0)(x[:, 3:], k[:, 3:])
    assert not torch.allclose(with_it.x0, without.x0, atol=1e-3)
    torch.testing.assert_close(said.x0, 2 * with_it.x0 - without.x0)
    torch.testing.assert_close(said.eps, 2 * with_it.eps - without.eps)
    with pytest.raises(ValueError, match="let it be the innermost"):
        history_guidance(lambda x, k: denoise(x, k), 2.0)


def test_history_leaves_its_inputs_alone():
    x, k = noise(2), levels(0, 300, 600, 900, n=2).clone()
    kept, rows = x.clone(), k.clone()
    history_guidance(PROCESS.denoiser(), 2.0, schedule=SCHEDULE, tokens=slice(0, 2), generator=seeded(0))(x, k)
    assert torch.equal(x, kept)
    assert torch.equal(k, rows)


@pytest.mark.parametrize("level", [-1, 1001])
def test_a_history_cannot_be_vaguer_than_noise(level):
    with pytest.raises(ValueError, match=rf"0\.\.1000; got {level}"):
        history_guidance(PROCESS.denoiser(), 2.0, schedule=SCHEDULE, tokens=0, level=level)


def test_the_eps_form_wants_a_range_where_alpha_is_tiny():
    """On the linear schedule above a level it raises the reward too."""
    schedule = NoiseSchedule(linear(K))
    process = Gaussian(schedule, ar1(4, 0.9))
    matrix = pyramid(4, schedule.ladder(20), 2)
    means = [
        last(sample(guide(process.denoiser(True), schedule, last, scale, form="eps", levels=(300, K)), schedule, noise(100), matrix)).mean()
        for scale in (0.0, 1.0)
    ]
    assert means[1] > means[0] + 0.3
