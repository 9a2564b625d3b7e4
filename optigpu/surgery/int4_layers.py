"""Layers with 4-bit weights that take the place of a model's own. Each is made at its first use."""

import functools
from typing import TYPE_CHECKING, Any

from optigpu.ops.four_bits.scheme import Int4Scheme
from optigpu.surgery.places import weight_of

if TYPE_CHECKING:
    import torch

    from optigpu.ops.four_bits.scheme import Int4Weights
    from optigpu.ops.linear.int4_linear import PackedInt4

CONFLICTS = {
    "autocast": "the 4-bit operator takes its activations as they come, and autocast does not reach it",
    "cpu_offload": "it lays its weights out for the host, where an offloaded model is loaded",
    "grad_enabled": "4-bit weights have no gradient",
}
"""What no technique goes with that computes with these layers, and why."""


def int4_linear_of(layer: Any, scheme: Int4Scheme, readable: bool = False) -> Any:
    """The twin of a Linear or a Conv1D with 4-bit weights and activations as they are.

    `readable` wants a layout that an `int4_embedding_of` can look rows up in, also where another is faster.
    Raises ValueError when the scheme's groups do not divide the inputs or weights are not finite: ask `checked_places`
    before.
    """
    from optigpu.ops.four_bits.quantize import quantize_groups

    weight = weight_of(layer)
    return int4_linear_with(quantize_groups(weight, scheme), layer.bias, weight.dtype, readable)


def int4_linear_with(
    weights: "Int4Weights", bias: "torch.Tensor | None", dtype: "torch.dtype", readable: bool = False
) -> Any:
    """A layer that computes with 4-bit numbers which were chosen elsewhere, in a model of `dtype`."""
    from optigpu.ops.linear.int4_linear import int4_linear_backend, pack_int4

    backend = int4_linear_backend(weights.q.device, dtype)
    if readable and backend == "torch-int4pack":
        backend = "torch-dequantize"
    return _int4_linear_class()(pack_int4(weights, backend), None if bias is None else bias.detach().float())


def int4_embedding_of(head: Any, dtype: "torch.dtype") -> Any:
    """Looks rows up in the very table that a readable head of `int4_linear_of` multiplies with, in `dtype`."""
    return _int4_embedding_class()(head.packed, dtype)


def int4_bytes(weight: Any, scheme: Int4Scheme) -> int:
    """Bytes of an [outputs, inner] weight as 4-bit numbers with scales and what fills them up, on its device."""
    from optigpu.ops.linear.int4_linear import PACKED_OUTPUTS, TILE, int4_linear_backend

    backend = int4_linear_backend(weight.device, weight.dtype)
    units = {"torch-dequantize": 1, "torch-int4pack": PACKED_OUTPUTS.get(weight.device.type, 1)}
    unit = units.get(backend, TILE)
    outputs, inner = -(-weight.shape[0] // unit) * unit, weight.shape[1]
    scales = 1 if scheme.symmetric and backend != "torch-int4pack" else 2
    return int(outputs * inner // 2 + 2 * scales * outputs * (inner // scheme.group_size))


@functools.cache
def _int4_linear_class() -> Any:
    import torch

    from optigpu.ops.linear.int4_linear import PackedInt4, int4_linear

    class Int4Linear(torch.nn.Module):
        """y = x @ weight.T + bias with the weights that 4-bit numbers stand for, in the dtype of x."""

        holds_quantized_weights = True
        numbers: torch.Tensor
        scale: torch.Tensor
        offset: torch.Tensor | None
        outputs: int
        bias: torch.Tensor | None

        def __init__(self, packed: PackedInt4, bias: torch.Tensor | None) -> None:
            super().__init__()
            _hold(self, packed)
            self.register_buffer("bias", bias)

        @property
        def packed(self) -> PackedInt4:
            return PackedInt4(self.numbers, self.scale, self.offset, self.outputs)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return int4_linear(x, self.packed, self.bias)

    return Int4Linear


@functools.cache
def _int4_embedding_class() -> Any:
    import torch

    from optigpu.ops.linear.int4_linear import PackedInt4, int4_rows

    class Int4Embedding(torch.nn.Module):
        """Row i of the weights that 4-bit numbers stand for, in `dtype`."""

        holds_quantized_weights = True
        numbers: torch.Tensor
        scale: torch.Tensor
        offset: torch.Tensor | None
        outputs: int

        def __init__(self, packed: PackedInt4, dtype: torch.dtype) -> None:
            super().__init__()
            _hold(self, packed)
            self.dtype = dtype

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            packed = PackedInt4(self.numbers, self.scale, self.offset, self.outputs)
            return int4_rows(packed, ids).to(self.dtype)

    return Int4Embedding


def _hold(module: Any, packed: "PackedInt4") -> None:
    """As buffers, so that whoever counts a model's bytes counts these."""
    module.register_buffer("numbers", packed.numbers)
    module.register_buffer("scale", packed.scale)
    module.register_buffer("offset", packed.offset)
    module.outputs = packed.outputs
