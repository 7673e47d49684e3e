"""A trained model as a robot's policy: it observes, samples the next actions, and remembers both.

`ImitationAgent` controls n robots at once, NumPy in and out. At each timestep it gets an observation of every sensor (cameras and state)
and returns a chunk of actions, which is executed before the next observation. A noise level says how far an observation is trusted: 0 as
it is, K not at all, in between partly; one level for all sensors, or one for each by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from ..engine.config import from_dict
from ..engine.pretrained import model_folder
from ..files import read_json
from ..model import Denoiser, DiffusionForcing
from ..sampler import check_all_noise
from ..sampling import Context, Memory, Sampler, sample
from ..schedule import expand
from ..solver import amplitudes, solver_step
from .image_tokens import ImageTokens
from .tokens import ACTIONS, STATE, ModalityTokens

Level = int | float | NDArray[Any] | Mapping[str, Any]
FAR = 1000
"""Standard deviations from the demonstrations beyond which an observation is a broken sensor's: far more than a network can be asked to
continue, and far less than makes its state overflow.
"""
NEVER = 2**30
"""Timesteps since a sensor was observed, if it never was."""


SAMPLER = Sampler(steps=10)


@dataclass(frozen=True)
class AgentOptions:
    """What an agent remembers, and how it treats noisy observations."""

    memory: int | None = None
    """Condition on the last so many timesteps only; None: on the whole episode."""
    wait: bool = True
    """Repeat the last action until a first observation is trusted at all (level below K). Demonstrators always saw something, so the model
    would guess."""
    denoise_observations: bool = True
    """Denoise an observation of level above 0 given the past, then remember it as clean: most pasts in training were clean. A sensor that
    was not observed within memory is left at its level. False: remember every observation at its level, as in the paper."""

    def __post_init__(self) -> None:
        if self.memory is not None and self.memory < 1:
            raise ValueError(f"memory counts timesteps from 1 (the present only), or is None for all; got {self.memory}")


class ImitationAgent:
    """A policy of a model with `ModalityTokens`: `reset`, then `act` at each timestep.

    sampler: of each token; temperature scales the initial noise of actions, and of ignored observations that are denoised. Below 1 actions
    are steadier, but wrong where demonstrators choose between two ways.
    """

    codec: Any
    codec_type: type[ModalityTokens] | type[ImageTokens] = ModalityTokens
    shared_level = False
    """Whether all sensors of a timestep have one noise level."""

    def __init__(self, model: DiffusionForcing, sampler: Sampler = SAMPLER, options: AgentOptions | None = None, seed: int = 0) -> None:
        if not isinstance(model.codec, self.codec_type):
            raise ValueError(
                f"{type(self).__name__} needs a model whose codec is {self.codec_type.__name__}; this one's is "
                f"{type(model.codec).__name__}. agent_for(model) makes the agent that fits"
            )
        self.model, self.codec, self.seed = model.eval(), model.codec, seed
        self.sampler, self.options = sampler, options or AgentOptions()
        self.sensors = self.codec.sensors
        self.reset()

    @classmethod
    def from_pretrained(
        cls, path: str | Path, sampler: Sampler | None = None, options: AgentOptions | None = None, seed: int = 0
    ) -> ImitationAgent:  # fmt: skip
        """From a run's folder, a model's folder, or a pretrained model's name. sampler, options: None: the run's, if it is one."""
        folder = model_folder(path)
        of_run = (SAMPLER, AgentOptions()) if folder == Path(path) else _options_of(folder.parent)
        return agent_for(DiffusionForcing.from_pretrained(folder), sampler or of_run[0], options or of_run[1], seed)

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of the sensors that are cameras."""
        return tuple(name for name in self.sensors if name != STATE)

    def reset(self, n: int = 1) -> None:
        """Begin an episode with n robots."""
        if n < 1:
            raise ValueError(f"n counts robots from 1; got n={n}")
        self.n = n
        self.generator = Generator().manual_seed(self.seed)
        memory = self.options.memory
        self._past = Memory(self.model, Context(memory=None if memory is None else self._tokens_of(memory)))
        self._begin()

    def _begin(self) -> None:
        self._last = self.codec.initial_action.expand(self.n, -1)
        self._waiting = torch.full((self.n,), self.options.wait)
        self._since = torch.full((self.n, len(self.sensors)), NEVER)

    def _tokens_of(self, timesteps: int) -> int:
        """Tokens of that many timesteps, without the actions that led to the first."""
        return timesteps * len(self.codec.names) - 1

    @torch.no_grad()
    def act(self, observation: Mapping[str, Any], level: Level = 0, executed: NDArray[Any] | None = None) -> NDArray[np.float32]:
        """Actions (n, chunk, a) to execute until the next observation.

        observation: of each camera (n, px, px, 3), uint8 or floats from 0 to 1, of the state (n, s); for one robot without the first axis.
        level: 0..K, noise level of the observation, one for all robots or (n,), for all sensors or by name. At K a sensor may be missing or
        NaN. executed: actions (n, chunk, a) that are executed, and remembered, in place of those returned.
        """
        levels = self._check_levels(level)
        raw = [self._check_sensor(name, observation.get(name), levels[:, i]) for i, name in enumerate(self.sensors)]
        tokens = torch.cat([self.codec.encode_modality(name, one[:, None]) for name, one in zip(self.sensors, raw, strict=True)], dim=1)
        self._check_near(tokens, levels)
        noisy, denoised = self._add_noise(tokens, levels), self._to_denoise(levels)
        if denoised.any():
            for i in range(len(self.sensors)):
                token, level_i = noisy[:, i : i + 1], levels[:, i]
                if denoised[:, i].any():
                    token, level_i = self._denoise_observation(token, level_i, denoised[:, i], i + 1)
                self._past.add(token, level_i[:, None], self._cond(1, i + 1))
        else:
            self._past.add(noisy, levels, self._cond(len(self.sensors), 1))
        self._waiting = self._waiting & (levels == self.model.schedule.levels).all(1)
        return self._decide(executed)

    @torch.no_grad()
    def imagine(self) -> tuple[NDArray[np.float32], dict[str, NDArray[np.float32]]]:
        """Sample the observation instead of getting one: actions (n, chunk, a), and the observation, (n, *shape) of each sensor."""
        observation = {}
        for i, name in enumerate(self.sensors):
            token = self._sample(i + 1)
            self._past.add(token, 0, self._cond(1, i + 1))
            observation[name] = self.codec.decode_modality(name, token)[:, 0].numpy()
        return self._decide(), observation

    def _decide(self, executed: NDArray[Any] | None = None) -> NDArray[np.float32]:
        """Sample a chunk of actions, and remember what is executed."""
        token, last = self._sample(0), self._last[:, None]
        decided = self.codec.decode_actions(token, last)[:, 0]
        decided = torch.where(self._waiting[:, None, None], last, decided)
        done = decided if executed is None else torch.as_tensor(np.asarray(executed, dtype=np.float32))
        sampled = executed is None and not self._waiting.any()
        self._past.add(token if sampled else self.codec.encode_actions(done[:, None], last), 0, self._cond(1, 0))
        self._last = done[:, -1]
        return decided.numpy()

    def _sample(self, modality: int) -> Tensor:
        """The next token (n, 1, width), of that modality."""
        x = torch.randn(self.n, 1, self.codec.width, generator=self.generator) * (1.0 if modality else self.sampler.temperature)
        return self._denoise(x, modality, self.sampler)

    def _denoise(self, x: Tensor, modality: int, sampler: Sampler) -> Tensor:
        """The next token, of that modality, from white noise x (n, 1, width)."""
        check_all_noise(sampler.matrix_for(self.model.schedule, 1), self.model.schedule)
        return self._without_padding(sample(self._denoiser(modality), self.model.schedule, x, sampler, generator=self.generator), modality)

    def _denoiser(self, modality: int) -> Denoiser:
        """Of the next token, of that modality."""
        return self.model.denoiser(self._cond(1, modality), self._past.state)

    def _without_padding(self, token: Tensor, modality: int) -> Tensor:
        """A token whose numbers beyond those of its modality are 0."""
        token[..., self.codec.components[self.codec.names[modality]] :] = 0
        return token

    def _estimate(self, x: Tensor, modality: int, ladder: Tensor) -> Tensor:
        """An estimate of a token x (n, 1, width) at the top of the ladder: the robot remembers one likely value, no posterior sample."""
        denoise, schedule = self._denoiser(modality), self.model.schedule
        for k, k_next in pairwise(ladder.flip(0)[:, None]):
            noise = torch.randn(x.shape, generator=self.generator) if self.sampler.eta else None
            x = solver_step(x, denoise(x, k.expand(len(x), 1)), amplitudes(schedule, k, k_next, x), self.sampler, noise)
        return self._without_padding(x, modality)

    def _to_denoise(self, levels: Tensor) -> Tensor:
        """Which observations at levels (n, sensors) are to be denoised: those of sensors that were observed within memory.

        Called once per timestep, since it counts them.
        """
        self._since = (self._since + 1).clamp(max=NEVER)
        memory = self.options.memory
        denoised = (levels > 0) & (self._since < (NEVER if memory is None else memory)) & self.options.denoise_observations
        self._since = torch.where(levels < self.model.schedule.levels, 0, self._since)
        return denoised

    def _denoise_observation(self, noisy: Tensor, levels: Tensor, which: Tensor, modality: int) -> tuple[Tensor, Tensor]:
        """Tokens (n, 1, *event) at levels (n,), denoised given the past to level 0 where `which` (n,); and the levels after.

        At level K they start, as actions do, from noise scaled by the temperature: the result is near the mean of what may be observed.
        """
        top = self.model.schedule.levels
        tokens, after = noisy, torch.where(which, 0, levels)
        for level in levels[which].unique().tolist():
            x = noisy * self.sampler.temperature if level == top else noisy
            steps = max(1, round(self.sampler.steps * level / top))
            denoised = self._estimate(x, modality, self.model.schedule.ladder(min(steps, level), level))
            tokens = torch.where(expand((which & (levels == level))[:, None], noisy), denoised, tokens)
        return tokens, after

    def _add_noise(self, tokens: Tensor, levels: Tensor) -> Tensor:
        """Tokens (n, t, *event) noised to levels (n, t): unchanged at 0, pure noise at K."""
        noise = torch.randn(tokens.shape, generator=self.generator)
        # At K the schedule leaves a trace of the signal; an ignored observation must not carry even that.
        signal = torch.where(expand(levels == self.model.schedule.levels, tokens), 0.0, tokens)
        return torch.where(expand(levels > 0, tokens), self.model.schedule.add_noise(signal, levels, noise), tokens)

    def _cond(self, tokens: int, first: int) -> Tensor:
        return self.codec.build_cond(self._last, tokens, first)

    def _check_levels(self, level: Level) -> Tensor:
        """(n, sensors), from one level, one per robot, or either by name."""
        top = self.model.schedule.levels
        if isinstance(level, Mapping):
            unknown = [name for name in level if name not in self.sensors]
            if unknown:
                raise ValueError(f"sensors are {', '.join(self.sensors)}; a level was given for {unknown[0]!r}")
        columns = []
        for name in self.sensors:
            one = np.asarray(level.get(name, 0) if isinstance(level, Mapping) else level)
            if one.shape not in ((), (self.n,)):
                raise ValueError(f"a level is one for all robots or one each, ({self.n},); got shape {one.shape} for {name}")
            if not (np.isfinite(one).all() and (one >= 0).all() and (one <= top).all()):
                raise ValueError(f"a level is from 0 (trust) to {top} (ignore); got {one} for {name}")
            columns.append(torch.as_tensor(np.broadcast_to(np.round(one).astype(np.int64), (self.n,)).copy()))
        return torch.stack(columns, dim=1)

    def _check_near(self, tokens: Tensor, levels: Tensor) -> None:
        """Refuse observations, as tokens (n, sensors, width), that no demonstration is near, before anything is remembered of them."""
        size = tokens.abs().amax(2)
        far = ((size > FAR) | ~size.isfinite()) & (levels < self.model.schedule.levels)
        for robot, sensor in far.nonzero().tolist()[:1]:
            raise ValueError(
                f"{self.sensors[sensor]} of robot {robot} is {float(size[robot, sensor]):.3g} standard deviations from the demonstrations, "
                f"and {FAR} are taken at most; ignore it by its level, {self.model.schedule.levels}"
            )

    def _check_sensor(self, name: str, raw: Any, levels: Tensor) -> Tensor:
        """A sensor's observation (n, *shape); zeros where it is missing or not finite at level K."""
        top = self.model.schedule.levels
        ignored = levels == top
        if raw is None:
            if not ignored.all():
                raise ValueError(f"{name} is missing; ignore it by its level, act(..., level={{{name!r}: {top}}})")
            return torch.zeros(self.n, *self.codec.shapes[name])
        array, shape = np.asarray(raw), self.codec.shapes[name]
        array = array[None] if array.shape == shape else array
        if array.shape != (self.n, *shape):
            raise ValueError(f"{name} should be {(self.n, *shape)} for {self.n} robots; got {array.shape}")
        if array.dtype.kind == "f":
            broken = ~np.isfinite(array).reshape(self.n, -1).all(1)
            refused = np.flatnonzero(broken & ~ignored.numpy())
            if len(refused):
                raise ValueError(f"{name} of robot {refused[0]} holds NaN or infinite values; ignore it by its level, {top}")
            array = np.where(broken.reshape(-1, *(1,) * len(shape)), 0, array)
        if len(shape) == 3 and len(trusted := array[~ignored.numpy()]) and not _is_image(trusted):
            raise ValueError(
                f"{name} is an image, uint8 or floats from 0 to 1; got {array.dtype} from {float(trusted.min()):.3g} to "
                f"{float(trusted.max()):.3g}. Turn it into uint8 from 0 to 255 first"
            )
        return torch.as_tensor(np.ascontiguousarray(array))


