"""Linear layers that compute with the operators of bitsandbytes, bitwise as its own do, with all they hold in buffers.

The library keeps statistics in attributes that no meter sees, `.to()` does not move and torch.export does not know.
"""

import torch
from bitsandbytes.functional import has_avx512bf16, int8_vectorwise_quant, quantize_4bit
from bitsandbytes.nn import Linear4bit, Params4bit

from optigpu.ops.layouts import NF4_BLOCK, NF4_NESTED_BLOCK, NF4_PACKED_INPUTS, NF4_PACKED_OUTPUTS
from optigpu.surgery.integer_layers import QuantizedLinear

_LIBRARY = torch.ops.bitsandbytes


class Int8OutlierLinear(QuantizedLinear):
    """LLM.int8(): y = (round(x / s) @ q.T) * s * scale / 127**2 + bias; s is the largest magnitude in a row of x.

    A column in which any row of x reaches `threshold` is left out of x, and of s, and multiplied with its weights
    in the dtype of x; with the threshold 0 there are none. Dettmers et al., 2022, section 3.2.
    """

    product_dtypes = ("int8",)
    packed: torch.Tensor
    scale: torch.Tensor

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, threshold: float) -> None:
        super().__init__()
        # The library quantizes float16 numbers, of weights and of activations.
        packed, scale, _ = int8_vectorwise_quant(weight.detach().to(torch.float16).contiguous())
        self.register_buffer("packed", packed)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self.threshold = threshold

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        q, largest, columns = int8_vectorwise_quant(rows.to(torch.float16), threshold=self.threshold)
        y: torch.Tensor
        if self.threshold > 0:
            y, _ = _LIBRARY.int8_mixed_scaled_mm(
                rows, q, self.packed, largest, self.scale, columns, self.bias
            )
        else:
            y = _LIBRARY.int8_scaled_mm(q, self.packed, largest, self.scale, bias=self.bias, dtype=x.dtype)
        return y.view(*x.shape[:-1], -1)


class Nf4Linear(QuantizedLinear):
    """y = x @ W.T + bias, where W is levels[packed] * absmax of its block. Dettmers et al., QLoRA, 2023, section 3.

    With `nested` the statistics are int8 themselves: nested_levels[absmax] * nested_absmax + offset. With `fused`
    they are bfloat16 numbers and `packed` has the layout of the library's operator for CPUs.
    """

    packed: torch.Tensor
    absmax: torch.Tensor
    levels: torch.Tensor
    offset: torch.Tensor
    nested_absmax: torch.Tensor
    nested_levels: torch.Tensor

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, double: bool, packed: bool) -> None:
        super().__init__()
        self.shape, self.dtype = weight.shape, weight.dtype
        self.fused = packed and _fits_fused(weight)
        self.nested = double and not self.fused
        plain = weight.detach().contiguous()
        data, state = quantize_4bit(
            plain, blocksize=NF4_BLOCK, compress_statistics=self.nested, quant_type="nf4"
        )
        if self.fused:
            # The same weights as the library lays them out for its fused operator: it does so at a layer's
            # first pass.
            outputs, inputs = state.shape
            layer = Linear4bit(
                inputs, outputs, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta"
            )
            layer.weight = Params4bit(data, quant_state=state, quant_type="nf4", bnb_quantized=True)
            layer.eval()(torch.zeros(1, inputs, dtype=torch.bfloat16))
            data, state = layer.weight.data, layer.weight.quant_state
        self.register_buffer("packed", data)
        self.register_buffer("absmax", state.absmax)
        self.register_buffer("levels", state.code)
        if self.nested:
            self.register_buffer("offset", state.offset)
            self.register_buffer("nested_absmax", state.state2.absmax)
            self.register_buffer("nested_levels", state.state2.code)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known, shape = x.to(self.dtype), list(self.shape)
        y: torch.Tensor
        if self.fused:
            y = _LIBRARY.gemv_4bit(known, self.packed, shape, self.absmax, self.levels, NF4_BLOCK)
            y = y if self.bias is None else y + self.bias
        elif self.shape[1] % NF4_BLOCK:
            y = torch.nn.functional.linear(known, self.widened(self.dtype), self.bias)
        elif self.nested:
            y = _LIBRARY.gemm_4bit(
                known, self.packed, shape, self.nested_absmax, NF4_BLOCK, "nf4", self.bias,
                self.absmax, self.nested_levels, self.offset,
            )  # fmt: skip
        else:
            y = _LIBRARY.gemm_4bit(known, self.packed, shape, self.absmax, NF4_BLOCK, "nf4", self.bias)
        return y.to(x.dtype)

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """W, [outputs, inner], widened as one long row; not of a fused layer.

        With AVX-512, version 0.50 gives rows of 32, 96, 160, ... inputs the statistics of other blocks.
        """
        absmax = self.absmax
        if self.nested:
            levels = (self.nested_absmax, self.nested_levels, NF4_NESTED_BLOCK, torch.float32)
            absmax = _LIBRARY.dequantize_blockwise(absmax, *levels) + self.offset
        row = [1, self.shape[0] * self.shape[1]]
        wide: torch.Tensor = _LIBRARY.dequantize_4bit(self.packed, absmax, NF4_BLOCK, "nf4", row, self.dtype)
        return wide.view(self.shape).to(dtype)


def _fits_fused(weight: torch.Tensor) -> bool:
    """Whether the library's fused operator for CPUs takes it: bfloat16 weights, whole tiles, AVX-512 with bfloat16."""
    outputs, inputs = weight.shape
    is_whole = not (outputs % NF4_PACKED_OUTPUTS or inputs % NF4_PACKED_INPUTS)
    is_alike = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return is_alike and is_whole and bool(has_avx512bf16())
