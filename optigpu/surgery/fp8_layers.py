"""Linear layers of 8-bit floats: with e4m3 weights and activations rounded to e4m3, and such whose three products in
training are of 8-bit floats (the output, and the gradients to input and weight)."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

from optigpu.ops.layouts import FP8_STEP
from optigpu.surgery.integer_layers import QuantizedLinear, float_bias
from optigpu.surgery.places import become, places_of, weight_of
from optigpu.vocabulary import UnsupportedError

E4M3_LARGEST = 448.0
"""The largest e4m3 number (Micikevicius et al., 2022, table 1)."""


def quantize_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 with one scale for each row (absmax / 448, round to nearest). rows: floating point [rows, inner].

    Returns float8_e4m3fn [rows, inner] and float32 [rows]; a row of zeros gets the scale 1, one with NaN or infinity a
    scale that is NaN or infinite.
    """
    wide = rows.float()
    scale = wide.abs().amax(dim=1) / E4M3_LARGEST
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    # The conversion gives NaN beyond the largest number, which the quotient's rounding may pass.
    return (wide / scale[:, None]).clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn), scale


class Fp8Linear(QuantizedLinear):
    """y = (q(x) @ q.T) * scale of x * scale + bias, in the dtype of x. Sums are float32."""

    product_dtypes = ("float8_e4m3fn",)
    q: torch.Tensor
    scale: torch.Tensor
    unit: torch.Tensor

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        q, scale = quantize_fp8(weight.detach())
        outputs, inner = q.shape
        # Padding knows no 8-bit floats; zero has the same bits as an integer.
        filled = pad(q.view(torch.uint8), (0, -inner % FP8_STEP, 0, -outputs % FP8_STEP))
        self.register_buffer("q", filled.contiguous().view(torch.float8_e4m3fn))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", float_bias(bias))
        self.register_buffer("unit", torch.ones((), device=weight.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        q, row_scale = quantize_fp8(pad(rows, (0, self.q.shape[1] - rows.shape[1])))
        # Unit scales, and ours afterwards: so it runs wherever fp8 does, not only where scales of rows are known.
        sums = torch._scaled_mm(q, self.q.T, self.unit, self.unit, out_dtype=torch.float32)
        y = sums[:, : self.scale.shape[0]] * (row_scale[:, None] * self.scale)
        y = y if self.bias is None else y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.scale.shape[0])


FP8_SIZE_MULTIPLE = 16
"""torch._scaled_mm takes matrices whose sizes are multiples of this on CUDA."""
_FACTORS = "lora_"
"""In the names of modules that peft added: products with them are too thin to gain."""


def train_in_fp8(model: torch.nn.Module) -> int:
    """Makes the linear layers compute in 8 bits, in place; returns how many. The head and small factors stay.

    Raises UnsupportedError, with the model left as it was, if there is none.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    places = places_of(model, lambda module: type(module) in (torch.nn.Linear, Conv1D))
    chosen = [
        place.layer
        for place in places
        if place.layer is not head
        and _FACTORS not in place.path
        and not any(size % FP8_SIZE_MULTIPLE for size in weight_of(place.layer).shape)
    ]
    if not chosen:
        raise UnsupportedError(
            f"fp8_training needs linear layers whose sizes are multiples of {FP8_SIZE_MULTIPLE}, and this model has "
            "none but the head; leave it out of the stack."
        )
    for layer in chosen:
        become(layer, Fp8Products)
    return len(chosen)


class Fp8Products(torch.nn.Module):
    """y = x @ W.T + bias with 8-bit products and float32 sums, in the dtype of x, or in autocast's."""

    product_dtypes = ("float8_e4m3fn",)
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        rows = x.flatten(0, -2)
        filled = pad(rows, (0, 0, 0, -rows.shape[0] % FP8_SIZE_MULTIPLE))
        y: torch.Tensor = _in_fp8(filled.to(dtype), weight_of(self))[: rows.shape[0]]
        y = y.reshape(*x.shape[:-1], y.shape[1])
        return y if self.bias is None else y + self.bias.to(dtype)


class _Products(torch.autograd.Function):
    """y = x @ w.T; x: [rows, inner], w: [outputs, inner]. For the backward pass x is kept in 8 bits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        qx, qw = quantized(x, torch.float8_e4m3fn), quantized(w, torch.float8_e4m3fn)
        ctx.save_for_backward(*qx, w)
        return product(qx, qw, x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, x_scale, w = ctx.saved_tensors
        qg = quantized(gradient, torch.float8_e5m2)
        to_x = to_w = None
        if ctx.needs_input_grad[0]:
            qw = quantized(w, torch.float8_e4m3fn)
            to_x = product(qg, turned(qw), gradient.dtype)  # [rows, inner]
        if ctx.needs_input_grad[1]:
            to_w = product(turned(qg), turned((x, x_scale)), w.dtype)  # [outputs, inner]
        return to_x, to_w


_in_fp8 = cast(Callable[[torch.Tensor, torch.Tensor], torch.Tensor], _Products.apply)

Quantized = tuple[torch.Tensor, torch.Tensor]
"""8-bit floats, and the float32 scale that multiplies all of them."""


def quantized(wide: torch.Tensor, dtype: torch.dtype) -> Quantized:
    """A matrix rounded to `dtype`, whose largest number its largest magnitude becomes; one of zeros has the scale 1."""
    limit = torch.finfo(dtype).max
    scale = wide.abs().amax().float() / limit
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (wide.float() / scale).clamp(-limit, limit).to(dtype), scale


def turned(matrix: Quantized) -> Quantized:
    """The transposed matrix, laid out row by row: what the units for 8-bit products need."""
    return matrix[0].T.contiguous(), matrix[1]


def product(a: Quantized, b: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """a @ b.T in `dtype`; a: [rows, inner], b: [columns, inner], both row by row."""
    y: torch.Tensor = torch._scaled_mm(a[0], b[0].T, a[1], b[1], out_dtype=dtype)
    return y
