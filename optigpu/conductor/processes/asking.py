"""Sends one message to a measuring process and waits for its answer, while the job's limits are checked."""

import logging
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from optigpu.child.messages import Answer, Broken, Progress, Refused
from optigpu.conductor.processes.child import Child, readable
from optigpu.vocabulary import (
    CancelledError,
    Frozen,
    OutOfMemoryError,
    OverdueError,
    ReplicateError,
    UnsupportedError,
)

Wanted = TypeVar("Wanted", bound=Frozen)

_log = logging.getLogger(__name__)


class Watch(Protocol):
    """The limits that hold while an answer is waited for, as JobProgress has them."""

    def check(self) -> None:
        """Called at least twice a second; raises to stop waiting."""

    def show(self, doing: str) -> None:
        """The process says what it is busy with."""


class TimedWatch:
    """A Watch of its own time: `limit_s` seconds from when it is made, unless somebody asks to stop before."""

    def __init__(
        self,
        limit_s: float,
        cancelled: Callable[[], str | None],
        overdue: str,
        doing: Callable[[str], None] = lambda _doing: None,
    ) -> None:
        """`overdue` is the error's sentence when the time is up; `doing` is told what the process says."""
        self.show, self._cancelled, self._overdue = doing, cancelled, overdue
        self._until = time.monotonic() + limit_s

    def check(self) -> None:
        reason = self._cancelled()
        if reason is not None:
            raise CancelledError(reason)
        if time.monotonic() > self._until:
            raise OverdueError(self._overdue)


def ask(child: Child, message: Frozen, wanted: type[Wanted], progress: Watch) -> Wanted:
    """Sends a message and waits for its answer. Raises UnsupportedError when the process refuses, ReplicateError when
    it fails, and what `progress.check` raises."""
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
    if isinstance(answer, Refused):
        return UnsupportedError(readable(answer.reason))
    if not isinstance(answer, Broken):
        return ReplicateError(f"The measuring process sent {answer.kind!r}, which was not asked for.")
    reason = readable(answer.reason)
    if answer.trace:
        _log.warning("a measuring process failed: %s\n%s", reason, answer.trace)
    if answer.fault == "out_of_memory":
        return OutOfMemoryError(f"out of memory: {reason}")
    return ReplicateError(reason)
