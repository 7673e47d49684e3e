"""Forecasting: probabilistic forecasts of many series (paper, section 4.5)."""

try:
    import pandas  # noqa: F401
except ImportError as error:
    raise ImportError("forecasting needs pandas: pip install 'diffusion_forcing[forecasting]'") from error

from .forecaster import Forecast, Forecaster
from .model import SeriesModel
from .panel import Panel
from .reading import from_frame, read

__all__ = ["Forecast", "Forecaster", "Panel", "SeriesModel", "from_frame", "read"]
