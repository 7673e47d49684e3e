"""The training loop, to be read from top to bottom.

Everything random is drawn from (seed, step) for the whole batch, and each process takes its slice: a resumed run continues bit for bit,
and two processes give the losses of one. `train` works in a run's folder, with validation, checkpoints and a log; `run_objective` runs
the same steps without a folder, for stages and small networks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

from ..files import read_tensors
from ..model import DiffusionForcing
from ..serialization import WEIGHTS_FILE, describe, save_model
from . import checkpoint, optim
from .begin import begin, check
from .clock import Clock
from .config import Experiment, TrainConfig
from .distributed import Distributed, gathered, join_processes, shard, spread
from .interrupt import interruptible
from .log import Log, progress_bar
from .objective import Objective, Stage
from .precision import DTYPES, resolve
from .task import Progress, TaskData


@dataclass(frozen=True)
class Result:
    """How a training ended: "done", "stopped early" or "interrupted"."""

    status: str
    step: int
    loss: float
    valid_loss: float
    minutes: float


class Diverged(RuntimeError):
    """The loss or its gradient became NaN or infinite."""


def train(
    experiment: Experiment, folder: Path, *, quiet: bool = False, model: DiffusionForcing | None = None, data: TaskData | None = None
) -> Result:
    """Train an experiment in a folder, continuing from its checkpoint if it has one; leaves `folder/model` behind.

    model, data: the network to train and what to train it on, where they are there already and not the experiment's to make.
    Ctrl-C and SIGTERM finish the step, save and return with status "interrupted"; before the first step there is nothing to save.
    """
    config, quiet = experiment.train, quiet or experiment.train.quiet
    check(experiment)
    with join_processes(config.device) as dist, interruptible() as interrupt:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        folder.mkdir(parents=True, exist_ok=True)
        data, model, init = begin(experiment, folder, dist, model, data)
        elapsed = 0.0
        if not checkpoint.exists(folder):
            for stage in experiment.objective.stages(model, init):
                began = time.monotonic()
                whole = _run_stage(stage, model, data, config, dist, lambda: dist.any(interrupt.requested), quiet=quiet or not dist.main)
                elapsed += dist.first(time.monotonic() - began)
                if not whole:  # stages are not saved: the same command starts again
                    return Result("interrupted", 0, math.nan, math.nan, elapsed / 60)
        describe(model)  # what cannot be saved at the end is refused at the start
        trainer = Trainer(model, data.train, experiment.objective, config, dist)
        trainer.clock.elapsed = elapsed
        clock, average = trainer.clock, trainer.average.module
        best, waited, valid_loss = math.inf, 0, math.nan
        saved = trainer.load(folder)
        if saved is not None:
            best, waited, valid_loss = saved["best"], saved["waited"], saved["valid_loss"]

        def save() -> None:
            trainer.save(folder, {"best": best, "waited": waited, "valid_loss": valid_loss})

        status = "stopped early" if config.patience is not None and waited >= config.patience else "done"
        last_save = time.monotonic()
        with Log(folder, clock, quiet=quiet or not dist.main, active=dist.main, wandb=config.wandb, name=experiment.name) as log:
            while not clock.finished and status == "done":
                try:
                    loss, norm = trainer.step()
                except Diverged as error:
                    save()
                    _save_model(average, folder / "model", dist)
                    raise Diverged(f"{error} The weights from before this step are kept in {folder}.") from None
                log.step(loss, norm, trainer.lr, config.batch * data.train.length)
                if clock.step % config.validate_every == 0 or clock.finished:
                    valid_loss = validate(average, data.valid, experiment.objective, config, dist)
                    log.valid(valid_loss)
                    if config.keep_checkpoints:
                        _save_model(average, folder / "kept" / f"{clock.step:06d}", dist)
                    monitored = valid_loss if config.monitor == "loss" else _score(experiment, average, dist)
                    if monitored < best:
                        best, waited = monitored, 0
                        if config.patience is not None:
                            _save_model(average, folder / "best", dist)
                    else:
                        waited += 1
                    if config.patience is not None and waited >= config.patience:
                        status = "stopped early"
                        break
                if dist.any(interrupt.requested):
                    status = "interrupted"
                    break
                if dist.any(time.monotonic() - last_save > config.checkpoint_every):
                    save()
                    last_save = time.monotonic()
        save()
        if status != "interrupted" and config.patience is not None and (folder / "best").exists():
            _load_weights(average, folder / "best", dist)
        _save_model(average, folder / "model", dist)
        return Result(status, clock.step, trainer.loss, valid_loss, clock.elapsed / 60)


def run_objective(
    model: nn.Module, source: Any, objective: Objective, config: TrainConfig, *, progress: Progress | None = None, label: str = "training",
    dist: Distributed | None = None, stop: Callable[[], bool] = lambda: False,
) -> bool:  # fmt: skip
    """Train a network by an objective, in place and without a folder. Returns whether the budget was spent before `stop()` was true.

    source: draws batches, `draw(size, generator)` and `read(rows)`. The same seed gives the same weights. progress: called after each step
    with the label. dist: the processes that share each batch. Of config, what concerns folders is not used.
    """
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    trainer = Trainer(model, source, objective, config, dist or Distributed(device=next(model.parameters()).device))
    try:
        while not trainer.clock.finished:
            if stop():
                return False
            trainer.step()
            if progress is not None:
                done = (trainer.clock.step, config.steps) if config.steps else (round(100 * min(1.0, trainer.clock.progress)), 100)
                progress(label, *done)
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
    if config.ema:
        model.load_state_dict(trainer.average.module.state_dict())
    return True


class Trainer:
    """A network in training by an objective: its optimisers, learning rates, moving average and clock. `step` takes one step."""

    def __init__(self, model: nn.Module, source: Any, objective: Objective, config: TrainConfig, dist: Distributed) -> None:
        self.model, self.source, self.objective, self.config, self.dist = model, source, objective, config, dist
        self.clock, self.loss = Clock(config), math.nan
        trained = {id(parameter) for parameter in objective.parameters(model)}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in trained)
        # The average stays outside of whatever spreads the model over processes, and is what is validated and saved.
        self.average = AveragedModel(model, multi_avg_fn=_average(config.ema))
        if dist.size > 1 and config.parallel == "fsdp":
            shard(self.average.module, dist)
        self.module = spread(Losses(model), model, dist, config.parallel)
        self.precision = resolve(config.precision, dist.device.type)
        quick = torch.bfloat16 if self.precision == "bfloat16" else torch.float32
        self.optimizers = optim.build(model, config.optimizer, config.lr, config.muon_lr, config.weight_decay, quick)
        self.schedulers = [LambdaLR(optimizer, self.clock.lr_factor) for optimizer in self.optimizers]
        self.scaler = torch.amp.GradScaler(dist.device.type, enabled=self.precision == "float16")
        self.losses: Any = torch.compile(self.module) if config.compile else self.module

    @property
    def lr(self) -> float:
        return float(self.schedulers[0].get_last_lr()[0])

    def step(self) -> tuple[float, float]:
        """One step of the optimisers. Returns the loss over all processes and the norm of its gradient; raises Diverged and leaves the
        weights as they were where either is not finite.
        """
        config, dist, clock = self.config, self.dist, self.clock
        clock.tick()
        objective, generator = self.objective.at(clock.progress), seeded(config.seed, clock.step)
        windows = self.source.draw(config.batch, generator)
        drawn = objective.draw_batch(self.model, self.source, windows, generator)
        mine = range(len(windows))[dist.slice(len(windows))]
        share = len(mine) // config.accumulate
        if share * config.accumulate != len(mine):
            raise ValueError(f"accumulate={config.accumulate} must divide each process's {len(mine)} sequences")
        total = torch.zeros(2, dtype=torch.float64)
        for part in range(config.accumulate):
            rows = slice(mine[part * share], mine[part * share] + share)
            batch = _to(self.source.read(windows[rows]), dist.device)
            with torch.autocast(dist.device.type, DTYPES[self.precision], enabled=self.precision != "float32"):
                losses = self.losses(objective, batch, _to(drawn, dist.device, rows))
            losses = losses * batch.mask
            # Over the batch's size, not its count of real tokens: then shares of a batch add up to the whole, wherever they are computed.
            loss = losses.sum() / (len(windows) * losses.shape[1]) * dist.size
            self.scaler.scale(loss).backward()
            total += torch.stack([losses.detach().sum(), batch.mask.sum()]).cpu().double()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        norm = float(gathered(nn.utils.clip_grad_norm_(self.module.parameters(), config.clip_norm)))
        total = dist.sum(total)
        self.loss = float(total[0] / total[1])
        finite = math.isfinite(self.loss) and math.isfinite(norm)
        if finite or self.precision == "float16":  # whose scaler skips steps by itself
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
            self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self.precision == "float16" and not math.isfinite(norm):
            norm = 0.0
        if not (math.isfinite(self.loss) and math.isfinite(norm)):
            raise Diverged(_divergence(clock.step, self.loss, norm, self.lr, config))
        clock.tock()
        clock.elapsed = dist.first(clock.elapsed)  # the learning rate and the end depend on it: one clock for all
        for scheduler in self.schedulers:
            scheduler.step()
        self.average.update_parameters(self.model)
        clock.step += 1
        return self.loss, norm

    def save(self, folder: Path, scalars: dict[str, Any]) -> None:
        """Write a checkpoint, with further numbers beside those of the training."""
        tensors = checkpoint.collect(self._modules, self.optimizers)
        if self.dist.main:
            own = {"step": self.clock.step, "elapsed": self.clock.elapsed, "loss": self.loss, "scaler": self.scaler.state_dict()}
            checkpoint.save(folder, tensors, {**own, **scalars})

    def load(self, folder: Path) -> dict[str, Any] | None:
        """Continue from a folder's checkpoint, if it has one; returns the numbers saved with it."""
        saved = checkpoint.load(folder, self._modules, self.optimizers)
        if saved is None:
            return None
        self.clock.step, self.clock.elapsed, self.loss = saved["step"], saved["elapsed"], saved["loss"]
        if saved["scaler"]:
            self.scaler.load_state_dict(saved["scaler"])
        for scheduler in self.schedulers:
            _resume_lr(scheduler, self.clock.step)
        return saved

    @property
    def _modules(self) -> dict[str, nn.Module]:
        return {"model": self.model, "average": self.average}


