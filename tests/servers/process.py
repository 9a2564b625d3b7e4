"""The machine as the tests may know it, and throw-away server processes, which end with the test or the session."""

import ctypes
import os
import platform
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from optigpu.http_clients import http_client
from optigpu.vocabulary import OptiGPUError

START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 10
STARTS_WITHIN_S = 600.0


class NoServerError(Exception):
    """No server can be had; the message is the one sentence that the user reads."""


def _leave_it() -> None:
    """A server that was found running is not ours to stop."""


@dataclass(frozen=True)
class Server:
    url: str
    origin: str  # "variable", "localhost", "programs" or "docker"
    stop: Callable[[], None] = _leave_it


@dataclass(frozen=True)
class Account:
    """The user that a server runs as."""

    name: str
    uid: int
    gid: int


def server_account() -> Account | None:
    """Somebody else when this is root, since PostgreSQL refuses to run as root; else None: stay as we are."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name, entry.pw_uid, entry.pw_gid)
    raise NoServerError(
        "PostgreSQL refuses to run as root: add a user `postgres`, or run the tests as an ordinary user."
    )


def scratch_folder(account: Account | None) -> Path:
    # /tmp and not $TMPDIR: the folders above must be open to the account, and a Unix socket's path be short.
    folder = Path(tempfile.mkdtemp(prefix="optigpu-tests-", dir="/tmp"))
    if account is not None:
        os.chown(folder, account.uid, account.gid)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_to_end(command: list[str], folder: Path, account: Account | None) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, **identity(account))
    if done.returncode != 0:
        raise NoServerError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")


def serve(
    command: list[str], folder: Path, account: Account | None, url: str, answers: Callable[[str], bool]
) -> Server:
    """Start `command` in `folder` and wait until it answers; `stop` ends it and removes the folder."""
    log = folder / "server.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            # Ctrl-C must reach the tests alone: they still need the server to clean up.
            start_new_session=True,
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
            **identity(account),
        )

    def stop() -> None:
        end(process, signal.SIGINT)  # PostgreSQL: disconnect everybody and shut down; Redis: shut down
        shutil.rmtree(folder)

    def answers_or_ended() -> bool:
        if process.poll() is not None:
            raise NoServerError(f"`{' '.join(command)}` ended at once: {log.read_text().strip()}")
        return answers(url)

    try:
        wait_until_it_answers(answers_or_ended, what=f"`{command[0]}`")
    except BaseException:
        stop()
        raise
    return Server(url, origin="programs", stop=stop)


def wait_until_it_answers(answers: Callable[[], bool], what: str, within_s: float = START_TIMEOUT_S) -> None:
    deadline = time.monotonic() + within_s
    while not answers():
        if time.monotonic() > deadline:
            raise NoServerError(f"{what} was started but does not answer after {within_s:g} s.")
        time.sleep(0.05)


def end(process: subprocess.Popen[bytes], number: signal.Signals, within_s: float = STOP_TIMEOUT_S) -> None:
    """Asks it to end by a signal, and kills it when it does not."""
    process.send_signal(number)
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def identity(account: Account | None) -> dict[str, Any]:
    if account is None:
        return {}
    return {"user": account.uid, "group": account.gid, "extra_groups": []}


def end_with_parent() -> None:
    """In a new process: a test session that is killed outright runs no clean-up, so the kernel stops its servers."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)


@contextmanager
def running(
    command: Sequence[str], page: str, folder: Path, variables: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The server's address, once `page` answers; a free port is appended to the command.

    It has a session of its own, whose work counts as that of the job that asks it. Raises OptiGPUError, with the end of
    what it printed, for one that ends or does not answer.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log = folder / "server.log"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("w") as printed:
        process = subprocess.Popen(
            [*command, str(port)],
            env=kept | dict(variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_it_answers(lambda: _answers(process, url + page, log), page, STARTS_WITHIN_S)
        yield url
    finally:
        end(process, signal.SIGTERM, 20)


def _answers(process: "subprocess.Popen[bytes]", page: str, log: Path) -> bool:
    if process.poll() is not None:
        raise OptiGPUError(f"{page} did not answer: {log.read_text(errors='replace')[-3000:]}")
    try:
        with http_client(page, timeout=5.0) as http:
            return http.get(page).is_success
    except httpx.TransportError:
        return False


@dataclass(frozen=True)
class Machine:
    environment: Mapping[str, str]
    search_path: str  # folders of programs, as in PATH
    postgres_root: Path  # Debian keeps PostgreSQL's server programs here, off PATH, by version
    families: frozenset[str]  # what /etc/os-release calls the system and what it descends from
    is_root: bool

    def program(self, name: str) -> str | None:
        """The path of a program, looked up anew at each call: it may have just been installed."""
        by_version = sorted(self.postgres_root.glob("*/bin"), key=_version, reverse=True)
        return shutil.which(name, path=os.pathsep.join([self.search_path, *map(str, by_version)]))


def this_machine() -> Machine:
    return Machine(
        environment=dict(os.environ),
        search_path=os.environ.get("PATH", os.defpath),
        postgres_root=Path("/usr/lib/postgresql"),
        families=_os_families(),
        is_root=os.geteuid() == 0,
    )


def _version(folder: Path) -> float:
    return float(folder.parent.name)


def _os_families() -> frozenset[str]:
    try:
        release = platform.freedesktop_os_release()
    except OSError:  # not a Linux
        return frozenset()
    return frozenset({release["ID"], *release.get("ID_LIKE", "").split()})
