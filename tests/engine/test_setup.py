"""How a CPU is set up, from files that other machines would show."""

import os
from pathlib import Path

import pytest

from optigpu.documents.result import CpuSetup
from optigpu.hardware.cpu import cpu_setup
from tests.engine.trees import tree

CPUS = "sys__devices__system__cpu"
FLAGS = "model name\t: {}\nflags\t\t: fpu avx2 {}\n"


def policy(root: Path, **files: str) -> None:
    """The same cpufreq files for every CPU that this process may use."""
    for cpu in os.sched_getaffinity(0):
        tree(root, **{f"{CPUS}__cpu{cpu}__cpufreq__{name}": text for name, text in files.items()})


def test_a_machine_that_tells_all(tmp_path: Path) -> None:
    policy(
        tmp_path,
        base_frequency="2600000\n",
        cpuinfo_max_freq="3500000\n",
        scaling_max_freq="3000000\n",
        scaling_governor="performance\n",
    )
    tree(tmp_path, **{f"{CPUS}__cpufreq__boost": "1\n", f"{CPUS}__smt__active": "1\n"})
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


def test_a_machine_that_tells_nothing_is_unknown_and_not_off(tmp_path: Path) -> None:
    assert cpu_setup(tmp_path) == CpuSetup()


def test_a_virtual_machine_announces_its_hypervisor_and_the_name_its_base_clock(tmp_path: Path) -> None:
    name = "Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz"
    setup = cpu_setup(tree(tmp_path, proc__cpuinfo=FLAGS.format(name, "hypervisor")))
    assert setup == CpuSetup(base_hz=2_900_000_000, hypervisor=True)


@pytest.mark.parametrize(("no_turbo", "boost"), [("0\n", True), ("1\n", False)])
def test_intel_s_driver_says_boost_the_other_way_round(tmp_path: Path, no_turbo: str, boost: bool) -> None:
    tree(tmp_path, **{f"{CPUS}__intel_pstate__no_turbo": no_turbo})
    assert cpu_setup(tmp_path).boost is boost


def test_governors_that_differ_are_all_named(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    policy(tmp_path, scaling_governor="powersave")
    tree(tmp_path, **{f"{CPUS}__cpu{allowed[0]}__cpufreq__scaling_governor": "performance"})
    expected = "performance, powersave" if len(allowed) > 1 else "performance"
    assert cpu_setup(tmp_path).governor == expected


def test_a_file_without_a_number_is_unknown(tmp_path: Path) -> None:
    policy(tmp_path, cpuinfo_max_freq="<unknown>", scaling_governor="")
    tree(tmp_path, **{f"{CPUS}__cpufreq__boost": "maybe"})
    assert cpu_setup(tmp_path) == CpuSetup()
