"""Walking by itself: a video model that is told actions, or told that there are none."""

from dataclasses import replace as changed

import numpy as np
import pytest
import torch
from oracles import randomised, seeded
from small import weights

from diffusion_forcing import DiffusionForcing
from diffusion_forcing.engine.config import Experiment, ModelConfig, PainterConfig, SpaceTimeConfig, TrainConfig, replace
from diffusion_forcing.engine.train import _take_over, train
from diffusion_forcing.video import figures as video_pictures
from diffusion_forcing.video.figures import ASTRAY
from diffusion_forcing.video.play import Player, actions_of, keys_of
from diffusion_forcing.video.task import Folder, RollOut, Video
from diffusion_forcing.video.worlds.labyrinth import Labyrinth

LED = Video(
    Labyrinth(size=2, px=16), clips=6, frames=16, tokens=3, stack=2, patch=4, components=6, length=8, real=4,
    sampling=RollOut(steps=2, context=1),
)  # fmt: skip
FREE = changed(LED, free=0.5)
BACKBONE = SpaceTimeConfig(hidden=8, layers=2, heads=2, window=3)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(video_pictures, "_eyes", lambda: None)


def model_for(task):
    data = task.data()
    model = ModelConfig(BACKBONE, levels=100).build(data.train.event, data.train.cond_width, data.codec)
    randomised(model.backbone, seed=1)
    return model.eval()


def quiet(what, done, of):
    pass


def test_what_is_not_told_is_said_to_be_so():
    actions = np.arange(12, dtype=np.float32).reshape(6, 2)
    told = FREE.conditions(actions)
    assert told.shape == (3, 5)
    assert torch.equal(told[:, :4], LED.conditions(actions))
    assert not told[:, 4].any(), "all is told"
    actions[3, 1] = np.nan
    told = FREE.conditions(actions)
    assert told[1].tolist() == [0, 0, 0, 0, 1], "a token of which one action is missing is not told at all"
    assert told[0].tolist() == [0, 1, 2, 3, 0]
    with pytest.raises(ValueError, match=r"a model walks by itself, which this one did not learn; train it with --task\.free"):
        LED.conditions(actions)


def test_nothing_to_tell_is_no_condition():
    assert FREE.conditions(np.zeros((6, 0), np.float32)).shape == (3, 0)
    assert changed(FREE, told=False).conditions(np.zeros((6, 2), np.float32)).shape == (3, 0)


def test_a_share_of_the_windows_drawn_is_told_up_to_some_token():
    source = FREE.data().train
    windows = source.draw(4000, seeded(0))
    told = windows[:, 2]
    assert 0.46 < (told < 3).float().mean() < 0.54
    counts = torch.bincount(told, minlength=4)[:3] / (told < 3).sum()
    assert torch.allclose(counts, torch.tensor([4 / 6, 1 / 6, 1 / 6]), atol=0.04), "half of them, and a third of the rest, from the first"
    batch = source.read(windows[:40])
    assert torch.equal(batch.cond[..., -1].sum(1), 3.0 - told[:40]), "as many tokens are not told"
    for cond, number in zip(batch.cond, told[:40].tolist(), strict=True):
        assert not cond[:number, -1].any()
        assert not cond[number:, :-1].any()
    plain = source.read(windows[:40, :2])
    assert torch.equal(plain.x, batch.x)
    assert not plain.cond[..., -1].any()


def test_windows_to_validate_on_are_told_all():
    source = FREE.data().valid
    assert not source.read(source.all()).cond[..., -1].any()


def test_windows_of_a_model_that_is_always_led_are_drawn_as_ever():
    assert torch.equal(LED.data().train.draw(9, seeded(0)), FREE.data().train.draw(9, seeded(0))[:, :2])


@pytest.mark.parametrize("led", [0, 2])
def test_a_roll_out_is_led_so_far_and_then_walks_by_itself(led):
    """Later actions change nothing, earlier ones all that follows."""
    task, model = changed(FREE, sampling=changed(FREE.sampling, led=led)), model_for(FREE)
    judged = Video.judged_by
    frames, actions = judged(task, 3, 10)

    def made(changed_at=None):
        other = actions.copy()
        if changed_at is not None:
            other[:, changed_at:] += 3.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Video, "judged_by", lambda *_, **__: (frames, other.copy()))
            return task.generate(model, 3, 0, quiet)[0]

    plain, edge = made(), 2 + 2 * led
    assert np.array_equal(plain, made(edge))
    assert not np.array_equal(plain, made(edge - 2))


def test_a_model_that_can_walks_by_itself_where_actions_end():
    model = model_for(FREE)
    frames, actions = FREE.judged_by(2, 10)
    ended, told = actions[:, :6], actions.copy()
    told[:, 6:] = np.nan
    rolled = [np.concatenate(list(FREE.roll_out(model, 8, frames[:, :2], some, generator=seeded(0))), 1) for some in (ended, told, actions)]
    assert np.array_equal(rolled[0], rolled[1])
    assert not np.array_equal(rolled[0], rolled[2])


