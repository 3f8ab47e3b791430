"""Where files of the package's own are kept."""

import sys
from pathlib import Path

import pytest

from polarquant_nb import places


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {}, "home/.cache/polarquant-nb"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/polarquant-nb"),
        ("darwin", {"XDG_CACHE_HOME": "/xdg"}, "home/Library/Caches/polarquant-nb"),
        ("win32", {}, "home/AppData/Local/polarquant-nb"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/polarquant-nb"),
        ("linux", {"POLARQUANT_CACHE": "/chosen", "XDG_CACHE_HOME": "/xdg"}, "/chosen"),
    ],
    ids=str,
)
def test_cache_directory(monkeypatch, platform, environment, expected):
    for name in ("POLARQUANT_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(places.Path, "home", lambda: Path("home"))
    monkeypatch.setattr(sys, "platform", platform)
    assert places.cache_dir() == Path(expected)


@pytest.mark.parametrize(("value", "expected"), [("0", None), ("1", "cuda"), ("", "cuda")])
def test_machine_code_is_kept_unless_it_is_switched_off(monkeypatch, tmp_path, value, expected):
    monkeypatch.setenv("POLARQUANT_CACHE", str(tmp_path))
    monkeypatch.setenv("POLARQUANT_CUDA_CACHE", value)
    assert places.cuda_cache_dir() == (expected and tmp_path / expected)
