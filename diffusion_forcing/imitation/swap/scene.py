"""Geometry and limits of the swap, shared by the environment, its simulators, the expert and the task. Metres, radians, seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Image = NDArray[np.uint8]

SLOTS = {"A": (0.44, 0.15), "B": (0.44, -0.15), "C": (0.60, 0.0)}
"""Centres of the plates."""
FRUITS = ("apple", "orange")
FRUIT_COLOURS = np.array([[204.0, 15.0, 31.0], [255.0, 153.0, 13.0]])
CAMERAS = ("front", "hand")
SLOT_HALF, PLATE, RIM, WALL = 0.07, 0.004, 0.006, 0.005
"""Of a plate: half its side within the rim, its thickness, the rim's height above it, and the rim's thickness."""
RADIUS = 0.03
"""Of a fruit."""
REST = PLATE + RADIUS
"""Height of the centre of a fruit on a plate."""
INSIDE = 0.055
"""A fruit is in a slot if its centre is at most this far from the slot's, along x and along y. Touching the rim it is at 0.052."""
CONTROL_DT = 0.05
CHUNK, CHUNKS = 15, 40
"""Actions from one observation of the expert to the next, and how many times that is an episode."""
STEPS = CHUNK * CHUNKS
"""Actions of an episode."""
MAX_OPENING = 0.08
"""Between the fingers."""
HOME = (0.42, 0.0, 0.30, 0.0, 0.0, 0.0, MAX_OPENING)
"""Pose (7,) of the hand between moves."""
LOW = (0.30, -0.32, 0.020, -0.6, -0.6, -0.6, 0.0)
HIGH = (0.68, 0.32, 0.40, 0.6, 0.6, 0.6, MAX_OPENING)
"""Actions are clipped to these."""
MOVES = 3
"""Apple to C, orange to where the apple began, apple to where the orange began."""
FRONT = ((1.10, 0.0, 0.80), (0.455, 0.0, 0.10))
HAND = ((0.09, 0.0, 0.02), (0.06, 0.0, 0.12))
"""Of a camera: its position and the point it looks at; of the hand camera in the frame of the hand."""
FRONT_VIEW, HAND_VIEW = 31.0, 80.0
"""Fields of view in degrees."""
FINGERTIP = 0.1034
"""From the flange of the arm to the point between the fingertips."""
DOWN = np.diag([1.0, -1.0, -1.0])
"""Axes of a hand that points straight down."""
MIRROR = (1, -1, 1, -1, 1, -1, 1)
"""Factors of a pose or an action under reflection at y = 0: of y, and of rotations about x and z."""


def centre(slot: int) -> tuple[float, float]:
    """Of slot 0, 1 or 2."""
    return SLOTS["ABC"[slot]]


def rotation_matrix(vector: Sequence[float]) -> Array:
    """(3, 3) of a rotation vector (3,)."""
    x, y, z = (float(value) for value in vector)
    angle = math.sqrt(x * x + y * y + z * z)
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    if angle < 1e-9:
        return np.eye(3) + cross
    return cast(Array, np.eye(3) + math.sin(angle) / angle * cross + (1 - math.cos(angle)) / angle**2 * (cross @ cross))


def rotation_vector(matrix: Array) -> list[float]:
    """(3,) of a rotation (3, 3) by less than half a turn."""
    twice = (matrix[2, 1] - matrix[1, 2], matrix[0, 2] - matrix[2, 0], matrix[1, 0] - matrix[0, 1])
    sine = math.sqrt(twice[0] ** 2 + twice[1] ** 2 + twice[2] ** 2) / 2
    angle = math.atan2(sine, (float(np.trace(matrix)) - 1) / 2)
    scale = 0.5 if sine < 1e-9 else angle / (2 * sine)
    return [float(value) * scale for value in twice]


def camera_axes(position: Sequence[float], target: Sequence[float], up: Sequence[float]) -> Array:
    """(3, 3), rows: right and up of the image, and backwards."""
    back = np.subtract(position, target)
    right = np.cross(up, back)
    axes = np.stack([right, np.cross(back, right), back])
    return cast(Array, axes / np.linalg.norm(axes, axis=1, keepdims=True))
