"""What the tests of the linear operators multiply."""

import torch

from optigpu.ops.linear.int8_linear import quantize_rows

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def activations(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def int8_layer(inner: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights in int8, their scales, and a bias."""
    generator = torch.Generator().manual_seed(inner * 1000 + outputs)
    q, scale = quantize_rows(torch.randn(outputs, inner, generator=generator))
    return q, scale, torch.randn(outputs, generator=generator)
