"""`fit`: train from Python, on arrays and perhaps with a network of one's own, in a run's folder that the command line opens."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..backbones import BackboneConfig
from ..codecs import codec_traits
from ..model import DiffusionForcing
from ..schedule import LEVELS, NoiseSchedule, cosine
from ..serialization import WEIGHTS_FILE, describe, fill
from ..windows import Source
from .begin import check, new_model
from .config import Experiment, GivenModel, ModelConfig, TrainConfig
from .evaluation import default_sampler
from .objective import Denoising, Objective
from .pretrained import model_folder
from .run import FIT, open_run
from .sequences import LONGEST, MOST_BYTES, Ragged, Sequences, digest, gather, hold_out, kept_of, normalizer, write
from .task import TASKS, Task, TaskData
from .train import Diverged, Result, seeded, train

Arrays = Tensor | np.ndarray | Sequence[Any]


@dataclass(frozen=True)
class Fit:
    """What `fit` returns: the trained model (the moving average of its weights), the run's folder, and how the training ended."""

    model: DiffusionForcing = field(repr=False)
    folder: Path
    result: Result

    def encode(self, raw: Tensor | np.ndarray) -> Tensor:
        """Raw sequences (n, t, *event) as tokens of the model."""
        raw = torch.as_tensor(raw, dtype=torch.float32, device=self.model.device)
        return raw if self.model.codec is None else self.model.codec.encode(raw)  # type: ignore[operator]

    def encode_std(self, std: float | Tensor | np.ndarray) -> Tensor:
        """The standard deviation of errors in raw units, in units of tokens: the `std` of `observe`, `smooth` and `filter`.

        std: one number; one for each number of a frame, (*event); or (b, t, *event). Returns what spreads over tokens (b, t, *event).
        """
        error = torch.as_tensor(std, dtype=torch.float32, device=self.model.device)
        encoded = error if self.model.codec is None else self.model.codec.encode_std(error)  # type: ignore[operator]
        axes = len(self.model.traits.event or (1,)) + 2  # all of them, or (*event) would be read as (t,)
        return encoded[(None,) * (axes - encoded.ndim)] if encoded.ndim else encoded

    def decode(self, tokens: Tensor) -> Tensor:
        """Tokens of the model in raw units."""
        return tokens if self.model.codec is None else self.model.codec.decode(tokens)  # type: ignore[operator]


def fit(
    model: nn.Module | ModelConfig | BackboneConfig, dataset: Arrays | Source | TaskData | Task, train: TrainConfig | None = None, *,
    folder: str | Path = "runs/fit", cond: Arrays | None = None, valid: float | Arrays | tuple[Arrays, Arrays] | Source | None = None,
    length: int | None = None, objective: Objective | None = None, **options: Any,
) -> Fit:  # fmt: skip
    """Train a model on data, in a folder that `dforce eval`, `sample` and `report` open. The same call resumes after Ctrl-C or a crash.

    model: a DiffusionForcing (trained in place), a network (an nn.Module, of our own or yours), a ModelConfig, or a network's config.
    dataset: raw sequences, an array (n, t, *event) or a list of arrays (t_i, *event) of any lengths; or tokens as the model reads them, a
    TaskData or a source (`Windows`); or a Task. Raw sequences are normalised, unless the model has a codec, which then encodes them.
    train: budget and optimiser; options: fields of it, such as steps=1000, lr=3e-4, quiet=True. cond: conditions (n, t, c), or a list.
    valid: what to validate on, as a share of the sequences (a tenth by default) or as data like `dataset`, with conditions (data, cond).
    length: tokens of a training window; by default those of the longest sequence, 64 at most. objective: `Denoising()` by default.
    """
    config, folder = _train_config(train, options), Path(folder)
    codec = _codec(model, config)
    task, data, kept = _data(dataset, cond, valid, length, codec)
    objective = Denoising() if objective is None else objective
    network = _build(model, data, objective)
    if isinstance(task, Sequences):
        task = dataclasses.replace(task, sampler=default_sampler(network.traits.causal))
    described = _model_config(model) or GivenModel(json.loads(json.dumps(describe(network))))
    experiment = Experiment(task, described, config, objective, folder.name)
    check(experiment)
    _try_out(network, data, objective)
    main, own = os.environ.get("RANK", "0") == "0", _own_classes(task, network)
    if main:
        open_run(folder, FIT, experiment, _command(), facts=own)
        if kept:
            write(folder / "data.safetensors", **kept)
        if not config.quiet:
            print(_announcement(folder, data, config, kept), flush=True)
    given = network if isinstance(described, GivenModel) else None
    result = _train(experiment, folder, given, data)
    if given is None:
        network = DiffusionForcing.from_pretrained(folder / "model")
    else:
        fill(network, folder / "model" / WEIGHTS_FILE)
    if main and not config.quiet:
        handed = f" --backbone {own['backbone']}" if "backbone" in own else ""
        print(f"{result.status}: {result.step:,} steps in {result.minutes:.1f} minutes, validation loss {result.valid_loss:.4f}. "
              f"Next: dforce eval {folder}{handed}", flush=True)  # fmt: skip
    return Fit(network.eval(), folder, result)


