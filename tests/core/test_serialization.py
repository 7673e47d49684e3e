"""Models on disk: what is saved comes back bit for bit, and what is damaged is refused with a reason."""

import inspect
import io
import json
import pickle
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from oracles import randomised, seeded
from safetensors.torch import load_file, save_file
from torch import nn

from diffusion_forcing import RNN, DiffusionForcing, FusedSNR, MinSNR, NoiseSchedule, Transformer, Uniform, cosine, linear, sigmoid
from diffusion_forcing.codecs import Chain, Normalize, Whiten
from diffusion_forcing.serialization import HUB

BACKBONES = {
    "rnn": lambda: RNN(3, 2, hidden=8, layers=2, blocks=1, levels=20),
    "causal": lambda: Transformer(3, 2, hidden=8, layers=2, heads=2, window=4, levels=20),
    "seeing everything": lambda: Transformer(3, 2, hidden=8, layers=1, heads=1, causal=False, levels=20),
}


def model_of(backbone="rnn", curve=cosine, **options):
    return randomised(DiffusionForcing(BACKBONES[backbone](), NoiseSchedule(curve(20)), **options))


def batch(seed=0):
    x, cond = torch.randn(4, 6, 3, generator=seeded(seed)), torch.randn(4, 6, 2, generator=seeded(seed + 1))
    return x, torch.randint(0, 21, (4, 6), generator=seeded(seed + 2)), cond


def check_equal(one, other):
    """Same predictions and same losses, bit for bit."""
    x, k, cond = batch()
    noise = torch.randn(x.shape, generator=seeded(9))
    a, b = one.predict(x, k, cond), other.predict(x, k, cond)
    assert torch.equal(a.x0, b.x0)
    assert torch.equal(a.eps, b.eps)
    assert a.x0.std() > 0
    assert torch.equal(one(x, k, cond, noise=noise), other(x, k, cond, noise=noise))


def saved(folder, **options):
    """A model in a folder, its config and its weights."""
    model_of(**options).save_pretrained(folder)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("backbone", list(BACKBONES))
@pytest.mark.parametrize("parameterization", ["x0", "eps", "v"])
def test_predictions_survive_for_every_backbone(backbone, parameterization, tmp_path):
    model = model_of(backbone, parameterization=parameterization)
    model.save_pretrained(tmp_path)
    loaded = DiffusionForcing.from_pretrained(tmp_path)
    assert loaded.parameterization == parameterization
    assert loaded.causal == model.causal
    check_equal(model, loaded)


@pytest.mark.parametrize("weight", [Uniform(), MinSNR(clip=3.0), FusedSNR(clip=4.0, decay=0.7, frame_stack=2), "fused_snr"])
def test_the_loss_weight_survives_with_its_numbers(weight, tmp_path):
    model = model_of(weight=weight)
    model.save_pretrained(tmp_path)
    loaded = DiffusionForcing.from_pretrained(tmp_path)
    assert loaded.weight == model.weight
    check_equal(model, loaded)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_clip_survives(clip, tmp_path):
    model = model_of(clip=clip)
    model.save_pretrained(tmp_path)
    loaded = DiffusionForcing.from_pretrained(tmp_path)
    assert loaded.clip == clip
    check_equal(model, loaded)


@pytest.mark.parametrize("curve", [linear, cosine, sigmoid, lambda n: 0.5 ** (0.3 * torch.arange(n + 1))])
def test_the_curve_of_the_schedule_survives_even_if_it_is_your_own(curve, tmp_path):
    model = model_of(curve=curve)
    model.save_pretrained(tmp_path)
    loaded = DiffusionForcing.from_pretrained(tmp_path)
    assert torch.equal(loaded.schedule.alpha_table, model.schedule.alpha_table)
    assert torch.equal(loaded.schedule.sigma_table, model.schedule.sigma_table)
    check_equal(model, loaded)


def test_the_codec_survives(tmp_path):
    x = batch()[0] * 7 + 3
    codec = Normalize.fit(x)
    model_of(codec=Chain(codec, Whiten.fit(codec.encode(x)))).save_pretrained(tmp_path)
    loaded = DiffusionForcing.from_pretrained(tmp_path).codec
    torch.testing.assert_close(loaded.decode(loaded.encode(x)), x, atol=1e-4, rtol=1e-4)
    assert torch.equal(loaded.parts[0].encode(x), codec.encode(x))


def test_a_loaded_model_is_ready_for_use_and_can_be_trained_further(tmp_path):
    model_of().save_pretrained(tmp_path)
    loaded = DiffusionForcing.from_pretrained(tmp_path)
    assert not loaded.training
    loaded(*batch()).mean().backward()
    assert all(p.grad is not None for p in loaded.parameters())


