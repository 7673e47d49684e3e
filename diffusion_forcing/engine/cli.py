"""dforce: train, evaluate, sample and report from the command line."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from ..model import DiffusionForcing
from ..registry import load
from .config import Experiment
from .distributed import check_device
from .log import progress_bar
from .pretrained import load_pretrained, model_folder, pretrained_names, run_folder
from .recipes import RECIPES, resolve
from .report import write_report
from .run import load_run, open_run, save_evaluation
from .task import Table, Task
from .train import Diverged, check, train

console = Console(soft_wrap=True, emoji=False)

HELP = """[bold]dforce[/] trains, samples and judges Diffusion Forcing models: every token has its own noise level.

  [bold]dforce list[/]                        recipes that can be trained, and pretrained models
  [bold]dforce train RECIPE[/] [dim]\\[options][/]       train; runs/RECIPE holds everything, the same command goes on where it stopped
  [bold]dforce eval RUN[/] [dim]\\[options][/]           measure, print tables, draw figures
  [bold]dforce sample RUN[/] [dim]\\[options][/]         draw samples, as arrays and as a picture
  [bold]dforce report RUN[/]                  one self-contained HTML page
  [bold]dforce data RECIPE[/] [dim]\\[options][/]        make a recipe's data now, rather than when training starts
  [bold]dforce play RUN --keys wwwddww[/]     lead a video model by hand and film what it imagines
  [bold]dforce forecast FILE --horizon N[/]   forecast the series of a CSV or Parquet file: trains, back-tests, writes, draws

Each command explains its options with --help, e.g. [bold]dforce train composition --help[/].
A pretrained model, nothing to train: [bold]dforce eval maze2d-medium --pretrained --episodes 100[/]
A first run, a minute long: [bold]dforce train composition && dforce eval runs/composition[/]
Baselines are one option: [bold]--train.draw shared[/] (full-sequence diffusion) or [bold]teacher_forced[/] (next-token diffusion).
Your own recipe: [bold]dforce train mymodule:myfunction[/], where the function returns an Experiment.
"""


@dataclass(frozen=True)
class EvalOptions:
    """Measure a trained run: print its tables, draw its figures, write eval.json and report.html."""

    run: tyro.conf.Positional[Path]
    """The run's folder, such as runs/composition; with --pretrained the name of a pretrained model, such as maze2d-medium."""
    samples: int | None = None
    """Sequences to draw, or (also --episodes) episodes to play. 1000 sequences or 100 episodes if not given."""
    seed: int = 0
    """Of the sampling."""
    pretrained: bool = False
    """Take the pretrained model of that name; what is measured goes to runs/NAME-pretrained."""
    against: tuple[Path, ...] = ()
    """Other runs or pretrained models to measure beside it, such as baselines, in the same tables and figures (video and imitation)."""
    json: Path | None = None
    """Also write the metrics to this file."""
    device: str = "cpu"
    """Where to sample: cpu, or for video cuda."""


@dataclass(frozen=True)
class SampleOptions:
    """Draw samples from a trained run, as arrays and as a picture."""

    run: tyro.conf.Positional[Path]
    """The run's folder, such as runs/composition; with --pretrained the name of a pretrained model, such as maze2d-medium."""
    samples: int | None = None
    """Sequences to draw. 100 if not given, of video 6."""
    seed: int = 0
    """Of the sampling."""
    pretrained: bool = False
    """Take the pretrained model of that name."""
    out: Path | None = None
    """Folder to write to; RUN/samples if not given."""
    device: str = "cpu"
    """Where to sample: cpu, or for video cuda."""


@dataclass(frozen=True)
class ReportOptions:
    """Write report.html, one self-contained page about a run."""

    run: tyro.conf.Positional[Path]
    """The run's folder, such as runs/composition."""


COMMANDS: dict[str, str] = {
    "list": "diffusion_forcing.engine.cli:list_recipes",
    "train": "diffusion_forcing.engine.cli:train_recipe",
    "eval": "diffusion_forcing.engine.cli:evaluate_run",
    "sample": "diffusion_forcing.engine.cli:sample_run",
    "report": "diffusion_forcing.engine.cli:report_run",
    "data": "diffusion_forcing.engine.cli:make_data",
    "forecast": "diffusion_forcing.forecasting.command:forecast",
    "play": "diffusion_forcing.video.play:play_run",
}
"""Every command: its name, and the function that runs it, from the words after the name to an exit code."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `dforce`."""
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0] in ("-h", "--help", "help"):
        console.print(HELP)
        return
    if words[0] == "--version":
        print(importlib.metadata.version("diffusion_forcing"))
        return
    if words[0] not in COMMANDS:
        _fail(f"there is no command {words[0]!r}; choose from {', '.join(COMMANDS)}")
    try:
        code = load(COMMANDS[words[0]])(words[1:])
    except BrokenPipeError:  # `dforce ... | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except (ValueError, OSError, ImportError, Diverged) as error:
        if os.environ.get("DFORCE_TRACEBACK"):
            raise
        _fail(str(error))
    except KeyboardInterrupt:
        console.print("stopped")
        code = 130
    sys.exit(code)


