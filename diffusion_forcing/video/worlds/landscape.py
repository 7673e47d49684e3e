"""The landscape of `Voxels`: hills, lakes, beaches, cliffs and trees under a cloudy sky, and a walk among them. Compiled by numba.

One random tile of `size` x `size` blocks repeats endlessly, so there is no border. x and y lie in the plane and z points up, in blocks; a
heading is an angle from x to y, so that a positive turn is to the left. The pose is the whole state of an agent: the next one follows
from it and the action alone.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

try:
    from numba import njit
except ImportError as error:
    raise ImportError("the landscape of blocks is drawn by numba: pip install 'diffusion_forcing[video]'") from error

from .world import Frame

Array = NDArray[Any]
Pose = NDArray[np.float32]  # (4,): x, y, z, heading

AIR, GRASS, DIRT, SAND, WATER, STONE, TRUNK, LEAVES = range(8)
HEIGHT = 36
"""Blocks from the bottom of the world to its top."""
EYE = 1.6
"""Height of the eye above the ground."""
_BODY = 0.3  # half of its width: what keeps the eye off the walls
_HEADROOM = 3  # free blocks above ground that can be walked: the eye lags by up to one when the ground steps down
_FAR = 44.0  # where fog hides everything
_CLOUDS = 20.0  # their height above the eye: they stay where they are when the ground rises
_SLOPE = math.tan(math.radians(74) / 2)  # half of the view's width at distance 1
_SKYLINE = 0.44  # its row, as a share of the height: the camera sees more of the ground
_AROUND = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
_TEXELS = 8  # a side of a block's face

_COLOUR = np.array(
    [[0, 0, 0], [104, 160, 58], [134, 96, 66], [222, 207, 160], [58, 104, 190], [128, 128, 130], [98, 76, 48], [58, 116, 42]],
    dtype=np.float64,
)
_GRAIN = np.array([0, 0.20, 0.26, 0.12, 0.06, 0.22, 0.20, 0.50])  # how much texels of a block differ
_PATCH = np.array([0, 0.14, 0.12, 0.07, 0.05, 0.14, 0.10, 0.22])  # how much blocks differ
_HORIZON = np.array([188.0, 212.0, 238.0])  # of the fog, too
_ZENITH = np.array([92.0, 148.0, 232.0])


class Land(NamedTuple):
    """One tile. blocks: (size, size, HEIGHT). clouds: (16, 16), over the same extent. The others are (size, size), by column."""

    blocks: NDArray[np.uint8]
    ground: NDArray[np.int64]
    """Height at which a body stands."""
    tops: NDArray[np.int64]
    """Height above everything, trees included."""
    free: NDArray[np.bool_]
    """Dry, with headroom."""
    roomy: NDArray[np.bool_]
    """Columns that walks lead through: no obstacle next to them, all connected."""
    clouds: NDArray[np.bool_]


class Mover(Protocol):
    """How an agent moves."""

    @property
    def turn(self) -> float:
        """Degrees a frame at most."""
        ...

    @property
    def speed(self) -> float:
        """Blocks a frame at most."""
        ...

    def move(self, land: Land, pose: Pose, action: Array) -> Pose:
        """The pose after an action (2,)."""
        ...


def film(land: Land, poses: Array, px: int) -> Frame:
    """Frames (t, px, px, 3) seen from poses (t, 4)."""
    frames = np.empty((len(poses), px, px, 3), np.uint8)
    _film(land.blocks, land.ground, land.tops, land.clouds, np.ascontiguousarray(poses, np.float32), frames)
    return frames


def generator(seed: int) -> np.random.Generator:
    if seed < 0:
        raise ValueError(f"a seed is a whole number from 0, got {seed}")
    return np.random.default_rng(seed)


# The land


def landscape(size: int, rng: np.random.Generator) -> Land:
    """A random tile, of which at least a fifth can be walked."""
    for _ in range(1000):
        land = _draw(size, rng)
        if land.roomy.sum() >= size * size / 5:
            return land
    raise AssertionError(f"no landscape of {size} blocks a side that can be walked")


def _draw(size: int, rng: np.random.Generator) -> Land:
    hills = 0.64 * _noise(rng, size, 20) + 0.28 * _noise(rng, size, 10) + 0.08 * _noise(rng, size, 4)
    crags = np.maximum(0, _noise(rng, size, 16) - 0.68)
    level = 4 + 17 * hills + 30 * crags
    ground = np.minimum(np.floor(level), HEIGHT - 10).astype(np.int64)
    water = int(np.sort(ground, axis=None)[int(0.16 * size * size)]) + 1  # about a fifth of the columns lie below
    wood = _noise(rng, size, 12)
    planted = rng.random((size, size)) < 0.05 * np.maximum(0, wood - 0.25)
    tall = rng.integers(4, 7, (size, size))
    blocks = np.zeros((size, size, HEIGHT), np.uint8)
    _fill(blocks, ground, water, crags, wood, planted, tall)
    ground = np.maximum(ground, water)
    filled = blocks > 0
    tops = HEIGHT - np.argmax(filled[:, :, ::-1], axis=2)
    row, column = np.indices((size, size))
    free = blocks[row, column, ground - 1] != WATER
    for above in range(_HEADROOM):
        free &= ~filled[row, column, ground + above]
    clouds = rng.random((8, 8)).repeat(2, 0).repeat(2, 1) + 0.25 * rng.random((16, 16)) < 0.32
    return Land(blocks, ground, tops, free, _roomy(ground, free), clouds)


def _noise(rng: np.random.Generator, size: int, period: int) -> Array:
    """Smooth values between 0 and 1, (size, size), that repeat without a seam; bumps are about `period` wide."""
    number = max(2, round(size / period))
    lattice = rng.random((number, number))
    where = np.arange(size) * number / size
    low = where.astype(np.int64)
    high, share = (low + 1) % number, where - low
    share = share * share * (3 - 2 * share)
    rows = lattice[low] * (1 - share)[:, None] + lattice[high] * share[:, None]
    return np.ascontiguousarray(rows[:, low] * (1 - share) + rows[:, high] * share)  # one memory layout, one compilation


@njit(cache=True)
def _fill(blocks, ground, water, crags, wood, planted, tall):
    """Blocks of the columns, and trees on those planted; in place."""
    size = len(ground)
    for i in range(size):
        for j in range(size):
            top = ground[i, j]
            beach, rocky = top <= water + (wood[i, j] < 0.55), crags[i, j] > 0.02
            for k in range(top):
                deep = top - 1 - k
                if rocky or deep > 3:
                    blocks[i, j, k] = STONE
                elif beach:
                    blocks[i, j, k] = SAND
                else:
                    blocks[i, j, k] = GRASS if deep == 0 else DIRT
            for k in range(top, water):
                blocks[i, j, k] = WATER
    for i in range(size):
        for j in range(size):
            if not planted[i, j] or blocks[i, j, ground[i, j] - 1] != GRASS or ground[i, j] <= water:
                continue
            crown = ground[i, j] + tall[i, j]  # above the trunk
            for k in range(crown - 3, crown + 1):
                reach = 2 if k < crown - 1 else 1
                for di in range(-reach, reach + 1):
                    for dj in range(-reach, reach + 1):
                        corner = abs(di) == reach and abs(dj) == reach
                        ragged = k == crown or _hash(i + di, j + dj, k) < 0.5
                        if not (corner and ragged) and blocks[(i + di) % size, (j + dj) % size, k] == AIR:
                            blocks[(i + di) % size, (j + dj) % size, k] = LEAVES
            for k in range(ground[i, j], crown):
                blocks[i, j, k] = TRUNK


def _roomy(ground: NDArray[np.int64], free: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Columns with no obstacle among their neighbours, the largest connected part of them."""
    clear = free.copy()
    for shift in _AROUND:
        clear &= np.roll(free, shift, (0, 1)) & (np.abs(np.roll(ground, shift, (0, 1)) - ground) <= 1)
    best, left = np.zeros_like(clear), clear.copy()
    while left.sum() > best.sum():
        part = _steps_to(clear, *np.argwhere(left)[0]) >= 0
        left &= ~part
        best = part if part.sum() > best.sum() else best
    return best


