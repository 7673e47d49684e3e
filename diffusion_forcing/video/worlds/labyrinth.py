"""Labyrinth: a walk through a maze with textured walls, floor and sky, in the first person. DMLab-like, NumPy only.

A block is the unit of length: of 2 * size + 1 blocks a side, those with odd row and column are cells, the others walls or openings.
A pose is (x, y, heading): x counts columns, y rows, both from the upper left corner; heading 0 looks along x and grows to the right.

All colours a pixel can have lie in one table, shaded and smoothed for each depth beforehand. A frame is then one look-up for each of
(2 px)^2 rays, and the mean of each 2 x 2. Only additions, products, divisions and the sine and cosine of a heading lie between a seed and
its frames, so that they are the same in a batch of any size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .textures import CARPET, SKY, TEXELS, VIEW, Array, Cell, Colours, art_of, below
from .world import Clip, Frame, Visitor

RADIUS = 0.25
"""Half the side of the body, a square along the axes. A power of two, so that standing against a wall is exact."""
LEVELS = 24
"""Number of depths in the table of colours."""
_PIXELS = 2**16  # rendered at once: their arrays stay in a processor's cache
_STEPS = ((0, 1), (1, 0), (0, -1), (-1, 0))
_STILL = np.zeros(2, np.float32)


class Place(NamedTuple):
    """The maze of a seed. walls, paint: (n, n), where walls stand and the number of their texture. carpet: (2,), offset of the floor."""

    walls: NDArray[np.bool_]
    paint: NDArray[np.int64]
    carpet: Array
    style: int
    start: NDArray[np.float32]


@dataclass(frozen=True)
class Labyrinth:
    """A random textured maze, and an agent that walks between its cells."""

    size: int = 4
    """Cells a side."""
    px: int = 64
    """Height and width of a frame."""
    styles: int = 1
    """Number of texture sets; a clip shows one of them."""
    art: Literal["procedural", "labmaze"] = "procedural"
    """Textures of our own, or those of the package labmaze (pip install labmaze --no-deps)."""
    contrast: float = 1.0
    """Of the textures of walls and floor: 1 full, 0 plain colours. Less is easier to learn."""
    loops: float = 0.25
    """Share of the inner walls of a perfect maze that are removed: 0 leaves one path between any two cells, 1 a hall of pillars."""
    turn: float = 15.0
    """Degrees a frame at most."""
    speed: float = 0.25
    """Blocks a frame at most; neighbouring cells are 2 blocks apart."""

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ValueError(f"size should be 2 cells or more; got {self.size}")
        if self.px < 8 or self.px % 2:
            raise ValueError(f"px should be even and 8 or more, the horizon lies between two rows; got {self.px}")
        if self.art not in ("procedural", "labmaze"):
            raise ValueError(f"art should be procedural or labmaze; got {self.art!r}")
        if self.styles < 1 or (self.art == "labmaze" and self.styles > 15):
            raise ValueError(f"styles should be 1 or more, and at most 15 for labmaze's textures; got {self.styles} for {self.art}")
        if not 0 <= self.contrast <= 1:
            raise ValueError(f"contrast goes from 0, plain colours, to 1; got {self.contrast}")
        if not 0 <= self.loops <= 1:
            raise ValueError(f"loops is a share of walls, from 0 to 1; got {self.loops}")
        if not 0 < self.turn <= 90:
            raise ValueError(f"turn should be above 0 and at most 90 degrees a frame; got {self.turn}")
        if not 0 < self.speed <= 0.5:
            raise ValueError(f"speed should be above 0 and at most 0.5 blocks a frame, or walls could be jumped; got {self.speed}")

    @property
    def actions(self) -> tuple[str, ...]:
        """forward: 0 to 1, in units of speed. turn: -1 to 1, in units of `turn`, positive to the right, before going forward."""
        return ("forward", "turn")

    def clip(self, seed: int, frames: int) -> Clip:
        """A walk along shortest paths between random cells, with turns and ways back. A longer clip begins like a shorter one."""
        if frames < 1:
            raise ValueError(f"a clip has 1 frame or more; got {frames}")
        place = self.place(seed)
        walk = islice(self._walk(place, np.random.default_rng((2, seed))), frames)
        actions, poses = (np.stack(values) for values in zip(*walk, strict=True))
        return Clip(self.render(place, poses), actions, poses)

    def enter(self, seed: int) -> Visitor:
        place = self.place(seed)
        return Visitor(self, place, place.start)

    def place(self, seed: int) -> Place:
        """The maze of a seed and the pose in which its clip begins."""
        if seed < 0:
            raise ValueError(f"a seed is 0 or more; got {seed}")
        rng = np.random.default_rng((1, seed))
        style = below(rng, self.styles)
        walls = _maze(rng, self.size, self.loops)
        art = art_of(self.art, style)
        # each region has its texture, as a landmark; some blocks stand out
        centres = rng.random((art.plain, 1, 1, 2)) * len(walls)
        blocks = np.moveaxis(np.indices(walls.shape), 0, -1)
        paint = ((blocks - centres) ** 2).sum(-1).argmin(0)
        odd = rng.random(walls.shape) < 0.18
        paint = np.where(odd, (rng.random(walls.shape) * len(art.walls)).astype(np.int64), paint)
        cell = (below(rng, self.size), below(rng, self.size))
        ahead = _neighbours(walls, cell)
        row, column = ahead[below(rng, len(ahead))]
        heading = math.atan2(row - cell[0], column - cell[1])
        start = np.array([2 * cell[1] + 1.5, 2 * cell[0] + 1.5, heading], np.float32)
        return Place(walls, paint, rng.random(2) * CARPET, style, start)

    def move(self, place: Place, pose: Array, action: Array) -> NDArray[np.float32]:
        """The pose (3,) after an action (2,): turn, then go forward, sliding along walls."""
        x, y, heading = (float(value) for value in pose)
        forward, turn = min(max(float(action[0]), 0.0), 1.0), min(max(float(action[1]), -1.0), 1.0)
        heading = _wrapped(heading + turn * math.radians(self.turn))
        x = _stopped(place.walls, x, forward * self.speed * math.cos(heading), y)
        y = _stopped(place.walls.T, y, forward * self.speed * math.sin(heading), float(np.float32(x)))
        return np.array([x, y, heading], np.float32)

    def render(self, place: Place, poses: Array) -> Frame:
        """Frames (t, px, px, 3) seen from poses (t, 3)."""
        frames = np.empty((len(poses), self.px, self.px, 3), np.uint8)
        many = max(1, _PIXELS // self.px**2)
        for at in range(0, len(poses), many):
            _render(self.px, self.art, self.contrast, place, poses[at : at + many], frames[at : at + many])
        return frames

    def _walk(self, place: Place, rng: np.random.Generator) -> Generator[tuple[Array, Array], None, None]:
        """Actions and the poses they lead to, endlessly."""
        pose = place.start
        yield _STILL, pose
        cell = (int(pose[1]) // 2, int(pose[0]) // 2)
        trail = [cell]
        while True:
            if len(trail) > 2 and rng.random() < 0.3:  # back the way it came, where memory of the past helps
                path = trail[-2 : -3 - below(rng, 2) : -1]
            else:
                goal = (below(rng, self.size), below(rng, self.size))
                path = _path(place.walls, cell, goal)[: 1 + below(rng, 4)]
            for cell in path:
                centre = 2 * np.array(cell[::-1]) + 1.5
                pose = yield from self._go(place, pose, centre + 0.2 * (rng.random(2) - 0.5))
                trail.append(cell)
            if rng.random() < 0.3:
                pose = yield from self._look_around(place, pose, (rng.random() - 0.5) * 4 * math.pi)

    def _go(self, place: Place, pose: Array, point: Array) -> Generator[tuple[Array, Array], None, Array]:
        """Turn to a point and walk there in a straight line."""
        while True:
            dx, dy = float(point[0] - pose[0]), float(point[1] - pose[1])
            distance = math.sqrt(dx * dx + dy * dy)
            if distance < 0.13:
                return pose
            off = _wrapped(math.atan2(dy, dx) - float(pose[2])) / math.radians(self.turn)
            turn = min(max(off, -1.0), 1.0)
            forward = min(1.0, distance / self.speed) if abs(off - turn) < 0.5 else 0.0
            action = np.array([forward, turn], np.float32)
            pose = self.move(place, pose, action)
            yield action, pose

    def _look_around(self, place: Place, pose: Array, angle: float) -> Generator[tuple[Array, Array], None, Array]:
        action = np.array([0.0, math.copysign(1.0, angle)], np.float32)
        for _ in range(int(abs(angle) / math.radians(self.turn))):
            pose = self.move(place, pose, action)
            yield action, pose
        return pose


def top_view(place: Place, poses: Array, scale: int = 16) -> Frame:
    """The maze from above (n * scale, n * scale, 3): walls dark, the path from blue to red."""
    image = np.where(place.walls[..., None], 60, 235).astype(np.uint8).repeat(scale, 0).repeat(scale, 1).repeat(3, 2)
    for time, (x, y, _) in enumerate(poses):
        row, column, dot = int(y * scale), int(x * scale), max(1, scale // 8)
        share = time / max(1, len(poses) - 1)
        image[row - dot : row + dot, column - dot : column + dot] = (int(255 * share), 40, int(255 * (1 - share)))
    return image


# ---------------------------------------------------------------- mazes


def _wrapped(angle: float) -> float:
    return (angle + math.pi) % (2 * math.pi) - math.pi


def _maze(rng: np.random.Generator, size: int, loops: float) -> NDArray[np.bool_]:
    """Walls (n, n): a perfect maze by depth-first search, less a share of its inner walls."""
    walls = np.ones((2 * size + 1, 2 * size + 1), dtype=bool)
    stack = [(below(rng, size), below(rng, size))]
    walls[1::2, 1::2] = False
    visited = {stack[0]}
    while stack:
        row, column = stack[-1]
        fresh = [(row + i, column + j) for i, j in _STEPS if 0 <= row + i < size and 0 <= column + j < size]
        fresh = [cell for cell in fresh if cell not in visited]
        if not fresh:
            stack.pop()
            continue
        to = fresh[below(rng, len(fresh))]
        walls[row + to[0] + 1, column + to[1] + 1] = False
        visited.add(to)
        stack.append(to)
    inner = [(i, j) for i in range(1, 2 * size) for j in range(1, 2 * size) if (i + j) % 2 and walls[i, j]]
    for _ in range(round(loops * len(inner))):
        walls[inner.pop(below(rng, len(inner)))] = False
    return walls


def _neighbours(walls: Array, cell: Cell) -> list[Cell]:
    row, column = cell
    return [(row + i, column + j) for i, j in _STEPS if not walls[2 * row + 1 + i, 2 * column + 1 + j]]


def _path(walls: Array, start: Cell, goal: Cell) -> list[Cell]:
    """Cells of a shortest path, without the first."""
    ahead: dict[Cell, Cell] = {goal: goal}
    queue = deque([goal])
    while start not in ahead:
        cell = queue.popleft()
        for other in _neighbours(walls, cell):
            if other not in ahead:
                ahead[other] = cell
                queue.append(other)
    path = []
    while start != goal:
        start = ahead[start]
        path.append(start)
    return path


def _stopped(walls: Array, x: float, step: float, y: float) -> float:
    """x after a step along it at y, or where a wall (row y, column x) stops the body."""
    if step == 0:
        return x
    to = x + step
    column = math.ceil(to + RADIUS) - 1 if step > 0 else math.floor(to - RADIUS)
    if not walls[math.floor(y - RADIUS) : math.ceil(y + RADIUS), column].any():
        return to
    return column - RADIUS if step > 0 else column + 1 + RADIUS


# ---------------------------------------------------------------- views


class Screen(NamedTuple):
    """Geometry of all frames of a size. Columns (s,) are the even, then the odd ones; rows (h,) likewise, counted from the horizon."""

    across: Array
    """(s,) the tangent of each column's angle."""
    round: Array
    """(s,) that angle, in texels of the sky."""
    down: Array
    """(h,) the tangent of each row's angle, up or down."""
    depth: Array
    """(h,) where it meets the floor, in texels."""
    floor: Array
    """(h,) where the table of colours has the floor of that depth."""
    sky: Array
    """(s, h) rows of the sky."""


