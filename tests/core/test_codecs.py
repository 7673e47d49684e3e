"""Raw data to tokens and back."""

import pytest
import torch
from oracles import seeded
from torch import nn

from diffusion_forcing import RNN, DiffusionForcing, NoiseSchedule, cosine
from diffusion_forcing.codecs import (
    Chain,
    Normalize,
    Rotate,
    Split,
    Stack,
    Whiten,
    build_codec,
    codec_traits,
    describe_codec,
    principal_directions,
)


def frames(n=40, t=12, d=3, seed=0):
    """Frames (n, t, d) whose numbers have different means and scales."""
    return torch.randn(n, t, d, generator=seeded(seed)) * torch.tensor([1.0, 10.0, 0.01])[:d] + torch.tensor([5.0, -3.0, 0.0])[:d]


def flat_frames(seed=0):
    """Frames (40, 12, 4) that vary along two directions only."""
    plane = torch.randn(2, 4, generator=seeded(99))
    return torch.randn(40, 12, 2, generator=seeded(seed)) @ plane + torch.tensor([1.0, 2.0, 3.0, 4.0])


def chain(x):
    """Normalise, stack two frames a token, whiten."""
    normalize = Normalize.fit(x)
    stacked = Chain(normalize, Stack(2))
    return Chain(normalize, Stack(2), Whiten.fit(stacked.encode(x)))


@pytest.mark.parametrize(
    "make",
    [Normalize.fit, lambda x: Stack(3), Whiten.fit, chain, lambda x: Chain()],
    ids=["normalize", "stack", "whiten", "chain", "empty"],
)
def test_decode_undoes_encode(make):
    x = frames()
    codec = make(x)
    torch.testing.assert_close(codec.decode(codec.encode(x)), x, rtol=1e-4, atol=1e-4)


def test_normalised_numbers_have_mean_zero_and_variance_one():
    x = frames()
    tokens = Normalize.fit(x).encode(x).flatten(0, 1)
    torch.testing.assert_close(tokens.mean(0), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(tokens.std(0, unbiased=False), torch.ones(3), atol=1e-4, rtol=0)


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e6])
def test_a_number_that_never_varies_keeps_its_scale(constant):
    x = frames()
    x[..., 1] = constant
    codec = Normalize.fit(x)
    assert codec.std[1] == 1
    torch.testing.assert_close(codec.encode(x)[..., 1], torch.zeros(40, 12), atol=1e-2, rtol=0)
    torch.testing.assert_close(codec.decode(codec.encode(x)), x, rtol=1e-4, atol=1e-4)


def test_statistics_are_of_the_data_they_were_fitted_to_and_no_other():
    train, other = frames(seed=0), frames(seed=1) + 100
    codec = Normalize.fit(train)
    torch.testing.assert_close(codec.encode(other).mean(), ((other - train.mean((0, 1))) / train.std((0, 1))).mean(), rtol=1e-2, atol=0)


