"""The swap robot: kinematics as published, a success that cannot be feigned, disturbances by seed, and an expert that needs its eyes."""

import itertools
import sys
import time

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from small import dforce, flat

from diffusion_forcing.imitation.swap import data as data
from diffusion_forcing.imitation.swap.env import NUDGE_MIN, STILL_STEPS, SwapEnv
from diffusion_forcing.imitation.swap.expert import GRASP, HOVER, NEAR, ROUGH, ROUGHEST, Expert, demonstrate
from diffusion_forcing.imitation.swap.scene import (
    CAMERAS,
    CHUNK,
    CHUNKS,
    DOWN,
    HIGH,
    HOME,
    INSIDE,
    LOW,
    MAX_OPENING,
    MIRROR,
    MOVES,
    REST,
    RIM,
    SLOT_HALF,
    SLOTS,
    centre,
    rotation_matrix,
    rotation_vector,
)

franka = pytest.importorskip("diffusion_forcing.imitation.swap.franka", reason="MuJoCo does not start here", exc_type=ImportError)
DH = [  # the maker's table, modified convention: a, d, alpha of joints 1 to 7 and of the flange
    (0, 0.333, 0), (0, 0, -np.pi / 2), (0, 0.316, np.pi / 2), (0.0825, 0, np.pi / 2), (-0.0825, 0.384, -np.pi / 2),
    (0, 0, np.pi / 2), (0.088, 0, np.pi / 2), (0, 0.107, 0),
]  # fmt: skip
LIMITS = np.array([[-2.8973, 2.8973], [-1.7628, 1.7628], [-2.8973, 2.8973], [-3.0718, -0.0698], [-2.8973, 2.8973], [-0.0175, 3.7525],
                   [-2.8973, 2.8973]])  # fmt: skip


@pytest.fixture(scope="module")
def arm():
    return franka.Franka(16)


@pytest.fixture(scope="module")
def real():
    """The simulated world; no pictures are taken of it."""
    env = SwapEnv(px=16)
    yield env
    env.close()


@pytest.fixture(scope="module")
def seen():
    """The simulated world with cameras."""
    env = SwapEnv(px=64, render_mode="rgb_array")
    try:
        env.simulator.render("front")
    except RuntimeError as error:
        pytest.skip(f"no renderer starts here: {error}")
    yield env
    env.close()


@pytest.fixture
def twin():
    return SwapEnv(px=16, simulator="kinematic")


def begin(env, seed=0, **options):
    return env.reset(seed=seed, options={"render": False, **options})


def rest_at(env, *places):
    """Lay apple and orange down at places (x, y, z)."""
    for fruit, place in enumerate(places):
        if env.simulator.__class__.__name__ == "Kinematic":
            env.simulator.fruits[fruit][:] = place
        else:
            at, moves = env.simulator._at[fruit], env.simulator._moves[fruit]
            env.simulator.data.qpos[at : at + 3] = place
            env.simulator.data.qvel[moves : moves + 6] = 0
    env._rest = [0, 0]


def stay(env, steps, action=HOME):
    return env.step_many(np.tile(np.array(action), (steps, 1)), render=False)


# ---------------------------------------------------------------- the arm


def test_the_hand_is_where_the_published_table_puts_it(arm):
    rng = np.random.default_rng(0)
    for angles in [np.array(franka.READY), *rng.uniform(*LIMITS.T, (12, 7))]:
        pose = np.eye(4)
        for (a, d, alpha), angle in zip(DH, [*angles, 0], strict=True):
            ca, sa, c, s = np.cos(alpha), np.sin(alpha), np.cos(angle), np.sin(angle)
            pose = pose @ np.array([[c, -s, 0, a], [s * ca, c * ca, -sa, -d * sa], [s * sa, c * sa, ca, d * ca], [0, 0, 0, 1]])
        turn = np.eye(4)
        turn[:3, :3] = rotation_matrix((0, 0, -np.pi / 4))  # from the flange to the hand
        turn[2, 3] = 0.1034
        pose = pose @ turn
        arm.data.qpos[:7] = angles
        franka.mujoco.mj_kinematics(arm.model, arm.data)
        np.testing.assert_allclose(arm.data.site_xpos[arm.tip], pose[:3, 3], atol=1e-9)
        np.testing.assert_allclose(arm.data.site_xmat[arm.tip].reshape(3, 3), pose[:3, :3], atol=1e-9)


