"""What the kernel counts and how much memory is free, from made-up files and from this machine; readings compared."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from optigpu.conductor.verdicts import disturbance
from optigpu.conductor.verdicts.host_monitor import HostMonitor, HostReading
from optigpu.hardware import counters
from optigpu.hardware.cgroup import free_host_bytes, quota_wait_s
from optigpu.hardware.counters import Clocks, CpuTimes, GpuCounters, ProcessTimes
from optigpu.hardware.cpu import last_level_cache_bytes
from optigpu.hardware.probe import probe
from optigpu.vocabulary import DeviceKind
from tests.drivers.nvml import build
from tests.engine.machines import tree

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
CPU = min(os.sched_getaffinity(0))


def stat_line(pid: int, name: str, *, session: int, used: tuple[int, int], ended: tuple[int, int]) -> str:
    """A line of /proc/<pid>/stat; times in ticks."""
    before = ["R", "1", "1", str(session), *["0"] * 7]
    times = [*map(str, used), *map(str, ended)]
    return f"{pid} ({name}) {' '.join([*before, *times, '20', '0', '1', '0', '777', *['0'] * 16, '3'])}\n"


def test_cpu_time_is_summed_over_the_cpus_that_count(tmp_path: Path) -> None:
    stat = (
        "cpu  9 9 9 9 9 9 9 9 9 9\n"
        "cpu0 100 10 1 700 50 3 4 20 6 7\n"
        "cpu1 200 20 2 800 60 3 4 30 6 7\n"
        "cpu10 5 5 5 5 5 5 5 5 5 5\n"
        "intr 12345 0 1\n"
    )
    root = tree(tmp_path, **{"proc/stat": stat})
    both = counters.cpu_times({0, 1}, root)
    assert both == CpuTimes(work_s=333 / TICKS_PER_S, idle_s=1610 / TICKS_PER_S, steal_s=50 / TICKS_PER_S)
    one = counters.cpu_times({1}, root)
    assert one is not None
    assert one.work_s == pytest.approx(222 / TICKS_PER_S), "cpu10 is another CPU"


def test_processes_are_read_whatever_their_name(tmp_path: Path) -> None:
    lines = {
        "proc/41/stat": stat_line(41, "a (b) c", session=40, used=(200, 50), ended=(30, 20)),
        "proc/42/stat": "",
        "proc/self/stat": "not a number",
        "proc/43/status": "its stat is gone",
    }
    (found,) = counters.processes(tree(tmp_path, **{name: text for name, text in lines.items() if text}))
    assert found == ProcessTimes(
        pid=41,
        started=777,
        name="a (b) c",
        session=40,
        cpu=3,
        waiting=True,
        used_s=250 / TICKS_PER_S,
        ended_children_s=50 / TICKS_PER_S,
    )
    assert counters.processes(tmp_path / "nothing") == ()


def test_heat_is_counted_once_for_each_core_and_each_package(tmp_path: Path) -> None:
    """Two packages of two cores of two threads: the kernel shows a package's count at each of its four CPUs."""
    for cpu in range(8):
        package, core = cpu % 4 // 2, cpu % 4
        folder = f"sys/devices/system/cpu/cpu{cpu}"
        files = {
            f"{folder}/topology/physical_package_id": f"{package}\n",
            f"{folder}/topology/thread_siblings_list": f"{core},{core + 4}\n",
            f"{folder}/thermal_throttle/core_throttle_count": f"{10**core}\n",
            f"{folder}/thermal_throttle/package_throttle_count": f"{(package + 1) * 10**4}\n",
        }
        tree(tmp_path, **files)
    assert sum(counters.numbers(counters.heat_files(range(8), tmp_path))) == 31111
    assert sum(counters.numbers(counters.heat_files({1, 5, 6}, tmp_path))) == 30110, (
        "those that are asked for"
    )


