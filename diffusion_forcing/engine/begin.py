"""How a training begins: what is refused before anything is written, and the data and the model to train."""

from __future__ import annotations

from pathlib import Path

import torch

from ..model import DiffusionForcing
from ..serialization import describe
from . import checkpoint, precision
from .config import Experiment, GivenModel, ModelConfig
from .distributed import Distributed, check_device, device_kind
from .objective import Objective
from .pretrained import model_folder
from .task import TaskData


def check(experiment: Experiment) -> None:
    """Raise for what can be known to fail before anything is started or written."""
    config, objective = experiment.train, experiment.objective
    kind = check_device(device_kind(config.device)).type
    precision.resolve(config.precision, kind)
    if config.monitor == "score" and not experiment.task.has_score:
        raise ValueError(f"{type(experiment.task).__name__} has no score of its own to stop by; use --train.monitor loss")
    if experiment.model is None and config.init is None:
        raise ValueError(f"{type(objective).__name__} trains a part of a trained model: name that model, a run's folder or a pretrained "
                         "model, by --train.init")  # fmt: skip
    if config.parallel == "fsdp":
        if not objective.supports_fsdp:
            raise ValueError("fsdp gathers weights for the network's forward pass only, and this objective uses it in other ways (as do "
                             "draws of levels that give the past its own); use --train.parallel ddp")  # fmt: skip
        if config.monitor == "score":
            raise ValueError(
                "monitor=score samples from the model, which fsdp has sharded; use --train.parallel ddp or --train.monitor loss"
            )
        if config.optimizer == "muon":
            raise ValueError("Muon needs whole matrices, which fsdp shards; use --train.parallel ddp or --train.optimizer adamw")


def begin(
    experiment: Experiment, folder: Path, dist: Distributed, model: DiffusionForcing | None = None, data: TaskData | None = None
) -> tuple[TaskData, DiffusionForcing, DiffusionForcing | None]:
    """The data, the model to train, and the trained model that it begins with, if any. model, data: where they are there already."""
    config, objective = experiment.train, experiment.objective
    if model is None and isinstance(experiment.model, GivenModel):
        raise ValueError(f"the model of {folder} was handed over from Python; call `fit` with it again, in the same folder")
    init = None if config.init is None else _load_init(config.init, folder, dist)
    if data is None:
        data = experiment.task.data() if init is None else objective.data(experiment.task, init.codec)  # type: ignore[arg-type]
    torch.manual_seed(config.seed)
    if model is not None:
        return data, model.to(dist.device), init
    if experiment.model is None or isinstance(experiment.model, GivenModel):
        assert init is not None
        model = objective.prepare(init)
        if model.cond_width not in (None, data.train.cond_width):
            raise ValueError(f"{config.init} reads conditions of {model.cond_width} numbers a token, and this task gives "
                             f"{data.train.cond_width}; give the --task options that it was trained with")  # fmt: skip
    else:
        model = new_model(experiment.model, data, objective, init)
        if init is not None:
            _take_weights(model, init, str(config.init))
    return data, model.to(dist.device), init


def new_model(config: ModelConfig, data: TaskData, objective: Objective, init: DiffusionForcing | None = None) -> DiffusionForcing:
    """A model for some data and an objective. init: the trained model that it is to begin with."""
    cond = data.train.cond_width
    if objective.drops_cond and not cond:
        raise ValueError("cond_drop leaves conditions out, and the data of this task have none; set --objective.cond-drop 0")
    optional = objective.drops_cond or (init is not None and init.optional_cond)
    return config.build(data.train.event, cond, data.codec, data.constraint, data.smoother, optional_cond=optional)


def _load_init(init: str, folder: Path, dist: Distributed) -> DiffusionForcing:
    """The trained model to begin with. The run keeps a copy: it must continue as it began."""
    kept = folder / "init"
    resumed = kept.exists() and checkpoint.exists(folder)  # the copy of a run that never came to a checkpoint may be of another model
    model = DiffusionForcing.from_pretrained(kept if resumed else model_folder(init))
    if model.codec is None:
        raise ValueError(f"{init} has no codec, which makes tokens of data; use a model trained by `dforce train`")
    dist.barrier()  # all have read it
    if dist.main and not resumed:
        model.save_pretrained(kept)
    dist.barrier()
    return model


def _take_weights(model: DiffusionForcing, init: DiffusionForcing, name: str) -> None:
    """Fill a new model with the weights of a trained one, which must be alike, but for parts that its backbone can add."""
    ours, theirs = describe(model), describe(init)
    weights = init.state_dict()
    if model.traits.grows and ours["backbone"]["kind"] == theirs["backbone"]["kind"]:
        network = {name.removeprefix("backbone."): value for name, value in weights.items() if name.startswith("backbone.")}
        network, config = model.backbone.grow(network, init.traits.config)  # type: ignore[attr-defined]
        weights |= {f"backbone.{name}": value for name, value in network.items()}
        theirs["backbone"] = {"kind": theirs["backbone"]["kind"], **config}
    for part in ("backbone", "levels", "parameterization", "preconditioning", "optional_cond"):
        if ours[part] != theirs[part]:
            raise ValueError(f"the weights of {name} do not fit this model: {part} is {theirs[part]} there and {ours[part]} here; use the "
                             "same --model options and a task with the same conditions, or train without --train.init")  # fmt: skip
    if not torch.equal(model.schedule.alpha_table.cpu(), init.schedule.alpha_table):
        raise ValueError(f"{name} was trained on another noise schedule; use the same --model.schedule, or train without --train.init")
    model.load_state_dict(weights)
