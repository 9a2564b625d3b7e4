"""One measuring process, seen from the conductor: starts it, exchanges messages with it, and always ends it. `ask`
waits for an answer while a job's limits are checked.

Single-threaded and never blocking: one selector serves the commands, the answers and what the process prints. So full
pipes cannot cause a deadlock, and control returns to the caller four times a second.
"""

import logging
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Protocol, TypeVar

import psutil
from pydantic import ValidationError

from optigpu.child.messages import ANSWER, Answer, Broken, Progress, Refused
from optigpu.conductor.processes.confinement import confined_program, temporary_folder
from optigpu.hardware.cgroup import oom_kills
from optigpu.vocabulary import (
    CancelledError,
    CrashError,
    Frozen,
    HostMemoryError,
    OutOfMemoryError,
    OverdueError,
    ReplicateError,
    UnsupportedError,
)

TASKS = (sys.executable, "-P", "-m", "optigpu.child.tasks")
"""The program of what is no variant. -P keeps files of the working directory from being taken for modules."""
TICK_S = 0.25
END_GRACE_S = 5.0
STOP_GRACE_S = 0.5
DEATH_GRACE_S = 1.0
TERM_GRACE_S = 2.0
KILL_GRACE_S = 30.0
LONGEST_LINE = 64 * 2**20
LONGEST_TAIL = 4 * 2**10
_CHUNK = 2**18
_CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)


