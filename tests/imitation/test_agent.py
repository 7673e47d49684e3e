"""The agent: it remembers what it observed and did, treats observations by their noise levels, and imagines."""

import numpy as np
import pytest
import torch
from robots import PX, SMALL, TASK, K, as_tensors, model_for, observation

from diffusion_forcing import DiffusionForcing
from diffusion_forcing.backbones import ConvRNNConfig, RNNConfig, TransformerConfig
from diffusion_forcing.engine.config import Experiment, ModelConfig, TrainConfig, replace, save_experiment
from diffusion_forcing.engine.objective import Denoising
from diffusion_forcing.engine.recipes import build
from diffusion_forcing.engine.train import train
from diffusion_forcing.imitation import agent as agents
from diffusion_forcing.imitation.agent import SAMPLER, AgentOptions, ImageTokenAgent, ImitationAgent, agent_for
from diffusion_forcing.imitation.task import Imitation
from diffusion_forcing.parameterization import with_x0
from diffusion_forcing.sampling import Sampler
from diffusion_forcing.schedule import expand


@pytest.fixture(scope="module")
def model():
    return model_for(TASK)


def agent_of(model, n=2, temperature=1.0, seed=0, **options):
    agent = agent_for(model, Sampler(steps=3, temperature=temperature), AgentOptions(**options), seed)
    agent.reset(n)
    return agent


def remembered_by(agent, monkeypatch):
    """What is added to the agent's memory from now on: tokens and their levels, one modality after another."""
    added, add = [], agent._past.add

    def noted(x, level, cond=None):
        levels = torch.as_tensor(level).expand(x.shape[:2])
        added.extend((x[:, i], levels[:, i]) for i in range(x.shape[1]))
        add(x, level, cond)

    monkeypatch.setattr(agent._past, "add", noted)
    return added


def initial_noise_of(monkeypatch):
    """What `sample` starts from, from now on; it returns that."""
    begun = []
    monkeypatch.setattr(agents, "sample", lambda denoise, schedule, x, *_, **__: begun.append(x.clone()) or x)
    return begun


# Acting.


def test_actions_are_chunks_and_the_same_after_a_reset(model):
    agent = agent_of(model)
    one = [agent.act(observation(seed=seed)) for seed in range(3)]
    assert one[0].shape == (2, 3, 2)
    assert np.isfinite(one).all()
    agent.reset(2)
    np.testing.assert_array_equal([agent.act(observation(seed=seed)) for seed in range(3)], one)


def test_one_robot_needs_no_first_axis(model):
    alone = {name: values[0] for name, values in observation(1).items()}
    np.testing.assert_array_equal(agent_of(model, 1).act(alone), agent_of(model, 1).act(observation(1)))


def test_images_are_uint8_or_floats_from_0_to_1(model):
    raw = observation()
    floats = {**raw, "front": raw["front"] / 255, "hand": (raw["hand"] / 255).astype(np.float32)}
    np.testing.assert_allclose(agent_of(model).act(floats), agent_of(model).act(raw), rtol=1e-4, atol=1e-5)
    ignored = observation(front=raw["front"].astype(int))
    np.testing.assert_array_equal(agent_of(model).act(ignored, {"front": K}), agent_of(model).act(raw, {"front": K}))


def test_the_last_action_is_that_executed(model):
    agent = agent_of(model)
    initial = agent.codec.initial_action.expand(2, -1)
    assert torch.equal(agent._last, initial)
    executed = np.random.default_rng(0).normal(size=(2, 3, 2)).astype(np.float32)
    agent.act(observation(), executed=executed)
    assert torch.equal(agent._last, torch.as_tensor(executed[:, -1]))
    decided = agent.act(observation())
    assert torch.equal(agent._last, torch.as_tensor(decided[:, -1]))
    agent.reset(2)
    assert torch.equal(agent._last, initial)


def test_executed_actions_are_remembered(model):
    def second(executed):
        agent = agent_of(model)
        agent.act(observation(), executed=executed)
        return agent.act(observation(seed=1))

    decided = agent_of(model).act(observation())
    np.testing.assert_allclose(second(decided), second(None), rtol=1e-3, atol=1e-4)
    assert np.abs(second(decided + 1) - second(None)).max() > 1e-3


