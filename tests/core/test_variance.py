"""Tokens whose numbers differ widely in size: v-prediction in units of each, and the codec that says which those are."""

import pytest
import torch
from oracles import randomised, seeded
from torch import nn

from diffusion_forcing import (
    RNN,
    DiffusionForcing,
    NoiseSchedule,
    Sampler,
    Transformer,
    autoregressive,
    full_sequence,
    linear,
    pin,
    pyramid,
    sample,
)
from diffusion_forcing import orders as fast
from diffusion_forcing.backbones import RNNConfig
from diffusion_forcing.codecs import Chain, Normalize, Rotate, Stack, Whiten, build_codec, describe_codec
from diffusion_forcing.engine.config import ModelConfig, replace
from diffusion_forcing.preconditioning import Preconditioning
from diffusion_forcing.schedule import expand

K, D = 20, 4
SCHEDULE = NoiseSchedule(linear(K))
VARIANCE = torch.tensor([400.0, 9.0, 1.0, 0.01])
LADDER = SCHEDULE.ladder(5)
MATRICES = {
    "full_sequence": full_sequence(6, LADDER),
    "pyramid": pyramid(6, LADDER),
    "autoregressive": autoregressive(6, LADDER),
    "known start": pin(pyramid(6, LADDER), [0, 1]),
}
BACKBONES = {
    "rnn": lambda: RNN(D, hidden=12, levels=K),
    "deep rnn": lambda: RNN(D, hidden=12, layers=2, levels=K),
    "transformer": lambda: Transformer(D, hidden=12, heads=2, layers=2, levels=K),
    "seeing everything": lambda: Transformer(D, hidden=12, heads=2, layers=2, levels=K, causal=False),
}
every_backbone = pytest.mark.parametrize("name", BACKBONES)


def model_of(name, variance=VARIANCE, **options) -> DiffusionForcing:
    torch.manual_seed(0)
    return randomised(DiffusionForcing(BACKBONES[name](), SCHEDULE, preconditioning=Preconditioning(variance), **options))


def data(n=8, t=6, seed=0):
    """Tokens (n, t, 4) whose numbers have the variances above."""
    return torch.randn(n, t, D, generator=seeded(seed)) * VARIANCE.sqrt()


def some_levels(n=8, t=6):
    return torch.randint(0, K + 1, (n, t), generator=seeded(5))


# One variance for all is v-prediction as it was.


