"""What else happens on this machine while a round is timed: read before it and after it, never within.

Ours are the measuring processes' sessions and this process itself; whoever else uses the CPUs is foreign. The total
comes from the kernel's count of the CPUs' time, so that a process counts that has ended in between, or that cannot be
seen from inside a container; names can be told of those alone that are seen at both ends.
"""

import os
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from optigpu.documents.result import Environment
from optigpu.hardware.cgroup import quota_wait_s
from optigpu.hardware.counters import (
    Clocks,
    CpuTimes,
    GpuCounters,
    ProcessTimes,
    clock_files,
    clocks,
    cpu_times,
    gpu_counters,
    heat_files,
    numbers,
    processes,
)
from optigpu.hardware.cpu import allowed_cpus
from optigpu.hardware.nvml import Driver, Gpu
from optigpu.hardware.sensors import SensorError
from optigpu.vocabulary import DeviceKind

Key = tuple[int, int]
"""What names a process: its id, and when it was started."""


@dataclass(frozen=True)
class HostReading:
    """Everything that is counted, at one moment. `own` are the sessions that were ours then."""

    clocks: Clocks
    cpu: CpuTimes | None
    processes: Mapping[Key, ProcessTimes]
    own: frozenset[int]
    quota_wait_s: float
    heat_slowdowns: int
    clock_hz: float | None
    gpu: GpuCounters
    others: bool


@dataclass(frozen=True)
class HostSample:
    """What happened between two glances, on the CPUs that this process may use and on the GPU.

    `foreign_s` are the CPU seconds that were not ours, None where the system does not count; a little below zero when
    there were none. `named` says which visible processes used some, by name. `crowding` are foreign processes that ran
    or waited for one of our CPUs at both ends: at a low priority such a one uses little and never rests.
    `heat_slowdowns` counts the slow-downs of cores and packages for heat. `clock_hz` is the device's clock at the end.
    `gpu_foreign` counts processes on the GPU that are not ours. `gpu_heat_s` and `gpu_power_cap_s` are seconds in which
    heat or the power limit held its clock down, None where it does not count them; `gpu_slowdowns` is what did so at
    the end. `wall_jump_s` is by how much somebody set the time of day. `others` says that another job was measured on
    this host.
    """

    wall_s: float
    cpus: int = 1
    foreign_s: float | None = None
    idle_s: float | None = None
    steal_s: float | None = None
    named: Mapping[str, float] = field(default_factory=dict)
    crowding: frozenset[tuple[int, int, str]] = frozenset()
    quota_wait_s: float = 0.0
    heat_slowdowns: int = 0
    clock_hz: float | None = None
    gpu_foreign: int = 0
    gpu_heat_s: float | None = None
    gpu_power_cap_s: float | None = None
    gpu_slowdowns: frozenset[str] = frozenset()
    suspended_s: float = 0.0
    wall_jump_s: float = 0.0
    others: bool = False


def nobody() -> bool:
    """No other job is measured on this host."""
    return False


