"""Whether another measuring process fits beside those that are resident."""

from contextlib import suppress

import psutil

from optigpu.documents.result import Environment
from optigpu.hardware.cgroup import memory_limit, memory_used
from optigpu.hardware.gpu import free_bytes
from optigpu.vocabulary import DeviceKind

RESERVE = 2.0
"""Another process needs, while it is made ready, at most so many times what the largest one holds (its compilers)."""
HOST_SLACK = 2**30


class Room:
    """Compares what is free with what the largest resident process turned out to hold."""

    def __init__(self, device: DeviceKind, environment: Environment) -> None:
        gpus = environment.accelerators if device is DeviceKind.CUDA else ()
        self._gpu = gpus[0].uuid if gpus else None
        self._free_before = self._device_free()
        self._largest_host, self._largest_device = 0, 0

    def taken_by(self, pid: int) -> None:
        """A process stands ready: what it holds is remembered."""
        with suppress(psutil.NoSuchProcess):
            self._largest_host = max(self._largest_host, psutil.Process(pid).memory_info().rss)
        free = self._device_free()
        if free is not None and self._free_before is not None:
            self._largest_device = max(self._largest_device, self._free_before - free)
        self._free_before = free

    def for_another(self) -> bool:
        """Whether a process as large as the largest so far surely fits."""
        if host_free_bytes() < RESERVE * self._largest_host + HOST_SLACK:
            return False
        free = self._device_free()
        return self._gpu is None or (free is not None and free >= RESERVE * self._largest_device)

    def _device_free(self) -> int | None:
        return free_bytes(self._gpu) if self._gpu else None


def host_free_bytes() -> int:
    """Memory that a new process can have, the control group's limit respected."""
    available = int(psutil.virtual_memory().available)
    limit, used = memory_limit(), memory_used()
    return available if limit is None or used is None else max(0, min(available, limit - used))
