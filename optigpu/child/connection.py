"""The connection of a measuring process to the conductor.

It reads lines from stdin and answers on a separate pipe (`--answers-fd`), as `optigpu.child.messages` says;
whatever else prints goes to stderr. It ends with status 0 when its stdin closes, whatever it is
doing then, and is killed when its parent dies.
"""

import argparse
import ctypes
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from optigpu.backends import BACKENDS
from optigpu.child.messages import Answer, Broken
from optigpu.vocabulary import OptiGPUError

TRACE_CHARACTERS = 4000
"""How much of a traceback's end goes into an answer."""

Tell = Callable[[Answer], None]
"""Sends one answer to the conductor."""

Lines = queue.SimpleQueue[str]
"""The lines of stdin, in their order."""

_PR_SET_PDEATHSIG = 1


def connect() -> tuple[Lines, Tell]:
    """Sets this process up as a child of the conductor; returns its input and its way to answer."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--answers-fd", type=int, required=True, help="file descriptor that answers are written to"
    )
    descriptor = parser.parse_args().answers_fd
    # Compilers that the model's code starts must not hold the pipe open.
    os.set_inheritable(descriptor, False)
    answers = os.fdopen(descriptor, "w", encoding="utf-8")
    # Has the kernel kill this process when its parent dies; ends at once if the parent has died already.
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    # The kernel is to kill this process first when the host runs out of memory.
    with suppress(OSError):  # not Linux, or a container whose /proc is read-only
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    lines: Lines = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    def tell(answer: Answer) -> None:
        answers.write(answer.model_dump_json() + "\n")
        answers.flush()

    threading.Thread(target=read, daemon=True).start()
    return lines, tell


def broken(error: Exception) -> Broken:
    """The message for an error: one sentence, and the end of the traceback of one that nobody raised on purpose."""
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    known = (backend.is_out_of_memory(error) for backend in BACKENDS.values())
    if isinstance(error, MemoryError) or any(known):
        return Broken(fault="out_of_memory", reason=f"There was not enough memory: {first_line}")
    if isinstance(error, OptiGPUError):
        return Broken(fault="error", reason=first_line)
    trace = "".join(traceback.format_exception(error))[-TRACE_CHARACTERS:]
    return Broken(fault="error", reason=f"{type(error).__name__}: {first_line}", trace=trace)


HIGHEST = -20


def raise_priority() -> int:
    """Puts all threads of this process before those of others, where root, CAP_SYS_NICE or `ulimit -e` allows that;
    returns the nice value that they have then."""
    if sys.platform == "linux":
        with suppress(PermissionError):
            for thread in os.listdir("/proc/self/task"):
                with suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, int(thread), HIGHEST)
        # Where the kernel groups processes by session, it shares the CPUs among these groups first.
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(HIGHEST))
    return nice()


def nice() -> int:
    """The nice value of this thread, from -20 (first) to 19 (last)."""
    return os.getpriority(os.PRIO_PROCESS, 0)