class Table(NamedTuple):
    """Colours that a pixel can have, (n,) four bytes each, and where among them the sky and the walls of level 0 begin."""

    colours: NDArray[np.uint32]
    sky: int
    walls: int
    pictures: int


@lru_cache(maxsize=8)
def _screen(px: int) -> Screen:
    order = np.concatenate([np.arange(0, px, 2), np.arange(1, px, 2)])
    across = ((np.concatenate([np.arange(0, 2 * px, 2), np.arange(1, 2 * px, 2)]) + 0.5) / px - 1) * VIEW
    angles = np.array([math.atan(value) for value in across])
    down = (order + 0.5) / px * VIEW
    depth = 0.5 / down
    round_trip = SKY[0] / (2 * math.pi)
    sky = (down * np.array([math.cos(value) for value in angles])[:, None] * (SKY[1] / VIEW)).astype(np.int32)
    return Screen(
        across.astype(np.float32), angles * round_trip, down.astype(np.float32), (depth * (CARPET / 8)).astype(np.float32),
        (_level(depth) * CARPET**2).astype(np.int32), sky,
    )  # fmt: skip


def _level(depth: Array) -> Array:
    """Level of a depth, 0 .. LEVELS - 1, finer where it is near."""
    return (depth / (depth + 4) * LEVELS).astype(np.int32)


