"""Sequences cut into windows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import seeded

from diffusion_forcing.windows import Windows


def numbered(*lengths):
    """Sequences whose tokens say who they are: (sequence, position from 1)."""
    return [torch.tensor([[float(i), p + 1.0] for p in range(n)]) for i, n in enumerate(lengths)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(1, 14), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 1000))
def test_windows_stay_within_their_sequence(lengths, length, crop, seed):
    """Each window is a run of one sequence from where it says; beyond its end there are zeros, masked out."""
    windows = Windows(numbered(*lengths), length, crop=crop)
    drawn = windows.draw(16, seeded(seed))
    x, cond, mask = windows.read(drawn)
    assert x.shape == (16, length, 2)
    assert cond.shape == (16, length, 0)
    for (which, first), tokens, real in zip(drawn.tolist(), x, mask, strict=True):
        count = min(length, lengths[which] - first)
        assert count >= 1
        assert real.tolist() == [True] * count + [False] * (length - count)
        assert tokens[:count].tolist() == [[which, first + 1 + p] for p in range(count)]
        assert not tokens[count:].any()


def test_without_crop_windows_are_whole_wherever_the_sequence_is_long_enough():
    windows = Windows(numbered(9, 3), 4)
    drawn = windows.draw(500, seeded(0))
    firsts = {which: set(drawn[drawn[:, 0] == which, 1].tolist()) for which in (0, 1)}
    assert firsts == {0: set(range(6)), 1: {0}}


def test_with_crop_windows_start_at_any_token():
    drawn = Windows(numbered(9, 3), 4, crop=1.0).draw(500, seeded(0))
    assert set(drawn[drawn[:, 0] == 0, 1].tolist()) == set(range(9))
    assert set(drawn[drawn[:, 0] == 1, 1].tolist()) == set(range(3))


def test_crop_is_a_share_of_the_windows():
    firsts = Windows(numbered(4), 4, crop=0.5).draw(4000, seeded(0))[:, 1]
    assert (firsts > 0).float().mean().item() == pytest.approx(0.5 * 3 / 4, abs=0.03)


def test_the_same_generator_draws_the_same_windows():
    windows = Windows(numbered(9, 3, 20), 4, crop=0.5)
    assert torch.equal(windows.draw(32, seeded(3)), windows.draw(32, seeded(3)))
    assert not torch.equal(windows.draw(32, seeded(3)), windows.draw(32, seeded(4)))


def test_drawing_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    windows = Windows(numbered(9, 3), 4)
    windows.read(windows.draw(8, seeded(0)))
    assert torch.equal(before, torch.get_rng_state())


def test_sequences_of_one_token():
    windows = Windows(numbered(1, 1, 1), 3)
    x, _, mask = windows.read(windows.all())
    assert x[:, 0].tolist() == [[0, 1], [1, 1], [2, 1]]
    assert mask.sum(1).tolist() == [1, 1, 1]
    assert Windows(numbered(5), 1).read(torch.tensor([[0, 4]])).x.tolist() == [[[0, 5]]]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(1, 14))
def test_all_covers_every_token_once_in_order(lengths, length):
    windows = Windows(numbered(*lengths), length, crop=0.5)
    x, _, mask = windows.read(windows.all())
    assert len(windows) == len(lengths)
    assert torch.equal(x[mask], torch.cat(numbered(*lengths)))


def test_one_array_is_as_good_as_a_list():
    array = np.random.default_rng(0).normal(size=(3, 5, 2)).astype(np.float32)
    one, other = Windows(array, 4), Windows([torch.from_numpy(s) for s in array], 4)
    assert torch.equal(one.read(one.all()).x, other.read(other.all()).x)
    assert one.event == (2,)


def test_tokens_may_be_pictures():
    windows = Windows(torch.randn(2, 5, 3, 4, 4, generator=seeded(0)), 8)
    x, _, mask = windows.read(windows.all())
    assert windows.event == (3, 4, 4)
    assert x.shape == (2, 8, 3, 4, 4)
    assert not x[:, 5:].any()
    assert mask.sum().item() == 10


def test_conditions_travel_with_their_tokens():
    tokens = numbered(9, 3)
    windows = Windows(tokens, 4, conditions=[10 * s[:, :1] + s[:, 1:] for s in tokens], crop=1.0)
    x, cond, mask = windows.read(windows.draw(64, seeded(0)))
    assert windows.cond_width == 1
    assert torch.equal(cond, (10 * x[..., :1] + x[..., 1:]) * mask[..., None])
    assert cond.any()


def test_reading_does_not_hand_out_the_data_themselves():
    windows = Windows(numbered(5), 5)
    windows.read(windows.all()).x.zero_()
    assert windows.read(windows.all()).x[0, 0].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "no sequences .* empty"),
        (torch.zeros(0, 5, 2), "no sequences .* empty"),
        ([torch.zeros(3, 2), torch.zeros(0, 2)], "sequence 1 is empty; drop it"),
        ([torch.zeros(3, 2), torch.zeros(3, 4)], r"one shape; got \[\(2,\), \(4,\)\]"),
        (torch.zeros(3, 5), r"scalar series add a last axis: x\[\.\.\., None\]"),
        (torch.zeros(3), "scalar series add a last axis"),
    ],
)
def test_data_that_are_not_sequences_are_refused(sequences, message):
    with pytest.raises(ValueError, match=message):
        Windows(sequences, 4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_bad_values_are_named_with_their_place(bad):
    sequences = numbered(5, 5)
    sequences[1][3, 0] = bad
    with pytest.raises(ValueError, match=r"sequence 1 holds NaN or infinite values, the first at \(3, 0\)"):
        Windows(sequences, 4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_bad_conditions_are_named_with_their_place(bad):
    conditions = [torch.zeros(5, 2), torch.zeros(5, 2)]
    conditions[1][3, 0] = bad
    with pytest.raises(ValueError, match="condition of sequence 1 holds NaN or infinite values, the first of token 3; fill them"):
        Windows(numbered(5, 5), 4, conditions=conditions)


@pytest.mark.parametrize("length", [0, -1])
def test_a_window_holds_a_token_at_least(length):
    with pytest.raises(ValueError, match="at least one token"):
        Windows(numbered(5), length)


@pytest.mark.parametrize("crop", [-0.1, 1.5, float("nan")])
def test_crop_is_a_share(crop):
    with pytest.raises(ValueError, match="crop"):
        Windows(numbered(5), 4, crop=crop)


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ([torch.zeros(5, 1)], "one row a token"),
        ([torch.zeros(5, 1), torch.zeros(2, 1)], "one row a token"),
        (torch.zeros(3, 5, 1), "one row a token"),
        ([torch.zeros(5), torch.zeros(3)], "condition"),
        ([torch.zeros(5, 1), torch.zeros(3, 2)], "condition"),
        ([torch.zeros(5, 1), torch.full((3, 1), float("nan"))], "NaN"),
    ],
    ids=["too few", "too short", "too many", "scalar", "mixed widths", "nan"],
)
def test_conditions_must_fit_their_sequences(conditions, message):
    with pytest.raises(ValueError, match=message):
        Windows(numbered(5, 3), 4, conditions=conditions)
