"""The labyrinth: the same clip for the same seed, walks that walls stop, and frames that show what stands before the agent."""

import sys
import zlib
from dataclasses import replace

import numpy as np
import pytest

from diffusion_forcing.video.worlds import labyrinth, textures
from diffusion_forcing.video.worlds.labyrinth import RADIUS, Labyrinth, top_view

WORLD = Labyrinth(px=32, styles=3)


def reached(walls):
    """Blocks (n, n) that can be reached from the first cell, by flooding."""
    wet = np.zeros_like(walls)
    wet[1, 1] = True
    for _ in range(walls.size):
        wet[1:-1, 1:-1] |= wet[:-2, 1:-1] | wet[2:, 1:-1] | wet[1:-1, :-2] | wet[1:-1, 2:]
        wet &= ~walls
    return wet


@pytest.mark.parametrize("seed", [0, 7])
def test_a_clip_is_the_same_for_its_seed_and_begins_like_a_longer_one(seed):
    short, long, again = WORLD.clip(seed, 20), WORLD.clip(seed, 40), replace(WORLD).clip(seed, 40)
    for a, b, c in zip(short, long, again, strict=True):
        np.testing.assert_array_equal(b, c)
        np.testing.assert_array_equal(a, b[:20])
    assert long.frames.shape == (40, 32, 32, 3)
    assert long.frames.dtype == np.uint8
    assert long.actions.shape == (40, 2)
    assert long.poses.shape == (40, 3)
    assert long.actions.dtype == long.poses.dtype == np.float32
    assert not long.actions[0].any()


def test_other_seeds_are_other_clips():
    clips = [WORLD.clip(seed, 4).frames for seed in range(6)]
    assert len({clip.tobytes() for clip in clips}) == 6


def test_clips_do_not_change():
    """Change this number only together with a note that data made before differs."""
    clip = Labyrinth(size=3, px=16, styles=2).clip(5, 30)
    poses = np.round(clip.poses.astype(float) * 1024).astype("<i8")
    assert zlib.crc32(poses.tobytes() + clip.frames.tobytes()) == 2811033673


def test_a_batch_of_any_size_is_rendered_the_same():
    place, poses = WORLD.place(3), WORLD.clip(3, 37).poses
    alone = np.concatenate([WORLD.render(place, pose[None]) for pose in poses])
    np.testing.assert_array_equal(WORLD.render(place, poses), alone)


def test_a_clip_replayed_by_hand_shows_the_same():
    clip, visitor = WORLD.clip(11, 60), WORLD.enter(11)
    np.testing.assert_array_equal(visitor.look(), clip.frames[0])
    for t in range(1, 60):
        np.testing.assert_array_equal(visitor.step(clip.actions[t]), clip.frames[t])
        np.testing.assert_array_equal(visitor.pose, clip.poses[t])


@pytest.mark.parametrize("seed", range(4))
def test_poses_follow_actions(seed):
    clip = WORLD.clip(seed, 200)
    step = np.linalg.norm(np.diff(clip.poses[:, :2], axis=0), axis=1)
    assert step.max() <= WORLD.speed + 1e-5
    assert (np.abs(step - clip.actions[1:, 0] * WORLD.speed) < 1e-5).mean() > 0.97, "hardly ever does a wall stop the agent"
    turned = np.angle(np.exp(1j * np.diff(clip.poses[:, 2].astype(float))))
    np.testing.assert_allclose(turned, np.radians(WORLD.turn) * clip.actions[1:, 1], atol=1e-5)
    low, high = clip.actions.min(0), clip.actions.max(0)
    assert (low >= (0, -1)).all()
    assert (high <= 1).all()
    assert len(np.unique(clip.poses[:, :2].astype(int), axis=0)) > 8, "it gets around"


