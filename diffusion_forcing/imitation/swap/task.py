"""The swap for imitation: demonstrations of an arm that swaps two fruits, and a model that does it, also when its eyes deceive it."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...checks import check_options
from ...engine.task import Evaluation, Progress, Table
from ..tokens import ACTIONS
from . import data as store

if TYPE_CHECKING:
    from ..agent import ImitationAgent
    from ..demonstrations import Demonstrations
    from .env import SwapEnv

APART = 10_000
"""Seeds of episodes from one seed of an evaluation to the next; those of demonstrations begin at a million."""
STEPS = 600
"""Actions of an episode, but for what it goes on for when a model is judged."""
AT_ONCE = 10
FILMED = 6
MIRROR = (1, -1, 1, -1, 1, -1, 1)
"""What a mirror between left and right makes of an action or a pose: y is turned round, and rotations about x and z."""
Trial = Literal["clean", "distractors", "occluded", "dropped", "imagine", "blind", "expert"]
DECEITS = ("distractors", "occluded", "dropped")
WHOLE = ("distractors", "dropped")
"""Deceits that take in all cameras: who ignores such a look has seen nothing."""


class Tried(NamedTuple):
    """Of n episodes: success (n,), moves done (n,), films of the first (frames, px, k * 2 px, 3), seconds of each decision, and success
    (n,) with more time, if there was any."""

    success: NDArray[np.bool_]
    moves: NDArray[np.int64]
    film: NDArray[np.uint8]
    seconds: list[float]
    later: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Swapping:
    """An arm swaps an apple and an orange by way of a third plate. What to do next is in no single picture."""

    px: int = 64
    """Height and width of the pictures."""
    number: int = 150
    """Demonstrations, made by a script on first use."""
    body: Literal["mujoco", "twin"] = "mujoco"
    """The simulator; the twin is a drawing without forces, for quick looks only."""
    data_seed: int = 0
    """Of the demonstrations."""
    held: int = 10
    """How many demonstrations, the last ones, are kept to validate on."""
    trials: tuple[Trial, ...] = ("clean", "distractors", "occluded", "dropped", "imagine", "blind", "expert")
    """What is tried: clean looks; three ways to deceive, told and not told; two controls that must fail: to see the first frame only and
    imagine the rest, and a script that aims at the plates' middles; and expert: how far the demonstrator itself comes, who never fails
    otherwise, if it goes by what it knew before wherever all cameras deceive."""
    doubt: float = 0.35
    """Of a picture with things that do not belong, told: its level, as a share of K. What is covered or dropped is ignored."""
    extra: int = 150
    """Actions that an episode goes on for beyond the 600 of a demonstration: who waited for a look or grasped again is late. Success is
    told after 600 and at the end, after whole chunks."""

    def __post_init__(self) -> None:
        check_options(self, "px", "number", "held")
        if not 0 <= self.doubt <= 1:
            raise ValueError(f"doubt is a share of K, 0 to 1; got {self.doubt}")
        if self.extra < 0 or self.extra % 15:
            raise ValueError(f"extra counts actions, a multiple of the 15 from frame to frame, from 0; got {self.extra}")

    def beside(self) -> Swapping:
        """The same for another run that is measured in the same episodes: what does not depend on the model is not tried again."""
        return dataclasses.replace(self, trials=tuple(trial for trial in self.trials if trial not in ("blind", "expert")))

    def check_chunk(self, chunk: int) -> None:
        """Raise unless an episode is whole chunks, each of which ends with a look of the demonstrations."""
        if STEPS % chunk or chunk % store.SEEN:
            fit = [length for length in range(store.SEEN, STEPS + 1, store.SEEN) if STEPS % length == 0]
            raise ValueError(
                f"an episode of the swap has {STEPS} actions and is seen every {store.SEEN}, so that chunks are of "
                f"{', '.join(map(str, fit))} actions; got {chunk}"
            )

    def demonstrations(self, chunk: int, progress: Progress | None = None) -> Demonstrations:
        return store.load_swap(self.prepare(progress))

    def prepare(self, progress: Progress | None = None) -> Path:
        """The demonstrations, made if they are not in the cache. Returns their file."""
        return store.prepare_swap(self.number, self.px, self.data_seed, progress, self.body)

    @property
    def prepared(self) -> bool:
        """Whether the demonstrations are in the cache."""
        return store.swap_file(self.number, self.px, self.data_seed, self.body).exists()

    def example(self, chunk: int) -> Demonstrations:
        """One demonstration that is in no file, made on the spot in a few seconds, with a look before each chunk and at the end."""
        from ..demonstrations import Demonstrations
        from .env import CONTROL_DT, SwapEnv
        from .expert import demonstrate

        env = SwapEnv(self.px, self.body)
        try:
            made = demonstrate(env, 0, every=chunk)
        finally:
            env.close()
        images = {name: [pictures] for name, pictures in made.images.items()}
        return Demonstrations([made.actions], [made.poses], images, chunk, fps=1 / CONTROL_DT)

    def mirrored(self, demonstrations: Demonstrations) -> Demonstrations:
        """With left and right exchanged: plates, cameras and arm are the same on both sides."""
        turned = np.array(MIRROR, np.float32)
        return dataclasses.replace(
            demonstrations,
            actions=[turned * actions for actions in demonstrations.actions],
            states=[turned * states for states in demonstrations.states],
            images={name: [pictures[:, :, ::-1] for pictures in episodes] for name, episodes in demonstrations.images.items()},
        )

    def try_out(self, agent: ImitationAgent, folder: Path, *, samples: int, seed: int, progress: Progress) -> Evaluation:
        """Success over episodes, the same ones in each trial."""
        from ...engine.media import write_film

        _check_seeds(samples, seed)
        self.check_chunk(agent.codec.shapes[ACTIONS][0])
        metrics: dict[str, float] = {}
        rows: list[tuple[str, ...]] = []
        figures = {}
        for name, trial, told in self._named_trials():
            here = _renamed(progress, f"episodes ({name})")
            if trial == "blind":
                tried = self._scripted(samples, seed, here)
            elif trial == "expert":
                tried = self._scripted(samples, seed, here, deceit=name.split(", ")[0], chunk=agent.codec.shapes[ACTIONS][0])
            else:
                tried = self._trial(agent, trial, told, samples, seed, here)
            low, high = wilson(int(tried.success.sum()), samples)
            metrics[name] = float(tried.success.mean())
            parts = [float((tried.moves >= number).mean()) for number in (1, 2)]
            metrics.update({f"{name}: {which} move": share for which, share in zip(("first", "second"), parts, strict=True)})
            then = ""
            if tried.later is not None:
                metrics[f"{name}: later"] = float(tried.later.mean())
                then = f"{metrics[f'{name}: later']:.0%}"
            rows.append((name, f"{metrics[name]:.0%}", f"{low:.0%} to {high:.0%}", then, *(f"{share:.0%}" for share in parts)))
            if tried.seconds:
                metrics.setdefault("milliseconds a chunk", 1e3 * float(np.median(tried.seconds)))
            if len(tried.film):
                later = tried.success if tried.later is None else tried.later
                pairs = zip(tried.success[:FILMED], later[:FILMED], strict=True)
                ends = ", ".join("done" if success else "done later" if then else "failed" for success, then in pairs)
                figures[write_film(folder, name.replace(", ", "_").replace(" ", "_"), tried.film, fps=5, scale=2)] = (
                    f"{name}, front and hand camera of the first episodes: {ends}"
                )
        if "milliseconds a chunk" in metrics:
            rows.append(
                (f"to decide for {min(samples, AT_ONCE)} at once", f"{metrics['milliseconds a chunk']:.0f} ms a chunk", "", "", "", "")
            )
        chunk = agent.codec.shapes[ACTIONS][0]
        late = self.extra // chunk * chunk
        heads: tuple[str, ...] = ("", "success", "95 % interval", f"{late} actions later", "first move done", "second move done")
        if not late:
            heads, *rows = (_without(row, 3) for row in (heads, *rows))
        table = Table(f"The swap, {samples} episodes a row", heads, tuple(rows))
        return Evaluation(metrics, (table,), figures)

    def _named_trials(self) -> list[tuple[str, Trial, bool]]:
        """Name, kind, and whether the agent is told."""
        found: list[tuple[str, Trial, bool]] = []
        for trial in self.trials:
            if trial in DECEITS:
                found += [(f"{trial}, told", trial, True), (f"{trial}, not told", trial, False)]
            elif trial == "expert":
                found += [(f"{deceit}, ignored by the expert", trial, True) for deceit in WHOLE]
            else:
                found.append((trial, trial, True))
        return found

    def _trial(self, agent: ImitationAgent, trial: str, told: bool, samples: int, seed: int, progress: Progress) -> Tried:
        from ..corruption import Corrupted
        from .env import SwapEnv

        chunk = agent.codec.shapes[ACTIONS][0]
        top = agent.model.schedule.levels
        success: list[bool] = []
        moves: list[int] = []
        films: list[NDArray[np.uint8]] = []
        seconds: list[float] = []
        later: list[bool] = []
        size, usual, chunks = min(AT_ONCE, samples), STEPS // chunk, (STEPS + self.extra) // chunk
        envs: list[Any] = [SwapEnv(self.px, self.body, steps=STEPS + self.extra) for _ in range(size)]
        if trial in DECEITS:
            envs = [Corrupted(env, trial, chunk, usual + 1) for env in envs]  # type: ignore[arg-type]
        level = round(self.doubt * top) if trial == "distractors" else top
        try:
            for first in range(0, samples, size):
                here = envs[: samples - first]
                seeds = APART * seed + first + np.arange(len(here))
                looks = [env.reset(seed=int(number)) for env, number in zip(here, seeds, strict=True)]
                agent.reset(len(here))
                filmed = here[: max(0, FILMED - first)]
                frames = [_pictures(looks[: len(filmed)])]
                for frame in range(chunks):
                    begun = time.perf_counter()
                    if trial == "imagine" and frame:
                        actions, _ = agent.imagine()
                    else:
                        doubts = [info.get("doubtful", {}) for _, info in looks]
                        levels = {name: np.array([level * bool(doubt.get(name)) * told for doubt in doubts]) for name in agent.seen}
                        if agent.doubts_whole:
                            levels = dict.fromkeys(levels, np.max(list(levels.values()), axis=0))
                        seen = {name: np.stack([observation[_key(name)] for observation, _ in looks]) for name in agent.seen}
                        actions = agent.act(seen, levels)
                    seconds.append(time.perf_counter() - begun)
                    found = [env.step_many(some) for env, some in zip(here, actions, strict=True)]
                    looks = [(one[0], one[4]) for one in found]
                    frames.append(_pictures(looks[: len(filmed)]))
                    if frame + 1 == usual:
                        success += [bool(info["success"]) for _, info in looks]
                        moves += [int(info["moves"]) for _, info in looks]
                later += [bool(info["success"]) for _, info in looks]
                if filmed:
                    films.append(np.stack(frames))
                progress("episodes", min(first + size, samples), samples)
        finally:
            for env in envs:
                env.close()
        film = np.concatenate(films, axis=2)[:, :, : FILMED * self.px]
        return Tried(np.array(success), np.array(moves), film, seconds, np.array(later) if chunks > usual else None)

    def _scripted(self, samples: int, seed: int, progress: Progress, deceit: str | None = None, chunk: int = 15) -> Tried:
        """The script that made the demonstrations: aiming at the plates' middles, or knowing nothing new while looks deceive."""
        from ..corruption import Corruption
        from .env import CAMERAS, SwapEnv
        from .expert import Expert

        env: SwapEnv = SwapEnv(self.px, self.body)
        success, moves = [], []
        for done in range(samples):
            number = APART * seed + done
            env.reset(seed=number, options={"look": False})
            if deceit is None:
                expert = Expert(env, number, blind=True)
            else:
                deceived = Corruption(deceit, STEPS // chunk + 1, CAMERAS, number).when  # type: ignore[arg-type]
                expert = Expert(env, number, believed=lambda time, deceived=deceived: not deceived[time // chunk])  # type: ignore[misc]
            while not env.step_many(expert.act()[None], look=False)[3]:
                pass
            success.append(env.success)
            moves.append(env.moves)
            progress("episodes", done + 1, samples)
        env.close()
        return Tried(np.array(success), np.array(moves), np.zeros((0, 1, 1, 3), np.uint8), [])


def wilson(successes: int, number: int, z: float = 1.96) -> tuple[float, float]:
    """Interval of a share (Wilson's): never beyond 0 and 1, and right for few."""
    share, spread = successes / number, z * z / number
    middle = (share + spread / 2) / (1 + spread)
    half = z * np.sqrt(share * (1 - share) / number + spread / (4 * number)) / (1 + spread)
    return max(0.0, float(middle - half)), min(1.0, float(middle + half))


def _without(row: tuple[str, ...], i: int) -> tuple[str, ...]:
    return (*row[:i], *row[i + 1 :])


def _check_seeds(samples: int, seed: int) -> None:
    """Raise where episodes would be those of the next seed, or of the demonstrations."""
    if samples > APART:
        raise ValueError(f"an evaluation has {APART:,} episodes at most, then come those of the next seed; got {samples:,}")
    most = store.APART // APART
    if not 0 <= seed < most:
        raise ValueError(
            f"an evaluation has a seed from 0 to {most - 1}: from {most} on its episodes would be those of the demonstrations; got {seed}"
        )


def _renamed(progress: Progress, name: str) -> Progress:
    return lambda _, done, of: progress(name, done, of)


def _key(name: str) -> str:
    """What the environment calls a part."""
    return "pose" if name == "state" else name


def _pictures(looks: list[tuple[dict[str, Any], dict[str, Any]]]) -> NDArray[np.uint8]:
    """(2 px, n px, 3): what each sees, front camera above the hand's."""
    if not looks:
        return np.zeros((1, 0, 3), np.uint8)
    return np.concatenate([np.concatenate([seen["front"], seen["hand"]], axis=0) for seen, _ in looks], axis=1)
