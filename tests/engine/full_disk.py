"""A full disk, without filling one: the kernel refuses to let a file grow further, in this process and its children."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from optigpu import programs
from tests.engine.children import forking

STAYING = (programs.__name__, forking.__name__)
"""The modules of children that outlive a test: these may run before a limit and go on after it."""


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may have more bytes than that. Off Linux, children that run already are not told."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    _limit((size, before[1]))
    try:
        yield
    finally:
        _limit(before)


def _limit(limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if sys.platform == "linux":
        for child in psutil.Process().children():
            with suppress(psutil.Error, ProcessLookupError):
                if not set(STAYING).isdisjoint(child.cmdline()):
                    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, limits)
