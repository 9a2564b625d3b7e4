"""Who serves, with which models, self-tests and hardware; and why nobody takes a queued job, a sentence each."""

from collections.abc import Iterator
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from optigpu.documents.selftest import CheckResult, CheckStatus, SelfCheck, Subject
from optigpu.documents.views import Unserved, Want, WorkerView
from optigpu.hardware import probe
from optigpu.hardware.catalog import devices
from optigpu.job.spec import JobSpec
from optigpu.models.held import MODELS_DIR
from optigpu.selftest import kept
from optigpu.store import jobs, leases, workers
from optigpu.store.database import Database, default_url
from optigpu.store.workers import LEASE_S, WorkerInfo
from optigpu.vocabulary import DeviceKind, utc_now
from tests.service.records import NOON, a_gpu_worker, a_spec, a_worker
from tests.service.serving import MATMUL, Served, look, migrated, submit, worker_context
from worker.capabilities import info
from worker.context import WorkerContext
from worker.sweeper import Sweeper

CPU = DeviceKind.CPU
MINE = JobSpec.model_validate({"workload": {"kind": "generate"}, "model": "path:mine"})


def test_a_worker_is_listed_from_its_start_until_it_leaves(database: Database) -> None:
    has: dict[str, Any] = {"packages": ("bitsandbytes",), "models": ("path:mine",), "downloads": False}
    with database.write() as session:
        workers.register(session, a_gpu_worker(**has), now=NOON)
        (view,) = workers.list_(session, now=NOON + timedelta(seconds=30))
        assert (view.gpus, view.backends, view.vram_bytes) == (("NVIDIA H200",), ("torch",), 141 * 10**9)
        assert (view.packages, view.models, view.downloads) == tuple(has.values())
        assert (view.started_at, view.seen_at, view.alive, view.job_id) == (NOON, NOON, True, None)
        workers.leave(session, view.id)
        assert workers.list_(session) == []


def test_a_silent_worker_is_listed_as_dead_and_after_a_week_forgotten(database: Database) -> None:
    with database.write() as session:
        workers.register(session, a_worker("silent"), now=NOON)
        workers.register(session, a_worker("alive"), now=NOON)
        job_id = jobs.submit(session, a_spec()).job.id
        workers.seen(session, "alive", job_id, now=NOON + timedelta(seconds=31))
        views = {view.id: view for view in workers.list_(session, now=NOON + timedelta(seconds=31))}
        assert (views["silent"].alive, views["alive"].alive, views["alive"].job_id) == (False, True, job_id)
        workers.register(session, a_worker("new"), now=NOON + timedelta(days=7, seconds=1))
        assert {view.id for view in workers.list_(session)} == {"alive", "new"}


@pytest.fixture
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path / "own-data"))


def keep_one() -> Path:
    check = SelfCheck(subject=Subject.TECHNIQUE, name="fp16", device=CPU)
    failed = CheckResult(check=check, status=CheckStatus.FAILED, reason="It is broken.")
    return kept.keep(kept.outcome_of(probe(), CPU, (failed,)), probe())


def test_a_worker_reads_its_last_self_test_when_it_starts(own_data: None) -> None:
    assert info(CPU, probe()).selftest is None
    path = keep_one()
    found = info(CPU, probe()).selftest
    assert found is not None
    assert (found.ok, found.failed, found.failed_names) == (0, 1, ("fp16",))
    path.write_text("half a fi")
    assert info(CPU, probe()).selftest is None


def test_everybody_sees_the_last_self_test(service: Served, own_data: None) -> None:
    keep_one()
    with service.database.write() as session:
        workers.register(session, a_worker(selftest=info(CPU, probe()).selftest))
        workers.register(session, a_worker("untested"))
    found = {each["id"]: each["selftest"] for each in service.client.get("/v1/workers").json()["workers"]}
    assert found["untested"] is None
    assert (found["worker-1"]["failed_names"], found["worker-1"]["failed"]) == (["fp16"], 1)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model directory."""
    folder = tmp_path / "models"
    folder.mkdir()
    monkeypatch.setenv(MODELS_DIR, str(folder))
    return folder


@pytest.fixture
def context(models: Path, tmp_path: Path) -> Iterator[WorkerContext]:
    """A worker of this machine's CPU that has registered."""
    with migrated(default_url(tmp_path)) as database:
        context = worker_context(database)
        context.info = info(DeviceKind.CPU, probe())
        context.write(lambda session: workers.register(session, context.info))
        yield context


def listed(database: Database) -> WorkerView:
    with database.read() as session:
        (view,) = workers.list_(session)
    return view


@pytest.mark.slow
def test_a_folder_that_comes_later_is_listed_while_it_is_there_and_its_job_taken(
    context: WorkerContext, models: Path
) -> None:
    job_id = submit(context.database, MINE)
    sweeper = Sweeper(context)
    sweeper.sweep()
    waiting = look(context.database, job_id).unserved
    assert waiting is not None
    assert waiting.name == "path:mine"
    (models / "mine").mkdir()
    (models / "mine" / "config.json").write_text("{}")
    sweeper.sweep()
    assert listed(context.database).models == ("path:mine",)
    assert look(context.database, job_id).unserved is None
    lease = context.write(lambda session: leases.claim(session, context.info, 30))
    assert lease is not None
    assert lease.job_id == job_id
    (models / "mine" / "config.json").unlink()
    sweeper.sweep()
    assert listed(context.database).models == ()


def test_a_worker_that_may_not_download_says_so(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "no cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Sweeper(context).sweep()
    assert not listed(context.database).downloads


def hardware(service: Served) -> dict[str, Any]:
    """What the service answers."""
    answer = service.client.get("/v1/hardware")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def served(service: Served) -> dict[str, list[str]]:
    """Each device of the catalog that a worker serves, with its workers."""
    return {entry["name"]: entry["served_by"] for entry in hardware(service)["catalog"] if entry["served_by"]}


def test_the_catalog_is_whole_even_where_nobody_serves(service: Served) -> None:
    answer = hardware(service)
    assert answer["hardware"] == []
    assert [entry["name"] for entry in answer["catalog"]] == [device.name for device in devices()]
    assert served(service) == {}


def test_living_workers_are_named_with_what_they_have(service: Served) -> None:
    with service.database.write() as session:
        workers.register(session, a_worker("cpu", hardware_class="AMD EPYC 9654 96 cores"))
        workers.register(session, a_gpu_worker("two", gpus=("NVIDIA H200", "NVIDIA H200")))
        workers.register(
            session,
            a_gpu_worker(
                "mixed",
                hardware_class="AMD EPYC 9654 96 cores",
                gpus=("NVIDIA H200", "NVIDIA L4", "NVIDIA A10G"),
            ),
        )
        workers.register(session, a_gpu_worker("gone"), now=utc_now() - timedelta(hours=1))
    found = served(service)
    assert {name: sorted(ids) for name, ids in found.items()} == {
        "AMD EPYC 9654": ["cpu"],
        "NVIDIA H200": ["mixed", "two"],
        "NVIDIA L4": ["mixed"],
    }


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
