"""Roll-outs of a video model: frames from frames and actions, as a stream, far beyond the length of training windows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from ..backbones.space_time import SpaceTime
from ..checks import check_options
from ..engine.media import to_bytes, to_floats
from ..guidance import history_guidance
from ..likelihood import elbo
from ..model import Denoise, DiffusionForcing
from ..sampling import Context, Sampler, rolling, rollout, stream
from .decoder import StreamingDecoder
from .policy import PX, ActionPolicy

Frames = NDArray[np.uint8]
Actions = NDArray[np.float32]


@dataclass(frozen=True)
class RollOut:
    """How a roll-out proceeds."""

    prefix: int = 4
    """Tokens of a real clip that a roll-out continues. 0: unconditional."""
    horizon: int = 1
    """Tokens sampled together. 1: token after token."""
    rolling: bool = False
    """Rolling (FIFO) diffusion: one endless pyramid in which up to `horizon` tokens, 2 or more, are in flight. Faster than token after
    token, and a little worse."""
    actions: Literal["clip", "policy"] = "clip"
    """Actions of the roll-out: those of the real clip, though what is imagined soon differs from the place they were meant for; or those
    of an action policy that looks at the generated frames (trained on first use, in a minute or two)."""
    clip_tokens: int = 4
    """With actions=policy: so many tokens after the prefix still follow the real clip."""
    history_guidance: float = 1.0
    """Scale of history guidance: 1 is the plain model; more gives more contrast and motion, and errors that grow sooner, so that long
    roll-outs need more stabilization. Two passes a step."""
    compile: bool = False
    """Compile the denoising of a single token, once for all roll-outs made together: half a minute or more at first, then a little
    faster. For SpaceTime, token after token; needs a C++ compiler."""
    infill: int = 0
    """Of `dforce sample`: sample so many tokens between the prefix and as many tokens that really came after, instead of a roll-out."""

    def __post_init__(self) -> None:
        check_options(self, "horizon")
        if not 0 <= self.history_guidance < float("inf"):
            raise ValueError(f"history_guidance is 0 (no history), 1 (the plain model) or more; got {self.history_guidance}")
        if self.rolling and self.history_guidance != 1:
            raise ValueError(
                f"rolling tokens have no past of their own to be guided by; got history_guidance {self.history_guidance}, "
                "add --task.rollout.history-guidance 1"
            )
        if self.rolling and self.actions == "policy":
            raise ValueError("rolling tokens start before the policy can see the frames they follow; add --task.rollout.actions clip")
        for name in ("prefix", "clip_tokens", "infill"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} counts tokens, from 0; got {getattr(self, name)}")

    def wrap(self) -> Callable[[Denoise], Denoise] | None:
        """Guidance, as samplers take it."""
        return None if self.history_guidance == 1 else functools.partial(history_guidance, scale=self.history_guidance)


@dataclass(frozen=True)
class FrameSampler:
    """A video model with everything that decides how frames are sampled from it.

    build_cond: actions (b, t, a), None where there are none, and a number of tokens, to conditions (b, tokens, c) or None.
    """

    model: DiffusionForcing
    sampler: Sampler
    context: Context
    options: RollOut
    build_cond: Callable[[Actions | None, int], Tensor | None]

    @property
    def stack(self) -> int:
        """Frames of a token."""
        codec: Any = self.model.codec
        return int(codec.stack)

    def stream(
        self, length: int, prefix: Frames | None, actions: Actions | None, *, batch: int = 1, generator: Generator | None = None,
        policy: ActionPolicy | None = None,
    ) -> Iterator[Frames]:  # fmt: skip
        """Frames (b, n, px, px, 3) as they are generated, `length` in all, in constant memory.

        prefix: (b, p, px, px, 3), real frames to continue, a multiple of the stack, or a single one, which then stands still for a token;
        None: none. actions: (b, p + length, a), p as many frames as fill the prefix's tokens. batch: sequences, where neither tells.
        policy: chooses the actions of windows that begin `clip_tokens` tokens after the prefix or later.
        """
        model, stack, options = self.model, self.stack, self.options
        if options.compile:
            compile_decode_step(model)
        if prefix is not None and prefix.shape[1] == 1:
            prefix = np.repeat(prefix, stack, axis=1)
        if policy is not None and actions is None:
            actions = np.zeros((batch if prefix is None else len(prefix), 0, policy.width), np.float32)
        tokens = -(-length // stack)
        known = None if prefix is None or not prefix.shape[1] else encode_frames(model, prefix)
        before = 0 if known is None else known.shape[1]
        cond = self.build_cond(actions, before + tokens)
        cond = None if cond is None else cond.to(model.device)
        chunks = self._tokens(tokens, known, cond, batch, generator)
        acting = None
        if policy is not None and cond is not None:
            acting = _Acting(self, policy, prefix, actions, cond, generator)
        decoder = StreamingDecoder(model) if known is None or prefix is None else _decoder_after(model, known, prefix)
        done = 0
        while done < tokens:
            if acting is not None and done >= options.clip_tokens:
                acting.choose(before + done, min(options.horizon, tokens - done))
            chunk = next(chunks)
            here = None if cond is None else cond[:, before + done : before + done + chunk.shape[1]]
            done += chunk.shape[1]
            frames = to_bytes(decoder(chunk, here))
            if acting is not None:
                acting.observe(frames)
            yield frames[:, : frames.shape[1] - max(0, done * stack - length)]

    def _tokens(self, tokens: int, known: Tensor | None, cond: Tensor | None, batch: int, generator: Generator | None) -> Iterator[Tensor]:
        """Tokens as they are sampled."""
        model, schedule, horizon = self.model, self.model.schedule, self.options.horizon
        if known is None and cond is None and model.traits.event is not None:
            known = torch.zeros(batch, 0, *model.traits.event, device=model.device)
        if self.options.rolling:
            steps = min(self.sampler.steps, schedule.levels)
            sampler = replace(self.sampler, steps=steps, slope=float(-(-steps // horizon)))
            return rolling(model, sampler, tokens, known, cond, past=self.context, generator=generator)
        window = self.sampler.over(schedule, horizon)
        return stream(model, window, tokens, known, cond, past=self.context, wrap=self.options.wrap(), generator=generator)

    def infill(
        self, first: Frames, last: Frames, tokens: int, *, actions: Actions | None = None, generator: Generator | None = None,
        draws: int = 16,
    ) -> Frames:  # fmt: skip
        """Frames (b, tokens * stack, px, px, 3) between known ones before (b, c, ...) and after (b, e, ...), both multiples of the stack.

        A causal model cannot look ahead: `draws` continuations are sampled for each, and the one after which the known frames are the
        most likely (by the ELBO) is kept.
        """
        model, schedule, b = self.model, self.model.schedule, len(first)
        prefix, suffix = (encode_frames(model, part) for part in (first, last))
        before, after = prefix.shape[1], suffix.shape[1]
        cond = self.build_cond(actions, before + tokens + after)
        cond = None if cond is None else cond.repeat_interleave(draws, dim=0).to(model.device)
        past = prefix.repeat_interleave(draws, dim=0)
        sampler = replace(self.sampler, matrix="full_sequence", eta=0.0).over(schedule, 1)
        known = None if cond is None else cond[:, : before + tokens]
        samples = rollout(model, sampler, tokens, past, known, wrap=self.options.wrap(), generator=generator)
        whole = torch.cat([past, samples, suffix.repeat_interleave(draws, dim=0)], dim=1)
        with torch.no_grad():
            noise = Generator(model.device).manual_seed(0)
            bound = elbo(model, schedule, whole, None, cond, ladder=schedule.ladder(8), draws=2, generator=noise)
        best = bound[:, before + tokens :].sum(1).view(b, draws).argmax(1)
        decoder = _decoder_after(model, prefix, first) if before else StreamingDecoder(model)
        here = None if cond is None else cond[::draws, before : before + tokens]
        return to_bytes(decoder(samples.unflatten(0, (b, draws))[torch.arange(b), best], here))


class _Acting:
    """A policy in a roll-out: keeps the last frames and actions, and writes the actions it chooses into the conditions cond (b, tokens, c),
    which the sampler reads window by window.
    """

    def __init__(
        self, frames: FrameSampler, policy: ActionPolicy, prefix: Frames | None, actions: Actions | None, cond: Tensor,
        generator: Generator | None,
    ) -> None:  # fmt: skip
        self.build_cond, self.stack, self.policy, self.cond = frames.build_cond, frames.stack, policy, cond
        self.actions = np.zeros((len(cond), cond.shape[1] * self.stack, policy.width), np.float32)
        if actions is not None:
            known = min(actions.shape[1], self.actions.shape[1])
            self.actions[:, :known] = actions[:, :known]
        self.frames = prefix
        seed = 0 if generator is None else generator.initial_seed()
        self.generator = Generator().manual_seed(seed)

    def choose(self, at: int, tokens: int) -> None:
        """Choose the actions of so many tokens from number `at` on."""
        stack = self.stack
        previous = self.actions[:, (at - 1) * stack : at * stack] if at else np.zeros_like(self.actions[:, :stack])
        frames = self._grey(PX, PX) if self.frames is None else self.frames
        chosen = self.policy.choose(frames, previous, tokens, self.generator)
        self.actions[:, at * stack : (at + tokens) * stack] = chosen
        cond = self.build_cond(chosen, tokens)
        assert cond is not None
        self.cond[:, at : at + tokens] = cond.to(self.cond)

    def observe(self, frames: Frames) -> None:
        """Frames (b, t, px, px, 3) that were generated."""
        last = self._grey(*frames.shape[2:4]) if self.frames is None else self.frames[:, -1:]
        self.frames = np.concatenate([last, frames], axis=1)

    def _grey(self, height: int, width: int) -> Frames:
        """What the policy sees before there are any frames."""
        return np.full((len(self.cond), 1, height, width, 3), 127, np.uint8)


def encode_frames(model: DiffusionForcing, frames: Frames) -> Tensor:
    """Frames (b, t * stack, px, px, 3) as tokens, on the model's device."""
    tokens: Tensor = model.codec.encode(to_floats(frames).to(model.device))  # type: ignore[union-attr, operator]
    return tokens


def _decoder_after(model: DiffusionForcing, tokens: Tensor, frames: Frames) -> StreamingDecoder:
    """The decoder of what follows tokens (b, t, ...) of these frames."""
    return StreamingDecoder(model, tokens[:, -1], to_floats(frames[:, -1]).to(model.device))


def compile_decode_step(model: DiffusionForcing) -> None:
    """Let a model's backbone compile its pass over a single token."""
    if not isinstance(model.backbone, SpaceTime):
        raise ValueError(
            f"only SpaceTime has a pass over single tokens to compile, and this model's backbone is {type(model.backbone).__name__}; "
            "leave out --task.rollout.compile"
        )
    model.backbone.compile_decode_step()