def _train(experiment: Experiment, folder: Path, model: DiffusionForcing | None, data: TaskData) -> Result:
    """Train. Ctrl-C saves, and then ends the program as usual."""
    try:
        result = train(dataclasses.replace(experiment, task=experiment.task.within(folder)), folder, model=model, data=data)
    except Diverged as error:  # whose advice is for the command line
        words = re.sub(r"--train\.(\w+) ([\d.e+-]+)", r"\1=\2", str(error)).replace("together with --fresh", "in another folder")
        raise Diverged(words) from None
    if result.status != "interrupted":
        return result
    saved = f"at step {result.step:,}; all is saved, and the same call resumes it" if result.step else "before the first step"
    raise KeyboardInterrupt(f"training in {folder} was interrupted {saved}")


def _train_config(train: TrainConfig | None, options: dict[str, Any]) -> TrainConfig:
    names = [option.name for option in dataclasses.fields(TrainConfig)]
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; options of training are {', '.join(names)}"
            raise TypeError(f"fit has no option {name!r}{hint}")
    config = dataclasses.replace(train or TrainConfig(), **options)
    if config.parallel == "fsdp":
        raise ValueError("fit returns the whole model, which fsdp shards; use parallel='ddp', or a recipe and torchrun dforce train")
    return config


def _model_config(model: Any) -> ModelConfig | None:
    """The options that a model is built from; None where it is there already."""
    if isinstance(model, ModelConfig):
        return model
    if isinstance(model, nn.Module):
        return None
    if isinstance(model, type):
        raise ValueError(f"fit takes a network or its config, not a class: {model.__name__}(...)")
    if not (dataclasses.is_dataclass(model) and callable(getattr(model, "build", None))):
        raise ValueError(
            f"fit trains a DiffusionForcing, a network, a ModelConfig or a network's config such as RNNConfig(); got {model!r}"
        )
    return ModelConfig(backbone=model)  # type: ignore[arg-type]


def _codec(model: Any, config: TrainConfig) -> nn.Module | None:
    """The codec that the model brings with it."""
    if isinstance(model, DiffusionForcing):
        return model.codec
    if config.init is None:
        return None
    if _model_config(model) is None:
        raise ValueError(f"init={config.init!r} fills a network built from its config; load the weights of {type(model).__name__} yourself")
    return DiffusionForcing.from_pretrained(model_folder(config.init)).codec


def _build(model: Any, data: TaskData, objective: Objective) -> DiffusionForcing:
    """The model to train, or one like it where the training is to build its own."""
    config = _model_config(model)
    if config is not None:
        with torch.random.fork_rng(devices=[]):
            return new_model(config, data, objective)
    if not isinstance(model, DiffusionForcing):
        levels = getattr(model, "config", {}).get("levels", LEVELS)
        return DiffusionForcing(model, NoiseSchedule(cosine(levels)), codec=data.codec, optional_cond=objective.drops_cond)
    if model.codec is None:
        model.codec = data.codec
    return model


def _data(dataset: Any, cond: Any, valid: Any, length: int | None, codec: Any) -> tuple[Task, TaskData, dict[str, Ragged]]:
    """The task, its windows of tokens, and what the run keeps of the data."""
    kinds = type(dataset).__mro__
    if Task not in kinds and Source not in kinds and TaskData not in kinds:
        return _of_arrays(dataset, cond, valid, length, codec)
    for name, value in (("cond", cond), ("length", length)):
        if value is not None:
            raise ValueError(f"{name} goes with arrays; a {type(dataset).__name__} has its own: leave out {name}")
    if valid is not None and Source not in kinds:
        raise ValueError(f"a {type(dataset).__name__} says itself what to validate on; leave out valid")
    return (dataset, dataset.data(), {}) if Task in kinds else _of_tokens(dataset, valid)


