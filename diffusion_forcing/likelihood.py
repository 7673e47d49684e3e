"""Likelihoods for any fixed sequence of levels: the evidence lower bound of the paper's appendix A, and an estimate without noise.

    ln p(x_1^{k_1}, ..., x_T^{k_T})  >=  sum over t of  E[ ELBO of x_t^{k_t} given the past at its levels k_1..k_{t-1} ]

A token at level 0 counts in full, one at level K not at all: choosing 0 or K for each token gives the likelihood of any
sub-sequence.

`elbo` is the bound. `log_likelihood` and `joint_log_likelihood` follow the probability flow up to level K, where tokens are standard
normal, and add up how much it spreads on the way: exact for a perfect denoiser and many steps, deterministic, but no bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Generator, Tensor

from .checks import check_counts, first_not_finite
from .model import Denoise, Denoiser, DiffusionForcing
from .parameterization import Prediction
from .schedule import NoiseSchedule, evenly, expand


class Forced(Protocol):
    """(x, k, past_x, past_k) -> Prediction of each token at (x, k), given the others before it as (past_x, past_k)."""

    def __call__(self, x: Tensor, k: Tensor, past_x: Tensor, past_k: Tensor) -> Prediction: ...


@torch.no_grad()
def elbo(
    model: DiffusionForcing | Forced, schedule: NoiseSchedule, x: Tensor, k: Tensor | None = None, cond: Tensor | None = None, *,
    ladder: Tensor | None = None, draws: int = 1, generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """Lower bound on the log-likelihood of each token, (b, t), in nats; sum over t for the sequence. Tokens at level K give 0.

    x: clean tokens (b, t, *event), noised here. k: the fixed levels (b, t) or (t,); None: all clean. ladder: the levels of the bound's
    chain (all K+1 if None: tightest; fewer are faster and looser, never wrong). draws: of the noise, averaged.
    """
    check_counts(draws=draws)
    levels = _levels(schedule, x, k)
    x = x.masked_fill(expand(levels == schedule.levels, x), 0.0)  # what is absent may be NaN
    rungs = torch.arange(schedule.levels + 1) if ladder is None else ladder
    if rungs[0] != 0 or rungs[-1] != schedule.levels or not (rungs.diff() > 0).all():
        raise ValueError(f"the bound's chain climbs from level 0 to K={schedule.levels}, as NoiseSchedule.ladder(steps) does")
    forced = forced_by(model, cond, generator) if isinstance(model, DiffusionForcing) else model
    total = torch.zeros(levels.shape, dtype=torch.float64, device=x.device)
    for _ in range(draws):
        noise = _randn(x, generator)
        past = schedule.add_noise(x, levels, noise)
        for low, high in zip(rungs[:-1].tolist(), rungs[1:].tolist(), strict=True):
            # The chain of each token starts at its own level: rungs below it do not exist, the one above it is cut short.
            bottom = levels.clamp(min=low)
            active = bottom < high
            if not active.any():
                continue
            total += _term(schedule, forced, past, levels, bottom, torch.full_like(levels, high), active, generator)
        total += _prior(schedule, past, levels)
    return (total / draws).to(x.dtype)


STEPS = 32  # of the flow; on Gaussian tokens the error is then below 0.01 nats a number where standard deviations are 0.05 to 1.5
EXACT = 4096  # as many numbers have an exact trace, a backward pass each and step
CANDIDATES, WIDEST = 24, 20.0  # steps between levels that a token is tried at, and the noise of the highest
SEQUENCES = 2048  # in one call of the network while tokens are tried
SETTLED = 0.1  # nats: a level is not changed for less


@torch.no_grad()
def log_likelihood(
    model: DiffusionForcing | Forced, schedule: NoiseSchedule, x: Tensor, k: Tensor | None = None, cond: Tensor | None = None, *,
    steps: int = STEPS, probes: int | None = None, generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """Log-likelihood of each token given those before it, all at their levels: (b, t) nats, of encoded tokens. Tokens at level K give 0.

    x: tokens (b, t, *event) as they are at levels k, (b, t) or (t,): clean at 0, noisy in between. Unlike in `elbo` nothing is noised here,
    and what stands at level K is replaced by noise. An estimate by the probability flow, exact up to the steps and the model's error.
    steps: of the flow; the model is called steps + 1 times, with one backward pass in each for every number of a token. probes: that many
    random vectors instead (Hutchinson), for large tokens: returns (probes, b, t), estimates whose mean is the estimate and whose standard
    deviation over sqrt(probes) its standard error. generator: of these vectors and of what stands in for absent tokens; seed 0 if None.
    """
    x, levels, generator = _at_levels(schedule, x, k, generator)
    vectors = _vectors(x[0, 0], x, probes, generator)
    future = _randn(x, generator)  # one for all steps: the flow would be rough if another stood in for it at each
    if not isinstance(model, DiffusionForcing):
        return _flow(schedule, lambda y, at: model(y, at, x, levels), x, levels, steps, vectors, probes is None)
    if model.traits.separate_past and model.causal:
        forced = forced_by(model, cond)
        return _flow(schedule, lambda y, at: forced(y, at, x, levels), x, levels, steps, vectors, probes is None)
    shares = []
    for token in range(x.shape[1]):  # a flow for each, or the graphs of all would have to be kept at once
        one, here = slice(token, token + 1), _one_token(model.denoiser(cond), schedule.levels, x, levels, future, token)
        own = vectors if probes is None else vectors[:, :, one]
        shares.append(_flow(schedule, here, x[:, one], levels[:, one], steps, own, probes is None))
    return torch.cat(shares, dim=-1)


@torch.no_grad()
def joint_log_likelihood(
    model: DiffusionForcing | Denoise, schedule: NoiseSchedule, x: Tensor, k: Tensor | None = None, cond: Tensor | None = None, *,
    steps: int = STEPS, probes: int | None = None, generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """Log-likelihood of all tokens at their levels together: (b,) nats, of encoded tokens. As `log_likelihood`, whose arguments these are.

    For models that see the whole sequence: all tokens go up from their own levels at once, those at K are absent (integrated out), and
    every number of a sequence takes a backward pass a step; with probes, (probes, b). A causal model gives the sum over its tokens, and
    `model.denoiser(cond, state)` that of a next token given a past. Any other function (x, k) -> Prediction is taken to see everything.
    """
    causal = model.model.causal if isinstance(model, Denoiser) else isinstance(model, DiffusionForcing) and model.causal
    if causal and x.shape[1] > 1:
        # What stands in for later tokens does not matter to it.
        unseen = torch.Generator(x.device).manual_seed(0)
        forced = forced_by_denoiser(model, schedule.levels, unseen) if isinstance(model, Denoiser) else model
        return log_likelihood(forced, schedule, x, k, cond, steps=steps, probes=probes, generator=generator).sum(-1)  # type: ignore[arg-type]
    x, levels, generator = _at_levels(schedule, x, k, generator)
    denoise = model.denoiser(cond) if isinstance(model, DiffusionForcing) else model
    vectors = _vectors(x[0], x, probes, generator)
    return _flow(schedule, denoise, x, levels, steps, vectors, probes is None).sum(-1)


def bits_per_number(log_likelihood: Tensor, numbers: int, log_det: Tensor | float = 0.0) -> Tensor:
    """Nats of some tokens as bits for each of the `numbers` they hold; the fewer the better the model. As `log_likelihood` in shape.

    log_det: of the codec, for those tokens (`codec_traits(codec).log_det` is of one): bits are then of raw data, else of encoded tokens.
    """
    check_counts(numbers=numbers)
    return -(log_likelihood + log_det) / (numbers * math.log(2))


@torch.no_grad()
def infer_level(
    model: DiffusionForcing | Denoise, schedule: NoiseSchedule, x: Tensor, absent: Tensor | None = None, cond: Tensor | None = None, *,
    candidates: Tensor | None = None, threshold: float = 3.0, generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """The noise level of each token of observed sequences, (b, t): that at which it is most likely given the others.

    x: tokens (b, t, *event) as measured, clean tokens plus noise of unknown size or none. absent: (b, t), True where there is no token; it
    gets level K. threshold: a token is doubted where that makes it more likely by this many nats; 3 is as if one in 20 were bad.
    candidates: ascending levels to choose from, the first that of tokens not doubted; None: 25, from 0 to noise of 20. generator: of the
    noise that stands in for absent tokens; seed 0 if None. The result is for `start_at`: sampling from there repairs the sequences.

    A bad token makes its neighbours look bad. So the token that gains the most is changed first, then those that gained are tried again,
    until none does: a round for each bad token of a sequence, and one of all tokens before and after. A round takes a call of as many
    sequences as there are tokens to try times candidates, and a backward pass for each number of a token. A causal model judges tokens one
    after another by their past alone: later ones cannot vouch for them. A function (x, k) -> Prediction is taken to see everything, and
    must take any number of sequences.
    """
    if isinstance(model, Denoiser):
        if model.state is not None:
            raise ValueError("levels are inferred of whole sequences, but the denoiser is bound to a past; pass the model, "
                             "and the past's tokens with the others")  # fmt: skip
        return infer_level(model.model, schedule, x, absent, model.cond, candidates=candidates, threshold=threshold, generator=generator)
    b, t = x.shape[:2]
    choices = _choices(schedule, candidates).to(x.device)
    if not threshold >= 0:
        raise ValueError(f"threshold is what a doubted token must gain, 0 nats or more; got {threshold}")
    if absent is not None and (absent.dtype != torch.bool or absent.shape not in ((t,), (1, t), (b, t))):
        raise ValueError(f"absent says of each token whether it is, as bool of shape {(t,)} or {(b, t)}; got {absent.dtype} of shape "
                         f"{tuple(absent.shape)}")  # fmt: skip
    gone = torch.zeros(b, t, dtype=torch.bool, device=x.device) if absent is None else absent.expand(b, t)
    _check_finite(x, gone, "name such tokens, absent=~x.isfinite().flatten(2).all(-1)")
    noise = _randn(x, torch.Generator(x.device).manual_seed(0) if generator is None else generator)
    chosen = torch.zeros(b, t, dtype=torch.long, device=x.device)

    def scores(rows: Tensor, tokens: Tensor, length: int) -> Tensor:
        """(n, c): how likely token tokens[i] of sequence rows[i], of which `length` tokens are seen, is at each candidate."""
        k = torch.where(gone[rows, :length], schedule.levels, choices[chosen[rows, :length]])
        shown = torch.where(expand(gone[rows, :length], x), noise[rows, :length], expand(schedule.alpha(k), x) * x[rows, :length])
        denoise = model
        if isinstance(model, DiffusionForcing):
            denoise = model.denoiser(None if cond is None else cond[rows, :length])
        return _profile(denoise, schedule, shown, k, x[rows, tokens], tokens, choices) - threshold * (choices > choices[0])

    if isinstance(model, DiffusionForcing) and model.causal:
        everyone = torch.arange(b, device=x.device)
        for last in range(t):
            chosen[:, last] = _in_parts(scores, everyone, torch.full_like(everyone, last), last + 1).argmax(1)
        return torch.where(gone, schedule.levels, choices[chosen])
    tried, gain = ~gone, torch.full((b, t), -torch.inf, dtype=torch.float64, device=x.device)
    best, settled = chosen.clone(), gone.all(1)
    for _ in range(8 * t):
        rows, tokens = tried.nonzero().unbind(1)
        if not len(rows):
            break
        table = _in_parts(scores, rows, tokens, t)
        most, best[rows, tokens] = table.max(1)
        gain[rows, tokens] = most - table.gather(1, chosen[rows, tokens][:, None])[:, 0]
        moved, first = (gain > SETTLED).any(1), gain.argmax(1)
        chosen[moved, first[moved]] = best[moved, first[moved]]
        gain[moved, first[moved]] = 0.0
        # Whoever still gains is tried again; where none does, all are, once.
        suspects = gain > SETTLED
        settled |= ~moved & (tried == ~gone).all(1)
        tried = torch.where(suspects.any(1)[:, None], suspects, ~gone & ~settled[:, None])
    return torch.where(gone, schedule.levels, choices[chosen])


def _profile(
    denoise: Denoise, schedule: NoiseSchedule, x: Tensor, k: Tensor, y: Tensor, token: Tensor, candidates: Tensor
) -> Tensor:  # fmt: skip
    """(n, c) log-density of clean token plus noise at y (n, *event), for noise of each candidate, over that for the first candidate's.

    y is in the place token (n,) of x (n, t, *event); the others are as they stand, at levels k (n, t). With s = sigma / alpha and d
    numbers, d log p_s(y) / d log s = tr(d x0 / d y) - d + |y - x0|^2 / s^2 at a fixed y: one call at each candidate gives them all.
    """
    n, c = len(y), len(candidates)
    own = candidates.repeat(n)
    here = torch.arange(n * c, device=x.device), token.repeat_interleave(c)
    k = k.repeat_interleave(c, dim=0)
    k[here] = own
    shown = x.repeat_interleave(c, dim=0)
    with torch.enable_grad():
        noisy = (expand(schedule.alpha(own)[:, None], shown)[:, 0] * y.repeat_interleave(c, dim=0)).requires_grad_()
        pred = denoise(shown.index_put(here, noisy), k)
        numbers = pred.x0[here].flatten(1).sum(0).unbind()  # over sequences, which do not depend on each other
    trace = torch.zeros(n * c, dtype=torch.float64, device=x.device)
    for i, number in enumerate(numbers):
        (change,) = torch.autograd.grad(number, noisy, retain_graph=True)
        trace += change.flatten(1)[:, i].double()
    rate = schedule.alpha(own).double() * trace - len(numbers) + (pred.eps[here].flatten(1).double() ** 2).sum(1)
    rate, at = rate.view(n, c), (schedule.sigma(candidates).double() / schedule.alpha(candidates).double()).log()
    width = at.diff().where(candidates[:-1] > 0, 1.0)  # the rate grows like s^2 from level 0: its integral is half of where it gets to
    return torch.cat([rate.new_zeros(n, 1), ((rate[:, :-1] + rate[:, 1:]) / 2 * width).cumsum(1)], dim=1)


def _in_parts(scores: Callable[[Tensor, Tensor, int], Tensor], rows: Tensor, tokens: Tensor, length: int) -> Tensor:
    size = max(1, SEQUENCES // CANDIDATES)
    return torch.cat([scores(*part, length) for part in zip(rows.split(size), tokens.split(size), strict=True)])


def _choices(schedule: NoiseSchedule, candidates: Tensor | None) -> Tensor:
    """Ascending levels that a token may have: those given, or the rungs of a flow that ends where noise is WIDEST."""
    if candidates is None:
        place = schedule.place[: int(schedule.level_of(WIDEST)) + 1]
        return evenly(place, torch.zeros((), dtype=torch.long, device=place.device), CANDIDATES).unique()
    if candidates.ndim != 1 or len(schedule.check_k(candidates)) < 2 or not (candidates.diff() > 0).all():
        raise ValueError(f"candidates are two or more ascending levels, as schedule.ladder(24); got {candidates.tolist()}")
    return candidates


def _flow(schedule: NoiseSchedule, denoise: Denoise, x: Tensor, k: Tensor, steps: int, vectors: Tensor, exact: bool) -> Tensor:
    """Log-density of tokens x at levels k, (b, t): each goes up from its own level to K, along its velocity in the angle.

    In the angle atan(sigma / alpha) the velocity alpha eps - sigma x0 is smooth at both ends. The log-density falls by its divergence.
    """
    if steps < 1:
        raise ValueError(f"the flow takes at least one step; got steps={steps}")
    angle = schedule.angle
    rungs = evenly(schedule.place, k, min(steps, schedule.levels))
    velocity, divergence = _divergence(schedule, denoise, x, rungs[0], vectors, exact)
    total = torch.zeros_like(divergence)
    for low, high in itertools.pairwise(rungs):
        # Heun's method, but the velocity at a rung is that where Euler's step led: of second order too, for one call a step.
        turn = angle[high] - angle[low]
        step = expand(turn, x).to(x.dtype)
        velocity_high, divergence_high = _divergence(schedule, denoise, x + step * velocity, high, vectors, exact)
        x = x + step * (velocity + velocity_high) / 2
        total += turn * (divergence + divergence_high) / 2
        velocity, divergence = velocity_high, divergence_high
    prior = -0.5 * (x.double() ** 2 + math.log(2 * math.pi)).flatten(2).sum(-1)
    return torch.where(k < schedule.levels, prior + total, torch.zeros_like(total)).to(x.dtype)


def _divergence(schedule: NoiseSchedule, denoise: Denoise, x: Tensor, k: Tensor, vectors: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    """The velocity of tokens x at levels k in the angle, and its divergence of each token, (b, t), or by each vector, (n, b, t).

    vectors: (n, ...), each broadcastable to x; exact: one for each number, whose shares add up.
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        pred = denoise(x, k)
        velocity = expand(schedule.alpha(k), x) * pred.eps - expand(schedule.sigma(k), x) * pred.x0
    shares = torch.zeros(1 if exact else len(vectors), *k.shape, dtype=torch.float64, device=x.device)
    for i, vector in enumerate(vectors):
        (change,) = torch.autograd.grad(velocity, x, vector.expand_as(x), retain_graph=True)
        shares[0 if exact else i] += (vector * change).flatten(2).sum(-1)
    return velocity.detach(), shares[0] if exact else shares


