"""Why nobody takes a queued job: a sentence for each thing that it may ask for, by the rule of the claim itself."""

from collections.abc import Iterator
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
from sqlalchemy.orm import Session

from optigpu.documents.views import Unserved, Want
from optigpu.job.spec import JobSpec
from optigpu.store import jobs, leases, workers
from optigpu.store.database import Database
from optigpu.store.workers import LEASE_S, WorkerInfo
from optigpu.vocabulary import utc_now
from tests.service.records import a_gpu_worker, a_spec, a_worker
from tests.service.serving import MATMUL, Served

ON_TINY = {"workload": {"kind": "generate"}, "model": "bundled:tiny"}
NF4 = ON_TINY | {"stack": [{"name": "nf4"}]}
TPU = {"device": "cuda", "target": {"gpu": "TPU"}}
OFFLINE: dict[str, Any] = {"downloads": False}
JOBS: list[dict[str, Any]] = [
    {},
    {"device": "cuda"},
    {"device": "cuda", "target": {"gpu": "h200"}},
    {"device": "cuda", "target": {"gpu": "%"}},
    {"device": "cuda", "target": {"min_vram_bytes": 141 * 10**9 + 1}},
    NF4,
    ON_TINY | {"backend": "llama_cpp"},
    ON_TINY | {"model": "path:mine"},
    ON_TINY | {"model": "hub:nobody/tiny@main"},
    NF4 | {"model": "hub:nobody/tiny@main", "device": "cuda"},
    ON_TINY | {"beside": [{"backend": "llama_cpp"}, {"stack": [{"name": "nf4"}]}]},
]
WORKERS = [
    a_worker(),
    a_worker(backends=("torch", "llama_cpp"), packages=("bitsandbytes",), **OFFLINE),
    a_worker(models=("path:mine", "hub:nobody/tiny@main"), **OFFLINE),
    a_gpu_worker(),
    a_gpu_worker(packages=("bitsandbytes",), vram_bytes=2 * 141 * 10**9),
    a_gpu_worker(gpus=("NVIDIA 100%",), **OFFLINE),
]
SENTENCE = "No live worker has a GPU named TPU; there are: NVIDIA H200."


@pytest.fixture
def session(database: Database) -> Iterator[Session]:
    with database.write() as session:
        yield session


def why(session: Session, spec: JobSpec, *serving: WorkerInfo) -> Unserved | None:
    """What is said of a new job while these workers are alive."""
    for worker in serving:
        workers.register(session, worker)
    return jobs.submit(session, spec).job.unserved


def test_without_a_worker_it_is_said_how_to_start_one(session: Session) -> None:
    assert why(session, a_spec()) == Unserved(
        want=Want.WORKER,
        name=None,
        sentence="No worker is alive. Start one with `python -m worker --device cpu`; one that the service starts by "
        "itself takes some seconds.",
    )


@pytest.mark.parametrize(
    ("job", "serving", "want", "name", "words"),
    [
        ({"device": "cuda"}, [a_worker()], Want.DEVICE, "cuda", "there are: cpu (1x Test CPU)"),
        (
            TPU,
            [a_worker(), a_gpu_worker(), a_gpu_worker("other", gpus=("NVIDIA A100",))],
            *(Want.GPU, "TPU", "there are: NVIDIA A100, NVIDIA H200"),
        ),
        (
            {"device": "cuda", "target": {"min_vram_bytes": 200 * 10**9}},
            [a_gpu_worker()],
            *(Want.MEMORY, "200000000000", "200.0 GB of memory; there are: NVIDIA H200 with 141.0 GB"),
        ),
        (
            ON_TINY | {"backend": "llama_cpp"},
            [a_worker(), a_gpu_worker()],
            *(Want.BACKEND, "llama_cpp", "there are: torch. Install"),
        ),
        (
            NF4,
            [a_worker(packages=("triton", "torchao"))],
            *(Want.PACKAGE, "bitsandbytes", "pip install -e '.[quant]'"),
        ),
        (
            ON_TINY | {"model": "path:mine"},
            [a_worker(models=("path:yours", "hub:nobody/tiny"))],
            *(Want.MODEL, "path:mine", "in its OPTIGPU_MODELS_DIR; there are: path:yours."),
        ),
        (
            ON_TINY | {"model": "hub:nobody/large"},
            [a_worker(models=("path:yours", "hub:nobody/tiny"), **OFFLINE)],
            *(Want.MODEL, "hub:nobody/large", "start a worker without HF_HUB_OFFLINE"),
        ),
    ],
)
def test_each_thing_that_is_asked_for_is_named_with_what_there_is_or_helps(
    session: Session, job: dict, serving: list[WorkerInfo], want: Want, name: str, words: str
) -> None:
    found = why(session, a_spec(**job), *serving)
    assert found is not None
    assert (found.want, found.name) == (want, name)
    assert words in found.sentence


