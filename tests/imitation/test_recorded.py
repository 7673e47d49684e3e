"""Recorded demonstrations: without a simulator decided actions are compared with those of the demonstrators."""

from dataclasses import replace

import numpy as np
import pytest
from robots import TASK, demonstrations, model_for, progress

from diffusion_forcing.imitation.recorded import Recorded
from diffusion_forcing.imitation.task import Imitation
from diffusion_forcing.sampling import Sampler


def recorded(monkeypatch, shown, **options):
    monkeypatch.setattr(Recorded, "demonstrations", lambda self, chunk, progress=None: shown)
    return Imitation(Recorded(**options), chunk=3, window=4, sampler=Sampler(steps=2))


@pytest.mark.parametrize(("chunk", "every"), [(15, 5), (8, 4), (7, 1)])
def test_there_are_frames_within_a_chunk(chunk, every, monkeypatch):
    asked = []
    monkeypatch.setattr("diffusion_forcing.imitation.recorded.read_lerobot", lambda *_, **options: asked.append(options["every"]))
    Recorded().demonstrations(chunk)
    assert asked == [every]


def test_actions_are_compared_with_those_of_people(tmp_path, monkeypatch):
    shown, model = demonstrations(), model_for(TASK)
    task = recorded(monkeypatch, shown, held_out=2)
    assert task.default_samples == 2
    evaluation = task.evaluate(model, tmp_path, samples=2, seed=0, progress=progress)
    (table,) = evaluation.tables
    assert len(table.rows) == 2
    repeated = np.mean([
        np.abs(shown.actions[i][3 * j : 3 * j + 3, 0] - shown.actions[i][max(0, 3 * j - 1), 0]).mean() for i in (3, 4) for j in range(6)
    ])  # fmt: skip
    assert float(table.rows[0][2]) == pytest.approx(repeated, rel=1e-3)
    assert evaluation.metrics["error over std"] > 0
    with pytest.warns(UserWarning, match="20 demonstrations were asked for, but 2 are held out"):
        fewer = task.evaluate(model, tmp_path, samples=20, seed=0, progress=progress)
    assert fewer.tables[0].title == table.title


def test_actions_after_the_end_are_not_compared(tmp_path, monkeypatch):
    """Episodes of four actions in chunks of three: the second chunk is one action and two that only fill it."""
    shown = demonstrations(4, frames=5, every=1, cameras=())
    task = recorded(monkeypatch, shown, held_out=1)
    (table,) = task.evaluate(model_for(task), tmp_path, samples=1, seed=0, progress=progress).tables
    actions = shown.actions[-1][:, 0]
    repeated = np.abs([0, actions[1] - actions[0], actions[2] - actions[0], actions[3] - actions[2]]).mean()
    assert float(table.rows[0][2]) == pytest.approx(repeated, rel=1e-3)
    assert float(table.rows[0][3]) == pytest.approx(actions.std(), rel=1e-3)


def test_recorded_demonstrations_have_no_mirror():
    with pytest.raises(ValueError, match="mirror=False"):
        replace(Imitation(Recorded()), mirror=True)
