"""The scripted expert: it succeeds, an open loop does not, and it reacts no sooner than who observes it could."""

import numpy as np
import pytest
from swaps import begin

from diffusion_forcing.imitation.swap.env import SwapEnv
from diffusion_forcing.imitation.swap.expert import GRASP, HOVER, NEAR, ROUGH, ROUGHEST, Expert, demonstrate
from diffusion_forcing.imitation.swap.scene import CHUNK, CHUNKS, HIGH, HOME, INSIDE, LOW, MOVES, centre


def slots_over_time(env, seed, start):
    """The slots of both fruits whenever the hand is home at a frame and the episode goes on, and the fruit that moved first."""
    begin(env, seed, start=start)
    expert = Expert(env, seed)
    slots, first = [env.info()["slots"]], None
    for t in range(1, env.steps + 1):
        env.step_many(expert.act()[None], render=False)
        if first is None and env.simulator.held is not None and env.simulator.hand[2] > 0.1:
            first = env.simulator.held
        now = env.info()["slots"]
        if t % CHUNK == 0 and None not in now and now != slots[-1] and np.linalg.norm(np.subtract(env.pose[:3], HOME[:3])) < 0.005:
            slots.append(now)
    return slots, first


def test_the_apple_goes_first_so_that_no_image_tells_the_time(kinematic):
    for seed in range(4):
        one, first = slots_over_time(kinematic, seed, "AB")
        other, first_too = slots_over_time(kinematic, seed, "BA")
        assert first == first_too == 0, "the apple"
        assert one == [(0, 1), (2, 1), (2, 0), (1, 0)]
        assert other == [(1, 0), (2, 0), (2, 1), (0, 1)]
        assert one[2] == other[1], "after two moves of one, after one of the other"
        assert one[3] == other[0], "the end of one, the beginning of the other"


@pytest.mark.parametrize("kind", ["mujoco", "kinematic"])
def test_moves_begin_and_end_at_home_on_a_frame(kind, physics, kinematic):
    env = physics if kind == "mujoco" else kinematic
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


def test_an_expert_that_does_not_observe_goes_by_what_it_knew(kinematic):
    """Where fruits are moved meanwhile, it acts as if they had not been; and until it observes for the first time it stays at home."""

    def acted(observes, moved=None):
        begin(kinematic, 3)
        expert, actions = Expert(kinematic, 3, observes=observes), []
        for step in range(75):
            if moved is not None and step >= 30:
                kinematic.simulator.fruits[0][:2] = moved
            actions.append(expert.act())
            kinematic.step_many(actions[-1][None], render=False)
        return np.stack(actions)

    plain = acted(lambda _: True)
    elsewhere = (centre(0)[0] + 0.04, centre(0)[1] - 0.04)
    early = lambda time: time < 30  # noqa: E731
    np.testing.assert_array_equal(acted(early), acted(early, elsewhere))
    assert (acted(lambda _: True, elsewhere) != plain).any()
    late = acted(lambda time: time >= 2 * CHUNK)
    assert (late[: 2 * CHUNK] == np.array(HOME, np.float32)).all()
    assert (late[-1] != np.array(HOME, np.float32)).any()


def test_the_expert_swaps_and_open_loop_and_replay_fail(kinematic):
    """Aiming at centres, or replaying an undisturbed episode, is not enough."""
    calm = SwapEnv(px=16, simulator="kinematic", nudge=0, slip=0)
    swapped = open_loop = replayed = 0
    lengths, disturbed = [], []
    for seed in range(24):
        episode = demonstrate(kinematic, seed, render=False)
        swapped += episode.success
        assert kinematic.moves == MOVES
        lengths.append(episode.finished)
        disturbed.append((episode.nudges > 0, episode.regrasps > 0))
        open_loop += demonstrate(kinematic, seed, open_loop=True, render=False).success
        plan = demonstrate(calm, seed, render=False)
        assert plan.success
        assert plan.nudges == plan.slips == 0
        begin(kinematic, seed)
        replayed += kinematic.step_many(plan.actions, render=False)[4]["success"]
    assert swapped == 24
    assert open_loop <= 4
    assert replayed <= 6
    assert min(lengths) >= 420
    assert max(lengths) <= 600
    assert len(set(lengths)) > 4, "no fixed timetable"
    nudged, regrasped = np.mean(disturbed, 0)
    assert 0.6 < nudged < 1
    assert 0.2 < regrasped < 0.8


def test_targets_are_clipped_to_what_is_reachable(kinematic):
    """Aiming roughly at the far edge of C would go further."""
    begin(kinematic, 0)
    expert = Expert(kinematic, 0)
    expert.act()
    expert._target[:3] = [0.7, -0.5, 0.0]
    expert._script = iter(())
    np.testing.assert_allclose(expert.act()[:3], [HIGH[0], LOW[1], LOW[2]])


@pytest.mark.parametrize("kind", ["mujoco", "kinematic"])
def test_the_expert_reacts_no_sooner_than_an_observer_could(kind):
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


def test_the_expert_aims_roughly_first_and_exactly_on_the_way_down():
    """Else an imitator would learn to descend from wherever it is."""
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


@pytest.mark.parametrize("kind", ["mujoco", "kinematic"])
def test_a_grasp_that_slips_is_repeated(kind):
    env = SwapEnv(px=16, simulator=kind, nudge=0, slip=1)
    episode = demonstrate(env, 0, render=False)
    assert episode.success
    assert episode.slips == episode.regrasps == 2, "and no more, or there would be no end"
    heights = episode.actions[:200, 2]
    down = np.flatnonzero((heights[1:] <= GRASP + 0.001) & (heights[:-1] > GRASP + 0.001))
    assert len(down) >= 3
    env.close()


def test_places_are_spread_as_widely_as_starts(kinematic):
    """Else a fruit near its slot's edge would show that it was not moved yet."""
    starts, ends = [], []
    for seed in range(30):
        begin(kinematic, seed)
        starts += [np.subtract(kinematic.simulator.fruits[i][:2], centre(kinematic.starts[i])) for i in range(2)]
        demonstrate(kinematic, seed, render=False)
        ends += [np.subtract(kinematic.simulator.fruits[i][:2], centre(kinematic.starts[1 - i])) for i in range(2)]
    assert np.std(ends, axis=0).min() > 0.022
    assert abs(np.std(ends) - np.std(starts)) < 0.005
    assert 0.04 < np.abs(ends).max() < INSIDE


def test_speeds_and_pauses_are_drawn(kinematic):
    takes = {int(np.argmax(demonstrate(kinematic, seed, render=False).actions[:, 6] < 0.04)) for seed in range(12)}
    assert len(takes) > 6, "when the fingers first close"


@pytest.mark.slow
def test_with_physics_only_closed_loop_swaps(physics):
    calm = SwapEnv(px=16, nudge=0, slip=0)
    expert = open_loop = replayed = 0
    for seed in range(100, 120):
        expert += demonstrate(physics, seed, render=False).success
        open_loop += demonstrate(physics, seed, open_loop=True, render=False).success
        plan = demonstrate(calm, seed, render=False)
        begin(physics, seed)
        replayed += physics.step_many(plan.actions, render=False)[4]["success"]
    calm.close()
    assert expert == 20
    assert open_loop <= 4
    assert replayed <= 4