def test_stack_lays_frames_side_by_side_in_order():
    x = torch.arange(12.0).view(1, 6, 2)
    assert Stack(3).encode(x).tolist() == [[[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]]


def test_split_undoes_stacking_and_keeps_its_shapes():
    codec = Split(2, torch.tensor([1.0, 2.0, 3.0]))
    x = torch.randn(3, 4, 6, generator=seeded(0))
    tokens = codec.encode(x)
    assert tokens.shape == (3, 8, 3)
    assert torch.equal(tokens[:, 0], x[:, 0, :3])
    assert torch.equal(tokens, Stack(2).decode(x))
    assert torch.equal(codec.decode(tokens), x)
    assert codec_traits(build_codec(describe_codec(Chain(Stack(5), codec)))).stack == 5
    with pytest.raises(ValueError, match="groups of 2"):
        codec.decode(tokens[:, :3])


def test_stack_refuses_frames_that_do_not_fill_a_token():
    with pytest.raises(ValueError, match=r"12 frames do not fill tokens of 5; use a multiple of 5"):
        Stack(5).encode(frames())


def test_whitened_directions_are_uncorrelated_with_variance_one():
    x = frames()
    tokens = Whiten.fit(x, cut=1e-6).encode(x).flatten(0, 1).double()
    torch.testing.assert_close(tokens.T @ tokens / len(tokens), torch.eye(3, dtype=torch.float64), atol=1e-3, rtol=0)


def test_directions_that_never_vary_are_dropped_and_put_back():
    x = flat_frames()
    codec = Whiten.fit(x)
    assert codec.encode(x).shape == (40, 12, 2)
    torch.testing.assert_close(codec.decode(codec.encode(x)), x, atol=1e-4, rtol=1e-4)


def test_what_leaves_the_plane_of_the_data_comes_back_onto_it():
    x = flat_frames()
    codec = Whiten.fit(x)
    _, _, directions = torch.linalg.svd((x - x.mean((0, 1))).flatten(0, 1), full_matrices=True)
    off = codec.decode(codec.encode(x + 3 * directions[-1]))
    torch.testing.assert_close(off, x, atol=1e-3, rtol=1e-3)


def test_keep_takes_the_directions_that_vary_most():
    x = frames()
    codec = Whiten.fit(x, keep=1)
    assert codec.encode(x).shape == (40, 12, 1)
    assert codec.basis.abs().argmax() == 1
    assert codec.scale.item() == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize(("n", "keep"), [(50, None), (50, 4), (8, 4), (3, 5)])
def test_principal_directions_are_those_of_the_singular_values(n, keep):
    """From the covariance, and from the Gram matrix where rows are few and directions fewer."""
    rows = torch.randn(n, 12, generator=seeded(0), dtype=torch.float64) * torch.arange(1, 13)
    directions, variance = principal_directions(rows, keep)
    _, values, vectors = torch.linalg.svd(rows)
    k = min(n, keep or 12)
    assert directions.shape == (12, keep or 12)
    torch.testing.assert_close(directions.T @ directions, torch.eye(keep or 12, dtype=torch.float64))
    torch.testing.assert_close(variance[:k], values[:k] ** 2 / n)
    torch.testing.assert_close((directions[:, :k] * vectors[:k].T).sum(0).abs(), torch.ones(k, dtype=torch.float64))


def test_a_chain_decodes_in_reverse_order():
    x = flat_frames()
    codec = chain(x)
    assert codec.encode(x).shape == (40, 6, 4)
    torch.testing.assert_close(codec.decode(codec.encode(x)), x, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("fit", [Normalize.fit, Whiten.fit])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_values_are_named_with_their_place(fit, bad):
    x = frames()
    x[2, 5, 1] = bad
    with pytest.raises(ValueError, match=r"1 NaN or infinite values, the first at index \(2, 5, 1\)"):
        fit(x)


def test_there_must_be_something_to_fit():
    with pytest.raises(ValueError, match="empty"):
        Normalize.fit(torch.zeros(0, 3))
    with pytest.raises(ValueError, match="at least two"):
        Whiten.fit(torch.zeros(1, 3))
    for constant in (0.0, 0.1, 1e6):
        with pytest.raises(ValueError, match="never vary"):
            Whiten.fit(torch.full((1000, 3), constant))


@pytest.mark.parametrize(
    "make", [Normalize.fit, Whiten.fit, chain, lambda x: Chain(chain(x))], ids=["normalize", "whiten", "chain", "nested"]
)
def test_statistics_are_saved_with_a_model(make, tmp_path):
    x = flat_frames()
    codec = make(x)
    tokens = codec.encode(x)
    model = DiffusionForcing(RNN(tokens.shape[-1], hidden=8, levels=10), NoiseSchedule(cosine(10)), codec=codec)
    model.save_pretrained(tmp_path)
    loaded = DiffusionForcing.from_pretrained(tmp_path).codec
    assert torch.equal(loaded.encode(x), tokens)
    assert torch.equal(loaded.decode(tokens), codec.decode(tokens))


@pytest.mark.parametrize(
    "make",
    [
        Normalize.fit,
        Whiten.fit,
        Rotate.fit,
        chain,
        lambda x: Chain(chain(x)),
        lambda x: Chain(Stack(2), Normalize.fit(Stack(2).encode(x))),
    ],
    ids=["normalize", "whiten", "rotate", "chain", "nested", "stacked first"],
)
def test_a_codec_knows_how_much_it_stretches_raw_data(make):
    """ln |det| of the derivative of a token by the frames it is made of."""
    x = frames().double()
    codec = make(frames()).double()
    stack = codec_traits(codec).stack
    derivative = torch.autograd.functional.jacobian(lambda part: codec.encode(part[None])[0, 0], x[0, :stack])
    exact = torch.linalg.slogdet(derivative.reshape(3 * stack, 3 * stack))[1]
    torch.testing.assert_close(codec_traits(codec).log_det, exact, rtol=1e-5, atol=1e-5)


def test_a_codec_that_drops_directions_has_no_determinant():
    for codec in (Whiten.fit(flat_frames()), chain(flat_frames()), Chain(nn.Identity(), Stack(2)), None):
        assert codec_traits(codec).log_det is None


def test_a_description_gives_a_codec_of_the_same_shapes():
    codec = chain(flat_frames())
    copy = build_codec(describe_codec(codec))
    assert {n: b.shape for n, b in copy.named_buffers()} == {n: b.shape for n, b in codec.named_buffers()}
    assert copy.parts[1].frames == 2
    assert build_codec(describe_codec(None)) is None


def test_a_codec_we_do_not_know_is_refused_before_anything_is_written(tmp_path):
    model = DiffusionForcing(RNN(2, hidden=8, levels=10), NoiseSchedule(cosine(10)), codec=nn.Identity())
    with pytest.raises(ValueError, match="Identity cannot be saved with a model; use one of Chain"):
        model.save_pretrained(tmp_path / "model")
    assert not list(tmp_path.glob("model/*"))


@pytest.mark.parametrize("make", [Normalize.fit, lambda x: Stack(3), lambda x: Chain(Normalize.fit(x), Stack(3))])
@pytest.mark.parametrize("shape", [(3,), (1, 1, 3), (1, 12, 3), (40, 12, 3), (40, 1, 3)])
def test_an_error_is_scaled_as_the_data_are(make, shape):
    x, std = frames(), 0.1 + torch.rand(shape, generator=seeded(1))
    codec = make(x)
    encoded = codec.encode_std(std)
    expected = (codec.encode(x.double() + std) - codec.encode(x.double())).float()
    assert torch.allclose(encoded.expand_as(expected), expected, rtol=1e-4)


def test_errors_of_rotated_tokens_are_of_one_size():
    x = frames()
    whiten = Whiten.fit(x)
    noise = whiten.encode(x + 0.1 * torch.randn(x.shape, generator=seeded(1))) - whiten.encode(x)
    assert torch.allclose(whiten.encode_std(torch.tensor(0.1)), noise.flatten(0, 1).std(0), rtol=0.1)
    assert Rotate.fit(x).encode_std(torch.tensor(0.1)) == pytest.approx(0.1)
    for codec in (Rotate.fit(x), whiten, Chain(Normalize.fit(x), whiten)):
        with pytest.raises(ValueError, match="one number"):
            codec.encode_std(torch.tensor([0.1, 0.1, 0.1]))


@pytest.mark.parametrize("shape", [(40, 12, 1), (40, 12, 2), (3, 12), ()])
def test_frames_of_another_size_are_refused_not_broadcast(shape):
    with pytest.raises(ValueError, match=r"frames of \(3,\); got"):
        Normalize.fit(frames()).encode(torch.zeros(shape))
