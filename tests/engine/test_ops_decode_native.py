"""The C++ operators: built once, or not with a reason; the CPU decoder's alone: its rows, ARM, and what it costs."""

import ctypes
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optigpu.ops import build
from optigpu.ops.build import NativeOperators, load_library
from optigpu.ops.decode.cpu import SOURCES, interface
from optigpu.ops.decode.cpu.decoder import INSTRUCTION_SETS
from optigpu.ops.decode.cpu.interface import DescribedProgram
from optigpu.ops.decode.cpu.packing import pack, unpack
from optigpu.ops.decode.program import FinerRows, Matrix, Program, WeightKind
from optigpu.ops.library_file import library_file
from optigpu.ops.linear import int8_linear
from optigpu.techniques.decoding.native_decode import BUILD_S, NativeDecode
from optigpu.vocabulary import DeviceKind
from tests.breadth import spread
from tests.engine import native
from tests.engine.native.counts import cases, counted
from tests.engine.native.record import Counts, recorded
from tests.engine.random_programs import random_program
from tests.engine.test_ops_decode_cpu import KINDS, SMALL, instruction_sets
from tests.servers.process import this_machine
from tests.servers.rule import apt_installs, program


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    source = Path(__file__).parent / "native" / "lookup.cpp"
    return load_library((source, *SOURCES))


def table(rows: int, width: int, kind: WeightKind, group: int) -> Matrix:
    generator = torch.Generator().manual_seed(rows + width)
    return pack(torch.randn(rows, width, generator=generator), None, kind, group)


def refined(matrix: Matrix, step: int) -> Matrix:
    """With every `step`th row finer."""
    rows = torch.arange(0, matrix.outputs, step)
    return replace(matrix, finer=FinerRows(rows, table(len(rows), matrix.inputs, matrix.kind, matrix.group)))


def with_tables(embedding: Matrix, positions: Matrix | None) -> Program:
    """What is looked up knows nothing of the blocks."""
    program = random_program(SMALL, "w8")
    return replace(program, width=embedding.inputs, embedding=embedding, positions=positions)


def assert_rows_are_those_that_are_unpacked(library: ctypes.CDLL, program: Program) -> None:
    described = DescribedProgram(program)
    rows = unpack(program.embedding)
    places = torch.zeros(1, program.width) if program.positions is None else unpack(program.positions)
    for token in range(rows.shape[0]):
        position = token % places.shape[0]
        for name in instruction_sets():
            found = torch.full((program.width,), torch.nan)
            library.look_up(
                *(ctypes.byref(described.c), ctypes.c_int64(INSTRUCTION_SETS[name])),
                *(ctypes.c_int64(token), ctypes.c_int64(position), ctypes.c_void_p(found.data_ptr())),
            )
            assert torch.equal(found, rows[token] + places[position]), (name, token)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "group"), KINDS, ids=str)
def test_every_row_of_every_remainder(library: ctypes.CDLL, kind: WeightKind, group: int) -> None:
    widths = range(16, 145, 16) if kind == "bf16" else range(group, 4 * group + 1, group)
    for width in widths:
        for rows in (1, 15, 16, 17, 40):
            plain = table(rows, width, kind, group)
            for embedding in (plain, refined(plain, 1), refined(plain, 3)):
                assert_rows_are_those_that_are_unpacked(library, with_tables(embedding, None))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "group", "width"), spread(KINDS, [768, 2048], by_default=3), ids=str)
def test_positions_are_added_to_what_was_rounded(
    library: ctypes.CDLL, kind: WeightKind, group: int, width: int
) -> None:
    """No product is joined with the sum, which would round it another way than without such an instruction."""
    others: tuple[tuple[WeightKind, int], ...] = (("w4", 32), ("w8", 64), ("bf16", 0))
    for places, size in others:
        embedding = refined(table(33, width, kind, group), 2)
        program = with_tables(embedding, table(21, width, places, size))
        assert_rows_are_those_that_are_unpacked(library, program)


# ---- Under sanitizers.
@pytest.mark.long
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitizer: str) -> None:
    ran([native.with_sanitizer(sanitizer)])


# ---- ARM, by a cross-compiler and an emulator.


COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PACKAGES = "g++-aarch64-linux-gnu qemu-user"
JOINING = ("-std=c++17", "-O1", "-fexpensive-optimizations", "-w")
"""With less, g++ joins no product with a sum."""


@pytest.fixture(scope="module")
def emulator() -> str:
    """Where it is; it is installed with the compiler if needed."""
    machine = this_machine()
    if not (machine.program(COMPILER) and machine.program(EMULATOR)):
        apt_installs(PACKAGES, machine)
    found = machine.program(EMULATOR)
    if found is None or machine.program(COMPILER) is None:
        pytest.fail(f"These tests need {COMPILER} and {EMULATOR}: apt-get install {PACKAGES}.", pytrace=False)
    return found


def ran(command: list[str | Path]) -> tuple[list[str], str]:
    """The instruction sets that a soak test has run, and the digest of what the portable one computed.

    Three rounds reach every line that more of them reach.
    """
    done = subprocess.run([*command, "1", "3", "4"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    *numbers, digest = done.stdout.split()
    names = {number: name for name, number in INSTRUCTION_SETS.items()}
    return [names[int(number)] for number in numbers], digest


@pytest.mark.long
@pytest.mark.parametrize(
    ("cpu", "expected"),
    [
        ("cortex-a72", ["portable"]),
        ("neoverse-n1", ["portable", "arm_dot"]),
        ("max", ["portable", "arm_dot", "arm_i8mm"]),
    ],
)
def test_each_cpu_runs_what_it_has_with_the_same_results_bit_by_bit(
    emulator: str, cpu: str, expected: list[str]
) -> None:
    """With the products and sums joined, as the decoder is built."""
    found, _ = ran([emulator, "-cpu", cpu, native.built(COMPILER, *JOINING, "-static")])
    assert found == expected


@pytest.mark.long
def test_arm_computes_what_this_machine_computes(emulator: str) -> None:
    apart = (*native.QUICK, native.ONE_ROUNDING)
    there = ran([emulator, "-cpu", "max", native.built(COMPILER, *apart, "-static")])
    here = ran([native.built("g++", *apart)])
    assert there[1] == here[1]


# ---- Instructions and cache misses.


WITHIN = 0.005


@pytest.fixture(scope="module")
def valgrind() -> None:
    program("valgrind", "valgrind", this_machine())


@pytest.mark.long
@pytest.mark.counts
@pytest.mark.parametrize("case", list(cases()))
def test_the_counts_are_those_of_the_record(valgrind: None, case: str) -> None:
    """`python -m tests.engine.native.counts` records others."""
    found, known = counted(case).model_dump(), recorded().counts[case].model_dump()
    for name in Counts.model_fields:
        assert found[name] == pytest.approx(known[name], rel=WITHIN), name


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


@pytest.mark.long
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


def test_compiling_is_expected_on_a_cpu_until_the_operator_of_these_sources_is_kept(unbuilt: Path) -> None:
    of, kept = NativeDecode(weights="w4", calibration="none"), library_file(SOURCES)
    kept.parent.mkdir(parents=True)
    kept.with_stem("decode-of-older-sources").touch()
    assert (of.applying_s(1, DeviceKind.CPU), of.applying_s(1, DeviceKind.CUDA)) == (BUILD_S, 0.0)
    kept.touch()
    assert of.applying_s(1, DeviceKind.CPU) == 0.0


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
