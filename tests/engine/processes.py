"""What tests know of processes and torch's threads, and the command `optigpu` in this one, which saves its start."""

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import psutil
import pytest

from optigpu.child.connection import HIGHEST
from optigpu.cli import main

PATIENCE_S = 60.0
STARTED = "LC_OPTIGPU_STARTED"
"""Names the file to which the self-test's child adds its id: variables that begin with LC_ reach it."""


OWN_MODULES = ("selftest_made", "tampered")
"""Children that are a module each; all others are functions of one."""


def program(name: str, *arguments: object) -> tuple[str, ...]:
    """The command of one of the children."""
    words = (name, *arguments) if name in OWN_MODULES else ("behaving", name, *arguments)
    return (sys.executable, "-m", f"tests.engine.children.{words[0]}", *map(str, words[1:]))


def wait_until(happened: Callable[[], bool]) -> None:
    """Waits for what must happen; how long it takes is not what is tested."""
    until = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def children() -> frozenset[int]:
    """The processes that this one has started and that run."""
    return frozenset(child.pid for child in psutil.Process().children() if is_alive(child.pid))


def may_come_first() -> bool:
    """Whether a process of ours may have the highest priority."""
    ask = f"import os; os.setpriority(os.PRIO_PROCESS, 0, {HIGHEST})"
    made = subprocess.run([sys.executable, "-c", ask], check=False, stderr=subprocess.DEVNULL)
    return made.returncode == 0


def optigpu(
    variables: Mapping[str, str], *arguments: str, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs it with `variables` besides those of this process, in `folder`."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        for name, value in variables.items():
            if os.environ.get(name) != value:
                patch.setenv(name, value)
        if folder:
            patch.chdir(folder)
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
    status = ended.value.code
    return subprocess.CompletedProcess(arguments, int(status or 0), out.getvalue(), err.getvalue())


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """What torch has for as long as the block lasts."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)
