"""Mazes of Doom: maps that are what the maze is, the same clip for the same seed, and a camera that is where the agent is."""

import hashlib
import re
import struct
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from small import command

from diffusion_forcing.video.worlds import doom
from diffusion_forcing.video.worlds.doom import EYE, RESOLUTIONS, STYLES, TURNS, UNITS, Doom, Engine, cameras, textmap, wad
from diffusion_forcing.video.worlds.labyrinth import RADIUS

WORLD = Doom(px=32, styles=3)
drawn = pytest.mark.skipif(find_spec("vizdoom") is None, reason="vizdoom comes with the extra `doom`")


def numbers(kind, text):
    """Of each block of a kind in a map: its numbers by name."""
    blocks = re.findall(rf"^{kind}\{{(.*)\}}$", text, re.MULTILINE)
    return [{name: float(value) for name, value in re.findall(r"(\w+)=(-?[\d.]+);", block)} for block in blocks]


def lumps(data):
    """What a file of the engine holds, (name, bytes) each."""
    kind, many, at = struct.unpack_from("<4sii", data)
    assert kind in (b"PWAD", b"IWAD")
    found = [struct.unpack_from("<ii8s", data, at + 16 * i) for i in range(many)]
    return [(name.rstrip(b"\0").decode(), data[first : first + size]) for first, size, name in found]


def test_a_wad_holds_its_lumps():
    held = [("MAP01", b""), ("TEXTMAP", b"abc"), ("ENDMAP", b""), ("EIGHT_CH", b"12345")]
    assert lumps(wad(held)) == held


@pytest.mark.parametrize("seed", range(3))
def test_a_map_has_a_line_for_each_wall_that_can_be_seen(seed):
    place = WORLD.place(seed)
    text = textmap(place).decode()
    corners, lines, sides, sectors = (numbers(kind, text) for kind in ("vertex", "linedef", "sidedef", "sector"))
    assert text.startswith('namespace="zdoom";')
    assert len({(corner["x"], corner["y"]) for corner in corners}) == len(corners)
    assert len(sectors) == len(STYLES[place.style].plain)
    walls = borders = 0
    for line in lines:
        (x, y), (to_x, to_y) = ((corners[int(line[end])]["x"] / UNITS, -corners[int(line[end])]["y"] / UNITS) for end in ("v1", "v2"))
        assert abs(to_x - x) + abs(to_y - y) == 1
        right = (int((y + to_y + to_x - x) / 2), int((x + to_x + y - to_y) / 2))  # row, column
        left = (int((y + to_y + x - to_x) / 2), int((x + to_x + to_y - y) / 2))
        assert not place.walls[right]
        assert sides[int(line["sidefront"])]["sector"] == place.paint[right]
        assert place.walls[left] == ("sideback" not in line)
        if place.walls[left]:
            walls += 1
        else:
            borders += 1
            assert sides[int(line["sideback"])]["sector"] == place.paint[left] != place.paint[right]
    is_open = ~place.walls
    across, down = is_open[:, 1:] != is_open[:, :-1], is_open[1:] != is_open[:-1]
    assert walls == across.sum() + down.sum()
    across, down = (is_open[:, 1:] & is_open[:, :-1]), (is_open[1:] & is_open[:-1])
    differ = (place.paint[:, 1:] != place.paint[:, :-1]), (place.paint[1:] != place.paint[:-1])
    assert borders == (across & differ[0]).sum() + (down & differ[1]).sum()
    assert len(sides) == walls + 2 * borders


def test_mazes_are_drawn_by_the_seed():
    assert len({textmap(WORLD.place(seed)) for seed in range(6)}) == 6
    assert textmap(WORLD.place(2)) == textmap(replace(WORLD).place(2))
    assert {WORLD.place(seed).style for seed in range(20)} == {0, 1, 2}
    place = Doom(styles=8).place(0)
    assert (place.paint[~place.walls] < len(STYLES[place.style].plain)).all()
    assert place.paint.max() < len(STYLES[place.style].plain + STYLES[place.style].odd)


