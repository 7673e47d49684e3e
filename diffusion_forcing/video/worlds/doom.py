"""Doom: walks through mazes in a real engine, ViZDoom, with the textures of Freedoom (the extra `doom`).

Mazes, walks and poses are those of a labyrinth: x counts columns, y rows, heading grows to the right, a block is the unit of length. The
engine only draws. A maze is written as a map in text (UDMF), and for each frame the camera is put where the pose is, to 1 / 512 of a
block and 1 / 65536 of a turn: so that a frame depends on its map and pose alone, not on earlier frames.
"""

from __future__ import annotations

import math
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from multiprocessing.util import Finalize
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .labyrinth import Labyrinth, Place, _maze, _neighbours
from .textures import Array, below
from .world import Clip, Frame, Visitor

UNITS = 512
"""Of the engine's length in a block. The camera is put at whole ones, and the engine counts up to 32767 of them."""
WALL, EYE = 384, 168
"""Heights of walls and of the camera, in these units."""
TURNS = 65536
"""Number of headings of the engine."""
SCALE = UNITS // 128  # textures are drawn for blocks of 128 units
HIGH = WALL // 128
RESOLUTIONS = (120, 192, 240, 300, 384, 480, 600, 768)
"""Heights of screens, 4:3, that the engine has."""
ANGLE = 100
"""Degrees across a screen, of which a frame shows the middle three quarters."""
LIGHT = 224
"""Of 255, everywhere; far things are darker."""
SPARE = 2**13
"""Bytes of blanks behind a map."""


class Style(NamedTuple):
    """Names of textures, none of them animated. Regions of a maze have one of `plain` each, blocks that stand out any."""

    plain: tuple[str, ...]
    odd: tuple[str, ...]
    floors: tuple[str, ...]
    ceilings: tuple[str, ...]


OPEN = ("F_SKY1",)  # no ceiling but the sky
STYLES = (
    Style(("STWALL", "AROCK3", "A-DBRI1", "PANEL4"), ("PANBLUE", "PANRED", "MARBFACE"), ("RROCK20", "RROCK11", "AQF048"), OPEN),
    Style(("STARTAN2", "STARG1", "STARGR1", "SHAWN2"), ("SILVER2", "COMPUTE1", "STARG2"), ("FLOOR0_1", "FLOOR0_6"), ("CEIL3_5", "FLAT19")),
    Style(("MARBLE1", "GRAYVINE", "A-CONCTE"), ("MARBFACE", "MARBFAC2", "SP_ROCK1"), ("RROCK20", "FLAT5_4"), OPEN),
    Style(("PANCASE1", "BRICK12", "SPACEW4"), ("PANBOOK", "PANBLUE", "PANRED"), ("FLOOR0_2", "FLAT8"), ("CEIL3_2", "CEIL1_1")),
    Style(("TANROCK2", "TANROCK8", "STONE6"), ("ROCK5", "MURAL1", "BROVINE"), ("RROCK09", "AQF008"), OPEN),
    Style(("CEMENT1", "CEMENT9", "GRAYTAN0"), ("CEMENT8", "PIPES", "GRAYDANG"), ("FLAT18", "FLOOR4_6"), ("FLAT20",)),
    Style(("SKIN2", "SKSNAKE1", "A-BROCK2"), ("SKSNAKE2", "SK_LEFT", "SKULWALL"), ("SLIME16", "RROCK12"), OPEN),
    Style(("ESPITAN1", "ESPIGR1", "ESPIG1", "ESPIBR1"), ("ESPITAN2", "ESPIG3", "LITE96"), ("AQF052", "FLAT5_5"), ("FLOOR0_7",)),
)
# the player: its eyes at a height for our walls, free to turn from the first tic
_EYES = f"actor Eyes : DoomPlayer {{ Player.ViewHeight {EYE} ReactionTime 0 }}\n".encode()
_PLAYERS = b"clearplayerclasses\naddplayerclass Eyes\n"
_INFO = b'map MAP01 "a maze" { sky1 = "P-SKY1" }\n'


