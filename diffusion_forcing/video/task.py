"""Video (paper, section 4.1): worlds to walk through, roll-outs far beyond the training length, and curves of how they hold up."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from ..checks import check_divides, check_options
from ..codecs import codec_traits
from ..engine.log import progress_bar
from ..engine.media import Film, film_name, grid, to_bytes, to_floats, write_film
from ..engine.task import Evaluation, Progress, Task, TaskData
from ..model import DiffusionForcing
from ..sampling import Context, Sampler
from .clips import ClipSet, join_notes, prepare_clips, prepare_world
from .codec import Patches, PatchesWithDecoder, Pixels
from .evaluation import WINDOW, Curves, beyond_training, mean_lpips, mean_psnr, score_rollouts, table_of_scores
from .figures import draw_curves, draw_pairs, draw_rollouts, film_side_by_side
from .lpips import LPIPS
from .policy import ActionPolicy, load_policy
from .rollout import Actions, Frames, FrameSampler, RollOut, encode_frames
from .simulator import follow_actions, follow_policy
from .windows import ClipWindows
from .worlds.doom import Doom
from .worlds.labyrinth import Labyrinth
from .worlds.voxels import Voxels

CODEC_CLIPS = 200  # clips that the codec is fitted to, at most
RULER = " (The decoder was trained on LPIPS, the network behind these distances.)"
SEEDS = {"train": 0, "valid": 1, "test": 2, "real": 1_000_002, "simulator": 2_000_002}


@dataclass(frozen=True)
class Folder:
    """Clips of your own: a folder of mp4, webp, gif or npz files, with actions beside them or without."""

    path: Path = Path("clips")
    """The folder."""
    px: int = 64
    """Height and width to which frames are cut and resized."""
    test: int = 4
    """Number of clips held out for evaluation, evenly from their sorted names: neighbours are often of one kind."""
    action_kinds: int | None = None
    """Number of discrete actions, where files give them as numbers from 0."""

    def __post_init__(self) -> None:
        check_options(self, "px", "test")


@dataclass(frozen=True)
class Video(Task):
    """Clips of a world, how they become tokens, and how roll-outs are sampled and evaluated."""

    world: Labyrinth | Voxels | Doom | Folder = field(default_factory=Labyrinth)
    """Where clips come from."""
    clips: int = 2000
    """Training clips, of a world that is simulated."""
    frames: int = 64
    """Frames of each of these."""
    tokens: int = 9
    """Tokens of a training window."""
    stack: int = 4
    """Frames of a token."""
    patch: int = 8
    """Side in pixels of the patches that become places of a token's grid. 0: tokens are the pixels themselves."""
    components: int = 64
    """Principal components kept of a patch."""
    whiten: float = 0.5
    """How far these are scaled to equal variance: 0 not at all, 1 completely."""
    action_conditioned: bool = True
    """Condition on the actions, where the clips have some."""
    mirror: bool = False
    """Mirror half of the training windows, where the model is not conditioned on actions: twice the data."""
    data_seed: int = 0
    """Of the worlds."""
    length: int = 200
    """Frames to generate for each clip in evaluation and sampling."""
    real: int = 120
    """Real clips to compare with in evaluation."""
    sampler: Sampler = field(default_factory=Sampler)
    """How tokens are denoised."""
    context: Context = field(default_factory=lambda: Context(stabilization=20))
    """What a roll-out remembers."""
    rollout: RollOut = field(default_factory=RollOut)
    """How a roll-out proceeds."""

    main_options = ("clips", "length", "world.path", "world.size", "sampler.steps", "context.stabilization", "rollout.actions")
    short_options = (("--data", "--task.world.path"),)

    def __post_init__(self) -> None:
        check_options(self, "clips", "frames", "tokens", "stack", "length", "real")
        if self.rollout.actions == "policy" and not self.action_conditioned:
            raise ValueError("a model that is not conditioned on actions follows no policy; add --task.rollout.actions clip")
        check_divides(self.stack, self.length, "roll-outs are cut into tokens of so many frames")
        if not isinstance(self.world, Folder):
            check_divides(self.stack, self.frames, "clips are cut into tokens of so many frames")
            if self.frames < self.tokens * self.stack:
                raise ValueError(
                    f"a window of {self.tokens} tokens has {self.tokens * self.stack} frames, but clips have {self.frames}; give them more"
                )
        if self.patch:
            check_divides(self.patch, self.world.px, "frames are cut into patches of so many pixels")

    @property
    def default_samples(self) -> int:
        return 16

    @property
    def default_shown(self) -> int:
        return 6

    @property
    def context_frames(self) -> int:
        """Real frames that a roll-out continues."""
        return self.rollout.prefix * self.stack

    @property
    def window_frames(self) -> int:
        """Frames of a training window."""
        return self.tokens * self.stack

    def supports_device(self, device: str) -> bool:
        return True

    # Data.

    def prepare(self, progress: Progress | None = None) -> Path:
        """Make or read the training clips if they are not in the cache. Returns their file."""
        return Path(self.clips_of("train", progress).frames.filename)  # type: ignore[attr-defined]

    def clips_of(self, part: str, progress: Progress | None = None, count: int | None = None, frames: int | None = None) -> ClipSet:
        """Clips for training, validation or evaluation ("train", "valid", "test"); of a folder all clips, whatever the part."""
        if isinstance(self.world, Folder):
            # Of any length, so that the choice of those held out does not depend on the windows.
            clips = prepare_clips(self.world.path, self.world.px, progress=progress, action_kinds=self.world.action_kinds)
            _warn_notes(clips.notes)
            return clips
        number = count or (self.clips if part == "train" else max(16, self.clips // 20))
        return prepare_world(self.world, number, frames or self.frames, seed=3 * self.data_seed + SEEDS[part], progress=progress)

    def data(self) -> TaskData:
        return _data(self)

    def data_as(self, codec: nn.Module, raw: bool = False) -> TaskData:
        """As data, in the tokens of a model that was trained before. raw: frames stacked instead, for the training of a decoder."""
        kind = (Patches, PatchesWithDecoder) if self.patch else (Pixels,)
        if isinstance(codec, Patches | PatchesWithDecoder) and self.patch and codec.patch != self.patch:
            raise ValueError(f"that model's patches have {codec.patch} px, this task's {self.patch}; add --task.patch {codec.patch}")
        stack = codec_traits(codec).stack
        if not isinstance(codec, kind) or stack != self.stack:
            name = type(codec).__name__
            raise ValueError(f"that model's tokens are {name} of {stack} frames; this task's are {kind[0].__name__} of {self.stack}")
        with progress_bar() as progress:
            return _read(self, progress, Pixels(self.stack) if raw else codec)

    def build_cond(self, actions: Actions) -> Tensor:
        """(..., t, stack * a) from actions (..., t * stack, a), one a frame; (..., t, 0) where the model is not conditioned on them."""
        t = actions.shape[-2] // self.stack
        if not self.action_conditioned or not actions.shape[-1]:
            return torch.zeros(*actions.shape[:-2], t, 0)
        return torch.tensor(np.ascontiguousarray(actions[..., : t * self.stack, :])).reshape(*actions.shape[:-2], t, -1)

    def rollout_cond(self, actions: Actions | None, tokens: int) -> Tensor | None:
        """Conditions (b, tokens, c) from actions (b, t, a); None where the model has none.

        Beyond the last action a simulated agent rests; in a folder's clips, where no action may be at rest, the last one is repeated.
        """
        if not self.action_conditioned or actions is None or not actions.shape[-1]:
            return None
        missing = ((0, 0), (0, max(0, tokens * self.stack - actions.shape[1])), (0, 0))
        padded = np.pad(actions, missing, mode="edge" if isinstance(self.world, Folder) else "constant")
        return self.build_cond(padded)[:, :tokens]

    def fit_codec(self, clips: ClipSet, which: Sequence[int]) -> nn.Module:
        """Frames to tokens, fitted to some of the clips of these numbers."""
        if not self.patch:
            return Pixels(self.stack)
        some = np.array(which)[np.unique(np.linspace(0, len(which) - 1, min(CODEC_CLIPS, len(which))).astype(int))]
        length = min(int(clips.lengths[some].min()), 64) // self.stack * self.stack
        frames = to_floats(np.stack([clips.clip(int(i)).frames[:length] for i in some]))
        return Patches.fit(frames, self.stack, self.patch, self.components, self.whiten)

    def test_clips(self, number: int, length: int, progress: Progress | None = None, part: str = "test") -> tuple[Frames, Actions]:
        """Real clips (n, length, px, px, 3) never trained on, and their actions (n, length, a). part: "real" for others than "test".

        A folder's held-out clips are cut into consecutive pieces, of which `number` are taken evenly, whatever the part.
        """
        clips = self.clips_of(part, progress, number, length)
        if not isinstance(self.world, Folder):
            places = clips.starts[:number].tolist()
        else:
            which = self._held_out(clips)
            pieces = [int(clips.starts[i]) + first for i in which for first in range(0, int(clips.lengths[i]) - length + 1, length)]
            if not pieces:
                raise ValueError(f"no clip held out for evaluation has {length} frames; the longest has {int(clips.lengths[which].max())}")
            places = [pieces[i] for i in np.unique(np.linspace(0, len(pieces) - 1, min(number, len(pieces))).astype(int))]
        return (np.stack([clips.frames[at : at + length] for at in places]),
                np.stack([clips.actions[at : at + length] for at in places]))  # fmt: skip

    def reference_clips(self, progress: Progress | None = None) -> Frames:
        """The real clips (n, t, px, px, 3) that roll-outs are compared with over time, of at least a window of the scores each."""
        # Of a folder in pieces of such a window, so that there are as many as can be.
        length = WINDOW if isinstance(self.world, Folder) else max(64, self.window_frames)
        return self.test_clips(self.real, self._at_most(length, progress), progress, part="real")[0]

    def _held_out(self, clips: ClipSet) -> list[int]:
        """Numbers of a folder's clips that are held out for evaluation."""
        return _evenly(len(clips.starts), self.world.test) if isinstance(self.world, Folder) else []

    def _at_most(self, length: int, progress: Progress | None = None) -> int:
        """That many frames, or as many as the longest clip held out for evaluation has, in whole tokens."""
        if not isinstance(self.world, Folder):
            return length
        clips = self.clips_of("test", progress)
        return min(length, int(clips.lengths[self._held_out(clips)].max())) // self.stack * self.stack

    # Roll-outs.

    def frame_sampler(self, model: DiffusionForcing) -> FrameSampler:
        """A model with this task's way of sampling."""
        return FrameSampler(model, self.sampler, self.context, self.rollout, self.rollout_cond)

    def roll_out(
        self, model: DiffusionForcing, length: int, context: Frames | None, actions: Actions | None, *, batch: int = 1,
        generator: Generator | None = None, policy: ActionPolicy | None = None,
    ) -> Iterator[Frames]:  # fmt: skip
        """Frames (b, n, px, px, 3) as they are generated, `length` in all, in constant memory; see `FrameSampler.stream`."""
        return self.frame_sampler(model).stream(length, context, actions, batch=batch, generator=generator, policy=policy)

    def generate(
        self, model: DiffusionForcing, samples: int, seed: int, progress: Progress, show: Callable[[Frames], None] | None = None
    ) -> tuple[Frames, Frames, int]:
        """Roll-outs (n, context + length, px, px, 3), the real clips they continue (as far as these go), and the context's frames."""
        context = self.context_frames
        real, actions = self.test_clips(samples, max(context, self._at_most(context + self.length, progress)), progress)
        policy = self.policy(progress) if self.rollout.actions == "policy" else None
        frames = np.empty((len(real), context + self.length, *real.shape[2:]), np.uint8)
        frames[:, :context] = real[:, :context]
        if show is not None and context:
            show(frames[:, :context])
        done = context
        generator = Generator(model.device).manual_seed(seed)
        for chunk in self.roll_out(model, self.length, frames[:, :context], actions, batch=len(real), generator=generator, policy=policy):
            frames[:, done : done + chunk.shape[1]] = chunk
            done += chunk.shape[1]
            progress("frames", done - context, self.length)
            if show is not None:
                show(chunk)
        return frames, real, context

    def policy(self, progress: Progress | None = None) -> ActionPolicy:
        """The action policy of this world, trained on its training clips; the same for any model."""
        key = (type(self.world).__name__, repr(self.world), self.clips, self.frames, self.data_seed)

        def training_clips() -> tuple[ClipSet, list[int]]:
            clips = self.clips_of("train", progress)
            held_out = self._held_out(clips)
            return clips, [i for i in range(len(clips.starts)) if i not in held_out]

        return load_policy(key, self.stack, training_clips, progress)

    # Evaluation and samples.

    def compare(
        self, model: DiffusionForcing, others: Mapping[str, tuple[Any, DiffusionForcing]], folder: Path, *, samples: int, seed: int,
        progress: Progress,
    ) -> Evaluation:  # fmt: skip
        return self.evaluate(model, folder, samples=samples, seed=seed, progress=progress, others=dict(others))

    def evaluate(
        self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress,
        others: dict[str, tuple[Video, DiffusionForcing]] | None = None,
    ) -> Evaluation:  # fmt: skip
        """others: tasks and models by name to measure beside this one, on the same clips. Their metrics are called `NAME: ...`."""
        clips, truth, context = self.generate(model, samples, seed, progress)
        real, turns = self.reference_clips(progress), self._turning(samples)
        runs = {"this run": clips}
        for name, (task, other) in (others or {}).items():
            runs[name] = self._sampling_like_this(task).generate(other, samples, seed, progress)[0]
        simulator = f"simulator, same {'policy' if self.rollout.actions == 'policy' else 'actions'}"
        simulated = self._simulate(samples, progress)
        columns, curves = dict[str, dict[str, float]](), dict[str, Curves]()
        metrics = dict[str, float]()
        for name, frames in (runs | ({} if simulated is None else {simulator: simulated})).items():
            known, turning = (truth[:, :context], None) if name == simulator else (truth, turns)
            columns[name], over_time = score_rollouts(frames, known, real, context, self.stack, self.window_frames, progress, turning)
            metrics |= {score if name == "this run" else f"{name}: {score}": value for score, value in columns[name].items()}
            if over_time:
                curves[name] = over_time
        figures = draw_rollouts(folder, clips, truth, context, self.stack)
        codec_scores, figures["codec.png"] = self._codec_quality(model, real[:4, :16], folder / "codec.png")
        ruler = RULER if isinstance(model.codec, PatchesWithDecoder) else ""
        figures["codec.png"] += ruler
        film = film_side_by_side({"real": truth, **runs}, folder)
        figures[film] = f"The first roll-outs, {context} frames of context and then what is generated; rows are clips."
        if curves:
            draw_curves(curves, folder / "over_time.png", self.window_frames - context, simulator)
            meant = "" if self.rollout.actions == "policy" else ", which were meant for another place"
            figures["over_time.png"] = (
                "Scores over the roll-out, in windows of 16 frames; grey: real against real. The dotted line ends a training window. "
                f"{simulator}: what a perfect model would show{meant}.{ruler}"
            )
        tables = [table_of_scores(f"{len(clips)} {self._described()}{ruler}", columns)]
        if (late := beyond_training(curves, self.window_frames - context)) is not None:
            tables.append(late)
        return Evaluation(metrics | codec_scores, tuple(tables), figures)

    def _described(self) -> str:
        """How roll-outs are sampled, in words, as far as it is not the default."""
        sampler, rollout = self.sampler, self.rollout
        text = f"roll-outs of {self.length} frames after {self.context_frames}, {sampler.steps} steps a token"
        if rollout.actions == "policy":
            text += f", actions by the policy after {rollout.clip_tokens} tokens"
        if rollout.history_guidance != 1:
            text += f", history guidance {rollout.history_guidance:g}"
        if sampler.solver != "ddim":
            text += f", solver {sampler.solver}"
        if sampler.temperature != 1:
            text += f", temperature {sampler.temperature:g}"
        return text

    def _simulate(self, samples: int, progress: Progress) -> Frames | None:
        """Frames (n, context + length, px, px, 3) of the simulator in places never trained on, with the roll-outs' source of actions.

        None where there is no simulator, or the model is not conditioned on actions.
        """
        if isinstance(self.world, Folder) or not self.action_conditioned:
            return None
        seeds = np.random.SeedSequence([3 * self.data_seed + SEEDS["simulator"]]).generate_state(samples, np.uint32).tolist()
        length = self.context_frames + self.length
        if self.rollout.actions == "policy":
            return follow_policy(self.world, seeds, self.policy(progress), length, progress)
        return follow_actions(self.world, seeds, self.test_clips(samples, length)[1], progress)

    def _turning(self, samples: int) -> NDArray[np.bool_] | None:
        """(n,), in which of the clips the first generated token turns at half speed or more; None where clips do not say."""
        if isinstance(self.world, Folder):
            return None
        context = self.context_frames
        _, actions = self.test_clips(samples, context + self.length)
        return np.abs(actions[:, context : context + self.stack, 1]).max(1) >= 0.5

    def _sampling_like_this(self, other: Video) -> Video:
        """The other's tokens, on this one's clips, with roll-outs as long, actions from the same source, and as many steps."""
        check_divides(other.stack, self.context_frames, f"roll-outs continue {self.context_frames} frames, but another run stacks")
        check_divides(other.stack, self.length, f"roll-outs are {self.length} frames long, but another run stacks")
        clip_frames = self.rollout.clip_tokens * self.stack
        check_divides(other.stack, clip_frames, f"{clip_frames} frames follow the clip's actions, but another run stacks")
        mine, rollout = self.sampler, other.rollout
        sampler = dataclasses.replace(other.sampler, steps=mine.steps, solver=mine.solver, eta=mine.eta, temperature=mine.temperature)
        rollout = dataclasses.replace(
            rollout, prefix=self.context_frames // other.stack, clip_tokens=clip_frames // other.stack, actions=self.rollout.actions,
            history_guidance=1.0 if rollout.rolling else self.rollout.history_guidance,
        )  # fmt: skip
        return dataclasses.replace(
            other, world=self.world, data_seed=self.data_seed, length=self.length, real=self.real, sampler=sampler, rollout=rollout
        )

    def _codec_quality(self, model: DiffusionForcing, frames: Frames, file: Path) -> tuple[dict[str, float], str]:
        """Draws real frames (n, t, ...) above what encoding leaves of them; returns PSNR and LPIPS between the two, and a caption."""
        tokens = encode_frames(model, frames[:, : frames.shape[1] // self.stack * self.stack])
        decoded = to_bytes(model.codec.decode(tokens))  # type: ignore[union-attr, operator]
        frames = frames[:, : decoded.shape[1]]
        draw_pairs(file, frames, decoded, "decoded", self.stack)
        quality = {"codec PSNR": mean_psnr(frames, decoded), "codec LPIPS": mean_lpips(LPIPS.pretrained(), frames, decoded)}
        text = f"{quality['codec PSNR']:.1f} dB, LPIPS {quality['codec LPIPS']:.3f}"
        return quality, f"Real frames, and below each what is left of it after encoding and decoding: {text}."

    def sample(self, model: DiffusionForcing, folder: Path, *, samples: int, seed: int, progress: Progress) -> list[Path]:
        if self.rollout.infill:
            return self._sample_infill(model, folder, samples, seed, progress)
        film = folder / film_name("samples")
        with Film(film, fps=15, scale=3) as out:
            clips, truth, context = self.generate(model, samples, seed, progress, lambda frames: out.add(grid(frames)))
        return [film, *(folder / name for name in draw_rollouts(folder, clips, truth, context, self.stack))]

    def _sample_infill(self, model: DiffusionForcing, folder: Path, samples: int, seed: int, progress: Progress) -> list[Path]:
        """Real clips of which the middle is generated, as a film and a sheet."""
        context, gap = max(1, self.rollout.prefix) * self.stack, self.rollout.infill * self.stack
        real, actions = self.test_clips(samples, 2 * context + gap, progress)
        filled, sampler = real.copy(), self.frame_sampler(model)
        for i in range(len(real)):
            progress("clips", i, len(real))
            filled[i, context : context + gap] = sampler.infill(
                real[i : i + 1, :context], real[i : i + 1, context + gap :], self.rollout.infill, actions=actions[i : i + 1],
                generator=Generator(model.device).manual_seed(seed + i),
            )[0]  # fmt: skip
        progress("clips", len(real), len(real))
        draw_pairs(folder / "infill.png", real[:4], filled[:4], "infilled", self.stack, context)
        return [folder / write_film(folder, "infill", grid(filled), fps=15, scale=3), folder / "infill.png"]


def _evenly(of: int, number: int) -> list[int]:
    """So many of the numbers below `of`, evenly spaced."""
    number = min(number, of)
    return [(2 * i + 1) * of // (2 * number) for i in range(number)]


@functools.lru_cache(maxsize=2)
def _data(task: Video) -> TaskData:
    with progress_bar() as progress:
        return _read(task, progress)


def _read(task: Video, progress: Progress, codec: nn.Module | None = None) -> TaskData:
    train = task.clips_of("train", progress)
    training, valid, validation = list(range(len(train.starts))), train, []
    if isinstance(task.world, Folder):
        held_out = task._held_out(train)
        training = [i for i in training if i not in held_out and train.lengths[i] >= task.window_frames]
        if len(training) < 2:
            raise ValueError(
                f"{len(train.starts)} clips, of which {len(held_out)} are held out for evaluation, leave too few to train on: "
                f"{len(training)} that have a window's {task.window_frames} frames; give more, hold out fewer (--task.world.test), or "
                "shorten the window (--task.tokens)"
            )
        validation = [training[i] for i in _evenly(len(training), max(1, len(training) // 10))]
        training = [i for i in training if i not in validation]
    else:
        valid = task.clips_of("valid", progress)
        validation = list(range(len(valid.starts)))
    codec = task.fit_codec(train, training) if codec is None else codec

    def windows(clips: ClipSet, which: list[int]) -> ClipWindows:
        conditioned = task.action_conditioned and clips.actions.shape[-1] > 0
        return ClipWindows(clips, which, codec, task.stack, task.tokens, task.build_cond, mirror=task.mirror and not conditioned)

    return TaskData(windows(train, training), windows(valid, validation), codec)


@functools.lru_cache(maxsize=8)  # each once
def _warn_notes(notes: tuple[str, ...]) -> None:
    if notes:
        warnings.warn(join_notes(notes, 20), stacklevel=2)
