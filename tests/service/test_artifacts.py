"""Files that meters leave: read once, kept with their result, listed, and downloaded as they were."""

import gzip
import hashlib
import random
import time
from pathlib import Path

import httpx
import pytest
from sqlalchemy import func, select

from optigpu.documents.events import VariantFinished
from optigpu.documents.result import Outcome
from optigpu.documents.views import ArtifactView
from optigpu.store import artifacts, jobs, leases, outcomes
from optigpu.store.artifacts import PIECE_BYTES, Artifact, content, read
from optigpu.store.database import Database, default_url
from optigpu.store.tables import ArtifactRow
from optigpu.vocabulary import JobState, NotFoundError, VariantStatus
from tests.service.records import a_plan, a_result, a_spec, a_worker, an_outcome
from tests.service.serving import Served
from tests.service.workers import look, matmul, migrated, submit, worker_context
from worker.heartbeat import Heartbeat
from worker.held import StoredJob
from worker.recorder import Recorder
from worker.trace import AttemptTrace

TRACE = b'{"traceEvents": [' + b'{"name": "aten::mm", "dur": 12}, ' * 1000 + b"{}]}"
LONG = b"a" * (5 * PIECE_BYTES + 3)
NOISE = random.Random(7).randbytes(3 * PIECE_BYTES + 7)


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
        jobs.submit(session, a_spec())
        lease = leases.claim(session, a_worker(), 300)
        assert lease is not None
        outcomes.plan(session, lease, a_plan("baseline"))
        outcomes.save_outcome(session, lease, an_outcome(result), files)
    return result.id


def test_files_come_back_bit_for_bit(database: Database, files: dict[str, Path]) -> None:
    result_id = kept(database, *read(files))
    for name, path in files.items():
        pieces = list(content(database, result_id, name))
        assert b"".join(pieces) == path.read_bytes()
        assert max(map(len, pieces), default=0) <= PIECE_BYTES
    with database.read() as session:
        listed = artifacts.list_(session, result_id).artifacts
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


def test_what_cannot_be_read_is_a_reason_and_the_others_are_kept(
    database: Database, files: dict[str, Path], tmp_path: Path
) -> None:
    result_id = kept(database, *read(files | {"gone.json": tmp_path / "gone", "folder.json": tmp_path}))
    with database.read() as session:
        listed = {each.name: each for each in artifacts.list_(session, result_id).artifacts}
        assert listed["gone.json"].reason == "It could not be read: No such file or directory."
        assert listed["folder.json"].reason == "It could not be read: Is a directory."
        assert listed["gone.json"].sha256 is None
        with pytest.raises(NotFoundError, match=r"gone\.json was not kept: It could not be read"):
            artifacts.find(session, result_id, "gone.json")
    assert b"".join(content(database, result_id, "trace.json")) == TRACE


def test_a_file_that_is_too_large_is_a_reason(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "MOST_ARTIFACT_BYTES", 2 * PIECE_BYTES)
    found = {each.name: each for each in read(files)}
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
    (found,) = read({name: files["trace.json"]})
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
        assert b"".join(content(database, result.id, "noise.bin")) == NOISE


@pytest.fixture
def served(service: Served, files: dict[str, Path], tmp_path: Path) -> tuple[Served, str]:
    """A service with one result and its files, one of which could not be kept."""
    return service, kept(service.database, *read(files | {"gone.json": tmp_path / "gone"}))


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
