"""Jobs by a real Slurm of one node: pilots in its allocations report to a real service over HTTP."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from optigpu.documents.views import JobView, LaunchState
from optigpu.store import jobs
from optigpu.vocabulary import JobState, Scheduler
from tests.pages import ROOT
from tests.servers.slurm import Cluster
from tests.service.processes import eventually
from tests.service.serving import Served, serving
from worker.launch import LaunchLoop
from worker.launchers.slurm import Slurm
from worker.settings import LauncherSettings

pytestmark = pytest.mark.slow
LEASE_S = 4.0


@dataclass
class Site:
    """The cluster, the service and the launcher of a test."""

    cluster: Cluster
    served: Served
    loop: LaunchLoop
    folder: Path

    def submit(self, **fields: Any) -> str:
        workload = {"kind": "matmul", "sizes": [64]}
        return str(self.served.submit({"workload": workload, "via": "slurm"} | fields)["id"])

    def look(self, job_id: str) -> JobView:
        with self.served.database.read() as session:
            return jobs.get(session, job_id)

    def until(self, reached: Callable[[], bool], within_s: float = 60.0) -> None:
        """Rounds of the launcher until it is so."""

        def after_a_round() -> bool:
            self.loop.round()
            return reached()

        assert eventually(after_a_round, within_s), self.told()

    def until_state(self, job_id: str, state: JobState, within_s: float = 60.0) -> JobView:
        self.until(lambda: self.look(job_id).state is state, within_s)
        return self.look(job_id)

    def told(self) -> str:
        """What is to be read after a failure."""
        logs = [path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.log")]
        return "\n".join([self.cluster.ask("scontrol", "show", "job", "--oneliner"), *logs])

    def in_slurm(self) -> list[str]:
        """The names of the jobs that Slurm has not ended."""
        return self.cluster.ask("squeue", "--noheader", "--format=%j").split()


def python_for_pilots(folder: Path, program: str) -> str:
    """The lines of a setup after which `python -m worker` is the tests' own pilot."""
    folder.mkdir()
    wrapper = folder / "python"
    wrapper.write_text(f'#!/bin/bash\nshift 2\ncd {ROOT}\nexec {program} "$@"\n')
    wrapper.chmod(0o755)
    return f"export PATH={folder}:$PATH OPTIGPU_DATA_DIR={folder}/data OPTIGPU_LOCK_DIR={folder}/locks"


@contextmanager
def site(slurm: Cluster, folder: Path, program: str) -> Iterator[Site]:
    with serving(f"sqlite:///{folder / 'optigpu.db'}", lease_s=LEASE_S) as served:
        settings = LauncherSettings(
            url=served.url,
            launch_options=f"--output={folder}/%j.log",
            launch_setup=python_for_pilots(folder / "bin", program),
        )
        loop = LaunchLoop(Scheduler.SLURM, Slurm(), served.database, settings)
        yield Site(slurm, served, loop, folder)
        slurm.ask("scancel", "--quiet", "--user=root", "--name=none")


@pytest.fixture
def here(slurm: Cluster, tmp_path: Path) -> Iterator[Site]:
    with site(slurm, tmp_path, f"{sys.executable} -m tests.service.slurm_pilot") as found:
        yield found


def test_a_job_runs_in_an_allocation_which_its_result_names(here: Site) -> None:
    job_id = here.submit()
    job = here.until_state(job_id, JobState.SUCCEEDED)
    here.until(lambda: here.look(job_id).launch.state is LaunchState.ENDED)  # type: ignore[union-attr]
    launch = here.look(job_id).launch
    assert launch is not None
    (result,) = here.served.client.get(f"/v1/jobs/{job_id}/results").json()["results"]
    assert result["environment"]["allocation"] == {
        "scheduler": "slurm",
        "job_id": launch.reference,
        "gres": None,
        "cpuset": "0-1",
        "node_shared": False,
    }
    assert [attempt.outcome for attempt in job.attempts] == ["succeeded"]
    assert here.in_slurm() == []
