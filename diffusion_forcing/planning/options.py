"""How an agent plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..checks import check_options
from ..sampler import Sampler

PLAN_SAMPLER = Sampler(steps=10, eta=1.0)
"""Fresh noise in every step (eta=1) corrects more of the errors of earlier steps than none."""


@dataclass(frozen=True)
class PlanOptions:
    """Guidance, horizon and replanning of an agent."""

    scale: float = 0.07
    """Guidance scale (per metre and frame) of a plan as long as the episode. 0: no guidance."""
    short_plan_scale: float = 4.0
    """Guidance scale of the shortest plan. Lengths in between follow a power law."""
    hold_scale: float | None = None
    """Guidance scale of the shortest plan of a ball that is in its goal, to stay there, which the data never do. None: `short_plan_scale`,
    which then serves both."""
    guidance_levels: tuple[float, float] = (0.3, 1.0)
    """Noise levels at which guidance acts, as fractions of K."""
    form: Literal["eps", "step"] = "eps"
    """How the gradient acts: "eps" shifts the predicted noise, "step" the denoised sample (`guidance.guide`)."""
    draws: int = 1
    """Monte Carlo guidance: futures over which the reward is averaged. 1: the predicted mean only."""
    futures: Literal["resample", "fresh"] = "resample"
    """How Monte Carlo guidance samples futures: noised again and denoised in one step, or from white noise in a few steps."""
    estimator: Literal["pathwise", "covariance"] = "pathwise"
    """Fresh futures: the gradient of the reward through them, or its covariance with the actions, which needs no gradient."""
    future_steps: int = 5
    """Fresh futures: denoising steps of each token."""
    expectimax: bool = False
    """Guide actions only, never what they lead to, and later actions within fresh futures as well. For tokens that hold either."""
    spread: float | None = None
    """Covariance: the standard deviation to which rewards that vary more from draw to draw are scaled down, so that guidance moves actions
    by `scale * spread` standard deviations at most. None: never."""
    only_next: bool = False
    """Denoise only the next stack of actions, before `futures="fresh"`: the next plan decides about later ones."""
    reward: Literal["reach", "earn"] = "reach"
    """What a goal is worth. reach: minus the distance to it; earn: the maze's own return, steps from the arrival on less costs."""
    softness: float = 0.1
    """Of the reward "earn": metres over which the edges of goal and pit are smoothed."""
    candidates: int = 1
    """Plans sampled at a time, of which the one with the highest reward is kept."""
    replan: int = 20
    """Actions executed of a plan before the next one is made."""
    short_plan_replan: int = 5
    """The same for plans of `min_tokens`."""
    lookahead: int | None = None
    """Tokens of every plan; 1 is a reactive policy. None: adaptive, as many as the last plan took to arrive."""
    min_tokens: int = 4
    """Adaptive horizon: tokens of the shortest plan."""
    extra_tokens: int = 3
    """Adaptive horizon: tokens planned beyond the arrival."""
    replan_error: float = 0.1
    """Adaptive horizon: metres between planned and actual position above which a plan has failed. The ball replans (after
    `short_plan_replan` actions at the earliest) to the end of the episode with half the guidance; every plan that holds takes one halving
    back. Frees a ball that is stuck behind a wall its plan went through."""
    verify_tolerance: float = 0.35
    """Adaptive horizon: metres by which the model, denoising a half-noised plan without guidance, may differ from it. Guidance can pull a
    plan through a wall; such a plan differs by more, is rejected like one that does not arrive, and a longer one is made. Plans to the
    end of the episode are not verified, nor those of `min_tokens`, or with a `hold_scale` only those of balls in their goals."""
    memory: int = 0
    """Past tokens that a plan is conditioned on, besides the present."""

    def __post_init__(self) -> None:
        check_options(self, "draws", "future_steps", "candidates", "replan", "short_plan_replan", "min_tokens")
        if self.lookahead is not None and self.lookahead < 1:
            raise ValueError(f"lookahead counts tokens from 1, or is None for an adaptive horizon; got {self.lookahead}")
        if not (self.replan_error >= 0 and self.verify_tolerance >= 0):
            raise ValueError(f"replan_error and verify_tolerance are distances in metres; got {self.replan_error}, {self.verify_tolerance}")
        if self.memory < 0 or self.extra_tokens < 0:
            raise ValueError(f"memory and extra_tokens count tokens from 0; got {self.memory}, {self.extra_tokens}")
        if self.only_next and self.futures != "fresh":
            raise ValueError(f"only_next leaves later actions to fresh futures; got futures={self.futures!r}, set futures='fresh'")
        if not self.scale >= 0 or not (self.short_plan_scale > 0 or (self.short_plan_scale == 0 and self.scale == 0)):
            raise ValueError(
                f"scale and short_plan_scale are positive, or scale is 0 for no guidance; got {self.scale}, {self.short_plan_scale}"
            )
        if self.hold_scale is not None and not (self.hold_scale > 0 and self.scale > 0):
            raise ValueError(f"hold_scale is positive and needs a scale above 0, or is None; got {self.hold_scale}, scale={self.scale}")
        if not 0 <= self.guidance_levels[0] <= self.guidance_levels[1] <= 1:
            raise ValueError(f"guidance_levels is a range of fractions of K, 0 <= low <= high <= 1; got {self.guidance_levels}")
