"""Experiments as data: to JSON and back, and what they refuse."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import VARIANTS, Waves, small

from diffusion_forcing.backbones import ConvRNN, ConvRNNConfig, RNNConfig, SpaceTime, SpaceTimeConfig, TransformerConfig
from diffusion_forcing.composition import Composition
from diffusion_forcing.engine.config import (
    Experiment,
    ModelConfig,
    TrainConfig,
    from_dict,
    load_experiment,
    replace,
    save_experiment,
    to_dict,
)
from diffusion_forcing.engine.objective import Denoising
from diffusion_forcing.engine.precision import Precision
from diffusion_forcing.engine.recipes import BASELINES, build, run_name
from diffusion_forcing.levels import DRAWS
from diffusion_forcing.sampling import Sampler
from diffusion_forcing.video.decoder import DecoderObjective
from diffusion_forcing.video.rollout import RollOut
from diffusion_forcing.video.task import Folder, Video
from diffusion_forcing.video.warp import VideoDenoising
from diffusion_forcing.video.worlds.labyrinth import Labyrinth
from diffusion_forcing.weighting import FusedSNR, MinSNR, Uniform

positive = st.floats(1e-6, 1e6)
share = st.floats(0, 1)
backbones = st.one_of(
    st.builds(RNNConfig, hidden=st.integers(1, 999), layers=st.integers(1, 9), blocks=st.integers(0, 9)),
    st.builds(
        TransformerConfig, hidden=st.integers(1, 999), heads=st.integers(1, 9), causal=st.booleans(),
        window=st.none() | st.integers(1, 99),
    ),
    st.builds(
        SpaceTimeConfig, hidden=st.integers(1, 999), layers=st.integers(1, 9), heads=st.integers(1, 9), window=st.integers(1, 99),
        full_attention_every=st.integers(1, 9),
    ),
    st.builds(
        ConvRNNConfig, latent=st.integers(1, 99), channels=st.integers(1, 999), blocks=st.integers(1, 9),
        scales=st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple),
    ),
)  # fmt: skip
models = st.builds(
    ModelConfig, backbone=backbones, schedule=st.sampled_from(["linear", "cosine", "sigmoid"]), levels=st.integers(1, 5000),
    parameterization=st.sampled_from(["x0", "eps", "v"]), weight=st.sampled_from(["uniform", "min_snr", "fused_snr"]),
    snr_clip=positive, snr_decay=st.floats(0.01, 0.99), frame_stack=st.integers(1, 9), clip=st.none() | positive,
)  # fmt: skip
trainings = st.builds(
    TrainConfig, steps=st.integers(1, 10**9), minutes=st.none() | positive, batch=st.integers(1, 999), lr=positive, muon_lr=positive,
    optimizer=st.sampled_from(["adamw", "muon"]), ema=st.floats(0, 0.9999), seed=st.integers(-(2**40), 2**40),
    patience=st.none() | st.integers(1, 99),
    warmup=st.integers(0, 999), final_lr=share, precision=st.sampled_from(get_args(Precision)), compile=st.booleans(),
    parallel=st.sampled_from(["ddp", "fsdp"]), device=st.sampled_from(["auto", "cpu", "cuda", "mps"]),
)  # fmt: skip
draws = st.lists(st.sampled_from(sorted(DRAWS)), min_size=1, max_size=3).map("+".join)
objectives = st.one_of(
    st.builds(Denoising, draw=draws, cond_drop=share, clean_context_prob=share),
    st.builds(VideoDenoising, draw=draws, warp_steps=st.integers(0, 999)),
    st.builds(DecoderObjective, max_level=share, perceptual=share, warp_previous=st.booleans()),
)
worlds = st.one_of(
    st.builds(Labyrinth, size=st.integers(2, 9), px=st.sampled_from([16, 64]), loops=share),
    st.builds(Folder, path=st.text(min_size=1, max_size=9).map(Path), px=st.just(64), action_kinds=st.none() | st.integers(1, 9)),
)
samplers = st.builds(
    Sampler, steps=st.integers(1, 99), matrix=st.sampled_from(["autoregressive", "pyramid", "full_sequence"]), slope=positive, eta=share,
)  # fmt: skip
rollouts = st.builds(RollOut, horizon=st.integers(1, 9), prefix=st.integers(0, 9))
videos = st.builds(
    Video,
    world=worlds,
    patch=st.sampled_from([0, 4, 8]),
    action_conditioned=st.booleans(),
    whiten=share,
    sampler=samplers,
    rollout=rollouts,
)
compositions = st.builds(
    Composition, half=st.integers(2, 99), spread=st.floats(0, 9), trajectories=st.integers(4, 9999),
    sampler=samplers,
)  # fmt: skip
tasks = st.one_of(compositions, videos)
experiments = st.builds(Experiment, task=tasks, model=st.none() | models, train=trainings, objective=objectives, name=st.text(max_size=20))


@settings(max_examples=150, deadline=None)
@given(experiments)
def test_experiments_survive_json(experiment):
    assert from_dict(Experiment, json.loads(json.dumps(to_dict(experiment)))) == experiment


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(variant.values()))
def test_recipes_survive_a_file(variant, tmp_path):
    name, options = variant["recipe"], {option: value for option, value in variant.items() if option != "recipe"}
    experiment = build(name, **options)
    save_experiment(experiment, tmp_path / "config.json")
    assert load_experiment(tmp_path / "config.json") == experiment


def test_a_task_of_ones_own_survives_if_its_class_is_named(tmp_path):
    experiment = Experiment(Waves(sequences=5, informative=False))
    save_experiment(experiment, tmp_path / "config.json")
    assert load_experiment(tmp_path / "config.json", (Waves,)) == experiment
    with pytest.raises(
        ValueError,
        match=r"config.json.task should be one of Composition, Forecasting, Imitation, Maze2D, Sequences, Video, WindyMaze2D; got 'Waves'",
    ):
        load_experiment(tmp_path / "config.json")


@dataclass(frozen=True)
class Filed(Waves):
    """A task that reads a file."""

    file: Path = Path("data/waves.csv")
    other: Path | None = None
    columns: tuple[str, ...] = ("a", "b")


@dataclass(frozen=True)
class Kinded(Waves):
    """A task with an option of the name that stands for the class in a file."""

    kind: str = "sine"


def test_options_of_a_task_may_be_paths_and_tuples(tmp_path):
    experiment = Experiment(Filed(file=Path("x/y.csv"), other=Path("z"), columns=("c",)))
    save_experiment(experiment, tmp_path / "config.json")
    assert load_experiment(tmp_path / "config.json", (Filed,)) == experiment


def test_an_option_called_kind_is_refused_rather_than_lost(tmp_path):
    with pytest.raises(ValueError, match="kind"):
        save_experiment(Experiment(Kinded()), tmp_path / "config.json")


def test_what_a_config_leaves_out_has_its_default():
    assert from_dict(TrainConfig, {"kind": "TrainConfig", "steps": 7}) == TrainConfig(steps=7)


def changed(path, value):
    """An experiment as JSON with one value changed; "-" removes it."""
    data = to_dict(small())
    part = data
    *heads, last = path.split(".")
    for head in heads:
        part = part[head]
    if value == "-":
        del part[last]
    else:
        part[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("train.speed", 3, r"config.train has no option 'speed'; TrainConfig has .*batch.*steps"),
        ("model.backbone.heads", 3, r"config.model.backbone has no option 'heads'; RNNConfig has"),
        ("extra", 1, r"config has no option 'extra'; Experiment has"),
        ("kind", "Recipe", r"config should be one of Experiment; got 'Recipe'"),
        ("kind", "-", r"config should be one of Experiment; got None"),
        (
            "model.backbone.kind",
            "MambaConfig",
            r"config.model.backbone should be one of ConvRNNConfig, RNNConfig, SpaceTimeConfig, TransformerConfig; got 'MambaConfig'",
        ),
        (
            "model.backbone",
            "rnn",
            r"config.model.backbone should be one of ConvRNNConfig, RNNConfig, SpaceTimeConfig, TransformerConfig; got 'rnn'",
        ),
        ("task.kind", "Juggling", r"config.task should be one of .*Composition.*; got 'Juggling'"),
        ("task", "-", "task"),
        ("model", 3, "config.model"),
        ("objective.draw", 3, "config.objective.draw"),
        ("objective.kind", "Guessing", r"config.objective should be one of .*Denoising.*; got 'Guessing'"),
        ("train.steps", "many", "config.train"),
        ("train.steps", 0, "steps must be positive; got 0"),
        ("task.half", 1, "half >= 2"),
    ],
)
def test_a_config_that_does_not_fit_says_where(path, value, message):
    with pytest.raises(ValueError, match=message):
        from_dict(Experiment, changed(path, value))


@pytest.mark.parametrize("data", [None, [], 3, "Experiment"])
def test_something_else_is_no_experiment(data):
    with pytest.raises(ValueError, match="config should be one of Experiment"):
        from_dict(Experiment, data)


def test_a_file_that_is_not_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"kind": "Exp')
    with pytest.raises(ValueError, match=r"config.json is not valid JSON .*; the run is damaged"):
        load_experiment(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": None}, "steps, minutes"),
        ({"steps": 0}, "steps must be positive; got 0"),
        ({"minutes": -1.0}, "minutes"),
        ({"minutes": float("nan")}, "minutes"),
        ({"patience": 0}, "patience"),
        ({"threads": 0}, "threads"),
        ({"batch": 0}, "batch"),
        ({"accumulate": 0}, "accumulate"),
        ({"validate_every": 0}, "validate_every"),
        ({"log_every": 0}, "log_every"),
        ({"batch": 10, "accumulate": 4}, "accumulate=4 must divide batch=10"),
        ({"lr": 0.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"muon_lr": -0.1}, "muon_lr"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"warmup": -1}, "warmup"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"final_lr": -1.0}, "final_lr"),
        ({"ema": 1.0}, "ema"),
        ({"optimizer": "sgd"}, "adamw"),
        ({"precision": "half"}, "float16"),
        ({"parallel": "dp"}, "ddp"),
        ({"monitor": "crps"}, "score"),
    ],
    ids=str,
)
def test_training_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig(schedule="square"), "cosine"),
        (ModelConfig(parameterization="score"), "parameterization"),
        (ModelConfig(levels=0), "at least one level"),
        (ModelConfig(TransformerConfig(hidden=10, heads=3)), "3 must divide 10"),
        (ModelConfig(RNNConfig(hidden=-1)), "hidden"),
        (ModelConfig(RNNConfig(layers=0)), "layers"),
        (ModelConfig(clip=-1.0), "clip"),
        (ModelConfig(weight="heavy"), "min_snr"),
        (ModelConfig(weight="fused_snr", snr_decay=1.0), "decay"),
    ],
    ids=["schedule", "parameterization", "levels", "heads", "hidden", "layers", "clip", "weight", "decay"],
)
def test_model_options_that_make_no_sense_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        config.build(2)


def test_a_model_is_built_as_described():
    config = ModelConfig(TransformerConfig(hidden=8, layers=2, heads=2, window=3), "linear", 30, "eps", "min_snr", 2.0, clip=1.5)
    model = config.build(5, 2)
    assert model.backbone.config == {
        "width": 5, "cond": 2, "hidden": 8, "layers": 2, "heads": 2, "causal": True, "window": 3, "levels": 30,
    }  # fmt: skip
    assert (model.parameterization, model.weight, model.clip, model.schedule.levels) == ("eps", MinSNR(2.0), 1.5, 30)


@pytest.mark.parametrize(
    ("backbone", "kind", "options"),
    [
        (
            SpaceTimeConfig(hidden=8, layers=2, heads=2, window=3, full_attention_every=2),
            SpaceTime,
            {"hidden": 8, "window": 3, "full_attention_every": 2},
        ),
        (ConvRNNConfig(latent=3, channels=4, scales=(1, 2), blocks=1), ConvRNN, {"latent": 3, "scales": [1, 2], "blocks": 1}),
    ],
    ids=["space_time", "conv_rnn"],
)
def test_a_model_of_grids_is_built_as_described(backbone, kind, options):
    model = ModelConfig(backbone, levels=30).build((5, 4, 6), 2)
    assert type(model.backbone) is kind
    assert options.items() <= model.backbone.config.items()
    assert (model.backbone.config["event"], model.backbone.config["cond"], model.backbone.config["levels"]) == ([5, 4, 6], 2, 30)
    x, k = torch.zeros(1, 2, 5, 4, 6), torch.tensor([[0, 30]])
    assert model(x, k, torch.zeros(1, 2, 2)).shape == (1, 2)


@pytest.mark.parametrize("backbone", [SpaceTimeConfig(hidden=8, heads=2), ConvRNNConfig(channels=4)], ids=["space_time", "conv_rnn"])
@pytest.mark.parametrize("event", [3, (3,), (4, 4)])
def test_networks_for_grids_refuse_vectors(backbone, event):
    shape = (event,) if isinstance(event, int) else event
    words = f"reads tokens of (channels, height, width); got tokens of shape {shape}"
    with pytest.raises(ValueError, match=re.escape(words)):
        ModelConfig(backbone).build(event)


@pytest.mark.parametrize("backbone", [RNNConfig(hidden=8), TransformerConfig(hidden=8, heads=2)], ids=["rnn", "transformer"])
def test_networks_for_vectors_refuse_grids(backbone):
    words = "reads tokens that are vectors; these have shape (3, 4, 4): use SpaceTime or ConvRNN"
    with pytest.raises(ValueError, match=re.escape(words)):
        ModelConfig(backbone).build((3, 4, 4))
    assert ModelConfig(backbone).build((3,)).backbone.config == ModelConfig(backbone).build(3).backbone.config


@pytest.mark.parametrize(
    ("backbone", "words"),
    [
        (SpaceTimeConfig(hidden=10, heads=3), "3 must divide 10"),
        (SpaceTimeConfig(hidden=8, heads=2, window=0), "window counts from 1; got 0"),
        (ConvRNNConfig(), "4 scales halve a picture 3 times.*got 4 x 4: give fewer scales"),
        (ConvRNNConfig(scales=(1,), latent=0), "latent counts from 1; got 0"),
    ],
    ids=str,
)
def test_options_of_networks_for_pictures_that_make_no_sense_are_refused(backbone, words):
    with pytest.raises(ValueError, match=words):
        ModelConfig(backbone).build((3, 4, 4))


@pytest.mark.parametrize(
    ("word", "weight"), [("uniform", Uniform()), ("min_snr", MinSNR(3.0)), ("fused_snr", FusedSNR(3.0, decay=0.8, frame_stack=2))]
)
def test_a_loss_weight_is_a_word_and_its_numbers(word, weight):
    assert ModelConfig(weight=word, snr_clip=3.0, snr_decay=0.8, frame_stack=2).build(2).weight == weight


def test_replace_changes_nested_fields_and_nothing_else():
    before = small()
    after = replace(before, train__steps=3, model__backbone__hidden=9, name="x")
    assert (after.train.steps, after.model.backbone.hidden, after.name) == (3, 9, "x")
    assert replace(after, train__steps=before.train.steps, model__backbone__hidden=before.model.backbone.hidden, name="") == before
    assert before == small()


def test_replace_judges_the_result_not_the_way_to_it():
    """Two changes that are fine together are fine in any order."""
    assert replace(small(), train__steps=None, train__minutes=1.0).train.minutes == 1.0
    assert replace(small(), train__accumulate=3, train__batch=6).train.accumulate == 3
    assert replace(small(), train__batch=6, train__accumulate=3).train.accumulate == 3


def test_replace_refuses_fields_that_do_not_exist():
    with pytest.raises((TypeError, AttributeError, ValueError), match="speed"):
        replace(small(), train__speed=3)
    with pytest.raises((TypeError, AttributeError, ValueError), match="engine"):
        replace(small(), engine__speed=3)


@pytest.mark.parametrize(("baseline", "draw"), [("full_sequence", "shared"), ("next_token", "teacher_forced")])
@pytest.mark.parametrize("recipe", ["composition", "maze2d-umaze", "exchange", "labyrinth", "swap"])
def test_baselines_change_the_draw_and_the_self_context_and_nothing_else(baseline, draw, recipe):
    ours, theirs = build(recipe), build(recipe, baseline=baseline)
    assert (theirs.objective.draw, theirs.objective.self_context) == (draw, 0)
    assert draw != ours.objective.draw
    assert replace(theirs, objective__draw=ours.objective.draw, objective__self_context=ours.objective.self_context) == ours


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_baseline_of_another_domain_is_refused_with_a_way_out(baseline):
    refused = {"full_sequence": ("labyrinth", "decoder"), "next_token": ("labyrinth", "decoder")}.get(baseline, ("composition", None))
    with pytest.raises(ValueError, match="leave out --baseline"):
        build(refused[0], stage=refused[1], baseline=baseline)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "juggling"}, "there is no recipe 'juggling'"),
        ({"name": "composition", "backbone": "mamba"}, "composition has no backbone 'mamba'; choose from gru, transformer"),
        ({"name": "pusht", "backbone": "gru"}, "leave out --backbone"),
        ({"name": "doom", "stage": "decoder"}, "leave out --stage"),
        ({"name": "composition", "baseline": "oracle"}, "choose from full_sequence, next_token, diffuser, timegrad"),
    ],
)
def test_a_variant_that_a_recipe_does_not_have_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"name": "labyrinth", "backbone": "gru"}, "labyrinth-gru"),
        ({"name": "labyrinth", "backbone": "transformer", "stage": "decoder"}, "labyrinth-decoder"),
        ({"name": "maze2d-umaze", "baseline": "full_sequence"}, "maze2d-umaze-full_sequence"),
        ({"name": "json:loads"}, "json.loads"),
    ],
)
def test_a_run_is_called_by_its_recipe_and_variant(options, name):
    assert run_name(**options) == name
