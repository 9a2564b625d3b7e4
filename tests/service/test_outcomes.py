"""Outcomes: stored whole or not at all, once, and given back as they were; and the end of what processes print."""

import struct
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from optigpu.documents.events import Event, Printed, Waiting
from optigpu.documents.facts import RunFacts
from optigpu.documents.result import Attribution, Outcome, Samples
from optigpu.store import events, job_views, jobs, keys, leases, outcomes, results
from optigpu.store.database import Database
from optigpu.store.leases import Lease
from optigpu.store.outcomes import LONGEST_PRINTED
from optigpu.store.tables import EnvironmentRow, Job, LeaderboardEntry, MetricRow, ResultRow, SamplesRow
from optigpu.vocabulary import JobState, LeaseLostError, NotFoundError, VariantStatus
from tests.service.pages import Browser
from tests.service.records import a_failure, a_plan, a_result, a_spec, a_worker, an_outcome
from tests.service.serving import serving
from tests.service.workers import migrated, submit, tiny_ladder, worker_context
from worker.execute import execute_next

RAW: Samples = ((0.1 + 0.2, 5e-324, -0.0), (), (1.7976931348623157e308,))


def test_a_result_is_given_back_as_it_was_stored(database: Database) -> None:
    result = a_result(facts=RunFacts(recorded={"z": 1 / 3, "a": [None, "ü"]}))
    lease = _planned(database, "baseline")
    with database.write() as session:
        outcomes.save_outcome(session, lease, an_outcome(result))
    expected = result.model_copy(update={"job_id": lease.job_id}).model_dump(mode="json")
    with database.read() as session:
        assert repr(results.get(session, result.id)) == repr(expected)
        assert results.of_job(session, lease.job_id) == [expected]


def test_a_stored_result_is_never_held_against_todays_models(database: Database) -> None:
    result = a_result()
    lease = _planned(database, "baseline")
    with database.write() as session:
        outcomes.save_outcome(session, lease, an_outcome(result))
        row = session.get_one(ResultRow, result.id)
        row.document = row.document | {"schema_version": 0, "field_of_long_ago": True}
    with database.read() as session:
        assert results.get(session, result.id)["field_of_long_ago"] is True


def test_raw_samples_come_back_bit_for_bit(database: Database) -> None:
    result = a_result()
    lease = _planned(database, "baseline")
    with database.write() as session:
        outcomes.save_outcome(session, lease, an_outcome(result, {"tokens_per_s": RAW, "ttft_s": ()}))
    with database.read() as session:
        stored = results.samples(session, result.id).samples
    assert list(stored) == ["tokens_per_s", "ttft_s"]
    assert [_bits(replicate) for replicate in stored["tokens_per_s"]] == [
        _bits(replicate) for replicate in RAW
    ]
    assert stored["ttft_s"] == ()


@pytest.mark.parametrize(
    "outcome", [an_outcome(a_result(), {"tokens_per_s": RAW}), a_failure()], ids=["result", "failure"]
)
def test_saving_again_after_a_lost_answer_changes_nothing(database: Database, outcome: Outcome) -> None:
    lease = _planned(database, "baseline")
    with database.write() as session:
        outcomes.save_outcome(session, lease, outcome)
        before = _stored(session, lease.job_id)
    with database.write() as session:
        outcomes.save_outcome(session, lease, outcome)
        assert _stored(session, lease.job_id) == before


def test_planning_and_starting_again_after_a_lost_answer_changes_nothing(database: Database) -> None:
    lease = _planned(database, "baseline", "bf16")
    with database.write() as session:
        outcomes.variant_started(session, lease, 0)
        before = _stored(session, lease.job_id)
        outcomes.plan(session, lease, a_plan("baseline", "bf16"))
        outcomes.variant_started(session, lease, 0)
        assert _stored(session, lease.job_id) == before


def test_another_plan_replaces_the_first(database: Database) -> None:
    lease = _planned(database, "baseline", "bf16", "int8")
    with database.write() as session:
        outcomes.plan(session, lease, a_plan("baseline", "fp16"))
        assert [variant.label for variant in jobs.get(session, lease.job_id).variants] == ["baseline", "fp16"]


def test_an_outcome_is_stored_whole_or_not_at_all(database: Database) -> None:
    lease = _planned(database, "baseline")
    with database.read() as session:
        before = _stored(session, lease.job_id)
    with pytest.raises(RuntimeError, match="on the way"):
        _save_and_fail(database, lease)
    with database.read() as session:
        assert _stored(session, lease.job_id) == before


def test_a_failed_variant_keeps_its_reason(database: Database) -> None:
    lease = _planned(database, "baseline")
    with database.write() as session:
        outcomes.save_outcome(session, lease, a_failure(reason="Killed\x00 by signal 9."))
        variant = jobs.get(session, lease.job_id).variants[0]
    assert (variant.status, variant.reason) == (VariantStatus.FAILED, "Killed\ufffd by signal 9.")


def test_a_result_that_no_database_can_hold_fails_its_variant_alone(database: Database) -> None:
    lease = _planned(database, "baseline")
    with database.write() as session:
        outcomes.save_outcome(
            session, lease, an_outcome(a_result(facts=RunFacts(recorded={"name": "a\x00b"})))
        )
        job = jobs.get(session, lease.job_id)
    assert job.state is JobState.RUNNING
    assert job.variants[0].status is VariantStatus.FAILED
    assert job.variants[0].reason is not None
    assert "NUL" in job.variants[0].reason


