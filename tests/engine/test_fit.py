"""Training from Python: runs that the command line opens, that resume bit for bit, with networks and data of any kind."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import seeded
from small import checkpoint, command, dforce, differing, flat, logged, stop_after, weights
from torch import nn

from diffusion_forcing import RNN, DiffusionForcing, NoiseSchedule, Transformer, cosine, observe
from diffusion_forcing.backbones import RNNConfig, TransformerConfig
from diffusion_forcing.codecs import Chain, Normalize, Stack, Whiten
from diffusion_forcing.engine import Fit, evaluation, fit, sequences
from diffusion_forcing.engine.config import ModelConfig, TrainConfig
from diffusion_forcing.engine.log import Log
from diffusion_forcing.engine.objective import Denoising
from diffusion_forcing.engine.run import load_run
from diffusion_forcing.engine.task import Task, TaskData
from diffusion_forcing.engine.train import Diverged
from diffusion_forcing.files import read_tensors
from diffusion_forcing.windows import Windows

NETWORK = """
import torch
from torch import nn


class Leaky(nn.Module):
    causal = True

    def __init__(self, width=2, cond=0, hidden=8):
        super().__init__()
        self.config = {"width": width, "cond": cond, "hidden": hidden}
        self.proj_in, self.proj_out = nn.Linear(width + cond + 1, hidden), nn.Linear(2 * hidden, width)

    def forward(self, x, k, cond, state=None):
        feature = self.proj_in(torch.cat([x, cond, k[..., None] / 1000], -1))
        average = feature.new_zeros(len(x), feature.shape[-1]) if state is None else state
        out = []
        for now in feature.unbind(1):
            out.append(self.proj_out(torch.tanh(torch.cat([now, average], -1))))
            average = 0.8 * average + 0.2 * now
        return torch.stack(out, 1), average


def build():
    return Leaky()


text = "no network"


def number():
    return 3


def needs_more(width):
    return Leaky(width)
