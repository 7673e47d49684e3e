"""The mazes: the benchmark's six reference scores, and what balls and walls do to one another."""

import hashlib
import itertools

import numpy as np
import pytest

from diffusion_forcing.planning.baselines.scripted import Controller
from diffusion_forcing.planning.envs.maze2d import (
    DT,
    GOAL_RADIUS,
    JITTER,
    MASS,
    MAZES,
    OFFSET,
    RADIUS,
    Balls,
    by_name,
    check_inside,
    rewards,
    step,
)

NAMES = list(MAZES)


FREE_TOP = 5 + DT * 95 / (MASS + DT)


@pytest.fixture(params=NAMES)
def maze(request):
    return MAZES[request.param]


def benchmark_rng(seed=0):
    """A generator as the benchmark's old library seeded them."""
    digest = hashlib.sha512(str(seed).encode()).digest()[:8]
    return np.random.RandomState(np.frombuffer(digest, dtype="<u4").tolist())


def benchmark_starts(maze, episodes=100):
    """Positions and velocities (episodes, 2) in the benchmark's order of draws."""
    rng = benchmark_rng()
    draws = [(maze.cells[rng.choice(len(maze.cells))] + rng.uniform(-0.1, 0.1, 2), rng.randn(2) * 0.1) for _ in range(episodes)]
    return tuple(np.stack(part) for part in zip(*draws, strict=True))


def gaps(maze, position):
    """Between each ball (n, 2) and the nearest wall; negative if they overlap."""
    corner, extent = maze.boxes[:, :2], maze.boxes[:, 2:]
    away = np.abs(position[:, None] - (corner + extent / 2)) - extent / 2
    return np.linalg.norm(np.maximum(away, 0), axis=-1).min(1) - RADIUS


def centres(maze):
    return maze.cells - OFFSET


def test_the_random_policy_earns_the_published_return(maze):
    position, velocity = benchmark_starts(maze)
    actions = benchmark_rng().uniform(-1, 1, size=(100, maze.steps, 2)).astype(np.float32).astype(float)  # one stream through all episodes
    total = 0.0
    for t in range(maze.steps):
        position, velocity, _ = step(maze, position, velocity, actions[:, t])
        total += rewards(position, maze.goal).sum()
    assert total / 100 == pytest.approx(maze.random_return, abs=1e-9)


def test_the_reference_controller_earns_the_published_return(maze):
    """One controller for all episodes never sees its target change, so that it does not plan anew: so the score came about."""
    draws = np.random.RandomState(0)

    def uniform(n):
        draws.random_sample()  # the benchmark's grid draws a number for each of its moves
        return draws.uniform(size=(n, 2))

    controller, goal, total = Controller(maze, 1, uniform), maze.goal[None], 0.0
    for start in zip(*benchmark_starts(maze), strict=True):
        position, velocity = (part[None] for part in start)
        for _ in range(maze.steps):
            action, _ = controller.act(np.concatenate([position, velocity], axis=1), goal)
            position, velocity, _ = step(maze, position, velocity, action)
            total += rewards(position, goal)[0]
    assert total / 100 == pytest.approx(maze.reference_return, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "multi", "expected"),
    [
        ("umaze", False, 145),
        ("medium", False, 155),
        ("large", False, 201),
        ("umaze", True, 157),
        ("medium", True, 169),
        ("large", True, 218),
    ],
)
def test_a_controller_that_plans_for_each_episode_scores_above_the_reference(name, multi, expected):
    balls, rng = Balls(name, 400, multi=multi, seed=3), np.random.default_rng(4)
    controller = Controller(balls.maze, 400, lambda n: rng.uniform(size=(n, 2)))
    observation, returns = balls.observation, np.zeros(400)
    for _ in range(balls.maze.steps):
        observation, reward, _ = balls.step(controller.act(observation, balls.goal)[0])
        returns += reward
    scores = balls.maze.normalised(returns)
    assert abs(scores.mean() - expected) < 4 * scores.std() / 400**0.5
    assert (returns > 0).all()


def test_the_normalised_score_is_0_for_the_random_policy_and_100_for_the_reference(maze):
    scores = maze.normalised(np.array([maze.random_return, maze.reference_return]))
    np.testing.assert_allclose(scores, [0, 100], atol=1e-12)


def test_the_mazes_have_the_benchmarks_cells_goals_and_lengths():
    assert [len(maze.cells) for maze in MAZES.values()] == [7, 26, 46]
    assert [maze.goal.tolist() for maze in MAZES.values()] == [[1, 1], [6, 6], [7, 9]]
    assert [maze.steps for maze in MAZES.values()] == [300, 600, 800]
    for maze in MAZES.values():
        assert (maze.cells[-1] == maze.goal).all()
        assert maze.cells[:-1].tolist() == sorted(maze.cells[:-1].tolist())
        assert not maze.walls[tuple(maze.cells.T)].any()
        assert (~maze.walls).sum() == len(maze.cells)


