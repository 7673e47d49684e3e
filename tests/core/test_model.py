"""The model: loss, prediction, committed past, denoisers."""

import pytest
import torch
from oracles import randomised, seeded
from torch import nn

from diffusion_forcing import (
    RNN,
    Context,
    Denoiser,
    DiffusionForcing,
    FusedSNR,
    MinSNR,
    NoiseSchedule,
    Sampler,
    Transformer,
    Uniform,
    autoregressive,
    cosine,
    full_sequence,
    linear,
    rollout,
    sample,
)
from diffusion_forcing.backbones import repeat_state

K = 30
SCHEDULE = NoiseSchedule(cosine(K))


def rnn(cond=0, **options):
    return randomised(DiffusionForcing(RNN(3, cond, hidden=16, levels=K), SCHEDULE, **options))


def transformer(cond=0, causal=True, **options):
    net = Transformer(3, cond, hidden=16, heads=2, layers=2, causal=causal, levels=K)
    return randomised(DiffusionForcing(net, SCHEDULE, **options))


KINDS = {"rnn": rnn, "transformer": transformer, "seeing": lambda cond=0, **options: transformer(cond, causal=False, **options)}
every_kind = pytest.mark.parametrize("build", KINDS.values(), ids=KINDS)


def batch(b=4, t=5, seed=0):
    """Tokens, levels (0 and K among them), noise."""
    generator = seeded(seed)
    x, noise = torch.randn(2, b, t, 3, generator=generator)
    k = torch.randint(0, K + 1, (b, t), generator=generator)
    k[0, 1], k[0, 2] = 0, K
    return x, k, noise


class Constant(nn.Module):
    """Says the same of every token, whatever it is shown: for losses one can work out by hand."""

    causal = True

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x, k, cond, state=None):
        return torch.full_like(x, self.value), state


# The loss.


@pytest.mark.parametrize("weight", [Uniform(), MinSNR(), FusedSNR()], ids=repr)
@pytest.mark.parametrize("name", ["x0", "eps", "v"])
@pytest.mark.parametrize("event", [(3,), (2, 4, 4)])
def test_the_loss_by_hand(weight, name, event):
    x, noise = torch.randn(2, 2, 4, *event, generator=seeded(0))
    k = torch.tensor([[0, 1, 15, K], [K, 7, 0, 29]])
    model = DiffusionForcing(Constant(0.3), SCHEDULE, parameterization=name, weight=weight)
    loss = model(x, k, noise=noise)
    assert loss.shape == (2, 4)
    weights = weight(SCHEDULE, k, name)
    for b in range(2):
        for t in range(4):
            kept = cosine(K)[k[b, t]].float()
            alpha, sigma = kept.sqrt(), (1 - kept).sqrt()
            want = {"x0": x[b, t], "eps": noise[b, t], "v": alpha * noise[b, t] - sigma * x[b, t]}[name]
            torch.testing.assert_close(loss[b, t], weights[b, t] * ((0.3 - want) ** 2).mean(), rtol=1e-4, atol=1e-5)


@every_kind
@pytest.mark.parametrize("name", ["x0", "eps", "v"])
def test_the_loss_is_the_error_of_what_the_backbone_says_of_noisy_tokens(build, name):
    model = build(parameterization=name)
    x, k, noise = batch()
    noisy = SCHEDULE.add_noise(x, k, noise)
    out, _ = model.backbone(noisy, k, torch.zeros(4, 5, 0))
    alpha, sigma = SCHEDULE.alpha(k)[..., None], SCHEDULE.sigma(k)[..., None]
    want = {"x0": x, "eps": noise, "v": alpha * noise - sigma * x}[name]
    counted = torch.ones(4, 5) if name == "x0" else (k > 0).float()
    torch.testing.assert_close(model(x, k, noise=noise), counted * ((out - want) ** 2).mean(-1))


@pytest.mark.parametrize(("name", "counts"), [("x0", True), ("eps", False), ("v", False)])
@pytest.mark.parametrize("weight", ["uniform", "min_snr", "fused_snr"])
def test_level_0_counts_where_its_target_is_there_to_be_seen(name, counts, weight):
    model = rnn(parameterization=name, weight=weight)
    x, _, noise = batch()
    loss = model(x, torch.zeros(4, 5, dtype=torch.long), noise=noise)
    assert (loss > 0).all() if counts else (loss == 0).all()
    # The noise of a clean token is not seen, so it cannot matter.
    assert torch.equal(loss, model(x, torch.zeros(4, 5, dtype=torch.long), noise=noise + 1))


