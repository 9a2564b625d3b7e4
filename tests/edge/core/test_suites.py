"""The suites of the agent's core in CPython, in 32-bit MicroPython, and in MicroPython with a heap of 128 KB.

A suite is a module of plain functions. The native port runs bytecode, as a board does, and each function in a process
of its own: the tests lie in the same heap as the core.
"""

import importlib
from functools import cache
from pathlib import Path

import pytest

from tests.edge.core.run_suites import SUITES
from tests.edge.interpreters import ROOT, core_files, native, suite_files, wasm

NAMES = (
    "ticks", "stats", "window", "golden", "signing", "bytes", "queue", "power_cuts", "claim", "agent", "failures",
    "refusals", "reboots",
)  # fmt: skip
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
