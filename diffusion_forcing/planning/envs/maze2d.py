"""Maze2D: a ball of 4.2 kg that a force of up to 100 N pushes through a maze, after the public D4RL benchmark.

NumPy only, any number of balls at once. A step is the closed form of what the benchmark's simulator computes for one ball among
boxes; it reproduces the benchmark's reference scores exactly (tests/planning/test_maze2d.py).

Coordinates are the benchmark's: a position is (row, column), but the ball's body is offset from the grid by 0.2, so that the centre of
cell c is at c - 0.2 and its walls are at c - 0.7 and c + 0.3. Draw walls with that offset (`Maze.boxes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]  # of floats
Bools = NDArray[Any]

RADIUS = 0.1
MASS = 4 / 3 * np.pi * RADIUS**3 * 1000
DAMPING, GEAR, DT = 1.0, 100.0, 0.01
MAX_SPEED = 5.0
"""Of each velocity component, clipped before a step; an observation may exceed it by what the step adds."""
GOAL_RADIUS = 0.5
"""Metres within which the goal counts as reached."""
JITTER = 0.1
"""Starts and random goals lie within this of the integer coordinates of a free cell."""
OFFSET = 0.2
"""Between the grid and positions."""
_MARGIN = 0.002
_STIFFNESS, _BRAKE = 1 / (0.95 * 0.02) ** 2, 2 / (0.95 * 0.02)
_NEIGHBOURS = np.array([(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)])


@dataclass(frozen=True)
class Chance:
    """What is random in a maze: gusts on its windy cells, that may carry a ball into its pit."""

    force: tuple[float, float] = (200.0, 0.0)
    """Of a gust in newtons, along rows and columns. Twice what the ball can muster: who is caught is carried away."""
    probability: float = 0.3
    """That a gust blows, drawn anew every `hold` steps."""
    hold: int = 25
    """Steps for which a gust or a lull lasts."""
    cost: float = 8.0
    """Reward lost in each step in the pit."""


@dataclass(frozen=True)
class Maze:
    """A layout, the length of an episode, and the returns behind normalised scores.

    # wall, O free, G the fixed goal. With chance: S where episodes start, ~ windy, P pit.
    """

    name: str
    layout: tuple[str, ...]
    steps: int
    random_return: float
    reference_return: float
    chance: Chance | None = None

    @cached_property
    def walls(self) -> Bools:
        return np.array([[tile == "#" for tile in row] for row in self.layout])

    @cached_property
    def goal(self) -> Array:
        """The fixed goal (2,), integer coordinates."""
        return np.argwhere([[tile == "G" for tile in row] for row in self.layout])[0].astype(float)

    @cached_property
    def cells(self) -> NDArray[np.int64]:
        """Free cells (n, 2), sorted, the goal's last: the order from which the benchmark samples. Pits are not among them."""
        return np.concatenate([np.argwhere(self.tiles("OS~")), self.goal[None].astype(np.int64)])

    def tiles(self, kinds: str) -> Bools:
        """Which tiles of the layout (rows, columns) are of these kinds."""
        return np.array([[tile in kinds for tile in row] for row in self.layout])

    def on(self, kinds: str, points: Array) -> Bools:
        """Whether points (..., 2) lie on tiles of these kinds."""
        cell = np.clip(np.floor(points + 0.5 + OFFSET).astype(np.int64), 0, np.array(self.walls.shape) - 1)
        found: Bools = self.tiles(kinds)[cell[..., 0], cell[..., 1]]
        return found

    @property
    def farthest_cell(self) -> Array:
        """The free cell (2,) that is farthest from the goal, walls aside."""
        farthest: Array = self.cells[np.abs(self.cells - self.goal).sum(1).argmax()].astype(float)
        return farthest

    @property
    def boxes(self) -> Array:
        """Walls (n, 4): smallest row and column, and extents, in coordinates of positions."""
        corners = np.argwhere(self.walls) - 0.5 - OFFSET
        return np.concatenate([corners, np.ones_like(corners)], axis=1)

    def normalised(self, returns: Any) -> Any:
        """0 is the benchmark's random policy, 100 its reference controller (which gets stuck; one that does not scores well above 100)."""
        return 100 * (returns - self.random_return) / (self.reference_return - self.random_return)

    def inside(self, points: Array) -> Bools:
        """Whether points (..., 2) are where the ball's centre can be: on a free cell, up to the depth to which walls yield."""
        cell = np.floor(np.clip(points, -9, 99) + 0.5 + OFFSET).astype(np.int64)
        bounded = ((cell >= 0) & (cell < self.walls.shape)).all(-1)
        cell = np.clip(cell, 0, np.array(self.walls.shape) - 1)
        return bounded & ~self.walls[cell[..., 0], cell[..., 1]]


