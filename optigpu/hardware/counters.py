"""Counters of this host that show what happened between two readings. Each is read in well under a millisecond.

What the system does not count is None or empty. In a container /proc/stat and the CPUs' clocks are the host's.
`root` is the root of the file system.
"""

import os
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from optigpu.hardware.cgroup import ROOT, contents
from optigpu.hardware.cpu import CORE, PACKAGE, first_of_each
from optigpu.hardware.gpu import Gpu
from optigpu.hardware.sensors import or_none

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_LONGEST_STAT = 4096
_SCHEDULER_CLOCK = 2
"""CPUCLOCK_SCHED of the kernel: clock_getcpuclockid(3) makes the number of a process's clock from it."""
_KERNEL_THREAD = 0x00200000
"""PF_KTHREAD of the kernel, a bit of a process's flags."""


@dataclass(frozen=True)
class Clocks:
    """The clock of the samples, and by how much two others differ from it: one that goes on while the machine is
    suspended, and the time of day.
    """

    monotonic_s: float
    suspended_s: float
    wall_s: float


@dataclass(frozen=True)
class CpuTimes:
    """Seconds since boot, summed over some CPUs, without time in interrupts, whose process is not known."""

    work_s: float
    idle_s: float
    steal_s: float


@dataclass(frozen=True)
class ProcessTimes:
    """A process with its CPU seconds (all threads), and those of its children that have ended.

    `waiting`: its main thread runs or waits for a CPU; `cpu` is where it was last; `kernel`: it is the kernel's thread.
    """

    pid: int
    started: int
    name: str
    session: int
    cpu: int
    waiting: bool
    used_s: float
    ended_children_s: float
    kernel: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.pid, self.started


@dataclass(frozen=True)
class GpuCounters:
    """A GPU: who computes on it, its multiprocessors' clock, the seconds since the driver was loaded in which heat or
    the power limit held that down, and what holds it down now. None where the GPU does not report it.
    """

    pids: frozenset[int] | None = None
    clock_hz: float | None = None
    heat_s: float | None = None
    power_cap_s: float | None = None
    slowdowns: frozenset[str] = frozenset()


def clocks() -> Clocks:
    monotonic_s = time.clock_gettime(time.CLOCK_MONOTONIC)
    boot = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # Linux alone has it
    return Clocks(
        monotonic_s=monotonic_s,
        suspended_s=time.clock_gettime(boot) - monotonic_s,
        wall_s=time.clock_gettime(time.CLOCK_REALTIME) - monotonic_s,
    )


def cpu_times(cpus: Collection[int], root: Path = ROOT) -> CpuTimes | None:
    """The sum over `cpus`; None if the kernel does not count one of them.

    Columns: user nice system idle iowait irq softirq steal (proc_stat(5)).
    """
    wanted = {f"cpu{cpu}" for cpu in cpus}
    lines = (line.split() for line in contents(root / "proc/stat").splitlines() if line.startswith("cpu"))
    rows = [[int(word) for word in words[1:]] for words in lines if words[0] in wanted]
    if not rows or len(rows) < len(wanted):
        return None
    ticks = [sum(column) for column in zip(*rows, strict=True)]
    work_s, idle_s, steal_s = (sum(part) * _TICK_S for part in (ticks[:3], ticks[3:5], ticks[7:8]))
    return CpuTimes(work_s, idle_s, steal_s)


def processes(root: Path = ROOT) -> tuple[ProcessTimes, ...]:
    """All visible processes; in a container those of the container."""
    with suppress(OSError):
        names = [name for name in os.listdir(root / "proc") if name.isdecimal()]
        found = (_process(f"{root}/proc/{name}/stat") for name in names)
        return tuple(process for process in found if process)
    return ()


def cpu_clock_s(pid: int) -> float | None:
    """CPU seconds of a process, all threads, to the microsecond. None outside of Linux and once it has ended."""
    if sys.platform != "linux":
        return None
    with suppress(OSError):
        return time.clock_gettime((~pid << 3) | _SCHEDULER_CLOCK)
    return None


def needs_cpu(pid: int, root: Path = ROOT) -> bool:
    """Whether a thread of the process runs or waits for a CPU; False where the system does not show threads."""
    with suppress(OSError):
        folder = f"{root}/proc/{pid}/task"
        stats = (f"{folder}/{thread}/stat" for thread in os.listdir(folder))
        return any(process.waiting for process in map(_process, stats) if process)
    return False


def command_line(pid: int, root: Path = ROOT) -> tuple[str, ...]:
    """The words of a process's command; empty for a thread of the kernel and for a process that has ended."""
    return tuple(word for word in contents(root / f"proc/{pid}/cmdline").split("\0") if word)


def gpu_counters(gpu: Gpu) -> GpuCounters:
    pids, slowdowns = or_none(gpu.compute_pids), or_none(gpu.slowdowns)
    return GpuCounters(
        pids=None if pids is None else frozenset(pids),
        clock_hz=or_none(gpu.sm_clock_hz),
        heat_s=or_none(gpu.heat_s),
        power_cap_s=or_none(gpu.power_cap_s),
        slowdowns=frozenset(slowdowns or ()),
    )


def heat_files(cpus: Collection[int], root: Path = ROOT) -> tuple[Path, ...]:
    """The files that count how often a core or its package was throttled for heat; none on most virtual machines.

    The kernel shows a core's count at each of its threads and a package's at each of its CPUs: each is taken once.
    """
    cores = [(cpu, "core_throttle_count") for cpu in first_of_each(CORE, cpus, root)]
    packages = [(cpu, "package_throttle_count") for cpu in first_of_each(PACKAGE, cpus, root)]
    folder = root / "sys/devices/system/cpu"
    files = [folder / f"cpu{cpu}/thermal_throttle" / name for cpu, name in cores + packages]
    return tuple(file for file in files if file.is_file())


def clock_files(cpus: Collection[int], root: Path = ROOT) -> tuple[Path, ...]:
    """The files with the clock of each CPU in kHz; none on most virtual machines."""
    files = [root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq" for cpu in sorted(cpus)]
    return tuple(file for file in files if file.is_file())


def numbers(files: Sequence[Path]) -> list[int]:
    return [int(text) for file in files if (text := contents(file)).isdecimal()]


def _process(path: str) -> ProcessTimes | None:
    """One line of proc_pid_stat(5). A name may hold spaces and brackets, so it ends at the last bracket."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            line = os.read(descriptor, _LONGEST_STAT).decode(errors="replace")
        finally:
            os.close(descriptor)
    except OSError:  # it has ended
        return None
    head, _, tail = line.rpartition(")")
    pid, _, name = head.partition(" (")
    fields = tail.split()  # from the third on: the state
    return ProcessTimes(
        pid=int(pid),
        started=int(fields[19]),
        name=name,
        session=int(fields[3]),
        cpu=int(fields[36]),
        waiting=fields[0] == "R",
        used_s=(int(fields[11]) + int(fields[12])) * _TICK_S,
        ended_children_s=(int(fields[13]) + int(fields[14])) * _TICK_S,
        kernel=bool(int(fields[6]) & _KERNEL_THREAD),
    )
