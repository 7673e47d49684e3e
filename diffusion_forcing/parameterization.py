"""What the network predicts: the clean token (x0), the noise (eps) or the velocity (v = alpha eps - sigma x0).

The three are equivalent; `to_prediction` brings each back to the pair (x0, eps).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from torch import Tensor, where, zeros_like

Parameterization = Literal["x0", "eps", "v"]


class Prediction(NamedTuple):
    """The prediction for each noisy token: (b, t, *event) each.

    grad: the direction in which guidance shifts the step, if any.
    """

    x0: Tensor
    eps: Tensor
    grad: Tensor | None = None


def check_parameterization(name: str) -> Parameterization:
    """Return name if it is one of x0, eps, v."""
    if name not in get_args(Parameterization):
        raise ValueError(f"parameterization must be one of {', '.join(get_args(Parameterization))}; got {name!r}")
    return name  # type: ignore[return-value]


def target(name: Parameterization, x: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
    """What the network should output. x, noise: (b, t, *event); alpha, sigma: broadcastable to them."""
    if name == "x0":
        return x
    if name == "eps":
        return noise
    return alpha * noise - sigma * x


def to_prediction(name: Parameterization, out: Tensor, x_k: Tensor, alpha: Tensor, sigma: Tensor) -> Prediction:
    """Network output and noisy tokens to (x0, eps). A token at level 0 is known: its x0 is itself, its eps 0."""
    clean = sigma == 0
    if name == "x0":
        x0 = out
        eps = (x_k - alpha * out) / where(clean, 1.0, sigma)
    elif name == "eps":
        x0 = (x_k - sigma * out) / alpha
        eps = out
    else:
        x0 = alpha * x_k - sigma * out
        eps = sigma * x_k + alpha * out
    return Prediction(where(clean, x_k, x0), where(clean, zeros_like(eps), eps))


def with_x0(x0: Tensor, x_k: Tensor, alpha: Tensor, sigma: Tensor) -> Prediction:
    """The prediction for noisy tokens x_k whose clean tokens are x0."""
    return to_prediction("x0", x0, x_k, alpha, sigma)
