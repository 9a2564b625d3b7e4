"""Runs the steps of a plan, each in its own process group and killed at its bound; what has ended is kept."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optigpu.vocabulary import utc_now

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 3.0
"""Between SIGTERM and SIGKILL."""
WORTH = 0.25
"""The share of its bound that must be left for a step to begin."""
LINES = 5
_FAILED_TEST = re.compile(r"^(?:FAILED|ERROR) \S+::.*", re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """Arguments of Python, which may measure `job` for a `share` of the bound. Output goes to the file `prints`."""

    name: str
    bound_s: float
    command: str
    job: dict[str, Any] | None = None
    share: float = 0.7
    prints: str = "output.txt"
    fine: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Record:
    """How a step ended: "ended", "failed", "killed" or "not begun". `error`: each failed test, or its last lines."""

    name: str
    command: str
    ending: str
    status: int | None = None
    seconds: float = 0.0
    at: str = ""
    error: tuple[str, ...] = ()


def plan(path: Path) -> tuple[Step, ...]:
    """The steps of a file, in its order."""
    return tuple(Step(**each) for each in tomllib.loads(path.read_text())["steps"])


def run_step(step: Step, folder: Path, device: str, ends: float, variables: Mapping[str, str]) -> Record:
    """Waits until the step has ended, its bound has passed, or it is `ends` on the monotonic clock."""
    out, begun = folder / step.name, time.monotonic()
    command = step.command.replace("{out}", shlex.quote(str(out))).replace("{device}", device)
    bound_s = min(step.bound_s, ends - begun)
    if bound_s < WORTH * step.bound_s:
        return Record(step.name, command, "not begun")
    out.mkdir(parents=True, exist_ok=True)
    if step.job:
        limits = {"timeout_s": step.share * bound_s, "wait_for_quiet_s": 0}
        (out / "job.json").write_text(json.dumps({**step.job, "device": device, "limits": limits}))
    at, output, errors = utc_now().isoformat(timespec="seconds"), out / step.prints, out / "errors.txt"
    with (
        output.open("wb") as stdout,
        errors.open("wb") as stderr,
        _group(shlex.split(command), variables, stdout.fileno(), stderr.fileno()) as process,
    ):
        with suppress(subprocess.TimeoutExpired):
            process.wait(bound_s)
        status: int | None = process.returncode
    ending = "killed" if status is None else "ended" if status in step.fine else "failed"
    error = () if ending == "ended" else _error(output, errors)
    return Record(step.name, command, ending, status, round(time.monotonic() - begun, 1), at, error)


@contextmanager
def _group(
    arguments: list[str], variables: Mapping[str, str], stdout: int, stderr: int
) -> Iterator["subprocess.Popen[bytes]"]:
    """Python in a process group of its own, of which nothing is left afterwards."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)


def _error(output: Path, errors: Path) -> tuple[str, ...]:
    if failed := _FAILED_TEST.findall(output.read_text(errors="replace")):
        return tuple(failed)
    return tuple(filter(str.strip, errors.read_text(errors="replace").splitlines()))[-LINES:]
