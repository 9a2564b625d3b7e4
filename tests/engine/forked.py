"""Processes that are forked from one that has imported torch and transformers: to import them takes seconds of CPU.

Each is a process of its own, with its own session, descriptors and variables, confined as always, and runs the same
program as another. What a start itself does is shown in test_replicate.py and test_child.py.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

import pytest

from optigpu.child import confined
from tests.engine.children import forking

FORKED = confined.__name__
"""The module that is run so: it confines a process that measures, and then runs its program."""
READ_EARLY = ("HF_", "TRANSFORMERS_", "TORCH_", "PYTORCH_", "CUDA_", "LD_")
"""Variables that torch and transformers read while they are imported; all others are read when they are needed."""
MOST_FORKING = 2
"""Of different variables; a process with others than theirs is started by itself."""
_PR_SET_CHILD_SUBREAPER = 36
_starting = threading.Lock()
"""Held while a process is asked for: answers are heard in their order, and orphans are adopted until then alone."""
_POLL_S = 0.005


class Forked:
    """A child of this process, as far as a `Child` asks it: what subprocess.Popen is to it."""

    def __init__(self, pid: int, stdin: IO[bytes] | None, stdout: IO[bytes] | None) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._status: int | None = None
        _forked.add(self)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, or the signal that ended it, negative. Raises subprocess.TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while self._status is None:
            if self._ended():
                _forked.discard(self)
            elif until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("", timeout or 0.0)
            else:
                time.sleep(_POLL_S)
        return self._status

    def _ended(self) -> bool:
        """Whether it has ended. The status of one that somebody else has waited for is 0, as subprocess says it."""
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            pid, status = self.pid, 0
        if pid:
            self._status = os.waitstatus_to_exitcode(status)
        return pid != 0

    def kill(self) -> None:
        """Does nothing to one that has been waited for."""
        if self._status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


_forked: set[Forked] = set()


def forked() -> frozenset[int]:
    """The ids of those that have not been waited for."""
    return frozenset(each.pid for each in _forked)


class Forking:
    """The process that has imported them, with the variables of the first one that was asked for."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._asking, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = (sys.executable, "-P", "-m", forking.__name__, str(theirs.fileno()))
        more = {"PYTHONPATH": os.pathsep.join(sys.path)}
        with theirs:
            self._process = subprocess.Popen(
                command,
                env={**variables, **more},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        assert self._asking.recv(len(forking.READY)) == forking.READY

    def fork(
        self, program: Sequence[str], variables: Mapping[str, str], descriptors: Mapping[int, int]
    ) -> int:
        """The id of a new child of this process. `descriptors` are ours, by the numbers that they have there."""
        order = forking.Order(
            parent=os.getpid(),
            program=tuple(program),
            variables=dict(variables),
            folder=os.getcwd(),
            descriptors=tuple(descriptors),
        )
        with _starting, _adopting():
            line = order.model_dump_json().encode()
            socket.send_fds(self._asking, [line], list(descriptors.values()))
            return int(self._asking.recv(16))


_forking: dict[frozenset[tuple[str, str]], Forking] = {}


@pytest.fixture(scope="module")
def forked_children() -> Iterator[None]:
    """The measuring processes that the tests of a file start are forked."""
    patch = fork_children()
    yield
    patch.undo()


def fork_children() -> pytest.MonkeyPatch:
    """Measuring processes are forked, until the patch is undone."""
    patch = pytest.MonkeyPatch()
    if sys.platform == "linux":
        patch.setattr("optigpu.conductor.processes.child.subprocess", _Subprocess)
    return patch


class _Subprocess:
    """What those that start processes use of the module subprocess."""

    DEVNULL, PIPE, STDOUT = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
    TimeoutExpired = subprocess.TimeoutExpired

    @staticmethod
    def Popen(  # noqa: N802
        command: Sequence[str],
        *,
        stdin: int,
        stdout: int | None = None,
        stderr: int | None = None,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        **rest: Any,
    ) -> "subprocess.Popen[bytes] | Forked":
        """`python ... -m FORKED ...` is forked; all others are started."""
        variables = os.environ if env is None else env
        program = _program(command)
        forking = _forking_for(variables) if program else None
        if program is None or forking is None:
            return subprocess.Popen(
                command, stdin=stdin, stdout=stdout, stderr=stderr, env=env, pass_fds=pass_fds, **rest
            )
        theirs_in, stdin_ = (
            os.pipe() if stdin == subprocess.PIPE else (os.open(os.devnull, os.O_RDONLY), None)
        )
        stdout_, theirs_out = os.pipe() if stdout == subprocess.PIPE else (None, os.dup(1))
        theirs_err = os.dup(theirs_out if stderr == subprocess.STDOUT else 2)
        kept = {number: number for number in pass_fds}
        pid = forking.fork(program, variables, {0: theirs_in, 1: theirs_out, 2: theirs_err} | kept)
        for descriptor in (theirs_in, theirs_out, theirs_err):
            os.close(descriptor)
        return Forked(pid, _file(stdin_, "wb"), _file(stdout_, "rb"))


def _file(descriptor: int | None, mode: str) -> IO[bytes] | None:
    return None if descriptor is None else open(descriptor, mode, buffering=0)


def _program(command: Sequence[str]) -> Sequence[str] | None:
    """The module and its arguments, if it is the one that is forked, with this interpreter."""
    return command[command.index(FORKED) :] if FORKED in command and command[0] == sys.executable else None


def _forking_for(variables: Mapping[str, str]) -> Forking | None:
    early = frozenset(each for each in variables.items() if each[0].startswith(READ_EARLY))
    if early not in _forking and len(_forking) < MOST_FORKING:
        _forking[early] = Forking(variables)
    return _forking.get(early)


@contextmanager
def _adopting() -> Iterator[None]:
    """Orphans among this process's descendants become its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
