"""The training loop, to be read from top to bottom.

Everything random is drawn from (seed, step) for the whole batch, and each process takes its slice: a resumed run goes on bit for bit, and
two processes give the losses of one.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

from .. import levels
from ..backbones.space_time import SpaceTime
from ..model import DiffusionForcing
from ..serialization import describe
from ..video.decoder import Painting
from ..video.warp import learn_to_move, moves, spent
from ..windows import Batch
from . import checkpoint, optim
from .config import Experiment, PainterConfig, TrainConfig
from .distributed import World, check_device, device_kind, shard, spread, world
from .log import Log, progress_bar
from .task import Source, TaskData


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


def train(experiment: Experiment, folder: Path, *, quiet: bool = False) -> Result:
    """Train an experiment in a folder, going on from its checkpoint if it has one; leaves `folder/model` behind.

    Ctrl-C and SIGTERM finish the step, save and return with status "interrupted"; before the first step there is nothing to save.
    """
    config = experiment.train
    check(config)
    if config.judge == "score" and not hasattr(experiment.task, "score"):
        raise ValueError(f"{type(experiment.task).__name__} has no score of its own to stop by; use --train.judge loss")
    if isinstance(experiment.model, PainterConfig) and config.init is None:
        raise ValueError("a painter draws what a trained model says: name that model, a run's folder or a pretrained one, by --train.init")
    if isinstance(experiment.model, PainterConfig) and config.looks > 1:
        raise ValueError(
            f"a painter's model sees a clean past, of which there is nothing to share; got looks={config.looks}, set --train.looks 1"
        )
    if isinstance(experiment.model, PainterConfig) and config.imagined:
        raise ValueError(f"a painter's model sees a clean past; got imagined={config.imagined}, set --train.imagined 0")
    if isinstance(experiment.model, PainterConfig) and config.parallel == "fsdp":
        raise ValueError("a painter asks its model by parts of the network that fsdp does not gather; use --train.parallel ddp")
    with world(config.device) as here, interruptible() as interrupt:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        folder.mkdir(parents=True, exist_ok=True)
        data, begun = (experiment.task.data(), None) if config.init is None else _begun(experiment, config.init, folder, here)
        torch.manual_seed(config.seed)
        model: DiffusionForcing | Painting
        if isinstance(experiment.model, PainterConfig):
            assert begun is not None
            model = experiment.model.teach(begun).to(here.device)
        else:
            model = experiment.model.build(data.train.event, data.train.cond_width, data.codec, data.constraint, data.smoother).to(
                here.device
            )
            if begun is not None:
                _take_over(model, begun, str(config.init), bool(getattr(experiment.task, "free", 0)))
        clock = Clock(config)
        if config.moving and moves(model) and not moves(begun) and not checkpoint.exists(folder):
            assert isinstance(model, DiffusionForcing)
            if here.main and not quiet:
                print(f"first, how pixels move: {config.moving} steps", flush=True)
            clock.tick()
            with progress_bar() as progress:
                whole = learn_to_move(
                    model, data.train, config.moving, batch=config.batch, generator=seeded(config.seed, -2),
                    seconds=15 * config.minutes if config.minutes else math.inf, progress=progress if here.main and not quiet else None,
                    stop=lambda: here.agree(interrupt.requested), here=here,
                )  # fmt: skip
            clock.tock()
            clock.elapsed = here.first(clock.elapsed)
            if not whole:  # nothing was learned yet that is worth keeping: the same command begins anew
                return Result("interrupted", 0, math.nan, math.nan, clock.elapsed / 60)
        describe(_saved(model))  # what cannot be saved at the end should say so at the start
        # The average stays outside of whatever spreads the model over processes, and is what is validated and saved.
        average = AveragedModel(model, multi_avg_fn=_average(config.ema))
        if here.size > 1 and config.parallel == "fsdp":
            shard(average.module, here)
        module = spread(model, here, config.parallel)
        optimizers = optim.build(model, config.optimizer, config.lr, config.muon_lr, config.weight_decay)
        schedulers = [LambdaLR(optimizer, clock.lr_factor) for optimizer in optimizers]
        scaler = torch.amp.GradScaler(here.device.type, enabled=config.precision == "float16")
        parts: dict[str, nn.Module] = {"model": model, "average": average}
        best, waited, loss, valid_loss = math.inf, 0, math.nan, math.nan

        saved = checkpoint.load(folder, parts, optimizers)
        if saved is not None:
            clock.step, clock.elapsed = saved["step"], saved["elapsed"]
            best, waited, loss, valid_loss = saved["best"], saved["waited"], saved["loss"], saved["valid_loss"]
            if saved.get("scaler"):
                scaler.load_state_dict(saved["scaler"])
            for scheduler in schedulers:
                _resume_lr(scheduler, clock.step)
        compiled: Any = torch.compile(module) if config.compile else module

        def save() -> None:
            tensors = checkpoint.collect(parts, optimizers)
            if here.main:
                scalars = {"step": clock.step, "elapsed": clock.elapsed, "best": best, "waited": waited, "loss": loss,
                           "valid_loss": valid_loss, "scaler": scaler.state_dict()}  # fmt: skip
                checkpoint.save(folder, tensors, scalars)

        def rate() -> float:
            return float(schedulers[0].get_last_lr()[0])

        status = "stopped early" if config.patience is not None and waited >= config.patience else "done"
        last_save = time.monotonic()
        with Log(folder, clock, quiet=quiet or not here.main, active=here.main, wandb=config.wandb, name=experiment.name) as log:
            while not clock.finished and status == "done":
                clock.tick()
                loss, norm = _step(compiled, data.train, optimizers, scaler, _stage(config, clock.progress), here, clock.step)
                if not (math.isfinite(loss) and math.isfinite(norm)):
                    save()
                    _save_model(average.module, folder / "model", here)
                    raise Diverged(_divergence(clock.step, loss, norm, rate(), config, folder))
                clock.tock()
                clock.elapsed = here.first(clock.elapsed)  # the learning rate and the end depend on it: one clock for all
                for scheduler in schedulers:
                    scheduler.step()
                average.update_parameters(model)
                clock.step += 1
                log.step(loss, norm, rate(), config.batch * data.train.length)
                if clock.step % config.validate_every == 0 or clock.finished:
                    valid_loss = validate(average.module, data.valid, config, here)
                    log.valid(valid_loss)
                    if config.keep:
                        _save_model(average.module, folder / "kept" / f"{clock.step:06d}", here)
                    judged = valid_loss if config.judge == "loss" else _score(experiment.task, average.module, here)
                    if judged < best:
                        best, waited = judged, 0
                        if config.patience is not None:
                            _save_model(average.module, folder / "best", here)
                    else:
                        waited += 1
                    if config.patience is not None and waited >= config.patience:
                        status = "stopped early"
                        break
                if here.agree(interrupt.requested):
                    status = "interrupted"
                    break
                if here.agree(time.monotonic() - last_save > config.checkpoint_every):
                    save()
                    last_save = time.monotonic()
        save()
        if status != "interrupted" and config.patience is not None and (folder / "best").exists():
            _fill_from(_saved(average.module), folder / "best", here)
        _save_model(average.module, folder / "model", here)
        return Result(status, clock.step, loss, valid_loss, clock.elapsed / 60)


def _begun(experiment: Experiment, init: str, folder: Path, here: World) -> tuple[TaskData, DiffusionForcing]:
    """The task's data as tokens of a trained model, for a painter as they are, and that model, of which the run keeps a copy: it must go on
    as it began.
    """
    from .pretrained import model_folder

    task: Any = experiment.task
    if not hasattr(task, "data_as"):
        raise ValueError(f"{type(task).__name__} cannot go on from another model: how its data become tokens is worked out anew each time")
    kept = folder / "init"
    # A copy of a run that never came to a checkpoint may be of another model.
    model = DiffusionForcing.from_pretrained(kept if kept.exists() and checkpoint.exists(folder) else model_folder(init))
    if model.codec is None:
        raise ValueError(
            f"{init} has no codec, which says how data become tokens; only models trained by `dforce train` can be gone on from"
        )
    data = task.data_as(model.codec, raw=True) if isinstance(experiment.model, PainterConfig) else task.data_as(model.codec)
    told = getattr(model.backbone, "config", {}).get("cond", data.train.cond_width)
    if isinstance(experiment.model, PainterConfig) and told != data.train.cond_width:
        raise ValueError(
            f"{init} is told {told} numbers a token, and this task tells {data.train.cond_width}; give the --task options that it was "
            "trained with (such as --task.free)"
        )
    here.barrier()  # all have read it
    if here.main and not (kept.exists() and checkpoint.exists(folder)):
        model.save_pretrained(kept)
    here.barrier()
    return data, model


def _take_over(model: DiffusionForcing, begun: DiffusionForcing, init: str, free: bool = False) -> None:
    """Fill a model that is to be trained with the weights of a trained one, which must be of the same make, but for what moves pixels, for
    what goes straight to the output, and for the last number that is told where a task is `free`: a network that has learned without may
    go on with them.
    """
    wanted, found = describe(model), describe(begun)
    grows = moves(model) and not moves(begun)
    straightens = bool(wanted["backbone"].get("input_skip")) and not found["backbone"].get("input_skip", True)
    if grows:
        found["backbone"]["warp"] = wanted["backbone"].get("warp")
    if straightens:
        found["backbone"]["input_skip"] = True
    told = found["backbone"].get("cond", 0)
    if freed := free and bool(told) and wanted["backbone"].get("cond") == told + 1 and isinstance(model.backbone, SpaceTime):
        found["backbone"]["cond"] = told + 1
    for name in ("backbone", "levels", "parameterization", "preconditioning"):
        if wanted[name] != found[name]:
            raise ValueError(
                f"the weights of {init} do not fit this model: {name} is {found[name]} there and {wanted[name]} here; use the same --model "
                "options and a task that tells as much (such as --task.free), or train without --train.init"
            )
    if not torch.equal(model.schedule.alpha_table.cpu(), begun.schedule.alpha_table):
        raise ValueError(f"{init} was trained on another noise schedule; use the same --model.schedule, or train without --train.init")
    weights = begun.state_dict()
    if grows:
        backbone: Any = model.backbone
        weights["backbone.proj_in.weight"] = backbone.widened(weights["backbone.proj_in.weight"])
    if freed:  # which counts nothing yet
        weights["backbone.cond_proj.weight"] = nn.functional.pad(weights["backbone.cond_proj.weight"], (0, 1))
    model.load_state_dict(weights, strict=not (grows or straightens))


def _stage(config: TrainConfig, progress: float) -> TrainConfig:
    """What holds when so much of the budget is spent: pasts are imagined from some share of it on."""
    return config if not config.imagined or progress >= config.imagined_after else replace(config, imagined=0.0)


def _step(
    module: nn.Module, data: Source, optimizers: list[torch.optim.Optimizer], scaler: torch.amp.GradScaler, config: TrainConfig,
    here: World, step: int,
) -> tuple[float, float]:  # fmt: skip
    """One step of the optimisers: the loss over all processes, and the gradient's norm. If either is not finite, weights stay."""
    generator = seeded(config.seed, step)
    windows = data.draw(config.batch, generator)
    drawn = draw(windows, data, config, generator, _schedule_levels(module), config.looks)
    mine = range(len(windows))[here.slice(len(windows))]
    share = len(mine) // config.accumulate
    if share * config.accumulate != len(mine):
        raise ValueError(f"accumulate={config.accumulate} must divide each process's {len(mine)} sequences")
    total = torch.zeros(2, dtype=torch.float64)
    for part in range(config.accumulate):
        rows = slice(mine[part * share], mine[part * share] + share)
        batch, noise, k, past, imagined = _read(data, windows[rows], drawn.of(rows), here, _schedule_levels(module))
        extra = {} if imagined is None else {"self_context": imagined}  # which a painter knows nothing of
        with torch.autocast(here.device.type, _DTYPES[config.precision], enabled=config.precision != "float32"):
            losses = module(batch.x, k, batch.cond, noise=noise, past=past, **extra).unflatten(0, (share, config.looks))
        losses = losses * batch.mask[:, None]
        # Over the batch's size, not its count of real tokens: then shares of a batch add up to the whole, wherever they are computed.
        loss = losses.sum() / (len(windows) * config.looks * data.length_of(windows)) * here.size
        scaler.scale(loss).backward()
        total += torch.stack([losses.detach().sum() / config.looks, batch.mask.sum()]).cpu().double()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = _whole(nn.utils.clip_grad_norm_(module.parameters(), config.clip_norm))
    total = here.sum(total)
    value = float(total[0] / total[1])
    if (math.isfinite(value) and math.isfinite(norm)) or config.precision == "float16":
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    return value, norm if config.precision != "float16" else 0.0 if math.isnan(norm) or math.isinf(norm) else norm


