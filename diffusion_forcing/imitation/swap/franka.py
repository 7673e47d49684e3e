"""An arm with the Franka Panda's kinematics and limits at a table with three plates and two fruits, simulated by MuJoCo.

The arm is made of capsules and boxes; its frames follow the published (modified) Denavit-Hartenberg table, its masses are close to
measured ones. A pose is (7,): position of the point between the fingertips, a rotation vector from pointing straight down, and the
opening between the fingers, in metres and radians. Control is at 20 Hz, torque at 100 Hz.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

try:
    import mujoco
except ModuleNotFoundError as error:
    raise ImportError("the robot arm is simulated by MuJoCo: pip install 'diffusion_forcing[imitation]'") from error
except Exception as error:  # it loads the renderer that $MUJOCO_GL names as soon as it is imported
    asked = os.environ.get("MUJOCO_GL")
    raise ImportError(f"MuJoCo does not start with MUJOCO_GL={asked} ({error!r}); unset it, or set MUJOCO_GL=egl") from error

from .scene import (
    CONTROL_DT,
    DOWN,
    FINGERTIP,
    FRONT,
    FRONT_VIEW,
    FRUIT_COLOURS,
    HAND,
    HAND_VIEW,
    HOME,
    MAX_OPENING,
    PLATE,
    RADIUS,
    REST,
    RIM,
    SLOT_HALF,
    SLOTS,
    WALL,
    Array,
    Image,
    camera_axes,
    rotation_matrix,
    rotation_vector,
)

LINKS = (  # a, d, alpha of the published table (modified convention), then limits of the angle, torque (Nm) and mass (kg)
    (0.0, 0.333, 0.0, -2.8973, 2.8973, 87.0, 4.97),
    (0.0, 0.0, -math.pi / 2, -1.7628, 1.7628, 87.0, 0.65),
    (0.0, 0.316, math.pi / 2, -2.8973, 2.8973, 87.0, 3.23),
    (0.0825, 0.0, math.pi / 2, -3.0718, -0.0698, 87.0, 3.59),
    (-0.0825, 0.384, -math.pi / 2, -2.8973, 2.8973, 12.0, 1.23),
    (0.0, 0.0, math.pi / 2, -0.0175, 3.7525, 12.0, 1.67),
    (0.088, 0.0, math.pi / 2, -2.8973, 2.8973, 12.0, 0.74),
)
FLANGE = 0.107
"""From the last joint to the flange."""
READY = (0.0, -0.35340, 0.0, -2.52115, 0.0, 2.16775, math.pi / 4)
"""Angles (7,) of the arm at HOME, and the goal of its null-space control."""
STIFFNESS = np.array([400.0, 400.0, 400.0, 300.0, 300.0, 300.0])
TORQUES = np.array([link[5] for link in LINKS])
TIMESTEP = 0.005
GRIP, SLIPPERY = 1.0, 0.02
"""Friction of the fingers, and while a grasp is to fail."""
_SHAPES = (  # capsules of each link in its own frame: from, to, radius
    ("0 0 -.19 0 0 0 .06",), ("0 0 -.06 0 0 .06 .058", "0 0 0 0 -.13 0 .057"), ("0 0 -.16 0 0 -.03 .055", "0 0 -.03 .0825 0 0 .05"),
    ("0 0 -.05 0 0 .05 .055", "0 0 0 -.0825 .09 0 .05"), ("0 0 -.27 0 0 -.08 .05", "0 .05 -.2 0 .05 0 .03"),
    ("0 0 -.05 0 0 .03 .05", "0 0 0 .088 0 0 .045"), ("0 0 -.02 0 0 .075 .043",),
)  # fmt: skip


def scene(px: int) -> str:
    """MJCF of arm, table, plates, fruits and the two cameras."""
    plates = "".join(_plate(name, place) for name, place in SLOTS.items())
    front = _camera(*FRONT, up=(0, 0, 1))
    return f"""
