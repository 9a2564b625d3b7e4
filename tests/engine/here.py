"""This machine, for tests that do not change it."""

from functools import cache

from optigpu.documents.result import Environment
from optigpu.hardware import probe


@cache
def here() -> Environment:
    """What `probe` finds, asked once: it starts git and the compiler each time."""
    return probe()
