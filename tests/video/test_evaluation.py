"""Scores of roll-outs: the truth scores perfectly, a still picture badly; tables and figures hold what was measured."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from worlds import TASK, in_folder, model_for, quiet, write_clips

from diffusion_forcing.sampling import Context, Sampler
from diffusion_forcing.video import figures
from diffusion_forcing.video.evaluation import beyond_training, score_rollouts
from diffusion_forcing.video.figures import draw_curves, film_side_by_side
from diffusion_forcing.video.rollout import RollOut
from diffusion_forcing.video.scores import SCORES, Curve, psnr
from diffusion_forcing.video.task import Video

ACTIONS, POLICY = "simulator, same actions", "simulator, same policy"


@pytest.fixture(autouse=True)
def features(small_lpips):
    pass


def is_png(file):
    return file.read_bytes().startswith(b"\x89PNG")


def with_prefix(task, tokens, **options):
    return replace(task, rollout=replace(task.rollout, prefix=tokens, **options))


# Scores.


def test_the_truth_scores_perfectly_and_a_still_picture_badly(real):
    """A measure that cannot fail measures nothing."""
    frames, _ = real
    perfect, _ = score_rollouts(frames, frames, frames[:, 2:], 2, 2, 6, quiet)
    assert perfect["first token PSNR"] == 60  # for infinitely many
    assert perfect["pixel mean over real"] == pytest.approx(1)
    assert perfect["pixel std over real"] == pytest.approx(1)
    still = np.repeat(frames[:, 1:2], frames.shape[1], axis=1)
    stuck, _ = score_rollouts(still, frames, frames[:, 2:], 2, 2, 6, quiet)
    assert stuck["first token PSNR"] == stuck["last frame copied PSNR"] == perfect["last frame copied PSNR"] < 40
    assert stuck["last frame copied PSNR"] == pytest.approx(np.mean(psnr(still[:, 2:4], frames[:, 2:4])))
    assert stuck["late motion over real"] == 0
    grey, _ = score_rollouts(np.full_like(frames, 128), frames, frames[:, 2:], 2, 2, 6, quiet)
    assert grey["pixel std over real"] == 0


def curve(n=3):
    return Curve(np.arange(n) * 16, np.arange(n) + 1.0, np.arange(n) + 0.5, np.arange(n) + 1.5, 0.5, 0.4, 0.6, np.zeros((2, n)))


def test_a_table_of_means_beyond_the_training_length():
    ours, theirs = {name: curve() for name in SCORES}, {name: curve()._replace(value=np.arange(3) + 2.0) for name in SCORES}
    table = beyond_training({"this run": ours, "next": theirs}, 10)
    rows = [row for row in table.rows if row[0] == "video-FD" or row[1] == "next"]
    assert rows[0] == ("video-FD", "this run", "2.500 (2.500 to 2.500)", "")
    assert rows[1] == ("", "next", "3.500 (3.500 to 3.500)", "+1.000 (+1.000 to +1.000)")
    alone = beyond_training({"this run": ours}, 10)
    assert {len(row) for row in alone.rows} == {len(alone.columns)} == {3}
    assert beyond_training({"this run": ours}, 1000) is None
    assert beyond_training({}, 10) is None


# Figures.


@pytest.mark.filterwarnings("error")
def test_curves_have_a_panel_for_each_score(tmp_path, monkeypatch):
    drawn, figure = [], figures.figure

    @contextmanager
    def spy(*arguments, **options):
        with figure(*arguments, **options) as fig:
            drawn.append(fig)
            yield fig

    monkeypatch.setattr(figures, "figure", spy)
    ours = {name: curve() for name in SCORES}
    draw_curves({"ours": ours, "theirs": ours}, tmp_path / "curves.png", 10)
    assert is_png(tmp_path / "curves.png")
    axes = drawn[0].axes
    assert [ax.get_title() for ax in axes][: len(SCORES)] == list(SCORES)
    assert [text.get_text() for text in axes[-1].get_legend().get_texts()] == ["ours", "theirs"]
    assert sum(ax.axison for ax in axes if ax.get_visible()) == len(SCORES), "panels without a score are hidden"


def test_films_stand_side_by_side_with_pyav_and_without(real, tmp_path, monkeypatch):
    frames, _ = real
    clips = {"long": frames[:2], "short": frames[:2, :3]}
    assert film_side_by_side(clips, tmp_path, longest=5) == "rollouts.mp4"
    av = pytest.importorskip("av", reason="mp4 needs PyAV")
    with av.open(str(tmp_path / "rollouts.mp4")) as film:
        assert sum(1 for _ in film.decode(video=0)) == 5

    def none():
        raise ImportError("mp4 needs PyAV")

    monkeypatch.setattr("diffusion_forcing.engine.media.import_av", none)
    assert film_side_by_side(clips, tmp_path) == "rollouts.gif"
    assert (tmp_path / "rollouts.gif").read_bytes().startswith(b"GIF89a")


# Samples and evaluations.


@pytest.mark.parametrize("prefix", [0, 1])
def test_sample_writes_a_film_and_sheets(prefix, model, tmp_path):
    files = with_prefix(TASK, prefix).sample(model, tmp_path, samples=8, seed=0, progress=quiet)
    assert [file.name for file in files] == ["samples.mp4", "beginning.png", "rollout.png"]
    assert all(is_png(file) for file in files[1:])
    av = pytest.importorskip("av", reason="mp4 needs PyAV")
    with av.open(str(files[0])) as film:
        shown = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
    assert len(shown) == 2 * prefix + 8
    assert shown[0].shape == (2 * 3 * 16, 3 * 6 * 16, 3)  # six clips side by side, the others below, three times as large


def test_sample_infills(model, tmp_path):
    film, sheet = with_prefix(TASK, 2, infill=3).sample(model, tmp_path, samples=2, seed=0, progress=quiet)
    assert is_png(sheet)
    av = pytest.importorskip("av", reason="mp4 needs PyAV")
    with av.open(str(film)) as opened:
        assert sum(1 for _ in opened.decode(video=0)) == 4 + 6 + 4


@pytest.mark.parametrize("prefix", [0, 1])
def test_an_evaluation_holds_what_it_measured(prefix, model, tmp_path):
    evaluation = with_prefix(TASK, prefix).evaluate(model, tmp_path, samples=2, seed=0, progress=quiet)
    assert ("first token PSNR" in evaluation.metrics) == ("first token LPIPS" in evaluation.metrics) == bool(prefix)
    assert all(np.isfinite(value) for value in evaluation.metrics.values())
    (table,) = evaluation.tables
    assert table.title == f"2 roll-outs of 8 frames after {2 * prefix}, 2 steps a token"
    own = [name for name in evaluation.metrics if not name.startswith(ACTIONS)]
    assert [*(row[0] for row in table.rows), "codec PSNR", "codec LPIPS"] == own
    assert table.columns == ("", "this run", ACTIONS)
    assert list(evaluation.figures) == ["beginning.png", "rollout.png", "codec.png", "rollouts.mp4"]
    assert all(is_png(tmp_path / name) for name in evaluation.figures if name.endswith("png"))


def test_the_seed_decides_what_is_measured(model, tmp_path):
    one, again, other = (TASK.evaluate(model, tmp_path, samples=1, seed=seed, progress=quiet).metrics for seed in (0, 0, 1))
    assert one == again
    assert one != other


@pytest.mark.filterwarnings("ignore:The figure layout")
def test_long_roll_outs_are_scored_over_time(model, tmp_path):
    evaluation = replace(TASK, length=80, tokens=8).evaluate(model, tmp_path, samples=2, seed=0, progress=quiet)
    assert is_png(tmp_path / "over_time.png")
    for name in ("video-FD", "frame-FD", "blow-up"):
        windows = ("first window", "at 5 times the training length", "last window", "beyond the training length", "real")
        assert {f"{name} {window}" for window in windows} == {key for key in evaluation.metrics if key.startswith(name)}
    assert all(np.isfinite(value) for value in evaluation.metrics.values())
    assert [row[:2] for row in evaluation.tables[1].rows][:2] == [("video-FD", "this run"), ("", ACTIONS)]


def test_too_few_real_clips_give_no_curves(model, tmp_path):
    evaluation = replace(TASK, length=32, real=3).evaluate(model, tmp_path, samples=2, seed=0, progress=quiet)
    assert "over_time.png" not in evaluation.figures
    assert "first token LPIPS" in evaluation.metrics


def test_clips_in_which_the_walk_turns_are_scored_apart(model, tmp_path):
    """There copying the last frame is farther from the truth."""
    task = with_prefix(TASK, 2)
    turns = task._turning(12)
    _, actions = task.test_clips(12, 4 + task.length)
    assert turns.tolist() == [bool(abs(action[4, 1]) >= 0.5 or abs(action[5, 1]) >= 0.5) for action in actions]
    assert 0 < turns.sum() < 12
    metrics = task.evaluate(model, tmp_path, samples=12, seed=0, progress=quiet).metrics
    assert {"first token LPIPS, turning", "last frame copied LPIPS, turning"} <= metrics.keys()


def test_other_runs_are_evaluated_on_the_same_clips(model, tmp_path, monkeypatch):
    """Another run stacks other frames, samples its own way, and is measured from the same frames on."""
    task = with_prefix(TASK, 2, clip_tokens=3)
    single = replace(TASK, stack=1, tokens=8, sampler=Sampler(steps=5), context=Context(stabilization=3), rollout=RollOut(prefix=7))
    calls = []
    generate = Video.generate
    monkeypatch.setattr(Video, "generate", lambda self, *rest, **options: calls.append(self) or generate(self, *rest, **options))
    evaluation = task.evaluate(model, tmp_path, samples=2, seed=0, progress=quiet, others={"one": (single, model_for(single))})
    alone = task.evaluate(model, tmp_path, samples=2, seed=0, progress=quiet)
    assert {name: value for name, value in evaluation.metrics.items() if not name.startswith("one: ")} == alone.metrics
    plain = {name for name in alone.metrics if ": " not in name and not name.startswith("codec")}
    assert {name for name in evaluation.metrics if name.startswith("one: ")} == {f"one: {name}" for name in plain}
    (table,) = evaluation.tables
    assert table.columns == ("", "this run", "one", ACTIONS)
    assert table.rows[0][1] != table.rows[0][2]
    assert (calls[1].sampler.steps, calls[1].context.stabilization, calls[1].rollout) == (2, 3, RollOut(prefix=4, clip_tokens=6))
    assert (calls[1].stack, calls[1].length) == (1, 8)
    odd = replace(TASK, stack=3, frames=12, tokens=2, length=9)
    with pytest.raises(ValueError, match="3 must divide 4"):
        task.evaluate(model, tmp_path, samples=1, seed=0, progress=quiet, others={"odd": (odd, model)})


def test_evaluations_with_a_policy_say_so(model, tmp_path):
    task = replace(TASK, length=12, rollout=RollOut(prefix=1, actions="policy", clip_tokens=2))
    evaluation = task.evaluate(model, tmp_path, samples=2, seed=0, progress=quiet)
    assert "actions by the policy after 2 tokens" in evaluation.tables[0].title
    assert POLICY in evaluation.tables[0].columns
    assert task._sampling_like_this(TASK).rollout == task.rollout


# Clips of one's own.


@pytest.mark.parametrize("actions", ["numbers", "none"])
def test_a_roll_out_of_ones_own_clips_outlasts_them(actions, tmp_path):
    """Beyond the end of a clip its last action is repeated."""
    task = in_folder(write_clips(tmp_path / "mine", actions=actions), length=16)
    frames, truth, context = task.generate(model_for(task), 2, 0, quiet)
    assert context == 2
    assert frames.shape == (2, 2 + 16, 16, 16, 3)
    assert truth.shape == (2, 12, 16, 16, 3)  # as far as the clips go
    np.testing.assert_array_equal(frames[:, :2], truth[:, :2])
    if actions == "numbers":
        some = task.test_clips(2, 12)[1]
        assert task.rollout_cond(some, 9)[:, -1].tolist() == np.repeat(some[:, -1:], 2, axis=1).reshape(2, 4).tolist()


def test_short_clips_of_ones_own_can_be_evaluated_and_sampled(tmp_path):
    task = in_folder(write_clips(tmp_path / "mine"))
    task.evaluate(model_for(task), tmp_path, samples=2, seed=0, progress=quiet)
    task = in_folder(write_clips(tmp_path / "long", frames=20), tokens=10, frames=20, length=4)
    assert task.sample(model_for(task), tmp_path, samples=2, seed=0, progress=quiet)


def test_a_prefix_longer_than_a_window_is_used_whole(tmp_path):
    task = with_prefix(in_folder(write_clips(tmp_path / "mine", frames=12)), 5)
    frames, _, context = task.generate(model_for(task), 2, 0, quiet)
    assert frames.shape[1] == context + task.length == 10 + task.length


def test_conditions_of_a_batch_are_those_of_each():
    actions = np.random.default_rng(0).standard_normal((3, 8, 2)).astype(np.float32)
    assert TASK.build_cond(actions).tolist() == [TASK.build_cond(one).tolist() for one in actions]
