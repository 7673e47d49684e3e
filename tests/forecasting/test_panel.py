"""The panel: its checks, its future, its files, and how far ahead it can be forecast."""

import subprocess
import sys

import numpy as np
import pytest

pd = pytest.importorskip("pandas", reason="pandas comes with the extra `forecasting`")

from series import plain_panel

from diffusion_forcing.forecasting.calendar import clock_of
from diffusion_forcing.forecasting.panel import Panel, check_horizon


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"values": np.zeros(6)}, r"shape \(t, d\)"),
        ({"values": np.zeros((6, 3))}, "2 names; got"),
        ({"values": np.zeros((5, 2))}, "5 rows of values; got 6"),
        ({"names": ("a", "a")}, "'a' occurs twice"),
        ({"known": np.zeros((6, 1)), "known_names": ("a",)}, "'a' occurs twice"),
        ({"known": np.zeros((5, 1)), "known_names": ("x",)}, "at least 6 rows"),
        ({"known": np.zeros((6, 1))}, "0 known_names"),
        ({"known": np.full((6, 1), np.nan), "known_names": ("x",)}, "'x' is nan at step 0"),
        ({"values": np.array([[0, 0]] * 4 + [[0, np.inf]] * 2)}, "'b' is inf at step 4"),
        ({"freq": None}, "DatetimeIndex with a freq"),
        ({"freq": "D"}, "steps of freq 'D'"),
        ({"index": pd.RangeIndex(6)}, "without dates has no freq"),
        ({"index": pd.RangeIndex(6, 0, -1), "freq": None}, "run forward"),
        ({"index": pd.Index(list("abcdef"))}, "got Index"),
    ],
)
def test_a_panel_checks_itself(changes, words):
    with pytest.raises(ValueError, match=words):
        plain_panel(**changes)


@pytest.mark.parametrize(
    ("index", "freq", "expected"),
    [
        (pd.date_range("2020-01-01", periods=6, freq="h"), "h", ["2020-01-01 06:00", "2020-01-01 07:00"]),
        (pd.date_range("2020-01-03", periods=6, freq="B"), "B", ["2020-01-13", "2020-01-14"]),
        (pd.date_range("2020-01-31", periods=6, freq="ME"), "ME", ["2020-07-31", "2020-08-31"]),
    ],
)
def test_the_future_goes_on_at_the_panels_frequency(index, freq, expected):
    assert list(plain_panel(index=index, freq=freq).future(2)) == [pd.Timestamp(stamp) for stamp in expected]


def test_the_future_of_a_plain_clock_keeps_its_step():
    plain = plain_panel(index=pd.RangeIndex(10, 40, 5), freq=None)
    assert list(plain.future(2)) == [40, 45]
    with pytest.raises(ValueError, match="steps counts from 1; got 0"):
        plain.future(0)


def test_until_forgets_what_came_later_but_keeps_what_was_known():
    whole = plain_panel(known=np.arange(8.0)[:, None], known_names=("x",), notes=("of the whole",))
    early = whole.until(4)
    assert early.values.shape == (4, 2)
    assert list(early.index) == list(whole.index[:4])
    assert early.known.shape == (8, 1)
    assert early.notes == ()
    assert early.equals(plain_panel(t=4, known=np.arange(8.0)[:, None], known_names=("x",)))
    for t in (0, 7):
        with pytest.raises(ValueError, match=f"1 to 6 of them; got {t}"):
            whole.until(t)


def test_to_frame_is_wide():
    frame = plain_panel().to_frame()
    assert list(frame.columns) == ["a", "b"]
    assert frame.index.name == "time"
    assert plain_panel(index=pd.RangeIndex(6), freq=None).to_frame().index.name == "t"
    assert plain_panel(names=("time", "b")).to_frame().index.name is None, "a series may have the name"


@pytest.mark.parametrize("freq", ["h", "B", "ME", None])
def test_a_panel_is_saved_as_it_is(freq, tmp_path):
    values = np.random.default_rng(0).standard_normal((40, 2))
    values[3, 1] = np.nan
    index = pd.RangeIndex(7, 127, 3) if freq is None else pd.date_range("2020-01-31", periods=40, freq=freq)
    panel = Panel(values, ("a", "b"), index, freq, np.random.default_rng(1).random((50, 1)), ("x",), value_type="real")
    panel.save(tmp_path / "p.panel.npz")
    assert Panel.load(tmp_path / "p.panel.npz").equals(panel)
    assert not Panel.load(tmp_path / "p.panel.npz").equals(panel.until(39))


@pytest.mark.parametrize("zone", ["Europe/Berlin", "+01:00", "-05:30", "UTC"])
@pytest.mark.parametrize("freq", ["h", "D"])
def test_a_panel_keeps_its_time_zone(zone, freq, tmp_path):
    index = pd.date_range("2024-01-01", periods=200, freq=freq, tz=zone)
    panel = Panel(np.zeros((200, 1)), ("a",), index, freq, np.zeros((200, 0)))
    panel.save(tmp_path / "p.panel.npz")
    loaded = Panel.load(tmp_path / "p.panel.npz")
    assert loaded.equals(panel)
    np.testing.assert_array_equal(clock_of(loaded), clock_of(panel))


def test_fixed_offsets_of_pytz_are_kept(tmp_path):
    pytz = pytest.importorskip("pytz")
    index = pd.date_range("2020-01-01", periods=200, freq="h", tz=pytz.FixedOffset(60))
    Panel(np.zeros((200, 1)), ("a",), index, "h", np.zeros((200, 0))).save(tmp_path / "p.panel.npz")
    assert (Panel.load(tmp_path / "p.panel.npz").index == index).all()


@pytest.mark.parametrize(("horizon", "fits"), [(0, False), (-1, False), (1, True), (3, True), (4, False)])
def test_a_horizon_is_a_quarter_at_most(horizon, fits):
    panel = plain_panel(t=12)
    if fits:
        return check_horizon(panel, horizon)
    with pytest.raises(ValueError, match=f"1 to a quarter of the steps there are, here 3 of 12; got {horizon}"):
        check_horizon(panel, horizon)


def test_a_horizon_needs_covariates():
    panel = plain_panel(t=12, known=np.arange(14.0)[:, None], known_names=("x",))
    check_horizon(panel, 2)
    with pytest.raises(ValueError, match=r"'x', known in advance, .* 3 steps .* 2 rows .* 2020-01-01 14:00:00"):
        check_horizon(panel, 3)
    check_horizon(panel.until(11), 2)


def test_without_pandas_the_extra_is_named():
    code = "import sys; sys.modules['pandas'] = None; import diffusion_forcing.forecasting"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "pip install 'diffusion_forcing[forecasting]'" in done.stderr.splitlines()[-1]
