"""Sampled futures: no look-ahead, gaps and uncertain values, rewards, filling, anomaly scores, files, joint tokens."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from oracles import randomised, seeded

pytest.importorskip("pandas", reason="pandas comes with the extra `forecasting`")

from series import (
    HORIZON,
    LEVELS,
    assert_same,
    daily,
    draw,
    few,
    garbled,
    history,
    holed,
    in_tokens,
    known_panel,
    model_of,
    quiet,
    rng,
    task_of,
    untrained,
    values_of,
    walk,
    waves,
)

from diffusion_forcing import RNN, DiffusionForcing, NoiseSchedule, Sampler, cosine, pin
from diffusion_forcing.forecasting import model as model_module
from diffusion_forcing.forecasting.model import SeriesModel
from diffusion_forcing.forecasting.task import OURS, rolling

residuals = pytest.mark.parametrize("residual", ["seasonal", "difference"])
networks = pytest.mark.parametrize("network", ["rnn", "transformer"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("panels")


# No look-ahead.


@functools.cache
def split_of(folder, residual, garbage):
    """A task whose values are garbage from a step on, and its split."""
    panel = known_panel(residual)
    task = task_of(folder, panel if garbage is None else garbled(panel, garbage), f"{residual}-{garbage}", residual=residual)
    return task, task.split()


@functools.cache
def calibrated(folder, residual, network, garbage):
    """The task's calibrated model, with a network whose weights are all drawn."""
    task, _ = split_of(folder, residual, garbage)
    return task.series_model(untrained(network, task.data().train.cond_width, awake=True))


@residuals
@networks
@pytest.mark.parametrize("matrix", ["autoregressive", "pyramid", "full_sequence"])
def test_no_forecast_depends_on_values_after_its_start(residual, network, matrix, folder):
    """The leak test: garbage from the first, or the second, test window on leaves all forecasts until then the same, bit for bit."""
    sampling = few(network, matrix=matrix)
    sampling = sampling["sampler"], sampling["samples"], 0, quiet
    truth, futures = rolling(split_of(folder, residual, None)[1], calibrated(folder, residual, network, None), *sampling)
    for window, start in enumerate((276, 282)):
        other_truth, others = rolling(split_of(folder, residual, start)[1], calibrated(folder, residual, network, 276), *sampling)
        assert (truth[window] != other_truth[window]).all()
        for name in futures:
            np.testing.assert_array_equal(others[name][:, : window + 1], futures[name][:, : window + 1], err_msg=name)
        assert window == 1 or (others[OURS][:, 1] != futures[OURS][:, 1]).any(), "a window later the garbage is history"


@residuals
@networks
def test_a_forecast_depends_on_its_past_and_on_covariates_within_its_horizon(residual, network, folder):
    """Without this the leak test would be empty."""
    s, model = split_of(folder, residual, None)[1], calibrated(folder, residual, network, None)
    at = s.origins[0]

    def futures(values=s.panel.values, known=s.panel.known):
        past = dataclasses.replace(s.history, values=values, known=known).until(at)
        return model.draw(past, **few(network), generator=seeded(0))

    base, past, known = futures(), s.panel.values.copy(), s.panel.known.copy()
    past[at - 1] += 0.5
    assert (futures(past) != base).any()
    known[at + 2] += 1
    assert (futures(known=known) != base).any()
    known = s.panel.known.copy()
    known[at + HORIZON :] += 1
    np.testing.assert_array_equal(futures(known=known), base)


# Futures.


@residuals
@networks
def test_futures_have_a_shape_a_horizon_and_a_seed(residual, network):
    values = values_of(residual)
    model = model_of(values, residual, network)
    kept = values.copy()
    one, again, other = (draw(model, values, network=network, seed=seed) for seed in (0, 0, 1))
    assert one.shape == (5, HORIZON, 2)
    assert np.isfinite(one).all()
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()
    np.testing.assert_array_equal(values, kept)
    assert draw(model, values, network=network, horizon=1).shape == (5, 1, 2)


def test_many_futures_are_sampled_in_parts(monkeypatch):
    values = daily()
    model = model_of(values)
    whole = draw(model, values, samples=9)
    monkeypatch.setattr(model_module, "SEQUENCES", 8)
    calls = []
    parts = draw(model, values, samples=9, progress=lambda *call: calls.append(call))
    np.testing.assert_allclose(parts, whole, rtol=1e-4)
    assert calls == [(8, 18), (16, 18), (18, 18)]