def _vectors(like: Tensor, x: Tensor, probes: int | None, generator: Generator) -> Tensor:
    """(n, ...) vectors that measure a divergence: one for each number of `like`, or random signs of the shape of x."""
    if probes is not None:
        check_counts(probes=probes)
        signs = torch.randint(0, 2, (probes, *x.shape), generator=generator, device=x.device)
        return (2 * signs - 1).to(x.dtype)
    numbers = like.numel()
    if numbers > EXACT:
        raise ValueError(f"the exact trace takes a backward pass a step for each of {numbers} numbers, which is more than {EXACT}; "
                         "estimate it by random vectors, as probes=8")  # fmt: skip
    return torch.eye(numbers, dtype=x.dtype, device=x.device).view(numbers, *like.shape)


def _at_levels(schedule: NoiseSchedule, x: Tensor, k: Tensor | None, generator: Generator | None) -> tuple[Tensor, Tensor, Generator]:
    """Tokens with noise where they are absent, their levels (b, t), and a generator."""
    generator = torch.Generator(x.device).manual_seed(0) if generator is None else generator
    levels = _levels(schedule, x, k)
    return torch.where(expand(levels == schedule.levels, x), _randn(x, generator), x), levels, generator


def _levels(schedule: NoiseSchedule, x: Tensor, k: Tensor | None) -> Tensor:
    if x.ndim < 3:
        raise ValueError(f"tokens have shape (batch, tokens, *event); got {tuple(x.shape)}; add the missing axes")
    b, t = x.shape[:2]
    if k is not None and k.shape not in ((t,), (1, t), (b, t)):
        raise ValueError(f"k is the level of each token, of shape {(t,)} or {(b, t)}; got {tuple(k.shape)}")
    levels = torch.zeros(b, t, dtype=torch.long, device=x.device) if k is None else schedule.check_k(k).expand(b, t)
    _check_finite(x, levels == schedule.levels, f"give it level K={schedule.levels}, at which a token is absent")
    return levels


