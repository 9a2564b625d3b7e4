"""Jobs over HTTP: posted, looked at, listed, cancelled, and what a worker leaves behind."""

import gzip
from datetime import datetime, timedelta

import httpx
import pytest

from optigpu.job.spec import JobSpec
from optigpu.vocabulary import new_id
from tests.service.records import a_metric, a_result
from tests.service.serving import MATMUL, Served


def test_a_posted_job_is_stored_and_can_be_looked_at(service: Served) -> None:
    posted = service.client.post("/v1/jobs", json=MATMUL)
    job = posted.json()
    assert posted.status_code == 202
    assert posted.headers["location"] == f"/v1/jobs/{job['id']}" == job["links"]["self"]
    assert (job["state"], job["queue_position"], job["spec"]["workload"]["sizes"]) == ("queued", None, [64])
    assert service.client.get(posted.headers["location"]).json() == job | {"queue_position": 1}


def test_a_job_with_stacks_of_another_backend_beside_its_own_is_stored_whole(service: Served) -> None:
    """Whether a worker has that backend is known when it runs the job, and ends one variant at the most."""
    beside = [
        {"backend": "llama_cpp", "stack": [{"name": "gguf", "type": "Q8_0"}], "label": "8 bits"},
        {"stack": [{"name": "bf16"}]},
    ]
    document = {"workload": {"kind": "generate"}, "model": "bundled:tiny", "beside": beside}
    job = service.client.get(service.submit(document)["links"]["self"]).json()
    assert job["state"] == "queued"
    assert [(each["backend"], each["label"]) for each in job["spec"]["beside"]] == [
        ("llama_cpp", "8 bits"),
        ("torch", None),
    ]
    assert job["spec"]["beside"][0]["stack"] == [{"name": "gguf", "type": "Q8_0", "pure": False}]
    stored = service.claim().spec
    assert stored == JobSpec.model_validate(document)


SCALING = {
    "workload": {"kind": "train_step"},
    "model": "preset:tiny-llama-test",
    "stack": [{"name": "gradient_checkpointing"}],
    "plan": "batch_scaling",
}


def test_a_job_that_looks_for_the_largest_batch_is_posted_as_any_other(service: Served) -> None:
    job = service.submit(SCALING | {"limits": {"max_bytes": 2e9}})
    assert (job["spec"]["plan"], job["spec"]["limits"]["max_bytes"]) == ("batch_scaling", 2e9)
    assert service.claim().spec.limits.max_batch == 256
    refused = service.client.post("/v1/jobs", json=SCALING)
    assert refused.status_code == 422
    assert "batch_scaling needs the memory that it may take" in refused.text


def test_a_search_is_not_refused_for_the_time_that_its_stacks_would_take_in_a_grid(service: Served) -> None:
    menu = [{"name": name} for name in ("bf16", "int8_weight_only", "static_kv_cache")]
    asked = {
        "workload": {"kind": "generate"},
        "model": "bundled:tiny",
        "stack": menu,
        "limits": {"timeout_s": 20},
    }
    assert service.submit(asked | {"plan": "search"})["state"] == "queued"
    assert service.client.post("/v1/jobs", json=asked | {"plan": "grid"}).status_code == 422


def test_times_are_utc(service: Served) -> None:
    created = service.submit()["created_at"]
    assert created.endswith("Z")
    assert datetime.fromisoformat(created).utcoffset() == timedelta(0)


def test_every_link_of_a_job_leads_somewhere(service: Served) -> None:
    links = service.submit()["links"]
    service.client.post(links["cancel"]).raise_for_status()
    for name in ("self", "events", "results"):
        assert service.client.get(links[name]).status_code == 200


def test_the_same_idempotency_key_answers_with_the_same_job(service: Served) -> None:
    first = service.submit(MATMUL, **{"Idempotency-Key": "one"})
    assert service.submit(MATMUL, **{"Idempotency-Key": "one"})["id"] == first["id"]
    assert service.submit(MATMUL, **{"Idempotency-Key": "two"})["id"] != first["id"]
    assert service.count_jobs() == 2


def test_the_same_idempotency_key_with_another_body_is_a_conflict(service: Served) -> None:
    service.submit(MATMUL, **{"Idempotency-Key": "one"})
    other = {"workload": {"kind": "matmul", "sizes": [128]}}
    answer = service.client.post("/v1/jobs", json=other, headers={"Idempotency-Key": "one"})
    assert answer.status_code == 409
    assert answer.headers["content-type"] == "application/problem+json"
    assert service.count_jobs() == 1