"""
SPACE = {}
exec(NETWORK, SPACE)
Leaky = SPACE["Leaky"]
Leaky.__module__ = "own_net"

SMALL = {"steps": 4, "batch": 8, "quiet": True, "threads": 1, "warmup": 2, "log_every": 1, "validate_every": 2}
CONFIG = RNNConfig(hidden=8, blocks=1)


def walks(number=20, tokens=6, width=2, seed=0):
    return torch.randn(number, tokens, width, generator=seeded(seed)).cumsum(1)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder, with the module of a network of one's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_net.py").write_text(NETWORK)
    sys.modules.pop("own_net", None)
    yield tmp_path
    sys.modules.pop("own_net", None)


@pytest.fixture(autouse=True)
def pictures(monkeypatch):
    """No pictures but where they are asked for: they take most of the time."""
    drawn = {name: getattr(evaluation, name) for name in ("draw_denoising", "draw_samples")}
    for name in drawn:
        monkeypatch.setattr(evaluation, name, lambda *arguments: None)
    return drawn


def opened(folder, *words):
    """Evaluate, sample and report on the command line, each of which must succeed."""
    assert dforce("eval", folder, "--samples", "4", "--task.sampler.steps", "2", "--task.sampler.slope", "1", *words) == 0
    assert dforce("sample", folder, "--samples", "3", "--task.sampler.steps", "2", *words) == 0
    assert dforce("report", folder) == 0
    return json.loads((Path(folder) / "eval.json").read_text())["metrics"]


# A run.


def test_a_run_from_python_is_complete_and_the_command_line_opens_it(here, capsys, pictures, monkeypatch):
    for name, draw in pictures.items():
        monkeypatch.setattr(evaluation, name, draw)
    done = fit(CONFIG, 100 + 5 * walks(), folder="runs/walks", **SMALL)
    assert isinstance(done, Fit)
    assert (done.result.status, done.result.step) == ("done", 4)
    assert repr(done).startswith("Fit(folder=")
    folder = here / "runs" / "walks"
    files = {"config.json", "run.json", "log.jsonl", "checkpoint.safetensors", "model", "data.safetensors"}
    assert files <= {path.name for path in folder.iterdir()}
    assert capsys.readouterr().out == ""  # quiet
    metrics = opened("runs/walks")
    assert np.isfinite(list(metrics.values())).all()
    assert {"denoising.png", "samples.png"} <= {path.name for path in (folder / "figures").iterdir()}
    with np.load(folder / "samples" / "samples.npz") as saved:
        assert saved["samples"].shape == (3, 6, 2)
        assert abs(saved["samples"].mean() - 100) < 20  # raw units
        torch.testing.assert_close(torch.tensor(saved["samples"][:, 0]), torch.tensor(saved["held_out"][:, 0]))
    assert not differing(weights(folder), done.model.state_dict())
    assert not done.model.training
    torch.testing.assert_close(done.decode(done.encode(100 + 5 * walks())), 100 + 5 * walks())


def test_the_folders_of_a_run_and_its_model_are_told_apart(here, capsys):
    fit(CONFIG, walks(), folder="runs/walks", **SMALL)
    load_run("runs/walks")
    with pytest.raises(FileNotFoundError, match=r"This is a run; its model is in runs/walks/model\.$"):
        DiffusionForcing.from_pretrained("runs/walks")
    assert dforce("eval", "runs/walks/model") != 0
    assert "runs/walks/model is the model of a run; give the run, runs/walks" in capsys.readouterr().err
    (here / "alone").symlink_to(here / "runs" / "walks" / "model")
    DiffusionForcing.from_pretrained("alone")


def test_a_run_moved_elsewhere_still_opens(here):
    fit(CONFIG, walks(), folder="runs/walks", **SMALL)
    (here / "runs" / "walks").rename(here / "moved")
    assert dforce("sample", "moved", "--samples", "2", "--task.sampler.steps", "2") == 0


def test_it_says_what_it_does_unless_asked_not_to(here, capsys):
    fit(CONFIG, walks(), folder="runs/a", minutes=2.5, **{**SMALL, "quiet": False})
    out = flat(capsys.readouterr().out)
    assert "training in runs/a: 18 sequences, 2 held out, windows of 6 tokens, 4 steps or 2.5 minutes, seed 0" in out
    assert "done: 4 steps" in out
    assert "Next: dforce eval runs/a" in out


# Resuming.


@pytest.mark.parametrize("model", ["config", "given", "own"])
def test_stopped_and_called_again_equals_never_stopped(model, here, monkeypatch, capsys):
    def make():
        torch.manual_seed(3)
        network = RNN(2, hidden=8, blocks=1)
        return {"config": CONFIG, "given": DiffusionForcing(network, NoiseSchedule(cosine())), "own": Leaky()}[model]

    whole = fit(make(), walks(), folder="whole", **SMALL)
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(SystemExit):  # by SIGTERM
            fit(make(), walks(), folder="parts", **SMALL)
    assert "in parts was interrupted at step 2; all is saved, and the same call resumes it" in capsys.readouterr().out
    parts = fit(make(), walks(), folder="parts", **SMALL)
    assert parts.result.step == 4
    assert not differing(whole.model.state_dict(), parts.model.state_dict())
    assert not differing(checkpoint(here / "whole")[0], checkpoint(here / "parts")[0])
    assert logged(here / "whole") == logged(here / "parts")


def test_a_finished_run_is_not_trained_again_and_goes_on_with_more_steps(here, monkeypatch):
    first = fit(CONFIG, walks(), folder="run", **SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(Log, "step", None)  # no step is taken
        again = fit(CONFIG, walks(), folder="run", **SMALL)
    assert not differing(first.model.state_dict(), again.model.state_dict())
    assert fit(CONFIG, walks(), folder="run", **{**SMALL, "steps": 6}).result.step == 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": RNNConfig(hidden=16, blocks=1)}, "model.backbone.hidden was 8, now 16"),
        ({"dataset": walks(seed=1)}, "(other data)"),
        ({"lr": 5e-3}, "train.lr was 0.001, now 0.005"),
        ({"objective": Denoising("shared")}, "objective.draw was"),
        ({"model": DiffusionForcing(RNN(2, hidden=8), NoiseSchedule(cosine()))}, "model"),
    ],
)
def test_a_folder_of_another_run_is_refused(change, words, here):
    call = {"model": CONFIG, "dataset": walks(), "folder": "run", **SMALL}
    fit(**call)
    before = (here / "run" / "data.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"holds a run with other options .*Give another folder=") as error:
        fit(**{**call, **change})
    assert words in str(error.value)
    assert (here / "run" / "data.safetensors").read_bytes() == before


def test_a_run_of_a_given_model_says_that_fit_goes_on_with_it(here):
    from diffusion_forcing.engine.config import load_experiment
    from diffusion_forcing.engine.train import train

    fit(Leaky(), walks(), folder="run", **SMALL)
    with pytest.raises(ValueError, match="was handed over from Python; call `fit` with it again"):
        train(load_experiment(here / "run" / "config.json"), here / "run")


# Models.


def test_a_model_is_trained_in_place_and_gets_the_average_and_a_codec(here):
    model = DiffusionForcing(Transformer(2, hidden=8, heads=2, layers=1, levels=50), NoiseSchedule(cosine(50)), parameterization="x0")
    before = model.backbone.proj_in.weight.clone()
    done = fit(model, 7 + 3 * walks(), folder="run", **SMALL)
    assert done.model is model
    assert not torch.equal(before, model.backbone.proj_in.weight)
    assert isinstance(model.codec, Normalize)
    assert model.codec.mean.mean() == pytest.approx(7, abs=2)
    assert not differing(weights(here / "run"), model.state_dict())
    assert differing(
        {k.removeprefix("model."): v for k, v in checkpoint(here / "run")[0].items() if k.startswith("model.")}, model.state_dict()
    )
    opened("run")


def test_a_model_keeps_its_codec(here):
    codec = Chain(Normalize(torch.zeros(2), torch.ones(2)), Stack(3))
    model = DiffusionForcing(RNN(6, hidden=8), NoiseSchedule(cosine()), codec=codec)
    done = fit(model, walks(tokens=12), folder="run", **SMALL)
    assert done.model.codec is codec
    assert load_run(here / "run")[0].task.length == 4  # tokens of three frames
    opened("run")


@pytest.mark.parametrize(
    "model", [ModelConfig(CONFIG, levels=50), TransformerConfig(hidden=8, layers=1, heads=2, causal=False), RNN(2, hidden=8, levels=30)]
)
def test_a_config_or_a_network_is_enough(model, here):
    done = fit(model, walks(), folder="run", **SMALL)
    assert done.model.schedule.levels == {ModelConfig: 50, RNN: 30}.get(type(model), 1000)
    assert load_run(here / "run")[0].task.sampler.matrix == ("pyramid" if done.model.causal else "full_sequence")
    opened("run")


def test_conditions_may_be_dropped_for_guidance(here):
    drop, cond = Denoising(cond_drop=0.5), torch.randn(20, 6, 1, generator=seeded(5))
    done = fit(CONFIG, walks(), folder="config", cond=cond, objective=drop, **SMALL)
    assert done.model.optional_cond
    assert fit(RNN(2, 2, hidden=8), walks(), folder="network", cond=cond, objective=drop, **SMALL).model.optional_cond
    for folder in ("config", "network"):
        opened(folder)
    with pytest.raises(ValueError, match="cond_drop"):
        fit(CONFIG, walks(), folder="none", objective=drop, **SMALL)


# A network of one's own.


def test_a_config_with_tuples_is_the_same_when_it_is_read_again(here):
    def make():
        network = Leaky()
        network.config["sizes"] = (1, 2)
        return network

    fit(make(), walks(), folder="run", **SMALL)
    assert fit(make(), walks(), folder="run", **{**SMALL, "steps": 5}).result.step == 5


def test_the_advice_after_a_divergence_is_python(here):
    with pytest.raises(Diverged, match=r"\(lr=3.3e\+28\), a longer warm-up \(warmup=4\) in another folder"):
        fit(CONFIG, walks(), folder="run", **{**SMALL, "steps": 50, "lr": 1e29, "clip_norm": 1e29})


def test_a_model_is_measured_on_the_data_of_another_run(here):
    fit(CONFIG, walks(), folder="a", **SMALL)
    fit(CONFIG, walks(seed=1), folder="b", **SMALL)
    one, other = (opened("a", "--task.file", f"{name}/data.safetensors") for name in "ab")
    assert one["loss"] == pytest.approx(opened("a")["loss"], rel=1e-6)
    assert one["loss"] != other["loss"]


def test_a_network_of_ones_own_is_handed_over_on_the_command_line(here, capsys):
    done = fit(Leaky(), walks(), folder="run", **SMALL)
    assert json.loads((here / "run" / "run.json").read_text())["backbone"] == "own_net:Leaky"
    for words in (("eval", "run"), ("sample", "run")):
        assert dforce(*words) == 2
        assert "add --backbone own_net:Leaky" in flat(capsys.readouterr().err)
    assert "own_net" not in sys.modules  # the file's word was printed, and not followed
    opened("run", "--backbone", "own_net:Leaky")
    assert dforce("sample", "run", "--samples", "1", "--backbone=own_net:build") == 0
    with pytest.raises(ValueError, match="add --backbone own_net:Leaky"):
        load_run(Path("run"))
    assert dforce("eval", "nowhere", "--backbone", "own_net:Leaky") == 2
    assert "nowhere is not a run" in flat(capsys.readouterr().err)
    assert not differing(load_run(Path("run"), backbone=Leaky())[1].state_dict(), done.model.state_dict())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere:build", "cannot import 'nowhere'"),
        ("own_net:absent", "no function 'absent'"),
        ("own_net:text", "has no function 'text'"),
        ("own_net:number", "gives a int; it must give a network"),
        ("own_net:needs_more", "a function without arguments"),
        ("torch.nn:Linear", "a class whose `config` holds its arguments"),
        ("torch.nn:Identity", "holds the weights of another architecture"),
    ],
)
def test_what_is_no_network_is_refused(name, words, here, capsys):
    fit(Leaky(), walks(), folder="run", **SMALL)
    assert dforce("eval", "run", "--backbone", name) == 2
    assert words in flat(capsys.readouterr().err)


SCRIPT = """
from own_net import Leaky
from diffusion_forcing.engine import fit
import torch


