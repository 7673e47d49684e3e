"""In-filling, interpolation, smoothing and filtering by networks that are formulas, against closed-form posteriors."""

import itertools
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import ExactBackbone, ExactMixture, ar1, mixed, seeded

from diffusion_forcing import (
    RNN,
    DiffusionForcing,
    NoiseSchedule,
    Sampler,
    Transformer,
    cosine,
    filter,
    full_sequence,
    infill,
    interpolate,
    linear,
    observe,
    sample,
    smooth,
    start,
    start_at,
)
from diffusion_forcing.backbones import select_state
from diffusion_forcing.preconditioning import Preconditioning

K = 1000
SCHEDULES = {"cosine": NoiseSchedule(cosine(K)), "linear": NoiseSchedule(linear(K))}
inf, nan = math.inf, math.nan
VECTORS = torch.kron(ar1(4, 0.9), torch.tensor([[1.0, 0.6], [0.6, 1.0]], dtype=torch.float64))  # 4 tokens of 2 numbers
N = 4000


def exact_model(covariance, width=1, causal=False, schedule=SCHEDULES["cosine"]):
    return DiffusionForcing(ExactBackbone(schedule, covariance, width, causal), schedule, parameterization="x0")


def posterior(covariance, values, std):
    """Means and standard deviations (t*d,) of a Gaussian given values measured with errors, both (t, d)."""
    values, std = values.flatten().double(), std.flatten().double()
    seen = torch.isfinite(std).nonzero()[:, 0]
    cross = covariance[:, seen]
    gain = torch.linalg.solve(cross[seen] + torch.diag(std[seen] ** 2), cross.T).T
    return gain @ values[seen], (covariance - gain @ cross.T).diagonal().clamp(min=0).sqrt()


def check(samples, mean, std, atol=0.05, rtol=0.05):
    """Means within atol of a standard deviation and spreads within rtol, beyond what the number of samples leaves open."""
    samples, open_ = samples.flatten(1).double(), std > 1e-6
    if not open_.any():
        return
    noise = 3 / len(samples) ** 0.5
    assert ((samples.mean(0) - mean) / std)[open_].abs().max() < atol + noise
    assert (samples.std(0) / std)[open_].sub(1).abs().max() < rtol + noise / 2**0.5


