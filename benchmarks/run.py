"""Speed, as ratios within one run: machines differ and are noisy, ratios less so. `make bench`.

Work is counted in floating-point operations of matrix products (torch's own counter), speed as a share of what a large matrix product
reaches on the same cores in the same run, measured before and after each timing.
"""

from __future__ import annotations

import itertools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from diffusion_forcing import (
    RNN,
    DiffusionForcing,
    NoiseSchedule,
    Transformer,
    cosine,
    ddim_step,
    full_sequence,
    pyramid,
    sample,
    start,
    stream,
)
from diffusion_forcing.engine import recipes
from diffusion_forcing.engine.optim import build
from diffusion_forcing.imitation.agent import ImitationAgent
from diffusion_forcing.imitation.tokens import ModalityTokens
from diffusion_forcing.sampling import Context, Sampler
from diffusion_forcing.schedule import expand
from diffusion_forcing.video.codec import Patches

WIDTH = 16
CONTEXT = Context(stabilization=20)


@dataclass(frozen=True)
class Options:
    """Measure imports, training, sampling, wavefront, KV cache, roll-outs, video and imitation."""

    repeats: int = 5
    """Each timing is the best of so many."""
    threads: int | None = None
    """Threads of torch; its own choice if not given."""
    only: str = ""
    """Run only sections whose name contains this."""
    json: Path | None = None
    """Also write the figures to this file."""


