"""Measuring processes come first where the system allows it, and stay as they are where it does not."""

import json
import subprocess
import sys

import pytest

from optigpu.child.priority import HIGHEST
from tests.engine.processes import may_come_first

PROGRAM = """
import json, os, resource, sys, threading
from pathlib import Path
from optigpu.child.priority import nice, raise_priority
if sys.argv[1] == "forbidden":
    resource.setrlimit(resource.RLIMIT_NICE, (0, 0))
    if os.geteuid() == 0:
        os.setuid(65534)
over = threading.Event()
threading.Thread(target=over.wait).start()
before, after = nice(), raise_priority()
tasks = [os.getpriority(os.PRIO_PROCESS, int(task)) for task in os.listdir("/proc/self/task")]
group = Path("/proc/self/autogroup")
print(json.dumps([before, after, tasks, group.read_text().split()[-1] if group.exists() else None]))
over.set()
"""
"""Prints the nice value before and after, that of each thread, and that of the session's group."""


def priorities(right: str) -> tuple[int, int, list[int], str | None]:
    made = subprocess.run(
        [sys.executable, "-c", PROGRAM, right],
        stdout=subprocess.PIPE,
        check=True,
        start_new_session=True,
    )
    before, after, threads, group = json.loads(made.stdout)
    return before, after, threads, group


@pytest.mark.parametrize("right", ["allowed", "forbidden"])
def test_every_thread_comes_first_where_the_system_allows_it(right: str) -> None:
    before, after, threads, group = priorities(right)
    expected = HIGHEST if right == "allowed" and may_come_first() else before
    assert after == expected
    assert threads == [expected] * 2
    if group is not None:
        assert group == str(HIGHEST if expected == HIGHEST else 0)
