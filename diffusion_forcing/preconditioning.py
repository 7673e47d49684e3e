"""What makes a network's task easier without changing the model: input scaling, linear constraints, linear estimates as features."""

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
    """What a Kalman filter keeps of the past: mean (b, r) and covariance (b, r, r) of `left @ token`, which the next token follows."""

    mean: Tensor
    covariance: Tensor


class Preconditioning(nn.Module):
    """Scaling by variance, a linear constraint between tokens and linear estimates; each optional, and the identity by default.

    variance: of each number of a token, (*event). Noise is the same for all numbers; where their variances differ widely, the network
    reads and predicts in units in which each has variance 1 at every level. For v- and x0-prediction.
    variance_weighting: power of its variance by which each number counts in the loss; 0: all alike.
    constraint: couples all tokens, so that the predictions of a causal network depend on later ones, too. smoother: linear estimates of
    tokens as further input of the network, by a filter for causal ones.
    """

    variance: Tensor | None

    def __init__(
        self, variance: Tensor | None = None, *, variance_weighting: float = 0.0, constraint: LinearConstraint | None = None,
        smoother: WienerSmoother | KalmanFilter | None = None,
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
            raise ValueError("a Wiener smoother reads later tokens; give a causal network a filter: KalmanFilter(index, width)")
        if isinstance(self.smoother, KalmanFilter) and self.constraint is None:
            raise ValueError("a Kalman filter follows a linear constraint from token to token; give one: constraint=LinearConstraint(...)")

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

    def build_cond(
        self, x: Tensor, alpha: Tensor, sigma: Tensor, cond: Tensor, past: Filtered | None = None
    ) -> tuple[Tensor, Filtered | None]:
        """The condition with linear estimates of the noisy tokens appended, and what a filter keeps of them. past: what it kept before."""
        if self.smoother is None:
            return cond, None
        alpha, sigma = _unbatched(alpha), _unbatched(sigma)
        if isinstance(self.smoother, WienerSmoother):
            return torch.cat([cond, self.smoother(x, alpha, sigma)], dim=-1), None
        assert self.constraint is not None
        assert self.variance is not None
        size, own_alpha, own_sigma = self.units(alpha, sigma)
        root = self.variance.sqrt()
        with torch.autocast(x.device.type, enabled=False):  # a system of equations: half precision would not solve it
            # Given its noisy value only, each number has this mean and variance.
            mean, variance, kept = self.constraint.filter(own_alpha * root * x / size, self.variance * own_sigma**2, past)
        return torch.cat([cond, self.smoother(mean / root, variance / self.variance)], dim=-1), kept

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
        equations: LinearConstraint | None = None
        numbers: WienerSmoother | KalmanFilter | None = None
        if constraint is not None:
            r, d = constraint
            equations = LinearConstraint(torch.zeros(r, d), torch.zeros(r, d), torch.zeros(r), torch.ones(r))
        if smoother is not None:
            index = torch.zeros(smoother["shape"][0])
            if "width" in smoother:
                numbers = KalmanFilter(index, smoother["width"], smoother["octaves"])
            else:
                numbers = WienerSmoother(index, torch.zeros(*smoother["shape"]), smoother["octaves"])
        whole = None if variance is None else torch.ones(variance)
        return cls(whole, variance_weighting=variance_weighting, constraint=equations, smoother=numbers)


class WienerSmoother(nn.Module):
    """Wiener smoothing of some numbers of a token over the sequence, as additional input of a network that sees all of it.

    Far from any known token a single noisy token carries little information; a dozen neighbours together carry a lot, since sequences are
    smooth. The linear estimate is known in closed form and slow to learn, so the network gets it and learns what is not linear.

    index: (s,), which numbers; covariance: (s, lags), of each with itself so many tokens later. Features: the estimates in units of their
    standard deviation, and plane waves of them (`plane_waves`).
    """

    index: Tensor
    covariance: Tensor
    causal = False

    def __init__(self, index: Tensor, covariance: Tensor, octaves: int = 5) -> None:
        super().__init__()
        self.register_buffer("index", index.long())
        self.register_buffer("covariance", covariance.float())
        self.octaves = octaves

    def description(self) -> dict[str, Any]:
        """Plain JSON from which one of the same shapes is made."""
        return {"shape": list(self.covariance.shape), "octaves": self.octaves}

    @classmethod
    def fit(cls, tokens: Tensor, numbers: Sequence[int], octaves: int = 5) -> WienerSmoother:
        """From tokens (n, t, d) of mean zero. numbers: which of a token's numbers to smooth."""
        n, t, _ = tokens.shape
        x = tokens[..., list(numbers)].double()
        lags = torch.stack([(x[:, : t - lag] * x[:, lag:]).sum((0, 1)) / (n * t) for lag in range(t)])  # biased: then it is a covariance
        return cls(torch.tensor(list(numbers)), lags.T, octaves)

    @property
    def width(self) -> int:
        """Features of a token."""
        return len(self.index) + waves(len(self.index), self.octaves)

    def forward(self, x: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """x: noisy tokens (b, t, d); alpha, sigma: (b, t, 1), or (1, t, 1) where all are alike. Returns features (b, t, width)."""
        with torch.autocast(x.device.type, enabled=False):  # a system of equations: half precision would not solve it
            mean, variance = self.posterior(x, alpha, sigma)
        return torch.cat([mean, plane_waves(mean, variance, self.octaves)], dim=-1)

    def posterior(self, x: Tensor, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Posterior mean (b, t, s) and variance (b or 1, t, s) given the noisy tokens, in units of the numbers' standard deviation."""
        t = x.shape[1]
        if t > self.covariance.shape[1]:
            raise ValueError(f"the smoother was fitted to sequences of {self.covariance.shape[1]} tokens; got {t}: use shorter sequences")
        size = self.covariance[:, 0]
        offset = (torch.arange(t, device=x.device)[:, None] - torch.arange(t, device=x.device)).abs()
        prior = self.covariance[:, offset] / size[:, None, None]  # (s, t, t)
        signal, noise = alpha[:, None, :, 0], sigma[:, None, :, 0] / size.sqrt()[:, None]
        # Of alpha x + noise: alpha_i alpha_j C_ij + sigma_i^2, which is well conditioned at every level but 0; hence the small addition.
        observed_cov = signal[..., :, None] * signal[..., None, :] * prior + torch.diag_embed(noise**2 + 1e-3)
        gain = torch.linalg.solve_ex(observed_cov, signal[..., None] * prior)[0]
        observed = (x[..., self.index] / size.sqrt()).transpose(1, 2)  # (b, s, t)
        mean = (observed[..., None, :] @ gain)[..., 0, :]
        variance = 1 - (signal[..., None] * prior * gain).sum(-2)
        return mean.transpose(1, 2), variance.clamp(min=0).transpose(1, 2)


class KalmanFilter(nn.Module):
    """Linear estimates of each token given the noisy tokens up to its own, as additional input of a causal network.

    The filter takes each number of a token as Gaussian, of the model's variance, and follows the model's linear constraint from token to
    token. So it knows a position as accurately as the law of motion tells, also where the token itself is nothing but noise. Features: the
    estimates of all numbers in units of their standard deviation, and plane waves of those at `index` (s,). width: numbers of a token.
    """

    index: Tensor
    causal = True

    def __init__(self, index: Tensor, width: int, octaves: int = 5) -> None:
        super().__init__()
        self.register_buffer("index", index.long())
        self.numbers, self.octaves = width, octaves

    def description(self) -> dict[str, Any]:
        """Plain JSON from which one of the same shapes is made."""
        return {"shape": list(self.index.shape), "width": self.numbers, "octaves": self.octaves}

    @property
    def width(self) -> int:
        """Features of a token."""
        return self.numbers + waves(len(self.index), self.octaves)

    def forward(self, mean: Tensor, variance: Tensor) -> Tensor:
        """mean: (b, t, d), variance: (b or 1, t, d), both in units of the numbers' standard deviation. Returns features (b, t, width)."""
        return torch.cat([mean, plane_waves(mean[..., self.index], variance[..., self.index], self.octaves)], dim=-1)


def waves(numbers: int, octaves: int) -> int:
    """How many plane waves there are of so many numbers."""
    return (1 + 2 * octaves) ** numbers - 1


def plane_waves(mean: Tensor, variance: Tensor, octaves: int) -> Tensor:
    """Sines and cosines of each of s estimates (b, t, s), and the products of those of different ones: (b, t, waves).

    In these any map of the plane is nearly linear. A wave shrinks with the variance (b or 1, t, s) of its estimate, to the expected sine of
    a Gaussian (the integrated positional encoding of mip-NeRF, Barron et al. 2021).
    """
    # Guidance differentiates through estimates; the slope of the high octaves would swamp that of the estimate itself.
    frequency = torch.pi / 2 * 2.0 ** torch.arange(octaves, device=mean.device)
    angle, faded = mean.detach()[..., None] * frequency, torch.exp(-0.5 * variance[..., None] * frequency**2)
    each = torch.cat([torch.ones_like(mean)[..., None], angle.sin() * faded, angle.cos() * faded], dim=-1)  # (b, t, s, 1 + 2 octaves)
    product = each[..., 0, :]
    for number in range(1, mean.shape[-1]):
        product = (product[..., None] * each[..., number, None, :]).flatten(-2)
    return product[..., 1:]


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

    def filter(self, x0: Tensor, variance: Tensor, past: Filtered | None = None) -> tuple[Tensor, Tensor, Filtered]:
        """Mean (b, t, d) and variance (b or 1, t, d) of each token given estimates of the tokens up to its own (a Kalman filter), and what
        is to be kept for the tokens after them.

        x0: (b, t, d), estimates of each token on its own; variance: of each number, (b, t, d), or (1, t, d) where all sequences have the
        same. past: what was kept of the tokens before.
        """
        b, r = len(x0), len(self.offset)
        follows = x0 if past is not None else x0[:, 1:]  # tokens that an equation ties to the one before
        size = variance if past is not None else variance[:, 1:]
        ahead = x0[:, :-1] @ self.left.T if past is None else torch.cat([past.mean[:, None], x0[:, :-1] @ self.left.T], dim=1)
        across = (self.left * size[:, :, None]) @ self.right.T  # (b, ., r, r), covariance of what leaves a token with what enters it
        if follows.shape[1]:
            factor = torch.linalg.cholesky_ex(self._gram(variance, None if past is None else _unbatched(past.covariance)))[0]
            residual = (ahead + follows @ self.right.T + self.offset).flatten(1)[..., None]
            # What each equation adds to those before it, and its own block of the factor: estimates up to a token end at its equation.
            innovation = torch.linalg.solve_triangular(factor, residual, upper=False).unflatten(1, (-1, r))
            at = torch.arange(follows.shape[1], device=x0.device)
            own = factor.unflatten(2, (-1, r)).unflatten(1, (-1, r)).transpose(2, 3)[:, at, at]  # (b, ., r, r)
            gain = torch.linalg.solve_triangular(own, self.right * size[:, :, None], upper=False)  # (b, ., r, d)
            mean = follows - (gain.mT @ innovation)[..., 0]
            left_over = (size - (gain**2).sum(-2)).clamp(min=0)
            known = torch.linalg.solve_triangular(own, across.mT, upper=False)[:, -1]  # of what leaves the last token
        else:
            mean, left_over, known = follows, size, None
        if past is None:
            mean, left_over = torch.cat([x0[:, :1], mean], dim=1), torch.cat([variance[:, :1], left_over], dim=1)
        leaves = (self.left * variance[:, -1:]) @ self.left.T
        leaves = leaves if known is None else leaves - known.mT @ known
        return mean, left_over, Filtered((mean[:, -1] @ self.left.T).detach(), leaves.expand(b, r, r))

    def _gram(self, variance: Tensor, before: Tensor | None = None) -> Tensor:
        """Covariance (b, r n, r n) of the residuals of n equations: neighbouring ones share a token.

        variance: (b, t, d). before: (b, r, r), covariance of what a token before them leaves, which one more equation ties to the first.
        """
        r = len(self.offset)
        into, out = (self.right * variance[:, :, None]) @ self.right.T, (self.left * variance[:, :, None]) @ self.left.T
        shared = (self.right * variance[:, :-1, None]) @ self.left.T  # the token between equations i and i+1
        if before is None:
            own, shared = out[:, :-1] + into[:, 1:], shared[:, 1:]
        else:
            b = max(len(before), len(variance))
            own = into + torch.cat([before.expand(b, -1, -1)[:, None], out[:, :-1].expand(b, -1, -1, -1)], dim=1)
        b, n = own.shape[:2]
        gram = variance.new_zeros(b, n, n, r, r)
        at = torch.arange(n, device=variance.device)
        gram[:, at, at] = own + torch.diag(self.slack)
        gram[:, at[:-1], at[1:]] = shared
        gram[:, at[1:], at[:-1]] = shared.mT
        return gram.transpose(2, 3).reshape(b, n * r, n * r)


def _unbatched(amplitude: Tensor) -> Tensor:
    """(b, t, ...) to (1, t, ...) where all sequences are alike: what depends on levels only is then computed once."""
    return amplitude[:1] if len(amplitude) > 1 and bool((amplitude == amplitude[:1]).all()) else amplitude
