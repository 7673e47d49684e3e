"""The swap as a task: demonstrations become tokens, trials are run on the same episodes, and being told is a matter of levels."""

from dataclasses import replace as changed
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the swap is a Gymnasium environment")

from oracles import randomised

from diffusion_forcing.engine.config import ConvRNNConfig, ModelConfig, RNNConfig
from diffusion_forcing.imitation.agent import ActOptions, ImitationAgent
from diffusion_forcing.imitation.corruption import Corruption
from diffusion_forcing.imitation.pusht.task import Pushing
from diffusion_forcing.imitation.swap import trials as swapping
from diffusion_forcing.imitation.swap.env import SwapEnv
from diffusion_forcing.imitation.swap.expert import Expert
from diffusion_forcing.imitation.swap.scene import STEPS
from diffusion_forcing.imitation.swap.task import Swapping, wilson
from diffusion_forcing.imitation.swap.trials import Trials
from diffusion_forcing.imitation.task import Imitation

K = 50
WORLD = Swapping(px=16, number=3, simulator="kinematic", held_out=1)
TASK = Imitation(WORLD, chunk=15, components=6, state=False, window=41, acting=ActOptions(steps=1))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFORCE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def model(cache):
    return model_for(TASK, RNNConfig(hidden=8))


def model_for(task, backbone):
    data = task.data()
    model = ModelConfig(backbone, levels=K).build(data.train.event, data.train.cond_width, data.codec)
    randomised(model.backbone, seed=1)
    return model.eval()


def told(what, done, of):
    assert 0 <= done <= of
    assert what


def trials(samples):
    return Trials(16, "kinematic", samples, seed=0, extra_steps=150)


class Knowing:
    """An agent that acts as the scripted expert does in its own copies of the episodes, and notes what it is told."""

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

    def act(self, seen, level):
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


def test_demonstrations_are_moments_of_two_cameras(model):
    data = TASK.data()
    assert data.codec.names == ("actions", "front", "hand")
    assert data.codec.shapes == {"actions": (15, 7), "front": (16, 16, 3), "hand": (16, 16, 3)}
    assert data.train.read(data.train.all()[:1]).x.shape == (1, 41 * 3 - 1, data.codec.width)
    assert len(data.train) == 2


def test_in_a_mirror_there_are_twice_as_many_demonstrations():
    plain, mirrored = TASK.data(), changed(TASK, mirror=True).data()
    assert len(mirrored.train) == 2 * len(plain.train)
    assert len(mirrored.valid) == len(plain.valid)
    shown = WORLD.demonstrations(15)
    back = WORLD.mirrored(WORLD.mirrored(shown))
    for i in range(len(shown)):
        np.testing.assert_array_equal(back.actions[i], shown.actions[i])
        np.testing.assert_array_equal(back.images["front"][i], shown.images["front"][i])
    turned = WORLD.mirrored(shown)
    np.testing.assert_array_equal(turned.actions[0][:, 1], -shown.actions[0][:, 1])
    np.testing.assert_array_equal(turned.images["hand"][0][0, :, 0], shown.images["hand"][0][0, :, -1])


def test_one_who_acts_as_the_expert_succeeds_and_the_film_says_so(model, tmp_path):
    world = changed(WORLD, trials=("clean",))
    evaluation = world.evaluate(Knowing(model), tmp_path, held_out=None, samples=3, seed=0, progress=told)
    assert evaluation.metrics["clean"] == evaluation.metrics["clean: first move"] == evaluation.metrics["clean: second move"] == 1
    assert list(evaluation.figures) == ["clean.mp4"]
    assert evaluation.figures["clean.mp4"].endswith("success, success, success")
    assert (tmp_path / "clean.mp4").stat().st_size > 0


