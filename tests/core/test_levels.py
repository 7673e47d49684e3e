"""How training draws levels."""

import pytest
import torch
from oracles import seeded

from diffusion_forcing import independent, mixture, shared, staircase, teacher_forced
from diffusion_forcing.levels import DRAWS, by_name, noisy_context, noisy_prefix, sensor_dropout, shared_with_prefix

K = 10
MANY = (20_000, 5)


def assert_uniform(k, levels=K):
    """Each level 0..K equally often, within six standard deviations of a count."""
    count = torch.bincount(k.flatten(), minlength=levels + 1)
    assert len(count) == levels + 1
    share = 1 / (levels + 1)
    spread = (k.numel() * share * (1 - share)) ** 0.5
    assert (count - k.numel() * share).abs().max() < 6 * spread


def correlation(a, b):
    return torch.corrcoef(torch.stack([a.flatten().double(), b.flatten().double()]))[0, 1].item()


def test_independent_draws_every_level_whatever_the_neighbour_has():
    k, past = independent(MANY, K, seeded(0))
    assert past is None
    assert k.dtype == torch.int64
    assert k.shape == MANY
    for token in range(5):
        assert_uniform(k[:, token])
    assert abs(correlation(k[:, 1:], k[:, :-1])) < 0.02
    assert abs(correlation(k[1:], k[:-1])) < 0.02


def test_shared_gives_a_sequence_one_level():
    k, past = shared(MANY, K, seeded(0))
    assert past is None
    assert k.shape == MANY
    assert (k == k[:, :1]).all()
    assert_uniform(k[:, 0])


def test_teacher_forced_is_seen_as_clean():
    k, past = teacher_forced(MANY, K, seeded(0))
    assert torch.equal(past, torch.zeros_like(k))
    assert_uniform(k[:, 0])
    assert abs(correlation(k[:, 1:], k[:, :-1])) < 0.02


def test_a_staircase_rises_evenly_between_its_ends():
    levels = 1000
    k, past = staircase((5_000, 8), levels, seeded(0))
    assert past is None
    assert k.dtype == torch.int64
    assert k.min() >= 0
    assert k.max() <= levels
    rise = k.diff(dim=1)
    assert (rise >= 0).all()
    inside = (k > 0) & (k < levels)
    both = inside[:, :-2] & inside[:, 1:-1] & inside[:, 2:]
    assert both.sum() > 1000
    assert (rise[:, 1:] - rise[:, :-1])[both].abs().max() <= 1  # rounding


def test_staircases_are_flat_and_steep_and_some_token_moves():
    levels = 1000
    k, _ = staircase((5_000, 2), levels, seeded(0))
    rise = (k[:, 1] - k[:, 0]) / levels
    assert (rise < 0.02).float().mean() > 0.2
    assert (rise > 0.2).float().mean() > 0.05
    idle = ((k == 0) | (k == levels)).all(1)
    assert idle.float().mean() < 0.2
    assert ((k == 0).all(1) | (k == levels).all(1)).float().mean() < 0.01


def test_a_staircase_visits_every_level_at_every_token():
    k, _ = staircase((20_000, 4), K, seeded(0))
    for token in range(4):
        assert (torch.bincount(k[:, token], minlength=K + 1) > 0).all()


def test_one_token_is_a_staircase_too():
    k, _ = staircase((20_000, 1), 1000, seeded(0))
    assert abs(k.double().mean() - 500) < 20
    assert k.min() < 10
    assert k.max() > 990


def test_a_continued_sequence_has_a_low_past_and_then_anything():
    """The past ends anywhere, so of token i of t a share i / (t-1) is free; what is free is uniform."""
    levels, t = 1000, 6
    k, past = noisy_prefix((20_000, t), levels, seeded(0))
    assert past is None
    assert k.shape == (20_000, t)
    assert k.dtype == torch.int64
    assert k.min() == 0
    assert k.max() == levels
    assert k[:, 0].max() <= 0.4 * levels
    assert_uniform(k[:, -1], levels)
    for token in range(t):
        assert (k[:, token] > 0.4 * levels).float().mean().item() == pytest.approx(0.6 * token / (t - 1), abs=0.02)


