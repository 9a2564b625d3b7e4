"""Compiles hand-written C++ operators on first use, loads them into PyTorch and finds this CPU's best path.

The sources use only PyTorch's stable C ABI (headers of torch >= 2.10) and become one shared library by one
call of g++, which is kept (library_file.py).
"""

import ctypes
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import torch
from filelock import FileLock  # a dependency of torch

from optigpu.ops.library_file import compile_command, library_file, torch_folder
from optigpu.vocabulary import UnsupportedError

OLDEST_TORCH = (2, 10)
"""The first release whose stable ABI has torch_parallel_for."""
BUILD_TIMEOUT_S = 900
BEST_INSTRUCTION_SET = 0
"""The operators' number for the newest instruction set that the CPU has."""

Name = TypeVar("Name", bound=str)


def compiler_reason() -> str | None:
    """Why this machine cannot build the C++ operators, and what helps; None where it can."""
    if sys.platform != "linux":
        return f"The C++ operators need Linux; this is {sys.platform}."
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        return f"The C++ operators need torch 2.10 or newer; this is {torch.__version__}: upgrade torch."
    if shutil.which("g++") is None:
        return "The C++ operators need g++, and there is no g++ on PATH: install it (Debian, Ubuntu: apt install g++)."
    header = torch_folder() / "include" / "torch" / "csrc" / "stable" / "library.h"
    if header.is_file():
        return None
    return f"The C++ operators need torch's C++ headers, and {header} is missing: reinstall torch."


def sources(file: str, *names: str) -> tuple[Path, ...]:
    """Files beside a module's: what is compiled, and what that includes."""
    return tuple(Path(file).parent / name for name in names)


@functools.cache
def load_library(sources: tuple[Path, ...]) -> ctypes.CDLL:
    """The library of `sources` (the first is compiled, the others are what it includes), built when needed.

    Loading it registers its operators with PyTorch.
    Raises UnsupportedError when it cannot be built or loaded here, with the compiler's first error.
    """
    reason = compiler_reason()
    if reason is not None:
        raise UnsupportedError(reason)
    path = _built(sources)
    try:
        torch.ops.load_library(str(path))
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise UnsupportedError(f"The C++ operators in {path} could not be loaded: {error}.") from error


def register(sources: tuple[Path, ...], best: str, fakes: Mapping[str, Callable[..., object]]) -> int:
    """Loads the operators of `sources` and returns the number of their best instruction set here, which `best` tells.

    `fakes` gives for each operator the function from which torch.compile learns its result's shape. Raises what
    `load_library` does.
    """
    library = load_library(sources)
    for name, fake in fakes.items():
        torch.library.register_fake(f"optigpu::{name}")(fake)
    ask = getattr(library, best)  # library[best] would give another object each time, without these types
    ask.argtypes, ask.restype = (), ctypes.c_int64
    return int(ask())


class NativeOperators(Generic[Name]):
    """The operators of `sources`. `numbers` has the paths' names and their numbers in the enumeration InstructionSet.

    `best` and `fakes` are as in `register`. Built at first use.
    """

    def __init__(
        self,
        sources: tuple[Path, ...],
        best: str,
        fakes: Mapping[str, Callable[..., object]],
        numbers: Mapping[Name, int],
    ) -> None:
        self._register = functools.partial(register, sources, best, fakes)
        self._numbers = numbers
        self.reason = functools.cache(self._reason)

    @functools.cached_property
    def best(self) -> Name:
        """The newest path that this CPU can run. Raises UnsupportedError if the operators cannot be built."""
        number = self._register()
        return next(name for name, known in self._numbers.items() if known == number)

    def _reason(self) -> str | None:
        """Why the operators cannot be used here, in one sentence; None if they can. Builds them when needed."""
        try:
            _ = self.best
        except UnsupportedError as error:
            return str(error)
        return None


def _built(sources: tuple[Path, ...]) -> Path:
    try:
        target = library_file(sources)
        if target.is_file():
            return target
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(target.with_suffix(".lock"), timeout=BUILD_TIMEOUT_S):
            if not target.is_file():
                _compile(sources[0], target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnsupportedError(f"The C++ operators could not be built: {error}.") from error
    return target


def _compile(source: Path, target: Path) -> None:
    """Compiles next to `target` and renames, so that no process loads a partial file."""
    unfinished = target.with_suffix(f".{os.getpid()}.tmp")
    link = [f"-L{torch_folder() / 'lib'}", "-ltorch_cpu"]
    command = [*compile_command(), str(source), "-o", str(unfinished), *link]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
        if done.returncode != 0:
            lines = done.stderr.splitlines()
            first = next((line for line in lines if "error" in line), (lines or ["no message"])[0])
            raise UnsupportedError(f"g++ could not compile {source.name}: {first.strip()}")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
