"""A walker: learns from clips what is done next, and leads models and worlds by what is seen."""

from dataclasses import replace as changed

import numpy as np
import pytest
import torch
from oracles import randomised, seeded

from diffusion_forcing.engine.config import ModelConfig, SpaceTimeConfig
from diffusion_forcing.engine.pretrained import PRETRAINED
from diffusion_forcing.engine.run import load_run
from diffusion_forcing.video import figures as video_pictures
from diffusion_forcing.video import policy as walking
from diffusion_forcing.video.clips import ClipSet
from diffusion_forcing.video.figures import ASTRAY
from diffusion_forcing.video.play import Player, actions_of, keys_of
from diffusion_forcing.video.policy import AHEAD, Walker, _examples, learn_to_walk, looks_of, typical, walker_of
from diffusion_forcing.video.task import Folder, RollOut, Video
from diffusion_forcing.video.worlds.labyrinth import Labyrinth

TASK = Video(
    Labyrinth(size=2, px=16), clips=6, frames=16, tokens=3, stack=2, patch=4, components=6, length=12, real=4,
    sampling=RollOut(steps=2, context=1, led=2, then="walker"),
)  # fmt: skip
BACKBONE = SpaceTimeConfig(hidden=8, layers=2, heads=2, window=3)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(video_pictures, "_eyes", lambda: None)
    monkeypatch.setattr(walking, "STEPS", 3)


def model_for(task):
    data = task.data()
    model = ModelConfig(BACKBONE, levels=100).build(data.train.event, data.train.cond_width, data.codec)
    randomised(model.backbone, seed=1)
    return model.eval()


def quiet(what, done, of):
    pass


def signals(clips=24, length=24, px=8):
    """Clips in which what is seen says what is done next: a bright frame is followed by a step to the right, a dark one to the left."""
    rng = np.random.default_rng(0)
    bright = rng.random((clips, length)) < 0.5
    frames = np.where(bright, 220, 30)[..., None, None, None] * np.ones((px, px, 3))
    actions = np.zeros((clips, length, 1), np.float32)
    actions[:, 1:, 0] = np.where(bright[:, :-1], 1.0, -1.0)
    starts = np.arange(clips) * length
    return ClipSet(
        frames.astype(np.uint8).reshape(-1, px, px, 3), starts, np.full(clips, length), actions.reshape(-1, 1),
        np.zeros((clips * length, 0), np.float32), tuple(map(str, range(clips))),
    )  # fmt: skip


def test_it_learns_what_follows_what_is_seen():
    clips = signals()
    learned = learn_to_walk(clips, 1, steps=120, batch=64)
    assert sorted(learned.ways.flatten().tolist()) == [-1, 1]
    bright, dark = (np.full((200, 2, 8, 8, 3), value, np.uint8) for value in (220, 30))
    done = np.zeros((200, 1, 1), np.float32)
    for frames, wanted in ((bright, 1.0), (dark, -1.0)):
        chosen = learned.choose(frames, done, 1, seeded(0))
        assert chosen.shape == (200, 1, 1)
        assert (chosen == wanted).mean() > 0.95
    # Two tokens on, nothing that was seen tells what comes: it chooses both ways, not the mean of them.
    later = learned.choose(bright, done, 4, seeded(0))[:, 3, 0]
    assert set(later.tolist()) == {-1.0, 1.0}
    assert abs(later.mean()) < 0.5


