"""Monitors the other processes of this machine while a round is timed. Counters are read before and after it, never
within.

Our processes are those in the sessions of the measuring processes, and this process itself; every other one is foreign.
The total comes from the kernel's count of the CPUs' time: it includes processes that ended in between or cannot be seen
from inside a container. Names are known only for processes that are seen at the second reading. A counter that went
backwards tells nothing of the time between its readings, and is named.
"""

import os
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePath

from optigpu.documents.result import Accelerator, Environment
from optigpu.hardware.cgroup import quota_wait_s
from optigpu.hardware.counters import (
    Clocks,
    CpuTimes,
    GpuCounters,
    ProcessTimes,
    clock_files,
    clocks,
    command_line,
    cpu_times,
    gpu_counters,
    heat_files,
    numbers,
    processes,
)
from optigpu.hardware.cpu import allowed_cpus
from optigpu.hardware.gpu import Driver, Gpu
from optigpu.hardware.sensors import SensorError
from optigpu.vocabulary import DeviceKind

LOOPS, STEPS = 4, 8_000


def probe_s() -> float:
    """Seconds of the fastest of a few equal loops, which show how fast this machine computes at the moment. Such times
    of one job compare with each other and with nothing else."""
    found = []
    for _ in range(LOOPS):
        began = time.perf_counter()
        value = 1
        for step in range(STEPS):
            value = (value * 31 + step) & 0xFFFF
        found.append(time.perf_counter() - began)
    return min(found)


Key = tuple[int, int]
"""Identifies a process: its id, and when it was started."""

COUNTER_NOISE_S = 0.05
"""The kernel's counts of CPU time may go back by a few ticks, since it corrects them; by more they are wrong."""
CPU_TIME, OWN_TIME = "of the CPUs' time", "of the measuring process's time"
"""Counters, as a sentence names them after "the count"."""


@dataclass(frozen=True)
class HostReading:
    """All counters at one moment."""

    clocks: Clocks
    cpu: CpuTimes | None
    processes: Mapping[Key, ProcessTimes]
    # The sessions of this job's measuring processes at that moment.
    own: frozenset[int]
    quota_wait_s: float
    heat_slowdowns: int
    clock_hz: float | None
    gpu: GpuCounters
    # Whether another job was measured on this host.
    others: bool
    # Seconds that the probe took; None: it was not timed.
    probe_s: float | None = None


@dataclass(frozen=True)
class HostSample:
    """What happened between two readings, on the CPUs that this process may use and on the GPU."""

    wall_s: float
    cpus: int = 1
    # CPU seconds of processes other than ours; None if the system does not count, a little below 0 if there were none.
    foreign_s: float | None = None
    idle_s: float | None = None
    # CPU seconds that the hypervisor gave to other machines.
    steal_s: float | None = None
    # CPU seconds of the other processes that can be seen, by their name.
    named: Mapping[str, float] = field(default_factory=dict)
    # Other processes (id, start, name) that ran or waited for one of our CPUs at both readings. At a low priority such
    # a process uses little CPU time and never rests. One that only runs while the counters are read uses none at all.
    crowding: frozenset[tuple[int, int, str]] = frozenset()
    quota_wait_s: float = 0.0
    # How often cores and packages slowed down because of heat.
    heat_slowdowns: int = 0
    # The device's clock at the second reading.
    clock_hz: float | None = None
    # Processes on the GPU that are not ours.
    gpu_foreign: int = 0
    # Seconds in which heat, or the power limit, lowered the GPU's clock; None if the GPU does not count them.
    gpu_heat_s: float | None = None
    gpu_power_cap_s: float | None = None
    # What lowered the GPU's clock at the second reading.
    gpu_slowdowns: frozenset[str] = frozenset()
    suspended_s: float = 0.0
    # By how much the time of day was changed.
    wall_jump_s: float = 0.0
    # Whether another job was measured on this host.
    others: bool = False
    # Seconds that the probe took, before or after, whichever is longer; None: it was not timed.
    probe_s: float | None = None
    # The counters that went backwards, in words.
    backwards: tuple[str, ...] = ()


