"""What an experiment is: a frozen dataclass that a recipe returns, the command line overrides and a run writes down."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch import Generator, Tensor, nn

from .. import levels as level_draws
from ..backbones import RNN, ConvRNN, SpaceTime, Transformer
from ..checks import check_options
from ..model import DiffusionForcing
from ..parameterization import Parameterization
from ..preconditioning import LinearConstraint, Preconditioning, WienerSmoother
from ..registry import load
from ..schedule import CURVES, LEVELS, NoiseSchedule
from ..video.codec import Patches
from ..weighting import WEIGHTS, FusedSNR, MinSNR, Uniform, Weight
from .task import TASKS, Task

if TYPE_CHECKING:
    from ..video.decoder import Painting

T = TypeVar("T")


@dataclass(frozen=True)
class RNNConfig:
    """Residual MLP + GRU, the paper's backbone for vectors."""

    hidden: int = 128
    """Width of the latent z."""
    layers: int = 1
    """GRU layers."""
    blocks: int = 2
    """Residual MLPs before and after the GRUs."""

    def build(self, width: int, cond: int, levels: int) -> RNN:
        return RNN(width, cond, levels=levels, **dataclasses.asdict(self))


@dataclass(frozen=True)
class TransformerConfig:
    """Transformer: causal with a KV cache, or seeing everything."""

    hidden: int = 128
    """Width of a token inside the network."""
    layers: int = 4
    """Attention blocks."""
    heads: int = 4
    """Attention heads; must divide hidden."""
    causal: bool = True
    """Attend backwards only."""
    window: int | None = None
    """Tokens a token attends to, itself included; None: all."""

    def build(self, width: int, cond: int, levels: int) -> Transformer:
        return Transformer(width, cond, levels=levels, **dataclasses.asdict(self))


@dataclass(frozen=True)
class SpaceTimeConfig:
    """Transformer over space and time, causal, for tokens that are grids."""

    hidden: int = 128
    """Width of a place inside the network."""
    layers: int = 8
    """Attention blocks."""
    heads: int = 4
    """Attention heads; must divide hidden."""
    window: int = 8
    """Tokens a token sees, itself included."""
    full_attention_every: int = 3
    """Each so many blocks one sees the whole window; the others see two tokens."""
    warp: bool = False
    """A guess of each token by moving pixels of the last frame before it, which the network reads; for tokens of patches."""
    input_skip: bool = False
    """Noisy tokens also go straight to the output, as much of each of their numbers as their level asks for: learned sooner."""

    def build(
        self, event: tuple[int, int, int], cond: int, levels: int, codec: nn.Module | None = None, variance: Tensor | None = None
    ) -> SpaceTime:
        """codec, variance: of the tokens, where pixels are moved."""
        options = dataclasses.asdict(self)
        if not options.pop("warp"):
            return SpaceTime(event, cond, levels=levels, **options)
        patches = getattr(codec, "patches", codec)
        if not isinstance(patches, Patches):
            raise ValueError(f"pixels are moved where tokens are patches of frames; these are {type(codec).__name__}: set "
                             "--model.backbone.no-warp")  # fmt: skip
        backbone = SpaceTime(event, cond, levels=levels, warp=(patches.stack, patches.patch), **options)
        assert backbone.warp is not None
        backbone.warp.fit(patches, variance)
        return backbone


@dataclass(frozen=True)
class ConvRNNConfig:
    """U-Net + convolutional GRU, the paper's backbone for video."""

    latent: int = 16
    """Channels of the latent z."""
    channels: int = 64
    """Of the U-Net at full size."""
    scales: tuple[int, ...] = (1, 2, 4, 8)
    """By how much more channels at each halving of the size."""
    blocks: int = 2
    """Residual blocks a size."""

    def build(
        self, event: tuple[int, int, int], cond: int, levels: int, codec: nn.Module | None = None, variance: Tensor | None = None
    ) -> ConvRNN:
        """codec, variance: not used, tokens are read as they come."""
        return ConvRNN(event, cond, levels=levels, **dataclasses.asdict(self))


