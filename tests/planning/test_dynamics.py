"""The law of motion, fitted to data, and the constraint that it puts on tokens."""

import torch
from mazes import free_flight, streams
from oracles import seeded

from diffusion_forcing.planning.dynamics import fit_law_of_motion, in_free_flight
from diffusion_forcing.planning.envs.maze2d import DT, GEAR, MASS
from diffusion_forcing.planning.task import Maze2D
from diffusion_forcing.planning.tokens import frames_of


def test_the_law_of_motion_is_fitted_despite_contacts():
    frames, _ = frames_of(streams(100_000))
    law = fit_law_of_motion(frames)
    share = DT / (MASS + DT)
    expected = torch.zeros(7, 4, dtype=torch.float64)
    for axis in range(2):
        expected[axis, axis] = 1
        expected[2 + axis, 2 + axis], expected[4 + axis, 2 + axis] = 1 - share, GEAR * share
        expected[2 + axis, axis], expected[4 + axis, axis] = DT * (1 - share), DT * GEAR * share
    torch.testing.assert_close(law, expected, atol=1e-5, rtol=0)
    share_free = in_free_flight(frames, law).float().mean()
    assert 0.85 < share_free < 0.99
    assert in_free_flight(free_flight(4, 50)[0], law).all()


def test_the_constraint_holds_between_tokens_of_the_data_and_from_the_present_on():
    data = Maze2D("umaze", transitions=100_000).data()
    x = data.train.read(data.train.every(200)).x
    broken = data.constraint.residual(x).abs()
    assert broken[:, 0].median() < 1e-4
    assert broken[:, 1:].median() < 1e-4
    shuffled = data.constraint.residual(x[:, torch.randperm(x.shape[1], generator=seeded(0))]).abs()
    assert shuffled.median() > 0.1