def _render(px: int, art: str, contrast: float, place: Place, poses: Array, frames: Frame) -> None:
    """Render what is seen from poses (f, 3) into frames (f, px, px, 3)."""
    screen, table = _screen(px), _table(art, place.style, px, contrast)
    heading = [float(value) for value in poses[:, 2]]
    cos = np.array([math.cos(value) for value in heading], np.float32)[:, None]
    sin = np.array([math.sin(value) for value in heading], np.float32)[:, None]
    ray_x, ray_y = cos - screen.across * sin, sin + screen.across * cos
    x, y = poses[:, :1].astype(np.float32), poses[:, 1:2].astype(np.float32)
    depth, along, paint, side = _cast(place, x, y, ray_x, ray_y)

    wall = ((_level(depth) * 2 + side) * table.pictures + paint) * TEXELS + (along * TEXELS).astype(np.int32)
    wall = (wall * TEXELS + (table.walls + TEXELS // 2))[..., None]
    texel = ((depth * TEXELS)[..., None] * screen.down).astype(np.int32)  # from a wall's half height
    on_wall = texel < TEXELS // 2

    sky = (poses[:, 2:].astype(float) * (SKY[0] / (2 * math.pi)) + (screen.round + SKY[0])).astype(np.int32) % SKY[0]
    upper = np.where(on_wall, wall - 1 - texel, (sky * SKY[1] + table.sky)[..., None] + screen.sky)

    carpet = place.carpet.astype(np.float32)
    # what lies outside of the maze is hidden by a wall: its texels may be any
    u = (ray_x[..., None] * screen.depth + (x * (CARPET // 8) + carpet[0])[..., None]).astype(np.int32)
    v = (ray_y[..., None] * screen.depth + (y * (CARPET // 8) + carpet[1])[..., None]).astype(np.int32)
    u &= CARPET - 1
    v &= CARPET - 1
    v *= CARPET
    v += u
    v += screen.floor
    lower = np.where(on_wall, wall + texel, v)

    half = px // 2
    frames[:, half - 1 :: -1] = _mean(table.colours[upper], px)
    frames[:, half:] = _mean(table.colours[lower], px)


def _mean(colours: NDArray[np.uint32], px: int) -> Colours:
    """Of each 2 x 2 of colours (f, 2 px, px), ordered as in `Screen`: (f, px / 2, px, 3). Two bytes are summed in one number."""
    lanes, half = np.uint32(0x00FF00FF), np.uint32(0x00020002)
    total = []
    for values in (colours & lanes, (colours >> np.uint32(8)) & lanes):
        values = values[:, :px] + values[:, px:]
        values = values[..., : px // 2] + values[..., px // 2 :]
        total.append(((values + half) >> np.uint32(2)) & lanes)
    packed = np.ascontiguousarray((total[0] | (total[1] << np.uint32(8))).transpose(0, 2, 1))
    return packed.view(np.uint8).reshape(*packed.shape, 4)[..., :3]


def _cast(place: Place, x: Array, y: Array, ray_x: Array, ray_y: Array) -> tuple[Array, Array, Array, Array]:
    """Where rays (f, s) from x, y (f, 1) meet walls: depth, position along the wall in [0, 1), paint, and 1 for walls met along y."""
    n = len(place.walls)
    shape = ray_x.shape
    far = np.float32(1e9)
    with np.errstate(divide="ignore"):
        pace_x, pace_y = np.minimum(np.abs(1 / ray_x), far), np.minimum(np.abs(1 / ray_y), far)
    right, down = ray_x > 0, ray_y > 0
    column, row = np.floor(x), np.floor(y)
    next_x = np.where(right, column + 1 - x, x - column) * pace_x
    next_y = np.where(down, row + 1 - y, y - row) * pace_y
    block = np.broadcast_to((row * n + column).astype(np.int32), shape).copy()
    step_x, step_y = np.where(right, 1, -1).astype(np.int32), np.where(down, n, -n).astype(np.int32)
    walls, ahead = place.walls.ravel(), np.ones(shape, bool)
    depth, side = np.empty(shape, np.float32), np.empty(shape, bool)
    while ahead.any():
        met_y = next_y < next_x
        nearest = np.minimum(next_x, next_y)
        np.copyto(depth, nearest, where=ahead)
        np.copyto(side, met_y, where=ahead)
        block += np.where(met_y, step_y, step_x) * ahead
        next_x += np.where(met_y, np.float32(0), pace_x)
        next_y += np.where(met_y, pace_y, np.float32(0))
        ahead &= ~walls[block]
    along = np.where(side, x + depth * ray_x, y + depth * ray_y)
    along = np.minimum(along - np.floor(along), np.float32(1 - 1e-6))
    return depth, along, place.paint.ravel()[block].astype(np.int32), side.astype(np.int32)


@lru_cache(maxsize=8)
def _table(art: str, style: int, px: int, contrast: float = 1.0) -> Table:
    """Floor, walls and sky of a style in one array. Depth makes them darker, and smoother as a pixel covers more texels."""
    source = art_of(art, style)
    if contrast < 1:
        source = source._replace(walls=_softened(source.walls, contrast), floor=_softened(source.floor, contrast))
    level = (np.arange(LEVELS) + 0.5) / LEVELS
    depth = 4 * level / (1 - level)
    light = (256 * (1 - 0.75 * level)).astype(np.uint16)  # times a byte: still 16 bits
    per_ray = depth * VIEW / px  # blocks across a ray
    walls = np.swapaxes(source.walls, 1, 2)  # columns of texels, as they are read
    faces = np.empty((LEVELS, 2, *walls.shape[:3], 4), np.uint8)
    floor = np.empty((LEVELS, CARPET, CARPET, 4), np.uint8)
    smooth_walls, smooth_floor = _smoothed(walls), _smoothed(source.floor)
    for i in range(LEVELS):
        image = smooth_walls[_fold(per_ray[i] * TEXELS)]
        faces[i, 0, ..., :3] = (image * light[i]) >> 8
        faces[i, 1, ..., :3] = (image * (light[i] // 5 * 4)) >> 8
        # a ray at a low angle covers more of the floor in length than in breadth: between both
        floor[i, ..., :3] = (smooth_floor[_fold(per_ray[i] * CARPET / 8 * math.sqrt(2 * depth[i]))] * light[i]) >> 8
    sky = np.concatenate([source.sky, source.sky[..., :1]], axis=-1)
    parts = [np.ascontiguousarray(part).view(np.uint32).ravel() for part in (floor, faces, sky)]
    return Table(np.concatenate(parts), len(parts[0]) + len(parts[1]), len(parts[0]), len(walls))


def _softened(pictures: Colours, contrast: float) -> Colours:
    """Pictures (..., v, u, 3) nearer to their own mean colour."""
    mean = pictures.mean((-3, -2), keepdims=True)
    return (mean + contrast * (pictures - mean)).round().astype(np.uint8)


def _fold(texels: float) -> int:
    """How often to halve the texels of a picture of which a ray covers so many."""
    return min(5, sum(texels > 2**k for k in (0.5, 1.5, 2.5, 3.5, 4.5)))


def _smoothed(images: Array) -> list[Array]:
    """Images (..., n, m, 3), and means over 2 x 2, 4 x 4, .. texels in the same size."""
    smooth = [images.astype(np.uint16)]
    for k in range(1, 6):
        n, m = images.shape[-3] >> k, images.shape[-2] >> k
        parts = smooth[0].reshape(*images.shape[:-3], n, 2**k, m, 2**k, 3).sum((-4, -2), dtype=np.uint32) >> (2 * k)
        smooth.append(parts.repeat(2**k, -3).repeat(2**k, -2).astype(np.uint16))
    return smooth
