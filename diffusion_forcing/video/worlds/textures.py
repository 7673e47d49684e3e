"""Textures of walls, floor and sky of a labyrinth: procedural ones by number, or those of the package labmaze."""

from __future__ import annotations

import math
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Colours = NDArray[np.uint8]
Cell = tuple[int, int]  # row and column

VIEW = 0.8
"""Tangent of half the angle of view, in both directions."""
TEXELS, CARPET, SKY = 64, 256, (1024, 64)
"""Texels of a wall's side; of the floor's, 8 blocks that repeat; of the sky, all around and up from the horizon."""


def below(rng: np.random.Generator, n: int) -> int:
    """A number from 0 to n-1, the same with every version of NumPy."""
    return int(rng.random() * n)


class Art(NamedTuple):
    """walls: (w, v, u, 3), the first `plain` of which cover regions, the others have signs. floor: (v, u, 3). sky: (a, v, 3), upwards."""

    walls: Colours
    plain: int
    floor: Colours
    sky: Colours


@lru_cache(maxsize=64)
def art_of(art: str, style: int) -> Art:
    return _procedural(style) if art == "procedural" else _labmaze(style)


def _procedural(style: int) -> Art:
    rng = np.random.default_rng((3, style))
    hue = rng.random()
    courses = [
        (8, 4, 0.5),
        (4, 4, 0.0),
        (1, 6, 0.0),
        (4, 2, 0.5),
        (6, 1, 0.0),
        (2, 2, 0.0),
    ]  # bricks, tiles, planks, blocks, boards, plates
    courses = [courses.pop(below(rng, len(courses))) for _ in range(5)]
    walls = []
    for i, course in enumerate(courses):
        colour = _colour(hue + i / 5 + 0.1 * rng.random(), 0.35 + 0.35 * rng.random(), 0.75 + 0.25 * rng.random())
        walls.append(_shadow(_masonry(rng, TEXELS, colour, *course)))
    for i in range(4):
        wall = walls[below(rng, 5)].copy()
        walls.append(_picture(rng, wall, i, hue + 0.1 + 0.25 * i))
    floor = np.empty((8, CARPET // 8, 8, CARPET // 8, 3))
    kinds = [
        _masonry(rng, CARPET // 8, _colour(hue + spread, 0.25 + 0.2 * rng.random(), 0.55 + 0.25 * rng.random()), *course)
        for spread, course in ((0.45, (2, 2, 0.0)), (0.6, (4, 2, 0.5)), (0.55, (1, 1, 0.0)), (0.15, (4, 1, 0.0)))
    ]
    patch = (rng.random((4, 4)) * len(kinds)).astype(np.int64).repeat(2, 0).repeat(2, 1)
    for i in range(8):
        for j in range(8):
            floor[i, :, j] = kinds[patch[i, j]] * (0.9 + 0.2 * rng.random())
    carpet = floor.reshape(CARPET, CARPET, 3) * (0.85 + 0.3 * _noise(rng, (CARPET, CARPET), (32, 32), 3))[..., None]
    return Art(_bytes(np.stack(walls)), 5, _bytes(carpet), _bytes(_heavens(rng, hue)))


def _bytes(image: Array) -> Colours:
    return (np.clip(image, 0, 1) * 255 + 0.5).astype(np.uint8)


def _colour(hue: float, saturation: float, value: float) -> Array:
    """(3,) red, green, blue of a hue in turns of the wheel."""
    wheel = np.abs((hue * 6 + np.array([0.0, 4.0, 2.0])) % 6 - 3) - 1
    return value * (1 - saturation * (1 - np.clip(wheel, 0, 1)))


def _noise(rng: np.random.Generator, shape: Cell, cells: Cell, octaves: int) -> Array:
    """Smooth noise (shape) of about 0 to 1 that repeats at its edges."""
    total, weight = np.zeros(shape), 0.0
    for k in range(octaves):
        grid = rng.random((cells[0] << k, cells[1] << k))
        for axis in (0, 1):
            at = np.arange(shape[axis]) * (grid.shape[axis] / shape[axis])
            below = at.astype(np.int64)
            share = (at - below) ** 2 * (3 - 2 * (at - below))
            share = share[:, None] if axis == 0 else share
            grid = grid.take(below, axis) * (1 - share) + grid.take((below + 1) % grid.shape[axis], axis) * share
        total, weight = total + grid / 2**k, weight + 0.5**k
    return total / weight


def _masonry(rng: np.random.Generator, n: int, colour: Array, rows: int, columns: int, shift: float) -> Array:
    """(n, n, 3): stones of about one colour in rows, every second row shifted, with a joint around each."""
    at = (np.arange(n) + 0.5) / n
    y = np.broadcast_to((at * rows)[:, None], (n, n))
    row = y.astype(np.int64)
    x = at * columns + shift * (row % 2)
    column = x.astype(np.int64) % columns
    from_top, from_left = y % 1, x % 1
    joint = np.minimum(np.minimum(from_top, 1 - from_top) / rows, np.minimum(from_left, 1 - from_left) / columns) * n
    light = (0.72 + 0.4 * rng.random((rows, columns)))[row, column] * (0.7 + 0.6 * _noise(rng, (n, n), (4, 4), 4))
    light = light * np.where(joint < 1, 0.5, np.where(from_top / rows * n < 2, 1.2, 1.0))
    tint = 1 + 0.25 * (rng.random((rows, columns, 3)) - 0.5)
    return colour * light[..., None] * tint[row, column]


def _shadow(wall: Array) -> Array:
    """Darker towards the floor, with a plinth and a ledge, so that walls stand."""
    at = (np.arange(TEXELS) + 0.5) / TEXELS
    light = 1.05 - 0.3 * at * at
    light = np.where(at > 0.92, 0.5, np.where(at < 0.05, 1.25, light))
    return wall * light[:, None, None]


def _picture(rng: np.random.Generator, wall: Array, kind: int, hue: float) -> Array:
    """A wall with a framed sign: a disc, a diamond, a cross or bars."""
    at = (np.arange(TEXELS) + 0.5) / TEXELS * 2 - 1
    y, x = np.abs(at)[:, None] * 1.0, np.abs(at)[None]
    square = np.maximum(x, y)
    wall = np.where((square < 0.72)[..., None], _colour(hue, 0.3, 0.25), wall)
    wall = np.where((square < 0.62)[..., None], _colour(hue + 0.5, 0.25, 0.95), wall)
    signs = (x * x + y * y < 0.2, x + y < 0.55, (np.minimum(x, y) < 0.14) & (square < 0.48), ((at + 1) * 4 % 1 < 0.5) & (square < 0.5))
    return np.where(signs[kind][..., None], _colour(hue, 0.85, 0.8 + 0.2 * rng.random()), wall)


def _heavens(rng: np.random.Generator, hue: float) -> Array:
    """(a, v, 3): a sky with clouds and a sun, and hills below it as landmarks."""
    height = (np.arange(SKY[1]) + 0.5) / SKY[1]
    blue = 0.55 + 0.12 * (rng.random() - 0.5)
    sky = _colour(blue, 0.2, 0.97) + (_colour(blue + 0.04, 0.7, 0.75) - _colour(blue, 0.2, 0.97)) * height[:, None]
    clouds = np.clip(_noise(rng, SKY, (12, 3), 4) * 4 - 1.9, 0, 1)[..., None] * 0.85
    sky = sky * (1 - clouds) + clouds * (0.96 - 0.1 * height[:, None])
    angle = (np.arange(SKY[0]) / SKY[0] - rng.random() + 1.5) % 1 - 0.5
    sun = (angle[:, None] * 2 * math.pi) ** 2 + ((height - 0.5) * VIEW) ** 2
    glow = np.clip(0.01 / (sun + 1e-3), 0, 1)[..., None]
    sky = sky * (1 - glow) + np.array([1.0, 0.95, 0.75]) * glow
    for far, top in ((0.75, 0.55), (0.45, 0.38)):
        ridge = top * _noise(rng, (SKY[0], 1), (10, 1), 4)
        hill = _colour(hue + 0.3, 0.35, far) * (0.85 + 0.3 * _noise(rng, SKY, (64, 8), 2))[..., None]
        sky = np.where((height < ridge)[..., None], hill, sky)
    return sky


def _labmaze(style: int) -> Art:
    """Style 0 to 14: a set of walls and floors, and a sky, of the package labmaze."""
    found = find_spec("labmaze")
    if found is None or not found.submodule_search_locations:
        raise ImportError("art='labmaze' needs its textures: pip install labmaze --no-deps, or choose art='procedural'")
    folder = Path(found.submodule_search_locations[0]) / "assets"
    set_, sky = folder / f"style_0{style % 5 + 1}", folder / f"sky_0{style % 3 + 1}"
    walls = np.stack([_shrunk(_read(path), TEXELS) for path in sorted(set_.glob("wall_*_d.png"))])
    floors = [_shrunk(_read(path), CARPET // 8) for path in sorted(set_.glob("floor_*_d.png")) if "team" not in path.name]
    rng = np.random.default_rng((4, style))
    patch = (rng.random((4, 4)) * len(floors)).astype(np.int64).repeat(2, 0).repeat(2, 1)
    carpet = np.stack(floors)[patch].transpose(0, 2, 1, 3, 4).reshape(CARPET, CARPET, 3)
    faces = np.stack([_read(sky / f"{side}.png") for side in ("ft", "rt", "bk", "lf")])
    turns = np.arange(SKY[0]) / SKY[0] * 4
    angle = [(float(turn) + 0.5) % 1 * (math.pi / 2) - math.pi / 4 for turn in turns]
    x = np.clip((np.array([math.tan(value) for value in angle]) + 1) * 511.5, 2, 1021)  # some pictures have a border
    rise = (np.arange(SKY[1]) + 0.5) / SKY[1] * VIEW / np.array([math.cos(value) for value in angle])[:, None]
    y = np.clip((1 - rise) * 511.5, 0, 1023).astype(np.int64)
    face = ((turns + 0.5) % 4).astype(np.int64)
    return Art(walls, len(walls), carpet, faces[face[:, None], y, x.astype(np.int64)[:, None]])


def _read(path: Path) -> Colours:
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(image.convert("RGBA"))[..., :3]


def _shrunk(image: Colours, n: int) -> Colours:
    """Means over squares of texels: (n, n, 3)."""
    k = len(image) // n
    return (image.astype(np.uint32).reshape(n, k, n, k, 3).sum((1, 3)) // k**2).astype(np.uint8)
