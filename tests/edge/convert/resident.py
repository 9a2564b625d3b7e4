"""Conversions in this process, by one process with TensorFlow: starting it takes longer than a small network."""

import io
import json
import os
import subprocess
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from optigpu.cli import main
from optigpu.edge.convert.process import CHILD, VARIABLES, Watch, message_of
from optigpu.vocabulary import Document

PROGRAM = Path(__file__).with_name("resident_program.py")


class Resident:
    """The process, which keeps TensorFlow from one conversion to the next."""

    def __init__(self, python: Path) -> None:
        self._process = subprocess.Popen(
            [python, PROGRAM, CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | VARIABLES,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, python: Path, step: str, request: Mapping[str, object], watch: Watch) -> Document:
        """As `run_program`, for a program that neither dies nor hangs."""
        del python
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([step, request]).encode() + b"\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            message = message_of(line)
            if "done" in message:
                return message["done"]
            watch.doing(message["doing"])
        raise AssertionError("the process has died")

    def command(self, *arguments: object) -> tuple[int, str, str]:
        """The status of `optigpu` with these arguments, and what it printed."""
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patched, redirect_stdout(out), redirect_stderr(err):
            patched.setattr("optigpu.edge.convert.run_program", self.run)
            with pytest.raises(SystemExit) as ended:
                main([*map(str, arguments)])
        return int(ended.value.code or 0), out.getvalue(), err.getvalue()
