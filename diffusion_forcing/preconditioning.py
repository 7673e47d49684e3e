"""What makes a network's task easier without changing the model: input scaling, linear constraints, Wiener features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .parameterization import Parameterization, Prediction, to_prediction


class Estimate(NamedTuple):
    """What is known of a token: its clean value, and how much of the variance of each number is left open. (b, 1, d) both."""

    x0: Tensor
    posterior_variance: Tensor


class Filtered(NamedTuple):
    """Noisy tokens of the past, as a Wiener filter reads them: its numbers (b, n, s), amplitudes of signal and noise (b, n, 1)."""

    numbers: Tensor
    alpha: Tensor
    sigma: Tensor


class Preconditioning(nn.Module):
    """Scaling by variance, a linear constraint between tokens and Wiener features; each optional, and the identity by default.

    variance: of each number of a token, (*event). Noise is the same for all numbers; where their variances differ widely, the network
    reads and predicts in units in which each has variance 1 at every level. For v- and x0-prediction.
    variance_weighting: power of its variance by which each number counts in the loss; 0: all alike.
    constraint: couples all tokens, so that the predictions of a causal network depend on later ones, too. smoother: one that is causal,
    a filter, for causal networks.
    """

    variance: Tensor | None

    def __init__(
        self, variance: Tensor | None = None, *, variance_weighting: float = 0.0, constraint: LinearConstraint | None = None,
        smoother: WienerSmoother | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if variance is not None and not (variance > 0).all():
            raise ValueError("variance must be positive for each number of a token; let the codec drop numbers that never vary")
        self.register_buffer("variance", None if variance is None else variance.float().clone())
        self.variance_weighting = variance_weighting
        self.constraint = constraint
        self.smoother = smoother

    def check(self, parameterization: str, causal: bool) -> None:
        """Raise unless a model of this parameterization and causality can have it."""
        if self.variance is not None and parameterization == "eps":
            raise ValueError("variance is for predicting v or x0; with parameterization='eps' leave it out")
        if self.constraint is not None and self.variance is None:
            raise ValueError("a linear constraint corrects tokens in proportion to their posterior variance: it needs a variance")
        if self.smoother is not None and causal and not self.smoother.causal:
            raise ValueError("a Wiener smoother reads later tokens; give a causal network a filter: WienerSmoother(..., causal=True)")

    def units(self, alpha: Tensor, sigma: Tensor) -> tuple[Tensor | float, Tensor, Tensor]:
        """Standard deviation of noisy tokens, and the amplitudes of signal and noise in units of it."""
        if self.variance is None:
            return 1.0, alpha, sigma
        size = (alpha**2 * self.variance + sigma**2).sqrt()
        return size, alpha * self.variance.sqrt() / size, sigma / size

    def scale(self, x: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Noisy tokens as the network reads them."""
        return x if self.variance is None else x / self.units(alpha, sigma)[0]

    def normalized(self, x: Tensor) -> Tensor:
        """Clean tokens in units in which each number has variance 1."""
        return x if self.variance is None else x / self.variance.sqrt()

    def build_cond(self, x: Tensor, alpha: Tensor, sigma: Tensor, cond: Tensor, past: Filtered | None = None) -> Tensor:
        """The condition with the smoother's features of the noisy tokens appended. past: the tokens before them, for a filter."""
        if self.smoother is None:
            return cond
        return torch.cat([cond, self.smoother(x, _unbatched(alpha), _unbatched(sigma), past)], dim=-1)

    def filtered(self, x: Tensor, alpha: Tensor, sigma: Tensor, past: Filtered | None = None) -> Filtered | None:
        """The past of a filter, with noisy tokens x added."""
        return None if self.smoother is None else self.smoother.remember(x, alpha, sigma, past)

    def constrain(
        self, parameterization: Parameterization, out: Tensor, x: Tensor, alpha: Tensor, sigma: Tensor, before: Estimate | None = None
    ) -> Tensor:
        """The network's output for noisy tokens x, corrected so that the predicted clean tokens satisfy the constraint.

        before: the token that was committed before them, which the first one follows.
        """
        if self.constraint is None:
            return out
        assert self.variance is not None
        root = self.variance.sqrt()
        own_sigma = self.units(alpha, sigma)[2]
        x0, posterior = self._estimate(parameterization, out, x, alpha, sigma)
        if before is not None:
            x0 = torch.cat([before.x0, x0], dim=1)
            posterior = torch.cat([before.posterior_variance, posterior.expand(len(before.posterior_variance), -1, -1)], dim=1)
        correction = self.constraint.correction(x0, posterior)
        correction = correction if before is None else correction[:, 1:]
        return out - root * own_sigma**2 * correction if parameterization == "x0" else out + own_sigma * root * correction

    def last_estimate(self, parameterization: Parameterization, out: Tensor, x: Tensor, alpha: Tensor, sigma: Tensor) -> Estimate:
        """What is left open of the last of tokens x, which the next token must follow."""
        x0, posterior = self._estimate(parameterization, out, x, alpha, sigma)
        x0 = torch.where(sigma == 0, x, x0)
        return Estimate(x0[:, -1:].detach(), posterior[:, -1:].expand_as(x0[:, -1:]))

    def _estimate(self, parameterization: Parameterization, out: Tensor, x: Tensor, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        assert self.variance is not None
        size, own_alpha, own_sigma = self.units(alpha, sigma)
        x0 = (out if parameterization == "x0" else own_alpha * x / size - own_sigma * out) * self.variance.sqrt()
        return x0, self.variance * _unbatched(own_sigma) ** 2

    def to_prediction(self, parameterization: Parameterization, out: Tensor, x: Tensor, alpha: Tensor, sigma: Tensor) -> Prediction:
        """Clean tokens and noise predicted by the network's output for noisy tokens x."""
        if self.variance is None:
            return to_prediction(parameterization, out, x, alpha, sigma)
        size, own_alpha, own_sigma = self.units(alpha, sigma)
        within = to_prediction(parameterization, out, x / size, own_alpha, own_sigma)
        return Prediction(torch.where(sigma == 0, x, within.x0 * self.variance.sqrt()), within.eps)

    def weigh(self, error: Tensor) -> Tensor:
        """Squared errors (b, t, *event), each number counted by its power of the variance."""
        if not self.variance_weighting or self.variance is None:
            return error
        counts = self.variance**self.variance_weighting
        return error * (counts / counts.mean())

    def description(self) -> dict[str, Any]:
        """Plain JSON from which `from_description` makes one of the same shapes."""
        constraint, smoother = self.constraint, self.smoother
        return {
            "variance": None if self.variance is None else list(self.variance.shape),
            "variance_weighting": self.variance_weighting,
            "constraint": None if constraint is None else list(constraint.left.shape),
            "smoother": None if smoother is None else smoother.description(),
        }

    @classmethod
    def from_description(cls, variance: Any, variance_weighting: float, constraint: Any, smoother: Any) -> Preconditioning:
        """The one described, its statistics still to be filled in."""
        equations = numbers = None
        if constraint is not None:
            r, d = constraint
            equations = LinearConstraint(torch.zeros(r, d), torch.zeros(r, d), torch.zeros(r), torch.ones(r))
        if smoother is not None:
            count, lags = smoother["shape"]
            numbers = WienerSmoother(torch.zeros(count), torch.zeros(count, lags), smoother["octaves"], smoother.get("causal", False))
        whole = None if variance is None else torch.ones(variance)
        return cls(whole, variance_weighting=variance_weighting, constraint=equations, smoother=numbers)


class WienerSmoother(nn.Module):
    """Wiener smoothing, or filtering, of some numbers of a token over the sequence, as additional input of a network.

    Far from any known token a single noisy token carries little information; a dozen neighbours together carry a lot, since sequences are
    smooth. The linear estimate is known in closed form and slow to learn, so the network gets it and learns what is not linear.

    causal: estimates given tokens up to their own (a filter, for causal networks) instead of all.
    index: (s,), which numbers; covariance: (s, lags), of each with itself so many tokens later. Features: the estimates in units of their
    standard deviation, and `octaves` of sines and cosines of each with the products of those of different numbers, in which any map of the
    plane is nearly linear. A wave shrinks with the variance of its estimate, to the expected sine of a Gaussian (the integrated positional
    encoding of mip-NeRF, Barron et al. 2021).
    """

    index: Tensor
    covariance: Tensor

    def __init__(self, index: Tensor, covariance: Tensor, octaves: int = 5, causal: bool = False) -> None:
        super().__init__()
        self.register_buffer("index", index.long())
        self.register_buffer("covariance", covariance.float())
        self.octaves = octaves
        self.causal = causal

    def description(self) -> dict[str, Any]:
        """Plain JSON from which one of the same shapes is made."""
        return {"shape": list(self.covariance.shape), "octaves": self.octaves, "causal": self.causal}

    @classmethod
    def fit(cls, tokens: Tensor, numbers: Sequence[int], octaves: int = 5, causal: bool = False) -> WienerSmoother:
        """From tokens (n, t, d) of mean zero. numbers: which of a token's numbers to smooth."""
        n, t, _ = tokens.shape
        x = tokens[..., list(numbers)].double()
        lags = torch.stack([(x[:, : t - lag] * x[:, lag:]).sum((0, 1)) / (n * t) for lag in range(t)])  # biased: then it is a covariance
        return cls(torch.tensor(list(numbers)), lags.T, octaves, causal)

    @property
    def width(self) -> int:
        """Features of a token."""
        return len(self.index) + (1 + 2 * self.octaves) ** len(self.index) - 1

    def forward(self, x: Tensor, alpha: Tensor, sigma: Tensor, past: Filtered | None = None) -> Tensor:
        """x: noisy tokens (b, t, d); alpha, sigma: (b, t, 1), or (1, t, 1) where all are alike. past: of a filter, the tokens before them.
        Returns features (b, t, width).
        """
        t, numbers = x.shape[1], x[..., self.index]
        if past is not None:
            numbers, alpha, sigma = self._join(past, numbers, alpha, sigma)
            alpha, sigma = _unbatched(alpha), _unbatched(sigma)
        with torch.autocast(x.device.type, enabled=False):  # a system of equations: half precision would not solve it
            mean, variance = (part[:, -t:] for part in self.posterior(numbers, alpha, sigma))
        # Guidance differentiates through these features; the slope of the high octaves would swamp that of the estimate.
        frequency = torch.pi / 2 * 2.0 ** torch.arange(self.octaves, device=x.device)
        angle, faded = mean.detach()[..., None] * frequency, torch.exp(-0.5 * variance[..., None] * frequency**2)
        waves = torch.cat([torch.ones_like(mean)[..., None], angle.sin() * faded, angle.cos() * faded], dim=-1)  # (b, t, s, 1 + 2 octaves)
        product = waves[..., 0, :]
        for number in range(1, len(self.index)):
            product = (product[..., None] * waves[..., number, None, :]).flatten(-2)
        return torch.cat([mean, product[..., 1:]], dim=-1)

    def remember(self, x: Tensor, alpha: Tensor, sigma: Tensor, past: Filtered | None = None) -> Filtered:
        """What a filter needs of the past after noisy tokens x (b, t, d): as many tokens as its covariance spans, one less."""
        numbers = x[..., self.index].detach()
        every = *numbers.shape[:2], 1
        new = Filtered(numbers, alpha.expand(every), sigma.expand(every))
        new = new if past is None else self._join(past, *new)
        return Filtered(*(part[:, max(0, part.shape[1] - self.covariance.shape[1] + 1) :] for part in new))

    def _join(self, past: Filtered, numbers: Tensor, alpha: Tensor, sigma: Tensor) -> Filtered:
        """Tokens after a past, as much of which is kept as the covariance spans beside them."""
        b, t, _ = numbers.shape
        first = max(0, past.numbers.shape[1] + t - self.covariance.shape[1])
        parts = zip(past, (numbers, alpha.expand(b, -1, -1), sigma.expand(b, -1, -1)), strict=True)
        return Filtered(*(torch.cat([before[:, first:], now], dim=1) for before, now in parts))

    def posterior(self, numbers: Tensor, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Posterior mean (b, t, s) and variance (b or 1, t, s) given noisy numbers (b, t, s), in units of their standard deviation."""
        t = numbers.shape[1]
        if t > self.covariance.shape[1]:
            raise ValueError(f"the smoother was fitted to sequences of {self.covariance.shape[1]} tokens; got {t}: use shorter sequences")
        size = self.covariance[:, 0]
        offset = (torch.arange(t, device=numbers.device)[:, None] - torch.arange(t, device=numbers.device)).abs()
        prior = self.covariance[:, offset] / size[:, None, None]  # (s, t, t)
        signal, noise = alpha[:, None, :, 0], sigma[:, None, :, 0] / size.sqrt()[:, None]
        # Of alpha x + noise: alpha_i alpha_j C_ij + sigma_i^2, which is well conditioned at every level but 0; hence the small addition.
        observed_cov = signal[..., :, None] * signal[..., None, :] * prior + torch.diag_embed(noise**2 + 1e-3)
        observed = (numbers / size.sqrt()).transpose(1, 2)  # (b, s, t)
        if self.causal:
            # Innovations, each what its token adds to those before: an estimate sums them up to its own.
            factor = torch.linalg.cholesky_ex(observed_cov)[0]
            weight = torch.linalg.solve_triangular(factor, signal[..., None] * prior, upper=False).triu()
            innovation = torch.linalg.solve_triangular(factor, observed[..., None], upper=False)
            mean, variance = (weight * innovation).sum(-2), 1 - (weight**2).sum(-2)
        else:
            gain = torch.linalg.solve_ex(observed_cov, signal[..., None] * prior)[0]
            mean = (observed[..., None, :] @ gain)[..., 0, :]
            variance = 1 - (signal[..., None] * prior * gain).sum(-2)
        return mean.transpose(1, 2), variance.clamp(min=0).transpose(1, 2)


class LinearConstraint(nn.Module):
    """Linear equations between neighbouring tokens: left @ token + right @ next token + offset = 0, up to noise of variance `slack`.

    A token of several frames ends in a state from which the next token goes on. A network meets such a law only as accurately as it
    predicts at all, which leaves a jump between tokens. Predictions are corrected in closed form instead: by as little as possible, each
    number in proportion to its posterior variance, as a Kalman smoother does with an observation.

    left, right: (r, d), r equations between tokens of d numbers. offset, slack: (r,).
    """

    left: Tensor
    right: Tensor
    offset: Tensor
    slack: Tensor

    def __init__(self, left: Tensor, right: Tensor, offset: Tensor, slack: Tensor) -> None:
        super().__init__()
        if left.ndim != 2 or left.shape != right.shape or offset.shape != slack.shape or offset.shape != left.shape[:1]:
            raise ValueError(
                f"r equations between tokens of d numbers: left and right are (r, d), offset and slack (r,); "
                f"got {tuple(left.shape)}, {tuple(right.shape)}, {tuple(offset.shape)}, {tuple(slack.shape)}"
            )
        if not (slack > 0).all():
            raise ValueError("slack is a variance and must be positive; an equation that holds exactly gets a tiny one")
        for name, value in (("left", left), ("right", right), ("offset", offset), ("slack", slack)):
            self.register_buffer(name, value.float().contiguous())

    def residual(self, x0: Tensor) -> Tensor:
        """Residuals of the equations for tokens (b, t, d): (b, t-1, r)."""
        return x0[:, :-1] @ self.left.T + x0[:, 1:] @ self.right.T + self.offset

    def correction(self, x0: Tensor, posterior_variance: Tensor) -> Tensor:
        """The direction (b, t, d) of the smallest correction: x0 - posterior_variance * correction satisfies the equations.

        x0: (b, t, d). posterior_variance: of each number given its noisy value, (b, t, d), or (1, t, d) where all sequences have the same.
        """
        if x0.shape[1] < 2:
            return torch.zeros_like(x0)
        with torch.autocast(x0.device.type, enabled=False):  # a system of equations: half precision would not solve it
            with torch.no_grad():  # by the levels alone
                factor = torch.linalg.cholesky_ex(self._gram(posterior_variance))[0]
            force = torch.cholesky_solve(self.residual(x0).flatten(1)[..., None], factor)[..., 0].unflatten(1, (-1, len(self.offset)))
            empty = x0.new_zeros(len(x0), 1, x0.shape[2])
            return torch.cat([force @ self.left, empty], dim=1) + torch.cat([empty, force @ self.right], dim=1)

    def _gram(self, posterior_variance: Tensor) -> Tensor:
        """Covariance (b, r (t-1), r (t-1)) of the residuals: neighbouring equations share a token."""
        b, t, _ = posterior_variance.shape
        r = len(self.offset)
        own = (self.left * posterior_variance[:, :-1, None]) @ self.left.T + (self.right * posterior_variance[:, 1:, None]) @ self.right.T
        shared = (self.right * posterior_variance[:, 1:-1, None]) @ self.left.T  # the token between equations i and i+1
        gram = posterior_variance.new_zeros(b, t - 1, t - 1, r, r)
        at = torch.arange(t - 1, device=posterior_variance.device)
        gram[:, at, at] = own + torch.diag(self.slack)
        gram[:, at[:-1], at[1:]] = shared
        gram[:, at[1:], at[:-1]] = shared.mT
        return gram.transpose(2, 3).reshape(b, (t - 1) * r, (t - 1) * r)


def _unbatched(amplitude: Tensor) -> Tensor:
    """(b, t, ...) to (1, t, ...) where all sequences are alike: what depends on levels only is then computed once."""
    return amplitude[:1] if len(amplitude) > 1 and bool((amplitude == amplitude[:1]).all()) else amplitude
