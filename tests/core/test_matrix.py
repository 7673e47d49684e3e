"""Invariants of schedule matrices, for all sizes."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from diffusion_forcing import (
    NoiseSchedule,
    autoregressive,
    check_matrix,
    full_sequence,
    linear,
    pin,
    pyramid,
    staggered,
    start_at,
    trapezoid,
)

K = 100
LADDERS = NoiseSchedule(linear(K))
every_size = settings(derandomize=True, deadline=None, max_examples=150)
horizons = st.integers(1, 20)
ladders = st.integers(1, 30).map(LADDERS.ladder)
slopes = st.one_of(st.integers(0, 40), st.floats(0, 40))
BUILDERS = {
    "full_sequence": lambda horizon, ladder, slope: full_sequence(horizon, ladder),
    "autoregressive": lambda horizon, ladder, slope: autoregressive(horizon, ladder),
    "pyramid": pyramid,
    "trapezoid": trapezoid,
    "staggered": lambda horizon, ladder, slope: staggered(torch.arange(horizon).flip(0) * slope, ladder),
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
@given(horizon=horizons, ladder=ladders, slope=slopes)
@every_size
def test_every_matrix_goes_from_noise_to_clean_and_never_back(build, horizon, ladder, slope):
    matrix = build(horizon, ladder, slope)
    assert matrix.dtype == torch.int64
    assert matrix.shape[1] == horizon
    assert (matrix.diff(dim=0) <= 0).all()
    assert (matrix[0] == K).all()
    assert (matrix[-1] == 0).all()
    assert set(matrix.unique().tolist()) == set(ladder.tolist())
    assert check_matrix(matrix, K) is matrix


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
@given(horizon=horizons, ladder=ladders, slope=slopes)
@every_size
def test_every_token_takes_one_rung_a_row_once_it_moves(build, horizon, ladder, slope):
    rung = torch.searchsorted(ladder, build(horizon, ladder, slope))
    falls = -rung.diff(dim=0)
    assert ((falls == 0) | (falls == 1)).all()
    # Held only at the two ends of the ladder, and no row in which nothing happens once the last one is reached.
    assert ((rung[:-1] == 0) | (rung[:-1] == len(ladder) - 1))[falls == 0].all()
    assert falls[-1].any()


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
@given(horizon=horizons, ladder=ladders, slope=slopes, data=st.data())
@every_size
def test_a_pinned_token_stays_at_its_level(build, horizon, ladder, slope, data):
    matrix = build(horizon, ladder, slope)
    before = matrix.clone()
    tokens = sorted(data.draw(st.sets(st.integers(0, horizon - 1), min_size=1)))
    level = data.draw(st.integers(0, K))
    pinned = pin(matrix, tokens, level)
    assert torch.equal(matrix, before), "pin wrote on its argument"
    assert (pinned[:, tokens] == level).all()
    others = [i for i in range(horizon) if i not in tokens]
    assert torch.equal(pinned[:, others], matrix[:, others])
    assert set(pinned[0].tolist()) <= {K, level}
    assert set(pinned[-1].tolist()) <= {0, level}
    check_matrix(pinned, K)


@given(horizon=horizons, ladder=ladders)
@every_size
def test_a_pyramid_of_slope_0_is_full_sequence(horizon, ladder):
    assert torch.equal(pyramid(horizon, ladder, 0), full_sequence(horizon, ladder))
    assert torch.equal(trapezoid(horizon, ladder, 0), full_sequence(horizon, ladder))
    assert full_sequence(horizon, ladder).shape == (len(ladder), horizon)
    assert (full_sequence(horizon, ladder) == ladder.flip(0)[:, None]).all()


@given(horizon=horizons, ladder=ladders)
@every_size
def test_a_pyramid_of_slope_steps_is_autoregressive(horizon, ladder):
    steps = len(ladder) - 1
    matrix = autoregressive(horizon, ladder)
    assert torch.equal(pyramid(horizon, ladder, steps), matrix)
    assert matrix.shape == (horizon * steps + 1, horizon)
    # One token at a time: before it all is clean, after it all is noise.
    for row in matrix:
        assert ((row > 0) & (row < K)).sum() <= 1
        assert (row.diff() >= 0).all()


@given(horizon=horizons, ladder=ladders, slope=slopes)
@every_size
def test_the_far_future_of_a_pyramid_is_vaguer(horizon, ladder, slope):
    assert (pyramid(horizon, ladder, slope).diff(dim=1) >= 0).all()


@given(horizon=horizons, ladder=ladders, slope=slopes)
@every_size
def test_a_trapezoid_is_symmetric_and_vague_in_the_middle(horizon, ladder, slope):
    matrix = trapezoid(horizon, ladder, slope)
    assert torch.equal(matrix, matrix.flip(1))
    half = (horizon + 1) // 2
    assert (matrix[:, :half].diff(dim=1) >= 0).all()
    assert torch.equal(matrix[:, :half], pyramid(half, ladder, slope))


def test_a_pyramid_by_hand():
    expected = [[4, 4, 4], [2, 4, 4], [0, 2, 4], [0, 0, 2], [0, 0, 0]]
    assert pyramid(3, torch.tensor([0, 2, 4])).tolist() == expected
    half = [[4, 4, 4], [2, 2, 4], [0, 0, 2], [0, 0, 0]]  # delays 0, 0.4, 0.8 round to 0, 0, 1
    assert pyramid(3, torch.tensor([0, 2, 4]), 0.4).tolist() == half


def test_a_trapezoid_by_hand():
    expected = [[4, 4, 4, 4], [2, 4, 4, 2], [0, 2, 2, 0], [0, 0, 0, 0]]
    assert trapezoid(4, torch.tensor([0, 2, 4])).tolist() == expected


@pytest.mark.parametrize("tokens", [1, -2, slice(1, 2), [1], torch.tensor([1]), torch.tensor([False, True, False])], ids=str)
def test_pin_takes_any_way_to_name_tokens(tokens):
    matrix = full_sequence(3, torch.tensor([0, 2, 4]))
    assert pin(matrix, tokens, 4).tolist() == [[4, 4, 4], [2, 4, 2], [0, 4, 0]]


def test_pins_add_up():
    matrix = pin(pin(full_sequence(3, torch.tensor([0, 4])), 0), -1, level=2)
    assert matrix.tolist() == [[0, 4, 2], [0, 0, 2]]


def test_all_sequences_of_a_matrix_are_pinned_alike():
    each = start_at(full_sequence(3, torch.tensor([0, 2, 4])), torch.tensor([[4, 4, 4], [4, 2, 4]]))
    pinned = pin(each, 0, 1)
    assert (pinned[:, :, 0] == 1).all()
    assert torch.equal(pinned[:, :, 1:], each[:, :, 1:])


def test_a_pinned_token_does_not_begin_elsewhere():
    matrix = full_sequence(3, torch.tensor([0, 2, 4]))
    assert torch.equal(start_at(pin(matrix, 0), torch.tensor([0, 4, 4])), pin(matrix, 0))
    for level, wanted in ((2, 2), (2, 4), (0, 4)):
        with pytest.raises(ValueError, match=f"all begin at its top, 4, but token 1 begins at {level}.*levels"):
            start_at(pin(matrix, 1, level), torch.tensor([4, wanted, 4]))


@pytest.mark.parametrize("tokens", [3, -4, [0, 7]])
def test_a_token_that_is_not_there_cannot_be_pinned(tokens):
    with pytest.raises(ValueError, match=r"the matrix has 3 tokens, 0\.\.2"):
        pin(full_sequence(3, torch.tensor([0, 4])), tokens)


def test_a_token_cannot_be_pinned_below_clean():
    with pytest.raises(ValueError, match="level >= 0; got -1"):
        pin(full_sequence(3, torch.tensor([0, 4])), 0, -1)


@given(data=st.data(), rows=st.integers(2, 8), tokens=st.integers(1, 6))
@every_size
def test_any_falling_integers_are_a_matrix_and_no_others(data, rows, tokens):
    values = data.draw(st.lists(st.integers(0, K), min_size=rows * tokens, max_size=rows * tokens))
    matrix = torch.tensor(values).view(rows, tokens)
    falling = matrix.sort(dim=0, descending=True).values
    assert torch.equal(check_matrix(falling, K), falling)
    assume(not torch.equal(falling, matrix))
    with pytest.raises(ValueError, match="rises"):
        check_matrix(matrix, K)


def test_a_rise_is_named_by_its_place():
    with pytest.raises(ValueError, match="token 1 rises from level 3 to 5 between rows 1 and 2"):
        check_matrix(torch.tensor([[9, 9], [4, 3], [0, 5]]), 9)


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        (torch.tensor([[11, 5], [0, 0]]), r"0\.\.10; got 0\.\.11"),
        (torch.tensor([[10, 5], [-1, 0]]), r"0\.\.10; got -1\.\.10"),
        (torch.tensor([[10.0, 5.0], [0.0, 0.0]]), "integer levels; got torch.float32"),
        (torch.tensor([[True], [False]]), "integer levels; got torch.bool"),
        (torch.tensor([10, 5, 0]), r"2-d tensor.*\(3,\)"),
        (torch.zeros(1, 2, 3, 4, dtype=torch.long), r"2-d tensor.*\(1, 2, 3, 4\)"),
        (torch.tensor([[[5], [0]], [[5], [6]]]), r"token 0 rises from level 5 to 6 between rows 0 and 1"),
        ([[10], [0]], "2-d tensor.*list"),
        (torch.tensor([[10, 5]]), r"two rows.*\(1, 2\)"),
        (torch.zeros(3, 0, dtype=torch.long), r"one token.*\(3, 0\)"),
        (torch.zeros(0, 3, dtype=torch.long), r"two rows.*\(0, 3\)"),
    ],
    ids=str,
)
def test_what_is_no_matrix_is_refused(matrix, words):
    with pytest.raises(ValueError, match=words):
        check_matrix(matrix, 10)


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
@pytest.mark.parametrize("ladder", [[0], [1, 4], [0, 4, 2], [0, 0, 4], [[0, 4]]], ids=str)
def test_what_is_no_ladder_is_refused(build, ladder):
    with pytest.raises(ValueError, match="ascending levels from 0 to K"):
        build(3, torch.tensor(ladder), 1)


@pytest.mark.parametrize("name", ["full_sequence", "autoregressive", "pyramid", "trapezoid"])
@pytest.mark.parametrize("horizon", [0, -1])
def test_no_tokens_make_no_matrix(name, horizon):
    with pytest.raises(ValueError, match=f"at least one token; got horizon={horizon}"):
        BUILDERS[name](horizon, torch.tensor([0, 4]), 1)


@pytest.mark.parametrize("build", [pyramid, trapezoid])
@pytest.mark.parametrize("slope", [-0.1, float("inf"), float("nan")])
def test_a_slope_is_finite_and_not_negative(build, slope):
    with pytest.raises(ValueError, match="slope"):
        build(3, torch.tensor([0, 4]), slope)
