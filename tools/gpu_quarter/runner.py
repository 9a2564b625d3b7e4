"""Runs steps, each in its own process group and killed at its bound; what has ended is kept, and summed up."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from optigpu.documents.fields import read_json
from optigpu.documents.result import Environment
from optigpu.vocabulary import utc_now

SUMMARY = "summary.json"
ROOT = Path(__file__).resolve().parents[2]
GRACE_S, WORTH, LINES = 3.0, 0.25, 5
"""From SIGTERM to SIGKILL; the share of its bound that a step is begun for; lines of an error."""
_FAILED_TEST = re.compile(r"^(?:FAILED|ERROR) \S+::.*", re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """Arguments of Python, which may measure `job` for a `share` of the bound. `fine`: statuses that say no failure."""

    name: str
    bound_s: float
    command: str
    job: dict[str, Any] | None = None
    share: float = 0.6
    prints: str = "output.txt"
    fine: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Record:
    """How a step ended: "ended", "failed", "killed" or "not begun". `error`: each failed test, or its last lines."""

    name: str
    command: str
    ending: str
    status: int | None = None
    seconds: float = 0.0
    at: str = ""
    error: list[str] = field(default_factory=list)


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
    with output.open("wb") as stdout, errors.open("wb") as stderr:
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
        arguments = [sys.executable, *shlex.split(command)]
        process = subprocess.Popen(arguments, cwd=ROOT, env=variables, start_new_session=True, **streams)
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(bound_s)
            status: int | None = process.returncode
        finally:
            _end_group(process)
    well = status == 0 or (
        status in step.fine and "Traceback (most" not in errors.read_text(errors="replace")
    )
    ending = "killed" if status is None else "ended" if well else "failed"
    error = [] if well else _error(output, errors)
    return Record(step.name, command, ending, status, round(time.monotonic() - begun, 1), at, error)


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """Nothing that the process started in its group is left."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


def _error(output: Path, errors: Path) -> list[str]:
    """The failed tests of a run of pytest, else the last lines."""
    failed: list[str] = _FAILED_TEST.findall(output.read_text(errors="replace"))
    return failed or [*filter(str.strip, errors.read_text(errors="replace").splitlines())][-LINES:]


def read_summary(folder: Path) -> dict[str, Record]:
    """The records of an earlier run, by step. Raises SpecError if they cannot be read."""
    found: Any = read_json(folder / SUMMARY)
    return {each["name"]: Record(**each) for each in found["steps"]}


def write_summary(folder: Path, machine: Environment, records: Sequence[Record]) -> None:
    """For a later run as JSON, for people as Markdown."""
    document = {"environment": machine.model_dump(mode="json"), "steps": [asdict(each) for each in records]}
    (folder / SUMMARY).write_text(json.dumps(document, indent=2) + "\n")
    cards = ", ".join(card.name for card in machine.accelerators) or "none"
    versions = ", ".join(f"{name} {version}" for name, version in machine.software.items())
    lines = [
        f"Card: {cards}. Driver: {machine.driver or 'none'}. Commit: {machine.git_revision}. {versions}.",
        "",
    ]
    lines += ["| step | how it ended | exit status | seconds |", "| --- | --- | ---: | ---: |"]
    lines += [f"| {each.name} | {each.ending} | {each.status} | {each.seconds} |" for each in records]
    for each in records:
        lines += ["", f"## {each.name}", "", "```", f"python {each.command}", *each.error, "```"]
    (folder / "summary.md").write_text("\n".join(lines) + "\n")
