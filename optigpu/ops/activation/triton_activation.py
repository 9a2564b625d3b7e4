"""The kernels of fused_activation.py for CUDA, in Triton: one program for each block of each row.

Imported only where a GPU is used, because it loads Triton. `torch.library.triton_op` lets torch.compile look
into the operators, so that their launches become part of its graph.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch.library import triton_op

from optigpu.ops.launch import Example, KernelCall, LaunchTarget, without_memory
from optigpu.ops.operands import type_name

BLOCK = 1024
"""Outputs of a program: 8 for each of the 128 threads of four warps."""


def gelu_call(x: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, tanh: bool) -> KernelCall:
    """y = gelu(x + bias). x is contiguous and not empty."""
    columns = x.shape[-1]
    blocks = triton.cdiv(columns, BLOCK)
    row = x if bias is None else bias.contiguous()
    constants: dict[str, str | int] = {
        "HAS_BIAS": bias is not None,
        "ACTIVATION": "gelu_tanh" if tanh else "gelu",
        "BLOCK": BLOCK,
    }
    grid = (y.numel() // columns * blocks,)
    return KernelCall(_bias_gelu_kernel, grid, (x, row, y, columns, blocks), constants)


def swiglu_call(x: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> KernelCall:
    """y = silu(gate) * up, where x + bias = [gate | up]. x is contiguous, and y is not empty."""
    inner = y.shape[-1]
    blocks = triton.cdiv(inner, BLOCK)
    row = x if bias is None else bias.contiguous()
    constants = {"HAS_BIAS": bias is not None, "BLOCK": BLOCK}
    grid = (y.numel() // inner * blocks,)
    return KernelCall(_swiglu_kernel, grid, (x, row, y, inner, blocks), constants)


def examples(target: LaunchTarget) -> Iterator[Example]:  # noqa: ARG001 - a block is a program on every GPU
    """The activations of GPT-2 and of an 8B model."""
    for dtype, tanh in ((torch.float32, False), (torch.bfloat16, True)):
        x, bias = without_memory(2, 3072, dtype=dtype), without_memory(3072, dtype=dtype)
        name = f"{'tanh' if tanh else 'erf'}, {type_name(dtype)}, 3072"
        yield Example(name, gelu_call(x, bias, x, tanh))
    for dtype in (torch.float16, torch.bfloat16):
        x, y = without_memory(2, 28672, dtype=dtype), without_memory(2, 14336, dtype=dtype)
        name = f"{type_name(dtype)}, 14336"
        yield Example(name, swiglu_call(x, None, y))


@triton.jit
def _times_sigmoid(x: tl.tensor, s: tl.tensor):
    """x / (1 + exp(-s)) through exp(-|s|), which cannot overflow and loses nothing where the result is small."""
    e = tl.exp(-tl.abs(s))
    return x * (tl.where(s < 0.0, e, 1.0) / (1.0 + e))


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """gelu_tanh (x sigmoid(c1 x + c2 x^3)), gelu (x (1 + erf(x / sqrt(2))) / 2), silu, relu, relu2 or none of them."""
    if ACTIVATION == "gelu_tanh":
        x = _times_sigmoid(x, x * (1.5957691216057308 + 0.07135481282749306 * x * x))
    elif ACTIVATION == "gelu":
        x = x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "silu":
        x = _times_sigmoid(x, x)
    elif ACTIVATION == "relu":
        x = tl.where(x < 0.0, 0.0, x)  # a maximum would lose NaN
    elif ACTIVATION == "relu2":
        x = tl.where(x < 0.0, 0.0, x * x)
    return x


@triton.jit
def gated(gate, up, ACTIVATION, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """activated(gate) * up, or with a LIMIT what Mixture.clamp says; NaN stays."""
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        result = _times_sigmoid(gate, ALPHA * gate) * (up + 1.0)
    else:
        result = activated(gate, ACTIVATION) * up
    return result


@triton.jit
def _bias_gelu_kernel(
    x: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    columns: tl.tensor,
    blocks: tl.tensor,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    value = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * columns + column, activated(value, ACTIVATION), mask=inside)


@triton.jit
def _swiglu_kernel(
    x: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    inner: tl.tensor,
    blocks: tl.tensor,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    start = x + row * 2 * inner + column
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + inner, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        gate += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + inner + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * inner + column, activated(gate, "silu") * up, mask=inside)


# After the kernels: torch finds them when it registers an operator, and compiles again when they have changed.


@triton_op("optigpu::triton_bias_gelu", mutates_args={})
def triton_bias_gelu(x: torch.Tensor, bias: torch.Tensor | None, tanh: bool) -> torch.Tensor:
    """gelu(x + bias), [..., columns] in x's type. x and bias: float32, bfloat16 or float16."""
    x = x.contiguous()
    y = torch.empty_like(x)
    if y.numel():
        gelu_call(x, bias, y, tanh).run_traced()
    return y


@triton_op("optigpu::triton_swiglu", mutates_args={})
def triton_swiglu(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) * up, [..., inner] in x's type, where x + bias = [gate | up]. Types as in `triton_bias_gelu`."""
    x = x.contiguous()
    y = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    if y.numel():
        swiglu_call(x, bias, y).run_traced()
    return y
