"""Every file of the agent that runs on a board compiles for the ESP32-S3."""

from pathlib import Path

import pytest

from tests.edge.interpreters import agent_files, compile_file


@pytest.mark.parametrize("path", agent_files(), ids=str)
def test_it_compiles_for_the_esp32_s3(path: Path, tmp_path: Path) -> None:
    done = compile_file(path, tmp_path, "-march=xtensawin", "-O2")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / path.with_suffix(".mpy")).stat().st_size > 0


def test_the_compiler_refuses_what_it_cannot_compile(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("match x:\n    case 1:\n        pass\n")
    assert compile_file(bad, tmp_path / "out").returncode != 0