@dataclass(frozen=True)
class ModelConfig:
    """Network, noise and loss."""

    backbone: RNNConfig | TransformerConfig | SpaceTimeConfig | ConvRNNConfig = field(default_factory=RNNConfig)
    schedule: Literal["linear", "cosine", "sigmoid"] = "cosine"
    """Curve of the signal over the levels."""
    levels: int = LEVELS
    """K, the level of pure noise."""
    parameterization: Parameterization = "v"
    """What the network predicts."""
    weight: Literal["uniform", "min_snr", "fused_snr"] = "uniform"
    """Loss weight of a token."""
    snr_clip: float = 5.0
    """Of min_snr and fused_snr: signal-to-noise ratios above this count the same."""
    snr_decay: float = 0.9
    """Of fused_snr: share of the past's signal that lasts from one frame to the next."""
    frame_stack: int | None = None
    """Of fused_snr: frames in a token; None: as many as the task stacks."""
    clip: float | None = None
    """Bound on |x0| when sampling, in encoded units."""
    variance_weighting: float = 0.0
    """By which power of its variance each number of a token counts in the loss; 0: all alike. x0 then comes in units of its spread."""

    def build(
        self, event: int | tuple[int, ...], cond: int = 0, codec: nn.Module | None = None, constraint: LinearConstraint | None = None,
        smoother: WienerSmoother | None = None,
    ) -> DiffusionForcing:  # fmt: skip
        """A fresh model for tokens of a shape, or of so many numbers, with conditions of `cond` numbers.

        constraint, smoother: for a model that sees everything.
        """
        known = self.parameterization == "v" or (self.parameterization == "x0" and self.variance_weighting)
        variance = getattr(codec, "variance", None) if known else None
        if self.variance_weighting and variance is None and codec is not None:
            raise ValueError("variance_weighting needs tokens of known variance, and v- or x0-prediction, to count numbers by it; "
                             f"got {self.variance_weighting}, set --model.variance-weighting 0")  # fmt: skip
        if getattr(self.backbone, "causal", True):
            constraint, smoother = None, None
        if variance is None:
            constraint = None
        cond += smoother.width if smoother is not None else 0
        _check_choice("schedule", self.schedule, CURVES)
        _check_choice("weight", self.weight, WEIGHTS)
        schedule = NoiseSchedule(CURVES[self.schedule](self.levels))
        shape = (event,) if isinstance(event, int) else tuple(event)
        if isinstance(self.backbone, (SpaceTimeConfig, ConvRNNConfig)):
            if len(shape) != 3:
                raise ValueError(f"{type(self.backbone).__name__} is for tokens of (channels, height, width); these are {shape}")
            backbone: Any = self.backbone.build(shape, cond, self.levels, codec, variance)
        elif len(shape) > 1:
            raise ValueError(f"{type(self.backbone).__name__} is for tokens that are vectors; these are {shape}: use SpaceTimeConfig")
        else:
            backbone = self.backbone.build(shape[0], cond, self.levels)
        weights: dict[str, Weight] = {
            "uniform": Uniform(),
            "min_snr": MinSNR(self.snr_clip),
            "fused_snr": FusedSNR(self.snr_clip, self.snr_decay, self.frame_stack or int(getattr(codec, "stack", 1))),
        }
        weight = weights[self.weight]
        return DiffusionForcing(
            backbone, schedule, parameterization=self.parameterization, weight=weight, clip=self.clip, codec=codec,
            preconditioning=Preconditioning(variance, variance_weighting=self.variance_weighting, constraint=constraint, smoother=smoother),
        )  # fmt: skip


