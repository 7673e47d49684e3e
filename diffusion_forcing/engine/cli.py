"""dforce: train, evaluate, sample and report from the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from ..model import DiffusionForcing
from ..registry import load
from .config import Experiment
from .distributed import check_device
from .fingerprint import check_data
from .interrupt import exit_code
from .lock import locked
from .log import progress_bar
from .objective import OBJECTIVES
from .options import HELP_ALL, parse
from .output import outlived_output
from .pretrained import load_pretrained, model_folder, pretrained_names, run_folder
from .recipes import BASELINES, RECIPES, build, find, run_name
from .report import write_report
from .run import load_run, open_run, save_evaluation, set_aside
from .task import TASKS, Table, Task
from .train import Diverged, check, train
from .verify import verify

console = Console(soft_wrap=True, emoji=False)

HELP = """[bold]dforce[/] trains, samples and evaluates Diffusion Forcing models: every token has its own noise level.

  [bold]dforce list[/]                        recipes that can be trained, and pretrained models
  [bold]dforce train RECIPE[/] [dim]\\[options][/]       train; runs/RECIPE holds everything, the same command resumes an interrupted run
  [bold]dforce eval RUN[/] [dim]\\[options][/]           measure, print tables, draw figures
  [bold]dforce sample RUN[/] [dim]\\[options][/]         draw samples, as arrays and as a picture
  [bold]dforce report RUN[/]                  one self-contained HTML page
  [bold]dforce verify RUN[/]                  check files, weights, hashes and data of a run
  [bold]dforce data RECIPE[/] [dim]\\[options][/]        make a recipe's data now, rather than when training starts
  [bold]dforce play RUN --keys wwwddww[/]     steer a video model by keys and film what it generates
  [bold]dforce forecast FILE --horizon N[/]   forecast the series of a CSV or Parquet file: trains, back-tests, writes, draws

Each command explains its options with --help, e.g. [bold]dforce train composition --help[/]; --help-all lists rarely used ones, too.
A pretrained model, nothing to train: [bold]dforce eval maze2d-medium --pretrained --episodes 100[/]
A first run, a minute long: [bold]dforce train composition && dforce eval runs/composition[/]
Baselines are one option: [bold]--baseline full_sequence[/] (full-sequence diffusion) or [bold]next_token[/] (next-token diffusion).
Your own recipe: [bold]dforce train mymodule:myfunction[/], where the function returns an Experiment.
"""


@dataclass(frozen=True)
class RunOptions:
    """What every command on a run has."""

    run: tyro.conf.Positional[Path]
    """The run's folder, such as runs/composition; with --pretrained the name of a pretrained model, such as maze2d-medium."""
    pretrained: bool = False
    """Take the pretrained model of that name; results go to runs/NAME-pretrained."""
    seed: int = 0
    """Seed of the sampling."""
    device: str = "cpu"
    """Where to sample: cpu, or cuda for tasks that support it (video)."""
    backbone: str | None = None
    """For a network of your own, module:name: a class, or a function without arguments that returns the network."""
    recipe: str | None = None
    """For a task or objective of your own, module:function: the recipe that was trained."""


@dataclass(frozen=True)
class EvalOptions(RunOptions):
    """Measure a trained run: print its tables, draw its figures, write eval.json and report.html."""

    samples: Annotated[int | None, tyro.conf.arg(aliases=("--episodes",))] = None
    """Sequences to draw, or episodes to play; 1000 sequences or 100 episodes if not given."""
    against: tuple[Path, ...] = ()
    """Other runs or pretrained models to measure beside it, such as baselines, in the same tables and figures (video and imitation)."""
    json: Path | None = None
    """Also write the metrics to this file."""


@dataclass(frozen=True)
class SampleOptions(RunOptions):
    """Draw samples from a trained run, as arrays and as a picture."""

    samples: int | None = None
    """Sequences to draw; 100 if not given, 6 of video."""
    out: Path | None = None
    """Folder to write to; RUN/samples if not given."""


