"""Quantized layers within a model that is trained: their weights stay, and gradients pass through to their inputs."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from optigpu.surgery.places import LinearLayer, weight_of


class WideningLayer(Protocol):
    """A quantized linear layer that can say which weights it multiplies with."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., inner]; returns [..., outputs]."""

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """The weights [outputs, inner]."""

    def buffers(self) -> Any:
        """What it stores."""


class FrozenLinear(torch.nn.Module):
    """y = layer(x), with the gradient of y to x.

    The layer's own operator computes y. The backward pass widens the weights again, one layer after the other, so that
    no step keeps a wide copy; nothing of x is kept. `infeatures`, `outfeatures` and `qweight` are the names by which
    peft knows the sizes and the device of a quantized layer. Under autocast x is converted, as for any linear layer.
    """

    def __init__(self, layer: WideningLayer, outputs: int, inner: int) -> None:
        super().__init__()
        _count_products()
        self.layer = layer
        self.infeatures, self.outfeatures = inner, outputs

    @classmethod
    def around(cls, layer: WideningLayer, replaced: LinearLayer) -> "FrozenLinear":
        """`layer` with the sizes of the one that it was made of."""
        outputs, inner = weight_of(replaced).shape
        return cls(layer, outputs, inner)

    @property
    def qweight(self) -> torch.Tensor:
        found: torch.Tensor = next(iter(self.layer.buffers()))
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return _passed_on(x.to(dtype), self.layer)


class _PassedOn(torch.autograd.Function):
    """Any linear layer with fixed weights W: the gradient to x is the gradient to y times W."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: WideningLayer) -> torch.Tensor:
        ctx.layer = layer
        return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ ctx.layer.widened(gradient.dtype), None


_passed_on = cast(Callable[[torch.Tensor, WideningLayer], torch.Tensor], _PassedOn.apply)

_PRODUCTS = {"optigpu": ("int8_linear", "triton_int8_linear", "int4_linear"), "bitsandbytes": ("gemm_4bit",)}
"""The operators of quantized layers. Their first argument is x, and they return y."""


def _count_products() -> None:
    """Makes torch's counters of operations know the operators that are loaded, which otherwise count as nothing."""
    for library, names in _PRODUCTS.items():
        operators = getattr(torch.ops, library)
        for operator in (getattr(operators, name) for name in names if hasattr(operators, name)):
            if operator not in flop_registry:
                register_flop_formula(operator)(_product_flops)


def _product_flops(x_shape: Sequence[int], *_: object, out_shape: Sequence[int], **_options: object) -> int:
    return 2 * math.prod(x_shape) * out_shape[-1]
