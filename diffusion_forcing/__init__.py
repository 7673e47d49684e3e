"""Diffusion Forcing: sequence models in which every token has its own noise level.

    from diffusion_forcing import DiffusionForcing, NoiseSchedule, RNN, cosine, pyramid, rollout

Train with each token at its own random level; then one model and a schedule matrix decide at sampling time what happens.
"""

from .backbones import RNN, Backbone, Transformer, check_backbone
from .guidance import blend, classifier_free, guide, history_guidance
from .levels import Levels, independent, mixture, noisy_context, noisy_prefix, shared, staircase, teacher_forced
from .likelihood import bits_per_number, elbo, infer_level, joint_log_likelihood, log_likelihood
from .matrix import autoregressive, check_matrix, full_sequence, pin, pyramid, staggered, start_at, trapezoid
from .model import Denoiser, DiffusionForcing, mask_cond
from .monte_carlo import MonteCarlo
from .observations import Observation, filter, infill, interpolate, observe, smooth
from .parameterization import Prediction
from .preconditioning import KalmanFilter, LinearConstraint, Preconditioning, WienerSmoother
from .sampler import Context, Sampler
from .sampling import rolling, rollout, sample, start, stream
from .schedule import NoiseSchedule, cosine, linear, sigmoid
from .solver import ddim_step
from .weighting import FusedSNR, MinSNR, Uniform

__version__ = "0.1.0"

__all__ = [
    "RNN",
    "Backbone",
    "Context",
    "Denoiser",
    "DiffusionForcing",
    "FusedSNR",
    "KalmanFilter",
    "Levels",
    "LinearConstraint",
    "MinSNR",
    "MonteCarlo",
    "NoiseSchedule",
    "Observation",
    "Preconditioning",
    "Prediction",
    "Sampler",
    "Transformer",
    "Uniform",
    "WienerSmoother",
    "autoregressive",
    "bits_per_number",
    "blend",
    "check_backbone",
    "check_matrix",
    "classifier_free",
    "cosine",
    "ddim_step",
    "elbo",
    "filter",
    "full_sequence",
    "guide",
    "history_guidance",
    "independent",
    "infer_level",
    "infill",
    "interpolate",
    "joint_log_likelihood",
    "linear",
    "log_likelihood",
    "mask_cond",
    "mixture",
    "noisy_context",
    "noisy_prefix",
    "observe",
    "pin",
    "pyramid",
    "rolling",
    "rollout",
    "sample",
    "shared",
    "sigmoid",
    "smooth",
    "staggered",
    "staircase",
    "start",
    "start_at",
    "stream",
    "teacher_forced",
    "trapezoid",
]
