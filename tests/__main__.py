"""`python -m tests`: all tests, most of them side by side on all cores, then those that need the machine alone.

`python -m tests --quick FOLDER` runs what a developer waits for after each change: `make check` runs two folders at a
time. Other arguments go to pytest. Which tests are quick, and which need the machine alone, tests/conftest.py says.
Plain `pytest` runs everything one after the other.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

NOTHING_FOUND = 5
"""pytest's exit status when no test was selected."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""For tests that share the cores with others: torch's threads would wait for each other."""


def main(arguments: Sequence[str]) -> int:
    """Runs both halves, the second even after a failure in the first; the status is pytest's of the worse one."""
    if arguments[:1] == ["--quick"]:
        return run(["-m", "quick", *arguments[1:]], ONE_THREAD)
    statuses = [
        run([*side_by_side("together"), *arguments], ONE_THREAD),
        run(["-m", "not together", *arguments]),
    ]
    if statuses == [NOTHING_FOUND, NOTHING_FOUND]:
        return NOTHING_FOUND
    return max(status for status in statuses if status != NOTHING_FOUND)


def side_by_side(marker: str) -> list[str]:
    """pytest's arguments for the tests of a marker, a process for each core.

    The files keep their order: sorted by their number of tests, those with few and long ones would come last.
    """
    workers = str(os.cpu_count() or 1)
    return ["-m", marker, "-n", workers, "--dist", "loadfile", "--no-loadscope-reorder"]


def run(arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> int:
    """One run of pytest; a thread that waits for work sleeps, since others need its core."""
    variables = os.environ | {"OMP_WAIT_POLICY": "passive"} | dict(variables or {})
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
