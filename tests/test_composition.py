"""The cross: its data, and the measure of what a model makes of it."""

import numpy as np
import pytest
import torch
from oracles import seeded

from diffusion_forcing.backbones import RNNConfig
from diffusion_forcing.composition import CORNERS, Composition, shares, straying
from diffusion_forcing.engine.config import ModelConfig
from diffusion_forcing.sampling import Sampler

TASK = Composition(half=8, sampler=Sampler(steps=4, matrix="pyramid", slope=20.0), trajectories=64)


def check_progress(what, done, of):
    assert 0 < done <= of


@pytest.fixture(scope="module")
def untrained():
    torch.manual_seed(0)
    return ModelConfig(RNNConfig(hidden=16)).build(2, 0, TASK.data().codec)


def test_trajectories_run_from_a_corner_to_the_opposite_one():
    paths, corner = TASK.trajectories_of(500, seed=0)
    assert paths.shape == (500, 17, 2)
    assert set(corner.tolist()) == {0, 1, 2, 3}
    assert (paths[:, 0] - CORNERS[corner]).norm(dim=-1).max() < 6 * TASK.spread
    assert (paths[:, -1] - CORNERS[(corner + 2) % 4]).norm(dim=-1).max() < 6 * TASK.spread
    torch.testing.assert_close(CORNERS[(corner + 2) % 4], -CORNERS[corner])


def test_everyone_passes_the_middle_at_half_time():
    paths, _ = TASK.trajectories_of(500, seed=0)
    distance = paths.norm(dim=-1)
    assert distance[:, TASK.half].max() < 6 * TASK.spread
    assert distance[:, 0].min() > 1


def test_the_spread_is_the_standard_deviation_of_where_they_start():
    paths, corner = Composition(spread=0.1).trajectories_of(4000, seed=1)
    assert (paths[:, 0] - CORNERS[corner]).std().item() == pytest.approx(0.1, rel=0.05)
    straight, corner = Composition(spread=0.0).trajectories_of(10, seed=1)
    assert straying(straight) < 1e-6
    torch.testing.assert_close(straight[:, 0], CORNERS[corner])


def test_the_seed_decides():
    assert torch.equal(TASK.trajectories_of(20, 3)[0], TASK.trajectories_of(20, 3)[0])
    assert not torch.equal(TASK.trajectories_of(20, 3)[0], TASK.trajectories_of(20, 4)[0])


def test_tokens_are_normalised_and_validation_is_other_data():
    data = TASK.data()
    x = data.train.read(data.train.all()).x
    assert x.shape == (64, 17, 2)
    assert x.mean().abs() < 1e-3
    assert x.std().item() == pytest.approx(1, abs=0.01)
    valid = data.valid.read(data.valid.all()).x
    assert not any(torch.equal(x[0], other) for other in valid)


def test_shares_by_hand():
    corner = torch.tensor([0, 0, 0, 0, 0, 2])
    ends = torch.tensor([[1.0, 1.0], [0.9, 1.1], [1.0, -1.0], [-1.0, 1.0], [0.0, 0.0], [1.0, 1.2]])
    assert shares(ends, corner) == pytest.approx({"opposite": 2 / 6, "adjacent": 2 / 6, "start": 1 / 6, "elsewhere": 1 / 6})


def test_near_a_corner_means_within_a_given_distance():
    end, corner = torch.tensor([[1.3, 1.0]]), torch.tensor([0])
    assert shares(end, corner)["opposite"] == 1
    assert shares(end, corner, near=0.2) == {"opposite": 0, "adjacent": 0, "start": 0, "elsewhere": 1}


def test_deviation_by_hand():
    on = torch.tensor([[[-1.0, -1.0], [0.0, 0.0], [0.5, -0.5]]])
    assert straying(on) == 0
    assert straying(torch.tensor([[[1.0, 0.0]]])) == pytest.approx(0.5**0.5)
    assert straying(torch.tensor([[[1.0, 0.0], [1.0, 1.0]]])) == pytest.approx(0.5)


def test_data_score_perfectly_and_an_untrained_model_badly(untrained, tmp_path):
    """A measure that cannot fail measures nothing."""
    metrics = TASK.evaluate(untrained, tmp_path, samples=100, seed=0, progress=check_progress).metrics
    assert metrics["data/opposite"] == 1
    assert metrics["data/stray_ratio"] == 1
    for name in ("with_memory", "without_memory"):
        assert metrics[f"{name}/opposite"] < 0.3
        assert metrics[f"{name}/elsewhere"] > 0.5
        assert metrics[f"{name}/stray_ratio"] > 2
        assert sum(metrics[f"{name}/{end}"] for end in ("opposite", "adjacent", "start", "elsewhere")) == pytest.approx(1)


def test_evaluation_says_what_it_measured_and_draws_it(untrained, tmp_path):
    evaluation = TASK.evaluate(untrained, tmp_path, samples=10, seed=0, progress=check_progress)
    (table,) = evaluation.tables
    assert [row[0] for row in table.rows] == ["data", "with memory", "without memory"]
    assert all(len(row) == len(table.columns) for row in table.rows)
    for name in evaluation.figures:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("matrix", ["pyramid", "full_sequence", "autoregressive"])
def test_samples_start_at_the_given_points(untrained, matrix):
    task = Composition(half=4, sampler=Sampler(steps=3, matrix=matrix, slope=20.0))
    begin = CORNERS + 0.01
    paths = task.generate(untrained, begin, memory=True, generator=seeded(0))
    assert paths.shape == (4, 9, 2)
    torch.testing.assert_close(paths[:, 0], begin)
    assert torch.equal(paths, task.generate(untrained, begin, memory=True, generator=seeded(0)))
    assert not torch.equal(paths, task.generate(untrained, begin, memory=True, generator=seeded(1)))


def test_without_memory_the_second_half_knows_one_point_only(untrained):
    """Two starts, one middle: with the same noise, forgetting makes the same second half of both, memory does not."""

    def halves(memory):
        seen = []
        absorb = untrained.absorb

        def spy(x, *arguments, **options):
            seen.append(x.shape[1])
            return absorb(x, *arguments, **options)

        untrained.absorb = spy
        try:
            TASK.generate(untrained, CORNERS, memory=memory, generator=seeded(0))
        finally:
            del untrained.absorb
        return seen

    assert max(halves(False)) == 1
    assert sum(halves(True)) > 1


def test_sample_writes_arrays_and_a_picture(untrained, tmp_path):
    files = TASK.sample(untrained, tmp_path, samples=5, seed=0, progress=check_progress)
    assert [file.name for file in files] == ["samples.npz", "samples.png"]
    arrays = np.load(files[0])
    assert arrays["with_memory"].shape == arrays["without_memory"].shape == (5, 17, 2)
    assert files[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("options", [{"half": 1}, {"trajectories": 3}, {"spread": -0.1}])
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match="half >= 2, trajectories >= 4, spread >= 0"):
        Composition(**options)
