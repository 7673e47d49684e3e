"""Scores of video: closed forms of the Frechet distance, and moving textures that are frozen, shuffled, blurred or blown up."""

import numpy as np
import pytest
import torch

from diffusion_forcing.video import scores
from diffusion_forcing.video.lpips import LPIPS
from diffusion_forcing.video.scores import PARTS, Space, ball_radius, descriptors, frechet

LENGTH, SIZE = 12, 32


@pytest.fixture(scope="module")
def lpips():
    return LPIPS((6, 8, 12, 12, 12), torch.Generator().manual_seed(0))


# Each score of single sets, put together from its parts: what curves must agree with.


def distance(a, b, components=64, parts=1):
    space = Space.fit(b, components, parts)
    return frechet(space.project(a), space.project(b))


def frame_fd(a, b, components=64):
    """Of features (..., f). The order of frames does not matter."""
    return distance(a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1]), components)


def video_fd(a, b):
    """Of features (n, t, f)."""
    return distance(descriptors(a), descriptors(b), parts=PARTS)


def blow_up(a, b, level=0.999):
    """Share of the clips a that lie outside of the ball of b, of features (n, t, f)."""
    space = Space.fit(descriptors(b), 1, PARTS)
    reach = [np.linalg.norm(space.project(descriptors(x)), axis=-1) for x in (a, b)]
    return np.mean(reach[0] > ball_radius(reach[1], level))


def textures(n, length=LENGTH, seed=0):
    """Clips (n, length, 32, 32, 3) of a blocky texture that slides by one or two pixels a frame."""
    rng = np.random.default_rng(seed)
    found = np.empty((n, length, SIZE, SIZE, 3), np.uint8)
    for i in range(n):
        coarse = rng.integers(40, 216, (16, 16, 3)) * rng.uniform(0.9, 1)
        whole = np.kron(coarse, np.ones((4, 4, 1)))
        step, start = rng.integers(1, 3), rng.integers(0, 64)
        for t in range(length):
            found[i, t] = np.roll(whole, -(start + step * t), axis=1)[:SIZE, :SIZE]
    return found


def features(clips, lpips):
    return np.stack([lpips.features(clip) for clip in clips])


def frozen(clips):
    return np.repeat(clips[:, :1], clips.shape[1], axis=1)


def shuffled(clips):
    order = np.random.default_rng(5).permuted(np.tile(np.arange(clips.shape[1]), (len(clips), 1)), axis=1)
    return np.take_along_axis(clips, order[:, :, None, None, None], axis=1)


def blurred(clips):
    x = clips.astype(np.float64)
    for _ in range(6):
        x = (x + sum(np.roll(x, step, axis) for axis in (2, 3) for step in (-1, 1))) / 5
    return x.round().astype(np.uint8)


def exact(n, mean, covariance, seed=0):
    """Samples (n, d) whose mean and covariance are these, not only nearly."""
    x = np.random.default_rng(seed).standard_normal((n, len(mean)))
    x -= x.mean(0)
    x = x @ np.linalg.inv(np.linalg.cholesky(np.cov(x.T))).T
    return x @ np.linalg.cholesky(covariance).T + mean


@pytest.fixture(scope="module")
def sets(lpips):
    """Two real sets, and what came of the second, as clips and as features."""
    one, two = textures(60, seed=1), textures(60, seed=2)
    clips = {"real": one, "same": two, "frozen": frozen(two), "shuffled": shuffled(two), "blurred": blurred(two)}
    return clips, {name: features(x, lpips) for name, x in clips.items()}


# Frechet


def test_gaussians_whose_covariances_commute():
    a = exact(300, np.array([1.0, -2, 0.5]), np.diag([4.0, 1, 0.25]))
    b = exact(200, np.zeros(3), np.diag([1.0, 1, 9]), seed=1)
    assert frechet(a, b) == pytest.approx((1 + 4 + 0.25) + (2 - 1) ** 2 + 0 + (0.5 - 3) ** 2, rel=1e-9)


def test_gaussians_whose_covariances_do_not():
    """In two dimensions tr (A B)^(1/2) = (tr A B + 2 (det A B)^(1/2))^(1/2)."""
    one, two = np.array([[2.0, 0.8], [0.8, 1.0]]), np.array([[1.0, -0.5], [-0.5, 3.0]])
    both = one @ two
    expected = np.trace(one + two) - 2 * np.sqrt(np.trace(both) + 2 * np.sqrt(np.linalg.det(both)))
    found = frechet(exact(100, np.ones(2), one), exact(150, np.ones(2), two, seed=1))
    assert found == pytest.approx(expected, rel=1e-9)


