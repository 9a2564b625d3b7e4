"""The command line of a converter: what a program that writes an engine's models is told, and what its status says.

A converter is a process of its own, so that the measuring process loads no torch for it and holds no second copy of the
model.
"""

import argparse
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from optigpu.backends.base import Order
from optigpu.vocabulary import UnsupportedError

REFUSED = 3
"""The exit status of a converter when this model cannot be written; the last line of its stdout says why."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def model_arguments(order: Order) -> tuple[str, ...]:
    """Which model a converter is to load, for a parser of `converter_parser`."""
    return ("--model", str(order.model), "--seed", str(order.seed), "--threads", str(order.threads))


def converter_parser(
    program: str, description: str | None, writes: str, *, needs_model: bool = True
) -> argparse.ArgumentParser:
    """The arguments that converters share. `program` is a module, and `writes` says what --output names."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument("--output", type=Path, required=True, help=f"the {writes} to write")
    parser.add_argument("--model", required=needs_model, help="a model reference")
    parser.add_argument("--seed", type=int, default=0, help="of a preset's random weights")
    parser.add_argument("--threads", type=int, default=1, help="how many CPU threads it may use")
    return parser


def written(write: Callable[[], None], output: Path) -> int:
    """The exit status of a converter's program that calls `write` to make `output`.

    REFUSED for an UnsupportedError, with its text on stdout; 1 for a full disk, with a sentence on stderr. Libraries
    have errors of their own for one, so whatever was raised, it is looked at what was written so far; before one that
    removes that, `require_space` is asked.
    """
    try:
        write()
    except Exception as error:
        full = error if isinstance(error, OSError) and error.errno in _FULL else _no_space(output)
        if full is not None:
            where = f"{output.parent} ({full.strerror})"
            advice = "free some, or name another folder in XDG_CACHE_HOME."
            print(f"there is no space for it in {where}; {advice}", file=sys.stderr)
            return 1
        if isinstance(error, UnsupportedError):
            print(error)
            return REFUSED
        raise
    return 0


def require_space(folder: Path, size: int) -> None:
    """Raises OSError where the disk has no space for a file of `size` bytes in a folder."""
    if sys.platform == "darwin":  # which reserves nothing
        if shutil.disk_usage(folder).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)


def _no_space(output: Path) -> OSError | None:
    """The disk's error where the largest file of what a failed converter wrote cannot grow, or None. The file grows."""
    files = [path for path in (output, *output.rglob("*")) if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size, default=None)
    if largest is None:
        return None
    try:
        with largest.open("ab") as file:
            file.write(bytes(2**20))
    except OSError as error:
        return error if error.errno in _FULL else None
    return None
