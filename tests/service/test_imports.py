"""A run that was measured elsewhere becomes a job that has ended, whole or not at all."""

import json
from pathlib import Path
from typing import Any

import pytest

from optigpu.client import Client
from optigpu.documents.runs import RUN_FORMAT
from optigpu.runs import Keeper
from optigpu.store import leases, workers
from optigpu.vocabulary import Document
from tests.service.records import a_worker
from tests.service.serving import Served
from tests.unit.test_runs import report


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Document:
    """A kept run of a ladder with two results."""
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path / "data"))
    return Keeper().keep(report("The time limit of 10 s was reached.")).document


def imported(service: Served, run: Document) -> Any:
    return service.client.post("/v1/imports", json=run)


def test_a_run_becomes_a_job_with_its_results_samples_and_ranks(service: Served, run: Document) -> None:
    answer = imported(service, run)
    assert answer.status_code == 201, answer.text
    job = answer.json()
    assert answer.headers["Location"] == job["links"]["self"]
    assert (job["state"], job["name"], job["attempts"]) == ("succeeded", "A first look", [])
    assert job["reason"].startswith("The time limit of 10 s was reached. Imported; it was measured on ")
    assert job["attribution"] == run["attribution"]
    held = service.client.get(f"/v1/jobs/{job['id']}/results").json()
    assert [each["id"] for each in held["results"]] == [each["id"] for each in run["results"]]
    assert {each["job_id"] for each in held["results"]} == {job["id"]}
    for kept, result in zip(run["outcomes"], run["results"], strict=True):
        stored = service.client.get(f"/v1/results/{result['id']}/samples").json()
        assert stored["samples"] == kept["samples"]
    (board,) = service.client.get("/v1/leaderboard").json()["boards"]
    assert [row["label"] for row in board["rows"]] == ["bf16", "baseline"]
    with service.database.write() as session:
        workers.register(session, a_worker())
        assert leases.claim(session, a_worker(), lease_s=60) is None, "nobody measures it again"


def test_the_same_run_is_entered_once(service: Served, run: Document) -> None:
    job = imported(service, run).json()["id"]
    again = imported(service, run)
    assert again.status_code == 409
    assert again.json()["detail"] == f"This run is here already, as job {job}."
    assert service.count_jobs() == 1


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"format": RUN_FORMAT + 1}, "format", "a later version of OptiGPU"),
        ({"spec": {"workload": {"kind": "dance"}}}, "spec", "cannot read the run's request: workload"),
        ({"spec": {"workload": {"kind": "matmul"}}}, "results", "is not one of the variants that"),
        ({"outcomes": "none"}, "outcomes", "'none' is not a list."),
        ({"colour": "red"}, "colour", ""),
    ],
)
def test_a_run_that_cannot_be_stored_is_refused_and_leaves_nothing(
    changes: Document, field: str, words: str, service: Served, run: Document
) -> None:
    answer = imported(service, {**run, **changes})
    assert answer.status_code == 422
    (problem,) = answer.json()["errors"]
    assert problem["field"] == field
    assert words in problem["message"]
    assert service.count_jobs() == 0


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_a_run_with_a_number_that_is_none_leaves_nothing(
    number: str, any_service: Served, run: Document
) -> None:
    """The first value of its first metric."""
    result = run["results"][0]
    metric = next(iter(result["metrics"]))
    changed = result | {
        "metrics": result["metrics"] | {metric: result["metrics"][metric] | {"value": "NUMBER"}}
    }
    text = json.dumps({**run, "results": [changed]}).replace('"NUMBER"', number)
    headers = {"Content-Type": "application/json"}
    answer = any_service.client.post("/v1/imports", content=text, headers=headers)
    assert answer.status_code in (400, 422), answer.text
    assert any_service.count_jobs() == 0


def test_a_result_of_another_workload_is_refused(service: Served, run: Document) -> None:
    variant = run["results"][0]["variant"] | {"workload": {"kind": "matmul"}}
    answer = imported(service, {**run, "results": [run["results"][0] | {"variant": variant}]})
    assert answer.status_code == 422
    assert "is not one of the variants that the run's request plans" in answer.json()["detail"]


def test_the_client_imports_a_run(service: Served, run: Document) -> None:
    with Client(service.url) as client:
        job = client.import_run(run)
        assert client.job(job.id).state == "succeeded"


def test_a_run_in_which_nothing_can_be_ranked_says_so(service: Served, run: Document) -> None:
    invalid = {"valid": False, "reasons": ["drift"], "warnings": [], "notes": ["It became slower."]}
    results = [result | {"verdict": invalid} for result in run["results"]]
    job = imported(service, {**run, "results": results}).json()
    assert job["state"] == "succeeded"
    assert (
        "Nothing that was measured can be ranked: drift (2 of 2). It became slower. Imported;"
        in job["reason"]
    )
