"""Conditions: those that may be absent, and those that are refused."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import randomised, seeded

from diffusion_forcing import (
    RNN,
    Context,
    DiffusionForcing,
    NoiseSchedule,
    Preconditioning,
    Sampler,
    Transformer,
    WienerSmoother,
    autoregressive,
    classifier_free,
    cosine,
    elbo,
    full_sequence,
    history_guidance,
    mask_cond,
    pyramid,
    rolling,
    rollout,
    sample,
    sampling,
)
from diffusion_forcing.backbones import ConvRNN, SpaceTime

K = 20
SCHEDULE = NoiseSchedule(cosine(K))
LADDER = SCHEDULE.ladder(5)
VECTORS = {
    "rnn": lambda cond: RNN(2, cond, hidden=12, layers=2, levels=K),
    "transformer": lambda cond: Transformer(2, cond, hidden=12, heads=2, layers=2, levels=K),
    "windowed": lambda cond: Transformer(2, cond, hidden=12, heads=2, layers=2, window=2, levels=K),
    "bidirectional": lambda cond: Transformer(2, cond, hidden=12, heads=2, layers=2, causal=False, levels=K),
}
GRIDS = {
    "space_time": lambda cond: SpaceTime((2, 2, 2), cond, hidden=8, layers=2, heads=2, window=3, levels=K),
    "conv_rnn": lambda cond: ConvRNN((2, 2, 2), cond, latent=4, channels=4, scales=(1, 2), blocks=1, levels=K),
}
every_kind = pytest.mark.parametrize("kind", [*VECTORS, *GRIDS])
every_causal = pytest.mark.parametrize("kind", [name for name in (*VECTORS, *GRIDS) if name != "bidirectional"])


def model(kind="rnn", cond=1, optional=True):
    backbone = {**VECTORS, **GRIDS}[kind](cond + optional)
    return randomised(DiffusionForcing(backbone, SCHEDULE, optional_cond=optional), scale=0.3)


def tokens(kind, b=3, t=5, seed=0):
    return torch.randn(b, t, *((2, 2, 2) if kind in GRIDS else (2,)), generator=seeded(seed))


def numbers(b=3, t=5, seed=1):
    return torch.randn(b, t, 1, generator=seeded(seed))


def some(b=3, t=5):
    """A condition that some tokens of each sequence have, and one sequence none of."""
    mask = torch.rand(b, t, generator=seeded(2)) < 0.5
    mask[0] = False
    return mask_cond(numbers(b, t), mask)


CONDITIONS = {"none": lambda: None, "all": numbers, "some": some}
every_condition = pytest.mark.parametrize("cond", CONDITIONS.values(), ids=CONDITIONS)


# None is none, and not zero.


def test_a_condition_of_zero_is_told_from_none():
    """Data near c in {-1, 0, 1}: at c = 0 samples spread as the data do, without a condition as their mixture does."""
    schedule = NoiseSchedule(cosine(50))
    torch.manual_seed(0)
    net = DiffusionForcing(RNN(1, cond=2, hidden=32, blocks=1, levels=50), schedule, optional_cond=True)
    optimizer, generator = torch.optim.AdamW(net.parameters(), lr=3e-3), seeded(1)
    steps = 400
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / steps)
        cond = torch.randint(-1, 2, (256, 1, 1), generator=generator).float()
        x = cond + 0.1 * torch.randn(256, 1, 1, generator=generator)
        kept = torch.rand(256, generator=generator) > 0.3
        net(x, torch.randint(0, 51, (256, 1), generator=generator), mask_cond(cond, kept)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def spread(cond):
        return float(sample(net.denoiser(cond), schedule, torch.randn(1000, 1, 1, generator=seeded(2)), Sampler(50)).std())

    assert spread(torch.zeros(1000, 1, 1)) == pytest.approx(0.1, rel=0.25)
    assert spread(torch.ones(1000, 1, 1)) == pytest.approx(0.1, rel=0.25)
    assert spread(None) == pytest.approx((2 / 3 + 0.01) ** 0.5, rel=0.1)
    # Guidance goes from the mixture to the condition, and at scale 1 it is the condition.
    noise, cond = torch.randn(1000, 1, 1, generator=seeded(2)), torch.zeros(1000, 1, 1)
    plain, guided, ignored = (
        sample(d, schedule, noise, Sampler(50)) for d in (net.denoiser(cond), *(classifier_free(net, cond, s) for s in (1.0, 0.0)))
    )
    assert torch.equal(plain, guided)
    assert torch.equal(ignored, sample(lambda x, k: net.predict(x, k), schedule, noise, Sampler(50)))


@every_kind
def test_none_is_not_zero_and_is_whatever_is_not_given(kind):
    net, x, k = model(kind), tokens(kind), torch.full((3, 5), 9)
    none = net.predict(x, k).x0
    assert not torch.allclose(none, net.predict(x, k, torch.zeros(3, 5, 1)).x0, atol=1e-3)
    unknown = torch.full((3, 5, 1), torch.nan)
    for given_to in (torch.zeros(3, dtype=torch.bool), torch.zeros(3, 5, dtype=torch.bool)):
        assert torch.equal(none, net.predict(x, k, mask_cond(unknown, given_to)).x0)
    assert torch.equal(none, net.predict(x, k, torch.zeros(3, 5, 0)).x0)
    whole = mask_cond(numbers(), torch.ones(3, dtype=torch.bool))
    assert torch.equal(net.predict(x, k, numbers()).x0, net.predict(x, k, whole).x0)


@every_kind
def test_sequences_with_and_without_a_condition_share_a_batch(kind):
    net, x, k = model(kind), tokens(kind), torch.full((3, 5), 9)
    mixed = net.predict(x, k, mask_cond(numbers(), torch.tensor([True, False, True]))).x0
    torch.testing.assert_close(mixed[1], net.predict(x, k).x0[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mixed[::2], net.predict(x, k, numbers()).x0[::2], rtol=1e-4, atol=1e-5)


def test_mask_cond_keeps_what_is_given_and_marks_it():
    cond = mask_cond(torch.tensor([[[1.0, 2.0], [torch.nan, 3.0]]]), torch.tensor([[True, False]]))
    assert cond.tolist() == [[[1.0, 2.0, 1.0], [0.0, 0.0, 0.0]]]


@pytest.mark.parametrize("kind", VECTORS)
def test_a_model_with_optional_conditions_keeps_its_features_of_tokens(kind):
    """Features of a smoother are appended to conditions: both are there, and messages name the user's width."""
    causal = kind != "bidirectional"
    smoother = None if causal else WienerSmoother.fit(tokens(kind, 50, 6), [0], octaves=1)
    width = 0 if smoother is None else smoother.width
    net = DiffusionForcing(VECTORS[kind](2 + 1 + width), SCHEDULE, preconditioning=Preconditioning(smoother=smoother), optional_cond=True)
    assert net.cond_width == 2
    randomised(net)
    x, k = tokens(kind), torch.full((3, 5), 9)
    assert net.predict(x, k, torch.zeros(3, 5, 2)).x0.shape == x.shape
    assert net.predict(x, k).x0.shape == x.shape
    with pytest.raises(ValueError, match=r"conditions of 2 numbers a token, or what mask_cond.* makes of them; got 4"):
        net.predict(x, k, torch.zeros(3, 5, 4))


