"""Frames as tokens: pixels side by side, or patches in their principal directions."""

import json

import pytest
import torch
from einops import rearrange
from oracles import seeded

from diffusion_forcing.codecs import Chain, build_codec, describe_codec
from diffusion_forcing.video.codec import Patches, Pixels


def clips(n=6, t=8, height=8, width=12, seed=0):
    """Clips (n, t, h, w, 3) from 0 to 1: waves that move and differ by place, and some noise."""
    generator = seeded(seed)
    phase, speed = torch.rand(2, n, 1, 1, 1, 3, generator=generator) * 6
    time, y, x = torch.arange(t)[:, None, None, None], torch.arange(height)[:, None, None], torch.arange(width)[:, None]
    waves = torch.sin(phase + x / 3 + y / 5 + speed * time / 9) + 0.5 * torch.sin(2 * phase - y / 2 + x / 7)
    return (0.5 + 0.15 * waves + 0.1 * (y / height - 0.5) + 0.03 * torch.randn(n, t, height, width, 3, generator=generator)).clamp(0, 1)


def patches_of(frames, stack, patch):
    """Rows (b * t * gh * gw, numbers of a patch) in double precision, cut by hand."""
    return rearrange(frames, "b (t s) (h p) (w q) c -> (b t h w) (s p q c)", s=stack, p=patch, q=patch).double()


def spectrum(frames, stack, patch):
    """Variances of the principal directions of patches, the largest first."""
    rows = patches_of(frames, stack, patch)
    centred = rows - rows.mean(0)
    return torch.linalg.svdvals(centred) ** 2 / len(rows)


# Pixels.