def test_jobs_are_listed_newest_first_page_by_page(service: Served) -> None:
    made = [service.submit()["id"] for _ in range(5)]
    seen, cursor = [], None
    while True:
        query = {"limit": "2"} | ({"cursor": cursor} if cursor else {})
        page = service.client.get("/v1/jobs", params=query).json()
        seen += [job["id"] for job in page["jobs"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == made[::-1]


def test_a_job_is_listed_with_its_name_and_tags(service: Served) -> None:
    service.submit(MATMUL | {"name": "A first look", "tags": ["paper", "zen4"], "note": "With the new fan."})
    (listed,) = service.client.get("/v1/jobs").json()["jobs"]
    assert (listed["name"], listed["tags"]) == ("A first look", ["paper", "zen4"])
    assert service.client.get(f"/v1/jobs/{listed['id']}").json()["spec"]["note"] == "With the new fan."
    assert len(service.client.get("/v1/jobs", params={"tag": "zen4"}).json()["jobs"]) == 1
    assert service.client.get("/v1/jobs", params={"tag": "zen"}).json()["jobs"] == []


def test_jobs_are_filtered_by_state(service: Served) -> None:
    queued, cancelled = service.submit()["id"], service.submit()["id"]
    service.client.post(f"/v1/jobs/{cancelled}/cancel")
    listed = {
        state: [job["id"] for job in service.client.get("/v1/jobs", params={"state": state}).json()["jobs"]]
        for state in ("queued", "cancelled", "running")
    }
    assert listed == {"queued": [queued], "cancelled": [cancelled], "running": []}


def test_a_queued_job_is_cancelled_at_once_and_again_without_harm(service: Served) -> None:
    job_id = service.submit()["id"]
    first, second = (service.client.post(f"/v1/jobs/{job_id}/cancel") for _ in range(2))
    assert (first.status_code, first.json()["state"]) == (200, "cancelled")
    assert second.json() == first.json()


def test_a_running_job_is_asked_to_stop(service: Served) -> None:
    job_id = service.submit()["id"]
    service.claim()
    job = service.client.post(f"/v1/jobs/{job_id}/cancel").json()
    assert job["state"] == "running"
    assert job["cancel_requested_at"]


def test_results_and_samples_of_a_finished_job(service: Served) -> None:
    job_id = service.submit()["id"]
    result = a_result({"tflops": a_metric("tflops", 1.5, (1.4, 1.6))}, workload="matmul")
    service.finish(service.claim(), result, samples={"tflops": ((1.4, 1.5, 1.6),)})
    document = service.client.get(f"/v1/jobs/{job_id}/results").json()
    assert set(document) == {"spec", "results", "attribution"}
    assert document["spec"]["workload"]["kind"] == "matmul"
    assert [found["id"] for found in document["results"]] == [result.id]
    stored = service.client.get(f"/v1/results/{result.id}").json()
    assert stored == document["results"][0]
    assert (stored["job_id"], stored["metrics"]["tflops"]["value"]) == (job_id, 1.5)
    samples = service.client.get(f"/v1/results/{result.id}/samples").json()
    assert samples == {"result_id": result.id, "samples": {"tflops": [[1.4, 1.5, 1.6]]}}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/jobs/{}"),
        ("POST", "/v1/jobs/{}/cancel"),
        ("GET", "/v1/jobs/{}/events"),
        ("GET", "/v1/jobs/{}/results"),
        ("GET", "/v1/results/{}"),
        ("GET", "/v1/results/{}/samples"),
        ("GET", "/v1/results/{}/artifacts"),
        ("GET", "/v1/results/{}/artifacts/trace.json"),
    ],
)
def test_what_is_not_there_is_not_found(any_service: Served, method: str, path: str) -> None:
    answer = any_service.client.request(method, path.format(new_id()))
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"


def test_an_id_may_be_written_in_capitals(service: Served) -> None:
    job_id = service.submit()["id"]
    assert service.client.get(f"/v1/jobs/{job_id.upper()}").json()["id"] == job_id


def test_workers_and_hardware_are_listed(service: Served) -> None:
    service.submit()
    lease = service.claim()
    workers = service.client.get("/v1/workers").json()["workers"]
    assert [(worker["id"], worker["alive"]) for worker in workers] == [(lease.worker_id, True)]
    assert service.client.get("/v1/hardware").json()["hardware"] == ["1x Test CPU"]


def test_answers_are_not_cached_and_long_ones_are_compressed(service: Served) -> None:
    for _ in range(3):
        service.submit()
    request = service.client.build_request("GET", "/v1/jobs", headers={"Accept-Encoding": "gzip"})
    answer = service.client.send(request, stream=True)
    raw = b"".join(answer.iter_raw())
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["content-encoding"] == "gzip"
    assert len(gzip.decompress(raw)) > len(raw)


def test_the_schema_calls_list_what_a_job_may_hold(any_service: Served) -> None:
    schema = any_service.client.get("/v1/schema/job").json()
    assert {"workload", "stack", "plan"} <= set(schema["properties"])
    techniques = any_service.client.get("/v1/schema/techniques").json()["techniques"]
    int8 = next(technique for technique in techniques if technique["name"] == "int8_weight_only")
    assert int8["layer"] == "quantization"
    assert {"summary", "requires", "conflicts", "schema"} <= set(int8)
    workloads = any_service.client.get("/v1/schema/workloads").json()["workloads"]
    backends = {workload["kind"]: workload["backends"] for workload in workloads}
    assert backends["generate"][:2] == ["torch", "llama_cpp"]
    assert {"onnxruntime", "openvino", "endpoint"} <= set(backends["generate"])
    assert backends["matmul"] == ["torch"]


def test_a_head_or_an_unknown_method_says_which_are_possible(any_service: Served) -> None:
    answer = any_service.client.request("DELETE", "/v1/jobs")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, POST")
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_page_of_another_origin_cannot_change_anything(service: Served) -> None:
    job_id = service.submit()["id"]
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        answer = service.client.post(f"/v1/jobs/{job_id}/cancel", headers=headers)
        assert answer.status_code == 403
    assert service.client.get(f"/v1/jobs/{job_id}").json()["state"] == "queued"
    own = service.client.post(f"/v1/jobs/{job_id}/cancel", headers={"Origin": service.url})
    assert own.json()["state"] == "cancelled"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[::1"])
def test_a_name_that_is_not_loopback_is_refused(any_service: Served, host: str) -> None:
    answer = any_service.client.get("/v1/jobs", headers={"Host": host})
    assert answer.status_code == 400
    assert answer.json()["errors"][0]["field"] == "Host"


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:80", "LOCALHOST"])
def test_every_name_of_loopback_is_allowed(any_service: Served, host: str) -> None:
    assert httpx.get(f"{any_service.url}/v1/jobs", headers={"Host": host}).status_code == 200
