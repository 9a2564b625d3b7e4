"""The host: who may measure at the same time, memory for another process, priority, and how its CPUs are set up."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from optigpu.child.connection import HIGHEST
from optigpu.conductor.processes.room import HOST_SLACK, RESERVE, MemoryBudget, hold, others_measure
from optigpu.documents.result import Accelerator, CpuSetup, Environment
from optigpu.hardware.cpu import cpu_setup, node_of_each_cpu
from optigpu.hardware.probe import probe
from optigpu.vocabulary import DeviceKind
from tests.engine.machines import tree
from tests.engine.processes import may_come_first
from worker.capabilities import serving


class BusyError(Exception):
    """Another job has the device."""


def busy() -> None:
    raise BusyError


def machine(gpu: str) -> Environment:
    accelerator = Accelerator(name="g", memory_bytes=1, uuid=gpu)
    return probe().model_copy(update={"accelerators": (accelerator,)})


def is_free(folder: Path, device: DeviceKind, gpu: str) -> bool:
    try:
        with hold(folder, device, machine(gpu), busy):
            return True
    except BusyError:
        return False


CPU, CUDA = DeviceKind.CPU, DeviceKind.CUDA


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((CPU, "a"), (CPU, "a")),
        ((CPU, "a"), (CUDA, "a")),
        ((CUDA, "a"), (CPU, "a")),
        ((CUDA, "a"), (CUDA, "a")),
    ],
)
def test_these_wait_for_each_other(
    tmp_path: Path, first: tuple[DeviceKind, str], second: tuple[DeviceKind, str]
) -> None:
    with hold(tmp_path, first[0], machine(first[1]), busy):
        assert not is_free(tmp_path, *second)
    assert is_free(tmp_path, *second)


def test_jobs_on_different_gpus_run_together(tmp_path: Path) -> None:
    with hold(tmp_path, CUDA, machine("a"), busy), hold(tmp_path, CUDA, machine("b"), busy) as locks:
        assert len(locks) == 2


def test_a_worker_s_own_lock_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU worker keeps a lock in the same folder for as long as it lives."""
    gpus = tuple(Accelerator(name="g", memory_bytes=1, uuid=uuid) for uuid in ("GPU-a", "GPU-b"))
    here = probe().model_copy(update={"accelerators": gpus})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the worker sets it; restored after the test
    monkeypatch.setattr("worker.capabilities.probed", lambda _: here)
    with serving(CUDA, tmp_path), serving(CUDA, tmp_path), hold(tmp_path, CUDA, here, busy):
        assert len(list(tmp_path.iterdir())) == 4, "two workers, their first GPU, the host"
        assert not others_measure(tmp_path, CUDA, here)
        with hold(tmp_path, CUDA, machine("GPU-b"), busy):
            assert others_measure(tmp_path, CUDA, here)


GPU = Accelerator(name="g", memory_bytes=100, uuid="GPU-a")
MACHINE = probe().model_copy(update={"accelerators": (GPU,)})
PLENTY = 2**60
NOBODY = 2**22 + 1
"""No process has this id: it is above the largest one that Linux gives."""


def cpu_budget(host_free: int) -> MemoryBudget:
    return MemoryBudget(DeviceKind.CPU, MACHINE, host_free=lambda: host_free)


def gpu_budget(*free: int | None) -> MemoryBudget:
    """A budget that finds so much GPU memory free, one number after the other."""
    found: Iterator[int | None] = iter(free)
    return MemoryBudget(DeviceKind.CUDA, MACHINE, host_free=lambda: PLENTY, gpu_free=lambda _: next(found))


@pytest.mark.parametrize(("missing", "fits"), [(0, True), (2**30, False)])
def test_the_host_must_have_free_what_the_largest_process_holds_and_more(missing: int, fits: bool) -> None:
    held = psutil.Process().memory_info().rss
    # This process grows a little between the two looks at it.
    budget = cpu_budget(int(RESERVE * (held + 2**26)) + HOST_SLACK - missing)
    budget.add(os.getpid())
    assert budget.has_space() is fits


def test_the_gpu_must_have_free_what_the_largest_process_took() -> None:
    # Before: 100; the first takes 30, the second 10; twice 30 must be free.
    budget = gpu_budget(100, 70, 60, 60)
    budget.add(NOBODY)
    budget.add(NOBODY)
    assert budget.has_space()
    budget = gpu_budget(100, 70, 59, 59)
    budget.add(NOBODY)
    budget.add(NOBODY)
    assert not budget.has_space()


def test_a_gpu_that_does_not_tell_its_memory_gets_one_process_at_a_time() -> None:
    budget = gpu_budget(None, None, None)
    budget.add(NOBODY)
    assert not budget.has_space()


