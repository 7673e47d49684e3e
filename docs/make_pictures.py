"""Draw the figures of the concept pages: `python docs/make_pictures.py` writes docs/images/*.png in half a minute.

Another folder can be named: `python docs/make_pictures.py FOLDER`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from matplotlib.ticker import MaxNLocator
from PIL import Image
from torch import Generator, Tensor

from diffusion_forcing import (
    DiffusionForcing,
    MonteCarlo,
    NoiseSchedule,
    Prediction,
    autoregressive,
    cosine,
    filter,
    full_sequence,
    guide,
    linear,
    pin,
    pyramid,
    sample,
    smooth,
    staggered,
    start,
    trapezoid,
)
from diffusion_forcing.engine.plotting import COLOURS, draw_matrix, figure
from diffusion_forcing.parameterization import with_x0
from diffusion_forcing.planning import PlanningAgent
from diffusion_forcing.planning.figures import draw_denoising
from diffusion_forcing.planning.task import denoising_stages

IMAGES = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "images"
LARGEST = 60_000  # bytes
DRAWN = (
    "full_sequence", "autoregressive", "pyramid", "trapezoid", "pinned", "keyframes", "guidance", "gamble", "bias", "infill", "plans",
)  # fmt: skip


class Oracle:
    """Exact denoiser of Gaussian sequences x (b, t, 1) with covariance cov (t, t): E[x | noisy tokens]."""

    def __init__(self, cov: Tensor, schedule: NoiseSchedule, causal: bool = False) -> None:
        self.cov, self.schedule, self.causal = cov.double(), schedule, causal

    def __call__(self, x: Tensor, k: Tensor) -> Prediction:
        level = k[0]  # a sampler gives every sequence the same row of levels
        alpha, sigma = self.schedule.alpha(level).double(), self.schedule.sigma(level).double()
        cross, noisy = self.cov * alpha, alpha[:, None] * self.cov * alpha + torch.diag(sigma**2)
        gain = torch.zeros_like(self.cov)
        for i in range(len(level)):
            n = i + 1 if self.causal else len(level)
            gain[i, :n] = torch.linalg.solve(noisy[:n, :n], cross[i, :n])
        x0 = torch.einsum("ij,bjd->bid", gain.to(x.dtype), x)
        return with_x0(x0, x, self.schedule.alpha(k)[..., None], self.schedule.sigma(k)[..., None])


def walk(tokens: int) -> Tensor:
    """Covariance of a random walk of variance 1 at its end, (t, t)."""
    i = torch.arange(1.0, tokens + 1)
    return torch.minimum(i[:, None], i) / tokens


def matrices() -> None:
    """A figure for each schedule matrix of concepts/matrices.md."""
    horizon, ladder = 12, NoiseSchedule(cosine(1000)).ladder(20)
    delay = torch.full((horizon,), 20)
    delay[::4] = 0
    pictures = {
        "full_sequence": full_sequence(horizon, ladder),
        "autoregressive": autoregressive(horizon, ladder),
        "pyramid": pyramid(horizon, ladder, 2),
        "trapezoid": trapezoid(horizon, ladder, 4),
        "pinned": pin(pin(pin(pyramid(horizon, ladder, 2), [0, 1]), 11), 6, level=1000),
        "keyframes": staggered(delay, ladder),
    }
    for name, matrix in pictures.items():
        file = IMAGES / f"{name}.png"
        with figure(file, 3.8, 3.4) as fig:
            ax = fig.subplots()
            draw_matrix(matrix, file, name.replace("_", " "), ax)
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            ax.yaxis.set_major_locator(MaxNLocator(integer=True))


def guidance() -> None:
    """Random walks drawn to a goal, and the mean of their last token against the scale."""
    t, schedule = 16, NoiseSchedule(cosine(1000))
    matrix = full_sequence(t, schedule.ladder(50))
    oracle = Oracle(walk(t), schedule)

    def reward(x: Tensor) -> Tensor:
        return x[:, -1, 0]

    x = start(schedule, matrix, (200, 1), generator=Generator().manual_seed(0))
    x = torch.cat([x, -x])  # so that unguided samples have mean 0 exactly
    scales = [0.0, 0.5, 1.0, 1.5, 2.0]
    ends = {form: [sample(guide(oracle, schedule, reward, s, form=form), schedule, x, matrix) for s in scales] for form in ("eps", "step")}
    with figure(IMAGES / "guidance.png", 8.0, 3.2) as fig:
        left, right = fig.subplots(1, 2)
        for paths, colour, label in ((ends["eps"][0], COLOURS[0], "scale 0"), (ends["eps"][-1], COLOURS[1], "scale 2")):
            for i, path in enumerate(paths[:16, :, 0]):
                left.plot(range(1, t + 1), path, color=colour, lw=0.8, alpha=0.6, label=label if i == 0 else None)
        left.set(xlabel="token", ylabel="x", title="random walks, form eps")
        left.xaxis.set_major_locator(MaxNLocator(integer=True))
        left.legend(frameon=False, loc="upper left")
        right.plot(scales, scales, color="0.2", ls=":", lw=2, zorder=3, label="exact: p(x) exp(scale * reward)")
        for form, colour in (("eps", COLOURS[1]), ("step", COLOURS[2])):
            right.plot(scales, [float(reward(path).mean()) for path in ends[form]], marker="o", color=colour, label=f"form {form}")
        right.set(xlabel="scale", ylabel="mean of the last token", title="reward against scale")
        right.legend(frameon=False)


def gamble() -> None:
    """Share of risky choices against the number of futures, for a gamble whose exact denoiser, causal, is a formula."""
    schedule = NoiseSchedule(linear(1000))
    means = torch.tensor([[-1.0, 0.3], [1.0, 1.5], [1.0, -1.5]])  # (choice, pay): safe; risky, won; risky, lost
    chances, std, scale = torch.tensor([0.5, 0.2, 0.3]), 0.1, 3.0

    def denoise(x: Tensor, k: Tensor) -> Prediction:
        alpha, sigma = schedule.alpha(k)[:, None], schedule.sigma(k)[:, None]
        variance = (std * alpha) ** 2 + sigma**2
        error = x.mT - alpha * means
        which = ((-0.5 * error**2 / variance).cumsum(-1) + chances.log()[:, None]).softmax(1)
        x0 = (which * (means + alpha * std**2 / variance * error)).sum(1)[..., None]
        return with_x0(x0, x, schedule.alpha(k)[..., None], schedule.sigma(k)[..., None])

    def risky(plan: int | MonteCarlo, slope: int) -> float:
        generator = Generator().manual_seed(0)
        matrix = pyramid(2, schedule.ladder(20), slope)
        x = start(schedule, matrix, (400, 1), generator=generator)
        guided = guide(denoise, schedule, lambda clean: clean[:, 1, 0], scale, draws=plan, form="eps", generator=generator)
        return float((sample(guided, schedule, x, matrix, eta=1.0, generator=generator)[:, 0] > 0).float().mean())

    draws = [2, 4, 8, 16, 32]
    choice = torch.tensor([True, False])
    curves = {
        "resample, full sequence": [risky(n, 0) for n in draws],
        "resample, pyramid of slope 1": [risky(n, 1) for n in draws],
        "fresh, pathwise": [risky(MonteCarlo(n, "fresh", chosen=choice), 0) for n in draws],
        "fresh, covariance": [risky(MonteCarlo(n, "fresh", estimator="covariance", chosen=choice), 0) for n in draws],
    }
    safe = float(torch.tensor(0.3 * scale).exp())
    averse = float(torch.tensor(-0.3 * scale).exp())  # risky pays -0.3 on average
    with figure(IMAGES / "gamble.png", 6.4, 3.6) as fig:
        ax = fig.subplots()
        ax.plot(1, risky(1, 0), marker="s", color="0.2", ls="", label="one future (joint guidance)")
        for (label, shares), colour in zip(curves.items(), (COLOURS[0], COLOURS[2], COLOURS[1], COLOURS[3]), strict=True):
            ax.plot(draws, shares, marker="o", color=colour, label=label)
        ax.axhline(averse / (safe + averse), color="0.2", ls=":", lw=2, label="exact: p(choice) exp(scale * E[pay])")
        ax.set_xscale("log", base=2)
        ax.set_xticks([1, *draws], [str(n) for n in (1, *draws)])
        ax.set(xlabel="futures", ylabel="share of risky choices", ylim=(0, 1), title="a gamble that loses on average")
        ax.legend(frameon=False, fontsize=8)


def bias() -> None:
    """Relative error of the covariance of samples against the slope of the pyramid."""
    t, steps, schedule = 6, 100, NoiseSchedule(cosine(1000))
    cov, ladder = walk(t), schedule.ladder(steps)
    slopes = [0, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    with figure(IMAGES / "bias.png", 5.2, 3.4) as fig:
        ax = fig.subplots()
        for causal, colour in ((True, COLOURS[1]), (False, COLOURS[0])):
            errors = [covariance_error(Oracle(cov, schedule, causal), schedule, pyramid(t, ladder, slope), cov) for slope in slopes]
            ax.plot(slopes, errors, marker="o", ms=4, color=colour, label="causal" if causal else "bidirectional")
        ax.set(xlabel=f"slope of the pyramid, in rows (of {steps} steps)", ylabel="relative error of the covariance", ylim=(0, None))
        ax.legend(frameon=False)


def covariance_error(oracle: Oracle, schedule: NoiseSchedule, matrix: Tensor, cov: Tensor) -> float:
    """Relative error (Frobenius) of the covariance of samples. Sampling is linear here: unit vectors in, its matrix out."""
    columns = sample(oracle, schedule, torch.eye(len(cov))[..., None], matrix)[..., 0]
    return float((columns.T @ columns - cov).norm() / cov.norm())


class Network(torch.nn.Module):
    """The oracle as a backbone, with x0-prediction."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__()
        self.oracle = oracle
        self.config = {"width": 1}

    def forward(self, x: Tensor, k: Tensor, cond: Tensor, state: None = None) -> tuple[Tensor, None]:
        return self.oracle(x, k).x0, None


