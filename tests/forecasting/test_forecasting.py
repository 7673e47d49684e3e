"""Forecasts of many series: what is normal for them, the clock, windows, no look ahead, the copula, gaps and doubt."""

import dataclasses
import functools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import randomised, seeded

pd = pytest.importorskip("pandas", reason="pandas comes with the extra `forecasting`")

from diffusion_forcing import RNN, DiffusionForcing, NoiseSchedule, Transformer, cosine
from diffusion_forcing.engine.config import Experiment, from_dict, to_dict
from diffusion_forcing.engine.recipes import resolve
from diffusion_forcing.forecasting import calendar
from diffusion_forcing.forecasting import model as forecasting
from diffusion_forcing.forecasting.calendar import clock_of, seasons_of, waves_of
from diffusion_forcing.forecasting.forecaster import save_panel
from diffusion_forcing.forecasting.model import Sampling, SeriesModel, limited
from diffusion_forcing.forecasting.panel import NAMED, Panel
from diffusion_forcing.forecasting.recipes import FORECASTING, HORIZONS, MINUTES
from diffusion_forcing.forecasting.scores import coverage
from diffusion_forcing.forecasting.task import (
    OURS,
    Forecasting,
    baselines,
    rolling,
)
from diffusion_forcing.forecasting.windows import FURTHEST, Covariates, Normal, SeriesWindows, fit_normal, seasonal_lags

LEVELS = 50
HORIZON = 6
kinds = pytest.mark.parametrize("kind", ["lags", "steps"])
networks = pytest.mark.parametrize("network", ["rnn", "transformer"])
transforms = pytest.mark.parametrize("transform", ["none", "sqrt", "log"])


def rng(seed=0):
    return np.random.default_rng(seed)


def quiet(*_):
    """Progress that nobody watches."""


def waves(t, d=2, period=24):
    """(t, d) sines, each series a little later than the one before."""
    return np.sin(2 * np.pi * np.arange(t)[:, None] / period + np.arange(d))


def daily(t=288, d=2, *, noise=0.3, share=0.0, seed=0):
    """A season of 24 steps and Gaussian noise, of which series have a share in common."""
    draw = rng(seed)
    common, own = draw.standard_normal((t, 1)), draw.standard_normal((t, d))
    return 10 + 3 * waves(t, d) + noise * (np.sqrt(share) * common + np.sqrt(1 - share) * own)


def walk(t=288, d=2, *, share=0.0, seed=0):
    """Random walks whose steps have a share in common."""
    draw = rng(seed)
    common, own = draw.standard_normal((t, 1)), draw.standard_normal((t, d))
    return 100 + (np.sqrt(share) * common + np.sqrt(1 - share) * own).cumsum(0)


def values_of(kind, t=288, d=2, share=0.0):
    """Series that a kind of expectation suits."""
    return (daily if kind == "lags" else walk)(t, d, share=share)


def holed(values, *holes):
    """A copy without the values at the given places."""
    values = values.copy()
    for hole in holes:
        values[hole] = np.nan
    return values


def untrained(kind, width, awake):
    """A small network: fresh, so that its output is zero, or with all its weights drawn."""
    torch.manual_seed(0)
    if kind == "rnn":
        net = RNN(1, width, hidden=16, layers=1, blocks=1, levels=LEVELS)
    else:
        net = Transformer(1, width, hidden=16, layers=1, heads=2, causal=False, levels=LEVELS)
    return DiffusionForcing(randomised(net) if awake else net.eval(), NoiseSchedule(cosine(LEVELS)))


def forecaster_of(values, kind="lags", network="rnn", *, awake=True, horizon=HORIZON, context=12, known=None, transform=None, **options):
    """A model of values (t, d) as one fits it, its network untrained, and their clock."""
    t = len(values)
    clock = np.arange(t)
    known = np.zeros((t, 0)) if known is None else known[:t]
    periods = (24,) if kind == "lags" else (1,)
    normal = fit_normal(values, clock, horizon, periods, kind=kind, transform=transform)
    covariates = Covariates.fit(values, known, normal, tuple(float(p) for p in periods if p > 1), **options)
    model = untrained(network, covariates.width(normal), awake)
    return SeriesModel.bare(model, normal, covariates, context), clock


def few(network="rnn", **options):
    """Sampling in few steps, by the schedule that suits a network."""
    return Sampling(**{"samples": 5, "steps": 4, "schedule": "autoregressive" if network == "rnn" else "full_sequence", **options})


def in_tokens(series, values, futures):
    """Tokens (n, h, d) of futures (n, h, d)."""
    normal, (t, h) = series.normal, (len(values), futures.shape[1])
    return np.stack([normal.tokens(np.concatenate([values, future]), np.arange(t + h))[t:] for future in futures])


def same(one, other):
    """Whether two dataclasses of arrays and plain values are the same, bit for bit."""
    for field in dataclasses.fields(one):
        np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name), err_msg=field.name)


# What is normal.


@kinds
@transforms
@pytest.mark.parametrize("gaps", [False, True])
def test_tokens_decode_to_the_values_they_were_made_of(kind, transform, gaps):
    values = np.exp(values_of("lags") / 5)
    values = holed(values, (slice(100, 104), 0), (211, 1)) if gaps else values
    clock, at = np.arange(len(values)), len(values) - HORIZON
    normal = fit_normal(values, clock, HORIZON, (24,), kind=kind, transform=transform)
    tokens = normal.tokens(values, clock)
    assert np.nanmax(np.abs(tokens)) < FURTHEST, "nothing was cut off"
    decoded = normal.decode(torch.from_numpy(tokens[at:])[None], values[:at], clock[at:])
    assert (normal.kind, normal.transform) == (kind, transform)
    np.testing.assert_allclose(decoded[0], values[at:], rtol=1e-6)


@kinds
def test_tokens_of_what_is_normal_are_white_and_of_variance_one(kind):
    values = values_of(kind, 1200, 3)
    normal = fit_normal(values, np.arange(1200), HORIZON, (24,), kind=kind)
    tokens = normal.tokens(values, np.arange(1200))
    np.testing.assert_allclose(np.nanstd(tokens, axis=0), 1, atol=0.02)
    after = tokens[normal.warm :]
    assert abs(np.mean(after[1:] * after[:-1])) < 0.1


@kinds
def test_there_are_no_tokens_at_first_nor_where_values_are_missing(kind):
    values = holed(values_of(kind), (150, 0), (slice(200, 203), 1))
    normal = fit_normal(values, np.arange(288), HORIZON, (24,), kind=kind)
    missing = np.isnan(normal.tokens(values, np.arange(288)))
    expected = np.isnan(values)
    if kind == "steps":
        expected[1:] |= expected[:-1].copy()  # a step needs both of its ends
    expected[: normal.warm] = True
    np.testing.assert_array_equal(missing, expected)
    assert np.isnan(normal.tokens(values[: normal.warm], np.arange(normal.warm))).all()


def test_lags_of_missing_values_are_those_of_the_season_before_then_the_last_then_the_mean():
    normal = fit_normal(daily(), np.arange(288), HORIZON, (24,), kind="lags")
    standard = rng().standard_normal((60, 2))
    holes = holed(standard, (0, 0), (5, 0), (slice(40, 42), 1))
    filled = normal.filled(holes)
    np.testing.assert_array_equal(filled[[40, 41], 1], standard[[16, 17], 1])
    assert filled[5, 0] == standard[4, 0]
    assert filled[0, 0] == 0
    there = ~np.isnan(holes)
    np.testing.assert_array_equal(filled[there], standard[there])


def test_one_wild_value_is_cut_off():
    values = daily()
    normal = fit_normal(values, np.arange(288), HORIZON, (24,), kind="lags")
    values[200, 0] = 1e9
    tokens = normal.tokens(values, np.arange(288))
    assert tokens[200, 0] == FURTHEST
    assert np.nanmax(np.abs(tokens)) == FURTHEST