def test_the_events_tell_the_whole_story(database: Database) -> None:
    outcome = an_outcome(a_result(), {"tokens_per_s": RAW})
    lease = _planned(database, "baseline")
    attribution = Attribution(metric="tokens_per_s", rows=())
    with database.write() as session:
        outcomes.note(session, lease, Waiting(doing="cc1plus uses 1.1 of 2 cores", up_to_s=60))
        outcomes.variant_started(session, lease, 0)
        outcomes.save_outcome(session, lease, outcome)
        outcomes.finish(session, lease, JobState.SUCCEEDED, attribution=attribution)
        story = events.after(session, lease.job_id, 0)
        job = jobs.get(session, lease.job_id)
    measured = ["waiting", "variant_started", "variant_finished", "finished"]
    assert [event.kind for event in story] == ["state", "state", "planned", *measured, "state"]
    assert [event.data["state"] for event in story if event.kind == "state"] == [
        "queued",
        "running",
        "succeeded",
    ]
    for event in story:
        if event.kind != "state":
            assert TypeAdapter[Event](Event).validate_python(event.data).kind == event.kind
    (finished,) = [event.data["outcome"] for event in story if event.kind == "variant_finished"]
    assert "samples" not in finished
    assert job.variants[0].result_id == finished["result"]["id"]
    assert job.attempts[0].outcome == "succeeded"
    assert job.attribution == attribution.model_dump(mode="json")


def test_an_attribution_of_another_version_is_given_back_as_it_was_stored(database: Database) -> None:
    lease = _planned(database, "baseline")
    later = {"metric": "tokens_per_s", "rows": [{"invented": 1}], "invented": [2]}
    with database.write() as session:
        session.execute(update(Job).where(Job.id == lease.job_id).values(attribution=later))
        assert jobs.get(session, lease.job_id).attribution == later


def _save_and_fail(database: Database, lease: Lease) -> None:
    with database.write() as session:
        outcomes.save_outcome(session, lease, an_outcome(a_result(), {"tokens_per_s": RAW}))
        raise RuntimeError("on the way")


def _planned(database: Database, *labels: str) -> Lease:
    with database.write() as session:
        jobs.submit(session, a_spec())
        lease = leases.claim(session, a_worker(), 300)
        assert lease is not None
        outcomes.plan(session, lease, a_plan(*labels))
    return lease


def _stored(session: Session, job_id: str) -> tuple:
    tables = (ResultRow, MetricRow, SamplesRow, EnvironmentRow, LeaderboardEntry)
    counts = [session.scalar(select(func.count()).select_from(table)) for table in tables]
    return jobs.get(session, job_id), events.after(session, job_id, 0), counts


def _bits(values: tuple[float, ...]) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)


KEY = "a-first-key-that-is-long-enough"


def test_the_end_of_all_that_a_variant_s_processes_print_is_kept(database: Database) -> None:
    with database.write() as session:
        job_id = jobs.submit(session, a_spec()).job.id
        lease = leases.claim(session, a_worker(), 30)
        assert lease is not None
        outcomes.plan(session, lease, a_plan("baseline", "bf16"))
        for text in ("first\x00", "x" * (LONGEST_PRINTED - 10), "last"):
            outcomes.printed(session, lease, Printed(index=1, text=text))
        with pytest.raises(NotFoundError):
            outcomes.printed(session, lease, Printed(index=2, text="x"))
    with database.write() as session:
        leases.release(session, lease)
        with pytest.raises(LeaseLostError):
            outcomes.printed(session, lease, Printed(index=1, text="too late"))
    with database.read() as session:
        printed = job_views.printed(session, job_id)
    assert list(printed) == [1]
    assert len(printed[1]) == LONGEST_PRINTED
    assert printed[1].endswith("x\n\nlast")


@pytest.mark.slow
def test_only_an_administrator_sees_what_processes_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of real processes; a library's warnings are what they print most."""
    monkeypatch.setenv("PYTHONWARNINGS", "always")
    url = f"sqlite:///{tmp_path / 'optigpu.db'}"
    with migrated(url) as database:
        job_id = submit(database, tiny_ladder())
        assert execute_next(worker_context(database))
        with database.write() as session:
            reader = keys.create(session, "reader", ["submit"])
        with database.read() as session:
            printed = job_views.printed(session, job_id)
        assert printed
    first = next(iter(printed.values())).splitlines()[-1]
    with serving(url, api_key=KEY) as served:
        for key, sees in ((reader, False), (KEY, True)):
            with Browser(served) as browser:
                browser.sign_in(key)
                page = browser.read(f"/jobs/{job_id}")
                assert ("What its processes printed" in page) is sees
            answer = served.client.get(
                f"/v1/jobs/{job_id}/events", headers={"Authorization": f"Bearer {key}"}
            )
            assert "printed" not in answer.text
            assert (
                first
                not in served.client.get(
                    f"/v1/jobs/{job_id}", headers={"Authorization": f"Bearer {key}"}
                ).text
            )
