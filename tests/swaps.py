"""Small tasks of the swap, an agent that solves it, and ways to bring it into a state."""

from types import SimpleNamespace

import numpy as np

from diffusion_forcing.imitation.swap.env import SwapEnv
from diffusion_forcing.imitation.swap.expert import Expert
from diffusion_forcing.imitation.swap.kinematic import Kinematic
from diffusion_forcing.imitation.swap.scene import HOME
from diffusion_forcing.imitation.swap.task import Swapping
from diffusion_forcing.imitation.task import Imitation
from diffusion_forcing.sampling import Sampler

K = 50
WORLD = Swapping(px=16, number=3, simulator="kinematic", held_out=1)
TASK = Imitation(WORLD, chunk=15, components=6, state=False, window=41, sampler=Sampler(steps=1))


def begin(env, seed=0, **options):
    return env.reset(seed=seed, options={"render": False, **options})


def rest_at(env, *places):
    """Lay apple and orange down at places (x, y, z)."""
    for fruit, place in enumerate(places):
        if isinstance(env.simulator, Kinematic):
            env.simulator.fruits[fruit][:] = place
        else:
            at, moves = env.simulator._at[fruit], env.simulator._moves[fruit]
            env.simulator.data.qpos[at : at + 3] = place
            env.simulator.data.qvel[moves : moves + 6] = 0
    env._rest = [0, 0]


def stay(env, steps, action=HOME):
    return env.step_many(np.tile(np.array(action), (steps, 1)), render=False)


class ExpertAgent:
    """An agent that acts as the scripted expert does in its own copies of the episodes, and notes the levels it is given."""

    shared_level = False

    def __init__(self, model, sensors=("front", "hand"), chunk=15, rest=0):
        self.model, self.sensors, self.levels, self.rest = model, sensors, [], rest
        self.codec = SimpleNamespace(shapes={"actions": (chunk, 7)})

    def reset(self, n):
        self.n, self.experts = n, None

    def begin(self, seeds):
        envs = [SwapEnv(16, "kinematic", steps=900) for _ in seeds]
        for env, seed in zip(envs, seeds, strict=True):
            env.reset(seed=seed, options={"render": False})
        self.experts = [Expert(env, seed) for env, seed in zip(envs, seeds, strict=True)]

    def act(self, observation, level):
        self.levels.append({name: np.array(one) for name, one in level.items()})
        if self.experts is None:
            self.begin(range(self.n))
        if len(self.levels) <= self.rest:
            return np.stack([np.tile(expert.env.simulator.hand, (self.codec.shapes["actions"][0], 1)) for expert in self.experts])
        chunks = []
        for expert in self.experts:
            chunk = []
            for _ in range(self.codec.shapes["actions"][0]):
                chunk.append(expert.act())
                expert.env.step_many(chunk[-1][None], render=False)
            chunks.append(np.stack(chunk))
        return np.stack(chunks)
