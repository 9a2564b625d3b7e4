"""Which machine this is: from files that other machines and containers would show, and from other processes."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optigpu.documents.result import Accelerator, CpuSetup, Environment, HostIdSource
from optigpu.hardware import probe
from optigpu.hardware.identity import hardware_fingerprint, host_id, memory_class, software_fingerprint
from optigpu.hardware.probe import probed
from tests.engine.trees import tree

CPUINFO = "model name\t: AMD EPYC 7763 64-Core Processor\nflags\t\t: fpu avx2 fma\n"
FIRMWARE = "4c4c4544-0038-3510-8053-b4c04f4d4232"
GPU = Accelerator(name="NVIDIA H200", memory_bytes=143771 * 2**20, uuid="GPU-a")
GIB = 2**30


def machine(**changes: Any) -> Environment:
    given = Environment(
        hardware_class="1x NVIDIA H200 140 GiB",
        host_id="h",
        cpu_model="AMD EPYC 7763",
        cpu_cores=8,
        cpu_features=("avx2", "fma"),
        memory_bytes=16 * GIB - 500_000_000,
        accelerators=(GPU,),
        driver="570.1",
        os="Linux 6.1",
        software={"torch": "2.13.0"},
    )
    return given.model_copy(update=changes)


def in_another_process(code: str, folder: Path) -> list[str]:
    """The words that a process prints which shares neither this one's directory nor most of its variables."""
    variables = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C", "SOMETHING": "else"}
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=variables, capture_output=True, text=True, check=True
    )
    return answer.stdout.split()


def test_another_process_sees_the_same_machine(tmp_path: Path) -> None:
    code = "import sys; from optigpu.hardware import probe; here = probe()\n"
    code += (
        "print(here.hardware_fingerprint, here.software_fingerprint, here.host_id, 'torch' in sys.modules)"
    )
    here = probe()
    expected = [here.hardware_fingerprint, here.software_fingerprint, here.host_id, "False"]
    assert in_another_process(code, tmp_path) == expected


def test_a_process_with_fewer_cores_has_another_machine(tmp_path: Path) -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from optigpu.hardware import probe; print(probe().hardware_fingerprint)"
    same = in_another_process(code, tmp_path) == [probe().hardware_fingerprint]
    assert same == (probe().cpu_cores == 1)


def test_another_container_after_a_reboot_sees_the_same_machine(tmp_path: Path) -> None:
    boot = "proc__sys__kernel__random__boot_id"
    ids = {"etc__machine-id": "1" * 32, "proc__sys__kernel__hostname": "first", boot: "a"}
    others = {"etc__machine-id": "2" * 32, "proc__sys__kernel__hostname": "second", boot: "b"}
    shared = {"proc__cpuinfo": CPUINFO, "sys__class__dmi__id__product_uuid": FIRMWARE}
    one = probed(tree(tmp_path / "one", **shared, **ids))
    two = probed(tree(tmp_path / "two", **shared, **others, **{".dockerenv": ""}))
    assert (one.hardware_fingerprint, one.host_id) == (two.hardware_fingerprint, two.host_id)
    assert one.host_id_source is HostIdSource.FIRMWARE
    assert (one.container, two.container) == (None, "docker")


def test_a_container_that_may_not_read_the_firmware_has_the_same_fingerprint_all_the_same(
    tmp_path: Path,
) -> None:
    rights = tree(tmp_path / "a", proc__cpuinfo=CPUINFO, sys__class__dmi__id__product_uuid=FIRMWARE)
    none = tree(tmp_path / "b", proc__cpuinfo=CPUINFO, proc__sys__kernel__hostname="c0ffee")
    one, two = probed(rights), probed(none)
    assert one.hardware_fingerprint == two.hardware_fingerprint
    assert (one.host_id_source, two.host_id_source) == (HostIdSource.FIRMWARE, HostIdSource.HOSTNAME)


def test_another_cpu_is_another_machine(tmp_path: Path) -> None:
    one = probed(tree(tmp_path / "a", proc__cpuinfo=CPUINFO))
    two = probed(tree(tmp_path / "b", proc__cpuinfo=CPUINFO.replace("7763", "7713")))
    assert one.hardware_fingerprint != two.hardware_fingerprint


@pytest.mark.parametrize(
    "changes",
    [
        {"cpu_model": "AMD EPYC 7713"},
        {"cpu_cores": 4},
        {"cpu_features": ("avx2",)},
        {"memory_bytes": 32 * GIB},
        {"accelerators": ()},
        {"accelerators": (GPU.model_copy(update={"uuid": "GPU-b"}),)},
    ],
)
def test_what_the_hardware_is_changes_its_fingerprint_alone(changes: dict[str, Any]) -> None:
    assert hardware_fingerprint(machine(**changes)) != hardware_fingerprint(machine())
    assert software_fingerprint(machine(**changes)) == software_fingerprint(machine())