class Losses(nn.Module):
    """A network's losses by an objective, as one forward pass: what DDP and torch.compile wrap."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, objective: Objective, batch: Any, drawn: Any) -> Tensor:
        return objective(self.model, batch, drawn)


@torch.no_grad()
def validate(model: nn.Module, source: Any, objective: Objective, config: TrainConfig, dist: Distributed) -> float:
    """Loss on held-out windows, with the same random numbers every time."""
    objective = objective.at(None)
    windows = source.all()
    windows = windows[torch.linspace(0, len(windows) - 1, min(config.valid_windows, len(windows))).long()]
    drawn = objective.draw_batch(model, source, windows, seeded(config.seed, -1))
    total = torch.zeros(2, dtype=torch.float64)
    size = max(1, config.batch // config.accumulate)
    for i, first in enumerate(range(0, len(windows), size)):
        if i % dist.size != dist.rank and config.parallel != "fsdp":
            continue
        rows = slice(first, first + size)
        batch = _to(source.read(windows[rows]), dist.device)
        losses = objective(model, batch, _to(drawn, dist.device, rows)) * batch.mask
        total += torch.stack([losses.sum(), batch.mask.sum()]).cpu().double()
    total = dist.sum(total)
    return float(total[0] / total[1])


def seeded(*numbers: int) -> Generator:
    """A generator for (seed, step, ...): the same numbers give the same draws, others unrelated ones."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = ((state ^ (number & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return Generator().manual_seed(state & 0x7FFFFFFFFFFFFFFF)