<mujoco model="swap">
  <compiler angle="radian" autolimits="true"/>
  <option timestep="{TIMESTEP}" integrator="implicitfast" cone="elliptic" impratio="10" iterations="30"/>
  <visual>
    <global offwidth="{px}" offheight="{px}"/>
    <quality offsamples="4" numslices="16" numstacks="10"/>
    <headlight ambient=".45 .45 .45" diffuse=".35 .35 .35" specular="0 0 0"/>
    <map znear=".02" zfar="10"/>
  </visual>
  <default>
    <default class="arm">
      <joint armature=".1" damping="1"/>
      <geom contype="0" conaffinity="0" rgba=".93 .93 .95 1" group="1"/>
    </default>
    <default class="finger">
      <joint type="slide" range="0 {MAX_OPENING / 2}" armature=".05" damping="30"/>
      <geom type="box" mass=".015" contype="1" conaffinity="0" priority="1" condim="6" friction="{GRIP} .02 .001" rgba=".15 .15 .18 1"/>
    </default>
    <default class="fruit">
      <geom type="sphere" size="{RADIUS}" mass=".12" contype="2" conaffinity="3" condim="6" friction="1 .01 .002"/>
    </default>
    <default class="table">
      <geom type="box" contype="2" conaffinity="1" condim="6" friction="1 .01 .002"/>
    </default>
  </default>
  <worldbody>
    <light directional="true" pos="1 .5 2" dir="-.5 -.25 -1" diffuse=".4 .4 .4" specular="0 0 0" castshadow="false"/>
    <geom class="table" name="table" size=".45 .6 .05" pos=".4 0 -.05" rgba=".80 .78 .72 1"/>
    <geom class="table" type="plane" size="3 3 .1" pos="0 0 -.1" rgba=".55 .58 .60 1"/>
    {plates}
    <camera name="front" {front} fovy="{FRONT_VIEW}"/>
    <body name="link0" childclass="arm">
      <geom type="capsule" fromto="0 0 0 0 0 .12" size=".07" mass="3"/>
      {_links(0)}
    </body>
    <body name="apple" pos="0 0 {REST}"><freejoint/><geom class="fruit" name="apple" rgba="{_rgb(0)} 1"/></body>
    <body name="orange" pos="0 .1 {REST}"><freejoint/><geom class="fruit" name="orange" rgba="{_rgb(1)} 1"/></body>
  </worldbody>
  <equality><joint joint1="right" joint2="left" polycoef="0 1 0 0 0"/></equality>
  <actuator>
    {"".join(f'<motor joint="joint{i + 1}" ctrlrange="{-link[5]} {link[5]}"/>' for i, link in enumerate(LINKS))}
    <position joint="left" kp="1000" kv="20" forcerange="-25 25" ctrlrange="0 {MAX_OPENING / 2}"/>
    <position joint="right" kp="1000" kv="20" forcerange="-25 25" ctrlrange="0 {MAX_OPENING / 2}"/>
  </actuator>
</mujoco>"""


def _rgb(fruit: int) -> str:
    return " ".join(f"{value / 255:.3f}" for value in FRUIT_COLOURS[fruit])


def _plate(name: str, place: tuple[float, float]) -> str:
    """A square plate with a low rim, dark on the light table."""
    x, y = place
    half, wall, colour = SLOT_HALF, WALL / 2, 'rgba=".16 .27 .42 1"'
    height = (PLATE + RIM) / 2
    walls = "".join(
        f'<geom class="table" size="{sx} {sy} {height}" pos="{x + dx} {y + dy} {height}" rgba=".30 .45 .62 1"/>'
        for sign in (-1, 1)
        for sx, sy, dx, dy in (
            (wall, half + WALL, sign * (half + wall), 0.0), (half + WALL, wall, 0.0, sign * (half + wall)),
        )
    )  # fmt: skip
    return f'<geom class="table" name="{name}" size="{half} {half} {PLATE / 2}" pos="{x} {y} {PLATE / 2}" {colour}/>{walls}'


def _links(i: int) -> str:
    """Body i and everything attached to it: its parent's frame rotated by alpha, translated by a and d, then rotated by the joint."""
    if i == len(LINKS):
        return _hand()
    a, d, alpha, low, high, _, mass = LINKS[i]
    shapes = "".join(
        f'<geom type="capsule" fromto="{" ".join(shape.split()[:6])}" size="{shape.split()[6]}" mass="{mass / len(_SHAPES[i])}"/>'
        for shape in _SHAPES[i]
    )
    return f"""<body name="link{i + 1}" pos="{a} {-d * math.sin(alpha)} {d * math.cos(alpha)}" \
quat="{math.cos(alpha / 2)} {math.sin(alpha / 2)} 0 0"><joint name="joint{i + 1}" axis="0 0 1" range="{low} {high}"/>{shapes}
{_links(i + 1)}</body>"""


