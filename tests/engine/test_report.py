"""Pictures and the page about a run."""

import base64
import json
import re
from pathlib import Path

import pytest
import torch
from small import dforce, flat, small

from diffusion_forcing import pyramid
from diffusion_forcing.engine.config import save_experiment
from diffusion_forcing.engine.log import read_log
from diffusion_forcing.engine.plotting import draw_curves, draw_matrix, figure
from diffusion_forcing.engine.report import write_report
from diffusion_forcing.engine.train import train

PNG = b"\x89PNG"
LOG = [{"step": s, "loss": 1 / s, "grad_norm": 1.0, "lr": 1e-3 / s, "seconds": 0.1 * s, "tokens_per_second": 9} for s in range(1, 9)]


@pytest.fixture
def run(tmp_path):
    """A run's folder, evaluated, with names that need care in HTML."""
    folder = tmp_path / "cross & <co>"
    folder.mkdir()
    save_experiment(small(), folder / "config.json")
    about = {"recipe": "composition", "doc": "Crosses <and> more.", "command": "dforce train composition --name 'cross & <co>'", "seed": 3}
    (folder / "run.json").write_text(json.dumps(about))
    table = {"title": "Where 10 trajectories end", "columns": ["", "opposite"], "rows": [["data", "100.0%"], ["a < b", "12.5%"]]}
    evaluation = {"metrics": {"data/opposite": 1.0}, "tables": [table], "figures": {"matrix.png": "A pyramid & its steps."}}
    (folder / "eval.json").write_text(json.dumps(evaluation))
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*LOG, {"step": 8, "valid_loss": 0.2, "seconds": 1.0}]))
    draw_matrix(pyramid(6, torch.arange(4)), folder / "figures" / "matrix.png")
    return folder


def images(page):
    """Bytes of the pictures inside a page."""
    return [base64.b64decode(data) for data in re.findall(r'<img src="data:image/png;base64,([^"]+)"', page)]


def test_the_page_needs_nothing_but_itself(run):
    page = write_report(run)
    assert page == run / "report.html"
    text = page.read_text()
    assert not re.search(r"https?:", text)
    assert not re.search(r"<(script|link|iframe)", text)
    assert text.count("<img") == len(images(text))
    assert "url(" not in text


def test_the_page_shows_table_figures_curves_command_and_configuration(run):
    text = write_report(run).read_text()
    for part in ("Where 10 trajectories end", "<td>100.0%</td>", "12.5%", "A pyramid &amp; its steps.", "Crosses &lt;and&gt; more."):
        assert part in text
    assert "dforce train composition --name &#x27;cross &amp; &lt;co&gt;&#x27;" in text
    assert "Loss and learning rate" in text
    assert "&quot;TrainConfig&quot;" in text
    pictures = images(text)
    assert len(pictures) == 2
    assert all(picture.startswith(PNG) for picture in pictures)
    assert pictures[0] == (run / "figures" / "matrix.png").read_bytes()


def test_films_are_played(run):
    evaluation = json.loads((run / "eval.json").read_text())
    (run / "eval.json").write_text(json.dumps({**evaluation, "figures": {"walk.mp4": "Real & made."}}))
    (run / "figures" / "walk.mp4").write_bytes(b"film")
    text = write_report(run).read_text()
    (film,) = re.findall(r'<video src="data:video/mp4;base64,([^"]+)"', text)
    assert base64.b64decode(film) == b"film"
    assert "<figcaption>Real &amp; made.</figcaption>" in text


def test_what_a_run_calls_itself_is_text_not_markup(run):
    text = write_report(run).read_text()
    assert "<co>" not in text
    assert "cross &amp; &lt;co&gt;</h1>" in text
    assert "a &lt; b" in text


def test_a_run_that_was_not_evaluated_says_so(run):
    (run / "eval.json").unlink()
    text = write_report(run).read_text()
    assert "Not evaluated yet" in text
    assert "dforce eval" in text
    assert len(images(text)) == 1


def test_a_run_that_has_not_trained_has_no_curves(run):
    (run / "log.jsonl").unlink()
    assert len(images(write_report(run).read_text())) == 1


def test_a_missing_figure_is_named(run):
    (run / "figures" / "matrix.png").unlink()
    assert "missing: matrix.png" in write_report(run).read_text()


def test_inside_its_folder_a_run_still_has_its_name(run, monkeypatch):
    monkeypatch.chdir(run)
    assert "cross &amp; &lt;co&gt;</h1>" in write_report(type(run)(".")).read_text()


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is not a run: it has no config.json. `dforce train RECIPE` makes one"):
        write_report(tmp_path)


# A run by a stranger.


def evaluated(run, **changes):
    """Change what a run's evaluation says."""
    evaluation = json.loads((run / "eval.json").read_text())
    (run / "eval.json").write_text(json.dumps({**evaluation, **changes}))


@pytest.mark.parametrize("how", ["../../secret.png", "absolute", "../secret.png", "link.png", "folder/secret.png"])
def test_only_figures_of_the_run_itself_are_shown(how, run):
    secret = run.parent / "secret.png"
    secret.write_bytes(b"secret")
    (run / "secret.png").write_bytes(b"secret")
    (run / "figures" / "link.png").symlink_to(secret)
    (run / "figures" / "folder").symlink_to(run.parent)
    evaluated(run, figures={str(secret) if how == "absolute" else how: "Mine."})
    text = write_report(run).read_text()
    assert base64.b64encode(b"secret").decode() not in text
    assert "(not shown: " in text


