"""Frames, tokens and windows of the mazes' data."""

import numpy as np
import pytest
import torch
from mazes import STACK, UMAZE, WIDTH, codec, free_flight, motion_errors, streams
from oracles import seeded
from torch import nn

from diffusion_forcing.codecs import Stack
from diffusion_forcing.planning.data import Transitions
from diffusion_forcing.planning.envs.maze2d import step
from diffusion_forcing.planning.tokens import FrameWindows, fit_codec, frames_of, present_frames

# Frames.


def test_a_frame_is_an_action_and_the_observation_after_it():
    observations = np.arange(40, dtype=np.float32).reshape(2, 5, 4)
    frames, before = frames_of(Transitions(observations, 100 + observations[..., :2]))
    assert frames.shape == (2, 4, 6)
    assert torch.equal(before, torch.from_numpy(observations[:, :-1]))
    assert torch.equal(frames[..., 2:], torch.from_numpy(observations[:, 1:]))
    assert torch.equal(frames[..., :2], 100 + before[..., :2])


def test_a_present_coasts_to_the_observation_as_a_ball_would():
    observation = torch.tensor([[2.8, 1.8, 0.7, -0.4], [2.8, 2.8, 0.0, 0.0], [1.8, 2.8, -0.5, 0.0]], dtype=torch.float64)
    frames = present_frames(observation, STACK).numpy()
    assert frames.shape == (3, STACK, 6)
    np.testing.assert_array_equal(frames[:, -1, 2:], observation)
    position, velocity = frames[:, 0, 2:4], frames[:, 0, 4:]
    for t in range(1, STACK):
        position, velocity, touched = step(UMAZE, position, velocity, frames[:, t, :2])
        assert not touched.any()
        np.testing.assert_allclose(np.concatenate([position, velocity], axis=1), frames[:, t, 2:], atol=1e-13)


# Tokens.


def sampled_frames(codec, number=300):
    """Frames (n, stack, 6) decoded from tokens of noise of the data's variance."""
    return codec.decode(torch.randn(number, 1, len(codec.variance), generator=seeded(2)) * codec.variance.sqrt())


def worst_error(frames):
    """The largest violation of free flight within tokens: of velocities in metres per second, of positions in metres."""
    return tuple(part.abs().max().item() for part in motion_errors(frames[:, 1:], frames[:, 0, 2:]))


def test_a_token_of_ten_frames_holds_24_numbers():
    assert codec().variance.shape == (WIDTH,) == (24,)
    assert codec().encode(torch.zeros(2, 30, 6)).shape == (2, 3, 24)
    assert fit_codec(frames_of(streams())[0], 4).variance.shape == (12,)
    one = fit_codec(frames_of(streams())[0], 1)
    x = torch.randn(2, 5, 6)
    torch.testing.assert_close(one.decode(one.encode(x)), x, atol=1e-4, rtol=0)