@pytest.mark.parametrize("seed", range(3))
def test_a_random_walk_is_told_by_steps_and_a_season_by_lags(seed):
    clock = np.arange(600)
    assert fit_normal(walk(600, seed=seed), clock, HORIZON, (24,)).kind == "steps"
    assert fit_normal(daily(600, seed=seed), clock, HORIZON, (24,)).kind == "lags"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("expected", ["log", "sqrt", "none", "negative"])
def test_the_transform_is_the_one_that_makes_departures_alike(expected, seed):
    wave, noise = waves(600), rng(seed).standard_normal((600, 2))
    values = {
        "log": np.exp(1 + wave + 0.3 * noise),
        "sqrt": rng(seed).poisson(20 * np.exp(0.8 * wave)).astype(float),
        "none": 50 + 20 * wave + 3 * noise,
        "negative": np.exp(1 + wave + 0.3 * noise) - 1,
    }[expected]
    assert expected != "negative" or values.min() < 0
    assert fit_normal(values, np.arange(600), HORIZON, (24,)).transform == {"negative": "none"}.get(expected, expected)


@settings(max_examples=60, deadline=None)
@given(horizon=st.integers(1, 60), season=st.integers(1, 48), longer=st.lists(st.integers(2, 7), max_size=1), length=st.integers(3, 2000))
def test_no_lag_is_shorter_than_the_horizon(horizon, season, longer, length):
    lags = seasonal_lags(horizon, (season, *(season * factor for factor in longer)), length)
    assert lags == tuple(sorted(set(lags)))
    assert lags[0] >= horizon
    assert lags == (horizon,) or lags[-1] <= length


def test_a_history_too_short_for_seasons_is_told_by_steps():
    assert fit_normal(daily(40), np.arange(40), 12, (24,)).kind == "steps"


@kinds
@pytest.mark.parametrize("number", [0.0, 1.0, -7.5, 1e6])
def test_forecasts_of_a_constant_are_that_constant(kind, number):
    values = np.column_stack([np.full(288, number), daily()[:, 0]])
    series, clock = forecaster_of(values, kind, awake=False)
    futures = series.draw(values, clock, sampling=few(), generator=seeded(0))
    np.testing.assert_allclose(futures[..., 0], number, atol=0.01 * max(1, abs(number)))
    assert futures[..., 1].std() > 0.01


def test_a_constant_far_below_one_keeps_its_size():
    values = np.column_stack([np.full(288, 1e-6), waves(288)[:, 0]])
    series, clock = forecaster_of(values, "lags", awake=False)
    futures = series.draw(values, clock, sampling=few(), generator=seeded(0))
    np.testing.assert_allclose(futures[..., 0], 1e-6, rtol=0.01)


@transforms
@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_units_do_not_matter(transform, unit):
    values, clock = np.exp(daily() / 5), np.arange(288)
    one, other = (fit_normal(u * values, clock, HORIZON, (24,), transform=transform).tokens(u * values, clock) for u in (1, unit))
    np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.filterwarnings("error")
def test_a_series_without_a_value_yet_leaves_the_others_as_they_are():
    values, clock = holed(daily(), (slice(None), 1)), np.arange(288)
    normal = fit_normal(values, clock, HORIZON, (24,))
    covariates = Covariates.fit(values, np.zeros((288, 0)), normal, (24.0,))
    for part in (normal.mean, normal.std, normal.spread, normal.phase, covariates.about):
        assert np.isfinite(part).all()


def test_a_series_without_a_value_yet_may_turn_out_negative():
    values = holed(daily(), (slice(None), 1))
    assert fit_normal(values, np.arange(288), HORIZON, (24,)).low.tolist() == [0, -np.inf]


@kinds
@transforms
@pytest.mark.parametrize("before", [np.nan, 0.0])
def test_a_series_that_begins_after_the_training_range_is_drawn_at_its_own_size(kind, transform, before):
    values = np.exp(daily(seed=3) / 5) if kind == "lags" else walk(seed=3)
    begun = values.copy()
    begun[:200, 1] = before
    begun[200:, 1] *= 1000
    model, clock = forecaster_of(begun[:200], kind, awake=False, transform=transform)[0], np.arange(288)
    assert model.normal.vague.tolist() == [False, True]
    futures = model.draw(begun, clock, sampling=few(samples=50), generator=seeded(0))
    now = begun[-48:, 1]
    assert 0.1 * now.min() < np.median(futures[..., 1]) < 5 * now.max()
    assert futures[..., 1].std() > 0.001 * now.mean(), "and not as if it were certain"
    np.testing.assert_array_equal(futures[..., 0], model.draw(values, clock, sampling=few(samples=50), generator=seeded(0))[..., 0])


@transforms
def test_a_series_of_hardly_a_value_is_as_uncertain_as_the_others(transform):
    values = np.exp(daily() / 5)
    values[:-2, 1] = np.nan
    normal = fit_normal(values, np.arange(288), HORIZON, (24,), transform=transform)
    assert np.isfinite(normal.low[1]) or transform == "none"
    assert normal.spread[1] == normal.spread[0]
    drawn = normal.decode(torch.randn(200, HORIZON, 2, generator=seeded(0)).double(), values, np.arange(HORIZON)).numpy()
    assert np.isfinite(drawn).all()
    assert 0.2 < drawn[..., 1].std() / drawn[..., 0].std() < 5


def test_a_model_saved_without_a_word_on_vague_series_is_read():
    values, clock = daily(), np.arange(288)
    normal, tensors = fit_normal(values, clock, HORIZON, (24,)), {}
    rest = normal.save(tensors)
    del tensors["normal.vague"]
    assert not Normal.load(tensors, rest).vague.any()


def test_values_that_are_said_to_be_real_have_no_floor():
    values, clock = rng().poisson(1.0, (288, 2)).astype(float), np.arange(288)
    normal = fit_normal(values, clock, HORIZON, (24,), real=True)
    assert normal.transform == "none"
    wild = 8 * torch.randn(50, HORIZON, 2, generator=seeded(0), dtype=torch.float64)
    assert normal.decode(wild, values, clock[:HORIZON]).min() < 0


def test_a_panel_of_real_values_is_learned_as_such(folder):
    panel = known_panel("lags", np.exp(daily(288, 3) / 5))
    assert task_of(folder, panel, "bound").setting().normal.low.tolist() == [0, 0, 0]
    normal = task_of(folder, dataclasses.replace(panel, kind="real"), "real").setting().normal
    assert (normal.transform, normal.low.tolist()) == ("none", [-np.inf] * 3)


@kinds
def test_a_series_that_has_gone_below_its_floor_has_none(kind):
    values = np.abs(values_of(kind) - 10)
    series, clock = forecaster_of(values, kind, awake=False, transform="none")
    fallen = values.copy()
    fallen[-100:, 0] -= 100
    futures = series.draw(fallen, clock, sampling=few(), generator=seeded(0))
    assert np.median(futures[..., 0]) < -10
    assert futures[..., 1].min() >= 0


@pytest.mark.parametrize("transform", ["sqrt", "log"])
def test_a_transform_that_does_not_go_with_negative_values_is_refused(transform):
    with pytest.raises(ValueError, match="negative"):
        fit_normal(daily() - 10, np.arange(288), HORIZON, (24,), transform=transform)


def test_no_forecast_of_values_that_were_never_negative_is():
    values, clock = rng().poisson(1.0, (288, 2)).astype(float), np.arange(288)
    for transform in ("none", "sqrt", "log"):
        normal = fit_normal(values, clock, HORIZON, (24,), transform=transform)
        wild = 8 * torch.randn(50, HORIZON, 2, generator=seeded(0), dtype=torch.float64)
        assert normal.decode(wild, values, clock[:HORIZON]).min() >= 0


