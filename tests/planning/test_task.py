"""The task Maze2D from data to figures."""

import json

import numpy as np
import pytest
import torch
from mazes import write_public_layout
from oracles import seeded
from small import small

from diffusion_forcing import DiffusionForcing
from diffusion_forcing.engine.config import replace
from diffusion_forcing.engine.train import train
from diffusion_forcing.planning import figures as pictures
from diffusion_forcing.planning.envs.maze2d import MAZES
from diffusion_forcing.planning.scores import failure_warnings
from diffusion_forcing.planning.task import Maze2D

RECIPES = ("maze2d-umaze", "maze2d-umaze-gru", "maze2d-umaze-causal_transformer")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own for each test."""
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def report(what, done, of):
    assert 0 < done <= of


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"maze": "tiny"}, "there is no maze 'tiny'; choose from umaze, medium, large"),
        ({"policy": "genius"}, "policy"),
        ({"frame_stack": 0}, "frame_stack"),
        ({"window_frames": 5}, "window_frames"),
        ({"parallel_episodes": 0}, "parallel_episodes"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Maze2D(**options)


def test_a_window_covers_an_episode_or_window_frames():
    assert [Maze2D(name).tokens for name in MAZES] == [30, 60, 80]
    assert Maze2D("umaze", window_frames=55).tokens == 5
    assert Maze2D("umaze", frame_stack=7).tokens == 42


def test_training_and_validation_windows_are_of_different_streams():
    data = Maze2D("umaze", transitions=20_000, short_windows=0.0).data()
    batch = data.train.read(data.train.draw(5, seeded(0)))
    width = len(data.codec.variance)
    assert batch.x.shape == (5, 31, width)
    assert data.train.event == data.valid.event == (width,)
    assert torch.isfinite(batch.x).all()
    assert (len(data.train._frames), len(data.valid._frames)) == (62, 2)
    every = data.train.read(data.train.draw(300, seeded(0))).x[:, 1:].reshape(-1, width)
    assert ((every**2).mean(0) / data.codec.variance).log().abs().max() < 0.5, "variances are the codec's"


def test_too_few_transitions_for_a_window_are_named():
    with pytest.raises(ValueError, match="needs 300 frames, but the longest stream has 156"):
        Maze2D("umaze", transitions=10_000).data()


def test_a_single_stream_serves_for_training_and_validation(tmp_path):
    write_public_layout(tmp_path / "data.hdf5", length=2000)
    data = Maze2D("umaze", data_file=tmp_path / "data.hdf5", window_frames=50).data()
    assert len(data.train) == len(data.valid) == 1999 - 50 + 1
    assert data.train.read(data.train.draw(2, seeded(0))).x.shape[2] == 24


def test_streams_kept_for_validation_are_long_enough(tmp_path):
    write_public_layout(tmp_path / "data.hdf5", length=2000, timeouts=(20,))
    assert len(Maze2D("umaze", data_file=tmp_path / "data.hdf5", window_frames=50).data().valid)


def quick(recipe, **changes):
    """A recipe of the maze for a few steps, with plans that cost little."""
    plan = {"task__sampler__steps": 2, "task__plan__scale": 0.02, "task__plan__short_plan_scale": 0.02, "task__plan__lookahead": 3}
    name, _, backbone = recipe.partition("-umaze")
    experiment = small(name + "-umaze", backbone=backbone.removeprefix("-") or None)
    return replace(experiment, task__transitions=20_000, train__steps=2, train__validate_every=1, **{**plan, **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders of three runs, and their experiments."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFORCE_CACHE", str(folder / "cache"))
        for recipe in RECIPES:
            runs[recipe] = quick(recipe), train(quick(recipe), folder / recipe, quiet=True), folder / recipe
    return runs


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_train_save_and_load(recipe, trained):
    experiment, result, folder = trained[recipe]
    assert (result.status, result.step) == ("done", 2)
    assert np.isfinite([result.loss, result.valid_loss]).all()
    model = DiffusionForcing.from_pretrained(folder / "model")
    assert model.traits.causal == (recipe != "maze2d-umaze")
    assert experiment.task.sampler.matrix == ("pyramid" if model.traits.causal else "full_sequence")
    assert model.preconditioning.constraint is not None
    assert model.preconditioning.smoother.causal == model.traits.causal
    assert model.variance.shape == (24,)
    torch.testing.assert_close(model.variance, model.codec.variance)
    frames = torch.randn(1, 20, 6, generator=seeded(0))
    assert torch.isfinite(model.codec.decode(model.codec.encode(frames))).all()


@pytest.mark.parametrize("multi", [False, True])
def test_episodes_are_run_in_batches(multi, trained, tmp_path):
    experiment, _, folder = trained["maze2d-umaze"]
    model = DiffusionForcing.from_pretrained(folder / "model")
    task = replace(experiment.task, multi=multi, parallel_episodes=2, policy="random")
    steps = []
    episodes, extra = task.episodes(model, 5, 3, lambda what, done, of: steps.append((done, of)))
    assert episodes.observations.shape == (5, 301, 4)
    assert episodes.rewards.shape == episodes.touched.shape == (5, 300)
    assert steps[-1] == (1500, 1500)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert extra == {}
    assert (len(np.unique(episodes.goals, axis=0)) == 5) == multi
    again, _ = task.episodes(model, 5, 3)
    np.testing.assert_array_equal(episodes.observations, again.observations)
    assert (task.episodes(model, 5, 4)[0].observations != again.observations).any()


def test_evaluation_measures_and_draws(trained, tmp_path):
    experiment, _, folder = trained["maze2d-umaze"]
    model = DiffusionForcing.from_pretrained(folder / "model")
    evaluation = experiment.task.evaluate(model, tmp_path, samples=2, seed=0, progress=report)
    names = {
        "score", "score_stderr", "success", "first_reach", "stay", "wall_contact", "episodes", "seconds_a_plan", "plans", "bad_plans",
        "given_up", "plan_error_median", "plan_error_mean", "failed_plans",
    }  # fmt: skip
    assert set(evaluation.metrics) == names
    assert evaluation.metrics["episodes"] == 2
    assert evaluation.metrics["plans"] == 2 * 15
    scores, details = evaluation.tables
    assert scores.title == "Maze2D umaze, fixed goal: normalised score"
    assert scores.rows[0][0] == "here: Diffusion Forcing, own actions"
    assert ("published: Diffusion Forcing", "116.7") in scores.rows
    assert all(len(row) == 2 for table in evaluation.tables for row in table.rows)
    assert details.rows[0] == ("episodes", "2")
    assert set(evaluation.figures) == {"episodes.png", "failures.png", "plans.png", "episode.gif"}
    for name in evaluation.figures:
        assert (tmp_path / name).read_bytes().startswith(b"GIF8" if name.endswith("gif") else b"\x89PNG")
    json.dumps(evaluation.metrics)


@pytest.mark.parametrize(("threshold", "warns"), [(0.1, True), (100.0, False)])
def test_plans_that_part_from_the_world_are_reported(threshold, warns, trained, tmp_path, monkeypatch):
    experiment, _, folder = trained["maze2d-umaze-gru"]
    model = DiffusionForcing.from_pretrained(folder / "model")
    model.preconditioning.constrain = lambda parameterization, out, *_: out  # plans then jump from token to token
    task = replace(experiment.task, plan__replan_error=threshold)
    monkeypatch.setattr(Maze2D, "draw_pyramid", lambda *_: None)
    monkeypatch.setattr(pictures, "animate", lambda *_: None)
    evaluation = task.evaluate(model, tmp_path, samples=2, seed=0, progress=report)
    failed, rows = evaluation.metrics["failed_plans"], dict(evaluation.tables[1].rows)
    assert rows["plans that failed (replan_error)"] == f"{failed:.1%}"
    if warns:
        assert failed > 0.2
        assert evaluation.warnings[0].startswith(f"Plans and world part: {failed:.0%} of the plans were off by more than 0.1 m")
    else:
        assert failed == 0
        assert evaluation.warnings == ()


def test_few_failed_plans_are_no_reason_to_warn():
    metrics = {"failed_plans": 0.19, "plan_error_median": 0.01}
    assert failure_warnings(metrics, 0.1) == failure_warnings({}, 0.1) == ()
    assert "21% of the plans" in failure_warnings({**metrics, "failed_plans": 0.21}, 0.1)[0]


def test_evaluation_of_a_baseline_with_random_goals(trained, tmp_path):
    experiment, _, folder = trained["maze2d-umaze"]
    model = DiffusionForcing.from_pretrained(folder / "model")
    task = replace(experiment.task, policy="scripted", multi=True)
    evaluation = task.evaluate(model, tmp_path, samples=3, seed=1, progress=report)
    assert evaluation.metrics["success"] == 1
    assert evaluation.metrics["score"] > 100
    assert "Multi2D" in evaluation.tables[0].title
    assert ("published: CQL", "-") in evaluation.tables[0].rows
    assert set(evaluation.figures) == {"episodes.png", "failures.png"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_sample_writes_plans_and_a_picture(recipe, trained, tmp_path):
    experiment, _, folder = trained[recipe]
    task = replace(experiment.task, plan__lookahead=None)
    files = task.sample(DiffusionForcing.from_pretrained(folder / "model"), tmp_path, samples=2, seed=0, progress=report)
    assert [file.name for file in files] == ["plans.npz", "plans.png"]
    arrays = np.load(files[0])
    assert {name: arrays[name].shape for name in arrays} == {"actions": (2, 300, 2), "observations": (2, 300, 4), "goals": (2, 2)}
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_the_policy_is_an_option(trained):
    experiment, _, folder = trained["maze2d-umaze"]
    model = DiffusionForcing.from_pretrained(folder / "model")
    names = [type(replace(experiment.task, policy=policy).agent(model)).__name__ for policy in
             ("agent", "zeroed", "diffuser", "diffuser_pd", "scripted", "random", "mppi")]  # fmt: skip
    assert names == ["PlanningAgent", "PlanningAgent", "Diffuser", "Diffuser", "ScriptedPolicy", "RandomPolicy", "MPPI"]
    causal = DiffusionForcing.from_pretrained(trained["maze2d-umaze-gru"][2] / "model")
    with pytest.raises(ValueError, match="causal=False"):
        replace(experiment.task, policy="diffuser").agent(causal)