def test_limits_of_angles_and_torques_are_the_makers(arm):
    np.testing.assert_allclose(arm.model.jnt_range[:7], LIMITS)
    torques = np.array([87, 87, 87, 87, 12, 12, 12])
    np.testing.assert_allclose(arm.model.actuator_ctrlrange[:7], np.stack([-torques, torques], 1))
    assert 15 < arm.model.body_mass.sum() < 25
    arm.reset([SLOTS["A"], SLOTS["B"]])
    for goal in (np.array([5.0, 5, 5]), np.array([-5.0, 0, 1])):
        torque = arm.torque(goal, DOWN)
        assert (np.abs(torque) <= torques).all()
        assert (np.abs(torque) == torques).any()


def test_a_wild_policy_breaks_nothing(real):
    begin(real)
    for action in np.random.default_rng(0).uniform(-3, 3, (150, 7)):
        real.step_many(action[None], render=False)
        assert np.isfinite(real.pose).all()
        angles = real.simulator.data.qpos[:7]
        assert (angles > LIMITS[:, 0] - 0.02).all()
        assert (angles < LIMITS[:, 1] + 0.02).all()
        assert (real.pose[:3] > np.array(LOW[:3]) - 0.05).all()
        assert (real.pose[:3] < np.array(HIGH[:3]) + 0.05).all()


@pytest.mark.parametrize(
    "goal", [HOME, (0.5, 0.2, 0.15, 0.05, -0.1, 0.4, 0.05), (0.36, -0.25, 0.3, 0, 0.2, -0.5, 0.08), (0.64, 0.1, 0.06, 0, 0, 0, 0)]
)
def test_the_hand_reaches_a_pose(real, goal):
    begin(real)
    stay(real, 40, goal)
    np.testing.assert_allclose(real.pose[:3], goal[:3], atol=0.002)
    np.testing.assert_allclose(real.pose[3:6], goal[3:6], atol=0.01)
    assert abs(real.pose[6] - goal[6]) < 0.003


def test_rotation_vectors_and_matrices_are_inverse():
    for vector in [*np.random.default_rng(0).uniform(-1.5, 1.5, (10, 3)), np.zeros(3), np.full(3, 1e-12)]:
        matrix = rotation_matrix(vector)
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(3), atol=1e-12)
        np.testing.assert_allclose(rotation_vector(matrix), vector, atol=1e-9)


# ---------------------------------------------------------------- episodes


@pytest.mark.parametrize("kind", ["mujoco", "kinematic"])
def test_an_episode_is_the_same_for_its_seed(kind, real):
    other = SwapEnv(px=16, simulator=kind)
    env = real if kind == "mujoco" else SwapEnv(px=16, simulator=kind)
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


def test_many_steps_are_as_many_single_ones(real):
    actions = np.linspace(HOME, (0.5, 0.2, 0.1, 0, 0, 0.3, 0.02), 15)
    begin(real, 1)
    many = real.step_many(actions, render=False)
    begin(real, 1)
    for action in actions:
        single = real.step_many(action[None], render=False)
    np.testing.assert_array_equal(many[0]["pose"], single[0]["pose"])
    assert many[1:4] == (0.0, False, False)
    assert many[4] == single[4]
    assert many[4]["time"] == 15


def test_starts_are_drawn_or_chosen(twin):
    starts, offsets = [], []
    for seed in range(60):
        begin(twin, seed)
        starts.append(twin.start)
        offsets += [np.subtract(fruit[:2], centre(slot)) for fruit, slot in zip(twin.simulator.fruits, twin.starts, strict=True)]
        chosen = {}
        for start in ("AB", "BA"):
            begin(twin, seed, start=start)
            assert twin.start == start
            assert (twin.slot(0), twin.slot(1)) == twin.starts == (("AB").index(start[0]), ("AB").index(start[1]))
            chosen[start] = [np.subtract(fruit[:2], centre(slot)) for fruit, slot in zip(twin.simulator.fruits, twin.starts, strict=True)]
        np.testing.assert_allclose(chosen["AB"], chosen["BA"], atol=1e-12)
    assert 15 < starts.count("AB") < 45
    assert 0.04 < np.abs(offsets).max() <= 0.045, "anywhere within the slot"
    assert np.std(offsets) > 0.022


