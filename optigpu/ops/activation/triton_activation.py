"""The kernels of fused_activation.py for CUDA, in Triton: one program for each block of each row.

Imported where a GPU is asked for alone: it loads torch and Triton. `torch.library.triton_op` lets torch.compile look
into the operators, so that their launches become part of its graph.
"""

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

BLOCK = 1024
"""Outputs of a program: 8 for each of the 128 threads of four warps."""


@triton_op("optigpu::triton_bias_gelu", mutates_args={})  # type: ignore[untyped-decorator, unused-ignore]
def triton_bias_gelu(x: torch.Tensor, bias: torch.Tensor | None, tanh: bool) -> torch.Tensor:
    """gelu(x + bias), [..., columns] in x's type. x and bias: float32, bfloat16 or float16."""
    x = x.contiguous()
    y = torch.empty_like(x)
    columns = x.shape[-1]
    if y.numel() == 0:
        return y
    blocks = triton.cdiv(columns, BLOCK)
    row = x if bias is None else bias.contiguous()
    wrap_triton(_bias_gelu_kernel)[(y.numel() // columns * blocks,)](
        x,
        row,
        y,
        columns,
        blocks,
        HAS_BIAS=bias is not None,
        ACTIVATION="gelu_tanh" if tanh else "gelu",
        BLOCK=BLOCK,
    )
    return y


@triton_op("optigpu::triton_swiglu", mutates_args={})  # type: ignore[untyped-decorator, unused-ignore]
def triton_swiglu(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) * up, [..., inner] in x's type, where x + bias = [gate | up]. Types as in `triton_bias_gelu`."""
    x = x.contiguous()
    inner = x.shape[-1] // 2
    y = x.new_empty((*x.shape[:-1], inner))
    if y.numel() == 0:
        return y
    blocks = triton.cdiv(inner, BLOCK)
    row = x if bias is None else bias.contiguous()
    wrap_triton(_swiglu_kernel)[(y.numel() // inner * blocks,)](
        x, row, y, inner, blocks, HAS_BIAS=bias is not None, BLOCK=BLOCK
    )
    return y


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _times_sigmoid(x: tl.tensor, s: tl.tensor):  # type: ignore[no-untyped-def, unused-ignore]
    """x / (1 + exp(-s)) through exp(-|s|), which cannot overflow and loses nothing where the result is small."""
    e = tl.exp(-tl.abs(s))
    return x * (tl.where(s < 0.0, e, 1.0) / (1.0 + e))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def activated(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def, unused-ignore]
    """gelu_tanh (x sigmoid(c1 x + c2 x^3)), gelu (x (1 + erf(x / sqrt(2))) / 2), silu, relu or none of them."""
    if ACTIVATION == "gelu_tanh":
        x = _times_sigmoid(x, x * (1.5957691216057308 + 0.07135481282749306 * x * x))
    elif ACTIVATION == "gelu":
        x = x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "silu":
        x = _times_sigmoid(x, x)
    elif ACTIVATION == "relu":
        x = tl.where(x < 0.0, 0.0, x)  # a maximum would lose NaN
    return x


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _bias_gelu_kernel(  # type: ignore[no-untyped-def, unused-ignore]
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


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _swiglu_kernel(  # type: ignore[no-untyped-def, unused-ignore]
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