def _check_finite(x: Tensor, absent: Tensor, way: str) -> None:
    """Raise, with a way out, unless the numbers of all tokens that are not absent (b, t) are finite."""
    if at := first_not_finite(x.masked_fill(expand(absent, x), 0.0)):
        raise ValueError(f"x holds NaN or infinite values in tokens that are not absent, the first in sequence {at[0]}, token {at[1]}: "
                         f"{way}")  # fmt: skip


def forced_by(model: DiffusionForcing, cond: Tensor | None = None, generator: Generator | None = None) -> Forced:
    """How a model predicts each token given a past at other levels: in one pass if its backbone can, else token by token."""
    if model.traits.separate_past and model.causal:
        return lambda x, k, past_x, past_k: model.predict_forced(x, k, past_x, past_k, cond)
    return forced_by_denoiser(lambda x, k: model.predict(x, k, cond), model.schedule.levels, generator)


def forced_by_denoiser(denoise: Denoise, levels: int, generator: Generator | None = None) -> Forced:
    """The same for any denoiser (x, k) -> Prediction: the past as given, the token itself, and a future of pure noise."""

    def forced(x: Tensor, k: Tensor, past_x: Tensor, past_k: Tensor) -> Prediction:
        parts = []
        for token in range(x.shape[1]):
            noise = torch.cat([past_x[:, : token + 1], _randn(x[:, token + 1 :], generator)], dim=1)
            one = slice(token, token + 1)
            parts.append(_one_token(denoise, levels, past_x, past_k, noise, token)(x[:, one], k[:, one]))
        return Prediction(torch.cat([part.x0 for part in parts], dim=1), torch.cat([part.eps for part in parts], dim=1))

    return forced


