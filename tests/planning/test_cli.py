"""dforce in the mazes: data, evaluation, pretrained models, and short names of options."""

import json
import re
import shutil

import numpy as np
import pytest
from small import dforce, flat

from diffusion_forcing.engine import pretrained as pretrained_models
from diffusion_forcing.planning.agent import PlanningAgent

TRAIN = [
    "train", "maze2d-umaze", "--task.transitions", "20000", "--model.backbone.hidden", "16", "--model.backbone.layers", "1",
    "--model.backbone.heads", "2", "--train.steps", "1", "--train.batch", "8", "--train.threads", "1", "--task.sampler.steps", "2",
    "--task.plan.lookahead", "2",
]  # fmt: skip
QUICK = ["--task.policy", "scripted"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty current folder and an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run's folder, trained and left alone by the tests."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFORCE_CACHE", str(root / "cache"))
        assert dforce(*TRAIN, "--runs", root) == 0
    return root / "maze2d-umaze"


@pytest.fixture
def pretrained(trained, tmp_path, monkeypatch):
    """The run as a model that comes with the source tree."""
    folder = tmp_path / "pretrained" / "maze2d-umaze"
    for name in ("config.json", "run.json"):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(trained / name, folder / name)
    shutil.copytree(trained / "model", folder / "model")
    monkeypatch.setattr(pretrained_models, "PRETRAINED", tmp_path / "pretrained")
    return folder


def output_of(capsys):
    """Standard output and error since the last call, without line breaks and frames."""
    return tuple(flat(re.sub(r"(?m)^[│|╭╰+] | [│|╮╯+]$", " ", text)) for text in capsys.readouterr())


# Data.


def test_data_made_in_memory_need_no_preparing(here, capsys):
    assert dforce("data", "composition") == 0
    assert "composition makes its data within seconds, whenever it needs them" in output_of(capsys)[0]
    assert not (here / "cache").exists()


def test_data_are_made_and_their_file_is_printed(here, capsys, monkeypatch):
    monkeypatch.setitem(__import__("diffusion_forcing.planning.data", fromlist=["TRANSITIONS"]).TRANSITIONS, "umaze", 640)
    assert dforce("data", "maze2d-umaze") == 0
    file = here / "cache" / "maze2d-umaze-640-0.npz"
    assert f"data {file} (0 MB)" in output_of(capsys)[0]
    assert np.load(file)["observations"].shape == (64, 10, 4)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["data"], 2, "dforce data RECIPE [options] Make a recipe's data now"),
        (["data", "--help"], 0, "$DFORCE_CACHE, or ~/.cache/dforce"),
        (["data", "maze2d-umaze", "maze2d-medium"], 2, "dforce data RECIPE"),
        (["data", "nothing"], 2, "there is no recipe 'nothing'; `dforce list` shows composition"),
        (["data", "nowhere_at_all:recipe"], 2, "cannot import 'nowhere_at_all'"),
    ],
)
def test_mistakes_and_questions_about_data(words, code, message, capsys):
    assert dforce(*words) == code
    assert message in " ".join(output_of(capsys))


# Episodes.


def test_episodes_are_what_samples_are_elsewhere(trained, here, capsys):
    assert dforce("eval", trained, "--episodes", "2", *QUICK, "--seed", "3", "--json", "out.json") == 0
    numbers = json.loads((here / "out.json").read_text())
    assert (numbers["episodes"], numbers["samples"], numbers["seed"]) == (2, 2, 3)
    assert numbers["success"] == 1
    out, _ = output_of(capsys)
    assert "Maze2D umaze, fixed goal: normalised score" in out
    assert "here: scripted controller that knows the maze" in out
    assert "published: Diffusion Forcing 116.7" in out
    assert (trained / "figures" / "episodes.png").exists()


def test_without_a_number_a_hundred_episodes_are_played(trained, here):
    assert dforce("eval", trained, *QUICK, "--json", "out.json") == 0
    assert json.loads((here / "out.json").read_text())["episodes"] == 100


def test_episodes_may_come_before_the_run(trained, here, monkeypatch):
    from diffusion_forcing.engine.task import Evaluation
    from diffusion_forcing.planning.task import Maze2D

    asked = []
    monkeypatch.setattr(Maze2D, "evaluate", lambda self, *a, samples, **o: asked.append(samples) or Evaluation({}))
    assert dforce("eval", "--episodes", "3", trained) == 0
    assert asked == [3]


