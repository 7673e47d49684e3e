"""Linear laws that tie each token to the next, and predictions that obey them.

A token that holds several frames ends in a state from which the next one must go on. A network meets such a law only as well as
it predicts anything, and what it misses is a jump of the ball at every joint. But the law is linear and known, so a prediction can be
corrected in closed form: by as little as possible, each number giving way by as much as noise leaves open of it. It is what a Kalman
smoother does with an observation, here the observation that nothing jumps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
