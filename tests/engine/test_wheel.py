"""The wheel and the sdist, as a user gets them: built, installed in a new environment, and tried from an empty folder.

"Getting started" and the README are followed from top to bottom: their extras are installed, their commands run with small budgets, and
their Python runs. Needs a package index. `make wheel-test` runs this file.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", "runs", "build", "dist", "site", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)
MAX_MEGABYTES = 45  # of the wheel: the pretrained models are most of it
PAGES = "".join((ROOT / page).read_text() for page in ("docs/getting-started.md", "README.md"))
COMMANDS = [
    line.partition("#")[0].strip()
    for block in re.findall(r"^```sh\n(.*?)^```", PAGES, re.M | re.S)
    for line in block.splitlines()
    if re.match(r"(dforce|pip install) ", line)
]
COMMANDS = [command for i, command in enumerate(COMMANDS) if command not in COMMANDS[:i]]
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGES, re.M | re.S)
SMALL = {
    "train": ["--train.steps", "2"],
    "train maze2d": ["--task.transitions", "20000"],
    "train clips": ["--train.batch", "2"],
    "forecast": ["--minutes", "0.05"],
    "eval runs/composition": ["--samples", "50"],
}
"""Words that make a command small, by what it begins with. The number of episodes and samples is made 1 besides."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def run(*words, cwd, env=None, timeout=900):
    """The output of a command, which must succeed."""
    done = subprocess.run([str(word) for word in words], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{' '.join(map(str, words))}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel, built from the sdist, and the sdist."""
    root = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, root / "source", ignore=NOT_SOURCE)
    run(sys.executable, "-m", "build", "--outdir", root / "dist", root / "source", cwd=root)
    (wheel,), (sdist,) = (root / "dist").glob("*.whl"), (root / "dist").glob("*.tar.gz")
    return wheel, sdist


class Environment:
    """A new virtual environment with the wheel in it, and an empty folder to work in."""

    def __init__(self, root, wheel):
        self.wheel, self.work, self.bin = wheel, root / "work", root / "venv" / "bin"
        self.work.mkdir()
        (root / "home").mkdir()
        keep = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self.env = {**keep, "PATH": f"{self.bin}:{os.environ['PATH']}", "DFORCE_CACHE": str(root / "cache"), "MPLBACKEND": "Agg"}
        self.env |= {"OMP_NUM_THREADS": "1", "HOME": str(root / "home"), "PIP_CACHE_DIR": str(Path.home() / ".cache" / "pip")}
        run(sys.executable, "-m", "venv", root / "venv", cwd=root)
        self.install(str(wheel))

    def install(self, *what):
        run(self.bin / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", *what, cwd=self.work, env=self.env)

    def run(self, *words, **options):
        return run(*words, cwd=self.work, env=self.env, **options)


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("environment"), built[0])


def test_the_wheel_holds_the_package_and_nothing_else(built):
    wheel, _ = built
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = ROOT / "diffusion_forcing"
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert names == {str(path.relative_to(ROOT)) for path in files}
    assert wheel.stat().st_size < MAX_MEGABYTES * 2**20


def test_it_is_installed_outside_of_the_source_tree(environment):
    place = environment.run("python", "-c", "import diffusion_forcing; print(diffusion_forcing.__file__)")
    assert place.startswith(str(environment.bin.parent))


def test_without_extras_there_is_nothing_optional(environment):
    installed = environment.run("python", "-m", "pip", "list", "--format", "freeze").lower()
    assert not re.search(r"^(pandas|av|numba|mujoco|huggingface|tensorboard|gymnasium)", installed, re.M)


def test_there_is_something_to_try():
    assert len(COMMANDS) >= 10
    assert len(SNIPPETS) >= 3


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_pages(command, environment):
    first, *words = re.sub(r"(--(?:episodes|samples)) \d+", r"\1 1", command).replace("'", "").split()
    if first == "pip":
        assert words[0] == "install"
        environment.install(*(word.replace("diffusion_forcing", str(environment.wheel)) for word in words[1:]))
        return
    provide(environment, words)
    small = [word for begin, more in SMALL.items() if " ".join(words).startswith(begin) for word in more]
    environment.run(first, *words, *small)


def provide(environment, words):
    """Files of the user's own that a command reads, of which the README gives a name only."""
    for i, word in enumerate(words):
        if word.endswith(".csv"):
            days = np.arange("2020-01-01", "2021-01-01", dtype="datetime64[D]")
            lines = [f"{day},{10 + 3 * np.sin(i / 7):.3f},{5 + np.cos(i / 7):.3f}" for i, day in enumerate(days)]
            (environment.work / word).write_text("\n".join(["date,north,south", *lines]) + "\n")
        elif word == "FOLDER":
            words[i] = "demonstrations" if words[1] == "imitation" else "clips"
            folder = environment.work / words[i]
            (demonstrations if words[1] == "imitation" else clips)(folder)


def film(path, frames, fps):
    from diffusion_forcing.engine.media import Film

    path.parent.mkdir(parents=True, exist_ok=True)
    with Film(path, fps=fps) as opened:
        opened.add(frames)


def squares(n, length):
    """(length, 64, 64, 3): a square that moves."""
    frames = np.full((length, 64, 64, 3), 40, np.uint8)
    for t, frame in enumerate(frames):
        frame[(4 * n + t) % 48 :][:16, 8 + n : 24 + n] = (220, 120, 20 * n)
    return frames


def clips(folder):
    """Eight films."""
    for n in range(8):
        film(folder / f"{n}.mp4", squares(n, 64), 15)


def demonstrations(folder, number=6, length=120, fps=10):
    """A LeRobot data set, version 2.1, of one camera."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    camera, draw = "observation.images.top", np.random.default_rng(0)
    features = {name: {"dtype": "float32", "shape": [2]} for name in ("observation.state", "action")}
    info = {
        "codebase_version": "v2.1", "fps": fps, "total_episodes": number, "chunks_size": 1000,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        "features": {**features, camera: {"dtype": "video", "shape": [64, 64, 3]}},
    }  # fmt: skip
    (folder / "meta").mkdir(parents=True, exist_ok=True)
    (folder / "data" / "chunk-000").mkdir(parents=True, exist_ok=True)
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    (folder / "meta" / "tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": "push"}) + "\n")
    episodes = [json.dumps({"episode_index": n, "tasks": ["push"], "length": length}) + "\n" for n in range(number)]
    (folder / "meta" / "episodes.jsonl").write_text("".join(episodes))
    for n in range(number):
        walk = draw.standard_normal((length + 1, 2)).cumsum(0).astype(np.float32) / 10
        columns = {"observation.state": walk[:-1], "action": walk[1:]}
        table = {name: pa.FixedSizeListArray.from_arrays(pa.array(column.ravel()), 2) for name, column in columns.items()}
        table |= {"timestamp": np.arange(length, dtype=np.float32) / fps, "frame_index": np.arange(length)}
        pq.write_table(pa.table(table), folder / "data" / "chunk-000" / f"episode_{n:06d}.parquet")
        film(folder / "videos" / "chunk-000" / camera / f"episode_{n:06d}.mp4", squares(n, length), fps)


@pytest.mark.parametrize("i", range(len(SNIPPETS)))
def test_python_of_the_pages(i, environment):
    environment.run("python", "-c", SNIPPETS[i])


def test_every_command_explains_itself(environment):
    for command in ("train", "train composition", "eval", "sample", "report", "data", "forecast", "play"):
        environment.run("dforce", *command.split(), "--help")
    assert "composition" in environment.run("dforce", "list")


def test_the_sdist_tests_itself(built, environment, tmp_path):
    """Some of its own tests, against the installed wheel."""
    _, sdist = built
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert {"tests", "docs", "examples", "benchmarks", "Makefile", "constraints.txt", "CITATION.cff"} <= {p.name for p in source.iterdir()}
    environment.install("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
    tests = [f"tests/{name}" for name in ("core/test_model.py", "core/test_matrix.py", "core/test_serialization.py", "test_architecture.py",
                                          "test_composition.py", "pretrained")]  # fmt: skip
    run(environment.bin / "pytest", "-p", "no:cacheprovider", "-n", "1", *tests, cwd=source, env=environment.env)
