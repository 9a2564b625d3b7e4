"""int8_linear for CUDA, in Triton: the weights stay int8 in memory, and every sum is float32.

For the few rows of a decode step a program keeps them in registers and lets tiles of outputs stream past (ops/launch.py
says how many): each byte of weights is read once, sixteen with a load, and the next tile is on its way while one is
computed with. More rows go tile by tile through the matrix units, with the weights as the left operand, which is
widened in registers.

Imported only where a GPU is used, because it loads Triton. `torch.library.triton_op` lets torch.compile look
into the operator, so that its launch becomes part of its graph.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch.library import triton_op

from optigpu.ops.launch import (
    MOST_NUMBERS,
    MOST_ROWS,
    Example,
    KernelCall,
    LaunchTarget,
    divided,
    padded,
    without_memory,
)
from optigpu.ops.operands import type_name

WORD_BYTES = 4
SIGNS = tl.constexpr(-0x7F7F7F80)
"""0x80808080: turned, they make the bytes of a word 128 larger and unsigned."""
MANTISSA = tl.constexpr(0x4B000000)
"""float32 2^23, where float32 has no fractions: a byte in its last bits is added to it."""
MANTISSA_AND_128 = tl.constexpr(8388736.0)


def int8_call(
    x: torch.Tensor,
    numbers: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    target: LaunchTarget,
) -> KernelCall:
    """y = (x @ numbers.T) * scale + bias. y is contiguous and not empty."""
    outputs, inner = numbers.shape
    rows = y.numel() // outputs
    x, numbers = x.contiguous(), numbers.contiguous()
    # The kernels never read an absent bias, but need a pointer.
    others = (scale, scale if bias is None else bias, y, rows, outputs)
    if rows <= MOST_ROWS:
        launch = divided(padded(inner), padded(inner), outputs, int(rows), target)
        numbers_a_thread = launch.rows * padded(inner) // (32 * launch.warps)
        if launch.row_programs == 1 and numbers_a_thread <= MOST_NUMBERS:
            words = inner % WORD_BYTES == 0
            flags = {"INPUTS": inner, "PADDED": padded(inner), "WORDS": words, "BIAS": bias is not None}
            flags |= {"ROWS": launch.rows, "TILE": launch.tile}
            tensors = (x, numbers.view(torch.int32) if words else numbers)
            return KernelCall(_int8_gemv, (launch.programs,), (*tensors, *others), flags, launch.warps)
    is_float = x.dtype == torch.float32
    wide = not (is_float or target.matrix_units)
    tile_rows, tile_outputs, tile_inner, warps = _tile(rows, wide or is_float)
    tf32 = is_float and torch.get_float32_matmul_precision() != "highest"
    constants: dict[str, str | int] = {
        "BIAS": bias is not None,
        "WIDE": wide,
        "PRECISION": "tf32" if tf32 else "ieee",
        "OUTPUTS": tile_outputs,
        "ROWS": tile_rows,
        "INNER": tile_inner,
    }
    grid = (triton.cdiv(outputs, tile_outputs), triton.cdiv(rows, tile_rows))
    return KernelCall(_int8_gemm, grid, (x, numbers, *others, inner), constants, warps)


def _tile(rows: int, wide: bool) -> tuple[int, int, int, int]:
    """A program's rows, outputs, inputs at a time and warps, of a product of so many rows; `wide`: of float32 operands.

    Up to 16 rows the weights' bytes are what counts, as in decoding, and beyond them the products.
    """
    if wide:
        return (16, 64, 32, 4) if rows <= 16 else (64, 64, 32, 8)
    if rows <= 16:
        return 16, 32, 256, 4
    return (64, 64, 64, 4) if rows <= 64 else (128, 128, 64, 8)


def examples(target: LaunchTarget) -> Iterator[Example]:
    """Layers of an 8B model and of GPT-2, at batch 1 and with more rows, and one whose inputs are no multiple of 4."""
    scenes = (
        (1, torch.bfloat16, 4096, 4096, False),
        (4, torch.bfloat16, 4096, 4096, False),
        (1, torch.float16, 14336, 4096, False),
        (2, torch.float32, 768, 3072, True),
        (1, torch.float32, 770, 130, True),
        (16, torch.bfloat16, 4096, 4096, False),
        (64, torch.float16, 4096, 4096, False),
        (512, torch.bfloat16, 4096, 14336, False),
        (16, torch.float32, 768, 3072, True),
        (128, torch.float32, 768, 3072, True),
    )
    for rows, dtype, inner, outputs, biased in scenes:
        call = int8_call(
            without_memory(rows, inner, dtype=dtype),
            without_memory(outputs, inner, dtype=torch.int8),
            without_memory(outputs),
            without_memory(outputs) if biased else None,
            without_memory(rows, outputs, dtype=dtype),
            target,
        )
        name = f"{type_name(dtype)}, {inner} to {outputs}, {rows} row{'s' if rows > 1 else ''}"
        yield Example(name, call, spilled_bytes=16 if dtype == torch.float32 and rows > 16 else 0)


@triton.jit
def _inputs(
    x, row, rows, PLACE: tl.constexpr, EACH: tl.constexpr, INPUTS: tl.constexpr, PADDED: tl.constexpr
):
    """Every EACHth input from PLACE on, float32 [ROWS, 1, PADDED / EACH]."""
    column = EACH * tl.arange(0, PADDED // EACH)[None, :] + PLACE
    inside = (row < rows)[:, None] & (column < INPUTS)
    return tl.load(x + row[:, None] * INPUTS + column, mask=inside, other=0.0).to(tl.float32)[:, None, :]


@triton.jit
def _outputs(numbers, output, outputs, EACH: tl.constexpr, INPUTS: tl.constexpr, PADDED: tl.constexpr):
    """The numbers of some outputs as they are stored, [1, TILE, PADDED / EACH]; those beyond `outputs` are zero."""
    far = output.to(tl.int64)[None, :, None]  # a head can have more numbers than an int32 counts
    column = tl.arange(0, PADDED // EACH)[None, None, :]
    inside = (output < outputs)[None, :, None] & (column < INPUTS // EACH)
    return tl.load(numbers + far * (INPUTS // EACH) + column, mask=inside, other=0)


@triton.jit
def _number(turned, PLACE: tl.constexpr):
    """The number in byte PLACE of words whose SIGNS are turned, float32.

    Written into a mantissa by integer operations, because a multiprocessor has few units that convert.
    """
    bits = ((turned >> (8 * PLACE)) & 0xFF) | MANTISSA
    return bits.to(tl.float32, bitcast=True) - MANTISSA_AND_128


@triton.jit
def _int8_gemv(
    x,
    numbers,
    scale,
    bias,
    y,
    rows,
    outputs,
    INPUTS: tl.constexpr,
    PADDED: tl.constexpr,
    WORDS: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """numbers: int32 [outputs, INPUTS / 4] with WORDS, else int8 [outputs, INPUTS]."""
    EACH: tl.constexpr = 4 if WORDS else 1
    row = tl.arange(0, ROWS)
    start = tl.program_id(0) * TILE
    ahead = tl.num_programs(0) * TILE
    tile = _outputs(numbers, start + tl.arange(0, TILE), outputs, EACH, INPUTS, PADDED)
    x0 = _inputs(x, row, rows, 0, EACH, INPUTS, PADDED)
    x1, x2, x3 = x0, x0, x0
    if WORDS:
        x1 = _inputs(x, row, rows, 1, EACH, INPUTS, PADDED)
        x2 = _inputs(x, row, rows, 2, EACH, INPUTS, PADDED)
        x3 = _inputs(x, row, rows, 3, EACH, INPUTS, PADDED)
    for place in range(start, outputs, ahead):
        output = place + tl.arange(0, TILE)
        # Asked for before this tile is used.
        following = _outputs(numbers, output + ahead, outputs, EACH, INPUTS, PADDED)
        if WORDS:
            turned = tile ^ SIGNS
            found = _number(turned, 0) * x0
            found += _number(turned, 1) * x1
            found += _number(turned, 2) * x2
            found += _number(turned, 3) * x3
        else:
            found = tile.to(tl.float32) * x0
        known = output < outputs
        result = tl.sum(found, axis=2) * tl.load(scale + output, mask=known, other=0.0)[None, :]
        if BIAS:
            result += tl.load(bias + output, mask=known, other=0.0)[None, :]
        inside = (row < rows)[:, None] & known[None, :]
        to = y + row.to(tl.int64)[:, None] * outputs + output[None, :]
        tl.store(to, result.to(y.dtype.element_ty), mask=inside)
        tile = following


@triton.jit
def _int8_gemm(
    x,
    numbers,
    scale,
    bias,
    y,
    rows,
    outputs,
    inputs,
    BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
):
    """numbers: int8 [outputs, inputs]. The sums are y transposed, [OUTPUTS, ROWS]."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, INNER)
    known, asked = (output < outputs)[:, None], (row < rows)[None, :]
    from_numbers = numbers + output.to(tl.int64)[:, None] * inputs + column[None, :]
    from_x = x + row.to(tl.int64)[None, :] * inputs + column[:, None]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(0, inputs, INNER):
        inside = column < inputs - start
        tile = tl.load(from_numbers, mask=known & inside[None, :], other=0)
        values = tl.load(from_x, mask=inside[:, None] & asked, other=0.0)
        if WIDE:
            values = values.to(tl.float32)
        total = tl.dot(tile.to(values.dtype), values, total, input_precision=PRECISION)
        from_numbers += INNER
        from_x += INNER
    total *= tl.load(scale + output, mask=output < outputs, other=0.0)[:, None]
    if BIAS:
        total += tl.load(bias + output, mask=output < outputs, other=0.0)[:, None]
    to = y + row.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(to, total.to(y.dtype.element_ty), mask=known & asked)


# After the kernels: torch finds them when it registers an operator, and compiles again when they have changed.


@triton_op("optigpu::triton_int8_linear", mutates_args={})
def triton_int8_linear(
    x: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """y = (x @ numbers.T) * scale + bias, [..., outputs] in x's type.

    x: float32, bfloat16 or float16 [..., inner]; numbers: int8 [outputs, inner]; scale and bias: float32 [outputs].
    """
    y = x.new_empty((*x.shape[:-1], numbers.shape[0]))
    if y.numel():
        int8_call(x, numbers, scale, bias, y, LaunchTarget.of(x.device)).run_traced()
    return y
