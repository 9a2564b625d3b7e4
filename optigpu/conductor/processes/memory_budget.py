"""Decides whether another measuring process fits into memory beside the resident ones."""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import psutil

from optigpu.documents.result import Environment
from optigpu.hardware.cgroup import free_host_bytes
from optigpu.hardware.gpu import free_bytes
from optigpu.vocabulary import DeviceKind

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
