"""Replays of Push-T demonstrations in the simulator."""

import numpy as np

from diffusion_forcing.imitation.pusht.env import PushT, _coverage, _push


def replay(demonstrations, i):
    """States (t+1, 5) and coverage (t,) after each action of demonstration i, executed from its first state."""
    one = demonstrations.subset([i])
    pusht = PushT(1)
    states, coverage = [pusht.reset_to(one.states[0][0])[0]], []
    env = pusht.envs[0]
    for x, y in one.actions[0].tolist():  # to the end, whatever the coverage
        _push(env, x, y)
        states.append(pusht.states[0])
        coverage.append(_coverage(env))
    return np.array(states), np.array(coverage)