@pytest.mark.parametrize("name", ["config.json", "run.json", "eval.json", "log.jsonl"])
def test_no_link_is_read(name, run):
    secret = run.parent / "secret"
    secret.write_text((run / name).read_text())
    (run / name).unlink()
    (run / name).symlink_to(secret)
    with pytest.raises(ValueError, match=f"{name} is a link"):
        write_report(run)


def test_no_link_is_written_over(run):
    precious = run.parent / "precious"
    precious.write_text("mine")
    (run / "report.html").symlink_to(precious)
    with pytest.raises(ValueError, match=r"report\.html is a link"):
        write_report(run)
    (run / "report.html").unlink()
    write_report(run)
    (run / "figures" / "curves.png").unlink()
    (run / "figures" / "curves.png").symlink_to(precious)
    with pytest.raises(ValueError, match=r"curves\.png is a link"):
        write_report(run)
    assert precious.read_text() == "mine"


@pytest.mark.parametrize(("command", "folder"), [("eval", "figures"), ("sample", "samples")])
def test_what_a_command_writes_stays_in_the_run(command, folder, tmp_path, capsys):
    train(small(train__steps=1), tmp_path / "run", quiet=True)
    save_experiment(small(), tmp_path / "run" / "config.json")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / folder).symlink_to(tmp_path / "elsewhere")
    assert dforce(command, tmp_path / "run", "--samples", "2") == 2
    assert f"{folder} is a link" in flat(capsys.readouterr().err)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_large_figures_are_named_and_not_shown(run, monkeypatch):
    monkeypatch.setattr("diffusion_forcing.engine.report.MOST_OF_FIGURE", 10)
    text = write_report(run).read_text()
    assert not images(text)
    assert text.count("(not shown: ") == 2
    monkeypatch.undo()
    monkeypatch.setattr("diffusion_forcing.engine.report.MOST_OF_PAGE", 5000)
    (run / "log.jsonl").unlink()
    (run / "figures" / "a.png").write_bytes(b"a" * 3000)
    evaluated(run, figures={"a.png": "First.", "b.png": "Missing.", "matrix.png": "Third."})
    text = write_report(run).read_text()
    assert len(images(text)) == 1
    assert "matrix.png is of" in text


EVIL = "<script>alert(1)</script>\"'"


def texts(value):
    """A structure in which each text, name and number is an attempt at markup."""
    if isinstance(value, dict):
        return {name: texts(inner) for name, inner in value.items()}
    return [texts(inner) for inner in value] if isinstance(value, list) else EVIL


def test_everything_that_a_run_says_is_escaped(run):
    evaluated(run, figures={EVIL: EVIL, "matrix.png": EVIL}, warnings=[EVIL, 7, [EVIL]], command=EVIL)
    for name in ("config.json", "run.json"):
        (run / name).write_text(json.dumps({**texts(json.loads((run / name).read_text())), EVIL: EVIL}))
    evaluation = json.loads((run / "eval.json").read_text())
    evaluated(run, tables=[*texts(evaluation["tables"]), EVIL, {"rows": EVIL}, {"rows": [EVIL, 3]}])
    text = write_report(run).read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;") > 20
    for attribute in re.findall(r'alt="([^"]*)"', text):
        assert "<" not in attribute
    assert "Content-Security-Policy" in text


@pytest.mark.parametrize("name", ["config.json", "run.json", "eval.json"])
@pytest.mark.parametrize("content", ["[]", "7", "{", "[" * 100_000, b"\xff\xfe\x00"])
def test_a_damaged_file_is_named(name, content, run):
    (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=name):
        write_report(run)


@pytest.mark.parametrize("line", ["7", '{"loss": 1.0}', '{"step": "x", "loss": 1.0}', '{"step": 9, "loss": [1]}', "[" * 100_000])
def test_lines_of_a_log_are_numbers(line, run):
    with (run / "log.jsonl").open("a") as log:
        log.write(f"{line}\n")
    assert len(read_log(run / "log.jsonl")) == len(LOG) + 1
    assert len(images(write_report(run).read_text())) == 2


# Pictures.


@pytest.mark.parametrize("horizon", [1, 100])
def test_a_matrix_becomes_a_picture(horizon, tmp_path):
    file = tmp_path / "new" / "matrix.png"
    draw_matrix(pyramid(horizon, torch.arange(11)), file, "pyramid")
    assert file.read_bytes().startswith(PNG)
    other = tmp_path / "other.png"
    draw_matrix(pyramid(horizon, torch.arange(6)), other, "pyramid")
    assert other.read_bytes() != file.read_bytes()


def test_a_matrix_can_be_drawn_into_a_figure_of_ones_own(tmp_path):
    with figure(tmp_path / "two.png") as fig:
        for ax in fig.subplots(1, 2):
            draw_matrix(pyramid(5, torch.arange(4)), tmp_path / "unused.png", ax=ax)
    assert [file.name for file in tmp_path.iterdir()] == ["two.png"]


def test_curves_are_drawn_from_the_first_step_on(tmp_path):
    draw_curves(LOG[:1], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)


def test_a_picture_that_fails_to_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    file = tmp_path / "a.png"
    file.write_bytes(b"old")

    def half(self, path, **_):
        Path(path).write_bytes(b"ha")
        raise OSError("disk full")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", half)
    with pytest.raises(OSError, match="disk full"), figure(file):
        pass
    assert file.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
