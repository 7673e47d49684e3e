"""A trained model as a robot's policy: it keeps a belief of what went on, looks, samples what to do next, and may doubt what it sees.

`ImitationAgent` serves n robots at once, NumPy in and out. A moment is a look at all cameras and the state; from one moment to the next a
chunk of actions is carried out. `level` says how far a look is to be believed: 0 as it is, K not at all, in between a little; for all
that is seen alike, or for each camera by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from ..checks import check_options
from ..engine.pretrained import model_folder
from ..matrix import full_sequence
from ..model import DiffusionForcing
from ..sampling import Past, sample
from ..schedule import expand
from .image_tokens import Planes
from .tokens import ACTIONS, Parts

Level = int | float | NDArray[Any] | Mapping[str, Any]
NEVER = 2**30
"""Moments ago, of what was not seen yet."""


@dataclass(frozen=True)
class ActOptions:
    """How an agent acts."""

    steps: int = 10
    """Denoising steps of a chunk of actions."""
    eta: float = 0.0
    """Fresh noise at each step: 0 none, 1 ancestral."""
    noise: float = 1.0
    """How large the noise is that a chunk of actions begins as: 1 samples what a demonstrator might do, less keeps nearer to their middle.
    That is steadier, but no good where they choose between two ways. So does a look that is ignored and mended."""
    memory: int | None = None
    """Forget all but the last so many moments; None: nothing is forgotten."""
    patient: bool = True
    """Whether a robot that has not seen anything yet, all looks so far being ignored (level K), stays as it is until it has. Demonstrators
    saw what they did; without this the agent would guess where to begin."""
    mend: bool = True
    """Whether a look that is doubted is first denoised, given all that came before, and then believed: the past becomes one that might have
    been seen, as most of those in training were. Of what was not seen within memory nothing is made up. False: it is remembered as noisy
    as it is doubted, as in the paper."""

    def __post_init__(self) -> None:
        check_options(self, "steps")
        if not 0 <= self.noise <= 1:
            raise ValueError(f"noise goes from 0 (the middle of what is done) to 1 (anything, as often as it is done); got {self.noise}")
        if self.memory is not None and self.memory < 1:
            raise ValueError(f"memory counts moments, from 1 (this look alone), or is None for all of them; got {self.memory}")


class ImitationAgent:
    """model: of tokens that `data.parts.Parts` encodes. `reset`, then `act` at each moment."""

    codec: Any
    kind: type[Parts] | type[Planes] = Parts
    doubts_whole = False
    """Whether all that is seen at a moment has one level."""

    def __init__(self, model: DiffusionForcing, options: ActOptions | None = None, seed: int = 0) -> None:
        if not isinstance(model.codec, self.kind):
            raise ValueError(
                f"a {type(self).__name__} wants a model of what is seen and done as {self.kind.__name__}; this one's codec is "
                f"{type(model.codec).__name__}. agent_for(model) makes the agent that fits"
            )
        self.model, self.codec, self.options, self.seed = model.eval(), model.codec, options or ActOptions(), seed
        self.seen = self.codec.names[1:]
        self._matrix = full_sequence(1, model.schedule.ladder(min(self.options.steps, model.schedule.levels)))
        self.reset()

    @classmethod
    def from_pretrained(cls, path: str | Path, options: ActOptions | None = None, seed: int = 0) -> ImitationAgent:
        """From a run, a model's folder, or the name of a pretrained model. options: None for those of the run, if it is one."""
        folder = model_folder(path)
        of_run = None if folder == Path(path) else _acting_of(folder.parent)
        return agent_for(DiffusionForcing.from_pretrained(folder), options or of_run, seed)

    def reset(self, n: int = 1) -> None:
        """Begin anew, with n robots."""
        if n < 1:
            raise ValueError(f"there is one robot at least; got n={n}")
        self.n = n
        self.generator = Generator().manual_seed(self.seed)
        memory = self.options.memory
        self._past = Past(self.model, None if memory is None else self._tokens(memory))
        self._begin()

    def _begin(self) -> None:
        self._last = self.codec.start.expand(self.n, -1)
        self._blind = torch.full((self.n,), self.options.patient)
        self._unseen = torch.full((self.n, len(self.seen)), NEVER)

    def _tokens(self, moments: int) -> int:
        """How many tokens a memory of so many moments holds; the actions that led to the first of these are none of it."""
        return moments * len(self.codec.names) - 1

    @torch.no_grad()
    def act(self, observation: Mapping[str, Any], level: Level = 0, doing: NDArray[Any] | None = None) -> NDArray[np.float32]:
        """Look and decide: actions (n, chunk, a), to be carried out until the next look.

        observation: of each camera (n, px, px, 3), bytes or 0 to 1, of the state (n, s); for one robot the first axis may be left out.
        level: 0..K, how far all of it or (by name) each part is doubted, one for all robots or (n,). What is not believed at all (K) may be
        missing or NaN. doing: actions (n, chunk, a) that are carried out instead of those decided, which is what is remembered then.
        """
        levels = self._levels(level)
        looks = [self._look(name, observation.get(name), levels[:, i]) for i, name in enumerate(self.seen)]
        tokens = torch.cat([self.codec.encode_part(name, look[:, None]) for name, look in zip(self.seen, looks, strict=True)], dim=1)
        noised, doubted = self._noised(tokens, levels), self._mendable(levels)
        if doubted.any():
            for i in range(len(self.seen)):
                token, level_i = noised[:, i : i + 1], levels[:, i]
                if doubted[:, i].any():
                    token, level_i = self._mended(token, level_i, doubted[:, i], i + 1)
                self._past.add(token, self._told(1, i + 1), level_i[:, None])
        else:
            self._past.add(noised, self._told(len(self.seen), 1), levels)
        self._blind = self._blind & (levels == self.model.schedule.levels).all(1)
        return self._decide(doing)

    @torch.no_grad()
    def imagine(self) -> tuple[NDArray[np.float32], dict[str, NDArray[np.float32]]]:
        """Look at nothing, and go on with what might be seen: actions (n, chunk, a), and what was imagined, each part (n, *shape)."""
        seen = {}
        for i, name in enumerate(self.seen):
            token = self._sample(i + 1)
            self._past.add(token, self._told(1, i + 1), 0)
            seen[name] = self.codec.decode_part(name, token)[:, 0].numpy()
        return self._decide(), seen

    def _decide(self, doing: NDArray[Any] | None = None) -> NDArray[np.float32]:
        token, before = self._sample(0), self._last[:, None]
        decided = self.codec.decode_actions(token, before)[:, 0]
        decided = torch.where(self._blind[:, None, None], before, decided)
        done = decided if doing is None else torch.as_tensor(np.asarray(doing, dtype=np.float32))
        own = doing is None and not self._blind.any()
        self._past.add(token if own else self.codec.encode_actions(done[:, None], before), self._told(1, 0), 0)
        self._last = done[:, -1]
        return decided.numpy()

    def _sample(self, part: int) -> Tensor:
        """The next token (n, 1, width), which is one of that part."""
        x = torch.randn(self.n, 1, self.codec.width, generator=self.generator) * (1.0 if part else self.options.noise)
        return self._denoised(x, part, self._matrix)

    def _denoised(self, x: Tensor, part: int, matrix: Tensor) -> Tensor:
        """The next token, which is one of that part, from x (n, 1, width) at the matrix's first level."""
        denoise = self.model.denoiser(self._told(1, part), self._past.state)
        token = sample(denoise, self.model.schedule, x, matrix, eta=self.options.eta, generator=self.generator)
        token[..., self.codec.kept[self.codec.names[part]] :] = 0  # what is always empty stays so
        return token

    def _mendable(self, levels: Tensor) -> Tensor:
        """(n, parts), of looks at these levels: which are doubted, and of a part that was seen within what is remembered.

        To be asked once a moment: it counts them.
        """
        self._unseen = (self._unseen + 1).clamp(max=NEVER)
        memory = self.options.memory
        doubted = (levels > 0) & (self._unseen < (NEVER if memory is None else memory)) & self.options.mend
        self._unseen = torch.where(levels < self.model.schedule.levels, 0, self._unseen)
        return doubted

    def _mended(self, noised: Tensor, levels: Tensor, doubted: Tensor, part: int) -> tuple[Tensor, Tensor]:
        """Tokens (n, 1, *event) at levels (n,): where doubted (n,), denoised given the past, then at level 0.

        What is ignored (K) begins as little noise as actions do: it is then near the middle of what might be seen.
        """
        top = self.model.schedule.levels
        tokens, after = noised, torch.where(doubted, 0, levels)
        for level in levels[doubted].unique().tolist():
            x = noised * self.options.noise if level == top else noised
            steps = max(1, round(self.options.steps * level / top))
            found = self._denoised(x, part, full_sequence(1, self.model.schedule.ladder(min(steps, level), level)))
            tokens = torch.where(expand((doubted & (levels == level))[:, None], noised), found, tokens)
        return tokens, after

    def _noised(self, tokens: Tensor, levels: Tensor) -> Tensor:
        """Tokens (n, t, *event) at levels (n, t): as they are at 0, and nothing but noise at K."""
        noise = torch.randn(tokens.shape, generator=self.generator)
        # At K the schedule leaves a trace of the signal, of which nothing shall be heard.
        heard = torch.where(expand(levels == self.model.schedule.levels, tokens), 0.0, tokens)
        return torch.where(expand(levels > 0, tokens), self.model.schedule.add_noise(heard, levels, noise), tokens)

    def _told(self, tokens: int, first: int) -> Tensor:
        return self.codec.conditions(self._last, tokens, first)

    def _levels(self, level: Level) -> Tensor:
        """(n, parts seen), from one level, one a robot, or either by name."""
        top = self.model.schedule.levels
        if isinstance(level, Mapping):
            unknown = [name for name in level if name not in self.seen]
            if unknown:
                raise ValueError(f"what is seen are {', '.join(self.seen)}; a level was given for {unknown[0]!r}")
        columns = []
        for name in self.seen:
            one = np.asarray(level.get(name, 0) if isinstance(level, Mapping) else level)
            if one.shape not in ((), (self.n,)):
                raise ValueError(f"a level is one for all robots or one each, ({self.n},); got shape {one.shape} for {name}")
            if not (np.isfinite(one).all() and (one >= 0).all() and (one <= top).all()):
                raise ValueError(f"a level goes from 0 (believe) to {top} (ignore); got {one} for {name}")
            columns.append(torch.as_tensor(np.broadcast_to(np.round(one).astype(np.int64), (self.n,)).copy()))
        return torch.stack(columns, dim=1)

    def _look(self, name: str, raw: Any, levels: Tensor) -> Tensor:
        """A part (n, *shape), checked; zeros where it is missing."""
        ignored = levels == self.model.schedule.levels
        if raw is None:
            if not ignored.all():
                raise ValueError(
                    f"{name} is missing; a part that is not there has level {self.model.schedule.levels}: act(..., level={{...}})"
                )
            return torch.zeros(self.n, *self.codec.shapes[name])
        array, shape = np.asarray(raw), self.codec.shapes[name]
        array = array[None] if array.shape == shape else array
        if array.shape != (self.n, *shape):
            raise ValueError(f"{name} should be {(self.n, *shape)} for {self.n} robots; got {array.shape}")
        if array.dtype.kind == "f":
            broken = ~np.isfinite(array).reshape(self.n, -1).all(1)
            told = ignored.numpy()
            if (broken & ~told).any():
                which = int(np.flatnonzero(broken & ~told)[0])
                raise ValueError(
                    f"{name} of robot {which} holds NaN or infinite values; if it is missing, say so by level {self.model.schedule.levels}"
                )
            array = np.where(broken.reshape(-1, *(1,) * len(shape)), 0, array)
        if len(shape) == 3 and len(believed := array[~ignored.numpy()]) and not _is_picture(believed):
            raise ValueError(
                f"{name} is a picture: bytes (uint8), or numbers from 0 to 1; got {array.dtype} from {float(believed.min()):.3g} to "
                f"{float(believed.max()):.3g}. Turn it into uint8 from 0 to 255 first"
            )
        return torch.as_tensor(np.ascontiguousarray(array))


