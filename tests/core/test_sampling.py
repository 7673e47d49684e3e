"""Sampling along a schedule matrix, and roll-outs of window after window."""

import warnings
from itertools import pairwise

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler
from oracles import Gaussian, ar1, believing, mixed, oracle, randomised, seeded

from diffusion_forcing import (
    RNN,
    Context,
    DiffusionForcing,
    NoiseSchedule,
    Prediction,
    Sampler,
    Transformer,
    autoregressive,
    cosine,
    ddim_step,
    full_sequence,
    linear,
    pin,
    pyramid,
    rolling,
    rollout,
    sample,
    sigmoid,
    start,
    start_at,
    stream,
    trapezoid,
)
from diffusion_forcing.parameterization import to_prediction
from diffusion_forcing.schedule import expand
from diffusion_forcing.solver import amplitudes, solver_step

SCHEDULE = NoiseSchedule(cosine(1000))
MATRICES = {
    "full_sequence": full_sequence,
    "autoregressive": autoregressive,
    "pyramid": pyramid,
    "flat pyramid": lambda horizon, ladder: pyramid(horizon, ladder, 0.4),
    "steep pyramid": lambda horizon, ladder: pyramid(horizon, ladder, 0.6 * (len(ladder) - 1)),
    "trapezoid": trapezoid,
}
every_matrix = pytest.mark.parametrize("build", MATRICES.values(), ids=MATRICES)


# The oracle: what knows the data ends at the data.


@every_matrix
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("hold", ["keep", "resample"])
@pytest.mark.parametrize("event", [(3,), (2, 4, 4)])
def test_an_oracle_is_recovered_exactly(build, eta, hold, event):
    data = torch.randn(2, 5, *event, generator=seeded(0))
    matrix = build(5, SCHEDULE.ladder(7))
    x = start(SCHEDULE, matrix, (2, *event), generator=seeded(1))
    out = sample(oracle(SCHEDULE, data), SCHEDULE, x, matrix, eta=eta, hold=hold, generator=seeded(2))
    assert torch.equal(out, data)


@every_matrix
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("hold", ["keep", "resample"])
def test_an_oracle_is_recovered_exactly_around_pinned_tokens(build, eta, hold):
    """Known tokens keep their value, absent ones stay noise, observations held at their level stay as observed, the rest is recovered."""
    data = torch.randn(2, 6, 3, generator=seeded(0))
    matrix = build(6, SCHEDULE.ladder(7))
    for token, level in ((0, 0), (2, 1000), (4, 300)):
        matrix = pin(matrix, token, level)
    x = start(SCHEDULE, matrix, (2, 3), data, seeded(1))
    out = sample(oracle(SCHEDULE, data), SCHEDULE, x, matrix, eta=eta, hold=hold, generator=seeded(2))
    assert torch.equal(out[:, [0, 1, 3, 5]], data[:, [0, 1, 3, 5]])
    assert torch.equal(out[:, 2], x[:, 2])
    assert torch.equal(out[:, 4], x[:, 4])


def test_a_resampled_token_is_noised_anew_around_what_is_predicted():
    """A token that waits on its way down; the other's step is one in which it is held."""
    data = torch.full((20_000, 2, 1), 3.0)
    matrix = torch.tensor([[1000, 1000], [400, 1000], [400, 0]])
    x = start(SCHEDULE, matrix, (20_000, 1), generator=seeded(0))
    out = sample(oracle(SCHEDULE, data), SCHEDULE, x, matrix, hold="resample", generator=seeded(1))[:, 0]
    k = torch.tensor(400)
    assert out.mean().item() == pytest.approx(3 * SCHEDULE.alpha(k).item(), abs=0.03)
    assert out.std().item() == pytest.approx(SCHEDULE.sigma(k).item(), abs=0.03)
    assert abs(torch.corrcoef(torch.stack([out[:, 0], x[:, 0, 0]]))[0, 1]) < 0.05


@pytest.mark.parametrize("eta", [0.0, 1.0])
@pytest.mark.parametrize("curve", [linear, cosine, sigmoid])
def test_a_step_leads_to_the_right_level(eta, curve):
    """An oracle's step from k to k_next is distributed as the data noised to k_next."""
    schedule = NoiseSchedule(curve(100))
    data = torch.full((50_000, 1, 1), 2.0)
    for k, k_next in ((100, 60), (60, 59), (60, 10), (10, 0)):
        now, then = torch.tensor([k]), torch.tensor([k_next])
        x = schedule.add_noise(data, now, torch.randn(data.shape, generator=seeded(0)))
        pred = believing(schedule, data, x, now.expand(50_000, 1))
        stepped = ddim_step(schedule, x, pred, now, then, eta=eta, generator=seeded(1))
        assert stepped.mean().item() == pytest.approx(2 * schedule.alpha(then).item(), abs=0.02)
        assert stepped.std().item() == pytest.approx(schedule.sigma(then).item(), abs=0.02)


