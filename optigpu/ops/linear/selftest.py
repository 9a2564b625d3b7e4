"""Checks of the linear layers with quantized weights: their products beside those of the same weights in float64."""

from collections.abc import Callable

import torch

from optigpu.documents.selftest import Comparison
from optigpu.ops.four_bits.quantize import quantize_groups
from optigpu.ops.four_bits.scheme import Int4Scheme, Int4Weights
from optigpu.ops.kernel_check import UNIT, Draw, KernelCheck, cases, compared, half_a_step, share
from optigpu.ops.linear import int4_linear as four_bits
from optigpu.ops.linear import int8_dynamic as dynamic
from optigpu.ops.linear import int8_linear as eight_bits
from optigpu.ops.operands import INT4_ZERO
from optigpu.vocabulary import DeviceKind, UnsupportedError

SHAPES = ((1, 768, 64), (2, 128, 33), (7, 256, 40), (130, 384, 72))
"""Rows, inputs and outputs: one row and many, whole tiles and remainders."""
INT8_CAPABILITY = (7, 5)
"""The first GPUs that multiply int8 matrices."""
DIGITS = 8355710
"""Twice the least number of steps by which the C++ operator counts the largest activation of a group."""


def int8_linear(device: DeviceKind) -> Comparison:
    """Float32 sums over int8 weights: on CUDA also rounded as plain torch does, once for each of a few operators."""
    _require(device, eight_bits.native_reason)
    shares = []
    for dtype, rows, inner, outputs in cases(SHAPES):
        draw = Draw(device, seed=inner)
        q, scale = eight_bits.quantize_rows(draw(outputs, inner))
        x, bias = draw(rows, inner, dtype=dtype), draw(outputs)
        found = eight_bits.int8_linear(x, eight_bits.pack(q), scale, bias)
        exact = (x.double() @ q.double().T) * scale.double() + bias.double()
        size = (x.double().abs() @ q.double().abs().T) * scale.double() + bias.double().abs()
        shares.append(share(found, exact, _of_sums(size, inner, dtype, device) + half_a_step(exact, dtype)))
    return compared(shares, eight_bits.int8_linear_backend(device.value))


def int8_dynamic(device: DeviceKind) -> Comparison:
    """Sums of integers are exact; what follows them are a few roundings in float32."""
    _require(device, dynamic.dynamic_native_reason)
    if device is DeviceKind.CUDA and torch.cuda.get_device_capability() < INT8_CAPABILITY:
        raise UnsupportedError("int8 matrix products need compute capability 7.5.")
    shares = []
    for dtype, rows, inner, outputs in cases(SHAPES):
        draw = Draw(device, seed=inner + 1)
        q, scale = eight_bits.quantize_rows(draw(outputs, inner))
        x, bias = draw(rows, inner, dtype=dtype), draw(outputs)
        found = dynamic.int8_dynamic(x, dynamic.pack_dynamic(q), scale, bias)
        tokens, token_scale = dynamic.quantize_tokens(x)
        product = (tokens.double() @ q.double().T) * token_scale.double() * scale.double()
        exact = product + bias.double()
        allowed = 4 * UNIT * (product.abs() + exact.abs()) + half_a_step(exact, dtype)
        shares.append(share(found, exact, allowed))
    return compared(shares, dynamic.int8_dynamic_backend(device.value))


def int4_linear(device: DeviceKind) -> Comparison:
    """Symmetric groups and groups with offsets."""
    _require(device, four_bits.native_reason)
    shares, backends = [], []
    for symmetric in (True, False):
        for dtype, rows, inner, outputs in cases(SHAPES):
            draw = Draw(device, seed=inner + 2)
            weights = quantize_groups(draw(outputs, inner), Int4Scheme(symmetric=symmetric, solver="min_max"))
            x, bias = draw(rows, inner, dtype=dtype), draw(outputs)
            backend = four_bits.int4_linear_backend(device.value, dtype)
            found = four_bits.int4_linear(x, four_bits.pack_int4(weights, backend), bias)
            shares.append(_share_of_four_bits(found, x, weights, bias, device))
            backends.append(backend)
    return compared(shares, ", ".join(sorted(set(backends))))


def _share_of_four_bits(
    found: torch.Tensor, x: torch.Tensor, weights: Int4Weights, bias: torch.Tensor, device: DeviceKind
) -> float:
    """On a CPU an activation is rounded to a part of the largest one of its group."""
    numbers = weights.q.double().unflatten(1, (weights.scale.shape[1], -1)) - INT4_ZERO
    weight = numbers * weights.scale.double()[..., None]
    size = weight.abs()
    if weights.offset is not None:
        offset = weights.offset.double()[..., None]
        weight, size = weight + offset, size + offset.abs()
    wide = x.double().unflatten(1, weight.shape[1:])
    exact = torch.einsum("rgk,ogk->ro", wide, weight) + bias.double()
    sums = torch.einsum("rgk,ogk->ro", wide.abs(), size) + bias.double().abs()
    digits = torch.einsum("rg,og->ro", wide.abs().amax(dim=2), size.sum(dim=2)) / DIGITS
    allowed = _of_sums(sums, x.shape[1], x.dtype, device) + digits
    return share(found, exact, allowed + half_a_step(exact, x.dtype))


def _of_sums(size: torch.Tensor, inner: int, dtype: torch.dtype, device: DeviceKind) -> torch.Tensor:
    """The error of sums whose terms have that size; on CUDA operands and results may be rounded to `dtype` as well."""
    between = 4 * torch.finfo(dtype).eps if device is DeviceKind.CUDA else 0.0
    return size * ((inner + 8) * UNIT + between)


def _require(device: DeviceKind, native_reason: Callable[[], str | None]) -> None:
    reason = native_reason() if device is DeviceKind.CPU else None
    if reason is not None:
        raise UnsupportedError(reason)


KERNELS = {
    "int8_linear": KernelCheck(int8_linear),
    "int8_dynamic": KernelCheck(int8_dynamic),
    "int4_linear": KernelCheck(int4_linear),
}