class MomentAgent(ImitationAgent):
    """As `ImitationAgent`, for a model in which a moment is one token (`data.planes.Planes`): all that is seen is doubted alike.

    Sampling the next token decides what to do and imagines what will be seen; what is then seen takes the place of the latter.
    """

    kind = Planes
    doubts_whole = True

    def _begin(self) -> None:
        self._done = torch.zeros(self.n, *self.codec.shapes[ACTIONS])
        self._imagined: Tensor | None = None
        self._unseen = torch.full((self.n, 1), NEVER)

    def _tokens(self, moments: int) -> int:
        return moments

    @torch.no_grad()
    def act(self, observation: Mapping[str, Any], level: Level = 0, doing: NDArray[Any] | None = None) -> NDArray[np.float32]:
        levels = self._levels(level)
        if not (levels == levels[:, :1]).all():
            raise ValueError(
                "this model has one token a moment, so that all that is seen is doubted alike: level is one number for all of it"
            )
        seen = {name: self._look(name, observation.get(name), levels[:, i])[:, None] for i, name in enumerate(self.seen)}
        token, level_of = self.codec.encode({ACTIONS: self._done[:, None], **seen}), levels[:, 0]
        noised, doubted = self._noised(token, levels[:, :1]), self._mendable(levels[:, :1])[:, 0]
        if doubted.any():
            noised, level_of = self._mended(noised, level_of, doubted, 0)
            known = noised.clone()
            # What was done takes the place of what was denoised with the look, which therefore knows it no better than it is doubted.
            known[:, :, -self.codec.chunk :] = token[:, :, -self.codec.chunk :]
            noised = torch.where(expand(doubted[:, None], noised), known, noised)
        self._past.add(noised, None, level_of[:, None])
        return self._decide(doing)

    @torch.no_grad()
    def imagine(self) -> tuple[NDArray[np.float32], dict[str, NDArray[np.float32]]]:
        if self._imagined is None:
            raise ValueError("to imagine what comes next the agent looks once first: act(observation)")
        self._past.add(self._imagined, None, 0)
        seen = self.codec.decode(self._imagined)
        return self._decide(), {name: seen[name][:, 0].numpy() for name in self.seen}

    def _denoised(self, x: Tensor, part: int, matrix: Tensor) -> Tensor:
        denoise = self.model.denoiser(None, self._past.state)
        return sample(denoise, self.model.schedule, x, matrix, eta=self.options.eta, generator=self.generator)

    def _decide(self, doing: NDArray[Any] | None = None) -> NDArray[np.float32]:
        x = torch.randn(self.n, 1, *self.codec.event, generator=self.generator)
        x[:, :, -self.codec.chunk :] *= self.options.noise
        self._imagined = self._denoised(x, 0, self._matrix)
        decided = self.codec.decode(self._imagined)[ACTIONS][:, 0]
        self._done = decided if doing is None else torch.as_tensor(np.asarray(doing, dtype=np.float32))
        return decided.numpy()


def agent_for(model: DiffusionForcing, options: ActOptions | None = None, seed: int = 0) -> ImitationAgent:
    """The agent that a model's tokens ask for."""
    kind = MomentAgent if isinstance(model.codec, Planes) else ImitationAgent
    return kind(model, options, seed)


def _acting_of(run: Path) -> ActOptions | None:
    """How the agent of a run acts, as the run wrote it down; None if there is no run of imitation in that folder."""
    from ..engine.config import from_dict, read_json

    file = run / "config.json"
    config = read_json(file) if file.is_file() else None
    task = config.get("task") if isinstance(config, dict) else None
    if not isinstance(task, dict) or task.get("kind") != "Imitation" or "acting" not in task:
        return None
    acting: ActOptions = from_dict(ActOptions, task["acting"], f"{file.name}: task.acting")
    return acting


def _is_picture(array: NDArray[Any]) -> bool:
    """Whether numbers are bytes, or finite ones from 0 to 1."""
    return array.dtype == np.uint8 or (array.dtype.kind == "f" and bool((array >= 0).all() and (array <= 1).all()))
