"""The command line of a converter: what a program that writes an engine's models is told, and what its status says.

A converter is a process of its own, so that the measuring process loads no torch for it and holds no second copy of the
model.
"""

import argparse
import errno
import sys
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

    REFUSED for an UnsupportedError, with its text on stdout; 1 for a full disk, with a sentence on stderr.
    """
    try:
        write()
    except UnsupportedError as error:
        print(error)
        return REFUSED
    except OSError as error:
        if error.errno not in _FULL:
            raise
        advice = "free some, or name another folder in XDG_CACHE_HOME"
        print(f"there is no space for it in {output.parent} ({error.strerror}); {advice}.", file=sys.stderr)
        return 1
    return 0