@dataclass(frozen=True)
class ReportOptions:
    """Write report.html, one self-contained page about a run."""

    run: tyro.conf.Positional[Path]
    """The run's folder, such as runs/composition."""


@dataclass(frozen=True)
class VerifyOptions:
    """Check a run: that its files are whole, fit together and are those that its training left, and that its data have not changed."""

    run: tyro.conf.Positional[Path]
    """The run's folder, such as runs/composition, or the name of a pretrained model."""
    backbone: str | None = None
    """For a network of your own, module:name: a class, or a function without arguments that returns the network."""
    recipe: str | None = None
    """For a task or objective of your own, module:function: the recipe that was trained."""


@dataclass(frozen=True)
class TrainOptions:
    """Options of `dforce train` besides those of the experiment."""

    name: str = ""
    """Name of the run; by default that of the recipe and its variant."""
    runs: Path = Path("runs")
    """Folder of all runs."""
    fresh: bool = False
    """Rename an existing run of that name and start a new one."""


COMMANDS: dict[str, str] = {
    "list": "diffusion_forcing.engine.cli:list_recipes",
    "train": "diffusion_forcing.engine.cli:train_recipe",
    "eval": "diffusion_forcing.engine.cli:evaluate_run",
    "sample": "diffusion_forcing.engine.cli:sample_run",
    "report": "diffusion_forcing.engine.cli:report_run",
    "verify": "diffusion_forcing.engine.cli:verify_run",
    "data": "diffusion_forcing.engine.cli:make_data",
    "forecast": "diffusion_forcing.forecasting.command:forecast",
    "play": "diffusion_forcing.video.play:play_run",
}
"""Every command: its name, and the function that runs it, from the words after the name to an exit code."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `dforce`."""
    with outlived_output() as (output, _):
        code = _run(sys.argv[1:] if arguments is None else arguments)
    if code == 0 and output.lost is not None:
        _fail(f"the output could not be written: {output.lost}")
    sys.exit(code)


def _run(words: list[str]) -> int:
    """A command, from its words to an exit code."""
    if not words or words[0] in ("-h", "--help", HELP_ALL, "help"):
        console.print(HELP)
        return 0
    if words[0] == "--version":
        print(importlib.metadata.version("diffusion_forcing"))
        return 0
    if words[0] not in COMMANDS:
        _fail(f"there is no command {words[0]!r}; choose from {', '.join(COMMANDS)}")
    try:
        return int(load(COMMANDS[words[0]])(words[1:]))
    except (ValueError, OSError, ImportError, Diverged) as error:
        if os.environ.get("DFORCE_TRACEBACK"):
            raise
        _fail(str(error))
    except KeyboardInterrupt:
        console.print("stopped")
        return exit_code(0)


def list_recipes(words: list[str]) -> int:
    """dforce list"""
    table = RichTable("recipe", "what it is", box=None, header_style="bold", padding=(0, 3, 0, 0))
    for name, recipe in RECIPES.items():
        variants = [*(f"--backbone {backbone}" for backbone in recipe.backbones[1:]), *(f"--stage {stage}" for stage in recipe.stages)]
        table.add_row(name, f"{recipe.about} [dim]{', '.join(variants)}[/]")
    console.print(table)
    console.print(f"\nPretrained: {', '.join(pretrained_names())}. Evaluate one with [bold]dforce eval NAME --pretrained[/].")
    console.print("\nTrain one with [bold]dforce train NAME[/]; see its options with [bold]dforce train NAME --help[/].")
    return 0


