"""Layers with int8 weights and one scale for each output (or row of a table), which replace a model's own."""

from collections.abc import Callable
from typing import Any, Self

import torch

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
