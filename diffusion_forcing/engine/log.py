"""Progress bars, and the log of a training: a JSONL file, TensorBoard, and a line or bar on the terminal."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from ..files import write_atomically
from .clock import Clock
from .task import Progress

LOG = "log.jsonl"


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Progress as bars, one for each kind of work; silent where there is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bars: dict[str, Any] = {}
    with Bars(*columns, console=Console(stderr=True), transient=True) as display:

        def report(what: str, done: int, of: int) -> None:
            if what not in bars:
                bars[what] = display.add_task(what, total=of)
            display.update(bars[what], completed=done)

        yield report


class Log:
    """A bar with loss, tokens/s and time left on a terminal, elsewhere a line every ten seconds; log.jsonl in the run's folder, and
    tensorboard/ where that package is installed.

    A resumed run first drops lines of steps after its checkpoint, which will be repeated.
    """

    def __init__(self, folder: Path, clock: Clock, *, quiet: bool, active: bool, wandb: bool, name: str) -> None:
        self.folder, self.clock, self.quiet, self.active = folder, clock, quiet, active
        self.every = clock.config.log_every
        self.smooth: float | None = None
        self.tokens = 0
        self.valid_loss: float | None = None
        self._use_wandb, self._name = wandb and active, name
        self._run: Any = None
        self._incomplete = False

    def __enter__(self) -> Log:
        if self.active:
            path = self.folder / LOG
            kept = [line for line in read_log(path) if line["step"] <= self.clock.step]
            write_atomically(path, lambda file: Path(file).write_text("".join(json.dumps(line) + "\n" for line in kept)))
            self._file = path.open("ab", buffering=0)
            self._board = _tensorboard(self.folder / "tensorboard", self.clock.step + 1)
        if self._use_wandb:
            try:
                import wandb
            except ImportError as error:
                raise ImportError("logging to Weights & Biases needs its package: pip install 'diffusion_forcing[wandb]'") from error
            self._run = wandb.init(project="diffusion_forcing", name=self._name, dir=str(self.folder))
        self.console = Console(stderr=True)
        self.bar: Bars | None = None
        if not self.quiet and self.console.is_terminal:
            columns = (TextColumn("[bold]{task.description}"), BarColumn(), TextColumn("{task.fields[status]}"), TimeElapsedColumn())
            self.bar = Bars(*columns, console=self.console)
            self.bar.start()
            self._task = self.bar.add_task("training", total=1.0, status="")
        self._started, self._shown, self._base = time.monotonic(), time.monotonic(), self.clock.progress
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.active:
            self._file.close()
            if self._board is not None:
                with contextlib.suppress(OSError):
                    self._board.close()
        if self._run is not None:
            self._run.finish()

    def step(self, loss: float, norm: float, lr: float, tokens: int) -> None:
        """Log a step: its loss, gradient norm, learning rate and count of tokens."""
        self.tokens += tokens
        self.smooth = loss if self.smooth is None else 0.98 * self.smooth + 0.02 * loss
        step = self.clock.step
        if step % self.every == 0 or step == 1 or self.clock.finished:
            self._write({"step": step, "loss": loss, "grad_norm": norm, "lr": lr, "seconds": round(self.clock.elapsed, 3),
                         "tokens_per_second": round(self.rate)})  # fmt: skip
        self._show()

    def valid(self, loss: float) -> None:
        """Log a validation."""
        self.valid_loss = loss
        self._write({"step": self.clock.step, "valid_loss": loss, "seconds": round(self.clock.elapsed, 3)})

    @property
    def rate(self) -> float:
        return self.tokens / max(1e-9, time.monotonic() - self._started)

    def _write(self, line: dict[str, Any]) -> None:
        if not self.active:
            return
        try:
            self._append((json.dumps(line) + "\n").encode())
            if self._board is not None:
                for name, value in line.items():
                    if name not in ("step", "seconds"):
                        self._board.add_scalar(name, value, line["step"])
        except OSError as error:  # lines are missing then; the training is worth more
            if not self._incomplete:
                print(f"warning: {self.folder / LOG} lacks lines from step {line['step']:,} on ({error})", file=sys.stderr, flush=True)
            self._incomplete = True
        if self._run is not None:
            self._run.log(line)

    def _append(self, data: bytes) -> None:
        """Whole lines only: a part of one, written when the disk was full, is taken back."""
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder / LOG))
        except OSError:
            self._file.truncate(end)
            raise

    def _show(self) -> None:
        if self.quiet:
            return
        now = time.monotonic()
        if self.bar is None and now - self._shown < 10 and not self.clock.finished:
            return
        gained = self.clock.progress - self._base
        left = (now - self._started) * (1 - self.clock.progress) / gained if gained > 0 else float("nan")
        valid = "" if self.valid_loss is None else f"  valid {self.valid_loss:.4f}"
        status = f"step {self.clock.step:,}  loss {self.smooth:.4f}{valid}  {self.rate:,.0f} tokens/s  {_duration(left)} left"
        if self.bar is not None:
            self.bar.update(self._task, completed=min(1.0, self.clock.progress), status=status)
            return
        print(f"training {min(1.0, self.clock.progress):4.0%}  {status}", file=sys.stderr, flush=True)
        self._shown = now


def _tensorboard(folder: Path, purge_step: int) -> Any:
    """A writer of TensorBoard's files, or None without the package tensorboard: log.jsonl holds the same numbers."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=purge_step)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Lines of a log, numbers by their names; a line cut off by a crash, and what follows it, is dropped."""
    lines: list[dict[str, Any]] = []
    for text in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            break
        if not isinstance(line, dict) or "step" not in line or not all(isinstance(value, (int, float)) for value in line.values()):
            break
        lines.append(line)
    return lines


def _duration(seconds: float) -> str:
    if seconds != seconds:
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
