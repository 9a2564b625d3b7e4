"""One process that writes the models of engines for the tests of a worker: starting one takes longer than a tiny model.

Jobs start real converters; so do the tests of what a converter's end means.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from optigpu.backends.converting import ResidentConverter, converters_run_by


@cache
def _converter() -> ResidentConverter:
    return ResidentConverter()


@contextmanager
def resident_converter() -> Iterator[None]:
    """Models are written by that process. Its stdin ends with this one, and so does it."""
    with converters_run_by(_converter().run):
        yield