@networks
def test_a_fresh_network_samples_standard_normal_tokens(network):
    values = daily(480)
    model = model_of(values, network=network, awake=False)
    tokens = in_tokens(model, values, draw(model, values, samples=600, steps=8, matrix="full_sequence"))
    np.testing.assert_allclose(np.quantile(tokens, [0.05, 0.25, 0.5, 0.75, 0.95]), [-1.645, -0.674, 0, 0.674, 1.645], atol=0.06)
    np.testing.assert_allclose(tokens.std((0, 2)), 1, atol=0.06)
    np.testing.assert_allclose(np.corrcoef(tokens[..., 0].T), np.eye(HORIZON), atol=0.15)


@pytest.mark.parametrize("cross_series", [False, True])
def test_series_are_conditioned_on_the_mean_of_all_if_asked(cross_series):
    values = daily(d=3)
    model = model_of(values, cross_series=cross_series)
    other = values.copy()
    other[-3, 2] += 1
    assert (draw(model, values)[..., :2] != draw(model, other)[..., :2]).any() == cross_series


def test_one_of_several_series_can_be_sampled_alone():
    values = daily(d=3)
    model = model_of(values, awake=False)
    alone = draw(model.single(1), values[:, 1:2], samples=200)
    np.testing.assert_allclose(alone[..., 0].mean(0), draw(model, values, samples=200)[..., 1].mean(0), atol=0.15)


@residuals
@networks
def test_a_saved_model_samples_the_same_futures(residual, network, tmp_path):
    values, known = holed(values_of(residual), (280, 0)), rng(2).standard_normal((400, 2))
    model = model_of(values, residual, network, known=known).calibrate(history(values, known), windows=12)
    model.save(tmp_path)
    loaded = SeriesModel.load(tmp_path)
    assert_same(loaded.scaler, model.scaler)
    assert_same(loaded.features, model.features)
    assert_same(loaded.noise, model.noise)
    np.testing.assert_array_equal(*(draw(one, values, known=known, network=network) for one in (model, loaded)))
    assert {file.suffix for file in tmp_path.rglob("*") if file.is_file()} == {".json", ".safetensors"}


def test_a_folder_without_a_model_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"series\.json"):
        SeriesModel.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda past: {"values": past.values[:, :1]}, r"trained on 2 series; got values of shape \(288, 1\)"),
        (lambda past: {"values": past.values[:, 0]}, r"got values of shape \(288,\)"),
        (lambda past: {"values": past.values[:20], "clock": np.arange(20)}, "more than 24 steps of history; got 20"),
        (lambda past: {"known": None}, r"cover 294 steps and have 1 covariates"),
        (lambda past: {"known": np.zeros((293, 1))}, r"got \(293, 1\)"),
        (lambda past: {"known": np.zeros((294, 2))}, r"got \(294, 2\)"),
    ],
)
def test_a_history_that_does_not_fit_the_model_is_refused(change, words):
    past = history(daily(), rng().standard_normal((294, 1)))
    model = model_of(past.values, known=past.known)
    with pytest.raises(ValueError, match=words):
        model.draw(dataclasses.replace(past, **change(past)), **few())


@pytest.mark.parametrize(
    ("options", "words"), [({"horizon": 7}, "1 to 6 steps ahead; got 7"), ({"horizon": 0}, "got 0"), ({"samples": 0}, "samples")]
)
def test_impossible_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        draw(model_of(daily()), daily(), **options)


# Missing and uncertain values.


@networks
@pytest.mark.parametrize(
    ("residual", "back", "cross_series"),
    [("seasonal", 1, False), ("seasonal", 3, True), ("seasonal", 22, False), ("difference", 1, False), ("difference", 3, False)],
)
def test_a_value_at_level_k_is_missing(residual, back, cross_series, network):
    values = values_of(residual)
    model = model_of(values, residual, network, cross_series=cross_series)
    level = np.zeros(values.shape)
    level[-back, 0] = LEVELS
    ignored = draw(model, values, level=level, network=network)
    np.testing.assert_array_equal(ignored, draw(model, holed(values, (-back, 0)), network=network))
    assert (ignored[..., 0] != draw(model, values, network=network)[..., 0]).any()


@residuals
@networks
def test_level_0_changes_nothing_and_a_level_its_own_series(residual, network):
    values = values_of(residual)
    model = model_of(values, residual, network, cross_series=False)
    base, level = draw(model, values, network=network), np.zeros(values.shape)
    np.testing.assert_array_equal(draw(model, values, level=level, network=network), base)
    level[-4:, 1] = LEVELS // 2
    changed = draw(model, values, level=level, network=network)
    np.testing.assert_array_equal(changed[..., 0], base[..., 0])
    assert (changed[..., 1] != base[..., 1]).any()


