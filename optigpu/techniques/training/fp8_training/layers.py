"""Linear layers whose three products are of 8-bit floats: the output, and the gradients to input and weight."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

from optigpu.surgery.places import become, places_of, weight_of
from optigpu.vocabulary import UnsupportedError

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