def train_recipe(words: list[str]) -> int:
    """dforce train RECIPE [options]"""
    if not words or words[0].startswith("-"):
        if not words or words[0] in ("-h", "--help", HELP_ALL):
            console.print("[bold]dforce train RECIPE[/] [dim]\\[options][/]\n\nRecipes:\n")
            return list_recipes([])
        raise ValueError(f"name the recipe first: dforce train RECIPE {' '.join(words)}; `dforce list` shows them")
    name, *rest = words
    variants = _variants(name)
    chosen, _ = tyro.cli(variants, args=rest, add_help=False, return_unknown_args=True)
    variant = dataclasses.asdict(chosen)
    default = build(name, **variant)
    options = _parse_experiment(name, default, variants, _spelled(rest, default.task))
    parts = {part: getattr(options, part) for part, value in _parts(default).items() if value is not None}
    experiment = dataclasses.replace(default, **parts, name=options.name or run_name(name, **variant))
    folder = options.runs / experiment.name
    check(experiment)
    if experiment.train.init is not None and options.fresh and model_folder(experiment.train.init).resolve().parent == folder.resolve():
        raise ValueError(f"--fresh renames {folder}, from which --train.init is to begin; train under another name (--name NAME)")
    main_process = os.environ.get("RANK", "0") == "0"
    if main_process and options.fresh:
        set_aside(folder)
    with locked(folder) if main_process else contextlib.nullcontext():
        if main_process:
            open_run(folder, name, experiment, shlex.join(["dforce", "train", *words]))
            budget = f"{experiment.train.steps:,} steps" if experiment.train.steps else f"{experiment.train.minutes:g} minutes"
            console.print(f"training [bold]{experiment.name}[/] in {folder} ({budget}, seed {experiment.train.seed})")
        result = train(experiment, folder)
    if not main_process:
        return 0
    again = shlex.join(["dforce", "train", *(word for word in words if word != "--fresh")])
    if result.status == "interrupted":
        saved = f"at step {result.step:,}; all is saved. Resume it with" if result.step else "before the first step. Start again with"
        console.print(f"interrupted {saved}: [bold]{escape(again)}[/]", soft_wrap=True)
        return exit_code(result.signal)
    own = {type(experiment.task).__name__, type(experiment.objective).__name__} - {*TASKS, *OBJECTIVES}
    opened = shlex.join([str(folder), *(("--recipe", name) if own else ())])
    console.print(
        f"{result.status}: {result.step:,} steps in {result.minutes:.1f} minutes, validation loss {result.valid_loss:.4f}. "
        f"Next: [bold]dforce eval {escape(opened)}[/]",
        soft_wrap=True,
    )
    return 0


def evaluate_run(words: list[str]) -> int:
    """dforce eval RUN"""
    options, task, model, folder = parse_run(EvalOptions, words, "dforce eval")
    check_data(folder, task.data_files)
    figures = _own_folder(folder / "figures")
    samples = task.default_samples if options.samples is None else _counted(options.samples)
    others = _others(options, task)
    with progress_bar() as progress:
        if others:
            evaluation = task.compare(model, others, figures, samples=samples, seed=options.seed, progress=progress)
        else:
            evaluation = task.evaluate(model, figures, samples=samples, seed=options.seed, progress=progress)
    command = shlex.join(["dforce", "eval", *words])
    data = save_evaluation(folder, evaluation, samples=samples, seed=options.seed, command=command)
    for table in evaluation.tables:
        show(table)
    for sentence in evaluation.warnings:
        console.print(f"[yellow]{escape(sentence)}[/]\n", soft_wrap=True)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**data["metrics"], "samples": samples, "seed": options.seed}, indent=2) + "\n")
    page = write_report(folder)
    for name in evaluation.figures:
        console.print(f"figure  {figures / name}")
    console.print(f"report  {page}")
    return 0


def sample_run(words: list[str]) -> int:
    """dforce sample RUN"""
    options, task, model, run = parse_run(SampleOptions, words, "dforce sample")
    folder = options.out or _own_folder(run / "samples")
    folder.mkdir(parents=True, exist_ok=True)
    samples = task.default_shown if options.samples is None else _counted(options.samples)
    with progress_bar() as progress:
        files = task.sample(model, folder, samples=samples, seed=options.seed, progress=progress)
    for file in files:
        console.print(f"wrote {file}", markup=False)
    return 0


