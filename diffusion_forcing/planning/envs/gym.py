"""The mazes as Gymnasium environments: one ball (`Maze2DEnv`), or many stepped at once (`Maze2DVectorEnv`).

Importing this module registers them, so that `gymnasium.make("diffusion_forcing.planning.envs.gym:diffusion_forcing/Maze2D-Large-v0")`
works without importing it first. Names: UMaze, Medium and Large, and Windy, which has chance; with `Multi-` before them every episode has a
random goal.

Observations are (4,): position and velocity. Actions are (2,): the force along rows and along columns, in [-1, 1] (clipped). The reward
is 1 after a step that ends within 0.5 of the goal; Windy holds the ball there, and takes a cost for each step in the pit. Episodes never
terminate; they are truncated after 300, 600 or 800 steps, Windy after 400. `info`
holds the goal (2,) and whether the ball touched a wall. `reset(options={"start": ..., "goal": ...})` chooses them for one episode.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

try:
    import gymnasium
    from gymnasium.vector import VectorEnv
    from gymnasium.vector.utils import batch_space
except ImportError as error:
    raise ImportError("the mazes as Gymnasium environments need its package: pip install 'diffusion_forcing[planning]'") from error

from .maze2d import DT, GOAL_RADIUS, MAX_SPEED, OFFSET, RADIUS, Array, Balls, Bools, Maze, by_name, check_inside
from .windy import make_balls

PIXELS = 40
"""Of the side of a cell in a rendered image."""
SPEED_BOUND = 2 * MAX_SPEED
"""Bound of observed velocity components: in free flight they stay below 5.23, after hitting a corner below 8."""
WALL, FLOOR, GOAL, BALL, WIND, PIT = (60, 64, 72), (250, 250, 247), (36, 150, 80), (33, 102, 190), (215, 230, 244), (233, 196, 189)
_LINE = 0.04
_METADATA = {"render_modes": ["rgb_array"], "render_fps": round(1 / DT)}
_MODES = getattr(gymnasium.vector, "AutoresetMode", None)  # missing in Gymnasium 1.0, where the next step always resets


class Maze2DEnv(gymnasium.Env[Array, NDArray[np.float32]]):
    """One ball. maze: umaze, medium, large, windy or a Maze; multi: a random goal for each episode instead of the maze's own."""

    metadata = _METADATA

    def __init__(self, maze: Maze | str = "umaze", multi: bool = False, render_mode: str | None = None) -> None:
        self.balls = make_balls(_maze(maze), multi=multi, seed=None)
        self.observation_space, self.action_space = _spaces(self.balls.maze)
        self.render_mode = _check_render_mode(render_mode)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Observation (4,) and info. options: "start" and "goal", (2,) each; random where not given."""
        super().reset(seed=seed)
        return _reset(self.balls, self.np_random, options)[0], self._info(False)

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Observation (4,), reward, False, whether the episode is over, and info."""
        observation, reward, touched = self.balls.step(_check_action(action, (2,))[None])
        return observation[0], float(reward[0]), False, self.balls.time >= self.balls.maze.steps, self._info(bool(touched[0]))

    def render(self) -> NDArray[np.uint8] | None:
        """An image (height, width, 3) from above, rows downwards; None without a render mode."""
        if self.render_mode is None:
            return None
        return render_maze(self.balls.maze, self.balls.position[0], self.balls.goal[0])

    def _info(self, touched: bool) -> dict[str, Any]:
        return {"goal": self.balls.goal[0].copy(), "touched": touched}


