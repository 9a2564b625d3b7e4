"""Layers with int8 or 4-bit weights, which replace a model's own.

int8 has one scale for each output (or row of a table).
"""

from collections.abc import Callable
from typing import Any, Protocol, Self

import torch

from optigpu.ops.four_bits.quantize import quantize_groups
from optigpu.ops.four_bits.scheme import Int4Scheme, Int4Weights
from optigpu.ops.layouts import INT4_TILE
from optigpu.ops.linear.int4_linear import (
    PACKED_OUTPUTS,
    PackedInt4,
    int4_linear,
    int4_linear_backend,
    int4_product_dtype,
    int4_rows,
    pack_int4,
)
from optigpu.ops.linear.int8_dynamic import int8_dynamic, pack_dynamic
from optigpu.ops.linear.int8_linear import TILE, int8_linear, pack, quantize_rows, unpack
from optigpu.surgery.places import LinearLayer, weight_of


class QuantizedLinear(torch.nn.Module):
    """What is made of the weights [outputs, inner] and the bias of a Linear or a Conv1D, and of `how`."""

    holds_quantized_weights = True
    bias: torch.Tensor | None

    @classmethod
    def of(cls, layer: LinearLayer, **how: Any) -> Self:
        return cls(weight_of(layer), layer.bias, **how)


class _Int8Layer(QuantizedLinear):
    """A linear layer with one int8 number for each weight, laid out by `_pack`."""

    _pack: Callable[[torch.Tensor], torch.Tensor]
    packed: torch.Tensor
    scale: torch.Tensor

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        q, scale = quantize_rows(weight)
        self.register_buffer("packed", self._pack(q))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", float_bias(bias))


class Int8Linear(_Int8Layer):
    """y = (x @ q.T) * scale + bias, in the dtype of x."""

    _pack = staticmethod(pack)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return int8_linear(x, self.packed, self.scale, self.bias)

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """q * scale, [outputs, inner]."""
        q = unpack(self.packed, self.scale.shape[0])
        return q.to(dtype) * self.scale.to(dtype)[:, None]


class Int8DynamicLinear(_Int8Layer):
    """y = (round(x / s) @ q.T) * s * scale + bias with one s for each row of x, in the dtype of x."""

    product_dtypes = ("int8",)
    _pack = staticmethod(pack_dynamic)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return int8_dynamic(x, self.packed, self.scale, self.bias)