def test_eta_0_draws_nothing():
    generator = seeded(0)
    before = generator.get_state()
    matrix = pyramid(3, SCHEDULE.ladder(4))
    data = torch.zeros(1, 3, 2)
    sample(oracle(SCHEDULE, data), SCHEDULE, torch.randn(1, 3, 2), matrix, generator=generator)
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize(("eta", "hold"), [(1.0, "keep"), (0.0, "resample")])
def test_a_sample_is_a_function_of_its_generator(eta, hold):
    matrix = pyramid(3, SCHEDULE.ladder(4), 2)
    matrix[2, 0] = matrix[1, 0]  # a row in which it waits
    x = torch.randn(2, 3, 1, generator=seeded(0))
    denoise = Gaussian(SCHEDULE, ar1(3, 0.8)).denoiser()
    before = torch.get_rng_state()
    first, again, other = (sample(denoise, SCHEDULE, x, matrix, eta=eta, hold=hold, generator=seeded(s)) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# The Gaussian: the best denoiser is a formula, and so is the distribution of its samples.


def response(process, matrix, causal, known=None):
    """(t, t) R and (t,) m: deterministic sampling takes white noise u to m + R u, with `known` (t,) at the first row's pinned tokens.

    The map is affine for a Gaussian, so sampling the unit vectors measures it without a single random number.
    """
    t = matrix.shape[1]
    known = torch.zeros(t, dtype=torch.float64) if known is None else known
    given = matrix[0] < process.schedule.levels
    units = torch.cat([torch.zeros(1, t, dtype=torch.float64), torch.diag((~given).double())])
    x = units + torch.where(given, known, torch.zeros_like(known))
    out = sample(process.denoiser(causal), process.schedule, x[..., None], matrix)[..., 0]
    return (out[1:] - out[0]).T, out[0]


def error(process, matrix, causal):
    """Largest error of the covariance of deterministic samples."""
    root, _ = response(process, matrix, causal)
    return (root @ root.T - process.covariance).abs().max().item()


PROCESSES = {"ar1": ar1(4, 0.9), "unstructured": mixed(4)}
every_process = pytest.mark.parametrize("covariance", PROCESSES.values(), ids=PROCESSES)


@every_process
@every_matrix
@pytest.mark.parametrize("curve", [cosine, linear])
def test_seeing_everything_every_schedule_samples_the_right_covariance(covariance, build, curve):
    """Up to discretisation, which halves when the steps double: measured 0.015 to 0.03 at 200 steps."""
    process = Gaussian(NoiseSchedule(curve(1000)), covariance)
    coarse, fine = (error(process, build(4, process.schedule.ladder(steps)), causal=False) for steps in (100, 200))
    assert fine < 0.04
    assert fine < 0.6 * coarse


@every_process
def test_a_causal_model_is_exact_token_by_token(covariance):
    process = Gaussian(SCHEDULE, covariance)
    coarse, fine = (error(process, autoregressive(4, SCHEDULE.ladder(steps)), causal=True) for steps in (100, 200))
    assert fine < 0.04
    assert fine < 0.6 * coarse


def test_a_causal_model_is_biased_over_full_sequences_and_less_so_down_a_steeper_pyramid():
    """Measured for an AR(1) process of correlation 0.9 over 4 tokens: 0.44 at slope 0, 0.32, 0.17, 0.06, and 0.015 at slope `steps`."""
    process = Gaussian(SCHEDULE, ar1(4, 0.9))
    ladder = SCHEDULE.ladder(200)
    bias = [error(process, pyramid(4, ladder, slope), causal=True) for slope in (0, 20, 60, 120, 200)]
    assert bias[0] == pytest.approx(0.44, abs=0.03)
    for flat, steep in pairwise(bias):
        assert steep < 0.8 * flat
    assert bias[-1] < 0.02


def test_the_bias_of_a_causal_full_sequence_does_not_vanish_with_more_steps():
    process = Gaussian(SCHEDULE, ar1(4, 0.9))
    coarse, fine = (error(process, full_sequence(4, SCHEDULE.ladder(steps)), causal=True) for steps in (50, 400))
    assert fine > 0.9 * coarse


@pytest.mark.parametrize(("causal", "build"), [(False, full_sequence), (False, pyramid), (True, autoregressive)])
@pytest.mark.parametrize("eta", [0.5, 1.0])
def test_ancestral_samples_have_the_right_covariance(causal, build, eta):
    """30000 sequences: the covariance is known to 0.01, discretisation adds up to 0.05 at eta 1."""
    process = Gaussian(SCHEDULE, ar1(3, 0.8))
    matrix = build(3, SCHEDULE.ladder(80))
    x = torch.randn(30_000, 3, 1, generator=seeded(0), dtype=torch.float64)
    out = sample(process.denoiser(causal), SCHEDULE, x, matrix, eta=eta, generator=seeded(1))[..., 0]
    torch.testing.assert_close(out.T @ out / len(out), process.covariance, rtol=0, atol=0.09)
    torch.testing.assert_close(out.mean(0), torch.zeros(3, dtype=torch.float64), rtol=0, atol=0.03)


@every_process
@every_matrix
@pytest.mark.parametrize("levels", [{3: 0}, {0: 0, 3: 0}, {1: 300}, {0: 0, 2: 600}, {1: 1000}], ids=str)
def test_seeing_everything_a_pinned_token_conditions_the_others(covariance, build, levels):
    """Goal, in-filling, a doubted and an absent token: samples follow the exact conditional distribution."""
    process = Gaussian(SCHEDULE, covariance)
    matrix = build(4, SCHEDULE.ladder(200))
    for token, level in levels.items():
        matrix = pin(matrix, token, level)
    observed = [token for token, level in levels.items() if level < 1000]
    free = [token for token in range(4) if token not in levels]
    value = torch.tensor([1.0, -0.5, 0.7, 1.5], dtype=torch.float64)
    root, mean = response(process, matrix, False, value)
    k = torch.tensor([levels.get(token, 1000) for token in range(4)])
    cross = (covariance * SCHEDULE.alpha(k).double())[free][:, observed]
    gain = torch.linalg.solve(process.noisy_covariance(k)[observed][:, observed], cross.T).T
    torch.testing.assert_close(mean[free], gain @ value[observed], rtol=0, atol=0.03)
    expected = covariance[free][:, free] - gain @ cross.T
    torch.testing.assert_close((root @ root.T)[free][:, free], expected, rtol=0, atol=0.04)
    assert torch.equal(mean[observed], value[observed])


def test_a_causal_model_does_not_hear_of_a_later_known_token():
    process = Gaussian(SCHEDULE, ar1(4, 0.9))
    matrix = pin(autoregressive(4, SCHEDULE.ladder(20)), 3)
    _, mean = response(process, matrix, True, torch.full((4,), 2.0, dtype=torch.float64))
    assert torch.equal(mean[:3], torch.zeros(3, dtype=torch.float64))
    _, mean = response(process, matrix, False, torch.full((4,), 2.0, dtype=torch.float64))
    assert (mean[:3] > 1).all()


# Diffusers: where all tokens share a level, one step is the textbook's.


def diffusers_config(alpha_bar, steps):
    """A scheduler of diffusers that visits our ladder: its timestep t is our level t + 1, below its first lies alpha 1."""
    levels = len(alpha_bar) - 1
    return {
        "num_train_timesteps": levels,
        "trained_betas": (1 - alpha_bar[1:] / alpha_bar[:-1]).tolist(),
        "clip_sample": False,
        "timestep_spacing": "leading",
        "steps_offset": levels // steps - 1,
    }


NAMES = {"x0": "sample", "eps": "epsilon", "v": "v_prediction"}


def both(scheduler, alpha_bar, steps, name, **options):
    """Theirs and ours in float64, so that the comparison is of formulas and not of rounding."""
    theirs = scheduler(**diffusers_config(alpha_bar, steps), prediction_type=NAMES[name], **options)
    theirs.set_timesteps(steps)
    torch.testing.assert_close(theirs.alphas_cumprod.double(), alpha_bar[1:], rtol=1e-3, atol=1e-6)
    theirs.alphas_cumprod = alpha_bar[1:]
    schedule = NoiseSchedule(alpha_bar)
    schedule.alpha_table, schedule.sigma_table = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
    ladder = schedule.ladder(steps).flip(0).tolist()
    assert [t + 1 for t in theirs.timesteps.tolist()] == ladder[:-1]
    return theirs, schedule, ladder


def one_level(schedule, name, level, seed):
    """Tokens that all share a level, a network's output for them, and what we take it to mean."""
    x, noise, off, draw = torch.randn(4, 2, 3, 5, generator=seeded(seed), dtype=torch.float64)
    k = torch.full((3,), level)
    alpha, sigma = schedule.alpha(k)[:, None], schedule.sigma(k)[:, None]
    out = {"x0": x, "eps": noise, "v": alpha * noise - sigma * x}[name] + 0.1 * off
    noisy = schedule.add_noise(x, k, noise)
    return noisy, out, to_prediction(name, out, noisy, alpha, sigma), draw


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("steps", [5, 20, 100])
@pytest.mark.parametrize("curve", [linear, cosine])
def test_a_shared_level_steps_as_the_ddim_scheduler_of_diffusers(name, eta, steps, curve):
    theirs, schedule, ladder = both(DDIMScheduler, curve(100), steps, name, set_alpha_to_one=True)
    for level, lower in pairwise(ladder):
        x, out, pred, noise = one_level(schedule, name, level, seed=level)
        expected = theirs.step(out, level - 1, x, eta=eta, variance_noise=noise if eta else None).prev_sample
        levels = amplitudes(schedule, torch.full((3,), level), torch.full((3,), lower), x)
        stepped = solver_step(x, pred, levels, Sampler(eta=eta), noise)
        torch.testing.assert_close(stepped, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [5, 20, 100])
@pytest.mark.parametrize("curve", [linear, cosine])
def test_eta_1_is_the_ddpm_scheduler_of_diffusers(name, steps, curve):
    theirs, schedule, ladder = both(DDPMScheduler, curve(100), steps, name, variance_type="fixed_small")
    for level, lower in pairwise(ladder):
        x, out, pred, _ = one_level(schedule, name, level, seed=level)
        expected = theirs.step(out, level - 1, x, generator=seeded(7)).prev_sample
        stepped = ddim_step(schedule, x, pred, torch.full((3,), level), torch.full((3,), lower), eta=1.0, generator=seeded(7))
        torch.testing.assert_close(stepped, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_a_whole_run_is_that_of_diffusers(eta):
    alpha_bar = cosine(100)
    schedule = NoiseSchedule(alpha_bar)
    process = Gaussian(schedule, ar1(3, 0.9))
    denoise = process.denoiser()
    theirs = DDIMScheduler(**diffusers_config(alpha_bar, 20), set_alpha_to_one=True)
    theirs.set_timesteps(20)
    noise = torch.randn(2, 3, 5, generator=seeded(0))
    x, draws = noise, seeded(1)
    for timestep in theirs.timesteps:
        out = denoise(x, torch.full((2, 3), int(timestep) + 1)).eps
        x = theirs.step(out, timestep, x, eta=eta, generator=draws).prev_sample
    ours = sample(denoise, schedule, noise, full_sequence(3, schedule.ladder(20)), eta=eta, generator=seeded(1))
    torch.testing.assert_close(ours, x, rtol=1e-4, atol=1e-4)


# The edges: where sampling starts, what it reports, what it refuses.


def test_start_puts_what_is_known_at_its_level():
    matrix = pin(pin(full_sequence(4, SCHEDULE.ladder(3)), 0, 0), 1, 400)
    known = torch.full((5, 4, 2), 7.0)
    x = start(SCHEDULE, matrix, (5, 2), known, seeded(0))
    noise = torch.randn(5, 4, 2, generator=seeded(0))
    assert torch.equal(x[:, 0], known[:, 0])
    k = torch.tensor(400)
    torch.testing.assert_close(x[:, 1], SCHEDULE.alpha(k) * known[:, 1])  # a measurement: noisy already
    # Nothing of what `known` holds shines through at K.
    assert torch.equal(x[:, 2:], noise[:, 2:])


def test_start_without_anything_known_is_white_noise():
    matrix = full_sequence(4, SCHEDULE.ladder(3))
    x = start(SCHEDULE, matrix, (20_000, 2, 3), generator=seeded(0))
    assert x.shape == (20_000, 4, 2, 3)
    assert x.mean().abs() < 0.01
    assert abs(x.std() - 1) < 0.01


def test_on_step_sees_every_row():
    matrix = pyramid(3, SCHEDULE.ladder(4))
    data = torch.randn(1, 3, 2, generator=seeded(0))
    seen = []
    out = sample(
        oracle(SCHEDULE, data), SCHEDULE, torch.randn(1, 3, 2), matrix, on_step=lambda row, x, levels: seen.append((row, x, levels))
    )
    assert [row for row, _, _ in seen] == list(range(1, len(matrix)))
    assert torch.equal(torch.stack([levels for _, _, levels in seen]), matrix[1:])
    assert torch.equal(seen[-1][1], out)
    assert not torch.equal(seen[0][1], seen[1][1]), "each row shows its own tensor"


def test_on_step_sees_rows_in_which_nothing_moves_too():
    matrix = torch.tensor([[1000], [500], [500], [0]])
    rows = []
    sample(oracle(SCHEDULE, torch.zeros(1, 1, 2)), SCHEDULE, torch.randn(1, 1, 2), matrix, on_step=lambda row, x, levels: rows.append(row))
    assert rows == [1, 2, 3]


def test_a_sample_leaves_its_inputs_alone():
    matrix = pyramid(3, SCHEDULE.ladder(4))
    x = torch.randn(1, 3, 2, generator=seeded(0))
    kept, rows = x.clone(), matrix.clone()
    sample(oracle(SCHEDULE, torch.zeros(1, 3, 2)), SCHEDULE, x, matrix, eta=1.0)
    assert torch.equal(x, kept)
    assert torch.equal(matrix, rows)


def refuse(**changes):
    arguments = {"x": torch.zeros(1, 3, 2), "matrix": full_sequence(3, SCHEDULE.ladder(2))} | changes
    return sample(oracle(SCHEDULE, torch.zeros(1, 3, 2)), SCHEDULE, **arguments)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.zeros(1, 4, 2)}, r"matrix denoises 3 tokens but x has shape \(1, 4, 2\).*horizon=4"),
        ({"x": torch.zeros(3, 2)}, r"shape \(3, 2\) \(batch, tokens, \*event\)"),
        ({"eta": -0.1}, "eta goes from 0.*got -0.1"),
        ({"eta": 1.5}, "eta goes from 0.*got 1.5"),
        ({"eta": float("nan")}, "eta goes from 0.*got nan"),
        ({"hold": "drop"}, "hold is one of keep, resample; got 'drop'"),
        ({"matrix": torch.tensor([[0, 0, 0], [5, 0, 0]])}, "rises"),
        ({"matrix": torch.tensor([[1001, 0, 0], [0, 0, 0]])}, r"0\.\.1000"),
    ],
    ids=str,
)
def test_sample_says_what_is_wrong(changes, words):
    with pytest.raises(ValueError, match=words):
        refuse(**changes)