def test_at_temperature_0_equal_observations_lead_to_equal_actions(model):
    def spread(temperature):
        acts = [agent_of(model, 1, temperature, seed).act(observation(1)) for seed in range(6)]
        return float(np.ptp(acts, axis=0).mean())

    assert spread(0.0) == 0
    assert 0 < spread(0.3) < spread(1.0)


# Memory.


def test_the_past_matters_to_an_agent_with_memory_only(model):
    def second(seed, **options):
        agent = agent_of(model, **options)
        agent.act(observation(seed=seed), executed=np.ones((2, 3, 2)))  # the last action is always known
        return agent.act(observation(seed=9))

    assert (second(0) != second(1)).any()
    np.testing.assert_array_equal(second(0, memory=1), second(1, memory=1))
    assert (second(0, memory=2) != second(1, memory=2)).any()


@pytest.mark.parametrize("backbone", [RNNConfig(hidden=16), TransformerConfig(hidden=16, layers=2, heads=2)], ids=["gru", "transformer"])
def test_memory_longer_than_the_episode_is_all_of_it(backbone):
    model = model_for(TASK, backbone)
    pair = agent_of(model), agent_of(model, memory=9)
    for seed in range(3):
        one, other = (agent.act(observation(seed=seed)) for agent in pair)
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("timesteps", [1, 3])
def test_an_agent_with_limited_memory_acts_on_what_it_was_trained_on(timesteps, model, monkeypatch):
    windows = replace(TASK, window=timesteps).data().train
    modalities = windows.read(windows.draw(1)).cond[0, :, :4].argmax(1).tolist()
    contexts, sample = [], ImitationAgent._sample

    def noted(self, modality):
        contexts.append([*self._past.recent[2][0, :, :4].argmax(1).tolist(), modality])
        return sample(self, modality)

    monkeypatch.setattr(ImitationAgent, "_sample", noted)
    agent = agent_of(model, memory=timesteps)
    for seed in range(5):
        agent.act(observation(seed=seed))
    assert contexts[-1] == modalities


# Noise levels of observations.


def test_an_observation_matters_unless_it_is_ignored(model):
    def first(level, **changes):
        return agent_of(model).act(observation(**changes), level)

    other = observation(seed=1)
    for name in ("front", "hand", "state"):
        assert (first(0) != first(0, **{name: other[name]})).any(), name
        np.testing.assert_array_equal(first(K), first(K, **{name: other[name]}))
        np.testing.assert_array_equal(first({name: K}), first({name: K}, **{name: other[name]}))
        changes = {rest: other[rest] for rest in ("front", "hand", "state") if rest != name}
        assert (first({name: K}) != first({name: K}, **changes)).any(), name


def test_each_robot_has_its_own_level(model):
    level = np.array([0, K])
    one, other = (agent_of(model).act(observation(seed=seed), level) for seed in (0, 1))
    assert (one[0] != other[0]).any()
    np.testing.assert_array_equal(one[1], other[1])


