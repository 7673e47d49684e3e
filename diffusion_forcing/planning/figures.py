"""Figures of balls in mazes: executed paths in blue, plans in red, and plans while they are denoised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine.media import Film
from ..engine.plotting import COLOURS, figure
from .envs.maze2d import GOAL_RADIUS, OFFSET, Array, Bools, Maze
from .episodes import Episodes

BLUE, RED, GREEN = COLOURS[0], COLOURS[1], COLOURS[2]
WALL = "#3d4654"


def draw_maze(ax: Any, maze: Maze, goal: Array | None = None) -> None:
    """Walls, and the goal (2,) as a disc. Rows run downwards, as in the layout."""
    from matplotlib.patches import Circle, Rectangle

    for row, column, height, width in maze.boxes:
        ax.add_patch(Rectangle((column, row), width, height, facecolor=WALL, edgecolor=WALL, lw=0.5))
    rows, columns = maze.walls.shape
    low = -0.5 - OFFSET
    ax.set(xlim=(low, low + columns), ylim=(low + rows, low), aspect="equal", xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    if goal is not None:
        ax.add_patch(Circle((goal[1], goal[0]), GOAL_RADIUS, facecolor=GREEN, alpha=0.25, lw=0))
        ax.plot(goal[1], goal[0], marker="*", ms=9, color=GREEN, mec="white", mew=0.6, zorder=6)


def draw_winds(rows: list[tuple[str, Episodes]], file: Path, title: str = "") -> None:
    """One panel for each policy in a maze with chance: all paths of its episodes, those that fell into the pit in red."""
    height, width = rows[0][1].maze.walls.shape
    with figure(file, 3.6 * len(rows), 3.6 * height / width + (0.75 if title else 0.5)) as fig:
        for ax, (name, episodes) in zip(fig.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
            maze = episodes.maze
            draw_maze(ax, maze, maze.goal)
            draw_chance(ax, maze)
            fallen: Bools = np.any(maze.on("P", episodes.observations[..., :2]), axis=1)
            inside = np.asarray(np.linalg.norm(episodes.observations[..., :2] - episodes.goals[:, None], axis=-1) <= GOAL_RADIUS)
            ends = np.where(inside.any(1), inside.argmax(1), inside.shape[1] - 1)
            for i, end in enumerate(ends):
                path = episodes.observations[i, : end + 1, :2]
                draw_path(ax, path, RED if fallen[i] else BLUE, lw=0.9, alpha=max(0.15, min(0.8, 12 / len(ends))), zorder=4)
            start = episodes.observations[:, 0, :2].mean(0)
            ax.plot(start[1], start[0], "o", color="black", ms=6, mec="white", zorder=7)
            ax.set_title(name, fontsize=10)
        if title:
            fig.suptitle(title, fontsize=11)


def draw_chance(ax: Any, maze: Maze) -> None:
    """The pit, hatched, and the windy cells with arrows along the gusts."""
    from matplotlib.patches import Rectangle

    for row, column in np.argwhere(maze.tiles("P")) - 0.5 - OFFSET:
        ax.add_patch(Rectangle((column, row), 1, 1, facecolor="#e9c4bd", edgecolor="#c8776a", hatch="xxx", lw=0, zorder=1))
    if maze.chance is not None:
        push = np.array(maze.chance.force) / np.linalg.norm(maze.chance.force)
        for row, column in np.argwhere(maze.tiles("~")) - OFFSET:
            ax.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor="#d7e6f4", lw=0, zorder=0.5))
            for offset in (-0.25, 0.25):
                at = np.array([row, column]) - 0.3 * push + offset * push[::-1]
                ax.annotate("", (at + 0.6 * push)[::-1], at[::-1], arrowprops={"arrowstyle": "->", "color": "#5f8fbf", "lw": 1.2}, zorder=2)


def draw_path(ax: Any, points: Array, colour: str, **style: Any) -> None:
    """Points (t, 2) as (row, column)."""
    ax.plot(points[:, 1], points[:, 0], color=colour, **{"lw": 1.8, "solid_capstyle": "round", **style})


def draw_episodes(episodes: Episodes, which: NDArray[np.int64], file: Path, title: str = "") -> None:
    """One panel per episode: its start, its path and its goal. which: (n,), the episodes to draw."""
    columns = min(4, len(which))
    rows = -(-len(which) // columns)
    height, width = episodes.maze.walls.shape
    with figure(file, 2.9 * columns, 2.9 * height / width * rows + 0.35 * rows + 0.4) as fig:
        axes = fig.subplots(rows, columns, squeeze=False).ravel()
        for ax in axes[len(which) :]:
            ax.set_visible(False)
        for ax, i in zip(axes, which, strict=False):
            draw_maze(ax, episodes.maze, episodes.goals[i])
            path = episodes.observations[i, :, :2]
            draw_path(ax, path, BLUE, lw=1.5)
            ax.plot(path[0, 1], path[0, 0], "o", color=BLUE, ms=5, mec="white", zorder=5)
            reached = f"reached after {episodes.first[i]}" if episodes.reached[i] else "never reached"
            ax.set_title(f"{reached}, score {episodes.scores[i]:.0f}", fontsize=9)
        if title:
            fig.suptitle(title, fontsize=11)


def draw_denoising(
    maze: Maze, rows: list[tuple[str, list[tuple[str, NDArray[np.float32]]]]], start: Array, goal: Array, file: Path, per_token: int,
    title: str,
) -> None:  # fmt: skip
    """Several plans while they are denoised, one row of panels for each way to plan. rows: (name, [(caption, positions (n, t, 2)), ...]).

    Dots are tokens: early ones dark, late ones light.
    """
    from matplotlib import colormaps

    height, width = maze.walls.shape
    columns = max(len(stages) for _, stages in rows)
    with figure(file, 3.1 * columns, (3.1 * height / width + 0.3) * len(rows) + 0.3) as fig:
        axes = fig.subplots(len(rows), columns, squeeze=False)
        for row, (name, stages) in zip(axes, rows, strict=True):
            row[0].set_ylabel(name, fontsize=10)
            for ax, (caption, plans) in zip(row, stages, strict=True):
                draw_maze(ax, maze, goal)
                centres = plans[:, per_token // 2 :: per_token]
                colours = colormaps["plasma"](np.linspace(0, 0.9, centres.shape[1]))
                for t in reversed(range(centres.shape[1])):
                    ax.scatter(centres[:, t, 1], centres[:, t, 0], s=9, color=colours[t], alpha=0.75, lw=0)
                ax.plot(start[1], start[0], "o", color=BLUE, ms=7, mec="white", zorder=5)
                ax.set_title(caption, fontsize=10)
        fig.suptitle(title, fontsize=11)


def animate(episodes: Episodes, file: Path, *, every: int = 6) -> None:
    """The first episode as a film (.gif, .webp or .mp4): executed path in blue, current plan in red. every: steps between frames."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    maze, path = episodes.maze, episodes.observations[0, :, :2]
    height, width = maze.walls.shape
    with matplotlib.rc_context({"font.size": 9}), Film(file, fps=14) as film:
        fig = Figure(figsize=(4.2, 4.2 * height / width + 0.45), dpi=84, layout="constrained", facecolor="white")
        canvas = FigureCanvasAgg(fig)
        ax = fig.subplots()
        draw_maze(ax, maze, episodes.goals[0])
        (plan_line,) = ax.plot([], [], color=RED, lw=1.6, alpha=0.9)
        (path_line,) = ax.plot([], [], color=BLUE, lw=2.2)
        (ball,) = ax.plot([], [], "o", color=BLUE, ms=9, mec="white", mew=1.2, zorder=7)
        for t in [*range(0, len(path), every), len(path) - 1]:
            plans = [(start, plan) for start, plan in episodes.plans if start <= t]
            if plans:
                start, plan = plans[-1]
                ahead = plan[np.isfinite(plan[:, 0])][t - start :, 2:4]
                plan_line.set_data(ahead[:, 1], ahead[:, 0])
            path_line.set_data(path[: t + 1, 1], path[: t + 1, 0])
            ball.set_data(path[t : t + 1, 1], path[t : t + 1, 0])
            ax.set_title(f"step {t}, in the goal for {int(episodes.rewards[0, :t].sum())}", fontsize=9)
            canvas.draw()
            film.add(np.asarray(canvas.buffer_rgba())[..., :3])