def test_the_twin_begins_and_is_disturbed_like_the_simulator(real, twin):
    for seed in range(4):
        begin(real, seed)
        begin(twin, seed)
        assert real.start == twin.start
        np.testing.assert_allclose(real.simulator.fruits, twin.simulator.fruits, atol=0.001)
        np.testing.assert_allclose(real.pose, twin.pose, atol=0.002)
        assert real._nudged == twin._nudged
        assert real._slips == twin._slips
        assert real._choices == twin._choices


def test_success_is_at_rest_in_the_others_slot(real, twin):
    for env in (real, twin):
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


def test_the_rim_is_not_the_slot(real, twin):
    for env in (real, twin):
        begin(env, 0, start="AB")
        x, y = centre(1)
        for place in ((x + SLOT_HALF, y, REST + RIM), (x, y, REST + RIM), (x + INSIDE + 0.001, y, REST), (x, y, REST + 0.1)):
            env.simulator.fruits[0] = list(place)
            assert env.slot(0) is None
        env.simulator.fruits[0] = [x + 0.052, y - 0.052, REST]
        assert env.slot(0) == 1


def test_a_rolling_fruit_is_not_at_rest(real):
    begin(real, 0, start="AB")
    rest_at(real, (*centre(1), REST), (*centre(0), REST))
    stay(real, STILL_STEPS + 3)
    assert real.success
    real.simulator.push(0, (0.15, 0.0))
    stay(real, 1)
    assert not real.success


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


def test_the_reward_comes_at_the_end(twin):
    begin(twin, 0)
    expert = Expert(twin, 0)
    rewards, over = zip(*(twin.step_many(expert.act()[None], render=False)[1:4:2] for _ in range(twin.steps)), strict=True)
    assert rewards[-1] == 1
    assert sum(rewards) == 1
    assert over[-1]
    assert sum(over) == 1
    with pytest.raises(RuntimeError, match="600 steps, 0 are left; got 1 actions"):
        stay(twin, 1)


def test_actions_are_clipped(real):
    poses = []
    for action in ((9.0, 0.0, -3.0, 0, 0, 0, 1.0), (HIGH[0], 0.0, LOW[2], 0, 0, 0, MAX_OPENING)):
        begin(real, 0)
        poses.append(stay(real, 30, action)[0]["pose"])
    np.testing.assert_array_equal(*poses)


# ---------------------------------------------------------------- the expert, and disturbances


def slots_over_time(env, seed, start):
    """The slots of both fruits whenever the hand is home at a frame and the episode goes on, and the fruit that moved first."""
    begin(env, seed, start=start)
    expert = Expert(env, seed)
    found, first = [env.info()["slots"]], None
    for t in range(1, env.steps + 1):
        env.step_many(expert.act()[None], render=False)
        if first is None and env.simulator.held is not None and env.simulator.hand[2] > 0.1:
            first = env.simulator.held
        now = env.info()["slots"]
        if t % CHUNK == 0 and None not in now and now != found[-1] and np.linalg.norm(np.subtract(env.pose[:3], HOME[:3])) < 0.005:
            found.append(now)
    return found, first


def test_the_same_fruit_goes_first_so_that_no_picture_tells_the_time(twin):
    for seed in range(4):
        one, first = slots_over_time(twin, seed, "AB")
        other, first_too = slots_over_time(twin, seed, "BA")
        assert first == first_too == 0, "the apple"
        assert one == [(0, 1), (2, 1), (2, 0), (1, 0)]
        assert other == [(1, 0), (2, 0), (2, 1), (0, 1)]
        assert one[2] == other[1], "after two moves of one, after one of the other"
        assert one[3] == other[0], "the end of one, the beginning of the other"


