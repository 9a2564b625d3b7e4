"""Room for measuring: the lock of a device, and whether another measuring process fits into memory beside the resident
ones.

One measurement at a time runs on a device, also across workers and users of a host, by lock files. A lock belongs to
an open file, which the measuring processes inherit: it is free only when the last of them has ended, even if the
conductor died before. A job on the CPU has the whole host for itself; a job on a GPU has that GPU for itself and shares
the host with jobs on other GPUs.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol

import psutil

from optigpu.documents.result import Environment
from optigpu.hardware.cgroup import free_host_bytes
from optigpu.hardware.gpu import free_bytes
from optigpu.paths import saying
from optigpu.vocabulary import DeviceKind

POLL_S = 0.25
WORKER_PREFIX = "worker-"
"""Begins the name of the lock that a worker keeps for the GPU it serves. It does not say that something is measured."""


@contextmanager
def hold(
    folder: Path, device: DeviceKind, environment: Environment, waiting: Callable[[], None]
) -> Iterator[tuple[int, ...]]:
    """Takes the locks that a job on `device` needs and yields their descriptors. While another job has one of them,
    `waiting` is called four times a second, and may raise. Raises OptiGPUError if the folder cannot be used."""
    with ExitStack() as stack:
        descriptors = []
        for name, mode in _wanted(device, environment):
            with saying(
                f"Cannot create a lock file in {folder}", "set OPTIGPU_LOCK_DIR to a writable folder"
            ):
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"{name}.lock"
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            stack.callback(os.close, descriptor)
            _take(descriptor, mode, waiting)
            descriptors.append(descriptor)
        yield tuple(descriptors)


def others_measure(folder: Path, device: DeviceKind, environment: Environment) -> bool:
    """Whether a job is measured on another device of this host. Each lock but those of `device` is tried for a moment,
    shared; a job that wants it in this moment tries again."""
    mine = {f"{name}.lock" for name, _ in _wanted(device, environment)}
    others = (path for path in folder.glob("*.lock") if path.name not in mine)
    for path in (path for path in others if not path.name.startswith(WORKER_PREFIX)):
        try:
            with path.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # removed, or another user's: a lock that cannot be tried says nothing
            continue
    return False


def _wanted(device: DeviceKind, environment: Environment) -> list[tuple[str, int]]:
    if device is DeviceKind.CPU:
        return [("cpu", fcntl.LOCK_EX)]
    # The GPU first: a job that waits for a GPU must not keep jobs on the CPU waiting by its share of the host.
    return [*((gpu.uuid, fcntl.LOCK_EX) for gpu in environment.gpus(device)[:1]), ("cpu", fcntl.LOCK_SH)]


def _take(descriptor: int, mode: int, waiting: Callable[[], None]) -> None:
    while True:
        try:
            return fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            time.sleep(POLL_S)


RESERVE = 2.0
"""While a process is prepared it may need this many times what the largest ready process holds (compilers, copies)."""
HOST_SLACK = 2**30


class MemoryRule(Protocol):
    """Decides how many measuring processes are resident at once. A new one is made for each turn."""

    def add(self, pid: int) -> None:
        """The process `pid` is ready: what it holds is taken note of."""

    def has_space(self) -> bool:
        """Whether another process may be started."""


MakeMemoryRule = Callable[[DeviceKind, Environment], MemoryRule]


class MemoryBudget:
    """Compares the free memory of host and GPU with what the largest resident process holds."""

    def __init__(
        self,
        device: DeviceKind,
        environment: Environment,
        *,
        host_free: Callable[[], int] = free_host_bytes,
        gpu_free: Callable[[str], int | None] = free_bytes,
    ) -> None:
        gpus = environment.gpus(device)
        self._gpu = gpus[0].uuid if gpus else None
        self._host_free, self._gpu_free = host_free, gpu_free
        self._free_before = self._device_free()
        self._largest_host, self._largest_device = 0, 0

    def add(self, pid: int) -> None:
        with suppress(psutil.NoSuchProcess):
            self._largest_host = max(self._largest_host, psutil.Process(pid).memory_info().rss)
        free = self._device_free()
        if free is not None and self._free_before is not None:
            self._largest_device = max(self._largest_device, self._free_before - free)
        self._free_before = free

    def has_space(self) -> bool:
        if self._host_free() < RESERVE * self._largest_host + HOST_SLACK:
            return False
        free = self._device_free()
        return self._gpu is None or (free is not None and free >= RESERVE * self._largest_device)

    def _device_free(self) -> int | None:
        return self._gpu_free(self._gpu) if self._gpu else None