def test_saving_again_replaces_and_leaves_nothing_else_behind(tmp_path):
    saved(tmp_path)
    other = randomised(model_of(clip=2.0), seed=5)
    other.save_pretrained(tmp_path)
    check_equal(other, DiffusionForcing.from_pretrained(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_path_may_be_a_string(tmp_path):
    saved(tmp_path)
    assert DiffusionForcing.from_pretrained(str(tmp_path)).schedule.levels == 20


class Echo(nn.Module):
    """A backbone of one's own: a linear map of each token."""

    causal = True

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(3, 3)

    def forward(self, x, k, cond, state=None):
        return self.map(x), None


def test_a_backbone_of_ones_own_is_handed_in(tmp_path):
    model = randomised(DiffusionForcing(Echo(), NoiseSchedule(cosine(20))))
    model.save_pretrained(tmp_path)
    check_equal(model, DiffusionForcing.from_pretrained(tmp_path, backbone=Echo()))


def test_a_backbone_of_ones_own_is_asked_for(tmp_path):
    DiffusionForcing(Echo(), NoiseSchedule(cosine(20))).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"backbone is 'custom'.*from_pretrained\(path, backbone=MyBackbone"):
        DiffusionForcing.from_pretrained(tmp_path)


def test_a_handed_in_backbone_must_fit_the_weights(tmp_path):
    saved(tmp_path)
    with pytest.raises(ValueError, match="another architecture"):
        DiffusionForcing.from_pretrained(tmp_path, backbone=Echo())


class Bomb:
    """What a pickle would run when it is loaded: make a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (Path(self.file),)


@pytest.mark.parametrize("how", ["pickle", "torch"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_pickle_is_refused_and_not_run(how, name, tmp_path):
    folder, trace = tmp_path / "model", tmp_path / "trace"
    saved(folder)
    buffer = io.BytesIO()
    pickle.dump(Bomb(trace), buffer) if how == "pickle" else torch.save({"x": Bomb(trace)}, buffer)
    (folder / name).write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match=f"{name}.* (not a safetensors file|not valid JSON)"):
        DiffusionForcing.from_pretrained(folder)
    assert not trace.exists()
    if how == "pickle":
        pickle.loads(buffer.getvalue())
        assert trace.exists(), "the bomb must work, or this test shows nothing"


def test_a_pickle_beside_the_model_is_not_looked_at(tmp_path):
    folder, trace = tmp_path / "model", tmp_path / "trace"
    saved(folder)
    for name in ("pytorch_model.bin", "model.pt"):
        (folder / name).write_bytes(pickle.dumps(Bomb(trace)))
    DiffusionForcing.from_pretrained(folder)
    assert not trace.exists()


@pytest.mark.parametrize("left", [0, 5, 100, -1])
def test_truncated_weights_are_refused(left, tmp_path):
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(ValueError, match=r"model.safetensors \([\d,]+ bytes\) is truncated, damaged or not a safetensors file"):
        DiffusionForcing.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(name, tmp_path):
    saved(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} is missing"):
        DiffusionForcing.from_pretrained(tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no model in .*nowhere"):
        DiffusionForcing.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", "{", "not json", "\x00\x01", '{"format": "diffusion_forcing", '])
def test_a_garbled_config_is_refused(text, tmp_path):
    saved(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config.json is not valid JSON"):
        DiffusionForcing.from_pretrained(tmp_path)


@pytest.mark.parametrize("config", [{}, [], None, 3, {"model_type": "bert", "hidden_size": 768}])
def test_the_config_of_another_project_is_refused(config, tmp_path):
    saved(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="does not describe a diffusion_forcing model"):
        DiffusionForcing.from_pretrained(tmp_path)


def test_a_later_version_is_refused(tmp_path):
    config, _ = saved(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "version": 99}))
    with pytest.raises(ValueError, match="version 99; this package reads version 1"):
        DiffusionForcing.from_pretrained(tmp_path)


@pytest.mark.parametrize("missing", ["backbone", "levels", "parameterization", "weight", "clip", "codec"])
def test_an_incomplete_config_says_what_it_lacks(missing, tmp_path):
    config, _ = saved(tmp_path)
    del config[missing]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"config.json lacks '{missing}'"):
        DiffusionForcing.from_pretrained(tmp_path)


RNN_OPTIONS = {"kind": "rnn", "width": 3, "cond": 2, "hidden": 8, "layers": 2, "blocks": 1, "levels": 20}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backbone": {"kind": "mamba", "width": 3}}, "backbone is 'mamba', which this package does not have"),
        ({"backbone": {"kind": ["rnn"]}}, "backbone"),
        ({"backbone": "rnn"}, "backbone"),
        ({"backbone": {"kind": "rnn"}}, "width"),
        ({"backbone": {**RNN_OPTIONS, "depth": 3}}, "rnn backbone options it does not have.*depth"),
        ({"backbone": {**RNN_OPTIONS, "hidden": "wide"}}, "rnn"),
        ({"backbone": {**RNN_OPTIONS, "hidden": -8}}, "rnn"),
        ({"levels": 30}, "levels|K="),
        ({"levels": "many"}, "levels"),
        ({"levels": 0}, "level"),
        ({"parameterization": "score"}, "parameterization must be one of"),
        ({"weight": {"kind": "heavy"}}, "weight.*heavy"),
        ({"weight": {"kind": "min_snr", "slope": 1}}, "weight|min_snr"),
        ({"weight": None}, "weight"),
        ({"clip": "tight"}, "clip"),
        ({"codec": {"kind": "zip"}}, "codec is 'zip', which this package does not have"),
        ({"codec": {"kind": "chain"}}, "codec"),
        ({"codec": {"kind": "normalize", "shape": "wide"}}, "codec"),
        ({"codec": "normalize"}, "codec"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_with_a_reason(change, message, tmp_path):
    config, _ = saved(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=message):
        DiffusionForcing.from_pretrained(tmp_path)


@pytest.mark.parametrize("other", ["causal", "seeing everything"])
def test_weights_of_another_architecture_are_refused(other, tmp_path):
    saved(tmp_path / "one")
    _, tensors = saved(tmp_path / "other", backbone=other)
    save_file(tensors, tmp_path / "one" / "model.safetensors")
    with pytest.raises(ValueError, match=r"weights of another architecture.*missing, such as backbone.*unknown, such as backbone"):
        DiffusionForcing.from_pretrained(tmp_path / "one")


def test_weights_of_another_size_are_refused_with_both_shapes(tmp_path):
    config, _ = saved(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "backbone": {**config["backbone"], "width": 4}}))
    with pytest.raises(ValueError, match=r"of another shape, such as backbone.proj_in.weight: \(8, 5\) instead of \(8, 6\)"):
        DiffusionForcing.from_pretrained(tmp_path)


def test_a_missing_or_extra_tensor_is_refused(tmp_path):
    _, tensors = saved(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: t for name, t in tensors.items() if name != "backbone.proj_out.bias"}, file)
    with pytest.raises(ValueError, match=r"1 missing, such as backbone.proj_out.bias"):
        DiffusionForcing.from_pretrained(tmp_path)
    save_file({**tensors, "surprise": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match="1 unknown, such as surprise"):
        DiffusionForcing.from_pretrained(tmp_path)


# The Hugging Face hub.


class Hub:
    """huggingface_hub, of which every repository is a folder."""

    def __init__(self, root):
        self.root, self.asked = root, []

    def hf_hub_download(self, repo_id, filename, **options):
        self.asked.append((repo_id, filename, options))
        if not (file := self.root / repo_id / filename).exists():
            raise FileNotFoundError("no connection")
        return str(file)

    def HfApi(self, token=None):
        return self

    def create_repo(self, repo_id, private=None, exist_ok=False):
        (self.root / repo_id).mkdir(parents=True, exist_ok=exist_ok)
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, repo_id, folder_path, commit_message, revision, create_pr):
        shutil.copytree(folder_path, self.root / repo_id, dirs_exist_ok=True)
        return SimpleNamespace(commit_url=f"hub/{repo_id}/commit")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub(tmp_path / "hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.chdir(tmp_path)
    return hub


def test_a_model_goes_to_the_hub_and_comes_back(hub):
    model = model_of()
    assert model.push_to_hub("me/walks") == "hub/me/walks/commit"
    assert sorted(path.name for path in (hub.root / "me" / "walks").iterdir()) == ["config.json", "model.safetensors"]
    loaded = DiffusionForcing.from_pretrained("me/walks", revision="v1")
    assert hub.asked == [("me/walks", name, {"revision": "v1"}) for name in ("config.json", "model.safetensors")]
    check_equal(loaded, model)


def test_a_model_that_is_neither_here_nor_on_the_hub_is_named(hub):
    with pytest.raises(FileNotFoundError, match=r"no folder me/missing.*hub.*no connection"):
        DiffusionForcing.from_pretrained("me/missing")


def test_without_its_package_the_hub_is_refused_with_the_way_to_install_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install 'diffusion_forcing\[hub\]'"):
        DiffusionForcing.from_pretrained("me/walks")


@pytest.mark.parametrize("path", ["me/walks", "here"])
def test_options_that_do_not_exist_are_refused(hub, path):
    model_of().save_pretrained(path)
    for option in ("revison", "weights", "parameterization"):
        with pytest.raises(TypeError, match=rf"no option '{option}'; it takes backbone and, for the hub, revision, .*cache_dir"):
            DiffusionForcing.from_pretrained(path, **{option: None})
    assert not hub.asked


def test_the_options_of_the_hub_are_those_of_its_package():
    hub = pytest.importorskip("huggingface_hub")
    assert set(HUB) <= set(inspect.signature(hub.hf_hub_download).parameters)


def test_a_folder_takes_no_options_of_the_hub(tmp_path):
    model_of().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"revision, token say how to load from the .* hub, and .* is a folder here; leave them out"):
        DiffusionForcing.from_pretrained(tmp_path, revision="main", token=None)
