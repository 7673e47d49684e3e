"""The public data sets: from archives and folders, downloaded, and refused where they do not fit."""

import gzip
import io
import json
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pd = pytest.importorskip("pandas", reason="pandas comes with the extra `forecasting`")

from diffusion_forcing.forecasting.datasets import DATASETS, Dataset, load_dataset
from diffusion_forcing.forecasting.reading import read

SHARED = Path(__file__).parents[2] / "shared" / "data"


def tiny(start=None, **changes):
    """The texts of a set of 2 series: 6 steps to train, then 3 windows of 2 steps; entries by part."""
    whole = np.arange(24.0).reshape(2, 12) + 0.1
    start = start or "2020-01-03 00:00:00"
    parts = {
        "train": [{"start": start, "target": series[:6].tolist()} for series in whole],
        "test": [{"start": start, "target": series[:end].tolist()} for end in (8, 10, 12) for series in whole],
    }
    parts.update(changes)
    texts = {f"{part}/{part}.json": "".join(json.dumps(entry) + "\n" for entry in entries) for part, entries in parts.items()}
    return {"metadata/metadata.json": json.dumps({"time_granularity": "B"}), **texts}, whole, parts


@pytest.fixture
def dataset(monkeypatch):
    monkeypatch.setitem(DATASETS, "tiny", Dataset("tiny_nips", 2, 3, "B"))
    return DATASETS["tiny"]


