"""The simulated arm: kinematics and limits as published, and images without a display."""

import sys

import numpy as np
import pytest
from small import dforce, flat
from swaps import begin, stay

from diffusion_forcing.imitation.swap.env import SwapEnv
from diffusion_forcing.imitation.swap.scene import CAMERAS, DOWN, HIGH, HOME, LOW, SLOTS, rotation_matrix, rotation_vector

franka = pytest.importorskip("diffusion_forcing.imitation.swap.franka", reason="MuJoCo does not start here", exc_type=ImportError)
DH = [  # the maker's table, modified convention: a, d, alpha of joints 1 to 7 and of the flange
    (0, 0.333, 0), (0, 0, -np.pi / 2), (0, 0.316, np.pi / 2), (0.0825, 0, np.pi / 2), (-0.0825, 0.384, -np.pi / 2),
    (0, 0, np.pi / 2), (0.088, 0, np.pi / 2), (0, 0.107, 0),
]  # fmt: skip
LIMITS = np.array([[-2.8973, 2.8973], [-1.7628, 1.7628], [-2.8973, 2.8973], [-3.0718, -0.0698], [-2.8973, 2.8973], [-0.0175, 3.7525],
                   [-2.8973, 2.8973]])  # fmt: skip


@pytest.fixture(scope="module")
def arm():
    return franka.Franka(16)


def test_the_hand_is_where_the_published_table_puts_it(arm):
    rng = np.random.default_rng(0)
    for angles in [np.array(franka.READY), *rng.uniform(*LIMITS.T, (12, 7))]:
        pose = np.eye(4)
        for (a, d, alpha), angle in zip(DH, [*angles, 0], strict=True):
            ca, sa, c, s = np.cos(alpha), np.sin(alpha), np.cos(angle), np.sin(angle)
            pose = pose @ np.array([[c, -s, 0, a], [s * ca, c * ca, -sa, -d * sa], [s * sa, c * sa, ca, d * ca], [0, 0, 0, 1]])
        turn = np.eye(4)
        turn[:3, :3] = rotation_matrix((0, 0, -np.pi / 4))  # from the flange to the hand
        turn[2, 3] = 0.1034
        pose = pose @ turn
        arm.data.qpos[:7] = angles
        franka.mujoco.mj_kinematics(arm.model, arm.data)
        np.testing.assert_allclose(arm.data.site_xpos[arm.tip], pose[:3, 3], atol=1e-9)
        np.testing.assert_allclose(arm.data.site_xmat[arm.tip].reshape(3, 3), pose[:3, :3], atol=1e-9)


def test_limits_of_angles_and_torques_are_as_published(arm):
    np.testing.assert_allclose(arm.model.jnt_range[:7], LIMITS)
    torques = np.array([87, 87, 87, 87, 12, 12, 12])
    np.testing.assert_allclose(arm.model.actuator_ctrlrange[:7], np.stack([-torques, torques], 1))
    assert 15 < arm.model.body_mass.sum() < 25
    arm.reset([SLOTS["A"], SLOTS["B"]])
    for goal in (np.array([5.0, 5, 5]), np.array([-5.0, 0, 1])):
        torque = arm.torque(goal, DOWN)
        assert (np.abs(torque) <= torques).all()
        assert (np.abs(torque) == torques).any()


def test_random_actions_stay_within_limits(physics):
    begin(physics)
    for action in np.random.default_rng(0).uniform(-3, 3, (150, 7)):
        physics.step_many(action[None], render=False)
        assert np.isfinite(physics.pose).all()
        angles = physics.simulator.data.qpos[:7]
        assert (angles > LIMITS[:, 0] - 0.02).all()
        assert (angles < LIMITS[:, 1] + 0.02).all()
        assert (physics.pose[:3] > np.array(LOW[:3]) - 0.05).all()
        assert (physics.pose[:3] < np.array(HIGH[:3]) + 0.05).all()


@pytest.mark.parametrize(
    "goal", [HOME, (0.5, 0.2, 0.15, 0.05, -0.1, 0.4, 0.05), (0.36, -0.25, 0.3, 0, 0.2, -0.5, 0.08), (0.64, 0.1, 0.06, 0, 0, 0, 0)]
)
def test_the_hand_reaches_a_pose(physics, goal):
    begin(physics)
    stay(physics, 40, goal)
    np.testing.assert_allclose(physics.pose[:3], goal[:3], atol=0.002)
    np.testing.assert_allclose(physics.pose[3:6], goal[3:6], atol=0.01)
    assert abs(physics.pose[6] - goal[6]) < 0.003


def test_rotation_vectors_and_matrices_are_inverse():
    for vector in [*np.random.default_rng(0).uniform(-1.5, 1.5, (10, 3)), np.zeros(3), np.full(3, 1e-12)]:
        matrix = rotation_matrix(vector)
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(3), atol=1e-12)
        np.testing.assert_allclose(rotation_vector(matrix), vector, atol=1e-9)


def test_images_are_the_same_for_a_seed_and_a_new_renderer(rendered):
    first, _ = rendered.reset(seed=4)
    rendered.close()
    again, _ = rendered.reset(seed=4)
    other = SwapEnv(px=64)
    elsewhere, _ = other.reset(seed=4)
    np.testing.assert_array_equal(rendered.simulator.render("front"), first["front"])
    other.close()
    for camera in CAMERAS:
        np.testing.assert_array_equal(first[camera], again[camera])
        np.testing.assert_array_equal(first[camera], elsewhere[camera])
    picture = rendered.render()
    assert picture.shape == (64, 128, 3)


def test_no_renderer_says_what_to_install(monkeypatch):
    def fails(name):
        raise ImportError(f"{name} is not here")

    monkeypatch.setattr(franka.importlib, "import_module", fails)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setenv("PYOPENGL_PLATFORM", "egl")
    with pytest.raises(RuntimeError, match=r"no renderer starts \(egl: .*osmesa: .*apt install"):
        franka._context(16)


def test_a_command_without_a_renderer_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path))
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    monkeypatch.setitem(sys.modules, "mujoco.glfw", None)
    assert dforce("data", "swap") == 2
    words = flat(capsys.readouterr().err)
    assert "no renderer starts (glfw: ModuleNotFoundError: " in words
    assert "Install one: apt install libegl1" in words
    assert "Traceback" not in words