def observations() -> None:
    """A random walk of which some is known, some measured and some missing: samples, and the exact band."""
    t, schedule = 40, NoiseSchedule(cosine(1000))
    cov, generator = walk(t).double(), Generator().manual_seed(3)
    truth = (torch.linalg.cholesky(cov) @ torch.randn(t, generator=generator).double()).float()
    std = torch.full((t,), torch.inf)
    std[[0, 1, 2, 3]], std[[8, 10, 12, 14, 16]], std[[30, 31]] = 0.0, 0.15, 0.0
    measured = truth + std.nan_to_num(posinf=0.0) * torch.randn(t, generator=generator)
    model = DiffusionForcing(Network(Oracle(cov, schedule)), schedule, parameterization="x0")
    known = {"smooth": smooth, "filter": filter}
    with figure(IMAGES / "infill.png", 9, 2.9) as fig:
        for ax, (name, function) in zip(fig.subplots(1, 2, sharey=True), known.items(), strict=True):
            samples = function(model, measured[None, :, None], std, samples=400, generator=Generator().manual_seed(0))[:, 0, :, 0]
            spans = [(i + 1 if name == "filter" else t) for i in range(t)]
            exact = torch.tensor([posterior(cov, measured, std, i, span) for i, span in enumerate(spans)])
            ax.fill_between(
                range(t), exact[:, 0] - 1.645 * exact[:, 1], exact[:, 0] + 1.645 * exact[:, 1], color="0.88", label="exact, 90 %"
            )
            if name == "smooth":
                ax.plot(samples[:8].T, color=COLOURS[0], lw=0.6)
            for level, style in ((0.05, "--"), (0.5, "-"), (0.95, "--")):
                ax.plot(
                    samples.quantile(level, dim=0),
                    style,
                    color=COLOURS[0],
                    lw=1.2,
                    label="5, 50 and 95 % of samples" if level == 0.5 else None,
                )
            ax.plot(truth, ":", color="black", lw=1, label="truth")
            seen = torch.isfinite(std).nonzero()[:, 0]
            ax.errorbar(seen, measured[seen], 1.645 * std[seen], fmt="o", ms=3, color=COLOURS[1], label="known, or measured with error")
            ax.set(title=f"{name}(model, values, std)", xlabel="token")
        ax.legend(frameon=False, fontsize=6.5, loc="upper left")


