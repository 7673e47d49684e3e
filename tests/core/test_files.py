"""Files: where the cache is, and what it keeps."""

import os

import pytest

from diffusion_forcing.files import cache_folder, cached


def test_the_cache_is_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("DFORCE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "dforce"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder().parts[-2:] == (".cache", "dforce")


def test_a_cached_file_is_made_once_and_not_there_when_making_it_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path / "cache"))

    def fails(path):
        path.write_text("half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        cached("text", fails)
    assert not list((tmp_path / "cache").iterdir())
    file = cached("text", lambda path: path.write_text("once"))
    assert cached("text", fails) == file
    assert file.read_text() == "once"


def test_two_processes_may_make_the_same_cached_file_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("DFORCE_CACHE", str(tmp_path / "cache"))
    other = os.getpid() + 1

    def make(path):
        path.write_text("same")
        if os.getpid() != other:
            with monkeypatch.context() as patch:
                patch.setattr(os, "getpid", lambda: other)
                cached("text", make)

    file = cached("text", make)
    assert list((tmp_path / "cache").iterdir()) == [file]
    assert file.read_text() == "same"
