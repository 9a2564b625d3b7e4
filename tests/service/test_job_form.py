"""The form of a job, which follows from the schema and says the API's words; and other parts of the pages."""

import ast
import json
from collections.abc import Iterator
from typing import Any

import pytest

from api.job_form import Choice, document_of, fields, job_form, values_of
from api.openapi import JOBS
from api.pages.jobs import PRESETS
from api.pages.result import again
from optigpu.job.spec import JobSpec
from optigpu.store import results, standings
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import JobState
from optigpu.workloads import WORKLOADS
from tests.service.pages import Browser, text_of
from tests.service.records import a_result
from tests.service.serving import MATMUL, Served

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
ASKED = {"workload": "matmul", "workload.matmul.sizes": "64, 128", "measure.replicates": "1"}


@pytest.fixture
def browser(service_on_sqlite: Served) -> Iterator[Browser]:
    with Browser(service_on_sqlite) as found:
        yield found


def test_the_form_has_every_workload_technique_and_field() -> None:
    by_name = {part.label: part for part in job_form()}
    assert list(by_name) == list(JobSpec.model_fields)
    workload, stack = by_name["workload"], by_name["stack"]
    assert isinstance(workload, Choice)
    assert isinstance(stack, Choice)
    assert [each.tag for each in workload.members] == list(WORKLOADS)
    assert {each.tag for each in stack.members} == set(TECHNIQUES)
    assert all(each.help for each in (*workload.members, *stack.members))
    names = {part.name for part in fields(job_form())}
    expected = {f"workload.{kind}.{name}" for kind, model in WORKLOADS.items() for name in model.model_fields}
    assert {name for name in expected if not name.endswith(".kind")} <= names


@pytest.mark.parametrize("name", [*JOBS, *(name for name in PRESETS if name not in JOBS)])
def test_a_request_survives_the_form(name: str) -> None:
    """What a person sees is what is posted: the same job, whether its defaults were written out or not."""
    spec = JobSpec.model_validate(PRESETS[name].document)
    for document in (PRESETS[name].document, spec.model_dump(mode="json")):
        again = document_of(job_form(), values_of(job_form(), document))
        assert JobSpec.model_validate_json(json.dumps(again), strict=True) == spec


def test_a_job_is_checked_and_posted_without_a_script(service_on_sqlite: Served, browser: Browser) -> None:
    before = service_on_sqlite.count_jobs()
    checked = browser.send("/jobs/new", "/jobs/new", ASKED | {"ask": "check"})
    assert checked.status_code == 200
    assert "2 variants x 1 process" in checked.text
    assert service_on_sqlite.count_jobs() == before
    posted = browser.send("/jobs/new", "/jobs/new", ASKED | {"ask": "post"})
    assert posted.status_code == 303
    page = browser.read(posted.headers["location"])
    assert "Cancel the job" in page
    job = service_on_sqlite.client.get(f"/v1{posted.headers['location']}").json()
    assert job["spec"]["workload"] == {"kind": "matmul", "sizes": [64, 128], "dtypes": ["float32"]}
    assert job["spec"]["measure"]["replicates"] == 1


def test_a_form_that_is_sent_twice_is_one_job_and_a_changed_one_is_another(
    service_on_sqlite: Served, browser: Browser
) -> None:
    once = {"once": "the-same", "ask": "post"}
    places = [browser.send("/jobs/new", "/jobs/new", ASKED | once).headers["location"] for _ in range(2)]
    assert places[0] == places[1]
    changed = browser.send("/jobs/new", "/jobs/new", ASKED | once | {"seed": "1"})
    assert changed.headers["location"] not in places


@pytest.mark.parametrize(
    ("changes", "place", "words"),
    [
        ({"workload.matmul.sizes": "x"}, "workload.matmul.sizes", "'x' is not a whole number."),
        ({"model": "preset:gpt2"}, "model", "matmul runs no model; leave the field out."),
        ({"beside": "{"}, "beside", "'{' is not a list."),
        ({"workload": "nothing"}, "workload", "Unknown name 'nothing'."),
        ({"stack": ["bf16"]}, "stack", "bf16 has no effect on matmul"),
        ({"priority": "99"}, "priority", "99 is too large; the most is 10."),
    ],
)
def test_the_api_s_words_stand_at_the_field(
    browser: Browser, changes: dict[str, Any], place: str, words: str
) -> None:
    answer = browser.send("/jobs/new", "/jobs/new", ASKED | changes | {"ask": "post"})
    assert answer.status_code == 422
    assert words in text_of(answer.text, f"error-{place}")
    assert f'href="#{place}"' in answer.text


