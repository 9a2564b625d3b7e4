"""Building the C++ operators: once for several processes, and a clear reason where it cannot be done."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from optigpu.ops import build
from optigpu.ops.build import NativeOperators
from optigpu.ops.decode.cpu import interface
from optigpu.ops.linear import int8_linear

SOURCE = """
#include <cstdint>
extern "C" int64_t optigpu_tiny() { return 42; }
"""
PROBE = """
import sys
from pathlib import Path
from optigpu.ops.build import register
print(register((Path(sys.argv[1]),), "optigpu_tiny", {}))
"""


def start(source: Path, cache: Path, path: str) -> subprocess.Popen[str]:
    """A process that builds the source and prints what its function returns."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PATH": path}
    command = [sys.executable, "-c", PROBE, str(source)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def answer(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return output


@pytest.fixture
def unbuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As in a new process, with nothing built: the folder that holds the cache of what is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "load_library", build.load_library.__wrapped__)
    again = NativeOperators(
        int8_linear._SOURCES, "optigpu_best_instruction_set", {}, int8_linear.INSTRUCTION_SETS
    )
    monkeypatch.setattr(int8_linear, "_NATIVE", again)
    monkeypatch.setattr(int8_linear, "native_reason", again.reason)
    return tmp_path


def reason_for_torch() -> str:
    """Why int8_linear has no C++ operator here, after plain torch has given the right result."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(40, 128, generator=generator), torch.randn(3, 128, generator=generator)
    q, scale = int8_linear.quantize_rows(weight)
    y = int8_linear.int8_linear(x, int8_linear.pack(q), scale)
    error = (y - x @ (q * scale[:, None]).T).abs().max().item()
    assert error < 0.3  # bfloat16 activations: 2**-8 of sums of about 40
    assert int8_linear.int8_linear_backend("cpu") == "torch-int8pack"
    return str(int8_linear.native_reason())


def script(folder: Path, name: str, body: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


@pytest.mark.slow  # two processes that load torch
def test_two_processes_that_start_at_once_build_once(tmp_path: Path) -> None:
    folder, log, real = tmp_path / "bin", tmp_path / "log", shutil.which("g++")
    source = tmp_path / "tiny.cpp"
    source.write_text(SOURCE)
    folder.mkdir()
    script(folder, "g++", f'echo "$@" >> {log}\nexec {real} "$@"')
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    processes = [start(source, tmp_path / "cache", path) for _ in range(2)]
    assert [answer(process) for process in processes] == ["42\n", "42\n"]
    compiled = [line for line in log.read_text().splitlines() if "-shared" in line]
    assert len(compiled) == 1
    assert len(list((tmp_path / "cache").rglob("*.so"))) == 1
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_without_a_compiler_plain_torch_answers_and_says_why(
    unbuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(unbuilt / "nothing"))
    assert "no g++ on PATH" in reason_for_torch()


def test_a_compiler_that_fails_is_named_with_its_error(
    unbuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(unbuilt, "g++", "echo 'fatal error: cstdint: No such file' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{unbuilt}:/usr/bin:/bin")
    reason = reason_for_torch()
    assert "could not compile int8_linear.cpp" in reason
    assert "cstdint" in reason
    assert not list((unbuilt / "cache").rglob("*.so"))


def test_a_cache_that_cannot_be_written_is_a_reason(unbuilt: Path) -> None:
    (unbuilt / "cache").write_text("a file where the folder should be")
    assert "could not be built" in reason_for_torch()


ABOVE_32_BITS = 2**40 + 3


def library_that_answers(folder: Path, names: list[str]) -> ctypes.CDLL:
    """Functions of these names that take no notice of their arguments and return ABOVE_32_BITS."""
    source, built = folder / "stub.c", folder / "stub.so"
    source.write_text("".join(f"long long {name}() {{ return {ABOVE_32_BITS}LL; }}\n" for name in names))
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(built)], check=True)
    return ctypes.CDLL(str(built))


def test_what_the_decoder_s_functions_return_is_not_cut_to_32_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = library_that_answers(tmp_path, [f"optigpu_{name}" for name in interface.ARGUMENTS])
    monkeypatch.setattr(interface, "load_library", lambda _: stub)
    library = interface.decoder_library.__wrapped__()
    for name, arguments in interface.ARGUMENTS.items():
        if name.endswith("_destroy"):
            continue
        nothing = (0 if kind is ctypes.c_int64 else None for kind in arguments)
        assert getattr(library, f"optigpu_{name}")(*nothing) == ABOVE_32_BITS, name


def test_what_an_operator_s_library_returns_is_not_cut_to_32_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = library_that_answers(tmp_path, ["best"])
    monkeypatch.setattr(build, "load_library", lambda _: stub)
    assert build.register((), "best", {}) == ABOVE_32_BITS
    assert stub.best() == ABOVE_32_BITS
