"""dforce, as people type it."""

import dataclasses
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from small import VARIANTS, WORDS, command, dforce, flat, logged, stop_after

from diffusion_forcing import __version__
from diffusion_forcing.engine.recipes import RECIPES, build

TRAIN = ["train", "composition", *WORDS, "--train.steps", "3"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run's folder, trained and left alone by the tests."""
    root = tmp_path_factory.mktemp("runs")
    assert dforce(*TRAIN, "--runs", root) == 0
    return root / "composition"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder, with imports from it forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def output_of(capsys):
    """Output and errors since last asked, without line breaks and frames."""
    return tuple(flat(re.sub(r"(?m)^[│|╭╰+] | [│|╮╯+]$", " ", text)) for text in capsys.readouterr())


# Finding one's way.


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_shows_each_command_and_a_first_run(words, capsys):
    assert dforce(*words) == 0
    out, _ = output_of(capsys)
    for part in ("list", "train RECIPE", "eval RUN", "sample RUN", "report RUN", "verify RUN", "train mymodule:myfunction"):
        assert f"dforce {part}" in out


def test_help_says_where_options_go(capsys):
    dforce()
    assert "dforce train RECIPE [options]" in output_of(capsys)[0]


def test_the_version_is_printed(capsys):
    assert dforce("--version") == 0
    assert capsys.readouterr().out.strip() == __version__


def test_list_shows_every_recipe_with_a_sentence(capsys):
    assert dforce("list") == 0
    out, _ = output_of(capsys)
    for name, recipe in RECIPES.items():
        assert name in out
        assert recipe.about.split()[0] in out
        assert re.search(r"\d+ minutes? on (two cores|one core)|For a GPU", recipe.about), "how long it takes"


@pytest.mark.parametrize("words", [["train"], ["train", "--help"]])
def test_train_without_a_recipe_lists_them(words, capsys):
    assert dforce(*words) == 0
    out, _ = output_of(capsys)
    assert "dforce train RECIPE" in out
    assert all(name in out for name in RECIPES)


def test_train_help_shows_what_is_often_changed_and_help_all_everything(capsys):
    assert dforce("train", "composition", "--help") == 0
    short, _ = output_of(capsys)
    for part in (
        "Trajectories that cross", "--train.steps", "Stop after so many steps", "--train.lr", "Peak learning rate of AdamW",
        "--model.backbone.hidden", "Width of the latent z", "--task.half", "Steps from a corner to the middle", "--fresh",
        "--backbone {gru,transformer}", "--baseline {full_sequence,next_token,diffuser,timegrad}", "--help-all",
    ):  # fmt: skip
        assert part in short
    assert "--train.clip-norm" not in short
    assert dforce("train", "composition", "--help-all") == 0
    long, _ = output_of(capsys)
    for part in ("--train.steps", "--train.clip-norm", "--model.weight {uniform,min_snr,fused_snr}", "{linear,cosine,sigmoid}"):
        assert part in long


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_help_of_a_recipe_fits_two_screens(recipe, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert dforce("train", recipe, "--help") == 0
    assert len(capsys.readouterr().out.splitlines()) <= 104, "with plain lines between groups, a little longer than in a terminal"


def names(value, prefix=""):
    """Dotted names of a dataclass's options."""
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        yield prefix + field.name
        if dataclasses.is_dataclass(inner):
            yield from names(inner, f"{prefix}{field.name}.")


def test_options_shown_by_help_exist():
    """In one recipe at least: worlds and networks differ."""
    existing, shown = {}, {}
    for variant in VARIANTS:
        name, options = variant["recipe"], {option: value for option, value in variant.items() if option != "recipe"}
        experiment = build(name, **options)
        for part in (experiment.task, experiment.model, experiment.train, experiment.objective):
            if part is not None:
                existing.setdefault(type(part), set()).update(names(part))
                shown[type(part)] = set(part.main_options or ())
    for kind, options in shown.items():
        assert options <= existing[kind], kind


@pytest.mark.parametrize("name", ["eval", "sample", "report"])
def test_each_command_on_a_run_has_help(name, capsys):
    assert dforce(name, "--help") == 0
    assert "The run's folder" in output_of(capsys)[0]


def test_python_m_is_dforce():
    ended = subprocess.run(**command("diffusion_forcing", "--version"), capture_output=True, check=True)
    assert ended.stdout.strip() == __version__


# Mistakes.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fly"], "there is no command 'fly'; choose from list, train, eval, sample, report"),
        (["train", "juggling"], "there is no recipe 'juggling'; `dforce list` shows composition"),
        (["train", "--train.steps", "3", "composition"], "name the recipe first"),
        (["train", "composition", "--train.stepss", "3"], "Unrecognized options: --train.stepss"),
        (["train", "composition", "--train.lr", "fast"], "--train.lr"),
        (["train", "composition", "--train.lr", "-1"], "lr, muon_lr and clip_norm must be positive; got -1.0"),
        (["train", "composition", "--objective.draw", "random"], "unknown draw of levels 'random'; choose from independent"),
        (["train", "composition", "--train.optimizer", "sgd"], "adamw"),
        (["train", "composition", "--train.precision", "float16", "--train.device", "cpu"], "precision=float16 is for CUDA"),
        (["train", "composition", "--model.levels", "0"], "at least one level"),
        (["train", "nowhere_at_all:recipe"], "cannot import 'nowhere_at_all'"),
        (["train", "a:b:c"], "recipe 'a:b:c'"),
        (["train", "json:nothing"], "json has no function 'nothing'"),
        (["eval"], "run's folder"),
        (["eval", "nowhere"], "nowhere is not a run (it has no config.json); `dforce train RECIPE` makes one under runs/"),
        (["sample", "nowhere"], "nowhere is not a run"),
        (["report", "nowhere"], "nowhere is not a run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_mistakes_are_told_without_a_traceback(words, message, here, capsys):
    assert dforce(*words) == 2
    _, err = output_of(capsys)
    assert message in err
    assert "Traceback" not in err


def test_a_mistyped_option_is_answered_with_the_likely_one(here, capsys):
    dforce("train", "composition", "--train.step", "3")
    assert "--train.steps" in output_of(capsys)[1]


def test_eval_of_a_wrong_folder_names_the_runs_there_are(here, capsys):
    assert dforce(*TRAIN, "--name", "mine") == 0
    assert dforce("eval", "runs/yours") == 2
    assert "there are mine under runs/" in output_of(capsys)[1]


def test_brackets_in_messages_are_kept(here, capsys, monkeypatch):
    """Such as those of an extra to install."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert dforce(*TRAIN, "--train.wandb") == 2
    assert "pip install 'diffusion_forcing[wandb]'" in output_of(capsys)[1]


@pytest.mark.parametrize("samples", ["0", "-3"])
def test_samples_count_from_one(samples, trained, capsys):
    assert dforce("eval", trained, "--samples", samples) == 2
    assert f"--samples counts from 1; got {samples}" in output_of(capsys)[1]


def test_the_traceback_is_there_for_those_who_ask(here, monkeypatch):
    monkeypatch.setenv("DFORCE_TRACEBACK", "1")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        dforce("eval", "nowhere")


# Runs.


def test_a_run_holds_what_is_needed_to_repeat_it(trained):
    assert {"config.json", "run.json", "log.jsonl", "checkpoint.safetensors", "model", "tensorboard"} <= {p.name for p in trained.iterdir()}
    about = json.loads((trained / "run.json").read_text())
    assert about["command"].startswith("dforce train composition --task.half 3")
    assert "torch" in about["versions"]
    assert about["seed"] == 0
    assert json.loads((trained / "config.json").read_text())["train"]["steps"] == 3
    assert len(logged(trained)) == 3


def test_the_same_command_again_changes_nothing(here, capsys):
    assert dforce(*TRAIN) == 0
    before = (here / "runs/composition/model/model.safetensors").read_bytes()
    assert dforce(*TRAIN) == 0
    assert (here / "runs/composition/model/model.safetensors").read_bytes() == before
    assert "Next: dforce eval runs/composition" in output_of(capsys)[0]


def test_a_run_with_other_options_is_not_overwritten(here, capsys):
    assert dforce(*TRAIN) == 0
    before = (here / "runs/composition/log.jsonl").read_text()
    assert dforce(*TRAIN, "--train.lr", "0.5", "--task.half", "4") == 2
    _, err = output_of(capsys)
    assert "runs/composition holds a run with other options (task.half was 3, now 4; train.lr was 0.005, now 0.5)" in err
    assert "--name NAME" in err
    assert "--fresh" in err
    assert (here / "runs/composition/log.jsonl").read_text() == before


def test_fresh_sets_the_old_run_aside(here):
    assert dforce(*TRAIN) == 0
    before = (here / "runs/composition/model/model.safetensors").read_bytes()
    for lr in ("0.5", "0.25"):
        assert dforce(*TRAIN, "--train.lr", lr, "--fresh") == 0
    assert sorted(path.name for path in (here / "runs").iterdir()) == ["composition", "composition.old1", "composition.old2"]
    assert (here / "runs/composition.old1/model/model.safetensors").read_bytes() == before
    assert json.loads((here / "runs/composition/config.json").read_text())["train"]["lr"] == 0.25


def test_fresh_needs_no_old_run(here):
    assert dforce(*TRAIN, "--fresh") == 0
    assert [path.name for path in (here / "runs").iterdir()] == ["composition"]


@pytest.mark.parametrize("mistake", [["--train.precision", "float16", "--train.device", "cpu"], ["--model.levels", "0"]])
def test_a_start_that_failed_does_not_stand_in_the_way_of_the_next(mistake, here, capsys):
    """A mistake in an option, corrected, is not another experiment: nothing was trained yet."""
    assert dforce(*TRAIN, *mistake) == 2
    assert dforce(*TRAIN) == 0, output_of(capsys)


def test_a_run_goes_on_with_another_budget(here):
    """More steps are more of the same experiment; the run then says so."""
    assert dforce(*TRAIN) == 0
    first = logged(here / "runs/composition")
    assert dforce(*TRAIN, "--train.steps", "5", "--train.validate-every", "2") == 0
    both = logged(here / "runs/composition")
    assert list(both) == [1, 2, 3, 4, 5]
    assert {step: both[step] for step in first} == first
    assert json.loads((here / "runs/composition/config.json").read_text())["train"]["steps"] == 5


def test_the_command_a_run_gives_is_the_one_that_made_it_what_it_is(here):
    assert dforce(*TRAIN) == 0
    assert dforce(*TRAIN, "--train.steps", "5") == 0
    assert json.loads((here / "runs/composition/run.json").read_text())["command"].endswith("--train.steps 5")


def test_an_interrupted_run_says_how_to_go_on(here, capsys, monkeypatch):
    words = [*TRAIN, "--name", "a name of its own"]
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert dforce(*words, "--fresh") == 143
    out, _ = output_of(capsys)
    assert "interrupted at step 2; all is saved. Resume it with: dforce train composition" in out
    assert out.endswith("--name 'a name of its own'"), "without --fresh, which would start anew"
    assert dforce(*words) == 0
    assert len(logged(here / "runs" / "a name of its own")) == 3


def test_commands_and_paths_are_printed_on_one_line_to_be_copied(here, capsys, monkeypatch):
    stop_after(monkeypatch, 2)
    assert dforce(*TRAIN, "--name", "[mine]") == 143
    assert " ".join(["dforce", *TRAIN, "--name", "'[mine]'"]) in capsys.readouterr().out
    out = here / ("long" * 20) / "[folder]"
    assert dforce("sample", "runs/[mine]", "--samples", "4", "--out", out) == 0
    assert f"wrote {out / 'samples.npz'}\n" in capsys.readouterr().out


def test_a_run_that_has_not_trained_has_nothing_to_evaluate(here, capsys):
    assert dforce(*TRAIN) == 0
    for file in (here / "runs/composition/model").iterdir():
        file.unlink()
    (here / "runs/composition/model").rmdir()
    assert dforce("eval", "runs/composition") == 2
    assert "runs/composition has no trained model yet" in output_of(capsys)[1]


def test_a_damaged_config_is_named(here, capsys):
    assert dforce(*TRAIN) == 0
    (here / "runs/composition/config.json").write_text("{")
    for words in (["eval", "runs/composition"], ["report", "runs/composition"], TRAIN):
        assert dforce(*words) == 2
        assert "config.json is not valid JSON" in output_of(capsys)[1]


# Results.


def test_eval_prints_a_table_and_writes_numbers_figures_and_a_page(here, capsys):
    assert dforce(*TRAIN) == 0
    output_of(capsys)
    assert dforce("eval", "runs/composition", "--samples", "20", "--seed", "3", "--json", "out/numbers.json") == 0
    out, _ = output_of(capsys)
    for part in ("Where 20 trajectories end", "with memory", "100.0%", "figures/composition.png", "report.html"):
        assert part in out
    run = here / "runs/composition"
    assert (run / "figures/composition.png").stat().st_size > 1000
    assert "Where 20 trajectories end" in (run / "report.html").read_text()
    numbers = json.loads((here / "out/numbers.json").read_text())
    assert numbers["data/opposite"] == 1
    assert (numbers["samples"], numbers["seed"]) == (20, 3)
    kept = json.loads((run / "eval.json").read_text())
    assert all(numbers[name] == value for name, value in kept["metrics"].items())


def test_eval_gives_the_same_numbers_for_the_same_seed(trained, tmp_path):
    for name, seed in (("one", "1"), ("same", "1"), ("other", "2")):
        assert dforce("eval", trained, "--samples", "10", "--seed", seed, "--json", tmp_path / name) == 0
    one, same, other = (json.loads((tmp_path / name).read_text()) for name in ("one", "same", "other"))
    assert one == same
    assert one != other


def test_eval_takes_options_of_the_task(trained, tmp_path, capsys):
    words = ["eval", trained, "--samples", "10", "--json"]
    assert dforce(*words, tmp_path / "pyramid") == 0
    assert dforce(*words, tmp_path / "tokens", "--task.sampler.matrix", "autoregressive", "--task.sampler.steps", "2") == 0
    assert json.loads((tmp_path / "pyramid").read_text()) != json.loads((tmp_path / "tokens").read_text())


def test_runs_of_a_task_that_is_measured_alone_cannot_be_compared(trained, capsys):
    assert dforce("eval", trained, "--against", trained, "--samples", "5") == 2
    assert "Composition is measured one run at a time; leave out --against" in output_of(capsys)[1]


def test_a_device_that_a_task_does_not_support_is_refused(trained, capsys):
    assert dforce("sample", trained, "--device", "cuda") == 2
    assert "Composition samples on the CPU" in output_of(capsys)[1]


def test_options_may_come_before_the_run(trained, capsys):
    assert dforce("eval", "--samples", "7", trained) == 0
    assert "Where 7 trajectories end" in output_of(capsys)[0]


def test_sample_writes_arrays_and_a_picture(trained, here, capsys):
    assert dforce("sample", trained, "--samples", "4", "--out", "new") == 0
    assert np.load(here / "new/samples.npz")["with_memory"].shape == (4, 7, 2)
    out, _ = output_of(capsys)
    for name in ("new/samples.npz", "new/samples.png"):
        assert (here / name).exists()
        assert f"wrote {name}" in out


def test_report_writes_a_page_before_any_evaluation(here, capsys):
    assert dforce(*TRAIN) == 0
    assert dforce("report", "runs/composition") == 0
    assert "runs/composition/report.html" in output_of(capsys)[0]
    page = (here / "runs/composition/report.html").read_text()
    assert "Not evaluated yet" in page
    assert "dforce train composition" in page


# Recipes of one's own.

RECIPE = '''
from dataclasses import dataclass
from pathlib import Path

import torch

from diffusion_forcing.backbones import RNNConfig
from diffusion_forcing.engine.config import Experiment, ModelConfig, TrainConfig
from diffusion_forcing.windows import Windows
from diffusion_forcing.engine.task import Evaluation, Table, Task, TaskData


@dataclass(frozen=True)
class Walks(Task):
    """Random walks."""

    number: int = 16
    """How many."""
    source: Path | None = None
    """A file to read."""

    def data(self):
        walks = torch.randn(self.number, 5, 1, generator=torch.Generator().manual_seed(0)).cumsum(1)
        return TaskData(Windows(walks, 5), Windows(walks, 5))

    def evaluate(self, model, folder, *, samples, seed, progress):
        table = Table("Walks", ("what", "how many"), (("walks", str(self.number)),))
        return Evaluation({"number": self.number}, (table,), warnings=("Walks walk [away].",))

    def sample(self, model, folder, *, samples, seed, progress):
        (folder / "walks.txt").write_text(str(samples))
        return [folder / "walks.txt"]


def walks():
    """Walks of my own."""
    return Experiment(Walks(), ModelConfig(RNNConfig(hidden=8)), TrainConfig(steps=2, batch=4, threads=1))


def nothing():
    pass


broken = 3
'''


def test_a_recipe_of_ones_own_trains_evaluates_samples_and_reports(here, capsys):
    (here / "my_walks.py").write_text(RECIPE)
    assert dforce("train", "my_walks:walks", "--help") == 0
    help_text = output_of(capsys)[0]
    assert "--task.number" in help_text
    assert "Walks of my own." in help_text
    assert dforce("train", "my_walks:walks", "--task.number", "9", "--train.steps", "3") == 0
    run = "runs/my_walks.walks"
    assert f"dforce eval {run} --recipe my_walks:walks" in output_of(capsys)[0]
    assert dforce("eval", run) == 2
    assert "add --recipe my_walks:walks" in flat(output_of(capsys)[1])
    assert dforce("eval", run, "--recipe", "my_walks:walks", "--json", "numbers.json") == 0
    assert "Walks walk [away]." in output_of(capsys)[0]
    assert "Walks walk [away]." in (here / run / "report.html").read_text()
    assert json.loads((here / "numbers.json").read_text())["number"] == 9
    assert dforce("sample", run, "--recipe=my_walks:walks", "--samples", "5") == 0
    assert (here / run / "samples/walks.txt").read_text() == "5"
    assert dforce("report", run) == 0
    assert "Walks of my own." in (here / run / "report.html").read_text()


def test_a_task_of_ones_own_may_have_a_path(here, capsys):
    (here / "my_files.py").write_text(RECIPE)
    assert dforce("train", "my_files:walks", "--task.source", "data/walks.csv") == 0
    assert dforce("eval", "runs/my_files.walks", "--recipe", "my_files:walks") == 0


@pytest.mark.parametrize(
    ("function", "message"),
    [("nothing", "Experiment"), ("broken", "my_mistakes has no function 'broken'"), ("absent", "no function 'absent'")],
)
def test_a_recipe_that_is_none_is_refused(function, message, here, capsys):
    (here / "my_mistakes.py").write_text(RECIPE)
    assert dforce("train", f"my_mistakes:{function}") == 2
    assert message in output_of(capsys)[1]
