"""Each pretrained model loads and acts or samples once, as a model does that was trained for it."""

import numpy as np
import pytest
import torch

from diffusion_forcing.engine.pretrained import pretrained_names, run_folder
from diffusion_forcing.engine.run import load_run
from diffusion_forcing.imitation.agent import ImitationAgent
from diffusion_forcing.planning.agent import PlanningAgent

MAZES = tuple(f"maze2d-{maze}{network}" for maze in ("large", "medium", "umaze") for network in ("", "-gru"))
VIDEOS, ROBOTS = ("labyrinth", "voxels"), ("pusht", "swap")


def test_every_pretrained_model_is_tested_here():
    assert pretrained_names() == sorted((*MAZES, *VIDEOS, *ROBOTS))


@pytest.mark.parametrize("name", MAZES)
def test_a_planner_acts_and_its_plan_reaches_the_goal_through_free_cells(name):
    agent = PlanningAgent.from_pretrained(name)
    start, goal = np.array([[*agent.maze.cells[0], 0.0, 0.0]], float), agent.maze.goal[None]
    action = agent.act(start, goal)
    assert action.shape == (1, 2)
    assert (np.abs(action) <= 1).all()
    path = agent.propose(start, goal).position[0].numpy().astype(float)
    assert np.linalg.norm(path[0] - start[0, :2]) < 0.1
    assert np.linalg.norm(path - goal, axis=1).min() < 0.3
    assert agent.maze.inside(path).mean() > 0.6


@pytest.mark.parametrize("name", VIDEOS)
def test_a_world_model_predicts_the_next_frames_better_than_by_standing_still(name):
    pytest.importorskip("numba" if name == "voxels" else "torch")
    experiment, model = load_run(run_folder(name))
    task = experiment.task
    real, actions = task.test_clips(1, 16)
    chunks = task.roll_out(model, 8, real[:, :8], actions, generator=torch.Generator().manual_seed(0))
    frames = np.concatenate(list(chunks), axis=1)
    assert (frames.shape, frames.dtype) == ((1, 8, 64, 64, 3), np.uint8)
    assert error(frames, real[:, 8:]) < 0.8 * error(real[:, 7:8], real[:, 8:])
    fresh = np.concatenate(list(task.roll_out(model, 4, None, actions[:, :4], generator=torch.Generator().manual_seed(0))), axis=1)
    assert 10 < fresh.std() < 90, "frames from nothing show something"


def test_the_arm_sets_out_like_the_expert():
    pytest.importorskip("gymnasium")
    from diffusion_forcing.imitation.swap.env import SwapEnv
    from diffusion_forcing.imitation.swap.expert import Expert

    agent, env = ImitationAgent.from_pretrained("swap"), SwapEnv(simulator="kinematic")
    observation, _ = env.reset(seed=0)
    expert = Expert(env, 0)
    for _ in range(3):
        (actions,) = agent.act(observation)
        wanted = np.empty_like(actions)
        for i in range(len(actions)):
            wanted[i] = expert.act()
            observation, *_ = env.step(wanted[i])
        assert np.abs(actions - wanted)[:, :3].max() < 0.08, "metres"


def test_the_disc_moves_smoothly_from_where_it_is():
    pytest.importorskip("gym_pusht")
    from diffusion_forcing.imitation.pusht.env import PushT

    agent, task = ImitationAgent.from_pretrained("pusht"), load_run(run_folder("pusht"))[0].task
    states = PushT(2).reset(published=True)
    agent.reset(2)
    actions = agent.act({"state": task.world.features(states)})
    assert actions.shape == (2, 8, 2)
    path = np.concatenate([states[:, None, :2], actions], axis=1)
    assert np.linalg.norm(np.diff(path, axis=1), axis=-1).max() < 120, "pixels"


def error(frames, truth):
    return float(((frames.astype(float) - truth) ** 2).mean())