# The same numbers in every order.


@every_condition
@pytest.mark.parametrize("build", [full_sequence, pyramid, autoregressive])
@every_kind
def test_every_order_gives_the_same_numbers(kind, build, cond):
    net, x, cond, matrix = model(kind), tokens(kind), cond(), build(5, LADDER)
    state = net.absorb(tokens(kind, t=2, seed=3), mask_cond(numbers(t=2), torch.tensor([True, False, True])))
    denoise = net.denoiser(cond, state)
    quick = sample(denoise, SCHEDULE, x, matrix)
    with torch.no_grad():
        plain = sampling.follow(lambda x, k: net.predict(x, k, cond, state), SCHEDULE, x, Sampler().along(matrix)).x
    torch.testing.assert_close(quick, plain, rtol=1e-4, atol=1e-4)


@every_condition
@pytest.mark.parametrize("memory", [None, 3])
@every_kind
def test_roll_outs_are_windows_after_a_state(kind, memory, cond):
    """Window after window by hand: conditions of the context, of windows and of what is remembered are those of their tokens."""
    net, context, cond = model(kind), tokens(kind, t=2), cond()
    matrix, event = pyramid(2, LADDER, 2), context.shape[2:]
    rolled = rollout(net, matrix, 3, context, cond, past=Context(memory=memory), generator=seeded(7))
    past, generator = context, seeded(7)
    for width in (2, 1):
        known, b = past.shape[1], len(past)
        first = 0 if memory is None else max(0, known - memory)
        cut = [None if cond is None else cond[:, a:b] for a, b in ((first, known), (known, known + width))]
        noise = torch.randn(b, width, *event, generator=generator)
        state = net.absorb(past[:, first:], cut[0])
        past = torch.cat([past, sample(net.denoiser(cut[1], state), SCHEDULE, noise, matrix[:, :width])], dim=1)
    torch.testing.assert_close(rolled, past[:, 2:], rtol=1e-4, atol=1e-4)


