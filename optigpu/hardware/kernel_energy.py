"""The energy of an AMD or an Intel GPU, by the files of the kernel's hardware monitoring. Nothing has run beside one.

`root` is the root of the file system, so that a test can hand in another.
Source: Linux, Documentation/hwmon/sysfs-interface.rst, gpu/amdgpu/thermal.rst, and in ABI/testing
sysfs-driver-intel-i915-hwmon and sysfs-driver-intel-xe-hwmon: microwatts and microjoules.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from optigpu.hardware.cgroup import ROOT
from optigpu.hardware.device_kinds import KINDS, Ability
from optigpu.hardware.energy import CounterFlow, EnergySensor, PowerFlow
from optigpu.hardware.files import contents
from optigpu.hardware.sensors import SensorError
from optigpu.vocabulary import DeviceKind

_CARD = re.compile(r"card\d+")
_WALL = "connect a wall meter (docs/energy.md)"


@dataclass(frozen=True)
class _Monitor:
    """The names that the drivers' monitors have, and the file that is read: a power, or a count of energy."""

    drivers: tuple[str, ...]
    file: str
    is_power: bool


_MONITORS: Mapping[DeviceKind, _Monitor] = MappingProxyType(
    {
        DeviceKind.ROCM: _Monitor(("amdgpu",), "power1_average", is_power=True),
        DeviceKind.XPU: _Monitor(("i915", "xe"), "energy1_input", is_power=False),
    }
)


def kernel_energy(device: DeviceKind, root: Path = ROOT) -> EnergySensor:
    """The one GPU of that kind. Raises SensorError if there is no file of it, or which one is torch's is unknown."""
    reason = KINDS[device].lacks.get(Ability.ENERGY)
    if reason:
        raise SensorError(f"There is no energy of an {KINDS[device].title}: {reason}; {_WALL}.")
    monitor, title = _MONITORS[device], KINDS[device].title
    files = _files(monitor, root)
    if not files:
        raise SensorError(
            f"The kernel tells no energy of an {title} (no {monitor.file} in /sys/class/drm/card*/device/hwmon); "
            f"{_WALL}."
        )
    if len(files) > 1:
        raise SensorError(
            f"The kernel tells the energy of {len(files)} {title}s, and not which of them torch uses; {_WALL}."
        )
    return _sensor(files[0], monitor)


def _files(monitor: _Monitor, root: Path) -> list[Path]:
    """The file of each card that has such a driver."""
    cards = (card for card in (root / "sys/class/drm").glob("card*") if _CARD.fullmatch(card.name))
    folders = (folder for card in cards for folder in card.glob("device/hwmon/hwmon*"))
    named = (folder for folder in folders if contents(folder / "name") in monitor.drivers)
    return sorted(folder / monitor.file for folder in named if (folder / monitor.file).is_file())


def _sensor(path: Path, monitor: _Monitor) -> EnergySensor:
    driver, scope = contents(path.parent / "name"), "what the GPU's driver counts, not the host"
    read = partial(_millionths, path)
    if monitor.is_power:
        return EnergySensor(f"{driver}'s {monitor.file}, integrated", scope, None, 10.0, [PowerFlow(read)])
    return EnergySensor(f"{driver}'s {monitor.file}", scope, 1e-6, 1.0, [CounterFlow(driver, read)])


def _millionths(path: Path) -> float:
    text = contents(path)
    if not text.isdecimal():
        raise SensorError(f"{path} holds no number; {_WALL}.")
    return int(text) / 1e6