MAZES = {
    "umaze": Maze("umaze", ("#####", "#GOO#", "###O#", "#OOO#", "#####"), 300, 23.85, 161.86),
    "medium": Maze(
        "medium",
        ("########", "#OO##OO#", "#OO#OOO#", "##OOO###", "#OO#OOO#", "#O#OO#O#", "#OOO#OG#", "########"),
        600, 13.13, 277.39,
    ),
    "large": Maze(
        "large",
        ("############", "#OOOO#OOOOO#", "#O##O#O#O#O#", "#OOOOOO#OOO#", "#O####O###O#", "#OO#O#OOOOO#", "##O#O#O#O###",
         "#OO#OOO#OGO#", "############"),
        800, 6.7, 273.99,
    ),
}  # fmt: skip
WINDY = Maze("windy", ("######", "#OOOO#", "#O##O#", "#S~~G#", "##PP##", "######"), 400, 0.0, 100.0, Chance())
"""The short way to the goal passes a pit in the wind; the way round is twice as long. See `windy`."""


class StepResult(NamedTuple):
    """Position and velocity (n, 2) after a step, and which balls touched a wall during it (n,)."""

    position: Array
    velocity: Array
    touched: Bools


def step(maze: Maze, position: Array, velocity: Array, action: Array, wind: Array | None = None) -> StepResult:
    """One step of n balls: position, velocity and action (n, 2); actions are clipped to [-1, 1]. wind: a further force (n, 2), in N."""
    velocity = np.clip(velocity, -MAX_SPEED, MAX_SPEED)
    force = GEAR * np.clip(action, -1, 1) - DAMPING * velocity
    force = force if wind is None else force + wind
    normal, gap, touching = _contacts(maze.walls, position)
    acceleration = force / MASS
    touched: Bools = np.any(touching, axis=1)
    if touched.any():
        acceleration[touched] = _contact_acceleration(force[touched], velocity[touched], normal[touched], gap[touched], touching[touched])
    velocity = velocity + DT * MASS * acceleration / (MASS + DT * DAMPING)
    return StepResult(position + DT * velocity, velocity, touched)


def _contacts(walls: Bools, position: Array) -> tuple[Array, Array, Bools]:
    """The nine boxes around each ball: direction away from each (n, 9, 2), gap (n, 9), and whether it is a wall that touches."""
    cell = np.floor(position + OFFSET + 0.5).astype(np.int64)[:, None] + _NEIGHBOURS
    index = np.clip(cell, 0, np.array(walls.shape) - 1)
    away = (position[:, None] + (1 + OFFSET)) - (cell + 1.0)  # this order of operations rounds like the benchmark
    away = away - np.clip(away, -0.5, 0.5)
    distance = np.sqrt((away**2).sum(-1))
    gap = distance - RADIUS
    touching = walls[index[..., 0], index[..., 1]] & (gap < _MARGIN)
    return away / np.where(distance > 0, distance, 1)[..., None], gap, touching


def _contact_acceleration(force: Array, velocity: Array, normal: Array, gap: Array, touching: Bools) -> Array:
    """Accelerations (n, 2) under soft contacts: argmin 1/2 m |a - F/m|^2 + sum 1/2 D min(0, n.a - a_ref)^2, by active sets."""
    depth = gap - _MARGIN
    share = np.abs(depth) / 0.001
    curve = np.where(share <= 0.5, 2 * share**2, 1 - 2 * (1 - share) ** 2)
    impedance = np.where(share >= 1, 0.95, 0.9 + 0.05 * curve)
    weight = impedance / ((1 - impedance) * 2 / (3 * MASS))
    reference = -_BRAKE * (normal * velocity[:, None]).sum(-1) - _STIFFNESS * impedance * depth
    active = touching
    for _ in range(20):
        d = weight * active
        matrix = MASS * np.eye(2) + np.einsum("nc,nci,ncj->nij", d, normal, normal)
        right = force + np.einsum("nc,nc,nci->ni", d, reference, normal)
        acceleration = np.linalg.solve(matrix, right[..., None])[..., 0]
        pressing = touching & ((normal * acceleration[:, None]).sum(-1) < reference)
        if (pressing == active).all():
            break
        active = pressing
    return acceleration


