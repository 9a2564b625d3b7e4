"""The product with frozen 4-bit weights, with a gradient for what goes in and for the bias."""

from typing import Any

import torch

from optigpu.ops.linear.int4_linear import PackedInt4, int4_linear, int4_rows

ROWS_AT_ONCE = 2**12
"""Outputs whose weights are float at the same time in a backward pass: 64 MB of float32 for 4,096 inputs."""


def int4_product(x: torch.Tensor, packed: PackedInt4, bias: torch.Tensor | None) -> torch.Tensor:
    """y = x @ weight.T + bias as `int4_linear`, differentiable in x and the bias; the weights are constants.

    x: floating point [..., inner]. float64, which the operator does not know, goes through float64 weights. The
    gradient of x is a product with the dequantized weights, some outputs at a time. Raises ValueError for the layout of
    torch's own operators, which cannot be read back.
    """
    y: torch.Tensor = _Int4Product.apply(x, packed, bias)  # type: ignore[no-untyped-call]
    return y


class _Int4Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: PackedInt4, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.packed, ctx.bias_dtype = packed, None if bias is None else bias.dtype
        if x.dtype is not torch.float64:
            return int4_linear(x, packed, None if bias is None else bias.float())
        every = torch.arange(packed.outputs, device=x.device)
        return torch.nn.functional.linear(
            x, int4_rows(packed, every).double(), None if bias is None else bias.double()
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None]:
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