# The walk


@njit(cache=True)
def move(ground, free, pose, ahead, angle):
    """The pose (4,) after turning by an angle and going ahead."""
    heading = np.float32((pose[3] + angle + math.pi) % (2 * math.pi) - math.pi)
    dx, dy = ahead * math.cos(np.float64(heading)), ahead * math.sin(np.float64(heading))
    level = _level(ground, pose[0], pose[1])
    x, y = pose[0], pose[1]
    for way in range(3):
        to_x = np.float32(pose[0] + (dx if way != 2 else 0.0))
        to_y = np.float32(pose[1] + (dy if way != 1 else 0.0))
        if _stands(ground, free, to_x, to_y, level):
            x, y = to_x, to_y
            break
    level = _level(ground, x, y)
    z = pose[2] + 0.5 * (EYE + _footing(ground, x, y) - pose[2])
    return np.array([x, y, min(max(z, level + EYE - 1), level + EYE + 1), heading], dtype=np.float32)


@njit(cache=True)
def _level(ground, x, y):
    size = len(ground)
    return ground[math.floor(x) % size, math.floor(y) % size]


@njit(cache=True)
def _stands(ground, free, x, y, level):
    """Whether a body fits at (x, y) and gets there from ground of that level in a step of at most one block, up or down."""
    size = len(ground)
    here = _level(ground, x, y)
    if abs(here - level) > 1:
        return False
    for corner in range(4):
        i = math.floor(x + (_BODY if corner & 1 else -_BODY)) % size
        j = math.floor(y + (_BODY if corner & 2 else -_BODY)) % size
        if not free[i, j] or ground[i, j] > here + 1:
            return False
    return True


