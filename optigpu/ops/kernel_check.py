"""How a kernel is checked on the machine that it is to run on: `optigpu selftest`.

A folder of kernels has a `selftest.py` with `KERNELS`: a KernelCheck by the kernel's name. It calls the kernel as
techniques do, with seeded operands, and compares with plain torch in float64. This file imports no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass

from optigpu.documents.selftest import Comparison
from optigpu.hardware.device_kinds import Ability, devices_with
from optigpu.vocabulary import DeviceKind

ROUNDING = "what rounding explains"


@dataclass(frozen=True)
class KernelCheck:
    """`run` gives a kernel's largest error on a device.

    It raises UnsupportedError where the kernel cannot run, and where plain torch would stand in for it.
    """

    run: Callable[[DeviceKind], Comparison]
    devices: tuple[DeviceKind, ...] = devices_with((Ability.OWN_KERNELS, Ability.FLOAT64))
