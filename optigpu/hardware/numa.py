"""The memory nodes of a machine, from sysfs as ABI/stable/sysfs-devices-node of the Linux kernel describes it."""

from pathlib import Path

from optigpu.hardware.cgroup import ROOT
from optigpu.hardware.files import contents


def node_of_each_cpu(root: Path = ROOT) -> dict[int, int]:
    """The memory node of each CPU; without CPUs of nodes that are offline or have no memory.

    Empty where the kernel knows of no nodes. `root` is the root of the file system, so that a test can hand in another.
    """
    nodes = root / "sys/devices/system/node"
    usable = _listed(contents(nodes / "online")) & _listed(contents(nodes / "has_memory"))
    cpus = {node: _listed(contents(nodes / f"node{node}/cpulist")) for node in sorted(usable)}
    return {cpu: node for node, its in cpus.items() for cpu in sorted(its)}


def _listed(text: str) -> set[int]:
    """The numbers of a list like 0-3,8."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