def posterior(cov: Tensor, values: Tensor, std: Tensor, token: int, span: int) -> tuple[float, float]:
    """Mean and standard deviation of a token given the first `span` values with their errors."""
    seen = torch.isfinite(std[:span]).nonzero()[:, 0]
    gain = torch.linalg.solve(cov[seen][:, seen] + torch.diag(std[seen].double() ** 2), cov[seen, token])
    return float(gain @ values[seen].double()), float((cov[token, token] - gain @ cov[seen, token]).clamp(min=0).sqrt())


def plans() -> None:
    """Plans of two pretrained models while they are denoised: whole, and along a pyramid by a causal network."""
    rows = []
    for name, run in (("bidirectional, full sequence", "maze2d-umaze"), ("causal GRU, pyramid", "maze2d-umaze-gru")):
        agent = PlanningAgent.from_pretrained(run)
        rows.append((name, denoising_stages(agent, agent.maze.farthest_cell, 16, tokens=16)))
    maze = agent.maze
    title = "16 plans from one start (near tokens dark, far ones light) while they are denoised"
    draw_denoising(maze, rows, maze.farthest_cell, maze.goal, IMAGES / "plans.png", agent.frame_stack, title)


if __name__ == "__main__":
    matrices()
    guidance()
    gamble()
    bias()
    observations()
    plans()
    for file in sorted(IMAGES / f"{name}.png" for name in DRAWN):
        if os.path.getsize(file) > LARGEST:
            Image.open(file).convert("RGB").quantize(64).save(file, optimize=True)
        size = os.path.getsize(file)
        print(f"{file.name:20} {size / 1000:5.1f} kB")
        if size > LARGEST:
            raise SystemExit(f"{file} has {size:,} bytes; figures stay under {LARGEST:,}")