def test_cameras_look_where_poses_do():
    found = cameras(np.array([[1.5, 2.0, 0.0], [1.0, 1.0, np.pi / 2], [3.25, 1.0, -np.pi / 2], [1.0, 1.0, -np.pi]], np.float32))
    np.testing.assert_array_equal(found[:, :2], UNITS * np.array([[1.5, -2], [1, -1], [3.25, -1], [1, -1]]))
    np.testing.assert_array_equal(found[:, 2], [0, 3 * TURNS // 4, TURNS // 4, TURNS // 2])


@pytest.mark.parametrize("px", [8, 33, 64, 100, 256])
def test_frames_are_means_of_the_middle(px):
    height = next(height for height in RESOLUTIONS if height >= 3 * px)
    screen = np.zeros((height, height * 4 // 3, 3), np.uint8)
    screen[:, : height // 6], screen[:, -(height // 6) :] = 255, 255
    frame = np.ones((px, px, 3), np.uint8)
    doom._shrink(screen, frame)
    assert not frame.any(), "what is beside the square is not seen"
    screen[:] = 255
    doom._shrink(screen, frame)
    assert (frame == 255).all()
    screen[:] = np.linspace(0, 255, height).astype(np.uint8)[:, None, None]
    doom._shrink(screen, frame)
    np.testing.assert_allclose(frame[:, 0, 0], (np.arange(px) + 0.5) / px * 255, atol=3)


@pytest.mark.parametrize("world", [WORLD, Doom(size=2, px=8, speed=0.5, turn=90), Doom(size=6, px=8, speed=0.1, turn=3, loops=1)])
def test_no_walk_enters_a_wall(world):
    rng = np.random.default_rng(0)
    for seed in range(4):
        place = world.place(seed)
        poses = [place.start]
        for action in rng.uniform((0, -1), (3, 1), (300, 2)):  # one who runs into every wall
            poses.append(world.move(place, poses[-1], action))
        x, y = np.array(poses).T[:2]
        for i in (-1, 1):
            for j in (-1, 1):
                shrunk = RADIUS - 1e-6
                assert not place.walls[(y + i * shrunk).astype(int), (x + j * shrunk).astype(int)].any()


def test_without_vizdoom_it_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "vizdoom", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'diffusion_forcing[doom]'")):
        Engine(120)


def test_options_need_no_engine():
    code = "import sys, diffusion_forcing.video.recipes as video; video.doom(); sys.exit('vizdoom' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 1}, "size should be 2 to 31.*1"),
        ({"size": 32}, "size should be 2 to 31.*32"),
        ({"px": 4}, "px should be 8 to 256.*4"),
        ({"px": 257}, "px should be 8 to 256.*257"),
        ({"styles": 0}, "styles should be 1 to 8.*0"),
        ({"styles": 9}, "styles should be 1 to 8.*9"),
        ({"loops": 1.5}, "from 0 to 1.*1.5"),
        ({"turn": 0}, "turn should be above 0"),
        ({"speed": 0.7}, "at most 0.5.*0.7"),
    ],
)
def test_bad_options_name_the_rule(options, message):
    with pytest.raises(ValueError, match=message):
        Doom(**options)


def test_bad_calls_name_the_rule():
    with pytest.raises(ValueError, match="1 frame or more; got 0"):
        WORLD.clip(0, 0)
    with pytest.raises(ValueError, match="0 or more; got -1"):
        WORLD.clip(-1, 2)
    for action in ([1.0], [0.0, np.nan]):
        with pytest.raises(ValueError, match="two finite numbers"):
            WORLD.enter(0).step(np.array(action))
    assert WORLD.actions == ("forward", "turn")


# ---------------------------------------------------------------- what the engine draws


@drawn
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


@drawn
def test_another_process_makes_the_same_clips_and_leaves_nothing_behind(tmp_path):
    """Nor does it say anything. It comes to the clip from elsewhere: what was filmed before does not matter."""
    scratch, here = tmp_path / "scratch", tmp_path / "here"
    scratch.mkdir()
    here.mkdir()
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from hashlib import sha256\n"
        "from diffusion_forcing.video.worlds.doom import Doom\n"
        "world = Doom(px=32, styles=3)\n"
        "world.clip(3, 5), Doom(px=64, size=6).clip(1, 5)\n"
        "print(sha256(b''.join(part.tobytes() for part in world.clip(7, 40))).hexdigest())"
    )
    root = str(Path(doom.__file__).parents[2])
    options = {**command(), "args": [sys.executable, "-c", code, root]}
    options["env"] |= {"TMPDIR": str(scratch), "HOME": str(here)}
    ended = subprocess.run(**options, cwd=here, capture_output=True, check=True)
    clip = WORLD.clip(7, 40)
    assert ended.stdout.strip() == hashlib.sha256(b"".join(part.tobytes() for part in clip)).hexdigest()
    assert ended.stderr == ""
    assert list(scratch.iterdir()) == list(here.iterdir()) == []


@drawn
def test_processes_of_a_pool_make_the_same_clips_and_end_their_engines(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        frames = pool.submit(WORLD.clip, 2, 10).result().frames
        assert list(tmp_path.iterdir()), "where an engine runs"
    assert list(tmp_path.iterdir()) == []
    np.testing.assert_array_equal(frames, WORLD.clip(2, 10).frames)


@drawn
def test_nothing_is_printed_and_the_folder_stays(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = Engine(120)
    list(engine.film(textmap(WORLD.place(0)), cameras(WORLD.place(0).start[None])))
    assert Path.cwd() == tmp_path
    engine.close()
    assert list(tmp_path.iterdir()) == []
    assert tuple(capfd.readouterr()) == ("", "")


@drawn
def test_other_seeds_are_other_clips():
    clips = [WORLD.clip(seed, 4).frames for seed in range(6)]
    assert len({clip.tobytes() for clip in clips}) == 6


@drawn
@pytest.mark.parametrize("style", range(len(STYLES)))
def test_a_frame_depends_on_its_pose_alone(style):
    """In whatever order poses are filmed, and however late: nothing moves, in any style."""
    place = Doom(styles=len(STYLES)).place(3)._replace(style=style)
    place = place._replace(paint=np.where(place.walls, np.indices(place.walls.shape).sum(0) % 6, place.paint % len(STYLES[style].plain)))
    poses = WORLD.clip(3, 40).poses
    order = np.random.default_rng(0).permutation(len(poses))
    frames = WORLD.render(place, poses)
    np.testing.assert_array_equal(WORLD.render(place, poses[order]), frames[order])
    np.testing.assert_array_equal(WORLD.render(place, poses[7:8])[0], frames[7])
    assert frames.std() > 10


@drawn
def test_a_clip_replayed_by_hand_shows_the_same():
    """Also when two are walked in turn."""
    clips, visitors = [WORLD.clip(seed, 25) for seed in (11, 12)], [WORLD.enter(seed) for seed in (11, 12)]
    for clip, visitor in zip(clips, visitors, strict=True):
        np.testing.assert_array_equal(visitor.look(), clip.frames[0])
    for t in range(1, 25):
        for clip, visitor in zip(clips, visitors, strict=True):
            np.testing.assert_array_equal(visitor.step(clip.actions[t]), clip.frames[t])
            np.testing.assert_array_equal(visitor.pose, clip.poses[t])


@drawn
@pytest.mark.parametrize("seed", range(2))
def test_poses_follow_actions(seed):
    clip = WORLD.clip(seed, 200)
    step = np.linalg.norm(np.diff(clip.poses[:, :2], axis=0), axis=1)
    assert step.max() <= WORLD.speed + 1e-5
    assert (np.abs(step - clip.actions[1:, 0] * WORLD.speed) < 1e-5).mean() > 0.97, "hardly ever does a wall stop the agent"
    turned = np.angle(np.exp(1j * np.diff(clip.poses[:, 2].astype(float))))
    np.testing.assert_allclose(turned, np.radians(WORLD.turn) * clip.actions[1:, 1], atol=1e-5)
    assert (clip.actions.min(0) >= (0, -1)).all()
    assert (clip.actions.max(0) <= 1).all()


@drawn
def test_walks_get_around_and_see_more_than_walls():
    """On the mean of seeds: a single walk may turn back and forth for long."""
    world, blocks, near = Doom(px=8), [], []
    for seed in range(16):
        walls, poses = world.place(seed).walls, world.clip(seed, 200).poses.astype(float)
        blocks.append(len(np.unique(poses[:, :2].astype(int), axis=0)))
        ahead = poses[:, :2] + 0.7 * np.stack([np.cos(poses[:, 2]), np.sin(poses[:, 2])], 1)
        near.append(walls[ahead[:, 1].astype(int), ahead[:, 0].astype(int)].mean())
    assert np.mean(blocks) > 9
    assert np.mean(near) < 0.3


@drawn
def test_a_wall_looks_larger_from_nearby_and_the_sky_is_above():
    """Down a corridor, towards a red wall among brown ones."""
    walls = np.ones((9, 9), bool)
    walls[1, 1:8] = False
    paint = np.where(walls, STYLES[6].plain.index("A-BROCK2"), 0)
    paint[1, 8] = STYLES[6].plain.index("SKIN2")
    place = WORLD.place(0)._replace(walls=walls, paint=paint, style=6)
    frames = WORLD.render(place, np.array([[1.5, 1.5, 0], [4.5, 1.5, 0], [6.5, 1.5, 0], [6.5, 1.5, np.pi / 2]])).astype(float)
    red = (frames[..., 0] > 1.8 * frames[..., 1]).sum((1, 2))
    assert red[0] < red[1] < red[2]
    assert red[3] < red[2] / 4
    sky = frames[0, :4, 12:20]
    assert np.ptp(sky, axis=-1).max() < 40, "a grey sky"
    assert sky.mean() > 1.3 * frames[0, -6:].mean()


@drawn
def test_turning_right_moves_the_picture_to_the_left():
    place = WORLD.place(0)
    first, second = WORLD.render(place, place.start + np.array([[0, 0, 0], [0, 0, np.radians(4)]])).astype(float)
    middle = slice(8, 24)
    left, right = (np.abs(second[:, middle] - first[:, 8 + shift : 24 + shift]).mean() for shift in (1, -1))
    assert left < right


@drawn
def test_neighbouring_frames_overlap():
    for seed in range(3):
        frames = WORLD.clip(seed, 60).frames.astype(float)
        assert np.abs(frames[1:] - frames[:-1]).mean() < 0.8 * np.abs(frames[30:] - frames[:30]).mean()
        assert (frames.std((1, 2)).max(-1) > 5).all(), "no frame is empty"


@drawn
def test_maps_take_turns_in_one_engine_and_larger_ones_start_it_anew():
    places = [Doom(size=size).place(size) for size in (3, 4, 3, 12, 3)]
    engine = Engine(120)
    try:
        for place in places * 2:
            views = cameras(np.stack([place.start, place.start + np.array([0.1, 0.1, 3.0])]))
            screens = [screen.copy() for screen in engine.film(textmap(place), views)]
            assert screens[0].shape == (120, 160, 3)
            assert tuple(engine._game.get_state().game_variables[:3]) == (*views[1, :2], EYE)
        rooms = engine._room
        for seed in range(70):  # beginnings of maps do not repeat while it matters
            place = Doom(size=3).place(seed)
            next(engine.film(textmap(place), cameras(place.start[None])))
        assert engine._room == rooms
    finally:
        engine.close()
    engine.close()


@drawn
def test_every_texture_is_in_freedoom():
    import vizdoom

    held = lumps(Path(vizdoom.__file__).with_name("freedoom2.wad").read_bytes())
    names = [name for name, _ in held]
    flats = set(names[names.index("F_START") : names.index("F_END")])
    table = dict(held)["TEXTURE1"]
    (many,) = struct.unpack_from("<i", table)
    pictures = {table[at : at + 8].rstrip(b"\0").decode() for at in struct.unpack_from(f"<{many}i", table, 4)}
    for style in STYLES:
        assert set(style.plain + style.odd) <= pictures
        assert set(style.floors + style.ceilings) <= flats
    assert doom._INFO.decode().split('"')[3] in pictures


@drawn
def test_large_frames_show_the_same_view():
    small, large = (replace(WORLD, px=px).clip(5, 6).frames.astype(float) for px in (32, 96))
    assert np.abs(large.reshape(6, 32, 3, 32, 3, 3).mean((2, 4)) - small).mean() < 8