@kinds
@transforms
def test_values_have_gradients_with_respect_to_tokens(kind, transform):
    values, clock = np.exp(daily() / 5), np.arange(288)
    normal = fit_normal(values, clock, HORIZON, (24,), kind=kind, transform=transform)
    tokens = torch.zeros(3, HORIZON, 2, dtype=torch.float64, requires_grad=True)
    normal.decode(tokens, values, clock[:HORIZON])[:, -1].sum().backward()
    assert (tokens.grad[:, -1] > 0).all(), "a higher token is a higher value"
    assert (tokens.grad[:, 0] > 0).all() == (kind == "steps"), "and steps add up"


@kinds
def test_what_is_normal_is_saved_as_tensors_and_plain_words(kind):
    values, known = holed(daily(d=3), (100, 1)), rng().standard_normal((288, 2))
    normal = fit_normal(values, np.arange(288), HORIZON, (24,), kind=kind)
    covariates = Covariates.fit(values, known, normal, (24.0, 168.0))
    tensors = {}
    words = json.loads(json.dumps([normal.save(tensors), covariates.save(tensors)]))
    same(Normal.load(tensors, words[0]), normal)
    same(Covariates.load(tensors, words[1]), covariates)


# The clock.


def panel_of(freq="h", t=240, *, start="2020-01-01", values=None, tz=None, **more):
    """A panel of one series, or of the values, at a frequency; None: a plain clock that starts at 3 and has steps of 5."""
    values = rng().standard_normal((t, 1)) if values is None else values
    t, d = values.shape
    index = pd.RangeIndex(3, 3 + 5 * t, 5) if freq is None else pd.date_range(start, periods=t, freq=freq, tz=tz)
    return Panel(values, tuple(f"s{i}" for i in range(d)), index, freq and index.freqstr, **{"known": np.zeros((t, 0)), **more})


def broken(*values, reason):
    return pytest.param(*values, marks=pytest.mark.xfail(strict=True, reason=reason))


FREQS = ["h", "30min", "2h", "D", "B", "W", "W-WED", "MS", "ME", "QS", "QE", "YS", None]
ODD = ["BMS", "BME", "BQS", "2MS", "2B", "SMS", "bh"]


@pytest.mark.parametrize("freq", [*FREQS, *ODD])
def test_the_clock_counts_whole_steps_one_by_one(freq):
    clock = clock_of(panel_of(freq))
    assert clock.dtype == np.int64
    np.testing.assert_array_equal(np.diff(clock), 1)


@pytest.mark.parametrize(
    "freq", [*FREQS, *(f if f in ("BMS", "BME", "BQS") else broken(f, reason="clock_of takes the first stamp for a month") for f in ODD)]
)
def test_the_clock_of_a_stamp_is_the_same_in_a_longer_panel(freq):
    """With more rows after, and with more rows before."""
    whole = panel_of(freq, 90)
    clock = clock_of(whole)
    for cut in (slice(0, 60), slice(20, 80)):
        part = Panel(whole.values[cut], whole.names, whole.index[cut], whole.freq, whole.known[cut])
        np.testing.assert_array_equal(clock_of(part), clock[cut])


def test_the_clock_runs_on_when_clocks_are_put_forward():
    panel = panel_of("h", 400, start="2020-03-20", tz="Europe/Berlin")
    np.testing.assert_array_equal(np.diff(clock_of(panel)), 1)


@pytest.mark.parametrize("freq", ["D", "B", "MS", "W-MON"])
@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York"])
def test_days_and_months_count_by_the_clock_on_the_wall(freq, zone):
    np.testing.assert_array_equal(clock_of(panel_of(freq, tz=zone)), clock_of(panel_of(freq)))


def test_weeks_start_on_mondays_and_days_at_midnight():
    assert clock_of(panel_of("h", start="2024-01-01"))[0] % (7 * 24) == 0
    assert clock_of(panel_of("D", start="2024-01-01"))[0] % 7 == 0
    assert clock_of(panel_of("B", start="2024-01-01"))[0] % 5 == 0


@pytest.mark.parametrize(
    ("freq", "expected"),
    [
        ("h", (24, 168)),
        ("30min", (48, 336)),
        ("2h", (12, 84)),
        ("D", (7,)),
        ("B", (5,)),
        ("W", (52,)),
        ("MS", (12,)),
        ("ME", (12,)),
        ("QS", (4,)),
        ("BME", (12,)),
        ("BQS", (4,)),
    ],
)
def test_seasons_by_the_calendar(freq, expected):
    assert seasons_of(panel_of(freq, 1344 if freq[-1] != "S" else 400)) == expected


@pytest.mark.parametrize("freq", ["2D", "5h", "2W", "2MS", "YS"])
def test_steps_of_which_no_number_makes_a_season_have_none(freq):
    assert seasons_of(panel_of(freq, 220)) == (1,)


@pytest.mark.parametrize(("t", "expected"), [(95, (1,)), (96, (24,)), (671, (24,)), (672, (24, 168))])
def test_a_season_has_to_fit_in_four_times(t, expected):
    assert seasons_of(panel_of("h", t)) == expected


@pytest.mark.parametrize("period", [7, 12, 24])
def test_on_a_plain_clock_the_season_is_how_values_repeat(period):
    noisy = waves(400, 2, period) + 0.3 * rng().standard_normal((400, 2))
    assert calendar._repeats(noisy) == period
    assert calendar._repeats(holed(np.column_stack([noisy, np.ones(400)]), (slice(50, 60), 0))) == period
    assert seasons_of(panel_of(None, values=noisy)) == (period,)


@pytest.mark.parametrize("values", [rng().standard_normal((400, 1)), walk(400, 1), np.ones((400, 2)), waves(15, 1, 4)])
def test_what_does_not_repeat_has_no_season(values):
    assert calendar._repeats(values) == 1


def test_the_network_is_told_of_periods_that_came_often():
    assert waves_of(panel_of("h", 24 * 8), (24, 168)) == (24.0,)
    assert waves_of(panel_of("D", 1600), (7,)) == (7.0, 365.25)
    assert waves_of(panel_of(None, 200), (1,)) == ()


def test_days_last_a_day_even_where_they_are_not_of_a_fixed_length():
    class Day(pd.offsets.Day):
        @property
        def nanos(self):
            raise ValueError("Day is a non-fixed frequency")

    assert calendar._seconds(Day(2)) == 2 * 86_400


# Windows.


def windows_of(kind="lags", *, first=0, last=288, context=12, holes=(), known=None):
    values = holed(values_of(kind), *holes)
    series, clock = forecaster_of(values, kind, known=known)
    known = np.zeros((288, 0)) if known is None else known
    return values, series, SeriesWindows(values, clock, known, series.normal, series.covariates, context, first, last)


@kinds
@pytest.mark.parametrize(("first", "last"), [(0, 288), (120, 180), (200, 218)])
def test_windows_lie_within_their_range(kind, first, last):
    _, series, windows = windows_of(kind, first=first, last=last)
    assert windows.length == 12 + HORIZON
    for drawn in (windows.draw(4000, seeded(0)), windows.all()):
        which, start = drawn.unbind(1)
        assert set(which.tolist()) == {0, 1}
        assert start.min() == max(first, series.normal.warm)
        assert start.max() + windows.length <= last
    assert windows.draw(4000, seeded(0))[:, 1].max() + windows.length == last, "and all of it is used"


@kinds
def test_what_is_missing_is_masked(kind):
    _, series, windows = windows_of(kind, holes=[(150, 0), (slice(160, 163), 1)])
    values = holed(values_of(kind), (150, 0), (slice(160, 163), 1))
    tokens = series.normal.tokens(values, np.arange(288))
    batch = windows.read(torch.tensor([[0, 145], [1, 155], [0, 200]]))
    for row, (which, start) in enumerate([(0, 145), (1, 155), (0, 200)]):
        own = tokens[start : start + windows.length, which]
        np.testing.assert_array_equal(batch.mask[row], ~np.isnan(own))
        np.testing.assert_allclose(batch.x[row, :, 0], np.nan_to_num(own), rtol=1e-6)
    assert not batch.mask[:2].all()
    assert batch.mask[2].all()
    assert torch.isfinite(batch.cond).all()