@pytest.mark.parametrize("kind", ["mujoco", "kinematic"])
def test_moves_begin_and_end_at_home_on_a_frame(kind, real, twin):
    env = real if kind == "mujoco" else twin
    for seed in range(1 if kind == "mujoco" else 8):
        episode = demonstrate(env, seed, render=False)
        assert episode.actions.shape == (CHUNK * CHUNKS, 7)
        assert episode.poses.shape == (CHUNKS + 1, 7)
        assert episode.finished % CHUNK == 0
        home = (episode.actions == np.array(HOME, np.float32)).all(1)
        leaves = np.flatnonzero(home[:-1] & ~home[1:]) + 1
        leaves = [0, *leaves] if not home[0] else leaves
        assert len(leaves) == 3
        assert not np.mod(leaves, CHUNK).any()
        np.testing.assert_allclose(
            episode.poses[np.array([*leaves, episode.finished]) // CHUNK][:, :3], np.tile(HOME[:3], (4, 1)), atol=NEAR
        )
        assert home[episode.finished :].all(), "padded by resting at home"
        assert (episode.actions >= np.array(LOW, np.float32)).all()
        assert (episode.actions <= np.array(HIGH, np.float32)).all()


def test_an_expert_goes_by_what_it_knew_while_looks_deceive(twin):
    """Where fruits are moved meanwhile, it acts as if they had not been; and until it has seen anything it stays at home."""

    def acted(believed, moved=None):
        begin(twin, 3)
        expert, actions = Expert(twin, 3, observes=believed), []
        for step in range(75):
            if moved is not None and step >= 30:
                twin.simulator.fruits[0][:2] = moved
            actions.append(expert.act())
            twin.step_many(actions[-1][None], render=False)
        return np.stack(actions)

    plain = acted(lambda _: True)
    elsewhere = (centre(0)[0] + 0.04, centre(0)[1] - 0.04)
    doubting = lambda time: time < 30  # noqa: E731
    np.testing.assert_array_equal(acted(doubting), acted(doubting, elsewhere))
    assert (acted(lambda _: True, elsewhere) != plain).any()
    late = acted(lambda time: time >= 2 * CHUNK)
    assert (late[: 2 * CHUNK] == np.array(HOME, np.float32)).all()
    assert (late[-1] != np.array(HOME, np.float32)).any()


def test_the_expert_swaps_and_the_blind_and_the_dreamer_fail(twin):
    """Aiming at centres, or replaying what would have been right had nothing been disturbed, should not do."""
    calm = SwapEnv(px=16, simulator="kinematic", nudge=0, slip=0)
    swapped = blind = dreamt = 0
    lengths, disturbed = [], []
    for seed in range(24):
        episode = demonstrate(twin, seed, render=False)
        swapped += episode.success
        assert twin.moves == MOVES
        lengths.append(episode.finished)
        disturbed.append((episode.nudges > 0, episode.regrasps > 0))
        blind += demonstrate(twin, seed, open_loop=True, render=False).success
        plan = demonstrate(calm, seed, render=False)
        assert plan.success
        assert plan.nudges == plan.slips == 0
        begin(twin, seed)
        dreamt += twin.step_many(plan.actions, render=False)[4]["success"]
    assert swapped == 24
    assert blind <= 4
    assert dreamt <= 6
    assert min(lengths) >= 420
    assert max(lengths) <= 600
    assert len(set(lengths)) > 4, "no fixed timetable"
    nudged, regrasped = np.mean(disturbed, 0)
    assert 0.6 < nudged < 1
    assert 0.2 < regrasped < 0.8


def test_the_expert_asks_for_nothing_out_of_reach(twin):
    """Aiming roughly at the far edge of C would, were it not held back."""
    begin(twin, 0)
    expert = Expert(twin, 0)
    expert.act()
    expert._target[:3] = [0.7, -0.5, 0.0]
    expert._script = iter(())
    np.testing.assert_allclose(expert.act()[:3], [HIGH[0], LOW[1], LOW[2]])


@pytest.mark.parametrize("kind", ["mujoco", "kinematic"])
def test_the_expert_knows_nothing_before_one_who_looks_could(kind):
    """A fruit that slips out of the hand changes what it does a frame later, not sooner."""
    envs = [SwapEnv(px=16, simulator=kind, nudge=0, slip=slip) for slip in (0, 1)]
    actions, held = [], []
    for env in envs:
        begin(env, 3)
        expert = Expert(env, 3)
        actions.append([])
        held.append([])
        for _ in range(150):
            actions[-1].append(expert.act())
            env.step_many(actions[-1][-1][None], render=False)
            held[-1].append(env.simulator.held)
        env.close()
    slipped = next(t for t, one in enumerate(held[1]) if one is None and held[1][t - 1] is not None) + 1
    differs = int(np.argmax((np.array(actions[0]) != np.array(actions[1])).any(1)))
    assert slipped + CHUNK <= differs <= slipped + CHUNK + 12


def test_the_moves_done_are_counted_in_their_order(twin):
    begin(twin, 0)
    expert, found = Expert(twin, 0), []
    for _ in range(twin.steps):
        info = twin.step_many(expert.act()[None], render=False)[4]
        found.append((info["moves"], info["slots"]))
    moves = [count for count, _ in found]
    assert moves == sorted(moves)
    apple, orange = twin.starts
    for number, slots in enumerate(((2, orange), (2, apple), (orange, apple)), start=1):
        assert found[moves.index(number)][1] == slots
    begin(twin, 0)
    stay(twin, 60)
    assert twin.moves == 0


def test_the_expert_aims_roughly_first_and_exactly_on_the_way_down():
    """Or one who imitates it would learn to go straight down from wherever it is."""
    calm = SwapEnv(px=16, simulator="kinematic", nudge=0, slip=0)
    first, low = [], []
    for seed in range(12):
        begin(calm, seed)
        fruit = np.array(calm.simulator.fruits[0][:2])
        actions = demonstrate(calm, seed, render=False).actions
        closes = int(np.argmax(actions[:, 6] < 0.04))
        above = np.flatnonzero(actions[:closes, 2] >= HOVER - 1e-4)[-1]
        beside = int(np.argmax(actions[:closes, 2] < GRASP + 0.025))
        first.append(np.abs(actions[above, :2] - fruit))
        low.append(np.abs(actions[beside, :2] - fruit).max())
        assert np.abs(actions[closes, :2] - fruit).max() < 1e-3
    assert np.mean(first) > 0.5 * ROUGH
    assert np.max(first) <= ROUGHEST + 1e-4
    assert max(low) < 0.005, "and it is over the fruit before the fingers are beside it"


def test_a_nudge_moves_a_fruit_elsewhere_on_its_plate(real, twin):
    for env in (real, twin):
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


@pytest.mark.parametrize("kind", ["mujoco", "kinematic"])
def test_a_grasp_that_slips_is_tried_again(kind):
    env = SwapEnv(px=16, simulator=kind, nudge=0, slip=1)
    episode = demonstrate(env, 0, render=False)
    assert episode.success
    assert episode.slips == episode.regrasps == 2, "and no more, or there would be no end"
    heights = episode.actions[:200, 2]
    down = np.flatnonzero((heights[1:] <= GRASP + 0.001) & (heights[:-1] > GRASP + 0.001))
    assert len(down) >= 3
    env.close()


def test_places_are_spread_as_widely_as_starts(twin):
    """Or a fruit near its slot's edge would be known not to have been moved yet."""
    starts, ends = [], []
    for seed in range(30):
        begin(twin, seed)
        starts += [np.subtract(twin.simulator.fruits[i][:2], centre(twin.starts[i])) for i in range(2)]
        demonstrate(twin, seed, render=False)
        ends += [np.subtract(twin.simulator.fruits[i][:2], centre(twin.starts[1 - i])) for i in range(2)]
    assert np.std(ends, axis=0).min() > 0.022
    assert abs(np.std(ends) - np.std(starts)) < 0.005
    assert 0.04 < np.abs(ends).max() < INSIDE


def test_speeds_and_pauses_are_drawn(twin):
    takes = {int(np.argmax(demonstrate(twin, seed, render=False).actions[:, 6] < 0.04)) for seed in range(12)}
    assert len(takes) > 6, "when the fingers first close"


# ---------------------------------------------------------------- pictures


def colours(image):
    """How many pixels are red, orange and blue."""
    r, g, b = np.moveaxis(image.astype(int), -1, 0)
    return (r > 2.5 * g) & (r > 90), (r > 1.3 * g) & (g > 2 * b) & (r > 120) & (r < 2.5 * g), (b > 1.4 * r) & (b > 50)


@pytest.mark.parametrize("kind", ["mujoco", "kinematic"])
def test_the_cameras_show_fruits_and_plates(kind, seen):
    env = seen if kind == "mujoco" else SwapEnv(px=64, simulator="kinematic")
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
def test_the_hand_sees_the_fruit_below_it(kind, seen):
    env = seen if kind == "mujoco" else SwapEnv(px=64, simulator="kinematic")
    for fruit, height, least in ((0, HOVER, 30), (1, HOVER, 30), (0, 0.08, 80)):
        begin(env, 1)
        x, y, _ = env.simulator.fruits[fruit]
        stay(env, 25, (x, y, height, 0, 0, 0, MAX_OPENING))
        assert colours(env.simulator.render("hand"))[fruit].sum() > least


@pytest.mark.parametrize("kind", ["mujoco", "kinematic"])
def test_the_world_is_the_same_in_a_mirror(kind, seen):
    """Mirrored places and goals lead to the mirrored pose and pictures, but for the light, which comes from one side."""
    env = seen if kind == "mujoco" else SwapEnv(px=64, simulator="kinematic")
    begin(env)

    def shown(side):
        env.simulator.reset([(0.46, side * 0.16), (0.41, side * -0.13)])
        goal = np.array([0.47, 0.1, 0.2, -0.03, 0.02, 0.2, MAX_OPENING])
        for share in np.linspace(0, 1, 30):
            towards = np.array(HOME) + share * (goal - np.array(HOME))
            env.simulator.move((towards * np.where(side < 0, MIRROR, 1)).tolist())
        return np.array(env.simulator.hand), [env.simulator.render(camera).astype(int) for camera in CAMERAS]

    (here, pictures), (there, mirrored) = shown(1), shown(-1)
    np.testing.assert_allclose(there, here * MIRROR, atol=1e-4)
    for one, other in zip(pictures, mirrored, strict=True):
        assert np.abs(one - other[:, ::-1]).mean() < 4
        assert np.abs(one - other).mean() > 6


def test_pictures_are_the_same_for_a_seed_and_a_new_renderer(seen):
    first, _ = seen.reset(seed=4)
    seen.close()
    again, _ = seen.reset(seed=4)
    other = SwapEnv(px=64)
    elsewhere, _ = other.reset(seed=4)
    np.testing.assert_array_equal(seen.simulator.render("front"), first["front"])
    other.close()
    for camera in CAMERAS:
        np.testing.assert_array_equal(first[camera], again[camera])
        np.testing.assert_array_equal(first[camera], elsewhere[camera])
    picture = seen.render()
    assert picture.shape == (64, 128, 3)


def test_no_renderer_says_what_to_install(monkeypatch):
    def fails(name):
        raise ImportError(f"{name} is not here")

    monkeypatch.setattr(franka.importlib, "import_module", fails)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setenv("PYOPENGL_PLATFORM", "egl")
    with pytest.raises(RuntimeError, match=r"no renderer starts \(egl: .*osmesa: .*apt install"):
        franka._context(16)


def test_a_command_without_a_renderer_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path))
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    monkeypatch.setitem(sys.modules, "mujoco.glfw", None)
    assert dforce("data", "swap") == 2
    words = flat(capsys.readouterr().err)
    assert "no renderer starts (glfw: ModuleNotFoundError: " in words
    assert "Install one: apt install libegl1" in words
    assert "Traceback" not in words