GIVEN_LATER = {
    "pinned": pin(full_sequence(4, SCHEDULE.ladder(3)), 2),
    "uncertain": pin(pyramid(4, SCHEDULE.ladder(3)), 2, 300),
    "observed": start_at(full_sequence(4, SCHEDULE.ladder(3)), torch.tensor([600, 1000, 300, 1000])),
    "each its own": start_at(full_sequence(4, SCHEDULE.ladder(3)), torch.tensor([[0, 0, 1000, 1000], [1000, 1000, 0, 1000]])),
}
GIVEN_BEFORE = {
    "nothing": trapezoid(4, SCHEDULE.ladder(3)),
    "the past": pin(pyramid(4, SCHEDULE.ladder(3)), [0, 1]),
    "an uncertain past": start_at(full_sequence(4, SCHEDULE.ladder(3)), torch.tensor([0, 300, 1000, 1000])),
    "after what is never denoised": pin(pin(full_sequence(4, SCHEDULE.ladder(3)), 0, 1000), 1),
    "everything": pin(full_sequence(4, SCHEDULE.ladder(3)), [0, 1, 2, 3]),
}


def sampled(matrix, causal=True, wrap=lambda denoise: denoise):
    net = DiffusionForcing(Transformer(2, hidden=8, heads=2, layers=1, causal=causal), SCHEDULE)
    return sample(wrap(net.denoiser()), SCHEDULE, torch.zeros(2, 4, 2), matrix)


