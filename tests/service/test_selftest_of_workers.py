"""A worker says what the last self-test of its device found."""

from pathlib import Path

import pytest

from optigpu.documents.selftest import CheckResult, CheckStatus, SelfCheck, Subject
from optigpu.hardware import probe
from optigpu.selftest import kept
from optigpu.store import workers
from optigpu.store.database import Database
from optigpu.vocabulary import DeviceKind
from tests.service.records import a_worker
from tests.service.serving import Served
from worker.capabilities import info

CPU = DeviceKind.CPU


@pytest.fixture(autouse=True)
def _data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path / "own-data"))


def keep_one() -> Path:
    check = SelfCheck(subject=Subject.TECHNIQUE, name="fp16", device=CPU)
    failed = CheckResult(check=check, status=CheckStatus.FAILED, reason="It is broken.")
    return kept.keep(kept.outcome_of(probe(), CPU, (failed,)), probe())


def test_a_worker_reads_it_when_it_starts() -> None:
    assert info(CPU, probe()).selftest is None
    path = keep_one()
    found = info(CPU, probe()).selftest
    assert found is not None
    assert (found.ok, found.failed, found.failed_names) == (0, 1, ("fp16",))
    path.write_text("half a fi")
    assert info(CPU, probe()).selftest is None


def test_it_is_stored_and_replaced(database: Database) -> None:
    keep_one()
    summary = info(CPU, probe()).selftest
    with database.write() as session:
        workers.register(session, a_worker(selftest=summary))
        assert [view.selftest for view in workers.list_(session)] == [summary]
        workers.register(session, a_worker())
        assert [view.selftest for view in workers.list_(session)] == [None]


def test_everybody_sees_it(service: Served) -> None:
    keep_one()
    with service.database.write() as session:
        workers.register(session, a_worker(selftest=info(CPU, probe()).selftest))
        workers.register(session, a_worker("untested"))
    found = {each["id"]: each["selftest"] for each in service.client.get("/v1/workers").json()["workers"]}
    assert found["untested"] is None
    assert found["worker-1"]["failed_names"] == ["fp16"]
    assert (found["worker-1"]["ok"], found["worker-1"]["failed"], found["worker-1"]["not_possible"]) == (
        0,
        1,
        0,
    )
