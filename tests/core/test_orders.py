"""The faster orders of sampling give the numbers of the plain loop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import randomised, seeded

from diffusion_forcing import (
    RNN,
    DiffusionForcing,
    NoiseSchedule,
    Sampler,
    Transformer,
    autoregressive,
    cosine,
    full_sequence,
    pin,
    pyramid,
    sample,
    sampling,
    start,
    trapezoid,
)
from diffusion_forcing import orders as fast

pytestmark = pytest.mark.filterwarnings("ignore:token .* is given, but this model is causal")  # any matrix is sampled
K = 20
SCHEDULE = NoiseSchedule(cosine(K))
LADDER = SCHEDULE.ladder(5)
MODELS = {
    "rnn": DiffusionForcing(RNN(2, 1, hidden=12, levels=K), SCHEDULE),
    "deep rnn": DiffusionForcing(RNN(2, 1, hidden=12, layers=3, levels=K), SCHEDULE, parameterization="x0"),
    "transformer": DiffusionForcing(Transformer(2, 1, hidden=12, heads=2, layers=2, levels=K), SCHEDULE),
    "windowed transformer": DiffusionForcing(Transformer(2, 1, hidden=12, heads=2, layers=2, window=2, levels=K), SCHEDULE, clip=1.0),
}
for name in MODELS:
    randomised(MODELS[name])
FAST = {"rnn": fast.wavefront, "deep rnn": fast.wavefront, "transformer": fast.windowed, "windowed transformer": fast.windowed}
every_model = pytest.mark.parametrize("name", MODELS)

MATRICES = {
    "full_sequence": full_sequence(6, LADDER),
    "autoregressive": autoregressive(6, LADDER),
    "pyramid": pyramid(6, LADDER),
    "flat pyramid": pyramid(6, LADDER, 0.5),
    "steep pyramid": pyramid(6, LADDER, 3),
    "trapezoid": trapezoid(6, LADDER, 2),
    "one step": full_sequence(6, SCHEDULE.ladder(1)),
    "known start": pin(full_sequence(6, LADDER), [0, 1]),
    "known end": pin(pyramid(6, LADDER), -1),
    "both ends": pin(trapezoid(6, LADDER), [0, 5]),
    "absent": pin(pyramid(6, LADDER), [0, 3], K),
    "doubted": pin(pyramid(6, LADDER, 2), [0, 2], 7),
    "all kinds": pin(pin(pin(pyramid(6, LADDER), 0), 2, K), 3, 7),
    "all pinned": pin(full_sequence(6, LADDER), slice(None), 7),
    "right to left": pyramid(6, LADDER, 5).flip(1),
}


def inputs(name, tokens, b=3, with_state=True, with_cond=True):
    """White noise, and the model's denoiser bound to a past and a condition."""
    model = MODELS[name]
    x = torch.randn(b, tokens, 2, generator=seeded(0))
    cond = torch.randn(b, tokens, 1, generator=seeded(1)) if with_cond else torch.zeros(b, tokens, 1)
    past = torch.randn(b, 3, 2, generator=seeded(2))
    with torch.no_grad():
        state = model.absorb(past, torch.ones(b, 3, 1), level=torch.tensor([0, 3, 9])) if with_state else None
    return x, model.denoiser(cond, state)