class ImageTokenAgent(ImitationAgent):
    """As `ImitationAgent`, for a model with `ImageTokens`: a timestep is one token, so all sensors share a noise level.

    Sampling the next token gives actions and an imagined observation, which the real one replaces.
    """

    codec_type = ImageTokens
    shared_level = True

    def _begin(self) -> None:
        self._executed = torch.zeros(self.n, *self.codec.shapes[ACTIONS])
        self._imagined: Tensor | None = None
        self._since = torch.full((self.n, 1), NEVER)

    def _tokens_of(self, timesteps: int) -> int:
        return timesteps

    @torch.no_grad()
    def act(self, observation: Mapping[str, Any], level: Level = 0, executed: NDArray[Any] | None = None) -> NDArray[np.float32]:
        levels = self._check_levels(level)
        if not (levels == levels[:, :1]).all():
            raise ValueError("this model has one token per timestep, so all sensors share a level; give one level for all")
        raw = {name: self._check_sensor(name, observation.get(name), levels[:, i])[:, None] for i, name in enumerate(self.sensors)}
        token, level_of = self.codec.encode({ACTIONS: self._executed[:, None], **raw}), levels[:, 0]
        noisy, denoised = self._add_noise(token, levels[:, :1]), self._to_denoise(levels[:, :1])[:, 0]
        if denoised.any():
            noisy, level_of = self._denoise_observation(noisy, level_of, denoised, 0)
            known = noisy.clone()
            # The executed actions are known. They were denoised together with the observation, which therefore uses them at its level only.
            known[:, :, -self.codec.chunk :] = token[:, :, -self.codec.chunk :]
            noisy = torch.where(expand(denoised[:, None], noisy), known, noisy)
        self._past.add(noisy, level_of[:, None])
        return self._decide(executed)

    @torch.no_grad()
    def imagine(self) -> tuple[NDArray[np.float32], dict[str, NDArray[np.float32]]]:
        if self._imagined is None:
            raise ValueError("imagine() continues from an observation; call act(observation) first")
        self._past.add(self._imagined, 0)
        decoded = self.codec.decode(self._imagined)
        return self._decide(), {name: decoded[name][:, 0].numpy() for name in self.sensors}

    def _denoiser(self, modality: int) -> Denoiser:
        return self.model.denoiser(None, self._past.state)

    def _without_padding(self, token: Tensor, modality: int) -> Tensor:
        return token

    def _decide(self, executed: NDArray[Any] | None = None) -> NDArray[np.float32]:
        x = torch.randn(self.n, 1, *self.codec.event, generator=self.generator)
        x[:, :, -self.codec.chunk :] *= self.sampler.temperature
        self._imagined = self._denoise(x, 0, self.sampler)
        decided = self.codec.decode(self._imagined)[ACTIONS][:, 0]
        self._executed = decided if executed is None else torch.as_tensor(np.asarray(executed, dtype=np.float32))
        return decided.numpy()


