"""A small computation that a device must get right before jobs are given to it."""

import torch

from optigpu.hardware.device_kinds import torch_name
from optigpu.vocabulary import DeviceKind, OptiGPUError

SIDE = 64
LARGEST = 7
"""Of the numbers: products of whole numbers this small are exact in every precision that a GPU multiplies in."""


def multiply(device: DeviceKind) -> None:
    """Fills a matrix on the device and multiplies it with itself.

    Raises what torch raises if it cannot use the device, and OptiGPUError if the product is wrong.
    """
    numbers = _numbers(torch_name(device))
    product = (numbers @ numbers).cpu()
    plain = _numbers("cpu")
    if not torch.equal(product, plain @ plain):
        raise OptiGPUError("the product of two matrices of small whole numbers is wrong")


def _numbers(device: str) -> torch.Tensor:
    """float32 [SIDE, SIDE], whole numbers from 0 to LARGEST."""
    every = torch.arange(SIDE * SIDE, device=device, dtype=torch.float32)
    return every.remainder(LARGEST + 1).reshape(SIDE, SIDE)
