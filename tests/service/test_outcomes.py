"""Outcomes and their files: stored whole or not at all, once, given back as they were; and what processes print."""

import gzip
import hashlib
import random
import struct
import time
from pathlib import Path

import httpx
import pytest
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from optigpu.documents.events import Printed, VariantFinished
from optigpu.documents.facts import RunFacts
from optigpu.documents.result import Outcome, Samples
from optigpu.documents.views import ArtifactView
from optigpu.store import events, jobs, keys, leases, outcomes, results
from optigpu.store.database import Database, default_url
from optigpu.store.leases import Lease
from optigpu.store.outcomes import LONGEST_PRINTED
from optigpu.store.results import PIECE_BYTES, Artifact, artifact_content, read_artifacts
from optigpu.store.tables import (
    ArtifactRow,
    EnvironmentRow,
    Job,
    LeaderboardEntry,
    MetricRow,
    ResultRow,
    SamplesRow,
)
from optigpu.vocabulary import JobState, LeaseLostError, NotFoundError, VariantStatus
from tests.service.pages import Browser
from tests.service.records import a_failure, a_plan, a_result, an_outcome, planned
from tests.service.serving import Served, look, matmul, migrated, serving, submit, tiny_ladder, worker_context
from worker.execute import execute_next
from worker.heartbeat import Heartbeat, StoredJob
from worker.recorder import AttemptTrace, Recorder

RAW: Samples = ((0.1 + 0.2, 5e-324, -0.0), (), (1.7976931348623157e308,))
KEY = "a-first-key-that-is-long-enough"
TRACE = b'{"traceEvents": [' + b'{"name": "aten::mm", "dur": 12}, ' * 1000 + b"{}]}"
LONG = b"a" * (5 * PIECE_BYTES + 3)
NOISE = random.Random(7).randbytes(3 * PIECE_BYTES + 7)


def test_a_result_is_given_back_as_it_was_stored(database: Database) -> None:
    result = a_result(facts=RunFacts(recorded={"z": 1 / 3, "a": [None, "ü"]}))
    lease = begun(database, "baseline")
    with database.write() as session:
        outcomes.save_outcome(session, lease, an_outcome(result))
    expected = result.model_copy(update={"job_id": lease.job_id}).model_dump(mode="json")
    with database.read() as session:
        assert repr(results.get(session, result.id)) == repr(expected)
        assert results.of_job(session, lease.job_id) == [expected]


def test_a_stored_result_is_never_held_against_todays_models(database: Database) -> None:
    result = a_result()
    lease = begun(database, "baseline")
    with database.write() as session:
        outcomes.save_outcome(session, lease, an_outcome(result))
        row = session.get_one(ResultRow, result.id)
        row.document = row.document | {"schema_version": 0, "field_of_long_ago": True}
    with database.read() as session:
        assert results.get(session, result.id)["field_of_long_ago"] is True


def test_raw_samples_come_back_bit_for_bit(database: Database) -> None:
    result = a_result()
    lease = begun(database, "baseline")
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
    lease = begun(database, "baseline")
    with database.write() as session:
        outcomes.save_outcome(session, lease, outcome)
        before = _stored(session, lease.job_id)
    with database.write() as session:
        outcomes.save_outcome(session, lease, outcome)
        assert _stored(session, lease.job_id) == before


def test_planning_and_starting_again_after_a_lost_answer_changes_nothing(database: Database) -> None:
    lease = begun(database, "baseline", "bf16")
    with database.write() as session:
        outcomes.variant_started(session, lease, 0)
        before = _stored(session, lease.job_id)
        outcomes.plan(session, lease, a_plan("baseline", "bf16"))
        outcomes.variant_started(session, lease, 0)
        assert _stored(session, lease.job_id) == before


def test_an_outcome_is_stored_whole_or_not_at_all(database: Database) -> None:
    lease = begun(database, "baseline")
    with database.read() as session:
        before = _stored(session, lease.job_id)
    with pytest.raises(RuntimeError, match="on the way"):
        _save_and_fail(database, lease)
    with database.read() as session:
        assert _stored(session, lease.job_id) == before


def test_a_failed_variant_keeps_its_reason(database: Database) -> None:
    lease = begun(database, "baseline")
    with database.write() as session:
        outcomes.save_outcome(session, lease, a_failure(reason="Killed\x00 by signal 9."))
        variant = jobs.get(session, lease.job_id).variants[0]
    assert (variant.status, variant.reason) == (VariantStatus.FAILED, "Killed\ufffd by signal 9.")


