"""How a kernel is checked on the machine that it is to run on: `optigpu selftest`.

A folder of kernels has a `selftest.py` with `KERNELS`: a KernelCheck by the kernel's name. It calls the kernel as
techniques do, with seeded operands, and compares with plain torch in float64.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVarTuple

import torch

from optigpu.documents.selftest import Comparison
from optigpu.hardware.device_kinds import Ability, devices_with
from optigpu.vocabulary import DeviceKind

Sizes = TypeVarTuple("Sizes")

TYPES = (torch.float32, torch.bfloat16, torch.float16)
UNIT = 2.0**-24
"""Unit roundoff of float32, in which kernels sum."""
_LEAST = 1e-300
"""Divides where nothing may be off: zero by it is zero, and all else is far above the bound."""


@dataclass(frozen=True)
class KernelCheck:
    """`run` gives a kernel's largest error on a device.

    It raises UnsupportedError where the kernel cannot run, and where plain torch would stand in for it.
    """

    run: Callable[[DeviceKind], Comparison]
    devices: tuple[DeviceKind, ...] = devices_with((Ability.OWN_KERNELS, Ability.FLOAT64))


class Draw:
    """Random normal tensors on a device, the same on every one."""

    def __init__(self, device: DeviceKind, seed: int = 0) -> None:
        self.device = torch.device(device.value)
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=self._generator) * size).to(self.device, dtype)


def cases(shapes: Sequence[tuple[*Sizes]]) -> Iterator[tuple[torch.dtype, *Sizes]]:
    """Each shape in each type."""
    return ((dtype, *shape) for dtype in TYPES for shape in shapes)


def share(found: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor) -> float:
    """The largest error over what is allowed there; NaN if a number is. `exact` and `allowed` are float64."""
    return float(((found.double() - exact).abs() / allowed.clamp(min=_LEAST)).max())


def half_a_step(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The error of rounding a result to its dtype once, down to the dtype's smallest numbers."""
    info = torch.finfo(dtype)
    return exact.abs() * info.eps / 2 + info.smallest_normal * info.eps / 2


def compared(shares: Sequence[float], how: str) -> Comparison:
    """The comparison of shares of what rounding explains; `how` is the kernel's backend."""
    return Comparison(float(torch.tensor(shares).max()), 1.0, "what rounding explains", how)
