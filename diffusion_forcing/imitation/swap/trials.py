"""Episodes of the swap in which an agent, or the scripted expert, is tried: the same starts and disturbances in every trial."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...engine.task import Progress
from ..agent import ImitationAgent
from ..corruption import KINDS, Corrupted, Corruption
from ..tokens import ACTIONS, STATE
from .data import EVALUATION_SEEDS, SimulatorName
from .env import Observation, SwapEnv
from .expert import Expert
from .scene import CAMERAS, CHUNK, STEPS

PARALLEL = 10
"""Episodes that run at once."""
FILMED = 6
"""Episodes of the film, at most."""


class TrialResult(NamedTuple):
    """Of n episodes: success (n,) and moves done (n,) after 600 actions, a film of the first (frames, 2 px, k px, 3), and the seconds of
    each decision. later: success (n,) after the extra actions, if there were any."""

    success: NDArray[np.bool_]
    moves: NDArray[np.int64]
    film: NDArray[np.uint8]
    seconds: list[float]
    later: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Trials:
    """Episodes with seeds EVALUATION_SEEDS * seed + 0 .. samples - 1. extra_steps: of an agent's episodes beyond STEPS, in whole chunks."""

    px: int
    simulator: SimulatorName
    samples: int
    seed: int
    extra_steps: int = 0

    def run_agent(self, agent: ImitationAgent, trial: str, level: int, progress: Progress) -> TrialResult:
        """trial: a kind of corruption; imagine: only the first observation is real; or clean. level: of corrupted cameras, or 0."""
        chunk = agent.codec.shapes[ACTIONS][0]
        usual, chunks = STEPS // chunk, (STEPS + self.extra_steps) // chunk
        envs: list[Any] = [SwapEnv(self.px, self.simulator, steps=STEPS + self.extra_steps) for _ in range(min(PARALLEL, self.samples))]
        if trial in KINDS:
            envs = [Corrupted(env, trial, chunk, usual + 1) for env in envs]
        success: list[bool] = []
        moves: list[int] = []
        later: list[bool] = []
        films: list[NDArray[np.uint8]] = []
        seconds: list[float] = []
        try:
            for first in range(0, self.samples, PARALLEL):
                running = envs[: self.samples - first]
                seeds = EVALUATION_SEEDS * self.seed + first + np.arange(len(running))
                steps = [env.reset(seed=int(number)) for env, number in zip(running, seeds, strict=True)]
                agent.reset(len(running))
                filmed = max(0, min(len(running), FILMED - first))
                frames = [_frame([observation for observation, _ in steps[:filmed]])]
                for done in range(1, chunks + 1):
                    begun = time.perf_counter()
                    if trial == "imagine" and done > 1:
                        actions, _ = agent.imagine()
                    else:
                        actions = agent.act(_observation(agent, steps), _levels(agent, steps, level))
                    seconds.append(time.perf_counter() - begun)
                    results = [env.step_many(some) for env, some in zip(running, actions, strict=True)]
                    steps = [(result[0], result[4]) for result in results]
                    frames.append(_frame([observation for observation, _ in steps[:filmed]]))
                    if done == usual:
                        success += [bool(info["success"]) for _, info in steps]
                        moves += [int(info["moves"]) for _, info in steps]
                later += [bool(info["success"]) for _, info in steps]
                if filmed:
                    films.append(np.stack(frames))
                progress("episodes", min(first + PARALLEL, self.samples), self.samples)
        finally:
            for env in envs:
                env.close()
        film = np.concatenate(films, axis=2)[:, :, : FILMED * self.px]
        return TrialResult(np.array(success), np.array(moves), film, seconds, np.array(later) if chunks > usual else None)

    def run_expert(self, progress: Progress, open_loop: bool = False, corruption: str | None = None, chunk: int = CHUNK) -> TrialResult:
        """The script that made the demonstrations. open_loop: aim at the plates' centres. corruption: of all cameras at once, during which
        the expert goes by what it knew before."""
        success, moves = [], []
        env = SwapEnv(self.px, self.simulator)
        for done in range(self.samples):
            number = EVALUATION_SEEDS * self.seed + done
            env.reset(seed=number, options={"render": False})
            if corruption is None:
                expert = Expert(env, number, open_loop)
            else:
                corrupted = Corruption(corruption, STEPS // chunk + 1, CAMERAS, number).when  # type: ignore[arg-type]
                expert = Expert(env, number, open_loop, lambda time, corrupted=corrupted: not corrupted[time // chunk])  # type: ignore[misc]
            while not env.step_many(expert.act()[None], render=False)[3]:
                pass
            success.append(env.success)
            moves.append(env.moves)
            progress("episodes", done + 1, self.samples)
        env.close()
        return TrialResult(np.array(success), np.array(moves), np.zeros((0, 1, 1, 3), np.uint8), [])


def _observation(agent: ImitationAgent, steps: Sequence[tuple[Observation, dict[str, Any]]]) -> dict[str, NDArray[Any]]:
    """Of each sensor (n, *shape). The agent's state is the environment's pose."""
    keys = {name: "pose" if name == STATE else name for name in agent.sensors}
    return {name: np.stack([observation[key] for observation, _ in steps]) for name, key in keys.items()}


def _levels(agent: ImitationAgent, steps: Sequence[tuple[Observation, dict[str, Any]]], level: int) -> dict[str, NDArray[np.int64]]:
    """Of each sensor (n,): `level` where it is corrupted, 0 elsewhere; one for all sensors where the agent needs that."""
    flags = [info.get("corrupted", {}) for _, info in steps]
    levels = {name: np.array([level * bool(flag.get(name)) for flag in flags]) for name in agent.sensors}
    return dict.fromkeys(levels, np.max(list(levels.values()), axis=0)) if agent.shared_level else levels


def _frame(observations: Sequence[Observation]) -> NDArray[np.uint8]:
    """(2 px, n px, 3): the front camera's images in a row above the hand camera's."""
    if not observations:
        return np.zeros((1, 0, 3), np.uint8)
    return np.concatenate([np.concatenate([one["front"], one["hand"]], axis=0) for one in observations], axis=1)
