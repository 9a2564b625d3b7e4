"""Cache folders of a test's own, the process that writes models into them, and a disk that is full."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil
import pytest

from optigpu import programs
from optigpu.paths import cache_dir
from optigpu.programs import ResidentProgram, programs_run_by
from tests.engine.children import forking

OPERATORS, PEAKS, CONVERTED, BUILDS = "ops", "peaks", "converted", "builds"
"""What takes seconds to make again, and is the same for every test. A file is named by all that it is made of."""


def cache_with(parent: Path, *shared: str) -> Path:
    """An OptiGPU cache folder with nothing but what is shared with this user's; its parent is XDG_CACHE_HOME."""
    folder = parent / "cache" / "optigpu"
    folder.mkdir(parents=True)
    for name in shared:
        (cache_dir() / name).mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(cache_dir() / name)
    return folder


@contextmanager
def own_folders(made: Path, *shared: str) -> Iterator[None]:
    """Such a cache folder and an empty data folder, both in `made`; every child inherits the variables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache_with(made, *shared).parent))
        patch.setenv("OPTIGPU_DATA_DIR", str(made / "data"))
        yield


@cache
def _converter() -> ResidentProgram:
    return ResidentProgram()


@contextmanager
def resident_converter() -> Iterator[None]:
    """Models are written by that process. Its stdin ends with this one, and so does it."""
    with programs_run_by(_converter().run):
        yield


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