@dataclass(frozen=True)
class PainterConfig:
    """A decoder for a trained video model (`--train.init`), which stays as it is."""

    widths: tuple[int, ...] = (128, 64, 48)
    """Channels of the painter at each size, from a grid of patches to half the frame."""
    most: float = 0.4
    """Up to which share of the levels the model sees tokens in noise, when it says what is to be drawn."""
    steps: int = 2
    """Denoising steps in which it says so: 1 is the mean of what may be, more are nearer to what sampling makes of it, and take longer."""
    perceptual: float = 0.5
    """How much LPIPS counts beside the absolute error of pixels. 0: not at all, and its weights are not needed."""
    carries: bool = True
    """The painter also sees what it drew last, moved on as the model moves pixels, where it does: detail stays where it was."""

    def __post_init__(self) -> None:
        check_options(self, "steps")
        if not 0 <= self.most <= 1 or not self.perceptual >= 0:
            raise ValueError(f"most is a share of the levels, 0 to 1, and perceptual 0 or more; got {self.most} and {self.perceptual}")

    def teach(self, model: DiffusionForcing) -> Painting:
        """A trained model whose decoder is to be trained."""
        from ..video.decoder import Painting

        return Painting(model, self.widths, self.most, self.perceptual, carries=self.carries, steps=self.steps)


