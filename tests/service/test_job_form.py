"""The form of a job: it follows from the schema, posts what it says, and puts the API's words at its fields."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from api.examples import JOBS
from api.job_form.documents import document_of, errors_at, values_of
from api.job_form.schema import Choice, fields, job_form, parts_of
from api.pages.new_job import PRESETS
from optigpu.job.spec import JobSpec
from optigpu.store import results, standings
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import Frozen, JobState
from optigpu.workloads import WORKLOADS
from tests.service.pages import Browser, text_of
from tests.service.records import a_result
from tests.service.serving import MATMUL, Served

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
ASKED = {"workload": "matmul", "workload.matmul.sizes": "64, 128", "measure.replicates": "1"}


@pytest.fixture
def empty(service_on_sqlite: Served) -> Served:
    """A service of which only the jobs of the test are looked at."""
    return service_on_sqlite


@pytest.fixture
def browser(empty: Served) -> Iterator[Browser]:
    with Browser(empty) as found:
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


class BrandNew(Frozen):
    """A technique that was written this morning."""

    name: Literal["brand_new"] = "brand_new"
    strength: int = Field(3, ge=1, description="How much of it.")


class Renamed(Frozen):
    name: Literal["renamed"] = "renamed"


class Other(Frozen):
    """A workload of the same morning."""

    kind: Literal["other"] = "other"
    depth: int | None = None


class Another(Frozen):
    kind: Literal["another"] = "another"


class Request(Frozen):
    """With a field that nobody has heard of."""

    workload: Annotated[Other | Another, Field(discriminator="kind")]
    stack: tuple[Annotated[BrandNew | Renamed, Field(discriminator="name")], ...] = ()
    colour: str = Field("blue", description="Of it.")


def test_what_is_added_in_code_appears_by_itself() -> None:
    """A technique with parameters of its own, a workload, and a field."""
    parts = parts_of(Request.model_json_schema())
    found = {part.name: part for part in fields(parts)}
    assert set(found) == {
        *("workload", "workload.other.depth", "stack", "stack.brand_new.strength", "colour"),
    }
    assert found["stack.brand_new.strength"].help == "How much of it."
    sent = {
        "workload": ["other"],
        "workload.other.depth": ["9"],
        "workload.another.x": ["1"],
        "colour": ["red"],
    }
    sent |= {"stack": ["renamed", "brand_new"], "stack.brand_new.strength": ["5"]}
    document = document_of(parts, sent)
    assert Request.model_validate(document).stack == (Renamed(), BrandNew(strength=5))
    assert document["workload"] == {"kind": "other", "depth": 9}
    assert document["colour"] == "red"
    assert values_of(parts, document) == {name: value for name, value in sent.items() if name in found}


@pytest.mark.parametrize("name", [*JOBS, *(name for name in PRESETS if name not in JOBS)])
def test_a_request_survives_the_form(name: str) -> None:
    """What a person sees is what is posted: the same job, whether its defaults were written out or not."""
    spec = JobSpec.model_validate(PRESETS[name].document)
    for document in (PRESETS[name].document, spec.model_dump(mode="json")):
        again = document_of(job_form(), values_of(job_form(), document))
        assert JobSpec.model_validate_json(json.dumps(again), strict=True) == spec


def test_parts_that_are_no_fields_survive_as_json() -> None:
    beside = [{"backend": "llama_cpp", "stack": [{"name": "gguf", "type": "Q8_0"}], "label": "llama"}]
    document: dict[str, Any] = {
        "workload": {"kind": "generate", "prompt_tokens": None, "prompt": "Once\nupon"}
    }
    document |= {"model": "bundled:tiny", "beside": beside, "tags": ["a", "b"], "seed": 7}
    document["measure"] = {"rel_ci": 0.000125, "raise_priority": False, "quality": {"tokens": 64}}
    assert document_of(job_form(), values_of(job_form(), document)) == document


@pytest.mark.parametrize(
    ("field", "place"),
    [
        ("stack.1.mode", "stack.torch_compile.mode"),
        ("stack.0", "stack"),
        ("stack.9.x", "stack"),
        ("workload.batch_size", "workload.generate.batch_size"),
        ("workload", "workload"),
        ("measure.quality.tokens", "measure.quality.tokens"),
        ("limits.nothing", "limits"),
        ("tags.0", "tags"),
        ("beside.0.stack.0", "beside"),
        ("body", "body"),
        ("nothing.at.all", "body"),
    ],
)
def test_an_error_of_the_api_stands_at_its_field(field: str, place: str) -> None:
    document = {"workload": {"kind": "generate"}, "stack": [{"name": "bf16"}, {"name": "torch_compile"}]}
    found = errors_at(job_form(), document, [{"field": field, "message": "Wrong."}])
    assert found == {place: ["Wrong."]}


def test_a_job_is_checked_and_posted_without_a_script(empty: Served, browser: Browser) -> None:
    before = empty.count_jobs()
    checked = browser.send("/jobs/new", "/jobs/new", ASKED | {"ask": "check"})
    assert checked.status_code == 200
    assert "2 variants x 1 process" in checked.text
    assert empty.count_jobs() == before
    posted = browser.send("/jobs/new", "/jobs/new", ASKED | {"ask": "post"})
    assert posted.status_code == 303
    page = browser.read(posted.headers["location"])
    assert "Cancel the job" in page
    job = empty.client.get(f"/v1{posted.headers['location']}").json()
    assert job["spec"]["workload"] == {"kind": "matmul", "sizes": [64, 128], "dtypes": ["float32"]}
    assert job["spec"]["measure"]["replicates"] == 1


def test_a_form_that_is_sent_twice_is_one_job_and_a_changed_one_is_another(
    empty: Served, browser: Browser
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
        ({"measure.replicates": "0"}, "measure.replicates", "0 is too small; the least is 1."),
        ({"measure.rel_ci": "nan"}, "measure.rel_ci", "'nan' is not a number."),
        ({"model": "preset:gpt2"}, "model", "matmul runs no model; leave the field out."),
        ({"beside": "{"}, "beside", "'{' is not a list."),
        ({"workload": "nothing"}, "workload", "Unknown name 'nothing'."),
        ({"stack": ["bf16"]}, "stack", "bf16 has no effect on matmul"),
        ({"limits.deadline": "tomorrow"}, "limits.deadline", "Input should be a valid datetime"),
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


def test_the_address_fills_the_form_in(empty: Served, browser: Browser) -> None:
    made = a_result(stack=("bf16",), model="preset:gpt2")
    shapes = {"kind": "generate", "prompt_tokens": 16, "new_tokens": 8, "batch_size": 1}
    made = made.model_copy(update={"variant": made.variant.model_copy(update={"workload": shapes})})
    with empty.database.write() as session:
        results.add(session, made, {})
        standings.enter(session, made)
    page = browser.read(f"/jobs/new?from={made.id}&measure.replicates=2&note=Again")
    assert 'name="workload.generate.prompt_tokens" value="16"' in page
    assert 'name="measure.replicates" value="2"' in page
    assert '"fresh": true' in page.replace("&#34;", '"')
    assert 'value="bf16" checked' in page
    job = empty.submit(MATMUL | {"name": "first"})
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


def test_what_people_write_is_text_on_every_page_of_a_job(empty: Served, browser: Browser) -> None:
    """In names, notes, reasons and in what is typed into the form; a tag takes no such characters at all."""
    job = empty.submit(MATMUL | {"name": HOSTILE, "note": HOSTILE * 10, "tags": ["a:b/c"]})
    lease = empty.claim()
    while lease.job_id != job["id"]:
        lease = empty.claim()
    empty.finish(lease, reason=HOSTILE)
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
    empty: Served, browser: Browser
) -> None:
    job = empty.submit(MATMUL | {"name": "to be cancelled", "tags": ["mine"]})
    place = f"/jobs/{job['id']}"
    assert browser.send(place, f"{place}/cancel").status_code == 303
    page = browser.read(place)
    assert "cancelled" in page
    assert "Cancel the job" not in page
    assert empty.client.get(f"/v1{place}").json()["state"] == JobState.CANCELLED
    assert "to be cancelled" in browser.read("/jobs?state=cancelled&tag=mine")
    assert "No job matches" in browser.read("/jobs?state=running&tag=mine")
    browser.read("/jobs/01980000-0000-7000-8000-000000000000", 404)
    browser.read("/jobs/nothing", 422)


def test_a_preview_says_what_a_job_will_be_and_stores_nothing(empty: Served) -> None:
    before = empty.count_jobs()
    answer = empty.client.post("/v1/preview", json=JOBS["ladder"].document)
    assert answer.status_code == 200
    preview = answer.json()
    assert [each["label"] for each in preview["variants"]][:2] == ["baseline", "bf16"]
    assert preview["seconds"] > 0
    assert preview["sentence"].startswith(f"{len(preview['variants'])} variants x 1 process")
    assert preview["spec"]["measure"]["rel_ci"] == 0.01
    assert empty.count_jobs() == before
    wrong = empty.client.post("/v1/preview", json={"workload": {"kind": "generate"}})
    assert (wrong.status_code, wrong.json()["errors"][0]["field"]) == (422, "model")