def test_the_loss_draws_its_own_noise_if_given_none():
    model = rnn()
    x, k, _ = batch()
    torch.manual_seed(3)
    noise = torch.randn_like(x)
    torch.manual_seed(3)
    assert torch.equal(model(x, k), model(x, k, noise=noise))


@pytest.mark.parametrize("build", [rnn, transformer])
def test_a_teacher_forced_past_is_seen_clean(build):
    """Each token at its own level, after a past at level 0: by hand, token by token."""
    model = build(parameterization="x0")
    x, k, noise = batch()
    past = torch.zeros_like(k)
    noisy = SCHEDULE.add_noise(x, k, noise)
    losses = []
    for t in range(5):
        state = model.absorb(x[:, :t]) if t else None
        out, _ = model.backbone(noisy[:, t : t + 1], k[:, t : t + 1], torch.zeros(4, 1, 0), state)
        losses.append(((out - x[:, t : t + 1]) ** 2).mean(-1))
    torch.testing.assert_close(model(x, k, noise=noise, past=past), torch.cat(losses, 1), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(x, k, noise=noise), torch.cat(losses, 1), atol=1e-3)


@pytest.mark.parametrize("build", [rnn, transformer])
def test_a_past_at_the_tokens_own_levels_is_no_past_of_its_own(build):
    model = build()
    x, k, noise = batch()
    torch.testing.assert_close(model(x, k, noise=noise, past=k), model(x, k, noise=noise), rtol=1e-4, atol=1e-5)


@every_kind
def test_the_loss_trains_every_parameter(build):
    model = build(cond=2)
    x, k, noise = batch()
    model(x, k, torch.ones(4, 5, 2), noise=noise).mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_gradients_flow_through_the_latent():
    """The error of the last token trains what read the first."""
    model = rnn()
    x, k, noise = batch()
    x.requires_grad_()
    (grad,) = torch.autograd.grad(model(x, k, noise=noise)[:, -1].sum(), x)
    assert (grad[:, 0].abs().amax(-1) > 0).all()


@every_kind
def test_no_condition_is_a_condition_of_width_0(build):
    model = build()
    x, k, noise = batch()
    assert torch.equal(model(x, k, None, noise=noise), model(x, k, torch.zeros(4, 5, 0), noise=noise))
    assert torch.equal(model.predict(x, k).x0, model.predict(x, k, torch.zeros(4, 5, 0)).x0)


@every_kind
def test_the_condition_matters(build):
    model = build(cond=2)
    x, k, noise = batch()
    zero, one = (model(x, k, torch.full((4, 5, 2), value), noise=noise) for value in (0.0, 1.0))
    assert ((zero != one) == (k > 0)).all()


# Prediction.