def pack(file, texts, extra=()):
    with tarfile.open(file, "w:gz") as archive:
        for name, text in texts.items():
            member = tarfile.TarInfo(f"tiny_nips/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
        for member in extra:
            archive.addfile(member)
    return file


def unpack(folder, texts, compress=False):
    for name, text in texts.items():
        file = folder / (f"{name}.gz" if compress and "metadata" not in name else name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return folder


def test_a_data_set_is_read_whole(tmp_path, dataset):
    texts, whole, _ = tiny()
    link = tarfile.TarInfo("tiny_nips/train/other.json")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    paths = [pack(tmp_path / "x.tar.gz", texts, [link]), unpack(tmp_path / "plain", texts), unpack(tmp_path / "gz", texts, compress=True)]
    for path in paths:
        found, of = load_dataset("tiny", path)
        assert of is dataset
        np.testing.assert_array_equal(found.values, whole.T)
        assert found.names == ("0", "1")
        assert found.index.equals(pd.date_range("2020-01-03", periods=12, freq="B"))
        assert found.freq == "B"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["gz", "plain", "x.tar.gz"], "an archive is read where it is"


def test_a_set_that_is_tested_another_year_has_a_gap(tmp_path, dataset):
    """As the taxis': trained on one January, tested on the next."""
    _, whole, parts = tiny()
    later = [{**entry, "start": "2020-01-21"} for entry in parts["test"]]
    found, _ = load_dataset("tiny", unpack(tmp_path, tiny(test=later)[0]))
    np.testing.assert_array_equal(found.values[:6], whole.T[:6])
    assert np.isnan(found.values[6:12]).all()
    np.testing.assert_array_equal(found.values[12:], whole.T)
    assert found.notes == ("6 steps between training and test have no values, from 2020-01-13 on",)


def test_sets_that_do_not_fit_are_refused(tmp_path, dataset):
    _, _, parts = tiny()
    other = [{**parts["train"][0], "target": [9.0] * 6}, parts["train"][1]]
    cases = [
        ({"test": parts["test"][:-2]}, "should test 2 series in 3 windows, each 2 steps later; it has 4 entries"),
        ({"test": parts["test"][::-1]}, "both 0.1 and 12.1 for one series at step 0"),
        ({"train": other}, "both 9 and 0.1 for one series at step 0"),
        ({"train": []}, "no entries in train/"),
        ({"train": [{"target": [1]}]}, "train.json, line 1 is not an entry with `start` and `target`"),
        ({"train": [{"start": "2020-01-03", "target": [[1.0]]}]}, r"an entry of shape \(1, 1\)"),
        ({"test": [{**entry, "start": "2020-01-02"} for entry in parts["test"]]}, "starts at 2020-01-02, off the clock"),
    ]
    for i, (changes, words) in enumerate(cases):
        with pytest.raises(ValueError, match=words):
            load_dataset("tiny", unpack(tmp_path / str(i), tiny(**changes)[0]))
    texts = tiny()[0]
    with pytest.raises(ValueError, match="of freq 'H' and tiny of 'B'"):
        load_dataset("tiny", unpack(tmp_path / "freq", {**texts, "metadata/metadata.json": '{"freq": "H"}'}))
    with pytest.raises(ValueError, match=r"metadata\.json of .* is not that of a set"):
        load_dataset("tiny", unpack(tmp_path / "json", {**texts, "metadata/metadata.json": "{"}))
    whole = pack(tmp_path / "x.tar.gz", texts).read_bytes()
    (tmp_path / "x.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"x\.tar\.gz is damaged"):
        load_dataset("tiny", tmp_path / "x.tar.gz")
    with pytest.raises(FileNotFoundError, match="no folder or archive"):
        load_dataset("tiny", tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"exchange, solar, electricity, traffic, taxi, wikipedia.*got 'moon'"):
        load_dataset("moon")


def test_a_data_set_is_downloaded(monkeypatch, dataset):
    repository = pytest.importorskip("gluonts.dataset.repository", reason="gluonts comes with the extra `forecasting`")
    _, whole, parts = tiny()
    asked = []

    def get_dataset(name):
        asked.append(name)
        entries = {
            part: [{"start": pd.Period(e["start"], "D"), "target": np.array(e["target"], dtype=np.float32)} for e in parts[part]]
            for part in parts
        }
        return SimpleNamespace(metadata=SimpleNamespace(freq="B"), **entries)

    monkeypatch.setattr(repository, "get_dataset", get_dataset)
    found, _ = load_dataset("tiny")
    assert asked == ["tiny_nips"]
    np.testing.assert_array_equal(found.values, whole.T.astype(np.float32))

    def fails(name):
        raise OSError("no route to host")

    monkeypatch.setattr(repository, "get_dataset", fails)
    with pytest.raises(ConnectionError, match=r"no route to host.*tiny_nips\.tar\.gz.*pass its path"):
        load_dataset("tiny")
    monkeypatch.setitem(sys.modules, "gluonts.dataset.repository", None)
    with pytest.raises(ImportError, match=r"pip install 'diffusion_forcing\[forecasting\]', or pass the path"):
        load_dataset("tiny")


def test_exchange_is_the_published_set():
    file = SHARED / "exchange_rate" / "exchange_rate_nips.tar.gz"
    if not file.exists():
        pytest.skip(f"the exchange rates are not in {file.parent}")
    found, of = load_dataset("exchange", file)
    assert found.values.shape == (6071 + of.windows * of.horizon, 8)
    assert found.index[0] == pd.Timestamp("1990-01-01")
    assert found.freq == "B"
    assert not np.isnan(found.values).any()
    with tarfile.open(file) as archive:
        train = [json.loads(line)["target"] for line in archive.extractfile("exchange_rate_nips/train/train.json")]
        last = [json.loads(line)["target"] for line in archive.extractfile("exchange_rate_nips/test/test.json")][-8:]
    np.testing.assert_array_equal(found.values[:6071], np.array(train).T)
    np.testing.assert_array_equal(found.values, np.array(last).T)


@pytest.mark.parametrize(
    ("name", "shape", "freq"),
    [
        ("electricity_uci321_840h.npz", (840, 321), None),
        ("nyc_taxi_od_hourly_2018.npz", (1464, 900), "h"),
        ("solar_nrel_florida_daylight_hourly.npz", (3650, 216), None),
    ],
)
def test_shared_arrays_are_read(name, shape, freq):
    file = SHARED / "series" / name
    if not file.exists():
        pytest.skip(f"{name} is not in {file.parent}")
    found = read(file, value_type="positive")
    assert found.values.shape == shape
    assert found.freq == freq
