"""The swap as an environment: success that cannot be feigned, disturbances by seed, images of both cameras."""

import itertools
import time

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from swaps import begin, rest_at, stay

from diffusion_forcing.imitation.swap.env import NUDGE_MIN, STILL_STEPS, SwapEnv
from diffusion_forcing.imitation.swap.expert import HOVER, Expert, demonstrate
from diffusion_forcing.imitation.swap.scene import (
    CAMERAS,
    CHUNK,
    CHUNKS,
    HIGH,
    HOME,
    INSIDE,
    LOW,
    MAX_OPENING,
    MIRROR,
    REST,
    RIM,
    SLOT_HALF,
    centre,
)


@pytest.mark.parametrize("kind", ["mujoco", "kinematic"])
def test_an_episode_is_the_same_for_its_seed(kind, physics):
    other = SwapEnv(px=16, simulator=kind)
    env = physics if kind == "mujoco" else SwapEnv(px=16, simulator=kind)
    runs = []
    for world in (env, other, env):
        begin(world, 5)
        expert = Expert(world, 5)
        trace = []
        for _ in range(90):
            world.step_many(expert.act()[None], render=False)
            trace.append([*world.simulator.hand, *itertools.chain(*world.simulator.fruits)])
        runs.append(np.array(trace))
    np.testing.assert_array_equal(runs[0], runs[1])
    np.testing.assert_array_equal(runs[0], runs[2])
    assert np.ptp(runs[0][:, 2]) > 0.2, "a hand that moved"


def test_many_steps_are_as_many_single_ones(physics):
    actions = np.linspace(HOME, (0.5, 0.2, 0.1, 0, 0, 0.3, 0.02), 15)
    begin(physics, 1)
    many = physics.step_many(actions, render=False)
    begin(physics, 1)
    for action in actions:
        single = physics.step_many(action[None], render=False)
    np.testing.assert_array_equal(many[0]["pose"], single[0]["pose"])
    assert many[1:4] == (0.0, False, False)
    assert many[4] == single[4]
    assert many[4]["time"] == 15


def test_starts_are_drawn_or_chosen(kinematic):
    starts, offsets = [], []
    for seed in range(60):
        begin(kinematic, seed)
        starts.append(kinematic.start)
        offsets += [np.subtract(fruit[:2], centre(slot)) for fruit, slot in zip(kinematic.simulator.fruits, kinematic.starts, strict=True)]
        chosen = {}
        for start in ("AB", "BA"):
            begin(kinematic, seed, start=start)
            assert kinematic.start == start
            assert (kinematic.slot(0), kinematic.slot(1)) == kinematic.starts == (("AB").index(start[0]), ("AB").index(start[1]))
            chosen[start] = [
                np.subtract(fruit[:2], centre(slot)) for fruit, slot in zip(kinematic.simulator.fruits, kinematic.starts, strict=True)
            ]
        np.testing.assert_allclose(chosen["AB"], chosen["BA"], atol=1e-12)
    assert 15 < starts.count("AB") < 45
    assert 0.04 < np.abs(offsets).max() <= 0.045, "anywhere within the slot"
    assert np.std(offsets) > 0.022


def test_both_simulators_begin_and_are_disturbed_alike(physics, kinematic):
    for seed in range(4):
        begin(physics, seed)
        begin(kinematic, seed)
        assert physics.start == kinematic.start
        np.testing.assert_allclose(physics.simulator.fruits, kinematic.simulator.fruits, atol=0.001)
        np.testing.assert_allclose(physics.pose, kinematic.pose, atol=0.002)
        assert physics._nudged == kinematic._nudged
        assert physics._slips == kinematic._slips
        assert physics._choices == kinematic._choices


def test_success_is_both_fruits_at_rest_in_the_others_slot(physics, kinematic):
    for env in (physics, kinematic):
        begin(env, 0, start="AB")
        apple, orange = ((*centre(slot), REST) for slot in (1, 0))
        assert not env.success
        rest_at(env, apple, orange)
        stay(env, STILL_STEPS - 1)
        assert not env.success, "not yet at rest for long enough"
        stay(env, 3)
        assert env.success
        assert env.info()["slots"] == (1, 0)
        rest_at(env, orange, apple)
        assert not stay(env, 2 * STILL_STEPS)[4]["success"], "as at the start"
        rest_at(env, (*centre(2), REST), orange)
        assert not stay(env, 2 * STILL_STEPS)[4]["success"], "one of them in C"
        rest_at(env, apple, (0.35, 0.27, REST - 0.004))
        assert not stay(env, 2 * STILL_STEPS)[4]["success"], "one beside the plates"


