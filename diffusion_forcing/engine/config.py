"""What an experiment is: a frozen dataclass that a recipe returns, the command line overrides and a run writes down."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from torch import nn

from ..backbones import AnyBackboneConfig, RNNConfig
from ..checks import check_options
from ..codecs import codec_traits
from ..files import read_json
from ..model import DiffusionForcing
from ..parameterization import Parameterization
from ..preconditioning import KalmanFilter, LinearConstraint, Preconditioning, WienerSmoother
from ..registry import load
from ..schedule import CURVES, LEVELS, NoiseSchedule
from ..weighting import WEIGHTS, FusedSNR, MinSNR, Uniform, Weight
from .objective import OBJECTIVES, Denoising, Objective
from .precision import Precision
from .task import TASKS, Task

T = TypeVar("T")


@dataclass(frozen=True)
class ModelConfig:
    """Network, noise schedule and loss."""

    backbone: AnyBackboneConfig = field(default_factory=RNNConfig)
    schedule: Literal["linear", "cosine", "sigmoid"] = "cosine"
    """Curve of the signal over the noise levels."""
    levels: int = LEVELS
    """K, the level of pure noise."""
    parameterization: Parameterization = "v"
    """What the network predicts."""
    weight: Literal["uniform", "min_snr", "fused_snr"] = "uniform"
    """Loss weight of a token."""
    snr_clip: float = 5.0
    """Of min_snr and fused_snr: larger signal-to-noise ratios are clipped to this."""
    snr_decay: float = 0.9
    """Of fused_snr: decay of the accumulated signal of past frames, from one frame to the next."""
    frame_stack: int | None = None
    """Of fused_snr: frames in a token; None: as many as the task stacks."""
    clip: float | None = None
    """Bound on |x0| when sampling, in encoded units."""
    variance_weighting: float = 0.0
    """Power of its variance by which each number of a token counts in the loss; 0: all alike. x0 is then predicted in units of its
    standard deviation."""

    main_options: ClassVar[tuple[str, ...]] = ("backbone.hidden", "backbone.layers", "backbone.latent", "backbone.channels")

    def build(
        self, event: int | tuple[int, ...], cond: int = 0, codec: nn.Module | None = None, constraint: LinearConstraint | None = None,
        smoother: WienerSmoother | None = None, optional_cond: bool = False,
    ) -> DiffusionForcing:  # fmt: skip
        """A new model for tokens of a shape, or of so many numbers, with conditions of `cond` numbers.

        codec: makes the tokens; saved with the model. smoother: causal networks get a Kalman filter of its numbers instead, if there is a
        constraint for it to follow. optional_cond: tokens may
        also have no condition.
        """
        traits = codec_traits(codec)
        normalizes = self.parameterization == "v" or (self.parameterization == "x0" and self.variance_weighting)
        variance = traits.variance if normalizes else None
        if self.variance_weighting and variance is None and codec is not None:
            raise ValueError("variance_weighting needs the variance of each number of a token, which this codec does not give, or which "
                             f"predicting eps cannot use; got {self.variance_weighting}, set --model.variance-weighting 0")  # fmt: skip
        if variance is None:
            constraint = None
        shape = (event,) if isinstance(event, int) else tuple(event)
        estimates: WienerSmoother | KalmanFilter | None = smoother
        if smoother is not None and self.backbone.causal:
            estimates = None if constraint is None else KalmanFilter(smoother.index, shape[0], smoother.octaves)
        cond += optional_cond + (estimates.width if estimates is not None else 0)
        _check_choice("schedule", self.schedule, CURVES)
        _check_choice("weight", self.weight, WEIGHTS)
        weights: dict[str, Weight] = {
            "uniform": Uniform(),
            "min_snr": MinSNR(self.snr_clip),
            "fused_snr": FusedSNR(self.snr_clip, self.snr_decay, self.frame_stack or traits.stack),
        }
        prepared = Preconditioning(variance, variance_weighting=self.variance_weighting, constraint=constraint, smoother=estimates)
        return DiffusionForcing(
            self.backbone.build(shape, cond, self.levels, codec, variance), NoiseSchedule(CURVES[self.schedule](self.levels)),
            parameterization=self.parameterization, weight=weights[self.weight], clip=self.clip, codec=codec,
            preconditioning=prepared, optional_cond=optional_cond,
        )  # fmt: skip


@dataclass(frozen=True)
class GivenModel:
    """A model that Python code handed to `fit`, as model/config.json describes it. The network itself is in no file."""

    description: dict[str, Any]

    main_options: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class TrainConfig:
    """Budget, optimiser and bookkeeping."""

    steps: int | None = 2000
    """Stop after so many steps. None: only the minutes count."""
    minutes: float | None = None
    """Stop after so many minutes of training. With steps too, whichever comes first."""
    batch: int = 64
    """Sequences a step, over all processes and accumulations."""
    accumulate: int = 1
    """Split each step's batch into so many passes, to save memory."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon on the matrices inside the network, AdamW on the rest."""
    lr: float = 1e-3
    """Peak learning rate of AdamW."""
    muon_lr: float = 0.02
    """Peak learning rate of Muon."""
    weight_decay: float = 0.0
    """Weight decay of both."""
    warmup: int = 100
    """Steps over which the learning rate rises."""
    final_lr: float = 0.0
    """Learning rate at the end of the cosine, as a share of the peak."""
    clip_norm: float = 1.0
    """Largest norm of the gradient."""
    ema: float = 0.998
    """Decay of the moving average of the weights, which is what is evaluated and saved."""
    init: str | None = None
    """Fine-tune a run (its folder) or a pretrained model (its name): begin with its weights, in tokens of its codec."""
    seed: int = 0
    """Seed of the weights and of everything drawn."""
    validate_every: int = 200
    """Steps between validations."""
    valid_windows: int = 1024
    """Held-out windows of a validation at most, spread evenly over all."""
    keep_checkpoints: bool = False
    """Keep the model of each validation, in kept/STEP of the run, to measure afterwards how quality grows."""
    patience: int | None = None
    """Stop when `monitor` has not improved for so many validations."""
    monitor: Literal["loss", "score"] = "loss"
    """What is to improve: the validation loss, or the task's own score, less being better (CRPS_sum of forecasts)."""
    checkpoint_every: float = 60.0
    """Seconds between checkpoints."""
    log_every: int = 20
    """Steps between lines of the log."""
    precision: Precision = "float32"
    """Mixed precision. auto: bfloat16 on devices (CUDA, some CPUs) that are quick in it, otherwise float32. float16: on CUDA only."""
    compile: bool = False
    """Compile the network with torch.compile."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How several processes (torchrun) share the work."""
    device: str = "auto"
    """cuda, cpu, mps, or auto."""
    threads: int | None = None
    """Threads of torch on a CPU; None leaves torch's choice."""
    wandb: bool = False
    """Also log to Weights & Biases (needs the extra)."""
    quiet: bool = False
    """Show no progress."""

    main_options: ClassVar[tuple[str, ...]] = ("steps", "minutes", "batch", "lr", "init", "seed", "device", "threads")

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise ValueError("training needs an end: give steps, minutes or both")
        for name in ("steps", "minutes", "patience", "threads"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive; got {value}")
        check_options(self, "batch", "accumulate", "validate_every", "valid_windows", "log_every")
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate={self.accumulate} must divide batch={self.batch}")
        if not all(0 < value < math.inf for value in (self.lr, self.muon_lr, self.clip_norm)):
            raise ValueError(f"lr, muon_lr and clip_norm must be positive; got {self.lr}, {self.muon_lr}, {self.clip_norm}")
        for name in ("warmup", "weight_decay", "final_lr", "checkpoint_every"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} cannot be negative; got {getattr(self, name)}")
        for name in ("optimizer", "precision", "parallel", "monitor"):
            _check_choice(name, getattr(self, name), typing.get_args(typing.get_type_hints(TrainConfig)[name]))
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema lies in [0, 1); got {self.ema}")


@dataclass(frozen=True)
class Experiment:
    """A task, a model, a training and its objective. Recipes return one; every field can be set on the command line."""

    task: Task
    model: ModelConfig | GivenModel | None = field(default_factory=ModelConfig)
    """None: a part of the model that --train.init names is trained, by an objective of such a part."""
    train: TrainConfig = field(default_factory=TrainConfig)
    objective: Objective = field(default_factory=Denoising)
    name: str = ""
    """Name of the run's folder."""

    def __post_init__(self) -> None:
        for part, kind in ((self.task, Task), (self.objective, Objective)):
            if kind not in type(part).__mro__:
                raise ValueError(f"{type(part).__name__} lacks the optional parts of a {kind.__name__}: write class {type(part).__name__}"
                                 f"({kind.__name__}), with {kind.__name__} from {kind.__module__}")  # fmt: skip


def to_dict(value: Any) -> Any:
    """Dataclasses to plain JSON, each with the name of its class, so that the classes of a union are distinguished."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if any(f.name == "kind" for f in dataclasses.fields(value)):
            raise ValueError(f"{type(value).__name__} has an option called kind, which stands for the class in a file; call it otherwise")
        fields = {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, (list, tuple)):
        return [to_dict(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def from_dict(kind: Any, data: Any, path: str = "config", classes: tuple[type, ...] = ()) -> Any:
    """The inverse of to_dict for a value annotated as `kind`. Unknown names are errors that say where.

    classes: what an experiment's task and objective may be besides our own.
    """
    options = _by_name(OPEN[kind], data, classes) if kind in OPEN else _dataclasses_in(kind)
    if not options or (data is None and type(None) in typing.get_args(kind)):
        return _plain(kind, data, path)
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str) or data["kind"] not in options:
        got = data.get("kind") if isinstance(data, dict) else data
        raise ValueError(f"{path} should be one of {', '.join(sorted(options))}; got {got!r}")
    cls = options[data["kind"]]
    hints = typing.get_type_hints(cls)
    names = {f.name for f in dataclasses.fields(cls)}
    unknown = data.keys() - names - {"kind"}
    if unknown:
        raise ValueError(f"{path} has no option {sorted(unknown)[0]!r}; {cls.__name__} has {', '.join(sorted(names))}")
    missing = [f.name for f in dataclasses.fields(cls) if f.name not in data and _required(f)]
    if missing:
        raise ValueError(f"{path} lacks {missing[0]!r}, which {cls.__name__} cannot do without")
    return cls(**{name: from_dict(hints[name], data[name], f"{path}.{name}", classes) for name in names if name in data})


OPEN: dict[Any, dict[str, str]] = {Task: TASKS, Objective: OBJECTIVES}
"""Protocols whose classes are found by name: ours in tables, others among those handed over (see `run.load_run`)."""


def _by_name(table: dict[str, str], data: Any, classes: tuple[type, ...]) -> dict[str, Any]:
    """Classes by their names. Ours are names only, but for the one that the data name."""
    kind = data.get("kind") if isinstance(data, dict) else None
    ours = {kind: load(table[kind])} if isinstance(kind, str) and kind in table else {}
    return {**table, **ours, **{cls.__name__: cls for cls in classes}}


def _plain(kind: Any, data: Any, path: str) -> Any:
    """A value that is no dataclass, of the annotated kind; JSON has lists for tuples and text for paths."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        if data is None and type(None) in typing.get_args(kind):
            return None
        parts = [part for part in typing.get_args(kind) if part is not type(None)]
        return _plain(parts[0], data, path) if len(parts) == 1 else data
    if typing.get_origin(kind) is tuple and isinstance(data, list):
        return tuple(data)
    if kind is Path and isinstance(data, str):
        return Path(data)
    expected: Any = {int: int, float: (int, float), str: str, bool: bool}.get(kind)
    if expected is not None and (not isinstance(data, expected) or (isinstance(data, bool) and kind is not bool)):
        raise ValueError(f"{path} should be of type {kind.__name__}; got {data!r}")
    return data


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def save_experiment(experiment: Experiment, path: Path) -> None:
    path.write_text(json.dumps(to_dict(experiment), indent=2) + "\n")


def load_experiment(path: Path, classes: tuple[type, ...] = ()) -> Experiment:
    """The experiment that a run wrote down. classes: see from_dict."""
    return from_dict(Experiment, read_json(path), path.name, classes)


def replace(experiment: T, **changes: Any) -> T:
    """A copy with nested fields changed: replace(e, train__steps=10)."""
    whole: Any = experiment
    parts: dict[str, dict[str, Any]] = {}
    values: dict[str, Any] = {}
    for name, value in changes.items():
        head, _, rest = name.partition("__")
        if rest:
            parts.setdefault(head, {})[rest] = value
        else:
            values[head] = value
    values |= {head: replace(values.get(head, getattr(whole, head)), **inner) for head, inner in parts.items()}
    return dataclasses.replace(whole, **values)


def _check_choice(name: str, value: Any, choices: Any) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def _dataclasses_in(kind: Any) -> dict[str, type]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return {name: cls for part in typing.get_args(kind) for name, cls in _dataclasses_in(part).items()}
    return {kind.__name__: kind} if isinstance(kind, type) and dataclasses.is_dataclass(kind) else {}