@dataclass(frozen=True)
class TrainConfig:
    """Optimiser, budget and bookkeeping."""

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
    warmup: int = 100
    """Steps over which the learning rate rises."""
    final_lr: float = 0.0
    """Learning rate at the end of the cosine, as a share of the peak."""
    clip_norm: float = 1.0
    """Largest norm of the gradient."""
    ema: float = 0.998
    """Decay of the moving average of the weights, which is what is evaluated and saved."""
    draw: str = "independent"
    """How levels are drawn: independent, shared (full-sequence diffusion), teacher_forced (next-token diffusion), staircase, or
    several joined by a plus."""
    given: float = 0.0
    """Share of sequences whose first token, or as many as the data call their context, is given: clean, whatever level was drawn."""
    imagined: float = 0.0
    """Share of sequences in which tokens that are nearly clean are read as the model itself makes them out from noise, in one step: what
    comes next is then learned after such a past as a roll-out has. For draws that give each token one level."""
    imagined_after: float = 0.0
    """Share of the budget (steps or minutes) after which that begins: a model that knows nothing yet imagines nothing worth reading."""
    looks: int = 1
    """Of draws that give the past levels of its own (teacher_forced, remembered): noisy versions of each token that learn from one reading
    of the past, each at its own level. By SpaceTime that past is half of the work where there is one, a quarter where there are three;
    other backbones read it for each."""
    moving: int = 800
    """Of networks that move pixels (--model.backbone.warp): steps in which they learn that first, alone. 0: with all the rest."""
    cond_drop: float = 0.0
    """Share of sequences trained without their condition, for classifier-free guidance."""
    init: str | None = None
    """Begin with the weights of a run (its folder) or of a pretrained model (its name) instead of from nothing: fine-tuning. Tokens are
    then encoded as that model was taught them."""
    seed: int = 0
    validate_every: int = 200
    """Steps between validations."""
    valid_windows: int = 1024
    """Held-out windows that a validation looks at, at most, from everywhere among them."""
    keep: bool = False
    """Keep the model of each validation, in kept/STEP of the run: how quality grows can be measured afterwards."""
    patience: int | None = None
    """Stop when the validation loss has not improved for so many validations."""
    judge: Literal["loss", "score"] = "loss"
    """What is to improve: the validation loss, or a score of the task's own, less being better (CRPS_sum of forecasts)."""
    checkpoint_every: float = 60.0
    """Seconds between checkpoints."""
    log_every: int = 20
    """Steps between lines of the log."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Mixed precision, on CUDA only."""
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

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise ValueError("training needs an end: give steps, minutes or both")
        for name in ("steps", "minutes", "patience", "threads"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive; got {value}")
        check_options(self, "batch", "accumulate", "looks", "validate_every", "valid_windows", "log_every")
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate={self.accumulate} must divide batch={self.batch}")
        if not all(0 < value < math.inf for value in (self.lr, self.muon_lr, self.clip_norm)):
            raise ValueError(f"lr, muon_lr and clip_norm must be positive; got {self.lr}, {self.muon_lr}, {self.clip_norm}")
        for name in ("warmup", "weight_decay", "final_lr", "checkpoint_every", "moving"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} cannot be negative; got {getattr(self, name)}")
        for name in ("optimizer", "precision", "parallel", "judge"):
            _check_choice(name, getattr(self, name), typing.get_args(typing.get_type_hints(TrainConfig)[name]))
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema lies in [0, 1); got {self.ema}")
        for name, of in {"cond_drop": "sequences", "given": "sequences", "imagined": "sequences", "imagined_after": "budget"}.items():
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share of the {of} and lies in [0, 1]; got {getattr(self, name)}")
        if self.looks > 1 and "+" in self.draw:
            raise ValueError(f"several looks share one past, so that they follow one draw; got {self.draw!r}, set --train.looks 1")
        drawn = level_draws.by_name(self.draw)((1, 2), 10, Generator())
        if self.imagined and drawn.past is not None:
            raise ValueError(f"tokens are imagined where each has one level, and {self.draw} gives the past levels of its own; got "
                             f"imagined={self.imagined}, set --train.imagined 0 or another --train.draw")  # fmt: skip
        if self.looks > 1 and drawn.past is None:
            raise ValueError("several looks share one past, which needs a draw that gives it levels of its own (as remembered); "
                             f"got looks={self.looks} and draw={self.draw!r}, set --train.looks 1")  # fmt: skip


@dataclass(frozen=True)
class Experiment:
    """A task, a model and a training. Recipes return one; every field can be set on the command line."""

    task: Task
    model: ModelConfig | PainterConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    name: str = ""
    """Name of the run's folder; the recipe's name if empty."""


def to_dict(value: Any) -> Any:
    """Dataclasses to plain JSON, each with the name of its class, so that unions can be told apart."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if any(f.name == "kind" for f in dataclasses.fields(value)):
            raise ValueError(f"{type(value).__name__} has an option called kind, which stands for the class in a file; call it otherwise")
        fields = {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, (list, tuple)):
        return [to_dict(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def from_dict(kind: Any, data: Any, path: str = "config", tasks: tuple[type, ...] = ()) -> Any:
    """The inverse of to_dict for a value annotated as `kind`. Unknown names are errors that say where.

    tasks: classes an experiment's task may have besides our own.
    """
    options = _tasks_by_name(data, tasks) if kind is Task else _dataclasses_in(kind)
    if not options:
        return _plain(kind, data, path)
    if not isinstance(data, dict) or data.get("kind") not in options:
        found = data.get("kind") if isinstance(data, dict) else data
        raise ValueError(f"{path} should be one of {', '.join(sorted(options))}; got {found!r}")
    cls = options[data["kind"]]
    hints = typing.get_type_hints(cls)
    names = {f.name for f in dataclasses.fields(cls)}
    unknown = data.keys() - names - {"kind"}
    if unknown:
        raise ValueError(f"{path} has no option {sorted(unknown)[0]!r}; {cls.__name__} has {', '.join(sorted(names))}")
    missing = [f.name for f in dataclasses.fields(cls) if f.name not in data and _required(f)]
    if missing:
        raise ValueError(f"{path} lacks {missing[0]!r}, which {cls.__name__} cannot do without")
    return cls(**{name: from_dict(hints[name], data[name], f"{path}.{name}", tasks) for name in names if name in data})


def _tasks_by_name(data: Any, tasks: tuple[type, ...]) -> dict[str, Any]:
    """The classes that a task may be of. Ours are names only, but for the one that the data name."""
    kind = data.get("kind") if isinstance(data, dict) else None
    return {**TASKS, **({kind: load(TASKS[kind])} if kind in TASKS else {}), **{cls.__name__: cls for cls in tasks}}


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


def load_experiment(path: Path, tasks: tuple[type, ...] = ()) -> Experiment:
    """The experiment a run wrote down. tasks: see from_dict."""
    return from_dict(Experiment, read_json(path), path.name, tasks)


def read_json(path: Path) -> Any:
    """A file of a run, or an error that says which one is damaged."""
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); the run is damaged") from error


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