@every_kind
def test_a_memory_holds_tokens_with_and_without_a_condition(kind):
    net, x, cond = model(kind), tokens(kind), numbers()
    memory = sampling.Memory(net, Context(memory=4))
    memory.add(x[:, :3])
    memory.add(x[:, 3:], 0, cond[:, 3:])
    by_hand = net.absorb(x[:, 1:], mask_cond(cond, torch.arange(5).expand(3, 5) > 2)[:, 1:])
    now, k = tokens(kind, t=1, seed=4), torch.full((3, 1), 9)
    torch.testing.assert_close(net.predict(now, k, None, memory.state).x0, net.predict(now, k, None, by_hand).x0, rtol=1e-4, atol=1e-5)


@every_condition
@every_causal
def test_a_rolling_window_of_one_token_is_a_roll_out(kind, cond):
    net, context, cond = model(kind), tokens(kind, t=2), cond()
    ahead = torch.cat([*rolling(net, Sampler(5, slope=5), 3, context, cond, generator=seeded(7))], dim=1)
    each = rollout(net, Sampler(5).over(SCHEDULE, 1), 3, context, cond, generator=seeded(7))
    torch.testing.assert_close(ahead, each, rtol=1e-4, atol=1e-4)


@every_condition
@every_causal
def test_a_separate_past_has_its_conditions(kind, cond):
    """Where past and present are alike, predictions given a separate past are those of the sequence."""
    net, x, k, cond = model(kind), tokens(kind), torch.full((3, 5), 9), cond()
    forced = net.predict_forced(x, k, x, k, cond)
    torch.testing.assert_close(forced.x0, net.predict(x, k, cond).x0, rtol=1e-4, atol=1e-4)
    assert torch.isfinite(elbo(net, SCHEDULE, x, cond=cond, ladder=SCHEDULE.ladder(3))).all()


@every_condition
@pytest.mark.parametrize("kind", ["rnn", "space_time"])
def test_history_guidance_keeps_the_condition(kind, cond):
    net, x, k, cond = model(kind), tokens(kind), torch.full((3, 5), 9), cond()
    state = net.absorb(tokens(kind, t=2))
    far = history_guidance(net.denoiser(cond, state), 3.0)(x, k).x0
    near, without = net.predict(x, k, cond, state).x0, net.predict(x, k, cond).x0
    torch.testing.assert_close(far, without + 3 * (near - without), rtol=1e-4, atol=1e-4)


# Files.


def test_optional_conditions_are_saved(tmp_path):
    net = model()
    net.save_pretrained(tmp_path)
    loaded = DiffusionForcing.from_pretrained(tmp_path)
    assert loaded.optional_cond
    assert loaded.cond_width == 1
    x, k = tokens("rnn"), torch.full((3, 5), 9)
    assert torch.equal(loaded.predict(x, k).x0, net.predict(x, k).x0)


