"""Denoisers whose answers are known, for the tests of everything that takes a denoiser."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn

from diffusion_forcing import NoiseSchedule, Prediction

Denoise = Callable[[Tensor, Tensor], Prediction]


def seeded(seed: int) -> Generator:
    """A generator of its own for one test."""
    return torch.Generator().manual_seed(seed)


def randomised(module: nn.Module, seed: int = 0, scale: float = 0.2) -> nn.Module:
    """The module with every parameter drawn anew: a fresh network outputs zeros, which hides most mistakes."""
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return module.eval()


def amplitudes(schedule: NoiseSchedule, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """alpha and sigma of levels k (b, t), shaped to multiply tokens x (b, t, *event), in float64."""
    shape = k.shape + (1,) * (x.ndim - 2)
    return schedule.alpha_table.double()[k].reshape(shape), schedule.sigma_table.double()[k].reshape(shape)


def believing(schedule: NoiseSchedule, x0: Tensor, x: Tensor, k: Tensor) -> Prediction:
    """The prediction of one who holds x0 to be the clean version of x at levels k."""
    alpha, sigma = amplitudes(schedule, k, x)
    eps = torch.where(sigma > 0, (x - alpha * x0) / sigma.clamp(min=1e-12), torch.zeros_like(x))
    return Prediction(x0.to(x.dtype), eps.to(x.dtype))


def oracle(schedule: NoiseSchedule, data: Tensor) -> Denoise:
    """A denoiser that knows the data (b, t, *event) and returns them whatever it is shown."""
    return lambda x, k: believing(schedule, data, x, k)


def ar1(t: int, rho: float) -> Tensor:
    """(t, t) covariance of a stationary first-order autoregressive process of variance 1."""
    i = torch.arange(t, dtype=torch.float64)
    return rho ** (i[:, None] - i).abs()


def mixed(t: int, seed: int = 0) -> Tensor:
    """(t, t) covariance with variances of about 1 and no structure: every token tells of every other."""
    root = torch.randn(t, t + 2, generator=seeded(seed), dtype=torch.float64)
    return root @ root.T / (t + 2) + 0.1 * torch.eye(t, dtype=torch.float64)


class Gaussian:
    """A zero-mean Gaussian process over t tokens, whose best denoiser is a formula.

    covariance: (t, t), the same for each of the independent numbers of a token.
    """

    def __init__(self, schedule: NoiseSchedule, covariance: Tensor) -> None:
        self.schedule = schedule
        self.covariance = covariance.double()

    def draw(self, n: int, width: int = 1, generator: Generator | None = None) -> Tensor:
        """(n, t, width) clean sequences."""
        noise = torch.randn(n, len(self.covariance), width, generator=generator, dtype=torch.float64)
        return torch.linalg.cholesky(self.covariance) @ noise

    def noisy_covariance(self, k: Tensor) -> Tensor:
        """(..., t, t) covariance of the tokens once noised to levels k (..., t)."""
        alpha, sigma = self.schedule.alpha_table.double()[k], self.schedule.sigma_table.double()[k]
        return alpha[..., :, None] * self.covariance * alpha[..., None, :] + torch.diag_embed(sigma**2)

    def gain(self, k: Tensor, causal: bool) -> Tensor:
        """(..., t, t) matrix G with E[x | y] = G y, row i looking at tokens 0..i only if causal."""
        alpha = self.schedule.alpha_table.double()[k]
        root = torch.linalg.cholesky(self.noisy_covariance(k))
        # y = root u with white u, the innovations, and u_0..u_i say the same as y_0..y_i. So cov(x, u), cut off after the
        # diagonal, is what the past alone tells.
        cross = self.covariance * alpha[..., None, :]
        told = torch.linalg.solve_triangular(root, cross.mT, upper=False).mT
        if causal:
            told = told.tril()
        return torch.linalg.solve_triangular(root, told, upper=False, left=False)

    def denoiser(self, causal: bool = False) -> Denoise:
        """(x, k) -> the exact conditional mean, given all tokens or (causal) each token and those before it."""

        def denoise(x: Tensor, k: Tensor) -> Prediction:
            same = bool((k == k[:1]).all())
            gain = self.gain(k[:1] if same else k, causal)
            return believing(self.schedule, gain @ x.double(), x, k)

        return denoise

    def log_likelihood(self, y: Tensor, k: Tensor, tokens: list[int] | None = None) -> Tensor:
        """(b,) log density of noisy tokens y (b, t, width) at levels k (t,), or of some of the tokens only."""
        tokens = list(range(y.shape[1])) if tokens is None else tokens
        covariance = self.noisy_covariance(k)[tokens][:, tokens]
        white = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), y[:, tokens].double(), upper=False)
        width = y.shape[2]
        constant = width * (len(tokens) * math.log(2 * math.pi) + torch.logdet(covariance))
        return -0.5 * ((white**2).sum((1, 2)) + constant)


class ExactBackbone(nn.Module):
    """The best network for a zero-mean Gaussian process, with x0-prediction. Its state is the past itself, with its levels.

    covariance: (t*d, t*d) of t tokens of d numbers.
    """

    def __init__(self, schedule: NoiseSchedule, covariance: Tensor, width: int = 1, causal: bool = False) -> None:
        super().__init__()
        self.schedule, self.covariance, self.width, self.causal = schedule, covariance.double(), width, causal
        self.config = {"width": width, "levels": schedule.levels}

    def forward(self, x: Tensor, k: Tensor, cond: Tensor, state: tuple[Tensor, Tensor] | None = None):
        past = 0 if state is None else state[0].shape[1]
        if state is not None:
            x, k = torch.cat([state[0], x], dim=1), torch.cat([state[1], k], dim=1)
        return self.mean(x, k)[:, past:], (x, k)

    def forced(self, x: Tensor, k: Tensor, cond: Tensor, past_x: Tensor, past_k: Tensor) -> Tensor:
        each = []
        for i in range(x.shape[1]):
            tokens = torch.cat([past_x[:, :i], x[:, i : i + 1]], dim=1)
            each.append(self.mean(tokens, torch.cat([past_k[:, :i], k[:, i : i + 1]], dim=1))[:, -1])
        return torch.stack(each, dim=1)

    def mean(self, x: Tensor, k: Tensor) -> Tensor:
        """E[x | noisy tokens], all of them or those up to each."""
        b, t, d = x.shape
        k = k[:1] if bool((k == k[:1]).all()) else k
        alpha = self.schedule.alpha_table.double()[k].repeat_interleave(d, dim=1)
        sigma = self.schedule.sigma_table.double()[k].repeat_interleave(d, dim=1)
        prior = self.covariance[: t * d, : t * d]
        root = torch.linalg.cholesky(alpha[:, :, None] * prior * alpha[:, None] + torch.diag_embed(sigma**2 + 1e-12))
        cross = torch.linalg.solve_triangular(root, alpha[:, :, None] * prior, upper=False).mT
        if self.causal:
            token = torch.arange(t).repeat_interleave(d)
            cross = cross * (token[:, None] >= token)
        white = torch.linalg.solve_triangular(root, x.double().reshape(b, -1, 1), upper=False)
        return (cross @ white).view(b, t, d).to(x.dtype)


class ExactMixture(nn.Module):
    """The best network for a mixture of Gaussian processes of one covariance, with x0-prediction. Its state is the past with its levels.

    weights: (c,); means: (c, t*d); covariance: (t*d, t*d) of t tokens of d numbers.
    """

    def __init__(
        self, schedule: NoiseSchedule, weights: Tensor, means: Tensor, covariance: Tensor, width: int = 1, causal: bool = False
    ) -> None:
        super().__init__()
        self.schedule, self.width, self.causal = schedule, width, causal
        self.weights, self.means, self.covariance = weights.double(), means.double(), covariance.double()
        self.config = {"width": width, "levels": schedule.levels}

    def forward(self, x: Tensor, k: Tensor, cond: Tensor, state: tuple[Tensor, Tensor] | None = None):
        past = 0 if state is None else state[0].shape[1]
        if state is not None:
            x, k = torch.cat([state[0], x], dim=1), torch.cat([state[1], k], dim=1)
        t = x.shape[1]
        if self.causal:
            return torch.stack([self.mean(x[:, : i + 1], k[:, : i + 1])[:, i] for i in range(past, t)], dim=1), (x, k)
        return self.mean(x, k), (x, k)

    def mean(self, x: Tensor, k: Tensor) -> Tensor:
        """E[x | noisy tokens], given all of them."""
        b, t, d = x.shape
        k = k[:1] if bool((k == k[:1]).all()) else k
        alpha = self.schedule.alpha_table.double()[k].repeat_interleave(d, dim=1)
        sigma = self.schedule.sigma_table.double()[k].repeat_interleave(d, dim=1)
        prior, means = self.covariance[: t * d, : t * d], self.means[:, : t * d]
        root = torch.linalg.cholesky(alpha[:, :, None] * prior * alpha[:, None] + torch.diag_embed(sigma**2 + 1e-9))
        off = x.double().reshape(b, 1, -1) - alpha[:, None] * means  # (b, c, t*d)
        white = torch.linalg.solve_triangular(root, off.mT, upper=False)
        share = (self.weights.log() - 0.5 * white.square().sum(1)).softmax(1)  # (b, c)
        gain = torch.linalg.solve_triangular(root, alpha[:, :, None] * prior, upper=False).mT
        each = means + (gain @ white).mT
        return (share[..., None] * each).sum(1).view(b, t, d).to(x.dtype)