class Mine(Leaky):
    pass


if __name__ == "__main__":
    fit(Mine(), torch.randn(20, 6, 2), folder="runs/mine", steps=2, batch=4, threads=1)
"""


def test_a_script_leaves_a_run_whose_message_works_when_typed(here, capsys):
    (here / "my_script.py").write_text(SCRIPT)
    done = subprocess.run(**{**command("x"), "args": [sys.executable, "my_script.py"]}, cwd=here, capture_output=True, check=True)
    assert done.stdout.strip().endswith("Next: dforce eval runs/mine --backbone my_script:Mine")
    assert dforce("eval", "runs/mine") == 2
    message = flat(capsys.readouterr().err)
    words = message[message.index("--backbone") :].split()[:2]
    assert words == ["--backbone", "my_script:Mine"]
    assert dforce("sample", "runs/mine", "--samples", "2", *words) == 0
    assert json.loads((here / "runs" / "mine" / "run.json").read_text())["command"] == "python my_script.py"


# Data.


def test_sequences_of_unequal_length_are_padded_and_masked(here, monkeypatch):
    lengths = [3, 9, 5, 1, 7, 4]
    raw = [walks(1, n, seed=n)[0] for n in lengths]
    cond = [torch.randn(n, 3, generator=seeded(n)) for n in lengths]
    seen = []
    monkeypatch.setattr(sequences.Windows, "read", lambda self, w, read=Windows.read: seen.append(read(self, w)) or seen[-1])
    fit(CONFIG, raw, folder="run", cond=cond, valid=0.3, **SMALL)
    kept = read_tensors(here / "run" / "data.safetensors")
    assert sorted([*kept["train.sizes"].tolist(), *kept["valid.sizes"].tolist()]) == sorted(lengths)
    assert kept["train.cond"].shape == (sum(kept["train.sizes"]), 3)
    assert {tuple(batch.x.shape[1:]) for batch in seen} == {(int(kept["train.sizes"].max()), 2)}
    assert {int(n) for batch in seen for n in batch.mask.sum(1)} >= set(kept["train.sizes"].tolist())
    assert all(bool((batch.x[~batch.mask] == 0).all()) for batch in seen)
    opened("run")


def test_the_held_out_share_is_of_sequences_and_the_same_each_time(here):
    data = torch.arange(20.0).view(20, 1, 1).expand(20, 4, 1) + 0.5
    fit(CONFIG, data, folder="a", valid=0.2, **SMALL)
    fit(CONFIG, data.numpy().astype(np.float64), folder="b", valid=0.2, **SMALL)
    ours, theirs = (read_tensors(here / name / "data.safetensors") for name in "ab")
    assert not differing(ours, theirs)
    held, trained = ({*ours[f"{part}.x"].flatten().tolist()} for part in ("valid", "train"))
    assert len(held) == 4
    assert not held & trained
    assert len(held | trained) == 20


def test_held_out_data_may_be_given_with_their_conditions(here):
    fit(CONFIG, walks(), folder="run", cond=torch.zeros(20, 6, 1), valid=(walks(5, seed=1), torch.ones(5, 6, 1)), **SMALL)
    kept = read_tensors(here / "run" / "data.safetensors")
    torch.testing.assert_close(kept["valid.x"].view(5, 6, 2), walks(5, seed=1))
    assert kept["valid.cond"].unique().tolist() == [1]


def test_one_long_sequence_cut_into_pieces_is_enough(here):
    long = walks(1, 300)[0]
    fit(CONFIG, [*long.split(100)], folder="run", length=16, **SMALL)
    assert load_run(here / "run")[0].task.length == 16
    fit(CONFIG, [*long.split(100)], folder="other", **SMALL)
    assert load_run(here / "other")[0].task.length == 64


def test_errors_in_raw_units_are_those_of_the_tokens(here):
    raw = 100 + torch.tensor([5.0, 50.0]) * walks()
    run = fit(CONFIG, raw.numpy(), folder="runs/errors", **SMALL)
    assert torch.equal(run.encode(raw.double().numpy()), run.encode(raw))
    scale = run.model.codec.std
    for std, expected in ((3.0, 3 / scale), (torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0]) / scale)):
        assert torch.allclose(run.encode_std(std), expected.expand(1, 1, 2))
    each = torch.rand(raw.shape, generator=seeded(0))
    assert torch.allclose(run.encode_std(each), each / scale)
    # Two tokens of two numbers: (2,) is of each number, and must not be taken for one error of each token.
    known = observe(run.encode(raw[:1, :2]), run.encode_std([3.0, 4.0]))
    assert torch.allclose(known.std, (torch.tensor([3.0, 4.0]) / scale).expand(1, 2, 2))


def test_pictures_are_normalised_by_channel(here):
    from diffusion_forcing.backbones import ConvRNNConfig

    pictures = torch.randn(6, 3, 3, 4, 4, generator=seeded(0)) * torch.tensor([1.0, 5, 9])[:, None, None] + 30
    done = fit(ConvRNNConfig(latent=2, channels=2, scales=(1,), blocks=1), pictures, folder="run", **SMALL)
    assert done.model.codec.mean.shape == (3, 1, 1)
    torch.testing.assert_close(done.model.codec.std.flatten(), torch.tensor([1.0, 5, 9]), rtol=0.3, atol=0)
    opened("run")


def test_tokens_come_as_windows_or_as_the_data_of_a_task(here):
    raw = walks()
    codec = Whiten.fit(raw)
    tokens = codec.encode(raw)
    train, valid = Windows(tokens[:15], 4), Windows(tokens[15:], 4)
    fit(CONFIG, train, folder="windows", valid=valid, **SMALL)
    done = fit(CONFIG, TaskData(train, valid, codec), folder="data", **SMALL)
    assert isinstance(done.model.codec, Whiten)
    for name in ("windows", "data"):
        kept = read_tensors(here / name / "data.safetensors")
        assert not [key for key in kept if key.startswith("train")]  # a source may hold any amount of data
        opened(name)
    with pytest.raises(ValueError, match="keeps held-out windows only; to go on training, call `fit`"):
        load_run(here / "data")[0].task.data()


@dataclass(frozen=True)
class Walks(Task):
    """A task of one's own without methods of its own."""

    number: int = 12

    def data(self):
        return TaskData(Windows(walks(self.number), 6), Windows(walks(4, seed=1), 6), Normalize.fit(walks()))


