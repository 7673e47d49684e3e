"""The swap as a world: demonstrations become tokens, and trials are measured in the same episodes."""

from dataclasses import replace

import numpy as np
import pytest
from robots import model_for, progress
from swaps import TASK, WORLD, ExpertAgent, K

from diffusion_forcing.backbones import ConvRNNConfig
from diffusion_forcing.imitation.agent import AgentOptions
from diffusion_forcing.imitation.pusht.task import Pushing
from diffusion_forcing.imitation.swap.task import Swapping, wilson
from diffusion_forcing.imitation.swap.trials import Trials
from diffusion_forcing.sampling import Sampler


def test_demonstrations_have_two_cameras(model):
    data = TASK.data()
    assert data.codec.names == ("actions", "front", "hand")
    assert data.codec.shapes == {"actions": (15, 7), "front": (16, 16, 3), "hand": (16, 16, 3)}
    assert data.train.read(data.train.all()[:1]).x.shape == (1, 41 * 3 - 1, data.codec.width)
    assert len(data.train) == 2


def test_in_a_mirror_there_are_twice_as_many_demonstrations():
    plain, mirrored = TASK.data(), replace(TASK, mirror=True).data()
    assert len(mirrored.train) == 2 * len(plain.train)
    assert len(mirrored.valid) == len(plain.valid)
    demonstrations = WORLD.demonstrations(15)
    back = WORLD.mirrored(WORLD.mirrored(demonstrations))
    for i in range(len(demonstrations)):
        np.testing.assert_array_equal(back.actions[i], demonstrations.actions[i])
        np.testing.assert_array_equal(back.images["front"][i], demonstrations.images["front"][i])
    turned = WORLD.mirrored(demonstrations)
    np.testing.assert_array_equal(turned.actions[0][:, 1], -demonstrations.actions[0][:, 1])
    np.testing.assert_array_equal(turned.images["hand"][0][0, :, 0], demonstrations.images["hand"][0][0, :, -1])


def test_the_expert_succeeds_and_the_caption_says_so(model, tmp_path):
    world = replace(WORLD, trials=("clean",))
    evaluation = world.evaluate(ExpertAgent(model), tmp_path, held_out=None, samples=3, seed=0, progress=progress)
    assert evaluation.metrics["clean"] == evaluation.metrics["clean: first move"] == evaluation.metrics["clean: second move"] == 1
    assert list(evaluation.figures) == ["clean.mp4"]
    assert evaluation.figures["clean.mp4"].endswith("success, success, success")
    assert (tmp_path / "clean.mp4").stat().st_size > 0


def test_a_late_agent_succeeds_in_the_extra_steps(model, tmp_path):
    late = Trials(16, "kinematic", 3, 0, 150).run_agent(ExpertAgent(model, rest=8), "clean", K, progress)
    assert not late.success.all()
    assert late.later.all()
    world = replace(WORLD, trials=("clean", "open_loop"))
    evaluation = world.evaluate(ExpertAgent(model, rest=8), tmp_path, held_out=None, samples=3, seed=0, progress=progress)
    (table,) = evaluation.tables
    assert table.columns[3] == "150 actions later"
    assert [row[3] for row in table.rows] == ["100%", "", ""]
    assert evaluation.metrics["clean: later"] == 1
    without = replace(world, extra_steps=0).evaluate(ExpertAgent(model), tmp_path, held_out=None, samples=1, seed=0, progress=progress)
    assert "clean: later" not in without.metrics
    assert {len(row) for row in without.tables[0].rows} == {len(without.tables[0].columns)} == {5}
    assert evaluation.figures["clean.mp4"].count("success later") == 3 - late.success.sum()
    for chunk, head in ((40, "120 actions later"), (200, "first move done")):  # whole chunks, if there is one
        result = replace(WORLD, trials=("clean",)).evaluate(
            ExpertAgent(model, chunk=chunk), tmp_path, held_out=None, samples=1, seed=0, progress=progress
        )
        assert result.tables[0].columns[3] == head