@every_kind
@pytest.mark.parametrize("name", ["x0", "eps", "v"])
def test_a_prediction_is_the_output_brought_back_to_x0_and_eps(build, name):
    model = build(parameterization=name)
    x, k, _ = batch()
    out, _ = model.backbone(x, k, torch.zeros(4, 5, 0))
    x0, eps, grad = model.predict(x, k)
    alpha, sigma = SCHEDULE.alpha(k)[..., None], SCHEDULE.sigma(k)[..., None]
    noisy = k > 0
    said = {"x0": x0, "eps": eps, "v": alpha * eps - sigma * x0}[name]
    torch.testing.assert_close(said[noisy], out[noisy], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close((alpha * x0 + sigma * eps)[noisy], x[noisy], rtol=1e-4, atol=1e-4)
    assert torch.equal(x0[~noisy], x[~noisy])
    assert (eps[~noisy] == 0).all()
    assert grad is None


@every_kind
@pytest.mark.parametrize("name", ["x0", "eps", "v"])
def test_clip_bounds_x0_and_keeps_the_pair_consistent(build, name):
    x, k, _ = batch()
    free, bound = build(parameterization=name).predict(x, k), build(parameterization=name, clip=0.2).predict(x, k)
    noisy = (k > 0)[..., None].expand_as(x)
    assert free.x0[noisy].abs().max() > 0.2
    torch.testing.assert_close(bound.x0[noisy], free.x0[noisy].clamp(-0.2, 0.2))
    alpha, sigma = SCHEDULE.alpha(k)[..., None], SCHEDULE.sigma(k)[..., None]
    torch.testing.assert_close((alpha * bound.x0 + sigma * bound.eps)[noisy], x[noisy], rtol=1e-4, atol=1e-4)
    # A clean token is known, however large.
    assert torch.equal(bound.x0[~noisy], x[~noisy])


def test_clip_does_not_touch_the_loss():
    x, k, noise = batch()
    assert torch.equal(rnn(clip=0.01)(x, k, noise=noise), rnn()(x, k, noise=noise))


@pytest.mark.parametrize("build", [rnn, transformer])
def test_predict_forced_is_predict_after_another_past(build):
    model = build(cond=1)
    x, k, _ = batch()
    past_x, past_k, _ = batch(seed=1)
    cond = torch.randn(4, 5, 1, generator=seeded(2))
    forced = model.predict_forced(x, k, past_x, past_k, cond)
    for t in range(5):
        state = model.absorb(past_x[:, :t], cond[:, :t], level=past_k[:, :t]) if t else None
        alone = model.predict(x[:, t : t + 1], k[:, t : t + 1], cond[:, t : t + 1], state)
        torch.testing.assert_close(forced.x0[:, t : t + 1], alone.x0, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(forced.eps[:, t : t + 1], alone.eps, rtol=1e-4, atol=1e-4)


# The committed past.


@every_kind
@pytest.mark.parametrize("level", [0, 7, K])
def test_absorbed_tokens_are_seen_as_if_they_stood_before(build, level):
    model = build(cond=1)
    x, k, _ = batch(t=6)
    cond = torch.randn(4, 6, 1, generator=seeded(2))
    k[:, :3] = level
    whole = model.predict(x, k, cond)
    state = model.absorb(x[:, :3], cond[:, :3], level=level)
    rest = model.predict(x[:, 3:], k[:, 3:], cond[:, 3:], state)
    torch.testing.assert_close(rest.x0, whole.x0[:, 3:], rtol=1e-4, atol=1e-4)


@every_kind
def test_absorb_takes_a_level_for_each_token(build):
    model = build()
    x, k, noise = batch()
    one = model.absorb(x, level=torch.tensor([0, 1, 2, 3, K]))
    two = model.absorb(x, level=torch.tensor([0, 1, 2, 3, K]).expand(4, 5))
    later = model.predict(noise, k, state=one).x0
    assert torch.equal(later, model.predict(noise, k, state=two).x0)
    assert not torch.allclose(later, model.predict(noise, k, state=model.absorb(x)).x0, atol=1e-4)


@every_kind
def test_absorb_with_noise_noises_the_tokens_without_only_says_so(build):
    model = build()
    x, k, noise = batch()
    noised = model.absorb(x, level=9, noise=noise)
    by_hand = model.absorb(SCHEDULE.add_noise(x, torch.full((4, 5), 9), noise), level=9)
    labelled = model.absorb(x, level=9)
    tokens = torch.randn(4, 2, 3, generator=seeded(4))
    said, expected, other = (model.predict(tokens, k[:, :2], state=state).x0 for state in (noised, by_hand, labelled))
    torch.testing.assert_close(said, expected)
    assert not torch.allclose(said, other, atol=1e-4)


@every_kind
def test_absorbing_bit_by_bit_is_absorbing_at_once(build):
    model = build()
    x, k, _ = batch()
    state = model.absorb(x[:, :2], level=3)
    state = model.absorb(x[:, 2:3], None, state, level=0)
    once = model.absorb(x[:, :3], level=torch.tensor([3, 3, 0]))
    rest = (x[:, 3:], k[:, 3:])
    torch.testing.assert_close(model.predict(*rest, state=state).x0, model.predict(*rest, state=once).x0, rtol=1e-4, atol=1e-4)


# Denoisers.


@every_kind
def test_a_denoiser_is_predict_with_condition_and_past_bound(build):
    model = build(cond=1)
    x, k, _ = batch()
    cond = torch.randn(4, 5, 1, generator=seeded(2))
    state = model.absorb(x, cond)
    denoise = model.denoiser(cond, state)
    assert isinstance(denoise, Denoiser)
    assert torch.equal(denoise(x, k).x0, model.predict(x, k, cond, state).x0)
    assert torch.equal(build().denoiser()(x, k).eps, build().predict(x, k).eps)


@every_kind
@pytest.mark.parametrize("bind", ["cond", "state", "both"])
def test_a_denoiser_bound_to_b_sequences_serves_n_copies_of_each(build, bind):
    """The copies stand beside one another: 0, 0, 0, 1, 1, 1, ..."""
    model = build(cond=1)
    x, k, _ = batch(b=6)
    cond = torch.randn(2, 5, 1, generator=seeded(2))
    past = torch.randn(2, 3, 3, generator=seeded(3))
    state = model.absorb(past, torch.zeros(2, 3, 1)) if bind != "cond" else None
    wide_state = model.absorb(past.repeat_interleave(3, 0), torch.zeros(6, 3, 1)) if bind != "cond" else None
    wide_cond = cond.repeat_interleave(3, 0)
    if bind == "state":
        cond = wide_cond = torch.zeros(2, 5, 1)
        wide_cond = torch.zeros(6, 5, 1)
    served = model.denoiser(cond, state)(x, k)
    by_hand = model.predict(x, k, wide_cond, wide_state)
    torch.testing.assert_close(served.x0, by_hand.x0, rtol=1e-4, atol=1e-4)


@every_kind
def test_a_denoiser_bound_to_a_past_alone_serves_copies_too(build):
    model = build()
    x, k, _ = batch(b=6)
    past = torch.randn(2, 3, 3, generator=seeded(3))
    served = model.denoiser(None, model.absorb(past))(x, k)
    by_hand = model.predict(x, k, None, model.absorb(past.repeat_interleave(3, 0)))
    torch.testing.assert_close(served.x0, by_hand.x0, rtol=1e-4, atol=1e-4)


def test_a_denoiser_cannot_serve_a_fraction():
    model = rnn()
    x, k, _ = batch(b=5)
    denoise = model.denoiser(None, model.absorb(x[:2]))
    with pytest.raises(ValueError, match="bound to 2 sequences and cannot serve 5; use a multiple"):
        denoise(x, k)


def test_repeat_state_keeps_its_shape():
    assert repeat_state(None, 3) is None
    tensor = torch.arange(2)[:, None]
    assert repeat_state(tensor, 2).flatten().tolist() == [0, 0, 1, 1]
    nested = repeat_state(((tensor, tensor), (tensor,)), 2)
    assert isinstance(nested, tuple)
    assert nested[0][1].shape == (4, 1)
    _, state = transformer(causal=False).backbone(torch.zeros(2, 3, 3), torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, 0))
    assert type(repeat_state(state, 2)) is type(state)
    assert repeat_state(state, 2).k.shape == (4, 3)


# What it refuses.


@pytest.mark.parametrize("call", ["forward", "predict"])
@pytest.mark.parametrize(
    ("x", "k", "cond", "words"),
    [
        ((4, 5), (4, 5), None, r"\(batch, tokens, \*event\); got \(4, 5\)"),
        ((4, 5, 3), (4, 6), None, r"expected shape \(4, 5\), got \(4, 6\)"),
        ((4, 5, 3), (5,), None, r"expected shape \(4, 5\), got \(5,\)"),
        ((4, 5, 2), (4, 5), None, r"tokens of 3 numbers; got tokens of shape \(2,\)"),
        ((4, 5, 3, 1), (4, 5), None, r"tokens of 3 numbers; got tokens of shape \(3, 1\)"),
        ((4, 5, 3), (4, 5), (4, 6, 1), r"cond covers each token, \(4, 5\).*got \(4, 6, 1\)"),
        ((4, 5, 3), (4, 5), (4, 5, 2), "conditions of 1 numbers a token; got 2"),
        ((4, 5, 3), (4, 5), None, "conditions of 1 numbers a token; got 0"),
    ],
    ids=str,
)
def test_shapes_that_do_not_agree_are_refused(call, x, k, cond, words):
    model = rnn(cond=1)
    with pytest.raises(ValueError, match=words):
        getattr(model, call)(torch.zeros(x), torch.zeros(k, dtype=torch.long), None if cond is None else torch.zeros(cond))


def test_a_backbone_and_a_schedule_of_different_levels_are_refused():
    with pytest.raises(ValueError, match="K=1000 but the schedule has K=30; use the same levels"):
        DiffusionForcing(RNN(3), SCHEDULE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"parameterization": "noise"}, "x0, eps, v; got 'noise'"),
        ({"weight": "snr"}, "unknown loss weight 'snr'; choose from uniform, min_snr, fused_snr"),
    ],
)
def test_unknown_names_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        rnn(**options)


