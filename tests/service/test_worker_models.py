"""What a worker advertises: the packages and models that it has, also those that come while it waits."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from optigpu.documents.views import WorkerView
from optigpu.hardware import probe
from optigpu.job.spec import JobSpec
from optigpu.models.held import MODELS_DIR
from optigpu.store import leases, workers
from optigpu.store.database import Database, default_url
from optigpu.vocabulary import DeviceKind
from tests.service.workers import look, migrated, submit, worker_context
from worker.capabilities import info
from worker.context import WorkerContext
from worker.sweeper import Sweeper

MINE = JobSpec.model_validate({"workload": {"kind": "generate"}, "model": "path:mine"})


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


def add_model(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def test_a_worker_lists_the_packages_that_are_installed(context: WorkerContext) -> None:
    view, software = listed(context.database), probe().software
    assert view.packages
    assert set(view.packages) <= set(software)
    assert "torch" not in view.packages, "every worker has it"


def test_a_folder_that_comes_later_is_listed_and_its_job_taken(context: WorkerContext, models: Path) -> None:
    job_id = submit(context.database, MINE)
    sweeper = Sweeper(context)
    sweeper.sweep()
    waiting = look(context.database, job_id).unserved
    assert waiting is not None
    assert waiting.name == "path:mine"
    add_model(models / "mine")
    sweeper.sweep()
    assert listed(context.database).models == ("path:mine",)
    assert look(context.database, job_id).unserved is None
    lease = context.write(lambda session: leases.claim(session, context.info, 30))
    assert lease is not None
    assert lease.job_id == job_id


def test_a_folder_that_goes_is_listed_no_more(context: WorkerContext, models: Path) -> None:
    add_model(models / "mine")
    Sweeper(context).sweep()
    (models / "mine" / "config.json").unlink()
    Sweeper(context).sweep()
    assert listed(context.database).models == ()


def test_nothing_is_searched_while_a_job_is_measured(context: WorkerContext, models: Path) -> None:
    add_model(models / "mine")
    context.job_id = submit(context.database, MINE)
    Sweeper(context).sweep()
    assert listed(context.database).models == ()


def test_a_worker_that_may_not_download_says_so(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "no cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Sweeper(context).sweep()
    assert not listed(context.database).downloads


def test_a_description_names_this_worker_s_packages_and_models(models: Path) -> None:
    add_model(models / "mine")
    described = info(
        DeviceKind.CPU, probe().model_copy(update={"software": {"bitsandbytes": "0.50", "triton": "3"}})
    )
    assert (described.packages, described.models) == (("bitsandbytes", "triton"), ("path:mine",))