class Maze2DVectorEnv(VectorEnv[Array, NDArray[np.float32], Any]):
    """num_envs balls with one clock: all are truncated at once, and the step after that ignores its actions and resets all."""

    metadata = _METADATA if _MODES is None else {**_METADATA, "autoreset_mode": _MODES.NEXT_STEP}

    def __init__(self, maze: Maze | str = "umaze", num_envs: int = 1, multi: bool = False, render_mode: str | None = None) -> None:
        if num_envs < 1:
            raise ValueError(f"a vector environment holds at least one ball; got num_envs={num_envs}")
        self.balls = make_balls(_maze(maze), num_envs, multi=multi, seed=None)
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = _spaces(self.balls.maze)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.render_mode = _check_render_mode(render_mode)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Observations (n, 4) and info. options: "start" and "goal", (2,) for all or (n, 2); random where not given.

        One seed for all balls: unlike in Gymnasium's own vector environments, ball i is not seeded with seed + i.
        """
        super().reset(seed=seed)
        observation = _reset(self.balls, self.np_random, options)
        return observation, self._info(np.zeros(self.num_envs, dtype=bool))

    def step(self, actions: Any) -> tuple[Array, Array, Bools, Bools, dict[str, Any]]:
        """Observations (n, 4), rewards, terminations and truncations (n,) and info, after actions (n, 2)."""
        actions = _check_action(actions, (self.num_envs, 2))
        none = np.zeros(self.num_envs, dtype=bool)
        if self.balls.time >= self.balls.maze.steps:
            observation, info = self.reset()
            return observation, np.zeros(self.num_envs), none, none.copy(), info
        observation, reward, touched = self.balls.step(actions)
        over = np.full(self.num_envs, self.balls.time >= self.balls.maze.steps)
        return observation, reward, none, over, self._info(touched)

    def render(self) -> tuple[NDArray[np.uint8], ...] | None:
        """An image (height, width, 3) of each ball in its maze; None without a render mode."""
        if self.render_mode is None:
            return None
        return tuple(render_maze(self.balls.maze, *both) for both in zip(self.balls.position, self.balls.goal, strict=True))

    def _info(self, touched: Bools) -> dict[str, Any]:
        info = {"goal": self.balls.goal.copy(), "touched": touched}
        return {**info, **{f"_{name}": np.ones(self.num_envs, dtype=bool) for name in info}}  # the masks that Gymnasium's wrappers read


def render_maze(maze: Maze, position: Array, goal: Array) -> NDArray[np.uint8]:
    """The maze from above (height, width, 3), rows downwards: walls, the ball at position (2,) and a ring around the goal (2,)."""
    walls = maze.walls.repeat(PIXELS, 0).repeat(PIXELS, 1)
    canvas = np.where(walls[..., None], WALL, FLOOR).astype(float)
    for kind, colour in (("~", WIND), ("P", PIT)):
        canvas[maze.tiles(kind).repeat(PIXELS, 0).repeat(PIXELS, 1)] = colour
    rows, columns = (((np.arange(size) + 0.5) / PIXELS - 0.5 - OFFSET) for size in walls.shape)  # coordinates of pixels

    def fill(distance: Array, colour: tuple[int, int, int]) -> None:
        """Fill the pixels of negative signed distance; those on the edge are blended."""
        share = np.clip(0.5 - distance * PIXELS, 0, 1)[..., None]
        canvas[:] = (1 - share) * canvas + share * np.array(colour)

    def distance_to(point: Array) -> Array:
        return np.hypot(rows[:, None] - point[0], columns - point[1])

    fill(np.abs(distance_to(goal) - GOAL_RADIUS) - _LINE / 2, GOAL)
    fill(distance_to(position) - RADIUS, BALL)
    return np.round(canvas).astype(np.uint8)


def _maze(maze: Maze | str) -> Maze:
    return by_name(maze) if isinstance(maze, str) else maze


def _spaces(maze: Maze) -> tuple[Any, Any]:
    """Of observations and of actions. Positions are bounded by the faces of the outer walls."""
    low, high = np.full(2, 0.5 - OFFSET), np.array(maze.walls.shape) - 1.5 - OFFSET
    speed = np.full(2, SPEED_BOUND)
    observations = gymnasium.spaces.Box(np.concatenate([low, -speed]), np.concatenate([high, speed]), dtype=np.float64)
    return observations, gymnasium.spaces.Box(-1, 1, (2,), dtype=np.float32)


def _reset(balls: Balls, rng: np.random.Generator, options: dict[str, Any] | None) -> Array:
    """Reset all balls; returns observations (n, 4). Random draws do not depend on options, so a seed means the same with and without."""
    options = options or {}
    unknown = [name for name in options if name not in ("start", "goal")]
    if unknown:
        raise ValueError(f"reset takes the options 'start' and 'goal'; got {unknown[0]!r}")
    start, goal = (_points_option(balls, options.get(name), name) for name in ("start", "goal"))
    balls.rng = rng
    balls.goal = np.tile(balls.maze.goal, (balls.number, 1))  # a goal from options holds for its episode only
    balls.reset()
    balls.position = balls.position if start is None else start
    balls.goal = balls.goal if goal is None else goal
    return balls.observation


def _points_option(balls: Balls, value: Any, name: str) -> Array | None:
    """Points (n, 2) from reset options, or None."""
    if value is None:
        return None
    points = np.atleast_2d(np.asarray(value, dtype=float))
    if points.shape not in ((1, 2), (balls.number, 2)):
        many = f" or ({balls.number}, 2)" if balls.number > 1 else ""
        raise ValueError(f"options[{name!r}] should be (2,){many}: row and column; got shape {np.shape(value)}")
    return np.broadcast_to(check_inside(balls.maze, points, name), (balls.number, 2)).copy()


def _check_action(action: Any, shape: tuple[int, ...]) -> Array:
    """The action as floats, of the given shape and finite."""
    action = np.asarray(action, dtype=float)
    if action.shape != shape:
        raise ValueError(f"actions should be {shape}: the force along rows and along columns; got shape {action.shape}")
    if not np.isfinite(action).all():
        first = np.atleast_2d(action)[~np.isfinite(np.atleast_2d(action)).all(-1)][0]
        raise ValueError(f"actions should be finite, in [-1, 1]; got {first.tolist()}")
    return cast(Array, action)


def _check_render_mode(render_mode: str | None) -> str | None:
    if render_mode not in (None, "rgb_array"):
        raise ValueError(f"there is no render mode {render_mode!r}; choose 'rgb_array', or None for no images")
    return render_mode


for _name, _title in (("umaze", "UMaze"), ("medium", "Medium"), ("large", "Large"), ("windy", "Windy")):
    for _multi in (False, True):
        _id = f"diffusion_forcing/Maze2D-{'Multi-' if _multi else ''}{_title}-v0"
        if _id not in gymnasium.registry:  # the module may be loaded anew
            gymnasium.register(
                _id,
                entry_point=f"{__name__}:Maze2DEnv",
                vector_entry_point=f"{__name__}:Maze2DVectorEnv",
                kwargs={"maze": _name, "multi": _multi},
            )
