"""Meters that time requests: a disturbed reading says what disturbed it, and its figure reaches as far as that."""

from dataclasses import replace

import pytest

from optigpu.child.messages import Metered
from optigpu.conductor.processes.metering import MeterReading
from optigpu.conductor.processes.rounds import Replicate
from optigpu.conductor.verdicts import meters
from optigpu.conductor.verdicts.cost import widened
from optigpu.conductor.verdicts.host_monitor import HostSample
from optigpu.conductor.verdicts.marks import INTERRUPTION
from optigpu.documents.result import MetricSummary, VerdictWarning
from optigpu.vocabulary import Better
from tests.unit.made_replicates import QUIET, evidence, replicate, spec, verdict

RATE = "highest_rate_per_s"
LONG = replace(QUIET, wall_s=60.0, foreign_s=1.0, idle_s=50.0)
BUSY = replace(LONG, foreign_s=12.0, named={"make": 12.0})
"""Others used a fifth of a core."""


def read(*during: HostSample | None) -> list[Replicate]:
    """A replicate for each, whose rounds were quiet."""
    metered = Metered(meter="highest_rate", values={RATE: 50.0})
    return [replicate(readings=(MeterReading(metered, each),)) for each in during]


def bounds(*during: HostSample | None) -> dict[str, float | None]:
    return meters.bounds(evidence(read(*during), spec()))


def test_what_others_used_meanwhile_is_said_and_bounded() -> None:
    judged = verdict(*read(LONG, BUSY, LONG))
    assert judged.valid
    assert judged.warnings == (VerdictWarning.DISTURBED,)
    (note,) = judged.notes
    assert note.startswith(
        "Other processes used 0.20 of 2 cores (make 0.20) while the highest_rate meter was read;"
    )
    assert note.endswith("This can have cost up to 11%.")
    assert judged.cost_bound == 0, "the timed rounds were quiet"


def test_the_interval_reaches_to_where_it_would_be_undisturbed() -> None:
    found = bounds(BUSY)
    assert found == {RATE: pytest.approx(INTERRUPTION * 0.2)}
    summary = MetricSummary(unit="1/s", better=Better.HIGHER, value=50.0, ci=(40.0, 60.0), n=3, replicates=3)
    wider = widened({RATE: summary}, found)[RATE]
    assert wider.ci is not None
    assert wider.ci[0] == 40.0
    assert wider.ci[1] == pytest.approx(60 / (1 - INTERRUPTION * 0.2))


def test_a_machine_that_slept_meanwhile_leaves_no_interval() -> None:
    slept = replace(LONG, suspended_s=5.0)
    assert bounds(slept) == {RATE: None}
    judged = verdict(*read(slept, LONG, LONG))
    assert "suspended for 5.0 s while the highest_rate meter was read" in judged.notes[0]
    assert judged.notes[0].endswith("What this cost is not known.")
