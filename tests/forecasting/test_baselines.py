"""Simple forecasts of series: each where it is right, with gaps, with short histories, and without a look ahead."""

import numpy as np
import pytest

from diffusion_forcing.forecasting import baselines, scores

BASELINES = {
    "seasonal naive": lambda values, horizon, samples, rng: baselines.seasonal_naive(values, horizon, samples, rng, season=12, seasons=2),
    "drift": baselines.drift,
    "random walk": baselines.random_walk,
    "ridge VAR": lambda values, horizon, samples, rng: baselines.ridge_var(values, horizon, samples, rng, components=2, lags=(1, 12)),
}
each = pytest.mark.parametrize("forecast", BASELINES.values(), ids=BASELINES)


def rng(seed=0):
    return np.random.default_rng(seed)


def noisy(steps=240, dimensions=4, seed=0):
    """A season of 12 steps and noise that the dimensions share in part."""
    draw = rng(seed)
    wave = np.sin(2 * np.pi * np.arange(steps)[:, None] / 12 + np.arange(dimensions))
    return 10 + wave + 0.3 * draw.standard_normal((steps, dimensions)) + 0.3 * draw.standard_normal((steps, 1))


def autoregression(steps=600, dimensions=3, seed=0):
    """A stationary AR(1) that forgets half of its state in a step, with noise that the dimensions share in part."""
    draw = rng(seed)
    noise = draw.standard_normal((steps, dimensions)) + draw.standard_normal((steps, 1))
    values = np.zeros((steps, dimensions))
    for t in range(1, steps):
        values[t] = 0.5 * values[t - 1] + noise[t]
    return 5 + values


@each
def test_the_shape_and_the_seed(forecast):
    values = noisy()
    kept = values.copy()
    first, again, other = (forecast(values, 7, 30, rng(seed)) for seed in (1, 1, 2))
    assert first.shape == (30, 7, 4)
    assert first.dtype == np.float64
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    np.testing.assert_array_equal(values, kept)
    assert np.isfinite(first).all()


@each
def test_what_comes_later_changes_nothing(forecast):
    """A forecast from a view of a longer array is that of a copy, whatever follows."""
    values = noisy()
    alone = forecast(values[:200].copy(), 12, 20, rng())
    values[200:] = 1e9
    np.testing.assert_array_equal(forecast(values[:200], 12, 20, rng()), alone)


@each
def test_dimensions_are_drawn_together(forecast):
    """Twice the same series: twice the same draws."""
    values = noisy(dimensions=1)
    drawn = forecast(np.concatenate([values, 3 * values], axis=1), 12, 50, rng())
    np.testing.assert_allclose(drawn[..., 1], 3 * drawn[..., 0], rtol=1e-8)


@each
def test_gaps_are_filled_from_before_and_at_the_start_from_after(forecast):
    values = noisy()
    gaps = values.copy()
    gaps[:3, 0] = gaps[50:53, 1] = gaps[-1, 2] = np.nan
    by_hand = values.copy()
    by_hand[:3, 0], by_hand[50:53, 1], by_hand[-1, 2] = values[3, 0], values[49, 1], values[-2, 2]
    np.testing.assert_array_equal(baselines.filled(gaps), by_hand)
    np.testing.assert_array_equal(forecast(gaps, 7, 20, rng()), forecast(by_hand, 7, 20, rng()))


@each
def test_a_constant_series_stays(forecast):
    drawn = forecast(np.full((60, 3), 7.0), 5, 10, rng())
    np.testing.assert_allclose(drawn, 7, rtol=1e-12)


@each
def test_it_is_about_calibrated_where_it_belongs(forecast, request):
    """90 % bands over many origins; each on a process of its own kind."""
    name = request.node.callspec.id
    draw = rng(5)
    values = {
        "seasonal naive": noisy(900, seed=5),
        "drift": (0.1 + draw.standard_normal((900, 4))).cumsum(0),
        "random walk": draw.standard_normal((900, 4)).cumsum(0),
        "ridge VAR": autoregression(900, seed=5),
    }[name]
    starts = range(400, 890, 10)
    samples = np.stack([forecast(values[:start], 6, 200, rng(start)) for start in starts], axis=1)
    truth = np.stack([values[start : start + 6] for start in starts])
    assert scores.coverage(samples, truth, 0.9) == pytest.approx(0.9, abs=0.06)
    assert scores.coverage(samples.sum(-1, keepdims=True), truth.sum(-1, keepdims=True), 0.9) == pytest.approx(0.9, abs=0.08)


