"""A run that was measured elsewhere becomes a job that has ended, whole or not at all."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optigpu.documents.events import Event, Progressed
from optigpu.documents.versions import RUN_FORMAT
from optigpu.job.measured import summary_of
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.measure import run as measured
from optigpu.models.loading.load import MODELS_DIR
from optigpu.runs import Keeper, find
from optigpu.vocabulary import Document
from tests.engine.processes import optigpu
from tests.engine.sessions import BRIEF
from tests.engine.sessions import own_lock as own_lock
from tests.engine.test_cli_run import MEASURED
from tests.engine.tiny_models import tiny_model
from tests.service.serving import Served

pytestmark = pytest.mark.slow
OLDER = Path(__file__).parents[1] / "unit" / "report_version_1.json"
ONE = {
    **BRIEF,
    "workload": {"kind": "generate", "prompt_tokens": 8, "new_tokens": 4},
    "model": "bundled:tiny",
}
LADDER = {
    **ONE,
    "model": "path:llama",
    "name": "A first look",
    "plan": "ladder",
    "stack": [{"name": "bf16"}],
    "beside": [{"backend": "endpoint", "endpoint": "http://127.0.0.1:9#nothing"}],
    "measure": BRIEF["measure"] | {"replicates": 2},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, own_lock: None, forked_children: None) -> Iterator[Path]:
    """The data folder of two measured runs: by the command of a bundled model, by the library a ladder on a folder that
    no service finds, with a variant that failed, stopped when the second processes started."""
    folder = tmp_path_factory.mktemp("measured")
    job = folder / "job.json"
    job.write_text(json.dumps(ONE))
    models = folder / "models"
    tiny_model("llama").save_pretrained(models / "llama")
    events: list[Event] = []

    def stopped() -> str | None:
        is_second = any(isinstance(event, Progressed) and event.replicate == 1 for event in events)
        return "Enough." if is_second else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTIGPU_DATA_DIR", str(folder))
        patch.setenv(MODELS_DIR, str(models))
        ran = optigpu({}, "run", str(job))
        assert ran.returncode in MEASURED, ran.stderr
        Keeper().keep(measured(LADDER, events.append, cancelled=stopped))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTIGPU_DATA_DIR", str(folder))
        yield folder


@pytest.fixture
def bundled(data: Path) -> Document:
    """The kept run of the bundled model."""
    return find(str(min((data / "runs").glob("*.json")))).document


@pytest.fixture
def run(data: Path) -> Document:
    """The kept ladder with two results."""
    return find("last").document


def imported(service: Served, run: Document) -> Any:
    return service.client.post("/v1/imports", json=run)


def ranked(service: Served) -> dict[tuple[str, str], float]:
    """The value of each row of the leaderboard, by its model and label; those of a busy machine as well."""
    boards = service.client.get("/v1/leaderboard", params={"include_invalid": True}).json()["boards"]
    return {
        (board["model"], row["label"]): row["value"]["value"] for board in boards for row in board["rows"]
    }


def figures(run: Document) -> dict[tuple[str, str], float]:
    """The same of the results of a run."""
    return {
        (result["variant"]["model"], result["variant"]["label"]): result["metrics"]["tokens_per_s"]["value"]
        for result in run["results"]
    }


def with_result(run: Document, **changes: Any) -> Document:
    """The run with fields of its first result changed."""
    first, *others = run["results"]
    return {**run, "results": [first | changes, *others]}


def with_variant(run: Document, **changes: Any) -> Document:
    """The run with fields of its first result's variant changed."""
    return with_result(run, variant=run["results"][0]["variant"] | changes)


def test_a_report_of_an_older_version_is_imported(service: Served) -> None:
    entered = optigpu({}, "import", str(OLDER), "--url", service.url)
    assert entered.returncode == 0, entered.stderr
    job = service.client.get(f"/v1/jobs/{entered.stdout.strip()}").json()
    assert job["reason"].endswith("Imported; it was measured on 2026-11-22 outside of this service.")
    assert ranked(service) == figures(json.loads(OLDER.read_text()))


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


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"index": 9}, "there is no variant 9"),
        ({"label": "faster"}, "its label is not that of variant 0"),
        ({"model": "preset:gpt2"}, "its model is not that of variant 0"),
        ({"stack": [{"name": "bf16"}]}, "its stack is not that of variant 0"),
        ({"workload": ONE["workload"] | {"prompt_tokens": 9}}, "its workload is not that of variant 0"),
        ({"workload_digest": "0" * 64}, "its workload_digest is not that of variant 0"),
        ({"variant_digest": "0" * 64}, "its variant_digest is not that of variant 0"),
    ],
)
def test_a_result_that_is_not_of_the_runs_request_is_refused(
    changes: Document, why: str, any_service: Served, run: Document
) -> None:
    before = any_service.count_jobs()
    answer = imported(any_service, with_variant(run, **changes))
    assert answer.status_code == 422
    assert answer.json()["detail"] == (
        f"The result {run['results'][0]['id']} is not one of the variants that the run's request plans: {why}."
    )
    assert any_service.count_jobs() == before


def with_weights(run: Document, weight_hash: str, *, digests: bool) -> Document:
    """The run with its first result measured, as it says, with other weights; with or without their digests."""
    (first, *_) = variants_of(JobSpec.model_validate(run["spec"]))
    provenance = run["results"][0]["provenance"] | {"weight_hash": weight_hash}
    changed = with_result(run, provenance=provenance)
    if not digests:
        return changed
    summary = summary_of(first.model_copy(update={"weights": weight_hash}))
    return with_variant(changed, **summary.model_dump(mode="json"))


def test_weights_are_those_of_the_digests_and_of_this_machine_where_it_has_them(
    service: Served, run: Document, bundled: Document
) -> None:
    """Who imports vouches for files that only the other machine has read; they rank beside the same files alone."""
    for document, digests, status in ((run, False, 422), (bundled, True, 422), (run, True, 201)):
        answer = imported(service, with_weights(document, "0" * 64, digests=digests))
        assert answer.status_code == status, answer.text
    assert service.count_jobs() == 1


NINTH = {"index": 9, "role": "alone", "label": "a", "status": "failed"}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"results": []}, "outcomes"),
        ({"outcomes": [{"index": 9, "status": "failed"}]}, "outcomes"),
        ({"attribution": {"metric": "tokens_per_s", "rows": [NINTH]}}, "attribution"),
    ],
)
def test_parts_that_do_not_tell_of_the_same_variants_are_refused(
    changes: Document, field: str, any_service: Served, run: Document
) -> None:
    answer = imported(any_service, {**run, **changes})
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == [field]
