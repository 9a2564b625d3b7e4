"""What a cluster's scheduler gave to this process, from its variables and, where it can be asked, from itself."""

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from itertools import pairwise

from optigpu.documents.result import Allocation
from optigpu.vocabulary import Scheduler

SLURM_JOB = "SLURM_JOB_ID"
ASK_SLURM = ("scontrol", "show", "job", "--oneliner")
_PATIENCE_S = 5.0


def allocation(ask: Sequence[str] = ASK_SLURM) -> Allocation | None:
    """The allocation that this process runs in; None outside of one. `ask` is the program that says more of it."""
    if job_id := os.environ.get(SLURM_JOB):
        return _of_slurm(job_id, ask)
    return None


def _of_slurm(job_id: str, ask: Sequence[str]) -> Allocation:
    """Without an answer only the job's id and the CPUs are known."""
    told = _fields(_answer([*ask, job_id]))
    shared = told.get("OverSubscribe")
    return Allocation(
        scheduler=Scheduler.SLURM,
        job_id=job_id,
        gres=told.get("TresPerNode", "").removeprefix("gres:") or None,
        cpuset=_cpuset(),
        node_shared=None if shared is None else shared != "NO",
    )


def _answer(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE_S)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _fields(line: str) -> dict[str, str]:
    """`JobId=7 OverSubscribe=NO ...` by names."""
    return dict(re.findall(r"(?:^|\s)([A-Z][\w:/]*)=(\S*)", line))


def _cpuset() -> str | None:
    """The CPUs that this process may use, as 0-3,8; None where the system does not say."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    return ",".join(_ranges(sorted(os.sched_getaffinity(0))))


def _ranges(numbers: Sequence[int]) -> Iterable[str]:
    starts = [numbers[0], *(after for before, after in pairwise(numbers) if after != before + 1)]
    ends = [*(before for before, after in pairwise(numbers) if after != before + 1), numbers[-1]]
    return (
        str(first) if first == last else f"{first}-{last}" for first, last in zip(starts, ends, strict=True)
    )
