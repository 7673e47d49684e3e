"""What the library asks of a network, and what it does with a network's state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

State = Any  # what a network keeps of the past: a tensor, a (named) tuple of tensors and tuples, or None; batch first


class Backbone(Protocol):
    """A network that reads noisy tokens with their levels. Reading a sequence whole equals reading a prefix, then the rest with its state.

    Only the call is required. A network may also declare what `Traits` names; one that lacks a trait gets its default.
    """

    def __call__(self, x: Tensor, k: Tensor, cond: Tensor, state: State = None) -> tuple[Tensor, State]:
        """x: (b, t, *event) noisy tokens; k: (b, t) their levels; cond: (b, t, c). Returns out, shaped as x, and the new state."""
        ...


@dataclass(frozen=True)
class Traits:
    """What a network declares of itself, each with a default. `traits_of` is the one place where a network is asked."""

    config: dict[str, Any]
    """Plain numbers from which the same network can be built again; default: none, and it cannot be saved by name."""
    causal: bool = False
    """No output depends on later tokens."""
    stabilization: Literal["path", "noise", "label"] = "noise"
    """How generated tokens best join the context (see `sampling.Context`)."""
    separate_past: bool = False
    """`forced(x, k, cond, past_x, past_k)`: all tokens at once, each given a past at other levels (teacher forcing)."""
    prefills: bool = False
    """`prefill(x, state, cond)`: what a single next token needs of the past, computed once for all of its denoising steps."""
    blocks: tuple[nn.Module, ...] = ()
    """`blocks`: parts that are large and alike, which FSDP shards one by one."""
    grows: bool = False
    """`grow(weights, config)`: weights of a smaller network of the same kind, completed for this one (see `SpaceTime.grow`)."""
    wavefront: bool = False
    """The parts of a recurrent cell are callable one by one (`encode`, `step`, `predict`, `initial_state`), for `orders.wavefront`."""

    @property
    def event(self) -> tuple[int, ...] | None:
        """Shape of the tokens that the network reads, by `event` of its config, or `width` where they are vectors."""
        if "event" in self.config:
            return tuple(self.config["event"])
        return (self.config["width"],) if "width" in self.config else None

    @property
    def cond(self) -> int | None:
        """Width of the condition that the network reads; None: not declared."""
        return self.config.get("cond")


class BackboneConfig(Protocol):
    """Options of a network, each typed once: a frozen dataclass whose fields are the keyword arguments of the network's constructor."""

    @property
    def causal(self) -> bool:
        """No output depends on later tokens."""
        return True

    def build(
        self, event: tuple[int, ...], cond: int, levels: int, codec: nn.Module | None = None, variance: Tensor | None = None
    ) -> nn.Module:
        """The network for tokens of shape `event` and conditions of `cond` numbers, with K = `levels`.

        codec: makes the tokens; variance: (*event), by whose root they are divided before the network reads them, if any.
        """
        ...


def traits_of(backbone: Any) -> Traits:
    """What a network declares of itself; what it does not declare has its default."""
    return Traits(
        config=dict(getattr(backbone, "config", {})),
        causal=bool(getattr(backbone, "causal", False)),
        stabilization=getattr(backbone, "stabilization", "noise"),
        separate_past=callable(getattr(backbone, "forced", None)),
        prefills=callable(getattr(backbone, "prefill", None)),
        blocks=tuple(getattr(backbone, "blocks", ())),
        grows=callable(getattr(backbone, "grow", None)),
        wavefront=bool(getattr(backbone, "wavefront", False)),
    )


def repeat_state(state: State, copies: int) -> State:
    """Each sequence of a state `copies` times, beside one another: (b, ...) to (b*copies, ...)."""
    if state is None:
        return None
    if isinstance(state, Tensor):
        return state.repeat_interleave(copies, dim=0)
    return _rebuild(state, [repeat_state(part, copies) for part in state])


def select_state(state: State, index: Tensor) -> State:
    """The sequences of a state that index (n,) names, in its order: (b, ...) to (n, ...)."""
    if state is None:
        return None
    if isinstance(state, Tensor):
        return state[index]
    return _rebuild(state, [select_state(part, index) for part in state])


def join_states(one: State, other: State) -> State:
    """Two states of one network as one: (a, ...) and (b, ...) to (a + b, ...)."""
    if isinstance(one, Tensor):
        return torch.cat([one, other])
    return _rebuild(one, [join_states(*pair) for pair in zip(one, other, strict=True)])


def batch_of(state: State) -> int | None:
    """Number of sequences that a state is of; None where it holds no tensor."""
    while state is not None and not isinstance(state, Tensor):
        state = state[0]
    return None if state is None else len(state)


def _rebuild(like: State, parts: list[State]) -> State:
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)
