"""Tree search over plans: a detour that no single plan takes, the statistics of nodes, batches, and the budget."""

import numpy as np
import pytest

from diffusion_forcing.planning.tree import Simulation, Tree, chance, search

FRAMES, GOAL = 60, np.array([4.0, 0.0])
WALL = (1.5, 2.5)  # where the wall stands, along the way; it is 0.6 high
SEARCH = {"frames": FRAMES, "remaining": 200, "strengths": (1.0, 0.0)}


class World:
    """A wall between ball and goal. Guided plans run straight to the goal; the others walk away from the straight line, half-way at most.

    The model disagrees by a metre with frames in the wall. No single plan comes to the goal around it.
    """

    def __init__(self):
        self.rows = []

    def __call__(self, balls, observation, strengths):
        self.rows.append(len(balls))
        start = observation[:, None, :2]
        time = np.arange(1, FRAMES + 1)[None, :, None] / FRAMES
        straight = start + np.minimum(1, 2 * time) * (GOAL - start)
        aside = start + time * np.array([0.0, 12.0])
        position = np.where(strengths[:, None, None] > 0, straight, aside)
        plans = np.concatenate([np.zeros_like(position), position, np.zeros_like(position)], axis=-1).astype(np.float32)
        inside = (position[..., 0] > WALL[0]) & (position[..., 0] < WALL[1]) & (position[..., 1] < 0.6)
        close = np.linalg.norm(position - GOAL, axis=-1) < 0.5
        return Simulation(plans, np.where(close.any(1), close.argmax(1), FRAMES), inside.astype(float))


def at(*positions):
    """Observations (n, 4) of balls at rest."""
    return np.array([(*position, 0.0, 0.0) for position in positions])


def grown(rounds, leaves, exploration=0.3):
    """A tree of two balls after some rounds, and what each simulation was worth, in their order (2, rounds * leaves)."""
    world, values = World(), []
    tree = Tree(at((0, 0), (3.4, 0)), rounds * leaves, 10, FRAMES)
    for _ in range(rounds):
        parents = np.stack([tree.select(exploration) for _ in range(leaves)], axis=1)
        balls = np.repeat(np.arange(2), leaves)
        strengths = np.array([1.0, 0.0])[tree.actions(parents) % 2].ravel()
        before = tree.count
        tree.expand(balls, parents.ravel(), world(balls, tree.state[balls, parents.ravel()], strengths), 200)
        values.append(tree.value[:, before : tree.count].copy())
    return tree, np.concatenate(values, axis=1)


def test_a_tree_finds_the_detour_and_choosing_among_whole_plans_does_not():
    tree = search(World(), at((0, 0)), rounds=8, leaves=2, **SEARCH)
    whole = search(World(), at((0, 0)), rounds=1, leaves=16, **SEARCH)
    assert tree.arrives[0]
    assert tree.disagreement[0] == 0
    assert tree.value[0] > 0.5
    assert whole.disagreement[0] == 1, "the straight plan, through the wall"
    assert whole.value[0] < 0.01
    path = tree.plans[0, :, 2:4]
    assert not ((path[:, 0] > WALL[0]) & (path[:, 0] < WALL[1]) & (path[:, 1] < 0.6)).any()
    assert np.linalg.norm(path[-1] - GOAL) < 0.5


def test_sub_plans_join():
    path = search(World(), at((0, 0)), rounds=8, leaves=2, **SEARCH).plans[0, :, 2:4]
    assert np.linalg.norm(np.diff(path, axis=0), axis=1).max() < 0.3
    assert np.linalg.norm(path[0]) < 0.3


def test_where_whole_plans_do_the_first_one_is_kept():
    result = search(World(), at((3.0, 0)), rounds=2, leaves=2, **SEARCH)
    assert result.arrives[0]
    assert result.value[0] == pytest.approx(chance(np.array(0.0)) * (1 - result.plans[0, :, 2].searchsorted(3.5) / 200), abs=0.01)


def test_the_budget_is_respected_in_one_call_a_round_for_all_balls():
    world = World()
    search(world, at((0, 0), (0, 0.5), (3, 0)), rounds=3, leaves=4, **SEARCH)
    assert world.rows == [12, 12, 12]


def test_balls_do_not_depend_on_each_other():
    starts = [(0, 0), (3, 0), (0, 0.9), (2.0, 2)]
    together = search(World(), at(*starts), rounds=4, leaves=2, **SEARCH)
    for i, start in enumerate(starts):
        alone = search(World(), at(start), rounds=4, leaves=2, **SEARCH)
        np.testing.assert_array_equal(alone.plans[0], together.plans[i])
        assert alone.value[0] == together.value[i]


@pytest.mark.parametrize(("rounds", "leaves"), [(8, 1), (4, 3)])
def test_statistics_of_nodes(rounds, leaves):
    tree, values = grown(rounds, leaves)
    count = 1 + rounds * leaves
    assert tree.count == count
    for ball in range(2):
        assert tree.visits[ball, 0] == rounds * leaves
        for node in range(count):
            children = [other for other in range(1, count) if tree.parent[ball, other] == node]
            assert len(children) == tree.children[ball, node]
            assert tree.visits[ball, node] == (node > 0) + sum(tree.visits[ball, child] for child in children)
            own = values[ball, node - 1] if node else 0
            assert tree.value[ball, node] == max([own, *tree.value[ball, children]])
            for child in children:
                assert tree.depth[ball, child] == tree.depth[ball, node] + 1
                assert tree.disagreement[ball, child] >= tree.disagreement[ball, node]


def test_leaves_of_one_round_differ_in_strength():
    tree = Tree(at((0, 0)), 4, 10, FRAMES)
    parents = np.stack([tree.select(0.3) for _ in range(4)], axis=1)
    assert parents.tolist() == [[0, 0, 0, 0]]
    assert tree.actions(parents).tolist() == [[0, 1, 2, 3]]


def test_a_plan_that_is_not_finite_is_worth_nothing():
    def broken(balls, observation, strengths):
        plans = np.full((len(balls), FRAMES, 6), np.nan, dtype=np.float32)
        return Simulation(plans, np.full(len(balls), 5), np.full((len(balls), FRAMES), np.nan))

    result = search(broken, at((0, 0)), rounds=3, leaves=2, **SEARCH)
    assert result.value[0] < 1e-6