@pytest.mark.parametrize("kind", ["random", "full force", "chase"])
def test_no_ball_leaves_the_maze(maze, kind):
    """1000 steps of 64 balls. chase: full force towards the other end of the maze, so that balls run into walls and corners at speed."""
    rng = np.random.default_rng(5)
    balls = Balls(maze, 64, seed=6)
    action = np.zeros((64, 2))
    aim = rng.uniform(0, maze.walls.shape, (64, 2))
    deepest, fastest = np.inf, 0.0
    for t in range(1000):
        if kind == "random":
            action = rng.uniform(-1.5, 1.5, (64, 2))
        elif kind == "full force":
            turned = rng.random(64) < 0.03
            action[turned] = rng.choice([-1.0, 0.0, 1.0], (int(turned.sum()), 2))
        else:
            aim = rng.uniform(0, maze.walls.shape, (64, 2)) if t % 50 == 0 else aim
            action = np.sign(aim - balls.position)
        balls.step(action)
        assert maze.inside(balls.position).all()
        deepest, fastest = min(deepest, gaps(maze, balls.position).min()), max(fastest, np.abs(balls.velocity).max())
    assert deepest > -0.08, "a wall yields no more than the way of a step, 0.05 along each axis, and a little"
    assert fastest < 8


def test_no_step_from_any_state_leaves_the_maze(maze):
    """Even from where a ball overlaps a wall, at any speed and force: the centre is pushed out, never through."""
    rng = np.random.default_rng(7)
    position = rng.uniform(0, maze.walls.shape, (100_000, 2))
    position = position[maze.inside(position)]
    velocity = rng.uniform(-5.2, 5.2, position.shape)
    moved = step(maze, position, velocity, rng.choice([-1.0, 1.0], position.shape))
    assert maze.inside(moved.position).all()
    assert np.abs(moved.velocity).max() < 8
    apart = gaps(maze, position) > 0.0021
    assert not moved.touched[apart].any()
    assert moved.touched[~apart & (gaps(maze, position) < 0.0019)].all()
    assert np.abs(moved.velocity[apart]).max() <= FREE_TOP + 1e-12, "only a wall makes a ball faster than a force can"


def test_free_flight_follows_the_formula(maze):
    """v' = v + dt (100 u - v) / (m + dt) and x' = x + dt v', with velocities clipped to 5 before and actions to 1."""
    rng = np.random.default_rng(8)
    position = np.repeat(centres(maze), 20, axis=0) + rng.uniform(-0.3, 0.3, (20 * len(maze.cells), 2))
    velocity, action = rng.uniform(-6, 6, position.shape), rng.uniform(-2, 2, position.shape)
    moved = step(maze, position, velocity, action)
    slow = np.clip(velocity, -5, 5)
    expected = slow + DT * (100 * np.clip(action, -1, 1) - slow) / (MASS + DT)
    assert not moved.touched.any()
    np.testing.assert_allclose(moved.velocity, expected, atol=1e-13)
    np.testing.assert_allclose(moved.position, position + DT * expected, atol=1e-13)


def test_a_coasting_ball_loses_energy_to_damping_alone():
    maze = MAZES["large"]
    position, velocity = np.array([[1 - OFFSET, 1 - OFFSET]]), np.array([[0.0, 2.0]])
    first = velocity.copy()
    for t in range(1, 101):
        position, velocity, touched = step(maze, position, velocity, np.zeros((1, 2)))
        assert not touched.any()
        np.testing.assert_allclose(velocity, first * (MASS / (MASS + DT)) ** t, rtol=1e-12)


def test_a_ball_pressed_into_a_wall_stands_at_its_face(maze):
    """Each wall face of each free cell, as `boxes` has them: the frame in which to draw."""
    moves = np.array([(0, 1), (0, -1), (1, 0), (-1, 0)])
    pairs = [(cell, move) for cell, move in itertools.product(maze.cells, moves) if maze.walls[tuple(cell + move)]]
    cell, move = (np.array(part) for part in zip(*pairs, strict=True))
    position, velocity = cell - OFFSET, np.zeros(cell.shape)
    for _ in range(400):
        position, velocity, touched = step(maze, position, velocity, move.astype(float))
    assert touched.all()
    assert np.abs(velocity).max() < 1e-3
    assert np.abs(gaps(maze, position)).max() < 0.01
    corner = np.array([maze.boxes[np.argwhere(maze.walls).tolist().index(wall)] for wall in (cell + move).tolist()])
    face = np.where(move > 0, corner[:, :2], corner[:, :2] + corner[:, 2:])
    stands = np.abs(position - face)[move != 0]
    assert np.abs(stands - RADIUS).max() < 0.01


