"""Tree search over plans (after Monte Carlo Tree Diffusion, Yoon et al. 2025): which beginning of a plan is worth continuing?

A node is the end of a sub-plan: a state that a beginning of a plan leads to. To expand a node is to sample a whole plan from its state,
guided with one of several strengths; the plan's first sub-plan becomes a child, and the rest of it is the child's first simulation. Of a
plan through a wall, what comes before the wall is thus kept, and continued otherwise. All leaves of all balls are sampled in one call.

The value of a plan is the expected share of the remaining time spent in the goal: the share left after its arrival times the chance that
it can be executed, judged by the model's own disagreement with it. (The reward alone prefers plans through walls.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .envs.maze2d import Array, Bools

Ints = NDArray[np.int64]
DOUBT, DOUBT_WIDTH = 0.25, 0.08
"""Metres of disagreement at which a plan holds with a chance of one half, and how fast the chance falls."""


class Simulation(NamedTuple):
    """Plans sampled from states: frames (m, t, 6), the frame of arrival (m,), t where there is none, and for each frame the metres by
    which the model disagrees with it (m, t)."""

    plans: Array
    arrival: Ints
    disagreement: Array


Simulate = Callable[[Ints, Array, Array], Simulation]
"""(balls (m,), observations (m, 4), strengths of guidance (m,)) -> plans from there, towards each ball's goal."""


class Result(NamedTuple):
    """The best plan of each ball (b, t, 6), its value (b,), the metres by which the model disagrees with it (b,), if it arrives (b,)."""

    plans: Array
    value: Array
    disagreement: Array
    arrives: Bools