@pytest.mark.parametrize("matrix", GIVEN_LATER.values(), ids=GIVEN_LATER)
def test_a_causal_model_that_is_given_later_tokens_warns(matrix):
    with pytest.warns(UserWarning, match=r"token [12] is given, but this model is causal.*causal=False.*infill") as caught:
        sampled(matrix)
    assert caught[0].filename == __file__, "it points at the line that calls `sample`"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampled(matrix, causal=False)
        sampled(matrix, wrap=lambda denoise: lambda x, k: denoise(x, k))


@pytest.mark.parametrize("matrix", GIVEN_BEFORE.values(), ids=GIVEN_BEFORE)
def test_it_does_not_warn_of_earlier_tokens(matrix):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampled(matrix)


# Roll-outs.

K = 20
SMALL = NoiseSchedule(cosine(K))
LADDER = SMALL.ladder(4)


def model(kind="rnn", cond=0, **options):
    backbones = {
        "rnn": lambda: RNN(2, cond, hidden=16, levels=K, **options),
        "transformer": lambda: Transformer(2, cond, hidden=16, heads=2, layers=2, levels=K, **options),
    }
    return randomised(DiffusionForcing(backbones[kind](), SMALL))


KINDS = {
    "rnn": lambda cond=0: model("rnn", cond),
    "causal": lambda cond=0: model("transformer", cond),
    "windowed": lambda cond=0: model("transformer", cond, window=3),
    "seeing": lambda cond=0: model("transformer", cond, causal=False),
}
every_kind = pytest.mark.parametrize("build", KINDS.values(), ids=KINDS)


def context(n=3, b=2, seed=5):
    return torch.randn(b, n, 2, generator=seeded(seed))


@every_kind
@pytest.mark.parametrize("length", [1, 4, 10])
@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_a_rollout_is_window_after_window(build, length, eta):
    """By hand: sample a window given the state, commit it, go on. A length that is no multiple of the horizon cuts the last window."""
    net = build(cond=1)
    matrix = pyramid(4, LADDER)
    past, cond = context(), torch.randn(2, 3 + length, 1, generator=seeded(6))
    generator = seeded(0)
    state, windows, done = net.absorb(past, cond[:, :3]), [], 0
    while done < length:
        width = min(4, length - done)
        here = cond[:, 3 + done : 3 + done + width]
        x = start(SMALL, matrix[:, :width], (2, 2), generator=generator)
        x = sample(net.denoiser(here, state), SMALL, x, matrix[:, :width], eta=eta, generator=generator)
        with torch.no_grad():
            state = net.absorb(x, here, state)
        windows.append(x)
        done += width
    out = rollout(net, Sampler(eta=eta).along(matrix), length, past, cond, generator=seeded(0))
    assert out.shape == (2, length, 2)
    torch.testing.assert_close(out, torch.cat(windows, 1), rtol=1e-5, atol=1e-5)