@dataclass(frozen=True)
class Doom:
    """A random maze rendered by Doom's engine, and an agent that walks between its cells, alone."""

    size: int = 4
    """Cells a side."""
    px: int = 64
    """Height and width of a frame."""
    styles: int = 1
    """Number of texture sets; a clip shows one of them."""
    loops: float = 0.25
    """Share of the inner walls of a perfect maze that are removed: 0 leaves one path between any two cells, 1 a hall of pillars."""
    turn: float = 12.0
    """Degrees a frame at most."""
    speed: float = 0.2
    """Blocks a frame at most; neighbouring cells are 2 blocks apart."""

    def __post_init__(self) -> None:
        if not 2 <= self.size <= 31:
            raise ValueError(f"size should be 2 to 31 cells, the engine counts no further; got {self.size}")
        if not 8 <= self.px <= RESOLUTIONS[-1] // 3:
            raise ValueError(f"px should be 8 to {RESOLUTIONS[-1] // 3}, the engine's largest screen shows no more; got {self.px}")
        if not 1 <= self.styles <= len(STYLES):
            raise ValueError(f"styles should be 1 to {len(STYLES)}, so many sets of textures there are; got {self.styles}")
        _ = self._labyrinth  # checks the rest

    @property
    def actions(self) -> tuple[str, ...]:
        """forward: 0 to 1, in units of speed. turn: -1 to 1, in units of `turn`, positive to the right, before going forward."""
        return ("forward", "turn")

    @property
    def _labyrinth(self) -> Labyrinth:
        """Whose rules of movement hold here."""
        return Labyrinth(size=self.size, loops=self.loops, turn=self.turn, speed=self.speed)

    def clip(self, seed: int, frames: int) -> Clip:
        """A walk along shortest paths between random cells, with turns and ways back. A longer clip begins like a shorter one."""
        if frames < 1:
            raise ValueError(f"a clip has 1 frame or more; got {frames}")
        place = self.place(seed)
        walk = islice(self._labyrinth._walk(place, np.random.default_rng((2, seed))), frames)
        actions, poses = (np.stack(values) for values in zip(*walk, strict=True))
        return Clip(self.render(place, poses), actions, poses)

    def enter(self, seed: int) -> Visitor:
        place = self.place(seed)
        return Visitor(self, place, place.start)

    def place(self, seed: int) -> Place:
        """The maze of a seed and the pose in which its clip begins. The paint of an open block is the number of its region."""
        if seed < 0:
            raise ValueError(f"a seed is 0 or more; got {seed}")
        rng = np.random.default_rng((1, seed))
        style = below(rng, self.styles)
        walls = _maze(rng, self.size, self.loops)
        plain, odd = len(STYLES[style].plain), len(STYLES[style].odd)
        centres = rng.random((plain, 1, 1, 2)) * len(walls)
        blocks = np.moveaxis(np.indices(walls.shape), 0, -1)
        paint = ((blocks - centres) ** 2).sum(-1).argmin(0)
        stands_out = walls & (rng.random(walls.shape) < 0.18)
        paint = np.where(stands_out, (rng.random(walls.shape) * (plain + odd)).astype(np.int64), paint)
        cell = (below(rng, self.size), below(rng, self.size))
        ahead = _neighbours(walls, cell)
        row, column = ahead[below(rng, len(ahead))]
        heading = math.atan2(row - cell[0], column - cell[1])
        start = np.array([2 * cell[1] + 1.5, 2 * cell[0] + 1.5, heading], np.float32)
        return Place(walls, paint, np.zeros(2), style, start)

    def move(self, place: Place, pose: Array, action: Array) -> NDArray[np.float32]:
        """The pose (3,) after an action (2,): turn, then go forward, sliding along walls."""
        return self._labyrinth.move(place, pose, action)

    def render(self, place: Place, poses: Array) -> Frame:
        """Frames (t, px, px, 3) seen from poses (t, 3): the middle of the engine's screen, each pixel a mean of 3 x 3 or more."""
        height = next(height for height in RESOLUTIONS if height >= 3 * self.px)
        screens = _engine(height, os.getpid()).film(textmap(place), cameras(poses))
        frames = np.empty((len(poses), self.px, self.px, 3), np.uint8)
        for frame, screen in zip(frames, screens, strict=True):
            _shrink(screen, frame)
        return frames


def cameras(poses: Array) -> NDArray[np.int64]:
    """Poses (t, 3) in the engine's units: x and y (upwards), `UNITS` a block, and an angle to the left, of `TURNS`."""
    scale = np.array([UNITS, -UNITS, -TURNS / (2 * math.pi)])
    cameras = np.rint(poses.astype(float) * scale).astype(np.int64)
    cameras[:, 2] %= TURNS
    return cameras


