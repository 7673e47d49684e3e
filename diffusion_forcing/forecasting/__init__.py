"""Forecasting: probabilistic forecasts of many series (paper, section 4.5)."""

try:
    import pandas  # noqa: F401
except ImportError as error:
    raise ImportError("time series need pandas: pip install 'diffusion_forcing[forecasting]'") from error

from .forecaster import Forecaster
from .model import Sampling, SeriesModel

__all__ = ["Forecaster", "Sampling", "SeriesModel"]
