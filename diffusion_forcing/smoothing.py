"""The best linear guess of what noisy tokens hide, as something a network may read besides.

Far from any known token, where everything is noisy, a token alone says next to nothing of where it is; a dozen neighbours together say a
lot, since the sequence is smooth. Averaging over them, each by its own level, is what a Wiener filter does in closed form. A network
learns it only slowly, and is better employed on what is not linear, such as walls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .backbones.layers import Waves


class Smoother(nn.Module):
    """Wiener smoothing of some numbers of a token over the whole sequence, given each token's amplitudes.

    index: which numbers (s,); covariance: of each with itself so many tokens later (s, lags). Features: the estimates in units of their
    standard deviation, and waves of them.
    """

    index: Tensor
    covariance: Tensor

    def __init__(self, index: Tensor, covariance: Tensor, octaves: int = 5) -> None:
        super().__init__()
        self.register_buffer("index", index.long())
        self.register_buffer("covariance", covariance.float())
        self.octaves = octaves
        self.waves = Waves(octaves)

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
        return len(self.index) * (1 + 2 * self.octaves)

    def forward(self, x: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """x: noisy tokens (b, t, d); alpha, sigma: (b, t, 1). Returns features (b, t, width)."""
        t = x.shape[1]
        if t > self.covariance.shape[1]:
            raise ValueError(f"the model smooths over {self.covariance.shape[1]} tokens at most; got {t}")
        offset = (torch.arange(t, device=x.device)[:, None] - torch.arange(t, device=x.device)).abs()
        prior = self.covariance[:, offset]  # (s, t, t)
        size = self.covariance[:, 0]
        signal = alpha[..., 0]
        # Of alpha x + noise: alpha_i alpha_j C_ij + sigma_i^2, which is well conditioned at every level but 0; hence the small addition.
        noisy = signal[:, None, :, None] * signal[:, None, None, :] * prior
        extra = sigma[:, None, :, 0] ** 2 + 1e-3 * size[:, None]
        told = noisy + torch.diag_embed(extra)
        seen = x[..., self.index].transpose(1, 2)  # (b, s, t)
        weight = torch.linalg.solve_ex(told, seen[..., None])[0][..., 0]
        guess = torch.einsum("sij,bsj->bsi", prior, signal[:, None] * weight) / size.sqrt()[:, None]
        return self.waves(guess.transpose(1, 2))
