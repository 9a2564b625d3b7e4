"""The embedded service as a child process that never outlives its parent."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from optigpu.http_clients import http_client
from optigpu.vocabulary import OptiGPUError

ROOT = Path(__file__).resolve().parents[1]
START_S = 60.0
STOP_S = 20.0
_LISTENS = re.compile(r"OptiGPU listens on (http://\S+)")
_KEPT_SETTINGS = {"OPTIGPU_DATA_DIR", "OPTIGPU_LOCK_DIR", "OPTIGPU_MODELS_DIR"}
_PR_SET_PDEATHSIG = 1


@contextmanager
def embedded_service(log: Path) -> Iterator[str]:
    """Starts `python -m api` on a free loopback port, yields its address once it is ready, and stops it.

    Settings that would make it anything but embedded are left out. Its output goes to `log`.
    Raises OptiGPUError with the end of the log when it does not come up.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("OPTIGPU_") or name in _KEPT_SETTINGS
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "api", "--host", "127.0.0.1", "--port", "0"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with(os.getpid()),
        )
    try:
        yield _address_when_ready(process, log)
    finally:
        _stop(process)


def _end_with(parent: int):
    """For the child, before it becomes the service: SIGTERM when the parent dies, even of SIGKILL."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def set_signal() -> None:
        if prctl:
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return set_signal


def _address_when_ready(process: subprocess.Popen, log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        listens = _LISTENS.search(log.read_text(errors="replace"))
        if listens and _is_ready(listens.group(1)):
            return listens.group(1)
        time.sleep(0.1)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    ended = f"ended with status {process.returncode}" if process.poll() is not None else "is not ready"
    raise OptiGPUError(f"The service {ended} after its start; the end of {log}:\n{tail}")


def _is_ready(url: str) -> bool:
    try:
        with http_client(url, timeout=5) as http:
            return http.get("/readyz").is_success
    except httpx.TransportError:
        return False


def _stop(process: subprocess.Popen) -> None:
    """SIGTERM, and SIGKILL for its group when that takes too long or Ctrl-C is pressed again."""
    try:
        process.terminate()
        process.wait(STOP_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