@every_backbone
def test_variances_of_one_change_nothing(name):
    plain, units = model_of(name, None), model_of(name, torch.ones(D))
    x, noise, k = torch.randn(8, 6, D, generator=seeded(0)), torch.randn(8, 6, D, generator=seeded(1)), some_levels()
    torch.testing.assert_close(units(x, k, noise=noise), plain(x, k, noise=noise), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(units.predict(x, k)[:2], plain.predict(x, k)[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for matrix in MATRICES.values():
        start = torch.randn(3, 6, D, generator=seeded(2))
        torch.testing.assert_close(
            sample(units.denoiser(), SCHEDULE, start, matrix), sample(plain.denoiser(), SCHEDULE, start, matrix), rtol=1e-4, atol=1e-4
        )


def test_without_variance_the_model_is_bit_for_bit_what_it_was():
    model = model_of("rnn", None)
    assert model.variance is None
    assert "variance" not in model.state_dict()
    x = torch.randn(2, 3, D)
    assert model.preconditioning.scale(x, torch.ones(1), torch.zeros(1)) is x


# The formula.


class Spy(nn.Module):
    """Remembers what it was shown, and says a number or a function of it."""

    def __init__(self, says=0.0):
        super().__init__()
        self.says, self.seen = says, []

    def forward(self, x, k, cond, state=None):
        self.seen.append(x)
        return (self.says(x, k) if callable(self.says) else torch.full_like(x, self.says)), None

    def forced(self, x, k, cond, past_x, past_k):
        self.seen += [x, past_x]
        return torch.full_like(x, self.says)


def amplitudes(k):
    return SCHEDULE.alpha(k)[..., None], SCHEDULE.sigma(k)[..., None]


def test_what_the_network_reads_has_about_unit_size_at_every_level():
    spy = Spy()
    model = DiffusionForcing(spy, SCHEDULE, preconditioning=Preconditioning(VARIANCE))
    x = data(4000, 1)
    for level in range(K + 1):
        k = torch.full((4000, 1), level)
        model(x, k, noise=torch.randn(x.shape, generator=seeded(level)))
        std = spy.seen[-1].std((0, 1))
        assert (std - 1).abs().max() < 0.06, level
        model.predict(SCHEDULE.add_noise(x, k, torch.randn(x.shape, generator=seeded(level))), k)
        torch.testing.assert_close(spy.seen[-1], spy.seen[-2])


def test_what_the_network_should_say_has_unit_size_at_every_level():
    """A network that says nothing loses 1, whatever the level: but for level 0, which has nothing to say."""
    model = DiffusionForcing(Spy(), SCHEDULE, preconditioning=Preconditioning(VARIANCE))
    k = torch.arange(K + 1).expand(4000, -1)
    losses = model(data(4000, K + 1), k, noise=torch.randn(4000, K + 1, D, generator=seeded(3))).mean(0)
    assert losses[0] == 0
    assert (losses[1:] - 1).abs().max() < 0.06


def test_the_loss_by_hand():
    spy = Spy(0.3)
    model = DiffusionForcing(spy, SCHEDULE, preconditioning=Preconditioning(VARIANCE))
    x, noise, k = data(), torch.randn(8, 6, D, generator=seeded(1)), some_levels()
    alpha, sigma = amplitudes(k)
    size = (alpha**2 * VARIANCE + sigma**2).sqrt()
    target = alpha * VARIANCE.sqrt() / size * noise - sigma / size * x / VARIANCE.sqrt()
    torch.testing.assert_close(model(x, k, noise=noise), ((0.3 - target) ** 2).mean(-1) * (k > 0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(spy.seen[-1], (alpha * x + sigma * noise) / size)


def test_a_past_at_other_levels_is_read_in_its_own_units():
    spy = Spy(0.3)
    model = DiffusionForcing(spy, SCHEDULE, preconditioning=Preconditioning(VARIANCE))
    x, noise, k = data(4000, 2), torch.randn(4000, 2, D, generator=seeded(1)), torch.full((4000, 2), 12)
    for past in (0, 3, K):
        model(x, k, noise=noise, past=torch.full_like(k, past))
        assert all((seen.std((0, 1)) - 1).abs().max() < 0.06 for seen in spy.seen[-2:])


def test_a_network_that_says_nothing_means_the_best_guess_of_a_number_alone():
    """Of a Gaussian of that variance: the Wiener filter."""
    model = DiffusionForcing(Spy(), SCHEDULE, preconditioning=Preconditioning(VARIANCE))
    x, k = data(), some_levels()
    alpha, sigma = amplitudes(k)
    best = alpha * VARIANCE / (alpha**2 * VARIANCE + sigma**2) * x
    torch.testing.assert_close(model.predict(x, k).x0, torch.where(k[..., None] == 0, x, best), rtol=1e-4, atol=1e-5)


@every_backbone
@pytest.mark.parametrize("clip", [None, 2.0])
def test_x0_and_eps_agree_with_the_noisy_tokens(name, clip):
    model = model_of(name, clip=clip)
    x, k = data(), some_levels()
    alpha, sigma = amplitudes(k)
    prediction = model.predict(x, k)
    torch.testing.assert_close(alpha * prediction.x0 + sigma * prediction.eps, x, rtol=1e-4, atol=1e-3)
    if clip is not None:
        assert prediction.x0[k > 0].abs().max() <= clip


@every_backbone
def test_a_token_at_level_0_is_known_exactly(name):
    x = data()
    prediction = model_of(name).predict(x, torch.zeros(8, 6, dtype=torch.long))
    assert torch.equal(prediction.x0, x)
    assert not prediction.eps.any()


# Sampling.


@pytest.mark.parametrize("eta", [0.0, 1.0])
@pytest.mark.parametrize("matrix", MATRICES)
def test_who_knows_the_data_gets_them_back(matrix, eta):
    clean = data(3, 6)

    def exact(scaled, k):
        """The target, worked out from the noisy token and the data."""
        alpha, sigma = amplitudes(k)
        size = (alpha**2 * VARIANCE + sigma**2).sqrt()
        eps = torch.where(sigma > 0, (scaled * size - alpha * clean) / sigma.clamp(min=1e-12), torch.zeros_like(scaled))
        return alpha * VARIANCE.sqrt() / size * eps - sigma / size * clean / VARIANCE.sqrt()

    model = DiffusionForcing(Spy(exact), SCHEDULE, preconditioning=Preconditioning(VARIANCE))
    start = torch.randn(3, 6, D, generator=seeded(1))
    known = MATRICES[matrix][0] == 0
    start[:, known] = clean[:, known]
    found = sample(model.denoiser(), SCHEDULE, start, MATRICES[matrix], eta=eta, generator=seeded(2))
    torch.testing.assert_close(found / VARIANCE.sqrt(), clean / VARIANCE.sqrt(), rtol=1e-4, atol=1e-3)


def test_who_says_nothing_draws_numbers_of_the_right_variance():
    fine = NoiseSchedule(linear(500))
    model = DiffusionForcing(Spy(), fine, preconditioning=Preconditioning(VARIANCE))
    found = sample(model.denoiser(), fine, torch.randn(4000, 1, D, generator=seeded(0)), full_sequence(1, fine.ladder(500)))
    torch.testing.assert_close(found.var((0, 1)).log(), VARIANCE.log(), atol=0.15, rtol=0)


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("eta", [0.0, 0.7])
@pytest.mark.parametrize("name", ["rnn", "deep rnn", "transformer"])
def test_the_faster_orders_give_the_numbers_of_the_plain_loop(name, eta, matrix):
    model = model_of(name)
    start = torch.randn(3, 6, D, generator=seeded(1))
    denoise = model.denoiser()
    plain = sample(lambda x, k: denoise(x, k), SCHEDULE, start, MATRICES[matrix], eta=eta, generator=seeded(2))
    faster = fast.wavefront if name.endswith("rnn") else fast.windowed
    found = faster(denoise, start, MATRICES[matrix], Sampler(eta=eta), seeded(2)).x
    torch.testing.assert_close(found / VARIANCE.sqrt(), plain / VARIANCE.sqrt(), rtol=1e-3, atol=1e-3)


@every_backbone
def test_a_past_that_was_absorbed_is_the_past(name):
    model = model_of(name)
    x, k = data(), some_levels()
    whole = model.predict(x, k)
    rest = model.predict(x[:, 2:], k[:, 2:], state=model.absorb(x[:, :2], level=k[:, :2]))
    torch.testing.assert_close(rest.x0 / VARIANCE.sqrt(), whole.x0[:, 2:] / VARIANCE.sqrt(), rtol=1e-4, atol=1e-4)


# Files and mistakes.


@every_backbone
def test_a_saved_model_predicts_the_same(name, tmp_path):
    model = model_of(name)
    model.save_pretrained(tmp_path)
    loaded = DiffusionForcing.from_pretrained(tmp_path)
    assert torch.equal(loaded.variance, VARIANCE)
    x, k = data(), some_levels()
    assert torch.equal(loaded.predict(x, k).x0, model.predict(x, k).x0)


def test_a_model_without_variance_is_saved_without(tmp_path):
    model_of("rnn", None).save_pretrained(tmp_path)
    assert DiffusionForcing.from_pretrained(tmp_path).variance is None


def test_a_model_that_has_its_variance_from_its_codec_can_be_saved(tmp_path):
    codec = Chain(Rotate.fit(data(400)))
    model = ModelConfig(RNNConfig(hidden=8, blocks=1), levels=K).build(D, 0, codec)
    assert torch.equal(model.variance, codec.variance)
    model.save_pretrained(tmp_path)


def test_variance_is_not_for_predicting_noise():
    with pytest.raises(ValueError, match="variance is for predicting v or x0; with parameterization='eps' leave it out"):
        model_of("rnn", parameterization="eps")


def test_x0_and_v_are_two_ways_to_say_the_same_in_units_of_the_spread():
    """A network that outputs x0 in these units predicts what one predicts that outputs the v of it."""
    x, k = data(), some_levels().clamp(min=1)
    said = model_of("rnn", parameterization="x0")
    x0 = said.predict(x, k)
    alpha, sigma = (expand(part, x) for part in (SCHEDULE.alpha(k), SCHEDULE.sigma(k)))
    torch.testing.assert_close(alpha * x0.x0 + sigma * x0.eps, x, atol=1e-4, rtol=1e-4)
    out = said.backbone(said.preconditioning.scale(x, alpha, sigma), k, x.new_zeros(*x.shape[:2], 0))[0]
    torch.testing.assert_close(x0.x0, out * VARIANCE.sqrt())
    error = (out - data(seed=1) / VARIANCE.sqrt()) ** 2
    noise = (x - alpha * data(seed=1)) / sigma
    torch.testing.assert_close(said(data(seed=1), k, noise=noise), error.mean(-1), atol=1e-3, rtol=1e-3)


def test_emphasis_wants_a_variance():
    codec = Normalize(torch.zeros(D), torch.ones(D))
    with pytest.raises(ValueError, match=r"got 1\.0, set --model\.variance-weighting 0"):
        ModelConfig(RNNConfig(hidden=8, blocks=1), levels=K, variance_weighting=1.0).build(D, 0, codec)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_variances_are_positive(bad):
    with pytest.raises(ValueError, match="variance must be positive for each number of a token"):
        model_of("rnn", torch.tensor([1.0, bad, 1.0, 1.0]))


def test_a_config_takes_the_variance_of_its_codec_for_v_prediction_only():
    codec = Chain(Normalize(torch.zeros(D), torch.ones(D)), Rotate.fit(data(400)))
    config = ModelConfig(RNNConfig(hidden=8, blocks=1), levels=K)
    assert torch.equal(config.build(D, 0, codec).variance, codec.variance)
    assert replace(config, parameterization="x0").build(D, 0, codec).variance is None
    assert config.build(D, 0, codec.parts[0]).variance is None
    assert config.build(D, 0).variance is None


# Rotate.


def tilted(n=3000):
    """Tokens of five numbers that vary in three directions, by very different amounts."""
    directions = torch.linalg.qr(torch.randn(5, 3, generator=seeded(7)))[0]
    return (torch.randn(n, 3, generator=seeded(8)) * torch.tensor([5.0, 1.0, 0.2])) @ directions.T + torch.arange(5.0)


def test_rotate_turns_without_stretching():
    rotate = Rotate.fit(tilted())
    assert rotate.basis.shape == (5, 3)
    torch.testing.assert_close(rotate.basis.T @ rotate.basis, torch.eye(3), atol=1e-6, rtol=0)
    tokens = rotate.encode(tilted())
    torch.testing.assert_close(tokens.mean(0), torch.zeros(3), atol=1e-3, rtol=0)
    torch.testing.assert_close((tokens.T @ tokens) / len(tokens), rotate.variance.diag(), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(rotate.variance.sqrt(), torch.tensor([5.0, 1.0, 0.2]), rtol=0.05, atol=0)
    distance = (tilted()[0] - tilted()[1]).norm()
    torch.testing.assert_close((tokens[0] - tokens[1]).norm(), distance, rtol=1e-4, atol=0)


def test_rotate_comes_back_and_drops_what_never_varies():
    rotate = Rotate.fit(tilted())
    torch.testing.assert_close(rotate.decode(rotate.encode(tilted())), tilted(), atol=1e-4, rtol=0)
    tokens = torch.randn(10, 3, generator=seeded(1))
    torch.testing.assert_close(rotate.encode(rotate.decode(tokens)), tokens, atol=1e-5, rtol=1e-5)


def test_rotate_keeps_the_directions_that_vary_most():
    rotate, whiten = Rotate.fit(tilted(), keep=2), Whiten.fit(tilted(), keep=2)
    assert torch.equal(rotate.basis, whiten.basis)
    torch.testing.assert_close(rotate.variance, whiten.scale**2)
    assert torch.equal(rotate.variance, Rotate.fit(tilted()).variance[:2])
    assert Rotate.fit(tilted(), keep=9).basis.shape == (5, 3)


def test_rotate_in_groups_mixes_numbers_of_a_group_only():
    x = tilted()
    groups = [[0, 3], [1, 2, 4]]
    rotate = Rotate.fit(x, keep=2, groups=groups)
    assert rotate.basis.shape == (5, 4)
    torch.testing.assert_close(rotate.basis.T @ rotate.basis, torch.eye(4), atol=1e-6, rtol=0)
    assert not rotate.basis[groups[0], 2:].any()
    assert not rotate.basis[groups[1], :2].any()
    torch.testing.assert_close(rotate.encode(x)[:, 2:], Rotate.fit(x[:, groups[1]], keep=2).encode(x[:, groups[1]]))
    torch.testing.assert_close(rotate.encode(x).var(0, unbiased=False), rotate.variance, rtol=1e-3, atol=1e-4)


def test_rotate_is_described_and_built_again(tmp_path):
    codec = Chain(Stack(5), Rotate.fit(tilted()))
    copy = build_codec(describe_codec(codec))
    assert {name: buffer.shape for name, buffer in copy.named_buffers()} == {name: buffer.shape for name, buffer in codec.named_buffers()}
    assert codec.variance is codec.parts[-1].variance
    model = DiffusionForcing(RNN(3, hidden=8, levels=K), SCHEDULE, codec=codec, preconditioning=Preconditioning(codec.variance.clone()))
    model.save_pretrained(tmp_path)
    loaded = DiffusionForcing.from_pretrained(tmp_path).codec
    x = tilted().reshape(1, -1, 1)
    assert torch.equal(loaded.encode(x), codec.encode(x))
    assert torch.equal(loaded.decode(loaded.encode(x)), codec.decode(codec.encode(x)))
    assert torch.equal(loaded.variance, codec.variance)
