"""Tree search over plans against the best of n whole plans, at the same number of network rows.

python benchmarks/plan_tree.py open --seed 43                 one plan of 48 tokens from each start, judged by the true map
python benchmarks/plan_tree.py closed tree candidates         40 episodes until each ball arrives: 20 with the fixed goal, 20 Multi2D

open: the share of the episode left at the arrival, 0 for a plan that enters a wall by more than 0.15 m before, or does not arrive.
closed: scores as if the ball stayed in the goal. Torch uses one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import tyro
from numpy.typing import NDArray

from diffusion_forcing.planning import PlanningAgent
from diffusion_forcing.planning.agent import Frames, OnStep, Problem
from diffusion_forcing.planning.envs.maze2d import GOAL_RADIUS, Array, Balls, Bools, Maze
from diffusion_forcing.planning.rewards import Reward, reach, scaled
from diffusion_forcing.planning.tree import Result, Simulation, search

LEVEL, DRAWS = 0.6, 2
"""Noise at which the model judges a plan, as a fraction of K, and how often."""
AGREE = 0.45
"""Metres of disagreement above which a plan is made again at twice the length."""


@dataclass(frozen=True)
class Options:
    """Compare planners on one model."""

    loop: tyro.conf.Positional[Literal["open", "closed"]]
    """Plans, or episodes."""
    planners: tyro.conf.Positional[tuple[str, ...]] = ("whole", "tree")
    """present, candidates (chosen by reward), whole (chosen by value), tree; rows are compared with the first."""
    model: str = "maze2d-large"
    """Run or pretrained model."""
    plans: int = 8
    """Simulations for each plan."""
    rounds: int = 2
    """Of the tree."""
    tokens: int = 48
    """Of plans in the open loop."""
    starts: int = 100
    """Of which those within 1.5 m of their goal do not count (open), or the middle 40 are played (closed)."""
    seed: int = 43
    """Of starts."""


class TreeAgent(PlanningAgent):
    """Plans longer than the shortest are searched for by a tree; `rounds` = 1 chooses among whole plans by the same value."""

    rounds, simulations = 2, 8
    found: Result | None = None
    done: Bools | None = None
    """Balls that have arrived: they make no more plans."""
    _strength: Array | None = None

    def reset(self, number: int, *, steps: int | None = None) -> None:
        super().reset(number, steps=steps)
        self.done, due = np.zeros(number, dtype=bool), self.horizon.due
        self.horizon.due = lambda *given: due(*given) & ~self.done  # type: ignore[method-assign]

    def act(self, observation: Any, goal: Any = None, *, reward: Reward | None = None) -> NDArray[np.float32]:
        action = super().act(observation, goal, reward=reward)
        self.age[self.done] = 1
        return action

    def _sample(self, problem: Problem, length: int, on_step: OnStep | None = None) -> Frames:
        self.found = None
        if length <= self.options.min_tokens or not self.simulations:
            return super()._sample(problem, length, on_step)
        goal = problem.goal
        assert goal is not None

        def simulate(balls: NDArray[np.int64], states: Array, strengths: Array) -> Simulation:
            plans, differences = [], []
            for first in range(0, len(balls), 64):
                part = slice(first, first + 64)
                some = Problem(problem.balls[balls[part]], states[part], goal[balls[part]], None)
                self._strength = strengths[part]
                plans.append(PlanningAgent._sample(self, some, length))
                self._strength = None
                differences.append(self._differences(some, torch.from_numpy(plans[-1])))
            frames, difference = np.concatenate(plans), np.concatenate(differences)
            difference[self._invalid(frames)] = np.inf
            return Simulation(frames, arrivals(frames, goal[balls]), difference)

        frames, remaining = length * self.frame_stack, max(length * self.frame_stack, self.steps - self.time)
        leaves = self.simulations // self.rounds
        self.found = search(simulate, problem.observation, frames=frames, remaining=remaining, rounds=self.rounds, leaves=leaves)
        return self.found.plans.copy()

    def _differences(self, problem: Problem, plans: torch.Tensor) -> Array:
        """Metres (m, t) by which the model, denoising plans that were noised to LEVEL, differs from them in each frame."""
        tokens, context = self.codec.encode(plans).repeat(DRAWS, 1, 1), self._context(problem).repeat(DRAWS, 1, 1)
        k = torch.full(tokens.shape[:2], round(LEVEL * self.model.schedule.levels))
        noisy = self.model.schedule.add_noise(tokens, k, torch.randn(tokens.shape, generator=self.generator))
        with torch.no_grad():
            x0 = self.model.predict(torch.cat([context, noisy], dim=1), torch.cat([k.new_zeros(len(k), context.shape[1]), k], dim=1)).x0
        position = self.codec.decode(x0[:, context.shape[1] :])[..., 2:4]
        distance = (position - plans[..., 2:4].repeat(DRAWS, 1, 1)).norm(dim=-1)
        return distance.unflatten(0, (DRAWS, len(plans))).mean(0).numpy()

    def _reward(self, problem: Problem) -> Reward:
        if self._strength is None or problem.goal is None:
            return super()._reward(problem)
        weight = self._strength * 0.5 ** self.horizon.failures[problem.balls]
        return scaled(reach(torch.from_numpy(problem.goal.astype(np.float32))), torch.from_numpy(weight.astype(np.float32)))

    def _rejected(self, problem: Problem, plans: Frames) -> Bools:
        if self.found is None or len(self.found.value) != len(plans):
            return super()._rejected(problem, plans)
        return ~(self.found.arrives & (self.found.disagreement <= AGREE))


def arrivals(plans: Array, goal: Array) -> NDArray[np.int64]:
    """The first frame (m,) of plans within the goal, t where there is none."""
    close = np.linalg.norm(plans[..., 2:4] - goal[:, None], axis=-1) < GOAL_RADIUS
    return np.where(close.any(1), close.argmax(1), plans.shape[1])


def depth_in_walls(maze: Maze, points: Array) -> Array:
    """Metres (...) by which points (..., 2) lie outside of the free cells."""
    low = maze.cells - 0.7
    depth = np.full(points.shape[:-1], np.inf)
    for corner in low:
        depth = np.minimum(depth, np.linalg.norm(points - np.clip(points, corner, corner + 1), axis=-1))
    return depth


def problems(maze: Maze, number: int, seed: int) -> Balls:
    """Balls of which the first half have the fixed goal, the others random ones."""
    balls = Balls(maze, number, multi=True, seed=seed)
    balls.goal[: number // 2] = maze.goal
    return balls


def planner(base: PlanningAgent, name: str, options: Options) -> TreeAgent:
    """One of the planners by name."""
    candidates = options.plans if name == "candidates" else 1
    agent = TreeAgent(base.model, base.maze, sampler=base.sampler, options=replace(base.options, candidates=candidates), seed=3)
    agent.rounds = options.rounds if name == "tree" else 1
    agent.simulations = options.plans if name in ("tree", "whole") else 0
    return agent


def open_loop(agent: TreeAgent, options: Options) -> NDArray[Any]:
    """The true value of one plan from each start."""
    balls = problems(agent.maze, options.starts, options.seed)
    far = np.linalg.norm(balls.position - balls.goal, axis=-1) > 1.5
    observation, goal = balls.observation[far], balls.goal[far]
    agent.reset(len(goal))
    plans = agent._sample(agent._problem(observation, goal, None), options.tokens)
    first = arrivals(plans, goal)
    depth = np.where(np.arange(plans.shape[1]) <= first[:, None], depth_in_walls(agent.maze, plans[..., 2:4]), 0).max(1)
    return np.where((first < plans.shape[1]) & (depth < 0.15), 1 - first / agent.maze.steps, 0.0)


def closed_loop(agent: TreeAgent, options: Options) -> NDArray[Any]:
    """Scores of episodes, as if the balls stayed in the goal after arriving."""
    balls = problems(agent.maze, options.starts, 1000 * options.seed)
    middle = slice(options.starts * 3 // 10, options.starts * 7 // 10)
    balls.position, balls.velocity, balls.goal = balls.position[middle], balls.velocity[middle], balls.goal[middle]
    balls.number, steps = len(balls.goal), agent.maze.steps
    agent.seed = 1000 * options.seed
    agent.reset(balls.number)
    assert agent.done is not None
    first = np.full(balls.number, steps)
    for t in range(steps):
        _, reward, _ = balls.step(agent.act(balls.observation, balls.goal))
        arrived = (reward > 0) & ~agent.done
        first[arrived] = t
        agent.done |= arrived
        if agent.done.all():
            break
    return np.asarray(agent.maze.normalised((steps - first) * 0.999))


def main(options: Options) -> None:
    """Print a row for each planner."""
    torch.set_num_threads(1)
    base = PlanningAgent.from_pretrained(options.model)
    measure: Callable[[TreeAgent, Options], NDArray[Any]] = open_loop if options.loop == "open" else closed_loop
    print("| planner | value or score | to the first row | above 0 | rows a plan or episode | CPU s |", "|---" * 6 + "|", sep="\n")
    first: NDArray[Any] | None = None
    for name in options.planners:
        agent, rows, began = planner(base, name, options), [0], time.process_time()

        def count(_: Any, inputs: Any, __: Any, rows: list[int] = rows) -> None:
            rows[0] += len(inputs[0])

        network: Any = agent.model.backbone
        network.register_forward_hook(count)
        values = measure(agent, options)
        first = values if first is None else first
        change, number = values - first, len(values)
        print(
            f"| {name} | {values.mean():.3f} ± {values.std(ddof=1) / number**0.5:.3f} | {change.mean():+.3f} ± "
            f"{change.std(ddof=1) / number**0.5:.3f} | {(values > 0).mean():.1%} | {rows[0] / number:.0f} | "
            f"{(time.process_time() - began) / number:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main(tyro.cli(Options))
