"""The engine: training, runs, figures and the command line. It knows no domain but by name (`engine.recipes`)."""

from .fitting import Fit, fit

__all__ = ["Fit", "fit"]
