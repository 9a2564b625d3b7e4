"""What a client could try: cursors of its own making, SQL in filters, lines in headers, and never finishing."""

import base64
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from api import inputs
from optigpu.store.statements import encode_cursor
from tests.service.records import a_metric, a_result
from tests.service.serving import MATMUL, Served

pytestmark = pytest.mark.slow

LISTS = ("/v1/jobs", "/v1/leaderboard", "/v1/devices", "/v1/edge/leaderboard", "/v1/audit")
UUID = "01980000-0000-7000-8000-000000000000"
INJECTIONS = (
    "' OR '1'='1",
    "'; DROP TABLE jobs; --",
    '" OR 1=1 --',
    "%",
    "_",
    "\\",
    "x' UNION SELECT hash FROM api_keys --",
)


def a_row(service: Served) -> dict[str, Any]:
    """A job with a result on the leaderboard."""
    job = service.submit()
    service.finish(service.claim(), a_result({"tflops": a_metric("tflops", 1.0)}, workload="matmul"))
    return job


@pytest.mark.parametrize("path", LISTS)
@pytest.mark.parametrize(
    "position",
    [
        [],
        [None],
        ["x", "y"],
        ["2026-01-01T00:00:00", "'; DROP TABLE jobs; --"],
        ["9999-12-31T23:59:59+23:59", UUID],
        ["0001-01-01T00:00:00-23:59", UUID],
        [10**30],
        [1e308, {"a": 1}],
        [True, "a"],
        ["\x00"],
        {"a": 1},
    ],
    ids=str,
)
def test_a_cursor_of_ones_own_making_is_refused_or_finds_a_page(
    service: Served, path: str, position: Any
) -> None:
    made = base64.urlsafe_b64encode(json.dumps(position).encode()).decode().rstrip("=")
    answer = service.client.get(path, params={"cursor": made})
    assert answer.status_code in (200, 422), answer.text
    if answer.status_code == 422:
        assert answer.json()["errors"][0]["field"] == "cursor"


@pytest.mark.parametrize("path", LISTS)
def test_a_cursor_that_was_changed_or_cut_is_refused(any_service: Served, path: str) -> None:
    whole = encode_cursor("2026-01-01T00:00:00+00:00", UUID)
    for cursor in (whole[:-3], f"{whole}!", whole.swapcase(), "==", "%00", " "):
        assert any_service.client.get(path, params={"cursor": cursor}).status_code == 422, cursor


def test_a_cursor_of_another_list_is_refused(service: Served) -> None:
    for _ in range(3):
        service.submit()
    cursor = service.client.get("/v1/jobs?limit=2").json()["next_cursor"]
    assert cursor
    for path in LISTS[1:]:
        answer = service.client.get(path, params={"cursor": cursor})
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "cursor"), path


@pytest.mark.parametrize("text", INJECTIONS)
def test_sql_in_a_filter_finds_what_is_called_so_and_nothing_else(service: Served, text: str) -> None:
    job = a_row(service)
    for name in ("workload", "model", "hardware", "technique", "backend"):
        answer = service.client.get("/v1/leaderboard", params={name: text})
        assert answer.status_code in (200, 422), answer.text
        if answer.status_code == 200:
            assert answer.json()["boards"] == [], name
    assert service.client.get("/v1/jobs", params={"tag": text}).status_code in (200, 422)
    assert service.client.get("/v1/audit", params={"target": text}).json()["changes"] == []
    assert service.client.get(job["links"]["self"]).json()["state"] == "succeeded"


def test_an_idempotency_key_may_hold_sql_and_is_its_own_key(service: Served) -> None:
    ids = [service.submit(None, **{"Idempotency-Key": text})["id"] for text in INJECTIONS]
    again = [service.submit(None, **{"Idempotency-Key": text})["id"] for text in INJECTIONS]
    assert len(set(ids)) == len(INJECTIONS)
    assert again == ids


def exchange(service: Served, request: bytes) -> bytes:
    """The whole answer to raw bytes."""
    with connection(service) as client:
        client.sendall(request)
        return b"".join(iter(lambda: client.recv(65536), b""))


