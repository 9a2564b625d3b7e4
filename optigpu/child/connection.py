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


def connect(module: str, description: str) -> tuple[Lines, Tell]:
    """Sets this process up as a child of the conductor; returns its input and its way to answer.

    `module` is what was started with `python -m`.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument(
        "--answers-fd", type=int, required=True, help="file descriptor that answers are written to"
    )
    tell = _teller(parser.parse_args().answers_fd)
    _end_with_parent()
    _be_first_for_the_oom_killer()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    lines: Lines = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(lines,), daemon=True).start()
    return lines, tell


def broken(error: Exception) -> Broken:
    """The message for an error: one sentence, and the end of the traceback of one that nobody raised on purpose."""
    if _is_out_of_memory(error):
        return Broken(fault="out_of_memory", reason=f"There was not enough memory: {_first_line(error)}")
    if isinstance(error, OptiGPUError):
        return Broken(fault="error", reason=_first_line(error))
    trace = "".join(traceback.format_exception(error))[-TRACE_CHARACTERS:]
    return Broken(fault="error", reason=f"{type(error).__name__}: {_first_line(error)}", trace=trace)


def _is_out_of_memory(error: Exception) -> bool:
    known = (backend.is_out_of_memory(error) for backend in BACKENDS.values())
    return isinstance(error, MemoryError) or any(known)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _teller(descriptor: int) -> Tell:
    """Answers go out as lines. Compilers that the model's code starts must not hold the pipe open."""
    os.set_inheritable(descriptor, False)
    answers = os.fdopen(descriptor, "w", encoding="utf-8")

    def tell(answer: Answer) -> None:
        answers.write(answer.model_dump_json() + "\n")
        answers.flush()

    return tell


def _read_lines(lines: Lines) -> None:
    """Hands on the lines of stdin in their order. At its end the process ends, in the middle of a request as well."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def _end_with_parent() -> None:
    """Has the kernel kill this process when its parent dies; ends at once if the parent has died already."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _be_first_for_the_oom_killer() -> None:
    """Has the kernel kill this process first when the host runs out of memory."""
    with suppress(OSError):  # not Linux, or a container whose /proc is read-only
        Path("/proc/self/oom_score_adj").write_text("1000")
