"""The directories, by the environment."""

from pathlib import Path

import pytest

from optigpu.paths import data_dir, lock_dir


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("OPTIGPU_DATA_DIR", "OPTIGPU_LOCK_DIR", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_by_default_under_the_home_directory(tmp_path: Path) -> None:
    assert data_dir() == tmp_path / ".local" / "share" / "optigpu"
    assert lock_dir() == data_dir() / "locks"


def test_the_desktop_s_standard_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert data_dir() == Path("/data/optigpu")


def test_ours_come_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    monkeypatch.setenv("OPTIGPU_DATA_DIR", "~/mine")
    assert data_dir() == tmp_path / "mine"
    assert lock_dir() == tmp_path / "mine" / "locks"
    monkeypatch.setenv("OPTIGPU_LOCK_DIR", "/run/locks")
    assert lock_dir() == Path("/run/locks")