@residuals
def test_the_higher_the_level_of_a_wrong_value_the_less_it_shifts_the_forecast(residual):
    """As the last value, to which differences add, and as one a season before the forecast, to which lags reach."""
    values = values_of(residual)
    model = model_of(values, residual, awake=False)
    wrong = values.copy()
    back = 1 if residual == "difference" else 24
    wrong[-back, 0] += 50
    base = draw(model, values)

    def shift(share):
        level = np.zeros(values.shape)
        level[-back, 0] = round(share * LEVELS)
        return np.abs(draw(model, wrong, level=level) - base)[..., 0].max()

    shifts = [shift(share) for share in (0.0, 0.3, 0.6, 0.9)]
    assert shifts == sorted(shifts, reverse=True)
    assert shifts[-1] < 0.15 * shifts[0]
    assert shifts[0] > 4


def test_an_uncertain_value_hardly_reaches_the_other_series():
    values = daily()
    model = model_of(values)
    level = np.zeros(values.shape)
    level[-2, 0] = round(0.9 * LEVELS)
    wrong = values.copy()
    wrong[-2, 0] += 50

    def shift(level):
        return np.abs(draw(model, wrong, level=level) - draw(model, values, level=level))[..., 1].max()

    assert shift(level) < 0.5 * shift(None)


@residuals
@networks
def test_missing_values_may_be_anywhere_in_the_past(residual, network):
    values = holed(values_of(residual), (slice(0, 3), 0), (slice(264, 268), 0), (slice(280, 283), 1), (287, 1))
    futures = draw(model_of(values, residual, network), values, network=network)
    assert futures.shape == (5, HORIZON, 2)
    assert np.isfinite(futures).all()


@pytest.mark.parametrize("gap", [1, 8])
def test_the_longer_ago_a_walk_was_observed_the_wider_its_first_step(gap):
    """Differences add up from the last value: after a gap of g the first step has the spread of 1 + g."""
    values = walk()
    model = model_of(values, "difference", awake=False, transform="none")
    whole, gappy = (draw(model, v, samples=600, matrix="full_sequence")[:, 0] for v in (values, holed(values, (slice(-gap, None), 0))))
    assert gappy.std(0)[0] / whole.std(0)[0] == pytest.approx(np.sqrt(1 + gap), rel=0.12)
    assert gappy.std(0)[1] / whole.std(0)[1] == pytest.approx(1, rel=0.12)
    assert gappy[:, 0].mean() == pytest.approx(values[-gap - 1, 0], abs=0.5), "from where it was last"


# Rewards.


@residuals
@networks
@pytest.mark.parametrize("matrix", ["pyramid", "full_sequence"])
def test_guidance_raises_the_reward(residual, network, matrix):
    values = values_of(residual)
    model = model_of(values, residual, network)

    def mean(**options):
        return draw(model, values, network=network, samples=24, matrix=matrix, **options)[:, -1].sum(-1).mean()

    def last(futures):
        return futures[:, -1].sum(-1)

    none, some, more = (mean(reward=last, scale=scale) for scale in (0.0, 0.5, 2.0))
    assert none == pytest.approx(mean(), rel=1e-4)
    assert none < some < more


@pytest.mark.parametrize("gap", [0, 3])
def test_a_reward_is_of_all_series_within_the_horizon(gap):
    values = walk() if gap else daily()
    values = holed(values, slice(len(values) - gap, None))
    model = model_of(values, "difference" if gap else "seasonal")
    seen = []

    def reward(futures):
        seen.append(futures.detach().clone())
        return futures.sum((1, 2))

    draw(model, values, matrix="full_sequence", reward=reward)
    assert {tuple(futures.shape) for futures in seen} == {(5, HORIZON, 2)}
    assert gap or 5 < seen[-1].mean() < 15, "in the units of the data"


def test_impossible_rewards_are_refused():
    with pytest.raises(ValueError, match=r"a reward maps futures \(5, 6, 2\) to one score each, \(5,\); got \(5, 6\)"):
        draw(model_of(daily()), daily(), matrix="full_sequence", reward=lambda futures: futures.sum(-1))
    values = holed(walk(), (-1, 0))
    with pytest.raises(ValueError, match="they end at different times; fill or cut the last values"):
        draw(model_of(values, "difference"), values, matrix="full_sequence", reward=lambda futures: futures.sum((1, 2)))