class Int16Linear(QuantizedLinear):
    """y = (x @ high.T) * high_scale + (x @ low.T) * low_scale + bias, in the dtype of x.

    int8 numbers, and int8 numbers of their rounding errors: as many bytes as bfloat16 with smaller errors (at most
    1/64,000 of a row's largest weight, bfloat16 up to 1/512 of each). Faster on a CPU: for one token, 768 inputs and
    2304 outputs, a Zen 4 core took 190 us, and 440 us for torch's product with bfloat16.
    """

    high: torch.Tensor
    high_scale: torch.Tensor
    low: torch.Tensor
    low_scale: torch.Tensor

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        high, high_scale = quantize_rows(weight)
        low, low_scale = quantize_rows(weight.detach().float() - high * high_scale[:, None])
        self.register_buffer("high", pack(high))
        self.register_buffer("high_scale", high_scale)
        self.register_buffer("low", pack(low))
        self.register_buffer("low_scale", low_scale)
        self.register_buffer("bias", float_bias(bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rest = int8_linear(x, self.low, self.low_scale, self.bias)
        return int8_linear(x, self.high, self.high_scale) + rest


class Int8Embedding(torch.nn.Module):
    """row i = table[i] * scale[i], in `dtype`; the table is int8 [rows, inner], or that which an Int8Linear
    multiplies with: [tiles, inner, TILE]."""

    holds_quantized_weights = True
    table: torch.Tensor
    scale: torch.Tensor

    def __init__(self, table: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.register_buffer("scale", scale)
        self.dtype = dtype
        self.like = nothing_like(dtype, scale.device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        packed = self.table.dim() == 3
        rows = self.table[ids // TILE, :, ids % TILE] if packed else self.table[ids]
        return (rows * self.scale[ids].unsqueeze(-1)).to(self.dtype)


def float_bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    """A bias as quantized layers add it: a float32 copy, or None."""
    return None if bias is None else bias.detach().float()


def nothing_like(dtype: torch.dtype, device: torch.device) -> torch.nn.Parameter:
    """A parameter without numbers: a model takes its own dtype and device from its first one, and may have no other."""
    return torch.nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)


class _HoldsInt4(torch.nn.Module):
    """A module with 4-bit weights as its buffers."""

    holds_quantized_weights = True
    numbers: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None

    def __init__(self, packed: PackedInt4) -> None:
        super().__init__()
        self.register_buffer("numbers", packed.numbers)
        self.register_buffer("scale", packed.scale)
        self.register_buffer("offset", packed.offset)
        self.outputs = packed.outputs

    @property
    def packed(self) -> PackedInt4:
        return PackedInt4(self.numbers, self.scale, self.offset, self.outputs)


class Int4Linear(_HoldsInt4):
    """y = x @ weight.T + bias with dequantized 4-bit weights, in the dtype of x."""

    bias: torch.Tensor | None

    def __init__(self, packed: PackedInt4, bias: torch.Tensor | None) -> None:
        super().__init__(packed)
        self.register_buffer("bias", bias)

    @classmethod
    def of(cls, layer: LinearLayer, scheme: Int4Scheme, readable: bool = False) -> Self:
        """The quantized layer of a Linear or a Conv1D; `readable`: an Int4Embedding can look rows up in it.

        Raises ValueError when the scheme's groups do not divide the inputs or weights are not finite: ask
        `checked_places` before.
        """
        weight = weight_of(layer)
        return cls.holding(quantize_groups(weight, scheme), layer.bias, weight.dtype, readable)

    @classmethod
    def holding(
        cls, weights: Int4Weights, bias: torch.Tensor | None, dtype: torch.dtype, readable: bool = False
    ) -> Self:
        """A layer with given 4-bit numbers, in a model of `dtype`."""
        backend = int4_linear_backend(weights.q.device, dtype)
        if readable and backend == "torch-int4pack":
            backend = "torch-dequantize"
        return cls(pack_int4(weights, backend), float_bias(bias))

    @property
    def product_dtypes(self) -> tuple[str, ...]:
        """What its operator multiplies, if not what x has."""
        dtype = int4_product_dtype(self.packed)
        return () if dtype is None else (dtype,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return int4_linear(x, self.packed, self.bias)

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantized weights, [outputs, inner], of a readable layer."""
        return int4_rows(self.packed, torch.arange(self.outputs, device=self.scale.device)).to(dtype)


class Int4Embedding(_HoldsInt4):
    """Row i of dequantized 4-bit weights, in `dtype`: those that a readable Int4Linear multiplies with."""

    def __init__(self, packed: PackedInt4, dtype: torch.dtype) -> None:
        super().__init__(packed)
        self.dtype = dtype
        self.like = nothing_like(dtype, packed.scale.device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return int4_rows(self.packed, ids).to(self.dtype)


def int4_bytes(weight: torch.Tensor, scheme: Int4Scheme) -> int:
    """Bytes of an [outputs, inner] weight as 4-bit numbers with scales and padding, on its device."""
    backend = int4_linear_backend(weight.device, weight.dtype)
    units = {"torch-dequantize": 1, "torch-int4pack": PACKED_OUTPUTS.get(weight.device.type, 1)}
    unit = units.get(backend, INT4_TILE)
    outputs, inner = -(-weight.shape[0] // unit) * unit, weight.shape[1]
    scales = 1 if scheme.symmetric and backend != "torch-int4pack" else 2
    return int(outputs * inner // 2 + 2 * scales * outputs * (inner // scheme.group_size))


ROWS_AT_ONCE = 2**12
"""Outputs whose weights are float at the same time in a backward pass: 64 MB of float32 for 4,096 inputs."""


def int4_product(x: torch.Tensor, packed: PackedInt4, bias: torch.Tensor | None) -> torch.Tensor:
    """y = x @ weight.T + bias as `int4_linear`, differentiable in x and the bias; the weights are constants.

    x: floating point [..., inner]; float64 goes through float64 weights. The gradient of x is a product with the
    dequantized weights, some outputs at a time. Raises ValueError for the layout of torch's own operators.
    """
    y: torch.Tensor = _Int4Product.apply(x, packed, bias)  # type: ignore[no-untyped-call]
    return y


class _Context(Protocol):
    packed: PackedInt4
    bias_dtype: torch.dtype | None
    needs_input_grad: tuple[bool, ...]


class _Int4Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, x: torch.Tensor, packed: PackedInt4, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.packed, ctx.bias_dtype = packed, None if bias is None else bias.dtype
        if x.dtype is not torch.float64:
            return int4_linear(x, packed, None if bias is None else bias.float())
        every = torch.arange(packed.outputs, device=x.device)
        return torch.nn.functional.linear(
            x, int4_rows(packed, every).double(), None if bias is None else bias.double()
        )

    @staticmethod
    def backward(
        ctx: _Context, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor | None, None, torch.Tensor | None]:
        (gradient,) = gradients
        of_x = _through_weights(gradient, ctx.packed) if ctx.needs_input_grad[0] else None
        of_bias = None
        if ctx.needs_input_grad[2]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(dim=0).to(ctx.bias_dtype)
        return of_x, None, of_bias


def _through_weights(gradient: torch.Tensor, packed: PackedInt4) -> torch.Tensor:
    """gradient @ weight, [..., inner], in the dtype of the gradient."""
    total: torch.Tensor | None = None
    for rows in torch.arange(packed.outputs, device=gradient.device).split(ROWS_AT_ONCE):
        part = gradient[..., rows[0] : rows[-1] + 1] @ int4_rows(packed, rows).to(gradient.dtype)
        total = part if total is None else total + part
    assert total is not None  # a layer has outputs
    return total
