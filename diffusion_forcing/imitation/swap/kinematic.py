"""A kinematic simulator of the swap: no forces, NumPy only. Tens of thousands of steps a second, for tests; results come from MuJoCo.

The hand lags a little behind its goal, fingers close at a constant speed, and a fruit that is between them when they meet it is carried
rigidly. A fruit that is released falls straight down. The cameras are those of `franka`, drawn as discs on a plane.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .scene import (
    CONTROL_DT,
    DOWN,
    FINGERTIP,
    FRONT,
    FRONT_VIEW,
    FRUIT_COLOURS,
    FRUITS,
    HAND,
    HAND_VIEW,
    HOME,
    RADIUS,
    REST,
    SLOT_HALF,
    SLOTS,
    WALL,
    Array,
    Image,
    camera_axes,
    rotation_matrix,
)

LAG = 0.45
"""Share of the distance to its goal that is left after a step."""
CLOSING = 0.015
"""Metres that the fingers open or close in a step."""
ACROSS, ALONG, UPWARDS = 0.010, 0.015, 0.015
"""How far a fruit may be from the middle of the fingertips to be grasped: from finger to finger, along their width, and in height."""
FALL = 0.02
"""Metres that a fruit falls in a step."""
COLOURS = {
    "floor": (140, 148, 153), "table": (204, 199, 184), "plate": (41, 69, 107), "rim": (77, 115, 158), "arm": (225, 225, 230),
    "finger": (38, 38, 46), **dict(zip(FRUITS, FRUIT_COLOURS, strict=True)),
}  # fmt: skip


class Kinematic:
    """A `Simulator` of `SwapEnv` without physics."""

    def __init__(self, px: int = 64) -> None:
        self.px = px
        self.reset([SLOTS["A"], SLOTS["B"]])

    def reset(self, places: Sequence[Sequence[float]]) -> None:
        self.fruits = [[float(x), float(y), REST] for x, y in places]
        self.speeds = [0.0, 0.0]
        self.hand = list(HOME)
        self.held: int | None = None
        self.touched = [False, False]
        self._carried = (0.0, 0.0, 0.0)
        self._pushed: list[tuple[float, float] | None] = [None, None]
        self._slippery = False

    def move(self, goal: Sequence[float]) -> None:
        """One control step towards a pose (7,)."""
        hand = self.hand
        for i in range(6):
            hand[i] += (1 - LAG) * (goal[i] - hand[i])
        least = 0.0
        if self.held is not None and goal[6] >= 2 * RADIUS:
            self.held = None
        near = self.held if self.held is not None else self._between()
        if near is not None:
            least = 2 * RADIUS
        was_wide = hand[6] > least
        hand[6] = min(max(goal[6], hand[6] - CLOSING, least), hand[6] + CLOSING)
        if self.held is None and near is not None and was_wide and hand[6] <= least:
            self.held = near
            here = self.fruits[near]
            self._carried = (here[0] - hand[0], here[1] - hand[1], here[2] - hand[2])
        for i in (0, 1):
            self._carry_or_fall(i)

    def push(self, fruit: int, velocity: Sequence[float]) -> None:
        self._pushed[fruit] = (velocity[0], velocity[1])

    def slip(self, slippery: bool) -> None:
        self._slippery = slippery

    def render(self, camera: str) -> Image:
        """(px, px, 3)"""
        tip = np.array(self.hand[:3])
        axes = rotation_matrix(self.hand[3:6]) @ DOWN
        discs: list[tuple[Any, float, str]] = [(np.array(place), RADIUS, name) for place, name in zip(self.fruits, FRUITS, strict=True)]
        half = self.hand[6] / 2 + 0.006
        for side in (-half, half):
            discs += [(tip + axes @ (0.0, side, -up), 0.010, "finger") for up in (0.0, 0.015, 0.03)]
        if camera == "hand":
            back = (0.0, 0.0, FINGERTIP)
            place = tip + axes @ np.subtract(HAND[0], back)
            view = camera_axes(*HAND, up=(1, 0, 0)) @ axes.T
            return _draw(self.px, place, view, HAND_VIEW, discs)
        discs += [(tip + axes @ (0.0, side, -0.075), 0.028, "arm") for side in (-0.06, -0.02, 0.02, 0.06)]
        wrist = tip + axes @ (0.0, 0.0, -0.16)
        discs += [(wrist + share * (np.array([0.1, 0.0, 0.6]) - wrist), 0.05, "arm") for share in np.linspace(0, 0.9, 10)]
        return _draw(self.px, np.array(FRONT[0]), camera_axes(*FRONT, up=(0, 0, 1)), FRONT_VIEW, discs)

    def close(self) -> None:
        pass

    def _between(self) -> int | None:
        """The fruit between the open fingers."""
        x, y, z, _, _, turn, _ = self.hand
        for i in (0, 1):
            dx, dy, dz = self.fruits[i][0] - x, self.fruits[i][1] - y, self.fruits[i][2] - z
            if abs(dz) > UPWARDS:
                continue
            cos, sin = math.cos(turn), math.sin(turn)
            if abs(dx * cos + dy * sin) < ALONG and abs(dy * cos - dx * sin) < ACROSS:
                return i
        return None

    def _carry_or_fall(self, i: int) -> None:
        here, hand = self.fruits[i], self.hand
        x, y, z = here
        if self.held == i:
            to = [hand[0] + self._carried[0], hand[1] + self._carried[1], max(hand[2] + self._carried[2], REST)]
            if self._slippery and hand[2] > REST + 0.01:
                self.held = None
            else:
                here[:] = to
        elif z > REST:
            here[2] = max(z - FALL, REST)
        push = self._pushed[i]
        if push is not None:
            here[0] += push[0] * CONTROL_DT
            here[1] += push[1] * CONTROL_DT
            self._pushed[i] = None
        self.touched[i] = self.held == i
        self.speeds[i] = math.dist(here, (x, y, z)) / CONTROL_DT


def _draw(px: int, place: Array, view: Array, degrees: float, discs: list[tuple[Any, float, str]]) -> Image:
    """The table and spheres seen from a place (3,) with axes (3, 3), rows right, up and back; spheres as discs, far ones first."""
    scale = math.tan(math.radians(degrees) / 2)
    across = ((np.arange(px) + 0.5) / px * 2 - 1) * scale
    rays = across[None, :, None] * view[0] - across[:, None, None] * view[1] - view[2]  # (px, px, 3)
    down = np.where(rays[..., 2] < -1e-6, -rays[..., 2], np.inf)
    ground = place[:2] + rays[..., :2] * (place[2] / down)[..., None]
    colours = {name: np.array(colour, np.uint8) for name, colour in COLOURS.items()}
    image = np.broadcast_to(colours["floor"], (px, px, 3)).copy()
    image[(np.abs(ground - (0.4, 0.0)) < (0.45, 0.6)).all(-1) & np.isfinite(down)] = colours["table"]
    for middle in SLOTS.values():
        away = np.abs(ground - middle).max(-1)
        image[away < SLOT_HALF + WALL] = colours["rim"]
        image[away < SLOT_HALF] = colours["plate"]
    in_view = [(view @ (centre - place), radius, name) for centre, radius, name in discs]
    for (x, y, back), radius, name in sorted(in_view, key=lambda disc: disc[0][2]):
        if back > -0.01:
            continue
        inside = (across + x / back) ** 2 + (-across[:, None] + y / back) ** 2 < (radius / back) ** 2
        image[inside] = colours[name]
    return image