def _hand() -> str:
    turn = -math.pi / 8  # half of the 45 degrees between flange and hand
    camera = _camera(*HAND, up=(1, 0, 0))
    fingers = "".join(
        f"""<body name="{name}" pos="0 0 .0584" quat="{quat}"><joint class="finger" name="{name}" axis="0 1 0"/>
<geom class="finger" name="{name}" size=".011 .006 .027" pos="0 .006 .0265"/></body>"""
        for name, quat in (("left", "1 0 0 0"), ("right", "0 0 0 1"))
    )
    return f"""<body name="hand" pos="0 0 {FLANGE}" quat="{math.cos(turn)} 0 0 {math.sin(turn)}">
<geom type="box" size=".03 .095 .028" pos="0 0 .03" mass=".7" rgba=".75 .76 .80 1"/>
<camera name="hand" {camera} fovy="{HAND_VIEW}"/><site name="tip" pos="0 0 {FINGERTIP}" size=".001" group="5"/>{fingers}</body>"""


def _camera(place: Sequence[float], at: Sequence[float], up: Sequence[float]) -> str:
    """A camera's position and axes: right and up of the image."""
    axes = " ".join(f"{value:.6f}" for value in camera_axes(place, at, up)[:2].ravel())
    return f'pos="{place[0]} {place[1]} {place[2]}" xyaxes="{axes}"'


# ---------------------------------------------------------------- control


class Franka:
    """The arm at its table, a `Simulator` of `SwapEnv`."""

    def __init__(self, px: int = 64) -> None:
        self.px = px
        self.model = mujoco.MjModel.from_xml_string(scene(px))
        self.data = mujoco.MjData(self.model)
        self.tip = self.model.site("tip").id
        self._pads = [self.model.geom(name).id for name in ("left", "right")]
        self._balls = [self.model.geom(name).id for name in ("apple", "orange")]
        self._free = [int(self.model.body(name).jntadr[0]) for name in ("apple", "orange")]
        self._at = [int(self.model.jnt_qposadr[joint]) for joint in self._free]
        self._moves = [int(self.model.jnt_dofadr[joint]) for joint in self._free]
        self._jacobian = np.zeros((6, self.model.nv))
        self._solved = np.zeros((6, self.model.nv))
        self._renderer: Renderer | None = None
        self.reset([SLOTS["A"], SLOTS["B"]])

    def reset(self, places: Sequence[Sequence[float]]) -> None:
        """The arm at home, and the fruits at rest at places 2 x (x, y)."""
        model, data = self.model, self.data
        mujoco.mj_resetData(model, data)
        self.slip(False)
        data.qpos[:7], data.qpos[7:9] = READY, MAX_OPENING / 2
        for at, place in zip(self._at, places, strict=True):
            data.qpos[at : at + 7] = (place[0], place[1], REST, 1, 0, 0, 0)
        mujoco.mj_forward(model, data)
        for _ in range(4):  # until the fruits lie on their plates and the arm is where its controller holds it
            self.move(HOME)

    def move(self, goal: Sequence[float]) -> None:
        """One control step towards a pose (7,)."""
        model, data = self.model, self.data
        place, axes = np.array(goal[:3]), rotation_matrix(goal[3:6]) @ DOWN
        data.ctrl[7:9] = goal[6] / 2
        for _ in range(round(CONTROL_DT / 0.01)):
            mujoco.mj_step1(model, data)
            data.ctrl[:7] = self.torque(place, axes)
            mujoco.mj_step2(model, data)
            for _ in range(round(0.01 / TIMESTEP) - 1):
                mujoco.mj_step(model, data)
        mujoco.mj_kinematics(model, data)
        self._read()

    def torque(self, place: Array, axes: Array) -> Array:
        """(7,): operational-space control of the hand to a place (3,) with axes (3, 3), critically damped; the null space goes to READY."""
        model, data, jacobian = self.model, self.data, self._jacobian
        mujoco.mj_jacSite(model, data, jacobian[:3], jacobian[3:], self.tip)
        mujoco.mj_solveM(model, data, self._solved, jacobian)
        arm = jacobian[:, :7]
        inverse = self._solved[:, :7]  # inverse inertia times the Jacobian
        now = data.site_xmat[self.tip].reshape(3, 3)
        miss = np.empty(6)
        miss[:3] = place - data.site_xpos[self.tip]
        miss[3:] = rotation_vector(axes @ now.T)
        speed = data.qvel[:7]
        acceleration = STIFFNESS * miss - 2 * np.sqrt(STIFFNESS) * (arm @ speed)
        inertia = np.linalg.inv(arm @ inverse.T)  # of the hand
        rest, pull = np.zeros(model.nv), np.zeros(model.nv)
        pull[:7] = 40 * (READY - data.qpos[:7]) - 2 * math.sqrt(40) * speed
        mujoco.mj_mulM(model, data, rest, pull)
        torque = arm.T @ (inertia @ (acceleration - inverse @ rest[:7])) + rest[:7] + data.qfrc_bias[:7]
        clipped: Array = np.clip(torque, -TORQUES, TORQUES)
        return clipped

    def push(self, fruit: int, velocity: Sequence[float]) -> None:
        """Roll a fruit with a velocity (2,)."""
        at, (x, y) = self._moves[fruit], velocity
        self.data.qvel[at : at + 2] = x, y
        if x or y:
            turn = np.array([-y / RADIUS, x / RADIUS, 0.0])
            place = self._at[fruit]
            to_own = np.zeros(9)
            mujoco.mju_quat2Mat(to_own, self.data.qpos[place + 3 : place + 7])
            self.data.qvel[at + 3 : at + 6] = to_own.reshape(3, 3).T @ turn
        else:
            self.data.qvel[at + 2 : at + 6] = 0.0

    def slip(self, slippery: bool) -> None:
        """Set whether grasps fail."""
        self.model.geom_friction[self._pads, 0] = SLIPPERY if slippery else GRIP

    def render(self, camera: str) -> Image:
        """(px, px, 3)"""
        if self._renderer is None:
            self._renderer = Renderer(self.model, self.px)
        mujoco.mj_comPos(self.model, self.data)
        mujoco.mj_camlight(self.model, self.data)
        return self._renderer.render(self.data, self.model.camera(camera).id)

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def _read(self) -> None:
        data = self.data
        self.fruits = [data.qpos[at : at + 3].tolist() for at in self._at]
        self.speeds = [math.sqrt(float(data.qvel[at : at + 3] @ data.qvel[at : at + 3])) for at in self._moves]
        turned = rotation_vector(data.site_xmat[self.tip].reshape(3, 3) @ DOWN)
        self.hand: list[float] = [*data.site_xpos[self.tip].tolist(), *turned, float(data.qpos[7] + data.qpos[8])]
        met = {(min(pair), max(pair)) for pair in data.contact.geom.tolist()}
        pads = [[(min(pad, ball), max(pad, ball)) in met for pad in self._pads] for ball in self._balls]
        self.touched = [any(both) for both in pads]
        self.held = next((fruit for fruit, both in enumerate(pads) if all(both)), None)


