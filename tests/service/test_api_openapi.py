"""The OpenAPI document: complete, and true."""

from collections.abc import Iterator
from typing import Any

import pytest

from api.examples import JOBS
from api.openapi import LINKS
from tests.service.serving import Served


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
    assert (schemes["PilotToken"]["type"], schemes["PilotToken"]["scheme"]) == ("http", "bearer")
    assert len(schemes) == 3
    by_pilots = {
        call.partition(" ")[2]
        for call, operation in operations(document)
        if operation.get("security") == [{"PilotToken": []}]
    }
    assert by_pilots == {call.partition(" ")[2] for call, _ in operations(document) if "/v1/pilot/" in call}
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


def test_every_link_leads_from_a_documented_answer_to_a_call_with_all_that_it_needs(
    document: dict[str, Any],
) -> None:
    calls = {operation["operationId"]: operation for _, operation in operations(document)}
    shown = [
        (source, status, link["operationId"])
        for source, operation in calls.items()
        for status, answer in operation["responses"].items()
        for link in answer.get("links", {}).values()
    ]
    assert sorted(shown) == sorted({(link.source, str(link.status), link.target) for link in LINKS})
    assert len(shown) == len(LINKS), "two links from one answer to the same call"
    for link in LINKS:
        parameters = calls[link.target]["parameters"]
        in_path = {each["name"] for each in parameters if each["in"] == "path"}
        assert in_path <= set(link.parameters), link
        assert set(link.parameters) <= {each["name"] for each in parameters}, link


def test_links_lead_from_a_posted_job_to_its_results() -> None:
    reached, seen = {"submit_job"}, 0
    while seen < len(reached):
        seen = len(reached)
        reached |= {link.target for link in LINKS if link.source in reached}
    assert {"get_job", "follow_job", "cancel_job", "get_job_results", "get_result", "get_samples"} <= reached
    assert {"list_artifacts", "get_artifact", "compare_results"} <= reached