@njit(cache=True)
def _footing(ground, x, y):
    """The ground, averaged over a block around (x, y), so that the eye glides up a step; higher walls and drops count as one step."""
    size = len(ground)
    here = _level(ground, x, y)
    i, j = math.floor(x - 0.5), math.floor(y - 0.5)
    u, v = x - 0.5 - i, y - 0.5 - j
    total = 0.0
    for di in range(2):
        for dj in range(2):
            share = (u if di else 1 - u) * (v if dj else 1 - v)
            total += share * min(max(ground[(i + di) % size, (j + dj) % size], here - 1), here + 1)
    return total


@njit(cache=True)
def _steps_to(clear, i, j):
    """How many columns each one is away from (i, j) on a way through clear ones, (size, size); -1 if there is none."""
    size = len(clear)
    steps = np.full((size, size), -1, np.int32)
    queue = np.empty((size * size, 2), np.int64)
    steps[i, j], queue[0, 0], queue[0, 1] = 0, i, j
    first, last = 0, 1
    while first < last:
        i, j = queue[first, 0], queue[first, 1]
        first += 1
        for di in range(-1, 2):
            for dj in range(-1, 2):
                a, b = (i + di) % size, (j + dj) % size
                if clear[a, b] and steps[a, b] < 0 and clear[i, b] and clear[a, j]:  # no short cuts between two obstacles
                    steps[a, b] = steps[i, j] + 1
                    queue[last, 0], queue[last, 1] = a, b
                    last += 1
    return steps


@njit(cache=True)
def _waypoint(steps, x, y, ahead):
    """The farthest point that can be reached straight from (x, y), up to `ahead` columns along the path to where steps are 0."""
    size = len(steps)
    i, j = math.floor(x), math.floor(y)
    best_x, best_y = i + 0.5, j + 0.5
    for number in range(ahead):
        least, next_i, next_j = 1 << 30, i, j
        for di in range(-1, 2):
            for dj in range(-1, 2):
                away = steps[(i + di) % size, (j + dj) % size]
                if away >= 0 and 3 * away + abs(di) + abs(dj) < least:
                    least, next_i, next_j = 3 * away + abs(di) + abs(dj), i + di, j + dj
        i, j = next_i, next_j
        dx, dy = i + 0.5 - x, j + 0.5 - y
        samples = int(4 * math.sqrt(dx * dx + dy * dy)) + 1
        for sample in range(1, samples + 1):
            a, b = math.floor(x + dx * sample / samples), math.floor(y + dy * sample / samples)
            if steps[a % size, b % size] < 0 and number > 0:
                return best_x, best_y
        best_x, best_y = i + 0.5, j + 0.5
    return best_x, best_y