# ---------------------------------------------------------------- rendering


class NoRenderer(ImportError, RuntimeError):
    """No OpenGL context could be made. An ImportError, so that a command prints what to install without a traceback."""


class Renderer:
    """Images of a model without a display. Close it: graphics memory is not freed otherwise."""

    def __init__(self, model: Any, px: int) -> None:
        self._model, self._px = model, px
        self._context = _context(px)
        self._scene = mujoco.MjvScene(model, maxgeom=200)
        self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        self._option, self._camera = mujoco.MjvOption(), mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._context.make_current()
        self._render = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._render)

    def render(self, data: Any, camera: int) -> Image:
        """(px, px, 3)"""
        self._context.make_current()
        self._camera.fixedcamid = camera
        every = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(self._model, data, self._option, None, self._camera, every, self._scene)
        view = mujoco.MjrRect(0, 0, self._px, self._px)
        mujoco.mjr_render(view, self._scene, self._render)
        image = np.empty((self._px, self._px, 3), np.uint8)
        mujoco.mjr_readPixels(image, None, view, self._render)
        return np.ascontiguousarray(image[::-1])

    def close(self) -> None:
        self._context.make_current()
        self._render.free()
        self._context.free()


def _context(px: int) -> Any:
    """An OpenGL context: of $MUJOCO_GL if that is set, else EGL, else OSMesa."""
    asked = os.environ.get("MUJOCO_GL", "").lower()
    platform = os.environ.get("PYOPENGL_PLATFORM")
    failures = []
    for kind in (asked,) if asked in ("egl", "osmesa", "glfw") else ("egl", "osmesa"):
        try:
            return importlib.import_module(f"mujoco.{kind}").GLContext(px, px)
        except Exception as error:  # drivers fail in ways of their own
            failures.append(f"{kind}: {type(error).__name__}: {error}")
            if platform is None:  # PyOpenGL keeps the first platform it was given, whether or not that works
                os.environ.pop("PYOPENGL_PLATFORM", None)
                for name in [name for name in sys.modules if name.split(".")[0] == "OpenGL" or name.startswith(f"mujoco.{kind}")]:
                    del sys.modules[name]
    raise NoRenderer(
        f"no renderer starts ({'; '.join(failures)}). Install one: apt install libegl1 libgl1-mesa-dri for EGL, or libosmesa6 for OSMesa, "
        "and set MUJOCO_GL=egl or MUJOCO_GL=osmesa"
    )
