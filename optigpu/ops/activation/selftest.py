"""Checks of the activations with the bias before them, beside the same in float64."""

import math
from functools import partial

import torch

from optigpu.documents.selftest import Comparison
from optigpu.ops.activation import fused_activation as fused
from optigpu.ops.kernel_check import UNIT, Draw, KernelCheck, cases, compared, half_a_step, share
from optigpu.vocabulary import DeviceKind, UnsupportedError

SHAPES = ((1, 3072), (3, 17), (40, 1500))
SPREAD = 4.0
"""Of the values: far enough for both tails."""
LEAST = 2.0**-149
"""The smallest float32: factors below the normal ones are off by this, before they are multiplied."""
EXTRA = {DeviceKind.CPU: 0, DeviceKind.CUDA: 4}
"""exp, erf and the division of a GPU are off by a few units more (CUDA C++ Programming Guide, Mathematical
Functions)."""


def gated(device: DeviceKind) -> Comparison:
    """silu(gate) * up."""
    backend = _backend(device)
    shares = []
    for dtype, rows, inner in cases(SHAPES):
        draw = Draw(device, seed=inner)
        x, bias = draw(rows, 2 * inner, dtype=dtype, size=SPREAD), draw(2 * inner, dtype=dtype)
        gate, up = (x.float() + bias.float()).double().chunk(2, dim=-1)
        exact = gate * torch.sigmoid(gate) * up
        # A GPU's exp rounds its argument when it makes it a power of two, by up to |gate| units.
        units = 6 + (EXTRA[device] + gate.abs() if device is DeviceKind.CUDA else 0)
        allowed = units * UNIT * exact.abs() + (gate.abs() + 1) * up.abs() * LEAST
        shares.append(share(fused.swiglu(x, bias), exact, allowed + half_a_step(exact, dtype)))
    return compared(shares, backend)


def gelu(form: fused.Approximation, device: DeviceKind) -> Comparison:
    """The exact form, or the approximation that GPT-2 uses."""
    backend = _backend(device)
    shares = []
    for dtype, rows, columns in cases(SHAPES):
        draw = Draw(device, seed=columns)
        x, bias = draw(rows, columns, dtype=dtype, size=SPREAD), draw(columns, dtype=dtype)
        v = (x.float() + bias.float()).double()
        # `units`: by how many of itself float32 arithmetic may be off.
        if form == "none":
            exact, units = v * 0.5 * torch.erfc(-v / math.sqrt(2)), torch.full_like(v, 12.0)
        else:
            s = 2 * math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)
            exact, units = v * torch.sigmoid(s), 4 * (1 + s.abs())
        allowed = units * UNIT * exact.abs() + (EXTRA[device] * UNIT + LEAST) * v.abs()
        shares.append(share(fused.bias_gelu(x, bias, form), exact, allowed + half_a_step(exact, dtype)))
    return compared(shares, backend)


def _backend(device: DeviceKind) -> str:
    reason = fused.activation_reason(device.value)
    if reason is not None:
        raise UnsupportedError(reason)
    return fused.activation_backend(device.value)


KERNELS = {
    "bias_gelu": KernelCheck(partial(gelu, "none")),
    "bias_gelu_tanh": KernelCheck(partial(gelu, "tanh")),
    "swiglu": KernelCheck(gated),
}
