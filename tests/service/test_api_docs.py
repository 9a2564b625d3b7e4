"""The page of all calls: complete, and drawn without network, scripts or a key."""

import re
from pathlib import Path

import pytest
from pydantic import JsonValue

from api.examples import WEBHOOKS
from api.reference import Document, type_of
from optigpu.job.spec import JobSpec
from tests.service.pages import Page
from tests.service.serving import Served, serving

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


def test_the_page_needs_no_key_and_there_is_no_other(tmp_path: Path) -> None:
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", api_key=KEY) as served:
        assert served.client.get("/docs").status_code == 200
        assert served.client.get("/redoc").status_code == 404


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


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"$ref": "#/components/schemas/Job"}, "Job"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string or null"),
        ({"type": "array", "items": {"type": "integer"}}, "list of integer"),
        ({"enum": ["json", "csv"]}, '"json" or "csv"'),
        ({"type": "string", "format": "uuid"}, "string, uuid"),
        ({}, "anything"),
        (None, "anything"),
    ],
)
def test_a_schema_in_words(shape: JsonValue, words: str) -> None:
    assert type_of(shape) == words
