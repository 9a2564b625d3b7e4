"""The directories, by the environment."""

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from optigpu.paths import cache_dir, data_dir, home_dir, lock_dir, plain_path, without_home
from optigpu.vocabulary import UnsupportedError

NAMELESS = ("unshare", "--user", "--map-user=54321")
"""Runs a command by a user id that has no name and so no home folder, where the kernel allows that."""


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("OPTIGPU_DATA_DIR", "OPTIGPU_LOCK_DIR", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_by_default_under_the_home_directory(tmp_path: Path) -> None:
    assert data_dir() == tmp_path / ".local" / "share" / "optigpu"
    assert lock_dir() == data_dir() / "locks"


def test_ours_come_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    monkeypatch.setenv("OPTIGPU_DATA_DIR", "~/mine")
    assert data_dir() == tmp_path / "mine"
    assert lock_dir() == tmp_path / "mine" / "locks"
    monkeypatch.setenv("OPTIGPU_LOCK_DIR", "/run/locks")
    assert lock_dir() == Path("/run/locks")


def can_be_nameless() -> bool:
    try:
        return subprocess.run([*NAMELESS, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not can_be_nameless(), reason="the kernel allows no user namespace")
def test_a_user_id_without_a_name_needs_the_data_folder_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HOME")
    code = "from optigpu.paths import *; print(data_dir(), cache_dir(), lock_dir())"

    def printed() -> subprocess.CompletedProcess[str]:
        return subprocess.run([*NAMELESS, sys.executable, "-c", code], capture_output=True, text=True)

    assert printed().stderr.endswith(
        "This user has no home folder that can be written; set OPTIGPU_DATA_DIR to a folder for OptiGPU's files.\n"
    )
    monkeypatch.setenv("OPTIGPU_DATA_DIR", "/data")
    assert printed().stdout.split() == ["/data", "/data/home/.cache/optigpu", "/data/locks"]
    monkeypatch.setenv("OPTIGPU_DATA_DIR", "~/data")
    assert "OPTIGPU_DATA_DIR is '~/data', and there is no such home folder" in printed().stderr


def test_a_home_that_can_hold_nothing_is_as_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    with pytest.raises(UnsupportedError, match="set OPTIGPU_DATA_DIR to a folder"):
        data_dir()
    with pytest.raises(UnsupportedError, match="set OPTIGPU_DATA_DIR to a folder"):
        cache_dir()
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path))
    assert home_dir() == tmp_path / "home"
    assert cache_dir() == tmp_path / "home" / ".cache" / "optigpu"
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_dir() == Path("/cache/optigpu")


@pytest.mark.parametrize(
    ("home", "text", "shown"),
    [
        ("/home/al", "/home/al", "~"),
        ("/home/al/", "/home/al/lib:/home/alice/lib:/opt/home/al", "~/lib:/home/alice/lib:/opt/home/al"),
        ("/home/al", "gcc -I/home/al/in --sysroot=/home/al -L/home/al.old", "gcc -I~/in --sysroot=~ -L/home/al.old"),
        ("/home/al", "//home//al/lib,'/home/al'", "~/lib,'~'"),
        ("/home/al b", "/home/al b/lib /home/al", "~/lib /home/al"),
        ("/home/a.l", "/home/axl", "/home/axl"),
        ("/", "/usr/local/lib:/", "/usr/local/lib:/"),
        ("", "/usr/local/lib", "/usr/local/lib"),
    ],
)  # fmt: skip
def test_only_whole_names_of_a_path_are_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, home: str, text: str, shown: str
) -> None:
    monkeypatch.setenv("HOME", home)
    assert without_home(text) == shown


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where links are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize("name", ["a b", "it's", 'a"b', "a\\b", "$HOME", "a;b", "ü", "a\nb", "a:b", "*"])
def test_a_folder_that_a_command_line_breaks_has_a_link_that_stays(
    tmp_path: Path, temporary: Path, name: str
) -> None:
    folder = tmp_path / name / "data"
    plain = plain_path(folder)
    assert plain.is_relative_to(temporary)
    assert plain.samefile(folder)
    assert shlex.split(str(plain)) == [str(plain)]
    assert plain_path(folder) == plain
    assert plain_path(tmp_path / name / "other") != plain


def test_a_plain_folder_is_itself_and_is_not_made(tmp_path: Path, temporary: Path) -> None:
    assert plain_path(tmp_path / "a-b_c.d" / "1") == tmp_path / "a-b_c.d" / "1"
    assert list(temporary.iterdir()) == []
    assert not (tmp_path / "a-b_c.d").exists()


def test_no_link_is_made_where_others_could_have_made_it(tmp_path: Path, temporary: Path) -> None:
    plain_path(tmp_path / "a b").parent.chmod(0o777)
    with pytest.raises(
        UnsupportedError, match=r"a b.*others may write .*set OPTIGPU_DATA_DIR and XDG_CACHE_HOME"
    ):
        plain_path(tmp_path / "a b")