def test_futures_begin_as_noise():
    model = model_of(daily())
    sampler = Sampler(3)
    given = sampler.along(pin(sampler.matrix_for(model.model.schedule, HORIZON), 2))
    with pytest.raises(ValueError, match="begins with token 2 below level K"):
        model.draw(history(daily()), samples=2, sampler=given)


# Filling gaps.


def test_gaps_are_filled_and_the_rest_is_untouched():
    values = holed(daily(), (slice(100, 104), 0), (slice(103, 105), 1), (slice(284, 288), 1), (slice(200, 203), slice(None)))
    model = model_of(daily(), network="transformer")
    filled, again = (model.fill(history(values), samples=7, steps=4, generator=seeded(0)) for _ in range(2))
    assert filled.shape == (7, 288, 2)
    assert np.isfinite(filled).all()
    present = ~np.isnan(values)
    assert (filled[:, present] == values[present]).all()
    assert (filled.std(0)[~present] > 0).all()
    np.testing.assert_array_equal(filled, again)


@pytest.mark.parametrize("transform", ["none", "log"])
def test_a_fresh_network_fills_gaps_with_expected_values(transform):
    values = daily(d=1)
    model = model_of(values, network="transformer", awake=False, transform=transform)
    gap = slice(250, 254)
    filled = model.fill(history(holed(values, gap)), samples=400, generator=seeded(0))
    np.testing.assert_allclose(filled[:, gap, 0].mean(0), 10 + 3 * waves(288, 1)[gap, 0], atol=0.5)
    assert 0.15 < filled[:, gap, 0].std(0).mean() < 0.6


def test_a_gap_is_filled_from_both_of_its_sides():
    values = daily()
    model = model_of(values, network="transformer")
    gap = slice(150, 153)

    def fill(at):
        changed = holed(values, (gap, 0))
        changed[at, 0] += 1
        return model.fill(history(changed), samples=5, steps=4, generator=seeded(0))[:, gap, 0]

    base = fill(0)
    assert (fill(149) != base).any()
    assert (fill(153) != base).any()


def test_an_early_gap_is_filled_from_the_seasons_there_are():
    """Of several lags those that reach back before the first value are left out, as they are everywhere else."""
    values = daily(d=1)
    values[-72:] += 100  # later, and nothing to an early gap
    model = model_of(daily(d=1), network="transformer", awake=False)
    weights = np.zeros(len(model.scaler.lags))
    weights[:3] = 1 / 3
    model = dataclasses.replace(model, scaler=dataclasses.replace(model.scaler, weights=weights))
    gap = slice(30, 33)
    filled = model.fill(history(holed(values, gap)), samples=50, steps=4, generator=seeded(0))
    np.testing.assert_allclose(filled[:, gap, 0].mean(0), 10 + 3 * waves(288, 1)[gap, 0], atol=1)


@pytest.mark.parametrize(
    ("residual", "network", "hole", "words"),
    [
        ("seasonal", "rnn", 100, "backbone=transformer"),
        ("difference", "transformer", 100, "residual='seasonal'"),
        ("seasonal", "transformer", slice(100, 107), "7 steps from step 100 is longer than the horizon of 6"),
        ("seasonal", "transformer", 5, "gap at step 5 lies within the first 24 steps"),
    ],
)
def test_gaps_that_cannot_be_filled_are_refused(residual, network, hole, words):
    values = values_of(residual)
    with pytest.raises(ValueError, match=words):
        model_of(values, residual, network).fill(history(holed(values, (hole, 0))))


# Anomaly scores.


@residuals
@networks
def test_an_anomaly_has_the_highest_score(residual, network):
    values = values_of(residual, 72)
    model = model_of(values, residual, network, awake=False)
    values[60 if residual == "seasonal" else slice(60, None), 0] += 3 if residual == "seasonal" else 8
    score = model.anomaly_score(history(values), steps=4)
    assert score.shape == values.shape
    assert np.nanargmax(score[:, 0]) == 60
    assert np.nanmax(score[:, 0]) > np.nanmax(score[:, 1]) + 3


@residuals
def test_missing_values_have_no_anomaly_score(residual):
    values = holed(values_of(residual, 96), (slice(50, 53), 0), (80, 1))
    model = model_of(values_of(residual, 96), residual)
    one, again = (model.anomaly_score(history(values), steps=4) for _ in range(2))
    np.testing.assert_array_equal(np.isnan(one), np.isnan(model.scaler.encode(values, np.arange(96))))
    np.testing.assert_array_equal(one, again)


