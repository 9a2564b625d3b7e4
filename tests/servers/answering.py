"""Servers of this machine that a test starts, and ends."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from optigpu.http_clients import http_client
from optigpu.vocabulary import OptiGPUError

STARTS_WITHIN_S = 600.0


@contextmanager
def running(
    command: Sequence[str], page: str, folder: Path, variables: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The server's address, once `page` answers; a free port is appended to the command.

    It has a session of its own, whose work counts as that of the job that asks it. Raises OptiGPUError, with the end of
    what it printed, for one that ends or does not answer.
    """
    port = _free_port()
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
        _wait(process, url + page, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", page: str, log: Path) -> None:
    until = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < until and process.poll() is None:
        try:
            with http_client(page, timeout=5.0) as http:
                if http.get(page).is_success:
                    return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise OptiGPUError(f"{page} did not answer: {log.read_text(errors='replace')[-3000:]}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
