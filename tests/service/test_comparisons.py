"""Stored results: compared, followed through time, and shown when what they name is no longer there."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from optigpu.backends import BACKENDS
from optigpu.client import Client
from optigpu.documents.result import Allocation, MetricSummary, Result
from optigpu.documents.views import Comparison, Decision, LaunchState
from optigpu.store.tables import Job, LaunchRow, ResultRow
from optigpu.vocabulary import Scheduler, new_id
from tests.service.records import NOON, a_metric, a_result, a_spec, a_sure_speed, entered
from tests.service.serving import MATMUL, Served

pytestmark = pytest.mark.slow

OLD, NEW = {"optigpu": "0.1.0", "torch": "2.13.0"}, {"optigpu": "0.1.0", "torch": "2.14.0"}
PLAIN = a_result(index=0)
REMOVED_BACKENDS = {"ctranslate2": ("ctranslate2_int8",), "executorch": ()}
"""With the stack of a stored result of each."""


def measured(name: str, medians: Sequence[float]) -> dict[str, MetricSummary]:
    """A metric of several processes."""
    value = float(np.mean(medians))
    changes = {"per_replicate": tuple(medians), "replicates": len(medians)}
    return {name: a_metric(name, value).model_copy(update=changes)}


SLOW = a_result(measured("tokens_per_s", (100.0, 101.0, 99.0)), index=0)
FAST = a_result(measured("tokens_per_s", (200.0, 201.0, 199.0)), index=1, stack=("bf16",))
ELSEWHERE = a_result(measured("tokens_per_s", (900.0, 901.0)), index=2, hardware="1x Other GPU")
OTHER = a_result(measured("tokens_per_s", (50.0, 51.0)), index=3, size=2)


@pytest.fixture
def compared(service: Served) -> Served:
    """A service that holds the four results."""
    service.submit()
    service.finish(service.claim(), SLOW, FAST, ELSEWHERE, OTHER)
    return service


def get(service: Served, baseline: Result, candidate: Result, **query: Any) -> Any:
    """What the call answers."""
    ids = {"baseline": baseline.id, "candidate": candidate.id}
    return service.client.get("/v1/compare", params=ids | query)


def test_a_faster_variant_is_better_and_the_other_way_round_worse(compared: Served) -> None:
    answer = get(compared, SLOW, FAST)
    assert answer.status_code == 200, answer.text
    found = Comparison.model_validate_json(answer.content)
    speed = found.metrics["tokens_per_s"]
    assert speed.ratio == pytest.approx(2)
    assert speed.ci is not None
    assert speed.ci[0] < 2 < speed.ci[1]
    assert speed.decision is Decision.BETTER
    assert (found.baseline.id, found.candidate.label) == (SLOW.id, "bf16")
    assert get(compared, FAST, SLOW).json()["metrics"]["tokens_per_s"]["decision"] == "worse"


def test_what_version_1_stored_is_shown_as_it_was_and_compared(compared: Served) -> None:
    quality = {"quality": {"text": "self", "tokens_sha256": "a" * 64}}
    older = {"schema_version": 1, "details": {"decode_loop": "transformers generate"} | quality}
    with compared.database.write() as session:
        row = session.get_one(ResultRow, SLOW.id)
        row.document = {name: value for name, value in row.document.items() if name != "facts"} | older
    shown = compared.client.get(f"/v1/results/{SLOW.id}").json()
    assert (shown["schema_version"], shown["details"]) == (1, older["details"])
    answer = get(compared, SLOW, FAST)
    assert answer.status_code == 200, answer.text
    assert answer.json()["metrics"]["tokens_per_s"]["decision"] == "better"


@pytest.mark.parametrize(("other", "word"), [(ELSEWHERE, "hardware"), (OTHER, "workloads")])
def test_what_does_not_compare_is_a_conflict_unless_it_is_wanted(
    compared: Served, other: Result, word: str
) -> None:
    refused = get(compared, SLOW, other)
    assert refused.status_code == 409
    assert refused.headers["content-type"] == "application/problem+json"
    assert word in refused.json()["detail"]
    wanted = get(compared, SLOW, other, anyway=True)
    assert wanted.status_code == 200
    assert word in wanted.json()["notes"][0]


def test_samples_are_streamed_as_they_were_stored(service: Served) -> None:
    """More than one piece, replicates of different lengths, one of them empty."""
    rng = np.random.default_rng(3)
    raw = {
        "tflops": (tuple(rng.random(10_000).tolist()), (), tuple(rng.random(4096).tolist())),
        "latency_s": ((0.1 + 0.2, 5e-324, -0.0, 1.7976931348623157e308),),
    }
    service.submit()
    service.finish(service.claim(), SLOW, samples=raw)
    answer = service.client.get(f"/v1/results/{SLOW.id}/samples")
    assert answer.headers["content-type"] == "application/json"
    expected = {name: [list(each) for each in replicates] for name, replicates in raw.items()}
    assert answer.json() == {"result_id": SLOW.id, "samples": expected}
    with Client(service.url) as client:
        assert client.samples(SLOW.id).samples == raw


def test_a_history_has_the_valid_results_of_the_place_in_order_and_the_changes_of_their_level(
    service: Served,
) -> None:
    slow = [measured_at(hour, 10.0 + 0.1 * (hour % 3), OLD) for hour in range(8)]
    fast = [measured_at(hour, 20.0 + 0.1 * (hour % 3), NEW) for hour in range(8, 16)]
    others = [
        measured_at(3, 99.0, OLD, valid=False),
        measured_at(3, 99.0, OLD, hardware="2x Test CPU"),
        measured_at(3, 99.0, OLD, stack=("bf16",)),
    ]
    entered(service.database, *fast, *slow, *others)
    found = history(service, slow[0].id)
    assert [point["result_id"] for point in found["points"]] == [each.id for each in slow + fast]
    assert [point["standing"] for point in found["points"]].count("current") == 1
    assert found["points"][0]["ci"] == [9.9, 10.1]
    (change,) = found["changes"]
    assert (change["result_id"], change["improved"]) == (fast[0].id, True)
    assert change["versions"] == {"torch": ["2.13.0", "2.14.0"]}
    assert (found["label"], found["hardware"], found["metric"]) == ("baseline", "1x Test CPU", "tokens_per_s")


def test_a_long_history_comes_in_pages_the_newest_first(service: Served) -> None:
    made = [measured_at(hour, 1.0 + hour, OLD) for hour in range(5)]
    entered(service.database, *made)
    newest = history(service, made[0].id, limit=3)
    older = history(service, made[0].id, limit=3, cursor=newest["next_cursor"])
    assert [point["value"] for point in older["points"] + newest["points"]] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert older["next_cursor"] is None


def test_a_history_of_nothing_is_refused_with_a_reason(service: Served) -> None:
    entered(service.database, made := measured_at(0, 1.0, OLD))
    missing = service.client.get("/v1/results/0198c9a2-7b3e-7cc1-8f5d-2f0c1d1f6a11/history")
    assert (missing.status_code, "There is no result" in missing.json()["detail"]) == (404, True)
    for query in ("metric=speed", "limit=0", "limit=1001", "cursor=x", "metrics=tokens_per_s"):
        assert service.client.get(f"/v1/results/{made.id}/history?{query}").status_code == 422
    assert history(service, made.id, metric="ttft_s")["points"] == []


def measured_at(hour: int, value: float, software: dict[str, str], **changes: Any) -> Result:
    return a_sure_speed(value, measured_at=NOON + timedelta(hours=hour), software=software, **changes)


def history(service: Served, result_id: str, **query: Any) -> dict[str, Any]:
    answer = service.client.get(f"/v1/results/{result_id}/history", params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def of_backend(name: str) -> Result:
    """A result that the backend measured while there was one."""
    made = a_result(index=1, stack=REMOVED_BACKENDS[name], software={name: "4.8.5"})
    variant = made.variant.model_copy(update={"backend": name, "label": name, "variant_digest": name})
    return made.model_copy(update={"variant": variant})


def posted_once(service: Served, *results: Result, spec: dict[str, Any]) -> str:
    """The id of a job that was posted as `spec` once, and has ended with these results."""
    job = str(service.submit()["id"])
    service.finish(service.claim(), *results)
    with service.database.write() as session:
        session.get_one(Job, job).spec = spec
    return job


def launch_of(job: str, via: Scheduler) -> LaunchRow:
    """One that has ended."""
    times = {"created_at": NOON, "expires_at": NOON, "ended_at": NOON}
    return LaunchRow(
        id=new_id(),
        job_id=job,
        scheduler=via,
        state=LaunchState.ENDED,
        fencing=1,
        token_hash="a" * 64,
        **times,
    )


@pytest.mark.parametrize("name", REMOVED_BACKENDS)
def test_a_result_of_a_removed_backend_is_shown_compared_and_filtered_by(service: Served, name: str) -> None:
    old = of_backend(name)
    job = posted_once(service, PLAIN, old, spec=a_spec().model_dump(mode="json") | {"backend": name})
    assert service.client.get(f"/v1/results/{old.id}").json()["variant"]["backend"] == name
    assert service.client.get(f"/v1/jobs/{job}").json()["spec"]["backend"] == name
    compared = service.client.get("/v1/compare", params={"baseline": PLAIN.id, "candidate": old.id})
    assert compared.status_code == 200, compared.text
    board = service.client.get("/v1/leaderboard", params={"backend": name})
    assert [row["result_id"] for each in board.json()["boards"] for row in each["rows"]] == [old.id]
    for page in (f"/results/{old.id}", f"/jobs/{job}", "/", f"/compare?result={PLAIN.id}&result={old.id}"):
        assert service.client.get(page).status_code == 200, page


def test_a_job_and_a_result_of_a_retired_scheduler_are_shown(service: Served) -> None:
    allocation = Allocation(scheduler=Scheduler.KUBERNETES, job_id="optigpu-7")
    old = PLAIN.model_copy(
        update={"environment": PLAIN.environment.model_copy(update={"allocation": allocation})}
    )
    via = Scheduler.KUBERNETES
    job = posted_once(service, old, spec=a_spec().model_dump(mode="json") | {"via": via.value})
    with service.database.write() as session:
        session.get_one(Job, job).via = via
        session.add(launch_of(job, via))
    shown = service.client.get(f"/v1/jobs/{job}").json()
    assert (shown["spec"]["via"], shown["launch"]["scheduler"]) == (via, via)
    assert service.client.get(f"/v1/results/{old.id}").json()["environment"]["allocation"]["scheduler"] == via
    for page in (f"/jobs/{job}", f"/results/{old.id}"):
        assert service.client.get(page).status_code == 200, page
    refused = service.client.post("/v1/jobs", json=MATMUL | {"device": "cpu", "via": via})
    assert refused.status_code == 422
    assert refused.json()["detail"] == "via: Unknown value 'kubernetes'. Valid: slurm."


@pytest.mark.parametrize("name", REMOVED_BACKENDS)
def test_a_job_that_asks_for_a_removed_backend_is_told_which_there_are(service: Served, name: str) -> None:
    job = {"workload": {"kind": "generate"}, "model": "preset:gpt2", "backend": name}
    refused = service.client.post("/v1/jobs", json=job)
    assert refused.status_code == 422
    assert f"backend: Unknown value '{name}'" in refused.json()["detail"]
    (error,) = refused.json()["errors"]
    assert set(BACKENDS) == set(error["valid"])
