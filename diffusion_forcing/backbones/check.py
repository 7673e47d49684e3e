"""`check_backbone`: whether a network keeps what the library asks of one, tried out in about a second."""

from __future__ import annotations

import copy
import json
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..schedule import LEVELS
from .base import State, Traits, join_states, repeat_state, traits_of

BATCH, TOKENS = 3, 7
Parts = tuple[Tensor, Tensor, Tensor]  # tokens, their levels, conditions


@dataclass(frozen=True)
class Check:
    """What was checked, how it ended ("passed", "failed" or "not applicable"), and what that means."""

    name: str
    result: str
    note: str = ""


@dataclass(frozen=True)
class BackboneReport:
    """The checks of a network, in the order in which they were made. Prints as a table."""

    network: str
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(check.name for check in self.checks if check.result == "failed")

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    def __str__(self) -> str:
        rows = [("check", "result", ""), *((check.name, check.result, check.note) for check in self.checks)]
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        lines = [f"{name:<{widths[0]}}  {result:<{widths[1]}}  {note}".rstrip() for name, result, note in rows]
        return "\n".join([f"{self.network}: {len(self.failed)} of {len(self.checks)} checks failed", *lines])


def check_backbone(
    backbone: Any, *, event: int | Sequence[int] | None = None, cond: int | None = None, levels: int | None = None
) -> BackboneReport:
    """Try out on random tokens whether a network keeps what the library asks of one. Raises ValueError, with the table, if it does not.

    event: shape of a token, or how many numbers; cond: numbers of a token's condition; levels: K. What the network's `config` says need
    not be given. The weights of a copy are changed at random, since a fresh network that outputs zeros passes nearly everything.
    """
    if not callable(backbone) or isinstance(backbone, type):
        raise ValueError(f"check_backbone takes a network, an instance; got {backbone!r}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        report = BackboneReport(type(backbone).__name__, _run(backbone, event, cond, levels))
    if not report.ok:
        raise ValueError(f"this network does not keep {', '.join(report.failed)}\n{report}")
    return report


class _Failed(Exception):
    """A check that failed; says by what."""


class _NotApplicable(Exception):
    """A check that does not concern the network; says why."""


@dataclass(frozen=True)
class _Case:
    """A network with random weights, and the tokens to try it on."""

    net: Any
    original: Any
    traits: Traits
    event: tuple[int, ...]
    cond: int
    levels: int

    def parts(self, seed: int = 0, tokens: int = TOKENS) -> Parts:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(BATCH, tokens, *self.event, generator=generator)
        k = torch.randint(0, self.levels + 1, (BATCH, tokens), generator=generator)
        c = torch.randn(BATCH, tokens, self.cond, generator=generator)
        device = next((tensor.device for tensor in self.net.parameters()), x.device) if isinstance(self.net, nn.Module) else x.device
        return x.to(device), k.to(device), c.to(device)


def _run(backbone: Any, event: int | Sequence[int] | None, cond: int | None, levels: int | None) -> tuple[Check, ...]:
    try:
        traits = traits_of(backbone)
        note = _traits(backbone, traits)
    except Exception as error:
        return (Check("traits", "failed", _words(error)),)
    found = traits.event if event is None else (event,) if isinstance(event, int) else tuple(event)
    if found is None:
        raise ValueError("the network does not say what tokens it reads (`width` or `event` in its `config`); give their shape: "
                         "check_backbone(network, event=3)")  # fmt: skip
    width = traits.cond or 0 if cond is None else cond
    top = int(traits.config.get("levels", LEVELS)) if levels is None else levels
    for name, given, own in (("event", found, traits.event), ("cond", width, traits.cond), ("levels", top, traits.config.get("levels"))):
        if own is not None and given != own:
            raise ValueError(f"{name} is {own} in the network's config, and {given} was given; leave out {name}")
    case = _Case(_shaken(backbone), backbone, traits, found, width, top)
    checks = [Check("traits", "passed", note)]
    with torch.no_grad():
        for name, check, mend in CHECKS:
            if any(done.name == "call" and done.result == "failed" for done in checks):
                checks.append(Check(name, "not applicable", "the call comes first"))
                continue
            try:
                checks.append(Check(name, "passed", check(case) or ""))
            except _NotApplicable as reason:
                checks.append(Check(name, "not applicable", str(reason)))
            except Exception as error:  # whatever the network raises is a finding
                checks.append(Check(name, "failed", f"{_words(error)}. {mend}"))
    return tuple(checks)


def _shaken(backbone: Any) -> Any:
    """A copy with a little noise on every weight, for evaluation."""
    if not isinstance(backbone, nn.Module):
        return backbone
    net = copy.deepcopy(backbone).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return net


def _traits(backbone: Any, traits: Traits) -> str:
    """Raise unless what the network declares is valid."""
    choices = typing.get_args(typing.get_type_hints(Traits)["stabilization"])
    if traits.stabilization not in choices:
        raise _Failed(f"stabilization is one of {', '.join(choices)}; got {traits.stabilization!r}")
    if not isinstance(getattr(backbone, "causal", False), bool):
        raise _Failed(f"causal is True or False; got {backbone.causal!r}")
    try:
        json.dumps(traits.config)
    except TypeError as error:
        raise _Failed(f"config is written to a file, so it holds plain numbers, words and lists only: {error}") from error
    return "" if traits.event is not None else "config gives no width or event: roll-outs need a context then"


def _call(case: _Case) -> None:
    x, k, cond = case.parts()
    k = k.clamp(1, case.levels - 1)  # the ends are another check's
    result = case.net(x, k, cond)
    if not isinstance(result, tuple) or len(result) != 2:
        raise _Failed(f"a call returns (out, state); got a {type(result).__name__}")
    out = result[0]
    if not isinstance(out, Tensor) or out.shape != x.shape or out.dtype != x.dtype:
        got = f"{tuple(out.shape)} {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
        raise _Failed(f"out is like x, {tuple(x.shape)} {x.dtype}; got {got}")
    for part in ([part[:1] for part in (x, k, cond)], [part[:, :1] for part in (x, k, cond)]):
        if case.net(*part)[0].shape != part[0].shape:
            raise _Failed(f"out is like x, also for x of shape {tuple(part[0].shape)}")


def _every_level(case: _Case) -> None:
    x, k, cond = case.parts()
    for level in (0, 1, case.levels - 1, case.levels, None):
        out, _ = case.net(x, k if level is None else torch.full_like(k, level), cond)
        if not bool(torch.isfinite(out).all()):
            raise _Failed(f"NaN or infinite outputs at {'mixed levels' if level is None else f'level {level}'}")


def _deterministic(case: _Case) -> None:
    parts = case.parts()
    _same(case.net(*parts)[0], case.net(*parts)[0], "two calls alike give two outputs")


def _batch(case: _Case) -> None:
    parts, others = case.parts(), case.parts(1)
    mixed = tuple(torch.cat([part[:1], other[1:]]) for part, other in zip(parts, others, strict=True))
    _close(case.net(*(part[:1] for part in parts))[0], case.net(*parts)[0][:1], "a sequence alone and in a batch")
    modes = [False, True] if isinstance(case.net, nn.Module) else [False]
    for training in modes:
        outs = []
        for one in (parts, mixed):
            torch.manual_seed(0)  # dropout, if there is any, drops the same
            net = copy.deepcopy(case.net).train(training) if isinstance(case.net, nn.Module) else case.net
            outs.append(net(*one)[0][:1])
        _same(outs[0], outs[1], f"other neighbours in the batch{', in training,' if training else ''} change the output of a sequence")


def _reads(case: _Case, which: int, name: str) -> None:
    parts = case.parts()
    out, _ = case.net(*parts)
    for token in (0, TOKENS // 2, TOKENS - 1):
        changed = list(parts)
        changed[which] = parts[which].clone()
        now = changed[which][:, token]
        changed[which][:, token] = (now + 1 + case.levels // 2) % (case.levels + 1) if which == 1 else now + 1
        if not bool((case.net(*changed)[0][:, token] != out[:, token]).flatten(1).any(1).all()):
            raise _Failed(f"the output at token {token} does not depend on {name}")


def _condition(case: _Case) -> None:
    if not case.cond:
        raise _NotApplicable("the network has no condition")
    _reads(case, 2, "its condition")


def _state_rule(case: _Case) -> None:
    parts = case.parts()
    whole, _ = case.net(*parts)
    for split in (1, TOKENS // 2, TOKENS - 1):
        first, state = case.net(*(part[:, :split] for part in parts))
        rest, _ = case.net(*(part[:, split:] for part in parts), state)
        _close(rest, whole[:, split:], f"tokens from {split} on, after the state of those before, and within the whole")
        if case.traits.causal:
            _close(first, whole[:, :split], f"the first {split} tokens alone, and within the whole")
    state, kept = None, []
    for token in range(TOKENS):
        out, state = case.net(*(part[:, token : token + 1] for part in parts), state)
        kept.append(out)
    compared = slice(None) if case.traits.causal else slice(TOKENS - 1, None)
    _close(torch.cat(kept, 1)[:, compared], whole[:, compared], "token by token, and whole")


def _state_kept(case: _Case) -> None:
    parts, others = case.parts(), case.parts(1)
    _, state = case.net(*(part[:, :3] for part in parts))
    first, _ = case.net(*(part[:, 3:] for part in parts), state)
    case.net(*(part[:, 3:] for part in others), state)
    _same(case.net(*(part[:, 3:] for part in parts), state)[0], first, "a second call with the same state gives other numbers")


def _state_batch(case: _Case) -> None:
    parts = case.parts()
    before, now = [part[:, :4] for part in parts], [part[:, 4:] for part in parts]
    _, state = case.net(*before)
    leaves = _leaves(state)
    if not leaves and case.traits.causal:
        raise _Failed("the state after four tokens is None, so the past would be forgotten: roll-outs refuse it")
    if not leaves:
        raise _NotApplicable("the network keeps no state, so roll-outs with a past refuse it")
    for leaf in leaves:
        if leaf.ndim == 0 or len(leaf) != BATCH:
            raise _Failed(f"the first axis of a state is the batch, {BATCH} here; got a tensor of shape {tuple(leaf.shape)}")
    whole, _ = case.net(*now, state)
    joined = join_states(case.net(*(part[:1] for part in before))[1], case.net(*(part[1:] for part in before))[1])
    _close(case.net(*now, joined)[0], whole, "states of two parts of a batch, joined, and the state of the batch")
    repeated, _ = case.net(*(part.repeat_interleave(2, 0) for part in now), repeat_state(state, 2))
    _close(repeated, whole.repeat_interleave(2, 0), "each sequence of a state twice, and each output twice")


def _causal(case: _Case) -> str | None:
    parts, late = case.parts(), case.parts(1)
    _, state = case.net(*case.parts(2, tokens=2))
    for past in (None, state):
        out, _ = case.net(*parts, past)
        for token in (1, TOKENS // 2, TOKENS - 1):
            changed = [torch.cat([part[:, :token], other[:, token:]], 1) for part, other in zip(parts, late, strict=True)]
            other, _ = case.net(*changed, past)
            if torch.equal(out[:, :token], other[:, :token]):
                continue
            if not case.traits.causal:
                return "not declared, and earlier outputs do depend on later tokens"
            raise _Failed(f"changing tokens from {token} on changes the output of earlier ones by up to "
                          f"{_difference(out[:, :token], other[:, :token]):.2g}")  # fmt: skip
    if not case.traits.causal:
        return "not declared, but no output depends on a later token: set causal = True, and sampling takes its faster orders"
    return None


def _gradients(case: _Case) -> None:
    if not isinstance(case.net, nn.Module) or not list(case.net.parameters()):
        raise _NotApplicable("the network has no parameters")
    net = copy.deepcopy(case.net).train().requires_grad_(True)
    x, k, cond = case.parts()
    with torch.enable_grad():
        out, _ = net(x, k, cond)
        (out * torch.randn_like(out)).sum().backward()
    trained = {name for name, parameter in case.original.named_parameters() if parameter.requires_grad}
    grads = {name: parameter.grad for name, parameter in net.named_parameters() if name in trained}
    missing = [name for name, grad in grads.items() if grad is None]
    if missing:
        raise _Failed(f"no gradient reaches {', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}")
    bad = [name for name, grad in grads.items() if grad is not None and not bool(torch.isfinite(grad).all())]
    if bad:
        raise _Failed(f"the gradient of {', '.join(bad[:3])} is NaN or infinite")


def _forced(case: _Case) -> None:
    if not case.traits.separate_past:
        raise _NotApplicable("no method `forced`: no teacher forcing, no one-pass likelihood")
    (x, k, cond), (past_x, past_k, _) = case.parts(), case.parts(1)
    try:
        own = case.net.forced(x, k, cond, x, k)
    except ValueError as error:
        if case.traits.causal:
            raise
        raise _NotApplicable(f"`forced` refuses a network that is not causal: {error}") from error
    _close(own, case.net(x, k, cond)[0], "`forced` with the tokens' own past, and the plain call")
    other, slow = case.net.forced(x, k, cond, past_x, past_k), []
    for i in range(TOKENS):
        state = case.net(past_x[:, :i], past_k[:, :i], cond[:, :i])[1] if i else None
        slow.append(case.net(x[:, i : i + 1], k[:, i : i + 1], cond[:, i : i + 1], state)[0])
    _close(other, torch.cat(slow, 1), "`forced` with another past, and each token read after the state of that past")


def _prefill(case: _Case) -> None:
    if not case.traits.prefills:
        raise _NotApplicable("no method `prefill`")
    parts = case.parts()
    now = [part[:, 3:4] for part in parts]
    for state in (None, case.net(*(part[:, :3] for part in parts))[1]):
        context = case.net.prefill(now[0], state, now[2])
        _close(case.net(*now, context)[0], case.net(*now, state)[0], "a token after the prefilled context, and after the state")


def _wavefront(case: _Case) -> None:
    if not case.traits.wavefront:
        raise _NotApplicable("not declared")
    x, k, cond = case.parts()
    feature, z, outs = case.net.encode(x, case.net.level(k), cond), case.net.initial_state(BATCH), []
    for token in range(TOKENS):
        new, z = case.net.step(feature[:, token], z)
        outs.append(case.net.predict(new))
    _close(torch.stack(outs, 1), case.net(x, k, cond)[0], "encode, step and predict token by token, and the plain call")


def _rebuild(case: _Case) -> None:
    config, kind = case.traits.config, type(case.original)
    if not isinstance(case.net, nn.Module) or not config:
        raise _NotApplicable("no `config`: a saved model needs the network handed over")
    try:
        twin = kind(**config)
    except TypeError as error:
        if kind.__module__.startswith(__name__.partition(".")[0] + "."):
            raise
        raise _NotApplicable(f"`config` is not the constructor's arguments ({error}): hand over a network, not the class") from error
    device = next((tensor.device for tensor in case.net.parameters()), torch.device("cpu"))
    twin.to(device).eval().load_state_dict(case.net.state_dict())
    _same(twin(*case.parts())[0], case.net(*case.parts())[0], "a network built from `config`, with the same weights, gives other numbers")


CHECKS: tuple[tuple[str, Callable[[_Case], str | None], str], ...] = (
    ("call", _call, "Take (x, k, cond, state=None), and return out and the state after the last token"),
    ("every level", _every_level, "Levels go from 0 (clean) to K (noise), K included: K + 1 of them"),
    ("deterministic", _deterministic, "Drop out in training only: F.dropout(x, p, self.training)"),
    ("batch", _batch, "Use norms within a token (LayerNorm, GroupNorm over one token) in place of BatchNorm"),
    ("token", lambda case: _reads(case, 0, "the token"), "Let x reach the output"),
    ("level", lambda case: _reads(case, 1, "its level"), "Embed each token's own level k (b, t) and add it to the token's feature"),
    ("condition", _condition, "Let cond (b, t, c) reach the output, or build the network with cond=0"),
    ("state rule", _state_rule, "Begin from the given state, and return all that later tokens need of the past; norms and positions must "
                                "not depend on where a call begins"),
    ("state kept", _state_kept, "Make a new state in each call: sampling reads one state many times"),
    ("state batch", _state_batch, "Return a tensor, or tuples of tensors, each with the batch as first axis (of width 0 if there is "
                                   "nothing to keep)"),
    ("causal", _causal, "Mask attention, pad convolutions on the left only, norm no axis of time; or leave out causal = True"),
    ("gradients", _gradients, "Use each part, or do not build it; avoid roots and logarithms at 0"),
    ("forced", _forced, "Each token sees itself as (x, k) and those before it as (past_x, past_k)"),
    ("prefill", _prefill, "prefill(x, state, cond) holds what does not depend on the next token's x and k; a call takes it as state"),
    ("wavefront", _wavefront, "See `RNN`, or leave out wavefront = True"),
    ("rebuild", _rebuild, "`config` holds the constructor's arguments"),
)  # fmt: skip
"""Name of each check, the check, and how to mend a network that fails it."""


def _leaves(state: State) -> list[Tensor]:
    """Tensors of a state."""
    if state is None or isinstance(state, Tensor):
        return [] if state is None else [state]
    if not isinstance(state, (tuple, list)):
        raise _Failed(f"a state is a tensor, tuples of tensors, or None; got a {type(state).__name__}")
    return [leaf for part in state for leaf in _leaves(part)]


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def _close(one: Tensor, other: Tensor, what: str) -> None:
    """Raise unless two outputs agree to rounding."""
    if one.shape != other.shape:
        raise _Failed(f"{what}, have shapes {tuple(one.shape)} and {tuple(other.shape)}")
    if not _difference(one, other) <= 1e-5 + 1e-4 * float(other.abs().max()):
        raise _Failed(f"{what}, differ by up to {_difference(one, other):.2g}")


def _same(one: Tensor, other: Tensor, what: str) -> None:
    """Raise unless two outputs are the same bit for bit."""
    if not torch.equal(one, other):
        raise _Failed(f"{what}, by up to {_difference(one, other):.2g}")


def _words(error: Exception) -> str:
    """What an exception says, with its kind unless it is a finding of ours."""
    text = " ".join(str(error).split())
    return text if isinstance(error, _Failed) else f"{type(error).__name__}: {text}"[:300]