def test_a_result_that_no_database_can_hold_fails_its_variant_alone(database: Database) -> None:
    lease = begun(database, "baseline")
    with database.write() as session:
        outcomes.save_outcome(
            session, lease, an_outcome(a_result(facts=RunFacts(recorded={"name": "a\x00b"})))
        )
        job = jobs.get(session, lease.job_id)
    assert job.state is JobState.RUNNING
    assert job.variants[0].status is VariantStatus.FAILED
    assert job.variants[0].reason is not None
    assert "NUL" in job.variants[0].reason


def test_an_attribution_of_another_version_is_given_back_as_it_was_stored(database: Database) -> None:
    lease = begun(database, "baseline")
    later = {"metric": "tokens_per_s", "rows": [{"invented": 1}], "invented": [2]}
    with database.write() as session:
        session.execute(update(Job).where(Job.id == lease.job_id).values(attribution=later))
        assert jobs.get(session, lease.job_id).attribution == later


def _save_and_fail(database: Database, lease: Lease) -> None:
    with database.write() as session:
        outcomes.save_outcome(session, lease, an_outcome(a_result(), {"tokens_per_s": RAW}))
        raise RuntimeError("on the way")


def begun(database: Database, *labels: str) -> Lease:
    with database.write() as session:
        return planned(session, *labels)


def _stored(session: Session, job_id: str) -> tuple:
    tables = (ResultRow, MetricRow, SamplesRow, EnvironmentRow, LeaderboardEntry)
    counts = [session.scalar(select(func.count()).select_from(table)) for table in tables]
    return jobs.get(session, job_id), events.after(session, job_id, 0), counts


def _bits(values: tuple[float, ...]) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)


def test_the_end_of_all_that_a_variant_s_processes_print_is_kept(database: Database) -> None:
    with database.write() as session:
        lease = planned(session, "baseline", "bf16")
        for text in ("first\x00", "x" * (LONGEST_PRINTED - 10), "last"):
            outcomes.printed(session, lease, Printed(index=1, text=text))
        with pytest.raises(NotFoundError):
            outcomes.printed(session, lease, Printed(index=2, text="x"))
    with database.write() as session:
        leases.release(session, lease)
        with pytest.raises(LeaseLostError):
            outcomes.printed(session, lease, Printed(index=1, text="too late"))
    with database.read() as session:
        printed = jobs.printed(session, lease.job_id)
    assert list(printed) == [1]
    assert len(printed[1]) == LONGEST_PRINTED
    assert printed[1].endswith("x\n\nlast")


