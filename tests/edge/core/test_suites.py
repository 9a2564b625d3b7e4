"""The suites of the agent's core in CPython, in 32-bit MicroPython, and in MicroPython with a heap of 128 KB.

A suite is a module of plain functions. The native port runs bytecode, as a board does, and each function in a process
of its own: the tests lie in the same heap as the core. How much heap the core takes is measured here too, imported and
through a whole cycle.
"""

import hashlib
import hmac
import importlib
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esp32_agent.core.keys import hmac_sha256
from esp32_agent.core.measuring import FEWEST, Histogram
from optigpu.statistics.intervals import fewest_for
from tests.edge.core.run_suites import SUITES
from tests.edge.interpreters import ROOT, compile_all, core_files, native, suite_files, wasm


@pytest.fixture(scope="module")
def bytecode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the core, optimized as for the board, and its suites with their assertions."""
    folder = tmp_path_factory.mktemp("bytecode")
    compile_all(core_files(), folder, "-O2")
    compile_all(suite_files(), folder, "-O0")
    return folder


NAMES = ("ticks", "measuring", "messages", "queue", "agent", "failures", "refusals")
FUNCTIONS = [
    (name, function)
    for name in NAMES
    for function in dir(importlib.import_module(SUITES + name))
    if function.startswith("test_")
]


@cache
def wasm_output(name: str) -> str:
    return wasm(
        [f"from tests.edge.core import run_suites\nrun_suites.run({name!r})"],
        ROOT,
        core_files() + suite_files(),
    )


@pytest.mark.parametrize(("name", "function"), FUNCTIONS)
def test_in_cpython(name: str, function: str) -> None:
    getattr(importlib.import_module(SUITES + name), function)()


@pytest.mark.node
@pytest.mark.parametrize(("name", "function"), FUNCTIONS)
def test_in_32_bit_micropython(name: str, function: str) -> None:
    output = wasm_output(name)
    assert f"ok {name} {function}\n" in output, _said(output, function)


@pytest.mark.long
@pytest.mark.parametrize(("name", "function"), FUNCTIONS)
def test_in_micropython_with_a_heap_of_128_kb(bytecode: Path, name: str, function: str) -> None:
    code = f"from tests.edge.core import run_suites\nrun_suites.run({name!r}, {function!r})"
    output = native(code, bytecode)
    assert output == f"ok {name} {function}\n"


def _said(output: str, function: str) -> str:
    """What the interpreter printed about one function, or all of it where it never came to that."""
    _, found, rest = output.partition(f" {function}\n")
    return rest.partition("\nok ")[0] if found else output


def test_percentiles_need_as_many_samples_as_in_the_engine() -> None:
    assert [(percent, fewest_for(percent)) for percent, _ in FEWEST] == list(FEWEST)


@given(key=st.binary(max_size=200), message=st.binary(max_size=300))
def test_hmac_is_the_librarys(key: bytes, message: bytes) -> None:
    assert hmac_sha256(key, message) == hmac.new(key, message, hashlib.sha256).digest()


@given(st.lists(st.integers(0, (1 << 26) - 1), min_size=1, max_size=200), st.integers(1, 100))
def test_a_percentile_is_within_one_percent_of_its_rank(times: list[int], percent: int) -> None:
    histogram = Histogram()
    for us in times:
        histogram.add(us)
    wanted = sorted(times)[max(1, -(-len(times) * percent // 100)) - 1]
    assert abs(histogram.percentile(percent, 100) - wanted) * 128 <= wanted


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
