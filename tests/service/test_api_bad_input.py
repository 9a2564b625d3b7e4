"""Each error in a request is reported with the field's name, and nothing is stored."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.service.serving import MATMUL, Served

GENERATE = {"kind": "generate", "prompt_tokens": 32, "new_tokens": 64}
SERVE = {"kind": "serve"}
GPT2 = {"workload": GENERATE, "model": "preset:gpt2"}
UUID = "01980000-0000-7000-8000-000000000000"
MEGABYTE = 1_000_000
JSON = {"Content-Type": "application/json"}


def refused(service: Served, status: int, **request: Any) -> dict[str, Any]:
    """The problem that answers a POST, after which nothing more is stored than before."""
    before = service.count_jobs()
    answer = service.client.post("/v1/jobs", **request)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = answer.json()
    assert problem["status"] == status
    assert problem["instance"] == f"urn:uuid:{answer.headers['x-request-id']}"
    assert service.count_jobs() == before
    assert len(answer.content) < 20_000
    assert "pydantic" not in answer.text
    return problem


@pytest.mark.parametrize(
    ("change", "field", "valid"),
    [
        ({"workload": {"kind": "matmull"}}, "workload.kind", "matmul"),
        ({"stack": [{"name": "int9"}]}, "stack.0.name", "int8_weight_only"),
        ({"measure": {"replicas": 1}}, "measure.replicas", "replicates"),
    ],
)
def test_an_unknown_name_lists_the_valid_ones(
    any_service: Served, change: dict[str, Any], field: str, valid: str
) -> None:
    problem = refused(any_service, 422, json=GPT2 | change)
    entry = next(entry for entry in problem["errors"] if entry["field"] == field)
    assert valid in entry["valid"]
    assert valid in entry["message"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"workload": GENERATE | {"prompt_tokens": True}}, "workload.prompt_tokens"),
        ({"workload": GENERATE | {"prompt_tokens": 1000, "new_tokens": 1000}}, "workload"),
        ({"model": "preset:gpt9"}, "model"),
        ({"beside": [{}, {"stack": [{"name": "gguf"}]}]}, "beside.1.stack"),
        ({"beside": [{"backend": "llama_cpp"}], "device": "cuda"}, "beside.0.backend"),
        ({"beside": [{"stack": [{"name": "bf16"}], "label": "baseline"}]}, "beside"),
        ({"workload": SERVE | {"rates": [0]}}, "workload.rates.0"),
        ({"workload": SERVE | {"scenario": "trace", "trace": '{"arrival_s": 0'}}, "workload.trace"),
        ({"measure": {"quality": {"tokens": 10**12}}}, "measure.quality.tokens"),
    ],
)  # fmt: skip
def test_the_field_that_is_wrong_is_named(any_service: Served, change: dict[str, Any], field: str) -> None:
    problem = refused(any_service, 422, json=GPT2 | change)
    assert field in [entry["field"] for entry in problem["errors"]]
    assert all(entry["message"] for entry in problem["errors"])
    assert problem["detail"].startswith(problem["errors"][0]["field"])


DEEP = 100_000


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"workload": }',
        b"{'workload': 1}",
        b"[" * DEEP,
        b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        b'{"seed": ' + b"9" * 10_000 + b"}",
        b'{"model": "\xff\xfe"}',
        b"\xef\xbb\xbf{}",
        b"\x00",
        b'{"model": "\\ud800"}',
    ],
)
def test_what_is_no_json_is_refused(any_service: Served, body: bytes) -> None:
    problem = refused(any_service, 400, content=body, headers=JSON)
    assert problem["errors"][0]["field"] == "body"


@pytest.mark.parametrize(
    "body",
    [
        b'{"workload": {"kind": "matmul"}, "seed": NaN}',
        b'{"workload": {"kind": "matmul"}, "measure": {"rel_ci": Infinity}}',
        b'{"workload": {"kind": "matmul"}, "measure": {"rel_ci": 1e999}}',
        b'{"workload": {"kind": "matmul"}, "target": {"gpu": "a\\u0000b"}}',
        b'{"workload": {"kind": "matmul\\u0000"}}',
        b'{"workload": {"kind": "matmul"}, "\\u0000": 1}',
    ],
)
def test_what_no_database_can_hold_is_refused(service: Served, body: bytes) -> None:
    assert refused(service, 422, content=body, headers=JSON)["errors"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
)
def test_only_plain_json_is_taken(any_service: Served, headers: dict[str, str]) -> None:
    refused(any_service, 415, content=json.dumps(MATMUL), headers=headers)


def test_a_body_of_exactly_the_limit_is_read_and_a_longer_one_refused(service: Served) -> None:
    body = json.dumps(MATMUL).encode().ljust(MEGABYTE)
    charset = {"Content-Type": "application/json; charset=utf-8"}
    assert service.client.post("/v1/jobs", content=body, headers=charset).status_code == 202
    refused(service, 413, content=body + b" ", headers=JSON)


def test_a_long_body_without_a_length_is_refused_and_never_kept(any_service: Served) -> None:
    peak, process = 0, psutil.Process()
    before = process.memory_info().rss

    def chunks() -> Iterator[bytes]:
        nonlocal peak
        for _ in range(50):
            yield b" " * MEGABYTE
            peak = max(peak, process.memory_info().rss - before)

    refused(any_service, 413, content=chunks(), headers=JSON)
    assert peak < 25 * MEGABYTE


def test_a_long_name_is_not_echoed(any_service: Served) -> None:
    problem = refused(any_service, 422, json=GPT2 | {"x" * 500_000: 1, "stack": [{"name": "y" * 300_000}]})
    whole = json.dumps(problem)
    assert "x" * 200 not in whole
    assert "y" * 200 not in whole
    assert len(whole) < 5_000, "every valid name, and no more"


def test_a_flood_of_errors_is_cut(any_service: Served) -> None:
    problem = refused(any_service, 422, json=GPT2 | {f"field{n}": n for n in range(5_000)})
    assert len(problem["errors"]) == 21
    assert problem["errors"][-1]["message"] == "4980 more errors are not listed."


@pytest.mark.parametrize("key", ["", "x" * 201, "tab\there"])
def test_an_idempotency_key_has_bounds(any_service: Served, key: str) -> None:
    problem = refused(any_service, 422, json=MATMUL, headers={"Idempotency-Key": key})
    assert problem["errors"][0]["field"].lower() == "idempotency-key"


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/jobs/not-a-uuid", "id"),
        ("/v1/jobs/01980000000070008000000000000000", "id"),
        ("/v1/jobs/%00", "id"),
        ("/v1/results/x", "id"),
        (f"/v1/results/{UUID}/artifacts/.hidden", "name"),
        (f"/v1/results/{UUID}/artifacts/%00", "name"),
        (f"/v1/results/{UUID}/artifacts/a%5Cb", "name"),
        ("/v1/compare", "baseline"),
        (f"/v1/compare?baseline={UUID}&candidate=x", "candidate"),
        (f"/v1/compare?baseline={UUID}&candidate={UUID}&anyway=maybe", "anyway"),
        ("/v1/jobs?state=asleep", "state"),
        ("/v1/jobs?limit=many", "limit"),
        ("/v1/jobs?cursor=nonsense", "cursor"),
        ("/v1/leaderboard?metric=happiness", "metric"),
        ("/v1/leaderboard?format=xml", "format"),
        ("/v1/leaderboard?cursor=nonsense", "cursor"),
        ("/v1/leaderboard?model=%00", "model"),
        ("/v1/leaderboard?min_top1=NaN", "min_top1"),
        ("/v1/leaderboard?max_kld=Infinity", "max_kld"),
        ("/v1/leaderboard?clean=maybe", "clean"),
    ],
)
def test_a_bad_parameter_is_named(service: Served, path: str, field: str) -> None:
    answer = service.client.get(path)
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["errors"][0]["field"] == field


@pytest.mark.slow
def test_every_call_refuses_a_parameter_that_it_does_not_have(any_service: Served) -> None:
    paths = any_service.client.get("/openapi.json").json()["paths"]
    calls = [("get", "/"), *((method, path) for path, methods in paths.items() for method in methods)]
    assert len(calls) >= 22
    for method, path in calls:
        place = path.replace("{id}", UUID).replace("{name}", "trace.json")
        answer = any_service.client.request(method, place, params={"colour": "red"})
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "colour"), (method, path)


def test_an_unknown_parameter_lists_those_of_the_call_and_the_closest_first(any_service: Served) -> None:
    entry = any_service.client.get("/v1/jobs?sate=queued").json()["errors"][0]
    assert entry["valid"] == ["state", "cursor", "limit", "parked", "tag"]
    assert entry["message"].startswith("Unknown parameter 'sate'. Did you mean state? Valid: ")
    many = any_service.client.get("/v1/workers?" + "&".join(f"p{n}=1" for n in range(100))).json()["errors"]
    assert len(many) == 20


@pytest.mark.parametrize("reason", [None, " ", "a\nb", "x" * 501])
@pytest.mark.parametrize("kind", ["jobs", "results"])
def test_a_withdrawal_needs_a_reason(service: Served, kind: str, reason: str | None) -> None:
    query = {} if reason is None else {"reason": reason}
    answer = service.client.delete(f"/v1/{kind}/{UUID}", params=query)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "reason")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("PUT", "/v1/jobs", 405),
        ("DELETE", f"/v1/jobs/{UUID}?reason=x", 404),
        ("GET", "/" + "x" * 9000, 404),
    ],
)
def test_every_error_is_a_problem(any_service: Served, method: str, path: str, status: int) -> None:
    answer = httpx.request(method, any_service.url + path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["title"]
    assert len(answer.content) < 2_000


def test_a_failure_of_ours_says_its_request_and_nothing_else(any_service: Served) -> None:
    secret = "the inner workings"

    def breaks() -> None:
        raise RuntimeError(secret)

    any_service.app.add_api_route("/breaks", breaks, include_in_schema=False)
    answer = any_service.client.get("/breaks")
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["instance"] == f"urn:uuid:{answer.headers['x-request-id']}"
    assert secret not in answer.text
    assert "Traceback" not in answer.text
