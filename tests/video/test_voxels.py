"""The landscape of blocks: the same clip for the same seed, a walk that obeys its own rules, rays that stop at the first block."""

import importlib
import math
import sys
import zlib

import numpy as np
import pytest

pytest.importorskip("numba", reason="numba comes with the extra `video`")

from diffusion_forcing.video.worlds import landscape
from diffusion_forcing.video.worlds.landscape import AIR, DIRT, EYE, HEIGHT, STONE, TRUNK, WATER, Land, film
from diffusion_forcing.video.worlds.voxels import Voxels

SMALL = Voxels(px=16, size=32)


def meadow(size=24, level=5):
    """Flat ground without anything on it."""
    blocks = np.zeros((size, size, HEIGHT), np.uint8)
    blocks[:, :, :level] = DIRT
    return landed(blocks)


def landed(blocks, trees=False):
    """A land of these blocks; what stands on the level of most columns is ground, or trees."""
    filled = blocks != AIR
    tops = HEIGHT - filled[:, :, ::-1].argmax(2)
    ground = np.full_like(tops, np.median(tops)) if trees else tops
    free = (tops == ground) & (np.take_along_axis(blocks, ground[..., None] - 1, 2)[..., 0] != WATER)
    return Land(blocks, ground, tops, free, free, np.zeros((16, 16), bool))


def block_at(land, x, y, z):
    size = len(land.blocks)
    return land.blocks[math.floor(x) % size, math.floor(y) % size, math.floor(z)]


def pose(x, y, z, heading):
    return np.array([x, y, z, heading], np.float32)


def walked(land, start, actions, world=SMALL):
    poses = [start]
    for action in actions:
        poses.append(world.move(land, poses[-1], action))
    return np.array(poses)


def test_a_clip_has_the_shapes_of_the_protocol():
    clip = SMALL.clip(0, 5)
    assert clip.frames.shape == (5, 16, 16, 3)
    assert clip.frames.dtype == np.uint8
    assert clip.actions.shape == (5, len(SMALL.actions))
    assert clip.poses.shape == (5, 4)
    assert clip.actions.dtype == clip.poses.dtype == np.float32
    assert not clip.actions[0].any()


def test_the_same_seed_gives_the_same_clip_and_another_one_another():
    for one, other in zip(SMALL.clip(3, 12), SMALL.clip(3, 12), strict=True):
        assert (one == other).all()
    assert (SMALL.clip(3, 1).frames != SMALL.clip(4, 1).frames).any()


def test_a_short_clip_is_the_beginning_of_a_long_one():
    for short, long in zip(SMALL.clip(5, 20), SMALL.clip(5, 40), strict=True):
        assert (short == long[:20]).all()


def test_the_pixels_do_not_depend_on_how_many_poses_are_filmed_at_once():
    land, poses = SMALL.enter(1).place, SMALL.clip(1, 4).poses
    assert (film(land, poses, 16) == np.concatenate([film(land, one[None], 16) for one in poses])).all()


def test_the_landscape_is_the_recorded_one():
    assert zlib.crc32(SMALL.enter(0).place.blocks.tobytes()) == 1420731831


def test_a_clip_is_the_recorded_one():
    # Means of quarters of a picture, in steps that none of them is near to: another compiler may round the last bit otherwise.
    means = SMALL.clip(16, 17).frames[::8].reshape(3, 2, 8, 2, 8, 3).mean((2, 4))
    assert np.abs(means / 16 - np.round(means / 16)).min() > 0.03
    assert zlib.crc32((means / 16).astype(np.uint8).tobytes()) == 3112889200


@pytest.mark.parametrize("world", [SMALL, Voxels(px=16, size=48, turn=30.0, speed=1.0)])
def test_an_agent_under_the_actions_of_a_clip_sees_its_frames(world):
    clip, agent = world.clip(7, 40), world.enter(7)
    assert (agent.look() == clip.frames[0]).all()
    for t in range(1, 40):
        assert (agent.step(clip.actions[t]) == clip.frames[t]).all()
        assert (agent.pose == clip.poses[t]).all()