def test_who_is_late_succeeds_later(model, tmp_path):
    late = trials(3).run_agent(Knowing(model, rest=8), "clean", K, told)
    assert not late.success.all()
    assert late.later.all()
    world = changed(WORLD, trials=("clean", "open_loop"))
    evaluation = world.evaluate(Knowing(model, rest=8), tmp_path, held_out=None, samples=3, seed=0, progress=told)
    (table,) = evaluation.tables
    assert table.columns[3] == "150 actions later"
    assert [row[3] for row in table.rows] == ["100%", "", ""]
    assert evaluation.metrics["clean: later"] == 1
    at_once = changed(world, extra_steps=0).evaluate(Knowing(model), tmp_path, held_out=None, samples=1, seed=0, progress=told)
    assert "clean: later" not in at_once.metrics
    assert {len(row) for row in at_once.tables[0].rows} == {len(at_once.tables[0].columns)} == {5}
    assert evaluation.figures["clean.mp4"].count("success later") == 3 - late.success.sum()
    for chunk, head in ((40, "120 actions later"), (200, "first move done")):  # whole chunks, if there is one
        tried = changed(WORLD, trials=("clean",)).evaluate(
            Knowing(model, chunk=chunk), tmp_path, held_out=None, samples=1, seed=0, progress=told
        )
        assert tried.tables[0].columns[3] == head
    with pytest.raises(ValueError, match=r"extra_steps counts actions, a multiple of 15 or 0; got 20"):
        changed(WORLD, extra_steps=20)


def test_levels_say_what_deceives_and_only_if_told(model, tmp_path):
    for trial, level in (("distractors", round(0.35 * K)), ("occluded", K), ("dropped", K)):
        heard = {}
        for informed in (True, False):
            agent = Knowing(model)
            trials(2).run_agent(agent, trial, level * informed, told)
            heard[informed] = np.array([[levels[name] for name in agent.sensors] for levels in agent.levels])  # (frames, cameras, robots)
        assert set(np.unique(heard[True])) == {0, level}
        assert not heard[False].any()
        both = (heard[True] > 0).all(1).any()
        assert both == (trial != "occluded")


def test_every_trial_has_its_row(model, tmp_path):
    evaluation = changed(TASK, world=changed(WORLD, trials=("clean", "dropped", "imagine", "open_loop", "expert"))).evaluate(
        model, tmp_path, samples=2, seed=0, progress=told
    )
    names = ["clean", "dropped, flagged", "dropped, not flagged", "imagine", "open loop"]
    names += ["distractors, ignored by the expert", "dropped, ignored by the expert"]
    (table,) = evaluation.tables
    assert [row[0] for row in table.rows] == [*names, "time for 2 decisions at once"]
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert all(evaluation.metrics[name] == 0 for name in names[:4])  # weights that were drawn swap nothing
    assert evaluation.metrics["milliseconds a chunk"] > 0
    assert "codec.png" in evaluation.figures
    assert all((tmp_path / file).stat().st_size > 0 for file in evaluation.figures)


def test_runs_are_tried_side_by_side_in_the_same_episodes(model, tmp_path):
    """Another run acts its own way, and what does not depend on a model is tried once."""
    task = changed(TASK, world=changed(WORLD, trials=("clean", "dropped", "open_loop")))
    forgetful = changed(TASK, acting=ActOptions(steps=2, memory=1))
    evaluation = task.evaluate(model, tmp_path, samples=2, seed=0, progress=told, others={"forgetful": (forgetful, model)})
    alone = forgetful.evaluate(model, tmp_path, samples=2, seed=0, progress=told)
    (table,) = evaluation.tables
    assert table.columns[-1] == "forgetful"
    cells = {row[0]: row[-1] for row in table.rows}
    assert cells["open loop"] == ""
    assert cells["clean"].endswith("%")
    assert evaluation.metrics["forgetful: clean"] == alone.metrics["clean"]
    assert "forgetful: blind" not in evaluation.metrics
    assert (tmp_path / "forgetful" / "codec.png").exists()
    assert all((tmp_path / file).stat().st_size > 0 for file in evaluation.figures)
    with pytest.raises(ValueError, match=r"pusher was trained in another world \(Pushing\); compare runs of one world"):
        task.evaluate(model, tmp_path, samples=1, seed=0, progress=told, others={"pusher": (changed(TASK, world=Pushing()), model)})