def test_frechet_of_equal_sets_is_zero_and_it_is_symmetric():
    rng = np.random.default_rng(0)
    for n, f in ((200, 20), (20, 200), (2, 5)):
        a, b = 1000 + rng.standard_normal((n, f)), rng.standard_normal((n + 3, f)) * 2
        assert frechet(a, a) < 1e-9 * f
        assert frechet(a, b) == pytest.approx(frechet(b, a), rel=1e-9)
        assert frechet(a + 5, b + 5) == pytest.approx(frechet(a, b), rel=1e-9)


def test_fewer_samples_than_features_by_the_same_formula():
    """Features of which most are always 0 change nothing, whichever root is taken."""
    a, b = np.random.default_rng(0).standard_normal((2, 30, 4))
    wide = np.zeros((4, 100))
    wide[range(4), range(0, 40, 10)] = 1
    assert frechet(a @ wide, b @ wide) == pytest.approx(frechet(a, b), rel=1e-9)


def test_frechet_of_a_constant_set():
    b = exact(50, np.zeros(2), np.diag([4.0, 9]))
    assert frechet(np.full((5, 2), 3.0), b) == pytest.approx(18 + 13, rel=1e-9)


@pytest.mark.parametrize(("a", "b"), [((1, 3), (5, 3)), ((5, 3), (5, 4)), ((5,), (5,))])
def test_frechet_of_other_shapes_is_refused(a, b):
    with pytest.raises(ValueError, match="two samples at least"):
        frechet(np.zeros(a), np.zeros(b))


def test_frechet_of_nan_is_refused():
    with pytest.raises(ValueError, match="finite"):
        frechet(np.full((5, 2), np.nan), np.zeros((5, 2)))


# Spaces


def test_a_space_keeps_the_distance_from_the_mean_and_its_directions_are_orthonormal():
    x = np.random.default_rng(0).standard_normal((60, 30)) @ np.diag(np.linspace(0.1, 3, 30)) + 7
    found = Space.fit(x, components=10)
    assert found.directions.shape == (30, 10)
    assert np.allclose(found.directions.T @ found.directions, np.eye(10), atol=1e-9)
    places = found.project(x)
    assert np.allclose(np.linalg.norm(places, axis=1), np.linalg.norm((x - x.mean(0)) * found.scale, axis=1))
    assert (places**2).sum(1).mean() == pytest.approx(1)
    assert places[:, :10].var(0)[0] == pytest.approx(np.linalg.eigvalsh(np.cov(((x - x.mean(0)) * found.scale).T, bias=True))[-1], rel=1e-6)


def test_parts_weigh_the_same_whatever_their_units():
    x = np.random.default_rng(0).standard_normal((100, 12))
    y = x * np.repeat([1, 1000, 0.001], 4)
    a, b = Space.fit(x, 5, parts=3).project(x), Space.fit(y, 5, parts=3).project(y)
    assert np.allclose(np.abs(a), np.abs(b), atol=1e-8)


def test_what_leaves_the_real_directions_counts():
    rng = np.random.default_rng(0)
    real = np.zeros((100, 40))
    real[:, :3] = rng.standard_normal((100, 3))
    odd = real.copy()
    odd[:, 20] = 5.0
    found = Space.fit(real)
    assert found.directions.shape[1] == 3
    assert frechet(found.project(odd), found.project(real)) == pytest.approx(25 * found.scale[0] ** 2, rel=1e-3)


def test_real_samples_that_are_all_the_same():
    same = np.ones((10, 4))
    assert frame_fd(same, same) == 0
    assert frame_fd(same + 1, same) > 1


# Clips


def test_psnr():
    a = np.full((2, 3, 8, 8, 3), 100, np.uint8)
    b = a.copy()
    b[1] += 10
    found = scores.psnr(a, b)
    assert found.shape == (2, 3)
    assert np.isinf(found[0]).all()
    assert np.allclose(found[1], 20 * np.log10(25.5))
    assert scores.psnr(b[1, 0], a[1, 0]) == pytest.approx(found[1, 0])
    with pytest.raises(ValueError, match="uint8"):
        scores.psnr(a / 255, b / 255)


def test_descriptors():
    x = np.array([[0.0, 1], [2, 1], [1, 1]])
    assert np.allclose(descriptors(x), [1, 1, 1.5, 0, np.sqrt(2 / 3), 0])
    with pytest.raises(ValueError, match="two frames"):
        descriptors(x[:1])