def test_what_is_free_stays_free_to_the_end():
    """After a token above what a past can have, all are uniform, whatever it was."""
    k, _ = noisy_prefix((20_000, 5), 1000, seeded(0))
    free = k[:, 2] > 400
    assert_uniform(k[free][:, 3:], 1000)
    assert abs(correlation(k[free][:, 3], k[free][:, 4])) < 0.03


def test_half_of_the_pasts_are_clean_and_the_others_doubted_token_by_token():
    levels = 1000
    k, _ = noisy_prefix((20_000, 2), levels, seeded(0))  # of two tokens the first is past
    clean = k[:, 0] == 0
    assert clean.float().mean().item() == pytest.approx(0.5, abs=0.03)
    doubted = k[~clean][:, 0].double() / levels
    assert doubted.mean().item() == pytest.approx(0.1, abs=0.01)  # a doubt up to 0.4, of which a share: a quarter of it
    k, _ = noisy_prefix((20_000, 5), levels, seeded(0))
    low = (k[:, :3] <= 0.4 * levels).all(1)
    whole = (k[:, :2] == 0).all(1)
    assert ((k[low & ~whole][:, 0] != k[low & ~whole][:, 1]).float().mean()) > 0.9


@pytest.mark.parametrize("most", [0.0, 0.1, 1.0])
def test_the_doubt_about_a_past_is_bounded_as_asked(most):
    k, _ = noisy_prefix((5_000, 2), 1000, seeded(0), most=most)
    assert k[:, 0].max() <= 1000 * most
    assert k[:, 0].max() >= 900 * most


@pytest.mark.parametrize("t", [1, 2])
def test_short_sequences_are_continued_too(t):
    k, _ = noisy_prefix((500, t), K, seeded(0))
    assert k.shape == (500, t)
    assert k.min() >= 0
    assert k.max() <= K


def test_a_mixture_follows_one_draw_a_sequence():
    k, past = mixture(independent, shared)((20_000, 5), 100, seeded(0))
    assert past is None
    flat = (k == k[:, :1]).all(1)
    assert abs(flat.float().mean() - 0.5) < 0.03
    assert_uniform(k[flat][:, 0], 100)
    assert_uniform(k[~flat], 100)


def test_a_mixture_of_three_takes_each_as_often():
    zero, one, two = (lambda shape, levels, generator=None, v=v: independent(shape, 0)._replace(k=torch.full(shape, v)) for v in range(3))
    k, _ = mixture(zero, one, two)((30_000, 2), K, seeded(0))
    assert (k[:, 0] == k[:, 1]).all()
    assert_uniform(k[:, 0], 2)


def test_a_mixture_with_teacher_forcing_says_how_each_past_is_seen():
    k, past = mixture(independent, teacher_forced)(MANY, K, seeded(0))
    clean, own = (past == 0).all(1), (past == k).all(1)
    assert (clean | own).all()
    assert abs(clean.float().mean() - 0.5) < 0.03


def test_a_remembered_past_is_clean_a_little_noisy_or_doubted_here_and_there():
    levels = 1000
    k, past = noisy_context((30_000, 6), levels, seeded(0))
    assert_uniform(k, levels)
    assert abs(correlation(k, past)) < 0.02
    high = past > 0.4 * levels
    clean = (past == 0).all(1).float().mean().item()
    assert clean == pytest.approx(1 / 3 + 1 / 3 / 7, abs=0.02)  # and where a share drawn from 0 to 1 doubts none of six: one in seven
    assert high.float().mean().item() == pytest.approx(1 / 3 / 2 * 0.6, abs=0.01)  # half of a third is doubted, at any level
    assert past[high].float().mean().item() == pytest.approx(0.7 * levels, rel=0.01)
    noisy = ((past > 0) & ~high).all(1)  # with a little noise everywhere, and a few that are doubted a little everywhere
    assert noisy.float().mean().item() == pytest.approx(1 / 3, abs=0.03)