class Balls:
    """n balls in one maze, each with its goal: an environment without Gymnasium.

    multi: a random goal for each ball at each reset (Multi2D); otherwise the maze's own.
    """

    def __init__(self, maze: Maze | str, number: int = 1, *, multi: bool = False, seed: int | None = 0) -> None:
        self.maze = by_name(maze) if isinstance(maze, str) else maze
        self.number, self.multi = number, multi
        self.rng = np.random.default_rng(seed)
        self.position, self.velocity = np.zeros((number, 2)), np.zeros((number, 2))
        self.goal = np.tile(self.maze.goal, (number, 1))
        self.time = 0
        self.reset()

    @property
    def observation(self) -> Array:
        """(n, 4): position and velocity."""
        return np.concatenate([self.position, self.velocity], axis=1)

    def reset(self) -> Array:
        """Put all balls at random starts, with random goals if `multi`; returns observations (n, 4)."""
        self.position = self._random_points(self.number)
        self.velocity = 0.1 * self.rng.standard_normal((self.number, 2))
        if self.multi:
            self.goal = self._random_points(self.number)
        self.time = 0
        return self.observation

    def step(self, action: Array) -> tuple[Array, Array, Bools]:
        """Observations (n, 4), rewards (n,) and which balls touched a wall (n,), after actions (n, 2)."""
        self.position, self.velocity, touched = step(self.maze, self.position, self.velocity, action)
        self.time += 1
        return self.observation, rewards(self.position, self.goal), touched

    def _random_points(self, number: int) -> Array:
        cells = self.maze.cells[self.rng.integers(len(self.maze.cells), size=number)]
        return cells + self.rng.uniform(-JITTER, JITTER, (number, 2))


def rewards(position: Array, goal: Array) -> Array:
    """1 within 0.5 of the goal, else 0."""
    return (np.linalg.norm(position - goal, axis=-1) <= GOAL_RADIUS).astype(float)


def by_name(name: str) -> Maze:
    """umaze, medium or large; or windy."""
    mazes = {**MAZES, WINDY.name: WINDY}
    if name not in mazes:
        raise ValueError(f"there is no maze {name!r}; choose from {', '.join(mazes)}")
    return mazes[name]


def check_inside(maze: Maze, points: Any, what: str) -> Array:
    """points (n, 2) as floats; raises for the first that lies in a wall, outside of the maze, or where a ball has no room."""
    points = np.asarray(points, dtype=float)
    if points.ndim != 2 or points.shape[1] != 2:
        raise ValueError(f"{what} should be (n, 2): row and column of each; got shape {points.shape}")
    infinite = np.flatnonzero(~np.isfinite(points).all(1))
    if len(infinite):
        raise ValueError(f"{what} {infinite[0]} holds NaN or infinite numbers: {points[infinite[0]].tolist()}")
    bad = np.flatnonzero(~maze.inside(points) | _cramped(maze.walls, points))
    if len(bad):
        where = ", ".join(f"{value:.4g}" for value in points[bad[0]])
        nearest = maze.cells[np.abs(maze.cells - OFFSET - points[bad[0]]).sum(1).argmin()]
        raise ValueError(
            f"{what} {bad[0]} at ({where}) lies in a wall or outside of the {maze.name} maze; the nearest free cell is "
            f"{tuple(nearest.tolist())}"
        )
    return points


def _cramped(walls: Bools, points: Array) -> Bools:
    """Points (n, 2) closer to a wall than a ball's centre ever gets, even pressed into a corner at full force."""
    bounded = np.clip(points, 0, np.array(walls.shape) - 1)
    _, gap, touching = _contacts(walls, bounded)
    return np.any(touching & (gap < 0.02 - RADIUS), axis=1)