def test_a_higher_level_means_less_influence(model):
    def difference(level):
        acts = [np.stack([agent_of(model, seed=draw).act(observation(seed=seed), level) for seed in (0, 1)]) for draw in range(8)]
        return float(np.mean([np.abs(a[0] - a[1]).mean() for a in acts]))

    little, much = difference(K // 10), difference(9 * K // 10)
    assert 0 < much < little


def test_an_agent_waits_for_its_first_observation(model):
    """Until one is trusted at all; from then on it acts, also when later ones are ignored. Each robot by itself."""
    agent = agent_of(model)
    rest = np.broadcast_to(model.codec.initial_action.numpy(), (3, len(model.codec.initial_action)))
    first = agent.act(observation(seed=0), np.array([K, 0]))
    np.testing.assert_allclose(first[0], rest, atol=1e-6)
    assert (np.abs(first[1] - rest) > 1e-3).any()
    then = agent.act(observation(seed=1), {"front": np.array([K - 1, K]), "hand": K, "state": K})
    assert (np.abs(then - rest) > 1e-3).any(axis=(1, 2)).all()
    assert (np.abs(agent.act(observation(seed=2), K) - then[:, -1:]) > 1e-3).any(axis=(1, 2)).all()
    hasty = agent_of(model, wait=False).act(observation(seed=0), K)
    assert (np.abs(hasty - rest) > 1e-3).any(axis=(1, 2)).all()


def test_a_sensor_that_is_missing_may_be_ignored(model):
    broken = observation(state=np.full((2, 2), np.nan, dtype=np.float32))
    absent = {name: values for name, values in observation().items() if name != "state"}
    level = {"state": K}
    np.testing.assert_array_equal(agent_of(model).act(broken, level), agent_of(model).act(absent, level))


NANS = np.array([[0, 0], [np.nan, 0]], dtype=np.float32)


def test_one_bad_observation_poisons_no_later_action(model):
    """It is refused before it is remembered; ignored by its level, nothing of it is."""
    agent, other = agent_of(model), agent_of(model)
    first = observation()
    np.testing.assert_array_equal(agent.act(first), other.act(first))
    for bad in (np.nan, np.inf, 1e30, -1e6):
        with pytest.raises(ValueError, match="ignore it by its level, 100"):
            agent.act(observation(state=np.full((2, 2), bad, np.float32)))
    np.testing.assert_array_equal(agent.act(observation(seed=1)), other.act(observation(seed=1)))
    actions = [agent.act(observation(state=np.full((2, 2), bad, np.float32)), {"state": K}) for bad in (np.nan, 1e30)]
    assert np.isfinite([*actions, *(agent.act(observation(seed=seed)) for seed in range(5))]).all()


@pytest.mark.parametrize(
    ("raw", "level", "words"),
    [
        (observation(state=NANS), 0, "state of robot 1 holds NaN"),
        (observation(state=NANS), np.array([K, 0]), "state of robot 1 holds NaN"),
        ({"front": observation()["front"]}, 0, r"hand is missing; ignore it by its level, act\(\.\.\., level={'hand': 100}\)"),
        (observation(front=np.zeros((2, 9, 9, 3), dtype=np.uint8)), 0, r"front should be \(2, 6, 6, 3\)"),
        (observation(3), 0, r"for 2 robots; got \(3, 6, 6, 3\)"),
        (observation(), K + 1, "level .* got 101"),
        (observation(), -1, "level .* got -1"),
        (observation(), {"back": 3}, "front, hand, state; .* 'back'"),
        (observation(), np.zeros(3), r"level .* \(2,\); got shape \(3,\)"),
        (observation(front=observation()["front"].astype(int)), 0, "front is an image.*got int64 from 0 to 255"),
        (observation(hand=observation()["hand"].astype(np.float32)), 0, "hand is an image.*got float32 from [0-9]+ to 25"),
        (observation(hand=observation()["hand"] / 255 - 0.5), np.array([0, K]), "hand is an image.*got float64 from -0.4"),
    ],
)
def test_observations_that_make_no_sense_are_refused(raw, level, words, model):
    with pytest.raises(ValueError, match=words):
        agent_of(model).act(raw, level)


def test_agents_that_make_no_sense_are_refused(model):
    with pytest.raises(ValueError, match="memory"):
        AgentOptions(memory=0)
    with pytest.raises(ValueError, match="got n=0"):
        ImitationAgent(model).reset(0)
    bare = ModelConfig(RNNConfig(hidden=8), levels=K).build(4)
    with pytest.raises(ValueError, match="codec is ModalityTokens"):
        ImitationAgent(bare)
    given = Sampler(matrix="full_sequence").along(torch.tensor([[3], [0]]))  # below K, where the noise would count as a value
    agent = agent_for(model, given, AgentOptions())
    with pytest.raises(ValueError, match="begins with token 0 below level K"):
        agent.act(observation(1))


# Denoising observations.


def test_a_noisy_observation_is_denoised_given_the_past(model, monkeypatch):
    """It is remembered as clean, depends on its content unless it is ignored, and on the past."""

    def second(seed, level, before=0):
        agent = agent_of(model)
        agent.act(observation(seed=before))
        added = remembered_by(agent, monkeypatch)
        agent.act(observation(seed=seed), {"front": level})
        assert len(added) == 4  # front, hand, state, actions
        assert all(not levels.any() for _, levels in added)
        return [token for token, _ in added]

    front, hand, *_ = second(1, K)
    assert torch.equal(front, second(2, K)[0])
    assert not torch.equal(front, second(1, K, before=5)[0])
    assert not torch.equal(second(1, K // 2)[0], second(2, K // 2)[0])
    clean = model.codec.encode_modality("hand", torch.as_tensor(observation(seed=1)["hand"])[:, None])[:, 0]
    torch.testing.assert_close(hand, clean)  # at level 0 it stays as it is


def test_with_the_true_denoiser_the_truth_is_remembered(model, monkeypatch):
    """However much of it was hidden, of each robot by itself."""
    agent = agent_of(model)
    agent.act(observation(seed=0))
    truth = model.codec.encode_modality("front", torch.as_tensor(observation(seed=3)["front"])[:, None])

    def denoiser(cond, state):
        def denoise(x, k):
            alpha, sigma = (expand(part, x) for part in (model.schedule.alpha(k), model.schedule.sigma(k)))
            return with_x0(truth, x, alpha, sigma)

        return denoise

    added = remembered_by(agent, monkeypatch)
    monkeypatch.setattr(model, "denoiser", denoiser)
    for levels in ((K, 4), (50, 50), (1, 0)):
        del added[:]
        raw = observation(seed=9)
        raw["front"][1] = observation(seed=3)["front"][1]
        agent.act(raw, {"front": np.array(levels)})
        torch.testing.assert_close(added[0][0], truth[:, 0], atol=1e-4, rtol=1e-4)


def test_only_sensors_observed_before_are_denoised_and_only_if_asked_for(model, monkeypatch):
    agent = agent_of(model)
    added = remembered_by(agent, monkeypatch)
    agent.act(observation(seed=0), {"front": np.array([K, 0])})
    assert added[0][1].tolist() == [K, 0]
    del added[:]
    agent.act(observation(seed=1), {"front": K})
    assert added[0][1].tolist() == [K, 0]  # the first robot has never observed by this camera
    agent = agent_of(model, denoise_observations=False)
    agent.act(observation(seed=0))
    added = remembered_by(agent, monkeypatch)
    agent.act(observation(seed=1), {"front": K, "hand": 7})
    assert [levels.tolist() for _, levels in added[:3]] == [[K, K], [7, 7], [0, 0]]


def test_sensors_not_observed_within_memory_are_not_denoised(model, monkeypatch):
    for memory, levels in ((1, [K, K, K]), (2, [0, K, K]), (3, [0, 0, K]), (None, [0, 0, 0])):
        agent = agent_of(model, memory=memory)
        agent.act(observation(seed=0))
        added = remembered_by(agent, monkeypatch)
        for seed in (1, 2, 3):
            agent.act(observation(seed=seed), {"front": K})
        assert [int(level[0]) for _, level in added[::4]] == levels


def test_the_temperature_is_that_of_actions_and_ignored_observations(model, monkeypatch):
    started, estimate = [], ImitationAgent._estimate
    monkeypatch.setattr(ImitationAgent, "_estimate", lambda self, x, *rest: started.append(x) or estimate(self, x, *rest))
    for temperature in (1.0, 0.25):
        agent = agent_of(model, temperature=temperature)
        agent.act(observation(seed=0))
        agent.act(observation(seed=1), {"front": np.array([K, 50])})
    full, little = started[:2], started[2:]  # the levels in turn
    torch.testing.assert_close(little[1][0], 0.25 * full[1][0])
    torch.testing.assert_close(little[0][1], full[0][1])


# Imagining, loading, learning.


def test_what_is_imagined_continues_from_the_observation(model):
    def then(seed):
        agent = agent_of(model)
        agent.act(observation(seed=seed))
        return agent.imagine()

    (actions, imagined), (_, other) = then(0), then(1)
    assert actions.shape == (2, 3, 2)
    assert {name: values.shape for name, values in imagined.items()} == {"front": (2, PX, PX, 3), "hand": (2, PX, PX, 3), "state": (2, 2)}
    assert (imagined["front"] != other["front"]).any()


def test_an_agent_of_a_run_has_its_options(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    sampler, options = Sampler(steps=4, temperature=0.5), AgentOptions(memory=3)

    def of(path, **given):
        agent = ImitationAgent.from_pretrained(path, **given)
        return agent.sampler, agent.options

    assert of(tmp_path) == (SAMPLER, AgentOptions())
    save_experiment(Experiment(Imitation(sampler=sampler, agent=options)), tmp_path / "config.json")
    assert of(tmp_path) == (sampler, options)
    assert of(tmp_path, sampler=Sampler(steps=2)) == (Sampler(steps=2), options)
    assert of(tmp_path / "model") == (SAMPLER, AgentOptions())
    agent = ImitationAgent.from_pretrained(tmp_path, Sampler(steps=3), AgentOptions())
    agent.reset(2)
    np.testing.assert_allclose(agent.act(observation()), agent_of(model).act(observation()), rtol=1e-5, atol=1e-6)
    save_experiment(build("composition"), tmp_path / "config.json")
    assert of(tmp_path) == (SAMPLER, AgentOptions())


def test_an_agent_with_memory_1_is_trained(tmp_path):
    task = replace(TASK, window=1, sampler=Sampler(steps=2), agent=AgentOptions(memory=1))
    training = TrainConfig(steps=3, batch=4, validate_every=2, log_every=2)
    objective = Denoising(draw="noisy_context")
    train(Experiment(task, ModelConfig(SMALL, levels=K), training, objective), tmp_path, quiet=True)
    agent = agent_for(DiffusionForcing.from_pretrained(tmp_path / "model"), task.sampler, task.agent)
    agent.reset(2)
    assert np.isfinite([agent.act(observation(seed=seed)) for seed in range(3)]).all()


# One token per timestep.


@pytest.fixture(scope="module")
def image_model():
    return model_for(replace(TASK, tokens="image", state=False), ConvRNNConfig(4, 4, (1, 2), 1))


def images(seed=0):
    return {name: values for name, values in observation(seed=seed).items() if name != "state"}


def test_an_agent_of_image_tokens_remembers_ignores_and_imagines(image_model):
    agent = agent_of(image_model)
    assert isinstance(agent, ImageTokenAgent)
    one = agent.act(images())
    assert one.shape == (2, 3, 2)
    two, imagined = agent.imagine()
    assert np.isfinite(two).all()
    assert imagined["front"].shape == (2, PX, PX, 3)
    np.testing.assert_array_equal(agent_of(image_model).act(images()), one)
    assert not np.allclose(one, agent_of(image_model).act(images(seed=5)))
    np.testing.assert_array_equal(agent_of(image_model).act({}, level=K), agent_of(image_model).act(images(seed=5), level=K))


def test_an_agent_of_image_tokens_denoises_observations_not_actions(image_model, monkeypatch):
    agent = agent_of(image_model)
    added = remembered_by(agent, monkeypatch)
    agent.act({}, level=K)
    assert added[0][1].tolist() == [K, K]  # nothing was observed yet
    agent.act(images())
    executed = np.full((2, 3, 2), 0.5)
    agent.act(images(), executed=executed)
    agent.act(images(seed=1), level=np.array([K, 0]))
    token, levels = added[-1]
    assert levels.tolist() == [0, 0]
    raw = {name: values[:, None] for name, values in as_tensors(images(seed=1)).items()}
    clean = image_model.codec.encode({"actions": torch.as_tensor(executed)[:, None].float(), **raw})[:, 0]
    torch.testing.assert_close(token[1], clean[1])
    torch.testing.assert_close(token[0, 6:], clean[0, 6:])
    assert not torch.allclose(token[0, :6], clean[0, :6])


def test_the_temperature_of_image_tokens_is_that_of_actions_alone(image_model, monkeypatch):
    begun = initial_noise_of(monkeypatch)
    for temperature in (1.0, 0.0):
        agent_of(image_model, temperature=temperature).act(images())
    full, none = begun
    assert not none[:, :, 6:].any()
    assert full[:, :, 6:].any()
    assert torch.equal(full[:, :, :6], none[:, :, :6])


def test_an_agent_of_image_tokens_remembers_executed_actions(image_model):
    agent, after = agent_of(image_model), []
    for executed in (0.0, 2.0):
        agent.reset(2)
        agent.act(images(), executed=np.full((2, 3, 2), executed))
        after.append(agent.act(images()))
    assert not np.allclose(*after)


def test_what_an_agent_of_image_tokens_cannot_do_is_refused(model, image_model):
    agent = agent_of(image_model)
    with pytest.raises(ValueError, match="one token per timestep"):
        agent.act(images(), level={"front": 10})
    with pytest.raises(ValueError, match="imagine"):
        agent.imagine()
    with pytest.raises(ValueError, match=r"ImitationAgent needs .* ModalityTokens; this one's is ImageTokens"):
        ImitationAgent(image_model)
    with pytest.raises(ValueError, match=r"ImageTokenAgent needs .* ImageTokens; this one's is ModalityTokens"):
        ImageTokenAgent(model)
