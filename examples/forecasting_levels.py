"""What noise levels are good for in forecasting: `python examples/forecasting_levels.py`, two minutes on one core.

Draws forecasting_levels.png: a gap filled from both sides, an unreliable sensor at level K, a scenario, and an anomaly.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from diffusion_forcing.engine.plotting import COLOURS, figure
from diffusion_forcing.forecasting import Forecaster


def demand(days: int = 60, seed: int = 0) -> pd.DataFrame:
    """Hourly demand of two districts: a daily wave, lower at weekends, and weather that affects both."""
    rng = np.random.default_rng(seed)
    hours = pd.date_range("2026-03-02", periods=24 * days, freq="h")
    weather = np.zeros(len(hours))
    for t in range(1, len(hours)):
        weather[t] = 0.97 * weather[t - 1] + rng.normal(scale=0.25)
    busy = np.where(hours.dayofweek < 5, 1.0, 0.6)
    wave = busy * np.sin(2 * np.pi * (hours.hour - 8) / 24)
    noise = rng.normal(scale=0.5, size=(len(hours), 2))
    return pd.DataFrame({"north": 20 + 6 * wave + weather + noise[:, 0], "south": 30 + 9 * wave + 1.5 * weather + noise[:, 1]}, index=hours)


def band(ax: Any, index: Any, samples: np.ndarray, colour: str, label: str) -> None:
    """Median and 90 % band of samples (n, t)."""
    low, middle, high = np.quantile(samples, [0.05, 0.5, 0.95], axis=0)
    ax.fill_between(index, low, high, color=colour, alpha=0.25, lw=0)
    ax.plot(index, middle, color=colour, lw=1.6, label=label)


def total(futures: Tensor) -> Tensor:
    """A scenario: at the twentieth hour, demand of both districts together is at least 62."""
    return (futures[:, 19].sum(1) - 62).clamp(max=0)


def main(minutes: float = 0.5, file: Path = Path("forecasting_levels.png")) -> None:
    frame = demand()
    forecaster = Forecaster(horizon=24, minutes=minutes).fit(frame)
    usual = forecaster.predict()

    gappy = frame.copy()
    gap = slice(-60, -48)
    gappy.iloc[gap, 0] = np.nan
    filled = Forecaster(horizon=24, minutes=minutes, backbone="transformer").fit(gappy).fill()

    broken = frame.copy()
    broken.iloc[-10:, 0] -= 12.0  # a sensor that has read too low for ten hours
    noise_level = np.zeros(broken.shape)
    noise_level[-10:, 0] = 1.0
    trusted, ignored = forecaster.predict(data=broken), forecaster.predict(data=broken, noise_level=noise_level)

    scenario = forecaster.predict(reward=total)

    odd = frame.copy()
    odd.iloc[-30, 0] += 5.0
    score = forecaster.anomaly_score(odd)["north"]

    with figure(file, width=11, height=7) as fig:
        axes = fig.subplots(2, 2).flat
        ax = axes[0]
        shown = slice(-84, -24)
        band(ax, frame.index[gap], filled.samples[:, gap, 0], COLOURS[0], "filled, 90 %")
        ax.plot(gappy.index[shown], gappy["north"].iloc[shown], color="black", lw=1)
        ax.plot(frame.index[gap], frame["north"].iloc[gap], color="black", lw=1, ls=":", label="hidden values")
        ax.set_title("a gap, filled from both sides")
        ax.legend(fontsize=8)
        ax = axes[1]
        ax.plot(broken.index[-60:], broken["north"].iloc[-60:], color="black", lw=1)
        band(ax, usual.index, trusted.samples[..., 0], COLOURS[1], "level 0 (exact)")
        band(ax, usual.index, ignored.samples[..., 0], COLOURS[0], "level K (ignored)")
        ax.set_title("a sensor that fell by 12, ten hours ago")
        ax.legend(fontsize=8)
        ax = axes[2]
        ax.plot(frame.index[-60:], frame.iloc[-60:].sum(1), color="black", lw=1)
        band(ax, usual.index, usual.samples.sum(-1), COLOURS[0], "without reward")
        band(ax, usual.index, scenario.samples.sum(-1), COLOURS[3], "reward: total of 62 or more here")
        ax.plot([usual.index[19]], [62], "v", color=COLOURS[3])
        ax.set_title("a scenario: both districts together")
        ax.legend(fontsize=8)
        ax = axes[3]
        ax.plot(odd.index[-72:], odd["north"].iloc[-72:], color="black", lw=1)
        ax.plot([odd.index[-30]], [odd["north"].iloc[-30]], "o", mfc="none", mec=COLOURS[1], ms=10)
        other = ax.twinx()
        other.bar(score.index[-72:], score.iloc[-72:], width=1 / 24, color=COLOURS[1], alpha=0.5)
        other.set_ylabel("anomaly score (nats)")
        other.set_ylim(0, 3 * float(np.nanmax(score.iloc[-72:])))
        ax.set_title("an anomaly, by its likelihood")
        for ax in fig.axes:
            ax.tick_params(labelsize=7)
            for label in ax.get_xticklabels():
                label.set_rotation(20)
    print(f"wrote {file}")


if __name__ == "__main__":
    main(*(float(word) for word in sys.argv[1:2]))