PROGRAM = """
import json, os, resource, sys, threading
from pathlib import Path
from optigpu.child.connection import nice, raise_priority
if sys.argv[1] == "forbidden":
    resource.setrlimit(resource.RLIMIT_NICE, (0, 0))
    if os.geteuid() == 0:
        os.setuid(65534)
over = threading.Event()
threading.Thread(target=over.wait).start()
before, after = nice(), raise_priority()
tasks = [os.getpriority(os.PRIO_PROCESS, int(task)) for task in os.listdir("/proc/self/task")]
group = Path("/proc/self/autogroup")
print(json.dumps([before, after, tasks, group.read_text().split()[-1] if group.exists() else None]))
over.set()
"""
"""Prints the nice value before and after, that of each thread, and that of the session's group."""


def priorities(right: str) -> tuple[int, int, list[int], str | None]:
    made = subprocess.run(
        [sys.executable, "-c", PROGRAM, right],
        stdout=subprocess.PIPE,
        check=True,
        start_new_session=True,
    )
    before, after, threads, group = json.loads(made.stdout)
    return before, after, threads, group


@pytest.mark.slow
@pytest.mark.parametrize("right", ["allowed", "forbidden"])
def test_every_thread_comes_first_where_the_system_allows_it(right: str) -> None:
    before, after, threads, group = priorities(right)
    expected = HIGHEST if right == "allowed" and may_come_first() else before
    assert after == expected
    assert threads == [expected] * 2
    if group is not None:
        assert group == str(HIGHEST if expected == HIGHEST else 0)


SYS_CPUS = "sys__devices__system__cpu"
FLAGS = "model name\t: {}\nflags\t\t: fpu avx2 {}\n"


def policy(root: Path, **files: str) -> None:
    """The same cpufreq files for every CPU that this process may use."""
    for cpu in os.sched_getaffinity(0):
        tree(root, **{f"{SYS_CPUS}__cpu{cpu}__cpufreq__{name}": text for name, text in files.items()})


def test_a_machine_that_tells_all(tmp_path: Path) -> None:
    policy(
        tmp_path,
        base_frequency="2600000\n",
        cpuinfo_max_freq="3500000\n",
        scaling_max_freq="3000000\n",
        scaling_governor="performance\n",
    )
    tree(tmp_path, **{f"{SYS_CPUS}__cpufreq__boost": "1\n", f"{SYS_CPUS}__smt__active": "1\n"})
    tree(tmp_path, proc__cpuinfo=FLAGS.format("AMD EPYC 7763 64-Core Processor", "sse"))
    for number in (0, 1):
        (tmp_path / f"sys/devices/system/node/node{number}").mkdir(parents=True)
    assert cpu_setup(tmp_path) == CpuSetup(
        base_hz=2_600_000_000,
        max_hz=3_500_000_000,
        limit_hz=3_000_000_000,
        governor="performance",
        boost=True,
        smt=True,
        numa_nodes=2,
        hypervisor=False,
    )


def test_a_virtual_machine_announces_its_hypervisor_and_the_name_its_base_clock(tmp_path: Path) -> None:
    name = "Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz"
    setup = cpu_setup(tree(tmp_path, proc__cpuinfo=FLAGS.format(name, "hypervisor")))
    assert setup == CpuSetup(base_hz=2_900_000_000, hypervisor=True)


@pytest.mark.parametrize(("no_turbo", "boost"), [("0\n", True), ("1\n", False)])
def test_intel_s_driver_says_boost_the_other_way_round(tmp_path: Path, no_turbo: str, boost: bool) -> None:
    tree(tmp_path, **{f"{SYS_CPUS}__intel_pstate__no_turbo": no_turbo})
    assert cpu_setup(tmp_path).boost is boost


NODES = "sys__devices__system__node"


def with_nodes(root: Path, online: str, with_memory: str, **cpulists: str) -> Path:
    lists = {f"{NODES}__{node}__cpulist": f"{cpus}\n" for node, cpus in cpulists.items()}
    return tree(
        root, **{f"{NODES}__online": f"{online}\n", f"{NODES}__has_memory": f"{with_memory}\n"}, **lists
    )


def test_two_nodes_of_four_cpus(tmp_path: Path) -> None:
    root = with_nodes(tmp_path, "0-1", "0-1", node0="0-3", node1="4-7")
    assert node_of_each_cpu(root) == {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 1, 7: 1}


def test_a_node_that_is_offline_or_has_no_memory_is_of_no_cpu(tmp_path: Path) -> None:
    root = with_nodes(tmp_path, "0,2-3", "0,2", node0="0-1", node1="2-3", node2="4", node3="5")
    assert node_of_each_cpu(root) == {0: 0, 1: 0, 4: 2}