class HostMonitor:
    """Reads the machine's counters for one job."""

    def __init__(
        self,
        device: DeviceKind,
        environment: Environment,
        own: Callable[[], Collection[int]],
        others: Callable[[], bool] = lambda: False,
    ) -> None:
        """What the GPU runs by now is foreign. `own` gives the sessions of the living measuring processes; `others`
        says whether another job is measured."""
        self._own, self._others = own, others
        self._cpus = frozenset(allowed_cpus())
        on_cpu = device is DeviceKind.CPU
        self._heat_files = heat_files(self._cpus) if on_cpu else ()
        self._clock_files = clock_files(self._cpus) if on_cpu else ()
        self._gpu = None if on_cpu else self._open_gpu(environment.gpus(device))
        self._on_gpu_before = self._gpu_now().pids or frozenset()
        self._services: dict[Key, bool] = {}
        # The probe's shortest time of this job; None before the first reading.
        self.fastest_probe_s: float | None = None

    def read(self) -> HostReading:
        """Takes a few milliseconds, most of them for the probe."""
        probed_s = probe_s()
        self.fastest_probe_s = min(probed_s, self.fastest_probe_s or probed_s)
        gpu, clocks_khz = self._gpu_now(), numbers(self._clock_files)
        return HostReading(
            clocks=clocks(),
            cpu=cpu_times(self._cpus),
            processes={process.key: process for process in processes()},
            own=frozenset(self._own()),
            quota_wait_s=quota_wait_s(),
            heat_slowdowns=sum(numbers(self._heat_files)),
            # An idle CPU has a low clock; the fastest one has just worked for us.
            clock_hz=max(clocks_khz) * 1e3 if clocks_khz else gpu.clock_hz,
            gpu=gpu,
            others=self._others(),
            probe_s=probed_s,
        )

    def between(self, before: HostReading, after: HostReading) -> HostSample:
        suspended_s = after.clocks.suspended_s - before.clocks.suspended_s
        backwards = _backwards(before, after)
        spent = None if {CPU_TIME, OWN_TIME} & set(backwards) else _spent(before.cpu, after.cpu)
        return HostSample(
            wall_s=after.clocks.monotonic_s - before.clocks.monotonic_s,
            cpus=len(self._cpus) or os.cpu_count() or 1,
            foreign_s=spent.work_s - _own_s(before, after) if spent else None,
            idle_s=spent.idle_s if spent else None,
            steal_s=spent.steal_s if spent else None,
            named=self._named(before, after),
            crowding=self._crowding(before, after),
            quota_wait_s=max(0.0, after.quota_wait_s - before.quota_wait_s),
            heat_slowdowns=max(0, after.heat_slowdowns - before.heat_slowdowns),
            clock_hz=after.clock_hz,
            gpu_foreign=max(self._gpu_foreign(before), self._gpu_foreign(after)),
            gpu_heat_s=_grown(before.gpu.heat_s, after.gpu.heat_s),
            gpu_power_cap_s=_grown(before.gpu.power_cap_s, after.gpu.power_cap_s),
            gpu_slowdowns=after.gpu.slowdowns,
            suspended_s=suspended_s,
            wall_jump_s=after.clocks.wall_s - before.clocks.wall_s - suspended_s,
            others=before.others or after.others,
            probe_s=max(filter(None, (before.probe_s, after.probe_s)), default=None),
            backwards=backwards,
        )

    def _open_gpu(self, gpus: Sequence[Accelerator]) -> Gpu | None:
        with suppress(SensorError, IndexError):
            driver = Driver()
            weakref.finalize(self, driver.close)
            return driver.gpu(gpus[0].uuid)
        return None

    def _gpu_now(self) -> GpuCounters:
        return gpu_counters(self._gpu) if self._gpu else GpuCounters()

    def _gpu_foreign(self, reading: HostReading) -> int:
        """How many processes on the GPU are not ours. In a container the driver may give the host's ids. Then ours
        cannot be told from others that came after the job began, but there is one for each of our sessions."""
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
            if seconds > 0 and process.cpu in self._cpus and _is_foreign(process, before, after):
                name = SERVICE if self._is_service(process) else process.name
                used[name] = used.get(name, 0.0) + seconds
        return used

    def _crowding(self, before: HostReading, after: HostReading) -> frozenset[tuple[int, int, str]]:
        return frozenset(
            (*key, process.name)
            for key, process in after.processes.items()
            if (earlier := before.processes.get(key))
            and all(each.waiting and each.cpu in self._cpus for each in (earlier, process))
            and _is_foreign(process, before, after)
            and not self._is_service(process)
        )

    def _is_service(self, process: ProcessTimes) -> bool:
        if process.key not in self._services:
            self._services[process.key] = is_service(command_line(process.pid))
        return self._services[process.key]