def test_boxes_cover_what_is_not_inside(maze):
    rng = np.random.default_rng(9)
    points = rng.uniform(-0.69, np.array(maze.walls.shape) - 0.71, (5000, 2))
    low, high = maze.boxes[:, :2], maze.boxes[:, :2] + maze.boxes[:, 2:]
    covered = ((points[:, None] >= low) & (points[:, None] <= high)).all(-1).any(1)
    np.testing.assert_array_equal(covered, ~maze.inside(points))
    assert not maze.inside(np.array([[-5.0, 1.0], [1.0, 50.0]])).any()


def test_many_balls_move_as_each_alone_bit_for_bit(maze):
    rng = np.random.default_rng(10)
    balls = Balls(maze, 12, seed=11)
    position, velocity = balls.position.copy(), balls.velocity.copy()
    touches = 0
    for _ in range(150):
        action = np.sign(rng.standard_normal((12, 2)) + np.repeat([[1, 1], [-1, 1], [1, -1]], 4, axis=0))
        observation, _, touched = balls.step(action)
        alone = [step(maze, position[i : i + 1], velocity[i : i + 1], action[i : i + 1]) for i in range(12)]
        position, velocity = (np.concatenate([part[j] for part in alone]) for j in range(2))
        np.testing.assert_array_equal(observation, np.concatenate([position, velocity], axis=1))
        np.testing.assert_array_equal(touched, [part.touched[0] for part in alone])
        touches += touched.sum()
    assert touches > 100


def test_a_step_leaves_its_arguments_alone(maze):
    balls = Balls(maze, 5)
    arguments = [balls.position.copy(), 6 * np.ones((5, 2)), 2 * np.ones((5, 2))]
    kept = [part.copy() for part in arguments]
    step(maze, *arguments)
    for part, before in zip(arguments, kept, strict=True):
        np.testing.assert_array_equal(part, before)


def test_the_reward_is_1_within_half_a_cell_of_the_goal():
    goal = np.zeros((3, 2))
    position = np.array([[0.0, GOAL_RADIUS], [0.0, GOAL_RADIUS + 1e-9], [0.35, -0.35]])
    assert rewards(position, goal).tolist() == [1, 0, 1]


def test_balls_start_near_free_cells_and_drawn_goals_vary(maze):
    balls = Balls(maze, 4000, multi=True, seed=12)
    for points in (balls.position, balls.goal):
        cell = np.round(points)
        assert np.abs(points - cell).max() <= JITTER
        counts = np.array([(cell == wanted).all(1).sum() for wanted in maze.cells])
        assert counts.sum() == 4000, "some point is near no free cell"
        assert np.abs(counts / 4000 - 1 / len(maze.cells)).max() < 4 * (1 / len(maze.cells) / 4000) ** 0.5
        assert maze.inside(points).all()
    np.testing.assert_allclose(balls.velocity.std(0), 0.1, rtol=0.05)
    before = balls.goal.copy()
    balls.reset()
    assert (balls.goal != before).any(1).all()


def test_without_multi_the_goal_is_the_mazes_own(maze):
    balls = Balls(maze, 7)
    balls.reset()
    np.testing.assert_array_equal(balls.goal, np.tile(maze.goal, (7, 1)))


def test_a_seed_repeats_and_another_does_not():
    first, again, other = (Balls("medium", 8, multi=True, seed=seed) for seed in (13, 13, 14))
    for _ in range(2):
        np.testing.assert_array_equal(first.observation, again.observation)
        np.testing.assert_array_equal(first.goal, again.goal)
        assert (first.observation != other.observation).any()
        for balls in (first, again, other):
            balls.reset()


def test_points_in_walls_and_wrong_shapes_are_refused():
    maze = MAZES["umaze"]
    points = check_inside(maze, [(1, 1), (3, 2)], "start")
    assert points.shape == (2, 2)
    assert points.dtype == float
    with pytest.raises(ValueError, match=r"start 1 at \(2, 2\) lies in a wall .* nearest free cell is \(2, 3\)"):
        check_inside(maze, [(1, 1), (2, 2)], "start")
    with pytest.raises(ValueError, match="outside of the umaze maze"):
        check_inside(maze, [(1, -3)], "goal")
    with pytest.raises(ValueError, match=r"goal should be \(n, 2\).* got shape \(2,\)"):
        check_inside(maze, (1, 1), "goal")
    with pytest.raises(ValueError, match="lies in a wall"):  # on the face itself, where no direction leads away from the wall
        check_inside(maze, [(0.3, 0.8)], "start")
    with pytest.raises(ValueError, match=r"outside of the umaze maze"):
        check_inside(maze, [(1e300, 1)], "goal")
    with pytest.raises(ValueError, match=r"start 1 holds NaN or infinite numbers: \[nan, 1.0\]"):
        check_inside(maze, [(1, 1), (np.nan, 1)], "start")
    with pytest.raises(ValueError, match="no maze 'huge'; choose from umaze, medium, large"):
        by_name("huge")