@every_kind
def test_a_rollout_needs_no_context(build):
    out = rollout(build(), full_sequence(4, LADDER), 6, torch.zeros(3, 0, 2), generator=seeded(0))
    assert out.shape == (3, 6, 2)
    assert rollout(build(), full_sequence(4, LADDER), 6, generator=seeded(0)).shape == (1, 6, 2)
    cond = torch.zeros(5, 6, 1)
    assert rollout(build(cond=1), full_sequence(4, LADDER), 6, cond=cond, generator=seeded(0)).shape == (5, 6, 2)


@every_kind
def test_the_context_matters_and_so_does_every_token_of_it(build):
    net, matrix = build(), full_sequence(2, LADDER)
    out = rollout(net, matrix, 2, context(), generator=seeded(0))
    assert torch.equal(out, rollout(net, matrix, 2, context(), generator=seeded(0)))
    for token in range(3):
        other = context()
        other[:, token] += 1
        assert not torch.allclose(out, rollout(net, matrix, 2, other, generator=seeded(0)), atol=1e-5)


@every_kind
def test_a_rollout_goes_far_past_its_horizon(build):
    out = rollout(build(), full_sequence(2, SMALL.ladder(2)), 101, context(), generator=seeded(0), past=Context(memory=4))
    assert out.shape == (2, 101, 2)
    assert out.isfinite().all()
    assert out[:, 50:].std() > 0.01


def spy(net, method):
    """Record what a method of the model is called with and what it returns."""
    calls = []
    plain = getattr(net, method)

    def wrapped(*arguments, **options):
        result = plain(*arguments, **options)
        calls.append((arguments, options, result))
        return result

    setattr(net, method, wrapped)
    return calls


def tensors(state):
    return [state] if isinstance(state, torch.Tensor) else [t for part in state or () for t in tensors(part)]


@pytest.mark.parametrize(("build", "memory"), [(KINDS["rnn"], None), (KINDS["windowed"], None), (KINDS["causal"], 3), (KINDS["seeing"], 3)])
def test_a_stream_runs_in_constant_memory(build, memory):
    """The state it carries does not grow: the latent of an RNN, the cache of a windowed transformer, or what `memory` keeps."""
    net = build()
    calls = spy(net, "absorb")
    windows = stream(net, full_sequence(2, SMALL.ladder(2)), 300, context(1), generator=seeded(0), past=Context(memory=memory))
    assert not calls, "nothing is computed before it is asked for"
    sizes = []
    for window in windows:
        assert window.shape == (2, 2, 2)
        sizes.append(sum(t.numel() for t in tensors(calls[-1][2])))
        calls.clear()
    assert len(sizes) == 150
    assert max(sizes) == sizes[-1] == sizes[5]


def test_without_window_or_memory_the_past_of_a_transformer_grows():
    net = KINDS["causal"]()
    calls = spy(net, "absorb")
    for _ in stream(net, full_sequence(2, SMALL.ladder(2)), 8, context(1), generator=seeded(0)):
        pass
    assert [tensors(result)[0].shape[-2] for _, _, result in calls] == [1, 3, 5, 7, 9]


def test_a_stream_is_a_rollout_in_pieces():
    net, matrix = KINDS["rnn"](), full_sequence(4, LADDER)
    pieces = list(stream(net, matrix, 10, context(), generator=seeded(0)))
    assert [piece.shape[1] for piece in pieces] == [4, 4, 2]
    assert torch.equal(torch.cat(pieces, 1), rollout(net, matrix, 10, context(), generator=seeded(0)))