def test_the_rim_is_not_the_slot(physics, kinematic):
    for env in (physics, kinematic):
        begin(env, 0, start="AB")
        x, y = centre(1)
        for place in ((x + SLOT_HALF, y, REST + RIM), (x, y, REST + RIM), (x + INSIDE + 0.001, y, REST), (x, y, REST + 0.1)):
            env.simulator.fruits[0] = list(place)
            assert env.slot(0) is None
        env.simulator.fruits[0] = [x + 0.052, y - 0.052, REST]
        assert env.slot(0) == 1


def test_a_rolling_fruit_is_not_at_rest(physics):
    begin(physics, 0, start="AB")
    rest_at(physics, (*centre(1), REST), (*centre(0), REST))
    stay(physics, STILL_STEPS + 3)
    assert physics.success
    physics.simulator.push(0, (0.15, 0.0))
    stay(physics, 1)
    assert not physics.success


@pytest.mark.parametrize("kind", ["mujoco", "kinematic"])
def test_a_fruit_in_the_hand_does_not_count(kind):
    env = SwapEnv(px=16, simulator=kind, nudge=0, slip=0)
    begin(env, 3)
    expert = Expert(env, 3)
    for _ in range(env.steps):
        action = expert.act()
        if env.simulator.held == 0 and env.slot(1) == env.starts[0] and action[6] > 0.01:
            break  # about to let go of the apple over the orange's slot
        env.step_many(action[None], render=False)
    hold = np.array([*env.pose[:6], 0.0])
    stay(env, 20, hold)
    assert env.simulator.held == 0
    assert np.abs(np.subtract(env.simulator.fruits[0][:2], centre(env.starts[1]))).max() < INSIDE
    assert not env.success, "held, however still"
    stay(env, 15, [*hold[:2], HOVER, *hold[3:]])
    assert not env.success, "held in the air"
    stay(env, 15, hold)
    stay(env, STILL_STEPS + 10, [*hold[:6], MAX_OPENING])
    assert env.success, "let go"
    env.close()


def test_the_reward_comes_at_the_end(kinematic):
    begin(kinematic, 0)
    expert = Expert(kinematic, 0)
    rewards, over = zip(*(kinematic.step_many(expert.act()[None], render=False)[1:4:2] for _ in range(kinematic.steps)), strict=True)
    assert rewards[-1] == 1
    assert sum(rewards) == 1
    assert over[-1]
    assert sum(over) == 1
    with pytest.raises(RuntimeError, match="600 steps, 0 are left; got 1 actions"):
        stay(kinematic, 1)


def test_the_moves_done_are_counted_in_their_order(kinematic):
    begin(kinematic, 0)
    expert, found = Expert(kinematic, 0), []
    for _ in range(kinematic.steps):
        info = kinematic.step_many(expert.act()[None], render=False)[4]
        found.append((info["moves"], info["slots"]))
    moves = [count for count, _ in found]
    assert moves == sorted(moves)
    apple, orange = kinematic.starts
    for number, slots in enumerate(((2, orange), (2, apple), (orange, apple)), start=1):
        assert found[moves.index(number)][1] == slots
    begin(kinematic, 0)
    stay(kinematic, 60)
    assert kinematic.moves == 0


def test_actions_are_clipped(physics):
    poses = []
    for action in ((9.0, 0.0, -3.0, 0, 0, 0, 1.0), (HIGH[0], 0.0, LOW[2], 0, 0, 0, MAX_OPENING)):
        begin(physics, 0)
        poses.append(stay(physics, 30, action)[0]["pose"])
    np.testing.assert_array_equal(*poses)


def test_a_nudge_moves_a_fruit_elsewhere_on_its_plate(physics, kinematic):
    for env in (physics, kinematic):
        env.nudge = 1.0
        try:
            begin(env, 2)
        finally:
            env.nudge = 0.4
        before = np.array(env.simulator.fruits)
        stay(env, 12, (0.42, 0.0, 0.38, 0, 0, 0, MAX_OPENING))
        assert env.nudges == 2
        stay(env, 18)
        moved = np.linalg.norm(np.subtract(env.simulator.fruits, before)[:, :2], axis=1)
        assert (moved > NUDGE_MIN - 0.01).all()
        assert (env.slot(0), env.slot(1)) == env.starts


def colours(image):
    """How many pixels are red, orange and blue."""
    r, g, b = np.moveaxis(image.astype(int), -1, 0)
    return (r > 2.5 * g) & (r > 90), (r > 1.3 * g) & (g > 2 * b) & (r > 120) & (r < 2.5 * g), (b > 1.4 * r) & (b > 50)