def assert_same(name, matrix, *, eta=0.0, hold="keep", lift=0, solver="ddim", **options):
    """The fast order against the plain loop: tokens, and what is remembered of them above the level `lift`."""
    x, denoiser = inputs(name, matrix.shape[1], **options)
    sampler = Sampler(eta=eta, hold=hold, solver=solver).along(matrix)
    with torch.no_grad():
        quick = FAST[name](denoiser, x, matrix, sampler, seeded(3), lift)
        plain = sampling.follow(lambda x, k: denoiser(x, k), SCHEDULE, x, sampler, seeded(3), min_context_level=lift)
    torch.testing.assert_close(quick.x, plain.x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(quick.context, plain.context, rtol=1e-4, atol=1e-4)
    assert torch.equal(quick.level, plain.level)
    # The same through the front door, which chooses the order by itself.
    chosen = sample(denoiser, SCHEDULE, x, sampler, generator=seeded(3))
    torch.testing.assert_close(chosen, quick.x, rtol=0, atol=0)


@every_model
@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
@pytest.mark.parametrize(("eta", "hold"), [(0.0, "keep"), (0.5, "keep"), (1.0, "resample"), (0.0, "resample")])
def test_the_fast_order_is_the_plain_loop(name, matrix, eta, hold):
    assert_same(name, matrix, eta=eta, hold=hold)


@every_model
@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
def test_steps_that_look_back_do_so_in_any_order(name, matrix):
    assert_same(name, matrix, solver="adams_angle", lift=5)


@every_model
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("with_cond", [False, True])
@pytest.mark.parametrize("b", [1, 3])
def test_the_fast_order_is_the_plain_loop_with_and_without_a_past(name, with_state, with_cond, b):
    assert_same(name, pyramid(5, LADDER, 2), eta=1.0, with_state=with_state, with_cond=with_cond, b=b)


@every_model
@pytest.mark.parametrize("lift", [0, 1, 4, 5, 12, K])
@pytest.mark.parametrize("matrix", ["pyramid", "full_sequence", "all kinds"])
def test_the_fast_order_remembers_the_same_tokens(name, lift, matrix):
    assert_same(name, MATRICES[matrix], lift=lift)


@st.composite
def matrices(draw):
    """Any matrix a user may write down: integers in 0..K, each column falling; rows and columns may repeat or stand still."""
    rows, tokens = draw(st.integers(2, 8)), draw(st.integers(1, 6))
    level = st.one_of(st.integers(0, K), st.sampled_from([0, K]))
    columns = [sorted(draw(st.lists(level, min_size=rows, max_size=rows)), reverse=True) for _ in range(tokens)]
    return torch.tensor(columns).T


@every_model
@given(matrix=matrices(), eta=st.sampled_from([0.0, 0.5, 1.0]), hold=st.sampled_from(["keep", "resample"]), lift=st.integers(0, K))
@settings(derandomize=True, deadline=None, max_examples=80)
def test_any_matrix_in_any_order(name, matrix, eta, hold, lift):
    assert_same(name, matrix, eta=eta, hold=hold, lift=lift)


@every_model
@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_a_row_in_which_nothing_changes_draws_the_same_noise_in_both_orders(name, eta):
    """Held at 0 or K no token changes, so a seed gives the same sample whether or not the row is there."""
    matrix = torch.tensor([[0, K, K], [0, K, K], [0, 10, K], [0, 0, K], [0, 0, K], [0, 0, 5], [0, 0, 0]])
    assert_same(name, matrix, eta=eta, hold="resample")


@every_model
def test_the_fast_order_leaves_its_inputs_alone(name):
    x, denoiser = inputs(name, 6)
    kept, matrix = x.clone(), MATRICES["pyramid"].clone()
    sample(denoiser, SCHEDULE, x, matrix, eta=1.0, generator=seeded(0))
    assert torch.equal(x, kept)
    assert torch.equal(matrix, MATRICES["pyramid"])


@every_model
def test_a_denoiser_bound_to_b_sequences_serves_copies_of_each(name):
    x, denoiser = inputs(name, 6, b=2)
    many = torch.randn(6, 6, 2, generator=seeded(4))
    matrix = MATRICES["pyramid"]
    plain = sample(lambda x, k: denoiser(x, k), SCHEDULE, many, matrix)
    torch.testing.assert_close(sample(denoiser, SCHEDULE, many, matrix), plain, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain[:2], sample(denoiser, SCHEDULE, x, matrix), atol=1e-3)


def count(name, matrix, method):
    """How often a sampler calls a method of the backbone."""
    model = MODELS[name]
    x, denoiser = inputs(name, matrix.shape[1])
    calls = []
    plain = getattr(model.backbone, method)
    setattr(model.backbone, method, lambda *arguments: calls.append(arguments[0].shape) or plain(*arguments))
    try:
        sample(denoiser, SCHEDULE, x, matrix)
    finally:
        delattr(model.backbone, method)
    return calls


@given(steps=st.integers(1, 15), tokens=st.integers(1, 12))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_full_sequence_takes_m_plus_t_minus_1_waves(steps, tokens):
    matrix = full_sequence(tokens, SCHEDULE.ladder(steps))
    waves = fast._waves(fast.moves(matrix, "keep", K))
    assert len(waves) == steps + tokens - 1
    cells = sorted((row, token) for rows, columns in waves for row, token in zip(rows.tolist(), columns.tolist(), strict=True))
    assert cells == [(row, token) for row in range(steps) for token in range(tokens)], "each cell once"


@given(steps=st.integers(1, 15), tokens=st.integers(1, 12))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_autoregressive_computes_each_cell_that_moves_and_each_clean_token_once(steps, tokens):
    """No wave looks at tokens that still wait, and a finished token is read once more and never again."""
    waves = fast._waves(fast.moves(autoregressive(tokens, SCHEDULE.ladder(steps)), "keep", K))
    assert sum(len(rows) for rows, _ in waves) == tokens * steps + tokens - 1


@given(matrix=matrices(), hold=st.sampled_from(["keep", "resample"]))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_waves_respect_what_each_cell_needs(matrix, hold):
    """Every cell that moves is computed, in a wave after its token's last step, with no token twice in a wave."""
    moves = fast.moves(matrix, hold, K)
    done = {}
    for wave, (rows, tokens) in enumerate(fast._waves(moves)):
        assert len(set(tokens.tolist())) == len(tokens)
        for cell in zip(rows.tolist(), tokens.tolist(), strict=True):
            assert cell not in done
            done[cell] = wave
    assert {tuple(cell) for cell in moves.nonzero().tolist()} <= set(done)
    for (row, token), wave in done.items():
        assert all(wave > other for (r, i), other in done.items() if i == token and r < row)
        if (row, token - 1) in done:
            assert wave > done[row, token - 1]


def test_the_wavefront_calls_the_rnn_once_a_wave():
    assert len(count("rnn", MATRICES["full_sequence"], "step")) == 5 + 6 - 1
    assert not count("rnn", MATRICES["full_sequence"], "forward")


def test_the_window_covers_unfinished_tokens_only():
    """Token by token a causal transformer reads one token at a time: the past is in its cache, the future waits."""
    lengths = [shape[1] for shape in count("transformer", autoregressive(4, LADDER), "forward")]
    assert lengths == [1] * (4 * 5 + 3)


def test_a_model_that_sees_everything_takes_the_plain_loop():
    model = randomised(DiffusionForcing(Transformer(2, hidden=12, heads=2, layers=1, causal=False, levels=K), SCHEDULE))
    x = start(SCHEDULE, MATRICES["pyramid"], (2, 2), generator=seeded(0))
    denoiser = model.denoiser()
    ours = sample(denoiser, SCHEDULE, x, MATRICES["pyramid"])
    assert torch.equal(ours, sample(lambda x, k: denoiser(x, k), SCHEDULE, x, MATRICES["pyramid"]))


def test_a_token_moves_where_a_step_gives_it_a_new_value():
    matrix = torch.tensor([[K, K, 7, K, 0], [K, 7, 7, 7, 0], [K, 7, 0, 7, 0]])
    assert fast.moves(matrix, "keep", K).tolist() == [[False, True, False, True, False], [False, False, True, False, False]]
    resampled = [[False, True, False, True, False], [False, True, True, True, False]]  # the third began in between: an observation
    assert fast.moves(matrix, "resample", K).tolist() == resampled


def test_settled_counts_tokens_that_never_move_again():
    moves = fast.moves(autoregressive(3, SCHEDULE.ladder(2)), "keep", K)
    assert fast._settled(moves).tolist() == [0, 0, 1, 1, 2, 2]
    assert fast._settled(fast.moves(pin(full_sequence(3, SCHEDULE.ladder(2)), [0, 1]), "keep", K)).tolist() == [2, 2]
    assert fast._settled(fast.moves(pin(full_sequence(3, SCHEDULE.ladder(2)), 1), "keep", K)).tolist() == [0, 0]


@every_model
@pytest.mark.parametrize(
    ("cond", "words"), [(None, "conditions of 1 numbers"), ((3, 4, 1), "cond covers"), ((3, 8, 1), "cond covers"), ((3, 6, 2), "got 2")]
)
def test_the_fast_order_refuses_what_the_plain_loop_refuses(name, cond, words):
    x = torch.zeros(3, 6, 2)
    denoiser = MODELS[name].denoiser(None if cond is None else torch.zeros(cond))
    for denoise in (denoiser, lambda x, k: denoiser(x, k)):
        with pytest.raises(ValueError, match=words):
            sample(denoise, SCHEDULE, x, MATRICES["full_sequence"])
