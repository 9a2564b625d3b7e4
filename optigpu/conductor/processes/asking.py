"""Sends one message to a measuring process and waits for its answer, while the job's limits are checked."""

import logging
from typing import Protocol, TypeVar

from optigpu.child.messages import Answer, Broken, Progress, Refused
from optigpu.conductor.processes.child import Child, readable
from optigpu.vocabulary import Frozen, OutOfMemoryError, ReplicateError, UnsupportedError

Wanted = TypeVar("Wanted", bound=Frozen)

_log = logging.getLogger(__name__)


class Watch(Protocol):
    """The limits that hold while an answer is waited for, as JobProgress has them."""

    def check(self) -> None:
        """Called at least twice a second; raises to stop waiting."""

    def show(self, doing: str) -> None:
        """The process says what it is busy with."""


def ask(child: Child, message: Frozen, wanted: type[Wanted], progress: Watch) -> Wanted:
    """Sends a message and waits for its answer.

    Raises UnsupportedError when the process refuses, ReplicateError when it fails, and what `progress.check` raises.
    """
    child.tell(message)
    return hear(child, wanted, progress)


def hear(child: Child, wanted: type[Wanted], progress: Watch) -> Wanted:
    """Waits for the answer to what the process was told. Raises what `ask` raises."""
    while True:
        progress.check()
        answer = child.listen()
        if isinstance(answer, Progress):
            progress.show(answer.doing)
        elif isinstance(answer, wanted):
            return answer
        elif answer is not None:
            raise _error_of(answer)


def _error_of(answer: Answer) -> Exception:
    """Converts an answer other than the expected one to an error."""
    if isinstance(answer, Refused):
        return UnsupportedError(readable(answer.reason))
    if not isinstance(answer, Broken):
        return ReplicateError(f"The measuring process sent {answer.kind!r}, which was not asked for.")
    reason = readable(answer.reason)
    _log.warning("a measuring process failed: %s\n%s", reason, answer.trace)
    if answer.fault == "out_of_memory":
        return OutOfMemoryError(f"out of memory: {reason}")
    return ReplicateError(reason)