def test_poses_follow_the_actions():
    clip = SMALL.clip(2, 200)
    actions, moved = clip.actions[1:].astype(float), np.diff(clip.poses.astype(float), axis=0)
    assert (actions >= [0, -1]).all()
    assert (actions <= 1).all()
    turned = (moved[:, 3] - np.radians(SMALL.turn) * actions[:, 1] + np.pi) % (2 * np.pi) - np.pi
    np.testing.assert_allclose(turned, 0, atol=1e-5)
    ahead = SMALL.speed * actions[:, :1] * np.stack([np.cos(clip.poses[1:, 3]), np.sin(clip.poses[1:, 3])], 1)
    straight = np.abs(moved[:, :2] - ahead).max(1) < 1e-4
    assert straight.mean() > 0.95, "the rest slides along something"
    assert (np.linalg.norm(moved[:, :2], axis=1) <= SMALL.speed * actions[:, 0] + 1e-4).all()


@pytest.mark.parametrize("seed", range(6))
def test_a_walk_gets_around_and_is_never_in_a_block_or_in_water(seed):
    world = Voxels(px=8, size=40)
    clip, land = world.clip(seed, 300), world.enter(seed).place
    for x, y, z, _ in clip.poses:
        assert block_at(land, x, y, z) == AIR
        ground = land.ground[math.floor(x) % 40, math.floor(y) % 40]
        assert block_at(land, x, y, ground - 1) != WATER
        assert abs(z - ground - EYE) <= 1 + 1e-4
    moved = np.abs(np.diff(clip.poses, axis=0))
    assert moved[:, :2].sum() > 25
    assert moved[:, 2].max() < 0.6, "steps are climbed smoothly"
    assert (moved[:, :2].max(1) == 0).mean() < 0.6


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_user_does_the_agent_is_never_in_a_block(seed):
    world, rng = Voxels(px=8, size=40, speed=0.9, turn=40.0), np.random.default_rng(seed)
    agent = world.enter(seed)
    actions = np.stack([rng.uniform(0, 2, 400), rng.normal(0, 0.5, 400)], 1)
    for x, y, z, _ in walked(agent.place, agent.pose, actions, world):
        assert block_at(agent.place, x, y, z) == AIR
        for dx, dy in ((0.29, 0.29), (0.29, -0.29), (-0.29, 0.29), (-0.29, -0.29)):
            assert agent.place.free[math.floor(x + dx) % 40, math.floor(y + dy) % 40], "the body keeps the eye off trees and water"


def test_nobody_walks_through_a_wall_but_slides_along_it():
    blocks = meadow().blocks
    blocks[10, :, :8] = STONE
    poses = walked(landed(blocks), pose(8, 5, 5 + EYE, math.pi / 4), [(1, 0)] * 30)
    assert 9.3 < poses[-1, 0] <= 9.7
    assert poses[-1, 1] > 5 + 30 * SMALL.speed * math.sin(math.pi / 4) - 1e-3
    head_on = walked(landed(blocks), pose(8, 5, 5 + EYE, 0), [(1, 0)] * 30)
    assert (head_on[-1] == head_on[-2]).all()


@pytest.mark.parametrize(("height", "reached"), [(1, True), (2, False)])
def test_a_step_of_one_block_is_climbed_and_one_of_two_is_not(height, reached):
    blocks = meadow().blocks
    blocks[10:20, :, 5 : 5 + height] = STONE
    land = landed(blocks)
    poses = walked(land, pose(8, 5.5, 5 + EYE, 0), [(1, 0)] * 20)
    assert (poses[-1, 0] > 12) == reached
    assert poses[-1, 2] == pytest.approx(5 + EYE + reached, abs=0.01 if reached else 0.5)
    back = walked(land, pose(12, 5.5, 5 + height + EYE, -math.pi), [(1, 0)] * 20)
    assert (back[-1, 0] < 9) == reached, "and down as up"


def test_water_stops_an_agent():
    blocks = meadow().blocks
    blocks[10:, :, 4] = WATER
    assert walked(landed(blocks), pose(8, 5.5, 5 + EYE, 0), [(1, 0)] * 20)[-1, 0] <= 9.7


