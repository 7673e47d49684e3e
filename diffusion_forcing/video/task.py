"""Video (paper, section 4.1): worlds to walk through, roll-outs far beyond the training length, and curves of how they hold up."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from ..backbones.space_time import SpaceTime
from ..checks import check_divides, check_options
from ..engine.media import to_bytes, to_floats
from ..engine.task import Evaluation, Progress, Table, TaskData
from ..guidance import history_guidance
from ..sampling import Context, Sampler, rolling, rollout, stream
from .codec import Painted, Patches, Pixels
from .decoder import Drawing
from .policy import Walker, walker_of
from .windows import ClipWindows
from .worlds.doom import Doom
from .worlds.labyrinth import Labyrinth
from .worlds.voxels import Voxels

if TYPE_CHECKING:
    from ..model import Denoise, DiffusionForcing
    from .clips import ClipSet

Frames = NDArray[np.uint8]
FIT = 200  # clips that the codec is fitted to
SEEDS = {"train": 0, "valid": 1, "test": 2, "real": 1_000_002, "astray": 2_000_002}


@dataclass(frozen=True)
class Folder:
    """Clips of one's own: a folder of mp4, webp, gif or npz files, with actions beside them or without."""

    path: Path = Path("clips")
    """The folder."""
    px: int = 64
    """Height and width to which frames are cut and resized."""
    test: int = 4
    """How many clips are kept to judge by, from everywhere among their names: those beside each other are often of one kind."""
    action_kinds: int | None = None
    """How many kinds of actions there are, where files give them as numbers from 0."""

    def __post_init__(self) -> None:
        check_options(self, "px", "test")


@dataclass(frozen=True)
class RollOut:
    """How frames are sampled."""

    steps: int = 20
    """Denoising steps a token."""
    horizon: int = 1
    """Tokens sampled at a time: 1 is token after token."""
    schedule: Literal["autoregressive", "pyramid", "full_sequence", "rolling"] = "full_sequence"
    """Schedule matrix over these. rolling: one endless pyramid, in which up to `horizon` tokens, from 2 on, are on their way: sooner than
    token after token, and not quite as good."""
    slope: float = 4.0
    """Of the pyramid: rows from one token's start to the next one's. (Of the rolling: steps / horizon.)"""
    stabilization: int = 20
    """Level that generated tokens count as having, so that small errors do not add up."""
    context: int = 4
    """Tokens of the real clip that a roll-out continues; 0: from nothing."""
    led: int | None = None
    """So many tokens after the context are led by the real clip's actions. None: all are, though what is imagined soon differs from where
    these actions were meant for, and they lead into walls."""
    then: Literal["walker", "itself"] = "itself"
    """Who leads after these: a walker who looks at what is imagined and does as those of the clips do (it learns that on first use, in a
    minute or two); or nobody, the model walks by itself, if it learned to (--task.free)."""
    eta: float = 0.0
    """Fresh noise at each step: 0 none, 1 ancestral."""
    path: Literal["ddim", "euler_angle"] = "ddim"
    """What a step without fresh noise takes as constant: the predicted token and its noise, or the velocity between them, which keeps more
    of the spread of what may come: with few steps more contrast and motion, and a first token a little farther from the truth."""
    noise: float = 1.0
    """How large the noise is that a token begins as: 1 samples what may come, less keeps nearer to its middle. A small model makes more of
    noise than it should, and a little less is nearer to what really came; much less, and roll-outs fade."""
    history: float = 1.0
    """Towards what the past says, away from what would be said without one: 1 is the model as it is, 2 exaggerates: more contrast
    and motion, and errors that grow sooner, so that long roll-outs want more stabilization. Two passes a step."""
    compile: bool = False
    """Compile what denoises a token, once for as many roll-outs as are made together: half a minute or more at first, then a
    little sooner, on a busy machine more so. For long roll-outs token after token by `SpaceTime`; needs a C++ compiler.
    From nothing, with history, twice: the first token has no past."""
    between: int = 0
    """Of `dforce sample`: so many tokens between the context and as many tokens that really came after, instead of a roll-out."""

    def __post_init__(self) -> None:
        check_options(self, "steps", "horizon")
        if not 0 <= self.eta <= 1:
            raise ValueError(f"eta goes from 0 (no fresh noise) to 1 (ancestral); got {self.eta}")
        if self.path == "euler_angle" and self.eta:
            raise ValueError(
                f"the path by angle is one without fresh noise; got eta {self.eta}, add --task.sampling.eta 0 or --task.sampling.path ddim"
            )
        if not 0 <= self.noise <= 1:
            raise ValueError(f"noise goes from 0 (the middle of what may come) to 1 (anything, as often as it comes); got {self.noise}")
        if not 0 <= self.history < float("inf"):
            raise ValueError(f"history is 0 (as if there were none), 1 (as it is) or more; got {self.history}")
        if self.history != 1 and self.schedule == "rolling":
            raise ValueError(
                f"on a rolling tokens have no past of their own to be led by; got history {self.history}, add --task.sampling.history 1"
            )
        if self.walks and self.schedule == "rolling":
            raise ValueError(
                "on a rolling tokens begin before the walker could see what they follow; add --task.sampling.led None, or another schedule"
            )
        for name in ("context", "between", "led"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} counts tokens, from 0; got {getattr(self, name)}")

    @property
    def walks(self) -> bool:
        """Whether a walker comes to lead."""
        return self.led is not None and self.then == "walker"

    def sampler(self, matrix: Literal["autoregressive", "pyramid", "full_sequence"]) -> Sampler:
        """How tokens are denoised along a matrix of that name."""
        return Sampler(self.steps, matrix, self.slope, self.path, self.eta, temperature=self.noise)

    def wrap(self) -> Callable[[Any], Denoise] | None:
        """Guidance, as samplers take it."""
        return None if self.history == 1 else functools.partial(history_guidance, scale=self.history)