@kinds
def test_a_network_is_told_in_a_forecast_what_it_was_told_in_training(kind):
    """Of steps that then lay in the future, too: lags reach back before the start, and the calendar goes on."""
    known = rng(3).standard_normal((288, 2))
    values, series, windows = windows_of(kind, known=known)
    for start in (60, 200):
        at, end = start + 12, start + 12 + HORIZON
        batch = windows.read(torch.tensor([[0, start], [1, start]]))
        told = series._told(values[:at], np.arange(at), known, start, end, at)
        torch.testing.assert_close(told, batch.cond, rtol=0, atol=0)
    assert windows.cond_width == batch.cond.shape[-1] == series.covariates.width(series.normal)


def test_windows_that_do_not_fit_say_so():
    with pytest.raises(ValueError, match=r"18 steps does not fit into the 17 .* more history, or a shorter horizon or context"):
        windows_of("steps", first=100, last=117)


# The task: what is learned from, and what is not.


def known_panel(kind, values=None, freq="h"):
    """Three series of 12 days and two covariates, known a week beyond the last value."""
    values = values_of(kind, 288, 3, share=0.6) if values is None else values
    return panel_of(freq, values=values, known=rng(5).standard_normal((len(values) + 168, 2)), known_names=("price", "holiday"))


def task_of(folder, panel, name="true", **options):
    file = folder / f"{name}.panel.npz"
    save_panel(panel, file)
    return Forecasting(str(file), **{"horizon": HORIZON, "windows": 2, **options})


def garbled(panel, first):
    """The panel with large random numbers from step `first` on, covariates as they were."""
    values = panel.values.copy()
    values[first:] = 1e4 * rng(9).standard_normal(values[first:].shape)
    return dataclasses.replace(panel, values=values)


def batches(source):
    windows = torch.cat([source.draw(64, seeded(0)), source.all()])
    return source.read(windows)


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("panels")


@kinds
def test_the_split_leaves_what_is_validated_on_out_of_training(kind, folder):
    task = task_of(folder, known_panel(kind), f"split-{kind}", expect=kind)
    s, data = task.setting(), task.data()
    learned = s.end - s.held
    assert s.end == 288 - 2 * HORIZON
    assert s.origins == [276, 282]
    assert data.train.last == learned
    for windows in (data.train.draw(300, seeded(0)), data.train.all()):
        assert windows[:, 1].max() + data.train.length <= learned
    targets = data.valid.all()[:, 1] + s.context
    assert targets.min() >= learned, "no target of the validation was one of the training"
    assert targets.max() + HORIZON <= s.end
    assert data.valid.first >= learned - s.context, "and its past is no longer than a context"


@kinds
def test_what_comes_after_the_training_range_says_nothing_of_what_is_normal(kind, folder):
    """Garbage in the part that is validated on and tested on: statistics, covariates and training batches stay bit for bit."""
    panel = known_panel(kind)
    true = task_of(folder, panel, f"range-{kind}", expect=kind)
    s = true.setting()
    other = task_of(folder, garbled(panel, s.end - s.held), f"range-{kind}-garbage", expect=kind)
    same(other.setting().normal, s.normal)
    same(other.setting().covariates, s.covariates)
    assert (other.setting().seasons, other.setting().context, other.setting().held) == (s.seasons, s.context, s.held)
    assert equal(batches(true.data().train), batches(other.data().train))
    assert not equal(batches(true.data().valid), batches(other.data().valid)), "the garbage is there"


def test_kind_and_transform_are_chosen_by_the_training_range(folder):
    panel = dataclasses.replace(known_panel("lags"), values=np.exp(daily(288, 3) / 5))
    s = task_of(folder, panel, "auto").setting()
    other = task_of(folder, garbled(panel, s.end - s.held), "auto-garbage").setting()
    assert (s.normal.kind, s.normal.transform) == ("lags", "log")
    same(other.normal, s.normal)


def test_the_season_of_a_plain_clock_is_found_in_the_training_range(folder):
    panel = known_panel("lags", freq=None)
    s = task_of(folder, panel, "plain").setting()
    assert s.seasons == (24,)
    other = task_of(folder, garbled(panel, s.end - s.held), "plain-garbage").setting()
    assert other.seasons == s.seasons


@functools.cache
def split_of(folder, kind, garbage):
    """A task whose values are garbage from a step on, and its setting."""
    panel = known_panel(kind)
    task = task_of(folder, panel if garbage is None else garbled(panel, garbage), f"{kind}-{garbage}", expect=kind)
    return task, task.setting()


@functools.cache
def heard(folder, kind, network, garbage):
    """The task's forecaster, with a network whose weights are all drawn."""
    task, _ = split_of(folder, kind, garbage)
    return task.forecaster(untrained(network, task.data().train.cond_width, awake=True))


def tensors_of(series):
    """What a model has heard, by name."""
    return {f.name: getattr(series, f.name) for f in dataclasses.fields(series) if isinstance(getattr(series, f.name), torch.Tensor)}


@kinds
@networks
def test_noise_is_listened_to_before_the_first_test_window(kind, network, folder):
    true, other = (tensors_of(heard(folder, kind, network, garbage)) for garbage in (None, 276))
    assert all(torch.equal(true[name], value) for name, value in other.items())
    assert true["echoes"].numel() > 100
    assert true["echoes"].std() > 0.5


@kinds
@networks
@pytest.mark.parametrize("schedule", ["autoregressive", "pyramid", "full_sequence"])
def test_no_forecast_depends_on_values_after_its_start(kind, network, schedule, folder):
    """The leak test: garbage from the first, or the second, test window on leaves all forecasts until then the same, bit for bit."""
    sampling = few(network, schedule=schedule)
    truth, futures = rolling(split_of(folder, kind, None)[1], heard(folder, kind, network, None), sampling, 0, quiet)
    for window, start in enumerate((276, 282)):
        other_truth, others = rolling(split_of(folder, kind, start)[1], heard(folder, kind, network, 276), sampling, 0, quiet)
        assert (truth[window] != other_truth[window]).all()
        for name in futures:
            np.testing.assert_array_equal(others[name][:, : window + 1], futures[name][:, : window + 1], err_msg=name)
        assert window == 1 or (others[OURS][:, 1] != futures[OURS][:, 1]).any(), "a window later the garbage is history"


@kinds
@networks
def test_a_forecast_depends_on_its_past_and_on_what_is_known_of_its_future(kind, network, folder):
    """Without this the leak test would be empty."""
    s, series = split_of(folder, kind, None)[1], heard(folder, kind, network, None)
    at = s.origins[0]

    def draw(values=s.panel.values, known=s.panel.known):
        return series.draw(values[:at], s.clock[:at], known, sampling=few(network), generator=seeded(0))

    base, past, known = draw(), s.panel.values.copy(), s.panel.known.copy()
    past[at - 1] += 0.5
    assert (draw(past) != base).any()
    known[at + 2] += 1
    assert (draw(known=known) != base).any()
    known = s.panel.known.copy()
    known[at + HORIZON :] += 1
    np.testing.assert_array_equal(draw(known=known), base)


def test_a_task_judges_draws_and_shows(folder, tmp_path):
    task = task_of(folder, known_panel("lags"), "judged", sampling=few())
    model = untrained("rnn", task.data().train.cond_width, awake=False)
    told = []
    evaluation = task.evaluate(model, tmp_path, samples=7, seed=0, progress=lambda *words: told.append(words))
    assert 0 < evaluation.metrics["crps_sum"] == evaluation.metrics[f"{OURS}/crps_sum"]
    assert all(f"{name}/crps" in evaluation.metrics for name in baselines(task.setting()))
    assert "2 windows of 6 steps, 3 series, 7 futures each" in evaluation.tables[0].title
    assert (tmp_path / "forecasts.png").stat().st_size > 1000
    assert told[-1] == ("forecasts", 2, 2)
    files = task.sample(model, tmp_path, samples=4, seed=0, progress=quiet)
    assert [file.name for file in files] == ["samples.npz", "samples.png"]
    with np.load(files[0]) as arrays:
        assert arrays["futures"].shape == (4, HORIZON, 3)
        assert arrays["names"].tolist() == ["s0", "s1", "s2"]


