"""The cache of GGUF files: written once, whole or not at all."""

import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from optigpu.backends.base import Order
from optigpu.backends.converted import BOUND
from optigpu.backends.llama_cpp import convert, engine
from optigpu.backends.llama_cpp.engine import gguf_of
from optigpu.backends.llama_cpp.gguf_facts import FileType, Form
from optigpu.documents.result import Environment
from optigpu.hardware import probe
from optigpu.vocabulary import DeviceKind, OptiGPUError
from optigpu.workloads.generate import Generate

SIZE = 1000
REAL = subprocess.run
MODEL = "preset:tiny-gpt2-test"


class Converter:
    """Stands in for the process that writes a file: SIZE bytes, unless it is told to fail."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.status, self.said = 0, ""

    def run(self, command: Sequence[str], **more: Any) -> "subprocess.CompletedProcess[str]":
        if command[0] != sys.executable:  # what describes the machine calls others
            return REAL(command, **more)
        options = dict(zip(command[4::2], command[5::2], strict=True))
        assert list(command[:4]) == [sys.executable, "-P", "-m", convert.__name__]
        what = options.get("--form") or options["--type"]
        self.calls.append((what, options.get("--plain", options.get("--model", ""))))
        Path(options["--output"]).write_bytes(b"x" * (SIZE // 2 if self.status else SIZE))
        return subprocess.CompletedProcess(list(command), self.status, self.said, self.said)


@cache
def environment() -> Environment:
    return probe()


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Converter:
    """In the place of the real one, with a cache folder of its own."""
    environment()  # asks git, before nothing can be run any more
    made = Converter()
    monkeypatch.setattr(subprocess, "run", made.run)
    for name in ("PLAIN", "MATTERS"):  # their libraries need not be installed
        monkeypatch.setattr(engine, name, replace(getattr(engine, name), libraries=()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(BOUND.variable, raising=False)
    return made


def got(kind: FileType, tmp_path: Path, seed: int = 0) -> Path:
    order = Order(MODEL, (), Generate(), DeviceKind.CPU, seed, 1, tmp_path / "job", environment())
    ours = replace(engine.LLAMA_CPP, quantizer=replace(engine.LLAMA_CPP.quantizer, libraries=()))
    return gguf_of(order, ours, Form(kind), lambda _: None)


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").rglob("*.gguf"))


def test_a_file_is_written_once(converter: Converter, tmp_path: Path) -> None:
    first = got("F16", tmp_path)
    assert first.stat().st_size == SIZE
    assert first.is_relative_to(tmp_path / "cache" / "optigpu" / "converted" / "gguf")
    assert got("F16", tmp_path) == first
    assert converter.calls == [("F16", "preset:tiny-gpt2-test")]


def test_what_failed_leaves_no_file(converter: Converter, tmp_path: Path) -> None:
    converter.status, converter.said = 1, "Traceback\nOSError: No space left on device"
    with pytest.raises(
        OptiGPUError, match="could not be converted for gguf: OSError: No space left on device"
    ):
        got("F16", tmp_path)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]
    converter.status = 0
    assert got("F16", tmp_path).stat().st_size == SIZE


def test_with_a_bound_of_0_files_live_as_long_as_their_job(
    converter: Converter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BOUND.variable, "0")
    path = got("Q4_0", tmp_path)
    assert path.is_relative_to(tmp_path / "job")
    assert got("Q4_0", tmp_path) == path
    assert len(converter.calls) == 2
    assert files(tmp_path) == []


def test_processes_that_want_the_same_file_wait_for_the_one_that_writes_it(
    converter: Converter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def slow(command: Sequence[str], **more: Any) -> "subprocess.CompletedProcess[str]":
        if command[0] == sys.executable:
            writing.set()
            assert go_on.wait(30)
        return converter.run(command, **more)

    monkeypatch.setattr(subprocess, "run", slow)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(got("F16", tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert writing.wait(30)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert len(found) == 3
    assert len(set(found)) == len(converter.calls) == 1
