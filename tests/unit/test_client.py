"""The client: retries what may be repeated, resumes a broken stream, and turns problems into errors."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import stamina

from optigpu import client as client_module
from optigpu.client import ATTEMPTS, Client
from optigpu.job.spec import JobSpec
from optigpu.vocabulary import JobState, ServiceError, UnreachableError, new_id, utc_now
from tests.unit.scripted_service import Answer, Call, scripted_service

JOB_ID = new_id()
MATMUL = {"workload": {"kind": "matmul"}}


def job(state: JobState = JobState.QUEUED, **more: Any) -> dict[str, Any]:
    return {
        "id": JOB_ID,
        "state": state,
        "created_at": utc_now().isoformat(),
        "workload": "matmul",
        "model": None,
        "plan": "single",
        "device": "cpu",
        "spec": MATMUL,
        "schema_version": 1,
    } | more


def stream(*sequences: int) -> str:
    events = (
        {"sequence": number, "at": utc_now().isoformat(), "kind": "state", "data": {"state": "running"}}
        for number in sequences
    )
    return "".join(f"id: {each['sequence']}\ndata: {json.dumps(each)}\n\n" for each in events)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(client_module, "RECONNECT_S", 0.0)
    with stamina.set_testing(True, attempts=ATTEMPTS, cap=True):
        yield


def test_a_job_is_posted_as_json_with_the_key() -> None:
    with (
        scripted_service(lambda _: Answer(202, job())) as (url, calls),
        Client(url, "secret-key") as client,
    ):
        posted = client.submit(JobSpec.model_validate(MATMUL), idempotency_key="once")
    assert posted.id == JOB_ID
    assert (calls[0].method, calls[0].path) == ("POST", "/v1/jobs")
    assert calls[0].headers["authorization"] == "Bearer secret-key"
    assert calls[0].headers["idempotency-key"] == "once"
    assert JobSpec.model_validate(calls[0].body) == JobSpec.model_validate(MATMUL)


def test_a_retried_post_carries_the_same_key() -> None:
    def answer(call: Call) -> Answer:
        return Answer(503) if len(calls) < 3 else Answer(202, job())

    with scripted_service(answer) as (url, calls), Client(url) as client:
        client.submit(MATMUL)
    keys = [call.headers["idempotency-key"] for call in calls]
    assert len(keys) == 3
    assert len(set(keys)) == 1


def test_two_jobs_have_different_keys() -> None:
    with scripted_service(lambda _: Answer(202, job())) as (url, calls), Client(url) as client:
        client.submit(MATMUL)
        client.submit(MATMUL)
    assert calls[0].headers["idempotency-key"] != calls[1].headers["idempotency-key"]


def test_retries_end() -> None:
    with scripted_service(lambda _: Answer(503)) as (url, calls), Client(url) as client:
        with pytest.raises(ServiceError, match="503"):
            client.job(JOB_ID)
        assert len(calls) == ATTEMPTS


def test_a_problem_becomes_an_error_that_names_the_fields() -> None:
    problem = {
        "title": "Unprocessable Content",
        "status": 422,
        "detail": "stack.0.name: Unknown name 'int9'. (1 more in `errors`)",
        "errors": [
            {"field": "stack.0.name", "message": "Unknown name 'int9'."},
            {"field": "seed", "message": "Input should be a valid integer"},
        ],
    }
    with (
        scripted_service(lambda _: Answer(422, problem, "application/problem+json")) as (url, calls),
        Client(url) as client,
        pytest.raises(ServiceError) as caught,
    ):
        client.submit(MATMUL)
    assert str(caught.value) == "stack.0.name: Unknown name 'int9'.\nseed: Input should be a valid integer"
    assert (caught.value.status, caught.value.problem) == (422, problem)
    assert len(calls) == 1


def test_nobody_at_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}") as client, pytest.raises(UnreachableError, match="make serve"):
        client.jobs()


def test_somebody_else_at_the_address() -> None:
    with (
        scripted_service(lambda _: Answer(200, "<html>", "text/html")) as (url, _),
        Client(url) as client,
        pytest.raises(ServiceError, match="check the address"),
    ):
        client.job(JOB_ID)


def test_fields_of_a_newer_service_are_left_out() -> None:
    newer = job(colour="blue", progress={"fraction": 0.5, "mood": "good"})
    with scripted_service(lambda _: Answer(200, newer)) as (url, _), Client(url) as client:
        assert client.job(JOB_ID).progress.fraction == 0.5


def test_a_broken_stream_is_resumed_behind_the_last_event() -> None:
    """The connection breaks after two of four events; the rest comes once, and then the job has ended."""

    def answer(call: Call) -> Answer:
        if not call.path.endswith("/events"):
            streams = sum(each.path.endswith("/events") for each in calls)
            return Answer(200, job(JobState.SUCCEEDED if streams >= 2 else JobState.RUNNING))
        seen = int(call.headers.get("last-event-id", 0))
        parts = {0: stream(1, 2), 2: stream(3, 4), 4: ""}
        return Answer(200, parts[seen], "text/event-stream", cut=seen == 0)

    with scripted_service(answer) as (url, calls), Client(url) as client:
        assert [event.sequence for event in client.events(JOB_ID)] == [1, 2, 3, 4]
    resumed = [call.headers.get("last-event-id") for call in calls if call.path.endswith("/events")]
    assert resumed == [None, "2", "4"]


def test_wait_hands_over_each_event_and_returns_the_ended_job() -> None:
    def answer(call: Call) -> Answer:
        if call.path.endswith("/events"):
            events = stream(1) + ": still here\n\n" + stream(2)
            return Answer(200, "" if "last-event-id" in call.headers else events, "text/event-stream")
        return Answer(200, job(JobState.SUCCEEDED))

    heard: list[int] = []
    with scripted_service(answer) as (url, _), Client(url) as client:
        ended = client.wait(JOB_ID, lambda event: heard.append(event.sequence))
    assert heard == [1, 2]
    assert ended.state is JobState.SUCCEEDED


def test_events_of_an_unknown_job_are_an_error() -> None:
    problem = {"detail": "There is no such job."}
    with (
        scripted_service(lambda _: Answer(404, problem)) as (url, _),
        Client(url) as client,
        pytest.raises(ServiceError, match="no such job"),
    ):
        next(client.events(JOB_ID))


def test_the_leaderboard_is_asked_only_for_what_was_given() -> None:
    page = {"metric": "tflops", "unit": "TFLOP/s", "better": "higher", "rows": []}
    with scripted_service(lambda _: Answer(200, page)) as (url, calls), Client(url) as client:
        assert client.leaderboard(metric="tflops", model=None, limit=3).rows == ()
    assert calls[0].path == "/v1/leaderboard?metric=tflops&limit=3"


def test_results_are_the_stored_documents() -> None:
    document = {"spec": MATMUL, "results": [{"id": "r", "anything": 1}], "attribution": None}
    with scripted_service(lambda _: Answer(200, document)) as (url, _), Client(url) as client:
        assert client.report(JOB_ID) == document
        assert client.results(JOB_ID) == document["results"]
