"""A job that nobody can serve says so: in the answer to POST, when it is looked at, and on the page."""

from typing import Any

from optigpu.client import Client
from optigpu.store import workers
from tests.service.records import a_gpu_worker, a_worker
from tests.service.serving import MATMUL, Served

TPU = MATMUL | {"device": "cuda", "target": {"gpu": "TPU"}}
SENTENCE = "No live worker has a GPU named TPU; there are: NVIDIA H200."


def serve_with(service: Served, **changes: Any) -> None:
    with service.database.write() as session:
        workers.register(session, a_gpu_worker(**changes))


def test_the_answer_to_a_post_says_why_the_job_will_wait(service: Served) -> None:
    serve_with(service)
    job = service.submit(TPU)
    assert job["state"] == "queued"
    assert (job["unserved"]["want"], job["unserved"]["name"]) == ("gpu", "TPU")
    assert job["unserved"]["sentence"].startswith(SENTENCE)
    assert service.client.get(job["links"]["self"]).json() == job | {"queue_position": 1}


def test_the_sentence_goes_when_somebody_can_take_the_job(service: Served) -> None:
    serve_with(service)
    job = service.submit(TPU)
    serve_with(service, name="newcomer", gpus=("A TPU",))
    assert service.client.get(job["links"]["self"]).json()["unserved"] is None


def test_the_page_says_it_of_the_jobs_that_wait(service: Served) -> None:
    serve_with(service)
    with service.database.write() as session:
        workers.register(session, a_worker())
    service.submit()
    job = service.submit(TPU)
    page = service.client.get("/jobs").text
    assert job["id"] in page
    assert page.count(f"Waits: {SENTENCE}") == page.count("Waits: ") == 1


def test_a_client_reads_it(service: Served) -> None:
    with Client(service.url) as client:
        job = client.submit(MATMUL)
    assert job.unserved is not None
    assert job.unserved.want == "worker"


def test_workers_are_listed_with_the_packages_and_models_that_they_have(service: Served) -> None:
    serve_with(service, packages=("bitsandbytes",), models=("path:mine",), downloads=False)
    (worker,) = service.client.get("/v1/workers").json()["workers"]
    assert (worker["packages"], worker["models"], worker["downloads"]) == (
        ["bitsandbytes"],
        ["path:mine"],
        False,
    )


def test_a_job_cannot_ask_for_what_lies_outside_of_the_model_directories(service: Served) -> None:
    """A reference is compared with the names that workers list: no worker looks at its disk for a job that waits."""
    serve_with(service, device="cpu", gpus=(), models=("path:mine",))
    generate = {"workload": {"kind": "generate"}}
    for reference in ("path:/etc", "path:../mine", "path:mine/../../etc"):
        assert service.client.post("/v1/jobs", json=generate | {"model": reference}).status_code == 422
    answers = [service.submit(generate | {"model": f"path:{name}"}) for name in ("etc", "no-such-folder")]
    sentences = {job["unserved"]["sentence"].replace(job["model"], "X") for job in answers}
    assert len(sentences) == 1