PATTERNS = {
    "a gap": [0.0, inf, inf, 0.0],
    "all with error": [0.5, 0.3, 1.0, 0.5],
    "mixed": [inf, 0.3, 0.0, 1.0],
    "nothing": [inf] * 4,
}
WHOLE = torch.tensor([[1.0], [-0.3], [0.4], [1.2]])


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("process", [ar1(4, 0.9), mixed(4)], ids=["ar1", "unstructured"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_smoothing_is_exact(schedule, causal, process, pattern):
    """Also by a causal network, which never sees what comes later: its particles do."""
    std, n = torch.tensor(PATTERNS[pattern])[:, None], N if causal else 4 * N
    model = exact_model(process, 1, causal, schedule)
    samples = smooth(model, WHOLE[None], std[None], samples=n, particles=n, generator=seeded(0))[:, 0]
    check(samples, *posterior(process, WHOLE, std))
    assert torch.equal(samples[:, std == 0], WHOLE[std == 0].expand(n, -1))


@pytest.mark.parametrize(("matrix", "slope"), [("full_sequence", 1), ("pyramid", 10), ("autoregressive", 1), ("trapezoid", 10)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_matrix_is_exact_for_a_bidirectional_model(matrix, slope, pattern):
    std, sampler = torch.tensor(PATTERNS[pattern])[:, None], Sampler(50, matrix, slope, "adams_angle")
    samples = smooth(exact_model(ar1(4, 0.9)), WHOLE[None], std[None], samples=N, sampler=sampler, generator=seeded(0))[:, 0]
    check(samples, *posterior(ar1(4, 0.9), WHOLE, std))


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("correlation", [0.99, 0.999])
def test_a_gap_whose_ends_nearly_tell_it_keeps_its_spread(schedule, correlation):
    """Of 0.1 and 0.03. Fifty Euler steps along evenly spread levels left 0.82 and 0.48 of it (linear schedule)."""
    std, process = torch.tensor(PATTERNS["a gap"])[:, None], ar1(4, correlation)
    samples = smooth(exact_model(process, schedule=schedule), WHOLE[None], std[None], samples=4 * N, generator=seeded(0))[:, 0]
    check(samples, *posterior(process, WHOLE, std), atol=0.02, rtol=0.03)


def test_later_tokens_given_in_the_matrix_bias_a_causal_model():
    """It draws what comes before them as if they were not there; `infill` does not."""
    model, covariance = exact_model(ar1(4, 0.9), causal=True), ar1(4, 0.9)
    std = torch.tensor([0.0, inf, inf, 0.0])[:, None]
    matrix = start_at(full_sequence(4, model.schedule.ladder(50)), torch.tensor([0, K, K, 0]))
    x = start(model.schedule, matrix, (N, 1), WHOLE.expand(N, -1, -1), seeded(0))
    with pytest.warns(UserWarning, match="causal: it cannot use token 3"):
        samples = sample(model.denoiser(), model.schedule, x, matrix, generator=seeded(1)).flatten(1).double()
    past_only, _ = posterior(covariance, WHOLE, torch.tensor([0.0, inf, inf, inf])[:, None])
    mean, spread = posterior(covariance, WHOLE, std)
    assert ((samples.mean(0) - past_only) / spread)[1:3].abs().max() < 0.1
    assert ((samples.mean(0) - mean) / spread)[1:3].abs().min() > 0.2


def test_each_sequence_has_its_own_pattern():
    stds = torch.tensor([*PATTERNS.values()])[..., None]
    for causal in (False, True):
        samples = smooth(
            exact_model(ar1(4, 0.9), 1, causal), WHOLE.expand(4, -1, -1), stds, samples=N // 4, generator=seeded(0), particles=N // 2
        )
        assert samples.shape == (N // 4, 4, 4, 1)
        for own, std in zip(samples.unbind(1), stds, strict=True):
            check(own, *posterior(ar1(4, 0.9), WHOLE, std))


SINGLE = {
    "one channel": [[inf, 0.0], [inf, 0.0], [inf, 0.0], [inf, 0.0]],
    "one channel with error": [[0.3, inf], [0.3, inf], [0.3, inf], [inf, inf]],
    "everything": [[0.0, inf], [0.0, 0.0], [0.5, 0.1], [0.4, 0.4]],
}


@pytest.mark.parametrize(("pattern", "schedule"), [*((name, "cosine") for name in SINGLE), ("everything", "linear")])
def test_single_numbers_of_a_token_may_be_known(schedule, pattern):
    std = torch.tensor(SINGLE[pattern])
    values = torch.tensor([[0.5, 1.0], [-0.3, 0.4], [0.8, 0.2], [1.0, 1.0]])
    samples = smooth(exact_model(VECTORS, 2, schedule=SCHEDULES[schedule]), values[None], std[None], samples=N, generator=seeded(0))[:, 0]
    check(samples, *posterior(VECTORS, values, std), atol=0.06)
    assert torch.equal(samples[:, std == 0], values[std == 0].expand(N, -1))


class ScaledBackbone(ExactBackbone):
    """The best network for `Preconditioning(variance)`: reads tokens, and answers, in units in which each number has variance 1."""

    def __init__(self, schedule, covariance, width, variance):
        super().__init__(schedule, covariance, width)
        self.variance = variance

    def forward(self, x, k, cond, state=None):
        alpha, sigma = self.schedule.alpha(k)[..., None], self.schedule.sigma(k)[..., None]
        x0, state = super().forward(x * (alpha**2 * self.variance + sigma**2).sqrt(), k, cond, state)
        return x0 / self.variance.sqrt(), state


@pytest.mark.parametrize(("pattern", "variance"), [("everything", 0.01), ("one channel", 0.01)])
def test_single_numbers_of_tokens_of_any_size_may_be_known(pattern, variance):
    """In absolute units of error means would be off by 2.2 standard deviations, and spreads 2.7 times the exact one."""
    size, scale = variance**0.5, torch.full((2,), variance)
    network = ScaledBackbone(SCHEDULES["cosine"], variance * VECTORS, 2, scale)
    model = DiffusionForcing(network, SCHEDULES["cosine"], parameterization="x0", preconditioning=Preconditioning(scale))
    values, std = size * torch.tensor([[0.5, 1.0], [-0.3, 0.4], [0.8, 0.2], [1.0, 1.0]]), size * torch.tensor(SINGLE[pattern])
    samples = smooth(model, values[None], std[None], samples=N // 2, generator=seeded(0))[:, 0]
    check(samples / size, *(part / size for part in posterior(variance * VECTORS, values, std)), atol=0.06)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_both_ways_round_are_found(causal):
    """Two modes with the right weights, within 5 points; the evidence is a later token."""
    weights, means, covariance = torch.tensor([0.6, 0.4]), torch.tensor([[0.0, 1.0, 0.4], [0.0, -1.0, -0.4]]), 0.1 * ar1(3, 0.5)
    model = DiffusionForcing(
        ExactMixture(SCHEDULES["cosine"], weights, means, covariance, 1, causal), SCHEDULES["cosine"], parameterization="x0"
    )
    values = torch.tensor([[[0.0], [nan], [0.08]]])
    for error in (0.0, 0.5):
        std = torch.tensor([0.0, inf, error])
        share = _share(weights, means, covariance, values[0, :, 0], std)
        assert 0.6 < share < 0.8
        samples = smooth(model, values, std, samples=N, particles=N, generator=seeded(0))
        assert (samples[:, 0, 1, 0] > 0).float().mean() == pytest.approx(share, abs=0.05)
        assert (samples[:, 0, 1, 0].abs() - 1).abs().mean() < 0.4


def test_both_ways_round_are_found_given_single_numbers():
    weights, means = torch.tensor([0.6, 0.4]), torch.tensor([[0.0, 1.0, 0.4, 0.0], [0.0, -1.0, -0.4, 0.0]])
    covariance = 0.1 * ar1(4, 0.5)
    model = DiffusionForcing(ExactMixture(SCHEDULES["cosine"], weights, means, covariance, 2), SCHEDULES["cosine"], parameterization="x0")
    values = torch.tensor([0.0, nan, 0.08, nan])
    samples = infill(model, values.view(1, 2, 2), samples=N, generator=seeded(0))
    share = _share(weights, means, covariance, values, torch.tensor([0.0, inf, 0.0, inf]))
    assert (samples[:, 0, 0, 1] > 0).float().mean() == pytest.approx(share, abs=0.05)


def _share(weights, means, covariance, values, std):
    """Posterior weight of the first mode."""
    seen = torch.isfinite(std).nonzero()[:, 0]
    noisy = covariance[seen][:, seen] + torch.diag(std[seen].double() ** 2)
    fits = [torch.distributions.MultivariateNormal(mean[seen].double(), noisy).log_prob(values[seen].double()) for mean in means]
    return float((torch.stack(fits) + weights.double().log()).softmax(0)[0])


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_filtering_knows_the_past_only(causal):
    std = torch.tensor(PATTERNS["mixed"])[:, None]
    samples = filter(exact_model(ar1(4, 0.9), 1, causal), WHOLE[None], std[None], samples=N, generator=seeded(0))[:, 0]
    for i in range(4):
        mean, spread = posterior(ar1(4, 0.9)[: i + 1, : i + 1], WHOLE[: i + 1], std[: i + 1])
        check(samples[:, i], mean[-1:], spread[-1:])


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_each_sequence_has_its_own_condition(causal):
    """A condition is added to all tokens, so samples given it are those of another sequence, moved by it."""

    class Moved(ExactBackbone):
        def forward(self, x, k, cond, state=None):
            alpha = self.schedule.alpha(k)[..., None]
            out, state = super().forward(x - alpha * cond, k, cond, state)
            return out + cond, state

        def forced(self, x, k, cond, past_x, past_k):
            alpha, past = self.schedule.alpha(k)[..., None], self.schedule.alpha(past_k)[..., None]
            return super().forced(x - alpha * cond, k, cond, past_x - past * cond, past_k) + cond

    network = Moved(SCHEDULES["cosine"], ar1(4, 0.9), 1, causal)
    network.config |= {"cond": 1}
    model = DiffusionForcing(network, SCHEDULES["cosine"], parameterization="x0")
    cond, std = torch.tensor([-5.0, 0.0, 7.0]).view(3, 1, 1).expand(3, 4, 1), torch.tensor(PATTERNS["mixed"])[:, None]
    for function in (smooth, filter):
        samples = function(model, WHOLE + cond, std.expand(3, 4, 1), samples=N // 4, cond=cond, generator=seeded(0))
        for own, shift in zip(samples.unbind(1), cond[:, 0], strict=True):
            if function is smooth:
                check(own - shift, *posterior(ar1(4, 0.9), WHOLE, std))
            mean, spread = posterior(ar1(4, 0.9)[:1, :1], WHOLE[:1], std[:1])
            if function is filter:
                check((own - shift)[:, 0], mean, spread)


def test_interpolation_is_a_gap_between_known_tokens():
    model, first, last = exact_model(ar1(4, 0.9)), WHOLE[None, :1], WHOLE[None, 3:]
    samples = interpolate(model, first, last, 2, samples=50, generator=seeded(0))
    whole = torch.cat([first, torch.full((1, 2, 1), nan), last], dim=1)
    assert samples.shape == (50, 1, 2, 1)
    assert torch.equal(samples, infill(model, whole, samples=50, generator=seeded(0))[:, :, 1:3])
    assert torch.equal(samples, interpolate(model, first.double().numpy(), last.double().numpy(), 2, samples=50, generator=seeded(0)))


def test_particles_that_disagree_are_said():
    """With an impossible end all particles but a few lose their weight."""
    model = exact_model(ar1(4, 0.1), 1, causal=True)
    with pytest.warns(UserWarning, match=r"of 64 particles agree.* particles=512"):
        smooth(
            exact_model(ar1(4, 0.99), 1, causal=True),
            torch.tensor([[[nan], [nan], [nan], [4.0]]]),
            samples=10,
            particles=64,
            generator=seeded(0),
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        smooth(model, WHOLE[None], 1.0, samples=10, generator=seeded(0))


def test_observations_that_contradict_each_other_give_finite_samples():
    values = torch.tensor([[[8.0], [-8.0], [8.0], [-8.0]]])
    for std, causal in itertools.product((0.0, 0.01, 1.0), (False, True)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samples = smooth(exact_model(ar1(4, 0.999), 1, causal), values, std, samples=20, generator=seeded(0), sampler=Sampler(10))
        assert torch.isfinite(samples).all()


def test_a_seed_repeats_the_samples():
    model = exact_model(ar1(4, 0.9), 1, causal=True)
    one, two, other = (smooth(model, WHOLE[None], 0.5, samples=5, generator=seeded(seed)) for seed in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_values_are_taken_in_the_precision_of_the_model(causal):
    """NumPy's numbers are of float64 unless said otherwise."""
    schedule = NoiseSchedule(cosine(10))
    config = {"hidden": 8, "heads": 2, "layers": 1, "levels": 10}
    model = DiffusionForcing(Transformer(1, causal=causal, **config), schedule)
    values = torch.tensor([[[1.0], [nan], [0.5]]])
    for precision in (torch.float32, torch.float64):
        one, two = (smooth(model.to(precision), part, samples=2, generator=seeded(0)) for part in (values, values.double()))
        assert one.dtype == precision
        assert torch.equal(one, two)
        assert torch.isfinite(filter(model, values.double(), 0.1, samples=2)).all()


# What is known of a sequence.


def test_a_missing_value_is_nan_or_has_no_bound_on_its_error():
    values = torch.tensor([[[1.0, nan], [2.0, 3.0], [4.0, 5.0]]])
    known = observe(values, torch.tensor([0.5, inf, 0.0]))
    assert torch.equal(known.std, torch.tensor([[[0.5, inf], [inf, inf], [0.0, 0.0]]]))
    assert torch.equal(known.values, torch.tensor([[[1.0, 0.0], [0.0, 0.0], [4.0, 5.0]]]))
    assert known.levels(SCHEDULES["cosine"]).tolist() == [[K, K, 0]]
    assert known.partly.tolist() == [[True, False, False]]
    schedule = SCHEDULES["cosine"]
    largest = observe(torch.zeros(1, 1, 2), torch.tensor([[[0.1, 0.5]]])).levels(schedule)
    assert largest.tolist() == [[int(schedule.level_of(0.5))]]


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.sampled_from([0, 1, 2, 3]), st.floats(0, 10))
def test_errors_of_any_shape_are_the_same_errors(axes, std):
    values = torch.zeros(2, 3, 4)
    shape = [(), (3,), (2, 3), (2, 3, 4)][axes]
    assert torch.equal(observe(values, torch.full(shape, std)).std, observe(values, std).std)


@pytest.mark.parametrize(
    ("values", "std", "words"),
    [
        (torch.zeros(1, 2, 1), -0.1, "std is the standard deviation"),
        (torch.zeros(1, 2, 1), nan, "std is the standard deviation"),
        (torch.zeros(1, 2, 1), torch.zeros(3), r"got \(3,\)"),
        (torch.zeros(1, 2, 1), torch.zeros(1, 1, 1, 1), r"got \(1, 1, 1, 1\)"),
        (torch.full((1, 2, 1), inf), 0.0, "infinite"),
        (torch.zeros(1, 2, 1, dtype=torch.long), 0.0, "floating"),
        (torch.zeros(2, 1), 0.0, "batch, tokens"),
        (torch.zeros(0, 2, 1), 0.0, "batch, tokens"),
        (torch.zeros(1, 0, 1), 0.0, "batch, tokens"),
    ],
)
def test_bad_observations_are_refused(values, std, words):
    with pytest.raises(ValueError, match=words):
        observe(values, std)


def test_what_a_model_cannot_do_is_refused():
    partly = torch.tensor([[[1.0, nan], [1.0, 1.0]]])
    for function in (smooth, filter):
        with pytest.raises(ValueError, match="bidirectional"):
            function(exact_model(VECTORS, 2, causal=True), partly)
    for name in ("samples", "particles"):
        with pytest.raises(ValueError, match=name):
            smooth(exact_model(VECTORS, 2), partly, **{name: 0})
    large = DiffusionForcing(RNN(5000, hidden=4, blocks=1, levels=K), SCHEDULES["cosine"])
    with pytest.raises(ValueError, match=r"at most 4096 numbers; got 5000: use a bidirectional"):
        smooth(large, torch.zeros(1, 2, 5000), 1.0)
    with pytest.raises(ValueError, match="first and last"):
        interpolate(exact_model(VECTORS, 2), torch.zeros(1, 1, 2), torch.zeros(2, 1, 2), 2)


@pytest.mark.parametrize("shape", [(2, 4, 1), (1, 3, 1), (1, 6, 1), (1, 4, 2)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_a_condition_is_of_the_sequences_and_not_of_the_samples(causal, shape):
    """Two conditions for one sequence would be one for each of two samples; of longer ones the rest would be left unread."""
    model = DiffusionForcing(Transformer(1, 1, hidden=8, heads=2, layers=1, causal=causal), SCHEDULES["cosine"])
    for function in (smooth, filter):
        with pytest.raises(ValueError, match=r"cond covers each token, \(1, 4\)|conditions of 1 numbers"):
            function(model, torch.full((1, 4, 1), nan), samples=2, cond=torch.zeros(shape))


def test_a_causal_model_follows_no_matrix_of_the_sampler():
    model = exact_model(ar1(4, 0.9), 1, causal=True)
    sampler = Sampler(5).over(model.schedule, 4)
    with pytest.raises(ValueError, match=r"along no matrix of the sampler's; give Sampler\(steps=...\)"):
        smooth(model, torch.full((1, 4, 1), nan), samples=2, sampler=sampler)


def test_values_of_numpy_are_taken():
    values = torch.tensor([[[1.0], [nan]]])
    assert torch.equal(observe(values.numpy()).std, observe(values).std)


def test_a_state_is_selected_by_sequence():
    state = (torch.arange(4), (torch.arange(4)[:, None], None))
    chosen = select_state(state, torch.tensor([2, 2, 0]))
    assert chosen[0].tolist() == [2, 2, 0]
    assert chosen[1][0].flatten().tolist() == [2, 2, 0]
    assert chosen[1][1] is None