def test_a_weight_goes_by_name_or_as_a_function():
    assert rnn(weight="fused_snr").weight == FusedSNR()
    assert rnn(weight=FusedSNR(decay=0.5)).weight.decay == 0.5
    x, k, noise = batch()
    twice = rnn(weight=lambda schedule, k, name: torch.full(k.shape, 2.0), parameterization="x0")
    torch.testing.assert_close(twice(x, k, noise=noise), 2 * rnn(parameterization="x0")(x, k, noise=noise))


def test_a_backbone_that_cannot_be_forced_says_so():
    model = DiffusionForcing(Constant(0.0), SCHEDULE)
    x, k, noise = batch()
    with pytest.raises(ValueError, match="Constant has no method `forced"):
        model(x, k, noise=noise, past=torch.zeros_like(k))
    with pytest.raises(ValueError, match="needs a causal transformer"):
        transformer(causal=False)(x, k, noise=noise, past=torch.zeros_like(k))


class Returns(nn.Module):
    """A causal backbone that returns whatever it is told to."""

    causal = True

    def __init__(self, returned):
        super().__init__()
        self.returned = returned

    def forward(self, x, k, cond, state=None):
        return self.returned(x, state)


USES = {
    "loss": lambda model, x, k: model(x, k),
    "predict": lambda model, x, k: model.predict(x, k),
    "absorb": lambda model, x, k: model.absorb(x),
    "sample": lambda model, x, k: sample(model.denoiser(), SCHEDULE, x, full_sequence(5, SCHEDULE.ladder(3))),
    "rollout": lambda model, x, k: rollout(model, Sampler(3).over(SCHEDULE, 1), 2, x),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (lambda x, state: x, r"\(4, 5, 3\)"),
        (lambda x, state: None, "NoneType"),
        (lambda x, state: (x, state, state), r"\(4, 5, 3\), NoneType, NoneType"),
        (lambda x, state: (x[..., :1], state), r"\(4, 5, 1\), NoneType"),  # would be broadcast in silence
        (lambda x, state: (x[:, -1:], state), r"\(4, 1, 3\), NoneType"),
    ],
    ids=["bare", "nothing", "three", "narrow", "short"],
)
def test_a_backbone_that_returns_something_else_is_refused(use, returned, got):
    model = DiffusionForcing(Returns(returned), SCHEDULE)
    with pytest.raises(ValueError, match=rf"Returns should return \(out, state\).*it returned {got}\. check_backbone"):
        use(model, *batch()[:2])


