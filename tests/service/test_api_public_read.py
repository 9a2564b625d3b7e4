"""A service with keys whose results everybody may read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.records import a_metric, a_result
from tests.service.serving import MATMUL, Served, serving

KEY = "a-first-key-that-is-long-enough"
WITH_KEY = {"Authorization": f"Bearer {KEY}"}
READS = (
    "/v1/jobs", "/v1/leaderboard", "/v1/leaderboard?format=csv", "/v1/workers", "/v1/hardware", "/v1/schema/job",
    "/v1/schema/techniques", "/metrics", "/", "/jobs", "/docs",
)  # fmt: skip


@pytest.fixture(params=["127.0.0.1", "0.0.0.0"])
def public(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    url = f"sqlite:///{tmp_path / 'optigpu.db'}"
    with serving(url, api_key=KEY, public_read=True, host=request.param) as served:
        yield served


@pytest.mark.slow
def test_whoever_has_no_key_may_read(public: Served) -> None:
    assert {path: public.client.get(path).status_code for path in READS} == dict.fromkeys(READS, 200)
    job = public.submit(None, **WITH_KEY)
    public.finish(public.claim(), a_result({"tflops": a_metric("tflops", 1.25)}, workload="matmul"))
    results = public.client.get(job["links"]["results"]).json()["results"]
    assert public.client.get(f"/v1/results/{results[0]['id']}/samples").status_code == 200
    assert "event: state" in public.client.get(job["links"]["events"]).text


def test_the_page_shows_jobs(public: Served) -> None:
    job = public.submit(None, **WITH_KEY)
    assert job["id"] in public.client.get("/jobs").text


CHALLENGES = {"HTTPBearer": "Bearer", "PilotToken": "Bearer", "DeviceSignature": "OptiGPU1", "nothing": None}
"""What a call without credentials is asked for, by the scheme that the document names."""


def test_every_call_that_writes_needs_a_key(public: Served) -> None:
    job = public.submit(None, **WITH_KEY)
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
        has_reason = not path.startswith(("/v1/webhooks/", "/v1/alerts/"))
        reason = {"params": {"reason": "Because."}} if has_reason else {}
        body: dict[str, Any] = {"json": MATMUL} if method == "POST" else reason
        answer = public.client.request(method, path, **body)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, challenge), path
    assert public.count_jobs() == 1
    assert public.client.get(job["links"]["self"]).json()["state"] == "queued"


def test_a_wrong_key_is_still_refused_and_a_right_one_still_writes(public: Served) -> None:
    assert public.client.get("/v1/jobs", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert public.client.post("/v1/jobs", json=MATMUL, headers=WITH_KEY).status_code == 202


def test_it_is_off_unless_asked_for(tmp_path: Path) -> None:
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", api_key=KEY) as served:
        assert served.client.get("/v1/jobs").status_code == 401
        assert served.client.get("/metrics").status_code == 401
        page = served.client.get("/", headers={"Accept": "text/html"})
        assert page.status_code == 401
        assert "OPTIGPU_PUBLIC_READ" in page.text


def test_readers_without_a_key_are_limited_by_their_address(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'optigpu.db'}"
    with serving(url, api_key=KEY, public_read=True, rate_limit="2/minute") as served:
        assert [served.client.get("/v1/jobs").status_code for _ in range(3)] == [200, 200, 429]
