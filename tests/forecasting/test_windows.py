"""Training windows: their range, what is masked, and that conditions are those of forecasts."""

import numpy as np
import pytest
import torch
from oracles import seeded

pytest.importorskip("pandas", reason="pandas comes with the extra `forecasting`")

from series import CONTEXT, HORIZON, history, holed, model_of, rng, values_of

from diffusion_forcing.forecasting.windows import JointWindows, SeriesWindows

residuals = pytest.mark.parametrize("residual", ["seasonal", "difference"])


def windows_of(values, residual, *, first=0, last=288, known=None, kind=SeriesWindows):
    model = model_of(values, residual, known=known)
    return model, kind(history(values, known), model.scaler, model.features, CONTEXT, first, last)


@residuals
@pytest.mark.parametrize(("first", "last"), [(0, 288), (200, 218)])
def test_windows_lie_within_their_range(residual, first, last):
    model, windows = windows_of(values_of(residual), residual, first=first, last=last)
    assert windows.length == CONTEXT + HORIZON
    for drawn in (windows.draw(4000, seeded(0)), windows.all()):
        which, start = drawn.unbind(1)
        assert set(which.tolist()) == {0, 1}
        assert start.min() == max(first, model.scaler.warmup)
        assert start.max() + windows.length <= last
    assert windows.draw(4000, seeded(0))[:, 1].max() + windows.length == last, "and all of it is used"


@residuals
def test_missing_values_are_masked(residual):
    values = holed(values_of(residual), (150, 0), (slice(160, 163), 1))
    model, windows = windows_of(values, residual)
    tokens = model.scaler.encode(values, np.arange(288))
    places = [[0, 145], [1, 155], [0, 200]]
    batch = windows.read(torch.tensor(places))
    for row, (which, start) in enumerate(places):
        own = tokens[start : start + windows.length, which]
        np.testing.assert_array_equal(batch.mask[row], ~np.isnan(own))
        np.testing.assert_allclose(batch.x[row, :, 0], np.nan_to_num(own), rtol=1e-6)
    assert not batch.mask[:2].all()
    assert batch.mask[2].all()
    assert torch.isfinite(batch.cond).all()


@residuals
def test_conditions_of_a_forecast_are_those_of_training(residual):
    """Of steps that then lie in the future, too: lags reach back before the start, and the calendar goes on."""
    known = rng(3).standard_normal((288, 2))
    values = values_of(residual)
    model, windows = windows_of(values, residual, known=known)
    for start in (60, 200):
        at, end = start + CONTEXT, start + CONTEXT + HORIZON
        batch = windows.read(torch.tensor([[0, start], [1, start]]))
        cond = model._cond(history(values[:at], known), start, end, at)
        torch.testing.assert_close(cond, batch.cond, rtol=0, atol=0)
    assert windows.cond_width == batch.cond.shape[-1] == model.features.width(model.scaler)


def test_a_joint_token_of_which_half_is_missing_is_masked():
    values = holed(values_of("seasonal"), (200, 0), (201, slice(None)))
    model, windows = windows_of(values, "seasonal", kind=JointWindows)
    assert windows.event == (2,)
    batch = windows.read(torch.tensor([[195]]))
    np.testing.assert_allclose(batch.x[0], np.nan_to_num(model.scaler.encode(values, np.arange(288))[195:213]), rtol=1e-6)
    assert (~batch.mask[0]).nonzero()[:, 0].tolist() == [5, 6]


def test_a_range_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match=r"18 steps does not fit into the 17 .* more history, or a shorter horizon or context"):
        windows_of(values_of("difference"), "difference", first=100, last=117)
