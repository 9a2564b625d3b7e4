"""The audit log: each change leaves an entry in its own transaction, and only administrators read it."""

from typing import Any

import pytest

from optigpu.documents.administration import AuditAction
from optigpu.store import audit, keys
from optigpu.store.audit import Actor
from optigpu.store.database import Database
from tests.service.device_client import Claim, invited, manifest
from tests.service.records import a_metric, a_result
from tests.service.serving import MATMUL, Served

WHO = Actor(name="somebody")


def changes(service: Served, **query: str) -> list[dict[str, Any]]:
    """The entries of the log, oldest first."""
    answer = service.client.get("/v1/audit", params=query)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["changes"]
    return found[::-1]


def actions(service: Served) -> list[str]:
    return [change["action"] for change in changes(service)]


def test_what_happens_to_a_job_is_written_once(service: Served) -> None:
    headers = {"Idempotency-Key": "same"}
    job, again = (service.submit(None, **headers) for _ in range(2))
    assert job["id"] == again["id"]
    for _ in range(2):
        service.client.post(job["links"]["cancel"])
    for _ in range(2):
        assert service.client.delete(f"{job['links']['self']}?reason=Wrong.").status_code == 200
    assert actions(service) == ["job.submitted", "job.cancelled", "job.withdrawn"]
    (withdrawn,) = [change for change in changes(service) if change["action"] == "job.withdrawn"]
    assert (withdrawn["target"], withdrawn["details"]) == (job["id"], {"reason": "Wrong."})
    assert withdrawn["address"] == "127.0.0.1"


def test_an_entry_names_the_key_and_the_request(guarded: Served) -> None:
    with guarded.database.write() as session:
        plain = keys.create(session, "alice", ["admin"])
        (key,) = keys.list_(session)
    guarded.client.headers["Authorization"] = f"Bearer {plain}"
    try:
        answer = guarded.client.post("/v1/jobs", json=MATMUL)
        (entry,) = changes(guarded)
    finally:
        del guarded.client.headers["Authorization"]
    assert (entry["name"], entry["key_id"]) == ("alice", key.id)
    assert entry["request_id"] == answer.headers["x-request-id"]
    assert plain not in str(entry)


def test_other_changes_are_written_too(service: Served) -> None:
    service.submit()
    result = a_result({"tflops": a_metric("tflops", 1.0)}, workload="matmul")
    service.finish(service.claim(), result)
    assert service.client.delete(f"/v1/results/{result.id}?reason=Wrong.").status_code == 200
    assert service.client.post("/v1/edge/models", json=manifest()).status_code == 201
    assert (
        service.client.post("/v1/devices/claim", json=Claim(invited(service.database)).body).status_code
        == 201
    )
    body = {"url": "https://hooks.example.org", "events": ["job.finished"]}
    webhook = service.client.post("/v1/webhooks", json=body).json()
    service.client.delete(f"/v1/webhooks/{webhook['id']}")
    assert actions(service) == [
        "job.submitted",
        "result.withdrawn",
        "edge_model.added",
        "device.invited",
        "device.enrolled",
        "webhook.created",
        "webhook.deleted",
    ]
    assert webhook["secret"] not in str(changes(service))
    assert [each["action"] for each in changes(service, target=webhook["id"])] == [
        "webhook.created",
        "webhook.deleted",
    ]


def test_a_change_that_is_refused_leaves_no_entry(service: Served) -> None:
    assert service.client.post("/v1/jobs", json={"workload": {"kind": "x"}}).status_code == 422
    running = service.submit()
    service.claim()
    assert service.client.delete(f"{running['links']['self']}?reason=x").status_code == 409
    assert actions(service) == ["job.submitted"]


def test_an_entry_is_rolled_back_with_its_change(database: Database) -> None:
    def fail() -> None:
        with database.write() as session:
            audit.write(session, WHO, AuditAction.KEY_REVOKED, "a")
            raise RuntimeError("the change fails")

    with pytest.raises(RuntimeError):
        fail()
    with database.read() as session:
        assert audit.list_(session).changes == ()


def test_the_log_is_read_page_by_page(service: Served) -> None:
    with service.database.write() as session:
        for number in range(5):
            audit.write(session, WHO, AuditAction.KEY_CREATED, str(number))
    seen, query = [], {"limit": "2"}
    while True:
        page = service.client.get("/v1/audit", params=query).json()
        seen += [change["target"] for change in page["changes"]]
        if page["next_cursor"] is None:
            break
        query["cursor"] = page["next_cursor"]
    assert seen == ["4", "3", "2", "1", "0"]


@pytest.mark.parametrize("path", ["/v1/audit", "/v1/webhooks"])
def test_only_an_administrator_reads_it(guarded: Served, path: str) -> None:
    with guarded.database.write() as session:
        made = {scope: keys.create(session, scope, [scope]) for scope in ("read", "submit", "admin")}
    answers = {
        scope: guarded.client.get(path, headers={"Authorization": f"Bearer {key}"}).status_code
        for scope, key in made.items()
    }
    assert answers == {"read": 403, "submit": 403, "admin": 200}
    assert guarded.client.get(path).status_code == 401
