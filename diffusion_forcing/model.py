"""The model: a backbone that reads noisy tokens, a noise schedule, and what the network predicts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .backbones import Backbone, State, Traits, batch_of, repeat_state, traits_of
from .checks import check_cond
from .parameterization import Prediction, check_parameterization, target, with_x0
from .preconditioning import Estimate, Filtered, Preconditioning
from .schedule import NoiseSchedule, expand
from .serialization import Pretrained
from .weighting import WEIGHTS, FusedSNR, Weight

Denoise = Callable[[Tensor, Tensor], Prediction]  # (x, k) -> Prediction: all that a sampler sees of a model


class Conditioned(NamedTuple):
    """The state of a model with a linear constraint or a Kalman filter: the network's, the last committed token, which the next one must
    follow, and what the filter keeps.
    """

    state: State
    last: Estimate | None
    filtered: Filtered | None


class DiffusionForcing(Pretrained):
    """A sequence model in which every token has its own noise level.

    backbone: (x, k, cond, state) -> (out, state). schedule: the forward process. parameterization: what the network outputs.
    weight: the loss weight of each token, by name or as a function. clip: bound on |x0| when predicting, if any (eps-prediction
    near level K needs one). codec: raw data to tokens and back, saved with the weights. preconditioning: input scaling by variance, a
    linear constraint between tokens, linear estimates; none by default. optional_cond: the model is also used without its condition (as
    classifier-free guidance does). The backbone then reads one number more a token: 1 where a condition is given, 0 where there is none,
    with zeros beside it.
    """

    def __init__(
        self, backbone: Backbone, schedule: NoiseSchedule, *, parameterization: str = "v", weight: str | Weight = "uniform",
        clip: float | None = None, codec: nn.Module | None = None, preconditioning: Preconditioning | None = None,
        optional_cond: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if isinstance(weight, str) and weight not in WEIGHTS:
            raise ValueError(f"unknown loss weight {weight!r}; choose from {', '.join(WEIGHTS)}, or pass a function")
        levels = traits_of(backbone).config.get("levels", schedule.levels)
        if levels != schedule.levels:
            raise ValueError(f"the backbone was built for K={levels} but the schedule has K={schedule.levels}; use the same levels")
        if clip is not None and not clip > 0:
            raise ValueError(f"clip bounds |x0| and must be positive; got {clip}")
        self.backbone = backbone
        self.schedule = schedule
        self.parameterization = check_parameterization(parameterization)
        self.weight: Weight = WEIGHTS[weight]() if isinstance(weight, str) else weight
        self.clip = clip
        self.codec = codec
        self.preconditioning = preconditioning or Preconditioning()
        self.preconditioning.check(parameterization, self.traits.causal)
        self.optional_cond = optional_cond
        self.autocast: torch.dtype | None = None
        """Format in which predictions compute the backbone, such as torch.bfloat16; None: that of its weights. Not saved."""
        smoother, reads = self.preconditioning.smoother, self.traits.cond
        self.cond_width = None if reads is None else reads - optional_cond - (0 if smoother is None else smoother.width)
        """Numbers of a token's condition; None where the backbone does not declare what it reads."""
        if optional_cond and (self.cond_width or 0) < 1:
            raise ValueError(f"with optional_cond=True the backbone reads one number more than a condition of c numbers has: build it with "
                             f"cond=c + 1, as its config says; got {reads}")  # fmt: skip

    @property
    def traits(self) -> Traits:
        """What the backbone declares of itself."""
        return traits_of(self.backbone)

    @property
    def causal(self) -> bool:
        """Whether predictions depend on earlier tokens only, and on no more of them than the state keeps.

        A linear constraint couples the tokens of a causal network with later ones; a filter reads all earlier ones.
        """
        return self.traits.causal and self.preconditioning.constraint is None and self.preconditioning.smoother is None

    @property
    def prefills(self) -> bool:
        """Whether what a single next token needs of the past may be computed once for all of its steps."""
        return self.traits.prefills and self.preconditioning.constraint is None and self.preconditioning.smoother is None

    @property
    def variance(self) -> Tensor | None:
        """Of each number of a token, (*event), where the model scales by it."""
        return self.preconditioning.variance

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.schedule.alpha_table.device

    def forward(
        self, x: Tensor, k: Tensor, cond: Tensor | None = None, *, noise: Tensor | None = None, past: Tensor | None = None,
        self_context: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The weighted squared error of each token, (b, t), averaged over the token's numbers.

        x: clean tokens (b, t, *event); k: level of each (b, t); cond: (b, t, c), None for none, or as `mask_cond` makes it where only some
        tokens have one; past: level at which later tokens see each, where it is not k.
        self_context: (b, t); where it is above 0, later tokens see the model's own one-step estimate of the token, made from that level,
        instead of the true one, noised to k as usual (as in Self Forcing). Such a token has no loss of its own. Without `past`.
        """
        if noise is not None and noise.shape != x.shape:
            raise ValueError(f"noise has the shape of x, {tuple(x.shape)}; got {tuple(noise.shape)}")
        if self_context is not None and past is not None:
            raise ValueError("self_context needs tokens with one level each; leave out past, or self_context")
        cond = self._check(x, k, cond)
        noise = torch.randn_like(x) if noise is None else noise
        context = x
        if self_context is not None:
            estimate = self._estimate(x, torch.where(self_context > 0, self_context, k), cond, noise)
            context = torch.where(expand(self_context > 0, x), estimate, x)
        noisy = self.schedule.add_noise(context, k, noise)
        if past is None:
            out, _ = self._output(noisy, k, cond, None)
        else:
            out = self._forced(noisy, k, cond, self.schedule.add_noise(x, past, noise), past)
        _, alpha, sigma = self.preconditioning.units(*self._amplitudes(x, k))
        error = (out - target(self.parameterization, self.preconditioning.normalized(x), noise, alpha, sigma)) ** 2
        extra = (past,) if isinstance(self.weight, FusedSNR) else ()
        weight = self.weight(self.schedule, k, self.parameterization, *extra)
        losses = weight * self.preconditioning.weigh(error).flatten(2).mean(-1)
        return losses if self_context is None else losses.masked_fill(self_context > 0, 0.0)

    @torch.no_grad()
    def _estimate(self, x: Tensor, k: Tensor, cond: Tensor, noise: Tensor) -> Tensor:
        """The model's one-step estimate of tokens noised to levels k (b, t)."""
        other = noise.flatten(1).roll(1, dims=1).view_as(noise)  # independent of the noise that is added afterwards
        kind = x.device.type
        # Without autocast's cache: weights it casts here, without gradients, must not serve the pass that learns.
        with torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False):
            return self.predict(self.schedule.add_noise(x, k, other), k, cond).x0

    def predict(self, x: Tensor, k: Tensor, cond: Tensor | None = None, state: State = None) -> Prediction:
        """Clean tokens and noise predicted for noisy tokens x (b, t, *event) at levels k (b, t), given a committed past."""
        cond = self._check(x, k, cond)
        self._check_state(state)
        out, _ = self._output(x, k, cond, state)
        return self.prediction_from(out, x, *self._amplitudes(x, k))

    def predict_forced(self, x: Tensor, k: Tensor, past_x: Tensor, past_k: Tensor, cond: Tensor | None = None) -> Prediction:
        """As predict, but each token sees the others as past_x at levels past_k (b, t). All tokens at once."""
        cond = self._check(x, k, cond)
        return self.prediction_from(self._forced(x, k, cond, past_x, past_k), x, *self._amplitudes(x, k))

    def absorb(
        self, x: Tensor, cond: Tensor | None = None, state: State = None, *, level: int | Tensor = 0, noise: Tensor | None = None
    ) -> State:
        """Commit tokens x (b, t, *event) to the past and return the new state.

        level: their noise level, one for all or (b, t). With `noise` they are noised to it first; without, they are taken as they are and
        only labelled with it.
        """
        k = torch.as_tensor(level, device=x.device).expand(x.shape[:2])
        cond = self._check(x, k, cond)
        self._check_state(state)
        x = x if noise is None else self.schedule.add_noise(x, k, noise)
        alpha, sigma = self._amplitudes(x, k)
        out, new, filtered = self._run(x, k, cond, state, alpha, sigma)
        if new is None:
            raise ValueError(f"{type(self.backbone).__name__} returns no state, so it cannot keep tokens that others follow: return (out, "
                             "state), a tensor or a tuple of tensors, batch first (of width 0 if the past is of no use to it); or roll out "
                             "without a past, Context(memory=0)")  # fmt: skip
        prepared = self.preconditioning
        if prepared.constraint is None and prepared.smoother is None:
            return new
        before = state.last if isinstance(state, Conditioned) else None
        last = None
        if prepared.constraint is not None:
            out = prepared.constrain(self.parameterization, out, x, alpha, sigma, before)
            last = prepared.last_estimate(self.parameterization, out, x, alpha, sigma)
        return Conditioned(new, last, filtered)

    def denoiser(self, cond: Tensor | None = None, state: State = None, *, cache: bool = False) -> Denoiser:
        """The function (x, k) -> Prediction that samplers take, with condition and past bound.

        cache: of a causal network, tokens that are clean up to the first noisy one are read once and not in every call: the same
        predictions sooner, along a pyramid. No gradient reaches these tokens.
        """
        return Denoiser(self, cond, state, cache=cache)

    def prediction_from(self, out: Tensor, x: Tensor, alpha: Tensor, sigma: Tensor) -> Prediction:
        """The prediction that the network's output stands for, of noisy tokens x at the given amplitudes."""
        prediction = self.preconditioning.to_prediction(self.parameterization, out, x, alpha, sigma)
        return prediction if self.clip is None else with_x0(prediction.x0.clamp(-self.clip, self.clip), x, alpha, sigma)

    def _output(self, x: Tensor, k: Tensor, cond: Tensor, state: State) -> tuple[Tensor, State]:
        """The network's output for noisy tokens, which satisfies the linear constraint where there is one, and its state."""
        alpha, sigma = self._amplitudes(x, k)
        before = state.last if isinstance(state, Conditioned) else None
        out, new, _ = self._run(x, k, cond, state, alpha, sigma)
        return self.preconditioning.constrain(self.parameterization, out, x, alpha, sigma, before), new

    def _run(self, x: Tensor, k: Tensor, cond: Tensor, state: State, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, State, Filtered | None]:
        """What the backbone returns for noisy tokens, its output and its state, and what a filter keeps of them."""
        prepared, past = self.preconditioning, None
        if isinstance(state, Conditioned):
            state, past = state.state, state.filtered
        scaled, (cond, filtered) = prepared.scale(x, alpha, sigma), prepared.build_cond(x, alpha, sigma, cond, past)
        with nullcontext() if self.autocast is None else torch.autocast(x.device.type, self.autocast):
            returned = self.backbone(scaled, k, cond, state)
        if not isinstance(returned, tuple) or len(returned) != 2 or getattr(returned[0], "shape", None) != x.shape:
            parts = returned if isinstance(returned, tuple) else (returned,)
            got = ", ".join(str(tuple(part.shape)) if isinstance(part, Tensor) else type(part).__name__ for part in parts)
            raise ValueError(f"{type(self.backbone).__name__} should return (out, state), out of its tokens' shape {tuple(x.shape)} and "
                             f"state None if it keeps nothing; it returned {got}. check_backbone(network) tries it out")  # fmt: skip
        out, new = returned
        return (out if self.autocast is None else out.to(x.dtype)), new, filtered

    def _forced(self, x: Tensor, k: Tensor, cond: Tensor, past_x: Tensor, past_k: Tensor) -> Tensor:
        if self.preconditioning.smoother is not None:
            raise ValueError("a model with a smoother or filter as input reads each token at one level, so its past cannot have others; "
                             "build it without for teacher forcing and likelihoods (mazes: --task.no-wiener-smoother)")  # fmt: skip
        if not self.traits.separate_past:
            raise ValueError(
                f"{type(self.backbone).__name__} has no method `forced(x, k, cond, past_x, past_k)`, which a past at other levels "
                "than the tokens' own needs (teacher forcing, likelihoods); use RNN or a causal Transformer, or add it"
            )
        scale = self.preconditioning.scale
        scaled, past = scale(x, *self._amplitudes(x, k)), scale(past_x, *self._amplitudes(past_x, past_k))
        return self.backbone.forced(scaled, k, cond, past, past_k)  # type: ignore[attr-defined]

    def _amplitudes(self, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return expand(self.schedule.alpha(k), x), expand(self.schedule.sigma(k), x)

    def _check_state(self, state: State) -> None:
        smoother = self.preconditioning.smoother
        if state is not None and smoother is not None and not smoother.causal:
            raise ValueError("a model with a smoother reads the whole sequence at once, of which a state keeps too little; give known "
                             "tokens at level 0 (`pin`) instead")  # fmt: skip

    def _check(self, x: Tensor, k: Tensor, cond: Tensor | None) -> Tensor:
        """Shapes agree; returns cond, zero numbers wide where there is none."""
        if x.ndim < 3:
            raise ValueError(f"tokens have shape (batch, tokens, *event); got {tuple(x.shape)}; add the missing axes")
        if k.shape != x.shape[:2]:
            raise ValueError(f"k gives each token its level: expected shape {tuple(x.shape[:2])}, got {tuple(k.shape)}")
        if k.device.type == "cpu" and not torch.compiler.is_compiling():  # on other devices the check would wait for the device
            self.schedule.check_k(k)
        traits = self.traits
        if traits.event is not None and x.shape[2:] != traits.event:
            expected = f"{traits.event[0]} numbers" if len(traits.event) == 1 else f"shape {traits.event}"
            raise ValueError(f"the backbone reads tokens of {expected}; got tokens of shape {tuple(x.shape[2:])}")
        return self.read_cond(x, cond)

    def read_cond(self, x: Tensor, cond: Tensor | None) -> Tensor:
        """The condition of tokens x (b, t, *event) as the backbone reads it, but for features of the tokens themselves.

        None: zero numbers a token; with `optional_cond`, zeros whose indicator says that there is none.
        """
        width, optional = self.cond_width, self.optional_cond
        if cond is None or (optional and not cond.shape[-1]):
            cond = x.new_zeros(*x.shape[:2], (width or 0) + 1 if optional else 0)
        check_cond(cond, x.shape[:2], width, optional)
        return F.pad(cond, (0, 1), value=1.0) if optional and cond.shape[-1] == width else cond


def mask_cond(cond: Tensor, given: Tensor) -> Tensor:
    """A condition (b, t, c) that only some tokens have: (b, t, c + 1), zeros where there is none, and whether there is one.

    given: bool, of each sequence (b,) or token (b, t). For models with `optional_cond`. Where it is False, cond may hold anything.
    """
    if given.dtype != torch.bool or given.shape not in (cond.shape[:1], cond.shape[:2]):
        raise ValueError(f"given says for each sequence (b,) or token (b, t) whether it has a condition, as bool; got {given.dtype} of "
                         f"shape {tuple(given.shape)} for cond {tuple(cond.shape)}")  # fmt: skip
    shown = given.view(*given.shape, *(1,) * (3 - given.ndim)).expand(*cond.shape[:2], 1)
    return torch.cat([torch.where(shown, cond, 0.0), shown.to(cond)], dim=-1)


class Denoiser:
    """(x, k) -> Prediction: a model with its condition and its past bound.

    Bound to b sequences it also takes n*b of them, n copies of each beside one another, as guidance by several draws asks.
    """

    def __init__(self, model: DiffusionForcing, cond: Tensor | None = None, state: State = None, *, cache: bool = False) -> None:
        self.model = model
        self.cond = cond
        self.state = state
        self.cache = cache and model.traits.causal
        # By number of sequences: their leading clean tokens, and the state after these.
        self._clean: dict[int, tuple[Tensor, State]] = {}
        # Of how many sequences, of which state and condition; the prefilled state itself.
        self._prefilled: tuple[int, State, Tensor | None, State] | None = None

    def __call__(self, x: Tensor, k: Tensor) -> Prediction:
        cond, state = self.bound(len(x))
        if x.shape[1] == 1 and self.model.prefills and not torch.is_grad_enabled():
            # A single token has the same past in every step. (Not with gradients, which may be of the past or of weights that change.)
            cond = self.model._check(x, k, cond)
            kept = self._prefilled
            if kept is None or kept[0] != len(x) or kept[1] is not self.state or kept[2] is not self.cond:
                kept = len(x), self.state, self.cond, self.model.backbone.prefill(x, state, cond)  # type: ignore[attr-defined]
                self._prefilled = kept
            state = kept[3]
        clean = int((k == 0).all(0)[:-1].long().cumprod(0).sum()) if self.cache else 0
        return self._after(clean, x, k, cond, state) if clean else self.model.predict(x, k, cond, state)

    def _after(self, clean: int, x: Tensor, k: Tensor, cond: Tensor | None, state: State) -> Prediction:
        """The prediction for tokens of which the first `clean` are, which are read only once."""
        known, rest = x[:, :clean], slice(clean, None)
        cond = self.model.read_cond(x, cond)
        tokens, after = self._clean.get(len(x), (x[:, :0], state))
        done = tokens.shape[1]
        if done > clean or not torch.equal(tokens, known[:, :done]):
            done, after = 0, state
        if done < clean:
            with torch.no_grad():
                after = self.model.absorb(known[:, done:], cond[:, done:clean], after)
            self._clean[len(x)] = known.detach().clone(), after
        x0, eps, grad = self.model.predict(x[:, rest], k[:, rest], cond[:, rest], after)
        return Prediction(torch.cat([known, x0], dim=1), torch.cat([torch.zeros_like(known), eps], dim=1), grad)

    def check(self, x: Tensor, k: Tensor) -> None:
        """Raise, as a call would, if tokens x at levels k (t,) do not go with the model or the condition."""
        self.model._check(x, k.expand(x.shape[:2]), self.bound(len(x))[0])

    def bound(self, n: int) -> tuple[Tensor | None, State]:
        """Condition and state for n sequences: repeated, where n is a multiple of those bound."""
        bound = batch_of(self.state) if self.cond is None else len(self.cond)
        if bound is None or bound == n:
            return self.cond, self.state
        if n % bound:
            raise ValueError(f"the denoiser is bound to {bound} sequences and cannot serve {n}; use a multiple")
        return repeat_state(self.cond, n // bound), repeat_state(self.state, n // bound)