@dataclass(frozen=True)
class Video:
    """Clips of a world, how they become tokens, and how roll-outs are judged."""

    world: Labyrinth | Voxels | Doom | Folder = field(default_factory=Labyrinth)
    """Where clips come from."""
    clips: int = 2000
    """Clips to train on, of a world that is drawn."""
    frames: int = 64
    """Frames of each of these."""
    tokens: int = 9
    """Tokens a window of training has."""
    stack: int = 4
    """Frames a token."""
    patch: int = 8
    """Side of a patch of pixels that becomes one place of a token; 0: tokens are the pixels themselves."""
    components: int = 64
    """Numbers a patch is told by: its principal directions."""
    whiten: float = 0.5
    """How far these are made equally large: 0 not at all, 1 all alike."""
    told: bool = True
    """Whether the model is told the actions, where the clips have some."""
    free: float = 0.0
    """Share of training windows in which actions are told no more from some token on, so that the model learns to walk by itself too:
    0 to 1. More than 0 adds a number to what is told: whether there is nothing to tell."""
    mirror: bool = False
    """Half of the training windows are seen in a mirror, where the model is told no actions: twice as much to learn from."""
    data_seed: int = 0
    """Of the worlds."""
    length: int = 200
    """Frames to generate for each clip when judging or sampling."""
    real: int = 120
    """Real clips to compare with when judging."""
    sampling: RollOut = field(default_factory=RollOut)
    """How frames are sampled."""

    def __post_init__(self) -> None:
        check_options(self, "clips", "frames", "tokens", "stack", "length", "real")
        if not 0 <= self.free <= 1:
            raise ValueError(f"free is a share of the training windows, from 0 to 1; got {self.free}")
        if self.sampling.led is not None and not self.told:
            raise ValueError("a model that is told no actions always walks by itself; add --task.sampling.led None")
        if self.sampling.led is not None and not self.sampling.walks and not self.free:
            raise ValueError(
                f"a model that was told all actions cannot walk by itself after {self.sampling.led} tokens; add --task.sampling.led None, "
                "or --task.sampling.then walker, or train with --task.free 0.3"
            )
        check_divides(self.stack, self.length, "roll-outs are cut into tokens of so many frames")
        if isinstance(self.world, Folder):
            return self._check_patch()
        check_divides(self.stack, self.frames, "clips are cut into tokens of so many frames")
        if self.frames < self.tokens * self.stack:
            raise ValueError(
                f"a window of {self.tokens} tokens has {self.tokens * self.stack} frames, but clips have {self.frames}; give them more"
            )
        return self._check_patch()

    def _check_patch(self) -> None:
        if self.patch:
            check_divides(self.patch, self.world.px, "frames are cut into patches of so many pixels")

    def prepare(self, progress: Progress | None = None) -> Path:
        """The clips to train on, made or read if they are not in the cache. Returns their file."""
        return Path(self.clips_of("train", progress).frames.filename)  # type: ignore[attr-defined]

    def clips_of(self, part: str, progress: Progress | None = None, count: int | None = None, frames: int | None = None) -> ClipSet:
        """Clips to train on, to validate on or to judge by ("train", "valid", "test")."""
        from .clips import prepare_clips, prepare_world

        if isinstance(self.world, Folder):
            # Of any length, so that which of them are kept to judge by does not depend on the windows.
            found = prepare_clips(self.world.path, self.world.px, progress=progress, action_kinds=self.world.action_kinds)
            _say_notes(found.notes)
            return found
        number = count or (self.clips if part == "train" else max(16, self.clips // 20))
        return prepare_world(self.world, number, frames or self.frames, seed=3 * self.data_seed + SEEDS[part], progress=progress)

    def data(self) -> TaskData:
        return _data(self)

    def data_as(self, codec: nn.Module, raw: bool = False) -> TaskData:
        """As data, in the tokens of a model that was trained before. raw: as they are instead, frames stacked, for a painter."""
        from ..engine.log import progress_bar

        kind = (Patches, Painted) if self.patch else (Pixels,)
        if isinstance(codec, Patches | Painted) and self.patch and codec.patch != self.patch:
            raise ValueError(f"that model's patches have {codec.patch} px, this task's {self.patch}; add --task.patch {codec.patch}")
        if not isinstance(codec, kind) or codec.stack != self.stack:
            frames = f" of {codec.stack} frames" if hasattr(codec, "stack") else ""
            raise ValueError(f"that model's tokens are {type(codec).__name__}{frames}; this task's are {kind[0].__name__} of {self.stack}")
        with progress_bar() as progress:
            return _read(self, progress, Pixels(self.stack) if raw else codec)

    def conditions(self, actions: NDArray[np.float32]) -> Tensor:
        """(t, stack * a) from actions (t * stack, a), one a frame; (t, 0) where the model is not told.

        Where an action is NaN, its token's are not told: the model walks by itself. One that can has a further number, which says so.
        """
        t = len(actions) // self.stack
        if not self.told or not actions.shape[-1]:
            return torch.zeros(t, 0)
        told = torch.tensor(np.ascontiguousarray(actions[: t * self.stack])).reshape(t, -1)
        unknown = told.isnan().any(-1, keepdim=True)
        if self.free:
            return torch.cat([told.masked_fill(unknown, 0.0), unknown.to(told)], dim=-1)
        if unknown.any():
            raise ValueError("where actions are NaN a model walks by itself, which this one did not learn; train it with --task.free 0.3")
        return told

    def _told(self, actions: NDArray[np.float32] | None, tokens: int) -> Tensor | None:
        """Conditions (b, tokens, c) from actions (b, t, a); None where nothing is told.

        Where these end a model that can walks by itself. Otherwise a world's walker rests, and in clips of one's own, where no action may
        be at rest, the last one goes on.
        """
        if not self.told or actions is None or not actions.shape[-1]:
            return None
        missing = ((0, 0), (0, max(0, tokens * self.stack - actions.shape[1])), (0, 0))
        if self.free:
            padded = np.pad(actions, missing, constant_values=np.nan)
        else:
            padded = np.pad(actions, missing, mode="edge" if isinstance(self.world, Folder) else "constant")
        return torch.stack([self.conditions(one) for one in padded])[:, :tokens]

    def codec(self, clips: ClipSet, which: Sequence[int]) -> nn.Module:
        """Frames to tokens, fitted to some of the clips of these numbers."""
        if not self.patch:
            return Pixels(self.stack)
        some = np.array(which)[np.unique(np.linspace(0, len(which) - 1, min(FIT, len(which))).astype(int))]
        length = min(int(clips.lengths[some].min()), 64) // self.stack * self.stack
        frames = to_floats(np.stack([clips.clip(int(i)).frames[:length] for i in some]))
        return Patches.fit(frames, self.stack, self.patch, self.components, self.whiten)

    def roll_out(
        self, model: DiffusionForcing, length: int, context: Frames | None, actions: NDArray[np.float32] | None, *,
        batch: int | None = None, generator: Generator | None = None, sampling: RollOut | None = None, walker: Walker | None = None,
    ) -> Iterator[Frames]:  # fmt: skip
        """Frames (b, n, px, px, 3) as they are generated, `length` in all, in constant memory.

        context: (b, c, px, px, 3), frames to go on from, a multiple of the stack, or a single one, which then stands still for a token;
        None: from nothing. actions: (b, c + length, a), c as many frames as fill tokens. batch: how many, where neither says.
        walker: who leads windows that begin `led` tokens after the context or later, by what is seen then.
        """
        sampling = sampling or self.sampling
        if sampling.compile:
            compile_next(model)
        if context is not None and context.shape[1] == 1:
            context = np.repeat(context, self.stack, axis=1)
        if walker is not None and actions is None:
            actions = np.zeros((len(context) if context is not None else batch or 1, 0, walker.width), np.float32)
        tokens = -(-length // self.stack)
        given = None if context is None or not context.shape[1] else encoded(model, context)
        before = 0 if given is None else given.shape[1]
        cond = self._told(actions, before + tokens)
        cond = None if cond is None else cond.to(model.device)
        past, empty = Context(stabilization=sampling.stabilization), given
        if given is None and cond is None and model.traits.event is not None:
            empty = torch.zeros(batch or 1, 0, *model.traits.event)
        if sampling.schedule == "rolling":
            steps = min(sampling.steps, model.schedule.levels)
            sampler = dataclasses.replace(sampling.sampler("pyramid"), steps=steps, slope=float(-(-steps // sampling.horizon)))
            chunks = rolling(model, sampler, tokens, empty, cond, past=past, generator=generator)
        else:
            sampler = sampling.sampler(sampling.schedule).over(model.schedule, sampling.horizon)
            chunks = stream(model, sampler, tokens, empty, cond, past=past, wrap=sampling.wrap(), generator=generator)
        led = None if walker is None or cond is None else Led(self, walker, context, actions, cond, generator)
        drawing = Drawing(model) if given is None else Drawing(model, given[:, -1], to_floats(context[:, -1]).to(model.device))  # type: ignore[index]
        done = 0
        while done < tokens:
            if led is not None and done >= (sampling.led or 0):
                led.choose(before + done, min(sampling.horizon, tokens - done))
            chunk = next(chunks)
            told = None if cond is None else cond[:, before + done : before + done + chunk.shape[1]]
            done += chunk.shape[1]
            frames = to_bytes(drawing(chunk, told))
            if led is not None:
                led.see(frames)
            yield frames[:, : frames.shape[1] - max(0, done * self.stack - length)]

    def between(
        self, model: DiffusionForcing, first: Frames, last: Frames, tokens: int, *, actions: NDArray[np.float32] | None = None,
        generator: Generator | None = None, draws: int = 16,
    ) -> Frames:  # fmt: skip
        """Frames (b, tokens * stack, px, px, 3) between given ones before (b, c, ...) and after (b, e, ...), both multiples of the stack.

        A causal model cannot look ahead: `draws` ways on are sampled for each, what comes last in each is left to chance, and the one
        that best agrees with what comes after is kept, as judged by the likelihood of that.
        """
        from ..likelihood import elbo

        schedule = model.schedule
        known = [encoded(model, part) for part in (first, last)]
        before, after = known[0].shape[1], known[1].shape[1]
        b = len(first)
        cond = self._told(actions, before + tokens + after)
        cond = None if cond is None else cond.repeat_interleave(draws, dim=0).to(model.device)
        past = known[0].repeat_interleave(draws, dim=0)
        sampler = dataclasses.replace(self.sampling.sampler("full_sequence"), eta=0.0).over(schedule, 1)
        here = None if cond is None else cond[:, : before + tokens]
        made = rollout(model, sampler, tokens, past, here, wrap=self.sampling.wrap(), generator=generator)
        whole = torch.cat([past, made, known[1].repeat_interleave(draws, dim=0)], dim=1)
        with torch.no_grad():
            heard = Generator(model.device).manual_seed(0)
            said = elbo(model, schedule, whole, None, cond, ladder=schedule.ladder(8), draws=2, generator=heard)
            said = said[:, before + tokens : before + tokens + after]
        best = said.sum(1).view(b, draws).argmax(1)
        drawing = Drawing(model, known[0][:, -1], to_floats(first[:, -1]).to(model.device)) if before else Drawing(model)
        told = None if cond is None else cond[::draws, before : before + tokens]
        return to_bytes(drawing(made.unflatten(0, (b, draws))[torch.arange(b), best], told))

    @property
    def default_samples(self) -> int:
        return 16

    @property
    def default_shown(self) -> int:
        return 6

    def judged_by(
        self, number: int, length: int, progress: Progress | None = None, part: str = "test"
    ) -> tuple[Frames, NDArray[np.float32]]:  # fmt: skip
        """Real clips (n, length, px, px, 3) never trained on, and their actions. part: "real" for others than those of "test".

        Clips of one's own that were kept to judge by are cut into pieces one after another, of which `number` are taken from everywhere,
        whatever the part: there are no others.
        """
        clips = self.clips_of(part, progress, number, length)
        if not isinstance(self.world, Folder):
            places = clips.starts[:number].tolist()
        else:
            which = self._kept_back(clips)
            pieces = [int(clips.starts[i]) + first for i in which for first in range(0, int(clips.lengths[i]) - length + 1, length)]
            if not pieces:
                raise ValueError(f"no clip to judge by has {length} frames; the longest has {int(clips.lengths[which].max())}")
            places = [pieces[i] for i in np.unique(np.linspace(0, len(pieces) - 1, min(number, len(pieces))).astype(int))]
        return (np.stack([clips.frames[at : at + length] for at in places]),
                np.stack([clips.actions[at : at + length] for at in places]))  # fmt: skip

    def _kept_back(self, clips: ClipSet) -> list[int]:
        """Numbers of a folder's clips that are kept to judge by."""
        assert isinstance(self.world, Folder)
        return _from_everywhere(len(clips.starts), self.world.test)

    def _longest(self, wanted: int, progress: Progress | None = None) -> int:
        """As many frames as wanted, or as the longest clip to judge by has, of whole tokens."""
        if not isinstance(self.world, Folder):
            return wanted
        clips = self.clips_of("test", progress)
        return min(wanted, int(clips.lengths[self._kept_back(clips)].max())) // self.stack * self.stack

    def generate(
        self, model: DiffusionForcing, samples: int, seed: int, progress: Progress, show: Callable[[Frames], None] | None = None
    ) -> tuple[Frames, Frames, int]:
        """Roll-outs (n, context + length, px, px, 3) and the real clips they set out from, as far as these go. And the context's frames."""
        context = self.sampling.context * self.stack
        real, actions = self.judged_by(samples, max(context, self._longest(context + self.length, progress)), progress)
        walker = self.walker(progress) if self.sampling.walks else None
        if self.sampling.led is not None and walker is None:
            if not actions.shape[-1]:
                raise ValueError("these clips have no actions to be led by; add --task.sampling.led None")
            actions[:, context + self.sampling.led * self.stack :] = np.nan
        made = np.empty((len(real), context + self.length, *real.shape[2:]), np.uint8)
        made[:, :context] = real[:, :context]
        if show is not None and context:
            show(made[:, :context])
        done = context
        generator = Generator(model.device).manual_seed(seed)
        for chunk in self.roll_out(model, self.length, made[:, :context], actions, batch=len(real), generator=generator, walker=walker):
            made[:, done : done + chunk.shape[1]] = chunk
            done += chunk.shape[1]
            progress("frames", done - context, self.length)
            if show is not None:
                show(chunk)
        return made, real, context

    def evaluate(
        self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress,
        others: dict[str, tuple[Video, DiffusionForcing]] | None = None,
    ) -> Evaluation:  # fmt: skip
        """others: tasks and models by name to measure beside this one, from the same clips on. Their metrics are called `NAME: ...`."""
        from .figures import ASTRAY, WINDOW, beyond_training, draw_curves, film_of, judge

        made, truth, context = self.generate(model, samples, seed, progress)
        # Of clips of one's own in pieces of a window each, so that there are as many as can be.
        length = WINDOW if isinstance(self.world, Folder) else max(64, self.tokens * self.stack)
        real, _ = self.judged_by(self.real, self._longest(length, progress), progress, part="real")
        turns = self._turning(samples, context)
        shown, curves, metrics, columns = {"": made}, {}, {}, []
        runs = {"": (self, model), **{name: (self._judging_as(task), other) for name, (task, other) in (others or {}).items()}}
        for name, (task, one) in runs.items():
            if name:
                shown[name] = task.generate(one, samples, seed, progress)[0]
            scores, found = judge(shown[name], truth, real, context, self.stack, self.tokens * self.stack, progress, turns)
            columns.append(scores)
            metrics.update({f"{name}: {score}" if name else score: value for score, value in scores.items()})
            if found:
                curves[name or "this run"] = found
        if (strayed := self._led_astray(samples, context, progress)) is not None:
            scores, found = judge(strayed, truth[:, :context], real, context, self.stack, self.tokens * self.stack, progress)
            columns.append(scores)
            metrics.update({f"{ASTRAY}: {score}": value for score, value in scores.items()})
            if found:
                curves[ASTRAY] = found
        files = self._show(folder, made, truth, context)
        metrics |= (kept := self._show_codec(model, real[:4, :16], folder))
        quality = f"{kept['codec PSNR']:.1f} dB, LPIPS {kept['codec LPIPS']:.3f}"
        files["codec.png"] = f"Real frames, and below each what is left of it in a token: {quality}."
        film = film_of({"real": truth, **{name or "generated": clips for name, clips in shown.items()}}, folder)
        files[film] = f"The first roll-outs, {context} frames of context and then what is generated; rows are clips."
        if curves:
            draw_curves(curves["this run"], folder / "over_time.png", self.tokens * self.stack - context, curves)
            files["over_time.png"] = (
                "Over the roll-out, windows of 16 frames; grey: real against real. The dotted line ends a window of training. "
                f"{ASTRAY}: the world itself, "
                + ("led by the same walker." if self.sampling.walks else "under these actions, which were meant for another place.")
            )
        rows = tuple((score, *(f"{column[score]:.4g}" if score in column else "" for column in columns)) for score in columns[0])
        title = f"{len(made)} roll-outs of {self.length} frames after {context}, {self.sampling.steps} steps a token"
        if self.sampling.led is not None:
            title += f", of which {self.sampling.led} {'token is' if self.sampling.led == 1 else 'tokens are'} led"
            title += ", then by a walker" if self.sampling.walks else ""
        if self.sampling.history != 1:
            title += f", history {self.sampling.history:g}"
        if self.sampling.path != "ddim":
            title += f", path by {self.sampling.path}"
        if self.sampling.noise != 1:
            title += f", noise {self.sampling.noise:g}"
        heads = ["", *(name or ("this run" if len(columns) > 1 else "figure") for name in runs), ASTRAY][: 1 + len(columns)]
        tables = [Table(title, tuple(heads), rows)]
        if (late := beyond_training(curves, self.tokens * self.stack - context)) is not None:
            tables.append(late)
        return Evaluation(metrics, tuple(tables), files)

    def _led_astray(self, samples: int, context: int, progress: Progress) -> Frames | None:
        """Frames (n, context + length, px, px, 3) of places never trained on, led as the roll-outs are.

        By a walker, that is what a perfect model would show. By actions that were meant for the clips that roll-outs go on from, too: a
        model imagines other corners than were really there, and is then led into walls; so is the world itself here, elsewhere.
        None where there are no actions, no world to ask, or the model walks by itself.
        """
        if isinstance(self.world, Folder) or not self.told or (self.sampling.led is not None and not self.sampling.walks):
            return None
        _, actions = self.judged_by(samples, context + self.length)
        strayed = np.empty((samples, context + self.length, self.world.px, self.world.px, 3), np.uint8)
        seeds = np.random.SeedSequence([3 * self.data_seed + SEEDS["astray"]]).generate_state(samples, np.uint32)
        if self.sampling.walks:
            return self._walked([self.world.enter(int(seed)) for seed in seeds], strayed, progress)
        for i, seed in enumerate(seeds):
            someone = self.world.enter(int(seed))
            for t, action in enumerate(actions[i]):
                strayed[i, t] = someone.step(action)
            progress("frames of the world itself", i + 1, samples)
        return strayed

    def _walked(self, visitors: list[Any], frames: Frames, progress: Progress) -> Frames:
        """Fills frames (n, t, px, px, 3) with what visitors of a world see who are led by its walker."""
        walker, generator = self.walker(progress), Generator().manual_seed(0)
        seen = np.stack([someone.look() for someone in visitors])[:, None]
        done = np.zeros((len(visitors), self.stack, walker.width), np.float32)
        for at in range(0, frames.shape[1], self.stack):
            done = walker.choose(seen, done, 1, generator)
            for one, someone, actions in zip(frames, visitors, done, strict=True):
                for t, action in enumerate(actions[: frames.shape[1] - at]):
                    one[at + t] = someone.step(action)
            seen = frames[:, max(0, at - 1) : at + self.stack]
            progress("frames of the world itself", min(at + self.stack, frames.shape[1]), frames.shape[1])
        return frames

    def walker(self, progress: Progress | None = None) -> Walker:
        """Who leads roll-outs after `led` tokens: the world's own, taught by the clips to train on; the same for any model."""
        about = (type(self.world).__name__, repr(self.world), self.clips, self.frames, self.data_seed)

        def taught_by() -> tuple[ClipSet, list[int]]:
            clips = self.clips_of("train", progress)
            kept = self._kept_back(clips) if isinstance(self.world, Folder) else []
            return clips, [i for i in range(len(clips.starts)) if i not in kept]

        return walker_of(about, self.stack, taught_by, progress)

    def _show_codec(self, model: DiffusionForcing, frames: Frames, folder: Path) -> dict[str, float]:
        """Draws real frames (n, t, ...) above what encoding leaves of them; returns its PSNR and LPIPS."""
        from ..engine.media import contact_sheet
        from .figures import mean_lpips
        from .lpips import LPIPS
        from .scores import psnr

        tokens = encoded(model, frames[:, : frames.shape[1] // self.stack * self.stack])
        back = to_bytes(model.codec.decode(tokens))  # type: ignore[union-attr, operator]
        frames = frames[:, : back.shape[1]]
        rows = np.stack([frames, back], axis=1).reshape(-1, *frames.shape[1:])
        contact_sheet(rows, folder / "codec.png", names=["real", "encoded"] * len(frames), every=self.stack)
        error = psnr(frames, back)
        scores = {"codec PSNR": float(error[np.isfinite(error)].mean()) if np.isfinite(error).any() else float("inf")}
        scores["codec LPIPS"] = mean_lpips(LPIPS.pretrained(), frames, back)
        return scores

    def _judging_as(self, other: Video) -> Video:
        """The other's tokens and way of sampling, on this one's clips, as long, led as far, by as many steps and the same path and noise.

        One that never learned to walk by itself cannot be compared with one that does.
        """
        frames = self.sampling.context * self.stack
        check_divides(other.stack, frames, f"roll-outs set out from {frames} frames, but another run stacks")
        check_divides(other.stack, self.length, f"roll-outs are {self.length} frames long, but another run stacks")
        mine = self.sampling
        sampling = dataclasses.replace(
            other.sampling, context=frames // other.stack, led=None, steps=mine.steps, noise=mine.noise, path=mine.path, eta=mine.eta,
            history=1.0 if other.sampling.schedule == "rolling" else mine.history, then=mine.then,
        )  # fmt: skip
        if mine.led is not None and not mine.walks and not other.free:
            raise ValueError(
                f"roll-outs are led for {mine.led} tokens, and another run never learned to walk by itself; add --task.sampling.led None, "
                "or --task.sampling.then walker"
            )
        if mine.led is not None:
            check_divides(other.stack, mine.led * self.stack, f"{mine.led * self.stack} frames are led, but another run stacks")
            sampling = dataclasses.replace(sampling, led=mine.led * self.stack // other.stack)
        return dataclasses.replace(other, world=self.world, data_seed=self.data_seed, length=self.length, real=self.real, sampling=sampling)

    def _turning(self, samples: int, context: int) -> NDArray[np.bool_] | None:
        """(n,), in which of the clips the first token generated turns at half speed or more; None where clips do not say."""
        if isinstance(self.world, Folder):
            return None
        _, actions = self.judged_by(samples, context + self.length)
        return np.abs(actions[:, context : context + self.stack, 1]).max(1) >= 0.5

    def sample(self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress) -> list[Path]:
        from ..engine.media import Film, film_name

        if self.sampling.between:
            return self._sample_between(model, folder, samples, seed, progress)
        film = folder / film_name("samples")
        with Film(film, fps=15, scale=3) as out:
            made, truth, context = self.generate(model, samples, seed, progress, lambda frames: out.add(_grid(frames)))
        files = self._show(folder, made, truth, context)
        return [film, *(folder / name for name in files)]

    def _sample_between(self, model: DiffusionForcing, folder: Path, samples: int, seed: int, progress: Progress) -> list[Path]:
        """Real clips of which the middle is imagined, as a film and a sheet."""
        from ..engine.media import contact_sheet, write_film

        context, gap = max(1, self.sampling.context) * self.stack, self.sampling.between * self.stack
        real, actions = self.judged_by(samples, 2 * context + gap, progress)
        made = real.copy()
        for i in range(len(real)):
            progress("clips", i, len(real))
            made[i, context : context + gap] = self.between(
                model, real[i : i + 1, :context], real[i : i + 1, context + gap :], self.sampling.between, actions=actions[i : i + 1],
                generator=Generator(model.device).manual_seed(seed + i),
            )[0]  # fmt: skip
        progress("clips", len(real), len(real))
        rows = np.stack([real, made], axis=1)[:4].reshape(-1, *real.shape[1:])
        sheet = folder / "between.png"
        contact_sheet(rows, sheet, names=["real", "imagined"] * (len(rows) // 2), every=self.stack, mark=context)
        return [folder / write_film(folder, "between", _grid(made), fps=15, scale=3), sheet]

    def _show(self, folder: Path, made: Frames, truth: Frames, context: int) -> dict[str, str]:
        """Draws contact sheets; returns their captions by name."""
        from ..engine.media import contact_sheet

        n = min(4, len(made))
        begin = min(context + 8 * self.stack, made.shape[1])
        rows, names = [], []
        for i in range(n):
            if truth.shape[1] >= begin:
                rows.append(truth[i, :begin])
                names.append("real")
            rows.append(made[i, :begin])
            names.append("generated")
        contact_sheet(np.stack(rows), folder / "beginning.png", names=names, every=self.stack, mark=context)
        every = max(1, made.shape[1] // 12)
        contact_sheet(made[:8], folder / "rollout.png", every=every, mark=context)
        return {"beginning.png": "Where roll-outs set out from: context framed blue, one frame a token; above each what really happened.",
                "rollout.png": "Whole roll-outs, twelve frames of each."}  # fmt: skip


def _from_everywhere(of: int, number: int) -> list[int]:
    """So many of the numbers below `of`, evenly."""
    number = min(number, of)
    return [(2 * i + 1) * of // (2 * number) for i in range(number)]


class Led:
    """Roll-outs that a walker leads: what was seen and done last, and what is to be done next, written into the conditions cond
    (b, tokens, c) that a sampler reads window by window.
    """

    def __init__(
        self, task: Video, walker: Walker, context: Frames | None, actions: NDArray[np.float32] | None, cond: Tensor,
        generator: Generator | None,
    ) -> None:  # fmt: skip
        self.task, self.walker, self.cond = task, walker, cond
        self.actions = np.zeros((len(cond), cond.shape[1] * task.stack, walker.width), np.float32)
        if actions is not None:
            known = min(actions.shape[1], self.actions.shape[1])
            self.actions[:, :known] = np.nan_to_num(actions[:, :known])
        # From nothing a walker sees grey, until there is something.
        self.seen: Frames = np.full((len(cond), 1, task.world.px, task.world.px, 3), 127, np.uint8) if context is None else context
        seed = 0 if generator is None else generator.initial_seed()
        self.generator = Generator().manual_seed(seed)

    def choose(self, at: int, tokens: int) -> None:
        """What is done in so many tokens from number `at` on."""
        stack = self.task.stack
        done = self.actions[:, (at - 1) * stack : at * stack] if at else np.zeros_like(self.actions[:, :stack])
        chosen = self.walker.choose(self.seen, done, tokens, self.generator)
        self.actions[:, at * stack : (at + tokens) * stack] = chosen
        self.cond[:, at : at + tokens] = torch.stack([self.task.conditions(one) for one in chosen]).to(self.cond)

    def see(self, frames: Frames) -> None:
        """What came."""
        self.seen = np.concatenate([self.seen[:, -1:], frames], axis=1)


def compile_next(model: DiffusionForcing) -> None:
    """Let a model's backbone compile its pass over a single token, if it knows how."""
    if not isinstance(model.backbone, SpaceTime):
        raise ValueError(
            f"only SpaceTime has a pass over single tokens to compile, and this model's backbone is {type(model.backbone).__name__}; "
            "leave out --task.sampling.compile"
        )
    model.backbone.compile_decode_step()


def encoded(model: DiffusionForcing, frames: Frames) -> Tensor:
    """Frames (b, t * stack, px, px, 3) as tokens, where the model is."""
    tokens: Tensor = model.codec.encode(to_floats(frames).to(model.device))  # type: ignore[union-attr, operator]
    return tokens


def _grid(frames: Frames) -> Frames:
    """Frames (t, rows * px, columns * px, 3) of clips (n, t, px, px, 3), up to six in a row."""
    n = len(frames)
    columns = min(n, 6)
    whole = np.concatenate([frames, np.zeros((-n % columns, *frames.shape[1:]), np.uint8)])
    return np.concatenate([np.concatenate(list(whole[i : i + columns]), axis=2) for i in range(0, len(whole), columns)], axis=1)


@functools.lru_cache(maxsize=2)
def _data(task: Video) -> TaskData:
    from ..engine.log import progress_bar

    with progress_bar() as progress:
        return _read(task, progress)


def _read(task: Video, progress: Progress, codec: nn.Module | None = None) -> TaskData:
    train = task.clips_of("train", progress)
    learned, valid, judged = list(range(len(train.starts))), train, []
    if isinstance(task.world, Folder):
        kept = task._kept_back(train)
        needed = task.tokens * task.stack
        learned = [i for i in learned if i not in kept and train.lengths[i] >= needed]
        if len(learned) < 2:
            raise ValueError(
                f"{len(train.starts)} clips, of which {len(kept)} are kept to judge by, leave too few to train on: "
                f"{len(learned)} that have a window's {needed} frames; give more, keep fewer (--task.world.test), or shorten the window "
                "(--task.tokens)"
            )
        judged = [learned[i] for i in _from_everywhere(len(learned), max(1, len(learned) // 10))]
        learned = [i for i in learned if i not in judged]
    else:
        valid = task.clips_of("valid", progress)
        judged = list(range(len(valid.starts)))
    codec = task.codec(train, learned) if codec is None else codec

    def windows(clips: ClipSet, which: list[int]) -> ClipWindows:
        told = task.told and clips.actions.shape[-1] > 0
        free, mirror = task.free if told else 0.0, task.mirror and not told
        return ClipWindows(clips, which, codec, task.stack, task.tokens, task.conditions, free, mirror)

    return TaskData(windows(train, learned), windows(valid, judged), codec)


@functools.lru_cache(maxsize=8)  # said once
def _say_notes(notes: tuple[str, ...]) -> None:
    from .clips import said

    if notes:
        warnings.warn(said(notes, 20), stacklevel=2)