@pytest.mark.parametrize("kind", ["mujoco", "kinematic"])
def test_the_cameras_show_fruits_and_plates(kind, rendered):
    env = rendered if kind == "mujoco" else SwapEnv(px=64, simulator="kinematic")
    for start in ("AB", "BA"):
        observation, _ = env.reset(seed=1, options={"start": start})
        assert env.observation_space.contains(observation)
        sides = []
        for camera in CAMERAS:
            red, orange, blue = colours(observation[camera])
            assert red.sum() > 15
            assert orange.sum() > 15
            assert blue.sum() > 200
            columns = np.arange(64)
            sides.append((columns * red.sum(0)).sum() / red.sum() < (columns * orange.sum(0)).sum() / orange.sum())
        # The front camera faces the arm: its left is the arm's right, where B is, and the hand's camera looks along the arm.
        assert sides == ([False, True] if start == "AB" else [True, False])


@pytest.mark.parametrize("kind", ["mujoco", "kinematic"])
def test_the_hand_sees_the_fruit_below_it(kind, rendered):
    env = rendered if kind == "mujoco" else SwapEnv(px=64, simulator="kinematic")
    for fruit, height, least in ((0, HOVER, 30), (1, HOVER, 30), (0, 0.08, 80)):
        begin(env, 1)
        x, y, _ = env.simulator.fruits[fruit]
        stay(env, 25, (x, y, height, 0, 0, 0, MAX_OPENING))
        assert colours(env.simulator.render("hand"))[fruit].sum() > least


@pytest.mark.parametrize("kind", ["mujoco", "kinematic"])
def test_the_world_is_the_same_in_a_mirror(kind, rendered):
    """Mirrored places and goals lead to the mirrored pose and images, but for the light, which comes from one side."""
    env = rendered if kind == "mujoco" else SwapEnv(px=64, simulator="kinematic")
    begin(env)

    def shown(side):
        env.simulator.reset([(0.46, side * 0.16), (0.41, side * -0.13)])
        goal = np.array([0.47, 0.1, 0.2, -0.03, 0.02, 0.2, MAX_OPENING])
        for share in np.linspace(0, 1, 30):
            towards = np.array(HOME) + share * (goal - np.array(HOME))
            env.simulator.move((towards * np.where(side < 0, MIRROR, 1)).tolist())
        return np.array(env.simulator.hand), [env.simulator.render(camera).astype(int) for camera in CAMERAS]

    (here, images), (there, mirrored) = shown(1), shown(-1)
    np.testing.assert_allclose(there, here * MIRROR, atol=1e-4)
    for one, other in zip(images, mirrored, strict=True):
        assert np.abs(one - other[:, ::-1]).mean() < 4
        assert np.abs(one - other).mean() > 6


def test_gymnasium_makes_both():
    for name in ("Swap", "SwapKinematic"):
        env = gymnasium.make(f"diffusion_forcing.imitation.swap.env:diffusion_forcing/{name}-v0", px=16)
        assert env.unwrapped.px == 16
        env.close()
    env = SwapEnv(px=16, simulator="kinematic")
    check_env(env, skip_render_check=True)
    assert env.render() is None


def test_the_kinematic_simulator_is_fast(kinematic):
    plan = demonstrate(kinematic, 0, render=False).actions.reshape(CHUNKS, CHUNK, 7)
    best = np.inf
    for _ in range(5):
        begin(kinematic, 0)
        start = time.process_time()
        for actions in plan:
            kinematic.step_many(actions, render=False)
        best = min(best, time.process_time() - start)
    assert kinematic.success
    assert kinematic.steps / best > 20_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"px": 4}, "px .*got 4"),
        ({"nudge": 1.5}, "nudge .*1.5"),
        ({"slip": -0.1}, "slip .*-0.1"),
        ({"spread": 0.01}, "spread .*0.01"),
        ({"steps": 601}, "steps .*601"),
        ({"simulator": "clay"}, "simulator .*'clay'"),
        ({"render_mode": "human"}, "render mode 'human'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SwapEnv(**{"simulator": "kinematic", **options})


def test_bad_calls_are_refused(kinematic):
    begin(kinematic)
    for action in (np.zeros(6), np.zeros((3, 7)), 1.0):
        with pytest.raises(ValueError, match=r"an action is \(7,\)"):
            kinematic.step(action)
    for actions in (np.zeros((0, 7)), np.zeros((2, 6)), np.zeros(7), 1.0):
        with pytest.raises(ValueError, match=r"several are \(n, 7\)"):
            kinematic.step_many(actions)
    with pytest.raises(ValueError, match=r"should be finite; got.*nan"):
        kinematic.step(np.full(7, np.nan))
    with pytest.raises(ValueError, match="'start' and 'render'; got 'goal'"):
        kinematic.reset(options={"goal": 1})
    with pytest.raises(ValueError, match=r"'AB'.*got 'AC'"):
        kinematic.reset(options={"start": "AC"})
    with pytest.raises(RuntimeError, match="0 are left"):
        SwapEnv(px=16, simulator="kinematic").step(HOME)
