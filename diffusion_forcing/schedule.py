"""The forward process: how much signal a token keeps at each noise level.

`k` is an integer level in {0..K}: 0 is clean, K is (almost) pure noise. A noisy token is
`x_k = alpha(k) x + sigma(k) eps` with `alpha(k)^2 = alpha_bar[k]` and `alpha^2 + sigma^2 = 1`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LEVELS = 1000
NARROW = 0.03, 0.05  # angles at both ends within which steps are even; in between they are in proportion to the angle
MAX_BETA = 0.999  # a step never destroys everything, so alpha_bar stays positive and strictly decreasing


def linear(levels: int = LEVELS) -> Tensor:
    """alpha_bar of the DDPM schedule: betas from 1e-4 to 0.02 at K = 1000, rescaled for any other K. Returns (K+1,)."""
    _check_levels(levels)
    scale = 1000 / levels
    # Counted from the end, so that a single level is the noisiest one.
    return _from_betas(torch.linspace(scale * 0.02, scale * 1e-4, levels, dtype=torch.float64).flip(0))


def cosine(levels: int = LEVELS, offset: float = 0.008) -> Tensor:
    """alpha_bar = cos^2 of a quarter turn (Nichol & Dhariwal 2021). Returns (K+1,)."""
    _check_levels(levels)
    u = torch.linspace(0, 1, levels + 1, dtype=torch.float64)
    return _from_curve(torch.cos((u + offset) / (1 + offset) * torch.pi / 2) ** 2)


def sigmoid(levels: int = LEVELS, start: float = -3.0, end: float = 3.0, tau: float = 1.0) -> Tensor:
    """alpha_bar as a falling sigmoid (Chen 2023), the paper's choice for video. Returns (K+1,)."""
    _check_levels(levels)
    u = torch.linspace(0, 1, levels + 1, dtype=torch.float64)
    curve = torch.sigmoid(torch.tensor(end / tau, dtype=torch.float64)) - torch.sigmoid((u * (end - start) + start) / tau)
    return _from_curve(curve)


CURVES = {"linear": linear, "cosine": cosine, "sigmoid": sigmoid}


