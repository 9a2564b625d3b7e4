"""Checks of the quantization to few bits: how far weights are off, and what compensation gains."""

import torch

from optigpu.documents.selftest import Comparison
from optigpu.ops.four_bits.compensated import compensated_groups, compensation
from optigpu.ops.four_bits.few_bits import few_bits_reason
from optigpu.ops.four_bits.grid import grid_of
from optigpu.ops.four_bits.quantize import dequantize_groups, quantize_groups, scale_units
from optigpu.ops.four_bits.scheme import EIGHT, FURTHEST, REACH, SIXTEEN, Int4Scheme
from optigpu.ops.kernel_check import Draw, KernelCheck
from optigpu.ops.operands import INT4_LEAST
from optigpu.vocabulary import DeviceKind, UnsupportedError

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


def uneven_groups(device: DeviceKind) -> Comparison:
    """The operator's numbers are those of the nearest values: the largest share of a step by which one is further."""
    reason = few_bits_reason()
    if reason is not None:
        raise UnsupportedError(reason)
    weight, worst = Draw(device, seed=2)(OUTPUTS, INNER), 0.0
    for table in (EIGHT, SIXTEEN):
        unit = scale_units(weight, int(-FURTHEST / REACH))
        scheme = Int4Scheme(group_size=GROUP, table=table)
        found = quantize_groups(weight, scheme, unit)
        steps = (found.scale * unit.double()[:, None]).repeat_interleave(GROUP, dim=1)
        moved = grid_of(scheme, weight.device).moved(found.scale).repeat_interleave(GROUP, dim=1)
        away = (weight.double() / steps - moved).unsqueeze(2).sub(torch.tensor(table)).abs()
        chosen = away.gather(2, found.q.long().unsqueeze(2)).squeeze(2)
        worst = max(worst, float((chosen - away.amin(dim=2)).max()))
    return Comparison(worst, 1e-4, "a unit of the scale", f"groups of {GROUP}, 8 and 16 values")


KERNELS = {
    "quantized_groups": KernelCheck(quantized_groups),
    "compensated_groups": KernelCheck(compensated),
    "uneven_groups": KernelCheck(uneven_groups, devices=(DeviceKind.CPU,)),
}
