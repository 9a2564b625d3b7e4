"""A job that is cancelled or has little time: what is whole is kept, and no process is left behind."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optigpu.conductor import progress as progress_module
from optigpu.documents.events import Estimated, Event, Finished, Progressed, VariantFinished
from optigpu.documents.result import Outcome, VerdictWarning
from optigpu.job.spec import JobSpec
from optigpu.measure import Report, run
from optigpu.vocabulary import AttemptEndedError, SpecError, VariantStatus
from tests.engine.processes import program
from tests.engine.sessions import AT_ONCE, small_job

pytestmark = pytest.mark.slow

Started = Callable[[], frozenset[int]]

INCOMPLETE, SINGLE = VerdictWarning.INCOMPLETE, VerdictWarning.SINGLE_REPLICATE


class Story:
    """Runs a ladder of two variants, of which the second falls silent at one moment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Event] = []

    @property
    def hangs(self) -> bool:
        return any(isinstance(event, Progressed) and event.doing == "hanging" for event in self.events)

    def cancelled(self, replicate: int, silent_at: str) -> Report:
        return self.run(replicate, silent_at, cancelled=lambda: "Enough." if self.hangs else None)

    def out_of_time(self, replicate: int, silent_at: str, monkeypatch: pytest.MonkeyPatch) -> Report:
        """The clock jumps as soon as the process has fallen silent."""
        story = self

        class Clock:
            @staticmethod
            def monotonic() -> float:
                return time.monotonic() + 10_000 * story.hangs

        monkeypatch.setattr(progress_module, "time", Clock)
        return self.run(replicate, silent_at)

    def run(self, replicate: int, silent_at: str, **options: Any) -> Report:
        return run(
            small_job("bf16", plan="ladder", measure={"replicates": 3}),
            self.events.append,
            lock_dir=self.folder,
            program=program("pausing", replicate, silent_at),
            **options,
        )

    @property
    def told(self) -> list[Outcome]:
        return [event.outcome for event in self.events if isinstance(event, VariantFinished)]


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def replicates(report: Report) -> list[int]:
    return [len(outcome.samples.get("tokens_per_s", ())) for outcome in report.outcomes]


def warnings(report: Report) -> list[tuple[VerdictWarning, ...]]:
    """Those that say how many processes were measured; a machine may add others."""
    return [
        tuple(each for each in result.verdict.warnings if each in (SINGLE, INCOMPLETE))
        for result in report.results
    ]


def test_a_cancelled_job_keeps_whole_replicates_as_results(story: Story, started: Started) -> None:
    report = story.cancelled(1, "run_meter")
    assert replicates(report) == [2, 1], "the second one's meter was still to come"
    assert [outcome.status for outcome in report.outcomes] == [VariantStatus.SUCCEEDED] * 2
    assert warnings(report) == [(INCOMPLETE,), (SINGLE, INCOMPLETE)]
    assert report.results[0].verdict.notes[-1] == "Only 2 of 3 replicates were measured. Enough."
    assert report.results[1].verdict.notes[-1] == "Only 1 of 3 replicates was measured. Enough."
    assert report.results[0].metrics["tokens_per_s"].replicates == 2
    assert report.cancelled
    assert report.stopped == "Enough. Variants with all replicates: 0, with fewer: 2, with no result: 0."
    assert story.told == list(report.outcomes)
    assert story.events[-1] == Finished(attribution=report.attribution)
    assert not started()


def test_a_time_limit_keeps_whole_replicates_too(
    story: Story, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = story.out_of_time(1, "run_round", monkeypatch)
    assert replicates(report) == [1, 1], "while rounds take turns neither is whole"
    assert warnings(report) == [(SINGLE, INCOMPLETE)] * 2
    limit = "The job reached its time limit of 1800 s; raise limits.timeout_s or measure less."
    assert report.results[0].verdict.notes[-1] == f"Only 1 of 3 replicates was measured. {limit}"
    assert report.attribution.rows[1].speedup is not None
    assert not report.cancelled
    assert (report.stopped or "").startswith(limit)
    assert not started()


def test_a_variant_without_a_whole_replicate_ends_with_the_reason(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = story.cancelled(0, "run_round")
    assert report.results == ()
    ends = [(outcome.status, outcome.reason) for outcome in report.outcomes]
    assert ends == [(VariantStatus.CANCELLED, "Enough. No replicate of this variant was whole by then.")] * 2
    assert story.told == list(report.outcomes)
    late = Story(story.folder).out_of_time(0, "run_audit", monkeypatch)
    assert [outcome.status for outcome in late.outcomes] == [VariantStatus.SUCCEEDED, VariantStatus.FAILED]
    assert "time limit" in (late.outcomes[1].reason or "")


def test_groups_that_have_ended_are_kept(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optigpu.conductor.processes.residents.MOST_RESIDENT", 1)
    report = story.cancelled(0, "run_audit")
    assert replicates(report) == [3, 0]
    assert warnings(report) == [()]
    assert report.outcomes[1].status is VariantStatus.CANCELLED
    assert len(story.told) == 2, "each of them once"


def test_an_attempt_that_ends_leaves_no_outcome(story: Story, started: Started) -> None:
    """Another attempt follows, which measures all replicates."""

    def ended() -> str | None:
        if story.hangs:
            raise AttemptEndedError("The worker was asked to stop.")
        return None

    with pytest.raises(AttemptEndedError):
        story.run(1, "run_audit", cancelled=ended)
    assert story.told == []
    assert not started()


ALL = 4
"""Variants of the grid."""


def grid(timeout_s: float, **measure: Any) -> JobSpec:
    limits = AT_ONCE | {"timeout_s": timeout_s}
    return small_job("bf16", "static_kv_cache", measure={"replicates": 3, **measure}, limits=limits)


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
            told = (event for event in events if isinstance(event, Progressed) and event.doing == "loading")
            return 25.0 * len({(event.index, event.replicate) for event in told})

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


def test_no_more_variants_are_side_by_side_than_there_is_time_to_measure(tmp_path: Path) -> None:
    """Rather three of them whole than four of them not at all."""
    report, _ = measured(grid(85, min_seconds=20, max_seconds=20, replicates=1), tmp_path)
    assert [result.facts.side_by_side for result in report.results] == [(0, 1, 2)] * 3 + [(3,)]


def test_a_job_that_cannot_fit_is_refused_before_it_starts(tmp_path: Path) -> None:
    events: list[Event] = []
    with pytest.raises(SpecError, match=r"limits\.timeout_s: 4 variants of at least 20 s each"):
        run(grid(79, min_seconds=20, max_seconds=20), events.append, lock_dir=tmp_path)
    assert [event.kind for event in events] == ["planned"]
