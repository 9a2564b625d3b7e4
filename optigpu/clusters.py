"""What a cluster's scheduler is asked to run for a job: a batch script, made without asking anybody. It holds no
secret: the service's address and the token come by the environment, which Slurm shows to nobody else."""

import os
import shlex
from collections.abc import Callable, Mapping
from math import ceil
from types import MappingProxyType

from optigpu.job.spec import JobSpec
from optigpu.vocabulary import DeviceKind, Frozen, Scheduler, SpecError

NAME_PREFIX = "optigpu-"
BESIDE_THE_LIMIT_S = 240.0
"""How much longer an allocation lasts than the job may measure: to start, to report, and to be told of its end."""
WARNED_S = 60
"""How long before the end of an allocation its pilot is told, so that it can report what it has."""


class Task(Frozen):
    """`name` is the launch's, by which a launcher finds it again. `options` are further options of the scheduler's
    command, and `setup` shell lines before the pilot."""

    name: str
    job_id: str
    spec: JobSpec
    options: tuple[str, ...] = ()
    setup: str = ""

    @property
    def minutes(self) -> int:
        return ceil((self.spec.limits.timeout_s + BESIDE_THE_LIMIT_S) / 60)

    @property
    def gpus(self) -> int:
        """How many GPUs it needs: a job measures one device."""
        return 0 if self.spec.device is DeviceKind.CPU else 1

    @property
    def command(self) -> tuple[str, ...]:
        return ("python", "-m", "worker", "--once", "--job", self.job_id, "--device", self.spec.device.value)


def name_of(launch_id: str) -> str:
    return f"{NAME_PREFIX}{launch_id}"


def options_of(text: str) -> tuple[str, ...]:
    """Options as they are written on a command line. Raises SpecError for a quotation that does not end."""
    try:
        return tuple(shlex.split(text))
    except ValueError:
        raise SpecError(f"OPTIGPU_LAUNCH_OPTIONS has a quotation mark without an end: {text!r}.") from None


def dry_task(spec: JobSpec) -> Task:
    """The job before it was posted, with this machine's settings of a launcher."""
    return Task(
        name=name_of("launch"),
        job_id="JOB_ID",
        spec=spec,
        options=options_of(os.environ.get("OPTIGPU_LAUNCH_OPTIONS", "")),
        setup=os.environ.get("OPTIGPU_LAUNCH_SETUP", ""),
    )


SLURM_OUTPUT = "/tmp/optigpu-%j.log"
"""On the node: no disk is shared. %j is Slurm's id of the job."""
_BODY = """\
# The locks of devices belong to this node, and not to a home directory that nodes share.
export OPTIGPU_LOCK_DIR="${OPTIGPU_LOCK_DIR:-/tmp/optigpu-locks-$(id -u)}"
"""


def slurm_script(task: Task) -> str:
    """The script: the node for this job alone, one GPU if it needs one, the job's time limit, and again after a node
    has failed. The pilot takes the place of the shell, so that Slurm's signals reach it."""
    options = [
        f"--job-name={task.name}",
        "--nodes=1",
        "--ntasks=1",
        "--exclusive",
        "--mem=0",
        *([f"--gres=gpu:{task.gpus}"] if task.gpus else []),
        f"--time={task.minutes}",
        f"--signal=B:TERM@{WARNED_S}",
        "--requeue",
        "--open-mode=append",
        "--chdir=/tmp",
        f"--output={SLURM_OUTPUT}",
        *task.options,
    ]
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options)]
    setup = [task.setup] if task.setup else []
    return "\n".join([*lines, _BODY.rstrip(), *setup, f"exec {shlex.join(task.command)}", ""])


SCRIPTS: Mapping[Scheduler, Callable[[Task], str]] = MappingProxyType({Scheduler.SLURM: slurm_script})
"""By its scheduler what makes the text that is submitted."""
