"""Where the library of C++ operators is kept once it is built. Loads no torch, because techniques ask whether it is."""

import functools
import hashlib
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from optigpu.paths import operators_dir

FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-w", "-DTORCH_TARGET_VERSION=0x020a000000000000")


def is_built(sources: tuple[Path, ...]) -> bool:
    """Whether the library of `sources` is kept: of these texts, by this compiler, for this torch."""
    with suppress(OSError):
        return library_file(sources).is_file()
    return False


def library_file(sources: tuple[Path, ...]) -> Path:
    """The library's file, named by a digest of all that it depends on; the sources choose their path at run time. The
    first of them is compiled. Raises OSError where there is no compiler, or a source cannot be read."""
    return operators_dir() / f"{sources[0].stem}-{_digest(sources)}.so"


@functools.cache
def _digest(sources: tuple[Path, ...]) -> str:
    """Once for a process: the service asks for each job that is posted."""
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=False).stdout
    texts = (source.read_text() for source in sources)
    parts = [version("torch"), platform.machine(), compiler, *compile_command(), *texts]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def compile_command() -> list[str]:
    """The compiler with the options that every library has."""
    return ["g++", *FLAGS, f"-I{torch_folder() / 'include'}"]


def torch_folder() -> Path:
    """The folder of the installed torch; empty where there is none."""
    found = find_spec("torch")
    return Path(found.origin).parent if found and found.origin else Path()
