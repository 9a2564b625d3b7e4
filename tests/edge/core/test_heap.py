"""How much heap the core takes on MicroPython: imported, and with all that an agent keeps through a whole cycle."""

from pathlib import Path

import pytest

from tests.edge.interpreters import native, wasm

BOUND_BYTES = 60_000
BEGIN = "import gc\nfrom tests.edge.core import measure_heap as m, run_suites\ngc.collect()"
IMPORT = (BEGIN, "before = m.allocated()", "run_suites.load()\ngc.collect()", "print(m.allocated() - before)")
CYCLE = (
    BEGIN,
    "run_suites.load()\nm.begin_cycle()\ngc.collect()",
    "before = m.allocated()",
    "m.cycle()\ngc.collect()",
    "print(m.allocated() - before)",
)


def test_the_core_and_a_cycle_keep_less_than_60_kb_in_the_native_port(bytecode: Path) -> None:
    figures = [int(native("\n".join(calls), bytecode)) for calls in (IMPORT, CYCLE)]
    _check("x64", figures)


@pytest.mark.node
def test_the_core_and_a_cycle_keep_less_than_60_kb_in_the_32_bit_port(bytecode: Path) -> None:
    files = [path.relative_to(bytecode) for path in sorted(bytecode.rglob("*.mpy"))]
    figures = [int(wasm(calls, bytecode, files)) for calls in (IMPORT, CYCLE)]
    _check("32 bits", figures)


def _check(port: str, figures: list[int]) -> None:
    """Prints the figures (`pytest -s`)."""
    print(f"\nMicroPython, {port}: core {figures[0]} bytes, kept by a cycle {figures[1]} bytes")
    assert 20_000 < sum(figures) < BOUND_BYTES
