"""Slurm: `sbatch`, `squeue`, `scontrol` and `scancel`, and what each of its states of a job means for a launch."""

import re
from collections.abc import Collection, Mapping

from pydantic import BaseModel, ValidationError

from optigpu.clusters import NAME_PREFIX, SCRIPTS, SLURM_OUTPUT, Task
from optigpu.documents.views import LaunchState
from optigpu.vocabulary import Scheduler
from worker.launchers.base import Access, SchedulerAwayError, SchedulerError, Seen, ask, nonsense

UNKNOWN_JOB = "Invalid job id"
AWAY = ("Unable to contact", "connect failure", "Socket timed out", "Connection refused", "Zero Bytes")
"""What Slurm's programs say while its controller does not answer."""
_ID = re.compile(r"[1-9][0-9]{0,9}")
WAITS = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "POWER_UP_NODE", "RESV_DEL_HOLD", "EXPEDITING"}
)
"""It has no nodes yet, or no longer and will get others."""
HELD = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT"})
"""It waits for a person, who may never come: to us it is over, and its token with it."""
BUSY = frozenset(
    {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT", "UPDATE_DB"}
)
"""Processes of it may be alive."""
OVER = frozenset(
    {
        *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"),
        *("OUT_OF_MEMORY", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"),
    }
)


class _Job(BaseModel):
    """The fields of a job that are read; newer versions of Slurm list several states."""

    job_id: int
    name: str = ""
    job_state: str | list[str]


class _Jobs(BaseModel):
    jobs: list[_Job]


class Slurm:
    """A cluster that has the programs of Slurm on this machine."""

    def submit(self, task: Task, access: Access) -> str:
        """The token goes by the environment: arguments are shown to everybody on this machine. Of that the job gets all
        that `sbatch` gets, which is little."""
        handed = {"OPTIGPU_URL": access.url, "OPTIGPU_PILOT_TOKEN": access.token}
        command = ["sbatch", "--parsable", "--export=ALL"]
        answer = _slurm(command, SCRIPTS[Scheduler.SLURM](task), handed)
        reference = answer.strip().partition(";")[0]
        if not _ID.fullmatch(reference):
            raise nonsense("sbatch", answer)
        return reference

    def status(self, references: Collection[str]) -> Mapping[str, Seen]:
        """`squeue` forgets a job some minutes after its end; then `scontrol` is asked for it."""
        answer = _slurm(["squeue", "--json", "--me", "--states=all"])
        try:
            jobs = _Jobs.model_validate_json(answer).jobs
        except ValidationError:
            raise nonsense("squeue", answer) from None
        found = {job.name: _seen(job) for job in jobs if job.name.startswith(NAME_PREFIX)}
        listed = {seen.reference for seen in found.values()}
        for reference in set(references) - listed:
            if job := _asked_for(reference):
                found[job.name] = _seen(job)
        return found

    def cancel(self, reference: str) -> None:
        try:
            _slurm(["scancel", reference])
        except SchedulerAwayError:
            raise
        except SchedulerError as error:
            if UNKNOWN_JOB not in str(error):
                raise


def _slurm(command: list[str], text: str = "", more: Mapping[str, str] | None = None) -> str:
    try:
        return ask(command, text=text, more=more)
    except SchedulerAwayError:
        raise
    except SchedulerError as error:
        if any(words in str(error) for words in AWAY):
            raise SchedulerAwayError(str(error)) from error
        raise


def _asked_for(reference: str) -> _Job | None:
    """The job; None if Slurm no longer knows it."""
    try:
        answer = _slurm(["scontrol", "show", "job", "--oneliner", reference])
    except SchedulerAwayError:
        raise
    except SchedulerError as error:
        if UNKNOWN_JOB in str(error):
            return None
        raise
    told = dict(re.findall(r"(?:^|\s)(JobId|JobName|JobState)=(\S*)", answer))
    try:
        return _Job(job_id=told["JobId"], name=told["JobName"], job_state=told["JobState"])
    except (KeyError, ValidationError):
        raise nonsense("scontrol", answer) from None


def _seen(job: _Job) -> Seen:
    names = [job.job_state] if isinstance(job.job_state, str) else job.job_state
    state, output = launch_state(names), SLURM_OUTPUT.replace("%j", str(job.job_id))
    reason = f"Slurm's job {job.job_id} ended as {' '.join(names)}; its output is {output} on its node."
    ended = state is LaunchState.ENDED
    return Seen(reference=str(job.job_id), state=state, reason=reason if ended else None)


def launch_state(names: Collection[str]) -> LaunchState:
    """A state with its flags, in any order. What Slurm calls by a name of a later version may still run."""
    said = set(names)
    if said & HELD:
        return LaunchState.ENDED
    if said & WAITS:
        return LaunchState.PENDING
    if said & BUSY or not said & OVER:
        return LaunchState.RUNNING
    return LaunchState.ENDED
