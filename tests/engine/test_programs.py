"""Converters' programs end the same in a process of their own and in the one that stays."""

import signal
from collections.abc import Iterator

import pytest

from optigpu.backends.converter_program import REFUSED
from optigpu.programs import (
    ResidentProgram,
    Run,
    programs_run_by,
    run_alone,
    run_program,
)
from tests.pages import ROOT

PROGRAM = "tests.engine.children.ending_converter"


@pytest.fixture(scope="module")
def resident() -> Iterator[ResidentProgram]:
    converter = ResidentProgram()
    yield converter
    converter.end()


@pytest.fixture(params=["alone", "resident"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, resident: ResidentProgram) -> Run:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return run_alone if request.param == "alone" else resident.run


def test_a_program_ends_the_same_wherever_it_runs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIGPU_TEST_WHAT", "heads")
    assert run(PROGRAM, ["refuse"]) == (REFUSED, "No heads.\n", "")
    raised = run(PROGRAM, ["raise"])
    assert (raised.status, raised.err.splitlines()[-1]) == (1, "ValueError: no such layer")
    assert run(PROGRAM, ["exit"]) == (2, "", "")
    assert run(PROGRAM, ["die"]).status == -signal.SIGKILL


def test_the_one_that_stays_runs_all_until_it_dies_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    converter = ResidentProgram()
    with programs_run_by(converter.run):
        first, second = (run_program(PROGRAM, ["print"]).out for _ in range(2))
        run_program(PROGRAM, ["die"])
        third = run_program(PROGRAM, ["print"]).out
    assert first == second != third
    assert run_program(PROGRAM, ["print"]).out not in {first, third}
    converter.end()