def list_recipes(words: list[str]) -> int:
    """dforce list"""
    table = RichTable("recipe", "what it is", box=None, header_style="bold", padding=(0, 3, 0, 0))
    for name in RECIPES:
        table.add_row(name, (resolve(name).__doc__ or "").strip().split("\n")[0])
    console.print(table)
    console.print(f"\nPretrained: {', '.join(pretrained_names())}. Evaluate one with [bold]dforce eval NAME --pretrained[/].")
    console.print("\nTrain one with [bold]dforce train NAME[/]; see its options with [bold]dforce train NAME --help[/].")
    return 0


def train_recipe(words: list[str]) -> int:
    """dforce train RECIPE [options]"""
    if not words or words[0].startswith("-"):
        if not words or words[0] in ("-h", "--help"):
            console.print("[bold]dforce train RECIPE[/] [dim]\\[options][/]\n\nRecipes:\n")
            list_recipes([])
            return 0
        raise ValueError(f"name the recipe first: dforce train RECIPE {' '.join(words)}; `dforce list` shows them")
    name, *rest = words
    rest = _spelled(rest)
    default = resolve(name)()
    if not isinstance(default, Experiment):
        raise ValueError(f"the recipe {name!r} must return an Experiment; it returned {type(default).__name__}")
    parsed: Any = tyro.cli(_options_of(default), args=rest, prog=f"dforce train {name}", description=_described(name))
    run_name = parsed.name or name.replace(":", ".")
    values = {field.name: getattr(parsed, field.name) for field in dataclasses.fields(Experiment)}
    experiment = Experiment(**{**values, "name": run_name})
    folder = parsed.runs / run_name
    main_process = os.environ.get("RANK", "0") == "0"
    check(experiment.train)
    if experiment.train.init is not None and parsed.fresh and model_folder(experiment.train.init).resolve().parent == folder.resolve():
        raise ValueError(f"--fresh sets {folder} aside, from which --train.init is to begin; train under another name (--name NAME)")
    if main_process:
        open_run(folder, name, experiment, shlex.join(["dforce", "train", *words]), fresh=parsed.fresh)
        steps = f"{experiment.train.steps:,} steps" if experiment.train.steps else f"{experiment.train.minutes:g} minutes"
        console.print(f"training [bold]{name}[/] in {folder} ({steps}, seed {experiment.train.seed})")
    result = train(experiment, folder)
    if not main_process:
        return 0
    again = shlex.join(["dforce", "train", *(word for word in words if word != "--fresh")])
    if result.status == "interrupted":
        saved = f"at step {result.step:,}; all is saved. Go on with" if result.step else "before the first step. Begin anew with"
        console.print(f"interrupted {saved}: [bold]{escape(again)}[/]", soft_wrap=True)
        return 130
    console.print(
        f"{result.status}: {result.step:,} steps in {result.minutes:.1f} minutes, validation loss {result.valid_loss:.4f}. "
        f"Next: [bold]dforce eval {folder}[/]",
        soft_wrap=True,
    )
    return 0


def evaluate_run(words: list[str]) -> int:
    """dforce eval RUN"""
    options, task, model, folder = parse_run(EvalOptions, words, "dforce eval")
    figures = folder / "figures"
    figures.mkdir(exist_ok=True)
    samples = options.samples or getattr(task, "default_samples", 1000)
    others = _others(options.against, task, options.device)
    with progress_bar() as progress:
        evaluation = task.evaluate(model, figures, samples=samples, seed=options.seed, progress=progress, **others)
    command = shlex.join(["dforce", "eval", *words])
    data = save_evaluation(folder, evaluation, samples=samples, seed=options.seed, command=command)
    for table in evaluation.tables:
        show(table)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**data["metrics"], "samples": samples, "seed": options.seed}, indent=2) + "\n")
    page = write_report(folder)
    for name in evaluation.figures:
        console.print(f"figure  {figures / name}")
    console.print(f"report  {page}")
    return 0


def _others(runs: tuple[Path, ...], task: Task, device: str = "cpu") -> dict[str, Any]:
    """Tasks and models of other runs by name, as an argument of `evaluate`; none if there are none."""
    if not runs:
        return {}
    if "others" not in inspect.signature(task.evaluate).parameters:
        raise ValueError(f"{type(task).__name__} is measured one run at a time; leave out --against")
    found: dict[str, tuple[Task, DiffusionForcing]] = {}
    for path in runs:
        experiment, model = load_run(run_folder(path))
        if type(experiment.task) is not type(task):
            raise ValueError(
                f"{path} is a run of {type(experiment.task).__name__}, this one of {type(task).__name__}; compare like with like"
            )
        name = path.resolve().name
        found[name if name not in found else str(path)] = experiment.task, model.to(device)
    return {"others": found}