def test_waiting_for_a_quota_is_summed_up_to_the_root_group_in_both_versions(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    root = tree(
        tmp_path,
        **{
            "proc/self/cgroup": "3:cpu,cpuacct:/a\n0::/a/b\n",
            f"{group}/cpu,cpuacct/a/cpu.stat": "nr_periods 9\nnr_throttled 2\nthrottled_time 250000000\n",
            f"{group}/a/b/cpu.stat": "usage_usec 9\nnr_throttled 1\nthrottled_usec 1500000\n",
            f"{group}/a/cpu.stat": "usage_usec 9\nnr_throttled 1\nthrottled_usec 500000\n",
            f"{group}/cpu.stat": "usage_usec 9\n",
        },
    )
    assert quota_wait_s(root) == pytest.approx(2.25)
    assert quota_wait_s(tmp_path / "nothing") == 0


def process(pid: int, session: int, used_s: float, **changes: Any) -> ProcessTimes:
    made = ProcessTimes(pid, 1, f"name{pid}", session, CPU, False, used_s, 0.0)
    return replace(made, **changes)


def reading(*processes: ProcessTimes, at_s: float = 0.0, work_s: float = 0.0, **changes: Any) -> HostReading:
    """The sessions 100 and 200 are ours."""
    made = HostReading(
        clocks=Clocks(monotonic_s=at_s, suspended_s=0.0, wall_s=1e9),
        cpu=CpuTimes(work_s=work_s, idle_s=at_s, steal_s=0.0),
        processes={each.key: each for each in processes},
        own=frozenset({100, 200}),
        quota_wait_s=0.0,
        heat_slowdowns=0,
        clock_hz=None,
        gpu=GpuCounters(),
        others=False,
    )
    return replace(made, **changes)


def monitor() -> HostMonitor:
    return HostMonitor(DeviceKind.CPU, probe(), lambda: {100, 200})


def test_foreign_time_is_what_remains_of_the_cpus_time() -> None:
    before = reading(process(100, 100, 1.0), process(201, 200, 5.0), process(7, 7, 50.0), work_s=100.0)
    after = reading(
        process(100, 100, 3.0, ended_children_s=0.5),
        process(201, 200, 5.25),
        process(202, 200, 0.125),  # began within
        process(7, 7, 51.0),
        process(8, 8, 0.5),
        at_s=4.0,
        work_s=105.0,
    )
    sample = monitor().between(before, after)
    assert sample.wall_s == 4
    assert sample.foreign_s == pytest.approx(5.0 - 2.0 - 0.5 - 0.25 - 0.125)
    assert sample.named == {"name7": 1.0, "name8": 0.5}, (
        "the rest was used by what has ended, or cannot be seen"
    )


def test_this_process_is_ours_but_what_it_outlives_may_be_another_job_s() -> None:
    me = os.getpid()
    before = reading(process(me, 1, 1.0), work_s=10.0)
    after = reading(process(me, 1, 1.5, ended_children_s=60.0), at_s=1.0, work_s=11.0)
    assert monitor().between(before, after).foreign_s == pytest.approx(0.5)


def test_a_process_id_that_was_given_again_is_another_process() -> None:
    before = reading(process(7, 7, 500.0))
    after = reading(process(7, 7, 0.25, started=2), at_s=1.0)
    assert monitor().between(before, after).named == {"name7": 0.25}


def test_what_waits_for_our_cpus_at_both_ends_crowds() -> None:
    hog, ours = process(7, 7, 1.0, waiting=True), process(201, 200, 1.0, waiting=True)
    elsewhere = process(9, 9, 1.0, waiting=True, cpu=4096)
    rested = process(10, 10, 1.0)
    before = reading(hog, ours, elsewhere, rested)
    after = reading(hog, ours, elsewhere, replace(rested, waiting=True), at_s=1.0)
    assert monitor().between(before, after).crowding == {(7, 1, "name7")}


def test_a_thread_of_the_kernel_counts_and_has_no_name() -> None:
    worker = process(9, 0, 1.0, waiting=True, kernel=True)
    before = reading(worker, work_s=10.0)
    sample = monitor().between(before, reading(replace(worker, used_s=1.5), at_s=1.0, work_s=10.5))
    assert sample.foreign_s == pytest.approx(0.5)
    assert sample.named == {}
    assert sample.crowding == frozenset()


def test_the_kernel_s_threads_have_a_flag(tmp_path: Path) -> None:
    line = stat_line(2, "kthreadd", session=0, used=(0, 0), ended=(0, 0)).split()
    line[8] = str(0x00208040)  # the flags of proc_pid_stat(5)
    (found,) = counters.processes(tree(tmp_path, **{"proc/2/stat": " ".join(line)}))
    assert found.kernel


def test_what_runs_only_while_the_counters_are_read_is_not_accused() -> None:
    """It waits for our events, say, and shows them: it runs at both readings and uses nothing within the rounds."""
    viewer = process(7, 7, 1.0, waiting=True)
    sample = monitor().between(reading(viewer), reading(viewer, at_s=0.4))
    assert (sample.named, sample.foreign_s) == ({}, 0)
    assert disturbance.crowded((sample,) * 10) is None
    busy = replace(sample, named={"name7": 0.1})
    assert disturbance.crowded((busy,) * 10) is not None


@pytest.mark.parametrize(
    ("changed", "name", "foreign_s"),
    [
        ({"cpu": CpuTimes(work_s=90.0, idle_s=0.0, steal_s=0.0)}, "of the CPUs' time", None),
        ({"quota_wait_s": -1.0}, "of the waits for the CPU quota", 1.0),
        ({"heat_slowdowns": -1}, "of the slow-downs for heat", 1.0),
    ],
)
def test_a_counter_that_went_backwards_is_named(
    changed: dict[str, Any], name: str, foreign_s: float | None
) -> None:
    before, after = reading(work_s=100.0), reading(at_s=1.0, work_s=101.0)
    sample = monitor().between(before, replace(after, **changed))
    assert sample.backwards == (name,)
    assert sample.foreign_s == foreign_s
    assert sample.quota_wait_s == sample.heat_slowdowns == 0


def test_our_own_time_that_went_backwards_hides_what_others_used() -> None:
    before = reading(process(100, 100, 5.0), work_s=100.0)
    after = reading(process(100, 100, 1.0), at_s=1.0, work_s=101.0)
    sample = monitor().between(before, after)
    assert sample.backwards == ("of the measuring process's time",)
    assert sample.foreign_s is None
    corrected = reading(process(100, 100, 4.99), at_s=1.0, work_s=101.0)
    assert monitor().between(before, corrected).backwards == (), "the kernel corrects itself by a tick"


def test_sleep_and_a_time_of_day_that_was_set_are_told_apart() -> None:
    slept = Clocks(monotonic_s=10.0, suspended_s=60.0, wall_s=1e9 + 60)
    moved = Clocks(monotonic_s=10.0, suspended_s=0.0, wall_s=1e9 - 3600)
    asleep, set_back = (monitor().between(reading(), reading(clocks=clocks)) for clocks in (slept, moved))
    assert (asleep.suspended_s, asleep.wall_jump_s) == (60, 0)
    assert (set_back.suspended_s, set_back.wall_jump_s) == (0, -3600)
    assert asleep.wall_s == set_back.wall_s == 10


def on_gpu(*pids: int, **changes: Any) -> GpuCounters:
    return GpuCounters(pids=frozenset(pids), **changes)


@pytest.mark.parametrize(
    ("pids", "before_the_job", "foreign"),
    [
        ((), (), 0),
        ((100, 201), (), 0),
        ((100, 201, 7), (), 1),
        ((100, 7), (7,), 1),
        ((70_001, 70_002), (), 0),  # a container: ours under numbers of the host, one for each session
        ((70_001, 70_002, 70_003), (), 1),
        ((70_001, 5), (5,), 1),
    ],
)
def test_who_else_computes_on_the_gpu(
    pids: tuple[int, ...], before_the_job: tuple[int, ...], foreign: int
) -> None:
    found = monitor()
    found._on_gpu_before = frozenset(before_the_job)
    seen = reading(process(100, 100, 1.0), process(201, 200, 1.0), gpu=on_gpu(*pids))
    assert found.between(seen, seen).gpu_foreign == foreign
    assert found.between(reading(), seen).gpu_foreign == foreign, "also when it came within"


def test_a_look_at_this_machine() -> None:
    monitor = HostMonitor(DeviceKind.CPU, probe(), lambda: [os.getsid(0)], lambda: True)
    first = monitor.read()
    second = monitor.read()
    sample = monitor.between(first, second)
    assert first.cpu is not None
    assert first.processes
    assert sample.others
    assert sample.foreign_s is not None
    assert sample.wall_s > 0
    assert sample.cpus == len(os.sched_getaffinity(0))


def gpu_seen(library: Path, mode: str, after: int = 0) -> dict[str, Any]:
    """What a process with the made-up driver sees of its GPU, at a second look."""
    variables = {"LD_LIBRARY_PATH": str(library), "FAKE_NVML": mode, "FAKE_NVML_AFTER": str(after)}
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    command = [sys.executable, "-c", _LOOK]
    answer = subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    seen: dict[str, Any] = json.loads(answer.stdout)
    return seen


_LOOK = """
import json
from optigpu.conductor.verdicts import disturbance
from optigpu.conductor.verdicts.host_monitor import HostMonitor
from optigpu.hardware.probe import probe
from optigpu.documents.result import Accelerator
from optigpu.vocabulary import DeviceKind
gpu = Accelerator(name="g", memory_bytes=1, uuid="GPU-made-up")
monitor = HostMonitor(DeviceKind.CUDA, probe().model_copy(update={"accelerators": (gpu,)}), list)
before, after = monitor.read(), monitor.read()
sample = monitor.between(before, after)
print(json.dumps(vars(after.gpu) | {"foreign": sample.gpu_foreign, "grown": sample.gpu_heat_s}, default=list))
"""


@pytest.mark.slow
def test_a_gpu_is_looked_at_through_its_driver(tmp_path: Path) -> None:
    seen = gpu_seen(build(tmp_path), "")
    assert (seen["pids"], seen["foreign"]) == ([4242], 1), "it computed before the job began"
    assert (seen["heat_s"], seen["power_cap_s"], seen["grown"]) == (2.5, 1.0, 0.0)
    assert seen["clock_hz"] == 1.5e9
    assert set(seen["slowdowns"]) == {"sw_power_cap", "hw_thermal_slowdown"}


@pytest.mark.gpu
def test_the_gpu_is_looked_at() -> None:
    monitor = HostMonitor(DeviceKind.CUDA, probe(), list)
    seen = monitor.read().gpu
    assert seen.pids is not None
    assert seen.clock_hz is not None
    assert seen.clock_hz > 1e8


GROUPS = Path("sys/fs/cgroup")


def group(path: str, limit: str, used: int, cache: int = 0) -> dict[str, str]:
    """The files of one control group of version 2."""
    folder = GROUPS / path
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.current": str(used),
        f"{folder}/memory.stat": f"anon {used - cache}\ninactive_file {cache}",
    }