def _grown(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None or after < before else after - before


def _spent(before: CpuTimes | None, after: CpuTimes | None) -> CpuTimes | None:
    if not before or not after:
        return None
    return CpuTimes(
        work_s=after.work_s - before.work_s,
        idle_s=after.idle_s - before.idle_s,
        steal_s=after.steal_s - before.steal_s,
    )


def _backwards(before: HostReading, after: HostReading) -> tuple[str, ...]:
    """The counters that went backwards by more than the kernel's own corrections."""
    spent = _spent(before.cpu, after.cpu)
    own = [key for key, each in after.processes.items() if _is_own(each, before, after)]
    used_s = [
        _used_s(after.processes[key]) - _used_s(before.processes[key])
        for key in own
        if key in before.processes
    ]
    found = {
        CPU_TIME: spent is not None and min(spent.work_s, spent.idle_s, spent.steal_s) < -COUNTER_NOISE_S,
        OWN_TIME: min(used_s, default=0.0) < -COUNTER_NOISE_S,
        "of the waits for the CPU quota": after.quota_wait_s < before.quota_wait_s,
        "of the slow-downs for heat": after.heat_slowdowns < before.heat_slowdowns,
    }
    return tuple(name for name, is_so in found.items() if is_so)


def _own_s(before: HostReading, after: HostReading) -> float:
    """CPU seconds of the measuring processes with their ended children, and of this process without its own."""
    return sum(
        _used_s(process) - (_used_s(before.processes[key]) if key in before.processes else 0.0)
        for key, process in after.processes.items()
        if _is_own(process, before, after)
    )


def _used_s(process: ProcessTimes) -> float:
    """The ended children of this process may be another job's, so they are left out."""
    return process.used_s + (process.ended_children_s if process.pid != os.getpid() else 0.0)


def _is_own(process: ProcessTimes, before: HostReading, after: HostReading) -> bool:
    return process.pid == os.getpid() or process.session in before.own or process.session in after.own


def _is_foreign(process: ProcessTimes, before: HostReading, after: HostReading) -> bool:
    """Whether it is a program of somebody else's: neither ours nor a thread of the kernel."""
    return not process.kernel and not _is_own(process, before, after)


SERVICE = "OptiGPU's own service"
"""The name under which their CPU time is shown."""


def is_service(command: Sequence[str]) -> bool:
    """Whether a command line starts the API, a worker or the `optigpu` command, as the documentation does."""
    if not command:
        return False
    if any(PurePath(word).name == "optigpu" for word in command[:2]):
        return True
    if "worker.app" in " ".join(command) and any(PurePath(word).name == "celery" for word in command[:3]):
        return True
    if "-m" not in command[:-1] or not PurePath(command[0]).name.startswith("python"):
        return False
    return command[command.index("-m") + 1].split(".")[0] in ("api", "worker")