def _one_token(denoise: Denoise, levels: int, past_x: Tensor, past_k: Tensor, future: Tensor, token: int) -> Denoise:
    """(x, k) (b, 1, ...) -> Prediction of one token, given those before it in past_x at past_k and noise in the place of later ones."""

    def predict(x: Tensor, k: Tensor) -> Prediction:
        absent = torch.full_like(past_k[:, token + 1 :], levels)
        tokens = torch.cat([past_x[:, :token], x, future[:, token + 1 :]], dim=1)
        pred = denoise(tokens, torch.cat([past_k[:, :token], k, absent], dim=1))
        return Prediction(pred.x0[:, token : token + 1], pred.eps[:, token : token + 1])

    return predict


def _term(
    schedule: NoiseSchedule, forced: Forced, past: Tensor, levels: Tensor, low: Tensor, high: Tensor, active: Tensor,
    generator: Generator | None,
) -> Tensor:  # fmt: skip
    """One rung of the chain of each token's own datum y = past_t, at level k: from `high` down to `low`, (b, t).

    Above the lowest rung, -KL(q(x^low | x^high, y) || p(x^low | x^high)); at the lowest, ln p(y | x^high).
    """
    y, k = past, levels
    high = torch.where(active, high, k)
    # Given y at level k, everything above is y scaled by alpha/alpha_k plus noise of variance s2.
    a_high, s_high = _from(schedule, k, high)
    a_low, s_low = _from(schedule, k, low)
    x_high = (expand(a_high, y) * y + expand(s_high.sqrt(), y) * _randn(y, generator)).to(y.dtype)
    pred = forced(x_high, high, past, levels)
    # What the model says of y: its mean given x_high and the predicted clean token.
    to_high = a_high * schedule.sigma(k) ** 2 / (a_high**2 * schedule.sigma(k) ** 2 + s_high)
    mean = expand(schedule.alpha(k), y) * pred.x0
    predicted = mean + expand(to_high, y) * (x_high - expand(a_high, y) * mean)
    error = ((y - predicted) ** 2).flatten(2).sum(-1)
    numbers = y[0, 0].numel()
    first = low == k
    # How far y may be from what the model says, were tokens of variance 1 and without a past: what noise alone leaves open at low
    # levels, where it matters. A model step as narrow as q's own would cost some 0.4 nats a number there, however fine the ladder.
    open_ = s_high / (s_high + a_high**2)
    # Lowest rung: a Gaussian around what the model says.
    log_p = -0.5 * (numbers * torch.log(2 * math.pi * open_) + error / open_)
    # Other rungs: two Gaussians, p's wider than q's by `ratio`, whose means differ by c (y - predicted) with c^2 / width_q = gain.
    gain = a_low**2 / s_low - a_high**2 / s_high
    ratio = 1 + gain * open_
    kl = 0.5 * (numbers * (torch.log(ratio) + 1 / ratio - 1) + gain * error / ratio)
    terms = torch.where(first, log_p, -kl)
    return torch.where(active, terms, torch.zeros_like(terms))


def _prior(schedule: NoiseSchedule, y: Tensor, k: Tensor) -> Tensor:
    """-KL(q(x^K | y) || N(0, 1)) of each token, 0 where the token is at K itself."""
    a, s = _from(schedule, k, torch.full_like(k, schedule.levels))
    numbers = y[0, 0].numel()
    kl = 0.5 * ((a**2) * (y**2).flatten(2).sum(-1) + numbers * (s - 1 - torch.log(s)))
    return torch.where(k < schedule.levels, -kl, torch.zeros_like(kl))


def _from(schedule: NoiseSchedule, k: Tensor, higher: Tensor) -> tuple[Tensor, Tensor]:
    """x^higher = a x^k + sqrt(s) noise, for higher >= k: returns a and s."""
    # Neighbouring levels differ in the fifth digit: their difference needs float64.
    a = schedule.alpha(higher).double() / schedule.alpha(k).double()
    return a, (schedule.sigma(higher).double() ** 2 - (a * schedule.sigma(k).double()) ** 2).clamp(min=1e-12)


def _randn(x: Tensor, generator: Generator | None) -> Tensor:
    return torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
