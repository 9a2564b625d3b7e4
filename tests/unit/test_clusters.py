"""What a scheduler is asked to run, and where: batch script, states, allocation. Nothing is submitted."""

import re
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from optigpu.cli import app
from optigpu.clusters import SCRIPTS, Task
from optigpu.documents.result import Allocation
from optigpu.documents.views import LaunchState
from optigpu.hardware.probe import SLURM_JOB, allocation
from optigpu.job.spec import JobSpec
from optigpu.vocabulary import Scheduler, SpecError
from tests.known import known
from worker.launchers.slurm import launch_state

JOB_ID = "0198c9a2-7b3e-7cc1-8f5d-2f0c1d1f6a11"


def a_task(device: str = "cuda", **fields: Any) -> Task:
    spec = JobSpec.model_validate(
        {"workload": {"kind": "matmul", "sizes": [64]}, "device": device, "via": "slurm"}
    )
    return Task(name=f"optigpu-{JOB_ID}", job_id=JOB_ID, spec=spec, **fields)


def test_a_batch_script_asks_for_a_node_a_gpu_and_the_job_s_time(tmp_path: Path) -> None:
    text = SCRIPTS[Scheduler.SLURM](a_task(options=("--partition=gpu",), setup="module load cuda"))
    options = re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)
    assert {"--exclusive", "--gres=gpu:1", "--time=34", "--requeue", "--partition=gpu"} <= set(options)
    *_, setup, last = text.splitlines()
    assert setup == "module load cuda"
    assert last == f"exec python -m worker --once --job {JOB_ID} --device cuda"
    script = tmp_path / "script"
    script.write_text(text)
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize(
    ("names", "state"),
    [
        (["PENDING"], LaunchState.PENDING),
        (["COMPLETED"], LaunchState.ENDED),
        (["RUNNING", "COMPLETING"], LaunchState.RUNNING),
        (["CANCELLED", "COMPLETING"], LaunchState.RUNNING),
        (["NODE_FAIL", "REQUEUED"], LaunchState.PENDING),
        (["PENDING", "REQUEUE_HOLD"], LaunchState.ENDED),
        (["A_STATE_OF_A_LATER_VERSION"], LaunchState.RUNNING),
        ([], LaunchState.RUNNING),
    ],
)
def test_each_of_slurm_s_states_is_one_of_ours(names: list[str], state: LaunchState) -> None:
    assert launch_state(names) is state


def told(tmp_path: Path, answer: str) -> tuple[str, ...]:
    """A scontrol that answers so."""
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    return (str(program),)


def test_slurm_says_what_it_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLURM_JOB, "12")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 5, 8, 9})
    line = "JobId=12 JobName=a OverSubscribe=OK Command=(null) TresPerNode=gres:gpu:2"
    found = allocation(told(tmp_path, f"echo '{line}'"))
    assert found == Allocation(
        scheduler=Scheduler.SLURM, job_id="12", gres="gpu:2", cpuset="0-2,5,8-9", node_shared=True
    )
    alone = known(allocation(told(tmp_path, "echo 'JobId=12 OverSubscribe=NO'")))
    assert (alone.gres, alone.node_shared) == (None, False)


@pytest.mark.parametrize("answer", ["exit 1", "echo nonsense", "sleep 9"])
def test_what_slurm_does_not_say_is_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setenv(SLURM_JOB, "12")
    monkeypatch.setattr(import_module("optigpu.hardware.probe"), "_PATIENCE_S", 0.2)
    found = known(allocation(told(tmp_path, answer)))
    assert (found.job_id, found.gres, found.node_shared) == ("12", None, None)


def printed(*arguments: str) -> str:
    """What `optigpu submit` prints; no service is asked."""
    found = CliRunner().invoke(app, ["submit", *arguments, "--url", "http://127.0.0.1:9"])
    assert found.exit_code == 0, found.output
    return found.stdout


def test_a_dry_run_prints_what_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIGPU_LAUNCH_OPTIONS", "--partition=gpu")
    text = printed("--via", "slurm", "--dry-run", "--workload", "matmul", "--device", "cuda")
    assert "#SBATCH --partition=gpu\n" in text
    assert text.endswith("exec python -m worker --once --job JOB_ID --device cuda\n")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--dry-run", "--workload", "matmul", "--device", "cpu"], "name one with --via slurm"),
        (["--via", "slurm", "--dry-run", "--workload", "matmul"], "name the device as well"),
        (["--via", "kubernetes", "--workload", "matmul", "--device", "cpu"], "Valid: slurm"),
    ],
)
def test_a_wrong_request_says_what_to_do(arguments: list[str], error: str) -> None:
    found = CliRunner().invoke(app, ["submit", *arguments, "--url", "http://127.0.0.1:9"])
    assert isinstance(found.exception, SpecError)
    assert error in str(found.exception)