@pytest.mark.parametrize(("first", "words"), [(268, "has 0 values .* all of its values before"), (279, "has 0 values .* from the other")])
def test_a_series_that_begins_late_is_named_and_does_not_break_the_back_test(first, words, folder):
    values = daily(288, 3)
    values[:first, 1] = np.nan
    task = task_of(folder, known_panel("lags", values), f"late-{first}", sampling=few())
    with pytest.warns(UserWarning, match=f"'s1' {words}"):
        s = task.setting()
    model = SeriesModel.bare(untrained("rnn", s.covariates.width(s.normal), awake=False), s.normal, s.covariates, s.context)
    truth, futures = rolling(s, model, few(), 0, quiet)
    assert all(np.isfinite(one).all() for one in futures.values())
    assert np.isnan(truth[0, :, 1]).all() == (first > 276), "what had not begun is not scored"
    assert not np.isnan(truth[1]).any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"horizon": None}, "say how far to forecast: --task.horizon STEPS"),
        ({"horizon": 40, "windows": 4}, r"4 test windows of 40 steps leave 128 of 288 steps .* at least 160 are needed"),
        ({"horizon": 100}, "a horizon is from 1 to a quarter"),
    ],
)
def test_settings_that_cannot_be_say_why(options, words, folder):
    with pytest.raises(ValueError, match=words):
        task_of(folder, known_panel("lags"), "impossible", **options).setting()


def test_a_horizon_of_a_quarter_can_be_trained(folder):
    data = task_of(folder, panel_of(t=4 * HORIZON), "quarter", windows=0).data()
    assert data.train.all().numel()
    assert data.valid.all().numel()


def test_seasons_count_from_one_and_may_be_a_list():
    with pytest.raises(ValueError, match="season counts steps from 1; got"):
        Forecasting("exchange", season=(0,))
    assert hash(Forecasting("exchange", season=[24])) == hash(Forecasting("exchange", season=(24,)))


@pytest.mark.parametrize("option", ["horizon", "held", "context", "windows"])
def test_options_of_the_task_count(option):
    with pytest.raises(ValueError, match=f"{option} counts from"):
        Forecasting("exchange", **{option: -1})


def test_without_test_windows_there_is_nothing_to_judge(folder, tmp_path):
    task = task_of(folder, known_panel("lags"), "unjudged", windows=0)
    with pytest.raises(ValueError, match=r"no test windows to measure on; set --task\.windows"):
        task.evaluate(None, tmp_path, samples=2, seed=0, progress=quiet)


def test_each_public_set_has_a_recipe_with_either_network():
    assert {name: named.horizon for name, named in NAMED.items()} == HORIZONS
    assert MINUTES.keys() == HORIZONS.keys()
    assert FORECASTING.keys() == {name + way for name in HORIZONS for way in ("", "-transformer", "-paper", "-timegrad")}
    for name, recipe in FORECASTING.items():
        assert resolve(name) is recipe
        assert name.partition("-")[0] in recipe.__doc__
        made = recipe()
        assert made.task.source == name.partition("-")[0]
        whole = getattr(made.model.backbone, "causal", True) is False
        assert (made.task.sampling.schedule == "full_sequence") == whole


@pytest.mark.parametrize("name", FORECASTING)
def test_a_recipe_can_be_written_down_and_read_again(name):
    experiment = FORECASTING[name]()
    assert from_dict(Experiment, json.loads(json.dumps(to_dict(experiment)))) == experiment


# Futures.


@kinds
@networks
@pytest.mark.parametrize("horizon", [None, 1, 4])
def test_the_shape_and_the_seed(kind, network, horizon):
    values = values_of(kind)
    series, clock = forecaster_of(values, kind, network)
    kept = values.copy()
    one, again, other = (series.draw(values, clock, horizon=horizon, sampling=few(network), generator=seeded(s)) for s in (0, 0, 1))
    assert one.shape == (5, horizon or HORIZON, 2)
    assert np.isfinite(one).all()
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()
    np.testing.assert_array_equal(values, kept)


@pytest.mark.filterwarnings("error")
def test_a_horizon_of_one_step_is_listened_to():
    values = daily()
    series, clock = forecaster_of(values, horizon=1)
    heard = series.listen(values, clock)
    assert heard.warmth.shape == (1,)
    assert heard.draw(values, clock, sampling=few()).shape == (5, 1, 2)


def test_many_futures_are_drawn_a_part_at_a_time(monkeypatch):
    values = daily()
    series, clock = forecaster_of(values)
    whole = series.draw(values, clock, sampling=few(samples=9), generator=seeded(0))
    monkeypatch.setattr(forecasting, "ROWS", 8)
    told = []
    parts = series.draw(values, clock, sampling=few(samples=9), generator=seeded(0), progress=lambda *words: told.append(words))
    np.testing.assert_allclose(parts, whole, rtol=1e-4)
    assert told == [(8, 18), (16, 18), (18, 18)]


@networks
def test_a_fresh_network_draws_tokens_that_are_standard_normal(network):
    values = daily(480)
    series, clock = forecaster_of(values, network=network, awake=False)
    futures = series.draw(values, clock, sampling=few(network, samples=600, steps=8, schedule="full_sequence"), generator=seeded(0))
    tokens = in_tokens(series, values, futures)
    found = np.quantile(tokens, [0.05, 0.25, 0.5, 0.75, 0.95])
    np.testing.assert_allclose(found, [-1.645, -0.674, 0, 0.674, 1.645], atol=0.06)
    np.testing.assert_allclose(tokens.std((0, 2)), 1, atol=0.06)
    np.testing.assert_allclose(np.corrcoef(tokens[..., 0].T), np.eye(HORIZON), atol=0.15)


def together(values, network="rnn", **options):
    """Correlations (d, d) of past departures, of futures after listening, and of futures without."""
    series, clock = forecaster_of(values, network=network, awake=False)
    sampling = few(network, samples=300, steps=8, schedule="full_sequence")
    found = [np.corrcoef(series.normal.tokens(values, clock)[series.normal.warm :].T)]
    for one in (series.listen(values, clock, **options), series):
        futures = one.draw(values, clock, sampling=sampling, generator=seeded(0))
        found.append(np.corrcoef(in_tokens(series, values, futures).reshape(-1, values.shape[1]).T))
    return found


@networks
def test_series_that_moved_together_are_drawn_together(network):
    """The copula: the network sees one series at a time, yet futures correlate as the departures of the past did."""
    past, heard, alone = together(daily(960, share=0.9), network, windows=120)
    assert past[0, 1] == pytest.approx(0.9, abs=0.02)
    assert heard[0, 1] == pytest.approx(past[0, 1], abs=0.08)
    assert abs(alone[0, 1]) < 0.1


def test_a_series_apart_does_not_loosen_those_that_move_together():
    values = daily(960, 3, share=0.9)
    values[:, 2] = daily(960, 3, seed=1)[:, 2]
    past, heard, _ = together(values, windows=120)
    assert heard[0, 1] == pytest.approx(past[0, 1], abs=0.1)
    assert abs(heard[0, 2]) < 0.15


def test_a_network_that_is_as_sure_as_it_should_be_keeps_its_noise():
    """A season and Gaussian noise: the network has nothing to add, and the noise of past windows has variance 1."""
    values = daily(720, 20)
    series, clock = forecaster_of(values, awake=False)
    heard = series.listen(values, clock)
    np.testing.assert_allclose(heard.warmth, 1, atol=0.06)
    held = series.listen(values, clock, held=10 * HORIZON)
    np.testing.assert_allclose(held.warmth, 1, atol=0.12)