@every_kind
@pytest.mark.parametrize("memory", [0, 1, 5, 100])
@pytest.mark.parametrize("width", [0, 1])
def test_memory_keeps_the_last_tokens_only(build, memory, width):
    """By hand: each window is sampled given the last `memory` tokens, read afresh with their conditions."""
    net, matrix, generator = build(cond=width), full_sequence(2, LADDER), seeded(0)
    tokens, cond = context(), torch.randn(2, 3 + 8, width, generator=seeded(6))
    for _ in range(4):
        n = tokens.shape[1]
        recent = slice(max(0, n - memory), n)
        with torch.no_grad():
            state = net.absorb(tokens[:, recent], cond[:, recent]) if memory else None
        x = start(SMALL, matrix, (2, 2), generator=generator)
        tokens = torch.cat([tokens, sample(net.denoiser(cond[:, n : n + 2], state), SMALL, x, matrix)], 1)
    out = rollout(net, matrix, 8, context(), cond, generator=seeded(0), past=Context(memory=memory))
    torch.testing.assert_close(out, tokens[:, 3:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["rnn", "causal", "seeing"])
def test_memory_of_everything_is_the_state_carried_on(kind):
    """(A windowed transformer reads further back through its layers than its window is long.)"""
    net, matrix = KINDS[kind](), full_sequence(2, LADDER)
    carried = rollout(net, matrix, 8, context(), generator=seeded(0))
    read = rollout(net, matrix, 8, context(), generator=seeded(0), past=Context(memory=100))
    torch.testing.assert_close(carried, read, rtol=1e-4, atol=1e-5)


@every_kind
@pytest.mark.parametrize("commit", [1, 3, 4])
def test_commit_keeps_the_first_tokens_of_each_window(build, commit):
    """By hand: sample four tokens, keep `commit`, forget the others, go on from there."""
    net, matrix, generator = build(), pyramid(4, LADDER), seeded(0)
    state, kept = net.absorb(context()), []
    length = 7
    while sum(part.shape[1] for part in kept) < length:
        width = min(4, length - sum(part.shape[1] for part in kept))
        x = start(SMALL, matrix[:, :width], (2, 2), generator=generator)
        x = sample(net.denoiser(None, state), SMALL, x, matrix[:, :width])[:, :commit]
        with torch.no_grad():
            state = net.absorb(x, None, state)
        kept.append(x)
    out = rollout(net, matrix, length, context(), generator=seeded(0), past=Context(commit=commit))
    assert out.shape == (2, length, 2)
    torch.testing.assert_close(out, torch.cat(kept, 1), rtol=1e-4, atol=1e-5)


def absorbed(net, matrix, length=8, **options):
    """What a roll-out commits to the past, window by window: tokens, levels, and the windows it returned."""
    calls = spy(net, "absorb")
    tokens, levels, windows = [], [], []
    for window in stream(net, matrix, length, context(), generator=seeded(0), **options):
        arguments, said, _ = calls[-1]
        tokens.append(arguments[0])
        levels.append(said["level"])
        windows.append(window)
    return tokens, levels, windows


@every_kind
def test_the_context_is_committed_as_clean(build):
    net = build()
    calls = spy(net, "absorb")
    list(stream(net, full_sequence(4, LADDER), 4, context(), generator=seeded(0), past=Context(stabilization=5)))
    (arguments, options, _), _ = calls
    assert torch.equal(arguments[0], context())
    assert options["level"] == 0


@every_kind
def test_without_stabilization_tokens_join_the_past_as_they_are(build):
    tokens, levels, windows = absorbed(build(), full_sequence(4, LADDER))
    for token, level, window in zip(tokens, levels, windows, strict=True):
        assert torch.equal(token, window)
        assert (level == 0).all()


@every_kind
def test_label_only_says_the_level(build):
    tokens, levels, windows = absorbed(build(), full_sequence(4, LADDER), past=Context(stabilization=3, mode="label"))
    for token, level, window in zip(tokens, levels, windows, strict=True):
        assert torch.equal(token, window)
        assert (level == 3).all()


@every_kind
def test_noise_noises_the_finished_token_to_the_level(build):
    net = build()
    tokens, levels, windows = absorbed(net, full_sequence(4, LADDER), length=400, past=Context(stabilization=3, mode="noise", memory=4))
    k = torch.tensor(3)
    # memory keeps the last four tokens: just the window.
    left = torch.stack([token - SMALL.alpha(k) * window for token, window in zip(tokens, windows, strict=True)])
    assert all((level == 3).all() for level in levels)
    assert left.std().item() == pytest.approx(SMALL.sigma(k).item(), rel=0.1)
    assert left.mean().abs() < 0.05


@every_kind
@pytest.mark.parametrize(("stabilization", "rung"), [(1, 5), (5, 5), (6, 10), (15, 15), (20, 20)])
def test_path_takes_tokens_as_they_were_on_their_way_down(build, stabilization, rung):
    """At the last rung of 0, 5, 10, 15, 20 that is not below the level asked for."""
    net = build()
    matrix = pyramid(4, LADDER, 2)
    tokens, levels, windows = absorbed(net, matrix, length=4, past=Context(stabilization=stabilization, mode="path"))
    assert (levels[0] == rung).all()
    # By hand: watch the same window on its way down.
    with torch.no_grad():
        state = net.absorb(context())
    x = start(SMALL, matrix, (2, 2), generator=seeded(0))
    history = [x]
    denoiser = net.denoiser(None, state)
    out = sample(lambda x, k: denoiser(x, k), SMALL, x, matrix, on_step=lambda row, x, levels: history.append(x))
    last = (matrix == rung).long().cumsum(0).argmax(0)
    expected = torch.stack([history[row][:, token] for token, row in enumerate(last.tolist())], 1)
    torch.testing.assert_close(tokens[0], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(windows[0], out, rtol=1e-4, atol=1e-5)


def test_each_backbone_has_a_way_of_its_own():
    """An RNN carries the latent of the way down, a transformer noises its context."""
    for build, how in ((KINDS["rnn"], "path"), (KINDS["causal"], "noise"), (KINDS["seeing"], "noise")):
        matrix = full_sequence(4, LADDER)
        own = rollout(build(), matrix, 12, context(), generator=seeded(0), past=Context(stabilization=3))
        named = rollout(build(), matrix, 12, context(), generator=seeded(0), past=Context(stabilization=3, mode=how))
        plain = rollout(build(), matrix, 12, context(), generator=seeded(0))
        assert torch.equal(own, named)
        assert torch.allclose(own[:, :4], plain[:, :4], atol=1e-5)
        assert not torch.allclose(own, plain, atol=1e-5)


@every_kind
def test_wrap_sees_every_window(build):
    """A wrapper that replaces the denoiser decides everything."""
    wrapped = []

    def wrap(denoise):
        wrapped.append(denoise)
        return lambda x, k: believing(SMALL, torch.full_like(x, float(len(wrapped))), x, k)

    out = rollout(build(), full_sequence(4, LADDER), 10, context(), wrap=wrap, generator=seeded(0))
    assert len(wrapped) == 3
    assert out[0, :, 0].tolist() == [1] * 4 + [2] * 4 + [3] * 2


def test_a_plain_wrapper_changes_nothing():
    net, matrix = KINDS["rnn"](), pyramid(4, LADDER)
    plain = rollout(net, matrix, 10, context(), generator=seeded(0))
    wrapped = rollout(net, matrix, 10, context(), wrap=lambda denoise: lambda x, k: Prediction(*denoise(x, k)), generator=seeded(0))
    torch.testing.assert_close(plain, wrapped, rtol=1e-4, atol=1e-5)


def test_a_rollout_builds_no_graph():
    out = rollout(KINDS["rnn"](), full_sequence(4, LADDER), 6, context(), generator=seeded(0))
    assert not out.requires_grad


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"length": 0}, "at least one token; got length=0"),
        ({"past": {"commit": 0}}, "commit counts tokens from 1.*got 0"),
        ({"past": {"commit": 5}}, r"4 tokens are kept, 1\.\.4; got 5"),
        ({"past": {"stabilization": -1}}, "level >= 0.*got -1"),
        ({"past": {"stabilization": 21}}, r"0\.\.20.*got 21"),
        ({"past": {"memory": -1}}, "memory counts tokens.*got -1"),
        ({"cond": torch.zeros(2, 8, 0)}, r"3 tokens of the context and the 6 to generate \(9\); it has 8"),
        ({"matrix": torch.tensor([[0, 0], [5, 0]])}, "rises"),
        ({"past": {"mode": "trace", "stabilization": 3}}, "path.*noise.*label.*'trace'"),
    ],
    ids=str,
)
def test_rollout_says_what_is_wrong(options, words):
    arguments = {"matrix": full_sequence(4, LADDER), "length": 6, "context": context()} | options
    past = arguments.pop("past", {})
    with pytest.raises(ValueError, match=words):
        rollout(KINDS["rnn"](), **arguments, past=Context(**past))


# Rolling diffusion.

causal_kinds = pytest.mark.parametrize("build", [KINDS["rnn"], KINDS["causal"]], ids=["rnn", "causal"])