@contextmanager
def connection(service: Served, receive_bytes: int | None = None) -> Iterator[socket.socket]:
    """A connection to the service, with a small buffer for what it receives if that is asked for."""
    host, port = service.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        if receive_bytes:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.settimeout(30)
        client.connect((host, int(port)))
        yield client


LINE = "%0d%0aX-Injected:%201"


@pytest.mark.parametrize(
    "path",
    [
        f"/v1/jobs/{LINE}",
        f"/v1/jobs?state={LINE}",
        f"/v1/jobs?cursor={LINE}",
        f"/v1/leaderboard?model={LINE}&format=csv",
        f"/v1/results/{UUID}/artifacts/{LINE}",
        f"/{LINE}",
    ],
)
def test_a_line_in_a_path_begins_no_header(any_service: Served, path: str) -> None:
    answer = any_service.client.get(path)
    assert answer.status_code in (404, 422)
    assert "x-injected" not in answer.headers


@pytest.mark.parametrize(
    "headers",
    [
        "Idempotency-Key: a\rX-Injected: 1",
        "Idempotency-Key: a\x00b",
        "Authorization: Bearer a\rb",
        "X-Request-ID: mine\r\nX-Request-ID: yours",
        "Origin: http://a\tb",
    ],
)
def test_what_a_client_sends_in_headers_comes_back_in_none(any_service: Served, headers: str) -> None:
    body = json.dumps(MATMUL)
    request = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\nContent-Type: text/plain\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
    )
    head = exchange(any_service, request.encode("latin-1")).split(b"\r\n\r\n")[0].lower()
    assert head.startswith(b"http/1.1 4"), head
    assert not {b"x-injected", b"mine", b"yours"} & set(head.replace(b":", b" ").split())


def test_two_lengths_or_two_ways_to_say_it_are_refused(any_service: Served) -> None:
    """With them a proxy and the service could see two different requests."""
    for lengths in (
        "Content-Length: 2\r\nContent-Length: 3",
        "Content-Length: 2\r\nTransfer-Encoding: chunked",
    ):
        request = f"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n{lengths}\r\nConnection: close\r\n\r\n{{}}"
        answer = exchange(any_service, request.encode())
        assert not answer or answer.startswith(b"HTTP/1.1 4"), answer


def test_clients_that_read_a_byte_at_a_time_hold_up_nobody(service: Served) -> None:
    """Twenty of them have asked for a page that fills their buffers, read a byte, and stay."""
    job = a_row(service)
    with ExitStack() as slow:
        for _ in range(20):
            client = slow.enter_context(connection(service, receive_bytes=2048))
            client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert client.recv(1) == b"H"
        for path in (job["links"]["self"], "/v1/leaderboard", "/openapi.json", "/readyz"):
            assert service.client.get(path).status_code == 200
        assert service.submit()["state"] == "queued", "no session of theirs holds the database"


def test_a_client_that_sends_a_byte_at_a_time_is_sent_away(
    any_service: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "BODY_WITHIN_S", 0.3)
    monkeypatch.setattr(inputs, "SLOWEST_BYTES_PER_S", 1e12)
    with connection(any_service) as client:
        client.sendall(
            b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1000\r\n\r\n{"
        )
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"The body did not arrive within" in answer


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "hub:other/model"},
        {"model": "other/model"},
        {"stack": [{"name": "speculative_decoding", "draft": "hub:other/model"}]},
    ],
)
def test_a_model_of_an_organisation_that_is_not_allowed_is_refused_when_it_is_posted(
    any_service: Served, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setenv("OPTIGPU_HUB_ORGANISATIONS", "trusted")
    document = {"workload": {"kind": "generate"}, "model": "hub:trusted/model"} | changes
    answer = any_service.client.post("/v1/jobs", json=document)
    assert answer.status_code == 422, answer.text
    assert "OPTIGPU_HUB_ORGANISATIONS allows trusted alone" in answer.json()["detail"]
    assert answer.json()["errors"][0]["field"] == "model"