def agent_for(model: DiffusionForcing, sampler: Sampler = SAMPLER, options: AgentOptions | None = None, seed: int = 0) -> ImitationAgent:
    """The agent that fits a model's codec."""
    kind = ImageTokenAgent if isinstance(model.codec, ImageTokens) else ImitationAgent
    return kind(model, sampler, options, seed)


def _options_of(run: Path) -> tuple[Sampler, AgentOptions]:
    """Sampler and agent options of a run's config; the defaults if the folder holds no run of imitation."""
    file = run / "config.json"
    config = read_json(file) if file.is_file() else None
    task = config.get("task") if isinstance(config, dict) else None
    if not isinstance(task, dict) or task.get("kind") != "Imitation" or not {"sampler", "agent"} <= task.keys():
        return SAMPLER, AgentOptions()
    sampler: Sampler = from_dict(Sampler, task["sampler"], f"{file.name}: task.sampler")
    options: AgentOptions = from_dict(AgentOptions, task["agent"], f"{file.name}: task.agent")
    return sampler, options


def _is_image(array: NDArray[Any]) -> bool:
    """Whether numbers are uint8, or floats from 0 to 1."""
    return array.dtype == np.uint8 or (array.dtype.kind == "f" and bool((array >= 0).all() and (array <= 1).all()))
