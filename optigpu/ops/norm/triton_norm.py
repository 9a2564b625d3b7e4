"""The norms of fused_norm.py as a Triton kernel: one program for each row, which it reads once and writes once.

Imported only where a GPU is used, because it loads Triton. `torch.library.triton_op` lets torch.compile look
into the operators, so that their launches become part of its graph.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch.library import triton_op

from optigpu.ops.launch import Argument, Example, KernelCall, LaunchTarget, without_memory
from optigpu.ops.operands import type_name

ELEMENTS_A_WARP = 512
"""How many elements of a row one warp of 32 threads takes: 16 for each thread, in two 16-byte loads of a half."""
LARGEST_WARPS = 16


def triton_add_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    is_rms: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and that sum; x itself as the sum where there is no residual.

    x and residual: [..., width]; weight and bias: [width]; all of one type: float32, bfloat16 or float16.
    """
    if residual is None:
        return triton_norm(x, weight, bias, eps, is_rms), x
    normed, summed = triton_add_norm_pair(x, residual, weight, bias, eps, is_rms)
    return normed, summed


def norm_call(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    normed: torch.Tensor,
    summed: torch.Tensor | None,
    eps: float,
    is_rms: bool,
) -> KernelCall:
    """The norm of x's rows, with `summed` that of x + residual. x is not empty."""
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    # The kernel never reads an absent tensor, but needs a pointer.
    others = [x if each is None else each.contiguous() for each in (residual, weight, bias)]
    found = (normed, normed if summed is None else summed)
    arguments: tuple[Argument, ...] = (x.contiguous(), *others, *found, width, eps)
    constants = {
        "HAS_RESIDUAL": residual is not None,
        "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None,
        "IS_RMS": is_rms,
        "BLOCK": block,
    }
    warps = min(LARGEST_WARPS, max(1, block // ELEMENTS_A_WARP))
    return KernelCall(_norm_row, (x.numel() // width,), arguments, constants, warps)


def examples(target: LaunchTarget) -> Iterator[Example]:  # noqa: ARG001 - a row is a program on every GPU
    """The norms of GPT-2 and of an 8B model, and the longest row."""
    scenes = (
        ("layer", torch.float32, 768, True),
        ("rms", torch.bfloat16, 4096, True),
        ("rms", torch.float16, 4096, False),
        ("layer", torch.float32, 2**15, True),
    )
    for kind, dtype, width, added in scenes:
        x, row = without_memory(2, width, dtype=dtype), without_memory(width, dtype=dtype)
        residual, bias = x if added else None, row if kind == "layer" else None
        call = norm_call(x, residual, row, bias, x, x if added else None, 1e-5, kind == "rms")
        # The longest row fills the 128 registers that 512 threads have each.
        yield Example(f"{kind}, {type_name(dtype)}, {width}", call, spilled_bytes=32 if width == 2**15 else 0)


@triton.jit
def _norm_row(
    x,
    residual,
    weight,
    bias,
    normed,
    summed,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_RMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + start + column, mask=inside, other=0.0).to(tl.float32)
        stored = values.to(summed.dtype.element_ty)
        tl.store(summed + start + column, stored, mask=inside)
        values = stored.to(tl.float32)  # the norm is that of the sum as it is stored
    if not IS_RMS:
        # As in fused_norm.h: the second round takes away what the first one's own rounding left of a large mean.
        values = tl.where(inside, values - tl.sum(values, axis=0) / width, 0.0)
        values = tl.where(inside, values - tl.sum(values, axis=0) / width, 0.0)
    variance = tl.sum(values * values, axis=0) / width
    values = values / tl.sqrt(variance + eps)
    if HAS_WEIGHT:
        values *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        values += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + start + column, values.to(normed.dtype.element_ty), mask=inside)


# After the kernels: torch finds them when it registers an operator, and compiles again when they have changed.


@triton_op("optigpu::triton_norm", mutates_args={})
def triton_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, is_rms: bool
) -> torch.Tensor:
    """The norm of x's rows, [..., width]."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        norm_call(x, None, weight, bias, normed, None, eps, is_rms).run_traced()
    return normed


@triton_op("optigpu::triton_add_norm", mutates_args={})
def triton_add_norm_pair(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    is_rms: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and that sum, both [..., width]."""
    normed, summed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if x.numel():
        norm_call(x, residual, weight, bias, normed, summed, eps, is_rms).run_traced()
    return normed, summed
