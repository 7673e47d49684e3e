"""Stand-in until the root has it."""

from dataclasses import dataclass

from .. import matrix as _m
from .. import sampling as _s
from ..solver import turn as angle_step  # noqa


@dataclass(frozen=True)
class Sampler:
    steps: int = 20
    matrix: str = "full_sequence"
    slope: float = 1.0
    solver: str = "ddim"
    eta: float = 0.0
    hold: str = "keep"
    temperature: float = 1.0

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps counts from 1; got {self.steps}")

    def matrix_for(self, schedule, horizon):
        return _m.by_name(self.matrix, horizon, schedule.ladder(min(self.steps, schedule.levels)), self.slope)

    def along(self, matrix):
        s = Sampler(self.steps, self.matrix, self.slope, self.solver, self.eta)
        object.__setattr__(s, "matrix_for", lambda *_: matrix)
        return s


def sample(denoise, schedule, x, sampler, *, generator=None):
    path = "angle" if sampler.solver == "euler_angle" else "ddim"
    return _s.sample(denoise, schedule, x, sampler.matrix_for(schedule, x.shape[1]), eta=sampler.eta, path=path, generator=generator)  # type: ignore
