"""Who serves: which workers live, what they have, what their self-tests found, and which hardware that is."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from optigpu.documents.selftest import CheckResult, CheckStatus, SelfCheck, Subject
from optigpu.documents.views import WorkerView
from optigpu.hardware import probe
from optigpu.hardware.catalog import devices
from optigpu.job.spec import JobSpec
from optigpu.models.held import MODELS_DIR
from optigpu.selftest import kept
from optigpu.store import jobs, leases, workers
from optigpu.store.database import Database, default_url
from optigpu.vocabulary import DeviceKind, utc_now
from tests.service.records import NOON, a_gpu_worker, a_spec, a_worker
from tests.service.serving import Served, look, migrated, submit, worker_context
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
