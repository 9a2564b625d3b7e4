"""One process that writes the models of engines for the tests of a worker: starting one takes longer than a tiny model.

Jobs start real converters; so do the tests of what a converter's end means.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from optigpu.programs import ResidentProgram, programs_run_by


@cache
def _converter() -> ResidentProgram:
    return ResidentProgram()


@contextmanager
def resident_converter() -> Iterator[None]:
    """Models are written by that process. Its stdin ends with this one, and so does it."""
    with programs_run_by(_converter().run):
        yield
