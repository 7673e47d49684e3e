"""Scores of forecasts: what GluonTS computes, closed forms, and forecasts that are perfect or calibrated."""

import logging
import math
import warnings
from statistics import NormalDist

import numpy as np
import pytest

from diffusion_forcing.forecasting import scores

NORMAL = NormalDist()


def forecasts(n=50, windows=3, steps=6, dimensions=4, *, seed=0, dtype=np.float64):
    """Samples and truth that are off in mean and width, differently in each dimension."""
    rng = np.random.default_rng(seed)
    truth = 3 + rng.standard_normal((windows, steps, dimensions)).cumsum(1)
    samples = truth + rng.standard_normal((n, windows, steps, dimensions)) * np.arange(1, dimensions + 1) + 0.3
    return samples.astype(dtype), truth.astype(dtype)


def gluonts(samples, truth):
    """The metrics of GluonTS' own evaluator, and SampleForecasts of the windows."""
    pd = pytest.importorskip("pandas")
    evaluation = pytest.importorskip("gluonts.evaluation")
    from gluonts.model.forecast import SampleForecast

    logging.getLogger("gluonts").setLevel(logging.ERROR)
    steps, context = truth.shape[1], 30
    past = np.random.default_rng(7).standard_normal((context, truth.shape[2]))
    index = pd.period_range("2020-01-01", periods=context + steps, freq="D")
    series = [pd.DataFrame(np.concatenate([past, window]), index=index) for window in truth]
    predicted = [SampleForecast(samples[:, i], start_date=index[context]) for i in range(len(truth))]
    evaluator = evaluation.MultivariateEvaluator(quantiles=(np.arange(20) / 20)[1:], target_agg_funcs={"sum": np.sum}, num_workers=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return evaluator(series, predicted)[0], predicted


@pytest.mark.parametrize(
    ("n", "windows", "steps", "dimensions", "dtype"),
    [
        (100, 5, 30, 8, np.float64),
        (100, 3, 7, 5, np.float32),
        (31, 1, 6, 2, np.float64),
        (11, 4, 1, 3, np.float64),
        (1, 2, 5, 3, np.float64),
    ],
)
def test_they_are_those_of_gluonts(n, windows, steps, dimensions, dtype):
    samples, truth = forecasts(n, windows, steps, dimensions, dtype=dtype)
    metrics, _ = gluonts(samples, truth)
    assert scores.crps_sum(samples, truth) == pytest.approx(metrics["m_sum_mean_wQuantileLoss"], rel=1e-6)
    assert scores.crps(samples, truth) == pytest.approx(metrics["mean_wQuantileLoss"], rel=1e-6)
    for d in range(dimensions):
        alone = scores.crps(samples[..., d : d + 1], truth[..., d : d + 1])
        assert alone == pytest.approx(metrics[f"{d}_mean_wQuantileLoss"], rel=1e-6)
    assert scores.mae(samples, truth) == pytest.approx(metrics["abs_error"] / truth.size, rel=1e-6)


def test_the_mean_over_dimensions_is_pooled_not_a_mean_of_ratios():
    samples, truth = forecasts()
    metrics, _ = gluonts(samples, truth)
    ratios = [metrics[f"{d}_mean_wQuantileLoss"] for d in range(truth.shape[2])]
    weight = np.abs(truth).sum((0, 1))
    assert scores.crps_mean(samples, truth) == pytest.approx(np.average(ratios, weights=weight), rel=1e-6)
    assert scores.crps_mean(samples, truth) != pytest.approx(np.mean(ratios), rel=1e-3)


@pytest.mark.parametrize("n", [1, 2, 11, 20, 31, 100, 101])
def test_quantiles_are_those_of_a_sample_forecast(n):
    samples, truth = forecasts(n, windows=2)
    _, predicted = gluonts(samples, truth)
    levels = [0.0, 0.025, 0.05, 0.1, 0.25, 0.35, 0.5, 0.75, 0.95, 1.0]
    found = scores.quantiles_of(samples, levels)
    for i, window in enumerate(predicted):
        np.testing.assert_array_equal(found[:, i], [window.quantile(level) for level in levels])


def test_missing_truth_is_left_out_as_gluonts_does():
    samples, truth = forecasts()
    truth[1, 2, 3] = truth[0, :2, 0] = np.nan
    metrics, _ = gluonts(samples, truth)
    assert scores.crps(samples, truth) == pytest.approx(metrics["mean_wQuantileLoss"], rel=1e-6)
    assert np.isfinite(list(scores.summary(samples, truth).values())).all()


def test_what_is_missing_counts_nowhere():
    """Whole steps and whole dimensions that are missing: the scores of what is left."""
    samples, truth = forecasts()
    for place in (np.s_[:, 4:], np.s_[:, :, 2]):
        gap, garbage = truth.copy(), samples.copy()
        gap[place] = np.nan
        garbage[(slice(None), *place)] = 1e6
        kept = [~np.isnan(gap).all((0, 2)), ~np.isnan(gap).all((0, 1))]
        left, left_truth = samples[:, :, kept[0]][..., kept[1]], truth[:, kept[0]][..., kept[1]]
        expected = scores.summary(left, left_truth)
        for drawn in (samples, garbage):
            assert scores.summary(drawn, gap) == pytest.approx(expected, rel=1e-12)


def test_a_perfect_forecast_scores_0():
    _, truth = forecasts()
    samples = np.repeat(truth[None], 30, axis=0)
    found = scores.summary(samples, truth)
    covered = {name: found.pop(name) for name in ("cover50", "cover90", "cover90_sum")}
    assert set(covered.values()) == {1.0}
    assert found == {"crps_sum": 0, "crps": 0, "energy": 0, "mae": 0}


def test_the_crps_of_a_gaussian():
    """At each level the quantile loss of N(m, s) has a closed form; so does the integral over all levels, which 19 of them come near."""
    truth = np.array([0.3, -1.2, 2.5])
    samples = 1 + 2 * np.random.default_rng(0).standard_normal((200_000, 1, 3, 1))
    z = (truth - 1) / 2
    found = [scores.crps(samples[:, :, [i]], truth[None, [i], None]) * abs(truth[i]) for i in range(3)]
    exact_levels = [np.mean([2 * abs((q - y) * ((y <= q) - level)) for level in scores.LEVELS for q in [1 + 2 * NORMAL.inv_cdf(level)]])
                    for y in truth]  # fmt: skip
    np.testing.assert_allclose(found, exact_levels, rtol=0.01)
    integral = [2 * (v * (2 * NORMAL.cdf(v) - 1) + 2 * NORMAL.pdf(v) - 1 / math.sqrt(math.pi)) for v in z]
    np.testing.assert_allclose(found, integral, rtol=0.06)


def test_the_energy_score_of_one_dimension_is_the_crps_and_of_a_gaussian_exact():
    rng = np.random.default_rng(1)
    samples = rng.standard_normal((4000, 1, 2, 1))
    truth = np.array([0.4, -1.5])
    exact = [v * (2 * NORMAL.cdf(v) - 1) + 2 * NORMAL.pdf(v) - 1 / math.sqrt(math.pi) for v in truth]
    assert scores.energy_score(samples, truth[None, :, None]) == pytest.approx(np.mean(exact), abs=0.02)


def test_the_energy_score_takes_all_pairs(monkeypatch):
    samples, truth = forecasts(13, 2, 3, 5)
    error = np.linalg.norm(samples - truth, axis=-1).mean(0)
    apart = np.linalg.norm(samples[:, None] - samples[None], axis=-1).sum((0, 1)) / (13 * 12)
    for rows in (1024, 4):
        monkeypatch.setattr(scores, "ROWS", rows)
        assert scores.energy_score(samples, truth) == pytest.approx((error - apart / 2).mean(), rel=1e-10)
    far = 1e6
    assert scores.energy_score(samples + far, truth + far) == pytest.approx((error - apart / 2).mean(), rel=1e-6)
    assert scores.energy_score(samples[:1], truth) == pytest.approx(np.linalg.norm(samples[0] - truth, axis=-1).mean())


def test_the_energy_score_sees_dependence_and_the_right_forecast_wins():
    rng = np.random.default_rng(2)
    mix = np.array([[1, 0.95], [0, math.sqrt(1 - 0.95**2)]])
    truth = rng.standard_normal((400, 1, 2)) @ mix
    right = rng.standard_normal((100, 400, 1, 2)) @ mix
    wrong = {"independent": rng.standard_normal(right.shape), "narrow": right * 0.3, "wide": right * 3, "shifted": right + 1}
    for samples in wrong.values():
        assert scores.energy_score(right, truth) < scores.energy_score(samples, truth) - 0.005


@pytest.mark.parametrize(("n", "expected"), [(100, {0.5: 0.485, 0.9: 0.881}), (1000, {0.5: 0.5, 0.9: 0.899})])
def test_a_calibrated_forecast_is_covered(n, expected):
    rng = np.random.default_rng(3)
    centre = rng.standard_normal((10, 20, 30)) * 5
    truth = centre + rng.standard_normal(centre.shape)
    samples = centre + rng.standard_normal((n, *centre.shape))
    for level, share in expected.items():
        assert scores.coverage(samples, truth, level) == pytest.approx(share, abs=0.02)
    assert scores.coverage(centre + (samples - centre) / 2, truth, 0.9) < 0.65


def test_the_summary_is_each_of_them():
    samples, truth = forecasts(31, seed=4)
    truth[0, 1, 2] = np.nan
    found = scores.summary(samples, truth)
    assert list(found) == ["crps_sum", "crps", "energy", "mae", "cover50", "cover90", "cover90_sum"]
    assert all(type(value) is float for value in found.values())
    expected = {"crps_sum": scores.crps_sum(samples, truth), "crps": scores.crps(samples, truth),
                "energy": scores.energy_score(samples, truth), "mae": scores.mae(samples, truth),
                "cover50": scores.coverage(samples, truth, 0.5), "cover90": scores.coverage(samples, truth, 0.9)}  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    whole = np.nan_to_num(truth)
    drawn = np.where(np.isnan(truth), 0, samples)
    assert found["cover90_sum"] == scores.coverage(drawn.sum(-1, keepdims=True), whole.sum(-1, keepdims=True), 0.9)


def test_inputs_are_left_as_they_are_and_whole_numbers_will_do():
    samples, truth = forecasts(dtype=np.float32)
    kept = samples.copy(), truth.copy()
    scores.summary(samples, truth)
    np.testing.assert_array_equal(samples, kept[0])
    np.testing.assert_array_equal(truth, kept[1])
    counts, seen = samples.round().astype(np.uint16), truth.round().astype(np.uint16)
    assert scores.summary(counts, seen) == scores.summary(counts.astype(float), seen.astype(float))


def test_a_truth_of_zeros_has_no_weight():
    samples, truth = forecasts()
    assert math.isnan(scores.crps(samples, truth * 0))
    assert scores.mae(samples, truth * 0) > 0


def test_errors_say_what_is_wrong():
    samples, truth = forecasts()
    for score in (scores.crps, scores.crps_sum, scores.energy_score, scores.mae, scores.summary):
        with pytest.raises(ValueError, match=r"samples\[:, None\]"):
            score(samples[:, 0], truth[0])
        with pytest.raises(ValueError, match=r"got \(50, 3, 6, 4\) and \(3, 5, 4\)"):
            score(samples, truth[:, :5])
        with pytest.raises(ValueError, match="one draw"):
            score(samples[:0], truth)
        with pytest.raises(ValueError, match="1 of 3600 values are not"):
            score(np.where(np.arange(3600).reshape(samples.shape) == 5, np.nan, samples), truth)
        with pytest.raises(ValueError, match="truth should be finite, or NaN"):
            score(samples, truth + np.inf)
        with pytest.raises(ValueError, match="nothing to score"):
            score(samples, truth * np.nan)
    for level in (0, 1, 90, math.nan):
        with pytest.raises(ValueError, match=r"the band of 90 % is 0\.9"):
            scores.coverage(samples, truth, level)
    with pytest.raises(ValueError, match="levels should lie between 0 and 1"):
        scores.quantiles_of(samples, [5, 95])
    with pytest.raises(ValueError, match="levels should lie between 0 and 1"):
        scores.quantiles_of(samples, [])
    with pytest.raises(ValueError, match="one draw at least"):
        scores.quantiles_of(samples[:0])
