"""Models on disk: config.json + model.safetensors, in a folder or on the Hugging Face hub.

Loading builds one of the known backbones from plain numbers and fills it with tensors. Nothing is unpickled, and no code named
in a file is run: a backbone of your own is handed to `from_pretrained(path, backbone=...)`.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .backbones import BACKBONES
from .codecs import build_codec, describe_codec
from .files import read_tensors, write_atomically
from .preconditioning import Preconditioning
from .schedule import NoiseSchedule, linear
from .weighting import WEIGHTS

FORMAT = "diffusion_forcing"
VERSION = 1
CONFIG, WEIGHTS_FILE = "config.json", "model.safetensors"
HUB = ("revision", "subfolder", "token", "cache_dir", "local_dir", "local_files_only", "force_download", "etag_timeout", "endpoint")
"""Options of huggingface_hub.hf_hub_download that `from_pretrained` hands on."""

Model = TypeVar("Model", bound="Pretrained")


class Pretrained(nn.Module):
    """save_pretrained, from_pretrained and push_to_hub for DiffusionForcing."""

    def save_pretrained(self, path: str | Path) -> None:
        """Write config.json and model.safetensors into a folder, each in one move."""
        save_model(self, path, self.state_dict())

    @classmethod
    def from_pretrained(cls: type[Model], path: str | Path, *, backbone: nn.Module | None = None, **hub: Any) -> Model:
        """Load a model from a folder, or by its name on the Hugging Face hub, "owner/model".

        backbone: an instance of your own class, for models that use one; its weights are replaced by the saved ones.
        hub: for a name on the hub: revision, subfolder, token, cache_dir and the other options of `HUB`, as
        huggingface_hub.hf_hub_download names them.
        """
        if unknown := sorted(hub.keys() - set(HUB)):
            raise TypeError(f"from_pretrained takes no option {unknown[0]!r}; it takes backbone and, for the hub, {', '.join(HUB)}")
        config_file, weights_file = _find(path, hub)
        model = build(cls, read_config(config_file), backbone)
        fill(model, weights_file)
        return model.eval()

    def push_to_hub(
        self, repo_id: str, *, commit_message: str = "Upload model", private: bool | None = None, token: str | None = None,
        branch: str | None = None, create_pr: bool = False,
    ) -> str:  # fmt: skip
        """Upload config.json and model.safetensors to a repository of the Hugging Face hub, made if it does not exist; the commit's URL."""
        api = _import_hub().HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if branch is not None:
            api.create_branch(repo_id=repo_id, branch=branch, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            commit = api.upload_folder(
                repo_id=repo_id, folder_path=folder, commit_message=commit_message, revision=branch, create_pr=create_pr
            )
        return str(commit.commit_url)


def save_model(model: Any, path: str | Path, tensors: dict[str, Tensor]) -> None:
    """Write a model's config.json, and tensors as its model.safetensors: its own, or those gathered from where they are sharded."""
    text = json.dumps(describe(model), indent=2) + "\n"  # what cannot be described is refused before anything is written
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(folder / WEIGHTS_FILE, lambda file: save_file(whole, file, metadata={"format": "pt"}))
    write_atomically(folder / CONFIG, lambda file: Path(file).write_text(text))


def describe(model: Any) -> dict[str, Any]:
    """Everything but the weights, as plain JSON."""
    names = {cls: name for name, cls in BACKBONES.items()}
    weights = {cls: name for name, cls in WEIGHTS.items()}
    kind = names.get(type(model.backbone), "custom")
    weight = {"kind": weights.get(type(model.weight), "custom")}
    if dataclasses.is_dataclass(model.weight) and not isinstance(model.weight, type):
        weight |= dataclasses.asdict(model.weight)
    return {
        "format": FORMAT,
        "version": VERSION,
        "backbone": {"kind": kind, **model.traits.config},
        "levels": model.schedule.levels,
        "parameterization": model.parameterization,
        "weight": weight,
        "clip": model.clip,
        "preconditioning": model.preconditioning.description(),
        "optional_cond": model.optional_cond,
        "codec": describe_codec(model.codec),
    }


def build(cls: type[Model], config: dict[str, Any], backbone: nn.Module | None = None) -> Model:
    """The model a config describes, with fresh weights."""
    for key in ("backbone", "weight", "levels", "parameterization", "clip", "preconditioning", "codec"):
        if key not in config:
            raise ValueError(f"{CONFIG} lacks {key!r}; it is not a complete description of a diffusion_forcing model")
    kind, options = _kind_and_options(config, "backbone")
    weight_kind, weight_options = _kind_and_options(config, "weight")
    levels, parameterization, clip, codec = (config[key] for key in ("levels", "parameterization", "clip", "codec"))
    if not isinstance(levels, int) or not isinstance(clip, int | float | None):
        raise ValueError(f"{CONFIG} should give levels as a whole number and clip as a number or null; got {levels!r}, {clip!r}")
    optional = config.get("optional_cond", False)
    if not isinstance(optional, bool):
        raise ValueError(f"{CONFIG} should say whether conditions are optional by optional_cond, true or false; got {optional!r}")
    if weight_kind not in WEIGHTS and weight_kind != "custom":
        raise ValueError(f"the model's loss weight is {weight_kind!r}, which this package does not have ({', '.join(WEIGHTS)})")
    if backbone is None:
        if kind not in BACKBONES:
            raise ValueError(
                f"the model's backbone is {kind!r}, which this package does not have ({', '.join(BACKBONES)}); "
                "build it yourself and pass it: from_pretrained(path, backbone=MyBackbone(...))"
            )
        try:
            backbone = BACKBONES[kind](**options)
        except TypeError as error:
            raise ValueError(f"{CONFIG} gives the {kind} backbone options it does not have: {error}") from error
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{CONFIG} gives the {kind} backbone options that make no network: {error}") from error
    try:
        # A weight of the user's own matters in training only.
        weight = WEIGHTS[weight_kind](**weight_options) if weight_kind in WEIGHTS else "uniform"
    except TypeError as error:
        raise ValueError(f"{CONFIG} gives the loss weight {weight_kind} options it does not have: {error}") from error
    try:
        preconditioning = Preconditioning.from_description(**config["preconditioning"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{CONFIG} does not describe the preconditioning properly: {error}") from error
    return cls(
        backbone,
        NoiseSchedule(linear(levels)),  # the curve itself is among the weights
        parameterization=parameterization,
        weight=weight,
        clip=clip,
        codec=build_codec(codec),
        preconditioning=preconditioning,
        optional_cond=optional,
    )


def _kind_and_options(config: dict[str, Any], key: str) -> tuple[str, dict[str, Any]]:
    options = config[key]
    if not isinstance(options, dict) or not isinstance(options.get("kind"), str):
        raise ValueError(f"{CONFIG} should describe the {key} by its kind and options; got {options!r}")
    return options["kind"], {name: value for name, value in options.items() if name != "kind"}


def fill(model: nn.Module, weights_file: str | Path) -> None:
    """Put the tensors of a safetensors file into the model; they must fit exactly."""
    tensors = read_tensors(weights_file)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if expected != found:
        missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        other = [f"{n}: {found[n]} instead of {expected[n]}" for n in sorted(expected.keys() & found.keys()) if found[n] != expected[n]]
        parts = [f"{len(names)} {word}, such as {names[0]}" for word, names in
                 (("missing", missing), ("unknown", extra), ("of another shape", other)) if names]  # fmt: skip
        raise ValueError(f"{weights_file} holds the weights of another architecture than its {CONFIG} says: {'; '.join(parts)}")
    check_numbers(tensors, model.state_dict(), weights_file)
    model.load_state_dict(tensors)


def check_numbers(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], file: str | Path) -> None:
    """Raise ValueError for tensors that are NaN, infinite, or of another kind of number than expected."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() != expected[name].is_floating_point() or tensor.is_complex() != expected[name].is_complex():
            raise ValueError(f"{file} has {tensor.dtype} for {name}, which is {expected[name].dtype}; copy or train it again")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise ValueError(f"{file} has {bad:,} numbers in {name} that are NaN or infinite; copy or train it again")


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of one of our models, or an error that says whose it is not."""
    try:
        config = json.loads(Path(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); the file is damaged or not a model's config") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ValueError(f'{path} does not describe a diffusion_forcing model (no "format": "{FORMAT}" in it)')
    if config.get("version") != VERSION:
        raise ValueError(f"{path} is of version {config.get('version')}; this package reads version {VERSION}; install a matching one")
    return config


def _find(path: str | Path, hub: dict[str, Any]) -> tuple[Path, Path]:
    folder = Path(path).expanduser()
    # "owner/model" is a name on the hub, unless there is a folder "owner" here.
    looks_local = isinstance(path, Path) or str(path).count("/") != 1 or str(path).startswith((".", "~")) or folder.parent.exists()
    if not looks_local:
        return _download(str(path), hub)
    if hub:
        raise ValueError(f"{', '.join(hub)} say how to load from the Hugging Face hub, and {folder} is a folder here; leave them out")
    files = folder / CONFIG, folder / WEIGHTS_FILE
    for file in files:
        if not file.is_file():
            way = f"A model's folder holds {CONFIG} and {WEIGHTS_FILE}."
            if (folder / "model" / WEIGHTS_FILE).is_file():
                way = f"This is a run; its model is in {folder / 'model'}."
            raise FileNotFoundError(f"no model in {folder}: {file.name} is missing. {way}")
    return files


def _download(repo_id: str, hub: dict[str, Any]) -> tuple[Path, Path]:
    """The files of a model on the hub, from the hub's cache if they are there."""
    try:
        config, weights = (_import_hub().hf_hub_download(repo_id, name, **hub) for name in (CONFIG, WEIGHTS_FILE))
    except OSError as error:
        raise FileNotFoundError(f"there is no folder {repo_id}, and the Hugging Face hub does not give {repo_id}: {error}") from error
    return Path(config), Path(weights)


def _import_hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError("models on the Hugging Face hub need its package: pip install 'diffusion_forcing[hub]'") from error
    return huggingface_hub