def _of_arrays(dataset: Any, cond: Any, valid: Any, length: int | None, codec: Any) -> tuple[Sequences, TaskData, dict[str, Ragged]]:
    """The task, its windows of tokens, and what the run keeps, of raw sequences."""
    train = gather(dataset, cond, "dataset")
    if valid is None or isinstance(valid, (int, float)):
        train, held = hold_out(train, 0.1 if valid is None else valid)
    elif {Source, TaskData} & {*type(valid).__mro__}:
        raise ValueError("dataset holds raw sequences and valid tokens; give both as arrays, or both as Windows")
    else:
        valid, valid_cond = valid if isinstance(valid, tuple) and len(valid) == 2 else (valid, None)
        if (cond is None) != (valid_cond is None):
            raise ValueError("conditions go with both or neither: cond=..., valid=(sequences, their conditions)")
        held = gather(valid, valid_cond, "valid")
        if held.x.shape[1:] != train.x.shape[1:] or held.cond.shape[1:] != train.cond.shape[1:]:
            raise ValueError(f"valid has tokens of {tuple(held.x.shape[1:])} and conditions of {held.cond.shape[1]} numbers; dataset "
                             f"{tuple(train.x.shape[1:])} and {train.cond.shape[1]}")  # fmt: skip
    codec = normalizer(train.x) if codec is None else codec
    longest = max(1, int(train.sizes.max()) // codec_traits(codec).stack)
    task = Sequences(min(longest, LONGEST) if length is None else length, digest=digest(train, held))
    task = dataclasses.replace(task, context=min(task.context, task.length - 1))
    kept = {"train": train, "valid": held} if train.bytes + held.bytes <= MOST_BYTES else {"valid": held}
    return task, task.encode(train, held, codec), kept


def _of_tokens(dataset: Source | TaskData, valid: Any) -> tuple[Sequences, TaskData, dict[str, Ragged]]:
    """The task, the windows, and what the run keeps, of tokens as the model reads them."""
    if not isinstance(dataset, TaskData):
        if Source not in type(valid).__mro__:
            raise ValueError(f"a {type(dataset).__name__} is not split: give valid=Windows(...), held-out windows")
        dataset = TaskData(dataset, valid)
    held = kept_of(dataset.valid)
    context = min(dataset.valid.context, dataset.valid.length - 1)
    return Sequences(dataset.valid.length, context, encoded=True, digest=digest(held)), dataset, {"valid": held}


@torch.no_grad()
def _try_out(model: DiffusionForcing, data: TaskData, objective: Objective) -> None:
    """Two windows through the model, so that what does not go together is told before anything is written."""
    if model.device.type != "cpu":
        return
    mode, now = model.training, objective.at(None)
    with torch.random.fork_rng(devices=[]):
        windows = data.train.draw(2, seeded(0))
        try:
            losses = now(model.eval(), data.train.read(windows), now.draw_batch(model, data.train, windows, seeded(0)))
        except (IndexError, RuntimeError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{type(model.backbone).__name__} fails on two windows of tokens {data.train.event}, conditions of {data.train.cond_width} "
                f"numbers and K={model.schedule.levels}: {error}. Say in its `config` what it is built for (width or event, cond, levels); "
                "check_backbone(network) tries it out"
            ) from error
    model.train(mode)
    if not bool(torch.isfinite(losses).all()):
        raise ValueError(
            "the untrained model's loss is NaN or infinite; check_backbone tries out a network, and tokens should be of size 1"
        )


def _own_classes(task: Task, model: DiffusionForcing) -> dict[str, str]:
    """Where classes that are none of ours stand, so that the run can say what to type, or find its task, when it is opened."""
    facts = {"backbone": _reference(type(model.backbone))} if describe(model)["backbone"]["kind"] == "custom" else {}
    return facts if type(task).__name__ in TASKS else {**facts, "recipe": _reference(type(task))}


def _reference(kind: type) -> str:
    """A class as module:name; of a script, its file's name."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    module = Path(script).stem if kind.__module__ == "__main__" and script else kind.__module__
    return f"{module}:{kind.__name__}"


def _command() -> str:
    """How this program was started, as far as it can be repeated."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    return shlex.join(["python", *sys.argv]) if script and sys.argv and sys.argv[0] else "fit(...) in an interactive session"


def _announcement(folder: Path, data: TaskData, config: TrainConfig, kept: dict[str, Ragged]) -> str:
    budget = " or ".join(f"{most:,} {unit}" for unit, most in (("steps", config.steps), ("minutes", config.minutes)) if most)
    count = f"{len(kept['train'].sizes):,} sequences, {len(kept['valid'].sizes):,} held out, " if "train" in kept else ""
    note = "" if "train" in kept or not kept else "; of the data the run keeps held-out windows only"
    return f"training in {folder}: {count}windows of {data.train.length} tokens, {budget}, seed {config.seed}{note}"
