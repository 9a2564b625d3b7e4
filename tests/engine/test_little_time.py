"""A job that has little time: what is left out, and that it says so."""

from pathlib import Path
from typing import Any

import pytest

from optigpu.conductor import progress as progress_module
from optigpu.documents.events import Estimated, Event, Progressed
from optigpu.documents.result import VerdictWarning
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.measure import Report, run
from optigpu.vocabulary import SpecError, VariantStatus
from tests.engine.processes import program
from tests.engine.sessions import session_with

ALL = 4
"""Variants of the grid."""


def grid(timeout_s: float, **measure: Any) -> JobSpec:
    fast = {"replicates": 3, "min_seconds": 0.01, "max_seconds": 1, "meters": ["latency", "memory"]}
    return JobSpec.model_validate(
        {
            "workload": {"kind": "generate"},
            "model": "preset:tiny-llama-test",
            "plan": "grid",
            "stack": [{"name": "bf16"}, {"name": "static_kv_cache"}],
            "measure": fast | measure,
            "limits": {"timeout_s": timeout_s, "wait_for_quiet_s": 0},
        }
    )


def measured(spec: JobSpec, folder: Path) -> tuple[Report, list[Event]]:
    events: list[Event] = []
    return run(spec, events.append, lock_dir=folder, program=program("well_behaved")), events


def estimates(events: list[Event]) -> list[Estimated]:
    return [event for event in events if isinstance(event, Estimated)]


def test_replicates_for_which_there_is_no_time_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start takes 25 s: the first replicates of four variants 100 s of the 160, and the second ones would as well."""
    events: list[Event] = []

    class Clock:
        @staticmethod
        def monotonic() -> float:
            loads = sum(
                isinstance(event, Progressed) and event.doing == "loading" for event in events
            )  # twice in a start
            return 12.5 * loads

    monkeypatch.setattr(progress_module, "time", Clock)
    report = run(grid(160), events.append, lock_dir=tmp_path, program=program("well_behaved"))
    assert report.stopped is None, "it ended by itself"
    assert [outcome.status for outcome in report.outcomes] == [VariantStatus.SUCCEEDED] * ALL
    for result in report.results:
        assert {VerdictWarning.SINGLE_REPLICATE, VerdictWarning.INCOMPLETE} <= set(result.verdict.warnings)
        assert result.verdict.notes[-1] == (
            "Only 1 of 3 replicates was measured. The time limit of 160 s leaves no time for more; raise "
            "limits.timeout_s or measure less."
        )
        assert result.facts.side_by_side == (0, 1, 2, 3)
    first, second = estimates(events)
    assert (first.replicates, second.replicates) == (3, 1)
    assert second.sentence.endswith(
        "1 of 3 replicates of baseline, bf16, static_kv_cache, bf16 + static_kv_cache are measured."
    )
    assert second.seconds == 0


@pytest.mark.slow
def test_replicates_that_cannot_fit_from_the_start_are_not_planned(tmp_path: Path) -> None:
    report, events = measured(grid(100, min_seconds=10, max_seconds=10), tmp_path)
    assert [event.replicates for event in estimates(events)] == [2]
    assert {result.metrics["tokens_per_s"].replicates for result in report.results} == {2}
    assert all(VerdictWarning.INCOMPLETE in result.verdict.warnings for result in report.results)


@pytest.mark.slow
def test_no_more_variants_are_side_by_side_than_there_is_time_to_measure(tmp_path: Path) -> None:
    """Rather three of them whole than four of them not at all."""
    report, _ = measured(grid(85, min_seconds=20, max_seconds=20, replicates=1), tmp_path)
    assert [result.facts.side_by_side for result in report.results] == [(0, 1, 2)] * 3 + [(3,)]


def test_a_process_is_measured_for_its_share_of_the_time(tmp_path: Path) -> None:
    spec = grid(1800, min_seconds=1, max_seconds=60)
    session, _ = session_with(spec, tmp_path, "well_behaved")
    (variant, *_) = variants_of(spec)
    assert session.assignment(variant, 0).measure.max_seconds == 60, "no limit yet"
    session.progress.limit(240)
    assert session.assignment(variant, 0).measure.max_seconds == pytest.approx(
        240 / 12 - 6 - 1 - 2, abs=0.5
    ), "what is left of a twelfth after start, audit and memory meter, as guessed"


def test_a_server_may_take_a_part_of_the_time_for_an_answer(tmp_path: Path) -> None:
    spec = grid(1800)
    session, _ = session_with(spec, tmp_path, "well_behaved")
    (variant, *_) = variants_of(spec)
    assert session.assignment(variant, 0).answer_s == 600, "no limit yet"
    session.progress.limit(240)
    assert session.assignment(variant, 0).answer_s == pytest.approx(60, abs=1)


def test_a_job_that_cannot_fit_is_refused_before_it_starts(tmp_path: Path) -> None:
    events: list[Event] = []
    with pytest.raises(SpecError, match=r"limits\.timeout_s: 4 variants of at least 20 s each"):
        run(grid(79, min_seconds=20, max_seconds=20), events.append, lock_dir=tmp_path)
    assert [event.kind for event in events] == ["planned"]
