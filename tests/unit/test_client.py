"""The client: retries what may be repeated, resumes a broken stream, and turns problems into errors."""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import stamina

from optigpu import client as client_module
from optigpu.client import ATTEMPTS, Client
from optigpu.vocabulary import JobState, ServiceError, SpecError, new_id, utc_now
from tests.unit.made_results import a_board, a_row, metric
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


@pytest.mark.parametrize(
    "address", ["", "ftp://here", "http://", "http://[::1", "http://here:port", "here there"]
)
def test_what_is_no_address_is_said_at_once(address: str) -> None:
    with pytest.raises(SpecError, match="is not the address of a service; write it as http://HOST:PORT"):
        Client(address)


@pytest.mark.parametrize("key", ["ключ", "two\nlines", "a\x00b"])
def test_what_is_no_key_is_said_at_once(key: str) -> None:
    with pytest.raises(SpecError, match="The API key has characters that no key has"):
        Client("localhost:8000", key)


@pytest.mark.parametrize("errors", ["text", [1], [{"field": "a"}], {"a": 1}])
def test_a_problem_of_another_program_is_its_detail(errors: Any) -> None:
    problem = Answer(422, {"detail": "Not like this.", "errors": errors})
    with (
        scripted_service(lambda _: problem) as (url, _),
        Client(url) as client,
        pytest.raises(ServiceError, match=r"^Not like this\.$"),
    ):
        client.submit(MATMUL)


def test_a_retried_post_carries_the_same_key() -> None:
    def answer(call: Call) -> Answer:
        return Answer(503) if len(calls) < 3 else Answer(202, job())

    with scripted_service(answer) as (url, calls), Client(url) as client:
        client.submit(MATMUL)
    keys = [call.headers["idempotency-key"] for call in calls]
    assert len(keys) == 3
    assert len(set(keys)) == 1


def test_retries_end() -> None:
    with scripted_service(lambda _: Answer(503)) as (url, calls), Client(url) as client:
        with pytest.raises(ServiceError, match="503"):
            client.job(JOB_ID)
        assert len(calls) == ATTEMPTS


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


def test_wait_hands_over_each_event_and_resumes_a_broken_stream_behind_the_last_one() -> None:
    """The connection breaks after two of four events; the rest comes once, and then the job has ended."""

    def answer(call: Call) -> Answer:
        if not call.path.endswith("/events"):
            streams = sum(each.path.endswith("/events") for each in calls)
            return Answer(200, job(JobState.SUCCEEDED if streams >= 2 else JobState.RUNNING))
        seen = int(call.headers.get("last-event-id", 0))
        parts = {0: stream(1) + ": still here\n\n" + stream(2), 2: stream(3, 4), 4: ""}
        return Answer(200, parts[seen], "text/event-stream", cut=seen == 0)

    heard: list[int] = []
    with scripted_service(answer) as (url, calls), Client(url) as client:
        ended = client.wait(JOB_ID, lambda event: heard.append(event.sequence))
    assert (heard, ended.state) == ([1, 2, 3, 4], JobState.SUCCEEDED)
    resumed = [call.headers.get("last-event-id") for call in calls if call.path.endswith("/events")]
    assert resumed == [None, "2", "4"]


def a_page(*values: float, cursor: str | None = None) -> dict[str, Any]:
    """A board as a service sends it."""
    rows = (a_row(value=metric("tflops", value)) for value in values)
    return a_board(*rows, metric="tflops", row_count=9, next_cursor=cursor).model_dump(mode="json")


def test_all_rows_are_read_from_every_page_of_every_board() -> None:
    pages = {
        None: {"boards": [a_page(1.0, 2.0, cursor="rest"), a_page(3.0)], "next_cursor": "boards"},
        "rest": {"boards": [a_page(4.0)]},
        "boards": {"boards": [a_page(5.0, cursor="more")]},
        "more": {"boards": []},
    }

    def answer(call: Call) -> Answer:
        query = parse_qs(urlsplit(call.path).query)
        return Answer(200, pages[query.get("cursor", [None])[0]])

    with scripted_service(answer) as (url, calls), Client(url) as client:
        found = [row.value.value for row in client.leaderboard_rows(metric="tflops")]
    assert sorted(value for value in found if value) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert len(calls) == 4
    assert all("metric=tflops" in call.path for call in calls)