def test_the_address_fills_the_form_in(service_on_sqlite: Served, browser: Browser) -> None:
    made = a_result(stack=("bf16",), model="preset:gpt2")
    shapes = {"kind": "generate", "prompt_tokens": 16, "new_tokens": 8, "batch_size": 1}
    made = made.model_copy(update={"variant": made.variant.model_copy(update={"workload": shapes})})
    with service_on_sqlite.database.write() as session:
        results.add(session, made, {})
        standings.enter(session, made)
    page = browser.read(f"/jobs/new?from={made.id}&measure.replicates=2&note=Again")
    assert 'name="workload.generate.prompt_tokens" value="16"' in page
    assert 'name="measure.replicates" value="2"' in page
    assert '"fresh": true' in page.replace("&#34;", '"')
    assert 'value="bf16" checked' in page
    job = service_on_sqlite.submit(MATMUL | {"name": "first"})
    assert 'value="first"' in browser.read(f"/jobs/new?from={job['id']}")


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("preset=nothing", "There is no preset"),
        ("colour=red", "The form has no field"),
        ("from=nothing", "There is no result and no job"),
        ("from=01980000-0000-7000-8000-000000000000", "There is no job"),
    ],
)
def test_an_address_that_is_wrong_is_a_page_that_says_so(browser: Browser, query: str, words: str) -> None:
    assert words in browser.read(f"/jobs/new?{query}")


def test_what_people_write_is_text_on_every_page_of_a_job(
    service_on_sqlite: Served, browser: Browser
) -> None:
    """In names, notes, reasons and in what is typed into the form; a tag takes no such characters at all."""
    job = service_on_sqlite.submit(MATMUL | {"name": HOSTILE, "note": HOSTILE * 10, "tags": ["a:b/c"]})
    lease = service_on_sqlite.claim()
    while lease.job_id != job["id"]:
        lease = service_on_sqlite.claim()
    service_on_sqlite.finish(lease, reason=HOSTILE)
    typed = browser.send(
        "/jobs/new", "/jobs/new", ASKED | {"name": HOSTILE, "model": HOSTILE, "ask": "check"}
    )
    address = browser.client.get("/jobs/new", params={"name": HOSTILE, HOSTILE: "x"}).text
    pages = (browser.read(f"/jobs/{job['id']}"), browser.read("/jobs"), typed.text, address)
    for page in pages:
        assert "<script>alert" not in page
        assert "<img" not in page
        assert "&lt;script&gt;alert(1)" in page
    assert browser.client.get("/jobs", params={"tag": HOSTILE}).status_code == 422


def test_a_job_is_cancelled_from_its_page_and_listed_by_state_and_tag(
    service_on_sqlite: Served, browser: Browser
) -> None:
    job = service_on_sqlite.submit(MATMUL | {"name": "to be cancelled", "tags": ["mine"]})
    place = f"/jobs/{job['id']}"
    assert browser.send(place, f"{place}/cancel").status_code == 303
    page = browser.read(place)
    assert "cancelled" in page
    assert "Cancel the job" not in page
    assert service_on_sqlite.client.get(f"/v1{place}").json()["state"] == JobState.CANCELLED
    assert "to be cancelled" in browser.read("/jobs?state=cancelled&tag=mine")
    assert "No job matches" in browser.read("/jobs?state=running&tag=mine")
    browser.read("/jobs/01980000-0000-7000-8000-000000000000", 404)
    browser.read("/jobs/nothing", 422)


def a_document(**variant: Any) -> dict[str, Any]:
    document = a_result(stack=("bf16",)).model_dump(mode="json")
    workload = {"kind": "generate", "prompt_tokens": 8, "new_tokens": 8, "batch_size": 2}
    document["variant"] |= {"workload": workload, "model": "preset:gpt2"} | variant
    return document


def test_the_code_of_a_stack_is_its_request() -> None:
    stack = ({"name": "bf16"}, {"name": "torch_compile", "mode": "reduce-overhead"})
    spec = {"measure": {"replicates": 5}, "limits": {}}
    found = again(a_document(stack=stack), spec)
    _, assigned, _ = ast.parse(found.python).body
    assert isinstance(assigned, ast.Assign)
    assert isinstance(assigned.value, ast.Call)
    workload, model = map(ast.literal_eval, assigned.value.args)
    named = {each.arg or "": ast.literal_eval(each.value) for each in assigned.value.keywords}
    assert (workload["batch_size"], model) == (2, "preset:gpt2")
    assert named["stack"] == ["bf16", stack[1]]
    assert named["measure"]["replicates"] == 5
    assert "limits" not in named
    written = [each if isinstance(each, dict) else {"name": each} for each in named.pop("stack")]
    posted = JobSpec.model_validate({"workload": workload, "model": model, "stack": written} | named)
    assert posted == JobSpec.model_validate_json(found.json)


def test_no_text_of_others_changes_the_direction_of_a_page(any_service: Served) -> None:
    job = any_service.submit(MATMUL | {"name": "quick\u202efox\u2066", "note": "a\u202eb<i>"})
    for address in ("/jobs", f"/jobs/{job['id']}"):
        page = any_service.client.get(address, headers={"Accept": "text/html"}).text
        assert "quickfox" in page
        assert not {"\u202e", "\u2066"} & set(page)
