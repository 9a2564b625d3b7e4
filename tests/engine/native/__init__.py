"""C++ programs around the decoder, built as a test needs them; what was built is kept by all that it is made of."""

import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from optigpu.ops.decode import cpu
from optigpu.paths import cache_dir

FOLDER = Path(__file__).parent
SOAK = FOLDER / "soak.cpp"
ONE_ROUNDING = "-ffp-contract=off"
"""No product is joined with a sum, which compilers do as each processor can."""
QUICK = ("-std=c++17", "-O0", "-w")
"""Unoptimized: to optimize takes much longer than that makes the few rounds shorter."""


def with_sanitizer(name: str) -> Path:
    """The soak test, built for this machine with a sanitizer."""
    return built("g++", *QUICK, f"-fsanitize={name}", "-g1", "-fno-sanitize-recover=all")


def built(compiler: str, *flags: str, source: Path = SOAK) -> Path:
    """The program that a compiler of g++'s family makes of a source."""
    command = [compiler, *flags, str(source)]
    program = cache_dir() / "soak" / _digest(command)
    if not program.is_file():
        program.parent.mkdir(parents=True, exist_ok=True)
        unfinished = program.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-o", str(unfinished)], check=True, timeout=240)
        unfinished.replace(program)
    return program


def _digest(command: Sequence[str]) -> str:
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True).stdout
    folder = Path(cpu.__file__).parent
    sources = [
        each
        for place in (FOLDER, folder)
        for suffix in ("*.cpp", "*.h")
        for each in sorted(place.glob(suffix))
    ]
    parts = [version, *command, *(each.read_text() for each in sources)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