def test_a_task_of_ones_own_is_handed_over(here):
    done = fit(CONFIG, Walks(), folder="run", **SMALL)
    assert isinstance(done.model.codec, Normalize)
    with pytest.raises(ValueError, match=f"add --recipe {__name__}:Walks"):
        load_run(here / "run")
    experiment, _ = load_run(here / "run", classes=[Walks])
    assert experiment.task == Walks()


def test_large_arrays_are_not_copied_but_what_is_held_out(here, monkeypatch, capsys):
    monkeypatch.setattr("diffusion_forcing.engine.fitting.MOST_BYTES", 100)
    fit(CONFIG, walks(), folder="run", **{**SMALL, "quiet": False})
    assert "the run keeps held-out windows only" in flat(capsys.readouterr().out)
    assert {key.split(".")[0] for key in read_tensors(here / "run" / "data.safetensors")} == {"valid"}
    opened("run")


def test_small_arrays_are_enough_to_train_the_run_anew(here):
    from diffusion_forcing.engine.config import load_experiment
    from diffusion_forcing.engine.train import train

    fit(CONFIG, walks(), folder="run", **SMALL)
    experiment = load_run(here / "run")[0]
    train(experiment, here / "again", quiet=True)
    assert not differing(weights(here / "run"), weights(here / "again"))
    assert load_experiment(here / "run" / "config.json").task.file == Path("data.safetensors")