@pytest.mark.parametrize("backbone", [RNN(2, 3, hidden=12, levels=20), Transformer(2, 3, hidden=12, heads=2, layers=2, levels=20)])
@pytest.mark.parametrize("slope", [1, 2, 3, 4])
@pytest.mark.parametrize(("length", "solver"), [(1, "ddim"), (9, "ddim"), (9, "adams_angle")])
def test_rolling_is_one_long_pyramid(backbone, slope, length, solver):
    net = randomised(DiffusionForcing(backbone, SMALL))
    cond = torch.randn(2, 3 + length, 3, generator=seeded(8))
    sampler = Sampler(4, "pyramid", slope, solver)
    made = torch.cat(list(rolling(net, sampler, length, context(), cond, generator=seeded(0))), dim=1)
    generator = seeded(0)
    x = torch.cat([torch.randn(2, 1, 2, generator=generator) for _ in range(length)], dim=1)
    with torch.no_grad():
        state = net.absorb(context(), cond[:, :3])
    expected = sample(net.denoiser(cond[:, 3:], state), SMALL, x, sampler)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


@causal_kinds
@pytest.mark.parametrize("how", ["path", "noise", "label"])
def test_rolling_with_one_token_at_a_time_is_a_stream(build, how):
    net, past, sampler = build(), Context(stabilization=6, mode=how), Sampler(4, slope=4, eta=0.5)
    made = [*rolling(net, sampler, 5, context(), past=past, generator=seeded(0))]
    expected = [*stream(net, sampler.along(full_sequence(1, LADDER)), 5, context(), past=past, generator=seeded(0))]
    assert [token.shape for token in made] == [(2, 1, 2)] * 5
    torch.testing.assert_close(torch.cat(made, dim=1), torch.cat(expected, dim=1), rtol=1e-4, atol=1e-5)


@causal_kinds
def test_tokens_leave_rolling_stabilized(build):
    """Those that follow see another past, the first does not."""
    net = build()
    plain, stable = (
        torch.cat(
            [*rolling(net, Sampler(4, slope=2), 6, context(), past=Context(stabilization=level, mode="label"), generator=seeded(0))], dim=1
        )
        for level in (0, 10)
    )
    assert torch.equal(plain[:, 0], stable[:, 0])
    assert not torch.allclose(plain[:, 2:], stable[:, 2:], atol=1e-4)


def test_rolling_carries_no_more_than_it_must(monkeypatch):
    """Steps over slope tokens at most, each yielded as soon as it is clean."""
    net, carried = KINDS["causal"](), []
    predict = net.predict
    monkeypatch.setattr(net, "predict", lambda x, *rest: carried.append(x.shape[1]) or predict(x, *rest))
    tokens = rolling(net, Sampler(4, slope=2), 50, context(), generator=seeded(0))
    next(tokens)
    assert carried == [1, 1, 2, 2]
    assert sum(1 for _ in tokens) == 49
    assert max(carried) == 2
    assert len(carried) == 4 + 49 * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"length": 0}, "at least one token; got length=0"),
        ({"sampler": Sampler(4, slope=0)}, r"4 rows .* 1\.\.4; got 0"),
        ({"sampler": Sampler(4, slope=5)}, r"1\.\.4; got 5"),
        ({"sampler": Sampler(4, slope=2.5)}, r"1\.\.4; got 2.5"),
        ({"past": Context(stabilization=21)}, r"0\.\.20.*got 21"),
        ({"model": KINDS["seeing"]()}, "must be causal"),
    ],
    ids=str,
)
def test_rolling_says_what_is_wrong(options, words):
    arguments = {"model": KINDS["rnn"](), "sampler": Sampler(4, slope=2), "length": 6, "context": context()} | options
    with pytest.raises(ValueError, match=words):
        next(rolling(**arguments))


# Paths between levels.


@pytest.mark.parametrize("kind", ["plain", "rnn", "causal transformer"])
def test_angle_steps_leaves_white_tokens_as_they_are(kind):
    """Tokens of variance 1 that nothing is known of: their velocity is 0, and noise is a sample already. DDIM narrows it."""
    schedule = NoiseSchedule(cosine(100))
    backbone = RNN(2, hidden=8, levels=100) if kind == "rnn" else Transformer(2, hidden=8, layers=1, heads=2, levels=100)
    model = DiffusionForcing(backbone, schedule)  # the output layer is zero at first, so v = 0
    denoise = (lambda x, k: model.predict(x, k)) if kind == "plain" else model.denoiser()
    x = torch.randn(64, 5, 2, generator=seeded(0))
    matrix = pyramid(5, schedule.ladder(8), 2)
    by_angle = sample(denoise, schedule, x, Sampler(solver="euler_angle").along(matrix))
    torch.testing.assert_close(by_angle, x, rtol=1e-4, atol=1e-4)
    assert sample(denoise, schedule, x, matrix).std() < 0.9 * x.std()


def test_both_paths_end_at_the_same_place_given_many_steps():
    schedule = NoiseSchedule(cosine(1000))

    def half_as_wide(x, k):  # tokens of standard deviation 0.5
        alpha, sigma = expand(schedule.alpha(k), x), expand(schedule.sigma(k), x)
        size = 0.25 * alpha**2 + sigma**2
        return Prediction(0.25 * alpha * x / size, sigma * x / size)

    x = torch.randn(16, 3, 2, generator=seeded(0))
    ends = [sample(half_as_wide, schedule, x, Sampler(1000, solver=solver)) for solver in ("ddim", "euler_angle")]
    torch.testing.assert_close(ends[0], ends[1], rtol=0.01, atol=1e-3)
    torch.testing.assert_close(ends[1], 0.5 * x, rtol=0.01, atol=1e-3)


def test_angle_steps_has_no_fresh_noise():
    for solver in ("euler_angle", "adams_angle"):
        with pytest.raises(ValueError, match=f"'{solver}' draws no fresh noise"):
            Sampler(eta=0.5, solver=solver)