@pytest.mark.parametrize("chunk", [5, 30])
def test_an_episode_is_played_to_its_end_whatever_the_chunk(chunk, model):
    agent = Knowing(model, chunk=chunk)
    assert trials(2).run_agent(agent, "clean", K, told).success.all()
    agent = Knowing(model, chunk=chunk)
    trials(1).run_agent(agent, "dropped", K, told)
    when = Corruption("dropped", 600 // chunk + 1, ("front", "hand"), 0).when
    doubted = [bool(levels["front"]) for levels in agent.levels]
    assert len(doubted) == 750 // chunk
    assert doubted[: len(when)] == when.tolist()
    assert not any(doubted[len(when) :])


@pytest.mark.parametrize("chunk", [1, 7, 35, 450])
def test_chunks_that_do_not_fill_an_episode_are_refused(chunk):
    with pytest.raises(ValueError, match=f"has 600 actions and a frame every 5, so a chunk has one of 5, 10, 15, .*; got {chunk}"):
        changed(TASK, chunk=chunk)
    assert SwapEnv(16, "kinematic").steps == STEPS


def test_every_trial_runs_where_a_moment_is_doubted_whole(model, tmp_path):
    task = changed(TASK, chunk=60, tokens="image")  # long chunks, for few looks
    joint = model_for(task, ConvRNNConfig(4, 4, (1, 2), 1))
    evaluation = task.evaluate(joint, tmp_path, samples=1, seed=0, progress=told)
    assert {"occluded, flagged", "distractors, flagged", "imagine"} <= evaluation.metrics.keys()
    one = Knowing(model)
    one.shared_level = True
    trials(2).run_agent(one, "occluded", K, told)
    heard = np.array([[levels[name] for name in one.sensors] for levels in one.levels])
    assert (heard[:, 0] == heard[:, 1]).all()
    assert set(np.unique(heard)) == {0, K}


@pytest.mark.parametrize(
    ("samples", "seed", "words"),
    [
        (1, 100, "seed from 0 to 99.*got 100"),
        (1, -1, "seed from 0 to 99.*got -1"),
        (10_001, 0, "at most 10,000 episodes.*got 10,001"),
    ],
)
def test_episodes_of_other_seeds_are_refused(samples, seed, words, model, tmp_path):
    with pytest.raises(ValueError, match=words):
        WORLD.evaluate(Knowing(model), tmp_path, held_out=None, samples=samples, seed=seed, progress=told)


def test_demonstrations_are_not_made_to_draw_one(model, tmp_path, monkeypatch):
    def made(*_):
        raise AssertionError("made")

    task = changed(TASK, world=changed(WORLD, trials=()))
    with monkeypatch.context() as patch:  # those that are there are drawn
        patch.setattr("diffusion_forcing.imitation.swap.task.demonstrate_once", made)
        assert list(task.evaluate(model, tmp_path, samples=1, seed=0, progress=told).figures) == ["codec.png"]
    (tmp_path / "codec.png").unlink()
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(Swapping, "prepare", made)
    assert list(task.evaluate(model, tmp_path, samples=1, seed=0, progress=told).figures) == ["codec.png"]
    assert (tmp_path / "codec.png").stat().st_size > 0
    shown = WORLD.example(30)
    assert (len(shown), shown.every, len(shown.states[0])) == (1, 30, 21)


def test_an_agent_that_imagines_looks_once(model, monkeypatch):
    looks = []
    act = ImitationAgent.act
    monkeypatch.setattr(ImitationAgent, "act", lambda self, seen, level: looks.append(1) or act(self, seen, level))
    trials(2).run_agent(ImitationAgent(model, ActOptions(steps=1)), "imagine", K, told)
    assert len(looks) == 1


def test_many_episodes_are_run_a_few_at_a_time(model, monkeypatch):
    monkeypatch.setattr(swapping, "PARALLEL", 2)
    agent = Knowing(model)
    agents = []
    monkeypatch.setattr(agent, "reset", lambda n: agents.append(n) or Knowing.reset(agent, n))
    tried = trials(3).run_agent(agent, "clean", K, told)
    assert agents == [2, 1]
    assert tried.success.shape == (3,)
    assert tried.film.shape[2] == 3 * 16


@pytest.mark.parametrize(("successes", "number", "low", "high"), [(0, 10, 0, 0.278), (10, 10, 0.722, 1), (40, 50, 0.670, 0.888)])
def test_intervals_are_wilsons(successes, number, low, high):
    assert wilson(successes, number) == pytest.approx((low, high), abs=1e-3)


def test_a_doubt_beyond_all_is_refused():
    with pytest.raises(ValueError, match="distractor_level is a share of K"):
        Swapping(distractor_level=2)
