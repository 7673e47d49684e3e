"""Push-T as a world: features of states, demonstrations in a mirror, and the published evaluation."""

import numpy as np
import pytest

pytest.importorskip("gym_pusht", reason="Push-T needs gym-pusht")

from pushing import replay
from robots import is_png, model_for, progress
from small import pushes_file

from diffusion_forcing.imitation.demonstrations import Demonstrations
from diffusion_forcing.imitation.pusht.env import PushT
from diffusion_forcing.imitation.pusht.task import Pushing
from diffusion_forcing.imitation.task import Imitation
from diffusion_forcing.sampling import Sampler


def test_features_are_cosine_and_sine_and_the_disc_in_the_frame_of_the_block():
    features = Pushing().features(np.array([[1.0, 2, 3, 5, np.pi / 2]]))
    np.testing.assert_allclose(features, [[1, 2, 3, 5, 0, 1, -3, 2]], atol=1e-6)
    # Block and disc moved and turned together: in its frame the disc is where it was.
    turn = np.array([[np.cos(0.7), -np.sin(0.7)], [np.sin(0.7), np.cos(0.7)]])
    disc, block = (turn @ place + [40, 60] for place in (np.array([1.0, 2]), np.array([3.0, 5])))
    moved = Pushing().features(np.array([[*disc, *block, np.pi / 2 + 0.7]]))
    np.testing.assert_allclose(moved[0, 6:], features[0, 6:], atol=1e-5)


def test_mirrored_demonstrations_are_demonstrations():
    """Mirrored actions lead to the mirrored states in the simulator, and cover the outline as well."""
    pusht, rng = PushT(1), np.random.default_rng(3)
    states, actions = [pusht.reset_to([200.0, 150.0, 240.0, 280.0, 0.9])[0]], []
    for _ in range(12):
        actions.append((pusht.states[:, 2:4] + rng.normal(0, 60, (1, 2))).clip(0, 512)[0])
        states.append(pusht.step(actions[-1][None])[0][0])
    assert np.abs(states[-1][2:4] - states[0][2:4]).sum() > 5
    world = Pushing()
    original = Demonstrations([np.array(actions)], [world.features(np.array(states[:-1]))], fps=10)
    mirrored = world.mirrored(original)
    np.testing.assert_allclose(world.mirrored(mirrored).states[0], original.states[0], atol=1e-3)
    np.testing.assert_allclose(world.mirrored(mirrored).actions[0], original.actions[0], atol=1e-3)

    def replayed(one):
        raw = [np.concatenate([one.states[0][:, :4], np.arctan2(one.states[0][:, 5:6], one.states[0][:, 4:5])], axis=1)]
        return replay(Demonstrations(one.actions, raw, fps=10), 0)

    (there, covered), (here, expected) = replayed(mirrored), replayed(original)
    turned = world.mirrored(Demonstrations(original.actions, [world.features(here)[:-1]], fps=10))
    np.testing.assert_allclose(world.features(there)[:-1], turned.states[0], atol=0.05)
    np.testing.assert_allclose(covered, expected, atol=1e-3)


def test_a_model_is_evaluated_by_pushing(tmp_path, monkeypatch):
    monkeypatch.setattr("diffusion_forcing.imitation.pusht.env.STEPS", 8)
    task = Imitation(Pushing(pushes_file(), held_out=2), chunk=4, offsets=2, window=5, sampler=Sampler(steps=2))
    evaluation = task.evaluate(model_for(task), tmp_path, samples=2, seed=0, progress=progress)
    assert 0 <= evaluation.metrics["score"] <= 1
    assert evaluation.metrics["success"] in (0, 0.5, 1)
    assert list(evaluation.figures) == ["episodes.mp4", "scores.png"]
    assert is_png(tmp_path / "scores.png")