def test_equal_sets_are_at_distance_zero(sets):
    _, seen = sets
    assert frame_fd(seen["real"], seen["real"]) < 1e-9
    assert video_fd(seen["real"], seen["real"]) < 1e-9


def test_the_video_distance_sees_time_and_the_frame_distance_does_not(sets):
    _, seen = sets
    frame = {name: frame_fd(x, seen["real"]) for name, x in seen.items()}
    video = {name: video_fd(x, seen["real"]) for name, x in seen.items()}
    assert frame["shuffled"] == pytest.approx(frame["same"], rel=1e-4)
    assert frame["frozen"] < 2 * frame["same"]
    assert frame["blurred"] > 3 * frame["same"]
    for name in ("frozen", "shuffled", "blurred"):
        assert video[name] > 3 * video["same"], name


def test_motion(sets):
    clips, _ = sets
    assert scores.motion(clips["real"], clips["real"]) == 1
    assert scores.motion(clips["frozen"], clips["real"]) == 0
    assert scores.motion(clips["shuffled"], clips["real"]) > 1.5
    assert np.isnan(scores.motion(clips["real"], clips["frozen"]))


def test_chunks_do_not_show(sets, monkeypatch):
    clip = sets[0]["real"][0]
    whole = scores._pixel_statistics(clip)
    monkeypatch.setattr(scores, "CHUNK", 5)
    for a, b in zip(whole, scores._pixel_statistics(clip), strict=True):
        assert np.allclose(a, b)
    assert whole[0].shape == (LENGTH - 1,)


def test_blow_up_is_the_share_of_clips_outside_of_the_ball(sets, lpips):
    clips, seen = sets
    assert blow_up(seen["real"], seen["real"]) == 0
    assert blow_up(seen["same"], seen["real"]) < 0.05
    wild = clips["same"].copy()
    wild[:15] = np.random.default_rng(0).choice(np.array([0, 255], np.uint8), wild[:15].shape)
    assert 0.25 <= blow_up(features(wild, lpips), seen["real"]) < 0.3


def test_the_ball_of_many_real_ones_holds_its_level():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20_000, 2, 3))
    assert blow_up(rng.standard_normal((20_000, 2, 3)), x, level=0.9) == pytest.approx(0.1, abs=0.015)


# Intervals


def test_a_bootstrap_of_a_mean_has_its_standard_error():
    x = np.random.default_rng(0).standard_normal(400)
    value, shifts = scores._bootstrap(lambda index: x[index].mean(), 400, 1000, np.random.default_rng(0))
    low, high = value + scores._interval(shifts)
    assert low < value < high
    assert value == x.mean()
    assert high - low == pytest.approx(2 * 1.96 * x.std() / 20, rel=0.1)


def test_an_interval_holds_the_value_though_repeats_lengthen_distances():
    a, b = np.random.default_rng(0).standard_normal((2, 40, 20))
    value, shifts = scores._bootstrap(lambda index: frechet(a[index], b), 40, 100, np.random.default_rng(0))
    low, high = value + scores._interval(shifts)
    assert low < value < high


# Curves


@pytest.fixture(scope="module")
def rolled(lpips):
    """Roll-outs that are real for 16 frames and then stand still, their curves, and the stages that were reported."""
    generated = textures(30, 32, seed=3)
    generated[:, 16:] = generated[:, 15:16]
    stages = []
    found = scores.curves(generated, textures(60, 24, seed=4), lpips, 8, draws=20, progress=lambda *stage: stages.append(stage))
    return generated, found, stages


def test_curves_see_where_roll_outs_stop(rolled):
    _, found, _ = rolled
    assert list(found) == list(scores.SCORES)
    for name, curve in found.items():
        assert curve.start.tolist() == [0, 8, 16, 24]
        assert curve.value.shape == curve.low.shape == curve.high.shape == (4,)
        assert (curve.low <= curve.value + 1e-9).all(), name
        assert (curve.value <= curve.high + 1e-9).all(), name
        assert curve.floor_low <= curve.floor <= curve.floor_high
    video, frame, motion = found["video-FD"], found["frame-FD"], found["motion"]
    assert (video.value[:2] < 2 * video.floor).all()
    assert (video.low[2:] > 3 * video.floor).all()
    assert (frame.value < 3 * frame.floor).all()
    assert np.allclose(motion.value[:2], 1, atol=0.2)
    assert np.allclose(motion.value[2:], 0)
    assert motion.floor == pytest.approx(1, abs=0.2)
    assert np.allclose(found["lpips"].value[2:], 0, atol=1e-9)
    assert (np.abs(found["mean"].value) < 15).all()
    assert (found["blow-up"].value[:2] <= 0.1).all()


