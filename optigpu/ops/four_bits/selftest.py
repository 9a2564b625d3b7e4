"""Checks of the quantization to 4-bit numbers: how far weights are off, and what compensation gains."""

import torch

from optigpu.documents.selftest import Comparison
from optigpu.ops.four_bits.compensated import compensated_groups, compensation
from optigpu.ops.four_bits.quantize import dequantize_groups, quantize_groups, scale_units
from optigpu.ops.four_bits.scheme import Int4Scheme
from optigpu.ops.integers import INT4_LEAST
from optigpu.ops.kernel_check import KernelCheck
from optigpu.ops.kernel_operands import Draw
from optigpu.vocabulary import DeviceKind

OUTPUTS, INNER, SAMPLES = 48, 128, 512
GROUP = 32
ONE_STEP = 1.02
"""A weight near the largest one, of the other sign, is off by a step; the scale itself is rounded to bfloat16."""


def quantized_groups(device: DeviceKind) -> Comparison:
    """No weight is off by more than a step of its group."""
    weight = Draw(device)(OUTPUTS, INNER)
    found = quantize_groups(weight, Int4Scheme(group_size=GROUP, solver="min_max"))
    steps = found.scale.float().abs().repeat_interleave(GROUP, dim=1)
    error = float(((dequantize_groups(found) - weight).abs() / steps).max())
    return Comparison(error, ONE_STEP, "a step of the group", f"groups of {GROUP}")


def compensated(device: DeviceKind) -> Comparison:
    """Outputs on correlated inputs are nearer with compensation than without."""
    draw = Draw(device, seed=1)
    weight = draw(OUTPUTS, INNER)
    inputs = draw(SAMPLES, INNER) @ draw(INNER, INNER, size=INNER**-0.5) + draw(SAMPLES, 1)
    unit, scheme = scale_units(weight, -INT4_LEAST), Int4Scheme(group_size=GROUP)
    known = compensation(inputs.T @ inputs)

    def loss(q: torch.Tensor, scale: torch.Tensor) -> float:
        steps = (scale.float() * unit.float()[:, None]).repeat_interleave(GROUP, dim=1)
        return float((inputs @ ((q.float() + INT4_LEAST) * steps - weight).T).square().sum())

    better, plain = compensated_groups(weight, known, scheme, unit), quantize_groups(weight, scheme, unit)
    error = loss(better.q, better.scale) / loss(plain.q, plain.scale)
    return Comparison(error, 0.9, "the error without compensation", f"groups of {GROUP}")


KERNELS = {
    "quantized_groups": KernelCheck(quantized_groups),
    "compensated_groups": KernelCheck(compensated),
}