class NoiseSchedule(nn.Module):
    """x_k = alpha(k) x + sigma(k) eps, for a level k of each token.

    alpha_bar: (K+1,), 1 at level 0, strictly decreasing, positive.
    """

    alpha_table: Tensor
    sigma_table: Tensor

    def __init__(self, alpha_bar: Tensor) -> None:
        super().__init__()
        alpha_bar = torch.as_tensor(alpha_bar).double()
        if alpha_bar.ndim != 1 or len(alpha_bar) < 2:
            raise ValueError(
                f"alpha_bar must be one value per level 0..K, shape (K+1,) with K >= 1; got shape {tuple(alpha_bar.shape)}. "
                "Build one with linear(K), cosine(K) or sigmoid(K)."
            )
        if alpha_bar[0] != 1:
            raise ValueError(f"alpha_bar[0] must be exactly 1 (level 0 is clean); got {alpha_bar[0].item()}")
        if not (alpha_bar.diff() < 0).all() or not alpha_bar[-1] > 0:
            raise ValueError("alpha_bar must fall strictly from level to level and stay positive (NaN counts as neither)")
        # Both tables come from float64: sqrt(1 - alpha_bar) of a float32 alpha_bar has lost sigma at the low levels.
        self.register_buffer("alpha_table", alpha_bar.sqrt().float())
        self.register_buffer("sigma_table", (1 - alpha_bar).sqrt().float())

    @property
    def levels(self) -> int:
        """K: the level of pure noise."""
        return len(self.alpha_table) - 1

    @property
    def angle(self) -> Tensor:
        """atan(sigma / alpha) of each level, (K+1,): from 0 to nearly a quarter turn."""
        return torch.atan2(self.sigma_table.double(), self.alpha_table.double())

    @property
    def place(self) -> Tensor:
        """Where steps are best even, (K+1,), ascending: finer at the bottom for tokens that others nearly tell, at the top for wide."""
        return torch.asinh(self.angle / NARROW[0]) - torch.asinh((torch.pi / 2 - self.angle) / NARROW[1])

    def alpha(self, k: Tensor) -> Tensor:
        """Share of the signal's amplitude left at level k. Same shape as k."""
        return self.alpha_table[k]

    def sigma(self, k: Tensor) -> Tensor:
        """Amplitude of the noise at level k. Same shape as k."""
        return self.sigma_table[k]

    def snr(self, k: Tensor) -> Tensor:
        """Signal-to-noise ratio alpha^2 / sigma^2; infinite at level 0. Same shape as k."""
        return (self.alpha(k) / self.sigma(k)) ** 2

    def add_noise(self, x: Tensor, k: Tensor, noise: Tensor) -> Tensor:
        """Noise each token of x (b, t, *event) to its own level k (b, t)."""
        return expand(self.alpha(k), x) * x + expand(self.sigma(k), x) * noise

    def level_of(self, std: float | Tensor) -> Tensor:
        """The level whose noise, sigma / alpha, is nearest to the error `std` of a measurement, 1..K. Shape of std.

        A measurement y of a token x with that error is a noisy token: alpha(k) y = alpha(k) x + sigma(k) eps.
        """
        std = torch.as_tensor(std, dtype=torch.float64)
        if not (std > 0).all():
            raise ValueError("std is the standard deviation of an error, positive and in units of encoded tokens; got "
                             f"{float(std[~(std > 0)][0]):g}; a value known exactly is at level 0, an absent one at K")  # fmt: skip
        ratio = (self.sigma_table[1:].double() / self.alpha_table[1:].double()).log().to(std.device)
        above = torch.searchsorted(ratio, std.log()).clamp(max=self.levels - 1)
        below = (above - 1).clamp(min=0)
        nearer = (std.log() - ratio[below]).abs() < (ratio[above] - std.log()).abs()
        return torch.where(nearer, below, above) + 1

    def ladder(self, steps: int, top: int | None = None) -> Tensor:
        """(steps+1,) levels a sampler visits, 0 .. top ascending, evenly spread; top: K if not said. Any 1 <= steps <= top."""
        top = self.levels if top is None else top
        if not 1 <= steps <= top <= self.levels:
            raise ValueError(f"a ladder needs between 1 and {'K=' if top == self.levels else ''}{top} steps; got {steps}")
        return torch.linspace(0, top, steps + 1, dtype=torch.float64).round().long()

    def fine_ladder(self, steps: int) -> Tensor:
        """(steps+1,) levels as of `ladder`, but closer together where there is little noise or much: evenly spread in `place`."""
        even, place = torch.arange(len(self.ladder(steps))), self.place.cpu()
        levels = evenly(place, torch.zeros((), dtype=torch.long), steps)
        # Levels are whole numbers, and no two alike: at the ends, where they are closest, they move apart.
        return torch.minimum((levels - even).cummax(0).values + even, self.levels - steps + even)

    def check_k(self, k: Tensor) -> Tensor:
        """Return k if every level is an integer in {0..K}; say what is wrong otherwise."""
        if k.is_floating_point() or k.dtype == torch.bool:
            raise ValueError(f"levels are integers in 0..{self.levels}; got dtype {k.dtype}; convert with .long()")
        if k.numel() and (k.min() < 0 or k.max() > self.levels):
            raise ValueError(f"levels must lie in 0..{self.levels}; got {k.min().item()}..{k.max().item()}")
        return k


def evenly(place: Tensor, k: Tensor, steps: int) -> Tensor:
    """Levels on the way from each of k (...) to the last, evenly spread in `place`, (K+1,), which ascends: (steps+1, ...)."""
    share = torch.arange(steps + 1, device=k.device, dtype=torch.float64).view(-1, *[1] * k.ndim) / steps
    wanted = place[k] + (place[-1] - place[k]) * share
    above = torch.searchsorted(place, wanted).clamp(max=len(place) - 1)
    below = (above - 1).clamp(min=0)
    rungs = torch.where(wanted - place[below] < place[above] - wanted, below, above)
    rungs[0], rungs[-1] = k, len(place) - 1
    return rungs


def expand(values: Tensor, like: Tensor) -> Tensor:
    """Append axes to `values` (b, t) or (t,) so that it multiplies tokens `like` (b, t, *event)."""
    event = like.ndim - 2
    return values.reshape(values.shape + (1,) * event)


def _check_levels(levels: int) -> None:
    if levels < 1:
        raise ValueError(f"a schedule needs at least one level of noise; got levels={levels}")


def _from_betas(betas: Tensor) -> Tensor:
    kept = torch.cumprod(1 - betas.clamp(max=MAX_BETA), dim=0)
    return torch.cat([kept.new_ones(1), kept])


def _from_curve(curve: Tensor) -> Tensor:
    return _from_betas(1 - curve[1:] / curve[:-1])