def test_a_network_that_is_too_sure_gets_more_noise_where_it_was_not_trained():
    values = daily(720, 20)
    values[-60:] += 0.3 * rng(1).standard_normal((60, 20))  # twice the variance, in the part that is held back
    series, clock = forecaster_of(values[:-60], awake=False)
    heard = series.listen(values, np.arange(720), held=60)
    assert heard.warmth.mean() > 1.2
    assert series.listen(values[:-60], clock, held=60).warmth.mean() < 1.15


@pytest.mark.parametrize("listened", [False, True])
def test_nine_tenths_of_what_happens_lies_in_the_band_of_nine_tenths(listened):
    values, first = daily(720, 20), 672
    series, clock = forecaster_of(values[:first], awake=False)
    if listened:
        series = series.listen(values[:first], clock)
    sampling = few(samples=150, steps=8, schedule="full_sequence")
    origins = range(first, 720, HORIZON)
    drawn = [series.draw(values[:o], np.arange(o), sampling=sampling, generator=seeded(o)) for o in origins]
    truth = np.stack([values[o : o + HORIZON] for o in origins])
    assert 0.85 < coverage(np.stack(drawn, axis=1), truth, 0.9) < 0.95


def test_a_history_too_short_to_listen_to_leaves_noise_as_it_is():
    values = walk(18)
    series, clock = forecaster_of(values, "steps")
    assert series.listen(values, clock) is series


@kinds
@networks
def test_listening_passes_over_what_is_missing(kind, network):
    values = holed(values_of(kind), (slice(180, 190), 0), (slice(230, 233), 1))
    series, clock = forecaster_of(values, kind, network)
    heard = series.listen(values, clock, windows=12)
    assert all(torch.isfinite(value).all() for value in tensors_of(heard).values())
    assert np.isfinite(heard.draw(values, clock, sampling=few(network), generator=seeded(0))).all()


def test_a_series_that_was_not_heard_of_lately_has_noise_of_its_own():
    values = holed(daily(600, 3, share=0.9), (slice(300, 596), 0))
    series, clock = forecaster_of(values, awake=False)
    futures = series.listen(values, clock).draw(values, clock, sampling=few(samples=200, schedule="full_sequence"), generator=seeded(0))
    tokens = in_tokens(series, values, futures)
    np.testing.assert_allclose(tokens.std((0, 1)), 1, atol=0.25)


@pytest.mark.parametrize("together", [False, True])
def test_series_are_told_how_the_others_did_lately_if_so_wanted(together):
    values = daily(d=3)
    series, clock = forecaster_of(values, together=together)
    other = values.copy()
    other[-3, 2] += 1
    one, two = (series.draw(v, clock, sampling=few(), generator=seeded(0))[..., :2] for v in (values, other))
    assert (one != two).any() == together


@kinds
@networks
def test_a_saved_model_draws_the_same_futures(kind, network, tmp_path):
    values, known = holed(values_of(kind), (280, 0)), rng(2).standard_normal((400, 2))
    series, clock = forecaster_of(values, kind, network, known=known)
    series = series.listen(values, clock, known, windows=12)
    series.save(tmp_path)
    loaded = SeriesModel.load(tmp_path)
    same(loaded.normal, series.normal)
    same(loaded.covariates, series.covariates)
    one, other = (s.draw(values, clock, known, sampling=few(network), generator=seeded(0)) for s in (series, loaded))
    np.testing.assert_array_equal(one, other)
    assert {file.suffix for file in tmp_path.rglob("*") if file.is_file()} == {".json", ".safetensors"}


def test_a_folder_without_a_model_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no forecasting model .*`dforce forecast FILE` trains one"):
        SeriesModel.load(tmp_path)


def test_one_of_several_series_can_be_drawn_alone():
    values = daily(d=3)
    series, clock = forecaster_of(values, awake=False)
    assert limited(series, 1, False) is series
    alone = limited(series, 1, True)
    futures = alone.draw(values[:, 1:2], clock, sampling=few(samples=200), generator=seeded(0))
    together = series.draw(values, clock, sampling=few(samples=200), generator=seeded(0))
    np.testing.assert_allclose(futures[..., 0].mean(0), together[..., 1].mean(0), atol=0.15)


# Mistakes.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: {"values": v[:, :1]}, r"trained on 2 series; got values of shape \(288, 1\)"),
        (lambda v: {"values": v[:, 0]}, r"trained on 2 series; got values of shape \(288,\)"),
        (lambda v: {"horizon": 7}, "1 to 6 steps ahead; got 7. Train one with a longer horizon"),
        (lambda v: {"horizon": 0}, "1 to 6 steps ahead; got 0"),
        (lambda v: {"values": v[:20], "clock": np.arange(20)}, "more than 24 steps of history; got 20"),
        (lambda v: {"known": None}, "known in advance must cover 294 steps and be 1 as in training"),
        (lambda v: {"known": np.zeros((293, 1))}, r"must cover 294 steps and be 1 as in training; got \(293, 1\)"),
        (lambda v: {"known": np.zeros((294, 2))}, r"got \(294, 2\)"),
    ],
)
def test_forecasts_that_cannot_be_say_why(change, words):
    values, known = daily(), rng().standard_normal((294, 1))
    series, clock = forecaster_of(values, known=known)
    arguments = {"values": values, "clock": clock, "known": known, **change(values)}
    with pytest.raises(ValueError, match=words):
        series.draw(**arguments, sampling=few())


def test_a_single_series_without_its_axis_says_so():
    series, clock = forecaster_of(daily(d=1))
    with pytest.raises(ValueError, match=r"values of shape \(288,\)"):
        series.draw(daily(d=1)[:, 0], clock, sampling=few())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"samples": 0}, "samples and steps count from 1; got 0"),
        ({"steps": 0}, "samples and steps count from 1; got 100, 0"),
        ({"schedule": "trapezoid"}, "schedule is autoregressive, pyramid or full_sequence; got 'trapezoid'"),
    ],
)
def test_sampling_checks_its_options(options, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**options)


# What is missing, and what is doubted.


@networks
@pytest.mark.parametrize(
    ("kind", "back", "together"),
    [
        ("lags", 1, False),
        ("lags", 3, False),
        ("lags", 3, True),
        ("lags", 22, False),
        ("steps", 1, False),
        ("steps", 3, False),
    ],
)
def test_a_value_that_is_not_believed_at_all_is_as_good_as_missing(kind, back, together, network):
    values = values_of(kind)
    series, clock = forecaster_of(values, kind, network, together=together)
    level = np.zeros(values.shape)
    level[-back, 0] = LEVELS
    base, doubted = (series.draw(values, clock, sampling=few(network), level=x, generator=seeded(0)) for x in (None, level))
    missing = series.draw(holed(values, (-back, 0)), clock, sampling=few(network), generator=seeded(0))
    np.testing.assert_array_equal(doubted, missing)
    assert (doubted[..., 0] != base[..., 0]).any()


@kinds
@networks
def test_no_doubt_is_no_change_and_some_is_some(kind, network):
    values = values_of(kind)
    series, clock = forecaster_of(values, kind, network, together=False)

    def draw(level):
        return series.draw(values, clock, sampling=few(network), level=level, generator=seeded(0))

    base = draw(None)
    np.testing.assert_array_equal(draw(np.zeros(values.shape)), base)
    level = np.zeros(values.shape)
    level[-4:, 1] = LEVELS // 2
    changed = draw(level)
    np.testing.assert_array_equal(changed[..., 0], base[..., 0])
    assert (changed[..., 1] != base[..., 1]).any()


