"""One job as it is handed to a scheduler."""

import os
import shlex
from math import ceil

from optigpu.job.spec import JobSpec
from optigpu.vocabulary import DeviceKind, Frozen, SpecError

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
