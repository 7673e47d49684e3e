"""Guidance of plans: how strong it is for a plan's length, and whether the model agrees with the plan that it led to."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Generator, Tensor

from ..codecs import Chain
from ..model import DiffusionForcing
from .options import PlanOptions

VERIFY_LEVEL = 0.45
"""Noise level to which a plan is noised for verification, as a fraction of K."""


def guidance_scale(options: PlanOptions, tokens: int, episode_tokens: int) -> float:
    """Guidance scale of a plan of `tokens`: a power law from `short_plan_scale` at `min_tokens` to `scale` at the whole episode.

    Long plans need weak guidance, or they cut through walls; short ones strong guidance, or the ball drifts out of the goal. With a fixed
    lookahead the scale is `scale` at any length.
    """
    shortest = options.min_tokens
    if options.lookahead is not None or episode_tokens <= shortest or options.scale <= 0:
        return options.scale
    share = np.clip(np.log(tokens / shortest) / np.log(episode_tokens / shortest), 0, 1)
    return float(options.short_plan_scale ** (1 - share) * options.scale**share)


def disagreement(model: DiffusionForcing, context: Tensor, plans: Tensor, generator: Generator | None = None, draws: int = 2) -> Tensor:
    """Metres (n,) by which the model's unguided reconstructions differ from plans (n, t, 6), at the frame where they differ most.

    Plans are noised to VERIFY_LEVEL and denoised in one step given the clean context tokens (n, c, d); distances are averaged over `draws`
    of the noise. A plan through a wall comes back somewhere else.
    """
    codec = cast(Chain, model.codec)
    tokens = codec.encode(plans)
    k = torch.full(tokens.shape[:2], round(VERIFY_LEVEL * model.schedule.levels))
    levels = torch.cat([k.new_zeros(context.shape[:2]), k], dim=1)
    difference = torch.zeros(plans.shape[:2])
    for _ in range(draws):
        noisy = model.schedule.add_noise(tokens, k, torch.randn(tokens.shape, generator=generator))
        with torch.no_grad():
            reconstruction = model.predict(torch.cat([context, noisy], dim=1), levels).x0[:, context.shape[1] :]
        difference += (codec.decode(reconstruction)[..., 2:4] - plans[..., 2:4]).norm(dim=-1) / draws
    return difference.amax(1)
