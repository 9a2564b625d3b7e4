"""The CPU decoder's C++ by itself: looked-up rows, sanitizers, its ARM instruction sets, and what it costs."""

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optigpu.ops.build import load_library
from optigpu.ops.decode.cpu.decoder import INSTRUCTION_SETS
from optigpu.ops.decode.cpu.interface import SOURCES, DescribedProgram
from optigpu.ops.decode.cpu.packing import pack, unpack
from optigpu.ops.decode.program import FinerRows, Matrix, Program, WeightKind
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
