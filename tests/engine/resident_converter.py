"""One process that writes the models of engines for the tests of a worker: starting one takes longer than a tiny model.

Jobs start real converters; so do the tests of what a converter's end means.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.processes import program


@cache
def _process() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        program("converting"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _run(command: Sequence[str], **_: Any) -> "subprocess.CompletedProcess[str]":
    """As `subprocess.run` of `python -P -m MODULE ARGUMENTS`."""
    process = _process()
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps([command[3], command[4:], dict(os.environ)]), file=process.stdin, flush=True)
    status, out, err = json.loads(process.stdout.readline())
    return subprocess.CompletedProcess(command, status, out, err)


@contextmanager
def resident_converter() -> Iterator[None]:
    """Models are written by that process. Its stdin ends with this one, and so does it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "optigpu.backends.converted.subprocess", SimpleNamespace(run=_run, DEVNULL=subprocess.DEVNULL)
        )
        yield