def start(land: Land, rng: np.random.Generator) -> Pose:
    """A random pose on roomy ground."""
    places = np.argwhere(land.roomy)
    x, y = places[rng.integers(len(places))] + 0.5
    z = EYE + _footing(land.ground, np.float32(x), np.float32(y))
    return np.array([x, y, z, rng.uniform(-math.pi, math.pi)], np.float32)


def stroll(world: Mover, land: Land, pose: Pose, rng: np.random.Generator) -> Generator[tuple[float, float], Pose, None]:
    """Walks from place to place, sometimes back to where the last one began, sometimes with turns on the spot between them.

    Yields actions and is sent the poses they lead to.
    """
    places = np.argwhere(land.roomy)
    # A roomy column can be reached from all of its neighbours, so that a walk that strays no farther than these finds back.
    near = np.any([np.roll(land.roomy, shift, (0, 1)) for shift in _AROUND], axis=0)
    origin, turning = _cell(land, pose), 0.0

    def steer(angle: float) -> float:
        """Turn by an angle, easing in and out."""
        nonlocal turning
        target = min(max(0.5 * angle / math.radians(world.turn), -1.0), 1.0)
        turning += min(max(target - turning, -0.4), 0.4)
        return turning

    while True:
        if rng.random() < 0.35:
            first = float(pose[3])
            headings = [first + rng.choice([-1, 1]) * rng.uniform(0.8, 3.0)]
            headings += [first] if rng.random() < 0.5 else []
            for heading in headings:
                while abs(angle := _wrap(heading - pose[3])) > 0.06 or abs(turning) > 0.4:
                    pose = yield 0.0, steer(angle)
                for _ in range(rng.integers(1, 5)):
                    turning = 0.0
                    pose = yield 0.0, 0.0

        here = _cell(land, pose)
        away = _steps_to(land.roomy, *here)[places[:, 0], places[:, 1]]
        choice = places[(away >= 6) & (away <= 22)]
        choice = choice if len(choice) else places
        goal = tuple(choice[rng.integers(len(choice))])
        if rng.random() < 0.3 and origin != here:
            goal = origin
        origin = here
        steps, pace, idle = _steps_to(land.roomy, *goal), rng.uniform(0.7, 1.0), 0
        while _cell(land, pose) != goal and idle < 8:
            x, y = _waypoint(steps, pose[0], pose[1], 14)
            angle = _wrap(math.atan2(y - pose[1], x - pose[0]) - pose[3])
            turn, forward = steer(angle), pace * max(math.cos(angle), 0.0) ** 2
            if not near[_cell(land, world.move(land, pose, np.array([forward, turn])))]:
                forward = 0.0
            before, pose = pose, (yield forward, turn)
            idle = idle + 1 if forward > 0.1 and np.abs(pose[:2] - before[:2]).max() < 0.1 * forward * world.speed else 0


def _cell(land: Land, pose: Pose) -> tuple[int, int]:
    size = len(land.ground)
    return math.floor(pose[0]) % size, math.floor(pose[1]) % size


def _wrap(angle: float) -> float:
    """The same angle, between -pi and pi."""
    return (float(angle) + math.pi) % (2 * math.pi) - math.pi


# The picture


@njit(cache=True)
def _hash(a, b, c):
    """A pseudo-random number between 0 and 1, a function of the three."""
    mixed = (a * 0x2C9277B5 + b * 0x6F4F2A3D + c * 0x1B56C4E9 + 0x3A8F05C5) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x5D1A4E6B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 13)) * 0x4B3F9C17) & 0xFFFFFFFF
    return ((mixed ^ (mixed >> 16)) & 0xFFFF) / 65536.0


