"""One question to a measuring process and its answer, with the watch looked at in between."""

import logging
from typing import TypeVar

from optigpu.child.messages import Answer, Broken, Progress, Refused
from optigpu.conductor.processes.child import Child, readable
from optigpu.conductor.progress import Watch
from optigpu.vocabulary import Frozen, OutOfMemoryError, ReplicateError, UnsupportedError

Wanted = TypeVar("Wanted", bound=Frozen)

_log = logging.getLogger(__name__)


def ask(child: Child, message: Frozen, wanted: type[Wanted], watch: Watch) -> Wanted:
    """Sends a message and waits for the answer to it.

    Raises UnsupportedError when the process refuses, ReplicateError when it fails, and what the watch raises.
    """
    child.tell(message)
    while True:
        watch.tick()
        answer = child.listen()
        if isinstance(answer, Progress):
            watch.doing(answer.doing)
        elif isinstance(answer, wanted):
            return answer
        elif answer is not None:
            raise _fault(answer)


def _fault(answer: Answer) -> Exception:
    """An answer other than the one that was asked for, as the error that it stands for."""
    if isinstance(answer, Refused):
        return UnsupportedError(readable(answer.reason))
    if not isinstance(answer, Broken):
        return ReplicateError(f"The measuring process answered out of turn, with {answer.kind!r}.")
    reason = readable(answer.reason)
    _log.warning("a measuring process failed: %s\n%s", reason, answer.trace)
    if answer.fault == "out_of_memory":
        return OutOfMemoryError(f"out of memory: {reason}")
    return ReplicateError(reason)
