"""The decoder's instructions and cache misses are those that were recorded: a change of them is made on purpose."""

import pytest

from tests.engine.native.counts import cases, counted
from tests.engine.native.record import Counts, recorded
from tests.servers.process import this_machine
from tests.servers.rule import program

WITHIN = 0.005

pytestmark = [pytest.mark.long, pytest.mark.counts]


@pytest.fixture(scope="module")
def valgrind() -> None:
    program("valgrind", "valgrind", this_machine())


@pytest.mark.parametrize("case", list(cases()))
def test_the_counts_are_those_of_the_record(valgrind: None, case: str) -> None:
    """`python -m tests.engine.native.counts` records others."""
    found, known = counted(case).model_dump(), recorded().counts[case].model_dump()
    for name in Counts.model_fields:
        assert found[name] == pytest.approx(known[name], rel=WITHIN), name