# ---------------------------------------------------------------- interfaces


def test_gymnasium_makes_both():
    for name in ("Swap", "SwapKinematic"):
        env = gymnasium.make(f"diffusion_forcing.imitation.swap.env:diffusion_forcing/{name}-v0", px=16)
        assert env.unwrapped.px == 16
        env.close()
    env = SwapEnv(px=16, simulator="kinematic")
    check_env(env, skip_render_check=True)
    assert env.render() is None


def test_the_twin_is_fast(twin):
    plan = demonstrate(twin, 0, render=False).actions.reshape(CHUNKS, CHUNK, 7)
    best = np.inf
    for _ in range(5):
        begin(twin, 0)
        start = time.process_time()
        for actions in plan:
            twin.step_many(actions, render=False)
        best = min(best, time.process_time() - start)
    assert twin.success
    assert twin.steps / best > 20_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"px": 4}, "px should be 8 or more; got 4"),
        ({"nudge": 1.5}, "nudge is a probability.*1.5"),
        ({"slip": -0.1}, "slip is a probability.*-0.1"),
        ({"spread": 0.01}, "from 0.03 to 0.05 m.*0.01"),
        ({"steps": 601}, "multiple of 15.*601"),
        ({"simulator": "clay"}, "mujoco or kinematic; got 'clay'"),
        ({"render_mode": "human"}, "no render mode 'human'"),
    ],
)
def test_bad_options_name_the_rule(options, message):
    with pytest.raises(ValueError, match=message):
        SwapEnv(**{"simulator": "kinematic", **options})


