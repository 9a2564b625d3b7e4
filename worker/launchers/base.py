"""What every launcher offers, and the errors of schedulers:

SchedulerError: it refused, so that nothing was done.
  SchedulerAwayError: it is not there, did not answer in time, or answered nonsense: what it did is unknown.
"""

import os
import subprocess
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from optigpu.clusters import Task
from optigpu.documents.views import LaunchState
from optigpu.vocabulary import Frozen, OptiGPUError


class SchedulerError(OptiGPUError):
    """The scheduler refused."""


class SchedulerAwayError(SchedulerError):
    """The scheduler cannot be asked; the same call may succeed later."""


class Seen(Frozen):
    """What a scheduler says of a launch. `reference` is its own id of it; `reason` is why it has ended."""

    reference: str
    state: LaunchState
    reason: str | None = None


class Access(Frozen):
    """What a pilot is handed: the service's address, and the token of its job."""

    url: str
    token: str


class Launcher(Protocol):
    """The calls to one scheduler. Each ends in bounded time and raises SchedulerError."""

    def submit(self, task: Task, access: Access) -> str:
        """Hands the job over; returns the scheduler's id of it."""
        ...

    def status(self, references: Collection[str]) -> Mapping[str, Seen]:
        """Every launch that the scheduler knows, by its name; one of `references` that it has forgotten is left out."""
        ...

    def cancel(self, reference: str) -> None:
        """Ends it, whether it waits or runs. One that has ended already stays as it is."""
        ...


PATIENCE_S = 30.0
LONGEST_SAID = 300
PASSED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "SLURM_CONF", "KRB5CCNAME")
"""The variables that they get, and no other: this process has the database's address."""


def ask(command: Sequence[str], *, text: str = "", more: Mapping[str, str] | None = None) -> str:
    """What the program prints, for `text` on its stdin and with `more` variables.

    Raises SchedulerError if it refuses, SchedulerAwayError if it is not there or does not answer.
    """
    passed = {name: os.environ[name] for name in PASSED if name in os.environ} | dict(more or {})
    try:
        done = subprocess.run(
            command,
            input=text,
            env=passed,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE_S,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise SchedulerAwayError(
            f"{command[0]} is not installed here; start the launcher where the scheduler's programs are."
        ) from None
    except OSError as error:
        raise SchedulerAwayError(f"{command[0]} cannot be started: {error.strerror}.") from error
    except subprocess.TimeoutExpired:
        raise SchedulerAwayError(
            f"{command[0]} did not answer within {PATIENCE_S:g} s; check that the scheduler runs."
        ) from None
    if done.returncode:
        raise SchedulerError(f"{command[0]} refused: {_said(done.stderr or done.stdout)}")
    return done.stdout


def nonsense(program: str, answer: str) -> SchedulerAwayError:
    """The error for an answer that cannot be read."""
    return SchedulerAwayError(f"{program} answered what cannot be read: {_said(answer)}")


def _said(text: str) -> str:
    """The first line of it, without characters that a log or a database could not hold."""
    line = next((each.strip() for each in text.splitlines() if each.strip()), "nothing")
    return "".join(each if each.isprintable() else "?" for each in line)[:LONGEST_SAID]
