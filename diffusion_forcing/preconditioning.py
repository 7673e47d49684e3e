"""The best linear guess of what noisy tokens hide, as something a network may read besides.

Far from any known token, where everything is noisy, a token alone says next to nothing of where it is; a dozen neighbours together say a
lot, since the sequence is smooth. Averaging over them, each by its own level, is what a Wiener filter does in closed form. A network
learns it only slowly, and is better employed on what is not linear, such as walls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Smoother(nn.Module):
    """Wiener smoothing of some numbers of a token over the whole sequence, given each token's amplitudes.

    index: which numbers (s,); covariance: of each with itself so many tokens later (s, lags). Features: the estimates in units of their
    standard deviation, and what a map over them is made of: `octaves` of sines and cosines of each and the products of those of
    different numbers, in which any pattern of walls is nearly linear. A wave shrinks by how unsure its estimate is, to what one may
    expect of the sine of something normally distributed (as mip-NeRF encodes positions, Barron et al. 2021).
    """

    index: Tensor
    covariance: Tensor

    def __init__(self, index: Tensor, covariance: Tensor, octaves: int = 5) -> None:
        super().__init__()
        self.register_buffer("index", index.long())
        self.register_buffer("covariance", covariance.float())
        self.octaves = octaves

    @classmethod
    def fit(cls, tokens: Tensor, numbers: Sequence[int], octaves: int = 5) -> Smoother:
        """From tokens (n, t, d) of mean zero. numbers: which of a token's numbers to smooth."""
        n, t, _ = tokens.shape
        x = tokens[..., list(numbers)].double()
        lags = torch.stack([(x[:, : t - lag] * x[:, lag:]).sum((0, 1)) / (n * t) for lag in range(t)])  # biased: then it is a covariance
        return cls(torch.tensor(list(numbers)), lags.T, octaves)

    @property
    def width(self) -> int:
        """Features of a token."""
        return len(self.index) + (1 + 2 * self.octaves) ** len(self.index) - 1

    def forward(self, x: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """x: noisy tokens (b, t, d); alpha, sigma: (b, t, 1), or (1, t, 1) where all are alike. Returns features (b, t, width)."""
        with torch.autocast(x.device.type, enabled=False):  # a system of equations: half precision would not solve it
            mean, variance = self.guess(x, alpha, sigma)
        # Guidance differentiates by what is read here. Waves would answer with the slope of their ripples, far too steep.
        frequency = torch.pi / 2 * 2.0 ** torch.arange(self.octaves, device=x.device)
        angle, faded = mean.detach()[..., None] * frequency, torch.exp(-0.5 * variance[..., None] * frequency**2)
        waves = torch.cat([torch.ones_like(mean)[..., None], angle.sin() * faded, angle.cos() * faded], dim=-1)  # (b, t, s, 1 + 2 octaves)
        product = waves[..., 0, :]
        for number in range(1, len(self.index)):
            product = (product[..., None] * waves[..., number, None, :]).flatten(-2)
        return torch.cat([mean, product[..., 1:]], dim=-1)

    def guess(self, x: Tensor, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Estimates (b, t, s) and how unsure they are, a variance (b or 1, t, s), in units of the numbers' own spread."""
        t = x.shape[1]
        if t > self.covariance.shape[1]:
            raise ValueError(f"the model smooths over {self.covariance.shape[1]} tokens at most; got {t}")
        size = self.covariance[:, 0]
        offset = (torch.arange(t, device=x.device)[:, None] - torch.arange(t, device=x.device)).abs()
        prior = self.covariance[:, offset] / size[:, None, None]  # (s, t, t)
        signal, noise = alpha[:, None, :, 0], sigma[:, None, :, 0] / size.sqrt()[:, None]
        # Of alpha x + noise: alpha_i alpha_j C_ij + sigma_i^2, which is well conditioned at every level but 0; hence the small addition.
        told = signal[..., :, None] * signal[..., None, :] * prior + torch.diag_embed(noise**2 + 1e-3)
        gain = torch.linalg.solve_ex(told, signal[..., None] * prior)[0]
        seen = (x[..., self.index] / size.sqrt()).transpose(1, 2)  # (b, s, t)
        mean = (seen[..., None, :] @ gain)[..., 0, :]
        variance = 1 - (signal[..., None] * prior * gain).sum(-2)
        return mean.transpose(1, 2), variance.clamp(min=0).transpose(1, 2)


class Joints(nn.Module):
    """left @ token + right @ next token + offset = 0, up to noise of variance `slack`. left, right: (r, d); offset, slack: (r,)."""

    left: Tensor
    right: Tensor
    offset: Tensor
    slack: Tensor

    def __init__(self, left: Tensor, right: Tensor, offset: Tensor, slack: Tensor) -> None:
        super().__init__()
        if left.ndim != 2 or left.shape != right.shape or offset.shape != slack.shape or offset.shape != left.shape[:1]:
            raise ValueError(
                f"r laws between tokens of d numbers: left and right are (r, d), offset and slack (r,); "
                f"got {tuple(left.shape)}, {tuple(right.shape)}, {tuple(offset.shape)}, {tuple(slack.shape)}"
            )
        if not (slack > 0).all():
            raise ValueError("slack is a variance and must be positive; a law that holds exactly gets a tiny one")
        for name, value in (("left", left), ("right", right), ("offset", offset), ("slack", slack)):
            self.register_buffer(name, value.float().contiguous())

    def broken(self, x0: Tensor) -> Tensor:
        """By how much tokens (b, t, d) break each law, (b, t-1, r)."""
        return x0[:, :-1] @ self.left.T + x0[:, 1:] @ self.right.T + self.offset

    def pull(self, x0: Tensor, left_open: Tensor) -> Tensor:
        """The direction (b, t, d) along which tokens x0 (b, t, d) have to give way: x0 - left_open * pull obeys the laws.

        left_open: the variance that noise leaves open of each number, (b, t, d), or (1, t, d) where it is the same for all sequences.
        """
        if x0.shape[1] < 2:
            return torch.zeros_like(x0)
        with torch.autocast(x0.device.type, enabled=False):  # a system of equations: half precision would not solve it
            with torch.no_grad():  # by the levels alone
                factor = torch.linalg.cholesky_ex(self._gram(left_open))[0]
            force = torch.cholesky_solve(self.broken(x0).flatten(1)[..., None], factor)[..., 0].unflatten(1, (-1, len(self.offset)))
            empty = x0.new_zeros(len(x0), 1, x0.shape[2])
            return torch.cat([force @ self.left, empty], dim=1) + torch.cat([empty, force @ self.right], dim=1)

    def _gram(self, left_open: Tensor) -> Tensor:
        """Covariance (b, r (t-1), r (t-1)) of how much the laws are broken, given what is open: each law shares a token with the next."""
        b, t, _ = left_open.shape
        r = len(self.offset)
        own = (self.left * left_open[:, :-1, None]) @ self.left.T + (self.right * left_open[:, 1:, None]) @ self.right.T
        shared = (self.right * left_open[:, 1:-1, None]) @ self.left.T  # the token between joints i and i+1
        gram = left_open.new_zeros(b, t - 1, t - 1, r, r)
        at = torch.arange(t - 1, device=left_open.device)
        gram[:, at, at] = own + torch.diag(self.slack)
        gram[:, at[:-1], at[1:]] = shared
        gram[:, at[1:], at[:-1]] = shared.mT
        return gram.transpose(2, 3).reshape(b, (t - 1) * r, (t - 1) * r)