def test_an_extended_sequence_has_a_clean_past_and_then_one_level():
    t, levels = 5, 1000
    k, past = shared_with_prefix((20_000, t), levels, seeded(0))
    assert past is None
    ends = (k == k[:, -1:]).int().argmax(1)  # the first token at the level of the last
    assert all(not row[:end].any() and (row[end:] == row[-1]).all() for row, end in zip(k[:500], ends[:500], strict=True))
    noisy = ends[k[:, -1] > 0]
    assert (torch.bincount(noisy, minlength=t)[1:] / len(noisy) - 1 / (t - 1)).abs().max() < 0.02
    assert k[:, -1].float().mean() == pytest.approx(levels / 2, rel=0.02)
    assert_uniform(shared_with_prefix((5000, 1), K, seeded(0)).k, K)  # one token has no past, and is there to be learned


@pytest.mark.parametrize("name", [*DRAWS, "independent+staircase", "shared + teacher_forced"])
def test_a_draw_is_a_function_of_its_generator(name):
    draw = by_name(name)
    before = torch.get_rng_state()
    first, again, other = (draw((64, 6), 1000, seeded(seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before), "the global generator was used"
    assert torch.equal(first.k, again.k)
    assert not torch.equal(first.k, other.k)
    assert first.k.shape == (64, 6)
    assert (first.past is None) == (again.past is None)
    if first.past is not None:
        assert torch.equal(first.past, again.past)


def test_names_join_with_a_plus():
    assert by_name("shared") is shared
    joined = by_name("independent+shared")((100, 4), K, seeded(3))
    assert torch.equal(joined.k, mixture(independent, shared)((100, 4), K, seeded(3)).k)


@pytest.mark.parametrize("name", ["pyramid", "independent+pyramid", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match="independent, shared, teacher_forced, staircase"):
        by_name(name)


def test_lapses_are_stretches_of_what_is_seen_and_never_of_what_was_done():
    levels, period, moments = 100, 3, 40
    k = sensor_dropout((4000, moments * period), levels, period, seeded(0)).view(-1, moments, period)
    assert (k[:, :, -1] == 0).all()
    lapsed = k > 0
    parts = lapsed.any(1)  # which parts of a sequence have any
    assert ((lapsed == parts[:, None]) | ~lapsed.any(2, keepdim=True)).all()  # those of a sequence lapse together
    whole = lapsed.any(2)
    assert 0.3 < whole.float().mean() < 0.6
    # Stretches, not single moments: where one is, the next one is too more often than it is anywhere.
    assert whole[:, 1:][whole[:, :-1]].float().mean() > 0.7
    highest = k.amax((1, 2))
    assert ((k == 0) | (k == highest[:, None, None])).all()  # one level a sequence
    assert 0.4 < (highest[whole.any(1)] == levels).float().mean() < 0.6


def test_a_remembered_past_lapses_where_moments_have_parts():
    levels = 100
    k, past = by_name("noisy_context", 3)((3000, 30), levels, seeded(0))
    plain = by_name("noisy_context")((3000, 30), levels, seeded(0))
    assert torch.equal(k, plain.k)  # only some of the doubted pasts differ
    differs = (past != plain.past).any(1)
    assert 0.12 < differs.float().mean() < 0.2
    assert (past[differs].view(-1, 10, 3)[:, :, -1] == 0).all()


@pytest.mark.parametrize("t", [1, 2, 3, 7])
def test_lapses_fit_windows_that_end_within_a_moment(t):
    assert sensor_dropout((5, t), 10, 3, seeded(0)).shape == (5, t)
