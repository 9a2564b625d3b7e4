"""The pilot as a process of its own, with the real engine and nothing but the service's address and a token."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from optigpu.job.spec import JobSpec
from optigpu.store import launches
from optigpu.vocabulary import JobState, Scheduler
from tests.service.processes import Processes, eventually, watched_processes
from tests.service.serving import Served, serving
from tests.service.workers import ENDLESS, look, matmul, measuring_processes

pytestmark = pytest.mark.slow
VARIABLES = ("OPTIGPU_DATABASE_URL", "OPTIGPU_REDIS_URL")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}") as found:
        yield found


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    folders = {name: str(tmp_path / name) for name in ("OPTIGPU_DATA_DIR", "OPTIGPU_LOCK_DIR")}
    with watched_processes(tmp_path, folders) as found:
        yield found


def started(served: Served, processes: Processes, spec: JobSpec) -> tuple[str, subprocess.Popen[bytes]]:
    """A job that was handed over, and its pilot."""
    served.submit(spec.model_dump(mode="json"))
    with served.database.write() as session:
        begun = launches.begin(session, Scheduler.SLURM)
    assert begun is not None
    assert not [name for name in VARIABLES if name in os.environ]
    handed = {"OPTIGPU_URL": served.url, "OPTIGPU_PILOT_TOKEN": begun.token}
    arguments = ("worker", "--once", "--job", begun.job_id, "--device", "cpu")
    return begun.job_id, processes.start(*arguments, **handed)


def test_a_pilot_measures_its_job_and_ends(served: Served, processes: Processes) -> None:
    job_id, pilot = started(served, processes, matmul(via="slurm"))
    assert pilot.wait(120) == 0
    job = look(served.database, job_id)
    assert job.state is JobState.SUCCEEDED, job.reason
    (result,) = served.client.get(f"/v1/jobs/{job_id}/results").json()["results"]
    samples = served.client.get(f"/v1/results/{result['id']}/samples").json()["samples"]
    assert samples["latency_s"][0]


def test_a_pilot_opens_no_port_and_its_end_leaves_the_job_to_the_next(
    served: Served, processes: Processes
) -> None:
    job_id, pilot = started(served, processes, matmul(via="slurm", measure=ENDLESS))
    of_it = psutil.Process(pilot.pid)
    assert eventually(lambda: measuring_processes(of_it))
    for process in (of_it, *of_it.children(recursive=True)):
        assert [each for each in process.net_connections() if each.status == psutil.CONN_LISTEN] == []
    pilot.terminate()
    assert pilot.wait(60) == 0
    job = look(served.database, job_id)
    assert (job.state, [each.outcome for each in job.attempts]) == (JobState.QUEUED, ["allocation_ended"])
    assert str(job.reason).startswith(
        "The scheduler ended the job's allocation. Nothing was measured by then."
    )
