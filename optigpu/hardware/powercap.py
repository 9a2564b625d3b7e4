"""RAPL, the energy counters of a CPU, through the kernel's power capping framework in /sys/class/powercap.

Counted are the packages (cores, caches, memory controller, graphics) and the memory of each. `psys`, the
whole platform, is left out: what it covers is up to the board's maker, it holds the packages once more, and servers
lack it. The domains `core` and `uncore` are parts of their package, and `intel-rapl-mmio` shows the same packages.

`root` is the root of the file system, so that a test can hand in another.
Source: Linux, Documentation/power/powercap/powercap.rst and ABI/testing/sysfs-class-powercap; AMD's counters show there
under the same names.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from optigpu.hardware.cgroup import ROOT
from optigpu.hardware.sensors import SensorError

_ZONE = re.compile(r"intel-rapl:\d+(:\d+)?")


@dataclass(frozen=True)
class Domain:
    """One counter. It restarts at zero after `wraps_at_j` joules."""

    name: str
    folder: Path
    wraps_at_j: float

    def energy_j(self) -> float:
        """The counter, in steps of a microjoule. Raises SensorError if it cannot be read."""
        return _microjoules(self.folder / "energy_uj") / 1e6


def energy_domains(root: Path = ROOT) -> tuple[Domain, ...]:
    """The counters of every package, and of its memory where counted. Raises SensorError if there is none."""
    folder = root / "sys/class/powercap"
    zones = sorted(zone for zone in folder.glob("intel-rapl:*") if _ZONE.fullmatch(zone.name))
    names = {zone.name: _text(zone / "name") for zone in zones}
    packages = {zone: name for zone, name in names.items() if name.startswith("package")}
    memories = {
        zone: f"{packages[parent]} dram"
        for zone, name in names.items()
        if name == "dram" and (parent := zone.rpartition(":")[0]) in packages
    }
    if not packages:
        raise SensorError(
            "This machine has no energy counter of its CPU (no RAPL package in /sys/class/powercap), like most virtual "
            "machines; measure energy on a host that has one, or with a wall meter (docs/energy.md)."
        )
    return tuple(_domain(folder / zone, name) for zone, name in sorted((packages | memories).items()))


def _domain(folder: Path, name: str) -> Domain:
    return Domain(name, folder, wraps_at_j=_microjoules(folder / "max_energy_range_uj") / 1e6)


def _microjoules(path: Path) -> int:
    text = _text(path)
    if not text.isdecimal():
        raise SensorError(f"The energy counter {path} holds {text[:40]!r}, which is not a number.")
    return int(text)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except PermissionError:
        raise SensorError(
            f"Only root may read the CPU's energy counter ({path}); run as root, or make the file readable by "
            "others."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SensorError(
            f"The energy counter {path} cannot be read ({type(error).__name__}); check that the machine still has it."
        ) from error