def search(
    simulate: Simulate, observation: Array, *, frames: int, remaining: int, rounds: int = 2, leaves: int = 4, sub_plans: int = 6,
    strengths: tuple[float, ...] = (1.0,), exploration: float = 0.3,
) -> Result:  # fmt: skip
    """The best plans found from observations (b, 4), with rounds * leaves simulations for each ball.

    frames: of a plan, and of every simulation. remaining: steps of the episode, the unit of value. leaves: expanded at a time for each
    ball. sub_plans: of a plan. exploration: weight of what has been visited little.
    """
    tree = Tree(observation, rounds * leaves, max(1, -(-frames // sub_plans)), frames)
    for _ in range(rounds):
        parents = np.stack([tree.select(exploration) for _ in range(leaves)], axis=1)  # (b, leaves)
        strength = np.array(strengths)[tree.actions(parents) % len(strengths)]
        balls = np.repeat(np.arange(len(observation)), leaves)
        simulation = simulate(balls, tree.state[balls, parents.ravel()], strength.ravel())
        tree.expand(balls, parents.ravel(), simulation, remaining)
    return tree.best()


def chance(disagreement: Array) -> Array:
    """The chance that a plan can be executed with which the model disagrees by so many metres."""
    return 1 / (1 + np.exp(np.minimum((disagreement - DOUBT) / DOUBT_WIDTH, 50)))


class Tree:
    """Trees of b balls, one array for each statistic of a node, (b, 1 + simulations): the root first, then the children as they came."""

    def __init__(self, observation: Array, simulations: int, sub_plan: int, frames: int) -> None:
        balls, nodes = len(observation), 1 + simulations
        self.sub_plan, self.frames = sub_plan, frames
        self.count = 1  # nodes of each tree so far
        self.state = np.zeros((balls, nodes, 4))
        self.state[:, 0] = observation
        self.parent = np.zeros((balls, nodes), dtype=np.int64)
        self.depth = np.zeros((balls, nodes), dtype=np.int64)
        self.children = np.zeros((balls, nodes), dtype=np.int64)  # expansions under way included
        self.visits = np.zeros((balls, nodes), dtype=np.int64)  # likewise
        self.value = np.zeros((balls, nodes))  # of the best simulation through it
        self.disagreement = np.zeros((balls, nodes))  # the largest on the way to it
        self.closed = np.zeros((balls, nodes), dtype=bool)  # nothing left to decide after it
        self.segments = np.zeros((balls, nodes, sub_plan, 6), dtype=np.float32)
        self._best = np.zeros((balls, frames, 6), dtype=np.float32)
        self._result = [np.full(balls, -1.0), np.full(balls, np.inf), np.zeros(balls, dtype=bool)]

    def select(self, exploration: float) -> Ints:
        """The node (b,) of each ball to be expanded: down the children of the highest upper confidence bound to one with room for more.

        Nodes on the way count as visited at once, so that the next selection goes elsewhere before results are in.
        """
        chosen = np.zeros(len(self.state), dtype=np.int64)
        for ball in range(len(chosen)):
            node = 0
            self.visits[ball, 0] += 1
            while True:
                below = np.flatnonzero((self.parent[ball, 1 : self.count] == node) & ~self.closed[ball, 1 : self.count]) + 1
                if len(below) == 0 or self.children[ball, node] <= self.visits[ball, node] // 2:
                    break
                visits = self.visits[ball, below]
                bound = self.value[ball, below] + exploration * np.sqrt(np.log(self.visits[ball, node]) / visits)
                node = int(below[bound.argmax()])
                self.visits[ball, node] += 1
            chosen[ball] = node
            self.children[ball, node] += 1
        return chosen

    def actions(self, parents: Ints) -> Ints:
        """Which child of its parent each of the expansions (b, leaves) becomes, counted from 0: the strengths are tried in turn."""
        same = parents[:, :, None] == parents[:, None]  # (b, leaves, leaves)
        later = np.triu(same, 1).sum(2)
        return np.take_along_axis(self.children, parents, 1) - 1 - later

    def expand(self, balls: Ints, parents: Ints, simulation: Simulation, remaining: int) -> None:
        """Add the first sub-plan of each simulation (m, ...) as a child of its parent (m,), and back its value up to the root."""
        plans, cut, leaves = simulation.plans, self.sub_plan, len(balls) // len(self.state)
        nodes = self.count + np.arange(len(balls)) % leaves
        self.count += leaves
        depth, before = self.depth[balls, parents] + 1, self.disagreement[balls, parents]
        elapsed = (depth - 1) * cut
        until = np.arange(plans.shape[1]) <= simulation.arrival[:, None]
        doubt = np.maximum(before, np.where(until, np.nan_to_num(simulation.disagreement, nan=np.inf), 0).max(1))
        arrives = (simulation.arrival < plans.shape[1]) & (elapsed + simulation.arrival < self.frames)
        value = np.where(arrives, chance(doubt) * np.maximum(0, 1 - (elapsed + simulation.arrival) / remaining), 0.0)

        self.parent[balls, nodes], self.depth[balls, nodes] = parents, depth
        self.state[balls, nodes] = plans[:, cut - 1, 2:]
        self.segments[balls, nodes] = plans[:, :cut]
        self.disagreement[balls, nodes] = np.maximum(before, np.nan_to_num(simulation.disagreement[:, :cut], nan=np.inf).max(1))
        decided = simulation.arrival < 2 * cut
        self.closed[balls, nodes] = decided | (depth * cut >= self.frames) | ~np.isfinite(plans).all((1, 2))
        self.visits[balls, nodes] = 1

        self._keep_best(balls, nodes, simulation, value, doubt, arrives)
        at = nodes
        while True:  # every simulation on its own way up; the root is its own parent
            np.maximum.at(self.value, (balls, at), value)
            if not at.any():
                break
            at = self.parent[balls, at]

    def _keep_best(self, balls: Ints, nodes: Ints, simulation: Simulation, value: Array, doubt: Array, arrives: Bools) -> None:
        for i in np.argsort(-value, kind="stable"):
            ball = balls[i]
            if value[i] <= self._result[0][ball]:
                continue
            parts, node = [simulation.plans[i]], self.parent[ball, nodes[i]]
            while node:
                parts.append(self.segments[ball, node])
                node = self.parent[ball, node]
            self._best[ball] = np.concatenate(parts[::-1])[: self.frames]
            for kept, new in zip(self._result, (value, doubt, arrives), strict=True):
                kept[ball] = new[i]

    def best(self) -> Result:
        """The plan of the highest value of each ball; where none arrives, the first."""
        return Result(self._best, *self._result)