@pytest.mark.parametrize(("horizon", "seasons"), [(5, 1), (12, 2), (30, 3)])
def test_seasonal_naive_knows_a_season(horizon, seasons):
    """Exact, also when the horizon is longer than the season."""
    season = rng().standard_normal((12, 3))
    values = np.tile(season, (12, 1))
    drawn = baselines.seasonal_naive(values[:100], horizon, 8, rng(), season=12, seasons=seasons)
    np.testing.assert_allclose(drawn, np.repeat(values[None, 100 : 100 + horizon], 8, axis=0), atol=1e-12)


def test_seasonal_naive_is_a_mean_of_seasons_and_errors_of_its_own_past():
    values = noisy(60, 2)
    drawn = baselines.seasonal_naive(values, 5, 400, rng(), season=12, seasons=2)
    now = (values[48:53] + values[36:41]) / 2
    errors = [values[o : o + 5] - (values[o - 12 : o - 7] + values[o - 24 : o - 19]) / 2 for o in (55, 50, 45, 40, 35, 30, 25)]
    apart = np.abs((drawn - now)[:, None] - np.array(errors)).max((2, 3))
    assert (apart.min(1) < 1e-12).all(), "each draw is one of the past errors, whole"
    assert len(set(apart.argmin(1))) == 7, "and all of them are drawn"


def test_seasonal_naive_with_a_short_history():
    values = noisy(60, 2)
    one = baselines.seasonal_naive(values[:29], 5, 50, rng(), season=12, seasons=2)
    np.testing.assert_array_equal(one, np.repeat(one[:1], 50, axis=0))
    none = baselines.seasonal_naive(values[:24], 5, 50, rng(), season=12, seasons=2)
    np.testing.assert_allclose(none, np.repeat((values[:5] + values[12:17])[None] / 2, 50, axis=0))
    with pytest.raises(ValueError, match=r"season=12 and seasons=2 need .* 24 steps; got 23"):
        baselines.seasonal_naive(values[:23], 5, 50, rng(), season=12, seasons=2)
    with pytest.raises(ValueError, match="season=168"):
        baselines.seasonal_naive(values, 5, 50, rng(), season=168)


@pytest.mark.parametrize("steps", [3, 10, 40])
def test_drift_follows_a_line(steps):
    line = np.array([1.0, 2, 3]) + np.arange(steps + 8)[:, None] * np.array([0.5, -1, 0])
    drawn = baselines.drift(line[:steps], 8, 10, rng())
    np.testing.assert_allclose(drawn, np.repeat(line[None, steps:], 10, axis=0), atol=1e-10)


def test_a_random_walk_spreads_as_the_root_of_time_and_has_no_drift():
    values = (1 + rng().standard_normal((2000, 3))).cumsum(0) - 5000
    drawn = baselines.random_walk(values, 64, 4000, rng(), recent=1500)
    steps = np.diff(values[-1501:], axis=0).std(0)
    for t in (1, 4, 16, 64):
        np.testing.assert_allclose(drawn[:, t - 1].std(0), steps * np.sqrt(t), rtol=0.05)
        np.testing.assert_allclose(drawn[:, t - 1].mean(0), values[-1], atol=0.08 * np.sqrt(t))


def test_a_random_walk_of_positive_values_is_one_of_their_logarithm():
    values = np.exp(0.1 * rng().standard_normal((300, 2)).cumsum(0))
    chosen, asked, plain = (baselines.random_walk(values, 20, 500, rng(), log=log) for log in (None, True, False))
    np.testing.assert_array_equal(chosen, asked)
    assert (chosen > 0).all()
    assert (plain != chosen).any()
    below = values - values.min()
    np.testing.assert_array_equal(*(baselines.random_walk(below, 20, 500, rng(), log=log) for log in (None, False)))
    with pytest.raises(ValueError, match=r"log=True .* 0\.0"):
        baselines.random_walk(below, 20, 500, rng(), log=True)


def test_a_random_walk_takes_recent_steps_only():
    values = np.concatenate([100 * rng().standard_normal((200, 2)), rng().standard_normal((51, 2))]) + 1000
    drawn = baselines.random_walk(values, 1, 500, rng(), recent=50, log=False)
    assert np.abs(drawn - values[-1]).max() < 10


@pytest.mark.parametrize("components", [3, 2])
def test_the_var_beats_the_random_walk_where_values_return(components):
    values = autoregression()
    starts = range(300, 590, 10)
    truth = np.stack([values[start : start + 10] for start in starts])
    found = {}
    for name, forecast in {
        "var": lambda *given: baselines.ridge_var(*given, components=components, lags=(1, 2)),
        "walk": baselines.random_walk,
    }.items():
        samples = np.stack([forecast(values[:start], 10, 100, rng()) for start in starts], axis=1)
        found[name] = scores.summary(samples, truth)
    for score in ("crps_sum", "crps", "energy", "mae"):
        assert found["var"][score] < 0.9 * found["walk"][score]


