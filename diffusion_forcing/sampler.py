"""Options of sampling: how tokens are denoised (`Sampler`), and what a roll-out remembers (`Context`)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from torch import Tensor

from .matrix import MATRICES, MatrixName
from .schedule import NoiseSchedule

Hold = Literal["keep", "resample"]
Solver = Literal["ddim", "euler_angle", "adams_angle"]
Mode = Literal["path", "noise", "label"]


@dataclass(frozen=True)
class Sampler:
    """How tokens are denoised: the schedule matrix and the solver that follows it."""

    steps: int = 20
    """Denoising steps of each token; at most K."""
    matrix: MatrixName = "full_sequence"
    """Schedule matrix: full_sequence, autoregressive, pyramid or trapezoid."""
    slope: float = 1.0
    """Of pyramid and trapezoid: rows from the start of one token to the start of the next."""
    solver: Solver = "ddim"
    """ddim; euler_angle: Euler steps in the angle between signal and noise, which keep more of the variance in few steps; adams_angle:
    second-order steps in it, closer together where there is little or much noise: accurate for tokens of any spread."""
    eta: float = 0.0
    """Fresh noise in each step: 0 deterministic (DDIM), 1 ancestral (DDPM)."""
    hold: Hold = "keep"
    """What a token does that stays at its level: keep its value, or resample (be denoised and noised again)."""
    temperature: float = 1.0
    """Scale of the initial noise. 1 samples from the model; below 1 reduces variance."""

    def __post_init__(self) -> None:
        for name, choices in (("matrix", MATRICES), ("solver", get_args(Solver)), ("hold", get_args(Hold))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is one of {', '.join(choices)}; got {getattr(self, name)!r}")
        if self.steps < 1:
            raise ValueError(f"steps counts from 1; got {self.steps}")
        if not 0 <= self.slope < float("inf"):
            raise ValueError(f"slope is a delay in rows and cannot be negative; got {self.slope}")
        if not 0 <= self.eta <= 1:
            raise ValueError(f"eta goes from 0 (deterministic) to 1 (ancestral); got {self.eta}")
        if self.solver != "ddim" and self.eta > 0:
            raise ValueError(f"solver {self.solver!r} draws no fresh noise; got eta={self.eta}, set eta=0 or solver='ddim'")
        if not self.temperature >= 0:
            raise ValueError(f"temperature scales the initial noise and cannot be negative; got {self.temperature}")

    def matrix_for(self, schedule: NoiseSchedule, horizon: int) -> Tensor:
        """The schedule matrix (m+1, horizon)."""
        build, ladder = MATRICES[self.matrix], self.ladder(schedule)
        return build(horizon, ladder, self.slope) if self.matrix in ("pyramid", "trapezoid") else build(horizon, ladder)

    def ladder(self, schedule: NoiseSchedule) -> Tensor:
        """(steps+1,) levels that each token visits, ascending; at most all."""
        build = schedule.fine_ladder if self.solver == "adams_angle" else schedule.ladder
        return build(min(self.steps, schedule.levels))

    def along(self, matrix: Tensor) -> Sampler:
        """The same sampler following an explicit schedule matrix (m+1, t), such as one with pinned columns."""
        return _Along(**{field.name: getattr(self, field.name) for field in fields(Sampler)}, rows=matrix)

    def over(self, schedule: NoiseSchedule, horizon: int) -> Sampler:
        """The same sampler for windows of `horizon` tokens: along its own matrix of that width."""
        return self.along(self.matrix_for(schedule, horizon))


@dataclass(frozen=True, eq=False, kw_only=True)
class _Along(Sampler):
    """A sampler that follows a given matrix."""

    rows: Tensor

    def matrix_for(self, schedule: NoiseSchedule, horizon: int) -> Tensor:
        return self.rows


def as_sampler(matrix: Tensor | Sampler) -> Sampler:
    """A schedule matrix followed by DDIM, or the sampler itself."""
    return matrix if isinstance(matrix, Sampler) else Sampler().along(matrix)


def check_all_noise(matrix: Tensor, schedule: NoiseSchedule) -> Tensor:
    """The matrix, if every token begins as white noise, at level K."""
    given = (matrix[..., 0, :] < schedule.levels).nonzero()
    if len(given):
        raise ValueError(f"the schedule matrix begins with token {int(given[0, -1])} below level K, where its value counts, and none is "
                         "given: give values by start(schedule, matrix, shape, known) and `sample`, in a roll-out as its context, or let "
                         "the matrix begin at K")  # fmt: skip
    return matrix


@dataclass(frozen=True)
class Context:
    """What a roll-out remembers, and how generated tokens join it."""

    memory: int | None = None
    """Forget all but the last so many tokens before each window. None: the state carries on; 0: no past at all."""
    stabilization: int = 0
    """A small level: generated tokens join the context as if they still had that much noise, so that errors do not accumulate."""
    mode: Mode | None = None
    """How they get it. path: each token as it was on its way down, at the last step not below that level (the paper's way for RNNs);
    noise: the finished token, noised to it; label: the finished token, only labelled with it. None: what the backbone prefers."""
    commit: int | None = None
    """Keep only so many tokens of each window and sample the rest anew, as in model-predictive control. None: all."""

    def __post_init__(self) -> None:
        if self.memory is not None and self.memory < 0:
            raise ValueError(f"memory counts tokens, or is None for all of them; got {self.memory}")
        if self.stabilization < 0:
            raise ValueError(f"stabilization is a level >= 0, a small one; got {self.stabilization}")
        if self.mode is not None and self.mode not in get_args(Mode):
            raise ValueError(f"mode is one of {', '.join(get_args(Mode))}; got {self.mode!r}")
        if self.commit is not None and self.commit < 1:
            raise ValueError(f"commit counts tokens from 1, or is None for all of a window; got {self.commit}")
