"""The learned decoder: trained on what a model makes of noisy tokens, with the model itself frozen, and streamed in roll-outs."""

import dataclasses

import numpy as np
import pytest
import torch
from oracles import randomised, seeded
from small import differing, small, walks_model, weights

from diffusion_forcing import DiffusionForcing
from diffusion_forcing.backbones import SpaceTimeConfig
from diffusion_forcing.engine.config import ModelConfig, replace
from diffusion_forcing.engine.media import to_floats
from diffusion_forcing.engine.train import train
from diffusion_forcing.sampling import Sampler
from diffusion_forcing.solver import amplitudes, solver_step
from diffusion_forcing.video.codec import Decoder, Patches, PatchesWithDecoder, Pixels
from diffusion_forcing.video.decoder import DecoderNoise, DecoderObjective, StreamingDecoder, warp_frames
from diffusion_forcing.video.lpips import LPIPS
from diffusion_forcing.video.play import Player
from diffusion_forcing.video.task import Video
from diffusion_forcing.windows import Batch

TASK = small("labyrinth").task


@pytest.fixture
def model():
    return DiffusionForcing.from_pretrained(walks_model(TASK))


def experiment(**changes):
    return small("labyrinth", stage="decoder", **changes)


def decoding(model, widths=(6, 4), perceptual=0, steps=1, warp_previous=False, **options):
    """An objective of a decoder, and the model with it."""
    objective = DecoderObjective(widths, perceptual=perceptual, steps=steps, warp_previous=warp_previous, **options)
    return objective, objective.prepare(model)


def batch(model, number=3):
    """Frames as the training of a decoder has them, their levels and conditions."""
    assert isinstance(TASK, Video)
    source = TASK.data_as(model.codec, raw=True).train
    one = source.read(source.draw(number, seeded(0)))
    return one.x, torch.randint(0, 1001, one.x.shape[:2], generator=seeded(1)), one.cond


def test_an_untrained_decoder_adds_nothing(model):
    patches = model.codec
    learned = PatchesWithDecoder(patches, Decoder(8, 2, 4, (6, 4)))
    tokens = torch.randn(2, 3, 8, 4, 4, generator=seeded(0))
    torch.testing.assert_close(learned.decode(tokens), patches.decode(tokens))
    randomised(learned.decoder, seed=1)
    assert (learned.decode(tokens) - patches.decode(tokens)).abs().max() > 0.01


def test_tokens_stay_the_same(model):
    frames = torch.rand(2, 4, 16, 16, 3, generator=seeded(0))
    before = model.codec.encode(frames)
    assert torch.equal(decoding(model, (6, 4))[1].codec.encode(frames), before)
    assert torch.equal(model.codec.variance, model.codec.patches.variance)


def test_each_token_is_decoded_by_itself(model):
    """Without a warp, the frames of one token depend on no other."""
    codec = decoding(model, (6, 4))[1].codec
    randomised(codec.decoder, seed=1)
    tokens = torch.randn(2, 3, 8, 4, 4, generator=seeded(0))
    whole = codec.decode(tokens)
    torch.testing.assert_close(whole[1:, 2:4], codec.decode(tokens[1:, 1:2]))


# Decoders that read the last frame, warped.


@pytest.fixture
def moving():
    """A model that moves pixels, untrained, in a world of 16 px with patches of 4, two frames a token."""
    data = TASK.data()
    backbone = SpaceTimeConfig(hidden=8, layers=1, heads=2, warp=True)
    return ModelConfig(backbone).build(data.train.event, data.train.cond_width, data.codec).eval()


def warping(model, seed=None):
    """An objective, and the decoder that it trains, which warps the frame before."""
    objective, model = decoding(model, warp_previous=True)
    if seed is not None:
        randomised(model.codec.decoder, seed=seed)
    return objective, model.codec.decoder


def test_only_models_with_a_flow_warp_warp_the_last_frame(model, moving):
    assert not warping(model)[1].warp_previous
    assert warping(moving)[1].warp_previous
    assert not decoding(DiffusionForcing.from_pretrained(walks_model(TASK)), (6, 4))[1].codec.decoder.warp_previous


