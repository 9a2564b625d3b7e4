"""What tests need to know of processes."""

import sys
import time
from collections.abc import Callable

import psutil

PATIENCE_S = 60.0


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