@pytest.mark.parametrize("world", [WORLD, Labyrinth(size=2, px=8, speed=0.5, turn=90), Labyrinth(size=6, px=8, speed=0.1, turn=3, loops=1)])
def test_no_walk_enters_a_wall(world):
    rng = np.random.default_rng(0)
    for seed in range(4):
        place = world.place(seed)
        poses = list(world.clip(seed, 150).poses)
        for action in rng.uniform((0, -1), (3, 1), (150, 2)):  # one who runs into every wall
            poses.append(world.move(place, poses[-1], action))
        x, y = np.array(poses).T[:2]
        for i in (-1, 1):
            for j in (-1, 1):
                shrunk = RADIUS - 1e-6
                assert not place.walls[(y + i * shrunk).astype(int), (x + j * shrunk).astype(int)].any()


def test_a_wall_stops_and_is_slid_along():
    place = WORLD.place(0)
    walls = np.ones((9, 9), bool)
    walls[1, 1:8] = False
    place = place._replace(walls=walls)
    pose = np.array([1.5, 1.5, np.radians(-30)], np.float32)
    for _ in range(12):
        pose = WORLD.move(place, pose, np.array([1, 0]))
    assert pose[1] == 1 + RADIUS
    np.testing.assert_allclose(pose[0], 1.5 + 12 * WORLD.speed * np.cos(np.radians(30)), atol=1e-4)
    for _ in range(40):
        pose = WORLD.move(place, pose, np.array([1, 0]))
    assert pose[0] == 8 - RADIUS


@pytest.mark.parametrize("size", [2, 4, 7])
def test_all_cells_are_connected_and_the_outside_is_closed(size):
    for seed in range(5):
        tree, some, hall = (Labyrinth(size=size, loops=loops).place(seed).walls for loops in (0, 0.3, 1))
        for walls in (tree, some, hall):
            wet = reached(walls)
            np.testing.assert_array_equal(wet, ~walls)
            assert wet[1::2, 1::2].all()
            assert walls[[0, -1]].all()
            assert walls[:, [0, -1]].all()
        ways = [(~walls).sum() - size**2 for walls in (tree, some, hall)]
        assert ways[0] == size**2 - 1
        assert ways[2] == 2 * size * (size - 1)
        assert ways[1] == ways[0] + round(0.3 * (ways[2] - ways[0]))


def test_walks_look_around_and_come_back():
    turns, again = [], []
    for seed in range(12):
        poses = WORLD.clip(seed, 64).poses
        turns.append(np.ptp(np.unwrap(poses[:, 2])))
        cells = poses[:, :2].astype(int) // 2
        cells = cells[np.append(True, (np.diff(cells, axis=0) != 0).any(1))]
        again.append(len(cells) - len(np.unique(cells, axis=0)))
    assert np.mean(np.array(turns) > np.pi) > 0.5
    assert np.mean(np.array(again) > 0) > 0.3


def test_frames_show_sky_walls_and_floor_where_they_are():
    """A wall at depth 1 / 2 fills the frame; down a long corridor the middle is dark and small, with the sky above and the floor below."""
    walls = np.ones((9, 9), bool)
    walls[1, 1:8] = False
    place = WORLD.place(0)._replace(walls=walls, paint=np.zeros((9, 9), int))
    near, far = WORLD.render(place, np.array([[7.5, 1.5, 0], [1.5, 1.5, 0]])).astype(float)
    sky = textures.art_of("procedural", place.style).sky.reshape(-1, 3)
    wall = textures.art_of("procedural", place.style).walls[0].reshape(-1, 3).mean(0)
    top = far[:4, 12:20].mean((0, 1))
    assert np.linalg.norm(top - sky.mean(0)) < np.linalg.norm(top - wall), "the sky is above the far end"
    share = near[:4].mean((0, 1)) / near[-4:].mean((0, 1))
    assert np.abs(near - far).mean() > 20
    assert near.std() > 5
    assert far.std() > 20
    assert share.max() < 3, "one wall from top to bottom"