@pytest.mark.parametrize(("value", "words"), [(None, None), ("yes", "optional_cond, true or false; got 'yes'")])
def test_a_config_of_before_has_none(tmp_path, value, words):
    model(optional=False).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["optional_cond"]
    file.write_text(json.dumps(config if value is None else {**config, "optional_cond": value}))
    if words is None:
        assert not DiffusionForcing.from_pretrained(tmp_path).optional_cond
    else:
        with pytest.raises(ValueError, match=words):
            DiffusionForcing.from_pretrained(tmp_path)


# What is refused.


@pytest.mark.parametrize("cond", [0, 1])
def test_optional_conditions_need_room_for_their_indicator(cond):
    with pytest.raises(ValueError, match=rf"build it with cond=c \+ 1, as its config says; got {cond}"):
        DiffusionForcing(RNN(2, cond, hidden=8, levels=K), SCHEDULE, optional_cond=True)


CALLS = {
    "loss": lambda net, x, k, cond: net(x, k, cond),
    "predict": lambda net, x, k, cond: net.predict(x, k, cond),
    "predict_forced": lambda net, x, k, cond: net.predict_forced(x, k, x, k, cond),
    "absorb": lambda net, x, k, cond: net.absorb(x, cond),
    "sample": lambda net, x, k, cond: sample(net.denoiser(cond), SCHEDULE, x, full_sequence(5, LADDER)),
    "rollout": lambda net, x, k, cond: rollout(net, Sampler(3), 3, x[:, :2], cond),
    "classifier_free": lambda net, x, k, cond: classifier_free(net, cond, 2.0)(x, k),
}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_conditions_that_are_not_finite_are_refused(call, bad):
    cond = numbers()
    cond[1, 3], cond[2, 0] = bad, -bad
    with pytest.raises(ValueError, match=r"NaN or infinite values, the first in sequence 1, token 3: fill them.*mask_cond"):
        call(model(), tokens("rnn"), torch.full((3, 5), 9), cond)


def test_large_numbers_are_finite():
    cond = torch.full((3, 5, 1), 3e38)
    assert torch.isinf(cond.sum())
    assert model().read_cond(tokens("rnn"), cond).shape == (3, 5, 2)


@given(width=st.integers(1, 4), entries=st.lists(st.sampled_from([0.0, 1.0, 0.5, -1.0]), min_size=10, max_size=10))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_only_what_mask_cond_makes_passes_for_it(width, entries):
    """Numbers one too many are no indicator by chance."""
    net = DiffusionForcing(RNN(2, width + 1, hidden=8, levels=K), SCHEDULE, optional_cond=True)
    cond = torch.tensor((entries * 5)[: 5 * (width + 1)]).view(1, 5, width + 1)
    marks = cond[..., -1]
    proper = bool(((marks == 1) | ((marks == 0) & (cond == 0).all(-1))).all())
    if proper:
        assert torch.equal(net.read_cond(torch.zeros(1, 5, 2), cond), cond)
    else:
        with pytest.raises(ValueError, match=f"conditions of {width} numbers a token, or what mask_cond"):
            net.read_cond(torch.zeros(1, 5, 2), cond)


@pytest.mark.parametrize("shape", [(3, 4, 1), (3, 5), (5,), (3, 5, 1, 1)])
def test_a_condition_covers_each_token(shape):
    with pytest.raises(ValueError, match=r"cond covers each token, \(3, 5\)"):
        model().predict(tokens("rnn"), torch.full((3, 5), 9), torch.zeros(shape))


@pytest.mark.parametrize(
    "mask", [torch.ones(4, dtype=torch.bool), torch.ones(3, 4, dtype=torch.bool), torch.ones(3), torch.ones(3, 5, 1).bool()]
)
def test_a_mask_is_of_sequences_or_tokens(mask):
    with pytest.raises(ValueError, match="whether it has a condition, as bool; got"):
        mask_cond(numbers(), mask)


def test_classifier_free_guidance_needs_a_model_that_can_do_without_its_condition():
    with pytest.raises(ValueError, match=r"--objective.cond-drop 0.1.*optional_cond=True"):
        classifier_free(model(optional=False), numbers(), 1.0)
