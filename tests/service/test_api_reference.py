"""The OpenAPI document and the page of all calls: complete and true, drawn without network, scripts or a key."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.examples import JOBS, WEBHOOKS
from api.openapi import LINKS
from api.reference import Document
from optigpu.job.spec import JobSpec
from tests.service.pages import Page
from tests.service.serving import Served, serving


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
    by_pilots = {
        call for call, operation in operations(document) if operation.get("security") == [{"PilotToken": []}]
    }
    assert by_pilots == {call for call, _ in operations(document) if "/v1/pilot/" in call}
    by_devices = {
        operation["operationId"]
        for _, operation in operations(document)
        if operation.get("security") == [{"DeviceSignature": []}]
    }
    assert by_devices == {"start_device_run", "send_measurements", "change_device_key"}


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


KEY = "a-first-key-that-is-long-enough"


def test_the_page_has_every_operation_with_its_parameters_and_answers(any_service: Served) -> None:
    text = any_service.client.get("/docs").text
    page = Page(text)
    document = any_service.client.get("/openapi.json").json()
    calls = [
        (method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    assert len(calls) >= 21
    for method, path, operation in calls:
        assert operation["operationId"] in page.ids
        assert f"<code>{method.upper()} {path}</code>" in text
        for parameter in operation.get("parameters", ()):
            assert f"<code>{parameter['name']}</code>" in text
    assert {f"schema-{name}" for name in document["components"]["schemas"]} <= page.ids


def test_nothing_on_the_page_comes_from_elsewhere_or_runs(any_service: Served) -> None:
    answer = any_service.client.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    page = Page(answer.text)
    assert page.from_elsewhere == []
    hosts = set(re.findall(r"https?://[^/\s\"'<&]+", answer.text))
    (example,) = map(str, JobSpec.model_fields["endpoint"].examples or ())  # text, not a link
    receiver = str(WEBHOOKS["chat"].document["url"])
    assert hosts == {any_service.url, example, receiver.removesuffix("/optigpu")}
    assert receiver not in page.links
    assert example not in page.links
    inside = {link for link in page.links if link.startswith("#")}
    assert {link[1:] for link in inside} <= page.ids
    for link in set(page.links) - inside:
        assert any_service.client.get(link).status_code == 200


def test_a_host_header_is_not_taken_for_html(tmp_path: Path) -> None:
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", host="0.0.0.0") as served:
        assert "<b>" not in served.client.get("/docs", headers={"Host": "a<b>"}).text


def test_commands_carry_the_key_the_body_and_what_is_required(any_service: Served) -> None:
    document = Document.model_validate(any_service.client.get("/openapi.json").json())
    curl = {call.operation.name: call.curl for group in document.groups() for call in group.calls}
    assert curl["is_alive"] == 'curl -s "$URL/healthz"'
    key = '-H "Authorization: Bearer $OPTIGPU_API_KEY"'
    assert curl["cancel_job"] == f'curl -s -X POST "$URL/v1/jobs/$ID/cancel" {key}'
    assert curl["withdraw_job"] == f'curl -s -X DELETE "$URL/v1/jobs/$ID?reason=$REASON" {key}'
    assert curl["compare_results"].startswith(
        'curl -s "$URL/v1/compare?baseline=$BASELINE&candidate=$CANDIDATE"'
    )
    posted = curl["submit_job"]
    assert posted.startswith(f"curl -s \"$URL/v1/jobs\" {key} -H 'Content-Type: application/json' -d '{{")