@njit(cache=True)
def _film(blocks, ground, tops, clouds, poses, frames):
    """Frames (t, px, px, 3) seen from poses (t, 4), in place: the mean of 2 x 2 rays a pixel."""
    size, px = len(ground), frames.shape[1]
    rays = 2 * px
    slopes, hits, far = np.empty(rays), np.empty(rays, np.int64), np.empty(rays)
    pixels = np.empty((px, 3))
    for t in range(len(poses)):
        x, y, z = np.float64(poses[t, 0]), np.float64(poses[t, 1]), np.float64(poses[t, 2])
        heading = np.float64(poses[t, 3])
        cos, sin = math.cos(heading), math.sin(heading)
        for column in range(rays):
            odd = column & 1
            for row in range(rays):
                # Every other column is shifted by half a ray, which smooths level edges as four rays above one another would.
                slopes[row] = 2 * _SLOPE * (_SKYLINE - (row + 0.25 + 0.5 * odd) / rays)
            right = _SLOPE * (2 * (column + 0.5) / rays - 1)
            dx, dy = cos + right * sin, sin - right * cos
            ray = (x, y, z, dx, dy)
            _scan(blocks, ground, tops, ray, slopes, hits, far)
            for row in range(rays):
                if hits[row] < 0:
                    red, green, blue = _sky(clouds, size, x, y, dx, dy, slopes[row])
                else:
                    red, green, blue = _surface(blocks, hits[row], ray, slopes[row], far[row], px)
                whole, other = row >> 1, (row | odd) & 1
                pixels[whole, 0] = red + (pixels[whole, 0] if other else 0.0)
                pixels[whole, 1] = green + (pixels[whole, 1] if other else 0.0)
                pixels[whole, 2] = blue + (pixels[whole, 2] if other else 0.0)
            if odd:
                for row in range(px):
                    for c in range(3):
                        frames[t, row, column >> 1, c] = int(pixels[row, c] / 4 + 0.5)


@njit(cache=True)
def _scan(blocks, ground, tops, ray, slopes, hits, far):
    """The faces that rays of these slopes hit (-1 for the sky), the steepest upwards first, and how far ahead; in place.

    ray: where they start, x, y, z, and their horizontal direction, dx, dy. They lie above one another and meet the same columns of blocks:
    one march from column to column serves them all. Where one meets the ground, those below it have met it before, so that only a column
    with a tree needs a test of each ray, block by block.
    """
    x, y, z, dx, dy = ray
    size, low = len(ground), len(slopes) - 1
    for row in range(low + 1):
        hits[row] = -1
    flat = math.sqrt(dx * dx + dy * dy)
    i, j = math.floor(x), math.floor(y)
    step_i, step_j = (1 if dx > 0 else -1), (1 if dy > 0 else -1)
    gap_x, gap_y = 1 / max(abs(dx), 1e-9), 1 / max(abs(dy), 1e-9)
    next_x, next_y = (i + 1 - x if dx > 0 else x - i) * gap_x, (j + 1 - y if dy > 0 else y - j) * gap_y
    i, j = i % size, j % size
    enter, axis, before = 0.0, 0, HEIGHT
    while low >= 0 and enter * flat < _FAR:
        leave = min(next_x, next_y)
        floor, top = ground[i, j], tops[i, j]
        if top > floor:
            for row in range(low, -1, -1):
                slope = slopes[row]
                start, end = z + enter * slope, z + leave * slope
                if min(start, end) >= top:
                    break
                if hits[row] >= 0:
                    continue
                step = 1 if slope > 0 else -1
                for k in range(int(start), int(end) + step, step):
                    if k < top and blocks[i, j, k] != AIR:
                        if k == int(start):
                            hits[row], far[row] = _face(i, j, k, axis, before > k), enter
                        else:
                            hits[row], far[row] = _face(i, j, k, 2, top > k + 1), (k + (slope < 0) - z) / slope
                        break
        while low >= 0:
            slope = slopes[low]
            if hits[low] < 0:
                if z + enter * slope < floor:
                    k = int(z + enter * slope)
                    hits[low], far[low] = _face(i, j, k, axis, before > k), enter
                elif z + leave * slope < floor:
                    hits[low], far[low] = _face(i, j, floor - 1, 2, top > floor), (floor - z) / slope
                else:
                    break
            low -= 1
        enter, before = leave, top
        if next_x < next_y:
            next_x += gap_x
            i, axis = i + step_i, 0
            i = 0 if i == size else (size - 1 if i < 0 else i)
        else:
            next_y += gap_y
            j, axis = j + step_j, 1
            j = 0 if j == size else (size - 1 if j < 0 else j)