def test_the_var_has_the_moments_of_the_process():
    """One step ahead: half the way back to the mean, with the noise; far ahead: the mean, with the spread of the baselines."""
    values = autoregression(4000)
    values[-1] += 6
    drawn = baselines.ridge_var(values, 40, 4000, rng(), lags=(1,), ridge=1e-6)
    np.testing.assert_allclose(drawn[:, 0].mean(0), 5 + 0.5 * (values[-1] - 5), atol=0.3)
    np.testing.assert_allclose(drawn[:, 0].std(0), np.sqrt(2), rtol=0.1)
    np.testing.assert_allclose(drawn[:, -1].mean(0), 5, atol=0.2)
    np.testing.assert_allclose(np.cov(drawn[:, -1].T), np.cov(values.T), rtol=0.15)


@pytest.mark.parametrize("steps", [300, 30], ids=["more steps", "more dimensions"])
def test_the_var_adds_what_the_components_leave_out(steps):
    """One strong common factor and noise of each dimension's own: the factor is forecast, the noise is still there."""
    factor = autoregression(steps, 1) - 5
    values = 3 * factor + rng(9).standard_normal((steps, 40))
    drawn = baselines.ridge_var(values, 6, 500, rng(), components=1, lags=(1,))
    own = drawn - drawn.mean(-1, keepdims=True)
    assert own.std() == pytest.approx(1, abs=0.15)
    assert baselines.ridge_var(values, 50, 20, rng(), components=40, lags=(1,)).shape == (20, 50, 40)


def test_the_axes_of_many_dimensions_are_those_of_the_svd():
    for shape in ((50, 12), (12, 50)):
        values = rng().standard_normal(shape) * np.linspace(1, 5, shape[1])
        right = np.linalg.svd(values, full_matrices=False)[2][:4].T
        axes = baselines._principal_axes(values, 4)
        np.testing.assert_allclose(np.abs(axes.T @ right), np.eye(4), atol=1e-8)


def test_series_that_repeat_one_another_and_scales_far_apart():
    """Components that hold nothing but rounding, and dimensions a billion times larger than others."""
    values = noisy(dimensions=2)
    scale = np.array([1e-9, 1, 1e9])
    drawn = baselines.ridge_var(np.concatenate([values * s for s in scale], axis=1), 12, 50, rng(), components=4, lags=(1, 12))
    assert np.isfinite(drawn).all()
    for i, s in enumerate(scale):
        np.testing.assert_allclose(drawn[..., 2 * i : 2 * i + 2] / s, drawn[..., 2:4], rtol=1e-6)
    assert np.abs(drawn[..., 2:4] - 10).max() < 5


@each
def test_errors_of_all(forecast):
    values = noisy()
    for name, (horizon, samples) in {"horizon": (0, 5), "samples": (5, 0)}.items():
        with pytest.raises(ValueError, match=f"{name} counts from 1; got 0"):
            forecast(values, horizon, samples, rng())
    with pytest.raises(ValueError, match=r"values\[:, None\]"):
        forecast(values[:, 0], 5, 5, rng())
    with pytest.raises(ValueError, match=r"NaN throughout are \[1, 3\]"):
        forecast(np.where([0, 1, 0, 1], np.nan, values), 5, 5, rng())
    with pytest.raises(ValueError, match="240 are infinite"):
        forecast(np.where([0, 1, 0, 0], np.inf, values), 5, 5, rng())
    with pytest.raises(ValueError, match="history"):
        forecast(values[:1], 5, 5, rng())
    with pytest.raises(ValueError, match="1 dimension at least"):
        forecast(values[:, :0], 5, 5, rng())


def test_errors_of_one():
    values = noisy()
    with pytest.raises(ValueError, match="season counts from 1; got 0"):
        baselines.seasonal_naive(values, 5, 5, rng(), season=0)
    with pytest.raises(ValueError, match="recent counts from 1"):
        baselines.random_walk(values, 5, 5, rng(), recent=0)
    with pytest.raises(ValueError, match=r"a lag of 168 needs .* 170 steps; got 169"):
        baselines.ridge_var(values[:169], 5, 5, rng())
    for lags in ((), (0, 1)):
        with pytest.raises(ValueError, match="lags"):
            baselines.ridge_var(values, 5, 5, rng(), lags=lags)
    with pytest.raises(ValueError, match="components counts from 1"):
        baselines.ridge_var(values, 5, 5, rng(), components=0)
    for ridge in (-1, np.nan):
        with pytest.raises(ValueError, match="ridge"):
            baselines.ridge_var(values, 5, 5, rng(), ridge=ridge)
