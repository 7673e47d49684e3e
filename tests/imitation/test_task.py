"""The task: what is trained on, imagined and drawn, and an agent that learns to use its memory."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from robots import PX, SMALL, TASK, Given, K, demonstrations, is_png, model_for, observation, progress

from diffusion_forcing import DiffusionForcing
from diffusion_forcing.backbones import RNNConfig
from diffusion_forcing.engine.config import Experiment, ModelConfig, TrainConfig
from diffusion_forcing.engine.objective import Denoising
from diffusion_forcing.engine.recipes import build
from diffusion_forcing.engine.train import train
from diffusion_forcing.imitation.agent import AgentOptions, ImitationAgent
from diffusion_forcing.imitation.demonstrations import Demonstrations
from diffusion_forcing.imitation.recorded import Recorded
from diffusion_forcing.imitation.task import Imitation
from diffusion_forcing.sampling import Sampler


@pytest.mark.parametrize(("name", "backbone"), [("swap", "gru"), ("swap", "paper"), ("imitation", None), ("pusht", None)])
def test_every_recipe_builds(name, backbone):
    experiment = build(name, backbone=backbone)
    model = experiment.model.build((21, 32, 32) if experiment.task.tokens == "image" else (24,), 3)
    assert sum(parameter.numel() for parameter in model.parameters()) > 1e6


def test_all_demonstrations_held_out_leave_none():
    with pytest.raises(ValueError, match="5 demonstrations, of which 5 are held out"):
        replace(TASK, world=Given(demonstrations, held_out=5)).data()


def test_training_continues_from_another_model_in_its_tokens(tmp_path):
    training = TrainConfig(steps=2, batch=4, validate_every=2, log_every=2)
    objective = Denoising(draw="noisy_context")
    train(Experiment(TASK, ModelConfig(SMALL, levels=K), training, objective), tmp_path / "first", quiet=True)
    on = replace(training, steps=1, lr=1e-12, init=str(tmp_path / "first"))
    train(Experiment(replace(TASK, whiten=1.0), ModelConfig(SMALL, levels=K), on, objective), tmp_path / "second", quiet=True)
    first, second = (DiffusionForcing.from_pretrained(tmp_path / run / "model").state_dict() for run in ("first", "second"))
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="ModalityTokens, this task's ImageTokens"):
        replace(TASK, tokens="image", state=False).data_as(DiffusionForcing.from_pretrained(tmp_path / "first" / "model").codec)


def test_a_demonstration_is_imagined_from_its_first_observation(tmp_path):
    files = TASK.sample(model_for(TASK), tmp_path, samples=4, seed=0, progress=progress)
    assert [file.name for file in files] == ["imagined.npz", "actions.png", "front.png", "hand.png", "state.png"]
    assert all(is_png(file) for file in files[1:])
    imagined = np.load(files[0])
    assert imagined["actions"].shape == (1, 7, 3, 2)
    assert imagined["front"].shape == (1, 7, PX, PX, 3)
    np.testing.assert_allclose(imagined["front"][0, 0], demonstrations().images["front"][-1][0] / 255, atol=1e-6)


def test_a_loaded_model_with_keypoints_acts_imagines_and_is_evaluated(tmp_path, monkeypatch):
    shown = demonstrations(px=8)
    monkeypatch.setattr(Recorded, "demonstrations", lambda self, chunk, progress=None: shown)
    task = replace(TASK, world=Recorded(held_out=1), components=4, keypoint_steps=2, sampler=Sampler(steps=2))
    model_for(task).save_pretrained(tmp_path / "model")
    agent = ImitationAgent.from_pretrained(tmp_path, task.sampler)
    agent.reset(2)
    assert np.isfinite(agent.act(observation(px=8))).all()
    _, imagined = agent.imagine()
    assert imagined["front"].shape == (2, 8, 8, 3)
    assert not any(parameter.requires_grad for parameter in agent.codec.parameters())
    assert task.imagined(agent.model, 1, 0, progress)["hand"].shape == (1, 7, 8, 8, 3)
    evaluation = task.evaluate(agent.model, tmp_path, samples=1, seed=0, progress=progress)
    assert list(evaluation.figures) == ["codec.png"]
    assert is_png(tmp_path / "codec.png")


def cued(episodes=64, frames=4):
    """A cue of -1 or 1 in the first state only; the last action must be that of the cue, all others are 0. States jitter."""
    draw = np.random.default_rng(0)
    actions, states = [], []
    for i in range(episodes):
        cue = 2 * (i % 2) - 1
        state = 0.1 * draw.normal(size=(frames, 2))
        state[0, 0] += cue
        state[:, 1] += np.arange(frames) / frames
        action = 0.02 * draw.normal(size=(frames - 1, 1))
        action[-1] += cue
        states.append(state)
        actions.append(action)
    return Demonstrations(actions, states, fps=10)


def test_an_agent_with_memory_acts_on_what_it_observed_long_ago(tmp_path):
    task = Imitation(Given(cued, held_out=8), chunk=1, window=4)
    training = TrainConfig(steps=600, batch=32, lr=5e-3, validate_every=500, log_every=500)
    objective = Denoising(draw="independent+noisy_prefix")
    train(Experiment(task, ModelConfig(RNNConfig(hidden=48), levels=K), training, objective), tmp_path, quiet=True)
    model = DiffusionForcing.from_pretrained(Path(tmp_path) / "model")
    shown = cued(32)

    def last(memory, level=0):
        agent = ImitationAgent(model, Sampler(steps=5), AgentOptions(memory=memory))
        agent.reset(32)
        for j in range(3):
            actions = agent.act({"state": np.stack([states[j] for states in shown.states])}, level if j == 0 else 0)
        return np.sign(actions[:, 0, 0])

    expected = np.sign([actions[-1, 0] for actions in shown.actions])
    assert np.mean(last(None) == expected) > 0.9
    assert 0.15 < np.mean(last(2) == expected) < 0.85
    assert 0.15 < np.mean(last(None, level=K) == expected) < 0.85  # a cue that is ignored is none