def test_bad_calls_name_the_rule(twin):
    begin(twin)
    for action in (np.zeros(6), np.zeros((3, 7)), 1.0):
        with pytest.raises(ValueError, match=r"an action is \(7,\)"):
            twin.step(action)
    for actions in (np.zeros((0, 7)), np.zeros((2, 6)), np.zeros(7), 1.0):
        with pytest.raises(ValueError, match=r"several are \(n, 7\)"):
            twin.step_many(actions)
    with pytest.raises(ValueError, match=r"should be finite; got.*nan"):
        twin.step(np.full(7, np.nan))
    with pytest.raises(ValueError, match="'start' and 'render'; got 'goal'"):
        twin.reset(options={"goal": 1})
    with pytest.raises(ValueError, match=r"'AB'.*got 'AC'"):
        twin.reset(options={"start": "AC"})
    with pytest.raises(RuntimeError, match="0 are left"):
        SwapEnv(px=16, simulator="kinematic").step(HOME)


# ---------------------------------------------------------------- demonstrations


def test_demonstrations_are_made_once_and_the_same(tmp_path, monkeypatch):
    demonstrations = pytest.importorskip("diffusion_forcing.imitation.demonstrations")
    told = []
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path / "one"))
    file = data.prepare_swap(3, px=16, seed=1, progress=lambda *words: told.append(words), simulator="kinematic")
    assert [words[1:] for words in told] == [(1, 3), (2, 3), (3, 3)]
    assert data.prepare_swap(3, px=16, seed=1, progress=lambda *words: told.append(words), simulator="kinematic") == file
    assert len(told) == 3, "not made again"
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path / "two"))
    assert data.prepare_swap(3, px=16, seed=1, simulator="kinematic").read_bytes() == file.read_bytes()
    assert data.prepare_swap(3, px=16, seed=2, simulator="kinematic").read_bytes() != file.read_bytes()
    made = data.load_swap(file)
    assert isinstance(made, demonstrations.Demonstrations)
    assert (made.every, made.fps) == (5, 20)
    for i in range(3):
        assert made.actions[i].shape == (600, 7)
        assert made.states[i].shape == (121, 7)
        assert made.actions[i].dtype == made.states[i].dtype == np.float32
        for camera in CAMERAS:
            assert made.images[camera][i].shape == (121, 16, 16, 3)
            assert made.images[camera][i].dtype == np.uint8
    np.testing.assert_allclose(made.states[0][0], HOME, atol=0.002)