def test_it_learns_the_same_by_the_same_seed_and_leaves_others_randomness_alone():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    one, other = (learn_to_walk(signals(), 2, steps=2).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("stack", "length"), [(1, 4), (2, 6), (4, 24), (4, 11)])
def test_examples_are_of_one_clip_and_in_order(stack, length):
    """Frames and actions number their place, so that what lies where can be read off."""
    clips, px = 5, 8
    number = np.arange(clips * length)
    frames = np.repeat(number, px * px * 3).reshape(-1, px, px, 3).astype(np.uint8)
    starts = np.arange(clips) * length
    whole = ClipSet(frames, starts, np.full(clips, length), number[:, None].astype(np.float32), np.zeros((len(number), 0), np.float32), ())
    looks, before, after, ahead = _examples(whole, np.arange(clips), stack, 300, seeded(0))
    first, last = ((looks[:, at, 0, 0] + 1) * 127.5 for at in (0, 3))
    assert torch.allclose(last - first, torch.full_like(first, stack), atol=1e-3), "two looks, a token apart"
    assert torch.allclose(after[:, 0], last + 1 + stack * ahead, atol=1e-3), "what follows the last look, so many tokens on"
    assert torch.equal(before[:, 0] + stack, after[:, 0])
    assert torch.equal((first / length + 1e-4).floor(), (after[:, -1] / length).floor()), "never of two clips"
    assert ahead.min() == 0
    assert ahead.max() <= AHEAD - 1


def test_typical_rows_are_rows_and_lie_among_the_others():
    rows = torch.cat([torch.randn(200, 2, generator=seeded(0)) * 0.1 + centre for centre in (-5.0, 0.0, 5.0)])
    found = typical(rows, 3, seeded(1))
    assert all((rows == one).all(1).any() for one in found)
    assert {round(float(one[0]) / 5) for one in typical(rows, 12, seeded(1))} == {-1, 0, 1}
    few = torch.tensor([[1.0], [2.0], [1.0]])
    assert typical(few, 3, seeded(0)).tolist() == [[1.0], [2.0]], "no more than there are"


def test_it_is_taught_once_kept_and_read_again():
    clips = signals()
    asked = []

    def taught_by():
        asked.append(1)
        return clips, range(4)

    one, again = (walker_of(("world", 1), 2, taught_by) for _ in range(2))
    assert asked == [1]
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in one.state_dict().items())
    walker_of(("world", 2), 2, taught_by)
    assert len(asked) == 2, "another world has another"


def test_a_world_and_a_model_are_led_by_the_same_walker_after_so_many_tokens(monkeypatch):
    model, asked = model_for(TASK), []
    real, actions = TASK.judged_by(3, 2 + TASK.length)
    plain = Walker.choose

    def choose(self, frames, done, tokens=1, generator=None):
        asked.append((frames.shape[1], done.copy(), tokens))
        return plain(self, frames, done, tokens, generator)

    monkeypatch.setattr(Walker, "choose", choose)
    walker = TASK.walker(quiet)

    def rolled(**given):
        return np.concatenate(list(TASK.roll_out(model, TASK.length, real[:, :2], actions, generator=seeded(0), **given)), 1)

    led, by_clip = rolled(walker=walker), rolled()
    assert np.array_equal(led[:, :4], by_clip[:, :4]), "two tokens are led by the clip"
    assert not np.array_equal(led[:, 4:], by_clip[:, 4:])
    assert [tokens for _, _, tokens in asked] == [1] * 4
    assert np.array_equal(asked[0][1], actions[:, 4:6]), "it knows what was done last"
    assert np.array_equal(led, rolled(walker=walker)), "the same by the same seed"
    unlike = actions.copy()
    unlike[:, 6:] += 1
    assert np.array_equal(led, np.concatenate(
        list(TASK.roll_out(model, TASK.length, real[:, :2], unlike, generator=seeded(0), walker=walker)), 1
    )), "what the clip's walker did later is not looked at"  # fmt: skip


def test_windows_of_several_tokens_are_chosen_for_at_once(monkeypatch):
    sampling = changed(TASK.sampling, horizon=3)
    model, walker = model_for(TASK), TASK.walker(quiet)
    real, actions = TASK.judged_by(2, 2 + TASK.length)
    asked = []
    plain = Walker.choose
    monkeypatch.setattr(Walker, "choose", lambda self, f, d, n=1, g=None: asked.append(n) or plain(self, f, d, n, g))
    made = list(TASK.roll_out(model, 10, real[:, :2], actions, generator=seeded(0), sampling=sampling, walker=walker))
    assert [part.shape[1] for part in made] == [6, 4], "a window that begins before the walker does is the clip's"
    assert asked == [2]
    # From nothing it sees grey first, and a length that fills no token is cut.
    alone = list(TASK.roll_out(model, 5, None, None, batch=2, generator=seeded(0), sampling=changed(sampling, led=0), walker=walker))
    assert sum(part.shape[1] for part in alone) == 5


