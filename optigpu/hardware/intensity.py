"""Whether memory or compute bounds a kernel by the roofline, from the operator that it belongs to.

Source: Williams, Waterman, Patterson, Roofline, CACM 52(4), 2009.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optigpu.documents.peaks import Bound
from optigpu.vocabulary import DeviceKind

RIDGE_FLOP_PER_BYTE: Mapping[DeviceKind, float] = {
    device: 10.0 if device is DeviceKind.CPU else 100.0 for device in DeviceKind
}
"""Round figures between the ridges of datasheets: some 5 to 20 for CPUs with AVX2 and AVX-512 in fp32, 80 to 300 for
GPUs with tensor cores. Decoding lies far below, a long prefill far above."""

BOUND_RULE = (
    "An operator is memory-bound below the device's ridge and compute-bound above it. FLOPs are the profiler's; where "
    "it has none, 2 x rows x weights for a product, the same for each pixel of a convolution (as if at stride 1), "
    "4 x queries x keys x channels for attention. Bytes are those of the inputs; where their types are unknown, the "
    "bound must be the same for 4-bit numbers and for float64. torch's other operators do a few operations for each "
    "element and are memory-bound. A kernel without an operator is classified by its name; the rest is unknown."
)

NARROWEST_BYTES, WIDEST_BYTES = 0.5, 8
"""Of an element whose type is unknown: 4 bits, and float64."""

GLUE = frozenset(
    {
        *("aten::alias", "aten::as_strided", "aten::chunk", "aten::detach", "aten::detach_", "aten::expand"),
        *("aten::expand_as", "aten::flatten", "aten::lift_fresh", "aten::movedim", "aten::narrow"),
        *("aten::permute", "aten::reshape", "aten::_reshape_alias", "aten::resolve_conj"),
        *("aten::resolve_neg", "aten::result_type", "aten::select", "aten::slice", "aten::split"),
        *("aten::split_with_sizes", "aten::squeeze", "aten::t", "aten::transpose", "aten::unbind"),
        *("aten::unflatten", "aten::unfold", "aten::unsqueeze", "aten::_unsafe_view", "aten::view"),
        *("aten::view_as", "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"),
        *("aten::resize_", "aten::new_empty_strided", "aten::ones", "aten::zeros", "aten::full"),
        *("aten::arange", "aten::linear", "aten::matmul", "aten::scaled_dot_product_attention"),
        *("aten::conv2d", "aten::convolution", "aten::_convolution", "aten::layer_norm"),
        *("aten::batch_norm", "aten::embedding", "aten::softmax", "aten::dropout", "aten::to"),
        *("aten::_to_copy", "aten::contiguous", "aten::clone", "aten::item", "aten::is_nonzero"),
    }
)
"""Operators that only change a view, allocate, or call other operators: on a CPU they run no kernels."""


@dataclass(frozen=True)
class Operator:
    """One call in a profile. `shapes` and `item_bytes` (None if unknown) are those of its tensor inputs."""

    name: str
    shapes: tuple[tuple[int, ...], ...] = ()
    item_bytes: tuple[int | None, ...] = ()
    flops: int = 0

    @property
    def elements(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def input_bytes(self) -> int | None:
        """Bytes of all inputs; None if an element type is unknown."""
        sizes = [size for size in self.item_bytes if size is not None]
        if len(sizes) < len(self.shapes):
            return None
        return sum(count * size for count, size in zip(self.elements, sizes, strict=True))


def bound_of(operator: Operator, device: DeviceKind) -> Bound | None:
    """Memory or compute; None if unknown."""
    if not _is_heavy(operator.name):
        return Bound.MEMORY if operator.name.startswith("aten::") else None
    flops, count, ridge = flops_of(operator), sum(operator.elements), RIDGE_FLOP_PER_BYTE[device]
    if not flops or not count:
        return None
    size = operator.input_bytes
    least, most = (size, size) if size else (count * NARROWEST_BYTES, count * WIDEST_BYTES)
    if flops / most > ridge:
        return Bound.COMPUTE
    return Bound.MEMORY if flops / least <= ridge else None


def flops_of(operator: Operator) -> int:
    """The profiler's count, or for a product, a convolution or attention one from the shapes; 0 where unknown."""
    return operator.flops or (_flops(operator) if _is_heavy(operator.name) else 0)


