"""The forward process: curves, ladders, noising."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import seeded

from diffusion_forcing import NoiseSchedule, cosine, linear, sigmoid
from diffusion_forcing.schedule import CURVES, expand

SIZES = [1, 2, 3, 10, 100, 1000]


@pytest.mark.parametrize("levels", SIZES)
@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_a_curve_falls_from_one_to_almost_nothing(curve, levels):
    alpha_bar = curve(levels)
    assert alpha_bar.shape == (levels + 1,)
    assert alpha_bar[0] == 1
    assert (alpha_bar.diff() < 0).all()
    assert 0 < alpha_bar[-1] < 2e-3


@pytest.mark.parametrize("levels", SIZES)
@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_the_tables_hold_what_the_curve_says(curve, levels):
    """Also in float32, where 1 - alpha_bar has lost its digits at the low levels."""
    alpha_bar = curve(levels)
    schedule = NoiseSchedule(alpha_bar)
    k = torch.arange(levels + 1)
    assert schedule.levels == levels
    assert schedule.alpha(k[0]) == 1
    assert schedule.sigma(k[0]) == 0
    torch.testing.assert_close(schedule.alpha(k).double() ** 2, alpha_bar, rtol=1e-6, atol=0)
    torch.testing.assert_close(schedule.sigma(k).double() ** 2, 1 - alpha_bar, rtol=1e-6, atol=0)
    assert (schedule.alpha(k).diff() < 0).all()
    assert (schedule.sigma(k)[1:] > 0).all()


def test_linear_is_the_schedule_of_ddpm():
    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    torch.testing.assert_close(linear(1000)[1:], torch.cumprod(1 - betas, 0), rtol=1e-12, atol=0)
    torch.testing.assert_close(linear()[-1].item(), 4.0358e-5, rtol=1e-4, atol=0)


@pytest.mark.parametrize("u", [0.25, 0.5, 0.75])
def test_linear_means_the_same_at_any_number_of_levels(u):
    assert abs(linear(100)[int(100 * u)] - linear(1000)[int(1000 * u)]) < 0.01


@pytest.mark.parametrize("u", [0.1, 0.5, 0.9])
def test_cosine_is_a_quarter_turn(u):
    def turn(v):
        return math.cos((v + 0.008) / 1.008 * math.pi / 2) ** 2

    assert math.isclose(cosine(1000)[int(1000 * u)], turn(u) / turn(0), rel_tol=1e-9)


def test_sigmoid_is_half_way_down_in_the_middle():
    assert math.isclose(sigmoid(1000)[500], 0.5, rel_tol=1e-9)
    assert sigmoid(1000)[100] > cosine(1000)[500] > sigmoid(1000)[900]
    # A steeper one loses its signal closer to the middle.
    assert sigmoid(1000, tau=0.5)[300] > sigmoid(1000)[300]


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
@pytest.mark.parametrize("levels", [0, -3])
def test_a_curve_needs_a_level_of_noise(curve, levels):
    with pytest.raises(ValueError, match=f"at least one level.*levels={levels}"):
        curve(levels)


@pytest.mark.parametrize(
    ("alpha_bar", "words"),
    [
        (torch.ones(2, 2), "one value per level.*shape.*2, 2"),
        (torch.ones(1), "K >= 1"),
        (torch.tensor(1.0), "one value per level"),
        (torch.tensor([0.999, 0.5, 0.1]), "exactly 1.*0.999"),
        (torch.tensor([1.0, 0.5, 0.5]), "fall strictly"),
        (torch.tensor([1.0, 0.5, 0.7]), "fall strictly"),
        (torch.tensor([1.0, 0.5, 0.0]), "positive"),
        (torch.tensor([1.0, float("nan"), 0.1]), "NaN"),
        (torch.tensor([1.0, 0.5, float("nan")]), "NaN"),
    ],
)
def test_a_wrong_alpha_bar_is_refused(alpha_bar, words):
    with pytest.raises(ValueError, match=words):
        NoiseSchedule(alpha_bar)


def test_snr_is_the_ratio_of_the_powers():
    schedule = NoiseSchedule(torch.tensor([1.0, 0.8, 0.2]))
    torch.testing.assert_close(schedule.snr(torch.tensor([[0, 1, 2]])), torch.tensor([[float("inf"), 4.0, 0.25]]))


@given(levels=st.integers(1, 1200), data=st.data())
@settings(derandomize=True, deadline=None, max_examples=200)
def test_a_ladder_climbs_evenly_from_0_to_k(levels, data):
    steps = data.draw(st.integers(1, levels))
    ladder = NoiseSchedule(linear(levels)).ladder(steps)
    assert ladder.dtype == torch.int64
    assert ladder.shape == (steps + 1,)
    assert ladder[0] == 0
    assert ladder[-1] == levels
    rungs = ladder.diff()
    assert rungs.min() >= 1
    assert rungs.max() - rungs.min() <= 1


@given(levels=st.integers(1, 1200), curve=st.sampled_from(sorted(CURVES)), data=st.data())
@settings(derandomize=True, deadline=None, max_examples=200)
def test_a_fine_ladder_has_as_many_rungs_and_no_two_alike(levels, curve, data):
    steps = data.draw(st.integers(1, levels))
    ladder = NoiseSchedule(CURVES[curve](levels)).fine_ladder(steps)
    assert ladder.dtype == torch.int64
    assert ladder.shape == (steps + 1,)
    assert (ladder[0], ladder[-1]) == (0, levels)
    assert (ladder.diff() > 0).all()


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_a_fine_ladder_is_closer_together_where_there_is_little_noise_or_much(curve):
    schedule = NoiseSchedule(curve(1000))
    turns = schedule.angle[schedule.fine_ladder(50)].diff()
    assert turns[25:30].mean() > 3 * max(turns[:3].mean(), turns[-3:].mean())
    assert (turns[1:] / turns[:-1]).max() < 3  # no sudden change, which would cost steps that look back their accuracy


@pytest.mark.parametrize("steps", [0, -1, 11])
def test_a_ladder_of_no_or_too_many_steps_is_refused(steps):
    with pytest.raises(ValueError, match=f"between 1 and K=10.*got {steps}"):
        NoiseSchedule(linear(10)).ladder(steps)
    with pytest.raises(ValueError, match=f"between 1 and K=10.*got {steps}"):
        NoiseSchedule(linear(10)).fine_ladder(steps)


@pytest.mark.parametrize("event", [(3,), (2, 4, 4)])
def test_add_noise_treats_each_token_at_its_own_level(event):
    schedule = NoiseSchedule(cosine(10))
    generator = seeded(0)
    x, noise = torch.randn(2, 2, 3, *event, generator=generator)
    k = torch.tensor([[0, 4, 10], [10, 1, 0]])
    noisy = schedule.add_noise(x, k, noise)
    alpha_bar = cosine(10).float()
    for b in range(2):
        for t in range(3):
            kept = alpha_bar[k[b, t]]
            torch.testing.assert_close(noisy[b, t], kept.sqrt() * x[b, t] + (1 - kept).sqrt() * noise[b, t])
    assert torch.equal(noisy[0, 0], x[0, 0])
    assert torch.equal(noisy[1, 2], x[1, 2])


def test_add_noise_takes_one_row_of_levels_for_all():
    schedule = NoiseSchedule(cosine(10))
    x, noise = torch.randn(2, 4, 3, 5, generator=seeded(0))
    k = torch.tensor([0, 5, 10])
    assert torch.equal(schedule.add_noise(x, k, noise), schedule.add_noise(x, k.expand(4, 3), noise))


def test_noise_keeps_the_variance_of_unit_data():
    schedule = NoiseSchedule(sigmoid(100))
    x, noise = torch.randn(2, 20_000, 3, 1, generator=seeded(0))
    variance = schedule.add_noise(x, torch.tensor([10, 50, 90]), noise).var(0)
    torch.testing.assert_close(variance, torch.ones(3, 1), rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("k", "words"),
    [
        (torch.tensor([0.0, 1.0]), "integers in 0..10.*float32"),
        (torch.tensor([True, False]), "integers in 0..10.*bool"),
        (torch.tensor([0, 11]), "0..10; got 0..11"),
        (torch.tensor([-1, 3]), "0..10; got -1..3"),
    ],
)
def test_levels_that_are_no_levels_are_refused(k, words):
    with pytest.raises(ValueError, match=words):
        NoiseSchedule(cosine(10)).check_k(k)


@pytest.mark.parametrize("k", [torch.tensor([0, 10]), torch.tensor([[3]]), torch.zeros(2, 0, dtype=torch.long)])
def test_levels_that_are_levels_pass(k):
    assert NoiseSchedule(cosine(10)).check_k(k) is k


def test_expand_appends_the_axes_of_the_event():
    assert expand(torch.zeros(2, 3), torch.zeros(2, 3, 4, 5)).shape == (2, 3, 1, 1)
    assert expand(torch.zeros(3), torch.zeros(2, 3, 4)).shape == (3, 1)


def test_the_schedule_travels_with_the_weights():
    """The tables are saved, so a model knows its own curve."""
    saved = NoiseSchedule(sigmoid(10)).state_dict()
    other = NoiseSchedule(linear(10))
    other.load_state_dict(saved)
    k = torch.arange(11)
    assert torch.equal(other.alpha(k), NoiseSchedule(sigmoid(10)).alpha(k))