def test_walls_stand_at_their_depth():
    """Half the height of a wall straight ahead is 1 / (2 depth VIEW) of half the frame: black walls show it."""
    world = Labyrinth(px=64)
    walls = np.ones((9, 9), bool)
    walls[1, 1:8] = False
    place = world.place(0)._replace(walls=walls, paint=np.zeros((9, 9), int))
    white, black = (textures.art_of("procedural", 0)._replace(walls=np.full((9, 64, 64, 3), value, np.uint8)) for value in (255, 0))
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        for art in (white, black):
            patch.setattr(labyrinth, "art_of", lambda *_, art=art: art)
            labyrinth._table.cache_clear()
            seen.append(world.render(place, np.array([[8 - depth, 1.5, 0] for depth in (0.75, 1, 2, 4)])).astype(float))
    labyrinth._table.cache_clear()
    is_wall = (np.abs(seen[0] - seen[1]).sum(-1) > 100)[:, :, 31:33].all(-1)
    for rows, depth in zip(is_wall, (0.75, 1, 2, 4), strict=True):
        assert abs(rows.sum() - 64 * 0.5 / depth / labyrinth.VIEW) <= 1.5
        np.testing.assert_array_equal(rows, rows[::-1])


def test_turning_right_moves_the_picture_to_the_left():
    place = WORLD.place(0)
    first, second = WORLD.render(place, place.start + np.array([[0, 0, 0], [0, 0, np.radians(4)]])).astype(float)
    middle = slice(8, 24)
    left, right = (np.abs(second[:, middle] - first[:, 8 + shift : 24 + shift]).mean() for shift in (1, -1))
    assert left < right


def test_neighbouring_frames_overlap():
    for seed in range(3):
        frames = WORLD.clip(seed, 60).frames.astype(float)
        near = np.abs(frames[1:] - frames[:-1]).mean()
        apart = np.abs(frames[30:] - frames[:30]).mean()
        assert near < 0.75 * apart
        assert (frames.std((1, 2)).max(-1) > 5).all(), "no frame is empty"


def test_styles_differ_and_each_is_drawn():
    drawn = {WORLD.place(seed).style for seed in range(20)}
    assert drawn == {0, 1, 2}
    arts = [textures.art_of("procedural", style) for style in range(3)]
    assert len({art.walls.tobytes() for art in arts}) == 3
    for art in arts:
        assert len({wall.tobytes() for wall in art.walls}) == len(art.walls)
    assert len(np.unique(WORLD.place(0).paint)) > 2, "places are told apart by their paint"


def test_labmaze_art_is_used_or_asked_for(monkeypatch):
    textures.art_of.cache_clear()
    world = Labyrinth(px=16, art="labmaze", styles=2)
    monkeypatch.setattr(textures, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install labmaze"):
        world.clip(0, 1)
    monkeypatch.undo()
    if textures.find_spec("labmaze") is None:
        pytest.skip("labmaze is not installed")
    clip = world.clip(0, 12)
    assert clip.frames.std() > 10
    assert "labmaze" not in sys.modules, "its textures are read, its code is not run"
    np.testing.assert_array_equal(clip.poses, world.clip(0, 12).poses)


def test_a_view_from_above():
    place, poses = WORLD.place(1), WORLD.clip(1, 30).poses
    image = top_view(place, poses, 8)
    assert image.shape == (72, 72, 3)
    assert (image[:8] == 60).all()
    assert image[int(poses[-1, 1] * 8), int(poses[-1, 0] * 8), 0] == 255


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 1}, "size should be 2"),
        ({"px": 33}, "px should be even.*33"),
        ({"px": 4}, "px should be even.*4"),
        ({"styles": 0}, "styles should be 1"),
        ({"styles": 16, "art": "labmaze"}, "at most 15"),
        ({"art": "oil"}, "procedural or labmaze.*oil"),
        ({"loops": 1.5}, "from 0 to 1.*1.5"),
        ({"turn": 0}, "turn should be above 0"),
        ({"speed": 0.7}, "at most 0.5.*0.7"),
    ],
)
def test_bad_options_name_the_rule(options, message):
    with pytest.raises(ValueError, match=message):
        Labyrinth(**options)


def test_bad_calls_name_the_rule():
    with pytest.raises(ValueError, match="1 frame or more; got 0"):
        WORLD.clip(0, 0)
    with pytest.raises(ValueError, match="0 or more; got -1"):
        WORLD.clip(-1, 2)
    for action in ([1.0], [0.0, np.nan]):
        with pytest.raises(ValueError, match="two finite numbers"):
            WORLD.enter(0).step(np.array(action))
    assert WORLD.actions == ("forward", "turn")