def bound_of_kernel(name: str) -> Bound | None:
    """The bound of a kernel without an operator: memory if its name says that it streams data, else None."""
    return Bound.MEMORY if _STREAMING.search(name) else None


_PRODUCT = re.compile(r"mm(_|$)|linear|matmul|gem[mv]|addmv|(^|[:_])mv$|(^|[:_])dot$|einsum")
_CONVOLUTION = re.compile(r"conv")
_ATTENTION = re.compile(r"attention|flash|fmha")
_STREAMING = re.compile(
    r"elementwise|reduce|norm|softmax|copy|memcpy|memset|index|gather|scatter|CatArray|fill|gemv|embedding"
    r"|triton_(poi|red|per)_",
    re.IGNORECASE,
)


def _is_heavy(name: str) -> bool:
    return any(family.search(name) for family in (_PRODUCT, _CONVOLUTION, _ATTENTION))


def _flops(operator: Operator) -> int:
    """An estimate of the operations from the shapes; 0 if they do not fit the kind of operator."""
    shapes = operator.shapes
    if len(shapes) < 2 or not shapes[0]:
        return 0
    if _ATTENTION.search(operator.name):
        # The inner functions on CUDA have [batch, length, heads, channels], all others heads before length.
        length = -3 if "attention_forward" in operator.name else -2
        return 4 * operator.elements[0] * shapes[1][length] if len(shapes[1]) == 4 else 0
    if _CONVOLUTION.search(operator.name):
        pixels = operator.elements[0] // shapes[0][1] if len(shapes[0]) > 2 else 0
        return 2 * pixels * operator.elements[1]
    # Of the largest other input; two 4-bit weights share a byte.
    largest = max(range(1, len(shapes)), key=lambda index: operator.elements[index])
    weights = operator.elements[largest]
    if "int4" in operator.name or "4bit" in operator.name:
        weights *= 2 * (operator.item_bytes[largest] or 0)
    return 2 * math.prod(shapes[0][:-1]) * weights


TABLE_ROWS = 20


@dataclass(frozen=True)
class Kernel:
    """One that ran: an operator's own time on a CPU, a kernel on a GPU.

    `weight` is how many equal kernels of the request it represents, `in_steps` whether it is part of a decode step.
    `read_bytes` of its inputs and `flops` are None where the profiler does not tell them.
    """

    name: str
    seconds: float
    bound: Bound | None
    weight: float
    in_steps: bool
    read_bytes: int | None = None
    flops: int | None = None


def table(kernels: Sequence[Kernel]) -> list[dict[str, Any]]:
    """Those that take the most time: calls and seconds as recorded, the share of the whole request's kernel time."""
    groups: dict[tuple[str, Bound | None], list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault((kernel.name, kernel.bound), []).append(kernel)
    total_s = _seconds(kernels)
    largest = sorted(groups.items(), key=lambda group: -_seconds(group[1]))[:TABLE_ROWS]
    return [
        {
            "name": name,
            "calls": len(group),
            "self_s": sum(kernel.seconds for kernel in group),
            "share": _seconds(group) / total_s,
            "bound": bound,
        }
        for (name, bound), group in largest
    ]


def share(kernels: Sequence[Kernel], bound: Bound | None) -> float:
    """The share of the request's kernel time that `bound` bounds, None for what is not known."""
    return _seconds([kernel for kernel in kernels if kernel.bound is bound]) / _seconds(kernels)


def _seconds(kernels: Sequence[Kernel]) -> float:
    return sum(kernel.seconds * kernel.weight for kernel in kernels)