def test_evaluation_says_who_led_and_what_the_world_shows_led_so(tmp_path):
    model = model_for(TASK)
    evaluation = TASK.evaluate(model, tmp_path, samples=2, seed=0, progress=quiet)
    assert "of which 2 tokens are led, then by a walker" in evaluation.tables[0].title
    assert ASTRAY in evaluation.tables[0].columns
    visitors = [TASK.world.enter(seed) for seed in (3, 4)]
    frames = TASK._walked(visitors, np.empty((2, 7, 16, 16, 3), np.uint8), quiet)
    for one, someone in zip(frames, visitors, strict=True):
        assert np.array_equal(one[-1], someone.look()), "what is seen at the end"


def test_others_are_led_by_the_walker_too_though_they_cannot_walk_by_themselves():
    other = changed(TASK, sampling=RollOut(steps=2, context=1))
    found = TASK._judging_as(other).sampling
    assert (found.led, found.then) == (2, "walker")


def test_the_key_f_follows_the_walker():
    model = model_for(TASK)
    player = Player(TASK, model, seed=1)
    known = keys_of(TASK, 2)
    assert "f" in known
    frames = [player.step(chunk) for chunk in actions_of("wff", known, 2)]
    assert all(one.shape == (2, 16, 16, 3) for one in frames)
    assert (player.walker.ways == torch.tensor(player.done.reshape(1, -1))).all(1).any(), "one of the ways of the clips"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: RollOut(led=1, then="walker", schedule="rolling", horizon=2), "on a rolling tokens begin before the walker could see"),
        (lambda: learn_to_walk(signals()._replace(actions=np.zeros((576, 0), np.float32)), 1), "these clips have no actions"),
        (lambda: learn_to_walk(signals(), 12), "clips of 26 frames or more are needed"),
        (lambda: Walker(2, torch.zeros(3, 3)), r"ways are \(n, 2 \* numbers an action has\)"),
        (lambda: Walker(2, torch.zeros(3, 2)).choose(np.zeros((1, 1, 8, 8, 3), np.uint8), np.zeros((1, 2, 3), np.float32)), "does 1 n"),
    ],
)  # fmt: skip
def test_errors_say_what_is_wrong(wrong, says):
    with pytest.raises(ValueError, match=says):
        wrong()


def test_clips_of_ones_own_teach_it_without_those_to_judge_by(tmp_path, monkeypatch):
    folder = tmp_path / "clips"
    folder.mkdir()
    for i in range(4):
        clip = Labyrinth(size=2, px=16).clip(i, 16)
        np.savez(folder / f"{i}.npz", video=clip.frames, actions=clip.actions)
    task = changed(TASK, world=Folder(folder, px=16, test=1))
    taught = []
    monkeypatch.setattr(walking, "learn_to_walk", lambda clips, stack, which, progress=None: taught.append(list(which)) or learn_to_walk(
        clips, stack, which, steps=1))  # fmt: skip
    task.walker(quiet)
    assert taught == [[0, 1, 3]]


def test_looks_are_small_and_between_minus_one_and_one():
    frames = np.random.default_rng(0).integers(0, 256, (2, 2, 64, 64, 3)).astype(np.uint8)
    looks = looks_of(frames)
    assert looks.shape == (2, 6, 32, 32)
    assert looks.abs().max() <= 1
    assert looks_of(frames[:, :, :16, :16]).shape == (2, 6, 32, 32)


LED = ["labyrinth", "voxels"]


@pytest.mark.parametrize("name", LED)
def test_pretrained_worlds_have_their_walkers(name, monkeypatch):
    task = load_run(PRETRAINED / name)[0].task
    assert task.sampling.walks
    monkeypatch.setattr(walking, "learn_to_walk", None)  # not taught here: that would want thousands of clips
    assert task.walker().ways.shape == (walking.WAYS, 8)


def test_no_walker_without_its_world():
    assert len(list(walking.WALKERS.glob("*.safetensors"))) == len(LED)