def test_a_run_may_begin_with_the_weights_of_another(here):
    first = fit(CONFIG, 50 + walks(), folder="first", **SMALL)
    second = fit(CONFIG, 80 + walks(seed=1), folder="second", init="first", **SMALL)
    torch.testing.assert_close(second.model.codec.mean, first.model.codec.mean)  # tokens mean the same
    opened("second")


# Mistakes.

BAD = {
    "NaN": (torch.full((4, 5, 2), float("nan")), {}, "dataset: sequence 0 holds NaN or infinite values"),
    "empty array": (torch.zeros(0, 5, 2), {}, "dataset is empty"),
    "empty list": ([], {}, "dataset is empty"),
    "empty sequence": ([torch.zeros(3, 2), torch.zeros(0, 2)], {}, "sequence 1 is empty"),
    "one sequence": (walks(1), {}, r"list\(x.split\(100\)\)"),
    "no axis of numbers": (torch.zeros(10, 5), {}, r"for scalar series add a last axis, x\[..., None\]"),
    "list of series": ([torch.zeros(5), torch.zeros(4)], {}, r"x\[..., None\]"),
    "other widths": ([torch.zeros(5, 2), torch.zeros(4, 3)], {}, "all tokens must have one shape"),
    "integers": (torch.zeros(4, 5, 2, dtype=torch.long), {}, r"as x.float\(\)"),
    "data that are validated on others": (TaskData(Windows(walks(), 4), Windows(walks(), 4)), {"valid": 0.2}, "leave out valid"),
    "a codec that cannot be saved": (TaskData(Windows(walks(), 4), Windows(walks(), 4), nn.Identity()), {}, "a Identity cannot be saved"),
    "a word": ("data.npy", {}, "is an array .*got a str"),
    "conditions of other sequences": (walks(), {"cond": torch.zeros(19, 6, 1)}, "cond has 19 sequences"),
    "conditions of other tokens": (walks(), {"cond": torch.zeros(20, 5, 1)}, "conditions must cover each token"),
    "held-out data without conditions": (walks(), {"cond": torch.zeros(20, 6, 1), "valid": walks(3)}, "both or neither"),
    "held-out data of another width": (walks(), {"valid": walks(width=3)}, "valid has tokens of"),
    "a share of all": (walks(), {"valid": 1.0}, "between 0 and 1"),
    "no length": (walks(), {"length": 0}, "a window holds at least one token"),
    "windows without others": (Windows(walks(), 4), {}, r"give valid=Windows\(...\)"),
    "windows with a length": (Windows(walks(), 4), {"length": 3}, "leave out length"),
    "a model of another width": (walks(width=3), {"model": RNN(2, hidden=8)}, "reads tokens of 2 numbers"),
    "a model without the condition": (walks(), {"model": RNN(2, hidden=8), "cond": torch.zeros(20, 6, 1)}, "reads conditions of 0 numbers"),
    "a network for grids": (walks().view(20, 6, 2, 1, 1), {}, "RNN reads tokens that are vectors"),
    "no model": (walks(), {"model": "rnn"}, "fit trains a DiffusionForcing, a network"),
    "precision": (walks(), {"precision": "float16"}, "on this cpu train with"),
    "fsdp": (walks(), {"parallel": "fsdp"}, "use parallel='ddp'"),
    "weights for a network": (walks(), {"model": RNN(2, hidden=8), "init": "elsewhere"}, "load the weights of RNN yourself"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_told_before_anything_is_written(name, here):
    dataset, change, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        fit(**{"model": CONFIG, "dataset": dataset, "folder": "run", **SMALL, **change})
    assert not (here / "run").exists()


def test_a_mistyped_option_is_answered_with_the_likely_one():
    with pytest.raises(TypeError, match="no option 'step'; did you mean steps"):
        fit(CONFIG, walks(), step=3)
    with pytest.raises(TypeError, match="no option 'colour'; options of training are steps"):
        fit(CONFIG, walks(), colour=3)
    with pytest.raises(ValueError, match="must be positive"):
        fit(CONFIG, walks(), TrainConfig(), steps=-1)


@pytest.mark.parametrize("kind", [RNNConfig, Leaky])
def test_a_class_is_no_network(kind, here):
    with pytest.raises(ValueError, match=rf"not a class: {kind.__name__}\(\.\.\.\)"):
        fit(kind, walks(), folder="run", **SMALL)


class Broken(nn.Module):
    def forward(self, x, k, cond, state=None):
        return x / 0 * 0, None


class FewLevels(Leaky):
    """Built for K=10, without saying so."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 2)

    def forward(self, x, k, cond, state=None):
        return super().forward(x + self.table(k), k, cond, state)


def test_a_network_of_another_k_is_told_where_to_say_so(here):
    with pytest.raises(
        ValueError, match=r"FewLevels fails on two windows .*K=1000: .*`config` what it is built for \(width or event, cond, levels\)"
    ):
        fit(FewLevels(), walks(), folder="run", **SMALL)
    assert not (here / "run").exists()
    network = FewLevels()
    network.config["levels"] = 10
    assert fit(network, walks(), folder="run", **SMALL).model.schedule.levels == 10


def test_a_network_that_gives_nan_is_told_before_the_run(here):
    with pytest.raises(ValueError, match="check_backbone tries out a network"):
        fit(Broken(), walks(), folder="run", **SMALL)
    assert not (here / "run").exists()


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(0, 2)), max_size=4),
    st.sampled_from(["float32", "float64", "int64", "bool"]),
    st.booleans(),
    st.floats(allow_nan=True, allow_infinity=True, width=32),
)
def test_arrays_are_gathered_or_refused_in_words(shapes, dtype, as_list, value):
    arrays = [np.full(shape[: 1 + shape[2]], value).astype(dtype) if dtype[0] == "f" else np.zeros(shape, dtype) for shape in shapes]
    data = arrays if as_list or len({a.shape for a in arrays}) != 1 else np.stack(arrays)
    try:
        found = sequences.gather(data, None, "dataset")
    except ValueError:
        return
    assert found.x.dtype == torch.float32
    assert bool(torch.isfinite(found.x).all())
    assert int(found.sizes.sum()) == len(found.x) > 0
    assert found.sizes.tolist() == [len(a) for a in arrays]