class HostMonitor:
    """Looks at the machine on behalf of one job."""

    def __init__(
        self,
        device: DeviceKind,
        environment: Environment,
        own: Callable[[], Collection[int]],
        others: Callable[[], bool] = nobody,
    ) -> None:
        """To be made before the first measuring process starts, so that what the GPU runs by then is foreign.

        `own` gives the sessions of the measuring processes that live; `others` says whether another job is measured.
        """
        self._own, self._others = own, others
        self._cpus = frozenset(allowed_cpus())
        on_cpu = device is DeviceKind.CPU
        self._heat_files = heat_files(self._cpus) if on_cpu else ()
        self._clock_files = clock_files(self._cpus) if on_cpu else ()
        self._gpu = None if on_cpu else self._open_gpu(environment)
        self._on_gpu_before = self._gpu_now().pids or frozenset()

    def read(self) -> HostReading:
        """A reading; it takes about a millisecond."""
        gpu, clocks_khz = self._gpu_now(), numbers(self._clock_files)
        return HostReading(
            clocks=clocks(),
            cpu=cpu_times(self._cpus),
            processes={process.key: process for process in processes()},
            own=frozenset(self._own()),
            quota_wait_s=quota_wait_s(),
            heat_slowdowns=sum(numbers(self._heat_files)),
            # Of an idle CPU it is the lowest one; the fastest has just worked for us.
            clock_hz=max(clocks_khz) * 1e3 if clocks_khz else gpu.clock_hz,
            gpu=gpu,
            others=self._others(),
        )

    def between(self, before: HostReading, after: HostReading) -> HostSample:
        """What the two glances tell of the time between them."""
        suspended_s = after.clocks.suspended_s - before.clocks.suspended_s
        spent = _spent(before.cpu, after.cpu)
        return HostSample(
            wall_s=after.clocks.monotonic_s - before.clocks.monotonic_s,
            cpus=len(self._cpus) or os.cpu_count() or 1,
            foreign_s=spent.work_s - _own_s(before, after) if spent else None,
            idle_s=spent.idle_s if spent else None,
            steal_s=spent.steal_s if spent else None,
            named=self._named(before, after),
            crowding=self._crowding(before, after),
            quota_wait_s=after.quota_wait_s - before.quota_wait_s,
            heat_slowdowns=after.heat_slowdowns - before.heat_slowdowns,
            clock_hz=after.clock_hz,
            gpu_foreign=max(self._gpu_foreign(before), self._gpu_foreign(after)),
            gpu_heat_s=_grown(before.gpu.heat_s, after.gpu.heat_s),
            gpu_power_cap_s=_grown(before.gpu.power_cap_s, after.gpu.power_cap_s),
            gpu_slowdowns=after.gpu.slowdowns,
            suspended_s=suspended_s,
            wall_jump_s=after.clocks.wall_s - before.clocks.wall_s - suspended_s,
            others=before.others or after.others,
        )

    def _open_gpu(self, environment: Environment) -> Gpu | None:
        try:
            driver = Driver()
        except SensorError:
            return None
        weakref.finalize(self, driver.close)
        try:
            return driver.gpu(environment.accelerators[0].uuid)
        except (SensorError, IndexError):
            return None

    def _gpu_now(self) -> GpuCounters:
        return gpu_counters(self._gpu) if self._gpu else GpuCounters()

    def _gpu_foreign(self, reading: HostReading) -> int:
        """Processes on the GPU that are not ours. In a container the driver may number them as the host does.

        Then ours cannot be told from those that came later, but there is one for each of our sessions.
        """
        pids = reading.gpu.pids or frozenset()
        ours = {each.pid for each in reading.processes.values() if each.session in reading.own}
        if pids & ours:
            return len(pids - ours)
        later = pids - self._on_gpu_before
        return len(pids - later) + max(0, len(later) - len(reading.own))

    def _named(self, before: HostReading, after: HostReading) -> Mapping[str, float]:
        used: dict[str, float] = {}
        for key, process in after.processes.items():
            earlier = before.processes.get(key)
            seconds = process.used_s - (earlier.used_s if earlier else 0.0)
            if seconds > 0 and process.cpu in self._cpus and not _is_own(process, before, after):
                used[process.name] = used.get(process.name, 0.0) + seconds
        return used

    def _crowding(self, before: HostReading, after: HostReading) -> frozenset[tuple[int, int, str]]:
        return frozenset(
            (*key, process.name)
            for key, process in after.processes.items()
            if (earlier := before.processes.get(key))
            and all(each.waiting and each.cpu in self._cpus for each in (earlier, process))
            and not _is_own(process, before, after)
        )


def _grown(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _spent(before: CpuTimes | None, after: CpuTimes | None) -> CpuTimes | None:
    if not before or not after:
        return None
    return CpuTimes(
        work_s=after.work_s - before.work_s,
        idle_s=after.idle_s - before.idle_s,
        steal_s=after.steal_s - before.steal_s,
    )


def _own_s(before: HostReading, after: HostReading) -> float:
    """CPU seconds of the measuring processes, with those that they started and outlived, and of this process alone."""
    total_s = 0.0
    for key, process in after.processes.items():
        if _is_own(process, before, after):
            total_s += _used_s(process) - (_used_s(before.processes[key]) if key in before.processes else 0.0)
    return total_s


def _used_s(process: ProcessTimes) -> float:
    """What this process outlives may be another job's."""
    return process.used_s + (process.ended_children_s if process.pid != os.getpid() else 0.0)


def _is_own(process: ProcessTimes, before: HostReading, after: HostReading) -> bool:
    return process.pid == os.getpid() or process.session in before.own or process.session in after.own
