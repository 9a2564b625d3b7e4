"""A real job beside a real load: it says for whom it waits, and goes on when the wait is over."""

from pathlib import Path

import pytest

from benchmarks.load import NAME, Load, beside
from optigpu.documents.events import Waiting
from tests.engine.test_run import Conductor, job


@pytest.mark.slow
def test_a_job_waits_for_a_process_that_works_and_then_goes_on(tmp_path: Path) -> None:
    conductor = Conductor(tmp_path / "locks")
    with beside(Load(1.0), seed=0):
        report = conductor.run(job(plan="single", limits={"wait_for_quiet_s": 1}), "well_behaved")
    (waiting,) = (event for event in conductor.events if isinstance(event, Waiting))
    assert NAME in waiting.doing
    assert waiting.doing.endswith("; waiting up to 1 s for quiet")
    kinds = [event.kind for event in conductor.events if event.kind != "progressed"]
    assert kinds[:4] == ["planned", "estimated", "waiting", "variant_started"]
    assert len(report.results) == 1