def conditional(schedule, covariance, sampler, known):
    """Largest error of means, in standard deviations, and of spreads, of samples given the tokens that `known` names, without chance:
    steps are linear in the noise, so unit vectors give all of them.
    """
    t, values = len(covariance), torch.tensor([1.0, -0.3, 0.4, 1.2], dtype=torch.float64)
    levels = torch.tensor([0 if token in known else schedule.levels for token in range(t)])
    noise = torch.cat([torch.zeros(1, t), torch.eye(t)]).double()
    x = torch.where(levels == 0, values, noise)[..., None]
    matrix = start_at(sampler.matrix_for(schedule, t), levels)
    out = sample(Gaussian(schedule, covariance).denoiser(), schedule, x, sampler.along(matrix))[..., 0]
    gain = torch.linalg.solve(covariance[known][:, known], covariance[:, known].T).T if known else covariance.new_zeros(t, 0)
    spread = (covariance - gain @ covariance[known]).diagonal()
    free = [token for token in range(t) if token not in known]
    means = (out[0] - gain @ values[known])[free] / spread[free].sqrt()
    return float(means.abs().max()), float(((out[1:] - out[0]).square().sum(0)[free] / spread[free]).sqrt().sub(1).abs().max())


GAPS = {
    "wide": (ar1(4, 0.9), [0, 3]),
    "narrow": (ar1(4, 0.99), [0, 3]),
    "very narrow": (ar1(4, 0.999), [0, 3]),
    "small tokens": (0.01 * ar1(4, 0.9), []),
    "large tokens": (100 * ar1(4, 0.9), []),
    "white": (torch.eye(4, dtype=torch.float64), []),
}


@pytest.mark.parametrize("curve", [cosine, linear])
@pytest.mark.parametrize(("matrix", "slope"), [("full_sequence", 1), ("pyramid", 10), ("autoregressive", 1), ("trapezoid", 10)])
@pytest.mark.parametrize("gap", GAPS)
def test_steps_that_look_back_are_accurate_for_tokens_of_any_spread(curve, matrix, slope, gap):
    """Fifty Euler steps or DDIM's are off by up to 0.14 standard deviations and 0.7 of the spread. Measured: 0.008 and 0.04."""
    mean, spread = conditional(NoiseSchedule(curve(1000)), GAPS[gap][0], Sampler(50, matrix, slope, "adams_angle"), GAPS[gap][1])
    assert mean < 0.015
    assert spread < 0.05


def test_steps_that_look_back_are_of_second_order():
    schedule = NoiseSchedule(cosine(1000))
    for gap in ("wide", "narrow"):
        errors = [conditional(schedule, GAPS[gap][0], Sampler(n, solver="adams_angle"), GAPS[gap][1]) for n in (16, 32, 64)]
        for few, some, many in zip(*errors, strict=True):
            assert few > 3 * some > 9 * many
    plain = conditional(schedule, GAPS["narrow"][0], Sampler(50, solver="euler_angle"), GAPS["narrow"][1])
    assert plain[1] > 8 * conditional(schedule, GAPS["narrow"][0], Sampler(50, solver="adams_angle"), GAPS["narrow"][1])[1]


@pytest.mark.parametrize("way", ["stream", "rolling"])
def test_rollouts_take_the_solver_they_are_given(way):
    """White tokens that nothing is known of keep their spread, which DDIM narrows."""
    schedule = NoiseSchedule(cosine(100))
    model = DiffusionForcing(Transformer(2, hidden=8, layers=1, heads=2, levels=100), schedule)  # v = 0
    none = torch.zeros(400, 0, 2)

    def spread(solver):
        sampler = Sampler(8, slope=2, solver=solver)
        chunks = (
            rolling(model, sampler, 12, none, generator=seeded(0))
            if way == "rolling"
            else stream(model, sampler.over(schedule, 2), 12, none, generator=seeded(0))
        )
        return float(torch.cat(list(chunks), dim=1).std())

    assert spread("euler_angle") == pytest.approx(1.0, abs=0.03)
    assert spread("ddim") < 0.9


@pytest.mark.parametrize("way", ["stream", "rolling"])
def test_from_less_noise_roll_outs_keep_nearer_to_the_middle(way):
    net = model()

    def tokens(noise, seed):
        sampler = Sampler(4, slope=2, temperature=noise)
        if way == "rolling":
            return torch.cat(list(rolling(net, sampler, 3, context(2), generator=seeded(seed))), dim=1)
        return rollout(net, sampler.over(SMALL, 1), 3, context(2), generator=seeded(seed))

    assert torch.equal(tokens(0.0, 1), tokens(0.0, 2))  # nothing is left to chance
    apart = [float((tokens(noise, 1) - tokens(noise, 2)).abs().mean()) for noise in (0.5, 1.0)]
    assert 0 < apart[0] < apart[1]


@every_kind
def test_a_roll_out_has_no_pinned_tokens_but_its_context(build):
    """Their values would be white noise, taken as known."""
    for matrix in (pin(full_sequence(3, LADDER), 2), pin(pyramid(3, LADDER), 1, 5)):
        with pytest.raises(ValueError, match=r"begins with token [12] below level K.*`sample`, in a roll-out as its context"):
            rollout(build(), matrix, 3, context())


def test_a_roll_out_follows_one_matrix_for_all_sequences():
    """Of one for each, rows would be taken for tokens."""
    each = start_at(full_sequence(4, SCHEDULE.ladder(5)), torch.full((2, 4), 1000))
    with pytest.raises(ValueError, match=r"one matrix \(m\+1, h\) for all sequences.*got \(2, 6, 4\)"):
        rollout(DiffusionForcing(RNN(1, hidden=4, blocks=1), SCHEDULE), each, 4, torch.zeros(2, 1, 1))


def test_a_rolling_window_takes_no_matrix_of_its_own():
    with pytest.raises(ValueError, match=r"endless pyramid, and no matrix of their own; give Sampler\(steps=, slope=\)"):
        next(rolling(KINDS["rnn"](), Sampler(4, slope=2).along(pin(full_sequence(3, LADDER), 2)), 3, context()))


def test_a_model_of_double_precision_rolls_out():
    model = DiffusionForcing(RNN(2, hidden=8, blocks=1, levels=10), NoiseSchedule(cosine(10))).double()
    assert rollout(model, Sampler(3).over(model.schedule, 2), 4).dtype == torch.float64
    assert torch.cat([*rolling(model, Sampler(3), 2)], dim=1).dtype == torch.float64