def test_every_trial_has_its_row(model, tmp_path):
    evaluation = replace(TASK, world=replace(WORLD, trials=("clean", "dropped", "imagine", "open_loop", "expert"))).evaluate(
        model, tmp_path, samples=2, seed=0, progress=progress
    )
    names = ["clean", "dropped, informed", "dropped, not informed", "imagine", "open loop"]
    names += ["distractors, ignored by the expert", "dropped, ignored by the expert"]
    (table,) = evaluation.tables
    assert [row[0] for row in table.rows] == [*names, "time for 2 decisions at once"]
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert all(evaluation.metrics[name] == 0 for name in names[:4])  # weights that were drawn swap nothing
    assert evaluation.metrics["milliseconds a chunk"] > 0
    assert "codec.png" in evaluation.figures
    assert all((tmp_path / file).stat().st_size > 0 for file in evaluation.figures)


def test_runs_are_compared_in_the_same_episodes(model, tmp_path):
    """Another run has its own options, and trials without a model are run once."""
    task = replace(TASK, world=replace(WORLD, trials=("clean", "dropped", "open_loop")))
    memoryless = replace(TASK, sampler=Sampler(steps=2), agent=AgentOptions(memory=1))
    evaluation = task.compare(model, {"memoryless": (memoryless, model)}, tmp_path, samples=2, seed=0, progress=progress)
    alone = memoryless.evaluate(model, tmp_path, samples=2, seed=0, progress=progress)
    (table,) = evaluation.tables
    assert table.columns[-1] == "memoryless"
    cells = {row[0]: row[-1] for row in table.rows}
    assert cells["open loop"] == ""
    assert cells["clean"].endswith("%")
    assert evaluation.metrics["memoryless: clean"] == alone.metrics["clean"]
    assert "memoryless: open loop" not in evaluation.metrics
    assert (tmp_path / "memoryless" / "codec.png").exists()
    assert all((tmp_path / file).stat().st_size > 0 for file in evaluation.figures)
    with pytest.raises(ValueError, match=r"pusher was trained in another world \(Pushing\)"):
        task.compare(model, {"pusher": (replace(TASK, world=Pushing()), model)}, tmp_path, samples=1, seed=0, progress=progress)


def test_bad_options_are_refused():
    for options in ({"distractor_level": 2}, {"extra_steps": 20}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} .* got"):
            replace(WORLD, **options)
    for chunk in (1, 35, 450):  # chunks that do not fill an episode, or end between frames
        with pytest.raises(ValueError, match=f"a chunk has one of 5, 10, 15, .*; got {chunk}"):
            replace(TASK, chunk=chunk)


def test_every_trial_runs_with_image_tokens(model, tmp_path):
    task = replace(TASK, chunk=60, tokens="image")  # long chunks, for few observations
    image_model = model_for(task, ConvRNNConfig(4, 4, (1, 2), 1), K)
    evaluation = task.evaluate(image_model, tmp_path, samples=1, seed=0, progress=progress)
    assert {"occluded, informed", "distractors, informed", "imagine"} <= evaluation.metrics.keys()


@pytest.mark.parametrize(
    ("samples", "seed", "words"),
    [
        (1, 100, "seed .* got 100"),
        (1, -1, "seed .* got -1"),
        (10_001, 0, "10,000 episodes.*got 10,001"),
    ],
)
def test_episodes_of_other_seeds_are_refused(samples, seed, words, model, tmp_path):
    with pytest.raises(ValueError, match=words):
        WORLD.evaluate(ExpertAgent(model), tmp_path, held_out=None, samples=samples, seed=seed, progress=progress)


def test_demonstrations_are_not_all_made_to_draw_one(model, tmp_path, monkeypatch):
    def made(*_):
        raise AssertionError("made")

    task = replace(TASK, world=replace(WORLD, trials=()))
    with monkeypatch.context() as patch:  # those that are there are drawn
        patch.setattr("diffusion_forcing.imitation.swap.task.demonstrate_once", made)
        assert list(task.evaluate(model, tmp_path, samples=1, seed=0, progress=progress).figures) == ["codec.png"]
    (tmp_path / "codec.png").unlink()
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(Swapping, "prepare", made)
    assert list(task.evaluate(model, tmp_path, samples=1, seed=0, progress=progress).figures) == ["codec.png"]
    assert (tmp_path / "codec.png").stat().st_size > 0
    demonstrations = WORLD.example(30)
    assert (len(demonstrations), demonstrations.every, len(demonstrations.states[0])) == (1, 30, 21)


@pytest.mark.parametrize(("successes", "number", "low", "high"), [(0, 10, 0, 0.278), (10, 10, 0.722, 1), (40, 50, 0.670, 0.888)])
def test_intervals_are_wilsons(successes, number, low, high):
    assert wilson(successes, number) == pytest.approx((low, high), abs=1e-3)