def best(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of several runs, after one to warm up."""
    work()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def peak(repeats: int = 5, size: int = 2048) -> float:
    """FLOP/s of a large float32 matrix product."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / best(lambda: a @ b, repeats)


def share(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Seconds of some work, and its share of the peak measured around it."""
    before = peak(3)
    seconds = best(work, repeats)
    top = max(before, peak(3))
    with FlopCounterMode(display=False) as counter:
        work()
    return seconds, counter.get_total_flops() / seconds / top


def backbones() -> dict[str, tuple[nn.Module, int, int]]:
    """Networks at two sizes each, with the batch and the tokens they are trained on."""
    return {
        "GRU, 128 wide": (RNN(WIDTH, hidden=128, layers=2), 64, 32),
        "GRU, 512 wide": (RNN(WIDTH, hidden=512, layers=2), 64, 32),
        "transformer, 128 wide": (Transformer(WIDTH, hidden=128, layers=4, heads=4), 64, 32),
        "transformer, 512 wide": (Transformer(WIDTH, hidden=512, layers=6, heads=8), 64, 32),
    }


def model_of(backbone: nn.Module) -> DiffusionForcing:
    return DiffusionForcing(randomised(backbone), NoiseSchedule(cosine()))


def randomised(backbone: nn.Module) -> nn.Module:
    """A network of random weights: layers that start at zero would make some of the work trivial."""
    for p in backbone.parameters():
        nn.init.normal_(p, std=0.02)
    return backbone


def training(options: Options) -> list[dict]:
    rows = []
    for name, (backbone, batch, length) in backbones().items():
        model = model_of(backbone)
        optimizers = build(model, "adamw", 1e-4, 0.02, 0.0)
        x, k = torch.randn(batch, length, WIDTH), torch.randint(0, 1001, (batch, length))

        def step(model: DiffusionForcing = model, x: Tensor = x, k: Tensor = k, optimizers: list = optimizers) -> None:
            model(x, k).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        seconds, of_peak = share(step, options.repeats)
        rows.append({"what": name, "tokens_per_second": batch * length / seconds, "share_of_peak": of_peak})
    return rows


def sampling(options: Options) -> list[dict]:
    rows = []
    for name, (backbone, _, length) in backbones().items():
        model = model_of(backbone).eval()
        matrix = full_sequence(length, model.schedule.ladder(20))
        for batch in (1, 64):
            x = start(model.schedule, matrix, (batch, WIDTH))
            denoise = model.denoiser()
            seconds, of_peak = share(lambda d=denoise, m=model, x=x, k=matrix: sample(d, m.schedule, x, k), max(2, options.repeats // 2))
            rows.append({"what": f"{name}, batch {batch}", "tokens_per_second": batch * length / seconds, "share_of_peak": of_peak})
    return rows


def wavefront(options: Options) -> list[dict]:
    """M = 50 rows, T = 60 tokens, batch 1: cell by cell (the paper's loop), row by row, and by wavefronts."""
    rows = []
    for hidden in (128, 256):
        rnn = RNN(WIDTH, hidden=hidden, layers=1)
        model = model_of(rnn).eval()
        schedule = model.schedule
        matrix = full_sequence(60, schedule.ladder(50))
        x = start(schedule, matrix, (1, WIDTH))
        denoise = model.denoiser()

        @torch.no_grad()
        def cells(model: DiffusionForcing = model, x: Tensor = x, matrix: Tensor = matrix, rnn: RNN = rnn) -> Tensor:
            now = x.clone()
            cond = x.new_zeros(1, 1, 0)
            for k, k_next in itertools.pairwise(matrix):
                state = None
                for t in range(now.shape[1]):
                    token = now[:, t : t + 1]
                    level = k[t : t + 1].expand(1, 1)
                    out, state = rnn(token, level, cond, state)
                    alpha, sigma = (expand(amplitude(level), token) for amplitude in (model.schedule.alpha, model.schedule.sigma))
                    pred = model.prediction_from(out, token, alpha, sigma)
                    now[:, t : t + 1] = ddim_step(model.schedule, token, pred, k[t : t + 1], k_next[t : t + 1])
            return now

        by_row = best(lambda d=denoise, s=schedule, x=x, m=matrix: sample(lambda y, k: d(y, k), s, x, m), options.repeats)
        by_wave = best(lambda d=denoise, s=schedule, x=x, m=matrix: sample(d, s, x, m), options.repeats)
        by_cell = best(cells, 2)
        torch.testing.assert_close(cells(), sample(denoise, schedule, x, matrix), rtol=1e-3, atol=1e-3)
        rows.append({"what": f"GRU, {hidden} wide", "loop_over_wavefront": by_cell / by_wave, "rows_over_wavefront": by_row / by_wave})
    return rows


def cache(options: Options) -> list[dict]:
    """64 tokens one after the other, 20 steps each: KV cache against reading the whole past again at every step."""
    model = model_of(Transformer(WIDTH, hidden=128, layers=4, heads=4)).eval()
    schedule, length = model.schedule, 64
    one = full_sequence(1, schedule.ladder(20))

    def cached() -> None:
        for _ in stream(model, one, length):
            pass

    @torch.no_grad()
    def recomputed() -> None:
        past = torch.zeros(1, 0, WIDTH)
        for _ in range(length):
            x = start(schedule, one, (1, WIDTH))
            for k, k_next in itertools.pairwise(one):
                levels = torch.cat([torch.zeros(past.shape[1], dtype=torch.long), k])[None]
                pred = model.predict(torch.cat([past, x], dim=1), levels)
                x = ddim_step(schedule, x, type(pred)(pred.x0[:, -1:], pred.eps[:, -1:]), k, k_next)
            past = torch.cat([past, x], dim=1)

    with_it, without = best(cached, options.repeats), best(recomputed, 2)
    return [{"what": "transformer, 128 wide, 64 tokens", "recomputation_over_cache": without / with_it}]


def rollouts(options: Options) -> list[dict]:
    """Seconds a token in the first and the last hundred tokens of a roll-out of 10,000: must stay flat."""
    rows = []
    for name, backbone in (
        ("GRU", RNN(WIDTH, hidden=128)),
        ("transformer, window 32", Transformer(WIDTH, hidden=128, layers=4, window=32)),
    ):
        model = model_of(backbone).eval()
        matrix = pyramid(10, model.schedule.ladder(5))
        times = [time.perf_counter()]
        times += [time.perf_counter() for _ in stream(model, matrix, 10_000)]
        spent = torch.tensor([after - before for before, after in itertools.pairwise(times)])
        # Windows of ten tokens; the first is a warm-up.
        early, late = spent[1:11].median() / 10, spent[-10:].median() / 10
        rows.append({"what": name, "milliseconds_at_100": 1e3 * float(early), "late_over_early": float(late / early)})
    return rows


def video(options: Options) -> list[dict]:
    """Frames a second of the recipe `labyrinth` (64 px, four frames a token), and what 2,000 of them cost in memory.

    plain over prefilled: how much faster a token is denoised if its context is prefilled once instead of read at each step; compiled over
    prefilled: and how much faster than that with the decode step compiled.
    """
    rows = []
    for batch in (1, 8):
        codec = Patches.fit(torch.rand(8, 8, 64, 64, 3))
        model = model_of(recipes.build("labyrinth").model.backbone.build((64, 8, 8), 8, 1000, codec)).eval()
        ratio = _plain_over_prefilled(model, batch, options.repeats)
        for steps, tokens in ((20, 500 if batch == 1 else 60), (10, 60)):
            matrix = full_sequence(1, model.schedule.ladder(steps))
            times, peaks = [time.perf_counter()], []
            for _ in stream(model, matrix, tokens, None, torch.zeros(batch, tokens, 8), past=CONTEXT):
                times.append(time.perf_counter())
                peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)  # MB
            spent = torch.tensor([after - before for before, after in itertools.pairwise(times)])
            early, late = spent[5:25].median(), spent[-20:].median()
            rows.append({"what": f"labyrinth, batch {batch}, {steps} steps", "frames_per_second": 4 * batch / float(spent.median()),
                         "late_over_early": float(late / early), "megabytes_grown": peaks[-1] - peaks[20],
                         "plain_over_prefilled": ratio})  # fmt: skip
        model.backbone.compile_decode_step()  # type: ignore[operator]
        matrix = full_sequence(1, model.schedule.ladder(20))
        times = []
        for _ in stream(model, matrix, 60, None, torch.zeros(batch, 60, 8), past=CONTEXT):
            times.append(time.perf_counter())
        spent = torch.tensor([after - before for before, after in itertools.pairwise(times)])[5:]
        fast = 4 * batch / float(spent.median())
        rows.append({"what": f"labyrinth, batch {batch}, 20 steps, compiled", "frames_per_second": fast,
                     "compiled_over_prefilled": fast / rows[-2]["frames_per_second"]})  # fmt: skip
    return rows


@torch.no_grad()
def _plain_over_prefilled(model: DiffusionForcing, batch: int, repeats: int) -> float:
    x, k, cond = torch.randn(batch, 1, 64, 8, 8), torch.full((batch, 1), 500), torch.zeros(batch, 1, 8)
    state = model.absorb(x.expand(-1, 10, -1, -1, -1), cond.expand(-1, 10, -1))
    prefilled = model.backbone.prefill(x, state, cond)  # type: ignore[operator, union-attr]
    plain, faster = (best(lambda s=s: [model.predict(x, k, cond, s) for _ in range(5)], repeats) for s in (state, prefilled))
    return plain / faster


def imitation(options: Options) -> list[dict]:
    """Milliseconds in which the recipe `swap` decides on a chunk of 15 actions, for one robot and for ten."""
    shapes = {"actions": (15, 7), "state": (64,)}
    codec = ModalityTokens(shapes, {"actions": 48, "state": 64})
    model = recipes.build("swap").model.build((64,), codec.cond_width, codec)
    randomised(model.backbone)  # type: ignore[arg-type]
    rows = []
    for robots, steps in itertools.product((1, 10), (5, 10, 20)):
        agent = ImitationAgent(model, Sampler(steps=steps))
        agent.reset(robots)
        seconds = best(lambda a=agent, n=robots: a.act({"state": np.zeros((n, 64), np.float32)}), 2 * options.repeats)
        rows.append({"what": f"swap, {robots} robots, {steps} steps", "milliseconds_a_chunk": 1e3 * seconds})
    return rows


def imports(options: Options) -> list[dict]:
    """Seconds to import torch, the package after it, and to answer commands that compute nothing, each in a new process."""
    code = "from time import perf_counter as now; a = now(); import torch; b = now(); import diffusion_forcing; print(b - a, now() - b)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(options.repeats + 1)]
    torch_alone, ours = (min(times) for times in zip(*(map(float, done.stdout.split()) for done in runs[1:]), strict=True))
    rows = [{"what": "import torch", "seconds": torch_alone, "over torch": 1.0}]
    rows.append({"what": "import diffusion_forcing, after it", "seconds": ours, "over torch": ours / torch_alone})
    for words in (["--help"], ["list"], ["train", "composition", "--help"]):
        command = [sys.executable, "-m", "diffusion_forcing", *words]
        seconds = best(lambda command=command: subprocess.run(command, capture_output=True, check=True), options.repeats)
        rows.append({"what": f"dforce {' '.join(words)}", "seconds": seconds, "over torch": seconds / torch_alone})
    return rows


def main() -> None:
    options = tyro.cli(Options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    console = Console()
    console.print(f"matrix products reach {peak() / 1e9:.0f} GFLOP/s on {torch.get_num_threads()} threads, torch {torch.__version__}")
    results: dict[str, list[dict]] = {}
    for section in (imports, training, sampling, wavefront, cache, rollouts, video, imitation):
        if options.only not in section.__name__:
            continue
        results[section.__name__] = rows = section(options)
        table = Table(
            *(name.replace("_", " ") for name in rows[0]), title=section.__name__, title_justify="left", box=None, padding=(0, 3, 0, 0)
        )
        for row in rows:
            table.add_row(*(_formatted(name, value) for name, value in row.items()))
        console.print(table, "")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def _formatted(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    assert isinstance(value, float)
    return f"{value:.0%}" if name.startswith("share") else f"{value:,.0f}" if name.startswith("tokens") else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
