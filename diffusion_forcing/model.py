"""The model: a backbone that reads noisy tokens, a noise schedule, and what the network predicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .backbones import Backbone, State
from .checks import check_divides
from .parameterization import Prediction, check_parameterization, target, to_prediction, with_x0
from .preconditioning import Joints, Smoother
from .schedule import NoiseSchedule, expand
from .serialization import Pretrained
from .weighting import WEIGHTS, FusedSNR, Weight

Denoise = Callable[[Tensor, Tensor], Prediction]  # (x, k) -> Prediction: all that a sampler sees of a model


class DiffusionForcing(Pretrained):
    """A sequence model in which every token has its own noise level.

    backbone: (x, k, cond, state) -> (out, state). schedule: the forward process. parameterization: what the network outputs.
    weight: the loss weight of each token, by name or as a function. clip: bound on |x0| when predicting, if any (eps-prediction
    near level K needs one). codec: raw data to tokens and back, saved with the weights. variance: of each number of a token,
    (*event), where they differ widely: predicting v or x0 then works in units in which each number has variance 1, although the noise
    is the same for all. What the network outputs and reads stays of size 1 at every level. joints: laws that
    tie each token to the next, which predictions are made to obey. smoother: linear guesses over the whole sequence, which the backbone
    reads as part of its condition. Both are for models that see everything. emphasis: by which power of its variance each number counts
    in the loss; 0: all alike.
    """

    variance: Tensor | None

    def __init__(
        self, backbone: Backbone, schedule: NoiseSchedule, *, parameterization: str = "v", weight: str | Weight = "uniform",
        clip: float | None = None, codec: nn.Module | None = None, variance: Tensor | None = None,
        joints: Joints | None = None, smoother: Smoother | None = None, emphasis: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        if isinstance(weight, str) and weight not in WEIGHTS:
            raise ValueError(f"unknown loss weight {weight!r}; choose from {', '.join(WEIGHTS)}, or pass a function")
        levels = getattr(backbone, "config", {}).get("levels", schedule.levels)
        if levels != schedule.levels:
            raise ValueError(f"the backbone was built for K={levels} but the schedule has K={schedule.levels}; use the same levels")
        if clip is not None and not clip > 0:
            raise ValueError(f"clip bounds |x0| and must be positive; got {clip}")
        if variance is not None and parameterization == "eps":
            raise ValueError("variance is for predicting v or x0; with parameterization='eps' leave it out")
        if variance is not None and not (variance > 0).all():
            raise ValueError("variance must be positive for each number of a token; let the codec drop numbers that never vary")
        self.backbone = backbone
        self.schedule = schedule
        self.register_buffer("variance", None if variance is None else variance.float().clone())
        self.parameterization = check_parameterization(parameterization)
        self.weight: Weight = WEIGHTS[weight]() if isinstance(weight, str) else weight
        self.clip = clip
        self.codec = codec
        self.emphasis = emphasis
        if joints is not None and (self.causal or variance is None):
            raise ValueError("joints reach back from later tokens, by what noise leaves open: they need a variance and a backbone that "
                             "sees everything (causal=False)")  # fmt: skip
        if smoother is not None and self.causal:
            raise ValueError("smoothing looks at later tokens; a causal model cannot have it")
        self.joints = joints
        self.smoother = smoother

    @property
    def causal(self) -> bool:
        """Whether no output depends on later tokens."""
        return getattr(self.backbone, "causal", False)

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.schedule.alpha_table.device

    def forward(
        self, x: Tensor, k: Tensor, cond: Tensor | None = None, *, noise: Tensor | None = None, past: Tensor | None = None,
        imagined: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The weighted squared error of each token, (b, t), averaged over the token's numbers.

        x: clean tokens (b, t, *event); k: level of each (b, t); past: level at which later tokens see each, where it is not k.
        With a past, k and noise may be of n noisy versions of each sequence, beside one another, which learn from one reading of the past:
        (n b, t); so is then what is returned.
        imagined: (b, t), where above 0 the token is not read as it is, but as the model itself makes it out at that level, in one step. It
        is then what others see, labelled k, and has no error of its own. Without a past.
        """
        if past is not None and len(k) > len(x):
            check_divides(len(x), len(k), "k gives each noisy version of a sequence its levels, as many of each")
            x, cond = repeat_state(x, len(k) // len(x)), repeat_state(cond, len(k) // len(x))
        if past is not None and (len(past) < 1 or len(x) % len(past) or (noise is not None and noise.shape != x.shape)):
            raise ValueError(f"noise is as large as the noisy versions, and each sequence has one past; got {len(k)} versions, "
                             f"noise of {None if noise is None else len(noise)} and {len(past)} pasts")  # fmt: skip
        cond = self._check(x, k, cond)
        noise = torch.randn_like(x) if noise is None else noise
        alpha, sigma = self._amplitudes(x, k)
        noisy = alpha * x + sigma * noise
        if imagined is not None:
            if past is not None:
                raise ValueError("tokens are imagined where each has one level; leave out the past, or what is imagined")
            noisy = torch.where(
                expand(imagined > 0, x),
                alpha * self._imagine(x, torch.where(imagined > 0, imagined, k), cond, noise) + sigma * noise,
                noisy,
            )
        if past is None:
            out, _ = self.backbone(self._scaled(noisy, k), k, self._told(noisy, alpha, sigma, cond))
            out = self._joined(out, noisy, alpha, sigma)
        else:
            each = len(x) // len(past)
            out = self._forced(noisy, k, cond, self.schedule.add_noise(x[::each], past, noise[::each]), past)
        clean, (_, alpha, sigma) = x, self._units(alpha, sigma)
        if self.variance is not None:
            clean = x / self.variance.sqrt()
        error = (out - target(self.parameterization, clean, noise, alpha, sigma)) ** 2
        if self.emphasis and self.variance is not None:
            counts = self.variance**self.emphasis
            error = error * (counts / counts.mean())
        if isinstance(self.weight, FusedSNR):
            weight = self.weight(self.schedule, k, self.parameterization, past if past is None else repeat_state(past, len(k) // len(past)))
        else:
            weight = self.weight(self.schedule, k, self.parameterization)
        losses = weight * error.flatten(2).mean(-1)
        return losses if imagined is None else losses.masked_fill(imagined > 0, 0.0)

    @torch.no_grad()
    def _imagine(self, x: Tensor, k: Tensor, cond: Tensor, noise: Tensor) -> Tensor:
        """What the model makes of tokens noised to levels k (b, t), in one step."""
        other = noise.flatten(1).roll(1, dims=1).view_as(noise)  # than what they are noised with afterwards
        kind = x.device.type
        # Without autocast's cache: what it keeps of weights here, without gradients, must not serve the pass that learns.
        with torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False):
            return self.predict(self.schedule.add_noise(x, k, other), k, cond).x0

    def predict(self, x: Tensor, k: Tensor, cond: Tensor | None = None, state: State = None) -> Prediction:
        """What the model believes of noisy tokens x (b, t, *event) at levels k (b, t), given a committed past."""
        cond = self._check(x, k, cond)
        self._check_state(state)
        alpha, sigma = self._amplitudes(x, k)
        out, _ = self.backbone(self._scaled(x, k), k, self._told(x, alpha, sigma, cond), state)
        return self.prediction_from(self._joined(out, x, alpha, sigma), x, alpha, sigma)

    def predict_forced(self, x: Tensor, k: Tensor, past_x: Tensor, past_k: Tensor, cond: Tensor | None = None) -> Prediction:
        """As predict, but each token sees the others as past_x at levels past_k (b, t). All tokens at once."""
        cond = self._check(x, k, cond)
        return self._prediction(self._forced(x, k, cond, past_x, past_k), x, k)

    def absorb(
        self, x: Tensor, cond: Tensor | None = None, state: State = None, *, level: int | Tensor = 0, noise: Tensor | None = None
    ) -> State:
        """Commit tokens x (b, t, *event) to the past and return the new state.

        level is the doubt about them, one for all or (b, t): with `noise` they are noised to it, without they are taken as they
        stand and only labelled with it.
        """
        k = torch.as_tensor(level, device=x.device).expand(x.shape[:2])
        cond = self._check(x, k, cond)
        self._check_state(state)
        x = x if noise is None else self.schedule.add_noise(x, k, noise)
        _, state = self.backbone(self._scaled(x, k), k, self._told(x, *self._amplitudes(x, k), cond), state)
        return state

    def denoiser(self, cond: Tensor | None = None, state: State = None) -> Denoiser:
        """The function (x, k) -> Prediction that a sampler wants, with condition and past bound."""
        return Denoiser(self, cond, state)

    def _forced(self, x: Tensor, k: Tensor, cond: Tensor, past_x: Tensor, past_k: Tensor) -> Tensor:
        if not hasattr(self.backbone, "forced"):
            raise ValueError(
                f"{type(self.backbone).__name__} has no method `forced(x, k, cond, past_x, past_k)`, which a past at other levels "
                "than the tokens' own needs (teacher forcing, likelihoods); use RNN or a causal Transformer, or add it"
            )
        past_scaled = self._scaled(past_x, past_k)
        if len(x) > len(past_x) and not getattr(self.backbone, "shares_past", False):
            past_scaled, past_k = repeat_state(past_scaled, len(x) // len(past_x)), repeat_state(past_k, len(x) // len(past_x))
        return self.backbone.forced(self._scaled(x, k), k, cond, past_scaled, past_k)

    def _amplitudes(self, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return expand(self.schedule.alpha(k), x), expand(self.schedule.sigma(k), x)

    def _units(self, alpha: Tensor, sigma: Tensor) -> tuple[Tensor | float, Tensor, Tensor]:
        """Size of noisy tokens, and the amplitudes of signal and noise in units of it: alpha and sigma themselves for variance 1."""
        if self.variance is None:
            return 1.0, alpha, sigma
        size = (alpha**2 * self.variance + sigma**2).sqrt()
        return size, alpha * self.variance.sqrt() / size, sigma / size

    def scaled(self, x: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Noisy tokens as the backbone reads them."""
        return x if self.variance is None else x / self._units(alpha, sigma)[0]

    def _scaled(self, x: Tensor, k: Tensor) -> Tensor:
        return x if self.variance is None else self.scaled(x, *self._amplitudes(x, k))

    def _told(self, x: Tensor, alpha: Tensor, sigma: Tensor, cond: Tensor) -> Tensor:
        """The condition as the backbone reads it: with what smoothing says of the noisy tokens."""
        if self.smoother is None:
            return cond
        return torch.cat([cond, self.smoother(x, _once(alpha), _once(sigma))], dim=-1)

    def _joined(self, out: Tensor, x: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """The backbone's output for noisy tokens x, corrected so that the clean tokens it says obey the laws of the joints."""
        if self.joints is None:
            return out
        assert self.variance is not None
        root = self.variance.sqrt()
        size, own_alpha, own_sigma = self._units(alpha, sigma)
        x0 = (out if self.parameterization == "x0" else own_alpha * x / size - own_sigma * out) * root
        pull = self.joints.pull(x0, self.variance * _once(own_sigma) ** 2)
        return out - root * own_sigma**2 * pull if self.parameterization == "x0" else out + own_sigma * root * pull

    def _prediction(self, out: Tensor, x: Tensor, k: Tensor) -> Prediction:
        return self.prediction_from(out, x, *self._amplitudes(x, k))

    def prediction_from(self, out: Tensor, x: Tensor, alpha: Tensor, sigma: Tensor) -> Prediction:
        """What the backbone's output says of noisy tokens x at the given amplitudes."""
        if self.variance is None:
            prediction = to_prediction(self.parameterization, out, x, alpha, sigma)
        else:
            size, own_alpha, own_sigma = self._units(alpha, sigma)
            within = to_prediction(self.parameterization, out, x / size, own_alpha, own_sigma)
            prediction = Prediction(torch.where(sigma == 0, x, within.x0 * self.variance.sqrt()), within.eps)
        if self.clip is None:
            return prediction
        return with_x0(prediction.x0.clamp(-self.clip, self.clip), x, alpha, sigma)

    def _check_state(self, state: State) -> None:
        if state is not None and (self.joints is not None or self.smoother is not None):
            raise ValueError("a model with joints or a smoother looks at the whole sequence at once, of which a state keeps too little; "
                             "give what is known as tokens at level 0 (`pin`) instead")  # fmt: skip

    def _check(self, x: Tensor, k: Tensor, cond: Tensor | None) -> Tensor:
        """Shapes agree; returns cond, zero numbers wide where there is none."""
        if x.ndim < 3:
            raise ValueError(f"tokens have shape (batch, tokens, *event); got {tuple(x.shape)}; add the missing axes")
        if k.shape != x.shape[:2]:
            raise ValueError(f"k gives each token its level: expected shape {tuple(x.shape[:2])}, got {tuple(k.shape)}")
        if k.device.type == "cpu" and not torch.compiler.is_compiling():  # elsewhere looking would make the device wait
            self.schedule.check_k(k)
        config: dict[str, Any] = getattr(self.backbone, "config", {})
        event = event_of(self.backbone)
        if event is not None and x.shape[2:] != event:
            said = f"{event[0]} numbers" if len(event) == 1 else f"shape {event}"
            raise ValueError(f"the backbone reads tokens of {said}; got tokens of shape {tuple(x.shape[2:])}")
        if cond is None:
            cond = x.new_zeros(*x.shape[:2], 0)
        if cond.shape[:2] != x.shape[:2]:
            raise ValueError(f"cond covers {tuple(cond.shape[:2])} (batch, tokens) but x is {tuple(x.shape[:2])}")
        own = 0 if self.smoother is None else self.smoother.width
        if cond.shape[-1] + own != config.get("cond", cond.shape[-1] + own):
            raise ValueError(f"the backbone reads conditions of {config['cond'] - own} numbers a token; got {cond.shape[-1]}")
        return cond


class Denoiser:
    """(x, k) -> Prediction: a model with its condition and its past bound.

    Bound to b sequences it also takes n*b of them, n copies of each beside one another, as guidance by several draws asks.
    """

    def __init__(self, model: DiffusionForcing, cond: Tensor | None = None, state: State = None) -> None:
        self.model = model
        self.cond = cond
        self.state = state
        self._ready: tuple[int, State, Tensor | None, State] | None = None  # for how many sequences, of which state and condition, and what

    def __call__(self, x: Tensor, k: Tensor) -> Prediction:
        cond, state = self.bound(len(x))
        if x.shape[1] == 1 and hasattr(self.model.backbone, "ready") and not torch.is_grad_enabled():
            # A token that comes alone meets the same past at every step: what it needs of that is worked out once. (Not where gradients
            # are asked for, which may be of the past or of weights that change.)
            cond = self.model._check(x, k, cond)
            if self._ready is None or self._ready[0] != len(x) or self._ready[1] is not self.state or self._ready[2] is not self.cond:
                self._ready = len(x), self.state, self.cond, self.model.backbone.ready(x, state, cond)
            state = self._ready[3]
        return self.model.predict(x, k, cond, state)

    def check(self, x: Tensor, k: Tensor) -> None:
        """Raise, as a call would, if tokens x at levels k (t,) do not go with the model or the condition."""
        self.model._check(x, k.expand(x.shape[:2]), self.bound(len(x))[0])

    def bound(self, n: int) -> tuple[Tensor | None, State]:
        """Condition and state for n sequences: copied, where n is a multiple of those bound."""
        bound = self.cond if self.cond is not None else _first_tensor(self.state)
        if bound is None or len(bound) == n:
            return self.cond, self.state
        if n % len(bound):
            raise ValueError(f"the denoiser is bound to {len(bound)} sequences and cannot serve {n}; use a multiple")
        return repeat_state(self.cond, n // len(bound)), repeat_state(self.state, n // len(bound))


def event_of(backbone: Any) -> tuple[int, ...] | None:
    """Shape of the tokens that a backbone reads, if its config says so: by `event`, or `width` where they are vectors."""
    config = getattr(backbone, "config", {})
    if "event" in config:
        return tuple(config["event"])
    return (config["width"],) if "width" in config else None


def repeat_state(state: State, copies: int) -> State:
    """Each sequence of a state `copies` times, beside one another: (b, ...) to (b*copies, ...)."""
    if state is None:
        return None
    if isinstance(state, Tensor):
        return state.repeat_interleave(copies, dim=0)
    parts = [repeat_state(part, copies) for part in state]
    return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)


def join_states(one: State, other: State) -> State:
    """Two states of one make as one: (a, ...) and (b, ...) to (a + b, ...)."""
    if isinstance(one, Tensor):
        return torch.cat([one, other])
    parts = [join_states(*pair) for pair in zip(one, other, strict=True)]
    return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)


def _once(amplitude: Tensor) -> Tensor:
    """(b, t, ...) to (1, t, ...) where all sequences are alike: what depends on levels only is then worked out once for all."""
    return amplitude[:1] if len(amplitude) > 1 and bool((amplitude == amplitude[:1]).all()) else amplitude


def _first_tensor(state: State) -> Tensor | None:
    while state is not None and not isinstance(state, Tensor):
        state = state[0]
    return state
