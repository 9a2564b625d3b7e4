"""Rows that the CPU operator looks up in packed tables: bit by bit what is unpacked, by every instruction set."""

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optigpu.ops.build import load_library
from optigpu.ops.decode.cpu.decoder import INSTRUCTION_SETS
from optigpu.ops.decode.cpu.interface import SOURCES, DescribedProgram
from optigpu.ops.decode.cpu.packing import pack, unpack
from optigpu.ops.decode.program import FinerRows, Matrix, Program, WeightKind
from tests.engine.random_programs import random_program
from tests.engine.test_ops_decode_cpu import KINDS, SMALL, instruction_sets


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
@pytest.mark.parametrize("width", [768, 2048], ids=["gpt2", "llama-1b"])
@pytest.mark.parametrize(("kind", "group"), KINDS, ids=str)
def test_positions_are_added_to_what_was_rounded(
    library: ctypes.CDLL, kind: WeightKind, group: int, width: int
) -> None:
    """No product is joined with the sum, which would round it another way than without such an instruction."""
    others: tuple[tuple[WeightKind, int], ...] = (("w4", 32), ("w8", 64), ("bf16", 0))
    for places, size in others:
        embedding = refined(table(33, width, kind, group), 2)
        program = with_tables(embedding, table(21, width, places, size))
        assert_rows_are_those_that_are_unpacked(library, program)
