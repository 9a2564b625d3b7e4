"""What stored documents name and the code no longer has: it is shown, and a new job that asks for it is refused."""

from typing import Any

import pytest

from optigpu.backends import BACKENDS
from optigpu.documents.result import Allocation, Result
from optigpu.documents.views import LaunchState
from optigpu.store.tables import Job, LaunchRow
from optigpu.vocabulary import Scheduler, new_id
from tests.service.records import NOON, a_result, a_spec
from tests.service.serving import MATMUL, Served

PLAIN = a_result(index=0)
REMOVED_BACKENDS = {"ctranslate2": ("ctranslate2_int8",), "executorch": ()}
"""With the stack of a stored result of each."""


def of_backend(name: str) -> Result:
    """A result that the backend measured while there was one."""
    made = a_result(index=1, stack=REMOVED_BACKENDS[name], software={name: "4.8.5"})
    variant = made.variant.model_copy(update={"backend": name, "label": name, "variant_digest": name})
    return made.model_copy(update={"variant": variant})


def stored(service: Served, *results: Result, spec: dict[str, Any]) -> str:
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
    job = stored(service, PLAIN, old, spec=a_spec().model_dump(mode="json") | {"backend": name})
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
    job = stored(service, old, spec=a_spec().model_dump(mode="json") | {"via": via.value})
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
