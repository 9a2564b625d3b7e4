"""The CPU: its model, the physical cores that this process may use, instruction sets, caches, memory nodes, setup.

Source: Linux, Documentation/admin-guide/pm/cpufreq.rst, intel_pstate.rst, ABI/testing/sysfs-devices-system-cpu and
ABI/stable/sysfs-devices-node. `root` is the root of the file system.
"""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Collection
from pathlib import Path

import psutil

from optigpu.documents.result import CpuSetup
from optigpu.hardware.cgroup import ROOT, contents, cpu_quota

FEATURES = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"),
    *("avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2", "svebf16"),
)
"""The kernel's flag names that decide which kernels run; "asimd" is ARM's NEON."""
CORE, PACKAGE = "thread_siblings_list", "physical_package_id"
"""Facts of a CPU's topology that name its core and its package."""


def cpu_model(root: Path = ROOT) -> str:
    """The model name; with family and model number where a hypervisor hides the name."""
    fields = cpu_fields(root)
    name = fields.get("model name") or _asked("lscpu", r"Model name:\s*(.+)")
    name = name or _asked("sysctl -n machdep.cpu.brand_string", r"(.+)")
    name = " ".join(
        re.sub(r"\((R|TM)\)|@.*|\bCPU\b|\d+-Core Processor|\bProcessor\b", " ", name or "").split()
    )
    if not name:
        return platform.machine()
    hidden = not any(character.isdigit() for character in name) and "cpu family" in fields
    return f"{name} (family {fields['cpu family']} model {fields['model']})" if hidden else name


def cpu_features(root: Path = ROOT) -> tuple[str, ...]:
    """The members of FEATURES that the first CPU has."""
    fields = cpu_fields(root)
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return tuple(feature for feature in FEATURES if feature in flags)


def has_onednn_bfloat16(root: Path = ROOT) -> bool:
    """Whether oneDNN has products of bfloat16 here; torch's own are many times slower than those of float32."""
    return not {"avx512bw", "bf16"}.isdisjoint(cpu_features(root))


def sums_bfloat16_apart(root: Path = ROOT) -> bool:
    """Whether a product of bfloat16 holds its sums in float32 beside its output: oneDNN's, by AVX-512 without bf16."""
    features = cpu_features(root)
    return "avx512bw" in features and "avx512_bf16" not in features


def has_vnni(root: Path = ROOT) -> bool:
    """Whether an x86 CPU has an instruction that adds four products of 8-bit numbers to a sum: VNNI."""
    return not {"avx_vnni", "avx512_vnni"}.isdisjoint(cpu_features(root))


def cpu_cores(root: Path = ROOT) -> int:
    """Physical cores that this process may use, by affinity and control group quota; at least 1."""
    allowed = allowed_cpus()
    cores = {_topology(root, cpu, CORE) for cpu in allowed} if allowed else set()
    count = len(cores) or psutil.cpu_count(logical=False) or os.cpu_count() or 1
    quota = cpu_quota(root)
    return max(1, min(count, int(quota)) if quota else count)


def allowed_cpus() -> set[int]:
    """The logical CPUs that this process may run on; empty where the system does not say (macOS)."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def one_cpu_of_each_core(root: Path = ROOT) -> list[int]:
    """The first logical CPU of each physical core that this process may run on, in order."""
    return first_of_each(CORE, allowed_cpus(), root)


def first_of_each(fact: str, cpus: Collection[int], root: Path = ROOT) -> list[int]:
    """The lowest of `cpus` in each CORE or PACKAGE, in order; all of them if those are unknown."""
    first: dict[str, int] = {}
    for cpu in sorted(cpus):
        first.setdefault(_topology(root, cpu, fact), cpu)
    return sorted(first.values())


def _topology(root: Path, cpu: int, name: str) -> str:
    """A fact of a CPU's place in the topology; a unique name if the kernel does not report it."""
    return contents(root / f"sys/devices/system/cpu/cpu{cpu}/topology" / name) or f"cpu{cpu}"


def cpu_fields(root: Path) -> dict[str, str]:
    """The fields of the first CPU in /proc/cpuinfo; empty if there is no such file."""
    text = contents(root / "proc/cpuinfo")
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def _asked(command: str, pattern: str) -> str | None:
    words = command.split()
    if shutil.which(words[0]) is None:
        return None
    answer = subprocess.run(
        words, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"}, check=False
    )
    found = re.search(pattern, answer.stdout) if answer.returncode == 0 else None
    return found[1] if found else None


def node_of_each_cpu(root: Path = ROOT) -> dict[int, int]:
    """The memory node of each CPU, but for nodes that are offline or have no memory; empty where there are no nodes."""
    nodes = root / "sys/devices/system/node"
    usable = _listed(contents(nodes / "online")) & _listed(contents(nodes / "has_memory"))
    cpus = {node: _listed(contents(nodes / f"node{node}/cpulist")) for node in sorted(usable)}
    return {cpu: node for node, its in cpus.items() for cpu in sorted(its)}


def _listed(text: str) -> set[int]:
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


_CPUS = "sys/devices/system/cpu"
_CACHE_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def cpu_setup(root: Path) -> CpuSetup:
    """The setup of the CPUs that this process may use; virtual machines report little of it."""
    fields = cpu_fields(root)
    flags = (fields.get("flags") or "").split()
    named = re.search(r"@ ([\d.]+)GHz", fields.get("model name") or "")  # so Intel's names end
    no_turbo, boost = (_switch(root / _CPUS / name) for name in ("intel_pstate/no_turbo", "cpufreq/boost"))
    return CpuSetup(
        base_hz=_highest_hz(root, "base_frequency") or (round(float(named[1]) * 1e9) if named else None),
        max_hz=_highest_hz(root, "cpuinfo_max_freq"),
        limit_hz=_highest_hz(root, "scaling_max_freq"),
        governor=", ".join(sorted(set(_policies(root, "scaling_governor")))) or None,
        boost=boost if no_turbo is None else not no_turbo,
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


def _switch(path: Path) -> bool | None:
    return {"0": False, "1": True}.get(contents(path))


def last_level_cache_bytes(root: Path = ROOT) -> int | None:
    """Bytes of the first CPU's largest cache; None if the kernel does not report it."""
    texts = (path.read_text().strip() for path in root.glob("sys/devices/system/cpu/cpu0/cache/index*/size"))
    sizes = ((text[:-1], text[-1:]) for text in texts)  # "491520K"
    found = (
        int(size) * _CACHE_UNITS[unit] for size, unit in sizes if size.isdigit() and unit in _CACHE_UNITS
    )
    return max(found, default=0) or None