def test_a_backbone_without_a_state_is_refused_where_one_is_needed():
    """Tokens that others follow would be forgotten in silence: as a context, between windows, and once settled within a window."""
    model = DiffusionForcing(Returns(lambda x, state: (0 * x, None)), SCHEDULE)
    x, k, noise = batch()
    assert model(x, k, noise=noise).shape == (4, 5)
    assert sample(model.denoiser(), SCHEDULE, x, full_sequence(5, SCHEDULE.ladder(3))).shape == x.shape
    window = Sampler(3).over(SCHEDULE, 1)
    for call in (
        lambda: model.absorb(x),
        lambda: rollout(model, window, 2, x),
        lambda: rollout(model, window, 2, x[:, :0]),
        lambda: rollout(model, window, 2, x, past=Context(memory=2)),
        lambda: sample(model.denoiser(), SCHEDULE, x, autoregressive(5, SCHEDULE.ladder(3))),
    ):
        with pytest.raises(ValueError, match=r"Returns returns no state.*return \(out, state\).*Context\(memory=0\)"):
            call()
    assert rollout(model, window, 2, x, past=Context(memory=0)).shape == (4, 2, 3)
    empty = DiffusionForcing(Returns(lambda x, state: (0 * x, x.new_zeros(len(x), 0))), SCHEDULE)
    assert rollout(empty, window, 2, x).shape == (4, 2, 3)


def test_a_bidirectional_backbone_is_its_own_memory():
    """Its state is the past itself, so roll-outs need nothing of their own."""
    model = transformer(causal=False)
    x, _, _ = batch()
    assert rollout(model, Sampler(3).over(SCHEDULE, 2), 4, x, past=Context(memory=3)).shape == (4, 4, 3)


def test_a_model_is_causal_if_its_backbone_is():
    assert rnn().causal
    assert transformer().causal
    assert not transformer(causal=False).causal
    assert not DiffusionForcing(nn.Identity(), NoiseSchedule(linear(5))).causal


@pytest.mark.parametrize("level", [-1, 1001])
def test_levels_outside_the_schedule_are_refused(level):
    model = DiffusionForcing(RNN(2, hidden=8), NoiseSchedule(cosine()))
    x, k = torch.zeros(1, 3, 2), torch.full((1, 3), level)
    for call in (model, model.predict):
        with pytest.raises(ValueError, match=r"levels must lie in 0..1000"):
            call(x, k)
    with pytest.raises(ValueError, match="levels are integers"):
        model.predict(x, torch.zeros(1, 3))
