"""The setup of the CPU: clocks, governor, boost, threads per core, memory nodes, hypervisor.

From sysfs as Documentation/admin-guide/pm/cpufreq.rst, intel_pstate.rst and ABI/testing/sysfs-devices-system-cpu of the
Linux kernel describe it. `root` is the root of the file system, so that a test can hand in another.
"""

import re
from pathlib import Path

from optigpu.documents.result import CpuSetup
from optigpu.hardware.cpu import allowed_cpus, cpu_fields
from optigpu.hardware.files import contents

_CPUS = "sys/devices/system/cpu"


def cpu_setup(root: Path) -> CpuSetup:
    """The setup of the CPUs that this process may use; virtual machines report little of it."""
    fields = cpu_fields(root)
    flags = (fields.get("flags") or "").split()
    return CpuSetup(
        base_hz=_highest_hz(root, "base_frequency") or _named_hz(fields.get("model name") or ""),
        max_hz=_highest_hz(root, "cpuinfo_max_freq"),
        limit_hz=_highest_hz(root, "scaling_max_freq"),
        governor=", ".join(sorted(set(_policies(root, "scaling_governor")))) or None,
        boost=_boost(root),
        smt=_switch(root / _CPUS / "smt/active"),
        numa_nodes=len([*(root / "sys/devices/system/node").glob("node[0-9]*")]) or None,
        hypervisor="hypervisor" in flags if flags else None,
    )


def _highest_hz(root: Path, name: str) -> int | None:
    """The highest of all CPUs in use, since cores may differ; the kernel counts in kHz."""
    return max((int(text) * 1000 for text in _policies(root, name) if text.isdigit()), default=None)


def _policies(root: Path, name: str) -> list[str]:
    texts = (contents(root / _CPUS / f"cpu{cpu}/cpufreq" / name) for cpu in allowed_cpus())
    return [text for text in texts if text]


def _named_hz(model: str) -> int | None:
    """The base clock at the end of Intel's names: "Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz"."""
    found = re.search(r"@ ([\d.]+)GHz", model)
    return round(float(found[1]) * 1e9) if found else None


def _boost(root: Path) -> bool | None:
    """intel_pstate reports the opposite of the other drivers."""
    no_turbo = _switch(root / _CPUS / "intel_pstate/no_turbo")
    return _switch(root / _CPUS / "cpufreq/boost") if no_turbo is None else not no_turbo


def _switch(path: Path) -> bool | None:
    return {"0": False, "1": True}.get(contents(path))
