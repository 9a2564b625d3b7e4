"""Jobs by a real Slurm of one node: pilots in its allocations report to a real service over HTTP."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from optigpu.clusters import Task
from optigpu.documents.views import JobView, LaunchState
from optigpu.store import events, jobs, launches, queue
from optigpu.vocabulary import JobState, Scheduler
from tests.pages import ROOT
from tests.servers.slurm import Cluster
from tests.service.processes import eventually
from tests.service.serving import Served, serving
from worker.context import LauncherSettings
from worker.launch import LaunchLoop
from worker.launchers.base import Access
from worker.launchers.slurm import Slurm

pytestmark = pytest.mark.slow

LEASE_S = 4.0
JOBS = 12
PILOT = f"{sys.executable} -m tests.service.slurm_pilot"


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

    def running(self, job_id: str) -> str:
        """Slurm's id of the job, once its first variant, or the one that lasts, is measured."""

        def measures() -> bool:
            with self.served.database.read() as session:
                kinds = [event.kind for event in events.after(session, job_id, 0)]
            return kinds[-1:] == ["variant_started"]

        self.until(measures)
        launch = self.look(job_id).launch
        assert launch is not None
        assert launch.reference is not None
        return launch.reference

    def is_clear(self) -> bool:
        """Whether Slurm has nothing of ours any more, and every launch has ended."""
        self.loop.round()
        with self.served.database.read() as session:
            return not launches.live(session, Scheduler.SLURM) and not self.in_slurm()

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
def site(slurm: Cluster, folder: Path, program: str, options: str = "") -> Iterator[Site]:
    with serving(f"sqlite:///{folder / 'optigpu.db'}", lease_s=LEASE_S) as served:
        settings = LauncherSettings(
            url=served.url,
            launch_options=f"--output={folder}/%j.log {options}",
            launch_setup=python_for_pilots(folder / "bin", program),
        )
        loop = LaunchLoop(Scheduler.SLURM, Slurm(), served.database, settings)
        yield Site(slurm, served, loop, folder)


@pytest.fixture
def here(slurm: Cluster, tmp_path: Path) -> Iterator[Site]:
    with site(slurm, tmp_path, PILOT) as found:
        yield found


def test_a_job_runs_in_an_allocation_which_its_result_names(here: Site) -> None:
    job_id = here.submit()
    job = here.until_state(job_id, JobState.SUCCEEDED)
    here.until(lambda: here.look(job_id).launch.state is LaunchState.ENDED)  # type: ignore[union-attr]
    launch = here.look(job_id).launch
    assert launch is not None
    (result,) = here.served.client.get(f"/v1/jobs/{job_id}/results").json()["results"]
    cpus = os.sched_getaffinity(0)  # those of the tests, which started Slurm
    assert result["environment"]["allocation"] == {
        "scheduler": "slurm",
        "job_id": launch.reference,
        "gres": None,
        "cpuset": "-".join(map(str, sorted({min(cpus), max(cpus)}))),
        "node_shared": False,
    }
    assert [attempt.outcome for attempt in job.attempts] == ["succeeded"]
    assert here.in_slurm() == []


@pytest.mark.long
def test_a_cancel_reaches_a_pilot_and_a_job_that_still_waits(here: Site) -> None:
    runs = here.submit(note="60")
    here.running(runs)
    waits = here.submit()
    here.until(lambda: len(here.in_slurm()) == 2)
    for job_id in (waits, runs):
        here.served.client.post(f"/v1/jobs/{job_id}/cancel")
    assert here.look(waits).state is JobState.CANCELLED
    here.until_state(runs, JobState.CANCELLED)
    assert eventually(here.is_clear)
    assert here.look(waits).attempts == ()


@pytest.mark.long
def test_the_end_of_an_allocation_keeps_what_is_measured(here: Site) -> None:
    """Slurm's time limit, which counts whole minutes, and sends its warning a minute before: here at once."""
    workload = {"kind": "generate", "prompt_tokens": 8, "new_tokens": 4, "batch_size": 1}
    ladder = {"workload": workload, "model": "preset:tiny-llama-test", "stack": [{"name": "bf16"}]}
    job_id = here.submit(**ladder, plan="ladder", note="0.05,120")
    reference = here.running(job_id)
    here.cluster.ask("scontrol", "update", f"JobId={reference}", "TimeLimit=1")
    job = here.until_state(job_id, JobState.SUCCEEDED, within_s=90)
    assert job.reason == "The scheduler ended the job's allocation."
    assert [variant.status.value for variant in job.variants] == ["succeeded", "cancelled"]
    assert [attempt.outcome for attempt in job.attempts] == ["succeeded"]


@pytest.mark.parametrize(
    ("number", "outcome"),
    [("TERM", "allocation_ended"), ("KILL", "lost")],
)
@pytest.mark.long
def test_an_allocation_that_ends_before_anything_was_measured_is_followed_by_another(
    here: Site, number: str, outcome: str
) -> None:
    """The lease of a pilot that is killed runs out, as that of any worker."""
    job_id = here.submit(note="3")
    here.cluster.ask("scancel", f"--signal={number}", "--batch", here.running(job_id))
    job = here.until_state(job_id, JobState.SUCCEEDED)
    assert [attempt.outcome for attempt in job.attempts] == [outcome, "succeeded"]


@pytest.mark.long
def test_a_node_that_dies_gets_its_job_again_when_it_is_back(here: Site) -> None:
    """Slurm itself puts the allocation back, and its pilot has the same token."""
    job_id = here.submit(note="3")
    first = here.running(job_id)
    here.cluster.kill_the_node()
    here.until(lambda: here.cluster.node_state().startswith("down"))
    assert here.look(job_id).state is JobState.QUEUED
    here.cluster.start_the_node()
    job = here.until_state(job_id, JobState.SUCCEEDED, within_s=90)
    assert [attempt.outcome for attempt in job.attempts] == ["lost", "succeeded"]
    assert job.launch is not None
    assert job.launch.reference == first


class DyingLauncher(Slurm):
    """It dies again and again: before it has submitted a job, or before it could write that it did."""

    class DiedError(BaseException):
        pass

    submitted = 0

    def submit(self, task: Task, access: Access) -> str:
        type(self).submitted += 1
        if self.submitted % 13 == 5:
            raise self.DiedError
        reference = super().submit(task, access)
        if self.submitted % 7 == 3:
            raise self.DiedError
        return reference


@pytest.mark.long
def test_of_many_jobs_none_is_lost_and_none_runs_twice(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.launch.UNCONFIRMED", timedelta(seconds=2))
    with site(slurm, tmp_path, PILOT, "--exclusive=user --mem=10") as here:
        here.loop.launcher = DyingLauncher()
        job_ids = {here.submit(name=f"job {number}") for number in range(JOBS)}

        def all_ended() -> bool:
            with suppress(DyingLauncher.DiedError):
                here.loop.round()
            with here.served.database.read() as session:
                return queue.counts(session)[JobState.SUCCEEDED] == JOBS

        assert eventually(all_ended, within_s=200), here.told()
        assert eventually(here.is_clear)
        for job_id in job_ids:
            job = here.look(job_id)
            assert [each.outcome for each in job.attempts if each.outcome != "not_started"] == ["succeeded"]
            assert len(here.served.client.get(f"/v1/jobs/{job_id}/results").json()["results"]) == 1
    assert DyingLauncher.submitted > JOBS