def test_curves_agree_with_the_scores_of_single_windows(rolled, lpips):
    generated, found, _ = rolled
    real = textures(60, 24, seed=4)[::2]  # half of the clips is what the others are measured by
    windows = real.reshape(-1, 8, SIZE, SIZE, 3)
    at = generated[:, 8:16]
    assert found["motion"].value[1] == pytest.approx(scores.motion(at, windows), rel=1e-4)
    levels = [x.reshape(-1, SIZE * SIZE * 3).astype(float) for x in (at, windows)]
    assert found["mean"].value[1] == pytest.approx(levels[0].mean() - levels[1].mean(), abs=1e-3)
    assert found["std"].value[1] == pytest.approx(levels[0].std(1).mean() - levels[1].std(1).mean(), abs=1e-3)
    steps = [lpips.distance(clip[:-1], clip[1:]).mean() for clip in at]
    assert found["lpips"].value[1] == pytest.approx(np.mean(steps), rel=1e-4)
    a, b = features(at, lpips), features(windows, lpips)
    assert found["video-FD"].value[1] == pytest.approx(video_fd(a, b), rel=1e-4)
    assert found["frame-FD"].value[1] == pytest.approx(frame_fd(a, b, len(windows) // 4), rel=1e-2)
    assert found["blow-up"].value[1] == blow_up(a, b)


def test_curves_look_at_each_frame_once_and_tell_how_far_they_are(lpips, rolled):
    _, _, stages = rolled
    assert {name for name, _, _ in stages} == {"features of real clips", "features of generated clips", "scores"}
    assert ("features of generated clips", 30, 30) in stages

    class Counting(LPIPS):
        frames = 0

        def along(self, frames):
            self.frames += len(frames)
            return super().along(frames)

    counting = Counting(lpips.widths, torch.Generator().manual_seed(0))
    scores.curves(textures(3, 12), textures(4, 8), counting, 4, every=1, draws=2)
    assert counting.frames == 3 * 12 + 4 * 8


def test_curves_slide_and_repeat(lpips):
    a, b = textures(3, 10), textures(4, 8)
    one, two = (scores.curves(a, b, lpips, 4, every=2, draws=3, generator=np.random.default_rng(1)) for _ in range(2))
    assert one["motion"].start.tolist() == [0, 2, 4, 6]
    for name in scores.SCORES:
        assert np.array_equal(one[name].low, two[name].low)


def shifted(value, shifts):
    value, shifts = np.array(value, dtype=float), np.array(shifts, dtype=float)
    return scores.Curve(np.arange(len(value)) * 8, value, value, value, 0.0, 0.0, 0.0, shifts)


def test_a_span_is_the_mean_of_late_windows_and_its_interval_one_over_clips(rolled):
    _, found, _ = rolled
    curve = found["video-FD"]
    whole, last = scores.span(curve, 0), scores.span(curve, int(curve.start[-1]))
    assert whole.value == pytest.approx(curve.value.mean())
    assert last == pytest.approx((curve.value[-1], curve.low[-1], curve.high[-1]))
    assert scores.span(curve, int(curve.start[-1]) + 1) is None
    # Errors of the windows that cancel in each draw leave a mean that is certain.
    assert scores.span(shifted([1, 3], [[0.5, -0.5], [-0.5, 0.5]]), 0) == pytest.approx((2, 2, 2))


def test_curves_are_compared_clip_by_clip():
    hard_clips = [[-1, -1], [1, 1]]  # draws in which both fare badly, or both well
    ours, theirs = shifted([1, 1], hard_clips), shifted([1, 2], hard_clips)
    assert scores.span(theirs, 8).low < 1.1
    assert scores.span(theirs, 8, than=ours) == pytest.approx((1, 1, 1))
    with pytest.raises(ValueError, match="same windows and draws"):
        scores.span(ours, 0, than=shifted([1], [[0], [0]]))


@pytest.mark.parametrize(
    ("n", "m", "window", "reason"), [(3, 4, 13, "fit into"), (3, 4, 1, "two frames"), (1, 4, 4, "two generated"), (3, 3, 4, "four real")]
)
def test_curves_of_too_little_are_refused(lpips, n, m, window, reason):
    with pytest.raises(ValueError, match=reason):
        scores.curves(textures(n), textures(m), lpips, window)


def test_clips_of_another_form_are_refused(lpips):
    with pytest.raises(ValueError, match="clips should be uint8"):
        scores.motion(np.zeros((2, 3, 8, 8, 3)), np.zeros((2, 3, 8, 8, 3)))