class Drawn(NamedTuple):
    """What is drawn for windows: noise and levels k of `looks` versions of each, beside one another, levels of the past, which conditions
    are kept, and at which levels tokens are imagined.
    """

    noise: Tensor
    k: Tensor
    past: Tensor | None
    kept: Tensor | None
    imagined: Tensor | None = None

    def of(self, rows: slice) -> Drawn:
        """Those of some of the windows."""
        whole = self.k.unflatten(0, (-1, 1)) if self.past is None else self.k.unflatten(0, (len(self.past), -1))
        noise = self.noise.unflatten(0, whole.shape[:2])
        past, kept, imagined = (part if part is None else part[rows] for part in (self.past, self.kept, self.imagined))
        return Drawn(noise[rows].flatten(0, 1), whole[rows].flatten(0, 1), past, kept, imagined)


def draw(windows: Tensor, data: Source, config: TrainConfig, generator: Generator, top: int, looks: int = 1) -> Drawn:
    """Noise and levels for a whole batch of windows."""
    size, length = len(windows), data.length_of(windows)
    k, past = levels.by_name(config.draw, getattr(data, "modalities", 1))((size * looks, length), top, generator)
    noise = torch.randn(size * looks, length, *data.event, generator=generator)
    past = None if past is None else past[::looks]
    kept = torch.rand(size, generator=generator) >= config.cond_drop if config.cond_drop else None
    if config.given:
        given = torch.rand(size, generator=generator) < config.given
        known = getattr(data, "context", 1)
        k[given.repeat_interleave(looks), :known] = 0
        if past is not None:
            past[given, :known] = 0
    imagined = levels.self_context_levels(k, top, config.imagined, generator) if config.imagined else None
    if imagined is not None and config.given:
        imagined[given, :known] = 0  # what is given is the truth
    return Drawn(noise, k, past, kept, imagined)


