"""A job's deadline: a moment by which it has ended, whatever its time limit would allow."""

from datetime import datetime

from optigpu.job.spec import JobSpec
from optigpu.vocabulary import SpecError


def within_deadline(spec: JobSpec, now: datetime) -> JobSpec:
    """The job with its time limit cut to what is left until its deadline.

    Raises SpecError if nothing is left.
    """
    deadline = spec.limits.deadline
    if deadline is None:
        return spec
    left_s = (deadline - now).total_seconds()
    if left_s <= 0:
        raise SpecError(f"limits.deadline: {missed(deadline)}")
    if left_s >= spec.limits.timeout_s:
        return spec
    return spec.model_copy(update={"limits": spec.limits.model_copy(update={"timeout_s": left_s})})


def missed(deadline: datetime) -> str:
    """What is said of a job that had not begun by then."""
    return f"The deadline ({deadline:%Y-%m-%d %H:%M:%S} UTC) passed before the job began; post it with a later one."
