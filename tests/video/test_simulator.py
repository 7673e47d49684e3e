"""Roll-outs of the simulator: what a perfect model would show under the same actions, or the same policy."""

from dataclasses import replace

import numpy as np
from worlds import TASK, WORLD, quiet

from diffusion_forcing.video.simulator import follow_policy
from diffusion_forcing.video.task import Folder


def test_the_simulator_follows_actions_meant_for_elsewhere():
    """Other places than those of the clips, each under a clip's actions."""
    frames = TASK._simulate(3, quiet)
    truth, actions = TASK.test_clips(3, 10)
    assert frames.shape == truth.shape
    assert (frames != truth).any(axis=(1, 2, 3, 4)).all()
    visitor = WORLD.enter(int(np.random.SeedSequence([2_000_002]).generate_state(3, np.uint32)[1]))
    np.testing.assert_array_equal(frames[1], np.stack([visitor.step(action) for action in actions[1]]))


def test_the_simulator_follows_a_policy_that_sees_its_frames():
    task = replace(TASK, rollout=replace(TASK.rollout, actions="policy"))
    frames = follow_policy(WORLD, [3, 4], task.policy(quiet), 7, quiet)
    assert frames.shape == (2, 7, 16, 16, 3)
    np.testing.assert_array_equal(frames, follow_policy(WORLD, [3, 4], task.policy(quiet), 7, quiet))
    assert task._simulate(2, quiet).shape == (2, 2 + 8, 16, 16, 3)


def test_there_is_no_simulator_of_a_folder_or_without_actions():
    assert replace(TASK, action_conditioned=False)._simulate(3, quiet) is None
    assert replace(TASK, world=Folder(px=16))._simulate(3, quiet) is None