def test_it_is_not_compared_with_a_world_led_astray(tmp_path):
    task, model = changed(FREE, sampling=changed(FREE.sampling, led=1)), model_for(FREE)
    evaluation = task.evaluate(model, tmp_path, samples=2, seed=0, progress=quiet, others={"other": (FREE, model_for(FREE))})
    assert not any(name.startswith(ASTRAY) for name in evaluation.metrics)
    assert evaluation.tables[0].columns == ("", "this run", "other")
    assert "of which 1 token is led" in evaluation.tables[0].title
    evaluation = FREE.evaluate(model, tmp_path, samples=2, seed=0, progress=quiet)
    assert any(name.startswith(ASTRAY) for name in evaluation.metrics)


def test_others_are_led_as_far_if_they_can_walk_by_themselves():
    mine = changed(FREE, sampling=changed(FREE.sampling, led=2))
    assert mine._judging_as(FREE).sampling.led == 2
    assert LED._judging_as(mine).sampling.led is None
    with pytest.raises(ValueError, match=r"never learned to walk by itself; add --task\.sampling\.led None"):
        mine._judging_as(LED)
    assert mine._judging_as(changed(FREE, stack=1, tokens=6, sampling=changed(FREE.sampling, led=1))).sampling.led == 4
    assert FREE._judging_as(mine).sampling.led is None
    with pytest.raises(ValueError, match="2 frames are led, but another run stacks: 4 must divide 2"):
        changed(FREE, sampling=RollOut(context=2, led=1))._judging_as(changed(FREE, stack=4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: changed(LED, free=1.5), "free is a share of the training windows, from 0 to 1; got 1.5"),
        (lambda: changed(LED, free=-0.1), "free is a share"),
        (lambda: changed(LED, sampling=RollOut(led=3)), "after 3 tokens; add --task.sampling.led None, or --task.sampling.then walker"),
        (lambda: changed(FREE, told=False, sampling=RollOut(led=3)), "told no actions always walks by itself"),
        (lambda: RollOut(led=-1), "led counts tokens, from 0; got -1"),
    ],
)
def test_bad_options_are_told(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_player_may_let_it_walk():
    model, player = model_for(FREE), None
    keys = keys_of(FREE, 2)
    assert "f" in keys
    assert "f" not in keys_of(LED, 2)
    assert "f" in keys_of(changed(FREE, world=Folder(px=16)), 4)
    made = []
    for letter in "fs":
        player = Player(FREE, model, seed=0)
        made.append(player.step(next(actions_of(letter, keys, 2))))
    assert not np.array_equal(*made), "resting is not the same as walking as one likes"
    with pytest.raises(ValueError, match="there is no key 'f'"):
        list(actions_of("f", keys_of(LED, 2), 2))


def test_a_model_that_was_always_led_may_go_on_and_learn_to_walk(tmp_path):
    """It says the same as before, whether told or not, until it has learned more."""
    options = TrainConfig(steps=2, minutes=None, batch=2, threads=1, looks=1)
    led = Experiment(LED, ModelConfig(BACKBONE, levels=50), options)
    train(led, tmp_path / "led", quiet=True)
    free = replace(Experiment(FREE, led.model, options), train__init=str(tmp_path / "led"), train__lr=1e-12)
    train(free, tmp_path / "free", quiet=True)
    before, after = (weights(tmp_path / name) for name in ("led", "free"))
    told = after["backbone.told.weight"]
    assert torch.allclose(told[:, :-1], before["backbone.told.weight"], atol=1e-5)
    assert told[:, -1].abs().max() < 1e-5
    with pytest.raises(ValueError, match=r"do not fit this model: backbone .*such as --task\.free"):
        train(replace(led, train__init=str(tmp_path / "free")), tmp_path / "back", quiet=True)
    painter = replace(Experiment(LED, PainterConfig(widths=(4,), perceptual=0), options), train__init=str(tmp_path / "free"))
    with pytest.raises(ValueError, match=r"is told 5 numbers a token, and this task tells 4; .*--task\.free"):
        train(painter, tmp_path / "painter", quiet=True)


def test_one_more_number_that_is_told_is_not_taken_for_that(tmp_path):
    """Only a task that lets the model walk has it."""
    options = TrainConfig(steps=1, minutes=None, batch=2, threads=1)
    single = changed(LED, stack=1, tokens=3)  # two numbers a token
    train(Experiment(single, ModelConfig(BACKBONE, levels=50), options), tmp_path / "led", quiet=True)
    begun = DiffusionForcing.from_pretrained(tmp_path / "led" / "model")
    wider = ModelConfig(BACKBONE, levels=50).build(tuple(begun.backbone.config["event"]), 3, begun.codec)
    with pytest.raises(ValueError, match="do not fit this model: backbone"):
        _take_over(wider, begun, "led")
    _take_over(wider, begun, "led", free=True)
    assert not wider.backbone.told.weight[:, -1].any()
