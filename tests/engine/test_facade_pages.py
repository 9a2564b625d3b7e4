"""The code of docs/library.md for the caller's own process, and benchmarks/run_all.py, run as they stand."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.engine.brief_jobs import BRIEF
from tests.pages import LIBRARY, ROOT, blocks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_lock", "forked_children")]


def block_with(text: str) -> str:
    (source,) = [block for block in blocks(LIBRARY, "python") if text in block]
    return source


def test_the_example_of_any_module_works(capsys: pytest.CaptureFixture[str]) -> None:
    exec(block_with("DeepLearningBenchmark"), {})
    shown = capsys.readouterr().out
    assert shown.index("=== eager ===") < shown.index("=== training ===") < shown.index("after: host")


def test_the_example_of_loaded_models_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In less time, and without the products, which the founding code measures in another test, and one precision."""
    source = block_with("BenchmarkEngine")
    for written, less in (
        ("engine.run_matmul_suite()\n", ""),
        ('("fp32", "int8", "native")', '("int8", "native")'),
        ("label=precision)", "label=precision, new_tokens=8, seconds=0.05)"),
    ):
        assert written in source
        source = source.replace(written, less)
    monkeypatch.chdir(tmp_path)
    exec(source, {})
    assert "native" in capsys.readouterr().out
    assert (tmp_path / "results" / "inference.svg").is_file()


def test_run_all_measures_prints_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("optigpu.facade.engine.brief", lambda _: BRIEF)
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "benchmarks" / "run_all.py"), run_name="__main__")
    assert ended.value.code == 0
    assert "RTX 5090" in capsys.readouterr().out
    assert {"results.json", "matmul.png"} <= {path.name for path in tmp_path.iterdir()}


def test_run_all_ends_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("optigpu.facade.engine.brief", lambda _: {"measure": {"replicates": 0}})
    monkeypatch.setattr(sys, "argv", ["run_all.py"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "benchmarks" / "run_all.py"), run_name="__main__")
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("Error: measure.replicates: ")
