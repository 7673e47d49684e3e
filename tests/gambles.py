"""Decisions under chance whose best denoiser is a formula: what expectation, the joint posterior and expectimax choose is known exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from oracles import Denoise, Gaussian, amplitudes, believing
from torch import Generator, Tensor

from diffusion_forcing import NoiseSchedule, Prediction, linear, pyramid, sample

SCHEDULE = NoiseSchedule(linear(1000))


class Mixture:
    """Sequences of t tokens of one number: a Gaussian of standard deviation `std` around one of c means.

    weights: (c,), they sum to 1; means: (c, t).
    """

    def __init__(self, weights: list[float], means: list[list[float]], std: float = 0.1, schedule: NoiseSchedule = SCHEDULE) -> None:
        self.weights, self.means = torch.tensor(weights, dtype=torch.float64), torch.tensor(means, dtype=torch.float64)
        self.std, self.schedule = std, schedule

    def denoiser(self, causal: bool = True) -> Denoise:
        """(x, k) -> the exact conditional mean, given all tokens or (causal) each token and those before it."""

        def denoise(x: Tensor, k: Tensor) -> Prediction:
            alpha, sigma = amplitudes(self.schedule, k, x)
            noisy = x.double().transpose(1, 2)  # (b, 1, t), against (c, t)
            alpha, sigma = alpha.transpose(1, 2), sigma.transpose(1, 2)
            variance = alpha**2 * self.std**2 + sigma**2
            error = noisy - alpha * self.means
            fit = -0.5 * (error**2 / variance + variance.log())
            fit = fit.cumsum(-1) if causal else fit.sum(-1, keepdim=True)
            which = torch.softmax(fit + self.weights.log()[:, None], dim=1)
            x0 = (which * (self.means + alpha * self.std**2 / variance * error)).sum(1)
            return believing(self.schedule, x0[..., None], x, k)

        return denoise


@dataclass(frozen=True)
class Problem:
    """Chances whose best denoiser is known, a reward, and the scale of guidance at which its exact answers below hold."""

    process: Mixture | Gaussian
    reward: Callable[[Tensor], Tensor]
    scale: float
    tokens: int = 2

    def play(
        self, guided: Callable[[Denoise], Denoise], slope: float = 0, n: int = 400, steps: int = 20, causal: bool = True, seed: int = 0
    ) -> Tensor:
        """(n, t) sequences sampled along a pyramid by ancestral steps; slope = steps is one token after the other."""
        generator = Generator().manual_seed(seed)
        noise = torch.randn(n, self.tokens, 1, generator=generator, dtype=torch.float64)
        matrix = pyramid(self.tokens, SCHEDULE.ladder(steps), slope)
        return sample(guided(self.process.denoiser(causal)), SCHEDULE, noise, matrix, eta=1.0, generator=generator)[..., 0]


def last(x: Tensor) -> Tensor:
    """The pay, which is the last token."""
    return x[:, -1].sum(-1)


def concave(x: Tensor) -> Tensor:
    """The pay, in which each unit below -0.5 counts four times."""
    return last(x) - 3 * torch.relu(-0.5 - last(x))


def falls(x: Tensor) -> Tensor:
    """The offset, less 10 beyond the edge at 1 (smoothed over 0.05, so that it has a gradient)."""
    return x[:, 0].sum(-1) - 10 * torch.sigmoid((last(x) - 1) / 0.05)


GAMBLE = Problem(Mixture([0.5, 0.2, 0.3], [[-1, 0.3], [1, 1.5], [1, -1.5]]), last, scale=3.0)
"""(choice, pay). Safe (-1) pays 0.3; risky (1) pays 1.5 with chance 0.4, else -1.5: -0.3 on average."""
GAMBLE_EXACT = {"joint": 0.936, "expectation": 0.142}
"""P(risky) under p(x) exp(3 pay), and under p(choice) exp(3 E[pay | choice])."""

UTILITY = Problem(Mixture([0.5, 0.3, 0.2], [[-1, 0.1], [1, 1.5], [1, -1.5]]), concave, scale=2.0)
"""(choice, pay). Risky pays 1.5 with chance 0.6, more than the safe 0.1 on average, but its losses count four times."""

CLIFF = Problem(Gaussian(SCHEDULE, torch.tensor([[1.0, 1.0], [1.0, 1.25]])), falls, scale=2.0)
"""(offset, where the wind takes it). Offset is white, wind has standard deviation 0.5, beyond 1 is a cliff."""


def cliff_value(offset: Tensor) -> float:
    """The expected reward of offsets (n,) over the wind, on average."""
    return float((offset - 10 * torch.special.ndtr((offset - 1) / 0.5)).mean())


def _choices() -> Mixture:
    weights, means = [], []
    for chance, then in ((-1, -1), (-1, 1), (1, -1), (1, 1)):
        for first, pay, weight in ((-1.5, float(chance == then), 1.0), (0.0, 0.7, 1.0), (1.5, 2.0, 0.4), (1.5, -1.0, 0.6)):
            weights.append(weight / 12)
            means.append([first, chance, then, pay])
    return Mixture(weights, means)


CHOICES = Problem(_choices(), last, scale=4.0, tokens=4)
"""(first choice, chance, second choice, pay). Skill (-1.5) pays 1 if the second choice is that of chance, which it is half of the time in
the data; sure (0) pays 0.7; gamble (1.5) pays 2 with chance 0.4, else -1."""
CHOSEN = torch.tensor([True, False, True, False])


def first_choices(x: Tensor) -> list[float]:
    """Shares of skill, sure and gamble."""
    return [float(((x[:, 0] - at).abs() < 0.75).double().mean()) for at in (-1.5, 0.0, 1.5)]


def risky(x: Tensor) -> float:
    """Share of risky choices."""
    return float((x[:, 0] > 0).double().mean())