@pytest.mark.long
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
            printed = jobs.printed(session, job_id)
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


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A text that packs well, noise that does not and is longer than a piece, no bytes, and one byte many times.

    The last takes less than a piece in the database, and many to send.
    """
    contents = {"trace.json": TRACE, "noise.bin": NOISE, "empty.txt": b"", "long.txt": LONG}
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    return {name: tmp_path / name for name in contents}


def kept(database: Database, *files: Artifact) -> str:
    """Stores a result with these files and returns its id."""
    result = a_result()
    with database.write() as session:
        lease = planned(session, "baseline")
        outcomes.save_outcome(session, lease, an_outcome(result), files)
    return result.id


def test_files_come_back_bit_for_bit(database: Database, files: dict[str, Path]) -> None:
    result_id = kept(database, *read_artifacts(files))
    for name, path in files.items():
        pieces = list(artifact_content(database, result_id, name))
        assert b"".join(pieces) == path.read_bytes()
        assert max(map(len, pieces), default=0) <= PIECE_BYTES
    with database.read() as session:
        listed = results.list_artifacts(session, result_id).artifacts
        stored = session.scalar(select(func.length(ArtifactRow.data)).where(ArtifactRow.name == "trace.json"))
    assert listed[3] == ArtifactView(
        name="trace.json",
        media_type="application/json",
        size_bytes=len(TRACE),
        sha256=hashlib.sha256(TRACE).hexdigest(),
    )
    assert [each.name for each in listed] == ["empty.txt", "long.txt", "noise.bin", "trace.json"]
    assert stored is not None
    assert stored < len(TRACE) / 20


def test_a_file_that_is_too_large_is_a_reason(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "MOST_ARTIFACT_BYTES", 2 * PIECE_BYTES)
    found = {each.name: each for each in read_artifacts(files)}
    assert found["noise.bin"].data is None
    assert found["noise.bin"].size_bytes == len(NOISE)
    assert found["noise.bin"].reason == f"It is larger than {2 * PIECE_BYTES} bytes even when compressed."
    assert found["trace.json"].data is not None


@pytest.mark.parametrize(
    ("name", "safe", "media_type"),
    [
        ("trace.json", "trace.json", "application/json"),
        ("trace.json.gz", "trace.json.gz", "application/gzip"),
        ("raw", "raw", "application/octet-stream"),
        ("../../etc/passwd", "_.._etc_passwd", "application/octet-stream"),
        ("a\nb\x00.json", "a_b_.json", "application/json"),
        ("..", "file", "application/octet-stream"),
        ("x" * 300, "x" * 100, "application/octet-stream"),
    ],
)
def test_a_name_is_never_a_path_and_says_the_media_type(
    files: dict[str, Path], name: str, safe: str, media_type: str
) -> None:
    (found,) = read_artifacts({name: files["trace.json"]})
    assert (found.name, found.media_type) == (safe, media_type)


@pytest.mark.slow
def test_the_worker_keeps_the_files_of_an_outcome(tmp_path: Path, files: dict[str, Path]) -> None:
    """Read while the listener runs: after it the run removes them."""
    with migrated(default_url(tmp_path)) as database:
        context = worker_context(database)
        job_id = submit(database, matmul())
        lease = context.write(lambda session: leases.claim(session, context.info, 60))
        assert lease is not None
        context.write(lambda session: outcomes.plan(session, lease, a_plan("baseline")))
        result = a_result()
        outcome = Outcome(index=0, status=VariantStatus.SUCCEEDED, result=result, artifacts=files)
        job = StoredJob(context, lease)
        with Heartbeat(job, 60, claimed_at=time.monotonic()) as heartbeat:
            trace = AttemptTrace(context.tracing, lease)
            recorder = Recorder(job, heartbeat, context.stopping, trace)
            recorder(VariantFinished(outcome=outcome))
            for path in files.values():
                path.unlink()
            recorder.finish(JobState.SUCCEEDED, None)
        assert look(database, job_id).variants[0].result_id == result.id
        assert b"".join(artifact_content(database, result.id, "noise.bin")) == NOISE


@pytest.fixture
def served(service: Served, files: dict[str, Path], tmp_path: Path) -> tuple[Served, str]:
    """A service with one result and its files, one of which could not be kept."""
    return service, kept(service.database, *read_artifacts(files | {"gone.json": tmp_path / "gone"}))


@pytest.mark.slow
def test_a_result_links_to_its_files_and_each_can_be_downloaded(served: tuple[Served, str]) -> None:
    service, result_id = served
    links = service.client.get(f"/v1/results/{result_id}").headers["link"]
    assert f'</v1/results/{result_id}/artifacts>; rel="related"; title="artifacts"' in links
    listed = service.client.get(f"/v1/results/{result_id}/artifacts").json()
    by_name = {each["name"]: each for each in listed["artifacts"]}
    answer = service.client.get(by_name["noise.bin"]["links"]["self"])
    assert answer.content == NOISE
    assert answer.headers["content-disposition"] == 'attachment; filename="noise.bin"'
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert by_name["noise.bin"]["sha256"] == hashlib.sha256(answer.content).hexdigest()
    assert service.client.get(by_name["empty.txt"]["links"]["self"]).content == b""


@pytest.mark.slow
def test_a_download_says_its_length_unless_it_is_compressed_on_the_way(served: tuple[Served, str]) -> None:
    service, result_id = served
    url = f"{service.url}/v1/results/{result_id}/artifacts/trace.json"
    plain = httpx.get(url, headers={"Accept-Encoding": "identity"})
    assert (plain.headers["content-length"], plain.content) == (str(len(TRACE)), TRACE)
    with httpx.stream("GET", url, headers={"Accept-Encoding": "gzip"}) as packed:
        raw = b"".join(packed.iter_raw())
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(raw) == TRACE


def test_a_file_that_was_not_kept_says_why(served: tuple[Served, str]) -> None:
    service, result_id = served
    listed = service.client.get(f"/v1/results/{result_id}/artifacts").json()["artifacts"]
    (gone,) = [each for each in listed if each["name"] == "gone.json"]
    assert (gone["links"], gone["reason"]) == ({}, "It could not be read: No such file or directory.")
    answer = service.client.get(f"/v1/results/{result_id}/artifacts/gone.json")
    assert answer.status_code == 404
    assert "could not be read" in answer.json()["detail"]
    missing = service.client.get(f"/v1/results/{result_id}/artifacts/trace.txt")
    assert missing.status_code == 404
    assert "has no file trace.txt" in missing.json()["detail"]
