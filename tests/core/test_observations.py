"""Observations with error: the level they stand for, and samples that follow the exact posterior of a Gaussian process."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Gaussian, ar1, mixed, seeded

from diffusion_forcing import NoiseSchedule, Sampler, autoregressive, cosine, full_sequence, linear, pin, pyramid, sample, start, start_at

K = 1000
SCHEDULES = {"cosine": NoiseSchedule(cosine(K)), "linear": NoiseSchedule(linear(K))}
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
PROCESSES = {"white": torch.eye(4, dtype=torch.float64), "ar1": ar1(4, 0.9), "unstructured": mixed(4)}
N = 20_000


def posterior(covariance, values, errors):
    """Mean and standard deviations (t,) of a Gaussian process given values (t,) measured with errors (t,): 0 exact, infinite not at all."""
    seen = torch.isfinite(errors).nonzero()[:, 0]
    cross = covariance[:, seen]
    noisy = cross[seen] + torch.diag(errors[seen] ** 2)
    gain = torch.linalg.solve(noisy, cross.T).T
    return gain @ values[seen], (covariance - gain @ cross.T).diagonal().clamp(min=0).sqrt()


def drawn(schedule, covariance, values, errors, sampler, n=N):
    """(n, t) samples by the exact denoiser, given values measured with errors."""
    levels = torch.full((len(values),), K)
    for i, error in enumerate(errors.tolist()):
        levels[i] = 0 if error == 0 else K if error == float("inf") else int(schedule.level_of(error))
    matrix = start_at(sampler.matrix_for(schedule, len(values)), levels)
    known = values.nan_to_num().expand(n, -1)[..., None]
    x = start(schedule, matrix, (n, 1), known.float(), seeded(0)).double()
    process = Gaussian(schedule, covariance)
    return sample(process.denoiser(), schedule, x, sampler.along(matrix), generator=seeded(1))[..., 0]


inf = float("inf")
CASES = {
    "one with error": [inf, inf, 0.3, inf],
    "precise": [inf, 0.1, inf, inf],
    "poor": [inf, inf, 3.0, inf],
    "mixed": [0.0, inf, 1.0, 0.1],
    "all with error": [0.3, 1.0, 0.1, 3.0],
}


@every_schedule
@pytest.mark.parametrize("covariance", PROCESSES.values(), ids=PROCESSES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "sampler",
    [Sampler(100), Sampler(200, eta=1.0), Sampler(100, hold="resample"), Sampler(100, "pyramid", 25.0)],
    ids=["ddim", "ancestral", "resample", "pyramid"],
)
def test_samples_follow_the_exact_posterior(schedule, covariance, case, sampler):
    """Means within 0.05 of a standard deviation, spreads within 5 %, wherever something is left open."""
    values, errors = torch.tensor([1.0, -0.5, 0.7, 1.5], dtype=torch.float64), torch.tensor(CASES[case], dtype=torch.float64)
    mean, std = posterior(covariance, values, errors)
    out = drawn(schedule, covariance, values, errors, sampler)
    open_ = std > 1e-6
    torch.testing.assert_close(((out.mean(0) - mean) / std)[open_], torch.zeros(int(open_.sum())).double(), rtol=0, atol=0.05)
    torch.testing.assert_close((out.std(0) / std)[open_], torch.ones(int(open_.sum())).double(), rtol=0, atol=0.05)
    assert torch.equal(out[:, ~open_], values[~open_].expand(N, -1).float().double())


@pytest.mark.parametrize("steps", [10, 20, 50])
def test_an_observation_keeps_its_spread_in_few_steps(steps):
    """Ancestral steps would keep 0.2 to 0.7 of it (linear schedule, error 0.1)."""
    for error in (0.1, 0.3, 1.0):
        values, errors = torch.tensor([1.0], dtype=torch.float64), torch.tensor([error], dtype=torch.float64)
        for schedule in SCHEDULES.values():
            out = drawn(schedule, torch.eye(1).double(), values, errors, Sampler(steps))
            assert out.std() / posterior(torch.eye(1).double(), values, errors)[1] == pytest.approx(1.0, abs=0.05)


def test_each_sequence_may_have_observations_of_its_own():
    """A batch of four patterns at once: each sequence has the posterior of its own pattern."""
    schedule, covariance = SCHEDULES["cosine"], ar1(4, 0.9)
    values, sampler = torch.tensor([1.0, -0.5, 0.7, 1.5], dtype=torch.float64), Sampler(60)
    patterns = torch.tensor([[inf] * 4, [0.0, inf, inf, inf], [inf, 0.3, inf, inf], [1.0, inf, inf, 0.0]], dtype=torch.float64)
    levels = torch.full((4, 4), K)
    for i, j in torch.isfinite(patterns).nonzero().tolist():
        levels[i, j] = 0 if patterns[i, j] == 0 else int(schedule.level_of(float(patterns[i, j])))
    n = 10_000
    matrix = start_at(full_sequence(4, schedule.ladder(60)), levels.repeat_interleave(n, dim=0))
    assert matrix.shape == (4 * n, 61, 4)
    x = start(schedule, matrix, (4 * n, 1), values.float().expand(4 * n, -1)[..., None], seeded(0)).double()
    out = sample(Gaussian(schedule, covariance).denoiser(), schedule, x, sampler.along(matrix), generator=seeded(1))[..., 0]
    for pattern, own in zip(patterns, out.unflatten(0, (4, n)), strict=True):
        mean, std = posterior(covariance, values, pattern)
        open_ = std > 1e-6
        assert ((own.mean(0) - mean) / std)[open_].abs().max() < 0.05
        assert (own.std(0) / std)[open_].sub(1).abs().max() < 0.05


@every_schedule
@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_a_pinned_observation_conditions_the_others_and_stays_as_it_is(schedule, eta):
    """Held at its level by any hold; the others have their exact posterior."""
    covariance = ar1(4, 0.9)
    level = int(schedule.level_of(0.5))
    values, errors = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64), torch.tensor([inf, 0.5, inf, inf], dtype=torch.float64)
    mean, std = posterior(covariance, values, errors)
    for hold in ("keep", "resample"):
        matrix = pin(full_sequence(4, schedule.ladder(200 if eta else 100)), 1, level)
        x = start(schedule, matrix, (N, 1), values.expand(N, -1)[..., None], seeded(0)).double()
        out = sample(Gaussian(schedule, covariance).denoiser(), schedule, x, matrix, eta=eta, hold=hold, generator=seeded(1))[..., 0]
        assert torch.equal(out[:, 1], x[:, 1, 0])
        for i in (0, 2, 3):
            assert abs(out[:, i].mean() - mean[i]) < 0.05 * std[i]
            assert out[:, i].std() == pytest.approx(float(std[i]), rel=0.05)


def test_a_measurement_is_not_noised_a_second_time():
    schedule = SCHEDULES["cosine"]
    level = schedule.level_of(0.5)
    matrix = start_at(full_sequence(2, schedule.ladder(10)), torch.stack([level, torch.tensor(K)]))
    x = start(schedule, matrix, (3, 1), torch.full((3, 2, 1), 2.0), seeded(0))
    torch.testing.assert_close(x[:, 0], torch.full((3, 1), 2.0) * schedule.alpha(level))


# The level of an error.


@every_schedule
@given(std=st.floats(0.02, 50))
@settings(deadline=None, derandomize=True)
def test_the_level_of_an_error_is_the_nearest(schedule, std):
    k = schedule.level_of(std)
    ratio = (schedule.sigma_table / schedule.alpha_table)[1:].double().log()
    assert (ratio[k - 1] - torch.tensor(std).double().log()).abs() == (ratio - torch.tensor(std).double().log()).abs().min()


@every_schedule
def test_levels_and_errors_go_back_and_forth(schedule):
    k = torch.arange(1, K + 1)
    assert torch.equal(schedule.level_of(schedule.sigma(k).double() / schedule.alpha(k).double()), k)
    assert schedule.level_of(torch.full((2, 3), 0.5)).shape == (2, 3)
    assert int(schedule.level_of(1e-9)) == 1
    assert int(schedule.level_of(1e9)) == K


# Bad input.


@pytest.mark.parametrize("std", [0.0, -1.0, float("nan")])
def test_an_error_is_positive(std):
    with pytest.raises(ValueError, match="std is the standard deviation of an error, positive"):
        SCHEDULES["cosine"].level_of(std)


@pytest.mark.parametrize(
    ("levels", "words"),
    [
        (torch.zeros(3, dtype=torch.long), r"\(t,\) or \(b, t\); got \(3,\)"),
        (torch.zeros(2, 2, 4, dtype=torch.long), r"got \(2, 2, 4\)"),
        (torch.tensor([0, 0, 0, K + 1]), r"0\.\.1000; got .* 0\.\.1001"),
        (torch.tensor([-1, 0, 0, 0]), "-1"),
        (torch.zeros(4), "integers"),
        (torch.zeros(0, 4, dtype=torch.long), r"got \(0, 4\)"),
    ],
)
def test_levels_of_what_is_known_are_checked(levels, words):
    with pytest.raises(ValueError, match=words):
        start_at(full_sequence(4, SCHEDULES["cosine"].ladder(5)), levels)


def test_known_values_are_there_and_finite():
    schedule = SCHEDULES["cosine"]
    matrix = pin(full_sequence(3, schedule.ladder(5)), 0)
    with pytest.raises(ValueError, match="token 0 below level K, where its value counts, and none is given"):
        start(schedule, matrix, (2, 1))
    known = torch.full((2, 3, 1), float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        start(schedule, matrix, (2, 1), known)
    known[:, 0] = 1.0  # where nothing is known it may be anything
    assert torch.isfinite(start(schedule, matrix, (2, 1), known)).all()


def test_tokens_begin_in_the_precision_of_the_schedule():
    """NumPy's numbers are of float64 unless said otherwise, which a network's weights would refuse."""
    schedule = SCHEDULES["cosine"]
    matrix, known = start_at(full_sequence(3, schedule.ladder(5)), torch.tensor([0, 300, K])), torch.ones(2, 3, 1)
    begun = [start(schedule, matrix, (2, 1), part, seeded(0)) for part in (known, known.double())]
    assert begun[1].dtype == torch.float32
    assert torch.equal(*begun)


@pytest.mark.parametrize("known", [None, torch.zeros(2, 3, 1)])
def test_a_matrix_that_cannot_be_followed_is_refused_where_tokens_begin(known):
    schedule = SCHEDULES["cosine"]
    for level in (-1, K + 1):
        with pytest.raises(ValueError, match=rf"must lie in 0\.\.{K}; got"):
            start(schedule, torch.tensor([[K, K, max(level, K)], [0, 0, min(level, 0)]]), (2, 1), known)
    with pytest.raises(ValueError, match=r"matrix is of 5 sequences, one each, but x has 2"):
        start(schedule, start_at(full_sequence(3, schedule.ladder(5)), torch.full((5, 3), K)), (2, 1), known)


def test_a_matrix_for_each_sequence_has_as_many_as_there_are():
    schedule = SCHEDULES["cosine"]
    matrix = start_at(pyramid(3, schedule.ladder(5)), torch.full((2, 3), K))
    with pytest.raises(ValueError, match="matrix is of 2 sequences, one each, but x has 5"):
        sample(Gaussian(schedule, ar1(3, 0.5)).denoiser(), schedule, torch.randn(5, 3, 1), matrix)


def test_known_everywhere_stays_known():
    known = torch.zeros(6, 3, dtype=torch.long)
    assert torch.equal(start_at(known, torch.zeros(3, dtype=torch.long)), known)


def test_absent_everywhere_is_the_matrix_itself():
    matrix = autoregressive(3, SCHEDULES["linear"].ladder(7))
    assert torch.equal(start_at(matrix, torch.full((3,), K)), matrix)
    known = start_at(matrix, torch.tensor([0, K, K]))
    assert (known[:, 0] == 0).all()
    assert torch.equal(known[:, 1:], matrix[:, 1:])