def _shrink(screen: Frame, frame: Frame) -> None:
    """Write means from the middle square of a screen (h, w, 3) to a frame (px, px, 3): of many x many pixels, in whole numbers."""
    height, width = screen.shape[:2]
    many = height // len(frame)
    middle = (2 * np.arange(len(frame)) + 1) * height  # in halves of a frame's pixel, as everything here
    first = (middle + (1 - many) * len(frame)) // (2 * len(frame))
    square = screen[:, (width - height) // 2 :][:, :height].astype(np.uint16)  # room for 15 x 15 bytes, the most there can be
    rows = sum((square[first + i] for i in range(1, many)), square[first])
    total = sum((rows[:, first + i] for i in range(1, many)), rows[:, first])
    frame[:] = (total + many**2 // 2) // many**2


# ---------------------------------------------------------------- maps


def textmap(place: Place) -> bytes:
    """A maze as a map in text, without a player. Each region is a sector; a wall is a line with the open block on its right."""
    style = STYLES[place.style]
    pictures = style.plain + style.odd
    corners: dict[tuple[int, int], int] = {}
    lines, sides = [], []

    def side(region: int, picture: str = "-") -> int:
        sides.append(f'sidedef{{sector={region};texturemiddle="{picture}";scalex_mid={1 / SCALE};scaley_mid={1 / HIGH:.6f};}}')
        return len(sides) - 1

    for row, column in np.argwhere(~place.walls).tolist():
        region = int(place.paint[row, column])
        upper_left, upper_right = (column, row), (column + 1, row)
        lower_left, lower_right = (column, row + 1), (column + 1, row + 1)
        for i, j, start, end in (
            (-1, 0, upper_left, upper_right), (0, 1, upper_right, lower_right),
            (1, 0, lower_right, lower_left), (0, -1, lower_left, upper_left),
        ):  # fmt: skip
            other = row + i, column + j
            paint = int(place.paint[other])
            ends = f"v1={corners.setdefault(start, len(corners))};v2={corners.setdefault(end, len(corners))};"
            if place.walls[other]:
                lines.append(f"linedef{{{ends}sidefront={side(region, pictures[paint])};blocking=true;}}")
            elif paint != region and i + j > 0:  # a border has two sides, and is drawn from one of them
                lines.append(f"linedef{{{ends}sidefront={side(region)};sideback={side(paint)};twosided=true;}}")
    scales = "".join(f"{axis}scale{of}={1 / SCALE};" for axis in "xy" for of in ("floor", "ceiling"))
    sectors = [
        f'sector{{heightfloor=0;heightceiling={WALL};texturefloor="{style.floors[i % len(style.floors)]}";'
        f'textureceiling="{style.ceilings[i % len(style.ceilings)]}";lightlevel={LIGHT};{scales}}}'
        for i in range(len(style.plain))
    ]
    vertices = [f"vertex{{x={x * UNITS}.0;y={-y * UNITS}.0;}}" for x, y in corners]
    return "\n".join(['namespace="zdoom";', *vertices, *lines, *sides, *sectors, ""]).encode()


def wad(lumps: Sequence[tuple[str, bytes]]) -> bytes:
    """A WAD file of lumps by name: a header, their contents, and a directory of where they lie."""
    at, directory = 12, b""
    for name, held in lumps:
        directory += struct.pack("<ii8s", at, len(held), name.encode())
        at += len(held)
    return struct.pack("<4sii", b"PWAD", len(lumps), at) + b"".join(held for _, held in lumps) + directory


# ---------------------------------------------------------------- the engine


class Engine:
    """ViZDoom without a window, sound, weapon or text, on a screen of a height. Its files lie in a folder that is removed when it ends."""

    def __init__(self, height: int) -> None:
        try:
            import vizdoom
        except ImportError as error:
            raise ImportError("the world of Doom is drawn by vizdoom: pip install 'diffusion_forcing[doom]'") from error
        self._folder = mkdtemp(prefix="diffusion_forcing_doom_")
        self._file = Path(self._folder) / "maze.wad"
        self._map = b""
        self._room = 0
        self._loads = 0
        self._angle = 0
        game: Any = vizdoom.DoomGame()
        game.set_doom_game_path(str(Path(vizdoom.__file__).with_name("freedoom2.wad")))
        game.set_doom_scenario_path(str(self._file))
        game.set_doom_config_path(str(self._file.with_suffix(".ini")))
        game.set_doom_map("MAP01")
        game.set_screen_resolution(getattr(vizdoom.ScreenResolution, f"RES_{height * 4 // 3}X{height}"))
        game.set_screen_format(vizdoom.ScreenFormat.RGB24)
        for what in ("hud", "weapon", "crosshair", "decals", "particles", "effects_sprites", "messages", "corpses"):
            getattr(game, f"set_render_{what}")(False)
        game.set_window_visible(False)
        game.set_sound_enabled(False)
        game.set_mode(vizdoom.Mode.PLAYER)
        game.set_episode_timeout(0)
        game.set_seed(0)
        game.add_game_args(f"+r_visibility {8 * SCALE}")  # how far light reaches
        game.set_available_buttons([vizdoom.Button.TURN_LEFT_RIGHT_DELTA])
        known = vizdoom.GameVariable
        where = (known.CAMERA_POSITION_X, known.CAMERA_POSITION_Y, known.CAMERA_POSITION_Z, known.CAMERA_FOV, known.CAMERA_ANGLE)
        game.set_available_game_variables(list(where))
        self._game = game
        # not atexit, which does not run when a pool's process ends: its engine would go on alone
        self._ending = Finalize(None, _end, (game, self._folder), exitpriority=10)

    def film(self, level: bytes, views: NDArray[np.int64]) -> Iterator[Frame]:
        """Screens (h, w, 3) of a map as `textmap` writes it, one for each of `cameras` (t, 3)."""
        for x, y, angle in views.tolist():
            if level != self._map or not self._game.is_running():  # another map may have been filmed in between
                self._load(level, x, y)
            self._game.send_game_command(f"warp {x} {y}")
            right = (self._angle - angle + TURNS // 2) % TURNS - TURNS // 2
            # a warped player looks at the floor for one tic, and each tic makes the turn: so the second one turns, and is shown
            self._pass(1)
            self._game.make_action([(right + 0.5) * 360 / TURNS])  # an angle is rounded down
            self._angle = angle
            state = self._game.get_state()
            values = state.game_variables
            expected = (x, y, EYE, ANGLE, angle)
            actual = (*values[:4], round(values[4] * TURNS / 360) % TURNS)
            if actual != expected:
                raise RuntimeError(f"the camera (x, y, height, view, angle) should be {expected}, the engine has it at {actual}")
            yield state.screen_buffer

    def close(self) -> None:
        """End the engine and remove its files."""
        self._ending()

    def _load(self, level: bytes, x: int, y: int) -> None:
        """Go to a map, beginning near x, y.

        The engine keeps its file open and reads a map from it whenever an episode begins. So the map is changed within the file, which
        takes a thousandth of a start. Behind it are blanks, in which its reader's buffer ends, so that nothing of the last map is in
        there. Each map begins at another point than the last, which shows that it was read.
        """
        self._loads += 1
        self._map, self._angle = b"", 0
        x, y = x - x % 64 + self._loads % 64, y - y % 64 + self._loads // 64 % 64
        flags = "".join(f"{name}=true;" for name in ("skill1", "skill2", "skill3", "skill4", "skill5", "single", "coop", "dm"))
        text = level + f"thing{{x={x}.0;y={y}.0;angle=0;type=1;{flags}}}\n".encode()
        if len(text) + SPARE <= self._room and self._game.is_running():
            self._write(text)
            self._game.new_episode()
            if self._begins_at(x, y):
                self._settle(level)
                return
        self._game.close()
        self._room = 2 * len(text) + SPARE
        self._write(text)
        with _inside(self._folder):  # where the engine makes folders of its own
            self._game.init()
        if not self._begins_at(x, y):
            raise RuntimeError("the engine did not load the map it was given; pip install -U vizdoom may help")
        self._settle(level)

    def _settle(self, level: bytes) -> None:
        """Widen the field of view, which takes the engine a few tics."""
        self._game.send_game_command(f"fov {ANGLE}")
        self._pass(10)
        self._map = level

    def _pass(self, tics: int) -> None:
        """Let so many tics pass without rendering."""
        self._game.set_action([0.0])
        self._game.advance_action(tics, False)

    def _write(self, text: bytes) -> None:
        lumps = [
            ("DECORATE", _EYES), ("KEYCONF", _PLAYERS), ("MAPINFO", _INFO),
            ("MAP01", b""), ("TEXTMAP", text.ljust(self._room)), ("ENDMAP", b""),
        ]  # fmt: skip
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(wad(lumps))

    def _begins_at(self, x: int, y: int) -> bool:
        return tuple(self._game.get_state().game_variables[:2]) == (x, y)


def _end(game: Any, folder: str) -> None:
    game.close()  # which writes to its folder once more
    shutil.rmtree(folder, ignore_errors=True)


@cache
def _engine(height: int, process: int) -> Engine:
    """One for each screen, and for each process: a forked one must not use its parent's."""
    return Engine(height)


@contextmanager
def _inside(folder: str) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
