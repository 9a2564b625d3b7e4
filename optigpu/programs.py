"""Where programs run that need torch or an engine: each in a process of its own, or one by one in one that stays.

They write engines' models and describe models. `python -m optigpu.programs` is the process that stays: torch and the
engines' libraries are loaded once. It reads lines from stdin, each a program with its arguments, answers each with how
it ended, and ends with its stdin.
"""

import gc
import io
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from contextvars import ContextVar
from importlib import import_module
from typing import NamedTuple

_INTERPRETER = (sys.executable, "-P", "-m")
"""-P keeps files of the working directory from being taken for modules."""


class Ended(NamedTuple):
    """How a program ended, and what it printed."""

    status: int
    out: str
    err: str


Run = Callable[[str, Sequence[str]], Ended]
"""Runs a program, which is a module, with arguments."""


def run_alone(program: str, arguments: Sequence[str]) -> Ended:
    """In a process of its own."""
    command = [*_INTERPRETER, program, *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


class ResidentProgram:
    """The process that stays. It starts with the first program, and again after a program that it died of."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, program: str, arguments: Sequence[str]) -> Ended:
        """With the environment variables that this process has now."""
        process = self._process = self._process or subprocess.Popen(
            [*_INTERPRETER, __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # it died after the last program
            print(json.dumps([program, [*arguments], dict(os.environ)]), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        if answer:
            return Ended(*json.loads(answer))
        self._process = None
        process.communicate()
        return Ended(process.returncode, "", "")

    def end(self) -> None:
        """Ends the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


_RUN: ContextVar[Run] = ContextVar("_RUN", default=run_alone)


def run_program(program: str, arguments: Sequence[str]) -> Ended:
    """Runs it where `programs_run_by` says, else in a process of its own."""
    return _RUN.get()(program, arguments)


@contextmanager
def programs_run_by(run: Run) -> Iterator[None]:
    """Within it `run` runs the programs."""
    token = _RUN.set(run)
    try:
        yield
    finally:
        _RUN.reset(token)


def main() -> None:
    """Runs what the lines of stdin name."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print there
    for line in sys.stdin:
        program, arguments, variables = json.loads(line)
        os.environ.clear()
        os.environ.update(variables)
        out, err = io.StringIO(), io.StringIO()
        sys.argv = [program, *arguments]
        with redirect_stdout(out), redirect_stderr(err):
            try:
                status = int(import_module(program).main())
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
            except Exception:
                traceback.print_exc()
                status = 1
        print(json.dumps(Ended(status, out.getvalue(), err.getvalue())), file=answers, flush=True)
        gc.collect()  # the model of this program, before the next one loads its own


if __name__ == "__main__":
    main()