def test_tokens_lose_little_of_the_data():
    """What is lost are wall contacts: their forces are not among a token's numbers."""
    frames, _ = frames_of(streams(100_000))
    frames = frames[:, : frames.shape[1] // STACK * STACK]
    error = (codec().decode(codec().encode(frames)) - frames).abs()
    assert error[..., :2].mean() < 0.005
    assert error[..., 2:4].mean() < 0.02
    assert error[..., 4:].mean() < 0.04


def test_decoded_tokens_obey_the_dynamics_of_their_data():
    fitted = fit_codec(free_flight(400, STACK)[0], STACK)
    assert fitted.variance.shape == (24,)
    assert max(worst_error(sampled_frames(fitted))) < 1e-4


def test_the_present_is_a_token_like_any_other():
    fitted = fit_codec(free_flight(400, STACK)[0], STACK)
    observation = torch.tensor([[2.8, 1.8, 0.7, -0.4], [1.0, 3.1, -4.0, 2.0]])
    frames = present_frames(observation, STACK)
    torch.testing.assert_close(fitted.decode(fitted.encode(frames)), frames, atol=1e-3, rtol=0)


def test_no_token_crosses_from_one_stream_to_the_next():
    flown, _ = free_flight(40, 10 * STACK + 3)
    assert max(worst_error(sampled_frames(fit_codec(flown, STACK)))) < 1e-4


def test_decoded_tokens_obey_free_flight_though_data_touch_walls():
    assert max(worst_error(sampled_frames(fit_codec(frames_of(streams(100_000))[0], STACK)))) < 1e-3


# Windows.


class StackOnly(nn.Module):
    """Frames stacked and left as they are."""

    encode = Stack(STACK).encode


def numbered(lengths, frame=6):
    """Streams whose frames say where they are: 1000 * stream + time; the observation before is half a step earlier."""
    longest = max(lengths)
    place = 1000.0 * torch.arange(len(lengths))[:, None] + torch.arange(longest)
    place[torch.arange(longest) >= torch.tensor(lengths)[:, None]] = torch.nan
    before = torch.stack([place - 0.5, place - 0.5, torch.zeros_like(place), torch.zeros_like(place)], dim=-1)
    return place[..., None].expand(-1, -1, frame).clone(), before


def windows_of(lengths, tokens=4, short=0.0):
    return FrameWindows(*numbered(lengths), tokens, STACK, StackOnly(), (60,), short)


def check_windows(windows, drawn):
    """Frames follow one another within one stream, after a present that is the observation before them."""
    raw = windows.raw(drawn)
    tokens = windows.length_of(drawn)
    assert raw.shape == (len(drawn), tokens * STACK, 6)
    assert torch.isfinite(raw).all()
    first = 1000 * drawn[:, 0] + drawn[:, 1]
    assert torch.equal(raw[:, STACK:, 0], first[:, None] + torch.arange((tokens - 1) * STACK).float())
    assert torch.equal(raw[:, :STACK, 2], (first - 0.5)[:, None].expand(-1, STACK))
    batch = windows.read(drawn)
    assert torch.equal(batch.x, raw.reshape(len(drawn), tokens, 60))
    assert batch.cond.shape == (len(drawn), tokens, 0)
    assert batch.mask.all()


def test_windows_stay_within_a_stream_and_start_at_every_frame():
    windows = windows_of([40, 40])
    assert len(windows) == 2 * 11
    drawn = windows.draw(500, seeded(0))
    check_windows(windows, drawn)
    assert {tuple(row[:2]) for row in drawn.tolist()} == {(s, t) for s in (0, 1) for t in range(11)}
    assert set(drawn[:, 2].tolist()) == {3}


def test_windows_end_before_the_padding_of_a_stream():
    windows = windows_of([50, 12, 30, 35])
    assert len(windows) == 21 + 0 + 1 + 6
    drawn = windows.draw(800, seeded(0))
    check_windows(windows, drawn)
    assert {tuple(row[:2]) for row in drawn.tolist()} == {(0, t) for t in range(21)} | {(2, 0)} | {(3, t) for t in range(6)}
    counts = torch.bincount(drawn[:, 0], minlength=4) / 800
    torch.testing.assert_close(counts, torch.tensor([21, 0, 1, 6]) / 28, atol=0.05, rtol=0)


def test_windows_for_validation_follow_one_another():
    windows = windows_of([100, 95])
    every = windows.all()
    check_windows(windows, every)
    assert every[:, 1].tolist()[:3] == [0, 30, 60]
    assert every[:, 0].unique().tolist() == [0, 1]


def test_short_windows_are_pieces_each_with_a_present_of_its_own():
    windows = windows_of([400, 400], tokens=31, short=1.0)
    generator, lengths = seeded(0), []
    for _ in range(60):
        drawn = windows.draw(3, generator)
        check_windows(windows, drawn)
        tokens = windows.length_of(drawn) - 1
        pieces = 30 // tokens
        lengths.append(tokens)
        assert len(drawn) == 3 * pieces
        assert (drawn[:, 2] == tokens).all()
        apart = drawn[:, 1].view(3, pieces).diff(dim=1)
        assert (apart == tokens * STACK).all(), "one after another"
        assert (drawn[:, 0].view(3, pieces) == drawn[::pieces, :1]).all(), "of one stream"
    assert min(lengths) == 1
    assert max(lengths) > 15
    assert 3 <= np.median(lengths) <= 8, "log-uniform: the middle is the root of 30"


def test_a_share_of_the_batches_is_short():
    windows = windows_of([400], tokens=31, short=0.3)
    generator = seeded(0)
    whole = [windows.length_of(windows.draw(2, generator)) == 31 for _ in range(400)]
    assert np.mean(whole) == pytest.approx(0.7, abs=0.07)
    assert windows.length_of(windows.all()) == 31


def test_the_generator_of_windows_decides():
    windows = windows_of([400], tokens=31, short=0.5)
    one, same, other = ([windows.draw(4, generator) for _ in range(5)] for generator in map(seeded, (0, 0, 1)))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_impossible_windows_are_refused():
    with pytest.raises(ValueError, match="at least one more token; got 1"):
        windows_of([40], tokens=1)
    with pytest.raises(ValueError, match="needs 30 frames, but the longest stream has 29"):
        windows_of([29, 12])