def make_data(words: list[str]) -> int:
    """dforce data RECIPE [options]"""
    if not words or words[0].startswith("-") or (len(words) > 1 and not words[1].startswith("-")):
        console.print(
            "[bold]dforce data RECIPE[/] [dim]\\[options][/]\n\nMake a recipe's data now and keep them in the cache ($DFORCE_CACHE, or "
            "~/.cache/dforce). Options are those of its task, as for `dforce train RECIPE`: --task.clips 4000, --data FOLDER."
        )
        return 0 if words and words[0] in ("-h", "--help") else 2
    task: Any = build(words[0]).task
    kind = dataclasses.make_dataclass("Options", [_part("task", task)], frozen=True)
    options = parse(kind, _spelled(words[1:], task), f"dforce data {words[0]}", make_data.__doc__, {"task": task.main_options})
    with progress_bar() as progress:
        file = options.task.prepare(progress)
    if file is None:
        console.print(f"{words[0]} makes its data within seconds, whenever it needs them; there is nothing to prepare")
    else:
        console.print(f"data  {file} ({file.stat().st_size / 1e6:.0f} MB)")
    return 0


def report_run(words: list[str]) -> int:
    """dforce report RUN"""
    console.print(f"report  {write_report(tyro.cli(ReportOptions, args=words, prog='dforce report').run)}")
    return 0


def verify_run(words: list[str]) -> int:
    """dforce verify RUN"""
    options = tyro.cli(VerifyOptions, args=words, prog="dforce verify")
    problems = 0
    for what, problem in verify(run_folder(options.run), options.backbone, options.recipe or ()):
        problems += problem is not None
        console.print(f"[green]fits[/]     {what}" if problem is None else f"[red]problem[/]  {what}: {escape(problem)}")
    console.print(f"\n{problems or 'no'} problem{'' if problems == 1 else 's'} found in {options.run}", markup=False)
    return 2 if problems else 0


def show(table: Table) -> None:
    """Print a table."""
    rich = RichTable(*table.columns, title=table.title, title_justify="left", title_style="bold", box=None, padding=(0, 3, 0, 0))
    for row in table.rows:
        rich.add_row(*row)
    console.print()
    console.print(rich)
    console.print()


def parse_run(kind: Any, words: list[str], prog: str) -> tuple[Any, Task, DiffusionForcing, Path]:
    """Options (of a subclass of RunOptions), task, model and folder of a command on a run.

    The run's task has options, too: how to sample is decided here.
    """
    # The run may stand anywhere among its options; where it does not come first, it is the last word that is a run and no option's value.
    runs = [i for i, word in enumerate(words) if word in pretrained_names() or (Path(word) / "config.json").exists()]
    runs = [i for i in runs if i == 0 or words[i - 1] not in ("--against", "--out", "--json")]
    if runs:
        at = 0 if runs[0] == 0 else runs[-1]
        words = [words[at], *words[:at], *words[at + 1 :]]
    if not words or words[0].startswith("-"):
        about = f"{kind.__doc__}\n\n{prog} RUN --help also lists the task's options."
        options, _ = tyro.cli(kind, args=words, prog=prog, description=about, return_unknown_args=True)
        words = [str(options.run), *(word for word in words if word != str(options.run))]
    folder = Path(words[0])
    if "--pretrained" in words:
        experiment, model, folder = load_pretrained(words[0])
    else:
        experiment, model = load_run(folder, _option(words, "--backbone"), _option(words, "--recipe") or ())
    task: Any = experiment.task
    whole = dataclasses.make_dataclass(kind.__name__, [_part("task", task)], bases=(kind,), frozen=True, kw_only=True)
    options = parse(whole, _spelled(words, task), prog, kind.__doc__, {"task": task.main_options})
    if not options.task.supports_device(options.device):
        raise ValueError(f"{type(task).__name__} samples on the CPU, which its models are small enough for; leave out --device "
                         f"{options.device}")  # fmt: skip
    return options, options.task, model.to(check_device(options.device)), folder