@pytest.mark.parametrize("seed", range(3))
def test_every_ray_goes_through_air_and_ends_at_a_block(seed):
    land = SMALL.enter(seed).place
    for place in SMALL.clip(seed, 60).poses[::20].astype(float):
        for bearing in np.linspace(-0.7, 0.7, 5) + place[3]:
            dx, dy = math.cos(bearing), math.sin(bearing)
            slopes = np.linspace(0.8, -0.8, 24)
            hits, far = np.empty(24, np.int64), np.empty(24)
            landscape._scan(land.blocks, land.ground, land.tops, (*place[:3], dx, dy), slopes, hits, far)
            for slope, hit, end in zip(slopes, hits, far, strict=True):
                direction = np.array([dx, dy, slope])
                until = 43.0 if hit < 0 else end
                points = place[:3] + np.arange(0, until - 1e-6, 0.02)[:, None] * direction
                inside = (points[:, 2] >= 0) & (points[:, 2] < HEIGHT)
                i, j, k = np.floor(points[inside]).astype(int).T
                assert (land.blocks[i % 32, j % 32, k] == AIR).all()
                if hit >= 0:
                    behind = np.floor(place[:3] + (end + 1e-6) * direction).astype(int)
                    face = landscape._face(behind[0] % 32, behind[1] % 32, behind[2], 0, 0)
                    assert land.blocks[behind[0] % 32, behind[1] % 32, behind[2]] != AIR
                    assert face >> 3 == hit >> 3, "the block that is drawn is the one that is hit"


def test_what_is_seen_is_where_it_stands():
    blocks = meadow(48).blocks
    blocks[20, 27, 5:12] = TRUNK  # ahead and to the left, for one who looks along x
    land = landed(blocks, trees=True)
    bare = film(meadow(48), pose(10.5, 24.5, 5 + EYE, 0)[None], 32)[0].astype(int)
    frame = film(land, pose(10.5, 24.5, 5 + EYE, 0)[None], 32)[0].astype(int)
    changed = np.flatnonzero((np.abs(frame - bare).sum(-1) > 60).any(0))
    assert changed.mean() == pytest.approx(16 * (1 - 3 / 9.5 / math.tan(math.radians(37))), abs=1.5)
    assert bare[0, :, 2].min() > bare[0, :, 0].max(), "the sky is blue"
    assert bare[-1, :, 0].min() > bare[-1, :, 2].max(), "the ground is brown"
    left = film(land, pose(10.5, 24.5, 5 + EYE, 0.3)[None], 32)[0].astype(int)
    trunk = np.abs(left[:8] - bare[:8]).sum((0, 2)).argmax()
    assert trunk > changed.max(), "who turns to the left sees it move to the right"


def test_the_landscape_repeats():
    agent = SMALL.enter(2)
    for shift in ((32, 0), (0, -32), (-64, 96)):
        moved = agent.pose + pose(*shift, 0, 0)
        assert (film(agent.place, moved[None], 16)[0] == agent.look()).mean() > 0.98


def test_pictures_differ_within_themselves_and_over_time():
    for seed in range(5):
        frames = Voxels(px=32).clip(seed, 40).frames.astype(float)
        assert frames.std((1, 2)).max(1).min() > 8
        assert np.abs(frames[0] - frames[-1]).mean() > 5


def test_landscapes_have_water_trees_and_room_to_walk():
    lands = [Voxels(px=8).enter(seed).place for seed in range(10)]
    for land in lands:
        assert 0.05 < (np.take_along_axis(land.blocks, land.ground[..., None] - 1, 2) == WATER).mean() < 0.5
        assert land.roomy.mean() >= 0.2
        assert land.free[land.roomy].all()
        assert land.tops.max() < HEIGHT
    assert sum((land.blocks == TRUNK).any() for land in lands) >= 9


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"px": 4}, "at least 8 pixels a side, px is 4"),
        ({"size": 8}, "24 to 1024 blocks a side, size is 8"),
        ({"size": 5000}, "24 to 1024 blocks a side, size is 5000"),
        ({"turn": 0.0}, "above 0 and up to 90 degrees a frame, it is 0.0"),
        ({"turn": 120.0}, "up to 90 degrees"),
        ({"speed": -0.1}, "up to 1 block a frame, it is -0.1"),
        ({"speed": math.nan}, "up to 1 block a frame, it is nan"),
    ],
)
def test_options_that_make_no_world(options, rule):
    with pytest.raises(ValueError, match=rule):
        Voxels(**options)


def test_asking_for_what_is_not_there():
    with pytest.raises(ValueError, match="at least 1 frame, asked for 0"):
        SMALL.clip(0, 0)
    with pytest.raises(ValueError, match="whole number from 0, got -1"):
        SMALL.enter(-1)
    for action in ([1.0], [1.0, math.nan]):
        with pytest.raises(ValueError, match="two finite numbers"):
            SMALL.enter(0).step(np.array(action, np.float32))


def test_without_numba_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, landscape.__name__)
    with pytest.raises(ImportError, match=r"pip install 'diffusion_forcing\[video\]'"):
        importlib.import_module(landscape.__name__)