@kinds
def test_the_more_a_wrong_value_is_doubted_the_less_it_shifts_the_forecast(kind):
    """As the last value, on which steps rest, and as one a season before the forecast, to which lags reach."""
    values = values_of(kind)
    series, clock = forecaster_of(values, kind, awake=False)
    wrong = values.copy()
    back = 1 if kind == "steps" else 24
    wrong[-back, 0] += 50

    def shift(doubt):
        level = np.zeros(values.shape)
        level[-back, 0] = round(doubt * LEVELS)
        return np.abs(series.draw(wrong, clock, sampling=few(), level=level, generator=seeded(0)) - base)[..., 0].max()

    base = series.draw(values, clock, sampling=few(), generator=seeded(0))
    shifts = [shift(doubt) for doubt in (0.0, 0.3, 0.6, 0.9)]
    assert shifts == sorted(shifts, reverse=True)
    assert shifts[-1] < 0.15 * shifts[0]
    assert shifts[0] > 4


def test_a_doubted_value_hardly_reaches_the_company_of_the_others():
    values = daily()
    series, clock = forecaster_of(values, "lags")
    level = np.zeros(values.shape)
    level[-2, 0] = round(0.9 * LEVELS)
    wrong = values.copy()
    wrong[-2, 0] += 50

    def draw(values, level=None):
        return series.draw(values, clock, sampling=few(), level=level, generator=seeded(0))[..., 1]

    base = draw(values, level)
    assert np.abs(draw(wrong, level) - base).max() < 0.5 * np.abs(draw(wrong) - draw(values)).max()


@kinds
@networks
def test_missing_values_may_be_anywhere_in_the_past(kind, network):
    values = holed(values_of(kind), (slice(0, 3), 0), (slice(264, 268), 0), (slice(280, 283), 1), (287, 1))
    series, clock = forecaster_of(values, kind, network)
    futures = series.draw(values, clock, sampling=few(network), generator=seeded(0))
    assert futures.shape == (5, HORIZON, 2)
    assert np.isfinite(futures).all()


@pytest.mark.parametrize("gap", [1, 3, 8])
def test_the_longer_ago_a_walk_was_seen_the_wider_its_first_step(gap):
    """Steps add up from where a series was seen last: after a gap of g the first step has the spread of 1 + g."""
    values = walk()
    series, clock = forecaster_of(values, "steps", awake=False, transform="none")
    sampling = few(samples=600, schedule="full_sequence")
    seen, unseen = (
        series.draw(v, clock, sampling=sampling, generator=seeded(0))[:, 0].std(0) for v in (values, holed(values, (slice(-gap, None), 0)))
    )
    assert unseen[0] / seen[0] == pytest.approx(np.sqrt(1 + gap), rel=0.12)
    assert unseen[1] / seen[1] == pytest.approx(1, rel=0.12)


def test_a_walk_not_seen_for_long_starts_where_it_was_seen_last():
    values = holed(walk(), (slice(-10, None), 0))
    series, clock = forecaster_of(values, "steps", awake=False, transform="none")
    futures = series.draw(values, clock, sampling=few(samples=600, schedule="full_sequence"), generator=seeded(0))
    assert futures[:, 0, 0].mean() == pytest.approx(values[-11, 0], abs=0.5)


def test_walks_that_end_at_different_times_still_move_together():
    values = holed(walk(share=0.95), (slice(-3, None), 0))
    series, clock = forecaster_of(values, "steps", awake=False, transform="none")
    futures = series.listen(values, clock).draw(values, clock, sampling=few(samples=400, schedule="full_sequence"), generator=seeded(0))
    steps = np.diff(futures, axis=1)
    assert np.corrcoef(steps.reshape(-1, 2).T)[0, 1] > 0.8


def test_the_gap_of_one_walk_leaves_another_as_sure_as_it_was():
    values = walk()
    series, clock = forecaster_of(values, "steps", awake=False, transform="none")
    series = dataclasses.replace(series, warmth=torch.tensor([1.4, 1.0, 1.0, 1.0, 1.0, 1.0]))
    sampling = few(samples=600, schedule="full_sequence")
    whole, gappy = (series.draw(v, clock, sampling=sampling, generator=seeded(0)) for v in (values, holed(values, (slice(-3, None), 0))))
    assert gappy[:, 0, 1].std() == pytest.approx(whole[:, 0, 1].std(), rel=0.1)


# Rewards.


@kinds
@networks
@pytest.mark.parametrize("schedule", ["pyramid", "full_sequence"])
def test_guidance_raises_the_reward(kind, network, schedule):
    values = values_of(kind)
    series, clock = forecaster_of(values, kind, network)

    def last(futures):
        return futures[:, -1].sum(-1)

    def mean(scale):
        sampling = few(network, samples=24, schedule=schedule, scale=scale)
        return series.draw(values, clock, sampling=sampling, reward=last, generator=seeded(0))[:, -1].sum(-1).mean()

    plain = series.draw(values, clock, sampling=few(network, samples=24, schedule=schedule), generator=seeded(0))
    assert mean(0.0) == pytest.approx(plain[:, -1].sum(-1).mean(), rel=1e-4)
    assert mean(0.0) < mean(0.5) < mean(2.0)


def test_a_reward_is_of_values_and_of_all_series_at_once():
    values = daily()
    series, clock = forecaster_of(values)
    seen = []

    def reward(futures):
        seen.append(futures.detach().clone())
        return futures.sum((1, 2))

    series.draw(values, clock, sampling=few(schedule="full_sequence"), reward=reward, generator=seeded(0))
    assert all(futures.shape == (5, HORIZON, 2) for futures in seen)
    assert 5 < seen[-1].mean() < 15, "in the units of the data"


def test_a_reward_of_the_wrong_shape_says_so():
    values = daily()
    series, clock = forecaster_of(values)
    with pytest.raises(ValueError, match=r"maps futures \(5, 6, 2\) to one score each, \(5,\); got \(5, 6\)"):
        series.draw(values, clock, sampling=few(schedule="full_sequence"), reward=lambda f: f.sum(-1))


def test_series_that_end_at_different_times_cannot_be_rewarded_together():
    values = holed(walk(), (-1, 0))
    series, clock = forecaster_of(values, "steps")
    with pytest.raises(ValueError, match="they end at different times; fill or cut the last values"):
        series.draw(values, clock, sampling=few(schedule="full_sequence"), reward=lambda f: f.sum((1, 2)))


def test_a_reward_is_of_the_horizon_even_after_a_gap():
    values = holed(walk(), slice(-3, None))
    series, clock = forecaster_of(values, "steps")
    seen = []

    def reward(futures):
        seen.append(tuple(futures.shape))
        return futures.sum((1, 2))

    series.draw(values, clock, sampling=few(schedule="full_sequence"), reward=reward)
    assert set(seen) == {(5, HORIZON, 2)}


# Filling gaps.


def test_gaps_are_filled_and_the_rest_is_untouched():
    values = holed(daily(), (slice(100, 104), 0), (150, 1), (slice(284, 288), 1), (slice(200, 203), slice(None)))
    series, clock = forecaster_of(daily(), network="transformer")
    filled = series.fill(values, clock, sampling=few("transformer", samples=7), generator=seeded(0))
    again = series.fill(values, clock, sampling=few("transformer", samples=7), generator=seeded(0))
    assert filled.shape == (7, 288, 2)
    assert np.isfinite(filled).all()
    there = ~np.isnan(values)
    assert (filled[:, there] == values[there]).all()
    assert (filled.std(0)[~there] > 0).all()
    np.testing.assert_array_equal(filled, again)


@pytest.mark.parametrize("transform", ["none", "log"])
def test_a_fresh_network_fills_gaps_with_what_is_expected(transform):
    values = daily(d=1)
    series, clock = forecaster_of(values, network="transformer", awake=False, transform=transform)
    gap = slice(250, 254)
    filled = series.fill(holed(values, gap), clock, sampling=few("transformer", samples=400, steps=16), generator=seeded(0))
    expected = 10 + 3 * waves(288, 1)[gap, 0]
    np.testing.assert_allclose(filled[:, gap, 0].mean(0), expected, atol=0.5)
    assert 0.15 < filled[:, gap, 0].std(0).mean() < 0.6