def test_a_simulated_demonstration_replays(tmp_path, monkeypatch, seen):
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path))
    made = data.load_swap(data.prepare_swap(1, px=64))
    observation, _ = seen.reset(seed=data.DEMONSTRATION_SEEDS)
    for j in range(8):
        for camera in CAMERAS:
            np.testing.assert_array_equal(made.images[camera][0][j], observation[camera])
        np.testing.assert_array_equal(made.states[0][j], observation["pose"])
        observation = seen.step_many(made.actions[0][j * data.FRAME_EVERY : (j + 1) * data.FRAME_EVERY])[0]


def test_bad_files_name_the_rule(tmp_path):
    with pytest.raises(FileNotFoundError, match="prepare_swap"):
        data.load_swap(tmp_path / "none.npz")
    (tmp_path / "bad.npz").write_bytes(b"no")
    with pytest.raises(ValueError, match="damaged or not a cache of ours"):
        data.load_swap(tmp_path / "bad.npz")
    with pytest.raises(ValueError, match="counts demonstrations from 1; got 0"):
        data.prepare_swap(0)
    with pytest.raises(ValueError, match="0 or more; got -1"):
        data.prepare_swap(1, seed=-1)


@pytest.mark.slow
def test_in_the_simulator_only_those_who_look_swap(real):
    calm = SwapEnv(px=16, nudge=0, slip=0)
    expert = blind = dreamt = 0
    for seed in range(100, 120):
        expert += demonstrate(real, seed, render=False).success
        blind += demonstrate(real, seed, open_loop=True, render=False).success
        plan = demonstrate(calm, seed, render=False)
        begin(real, seed)
        dreamt += real.step_many(plan.actions, render=False)[4]["success"]
    calm.close()
    assert expert == 20
    assert blind <= 4
    assert dreamt <= 4