def _read(data: Source, windows: Tensor, drawn: Drawn, here: World, top: int) -> tuple[Batch, Tensor, Tensor, Tensor | None, Tensor | None]:
    """A batch on this process's device. Padding is a token at level K: it says nothing, to any backbone."""
    batch = data.read(windows)
    noise, k, past, kept, imagined = drawn
    k = torch.where(batch.mask.repeat_interleave(len(k) // len(windows), dim=0), k, top)
    past = None if past is None else torch.where(batch.mask, past, top).to(here.device)
    imagined = None if imagined is None else (imagined * batch.mask).to(here.device)
    cond = batch.cond if kept is None else batch.cond * kept[:, None, None]
    batch = Batch(*(part.to(here.device, non_blocking=True) for part in (batch.x, cond, batch.mask)))
    return batch, noise.to(here.device), k.to(here.device), past, imagined


@torch.no_grad()
def validate(model: nn.Module, data: Source, config: TrainConfig, here: World) -> float:
    """Loss on held-out windows, with the same levels and noise every time."""
    windows = data.all()
    windows = windows[torch.linspace(0, len(windows) - 1, min(config.valid_windows, len(windows))).long()]
    generator = seeded(config.seed, -1)
    top = _schedule_levels(model)
    drawn = draw(windows, data, config, generator, top)
    total = torch.zeros(2, dtype=torch.float64)
    size = max(1, config.batch // config.accumulate)
    for i, first in enumerate(range(0, len(windows), size)):
        if i % here.size != here.rank and config.parallel != "fsdp":
            continue
        rows = slice(first, first + size)
        batch, noise, k, past, _ = _read(data, windows[rows], drawn.of(rows), here, top)
        losses = model(batch.x, k, batch.cond, noise=noise, past=past) * batch.mask
        total += torch.stack([losses.sum(), batch.mask.sum()]).cpu().double()
    total = here.sum(total)
    return float(total[0] / total[1])


def _score(task: Any, model: nn.Module, here: World) -> float:
    """The task's own score of a model. Each process works it out alike."""
    model.eval()
    found = here.first(float(task.score(model)))
    model.train()
    return found


class Clock:
    """How far a training is: by steps, by minutes, or by whichever is further."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.step = 0
        self.elapsed = 0.0
        self._since: float | None = None

    def tick(self) -> None:
        if self._since is None:
            self._since = time.monotonic()

    def tock(self) -> None:
        now = time.monotonic()
        self.elapsed += now - (now if self._since is None else self._since)
        self._since = now

    @property
    def progress(self) -> float:
        """0 at the start, 1 at the end of the budget."""
        return self._spent(self.step)

    def _spent(self, step: int) -> float:
        """Share of the budget after so many steps."""
        by_time = self.elapsed / (60 * self.config.minutes) if self.config.minutes else 0.0
        return spent(step, self.config.steps, by_time) if self.config.steps else by_time

    @property
    def finished(self) -> bool:
        return self.progress >= 1

    def lr_factor(self, step: int) -> float:
        """Warm-up, then a cosine down to the final share."""
        config = self.config
        progress = min(1.0, self._spent(step))
        fall = config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))
        return min(1.0, (step + 1) / config.warmup if config.warmup else 1.0) * fall


class Interrupt:
    requested = False


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Turn the first Ctrl-C or SIGTERM into a request to stop; the second acts as usual."""
    interrupt = Interrupt()
    previous: dict[int, Any] = {}

    def request(number: int, _frame: Any) -> None:
        interrupt.requested = True
        signal.signal(number, previous[number])

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, request)
    except ValueError:  # not in the main thread: whoever runs us handles signals
        previous = {}
    try:
        yield interrupt
    finally:
        for caught, handler in previous.items():
            signal.signal(caught, handler)


def seeded(*numbers: int) -> Generator:
    """A generator for (seed, step, ...): the same numbers give the same draws, others unrelated ones."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = ((state ^ (number & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return Generator().manual_seed(state & 0x7FFFFFFFFFFFFFFF)


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check(config: TrainConfig) -> None:
    """What can be known to fail before anything is started or written."""
    kind = check_device(device_kind(config.device)).type
    if config.precision != "float32" and kind != "cuda":
        raise ValueError(f"precision={config.precision} is for CUDA; on {kind} train in float32")
    if config.parallel == "fsdp" and levels.by_name(config.draw)((1, 2), 2, Generator().manual_seed(0)).past is not None:
        raise ValueError(f"draw={config.draw} gives tokens a past of its own, by parts of the network that fsdp does not gather; use ddp")
    if config.parallel == "fsdp" and config.judge == "score":
        raise ValueError("judge=score samples from the model, which fsdp has cut up; use ddp, or judge=loss")
    if config.parallel == "fsdp" and config.optimizer == "muon":
        raise ValueError("Muon needs whole matrices, which fsdp cuts up; use parallel=ddp, or optimizer=adamw")


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


def _divergence(step: int, loss: float, norm: float, lr: float, config: TrainConfig, folder: Path) -> str:
    return (
        f"training diverged at step {step + 1}: loss {loss}, gradient norm {norm}, learning rate {lr:.3g}. The weights from before "
        f"this step are kept in {folder}. Try a lower learning rate (--train.lr {config.lr / 3:.2g}), a longer warm-up "
        f"(--train.warmup {2 * config.warmup}) together with --fresh, or look for outliers in the data."
    )


def _schedule_levels(module: nn.Module) -> int:
    inner = getattr(module, "_orig_mod", module)
    model: Any = getattr(inner, "module", inner)
    return model.schedule.levels


def _whole(value: Tensor) -> float:
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)


def _saved(model: nn.Module) -> nn.Module:
    """What is kept of what is trained: of a painter's training, the model that it paints for."""
    return model.model if isinstance(model, Painting) else model


def _save_model(model: nn.Module, folder: Path, here: World) -> None:
    model = _saved(model)
    tensors = checkpoint.collect({"model": model}, [])
    if here.main:
        DiffusionForcing.save_pretrained(_Whole(model, tensors), folder)  # type: ignore[arg-type]
    here.barrier()


class _Whole:
    """A model whose shards have been gathered, as far as saving it goes."""

    def __init__(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        self._model = model
        self._tensors = {name.removeprefix("model."): value for name, value in tensors.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def state_dict(self) -> dict[str, Tensor]:
        return self._tensors


def _fill_from(model: nn.Module, folder: Path, here: World) -> None:
    from ..files import read_tensors
    from ..serialization import WEIGHTS_FILE

    here.barrier()
    tensors = read_tensors(folder / WEIGHTS_FILE)
    own = model.state_dict()
    model.load_state_dict({name: checkpoint._like(tensors[name], value) for name, value in own.items()})
