"""Building the C++ operators: once for several processes, and a clear reason where it cannot be done."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from optigpu.ops import build
from optigpu.ops.decode.cpu import interface

PROBE = """
import json, torch
from optigpu.ops.linear.int8_linear import int8_linear, int8_linear_backend, native_reason, pack, quantize_rows
torch.manual_seed(0)
weight, x = torch.randn(40, 128), torch.randn(3, 128)
q, scale = quantize_rows(weight)
y = int8_linear(x, pack(q), scale)
error = (y - x @ (q * scale[:, None]).T).abs().max().item()
print(json.dumps({"backend": int8_linear_backend("cpu"), "reason": native_reason(), "error": error}))
"""


def start(cache: Path, path: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PATH": path}
    command = [sys.executable, "-c", PROBE]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def answer(process: subprocess.Popen[str]) -> dict:
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    found: dict = json.loads(output)
    return found


def script(folder: Path, name: str, body: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


def test_two_processes_that_start_at_once_build_once(tmp_path: Path) -> None:
    folder, log, real = tmp_path / "bin", tmp_path / "log", shutil.which("g++")
    folder.mkdir()
    script(folder, "g++", f'echo "$@" >> {log}\nexec {real} "$@"')
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    answers = [answer(process) for process in [start(tmp_path / "cache", path) for _ in range(2)]]
    compiled = [line for line in log.read_text().splitlines() if "-shared" in line]
    assert len(compiled) == 1
    assert len(list((tmp_path / "cache").rglob("*.so"))) == 1
    assert not list((tmp_path / "cache").rglob("*.tmp"))
    for found in answers:
        assert found["backend"].startswith("native-")
        assert found["reason"] is None
        assert found["error"] < 1e-4


def test_without_a_compiler_plain_torch_answers_and_says_why(tmp_path: Path) -> None:
    found = answer(start(tmp_path, str(tmp_path / "nothing")))
    assert found["backend"] == "torch-int8pack"
    assert "no g++ on PATH" in found["reason"]
    assert found["error"] < 0.3  # bfloat16 activations: 2**-8 of sums of about 40


def test_a_compiler_that_fails_is_named_with_its_error(tmp_path: Path) -> None:
    script(tmp_path, "g++", "echo 'fatal error: cstdint: No such file' >&2; exit 1")
    found = answer(start(tmp_path / "cache", f"{tmp_path}:/usr/bin:/bin"))
    assert found["backend"] == "torch-int8pack"
    assert "could not compile int8_linear.cpp" in found["reason"]
    assert "cstdint" in found["reason"]
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_cache_that_cannot_be_written_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    found = answer(start(tmp_path / "cache", os.environ["PATH"]))
    assert found["backend"] == "torch-int8pack"
    assert "could not be built" in found["reason"]


def test_importing_the_operators_loads_no_torch() -> None:
    code = "import sys, optigpu.ops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
    names = ("create", "begin", "run", "length", "best_instruction_set")
    stub = library_that_answers(tmp_path, [f"optigpu_decoder_{name}" for name in (*names, "destroy")])
    monkeypatch.setattr(interface, "load_library", lambda _: stub)
    library = interface.decoder_library.__wrapped__()
    nothing = {
        "create": (None, 1, None, 0, None, None),
        "begin": (None,) * 3,
        "run": (None,) * 3,
        "length": (None,),
    }
    for name in names:
        assert getattr(library, f"optigpu_decoder_{name}")(*nothing.get(name, ())) == ABOVE_32_BITS, name


def test_what_an_operator_s_library_returns_is_not_cut_to_32_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = library_that_answers(tmp_path, ["best"])
    monkeypatch.setattr(build, "load_library", lambda _: stub)
    assert build.register((), "best", {}) == ABOVE_32_BITS
    assert stub.best() == ABOVE_32_BITS
