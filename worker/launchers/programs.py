"""Calls of a scheduler's programs: each has a time limit, and whatever goes wrong is one sentence."""

import os
import subprocess
from collections.abc import Mapping, Sequence

from worker.launchers.base import SchedulerAwayError, SchedulerError

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