def sample_run(words: list[str]) -> int:
    """dforce sample RUN"""
    options, task, model, run = parse_run(SampleOptions, words, "dforce sample")
    folder = options.out or run / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    with progress_bar() as progress:
        samples = options.samples or getattr(task, "default_shown", 100)
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
    task: Any = resolve(words[0])().task
    if not hasattr(task, "prepare"):
        console.print(f"{words[0]} makes its data in a moment, whenever it needs them; there is nothing to prepare")
        return 0
    made = dataclasses.make_dataclass("Options", [("task", type(task), dataclasses.field(default=task))], frozen=True)
    configured = tyro.conf.configure(tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff)(made)
    parsed: Any = tyro.cli(configured, args=_spelled(words[1:]), prog=f"dforce data {words[0]}", description=make_data.__doc__)
    task = parsed.task
    with progress_bar() as progress:
        file = task.prepare(progress)
    console.print(f"data  {file} ({file.stat().st_size / 1e6:.0f} MB)")
    return 0


def report_run(words: list[str]) -> int:
    """dforce report RUN"""
    console.print(f"report  {write_report(tyro.cli(ReportOptions, args=words, prog='dforce report').run)}")
    return 0


def show(table: Table) -> None:
    """A table in the terminal."""
    rich = RichTable(*table.columns, title=table.title, title_justify="left", title_style="bold", box=None, padding=(0, 3, 0, 0))
    for row in table.rows:
        rich.add_row(*row)
    console.print()
    console.print(rich)
    console.print()


def _options_of(default: Experiment) -> Any:
    """The options of `dforce train` for one recipe: its experiment's fields, narrowed to the kinds it uses, with its values."""
    fields: list[Any] = [
        ("task", type(default.task), dataclasses.field(default=default.task)),
        ("model", type(default.model), dataclasses.field(default=default.model)),
        ("train", type(default.train), dataclasses.field(default=default.train)),
        ("name", Annotated[str, tyro.conf.arg(help="Name of the run; the recipe's if empty.")], dataclasses.field(default=default.name)),
        ("runs", Annotated[Path, tyro.conf.arg(help="Folder of all runs.")], dataclasses.field(default=Path("runs"))),
        (
            "fresh",
            Annotated[bool, tyro.conf.arg(help="Set an existing run of that name aside and start anew.")],
            dataclasses.field(default=False),
        ),
    ]
    made = dataclasses.make_dataclass("Options", fields, frozen=True)
    return tyro.conf.configure(tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff)(made)


def _described(name: str) -> str:
    doc = (resolve(name).__doc__ or "").strip()
    return f"{doc}\n\nThe run goes to runs/NAME; the same command goes on where it stopped, after Ctrl-C or a crash."


_SHORT = {"--episodes": "--samples", "--multi": "--task.multi", "--data": "--task.world.path"}  # what a domain calls things


def _spelled(words: list[str]) -> list[str]:
    """Words of a command with short names spelled out."""
    return [_SHORT.get(name, name) + equals + value for name, equals, value in (word.partition("=") for word in words)]


def parse_run(kind: Any, words: list[str], prog: str) -> tuple[Any, Task, DiffusionForcing, Path]:
    """Options, task, model and folder of a command on a run. The run's task brings options of its own: how to sample is decided here."""
    words = _spelled(words)
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
        experiment, model = load_run(folder)
    field = ("task", type(experiment.task), dataclasses.field(default=experiment.task))
    made = dataclasses.make_dataclass(kind.__name__, [field], bases=(kind,), frozen=True, kw_only=True)
    configured = tyro.conf.configure(tyro.conf.AvoidSubcommands)(made)
    options = tyro.cli(configured, args=words, prog=prog, description=kind.__doc__)
    if getattr(options, "samples", None) is not None and options.samples < 1:
        raise ValueError(f"--samples counts from 1; got {options.samples}")
    if options.device != "cpu":
        model = _moved(model, options.device, options.task)
    return options, options.task, model, folder


def _moved(model: DiffusionForcing, device: str, task: Task) -> DiffusionForcing:
    """The model on another device, where its task can sample there."""
    if not hasattr(task, "roll_out"):
        raise ValueError(f"{type(task).__name__} samples on the CPU, which its models are small enough for; leave out --device {device}")
    return model.to(check_device(device))


def _fail(message: str) -> None:
    Console(stderr=True, emoji=False).print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(2)
