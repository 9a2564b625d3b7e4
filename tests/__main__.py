"""`python -m tests`: all tests side by side, a process for each CPU, then those on a GPU one after the other.

`python -m tests --quick` runs what a developer waits for after each change. Other arguments go to pytest. Which tests
are quick tests/conftest.py says. Plain `pytest` runs everything one after the other.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from optigpu.hardware.cpu import allowed_cpus
from tests.conftest import gpu_count

NOTHING_FOUND = 5
"""pytest's exit status when no test was selected."""
QUIETLY = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
"""torch's threads would wait for each other, and a thread that waits by spinning takes the CPU from one that works."""
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""Containers often set it. Each of the hundreds of processes that tests start would compile what it imports anew."""


def main(arguments: Sequence[str]) -> int:
    """Runs both parts, the second even after a failure in the first; the status is pytest's of the worse one."""
    # A shell that runs this in the background has it ignore Ctrl-C, and every process that tests send it to would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if arguments[:1] == ["--quick"]:
        return run([*side_by_side("quick"), *arguments[1:]])
    statuses = [run([*side_by_side("together"), *arguments])]
    if gpu_count():
        statuses.append(run(["-m", "not together", *arguments]))
    found = [status for status in statuses if status != NOTHING_FOUND]
    return max(found, default=NOTHING_FOUND)


def side_by_side(marker: str) -> list[str]:
    """pytest's arguments for the tests of a marker, a process for each CPU.

    The files keep their order: sorted by their number of tests, those with few and long ones would come last. A process
    that dies ends the run, which then names its test: with another one in its place pytest-xdist 3.8 hands out the
    files that the dead one had finished, until both wait for more and the run never ends.
    """
    workers = str(len(allowed_cpus()) or os.cpu_count() or 1)
    return [
        *("-m", marker, "-n", workers, "--dist", "loadfile", "--no-loadscope-reorder"),
        *("--max-worker-restart", "0"),
    ]


def run(arguments: Sequence[str]) -> int:
    """One run of pytest."""
    variables = {name: value for name, value in os.environ.items() if name != NO_BYTECODE} | QUIETLY
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