@pytest.mark.parametrize("stack", [1, 2, 4])
def test_pixels_come_back_exactly(stack):
    """Of bytes: what 0 to 255 becomes on the way to tokens and back is the same byte."""
    frames = torch.randint(0, 256, (2, 8, 4, 6, 3), generator=seeded(0))
    codec = Pixels(stack)
    tokens = codec.encode(frames / 255)
    assert tokens.shape == (2, 8 // stack, 3 * stack, 4, 6)
    assert tokens.min() >= -1
    assert tokens.max() <= 1
    back = codec.decode(tokens)
    torch.testing.assert_close(back, frames / 255, rtol=0, atol=1e-6)
    assert torch.equal((back * 255).round().long(), frames)


def test_pixels_stack_frames_in_order_as_channels():
    frames = torch.rand(1, 4, 2, 3, 3, generator=seeded(0))
    tokens = Pixels(2).encode(frames)
    for t in range(4):
        torch.testing.assert_close(tokens[0, t // 2, 3 * (t % 2) : 3 * (t % 2) + 3], 2 * frames[0, t].permute(2, 0, 1) - 1)


@pytest.mark.parametrize("codec", [Pixels(3), Patches.fit(clips(t=6), stack=3, patch=4, components=4)], ids=["pixels", "patches"])
def test_frames_that_do_not_fill_a_token_are_refused(codec):
    with pytest.raises(ValueError, match="a token stacks frames, so their number must be a multiple of: 3 must divide 8"):
        codec.encode(clips(t=8))


# Patches.


@pytest.mark.parametrize(("stack", "patch"), [(1, 2), (2, 2), (1, 4)])
@pytest.mark.parametrize("whiten", [0.0, 0.5, 1.0])
def test_all_directions_bring_the_frames_back(stack, patch, whiten):
    frames = clips(n=12)
    side = stack * patch * patch * 3
    codec = Patches.fit(frames, stack, patch, side, whiten)
    tokens = codec.encode(frames)
    assert tokens.shape == (12, 8 // stack, side, 8 // patch, 12 // patch)
    torch.testing.assert_close(codec.decode(tokens), frames, rtol=0, atol=1e-4)
    other = clips(seed=1)
    torch.testing.assert_close(codec.decode(codec.encode(other)), other, rtol=0, atol=1e-4)


def test_a_place_of_a_token_is_its_patch_alone():
    frames = clips()
    codec = Patches.fit(frames, 2, 4, 6)
    tokens = codec.encode(frames)
    changed = frames.clone()
    changed[:, 2:4, 4:8, 8:12] = 0  # token 1, row 1, column 2
    differs = (codec.encode(changed) != tokens).any(2)
    expected = torch.zeros(6, 4, 2, 3, dtype=torch.bool)
    expected[:, 1, 1, 2] = True
    assert torch.equal(differs, expected)
    decoded = codec.decode(tokens)
    tokens[:, 1, :, 1, 2] += 1
    differs = (codec.decode(tokens) != decoded).any(-1)
    assert differs[:, 2:4, 4:8, 8:12].any()
    differs[:, 2:4, 4:8, 8:12] = False
    assert not differs.any()


@pytest.mark.parametrize("whiten", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("components", [1, 5, 20])
@pytest.mark.parametrize("about", ["zero", "its mean"])
def test_fewer_directions_lose_what_the_others_vary_by(whiten, components, about):
    """No other directions do better: the squared error of a patch is the sum of the variances left out."""
    frames = clips()
    if about == "zero":  # each number of a patch, over all patches
        centred = patches_of(frames, 2, 4)
        centred = (centred - centred.mean(0)).float()
        frames = rearrange(centred, "(b t h w) (s p q c) -> b (t s) (h p) (w q) c", b=6, t=4, h=2, w=3, s=2, p=4, q=4, c=3)
    codec = Patches.fit(frames, 2, 4, components, whiten)
    lost = patches_of(codec.decode(codec.encode(frames)) - frames, 2, 4).pow(2).sum(1).mean()
    torch.testing.assert_close(lost, spectrum(frames, 2, 4)[components:].sum(), rtol=1e-3, atol=1e-6)


def test_more_directions_lose_less():
    frames = clips()
    lost = []
    for components in (1, 4, 16, 64):
        codec = Patches.fit(frames, 2, 4, components)
        lost.append((codec.decode(codec.encode(frames)) - frames).pow(2).mean().item())
    assert lost == sorted(lost, reverse=True)
    assert lost[-1] < 0.2 * lost[0]


def test_what_was_decoded_is_encoded_as_it_was():
    """Directions are orthogonal, so tokens that a model makes up survive being shown as frames."""
    codec = Patches.fit(clips(), 2, 4, 6)
    tokens = torch.randn(2, 3, 6, 2, 3, generator=seeded(1))
    torch.testing.assert_close(codec.encode(codec.decode(tokens)), tokens, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(codec.basis.T @ codec.basis, torch.eye(6), rtol=0, atol=1e-5)


@pytest.mark.parametrize("whiten", [0.0, 0.5, 1.0])
def test_tokens_have_mean_zero_at_each_place_and_the_variance_that_is_told(whiten):
    frames = clips()
    codec = Patches.fit(frames, 2, 4, 6, whiten)
    tokens = codec.encode(frames).flatten(0, 1)
    torch.testing.assert_close(tokens.mean(0), torch.zeros(6, 2, 3), rtol=0, atol=1e-4)
    assert codec.variance.shape == codec.mean.shape == (6, 2, 3)
    found = tokens.var(0, unbiased=False)
    assert (found > 0.06 * found.mean((1, 2), keepdim=True)).all()  # with a floor for places that hardly vary
    torch.testing.assert_close(codec.variance, found, rtol=1e-3, atol=1e-5)
    assert found.mean().item() == pytest.approx(1, abs=0.1)


def test_a_place_that_never_varies_is_told_to_vary_a_little():
    frames = clips()
    frames[:, :, :4, :4] = 0.3
    codec = Patches.fit(frames, 2, 4, 6)
    assert codec.encode(frames)[:, :, :, 0, 0].abs().max() < 1e-4
    overall = codec.encode(frames).flatten(0, 1).var(0, unbiased=False).mean((1, 2))
    torch.testing.assert_close(codec.variance[:, 0, 0], 0.05 * overall + 1e-6, rtol=1e-3, atol=1e-5)


def test_whitening_makes_directions_as_large_as_asked():
    """0: their own size, 1: all alike, a half: the root of their own."""
    frames = clips()
    variance = spectrum(frames, 2, 4)[:6].float()
    for whiten in (0.0, 0.5, 1.0):
        codec = Patches.fit(frames, 2, 4, 6, whiten)
        whole = rearrange(codec.encode(frames) + codec.mean, "b t c h w -> (b t h w) c")  # about one mean, not each place's
        found = whole.var(0, unbiased=False)
        torch.testing.assert_close(found / found[0], (variance / variance[0]) ** (1 - whiten), rtol=1e-3, atol=1e-4)


def test_directions_that_hardly_vary_are_not_blown_up():
    """Those below the cut are divided by what the cut says, as the largest one is by its own size."""
    frames = clips(n=2, t=2, height=4, width=4)  # two patches: all but one direction are null
    codec = Patches.fit(frames, 2, 4, 8, whiten=1.0, cut=1e-2)
    assert (codec.scale / codec.scale[0] > 0.99e-2).all()
    assert codec.encode(frames).isfinite().all()
    torch.testing.assert_close(codec.scale[-1] / codec.scale[0], torch.tensor(1e-2), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"patch": 5}, "frames are cut into patches, so their height must be a multiple of: 5 must divide 8"),
        ({"patch": 8}, "so their width must be a multiple of: 8 must divide 12"),
        ({"components": 0}, "a patch of 2 x 4 x 4 px has 96 numbers; keep 1 to 96 of them, got 0"),
        ({"components": 97}, "keep 1 to 96 of them, got 97"),
        ({"whiten": -0.1}, "whiten goes from 0.*got -0.1"),
        ({"whiten": 1.5}, "whiten goes from 0.*got 1.5"),
        ({"whiten": float("nan")}, "whiten goes from 0.*got nan"),
        ({"stack": 3}, "a token stacks frames, so their number must be a multiple of: 3 must divide 8"),
    ],
    ids=str,
)
def test_patches_that_cannot_be_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Patches.fit(clips(), **{"stack": 2, "patch": 4, "components": 6, **options})


def test_clips_that_never_vary_are_refused():
    with pytest.raises(ValueError, match="these clips never vary"):
        Patches.fit(torch.zeros(2, 4, 8, 8, 3), 2, 4, 6)


def test_frames_of_another_size_are_refused():
    codec = Patches.fit(clips(), 2, 4, 6)
    for height in (6, 16):
        with pytest.raises(ValueError, match=rf"codec is for frames of \d+ x \d+ px; got {height} x \d+, resize them"):
            codec.encode(clips(height=height))
    with pytest.raises(ValueError, match="their height must be a multiple of: 4 must divide 6"):
        Patches.fit(clips(height=6), 2, 4, 6)


# Saved with a model.


@pytest.mark.parametrize("make", [lambda: Pixels(2), lambda: Patches.fit(clips(), 2, 4, 6)], ids=["pixels", "patches"])
@pytest.mark.parametrize("chained", [False, True])
def test_a_description_and_tensors_give_the_codec_again(make, chained):
    codec = Chain(make()) if chained else make()
    copy = build_codec(json.loads(json.dumps(describe_codec(codec))))
    assert type(copy) is type(codec)
    assert {n: b.shape for n, b in copy.named_buffers()} == {n: b.shape for n, b in codec.named_buffers()}
    copy.load_state_dict(codec.state_dict())
    frames = clips(seed=1)
    tokens = codec.encode(frames)
    assert torch.equal(copy.encode(frames), tokens)
    assert torch.equal(copy.decode(tokens), codec.decode(tokens))


def test_a_chain_ends_with_the_variance_of_its_patches():
    codec = Patches.fit(clips(), 2, 4, 6)
    assert torch.equal(Chain(codec).variance, codec.variance)
    assert not hasattr(Pixels(2), "variance")


@pytest.mark.parametrize("config", [{"kind": "patches", "stack": 2}, {"kind": "pixels"}, {"kind": "tiles"}])
def test_a_description_that_is_none_is_refused(config):
    with pytest.raises(ValueError, match="codec"):
        build_codec(config)
