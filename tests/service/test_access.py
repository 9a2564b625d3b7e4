"""Who is let in and what is noted of it: pages of other origins, readers without a key, and the audit log."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.settings import SettingsError, read_settings
from optigpu.documents.administration import AuditAction
from optigpu.store import audit, keys
from optigpu.store.audit import Actor
from optigpu.store.database import Database
from optigpu.vocabulary import new_id
from tests.service.device_client import Claim, invited, manifest
from tests.service.records import a_metric, a_result
from tests.service.serving import MATMUL, Served, serving

pytestmark = pytest.mark.slow

ORIGIN = "https://bench.example.org"
STRANGER = "https://elsewhere.example.org"
PAGES = ("/", "/docs")
"""They load their own style sheet and scripts; whatever else is sent loads nothing."""
STRICT = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    **dict.fromkeys(
        ("referrer-policy", "cross-origin-resource-policy", "cross-origin-opener-policy"), "same-origin"
    ),
}
KEY = "a-first-key-that-is-long-enough"
WITH_KEY = {"Authorization": f"Bearer {KEY}"}
READS = (
    "/v1/jobs", "/v1/leaderboard", "/v1/leaderboard?format=csv", "/v1/workers", "/v1/hardware", "/v1/schema/job",
    "/v1/schema/techniques", "/metrics", "/", "/jobs", "/docs",
)  # fmt: skip
WHO = Actor(name="somebody")


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service behind https that pages of one origin may call."""
    url = f"sqlite:///{tmp_path_factory.mktemp('cors') / 'optigpu.db'}"
    with serving(url, cors_origins=(ORIGIN,), hsts_s=3600) as served:
        yield served


@pytest.mark.parametrize(
    ("path", "status"),
    [("/", 200), ("/v1/jobs", 200), ("/nothing", 404), ("/v1/jobs/x", 422), ("/docs", 200)],
)
def test_every_answer_has_strict_headers(any_service: Served, path: str, status: int) -> None:
    answer = any_service.client.get(path)
    assert answer.status_code == status
    assert {name: answer.headers[name] for name in STRICT} == STRICT
    policy = answer.headers["content-security-policy"]
    source = "'self'" if path in PAGES else "'none'"
    assert policy.startswith(f"default-src {source}; ")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert "strict-transport-security" not in answer.headers


def test_https_alone_is_asked_for_where_it_is_set(listed: Served) -> None:
    assert listed.client.get("/v1/jobs").headers["strict-transport-security"] == "max-age=3600"


def preflight(service: Served, origin: str) -> dict[str, str]:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    answer = service.client.options(
        "/v1/jobs", headers=headers | {"Access-Control-Request-Headers": "authorization"}
    )
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control")}


def test_no_page_of_another_origin_may_call_by_default(any_service: Served) -> None:
    assert preflight(any_service, ORIGIN) == {}
    answer = any_service.client.get("/v1/jobs", headers={"Origin": ORIGIN})
    assert "access-control-allow-origin" not in answer.headers


def test_a_page_of_an_origin_that_is_listed_may_call(listed: Served) -> None:
    allowed = preflight(listed, ORIGIN)
    assert allowed["access-control-allow-origin"] == ORIGIN
    assert "Authorization" in allowed["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in allowed
    answer = listed.client.post("/v1/jobs", json=MATMUL, headers={"Origin": ORIGIN})
    assert answer.status_code == 202
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "Location" in answer.headers["access-control-expose-headers"]
    wrong = listed.client.post("/v1/jobs", json={}, headers={"Origin": ORIGIN})
    assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (422, ORIGIN)


def test_a_page_of_any_other_origin_may_not(listed: Served) -> None:
    assert "access-control-allow-origin" not in preflight(listed, STRANGER)
    answer = listed.client.post("/v1/jobs", json=MATMUL, headers={"Origin": STRANGER})
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "origins", ["*", "null", "bench.example.org", "https://bench.example.org/", "https://*.example.org"]
)
def test_what_is_no_origin_is_refused(monkeypatch: pytest.MonkeyPatch, origins: str, tmp_path: Path) -> None:
    monkeypatch.setenv("OPTIGPU_CORS_ORIGINS", origins)
    with pytest.raises(SettingsError, match="OPTIGPU_CORS_ORIGINS"):
        read_settings(database_url=f"sqlite:///{tmp_path / 'optigpu.db'}")


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    url = f"sqlite:///{tmp_path_factory.mktemp('public') / 'optigpu.db'}"
    with serving(url, api_key=KEY, public_read=True, host="0.0.0.0") as served:
        yield served


