"""The batch script of a job for Slurm. It holds no secret: the service's address and the token come by the environment,
which Slurm shows to nobody else."""

import shlex

from optigpu.clusters.task import WARNED_S, Task

OUTPUT = "/tmp/optigpu-%j.log"
"""On the node: no disk is shared. %j is Slurm's id of the job."""
_BODY = """\
# The locks of devices belong to this node, and not to a home directory that nodes share.
export OPTIGPU_LOCK_DIR="${OPTIGPU_LOCK_DIR:-/tmp/optigpu-locks-$(id -u)}"
"""


def script(task: Task) -> str:
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
        f"--output={OUTPUT}",
        *task.options,
    ]
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options)]
    setup = [task.setup] if task.setup else []
    return "\n".join([*lines, _BODY.rstrip(), *setup, f"exec {shlex.join(task.command)}", ""])
