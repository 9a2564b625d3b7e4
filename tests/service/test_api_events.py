"""Events as a stream: from the start, from behind any of them, for many who follow, to the job's last one."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import delete, insert

from api import service
from api.service import Batch
from optigpu.documents.views import EventView, ProgressView
from optigpu.store import events, leases, outcomes
from optigpu.store.database import StoreUnavailableError
from optigpu.store.tables import Job, JobEvent
from optigpu.vocabulary import JobState
from tests.service.records import a_metric, a_result, told
from tests.service.serving import Served, serving

pytestmark = pytest.mark.slow

FOLLOW_TIMEOUT_S = 60.0
POLL_S = 0.05
LAST_WORDS = ("state", "succeeded")


@pytest.fixture(autouse=True)
def frequent_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "POLL_S", POLL_S)


@dataclass(frozen=True)
class Message:
    """One message of a stream as it came over the wire."""

    id: int
    event: str
    data: dict[str, Any]

    @property
    def words(self) -> tuple[str, str | None]:
        """The kind of event, and the state if it says one."""
        return self.event, self.data["data"].get("state")


def messages(service: Served, job_id: str, query: str = "", **headers: str) -> Iterator[Message]:
    """Reads a stream to its end."""
    path = f"{service.url}/v1/jobs/{job_id}/events{query}"
    with httpx.stream("GET", path, headers=headers, timeout=FOLLOW_TIMEOUT_S) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "content-encoding" not in answer.headers
        yield from parsed(answer.iter_lines())


def parsed(lines: Iterator[str]) -> Iterator[Message]:
    """Server-sent events; comments are left out."""
    fields: dict[str, str] = {}
    for line in lines:
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value
        elif not line and fields:
            event = EventView.model_validate_json(fields["data"])
            yield Message(int(fields["id"]), fields["event"], event.model_dump())
            fields = {}


def finished_job(service: Served) -> str:
    """A job with a result that was made up."""
    job_id: str = service.submit()["id"]
    service.finish(service.claim(), a_result({"tflops": a_metric("tflops", 1.0)}, workload="matmul"))
    return job_id


def test_a_finished_job_tells_its_whole_story_and_ends(service: Served) -> None:
    told = list(messages(service, finished_job(service)))
    assert [message.id for message in told] == list(range(1, len(told) + 1))
    assert told[0].words == ("state", "queued")
    assert [message.event for message in told[1:-1]][:3] == ["state", "planned", "variant_finished"]
    assert told[-1].words == LAST_WORDS


@pytest.mark.parametrize("way", ["header", "query", "header wins"])
def test_a_stream_resumes_behind_the_last_event(service: Served, way: str) -> None:
    job_id = finished_job(service)
    whole = list(messages(service, job_id))
    for position in range(len(whole) + 2):
        header = {"Last-Event-ID": str(position)}
        rest = {
            "header": lambda header=header: messages(service, job_id, **header),
            "query": lambda position=position: messages(service, job_id, f"?after={position}"),
            "header wins": lambda header=header: messages(service, job_id, "?after=1", **header),
        }[way]()
        assert list(rest) == whole[position:]


@pytest.mark.parametrize("value", ["-1", "x", "1.5", "", str(2**63)])
def test_a_position_that_is_none_is_refused(service: Served, value: str) -> None:
    path = f"/v1/jobs/{finished_job(service)}/events"
    for answer, field in (
        (service.client.get(path, headers={"Last-Event-ID": value}), "last-event-id"),
        (service.client.get(path, params={"after": value}), "after"),
    ):
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"].lower() == field


def test_a_position_after_the_last_event_is_the_end_of_the_story_so_far(service: Served) -> None:
    job_id = service.submit()["id"]
    path = f"{service.url}/v1/jobs/{job_id}/events?after=1000"
    with httpx.stream("GET", path, timeout=FOLLOW_TIMEOUT_S) as answer:
        service.client.post(f"/v1/jobs/{job_id}/cancel")
        told = list(parsed(answer.iter_lines()))
    assert [message.id for message in told] == [2, 3]


def test_a_stream_that_resumes_reads_nothing_before_its_position(
    service: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = service.submit()["id"]
    with service.database.write() as session:
        for number in range(20):
            told(session, job_id, "note", {"number": number})
    feeds_of_app = service.app.state.service.feeds
    read, seen = feeds_of_app.read, list[EventView]()

    def noted(job: str, position: int) -> Batch:
        batch: Batch = read(job, position)
        seen.extend(batch.events)
        return batch

    monkeypatch.setattr(feeds_of_app, "read", noted)
    stream = messages(service, job_id, **{"Last-Event-ID": "18"})
    assert [next(stream).id for _ in range(3)] == [19, 20, 21]
    assert min(event.sequence for event in seen) == 19
    service.client.post(f"/v1/jobs/{job_id}/cancel")
    assert [message.words for message in stream][-1] == ("state", "cancelled")


def test_a_follower_from_the_beginning_joins_one_that_resumed(service: Served) -> None:
    job_id = service.submit()["id"]
    with service.database.write() as session:
        for number in range(20):
            told(session, job_id, "note", {"number": number})
    resumed, whole = messages(service, job_id, "?after=20"), messages(service, job_id)
    assert next(resumed).id == 21
    assert next(whole).id == 1
    service.client.post(f"/v1/jobs/{job_id}/cancel")
    assert [message.id for message in resumed] == [22, 23]
    assert [message.id for message in whole] == list(range(2, 24))


def test_progress_is_streamed_and_only_the_newest_is_kept_for_who_comes_later(service: Served) -> None:
    job_id = service.submit()["id"]
    lease = service.claim()
    stream = messages(service, job_id)
    assert [next(stream).event for _ in range(2)] == ["state", "state"]
    for step in (1, 2, 3):
        with service.database.write() as session:
            leases.heartbeat(session, lease, 60, ProgressView(fraction=step / 4))
        message = next(stream)
        assert (message.id, message.data["data"]["fraction"]) == (2 + step, step / 4)
    with service.database.write() as session:
        outcomes.finish(session, lease, JobState.SUCCEEDED)
    assert [message.id for message in stream] == [6]
    assert [message.id for message in messages(service, job_id)] == [1, 2, 5, 6]
    assert [message.id for message in messages(service, job_id, "?after=3")] == [5, 6]


def test_events_arrive_while_they_happen(service: Served) -> None:
    job_id = service.submit()["id"]
    stream = messages(service, job_id)
    assert next(stream).words == ("state", "queued")
    lease = service.claim()
    assert next(stream).words == ("state", "running")
    with service.database.write() as session:
        told(session, job_id, "progressed", {"fraction": 0.5})
    assert next(stream).event == "progressed"
    with service.database.write() as session:
        outcomes.finish(session, lease, JobState.SUCCEEDED)
    assert [message.words for message in stream][-1] == LAST_WORDS


def test_nobody_misses_an_event_however_many_follow(service: Served) -> None:
    job_id = service.submit()["id"]
    lease = service.claim()
    followers = 20
    stories: list[list[int]] = [[] for _ in range(followers)]
    began = threading.Barrier(followers + 1)

    def follow(story: list[int], after: int) -> None:
        stream = messages(service, job_id, f"?after={after}")
        began.wait(FOLLOW_TIMEOUT_S)
        story.extend(message.id for message in stream)

    threads = [
        threading.Thread(target=follow, args=(story, number % 3)) for number, story in enumerate(stories)
    ]
    for thread in threads:
        thread.start()
    began.wait(FOLLOW_TIMEOUT_S)
    for number in range(30):
        with service.database.write() as session:
            told(session, job_id, "progressed", {"number": number})
    with service.database.write() as session:
        outcomes.finish(session, lease, JobState.SUCCEEDED)
        last = max(event.sequence for event in events.after(session, job_id, 0))
    for thread in threads:
        thread.join(FOLLOW_TIMEOUT_S)
    assert stories == [list(range(number % 3 + 1, last + 1)) for number in range(followers)]


def test_a_follower_holds_no_session_and_many_share_one_poll(
    any_service: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = any_service.submit()["id"]
    feeds_of_app = any_service.app.state.service.feeds
    reads: list[str] = []
    read = feeds_of_app.read

    def counted(job: str, position: int) -> Batch:
        reads.append(job)
        batch: Batch = read(job, position)
        return batch

    monkeypatch.setattr(feeds_of_app, "read", counted)
    streams = [messages(any_service, job_id) for _ in range(20)]
    for stream in streams:
        next(stream)
    pool = any_service.app.state.service.database._engine.pool
    reads.clear()
    wait_for(lambda: len(reads) >= 3)
    assert pool.checkedout() <= 1
    assert len(reads) < 20
    any_service.client.post(f"/v1/jobs/{job_id}/cancel")
    assert all([message.words for message in stream][-1] == ("state", "cancelled") for stream in streams)
    wait_for(lambda: not feeds_of_app._feeds)


def test_a_follower_that_goes_away_is_forgotten(any_service: Served) -> None:
    job_id = any_service.submit()["id"]
    next(messages(any_service, job_id))
    wait_for(lambda: not any_service.app.state.service.feeds._feeds)
    any_service.client.post(f"/v1/jobs/{job_id}/cancel")


def test_while_nothing_happens_the_stream_says_that_it_lives(
    any_service: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "HEARTBEAT_S", 0.05)
    job_id = any_service.submit()["id"]
    with httpx.stream(
        "GET", f"{any_service.url}/v1/jobs/{job_id}/events", timeout=FOLLOW_TIMEOUT_S
    ) as answer:
        comments = (line for line in answer.iter_lines() if line.startswith(":"))
        assert [next(comments), next(comments)] == [": still here"] * 2
    any_service.client.post(f"/v1/jobs/{job_id}/cancel")


def test_a_stream_ends_when_its_job_is_removed(any_service: Served) -> None:
    job_id = any_service.submit()["id"]
    stream = messages(any_service, job_id)
    next(stream)
    with any_service.database.write() as session:
        session.execute(delete(Job).where(Job.id == job_id))
    assert list(stream) == []


def test_streams_end_when_the_service_stops(tmp_path: Path) -> None:
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}") as served:
        stream = messages(served, served.submit()["id"])
        next(stream)
    assert list(stream) == []


def test_more_events_than_a_feed_keeps_are_read_from_the_database(
    any_service: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "BATCH", 7)
    monkeypatch.setattr(service, "TAIL", 5)
    job_id = any_service.submit()["id"]
    with any_service.database.write() as session:
        for number in range(50):
            told(session, job_id, "progressed", {"number": number})
    any_service.client.post(f"/v1/jobs/{job_id}/cancel")
    first = [message.id for message in messages(any_service, job_id)]
    assert first == list(range(1, len(first) + 1))
    assert len(first) > 50


def test_ten_thousand_events_at_once_arrive_in_their_order(any_service: Served) -> None:
    """One transaction writes them all, while a client follows and others ask."""
    job_id, count = any_service.submit()["id"], 10_000
    with any_service.database.write() as session:
        job = events.locked(session, job_id)
        first = job.last_sequence + 1
        rows = [
            {"job_id": job_id, "sequence": first + n, "at": job.created_at, "kind": "noted", "data": {"n": n}}
            for n in range(count)
        ]
        session.execute(insert(JobEvent), rows)
        job.last_sequence += count
    found = messages(any_service, job_id)
    begun = [next(found).id for _ in range(first)]
    assert any_service.client.get(f"/v1/jobs/{job_id}").status_code == 200
    any_service.client.post(f"/v1/jobs/{job_id}/cancel")
    ids = begun + [message.id for message in found]
    assert ids == list(range(1, len(ids) + 1))
    assert len(ids) > count


def test_a_database_that_is_away_for_a_moment_ends_no_stream(
    any_service: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = any_service.submit()["id"]
    any_service.client.post(f"/v1/jobs/{job_id}/cancel")
    feeds_of_app = any_service.app.state.service.feeds
    read, away = feeds_of_app.read, [True, True]

    def now_and_then(job: str, position: int) -> Batch:
        if away:
            away.pop()
            raise StoreUnavailableError("The database is away.")
        batch: Batch = read(job, position)
        return batch

    monkeypatch.setattr(feeds_of_app, "read", now_and_then)
    assert [message.words for message in messages(any_service, job_id)][-1] == ("state", "cancelled")


def wait_for(condition: Any) -> None:
    """Asks until it holds."""
    deadline = time.monotonic() + FOLLOW_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
