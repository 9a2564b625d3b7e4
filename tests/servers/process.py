"""Throw-away server processes: started in a folder of their own, gone with the test session."""

import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 10


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
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, **_identity(account))
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
            **_identity(account),
        )

    def stop() -> None:
        _end(process)
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


def wait_until_it_answers(answers: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not answers():
        if time.monotonic() > deadline:
            raise NoServerError(f"{what} was started but does not answer after {START_TIMEOUT_S} s.")
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)  # PostgreSQL: disconnect everybody and shut down; Redis: shut down
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _identity(account: Account | None) -> dict[str, Any]:
    if account is None:
        return {}
    return {"user": account.uid, "group": account.gid, "extra_groups": []}


def end_with_parent() -> None:
    """In a new process: a test session that is killed outright runs no clean-up, so the kernel stops its servers."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)