def test_invisible_pixels_do_not_count(moving):
    _, decoder = warping(moving, seed=1)
    tokens, before = torch.randn(3, 8, 4, 4, generator=seeded(0)), torch.randn(3, 6, 16, 16, generator=seeded(1))
    nothing = decoder(tokens)
    torch.testing.assert_close(decoder(tokens, before, torch.zeros(3, 2, 16, 16)), nothing)
    assert (decoder(tokens, before, torch.ones(3, 2, 16, 16)) - nothing).abs().max() > 0.01


def test_a_decoder_that_keeps_all_of_a_still_frame_repeats_it(moving):
    """A fresh warp moves nothing; a gate that is open then keeps the frame that decoding began with."""
    _, decoder = warping(moving)
    torch.nn.init.constant_(decoder.gate.bias, 30.0)
    tokens = torch.randn(2, 4, 8, 4, 4, generator=seeded(0))
    frame, cond = torch.rand(2, 16, 16, 3, generator=seeded(1)), torch.randn(2, 3, 4, generator=seeded(2))
    drawn = StreamingDecoder(moving, tokens[:, 0], frame)(tokens[:, 1:], cond)
    torch.testing.assert_close(drawn, frame[:, None].expand_as(drawn), atol=1e-4, rtol=0)


def test_streamed_frames_are_those_decoded_together(moving):
    warping(moving, seed=1)
    randomised(moving.backbone, seed=2)
    with torch.no_grad():
        moving.backbone.warp.flow_out.weight.mul_(0.02)  # so that pixels come from within the picture
        moving.backbone.warp.flow_out.bias.zero_()
    tokens, cond = torch.randn(2, 5, 8, 4, 4, generator=seeded(0)), torch.randn(2, 5, 4, generator=seeded(1))
    whole, one_by_one = StreamingDecoder(moving)(tokens, cond), StreamingDecoder(moving)
    parts = [one_by_one(tokens[:, i : i + 1], cond[:, i : i + 1]) for i in range(5)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    # frames depend on those before, on none that come later, and on the actions between
    torch.testing.assert_close(StreamingDecoder(moving)(tokens[:, :3], cond[:, :3]), whole[:, :6])
    assert (StreamingDecoder(moving)(tokens[:, 1:], cond[:, 1:]) - whole[:, 2:]).abs().max() > 1e-3
    assert (StreamingDecoder(moving)(tokens, cond + 1) - whole)[:, 2:].abs().max() > 1e-4


def test_training_warps_decoded_frames_and_sometimes_true_ones(moving):
    objective, _ = warping(moving, seed=1)
    x, _, cond = batch(moving)
    frames, denoised = Pixels(2).decode(x), torch.randn(3, x.shape[1], 8, 4, 4, generator=seeded(4))
    drawn = StreamingDecoder(moving)(denoised, cond)
    for total, last in ((1, drawn), (4, frames)):
        k = torch.zeros(x.shape[:2], dtype=torch.long)
        k[:, 0] = total
        warped = objective.warped(moving, frames, denoised, k, cond)
        assert not warped[:, 0].any()
        torch.testing.assert_close(warped[:, 1:], warp_frames(moving, last[:, 1:-1:2].clamp(0, 1), denoised[:, :-1], cond[:, 1:]))


def test_a_decoder_trained_without_a_warp_starts_as_it_was(moving):
    plain = decoding(moving, (6, 4))[1].codec
    randomised(plain.decoder, seed=1)
    grown = decoding(moving, warp_previous=True)[1].codec
    assert grown.decoder.warp_previous
    tokens = torch.randn(2, 3, 8, 4, 4, generator=seeded(0))
    torch.testing.assert_close(grown.decode(tokens), plain.decode(tokens), atol=1e-5, rtol=1e-5)


def test_a_warping_decoder_is_trained_saved_rolled_out_and_played(moving, tmp_path):
    moving.save_pretrained(tmp_path / "moving")
    options = replace(experiment(train__steps=2, train__init=str(tmp_path / "moving")), objective__widths=(6, 4))
    train(options, tmp_path / "decoded", quiet=True)
    changed = {name for name in weights(tmp_path / "decoded") if "decoder.merge" in name or "decoder.gate" in name}
    assert len(changed) == 6
    trained = DiffusionForcing.from_pretrained(tmp_path / "decoded" / "model")
    assert isinstance(trained.codec, PatchesWithDecoder)
    assert trained.codec.decoder.warp_previous
    frames, actions = TASK.test_clips(2, 8)
    frames_out = np.concatenate(list(TASK.roll_out(trained, 4, frames[:, :4], actions, generator=seeded(0))), axis=1)
    assert frames_out.shape == (2, 4, 16, 16, 3)
    assert TASK.frame_sampler(trained).infill(frames[:, :2], frames[:, 4:6], 1, actions=actions, draws=2).shape == (2, 2, 16, 16, 3)
    assert Player(TASK, trained).step(np.zeros((2, 2), np.float32)).shape == (2, 16, 16, 3)


def test_training_changes_the_decoder_only_and_lowers_its_error(tmp_path):
    options = {"steps": 150, "lr": 1e-2, "validate_every": 150, "ema": 0.9}
    objective = DecoderObjective(widths=(16, 8), max_level=0.0, perceptual=0.0)
    train(experiment(objective=objective, **{f"train__{name}": value for name, value in options.items()}), tmp_path, quiet=True)
    before = weights_of(walks_model(TASK))
    after = {name.replace("codec.patches.", "codec."): value for name, value in weights(tmp_path).items() if ".decoder." not in name}
    assert before.keys() == after.keys()
    assert not differing(before, after)
    drawer = DiffusionForcing.from_pretrained(tmp_path / "model")
    assert isinstance(drawer.codec, PatchesWithDecoder)
    frames, _ = TASK.test_clips(6, 8, part="real")
    tokens = drawer.codec.encode(to_floats(frames))
    plain, drawn = ((codec.decode(tokens) - to_floats(frames)).abs().mean() for codec in (drawer.codec.patches, drawer.codec))
    assert drawn < 0.95 * plain


def weights_of(folder):
    return DiffusionForcing.from_pretrained(folder).state_dict()


def test_a_model_with_a_decoder_is_trained_further_with_its_decoder_frozen(tmp_path):
    train(experiment(train__steps=2), tmp_path / "decoded", quiet=True)
    trained = DiffusionForcing.from_pretrained(tmp_path / "decoded" / "model")
    frames, actions = TASK.test_clips(2, 8)
    assert np.concatenate(list(TASK.roll_out(trained, 4, frames[:, :4], actions)), axis=1).shape == (2, 4, 16, 16, 3)
    further = replace(
        small("labyrinth"), train__init=str(tmp_path / "decoded"), train__steps=2, model__backbone__hidden=8, model__variance_weighting=0.0,
        model__backbone__warp=False
    )  # fmt: skip
    train(further, tmp_path / "further", quiet=True)
    before, after = weights(tmp_path / "decoded"), weights(tmp_path / "further")
    changed = differing(before, after)
    assert any("backbone" in name for name in changed)
    assert not any("codec" in name for name in changed)


def test_a_decoder_can_be_trained_further(tmp_path):
    train(experiment(train__steps=2), tmp_path / "first", quiet=True)
    train(experiment(train__steps=2, train__init=str(tmp_path / "first"), objective__widths=(4, 4)), tmp_path / "second", quiet=True)
    changed = differing(weights(tmp_path / "first"), weights(tmp_path / "second"))
    assert changed
    assert all("decoder" in name for name in changed)


def test_clean_tokens_are_denoised_to_themselves(model):
    x, k, cond = batch(model)
    objective, _ = decoding(randomised_backbone(model), max_level=1.0)
    tokens, noise = model.codec.encode(Pixels(2).decode(x)), torch.randn(x.shape, generator=seeded(2))
    torch.testing.assert_close(objective.denoised(model, tokens, torch.zeros_like(k), cond, noise), tokens, atol=1e-5, rtol=0)
    denoised = objective.denoised(model, tokens, torch.full_like(k, 1000), cond, noise)
    assert (denoised - tokens).abs().mean() > 0.1
    # after clean ones, whatever their own levels: the last token's does not depend on the levels before
    mixed = torch.full_like(k, 1000)
    mixed[:, :-1] = 300
    torch.testing.assert_close(objective.denoised(model, tokens, mixed, cond, noise)[:, -1], denoised[:, -1])


def test_several_steps_denoise_as_sampling_does(model):
    x, k, cond = batch(model)
    objective, _ = decoding(randomised_backbone(model), max_level=0.5, steps=3)
    tokens, noise = model.codec.encode(Pixels(2).decode(x)), torch.randn(x.shape, generator=seeded(2))
    torch.testing.assert_close(objective.denoised(model, tokens, torch.zeros_like(k), cond, noise), tokens, atol=1e-5, rtol=0)
    k = torch.full_like(k, 600)
    denoised = objective.denoised(model, tokens, k, cond, noise)
    # the first token has no past: it is sampled as usual, from level 300 in rungs of 100
    x = model.schedule.add_noise(tokens, k // 2, noise.flatten(2)[:, :, : tokens[0, 0].numel()].view_as(tokens))[:, :1]
    for level in (300, 200, 100):
        prediction = model.predict(x, torch.full_like(k[:, :1], level), cond[:, :1])
        rung = amplitudes(model.schedule, *(torch.full_like(k[:, :1], one) for one in (level, level - 100)), x)
        x = solver_step(x, prediction, rung, Sampler(solver="euler_angle"))
    torch.testing.assert_close(denoised[:, :1], x)
    single = dataclasses.replace(objective, steps=1)
    assert (single.denoised(model, tokens, k, cond, noise) - denoised).abs().max() > 0.01


def randomised_backbone(model):
    randomised(model.backbone, seed=3)
    return model


def test_lpips_counts_beside_pixels(model, monkeypatch):
    lpips = LPIPS((4, 4, 4, 4, 4), seeded(0))
    monkeypatch.setattr(LPIPS, "pretrained", lambda: lpips)
    x, k, cond = batch(model)
    noise = torch.randn(x.shape, generator=seeded(2))
    plain, bare = decoding(DiffusionForcing.from_pretrained(walks_model(TASK)))
    perceptual, model = decoding(model, perceptual=2.0)
    for parameter in model.parameters():
        parameter.requires_grad_(any(parameter is one for one in perceptual.parameters(model)))
    inputs = Batch(x, cond, torch.ones_like(k, dtype=torch.bool)), DecoderNoise(noise, k)
    plain_error, error = plain(bare, *inputs), perceptual(model, *inputs)
    assert plain_error.shape == error.shape == k.shape
    frames = Pixels(2).decode(x)
    drawn = model.codec.decode(perceptual.denoised(model, model.codec.encode(frames), k, cond, noise))
    which = k[0, 1] % 2 + 2  # of the second token's two frames
    apart = lpips(*(2 * f[:1, which].movedim(-1, 1) - 1 for f in (drawn, frames)))
    torch.testing.assert_close(error[0, 1] - plain_error[0, 1], 2 * apart[0])
    error.sum().backward()
    assert all((p.grad is not None and torch.isfinite(p.grad).all()) == ("decoder" in name) for name, p in model.named_parameters())
    assert not any("lpips" in name for name in model.state_dict())


def test_a_decoder_needs_a_model(tmp_path):
    with pytest.raises(ValueError, match=r"DecoderObjective trains a part of a trained model: .* by --train.init"):
        train(experiment(train__init=None), tmp_path, quiet=True)


def test_a_model_that_reads_other_conditions_is_refused(tmp_path):
    with pytest.raises(ValueError, match="reads conditions of 4 numbers a token, and this task gives 0"):
        train(experiment(task__action_conditioned=False), tmp_path, quiet=True)


def test_a_decoder_that_is_trained_further_keeps_its_widths(model):
    trained = decoding(model, (6, 4))[1]
    with pytest.raises(ValueError, match=r"a decoder of widths \[6, 4\] already; got \[8, 4\]: give the same --objective.widths"):
        decoding(trained, (8, 4))


def test_patches_of_another_size_are_refused(model):
    with pytest.raises(ValueError, match=r"that model's patches have 4 px, this task's 8; add --task.patch 4"):
        dataclasses.replace(TASK, patch=8).data_as(model.codec)


def test_a_decoder_needs_patches(model):
    model.codec = Pixels(2)
    with pytest.raises(ValueError, match="for tokens of patches; this model's are Pixels, which need none"):
        decoding(model)


def test_widths_lead_from_a_patch_to_a_pixel(model):
    assert isinstance(model.codec, Patches)
    with pytest.raises(ValueError, match=r"3 of them 8 times as large; got patches of 4 px, give as many widths as halve them to one"):
        decoding(model, (4, 4, 4))


@pytest.mark.parametrize("options", [{"max_level": 1.5}, {"max_level": -0.1}, {"perceptual": -1.0}])
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match=r"max_level .* perceptual"):
        DecoderObjective(**options)