def test_whoever_has_no_key_may_read(public: Served) -> None:
    assert {path: public.client.get(path).status_code for path in READS} == dict.fromkeys(READS, 200)
    job = public.submit(None, **WITH_KEY)
    assert job["id"] in public.client.get("/jobs").text
    public.finish(public.claim(), a_result({"tflops": a_metric("tflops", 1.25)}, workload="matmul"))
    results = public.client.get(job["links"]["results"]).json()["results"]
    assert public.client.get(f"/v1/results/{results[0]['id']}/samples").status_code == 200
    assert "event: state" in public.client.get(job["links"]["events"]).text


CHALLENGES = {"HTTPBearer": "Bearer", "PilotToken": "Bearer", "DeviceSignature": "OptiGPU1", "nothing": None}
"""What a call without credentials is asked for, by the scheme that the document names."""


def test_every_call_that_writes_needs_a_key(public: Served) -> None:
    job, before = public.submit(None, **WITH_KEY), public.count_jobs()
    document = public.client.get("/openapi.json").json()
    writes = {
        (method.upper(), path.replace("{id}", job["id"])): CHALLENGES[next(iter(security))]
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if method != "get"
        for security in operation.get("security", [{"nothing": []}])
    }
    # A claim proves by itself that it has an invitation's code.
    assert writes.pop(("POST", "/v1/devices/claim")) is None
    assert set(writes.values()) == {"Bearer", "OptiGPU1"}
    for (method, path), challenge in writes.items():
        has_reason = not path.startswith(("/v1/webhooks/", "/v1/alerts/", "/v1/imports/others/"))
        reason = {"params": {"reason": "Because."}} if has_reason else {}
        body: dict[str, Any] = {"json": MATMUL} if method == "POST" else reason
        answer = public.client.request(method, path, **body)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, challenge), path
    assert public.count_jobs() == before
    assert public.client.get(job["links"]["self"]).json()["state"] == "queued"


def test_a_wrong_key_is_still_refused_and_a_right_one_still_writes(public: Served) -> None:
    assert public.client.get("/v1/jobs", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert public.client.post("/v1/jobs", json=MATMUL, headers=WITH_KEY).status_code == 202


def test_it_is_off_unless_asked_for(tmp_path: Path) -> None:
    """Every call that the document says needs a key does."""
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", api_key=KEY) as served:
        paths = served.client.get("/openapi.json").json()["paths"]
        guarded = [path for path, methods in paths.items() if methods.get("get", {}).get("security")]
        assert {"/v1/jobs", "/metrics", "/v1/audit"} <= set(guarded)
        asked = {path: path.replace("{id}", new_id()).replace("{name}", "trace.json") for path in guarded}
        assert {path: served.client.get(place).status_code for path, place in asked.items()} == dict.fromkeys(
            guarded, 401
        )
        page = served.client.get("/", headers={"Accept": "text/html"})
        assert page.status_code == 401
        assert "OPTIGPU_PUBLIC_READ" in page.text


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


def test_an_entry_is_rolled_back_with_its_change(database: Database) -> None:
    def fail() -> None:
        with database.write() as session:
            audit.write(session, WHO, AuditAction.KEY_REVOKED, "a")
            raise RuntimeError("the change fails")

    with pytest.raises(RuntimeError):
        fail()
    with database.read() as session:
        assert audit.list_(session).changes == ()


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