def test_anomaly_scores_are_in_nats():
    """To a fresh network tokens are standard normal: then their likelihood is known."""
    values = daily(192, 6)
    model = model_of(values, awake=False)
    exact = 0.5 * (model.scaler.encode(values, np.arange(192)) ** 2 + np.log(2 * np.pi))
    assert np.nanmean(model.anomaly_score(history(values), steps=8)) == pytest.approx(np.nanmean(exact), abs=0.02)


# All series in one token, as in the paper.


def joint_of(folder, residual, garbage=None):
    """A task whose tokens hold all series, and its model with weights that are all drawn."""
    panel = known_panel(residual)
    panel = panel if garbage is None else garbled(panel, garbage)
    task = task_of(folder, panel, f"joint-{residual}-{garbage}", residual=residual, joint=True, cross_series=False, **few())
    data = task.data().train
    net = randomised(RNN(data.event[0], data.cond_width, hidden=16, layers=2, blocks=1, levels=LEVELS))
    return task, task.series_model(DiffusionForcing(net, NoiseSchedule(cosine(LEVELS))))


@residuals
def test_a_joint_token_holds_all_series_and_their_conditions(residual, folder):
    task, model = joint_of(folder, residual)
    s, data = task.split(), task.data()
    assert data.train.event == (3,)
    batch = data.train.read(torch.tensor([[60], [200]]))
    tokens = s.scaler.encode(s.panel.values[: s.end], s.history.clock[: s.end])
    np.testing.assert_allclose(batch.x[1], tokens[200 : 200 + data.train.length], rtol=1e-5)
    at = 200 + s.context
    cond = model._cond(s.history.until(at), 200, at + HORIZON, at)
    torch.testing.assert_close(cond[0], batch.cond[1], rtol=0, atol=0)
    assert data.train.draw(500, seeded(0)).max() + data.train.length <= s.end - s.held_out


@residuals
def test_no_joint_forecast_depends_on_values_after_its_start(residual, folder):
    task, model = joint_of(folder, residual)
    sampling = task.sampler, task.samples, 0, quiet
    truth, futures = rolling(task.split(), model, *sampling)
    for window, start in enumerate((276, 282)):
        other, other_model = joint_of(folder, residual, start)
        _, others = rolling(other.split(), other_model, *sampling)
        np.testing.assert_array_equal(others[OURS][:, : window + 1], futures[OURS][:, : window + 1])
    assert futures[OURS].shape == (5, 2, HORIZON, 3)
    assert truth.shape == (2, HORIZON, 3)


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_joint_forecasts_are_saved_guided_and_sampled_with_fresh_noise(eta, folder, tmp_path):
    task, model = joint_of(folder, "seasonal")
    s = task.split()
    options = few(eta=eta, solver="ddim" if eta else "euler_angle")

    def futures(model, **guidance):
        return model.draw(s.history, **options, generator=seeded(0), **guidance)

    model.save(tmp_path)
    loaded = SeriesModel.load(tmp_path)
    assert loaded.joint
    np.testing.assert_allclose(futures(loaded), futures(model), rtol=1e-6)
    assert futures(model, reward=lambda y: y.sum((1, 2))).sum() > futures(model).sum()


def test_a_missing_value_in_a_joint_token_is_as_expected(folder):
    task, model = joint_of(folder, "seasonal")
    past = task.split().history
    past = dataclasses.replace(past, values=holed(past.values, (-1, 0), (slice(-4, -1), slice(None))))
    tokens, levels = model._tokens(past, len(past.values) - 6, len(past.values))
    assert tokens.shape == (1, 6, 3)
    assert levels[0].tolist() == [0, 0, LEVELS, LEVELS, LEVELS, 0]
    assert tokens[0, -1, 0] == 0
    assert np.isfinite(model.draw(past, **few(), generator=seeded(0))).all()


def test_joint_tokens_refuse_what_needs_single_series(folder):
    _, model = joint_of(folder, "seasonal")
    whole = dataclasses.replace(model_of(daily(d=3), network="transformer"), joint=True)
    for call in (lambda: model.anomaly_score(history(daily(d=3))), lambda: model.single(0), lambda: whole.fill(history(daily(d=3)))):
        with pytest.raises(ValueError, match="joint=False"):
            call()