def test_a_gap_is_filled_by_what_lies_on_both_of_its_sides():
    values = daily()
    series, clock = forecaster_of(values, network="transformer")
    gap = slice(150, 153)

    def fill(at):
        changed = holed(values, (gap, 0))
        changed[at, 0] += 1
        return series.fill(changed, clock, sampling=few("transformer"), generator=seeded(0))[:, gap, 0]

    base = fill(0)
    assert (fill(149) != base).any()
    assert (fill(153) != base).any()


def test_an_early_gap_is_filled_from_the_seasons_there_are():
    """Of several lags those that reach back before the first value are left out, as they are everywhere else."""
    values = daily(d=1)
    values[-72:] += 100  # later, and nothing to an early gap
    series, clock = forecaster_of(daily(d=1), network="transformer", awake=False)
    weights = np.zeros(len(series.normal.lags))
    weights[:3] = 1 / 3
    series = dataclasses.replace(series, normal=dataclasses.replace(series.normal, weights=weights))
    gap = slice(30, 33)
    filled = series.fill(holed(values, gap), clock, sampling=few("transformer", samples=50), generator=seeded(0))
    np.testing.assert_allclose(filled[:, gap, 0].mean(0), 10 + 3 * waves(288, 1)[gap, 0], atol=1)


def test_gaps_of_two_series_that_overlap_are_two():
    values = holed(daily(), (slice(200, 204), 0), (slice(203, 208), 1))
    series, clock = forecaster_of(daily(), network="transformer")
    filled = series.fill(values, clock, sampling=few("transformer"), generator=seeded(0))
    assert np.isfinite(filled).all()


@pytest.mark.parametrize(
    ("kind", "network", "hole", "words"),
    [
        ("lags", "rnn", 100, r"looks at both of its sides; .* \(backbone=transformer\)"),
        ("steps", "transformer", 100, "fit with kind='lags'"),
        ("lags", "transformer", slice(100, 107), "gap of 7 steps from step 100 is longer than the horizon of 6"),
        ("lags", "transformer", 5, "gap at step 5 lies within the first 24 steps"),
    ],
)
def test_gaps_that_cannot_be_filled_say_why(kind, network, hole, words):
    values = values_of(kind)
    series, clock = forecaster_of(values, kind, network)
    with pytest.raises(ValueError, match=words):
        series.fill(holed(values, (hole, 0)), clock)


# Surprise.


@kinds
@networks
def test_what_nobody_expected_is_the_most_surprising(kind, network):
    values = values_of(kind, 72)
    series, clock = forecaster_of(values, kind, network, awake=False)
    values[60 if kind == "lags" else slice(60, None), 0] += 3 if kind == "lags" else 8
    surprise = series.surprise(values, clock, steps=4, draws=1)
    assert surprise.shape == values.shape
    assert np.nanargmax(surprise[:, 0]) == 60
    assert np.nanmax(surprise[:, 0]) > np.nanmax(surprise[:, 1]) + 3


@kinds
def test_what_is_not_there_does_not_surprise(kind):
    values = holed(values_of(kind, 96), (slice(50, 53), 0), (80, 1))
    series, clock = forecaster_of(values_of(kind, 96), kind)
    surprise = series.surprise(values, clock, steps=4, draws=1)
    np.testing.assert_array_equal(np.isnan(surprise), np.isnan(series.normal.tokens(values, clock)))
    np.testing.assert_array_equal(surprise, series.surprise(values, clock, steps=4, draws=1))


def test_surprise_is_in_nats():
    """A fresh network holds tokens for standard normal: then their likelihood is known."""
    values = daily(192, 6)
    series, clock = forecaster_of(values, awake=False)
    exact = 0.5 * (series.normal.tokens(values, clock) ** 2 + np.log(2 * np.pi))
    assert np.nanmean(series.surprise(values, clock, steps=8, draws=2)) == pytest.approx(np.nanmean(exact), abs=0.2)


# All series in one token, as in the paper.


def joint_of(folder, kind, garbage=None, **options):
    """A task whose tokens hold all series, and its forecaster with weights that are all drawn."""
    panel = known_panel(kind)
    panel = panel if garbage is None else garbled(panel, garbage)
    task = task_of(
        folder, panel, f"joint-{kind}-{garbage}", **{"expect": kind, "joint": True, "together": False, "sampling": few(), **options}
    )
    data = task.data().train
    net = randomised(RNN(data.event[0], data.cond_width, hidden=16, layers=2, blocks=1, levels=LEVELS))
    return task, task.forecaster(DiffusionForcing(net, NoiseSchedule(cosine(LEVELS))))


@kinds
def test_a_joint_token_holds_all_series_and_what_they_are_told(kind, folder):
    task, series = joint_of(folder, kind)
    s, data = task.setting(), task.data()
    assert data.train.event == (3,)
    batch = data.train.read(torch.tensor([[60], [200]]))
    tokens = s.normal.tokens(s.panel.values[: s.end], s.clock[: s.end])
    np.testing.assert_allclose(batch.x[1], tokens[200 : 200 + data.train.length], rtol=1e-5)
    at = 200 + s.context
    told = series._told(s.panel.values[:at], s.clock[:at], s.panel.known, 200, at + HORIZON, at)
    torch.testing.assert_close(told[0], batch.cond[1], rtol=0, atol=0)
    assert data.train.draw(500, seeded(0)).max() + data.train.length <= s.end - s.held


@kinds
def test_no_joint_forecast_depends_on_values_after_its_start(kind, folder):
    truth, futures = rolling(joint_of(folder, kind)[0].setting(), joint_of(folder, kind)[1], few(), 0, quiet)
    for window, start in enumerate((276, 282)):
        other, heard_so = joint_of(folder, kind, start)
        _, others = rolling(other.setting(), heard_so, few(), 0, quiet)
        np.testing.assert_array_equal(others[OURS][:, : window + 1], futures[OURS][:, : window + 1])
    assert futures[OURS].shape == (5, 2, HORIZON, 3)
    assert truth.shape == (2, HORIZON, 3)


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_joint_forecasts_are_saved_guided_and_drawn_with_fresh_noise(eta, folder, tmp_path):
    task, series = joint_of(folder, "lags")
    s = task.setting()

    def draw(model, **options):
        return model.draw(s.panel.values, s.clock, s.panel.known, sampling=few(eta=eta), generator=seeded(0), **options)

    series.save(tmp_path)
    loaded = SeriesModel.load(tmp_path)
    assert loaded.joint
    np.testing.assert_allclose(draw(loaded), draw(series), rtol=1e-6)
    raised = draw(series, reward=lambda y: y.sum((1, 2)))
    assert raised.sum() > draw(series).sum()


def test_what_is_missing_in_a_joint_token_is_as_expected(folder):
    task, series = joint_of(folder, "lags")
    s = task.setting()
    values = holed(s.panel.values, (-1, 0), (slice(-4, -1), slice(None)))
    tokens, levels = series._seen(values, s.clock, None, len(values) - 6, len(values))
    assert tokens.shape == (1, 6, 3)
    assert levels[0].tolist() == [0, 0, LEVELS, LEVELS, LEVELS, 0]
    assert tokens[0, -1, 0] == 0
    assert np.isfinite(series.draw(values, s.clock, s.panel.known, sampling=few(), generator=seeded(0))).all()


@pytest.mark.parametrize("ask", ["fill", "surprise"])
def test_what_asks_of_single_series_is_refused_of_all_at_once(ask, folder):
    task, series = joint_of(folder, "lags")
    s = task.setting()
    with pytest.raises(ValueError, match=r"train with joint=False|looks at both"):
        getattr(series, ask)(s.panel.values, s.clock, s.panel.known)
    with pytest.raises(ValueError, match="train with joint=False"):
        limited(series, 0, True)


def test_training_may_stop_by_a_score_of_the_task(folder):
    task, series = joint_of(folder, "lags")
    score = task.score(series.model, samples=4)
    assert score == task.score(series.model, samples=4) > 0
    s = task.setting()
    ahead, _ = joint_of(folder, "lags", s.end)
    assert ahead.score(series.model, samples=4) == score, "test windows have no say"