@njit(cache=True)
def _face(i, j, k, axis, covered):
    """A number for a face of block (i, j, k) across an axis, and whether something above takes its light."""
    return (i << 21) | (j << 9) | (k << 3) | (axis << 1) | covered


@njit(cache=True)
def _surface(blocks, hit, ray, slope, far, px):
    """The colour where a ray hits a face, so far ahead."""
    face = hit >> 1
    axis, k = face & 3, (face >> 2) & 63
    block = blocks[face >> 20, (face >> 8) & 4095, k]
    x, y, z, dx, dy = ray
    x, y, z = x + far * dx, y + far * dy, z + far * slope
    across, down = (y if axis == 0 else x), (y if axis == 2 else z)
    across, down = int((across - math.floor(across)) * _TEXELS), int((down - math.floor(down)) * _TEXELS)
    light = (1.0 if slope < 0 else 0.5) if axis == 2 else (0.8 if axis == 0 else 0.62)
    if hit & 1:
        light *= 0.68
    colour = block
    if block == GRASS and axis != 2 and down < _TEXELS - 2 - (_hash(face, across, 7) < 0.5):
        colour = DIRT
    norm = math.sqrt(dx * dx + dy * dy + slope * slope)
    # Texels finer than pixels would flicker: their grain fades.
    grain = _GRAIN[block] * min(px / (2 * _SLOPE * _TEXELS * far + 1e-9), 1.0)
    if block == TRUNK and axis != 2:
        down = 0  # bark
    elif block in (STONE, WATER):
        across >>= 1
    light *= 1 + _PATCH[block] * (_hash(face >> 2, 0, 3) - 0.5) + grain * (_hash(face, across, down) - 0.5)
    fog = min(max((far * norm / _FAR - 0.3) / 0.7, 0.0), 1.0)
    fog *= 2 - fog
    if block == WATER:
        fog = max(fog, 0.75 * (1 + min(slope, 0.0) / norm) ** 4)  # reflects the sky, more at grazing angles
    light *= 1 - fog
    return (
        light * _COLOUR[colour, 0] + fog * _HORIZON[0],
        light * _COLOUR[colour, 1] + fog * _HORIZON[1],
        light * _COLOUR[colour, 2] + fog * _HORIZON[2],
    )


@njit(cache=True)
def _sky(clouds, size, x, y, dx, dy, slope):
    """The colour of the sky, with clouds that repeat as the land does."""
    share = min(max(1.3 * slope, 0.0), 1.0)
    cloud = 0.0
    if slope > 0.08:
        cell = size / len(clouds)
        i = math.floor((x + dx / slope * _CLOUDS) / cell) % len(clouds)
        j = math.floor((y + dy / slope * _CLOUDS) / cell) % len(clouds)
        if clouds[i, j]:
            cloud = 0.7 * min((slope - 0.08) / 0.25, 1.0)
    return (
        (1 - cloud) * (_HORIZON[0] + share * (_ZENITH[0] - _HORIZON[0])) + cloud * 250,
        (1 - cloud) * (_HORIZON[1] + share * (_ZENITH[1] - _HORIZON[1])) + cloud * 250,
        (1 - cloud) * (_HORIZON[2] + share * (_ZENITH[2] - _HORIZON[2])) + cloud * 252,
    )