@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        ("0::/a", group("a", "1000", used=700), 300),
        ("0::/a", group("a", "1000", used=700, cache=200), 500),
        (
            "0::/a/b",
            group("a/b", "1000", used=100) | group("a", "2000", used=1900) | group("", "max", used=5000),
            100,
        ),
        (
            "4:memory:/a\n0::/",
            {
                f"{GROUPS}/memory/a/memory.limit_in_bytes": "1000",
                f"{GROUPS}/memory/a/memory.usage_in_bytes": "900",
                f"{GROUPS}/memory/a/memory.stat": "inactive_file 0\ntotal_inactive_file 150",
            },
            250,
        ),
    ],
    ids=[
        "used",
        "page cache",
        "other groups use 1800 of the 2000 bytes above",
        "version 1, with child groups",
    ],
)
def test_what_control_groups_use_is_not_free_but_for_page_cache(
    tmp_path: Path, groups: str, files: dict[str, str], free: int
) -> None:
    assert free_host_bytes(tree(tmp_path, **{"proc/self/cgroup": groups}, **files)) == free


@pytest.mark.parametrize("limit", ["max", str(2**62)])
def test_without_a_limit_it_is_what_the_machine_has_available(tmp_path: Path, limit: str) -> None:
    tree(tmp_path, **{"proc/self/cgroup": "0::/a"}, **group("a", limit, used=700))
    free, memory = free_host_bytes(tmp_path), psutil.virtual_memory()
    assert 700 < free <= memory.total


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (("48K", "32K", "2048K", "491520K"), 480 * 2**20),
        (("64M",), 2**26),
        (("", "?", "K"), None),
        ((), None),
    ],
)
def test_the_largest_cache_that_the_kernel_tells_counts(
    tmp_path: Path, sizes: tuple[str, ...], expected: int | None
) -> None:
    folder = "sys/devices/system/cpu/cpu0/cache"
    root = tree(tmp_path, **{f"{folder}/index{index}/size": f"{size}\n" for index, size in enumerate(sizes)})
    assert last_level_cache_bytes(root) == expected