def test_what_each_of_two_workers_lacks_is_not_said_of_both(session: Session) -> None:
    """One has the package and not the folder, the other the folder and not the package."""
    spec = a_spec(**(NF4 | {"model": "path:mine"}))
    found = why(
        session, spec, a_worker("a", packages=("bitsandbytes",)), a_worker("b", models=("path:mine",))
    )
    assert found is not None
    assert found.name == "path:mine"
    assert found.sentence.startswith(
        "No live worker on cpu that fits the job otherwise has path:mine in its OPTIGPU_MODELS_DIR; there are: none."
    )


def test_a_worker_that_comes_later_takes_the_job_and_the_sentence_goes(session: Session) -> None:
    assert why(session, a_spec(**TPU), a_gpu_worker()) is not None
    newcomer = a_gpu_worker("tpu", gpus=("Some TPU",))
    workers.register(session, newcomer)
    (waiting,) = jobs.list_(session).jobs
    assert jobs.get(session, waiting.id).unserved is None
    lease = leases.claim(session, newcomer, 30)
    assert lease is not None
    workers.leave(session, newcomer.id)
    assert jobs.get(session, waiting.id).unserved is None, "it runs"


def test_a_silent_worker_can_take_nothing(session: Session) -> None:
    workers.register(session, a_worker(), now=utc_now() - timedelta(seconds=LEASE_S + 60))
    job = jobs.submit(session, a_spec()).job
    assert job.unserved is not None
    assert job.unserved.want is Want.WORKER
    assert jobs.get(session, job.id, lease_s=LEASE_S + 600).unserved is None


@pytest.mark.slow
def test_a_job_is_said_to_wait_exactly_when_the_worker_would_not_claim_it(session: Session) -> None:
    takes = []
    for job, worker in product(JOBS, WORKERS):
        workers.register(session, worker)
        job_id = jobs.submit(session, a_spec(**job)).job.id
        waits = jobs.get(session, job_id).unserved is not None
        claimed = leases.claim(session, worker, 30) is not None
        assert waits is not claimed, (job, worker)
        takes.append(claimed)
        if waits:
            jobs.request_cancel(session, job_id)
        workers.leave(session, worker.id)
    assert {True, False} == set(takes)


FOR_A_TPU = MATMUL | {"device": "cuda", "target": {"gpu": "TPU"}}


def serve_with(service: Served, **changes: Any) -> None:
    with service.database.write() as session:
        workers.register(session, a_gpu_worker(**changes))


def test_the_answer_to_a_post_says_why_the_job_will_wait(service: Served) -> None:
    serve_with(service)
    job = service.submit(FOR_A_TPU)
    assert job["state"] == "queued"
    assert (job["unserved"]["want"], job["unserved"]["name"]) == ("gpu", "TPU")
    assert job["unserved"]["sentence"].startswith(SENTENCE)
    assert service.client.get(job["links"]["self"]).json() == job | {"queue_position": 1}


def test_the_page_says_it_of_the_jobs_that_wait(service: Served) -> None:
    serve_with(service)
    with service.database.write() as session:
        workers.register(session, a_worker())
    service.submit()
    job = service.submit(FOR_A_TPU)
    page = service.client.get("/jobs").text
    assert job["id"] in page
    assert page.count(f"Waits: {SENTENCE}") == page.count("Waits: ") == 1


def test_a_job_cannot_ask_for_what_lies_outside_of_the_model_directories(service: Served) -> None:
    """A reference is compared with the names that workers list: no worker looks at its disk for a job that waits."""
    serve_with(service, device="cpu", gpus=(), models=("path:mine",))
    generate = {"workload": {"kind": "generate"}}
    for reference in ("path:/etc", "path:../mine", "path:mine/../../etc"):
        assert service.client.post("/v1/jobs", json=generate | {"model": reference}).status_code == 422
    answers = [service.submit(generate | {"model": f"path:{name}"}) for name in ("etc", "no-such-folder")]
    sentences = {job["unserved"]["sentence"].replace(job["model"], "X") for job in answers}
    assert len(sentences) == 1
