"""What tests need to know of processes."""

import subprocess
import sys
import time
from collections.abc import Callable

import psutil

from optigpu.child.priority import HIGHEST

PATIENCE_S = 60.0
STARTED = "LC_OPTIGPU_STARTED"
"""Names the file to which the self-test's child adds its id: variables that begin with LC_ reach it."""


def program(name: str, *arguments: object) -> tuple[str, ...]:
    """The command of one of the children."""
    return (sys.executable, "-m", f"tests.engine.children.{name}", *map(str, arguments))


def wait_until(happened: Callable[[], bool]) -> None:
    """Waits for what must happen; how long it takes is not what is tested."""
    until = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def children() -> frozenset[int]:
    """The processes that this one has started and that run."""
    return frozenset(child.pid for child in psutil.Process().children() if is_alive(child.pid))


def may_come_first() -> bool:
    """Whether a process of ours may have the highest priority."""
    ask = f"import os; os.setpriority(os.PRIO_PROCESS, 0, {HIGHEST})"
    made = subprocess.run([sys.executable, "-c", ask], check=False, stderr=subprocess.DEVNULL)
    return made.returncode == 0
