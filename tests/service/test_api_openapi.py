"""The OpenAPI document: complete, and true."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.examples import JOBS
from tests.service.records import a_metric, a_result
from tests.service.serving import Served, serving

KEY = "a-first-key-that-is-long-enough"
SCHEMATHESIS = Path(sys.executable).with_name("st")


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every call, with its method and path."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


@pytest.fixture
def document(any_service: Served) -> dict[str, Any]:
    """What `/openapi.json` answers."""
    found: dict[str, Any] = any_service.client.get("/openapi.json").json()
    return found


def test_every_call_is_named_tagged_and_described(document: dict[str, Any]) -> None:
    found = dict(operations(document))
    assert len(found) >= 21
    names = [operation["operationId"] for operation in found.values()]
    assert len(set(names)) == len(names)
    known = {tag["name"] for tag in document["tags"]}
    for operation in found.values():
        assert operation["summary"]
        assert operation["description"]
        assert set(operation["tags"]) <= known


def test_every_error_is_documented_as_a_problem(document: dict[str, Any]) -> None:
    for call, operation in operations(document):
        errors = {status: answer for status, answer in operation["responses"].items() if int(status) >= 400}
        assert {"400", "500", "503"} <= set(errors), call
        for answer in errors.values():
            assert list(answer["content"]) == ["application/problem+json"]
            assert answer["content"]["application/problem+json"]["schema"] == {
                "$ref": "#/components/schemas/Problem"
            }
    posting = document["paths"]["/v1/jobs"]["post"]["responses"]
    assert {"401", "403", "409", "413", "415", "422", "429"} <= set(posting)


def test_every_call_that_needs_a_key_says_so(document: dict[str, Any]) -> None:
    """A claim needs a code in its body instead."""
    for call, operation in operations(document):
        guarded = ("/v1/" in call or "/metrics" in call) and call != "POST /v1/devices/claim"
        assert bool(operation.get("security")) == guarded, call
    schemes = document["components"]["securitySchemes"]
    assert (schemes["HTTPBearer"]["type"], schemes["HTTPBearer"]["scheme"]) == ("http", "bearer")
    assert (schemes["DeviceSignature"]["type"], schemes["DeviceSignature"]["name"]) == (
        "apiKey",
        "Authorization",
    )
    assert len(schemes) == 2
    by_devices = {
        operation["operationId"]
        for _, operation in operations(document)
        if operation.get("security") == [{"DeviceSignature": []}]
    }
    assert by_devices == {"start_device_run", "send_measurements", "change_device_key"}


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            yield from [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            for value in node.values():
                yield from references(value)
        elif isinstance(node, list):
            for value in node:
                yield from references(value)

    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) <= known


@pytest.mark.parametrize("name", sorted(JOBS))
def test_every_example_can_be_posted(any_service: Served, document: dict[str, Any], name: str) -> None:
    shown = document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]["examples"]
    assert shown[name]["value"] == JOBS[name].document
    any_service.submit(shown[name]["value"])


@pytest.mark.slow
def test_what_the_document_says_is_true(tmp_path: Path) -> None:
    """Left out: streams, which have no end (test_api_events.py), and that whatever fits the schema is accepted: no
    schema says what fits together.
    """
    longest = {"max_body_bytes": 20_000_000}  # a manifest of more outputs than allowed is refused for that
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", api_key=KEY, **longest) as served:
        served.client.headers["Authorization"] = f"Bearer {KEY}"
        served.submit(JOBS["matmul"].document)
        served.finish(
            served.claim(), a_result({"tflops": a_metric("tflops", 1.0, (0.9, 1.1))}, workload="matmul")
        )
        arguments = [
            *("run", f"{served.url}/openapi.json", "--header", f"Authorization: Bearer {KEY}"),
            *("--checks", "all", "--exclude-checks", "positive_data_acceptance"),
            *("--exclude-operation-id", "follow_job"),
            *("--phases", "examples,coverage,fuzzing", "--max-examples", "5"),
            *("--generation-deterministic", "--suppress-health-check", "all", "--request-timeout", "30"),
        ]
        done = subprocess.run([SCHEMATHESIS, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "Tested: 31" in done.stdout
