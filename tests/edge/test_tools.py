"""How the other interpreters are found: by their variables, and where that is wrong by one sentence."""

import tarfile
from pathlib import Path

import pytest

from tests.edge import tools


def test_a_variable_names_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIGPU_TEST_MICROPYTHON", str(tmp_path))
    assert tools.micropython() == tmp_path


def test_a_variable_that_names_nothing_fails_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTIGPU_TEST_MPY_CROSS", str(tmp_path / "gone"))
    with pytest.raises(
        pytest.fail.Exception, match=r"OPTIGPU_TEST_MPY_CROSS names .*gone, which does not exist"
    ):
        tools.mpy_cross()


def test_a_package_of_the_webassembly_build_is_unpacked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "micropython.mjs"
    script.write_text("export {}")
    with tarfile.open(tmp_path / "package.tgz", "w:gz") as archive:
        archive.add(script, "package/micropython.mjs")
    monkeypatch.setenv("OPTIGPU_TEST_WASM", str(tmp_path / "package.tgz"))
    monkeypatch.setenv("OPTIGPU_TEST_TOOLS", str(tmp_path / "cache"))
    assert (tools.wasm() / "micropython.mjs").read_text() == "export {}"
    (tools.wasm() / "micropython.mjs").write_text("kept")
    assert (tools.wasm() / "micropython.mjs").read_text() == "kept"


def test_what_cannot_be_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPTIGPU_TEST_MICROPYTHON", raising=False)
    monkeypatch.setenv("OPTIGPU_TEST_TOOLS", str(tmp_path))
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(
        pytest.fail.Exception, match=r"The edge tests need micropython, and `/bin/false .*` failed"
    ):
        tools.micropython()