@pytest.mark.parametrize("number", ["0", "-2"])
def test_episodes_count_from_one(number, trained, capsys):
    assert dforce("eval", trained, "--episodes", number) == 2
    assert "counts from 1" in output_of(capsys)[1]


def test_multi_draws_a_goal_for_each_episode(trained, here, capsys):
    assert dforce("eval", trained, "--episodes", "2", "--multi", *QUICK, "--json", "out.json") == 0
    assert json.loads((here / "out.json").read_text())["episodes"] == 2
    assert "Maze2D umaze, Multi2D: normalised score" in output_of(capsys)[0]


@pytest.mark.parametrize("words", [["--multi", "--episodes", "2"], ["--task.multi"]])
def test_multi_in_its_other_places(words, trained, capsys):
    assert dforce("eval", trained, *QUICK, *words) == 0
    assert "Multi2D" in output_of(capsys)[0]


def test_multi_may_come_before_the_run(trained, capsys):
    assert dforce("eval", "--multi", trained, "--episodes", "1", *QUICK) == 0


def test_short_names_may_be_joined_to_their_value(trained, here):
    assert dforce("eval", trained, "--episodes=2", *QUICK) == 0


def test_what_is_written_is_json_whatever_was_measured(trained, here):
    """One episode has no standard error, and one that never arrives no step at which it did."""
    assert dforce("eval", trained, "--episodes", "1", *QUICK, "--json", "out.json") == 0

    def refuse(word):
        raise ValueError(f"{word} is no JSON")

    for file in (here / "out.json", trained / "eval.json"):
        json.loads(file.read_text(), parse_constant=refuse)


def test_sample_writes_plans(trained, here, capsys):
    assert dforce("sample", trained, "--samples", "3", "--out", "new") == 0
    assert np.load(here / "new" / "plans.npz")["actions"].shape == (3, 20, 2)
    assert "wrote new/plans.png" in output_of(capsys)[0]


def test_options_of_planning_are_options_of_the_command(trained, capsys):
    assert dforce("eval", trained, "--help-all") == 0
    out, _ = output_of(capsys)
    for part in ("--task.multi", "--task.policy {agent,zeroed,diffuser,diffuser_pd,scripted,random,mppi}", "--task.plan.lookahead",
                 "--task.plan.candidates", "--episodes"):  # fmt: skip
        assert part in out


# Pretrained models.


@pytest.mark.parametrize("command", ["eval", "sample"])
def test_an_unknown_pretrained_model_is_answered_with_those_that_are(command, here, capsys, monkeypatch):
    monkeypatch.setattr(pretrained_models, "PRETRAINED", here / "pretrained")
    assert dforce(command, "maze2d-tiny", "--pretrained") == 2
    _, err = output_of(capsys)
    assert "there is no pretrained model 'maze2d-tiny'" in err
    assert "Traceback" not in err
    (here / "pretrained" / "maze2d-huge").mkdir(parents=True)
    (here / "pretrained" / "maze2d-huge" / "config.json").write_text("{}")
    assert dforce(command, "maze2d-tiny", "--pretrained") == 2
    assert "there are maze2d-huge" in output_of(capsys)[1]


def test_a_pretrained_model_is_judged_by_its_name(pretrained, here, capsys):
    assert dforce("list") == 0
    assert "Pretrained: maze2d-umaze" in output_of(capsys)[0]
    before = sorted(path.name for path in pretrained.rglob("*"))
    assert dforce("eval", "maze2d-umaze", "--pretrained", "--episodes", "2", *QUICK) == 0
    run = here / "runs" / "maze2d-umaze-pretrained"
    assert json.loads((run / "eval.json").read_text())["metrics"]["episodes"] == 2
    assert (run / "report.html").exists()
    assert (run / "figures" / "episodes.png").exists()
    assert sorted(path.name for path in pretrained.rglob("*")) == before, "pretrained models are left alone"


def test_pretrained_may_come_before_the_name(pretrained, here):
    assert dforce("sample", "--pretrained", "maze2d-umaze", "--samples", "2") == 0
    assert (here / "runs" / "maze2d-umaze-pretrained" / "samples" / "plans.npz").exists()


def test_an_agent_comes_by_the_name_of_a_pretrained_model(pretrained):
    agent = PlanningAgent.from_pretrained("maze2d-umaze")
    assert agent.maze.name == "umaze"
    assert (agent.sampler.steps, agent.options.lookahead) == (2, 2)