@pytest.mark.parametrize(
    "changes",
    [
        {"software": {"torch": "2.14.0"}},
        {"driver": "580.2"},
        {"cuda": "13.0"},
        {"compiler": "g++ 14"},
        {"os": "Linux 6.12"},
        {"image": "optigpu:0.2"},
        {"git_revision": "0" * 40},
        {"git_dirty": True},
    ],
)
def test_a_version_changes_the_software_s_fingerprint_alone(changes: dict[str, Any]) -> None:
    assert software_fingerprint(machine(**changes)) != software_fingerprint(machine())
    assert hardware_fingerprint(machine(**changes)) == hardware_fingerprint(machine())


@pytest.mark.parametrize(
    "changes",
    [
        {"host_id": "other"},
        {"cpu_setup": CpuSetup(governor="powersave", boost=False)},
        {"memory_bytes": 16 * GIB - 300_000_000},
        {"accelerators": (GPU.model_copy(update={"power_limit_w": 300.0, "memory_bytes": 1}),)},
        {"hardware_class": "AMD EPYC 7763 8 cores"},
        {"cpu_features": ("fma", "avx2")},
    ],
)
def test_a_switch_and_a_size_that_depends_on_the_kernel_change_no_fingerprint(
    changes: dict[str, Any],
) -> None:
    assert hardware_fingerprint(machine(**changes)) == hardware_fingerprint(machine())
    assert software_fingerprint(machine(**changes)) == software_fingerprint(machine())


@given(st.integers(0, 40), st.sampled_from([2, 3]), st.floats(0.0, 0.2))
def test_what_a_kernel_keeps_for_itself_changes_no_class_of_memory(
    power: int, size: int, share: float
) -> None:
    installed = size * GIB * 2**power
    assert memory_class(installed - int(installed * share)) == installed


@given(st.integers(1, 2**50))
def test_a_class_of_memory_holds_it_and_is_less_than_twice_as_large(size: int) -> None:
    assert size <= memory_class(size) < 2 * size or size == memory_class(size)


def network(root: Path, name: str, address: str, *, device: bool) -> None:
    folder = root / "sys/class/net" / name
    (folder / "device" if device else folder).mkdir(parents=True)
    (folder / "address").write_text(f"{address}\n")


def test_the_surest_source_is_taken(tmp_path: Path) -> None:
    tree(tmp_path, proc__sys__kernel__hostname="name")
    sources = [host_id((), tmp_path)]
    network(tmp_path, "eth0", "52:54:00:12:34:56", device=True)
    sources.append(host_id((), tmp_path))
    tree(tmp_path, **{"var__lib__dbus__machine-id": "f" * 32})
    sources.append(host_id((), tmp_path))
    sources.append(host_id(("GPU-a",), tmp_path))
    tree(tmp_path, sys__class__dmi__id__board_serial="..CN7475156D0042.")
    sources.append(host_id(("GPU-a",), tmp_path))
    assert [source for _, source in sources] == list(reversed(HostIdSource))
    assert len({found for found, _ in sources}) == len(HostIdSource)
    assert all(re.fullmatch(r"[0-9a-f]{16}", found) for found, _ in sources)


def test_a_host_s_gpus_count_in_any_order(tmp_path: Path) -> None:
    assert host_id(("GPU-a", "GPU-b"), tmp_path) == host_id(("GPU-b", "GPU-a"), tmp_path)


@pytest.mark.parametrize(
    "left_as_it_was",
    [
        "To be filled by O.E.M.",
        "Default string",
        "Not Specified",
        "System Serial Number",
        "None",
        "0",
        "00000000-0000-0000-0000-000000000000",
        "FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF",
        "03000200-0400-0500-0006-000700080009",
        "0123456789",
        "",
    ],
)
def test_what_a_maker_did_not_fill_in_is_no_identifier(tmp_path: Path, left_as_it_was: str) -> None:
    tree(tmp_path, sys__class__dmi__id__product_uuid=left_as_it_was, proc__sys__kernel__hostname="name")
    assert host_id((), tmp_path)[1] is HostIdSource.HOSTNAME


def test_kernels_that_write_capitals_mean_the_same_machine(tmp_path: Path) -> None:
    one = tree(tmp_path / "a", sys__class__dmi__id__product_uuid=FIRMWARE)
    two = tree(tmp_path / "b", sys__class__dmi__id__product_uuid=FIRMWARE.upper() + "\n")
    assert host_id((), one) == host_id((), two)


def test_a_container_s_own_interface_is_no_identifier(tmp_path: Path) -> None:
    tree(tmp_path, proc__sys__kernel__hostname="name")
    network(tmp_path, "lo", "00:00:00:00:00:00", device=False)
    network(tmp_path, "eth0", "02:42:ac:11:00:02", device=False)
    assert host_id((), tmp_path)[1] is HostIdSource.HOSTNAME