def _run_stage(
    stage: Stage, model: nn.Module, data: TaskData, config: TrainConfig, dist: Distributed, stop: Callable[[], bool], *, quiet: bool
) -> bool:  # fmt: skip
    """Run a stage that comes before the main training. Returns whether it was not stopped."""
    budget = TrainConfig(
        steps=stage.steps, minutes=config.minutes and config.minutes / 4, batch=config.batch, accumulate=config.accumulate, lr=stage.lr,
        warmup=20, ema=0.0, seed=config.seed, precision=config.precision,
    )  # fmt: skip
    if quiet:
        return run_objective(model, data.train, stage.objective, budget, dist=dist, stop=stop)
    print(f"{stage.label}: {stage.steps} steps before the main training", flush=True)
    with progress_bar() as progress:
        return run_objective(model, data.train, stage.objective, budget, progress=progress, label=stage.label, dist=dist, stop=stop)


def _to(parts: Any, device: torch.device, rows: slice = slice(None)) -> Any:
    """Some rows of a NamedTuple of tensors, or of None, on a device."""
    return type(parts)._make(part if part is None else part[rows].to(device, non_blocking=True) for part in parts)


def _score(experiment: Experiment, model: Any, dist: Distributed) -> float:
    """The task's own score of a model. Each process computes it alike."""
    model.eval()
    score = dist.first(experiment.task.score(model))
    model.train()
    return score


def _average(decay: float) -> Any:
    """Exponential moving average that is young while the training is: a plain mean at first, then `decay`."""

    @torch.no_grad()
    def update(averaged: list[Tensor], current: list[Tensor], count: Tensor) -> None:
        now = min(decay, (1 + int(count)) / (10 + int(count)))
        torch._foreach_lerp_(averaged, current, 1 - now)

    return update


def _resume_lr(scheduler: LambdaLR, step: int) -> None:
    """Learning rates as they were when `step` steps had been taken."""
    scheduler.last_epoch = step
    for group, base, factor in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = base * factor(step)
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]


def _divergence(step: int, loss: float, norm: float, lr: float, config: TrainConfig) -> str:
    return (
        f"training diverged at step {step + 1}: loss {loss}, gradient norm {norm}, learning rate {lr:.3g}. Try a lower learning rate "
        f"(--train.lr {config.lr / 3:.2g}), a longer warm-up (--train.warmup {2 * config.warmup}) together with --fresh, or look for "
        "outliers in the data."
    )


def _save_model(model: Any, folder: Path, dist: Distributed) -> None:
    tensors = checkpoint.collect({"": model}, [])
    if dist.main:
        save_model(model, folder, tensors)
    dist.barrier()


def _load_weights(model: nn.Module, folder: Path, dist: Distributed) -> None:
    dist.barrier()
    checkpoint.fill(model, read_tensors(folder / WEIGHTS_FILE))