class Child(AbstractContextManager["Child"]):
    """A measuring process in its own session, confined, with a temporary directory of its own that goes with it.

    As a context manager it ends the process and all that it started.

    `program` is called with `--answers-fd N`, the descriptor that it answers on; `keep` are descriptors that it
    inherits, so that they stay open as long as it lives. Without `network` it has only loopback, where the kernel can
    do that: `optigpu.child.confined`.
    """

    def __init__(
        self,
        program: Sequence[str],
        variables: Mapping[str, str],
        keep: Sequence[int] = (),
        *,
        network: bool = True,
    ) -> None:
        self._oom_kills = oom_kills()
        self._status: int | None = None
        self._mute = False
        self._searched = 0
        self._outgoing, self._incoming, self._tail = bytearray(), bytearray(), bytearray()
        self._temporary = temporary_folder()
        self._answers, theirs = os.pipe()
        try:
            confined = confined_program(program, network=network, folder=self._temporary)
            own = {**variables, "TMPDIR": str(self._temporary)}
            self._process = subprocess.Popen(
                [*confined, "--answers-fd", str(theirs)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=own,
                pass_fds=(theirs, *keep),
                start_new_session=True,
                bufsize=0,
            )
        except BaseException as error:
            os.close(self._answers)
            shutil.rmtree(self._temporary, ignore_errors=True)
            if isinstance(error, OSError):
                raise ReplicateError(f"The measuring process cannot be started: {error.strerror}.") from error
            raise
        finally:
            os.close(theirs)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._printed = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._selector = selectors.DefaultSelector()
        for descriptor in (self._stdin, self._answers, self._printed):
            os.set_blocking(descriptor, False)
        for descriptor in (self._answers, self._printed):
            self._selector.register(descriptor, selectors.EVENT_READ)

    @property
    def pid(self) -> int:
        """The process's id, which is also its group's and its session's."""
        return self._process.pid

    @property
    def printed(self) -> str:
        """The end of what it has printed; of one that has ended, all of that end."""
        return readable(self._tail.decode(errors="replace"))

    @property
    def has_died(self) -> bool:
        """Whether it was found dead, or was ended."""
        return self._status is not None

    def __exit__(self, kind: object, *_: object) -> None:
        self.end(END_GRACE_S if kind is None else STOP_GRACE_S)

    def tell(self, message: Frozen) -> None:
        """Sends a message; what the pipe does not take at once is written while listening."""
        if not self._outgoing and not self._mute:
            self._selector.register(self._stdin, selectors.EVENT_WRITE)
        self._outgoing += message.model_dump_json().encode() + b"\n"
        self._exchange(0)

    def listen(self) -> Answer | None:
        """The next answer, or None after a quarter of a second of silence. Raises ReplicateError, with the end of what
        the process printed, if it has died or sends something that is not a message, CrashError if it crashed, and
        HostMemoryError if the kernel killed it because memory was short."""
        until = time.monotonic() + TICK_S
        while True:
            line = self._next_line()
            if line is not None:
                return self._parsed(line)
            if self._mute:
                raise self._death()
            left = until - time.monotonic()
            if left <= 0:
                self._mute = self._has_ended()  # one that it started may still hold the pipe open
                return None
            self._exchange(left)

    def end(self, grace_s: float) -> int:
        """Ends the process and all that it started, by signals after `grace_s`. Returns its exit status, or a negative
        signal. Raises ReplicateError if even SIGKILL does not end it."""
        if self._status is None:
            self._stop_writing(close=True)
            if not self._ended_within(grace_s):
                self._signal(signal.SIGTERM)
                self._ended_within(TERM_GRACE_S)
            # Its processes are killed before it is reaped: until then no other process can get its id.
            self._signal(signal.SIGKILL)
            self._status = self._reap()
            self._close()
        return self._status

    def _exchange(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if key.fd == self._stdin:
                try:
                    written = os.write(self._stdin, self._outgoing[:_CHUNK])
                except BrokenPipeError:  # it died: listening finds out how
                    written = len(self._outgoing)
                del self._outgoing[:written]
                if not self._outgoing:
                    self._stop_writing()
            elif key.fd == self._answers:
                self._mute = not self._read(key.fd, self._incoming)
            else:
                self._read(key.fd, self._tail)
                del self._tail[:-LONGEST_TAIL]

    def _read(self, descriptor: int, into: bytearray) -> bool:
        """Whether the other end is still open."""
        chunk = os.read(descriptor, _CHUNK)
        into += chunk
        if not chunk:
            self._selector.unregister(descriptor)
        return bool(chunk)

    def _stop_writing(self, close: bool = False) -> None:
        with suppress(KeyError):
            self._selector.unregister(self._stdin)
        if close and self._process.stdin:
            self._process.stdin.close()

    def _next_line(self) -> bytes | None:
        end = self._incoming.find(b"\n", self._searched)
        self._searched = len(self._incoming) if end < 0 else 0
        if end < 0:
            if len(self._incoming) > LONGEST_LINE:
                raise ReplicateError(
                    f"The measuring process sent a message of more than {LONGEST_LINE} bytes."
                )
            return None
        line = bytes(self._incoming[:end])
        del self._incoming[: end + 1]
        return line

    def _parsed(self, line: bytes) -> Answer:
        try:
            return ANSWER.validate_json(line)
        except ValidationError:
            beginning = readable(line[:100].decode(errors="replace"))
            raise ReplicateError(
                f"The measuring process sent an invalid message: {beginning!r}. {self._last_output()}"
            ) from None

    def _death(self) -> ReplicateError:
        ended_itself = self._ended_within(DEATH_GRACE_S)
        status = self.end(STOP_GRACE_S)
        if not ended_itself:
            return ReplicateError(f"The measuring process stopped answering. {self._last_output()}")
        if status == -signal.SIGKILL and oom_kills() > self._oom_kills:
            return HostMemoryError(
                "out of memory: the kernel killed the measuring process; use a smaller model or batch."
            )
        if status < 0:
            how = f"was killed by signal {-status} ({signal.strsignal(-status)})"
        else:
            how = f"ended with status {status}"
        kind = CrashError if -status in _CRASHES else ReplicateError
        return kind(f"The measuring process {how} before it answered. {self._last_output()}")

    def _last_output(self) -> str:
        return f"Its last output: {self.printed}" if self.printed else "It printed nothing."

    def _has_ended(self) -> bool:
        """Whether it has ended; it is not reaped, so that its id stays its own."""
        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    def _ended_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self._has_ended():
            if time.monotonic() > until:
                return False
            self._exchange(0.02)  # what it prints must not keep it from ending
        return True

    def _signal(self, number: signal.Signals) -> None:
        # macOS does not permit to signal a group that has only zombies left.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
        for pid in self._survivors():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _survivors(self) -> list[int]:
        """The living processes of its session, without those that left it."""
        found = []
        for pid in psutil.pids():
            with suppress(OSError, psutil.NoSuchProcess):
                if os.getsid(pid) == self.pid and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    found.append(pid)
        return found

    def _reap(self) -> int:
        until = time.monotonic() + KILL_GRACE_S
        try:
            status = self._process.wait(KILL_GRACE_S)
            while self._survivors():
                if time.monotonic() > until:
                    raise subprocess.TimeoutExpired("", KILL_GRACE_S)
                time.sleep(0.02)
        except subprocess.TimeoutExpired:
            raise ReplicateError(
                f"The measuring process {self.pid} did not end after SIGKILL; check the driver of its device."
            ) from None
        return status

    def _close(self) -> None:
        self._exchange(0)  # reads the end of its output
        self._selector.close()
        os.close(self._answers)
        shutil.rmtree(self._temporary, ignore_errors=True)
        if self._process.stdout:
            self._process.stdout.close()


def readable(text: str) -> str:
    """The text with only printable characters and line ends, which every database and terminal can show."""
    return "".join(character for character in text if character.isprintable() or character == "\n").strip()


Wanted = TypeVar("Wanted", bound=Frozen)

_log = logging.getLogger(__name__)


class Watch(Protocol):
    """The limits that hold while an answer is waited for, as JobProgress has them."""

    def check(self) -> None:
        """Called at least twice a second; raises to stop waiting."""

    def show(self, doing: str) -> None:
        """The process says what it is busy with."""


class TimedWatch:
    """A Watch of its own time: `limit_s` seconds from when it is made, unless somebody asks to stop before."""

    def __init__(
        self,
        limit_s: float,
        cancelled: Callable[[], str | None],
        overdue: str,
        doing: Callable[[str], None] = lambda _doing: None,
    ) -> None:
        """`overdue` is the error's sentence when the time is up; `doing` is told what the process says."""
        self.show, self._cancelled, self._overdue = doing, cancelled, overdue
        self._until = time.monotonic() + limit_s

    def check(self) -> None:
        reason = self._cancelled()
        if reason is not None:
            raise CancelledError(reason)
        if time.monotonic() > self._until:
            raise OverdueError(self._overdue)


Saw = Callable[[Mapping[str, float]], None]
"""Is given the samples of each request of a warm-up."""


def ask(
    child: Child, message: Frozen, wanted: type[Wanted], progress: Watch, saw: Saw = lambda _: None
) -> Wanted:
    """Sends a message and waits for its answer. Raises UnsupportedError when the process refuses, ReplicateError when
    it fails, and what `progress.check` raises."""
    child.tell(message)
    return hear(child, wanted, progress, saw)


def hear(child: Child, wanted: type[Wanted], progress: Watch, saw: Saw = lambda _: None) -> Wanted:
    """Waits for the answer to what the process was told. Raises what `ask` raises."""
    while True:
        progress.check()
        answer = child.listen()
        if isinstance(answer, Progress):
            if answer.samples:
                saw(answer.samples)
            else:
                progress.show(answer.doing)
        elif isinstance(answer, wanted):
            return answer
        elif answer is not None:
            raise _error_of(answer)


def _error_of(answer: Answer) -> Exception:
    if isinstance(answer, Refused):
        return UnsupportedError(readable(answer.reason))
    if not isinstance(answer, Broken):
        return ReplicateError(f"The measuring process sent {answer.kind!r}, which was not asked for.")
    reason = readable(answer.reason)
    if answer.trace:
        _log.warning("a measuring process failed: %s\n%s", reason, answer.trace)
    if answer.fault == "out_of_memory":
        return OutOfMemoryError(f"out of memory: {reason}")
    return ReplicateError(reason)
