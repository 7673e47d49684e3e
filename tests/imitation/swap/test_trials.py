"""Trials of the swap: noise levels of corrupted cameras, whole episodes whatever the chunk."""

import numpy as np
import pytest
from robots import progress
from swaps import ExpertAgent, K

from diffusion_forcing.imitation.agent import ImitationAgent
from diffusion_forcing.imitation.corruption import Corruption
from diffusion_forcing.imitation.swap import trials as module
from diffusion_forcing.imitation.swap.trials import Trials
from diffusion_forcing.sampling import Sampler


def trials(samples):
    return Trials(16, "kinematic", samples, seed=0, extra_steps=150)


def test_corrupted_cameras_have_a_level_if_the_agent_is_informed(model):
    for trial, level in (("distractors", round(0.35 * K)), ("occluded", K), ("dropped", K)):
        given = {}
        for informed in (True, False):
            agent = ExpertAgent(model)
            trials(2).run_agent(agent, trial, level * informed, progress)
            given[informed] = np.array([[levels[name] for name in agent.sensors] for levels in agent.levels])  # (frames, cameras, robots)
        assert set(np.unique(given[True])) == {0, level}
        assert not given[False].any()
        both = (given[True] > 0).all(1).any()
        assert both == (trial != "occluded")


def test_sensors_that_share_a_level_are_ignored_together(model):
    agent = ExpertAgent(model)
    agent.shared_level = True
    trials(2).run_agent(agent, "occluded", K, progress)
    given = np.array([[levels[name] for name in agent.sensors] for levels in agent.levels])
    assert (given[:, 0] == given[:, 1]).all()
    assert set(np.unique(given)) == {0, K}


@pytest.mark.parametrize("chunk", [5, 30])
def test_an_episode_is_run_to_its_end_whatever_the_chunk(chunk, model):
    agent = ExpertAgent(model, chunk=chunk)
    assert trials(2).run_agent(agent, "clean", K, progress).success.all()
    agent = ExpertAgent(model, chunk=chunk)
    trials(1).run_agent(agent, "dropped", K, progress)
    when = Corruption("dropped", 600 // chunk + 1, ("front", "hand"), 0).when
    ignored = [bool(levels["front"]) for levels in agent.levels]
    assert len(ignored) == 750 // chunk
    assert ignored[: len(when)] == when.tolist()
    assert not any(ignored[len(when) :])


def test_an_agent_that_imagines_observes_once(model, monkeypatch):
    observed = []
    act = ImitationAgent.act
    monkeypatch.setattr(ImitationAgent, "act", lambda self, raw, level: observed.append(1) or act(self, raw, level))
    trials(2).run_agent(ImitationAgent(model, Sampler(steps=1)), "imagine", K, progress)
    assert len(observed) == 1


def test_many_episodes_are_run_a_few_at_a_time(model, monkeypatch):
    monkeypatch.setattr(module, "PARALLEL", 2)
    agent = ExpertAgent(model)
    robots = []
    monkeypatch.setattr(agent, "reset", lambda n: robots.append(n) or ExpertAgent.reset(agent, n))
    result = trials(3).run_agent(agent, "clean", K, progress)
    assert robots == [2, 1]
    assert result.success.shape == (3,)
    assert result.film.shape[2] == 3 * 16