def _option(words: list[str], name: str) -> str | None:
    """The value of an option, before options are parsed."""
    values = [after for word, after in zip(words, [*words[1:], None], strict=True) if word == name]
    values += [word.removeprefix(f"{name}=") for word in words if word.startswith(f"{name}=")]
    return values[-1] if values else None


def _others(options: EvalOptions, task: Task) -> dict[str, tuple[Task, DiffusionForcing]]:
    """Tasks and models of other runs by name."""
    others: dict[str, tuple[Task, DiffusionForcing]] = {}
    for path in options.against:
        experiment, model = load_run(run_folder(path), classes=options.recipe or ())
        if type(experiment.task) is not type(task):
            raise ValueError(
                f"{path} is a run of {type(experiment.task).__name__}, this one of {type(task).__name__}; compare like with like"
            )
        name = path.resolve().name
        others[name if name not in others else str(path)] = experiment.task, model.to(options.device)
    return others


def _variants(name: str) -> Any:
    """A dataclass of the options that choose a variant of a recipe."""
    recipe = find(name)
    fields: list[Any] = []
    for option, choices, default, about in (
        ("backbone", recipe.backbones, next(iter(recipe.backbones), None), "Network."),
        ("stage", recipe.stages, None, "Train this part of a trained model (--train.init RUN) instead of a model."),
        ("baseline", tuple(BASELINES), None, "Train this baseline instead."),
    ):
        if choices:
            optional: Any = str if default else str | None
            kind = Annotated[optional, tyro.conf.arg(help=about, metavar=f"{{{','.join(choices)}}}")]
            fields.append((option, kind, dataclasses.field(default=default)))
    return dataclasses.make_dataclass("Variant", fields, frozen=True)


def _parse_experiment(name: str, default: Experiment, variants: Any, words: list[str]) -> Any:
    """Options of `dforce train`: those of the experiment by its parts, its variant and the run, with the recipe's values as defaults."""
    parts = {part: value for part, value in _parts(default).items() if value is not None}
    fields = [_part(part, value) for part, value in parts.items()]
    kind = dataclasses.make_dataclass("Options", fields, bases=(variants, TrainOptions), frozen=True, kw_only=True)
    about = f"{find(name).about}\n\nThe run goes to runs/NAME; the same command resumes it after Ctrl-C or a crash."
    return parse(kind, words, f"dforce train {name}", about, {part: value.main_options for part, value in parts.items()})


def _parts(experiment: Experiment) -> dict[str, Any]:
    """The parts of an experiment that are dataclasses, by name."""
    return {field.name: getattr(experiment, field.name) for field in dataclasses.fields(Experiment) if field.name != "name"}


def _part(name: str, value: Any) -> Any:
    """A field of a dataclass of options that has a dataclass as its default."""
    return name, type(value), dataclasses.field(default=value)


def _spelled(words: list[str], task: Task) -> list[str]:
    """Words of a command with the task's short names of options spelled out."""
    short = dict(task.short_options)
    return [short.get(name, name) + equals + value for name, equals, value in (word.partition("=") for word in words)]


def _counted(samples: int) -> int:
    if samples < 1:
        raise ValueError(f"--samples counts from 1; got {samples}")
    return samples


def _own_folder(folder: Path) -> Path:
    """A folder within a run to write to; nothing in it leads elsewhere."""
    links = [path for path in (folder, *folder.glob("**/*")) if path.is_symlink()]
    if links:
        raise ValueError(f"{links[0]} is a link, over which a run is not written; remove it (of samples, or name a folder by --out)")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _fail(message: str) -> NoReturn:
    Console(stderr=True, emoji=False).print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(2)
