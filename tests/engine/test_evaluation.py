"""What `dforce eval` and `dforce sample` do for tasks that say nothing themselves: for any shape of token, codec, network and condition."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from oracles import randomised, seeded

from diffusion_forcing import RNN, DiffusionForcing, NoiseSchedule, Transformer, cosine
from diffusion_forcing.backbones import ConvRNN
from diffusion_forcing.codecs import Chain, Normalize, Stack
from diffusion_forcing.engine import evaluation
from diffusion_forcing.engine.evaluation import default_sampler, measure_denoising, read_held_out, sample_held_out
from diffusion_forcing.engine.task import Task, TaskData
from diffusion_forcing.windows import Windows

K = 50


@dataclass(frozen=True)
class Shapes(Task):
    """Random walks of tokens of a shape, with conditions and padding, or without."""

    event: tuple[int, ...] = (3,)
    cond: int = 0
    codec: Chain | Normalize | None = None
    tokens: int = 6

    def data(self):
        sizes = [self.tokens, 3, self.tokens, 5] if self.tokens > 4 else [self.tokens] * 4
        walks = [torch.randn(n, *self.event, generator=seeded(i)).cumsum(0) for i, n in enumerate(sizes)]
        conditions = [torch.randn(n, self.cond, generator=seeded(9)) for n in sizes]
        windows = Windows(walks, self.tokens, conditions=conditions)
        return TaskData(windows, windows, self.codec)


def silent(*_):
    pass


def rnn(width=3, cond=0, **options):
    return DiffusionForcing(randomised(RNN(width, cond, hidden=8, levels=K)), NoiseSchedule(cosine(K)), **options)


CASES = {
    "vectors": (Shapes(), rnn),
    "conditions": (Shapes(cond=2), lambda: rnn(3, 2)),
    "one number": (Shapes((1,)), lambda: rnn(1)),
    "one token": (Shapes(tokens=1), rnn),
    "frames in a token": (Shapes((6,)), lambda: rnn(6, codec=Chain(Normalize(torch.zeros(3), torch.ones(3)), Stack(2)))),
    "not causal": (Shapes(), lambda: DiffusionForcing(
        randomised(Transformer(3, hidden=8, heads=2, layers=1, causal=False, levels=K)), NoiseSchedule(cosine(K)), parameterization="x0")),
    "pictures": (Shapes((3, 4, 6)), lambda: DiffusionForcing(
        randomised(ConvRNN((3, 4, 6), latent=2, channels=2, scales=(1,), blocks=1, levels=K), scale=0.02), NoiseSchedule(cosine(K)))),
    "grids": (Shapes((2, 4, 4)), lambda: DiffusionForcing(
        randomised(ConvRNN((2, 4, 4), latent=2, channels=2, scales=(1,), blocks=1, levels=K), scale=0.02), NoiseSchedule(cosine(K)))),
}  # fmt: skip


DRAWN = ("vectors", "pictures", "grids")  # the pictures of the others are of the same kinds, and take the time


@pytest.mark.parametrize("name", CASES)
def test_any_model_is_measured_and_sampled(name, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "diffusion_forcing.engine.task.default_sampler", lambda causal: replace(default_sampler(causal), steps=4, slope=2.0)
    )
    if name not in DRAWN:
        for draw in ("draw_denoising", "draw_samples"):
            monkeypatch.setattr(evaluation, draw, lambda *arguments: arguments[-1].touch())
    task, build = CASES[name]
    model, calls = build(), []
    measured = task.evaluate(model, tmp_path, samples=4, seed=0, progress=lambda *call: calls.append(call))
    assert all(np.isfinite(list(measured.metrics.values())))
    assert ("after_a_clean_past/50" in measured.metrics) == (model.causal and task.tokens > 1)
    assert {"denoising", "samples"} <= {what for what, *_ in calls}
    for figure in measured.figures:
        assert (tmp_path / figure).stat().st_size > (1000 if name in DRAWN else -1)
    monkeypatch.setattr(evaluation, "draw_samples", lambda *arguments: arguments[-1].touch())
    arrays, picture = task.sample(model, tmp_path, samples=3, seed=0, progress=silent)
    assert picture.exists()
    with np.load(arrays) as saved:
        assert saved["samples"].shape == saved["held_out"].shape
        assert np.isfinite(saved["samples"]).all()
        assert saved["mask"].shape == (3, task.tokens)
        first = 1 if task.tokens > 1 else 0
        np.testing.assert_allclose(saved["samples"][:, :first], saved["held_out"][:, :first], atol=1e-5)


def test_the_error_is_that_of_the_best_linear_guess_where_the_model_is_one():
    """White tokens have no past to learn from: a network that outputs the linear estimate has its error, at every level."""

    class Linear(torch.nn.Module):
        def __call__(self, x, k, cond, state=None):
            alpha, sigma = (part[..., None] for part in (schedule.alpha(k), schedule.sigma(k)))
            return alpha * 4 / (alpha**2 * 4 + sigma**2) * x, None

    schedule = NoiseSchedule(cosine(K))
    held_out = read_held_out(Windows(2 * torch.randn(400, 8, 2, generator=seeded(0)), 8), 400)
    denoised = measure_denoising(DiffusionForcing(Linear(), schedule, parameterization="x0"), held_out, 0, silent)
    torch.testing.assert_close(denoised.error.mean(1), denoised.linear, rtol=0.05, atol=0.003)
    assert denoised.linear[-1] == pytest.approx(1, abs=1e-3)
    assert (denoised.linear.diff() > 0).all()


def test_the_past_shows_where_there_is_something_to_learn_from_it():
    """Constant sequences: an average over the past, noise and all, beats the guess from each token alone."""

    class Average(torch.nn.Module):
        causal = True

        def __call__(self, x, k, cond, state=None):
            total, count = (x.new_zeros(len(x), 1, 1),) * 2 if state is None else state
            weight = 1 / (0.01 + (schedule.sigma(k) / schedule.alpha(k).clamp(min=1e-3)) ** 2)[..., None]
            total = total + (weight * x / schedule.alpha(k).clamp(min=1e-3)[..., None]).cumsum(1)
            count = count + weight.cumsum(1)
            return total / count, (total[:, -1:], count[:, -1:])

    schedule = NoiseSchedule(cosine(K))
    held_out = read_held_out(Windows(torch.randn(64, 1, 1, generator=seeded(0)).expand(64, 9, 1), 9), 64)
    denoised = measure_denoising(DiffusionForcing(Average(), schedule, parameterization="x0"), held_out, 0, silent)
    assert (denoised.error[4, 1:] < denoised.error[4, 0]).all()
    assert denoised.clean_past[:, 1:].max() < 0.05
    assert (denoised.clean_past[:, 1:].mean(1) < denoised.linear).all()


@pytest.mark.parametrize("name", ["vectors", "not causal"])
def test_padding_counts_nowhere(name):
    """What stands beyond the end of a sequence changes no error: it is noise to a network that reads it."""
    held_out = read_held_out(Shapes().data().valid, 4)
    model, results = CASES[name][1](), []
    for value in (0.0, 20.0):
        x = torch.where(held_out.mask[..., None], held_out.x, value)
        results.append(measure_denoising(model, held_out._replace(x=x), 0, silent))
    torch.testing.assert_close(results[0].error, results[1].error, rtol=1e-3, atol=0)
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-3)
    if model.causal:
        assert torch.equal(results[0].clean_past, results[1].clean_past)


def test_the_same_seed_gives_the_same_samples_and_measures():
    held_out, model = read_held_out(Shapes().data().valid, 4), rnn()
    one, same, other = (sample_held_out(model, held_out, default_sampler(True), 2, seed, silent) for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert torch.equal(one[:, :2], held_out.x[:, :2])
    assert not torch.equal(one[:, 2:], other[:, 2:])
    cold = sample_held_out(model, held_out, replace(default_sampler(False), temperature=0.0), 0, 0, silent)
    assert torch.equal(cold, sample_held_out(model, held_out, replace(default_sampler(False), temperature=0.0), 0, 1, silent))
    with pytest.raises(ValueError, match="0 to 5 of its 6; got context=6"):
        sample_held_out(model, held_out, default_sampler(True), 6, 0, silent)


def test_windows_are_spread_evenly_and_no_more_than_there_are():
    source = Windows(torch.arange(12.0).view(12, 1, 1), 1)
    assert read_held_out(source, 100).x.flatten().tolist() == list(range(12))
    assert read_held_out(source, 3).x.flatten().tolist() == [0, 5, 11]
